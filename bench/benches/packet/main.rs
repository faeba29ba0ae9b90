//! The cost of a packet, and the size of a flow.
//!
//! The bench drives the worker's turn (`core::turn`) over ports in memory. Its paths:
//!
//! - `early-ack`: a data segment of an offloaded flow is read, stored, acknowledged to the remote
//!   and given to the guest;
//! - `guest-ack`: the guest's pure ACK of such a segment releases the bytes and goes no further;
//! - `pass`: a data segment of a flow that must not be touched (MPTCP) is forwarded;
//! - `hand-over`: a data segment of a guest that floods is stored until there is room for it;
//! - `net-ack`: the remote's ACK of such a segment is judged and shown to the guest, and lets the
//!   next one leave ([`floods`]);
//! - `tso-hand-over`, `tso-net-ack`: the same of super-segments, and of an ACK for each.
//!
//! **Instructions** are counted by callgrind, over turns of one frame each; they are exact.
//! `engine` is the part of [`ENGINE`]: judging the frame, and making and routing the ACK. `turn` is
//! all of the turn, reading and delivery too; `departure` is what of it makes frames of what guests
//! have handed over, `delivery` what of it gives frames to the guest. A sent segment (`send`) is a
//! `hand-over` and all departures of both its paths, `net-ack` the rest, with the ACK for the
//! guest. Copies of the payload are left out: the path is counted with both of [`PAYLOADS`], and
//! the straight line through the two is read at 0 bytes. `tso-send` is a segment's share of the
//! same for a super-segment, `tso-net-ack` the whole ACK of one; they are counted with full
//! segments, for half ones leave at another pace, and of what they cost the copies alone are left
//! out, not their pages.
//!
//! **Nanoseconds** are a frame's share of a turn of [`BATCH`] full frames, the median of many.
//! Before the counting starts all flows of a row are in the table and have carried a segment. Then
//! packets go to flow after flow in strides, so that with many flows none is in a cache. With 32
//! flows the work is the same, and all of it is in a cache; with one a turn makes one ACK and one
//! super-segment.
//! Checksums are partial, as a tap hands them over, so no payload is summed up. An offloaded flow
//! is promised at least 80 KiB; that is address space here, and no memory.
//!
//! `flow_bytes` is what the process grew by (RSS) from before the engine was made until 1,000,000
//! offloaded flows were idle, for each; 100,000 were opened per second of the engine's time.
//!
//! `cargo bench -p nightporter-bench --bench packet -- counts` counts the instructions alone and
//! compares them with `counts.txt`: see [`ratchet`].

mod callgrind;
mod floods;
mod ratchet;
mod world;

use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::{env, fs};

use nightporter_core::monitor::log::Log;
use nightporter_core::monitor::{Side, Way};
use nightporter_core::time::Instant;
use serde_json::{Value, json};
use world::{Frame, Kind, Outcome, World};

const PATHS: [&str; 3] = ["early-ack", "guest-ack", "pass"];
/// Those of a flooding guest, of which only the instructions are counted.
const FLOOD_PATHS: [&str; 2] = ["hand-over", "net-ack"];
/// The same with super-segments.
const TSO_PATHS: [&str; 2] = ["tso-hand-over", "tso-net-ack"];
/// Flows of the load.
const LOAD_FLOWS: usize = 10_000;
/// Flows in the table of the rows that are timed.
const FLOWS: [usize; 4] = [1, BATCH, 10_000, FLOWS_MAX];
const FLOWS_MAX: usize = 1_000_000;
/// Payload bytes of a data segment: a full one on Ethernet as Linux sends it, and half of it.
const PAYLOADS: [usize; 2] = [1448, 724];
/// Frames of a turn that is timed.
const BATCH: usize = 32;
/// Turns that are timed.
const TURNS_TIMED: usize = 4_000;
/// Turns, of one frame each, whose instructions are counted.
const TURNS_COUNTED: usize = 3_200;
/// From flow to flow; has no divisor in common with any of [`FLOWS`].
const STRIDE: usize = 618_033;
/// The engine's functions whose sum is `engine` in a row; `poll_delivery` is for the guest's ring.
const ENGINE: [&str; 5] =
    ["stage", "fetch_flows", "handle_staged", "make_pending_acks", "route_next"];

type Error = Box<dyn std::error::Error>;

/// One row's numbers, on the command line of the process that measures it.
#[derive(Clone, Copy)]
struct Row {
    flows: usize,
    payload: usize,
    /// Frames of a turn.
    batch: usize,
    turns: usize,
}

