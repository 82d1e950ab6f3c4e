//! The NAT stack behind the card, with real sockets on the host's loopback.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, UdpSocket};
use std::time::{Duration, Instant};

use net::config::Config;
use net::nic::{Backend, Offloads, VNET_HDR_GSO_UDP_L4, VnetHdr};
use net::stack::{RxPath, Stack};

use super::card::{Card, layouts};
use super::packet::{UDP, View, cut, finish_checksum, leave_checksum, udp};
use super::tcp::Client;
use super::{all_offload_bits, feature_sets, with_context};
use crate::net::features::{GUEST_OFFLOADS, accepted_offloads, offered_features};
use crate::virtio::spec::{F_VERSION_1, NET_F_CTRL_GUEST_OFFLOADS, NET_F_GUEST_CSUM};

const PATIENCE: Duration = Duration::from_secs(20);
/// Not a multiple of a segment or of a frame.
const STREAM: usize = 300_001;

/// Header and frame of the largest packet (VIRTIO 1.3, 5.1.6.3.1).
const SHORTEST: usize = 12 + 14 + 1500;

fn stack(path: RxPath) -> Box<dyn Backend> {
    let config = Config {
        host_loopback: true,
        ..Config::default()
    };
    Box::new(Stack::new(config, path).unwrap())
}

fn guest(port: u16) -> SocketAddr {
    SocketAddr::from(([10, 0, 2, 15], port))
}

/// Where the guest finds `port` of the host's loopback.
fn gateway(port: u16) -> SocketAddr {
    SocketAddr::from(([10, 0, 2, 2], port))
}

/// Bytes that repeat after no round number of them.
fn random(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(2) + 0x9e37_79b9_7f4a_7c15;
    (0..len)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 32) as u8
        })
        .collect()
}

/// Calls `run` with each set of features that the stack can be given, each layout of buffers and each
/// way to the guest.
fn for_all(mut run: impl FnMut(u64, &[usize], RxPath)) {
    let offloads = stack(RxPath::Ring).offloads();
    for features in feature_sets(offloads) {
        for layout in layouts(features) {
            for (name, path) in RxPath::ALL {
                with_context(features, &layout, name, || run(features, &layout, path));
            }
        }
    }
}

/// A server that takes a stream to its end and then sends another one.
fn serve(expected: Vec<u8>, answer: Vec<u8>) -> (u16, std::thread::JoinHandle<()>) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut got = Vec::new();
        stream.read_to_end(&mut got).unwrap();
        assert!(got == expected, "the upload differs");
        stream.write_all(&answer).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
    });
    (port, server)
}

/// Both streams of a connection; `between` is called after each step of the download.
fn transfer(card: &mut Card, window: u16, mut between: impl FnMut(&mut Card, usize)) {
    let (up, down) = (random(STREAM, 1), random(STREAM, 2));
    let (port, server) = serve(up.clone(), down.clone());
    let mut client = Client::new(guest(40_000), gateway(port), window, up);
    let deadline = Instant::now() + PATIENCE;
    let mut held = None;
    while !client.is_done() {
        assert!(
            Instant::now() < deadline,
            "stuck: {client:?}, {} times without buffers",
            card.counter("rx_starved")
        );
        while let Some((hdr, frame)) = held.take().or_else(|| client.poll(card.offloads())) {
            if !card.send(&hdr, &frame) {
                held = Some((hdr, frame));
                break;
            }
        }
        let packets = card.step();
        let idle = packets.is_empty();
        for packet in packets {
            assert_eq!(View::of(&packet).ports(&packet), (port, 40_000));
            client.handle(&packet);
        }
        between(card, client.received.len());
        if idle {
            std::thread::yield_now();
        }
    }
    server.join().unwrap();
    assert!(client.received == down, "the download differs");
    assert_eq!(card.counter("rx_undeliverable"), 0);
}

#[test]
fn tcp_both_ways() {
    let mut long_frames = 0;
    for_all(|features, layout, path| {
        let mut card = Card::new(features, layout, stack(path));
        transfer(&mut card, 50_000, |_, _| {});
        long_frames += card.long_frames;
    });
    assert!(long_frames > 0, "GUEST_TSO4 was never used");
}

/// Buffers that hold a frame of the MTU to the byte are all that a driver without MRG_RXBUF has.
#[test]
fn tcp_with_the_shortest_buffers() {
    for (_, path) in RxPath::ALL {
        let mut card = Card::new(F_VERSION_1, &[SHORTEST], stack(path));
        transfer(&mut card, 50_000, |_, _| {});
    }
}

