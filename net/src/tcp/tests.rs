//! TCP, told as scripts.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::time::Duration;

use super::flows::{Limits, Refusal};
use super::receiver::WINDOW;
use super::segment::Flags;
use crate::nic::{Offloads, Stop};
use crate::testkit::script::{Script, Setup, on_all_paths, seg};

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 31 + i / 251) as u8).collect()
}

mod opening {
    use super::*;

    #[test]
    fn nothing_is_answered_before_the_host_connects() {
        let mut t = Script::new(Setup::default());
        t.guest_sends(seg().syn().no_ack());
        t.guest_sends(seg().syn().no_ack());
        t.after(ms(3000)).quiet();
        assert_eq!(t.host.opened.len(), 1);
        t.host_connects(Ok(()));
        let got = t.guest_sees(seg().syn().ack(1));
        assert_eq!(got.options.mss, Some(1460));
        assert_eq!(got.options.window_scale, Some(7));
        t.quiet();
    }

    #[test]
    fn a_guest_without_options_gets_none_of_scaling() {
        let mut t = Script::established(Setup {
            shift: None,
            mss: None,
            window: 5000,
            ..Setup::default()
        });
        t.host_writes(&pattern(3000));
        t.guest_sees(seg().data(&pattern(3000)[..536]));
        t.guest_sends(seg().data(b"up"));
        let mut last = t.next_segment().unwrap();
        while let Some(next) = t.next_segment() {
            last = next;
        }
        assert_eq!(last.window, Some(u16::MAX), "a window that is not scaled");
    }

    #[test]
    fn refused_gives_reset() {
        let mut t = Script::new(Setup::default());
        t.guest_sends(seg().syn().no_ack());
        t.host_connects(Err(ErrorKind::ConnectionRefused));
        t.guest_sees(seg().rst().seq(0).ack(1));
        t.quiet();
        assert!(t.flows.is_empty());
    }

    #[test]
    fn refused_at_once_gives_reset_too() {
        let mut t = Script::new(Setup::default());
        t.host.refuse = Some(ErrorKind::ConnectionRefused);
        t.guest_sends(seg().syn().no_ack());
        t.guest_sees(seg().rst().seq(0).ack(1));
        assert!(t.flows.is_empty());
    }

    #[test]
    fn unreachable_is_left_to_icmp_and_time_out_to_silence() {
        for (kind, told) in [
            (ErrorKind::HostUnreachable, Some(Refusal::HostUnreachable)),
            (ErrorKind::NetworkUnreachable, Some(Refusal::NetUnreachable)),
            (ErrorKind::PermissionDenied, Some(Refusal::Prohibited)),
            (ErrorKind::TimedOut, None),
        ] {
            let mut t = Script::new(Setup::default());
            t.guest_sends(seg().syn().no_ack());
            t.host_connects(Err(kind));
            t.quiet();
            let unreachable = t.flows.poll_unreachable();
            assert_eq!(unreachable.map(|it| it.refusal), told, "{kind}");
            assert!(t.flows.is_empty());
        }
    }

    #[test]
    fn a_syn_ack_that_is_lost_is_sent_again_and_given_up_in_the_end() {
        let mut t = Script::new(Setup::default());
        t.guest_sends(seg().syn().no_ack());
        t.host_connects(Ok(()));
        t.guest_sees(seg().syn().ack(1));
        t.after(ms(999)).quiet();
        t.after(ms(1)).guest_sees(seg().syn().ack(1));
        t.guest_sends(seg().syn().no_ack());
        t.guest_sees(seg().syn().ack(1));
        for _ in 0..120 {
            t.after(ms(1000));
        }
        assert!(t.flows.is_empty());
        assert!(t.far().borrow().saw_reset && t.far().borrow().dropped);
    }

    #[test]
    fn a_segment_of_no_connection_is_reset() {
        let mut t = Script::new(Setup::default());
        t.guest_sends(seg().seq(5).ack(77));
        t.guest_sees(seg().no_ack().rst().seq(77).ack(0));
        t.guest_sends(seg().rst());
        t.quiet();
    }

