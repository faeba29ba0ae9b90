//! The host's end of a guest's control channel.

use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nightporter_guest::control::{Command, Reply};

use crate::process::Process;

/// How long a guest may take to answer a command. Generous: it may be waiting for its core.
pub(crate) const REPLY_LIMIT: Duration = Duration::from_secs(20);

/// How long a program of the guest may take. The guest itself ends one that is silent for a minute,
/// and reports where it was stuck, so this is for one that never stops talking.
const RUN_LIMIT: Duration = Duration::from_secs(300);

/// How often a wait looks whether the guest is still there.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// A control channel.
#[derive(Debug)]
pub struct Control {
    stream: BufReader<UnixStream>,
    line: Vec<u8>,
}

impl Control {
    /// Speaks over `stream`, the host's end of the guest's serial port.
    ///
    /// # Errors
    /// The stream takes no timeout.
    pub fn new(stream: UnixStream) -> Result<Self> {
        stream.set_read_timeout(Some(CHECK_INTERVAL))?;
        Ok(Self { stream: BufReader::new(stream), line: Vec::new() })
    }

    /// Waits for the guest to report that it is up.
    ///
    /// # Errors
    /// `limit` passed, the VMM ended, or the guest said something else.
    pub fn wait_ready(&mut self, vmm: &mut Process, limit: Duration) -> Result<()> {
        match self.receive(vmm, limit)? {
            Reply::Ready { .. } => Ok(()),
            other => bail!("the guest opened with {other:?}"),
        }
    }

    /// One command, one reply. `Reply::Error` becomes an error.
    ///
    /// # Errors
    /// The guest refused, did not answer in time, or its VMM ended.
    pub fn call(&mut self, vmm: &mut Process, command: &Command) -> Result<Reply> {
        let limit = if let Command::Run { .. } = command { RUN_LIMIT } else { REPLY_LIMIT };
        self.send(command)?;
        self.hear_within(vmm, limit).with_context(|| format!("{command:?}"))
    }

    /// The reply to a command that was sent. `Reply::Error` becomes an error.
    ///
    /// # Errors
    /// As of [`Self::call`].
    pub fn hear(&mut self, vmm: &mut Process) -> Result<Reply> {
        self.hear_within(vmm, REPLY_LIMIT)
    }

    /// The same, within `limit`.
    ///
    /// # Errors
    /// As of [`Self::call`].
    pub fn hear_within(&mut self, vmm: &mut Process, limit: Duration) -> Result<Reply> {
        match self.receive(vmm, limit)? {
            Reply::Error { message } => bail!("the guest refused: {message}"),
            reply => Ok(reply),
        }
    }

    /// A command that is not answered, because the guest leaves on it, or not yet.
    ///
    /// # Errors
    /// The channel is closed.
    pub fn send(&mut self, command: &Command) -> Result<()> {
        let mut line = serde_json::to_vec(command)?;
        line.push(b'\n');
        self.stream.get_mut().write_all(&line).context("the guest's control channel is closed")
    }

    fn receive(&mut self, vmm: &mut Process, limit: Duration) -> Result<Reply> {
        let deadline = Instant::now() + limit;
        loop {
            match self.stream.read_until(b'\n', &mut self.line) {
                Ok(0) => {
                    vmm.check_alive()?;
                    bail!("the guest's control channel closed");
                }
                Ok(_) => break,
                // The received part of the line stays in `self.line`.
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    vmm.check_alive()?;
                    ensure!(Instant::now() < deadline, "no word from the guest in {limit:?}");
                }
                Err(e) => return Err(e).context("reading the guest's control channel"),
            }
        }
        let line = std::mem::take(&mut self.line);
        serde_json::from_slice(&line)
            .with_context(|| format!("the guest said {:?}", String::from_utf8_lossy(&line)))
    }
}
