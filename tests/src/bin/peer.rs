//! Both ends of the network stories: servers for the far side, clients for the guest.
//!
//! The guest is a busybox, so what its applets cannot do (hashes over chosen lengths, half-closed
//! connections, many connections at once) is here. One binary runs at both ends.
//!
//! ```text
//! peer serve ADDRESS             far side: all servers on ADDRESS
//! peer data ADDRESS              far side: all but the name server, which takes root
//! peer get HOST BYTES            guest: download, print length and SHA-256
//! peer put HOST BYTES            guest: upload, end the stream, compare the far side's SHA-256
//! peer pause HOST BYTES SECONDS  guest: download, but read nothing for that long at first
//! peer streams HOST COUNT SECS   guest: COUNT downloads at once, of which none may stand still
//! peer sequence HOST COUNT       guest: COUNT connections one after another
//! peer parallel HOST COUNT       guest: COUNT connections at once
//! peer refused HOST PORT         guest: how a closed port answers, and how fast
//! peer udp HOST                  guest: datagrams of several sizes, echoed
//! peer dns SERVER udp|tcp        guest: one question
//! peer greet ADDRESS COUNT       either: answer COUNT connections with a line
//! peer ask HOST PORT             either: read that line
//! ```
//!
//! Clients print one line for people and exit with 0 when all is as it should be. The ports follow
//! on 7000, or on the one in the environment variable PEER_PORTS.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream, UdpSocket};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use sha2::{Digest, Sha256};

