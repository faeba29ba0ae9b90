//! `nightporter-lab compare`: a host that sends for a flooding guest beside Linux's own CUBIC, over
//! the same bottleneck.
//!
//! ```text
//!   remote namespace                               host namespace
//!   ┌──────────┐   delay line: rate, delay,   ┌──────────────────────────────────────────┐
//!   │ readers  ╪═  queue by frame, chance  ═══╪═ bridge ═╤═ nightporterd ══ UML guest    │
//!   └──────────┘                              │          └═ veth ═ Linux, a namespace    │
//!                                             └──────────────────────────────────────────┘
//! ```
//!
//! Both senders are the same program ([`nightporter_guest::data::pour`]) with the same send buffer.
//! The guest is user-mode Linux, whose routes flood, so the remote sees the host's congestion
//! control. The Linux beside it is the lab's own kernel with `cubic`, in a namespace. [`cells`] has
//! the bottlenecks and their arms, [`report`] the numbers and conditions.

mod cells;
mod reorder;
mod report;

use std::net::{Ipv4Addr, SocketAddrV4};
use std::path::PathBuf;
use std::sync::MutexGuard;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nightporter_guest::control::Command;
use nightporter_guest::data;
use serde_json::json;

use crate::cpus::Awake;
use crate::experiment::{self, Experiment, Results, Rounds};
use crate::flood::Flood;
use crate::flows::{self, Received, Server};
use crate::host::{self, FAR, guest_nic, remote_address};
use crate::image::{Image, log_dir};
use crate::link::{Shape, watch};
use crate::process;
use crate::progress::Progress;
use crate::rundir::RunDir;
use crate::sys;
use crate::vmm::{Places, Vmm};
use crate::world::{Net, World, address, guest_name};
use cells::{Arm, Who};
pub use cells::{Cell, Which};

/// The comparisons.
#[derive(Debug, Clone)]
pub struct Options {
    /// One after the other, each in a world of its own.
    pub cells: Vec<Cell>,
    /// How often each arm of a cell is run.
    pub rounds: usize,
    /// How long a run of an arm is; `None`: as its cell needs it.
    pub time: Option<Duration>,
    /// Where the result goes.
    pub out: Option<PathBuf>,
}

/// Subnet of the Linux that sends by itself.
const BARE: u8 = 3;

/// Largest send and receive buffers on all sides, bytes: no cell's window meets them.
const BUFFERS: &str = "4096 131072 33554432";
/// The pages that TCP may hold in a guest: its default depends on its memory and may be less than
/// that.
const GUEST_TCP_PAGES: &str = "16384 16384 16384";

/// Below the line's thread.
const PRIORITY: i32 = 10;

/// Between two runs, beside what the queue still holds: ends of connections get through.
const PAUSE: Duration = Duration::from_millis(300);

/// Frames that come late, over so many lines side by side: `reorder`. `only`: the cells whose name
/// has this.
///
/// # Errors
/// Whatever kept it from finishing; what is done so far is kept, and the next run goes on.
pub fn run_reorder(
    lines: usize,
    rounds: usize,
    only: Option<&str>,
    out: Option<PathBuf>,
) -> Result<bool> {
    process::die_cleanly_on_signals()?;
    let _awake = Awake::hold();
    sys::set_fifo(0, PRIORITY).context("SCHED_FIFO")?;
    reorder::run(lines, rounds, only, out)
}

/// Runs the cells, prints a table and writes `target/compare/result.json`; whether all cells
/// showed what they had to.
///
/// # Errors
/// Whatever kept it from finishing.
pub fn run(options: &Options) -> Result<bool> {
    process::die_cleanly_on_signals()?;
    let _awake = Awake::hold();
    let image = Image::for_uml()?;
    // Linux answers an ACK within the line's thread; daemon and guest must not wait for other load
    // of this machine. Children inherit the priority.
    sys::set_fifo(0, PRIORITY).context("SCHED_FIFO")?;
    let mut progress = Progress::start();
    let names: Vec<String> = options.cells.iter().map(ToString::to_string).collect();
    let seconds = options.time.map(|time| time.as_secs_f64());
    let mut results = Results::open(&Experiment {
        name: "compare",
        measures: &report::MEASURES,
        settings: json!({ "cells": names, "rounds": options.rounds, "seconds": seconds }),
        out: options.out.clone(),
    })?;
    for (index, cell) in options.cells.iter().enumerate() {
        let (image, progress, results) = (&image, &mut progress, &mut results);
        progress.step(&format!("{} of {}: {cell}", index + 1, options.cells.len()));
        if !results.lacks(&cell.of_experiment(), options.rounds) {
            continue; // a run that was cut off had done it
        }
        // A thread of its own, because a world takes its thread into its network namespace.
        thread::scope(|scope| {
            let inside = scope.spawn(move || run_cell(cell, options, image, progress, results));
            inside.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })?;
    }
    options.cells.iter().for_each(|cell| report::judge(&mut results, cell));
    results.finish()
}

/// A cell's world.
struct Bench {
    world: World,
    server: Server,
}

