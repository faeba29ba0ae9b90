//! The log: lines for standard error, written by a thread of their own.
//!
//! Logging never waits and never fails: lines that find no room, or that standard error does not
//! take, are lost and counted. Lines that outsiders can provoke are limited besides, for each port
//! by a [`Limit`].

use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::Duration as StdDuration;

use nightporter_core::bucket::Bucket;
use nightporter_core::time::{Duration, Instant};

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
