use super::*;
use crate::congestion::controller::initial_window;
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::fmt::Write as _;

mod hard;
mod lateness;
mod spurious;

const MSS: u64 = 1000;
/// G's first byte: the stream passes 2^32 on the wire after 4 KB.
const FIRST: u64 = (2 << 32) - 4096;

fn config(algorithm: Algorithm) -> SenderConfig {
    SenderConfig {
        algorithm,
        mss: MSS,
        initial_window: initial_window(MSS, false),
        sack: true,
        ecn: false,
    }
}

fn reno() -> SenderConfig {
    config(Algorithm::Reno)
}

const fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

fn us(n: u64) -> Duration {
    Duration::from_micros(n)
}

/// A sender and a clock, driven by a trace. Numbers are relative to G's first byte. Times are us:
/// on so short a path a millisecond's burst is more than any window, and nothing is paced. Traces
/// of timeouts have ms.
///
/// ```text
/// 0    offer 20000                G has handed over 20000 bytes
///      > 0:10000                  what leaves from then on until the next line
/// 100  ack 2000                   R acknowledges
///      > 10000:14000
/// 110  ack 2000 3000:4000         with SACK blocks, perhaps `edge 9000`, `ece`
/// 250  wait                       only time has passed
///      > again 2000:3000
/// ```
///
/// A line of `>` is all that leaves before the next time, neighbours joined: how the pace spreads
/// them is `pacer`'s to test. `probe` is a window probe.
struct Trace {
    sender: Sender,
    now: Instant,
    start: Instant,
    left: Vec<Segment>,
    log: String,
}

impl Trace {
    fn new(config: &SenderConfig) -> Self {
        let start = Instant::from_secs(1000);
        let sender = Sender::new(start, FIRST, FIRST + 1_000_000, config);
        Self { sender, now: start, start, left: vec![], log: String::new() }
    }

    fn run(config: &SenderConfig, unit: fn(u64) -> Duration, script: &str) -> Self {
        let mut trace = Self::new(config);
        let lines = script.lines().map(str::trim).filter(|line| !line.is_empty());
        let mut lines = lines.peekable();
        while let Some(line) = lines.next() {
            let (at, what) = line.split_once(' ').expect(line);
            trace.advance(unit(at.parse().expect(line)));
            trace.act(what.trim());
            let until = lines.clone().find(|line| !line.starts_with('>'));
            if let Some((at, _)) = until.and_then(|line| line.split_once(' ')) {
                trace.advance_until_before(unit(at.parse().expect(line)));
            } else {
                trace.drain();
            }
            let _ = writeln!(trace.log, "{line}");
            let seen = trace.take();
            if !seen.is_empty() {
                let _ = writeln!(trace.log, "     > {seen}");
            }
            let expected = lines.next_if(|line| line.starts_with('>'));
            let expected = expected.map_or("", |line| line[1..].trim());
            let (s, log) = (&trace.sender, &trace.log);
            let state = (s.phase(), s.controller().cwnd(), s.in_flight());
            assert_eq!(seen, expected, "after `{line}`, {state:?}; so far:\n{log}");
        }
        trace
    }

    fn act(&mut self, what: &str) {
        let mut words = what.split_whitespace();
        let number = |word: Option<&str>| word.expect(what).parse::<u64>().expect(what);
        match words.next() {
            Some("offer") => self.sender.on_offered(self.now, FIRST + number(words.next())),
            Some("wait") => {}
            Some("ack") => {
                let ack = FIRST + number(words.next());
                let (mut blocks, mut edge, mut ece) = (vec![], FIRST + 1_000_000, false);
                while let Some(word) = words.next() {
                    match word {
                        "ece" => ece = true,
                        "edge" => edge = FIRST + number(words.next()),
                        block => {
                            let (from, to) = block.split_once(':').expect(what);
                            blocks.push((FIRST + number(Some(from)), FIRST + number(Some(to))));
                        }
                    }
                }
                let bare = edge == self.sender.net_edge;
                let a = NetAck { ack, blocks: &blocks, edge, ece, echo: None, bare };
                self.sender.on_ack(self.now, &a);
            }
            _ => panic!("not understood: {what}"),
        }
    }

