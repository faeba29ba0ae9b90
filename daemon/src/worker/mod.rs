//! The worker: one thread that owns the engine and all ports, and runs every event to completion.
//!
//! Each round: wait for events (or not, if work is left over); give each to the data path or to the
//! desk; take a turn over all ports (`core::turn`); let the desk finish. Only the wait blocks.

pub(crate) mod data_path;
mod guests;
mod heartbeats;
mod polling;
pub(crate) mod ports;
mod sockets;

use std::io;
use std::num::NonZeroU64;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use nightporter_core::engine::{AddPortError, Engine};
use nightporter_core::port::{PortConfig, PortId};
use nightporter_core::time::{Duration, Instant};
use nightporter_registry::Registry;
use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollTimeout};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::signalfd::SignalFd;

use crate::broker::Broker;
use crate::change::{Preparer, Running};
use crate::config::{ToeRule, VmConfig};
use crate::desk::{ControlServer, Desk, LinkWatch, MetricsServer, Scribe};
use crate::opener::Opener;
use crate::port::Port;
use crate::port::vhost_user::VhostUserPort;
use crate::timer::{Timer, monotonic_now};
use crate::toe::{Doors, Member};
use crate::token::{Token, watch_for};
use crate::vhost::vsock::Vsock;
use crate::watchdog;
use data_path::DataPath;
use polling::Polling;

/// While polling, frames between two looks at all events, which wake ports that are asleep. A look
/// costs as much as two or three frames. A turn counts for [`FRAMES_OF_A_TURN`] besides.
const FRAMES_PER_LOOK: u64 = 256;
/// So that a worker which polls for nothing looks every 16 turns.
const FRAMES_OF_A_TURN: u64 = 16;
/// Events taken from the kernel at a time.
const EVENTS_MAX: usize = 64;

/// The configuration of a worker besides ports.
#[derive(Debug)]
pub struct WorkerConfig {
    /// How long to look for work before sleeping, as long as no other thread wants the core.
    pub busy_poll: Duration,
    /// How long a stop waits for guests.
    pub drain_timeout: Duration,
    /// This daemon's in heartbeats (FLOOD-28): none before it had the same.
    pub epoch: NonZeroU64,
}

/// See the module doc.
#[derive(Debug)]
pub struct Worker {
    path: DataPath,
    desk: Desk,
    epoll: Epoll,
    timer: Timer,
    events: [EpollEvent; EVENTS_MAX],
    /// The time of this turn.
    now: Instant,
    polling: Polling,
    /// Frames, and turns as if they were some, since the last look at all events.
    since_look: u64,
}

impl Worker {
    /// A worker without ports. Errors: the system has no epoll or no timer for it.
    pub fn new(config: WorkerConfig, engine: Engine<'static>) -> io::Result<Self> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        let timer = Timer::new()?;
        watch_for(&epoll, &timer.fd(), Token::Timer)?;
        let now = monotonic_now();
        Ok(Self {
            path: DataPath::new(now, engine, config.epoch),
            desk: Desk::new(now, config.drain_timeout),
            epoll,
            timer,
            events: [EpollEvent::empty(); EVENTS_MAX],
            now,
            polling: Polling::new(config.busy_poll, now),
            since_look: 0,
        })
    }

    pub(crate) fn set_signals(&mut self, signals: SignalFd) -> io::Result<()> {
        self.desk.set_signals(&self.epoll, signals)
    }

    pub(crate) fn set_links(&mut self, links: LinkWatch) -> io::Result<()> {
        self.desk.set_links(&self.epoll, links)
    }

    /// Sets the process that opens uplinks.
    pub(crate) fn set_broker(&mut self, broker: Arc<Broker>) -> io::Result<()> {
        self.desk.set_broker(&self.epoll, broker)
    }

    /// Serves operators from now on. Errors: the system's.
    pub fn set_control(&mut self, control: ControlServer) -> io::Result<()> {
        self.desk.set_control(&self.epoll, control)
    }

    pub(crate) fn set_metrics(&mut self, metrics: MetricsServer) -> io::Result<()> {
        self.desk.set_metrics(&self.epoll, metrics)
    }

