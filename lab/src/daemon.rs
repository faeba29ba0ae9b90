//! nightporterd in a run: one uplink tap on the bridge, one vhost-user port per guest.

use std::fmt::Write as _;
use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nightporter_guest::bootline::Nic;
use nix::sys::signal::Signal;
use serde_json::Value;

use crate::process::{CpuUse, Process, run};
use crate::systemd::Systemd;
use crate::vmm::Vmm;

/// How long the daemon may take to listen.
const START_LIMIT: Duration = Duration::from_secs(10);
/// Accept offload begins 63 s after it was turned on.
const ACCEPTS_WITHIN: Duration = Duration::from_secs(90);
/// How long it may take to end after SIGTERM.
const STOP_LIMIT: Duration = Duration::from_secs(5);

/// Its file in the run's directory.
const CONFIGURATION: &str = "nightporter.toml";

/// A VM that has a port.
#[derive(Clone, Debug)]
pub struct Vm {
    /// The port's name.
    pub name: String,
    /// The NIC with which the guest uses it.
    pub nic: Nic,
    /// Instead of a socket: the guest's tap, which is attached.
    pub tap: Option<String>,
    /// Addresses of its containers.
    pub behind: Vec<IpAddr>,
    /// The VMM.
    pub vmm: Vmm,
    /// It has a socket device, too.
    pub toe: bool,
    /// Its `vm.boost`.
    pub boost: Option<String>,
}

/// A running daemon.
#[derive(Debug)]
pub struct Daemon {
    process: Process,
    control: PathBuf,
    dir: PathBuf,
    /// The supervisor of the run.
    systemd: Systemd,
}

impl Daemon {
    /// Starts nightporterd with its sockets and arena in `dir`, an uplink on the tap `uplink`, and
    /// a port for every VM. Returns when all sockets are there.
    ///
    /// # Errors
    /// It was not built, or ended; the message holds the end of its log.
    pub fn start(uplink: &str, vms: &[Vm], dir: &Path, log: &Path) -> Result<Self> {
        let with_socket = vms.iter().filter(|vm| vm.tap.is_none());
        let mut sockets: Vec<_> = with_socket.map(|vm| format!("{}.sock", vm.name)).collect();
        let with_toe = vms.iter().filter(|vm| vm.toe);
        sockets.extend(with_toe.map(|vm| format!("{}-toe.sock", vm.name)));
        Self::start_as(&configuration(uplink, vms, dir), &sockets, dir, log)
    }

