use proptest::prelude::*;

use super::*;

const GUEST: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 15);
const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 2);
const NOBODY: Ipv4Addr = Ipv4Addr::UNSPECIFIED;
const MAC: [u8; 6] = [0x52, 0x54, 0, 0x12, 0x34, 0x56];
const XID: [u8; 4] = [0xde, 0xad, 0xbe, 0xef];

const DISCOVER: &[u8] = &[53, 1, 1];
const REQUEST: &[u8] = &[53, 1, 3];
const OUR_ID: &[u8] = &[54, 4, 10, 0, 2, 2];
const RIGHT: &[u8] = &[50, 4, 10, 0, 2, 15];
const WRONG: &[u8] = &[50, 4, 192, 168, 1, 7];

fn config() -> DhcpConfig {
    DhcpConfig {
        guest_ip: GUEST,
        prefix_len: 24,
        router: GATEWAY,
        server_id: GATEWAY,
        dns: Ipv4Addr::new(10, 0, 2, 3),
        mtu: 1500,
        lease: Duration::from_secs(86400),
        hostname: Some("box".into()),
        search: vec!["corp.example".into(), "example.".into()],
    }
}

fn server() -> DhcpServer {
    DhcpServer::new(config())
}

/// A client's message with the cookie, these options, and 300 bytes at least.
fn message(options: &[&[u8]]) -> Vec<u8> {
    let mut bytes = vec![0; 240];
    bytes[..4].copy_from_slice(&[1, 1, 6, 0]);
    bytes[4..8].copy_from_slice(&XID);
    bytes[8..10].copy_from_slice(&[0, 7]);
    bytes[28..34].copy_from_slice(&MAC);
    bytes[236..240].copy_from_slice(&[0x63, 0x82, 0x53, 0x63]);
    bytes.extend(options.concat());
    bytes.push(255);
    bytes.resize(bytes.len().max(300), 0);
    bytes
}

fn with(mut bytes: Vec<u8>, at: usize, field: &[u8]) -> Vec<u8> {
    bytes[at..at + field.len()].copy_from_slice(field);
    bytes
}

fn ciaddr(bytes: Vec<u8>, ip: Ipv4Addr) -> Vec<u8> {
    with(bytes, 12, &ip.octets())
}

fn broadcast(bytes: Vec<u8>) -> Vec<u8> {
    with(bytes, 10, &[0x80, 0])
}

fn answer(bytes: &[u8]) -> Reply {
    server().handle(bytes, NOBODY).unwrap().unwrap()
}

/// The options of a reply, in order. Checks the fields that all replies have.
fn options(reply: &Reply) -> Vec<(u8, Vec<u8>)> {
    let bytes = &reply.payload;
    assert!(bytes.len() >= 300, "{} bytes", bytes.len());
    assert_eq!(bytes[..4], [2, 1, 6, 0], "op, htype, hlen, hops");
    assert_eq!(bytes[4..8], XID, "xid");
    assert_eq!(bytes[8..10], [0, 7], "secs");
    assert_eq!(
        bytes[28..44],
        *b"\x52\x54\0\x12\x34\x56\0\0\0\0\0\0\0\0\0\0"
    );
    assert_eq!(bytes[44..236], [0; 192], "sname, file");
    assert_eq!(bytes[236..240], [0x63, 0x82, 0x53, 0x63], "cookie");
    let mut found = Vec::new();
    let mut rest = &bytes[240..];
    while rest[0] != 255 {
        let len = usize::from(rest[1]);
        found.push((rest[0], rest[2..2 + len].to_vec()));
        rest = &rest[2 + len..];
    }
    assert!(rest[1..].iter().all(|&byte| byte == 0), "padding");
    found
}

fn find(reply: &Reply, kind: u8) -> Option<Vec<u8>> {
    options(reply)
        .into_iter()
        .find_map(|(found, data)| (found == kind).then_some(data))
}

fn kinds(reply: &Reply) -> Vec<u8> {
    options(reply).into_iter().map(|(kind, _)| kind).collect()
}

