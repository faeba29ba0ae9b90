//! `nightporter-lab demo-toe`: sockets over the host compared with guest TCP, between guests of one
//! host and of two ([`crate::hosts`]).
//!
//! Guest 0 sends: to guest 1 by the switch of their host and by the TOE within it, to guest 2 by
//! the overlay and by the TOE between both. All paths take turns, so other load of the machine
//! affects all of them. The same program ([`nightporter_guest::peer`]) sends and receives
//! everywhere; over the veth pair alone, without guests, it shows the capacity of the hosts' own
//! TCP.

mod driver;
mod encrypted;
mod ends;
mod hosts;
mod report;
mod rings;

use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use nightporter_guest::peer::{Answer, Ask};
use serde::Serialize;

use crate::accel::Accel;
use crate::cpus::Awake;
use crate::experiment::{Experiment, Results, Rounds};
use crate::image::{Image, log_dir};
use crate::process;
use crate::progress::Progress;
use crate::rundir::RunDir;
use crate::vmm::{Places, Vmm};
use ends::End;
use hosts::Ready;

/// The kinds of measurements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Case {
    /// One stream.
    Stream,
    /// One each way at the same time, over one connection.
    Duplex,
    /// A byte there and one back.
    RoundTrip,
}

/// The guests of a measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Between {
    /// User-mode Linux guests.
    Uml,
    /// QEMU guests.
    Qemu,
    /// No guests: between the hosts.
    None,
}

/// The path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Path {
    /// The TOE, over TCP between the hosts.
    ToeTcp,
    /// The TOE within a host.
    ToeLocal,
    /// Guest TCP over the overlay between the hosts.
    Overlay,
    /// Guest TCP over the switch of one host.
    Switch,
    /// The TOE over TCP between the hosts, by drivers without guests.
    #[serde(rename = "toe-tcp")]
    Fabric,
    /// Likewise, over TLS.
    #[serde(rename = "toe-tls")]
    Encrypted,
    /// TCP of the hosts themselves.
    Host,
}

const CASES: [Case; 3] = [Case::Stream, Case::Duplex, Case::RoundTrip];
const PATHS: [Path; 7] = [
    Path::Overlay,
    Path::ToeTcp,
    Path::Switch,
    Path::ToeLocal,
    Path::Fabric,
    Path::Encrypted,
    Path::Host,
];

/// How long a transfer should take, and its least and largest size.
const TRANSFER: Duration = Duration::from_millis(400);
const BYTES: (usize, usize) = (4_000_000, 64_000_000);
/// Bytes that each path carries before anything is measured.
const WARM_UP: usize = 8_000_000;
/// Round trips of which one sample is the median.
const ROUND_TRIPS: usize = 500;
const PORT: u16 = 7000;

/// The measurements.
#[derive(Debug, Clone, Serialize)]
pub struct Options {
    /// One after the other.
    pub guests: Vec<Between>,
    /// Time for the transfers of each.
    pub time: Duration,
    /// Rounds at least, whatever time they take, and at most.
    pub rounds: (usize, usize),
    /// `None` probes.
    pub accel: Option<Accel>,
}

/// One transfer.
#[derive(Debug, Clone, Copy)]
struct Sample {
    /// Bytes a second, both ways together; of round trips 0.
    rate: f64,
    /// Of round trips.
    rtt_us: f64,
    /// The core time of the receiver, and of the daemon of its host.
    cpu_s: f64,
    /// Bytes that it received.
    bytes: f64,
    whole: bool,
}

/// Measures, prints a table and writes `target/demo-toe/result.json`; whether all of it showed what
/// it had to.
///
/// # Errors
/// Whatever kept it from finishing.
pub fn run(options: &Options) -> Result<bool> {
    process::die_cleanly_on_signals()?;
    let mut progress = Progress::start();
    let _awake = Awake::hold();
    let mut results = Results::open(&Experiment {
        name: "demo-toe",
        measures: &report::MEASURES,
        settings: serde_json::to_value(options)?,
        out: None,
    })?;
    for &between in &options.guests {
        // A thread of its own, because it goes into the hosts' namespaces.
        let (progress, results) = (&mut progress, &mut results);
        let measured = thread::scope(|scope| {
            let inside = scope.spawn(move || measure(between, options, progress, results));
            inside.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        });
        measured.with_context(|| format!("{between:?} guests"))?;
    }
    report::judge(&mut results);
    results.finish()
}

