//! The cost of a crowd of VMs whose guests do not run: the echo between two uplinks with and
//! without them, and the time of an operator's commands that concern all of them.
//!
//! The front-ends are our own: each connects, shares memory, starts its rings and then does
//! nothing, like a paused VM. Two daemons, one without VMs, run at once, and echoes of one
//! alternate with echoes of the other. They and the stations share one core, because wake-ups
//! between two cores, and from which sleep, would vary more than the effect. An operator's
//! questions and changes then go to a daemon with the crowd that may use all cores. Everything
//! happens in a network namespace of this process.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sched::{CloneFlags, CpuSet, sched_getaffinity, sched_setaffinity, unshare};
use nix::sys::eventfd::EventFd;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::unistd::Pid;
use serde::Serialize;
use serde_json::{Value, json};

use crate::daemon::launch;
use crate::experiment::verdict::{Check, Wanted};
use crate::experiment::{Better, Cell, Experiment, Measure, Results, Values, measure};
use crate::front_end::{self, FrontEnd, RingAt};
use crate::host::ip;
use crate::process::Process;
use crate::rundir::RunDir;
use crate::sys;

/// The stations behind a daemon's uplinks.
const MACS: [[u8; 6]; 2] = [[2, 0, 0, 0, 0, 0xaa], [2, 0, 0, 0, 0, 0xbb]];
/// "Local experimental" (IEEE 802).
const ETHERTYPE: u16 = 0x88b5;
/// How long the daemon may take to start with all VMs, and to end.
const LIMIT: Duration = Duration::from_secs(60);
/// Echoes of one daemon before the other one's turn, and so many before them that do not count.
const IN_TURN: usize = 100;
const WARM_UP: usize = 20;
/// The core that all share.
const CORE: usize = 0;
/// The limit for an echo.
const ECHO_LIMIT: Duration = Duration::from_millis(500);

/// The measurements.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Options {
    /// VMs in the crowd.
    pub vms: usize,
    /// Echoes without them, and beside them.
    pub echoes: usize,
    /// VMs that come and go, and times that a status is asked for.
    pub changes: usize,
}

/// An echo beside the crowd over one alone, at most.
const ECHO_MOST: f64 = 1.1;

const ECHO: &str = "echo";
const ANSWER: &str = "answer";
const MEASURES: [Measure; 2] = [
    measure(ECHO, "us", Better::Neither).with_tail(),
    measure(ANSWER, "ms", Better::Neither).with_tail(),
];
const IN_TURNS: &str = "an echo, in turns";
const MEANWHILE: &str = "an echo beside them, while";
const ALONE: &str = "alone";

/// Measures, and prints a table.
///
/// # Errors
/// The daemon does not start or answer, or an echo does not come back.
pub fn run(options: &Options) -> Result<bool> {
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, most, most)?;
    let (dir, store) = (RunDir::create()?, Store::create()?);
    unshare(CloneFlags::CLONE_NEWNET).context("making a network namespace")?;
    ip("link set lo up")?;
    let (this, mut core) = (Pid::from_raw(0), CpuSet::new());
    let cores = sched_getaffinity(this)?;
    core.set(CORE)?;
    sched_setaffinity(this, &core).context("staying on one core")?;
    let mut alone = Host::start(dir.path(), &store, 0)?;
    let mut beside = Host::start(dir.path(), &store, options.vms)?;
    let mut results = Results::open(&Experiment {
        name: "crowd",
        measures: &MEASURES,
        settings: serde_json::to_value(options)?,
        out: None,
    })?;
    let crowd = format!("{} VMs", options.vms);
    for _ in 0..options.echoes.div_ceil(IN_TURN) {
        for (host, arm) in [(&mut alone, ALONE), (&mut beside, &*crowd)] {
            (0..WARM_UP).try_for_each(|_| host.echo.once().map(drop))?;
            let echoes = (0..IN_TURN).map(|_| host.echo.once()).collect::<Result<Vec<_>>>()?;
            note_echoes(&mut results, IN_TURNS, arm, echoes);
        }
    }
    alone.stop()?;
    beside.stop()?;
    sched_setaffinity(this, &cores)?;
    let mut beside = Host::start(dir.path(), &store, options.vms)?;
    let (control, dir) = (&mut beside.control, &beside.dir);
    let of_changes = asked_meanwhile(&mut beside.echo, || changes(control, dir, options))?;
    note_echoes(&mut results, MEANWHILE, "VMs change", of_changes.0);
    let metrics = beside.metrics;
    let of_status = asked_meanwhile(&mut beside.echo, || statuses(control, metrics, options))?;
    note_echoes(&mut results, MEANWHILE, "it is asked", of_status.0);
    for (what, list) in of_changes.1.into_iter().chain(of_status.1) {
        note(&mut results, &Cell::new("an operator beside them", what), (ANSWER, 1e3), list);
    }
    beside.stop()?;
    let median = |arm| results.quantiles(IN_TURNS, arm, ECHO).map(|quantiles| quantiles.p50);
    if let [Some(alone), Some(beside)] = [ALONE, &*crowd].map(median) {
        let what = format!("an echo, median: beside {crowd} over one alone");
        results.check(Check::of(what, beside / alone, Wanted::AtMost(ECHO_MOST)));
    }
    results.finish()
}

