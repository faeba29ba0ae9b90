//! The sockets' worker: a thread with an epoll set of its own, which owns the socket devices, their
//! rings and their view of guest memory, the table of sockets and the streams to other hosts.
//!
//! It is built like the frames' worker: only its wait for events blocks, and its turns are watched.
//! The two share no field. They exchange orders and reports (`orders`;
//! docs/design/control.md, "Two workers").

use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::Duration as StdDuration;

use nightporter_core::engine::Direction;
use nightporter_core::port::PortId;
use nightporter_core::time::{Duration, Instant};
use nightporter_registry::mail::Bell;
use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollTimeout};

use super::fabric::Doors;
use super::orders::{Addition, Change, Order, Report, Setting, SocketsMail, SocketsStatus};
use super::{Toe, orders};
use crate::polling::Polling;
use crate::resting::Resting;
use crate::sleeps::Eye;
use crate::sys;
use crate::timer::{Timer, monotonic_now};
use crate::token::{Token, watch_for};
use crate::watchdog;
use crate::watched::Watched;

/// Events taken from the kernel at a time.
const EVENTS_MAX: usize = 64;
/// Orders that are taken in one turn.
const ORDERS_PER_TURN: usize = 64;
/// How often queues without notifications are polled, as those of frames.
const POLL_INTERVAL: Duration = Duration::from_millis(1);
/// How long the end of the daemon waits for it.
const END_MAX: StdDuration = StdDuration::from_secs(5);

/// See the module doc.
#[derive(Debug)]
pub(crate) struct SocketsWorker {
    pub(super) toe: Toe,
    pub(super) epoll: Epoll,
    pub(super) mail: SocketsMail,
    timer: Timer,
    events: [EpollEvent; EVENTS_MAX],
    /// The time of this turn.
    now: Instant,
    polling: Polling,
    /// Sockets of VMs and listeners of streams that take no connections, and connections that are
    /// not read, for now.
    pub(super) resting: Resting<Token>,
    /// Devices with queues without notifications.
    pub(super) polled: Resting<Token>,
    /// Sockets and connections of VMMs with waiting messages; the first one is handled first.
    pub(super) front_ends: VecDeque<Token>,
    /// `faults::count` when devices were last looked at for it.
    pub(super) faults_seen: u64,
    /// The change that waits until the sockets of this VM have ended.
    ending: Option<(u64, PortId)>,
}

/// The thread. When this is dropped, after the frames' worker's end of the mail, it ends.
#[derive(Debug)]
pub(crate) struct SocketsThread {
    bell: Bell,
    /// Its other end goes with the thread.
    ended: Receiver<()>,
}

impl Drop for SocketsThread {
    fn drop(&mut self) {
        self.bell.ring();
        // The files of the devices' sockets go with it.
        let _ = self.ended.recv_timeout(END_MAX);
    }
}

/// The parts from which the thread is made.
#[derive(Debug)]
pub(crate) struct Beginning {
    /// See [`Toe::new`].
    pub(crate) incarnation: u64,
    /// How long it looks for work before it sleeps.
    pub(crate) busy_poll: Duration,
    /// A real-time priority; 0 is none.
    pub(crate) rt_priority: u8,
    pub(crate) mail: SocketsMail,
    /// The way to other hosts, if there is one.
    pub(crate) doors: Option<Doors>,
}

impl Beginning {
    /// Starts the thread. `frames` is the other end's bell. To be called before the frames' worker
    /// gets its core, which threads inherit, and before the system calls are restricted. Errors:
    /// the system's.
    pub(crate) fn start(self, frames: Bell) -> io::Result<SocketsThread> {
        let (bell, (begun, has_begun)) = (self.mail.bell(), sync_channel(1));
        let (ends, ended) = sync_channel::<()>(0);
        thread::Builder::new().name("sockets".into()).spawn(move || {
            let _ends = ends; // after all else
            let ended = catch_unwind(AssertUnwindSafe(move || self.run(&begun)));
            // The frames' worker takes its mail, and finds that nobody writes any more.
            frames.ring();
            if let Ok(Err(error)) = ended {
                tracing::error!(%error, "the event loop of sockets failed");
            }
        })?;
        has_begun.recv().map_err(io::Error::other)??;
        Ok(SocketsThread { bell, ended })
    }

    /// The thread. It says by `begun` whether it has begun.
    fn run(self, begun: &SyncSender<io::Result<()>>) -> io::Result<()> {
        let rt_priority = self.rt_priority;
        let made = Eye::open().and_then(|eye| Ok((eye, SocketsWorker::new(self)?)));
        let (eye, mut worker) = match made {
            Ok(made) => made,
            Err(error) => {
                let _ = begun.send(Err(error));
                return Ok(());
            }
        };
        let _watch = watchdog::watch(Watched::Sockets, Some(eye));
        if rt_priority > 0 {
            let _ = sys::set_realtime(rt_priority); // the frames' worker reports the error
        }
        let _ = begun.send(Ok(()));
        while worker.turn(true)? {}
        Ok(())
    }
}

impl SocketsWorker {
    /// Without devices. Errors: the system's.
    pub(super) fn new(of: Beginning) -> io::Result<Self> {
        let Beginning { incarnation, busy_poll, mail, doors, .. } = of;
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        let timer = Timer::new()?;
        watch_for(&epoll, &timer.fd(), Token::Timer)?;
        watch_for(&epoll, &mail.fd(), Token::Mail)?;
        let now = monotonic_now();
        let mut worker = Self {
            toe: Toe::new(incarnation),
            epoll,
            mail,
            timer,
            events: [EpollEvent::empty(); EVENTS_MAX],
            now,
            polling: Polling::new(busy_poll, now),
            resting: Resting::new(),
            polled: Resting::for_at_most(POLL_INTERVAL),
            front_ends: VecDeque::new(),
            faults_seen: 0,
            ending: None,
        };
        doors.map_or(Ok(()), |doors| worker.open_doors(doors))?;
        Ok(worker)
    }

