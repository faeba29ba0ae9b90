//! What a packet costs in `core`, and what a flow weighs.
//!
//! Without arguments this is a driver: for each row it runs itself twice, as it is for nanoseconds
//! and under callgrind for instructions. Only [`counted`] counts in both: what the worker does with
//! a batch of one packet, which is `handle_frame`, `handle_batch_end`, and `poll_transmit` until
//! there is no more. The paths:
//!
//! - `early-ack`: a data segment of an offloaded flow is stored, and its ACK to the remote made;
//! - `guest-ack`: the guest's pure ACK of such a segment releases the bytes and goes no further;
//! - `pass`: a data segment of a flow that must not be touched (MPTCP) is forwarded.
//!
//! Before the counting starts all flows of a row are in the table and have carried a segment. Then
//! packets go to flow after flow in strides, so that with many flows none is in a cache. With one
//! flow, [`BATCH`] segments are in its store at a time. Checksums are partial, as a tap hands them
//! over, so no payload is summed up. An offloaded flow is promised at least 80 KiB. That is only
//! address space here, but valgrind has no 80 GB of it: at 1,000,000 flows half are offloaded, and
//! the others are in the same table and pass for lack of budget.
//!
//! `instructions` leaves out the copy of the payload: `early-ack` is counted with both of
//! [`PAYLOADS`], and the straight line through the two is read at 0 bytes.
//! `instructions_with_copy` is at the larger one. `flow_bytes` is what the process grew by (RSS)
//! from before the engine was made until 1,000,000 offloaded flows were idle, for each; they were
//! opened at 100,000 per second of the engine's time.

mod world;

use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::{env, fs};

use serde_json::{Value, json};
use world::{Frame, Outcome, World};

const PATHS: [&str; 3] = ["early-ack", "guest-ack", "pass"];
/// Flows in the table.
const FLOWS: [usize; 3] = [1, 10_000, FLOWS_MAX];
const FLOWS_MAX: usize = 1_000_000;
/// Most of them that are offloaded in a row that is counted; see the header.
const OFFLOADED_MAX: usize = 500_000;
/// Payload bytes of a data segment: a full one on Ethernet as Linux sends it, and half of it.
const PAYLOADS: [usize; 2] = [1448, 724];
/// Packets between two looks at the clock.
const BATCH: usize = 32;
/// Batches that are timed; the median counts.
const BATCHES_TIMED: usize = 4_000;
/// Batches whose instructions are counted.
const BATCHES_COUNTED: usize = 100;
/// From flow to flow; has no divisor in common with any of [`FLOWS`].
const STRIDE: usize = 618_033;

type Error = Box<dyn std::error::Error>;

/// The only function under measurement; callgrind finds it by its name.
#[inline(never)]
fn counted(world: &mut World, frames: &mut [Frame]) -> Outcome {
    black_box(world.process(black_box(frames)))
}

/// [`counted`], timed: nanoseconds per frame.
fn timed(world: &mut World, frames: &mut [Frame], expected: Outcome) -> f64 {
    #[expect(clippy::disallowed_types, reason = "the bench has a clock, what it measures has not")]
    let start = std::time::Instant::now();
    let outcome = counted(world, frames);
    #[expect(clippy::cast_precision_loss, reason = "small numbers")]
    let ns = start.elapsed().as_nanos() as f64 / frames.len() as f64;
    let made = outcome.made; // an absorbed ACK may open the window, which makes a frame
    assert!(made >= expected.made, "{made} frames were made, not {}", expected.made);
    assert_eq!(Outcome { made: expected.made, ..outcome }, expected, "this is not the path");
    ns
}

/// Bytes of memory this process has in use.
fn resident_bytes() -> Result<usize, Error> {
    let statm = fs::read_to_string("/proc/self/statm")?;
    let pages = statm.split(' ').nth(1).ok_or("statm has a second field")?;
    Ok(pages.parse::<usize>()? * 4096)
}

/// One row, as a process of its own: prints the median time per packet and the bytes per flow.
fn run(
    path: &str,
    flows: usize,
    offloaded: usize,
    payload: usize,
    batches: usize,
) -> Result<(), Error> {
    let before = resident_bytes()?;
    let mut world = World::new(flows, offloaded, path == "pass");
    let used = if path == "pass" { flows } else { offloaded };
    let flow_bytes = (resident_bytes()? - before) / flows - World::OWN_BYTES_PER_FLOW;
    let acked = Outcome { absorbed: BATCH, made: BATCH, ..Outcome::default() };
    let absorbed = Outcome { absorbed: BATCH, ..Outcome::default() };
    let forwarded = Outcome { forwarded: BATCH, ..Outcome::default() };
    let mut times = Vec::with_capacity(batches);
    for batch in 0..batches {
        world.tick();
        let flow = |i: usize| (batch * BATCH + i) * STRIDE % used;
        let (mut data, mut acks): (Vec<Frame>, Vec<Frame>) =
            (0..BATCH).map(|i| (world.data(flow(i), payload), world.guest_ack(flow(i)))).unzip();
        if path == "pass" {
            times.push(timed(&mut world, &mut data, forwarded));
            continue;
        }
        if path == "early-ack" {
            times.push(timed(&mut world, &mut data, acked));
        } else {
            assert_eq!(world.process(&mut data), acked, "early acknowledgement");
        }
        world.deliver();
        if path == "guest-ack" {
            times.push(timed(&mut world, &mut acks, absorbed));
        } else {
            world.process(&mut acks);
        }
    }
    times.sort_by(f64::total_cmp);
    println!("{}", json!({ "ns": times[batches / 2], "flow_bytes": flow_bytes }));
    Ok(())
}

