//! One line with the progress of a run: rewritten in place on a terminal, printed now and then
//! where output is recorded.

use std::io::{IsTerminal, Write, stderr};
use std::time::{Duration, Instant};

/// How often a recorded run says where it is.
const RECORD_INTERVAL: Duration = Duration::from_secs(15);

/// A progress display on standard error.
#[derive(Debug)]
pub struct Progress {
    start: Instant,
    terminal: bool,
    last_record: Option<Instant>,
    /// Steps are in that line too, with the time that is left of this.
    total: Option<Duration>,
}

impl Progress {
    /// Starts the clock.
    #[must_use]
    pub fn start() -> Self {
        let terminal = stderr().is_terminal();
        Self { start: Instant::now(), terminal, last_record: None, total: None }
    }

    /// From now on the run takes about so long, and all steps are in one line.
    pub fn expect(&mut self, total: Duration) {
        self.clear();
        self.start = Instant::now();
        self.total = Some(total);
    }

    /// How long it will take.
    fn left(&self, total: Duration) -> String {
        let left = total.saturating_sub(self.start.elapsed()).as_secs();
        if left > 0 { format!("about {left} s left") } else { "soon done".into() }
    }

    fn in_line(&mut self, total: Duration, text: &str) {
        let left = self.left(total);
        if self.terminal {
            eprint!("\r\x1b[K{:.78}", format!("[{left}] {text}"));
            let _ = stderr().flush();
        } else if self.last_record.is_none_or(|last| last.elapsed() >= RECORD_INTERVAL) {
            self.last_record = Some(Instant::now());
            eprintln!("[{left}] {text}");
        }
    }

    /// Says that a new step begins.
    pub fn step(&mut self, text: &str) {
        if let Some(total) = self.total {
            return self.in_line(total, text);
        }
        self.clear();
        eprintln!("[{:5.1} s] {text}", self.start.elapsed().as_secs_f64());
    }

    /// Shows how far a long step is.
    pub fn update(&mut self, done: usize, of: usize, text: &str) {
        if let Some(total) = self.total {
            return self.in_line(total, text);
        }
        let filled = (done * 30).checked_div(of).unwrap_or(30).min(30);
        let bar = format!("{}{}", "#".repeat(filled), "-".repeat(30 - filled));
        let seconds = self.start.elapsed().as_secs_f64();
        if self.terminal {
            eprint!("\r\x1b[K[{seconds:5.1} s] [{bar}] {done}/{of} {text}");
            let _ = stderr().flush();
        } else if self.last_record.is_none_or(|last| last.elapsed() >= RECORD_INTERVAL) {
            self.last_record = Some(Instant::now());
            eprintln!("[{seconds:5.1} s] {done}/{of} {text}");
        }
    }

    /// Takes an unfinished line away.
    pub fn clear(&self) {
        if self.terminal {
            eprint!("\r\x1b[K");
        }
    }
}