    fn drain(&mut self) {
        while let Some(segment) = self.sender.poll(self.now, 65_536, u64::MAX) {
            self.left.push(segment);
        }
    }

    /// Timers run, and bytes held back by the pace leave.
    fn advance_until_before(&mut self, to: Duration) {
        let end = self.start + to - Duration::from_nanos(1);
        loop {
            self.drain();
            let s = &self.sender;
            let paced = s.paced_until();
            let waits = s.end() > s.next() || s.board().lost() > 0;
            let mut next = s.timeout();
            if waits && paced > self.now {
                next = next.min(paced);
            }
            if next > end {
                break;
            }
            self.now = self.now.max(next);
            self.sender.on_timeout(self.now);
        }
        self.now = end;
    }

    fn advance(&mut self, to: Duration) {
        self.now = self.start + to;
        self.sender.on_timeout(self.now);
    }

    /// The segments that have left, as text.
    fn take(&mut self) -> String {
        let mut joined: Vec<Segment> = vec![];
        for s in self.left.drain(..) {
            match joined.last_mut() {
                Some(last) if last.to == s.from && last.again == s.again && !s.cwr => {
                    last.to = s.to;
                }
                _ => joined.push(s),
            }
        }
        let text = joined.iter().map(|s| {
            if s.from == s.to {
                return "probe".to_owned();
            }
            let again = if s.again { "again " } else { "" };
            let cwr = if s.cwr { " cwr" } else { "" };
            format!("{again}{}:{}{cwr}", s.from - FIRST, s.to - FIRST)
        });
        text.collect::<Vec<_>>().join(", ")
    }
}

#[test]
fn flood_19_ten_segments_leave_however_much_the_guest_has_handed_over() {
    Trace::run(
        &reno(),
        us,
        "0   offer 500000
             > 0:10000
         100 ack 2000
             > 10000:14000
         101 ack 4000
             > 14000:18000
         150 wait",
    );
}

#[test]
fn a_segment_that_three_later_ones_overtake_is_lost_and_the_window_halves() {
    // 11 segments may be under way at 103, so ssthresh is 5500. PRR: half a segment is due for each
    // that arrives, and the copy left half a segment early; from 200 on packets are conserved.
    let trace = Trace::run(
        &reno(),
        us,
        "0   offer 500000
             > 0:10000
         100 ack 1000
             > 10000:12000
         101 ack 1000 2000:3000
             > 12000:13000
         102 ack 1000 2000:4000
             > 13000:14000
         103 ack 1000 2000:5000
             > again 1000:2000
         104 ack 1000 2000:6000
         105 ack 1000 2000:7000
         106 ack 1000 2000:8000
             > 14000:15000
         107 ack 1000 2000:9000
         108 ack 1000 2000:10000
             > 15000:16000
         200 ack 1000 2000:12000
         201 ack 1000 2000:13000
             > 16000:17000
         202 ack 1000 2000:14000
             > 17000:18000
         203 ack 14000
             > 18000:19000",
    );
    let c = trace.sender.controller();
    assert_eq!((c.cwnd(), c.ssthresh(), trace.sender.phase()), (5500, 5500, Phase::Open));
}

#[test]
fn flood_21_reordering_by_less_than_a_quarter_of_the_round_trip_is_no_loss() {
    let trace = Trace::run(
        &reno(),
        us,
        "0   offer 500000
             > 0:10000
         100 ack 1000
             > 10000:12000
         101 ack 1000 2000:3000
             > 12000:13000
         102 ack 3000
             > 13000:16000",
    );
    assert_eq!((trace.sender.retransmissions(), trace.sender.phase()), (0, Phase::Open));
}

#[test]
fn a_lone_overtaker_means_a_loss_only_a_quarter_of_a_round_trip_later() {
    // Both left at 0, and the second took 101: the first is lost at 101 + 101 / 4.
    Trace::run(
        &reno(),
        us,
        "0   offer 2000
             > 0:2000
         101 ack 0 1000:2000
         126 wait
             > again 0:1000
         227 ack 2000",
    );
}

