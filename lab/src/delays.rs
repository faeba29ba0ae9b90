//! `nightporter-lab delays`: where segments wait on their way to and from a guest that shares its
//! core, as in the vSnoop paper's Figures 1(b) and 1(c): in the host, and for the guest.
//!
//! Captures of both sides of the guest's port, by `nightporter-guest watch` at its tap or by the
//! daemon, are what `nightporter analyze` splits; docs/monitor.md has the definitions.

use std::path::{Path, PathBuf};
use std::thread;

use anyhow::{Context, Result, ensure};
use serde::Serialize;
use serde_json::{Value, json};

use crate::accel::Accel;
use crate::captures::Capturing;
use crate::cpus::{Awake, Cores};
use crate::daemon::sibling;
use crate::demo::{GOLDEN, Lab, NetPath, RECEIVER, Terms, receiver};
use crate::experiment::{Better, Cell, Experiment, Measure, Results, Rounds, Values, measure};
use crate::image::{Image, log_dir};
use crate::process::{self, run as run_program};
use crate::progress::Progress;
use crate::rundir::RunDir;
use crate::transfer::Upload;
use crate::vmm::{Places, Vmm};
use crate::world::{Net, World};

/// The measurements.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Options {
    /// The world.
    pub terms: Terms,
    /// Bytes of a transfer.
    pub bytes: usize,
    /// Transfers each way in a sample.
    pub transfers: usize,
    /// Samples of each path.
    pub rounds: usize,
    /// How QEMU runs the guests; `None`: KVM is probed for.
    pub accel: Option<Accel>,
}

/// Waits of segments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wait {
    /// To the guest: in the host.
    ToHost,
    /// From the ring to the guest's ACK.
    ToGuest,
    /// From the guest: in the host.
    FromHost,
    /// From an ACK for the guest to its next segment.
    FromGuest,
}

pub(crate) const WAITS: [Wait; 4] = [Wait::ToHost, Wait::ToGuest, Wait::FromHost, Wait::FromGuest];

impl Wait {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::ToHost => "to the guest: host",
            Self::ToGuest => "to the guest: guest",
            Self::FromHost => "from the guest: host",
            Self::FromGuest => "from the guest: guest",
        }
    }

    /// Its distribution in an analysis of both sides.
    fn find(self, report: &Value) -> Option<&Value> {
        let all = &report["all"];
        let find = |list: &'static str, is: &dyn Fn(&Value) -> bool| {
            all[list].as_array()?.iter().find(|it| is(it))
        };
        let is_way = |it: &Value, way: &str| it["way"] == way;
        let at_guest = |it: &Value, way: &str| it["side"] == "guest" && is_way(it, way);
        Some(match self {
            Self::ToHost => &find("host", &|it| is_way(it, "to_guest"))?["delay"],
            Self::ToGuest => &find("streams", &|it| at_guest(it, "to_guest"))?["acked_after"],
            Self::FromHost => &find("host", &|it| is_way(it, "from_guest"))?["delay"],
            Self::FromGuest => &find("streams", &|it| at_guest(it, "from_guest"))?["next_after"],
        })
    }
}

const MEASURES: [Measure; 4] = [
    measure(WAITS[0].name(), "ms, p90", Better::Neither),
    measure(WAITS[1].name(), "ms, p90", Better::Neither),
    measure(WAITS[2].name(), "ms, p90", Better::Neither),
    measure(WAITS[3].name(), "ms, p90", Better::Neither),
];

/// The paths.
pub(crate) const PATHS: [NetPath; 2] = [NetPath::Tap, NetPath::AckOffload];

/// The case of a world.
pub(crate) fn case(terms: Terms) -> String {
    format!("{} over {}{}: delays", terms.scheduler, terms.link, terms.placement)
}

/// The description of an experiment that is read.
pub(crate) const fn result(name: &'static str) -> Experiment {
    Experiment { name, measures: &MEASURES, settings: Value::Null, out: None }
}

/// A wait of an arm's segments: times in ms below which a bin's are, and how many these are.
pub(crate) fn bins(results: &Results, case: &str, path: NetPath, wait: Wait) -> Vec<(f64, f64)> {
    let mut all: Vec<(f64, f64)> = Vec::new();
    for detail in results.details(case, path.name()) {
        for bin in detail[wait.name()].as_array().into_iter().flatten() {
            if let (Some(us), Some(count)) = (bin[0].as_f64(), bin[1].as_f64()) {
                all.push((us / 1e3, count));
            }
        }
    }
    all.sort_by(|a, b| a.0.total_cmp(&b.0));
    all
}

/// Measures, prints a table, and writes `target/delays/result.json`.
///
/// # Errors
/// Whatever kept it from finishing; a transfer whose bytes are not those that were sent.
pub fn run(options: &Options) -> Result<bool> {
    process::die_cleanly_on_signals()?;
    run_as("delays", options, &Cores::plan()?)?.finish()
}

