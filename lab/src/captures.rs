//! Both sides of one guest's connections: captures of the uplink and of its port, and the trace
//! checker's findings (`nightporter_check::trace`).

use std::fs::{self, File, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nightporter_check::trace::{self, Options, Report};
use nightporter_guest::bootline::Nic;
use serde_json::Value;

use crate::daemon::Daemon;
use crate::process::Process;

/// The name of the daemon's uplink.
pub(crate) const UPLINK: &str = "uplink";
/// Bytes of a pcap file's header, and of a record's.
const HEADER: u64 = 24;
const RECORD_HEADER: u64 = 16;
/// How long a capture may take to start, and to write what the daemon has given it.
const LIMIT: Duration = Duration::from_secs(20);
/// Attempts to start both captures with no frame in between.
const STARTS_MAX: usize = 100;

/// Two captures under way.
#[derive(Debug)]
pub struct Captures {
    /// Of the uplink, of the guest's port.
    sides: [Side; 2],
    guest_mac: [u8; 6],
}

/// One capture.
#[derive(Debug)]
struct Side {
    port: String,
    file: PathBuf,
    process: Process,
    /// Bytes its frames would have taken in the file, from the daemon's start to its own.
    before: u64,
}

impl Captures {
    /// Captures the network's port and the guest's, whose NIC is `nic`, into `dir`. Returns when
    /// both see every frame.
    ///
    /// # Errors
    /// A capture did not start, or frames never stop for long enough to start two of them.
    pub fn start(daemon: &mut Daemon, ports: [String; 2], nic: &Nic, dir: &Path) -> Result<Self> {
        for _ in 0..STARTS_MAX {
            let before = counters(daemon, &ports)?;
            let sides = ports.iter().zip(["remote", "guest"]);
            let mut started = Vec::new();
            for ((port, side), before) in sides.zip(before) {
                let file = dir.join(format!("{side}.pcap"));
                let _ = fs::remove_file(&file); // of an earlier run
                let log = dir.join(format!("capture-{side}.log"));
                let process = daemon.capture(port, &file, &log)?;
                started.push(Side { port: port.clone(), file, process, before });
            }
            for side in &mut started {
                wait_for(&mut side.process, &side.file, HEADER)?;
            }
            // Frames that passed while they started are in one file and not in the other, or in
            // none.
            if counters(daemon, &ports)? == before {
                let sides = started.try_into().expect("two sides");
                return Ok(Self { sides, guest_mac: nic.mac.0 });
            }
        }
        bail!("frames passed each of {STARTS_MAX} times that captures of {ports:?} were started")
    }

    /// Ends both at the same moment and checks them; `offload`, `sends`: ack offload may have been
    /// on, and the host may have sent for its guest. Without a finding the files are removed, after
    /// copies were kept as `KEEP-remote.pcap` and `KEEP-guest.pcap`.
    ///
    /// # Errors
    /// What the checker found, or why it could not be asked. A capture that missed frames cannot
    /// be checked.
    pub fn check(
        mut self,
        daemon: &mut Daemon,
        [offload, sends]: [bool; 2],
        keep: Option<&Path>,
    ) -> Result<Report> {
        let guest = self.sides[1].port.clone();
        let status = status(daemon)?;
        for side in &mut self.sides {
            let port = port(&status, &side.port)?;
            let missed = port["captures_missed"].as_u64().context("no count of missed frames")?;
            ensure!(missed == 0, "the capture of {} missed {missed} frames", side.port);
            let end = HEADER + bytes(port)? - side.before;
            wait_for(&mut side.process, &side.file, end)?;
            side.process.kill();
            OpenOptions::new().write(true).open(&side.file)?.set_len(end)?;
        }
        let open = |side: &Side| {
            File::open(&side.file).with_context(|| format!("opening {}", side.file.display()))
        };
        let [remote, guest_side] = &self.sides;
        let guests = vec![self.guest_mac];
        let attached = remote.port != UPLINK;
        let options = Options { guests, offload, sends, whole: true, attached };
        let report = trace::check(open(remote)?, open(guest_side)?, &options)?;
        let found: Vec<String> = report.findings.iter().map(ToString::to_string).collect();
        ensure!(
            found.is_empty(),
            "{} violations in {} and {} of {guest}:\n{}",
            found.len(),
            remote.file.display(),
            guest_side.file.display(),
            found.join("\n"),
        );
        for (side, word) in self.sides.iter().zip(["remote", "guest"]) {
            if let Some(keep) = keep {
                fs::copy(&side.file, format!("{}-{word}.pcap", keep.display()))?;
            }
            fs::remove_file(&side.file)?;
        }
        Ok(report)
    }
}

/// The numbers of frames that captures of the network's port and of a guest's would have so far.
fn counters(daemon: &mut Daemon, [net, guest]: &[String; 2]) -> Result<[u64; 2]> {
    let status = status(daemon)?;
    Ok([bytes(port(&status, net)?)?, bytes(port(&status, guest)?)?])
}

fn status(daemon: &mut Daemon) -> Result<Value> {
    let text = daemon.cli(&["--json", "status"])?;
    serde_json::from_str(&text).context("reading the daemon's status")
}

fn port<'s>(status: &'s Value, name: &str) -> Result<&'s Value> {
    let mut ports = status["ports"].as_array().into_iter().flatten();
    ports.find(|port| port["name"] == name).with_context(|| format!("no port {name} in {status}"))
}

/// Bytes of records for all frames that passed the port.
fn bytes(port: &Value) -> Result<u64> {
    let count = |name: &str| port[name].as_u64().with_context(|| format!("no {name} in {port}"));
    let frames = count("frames_from_port")? + count("frames_to_port")?;
    Ok(frames * RECORD_HEADER + count("bytes_from_port")? + count("bytes_to_port")?)
}

/// A capture by `nightporter-guest watch` on an interface of the host.
#[derive(Debug)]
pub(crate) struct Capturing(Process);

impl Capturing {
    /// Captures the connections of this address; returns when it sees all of their frames.
    ///
    /// # Errors
    /// It did not start.
    pub(crate) fn start(
        tool: &Path,
        interface: &str,
        address: &str,
        file: &Path,
        log: &Path,
    ) -> Result<Self> {
        let _ = fs::remove_file(file); // of one before
        let mut command = Command::new(tool);
        command.args(["watch", interface, "--host", address, "-w"]).arg(file);
        let mut it = Self(Process::spawn("nightporter-guest watch", command, log)?);
        wait_for(&mut it.0, file, HEADER)?;
        Ok(it)
    }

    /// Ends it; no frame was missed, and all are in the file.
    ///
    /// # Errors
    /// It has failed, or missed frames.
    pub(crate) fn end(&mut self, log: &Path) -> Result<()> {
        let status = self.0.terminate(LIMIT)?;
        let said = fs::read_to_string(log)?;
        ensure!(status.success() && said.ends_with(" 0 missed\n"), "a capture: {said}");
        Ok(())
    }
}

/// Waits until the file is so long.
fn wait_for(process: &mut Process, file: &Path, len: u64) -> Result<()> {
    let deadline = Instant::now() + LIMIT;
    while fs::metadata(file).map_or(0, |m| m.len()) < len {
        process.check_alive()?;
        ensure!(Instant::now() < deadline, "{} is not complete after {LIMIT:?}", file.display());
        thread::sleep(Duration::from_millis(5)); // polls the file's length, and the child
    }
    Ok(())
}