#[test]
fn flood_21_the_tail_is_probed_after_two_round_trips_and_2_ms_and_no_timeout_comes() {
    let trace = Trace::run(
        &reno(),
        us,
        "0   offer 10000
             > 0:10000
         100 ack 2000
         101 ack 8000
         2300 wait
             > again 9000:10000
         2402 ack 8000 9000:10000
             > again 8000:9000
         2503 ack 10000",
    );
    assert_eq!(trace.sender.rtt().backoffs(), 0);
}

#[test]
fn a_lone_segment_is_probed_in_place_of_its_first_timeout() {
    // SRTT 100, RTTVAR 50: the timeout is 300. A probe of one segment waits 2 * 100 and the delay
    // of R's ACK, 200; that would be later.
    Trace::run(
        &reno(),
        ms,
        "0    offer 1000
              > 0:1000
         100  ack 1000
         1000 offer 2000
              > 1000:2000
         1299 wait
         1300 wait
              > again 1000:2000
         1599 wait
         1600 wait
              > again 1000:2000
         1700 ack 2000",
    );
}

#[test]
fn a_timeout_sends_the_first_segment_and_doubles() {
    // A probe with new data comes first; the timeout of 300 counts from it. Then 600 and 1200.
    let trace = Trace::run(
        &reno(),
        ms,
        "0    offer 1000
              > 0:1000
         100  ack 1000
         1000 offer 100000
              > 1000:11000
         1200 wait
              > 11000:12000
         1540 wait
              > again 1000:2000
         2100 wait
              > again 1000:2000
         3300 wait
              > again 1000:2000
         3500 ack 2000
              > 12000:14000
         3600 ack 2000 12000:13000
              > again 2000:3000
         3650 wait",
    );
    let c = trace.sender.controller();
    assert_eq!((c.cwnd(), c.ssthresh()), (2 * MSS, 5 * MSS), "halved once");
}

#[test]
fn after_a_timeout_slow_start_repairs_what_is_lost() {
    Trace::run(
        &reno(),
        ms,
        "0    offer 1000
              > 0:1000
         100  ack 1000
         1000 offer 11000
              > 1000:11000
         1200 wait
              > again 10000:11000
         1540 wait
              > again 1000:2000
         1650 ack 2000
              > again 2000:4000
         1750 ack 4000
              > again 4000:8000
         1850 ack 11000",
    );
}

#[test]
fn a_copy_that_is_lost_is_sent_again_and_the_window_is_reduced_again() {
    let trace = Trace::run(
        &reno(),
        us,
        "0   offer 500000
             > 0:10000
         100 ack 0 1000:2000
             > 10000:11000
         101 ack 0 1000:3000
             > 11000:12000
         102 ack 0 1000:4000
             > again 0:1000
         103 ack 0 1000:10000
             > 12000:14000
         201 ack 0 1000:12000
             > 14000:16000
         203 ack 0 1000:14000
             > again 0:1000",
    );
    assert_eq!(trace.sender.phase(), Phase::Recovery);
    assert_eq!(trace.sender.controller().ssthresh(), 2500);
}

#[test]
fn flood_24_a_mark_reduces_the_window_once_in_a_round_trip_and_cwr_says_so() {
    // R repeats ECE until it has got CWR. At 104 all is acknowledged that was sent before the
    // reduction, but a segment with CWR is not.
    let trace = Trace::run(
        &SenderConfig { ecn: true, ..reno() },
        us,
        "0   offer 500000
             > 0:10000
         100 ack 2000 ece
             > 10000:11000 cwr
         101 ack 4000 ece
             > 11000:12000
         102 ack 6000 ece
             > 12000:13000
         103 ack 8000 ece
         104 ack 10000 ece
             > 13000:15000
         201 ack 12000 ece
             > 15000:16000 cwr",
    );
    assert_eq!(trace.sender.controller().cwnd(), 2500);
}

