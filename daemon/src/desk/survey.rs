//! A status, off the data path: connections are counted (`census`), then some ports are looked at
//! after each turn, and the results are formatted on another thread, for operators and for scrapes.
//! No turn waits for more than [`PORTS_PER_TURN`] ports and a bounded write to each client.
//!
//! A request that arrives while connections are counted is answered from this count. A later
//! request waits for the next one, so that no answer is older than its question. A port that comes
//! or goes meanwhile may be missing.

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;

use nightporter_api::{PortStatus, Reply, Status};
use nightporter_core::port::PortId;
use nightporter_core::time::Instant;
use nix::sys::epoll::Epoll;

use super::Desk;
use super::census::Census;
use super::metrics::scrape;
use crate::aside::Aside;
use crate::port::Port;
use crate::token::{Token, watch_for};
use crate::worker::data_path::DataPath;

/// Ports that are looked at after one turn, of some 10 us each.
pub(crate) const PORTS_PER_TURN: usize = 8;

/// Puts a status into words.
pub(crate) type Scribe = Aside<Job, Words>;

/// A status to be formatted.
#[derive(Debug)]
pub(crate) struct Job {
    status: Status,
    for_operators: bool,
    for_scrapes: bool,
}

/// The same text for all clients that have asked.
#[derive(Debug, Default)]
pub(crate) struct Words {
    /// A mistake of ours.
    has_failed: bool,
    /// A line of the control protocol.
    for_operators: Option<Arc<Vec<u8>>>,
    /// An answer to a scrape.
    for_scrapes: Option<Arc<Vec<u8>>>,
}

/// Starts the thread that formats. Call it before the worker gets its core and its priority, which
/// threads inherit. Errors: the system's.
pub(crate) fn start_scribe() -> io::Result<Scribe> {
    let failed = || Words { has_failed: true, ..Words::default() };
    Aside::start("scribe", put_into_words, failed)
}

fn put_into_words(job: Job) -> Words {
    let Job { mut status, for_operators, for_scrapes } = job;
    // One that was removed and added meanwhile was seen twice.
    let mut names = BTreeSet::new();
    status.ports.retain(|port| names.insert(port.name.clone()));
    let scraped = for_scrapes.then(|| Arc::new(scrape(&status)));
    let told = for_operators.then(|| Arc::new(line(&Reply::Status(status))));
    Words { has_failed: false, for_operators: told, for_scrapes: scraped }
}

/// A reply as the control protocol has it.
pub(super) fn line(reply: &Reply) -> Vec<u8> {
    let mut line = serde_json::to_vec(reply).expect("replies are plain data");
    line.push(b'\n');
    line
}

/// How far it is.
#[derive(Debug, Default)]
enum Stage {
    #[default]
    Idle,
    Counting,
    /// The next port, and those that were looked at.
    Looking(usize, Vec<PortStatus>),
    /// The scribe has it.
    Writing,
}

/// See the module doc.
#[derive(Debug, Default)]
pub(super) struct Survey {
    /// `None`: it is put into words at once.
    scribe: Option<Scribe>,
    pub(super) census: Census,
    stage: Stage,
    /// Control clients that get this one, by their places.
    waiting: Vec<u16>,
    /// And those that get the next.
    later: Vec<u16>,
}

impl Survey {
    /// It goes on after the next turn.
    pub(super) const fn goes_on(&self) -> bool {
        matches!(self.stage, Stage::Counting | Stage::Looking(..))
    }

    /// Begins, unless it has.
    pub(super) fn begin(&mut self) {
        if matches!(self.stage, Stage::Idle) {
            self.stage = Stage::Counting;
            self.census.begin();
        }
    }

    /// The control client at `place` wants a status.
    pub(super) fn ask(&mut self, place: u16) {
        self.begin();
        match self.stage {
            Stage::Counting => self.waiting.push(place),
            _ => self.later.push(place),
        }
    }

    /// The client at `place` has gone.
    pub(super) fn forget(&mut self, place: u16) {
        self.waiting.retain(|waits| *waits != place);
        self.later.retain(|waits| *waits != place);
    }

    /// Ports that were looked at so far.
    #[cfg(test)]
    pub(super) fn looked_at(&self) -> usize {
        if let Stage::Looking(_, rows) = &self.stage { rows.len() } else { 0 }
    }
}

impl Desk {
    /// Statuses are put into words aside from now on.
    pub(crate) fn set_scribe(&mut self, epoll: &Epoll, scribe: Scribe) -> io::Result<()> {
        watch_for(epoll, &scribe.fd(), Token::Scribe)?;
        self.survey.scribe = Some(scribe);
        Ok(())
    }

    /// A turn is over: looks at some more.
    pub(super) fn go_on_surveying(&mut self, now: Instant, epoll: &Epoll, path: &mut DataPath) {
        let stage = std::mem::take(&mut self.survey.stage);
        let (from, mut rows) = match stage {
            Stage::Counting if self.survey.census.go_on(now, &path.engine) => (0, Vec::new()),
            Stage::Looking(from, rows) => (from, rows),
            stage => return self.survey.stage = stage,
        };
        let ports = path.ports.list.len();
        let to = ports.min(from + PORTS_PER_TURN);
        for id in (from..to).filter_map(|at| u16::try_from(at).ok()).map(PortId) {
            let at = path.ports.of(id);
            if !matches!(at.port, Port::Vacant) {
                rows.push(path.port_status(now, id, at, &self.survey.census.of(id)));
            }
        }
        if to < ports {
            self.survey.stage = Stage::Looking(to, rows);
            return;
        }
        let job = Job {
            status: self.status(now, rows, path.toe.fabric_status()),
            for_operators: !self.survey.waiting.is_empty(),
            for_scrapes: self.metrics.as_ref().is_some_and(|metrics| metrics.has_waiting()),
        };
        self.survey.stage = Stage::Writing;
        match &self.survey.scribe {
            Some(scribe) => scribe.begin(job),
            None => self.tell_status(now, epoll, path, put_into_words(job)),
        }
    }

    /// The scribe is done.
    pub(super) fn handle_scribe(&mut self, now: Instant, epoll: &Epoll, path: &mut DataPath) {
        if let Some(words) = self.survey.scribe.as_ref().and_then(Scribe::poll) {
            self.tell_status(now, epoll, path, words);
        }
    }

    /// Answers the clients that have waited; those that came too late wait on.
    fn tell_status(&mut self, now: Instant, epoll: &Epoll, path: &mut DataPath, words: Words) {
        self.survey.stage = Stage::Idle;
        let told = std::mem::take(&mut self.survey.waiting);
        let failed = || {
            Arc::new(line(&Reply::Error {
                what: "the status could not be formatted: see the log".into(),
                fix: "report this".into(),
            }))
        };
        let answer = words.for_operators.unwrap_or_else(failed);
        for place in std::mem::take(&mut self.survey.later) {
            self.survey.ask(place);
        }
        if let Some(metrics) = &mut self.metrics {
            if words.has_failed {
                metrics.handle_failure(epoll, &mut self.writes);
            } else if let Some(answer) = words.for_scrapes {
                metrics.handle_answer(epoll, &mut self.writes, now, answer);
            }
            if metrics.has_waiting() {
                self.survey.begin();
            }
        }
        for place in told {
            if let Some(control) = &mut self.control
                && control.release(place)
            {
                control.answer(place, Arc::clone(&answer));
                // It may have asked for more.
                self.handle_control_client(now, epoll, path, place);
            }
        }
    }
}
