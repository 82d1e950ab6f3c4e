//! The whole stack between a guest with a real TCP (smoltcp's) and real sockets of this machine.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::thread;

use smoltcp::socket::{tcp, udp};

use super::Stack;
use crate::config::{Config, Forward, Protocol};
use crate::tcp::flows::RxPath;
use crate::testkit::guest::Guest;

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