#[test]
fn a_loss_in_the_round_trip_of_a_mark_reduces_the_window_no_further() {
    let trace = Trace::run(
        &SenderConfig { ecn: true, ..reno() },
        us,
        "0   offer 500000
             > 0:10000
         100 ack 1000 ece
             > 10000:11000 cwr
         101 ack 1000 2000:3000
         102 ack 1000 2000:5000
             > again 1000:2000
         150 wait",
    );
    let c = trace.sender.controller();
    assert_eq!((trace.sender.phase(), c.ssthresh()), (Phase::Recovery, 5 * MSS));
}

#[test]
fn a_loss_that_only_a_probe_repaired_reduces_the_window() {
    // The ACK of 10000 may be that of the original; that of 12000 without a DSACK tells.
    let trace = Trace::run(
        &reno(),
        us,
        "0   offer 10000
             > 0:10000
         100 ack 9000
         200000 wait
             > again 9000:10000
         200350 offer 12000
             > 10000:12000
         200402 ack 10000
         200452 ack 12000",
    );
    // 10000 bytes were in use.
    assert_eq!((trace.sender.controller().cwnd(), trace.sender.phase()), (5 * MSS, Phase::Open));
}

#[test]
fn who_did_not_negotiate_it_hears_of_no_marks() {
    Trace::run(
        &reno(),
        us,
        "0   offer 500000
             > 0:10000
         100 ack 2000 ece
             > 10000:14000
         150 wait",
    );
}

#[test]
fn an_r_without_sack_is_repaired_by_duplicate_acks() {
    // RFC 6582: 0 and 3000 are lost; the partial acknowledgement names the second. Two duplicates
    // let new segments out (RFC 3042); then 5/12 of a segment is due for each, and once five are
    // under way one for one.
    let trace = Trace::run(
        &SenderConfig { sack: false, ..reno() },
        us,
        "0   offer 500000
             > 0:10000
         100 ack 0
             > 10000:11000
         101 ack 0
             > 11000:12000
         102 ack 0
             > again 0:1000
         103 ack 0
         104 ack 0
         105 ack 0
         106 ack 0
         107 ack 0
             > 12000:13000
         200 ack 0
             > 13000:14000
         201 ack 0
             > 14000:15000
         202 ack 3000
             > again 3000:4000, 15000:16000
         207 ack 3000
             > 16000:17000
         300 ack 3000
             > 17000:18000
         301 ack 3000
             > 18000:19000
         302 ack 15000
             > 19000:20000",
    );
    // Each ACK that moved covered a copy (Karn).
    assert_eq!(trace.sender.rtt().srtt(), None);
}

#[test]
fn flood_12_what_r_shows_is_obeyed_and_a_shut_window_is_probed() {
    Trace::run(
        &reno(),
        ms,
        "0    offer 20000
              > 0:10000
         100  ack 5000 edge 12000
              > 10000:12000
         200  ack 12000 edge 12000
              > probe
         600  ack 12000 edge 12400
              > 12000:12400
         700  ack 12400 edge 40000
              > 12400:20000
         800  wait",
    );
}

#[test]
fn when_r_shows_room_again_the_next_timeout_is_the_first() {
    let trace = Trace::run(
        &reno(),
        ms,
        "0    offer 20000
              > 0:10000
         100  ack 10000 edge 10000
              > probe
         900  wait
              > probe
         1100 ack 10000 edge 30000
              > 10000:20000
         1150 wait",
    );
    assert_eq!(trace.sender.rtt().backoffs(), 0);
}

#[test]
fn less_than_a_segment_of_r_s_window_waits_while_something_is_under_way() {
    Trace::run(
        &reno(),
        us,
        "0    offer 20000
              > 0:10000
         100  ack 9000 edge 11400
              > 10000:11000
         101  ack 10000 edge 11400
         200  ack 11000 edge 11400
              > 11000:11400",
    );
}

#[test]
fn a_probe_is_no_new_data_that_r_has_no_room_for() {
    Trace::run(
        &reno(),
        us,
        "0    offer 20000
              > 0:10000
         100  ack 8000 edge 10000
         2290 wait
              > again 9000:10000
         2350 wait",
    );
}

