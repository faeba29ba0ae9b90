//! FLOOD-19 to FLOOD-26 as R's wire sees them: windows per round trip, recoveries and timeouts.
//! Expectations are computed here from the RFCs, in floating-point numbers and segments.

use std::collections::{BTreeSet, VecDeque};

use crate::GUEST;
use crate::common::world::Peer;
use crate::common::{Setup, World};
use nightporter_core::congestion::Algorithm;
use nightporter_core::time::Duration;

/// Bytes of a segment, and of the initial window.
const MSS: i64 = 1000;
const INITIAL: i64 = 10 * MSS;

/// A path to an R that acknowledges each segment when it arrives, driven a millisecond at a time;
/// G always has more. Bytes are counted from 0, segments begin at multiples of [`MSS`].
struct Path {
    w: World<'static>,
    r: Peer<'static>,
    g: Peer<'static>,
    /// From a segment to its ACK.
    rtt_ms: u64,
    ms: u64,
    /// Segments on their way, and when the ACK of each is with H.
    flying: VecDeque<(u64, i64)>,
    /// Segments that get lost, once each.
    doomed: BTreeSet<i64>,
    /// Segments beyond the acknowledgement that R has, the newest last.
    kept: Vec<i64>,
    handed: i64,
    /// G hands over no more than this.
    limit: i64,
    sent: i64,
    acked: i64,
    /// Copies: when they left, and their first bytes.
    copies: Vec<(u64, i64)>,
    /// An ACK of R is split into so many.
    parts: i64,
}

impl Path {
    fn new(algorithm: Algorithm, rtt_ms: u64) -> Self {
        Self::of(&Setup { algorithm, ..Setup::new() }, rtt_ms)
    }

    fn of(setup: &Setup, rtt_ms: u64) -> Self {
        let w = Setup { floods: true, ..setup.clone() }.opens();
        let (r, g) = w.connects();
        r.shows_window(1 << 20);
        Self {
            w,
            r,
            g,
            rtt_ms,
            ms: 0,
            flying: VecDeque::new(),
            doomed: BTreeSet::new(),
            kept: vec![],
            handed: 0,
            limit: i64::MAX,
            sent: 0,
            acked: 0,
            copies: vec![],
            parts: 1,
        }
    }

    /// A millisecond goes by.
    fn step(&mut self) {
        while self.handed < (self.sent + 30 * MSS).min(self.limit) {
            let from = self.handed + 1;
            self.handed += 5 * MSS;
            self.g.sends(&format!("{from}:{} gso 1000", self.handed + 1));
        }
        self.g.takes_all();
        self.leaves();
        self.w.after_ms(1);
        self.ms += 1;
        self.leaves();
        while let Some((_, at)) = self.flying.pop_front_if(|(due, _)| *due <= self.ms) {
            self.arrives(at);
            self.leaves();
        }
    }

    fn steps(&mut self, count: u64) {
        for _ in 0..count {
            self.step();
        }
    }

    /// H's segments are under way.
    fn leaves(&mut self) {
        for seen in self.r.takes_all() {
            let (from, to) = (i64::from(seen.range().0) - 1, i64::from(seen.range().1) - 1);
            for at in (from..to).step_by(MSS as usize) {
                if at < self.sent {
                    self.copies.push((self.ms, at));
                }
                self.sent = self.sent.max(at + MSS);
                if !self.doomed.remove(&at) {
                    self.flying.push_back((self.ms + self.rtt_ms, at));
                }
            }
        }
    }

    /// R gets a segment and says so.
    fn arrives(&mut self, at: i64) {
        let before = self.acked;
        self.kept.retain(|kept| *kept != at);
        self.kept.push(at);
        while let Some(place) = self.kept.iter().position(|kept| *kept <= self.acked) {
            self.acked = self.acked.max(self.kept.remove(place) + MSS);
        }
        let blocks: Vec<_> = self.blocks().iter().map(|(a, b)| format!("{a}:{b}")).collect();
        let sack =
            if blocks.is_empty() { String::new() } else { format!("<sack {}>", blocks.join(" ")) };
        for part in 1..=self.parts {
            let ack = before + (self.acked - before) * part / self.parts;
            self.r.sends(&format!("ack {} {sack}", ack + 1));
        }
    }

