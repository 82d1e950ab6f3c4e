//! `wonton serve`: the network card of another VMM, by vhost-user.
//!
//! ```text
//!   main thread     signals: stop, write counters
//!   session thread  accept --> VhostUser::serve --> accept ..
//!   worker thread   the card, while a front-end has it running (devices::net::worker)
//! ```

use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use anyhow::Context as _;
use devices::net::CardCounters;
use devices::vhost_user::VhostUser;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::backend::make_own_card;
use crate::config::ServeConfig;
use crate::event_loop::STOP_SIGNALS;
use crate::exit::Exit;
use crate::sys::{self, SignalFd, wait_readable};

/// The signal that asks for the counters.
const STATS_SIGNAL: libc::c_int = libc::SIGUSR1;
/// RX and TX: without them a card does nothing.
const DATA_RINGS: usize = 2;

/// Serves front-ends until a signal, or with `once` until the first has left.
///
/// # Errors
/// Fails when the socket cannot be had, or the host lacks what the card needs.
pub fn run(config: &ServeConfig) -> anyhow::Result<Exit> {
    sys::raise_descriptor_limit();
    // Before any thread: they inherit the mask.
    let mut signals = STOP_SIGNALS.to_vec();
    signals.push(STATS_SIGNAL);
    let signals = SignalFd::new(&signals).context("cannot collect signals")?;
    let net = make_own_card(&config.net)?;
    let counters = net.counters();
    let socket = Socket::bind(&config.socket)?;
    let session = Session {
        stop: AtomicBool::new(false),
        stream: Mutex::default(),
        wake: event()?,
        done: event()?,
    };
    let exit = std::thread::scope(|scope| {
        let thread = std::thread::Builder::new()
            .name("wonton-session".into())
            .spawn_scoped(scope, || {
                // Also when the thread panics.
                let _done = Raise(&session.done);
                let mut back_end = VhostUser::new(Box::new(net), DATA_RINGS);
                session.serve(&socket.listener, &mut back_end, config.once)
            })
            .context("cannot start a thread")?;
        let exit = wait(config, &signals, &session, &counters);
        session.end();
        let served = thread
            .join()
            .unwrap_or_else(|_| Err(anyhow::anyhow!("the session thread panicked")));
        served.and(exit)
    })?;
    write_stats(config.stats.as_deref(), &counters)?;
    Ok(exit)
}

/// Waits for signals, or for the session to end by itself.
fn wait(
    config: &ServeConfig,
    signals: &SignalFd,
    session: &Session,
    counters: &CardCounters,
) -> anyhow::Result<Exit> {
    loop {
        let [signalled, done] =
            wait_readable([Some(signals.fd()), Some(sys::borrow(&session.done))], -1)
                .context("cannot wait for signals")?;
        while signalled && let Some(signal) = signals.next() {
            if libc::c_int::from(signal) == STATS_SIGNAL {
                // No reason to take the network away.
                if let Err(error) = write_stats(config.stats.as_deref(), counters) {
                    tracing::error!("{error:#}");
                }
            } else {
                return Ok(Exit::Signal(signal));
            }
        }
        if done {
            return Ok(Exit::PowerOff);
        }
    }
}

/// Writes the counters to `file`, which is whole at any time.
fn write_stats(file: Option<&Path>, counters: &CardCounters) -> anyhow::Result<()> {
    let Some(file) = file else {
        return Ok(());
    };
    let values: serde_json::Map<String, serde_json::Value> = counters
        .snapshot()
        .into_iter()
        .map(|(name, value)| (name.to_owned(), value.into()))
        .collect();
    let mut new = file.as_os_str().to_owned();
    new.push(".new");
    let text = serde_json::to_string(&values)?;
    std::fs::write(&new, text)
        .and_then(|()| std::fs::rename(&new, file))
        .with_context(|| format!("cannot write counters to {}", file.display()))
}

fn event() -> anyhow::Result<EventFd> {
    EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).context("cannot make an event")
}

/// Writes to an event when it goes.
struct Raise<'a>(&'a EventFd);

impl Drop for Raise<'_> {
    fn drop(&mut self) {
        // Fails only when the counter is full; then it is readable anyway.
        let _ = self.0.write(1);
    }
}

/// The front-end that is served now, shared with the thread that may have to end it.
struct Session {
    stop: AtomicBool,
    stream: Mutex<Option<UnixStream>>,
    /// Written to end a wait for a front-end.
    wake: EventFd,
    /// Written when the thread is about to end.
    done: EventFd,
}

impl Session {
    fn serve(
        &self,
        listener: &UnixListener,
        back_end: &mut VhostUser,
        once: bool,
    ) -> anyhow::Result<()> {
        loop {
            let [_, woken] =
                wait_readable([Some(listener.as_fd()), Some(sys::borrow(&self.wake))], -1)
                    .context("cannot wait for a front-end")?;
            if woken {
                return Ok(());
            }
            let stream = match listener.accept() {
                Ok((stream, _)) => stream,
                // It changed its mind.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                Err(error) => return Err(error).context("cannot accept a front-end"),
            };
            *self.stream() = Some(stream.try_clone().context("cannot accept a front-end")?);
            // After the store above: whoever stops us sees the stream, or we see this.
            if self.stop.load(Ordering::SeqCst) {
                return Ok(());
            }
            tracing::info!("a front-end connected");
            match back_end.serve(stream) {
                Ok(()) => tracing::info!("the front-end left"),
                Err(error) => tracing::error!("{:#}", anyhow::Error::from(error)),
            }
            *self.stream() = None;
            if once || self.stop.load(Ordering::SeqCst) {
                return Ok(());
            }
        }
    }

    /// Makes [`Self::serve`] return.
    fn end(&self) {
        self.stop.store(true, Ordering::SeqCst);
        if let Some(stream) = &*self.stream() {
            // Fails only when it is closed already.
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
        // Fails only when the counter is full; then it is readable anyway.
        let _ = self.wake.write(1);
    }

    fn stream(&self) -> std::sync::MutexGuard<'_, Option<UnixStream>> {
        self.stream.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A listening socket, whose file goes with it.
struct Socket {
    listener: UnixListener,
    path: PathBuf,
}

impl Socket {
    /// Listens at `path`. A socket that nobody listens on any more makes way.
    fn bind(path: &Path) -> anyhow::Result<Self> {
        use std::os::unix::fs::FileTypeExt as _;
        let is_socket =
            std::fs::symlink_metadata(path).is_ok_and(|metadata| metadata.file_type().is_socket());
        if is_socket {
            match UnixStream::connect(path) {
                Ok(_) => anyhow::bail!("{} is in use by another process", path.display()),
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                    std::fs::remove_file(path)
                        .with_context(|| format!("cannot remove the old {}", path.display()))?;
                }
                Err(_) => {}
            }
        }
        let listener = UnixListener::bind(path)
            .with_context(|| format!("cannot listen on {}", path.display()))?;
        listener
            .set_nonblocking(true)
            .context("cannot set up the socket")?;
        Ok(Self {
            listener,
            path: path.to_owned(),
        })
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}
