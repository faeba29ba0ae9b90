//! The same uploads by another client: curl sends to the guest's HTTP sink, over the same world and
//! alternating with the lab's own uploads, and reports its own time.

use std::fs;
use std::process::Command;
use std::thread;

use anyhow::{Context, Result, ensure};
use nightporter_guest::data::{HTTP_PORT, fill};
use serde::Serialize;

use crate::accel::Accel;
use crate::cpus::{Awake, Cores};
use crate::demo::{GOLDEN, Lab, NetPath, Terms, receiver};
use crate::experiment::{Better, Cell, Experiment, Measure, Results, Rounds, Values, measure};
use crate::image::{Image, log_dir};
use crate::link::Link;
use crate::placement::Placement;
use crate::process;
use crate::progress::Progress;
use crate::rundir::RunDir;
use crate::sched::Scheduler;
use crate::transfer::Upload;
use crate::vmm::{Places, Vmm};
use crate::world::World;

/// The comparison.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Options {
    /// How the guests compete.
    pub scheduler: Scheduler,
    /// The link.
    pub link: Link,
    /// Size of an upload.
    pub bytes: usize,
    /// Uploads with each client over each path.
    pub rounds: usize,
    /// How QEMU runs the guests.
    pub accel: Accel,
}

const DELIVERED: &str = "delivered";
const MEASURES: [Measure; 1] = [measure(DELIVERED, "ms", Better::Less)];
const ARMS: [&str; 2] = ["the lab's client", "curl"];

/// Compares, over tap and over ack-offload, the lab's delivered time with curl's `time_total`.
///
/// # Errors
/// Whatever kept it from finishing; curl not installed, say.
pub fn run(options: &Options) -> Result<bool> {
    process::die_cleanly_on_signals()?;
    let cores = Cores::plan()?;
    cores.leave_contended()?;
    let _awake = Awake::hold();
    let image = Image::for_qemu()?;
    let run_dir = RunDir::create()?;
    let logs = log_dir("outside")?;
    let file = run_dir.path().join("payload");
    let mut payload = vec![0; options.bytes];
    fill(1, &mut payload);
    fs::write(&file, &payload)?;
    let mut results = Results::open(&Experiment {
        name: "outside",
        measures: &MEASURES,
        settings: serde_json::to_value(options)?,
        out: None,
    })?;
    thread::scope(|scope| {
        let results = &mut results;
        let inside = scope.spawn(|| -> Result<()> {
            let places = Places { sockets: run_dir.path(), logs: &logs };
            let guests = vec![(Vmm::Qemu(options.accel), &image); Placement::USUAL.guests];
            let world = World::start(&guests, true, Some(options.link.shape()), places)?;
            let terms = Terms::usual(options.scheduler, options.link);
            let (mut lab, competition) = Lab::compete(world, terms, &cores, &run_dir)?;
            for path in [NetPath::Tap, NetPath::AckOffload] {
                compare(&mut lab, path, options, &file.to_string_lossy(), results)?;
            }
            drop(competition);
            lab.world.stop()
        });
        inside.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })?;
    results.finish()
}

fn compare(
    lab: &mut Lab,
    path: NetPath,
    options: &Options,
    file: &str,
    results: &mut Results,
) -> Result<()> {
    lab.select(path)?;
    let cells = ARMS.map(|arm| Cell::new(path.name(), arm));
    let rounds = Rounds::exactly(options.rounds);
    results.rounds(&cells, rounds, &mut Progress::start(), |arm, round| {
        // Both clients begin at the same moment of the guests' cycle.
        let phase = lab.cycle().mul_f64((GOLDEN * round as f64).fract());
        lab.wait_for(phase);
        let ms = if arm == 0 {
            let outcome = lab.send(path, &Upload::new(options.bytes, round as u64))?;
            ensure!(outcome.hash_ok, "an upload arrived damaged");
            outcome.delivered.as_secs_f64() * 1e3
        } else {
            lab.world.remote().enter(|| curl(path, file))?
        };
        Ok(Values { of: vec![(DELIVERED, ms)], ..Values::default() })
    })
}

/// One upload by curl; its `time_total`, ms.
fn curl(path: NetPath, file: &str) -> Result<f64> {
    let url = format!("http://{}:{HTTP_PORT}/", receiver(path));
    let mut command = Command::new("curl");
    // The header turns off the round trip of "100 Continue", which an upload of the lab has not.
    command.args(["-sS", "-H", "Expect:", "-T", file, "-o", "/dev/null"]);
    command.args(["-w", "%{http_code} %{time_total}", &url]);
    let out = command.output().context("curl is not installed?")?;
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    let total = text.strip_prefix("200 ").and_then(|seconds| seconds.parse::<f64>().ok());
    let error = String::from_utf8_lossy(&out.stderr);
    Ok(total.with_context(|| format!("curl said {text:?} {error}"))? * 1e3)
}
