//! Device 0: the host bridge. It does nothing; systems look for one to tell that there is a bus.

use crate::pci::PciFunction;
use crate::pci::config::{ConfigSpace, Identity};

/// The generic host bridge of virtual machines, to which no system applies a quirk.
const ID: Identity = Identity {
    vendor: 0x1b36,
    device: 0x0008,
    revision: 0,
    class: 0x06_00_00,
    subsystem_vendor: 0,
    subsystem: 0,
};

/// The host bridge.
#[derive(Debug)]
pub struct HostBridge(ConfigSpace);

impl Default for HostBridge {
    fn default() -> Self {
        Self(ConfigSpace::new(&ID))
    }
}

impl PciFunction for HostBridge {
    fn read_config(&mut self, offset: u8, data: &mut [u8]) {
        self.0.read(offset, data);
    }

    fn write_config(&mut self, offset: u8, data: &[u8]) {
        self.0.write(offset, data);
    }
}
