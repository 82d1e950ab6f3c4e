//! Flows, their ends and their errors, on a virtual clock.

use std::time::{Duration, Instant};

use smoltcp::wire::{EthernetFrame, Ipv4Packet, UdpPacket};

use super::table::{ONE_WAY, TWO_WAY};
use super::*;
use crate::config::{Forward, Protocol};
use crate::drops::Drops;
use crate::nic::{Offloads, Stop, VNET_HDR_F_NEEDS_CSUM, VNET_HDR_GSO_UDP_L4, VnetHdr};
use crate::outbox::Outbox;
use crate::testkit::datagrams::{FakeHost, MACS, Wire, accept, take};
use crate::testkit::ring::MemoryRing;

/// One datagram from port 1 to the peer.
fn alone(payload: &[u8]) -> Sent<'_> {
    (1, PEER, payload, payload.len())
}

struct Rig {
    config: Config,
    table: UdpTable<FakeHost>,
    host: FakeHost,
    /// Errors for the guest.
    out: Outbox,
    /// Datagrams for the guest.
    ring: MemoryRing,
    link: UdpLink,
    drops: Drops,
    now: Instant,
}

/// Port, destination, payload and segment length of what the guest sends in one frame.
type Sent<'a> = (u16, &'a str, &'a [u8], usize);

