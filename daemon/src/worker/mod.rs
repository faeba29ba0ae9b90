//! The worker: one thread that owns the engine and all ports, and runs every event to completion.
//!
//! One turn: wait for events (or not, if something is left over); note what they mean; then, in
//! the engine's drain order, read at most [`FRAMES_PER_PORT`] frames and about [`BYTES_PER_PORT`]
//! from every readable port, send on what the engine says at once, end the batch, send what the
//! engine made itself, move backlogs and deliveries to guests with room, and tell the guests about
//! all of it together. Then clients of the control socket and the metrics are served.
//!
//! Nothing blocks but the wait. What a turn did not finish stays marked (`Slot::readable`), and
//! the next turn does not wait.

mod commands;
mod guests;
pub(crate) mod links;
mod polling;
mod report;
mod slots;
pub(crate) mod timer;
pub(crate) mod token;
mod watch;

use std::io;
use std::os::fd::AsFd;

use nightporter_core::drops::DropReason;
use nightporter_core::engine::{AddPortError, Engine, Verdict};
use nightporter_core::port::PortConfig;
use nightporter_core::time::{Duration, Instant};
use nightporter_core::wire::virtio_net::VirtioNetHdr;
use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::signal::Signal;
use nix::sys::signalfd::SignalFd;

use crate::control::ControlServer;
use crate::metrics::MetricsServer;
use crate::port::{Port, Received};
use links::LinkWatch;
use polling::Polling;
use slots::{Slot, SlotId, Slots};
use timer::{Timer, monotonic_now};
use token::Token;
use watch::Direction;

