//! Front-ends that do not keep to the protocol, or whose guest does not keep to virtio.
//!
//! Each ends in an error that the back-end reports, never in a crash or a hang, and the next
//! front-end finds a back-end that works.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::net::Shutdown;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use super::messages::*;
use super::ram::{Region, memfd};
use super::*;
use crate::net::loopback::Loopback;

fn loopback() -> BackEnd {
    BackEnd::new(Box::new(Loopback::default()))
}

/// Says something, and with it ends the session.
type Act = fn(&mut FrontEnd);

/// Runs `act` on a front-end that is set up and running, one that has its memory, and a new one as
/// far as `from` says; the error must contain `want`.
fn refused(name: &str, from: Stage, act: Act, want: &str) {
    let back_end = loopback();
    let mut front_end = FrontEnd::new(&back_end);
    if from >= Stage::Negotiated {
        front_end.negotiate();
    }
    if from >= Stage::Memory {
        front_end.share_memory();
    }
    if from >= Stage::Running {
        front_end.start_rings();
        front_end.exchange(0..50);
    }
    act(&mut front_end);
    let error = match back_end.outcome() {
        Err(error) => error.to_string(),
        Ok(()) => panic!("{name}: it was not refused"),
    };
    assert!(error.contains(want), "{name}: {error}");
    drop(front_end);
    back_end.serves_the_next();
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    New,
    Negotiated,
    Memory,
    Running,
}

fn say(front_end: &FrontEnd, code: u32, body: &[u8]) {
    send(&front_end.raw, &message(code, body), &[]);
}

#[test]
fn rings_that_do_not_exist() {
    for code in [
        SET_VRING_NUM,
        SET_VRING_BASE,
        GET_VRING_BASE,
        SET_VRING_ENABLE,
    ] {
        for index in [3u32, 255, 256, u32::MAX] {
            let back_end = loopback();
            let mut front_end = FrontEnd::new(&back_end);
            front_end.negotiate();
            say(&front_end, code, &words(&[index, 1]));
            let error = back_end.outcome().unwrap_err().to_string();
            assert!(error.contains("there is no ring"), "{code}: {error}");
        }
    }
    let no_ring = "there is no ring";
    refused(
        "address",
        Stage::Memory,
        |front_end| {
            let body = [words(&[3, 0]), longs(&[0; 4])].concat();
            say(front_end, SET_VRING_ADDR, &body);
        },
        no_ring,
    );
    for code in [SET_VRING_KICK, SET_VRING_CALL, SET_VRING_ERR] {
        let back_end = loopback();
        let mut front_end = FrontEnd::new(&back_end);
        front_end.negotiate();
        set_fd(&front_end, code, 3, &[event().as_raw_fd()]);
        let error = back_end.outcome().unwrap_err().to_string();
        assert!(error.contains(no_ring), "{code}: {error}");
    }
}

#[test]
fn sizes_that_no_ring_has() {
    for size in [
        0u32,
        3,
        255,
        257,
        1023,
        2048,
        32768,
        65536,
        1 << 31,
        u32::MAX,
    ] {
        let back_end = loopback();
        let mut front_end = FrontEnd::new(&back_end);
        front_end.negotiate();
        say(&front_end, SET_VRING_NUM, &words(&[0, size]));
        let error = back_end.outcome().unwrap_err().to_string();
        assert!(error.contains("not a power of two"), "{size}: {error}");
    }
    refused(
        "while it runs",
        Stage::Running,
        |front_end| say(front_end, SET_VRING_NUM, &words(&[1, 0])),
        "not a power of two",
    );
}

/// SET_VRING_ADDR with one of the three addresses changed.
fn address(front_end: &FrontEnd, which: usize, value: u64) {
    let ring = front_end.addresses(TX);
    let mut at = [
        ring.desc_table_addr,
        ring.used_ring_addr,
        ring.avail_ring_addr,
    ];
    at[which] = value;
    let body = [words(&[1, 0]), longs(&at), longs(&[0])].concat();
    say(front_end, SET_VRING_ADDR, &body);
}

