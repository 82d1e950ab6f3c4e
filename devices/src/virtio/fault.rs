//! What a driver can do wrong on a virtqueue.

use crate::virtio::chain::Access;

/// The driver broke the specification. The device stops and asks for a reset.
#[derive(Debug, thiserror::Error)]
pub enum DriverFault {
    /// More buffers were announced than the ring has entries.
    #[error("avail idx {idx} is more than {size} ahead of {next}")]
    AvailJump {
        /// `idx` as the driver wrote it.
        idx: u16,
        /// The entry that the device would take next.
        next: u16,
        /// Size of the queue.
        size: u16,
    },
    /// A descriptor index lies outside its table.
    #[error("descriptor {index} is outside a table of {size}")]
    Index {
        /// The index.
        index: u16,
        /// Number of descriptors in the table.
        size: u16,
    },
    /// A chain has more descriptors than it may have; a loop looks like that.
    #[error("the chain at {head} loops or is longer than {limit} descriptors")]
    Loop {
        /// First descriptor of the chain.
        head: u16,
        /// The number of descriptors allowed.
        limit: u16,
    },
    /// An indirect table that is nested, chained, empty, odd in size, or was not negotiated.
    #[error("bad indirect table at descriptor {index}: {why}")]
    Indirect {
        /// The descriptor that names the table.
        index: u16,
        /// What is wrong with it.
        why: &'static str,
    },
    /// A buffer lies outside guest RAM.
    #[error("buffer {addr:#x}+{len:#x} is not in guest memory")]
    Buffer {
        /// Guest address.
        addr: u64,
        /// Length in bytes.
        len: u32,
    },
    /// A buffer has the wrong direction for its queue.
    #[error("descriptor {index} is not device-{wanted}")]
    Direction {
        /// The descriptor.
        index: u16,
        /// What the queue needs.
        wanted: Access,
    },
    /// A chain is too short for the header that it must hold.
    #[error("a chain of {len} bytes cannot hold a header of {need}")]
    TooShort {
        /// Length of the chain in bytes.
        len: usize,
        /// Length of the header in bytes.
        need: usize,
    },
    /// The ring itself cannot be accessed.
    #[error("cannot access the ring: {0}")]
    Ring(#[from] virtio_queue::Error),
    /// The ring, or a descriptor table, is not in guest memory.
    #[error("cannot access a descriptor table: {0}")]
    Memory(#[from] vm_memory::GuestMemoryError),
}