/// The only function under measurement; callgrind finds it by its name.
#[inline(never)]
fn counted(world: &mut World) -> Outcome {
    black_box(black_box(world).turn())
}

/// A frame passes while its VM is monitored. Found by its name, too.
#[inline(never)]
fn counted_log(log: &mut Log, frame: &[u8]) {
    black_box(log).push(Instant::ZERO, (Side::Net, Way::ToGuest), &[black_box(frame)]);
}

/// The monitor's rows: full frames, and ACKs.
const LOG_PATHS: [&str; 2] = ["monitor", "monitor-ack"];

fn run_log(path: &str, payload: usize, turns: usize) {
    let mut log = Log::new(0);
    let frame = vec![0; if path == LOG_PATHS[0] { payload + 66 } else { 66 }];
    for turn in 0..turns {
        counted_log(&mut log, &frame);
        if turn % BATCH == 0 {
            drop(log.take());
        }
    }
}

/// The result, and its time in nanoseconds.
fn stopwatch<T>(it: impl FnOnce() -> T) -> (T, f64) {
    let start = std::time::Instant::now();
    let result = it();
    #[expect(clippy::cast_precision_loss, reason = "small numbers")]
    let ns = start.elapsed().as_nanos() as f64;
    (result, ns)
}

/// [`counted`], timed: nanoseconds per frame.
fn timed(world: &mut World, frames: Vec<Frame>, expected: Outcome) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "small numbers")]
    let count = frames.len() as f64;
    world.lay(frames);
    let (outcome, ns) = stopwatch(|| counted(world));
    // An absorbed ACK may open the window, which makes a frame.
    assert!(outcome.to_net >= expected.to_net, "{outcome:?} is not {expected:?}");
    assert_eq!(outcome.to_guest, expected.to_guest, "this is not the path");
    ns / count
}

/// Bytes of memory this process has in use.
fn resident_bytes() -> Result<usize, Error> {
    let statm = fs::read_to_string("/proc/self/statm")?;
    let pages = statm.split(' ').nth(1).ok_or("statm has a second field")?;
    Ok(pages.parse::<usize>()? * 4096)
}

/// One row, as a process of its own: prints the median time per packet and the bytes per flow.
fn run(path: &str, row: Row) -> Result<(), Error> {
    let Row { flows, payload, batch, turns } = row;
    let before = resident_bytes()?;
    let mut world = World::new(flows, if path == "pass" { Kind::Passed } else { Kind::Offloaded });
    let flow_bytes = (resident_bytes()? - before) / flows - World::OWN_BYTES_PER_FLOW;
    // Of one flow a turn makes one ACK and one super-segment.
    let made = if flows < batch { 1 } else { batch };
    let acked = Outcome { to_net: made, to_guest: made };
    let absorbed = Outcome::default();
    let passed = Outcome { to_guest: batch, to_net: 0 };
    let mut times = Vec::with_capacity(turns);
    for turn in 0..turns {
        world.tick();
        let flow = |i: usize| (turn * batch + i) * STRIDE % flows;
        let (data, acks): (Vec<Frame>, Vec<Frame>) =
            (0..batch).map(|i| (world.data(flow(i), payload), world.guest_ack(flow(i)))).unzip();
        match path {
            "pass" => times.push(timed(&mut world, data, passed)),
            "early-ack" => {
                times.push(timed(&mut world, data, acked));
                world.lay_and_turn(acks);
            }
            _ => {
                world.lay_and_turn(data);
                times.push(timed(&mut world, acks, absorbed));
            }
        }
    }
    times.sort_by(f64::total_cmp);
    println!("{}", json!({ "ns": times[turns / 2], "flow_bytes": flow_bytes }));
    Ok(())
}

/// A row of a guest that floods.
fn run_flood(path: &str, payload: usize, turns: usize) {
    let tso = path.strip_prefix("tso-");
    let segments = if tso.is_some() { floods::TSO_SEGMENTS } else { 1 };
    let mut world = World::new(1, Kind::Floods(payload, segments));
    let (path, payload) = (tso.unwrap_or(path), payload * segments);
    floods::warm_up(&mut world, 0, payload, segments);
    // The pace may hold a super-segment back until the next turn.
    let acked = Outcome { to_net: usize::from(tso.is_none()), to_guest: 1 };
    for _ in 0..turns {
        world.wait(floods::CYCLE);
        floods::top_up(&mut world, 0, payload);
        let data = vec![world.handed(0, payload)];
        let ack = vec![world.net_ack(0, payload)];
        if path == "hand-over" {
            timed(&mut world, data, Outcome::default());
            world.departed();
            world.lay_and_turn(ack);
        } else {
            world.lay_and_turn(data);
            timed(&mut world, ack, acked);
            world.departed();
        }
    }
}

