use super::*;
use crate::plan::*;

/// One guest on a core of its own, one remote 100 us away, an upload of 100 KB.
pub(crate) fn small() -> Plan {
    let stack = StackPlan {
        kind: StackKind::Smoltcp,
        receive_bytes: 65_535,
        send_bytes: 65_535,
        window_scale: Some(0),
        timestamps: true,
        sack: false,
        ecn: false,
        mss: None,
        isn: None,
        syn_options: Vec::new(),
        first_segments: None,
        quirks: Quirks::default(),
    };
    let link = LinkPlan { rate_bps: 1_000_000_000, delay_us: 50, queue_frames: 500, mtu: 1500 };
    Plan {
        seed: 1,
        host: HostPlan {
            arena_pages: 1024,
            arena_records: 128,
            flows_max: 256,
            turn_frames: 64,
            turn_ns: 2_000,
            frame_ns: 500,
            core: None,
            uplink_queue_frames: 1000,
            uplink_wait_us: 0,
            merges: false,
            backlog_frames: crate::plan::backlog_frames(),
            flows_per_step: crate::plan::flows_per_step(),
            wire: false,
        },
        cores: vec![CorePlan { policy: Policy::RoundRobin { slice_us: 30_000 } }],
        guests: vec![GuestPlan {
            core: 0,
            weight: 256,
            load_percent: 0,
            ring_slots: 256,
            offloads: Offloads::ALL,
            mtu: 1500,
            budget_bytes: 8 << 20,
            flows_max: 64,
            ack_offload: true,
            congestion_offload: false,
            new_reno: false,
            accepts: crate::plan::Accepts::No,
            frame_ns: 2_000,
            forwards: None,
            stack: stack.clone(),
        }],
        remotes: vec![RemotePlan {
            to_host: link,
            from_host: link,
            stack,
            offloads: Offloads::NONE,
            shares: None,
        }],
        vlan: None,
        conns: vec![ConnPlan {
            client: Machine::Remote(0),
            server: Machine::Guest(0),
            v6: false,
            opens_at: Instant::from_millis(1),
            workload: Workload::Bulk { up: 100_000, down: 0 },
            reuse: None,
        }],
        faults: Vec::new(),
        heal_at: Instant::from_secs(5),
        give_up_at: Instant::from_secs(600),
    }
}

fn run(plan: &Plan) -> RunEnd {
    let end = World::new(plan, true, None).run();
    assert_eq!(end.violation, None);
    end
}

#[test]
fn an_upload_arrives_whole_and_the_same_plan_gives_the_same_trace() {
    let plan = small();
    let end = run(&plan);
    assert!(end.ends.iter().all(|e| e.outcome == Outcome::Closed), "{:?}", end.ends);
    assert_eq!(end.bytes, 100_000);
    assert_eq!(end.trace_hash, run(&plan).trace_hash);
    let other = Plan { seed: 2, ..plan };
    assert_ne!(end.trace_hash, run(&other).trace_hash);
}

/// Every kind of fault, on the small plan's guest and remote.
fn every_kind_of_fault() -> Vec<FaultKind> {
    let (remote, guest, to_host, ppm) = (0, 0, true, 100_000);
    let machine = Machine::Guest(0);
    vec![
        FaultKind::Loss { remote, to_host, ppm },
        FaultKind::BurstLoss { remote, to_host, ppm, burst_frames: 3 },
        FaultKind::Reorder { remote, to_host, ppm, delay_us: 500 },
        FaultKind::Duplicate { remote, to_host, ppm, delay_us: 0 },
        FaultKind::Corrupt { remote, to_host, ppm },
        FaultKind::Mark { remote, to_host, ppm: 1_000_000 },
        FaultKind::Mtu { remote, to_host, mtu: 600 },
        FaultKind::Rate { remote, to_host, rate_bps: 5_000_000 },
        FaultKind::Cut { remote, to_host },
        FaultKind::Pause { guest },
        FaultKind::Reboot { guest },
        FaultKind::Destroy { guest },
        FaultKind::Migrate { guest },
        FaultKind::DriverReset { guest },
        FaultKind::StopReading { machine },
        FaultKind::DropDelivered { guest, ppm },
        FaultKind::ShrinkWindow { machine },
        FaultKind::OneWay { guest, fragments: false },
        FaultKind::OneWay { guest, fragments: true },
        FaultKind::Crash { arena: true, step: 3 },
        FaultKind::Crash { arena: false, step: 3 },
        FaultKind::OffloadOff { guest },
        FaultKind::FloodsOff { guest },
        FaultKind::Drain { guest },
        FaultKind::FlowFlood { remote, guest, per_ms: 5 },
        FaultKind::ManyAddresses { guest, addresses: 40 },
        FaultKind::Kill { guest },
        FaultKind::Forge { guest, per_ms: 5 },
    ]
}

