//! A hypervisor that remembers what is attached to it.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vmm_sys_util::eventfd::EventFd;

use crate::pci::{MsiMessage, PciHost};

/// What a function attached.
#[derive(Default)]
pub struct Attached {
    /// Messages by vector, each with its event.
    pub msi: BTreeMap<u16, (MsiMessage, EventFd)>,
    /// Doorbells by address.
    pub doorbells: BTreeMap<u64, EventFd>,
    /// Whether messages are refused from now on.
    pub refuse: bool,
}

impl Attached {
    /// The messages that were sent since the last call: those whose event was written.
    pub fn sent(&self) -> Vec<MsiMessage> {
        let written = |(_, event): &&(_, EventFd)| event.read().is_ok();
        self.msi.values().filter(written).map(|(m, _)| *m).collect()
    }
}

/// A [`PciHost`] for tests; clones share what is attached.
#[derive(Clone, Default)]
pub struct MockPciHost(Arc<Mutex<Attached>>);

impl MockPciHost {
    /// What is attached now.
    pub fn attached(&self) -> MutexGuard<'_, Attached> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn taken() -> io::Error {
    io::ErrorKind::AlreadyExists.into()
}

impl PciHost for MockPciHost {
    fn attach_msi(&mut self, vector: u16, event: &EventFd, message: MsiMessage) -> io::Result<()> {
        let mut all = self.attached();
        if all.refuse {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        match all.msi.insert(vector, (message, event.try_clone()?)) {
            None => Ok(()),
            Some(_) => Err(taken()),
        }
    }

    fn detach_msi(&mut self, vector: u16, _event: &EventFd) -> io::Result<()> {
        let old = self.attached().msi.remove(&vector);
        old.map(drop).ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn attach_doorbell(&mut self, address: u64, event: &EventFd) -> io::Result<()> {
        match self
            .attached()
            .doorbells
            .insert(address, event.try_clone()?)
        {
            None => Ok(()),
            Some(_) => Err(taken()),
        }
    }

    fn detach_doorbell(&mut self, address: u64, _event: &EventFd) -> io::Result<()> {
        let old = self.attached().doorbells.remove(&address);
        old.map(drop).ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}
