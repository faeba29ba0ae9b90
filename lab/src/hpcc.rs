//! `nightporter-lab hpcc`: the HPC Challenge (Debian's `hpcc`) over Open MPI's TCP, one process in
//! each guest, half of the guests on each of two hosts ([`crate::hosts`]): by guest TCP over the
//! overlay (within a host over its switch), and by the TOE. Both take turns, run by run.
//!
//! Open MPI starts its daemons (`orted`) by `nightporter-lab-peer`, and these talk to each other by
//! guest TCP on both paths. The connections of the processes are compared; on one path these are
//! under the TOE's library.

mod report;

use std::fmt::Write as _;
use std::thread;

use anyhow::{Context, Result, bail, ensure};
use nightporter_guest::control::{Command, Reply};
use serde::Serialize;

use crate::accel::Accel;
use crate::cpus::Awake;
use crate::demo_toe::{Between, vmm};
use crate::experiment::{Cell, Experiment, Results, Rounds, Values};
use crate::hosts::{Hosts, nic};
use crate::image::{Image, PEER, TOE_LIBRARY, log_dir};
use crate::peer::Sockets;
use crate::process;
use crate::progress::Progress;
use crate::rundir::RunDir;
use crate::vmm::{Places, Vmm};

/// Further packages of guests; `dash` is their shell.
const PACKAGES: [&str; 4] = ["coreutils", "dash", "hpcc", "openmpi-bin"];
/// Of a guest with one process and its share of the matrices.
const MEMORY_MIB: u32 = 640;
/// A run by the TOE has given each guest so many bytes of streams at least.
const BYTES_LEAST: u64 = 1_000_000;
/// Its directory, with its input and output.
const DIRECTORY: &str = "/tmp/hpcc";

/// The measurements.
#[derive(Debug, Clone, Serialize)]
pub struct Options {
    /// Numbers of guests, one after the other; even.
    pub guests: Vec<usize>,
    /// The VMM of the guests.
    pub between: Between,
    /// Runs by each path.
    pub rounds: usize,
    /// Rows of HPL's matrix, from which the sizes of all tests come.
    pub size: usize,
    /// `None` probes.
    pub accel: Option<Accel>,
}

/// Measures, prints a table and writes `target/hpcc/result.json`; whether all of it was better by
/// TOE.
///
/// # Errors
/// Whatever kept it from finishing.
pub fn run(options: &Options) -> Result<bool> {
    process::die_cleanly_on_signals()?;
    let mut progress = Progress::start();
    let _awake = Awake::hold();
    let (vmm, image) = vmm(options.between, options.accel, &mut progress)?;
    progress.step("preparing Open MPI and hpcc for the guests");
    let image = image.with_packages("hpcc", &PACKAGES)?;
    let mut results = Results::open(&Experiment {
        name: "hpcc",
        measures: &report::MEASURES,
        settings: serde_json::to_value(options)?,
        out: None,
    })?;
    for &guests in &options.guests {
        ensure!(
            guests >= 2 && guests.is_multiple_of(2),
            "half of {guests} guests is no whole number"
        );
        // A thread of its own, because it goes into the hosts' namespaces.
        let (progress, image, results) = (&mut progress, &image, &mut results);
        if !results.lacks(&cells(guests), options.rounds) {
            continue; // a run that was cut off had done it
        }
        let measured = thread::scope(|scope| {
            let inside =
                scope.spawn(move || measure(guests, (vmm, image), options, progress, results));
            inside.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        });
        measured.with_context(|| format!("{guests} guests"))?;
    }
    progress.clear();
    options.guests.iter().for_each(|guests| report::judge(&mut results, &case(*guests)));
    results.finish()
}

/// As the tables call it.
const fn name(path: Sockets) -> &'static str {
    match path {
        Sockets::Native => "overlay",
        Sockets::Toe => "toe",
    }
}

const PATHS: [Sockets; 2] = [Sockets::Native, Sockets::Toe];

fn case(guests: usize) -> String {
    format!("{guests} guests")
}

fn cells(guests: usize) -> [Cell; 2] {
    PATHS.map(|path| Cell::new(case(guests), name(path)))
}

/// Boots the guests, runs it by both paths in turn, takes everything down.
fn measure(
    guests: usize,
    (vmm, image): (Vmm, &Image),
    options: &Options,
    progress: &mut Progress,
    results: &mut Results,
) -> Result<()> {
    let run_dir = RunDir::create()?;
    let logs = log_dir("hpcc")?;
    progress.step(&format!("booting {guests} guests on two hosts"));
    let places = Places { sockets: run_dir.path(), logs: &logs };
    let host_of: Vec<usize> = (0..guests).map(|guest| guest / (guests / 2)).collect();
    let mut hosts = Hosts::start_on(&host_of, guests, vmm, image, MEMORY_MIB, places)?;
    for guest in 0..guests {
        prepare(&mut hosts, guest, options.size).context("preparing a guest")?;
    }
    let rounds = Rounds::exactly(options.rounds);
    let one = |path: usize, _| challenge(&mut hosts, PATHS[path]);
    results.rounds(&cells(guests), rounds, progress, one)?;
    progress.step("cleaning up");
    hosts.stop()
}

