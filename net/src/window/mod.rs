//! Where bytes for the guest wait until the guest has acknowledged them.

pub mod ring;

pub use ring::Ring;
