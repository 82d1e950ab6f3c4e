//! What a front-end that keeps to the protocol does.

use std::io::Read as _;
use std::time::Duration;

use vhost::VhostUserMemoryRegionInfo;
use vhost::vhost_user::message::VhostUserConfigFlags;

use super::messages::SET_VRING_ENABLE;
use super::ram::{Region, memfd};
use super::*;
use crate::net::loopback::Loopback;
use crate::net::tests::Probe;
use crate::virtio::spec::NET_F_CTRL_VQ;

fn loopback() -> BackEnd {
    BackEnd::new(Box::new(Loopback::default()))
}

/// Stops a ring; its position in the available ring.
fn stop(front_end: &FrontEnd, index: usize) -> u16 {
    u16::try_from(front_end.api.get_vring_base(index).unwrap()).unwrap()
}

#[test]
fn frames_pass_both_ways() {
    let back_end = loopback();
    let mut front_end = FrontEnd::start(&back_end);
    front_end.exchange(0..3000);
    assert!(signalled(&front_end.calls[RX]) && signalled(&front_end.calls[TX]));
    assert!(!signalled(&front_end.err));
    drop(front_end);
    back_end.outcome().unwrap();
    assert_eq!(back_end.counters.get("driver_faults"), 0);
}

#[test]
fn the_configuration_space_is_read() {
    let back_end = loopback();
    let mut front_end = FrontEnd::new(&back_end);
    front_end.negotiate();
    let mut read = |offset, len| {
        let flags = VhostUserConfigFlags::empty();
        let room = vec![0xee; usize::try_from(len).unwrap()];
        let (_, bytes) = front_end.api.get_config(offset, len, flags, &room).unwrap();
        bytes
    };
    let want = [0x52, 0x54, 0, 0x12, 0x34, 0x56, 1, 0, 1, 0, 0xdc, 5];
    assert_eq!(read(0, 12), want);
    assert_eq!(read(10, 2), want[10..]);
    // What lies behind it reads as zero: Linux asks for fields that this card does not have.
    assert_eq!(read(8, 16), [&want[8..], &[0; 12]].concat());
    // Nothing in it is writable, and trying is no offence.
    let flags = VhostUserConfigFlags::WRITABLE;
    front_end.api.set_config(0, flags, &[1; 6]).unwrap();
    drop(front_end);
    back_end.outcome().unwrap();
    back_end.serves_the_next();
}

#[test]
fn without_protocol_features_the_rings_are_enabled_from_the_start() {
    let back_end = loopback();
    let mut front_end = FrontEnd::new(&back_end);
    front_end.api.set_owner().unwrap();
    front_end.api.get_features().unwrap();
    front_end.api.set_features(FEATURES).unwrap();
    front_end.share_memory();
    for index in [RX, TX] {
        let addresses = front_end.addresses(index);
        let api = &front_end.api;
        api.set_vring_num(index, SIZE).unwrap();
        api.set_vring_base(index, 0).unwrap();
        api.set_vring_addr(index, &addresses).unwrap();
        api.set_vring_kick(index, &front_end.kicks[index]).unwrap();
        api.set_vring_call(index, &front_end.calls[index]).unwrap();
    }
    front_end.exchange(0..200);
}