/// ciaddr, yiaddr, siaddr, giaddr.
fn addresses(reply: &Reply) -> [[u8; 4]; 4] {
    [12, 16, 20, 24].map(|at| reply.payload[at..at + 4].try_into().unwrap())
}

const ZERO: [u8; 4] = [0; 4];
const ADDRESS: [u8; 4] = [10, 0, 2, 15];

#[track_caller]
fn assert_ack(reply: &Reply, to: Ipv4Addr, ciaddr: [u8; 4]) {
    assert_eq!(find(reply, 53), Some(vec![5]));
    assert_eq!(find(reply, 51), Some(vec![0, 1, 0x51, 0x80]));
    assert_eq!(addresses(reply), [ciaddr, ADDRESS, ZERO, ZERO]);
    assert_eq!(reply.to, to);
}

#[track_caller]
fn assert_nak(reply: &Reply) {
    assert_eq!(
        options(reply),
        [(53, vec![6]), (54, vec![10, 0, 2, 2])],
        "no address, no lease"
    );
    assert_eq!(addresses(reply), [ZERO; 4]);
    assert_eq!(reply.to, Ipv4Addr::BROADCAST);
    assert_eq!(reply.to_mac, [0xff; 6]);
}

#[test]
fn discover_is_offered_everything() {
    let reply = answer(&message(&[DISCOVER]));
    let search = b"\x04corp\x07example\0\x07example\0".to_vec();
    assert_eq!(
        options(&reply),
        [
            (53, vec![2]),
            (54, vec![10, 0, 2, 2]),
            (51, vec![0, 1, 0x51, 0x80]), // 86400
            (58, vec![0, 0, 0xa8, 0xc0]), // 43200
            (59, vec![0, 1, 0x27, 0x50]), // 75600
            (1, vec![255, 255, 255, 0]),
            (3, vec![10, 0, 2, 2]),
            (6, vec![10, 0, 2, 3]),
            (26, vec![0x05, 0xdc]),
            (12, b"box".to_vec()),
            (15, b"corp.example".to_vec()),
            (119, search),
        ]
    );
    assert_eq!(addresses(&reply), [ZERO, ADDRESS, ZERO, ZERO]);
    assert_eq!(reply.to, GUEST);
    assert_eq!(reply.to_mac, MAC);
    assert_eq!(reply.payload[10..12], [0, 0]);
}

#[test]
fn broadcast_flag_is_honoured_and_copied() {
    for bytes in [message(&[DISCOVER]), message(&[REQUEST, RIGHT, OUR_ID])] {
        let reply = answer(&broadcast(bytes));
        assert_eq!(reply.to, Ipv4Addr::BROADCAST);
        assert_eq!(reply.to_mac, [0xff; 6]);
        assert_eq!(reply.payload[10..12], [0x80, 0]);
        assert_eq!(addresses(&reply)[1], ADDRESS);
    }
}

#[test]
fn selecting() {
    let reply = answer(&message(&[REQUEST, RIGHT, OUR_ID]));
    assert_ack(&reply, GUEST, ZERO);
    assert_eq!(reply.to_mac, MAC);
    assert_nak(&answer(&message(&[REQUEST, WRONG, OUR_ID])));
    // The address offered is the only one it can mean.
    assert_ack(&answer(&message(&[REQUEST, OUR_ID])), GUEST, ZERO);
}

#[test]
fn selecting_another_server_is_ignored() {
    for wish in [RIGHT, WRONG] {
        let bytes = message(&[REQUEST, wish, &[54, 4, 10, 0, 2, 99]]);
        assert_eq!(server().handle(&bytes, NOBODY), Ok(None));
    }
}

#[test]
fn init_reboot() {
    assert_ack(&answer(&message(&[REQUEST, RIGHT])), GUEST, ZERO);
    assert_nak(&answer(&message(&[REQUEST, WRONG])));
    assert_eq!(
        server().handle(&message(&[REQUEST]), NOBODY),
        Err(DhcpDrop::NoAddress)
    );
}

