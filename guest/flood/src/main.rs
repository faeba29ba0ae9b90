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

/// The guest's part of Nightporter. A guest works without it, and may be faster with it.
#[derive(Debug, Parser)]
#[command(version = VERSION, about)]
enum Arguments {
    /// Hand over all data to send at once, while the host controls congestion.
    #[command(subcommand)]
    Flood(Flood),
}

#[derive(Debug, Subcommand)]
enum Flood {
    /// Watch for the host's heartbeat in the background, and flood while it lasts.
    On(Options),
    /// Stop watching, and undo everything.
    Off,
    /// Show the settings in force, and the limits of the data that a connection hands over at once.
    Status,
    /// Do the same as `on` in the foreground. On SIGTERM, undo everything and end.
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
    /// Segments that a new connection hands over before its first acknowledgement. More segments
    /// cost memory of the guest; with fewer segments, it waits for its core more often.
    #[arg(long, value_name = "SEGMENTS", default_value_t = 1000,
          value_parser = clap::value_parser!(u32).range(11..=65_535))]
    segments: u32,
    /// Leave routes alone: only connections under the congestion control `np_flood` flood. It is
    /// loaded as long as this runs. A connection chooses it by setsockopt(TCP_CONGESTION); the
    /// setting net.ipv4.tcp_congestion_control chooses it for all new ones.
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

/// Prints a line. The reader may have gone: a watcher's `on` has.
fn say(line: &str) {
    let mut out = io::stdout().lock();
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}
