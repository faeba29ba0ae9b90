//! One host with many guests and many flows: memory, events per second, and how the cost of a
//! packet grows (`make scale`).
//!
//! The engine and the turn of the daemon's worker, over ports that are queues: rings and system
//! calls are left out. Each row is a process of its own, so that memory is that row's alone.
//!
//! A row: all flows are opened, one per 10 us of the engine's time, and each carries a segment that
//! is acknowledged early, delivered and acknowledged by its guest. Then pairs of turns are timed:
//! [`TURN_FRAMES`] data segments of as many flows, and the answers of their guests. Packets go to
//! flow after flow in strides, so that with many flows none is in a cache. Checksums are partial,
//! as a tap hands them over.
//!
//! `cargo bench -p nightporter-bench --bench scale -- --guests N --flows N` keeps to smaller rows.

mod host;

use std::process::Command;
use std::time::Instant;

use host::Host;

/// Frames in a turn.
const TURN_FRAMES: usize = 32;
/// Bytes of a data segment: a full one on Ethernet as Linux sends it.
const PAYLOAD: usize = 1448;
/// Pairs of turns that are timed; the median counts.
const TURNS: usize = 2_000;
/// Flows of the row that growth is counted from: every frame of a turn is of another.
const FEW: usize = 100;
/// From flow to flow; has no divisor in common with powers of ten.
const STRIDE: usize = 618_033;

type Error = Box<dyn std::error::Error>;

/// The measurements with so many guests and flows.
struct Row {
    guests: usize,
    flows: usize,
    /// Memory of the process (resident), in bytes.
    resident_bytes: f64,
    /// The growth of memory while the flows were opened, for each.
    flow_bytes: f64,
    /// Adding all ports took so many milliseconds.
    ports_ms: f64,
    /// Frames in, frames made and deliveries per second of processor time while flows were opened.
    opening_events_per_s: f64,
    /// The same in the timed turns.
    events_per_s: f64,
    /// Nanoseconds per data segment: stored, acknowledged, delivered.
    data_ns: f64,
    /// Nanoseconds per ACK of a guest.
    ack_ns: f64,
}

impl Row {
    /// As [`child`] reads it.
    fn print(&self) {
        let Self { resident_bytes, flow_bytes, ports_ms, opening_events_per_s, .. } = self;
        let Self { events_per_s, data_ns, ack_ns, .. } = self;
        println!(
            "{resident_bytes} {flow_bytes} {ports_ms} {opening_events_per_s} {events_per_s} \
             {data_ns} {ack_ns}"
        );
    }

    fn read(guests: usize, flows: usize, text: &str) -> Option<Self> {
        let mut numbers = text.split_whitespace().map_while(|word| word.parse().ok());
        Some(Self {
            guests,
            flows,
            resident_bytes: numbers.next()?,
            flow_bytes: numbers.next()?,
            ports_ms: numbers.next()?,
            opening_events_per_s: numbers.next()?,
            events_per_s: numbers.next()?,
            data_ns: numbers.next()?,
            ack_ns: numbers.next()?,
        })
    }
}

fn main() -> Result<(), Error> {
    let args: Vec<String> = std::env::args().collect();
    let number = |name: &str| {
        let at = args.iter().position(|arg| arg == name)?;
        args.get(at + 1)?.parse().ok()
    };
    let guests_max = number("--guests").unwrap_or(10_000);
    let flows_max = number("--flows").unwrap_or(1_000_000);
    if args.iter().any(|arg| arg == "--one") {
        measure(guests_max, flows_max)?.print();
        return Ok(());
    }
    println!("guests    flows  RSS MB  B/flow  ports ms  opening ev/s  events/s  data ns  ACK ns");
    let mut done: Vec<Row> = Vec::new();
    for (guests, flows) in rows(guests_max, flows_max) {
        let row = child(guests, flows)?;
        println!(
            "{guests:>6} {flows:>8} {:>7.1} {:>7.0} {:>9.1} {:>13.0} {:>9.0} {:>8.0} {:>7.0}",
            row.resident_bytes / 1e6,
            row.flow_bytes,
            row.ports_ms,
            row.opening_events_per_s,
            row.events_per_s,
            row.data_ns,
            row.ack_ns,
        );
        done.push(row);
    }
    if let Some(first) = done.iter().find(|row| row.flows == FEW) {
        let alike = done.iter().rfind(|row| row.guests == first.guests);
        alike.into_iter().chain(done.last()).for_each(|row| print_growth(first, row));
    }
    println!("B/flow: memory per idle flow; few flows bear what a guest takes with its first SYN.");
    Ok(())
}

/// Guests and flows of the rows within these limits.
fn rows(guests_max: usize, flows_max: usize) -> Vec<(usize, usize)> {
    let mut rows = Vec::new();
    for guests in [1, 100, 1_000, 10_000] {
        for flows in [1, 100, 1_000, 10_000, 100_000, 1_000_000] {
            let is_corner = flows == guests || flows == FEW || flows >= 10_000;
            if guests <= flows && is_corner && guests <= guests_max && flows <= flows_max {
                rows.push((guests, flows));
            }
        }
    }
    rows
}

fn print_growth(first: &Row, row: &Row) {
    println!(
        "from {} guests and {} flows to {} and {}: a data segment costs {:.1} times as much, an \
         ACK {:.1}",
        first.guests,
        first.flows,
        row.guests,
        row.flows,
        row.data_ns / first.data_ns,
        row.ack_ns / first.ack_ns,
    );
}

/// Measures one row in a process of its own.
fn child(guests: usize, flows: usize) -> Result<Row, Error> {
    let numbers = [guests.to_string(), flows.to_string()];
    let output = Command::new(std::env::current_exe()?)
        .args(["--one", "--guests", &numbers[0], "--flows", &numbers[1]])
        .output()?;
    let errors = String::from_utf8_lossy(&output.stderr);
    let text = String::from_utf8_lossy(&output.stdout);
    let row = Row::read(guests, flows, &text).filter(|_| output.status.success());
    row.ok_or_else(|| format!("{guests} guests, {flows} flows: {errors}").into())
}

/// Measures one row in this process.
#[expect(clippy::cast_precision_loss, reason = "counts of a measurement")]
fn measure(guests: usize, flows: usize) -> Result<Row, Error> {
    let mut host = Host::new(guests, flows)?;
    let before = resident_bytes()?;
    let started = Instant::now();
    let events: usize = (0..flows).map(|flow| host.open(flow)).sum();
    let opening_s = started.elapsed().as_secs_f64();
    let after = resident_bytes()?;
    assert_eq!(host.flows(), flows, "every flow is remembered");
    let turns = host.timed_turns();
    assert_eq!(host.drops(), 0, "nothing is dropped");
    let frames = TURN_FRAMES as f64;
    let (data_ns, ack_ns) = (median(turns.data_ns), median(turns.ack_ns));
    Ok(Row {
        guests,
        flows,
        resident_bytes: after as f64,
        flow_bytes: after.saturating_sub(before) as f64 / flows as f64,
        ports_ms: host.ports_ms,
        opening_events_per_s: events as f64 / opening_s,
        events_per_s: turns.events as f64 / TURNS as f64 / ((data_ns + ack_ns) / 1e9),
        data_ns: data_ns / frames,
        ack_ns: ack_ns / frames,
    })
}

/// Bytes of memory this process has in use.
fn resident_bytes() -> Result<usize, Error> {
    let statm = std::fs::read_to_string("/proc/self/statm")?;
    let pages = statm.split(' ').nth(1).ok_or("statm has a second field")?;
    Ok(pages.parse::<usize>()? * 4096)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
