//! Control: a thread with an epoll set of its own, for work that is not about frames. It serves
//! operators and scrapers, takes signals, makes changes, and talks to the registry. It may wait for
//! a file or the kernel. The worker executes the requests that need the engine, between two of its
//! turns (docs/design/control.md).
//!
//! It and the worker's thread know of each other only [`Order`]s and [`Report`]s. A client whose
//! request the worker has is held until the report is there.

mod bridges;
mod changes;
pub(crate) mod conn;
mod directory;
mod interfaces;
mod links;
mod metrics;
mod operators;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread;

use nightporter_api::{Change, Reply, Request, SocketsStatus, Status};
use nightporter_core::time::{Duration, Instant};
use nightporter_registry::Registry;
use nightporter_registry::mail::Bell;
use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::signal::Signal;
use nix::sys::signalfd::SignalFd;

use crate::broker::Broker;
use crate::change::{Preparer, Setting};
use crate::log;
use crate::refused;
use crate::resting::Resting;
use crate::supervisor::Supervisor;
use crate::timer::monotonic_now;
use crate::token::{Token, watch_for};
use crate::watchdog;
use crate::watched::Watched;
use crate::worker::Worker;
use crate::worker::orders::{
    Client, ControlMail, Order, Report, WorkerMail, WorkerStatus, worker_mail,
};
pub(crate) use bridges::Bridges;
use changes::Changes;
use conn::Allowance;
use directory::Directory;
pub(crate) use interfaces::Interfaces;
pub(crate) use links::LinkWatch;
pub(crate) use metrics::MetricsServer;
use metrics::Scrape;
pub use metrics::{Format, is_metrics_request};
pub use operators::ControlServer;
use operators::line;

/// Events taken from the kernel at a time.
const EVENTS_MAX: usize = 64;
/// Reports taken from the worker at a time.
const REPORTS_PER_TURN: usize = 64;
/// How long the end of the daemon waits for it.
const END_MAX: std::time::Duration = std::time::Duration::from_secs(5);

/// The ways in which others reach the daemon.
#[derive(Debug, Default)]
pub(crate) struct Endpoints {
    /// The signals that arrive as events.
    pub(crate) signals: Option<SignalFd>,
    /// Is told of a stop.
    pub(crate) supervisor: Option<Arc<Supervisor>>,
    /// The process that opens uplinks.
    pub(crate) broker: Option<Arc<Broker>>,
    pub(crate) operators: Option<ControlServer>,
    pub(crate) metrics: Option<MetricsServer>,
    /// Prepares changes. `None`: there are none.
    pub(crate) preparer: Option<Preparer>,
    /// The uplinks and overlays.
    pub(crate) interfaces: Interfaces,
    pub(crate) bridges: Bridges,
    pub(crate) registry: Option<Box<dyn Registry>>,
}

/// See the module doc.
#[derive(Debug)]
pub struct Control {
    epoll: Epoll,
    mail: ControlMail,
    endpoints: Endpoints,
    started: Instant,
    /// The daemon was told to stop.
    stops: bool,
    broker_ended: bool,
    changes: Changes,
    interfaces: Interfaces,
    bridges: Bridges,
    directory: Option<Directory>,
    /// Listeners that do not accept for now.
    resting: Resting<Token>,
    /// A status for scrapes was ordered, and is not there yet.
    ordered: bool,
    /// The bytes that may be written to clients in this turn.
    writes: Allowance,
}

/// Control's thread. When this is dropped, after the worker's end of the mail, it ends.
#[derive(Debug)]
pub(crate) struct ControlThread {
    bell: Bell,
    /// Its other end goes with the thread.
    ended: Receiver<()>,
    /// How long its end is waited for.
    end_max: std::time::Duration,
}

impl Drop for ControlThread {
    fn drop(&mut self) {
        self.bell.ring();
        // The control socket's file goes with it. It may wait for something.
        let _ = self.ended.recv_timeout(self.end_max);
    }
}

