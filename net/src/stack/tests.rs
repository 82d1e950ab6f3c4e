//! The whole stack between a guest with a real TCP (smoltcp's) and real sockets of this machine.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::thread;
use std::time::{Duration, Instant};

use smoltcp::socket::{tcp, udp};
use smoltcp::wire::{IpProtocol, UdpPacket};
use vm_memory::VolatileSlice;

use super::Stack;
use crate::config::{Config, Forward, Protocol};
use crate::drops::DropReason;
use crate::host::OsUdp;
use crate::nic::{
    Backend, Link, Offloads, TxBurst, VNET_HDR_F_NEEDS_CSUM, VNET_HDR_GSO_UDP_L4, VnetHdr,
};
use crate::tcp::flows::RxPath;
use crate::testkit::datagrams::accept;
use crate::testkit::guest::{GUEST_MAC, Guest};
use crate::testkit::ring::MemoryRing;
use crate::udp::{Batch, MAX_RUN, Message, UdpSocket as _};
use crate::wire::Macs;
use crate::wire::ipv4::{self, Place};

const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 2);

fn open() -> Config {
    Config {
        host_loopback: true,
        ..Config::default()
    }
}

fn guest(config: Config, rx: RxPath) -> Guest<Stack> {
    Guest::new(Stack::new(config, rx).unwrap())
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 31 + i / 251) as u8).collect()
}

/// Takes what the guest's socket has received.
fn read_into(socket: &mut tcp::Socket<'_>, bytes: &mut Vec<u8>) {
    while socket.can_recv() {
        socket
            .recv(|received| {
                bytes.extend_from_slice(received);
                (received.len(), ())
            })
            .unwrap();
    }
}

/// A server on this machine's loopback that handles one connection.
fn server(serve: impl FnOnce(TcpStream) + Send + 'static) -> (u16, thread::JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    (
        port,
        thread::spawn(move || serve(listener.accept().unwrap().0)),
    )
}

#[test]
fn a_download_arrives_whole_on_every_path() {
    for (_, rx) in RxPath::ALL {
        let data = pattern(5 << 20);
        let sent = data.clone();
        let (port, thread) = server(move |mut stream| stream.write_all(&sent).unwrap());
        let mut guest = guest(open(), rx);
        let socket = guest.connect((GATEWAY, port));
        let mut got = Vec::new();
        guest.run_until(|sockets| {
            let socket = sockets.get_mut::<tcp::Socket<'_>>(socket);
            read_into(socket, &mut got);
            socket.state() == tcp::State::CloseWait
        });
        assert!(got == data, "{} of {} bytes", got.len(), data.len());
        thread.join().unwrap();
    }
}

#[test]
fn an_upload_arrives_whole_and_the_answer_comes_after_its_end() {
    let data = pattern(5 << 20);
    let (port, thread) = server(|mut stream| {
        let mut got = Vec::new();
        stream.read_to_end(&mut got).unwrap();
        assert!(got == pattern(5 << 20));
        stream.write_all(b"got it").unwrap();
    });
    let mut guest = guest(open(), RxPath::Ring);
    let socket = guest.connect((GATEWAY, port));
    let mut sent = 0;
    let mut answer = Vec::new();
    guest.run_until(|sockets| {
        let socket = sockets.get_mut::<tcp::Socket<'_>>(socket);
        if socket.can_send() && sent < data.len() {
            sent += socket.send_slice(&data[sent..]).unwrap();
            if sent == data.len() {
                socket.close();
            }
        }
        read_into(socket, &mut answer);
        matches!(socket.state(), tcp::State::TimeWait | tcp::State::Closed)
    });
    assert_eq!(answer, b"got it");
    thread.join().unwrap();
}

#[test]
fn a_closed_port_is_refused_and_loopback_needs_leave() {
    let (port, _thread) = server(drop);
    let unused = TcpListener::bind("127.0.0.1:0").unwrap();
    let closed_port = unused.local_addr().unwrap().port();
    drop(unused);
    for (config, port) in [(open(), closed_port), (Config::default(), port)] {
        let mut guest = guest(config, RxPath::Ring);
        let socket = guest.connect((GATEWAY, port));
        guest.run_until(|sockets| {
            let state = sockets.get::<tcp::Socket<'_>>(socket).state();
            assert_ne!(state, tcp::State::Established);
            state == tcp::State::Closed
        });
    }
}

#[test]
fn a_forward_leads_into_the_guest() {
    let free = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let mut guest = guest(
        Config {
            forwards: vec![Forward {
                protocol: Protocol::Tcp,
                host: free,
                guest_port: 8000,
            }],
            ..Config::default()
        },
        RxPath::Ring,
    );
    let socket = guest.listen(8000);
    let client = thread::spawn(move || {
        let mut stream = TcpStream::connect(free).unwrap();
        stream.write_all(b"knock").unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    });
    let mut heard = Vec::new();
    guest.run_until(|sockets| {
        let socket = sockets.get_mut::<tcp::Socket<'_>>(socket);
        read_into(socket, &mut heard);
        if socket.state() == tcp::State::CloseWait {
            let from = socket.remote_endpoint().unwrap();
            assert_eq!(SocketAddr::from(from).ip(), GATEWAY);
            socket.send_slice(b"come in").unwrap();
            socket.close();
        }
        socket.state() == tcp::State::Closed
    });
    assert_eq!(heard, b"knock");
    assert_eq!(client.join().unwrap(), "come in");
}

