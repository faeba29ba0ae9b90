//! A status, off the data path: connections are counted (`census`), then some ports are looked at
//! after each turn, and control formats the results, for operators and for scrapes.
//! No turn waits for more than [`PORTS_PER_TURN`] ports and a bounded write to each client.
//!
//! A request that arrives while connections are counted is answered from this count. A later
//! request waits for the next one, so that no answer is older than its question. A port that comes
//! or goes meanwhile may be missing.
//!
//! The sockets' worker may stand, as for memory of a guest. After [`ASKING_MAX`] the status goes on
//! without its part, and says so.

use nightporter_api::{FabricStatus, PortStatus};
use nightporter_core::port::PortId;
use nightporter_core::time::{Duration, Instant};

use super::census::Census;
use super::data_path::DataPath;
use super::executor::Executor;
use super::orders::{Client, Report, WorkerStatus};
use crate::port::Port;
use crate::sockets::orders::SocketsStatus;

/// Ports that are looked at after one turn, of some 10 us each.
pub(super) const PORTS_PER_TURN: usize = 8;

/// How long a status waits for the sockets' worker's part. A turn of it takes milliseconds.
pub(super) const ASKING_MAX: Duration = Duration::from_secs(1);

/// How far it is.
#[derive(Debug, Default)]
enum Stage {
    #[default]
    Idle,
    Counting,
    /// The sockets' worker was asked for its part, and is waited for until then; the ports that
    /// have gone since.
    Asking(Instant, Vec<PortId>),
    Looking(Looking),
}

/// Ports are looked at.
#[derive(Debug)]
struct Looking {
    next: usize,
    /// Those that were looked at.
    rows: Vec<PortStatus>,
    /// The sockets' worker's part; `None`: it has not come in time.
    sockets: Option<Box<SocketsStatus>>,
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
    /// The last report of the sockets' worker of the streams, and of changes of listeners: without
    /// its part, counters stay where they were.
    last: (Option<FabricStatus>, u64),
}

impl Survey {
    /// When it goes on. There is an event when the sockets' worker has answered.
    pub(super) const fn poll_timeout(&self) -> Option<Instant> {
        match self.stage {
            Stage::Idle => None,
            Stage::Asking(until, _) => Some(until),
            Stage::Counting | Stage::Looking(_) => Some(Instant::ZERO),
        }
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

    /// The port has gone, and another may get its number before the status is done.
    pub(super) fn forget_port(&mut self, port: PortId) {
        self.census.forget(port);
        match &mut self.stage {
            Stage::Asking(_, gone) => gone.push(port),
            Stage::Looking(Looking { sockets: Some(sockets), .. }) => {
                sockets.devices.remove(&port);
            }
            _ => {}
        }
    }

    /// Ports that were looked at so far.
    #[cfg(test)]
    pub(super) fn looked_at(&self) -> usize {
        if let Stage::Looking(it) = &self.stage { it.rows.len() } else { 0 }
    }
}

impl Executor {
    /// A turn is over: looks at some more.
    pub(super) fn go_on_surveying(&mut self, now: Instant, path: &mut DataPath) {
        let mut stage = std::mem::take(&mut self.survey.stage);
        if matches!(stage, Stage::Counting) && self.survey.census.go_on(now, &path.engine) {
            // A request from now on gets the next one.
            path.sockets.ask_for_status();
            stage = Stage::Asking(now + ASKING_MAX, Vec::new());
        }
        if let Stage::Asking(until, gone) = &stage {
            let mut sockets = path.sockets.take_status();
            if let Some(sockets) = &mut sockets {
                sockets.devices.retain(|port, _| !gone.contains(port));
            }
            if sockets.is_some() || *until <= now {
                stage = Stage::Looking(Looking { next: 0, rows: Vec::new(), sockets });
            }
        }
        let Looking { next, mut rows, mut sockets } = match stage {
            Stage::Looking(looking) => looking,
            stage => return self.survey.stage = stage,
        };
        let ports = path.ports.list.len();
        let to = ports.min(next + PORTS_PER_TURN);
        for id in (next..to).filter_map(|at| u16::try_from(at).ok()).map(PortId) {
            let at = path.ports.of(id);
            if !matches!(at.port, Port::Vacant) {
                let mut row = path.port_status(now, id, at, &self.survey.census.of(id));
                if let Some(vm) = &mut row.vm {
                    vm.toe = sockets.as_mut().and_then(|it| it.devices.remove(&id));
                }
                rows.push(row);
            }
        }
        if to < ports {
            self.survey.stage = Stage::Looking(Looking { next: to, rows, sockets });
            return;
        }
        let sockets_late = sockets.is_none();
        if let Some(sockets) = sockets {
            self.survey.last = (sockets.fabric, sockets.listener_changes);
        }
        let (fabric, listener_changes) = self.survey.last;
        let status = WorkerStatus { ports: rows, fabric, listener_changes, sockets_late };
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
