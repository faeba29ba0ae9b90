//! `nightporter`: the operator's tool for a running `nightporterd`. It is a library, because its
//! binary and `examples/pages` (manual pages and completions) need the same arguments.

mod advise;
mod analyze;
mod capture;
mod changes;
mod client;
mod examples;
mod flows;
mod macs;
mod names;
mod settings;
mod show;
mod top;
mod vms;

use std::io::{self, Read, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use anyhow::{Result, bail};
use clap::{CommandFactory, Parser, Subcommand};
use clap_complete::CompleteEnv;
use client::Client;
pub use examples::examples;
use nightporter_api::{Reply, Request, StationInfo, Status};

/// The daemon's control socket, if its configuration says nothing else.
const CONTROL: &str = "/run/nightporter/control.sock";

/// Shows the state of a running nightporterd, and changes it.
#[derive(Debug, Parser)]
#[command(version, about)]
struct Arguments {
    /// The daemon's control socket: `daemon.control` of its configuration.
    #[arg(
        long,
        global = true,
        value_name = "PATH",
        default_value = CONTROL
    )]
    control: PathBuf,
    /// Print the daemon's answer as JSON.
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Shows the daemon and its ports.
    Status,
    /// Shows VMs and connections live in a terminal, sorted, with the keys of htop.
    Top(top::Options),
    /// Shows the tracked TCP connections.
    Flows(flows::Options),
    /// Shows the VMs of all hosts of the overlays, as the registry lists them: their hosts, and the
    /// ports at which they listen by the virtual TOE.
    Stations,
    /// Shows the MACs that the switch knows, and the port of each.
    Macs {
        /// Only those behind this VM, uplink or overlay.
        #[arg(add = names::of_the_switch())]
        port: Option<String>,
    },
    /// Shows one connection, by the number that `flows` shows.
    Flow {
        /// The number of the connection.
        id: u64,
        /// Show its segments from now on, as they reach and leave the daemon; end with Ctrl-C.
        #[arg(long)]
        trace: bool,
    },
    /// Writes the frames of a port as a pcap file; end with Ctrl-C. A super-segment is one frame,
    /// and checksums may still be partial.
    Capture(capture::Options),
    /// Shows what hosts, VMs and the network did to the connections of captures. Needs no daemon.
    Analyze(analyze::Options),
    /// Watches a VM for a while, and shows what the host, the VM and the network did to its
    /// connections, as `analyze` does.
    Monitor(analyze::live::Options),
    /// Shows how long the vCPUs of this host's VMs wait for a core, and what ack offload would gain
    /// by that. Needs no daemon.
    Advise(advise::Options),
    /// Turns ack offload of a VM on (for new connections) or off: `offload web1 off`.
    Offload(settings::Switch),
    /// Turns congestion offload of a VM on or off. With it, the host sends the data that the guest
    /// hands over, on connections that have ack offload.
    CongestionOffload(settings::Switch),
    /// Limits the rate at which a VM sends or receives: `rate-limit web1 from-guest 100`.
    RateLimit(settings::RateLimit),
    /// Shows VMs, and adds, changes and removes them without a restart.
    #[command(subcommand)]
    Vm(OfVm),
    /// Attaches the tap of a VM, which may be running: its new connections have ack offload.
    Attach(changes::Attach),
    /// Gives a VM its plain tap back.
    Detach(changes::Detach),
    /// Adds and removes uplinks.
    #[command(subcommand)]
    Uplink(changes::OfUplink),
    /// Reads the configuration file again, and applies all of its changes that need no restart; the
    /// others are listed.
    Reload(changes::Dry),
    /// Drains a VM: the host makes no new promises for it. Waits until all promises are kept;
    /// `offload VM on` ends the drain.
    Drain {
        /// The VM.
        #[arg(add = names::vms())]
        vm: String,
        /// Do not wait until all promises are kept.
        #[arg(long)]
        no_wait: bool,
    },
}

/// `nightporter vm`.
#[derive(Debug, Subcommand)]
enum OfVm {
    /// Shows a line for each VM: its link and offload, its connections, bytes held for it, sent and
    /// received by it, and its MAC.
    List(vms::List),
    /// Shows all about a VM: why its link is down, the process of its VMM, its offloads, drops and
    /// counters, and its keys of the configuration.
    Show {
        /// The name of the VM.
        #[arg(add = names::vms())]
        name: String,
    },
    #[command(flatten)]
    Change(changes::OfVm),
}

/// The arguments, for the manual pages and the completions.
#[must_use]
pub fn command() -> clap::Command {
    Arguments::command()
}

/// Runs the program.
#[must_use]
pub fn main() -> ExitCode {
    // A shell asks for completions; this ends the program then.
    CompleteEnv::with_factory(command).complete();
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        // The reader of our output has seen enough, as in `| head`.
        Err(e) if is_broken_pipe(&e) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("nightporter: {e:#}");
            ExitCode::FAILURE
        }
    }
}

fn is_broken_pipe(e: &anyhow::Error) -> bool {
    e.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::BrokenPipe)
}

