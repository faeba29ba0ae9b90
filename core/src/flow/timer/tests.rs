//! The wheel against a map of deadlines.

use super::*;
use proptest::prelude::*;
use std::collections::BTreeMap;

const HOUR_MS: u64 = 3_600_000;

fn id(index: u32) -> FlowId {
    // A generation in the upper bits, to see that ids come back whole.
    FlowId(index | 5 << 22)
}

fn ms(ms: u64) -> Instant {
    Instant::from_millis(ms)
}

/// A wheel, and what it should do.
struct Pair {
    wheel: TimerWheel,
    /// Flow to deadline in ms.
    model: BTreeMap<u32, u64>,
    now: u64,
}

impl Pair {
    fn new(now: u64) -> Self {
        Self { wheel: TimerWheel::new(ms(now)), model: BTreeMap::new(), now }
    }

    fn schedule(&mut self, flow: u32, at: u64) {
        self.wheel.schedule(id(flow), ms(at));
        // A timer that is overdue when it is scheduled is due now.
        let at = at.max(self.now);
        let deadline = self.model.entry(flow).or_insert(at);
        *deadline = at.min(*deadline);
    }

    /// Lets time pass and pops what is due; checks who comes, when, and in what order.
    fn advance(&mut self, by: u64) {
        self.now += by;
        let mut last = 0;
        loop {
            while let Some(popped) = self.wheel.expired(ms(self.now)) {
                let flow = u32::try_from(popped.index()).unwrap();
                assert_eq!(popped, id(flow));
                let deadline = self.model.remove(&flow).expect("it has a deadline");
                assert!(deadline <= self.now, "flow {flow} came early");
                assert!(deadline >= last, "flow {flow} came out of order");
                last = deadline;
            }
            if self.wheel.next().is_none_or(|next| next > ms(self.now)) {
                break;
            }
        }
        let first = self.model.values().min();
        assert!(first.is_none_or(|&at| at > self.now), "a flow was forgotten");
        match (self.wheel.next(), first) {
            (None, first) => assert_eq!(first, None, "nobody would come back for it"),
            (Some(next), first) => assert!(next <= ms(*first.expect("nothing to wake for"))),
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Op {
    Schedule(u32, u64),
    Cancel(u32),
    Advance(u64),
}

/// Delays on every scale: the same tick, the fine level, its edge, the coarse level, beyond.
fn delay() -> impl Strategy<Value = u64> {
    prop_oneof![
        4 => 0_u64..50,
        2 => 4000_u64..4200,
        2 => 0_u64..20_000,
        1 => 0_u64..HOUR_MS,
        1 => 4095 * 4096_u64..4098 * 4096,
        1 => 0_u64..20 * 24 * HOUR_MS,
    ]
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (0_u32..40, delay()).prop_map(|(flow, d)| Op::Schedule(flow, d)),
        1 => (0_u32..40).prop_map(Op::Cancel),
        3 => delay().prop_map(Op::Advance),
    ]
}

proptest! {
    #[test]
    fn sec_12_flows_come_when_they_are_due_and_in_order(
        start in prop_oneof![0_u64..10_000, (1_u64 << 32) - 5000..(1 << 32) + 5000],
        ops in prop::collection::vec(op(), 1..200),
    ) {
        let mut pair = Pair::new(start);
        for op in ops {
            match op {
                Op::Schedule(flow, delay) => pair.schedule(flow, pair.now + delay),
                Op::Cancel(flow) => {
                    pair.wheel.cancel(id(flow));
                    pair.model.remove(&flow);
                }
                Op::Advance(by) => pair.advance(by),
            }
        }
        pair.advance(30 * 24 * HOUR_MS);
        prop_assert!(pair.model.is_empty());
    }
}

#[test]
fn an_earlier_deadline_moves_a_flow_and_a_later_one_does_not() {
    let mut pair = Pair::new(1000);
    pair.schedule(1, 1500);
    pair.schedule(1, 9000);
    pair.schedule(2, 9000);
    pair.schedule(2, 1400);
    assert_eq!(pair.wheel.next(), Some(ms(1400)));
    assert_eq!(pair.wheel.expired(ms(1399)), None);
    assert_eq!(pair.wheel.expired(ms(1600)), Some(id(2)));
    assert_eq!(pair.wheel.expired(ms(1600)), Some(id(1)));
    assert_eq!(pair.wheel.expired(ms(100_000)), None);
    assert_eq!(pair.wheel.next(), None);
}

#[test]
fn nothing_fires_before_its_time_to_the_nanosecond() {
    let mut wheel = TimerWheel::new(ms(0));
    wheel.schedule(id(0), Instant::from_nanos(7_000_001));
    assert_eq!(wheel.expired(Instant::from_nanos(7_999_999)), None);
    assert_eq!(wheel.expired(ms(8)), Some(id(0)));
}

#[test]
fn a_deadline_in_the_past_is_due_now() {
    let mut wheel = TimerWheel::new(ms(5000));
    wheel.schedule(id(0), ms(10));
    assert_eq!(wheel.next(), Some(ms(5000)));
    assert_eq!(wheel.expired(ms(5000)), Some(id(0)));
}

#[test]
fn a_clock_that_steps_back_delays_and_breaks_nothing() {
    let mut wheel = TimerWheel::new(ms(5000));
    wheel.schedule(id(0), ms(5100));
    wheel.schedule(id(1), ms(5000));
    assert_eq!(wheel.expired(ms(4999)), None);
    assert_eq!(wheel.expired(ms(5000)), Some(id(1)));
    assert_eq!(wheel.expired(ms(1)), None);
    assert_eq!(wheel.expired(ms(5100)), Some(id(0)));
}

#[test]
fn a_deadline_at_the_end_of_time_is_kept_and_can_be_taken_back() {
    let mut wheel = TimerWheel::new(ms(7));
    wheel.schedule(id(0), Instant::MAX);
    assert_eq!(wheel.expired(ms(20 * 24 * HOUR_MS)), None);
    wheel.cancel(id(0));
    assert_eq!(wheel.next(), None);
}

#[test]
fn a_flow_that_waits_for_the_end_of_time_can_be_woken_earlier() {
    let mut wheel = TimerWheel::new(ms(7));
    wheel.schedule(id(0), Instant::MAX);
    wheel.schedule(id(0), ms(1000));
    assert_eq!(wheel.expired(ms(1000)), Some(id(0)));
}

#[test]
fn life_11_a_jump_of_an_hour_wakes_each_due_flow_once_and_does_bounded_work_per_call() {
    const FLOWS: u32 = 100_000;
    let mut wheel = TimerWheel::new(ms(0));
    // Half of them at the same time within the hour, the others spread over two hours.
    let at = |flow: u32| if flow.is_multiple_of(2) { 3_000_000 } else { u64::from(flow) * 80 };
    for flow in 0..FLOWS {
        wheel.schedule(id(flow), ms(at(flow)));
    }
    let now = ms(HOUR_MS);
    let (mut woken, mut pauses) = (0_usize, 0);
    while wheel.next().is_some_and(|next| next <= now) {
        match wheel.expired(now) {
            Some(_) => woken += 1,
            None => pauses += 1,
        }
    }
    let due = (0..FLOWS).filter(|&flow| at(flow) <= HOUR_MS).count();
    assert_eq!(woken, due);
    assert!(pauses <= FLOWS / MOVES_MAX + 1, "{pauses} pauses");
}

#[test]
fn sec_12_a_million_idle_flows_ask_for_a_wake_up_per_block_not_per_tick() {
    const FLOWS: u32 = 1_000_000;
    let mut wheel = TimerWheel::new(ms(0));
    for flow in 0..FLOWS {
        wheel.schedule(id(flow), ms(HOUR_MS + u64::from(flow) % 60_000));
    }
    let mut wakes = 0;
    while let Some(next) = wheel.next().filter(|&next| next < ms(HOUR_MS - 60_000)) {
        assert_eq!(wheel.expired(next), None);
        wakes += 1;
    }
    assert_eq!(wakes, 0, "nothing happens in the first 59 minutes");
    assert_eq!(size_of::<TimerLinks>(), 12);
}