/// QEMU's network card enables its rings when it is made, and accepts features when its driver does.
#[test]
fn rings_may_be_enabled_before_features_are_accepted() {
    for wants_answer in [false, true] {
        let back_end = loopback();
        let mut front_end = FrontEnd::new(&back_end);
        front_end.api.set_owner().unwrap();
        front_end.api.get_features().unwrap();
        let protocol = front_end.api.get_protocol_features().unwrap();
        front_end.api.set_protocol_features(protocol).unwrap();
        for index in [0u32, 1] {
            let mut bytes = messages::message(SET_VRING_ENABLE, &messages::words(&[index, 1]));
            bytes[4] |= if wants_answer { 8 } else { 0 };
            messages::send(&front_end.raw, &bytes, &[]);
            if wants_answer {
                let mut answer = [0; 20];
                front_end.raw.read_exact(&mut answer).unwrap();
                assert_eq!(answer[..], messages::words(&[SET_VRING_ENABLE, 5, 8, 0, 0]));
            }
        }
        front_end.api.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        let features = FEATURES | PROTOCOL_FEATURES;
        front_end.api.set_features(features).unwrap();
        front_end.share_memory();
        for index in [RX, TX] {
            let addresses = front_end.addresses(index);
            let api = &front_end.api;
            api.set_vring_num(index, SIZE).unwrap();
            api.set_vring_addr(index, &addresses).unwrap();
            api.set_vring_kick(index, &front_end.kicks[index]).unwrap();
        }
        front_end.exchange(0..200);
    }
    let back_end = loopback();
    for (index, enable, want) in [(7, 1, "there is no ring"), (0, 2, "enabled by 2")] {
        let front_end = FrontEnd::new(&back_end);
        let bytes = messages::message(SET_VRING_ENABLE, &messages::words(&[index, enable]));
        messages::send(&front_end.raw, &bytes, &[]);
        let error = back_end.outcome().unwrap_err().to_string();
        assert!(error.contains(want), "{error}");
    }
}

/// The front-end chooses, as it cannot ask: also for the control queue, which needs few entries.
#[test]
fn rings_have_the_size_that_the_front_end_gives_them() {
    for size in [8, 256, 1024] {
        let back_end = loopback();
        let mut front_end = FrontEnd::with_rings_of(size, &back_end);
        front_end.features |= NET_F_CTRL_VQ;
        front_end.negotiate();
        front_end.share_memory();
        let ctrl = MockRing::new(front_end.ram.guest(), 0x38_0000, size);
        let addresses = VringConfigData {
            queue_max_size: size,
            queue_size: size,
            desc_table_addr: front_end.ram.user(ctrl.desc),
            avail_ring_addr: front_end.ram.user(ctrl.avail),
            used_ring_addr: front_end.ram.user(ctrl.used),
            ..VringConfigData::default()
        };
        let api = &mut front_end.api;
        assert_eq!(api.get_queue_num().unwrap(), 3);
        api.set_vring_num(2, size).unwrap();
        api.set_vring_addr(2, &addresses).unwrap();
        api.set_vring_kick(2, &event()).unwrap();
        api.set_vring_enable(2, true).unwrap();
        front_end.start_rings();
        front_end.exchange(0..2000);
    }
}

#[test]
fn regions_are_added_and_removed_one_by_one() {
    let back_end = loopback();
    let mut front_end = FrontEnd::new(&back_end);
    front_end.negotiate();
    assert!(front_end.api.get_max_mem_slots().unwrap() >= 32);
    for region in front_end.ram.regions.clone() {
        let info = front_end.ram.info(region);
        front_end.api.add_mem_region(&info).unwrap();
    }
    front_end.start_rings();
    front_end.exchange(0..500);
    // Memory comes and goes behind what is in use, while it is in use.
    let extra = Region {
        guest: 1 << 32,
        size: 1 << 20,
        user: 0x1000,
        offset: 0,
    };
    for round in 1..20 {
        let info = front_end.ram.info(extra);
        front_end.api.add_mem_region(&info).unwrap();
        front_end.exchange(round * 500..round * 500 + 250);
        front_end.api.remove_mem_region(&info).unwrap();
        front_end.exchange(round * 500 + 250..round * 500 + 500);
    }
    // The same regions over again, at once.
    front_end.share_memory();
    front_end.exchange(0..500);
    drop(front_end);
    back_end.outcome().unwrap();
    back_end.serves_the_next();
}