#[test]
fn rings_outside_memory() {
    for which in 0..3 {
        for value in [0u64, 0x6fff_ffff_fff0, !15, 1 << 63] {
            let back_end = loopback();
            let front_end = FrontEnd::start(&back_end);
            address(&front_end, which, value);
            let error = back_end.outcome().unwrap_err().to_string();
            assert!(error.contains("no memory region"), "{which}: {error}");
        }
        // It begins inside, and ends outside.
        let back_end = loopback();
        let front_end = FrontEnd::start(&back_end);
        let last = front_end.ram.user(crate::testing::RAM_LEN - 16);
        address(&front_end, which, last);
        let error = back_end.outcome().unwrap_err().to_string();
        assert!(error.contains("guest memory"), "{which}: {error}");
        back_end.serves_the_next();
    }
    // Before there is any memory.
    refused(
        "no memory",
        Stage::Negotiated,
        |front_end| address(front_end, 0, 0x7000_0000_0000),
        "no memory region",
    );
}

#[test]
fn rings_at_odd_addresses() {
    for which in 0..3 {
        let back_end = loopback();
        let front_end = FrontEnd::start(&back_end);
        let odd = front_end.ram.user(front_end.driver.tx.desc) + 1;
        address(&front_end, which, odd);
        back_end.outcome().unwrap_err();
        back_end.serves_the_next();
    }
}

/// SET_MEM_TABLE with these regions of `file`.
fn table(front_end: &FrontEnd, regions: &[Region], file: &File) {
    let mut body = words(&[u32::try_from(regions.len()).unwrap(), 0]);
    for region in regions {
        body.extend(longs(&[
            region.guest,
            region.size,
            region.user,
            region.offset,
        ]));
    }
    let fds = vec![file.as_raw_fd(); regions.len()];
    send(&front_end.raw, &message(SET_MEM_TABLE, &body), &fds);
}

fn region(guest: u64, size: u64, offset: u64) -> Region {
    Region {
        guest,
        size,
        user: guest,
        offset,
    }
}

#[test]
fn memory_that_is_not_there() {
    const M: u64 = 1 << 20;
    let directory = File::open("/").unwrap();
    let null = File::options()
        .read(true)
        .write(true)
        .open("/dev/null")
        .unwrap();
    let (pipe, _) = std::io::pipe().unwrap();
    let pipe = File::from(OwnedFd::from(pipe));
    let file = memfd("small", M);
    let rows: [(&str, &[Region], &File); 12] = [
        ("longer than its file", &[region(0, 2 * M, 0)], &file),
        ("behind its file", &[region(0, M, M)], &file),
        ("one page too long", &[region(0, M, 4096)], &file),
        (
            "offset and size",
            &[region(0, M, u64::MAX - M + 4096)],
            &file,
        ),
        ("guest and size", &[region(u64::MAX - 4095, M, 0)], &file),
        ("size zero", &[region(0, 0, 0)], &file),
        ("odd offset", &[region(0, 4096, 17)], &file),
        (
            "overlapping",
            &[region(0, M, 0), region(M / 2, M, 0)],
            &file,
        ),
        ("twice", &[region(0, M, 0), region(0, M, 0)], &file),
        ("a directory", &[region(0, 4096, 0)], &directory),
        ("a device", &[region(0, 4096, 0)], &null),
        ("a pipe", &[region(0, 4096, 0)], &pipe),
    ];
    for (name, regions, file) in rows {
        for running in [false, true] {
            let back_end = loopback();
            let mut front_end = FrontEnd::new(&back_end);
            front_end.negotiate();
            if running {
                front_end.share_memory();
                front_end.start_rings();
            }
            table(&front_end, regions, file);
            let outcome = back_end.outcome();
            assert!(outcome.is_err(), "{name}");
            back_end.serves_the_next();
        }
    }
}

