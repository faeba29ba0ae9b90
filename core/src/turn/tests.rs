//! Turns over queues: which ports are read and fed, how much, and in which order.

use std::collections::VecDeque;

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::common::setup::Setup;
use crate::drops::DropReason;
use crate::engine::EngineConfig;
use crate::port::{GuestConfig, Vlans};
use crate::store::arena::Arena;
use crate::time::Duration;

const NOW: Instant = Instant::from_secs(1000);
const A: [u8; 6] = [2, 0, 0, 0, 0, 0xa];
const B: [u8; 6] = [2, 0, 0, 0, 0, 0xb];
const EVERYBODY: [u8; 6] = [0xff; 6];
/// A station of which nobody has heard.
const UNKNOWN: [u8; 6] = [0x52, 0, 0, 0, 0, 9];

/// One port: what its peer has sent and not been read, and what it got.
#[derive(Debug, Default)]
struct Queue {
    sent: VecDeque<(VirtioNetHdr, Vec<u8>)>,
    got: Vec<Vec<u8>>,
    /// Frames it takes; `None`: any number.
    slots: Option<usize>,
    /// It takes so many more as soon as it is asked to tell when it does.
    slots_when_asked: usize,
    waits_for_room: bool,
    waits_for_frames: bool,
    /// It has shown life since it was last asked.
    moved: bool,
    /// It has yet to see some of what it got.
    lags: bool,
    flushed: usize,
    /// It makes copies of so many bytes of each frame.
    copied: u32,
    asked_for_frames: usize,
    looked_at: usize,
    gone: bool,
    /// It is read no further in this turn, and takes nothing.
    spent: bool,
}

#[derive(Debug, Default)]
struct Queues {
    list: Vec<Queue>,
    /// Frames that were changed on the way out.
    adapted: usize,
    steps: Vec<Step>,
    /// The turn ends with this step.
    last: Option<Step>,
}

impl Queues {
    fn of(&mut self, port: PortId) -> &mut Queue {
        &mut self.list[usize::from(port.0)]
    }
}

impl Ports for Queues {
    fn receive(&mut self, port: PortId, buf: &mut [u8]) -> Received {
        let queue = self.of(port);
        queue.looked_at += 1;
        queue.waits_for_frames = false;
        if queue.gone {
            return Received::Gone;
        }
        if queue.spent {
            return Received::Spent;
        }
        let Some((hdr, frame)) = queue.sent.pop_front() else { return Received::Empty };
        let len = frame.len().min(buf.len());
        buf[..len].copy_from_slice(&frame[..len]);
        Received::Frame(hdr, len)
    }

    fn send(&mut self, port: PortId, _: &VirtioNetHdr, parts: &[&[u8]], _waited: bool) -> Sent {
        let queue = self.of(port);
        if queue.slots == Some(0) || queue.spent {
            return Sent::Full;
        }
        queue.slots = queue.slots.map(|n| n - 1);
        queue.got.push(parts.concat());
        if queue.copied > 0 { Sent::Copied(queue.copied) } else { Sent::Done }
    }

    fn room(&mut self, port: PortId, want: usize) -> usize {
        if self.of(port).slots == Some(0) { 0 } else { want }
    }

    fn has_spent(&mut self, port: PortId) -> bool {
        self.of(port).spent
    }

    fn progress(&mut self, port: PortId) -> Option<bool> {
        let queue = self.of(port);
        queue.looked_at += 1;
        std::mem::take(&mut queue.moved).then_some(!queue.lags)
    }

    fn wait_for_frames(&mut self, port: PortId) -> bool {
        let queue = self.of(port);
        queue.asked_for_frames += 1;
        queue.waits_for_frames = true;
        !queue.sent.is_empty()
    }

    fn wait_for_room(&mut self, port: PortId, waits: bool) {
        let queue = self.of(port);
        queue.waits_for_room = waits;
        if waits && queue.slots_when_asked > 0 {
            queue.slots = queue.slots.map(|n| n + queue.slots_when_asked);
            queue.slots_when_asked = 0;
        }
    }

    fn flush(&mut self, port: PortId) {
        self.of(port).flushed += 1;
        self.of(port).looked_at += 1;
    }

    fn before_adapting(&mut self, _: PortId, _: &VirtioNetHdr, _: &[&[u8]]) {
        self.adapted += 1;
    }

    fn after_step(&mut self, _: &Engine<'_>, step: Step) -> Result<(), Interrupted> {
        self.steps.push(step);
        if self.last == Some(step) { Err(Interrupted) } else { Ok(()) }
    }
}

/// A worker: an uplink, which is port 0, and guests, all with their drivers there.
struct Worker<'m> {
    engine: Engine<'m>,
    turn: Turn,
    ports: Queues,
}

const UPLINK: PortId = PortId(0);
const G1: PortId = PortId(1);
const G2: PortId = PortId(2);

fn with_worker(config: TurnConfig, guests: u16, test: impl FnOnce(&mut Worker<'_>)) {
    let mut memory = vec![0_u64; Arena::layout_len(1, 8) / 8];
    let arena = Arena::format(zerocopy::IntoBytes::as_mut_bytes(&mut memory[..]), 1, 8, 1).unwrap();
    let engine_config = EngineConfig::new(1, [1, 2, 3, 4]);
    let engine = Engine::new(NOW, engine_config, arena);
    let mut w = Worker { engine, turn: Turn::new(config), ports: Queues::default() };
    w.add(PortConfig::uplink("uplink"));
    for n in 0..guests {
        w.add(PortConfig::guest(format!("guest{n}"), GuestConfig::default()));
    }
    test(&mut w);
}

impl Worker<'_> {
    fn add(&mut self, config: PortConfig) {
        let port = self.turn.add_port(NOW, &mut self.engine, config).unwrap();
        self.turn.set_features(NOW, &mut self.engine, port, Some(PortFeatures::ALL));
        self.ports.list.push(Queue::default());
    }

    /// A frame waits to be read at `port`, which wakes the worker.
    fn sends(&mut self, port: PortId, frame: Vec<u8>) {
        self.ports.of(port).sent.push_back((VirtioNetHdr::default(), frame));
        self.turn.wake(port);
    }

    fn turn(&mut self) -> u64 {
        self.turn.run(NOW, &mut self.engine, &mut self.ports).unwrap()
    }

    /// Frames that a port got since the last call, by the numbers in them.
    fn got(&mut self, port: PortId) -> Vec<u16> {
        self.ports.of(port).got.drain(..).map(|f| u16::from_be_bytes([f[14], f[15]])).collect()
    }

    fn drops(&self, port: PortId, reason: DropReason) -> u64 {
        self.turn.stats(port).drops(reason)
    }
}