    #[test]
    fn a_full_table_refuses_and_old_flows_work_on() {
        let mut t = Script::established(Setup {
            limits: Limits {
                flows: 1,
                ..Limits::default()
            },
            ..Setup::default()
        });
        let (first, second) = (t.key, SocketAddr::from(([10, 0, 2, 15], 40001)));
        t.key.guest = second;
        t.guest_sends(seg().syn().no_ack());
        let got = t.next_segment().unwrap();
        assert!(got.flags.contains(Flags::RST));
        t.key = first;
        t.host_writes(b"still here");
        t.guest_sees(seg().psh().data(b"still here"));
    }

    #[test]
    fn a_connection_from_the_host_reaches_the_guest() {
        let mut t = Script::new(Setup::default());
        t.key.far = ([192, 0, 2, 9], 5555).into();
        t.host.waiting.push_back(t.key.far);
        let guest = t.key.guest;
        t.flows.accept(0, guest, |peer| peer, &mut t.host, t.now);
        t.pump();
        t.guest_sees(seg().no_ack().syn().ack(0));
        t.guest_sends(seg().syn().ack(1));
        t.guest_sees(seg());
        t.host_writes(b"knock");
        t.guest_sees(seg().psh().data(b"knock"));
        t.guest_sends(seg().ack(6).data(b"who"));
        assert_eq!(t.far().borrow().arrived, b"who");
    }

    #[test]
    fn a_guest_that_refuses_a_forward_resets_the_host() {
        let mut t = Script::new(Setup::default());
        t.host.waiting.push_back(t.key.far);
        let guest = t.key.guest;
        t.flows.accept(0, guest, |peer| peer, &mut t.host, t.now);
        t.pump();
        t.guest_sees(seg().no_ack().syn().ack(0));
        t.guest_sends(seg().rst().seq(0).ack(1));
        assert!(t.far().borrow().saw_reset && t.flows.is_empty());
    }
}

mod download {
    use super::*;

    /// At the bound a flow waits for the guest; looking at it again and again would not help.
    #[test]
    fn a_capped_flow_is_left_alone() {
        on_all_paths(|setup| {
            let mut t = Script::established(Setup {
                limits: Limits {
                    in_flight: 4000,
                    ..Limits::default()
                },
                ..setup
            });
            t.host_writes(&pattern(100_000));
            assert_eq!(t.pump(), Stop::Idle);
            assert!(!t.flows.after_burst());
            assert!(!t.flows.has_work());
            assert!(t.guest_reads_all(1) == pattern(100_000));
        });
    }

    #[test]
    fn bytes_arrive_in_segments_and_stay_until_acknowledged() {
        on_all_paths(|setup| {
            let mut t = Script::established(setup);
            t.host_writes(b"hello");
            t.guest_sees(seg().psh().data(b"hello"));
            t.after(ms(999)).quiet();
            t.after(ms(1)).guest_sees(seg().psh().data(b"hello"));
            t.guest_sends(seg().ack(6));
            t.after(ms(5000)).quiet();
        });
    }

    #[test]
    fn a_large_transfer_is_exact_on_every_path() {
        on_all_paths(|setup| {
            for tso in [Offloads::empty(), Offloads::GUEST_TSO4] {
                let mut t = Script::established(Setup {
                    offloads: setup.offloads | tso,
                    ..setup
                });
                let data = pattern(700_001);
                t.host_writes(&data);
                assert!(t.guest_reads_all(1) == data, "{setup:?}");
            }
        });
    }

    #[test]
    fn segments_keep_to_the_mss_and_to_the_window() {
        let mut t = Script::established(Setup {
            window: 4000,
            shift: Some(0),
            ..Setup::default()
        });
        let data = pattern(6000);
        t.host_writes(&data);
        t.guest_sees(seg().data(&data[..1460]));
        t.guest_sees(seg().seq(1461).data(&data[1460..2920]));
        // 1080 octets of window are left, less than a segment: wait.
        t.quiet();
        t.guest_sends(seg().ack(2921));
        t.guest_sees(seg().seq(2921).data(&data[2920..4380]));
        t.guest_sees(seg().seq(4381).data(&data[4380..5840]));
        // The end of what is queued may be short.
        t.guest_sees(seg().seq(5841).psh().data(&data[5840..]));
    }

