//! `nightporter-lab always-on`: guests that send without end, as in the study "Virtual Machine
//! Effects on Network Traffic Dynamics" (its Figures 2 to 6): what is seen of the ACKs of one
//! connection at the host, and by the guest itself.
//!
//! ```text
//!   remote namespace                             host namespace
//!   ┌──────────┐   delay line, frame by frame ┌───────────────────────────────────────┐
//!   │ readers  ╪══════════════════════ remote ╪═ bridge ═╤═ taps ═════════╗            │
//!   └──────────┘                       ^ watched         ├═ nightporterd ═╬═ guests    │
//!                                             │          └═ veth ═ Linux  ╚ ^ watched   │
//!                                             └───────────────────────────────────────┘
//! ```
//!
//! The yardstick is Linux without a guest, on the same bridge. Both captures are `nightporter-guest
//! watch`'s, and all numbers of ACKs are `nightporter analyze`'s.

use std::fs;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddrV4, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nightporter_core::monitor::density::BAR;
use nightporter_guest::control::{Command, Reply};
use nightporter_guest::data::{self, Header, Service, WATCHED_FILE};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::accel::Accel;
use crate::captures::Capturing;
use crate::cpus::{Awake, Cores};
use crate::daemon::sibling;
use crate::experiment::{Better, Cell, Experiment, Measure, Results, Rounds, Values, measure};
use crate::flood::Flood;
use crate::flows::{self, Server};
use crate::host::{self, Remote, guest_nic, remote_address};
use crate::image::{GUEST_TOOL, Image, log_dir};
use crate::link::{Link, Shape};
use crate::process::{self, run as run_program};
use crate::progress::Progress;
use crate::rundir::RunDir;
use crate::sched::{Competition, Layout, Scheduler};
use crate::vmm::{Places, Vmm};
use crate::world::{Net, World, address, guest_name};

/// Subnet of the Linux without a guest.
const BARE: u8 = 3;
/// Frames of full segments that may wait for the line, as in a switch's port.
const QUEUE_FRAMES: u32 = 100;
/// Bits of a full segment on the wire: 1,500 bytes, its Ethernet header, preamble, checksum, gap.
const FRAME_BITS: u32 = 8 * 1538;
/// A transfer may take so many times as long as the line needs.
const PATIENCE: u32 = 20;
/// The guest's program that captures.
const WATCH: &str = "watch";

/// The measurements.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Options {
    /// Numbers of senders: a case for each.
    pub senders: Vec<usize>,
    /// How guests share their core.
    pub scheduler: Scheduler,
    /// The line.
    pub link: Link,
    /// Bytes that each sends.
    pub bytes: u64,
    /// Samples of each arm.
    pub rounds: usize,
    /// The line is measured first, and refused if it is not what its name says.
    pub exact: bool,
    /// How QEMU runs the guests; `None`: KVM is probed for.
    pub accel: Option<Accel>,
}

/// The senders.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Arm {
    /// Connections of a Linux without a guest.
    Linux,
    /// Guests on QEMU's taps.
    Tap,
    /// On Nightporter as installed: ack offload.
    AckOffload,
    /// With congestion offload, too, and guests that flood.
    CongestionOffload,
}

/// All of them; the first is the yardstick.
pub(crate) const ARMS: [Arm; 4] = [Arm::Linux, Arm::Tap, Arm::AckOffload, Arm::CongestionOffload];

/// The places of a density in a sample's details.
pub(crate) const HOST: &str = "host";
pub(crate) const GUEST: &str = "guest";

pub(crate) const RATE: &str = "rate";
pub(crate) const HOST_GAP: &str = "host gap";
pub(crate) const HOST_COMPRESSED: &str = "host compr.";
pub(crate) const GUEST_GAP: &str = "guest gap";
pub(crate) const GUEST_COMPRESSED: &str = "guest compr.";
pub(crate) const BURSTINESS: &str = "burstiness";
pub(crate) const REPEATED: &str = "repeated";
pub(crate) const SWITCHES: &str = "switches";

const MEASURES: [Measure; 8] = [
    measure(RATE, "Mbit/s", Better::More),
    measure(HOST_GAP, "ms", Better::Neither),
    measure(HOST_COMPRESSED, "%", Better::Neither),
    measure(GUEST_GAP, "ms", Better::Neither),
    measure(GUEST_COMPRESSED, "%", Better::Neither),
    measure(BURSTINESS, "", Better::Less),
    measure(REPEATED, "%", Better::Less),
    measure(SWITCHES, "1/s", Better::Neither),
];

impl Arm {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Linux => "no-vm",
            Self::Tap => "tap",
            Self::AckOffload => "ack-offload",
            Self::CongestionOffload => "flood-route",
        }
    }

    /// The NIC of its guests.
    const fn net(self) -> Option<Net> {
        match self {
            Self::Linux => None,
            Self::Tap => Some(Net::Tap),
            Self::AckOffload | Self::CongestionOffload => Some(Net::Nightporter),
        }
    }
}