#[test]
fn datagrams_go_out_and_their_answers_come_back() {
    let far = UdpSocket::bind("127.0.0.1:0").unwrap();
    let port = far.local_addr().unwrap().port();
    let echo = thread::spawn(move || {
        let mut buffer = [0; 2048];
        for _ in 0..3 {
            let (n, from) = far.recv_from(&mut buffer).unwrap();
            far.send_to(&buffer[..n], from).unwrap();
        }
    });
    let mut guest = guest(open(), RxPath::Ring);
    let mut socket = None;
    let mut got = Vec::new();
    guest.run_until(|sockets| {
        let handle = *socket.get_or_insert_with(|| {
            let buffer = || {
                let meta = vec![udp::PacketMetadata::EMPTY; 8];
                udp::PacketBuffer::new(meta, vec![0; 8192])
            };
            let mut socket = udp::Socket::new(buffer(), buffer());
            socket.bind(4096).unwrap();
            for len in [1472, 0, 3] {
                let to = (GATEWAY, port);
                socket.send_slice(&pattern(len), to).unwrap();
            }
            sockets.add(socket)
        });
        let socket = sockets.get_mut::<udp::Socket<'_>>(handle);
        while socket.can_recv() {
            let (payload, meta) = socket.recv().unwrap();
            assert_eq!(meta.endpoint, (GATEWAY, port).into());
            got.push(payload.to_vec());
        }
        got.len() == 3
    });
    assert_eq!(got, [1472, 0, 3].map(pattern));
    echo.join().unwrap();
}

/// A frame with a run of datagrams from port 4096 of the guest to `port` of the gateway. The checksum
/// is left to the stack.
fn run_frame(port: u16, payload: &[u8], segment: u16) -> (VnetHdr, Vec<u8>) {
    let mut frame = vec![0; 42];
    frame.extend_from_slice(payload);
    let macs = Macs {
        gateway: GUEST_MAC,
        guest: [0xff; 6],
    };
    let guest = Ipv4Addr::new(10, 0, 2, 15);
    ipv4::write(
        &mut frame,
        macs,
        guest,
        GATEWAY,
        IpProtocol::Udp,
        Place::default(),
    );
    let mut udp = UdpPacket::new_unchecked(&mut frame[34..]);
    udp.set_src_port(4096);
    udp.set_dst_port(port);
    udp.set_len(u16::try_from(8 + payload.len()).unwrap());
    let hdr = VnetHdr {
        flags: VNET_HDR_F_NEEDS_CSUM,
        gso_type: VNET_HDR_GSO_UDP_L4,
        hdr_len: 42,
        gso_size: segment,
        csum_start: 34,
        csum_offset: 6,
    };
    (hdr, frame)
}

fn transmit(stack: &mut Stack, frames: &mut [(VnetHdr, Vec<u8>)]) {
    let mut burst = TxBurst::default();
    for (hdr, frame) in frames {
        // Headers and data in pieces, as drivers lay them out.
        for piece in frame.chunks_mut(1000) {
            burst.push_slice(VolatileSlice::from(piece));
        }
        burst.end_frame(*hdr);
    }
    stack.transmit(&burst, Instant::now());
}

/// A stack whose guest accepted what `refused` does not name.
fn offloading_stack(refused: Offloads) -> Stack {
    let mut stack = Stack::new(open(), RxPath::Ring).unwrap();
    let offloads = stack.offloads() - refused;
    stack.configure(&Link {
        guest_mac: GUEST_MAC,
        mtu: 1500,
        offloads,
    });
    stack
}

/// Calls until it gives something.
#[track_caller]
fn eventually<T>(mut attempt: impl FnMut() -> Option<T>) -> T {
    let limit = Instant::now() + Duration::from_secs(10);
    loop {
        if let Some(result) = attempt() {
            return result;
        }
        assert!(Instant::now() < limit, "it never came");
        thread::yield_now();
    }
}