/// Runs this program for one row, perhaps under another one; returns its output.
fn child(prefix: &[&str], path: &str, row: Row) -> Result<Value, Error> {
    let numbers = [row.flows, row.payload, row.batch, row.turns].map(|n| n.to_string());
    let [flows, payload, batch, turns] = &numbers;
    spawn(prefix, &[path, flows, payload, batch, turns])
}

/// Runs this program with such arguments, perhaps under another one.
fn spawn(prefix: &[&str], arguments: &[&str]) -> Result<Value, Error> {
    let this = env::current_exe()?.display().to_string();
    let command = [prefix, &[&this], arguments].concat();
    let output = Command::new(command[0])
        .args(&command[1..])
        .stderr(Stdio::inherit())
        .output()
        .map_err(|e| format!("{}: {e}", command[0]))?;
    if !output.status.success() {
        return Err(format!("{arguments:?} failed: {}", output.status).into());
    }
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// Instructions per packet.
#[derive(Clone, Copy)]
struct Instructions {
    engine: f64,
    departure: f64,
    delivery: f64,
    turn: f64,
}

/// Counts a path with one flow and segments of `payload` bytes: what it costs, and the engine's
/// copies of that. The profiles stay in `dir` for `callgrind_annotate`.
fn count(dir: &Path, path: &str, payload: usize) -> Result<(Instructions, f64), Error> {
    let file = dir.join(format!("callgrind.{path}.{payload}.out"));
    let out_file = format!("--callgrind-out-file={}", file.display());
    let collect = "--toggle-collect=*packet::counted*";
    let valgrind = ["valgrind", "--quiet", "--tool=callgrind", collect, &out_file];
    child(&valgrind, path, Row { flows: 1, payload, batch: 1, turns: TURNS_COUNTED })?;
    let text = fs::read_to_string(&file)?;
    let per_turn = |sum: u64| {
        #[expect(clippy::cast_precision_loss, reason = "small numbers")]
        let per_turn = sum as f64 / TURNS_COUNTED as f64;
        per_turn
    };
    let turn = per_turn(callgrind::total(&text).ok_or("no totals")?);
    let engine = per_turn(callgrind::inclusive(&text, &ENGINE));
    let [departure, delivery] = ["poll_departure", "poll_delivery"]
        .map(|method| per_turn(callgrind::inclusive(&text, &[method])));
    Ok((Instructions { engine, departure, delivery, turn }, per_turn(callgrind::copies(&text))))
}

/// Counts a path with one flow, read at 0 bytes of payload.
fn instructions(dir: &Path, path: &str) -> Result<Instructions, Error> {
    let [full, half] = PAYLOADS.map(|payload| count(dir, path, payload));
    let ((full, _), (half, _)) = (full?, half?);
    // `full` is twice `half`.
    let without_payload = |f: fn(&Instructions) -> f64| 2.0 * f(&half) - f(&full);
    Ok(Instructions {
        engine: without_payload(|i| i.engine),
        departure: without_payload(|i| i.departure),
        delivery: without_payload(|i| i.delivery),
        turn: without_payload(|i| i.turn),
    })
}

/// Instructions of a segment that is sent for a guest, and of the ACK of its remote; then of
/// super-segments.
fn flood_instructions(dir: &Path) -> Result<[(&'static str, f64); 4], Error> {
    let [over, ack] = FLOOD_PATHS.map(|path| instructions(dir, path));
    let (over, ack) = (over?, ack?);
    let [tso_over, tso_ack] = TSO_PATHS.map(|path| count(dir, path, PAYLOADS[0]));
    let ((tso_over, copies), (tso_ack, _)) = (tso_over?, tso_ack?);
    let tso_sent = tso_over.engine - copies + tso_over.departure + tso_ack.departure;
    Ok([
        ("send", over.engine + over.departure + ack.departure),
        ("net-ack", ack.engine + ack.delivery),
        ("tso-send", tso_sent / f64::from(u8::try_from(floods::TSO_SEGMENTS)?)),
        ("tso-net-ack", tso_ack.engine + tso_ack.delivery),
    ])
}

/// Prints whether `value` is small enough.
fn aim(what: &str, value: f64, at_most: f64) {
    let verdict = if value <= at_most { "met" } else { "MISSED" };
    println!("{what}: {value:.1}, aim at most {at_most}: {verdict}");
}

/// Where profiles and results go.
fn directory() -> Result<PathBuf, Error> {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("bench");
    fs::create_dir_all(&dir)?;
    Ok(dir)
}

fn drive() -> Result<(), Error> {
    let dir = directory()?;
    let mut counts = Vec::new();
    println!(
        "path        engine    turn   (instructions per packet, without the payload's copies)"
    );
    for path in PATHS {
        let of = instructions(&dir, path)?;
        println!("{path:<10} {:>7.0} {:>7.0}", of.engine, of.turn);
        counts.push(of);
    }
    let flood = flood_instructions(&dir)?;
    for (row, count) in flood {
        println!("{row:<10} {count:>7.0}");
    }
    for path in LOG_PATHS {
        println!("{path:<11} {:>6.0}", instructions(&dir, path)?.turn);
    }
    println!("\npath           flows      ns   (per packet, in turns of {BATCH})");
    let mut times = Vec::new();
    for path in PATHS {
        for flows in FLOWS {
            let row = Row { flows, payload: PAYLOADS[0], batch: BATCH, turns: TURNS_TIMED };
            let ns = child(&[], path, row)?["ns"].as_f64().ok_or("no time")?;
            println!("{path:<10} {flows:>9} {ns:>7.0}");
            times.push((path, flows, ns));
        }
    }
    let row = Row { flows: FLOWS_MAX, payload: PAYLOADS[0], batch: 1, turns: 1 };
    let flow_bytes = child(&[], "early-ack", row)?["flow_bytes"].as_f64().ok_or("no bytes")?;
    let load = spawn(&[], &["load", &LOAD_FLOWS.to_string()])?;
    println!("\nload of {LOAD_FLOWS} paced flows: {load}\n");
    for ((path, of), at_most) in PATHS.iter().zip(&counts).zip([700.0, 500.0, 300.0]) {
        aim(&format!("instructions of {path} in the engine"), of.engine, at_most);
    }
    for ((row, count), at_most) in flood.into_iter().zip([500.0, 400.0, 500.0, 400.0]) {
        aim(&format!("instructions of {row}"), count, at_most);
    }
    let (few, many) = (times[1].2, times[FLOWS.len() - 1].2);
    aim(&format!("ns of early-ack, {FLOWS_MAX} flows to {BATCH}"), many / few, 2.5);
    aim("bytes of an idle offloaded flow", flow_bytes, 512.0);
    let counts = PATHS.iter().zip(counts).map(
        |(path, of)| json!({ "path": path, "engine": of.engine.round(), "turn": of.turn.round() }),
    );
    let flood = flood.map(|(row, count)| json!({ "path": row, "engine": count.round() }));
    let times = times
        .iter()
        .map(|(path, flows, ns)| json!({ "path": path, "flows": flows, "ns": ns.round() }));
    let result = json!({ "instructions": counts.chain(flood).collect::<Value>(), "load": load,
                         "nanoseconds": times.collect::<Value>(),
                         "flow_bytes": flow_bytes, "forwarding": null });
    fs::write(dir.join("result.json"), serde_json::to_string_pretty(&result)? + "\n")?;
    Ok(())
}

fn main() -> Result<(), Error> {
    let args: Vec<String> = env::args().skip(1).filter(|a| a != "--bench").collect();
    match &args[..] {
        [] => drive(),
        [counts] if counts == "counts" => ratchet::check(&directory()?),
        [load, flows] if load == "load" => floods::run_load(flows.parse()?),
        [path, _, payload, _, turns]
            if FLOOD_PATHS.iter().chain(&TSO_PATHS).any(|known| known == path) =>
        {
            run_flood(path, payload.parse()?, turns.parse()?);
            println!("{}", json!({}));
            Ok(())
        }
        [path, _, payload, _, turns] if LOG_PATHS.contains(&path.as_str()) => {
            run_log(path, payload.parse()?, turns.parse()?);
            println!("{}", json!({}));
            Ok(())
        }
        [path, flows, payload, batch, turns] => {
            let (flows, payload) = (flows.parse()?, payload.parse()?);
            run(path, Row { flows, payload, batch: batch.parse()?, turns: turns.parse()? })
        }
        _ => Err("arguments: none, `counts`, or PATH FLOWS PAYLOAD BATCH TURNS".into()),
    }
}
