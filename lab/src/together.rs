//! `nightporter-lab together`: several uploads at once to one guest that shares its core, as in the
//! vSnoop paper's Figure 6(g). A sample is over when the last of them is.

use std::path::Path;
use std::thread;
use std::time::Duration;

use anyhow::{Result, ensure};
use serde::Serialize;
use serde_json::{Value, json};

use crate::accel::Accel;
use crate::cpus::{Awake, Cores};
use crate::demo::{ACKED, DELIVERED, GOLDEN, Lab, NetPath, Terms, size};
use crate::experiment::{Better, Cell, Experiment, Measure, Results, Rounds, Values, measure};
use crate::image::{Image, log_dir};
use crate::process;
use crate::progress::Progress;
use crate::rundir::RunDir;
use crate::transfer::{Outcome, Upload};
use crate::vmm::{Places, Vmm};
use crate::world::World;

/// The measurements.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Options {
    /// The world.
    pub terms: Terms,
    /// Uploads at once.
    pub connections: usize,
    /// Sizes of each, bytes.
    pub sizes: Vec<usize>,
    /// Samples of each path and size.
    pub rounds: usize,
    /// How QEMU runs the guests; `None`: KVM is probed for.
    pub accel: Option<Accel>,
}

const MEASURES: [Measure; 2] = [measure(ACKED, "ms", Better::Less), DELIVERED];

/// The paths.
pub(crate) const PATHS: [NetPath; 2] = [NetPath::Tap, NetPath::AckOffload];

/// The case of a size.
pub(crate) fn case(terms: Terms, connections: usize, bytes: usize) -> String {
    let Terms { scheduler, link, placement } = terms;
    format!("{scheduler} over {link}{placement}: {connections} x {} up", size(bytes))
}

/// The description of an experiment that is read.
pub(crate) const fn result(name: &'static str) -> Experiment {
    Experiment { name, measures: &MEASURES, settings: Value::Null, out: None }
}

/// Measures, prints a table, and writes `target/together/result.json`.
///
/// # Errors
/// Whatever kept it from finishing; a transfer whose bytes are not those that were sent.
pub fn run(options: &Options) -> Result<bool> {
    process::die_cleanly_on_signals()?;
    run_as("together", options, &Cores::plan()?)?.finish()
}

/// Likewise, for an experiment of this name.
pub(crate) fn run_as(name: &'static str, options: &Options, cores: &Cores) -> Result<Results> {
    let mut progress = Progress::start();
    cores.leave_contended()?;
    let _awake = Awake::hold();
    progress.step("preparing the guests' kernel and initramfs");
    let image = Image::for_qemu()?;
    let guest = (Vmm::Qemu(Accel::or_probe(options.accel, &image)?), &image);
    let settings = serde_json::to_value(options)?;
    let mut results = Results::open(&Experiment { settings, ..result(name) })?;
    let (results_there, progress_there, logs) = (&mut results, &mut progress, log_dir(name)?);
    // A thread of its own, because a world takes its thread into its network namespace.
    thread::scope(|scope| {
        let inside = scope
            .spawn(|| measure_all(options, cores, guest, &logs, (progress_there, results_there)));
        inside.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })?;
    progress.clear();
    Ok(results)
}

fn measure_all(
    options: &Options,
    cores: &Cores,
    guest: (Vmm, &Image),
    logs: &Path,
    (progress, results): (&mut Progress, &mut Results),
) -> Result<()> {
    let kinds: Vec<(usize, NetPath)> =
        options.sizes.iter().flat_map(|&bytes| PATHS.map(|path| (bytes, path))).collect();
    let cell = |&(bytes, path): &(usize, NetPath)| {
        Cell::new(case(options.terms, options.connections, bytes), path.name())
    };
    let cells: Vec<Cell> = kinds.iter().map(cell).collect();
    if !results.lacks(&cells, options.rounds) {
        return Ok(()); // a run that was cut off had done it
    }
    let run_dir = RunDir::create()?;
    let places = Places { sockets: run_dir.path(), logs };
    let Terms { link, placement, .. } = options.terms;
    let world = World::start(&vec![guest; placement.guests], true, Some(link.shape()), places)?;
    for &bytes in &options.sizes {
        let about = json!({ "link": world.link() });
        results.tell(&case(options.terms, options.connections, bytes), about);
    }
    progress.step("warming up, calibrating the guests' load");
    let (mut lab, competition) = Lab::compete(world, options.terms, cores, &run_dir)?;
    results.rounds(&cells, Rounds::exactly(options.rounds), progress, |kind, round| {
        let (bytes, path) = kinds[kind];
        sample(&mut lab, path, (options.connections, bytes), round)
    })?;
    drop(competition);
    lab.world.stop()
}

fn sample(
    lab: &mut Lab,
    path: NetPath,
    (connections, bytes): (usize, usize),
    round: usize,
) -> Result<Values> {
    lab.select(path)?;
    let uploads: Vec<_> =
        (0..connections).map(|n| Upload::new(bytes, (round * connections + n) as u64)).collect();
    lab.wait_for(lab.cycle().mul_f64((GOLDEN * round as f64).fract()));
    let lab = &*lab;
    let outcomes: Vec<Outcome> = thread::scope(|scope| {
        let send = |upload| scope.spawn(move || lab.send(path, upload));
        let sending: Vec<_> = uploads.iter().map(send).collect();
        sending.into_iter().map(|one| one.join().expect("does not panic")).collect::<Result<_>>()
    })?;
    ensure!(outcomes.iter().all(|one| one.hash_ok), "an upload over {path} arrived damaged");
    let last = |of: fn(&Outcome) -> Duration| {
        outcomes.iter().map(of).max().unwrap_or_default().as_secs_f64() * 1e3
    };
    let of = vec![(ACKED, last(|one| one.acked)), (DELIVERED.name, last(|one| one.delivered))];
    Ok(Values { of, ..Values::default() })
}