#[test]
fn runs_of_datagrams_cross_the_stack_whole_both_ways() {
    let uso = Offloads::GUEST_USO4;
    for refused in [Offloads::empty(), uso, uso | Offloads::GUEST_CSUM] {
        let mut stack = offloading_stack(refused);
        let mut far = OsUdp::open("127.0.0.1:0".parse().unwrap()).unwrap();
        far.expect_many();
        let port = far.local_addr().unwrap().port();
        let payload = pattern(20 * 1472 + 9);
        // Twice, so that the second answer comes by the path that the first made likely.
        for _ in 0..2 {
            transmit(&mut stack, &mut [run_frame(port, &payload, 1472)]);
            let mut batch = Batch::default();
            eventually(|| far.receive(&mut batch).ok());
            let run = batch.run(0).unwrap();
            assert_eq!((batch.len(), run.segment), (1, 1472));
            assert_eq!(run.payload, payload);

            let mut answer = payload.clone();
            let pieces = [VolatileSlice::from(&mut answer[..])];
            let message = Message {
                to: run.from,
                payload: &pieces,
                segment: Some(1472),
            };
            far.send(&[message]).unwrap();
            let mut ring = MemoryRing::new(&[1526]);
            let mut got = Vec::new();
            let mut frames = 0;
            eventually(|| {
                stack.receive(&mut ring, Instant::now());
                for (hdr, frame) in ring.frames.drain(..) {
                    frames += 1;
                    got.extend(accept(&hdr, &frame));
                }
                (got.len() == 21).then_some(())
            });
            assert_eq!(frames, if refused.is_empty() { 1 } else { 21 });
            for ((from, to, datagram), sent) in got.iter().zip(payload.chunks(1472)) {
                assert_eq!(*from, SocketAddr::from((GATEWAY, port)));
                assert_eq!(*to, "10.0.2.15:4096".parse().unwrap());
                assert_eq!(datagram, sent);
            }
        }
        assert_eq!(stack.drops().iter().count(), 0);
    }
}

#[test]
fn runs_that_lie_go_nowhere() {
    let far = UdpSocket::bind("127.0.0.1:0").unwrap();
    let port = far.local_addr().unwrap().port();
    let payload = pattern(65507);
    let good = run_frame(port, &payload[..3000], 1000);
    let with = |change: &dyn Fn(&mut VnetHdr)| {
        let mut frame = good.clone();
        change(&mut frame.0);
        frame
    };
    let mut cut = good.clone();
    cut.1.truncate(42 + 2999);
    let mut longer = good.clone();
    longer.1[38..40].copy_from_slice(&3009_u16.to_be_bytes());
    let mut summed = with(&|hdr| hdr.flags = 0);
    summed.1[40..42].copy_from_slice(&[1, 2]);
    let mut frames = [
        with(&|hdr| hdr.gso_size = 0),
        with(&|hdr| hdr.gso_type = 3),
        with(&|hdr| hdr.gso_type = VNET_HDR_GSO_UDP_L4 | 0x80),
        with(&|hdr| hdr.csum_start = 14),
        with(&|hdr| hdr.csum_start = u16::MAX),
        with(&|hdr| hdr.csum_offset = 16),
        with(&|hdr| hdr.gso_size = 2),
        run_frame(port, &payload, 1),
        longer,
        summed,
    ];
    let mut stack = offloading_stack(Offloads::empty());
    for frame in &mut frames {
        transmit(&mut stack, std::slice::from_mut(frame));
    }
    let bad = stack.drops().get(DropReason::BadTransportHeader);
    assert_eq!(bad, frames.len() as u64);
    transmit(&mut stack, &mut [cut]);
    assert_eq!(stack.drops().get(DropReason::BadIpHeader), 1);
    far.set_nonblocking(true).unwrap();
    let mut buffer = [0; 4096];
    assert!(far.recv_from(&mut buffer).is_err(), "nothing arrived");

    // Longer than all of it is the length of one, and no hint must be right.
    let hint = with(&|hdr| (hdr.gso_size, hdr.hdr_len) = (u16::MAX, 9999));
    transmit(&mut stack, &mut [hint]);
    let n = eventually(|| far.recv(&mut buffer).ok());
    assert_eq!(buffer[..n], payload[..3000]);
    // As many as one frame may be.
    transmit(&mut stack, &mut [run_frame(port, &payload[..MAX_RUN], 1)]);
    // The socket may have no room for all of them.
    let n = eventually(|| far.recv(&mut buffer).ok());
    assert_eq!(buffer[..n], payload[..1]);
    assert_eq!(stack.drops().get(DropReason::BadTransportHeader), bad);
}

#[test]
fn an_upload_to_a_slow_reader_never_stops() {
    let len = 6 << 20;
    let (port, thread) = server(move |mut stream| {
        let mut got = Vec::new();
        let mut piece = vec![0; 50_000];
        loop {
            let n = stream.read(&mut piece).unwrap();
            if n == 0 {
                break;
            }
            got.extend_from_slice(&piece[..n]);
            thread::sleep(std::time::Duration::from_millis(2));
        }
        assert!(got == pattern(len));
    });
    let data = pattern(len);
    let mut guest = guest(open(), RxPath::Ring);
    let socket = guest.connect((GATEWAY, port));
    let mut sent = 0;
    guest.run_until(|sockets| {
        let socket = sockets.get_mut::<tcp::Socket<'_>>(socket);
        if socket.can_send() && sent < data.len() {
            sent += socket.send_slice(&data[sent..]).unwrap();
            if sent == data.len() {
                socket.close();
            }
        }
        matches!(socket.state(), tcp::State::TimeWait | tcp::State::Closed)
    });
    thread.join().unwrap();
}
