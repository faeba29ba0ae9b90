//! `nightporter analyze`: the effects of hosts, VMs and the network on the connections of captures.
//! docs/monitor.md has what each number means.

mod csv;
pub(crate) mod live;
mod plot;
mod read;
mod report;
mod text;

use std::collections::HashSet;
use std::net::IpAddr;
use std::path::PathBuf;

use anyhow::{Result, bail, ensure};
use clap::{Args, ValueEnum};
use nightporter_core::drops::DropReason;
use nightporter_core::flow::key::FlowKey;
use nightporter_core::limits::MONITOR_FLOWS_MAX;
use nightporter_core::monitor::headers::Headers;
use nightporter_core::monitor::{self, Monitor, Side, Way};
use nightporter_core::time::{Duration, Instant};
use nightporter_core::wire::packet::{Net, Packet};

use crate::print;
use read::{Capture, End, Frame};
use report::{Captured, Report, name_of};

/// The captures and the output.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// A capture (pcap or pcapng), or two of the same VM: the network's side of the host first,
    /// then the guest's. `-` is standard input.
    #[arg(required = true, num_args = 1..=2, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Where a single capture was made.
    #[arg(long, value_enum, default_value = "network")]
    side: At,
    /// An address of the VM, repeatable. Without it the VM is the end of each connection that is
    /// behind the side at which the connection's first frame was seen.
    #[arg(long, value_name = "ADDRESS")]
    vm: Vec<IpAddr>,
    #[command(flatten)]
    show: Show,
}

/// The output.
#[derive(Debug, Args)]
struct Show {
    /// Show one connection, by the number that the list has.
    #[arg(long, value_name = "ID")]
    flow: Option<usize>,
    /// The interval of burstiness: a round trip of the path, in milliseconds.
    #[arg(long, value_name = "MS", default_value_t = 60,
          value_parser = clap::value_parser!(u64).range(1..=60_000))]
    round_trip: u64,
    /// A millisecond with more than this rate is a burst, Mbit/s.
    #[arg(long, value_name = "MBIT_S", default_value_t = 200,
          value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    burst: u32,
    /// Write a line for each connection, direction and side to this file, as CSV.
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Draw the times between ACKs and the delays to this file, as SVG.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum At {
    /// Between the host and the network.
    Network,
    /// At the VM's tap or ring.
    Guest,
}

impl From<At> for Side {
    fn from(at: At) -> Self {
        match at {
            At::Network => Self::Net,
            At::Guest => Self::Guest,
        }
    }
}

/// Reads the captures and shows what was in them.
///
/// # Errors
/// A file cannot be read or written, or is no capture; there is no such connection.
pub(crate) fn analyze(json: bool, options: &Options) -> Result<()> {
    let report = read(options)?;
    options.show.write(json, &report)
}

fn read(options: &Options) -> Result<Report> {
    let sides = match options.files.len() {
        1 => vec![Side::from(options.side)],
        _ => vec![Side::Net, Side::Guest],
    };
    let mut places = Vec::new();
    for (path, side) in options.files.iter().zip(sides) {
        places.push(Place { side, file: Capture::open(path)?, has_frame: false, unread: [0; _] });
    }
    let mut analysis = Analysis::new(&options.show, options.vm.clone());
    for place in &mut places {
        place.has_frame = place.file.read_next()?;
    }
    // The earliest frame of all; of two at once the network's.
    while let Some(place) =
        places.iter_mut().filter(|it| it.has_frame).min_by_key(|it| it.file.frame.at)
    {
        analysis.handle(&place.file.frame, place.side, None, &mut place.unread);
        place.has_frame = place.file.read_next()?;
    }
    let first = places.iter().filter_map(|it| it.file.counts.first).min().unwrap_or(Instant::ZERO);
    if places.iter().all(|it| it.file.counts.frames == 0) {
        bail!("no frame could be read of {}", names(&places));
    }
    let captured = places.iter().map(|it| captured(&it.file, name_of(it.side), &it.unread));
    let mut report = analysis.report(captured.collect(), first, &options.show)?;
    report.vm_is_a_guess = options.vm.is_empty() && places.len() == 1;
    Ok(report)
}

fn names(places: &[Place]) -> String {
    let names: Vec<_> = places.iter().map(|it| it.file.path.display().to_string()).collect();
    names.join(" and ")
}

/// A capture, and where it was made.
struct Place {
    side: Side,
    file: Capture,
    /// A frame is at hand.
    has_frame: bool,
    unread: Unread,
}

/// Frames whose headers could not be read, by [`DropReason`]; those that are not TCP's last.
type Unread = [u64; DropReason::ALL.len() + 1];

