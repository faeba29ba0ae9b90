//! The log: lines for standard error, written by a thread of their own.
//!
//! Logging never waits and never fails: lines that find no room, or that standard error does not
//! take, are lost and counted. Lines that outsiders can provoke are limited besides, for each port
//! by a [`Limit`].

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::Duration as StdDuration;

use nightporter_core::bucket::Bucket;
use nightporter_core::time::{Duration, Instant};
use tracing::{Level, Metadata};
use tracing_subscriber::fmt::MakeWriter;

use crate::timer::monotonic_now;

/// Lines that may wait for standard error: some 200 KB.
const LINES_MAX: usize = 1024;
/// How long [`Log::flush`] waits for it.
const FLUSH_LIMIT: StdDuration = StdDuration::from_secs(1);
/// Lines about one port in a row: a VM that starts or stops takes ten.
const BURST: u64 = 50;
/// Then one in this time.
const INTERVAL: Duration = Duration::from_secs(1);

/// Lines that were not written.
static LOST: AtomicU64 = AtomicU64::new(0);

/// Lines that were not written so far: no room, no reader, or beyond a [`Limit`].
pub(crate) fn lines_lost() -> u64 {
    LOST.load(Ordering::Relaxed)
}

enum Message {
    Line(Vec<u8>),
    /// To be dropped when all lines before are written.
    Flush(SyncSender<()>),
}

/// Takes lines. Each `write` is one.
#[derive(Clone, Debug)]
pub struct Log(SyncSender<Message>);

impl Log {
    /// Starts the thread that writes them. Errors: there can be no more threads.
    pub fn start() -> io::Result<Self> {
        let (to, from) = sync_channel(LINES_MAX);
        thread::Builder::new().name("log".into()).spawn(move || run(&from))?;
        Ok(Self(to))
    }

    /// Waits until all lines so far are written, but no longer than a second.
    pub fn flush(&self) {
        let (done, wait) = sync_channel(0);
        if self.0.try_send(Message::Flush(done)).is_ok() {
            let _ = wait.recv_timeout(FLUSH_LIMIT);
        }
    }
}

impl Log {
    /// For the subscriber: each line with its level, if systemd's journal reads them.
    #[must_use]
    pub fn lines(&self) -> Lines {
        Lines { log: self.clone(), for_journal: is_journal(std::env::var("JOURNAL_STREAM").ok()) }
    }
}

/// Whether standard error is the stream to the journal that `JOURNAL_STREAM` names by its device
/// and inode (systemd.exec(5)).
fn is_journal(named: Option<String>) -> bool {
    let stderr = io::stderr().as_fd().try_clone_to_owned().map(File::from);
    let own = stderr.and_then(|file| file.metadata());
    own.is_ok_and(|own| named == Some(format!("{}:{}", own.dev(), own.ino())))
}

/// Makes the writer of an event.
#[derive(Clone, Debug)]
pub struct Lines {
    log: Log,
    for_journal: bool,
}

impl<'a> MakeWriter<'a> for Lines {
    type Writer = Lined;

    fn make_writer(&'a self) -> Lined {
        Lined { log: self.log.clone(), prefix: "" }
    }

    fn make_writer_for(&'a self, event: &Metadata<'_>) -> Lined {
        // sd-daemon(3); `journalctl -p warning` goes by it.
        let prefix = match *event.level() {
            _ if !self.for_journal => "",
            Level::ERROR => "<3>",
            Level::WARN => "<4>",
            Level::INFO => "<6>",
            Level::DEBUG | Level::TRACE => "<7>",
        };
        Lined { log: self.log.clone(), prefix }
    }
}

/// Writes an event, each of its lines with the same prefix.
#[derive(Debug)]
pub struct Lined {
    log: Log,
    prefix: &'static str,
}

impl Write for Lined {
    fn write(&mut self, event: &[u8]) -> io::Result<usize> {
        if self.prefix.is_empty() {
            return self.log.write(event);
        }
        let lines = event.split_inclusive(|&byte| byte == b'\n');
        let lines: Vec<_> = lines.map(|line| [self.prefix.as_bytes(), line].concat()).collect();
        self.log.write(&lines.concat())?;
        Ok(event.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Sets the filter of the log, as `daemon.log` has it.
static SET_FILTER: OnceLock<Box<SetFilter>> = OnceLock::new();

type SetFilter = dyn Fn(&str) + Send + Sync;

/// The way to set the filter of the log while the daemon runs. Once.
pub fn set_filter_by(set: impl Fn(&str) + Send + Sync + 'static) {
    let _ = SET_FILTER.set(Box::new(set));
}

/// Sets the filter of the log.
pub(crate) fn set_filter(text: &str) {
    SET_FILTER.get().into_iter().for_each(|set| set(text));
}

impl Write for Log {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if self.0.try_send(Message::Line(line.to_vec())).is_err() {
            LOST.fetch_add(1, Ordering::Relaxed);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn run(messages: &Receiver<Message>) {
    let (mut out, mut said) = (io::stderr(), 0);
    for message in messages {
        let line = match message {
            Message::Line(line) => line,
            Message::Flush(done) => {
                drop(done);
                continue;
            }
        };
        let lost = lines_lost();
        if lost > said && writeln!(out, "nightporterd: {} log lines were lost", lost - said).is_ok()
        {
            said = lost;
        }
        if out.write_all(&line).is_err() {
            LOST.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// How many lines an outsider may cause.
#[derive(Debug)]
pub(crate) struct Limit(Bucket);

impl Limit {
    pub(crate) const fn new() -> Self {
        Self(Bucket::new(BURST, INTERVAL))
    }

    /// Whether a line may be written now. If not, it counts as lost.
    pub(crate) fn allows(&mut self) -> bool {
        self.allows_at(monotonic_now())
    }

    fn allows_at(&mut self, now: Instant) -> bool {
        let allows = self.0.allows(now);
        LOST.fetch_add(u64::from(!allows), Ordering::Relaxed);
        allows
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_has_fifty_lines_and_then_one_a_second() {
        let (mut limit, start) = (Limit::new(), Instant::from_secs(1000));
        let mut lines = |now, tries| (0..tries).filter(|_| limit.allows_at(now)).count();
        assert_eq!(lines(start, 80), 50);
        assert_eq!(lines(start + Duration::from_millis(999), 10), 0);
        assert_eq!(lines(start + Duration::from_secs(3), 10), 3);
        assert_eq!(lines(start + Duration::from_secs(1_000_000), 80), 50);
    }
}
