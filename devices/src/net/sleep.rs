//! What the worker waits on.
//!
//! All descriptors are watched edge-triggered. A doorbell is never read: each write to an eventfd
//! is an edge of its own.

use std::io;
use std::os::fd::AsRawFd as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Token};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::net::counters::count;
use crate::net::engine::NetEngine;
use crate::virtio::Doorbell;

/// What a doorbell tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kick {
    /// There are new RX buffers.
    Rx = 0,
    /// There are frames to take.
    Tx = 1,
    /// There are commands.
    Ctrl = 2,
}

const KICK_RX: Token = Token(Kick::Rx as usize);
const KICK_TX: Token = Token(Kick::Tx as usize);
const BACKEND: Token = Token(3);
const WAKE: Token = Token(4);

/// How long the host is not listened to while frames wait for buffers, at first and at most.
///
/// Those frames woke the worker, and each that joins them would do so for nothing: a flood that a guest
/// cannot keep up with would cost a core. Doubles while nothing happens; beyond the most, nothing is
/// going on, and the worker sleeps as usual.
const STARVED_MIN: Duration = Duration::from_millis(1);
const STARVED_MAX: Duration = Duration::from_millis(64);

/// The descriptors, and room for what they report.
#[derive(Debug)]
pub(super) struct Sleep {
    all: Poll,
    /// The doorbells alone, for when the guest is the one to wait for.
    doorbells: Poll,
    events: Events,
    patience: Duration,
    /// Open for as long as it is watched.
    _waker: Arc<EventFd>,
}

impl Sleep {
    /// Watches `kicks` (which must live as long) and the backend of `engine`. A write to the event that
    /// is returned ends a sleep at once.
    pub(super) fn new(
        engine: &NetEngine,
        kicks: &[(Kick, Doorbell)],
    ) -> io::Result<(Self, Arc<EventFd>)> {
        let (all, doorbells) = (Poll::new()?, Poll::new()?);
        let watch = |poll: &Poll, fd: i32, token| {
            let registry = poll.registry();
            registry.register(&mut SourceFd(&fd), token, Interest::READABLE)
        };
        for (kick, doorbell) in kicks {
            let token = Token(*kick as usize);
            watch(&all, doorbell.as_raw_fd(), token)?;
            watch(&doorbells, doorbell.as_raw_fd(), token)?;
        }
        if let Some(fd) = engine.backend().poll_fd() {
            watch(&all, fd.as_raw_fd(), BACKEND)?;
        }
        let waker = Arc::new(EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?);
        watch(&all, waker.as_raw_fd(), WAKE)?;
        watch(&doorbells, waker.as_raw_fd(), WAKE)?;
        let sleep = Self {
            all,
            doorbells,
            events: Events::with_capacity(8),
            patience: STARVED_MIN,
            _waker: waker.clone(),
        };
        Ok((sleep, waker))
    }

    /// Waits until there is something for `engine` to do.
    pub(super) fn wait(&mut self, engine: &mut NetEngine) -> io::Result<()> {
        let deadline = engine.deadline();
        let mut timeout =
            deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let deaf = engine.is_starved() && self.patience <= STARVED_MAX;
        let poll = if deaf {
            timeout = Some(timeout.map_or(self.patience, |timeout| timeout.min(self.patience)));
            self.patience *= 2;
            &mut self.doorbells
        } else {
            &mut self.all
        };
        count(&engine.counters().sleeps, 1);
        match poll.poll(&mut self.events, timeout) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => result?,
        }
        let mut quiet = !deaf;
        for event in self.events.iter() {
            self.patience = STARVED_MIN;
            match event.token() {
                BACKEND => quiet = false,
                KICK_RX => count(&engine.counters().rx_kicks, 1),
                KICK_TX => count(&engine.counters().tx_kicks, 1),
                _ => {}
            }
        }
        if quiet {
            engine.host_is_quiet();
        }
        Ok(())
    }
}