const SOURCE: u16 = 1;
const SINK: u16 = 2;
const ECHO: u16 = 3;
const PATIENCE: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let outcome = match words[..] {
        ["serve", address] => serve(address, true),
        ["data", address] => serve(address, false),
        ["get", host, bytes] => bytes_of(bytes).and_then(|n| get(host, n)),
        ["put", host, bytes] => bytes_of(bytes).and_then(|n| put(host, n)),
        ["pause", host, bytes, seconds] => bytes_of(bytes)
            .and_then(|n| bytes_of(seconds).and_then(|seconds| pause(host, n, seconds))),
        ["streams", host, count, seconds] => bytes_of(count)
            .and_then(|n| bytes_of(seconds).and_then(|seconds| streams(host, n, seconds))),
        ["sequence", host, count] => bytes_of(count).and_then(|n| sequence(host, n)),
        ["parallel", host, count] => bytes_of(count).and_then(|n| parallel(host, n)),
        ["refused", host, port] => refused(host, port),
        ["udp", host] => udp(host),
        ["dns", server, "udp"] => dns_udp(server),
        ["dns", server, "tcp"] => dns_tcp(server),
        ["greet", address, count] => bytes_of(count).and_then(|n| greet(address, n)),
        ["ask", host, port] => ask(host, port),
        _ => Err(anyhow::anyhow!(
            "see the head of tests/src/bin/peer.rs for usage"
        )),
    };
    match outcome {
        Ok(line) => {
            println!("{line}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            println!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn bytes_of(text: &str) -> Result<u64> {
    text.parse()
        .with_context(|| format!("`{text}` is not a number"))
}

/// The port of a service of ours.
fn port(service: u16) -> u16 {
    let base = std::env::var("PEER_PORTS").ok();
    base.and_then(|text| text.parse().ok()).unwrap_or(7000) + service
}

/// The bytes that both ends agree on: a generator, so neither has to hold them.
struct Pattern(u64);

impl Pattern {
    fn fill(&mut self, buffer: &mut [u8]) {
        for word in buffer.chunks_mut(8) {
            // xorshift64*
            self.0 ^= self.0 >> 12;
            self.0 ^= self.0 << 25;
            self.0 ^= self.0 >> 27;
            let value = self.0.wrapping_mul(0x2545_f491_4f6c_dd1d).to_le_bytes();
            word.copy_from_slice(&value[..word.len()]);
        }
    }
}

fn hex(hash: &[u8]) -> String {
    hash.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Writes `total` bytes of the pattern; returns their hash.
fn send_pattern(stream: &mut impl Write, total: u64, seed: u64) -> Result<String> {
    let mut pattern = Pattern(seed | 1);
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 64 << 10];
    let mut left = total;
    while left > 0 {
        let n = usize::try_from(left)
            .unwrap_or(usize::MAX)
            .min(buffer.len());
        pattern.fill(&mut buffer[..n]);
        hash.update(&buffer[..n]);
        stream.write_all(&buffer[..n]).context("sending failed")?;
        left -= n as u64;
    }
    Ok(hex(&hash.finalize()))
}

/// Reads to the end of the stream; returns length and hash.
fn receive_all(stream: &mut TcpStream) -> Result<(u64, String)> {
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 64 << 10];
    let mut total = 0;
    loop {
        match stream.read(&mut buffer).context("receiving failed")? {
            0 => return Ok((total, hex(&hash.finalize()))),
            n => {
                hash.update(&buffer[..n]);
                total += n as u64;
            }
        }
    }
}

fn connect(host: &str, port: u16) -> Result<TcpStream> {
    let stream = TcpStream::connect((host, port))
        .with_context(|| format!("cannot connect to {host} port {port}"))?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    Ok(stream)
}

fn serve(address: &str, names: bool) -> Result<String> {
    let at = |port| (address, port);
    let source = TcpListener::bind(at(port(SOURCE)))?;
    let sink = TcpListener::bind(at(port(SINK)))?;
    let echo = TcpListener::bind(at(port(ECHO)))?;
    let datagrams = UdpSocket::bind(at(port(ECHO)))?;
    let mut threads = vec![
        std::thread::spawn(move || each(&source, serve_source)),
        std::thread::spawn(move || each(&sink, serve_sink)),
        std::thread::spawn(move || each(&echo, serve_echo)),
        std::thread::spawn(move || serve_datagrams(&datagrams, |bytes| Some(bytes.to_vec()))),
    ];
    if names {
        let questions = UdpSocket::bind(at(53))?;
        let dns = TcpListener::bind(at(53))?;
        threads.push(std::thread::spawn(move || each(&dns, serve_dns)));
        threads.push(std::thread::spawn(move || {
            serve_datagrams(&questions, answer);
        }));
    }
    for thread in threads {
        thread.join().ok();
    }
    bail!("a server ended")
}

/// Serves each connection in a thread of its own.
fn each(listener: &TcpListener, serve: fn(TcpStream) -> Result<()>) {
    for stream in listener.incoming().flatten() {
        std::thread::spawn(move || {
            if let Err(error) = serve(stream) {
                eprintln!("peer: {error:#}");
            }
        });
    }
}

/// Eight bytes say how much to send; then that much, the hash first.
fn serve_source(mut stream: TcpStream) -> Result<()> {
    let mut request = [0; 8];
    stream.read_exact(&mut request)?;
    let total = u64::from_le_bytes(request);
    send_pattern(&mut stream, total, total)?;
    Ok(())
}

/// Reads to the end, then answers with the hash of all that came.
fn serve_sink(mut stream: TcpStream) -> Result<()> {
    let (_, hash) = receive_all(&mut stream)?;
    stream.write_all(hash.as_bytes())?;
    Ok(())
}

fn serve_echo(mut stream: TcpStream) -> Result<()> {
    let mut writer = stream.try_clone()?;
    io::copy(&mut stream, &mut writer)?;
    Ok(())
}

fn serve_dns(mut stream: TcpStream) -> Result<()> {
    loop {
        let mut len = [0; 2];
        if stream.read_exact(&mut len).is_err() {
            return Ok(());
        }
        let mut question = vec![0; usize::from(u16::from_be_bytes(len))];
        stream.read_exact(&mut question)?;
        if let Some(reply) = answer(&question) {
            let len = u16::try_from(reply.len())?.to_be_bytes();
            stream.write_all(&[&len[..], &reply].concat())?;
        }
    }
}

fn serve_datagrams(socket: &UdpSocket, reply: impl Fn(&[u8]) -> Option<Vec<u8>>) {
    let mut buffer = vec![0; 65536];
    while let Ok((n, from)) = socket.recv_from(&mut buffer) {
        if let Some(reply) = reply(&buffer[..n]) {
            let _ = socket.send_to(&reply, from);
        }
    }
}

/// Every A question is answered with 192.0.2.77.
fn answer(question: &[u8]) -> Option<Vec<u8>> {
    let mut end = 12;
    while *question.get(end)? != 0 {
        end += 1 + usize::from(question[end]);
    }
    end += 5;
    let mut reply = question.get(..end)?.to_vec();
    reply[2..12].copy_from_slice(&[0x81, 0x80, 0, 1, 0, 1, 0, 0, 0, 0]);
    let a_record = question[end - 4..end - 2] == [0, 1];
    if a_record {
        reply.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4, 192, 0, 2, 77]);
    } else {
        reply[7] = 0;
    }
    Some(reply)
}

fn question(id: u16) -> Vec<u8> {
    let mut bytes = id.to_be_bytes().to_vec();
    bytes.extend([1, 0, 0, 1, 0, 0, 0, 0, 0, 0]);
    bytes.extend(b"\x05story\x04test\0\0\x01\0\x01");
    bytes
}

