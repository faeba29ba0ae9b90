//! `nightporter-guest watch`: a capture of connections' headers, with the guest's own times. Two
//! figures of "Virtual Machine Effects on Network Traffic Dynamics" are of that clock;
//! `nightporter analyze --side guest` draws them from such a file.
//!
//! The kernel stamps a frame when the guest's TCP is to get it, or has sent it. So this program
//! need not be quick: it looks every [`PERIOD`], and takes no turn of a core for each frame.

use std::io::{self, Write};
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use anyhow::{Context, Result};
use nightporter_core::monitor::headers::Headers;
use nightporter_core::monitor::pcap::{file_header, record_header};
use nightporter_core::wire::packet::Net;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

use crate::packet;

/// Frames are taken so often.
pub const PERIOD: Duration = Duration::from_millis(50);
/// Bytes of a frame that are kept: all headers of TCP.
const KEPT: usize = 128;

/// The frames of TCP that are kept.
#[derive(Clone, Copy, Debug, Default)]
pub struct Chosen {
    /// From or to this address.
    pub host: Option<IpAddr>,
    /// From or to this port.
    pub port: Option<u16>,
}

/// The frames of an interface, on their way into a capture file (pcap).
#[derive(Debug)]
pub struct Capture<W: Write> {
    socket: OwnedFd,
    chosen: Chosen,
    headers: Headers,
    out: W,
    /// Frames in the file.
    kept: u64,
    /// Frames that found the kernel's queue full.
    missed: u64,
}

impl<W: Write> Capture<W> {
    /// Captures from now on.
    ///
    /// # Errors
    /// There is no such interface, this is not root, or the file cannot be written.
    pub fn start(interface: &str, chosen: Chosen, mut out: W) -> Result<Self> {
        let socket =
            packet::listen(interface).with_context(|| format!("listening on {interface}"))?;
        out.write_all(&file_header()).and_then(|()| out.flush()).context("writing the file")?;
        Ok(Self { socket, chosen, headers: Headers::default(), out, kept: 0, missed: 0 })
    }

    /// Keeps all frames that have come until now.
    ///
    /// # Errors
    /// The interface is gone, or the file cannot be written.
    pub fn take(&mut self) -> Result<()> {
        let mut frame = [0; KEPT];
        loop {
            let (at, len) = match packet::receive(&self.socket, &mut frame) {
                Ok(one) => one,
                Err(Errno::EAGAIN) => break,
                Err(Errno::EINTR) => continue,
                Err(errno) => return Err(errno).context("reading frames"),
            };
            let head = &frame[..len.min(KEPT)];
            if self.headers.parse(head, len).is_ok_and(|packet| self.chosen.has(&packet)) {
                let ns = u64::try_from(at.as_nanos()).unwrap_or(u64::MAX);
                self.out.write_all(&record_header(ns, head.len(), len))?;
                self.out.write_all(head)?;
                self.kept += 1;
            }
        }
        self.missed += packet::lost(&self.socket).context("counting frames")?;
        self.out.flush().context("writing the file")
    }

    /// Frames in the file, and frames that were missed.
    #[must_use]
    pub const fn counts(&self) -> (u64, u64) {
        (self.kept, self.missed)
    }
}

impl Chosen {
    fn has(self, packet: &nightporter_core::wire::packet::Packet) -> bool {
        let (Net::Ip(ip), Some((_, tcp))) = (&packet.net, packet.tcp()) else { return false };
        let hosts = [ip.src.to_ip(), ip.dst.to_ip()];
        let ports = [tcp.src_port, tcp.dst_port];
        self.host.is_none_or(|host| hosts.contains(&host))
            && self.port.is_none_or(|port| ports.contains(&port))
    }
}

/// The words from outside to a capture.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Heard {
    /// None, for as long as was asked.
    Nothing,
    /// A line of the input.
    Line,
    /// SIGINT or SIGTERM.
    End,
}

/// Where they come from.
#[derive(Debug)]
pub struct Ears {
    signals: SignalFd,
    /// Standard input is at its end.
    is_deaf: bool,
}

impl Ears {
    /// SIGINT and SIGTERM are heard here from now on, and do nothing else.
    ///
    /// # Errors
    /// The kernel's.
    pub fn open() -> Result<Self> {
        let mut set = SigSet::empty();
        set.add(Signal::SIGINT);
        set.add(Signal::SIGTERM);
        set.thread_block().context("blocking signals")?;
        let signals = SignalFd::with_flags(&set, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK);
        Ok(Self { signals: signals.context("receiving signals")?, is_deaf: false })
    }

    /// Waits for a word for so long.
    ///
    /// # Errors
    /// The kernel's.
    pub fn hear(&mut self, limit: Duration) -> Result<Heard> {
        let input = io::stdin();
        let limit = PollTimeout::try_from(limit.as_millis()).unwrap_or(PollTimeout::MAX);
        let mut fds = [
            PollFd::new(self.signals.as_fd(), PollFlags::POLLIN),
            PollFd::new(input.as_fd(), PollFlags::POLLIN),
        ];
        let fds = if self.is_deaf { &mut fds[..1] } else { &mut fds[..] };
        match poll(fds, limit) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno).context("waiting"),
        }
        let is_line = fds.get(1).is_some_and(|fd| fd.any().unwrap_or_default());
        if self.signals.read_signal().context("reading a signal")?.is_some() {
            return Ok(Heard::End);
        }
        if !is_line {
            return Ok(Heard::Nothing);
        }
        self.is_deaf = input.lines().next().transpose()?.is_none();
        Ok(if self.is_deaf { Heard::Nothing } else { Heard::Line })
    }
}
