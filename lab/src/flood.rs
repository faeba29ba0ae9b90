//! A guest that floods, by its tool: `nightporter-guest`.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nightporter_guest::control::{Command, Reply};

use crate::image::GUEST_TOOL;
use crate::vmm::Guest;

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
/// How long a guest that waits for its core may take to hear its host.
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
        match self.call(&Command::Run { program: GUEST_TOOL.to_owned(), arguments })? {
            Reply::Ran { ok: true, output } => Ok(output),
            Reply::Ran { output, .. } => bail!("nightporter-guest: {output}"),
            other => bail!("run was answered with {other:?}"),
        }
    }

    /// A counter of the guest's kernel, as `TCPTimeouts` of `TcpExt`.
    ///
    /// # Errors
    /// There is none of that name.
    pub fn counter(&mut self, name: &str) -> Result<u64> {
        match self.call(&Command::Read { path: NETSTAT.to_owned() })? {
            Reply::Text { text } => counter(&text, name),
            other => bail!("read was answered with {other:?}"),
        }
    }
}

/// The kernel's counters of TCP, for the caller's namespace.
pub const NETSTAT: &str = "/proc/thread-self/net/netstat";

/// A counter of `TcpExt` by its name, from a text like [`NETSTAT`]'s.
///
/// # Errors
/// There is none.
pub fn counter(netstat: &str, name: &str) -> Result<u64> {
    let mut lines = netstat.lines().filter(|line| line.starts_with("TcpExt:"));
    let (names, values) = lines.next().zip(lines.next()).context("no TcpExt")?;
    let found = names.split(' ').zip(values.split(' ')).find(|(is, _)| *is == name);
    let (_, value) = found.with_context(|| format!("no counter {name}"))?;
    Ok(value.parse()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_found_by_their_names() {
        let text =
            "TcpExt: SyncookiesSent TCPTimeouts\nTcpExt: 0 12\nIpExt: InNoRoutes\nIpExt: 1\n";
        assert_eq!(counter(text, "TCPTimeouts").expect("is there"), 12);
        assert!(counter(text, "InNoRoutes").is_err());
    }
}