/// A frame of 60 bytes that is nothing but Ethernet, with a number in it.
fn frame(dst: [u8; 6], src: [u8; 6], n: u16) -> Vec<u8> {
    let mut frame = [dst, src].concat();
    frame.extend([0x88, 0xb5]); // "local experimental" (IEEE 802)
    frame.extend(n.to_be_bytes());
    frame.resize(60, 0);
    frame
}

#[test]
fn every_port_has_its_turn_and_a_busy_one_goes_on_in_the_next() {
    for flows_in_cache in [0, 1] {
        // A batch of all frames, or one for each.
        let config = TurnConfig { frames_per_port: 4, flows_in_cache, ..TurnConfig::default() };
        with_worker(config, 2, |w| {
            for n in 0..6 {
                w.sends(G1, frame(EVERYBODY, A, n));
            }
            w.sends(G2, frame(EVERYBODY, B, 100));
            assert_eq!(w.turn(), 5);
            assert_eq!(w.got(UPLINK), [0, 1, 2, 3, 100]);
            assert!(w.turn.rest(&mut w.ports), "there is more, so the worker must not wait");
            assert_eq!(w.turn(), 2);
            assert_eq!(w.got(UPLINK), [4, 5]);
            assert_eq!(w.got(G2), [0, 1, 2, 3, 4, 5]);
            assert!(!w.turn.rest(&mut w.ports));
        });
    }
}

#[test]
fn a_port_with_large_frames_is_read_by_their_bytes() {
    with_worker(TurnConfig::default(), 1, |w| {
        for n in 0..5 {
            w.sends(UPLINK, [frame(UNKNOWN, A, n), vec![0; 60_000]].concat());
        }
        w.turn();
        assert_eq!(w.got(G1), [0, 1, 2], "128 KiB, and the frame that is more");
        w.turn();
        assert_eq!(w.got(G1), [3, 4]);
    });
}

/// Has `beat` said to guest 1, `ms` after the beginning; how many heartbeats it has got since.
fn beats(w: &mut Worker<'_>, ms: u64, controls: bool) -> usize {
    let now = NOW + Duration::from_millis(ms);
    let beat = Heartbeat { controls, epoch: core::num::NonZeroU64::new(7).unwrap() };
    w.turn.send_heartbeats(now, &mut w.engine, &mut w.ports, &[(G1, beat)]);
    w.turn.run(now, &mut w.engine, &mut w.ports).unwrap();
    let got = std::mem::take(&mut w.ports.of(G1).got);
    got.iter().filter(|frame| Heartbeat::parse(frame) == Some(beat)).count()
}

#[test]
fn flood_28_a_guest_off_its_core_gets_one_heartbeat_and_no_more_until_it_runs() {
    with_worker(TurnConfig::default(), 2, |w| {
        assert_eq!(beats(w, 0, true), 1);
        assert_eq!(w.ports.of(G1).flushed, 1, "and is shown it");
        assert_eq!(beats(w, 500, true), 0);
        assert_eq!(beats(w, 1000, true), 0);
        w.ports.of(G1).moved = true;
        assert_eq!(beats(w, 1500, true), 1);
        assert_eq!(beats(w, 2000, true), 0);
        w.turn.handle_kick(NOW, &mut w.engine, G1); // it sends, so it runs
        assert_eq!(beats(w, 2500, true), 1);
        assert_eq!(beats(w, 2600, false), 1, "what is new is said at once");
        assert_eq!(beats(w, 3000, false), 0);
        assert!(w.got(UPLINK).is_empty() && w.got(G2).is_empty());
    });
}

#[test]
fn flood_28_a_heartbeat_waits_for_a_full_ring_and_none_for_a_link_that_is_down() {
    with_worker(TurnConfig::default(), 1, |w| {
        w.ports.of(G1).slots = Some(0);
        assert_eq!(beats(w, 0, true), 0);
        assert_eq!(w.turn.backlog_bytes(G1), 60);
        assert_eq!(beats(w, 500, true), 0);
        assert_eq!(w.turn.backlog_bytes(G1), 60);
        w.turn.set_features(NOW, &mut w.engine, G1, None);
        assert_eq!(beats(w, 1000, true), 0);
        w.ports.of(G1).slots = None;
        w.turn.set_features(NOW, &mut w.engine, G1, Some(PortFeatures::ALL));
        assert_eq!(beats(w, 1500, true), 1, "the new ring has not had it");
    });
}

#[test]
fn what_a_guest_did_before_it_was_given_something_is_no_sign_of_life() {
    with_worker(TurnConfig::default(), 1, |w| {
        w.turn();
        w.ports.of(G1).moved = true;
        w.sends(UPLINK, frame(EVERYBODY, A, 1));
        w.turn();
        let mut is_alive = |ms| {
            let now = NOW + Duration::from_millis(ms);
            w.turn.run(now, &mut w.engine, &mut w.ports).unwrap();
            w.ports.of(G1).moved = true;
            w.engine.vm(G1).unwrap().clock.alive_within(now, Duration::from_secs(1))
        };
        assert!(!is_alive(5000), "it was given a frame and has not moved");
        assert!(is_alive(6000), "now it has");
    });
}

