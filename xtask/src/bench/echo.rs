//! The far side of the request and response workloads: each byte comes back.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, Result};

/// Enough for a thread that holds one byte.
const STACK: usize = 64 << 10;

/// A server on the loopback, for as long as this process lives.
pub(crate) struct Echo {
    pub(crate) port: u16,
    open: Arc<AtomicUsize>,
}

impl Echo {
    /// Starts it on a free port.
    pub(crate) fn start() -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").context("no free port")?;
        Self::on(listener)
    }

    fn on(listener: TcpListener) -> Result<Self> {
        let port = listener.local_addr()?.port();
        let open = Arc::new(AtomicUsize::new(0));
        let counter = open.clone();
        thread(move || {
            for stream in listener.incoming().flatten() {
                let counter = counter.clone();
                thread(move || {
                    counter.fetch_add(1, Ordering::Relaxed);
                    serve(stream);
                    counter.fetch_sub(1, Ordering::Relaxed);
                });
            }
        });
        Ok(Self { port, open })
    }

    /// How many connections are open now.
    pub(crate) fn open(&self) -> usize {
        self.open.load(Ordering::Relaxed)
    }
}

/// The server of a lab, for good.
pub(crate) fn run(port: u16) -> Result<ExitCode> {
    let listener = TcpListener::bind(("127.0.0.1", port))
        .with_context(|| format!("cannot listen on 127.0.0.1:{port}"))?;
    let _echo = Echo::on(listener)?;
    loop {
        std::thread::park();
    }
}

fn serve(mut stream: TcpStream) {
    let _ = stream.set_nodelay(true);
    let mut byte = [0];
    while let Ok(1) = stream.read(&mut byte) {
        if stream.write_all(&byte).is_err() {
            return;
        }
    }
}

fn thread(work: impl FnOnce() + Send + 'static) {
    // without a thread the client sees its connection end
    let _ = std::thread::Builder::new().stack_size(STACK).spawn(work);
}