/// Likewise, for an experiment of this name.
pub(crate) fn run_as(name: &'static str, options: &Options, cores: &Cores) -> Result<Results> {
    let mut progress = Progress::start();
    cores.leave_contended()?;
    let _awake = Awake::hold();
    progress.step("preparing the guests' kernel and initramfs");
    let image = Image::for_qemu()?;
    let logs = log_dir(name)?;
    let accel = Accel::or_probe(options.accel, &image)?;
    let settings = serde_json::to_value(options)?;
    let mut results = Results::open(&Experiment { settings, ..result(name) })?;
    let cells = PATHS.map(|path| Cell::new(case(options.terms), path.name()));
    if results.lacks(&cells, options.rounds) {
        let (results, progress, cells) = (&mut results, &mut progress, &cells);
        // A thread of its own, because a world takes its thread into its network namespace.
        thread::scope(|scope| {
            let measuring = || {
                let kit = (Vmm::Qemu(accel), &image);
                measure_case(options, cores, kit, &logs, (progress, results, cells))
            };
            let inside = scope.spawn(measuring);
            inside.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })?;
    }
    progress.clear();
    Ok(results)
}

fn measure_case(
    options: &Options,
    cores: &Cores,
    guest: (Vmm, &Image),
    logs: &Path,
    (progress, results, cells): (&mut Progress, &mut Results, &[Cell]),
) -> Result<()> {
    let Terms { link, placement, .. } = options.terms;
    let run_dir = RunDir::create()?;
    let places = Places { sockets: run_dir.path(), logs };
    let world = World::start(&vec![guest; placement.guests], true, Some(link.shape()), places)?;
    results.tell(&case(options.terms), json!({ "link": world.link() }));
    progress.step("warming up, calibrating the guests' load");
    let (mut lab, competition) = Lab::compete(world, options.terms, cores, &run_dir)?;
    let dir = run_dir.path();
    let tool = Image::guest_tool()?;
    results.rounds(cells, Rounds::exactly(options.rounds), progress, |path, _| {
        sample(&mut lab, PATHS[path], options, &tool, dir)
    })?;
    drop(competition);
    lab.world.stop()
}

fn sample(
    lab: &mut Lab,
    path: NetPath,
    options: &Options,
    tool: &Path,
    dir: &Path,
) -> Result<Values> {
    lab.select(path)?;
    let files = ["net", "guest"].map(|side| dir.join(format!("delays-{side}.pcap")));
    let watched = receiver(path).to_string();
    if path == NetPath::Tap {
        let logs = ["net", "guest"].map(|side| dir.join(format!("watch-{side}.log")));
        let tap = format!("tap{RECEIVER}");
        let mut sides = Vec::new();
        for ((interface, file), log) in ["remote", &tap].into_iter().zip(&files).zip(&logs) {
            sides.push(Capturing::start(tool, interface, &watched, file, log)?);
        }
        transfers(lab, path, options)?;
        for (side, log) in sides.iter_mut().zip(&logs) {
            side.end(log)?;
        }
    } else {
        let captures = lab.world.capture(RECEIVER, Net::Nightporter, dir)?;
        transfers(lab, path, options)?;
        let keep = dir.join("kept");
        captures.check(lab.world.daemon()?, [true, false], Some(&keep))?;
        for (side, file) in ["remote", "guest"].into_iter().zip(&files) {
            std::fs::rename(format!("{}-{side}.pcap", keep.display()), file)?;
        }
    }
    let report = analysis(&watched, &files)?;
    let mut detail = serde_json::Map::new();
    let mut of = Vec::new();
    for wait in WAITS {
        let found = wait.find(&report).with_context(|| format!("{}: {report}", wait.name()))?;
        of.push((wait.name(), found["p90_us"].as_f64().context("a number")? / 1e3));
        detail.insert(wait.name().to_owned(), found["bins"].clone());
    }
    Ok(Values { of, detail: detail.into() })
}

/// Uploads and downloads, at other moments of the guests' cycle each.
fn transfers(lab: &Lab, path: NetPath, options: &Options) -> Result<()> {
    for n in 0..options.transfers {
        let phase = lab.cycle().mul_f64((GOLDEN * n as f64).fract());
        lab.wait_for(phase);
        let up = lab.send(path, &Upload::new(options.bytes, n as u64))?;
        lab.wait_for(phase);
        let down = lab.fetch(path, options.bytes, n as u64)?;
        ensure!(up.hash_ok && down.hash_ok, "a transfer over {path} arrived damaged");
    }
    Ok(())
}

fn analysis(vm: &str, files: &[PathBuf; 2]) -> Result<Value> {
    let tool = sibling("nightporter")?;
    let [net, guest] = files.each_ref().map(|file| file.to_string_lossy());
    let arguments = ["--json", "analyze", "--vm", vm, &net, &guest];
    let text = run_program(&tool.to_string_lossy(), &arguments)?;
    serde_json::from_str(&text).context("reading an analysis")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_wait_is_found_in_an_analysis_of_both_sides() {
        let stream = |side: &str, way: &str, acked: u32, next: u32| {
            let mut it = json!({ "side": side, "way": way });
            it["acked_after"] = acked.into();
            it["next_after"] = next.into();
            it
        };
        let report = json!({ "all": {
            "streams": [
                stream("network", "to_guest", 1, 2), stream("network", "from_guest", 3, 4),
                stream("guest", "to_guest", 5, 6), stream("guest", "from_guest", 7, 8),
            ],
            "host": [{ "way": "to_guest", "delay": 9 }, { "way": "from_guest", "delay": 10 }],
        }});
        let found = WAITS.map(|wait| wait.find(&report).and_then(Value::as_u64));
        assert_eq!(found, [9, 5, 10, 8].map(Some));
        assert!(WAITS.iter().all(|wait| wait.find(&json!({ "all": {} })).is_none()));
    }
}