    #[test]
    fn with_tso_one_header_carries_whole_segments() {
        let mut t = Script::established(Setup {
            offloads: Offloads::GUEST_CSUM | Offloads::GUEST_TSO4,
            ..Setup::default()
        });
        t.host_writes(&pattern(100_000));
        let first = t.next_segment().unwrap();
        assert_eq!(first.data.len(), 1460 * 44);
        let second = t.next_segment().unwrap();
        assert_eq!(second.data.len(), 100_000 - 1460 * 44);
        assert!(second.flags.contains(Flags::PSH));
    }

    #[test]
    fn three_duplicate_acks_resend_the_front() {
        on_all_paths(|setup| {
            let mut t = Script::established(setup);
            let data = pattern(1460 * 5);
            t.host_writes(&data);
            for i in 0..5u32 {
                t.guest_sees(
                    if i == 4 { seg().psh() } else { seg() }
                        .seq(1 + 1460 * i)
                        .data(&data[1460 * i as usize..][..1460]),
                );
            }
            // The first was lost.
            for _ in 0..2 {
                t.guest_sends(seg());
            }
            t.quiet();
            t.guest_sends(seg());
            t.guest_sees(seg().data(&data[..1460]));
            t.quiet();
            // The third, too: a partial acknowledgment.
            t.guest_sends(seg().ack(1 + 2920));
            t.guest_sees(seg().seq(2921).data(&data[2920..4380]));
            t.guest_sends(seg().ack(1 + 7300));
            t.after(ms(3000)).quiet();
        });
    }

    #[test]
    fn a_time_out_goes_back_and_starts_slowly() {
        let mut t = Script::established(Setup::default());
        let data = pattern(1460 * 30);
        t.host_writes(&data);
        while t.next_segment().is_some() {}
        t.after(ms(1000));
        let mut again = 0;
        while t.next_segment().is_some() {
            again += 1;
        }
        assert_eq!(again, 10);
        assert_eq!(t.flows.counters().timeouts, 1);
        t.guest_sends(seg().ack(1 + 14600));
        let mut more = 0;
        while t.next_segment().is_some() {
            more += 1;
        }
        assert_eq!(more, 20);
    }

    #[test]
    fn a_late_acknowledgment_of_rewound_data_counts() {
        let mut t = Script::established(Setup::default());
        let data = pattern(1460 * 30 + 1);
        t.host_writes(&data);
        while t.next_segment().is_some() {}
        t.after(ms(1000));
        while t.next_segment().is_some() {}
        t.guest_sends(seg().ack(1 + 1460 * 30));
        t.guest_sees(seg().seq(1 + 1460 * 30).psh().data(&data[1460 * 30..]));
        t.quiet();
    }

    #[test]
    fn a_shut_window_is_probed_until_it_opens() {
        let mut t = Script::established(Setup::default());
        t.guest_sends(seg().window(0));
        t.host_writes(b"waiting");
        t.quiet();
        t.after(ms(250)).guest_sees(seg().seq(0));
        t.guest_sends(seg().window(0));
        t.after(ms(499)).quiet();
        t.after(ms(1)).guest_sees(seg().seq(0));
        t.guest_sends(seg().window(0));
        for _ in 0..100 {
            t.after(Duration::from_secs(60));
            while t.next_segment().is_some() {}
            t.guest_sends(seg().window(0));
        }
        t.guest_sends(seg());
        t.guest_sees(seg().psh().data(b"waiting"));
    }

    #[test]
    fn a_window_that_shuts_over_data_in_flight_recovers() {
        let mut t = Script::established(Setup::default());
        t.host_writes(b"dropped");
        t.guest_sees(seg().psh().data(b"dropped"));
        // Short of memory: the guest drops the data and shuts its window.
        t.guest_sends(seg().window(0));
        t.after(ms(1000)).guest_sees(seg().seq(0));
        t.guest_sends(seg());
        t.guest_sees(seg().psh().data(b"dropped"));
    }

