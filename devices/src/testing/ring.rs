//! The driver's side of one split virtqueue.

use std::sync::atomic::Ordering;

use virtio_queue::desc::split::Descriptor;
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

/// `VIRTQ_DESC_F_NEXT`.
pub const DESC_F_NEXT: u16 = 1;
/// `VIRTQ_DESC_F_WRITE`.
pub const DESC_F_WRITE: u16 = 2;
/// `VIRTQ_DESC_F_INDIRECT`.
pub const DESC_F_INDIRECT: u16 = 4;

/// A piece of guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// Guest address.
    pub addr: u64,
    /// Length in bytes.
    pub len: u32,
}

/// A virtqueue as its driver sees it. Nothing is checked: a test may lie.
#[derive(Debug)]
pub struct MockRing {
    mem: GuestMemoryMmap,
    /// Address of the descriptor table.
    pub desc: u64,
    /// Address of the available ring.
    pub avail: u64,
    /// Address of the used ring.
    pub used: u64,
    /// Number of entries.
    pub size: u16,
    free: Vec<u16>,
    /// Per head: the descriptors of its chain.
    chains: Vec<Vec<u16>>,
    avail_idx: u16,
    used_idx: u16,
}

impl MockRing {
    /// Bytes of memory that a ring of `size` takes.
    pub fn footprint(size: u16) -> u64 {
        (u64::from(size) * 26 + 16).next_multiple_of(4096)
    }

    /// An empty ring at `base`.
    pub fn new(mem: GuestMemoryMmap, base: u64, size: u16) -> Self {
        let avail = base + 16 * u64::from(size);
        let used = (avail + 6 + 2 * u64::from(size)).next_multiple_of(4);
        let zeroes = vec![0; usize::try_from(Self::footprint(size)).unwrap()];
        mem.write_slice(&zeroes, GuestAddress(base)).unwrap();
        Self {
            mem,
            desc: base,
            avail,
            used,
            size,
            free: (0..size).rev().collect(),
            chains: vec![Vec::new(); size.into()],
            avail_idx: 0,
            used_idx: 0,
        }
    }

    /// Addresses of the descriptor table, the available and the used ring.
    pub fn addresses(&self) -> [u64; 3] {
        [self.desc, self.avail, self.used]
    }

    /// The device's view of the ring, as a transport would build it.
    pub fn queue(&self, event_idx: bool) -> Queue {
        let mut queue = Queue::new(self.size).unwrap();
        queue.set_size(self.size);
        queue
            .try_set_desc_table_address(GuestAddress(self.desc))
            .unwrap();
        queue
            .try_set_avail_ring_address(GuestAddress(self.avail))
            .unwrap();
        queue
            .try_set_used_ring_address(GuestAddress(self.used))
            .unwrap();
        queue.set_event_idx(event_idx);
        queue.set_ready(true);
        assert!(queue.is_valid(&self.mem));
        queue
    }

    /// Number of unused descriptors.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Writes descriptor `index` of the table.
    pub fn set_desc(&self, index: u16, buffer: Buffer, flags: u16, next: u16) {
        self.set_desc_at(self.desc, index, buffer, flags, next);
    }

    /// Writes descriptor `index` of the (indirect) table at `table`.
    pub fn set_desc_at(&self, table: u64, index: u16, buffer: Buffer, flags: u16, next: u16) {
        let desc = Descriptor::new(buffer.addr, buffer.len, flags, next);
        let at = GuestAddress(table + 16 * u64::from(index));
        self.mem.write_obj(desc, at).unwrap();
    }

    /// Makes a chain of `buffers`, with `flags` on each; its head, unless there is no room.
    pub fn add(&mut self, buffers: &[Buffer], flags: u16) -> Option<u16> {
        self.add_with(buffers, |_| flags)
    }