    /// Ports may come, go and change from now on.
    pub(crate) fn set_changes(&mut self, preparer: Preparer, running: Running) -> io::Result<()> {
        self.desk.set_changes(&self.epoll, preparer, running)
    }

    /// Missing uplinks and overlays are tried again from now on.
    pub(crate) fn set_opener(&mut self, opener: Opener) -> io::Result<()> {
        self.desk.set_opener(&self.epoll, opener)
    }

    /// Statuses are put into words aside from now on.
    pub(crate) fn set_scribe(&mut self, scribe: Scribe) -> io::Result<()> {
        self.desk.set_scribe(&self.epoll, scribe)
    }

    /// Sets the registry, which is asked and told which station is where.
    pub(crate) fn set_registry(&mut self, registry: Box<dyn Registry>) -> io::Result<()> {
        self.desk.set_registry(&self.epoll, registry)
    }

    /// Adds a port; its number. Errors: see [`AddPortError`].
    pub fn add_port(&mut self, port: Port, config: PortConfig) -> Result<PortId, AddPortError> {
        self.path.add_port(monotonic_now(), &self.epoll, port, config)
    }

    /// The VM behind a port has a socket device.
    pub(crate) fn add_toe(&mut self, port: PortId, device: VhostUserPort<Vsock>, member: Member) {
        self.path.add_toe(monotonic_now(), &self.epoll, port, device, member);
    }

    /// Sets the operator's rules for connections by TOE.
    pub(crate) fn set_toe_rules(&mut self, rules: Vec<ToeRule>) {
        self.path.toe.set_rules(rules);
    }

    /// There is a way to guests' sockets on other hosts. Errors: the system's.
    pub(crate) fn open_doors(&mut self, doors: Doors) -> io::Result<()> {
        self.path.open_doors(&self.epoll, doors)
    }

    /// The rate limits of a VM, and its boost.
    pub(crate) fn set_limits(&mut self, port: PortId, vm: &VmConfig) {
        self.path.set_limits(monotonic_now(), port, vm);
    }

    /// A booster may connect at this socket. Errors: the system's.
    pub(crate) fn set_booster(&mut self, listener: OwnedFd, rt_priority: u8) -> io::Result<()> {
        self.path.booster.set_listener(&self.epoll, listener, rt_priority)
    }

    /// Looks for promises that a predecessor left in the arena; call after all ports were added.
    pub(crate) fn handle_restart(&mut self) {
        let reset = self.path.engine.handle_restart(monotonic_now());
        if reset > 0 {
            tracing::warn!(reset, "connections lost bytes in the restart and were reset");
        }
    }

    /// Works until it is told to stop. Then it calls `stopping` with the time limit, before guests
    /// get the bytes that they are owed.
    pub(crate) fn run(&mut self, stopping: impl FnOnce(Duration)) -> io::Result<()> {
        let mut stopping = Some(stopping);
        while !self.desk.is_stopped() {
            self.turn()?;
            if self.desk.is_stopping()
                && let Some(stopping) = stopping.take()
            {
                stopping(self.desk.drain_timeout());
            }
        }
        Ok(())
    }

    /// One turn: see the module doc.
    pub fn turn(&mut self) -> io::Result<()> {
        let wait = self.next_wait();
        self.turn_after(wait)
    }

    /// One turn that never sleeps, for callers that bring the work themselves.
    pub fn turn_at_once(&mut self) -> io::Result<()> {
        let wait = self.next_wait().map(|_| EpollTimeout::ZERO);
        self.turn_after(wait)
    }

    fn turn_after(&mut self, wait: Option<EpollTimeout>) -> io::Result<()> {
        if wait.is_some() {
            self.since_look = 0;
        }
        let count = match wait {
            None => 0,
            Some(timeout) => {
                watchdog::handle_rest();
                match self.epoll.wait(&mut self.events, timeout) {
                    Err(Errno::EINTR) => 0,
                    result => result?,
                }
            }
        };
        let now = monotonic_now();
        watchdog::handle_turn(now);
        self.now = now;
        if count > 0 {
            self.polling.handle_work(now);
        }
        for i in 0..count {
            self.handle_event(now, Token::unpack(self.events[i].data()));
        }
        if wait.is_some() {
            self.path.hear_front_ends(now, &self.epoll);
        }
        self.service(now);
        watchdog::handle_end(now);
        Ok(())
    }