impl Control {
    /// For operators alone, in turns of its own instead of a thread. For tests. Errors: the
    /// system's.
    pub fn beside(worker: &mut Worker, operators: ControlServer) -> io::Result<Self> {
        let endpoints = Endpoints { operators: Some(operators), ..Endpoints::default() };
        let (control, mail) = Self::new(endpoints)?;
        worker.set_mail(mail)?;
        Ok(control)
    }

    /// With the worker's end of its mail. Errors: the system's.
    pub(crate) fn new(mut endpoints: Endpoints) -> io::Result<(Self, WorkerMail)> {
        let (worker, mail) = worker_mail()?;
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        watch_for(&epoll, &mail.fd(), Token::Mail)?;
        if let Some(signals) = &endpoints.signals {
            watch_for(&epoll, signals, Token::Signal)?;
        }
        if let Some(broker) = &endpoints.broker {
            // A hang-up is always reported.
            epoll.add(broker.end(), EpollEvent::new(EpollFlags::empty(), Token::Broker.pack()))?;
        }
        if let Some(operators) = &endpoints.operators {
            watch_for(&epoll, &operators.fd(), Token::ControlListener)?;
        }
        if let Some(metrics) = &endpoints.metrics {
            watch_for(&epoll, &metrics.fd(), Token::MetricsListener)?;
        }
        let (resting, writes) = (Resting::new(), Allowance::default());
        let changes = Changes::new(endpoints.preparer.take());
        let interfaces = std::mem::take(&mut endpoints.interfaces);
        let bridges = std::mem::take(&mut endpoints.bridges);
        if let Some(links) = &interfaces.links {
            watch_for(&epoll, &links.fd(), Token::Links)?;
        }
        let registry = endpoints.registry.take();
        let directory = registry.map(|it| Directory::new(it, &epoll)).transpose()?;
        let mut new = Self {
            epoll,
            mail,
            endpoints,
            started: monotonic_now(),
            stops: false,
            broker_ended: false,
            changes,
            interfaces,
            bridges,
            directory,
            resting,
            ordered: false,
            writes,
        };
        new.tell_registry(new.started);
        Ok((new, worker))
    }

    /// Works on a thread of its own from now on; `worker` is the other end of its mail. To be
    /// called before the worker gets its core and its priority, which threads inherit. Errors: the
    /// system's.
    pub(crate) fn start(mut self, worker: &WorkerMail) -> io::Result<ControlThread> {
        let (bell, of_worker) = (self.mail.bell(), worker.bell());
        let run = move || -> io::Result<()> {
            while self.turn(true)? {}
            Ok(())
        };
        let (ends, has_ended) = sync_channel::<()>(0);
        thread::Builder::new().name("control".into()).spawn(move || {
            let _ends = ends; // after all else
            let ended = catch_unwind(AssertUnwindSafe(run));
            // The worker takes its mail, and finds that nobody writes any more.
            of_worker.ring();
            if let Ok(Err(error)) = ended {
                tracing::error!(%error, "control's event loop failed");
            }
        })?;
        Ok(ControlThread { bell, ended: has_ended, end_max: END_MAX })
    }

    /// One turn that never sleeps, for callers that have no thread for it. Errors: the system's.
    pub fn turn_at_once(&mut self) -> io::Result<()> {
        self.turn(false).map(drop)
    }

    /// Handles the next events. `false`: the worker is gone.
    fn turn(&mut self, may_sleep: bool) -> io::Result<bool> {
        let wait = if may_sleep { self.wait(monotonic_now()) } else { EpollTimeout::ZERO };
        let mut events = [EpollEvent::empty(); EVENTS_MAX];
        watchdog::handle_control(None);
        let count = match self.epoll.wait(&mut events, wait) {
            Err(Errno::EINTR) => 0,
            result => result?,
        };
        let now = monotonic_now();
        watchdog::handle_control(Some(now));
        self.writes = Allowance::default();
        for event in &events[..count] {
            match Token::unpack(event.data()) {
                Token::Mail => {
                    if !self.hear(now) {
                        return Ok(false);
                    }
                }
                Token::Registry => self.directory.iter_mut().for_each(Directory::note_news),
                Token::Links => self.handle_links(),
                Token::Signal => self.handle_signal(),
                Token::Broker => self.handle_end_of_broker(),
                Token::ControlListener => self.handle_listener(now),
                Token::Control(place) => self.handle_client(place),
                Token::MetricsListener => self.handle_metrics_listener(now),
                Token::Metrics(place) => {
                    if let Some(metrics) = &mut self.endpoints.metrics {
                        metrics.handle_client(&self.epoll, &mut self.writes, now, place);
                    }
                }
                token => unreachable!("the worker's: {token:?}"),
            }
        }
        self.take_late();
        self.wake_listeners(now);
        self.reopen(now);
        self.follow_bridges(now);
        self.hear_registry(now);
        let waits = self.endpoints.metrics.as_ref().is_some_and(MetricsServer::has_waiting);
        if waits && !std::mem::replace(&mut self.ordered, true) {
            self.mail.order(Order::Survey);
        }
        Ok(true)
    }