#[test]
fn what_waits_outside_the_ring_has_not_been_seen() {
    with_worker(TurnConfig::default(), 1, |w| {
        w.ports.of(G1).slots = Some(1);
        w.sends(UPLINK, frame(EVERYBODY, A, 1));
        w.sends(UPLINK, frame(EVERYBODY, A, 2));
        w.turn();
        w.ports.of(G1).moved = true; // it has seen the first
        w.turn.run(NOW + Duration::from_secs(5), &mut w.engine, &mut w.ports).unwrap();
        let (later, second) = (NOW + Duration::from_secs(60), Duration::from_secs(1));
        assert!(!w.engine.vm(G1).unwrap().clock.alive_within(later, second));
    });
}

#[test]
fn a_guest_that_has_seen_a_part_is_looked_at_again() {
    with_worker(TurnConfig::default(), 1, |w| {
        w.sends(UPLINK, frame(EVERYBODY, A, 1));
        w.turn();
        for (ms, lags) in [(5, true), (10, false)] {
            (w.ports.of(G1).moved, w.ports.of(G1).lags) = (true, lags);
            let now = NOW + Duration::from_millis(ms);
            w.turn.run(now, &mut w.engine, &mut w.ports).unwrap();
        }
        let (later, second) = (NOW + Duration::from_secs(60), Duration::from_secs(1));
        assert!(w.engine.vm(G1).unwrap().clock.alive_within(later, second), "it has seen all");
    });
}

#[test]
fn who_wakes_last_is_read_first_if_its_number_is_lower() {
    with_worker(TurnConfig::default(), 2, |w| {
        w.turn();
        assert!(!w.turn.rest(&mut w.ports));
        w.sends(G2, frame(EVERYBODY, B, 2));
        w.sends(UPLINK, frame(EVERYBODY, [2, 0, 0, 0, 0, 0xc], 0));
        w.turn();
        assert_eq!(w.got(G1), [0, 2], "captures of one turn are read in this order");
    });
}

#[test]
fn a_port_that_has_had_its_share_goes_on_in_the_next_turn() {
    with_worker(TurnConfig::default(), 2, |w| {
        w.ports.of(G1).spent = true;
        w.sends(G1, frame(EVERYBODY, A, 1));
        w.sends(UPLINK, frame(EVERYBODY, B, 2));
        w.turn();
        assert_eq!((w.got(G1), w.got(G2)), (vec![], vec![2]), "nothing out of it, nothing in");
        assert!(!w.ports.of(G1).waits_for_room, "it has room");
        assert!(w.turn.rest(&mut w.ports), "there is something to do");
        w.ports.of(G1).spent = false;
        w.turn();
        assert_eq!((w.got(G1), w.got(G2)), (vec![2], vec![1]));
        assert!(!w.turn.rest(&mut w.ports));
    });
}

#[test]
fn a_guest_that_broadcasts_all_the_time_is_heard_now_and_then() {
    with_worker(TurnConfig::default(), 2, |w| {
        (0..2000).for_each(|n| w.sends(G1, frame(EVERYBODY, A, n)));
        w.sends(G2, frame(EVERYBODY, B, 5000));
        for _ in 0..40 {
            w.turn();
        }
        assert_eq!(w.got(G2).len(), 1000);
        assert_eq!(w.engine.drops(G1).unwrap()[DropReason::Storm as usize], 1000);
        assert!(w.got(G1) == [5000], "the other one's");
    });
}

/// A broadcast of 9,000 bytes, with a number in it.
fn long_broadcast(src: [u8; 6], n: u16) -> Vec<u8> {
    let mut long = frame(EVERYBODY, src, n);
    long.resize(9000, 0);
    long
}

#[test]
fn broadcasts_for_many_take_the_turns_that_their_copies_take() {
    with_worker(TurnConfig::default(), 100, |w| {
        let (uplink, bad, good) = (PortId(0), PortId(1), PortId(2));
        (0..10).for_each(|n| w.sends(bad, long_broadcast(A, n)));
        // Two frames become 200 copies, almost two megabytes: they are the share of two turns.
        for turn in 0..10 {
            w.sends(good, frame(UNKNOWN, B, 1000 + turn));
            w.turn();
            let got = w.got(uplink);
            assert_eq!(got.last(), Some(&(1000 + turn)), "the innocent's");
            assert_eq!(got.len(), if turn % 2 == 0 { 3 } else { 1 }, "turn {turn}");
        }
        let got: Vec<_> = w.got(PortId(100)).into_iter().filter(|n| *n < 1000).collect();
        assert_eq!(got, (0..10).collect::<Vec<_>>());
    });
}

#[test]
fn a_broadcast_longer_than_any_is_dropped() {
    with_worker(TurnConfig::default(), 2, |w| {
        let mut frame = frame(EVERYBODY, A, 1);
        frame.resize(crate::limits::GROUP_BYTES_MAX + 1, 0);
        w.sends(PortId(1), frame.clone());
        frame.truncate(crate::limits::GROUP_BYTES_MAX);
        frame[15] = 2;
        w.sends(PortId(1), frame);
        w.turn();
        assert_eq!(w.got(PortId(2)), [2]);
    });
}

#[test]
fn all_that_waits_for_full_rings_is_bounded_and_shared() {
    const GUESTS: u16 = 30;
    with_worker(TurnConfig::default(), GUESTS, |w| {
        let guests = || (1..=GUESTS).map(PortId);
        guests().for_each(|port| w.ports.of(port).slots = Some(0));
        let waits = |w: &mut Worker<'_>, n| {
            w.sends(PortId(0), long_broadcast(A, n));
            w.turn();
            guests().map(|port| w.turn.backlog_bytes(port)).collect::<Vec<_>>()
        };
        let waiting = (0..300).map(|n| waits(w, n)).last().unwrap();
        let sum: usize = waiting.iter().sum();
        let max = crate::limits::BACKLOGS_BYTES_MAX;
        assert!((max - max / 16..=max).contains(&sum), "{sum} of {max}");
        let (least, most) = (waiting.iter().min().unwrap(), waiting.iter().max().unwrap());
        assert!(most - least <= 9000, "{least} to {most}");
        // Memory that one gives back is there for the others.
        w.turn.set_features(NOW, &mut w.engine, PortId(1), None);
        let now = (300..310).map(|n| waits(w, n)).last().unwrap();
        assert!(now[0] == 0 && now[1] > waiting[1]);
    });
}