#[test]
fn every_kind_of_fault_happens_changes_the_run_and_breaks_no_promise() {
    let mut calm = small();
    for machine in [&mut calm.guests[0].stack, &mut calm.remotes[0].stack] {
        (machine.kind, machine.ecn, machine.window_scale) = (StackKind::Strict, true, Some(2));
    }
    calm.conns[0].workload = Workload::Bulk { up: 400_000, down: 100_000 };
    calm.guests[0].congestion_offload = true;
    let undisturbed = run(&calm);
    let mut names = std::collections::BTreeSet::new();
    for kind in every_kind_of_fault() {
        let fault =
            Fault { at: Instant::from_micros(2_500), lasts: Duration::from_millis(400), kind };
        let end = run(&Plan { faults: vec![fault], ..calm.clone() });
        assert_ne!(end.trace_hash, undisturbed.trace_hash, "{kind:?} changes nothing");
        assert_eq!(end.faults.get(kind.name()), Some(&1), "{kind:?}: {:?}", end.faults);
        names.insert(kind.name());
        let ends_it = matches!(
            kind,
            FaultKind::Reboot { .. }
                | FaultKind::Destroy { .. }
                | FaultKind::Migrate { .. }
                | FaultKind::Kill { .. }
                | FaultKind::Crash { .. }
        );
        let whole = end.ends.iter().all(|e| e.outcome == Outcome::Closed);
        assert!(whole || ends_it, "{kind:?}: {:?}", end.ends);
    }
    assert_eq!(names.len(), every_kind_of_fault().len());
}

/// LIFE-13: a remote whose bytes are acknowledged late for five seconds, while one packet in a
/// hundred is lost, repeats no more than without the offload, but for ten segments: no ACK makes it
/// believe that bytes are lost which the host holds.
#[test]
fn life_13_a_remote_that_is_acknowledged_late_repeats_no_more_than_without_the_offload() {
    let seconds = Duration::from_secs;
    for (seed, timestamps, runs_alone) in
        [(1, true, true), (2, false, true), (3, true, false), (4, false, false)]
    {
        let mut plan = small();
        plan.seed = seed;
        for stack in [&mut plan.guests[0].stack, &mut plan.remotes[0].stack] {
            (stack.kind, stack.sack, stack.window_scale) = (StackKind::Strict, true, Some(7));
            (stack.receive_bytes, stack.send_bytes) = (1 << 20, 1 << 20);
            stack.timestamps = timestamps;
        }
        let link = LinkPlan { rate_bps: 10_000_000, delay_us: 5_000, queue_frames: 500, mtu: 1500 };
        (plan.remotes[0].to_host, plan.remotes[0].from_host) = (link, link);
        plan.conns[0].workload = Workload::Bulk { up: 6_500_000, down: 0 };
        let loss = FaultKind::Loss { remote: 0, to_host: true, ppm: 10_000 };
        let kinds = [loss, FaultKind::Late { guest: 0 }];
        let fault = |kind| Fault { at: Instant::ZERO, lasts: seconds(5), kind };
        plan.faults = kinds.into_iter().map(fault).collect();
        if !runs_alone {
            // It loses its core for 30 ms in each 100.
            let pause = |n: u64| Fault {
                at: Instant::ZERO + Duration::from_millis(100 * n),
                lasts: Duration::from_millis(30),
                kind: FaultKind::Pause { guest: 0 },
            };
            plan.faults.extend((1..50).map(pause));
        }
        plan.heal_at = Instant::from_secs(60);
        let mut without = plan.clone();
        without.guests[0].ack_offload = false;
        let [late, twin] = [&plan, &without].map(|plan| {
            let end = run(plan);
            assert!(end.ends.iter().all(|e| e.outcome == Outcome::Closed), "{:?}", end.ends);
            (end.weight.flows_on, end.weight.needless_from_net)
        });
        assert_eq!((late.0, twin.0), (1, 0));
        let most = twin.1 + 10 * 1448;
        assert!(late.1 <= most, "{} needless bytes, without the offload {}", late.1, twin.1);
    }
}