impl Options {
    fn shape(&self) -> Shape {
        let bits = u64::from(QUEUE_FRAMES * FRAME_BITS) * 1_000_000_000;
        let queue = Some(Duration::from_nanos(bits / self.link.rate()));
        Shape { queue, by_frame: true, exact: self.exact, ..self.link.shape() }
    }

    fn case(&self, senders: usize) -> String {
        case(self.scheduler, self.link, senders)
    }

    fn cells(&self, senders: usize) -> Vec<Cell> {
        ARMS.map(|arm| Cell::new(self.case(senders), arm.name())).into()
    }
}

/// The case of so many senders.
pub(crate) fn case(scheduler: Scheduler, link: Link, senders: usize) -> String {
    let plural = if senders == 1 { "" } else { "s" };
    format!("{scheduler} over {link}, {senders} sender{plural}")
}

/// The description of an experiment that is read.
pub(crate) const fn result(name: &'static str) -> Experiment {
    Experiment { name, measures: &MEASURES, settings: Value::Null, out: None }
}

/// Measures, prints a table, and writes `target/always-on/result.json`.
///
/// # Errors
/// Whatever kept it from finishing; bytes that are not those that were sent.
pub fn run(options: &Options) -> Result<bool> {
    process::die_cleanly_on_signals()?;
    let cores = Cores::plan()?;
    run_as("always-on", options, &cores)?.finish()
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
    for &senders in &options.senders {
        let cells = options.cells(senders);
        if !results.lacks(&cells, options.rounds) {
            continue; // a run that was cut off had done it
        }
        let (results, progress, image, logs) = (&mut results, &mut progress, &image, &logs);
        progress.step(&format!("booting {senders} guests"));
        // A thread of its own, because a world takes its thread into its network namespace.
        let case = move || -> Result<()> {
            let run_dir = RunDir::create()?;
            let places = Places { sockets: run_dir.path(), logs };
            let guests = vec![(Vmm::Qemu(accel), image); senders];
            let mut bench = Bench::start(options, &guests, places)?;
            results.tell(&options.case(senders), json!({ "link": bench.world.link() }));
            let sharing = (options.scheduler, Layout::Session);
            let competition = Competition::start(sharing, cores, &bench.world.guests, &run_dir)?;
            results.rounds(&cells, Rounds::exactly(options.rounds), progress, |arm, _| {
                bench.sample(ARMS[arm], options)
            })?;
            drop(competition);
            bench.world.stop()
        };
        thread::scope(|scope| {
            let inside = scope.spawn(case);
            inside.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })?;
    }
    progress.clear();
    Ok(results)
}

/// A case's world.
struct Bench {
    world: World,
    _server: Server,
    tool: PathBuf,
    /// For captures.
    dir: PathBuf,
    floods: bool,
}

impl Bench {
    fn start(options: &Options, guests: &[(Vmm, &Image)], places: Places<'_>) -> Result<Self> {
        let world = World::start(guests, true, Some(options.shape()), places)?;
        let nic = guest_nic(0, BARE);
        let bare = world.host().add_machine("bare", &nic)?;
        world.remote().enter(|| host::join_subnet(remote_address(BARE)))?;
        let server = Server::start(&bare, nic.address)?;
        let (tool, dir) = (Image::guest_tool()?, places.sockets.to_owned());
        Ok(Self { world, _server: server, tool, dir, floods: false })
    }

    /// The senders of an arm, the watched one first.
    fn senders(&self, arm: Arm) -> Vec<Ipv4Addr> {
        let guests = 0..u8::try_from(self.world.guests.len()).expect("a handful");
        let of = |guest| match arm.net() {
            Some(net) => address(guest, net),
            None => guest_nic(0, BARE).address,
        };
        guests.map(of).collect()
    }