#[test]
fn what_is_for_an_unknown_station_goes_where_one_may_be() {
    with_worker(TurnConfig::default(), 3, |w| {
        w.sends(PortId(1), frame(EVERYBODY, A, 1));
        w.turn();
        (0..4).for_each(|port| drop(w.got(PortId(port))));
        w.sends(PortId(0), frame(UNKNOWN, [0x52, 0, 0, 0, 0, 1], 2));
        w.turn();
        assert_eq!(w.got(PortId(1)), [], "its guest's MAC is another");
        assert_eq!((w.got(PortId(2)), w.got(PortId(3))), (vec![2], vec![2]), "they said nothing");
        w.sends(PortId(2), frame(UNKNOWN, B, 3));
        w.turn();
        assert_eq!((w.got(PortId(0)), w.got(PortId(1))), (vec![3], vec![]));
        assert_eq!(w.got(PortId(3)), [3]);
    });
}

#[test]
fn what_an_isolated_guest_says_to_all_goes_to_uplinks_and_what_others_say_does_not_reach_it() {
    with_worker(TurnConfig::default(), 0, |w| {
        w.add(PortConfig::uplink("second"));
        for (name, isolated) in [("alone", true), ("one", false), ("two", false)] {
            let config = GuestConfig { isolated, ..GuestConfig::default() };
            w.add(PortConfig::guest(name, config));
        }
        let got = |w: &mut Worker<'_>| [0, 1, 2, 3, 4].map(|port| !w.got(PortId(port)).is_empty());
        for (to, from, expected) in [
            (EVERYBODY, 2, [true, true, false, false, false]),
            (UNKNOWN, 2, [true, true, false, false, false]),
            (EVERYBODY, 3, [true, true, false, false, true]),
            (UNKNOWN, 3, [true, true, false, false, true]),
            (EVERYBODY, 0, [false, true, true, true, true]),
        ] {
            w.sends(PortId(from), frame(to, [2, 0, 0, 0, 0, from.to_be_bytes()[1]], 1));
            w.turn();
            assert_eq!(got(w), expected, "from port {from} to {to:?}");
        }
    });
}

#[test]
fn a_frame_stays_in_its_network_whoever_it_is_for() {
    with_worker(TurnConfig::default(), 0, |w| {
        let guest = |name| PortConfig::guest(name, GuestConfig::default());
        w.add(PortConfig::uplink("red").in_network("red"));
        w.add(guest("red-1").in_network("red"));
        w.add(guest("red-2").in_network("red"));
        w.add(guest("nameless"));
        let got = |w: &mut Worker<'_>| [0, 1, 2, 3, 4].map(|port| !w.got(PortId(port)).is_empty());
        let mac = |last| [2, 0, 0, 0, 0, last];
        for (to, from, src, expected) in [
            (EVERYBODY, 2, mac(2), [false, true, false, true, false]),
            (UNKNOWN, 3, mac(3), [false, true, false, false, false]),
            (EVERYBODY, 0, mac(9), [false, false, false, false, true]),
            (mac(2), 3, mac(3), [false, false, true, false, false]),
            (mac(2), 0, mac(9), [false, false, false, false, true]), // nobody has it there
            (mac(9), 2, mac(2), [false, true, false, false, false]), // nor has it been heard here
            (mac(2), 1, mac(9), [false, false, true, false, false]),
            (mac(9), 3, mac(3), [false, true, false, false, false]),
            (mac(3), 4, mac(2), [true, false, false, false, false]), // both MACs are in use there
        ] {
            w.sends(PortId(from), frame(to, src, 1));
            w.turn();
            assert_eq!(got(w), expected, "from port {from} to {to:?}");
        }
    });
}

#[test]
fn what_a_port_makes_of_a_frame_costs_who_sent_that() {
    let read_in_a_turn = |to, copied| {
        let mut read = 0;
        with_worker(TurnConfig::default(), 1, |w| {
            w.sends(UPLINK, frame(A, B, 0)); // B is behind the uplink
            w.turn();
            w.ports.of(UPLINK).copied = copied;
            (0..60).for_each(|n| w.sends(G1, frame(to, A, n)));
            w.turn();
            read = w.got(UPLINK).len();
        });
        read
    };
    for to in [EVERYBODY, UNKNOWN, B] {
        assert_eq!(read_in_a_turn(to, 0), 60);
        // A mebibyte a turn, of copies of 64 KB for somebody known, or for many.
        let read = read_in_a_turn(to, 64 << 10);
        assert!((16..=17).contains(&read), "{read} frames to {to:?}");
    }
}

#[test]
fn what_finds_a_full_ring_waits_its_turn_and_is_bounded() {
    let config = TurnConfig { backlog_frames_max: 3, ..TurnConfig::default() };
    with_worker(config, 1, |w| {
        w.ports.of(G1).slots = Some(2);
        for n in 0..7 {
            w.sends(UPLINK, frame(EVERYBODY, A, n));
        }
        w.turn();
        assert_eq!(w.got(G1), [0, 1]);
        assert_eq!(w.turn.backlog_bytes(G1), 3 * 60);
        assert_eq!(w.drops(G1, DropReason::QueueFull), 2);
        assert!(w.ports.of(G1).waits_for_room, "the guest is asked to say when it has room");
        w.ports.of(G1).slots = Some(1);
        w.turn.wake(G1);
        w.turn();
        assert_eq!(w.got(G1), [2]);
        w.ports.of(G1).slots = Some(9);
        w.sends(UPLINK, frame(EVERYBODY, A, 7));
        w.turn();
        assert_eq!(w.got(G1), [3, 4, 7], "nothing overtakes");
        assert!(!w.ports.of(G1).waits_for_room);
        let stats = w.turn.stats(G1);
        assert_eq!((stats.frames_to_port, stats.bytes_to_port), (6, 6 * 60));
    });
}

#[test]
fn room_that_appears_while_it_is_asked_for_is_found() {
    with_worker(TurnConfig::default(), 1, |w| {
        *w.ports.of(G1) = Queue { slots: Some(0), slots_when_asked: 1, ..Queue::default() };
        w.sends(UPLINK, frame(EVERYBODY, A, 1));
        w.sends(UPLINK, frame(EVERYBODY, A, 2));
        w.turn();
        assert_eq!(w.got(G1), [1]);
        assert!(w.ports.of(G1).waits_for_room, "and asked for again, for the other frame");
    });
}