    #[test]
    fn a_guest_that_vanishes_is_given_up() {
        let mut t = Script::established(Setup::default());
        t.host_writes(b"anyone?");
        for _ in 0..1000 {
            t.after(Duration::from_secs(1));
        }
        assert!(t.flows.is_empty() && t.far().borrow().saw_reset);
    }

    #[test]
    fn an_idle_connection_is_probed_and_lives_while_answered() {
        let mut t = Script::established(Setup::default());
        for _ in 0..20 {
            t.after(ms(59_000)).quiet();
            t.after(ms(1000)).guest_sees(seg().seq(0));
            t.guest_sends(seg());
        }
        for _ in 0..200 {
            t.after(ms(1000));
        }
        assert!(t.flows.is_empty() && t.far().borrow().saw_reset);
    }

    #[test]
    fn without_descriptors_nothing_is_lost() {
        on_all_paths(|setup| {
            let mut t = Script::established(setup);
            t.ring.credit = 2;
            let data = pattern(1460 * 4);
            t.host_writes(&data);
            assert_eq!(t.pump(), Stop::NoBuffers);
            t.ring.credit = usize::MAX;
            assert_eq!(t.pump(), Stop::Idle);
            assert!(t.guest_reads_all(1) == data);
        });
    }

    #[test]
    fn octets_in_flight_are_bounded_over_all_flows() {
        let mut t = Script::established(Setup {
            limits: Limits {
                in_flight: 10 * 1460,
                ..Limits::default()
            },
            ..Setup::default()
        });
        let data = pattern(1460 * 30);
        t.host_writes(&data);
        let mut count = 0;
        while t.next_segment().is_some() {
            count += 1;
        }
        assert_eq!(count, 10);
        t.guest_sends(seg().ack(1 + 1460 * 10));
        assert!(t.guest_reads_all(1 + 1460 * 10) == data[1460 * 10..]);
    }
}

mod upload {
    use super::*;

    #[test]
    fn a_burst_is_taken_over_and_acknowledged_once() {
        let mut t = Script::established(Setup::default());
        let data = pattern(5000);
        t.guest_sends_all([
            seg().data(&data[..1460]),
            seg().seq(1461).data(&data[1460..2920]),
            seg().seq(2921).psh().data(&data[2920..]),
        ]);
        t.guest_sees(seg().ack(5001));
        t.quiet();
        assert!(t.far().borrow().arrived == data);
    }

    #[test]
    fn overlaps_are_trimmed_and_holes_wait_for_the_guest() {
        let mut t = Script::established(Setup::default());
        t.guest_sends(seg().seq(4).data(b"def"));
        t.guest_sees(seg());
        t.guest_sends(seg().data(b"abc"));
        t.guest_sees(seg().ack(4));
        t.guest_sends(seg().seq(2).data(b"bcdef"));
        t.guest_sees(seg().ack(7));
        t.guest_sends(seg().seq(1).data(b"abc"));
        t.guest_sees(seg().ack(7));
        assert_eq!(t.far().borrow().arrived, b"abcdef");
    }

    #[test]
    fn each_segment_behind_a_hole_is_answered_until_it_is_filled() {
        let mut t = Script::established(Setup::default());
        let data = pattern(5 * 1000);
        let part = |n: u32| {
            let at = 1000 * n as usize;
            seg().seq(1 + 1000 * n).data(&data[at..at + 1000])
        };
        // One for what was taken, and the three that fast retransmit counts.
        t.guest_sends_all([part(0), part(2), part(3), part(4)]);
        for _ in 0..4 {
            t.guest_sees(seg().ack(1001));
        }
        t.quiet();
        t.guest_sends_all([part(3), part(1)]);
        t.guest_sees(seg().ack(2001));
        t.quiet();
        t.guest_sends_all([part(2), part(3), part(4)]);
        t.guest_sees(seg().ack(5001));
        t.quiet();
        assert!(t.far().borrow().arrived == data);
    }

