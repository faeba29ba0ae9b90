//! Guests that flood: the cost of a segment that the host sends for one, and many of them at once.
//!
//! **A flow in steady state** (`hand-over`, `net-ack`). CUBIC, in congestion avoidance after a
//! loss, with about 20 segments under way and some that wait. Each millisecond the guest hands over
//! a frame, for which there is no room, and the remote acknowledges as much, which lets as much
//! leave. A frame is a segment, or [`TSO_SEGMENTS`] of them, as of a guest with TSO and a remote
//! with GRO; then nearly three frames are under way.
//!
//! **A load** ([`run_load`]). Every flow has a round trip of its own in which its window leaves as
//! the pace spreads it, all in virtual time: a turn each [`LOAD_TICK`].

use std::collections::{BTreeMap, VecDeque};

use nightporter_core::time::Duration;
use serde_json::json;

use crate::world::{Flood, Frame, Kind, World};
use crate::{Error, stopwatch};

/// Time from a segment of a flow to its next.
pub(crate) const CYCLE: Duration = Duration::from_millis(1);
/// Segments of a super-segment: as many full ones as an IPv4 packet has room for.
pub(crate) const TSO_SEGMENTS: usize = 45;
/// Frames under way before the loss of the warm-up, of one segment and of many; seven tenths are
/// left of them (RFC 9438 section 4.6).
const BEFORE_LOSS: [u32; 2] = [30, 4];
/// Turns until all is as it will stay.
const TURNS: u32 = 300;
/// Frames that wait for room.
const WAITING: u32 = 8;

/// Brings a flow, whose guest hands over frames of `payload` bytes, of `segments` each, to where it
/// is measured.
pub(crate) fn warm_up(world: &mut World, flow: usize, payload: usize, segments: usize) {
    let len = u32::try_from(payload).expect("a frame");
    let before_loss = BEFORE_LOSS[usize::from(segments > 1)] * len;
    let under_way = |world: &World| {
        let Flood { left, acked, .. } = world.flood(flow);
        left.wrapping_sub(acked)
    };
    while under_way(world) < before_loss {
        top_up(world, flow, payload);
        let acked = under_way(world).min(len);
        if acked > 0 {
            let ack = world.net_ack(flow, acked as usize);
            world.lay_and_turn(vec![ack]);
        }
        world.wait(CYCLE);
    }
    let sack = world.net_sack(flow, payload);
    world.lay_and_turn(vec![sack]);
    world.wait(CYCLE);
    let all = usize::try_from(under_way(world)).expect("small");
    let ack = world.net_ack(flow, all);
    world.lay_and_turn(vec![ack]);
    for _ in 0..TURNS {
        top_up(world, flow, payload);
        let full = under_way(world) >= before_loss * 6 / 10; // else the pace spreads it
        let ack = full.then(|| world.net_ack(flow, payload));
        world.lay_and_turn(ack.into_iter().collect());
        world.wait(CYCLE);
    }
}

/// The guest hands over enough data to keep some waiting.
pub(crate) fn top_up(world: &mut World, flow: usize, payload: usize) {
    let waiting = WAITING * u32::try_from(payload).expect("a frame");
    loop {
        let Flood { handed, left, .. } = world.flood(flow);
        if handed.wrapping_sub(left) >= waiting {
            return;
        }
        let frame = world.handed(flow, payload);
        world.lay_and_turn(vec![frame]);
    }
}

/// From a segment to its acknowledgement.
const LOAD_RTT: Duration = Duration::from_millis(40);
/// The time of a turn: the tick of the wheel of senders.
const LOAD_TICK: Duration = Duration::from_micros(64);
/// The ticks of a run, and those before the measurement.
const LOAD_TICKS: [usize; 2] = [8_000, 4_000];
/// Payload bytes of a segment.
const LOAD_PAYLOAD: usize = 1448;

/// So many flows send, as fast as windows of about 11 segments let them: prints nanoseconds of the
/// engine's turns per segment, and how many segments of a flow leave in one instant.
pub(crate) fn run_load(flows: usize) -> Result<(), Error> {
    let mut world = World::new(flows, Kind::Floods(LOAD_PAYLOAD, 1));
    world.set_remote_window(LOAD_PAYLOAD * 11);
    let [ticks, before] = LOAD_TICKS;
    let mut acks: VecDeque<(usize, usize, usize)> = VecDeque::new();
    let (mut segments, mut ns) = (0, 0.0);
    let mut bursts: BTreeMap<usize, usize> = BTreeMap::new();
    for tick in 0..ticks {
        let mut frames: Vec<Frame> = vec![];
        // All begin within a round trip, and not at once.
        let begin = |tick: usize| flows.min(flows * tick * 64 / 40_000);
        for flow in begin(tick)..begin(tick + 1) {
            frames.extend((0..22).map(|_| world.handed(flow, LOAD_PAYLOAD)));
        }
        let mut laid = vec![];
        while let Some((_, flow, bytes)) = acks.pop_front_if(|(due, _, _)| *due <= tick) {
            laid.push(world.net_ack(flow, bytes));
            frames.extend((0..bytes / LOAD_PAYLOAD).map(|_| world.handed(flow, LOAD_PAYLOAD)));
        }
        laid.append(&mut frames);
        let ((), taken) = stopwatch(|| world.wait_and_turn(LOAD_TICK, laid));
        let mut of_flow: BTreeMap<usize, usize> = BTreeMap::new();
        for (flow, bytes) in world.departed() {
            *of_flow.entry(flow).or_default() += bytes;
            let due = tick + usize::try_from(LOAD_RTT.as_nanos() / LOAD_TICK.as_nanos())?;
            acks.push_back((due, flow, bytes));
        }
        if tick >= before {
            ns += taken;
            for bytes in of_flow.values() {
                *bursts.entry(bytes.div_ceil(LOAD_PAYLOAD)).or_default() += 1;
                segments += bytes / LOAD_PAYLOAD;
            }
        }
    }
    #[expect(clippy::cast_precision_loss, reason = "small numbers")]
    let ns = ns / segments as f64;
    println!("{}", json!({ "ns": ns, "segments": segments, "bursts": bursts }));
    Ok(())
}
