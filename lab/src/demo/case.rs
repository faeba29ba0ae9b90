//! One case: its guests boot, transfers are measured, everything is taken down.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result};
use nightporter_api::BoostAccount;
use serde_json::json;

use super::checks::Measured;
use super::measures::Terms;
use super::page::Shown;
use super::rounds::{BOTH_BYTES, Record};
use super::troubles::{GuestShare, GuestTcp, Trouble};
use super::{Direction, Lab, NetPath, Options, RECEIVER, all_paths, net_of};
use crate::accel::Accel;
use crate::cpus::Cores;
use crate::experiment::Results;
use crate::experiment::verdict::Check;
use crate::image::{Image, log_dir};
use crate::link;
use crate::passt::Passt;
use crate::placement::Placement;
use crate::progress::Progress;
use crate::rundir::RunDir;
use crate::sched::{Competition, Scheduler};
use crate::vmm::{Places, Vmm};
use crate::world::{Net, Plan, World};

/// The parts of cases.
#[derive(Clone, Copy)]
pub(super) struct Kit<'a> {
    pub(super) image: &'a Image,
    pub(super) passt: Option<&'a Passt>,
    pub(super) accel: Accel,
}

/// A case that was measured.
#[derive(Debug)]
pub(super) struct Case {
    terms: Terms,
    kinds: Vec<(Direction, usize)>,
    troubles: Vec<Trouble>,
    /// Why no VM was boosted.
    boost_refused: Option<String>,
    /// How the guests competed, for people.
    pub(super) told: String,
}

impl Case {
    fn measured<'a>(&'a self, results: &'a Results) -> Measured<'a> {
        Measured { terms: self.terms, results, kinds: &self.kinds, both: BOTH_BYTES }
    }

    pub(super) fn shown<'a>(&'a self, results: &'a Results, machine: &'a str) -> Shown<'a> {
        let boost_refused = self.boost_refused.as_deref();
        Shown { measured: self.measured(results), boost_refused, machine }
    }

    pub(super) fn checks(&self, results: &Results) -> Vec<Check> {
        let it = self.measured(results);
        [it.checks(), it.of_both_ways(), it.of_troubles(&self.troubles)].concat()
    }
}

/// Boots the guests, measures, takes everything down.
pub(super) fn run_case(
    terms: Terms,
    options: &Options,
    cores: &Cores,
    kit: Kit<'_>,
    (progress, results): (&mut Progress, &mut Results),
) -> Result<Case> {
    let accel = kit.accel;
    let run_dir = RunDir::create()?;
    let logs = log_dir("demo")?;
    let places = Places { sockets: run_dir.path(), logs: &logs };
    progress.step(&format!("{}: booting its guests under QEMU with {accel}", terms.name()));
    let with_boost = all_paths(options).any(NetPath::is_boosted);
    let Terms { scheduler, link, placement } = terms;
    let world = boot(options, kit, (terms, with_boost), (&run_dir, places))?;
    let mut lab = Lab::new(world, scheduler, placement);
    progress.step("warming up, calibrating the guests' load");
    lab.warm_up()?;
    lab.warm_up_more(options)?;
    let how = (scheduler, options.layout);
    let competition = Competition::start(how, cores, &lab.world.guests, &run_dir)?;
    lab.place_host(cores)?;
    lab.start_load()?;
    if with_boost {
        lab.start_boosting(link, &logs)?;
    }
    lab.forget_vcpu_times(); // of paths whose guests had nothing else to do yet
    let before = (lab.clock()?, lab.guest_tcp()?);
    lab.complaints = lab.world.complaints(usize::from(RECEIVER))?;
    let mut record = Record::new(terms, results, progress, options.seed);
    lab.measure(options, &mut record)?;
    let Record { kinds, troubles, .. } = record;
    let (guests, cpu_shares) = (lab.guest_shares(&before.0)?, lab.cpu_shares());
    let (guest_tcp, boost_refused) = (lab.guest_tcp()?.since(&before.1), lab.boost_refused.take());
    let traces = lab.check_traces(options.traced_paths(), &logs, progress);
    progress.step("cleaning up");
    let account = lab.boosting.take().and_then(|boosting| boosting.accounts().pop());
    drop(competition);
    let link_measured = lab.world.link();
    lab.world.stop()?;
    print_boost(options, account, boost_refused.as_deref(), &cpu_shares);
    traces.context("the trace checker")?.iter().for_each(|line| println!("{line}"));
    let told = told(terms, link_measured, &guests, &guest_tcp);
    let about = json!({
        "terms": terms,
        "link": link_measured,
        "guests": guests,
        "cpu_shares": cpu_shares,
        "boost_refused": boost_refused,
        "passt": kit.passt.map(|passt| &passt.version),
        "guest_tcp": guest_tcp,
        "troubles": troubles,
    });
    results.tell(&terms.name(), about);
    Ok(Case { terms, kinds, troubles, boost_refused, told })
}