    /// The newest three runs of what R has beyond its acknowledgement.
    fn blocks(&self) -> Vec<(i64, i64)> {
        let all: BTreeSet<i64> = self.kept.iter().copied().collect();
        let mut blocks: Vec<(i64, i64)> = vec![];
        for newest in self.kept.iter().rev() {
            let (mut from, mut to) = (*newest, *newest + MSS);
            while all.contains(&(from - MSS)) {
                from -= MSS;
            }
            while all.contains(&to) {
                to += MSS;
            }
            if blocks.len() < 3 && !blocks.contains(&(from + 1, to + 1)) {
                blocks.push((from + 1, to + 1));
            }
        }
        blocks
    }

    fn flight(&self) -> i64 {
        self.sent - self.acked
    }

    /// Until so much is under way.
    fn fills(&mut self, segments: i64) {
        for _ in 0..100 * self.rtt_ms {
            if self.flight() >= segments * MSS {
                return;
            }
            self.step();
        }
        panic!("{} bytes under way after {} ms", self.flight(), self.ms);
    }

    /// The next new segment gets lost; until its copy is acknowledged. How many bytes were under
    /// way when the loss was found, without those that R had said it has.
    fn loses_one(&mut self) -> i64 {
        let (at, copies) = (self.sent, self.copies.len());
        self.doomed.insert(at);
        let mut flight = 0;
        while self.acked <= at {
            if self.copies.len() == copies {
                flight = self.flight() - MSS * self.kept.len() as i64;
            }
            self.step();
        }
        flight
    }

    /// The most that is under way in each of `count` round trips, in segments, and when it ends.
    fn rounds(&mut self, count: usize) -> Vec<(u64, f64)> {
        let round = |path: &mut Self| {
            let mut most = 0;
            for _ in 0..path.rtt_ms {
                path.step();
                most = most.max(path.flight());
            }
            (path.ms, most as f64 / MSS as f64)
        };
        (0..count).map(|_| round(self)).collect()
    }
}

/// As near as whole segments and millisecond steps allow.
fn assert_near(seen: &[(u64, f64)], expected: impl Fn(u64) -> f64) {
    let expected: Vec<_> = seen.iter().map(|(ms, _)| expected(*ms)).collect();
    let seen: Vec<_> = seen.iter().map(|(_, window)| *window).collect();
    let near = seen.iter().zip(&expected).all(|(a, b)| (a - b).abs() <= 1.5 + b / 50.0);
    assert!(near, "\n is {seen:.1?}\n not {expected:.1?}");
}

#[test]
fn flood_19_in_slow_start_the_window_is_the_first_one_and_all_that_was_acknowledged() {
    for algorithm in Algorithm::ALL {
        let mut path = Path::new(algorithm, 50);
        let mut acked = VecDeque::from([0; 50]); // a round trip ago
        for _ in 0..300 {
            path.step();
            let long_ago = acked.pop_front().expect("fifty");
            acked.push_back(path.acked);
            // RFC 5681 section 3.1 with byte counting: cwnd = IW + acked.
            let most = INITIAL + 2 * path.acked;
            let least = INITIAL + 2 * long_ago; // within a round trip the pace has let it out
            let sent = path.sent;
            assert!((least..=most).contains(&sent), "{least} to {most}, not {sent}");
        }
        assert!(path.sent > 300 * MSS, "{} bytes in six round trips", path.sent);
    }
}

#[test]
fn flood_20_an_r_that_splits_its_acks_gets_no_more() {
    let mut path = Path::new(Algorithm::Cubic, 50);
    path.parts = 20;
    for _ in 0..200 {
        path.step();
        assert!(path.sent <= INITIAL + 2 * path.acked, "{} for {}", path.sent, path.acked);
    }
}

#[test]
fn flood_20_after_a_loss_cubic_grows_along_the_curve_of_rfc_9438() {
    let mut path = Path::new(Algorithm::Cubic, 200);
    path.fills(24);
    path.loses_one(); // the end of slow start, in which the pace holds some of the window back
    path.steps(5000);
    let flight = path.loses_one() as f64 / MSS as f64;
    let (start, rtt) = (path.ms as f64, 0.2);
    // Section 4.2: C = 0.4, beta = 0.7; the window was what was under way.
    let (w_max, reduced) = (flight, 0.7 * flight);
    let k = ((w_max - reduced) / 0.4).cbrt();
    let seen = path.rounds(30);
    assert_near(&seen, |ms| {
        let t = (ms as f64 - start) / 1000.0;
        let cubic = 0.4 * (t - k).powi(3) + w_max;
        cubic.max(reduced + 9.0 / 17.0 * t / rtt) // section 4.3, as long as it is below w_max
    });
    let last = seen.last().expect("rounds").1;
    assert!(k < 4.5 && last > w_max + 3.0, "the plateau is behind: {last} of {w_max}");
}