#[test]
fn regions_that_cannot_be_added_or_removed() {
    let adds: [(&str, Act); 4] = [
        ("overlap", |front_end| {
            let mut region = front_end.ram.regions[0];
            region.guest += 4096;
            let info = front_end.ram.info(region);
            front_end.api.add_mem_region(&info).unwrap_err();
        }),
        ("too short", |front_end| {
            let region = region(1 << 40, 1 << 40, 0);
            let info = front_end.ram.info(region);
            front_end.api.add_mem_region(&info).unwrap_err();
        }),
        ("not there", |front_end| {
            let info = front_end.ram.info(region(1 << 40, 4096, 0));
            front_end.api.remove_mem_region(&info).unwrap_err();
        }),
        ("another size", |front_end| {
            let mut region = front_end.ram.regions[0];
            region.size -= 4096;
            let info = front_end.ram.info(region);
            front_end.api.remove_mem_region(&info).unwrap_err();
        }),
    ];
    for (name, act) in adds {
        refused(name, Stage::Running, act, "memory region");
    }
}

#[test]
fn kick_descriptors_that_nobody_can_wait_for() {
    let files = [
        memfd("kick", 4096),
        File::open("/").unwrap(),
        File::open("/dev/null").unwrap(),
        File::open(std::env::current_exe().unwrap()).unwrap(),
    ];
    for file in files {
        for running in [false, true] {
            let back_end = loopback();
            let mut front_end = FrontEnd::new(&back_end);
            front_end.negotiate();
            front_end.share_memory();
            if running {
                front_end.start_rings();
                set_fd(&front_end, SET_VRING_KICK, 1, &[file.as_raw_fd()]);
            } else {
                front_end.start_ring(RX, 0);
                let addresses = front_end.addresses(TX);
                front_end.api.set_vring_num(TX, SIZE).unwrap();
                front_end.api.set_vring_addr(TX, &addresses).unwrap();
                front_end.api.set_vring_enable(TX, true).unwrap();
                set_fd(&front_end, SET_VRING_KICK, 1, &[file.as_raw_fd()]);
            }
            let error = back_end.outcome().unwrap_err().to_string();
            assert!(error.contains("cannot run"), "{error}");
            back_end.serves_the_next();
        }
    }
}

#[test]
fn the_wrong_number_of_descriptors() {
    let fds = [event(), event(), event()];
    let fds = fds.each_ref().map(|event| event.as_raw_fd());
    for code in [SET_VRING_KICK, SET_VRING_CALL, SET_VRING_ERR] {
        for (value, fds) in [(0, &fds[..0]), (0, &fds[..2]), (0x100, &fds[..1])] {
            let back_end = loopback();
            let front_end = FrontEnd::start(&back_end);
            set_fd(&front_end, code, value, fds);
            back_end.outcome().unwrap_err();
            back_end.serves_the_next();
        }
    }
    let back_end = loopback();
    let front_end = FrontEnd::start(&back_end);
    // polled, which this back-end does not do
    set_fd(&front_end, SET_VRING_KICK, 0x100, &[]);
    let error = back_end.outcome().unwrap_err().to_string();
    assert!(error.contains("polled"), "{error}");
}

/// A pipe that nobody reads and that has no room: writing to it would wait for ever.
fn full_pipe() -> (std::io::PipeReader, File) {
    let (reader, writer) = std::io::pipe().unwrap();
    let mut writer = File::from(OwnedFd::from(writer));
    let flags = rustix::fs::fcntl_getfl(&writer).unwrap();
    rustix::fs::fcntl_setfl(&writer, flags | rustix::fs::OFlags::NONBLOCK).unwrap();
    while writer.write(&[0; 4096]).is_ok() {}
    while writer.write(&[0]).is_ok() {}
    rustix::fs::fcntl_setfl(&writer, flags).unwrap();
    (reader, writer)
}

