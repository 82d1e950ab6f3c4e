//! The way back to the guest: one descriptor per ring, written to interrupt.

use std::fs::File;
use std::io::Write as _;
use std::sync::{PoisonError, RwLock};

use crate::virtio::Interrupt;

/// What a ring signals through. Either may be missing: then nobody wants to know.
#[derive(Debug, Default)]
struct Lines {
    call: Option<File>,
    err: Option<File>,
}

/// The call and error descriptors of all rings. The front-end may swap them at any time.
#[derive(Debug)]
pub(super) struct Calls {
    rings: Vec<RwLock<Lines>>,
}

impl Calls {
    pub(super) fn new(rings: usize) -> Self {
        Self {
            rings: (0..rings).map(|_| RwLock::default()).collect(),
        }
    }

    pub(super) fn set_call(&self, ring: usize, file: Option<File>) {
        self.update(ring, |lines| lines.call = file);
    }

    pub(super) fn set_err(&self, ring: usize, file: Option<File>) {
        self.update(ring, |lines| lines.err = file);
    }

    pub(super) fn clear(&self) {
        for ring in 0..self.rings.len() {
            self.update(ring, |lines| *lines = Lines::default());
        }
    }

    fn update(&self, ring: usize, change: impl FnOnce(&mut Lines)) {
        if let Some(lines) = self.rings.get(ring) {
            change(&mut lines.write().unwrap_or_else(PoisonError::into_inner));
        }
    }
}

/// Adds one to an eventfd. User Mode Linux passes a pipe instead, which takes the same bytes.
///
/// The only failure of a live descriptor is that it is full: then the guest has been told already.
fn ring(line: Option<&File>) {
    if let Some(mut line) = line {
        let _ = line.write(&1u64.to_ne_bytes());
    }
}

impl Interrupt for Calls {
    fn signal_queue(&self, index: u16) {
        if let Some(lines) = self.rings.get(usize::from(index)) {
            let lines = lines.read().unwrap_or_else(PoisonError::into_inner);
            ring(lines.call.as_ref());
        }
    }

    fn signal_config(&self) {
        // VHOST_USER_BACKEND_CONFIG_CHANGE_MSG; our configuration does not change.
    }

    fn needs_reset(&self) {
        for lines in &self.rings {
            let lines = lines.read().unwrap_or_else(PoisonError::into_inner);
            ring(lines.err.as_ref());
        }
    }
}
