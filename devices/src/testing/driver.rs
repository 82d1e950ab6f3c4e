//! The driver's side of a network card.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use net::nic::{Backend, VnetHdr};
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace, GuestMemoryMmap};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::net::Counters;
use crate::net::MAX_QUEUE_PAIRS;
use crate::net::engine::{NetEngine, NetParts};
use crate::net::features::accepted_offloads;
use crate::testing::heap::Heap;
use crate::testing::ring::{Buffer, DESC_F_WRITE, MockRing};
use crate::virtio::spec::{F_EVENT_IDX, NET_F_CTRL_VQ, NET_HDR_LEN};
use crate::virtio::{Activation, ActiveQueue, GuestRam, Interrupt};

/// Size of the mock driver's control queue.
pub const CTRL_QUEUE_SIZE: u16 = 64;

pub(crate) const RAM_LEN: u64 = 64 << 20;
const RX_BASE: u64 = 0x10_0000;
const TX_BASE: u64 = 0x20_0000;
const CTRL_BASE: u64 = 0x30_0000;
pub(super) const HEAP_BASE: u64 = 0x40_0000;
/// RAM comes in two regions, so that buffers happen to lie across their border.
pub(crate) const REGION_BORDER: u64 = HEAP_BASE + 0x1_0400;

/// Counts what the device tells its driver.
#[derive(Debug, Default)]
pub struct MockInterrupt {
    /// Interrupts of the RX, the TX and the control queue.
    pub queues: [AtomicU64; 2 * MAX_QUEUE_PAIRS as usize + 1],
    /// Configuration changes.
    pub config: AtomicU64,
    /// Times that DEVICE_NEEDS_RESET was set.
    pub resets: AtomicU64,
}

impl MockInterrupt {
    /// True when the device asked for a reset.
    pub fn wants_reset(&self) -> bool {
        self.resets.load(Ordering::Acquire) > 0
    }

    /// Interrupts of queue `index` so far.
    pub fn queue(&self, index: usize) -> u64 {
        self.queues[index].load(Ordering::Acquire)
    }
}

impl Interrupt for MockInterrupt {
    fn signal_queue(&self, index: u16) {
        self.queues[usize::from(index)].fetch_add(1, Ordering::AcqRel);
    }
    fn signal_config(&self) {
        self.config.fetch_add(1, Ordering::AcqRel);
    }
    fn needs_reset(&self) {
        self.resets.fetch_add(1, Ordering::AcqRel);
    }
}

/// A frame as the driver got it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Received {
    /// The header.
    pub hdr: VnetHdr,
    /// Number of chains that it came in.
    pub num_buffers: u16,
    /// The frame.
    pub bytes: Vec<u8>,
}

/// A driver with its own RAM.
pub struct MockDriver {
    ram: GuestRam,
    /// Receive queue.
    pub rx: MockRing,
    /// Transmit queue.
    pub tx: MockRing,
    /// Control queue.
    pub ctrl: MockRing,
    /// What the device told.
    pub interrupt: Arc<MockInterrupt>,
    heap: Heap,
    buffers: [HashMap<u16, Vec<Buffer>>; 2],
    /// Indirect tables of RX chains.
    tables: HashMap<u16, Buffer>,
}

impl MockDriver {
    /// A driver with queues of `size` entries.
    pub fn new(size: u16) -> Self {
        let regions = [
            (GuestAddress(0), usize::try_from(REGION_BORDER).unwrap()),
            (
                GuestAddress(REGION_BORDER),
                usize::try_from(RAM_LEN - REGION_BORDER).unwrap(),
            ),
        ];
        Self::over(GuestMemoryMmap::from_ranges(&regions).unwrap(), size)
    }

    /// As [`Self::new`], with memory of the caller's: the first [`RAM_LEN`] bytes are used.
    pub(crate) fn over(mem: GuestMemoryMmap, size: u16) -> Self {
        Self {
            rx: MockRing::new(mem.clone(), RX_BASE, size),
            tx: MockRing::new(mem.clone(), TX_BASE, size),
            ctrl: MockRing::new(mem.clone(), CTRL_BASE, CTRL_QUEUE_SIZE),
            ram: GuestRam::new(mem),
            interrupt: Arc::default(),
            heap: Heap::default(),
            buffers: Default::default(),
            tables: HashMap::new(),
        }
    }

