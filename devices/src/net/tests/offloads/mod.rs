//! Every set of offloads that VIRTIO 1.3, 5.1.3.1 allows, with every kind of RX buffer, against a
//! loopback and against the NAT stack. The driver here checks each frame against what it accepted,
//! finishes it as Linux would, and compares bytes.

mod card;
mod check;
mod mirror;
mod nat;

mod packet;
mod tcp;

use std::collections::BTreeSet;
use std::net::SocketAddr;

use net::nic::{Offloads, VNET_HDR_GSO_TCPV4, VNET_HDR_GSO_TCPV6, VNET_HDR_GSO_UDP_L4, VnetHdr};

use self::card::{Card, layouts};
use self::mirror::Mirror;
use self::packet::{ACK, FIN, PSH, TcpFields, cut, finish_checksum, leave_checksum};
use crate::net::features::{accepted_offloads, consistent, offered_features};
use crate::net::loopback::Loopback;
use crate::virtio::spec::{
    F_EVENT_IDX, F_INDIRECT_DESC, NET_F_CSUM, NET_F_CTRL_GUEST_OFFLOADS, NET_F_CTRL_VQ,
    NET_F_GUEST_CSUM, NET_F_GUEST_TSO4, NET_F_GUEST_TSO6, NET_F_GUEST_USO4, NET_F_GUEST_USO6,
    NET_F_HOST_TSO4, NET_F_HOST_TSO6, NET_F_HOST_USO, NET_F_MRG_RXBUF,
};

/// Features that a driver may do without at will, apart from the offloads.
const FREE: [u64; 3] = [
    F_EVENT_IDX,
    F_INDIRECT_DESC,
    NET_F_CTRL_VQ | NET_F_CTRL_GUEST_OFFLOADS,
];

/// All subsets of `bits`.
fn subsets(bits: &[u64]) -> Vec<u64> {
    (0..1usize << bits.len())
        .map(|chosen| {
            let is_chosen = |index: &usize| chosen >> index & 1 == 1;
            let indices = (0..bits.len()).filter(is_chosen);
            indices.fold(0, |sum, index| sum | bits[index])
        })
        .collect()
}

/// The sets of features to try with a backend that can do `offloads`.
///
/// All sets of offloads, each with and without MRG_RXBUF. The rest goes round: each of its sets comes
/// with every eighth set of offloads.
fn feature_sets(offloads: Offloads) -> Vec<u64> {
    let offered = offered_features(offloads);
    let host = [NET_F_HOST_TSO4, NET_F_HOST_TSO6, NET_F_HOST_USO];
    let guest = [
        NET_F_GUEST_TSO4,
        NET_F_GUEST_TSO6,
        NET_F_GUEST_USO4,
        NET_F_GUEST_USO6,
    ];
    let mut chosen = BTreeSet::new();
    for host in subsets(&[host[0], host[1], host[2], NET_F_CSUM]) {
        for guest in subsets(&[guest[0], guest[1], guest[2], guest[3], NET_F_GUEST_CSUM]) {
            let bits = consistent((host | guest) & offered);
            if bits == (host | guest) & offered {
                chosen.insert(bits);
            }
        }
    }
    let always = offered & !(free_bits() | NET_F_MRG_RXBUF | all_offload_bits());
    let free = subsets(&FREE);
    let mut sets = Vec::new();
    for (round, bits) in chosen.into_iter().enumerate() {
        for (step, merging) in [0, NET_F_MRG_RXBUF].into_iter().enumerate() {
            let extra = free[(round + 3 * step) % free.len()] & offered;
            sets.push(consistent(always | bits | merging | extra));
        }
    }
    sets
}

/// The bits of [`FREE`].
fn free_bits() -> u64 {
    FREE.iter().fold(0, |sum, bits| sum | bits)
}

/// The feature bits of all offloads.
fn all_offload_bits() -> u64 {
    let none = offered_features(Offloads::empty());
    offered_features(Offloads::all()) & !none & !NET_F_CTRL_GUEST_OFFLOADS
}

fn ends(v4: bool) -> (SocketAddr, SocketAddr) {
    let pair = if v4 {
        ["10.0.2.15:40001", "10.0.2.2:7"]
    } else {
        ["[fd00::2:15]:40001", "[fd00::2:2]:7"]
    };
    let [guest, far] = pair.map(|end| end.parse().unwrap());
    (guest, far)
}