/// A guest that is sent from, received to, stopped and started again loses nothing.
#[test]
fn a_ring_goes_on_from_where_it_was_stopped() {
    let back_end = loopback();
    let mut front_end = FrontEnd::start(&back_end);
    let (mut sent, mut got) = (0, 0);
    for round in 0..200 {
        front_end.driver.fill_rx(1600);
        for _ in 0..round % 50 {
            sent += usize::from(sent - got < 200 && front_end.send(sent));
        }
        front_end.kick();
        if round % 3 == 0 {
            std::thread::sleep(Duration::from_micros(100));
        }
        let bases = [stop(&front_end, RX), stop(&front_end, TX)];
        // Nothing is in flight: what was taken was used.
        for index in [RX, TX] {
            let ring = front_end.ring(index);
            assert_eq!(bases[index], ring.device_idx(), "ring {index}");
            assert!(ring.avail_idx().wrapping_sub(bases[index]) <= SIZE);
        }
        std::thread::sleep(Duration::from_micros(200));
        front_end.kick();
        for index in [RX, TX] {
            assert_eq!(
                front_end.ring(index).device_idx(),
                bases[index],
                "it ran on"
            );
        }
        got = front_end.check_received(got);
        for index in [RX, TX] {
            front_end.start_ring(index, bases[index]);
        }
    }
    front_end.kick();
    wait_until("all frames are back", || {
        front_end.driver.fill_rx(1600);
        front_end.kick();
        got = front_end.check_received(got);
        got == sent
    });
    front_end.exchange(sent..sent + 500);
}

/// Restarted without SET_VRING_BASE, as the kick descriptor alone starts a ring.
#[test]
fn a_ring_that_is_given_no_base_keeps_its_own() {
    let back_end = loopback();
    let mut front_end = FrontEnd::start(&back_end);
    for round in 0..20 {
        front_end.exchange(round * 100..round * 100 + 100);
        stop(&front_end, TX);
        let api = &front_end.api;
        api.set_vring_call(TX, &front_end.calls[TX]).unwrap();
        api.set_vring_kick(TX, &front_end.kicks[TX]).unwrap();
    }
}

/// Chains that a frame was too long for were popped, and are not lost.
#[test]
fn chains_that_were_popped_and_not_used_are_there_again() {
    let probe = Probe::default();
    let back_end = BackEnd::new(probe.boxed());
    let mut front_end = FrontEnd::start(&back_end);
    for round in 0..10u16 {
        // Two of the four that the frame takes.
        for _ in 0..2 {
            assert!(front_end.driver.post_rx(&[100]));
        }
        let starved = back_end.counters.get("rx_starved");
        let bytes = frame(usize::from(round));
        let long = [&bytes[..60], &[7; 300]].concat();
        probe.deliver(&long);
        front_end.kick();
        wait_until("the frame waits", || {
            back_end.counters.get("rx_starved") > starved
        });
        let base = stop(&front_end, RX);
        assert_eq!(base, round * 4, "both chains are available again");
        assert!(front_end.driver.collect_rx().is_empty());
        for _ in 0..2 {
            assert!(front_end.driver.post_rx(&[100]));
        }
        front_end.start_ring(RX, base);
        let mut frames = Vec::new();
        wait_until("the frame is there", || {
            front_end.kick();
            frames.extend(front_end.driver.collect_rx());
            !frames.is_empty()
        });
        assert_eq!((frames.len(), frames[0].num_buffers), (1, 4));
        assert_eq!(frames[0].bytes, long);
    }
    assert_eq!(probe.lock().resets, 0, "the backend lives on");
}

/// A frame that needed less room than it was given leaves chains in the middle of others.
#[test]
fn chains_that_a_short_frame_left_over_are_used_in_order() {
    let probe = Probe::default();
    let back_end = BackEnd::new(probe.boxed());
    let mut front_end = FrontEnd::start(&back_end);
    for round in 0..200 {
        while front_end.driver.post_rx(&[100]) {}
        // Four chains, two of the three that are left of them, and one; then others.
        let rooms = match round % 2 {
            0 => [350, 150, 60],
            _ => [1, 5, 11].map(|step| 60 + round * step % 400),
        };
        for (number, &room) in rooms.iter().enumerate() {
            probe.deliver_from(&frame(number)[..60], room);
        }
        front_end.kick();
        let mut frames = Vec::new();
        wait_until("the frames are there", || {
            front_end.kick();
            frames.extend(front_end.driver.collect_rx());
            frames.len() == rooms.len()
        });
        let base = stop(&front_end, RX);
        for (number, received) in frames.iter().enumerate() {
            assert_eq!(received.bytes, frame(number)[..60]);
        }
        assert_eq!(base, front_end.ring(RX).device_idx(), "chains are missing");
        front_end.start_ring(RX, base);
    }
}

