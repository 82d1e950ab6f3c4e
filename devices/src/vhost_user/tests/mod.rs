//! The back-end over a real socket, with the front-end of the crate `vhost` at its other end.
//!
//! ```text
//!   FrontEnd (mock driver, memory in a memfd) --socket pair--> BackEnd (thread: VhostUser::serve)
//! ```

mod hostile;
mod lifecycle;
mod messages;
mod ram;

use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use net::nic::{Backend, VnetHdr};
use vhost::vhost_user::message::VhostUserHeaderFlag;
use vhost::vhost_user::{
    Frontend, VhostUserFrontend as _, VhostUserProtocolFeatures, VhostUserVirtioFeatures,
};
use vhost::{VhostBackend as _, VringConfigData};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use self::ram::Ram;
use super::{SessionError, VhostUser};
use crate::net::tests::pattern;
use crate::net::{CardCounters, Net, NetConfig};
use crate::testing::{MockDriver, MockRing};
use crate::virtio::spec::{F_EVENT_IDX, F_INDIRECT_DESC, F_VERSION_1, NET_F_MRG_RXBUF};

const FEATURES: u64 = F_VERSION_1 | NET_F_MRG_RXBUF | F_EVENT_IDX | F_INDIRECT_DESC;
const PROTOCOL_FEATURES: u64 = VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();
const SIZE: u16 = 64;
const PATIENCE: Duration = Duration::from_secs(20);
const RX: usize = 0;
const TX: usize = 1;

fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < deadline, "it never happened: {what}");
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// The device under test, on a thread that serves one front-end after the other.
struct BackEnd {
    streams: Option<Sender<UnixStream>>,
    results: Receiver<Result<(), SessionError>>,
    thread: Option<JoinHandle<()>>,
    counters: CardCounters,
}

impl BackEnd {
    fn new(backend: Box<dyn Backend>) -> Self {
        let net = Net::new(NetConfig::default(), backend).unwrap();
        let counters = net.counters();
        let (streams, next) = channel();
        let (done, results) = channel();
        let thread = std::thread::spawn(move || {
            let mut back_end = VhostUser::new(Box::new(net), 2);
            for stream in next {
                done.send(back_end.serve(stream)).unwrap();
            }
        });
        Self {
            streams: Some(streams),
            results,
            thread: Some(thread),
            counters,
        }
    }

    /// A socket whose other end is being served, once those before it are done.
    fn connect(&self) -> UnixStream {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_read_timeout(Some(PATIENCE)).unwrap();
        ours.set_write_timeout(Some(PATIENCE)).unwrap();
        self.streams.as_ref().unwrap().send(theirs).unwrap();
        ours
    }

    /// How the oldest session that is not asked for yet ended.
    fn outcome(&self) -> Result<(), SessionError> {
        self.results
            .recv_timeout(PATIENCE)
            .expect("the session did not end")
    }

    /// A front-end comes and works: the check that nothing is left of one before it.
    fn serves_the_next(&self) {
        let mut front_end = FrontEnd::start(self);
        front_end.drain();
        front_end.exchange(0..200);
        drop(front_end);
        self.outcome().unwrap();
    }
}

impl Drop for BackEnd {
    fn drop(&mut self) {
        self.streams = None;
        let joined = self.thread.take().unwrap().join();
        assert!(joined.is_ok() || std::thread::panicking(), "it panicked");
    }
}

/// A front-end with its guest.
struct FrontEnd {
    api: Frontend,
    /// The same connection, for what `api` would not send.
    raw: UnixStream,
    ram: Ram,
    driver: MockDriver,
    kicks: [EventFd; 2],
    calls: [EventFd; 2],
    err: EventFd,
    features: u64,
}

fn event() -> EventFd {
    EventFd::new(EFD_NONBLOCK).unwrap()
}

impl FrontEnd {
    /// Connects; nothing is said yet.
    fn new(back_end: &BackEnd) -> Self {
        Self::with_rings_of(SIZE, back_end)
    }

    fn with_rings_of(size: u16, back_end: &BackEnd) -> Self {
        let raw = back_end.connect();
        let ram = Ram::new();
        Self {
            api: Frontend::from_stream(raw.try_clone().unwrap(), 2),
            raw,
            driver: MockDriver::over(ram.guest(), size),
            ram,
            kicks: [event(), event()],
            calls: [event(), event()],
            err: event(),
            features: FEATURES,
        }
    }