    /// Until listeners have rested, a port may be opened again, a request is to wait no more, or
    /// there is something to do for the registry, to the next millisecond.
    fn wait(&self, now: Instant) -> EpollTimeout {
        let registry = self.directory.as_ref().and_then(|it| it.poll_timeout(&self.mail));
        let late = self.endpoints.operators.as_ref().and_then(|it| it.poll_timeout(now));
        let interfaces = [self.interfaces.poll_timeout(), self.bridges_due()];
        let due = [self.resting.poll_timeout(), registry, late].into_iter().chain(interfaces);
        let Some(due) = due.flatten().min() else { return EpollTimeout::NONE };
        let ms = due.since(now).as_nanos().div_ceil(1_000_000);
        EpollTimeout::try_from(ms).unwrap_or(EpollTimeout::MAX)
    }

    /// Takes some of the worker's reports: an answer may have the next request ready, so there may
    /// be no last one. There is an event for the others. `false`: the worker is gone.
    fn hear(&mut self, now: Instant) -> bool {
        for _ in 0..REPORTS_PER_TURN {
            match self.mail.take() {
                Err(_) => return false,
                Ok(None) => return true,
                Ok(Some(Report::Status { status, clients, for_scrapes })) => {
                    self.handle_status(now, status, clients, for_scrapes);
                }
                Ok(Some(Report::Reply(client, reply))) => {
                    self.note_setting(client, &reply);
                    self.answer(client, Arc::new(line(&reply)), reply == Reply::Stream {});
                }
                Ok(Some(Report::Piece(client, bytes))) => {
                    let operators = self.endpoints.operators.as_mut();
                    let place = operators.and_then(|it| it.put_piece(client, bytes));
                    place.into_iter().for_each(|place| self.finish(place));
                }
                Ok(Some(Report::Pages(pages))) => self.handle_pages(pages),
                Ok(Some(Report::Lost(name, index))) => {
                    self.interfaces.lose(&name, index);
                    self.handle_links();
                }
                Ok(Some(Report::Link { vm, is_up, listeners })) => {
                    if let Some(directory) = &mut self.directory {
                        directory.handle_link(now, &mut self.mail, (vm, is_up), listeners);
                    }
                }
                Ok(Some(Report::Listeners(vm, listeners))) => {
                    if let Some(directory) = &mut self.directory {
                        directory.handle_listeners(&vm, listeners);
                    }
                }
                Ok(Some(Report::Step(result))) => self.handle_step(result),
                Ok(Some(Report::End(client))) => {
                    let operators = self.endpoints.operators.as_mut();
                    let place = operators.and_then(|it| it.hang_up(client));
                    place.into_iter().for_each(|place| self.finish(place));
                }
            }
        }
        true
    }

    /// Formats a status for all who wait for it. A mistake of ours in that leaves no text.
    fn handle_status(
        &mut self,
        now: Instant,
        status: WorkerStatus,
        clients: Vec<Client>,
        for_scrapes: bool,
    ) {
        let status = self.whole(now, status);
        if for_scrapes && let Some(metrics) = &mut self.endpoints.metrics {
            self.ordered = false;
            match catch_unwind(|| Scrape::new(status.clone())) {
                Ok(scrape) => metrics.handle_answer(&self.epoll, &mut self.writes, now, scrape),
                Err(_) => metrics.handle_failure(&self.epoll, &mut self.writes),
            }
        }
        if clients.is_empty() {
            return;
        }
        let status = self.with_keys(status);
        let text = catch_unwind(AssertUnwindSafe(|| line(&Reply::Status(Box::new(status)))));
        let text = Arc::new(text.unwrap_or_else(|_| {
            line(&Reply::Error {
                what: "the status could not be formatted: see the log".into(),
                fix: "report this".into(),
            })
        }));
        for client in clients {
            self.answer(client, Arc::clone(&text), false);
        }
    }

