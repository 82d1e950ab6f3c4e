//! `wonton serve` as a command: what it refuses, and how it ends.

use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;
use tests::release_wonton;

use crate::serve::{SOON, Serve, end};
use crate::{Row, row};

pub(crate) fn rows() -> Vec<Row> {
    vec![
        row("serve/socket-in-use", in_use),
        row("serve/stale-socket", stale),
        row("serve/refusals", refusals),
        row("serve/sigterm", sigterm),
        row("serve/sigterm-with-a-front-end", sigterm_busy),
        row("serve/stats", stats),
    ]
}

/// It must end by itself with `code` and exactly one line that says why.
fn refuses(socket: &Path, arguments: &[&str], code: i32) -> Result<()> {
    let mut child = Command::new(release_wonton()?)
        .args(["serve", "--socket"])
        .arg(socket)
        .args(arguments)
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()?;
    let status = end(&mut child);
    if status.is_err() {
        let _ = child.kill();
    }
    let output = child.wait_with_output()?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    let what = || format!("{} {arguments:?}: {stderr}", socket.display());
    ensure!(status?.code() == Some(code), "{}", what());
    let errors = stderr.lines().filter(|line| line.starts_with("error: "));
    ensure!(errors.count() == 1, "{}", what());
    Ok(())
}

fn in_use() -> Result<()> {
    let first = Serve::start("null")?;
    refuses(&first.socket(), &["--net", "null"], 1)?;
    // The first one is none the worse for it.
    UnixStream::connect(first.socket()).context("the first one is gone")?;
    first.signal(Signal::TERM)?;
    ensure!(first.wait()?.0.code() == Some(143));
    Ok(())
}

fn stale() -> Result<()> {
    let dir = tempfile::tempdir()?;
    drop(UnixListener::bind(dir.path().join("socket"))?);
    let serve = Serve::start_in(dir, "null")?;
    UnixStream::connect(serve.socket())?;
    Ok(())
}

fn refusals() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let socket = dir.path().join("socket");
    let null: &[&str] = &["--net", "null"];
    // nobody can write there, root included
    refuses(Path::new("/proc/socket"), null, 1)?;
    refuses(&dir.path().join("no/such/directory"), null, 1)?;
    refuses(&dir.path().join("x".repeat(200)), null, 1)?;
    let file = dir.path().join("file");
    std::fs::write(&file, "precious")?;
    refuses(&file, null, 1)?;
    ensure!(std::fs::read_to_string(&file)? == "precious");
    refuses(dir.path(), null, 1)?;
    for net in [
        "none",
        "",
        "nonsense",
        "user,rx=fast",
        "user,mtu=1",
        "null,mtu",
    ] {
        refuses(&socket, &["--net", net], 2)?;
    }
    refuses(&socket, &["--nonsense"], 2)?;
    refuses(&socket, &["-p", "nonsense"], 2)?;
    ensure!(!socket.exists(), "it left a socket behind");
    Ok(())
}

fn ends_well(serve: Serve) -> Result<()> {
    let socket = serve.socket();
    serve.signal(Signal::TERM)?;
    let (status, dir) = serve.wait()?;
    ensure!(status.code() == Some(143), "it ended with {status}");
    ensure!(!socket.exists(), "it left its socket");
    json(&dir.path().join("stats"))
}

fn sigterm() -> Result<()> {
    ends_well(Serve::start("user")?)
}

/// With a front-end that says nothing, and another that waits for its turn.
fn sigterm_busy() -> Result<()> {
    let serve = Serve::start("user")?;
    let _front_ends = [
        UnixStream::connect(serve.socket())?,
        UnixStream::connect(serve.socket())?,
    ];
    std::thread::sleep(Duration::from_millis(50));
    ends_well(serve)
}

fn json(path: &Path) -> Result<()> {
    let text = std::fs::read_to_string(path)?;
    let value: serde_json::Value = serde_json::from_str(&text)?;
    ensure!(value["rx_frames"].is_u64(), "the counters are: {text}");
    Ok(())
}

fn stats() -> Result<()> {
    let serve = Serve::start("user")?;
    for _ in 0..3 {
        ensure!(
            !serve.stats().exists(),
            "it is there without being asked for"
        );
        serve.signal(Signal::USR1)?;
        let deadline = Instant::now() + SOON;
        while !serve.stats().exists() {
            ensure!(Instant::now() < deadline, "no counters came");
            std::thread::sleep(Duration::from_millis(5));
        }
        json(&serve.stats())?;
        std::fs::remove_file(serve.stats())?;
    }
    ends_well(serve)
}
