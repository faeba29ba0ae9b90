use super::*;

const BUSY: Entity = Entity { weight: 256, load_percent: 100 };
const IDLE: Entity = Entity { weight: 256, load_percent: 0 };

/// Runs for `ms`; nanoseconds that each machine got, and the longest it waited in between.
fn run(core: &mut Core, ms: u64) -> Vec<(u64, u64)> {
    let mut got = vec![(0, 0); core.tasks.len()];
    let mut last = vec![BURST.as_nanos(); core.tasks.len()]; // nobody has work before
    let end = Instant::from_millis(ms);
    let mut now = core.settled_at;
    while now < end {
        let next = core.poll_timeout().unwrap_or(end).min(end).max(now);
        if let Some(c) = core.current() {
            got[c].0 += next.since(now).as_nanos();
            got[c].1 = got[c].1.max(now.as_nanos().saturating_sub(last[c]));
            last[c] = next.as_nanos();
        }
        now = next;
        core.handle_timeout(now);
    }
    got
}

#[test]
fn one_of_three_busy_machines_in_round_robin_waits_two_slices() {
    let mut core = Core::new(Policy::RoundRobin { slice_us: 30_000 }, &[BUSY; 3]);
    for (got, waited) in run(&mut core, 9_000) {
        assert!((2_970..=3_030).contains(&(got / 1_000_000)), "{got}");
        assert_eq!(waited / 1_000_000, 60);
    }
}

#[test]
fn proportional_share_follows_the_weights() {
    for policy in
        [Policy::Fair { slice_us: 3_000 }, Policy::Credit { slice_us: 30_000, boost: true }]
    {
        let heavy = Entity { weight: 512, ..BUSY };
        let mut core = Core::new(policy, &[heavy, BUSY, BUSY]);
        let got: Vec<u64> = run(&mut core, 20_000).iter().map(|g| g.0 / 1_000_000).collect();
        assert!((9_600..=10_400).contains(&got[0]), "{policy:?}: {got:?}");
        assert!((4_800..=5_200).contains(&got[1]), "{policy:?}: {got:?}");
    }
}

#[test]
fn a_quota_is_what_each_gets_and_no_more() {
    let mut core = Core::new(Policy::Quota { quota_us: 30_000, period_us: 100_000 }, &[BUSY; 2]);
    for (got, waited) in run(&mut core, 10_000) {
        assert!((2_950..=3_010).contains(&(got / 1_000_000)), "{got}");
        assert!(waited >= 35_000_000, "throttled for the rest of a period, not {waited}");
    }
}

#[test]
fn load_is_done_in_full_while_there_is_a_processor_for_it() {
    let half = Entity { weight: 256, load_percent: 40 };
    for policy in [Policy::RoundRobin { slice_us: 30_000 }, Policy::Fair { slice_us: 3_000 }] {
        let mut core = Core::new(policy, &[half, half]);
        for (got, _) in run(&mut core, 10_000) {
            assert!((3_950..=4_010).contains(&(got / 1_000_000)), "{policy:?}: {got}");
        }
    }
}

#[test]
fn with_boost_an_idle_machine_that_wakes_runs_at_once_and_without_it_waits_its_turn() {
    for (boost, waits) in [(true, false), (false, true)] {
        let mut core = Core::new(Policy::Credit { slice_us: 30_000, boost }, &[BUSY, IDLE]);
        run(&mut core, 100);
        let now = Instant::from_millis(100);
        core.wake(now, 1);
        assert_eq!(core.is_running(1), !waits);
        core.handle_timeout(now + Duration::from_millis(30));
        assert!(core.is_running(1));
        core.idle(now + Duration::from_millis(31), 1);
        assert!(core.is_running(0));
    }
}

#[test]
fn a_paused_machine_never_runs_and_the_others_have_its_time() {
    let mut core = Core::new(Policy::RoundRobin { slice_us: 10_000 }, &[BUSY; 2]);
    core.set_paused(Instant::ZERO, 0, true);
    let got = run(&mut core, 1_000);
    assert_eq!((got[0].0, got[1].0 / 1_000_000), (0, 994), "all but the first burst's coming");
    core.dedicate();
    assert!(core.is_running(1) && !core.is_running(0) && core.poll_timeout().is_none());
}