/// Boots the guests, measures all paths in turn, takes everything down.
fn measure(
    between: Between,
    options: &Options,
    progress: &mut Progress,
    results: &mut Results,
) -> Result<()> {
    let (vmm, image) = vmm(between, options.accel, progress)?;
    let run_dir = RunDir::create()?;
    let logs = log_dir(&format!("demo-toe-{between:?}").to_lowercase())?;
    progress.step(&format!("booting three {between:?} guests on two hosts"));
    let places = Places { sockets: run_dir.path(), logs: &logs };
    let mut hosts = Ready::start(vmm, &image, places)?;
    let mut cells = Vec::new();
    for path in PATHS {
        progress.step(&format!("first transfers: {path:?}"));
        for case in CASES {
            // The first one is slower than all others, and so is the first of its size: untouched
            // memory costs both ends page faults.
            let first = hosts.sample(path, case, WARM_UP);
            let bytes = first.and_then(|_| hosts.sample(path, case, WARM_UP)).map(bytes_for);
            let touched = bytes.and_then(|bytes| Ok((bytes, hosts.sample(path, case, bytes)?)));
            let (bytes, _) = touched.with_context(|| format!("{case:?} by {path:?}"))?;
            cells.push((path, case, bytes));
        }
    }
    let (least, most) = options.rounds;
    let rounds = Rounds { least, most, time: Some(options.time) };
    let names: Vec<_> =
        cells.iter().map(|&(path, case, _)| report::cell(between, path, case)).collect();
    results.rounds(&names, rounds, progress, |index, _| {
        let (path, case, bytes) = cells[index];
        Ok(hosts.sample(path, case, bytes)?.values(case))
    })?;
    progress.step("cleaning up");
    hosts.stop()
}

/// As many as take about [`TRANSFER`].
fn bytes_for(first: Sample) -> usize {
    // Powers of two, so that all guests of a path mostly carry the same.
    let takes = |bytes: usize| bytes as f64 / first.rate.max(1.0);
    let mut bytes = BYTES.0;
    while bytes < BYTES.1 && takes(2 * bytes) < TRANSFER.as_secs_f64() {
        bytes *= 2;
    }
    bytes
}

/// The VMM of the guests, and their image.
pub(crate) fn vmm(
    between: Between,
    accel: Option<Accel>,
    progress: &mut Progress,
) -> Result<(Vmm, Image)> {
    progress.step("preparing the guests' kernel and initramfs");
    match between {
        Between::Uml => Ok((Vmm::Uml, Image::for_uml()?.with_sockets()?)),
        Between::Qemu => {
            let image = Image::for_qemu()?.with_sockets()?;
            progress.step("seeing whether KVM works here");
            let accel = Accel::or_probe(accel, &image)?;
            Ok((Vmm::Qemu(accel), image))
        }
        Between::None => bail!("the hosts are measured beside guests"),
    }
}

/// One connection, and one transfer over it. `cpu` is the core time of the receiver and its host.
fn transfer(
    [client, server]: [&mut dyn End; 2],
    to: std::net::SocketAddr,
    (case, bytes, seed): (Case, usize, u64),
    cpu: &dyn Fn(&dyn End) -> Result<Duration>,
) -> Result<Sample> {
    // A driver does nothing while it has no command.
    server.tell(Ask::Accept)?;
    for told in [client.ask(Ask::Connect { to })?, server.hear()?] {
        let Answer::At { .. } = told else { bail!("connecting gave {told:?}") };
    }
    let (there, back) = (2 * seed, 2 * seed + 1);
    let asks = match case {
        Case::Stream => [
            Ask::Send { bytes, seed: there, answered: true },
            Ask::Receive { bytes, answered: true },
        ],
        Case::Duplex => [
            Ask::Exchange { bytes, seed: there, second: false },
            Ask::Exchange { bytes, seed: back, second: true },
        ],
        Case::RoundTrip => [Ask::Ping { count: ROUND_TRIPS }, Ask::Pong { count: ROUND_TRIPS }],
    };
    for (end, seed) in [(&mut *client, there), (&mut *server, back)] {
        end.ask(Ask::Prepare { bytes, seed })?;
    }
    let before = cpu(server)?;
    server.tell(asks[1])?;
    client.tell(asks[0])?;
    let told = [client.hear()?, server.hear()?];
    let cpu_s = cpu(server)?.saturating_sub(before).as_secs_f64();
    let [Answer::Done { ns }, Answer::Done { .. }] = told else { bail!("it ended with {told:?}") };
    let is_whole = |end: &mut dyn End, seed| -> Result<bool> {
        Ok(end.ask(Ask::Check { seed })? == Answer::Checked { whole: true })
    };
    let (whole, ways) = match case {
        Case::Stream => (is_whole(server, there)?, 1.0),
        Case::Duplex => (is_whole(server, there)? && is_whole(client, back)?, 2.0),
        Case::RoundTrip => (true, 0.0),
    };
    client.ask(Ask::Close)?;
    server.ask(Ask::Close)?;
    let (bytes, rtt_us) = (bytes as f64, ns as f64 / 1e3);
    Ok(Sample { rate: ways * bytes / (ns as f64 / 1e9), rtt_us, cpu_s, bytes, whole })
}