    /// Starts nightporterd with this configuration, which has it make these sockets in `dir`, and
    /// that of its control. Returns when all are there.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn start_as(text: &str, sockets: &[String], dir: &Path, log: &Path) -> Result<Self> {
        let config = dir.join(CONFIGURATION);
        fs::write(&config, text).context("writing the configuration")?;
        let mut systemd = Systemd::new(dir.join("notify")).context("making a socket")?;
        let process = launch(&config, log, Some(&mut systemd))?;
        let control = dir.join("control.sock");
        let mut daemon = Self { process, control: control.clone(), dir: dir.to_owned(), systemd };
        let mut sockets: Vec<PathBuf> = sockets.iter().map(|name| dir.join(name)).collect();
        sockets.push(control);
        let deadline = Instant::now() + START_LIMIT;
        while !sockets.iter().all(|s| s.exists()) {
            daemon.process.check_alive()?;
            ensure!(Instant::now() < deadline, "nightporterd did not listen in {START_LIMIT:?}");
            thread::sleep(Duration::from_millis(5)); // polls two conditions: sockets, child
        }
        Ok(daemon)
    }

    /// The directory of its sockets.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The vhost-user socket of a port.
    #[must_use]
    pub fn socket(&self, vm: &str) -> PathBuf {
        self.dir.join(format!("{vm}.sock"))
    }

    /// The socket of a VM's socket device.
    #[must_use]
    pub fn toe_socket(&self, vm: &str) -> PathBuf {
        self.dir.join(format!("{vm}-toe.sock"))
    }

    /// Turns the offload of one guest on or off for new connections, with the operator's tool.
    ///
    /// # Errors
    /// The tool's, and the end of the daemon.
    pub fn set_offload(&mut self, vm: &str, on: bool) -> Result<()> {
        self.cli(&["offload", if on { "on" } else { "off" }, vm]).map(drop)
    }

    /// Turns congestion offload of one guest on or off, with the operator's tool.
    ///
    /// # Errors
    /// The tool's, and the end of the daemon.
    pub fn set_congestion_offload(&mut self, vm: &str, on: bool) -> Result<()> {
        self.cli(&["congestion-offload", if on { "on" } else { "off" }, vm]).map(drop)
    }

    /// Has SYNs to one guest answered at all ports, or at one that nobody uses: so accept offload
    /// stays on, and begins only once to be. Returns when it has.
    ///
    /// # Errors
    /// Those of [`Self::cli`]; it does not begin.
    pub fn set_accepts(&mut self, vm: &str, on: bool) -> Result<()> {
        let ports = if on { "accept_offload=true" } else { "accept_offload=1" };
        self.cli(&["vm", "set", vm, ports])?;
        let deadline = Instant::now() + ACCEPTS_WITHIN;
        while self.of_vm(vm, |vm| vm["accepts_in_s"].as_u64())? > 0 {
            ensure!(Instant::now() < deadline, "SYNs to {vm} are not answered yet");
            thread::sleep(Duration::from_millis(100)); // polls a condition
        }
        Ok(())
    }

    /// A counter of the first guest.
    ///
    /// # Errors
    /// Those of [`Self::cli`]; there is none of that name.
    pub fn vm_counter(&mut self, name: &str) -> Result<u64> {
        let status = self.cli(&["--json", "status"])?;
        let status: Value = serde_json::from_str(&status).context("reading the status")?;
        status["ports"][1]["vm"][name].as_u64().with_context(|| format!("no {name} in {status}"))
    }

    /// Payload bytes that were acknowledged ahead of a guest.
    ///
    /// # Errors
    /// Those of [`Self::cli`]; it has no such VM.
    pub fn early_acked_bytes(&mut self, vm: &str) -> Result<u64> {
        self.of_vm(vm, |vm| vm["early_acked_bytes"].as_u64())
    }

    /// Frames of a VM behind an attached tap that passed the daemon by, both ways.
    ///
    /// # Errors
    /// Those of [`Self::cli`]; it has no such VM, or that no such tap.
    pub fn frames_that_passed(&mut self, vm: &str) -> Result<u64> {
        let count = |vm: &Value, way: &str| vm["attached"][way].as_u64();
        self.of_vm(vm, |vm| Some(count(vm, "plain_from_vm")? + count(vm, "plain_to_vm")?))
    }

    /// Whether the tap of an attached VM is left plain for a while, because the daemon was away
    /// often.
    ///
    /// # Errors
    /// The daemon does not answer as expected.
    pub fn backs_off(&mut self, vm: &str) -> Result<bool> {
        self.of_vm(vm, |vm| Some(!vm["attached"].get("plain_for_ms")?.is_null()))
    }

    fn of_vm<T>(&mut self, vm: &str, count: impl FnOnce(&Value) -> Option<T>) -> Result<T> {
        let status = self.cli(&["--json", "status"])?;
        let status: Value = serde_json::from_str(&status).context("reading the status")?;
        let port = status["ports"].as_array().into_iter().flatten().find(|it| it["name"] == vm);
        let count = port.and_then(|port| count(&port["vm"]));
        count.with_context(|| format!("no VM {vm} in {status}"))
    }

    /// Bytes of streams that a guest was given over its socket device.
    ///
    /// # Errors
    /// Those of [`Self::cli`]; it has no such VM, or that no such device.
    pub fn toe_bytes_to_guest(&mut self, vm: &str) -> Result<u64> {
        let status = self.cli(&["--json", "status"])?;
        let status: Value = serde_json::from_str(&status).context("reading the status")?;
        let ports = status["ports"].as_array().context("a list of ports")?;
        let port = ports.iter().find(|port| port["name"] == vm);
        let bytes = port.and_then(|port| port["vm"]["toe"]["bytes_to_guest"].as_u64());
        bytes.with_context(|| format!("no socket device of {vm} in {status}"))
    }

    /// Runs `nightporter` with these arguments; its output.
    ///
    /// # Errors
    /// The tool's, and the end of the daemon.
    pub fn cli(&mut self, args: &[&str]) -> Result<String> {
        self.process.check_alive()?;
        let tool = sibling("nightporter")?;
        let control = self.control.to_string_lossy().into_owned();
        let mut all = vec!["--control", &control];
        all.extend(args);
        run(&tool.to_string_lossy(), &all)
    }

    /// Starts to capture a port into `file`, with the operator's tool, whose output goes to `log`.
    /// Killing the process ends the capture.
    ///
    /// # Errors
    /// The tool was not built or cannot be started.
    pub fn capture(&mut self, port: &str, file: &Path, log: &Path) -> Result<Process> {
        let mut command = Command::new(sibling("nightporter")?);
        command.arg("--control").arg(&self.control).args(["capture", port, "-w"]).arg(file);
        Process::spawn("nightporter capture", command, log)
    }

    /// Kills it, as a crash would, and starts it again with what it has left, but for its VMMs,
    /// which connect again; returns when that answers.
    ///
    /// # Errors
    /// It did not start again.
    pub fn crash(&mut self, log: &Path) -> Result<()> {
        self.kill();
        self.systemd.forgets();
        self.start_again(log)
    }

    /// Its VMMs are not kept for the next daemon.
    pub fn forget_vmms(&mut self) {
        self.systemd.forgets();
    }

    /// Ends it by this signal, and starts it again with what is kept for it; returns when that
    /// answers.
    ///
    /// # Errors
    /// It did not end, or not start again.
    pub fn restart(&mut self, by: Signal, log: &Path) -> Result<()> {
        match by {
            Signal::SIGKILL => self.kill(),
            _ => drop(self.process.terminate(STOP_LIMIT)?),
        }
        self.start_again(log)
    }

    /// Kills it, as a crash would.
    pub fn kill(&mut self) {
        self.process.kill();
    }

    /// Starts it with what one that was killed has left; returns when it answers.
    ///
    /// # Errors
    /// It did not start.
    pub fn start_again(&mut self, log: &Path) -> Result<()> {
        let config = self.dir.join(CONFIGURATION);
        self.process = launch(&config, log, Some(&mut self.systemd))?;
        let deadline = Instant::now() + START_LIMIT;
        while self.cli(&["status"]).is_err() {
            self.process.check_alive()?;
            ensure!(Instant::now() < deadline, "nightporterd did not answer in {START_LIMIT:?}");
            thread::sleep(Duration::from_millis(5)); // polls two conditions: socket, child
        }
        Ok(())
    }

    /// Fails when the daemon has ended.
    ///
    /// # Errors
    /// It has; the message holds the end of its log.
    pub fn check_alive(&mut self) -> Result<()> {
        self.process.check_alive()
    }

    /// Its process.
    pub(crate) fn pid(&self) -> i32 {
        self.process.pid()
    }

    /// Its time on its core so far.
    ///
    /// # Errors
    /// It is gone.
    pub fn cpu_use(&self) -> Result<CpuUse> {
        CpuUse::of_process(self.process.pid(), &[])
    }

    /// Bytes of memory of its own: what it shares with guests is not counted.
    ///
    /// # Errors
    /// It is gone.
    pub fn memory(&self) -> Result<u64> {
        let path = format!("/proc/{}/status", self.process.pid());
        let text = fs::read_to_string(&path).context(path)?;
        let line = text.lines().find_map(|line| line.strip_prefix("RssAnon:"));
        let kib = line.and_then(|line| line.trim().strip_suffix(" kB"));
        let kib: u64 = kib.context("no RssAnon")?.parse()?;
        Ok(kib << 10)
    }

    /// Stops it gracefully.
    ///
    /// # Errors
    /// It did not end by itself, or not well.
    pub fn stop(mut self) -> Result<()> {
        let status = self.process.terminate(STOP_LIMIT)?;
        ensure!(status.success(), "nightporterd ended with {status}");
        Ok(())
    }
}