/// Files that an installed Debian has, and an unpacked one has not; the input; and the program that
/// starts Open MPI's daemon there.
fn prepare(hosts: &mut Hosts, guest: usize, size: usize) -> Result<()> {
    let count = hosts.guests.len();
    let script = format!(
        "echo guest{guest} >/proc/sys/kernel/hostname\n\
         echo root:x:0:0:root:/root:/bin/sh >/etc/passwd\n\
         mkdir -p {DIRECTORY}\n\
         ln -sf blas/libblas.so.3 /usr/lib/x86_64-linux-gnu/libblas.so.3\n\
         cat >{DIRECTORY}/hpccinf.txt <<END\n{}END\n",
        input(size, count)
    );
    sh(hosts, guest, &script)?;
    let (name, program) = ("commands".to_owned(), PEER.to_owned());
    let (arguments, environment) = (vec!["serve".to_owned()], environment());
    match hosts.guests[guest].call(&Command::Start { name, program, arguments, environment })? {
        Reply::Ok => Ok(()),
        other => bail!("start was answered with {other:?}"),
    }
}

/// One run, by one process in each guest.
fn challenge(hosts: &mut Hosts, path: Sockets) -> Result<Values> {
    let count = hosts.guests.len();
    let list: Vec<String> = (0..count).map(|guest| nic(guest).address.to_string()).collect();
    let subnet = format!("{}/{}", list[0], nic(0).prefix);
    let preload = match path {
        Sockets::Native => String::new(),
        Sockets::Toe => format!("-x LD_PRELOAD={TOE_LIBRARY}"),
    };
    // The guest's agent ends what says nothing for a minute.
    let script = format!(
        "cd {DIRECTORY}\nrm -f hpccoutf.txt\n\
         mpirun.openmpi --allow-run-as-root -np {count} --host {list} --bind-to none \
         --mca plm_rsh_agent '{PEER} at' --mca pml ob1 --mca btl tcp,self \
         --mca btl_tcp_if_include {subnet} --mca oob_tcp_if_include {subnet} \
         --mca mca_base_component_show_load_errors 0 {preload} --wdir {DIRECTORY} hpcc \
         >said 2>&1 &\n\
         while kill -0 $! 2>/dev/null; do sleep 2; echo; done\n\
         wait $! || {{ cat said; exit 1; }}\n\
         cat hpccoutf.txt\n",
        list = list.join(","),
    );
    let before = given(hosts)?;
    let said = sh(hosts, 0, &script)?;
    let after = given(hosts)?;
    let least = before.iter().zip(&after).map(|(before, after)| after - before).min();
    let by_toe = least.unwrap_or(0) >= BYTES_LEAST;
    let none = before == after;
    ensure!(
        if path == Sockets::Toe { by_toe } else { none },
        "by {} these bytes went by TOE to each guest: {before:?} before, {after:?} after",
        name(path)
    );
    report::read(count, &said)
}

/// Bytes of streams that each guest was given over its socket device.
fn given(hosts: &mut Hosts) -> Result<Vec<u64>> {
    (0..hosts.guests.len()).map(|guest| hosts.given(guest)).collect()
}

fn environment() -> Vec<(String, String)> {
    let all = [("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"), ("HOME", "/root"), ("SHELL", "/bin/sh")];
    all.map(|(name, value)| (name.to_owned(), value.to_owned())).into()
}

/// Runs a script to its end; returns its output.
fn sh(hosts: &mut Hosts, guest: usize, script: &str) -> Result<String> {
    let arguments = vec!["-ec".to_owned(), script.to_owned()];
    let (program, environment) = ("/bin/sh".to_owned(), environment());
    let command = Command::Run { program, arguments, environment };
    match hosts.guests[guest].call(&command)? {
        Reply::Ran { ok: true, output } => Ok(output),
        Reply::Ran { ok: false, output } => bail!("guest {guest} said: {output}"),
        other => bail!("run was answered with {other:?}"),
    }
}

/// hpccinf.txt, line by line as its README has it: one size, one grid of processes, and of HPL's
/// ways one each. PTRANS transposes a matrix of four times the size besides.
fn input(size: usize, processes: usize) -> String {
    // The rows of the grid: the largest divisor up to the square root.
    let rows = (1..=processes).filter(|n| n * n <= processes && processes.is_multiple_of(*n)).max();
    let rows = rows.unwrap_or(1);
    let mut text = String::from("HPL input\nlab\nHPL.out\n8\n");
    let columns = processes / rows;
    let _ = write!(text, "1\n{size}\n1\n80\n0\n1\n{rows}\n{columns}\n16.0\n");
    // Factorisations and broadcasts of HPL, to its alignment.
    text += "1\n2\n1\n4\n1\n2\n1\n1\n1\n1\n1\n0\n2\n64\n0\n0\n1\n8\n";
    let _ = write!(text, "a line that separates\n1\n{}\n0\n80\n", 4 * size);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn four_processes_are_a_square_and_the_lines_are_where_hpcc_reads_them() {
        let text = input(1000, 4);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 36);
        assert_eq!(lines[4..8], ["1", "1000", "1", "80"], "lines 5 to 8");
        assert_eq!(lines[9..12], ["1", "2", "2"], "lines 10 to 12");
        assert_eq!(lines[12], "16.0", "line 13");
        assert_eq!(lines[32..], ["1", "4000", "0", "80"], "lines 33 to 36");
        assert_eq!(input(1000, 2).lines().collect::<Vec<_>>()[9..12], ["1", "1", "2"]);
    }
}
