//! The same uploads by another client: curl sends to the guest's HTTP sink, over the same world and
//! alternating with the lab's own uploads, and reports its own time.

use std::fs;
use std::process::Command;
use std::thread;

use anyhow::{Context, Result, ensure};
use nightporter_guest::data::{HTTP_PORT, fill};

use crate::accel::Accel;
use crate::cpus::{Awake, Cores};
use crate::demo::{GOLDEN, Lab, receiver};
use crate::image::{Image, log_dir};
use crate::link::Link;
use crate::process;
use crate::report::NetPath;
use crate::report::stats::{Quantiles, Ratio};
use crate::rundir::RunDir;
use crate::sched::{Competition, Layout, Scheduler};
use crate::transfer::Upload;
use crate::vmm::{Places, Vmm};
use crate::world::World;

/// The comparison.
#[derive(Debug, Clone, Copy)]
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

/// Prints, for tap and for ack-offload, the lab's delivered time beside curl's `time_total`.
///
/// # Errors
/// Whatever kept it from finishing; curl not installed, say.
pub fn run(options: &Options) -> Result<()> {
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
    thread::scope(|scope| {
        let inside = scope.spawn(|| -> Result<()> {
            let places = Places { sockets: run_dir.path(), logs: &logs };
            let guests = [(Vmm::Qemu(options.accel), &image); 3];
            let world = World::start(&guests, true, Some(options.link.shape()), places)?;
            let mut lab = Lab::new(world, options.scheduler);
            lab.warm_up()?;
            let case = (options.scheduler, Layout::Session);
            let competition = Competition::start(case, &cores, &lab.world.guests, &run_dir)?;
            lab.start_load()?;
            for path in [NetPath::Tap, NetPath::AckOffload] {
                compare(&mut lab, path, options, &file.to_string_lossy())?;
            }
            drop(competition);
            lab.world.stop()
        });
        inside.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

fn compare(lab: &mut Lab, path: NetPath, options: &Options, file: &str) -> Result<()> {
    lab.select(path)?;
    let mut pairs = Vec::new();
    for round in 0..options.rounds {
        let phase = lab.cycle().mul_f64((GOLDEN * round as f64).fract());
        lab.wait_for(phase);
        let outcome = lab.send(path, &Upload::new(options.bytes, round as u64))?;
        ensure!(outcome.hash_ok, "an upload arrived damaged");
        lab.wait_for(phase);
        let theirs = lab.world.remote().enter(|| curl(path, file))?;
        pairs.push((theirs, outcome.delivered.as_secs_f64() * 1e3));
    }
    let curl = Quantiles::of(pairs.iter().map(|p| p.0)).context("at least one round")?;
    let ours = Quantiles::of(pairs.iter().map(|p| p.1)).context("at least one round")?;
    let ratio = Ratio::of_medians(&pairs).context("at least one round")?;
    println!(
        "{} over {}, {} bytes, {path}: delivered {} ms, curl's time_total {} ms (medians of {}): \
         ratio {:.2} [{:.2}, {:.2}]; means {} and {} ms",
        options.scheduler,
        options.link,
        options.bytes,
        ours.p50,
        curl.p50,
        pairs.len(),
        ratio.ratio,
        ratio.low,
        ratio.high,
        ours.mean,
        curl.mean,
    );
    Ok(())
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