fn captured(file: &Capture, side: &'static str, unread: &Unread) -> Captured {
    let counts = &file.counts;
    let (not_tcp, unread) = unread.split_last().expect("one at least");
    let unread = DropReason::ALL.iter().map(|reason| reason.label()).zip(unread.iter().copied());
    let (end, damaged_at) = match counts.end {
        End::Whole => ("whole", None),
        End::Cut => ("cut", None),
        End::Damaged(at) => ("damaged", Some(at)),
    };
    let first = counts.first.unwrap_or(Instant::ZERO);
    Captured {
        file: file.path.display().to_string(),
        side,
        frames: counts.frames,
        bytes: counts.bytes,
        begins_s: report::seconds(first.since(Instant::ZERO)),
        lasts_s: report::seconds(counts.last.since(first)),
        not_tcp: *not_tcp,
        unread: unread.filter(|(_, n)| *n > 0).collect(),
        left_out: counts.unusable + counts.other_links,
        backwards: counts.backwards,
        missed: counts.missed,
        end,
        damaged_at,
    }
}

struct Analysis {
    monitor: Monitor,
    headers: Headers,
    vm: Vec<IpAddr>,
    /// Without `vm`: connections by one of their two names, that of segments to the guest.
    ends: HashSet<FlowKey>,
    /// Segments of connections beyond the number that is watched, whose VM is not known.
    unwatched: u64,
}

impl Show {
    fn write(&self, json: bool, report: &Report) -> Result<()> {
        if let Some(path) = &self.csv {
            csv::write(path, report)?;
        }
        if let Some(path) = &self.svg {
            plot::write(path, report)?;
        }
        print(json, report, |out| text::write(out, report))
    }
}

impl Analysis {
    fn new(show: &Show, vm: Vec<IpAddr>) -> Self {
        let round_trip = Duration::from_millis(show.round_trip);
        let settings =
            monitor::Settings { round_trip, burst_mbit_s: show.burst, ..Default::default() };
        let (monitor, headers) = (Monitor::new(settings), Headers::default());
        Self { monitor, headers, vm, ends: HashSet::new(), unwatched: 0 }
    }

    /// The findings. Errors: there is no such connection.
    fn report(&self, captured: Vec<Captured>, first: Instant, show: &Show) -> Result<Report> {
        let flows = self.monitor.flows().len();
        if let Some(id) = show.flow {
            ensure!(
                (1..=flows).contains(&id),
                "there is no connection {id}\n    fix: use a number from 1 to {flows}"
            );
        }
        let mut report = Report::new(captured, &self.monitor, first, show.flow);
        report.unwatched_segments += self.unwatched;
        Ok(report)
    }

    /// Takes in a frame. `way`: its direction, if that is known.
    fn handle(&mut self, frame: &Frame, side: Side, way: Option<Way>, unread: &mut Unread) {
        let packet = match self.headers.parse(&frame.head, frame.len) {
            Ok(packet) => packet,
            Err(reason) => {
                unread[reason as usize] += 1;
                return;
            }
        };
        if packet.tcp().is_none() {
            unread[DropReason::ALL.len()] += 1;
        }
        let Some(way) = way.or_else(|| self.way(side, &packet)) else { return };
        let (at, len) = (frame.at, u32::try_from(frame.len).unwrap_or(u32::MAX));
        self.monitor.handle(&monitor::Frame { at, vm: 0, side, way, len, packet: &packet });
    }

    /// The frame's direction; `None` if it is none of the VM's.
    fn way(&mut self, side: Side, packet: &Packet) -> Option<Way> {
        if !self.vm.is_empty() {
            let Net::Ip(ip) = &packet.net else { return None };
            let is_vm = |address: IpAddr| self.vm.contains(&address);
            let ways = [(ip.dst, Way::ToGuest), (ip.src, Way::FromGuest)];
            return ways.into_iter().find(|(at, _)| is_vm(at.to_ip())).map(|(_, way)| way);
        }
        let (ip, tcp) = packet.tcp()?;
        let to = FlowKey::from_net(0, &packet.eth, ip, tcp);
        if self.ends.contains(&to) {
            return Some(Way::ToGuest);
        }
        let from = FlowKey::from_guest(0, &packet.eth, ip, tcp);
        if self.ends.contains(&from) {
            return Some(Way::FromGuest);
        }
        if self.ends.len() >= MONITOR_FLOWS_MAX {
            self.unwatched += 1;
            return None;
        }
        // A frame that appears at the network's side first comes from there.
        let (way, key) = match side {
            Side::Net => (Way::ToGuest, to),
            Side::Guest => (Way::FromGuest, from),
        };
        self.ends.insert(key);
        Some(way)
    }
}