/// Echoes were timed.
pub(crate) fn note_echoes(results: &mut Results, case: &str, arm: &str, list: Vec<Duration>) {
    note(results, &Cell::new(case, arm), (ECHO, 1e6), list);
}

/// So many of a unit are a second.
fn note(
    results: &mut Results,
    cell: &Cell,
    (what, unit): (&'static str, f64),
    list: Vec<Duration>,
) {
    let first = results.values(&cell.case, &cell.arm, what).len();
    for (n, time) in list.into_iter().enumerate() {
        let of = vec![(what, time.as_secs_f64() * unit)];
        results.note(cell, first + n, Values { of, ..Values::default() });
    }
}

/// A daemon with two uplinks and so many VMs, and its users.
#[derive(Debug)]
struct Host {
    dir: PathBuf,
    /// Where metrics are scraped.
    metrics: SocketAddr,
    daemon: Process,
    control: Control,
    crowd: Vec<Idle>,
    echo: Echo,
}

impl Host {
    fn start(dir: &Path, store: &Store, vms: usize) -> Result<Self> {
        let name = if vms == 0 { "alone" } else { "beside" };
        let dir = dir.join(name);
        fs::create_dir_all(&dir).with_context(|| format!("creating {}", dir.display()))?;
        let taps = ["near", "far"].map(|end| format!("np{}{end}", &name[..1]));
        let metrics = SocketAddr::from((Ipv4Addr::LOCALHOST, if vms == 0 { 9469 } else { 9470 }));
        let arena = store.0.join(name);
        let mut daemon = start(&dir, &arena, &taps, metrics, vms)?;
        let mut control = Control::connect(&dir.join("control.sock"), &mut daemon)?;
        let crowd: Vec<_> =
            (0..vms).map(|n| Idle::connect(&socket(&dir, n))).collect::<Result<_>>()?;
        let deadline = Instant::now() + LIMIT;
        while control.links()? < vms + taps.len() {
            ensure!(Instant::now() < deadline, "not all links came up in {LIMIT:?}");
        }
        let echo = Echo::new(&taps)?;
        Ok(Self { dir, metrics, daemon, control, crowd, echo })
    }

    fn stop(mut self) -> Result<()> {
        drop(self.crowd);
        let ended = self.daemon.terminate(LIMIT)?;
        ensure!(ended.success(), "nightporterd ended with {ended}");
        Ok(())
    }
}

/// How long each of several things took.
type Lists = Vec<(&'static str, Vec<Duration>)>;

/// Echoes while something is asked on another thread; both.
fn asked_meanwhile(
    echo: &mut Echo,
    ask: impl FnOnce() -> Result<Lists> + Send,
) -> Result<(Vec<Duration>, Lists)> {
    let is_done = AtomicBool::new(false);
    thread::scope(|scope| {
        let asking = scope.spawn(|| {
            let lists = ask();
            is_done.store(true, Ordering::Relaxed);
            lists
        });
        let mut echoes = Vec::new();
        while !is_done.load(Ordering::Relaxed) {
            echoes.push(echo.once()?);
        }
        Ok((echoes, asking.join().expect("it returns its errors")?))
    })
}

/// VMs come with the default budget and with a small one, and go.
fn changes(control: &mut Control, dir: &Path, options: &Options) -> Result<Lists> {
    let (mut large, mut small, mut gone) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..options.changes {
        let socket = dir.join("new.sock").display().to_string();
        let remove = json!({"what": "remove_vm", "name": "new"});
        for (list, budget) in [(&mut large, "64M"), (&mut small, "1M")] {
            let keys = json!({"socket": socket, "budget": budget});
            list.push(control.change(json!({"what": "add_vm", "name": "new", "keys": keys}))?);
            gone.push(control.change(remove.clone())?);
        }
    }
    Ok(vec![("add, 64 MiB", large), ("add, 1 MiB", small), ("remove", gone)])
}

fn statuses(control: &mut Control, metrics: SocketAddr, options: &Options) -> Result<Lists> {
    let (mut told, mut scraped) = (Vec::new(), Vec::new());
    for _ in 0..options.changes {
        let begin = Instant::now();
        control.ask(&json!({"cmd": "status"}))?;
        told.push(begin.elapsed());
        // A scrape within half a second of another gets the same answer.
        thread::sleep(Duration::from_millis(500));
        let begin = Instant::now();
        let mut stream = TcpStream::connect(metrics).context("connecting to the metrics")?;
        stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n")?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        ensure!(text.starts_with("HTTP/1.1 200 OK"), "not metrics: {text:.100}");
        scraped.push(begin.elapsed());
    }
    Ok(vec![("status", told), ("scrape", scraped)])
}

/// A directory on a tmpfs: /run need not be one with room for the store of a crowd.
#[derive(Debug)]
struct Store(PathBuf);

impl Store {
    fn create() -> Result<Self> {
        let path = PathBuf::from(format!("/dev/shm/nightporter-lab-{}", std::process::id()));
        fs::create_dir(&path).with_context(|| format!("creating {}", path.display()))?;
        Ok(Self(path))
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The socket of a VM.
fn socket(dir: &Path, n: usize) -> PathBuf {
    dir.join(format!("vm{n}.sock"))
}

/// Starts the daemon with two uplinks and so many VMs.
fn start(
    dir: &Path,
    arena: &Path,
    taps: &[String; 2],
    metrics: SocketAddr,
    vms: usize,
) -> Result<Process> {
    let (at, arena) = (dir.display(), arena.display());
    let mut text = format!(
        "[daemon]\ncontrol = \"{at}/control.sock\"\narena = \"{arena}\"\n\
         metrics = \"{metrics}\"\nlog = \"warn\"\n"
    );
    for tap in taps {
        write!(text, "[[uplink]]\nname = \"{tap}\"\nkind = \"tap\"\nifname = \"{tap}\"\n")?;
    }
    for n in 0..vms {
        let socket = socket(dir, n);
        let socket = socket.display();
        write!(text, "[[vm]]\nname = \"vm{n}\"\nsocket = \"{socket}\"\nbudget = \"1M\"\n")?;
    }
    let config = dir.join("crowd.toml");
    fs::write(&config, text).context("writing the configuration")?;
    launch(&config, &dir.join("log"), None)
}

/// An operator.
#[derive(Debug)]
struct Control(BufReader<UnixStream>);

impl Control {
    /// Waits until the daemon answers.
    fn connect(path: &Path, daemon: &mut Process) -> Result<Self> {
        let deadline = Instant::now() + LIMIT;
        let stream = loop {
            daemon.check_alive()?;
            match UnixStream::connect(path) {
                Ok(stream) => break stream,
                Err(e) => ensure!(Instant::now() < deadline, "nightporterd did not listen: {e}"),
            }
            thread::sleep(Duration::from_millis(5)); // polls two conditions: socket, child
        };
        stream.set_read_timeout(Some(LIMIT))?;
        let mut it = Self(BufReader::new(stream));
        it.links()?; // it answers when the VMs' sockets are there
        Ok(it)
    }

    fn ask(&mut self, request: &Value) -> Result<Value> {
        writeln!(self.0.get_mut(), "{request}")?;
        let mut line = String::new();
        self.0.read_line(&mut line).context("waiting for an answer")?;
        serde_json::from_str(&line).with_context(|| format!("not an answer: {line:.100}"))
    }

    /// How many links are up.
    fn links(&mut self) -> Result<usize> {
        let status = self.ask(&json!({"cmd": "status"}))?;
        let ports = status["status"]["ports"].as_array().context("a status has ports")?;
        Ok(ports.iter().filter(|port| port["link"] == true).count())
    }

    /// Makes a change; how long that took.
    fn change(&mut self, change: Value) -> Result<Duration> {
        let begin = Instant::now();
        let answer = self.ask(&json!({"cmd": "change", "change": change}))?;
        ensure!(answer["plan"]["done"] == true, "not done: {answer}");
        Ok(begin.elapsed())
    }
}

/// A VMM of a guest that does not run.
#[derive(Debug)]
pub(crate) struct Idle {
    _front_end: FrontEnd,
    _memory: File,
    _kick: EventFd,
}

/// Bytes of its memory.
const MEMORY: u64 = 1 << 20;

impl Idle {
    /// Connects, and starts a ring each way, in memory that was never written.
    pub(crate) fn connect(socket: &Path) -> Result<Self> {
        let (memory, kick) = (front_end::memory(MEMORY)?, front_end::notifier()?);
        let ring = |base| RingAt {
            size: 256,
            descriptors: base,
            available: base + 0x1000,
            used: base + 0x8000,
            kick: &kick,
            call: &kick,
        };
        let rings = [ring(0x1_0000), ring(0x2_0000)];
        let front_end = FrontEnd::connect(socket, 0, &memory, &rings)?;
        Ok(Self { _front_end: front_end, _memory: memory, _kick: kick })
    }
}

/// Two stations behind the two uplinks.
#[derive(Debug)]
pub(crate) struct Echo {
    ends: [File; 2],
    number: u64,
}

impl Echo {
    pub(crate) fn new(taps: &[String; 2]) -> Result<Self> {
        let end = |tap: &str| -> Result<File> {
            let socket: OwnedFd = sys::packet_socket(tap, ETHERTYPE, ECHO_LIMIT)
                .with_context(|| format!("a packet socket on {tap}"))?;
            Ok(File::from(socket))
        };
        let mut it = Self { ends: [end(&taps[0])?, end(&taps[1])?], number: 0 };
        it.cross(1)?; // so that the daemon knows where it is
        Ok(it)
    }

    /// A frame from the first to the second, and one back; how long both took.
    pub(crate) fn once(&mut self) -> Result<Duration> {
        let begin = Instant::now();
        self.cross(0)?;
        self.cross(1)?;
        Ok(begin.elapsed())
    }

    /// A frame from this end to the other.
    fn cross(&mut self, from: usize) -> Result<()> {
        self.number += 1;
        let mut frame = [MACS[1 - from], MACS[from]].concat();
        frame.extend(ETHERTYPE.to_be_bytes());
        frame.extend(self.number.to_be_bytes());
        frame.resize(60, 0);
        self.ends[from].write_all(&frame)?;
        let mut got = [0; 2000];
        loop {
            let len = self.ends[1 - from].read(&mut got).context("waiting for an echo")?;
            if got[..len] == frame {
                return Ok(());
            }
        }
    }
}