/// How the guests competed, for people.
fn told(
    terms: Terms,
    link: Option<link::Measured>,
    guests: &[GuestShare],
    tcp: &GuestTcp,
) -> String {
    let of = |share: &GuestShare| {
        format!("{} % in {:.0} turns a second", share.cpu_percent, share.switches_per_s)
    };
    let shares: Vec<String> = guests.iter().map(of).collect();
    let Placement { guests, load_percent, .. } = terms.placement;
    let load = match terms.scheduler.has_load() {
        false => "The guests have nothing else to do".to_owned(),
        true => {
            let shares = shares.join(", ");
            format!("Each of {guests} wants {load_percent} % of a core; they got {shares}")
        }
    };
    let link = link.map_or_else(String::new, |link| {
        format!(" ({:.2} ms round trip, {:.0} Mbit/s)", link.round_trip_ms, link.rate_mbit_s)
    });
    let artefact = match terms.scheduler {
        Scheduler::Rr30 => {
            "\nUnder TCG this case is no model of a KVM or Xen host: a vCPU that waits for QEMU's \
             lock\nloses the rest of its slice. strict30 keeps slices whole."
        }
        _ => "",
    };
    let GuestTcp { timeouts, loss_probes, losses_probed } = tcp;
    format!(
        "{}{link}: {load}.\nThe guest's TCP, over all paths: {timeouts} timeouts, {loss_probes} \
         loss probes, of which it took {losses_probed} for a loss repaired.{artefact}",
        terms.name()
    )
}

/// Boots the guests, with boost for the first if any path has it.
fn boot(
    options: &Options,
    kit: Kit<'_>,
    (terms, with_boost): (Terms, bool),
    (run_dir, places): (&RunDir, Places<'_>),
) -> Result<World> {
    let guests = vec![(Vmm::Qemu(kit.accel), kit.image); terms.placement.guests];
    if with_boost {
        // With it nice has no effect between sessions, and the booster refuses.
        run_dir.write(Path::new("/proc/sys/kernel/sched_autogroup_enabled"), "0")?;
    }
    let is_asked = |net: &Net| all_paths(options).any(|path| net_of(path) == *net);
    let nets: Vec<Net> = [Net::Passt, Net::PasstTuned].into_iter().filter(is_asked).collect();
    let plan = Plan {
        daemon: with_boost || is_asked(&Net::Nightporter) || is_asked(&Net::Attached),
        attach: is_asked(&Net::Attached),
        boost: with_boost.then_some(&options.boost),
        rx_ring: options.rx_ring,
        link: Some(terms.link.shape()),
        passt: kit.passt.map(|passt| (passt, &*nets)),
        ..Plan::default()
    };
    World::start_as(&guests, plan, places)
}

fn print_boost(
    options: &Options,
    account: Option<BoostAccount>,
    refused: Option<&str>,
    cpu_shares: &BTreeMap<&'static str, Vec<f64>>,
) {
    if options.is_short {
        return; // `result.json` has them
    }
    if let Some(account) = account {
        println!("The boosted guest's account: {account:?}");
    }
    if let Some(why) = refused {
        println!("Boost was refused, and its rows are without it: {why}");
    }
    for (path, shares) in cpu_shares {
        println!("CPU shares, {path}: {shares:?} %");
    }
}