fn check_reply(reply: &[u8], id: u16) -> Result<()> {
    ensure!(reply.len() > 12, "a reply of {} bytes", reply.len());
    ensure!(reply[..2] == id.to_be_bytes(), "the reply has another id");
    ensure!(reply[3] & 15 == 0, "the reply's code is {}", reply[3] & 15);
    ensure!(
        reply.ends_with(&[192, 0, 2, 77]),
        "the reply has another address"
    );
    Ok(())
}

fn dns_udp(server: &str) -> Result<String> {
    let socket = UdpSocket::bind("0.0.0.0:0")?;
    socket.set_read_timeout(Some(Duration::from_secs(5)))?;
    let started = Instant::now();
    for id in 0..20u16 {
        socket.send_to(&question(id), (server, 53))?;
        let mut buffer = [0; 512];
        let n = socket.recv(&mut buffer).context("no answer")?;
        check_reply(&buffer[..n], id)?;
    }
    Ok(format!("20 questions, {:.1?} each", started.elapsed() / 20))
}

fn dns_tcp(server: &str) -> Result<String> {
    let mut stream = connect(server, 53)?;
    for id in 0..2u16 {
        let question = question(id);
        let len = u16::try_from(question.len())?.to_be_bytes();
        stream.write_all(&[&len[..], &question].concat())?;
        let mut len = [0; 2];
        stream.read_exact(&mut len).context("no answer")?;
        let mut reply = vec![0; usize::from(u16::from_be_bytes(len))];
        stream.read_exact(&mut reply)?;
        check_reply(&reply, id)?;
    }
    Ok("2 questions on one connection".to_owned())
}

fn rate(bytes: u64, since: Instant) -> String {
    let seconds = since.elapsed().as_secs_f64();
    #[expect(clippy::cast_precision_loss, reason = "for display")]
    let mbit = bytes as f64 * 8e-6 / seconds;
    format!("{bytes} bytes, {mbit:.0} Mbit/s")
}

fn get(host: &str, total: u64) -> Result<String> {
    let mut stream = connect(host, port(SOURCE))?;
    let started = Instant::now();
    stream.write_all(&total.to_le_bytes())?;
    let (received, got) = receive_all(&mut stream)?;
    let summary = rate(received, started);
    let want = send_pattern(&mut io::sink(), total, total)?;
    ensure!(received == total, "received {received} of {total} bytes");
    ensure!(got == want, "the hash is {got}, not {want}");
    Ok(format!("{summary}, sha256 {}", &got[..12]))
}

/// Downloads after a pause in which the sender fills all windows; the first bytes must come at once.
fn pause(host: &str, total: u64, seconds: u64) -> Result<String> {
    let mut stream = connect(host, port(SOURCE))?;
    stream.write_all(&total.to_le_bytes())?;
    std::thread::sleep(Duration::from_secs(seconds));
    let started = Instant::now();
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 64 << 10];
    let (mut received, mut first, mut slowest) = (0u64, None, Duration::ZERO);
    let mut last = started;
    loop {
        let n = stream.read(&mut buffer).context("receiving failed")?;
        let waited = last.elapsed();
        last = Instant::now();
        // What the guest's own socket held says nothing: the longest wait is for what comes next.
        slowest = slowest.max(waited);
        first.get_or_insert(waited);
        if n == 0 {
            break;
        }
        hash.update(&buffer[..n]);
        received += n as u64;
    }
    let summary = rate(received, started);
    let want = send_pattern(&mut io::sink(), total, total)?;
    ensure!(received == total, "received {received} of {total} bytes");
    ensure!(hex(&hash.finalize()) == want, "the bytes differ");
    let first = first.unwrap_or_default();
    ensure!(
        first < Duration::from_secs(1) && slowest < Duration::from_secs(1),
        "first bytes after {first:.1?}, longest wait {slowest:.1?}"
    );
    Ok(format!("{summary}, longest wait {slowest:.1?}"))
}

/// Many downloads at once; each must move in each interval of five seconds.
fn streams(host: &str, count: u64, seconds: u64) -> Result<String> {
    const INTERVAL: Duration = Duration::from_secs(5);
    let started = Instant::now();
    let end = started + Duration::from_secs(seconds);
    let one = |number: u64| -> Result<u64> {
        let mut stream = connect(host, port(SOURCE))?;
        stream.set_read_timeout(Some(INTERVAL))?;
        stream.write_all(&(u64::MAX >> 8).to_le_bytes())?;
        let mut buffer = vec![0; 64 << 10];
        let mut total = 0;
        while Instant::now() < end {
            let n = stream
                .read(&mut buffer)
                .with_context(|| format!("stream {number} stood still after {total} bytes"))?;
            ensure!(n > 0, "stream {number} ended after {total} bytes");
            total += n as u64;
        }
        Ok(total)
    };
    let totals = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..count)
            .map(|number| scope.spawn(move || one(number)))
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|_| bail!("a thread panicked")))
            .collect::<Result<Vec<u64>>>()
    })?;
    let least = totals.iter().min().copied().unwrap_or_default();
    let summary = rate(totals.iter().sum(), started);
    Ok(format!("{count} streams, {summary}, the slowest {least}"))
}