#[test]
fn a_call_descriptor_that_is_full_does_not_hold_up_the_worker() {
    let back_end = loopback();
    let mut front_end = FrontEnd::start(&back_end);
    let (_reader, writer) = full_pipe();
    for ring in [RX, TX] {
        set_fd(
            &front_end,
            SET_VRING_CALL,
            ring as u64,
            &[writer.as_raw_fd()],
        );
    }
    front_end.exchange(0..500);
    drop(front_end);
    back_end.outcome().unwrap();
    back_end.serves_the_next();
}

#[test]
fn an_error_descriptor_that_is_full_does_not_hold_up_the_worker() {
    let back_end = loopback();
    let mut front_end = FrontEnd::start(&back_end);
    front_end.exchange(0..50);
    let (_reader, writer) = full_pipe();
    for ring in [RX, TX] {
        set_fd(
            &front_end,
            SET_VRING_ERR,
            ring as u64,
            &[writer.as_raw_fd()],
        );
    }
    // An answer to this means that the above has arrived.
    front_end.api.get_features().unwrap();
    front_end.driver.tx.set_avail_idx(40_000);
    front_end.kick();
    wait_until("the device gave up", || {
        back_end.counters.get("driver_faults") == 1
    });
    drop(front_end);
    back_end.outcome().unwrap();
    back_end.serves_the_next();
}

#[test]
fn call_descriptors_of_all_kinds() {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let (socket, other) = UnixStream::pair().unwrap();
    drop(other);
    let files: [OwnedFd; 5] = [
        writer.into(),
        socket.into(),
        File::open("/").unwrap().into(),
        File::open("/dev/null").unwrap().into(),
        memfd("call", 0).into(),
    ];
    for file in files {
        let back_end = loopback();
        let mut front_end = FrontEnd::start(&back_end);
        set_fd(&front_end, SET_VRING_CALL, 0, &[file.as_raw_fd()]);
        set_fd(&front_end, SET_VRING_ERR, 0, &[file.as_raw_fd()]);
        front_end.exchange(0..100);
        drop(front_end);
        back_end.outcome().unwrap();
    }
}

#[test]
fn features_that_were_not_offered() {
    refused(
        "features",
        Stage::Negotiated,
        |front_end| say(front_end, SET_FEATURES, &longs(&[FEATURES | 1 << 63])),
        "were not offered",
    );
    refused(
        "features while it runs",
        Stage::Running,
        |front_end| say(front_end, SET_FEATURES, &longs(&[u64::MAX])),
        "were not offered",
    );
    refused(
        "protocol features",
        Stage::New,
        |front_end| {
            let features = VhostUserProtocolFeatures::all();
            front_end.api.set_owner().unwrap();
            front_end.api.get_features().unwrap();
            front_end.api.get_protocol_features().unwrap();
            // The answer, if any, is an error.
            let _ = front_end.api.set_protocol_features(features);
        },
        "were not offered",
    );
}

#[test]
fn a_driver_without_version_1() {
    let back_end = loopback();
    let mut front_end = FrontEnd::new(&back_end);
    front_end.features &= !F_VERSION_1;
    front_end.negotiate();
    front_end.share_memory();
    front_end.start_ring(RX, 0);
    front_end.api.set_vring_num(TX, SIZE).unwrap();
    let addresses = front_end.addresses(TX);
    front_end.api.set_vring_addr(TX, &addresses).unwrap();
    front_end.api.set_vring_enable(TX, true).unwrap();
    front_end
        .api
        .set_vring_kick(TX, &front_end.kicks[TX])
        .unwrap_err();
    let error = back_end.outcome().unwrap_err().to_string();
    assert!(error.contains("VERSION_1"), "{error}");
    back_end.serves_the_next();
}

