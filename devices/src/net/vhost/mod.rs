//! A card whose frames the kernel carries: vhost-net works the RX and TX queues, with a tap at their
//! other end, and this process sees none of it.
//!
//! ```text
//!   guest --doorbell (ioeventfd)--> vhost-net <--> tap
//!   guest <--interrupt (irqfd)----- vhost-net
//!   guest --control queue--> keeper thread --TUNSETOFFLOAD, TUNSETQUEUE--> tap
//! ```
//!
//! There is one open `/dev/vhost-net` and one queue of the tap for each pair of queues.

mod error;
mod keeper;
mod pair;

use std::io;
use std::sync::atomic::Ordering;

use net::nic::Offloads;
use virtio_queue::{Queue, QueueT as _};
use vm_memory::GuestAddressSpace as _;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

pub use self::error::VhostError;
use self::keeper::{Control, Job, Keeper, Settings};
use self::pair::{Pair, RING_FEATURES, Ring};
use crate::net::card::{Card, CardQueues, NetConfig, NetConfigError, no_pairs};
use crate::net::ctrl::CtrlQueue;
use crate::net::features::{accepted_offloads, offered_features};
use crate::net::tap::link::LinkState;
use crate::net::tap::{TapDevice, sys};
use crate::virtio::spec::{F_INDIRECT_DESC, F_VERSION_1, ID_NET, NET_F_CTRL_VQ};
use crate::virtio::vring::Vring;
use crate::virtio::{Activation, ActiveQueue, GuestRam, VirtioDevice};

/// The kernel's side of a card, not yet connected to anything.
pub struct VhostPairs {
    pairs: Vec<Pair>,
    features: u64,
}

impl VhostPairs {
    /// Opens `/dev/vhost-net` once for each of `count` pairs of queues.
    ///
    /// # Errors
    /// See [`VhostError`].
    pub fn open(count: u16) -> Result<Self, VhostError> {
        let pairs = (0..count)
            .map(|_| Pair::open())
            .collect::<Result<Vec<_>, _>>()?;
        let mut features = RING_FEATURES;
        for pair in &pairs {
            features &= pair.features()?;
        }
        if features & F_VERSION_1 == 0 {
            return Err(VhostError::Legacy);
        }
        Ok(Self { pairs, features })
    }
}

/// A network card worked by vhost-net.
pub struct VhostNet {
    card: Card,
    pairs: Vec<Pair>,
    // One of the two holds the tap, unless the thread panicked.
    tap: Option<(TapDevice, LinkState)>,
    running: Option<Running>,
    /// What the driver had made of the card when it was suspended, and its features.
    changed: Option<(u64, Settings)>,
}

/// What there is between DRIVER_OK and the reset.
struct Running {
    keeper: Keeper,
    ram: GuestRam,
    features: u64,
    pairs: Vec<[ActiveQueue; 2]>,
}

impl VhostNet {
    /// A card in front of `tap`, worked by `vhost`; the number of pairs in `config` is that of the
    /// tap's queues.
    ///
    /// # Errors
    /// Fails when a value of `config` is not allowed.
    pub fn new(
        config: NetConfig,
        vhost: VhostPairs,
        tap: TapDevice,
    ) -> Result<Self, NetConfigError> {
        let pairs = vhost.pairs.len().min(tap.queues().len());
        let config = NetConfig {
            queue_pairs: u16::try_from(pairs).unwrap_or(u16::MAX),
            ..config
        };
        let mut card = Card::new(config, offered_features(tap.offloads()))?;
        card.mask_features(RING_FEATURES & !vhost.features);
        let link = LinkState::new(tap.name());
        Ok(Self {
            card,
            pairs: vhost.pairs,
            tap: Some((tap, link)),
            running: None,
            changed: None,
        })
    }

    /// Hides features from the driver, and those that require them, for comparisons and for narrowing
    /// down a problem.
    pub fn mask_features(&mut self, hidden: u64) {
        self.card.mask_features(hidden);
    }

    /// Connects each of `pairs` to its queue of the tap; `job` gets the interrupts that the kernel cannot
    /// deliver.
    fn start_pairs(
        &mut self,
        job: &mut Job,
        pairs: &[[ActiveQueue; 2]],
        features: u64,
    ) -> io::Result<()> {
        let sizes = self.card.queue_max_sizes().to_vec();
        for ((pair, queues), tap) in self.pairs.iter_mut().zip(pairs).zip(job.tap.queues()) {
            let mut calls = Vec::new();
            for active in queues {
                let call = match job.interrupt.queue_call(active.index)? {
                    Some(call) => call,
                    None => {
                        let call = event()?;
                        job.relays.push((active.index, call.try_clone()?));
                        call
                    }
                };
                calls.push((call, sys::event(active.kick.as_raw_fd())?));
            }
            let mut rings = Vec::new();
            for (active, (call, kick)) in queues.iter().zip(&calls) {
                rings.push(Ring {
                    queue: &active.queue,
                    max_size: sizes[usize::from(active.index)],
                    kick,
                    call,
                    error: &job.broken,
                });
            }
            // The driver of a card whose tap is gone still wants its commands answered.
            let tap = (!job.link.is_gone()).then_some(tap);
            pair.start(&job.ram, features, &rings, tap)
                .map_err(io::Error::other)?;
        }
        Ok(())
    }