    #[test]
    fn a_full_socket_shuts_the_window_and_opens_it_again() {
        let mut t = Script::established(Setup::default());
        t.far().borrow_mut().room = 100_000;
        let data = pattern(3 << 20);
        let mut sent = 0;
        let mut edge = 65535;
        loop {
            while let Some(got) = t.next_segment() {
                let right = got.ack - 1 + (u32::from(got.window.unwrap()) << 7);
                assert!(right + 128 > edge, "the right edge moved back");
                edge = right.max(edge);
            }
            let n = (edge as usize - sent).min(60_000);
            if n == 0 {
                break;
            }
            let seq = 1 + u32::try_from(sent).unwrap();
            t.guest_sends(seg().seq(seq).data(&data[sent..sent + n]));
            sent += n;
        }
        assert_eq!(t.far().borrow().arrived.len(), 100_000);
        assert!(sent - 100_000 <= WINDOW as usize, "the tail is bounded");
        // A probe of the shut window is answered.
        let seq = 1 + u32::try_from(sent).unwrap();
        t.guest_sends(seg().seq(seq).data(b"?"));
        t.guest_sees(seg().ack(seq).window(0));
        // The socket drains: the guest hears of it without asking.
        t.host_room(usize::MAX);
        let update = t.guest_sees(seg().ack(seq));
        assert_eq!(u32::from(update.window.unwrap()) << 7, WINDOW);
        assert!(t.far().borrow().arrived[..] == data[..sent]);
    }

    #[test]
    fn the_end_of_the_guests_stream_waits_for_the_tail() {
        let mut t = Script::established(Setup::default());
        t.far().borrow_mut().room = 3;
        t.guest_sends(seg().fin().data(b"abcdef"));
        t.guest_sees(seg().ack(8));
        assert!(!t.far().borrow().saw_fin);
        t.host_room(usize::MAX);
        assert!(t.far().borrow().saw_fin);
        assert_eq!(t.far().borrow().arrived, b"abcdef");
    }
}

mod closing {
    use super::*;

    #[test]
    fn the_host_closes_first_and_the_guest_goes_on() {
        on_all_paths(|setup| {
            let mut t = Script::established(setup);
            t.host_writes(b"bye");
            t.guest_sees(seg().psh().data(b"bye"));
            t.host_closes();
            t.guest_sees(seg().fin().seq(4));
            t.guest_sends(seg().ack(5));
            t.guest_sends(seg().ack(5).data(b"wait"));
            t.guest_sees(seg().seq(5).ack(5));
            assert_eq!(t.far().borrow().arrived, b"wait");
            assert!(!t.far().borrow().saw_fin);
            t.guest_sends(seg().seq(5).ack(5).fin());
            t.guest_sees(seg().seq(5).ack(6));
            assert!(t.far().borrow().saw_fin);
            // TIME-WAIT repeats the last ACK, then the flow is gone.
            t.guest_sends(seg().seq(5).ack(5).fin());
            t.guest_sees(seg().seq(5).ack(6));
            t.after(ms(2000)).quiet();
            assert!(t.flows.is_empty() && t.far().borrow().dropped);
            assert!(!t.far().borrow().saw_reset);
        });
    }

    #[test]
    fn the_guest_closes_first_and_the_host_goes_on() {
        on_all_paths(|setup| {
            let mut t = Script::established(setup);
            t.guest_sends(seg().fin());
            t.guest_sees(seg().ack(2));
            assert!(t.far().borrow().saw_fin);
            t.host_writes(b"answer");
            t.guest_sees(seg().ack(2).psh().data(b"answer"));
            t.guest_sends(seg().seq(2).ack(7));
            t.host_closes();
            t.guest_sees(seg().fin().seq(7).ack(2));
            t.guest_sends(seg().seq(2).ack(8));
            t.quiet();
            assert!(t.flows.is_empty() && !t.far().borrow().saw_reset);
        });
    }