#[test]
fn a_link_that_goes_down_loses_what_waits_and_gets_nothing() {
    with_worker(TurnConfig::default(), 1, |w| {
        w.ports.of(G1).slots = Some(0);
        w.sends(UPLINK, frame(EVERYBODY, A, 1));
        w.turn();
        w.turn.set_features(NOW, &mut w.engine, G1, None);
        assert_eq!(w.drops(G1, DropReason::PortDown), 1);
        w.ports.of(G1).slots = None;
        w.sends(UPLINK, frame(EVERYBODY, A, 2));
        w.turn();
        w.turn.set_features(NOW, &mut w.engine, G1, Some(PortFeatures::ALL));
        w.sends(UPLINK, frame(EVERYBODY, A, 3));
        w.turn();
        assert_eq!(w.got(G1), [3]);
    });
}

#[test]
fn a_port_that_is_gone_is_down_and_the_others_go_on() {
    with_worker(TurnConfig::default(), 2, |w| {
        w.ports.of(UPLINK).gone = true;
        w.turn.wake(UPLINK);
        w.sends(G1, frame(EVERYBODY, A, 1));
        w.turn();
        assert_eq!(w.turn.features(UPLINK), None);
        assert_eq!((w.got(UPLINK), w.got(G2)), (vec![], vec![1]));
    });
}

#[test]
fn com_17_a_frame_is_finished_for_who_does_not_take_it_as_it_is() {
    with_worker(TurnConfig::default(), 2, |w| {
        w.turn.set_features(NOW, &mut w.engine, G2, Some(PortFeatures::default()));
        let mut ipv4 = frame(EVERYBODY, A, 0x4500);
        ipv4[12..14].copy_from_slice(&[8, 0]);
        ipv4[16..34].copy_from_slice(&[
            0, 46, 0, 1, 0x40, 0, 64, 17, 0x66, 0xbc, 10, 0, 0, 1, 10, 0, 0, 2, // UDP
        ]);
        let partial =
            VirtioNetHdr { flags: 1, csum_start: 34, csum_offset: 6, ..VirtioNetHdr::default() };
        w.ports.of(UPLINK).sent.push_back((partial, ipv4.clone()));
        w.turn.wake(UPLINK);
        w.turn();
        assert_eq!(w.ports.adapted, 1);
        assert_eq!(w.ports.of(G1).got, [ipv4.clone()]);
        let finished = w.ports.of(G2).got.pop().unwrap();
        assert!(finished != ipv4 && finished[42..] == ipv4[42..], "only its checksum");
    });
}

#[test]
fn a_turn_that_is_interrupted_ends_with_that_step() {
    with_worker(TurnConfig { flows_in_cache: 0, ..TurnConfig::default() }, 1, |w| {
        w.ports.last = Some(Step::Frame);
        w.sends(UPLINK, frame(EVERYBODY, A, 1));
        w.sends(UPLINK, frame(EVERYBODY, A, 2));
        let result = w.turn.run(NOW, &mut w.engine, &mut w.ports);
        assert_eq!(result, Err(Interrupted));
        assert_eq!(w.got(G1), [1]);
        assert_eq!(w.ports.steps, [Step::Frame]);
        w.ports.last = None;
        w.sends(UPLINK, frame(EVERYBODY, A, 3));
        w.turn();
        assert_eq!(w.got(G1), [3], "what it had read is lost with it, as a network loses frames");
    });
}

#[test]
fn inv_20_ports_with_nothing_to_do_are_not_looked_at() {
    with_worker(TurnConfig::default(), 100, |w| {
        w.turn();
        assert!(!w.turn.rest(&mut w.ports), "all are asleep");
        w.ports.list.iter_mut().for_each(|queue| queue.looked_at = 0);
        // G1 has a station that is known, so nothing is flooded.
        w.sends(G1, frame(EVERYBODY, A, 1));
        w.turn();
        w.ports.list.iter_mut().for_each(|queue| queue.moved = true);
        w.turn(); // all have seen it
        w.ports.list.iter_mut().for_each(|queue| queue.looked_at = 0);
        for n in 0..10 {
            w.sends(UPLINK, frame(A, B, n));
            w.turn();
            w.turn.look_again(&mut w.ports);
        }
        let looked_at: usize = w.ports.list[2..].iter().map(|queue| queue.looked_at).sum();
        assert_eq!((w.got(G1).len(), looked_at), (10, 0));
    });
}

#[test]
fn a_port_is_watched_for_some_turns_and_then_asked_to_wake_the_worker() {
    with_worker(TurnConfig::default(), 1, |w| {
        w.sends(G1, frame(EVERYBODY, A, 1));
        w.turn();
        for _ in 0..1000 {
            w.turn.look_again(&mut w.ports);
            w.turn();
        }
        assert_eq!(w.ports.of(G1).asked_for_frames, 1);
        assert!(w.ports.of(G1).looked_at < 200);
        w.ports.of(G1).sent.push_back((VirtioNetHdr::default(), frame(EVERYBODY, A, 2)));
        w.turn.handle_kick(NOW, &mut w.engine, G1);
        w.turn();
        assert_eq!(w.got(UPLINK), [1, 2]);
    });
}

#[test]
fn a_frame_that_comes_while_the_port_is_asked_to_wake_the_worker_is_read() {
    with_worker(TurnConfig::default(), 1, |w| {
        w.turn();
        w.ports.of(G1).sent.push_back((VirtioNetHdr::default(), frame(EVERYBODY, A, 1)));
        assert!(w.turn.rest(&mut w.ports), "the worker must not wait");
        w.turn();
        assert_eq!(w.got(UPLINK), [1]);
    });
}