/// Starts the daemon with this configuration, by a supervisor if there is one; its output goes to
/// `log`.
pub(crate) fn launch(config: &Path, log: &Path, systemd: Option<&mut Systemd>) -> Result<Process> {
    let daemon = sibling("nightporterd")?;
    let text = fs::read_to_string(config).context("reading the configuration")?;
    let has_taps = text.contains("\ntap = ");
    let program = if has_taps { Path::new("unshare") } else { &daemon };
    let (mut command, _copies) =
        systemd.map_or_else(|| (Command::new(program), Vec::new()), |it| it.command(program));
    if has_taps {
        // It looks for attached taps in /sys, where interfaces are those of who has mounted it.
        let mounted = "mount -t sysfs none /sys && exec \"$0\" \"$@\"";
        command.args(["--mount", "sh", "-c", mounted]).arg(&daemon);
    }
    command.arg("--config").arg(config).stdin(Stdio::null());
    Process::spawn("nightporterd", command, log)
}

/// One uplink and the guests' ports; everything else is as it is by default.
fn configuration(uplink: &str, vms: &[Vm], dir: &Path) -> String {
    let dir = dir.display();
    let mut text = format!(
        "[daemon]\ncontrol = \"{dir}/control.sock\"\narena = \"{dir}/arena\"\nmetrics = \"off\"\n\
         drain_timeout_s = 2\nlog = \"debug\"\n\n\
         [[uplink]]\nname = \"uplink\"\nkind = \"tap\"\nifname = \"{uplink}\"\n"
    );
    for Vm { name, nic: Nic { mac, address, .. }, tap, behind, vmm, toe, boost } in vms {
        if let Some(tap) = tap {
            let _ = write!(text, "\n[[vm]]\nname = \"{name}\"\ntap = \"{tap}\"\nmac = \"{mac}\"\n");
            continue;
        }
        let ips = [IpAddr::from(*address)].into_iter().chain(behind.iter().copied());
        let ips: Vec<_> = ips.map(|ip| ip.to_string()).collect();
        // User-mode Linux has its memory in a temporary file.
        let unsealed = *vmm == Vmm::Uml;
        let _ = write!(
            text,
            "\n[[vm]]\nname = \"{name}\"\nsocket = \"{dir}/{name}.sock\"\nmac = \"{mac}\"\n\
             ips = {ips:?}\nallow_unsealed_memory = {unsealed}\n\
             toe = {toe}\ntoe_to_itself = {toe}\n"
        );
        if let Some(boost) = boost {
            let _ = writeln!(text, "boost = \"{boost}\"");
        }
    }
    text
}

/// A program of this workspace, built beside this one (or beside the directory of a test).
pub(crate) fn sibling(name: &str) -> Result<PathBuf> {
    let me = std::env::current_exe().context("finding our own program")?;
    me.ancestors()
        .skip(1)
        .take(2)
        .map(|dir| dir.join(name))
        .find(|path| path.is_file())
        .with_context(|| format!("{name} is not built (looked beside {})", me.display()))
}