/// The guest breaks virtio: the device stops and says so, and starts anew with the next driver.
#[test]
fn memory_that_is_taken_away_while_the_device_runs() {
    for how in 0..3 {
        let back_end = loopback();
        let mut front_end = FrontEnd::start(&back_end);
        front_end.exchange(0..100);
        front_end.driver.fill_rx(1600);
        let infos = front_end.ram.table();
        match how {
            // the buffers, and perhaps nothing notices until one is used
            0 => front_end.api.remove_mem_region(&infos[0]).unwrap(),
            // the transmit ring
            1 => front_end.api.remove_mem_region(&infos[1]).unwrap(),
            // all but what nobody uses
            _ => {
                let other = front_end.ram.info(region(1 << 40, 4096, 0));
                front_end.api.set_mem_table(&[other]).unwrap();
            }
        }
        wait_until("the device gave up", || {
            front_end.send(100);
            front_end.kick();
            back_end.counters.get("driver_faults") == 1
        });
        wait_until("it said so", || signalled(&front_end.err));
        // The driver's reset, as QEMU passes it on.
        for index in [RX, TX] {
            front_end.api.get_vring_base(index).unwrap();
        }
        front_end.driver.reset();
        front_end.share_memory();
        front_end.start_rings();
        front_end.exchange(0..100);
        drop(front_end);
        back_end.outcome().unwrap();
        back_end.serves_the_next();
    }
}

#[test]
fn rings_on_top_of_each_other() {
    for which in 0..4 {
        let back_end = loopback();
        let mut front_end = FrontEnd::start(&back_end);
        front_end.exchange(0..100);
        front_end.driver.fill_rx(1600);
        while front_end.send(0) {}
        let (rx, tx) = (front_end.addresses(RX), front_end.addresses(TX));
        match which {
            0 => address(&front_end, 1, tx.avail_ring_addr & !3),
            1 => address(&front_end, 0, tx.avail_ring_addr & !15),
            2 => address(&front_end, 1, rx.avail_ring_addr & !3),
            _ => address(&front_end, 2, rx.used_ring_addr),
        }
        for _ in 0..50 {
            front_end.kick();
            std::thread::sleep(Duration::from_micros(200));
        }
        drop(front_end);
        // Whatever became of it, it is over.
        let _ = back_end.outcome();
        back_end.serves_the_next();
    }
}

#[test]
fn messages_that_are_cut_or_too_long() {
    let whole = message(SET_VRING_NUM, &words(&[0, 64]));
    for len in 1..whole.len() {
        let back_end = loopback();
        let mut front_end = FrontEnd::new(&back_end);
        front_end.negotiate();
        send(&front_end.raw, &whole[..len], &[]);
        front_end.raw.shutdown(Shutdown::Write).unwrap();
        let _ = back_end.outcome();
    }
    let too_long: [(&str, Act); 5] = [
        ("a body longer than its message", |front_end| {
            say(front_end, SET_VRING_NUM, &[0; 12]);
        }),
        ("a body shorter than its message", |front_end| {
            say(front_end, SET_VRING_NUM, &[0; 4]);
        }),
        ("no body", |front_end| say(front_end, SET_VRING_ADDR, &[])),
        ("4 KiB", |front_end| {
            say(front_end, SET_FEATURES, &[0; 4096])
        }),
        ("4 GiB", |front_end| {
            send(&front_end.raw, &words(&[SET_FEATURES, 1, u32::MAX]), &[]);
        }),
    ];
    for (name, act) in too_long {
        refused(name, Stage::Running, act, "");
    }
    refused(
        "another version",
        Stage::Running,
        |front_end| {
            let bytes = [words(&[SET_FEATURES, 2, 8]), longs(&[FEATURES])].concat();
            send(&front_end.raw, &bytes, &[]);
        },
        "",
    );
    for code in [0, 45, 1000, u32::MAX] {
        let back_end = loopback();
        let mut front_end = FrontEnd::new(&back_end);
        front_end.negotiate();
        say(&front_end, code, &[]);
        back_end.outcome().unwrap_err();
    }
}