    /// Adds the keys in force. Metrics do without.
    fn with_keys(&self, mut status: Status) -> Status {
        let Some(config) = self.changes.config() else { return status };
        let vms = config.vms.iter().map(|vm| (&vm.name, vm.keys()));
        let uplinks = config.uplinks.iter().map(|uplink| (&uplink.name, uplink.keys()));
        let mut all: BTreeMap<_, _> = vms.chain(uplinks).collect();
        for port in &mut status.ports {
            let keys = all.remove(&port.name).into_iter().flatten();
            port.keys = keys.filter_map(|(key, value)| Some((key.to_owned(), value?))).collect();
        }
        status
    }

    /// The worker's part of a status, and that of the process.
    fn whole(&self, now: Instant, status: WorkerStatus) -> Status {
        let WorkerStatus { mut ports, fabric, listener_changes, sockets_late } = status;
        // One that was removed and added meanwhile was seen twice.
        let mut names = BTreeSet::new();
        ports.retain(|port| names.insert(port.name.clone()));
        self.interfaces.complete(&mut ports);
        let registry = self.directory.as_ref().map(|it| it.status(listener_changes));
        let registry = registry.unwrap_or_default();
        Status {
            version: env!("CARGO_PKG_VERSION").into(),
            pid: std::process::id(),
            uptime_s: now.since(self.started).as_millis() / 1000,
            stopping: self.stops,
            log_lines_lost: log::lines_lost(),
            stalls: watchdog::stalls(Watched::Frames),
            worker_cpu_us: watchdog::cpu_time(Watched::Frames).as_nanos() / 1000,
            sockets: Box::new(SocketsStatus {
                stalls: watchdog::stalls(Watched::Sockets),
                cpu_us: watchdog::cpu_time(Watched::Sockets).as_nanos() / 1000,
                late: sockets_late,
            }),
            refused_calls: refused::count(),
            broker_ended: self.broker_ended,
            fabric: fabric.map(Box::new),
            registry: Box::new(registry),
            bridges: self.status_of_bridges(),
            ports,
        }
    }

    /// Answers a client that was held, and goes on with it: it may have asked for more.
    fn answer(&mut self, client: Client, text: Arc<Vec<u8>>, streams: bool) {
        let operators = self.endpoints.operators.as_mut();
        if let Some(place) = operators.and_then(|it| it.release(client, text, streams)) {
            self.handle_client(place);
        }
    }

    fn handle_end_of_broker(&mut self) {
        if let Some(broker) = &self.endpoints.broker {
            let _ = self.epoll.delete(broker.end());
        }
        self.broker_ended = true;
        tracing::error!(
            "the process that opens uplinks has ended; open uplinks go on\n    \
             fix: restart nightporterd before an uplink is added or opened again"
        );
    }

    /// SIGTERM and SIGINT stop gracefully the first time, and at once the second time.
    fn handle_signal(&mut self) {
        let Some(Ok(Some(signal))) = self.endpoints.signals.as_ref().map(SignalFd::read_signal)
        else {
            return;
        };
        let number = signal.ssi_signo;
        if number == Signal::SIGHUP as u32 {
            tracing::info!("SIGHUP: reading the configuration");
            let reload = Request::Change { change: Change::Reload {}, dry_run: false };
            if let Err(refusal) = self.ask(None, reload) {
                self.tell(None, refusal);
            }
        } else if ![Signal::SIGTERM as u32, Signal::SIGINT as u32].contains(&number) {
            tracing::warn!(signal = number, "a signal was ignored");
        } else if std::mem::replace(&mut self.stops, true) {
            tracing::warn!(signal = number, "second signal: stopping at once");
            self.mail.order(Order::Stop);
        } else {
            tracing::info!(signal = number, "stopping: draining all VMs");
            let seconds = self.changes.config().map_or(0, |it| it.daemon.drain_timeout_s);
            self.mail.order(Order::Drain(Duration::from_secs(seconds)));
            let limit = std::time::Duration::from_secs(seconds);
            self.endpoints.supervisor.iter().for_each(|it| it.is_stopping(limit));
            self.refuse_waiting();
        }
    }