    #[test]
    fn fin_follows_the_last_byte_and_is_repeated() {
        let mut t = Script::established(Setup {
            window: 2000,
            shift: Some(0),
            ..Setup::default()
        });
        let data = pattern(2500);
        t.host_writes(&data);
        t.host_closes();
        t.guest_sees(seg().data(&data[..1460]));
        t.quiet();
        t.guest_sends(seg().ack(1461));
        t.guest_sees(seg().seq(1461).psh().data(&data[1460..]));
        t.guest_sees(seg().seq(2501).fin());
        // Both lost.
        t.after(ms(1000));
        t.guest_sees(seg().seq(1461).psh().data(&data[1460..]));
        t.guest_sees(seg().seq(2501).fin());
        // Only FIN lost.
        t.guest_sends(seg().ack(2501));
        t.after(ms(2000)).guest_sees(seg().seq(2501).fin());
        t.guest_sends(seg().ack(2502));
        t.after(ms(10_000)).quiet();
    }

    #[test]
    fn resets_pass_both_ways() {
        let mut t = Script::established(Setup::default());
        t.host_breaks(ErrorKind::ConnectionReset);
        t.guest_sees(seg().rst());
        assert!(t.flows.is_empty());

        let mut t = Script::established(Setup::default());
        t.guest_sends(seg().rst());
        t.quiet();
        assert!(t.flows.is_empty() && t.far().borrow().saw_reset);
    }

    #[test]
    fn a_blind_reset_or_syn_is_challenged() {
        let mut t = Script::established(Setup::default());
        t.guest_sends(seg().rst().seq(100));
        t.guest_sees(seg());
        t.guest_sends(seg().rst().seq(WINDOW * 2));
        t.quiet();
        t.guest_sends(seg().no_ack().syn());
        t.guest_sees(seg());
        assert_eq!(t.flows.len(), 1);
    }

    #[test]
    fn a_new_syn_takes_over_a_finished_pair() {
        let mut t = Script::established(Setup::default());
        t.host_closes();
        t.guest_sees(seg().fin());
        t.guest_sends(seg().ack(2).fin());
        t.guest_sees(seg().seq(2).ack(2));
        t.new_guest_iss(777);
        t.guest_sends(seg().no_ack().syn());
        t.host_connects(Ok(()));
        t.guest_sees(seg().syn().ack(1));
        assert_eq!(t.host.opened.len(), 2);
    }

    #[test]
    fn an_acknowledgment_of_what_was_never_sent_is_answered_and_ignored() {
        let mut t = Script::established(Setup::default());
        t.guest_sends(seg().ack(1000));
        t.guest_sees(seg());
        t.host_writes(b"x");
        t.guest_sees(seg().psh().data(b"x"));
    }

    #[test]
    fn the_end_of_the_machine_resets_far_ends() {
        let mut t = Script::established(Setup::default());
        t.flows.abort_all();
        assert!(t.far().borrow().saw_reset && t.far().borrow().dropped);
    }
}

/// Found in review; each was wrong once.
mod regressions {
    use super::*;
    use crate::tcp::flows::Readiness;

    #[test]
    fn a_tail_outlives_a_connection_that_both_sides_closed() {
        // The guest closes last.
        let mut t = Script::established(Setup::default());
        t.far().borrow_mut().room = 3;
        t.guest_sends(seg().fin().data(b"abcdef"));
        t.guest_sees(seg().ack(8));
        t.host_closes();
        t.guest_sees(seg().seq(1).ack(8).fin());
        t.guest_sends(seg().seq(8).ack(2));
        assert!(!t.far().borrow().dropped);
        t.guest_sends(seg().no_ack().syn());
        t.quiet();
        t.host_room(usize::MAX);
        assert_eq!(t.far().borrow().arrived, b"abcdef");
        assert!(t.far().borrow().saw_fin && t.far().borrow().dropped);
        assert!(t.flows.is_empty());

        // The host closes first, and TIME-WAIT is over before the tail is.
        let mut t = Script::established(Setup::default());
        t.host_closes();
        t.guest_sees(seg().fin());
        t.far().borrow_mut().room = 3;
        t.guest_sends(seg().ack(2).fin().data(b"abcdef"));
        t.guest_sees(seg().seq(2).ack(8));
        t.after(ms(10_000)).quiet();
        t.host_room(usize::MAX);
        assert_eq!(t.far().borrow().arrived, b"abcdef");
        assert!(t.far().borrow().saw_fin && !t.far().borrow().saw_reset);
        assert!(t.flows.is_empty());
    }