    /// How long to wait for an event; `None` is not to ask for any.
    fn next_wait(&mut self) -> Option<EpollTimeout> {
        if self.polling.poll(self.now) {
            self.offer_core();
            // Look at ports that had something lately, and at the rest now and then.
            self.path.turn.look_again(&mut self.path.ports);
            let looks = self.since_look >= FRAMES_PER_LOOK;
            return looks.then_some(EpollTimeout::ZERO);
        }
        let left_over = self.path.turn.rest(&mut self.path.ports) || self.path.toe.has_work();
        Some(if left_over { EpollTimeout::ZERO } else { EpollTimeout::NONE })
    }

    /// Offers the core to other threads, and notes whether one took it.
    fn offer_core(&mut self) {
        let before = involuntary_switches();
        std::thread::yield_now();
        let taken = involuntary_switches() != before;
        self.polling.handle_offer(monotonic_now(), taken);
    }

    fn handle_event(&mut self, now: Instant, token: Token) {
        let Self { path, desk, epoll, .. } = self;
        match token {
            Token::Timer => self.timer.handle_expiry(),
            Token::Uplink(port) => path.turn.wake(PortId(port)),
            Token::Guest(port, source) => path.handle_guest(now, epoll, PortId(port), source),
            Token::Toe(port, source) => path.handle_toe(now, epoll, PortId(port), source),
            Token::StreamListener(listener) => path.accept_stream(now, epoll, listener),
            Token::Dialer => path.take_dialed(now, epoll),
            Token::Trust => path.toe.hear_trust(now, epoll),
            Token::Stream(place) => path.toe.wake_stream(place),
            Token::Ucx => {} // in the turn that follows
            Token::BoosterListener => path.booster.accept(epoll),
            Token::Booster => path.booster.hear(epoll),
            Token::Signal
            | Token::Links
            | Token::Broker
            | Token::Changes
            | Token::Opener
            | Token::Scribe
            | Token::Registry
            | Token::ControlListener
            | Token::Control(_)
            | Token::MetricsListener
            | Token::Metrics(_) => desk.handle_event(now, epoll, path, token),
        }
    }

    /// Everything that is due.
    fn service(&mut self, now: Instant) {
        self.path.send_heartbeats(now);
        self.path.look_at_polled(now);
        let frames = self.path.turn(now);
        self.path.handle_faults(now, &self.epoll);
        self.path.wake_resting(now, &self.epoll);
        self.path.go_on_announcing(now);
        self.since_look += FRAMES_OF_A_TURN + frames;
        if frames > 0 {
            self.polling.handle_work(now);
        }
        self.path.booster.after_turn(now, &mut self.path.engine);
        self.desk.after_turn(now, &self.epoll, &mut self.path);
        let DataPath { engine, booster, heartbeats, resting, polled, announcements, toe, .. } =
            &self.path;
        let deadlines = [
            engine.poll_timeout(),
            heartbeats.poll_timeout(),
            resting.poll_timeout(),
            polled.poll_timeout(),
            announcements.front().map(|it| it.next),
            toe.poll_timeout(),
            toe.bulletin_timeout(),
            booster.poll_timeout(),
            self.desk.poll_timeout(),
        ];
        self.timer.set(deadlines.into_iter().flatten().min());
    }

    /// Connections with a byte, FIN or RST that is still owed.
    pub(crate) fn owed(&self) -> u32 {
        self.path.owed()
    }
}

/// How often the calling thread lost its core although it could have gone on, since it began.
fn involuntary_switches() -> u64 {
    let usage = getrusage(UsageWho::RUSAGE_THREAD).expect("who is one of the three there are");
    usage.involuntary_context_switches().cast_unsigned()
}

#[cfg(test)]
mod tests;