/// Frames read from one port before the others have their turn.
const FRAMES_PER_PORT: usize = 64;
/// Bytes after which no more is read from a port in a turn. A guest works on what it got while the
/// next turn reads; 64 super-segments first, 4 MB, made both wait for each other.
const BYTES_PER_PORT: usize = 128 * 1024;
/// A super-segment of 64 KiB behind an Ethernet header with VLAN tags, and then some.
const FRAME_BYTES_MAX: usize = 68 * 1024;
/// A full frame of Ethernet: what a delivery gets that goes behind others.
const FULL_FRAME: usize = 1514;
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
    slots: Slots,
    epoll: Epoll,
    timer: Timer,
    signals: Option<SignalFd>,
    links: Option<LinkWatch>,
    control: Option<ControlServer>,
    metrics: Option<MetricsServer>,
    events: [EpollEvent; EVENTS_MAX],
    frame: Box<[u8]>,
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
            slots: Slots::default(),
            epoll,
            timer,
            signals: None,
            links: None,
            control: None,
            metrics: None,
            events: [EpollEvent::empty(); EVENTS_MAX],
            frame: vec![0; FRAME_BYTES_MAX].into_boxed_slice(),
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
        let id = self.engine.add_port(now, config)?;
        let slot = self.slots.add(id, name, port);
        self.engine.set_port_features(now, id, self.slots.list[slot].features);
        let token = Token::Uplink(u16::try_from(slot).map_err(|_| AddPortError::TooManyPorts)?);
        if let Port::Uplink(tap) = &self.slots.list[slot].port {
            add(&self.epoll, &tap.fd(), token).map_err(|_| AddPortError::TooManyPorts)?;
        }
        self.handle_guest_events(now, slot);
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
            // Look at every port, and at the rest now and then.
            self.slots.list.iter_mut().for_each(Slot::wake);
            self.turns = self.turns.wrapping_add(1);
            return self.turns.is_multiple_of(TURNS_PER_WAIT).then_some(EpollTimeout::ZERO);
        }
        // Who has nothing to read now says so when that changes.
        let mut left_over = false;
        for slot in &mut self.slots.list {
            slot.readable |= slot.port.arm();
            left_over |= slot.readable;
        }
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
            Token::Uplink(slot) => self.slots.list[usize::from(slot)].wake(),
            Token::Guest(slot, source) => self.handle_guest(now, usize::from(slot), source),
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
        for slot in self.slots.list.iter().filter(|s| s.port.is_guest()) {
            self.engine.drain(now, slot.id);
        }
    }

    /// Everything that is due, in the engine's drain order.
    fn service(&mut self, now: Instant) {
        self.note_progress(now);
        if self.engine.poll_timeout().is_some_and(|at| at <= now) {
            self.engine.handle_timeout(now);
            self.send_made(now);
        }
        for slot in 0..self.slots.list.len() {
            if self.slots.list[slot].readable {
                self.read_port(now, slot);
            }
        }
        self.engine.handle_batch_end(now);
        self.send_made(now);
        for slot in 0..self.slots.list.len() {
            if self.slots.list[slot].port.is_guest() {
                self.feed_guest(now, slot);
            }
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
        let vms = self.slots.list.iter().filter_map(|slot| self.engine.vm(slot.id));
        vms.map(|vm| vm.owing_flows).sum()
    }

    /// Tells the engine which guests have shown that they run.
    fn note_progress(&mut self, now: Instant) {
        for slot in &mut self.slots.list {
            if let Port::Guest(guest) = &mut slot.port
                && let Some(drained) = guest.progress()
            {
                // What waits outside the ring is unseen too.
                let drained = drained && slot.backlog.is_empty();
                self.engine.handle_guest_progress(now, slot.id, drained);
            }
        }
    }

    /// Reads a bounded number of frames, and sends on what the engine lets pass.
    fn read_port(&mut self, now: Instant, slot: SlotId) {
        let (mut frames, mut bytes) = (0, 0);
        while frames < FRAMES_PER_PORT && bytes < BYTES_PER_PORT {
            let from = &mut self.slots.list[slot];
            let received = from.port.receive(&mut self.frame);
            if matches!(received, Received::Frame(..)) {
                self.polling.handle_work(now);
            }
            match received {
                // It may have been longer.
                Received::Frame(_, FRAME_BYTES_MAX..) => from.drop_frames(DropReason::TooBig, 1),
                Received::Frame(hdr, len) => {
                    bytes += len;
                    self.forward(now, slot, hdr, len);
                }
                Received::Empty => {
                    from.readable = false;
                    return;
                }
                Received::Gone => return from.lose(),
            }
            frames += 1;
        }
    }

    /// One frame, which is in `self.frame`, came in at `slot`.
    fn forward(&mut self, now: Instant, slot: SlotId, mut hdr: VirtioNetHdr, len: usize) {
        let from = &mut self.slots.list[slot];
        let frame = &mut self.frame[..len];
        from.stats.count_from_port(len);
        let id = from.id;
        self.slots.watchers.see(now, slot, Direction::FromPort, &[frame]);
        match self.engine.handle_frame(now, id, &mut hdr, frame) {
            Verdict::Forward(to) => self.slots.send(now, to, &hdr, &[frame]),
            Verdict::Flood => self.slots.flood(now, id, &hdr, &[frame]),
            // A drop is counted by the engine.
            Verdict::Absorbed | Verdict::Drop(_) => {}
        }
        self.send_made(now);
    }

    /// Sends what the engine made of the last event, before the next one overtakes it.
    fn send_made(&mut self, now: Instant) {
        while let Some(made) = self.engine.poll_transmit(now) {
            self.slots.transmit(now, &made);
        }
    }

    /// Gives a guest what waits for it, as far as it has room, and shows it all of this turn.
    fn feed_guest(&mut self, now: Instant, slot: SlotId) {
        if self.slots.list[slot].features.is_some() {
            let mut waits = self.give(now, slot);
            // Ask for a wake-up, then look once more: only if that finds nothing new was the
            // question asked in time. Looking takes buffers, so finding them asks again.
            while let Some(room) = waits {
                self.slots.list[slot].port.wait_for_room();
                let sent = self.slots.list[slot].stats.frames_to_port;
                waits = self.give(now, slot);
                if waits == Some(room) && self.slots.list[slot].stats.frames_to_port == sent {
                    break;
                }
            }
        }
        if let Port::Guest(guest) = &mut self.slots.list[slot].port {
            guest.flush();
        }
        self.handle_guest_events(now, slot);
    }

    /// Moves what waits for the ring and deliveries, in turn: a flood of the one must not starve
    /// the other. A delivery goes behind what waits. `Some`: something waits for more than this
    /// much room.
    fn give(&mut self, now: Instant, slot: SlotId) -> Option<usize> {
        loop {
            let Slots { list, watchers, .. } = &mut self.slots;
            let to = &mut list[slot];
            let id = to.id;
            let moved = to.move_waiting(now, watchers);
            let Port::Guest(guest) = &mut to.port else { return None };
            let behind = !to.backlog.is_empty();
            if behind && !moved {
                self.engine.handle_no_room(now, id);
                return Some(guest.room(FRAME_BYTES_MAX));
            }
            let wanted = self.engine.vm(id).is_some_and(|vm| !vm.ready.is_empty());
            if !wanted && !behind {
                guest.ignore_room();
                return None;
            }
            let room = if behind { FULL_FRAME } else { guest.room(FRAME_BYTES_MAX) };
            if let Some(made) = self.engine.poll_delivery(now, id, room) {
                self.slots.transmit(now, &made);
            } else if !behind {
                // What was ready may have found nothing to say after all.
                let waits = self.engine.vm(id).is_some_and(|vm| !vm.ready.is_empty());
                return waits.then_some(room);
            }
        }
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
