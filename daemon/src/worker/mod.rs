//! The frames' worker: one thread that owns the engine and all ports, and runs every event to
//! completion. Socket devices are with another worker (`sockets::worker`).
//!
//! Each round: wait for events (or not, if work is left over); give each to the data path, or
//! control's orders to the executor; take a turn over all ports (`core::turn`); let the executor
//! report. Only the wait blocks. The worker knows nobody above it.

mod attached;
mod back_off;
mod capture;
mod census;
mod commands;
mod data_path;
mod executor;
mod guests;
mod heartbeats;
mod leaving;
pub(crate) mod orders;
mod ports;
mod sockets;
mod stations;
mod status;
pub mod steps;
mod survey;
mod unshared;
mod watch;

use std::io;
use std::num::NonZeroU64;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use nightporter_core::engine::{AddPortError, Engine, Restarted};
use nightporter_core::port::{PortConfig, PortId};
use nightporter_core::time::{Duration, Instant};
use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollTimeout};

use crate::polling::Polling;
use crate::port::Port;
use crate::sockets::orders::FramesMail;
use crate::supervisor::Supervisor;
use crate::timer::{Timer, monotonic_now};
use crate::token::{Token, watch_for};
use crate::vhost::locker::Locker;
use crate::watchdog;
use data_path::DataPath;
use executor::Executor;
use orders::WorkerMail;
use steps::{Opened, Step};

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
    /// This daemon's in heartbeats (FLOOD-28): none before it had the same.
    pub epoch: NonZeroU64,
}

/// See the module doc.
#[derive(Debug)]
pub struct Worker {
    path: DataPath,
    executor: Executor,
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
    /// A worker without ports and without control.
    ///
    /// # Errors
    /// The system has no epoll or no timer for it.
    pub fn new(config: &WorkerConfig, engine: Engine<'static>) -> io::Result<Self> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        let timer = Timer::new()?;
        watch_for(&epoll, &timer.fd(), Token::Timer)?;
        let now = monotonic_now();
        Ok(Self {
            path: DataPath::new(now, engine, config.epoch),
            executor: Executor::default(),
            epoll,
            timer,
            events: [EpollEvent::empty(); EVENTS_MAX],
            now,
            polling: Polling::new(config.busy_poll, now),
            since_look: 0,
        })
    }

    /// Takes control's orders from now on. Errors: the system's.
    pub(crate) fn set_mail(&mut self, mail: WorkerMail) -> io::Result<()> {
        self.executor.set_mail(&self.epoll, mail)
    }

    /// Adds a port; its number. For tests and benches.
    ///
    /// # Errors
    /// See [`AddPortError`].
    pub fn add_port(&mut self, port: Port, config: PortConfig) -> Result<PortId, AddPortError> {
        self.path.add_port(monotonic_now(), &self.epoll, port, config)
    }

    /// Takes a step of the change that the start is: nothing runs yet that could wait meanwhile.
    /// Errors: those that should not occur.
    pub(crate) fn take_step(&mut self, step: Step, opened: Opened) -> Result<(), String> {
        let Self { path, executor, epoll, .. } = self;
        executor.take_step(monotonic_now(), epoll, path, step, opened)
    }

    /// Socket devices are with the sockets' worker from now on. Errors: the system's.
    pub(crate) fn set_sockets(&mut self, mail: FramesMail) -> io::Result<()> {
        self.path.sockets.set_mail(&self.epoll, mail)
    }

    /// A booster may connect at this socket. Errors: the system's.
    pub(crate) fn set_booster(&mut self, listener: OwnedFd, rt_priority: u8) -> io::Result<()> {
        self.path.booster.set_listener(&self.epoll, listener, rt_priority)
    }

    /// Connections of VMMs are kept for the next daemon. To be called before there are ports.
    pub(crate) fn set_supervisor(&mut self, supervisor: Option<Arc<Supervisor>>) {
        self.path.supervisor = supervisor;
    }

    /// Looks for promises that a predecessor left in the arena, then for connections of VMMs that
    /// were kept for us; call after all ports were added.
    pub(crate) fn handle_restart(&mut self) {
        let restarted = self.path.engine.handle_restart(monotonic_now());
        log_restarted(restarted);
        let left = self.left();
        if left > 0 {
            tracing::warn!(left, "connections that a killed daemon owes bytes wait for their taps");
        }
        let lockers = self.path.supervisor.as_ref().map(Locker::all_of).unwrap_or_default();
        self.path.take_over(monotonic_now(), &self.epoll, lockers);
    }

    /// The same for VMs with taps alone: what a predecessor owed them is delivered within `limit`,
    /// and nothing is promised.
    pub(crate) fn settle(&mut self, limit: Duration) -> Restarted {
        let now = monotonic_now();
        let found = self.path.engine.handle_restart_on_wires(now);
        self.executor.drain(now, limit, &mut self.path);
        found
    }

    /// Resets the connections that VMs with taps are still owed, and answers for `time` those who
    /// ask whether that is meant (RFC 5961).
    pub(crate) fn give_up(&mut self, time: Duration) {
        let now = monotonic_now();
        self.path.detach_all(now);
        self.executor.linger(now, time);
    }

    /// Works until control says that it stops, or control's thread or the sockets' worker has ended
    /// by a mistake of ours.
    pub(crate) fn run(&mut self) -> io::Result<()> {
        self.run_until(|| false)?;
        self.unlink()
    }

    /// All taps are plain.
    pub(crate) fn unlink(&mut self) -> io::Result<()> {
        self.path.unlink_all();
        self.turn_at_once()
    }