fn put(host: &str, total: u64) -> Result<String> {
    let mut stream = connect(host, port(SINK))?;
    let started = Instant::now();
    let want = send_pattern(&mut stream, total, 7)?;
    stream.shutdown(Shutdown::Write)?;
    let mut got = String::new();
    stream
        .read_to_string(&mut got)
        .context("no hash came back")?;
    let summary = rate(total, started);
    ensure!(got == want, "the far side's hash is `{got}`, not {want}");
    Ok(format!("{summary}, sha256 {}", &got[..12]))
}

/// One connection: a few bytes there and back, then an orderly end.
fn exchange(host: &str, tag: u64) -> Result<()> {
    let mut stream = connect(host, port(ECHO))?;
    let message = format!("message {tag}");
    stream.write_all(message.as_bytes())?;
    stream.shutdown(Shutdown::Write)?;
    let mut reply = String::new();
    stream.read_to_string(&mut reply).context("no reply")?;
    ensure!(reply == message, "sent `{message}`, got `{reply}`");
    Ok(())
}

fn sequence(host: &str, count: u64) -> Result<String> {
    let started = Instant::now();
    for tag in 0..count {
        exchange(host, tag).with_context(|| format!("connection {tag}"))?;
    }
    let each = started.elapsed() / u32::try_from(count)?;
    Ok(format!("{count} connections, {each:.1?} each"))
}

fn parallel(host: &str, count: u64) -> Result<String> {
    let started = Instant::now();
    // All are open before the first byte is sent.
    let mut streams = (0..count)
        .map(|tag| connect(host, port(ECHO)).with_context(|| format!("connection {tag}")))
        .collect::<Result<Vec<_>>>()?;
    for (tag, stream) in streams.iter_mut().enumerate() {
        stream.write_all(format!("message {tag}").as_bytes())?;
        stream.shutdown(Shutdown::Write)?;
    }
    for (tag, stream) in streams.iter_mut().enumerate() {
        let mut reply = String::new();
        stream.read_to_string(&mut reply).context("no reply")?;
        ensure!(
            reply == format!("message {tag}"),
            "connection {tag} got `{reply}`"
        );
    }
    Ok(format!(
        "{count} connections at once, {:.1?}",
        started.elapsed()
    ))
}

fn refused(host: &str, port: &str) -> Result<String> {
    let port: u16 = port.parse().context("the port is not a number")?;
    let started = Instant::now();
    match TcpStream::connect((host, port)) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            Ok(format!("refused after {:.1?}", started.elapsed()))
        }
        Err(error) => bail!("not refused but: {error}"),
        Ok(_) => bail!("it looked connected"),
    }
}

fn udp(host: &str) -> Result<String> {
    let socket = UdpSocket::bind("0.0.0.0:0")?;
    socket.set_read_timeout(Some(Duration::from_secs(5)))?;
    socket.connect((host, port(ECHO)))?;
    let sizes = [0usize, 1, 2, 100, 1000, 1471, 1472];
    let mut buffer = vec![0; 65536];
    for size in sizes {
        let mut sent = vec![0; size];
        Pattern(size as u64 | 1).fill(&mut sent);
        socket.send(&sent)?;
        let n = socket
            .recv(&mut buffer)
            .with_context(|| format!("no echo of {size} bytes"))?;
        ensure!(buffer[..n] == sent[..], "the echo of {size} bytes differs");
    }
    Ok(format!("datagrams of {sizes:?} bytes echoed"))
}

fn greet(address: &str, count: u64) -> Result<String> {
    let listener =
        TcpListener::bind(address).with_context(|| format!("cannot listen on {address}"))?;
    for _ in 0..count {
        let (mut stream, peer) = listener.accept()?;
        let _ = stream.write_all(format!("hello {}\n", peer.ip()).as_bytes());
    }
    Ok(format!("{count} greeted"))
}

fn ask(host: &str, port: &str) -> Result<String> {
    let port: u16 = port.parse().context("the port is not a number")?;
    let mut line = String::new();
    connect(host, port)?.read_to_string(&mut line)?;
    ensure!(line.starts_with("hello "), "got `{}`", line.trim());
    Ok(line.trim().to_owned())
}
