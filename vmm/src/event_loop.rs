//! The main thread: waits for everything that can happen outside the guest's CPUs.
//!
//! ```text
//!   vCPU threads, power ports --Events--+
//!   SIGINT SIGTERM SIGHUP SIGQUIT ------+--> run() --> Exit
//!   stdin --escape--> serial port ------+
//!   serial port has room again ---------+
//! ```

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, TryLockError};

use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::escape::{Escape, Keys};
use crate::exit::Exit;
use crate::sys::{self, SignalFd, wait_readable};
use crate::vcpu::Stop;
use devices::power::PowerEvent;
use devices::serial::Com1;

/// What can happen.
#[derive(Debug)]
pub enum Event {
    /// The guest asks to be switched off or reset.
    Power(PowerEvent),
    /// A vCPU cannot go on.
    Vcpu(u8, Stop),
}

/// Where events go; cheap to clone, usable from any thread.
#[derive(Clone)]
pub struct Events {
    sender: Sender<Event>,
    wake: Arc<EventFd>,
}

impl Events {
    /// Tells the main thread. Nothing happens when it has stopped listening.
    pub fn send(&self, event: Event) {
        let _ = self.sender.send(event);
        // Fails only when the counter is full; then it is readable anyway.
        let _ = self.wake.write(1);
    }
}

/// The receiving end of [`Events`].
pub struct EventQueue {
    receiver: Receiver<Event>,
    wake: Arc<EventFd>,
}

/// A queue of events.
///
/// # Errors
/// Fails when descriptors run out.
pub fn event_queue() -> io::Result<(Events, EventQueue)> {
    let (sender, receiver) = channel();
    let wake = Arc::new(EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?);
    Ok((
        Events {
            sender,
            wake: wake.clone(),
        },
        EventQueue { receiver, wake },
    ))
}

/// Signals that end the VM.
pub const STOP_SIGNALS: [libc::c_int; 4] =
    [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGTERM];

/// Text from stdin on its way to the serial port.
pub struct Input {
    com1: Arc<Mutex<Com1>>,
    room: EventFd,
    /// `None` when Ctrl-A is a key like any other.
    escape: Option<Escape>,
    pending: Vec<u8>,
    at_end: bool,
    /// The port was busy when there was text for it.
    contended: bool,
}

/// When a busy serial port is tried again.
const BUSY_RETRY_MS: libc::c_int = 20;
/// Read at once.
const CHUNK: usize = 1024;

impl Input {
    /// Input for `com1`, which writes to `room` when it has some.
    pub fn new(com1: Arc<Mutex<Com1>>, room: EventFd, escape: bool) -> Self {
        let escape = escape.then(Escape::default);
        Self {
            com1,
            room,
            escape,
            pending: Vec::new(),
            at_end: false,
            contended: false,
        }
    }

    /// Stdin, unless it has ended or there is text that waits for room.
    fn source<'f>(&self, stdin: BorrowedFd<'f>) -> Option<BorrowedFd<'f>> {
        (!self.at_end && self.pending.is_empty()).then_some(stdin)
    }

    /// Reads what is there; true when the user quits. Not reading further is the backpressure.
    fn read(&mut self, stdin: BorrowedFd<'_>) -> bool {
        let mut buf = [0; CHUNK];
        let text = match sys::read(stdin, &mut buf) {
            // The end of input is no reason to stop a guest.
            Ok(0) => {
                self.at_end = true;
                return false;
            }
            Ok(n) => &buf[..n],
            Err(error) => {
                let again = [io::ErrorKind::Interrupted, io::ErrorKind::WouldBlock];
                // A terminal that hung up (EIO), mostly.
                self.at_end = !again.contains(&error.kind());
                return false;
            }
        };
        let Keys { text, quit } = match &mut self.escape {
            Some(escape) => escape.filter(text),
            None => Keys {
                text: text.to_vec(),
                quit: false,
            },
        };
        self.pending = text;
        self.flush();
        quit
    }

    /// Gives the port what waits. A vCPU holds the lock while it writes the guest's output, which
    /// takes as long as whoever reads that likes: then it is for the next time, because this thread
    /// must stay open to signals and to the escape key.
    fn flush(&mut self) {
        self.contended = false;
        if self.pending.is_empty() {
            return;
        }
        let mut com1 = match self.com1.try_lock() {
            Ok(com1) => com1,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => {
                self.contended = true;
                return;
            }
        };
        let taken = com1.enqueue_input(&self.pending);
        self.pending.drain(..taken);
    }
}

/// Runs until something ends the VM.
///
/// # Errors
/// Fails when waiting does.
pub fn run(queue: &EventQueue, signals: &SignalFd, mut input: Input) -> io::Result<Exit> {
    let stdin = io::stdin();
    let stdin = stdin.as_fd();
    loop {
        let wake = sys::borrow(&queue.wake);
        let room = sys::borrow(&input.room);
        let fds = [
            Some(wake),
            Some(signals.fd()),
            Some(room),
            input.source(stdin),
        ];
        let wait = if input.contended { BUSY_RETRY_MS } else { -1 };
        let [woken, signalled, room, readable] = wait_readable(fds, wait)?;
        if woken {
            let _ = queue.wake.read();
            // The first one decides; later ones are its echo.
            if let Some(event) = queue.receiver.try_iter().next() {
                return Ok(decide(event));
            }
        }
        if signalled && let Some(signal) = signals.next() {
            return Ok(Exit::Signal(signal));
        }
        if room {
            let _ = input.room.read();
        }
        if room || input.contended {
            input.flush();
        }
        if readable && input.read(stdin) {
            return Ok(Exit::PowerOff);
        }
    }
}

fn decide(event: Event) -> Exit {
    match event {
        Event::Power(PowerEvent::PowerOff) => Exit::PowerOff,
        Event::Power(PowerEvent::Reset) => Exit::Reset,
        Event::Vcpu(id, stop) => {
            let exit = stop.exit();
            if let Some(text) = stop.describe() {
                eprintln!("error: cpu {id}: {text}");
            }
            exit
        }
    }
}