#[test]
fn a_disabled_ring_rests_until_it_is_enabled() {
    let back_end = loopback();
    let mut front_end = FrontEnd::start(&back_end);
    for round in 0..30 {
        let index = round % 2;
        front_end.exchange(round * 100..round * 100 + 100);
        front_end.api.set_vring_enable(index, false).unwrap();
        front_end.driver.fill_rx(1600);
        assert!(front_end.send(round * 100 + 100));
        front_end.kick();
        std::thread::sleep(Duration::from_millis(1));
        assert!(front_end.driver.collect_rx().is_empty());
        front_end.api.set_vring_enable(index, true).unwrap();
        let mut next = round * 100 + 100;
        wait_until("the frame came", || {
            next = front_end.check_received(next);
            next > round * 100 + 100
        });
    }
}

#[test]
fn the_call_descriptor_is_swapped_while_the_ring_runs() {
    let back_end = loopback();
    let mut front_end = FrontEnd::start(&back_end);
    for round in 0..200 {
        let next = round * 5;
        for number in next..next + 5 {
            front_end.driver.fill_rx(1600);
            assert!(front_end.send(number));
        }
        front_end.kick();
        let new = event();
        front_end.api.set_vring_call(RX, &new).unwrap();
        // Told by the old one or by the new one, whatever came when.
        let old = std::mem::replace(&mut front_end.calls[RX], new);
        let mut got = next;
        wait_until("all frames came", || {
            got = front_end.check_received(got);
            got == next + 5
        });
        wait_until("the interrupt came", || {
            signalled(&old) || signalled(&front_end.calls[RX])
        });
    }
}

#[test]
fn without_a_call_descriptor_the_ring_runs_and_the_one_that_comes_is_told() {
    let back_end = loopback();
    let mut front_end = FrontEnd::start(&back_end);
    messages::set_fd(&front_end, messages::SET_VRING_CALL, 0x100 | RX as u64, &[]);
    front_end.exchange(0..300);
    let call = event();
    front_end.api.set_vring_call(RX, &call).unwrap();
    assert!(signalled(&call), "it was not told of frames before it");
}

#[test]
fn a_front_end_that_is_gone_in_mid_traffic_makes_room_for_the_next() {
    let back_end = loopback();
    for round in 0..30 {
        let mut front_end = FrontEnd::start(&back_end);
        front_end.exchange(0..50 * round);
        front_end.driver.fill_rx(1600);
        while front_end.send(0) {}
        front_end.kick();
        drop(front_end);
        back_end.outcome().unwrap();
        back_end.serves_the_next();
    }
}

#[test]
fn no_memory_and_no_descriptor_of_a_front_end_is_kept() {
    let back_end = loopback();
    back_end.serves_the_next();
    let front_end = FrontEnd::start(&back_end);
    drop(front_end);
    back_end.outcome().unwrap();
    let mut front_end = FrontEnd::new(&back_end);
    front_end.negotiate();
    let name = "only-here";
    let file = memfd(name, 1 << 20);
    let info = VhostUserMemoryRegionInfo {
        memory_size: 1 << 20,
        mmap_handle: file.as_raw_fd(),
        ..VhostUserMemoryRegionInfo::default()
    };
    front_end.api.set_mem_table(&[info]).unwrap();
    let maps = || std::fs::read_to_string("/proc/self/maps").unwrap();
    assert!(maps().contains(name), "it is mapped now");
    drop(front_end);
    back_end.outcome().unwrap();
    drop(file);
    assert!(!maps().contains(name), "it is mapped still");
    let fds = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let open = fds.filter_map(|entry| std::fs::read_link(entry.path()).ok());
    assert_eq!(
        open.filter(|link| link.to_string_lossy().contains(name))
            .count(),
        0
    );
}

#[test]
fn a_reset_of_the_device_starts_it_anew() {
    let back_end = loopback();
    let mut front_end = FrontEnd::start(&back_end);
    for round in 0..10 {
        front_end.exchange(round * 100..round * 100 + 100);
        front_end.api.reset_device().unwrap();
        front_end.driver.reset();
        let features = front_end.features | PROTOCOL_FEATURES;
        front_end.api.set_features(features).unwrap();
        front_end.start_rings();
    }
}