    /// As [`Self::add`], with the flags that `flags` has for each buffer.
    pub fn add_with(&mut self, buffers: &[Buffer], flags: impl Fn(usize) -> u16) -> Option<u16> {
        if buffers.is_empty() || buffers.len() > self.free.len() {
            return None;
        }
        let chain = self.free.split_off(self.free.len() - buffers.len());
        for (i, (&index, &buffer)) in chain.iter().zip(buffers).enumerate() {
            match chain.get(i + 1) {
                Some(&next) => self.set_desc(index, buffer, flags(i) | DESC_F_NEXT, next),
                None => self.set_desc(index, buffer, flags(i), 0),
            }
        }
        let head = chain[0];
        self.chains[usize::from(head)] = chain;
        self.make_available(head);
        Some(head)
    }

    /// As [`Self::add`], through an indirect table at `table`.
    pub fn add_indirect(&mut self, table: u64, buffers: &[Buffer], flags: u16) -> Option<u16> {
        let count = u16::try_from(buffers.len()).unwrap();
        for (index, &buffer) in (0..count).zip(buffers) {
            let next = if index + 1 < count { DESC_F_NEXT } else { 0 };
            self.set_desc_at(table, index, buffer, flags | next, index + 1);
        }
        let len = 16 * u32::from(count);
        self.add_table(Buffer { addr: table, len })
    }

    /// Makes the indirect table `table`, already written, available.
    pub fn add_table(&mut self, table: Buffer) -> Option<u16> {
        let head = self.free.pop()?;
        self.set_desc(head, table, DESC_F_INDIRECT, 0);
        self.chains[usize::from(head)] = vec![head];
        self.make_available(head);
        Some(head)
    }

    /// Puts `head` into the available ring.
    pub fn make_available(&mut self, head: u16) {
        let slot = self.avail + 4 + 2 * u64::from(self.avail_idx % self.size);
        self.mem.write_obj(head, GuestAddress(slot)).unwrap();
        self.set_avail_idx(self.avail_idx.wrapping_add(1));
    }

    /// The head in entry `slot` of the available ring.
    pub fn avail_head(&self, slot: u16) -> u16 {
        let at = self.avail + 4 + 2 * u64::from(slot);
        self.mem.read_obj(GuestAddress(at)).unwrap()
    }

    /// Moves the available index.
    pub fn set_avail_idx(&mut self, idx: u16) {
        self.avail_idx = idx;
        let at = GuestAddress(self.avail + 2);
        self.mem.store(idx, at, Ordering::Release).unwrap();
    }

    /// The available index.
    pub fn avail_idx(&self) -> u16 {
        self.avail_idx
    }

    /// Takes the next used element: head of the chain and bytes written.
    pub fn pop_used(&mut self) -> Option<(u16, u32)> {
        if self.device_idx() == self.used_idx {
            return None;
        }
        let slot = self.used + 4 + 8 * u64::from(self.used_idx % self.size);
        let [id, len]: [u32; 2] = self.mem.read_obj(GuestAddress(slot)).unwrap();
        self.used_idx = self.used_idx.wrapping_add(1);
        let head = u16::try_from(id).expect("used id is a descriptor index");
        let chain = std::mem::take(&mut self.chains[usize::from(head)]);
        assert!(!chain.is_empty(), "the device returned chain {head} twice");
        self.free.extend(chain);
        Some((head, len))
    }

    /// `idx` of the used ring.
    pub fn device_idx(&self) -> u16 {
        let at = GuestAddress(self.used + 2);
        self.mem.load(at, Ordering::Acquire).unwrap()
    }

    /// Sets `used_event`: interrupt when the used index moves past it.
    pub fn set_used_event(&self, value: u16) {
        let at = self.avail + 4 + 2 * u64::from(self.size);
        self.mem.write_obj(value, GuestAddress(at)).unwrap();
    }

    /// Sets `flags` of the available ring.
    pub fn set_avail_flags(&self, value: u16) {
        self.mem.write_obj(value, GuestAddress(self.avail)).unwrap();
    }

    /// `avail_event`: notify when the available index moves past it.
    pub fn avail_event(&self) -> u16 {
        let at = self.used + 4 + 8 * u64::from(self.size);
        self.mem.read_obj(GuestAddress(at)).unwrap()
    }

    /// `flags` of the used ring: 1 when the device wants no notifications.
    pub fn used_flags(&self) -> u16 {
        self.mem.read_obj(GuestAddress(self.used)).unwrap()
    }
}
