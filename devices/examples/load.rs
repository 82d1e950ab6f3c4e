//! A driver-side load generator: uploads over UDP through each pair of queues of a card in front of
//! the NAT stack, from a thread per pair, without a guest.
//!
//! ```text
//! load --queues N [--flows N] [--bytes N] [--seconds N]
//!
//!   thread i: driver of pair i --TX ring--> worker i: shard of the NAT stack --> UDP socket
//! ```
//!
//! `--queues` is the number of pairs (1 to 8), `--flows` that of the guest's ports over all pairs,
//! `--bytes` the payload of a frame, a run of datagrams of 1400 bytes (UDP_SEGMENT). The far end is a
//! socket with little room that nobody reads, so that the work is that of the card and the stack. Prints
//! one line of JSON: bytes per second over all queues, and those of each.

use std::error::Error;
use std::net::UdpSocket;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use devices::net::{MAX_QUEUE_PAIRS, Net, NetConfig, rx_queue, tx_queue};
use devices::testing::{Buffer, MockInterrupt, MockRing};
use devices::virtio::spec::{F_EVENT_IDX, F_VERSION_1, NET_F_CSUM, NET_F_HOST_USO, NET_F_MQ};
use devices::virtio::{Activation, ActiveQueue, GuestRam, VirtioDevice as _};
use net::config::Config;
use net::nic::{VNET_HDR_F_NEEDS_CSUM, VNET_HDR_GSO_UDP_L4, VnetHdr};
use net::shard;
use net::stack::RxPath;
use vm_memory::{Bytes as _, GuestAddress, GuestMemoryMmap};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// Entries of each ring.
const SIZE: u16 = 256;
/// Memory of each pair: its rings, then its frames.
const PAIR_LEN: u64 = 128 << 20;
const FRAMES: u64 = 1 << 20;
/// Payload of a datagram.
const SEGMENT: u16 = 1400;
/// Ethernet, IPv4 and UDP.
const HEADERS: usize = 14 + 20 + 8;
/// `virtio_net_hdr` (VIRTIO 1.3, 5.1.6).
const HDR: usize = 12;

struct Options {
    queues: u16,
    flows: u16,
    bytes: usize,
    seconds: u64,
}

impl Options {
    fn parse() -> Result<Self, Box<dyn Error>> {
        let mut options = Self {
            queues: 1,
            flows: 16,
            bytes: 46 * usize::from(SEGMENT),
            seconds: 3,
        };
        let mut words = std::env::args().skip(1);
        while let Some(word) = words.next() {
            let value = words
                .next()
                .ok_or_else(|| format!("{word} takes a number"))?;
            match word.as_str() {
                "--queues" => options.queues = value.parse()?,
                "--flows" => options.flows = value.parse()?,
                "--bytes" => options.bytes = value.parse()?,
                "--seconds" => options.seconds = value.parse()?,
                _ => return Err(format!("there is no option {word}").into()),
            }
        }
        let (most, flows) = (65535 - HEADERS, options.queues..=10_000);
        if !(1..=MAX_QUEUE_PAIRS).contains(&options.queues) {
            return Err(format!("--queues is 1 to {MAX_QUEUE_PAIRS}").into());
        }
        if !flows.contains(&options.flows) || !(1..=most).contains(&options.bytes) {
            return Err(format!("--flows is {flows:?}, --bytes is 1 to {most}").into());
        }
        Ok(options)
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let options = Options::parse()?;
    let far = UdpSocket::bind("127.0.0.1:0")?;
    // The least there is: what arrives is dropped, and at once.
    rustix::net::sockopt::set_socket_recv_buffer_size(&far, 1)?;
    let port = far.local_addr()?.port();
    let far = OwnedFd::from(far);

    let len = usize::try_from(PAIR_LEN * u64::from(options.queues))?;
    let mem = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), len)])?;
    let config = Config {
        host_loopback: true,
        ..Config::default()
    };
    let backends = shard::stacks(&config, RxPath::default(), u8::try_from(options.queues)?)?;
    let card = NetConfig {
        queue_pairs: options.queues,
        queue_size: SIZE,
        ..NetConfig::default()
    };
    let mut net = Net::with_backends(card, backends)?;
    let mut drivers = Vec::new();
    let mut queues = Vec::new();
    for pair in 0..options.queues {
        let driver = Driver::new(&mem, pair, &options, &config, port)?;
        queues.extend(driver.queues(pair)?);
        drivers.push(driver);
    }
    let wanted = F_VERSION_1 | F_EVENT_IDX | NET_F_CSUM | NET_F_HOST_USO | NET_F_MQ;
    net.activate(Activation {
        ram: GuestRam::new(mem),
        features: wanted & net.device_features(),
        queues,
        interrupt: Arc::new(MockInterrupt::default()),
    })?;
    let stop = AtomicBool::new(false);
    let sent: Vec<AtomicU64> = drivers.iter().map(|_| AtomicU64::new(0)).collect();
    let started = Instant::now();
    let elapsed = std::thread::scope(|scope| {
        for (driver, sent) in drivers.iter_mut().zip(&sent) {
            scope.spawn(|| driver.run(sent, &stop));
        }
        std::thread::sleep(Duration::from_secs(options.seconds));
        stop.store(true, Ordering::Release);
        started.elapsed()
    });
    net.reset();
    drop(far);
    let rates = sent.iter().map(|frames| {
        let bytes = frames.load(Ordering::Acquire) * options.bytes as u64;
        bytes as f64 / elapsed.as_secs_f64()
    });
    let rates: Vec<f64> = rates.collect();
    let total: f64 = rates.iter().sum();
    println!("{{\"bytes_per_second\": {total:.0}, \"queues\": {rates:.0?}}}");
    Ok(())
}

