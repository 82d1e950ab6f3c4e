use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsRawFd as _;

use mio::unix::SourceFd;

use super::*;
use crate::outbox::Outbox;
use crate::testkit::guest::GUEST_MAC;
use crate::testkit::ring::MemoryRing;
use crate::wire::Macs;
use crate::wire::datagram::Datagram;

/// Two shards of a guest, and a socket on this machine that it talks to.
struct Pair {
    shards: Vec<Shard>,
    far: UdpSocket,
    now: Instant,
}

impl Pair {
    fn new() -> Self {
        let config = Config {
            host_loopback: true,
            ..Config::default()
        };
        let mut shards = shards(&config, RxPath::Ring, 2).unwrap();
        let link = Link {
            guest_mac: GUEST_MAC,
            mtu: 1500,
            offloads: Offloads::empty(),
        };
        shards.iter_mut().for_each(|shard| shard.configure(&link));
        let far = UdpSocket::bind("127.0.0.1:0").unwrap();
        far.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        Self {
            shards,
            far,
            now: Instant::now(),
        }
    }

    /// The guest sends `payload` from `port` through the queue of `shard`.
    fn send(&mut self, shard: usize, port: u16, payload: &[u8]) {
        let config = Config::default();
        let mut outbox = Outbox::default();
        let datagram = Datagram {
            macs: Macs {
                gateway: GUEST_MAC,
                guest: config.gateway_mac,
            },
            from: SocketAddr::new(config.guest_ip.into(), port),
            to: SocketAddr::new(config.gateway.into(), self.far.local_addr().unwrap().port()),
            ident: 0,
            mtu: 1500,
            payload,
        };
        datagram.push(&mut outbox);
        let mut ring = MemoryRing::new(&[2048]);
        assert!(outbox.deliver(&mut ring));
        let (hdr, mut frame) = ring.frames.pop_front().unwrap();
        let mut burst = TxBurst::default();
        burst.push_slice(VolatileSlice::from(&mut frame[..]));
        burst.end_frame(hdr);
        self.shards[shard].transmit(&burst, self.now);
    }

    /// Frames that `shard` has for the guest.
    fn receive(&mut self, shard: usize) -> usize {
        let mut ring = MemoryRing::new(&[2048]);
        self.shards[shard].receive(&mut ring, self.now);
        ring.frames.len()
    }

    fn arrived(&self) -> (Vec<u8>, SocketAddr) {
        let mut buffer = [0; 2048];
        let (n, from) = self.far.recv_from(&mut buffer).unwrap();
        (buffer[..n].to_vec(), from)
    }
}

#[test]
fn a_flow_stays_where_it_began_and_its_order_is_kept() {
    let mut pair = Pair::new();
    pair.send(0, 5000, b"0");
    let (_, name) = pair.arrived();
    for i in 1..=9u8 {
        pair.send(1, 5000, &[b'0' + i]);
    }
    assert_eq!(pair.receive(1), 0);
    // Its own thread is the one to send them.
    pair.receive(0);
    for i in 1..=9u8 {
        assert_eq!(pair.arrived(), (vec![b'0' + i], name));
    }
    // Back on its own queue, behind what is still in the mail.
    pair.send(1, 5000, b"a");
    pair.send(0, 5000, b"b");
    assert_eq!(pair.arrived().0, b"a");
    assert_eq!(pair.arrived().0, b"b");
    pair.far.send_to(b"answer", name).unwrap();
    let deadline = Instant::now() + Duration::from_secs(10);
    while pair.receive(0) == 0 {
        assert!(Instant::now() < deadline);
        assert_eq!(pair.receive(1), 0);
    }
    // Another port that began on the other queue.
    pair.send(1, 5001, b"x");
    let (_, other) = pair.arrived();
    pair.far.send_to(b"answer", other).unwrap();
    while pair.receive(1) == 0 {
        assert!(Instant::now() < deadline);
        assert_eq!(pair.receive(0), 0);
    }
}