    fn handle_listener(&mut self, now: Instant) {
        let Some(operators) = &mut self.endpoints.operators else { return };
        if operators.handle_listener(&self.epoll).is_err() {
            let _ = self.epoll.delete(operators.fd());
            self.resting.add(now, Token::ControlListener);
        }
        self.tell_gone();
    }

    /// Something happened on the connection of the operator at `place`: the worker gets its next
    /// request, if one is complete.
    fn handle_client(&mut self, place: u16) {
        let Some(operators) = &mut self.endpoints.operators else { return };
        let mut alive = operators.handle_client(&mut self.writes, place);
        while alive
            && let Some(operators) = &mut self.endpoints.operators
            && let Some((client, request)) = operators.poll_request(place)
        {
            let taken = match request {
                Ok(request) => self.handle_request(client, request),
                Err(reply) => Err(reply),
            };
            let Some(operators) = &mut self.endpoints.operators else { return };
            if let Err(reply) = taken {
                alive = operators.refuse(&mut self.writes, place, &reply);
            }
        }
        if !alive && let Some(operators) = &mut self.endpoints.operators {
            operators.close(place);
        }
        self.finish(place);
    }

    /// Takes a client's request: its answer comes later. Errors: the answer.
    fn handle_request(&mut self, client: Client, request: Request) -> Result<(), Reply> {
        if matches!(request, Request::Change { .. }) || Setting::of(&request).is_some() {
            return self.ask(Some(client), request);
        }
        if let Request::Stations { after } = request {
            let page = self.directory.as_ref().map(|it| it.page(after));
            return Err(Reply::Stations(page.unwrap_or_default()));
        }
        self.mail.order(Order::Request(client, request));
        Ok(())
    }

    /// Takes requests that had to wait.
    fn take_late(&mut self) {
        while let Some(operators) = &mut self.endpoints.operators
            && let Some((client, request)) = operators.poll_late()
        {
            if let Err(reply) = self.handle_request(client, request) {
                self.answer(client, Arc::new(line(&reply)), false);
            }
        }
    }

    /// Writes the output for the operator at `place`, and grants room for its stream.
    fn finish(&mut self, place: u16) {
        let Some(operators) = &mut self.endpoints.operators else { return };
        if operators.finish(&self.epoll, &mut self.writes, place)
            && let Some(client) = operators.grant(place)
        {
            self.mail.order(Order::Room(client));
        }
        self.tell_gone();
    }

    /// The worker forgets operators that have gone.
    fn tell_gone(&mut self) {
        let Some(operators) = &mut self.endpoints.operators else { return };
        for client in operators.take_gone() {
            let has_request = self.mail.forget(client);
            self.forget_asker(client, has_request);
        }
    }

    fn handle_metrics_listener(&mut self, now: Instant) {
        let Some(metrics) = &mut self.endpoints.metrics else { return };
        if metrics.handle_listener(&self.epoll, &mut self.writes, now).is_err() {
            let _ = self.epoll.delete(metrics.fd());
            self.resting.add(now, Token::MetricsListener);
        }
    }

    fn wake_listeners(&mut self, now: Instant) {
        for token in self.resting.take_due(now) {
            let operators = self.endpoints.operators.as_ref().map(ControlServer::fd);
            let metrics = self.endpoints.metrics.as_ref().map(MetricsServer::fd);
            let fd = if token == Token::ControlListener { operators } else { metrics };
            if fd.is_some_and(|fd| watch_for(&self.epoll, &fd, token).is_err()) {
                self.resting.add(now, token);
            }
        }
    }
}

#[cfg(test)]
mod tests;