/// Runs this program for one row, perhaps under another one; returns what it prints.
fn child(prefix: &[&str], path: &str, numbers: [usize; 4]) -> Result<Value, Error> {
    let this = env::current_exe()?.display().to_string();
    let command = [prefix, &[&this, path]].concat();
    let output = Command::new(command[0])
        .args(&command[1..])
        .args(numbers.map(|n| n.to_string()))
        .stderr(Stdio::inherit())
        .output()
        .map_err(|e| format!("{}: {e}", command[0]))?;
    if !output.status.success() {
        return Err(format!("{path} {numbers:?} failed: {}", output.status).into());
    }
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// Instructions per packet, by callgrind; its profile stays in `dir` for `callgrind_annotate`.
fn instructions(dir: &Path, path: &str, flows: usize, payload: usize) -> Result<f64, Error> {
    let profile = dir.join(format!("callgrind.{path}.{flows}.{payload}.out"));
    let out_file = format!("--callgrind-out-file={}", profile.display());
    let callgrind = [
        "valgrind",
        "--quiet",
        "--tool=callgrind",
        "--toggle-collect=*packet::counted*",
        &out_file,
    ];
    child(&callgrind, path, [flows, flows.min(OFFLOADED_MAX), payload, BATCHES_COUNTED])?;
    let text = fs::read_to_string(&profile)?;
    let total = text.lines().find_map(|l| l.strip_prefix("totals: ")).ok_or("no totals")?;
    #[expect(clippy::cast_precision_loss, reason = "small numbers")]
    Ok(total.trim().parse::<f64>()? / (BATCHES_COUNTED * BATCH) as f64)
}

/// Measures and prints one row.
fn row(dir: &Path, path: &str, flows: usize) -> Result<Value, Error> {
    let [full, half] = PAYLOADS;
    let native = child(&[], path, [flows, flows.min(OFFLOADED_MAX), full, BATCHES_TIMED])?;
    let ns = native["ns"].as_f64().ok_or("no time")?;
    let with_copy = instructions(dir, path, flows, full)?;
    let without = if path == "early-ack" {
        2.0 * instructions(dir, path, flows, half)? - with_copy // `full` is twice `half`
    } else {
        with_copy
    };
    println!("{path:<10} {flows:>9} {without:>13.0} {with_copy:>10.0} {ns:>7.0}");
    Ok(json!({ "path": path, "flows": flows, "instructions": without.round(), "ns": ns.round(),
               "instructions_with_copy": with_copy.round() }))
}

/// Bytes of an idle flow.
fn flow_bytes() -> Result<u64, Error> {
    let row = child(&[], "early-ack", [FLOWS_MAX, FLOWS_MAX, PAYLOADS[0], 1])?;
    Ok(row["flow_bytes"].as_u64().ok_or("no bytes")?)
}

/// Prints whether `value` is small enough.
fn aim(what: &str, value: f64, at_most: f64) {
    let verdict = if value <= at_most { "met" } else { "MISSED" };
    println!("{what}: {value:.1}, aim at most {at_most}: {verdict}");
}

fn drive() -> Result<(), Error> {
    let dir: PathBuf = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("bench");
    fs::create_dir_all(&dir)?;
    println!("path           flows  instructions  with copy      ns   (per packet)");
    let mut rows = Vec::new();
    for path in PATHS {
        for flows in FLOWS {
            rows.push(row(&dir, path, flows)?);
        }
    }
    let flow_bytes = flow_bytes()?;
    println!();
    let early_ack = |row: usize, what: &str| rows[row][what].as_f64().unwrap_or(f64::NAN);
    aim("instructions of early-ack without the copy", early_ack(0, "instructions"), 600.0);
    for what in ["instructions", "ns"] {
        let ratio = early_ack(FLOWS.len() - 1, what) / early_ack(0, what);
        aim(&format!("{what} of early-ack, {FLOWS_MAX} flows to 1"), ratio, 2.0);
    }
    #[expect(clippy::cast_precision_loss, reason = "a small number")]
    aim("bytes of an idle offloaded flow", flow_bytes as f64, 512.0);
    let result = json!({ "core": rows, "flow_bytes": flow_bytes, "forwarding": null });
    fs::write(dir.join("result.json"), serde_json::to_string_pretty(&result)? + "\n")?;
    Ok(())
}

fn main() -> Result<(), Error> {
    let args: Vec<String> = env::args().skip(1).filter(|a| a != "--bench").collect();
    match &args[..] {
        [] => drive(),
        [path, flows, offloaded, payload, batches] => {
            run(path, flows.parse()?, offloaded.parse()?, payload.parse()?, batches.parse()?)
        }
        _ => Err("arguments: none, or PATH FLOWS OFFLOADED PAYLOAD BATCHES".into()),
    }
}