#[test]
fn an_r_that_takes_back_what_it_had_gets_it_again() {
    // RFC 2018 section 8: the first segment is SACKed and never acknowledged.
    Trace::run(
        &reno(),
        ms,
        "0    offer 1000
              > 0:1000
         100  ack 1000
         1000 offer 4000
              > 1000:4000
         1100 ack 1000 1000:4000
         1290 wait
              > again 1000:2000
         1500 ack 2000
              > again 2000:4000
         1600 ack 4000",
    );
}

#[test]
fn what_r_says_again_that_it_had_before_a_timeout_widens_no_window() {
    // R has thrown away the first 4000 of what it SACKed, and after the timeout SACKs the rest
    // anew: one copy has arrived, so two leave (RFC 3465 section 2.3).
    Trace::run(
        &reno(),
        ms,
        "0    offer 1000
              > 0:1000
         100  ack 1000
         1000 offer 11000
              > 1000:11000
         1100 ack 1000 1000:11000
         1290 wait
              > again 1000:2000
         1500 ack 2000 5000:11000
              > again 2000:4000
         1600 ack 4000 5000:11000
              > again 4000:5000
         1700 ack 11000",
    );
}

#[test]
fn a_timeout_that_was_only_a_delay_is_undone() {
    // F-RTO: the acknowledgement of 2000 may be that of the copy, so two new segments leave. That
    // of 3000 is of a segment that left once: the window is what it was.
    let trace = Trace::run(
        &reno(),
        ms,
        "0    offer 1000
              > 0:1000
         100  ack 1000
         1000 offer 500000
              > 1000:11000
         1200 wait
              > 11000:12000
         1540 wait
              > again 1000:2000
         1655 ack 2000
              > 12000:14000
         1660 ack 3000
         1661 ack 8000
              > 14000:24000
         1800 wait",
    );
    let (s, c) = (&trace.sender, trace.sender.controller());
    // It goes on to grow: 10 segments, and 6 that were acknowledged since.
    assert_eq!((s.phase(), c.cwnd(), c.ssthresh()), (Phase::Open, 16 * MSS, u64::MAX));
    assert_eq!(s.retransmissions(), 1);
}

/// Found in review: data of R repeats its acknowledgement (here with another window), and was taken
/// for the answer to the copy, or for that to the two new segments.
#[test]
fn flood_22_data_of_r_does_not_decide_whether_a_timeout_was_only_a_delay() {
    let trace = Trace::run(
        &reno(),
        ms,
        "0    offer 1000
              > 0:1000
         100  ack 1000
         1000 offer 500000
              > 1000:11000
         1200 wait
              > 11000:12000
         1540 wait
              > again 1000:2000
         1590 ack 1000 edge 900000
         1655 ack 2000
              > 12000:14000
         1656 ack 2000 edge 900000
         1660 ack 3000
         1661 ack 8000
              > 14000:24000
         1800 wait",
    );
    assert_eq!(trace.sender.phase(), Phase::Open);
    assert_eq!(trace.sender.retransmissions(), 1);
}

#[test]
fn an_ack_of_all_after_a_timeout_says_nothing_of_it() {
    // R may have had all but the first; slow start begins with one segment.
    Trace::run(
        &reno(),
        ms,
        "0    offer 1000
              > 0:1000
         100  ack 1000
         1000 offer 500000
              > 1000:11000
         1200 wait
              > 11000:12000
         1540 wait
              > again 1000:2000
         1650 ack 12000
              > 12000:13000
         1660 wait",
    );
}

#[test]
fn a_timeout_that_was_none_goes_on_as_one() {
    let trace = Trace::run(
        &reno(),
        ms,
        "0    offer 1000
              > 0:1000
         100  ack 1000
         1000 offer 500000
              > 1000:11000
         1200 wait
              > 11000:12000
         1540 wait
              > again 1000:2000
         1650 ack 2000
              > 12000:14000
         1750 ack 2000 12000:13000
              > again 2000:3000
         1751 ack 2000 12000:14000
              > again 3000:4000
         1850 ack 3000
              > again 4000:6000
         1870 wait",
    );
    assert_eq!(
        (trace.sender.phase(), trace.sender.controller().ssthresh()),
        (Phase::Timeout, 5000)
    );
}

