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
            backlog_frames: crate::plan::backlog_frames(),
        },
        cores: vec![CorePlan { policy: Policy::RoundRobin { slice_us: 30_000 } }],
        guests: vec![GuestPlan {
            core: 0,
            weight: 256,
            load_percent: 0,
            ring_slots: 256,
            offloads: true,
            mtu: 1500,
            budget_bytes: 8 << 20,
            flows_max: 64,
            ack_offload: true,
            frame_ns: 2_000,
            stack: stack.clone(),
        }],
        remotes: vec![RemotePlan { to_host: link, from_host: link, stack, shares: None }],
        conns: vec![ConnPlan {
            client: Machine::Remote(0),
            server: Machine::Guest(0),
            v6: false,
            opens_at: Instant::from_millis(1),
            workload: Workload::Bulk { up: 100_000, down: 0 },
            client_port: None,
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
