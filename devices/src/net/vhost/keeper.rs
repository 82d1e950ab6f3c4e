//! The thread beside the kernel: it has the control queue and the tap's interface, and passes on
//! interrupts where the transport cannot be called by the kernel.

use std::io;
use std::os::fd::AsRawFd as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Token, Waker};
use net::nic::Offloads;
use vm_memory::GuestAddressSpace as _;
use vmm_sys_util::eventfd::EventFd;

use crate::net::ctrl::{Change, CtrlQueue};
use crate::net::features::GUEST_OFFLOADS;
use crate::net::tap::TapDevice;
use crate::net::tap::link::LinkState;
use crate::net::tap::watch::LinkWatch;
use crate::virtio::{Doorbell, GuestRam, Interrupt};

const STOP: Token = Token(0);
const CTRL: Token = Token(1);
const LINK: Token = Token(2);
const BROKEN: Token = Token(3);
/// Relays follow.
const RELAY: usize = 4;

/// What the driver can change while the card runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Settings {
    pub(super) offloads: Offloads,
    /// Pairs of queues in use.
    pub(super) pairs: u16,
}

/// The control queue, its index and its doorbell.
pub(super) struct Control {
    pub(super) queue: CtrlQueue,
    pub(super) index: u16,
    pub(super) kick: Doorbell,
}

/// All that the thread works on.
pub(super) struct Job {
    pub(super) tap: TapDevice,
    pub(super) link: LinkState,
    pub(super) settings: Settings,
    pub(super) control: Option<Control>,
    pub(super) ram: GuestRam,
    pub(super) interrupt: Arc<dyn Interrupt>,
    /// Queues, and what the kernel writes to interrupt for them.
    pub(super) relays: Vec<(u16, EventFd)>,
    /// What the kernel writes when a ring is broken.
    pub(super) broken: EventFd,
}

impl Job {
    /// Makes the tap as the settings say.
    pub(super) fn apply(&mut self) {
        apply(&mut self.tap, &mut self.link, self.settings);
    }

    /// Carries out and answers commands that wait; true when there are more.
    fn commands(&mut self) -> bool {
        let Self {
            tap,
            link,
            settings,
            ..
        } = self;
        let Some(control) = &mut self.control else {
            return false;
        };
        let index = control.index;
        // Each is carried out before it is answered.
        let done = control.queue.process(&self.ram.memory(), &mut |change| {
            match change {
                Change::Offloads(offloads) => {
                    settings.offloads = (settings.offloads - GUEST_OFFLOADS) | offloads;
                }
                Change::Pairs(pairs) => settings.pairs = pairs,
            }
            apply(tap, link, *settings);
        });
        match done {
            Ok(done) => {
                if done.signal {
                    self.interrupt.signal_queue(index);
                }
                done.more
            }
            Err(fault) => {
                tracing::warn!(queue = index, %fault, "the network driver broke the virtio specification");
                self.control = None;
                self.interrupt.needs_reset();
                false
            }
        }
    }
}

fn apply(tap: &mut TapDevice, link: &mut LinkState, settings: Settings) {
    let offloads = tap.set_offloads(settings.offloads);
    for result in [offloads, tap.attach(settings.pairs.into())] {
        if let Err(error) = result {
            link.failed(&error);
            if !link.is_gone() {
                tracing::error!(%error, "cannot set up the tap {}", tap.name());
            }
        }
    }
}

/// The running thread.
pub(super) struct Keeper {
    stop: Arc<AtomicBool>,
    waker: Waker,
    thread: JoinHandle<Option<Job>>,
}

impl Keeper {
    /// Starts the thread. On failure the job comes back with the error.
    pub(super) fn spawn(job: Job) -> Result<Self, (io::Error, Box<Job>)> {
        match Self::start(&job) {
            Ok((keeper, sender)) => match sender.send(job) {
                Ok(()) => Ok(keeper),
                Err(std::sync::mpsc::SendError(job)) => {
                    Err((io::Error::other("the thread ended at once"), Box::new(job)))
                }
            },
            Err(error) => Err((error, Box::new(job))),
        }
    }

    fn start(job: &Job) -> io::Result<(Self, std::sync::mpsc::Sender<Job>)> {
        let poll = Poll::new()?;
        let watch = |fd: i32, token| {
            let registry = poll.registry();
            registry.register(&mut SourceFd(&fd), token, Interest::READABLE)
        };
        if let Some(control) = &job.control {
            watch(control.kick.as_raw_fd(), CTRL)?;
        }
        watch(job.broken.as_raw_fd(), BROKEN)?;
        for (at, (_, call)) in job.relays.iter().enumerate() {
            watch(call.as_raw_fd(), Token(RELAY + at))?;
        }
        let (link, state) = LinkWatch::new(job.tap.name())?;
        watch(link.as_raw_fd(), LINK)?;
        let waker = Waker::new(poll.registry(), STOP)?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let (sender, receiver) = std::sync::mpsc::channel::<Job>();
        let thread = std::thread::Builder::new()
            .name("wonton-vhost".into())
            .spawn(move || {
                let mut job = receiver.recv().ok()?;
                job.link.set(state);
                if let Err(error) = run(&mut job, poll, &link, &stopped) {
                    tracing::error!(%error, "the vhost thread cannot wait for events");
                    job.interrupt.needs_reset();
                }
                Some(job)
            })?;
        let keeper = Self {
            stop,
            waker,
            thread,
        };
        Ok((keeper, sender))
    }

    /// Stops the thread and waits for it; `None` when it panicked, and the tap is lost.
    pub(super) fn stop(self) -> Option<Job> {
        self.stop.store(true, Ordering::Release);
        if let Err(error) = self.waker.wake() {
            tracing::error!(%error, "cannot wake the vhost thread");
        }
        self.thread.join().ok().flatten()
    }
}

fn run(job: &mut Job, mut poll: Poll, link: &LinkWatch, stop: &AtomicBool) -> io::Result<()> {
    let mut events = Events::with_capacity(16);
    let mut broken = false;
    // There may be commands from before the first notification.
    let mut commands_due = true;
    while !stop.load(Ordering::Acquire) {
        if commands_due {
            commands_due = job.commands();
        }
        let timeout = commands_due.then_some(Duration::ZERO);
        match poll.poll(&mut events, timeout) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => result?,
        }
        for event in events.iter() {
            match event.token() {
                STOP => {}
                CTRL => commands_due = true,
                LINK => {
                    if let Some(state) = link.news() {
                        job.link.set(state);
                    }
                }
                BROKEN => {
                    // The kernel does not tell a ring without its tap from a bad one.
                    if let Some(state) = link.news() {
                        job.link.set(state);
                    }
                    if !job.link.is_gone() && !std::mem::replace(&mut broken, true) {
                        tracing::warn!(
                            "vhost-net found a ring broken: the network driver must reset the card"
                        );
                        job.interrupt.needs_reset();
                    }
                }
                Token(relay) => {
                    if let Some((queue, _)) = job.relays.get(relay - RELAY) {
                        job.interrupt.signal_queue(*queue);
                    }
                }
            }
        }
    }
    Ok(())
}
