//! The far side: `peer data` on this machine, and the guest's commands that talk to it.

use std::net::{TcpListener, TcpStream, UdpSocket};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use guest_images::{Images, UmlGuest, UmlKit, UmlOptions};
use tests::build_peer;

use crate::serve::{SOON, Serve};

/// What all guest rows need, made once.
pub(crate) struct Lab {
    pub(crate) peer: PathBuf,
    pub(crate) images: Images,
    kit: UmlKit,
}

impl Lab {
    pub(crate) fn get() -> Result<&'static Self> {
        static LAB: OnceLock<Result<Lab, String>> = OnceLock::new();
        LAB.get_or_init(|| Self::new().map_err(|error| format!("{error:#}")))
            .as_ref()
            .map_err(|error| anyhow!("{error}"))
    }

    fn new() -> Result<Self> {
        let images = Images::of_workspace()?;
        Ok(Self {
            peer: build_peer()?,
            kit: images.uml()?,
            images,
        })
    }

    /// A guest with `peer` in it, behind `serve`.
    pub(crate) fn boot(&self, serve: &Serve, mem_mib: u32) -> Result<UmlGuest> {
        let options = UmlOptions {
            mem_mib,
            programs: vec![("peer".to_owned(), self.peer.clone())],
            patience: Duration::from_secs(90),
            ..UmlOptions::default()
        };
        UmlGuest::boot(&self.kit, &serve.socket(), &options)
            .with_context(|| format!("wonton said: {}", serve.stderr()))
    }
}

/// The servers. Dropping it ends them.
pub(crate) struct Far {
    child: Child,
    base: u16,
}

impl Far {
    pub(crate) fn start(lab: &Lab) -> Result<Self> {
        let base = free_ports()?;
        let child = Command::new(&lab.peer)
            .args(["data", "127.0.0.1"])
            .env("PEER_PORTS", base.to_string())
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("cannot start peer")?;
        let far = Self { child, base };
        let deadline = Instant::now() + SOON;
        while TcpStream::connect(("127.0.0.1", base + 3)).is_err() {
            ensure!(Instant::now() < deadline, "peer does not listen");
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(far)
    }

    /// The base of its ports.
    pub(crate) fn base(&self) -> u16 {
        self.base
    }

    /// Runs `peer VERB 10.0.2.2 ARGUMENTS` in the guest; it must succeed.
    pub(crate) fn peer(&self, guest: &mut UmlGuest, verb: &str, arguments: &str) -> Result<()> {
        let command = format!(
            "PEER_PORTS={} peer {verb} 10.0.2.2 {arguments}",
            self.base()
        );
        let output = guest.exec(&command, Duration::from_secs(180))?;
        let text = output.text.trim();
        ensure!(output.code == 0, "peer {verb} {arguments}: {text}");
        eprintln!("    {verb} {arguments}: {text}");
        Ok(())
    }
}

impl Drop for Far {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The port before three that were free just now, for TCP and UDP. Other runs of these tests have
/// their own; below the ones that the kernel gives to clients, which are many here.
fn free_ports() -> Result<u16> {
    let free = |port: u16| {
        TcpListener::bind(("127.0.0.1", port)).is_ok()
            && UdpSocket::bind(("127.0.0.1", port)).is_ok()
    };
    let start = 10_000 + u16::try_from(std::process::id() % 2000)? * 10;
    (start..32_700)
        .step_by(10)
        .find(|base| (1..=3).all(|service| free(base + service)))
        .context("no ports are free")
}