    /// As [`Self::new`], after the whole procedure: the device runs.
    fn start(back_end: &BackEnd) -> Self {
        let mut this = Self::new(back_end);
        this.negotiate();
        this.share_memory();
        this.start_rings();
        this
    }

    fn negotiate(&mut self) {
        let api = &mut self.api;
        api.set_owner().unwrap();
        let offered = api.get_features().unwrap();
        assert_eq!(self.features & !offered, 0, "features not on offer");
        let protocol = api.get_protocol_features().unwrap();
        api.set_protocol_features(protocol).unwrap();
        // From here on, each request is answered: an error shows where it was made.
        api.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        assert!(api.get_queue_num().unwrap() >= 2);
        api.set_features(self.features | PROTOCOL_FEATURES).unwrap();
    }

    fn share_memory(&self) {
        self.api.set_mem_table(&self.ram.table()).unwrap();
    }

    fn start_rings(&mut self) {
        for index in [RX, TX] {
            self.start_ring(index, 0);
        }
    }

    fn ring(&self, index: usize) -> &MockRing {
        [&self.driver.rx, &self.driver.tx][index]
    }

    /// What SET_VRING_ADDR says of ring `index`.
    fn addresses(&self, index: usize) -> VringConfigData {
        let ring = self.ring(index);
        VringConfigData {
            queue_max_size: ring.size,
            queue_size: ring.size,
            desc_table_addr: self.ram.user(ring.desc),
            avail_ring_addr: self.ram.user(ring.avail),
            used_ring_addr: self.ram.user(ring.used),
            ..VringConfigData::default()
        }
    }

    fn start_ring(&mut self, index: usize, base: u16) {
        let addresses = self.addresses(index);
        let api = &mut self.api;
        api.set_vring_num(index, addresses.queue_size).unwrap();
        api.set_vring_base(index, base).unwrap();
        api.set_vring_addr(index, &addresses).unwrap();
        api.set_vring_err(index, &self.err).unwrap();
        api.set_vring_call(index, &self.calls[index]).unwrap();
        api.set_vring_kick(index, &self.kicks[index]).unwrap();
        api.set_vring_enable(index, true).unwrap();
    }

    fn kick(&self) {
        for kick in &self.kicks {
            kick.write(1).unwrap();
        }
    }

    /// Sends frame number `number`; false when the ring is full.
    fn send(&mut self, number: usize) -> bool {
        self.driver
            .send(&VnetHdr::default(), &frame(number), &[100])
    }

    /// Sends the frames with these numbers to a loopback and gets them back, in order.
    fn exchange(&mut self, numbers: std::ops::Range<usize>) {
        let (mut sent, mut got) = (numbers.start, numbers.start);
        let deadline = Instant::now() + PATIENCE;
        while got < numbers.end {
            assert!(
                Instant::now() < deadline,
                "stuck: sent up to {sent}, received up to {got}"
            );
            self.driver.fill_rx(1600);
            while sent < numbers.end && sent - got < 100 && self.send(sent) {
                sent += 1;
            }
            self.kick();
            got = self.check_received(got);
        }
    }

    /// Takes what the one before left in the loopback: nothing resets the device in between.
    fn drain(&mut self) {
        const MARKS: usize = 1 << 40;
        let mut mark = MARKS;
        let mut sent: Option<Instant> = None;
        wait_until("all that was left has come", || {
            self.driver.fill_rx(1600);
            self.driver.collect_tx();
            // The loopback may have no room for a mark as yet; then it drops it.
            if sent.is_none_or(|at| at.elapsed() > Duration::from_millis(50)) {
                mark += 1;
                assert!(self.send(mark));
                sent = Some(Instant::now());
            }
            self.kick();
            let received = self.driver.collect_rx();
            received
                .iter()
                .any(|received| received.bytes == frame(mark))
        });
    }

    /// Takes what came: frames from number `next` on; the number of the one after them.
    fn check_received(&mut self, mut next: usize) -> usize {
        self.driver.collect_tx();
        for received in self.driver.collect_rx() {
            assert_eq!(received.bytes, frame(next), "frame {next}");
            next += 1;
        }
        next
    }
}

/// A frame that no other looks like, of a length that varies.
fn frame(number: usize) -> Vec<u8> {
    let mut bytes = pattern(60 + number % 1400, number);
    bytes[..8].copy_from_slice(&(number as u64).to_le_bytes());
    bytes
}

/// True when the event was signalled since the last look.
fn signalled(event: &EventFd) -> bool {
    event.read().is_ok()
}
