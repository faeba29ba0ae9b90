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
//! over, so no payload is summed up.
//!
//! `instructions` leaves out the copy of the payload: `early-ack` is counted with both of
//! [`PAYLOADS`], and the straight line through the two is read at 0 bytes.
//! `instructions_with_copy` is at the larger one. `flow_bytes` is what the process grew by (RSS)
//! from before the engine was made until all flows were idle, divided by the largest of [`FLOWS`].

mod world;

use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::{env, fs};

use serde_json::{Value, json};
use world::{Frame, Outcome, World};

const PATHS: [&str; 3] = ["early-ack", "guest-ack", "pass"];
/// Flows in the table.
const FLOWS: [usize; 3] = [1, 10_000, 1_000_000];
/// Payload bytes of a data segment: a full one on Ethernet as Linux sends it, and half of it.
const PAYLOADS: [u16; 2] = [1448, 724];
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
    assert_eq!(outcome, expected, "this is not the path it is meant to be");
    ns
}

/// Bytes of memory this process has in use.
fn resident_bytes() -> Result<usize, Error> {
    let statm = fs::read_to_string("/proc/self/statm")?;
    let pages = statm.split(' ').nth(1).ok_or("statm has a second field")?;
    Ok(pages.parse::<usize>()? * 4096)
}

/// One row: prints the median time per packet and the bytes per flow.
fn run(path: &str, flows: usize, payload: u16, batches: usize) -> Result<(), Error> {
    let before = resident_bytes()?;
    let mut world = World::new(flows, path == "pass");
    let flow_bytes = (resident_bytes()? - before) / flows;
    let acked = Outcome { absorbed: BATCH, made: BATCH, ..Outcome::default() };
    let absorbed = Outcome { absorbed: BATCH, ..Outcome::default() };
    let forwarded = Outcome { forwarded: BATCH, ..Outcome::default() };
    let mut times = Vec::with_capacity(batches);
    for batch in 0..batches {
        world.tick();
        let flow = |i: usize| (batch * BATCH + i) * STRIDE % flows;
        let mut data: Vec<Frame> = (0..BATCH).map(|i| world.data(flow(i), payload)).collect();
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
        let mut acks: Vec<Frame> = (0..BATCH).map(|i| world.guest_ack(flow(i))).collect();
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
fn child(prefix: &[String], row: [&str; 4]) -> Result<Value, Error> {
    let this = env::current_exe()?.display().to_string();
    let command: Vec<&str> = prefix.iter().map(String::as_str).chain([this.as_str()]).collect();
    let output = Command::new(command[0])
        .args(&command[1..])
        .args(row)
        .stderr(Stdio::inherit())
        .output()
        .map_err(|e| format!("{}: {e}", command[0]))?;
    if !output.status.success() {
        return Err(format!("{row:?} failed: {}", output.status).into());
    }
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// Instructions per packet, by callgrind; its profile stays in `dir` for `callgrind_annotate`.
fn instructions(dir: &Path, path: &str, flows: usize, payload: u16) -> Result<f64, Error> {
    let profile = dir.join(format!("callgrind.{path}.{flows}.{payload}.out"));
    let mut valgrind: Vec<String> =
        ["valgrind", "--quiet", "--tool=callgrind", "--toggle-collect=*packet::counted*"]
            .map(str::to_owned)
            .to_vec();
    valgrind.push(format!("--callgrind-out-file={}", profile.display()));
    let (flows, payload) = (flows.to_string(), payload.to_string());
    child(&valgrind, [path, &flows, &payload, &BATCHES_COUNTED.to_string()])?;
    let text = fs::read_to_string(&profile)?;
    let total = text.lines().find_map(|l| l.strip_prefix("totals: ")).ok_or("no totals")?;
    #[expect(clippy::cast_precision_loss, reason = "small numbers")]
    Ok(total.trim().parse::<f64>()? / (BATCHES_COUNTED * BATCH) as f64)
}

/// Measures and prints one row; returns it with the bytes per flow.
fn row(dir: &Path, path: &str, flows: usize) -> Result<(Value, u64), Error> {
    let [full, half] = PAYLOADS;
    let native =
        child(&[], [path, &flows.to_string(), &full.to_string(), &BATCHES_TIMED.to_string()])?;
    let ns = native["ns"].as_f64().ok_or("no time")?;
    let with_copy = instructions(dir, path, flows, full)?;
    let without = if path == "early-ack" {
        2.0 * instructions(dir, path, flows, half)? - with_copy // `full` is twice `half`
    } else {
        with_copy
    };
    println!("{path:<10} {flows:>9} {without:>13.0} {with_copy:>10.0} {ns:>7.0}");
    let row = json!({ "path": path, "flows": flows, "instructions": without.round(),
                      "ns": ns.round(), "instructions_with_copy": with_copy.round() });
    Ok((row, native["flow_bytes"].as_u64().ok_or("no bytes")?))
}

fn drive() -> Result<(), Error> {
    let dir: PathBuf = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("bench");
    fs::create_dir_all(&dir)?;
    println!("path           flows  instructions  with copy      ns   (per packet)");
    let (mut rows, mut flow_bytes) = (Vec::new(), 0);
    for path in PATHS {
        for flows in FLOWS {
            let (row, bytes) = row(&dir, path, flows)?;
            rows.push(row);
            if path == "early-ack" {
                flow_bytes = bytes; // the last one is of the most flows
            }
        }
    }
    println!("\nan idle tracked flow takes {flow_bytes} bytes (aim: at most 512)");
    println!("early-ack aims: at most 600 instructions; at 1,000,000 flows at most twice one's");
    let result = json!({ "core": rows, "flow_bytes": flow_bytes, "forwarding": null });
    fs::write(dir.join("result.json"), serde_json::to_string_pretty(&result)? + "\n")?;
    Ok(())
}

fn main() -> Result<(), Error> {
    let args: Vec<String> = env::args().skip(1).filter(|a| a != "--bench").collect();
    match &args[..] {
        [] => drive(),
        [path, flows, payload, batches] => {
            run(path, flows.parse()?, payload.parse()?, batches.parse()?)
        }
        _ => Err("arguments: none, or PATH FLOWS PAYLOAD BATCHES".into()),
    }
}
