//! The thread of a network card; one for each pair of queues.
//!
//! It sleeps on the doorbells, on the backend's descriptor and until the backend's deadline. Awake,
//! it alternates one burst from the guest with one turn of the backend, so that a flood in one
//! direction does not starve the other. The guest's TX notifications stay off for as long as there
//! is something to do: they are asked for on the way to sleep, and the ring is looked at once more
//! after that, so no frame waits unseen.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Instant;

use net::nic::Backend;
use vmm_sys_util::eventfd::EventFd;

use crate::net::engine::{NetEngine, Scratch};
use crate::net::rings::{Rings, wake};
use crate::net::sleep::{Kick, Sleep};
use crate::virtio::{Doorbell, Interrupt};

/// A running thread, and the way to stop it.
#[derive(Debug)]
pub(crate) struct Worker {
    stop: Arc<AtomicBool>,
    waker: Arc<EventFd>,
    thread: JoinHandle<Option<NetEngine>>,
}

impl Worker {
    /// Starts a thread for `engine`, woken by doorbells, those of its queues among them.
    ///
    /// On failure the backend comes back with the error.
    pub(crate) fn spawn(
        engine: NetEngine,
        kicks: Vec<(Kick, Doorbell)>,
    ) -> Result<Self, (io::Error, Box<dyn Backend>)> {
        match Self::start(&engine, kicks) {
            Ok((worker, sender)) => match sender.send(engine) {
                Ok(()) => Ok(worker),
                Err(mpsc::SendError(engine)) => Err((
                    io::Error::other("the network thread ended at once"),
                    engine.into_backend(),
                )),
            },
            Err(error) => Err((error, engine.into_backend())),
        }
    }

    /// Starts a thread that waits for its engine.
    fn start(
        engine: &NetEngine,
        kicks: Vec<(Kick, Doorbell)>,
    ) -> io::Result<(Self, mpsc::Sender<NetEngine>)> {
        let (sleep, waker) = Sleep::new(engine, &kicks)?;
        engine.rings().watch(waker.clone());
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let (sender, receiver) = mpsc::channel();
        let thread = std::thread::Builder::new()
            .name(match engine.pair() {
                0 => "wonton-net".into(),
                pair => format!("wonton-net-{pair}"),
            })
            .spawn(move || {
                let mut engine: NetEngine = receiver.recv().ok()?;
                let _alarm = Alarm(engine.interrupt(), engine.rings().clone());
                if let Err(error) = run(&mut engine, sleep, &stopped) {
                    tracing::error!(%error, "the network thread cannot wait for events");
                    engine.interrupt().needs_reset();
                }
                // The doorbells had to live for as long as they were watched.
                drop(kicks);
                Some(engine)
            })?;
        let worker = Self {
            stop,
            waker,
            thread,
        };
        Ok((worker, sender))
    }

    /// Has the thread stop soon.
    pub(crate) fn ask_to_stop(&self) {
        self.stop.store(true, Ordering::Release);
        wake(&self.waker);
    }

    /// Stops the thread and waits for it; `None` when it panicked, and the backend is lost.
    pub(crate) fn stop(self) -> Option<NetEngine> {
        self.ask_to_stop();
        self.thread.join().ok().flatten()
    }
}

/// Tells the driver when the thread panics: without it the card would only fall silent. The other
/// threads of the card stop working, because a queue that they share may be half done.
struct Alarm(Arc<dyn Interrupt>, Arc<Rings>);

impl Drop for Alarm {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.1.set_broken();
            self.0.needs_reset();
        }
    }
}

fn run(engine: &mut NetEngine, mut sleep: Sleep, stop: &AtomicBool) -> io::Result<()> {
    let mut scratch = Scratch::default();
    let mut backend_due = true;
    while !stop.load(Ordering::Acquire) {
        let now = Instant::now();
        // Every round: a driver waits for the answer, and under load there is no sleep to wake from.
        let commands_due = engine.process_ctrl();
        let taken = engine.process_tx(&mut scratch, now);
        if commands_due || taken > 0 || backend_due {
            backend_due = engine.process_rx(&mut scratch, now);
        }
        if commands_due || taken > 0 || backend_due || engine.arm_tx() {
            continue;
        }
        sleep.wait(engine)?;
        backend_due = true;
    }
    Ok(())
}
