//! The worker: one thread that owns the engine and all ports, and runs every event to completion.
//!
//! Each time round: wait for events (or not, if something is left over); note what they mean, and
//! serve clients of the control socket and the metrics; take a [`Turn`] over all ports. Nothing
//! blocks but the wait.

mod commands;
mod guests;
pub(crate) mod links;
mod polling;
mod ports;
mod report;
pub(crate) mod timer;
pub(crate) mod token;
mod watch;

use std::io;
use std::os::fd::AsFd;

use nightporter_core::engine::{AddPortError, Engine};
use nightporter_core::port::{PortConfig, PortFeatures, PortId};
use nightporter_core::time::{Duration, Instant};
use nightporter_core::turn::{Turn, TurnConfig};
use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::signal::Signal;
use nix::sys::signalfd::SignalFd;

use crate::control::ControlServer;
use crate::metrics::MetricsServer;
use crate::port::Port;
use links::LinkWatch;
use polling::Polling;
use ports::WorkerPorts;
use timer::{Timer, monotonic_now};
use token::Token;

/// While polling, turns between two looks at everything that is not a port.
const TURNS_PER_WAIT: u32 = 16;
/// How often a stopping daemon looks whether it is done.
const STOP_LOOK_INTERVAL: Duration = Duration::from_millis(10);
/// Events taken from the kernel at a time.
const EVENTS_MAX: usize = 64;

/// What a worker needs besides ports.
#[derive(Debug)]
pub struct WorkerConfig {
    /// How long to look for work before sleeping, as long as nobody else wants the core.
    pub busy_poll: Duration,
    /// How long a stop waits for guests.
    pub drain_timeout: Duration,
}

/// A stop that waits for guests.
#[derive(Debug)]
struct Stop {
    /// It happens then in any case.
    deadline: Instant,
    /// When to look again whether anything is still owed: that walks over all flows.
    look_at: Instant,
}

/// See the module doc.
#[derive(Debug)]
pub struct Worker {
    config: WorkerConfig,
    engine: Engine<'static>,
    turn: Turn,
    ports: WorkerPorts,
    epoll: Epoll,
    timer: Timer,
    signals: Option<SignalFd>,
    links: Option<LinkWatch>,
    control: Option<ControlServer>,
    metrics: Option<MetricsServer>,
    events: [EpollEvent; EVENTS_MAX],
    started: Instant,
    /// The time of this turn.
    now: Instant,
    polling: Polling,
    /// Turns that polled, modulo 2^32.
    turns: u32,
    /// Set once the daemon was told to stop.
    stop: Option<Stop>,
    stopped: bool,
}

impl Worker {
    /// A worker without ports. Errors: the system has no epoll or no timer for it.
    pub fn new(config: WorkerConfig, engine: Engine<'static>) -> io::Result<Self> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        let timer = Timer::new()?;
        add(&epoll, &timer.fd(), Token::Timer)?;
        let now = monotonic_now();
        let polling = Polling::new(config.busy_poll, now);
        Ok(Self {
            config,
            engine,
            turn: Turn::new(TurnConfig::default()),
            ports: WorkerPorts::new(now),
            epoll,
            timer,
            signals: None,
            links: None,
            control: None,
            metrics: None,
            events: [EpollEvent::empty(); EVENTS_MAX],
            started: now,
            now,
            polling,
            turns: 0,
            stop: None,
            stopped: false,
        })
    }

    /// Stops gracefully at the first signal of `signals`, at once at the second.
    pub(crate) fn set_signals(&mut self, signals: SignalFd) -> io::Result<()> {
        add(&self.epoll, &signals, Token::Signal)?;
        self.signals = Some(signals);
        Ok(())
    }

    /// Notices interfaces that go and come back.
    pub(crate) fn set_links(&mut self, links: LinkWatch) -> io::Result<()> {
        add(&self.epoll, &links.fd(), Token::Links)?;
        self.links = Some(links);
        Ok(())
    }

    /// Serves operators from now on. Errors: the system's.
    pub fn set_control(&mut self, control: ControlServer) -> io::Result<()> {
        add(&self.epoll, &control.fd(), Token::ControlListener)?;
        self.control = Some(control);
        Ok(())
    }

    pub(crate) fn set_metrics(&mut self, metrics: MetricsServer) -> io::Result<()> {
        add(&self.epoll, &metrics.fd(), Token::MetricsListener)?;
        self.metrics = Some(metrics);
        Ok(())
    }

    /// Adds a port. Errors: see [`AddPortError`].
    pub fn add_port(&mut self, port: Port, config: PortConfig) -> Result<(), AddPortError> {
        let now = monotonic_now();
        let name = config.name.clone();
        let id = self.turn.add_port(now, &mut self.engine, config)?;
        self.ports.add(id, name, port);
        if let Port::Uplink(tap) = &self.ports.of(id).port {
            add(&self.epoll, &tap.fd(), Token::Uplink(id.0))
                .map_err(|_| AddPortError::TooManyPorts)?;
            // The kernel's half of a tap takes everything.
            self.turn.set_features(now, &mut self.engine, id, Some(PortFeatures::ALL));
        }
        self.handle_guest_events(now, id);
        Ok(())
    }