#[test]
fn renewing_and_rebinding() {
    let bytes = ciaddr(message(&[REQUEST]), GUEST);
    let reply = server().handle(&bytes, GUEST).unwrap().unwrap();
    assert_ack(&reply, GUEST, ADDRESS);
    assert_eq!(reply.to_mac, MAC);
    // A client with an address takes unicast, whatever its flag says.
    let reply = server().handle(&broadcast(bytes), GUEST).unwrap().unwrap();
    assert_ack(&reply, GUEST, ADDRESS);
    assert_eq!(reply.to_mac, MAC);

    let other = Ipv4Addr::new(10, 0, 2, 77);
    let bytes = ciaddr(message(&[REQUEST]), other);
    assert_nak(&server().handle(&bytes, other).unwrap().unwrap());
}

#[test]
fn inform_is_told_without_a_lease() {
    let own = Ipv4Addr::new(10, 0, 2, 40);
    for (ciaddr_field, src, to) in [
        (own, own, own),
        (own, NOBODY, own),
        (NOBODY, own, own),
        (NOBODY, NOBODY, Ipv4Addr::BROADCAST),
        (Ipv4Addr::new(224, 0, 0, 1), NOBODY, Ipv4Addr::BROADCAST),
    ] {
        let bytes = ciaddr(message(&[&[53, 1, 8]]), ciaddr_field);
        let reply = server().handle(&bytes, src).unwrap().unwrap();
        assert_eq!(kinds(&reply), [53, 54, 1, 3, 6, 26, 12, 15, 119]);
        assert_eq!(find(&reply, 53), Some(vec![5]));
        assert_eq!(addresses(&reply), [ciaddr_field.octets(), ZERO, ZERO, ZERO]);
        assert_eq!(reply.to, to);
    }
}

#[test]
fn release_and_decline_are_taken_in_silence() {
    let server = server();
    let release = ciaddr(message(&[&[53, 1, 7], OUR_ID]), GUEST);
    assert_eq!(server.handle(&release, GUEST), Ok(None));
    let decline = message(&[&[53, 1, 4], OUR_ID, RIGHT]);
    assert_eq!(server.handle(&decline, NOBODY), Ok(None));
    let reply = server.handle(&message(&[DISCOVER]), NOBODY);
    assert_eq!(addresses(&reply.unwrap().unwrap())[1], ADDRESS);
}

#[test]
fn plain_bootp() {
    let cookie = message(&[]);
    let no_cookie = with(message(&[]), 236, &[0; 64]);
    for bytes in [cookie, no_cookie] {
        let reply = answer(&bytes);
        assert_eq!(reply.payload.len(), 300);
        assert_eq!(
            options(&reply),
            [
                (1, vec![255, 255, 255, 0]),
                (3, vec![10, 0, 2, 2]),
                (6, vec![10, 0, 2, 3]),
                (26, vec![0x05, 0xdc]),
                (12, b"box".to_vec()),
                (15, b"corp.example".to_vec()),
                (119, b"\x04corp\x07example\0".to_vec()),
            ],
            "the second domain does not fit"
        );
        assert_eq!(addresses(&reply), [ZERO, ADDRESS, [10, 0, 2, 2], ZERO]);
        assert_eq!((reply.to, reply.to_mac), (GUEST, MAC));
        let reply = answer(&broadcast(bytes.clone()));
        assert_eq!(reply.to, Ipv4Addr::BROADCAST);
        let reply = answer(&ciaddr(bytes, GUEST));
        assert_eq!(reply.to, GUEST);
        assert_eq!(addresses(&reply)[0], ADDRESS);
    }
}

#[test]
fn any_mac_and_any_client_id_get_the_one_address() {
    let server = server();
    for n in 0..1000u16 {
        let [a, b] = n.to_be_bytes();
        let mac = [2, 0, 0, 0, a, b];
        let bytes = with(message(&[DISCOVER, &[61, 3, 0, a, b]]), 28, &mac);
        let reply = server.handle(&bytes, NOBODY).unwrap().unwrap();
        assert_eq!(reply.payload[16..20], ADDRESS);
        assert_eq!(reply.payload[28..34], mac);
        assert_eq!(reply.to_mac, mac);
    }
}