#[test]
fn of_many_guests_that_do_not_run_each_turn_looks_at_a_few_and_at_the_one_that_kicks() {
    let many = u16::try_from(4 * LOOKS_PER_INTERVAL).unwrap();
    with_worker(TurnConfig::default(), many, |w| {
        w.sends(UPLINK, frame(EVERYBODY, A, 0));
        w.turn();
        w.ports.list.iter_mut().for_each(|queue| queue.looked_at = 0);
        let last = PortId(many);
        let mut looked_at = vec![];
        for ms in 1..5 {
            if ms == 1 {
                w.turn.wake(last);
            }
            w.turn.run(NOW + Duration::from_millis(ms), &mut w.engine, &mut w.ports).unwrap();
            let guests = w.ports.list[1..].iter();
            looked_at.push(guests.filter(|queue| queue.looked_at > 0).count());
            assert!(w.ports.of(last).looked_at > 0, "in the first turn already");
            assert!(!w.turn.rest(&mut w.ports));
        }
        let n = LOOKS_PER_INTERVAL;
        assert_eq!(looked_at, [n + 1, 2 * n + 1, 3 * n + 1, 4 * n], "and after four turns at all");
        w.ports.of(last).moved = true;
        for ms in 5..9 {
            w.turn.run(NOW + Duration::from_millis(ms), &mut w.engine, &mut w.ports).unwrap();
        }
        w.sends(UPLINK, frame(EVERYBODY, A, 1));
        w.turn();
        w.ports.list.iter_mut().for_each(|queue| queue.looked_at = 0);
        for ms in 9..13 {
            w.turn.run(NOW + Duration::from_millis(ms), &mut w.engine, &mut w.ports).unwrap();
        }
        let looks = w.ports.list[1..].iter().map(|queue| queue.looked_at);
        assert_eq!(looks.collect::<Vec<_>>(), vec![1; many.into()], "each is in the list once");
    });
}

#[test]
fn of_many_guests_those_that_have_seen_everything_are_not_looked_at_in_place_of_others() {
    let many = u16::try_from(4 * LOOKS_PER_INTERVAL).unwrap();
    with_worker(TurnConfig::default(), many, |w| {
        w.sends(UPLINK, frame(EVERYBODY, A, 0));
        w.turn();
        assert!(!w.turn.rest(&mut w.ports));
        for port in 1..many {
            w.ports.of(PortId(port)).moved = true;
        }
        for ms in 1..5 {
            w.turn.run(NOW + Duration::from_millis(ms), &mut w.engine, &mut w.ports).unwrap();
        }
        w.ports.of(PortId(many)).looked_at = 0;
        for ms in 5..15 {
            w.turn.run(NOW + Duration::from_millis(ms), &mut w.engine, &mut w.ports).unwrap();
        }
        assert_eq!(w.ports.of(PortId(many)).looked_at, 10, "once a millisecond");
    });
}

#[test]
fn of_many_guests_that_do_not_run_none_is_forgotten_however_turns_come() {
    let many = u16::try_from(2 * LOOKS_PER_INTERVAL).unwrap();
    let looked_at = |times_us: &[u64]| {
        let mut count = 0;
        with_worker(TurnConfig::default(), many, |w| {
            w.sends(UPLINK, frame(EVERYBODY, A, 0));
            w.turn();
            assert!(!w.turn.rest(&mut w.ports));
            w.ports.list.iter_mut().for_each(|queue| queue.looked_at = 0);
            for &us in times_us {
                let now = NOW + Duration::from_micros(us);
                w.turn.run(now, &mut w.engine, &mut w.ports).unwrap();
            }
            count = w.ports.list[1..].iter().filter(|queue| queue.looked_at > 0).count();
        });
        count
    };
    assert_eq!(looked_at(&[1000]), LOOKS_PER_INTERVAL);
    assert_eq!(looked_at(&[1000, 1100, 2200, 2300]), 2 * LOOKS_PER_INTERVAL, "with others between");
    assert_eq!(looked_at(&[5000]), 2 * LOOKS_PER_INTERVAL, "after a long wait");
}

#[test]
fn flood_28_however_many_guests_there_are_each_that_runs_gets_every_heartbeat() {
    let many = u16::try_from(4 * LOOKS_PER_INTERVAL).unwrap();
    with_worker(TurnConfig::default(), many, |w| {
        let beat = Heartbeat { controls: true, epoch: core::num::NonZeroU64::new(7).unwrap() };
        let beats: Vec<_> = (1..=many).map(|port| (PortId(port), beat)).collect();
        for n in 0..5 {
            let now = NOW + Duration::from_millis(500 * n);
            w.turn.send_heartbeats(now, &mut w.engine, &mut w.ports, &beats);
            w.turn.run(now, &mut w.engine, &mut w.ports).unwrap();
            w.ports.list.iter_mut().for_each(|queue| queue.moved = true);
        }
        assert!(w.ports.list[1..].iter().all(|queue| queue.got.len() == 5));
    });
}

#[test]
fn what_was_meant_for_a_port_before_its_link_went_is_not_unseen_behind_it() {
    with_worker(TurnConfig::default(), 1, |w| {
        w.sends(UPLINK, frame(EVERYBODY, A, 1));
        w.turn();
        w.turn.set_features(NOW, &mut w.engine, G1, None);
        w.turn.set_features(NOW, &mut w.engine, G1, Some(PortFeatures::ALL));
        w.turn();
        assert!(!w.turn.rest(&mut w.ports));
        w.ports.of(G1).looked_at = 0;
        w.turn.run(NOW + Duration::from_secs(1), &mut w.engine, &mut w.ports).unwrap();
        assert_eq!(w.ports.of(G1).looked_at, 0);
    });
}

#[test]
fn guests_that_have_yet_to_see_something_are_looked_at_once_a_millisecond() {
    with_worker(TurnConfig::default(), 1, |w| {
        w.turn();
        assert!(!w.turn.rest(&mut w.ports));
        w.sends(UPLINK, frame(EVERYBODY, A, 1));
        w.turn();
        w.ports.of(G1).looked_at = 0;
        for us in 0..100 {
            let now = NOW + Duration::from_micros(40 * us);
            w.turn.run(now, &mut w.engine, &mut w.ports).unwrap();
        }
        assert_eq!(w.ports.of(G1).looked_at, 3, "in 4 ms, the first of them when it was given it");
    });
}

