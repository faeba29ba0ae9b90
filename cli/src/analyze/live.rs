//! `nightporter monitor`: as `analyze`, but of a VM's frames as they pass at both sides of its
//! port. The daemon sends their headers, and all of the computing is done here.

use std::path::Path;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Args;
use nightporter_api::Request;
use nightporter_core::monitor::Way;
use nix::sys::signal::{SigSet, Signal};

use super::read::Capture;
use super::report::{BOTH, SIDES};
use super::{Analysis, Show, captured};
use crate::advise::span;
use crate::client::Client;
use crate::names;

/// The VM, and for how long.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// The VM.
    #[arg(add = names::vms())]
    vm: String,
    /// How long to watch: 10s, 500ms, 2min. Without it until Ctrl-C.
    #[arg(long = "for", value_name = "TIME", value_parser = span)]
    span: Option<Duration>,
    #[command(flatten)]
    show: Show,
}

/// Watches a VM for a while, and shows what was seen.
///
/// # Errors
/// There is no such VM, or no frame of it passed; a file cannot be written.
pub(crate) fn monitor(client: Client, json: bool, options: &Options) -> Result<()> {
    let (on_signal, on_time) = (client.hang_up()?, client.hang_up()?);
    // They end the watch, and the findings are shown.
    let signals = SigSet::from_iter([Signal::SIGINT, Signal::SIGTERM]);
    signals.thread_block().context("cannot wait for signals")?;
    thread::spawn(move || signals.wait().map(|_| on_signal())); // ends with the process
    let stream = client.stream(&Request::Monitor { vm: options.vm.clone() })?;
    match options.span {
        None => eprintln!("watching {}; end with Ctrl-C", options.vm),
        Some(span) => drop(thread::spawn(move || {
            thread::sleep(span);
            on_time();
        })),
    }
    let mut stream = Capture::of(Path::new(&options.vm), Box::new(stream))?;
    let mut analysis = Analysis::new(&options.show, Vec::new());
    let mut unread = [0; _];
    while stream.read_next()? {
        let frame = &stream.frame;
        let way = |is_inbound| {
            let ways = [Way::ToGuest, Way::FromGuest];
            let side = *SIDES.get(frame.interface)?;
            ways.into_iter().find(|way| way.comes_at(side) == is_inbound).map(|way| (side, way))
        };
        if let Some((side, way)) = frame.is_inbound.and_then(way) {
            analysis.handle(frame, side, Some(way), &mut unread);
        }
    }
    let first = stream.counts.first;
    ensure!(first.is_some(), "no frame of {} has passed", options.vm);
    let seen = vec![captured(&stream, BOTH, &unread)];
    let report = analysis.report(seen, first.unwrap_or_default(), &options.show)?;
    options.show.write(json, &report)
}