#[test]
fn client_id_is_echoed() {
    let id: &[u8] = &[61, 9, 255, 1, 2, 3, 4, 0, 3, 0, 1];
    for options in [
        [DISCOVER, id],
        [&[53, 1, 3, 50, 4, 10, 0, 2, 15], id],
        [&[53, 1, 3, 50, 4, 10, 0, 2, 16], id], // NAK
        [&[53, 1, 8], id],
    ] {
        let reply = answer(&message(&options));
        assert_eq!(find(&reply, 61), Some(vec![255, 1, 2, 3, 4, 0, 3, 0, 1]));
    }
    assert_eq!(find(&answer(&message(&[DISCOVER, &[61, 0]])), 61), None);
}

#[test]
fn parameter_list_is_honoured() {
    let always = vec![53, 54, 51, 58, 59, 1, 3, 6];
    let cases: [(&[u8], &[u8]); 5] = [
        (&[55, 1, 1], &[]),
        (&[55, 3, 1, 12, 119], &[12, 119]),
        (&[55, 2, 119, 26], &[26, 119]),
        (&[55, 1, 15], &[15]),
        (&[55, 1, 15, 55, 1, 26], &[26, 15]), // in two parts
    ];
    for (list, more) in cases {
        let reply = answer(&message(&[DISCOVER, list]));
        assert_eq!(kinds(&reply), [&always, more].concat(), "{list:?}");
        assert!(reply.payload.len() >= 300);
    }
}

#[test]
fn relay_address_is_copied() {
    let bytes = with(message(&[DISCOVER]), 24, &[10, 9, 8, 7]);
    let reply = answer(&bytes);
    assert_eq!(addresses(&reply), [ZERO, ADDRESS, ZERO, [10, 9, 8, 7]]);
    assert_eq!(reply.to, GUEST);
}

#[test]
fn names_that_cannot_be_sent_are_left_out() {
    let long = "a".repeat(64);
    let very_long = vec!["a".repeat(63); 4].join(".");
    for name in [
        "",
        ".",
        "a..b",
        "$(reboot)",
        "a b",
        "b\u{e4}r",
        &long,
        &very_long,
    ] {
        let server = DhcpServer::new(DhcpConfig {
            hostname: Some(name.into()),
            search: vec![name.into()],
            ..config()
        });
        let reply = server.handle(&message(&[DISCOVER]), NOBODY);
        let reply = reply.unwrap().unwrap();
        assert_eq!(kinds(&reply), [53, 54, 51, 58, 59, 1, 3, 6, 26], "{name:?}");
    }
    let server = DhcpServer::new(DhcpConfig {
        search: vec!["a b".into(), "ok.test".into()],
        ..config()
    });
    let reply = server.handle(&message(&[DISCOVER]), NOBODY);
    let reply = reply.unwrap().unwrap();
    assert_eq!(find(&reply, 15), Some(b"ok.test".to_vec()));
    assert_eq!(find(&reply, 119), Some(b"\x02ok\x04test\0".to_vec()));
}

#[test]
fn long_search_lists_come_in_parts_and_are_cut() {
    let server = DhcpServer::new(DhcpConfig {
        search: (100..200).map(|n| format!("d{n}.example")).collect(),
        ..config()
    });
    let parts = |size: &[u8]| {
        let bytes = message(&[DISCOVER, size]);
        let reply = server.handle(&bytes, NOBODY).unwrap().unwrap();
        let parts: Vec<_> = options(&reply)
            .into_iter()
            .filter_map(|(kind, data)| (kind == 119).then_some(data.len()))
            .collect();
        (reply.payload.len(), parts)
    };
    // Each domain takes 14 bytes of the list; only whole ones are sent.
    let (len, cut) = parts(&[]);
    assert!(len <= 548 && len > 548 - 14 - 2, "{len}");
    assert_eq!(cut.iter().sum::<usize>() % 14, 0);
    assert_eq!(parts(&[57, 2, 0, 100]), (len, cut), "not below 576");
    let (len, cut) = parts(&[57, 2, 0xff, 0xff]);
    assert!(len <= 1472 && len > 1472 - 14 - 2, "{len}");
    assert_eq!(cut[0], 255);
    assert_eq!(cut.iter().sum::<usize>() % 14, 0);
}

