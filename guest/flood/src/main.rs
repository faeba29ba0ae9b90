//! `nightporter-guest`: the tool for guests of a Nightporter host.

use std::io::{self, Write};
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};
use nightporter_flood::control::{self, READY};
use nightporter_flood::record::Place;
use nightporter_flood::watch::How;
use nightporter_flood::{status, watch};

const VERSION: &str = if cfg!(np_flood) {
    concat!(env!("CARGO_PKG_VERSION"), " with np_flood")
} else {
    concat!(env!("CARGO_PKG_VERSION"), " without np_flood")
};

/// The guest's part of Nightporter. Nothing of it is needed; some of it makes a guest faster.
#[derive(Debug, Parser)]
#[command(version = VERSION, about)]
enum Arguments {
    /// Hand over all there is to send at once, while the host controls congestion.
    #[command(subcommand)]
    Flood(Flood),
}

#[derive(Debug, Subcommand)]
enum Flood {
    /// Watch for the host's heartbeat in the background, and flood while it lasts.
    On(Options),
    /// Stop watching, and undo everything.
    Off,
    /// What is in force, and what limits how much a connection hands over at once.
    Status,
    /// The same as `on`, in the foreground; ends, and undoes everything, on SIGTERM.
    Watch {
        #[command(flatten)]
        options: Options,
        /// Be the watcher of this process.
        #[arg(long, hide = true)]
        keeper: Option<u32>,
    },
}

#[derive(Clone, Copy, Debug, clap::Args)]
struct Options {
    /// What a new connection hands over before its first acknowledgement. More costs memory of the
    /// guest; less makes it wait for its core more often.
    #[arg(long, value_name = "SEGMENTS", default_value_t = 1000,
          value_parser = clap::value_parser!(u32).range(11..=65_535))]
    segments: u32,
    /// Leave routes alone: only connections under the congestion control `np_flood` flood, which is
    /// there as long as this runs. They choose it by setsockopt(TCP_CONGESTION), or all do by the
    /// setting net.ipv4.tcp_congestion_control.
    #[arg(long)]
    np_flood: bool,
}

impl From<Options> for How {
    fn from(options: Options) -> Self {
        Self { segments: options.segments, np_flood: options.np_flood }
    }
}

fn main() -> ExitCode {
    let Arguments::Flood(command) = Arguments::parse();
    match run(command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("nightporter-guest: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Flood) -> Result<()> {
    let place = Place::of_this_namespace()?;
    match command {
        Flood::On(options) => say(&control::on(&place, options.into())?),
        Flood::Off => say(&control::off(&place)?),
        Flood::Status => say(status::status(&place)?.trim_end()),
        Flood::Watch { options, keeper: Some(keeper) } => {
            watch::watch(&place, options.into(), keeper, || say(READY))?;
        }
        Flood::Watch { options, keeper: None } => {
            if watch::keep(&place, options.into())?.is_none() {
                say("It is on already.");
            }
        }
    }
    Ok(())
}

/// Prints a line. Whoever reads may have gone: a watcher's `on` has.
fn say(line: &str) {
    let mut out = io::stdout().lock();
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}
