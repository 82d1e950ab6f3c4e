//! The devices of wonton: virtqueues, transports and the network card.
//!
//! `devices` knows virtio and guest memory. It does not know KVM: interrupts and doorbells reach it
//! as event descriptors that the VMM wires up.

pub mod bus;
pub mod virtio;
