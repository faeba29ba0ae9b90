//! `nightporter-guest`: the tool for guests of a Nightporter host.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::net::IpAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use nightporter_flood::capture::{Capture, Chosen, Ears, Heard, PERIOD};
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
    /// Capture the headers of TCP as this guest sees them, with its own times, for `nightporter
    /// analyze --side guest`. Ends on Ctrl-C. A line of its input is answered with the number of
    /// frames, all of which are in the file then.
    Watch(Watch),
}

#[derive(Debug, clap::Args)]
struct Watch {
    /// The interface.
    interface: String,
    /// Only frames from or to this address.
    #[arg(long, value_name = "ADDRESS")]
    host: Option<IpAddr>,
    /// Only frames from or to this port.
    #[arg(long)]
    port: Option<u16>,
    /// End after so long (10s, 5m).
    #[arg(long = "for", value_name = "TIME", value_parser = seconds)]
    time: Option<Duration>,
    /// The file; `-` is standard output.
    #[arg(short, value_name = "FILE")]
    write: PathBuf,
}

/// `30s`, `5m`, or seconds.
fn seconds(text: &str) -> Result<Duration, String> {
    let (number, of) = match text.strip_suffix('m') {
        Some(minutes) => (minutes, 60),
        None => (text.strip_suffix('s').unwrap_or(text), 1),
    };
    let number: u64 = number.parse().map_err(|_| "a time is written 30s or 5m".to_owned())?;
    Ok(Duration::from_secs(number.saturating_mul(of)))
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
    let done = match Arguments::parse() {
        Arguments::Flood(command) => run(command),
        Arguments::Watch(options) => capture(&options),
    };
    match done {
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

/// Captures until it is told to end.
fn capture(options: &Watch) -> Result<()> {
    let is_standard = options.write.as_os_str() == "-";
    let out: Box<dyn Write> = match is_standard {
        true => Box::new(io::stdout()),
        false => Box::new(
            File::create(&options.write)
                .with_context(|| format!("making {}", options.write.display()))?,
        ),
    };
    let chosen = Chosen { host: options.host, port: options.port };
    let mut capture = Capture::start(&options.interface, chosen, BufWriter::new(out))?;
    let counts = |(frames, missed): (u64, u64)| format!("{frames} frames, {missed} missed");
    let until = options.time.map(|time| Instant::now() + time);
    let mut ears = Ears::open()?;
    loop {
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let heard = ears.hear(left.map_or(PERIOD, |left| left.min(PERIOD)))?;
        capture.take()?;
        if heard == Heard::Line {
            say(&counts(capture.counts()));
        }
        if heard == Heard::End || left.is_some_and(|left| left.is_zero()) {
            eprintln!("{}", counts(capture.counts()));
            return Ok(());
        }
    }
}

/// Prints a line. The reader may have gone: a watcher's `on` has.
fn say(line: &str) {
    let mut out = io::stdout().lock();
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}