fn addr(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

impl Rig {
    fn new() -> Self {
        Self {
            config: Config::default(),
            table: UdpTable::default(),
            host: FakeHost::default(),
            out: Outbox::default(),
            ring: MemoryRing::new(&[1526]),
            link: UdpLink {
                macs: MACS,
                mtu: 1500,
                offloads: Offloads::empty(),
            },
            drops: Drops::default(),
            now: Instant::now(),
        }
    }

    /// A rig whose guest takes `offloads` and has sent to 192.0.2.1:7 from port 1.
    fn with(offloads: Offloads) -> Self {
        let mut rig = Self::new();
        rig.link.offloads = offloads;
        rig.guest_sends(1, PEER).unwrap();
        rig
    }

    fn guest_sends(&mut self, port: u16, far: &str) -> Result<(), DropReason> {
        self.guest_sends_with(port, far, 64)
    }

    fn guest_sends_with(&mut self, port: u16, far: &str, hops: u8) -> Result<(), DropReason> {
        let burst: [(Sent<'_>, u8); 1] = [((port, far, b"data", 4), hops)];
        let before = self.drops;
        self.burst_with_hops(&burst)?;
        let mut dropped = DropReason::ALL.into_iter();
        match dropped.find(|&reason| self.drops.get(reason) > before.get(reason)) {
            Some(reason) => Err(reason),
            None => Ok(()),
        }
    }

    fn burst(&mut self, sent: &[Sent<'_>]) {
        let burst: Vec<_> = sent.iter().map(|&sent| (sent, 64)).collect();
        self.burst_with_hops(&burst).unwrap();
    }

    /// The guest sends it all in one burst.
    fn burst_with_hops(&mut self, burst: &[(Sent<'_>, u8)]) -> Result<(), DropReason> {
        let mut memory: Vec<Vec<u8>> = burst
            .iter()
            .map(|((_, _, payload, _), _)| [b"headers", *payload].concat())
            .collect();
        let frames: Vec<Vec<VolatileSlice<'_>>> = memory
            .iter_mut()
            .map(|frame| {
                let at = 9.min(frame.len());
                let (a, b) = frame.split_at_mut(at);
                vec![VolatileSlice::from(a), VolatileSlice::from(b)]
            })
            .collect();
        let mut run = Outgoing::default();
        let mut result = Ok(());
        for (&((port, far, payload, segment), hop_limit), frame) in burst.iter().zip(&frames) {
            let datagram = GuestDatagram {
                guest: SocketAddr::from(([10, 0, 2, 15], port)),
                far: addr(far),
                hop_limit,
                payload: Payload {
                    frame,
                    at: 7,
                    len: payload.len(),
                },
                segment,
            };
            let config = &self.config;
            let to = |far| route(config, far);
            result = result.and(self.table.handle_from_guest(
                &datagram,
                to,
                &mut run,
                &mut self.host,
                self.now,
            ));
        }
        self.table.end_run(&mut run, &mut self.drops);
        result
    }

    /// Bytes and segment length of the messages in each call on the socket, after the first call.
    fn calls(&self, index: usize) -> Vec<Vec<(usize, Option<u16>)>> {
        self.wire(index).calls.clone()
    }

    /// Lengths of the datagrams that left by the socket.
    fn lengths(&self, index: usize) -> Vec<usize> {
        let wire = self.wire(index);
        wire.sent.iter().map(|(_, bytes)| bytes.len()).collect()
    }

    fn wire(&self, index: usize) -> std::cell::RefMut<'_, Wire> {
        self.host.sockets[index].borrow_mut()
    }

    fn arrives(&mut self, index: usize, from: &str, payload: &[u8]) {
        let number = {
            let mut wire = self.wire(index);
            wire.arrives.push_back((addr(from), payload.to_vec()));
            wire.number
        };
        self.table.handle_event(number);
    }

    /// As [`Self::arrives`], from the peer, cut by the kernel into `segment` bytes.
    fn run_arrives(&mut self, payload: &[u8], segment: usize) {
        self.wire(0).segment = segment;
        self.arrives(0, PEER, payload);
    }

    fn pump(&mut self) -> Stop {
        let stop = self
            .table
            .pump(&self.config, &self.link, &mut self.ring, self.now);
        self.table.pump_errors(&self.config, MACS, &mut self.out);
        stop
    }

    /// Takes what the guest received, frame by frame.
    #[track_caller]
    fn received(&mut self) -> Vec<(VnetHdr, Vec<Vec<u8>>)> {
        let frames = self.ring.frames.drain(..);
        frames
            .map(|(hdr, frame)| {
                let datagrams = accept(&hdr, &frame);
                (
                    hdr,
                    datagrams.into_iter().map(|(_, _, bytes)| bytes).collect(),
                )
            })
            .collect()
    }

    #[track_caller]
    fn only_datagram(&mut self) -> (SocketAddr, SocketAddr, Vec<u8>) {
        assert_eq!(self.ring.frames.len(), 1);
        let (hdr, frame) = self.ring.frames.pop_front().unwrap();
        accept(&hdr, &frame).pop().unwrap()
    }

    fn after(&mut self, time: Duration) {
        self.now += time;
        self.table.handle_timeout(self.now);
    }

    /// Type, code, sender and quoted destination of the one ICMP error.
    #[track_caller]
    fn guest_hears(&mut self, kind: u8, code: u8, from: [u8; 4], far: [u8; 4]) {
        self.pump();
        let frames = take(&mut self.out);
        assert_eq!(frames.len(), 1);
        let ethernet = EthernetFrame::new_checked(&frames[0][..]).unwrap();
        let ip = Ipv4Packet::new_checked(ethernet.payload()).unwrap();
        assert_eq!(ip.payload()[..2], [kind, code]);
        assert_eq!(ip.src_addr().octets(), from);
        let quoted = Ipv4Packet::new_unchecked(&ip.payload()[8..]);
        assert_eq!(quoted.dst_addr().octets(), far);
    }
}

const GATEWAY: [u8; 4] = [10, 0, 2, 2];
const PEER: &str = "192.0.2.1:7";

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 31 + i / 251) as u8).collect()
}

#[test]
fn one_socket_serves_all_peers_of_a_guest_port() {
    let mut rig = Rig::new();
    rig.guest_sends(4096, "192.0.2.1:7").unwrap();
    rig.guest_sends(4096, "192.0.2.2:9").unwrap();
    rig.guest_sends(4097, "192.0.2.1:7").unwrap();
    assert_eq!(rig.host.sockets.len(), 2);
    assert_eq!(rig.wire(0).sent[1], (addr("192.0.2.2:9"), b"data".to_vec()));
    assert_eq!(rig.wire(0).hop_limit, Some(63));

    rig.arrives(0, "192.0.2.1:7", b"");
    assert_eq!(rig.pump(), Stop::Idle);
    let (from, to, payload) = rig.only_datagram();
    assert_eq!(from, addr("192.0.2.1:7"));
    assert_eq!(to, addr("10.0.2.15:4096"));
    assert!(payload.is_empty());
    rig.arrives(0, "192.0.2.9:7", b"stranger");
    rig.arrives(0, "192.0.2.1:8", b"stranger");
    rig.pump();
    assert!(rig.ring.frames.is_empty());
}

#[test]
fn flows_end_when_idle() {
    let mut rig = Rig::new();
    rig.guest_sends(1, "192.0.2.1:7").unwrap();
    rig.guest_sends(2, "192.0.2.1:7").unwrap();
    rig.arrives(1, "192.0.2.1:7", b"x");
    rig.pump();
    rig.after(ONE_WAY - Duration::from_millis(1));
    assert_eq!(rig.table.len(), 2);
    assert_eq!(
        rig.table.poll_timeout(),
        Some(rig.now + Duration::from_millis(1))
    );
    rig.after(Duration::from_millis(1));
    assert_eq!(rig.table.len(), 1);
    assert!(!rig.wire(0).open);
    rig.after(TWO_WAY - ONE_WAY - Duration::from_millis(1));
    assert!(rig.wire(1).open);
    rig.after(Duration::from_millis(1));
    assert!(rig.table.is_empty());
    assert_eq!(rig.table.poll_timeout(), None);
}

#[test]
fn the_flow_idle_longest_makes_room() {
    let mut rig = Rig::new();
    for port in 1..=MAX_FLOWS as u16 {
        rig.guest_sends(port, "192.0.2.1:7").unwrap();
        rig.now += Duration::from_micros(1);
    }
    rig.guest_sends(1, "192.0.2.1:7").unwrap();
    rig.guest_sends(9999, "192.0.2.1:7").unwrap();
    assert_eq!(rig.table.len(), MAX_FLOWS);
    assert!(rig.wire(0).open);
    assert!(!rig.wire(1).open);
    rig.host.exhausted = true;
    let refused = rig.guest_sends(10_000, "192.0.2.1:7");
    assert_eq!(refused, Err(DropReason::NoSocket));
}

#[test]
fn a_guest_without_buffers_leaves_datagrams_in_their_socket() {
    let mut rig = Rig::with(Offloads::empty());
    for i in 0..100_u8 {
        rig.arrives(0, PEER, &[i]);
    }
    rig.ring.credit = 40;
    assert_eq!(rig.pump(), Stop::NoBuffers);
    assert!(rig.wire(0).arrives.len() >= 100 - 40 - batch::DATAGRAMS);
    assert_eq!(rig.pump(), Stop::NoBuffers);
    rig.ring.credit = 1000;
    assert_eq!(rig.pump(), Stop::Idle);
    let received = rig.received().into_iter().flat_map(|(_, bytes)| bytes);
    assert!(received.eq((0..100).map(|i| vec![i])));
}

#[test]
fn a_flood_leaves_others_their_turn() {
    let payload = pattern(20_000);
    for (from, len, segment, times) in [
        (PEER, 1, 0, 5000),
        ("192.0.2.9:7", 1, 0, 10_000),
        (PEER, 20_000, 1000, 100),
        (PEER, 600, 50, 1000),
    ] {
        for offloads in [Offloads::empty(), PARTIAL | Offloads::GUEST_USO4] {
            let mut rig = Rig::with(offloads);
            rig.wire(0).segment = segment;
            for _ in 0..times {
                rig.arrives(0, from, &payload[..len]);
            }
            let mut turns = 0;
            while rig.pump() == Stop::Yield {
                turns += 1;
                assert!(rig.ring.frames.len() <= turns * 1100);
            }
            assert!(turns > 1, "{turns}");
            let bytes: usize = rig.received().iter().map(|(_, b)| b.concat().len()).sum();
            assert_eq!(bytes, if from == PEER { len * times } else { 0 });
        }
    }
}

#[test]
fn a_closed_port_is_told_to_the_guest() {
    let mut rig = Rig::new();
    rig.config.host_loopback = true;
    rig.guest_sends(1, "10.0.2.2:9").unwrap();
    assert_eq!(rig.wire(0).sent[0].0, addr("127.0.0.1:9"));
    let told = SocketError {
        to: addr("127.0.0.1:9"),
        from: Some([127, 0, 0, 1].into()),
        kind: 3,
        code: 3,
        mtu: 0,
        payload_len: 4,
    };
    rig.wire(0).errors.push_back(told);
    rig.wire(0).refuses = Some(libc::ECONNREFUSED);
    rig.guest_sends(1, "10.0.2.2:9").unwrap();
    assert_eq!(rig.wire(0).sent.len(), 2, "sent all the same");
    rig.guest_hears(3, 3, GATEWAY, GATEWAY);
    rig.wire(0).errors.push_back(SocketError {
        to: addr("198.51.100.1:9"),
        ..told
    });
    rig.table.handle_event(0);
    assert_eq!(rig.pump(), Stop::Idle);
    assert!(rig.out.is_empty(), "nothing was sent there");
}

#[test]
fn routers_on_the_way_are_named() {
    let mut rig = Rig::new();
    assert!(rig.guest_sends_with(1, "192.0.2.1:33434", 1).is_err());
    rig.guest_hears(11, 0, GATEWAY, [192, 0, 2, 1]);
    rig.guest_sends_with(1, "192.0.2.1:33434", 2).unwrap();
    assert_eq!(rig.wire(0).hop_limit, Some(1));
    rig.wire(0).errors.push_back(SocketError {
        to: addr("192.0.2.1:33434"),
        from: Some([198, 51, 100, 1].into()),
        kind: 11,
        code: 0,
        mtu: 0,
        payload_len: 4,
    });
    rig.table.handle_event(0);
    rig.guest_hears(11, 0, [198, 51, 100, 1], [192, 0, 2, 1]);
}

#[test]
fn destinations_that_are_not_allowed_look_closed() {
    let mut rig = Rig::new();
    assert_eq!(rig.guest_sends(1, "10.0.2.2:9"), Err(DropReason::Vacant));
    rig.guest_hears(3, 3, GATEWAY, GATEWAY);
    assert_eq!(rig.guest_sends(1, "10.0.2.99:9"), Err(DropReason::Vacant));
    rig.guest_hears(3, 1, GATEWAY, [10, 0, 2, 99]);
    let _ = rig.guest_sends_with(1, "224.0.0.1:9", 1);
    rig.pump();
    assert!(rig.out.is_empty(), "no error about a group");
    for far in [
        "127.0.0.1:9",
        "0.0.0.0:9",
        "224.0.0.251:5353",
        "255.255.255.255:9",
        "192.0.2.1:0",
    ] {
        assert_eq!(
            rig.guest_sends(1, far),
            Err(DropReason::Unroutable),
            "{far}"
        );
    }
    assert!(rig.host.sockets.is_empty());
}

#[test]
fn an_unreachable_network_is_told_at_once() {
    let mut rig = Rig::new();
    rig.guest_sends(1, "192.0.2.1:9").unwrap();
    rig.wire(0).refuses = Some(libc::EACCES);
    assert_eq!(
        rig.guest_sends(1, "192.0.2.1:9"),
        Err(DropReason::HostRefused)
    );
    rig.guest_hears(3, 13, GATEWAY, [192, 0, 2, 1]);
}

#[test]
fn a_forward_admits_callers_and_carries_the_replies() {
    let mut rig = Rig::new();
    let forward = Forward {
        protocol: Protocol::Udp,
        host: addr("127.0.0.1:8081"),
        guest_port: 80,
    };
    let guest_ip = rig.config.guest_ip.into();
    rig.table
        .add_forward(&forward, guest_ip, &mut rig.host, rig.now)
        .unwrap();
    rig.arrives(0, "127.0.0.1:5555", b"hello");
    rig.pump();
    let (from, to, payload) = rig.only_datagram();
    assert_eq!(from, addr("10.0.2.2:5555"));
    assert_eq!(to, addr("10.0.2.15:80"));
    assert_eq!(payload, b"hello");
    rig.guest_sends(80, "10.0.2.2:5555").unwrap();
    assert_eq!(rig.wire(0).sent[0].0, addr("127.0.0.1:5555"));
    rig.after(TWO_WAY * 2);
    assert_eq!(rig.table.len(), 1, "time does not end a forward");
    // But whoever has the caller's port on the host's loopback by now is out of reach.
    assert!(rig.guest_sends(80, "10.0.2.2:5555").is_err());
    assert_eq!(rig.wire(0).sent.len(), 1);
    rig.guest_sends(81, "192.0.2.1:7").unwrap();
    rig.table.reset();
    assert_eq!(rig.table.len(), 1, "nor does a reset");
    assert!(!rig.wire(1).open);
    assert_eq!(rig.wire(1).owner, Some(Owner::Flows));
}

#[test]
fn payloads_come_out_of_any_split() {
    let mut bytes = *b"headersdata";
    for split in 0..=bytes.len() {
        let (a, b) = bytes.split_at_mut(split);
        let frame = [VolatileSlice::from(a), VolatileSlice::from(b)];
        let payload = Payload {
            frame: &frame,
            at: 7,
            len: 4,
        };
        let mut seen = Vec::new();
        payload.for_each_slice(|slice| {
            let mut part = vec![0; slice.len()];
            slice.copy_to(&mut part[..]);
            seen.extend(part);
        });
        assert_eq!(seen, b"data");
    }
}

#[test]
fn a_burst_of_equal_datagrams_is_one_message() {
    let mut rig = Rig::new();
    let payload = pattern(1200);
    rig.burst(&[alone(&payload); 10]);
    assert_eq!(rig.calls(0), [[(12_000, Some(1200))]]);
    assert_eq!(rig.wire(0).sent, vec![(addr(PEER), payload); 10]);

    // 64 at most, and what one packet holds at most.
    let mut rig = Rig::new();
    rig.burst(&[alone(b"x"); 130]);
    assert_eq!(rig.calls(0), [[(64, Some(1)), (64, Some(1)), (2, Some(1))]]);
    let mut rig = Rig::new();
    let payload = pattern(20_000);
    rig.burst(&[alone(&payload); 4]);
    assert_eq!(rig.calls(0), [[(60_000, Some(20_000)), (20_000, None)]]);
}

#[test]
fn only_the_last_of_a_message_is_shorter() {
    let mut rig = Rig::new();
    let payload = pattern(1400);
    let sent: Vec<Sent<'_>> = [1400, 1400, 7, 1400, 9, 9, 0, 9, 0, 0, 1400, 1401]
        .iter()
        .map(|&len| (1, PEER, &payload[..len.min(1400)], len))
        .collect();
    let mut sent = sent;
    let long = pattern(1401);
    sent[11].2 = &long;
    rig.burst(&sent);
    assert_eq!(
        rig.calls(0),
        [[
            (2807, Some(1400)),
            (1409, Some(1400)),
            (9, None),
            (0, None),
            (9, None),
            (0, None),
            (0, None),
            (1400, None),
            (1401, None),
        ]]
    );
    let lengths: Vec<usize> = sent.iter().map(|sent| sent.2.len()).collect();
    assert_eq!(rig.lengths(0), lengths);
}

#[test]
fn flows_and_peers_of_a_burst_do_not_mix() {
    let mut rig = Rig::new();
    let other = "192.0.2.2:7";
    for _ in 0..3 {
        rig.burst(&[
            (1, PEER, b"aa", 2),
            (2, PEER, b"bb", 2),
            (1, PEER, b"cc", 2),
            (2, other, b"dd", 2),
            (1, other, b"ee", 2),
        ]);
    }
    // One call per flow and burst, though the frames came in turns.
    assert_eq!(rig.calls(0), vec![[(4, Some(2)), (2, None)]; 3]);
    assert_eq!(rig.calls(1), vec![[(2, None), (2, None)]; 3]);
    let to: Vec<_> = rig.wire(0).sent.iter().map(|(to, _)| *to).collect();
    assert_eq!(to[..3], [addr(PEER), addr(PEER), addr(other)]);
    // Hops are set between calls.
    let hops = [((1, PEER, &b"x"[..], 1), 9), ((1, PEER, &b"y"[..], 1), 5)];
    rig.burst_with_hops(&hops).unwrap();
    assert_eq!(rig.calls(0)[3..], [[(1, None)], [(1, None)]]);
    assert_eq!(rig.wire(0).hop_limit, Some(4));
}

#[test]
fn more_flows_than_a_burst_keeps_apart_lose_nothing() {
    let mut rig = Rig::new();
    let sent: Vec<Sent<'_>> = (1..=100).map(|port| (port, PEER, &b"x"[..], 1)).collect();
    let twice = [&sent[..], &sent[..]].concat();
    rig.burst(&twice);
    for index in 0..100 {
        assert_eq!(rig.lengths(index), [1, 1]);
    }
    assert_eq!(rig.drops.iter().count(), 0);
}

#[test]
fn a_run_of_the_guest_stays_one_message() {
    let mut rig = Rig::new();
    let payload = pattern(40 * 1472 + 1);
    rig.burst(&[(1, PEER, &payload, 1472)]);
    assert_eq!(rig.calls(0), [[(payload.len(), Some(1472))]]);
    let whole: Vec<u8> = rig
        .wire(0)
        .sent
        .iter()
        .flat_map(|(_, b)| b.clone())
        .collect();
    assert_eq!(whole, payload);
    assert_eq!(rig.lengths(0)[39..], [1472, 1]);

    // A run of one is a datagram; one of more than the kernel cuts is several messages.
    let mut rig = Rig::new();
    rig.burst(&[
        (1, PEER, &payload[..100], 1472),
        (1, PEER, &payload[..200], 2),
        (1, PEER, &payload[..3], 1),
    ]);
    assert_eq!(
        rig.calls(0),
        [[(100, None), (128, Some(2)), (72, Some(2)), (3, Some(1)),]]
    );
}

#[test]
fn where_runs_are_refused_datagrams_go_one_by_one() {
    for errno in [libc::EINVAL, libc::EMSGSIZE, libc::EIO, libc::ENOPROTOOPT] {
        let mut rig = Rig::new();
        let payload = pattern(3500);
        rig.guest_sends(1, PEER).unwrap();
        rig.wire(0).refuses_runs = Some((errno, 1000));
        rig.burst(&[
            (1, PEER, b"first", 5),
            (1, PEER, &payload, 1400),
            (1, PEER, b"last", 4),
        ]);
        assert_eq!(rig.lengths(0), [4, 5, 1400, 1400, 700, 4], "{errno}");
        assert_eq!(rig.drops.iter().count(), 0);
        // It is not tried again with as much.
        rig.burst(&[(1, PEER, &payload, 1400), (1, PEER, &payload, 1400)]);
        assert_eq!(rig.calls(0).last().unwrap().len(), 6);
        // But still with less, if it was the length.
        rig.burst(&[(1, PEER, &payload, 1000)]);
        let messages = match errno {
            libc::EINVAL | libc::EMSGSIZE => 1,
            _ => 4,
        };
        assert_eq!(rig.calls(0).last().unwrap().len(), messages, "{errno}");
        assert_eq!(rig.drops.iter().count(), 0);
    }
}

#[test]
fn what_a_full_socket_does_not_take_is_counted() {
    let mut rig = Rig::with(Offloads::empty());
    rig.wire(0).room = Some(3);
    let payload = pattern(100);
    rig.burst(&[
        (1, PEER, &payload[..60], 20),
        (1, "192.0.2.2:7", &payload, 20),
        (1, PEER, b"x", 1),
    ]);
    assert_eq!(rig.lengths(0), [4, 20, 20, 20]);
    assert_eq!(rig.drops.get(DropReason::Full), 6);
}

const PARTIAL: Offloads = Offloads::GUEST_CSUM;

#[test]
fn a_run_is_one_frame_for_a_guest_that_takes_it_apart() {
    let mut rig = Rig::with(PARTIAL | Offloads::GUEST_USO4);
    for len in [2 * 1472, 40 * 1472 + 1, 65507, 7] {
        let payload = pattern(len);
        rig.run_arrives(&payload, 1472);
        assert_eq!(rig.pump(), Stop::Idle);
        let received = rig.received();
        assert_eq!(received.len(), 1);
        let (hdr, datagrams) = &received[0];
        assert_eq!(hdr.flags, VNET_HDR_F_NEEDS_CSUM);
        let run = (VNET_HDR_GSO_UDP_L4, 1472);
        let expected = if len > 1472 { run } else { (0, 0) };
        assert_eq!((hdr.gso_type, hdr.gso_size), expected);
        assert_eq!(datagrams.concat(), payload);
        assert_eq!(datagrams.len(), len.div_ceil(1472));
    }
    // Longer than an IP packet: whole datagrams in each frame.
    let payload = pattern(65530);
    rig.run_arrives(&payload, 1000);
    rig.pump();
    let received = rig.received();
    let counts: Vec<usize> = received.iter().map(|(_, bytes)| bytes.len()).collect();
    assert_eq!(counts, [65, 1]);
}

#[test]
fn without_uso_a_run_is_cut_and_its_checksums_are_right() {
    // Without GUEST_CSUM there is no USO either, whatever the bits say.
    for offloads in [Offloads::empty(), PARTIAL, Offloads::GUEST_USO4] {
        let mut rig = Rig::with(offloads);
        for (len, segment) in [(5000, 1472), (21, 7), (1001, 333), (3, 1), (4416, 1472)] {
            let payload = pattern(len);
            rig.run_arrives(&payload, segment);
            assert_eq!(rig.pump(), Stop::Idle);
            // Reading them verified what there is to verify.
            let received = rig.received();
            let expected: Vec<_> = payload.chunks(segment).map(<[u8]>::to_vec).collect();
            let datagrams: Vec<_> = received
                .iter()
                .flat_map(|(_, bytes)| bytes.clone())
                .collect();
            assert_eq!(datagrams, expected);
            for (hdr, _) in received {
                assert_eq!(hdr.gso_type, 0);
                assert_eq!(hdr.flags != 0, offloads == PARTIAL);
            }
        }
    }
}

#[test]
fn a_run_stops_for_buffers_and_goes_on_where_it_was() {
    for (segment, mtu) in [(100, 1500), (3000, 1500), (1, 1500), (2000, 576)] {
        let mut whole = Rig::with(Offloads::empty());
        let mut rig = Rig::with(Offloads::empty());
        let payload = pattern(segment * 6 + segment / 2);
        for rig in [&mut whole, &mut rig] {
            rig.link.mtu = mtu;
            rig.run_arrives(&payload, segment);
            rig.arrives(0, PEER, b"");
            rig.arrives(0, PEER, b"after");
        }
        assert_eq!(whole.pump(), Stop::Idle);
        rig.ring.credit = 0;
        let mut stops = 0;
        while rig.pump() == Stop::NoBuffers {
            rig.ring.credit = 1;
            stops += 1;
        }
        assert_eq!(stops, whole.ring.frames.len());
        assert_eq!(rig.ring.frames, whole.ring.frames);
    }
}

#[test]
fn datagrams_longer_than_the_link_come_in_fragments() {
    // Of a run, too, and though the guest takes runs: it could not have made this one.
    let mut rig = Rig::with(PARTIAL | Offloads::GUEST_USO4);
    let payload = pattern(7000);
    rig.run_arrives(&payload, 4000);
    rig.pump();
    let mut datagrams: Vec<(u16, Vec<u8>)> = Vec::new();
    for (hdr, frame) in rig.ring.frames.drain(..) {
        assert_eq!(hdr, VnetHdr::default());
        let ip = Ipv4Packet::new_checked(&frame[14..]).unwrap();
        assert!(ip.verify_checksum() && frame.len() <= 1514);
        match datagrams.last_mut() {
            Some((ident, bytes)) if *ident == ip.ident() => {
                assert_eq!(usize::from(ip.frag_offset()), bytes.len());
                bytes.extend_from_slice(ip.payload());
            }
            _ => datagrams.push((ip.ident(), ip.payload().to_vec())),
        }
    }
    assert_eq!(datagrams.len(), 2);
    let (from, to) = (addr(PEER).ip(), addr("10.0.2.15:1").ip());
    for ((_, bytes), expected) in datagrams.iter().zip(payload.chunks(4000)) {
        let udp = UdpPacket::new_checked(&bytes[..]).unwrap();
        assert!(udp.verify_checksum(&from.into(), &to.into()));
        assert_eq!(udp.payload(), expected);
    }
}

#[test]
fn long_runs_are_received_where_the_guest_reads_them() {
    let mut rig = Rig::with(PARTIAL | Offloads::GUEST_USO4);
    let payload = pattern(30 * 1472 + 5);
    rig.wire(0).segment = 1472;
    let mut expected = Vec::new();
    // Single datagrams, runs, strangers and what must be taken apart, in between.
    for len in [20_000, 44_165, 3, 0, 100, 20_000, 20_001, 1472, 20_002] {
        rig.arrives(0, "192.0.2.9:7", &payload[..len]);
        rig.arrives(0, PEER, &payload[..len]);
        expected.push(payload[..len].to_vec());
        rig.pump();
    }
    assert_eq!(rig.pump(), Stop::Idle);
    assert!(rig.wire(0).in_place >= 6, "{}", rig.wire(0).in_place);
    let received: Vec<_> = rig
        .received()
        .iter()
        .map(|(_, parts)| parts.concat())
        .collect();
    assert_eq!(received, expected);

    // Longer datagrams than the link takes were not to be foreseen.
    let before = rig.wire(0).in_place;
    for segment in [1472, 3000, 10_000] {
        rig.run_arrives(&payload[..10_000], segment);
        assert_eq!(rig.pump(), Stop::Idle);
        rig.ring.credit = 1000;
    }
    assert_eq!(rig.wire(0).in_place, before + 2);
    let lengths: Vec<usize> = rig
        .ring
        .frames
        .iter()
        .map(|(_, frame)| frame.len())
        .collect();
    assert_eq!(lengths[0], 42 + 10_000);
    assert!(lengths[1..].iter().all(|&len| len <= 1514));
    assert_eq!(lengths[1..].len(), 3 * 3 + 1 + 7);

    // Without room for a long one, what there is has to do.
    rig.ring.frames.clear();
    rig.ring.credit = 0;
    rig.run_arrives(&payload[..20_000], 1472);
    rig.run_arrives(&payload[..20_000], 1472);
    assert_eq!(rig.pump(), Stop::NoBuffers);
    rig.ring.credit = 2;
    assert_eq!(rig.pump(), Stop::Idle);
    assert_eq!(rig.received().len(), 2);
}