/// Frames of every kind that a driver with `offloads` may send.
fn frames(offloads: Offloads) -> Vec<(VnetHdr, Vec<u8>)> {
    let mut frames = Vec::new();
    let gso = |frame: &mut Vec<u8>, gso_type, gso_size| VnetHdr {
        gso_type,
        gso_size,
        ..leave_checksum(frame)
    };
    for v4 in [true, false] {
        let (guest, far) = ends(v4);
        let ip = if v4 { 20 } else { 40 };
        let fields = TcpFields {
            seq: u32::MAX - 20_000,
            flags: ACK | PSH | FIN,
            ..TcpFields::default()
        };
        let tcp = |len| packet::tcp(guest, far, fields, &super::pattern(len, len));
        let udp = |len| packet::udp(guest, far, &super::pattern(len, len));
        for mut frame in [tcp(0), tcp(1480 - ip), udp(0), udp(1), udp(1492 - ip)] {
            if offloads.contains(Offloads::CSUM) {
                let mut left = frame.clone();
                frames.push((leave_checksum(&mut left), left));
            }
            finish_checksum(&mut frame);
            frames.push((VnetHdr::default(), frame));
        }
        let (tso, tcp_type) = if v4 {
            (Offloads::HOST_TSO4, VNET_HDR_GSO_TCPV4)
        } else {
            (Offloads::HOST_TSO6, VNET_HDR_GSO_TCPV6)
        };
        if offloads.contains(tso) {
            // Up to the longest packet that IPv4 knows.
            for (len, size) in [(1461, 1440), (65_515 - ip, 1420), (30, 1)] {
                let mut frame = tcp(len);
                let hdr = gso(&mut frame, tcp_type, size);
                frames.push((hdr, frame));
            }
        }
        if offloads.contains(Offloads::HOST_USO) {
            for (len, size) in [(64 * 1000, 1000), (1473, 1452), (40, 3)] {
                let mut frame = udp(len);
                let hdr = gso(&mut frame, VNET_HDR_GSO_UDP_L4, size);
                frames.push((hdr, frame));
            }
        }
    }
    frames
}

/// Sends `frames`, and takes what comes back until there is as much.
fn round_trip(card: &mut Card, frames: &[(VnetHdr, Vec<u8>)]) {
    let expected: Vec<_> = frames
        .iter()
        .flat_map(|(hdr, frame)| cut(hdr, frame))
        .collect();
    let mut got = Vec::new();
    for (hdr, frame) in frames {
        while !card.send(hdr, frame) {
            got.extend(card.step());
        }
    }
    for _ in 0..100_000 {
        if got.len() >= expected.len() {
            break;
        }
        got.extend(card.step());
    }
    got.extend(card.step());
    assert_eq!(got.len(), expected.len(), "number of packets");
    for (index, (got, expected)) in got.iter().zip(&expected).enumerate() {
        assert!(got == expected, "packet {index} differs");
    }
    assert_eq!(card.counter("rx_undeliverable"), 0);
}

/// Tells which set of features a failure belongs to.
fn with_context(features: u64, layout: &[usize], what: &str, run: impl FnOnce()) {
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
    if let Err(panic) = result {
        let offloads = accepted_offloads(features);
        eprintln!("{what}: {offloads:?}, features {features:#x}, RX chains of {layout:?}");
        std::panic::resume_unwind(panic);
    }
}

#[test]
fn the_sets_are_all_there() {
    // 1 + 2^3 sets of the guest's offloads, 1 + 2^4 of ours.
    assert_eq!(feature_sets(Offloads::all()).len(), 9 * 17 * 2);
    assert_eq!(feature_sets(Offloads::empty()).len(), 2);
    let accepted: BTreeSet<_> = feature_sets(Offloads::all())
        .into_iter()
        .map(|features| features & free_bits())
        .collect();
    assert!(accepted.len() >= 8, "{accepted:x?}");
}

#[test]
fn plain_frames_come_back_from_the_loopback() {
    for bits in subsets(&FREE) {
        for features in feature_sets(Offloads::empty()) {
            let features = features & !free_bits() | bits & offered_features(Offloads::empty());
            for layout in layouts(features) {
                with_context(features, &layout, "loopback", || {
                    let mut card = Card::new(features, &layout, Box::new(Loopback::default()));
                    let frames = frames(card.offloads());
                    round_trip(&mut card, &frames);
                    assert_eq!(card.long_frames, 0);
                });
            }
        }
    }
}

#[test]
fn every_offload_comes_back_from_the_mirror() {
    for features in feature_sets(Offloads::all()) {
        for layout in layouts(features) {
            with_context(features, &layout, "mirror", || {
                let mut card = Card::new(features, &layout, Box::<Mirror>::default());
                let frames = frames(card.offloads());
                round_trip(&mut card, &frames);
                if features & NET_F_CTRL_GUEST_OFFLOADS == 0 {
                    return;
                }
                // Off, some, and all again.
                let guest = accepted_offloads(features) & crate::net::features::GUEST_OFFLOADS;
                let all = features & all_offload_bits() & offered_features(guest);
                let csum = all & NET_F_GUEST_CSUM;
                for bits in [0, csum, all & (csum | NET_F_GUEST_TSO6), all] {
                    card.set_offloads(bits);
                    round_trip(&mut card, &frames);
                }
            });
        }
    }
}