#[test]
fn a_shrunk_window_stops_new_data_and_nothing_else() {
    Trace::run(
        &reno(),
        us,
        "0    offer 50000
              > 0:10000
         100  ack 2000 edge 6000
         101  ack 2000 3000:6000 edge 6000
              > again 2000:3000
         201  ack 10000 edge 30000
              > 10000:14000",
    );
}

#[test]
fn flood_25_after_a_pause_the_window_is_what_it_was_in_the_beginning() {
    let trace = Trace::run(
        &reno(),
        ms,
        "0    offer 30000
              > 0:10000
         100  ack 10000
              > 10000:30000
         300  ack 30000
         5000 offer 500000
              > 30000:40000
         5100 wait",
    );
    assert_eq!(trace.sender.controller().cwnd(), 10 * MSS);
}

#[test]
fn flood_25_a_guest_that_hands_over_little_does_not_widen_the_window() {
    let mut script = String::new();
    for i in 0..20 {
        let (from, to) = (4000 * i, 4000 * (i + 1));
        let at = 150 * i;
        let _ = writeln!(script, "{at} offer {to}\n > {from}:{to}\n {} ack {to}", at + 100);
    }
    let trace = Trace::run(&reno(), ms, &script);
    assert_eq!(trace.sender.controller().cwnd(), 10 * MSS);
}

#[test]
fn flood_07_a_segment_of_the_guest_is_not_joined_with_the_next() {
    let mut trace = Trace::new(&reno());
    trace.sender.on_offered(trace.now, FIRST + 2500);
    let cuts = [FIRST + 100, FIRST + 2300, FIRST + 2500];
    let mut left = vec![];
    loop {
        let next = trace.sender.next();
        let cut = cuts.into_iter().find(|cut| *cut > next).unwrap_or(u64::MAX);
        let Some(s) = trace.sender.poll(trace.now, 65_536, cut) else { break };
        left.push((s.from - FIRST, s.to - FIRST));
    }
    assert_eq!(left, [(0, 100), (100, 2300), (2300, 2500)]);
}

/// A path with a fixed delay that loses, duplicates and delays segments by chance, and a receiver
/// with SACK, all in a queue of events.
struct Path {
    random: u64,
    loss: u64,
    late: u64,
    /// Arrivals at the receiver and, as ACKs, at the sender.
    queue: BTreeMap<(Instant, u64), PathEvent>,
    count: u64,
    received: BTreeMap<u64, u64>,
    ack: u64,
}

enum PathEvent {
    Data(u64, u64),
    Ack(u64, Vec<(u64, u64)>),
}

impl Path {
    fn chance(&mut self, of_thousand: u64) -> bool {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % 1000 < of_thousand
    }

    fn put(&mut self, at: Instant, event: PathEvent) {
        self.count += 1;
        self.queue.insert((at, self.count), event);
    }

    fn send(&mut self, now: Instant, s: Segment) {
        for from in (s.from..s.to).step_by(usize::try_from(MSS).unwrap()) {
            if self.chance(self.loss) {
                continue;
            }
            let late = if self.chance(self.late) { ms(30) } else { Duration::ZERO };
            self.put(now + ms(20) + late, PathEvent::Data(from, s.to.min(from + MSS)));
        }
    }

    /// Data arrives: the ACK it is answered with.
    fn receive(&mut self, from: u64, to: u64) -> PathEvent {
        let entry = self.received.entry(from).or_insert(to);
        *entry = to.max(*entry);
        let mut blocks: Vec<(u64, u64)> = vec![];
        for (&from, &to) in &self.received {
            if from <= self.ack {
                self.ack = self.ack.max(to);
            } else if let Some(last) = blocks.last_mut().filter(|last| from <= last.1) {
                last.1 = last.1.max(to);
            } else {
                blocks.push((from, to));
            }
        }
        self.received.retain(|_, end| *end > self.ack);
        let newest = blocks.iter().position(|(a, b)| *a <= from && to <= *b);
        blocks.rotate_left(newest.unwrap_or(0));
        blocks.truncate(3);
        if to <= self.ack && blocks.is_empty() && from < self.ack.saturating_sub(MSS) {
            blocks.insert(0, (from, to)); // a DSACK, as far as this receiver can tell
        }
        PathEvent::Ack(self.ack, blocks)
    }
}