/// Waits for `shard` as the worker does.
fn watch(shard: &Shard) -> mio::Poll {
    let poll = mio::Poll::new().unwrap();
    let fd = shard.poll_fd().unwrap().as_raw_fd();
    let (token, interest) = (mio::Token(0), mio::Interest::READABLE);
    let registry = poll.registry();
    registry
        .register(&mut SourceFd(&fd), token, interest)
        .unwrap();
    poll
}

#[test]
fn a_frame_for_another_shard_makes_it_readable() {
    let mut pair = Pair::new();
    pair.send(0, 5000, b"mine");
    pair.arrived();
    let mut poll = watch(&pair.shards[0]);
    let mut events = mio::Events::with_capacity(1);
    poll.poll(&mut events, Some(Duration::ZERO)).unwrap();
    assert!(events.is_empty());
    for _ in 0..2 {
        pair.send(1, 5000, b"yours");
        poll.poll(&mut events, Some(Duration::from_secs(10)))
            .unwrap();
        assert!(!events.is_empty());
        pair.receive(0);
        assert_eq!(pair.arrived().0, b"yours");
    }
}

/// Stops a thread when it goes.
struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// The owner sleeps and wakes as the worker does, and each time there is one letter more.
#[test]
fn no_letter_is_left_behind() {
    const LETTERS: usize = 20_000;
    let mut pair = Pair::new();
    pair.send(0, 5000, b"first");
    pair.arrived();
    let mut owner = pair.shards.remove(0);
    // Now the first, and only, of those that the pair has.
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut poll = watch(&owner);
            let mut events = mio::Events::with_capacity(1);
            let mut ring = MemoryRing::new(&[2048]);
            while !stop.load(Ordering::Acquire) {
                while owner.receive(&mut ring, Instant::now()) == Stop::Yield {}
                poll.poll(&mut events, Some(Duration::from_secs(20)))
                    .unwrap();
            }
        });
        // Also when an assertion fails.
        let _end = End(&stop);
        for letter in 0..LETTERS {
            pair.send(0, 5000, &letter.to_le_bytes());
            if letter % 3 == 0 {
                continue;
            }
            for letter in letter - usize::from(letter % 3 == 1)..=letter {
                assert_eq!(pair.arrived().0, letter.to_le_bytes());
            }
        }
        stop.store(true, Ordering::Release);
        pair.send(0, 5000, b"the end");
    });
}

#[test]
fn a_port_without_flows_can_move() {
    let mut pair = Pair::new();
    pair.send(0, 5000, b"a");
    pair.arrived();
    pair.now += SWEEP;
    pair.receive(0);
    assert_eq!(pair.shards[0].claimed.len(), 1, "its flow lives");
    // Far beyond any UDP flow's time.
    pair.now += Duration::from_secs(3600);
    pair.receive(0);
    pair.now += SWEEP;
    pair.receive(0);
    assert_eq!(pair.shards[0].claimed.len(), 0);
    assert_eq!(pair.shards[0].sweep, None);
    pair.send(1, 5000, b"b");
    assert_eq!(pair.arrived().0, b"b");
}

#[test]
fn a_mailbox_is_bounded() {
    let mut pair = Pair::new();
    pair.send(0, 5000, b"");
    for _ in 0..MAX_FRAMES + 5 {
        pair.send(1, 5000, b"");
    }
    let drops = pair.shards[1].stack.drops();
    assert_eq!(drops.iter().map(|(_, n)| n).sum::<u64>(), 5);
}

#[test]
fn ports_of_forwards_belong_to_the_first() {
    let free = UdpSocket::bind("127.0.0.1:0").unwrap();
    let config = Config {
        forwards: vec![crate::config::Forward {
            protocol: Protocol::Tcp,
            host: free.local_addr().unwrap(),
            guest_port: 80,
        }],
        ..Config::default()
    };
    let shards = shards(&config, RxPath::Ring, 2).unwrap();
    let port = |protocol| Port {
        protocol,
        number: 80,
    };
    let owners = &shards[1].shared.owners;
    assert_eq!(owners.claim(port(Protocol::Tcp), 1), (0, false));
    assert_eq!(owners.claim(port(Protocol::Udp), 1), (1, true));
}
