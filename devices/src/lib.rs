//! The devices of wonton: virtqueues, transports and the network card.
//!
//! `devices` knows virtio and guest memory. It does not know KVM: interrupts and doorbells reach it
//! as event descriptors that the VMM wires up.
//!
//! ```text
//!   vCPU exit --Bus--> MmioTransport, or RootBus --> PciTransport --DRIVER_OK--> Net::activate
//!   doorbell (ioeventfd) --> worker --> NetEngine::process_tx --> Backend::transmit
//!   Backend::receive --> RxBurst --> used ring --> Interrupt (irqfd)
//! ```

pub mod bus;
pub mod net;
pub mod pci;
pub mod power;
pub mod serial;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod vhost_user;
pub mod virtio;