#[test]
fn lease_times_and_masks() {
    let told = |seconds, prefix_len| {
        let server = DhcpServer::new(DhcpConfig {
            lease: Duration::from_secs(seconds),
            prefix_len,
            ..config()
        });
        let reply = server.handle(&message(&[DISCOVER]), NOBODY);
        let reply = reply.unwrap().unwrap();
        [51, 58, 59, 1]
            .map(|kind| find(&reply, kind).map(|data| u32::from_be_bytes(data.try_into().unwrap())))
    };
    assert_eq!(told(0, 0), [Some(60), Some(30), Some(53), Some(0)]);
    assert_eq!(told(3600, 30)[..3], [Some(3600), Some(1800), Some(3150)]);
    assert_eq!(told(3600, 30)[3], Some(0xffff_fffc));
    let infinite = Some(0xffff_ffff);
    assert_eq!(told(u64::MAX, 33), [infinite, None, None, infinite]);
}

#[test]
fn what_is_no_clients_message_is_dropped() {
    let drop = |bytes: &[u8]| server().handle(bytes, NOBODY).unwrap_err();
    let good = message(&[DISCOVER]);
    assert_eq!(drop(&[]), DhcpDrop::Short(0));
    assert_eq!(drop(&good[..239]), DhcpDrop::Short(239));
    assert_eq!(drop(&with(good.clone(), 0, &[2])), DhcpDrop::OpCode(2));
    for (at, field) in [
        (1, &[6][..]),
        (2, &[16]),
        (28, &[0xff; 6]),
        (28, &[1]),
        (28, &[0; 6]),
    ] {
        assert_eq!(drop(&with(good.clone(), at, field)), DhcpDrop::Hardware);
    }
    for value in [0, 2, 5, 6, 9, 255] {
        let bytes = message(&[&[53, 1, value]]);
        assert_eq!(drop(&bytes), DhcpDrop::MessageType(value));
    }
    for field in [&[53, 2, 1, 1][..], &[50, 3, 1, 2, 3], &[54, 0], &[57, 1, 9]] {
        let bytes = message(&[DISCOVER, field]);
        assert_eq!(drop(&bytes), DhcpDrop::OptionLength(field[0]));
    }
}

#[test]
fn options_cut_off_by_the_end_are_not_read() {
    let mut bytes = message(&[]);
    bytes.truncate(240);
    bytes.extend([53, 1, 1, 61, 200, 1]);
    let reply = answer(&bytes);
    assert_eq!(find(&reply, 53), Some(vec![2]));
    assert_eq!(find(&reply, 61), None);
}

proptest! {
    #[test]
    fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..700), src: u32) {
        let _ = server().handle(&bytes, src.into());
    }

    #[test]
    fn no_options_panic(
        fields in prop::collection::vec(
            (any::<u8>(), prop::collection::vec(any::<u8>(), 0..6)),
            0..12,
        ),
        message_type in 0u8..10,
        cut in 236usize..400,
        ip: u32,
        mtu: u16,
        size: u16,
    ) {
        let mut raw = vec![53, 1, message_type, 57, 2];
        raw.extend(size.to_be_bytes());
        for (kind, data) in fields {
            // Not those with a length that is checked.
            if ![50, 53, 54, 57].contains(&kind) {
                raw.extend([kind, data.len() as u8]);
                raw.extend(data);
            }
        }
        let mut bytes = ciaddr(message(&[&raw]), ip.into());
        bytes.truncate(cut);
        let server = DhcpServer::new(DhcpConfig { mtu, ..config() });
        if let Ok(Some(reply)) = server.handle(&bytes, ip.into()) {
            prop_assert!(reply.payload.len() >= 300);
            prop_assert!(reply.payload.len() + 28 <= usize::from(mtu.max(576)));
            options(&reply);
        }
    }
}