/// xorshift64*
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, end: u64) -> u64 {
        (self.next() >> 8) % end
    }
}

#[test]
fn random_bytes() {
    let back_end = loopback();
    for seed in 1..300u64 {
        let mut random = Random(seed);
        let stream = back_end.connect();
        let len = random.below(5000);
        let bytes: Vec<u8> = (0..len).map(|_| random.next().to_le_bytes()[0]).collect();
        send(&stream, &bytes, &[]);
        drop(stream);
        let _ = back_end.outcome();
    }
    back_end.serves_the_next();
}

/// Messages that are whole, in any order, with bodies that are near to sense.
#[test]
fn random_messages() {
    let back_end = loopback();
    for seed in 1..400u64 {
        let mut random = Random(seed);
        let mut front_end = FrontEnd::new(&back_end);
        if seed % 4 > 0 {
            front_end.negotiate();
        }
        if seed % 4 > 1 {
            front_end.share_memory();
        }
        if seed % 4 > 2 {
            front_end.start_rings();
            front_end.exchange(0..20);
        }
        let (_reader, writer) = full_pipe();
        let spare = event();
        for _ in 0..random.below(30) {
            random_message(
                &mut random,
                &front_end,
                &[spare.as_raw_fd(), writer.as_raw_fd()],
            );
        }
        front_end.driver.fill_rx(1600);
        front_end.send(0);
        front_end.kick();
        front_end.raw.shutdown(Shutdown::Write).unwrap();
        // Answers must not hold up the back-end either: they are read to the end.
        let mut answers = Vec::new();
        let _ = front_end.raw.read_to_end(&mut answers);
        let _ = back_end.outcome();
        if seed % 50 == 0 {
            back_end.serves_the_next();
        }
    }
    back_end.serves_the_next();
}

fn random_message(random: &mut Random, front_end: &FrontEnd, fds: &[i32]) {
    let index = random.below(4);
    let number =
        [0, 1, 2, 63, 64, 65, 256, 0x100, u64::MAX][usize::try_from(random.below(9)).unwrap()];
    let code = u32::try_from(random.below(44)).unwrap();
    let ring = front_end.addresses(usize::try_from(index).unwrap() % 2);
    let body = match code {
        SET_VRING_ADDR => {
            let mut at = [
                ring.desc_table_addr,
                ring.used_ring_addr,
                ring.avail_ring_addr,
            ];
            at[usize::try_from(random.below(3)).unwrap()] ^= number << 2;
            [longs(&[index]), longs(&at), longs(&[0])].concat()
        }
        SET_VRING_NUM | SET_VRING_BASE | GET_VRING_BASE | SET_VRING_ENABLE => {
            longs(&[index | number << 32])
        }
        SET_VRING_KICK | SET_VRING_CALL | SET_VRING_ERR => longs(&[index | number & 0x100]),
        SET_FEATURES => longs(&[front_end.features & !number | PROTOCOL_FEATURES]),
        SET_MEM_TABLE => {
            let region = front_end.ram.regions[0];
            let at = [
                region.guest,
                region.size ^ number,
                region.user,
                region.offset,
            ];
            [words(&[1, 0]), longs(&at)].concat()
        }
        _ => longs(&vec![number; usize::try_from(random.below(6)).unwrap()]),
    };
    let wants_fd = matches!(
        code,
        SET_VRING_KICK | SET_VRING_CALL | SET_VRING_ERR | SET_MEM_TABLE
    );
    let take = usize::from(wants_fd) & usize::from(random.below(8) > 0);
    let from = usize::try_from(random.below(2)).unwrap();
    let fds = match code {
        SET_MEM_TABLE => vec![front_end.ram.file.as_raw_fd(); take],
        _ => fds[from..from + take].to_vec(),
    };
    send(&front_end.raw, &message(code, &body), &fds);
}