    /// Guest RAM.
    pub fn ram(&self) -> GuestRam {
        self.ram.clone()
    }

    /// The reset of a driver: all rings are empty again.
    pub fn reset(&mut self) {
        let mem = GuestMemoryMmap::clone(&self.ram.memory());
        self.rx = MockRing::new(mem.clone(), RX_BASE, self.rx.size);
        self.tx = MockRing::new(mem.clone(), TX_BASE, self.tx.size);
        self.ctrl = MockRing::new(mem, CTRL_BASE, self.ctrl.size);
        self.interrupt = Arc::default();
        self.heap = Heap::default();
        self.buffers = Default::default();
        self.tables.clear();
    }

    /// What a transport hands to a device at DRIVER_OK, with doorbells for RX, TX and control queue.
    ///
    /// The control queue is among the queues only if `features` has CTRL_VQ.
    pub fn activation(&self, features: u64) -> (Activation, [EventFd; 3]) {
        let event_idx = features & F_EVENT_IDX != 0;
        let kicks = [(); 3].map(|()| EventFd::new(EFD_NONBLOCK).unwrap());
        let queues = (0..)
            .zip([&self.rx, &self.tx, &self.ctrl])
            .zip(&kicks)
            .take(if features & NET_F_CTRL_VQ != 0 { 3 } else { 2 })
            .map(|((index, ring), kick)| ActiveQueue {
                index,
                queue: ring.queue(event_idx),
                kick: Arc::new(kick.try_clone().unwrap()),
            })
            .collect();
        let activation = Activation {
            ram: self.ram(),
            features,
            queues,
            interrupt: self.interrupt.clone(),
        };
        (activation, kicks)
    }

    /// A card without a thread in front of `backend`, at MTU 1500.
    pub fn engine(&self, features: u64, backend: Box<dyn Backend>) -> NetEngine {
        let (activation, _) = self.activation(features);
        let mut queues = activation.queues.into_iter();
        let parts = NetParts {
            ram: activation.ram,
            features,
            offloads: accepted_offloads(features),
            pairs: 1,
            queues: vec![[queues.next().unwrap(), queues.next().unwrap()]],
            ctrl: queues.next(),
            interrupt: activation.interrupt,
            guest_mac: [0x52, 0x54, 0, 0x12, 0x34, 0x56],
            mtu: 1500,
        };
        let mut engines = parts.into_engines(vec![backend], &[Arc::new(Counters::default())]);
        engines.remove(0)
    }

    /// Allocates `len` bytes, and fills them with a pattern that is no frame.
    pub fn alloc(&mut self, len: usize) -> Buffer {
        let buffer = self.heap.alloc(len);
        self.write(buffer, &vec![0xa5; len]);
        buffer
    }

    /// Writes `bytes` to the start of `buffer`.
    pub fn write(&self, buffer: Buffer, bytes: &[u8]) {
        let mem = self.ram.memory();
        mem.write_slice(bytes, GuestAddress(buffer.addr)).unwrap();
    }

    /// Posts one RX chain with a descriptor for each of `sizes`; false when the ring is full.
    pub fn post_rx(&mut self, sizes: &[usize]) -> bool {
        let buffers: Vec<_> = sizes.iter().map(|&size| self.alloc(size)).collect();
        let head = self.rx.add(&buffers, DESC_F_WRITE);
        self.queued(0, head, buffers)
    }

    /// As [`Self::post_rx`], through an indirect table.
    pub fn post_rx_indirect(&mut self, sizes: &[usize]) -> bool {
        let mut buffers: Vec<_> = sizes.iter().map(|&size| self.alloc(size)).collect();
        let table = self.alloc(16 * buffers.len());
        let head = self.rx.add_indirect(table.addr, &buffers, DESC_F_WRITE);
        // Not part of the chain, but freed with it.
        self.tables.extend(head.map(|head| (head, table)));
        if head.is_none() {
            buffers.push(table);
        }
        self.queued(0, head, buffers)
    }

    /// Posts RX chains of one buffer of `size` until the ring is full.
    pub fn fill_rx(&mut self, size: usize) {
        while self.post_rx(&[size]) {}
    }