#[test]
fn a_machine_that_is_resumed_has_its_share_and_no_more() {
    let mut core = Core::new(Policy::Fair { slice_us: 3_000 }, &[BUSY; 2]);
    run(&mut core, 10);
    core.set_paused(Instant::from_millis(10), 0, true);
    run(&mut core, 3_000);
    core.set_paused(Instant::from_millis(3_000), 0, false);
    let got = run(&mut core, 3_100);
    assert!((47..=53).contains(&(got[0].0 / 1_000_000)), "{got:?}");
    // Nor if nobody else wants to run when it comes back.
    let mut core = Core::new(Policy::Fair { slice_us: 3_000 }, &[BUSY, IDLE]);
    core.set_paused(Instant::ZERO, 0, true);
    core.wake(Instant::ZERO, 1);
    run(&mut core, 3_000);
    core.idle(Instant::from_millis(3_000), 1);
    core.set_paused(Instant::from_millis(3_000), 0, false);
    run(&mut core, 3_010);
    core.wake(Instant::from_millis(3_010), 1);
    let got = run(&mut core, 3_110);
    assert!((44..=56).contains(&(got[0].0 / 1_000_000)), "{got:?}");
}

#[test]
fn who_is_preempted_by_a_boost_waits_behind_its_equals() {
    let policy = Policy::Credit { slice_us: 30_000, boost: true };
    let mut core = Core::new(policy, &[BUSY, BUSY, IDLE]);
    core.handle_timeout(core.poll_timeout().expect("bursts begin"));
    assert_eq!(core.current(), Some(0));
    let now = Instant::from_millis(20); // before the first credits: nobody is OVER
    core.wake(now, 2);
    assert_eq!(core.current(), Some(2), "it wakes with credit");
    core.idle(now, 2);
    assert_eq!(core.current(), Some(1), "and then it is the next one's turn");
    assert_eq!(core.poll_timeout(), Some(Instant::from_millis(30)), "credits");
    core.handle_timeout(Instant::from_millis(30));
    assert_eq!(core.poll_timeout(), Some(Instant::from_millis(50)), "with a whole slice");
}

/// The cause of the jumps in Figures 5 and 6: the VM that has the core after some turns of a driver
/// domain that shares it is their number modulo the number of VMs.
#[test]
fn every_preemption_by_a_boost_hands_the_core_on_to_the_next() {
    let policy = Policy::Credit { slice_us: 30_000, boost: true };
    let mut core = Core::new(policy, &[BUSY, BUSY, BUSY, IDLE]);
    core.handle_timeout(core.poll_timeout().expect("bursts begin"));
    for turn in 1..=10 {
        let now = Instant::from_millis(10 + turn);
        core.wake(now, 3);
        core.idle(now, 3);
        assert_eq!(core.current(), usize::try_from(turn % 3).ok(), "after {turn} turns");
    }
}

#[test]
fn who_keeps_its_place_when_preempted_goes_on_with_the_rest_of_its_slice() {
    let policy = Policy::KeepsPlace { slice_us: 30_000 };
    let mut core = Core::new(policy, &[BUSY, BUSY, IDLE]);
    core.handle_timeout(core.poll_timeout().expect("bursts begin"));
    assert_eq!(core.current(), Some(0));
    let ends = core.poll_timeout();
    for ms in [10, 20] {
        core.wake(Instant::from_millis(ms), 2);
        assert_eq!(core.current(), Some(2), "it wakes with credit");
        core.idle(Instant::from_millis(ms + 1), 2);
        assert_eq!(core.current(), Some(0), "and then the same goes on");
    }
    assert_eq!(ends, Some(Instant::from_millis(30)), "credits, before the slice is over");
    core.handle_timeout(Instant::from_millis(30));
    let next = core.poll_timeout().expect("a slice ends");
    assert!(next < Instant::from_millis(40), "two milliseconds later, not a whole slice: {next:?}");
    core.handle_timeout(next);
    assert_eq!(core.current(), Some(1));
}