    fn sample(&mut self, arm: Arm, options: &Options) -> Result<Values> {
        self.select(arm)?;
        let senders = self.senders(arm);
        let begun = (Instant::now(), self.switches()?);
        let seen = self.dir.join("host.pcap");
        let (log, watched) = (self.dir.join("watch.log"), senders[0].to_string());
        let mut host_side = Capturing::start(&self.tool, "remote", &watched, &seen, &log)?;
        if let Some(net) = arm.net() {
            self.watch_in_guest(net)?;
        }
        let line = Duration::from_secs_f64(
            (options.bytes * 8 * senders.len() as u64) as f64 / options.link.rate() as f64,
        );
        let (took, ports) =
            fetch_all(self.world.remote(), &senders, options.bytes, line * PATIENCE)?;
        host_side.end(&log)?;
        let at_guest = match arm.net() {
            Some(net) => Some(self.watched_in_guest(net)?),
            None => None,
        };
        let switches = (self.switches()? - begun.1) as f64 / begun.0.elapsed().as_secs_f64();
        let host = Acks::of(&seen, "network", &watched, ports[0])?;
        let mut of = vec![
            (RATE, (options.bytes * 8 * senders.len() as u64) as f64 / 1e6 / took.as_secs_f64()),
            (HOST_GAP, host.gap_ms),
            (HOST_COMPRESSED, host.compressed * 100.0),
            (BURSTINESS, host.burstiness),
            (REPEATED, host.repeated * 100.0),
        ];
        let guest = match at_guest {
            Some(file) => Some(Acks::of(&file, "guest", &watched, ports[0])?),
            None => None,
        };
        if let Some(guest) = &guest {
            of.extend([(GUEST_GAP, guest.gap_ms), (GUEST_COMPRESSED, guest.compressed * 100.0)]);
            of.push((SWITCHES, switches));
        }
        let guest = guest.map(|guest| guest.density);
        Ok(Values { of, detail: json!({ HOST: host.density, GUEST: guest }) })
    }

    /// Turns congestion offload, and the guests' flood, on or off.
    fn select(&mut self, arm: Arm) -> Result<()> {
        let floods = arm == Arm::CongestionOffload;
        if self.floods == floods {
            return Ok(());
        }
        for guest in 0..u8::try_from(self.world.guests.len())? {
            self.world.daemon()?.set_congestion_offload(&guest_name(guest), floods)?;
            self.world.guests[usize::from(guest)].flood(floods.then_some(Flood::Route))?;
        }
        self.floods = floods;
        Ok(())
    }

    /// How often the guests' vCPUs were switched to so far.
    fn switches(&self) -> Result<u64> {
        self.world.guests.iter().map(|guest| Ok(guest.cpu_use()?.0.switches)).sum()
    }

    /// Starts the capture in the first guest; returns when it sees all frames.
    fn watch_in_guest(&mut self, net: Net) -> Result<()> {
        let guest = &mut self.world.guests[0];
        let nic = format!("eth{}", net.nic());
        let port = data::PORT.to_string();
        let arguments = ["watch", &nic, "--port", &port, "-w", WATCHED_FILE];
        let start = Command::Start {
            name: WATCH.to_owned(),
            program: GUEST_TOOL.to_owned(),
            arguments: arguments.map(str::to_owned).into(),
            environment: Vec::new(),
        };
        guest.call(&start)?;
        self.ask_guest().map(drop)
    }

    /// The line that the capture in the guest says: its file is whole then.
    fn ask_guest(&mut self) -> Result<String> {
        let say = Command::Say { name: WATCH.to_owned(), line: String::new() };
        match self.world.guests[0].call(&say)? {
            Reply::Said { line } => Ok(line.trim().to_owned()),
            other => bail!("a program's line was answered with {other:?}"),
        }
    }

    /// Ends that capture, and fetches it.
    fn watched_in_guest(&mut self, net: Net) -> Result<PathBuf> {
        let said = self.ask_guest()?;
        ensure!(said.ends_with(" 0 missed"), "the guest's own capture: {said}");
        let from = (address(0, net), data::PORT);
        let file = self.world.remote().enter(|| -> Result<Vec<u8>> {
            let mut stream = TcpStream::connect(from)?;
            let header = Header { service: Service::Watched, bytes: 0, hash: 0 };
            stream.write_all(&header.to_bytes())?;
            let mut file = Vec::new();
            stream.read_to_end(&mut file)?;
            Ok(file)
        })?;
        let path = self.dir.join("guest.pcap");
        fs::write(&path, file).with_context(|| path.display().to_string())?;
        Ok(path)
    }
}

/// Fetches from all of them at once: how long it took until the last was done, and the readers'
/// ports.
fn fetch_all(
    remote: &Remote,
    senders: &[Ipv4Addr],
    bytes: u64,
    limit: Duration,
) -> Result<(Duration, Vec<u16>)> {
    let together = Barrier::new(senders.len());
    let begun = Instant::now();
    let ports = thread::scope(|scope| -> Result<Vec<u16>> {
        let fetch = |&sender: &Ipv4Addr| {
            let together = &together;
            scope.spawn(move || {
                remote.enter(|| {
                    together.wait();
                    let [a, b, c, _] = sender.octets();
                    let reader = SocketAddrV4::new(Ipv4Addr::new(a, b, c, 1), 0);
                    let from = SocketAddrV4::new(sender, data::PORT);
                    let (took, reader) = flows::fetch(from, reader, bytes, limit)?;
                    ensure!(took < limit, "{sender} has not sent it after {limit:?}");
                    Ok(reader.port())
                })
            })
        };
        let all: Vec<_> = senders.iter().map(fetch).collect();
        all.into_iter().map(|one| one.join().expect("does not panic")).collect()
    })?;
    Ok((begun.elapsed(), ports))
}