    /// Looks for promises that a predecessor left in the arena; call after all ports were added.
    pub(crate) fn handle_restart(&mut self) {
        let reset = self.engine.handle_restart(monotonic_now());
        if reset > 0 {
            tracing::warn!(reset, "connections lost bytes in the restart and were reset");
        }
    }

    /// Works until it is told to stop.
    pub(crate) fn run(&mut self) -> io::Result<()> {
        while !self.stopped {
            self.turn()?;
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
        let count = match wait {
            None => 0,
            Some(timeout) => match self.epoll.wait(&mut self.events, timeout) {
                Err(Errno::EINTR) => 0,
                result => result?,
            },
        };
        let now = monotonic_now();
        self.now = now;
        if count > 0 {
            self.polling.handle_work(now);
        }
        for i in 0..count {
            self.handle_event(now, Token::unpack(self.events[i].data()));
        }
        self.service(now);
        Ok(())
    }

    /// How long to wait for an event; `None` is not to ask for any.
    fn next_wait(&mut self) -> Option<EpollTimeout> {
        if self.polling.poll(self.now) {
            self.offer_core();
            // Look at ports that had something lately, and at the rest now and then.
            self.turn.look_again(&mut self.ports);
            self.turns = self.turns.wrapping_add(1);
            return self.turns.is_multiple_of(TURNS_PER_WAIT).then_some(EpollTimeout::ZERO);
        }
        let left_over = self.turn.rest(&mut self.ports);
        Some(if left_over { EpollTimeout::ZERO } else { EpollTimeout::NONE })
    }

    /// Lets whoever waits for this core go first, and notes whether somebody did.
    fn offer_core(&mut self) {
        let before = involuntary_switches();
        std::thread::yield_now();
        let taken = involuntary_switches() != before;
        self.polling.handle_offer(monotonic_now(), taken);
    }

    fn handle_event(&mut self, now: Instant, token: Token) {
        match token {
            Token::Signal => self.handle_signal(now),
            Token::Timer => self.timer.handle_expiry(),
            Token::Links => self.handle_links(),
            Token::ControlListener => self.handle_control_listener(),
            Token::Control(place) => self.handle_control_client(now, place),
            Token::MetricsListener => {
                if let Some(metrics) = &mut self.metrics {
                    metrics.handle_listener(&self.epoll);
                }
            }
            Token::Metrics(place) => self.handle_metrics_client(now, place),
            Token::Uplink(port) => self.turn.wake(PortId(port)),
            Token::Guest(port, source) => self.handle_guest(now, PortId(port), source),
        }
    }

    fn handle_signal(&mut self, now: Instant) {
        let Some(Ok(Some(signal))) = self.signals.as_ref().map(SignalFd::read_signal) else {
            return;
        };
        if signal.ssi_signo == Signal::SIGHUP as u32 {
            tracing::warn!("SIGHUP: the configuration is read at the start only; restart for that");
            return;
        }
        if self.stop.is_some() {
            tracing::warn!(signal = signal.ssi_signo, "second signal: stopping at once");
            self.stopped = true;
            return;
        }
        tracing::info!(signal = signal.ssi_signo, "stopping: draining all VMs");
        self.stop = Some(Stop { deadline: now + self.config.drain_timeout, look_at: now });
        for (port, _) in self.ports.iter().filter(|(_, at)| at.port.is_guest()) {
            self.engine.drain(now, port);
        }
    }

    /// Everything that is due.
    fn service(&mut self, now: Instant) {
        self.ports.now = now;
        let frames = self.turn.run(now, &mut self.engine, &mut self.ports);
        if frames.is_ok_and(|n| n > 0) {
            self.polling.handle_work(now);
        }
        self.feed_watchers();
        self.look_whether_done(now);
        let deadlines = [self.engine.poll_timeout(), self.stop.as_ref().map(|s| s.look_at)];
        self.timer.set(deadlines.into_iter().flatten().min());
    }

    /// Ends a stop when nothing is owed any more, or the time is up.
    fn look_whether_done(&mut self, now: Instant) {
        let Some(stop) = self.stop.as_mut().filter(|stop| now >= stop.look_at) else { return };
        stop.look_at = stop.deadline.min(now + STOP_LOOK_INTERVAL);
        let late = now >= stop.deadline;
        self.stopped |= late || self.owed() == 0;
    }

    /// Connections with a byte, FIN or RST that somebody is still owed.
    pub(crate) fn owed(&self) -> u32 {
        let vms = self.ports.iter().filter_map(|(port, _)| self.engine.vm(port));
        vms.map(|vm| vm.owing_flows).sum()
    }
}

/// How often the calling thread lost its core although it could have gone on, since it began.
fn involuntary_switches() -> u64 {
    let usage = getrusage(UsageWho::RUSAGE_THREAD).expect("who is one of the three there are");
    usage.involuntary_context_switches().cast_unsigned()
}

/// Registers a descriptor for reading, level-triggered.
fn add(epoll: &Epoll, fd: &impl AsFd, token: Token) -> io::Result<()> {
    Ok(epoll.add(fd, EpollEvent::new(EpollFlags::EPOLLIN, token.pack()))?)
}

#[cfg(test)]
mod tests;