/// The end of a stream that comes while all of it is in flight is seen after the ACKs.
#[test]
fn tcp_by_direct_discard() {
    for _ in 0..40 {
        let features = F_VERSION_1 | NET_F_GUEST_CSUM;
        let mut card = Card::new(features, &[SHORTEST], stack(RxPath::DirectDiscard));
        transfer(&mut card, 50_000, |_, _| {});
    }
}

#[test]
fn tcp_while_the_offloads_change() {
    for_all(|features, layout, path| {
        if features & NET_F_CTRL_GUEST_OFFLOADS == 0 {
            return;
        }
        let guest = accepted_offloads(features) & GUEST_OFFLOADS;
        let all = features & offered_features(guest) & all_offload_bits();
        let sets = [0, all & NET_F_GUEST_CSUM, all];
        let mut card = Card::new(features, layout, stack(path));
        let (mut changes, mut next) = (0, 1);
        // A small window, so that it takes many steps.
        transfer(&mut card, 2_500, |card, received| {
            if received >= next {
                card.set_offloads(sets[changes % sets.len()]);
                changes += 1;
                next = received + 5000;
            }
        });
        assert!(changes > 6, "{changes} changes");
    });
}

/// Answers each datagram with itself, until one without payload comes.
fn echo() -> (u16, std::thread::JoinHandle<()>) {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    let port = socket.local_addr().unwrap().port();
    let server = std::thread::spawn(move || {
        let mut buffer = [0; 65536];
        loop {
            let (len, from) = socket.recv_from(&mut buffer).unwrap();
            socket.send_to(&buffer[..len], from).unwrap();
            if len == 0 {
                return;
            }
        }
    });
    (port, server)
}

/// Datagrams of all sizes: alone, and in runs if the card may be sent such. The last is empty.
fn datagrams(offloads: Offloads, guest: SocketAddr, far: SocketAddr) -> Vec<(VnetHdr, Vec<u8>)> {
    let mut frames = Vec::new();
    for (seed, len) in (0..).zip([1, 2, 31, 32, 512, 1000, 1471, 1472, 1472, 1472, 700]) {
        let mut frame = udp(guest, far, &random(len, seed));
        finish_checksum(&mut frame);
        if offloads.contains(Offloads::CSUM) && seed % 2 == 0 {
            frames.push((leave_checksum(&mut frame), frame));
        } else {
            frames.push((VnetHdr::default(), frame));
        }
    }
    if offloads.contains(Offloads::HOST_USO) {
        for (seed, len, gso_size) in [(50, 20 * 1472, 1472), (51, 1473, 1472), (52, 4001, 100)] {
            let mut frame = udp(guest, far, &random(len, seed));
            let hdr = VnetHdr {
                gso_type: VNET_HDR_GSO_UDP_L4,
                gso_size,
                ..leave_checksum(&mut frame)
            };
            frames.push((hdr, frame));
        }
    }
    let mut last = udp(guest, far, &[]);
    finish_checksum(&mut last);
    frames.push((VnetHdr::default(), last));
    frames
}

#[test]
fn udp_both_ways() {
    for_all(|features, layout, path| {
        let mut card = Card::new(features, layout, stack(path));
        let (port, server) = echo();
        let sent = datagrams(card.offloads(), guest(40_000), gateway(port));
        let expected: Vec<_> = sent
            .iter()
            .flat_map(|(hdr, frame)| cut(hdr, frame))
            .collect();
        let mut got = Vec::new();
        let mut frames = sent.iter();
        let deadline = Instant::now() + PATIENCE;
        while got.len() < expected.len() {
            assert!(Instant::now() < deadline, "stuck at {}", got.len());
            // A few at a time: no queue on the way overflows.
            for (hdr, frame) in frames.by_ref().take(4) {
                assert!(card.send(hdr, frame));
            }
            let packets = card.step();
            if packets.is_empty() {
                std::thread::yield_now();
            }
            got.extend(packets);
        }
        server.join().unwrap();
        for (index, (got, expected)) in got.iter().zip(&expected).enumerate() {
            let (view, sent) = (View::of(got), View::of(expected));
            assert_eq!((view.protocol, view.ports(got)), (UDP, (port, 40_000)));
            assert!(
                got[view.payload..] == expected[sent.payload..],
                "datagram {index} differs"
            );
        }
    });
}