#[test]
fn what_waits_for_a_guest_is_fed_over_several_turns() {
    with_worker(TurnConfig::default(), 1, |w| {
        w.ports.of(G1).slots = Some(0);
        for _ in 0..30 {
            let big = [frame(UNKNOWN, A, 1), vec![0; 60_000]].concat();
            w.sends(UPLINK, big);
            w.turn();
        }
        *w.ports.of(G1) = Queue { moved: true, ..Queue::default() };
        w.turn();
        assert_eq!(w.got(G1).len(), 5, "more than 256 KiB, by less than one frame");
        assert!(w.turn.rest(&mut w.ports), "the worker must not wait");
        assert_eq!(w.ports.of(G1).flushed, 1, "the guest works on what it got meanwhile");
        for _ in 0..5 {
            w.turn();
        }
        assert_eq!(w.got(G1).len(), 25);
        assert!(!w.turn.rest(&mut w.ports));
    });
}

#[test]
fn a_guest_that_makes_room_and_says_nothing_is_fed_with_the_next_turn() {
    with_worker(TurnConfig::default(), 1, |w| {
        w.ports.of(G1).slots = Some(0);
        w.sends(UPLINK, frame(EVERYBODY, A, 1));
        w.turn();
        w.ports.of(G1).slots = Some(5);
        w.turn();
        assert_eq!(w.got(G1), [], "nothing says that it did");
        w.ports.of(G1).moved = true;
        w.turn();
        assert_eq!(w.got(G1), [1]);
    });
}

/// Actions of peers and worker in a world where a peer notifies only if it was asked to.
#[derive(Clone, Copy, Debug)]
enum Happening {
    /// A peer sends this many frames.
    Sends(PortId, u16),
    /// A guest takes what is in its ring, and has room for this many frames then.
    Takes(PortId, usize),
    /// The worker takes a turn; `true`: it polls, `false`: it would have waited.
    Turn(bool),
    /// The driver of a guest goes, or comes back.
    Link(PortId, bool),
}

fn happening() -> impl Strategy<Value = Happening> {
    let guest = || prop_oneof![Just(G1), Just(G2)];
    let port = || prop_oneof![Just(UPLINK), Just(G1), Just(G2)];
    prop_oneof![
        3 => (port(), 1..10_u16).prop_map(|(port, n)| Happening::Sends(port, n)),
        2 => (guest(), 0..5_usize).prop_map(|(port, n)| Happening::Takes(port, n)),
        4 => any::<bool>().prop_map(Happening::Turn),
        1 => (guest(), any::<bool>()).prop_map(|(port, up)| Happening::Link(port, up)),
    ]
}

impl Worker<'_> {
    fn happens(&mut self, what: Happening, number: &mut u16) {
        match what {
            Happening::Sends(port, n) => {
                let station = [2, 0, 0, 0, 0, 1 + u8::try_from(port.0).unwrap()];
                for _ in 0..n {
                    let bytes = frame(EVERYBODY, station, *number);
                    self.ports.of(port).sent.push_back((VirtioNetHdr::default(), bytes));
                    *number += 1;
                }
                if port == UPLINK {
                    self.turn.wake(UPLINK); // its descriptor is level-triggered
                } else if std::mem::take(&mut self.ports.of(port).waits_for_frames) {
                    self.turn.handle_kick(NOW, &mut self.engine, port);
                }
            }
            Happening::Takes(port, room) => {
                let queue = self.ports.of(port);
                queue.slots = Some(room);
                queue.moved = true;
                if std::mem::take(&mut queue.waits_for_room) {
                    self.turn.handle_kick(NOW, &mut self.engine, port);
                }
            }
            Happening::Turn(polls) => {
                if polls {
                    self.turn.look_again(&mut self.ports);
                } else if !self.turn.rest(&mut self.ports) {
                    return; // it waits
                }
                self.turn();
            }
            Happening::Link(port, up) => {
                let features = up.then_some(PortFeatures::ALL);
                self.turn.set_features(NOW, &mut self.engine, port, features);
            }
        }
    }
}

proptest! {
    #[test]
    fn no_wake_up_is_lost_and_nothing_overtakes(happenings in vec(happening(), 0..200)) {
        let config = TurnConfig { frames_per_port: 3, backlog_frames_max: 20, flows_in_cache: 0 };
        with_worker(config, 2, |w| {
            [G1, G2].iter().for_each(|port| w.ports.of(*port).slots = Some(4));
            let mut number = 0;
            for what in &happenings {
                w.happens(*what, &mut number);
            }
            // Now guests run, and the worker waits whenever it may.
            for port in [G1, G2] {
                w.happens(Happening::Link(port, true), &mut number);
            }
            for _ in 0..1000 {
                w.happens(Happening::Turn(false), &mut number);
                for port in [G1, G2] {
                    if w.ports.of(port).slots == Some(0) {
                        w.happens(Happening::Takes(port, 4), &mut number);
                    }
                }
            }
            for port in [UPLINK, G1, G2] {
                assert!(w.ports.of(port).sent.is_empty(), "{port:?} was forgotten");
                assert_eq!(w.turn.backlog_bytes(port), 0, "{port:?} has room");
                let mut last = [None; 3];
                for frame in w.ports.of(port).got.drain(..) {
                    let from = usize::from(frame[11]) - 1;
                    let n = Some(u16::from_be_bytes([frame[14], frame[15]]));
                    assert!(n > last[from], "{n:?} after {last:?}");
                    last[from] = n;
                }
            }
        });
    }
}

/// A turn over an uplink and a guest of an engine that a trace has brought somewhere.
fn turn_of_our_own() -> (Turn, Queues) {
    let mut turn = Turn::new(TurnConfig::default());
    let mut ports = Queues::default();
    for port in [UPLINK, G1] {
        turn.slots.list.push(Slot::new(port, port == G1, 8));
        turn.slots.of_mut(port).features = Some(PortFeatures::ALL);
        ports.list.push(Queue::default());
    }
    (turn, ports)
}