#[test]
fn flood_20_after_a_loss_reno_grows_by_a_segment_in_a_round_trip_from_half_the_window() {
    let mut path = Path::new(Algorithm::Reno, 50);
    path.fills(40);
    path.loses_one();
    path.steps(500);
    let half = path.loses_one() as f64 / MSS as f64 / 2.0;
    let start = path.ms;
    let seen = path.rounds(30);
    assert_near(&seen, |ms| half + (ms - start) as f64 / 50.0);
}

#[test]
fn flood_20_on_a_short_path_cubic_is_as_fast_as_reno() {
    let mut path = Path::new(Algorithm::Cubic, 20);
    path.fills(30);
    path.loses_one();
    path.steps(300);
    let flight = path.loses_one() as f64 / MSS as f64;
    let (start, reduced) = (path.ms, 0.7 * flight);
    let seen = path.rounds(15);
    assert_near(&seen, |ms| reduced + 9.0 / 17.0 * (ms - start) as f64 / 20.0);
}

#[test]
fn flood_22_in_a_recovery_seven_bytes_leave_for_ten_that_arrive() {
    let mut path = Path::new(Algorithm::Cubic, 100);
    path.fills(30);
    path.loses_one(); // the end of slow start, in which the pace holds some of the window back
    path.steps(3000);
    path.copies.clear();
    path.doomed.insert(path.sent);
    let lost = path.sent;
    while path.copies.is_empty() {
        path.step();
    }
    // From here on: RecoverFS is what was under way, ssthresh seven tenths of it (RFC 9937).
    let delivered = |path: &Path| path.acked + MSS * path.kept.len() as i64;
    let (flight, before, out) = (path.flight(), delivered(&path), path.sent);
    let mut most_behind = 0.0_f64;
    while path.acked <= lost {
        let due = (delivered(&path) - before + 4 * MSS) as f64 * 0.7;
        let sent = (path.sent - out + MSS) as f64;
        assert!(sent <= due + 2.0 * MSS as f64, "{sent} of {due} due, {flight} under way");
        most_behind = most_behind.max(due - sent);
        path.step();
    }
    assert!(most_behind < 4.0 * MSS as f64, "{most_behind} bytes were due and did not leave");
    assert_eq!(path.copies.len(), 1);
}

#[test]
fn flood_21_a_timeout_doubles_from_three_round_trips() {
    // RFC 6298 after one sample R of 100 ms: SRTT = R, RTTVAR = R / 2, so RTO = 300 ms.
    let mut path = Path::of(&Setup { sack: [false; 2], ..Setup::new() }, 100);
    path.limit = 5 * MSS;
    path.steps(101);
    assert_eq!(path.acked, 5 * MSS);
    path.limit = 10 * MSS;
    path.rtt_ms = 1 << 40; // R is gone
    let start = path.ms;
    path.steps(5000);
    let first: Vec<_> = path.copies.iter().filter(|(_, at)| *at == 5 * MSS).collect();
    let times: Vec<_> = first.iter().map(|(ms, _)| ms - start).collect();
    let expected = [300, 900, 2100, 4500];
    let near = times.iter().zip(expected).all(|(a, b)| a.abs_diff(b) <= 3);
    assert!(near && times.len() == 4, "{times:?}");
    assert_eq!(path.copies.len(), 4, "one segment each time");
}

#[test]
fn flood_22_a_timeout_for_nothing_costs_one_copy_and_no_window() {
    let mut path = Path::new(Algorithm::Cubic, 50);
    path.fills(40);
    let before = path.rounds(1)[0].1;
    // All that is under way, and every ACK, is half a second late.
    for (due, _) in &mut path.flying {
        *due += 500;
    }
    path.steps(500);
    let copies = path.copies.len();
    assert!((1..=3).contains(&copies), "{copies} copies: a probe, a timeout, perhaps a second");
    path.steps(100);
    assert_eq!(path.copies.len(), copies, "what arrived late is not sent again");
    let after = path.rounds(2)[1].1;
    assert!(after >= before, "{before} segments before, {after} after");
}

#[test]
fn flood_25_after_a_long_pause_the_first_window_leaves_and_slow_start_goes_on() {
    let mut path = Path::new(Algorithm::Cubic, 50);
    path.fills(80);
    path.limit = path.handed;
    path.steps(10_000);
    assert_eq!(path.flight(), 0);
    let (sent, acked) = (path.sent, path.acked);
    path.limit = i64::MAX;
    path.steps(45);
    assert_eq!(path.sent - sent, INITIAL, "RFC 5681 section 4.1");
    path.steps(100);
    assert!(path.sent - sent > 4 * INITIAL, "{} bytes in three round trips", path.sent - sent);
    assert!(path.sent - sent <= INITIAL + 2 * (path.acked - acked));
}