/// The ACKs of the watched connection at one place.
struct Acks {
    gap_ms: f64,
    /// The share of compressed ACKs, as docs/monitor.md has it.
    compressed: f64,
    /// Of bytes acknowledged in 60 ms, sigma over mu.
    burstiness: f64,
    /// The share of segments that were sent again.
    repeated: f64,
    density: Density,
}

/// Times between ACKs.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Density {
    /// In the bars of [`BAR_MS`], from the left.
    pub(crate) bars: Vec<u32>,
    /// All of them, also those beyond the bars.
    pub(crate) count: u32,
}

/// A bar's width, as in the study's figures.
pub(crate) const BAR_MS: f64 = BAR.as_nanos() as f64 / 1e6;

impl Density {
    /// Of all samples of an arm, `at` the host or the guest; `None` if there are none.
    pub(crate) fn of(results: &Results, case: &str, arm: Arm, at: &str) -> Option<Self> {
        let details = results.details(case, arm.name());
        let all =
            details.filter_map(|detail| serde_json::from_value::<Self>(detail[at].clone()).ok());
        all.reduce(|mut sum, one| {
            let len = sum.bars.len().max(one.bars.len());
            sum.bars.resize(len, 0);
            sum.bars.iter_mut().zip(&one.bars).for_each(|(sum, one)| *sum += one);
            sum.count += one.count;
            sum
        })
    }
}

impl Acks {
    fn of(capture: &Path, side: &str, sender: &str, port: u16) -> Result<Self> {
        let tool = sibling("nightporter")?;
        let file = capture.to_string_lossy();
        let arguments = ["--json", "analyze", "--side", side, "--vm", sender, &file];
        let text = run_program(&tool.to_string_lossy(), &arguments)?;
        let report: Value = serde_json::from_str(&text).context("reading an analysis")?;
        Self::read(&report, port).with_context(|| format!("{} of {side}: {report}", port))
    }

    /// Of the connection with this port of the reader.
    fn read(report: &Value, port: u16) -> Option<Self> {
        let end = format!(":{port}");
        let connections = report["connections"].as_array()?;
        let is_it = |one: &&Value| one["remote"].as_str().is_some_and(|it| it.ends_with(&end));
        let streams = connections.iter().find(is_it)?["streams"].as_array()?;
        let stream = streams.iter().find(|stream| stream["way"] == "from_guest")?;
        let acks = &stream["between_acks"];
        let count = |name: &str| stream[name].as_f64();
        Some(Self {
            gap_ms: acks["mean_us"].as_f64()? / 1e3,
            compressed: acks["compressed"].as_f64()?,
            burstiness: stream["rates"].as_array()?.first()?["burstiness"].as_f64()?,
            repeated: count("repeated")? / count("segments")?.max(1.0),
            density: serde_json::from_value(acks.clone()).ok()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_acks_of_the_watched_connection_are_read_from_an_analysis() {
        let stream = |way: &str, mean_us: f64| {
            json!({
                "way": way, "segments": 200, "repeated": 3,
                "between_acks": { "mean_us": mean_us, "compressed": 0.25, "count": 99,
                                  "bars": [24, 0, 1] },
                "rates": [{ "burstiness": 0.4 }, { "burstiness": 9.0 }],
            })
        };
        let streams = [stream("to_guest", 7.0), stream("from_guest", 256.0)];
        let other = json!({ "remote": "10.77.1.1:14000", "streams": [] });
        let ours = json!({ "remote": "10.77.1.1:4000", "streams": streams });
        let report = json!({ "connections": [other, ours] });
        let acks = Acks::read(&report, 4000).expect("it is there");
        assert_eq!([acks.gap_ms, acks.compressed, acks.burstiness], [0.256, 0.25, 0.4]);
        assert_eq!(
            (acks.repeated, acks.density.bars, acks.density.count),
            (0.015, vec![24, 0, 1], 99)
        );
        assert!(Acks::read(&report, 14000).is_none() && Acks::read(&report, 5).is_none());
    }

    #[test]
    fn the_densities_of_an_arms_samples_are_added_up() {
        let mut results = Results::of_nothing(&MEASURES);
        let cell = Cell::new("case", Arm::Tap.name());
        for (round, (bars, count)) in [(vec![1, 2], 4), (vec![3], 5)].into_iter().enumerate() {
            let detail = json!({ HOST: Density { bars, count } });
            results.note(&cell, round, Values { of: Vec::new(), detail });
        }
        let sum = Density::of(&results, "case", Arm::Tap, HOST).expect("two");
        assert_eq!((sum.bars, sum.count), (vec![4, 2], 9));
        assert!(Density::of(&results, "case", Arm::Tap, GUEST).is_none());
    }
}