fn run_cell(
    cell: &Cell,
    options: &Options,
    image: &Image,
    progress: &mut Progress,
    results: &mut Results,
) -> Result<()> {
    let run_dir = RunDir::create()?;
    let places = Places { sockets: run_dir.path(), logs: &log_dir("compare")? };
    let mut bench = Bench::start(cell.shape(), image, places)?;
    let time = options.time.unwrap_or(cell.time);
    let link = bench.world.link().context("a line was measured")?;
    let about = json!({ "shape": cell.shape(), "link": link, "seconds": time.as_secs_f64() });
    results.tell(&cell.to_string(), about);
    let rounds = Rounds::exactly(options.rounds);
    results.rounds(&cell.of_experiment(), rounds, progress, |arm, _| {
        Ok(report::values(&bench.run(cell, &cell.arms[arm], time)?, time))
    })?;
    bench.world.stop()
}

impl Cell {
    /// Its arms, as those of an experiment.
    fn of_experiment(&self) -> Vec<experiment::Cell> {
        let case = self.to_string();
        self.arms.iter().map(|arm| experiment::Cell::new(&*case, &*arm.name)).collect()
    }
}

impl Bench {
    fn start(shape: Shape, image: &Image, places: Places<'_>) -> Result<Self> {
        let guests = [(Vmm::Uml, image)];
        let mut world = World::start(&guests, true, Some(shape), places)?;
        let nic = guest_nic(0, BARE);
        let bare = world.host().add_machine("bare", &nic)?;
        for machine in [&bare, world.remote()] {
            machine.enter(|| -> Result<()> {
                host::sysctl("net/ipv4/tcp_no_metrics_save", "1")?;
                host::sysctl("net/ipv4/tcp_wmem", BUFFERS)?;
                host::sysctl("net/ipv4/tcp_rmem", BUFFERS)
            })?;
        }
        world.remote().enter(|| -> Result<()> {
            // The host made its way to the subnets of paths only.
            host::join_subnet(remote_address(BARE))?;
            host::add_address(reader_address(BARE, true))?;
            host::add_address(reader_address(Net::Nightporter.subnet(), true))
        })?;
        let server = Server::start(&bare, nic.address)?;
        let guest = &mut world.guests[0];
        for (name, text) in [("tcp_wmem", BUFFERS), ("tcp_mem", GUEST_TCP_PAGES)] {
            let path = format!("/proc/sys/net/ipv4/{name}");
            guest.call(&Command::Write { path, text: text.to_owned() })?;
        }
        world.daemon()?.set_congestion_offload(&guest_name(0), true)?;
        world.guests[0].flood(Some(Flood::Route))?;
        Ok(Self { world, server })
    }

    /// One run of an arm: all of its flows at once.
    fn run(&mut self, cell: &Cell, arm: &Arm, time: Duration) -> Result<Vec<Run>> {
        let before = self.world.daemon()?.vm_counter("sent_for_guest_bytes")?;
        let remote = self.world.remote();
        let received: Vec<Received> = thread::scope(|scope| {
            let flows: Vec<_> = arm
                .flows
                .iter()
                .map(|&(who, far)| {
                    let (sender, reader) = self.addresses(who, far);
                    scope.spawn(move || remote.enter(|| flows::receive(sender, reader, time)))
                })
                .collect();
            let ended = flows.into_iter().map(|flow| flow.join().expect("does not panic"));
            ended.collect::<Result<_>>()
        })?;
        let queue = cell.shape().queue.unwrap_or_default();
        thread::sleep(PAUSE + queue + cell.round_trip); // what was under way gets through
        let mut watch = self.watch()?;
        let runs = received.into_iter().map(|received| {
            let wire = watch.take(received.sender, received.reader);
            Ok(Run { wire: wire.context("the line saw no data")?, received })
        });
        let runs: Vec<Run> = runs.collect::<Result<_>>()?;
        watch.clear();
        drop(watch);
        self.check_who_sent(arm, &runs, before)?;
        Ok(runs)
    }

    /// The line's view.
    fn watch(&self) -> Result<MutexGuard<'_, watch::Watch>> {
        Ok(self.world.host().watch().context("a line")?.lock().expect("no panics"))
    }

    /// The host has sent for the guest all that came from it.
    fn check_who_sent(&mut self, arm: &Arm, runs: &[Run], before: u64) -> Result<()> {
        let ours = arm.flows.iter().zip(runs).filter(|((who, _), _)| *who == Who::Nightporter);
        let bytes: u64 = ours.map(|(_, run)| run.received.bytes()).sum();
        let sent = self.world.daemon()?.vm_counter("sent_for_guest_bytes")? - before;
        ensure!(sent >= bytes, "the host has sent {sent} bytes only, the remote has got {bytes}");
        Ok(())
    }

    /// Of a flow: its sender's, and the reader's.
    fn addresses(&self, who: Who, far: bool) -> (SocketAddrV4, SocketAddrV4) {
        let (sender, path) = match who {
            Who::Linux | Who::LinuxPaced => (guest_nic(0, BARE).address, BARE),
            Who::Nightporter => (address(0, Net::Nightporter), Net::Nightporter.subnet()),
        };
        let port = if who == Who::LinuxPaced { self.server.paced_port() } else { data::PORT };
        (SocketAddrV4::new(sender, port), SocketAddrV4::new(reader_address(path, far), 0))
    }
}

/// One flow of one run: as its reader and as the line saw it.
#[derive(Debug)]
struct Run {
    received: Received,
    wire: watch::Flow,
}

/// The remote host's address on this subnet, or the one that is farther away.
fn reader_address(path: u8, far: bool) -> Ipv4Addr {
    let [a, b, c, d] = remote_address(path).octets();
    Ipv4Addr::new(a, b, c, if far { FAR } else { d })
}