    /// Stops the kernel; the positions of each pair, if it ran.
    fn stop_pairs(&mut self) -> Vec<Option<[u16; 2]>> {
        let stop = |pair: &mut Pair| {
            pair.stop().unwrap_or_else(|error| {
                let error: &dyn std::error::Error = &error;
                tracing::error!(error, "a pair of queues does not stop as it should");
                None
            })
        };
        self.pairs.iter_mut().map(stop).collect()
    }

    fn start(&mut self, activation: Activation, mut job: Job) -> io::Result<()> {
        let features = activation.features;
        let sorted = self.card.sort(activation.queues, features);
        if sorted.start_anew() {
            self.changed = None;
        }
        let CardQueues { pairs, ctrl } = sorted;
        if let Some((before, settings)) = self.changed
            && before == features
        {
            job.settings = settings;
        }
        let count = u16::try_from(pairs.len()).unwrap_or(u16::MAX);
        let ctrl = ctrl.filter(|_| features & NET_F_CTRL_VQ != 0);
        job.control = ctrl.map(|ctrl| {
            let vring = Vring::new(ctrl.queue, features & F_INDIRECT_DESC != 0);
            Control {
                queue: CtrlQueue::new(vring, features, count),
                index: ctrl.index,
                kick: ctrl.kick,
            }
        });
        // From another driver's time.
        job.tap.drain();
        job.apply();
        let started = if pairs.is_empty() {
            Err(no_pairs())
        } else {
            self.start_pairs(&mut job, &pairs, features)
        };
        let ram = job.ram.clone();
        let spawned = match started {
            Ok(()) => Keeper::spawn(job),
            Err(error) => Err((error, Box::new(job))),
        };
        match spawned {
            Ok(keeper) => {
                self.running = Some(Running {
                    keeper,
                    ram,
                    features,
                    pairs,
                });
                Ok(())
            }
            Err((error, job)) => {
                self.stop_pairs();
                self.tap = Some((job.tap, job.link));
                Err(error)
            }
        }
    }
}

impl VirtioDevice for VhostNet {
    fn device_type(&self) -> u32 {
        ID_NET
    }

    fn queue_max_sizes(&self) -> &[u16] {
        self.card.queue_max_sizes()
    }

    fn device_features(&self) -> u64 {
        self.card.features()
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        self.card.read_config(offset, data);
    }

    fn activate(&mut self, activation: Activation) -> io::Result<()> {
        let Some((tap, link)) = self.tap.take() else {
            return Err(io::Error::other("the tap was lost in a panic"));
        };
        let broken = match event() {
            Ok(broken) => broken,
            Err(error) => {
                self.tap = Some((tap, link));
                return Err(error);
            }
        };
        let job = Job {
            tap,
            link,
            settings: Settings {
                offloads: accepted_offloads(activation.features),
                pairs: 1,
            },
            control: None,
            ram: activation.ram.clone(),
            interrupt: activation.interrupt.clone(),
            relays: Vec::new(),
            broken,
        };
        self.start(activation, job)
    }

    fn reset(&mut self) {
        self.changed = None;
        self.stop_pairs();
        let Some(running) = self.running.take() else {
            return;
        };
        if let Some(mut job) = running.keeper.stop() {
            job.settings = Settings {
                offloads: Offloads::empty(),
                pairs: 1,
            };
            job.apply();
            self.tap = Some((job.tap, job.link));
        }
    }

    fn suspend(&mut self) -> Vec<(u16, Queue)> {
        // While the thread still passes on interrupts.
        let bases = self.stop_pairs();
        let Some(running) = self.running.take() else {
            return Vec::new();
        };
        let mut queues = Vec::new();
        for (pair, bases) in running.pairs.into_iter().zip(bases) {
            for (mut active, base) in pair.into_iter().zip(bases.unwrap_or_default()) {
                let used = active
                    .queue
                    .used_idx(&*running.ram.memory(), Ordering::Acquire);
                active.queue.set_next_avail(base);
                active.queue.set_next_used(used.map_or(base, |used| used.0));
                queues.push((active.index, active.queue));
            }
        }
        if let Some(job) = running.keeper.stop() {
            self.changed = Some((running.features, job.settings));
            if let Some(control) = job.control {
                let queue = control.queue.into_vring().into_queue();
                queues.push((control.index, queue));
            }
            self.tap = Some((job.tap, job.link));
        }
        queues
    }
}

impl Drop for VhostNet {
    fn drop(&mut self) {
        self.reset();
    }
}

fn event() -> io::Result<EventFd> {
    EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)
}

#[cfg(test)]
mod tests;
