//! A status, off the data path: connections are counted (`census`), then some ports are looked at
//! after each turn, and control formats the results, for operators and for scrapes.
//! No turn waits for more than [`PORTS_PER_TURN`] ports and a bounded write to each client.
//!
//! A request that arrives while connections are counted is answered from this count. A later
//! request waits for the next one, so that no answer is older than its question. A port that comes
//! or goes meanwhile may be missing.

use std::sync::Arc;

use nightporter_api::{PortStatus, Reply};
use nightporter_core::port::PortId;
use nightporter_core::time::Instant;
use nix::sys::epoll::Epoll;

use super::Desk;
use super::census::Census;
use crate::control::format::{format, line};
use crate::port::Port;
use crate::worker::data_path::DataPath;
use crate::worker::orders::Report;

/// Ports that are looked at after one turn, of some 10 us each.
pub(crate) const PORTS_PER_TURN: usize = 8;

/// How far it is.
#[derive(Debug, Default)]
enum Stage {
    #[default]
    Idle,
    Counting,
    /// The next port, and those that were looked at.
    Looking(usize, Vec<PortStatus>),
    /// Control has it.
    Formatting,
}

/// See the module doc.
#[derive(Debug, Default)]
pub(super) struct Survey {
    pub(super) census: Census,
    stage: Stage,
    /// Control clients that get this one, by their places.
    waiting: Vec<u16>,
    /// And those that get the next.
    later: Vec<u16>,
    /// Control wants one for scrapes.
    for_scrapes: bool,
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

    /// Control wants a status for scrapes.
    pub(super) fn ask_for_scrapes(&mut self) {
        self.for_scrapes = true;
        self.begin();
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
        self.survey.stage = Stage::Formatting;
        let status = self.status(now, rows, path.toe.fabric_status());
        let for_operators = !self.survey.waiting.is_empty();
        let for_scrapes = std::mem::take(&mut self.survey.for_scrapes);
        if let Some(mail) = &mut self.mail {
            let status = Box::new(status);
            mail.report(Report::Status { status, for_operators, for_scrapes });
        } else {
            let texts = format(status, for_operators, false);
            self.tell_status(now, epoll, path, texts.for_operators);
        }
    }

    /// A status is formatted: answers the clients that have waited; those that came too late wait
    /// on.
    pub(super) fn tell_status(
        &mut self,
        now: Instant,
        epoll: &Epoll,
        path: &mut DataPath,
        text: Option<Arc<Vec<u8>>>,
    ) {
        self.survey.stage = Stage::Idle;
        let told = std::mem::take(&mut self.survey.waiting);
        let failed = || {
            Arc::new(line(&Reply::Error {
                what: "the status could not be formatted: see the log".into(),
                fix: "report this".into(),
            }))
        };
        let answer = text.unwrap_or_else(failed);
        for place in std::mem::take(&mut self.survey.later) {
            self.survey.ask(place);
        }
        if self.survey.for_scrapes {
            self.survey.begin();
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
