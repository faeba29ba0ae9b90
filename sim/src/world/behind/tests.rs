//! The five tests of a guest that forwards (FWD-01 to FWD-06), each beside its twin without the
//! offload: at most 1.2 times as long, whether the guest shows that it is a router or hides it.

use super::*;
use crate::plan::*;
use crate::stack::Outcome;
use crate::world::RunEnd;
use crate::world::tests::small;

/// A link behind the guest: Mbit/s, microseconds each way, frames in the queue, MTU.
fn link(mbit_s: u64, delay_us: u32, queue_frames: usize, mtu: u16) -> LinkPlan {
    LinkPlan { rate_bps: mbit_s * 1_000_000, delay_us, queue_frames, mtu }
}

/// An upload of so many bytes to a machine behind the guest.
fn routed(behind: LinkPlan, bytes: u64) -> Plan {
    let mut plan = small();
    for stack in [&mut plan.guests[0].stack, &mut plan.remotes[0].stack] {
        (stack.kind, stack.sack, stack.window_scale) = (StackKind::Strict, true, Some(7));
        (stack.receive_bytes, stack.send_bytes) = (1 << 20, 1 << 20);
    }
    let forwards = ForwardPlan { to_end: behind, from_end: behind, hides_ttl: false, sleeps: None };
    plan.guests[0].forwards = Some(forwards);
    // R's own way holds a whole window.
    plan.remotes[0].to_host.queue_frames = 2000;
    plan.conns[0].workload = Workload::Bulk { up: bytes, down: 0 };
    plan.heal_at = Instant::from_secs(400);
    plan.give_up_at = Instant::from_secs(4000);
    plan
}

/// When the machine has read all, in milliseconds.
fn delivered_ms(plan: &Plan) -> u64 {
    let end: RunEnd = World::new(plan, true, None).run();
    assert_eq!(end.violation, None);
    assert!(end.ends.iter().all(|e| e.outcome == Outcome::Closed), "{:?}", end.ends);
    let reads = end.ends.iter().filter(|e| matches!(e.machine, Machine::Guest(_)));
    let at = reads.filter_map(|e| e.delivered_at).max().expect("it was delivered");
    at.as_millis()
}

/// Judged beside the twin, as a router that shows itself and as one that hides.
fn beside_its_twin(plan: &Plan) {
    [false, true].into_iter().for_each(|hides_ttl| compare(plan, hides_ttl, 2));
}

fn compare(plan: &Plan, hides_ttl: bool, more_ms: u64) {
    let with = |offload: bool, hides_ttl: bool| {
        let mut plan = plan.clone();
        plan.guests[0].ack_offload = offload;
        if let Some(forwards) = &mut plan.guests[0].forwards {
            forwards.hides_ttl = hides_ttl;
        }
        delivered_ms(&plan)
    };
    let (ms, without) = (with(true, hides_ttl), with(false, hides_ttl));
    let most = without * 12 / 10 + more_ms;
    assert!(ms <= most, "{ms} ms instead of {without}, the TTL hidden: {hides_ttl}");
}

#[test]
fn fwd_03_a_narrower_link_behind_the_guest() {
    for v6 in [false, true] {
        let mut plan = routed(link(1000, 50, 500, 1400), 1_000_000);
        plan.conns[0].v6 = v6;
        beside_its_twin(&plan);
    }
}

#[test]
fn fwd_04_a_slow_link_with_a_queue_behind_the_guest() {
    beside_its_twin(&routed(link(10, 20_000, 66, 1500), 3_000_000));
}

#[test]
fn fwd_04_a_machine_400_ms_behind_the_guest() {
    beside_its_twin(&routed(link(100, 200_000, 1000, 1500), 2_000_000));
}

/// For as long as the remote waits by itself: two minutes are in core's trace tests.
#[test]
fn fwd_06_a_machine_behind_the_guest_that_sleeps() {
    for delay_us in [20, 1_000] {
        let mut plan = routed(link(100, delay_us, 500, 1500), 8_000_000);
        if let Some(forwards) = &mut plan.guests[0].forwards {
            forwards.sleeps = Some((100, 40_100));
        }
        beside_its_twin(&plan);
    }
}

#[test]
fn fwd_02_a_container_of_the_guest() {
    for mtu in [1500, 1400] {
        beside_its_twin(&routed(link(10_000, 20, 1000, mtu), 4_000_000));
    }
}