/// A connection with losses on both sides, whose guest loses its core again and again.
fn lossy(seed: u64) -> Plan {
    let is_even = seed.is_multiple_of(2);
    let mut plan = Plan { seed, ..small() };
    for stack in [&mut plan.guests[0].stack, &mut plan.remotes[0].stack] {
        (stack.kind, stack.window_scale) = (StackKind::Strict, Some(3));
        (stack.sack, stack.timestamps, stack.ecn) =
            (is_even, !seed.is_multiple_of(3), seed % 4 > 1);
    }
    plan.conns[0].workload = Workload::Bulk { up: 150_000, down: 50_000 };
    let (remote, to_host) = (0, is_even);
    let lasting = [
        FaultKind::Loss { remote, to_host: true, ppm: 10_000 },
        FaultKind::Loss { remote, to_host: false, ppm: 10_000 },
        FaultKind::Reorder { remote, to_host, ppm: 20_000, delay_us: 300 },
        FaultKind::DropDelivered { guest: 0, ppm: 10_000 },
    ];
    let lasts = Duration::from_secs(4);
    let fault = |kind| Fault { at: Instant::ZERO, lasts, kind };
    plan.faults = lasting.into_iter().map(fault).collect();
    plan.faults.extend((0..20).map(|n| Fault {
        at: Instant::from_millis(2 + 40 * n),
        lasts: Duration::from_millis(30),
        kind: FaultKind::Pause { guest: 0 },
    }));
    let kind = FaultKind::Late { guest: 0 };
    plan.faults.push(Fault {
        at: Instant::from_millis(60),
        lasts: Duration::from_millis(90),
        kind,
    });
    plan
}

/// Hand-overs of all guests, often enough to meet a flow at any step.
fn with_handovers(mut plan: Plan, moves: bool) -> Plan {
    let mut random = Random::new(plan.seed, "handover");
    let heal_us = plan.heal_at.as_nanos() / 1000;
    for conn in plan.conns.clone() {
        for machine in [conn.client, conn.server] {
            let Machine::Guest(guest) = machine else { continue };
            for _ in 0..30 {
                let within_us = random.pick(&[300, 3_000, 30_000, 300_000]);
                let at = conn.opens_at + Duration::from_micros(random.below(within_us));
                let at = at.min(Instant::from_micros(heal_us.max(1) - 1));
                let kind = FaultKind::Handover { guest, moves };
                plan.faults.push(Fault { at, lasts: Duration::ZERO, kind });
            }
        }
    }
    plan.faults.sort_by_key(|fault| fault.at);
    plan
}

/// The trace has every frame of the world, with its time: so each flow goes on as the one that
/// stays, frame by frame.
#[test]
fn life_09_a_world_in_which_flows_move_is_frame_by_frame_the_one_in_which_they_stay() {
    let (mut moved, mut frames) = (0, 0);
    for seed in 0..12 {
        let plan = lossy(seed);
        let [goes, stays] = [true, false].map(|moves| run(&with_handovers(plan.clone(), moves)));
        assert_eq!((seed, goes.trace_hash), (seed, stays.trace_hash));
        moved += goes.faults.get("hand-over").copied().unwrap_or(0);
        frames += goes.frames;
    }
    assert!(moved > 300 && frames > 2_000, "{moved} hand-overs, {frames} frames");
}
