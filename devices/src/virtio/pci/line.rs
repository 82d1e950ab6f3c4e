//! How the device interrupts: which vector is for what, and the ISR status.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU16, Ordering};

use vmm_sys_util::eventfd::EventFd;

use crate::virtio::Interrupt;
use crate::virtio::common::Status;

/// No vector: `VIRTIO_MSI_NO_VECTOR`.
pub(super) const NO_VECTOR: u16 = 0xffff;
/// ISR status: a queue was used.
pub(super) const ISR_QUEUE: u8 = 1;
/// ISR status: the configuration changed.
pub(super) const ISR_CONFIG: u8 = 2;

/// Shared between the transport and the device's threads.
pub(super) struct Line {
    status: Arc<Status>,
    /// One for each vector.
    events: Arc<[EventFd]>,
    config: AtomicU16,
    queues: Vec<AtomicU16>,
    /// Whether the driver uses MSI-X.
    msix: AtomicBool,
    isr: AtomicU8,
    generation: AtomicU8,
}

impl Line {
    /// A line for a device with one queue less than there are `events`.
    pub(super) fn new(status: Arc<Status>, events: Arc<[EventFd]>) -> Self {
        let none = || AtomicU16::new(NO_VECTOR);
        Self {
            status,
            config: none(),
            queues: events.iter().skip(1).map(|_| none()).collect(),
            events,
            msix: AtomicBool::new(false),
            isr: AtomicU8::new(0),
            generation: AtomicU8::new(0),
        }
    }

    /// Vector of configuration changes.
    pub(super) fn config_vector(&self) -> u16 {
        self.config.load(Ordering::Acquire)
    }

    /// Sets it; one that does not exist reads back as none (VIRTIO 1.3, 4.1.5.1.2.1).
    pub(super) fn set_config_vector(&self, vector: u16) {
        self.config.store(self.existing(vector), Ordering::Release);
    }

    /// Vector of queue `index`.
    pub(super) fn queue_vector(&self, index: u16) -> u16 {
        let queue = self.queues.get(usize::from(index));
        queue.map_or(NO_VECTOR, |vector| vector.load(Ordering::Acquire))
    }

    /// Sets it, as above.
    pub(super) fn set_queue_vector(&self, index: u16, vector: u16) {
        if let Some(queue) = self.queues.get(usize::from(index)) {
            queue.store(self.existing(vector), Ordering::Release);
        }
    }

    fn existing(&self, vector: u16) -> u16 {
        self.event(vector).map_or(NO_VECTOR, |_| vector)
    }

    fn event(&self, vector: u16) -> Option<&EventFd> {
        self.events.get(usize::from(vector))
    }

    /// The driver switched MSI-X on or off.
    pub(super) fn set_msix(&self, on: bool) {
        self.msix.store(on, Ordering::Release);
    }

    /// The driver read the ISR status, which clears it.
    pub(super) fn take_isr(&self) -> u8 {
        self.isr.swap(0, Ordering::AcqRel)
    }

    /// `config_generation`.
    pub(super) fn generation(&self) -> u8 {
        self.generation.load(Ordering::Acquire)
    }

    /// The device was reset: no vectors, nothing to tell.
    pub(super) fn forget_driver(&self) {
        for vector in self.queues.iter().chain([&self.config]) {
            vector.store(NO_VECTOR, Ordering::Release);
        }
        self.isr.store(0, Ordering::Release);
    }

    fn raise(&self, vector: u16) {
        if let Some(event) = self.event(vector) {
            // Fails only when 2^64 interrupts are outstanding; then one more is not needed.
            let _ = event.write(1);
        }
    }

    fn raise_config(&self) {
        self.isr.fetch_or(ISR_CONFIG, Ordering::AcqRel);
        self.raise(self.config_vector());
    }
}

impl Interrupt for Line {
    fn signal_queue(&self, index: u16) {
        if !self.msix.load(Ordering::Acquire) {
            // Nobody hears, but a driver may poll.
            self.isr.fetch_or(ISR_QUEUE, Ordering::AcqRel);
        }
        self.raise(self.queue_vector(index));
    }

    fn queue_call(&self, index: u16) -> io::Result<Option<EventFd>> {
        let event = self.event(self.queue_vector(index));
        event.map(EventFd::try_clone).transpose()
    }

    fn signal_config(&self) {
        self.generation.fetch_add(1, Ordering::AcqRel);
        self.raise_config();
    }

    fn needs_reset(&self) {
        if self.status.set_needs_reset() {
            self.raise_config();
        }
    }
}