/// Bytes that may be under way beyond the window: a loss probe, or the first after a timeout.
const ALLOWANCE: u64 = MSS;

/// Sends `bytes` over a path; the invariants that held at every step, or the one that did not.
fn transfer(config: &SenderConfig, mut path: Path, bytes: u64) -> Result<Sender, String> {
    let mut now = Instant::from_secs(50);
    let mut s = Sender::new(now, FIRST, FIRST + 200_000, config);
    s.on_offered(now, FIRST + bytes);
    let mut flight_at_loss = 0;
    for _ in 0..200_000 {
        if s.una() == FIRST + bytes {
            return Ok(s);
        }
        loop {
            let owed = s.due != Due::Nothing;
            let before = s.in_flight();
            let Some(segment) = s.poll(now, 65_536, u64::MAX) else { break };
            let cwnd = s.controller().cwnd();
            let most = match s.phase() {
                Phase::Open | Phase::Timeout => cwnd.max(MSS),
                // The first copy does not wait.
                Phase::Recovery | Phase::Reduction => cwnd.max(flight_at_loss) + MSS,
            };
            if !owed && s.in_flight() > most {
                return Err(format!("{} under way, {most} allowed: {segment:?}", s.in_flight()));
            }
            if owed && s.in_flight() > before + ALLOWANCE {
                return Err(format!("more than an allowance: {segment:?}"));
            }
            if segment.to > s.net_edge {
                return Err(format!("beyond the edge: {segment:?}"));
            }
            path.send(now, segment);
        }
        if matches!(s.phase(), Phase::Open | Phase::Timeout) {
            flight_at_loss = s.in_flight();
        }
        let waits = s.end() > s.next() || s.board().lost() > 0;
        let paced = if waits && s.paced_until() > now { s.paced_until() } else { Instant::MAX };
        let arrival = path.queue.keys().next().map_or(Instant::MAX, |(at, _)| *at);
        now = s.timeout().min(paced).min(arrival);
        if now == Instant::MAX {
            return Err(format!("nothing happens any more: {s:?}"));
        }
        if arrival == now
            && let Some((_, event)) = path.queue.pop_first()
        {
            match event {
                PathEvent::Data(from, to) => {
                    let answer = path.receive(from, to);
                    if !path.chance(path.loss / 2) {
                        path.put(now + ms(20), answer);
                    }
                }
                PathEvent::Ack(ack, blocks) => {
                    let edge = s.net_edge.max(ack + 200_000);
                    let bare = edge == s.net_edge;
                    let a = NetAck { ack, blocks: &blocks, edge, ece: false, echo: None, bare };
                    s.on_ack(now, &a);
                }
            }
        }
        s.on_timeout(now);
    }
    Err(format!("not done after 200000 steps: una {}", s.una() - FIRST))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]
    #[test]
    fn inv_14_no_more_is_under_way_than_the_window_and_all_arrives(
        seed in 1_u64..u64::MAX,
        loss in prop_oneof![Just(0_u64), 1_u64..50, 100_u64..300],
        late in prop_oneof![Just(0_u64), 1_u64..200],
        cubic in any::<bool>(),
        sack in any::<bool>(),
        bytes in 1_u64..400_000,
    ) {
        let algorithm = if cubic { Algorithm::Cubic } else { Algorithm::Reno };
        let path = Path {
            random: seed,
            loss,
            late,
            queue: BTreeMap::new(),
            count: 0,
            received: BTreeMap::new(),
            ack: FIRST,
        };
        let done = transfer(&SenderConfig { sack, ..config(algorithm) }, path, bytes);
        let s = done.map_err(TestCaseError::fail)?;
        if loss == 0 && late == 0 {
            prop_assert_eq!(s.retransmissions(), 0);
        }
    }
}