#[test]
fn what_a_guest_is_given_from_the_store_counts_as_work_of_the_turn() {
    let (w, r, g) = Setup::new().established();
    g.stops(0);
    r.sends("1:1001");
    let inner = &mut *w.0.borrow_mut();
    let (mut turn, mut ports) = turn_of_our_own();
    ports.of(UPLINK).sent.push_back((VirtioNetHdr::default(), frame(EVERYBODY, A, 1)));
    turn.wake(UPLINK);
    let frames = turn.run(inner.outside.now, &mut inner.engine, &mut ports).unwrap();
    assert_eq!((frames, ports.of(G1).got.len()), (2, 2), "one was read, one was made");
}

/// The remote has not been heard of for so long that its reset is flooded.
#[test]
fn what_the_host_says_for_an_isolated_guest_reaches_no_other_guest_either() {
    let (w, r, g) = Setup::new().established();
    g.stops(0);
    r.sends("1:1001");
    w.after_ms(301_000);
    let inner = &mut *w.0.borrow_mut();
    let (mut turn, mut ports) = turn_of_our_own();
    let (now, engine) = (inner.outside.now, &mut inner.engine);
    let policy = engine.port_config(G1).and_then(PortConfig::as_guest).unwrap().clone();
    engine.set_guest(now, G1, GuestConfig { isolated: true, ..policy }).unwrap();
    engine.add_port(now, PortConfig::guest("silent", GuestConfig::default())).unwrap();
    turn.slots.list.push(Slot::new(G2, true, 8));
    turn.slots.of_mut(G2).features = Some(PortFeatures::ALL);
    ports.list.push(Queue::default());
    engine.handle_guest_gone(now, G1);
    let now = now + crate::limits::T_AWAITED;
    engine.handle_timeout(now);
    turn.transmit(now, engine, &mut ports).unwrap();
    assert_eq!((ports.of(UPLINK).got.len(), ports.of(G2).got.len()), (1, 0));
}

#[test]
fn what_is_said_to_all_of_a_vlan_goes_to_those_who_are_in_it() {
    with_worker(TurnConfig::default(), 1, |w| {
        for (name, vlans) in [
            ("seven", Vlans::Access(7)),
            ("eight", Vlans::Access(8)),
            ("both", Vlans::Trunk(vec![7, 8])),
        ] {
            w.add(PortConfig::guest(name, GuestConfig { vlans, ..GuestConfig::default() }));
        }
        for (tag, to) in [
            (None, [true, false, false, false]),
            (Some(7), [true, true, false, true]),
            (Some(9), [true, false, false, false]),
        ] {
            for dst in [EVERYBODY, UNKNOWN] {
                let mut frame = frame(dst, A, 1);
                if let Some(tag) = tag {
                    frame.splice(12..12, [0x81, 0, 0, tag]);
                }
                w.sends(UPLINK, frame);
                w.turn();
                let got = [1, 2, 3, 4].map(|port| !w.got(PortId(port)).is_empty());
                assert_eq!(got, to, "{tag:?} to {dst:?}");
            }
        }
    });
}

#[test]
fn what_waits_for_a_guest_in_a_vlan_that_it_leaves_is_dropped() {
    let policy = |vlans: &Vlans| GuestConfig { vlans: vlans.clone(), ..GuestConfig::default() };
    let [trunk, left, access] = [Vlans::Trunk(vec![7, 8]), Vlans::Trunk(vec![8]), Vlans::Access(8)];
    // The bytes kept of a frame without a tag and of VLANs 7 and 8, if any came.
    for (before, after, kept) in [
        (&trunk, &left, &[8_u16][..]),
        (&Vlans::Any, &access, &[8]),
        (&Vlans::Any, &left, &[8]),
        (&access, &Vlans::Trunk(vec![7]), &[]),
        (&access, &Vlans::Any, &[8]),
        (&trunk, &trunk, &[7, 8]),
    ] {
        with_worker(TurnConfig::default(), 0, |w| {
            w.add(PortConfig::guest("g", policy(before)));
            let guest = G1;
            w.ports.of(guest).slots = Some(0);
            for tag in [None, Some(7), Some(8)] {
                let mut frame = frame(EVERYBODY, A, 1);
                if let Some(tag) = tag {
                    frame.splice(12..12, [0x81, 0, 0x60, tag]);
                }
                w.sends(UPLINK, frame);
            }
            w.turn();
            let came = w.turn.backlog_bytes(guest) / 60; // some have a tag besides
            w.turn.set_guest(NOW, &mut w.engine, guest, policy(after)).unwrap();
            w.ports.of(guest).slots = None;
            w.turn.wake(guest);
            w.turn();
            let tags: Vec<_> = w.got(guest).iter().map(|number| number & 0xff).collect();
            assert_eq!(tags, kept, "from {before:?} to {after:?}");
            let dropped = w.turn.stats(guest).drops(DropReason::Vlan);
            assert_eq!(usize::try_from(dropped), Ok(came - kept.len()));
            assert_eq!(w.turn.backlog_bytes(guest), 0);
        });
    }
}

/// INV-20: promised bytes and a flood share a ring that is always full.
#[test]
fn inv_20_a_flood_and_promised_bytes_take_turns() {
    let (w, r, g) = Setup::new().established();
    g.stops(0);
    r.sends("1:20001");
    let inner = &mut *w.0.borrow_mut();
    let (mut turn, mut ports) = turn_of_our_own();
    let (mut flood, mut promised) = (0, 0);
    for _ in 0..20 {
        ports.of(G1).slots = Some(2);
        for n in 0..10 {
            ports.of(UPLINK).sent.push_back((VirtioNetHdr::default(), frame(EVERYBODY, A, n)));
        }
        turn.wake(UPLINK);
        turn.run(inner.outside.now, &mut inner.engine, &mut ports).unwrap();
        for frame in ports.of(G1).got.drain(..) {
            *if frame.len() == 60 { &mut flood } else { &mut promised } += 1;
        }
    }
    assert_eq!(flood + promised, 40, "the ring was always full");
    assert!(flood > 12 && promised > 12, "{flood} frames of a flood, {promised} of promised bytes");
}
