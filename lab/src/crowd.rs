//! The cost of a crowd of VMs whose guests do not run: the echo between two uplinks with and
//! without them, and the time of an operator's commands that concern all of them.
//!
//! The front-ends are our own: each connects, shares memory, starts its rings and then does
//! nothing, like a paused VM. Two daemons, one without VMs, run at once, and echoes of one
//! alternate with echoes of the other. They and the stations share one core, because wake-ups
//! between two cores, and from which sleep, would vary more than the effect. An operator's
//! questions and changes then go to a daemon with the crowd that may use all cores. Everything
//! happens in a network namespace of this process.

use std::fmt::{self, Write as _};
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
use serde_json::{Value, json};

use crate::daemon::launch;
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
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// VMs in the crowd.
    pub vms: usize,
    /// Echoes without them, and beside them.
    pub echoes: usize,
    /// VMs that come and go, and times that a status is asked for.
    pub changes: usize,
}

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
    let mut times = Times::default();
    for _ in 0..options.echoes.div_ceil(IN_TURN) {
        for host in [&mut alone, &mut beside] {
            (0..WARM_UP).try_for_each(|_| host.echo.once().map(drop))?;
            let echoes = (0..IN_TURN).map(|_| host.echo.once()).collect::<Result<Vec<_>>>()?;
            times.note(&format!("echo, {} VMs", host.vms), echoes);
        }
    }
    let ratio = {
        let [alone, beside] = [0, options.vms].map(|vms| times.median(&format!("echo, {vms} VMs")));
        beside.as_secs_f64() / alone.as_secs_f64()
    };
    alone.stop()?;
    beside.stop()?;
    sched_setaffinity(this, &cores)?;
    let mut beside = Host::start(dir.path(), &store, options.vms)?;
    let (control, dir) = (&mut beside.control, &beside.dir);
    let of_changes = asked_meanwhile(&mut beside.echo, || changes(control, dir, options))?;
    times.note("echo, while VMs come and go", of_changes.0);
    of_changes.1.into_iter().for_each(|(what, list)| times.note(what, list));
    let metrics = beside.metrics;
    let of_status = asked_meanwhile(&mut beside.echo, || statuses(control, metrics, options))?;
    times.note("echo, while statuses are asked for", of_status.0);
    of_status.1.into_iter().for_each(|(what, list)| times.note(what, list));
    println!("{times}\nAn echo beside {} VMs takes {ratio:.3} of one alone.", options.vms);
    beside.stop()?;
    Ok(true)
}

/// A daemon with two uplinks and so many VMs, and its users.
#[derive(Debug)]
struct Host {
    vms: usize,
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
        Ok(Self { vms, dir, metrics, daemon, control, crowd, echo })
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

/// All measurements, by subject.
#[derive(Debug, Default)]
pub(crate) struct Times(Vec<(String, Vec<Duration>)>);

impl Times {
    pub(crate) fn note(&mut self, what: &str, list: Vec<Duration>) {
        match self.0.iter_mut().find(|(of, _)| of == what) {
            Some((_, all)) => all.extend(list),
            None => self.0.push((what.to_owned(), list)),
        }
    }

    fn median(&self, what: &str) -> Duration {
        self.percentile(what, 500)
    }

    /// Of a subject that was measured.
    pub(crate) fn percentile(&self, what: &str, per_mille: usize) -> Duration {
        let mut list = self.0.iter().find(|(of, _)| of == what).expect("measured").1.clone();
        list.sort_unstable();
        list[(list.len() - 1) * per_mille / 1000]
    }
}

impl fmt::Display for Times {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (what, list) in &self.0 {
            let mut sorted = list.clone();
            sorted.sort_unstable();
            let Some(last) = sorted.len().checked_sub(1) else { continue };
            write!(f, "  {what:36} n {:6}", sorted.len())?;
            for (name, at) in [("median", 500), ("p90", 900), ("p99", 990), ("most", 1000)] {
                let us = sorted[last * at / 1000].as_nanos() as f64 / 1000.0;
                write!(f, "  {name} {us:9.1} us")?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_said_by_what_they_are_of() {
        let list = |n: u64| (1..=n).map(Duration::from_micros).collect::<Vec<_>>();
        let mut times = Times::default();
        times.note("echo", list(101));
        times.note("status", list(1));
        times.note("echo", list(100));
        let said = times.to_string();
        assert!(said.contains("n    201  median      51.0 us"), "{said}");
        assert!(said.ends_with("most       1.0 us\n"), "{said}");
        assert_eq!(times.median("echo"), Duration::from_micros(51));
    }
}