    /// Sends `frame`, its header first, in descriptors as long as `splits` says; the last takes
    /// what is left. False when the ring is full.
    pub fn send(&mut self, hdr: &VnetHdr, frame: &[u8], splits: &[usize]) -> bool {
        let buffers = self.scatter(hdr, frame, splits);
        let head = self.tx.add(&buffers, 0);
        self.queued(1, head, buffers)
    }

    /// As [`Self::send`], through an indirect table.
    pub fn send_indirect(&mut self, hdr: &VnetHdr, frame: &[u8], splits: &[usize]) -> bool {
        let mut buffers = self.scatter(hdr, frame, splits);
        let table = self.alloc(16 * buffers.len());
        let head = self.tx.add_indirect(table.addr, &buffers, 0);
        buffers.push(table);
        self.queued(1, head, buffers)
    }

    fn scatter(&mut self, hdr: &VnetHdr, frame: &[u8], splits: &[usize]) -> Vec<Buffer> {
        let mut bytes = hdr.encode().to_vec();
        bytes.extend([0; NET_HDR_LEN - VnetHdr::LEN]);
        bytes.extend(frame);
        let mut rest = &*bytes;
        let mut buffers = Vec::new();
        for &split in splits.iter().chain([&usize::MAX]) {
            let (now, later) = rest.split_at(split.min(rest.len()));
            if !now.is_empty() {
                let buffer = self.alloc(now.len());
                self.write(buffer, now);
                buffers.push(buffer);
            }
            rest = later;
        }
        buffers
    }

    /// Keeps the buffers of a chain until it is used; frees them at once when there is none.
    fn queued(&mut self, queue: usize, head: Option<u16>, buffers: Vec<Buffer>) -> bool {
        match head {
            Some(head) => self.buffers[queue].insert(head, buffers),
            None => {
                self.heap.free(buffers);
                None
            }
        };
        head.is_some()
    }

    /// Takes back sent frames; returns how many.
    pub fn collect_tx(&mut self) -> usize {
        let mut count = 0;
        while let Some((head, len)) = self.tx.pop_used() {
            assert_eq!(len, 0, "the device wrote into a TX chain");
            let buffers = self.buffers[1].remove(&head).unwrap_or_default();
            self.heap.free(buffers);
            count += 1;
        }
        count
    }

    /// Takes received frames out of the ring, put together again from their chains.
    ///
    /// # Panics
    /// Panics when the device broke the specification.
    pub fn collect_rx(&mut self) -> Vec<Received> {
        let mut frames = Vec::new();
        while let Some((mut bytes, _)) = self.take_rx_chain() {
            assert!(bytes.len() >= NET_HDR_LEN, "used length {}", bytes.len());
            let raw: [u8; VnetHdr::LEN] = bytes[..VnetHdr::LEN].try_into().unwrap();
            let num_buffers = u16::from_le_bytes([bytes[10], bytes[11]]);
            assert!(num_buffers >= 1, "num_buffers is 0");
            bytes.drain(..NET_HDR_LEN);
            for _ in 1..num_buffers {
                let (more, _) = self.take_rx_chain().expect("all chains of a frame");
                assert!(!more.is_empty(), "a chain of a merged frame is empty");
                bytes.extend(more);
            }
            frames.push(Received {
                hdr: VnetHdr::decode(&raw),
                num_buffers,
                bytes,
            });
        }
        frames
    }

    /// Bytes written to the next used RX chain, and whether they fill it.
    fn take_rx_chain(&mut self) -> Option<(Vec<u8>, bool)> {
        let (head, len) = self.rx.pop_used()?;
        let buffers = self.buffers[0]
            .remove(&head)
            .expect("a chain that was posted");
        self.heap.free(self.tables.remove(&head));
        let mut left = usize::try_from(len).unwrap();
        let mut bytes = Vec::with_capacity(left);
        let mem = self.ram.memory();
        for buffer in &buffers {
            let n = left.min(usize::try_from(buffer.len).unwrap());
            let start = bytes.len();
            bytes.resize(start + n, 0);
            mem.read_slice(&mut bytes[start..], GuestAddress(buffer.addr))
                .unwrap();
            left -= n;
        }
        assert_eq!(left, 0, "more bytes used than the chain has");
        let room: u64 = buffers.iter().map(|buffer| u64::from(buffer.len)).sum();
        self.heap.free(buffers);
        Some((bytes, u64::from(len) == room))
    }
}