    /// One turn. `may_sleep`: it waits for events if there is nothing to do. `false`: the frames'
    /// worker is gone. Errors: the system's.
    pub(super) fn turn(&mut self, may_sleep: bool) -> io::Result<bool> {
        let polls = self.polling.poll(self.now);
        if polls {
            self.polling.offer_core();
        }
        let sleeps = may_sleep && !polls && !self.toe.has_work();
        let wait = if sleeps { EpollTimeout::NONE } else { EpollTimeout::ZERO };
        watchdog::handle_rest();
        let count = match self.epoll.wait(&mut self.events, wait) {
            Err(Errno::EINTR) => 0,
            result => result?,
        };
        let now = monotonic_now();
        watchdog::handle_turn(now);
        self.now = now;
        for i in 0..count {
            let token = Token::unpack(self.events[i].data());
            if !self.handle_event(now, token) {
                return Ok(false);
            }
        }
        self.hear_front_ends(now);
        self.look_at_polled(now);
        if self.toe.turn(now) + count as u64 > 0 {
            self.polling.handle_work(now);
        }
        self.handle_faults(now);
        self.wake_resting(now);
        self.report(now);
        self.set_timer();
        watchdog::handle_end(now);
        Ok(true)
    }

    /// `false`: the frames' worker is gone.
    fn handle_event(&mut self, now: Instant, token: Token) -> bool {
        match token {
            Token::Timer => self.timer.handle_expiry(),
            Token::Mail => return self.handle_orders(now),
            Token::Toe(port, source) => self.handle_device(now, PortId(port), source),
            Token::StreamListener(listener) => self.accept_stream(now, listener),
            Token::Dialer => self.take_dialed(now),
            Token::Trust => self.toe.hear_trust(now, &self.epoll),
            Token::Stream(place) => self.toe.wake_stream(place),
            Token::Ucx => {} // in the turn that follows
            token => unreachable!("another thread's: {token:?}"),
        }
        true
    }

    /// Takes some orders; there is an event for the others. `false`: the frames' worker is gone.
    fn handle_orders(&mut self, now: Instant) -> bool {
        for _ in 0..ORDERS_PER_TURN {
            match self.mail.take() {
                Err(orders::Gone) => return false,
                Ok(None) => return true,
                Ok(Some(order)) => self.execute(now, order),
            }
        }
        true
    }

    fn execute(&mut self, now: Instant, order: Order) {
        match order {
            Order::Change(number, Change::PrepareRemoval(port)) => {
                self.prepare_removal(now, port);
                self.ending = Some((number, port)); // there is one change at a time
            }
            Order::Change(number, change) => {
                self.change(now, change);
                self.mail.report(Report::Done(number));
            }
            Order::SetRateLimit(port, way, rate) => self.toe.set_rate_limit(port, way, rate),
            Order::SetOverlays(overlays) => self.toe.set_overlays(now, overlays),
            Order::SetStation(key, station) => self.toe.set_station(key, station.as_deref()),
            Order::Survey(number) => {
                let status = Box::new(self.toe.status_of_all());
                self.mail.report(Report::Status(number, status));
            }
            Order::Look => self.faults_seen = u64::MAX, // after this turn
        }
    }

    fn change(&mut self, now: Instant, change: Change) {
        match change {
            Change::Add(port, addition) => {
                let Addition { device, member, limits } = *addition;
                self.toe.add(port, device, member);
                let ways = [Direction::FromGuest, Direction::ToGuest];
                for (way, rate) in ways.into_iter().zip(limits) {
                    self.toe.set_rate_limit(port, way, rate);
                }
                self.handle_device_events(now, port);
            }
            Change::Set(port, setting) => {
                let Setting { config, member, moves } = *setting;
                if let Some(device) = self.toe.port_mut(port) {
                    device.set_rules(&config);
                    if let Some(socket) = moves {
                        device.move_to(config.socket.clone());
                        device.listen_by(socket);
                    }
                }
                self.handle_device_events(now, port);
                self.toe.set(now, port, member);
            }
            Change::PrepareRemoval(port) => self.prepare_removal(now, port),
            Change::Remove(port) => self.remove(now, port),
            Change::SetRules(rules) => self.toe.set_rules(rules),
        }
    }

    /// Reports listeners of VMs that others are to be told of, and a removal that can go on.
    fn report(&mut self, now: Instant) {
        for port in self.toe.take_listings(now) {
            self.report_listeners(port, true);
        }
        if let Some((number, port)) = self.ending
            && !self.toe.is_ending(port)
        {
            self.ending = None;
            self.mail.report(Report::Done(number));
        }
    }

    /// Reports the listeners of a VM.
    pub(super) fn report_listeners(&mut self, port: PortId, is_news: bool) {
        let listeners = self.toe.listeners_of(port);
        self.mail.report(Report::Listeners { port, listeners, is_news });
    }

    fn set_timer(&mut self) {
        let Self { toe, resting, polled, .. } = self;
        let deadlines = [
            toe.poll_timeout(),
            toe.listings_timeout(),
            resting.poll_timeout(),
            polled.poll_timeout(),
        ];
        self.timer.set(deadlines.into_iter().flatten().min());
    }
}

impl Toe {
    /// The sockets' part of a status.
    fn status_of_all(&self) -> SocketsStatus {
        let devices = self.ports().into_iter().filter_map(|port| Some((port, self.status(port)?)));
        SocketsStatus {
            devices: devices.collect(),
            fabric: self.fabric_status(),
            listener_changes: self.listener_changes(),
        }
    }
}