    #[test]
    fn a_far_end_that_never_reads_is_given_up_after_the_guest_has_closed() {
        let mut t = Script::established(Setup::default());
        t.far().borrow_mut().room = 0;
        t.guest_sends(seg().fin().data(b"abcdef"));
        t.guest_sees(seg().ack(8));
        t.host_closes();
        t.guest_sees(seg().seq(1).ack(8).fin());
        t.guest_sends(seg().seq(8).ack(2));
        t.after(ms(119_000));
        assert_eq!(t.flows.len(), 1);
        t.after(ms(1000));
        assert!(t.flows.is_empty() && t.far().borrow().saw_reset);
    }

    #[test]
    fn tails_are_bounded_over_all_flows() {
        let mut t = Script::established(Setup {
            limits: Limits {
                tails: 1000,
                ..Limits::default()
            },
            ..Setup::default()
        });
        t.far().borrow_mut().room = 0;
        t.guest_sends(seg().data(pattern(1200)));
        t.guest_sees(seg().ack(1201));
        t.guest_sends(seg().seq(1201).fin().data(b"more"));
        t.quiet();
        t.host_room(usize::MAX);
        t.guest_sends(seg().seq(1201).fin().data(b"more"));
        t.guest_sees(seg().ack(1206));
        assert_eq!(t.far().borrow().arrived.len(), 1204);
        assert!(t.far().borrow().saw_fin);
    }

    #[test]
    fn a_pause_does_not_end_idle_connections() {
        let mut t = Script::established(Setup::default());
        t.after(Duration::from_secs(200)).guest_sees(seg().seq(0));
        t.guest_sends(seg());
        t.after(ms(59_000)).quiet();
        assert_eq!(t.flows.len(), 1);
    }

    #[test]
    fn a_fast_retransmit_is_not_held_back_by_the_common_bound() {
        let mut t = Script::established(Setup {
            limits: Limits {
                in_flight: 4 * 1460,
                ..Limits::default()
            },
            ..Setup::default()
        });
        let data = pattern(1460 * 8);
        t.host_writes(&data);
        while t.next_segment().is_some() {}
        for _ in 0..3 {
            t.guest_sends(seg());
        }
        t.guest_sees(seg().data(&data[..1460]));
    }

    #[test]
    fn duplicate_acks_of_a_shut_window_send_nothing() {
        let mut t = Script::established(Setup::default());
        t.host_writes(&pattern(3000));
        while t.next_segment().is_some() {}
        for _ in 0..6 {
            t.guest_sends(seg().window(0));
        }
        t.quiet();
    }

    #[test]
    fn a_reset_behind_the_hosts_end_of_stream_reaches_the_guest() {
        let mut t = Script::established(Setup::default());
        t.host_closes();
        t.guest_sees(seg().fin());
        t.guest_sends(seg().ack(2).data(b"too late"));
        t.guest_sees(seg().seq(2).ack(9));
        t.event(Readiness {
            readable: true,
            writable: true,
            read_closed: true,
            urgent: false,
            failed: true,
        });
        t.guest_sees(seg().seq(2).ack(9).rst());
        assert!(t.flows.is_empty());
    }

    #[test]
    fn callers_that_found_the_table_full_are_taken_later() {
        let mut t = Script::established(Setup {
            limits: Limits {
                flows: 1,
                ..Limits::default()
            },
            ..Setup::default()
        });
        t.host.waiting.push_back(([192, 0, 2, 9], 5555).into());
        let guest = t.key.guest;
        assert!(!t.flows.accept(0, guest, |peer| peer, &mut t.host, t.now));
        t.guest_sends(seg().rst());
        t.flows.accept(0, guest, |peer| peer, &mut t.host, t.now);
        assert_eq!(t.flows.len(), 1);
    }

    #[test]
    fn timers_do_not_pile_up() {
        let mut t = Script::established(Setup::default());
        for i in 0..600u32 {
            t.host_writes(b"x");
            t.after(ms(100));
            while t.next_segment().is_some() {}
            t.guest_sends(seg().ack(2 + i));
        }
        assert!(t.flows.timer_entries() <= 80);
    }
}
