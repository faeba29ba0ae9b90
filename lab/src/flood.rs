//! A guest that floods, by its tool: `nightporter-guest`.

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nightporter_guest::control::{Command, Reply};
use nightporter_guest::netstat;

use crate::image::GUEST_TOOL;
use crate::vmm::Guest;
use crate::world::World;

/// How a guest floods.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flood {
    /// Its routes do.
    Route,
    /// Its connections do that use `np_flood`, which is all.
    Bpf,
}

/// The default congestion control.
const CONGESTION_CONTROL: &str = "/proc/sys/net/ipv4/tcp_congestion_control";
/// How long a guest that waits for its core may take to receive a heartbeat.
const HEARD_LIMIT: Duration = Duration::from_secs(20);

impl Guest {
    /// Floods in this way from now on, or not at all. Returns when it hears its host, and its
    /// routes flood if they have to.
    ///
    /// # Errors
    /// The tool's; no heartbeat comes, or the routes are left alone.
    pub fn flood(&mut self, how: Option<Flood>) -> Result<()> {
        self.tool(&["flood", "off"])?;
        let control = if how == Some(Flood::Bpf) { "np_flood" } else { "cubic" };
        match how {
            None => {}
            Some(Flood::Route) => drop(self.tool(&["flood", "on"])?),
            Some(Flood::Bpf) => drop(self.tool(&["flood", "on", "--np-flood"])?),
        }
        let path = CONGESTION_CONTROL.to_owned();
        self.call(&Command::Write { path, text: control.to_owned() })?;
        let Some(how) = how else { return Ok(()) };
        let deadline = Instant::now() + HEARD_LIMIT;
        loop {
            let status = self.tool(&["flood", "status"])?;
            let route = how == Flood::Bpf || status.contains(": initcwnd ");
            if route && status.starts_with("flooding     on,") {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "the guest does not flood: {status}");
            thread::sleep(Duration::from_millis(20)); // polls what the guest hears
        }
    }

    /// Runs `nightporter-guest` in the guest; its output.
    ///
    /// # Errors
    /// The tool's.
    pub fn tool(&mut self, arguments: &[&str]) -> Result<String> {
        let arguments = arguments.iter().map(|&word| word.to_owned()).collect();
        match self.call(&Command::Run {
            program: GUEST_TOOL.to_owned(),
            arguments,
            environment: Vec::new(),
        })? {
            Reply::Ran { ok: true, output } => Ok(output),
            Reply::Ran { output, .. } => bail!("nightporter-guest: {output}"),
            other => bail!("run was answered with {other:?}"),
        }
    }

    /// The counters of the guest's TCP, by how their names begin.
    ///
    /// # Errors
    /// There is none of such a name.
    pub fn counted<const N: usize>(&mut self, names: [&str; N]) -> Result<[u64; N]> {
        let names = names.map(str::to_owned).to_vec();
        match self.call(&Command::Netstat { names })? {
            Reply::Counted { values } => values.try_into().ok().context("a number for each name"),
            other => bail!("netstat was answered with {other:?}"),
        }
    }
}

/// Counters of a guest and a remote about transfers that went wrong.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Complaints {
    /// The guest's `TCPTimeouts`.
    pub guest_timeouts: u64,
    /// Segments that the guest sent again for any reason: its timeouts, loss probes (a few of them
    /// carry new data), fast retransmissions and those of a recovery after a timeout.
    pub guest_copies: u64,
    /// Segments of data that it sent for the first time: `TCPOrigDataSent`.
    pub guest_segments: u64,
    /// The remote's `PAWSEstab`: segments whose timestamps had been overtaken.
    pub remote_paws: u64,
    /// The remote's `TCPACKSkipped...`: answers to segments that were out of place, and so often
    /// that it stopped answering.
    pub remote_acks_skipped: u64,
}

impl Complaints {
    /// Whether there is more that no good citizen makes rise. A segment that a guest sends again is
    /// not: it may probe whenever it has lost its core.
    #[must_use]
    pub fn rose_since(&self, before: &Self) -> bool {
        let of = |it: &Self| [it.guest_timeouts, it.remote_paws, it.remote_acks_skipped];
        of(self) != of(before)
    }
}

impl World {
    /// Faults that the TCPs of a guest and of the remote have found so far.
    ///
    /// # Errors
    /// The guest does not answer.
    pub fn complaints(&mut self, guest: usize) -> Result<Complaints> {
        let remote = self.remote().enter(|| fs::read_to_string(netstat::FILE))?;
        let of = |name| netstat::counted(&remote, name).with_context(|| format!("no {name}"));
        let [guest_timeouts, probes, fast, slow, guest_segments] = self.guests[guest].counted([
            "TCPTimeouts",
            "TCPLossProbes",
            "TCPFastRetrans",
            "TCPSlowStartRetrans",
            "TCPOrigDataSent",
        ])?;
        Ok(Complaints {
            guest_timeouts,
            guest_copies: guest_timeouts + probes + fast + slow,
            guest_segments,
            remote_paws: of("PAWSEstab")?,
            remote_acks_skipped: of("TCPACKSkipped")?,
        })
    }
}