/// The driver of one pair of queues.
struct Driver {
    rx: MockRing,
    tx: MockRing,
    rx_kick: Arc<EventFd>,
    tx_kick: Arc<EventFd>,
    /// One for each flow, header included.
    frames: Vec<Buffer>,
}

impl Driver {
    fn new(
        mem: &GuestMemoryMmap,
        pair: u16,
        options: &Options,
        config: &Config,
        port: u16,
    ) -> Result<Self, Box<dyn Error>> {
        let base = PAIR_LEN * u64::from(pair);
        let rx = MockRing::new(mem.clone(), base, SIZE);
        let tx = MockRing::new(mem.clone(), base + MockRing::footprint(SIZE), SIZE);
        let mut frames = Vec::new();
        let len = HDR + HEADERS + options.bytes;
        for flow in (pair..options.flows).step_by(usize::from(options.queues)) {
            let addr = base + FRAMES + (frames.len() * len.next_multiple_of(4096)) as u64;
            if addr + len as u64 > base + PAIR_LEN {
                break; // Flows enough for the memory that there is.
            }
            let bytes = frame(config, 20_000 + flow, port, options.bytes);
            mem.write_slice(&bytes, GuestAddress(addr))?;
            frames.push(Buffer {
                addr,
                len: u32::try_from(len)?,
            });
        }
        let kick = || EventFd::new(EFD_NONBLOCK).map(Arc::new);
        Ok(Self {
            rx,
            tx,
            rx_kick: kick()?,
            tx_kick: kick()?,
            frames,
        })
    }

    fn queues(&self, pair: u16) -> Result<[ActiveQueue; 2], Box<dyn Error>> {
        let (rx, tx) = (self.rx.queue(true), self.tx.queue(true));
        Ok([
            ActiveQueue {
                index: rx_queue(pair),
                queue: rx,
                kick: self.rx_kick.clone(),
            },
            ActiveQueue {
                index: tx_queue(pair),
                queue: tx,
                kick: self.tx_kick.clone(),
            },
        ])
    }

    /// Sends until told to stop, as a driver does that wants no interrupts.
    fn run(&mut self, sent: &AtomicU64, stop: &AtomicBool) {
        let mut next = 0;
        while !stop.load(Ordering::Acquire) {
            let old = self.tx.avail_idx();
            while self.tx.add(&[self.frames[next]], 0).is_some() {
                next = (next + 1) % self.frames.len();
            }
            std::sync::atomic::fence(Ordering::SeqCst);
            let (event, new) = (self.tx.avail_event(), self.tx.avail_idx());
            if new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old) {
                // Fails only when the counter is full; then it is readable anyway.
                let _ = self.tx_kick.write(1);
            }
            // The ring is full: some of it takes longer than this.
            std::thread::sleep(Duration::from_micros(50));
            let mut done = 0;
            while self.tx.pop_used().is_some() {
                done += 1;
            }
            sent.fetch_add(done, Ordering::AcqRel);
        }
    }
}

/// A frame with a run of datagrams from `source` of the guest to `port` of the gateway.
fn frame(config: &Config, source: u16, port: u16, payload: usize) -> Vec<u8> {
    let hdr = VnetHdr {
        flags: VNET_HDR_F_NEEDS_CSUM,
        gso_type: VNET_HDR_GSO_UDP_L4,
        hdr_len: 42,
        gso_size: SEGMENT,
        csum_start: 34,
        csum_offset: 6,
    };
    let mut frame = hdr.encode().to_vec();
    frame.extend([0, 0]); // num_buffers
    frame.extend(config.gateway_mac);
    frame.extend(NetConfig::default().mac);
    frame.extend([0x08, 0x00]);
    let word = |n: usize| u16::try_from(n).unwrap_or(u16::MAX).to_be_bytes();
    let mut ip = vec![0x45, 0];
    ip.extend(word(20 + 8 + payload));
    ip.extend([0, 0, 0x40, 0, 64, 17, 0, 0]);
    ip.extend(config.guest_ip.octets());
    ip.extend(config.gateway.octets());
    let words = ip
        .chunks(2)
        .map(|two| u32::from(two[0]) << 8 | u32::from(two[1]));
    let sum: u32 = words.sum();
    let sum = (sum & 0xffff) + (sum >> 16);
    ip[10..12].copy_from_slice(&word(usize::try_from(!sum & 0xffff).unwrap_or(0)));
    frame.extend(ip);
    frame.extend(source.to_be_bytes());
    frame.extend(port.to_be_bytes());
    frame.extend(word(8 + payload));
    frame.extend([0, 0]);
    frame.resize(HDR + HEADERS + payload, 0x5a);
    frame
}
