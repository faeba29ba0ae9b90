//! A status, off the data path: connections are counted (`census`), then some ports are looked at
//! after each turn, and control formats the results, for operators and for scrapes.
//! No turn waits for more than [`PORTS_PER_TURN`] ports and a bounded write to each client.
//!
//! A request that arrives while connections are counted is answered from this count. A later
//! request waits for the next one, so that no answer is older than its question. A port that comes
//! or goes meanwhile may be missing.

use nightporter_api::PortStatus;
use nightporter_core::port::PortId;
use nightporter_core::time::Instant;

use super::census::Census;
use super::data_path::DataPath;
use super::executor::Executor;
use super::orders::{Client, Report, WorkerStatus};
use crate::port::Port;

/// Ports that are looked at after one turn, of some 10 us each.
pub(super) const PORTS_PER_TURN: usize = 8;

/// How far it is.
#[derive(Debug, Default)]
enum Stage {
    #[default]
    Idle,
    Counting,
    /// The next port, and those that were looked at.
    Looking(usize, Vec<PortStatus>),
}

/// See the module doc.
#[derive(Debug, Default)]
pub(super) struct Survey {
    pub(super) census: Census,
    stage: Stage,
    /// Clients that get this one.
    waiting: Vec<Client>,
    /// And those that get the next.
    later: Vec<Client>,
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

    /// The client wants a status.
    pub(super) fn ask(&mut self, client: Client) {
        self.begin();
        match self.stage {
            Stage::Counting => self.waiting.push(client),
            _ => self.later.push(client),
        }
    }

    /// Control wants a status for scrapes.
    pub(super) fn ask_for_scrapes(&mut self) {
        self.for_scrapes = true;
        self.begin();
    }

    /// The client has gone.
    pub(super) fn forget(&mut self, client: Client) {
        self.waiting.retain(|waits| *waits != client);
        self.later.retain(|waits| *waits != client);
    }

    /// Ports that were looked at so far.
    #[cfg(test)]
    pub(super) fn looked_at(&self) -> usize {
        if let Stage::Looking(_, rows) = &self.stage { rows.len() } else { 0 }
    }
}

impl Executor {
    /// A turn is over: looks at some more.
    pub(super) fn go_on_surveying(&mut self, now: Instant, path: &DataPath) {
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
        let listener_changes = path.toe.listener_changes();
        let fabric = path.toe.fabric_status();
        let status = WorkerStatus { ports: rows, fabric, listener_changes };
        let clients = std::mem::take(&mut self.survey.waiting);
        let for_scrapes = std::mem::take(&mut self.survey.for_scrapes);
        // Those who asked may have gone.
        if for_scrapes || !clients.is_empty() {
            self.report(Report::Status { status, clients, for_scrapes });
        }
        for client in std::mem::take(&mut self.survey.later) {
            self.survey.ask(client);
        }
    }
}