    /// Works until there is nothing to do, or `is_over` says so after a turn.
    pub(crate) fn run_until(&mut self, is_over: impl Fn() -> bool) -> io::Result<()> {
        while !self.executor.stopped && !is_over() {
            self.turn()?;
            if self.executor.control_ended {
                return Err(io::Error::other("the control thread has ended"));
            }
            if self.path.sockets.has_ended() {
                return Err(io::Error::other("the sockets' worker has ended"));
            }
        }
        Ok(())
    }

    /// Connections with a byte, FIN or RST that is still owed.
    pub(crate) fn owed(&self) -> u32 {
        self.path.owed()
    }

    /// Connections that the host has accepted for their guests.
    pub(crate) fn translated(&self) -> u32 {
        self.path.translated()
    }

    /// Connections that have ended are nothing to the next daemon.
    pub(crate) fn forget_ended(&mut self) {
        self.path.engine.forget_ended();
    }

    /// Connections that the next daemon may go on with.
    pub(crate) fn recorded(&self) -> usize {
        self.path.engine.recorded()
    }

    /// Connections that a predecessor owed bytes, which are left to the next daemon.
    pub(crate) fn left(&self) -> usize {
        self.path.engine.left()
    }

    /// The overlay with this number.
    #[cfg(test)]
    pub(crate) fn overlay_mut(&mut self, vni: u32) -> &mut crate::port::overlay::OverlayPort {
        self.path.overlay_mut(vni).expect("it is there").1
    }

    /// One turn: see the module doc.
    ///
    /// # Errors
    /// The system's.
    pub fn turn(&mut self) -> io::Result<()> {
        self.turn_with(true)
    }

    /// One turn that never sleeps, for callers that bring the work themselves.
    ///
    /// # Errors
    /// The system's.
    pub fn turn_at_once(&mut self) -> io::Result<()> {
        self.turn_with(false)
    }

    /// `may_sleep`: it waits for events if there is nothing to do.
    fn turn_with(&mut self, may_sleep: bool) -> io::Result<()> {
        let wait = self.next_wait().map(|wait| if may_sleep { wait } else { EpollTimeout::ZERO });
        if wait.is_some() {
            self.since_look = 0;
        }
        let count = match wait {
            None => 0,
            Some(timeout) => {
                watchdog::handle_rest();
                self.path.note_rest();
                match self.epoll.wait(&mut self.events, timeout) {
                    Err(Errno::EINTR) => 0,
                    result => result?,
                }
            }
        };
        let now = monotonic_now();
        watchdog::handle_turn(now);
        self.now = now;
        self.path.note_awake(now);
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
            self.polling.offer_core();
            // Look at ports that had something lately, and at the rest now and then.
            self.path.turn.look_again(&mut self.path.ports);
            let looks = self.since_look >= FRAMES_PER_LOOK;
            return looks.then_some(EpollTimeout::ZERO);
        }
        let left_over = self.path.turn.rest(&mut self.path.ports);
        Some(if left_over { EpollTimeout::ZERO } else { EpollTimeout::NONE })
    }

    fn handle_event(&mut self, now: Instant, token: Token) {
        let Self { path, executor, epoll, .. } = self;
        match token {
            Token::Timer => self.timer.handle_expiry(),
            Token::Uplink(port) => path.turn.wake(PortId(port)),
            Token::Guest(port, source) => path.handle_guest(now, epoll, PortId(port), source),
            Token::BoosterListener => path.booster.accept(epoll),
            Token::Booster => path.booster.hear(now, epoll),
            Token::Mail => executor.handle_orders(now, epoll, path),
            Token::SocketsMail => executor.handle_sockets(path),
            token => unreachable!("another thread's: {token:?}"),
        }
    }

    /// Everything that is due.
    fn service(&mut self, now: Instant) {
        self.path.send_heartbeats(now);
        self.path.look_at_polled(now);
        let frames = self.path.turn(now);
        self.path.note_caught_up();
        self.path.go_on_backing_off(now);
        self.path.poll_attached(now);
        self.path.handle_faults(now, &self.epoll);
        self.path.go_on_leaving(now, &self.epoll); // none whose memory was not there
        self.path.wake_resting(now, &self.epoll);
        self.path.go_on_announcing(now);
        self.path.look_for_buffers(now);
        self.since_look += FRAMES_OF_A_TURN + frames;
        if frames > 0 {
            self.polling.handle_work(now);
        }
        self.path.booster.after_turn(now, &mut self.path.engine);
        self.executor.after_turn(now, &self.epoll, &mut self.path);
        let DataPath {
            engine,
            attached,
            booster,
            heartbeats,
            resting,
            polled,
            announcements,
            leaving,
            unshared,
            ..
        } = &self.path;
        let deadlines = [
            engine.poll_timeout(),
            attached.poll_timeout(),
            heartbeats.poll_timeout(),
            resting.poll_timeout(),
            polled.poll_timeout(),
            announcements.front().map(|it| it.next),
            (!leaving.is_empty()).then_some(now),
            unshared.poll_timeout(),
            booster.poll_timeout(),
            self.executor.poll_timeout(&self.path),
        ];
        self.timer.set(deadlines.into_iter().flatten().min());
    }
}

/// The fate of connections of a predecessor.
fn log_restarted(Restarted { resumed, reset }: Restarted) {
    if resumed > 0 {
        tracing::info!(resumed, "connections go on when their guests are back");
    }
    if reset > 0 {
        tracing::warn!(reset, "connections lost bytes in the restart and were reset");
    }
}

#[cfg(test)]
mod tests;