#[test]
fn flood_25_a_pause_of_two_timeouts_halves_the_window_twice() {
    let first_flight_after = |pause_ms| {
        let mut path = Path::new(Algorithm::Reno, 50);
        path.fills(80);
        path.limit = path.handed;
        while path.flight() > 0 || path.sent < path.handed {
            path.step();
        }
        path.steps(pause_ms);
        let sent = path.sent;
        path.limit = i64::MAX;
        path.steps(49);
        path.sent - sent
    };
    // A timeout is SRTT and 200 ms; the last segment has left a round trip ago already.
    let (whole, quarter) = (first_flight_after(1), first_flight_after(500));
    assert!((quarter - whole / 4).abs() <= MSS && whole > 80 * MSS, "{quarter} of {whole}");
}

#[test]
fn flood_21_over_a_short_path_a_probe_waits_two_milliseconds_more() {
    let w = Setup { floods: true, ..Setup::new() }.opens();
    let (r, g) = w.connects();
    let after_us = |us| w.until(w.now() + Duration::from_micros(us));
    g.sends("1:1001");
    r.takes_all();
    after_us(250);
    r.sends("ack 1001");
    g.sends_all(&["1001:2001", "2001:3001"]);
    r.gets_all(&["1001:3001"]);
    after_us(2400); // two round trips, and what a busy receiver may take (Linux TCP_TIMEOUT_MIN)
    r.gets_nothing();
    after_us(200);
    r.gets_all(&["2001:3001"]);
}

/// An R without SACK that has 1:4001, of which it has told G more than once.
fn after_copies_of_g() -> (Peer<'static>, Peer<'static>) {
    let w = Setup { floods: true, sack: [false; 2], ..Setup::new() }.opens();
    let (r, g) = w.connects();
    let floods = |wanted| w.engine(|engine, _| engine.set_congestion_offload(GUEST, wanted));
    floods(false);
    g.sends("1:4001 gso 1000");
    g.sends("1:4001 gso 1000"); // it was off its core for longer than its timeout
    r.takes_all();
    r.sends("ack 4001");
    floods(true);
    g.sends("4001:9001 gso 1000");
    r.gets_all(&["4001:9001"]);
    (r, g)
}

/// Found by simulation (seed 937): four ACKs of copies that G had sent itself.
#[test]
fn flood_21_duplicates_that_speak_of_what_g_sent_before_mean_no_loss() {
    let (r, _g) = after_copies_of_g();
    for _ in 0..4 {
        r.sends("ack 4001");
    }
    r.gets_nothing();
}

/// RFC 6582 section 3.2: from the first new acknowledgement on they count.
#[test]
fn flood_21_later_duplicates_mean_a_loss_again() {
    let (r, _g) = after_copies_of_g();
    for _ in 0..4 {
        r.sends("ack 5001");
    }
    r.gets_all(&["5001:6001"]);
}

/// Found by simulation (seed 928): each such part had brought a copy of the rest of the segment.
#[test]
fn flood_22_a_copy_that_is_acknowledged_in_parts_does_not_leave_again() {
    let w = Setup { floods: true, sack: [false; 2], ..Setup::new() }.opens();
    let (r, g) = w.connects();
    g.sends("1:10001 gso 1000");
    r.gets_all(&["1:10001"]);
    w.after_ms(50);
    for _ in 0..3 {
        r.sends("ack 1");
    }
    r.gets_all(&["1:1001"]);
    w.after_ms(50);
    for part in ["ack 251", "ack 501", "ack 751"] {
        r.sends(part);
        r.gets_nothing();
    }
    r.sends("ack 1001"); // what is next is lost too
    r.gets_all(&["1001:2001"]);
}

/// Found by simulation (seed 49828): they were about copies before it.
#[test]
fn flood_21_duplicates_that_come_sooner_than_any_answer_mean_no_loss() {
    let w = Setup { floods: true, sack: [false; 2], ..Setup::new() }.opens();
    let (r, g) = w.connects();
    g.sends("1:1001");
    r.gets_all(&["1:1001"]);
    w.after_ms(50);
    r.sends("ack 1001");
    g.sends("1001:6001 gso 1000");
    w.after_ms(30);
    r.takes_all();
    for _ in 0..4 {
        r.sends("ack 1001");
    }
    r.gets_nothing();
    w.after_ms(21);
    r.sends("ack 1001");
    r.gets_all(&["1001:2001"]);
}