fn run(arguments: &Arguments) -> Result<()> {
    let json = arguments.json;
    let connect = || Client::connect(&arguments.control);
    match &arguments.command {
        Command::Analyze(options) => analyze::analyze(json, options),
        Command::Advise(options) => advise::advise(json, options),
        Command::Status => {
            let status = status(&mut connect()?)?;
            print(json, &status, |out| show::status(out, &status))
        }
        Command::Top(options) => top::top(&mut connect()?, *options),
        Command::Flows(options) => flows::show(&mut connect()?, json, options),
        Command::Stations => {
            let stations = stations(&mut connect()?)?;
            print(json, &stations, |out| show::stations(out, &stations))
        }
        Command::Flow { id, trace: false } => match connect()?.ask(&Request::Flow { id: *id })? {
            Reply::Flow(flow) => print(json, &flow, |out| show::flow(out, &flow)),
            other => unexpected(&other),
        },
        Command::Flow { id, trace: true } => {
            let stream = connect()?.stream(&Request::Trace { id: *id })?;
            copy(stream, io::stdout(), "the connection's VM")
        }
        Command::Monitor(options) => analyze::live::monitor(connect()?, json, options),
        Command::Capture(options) => capture::capture(connect()?, &arguments.control, options),
        Command::Macs { port } => macs::show(&mut connect()?, json, port.as_deref()),
        Command::Offload(of) => {
            let (vm, on) = of.read()?;
            done(&mut connect()?, &Request::Offload { vm, on })
        }
        Command::CongestionOffload(of) => {
            let (vm, on) = of.read()?;
            done(&mut connect()?, &Request::CongestionOffload { vm, on })
        }
        Command::RateLimit(of) => done(&mut connect()?, &of.read()?),
        Command::Vm(OfVm::List(options)) => vms::list(&mut connect()?, json, *options),
        Command::Vm(OfVm::Show { name }) => vms::show(&mut connect()?, json, name),
        Command::Vm(OfVm::Change(of)) => {
            changes::of_vm(connect, &arguments.control, json, of.as_change()?)
        }
        Command::Attach(of) => {
            let attached = changes::of_vm(connect, &arguments.control, json, of.as_change()?);
            attached.inspect(|()| of.warn_of_readers())
        }
        Command::Detach(of) => {
            let wanted = of.as_change(&status(&mut connect()?)?)?;
            changes::of_vm(connect, &arguments.control, json, wanted)
        }
        Command::Uplink(of) => {
            changes::change(connect()?, &arguments.control, json, of.as_change()?)
        }
        Command::Reload(dry) => {
            changes::change(connect()?, &arguments.control, json, dry.as_change())
        }
        Command::Drain { vm, no_wait } => {
            let mut client = connect()?;
            done(&mut client, &Request::Drain { vm: vm.clone() })?;
            if *no_wait { Ok(()) } else { wait_until_drained(&mut client, vm) }
        }
    }
}

/// Prints `value` as JSON, or as text by `text`.
fn print(
    json: bool,
    value: &impl serde::Serialize,
    text: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> Result<()> {
    let mut out = io::stdout().lock();
    if json {
        serde_json::to_writer(&mut out, value).map_err(io::Error::from)?;
        writeln!(out)?;
    } else {
        text(&mut out)?;
    }
    Ok(out.flush()?)
}

fn unexpected<T>(reply: &Reply) -> Result<T> {
    bail!("an answer to another question: {reply:?}; use a nightporter of the daemon's version")
}

fn done(client: &mut Client, request: &Request) -> Result<()> {
    match client.ask(request)? {
        Reply::Done {} => Ok(()),
        other => unexpected(&other),
    }
}

fn status(client: &mut Client) -> Result<Status> {
    match client.ask(&Request::Status {})? {
        Reply::Status(status) => Ok(*status),
        other => unexpected(&other),
    }
}

/// All pages of the list.
fn stations(client: &mut Client) -> Result<Vec<StationInfo>> {
    let (mut all, mut after) = (Vec::new(), None);
    loop {
        match client.ask(&Request::Stations { after })? {
            Reply::Stations(page) => {
                all.extend(page.stations);
                after = page.next;
            }
            other => return unexpected(&other),
        }
        if after.is_none() {
            return Ok(all);
        }
    }
}

/// Copies each piece when it arrives, so that a reader sees it at once.
fn copy(mut from: impl Read, mut to: impl Write, who: &str) -> Result<()> {
    let mut buffer = vec![0; 1 << 16];
    loop {
        match from.read(&mut buffer)? {
            0 => bail!("{who} has gone"),
            n => to.write_all(&buffer[..n]).and_then(|()| to.flush())?,
        }
    }
}

fn wait_until_drained(client: &mut Client, vm: &str) -> Result<()> {
    let mut shown = None;
    loop {
        let status = status(client)?;
        let port = status.ports.iter().find(|p| p.name == vm);
        let Some(state) = port.and_then(|p| p.vm.as_ref()) else { bail!("{vm} has gone") };
        if state.owed_flows == 0 {
            return Ok(());
        }
        if !state.draining {
            bail!("somebody turned the offload of {vm} on again");
        }
        if shown.replace(state.owed_flows) != Some(state.owed_flows) {
            eprintln!(
                "{vm}: {} connections are owed {}",
                state.owed_flows,
                show::bytes(state.held_bytes)
            );
            if let Some(flow) = &state.stands {
                eprintln!("{vm} has not acknowledged {}", show::standing(flow));
            }
        }
        thread::sleep(Duration::from_millis(100));
    }
}
