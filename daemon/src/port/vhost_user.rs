//! A virtual machine's port: a listening socket, at most one front-end, its device.
//!
//! # Use
//!
//! The worker waits for the descriptors that [`VhostUserPort::poll_event`] names and calls the
//! matching `handle_*`; after each it polls events until `None`. The data path:
//!
//! - **From the guest**, on a kick: `poll_from_guest` until `None` or the worker's budget is spent,
//!   then `flush_from_guest`. Before it sleeps: `enable_kicks_from_guest`; `true` means that frames
//!   came in between, so poll again. While it polls anyway: `disable_kicks_from_guest`.
//! - **To the guest**: `push_to_guest` as long as there is room, then `flush_to_guest`. With frames
//!   left and no room: `enable_kicks_to_guest`; `true` means that there is room now.
//! - Now and then, `guest_progress`: evidence that the guest runs.
//!
//! All calls are safe in any state: with no driver there is nothing to poll and no room.

mod account;
mod change;
mod keeping;
mod net;
mod report;
mod vsock;

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use nightporter_core::port::PortFeatures;
use nightporter_core::time::{Duration, Instant};
use rustix::net::sockopt::socket_peercred;
use tracing::{debug, info, warn};

use account::Account;
pub(crate) use account::bans;
pub(crate) use change::Socket;
use keeping::Keeping;

use super::messages;
use crate::charges::Share;
use crate::faults;
use crate::spans;
use crate::spare;
use crate::timer::monotonic_now;
use crate::vhost::device::{Device, DeviceQueue};
use crate::vhost::features::{MTU_MIN, Offer};
use crate::vhost::listener::{Access, ListenError, Listener};
use crate::vhost::protocol::{self, Broken, Channel, Message};
use crate::vhost::ring::RingFault;
use crate::vhost::session::Session;
use crate::vhost::vring::Vring;
use crate::vhost::{Event, Source};
use crate::watchdog;

/// Queue pairs at most: the message that sets a kick descriptor has eight bits for a queue index.
pub const QUEUE_PAIRS_MAX: u16 = 128;
/// Messages handled per wake-up, so that one front-end cannot keep the worker to itself.
const MESSAGES_PER_TURN: usize = 64;
/// Connections accepted per wake-up: a front-end that connects all the time must not occupy the
/// worker.
const ACCEPTS_PER_TURN: usize = 16;

/// The configuration of a port.
#[derive(Clone, Debug)]
pub struct VhostUserConfig {
    /// For log lines.
    pub name: String,
    /// Where front-ends connect.
    pub socket: PathBuf,
    /// The users who may connect.
    pub access: Access,
    /// MAC to tell guests that ask us (UML, `virtio_user`). QEMU tells its guests the one of its
    /// own `mac=`.
    pub mac: Option<[u8; 6]>,
    /// Largest MTU to tell them, 68 to 65535 bytes. QEMU: `host_mtu=`.
    pub mtu: Option<u16>,
    /// Queue pairs, 1 to [`QUEUE_PAIRS_MAX`].
    pub queue_pairs: u16,
    /// Guest memory may be of files that can shrink (no F_SEAL_SHRINK).
    pub allow_unsealed_memory: bool,
    /// Bytes of guest memory that a front-end may share.
    pub memory_max: Option<u64>,
    /// This process may use only so much memory: warn of guest memory that is charged to it.
    pub memory_is_limited: bool,
}

/// Why a port could not be made.
#[derive(Debug, thiserror::Error)]
pub enum PortError {
    /// See the inner error.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// Choose another number.
    #[error("{0} queue pairs: 1 to {QUEUE_PAIRS_MAX} are possible")]
    QueuePairs(u16),
    /// Choose a larger one.
    #[error("an MTU of {0}: at least {MTU_MIN} is needed")]
    Mtu(u16),
}

/// Counters since the port was made.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct VhostUserStats {
    /// Front-ends that connected.
    pub connections: u64,
    /// Messages that were refused.
    pub refused: u64,
    /// Kicks from the driver.
    pub kicks: u64,
    /// Signals to the driver.
    pub signals: u64,
    /// Queues put out of use because their guest broke the rules.
    pub ring_faults: u64,
    /// Chains from the guest shorter than the virtio-net header, dropped.
    pub truncated: u64,
    /// Frames from the guest longer than the caller's buffer, dropped.
    pub too_big: u64,
    /// Times that memory of the front-end was not there, which took down the port.
    pub memory_faults: u64,
    /// Times that a descriptor of the front-end kept the worker waiting, which took down the port.
    pub blocked: u64,
}

/// One VM's port, with a network card behind it unless something else is said. See the module's
/// doc.
#[derive(Debug)]
pub struct VhostUserPort<D: Device = Offer> {
    name: String,
    socket: PathBuf,
    access: Access,
    /// `None`: another file is at its path.
    listener: Option<Listener>,
    offer: D,
    /// The offer for the next front-end.
    next_offer: D,
    connection: Option<(Channel, Session<D>)>,
    /// A message that waits; see [`Event::Leaving`].
    held: Option<Message>,
    keeping: Keeping,
    events: VecDeque<Event>,
    stats: VhostUserStats,
    /// The process of the last front-end.
    vmm: i32,
    /// Where the rings of the last front-end's first queue pair stopped.
    stopped_at: [u16; 2],
    allows_unsealed_memory: bool,
    memory_max: Option<u64>,
    memory_is_limited: bool,
    /// [`faults::count`] when this port was last looked at.
    faults_seen: u64,
    /// Chains and buffers of the guest that were looked at in this turn, of all pairs.
    work_from_guest: usize,
    account: Account,
}

impl<D: Device> VhostUserPort<D> {
    /// Of this device; does not listen yet.
    #[must_use]
    pub fn with(config: &VhostUserConfig, offer: D) -> Self {
        let account = Account::new(&config.name);
        account.owner.set_mapped_max(spans::port_max(config.memory_max));
        Self {
            name: config.name.clone(),
            socket: config.socket.clone(),
            access: config.access,
            listener: None,
            offer,
            next_offer: offer,
            connection: None,
            held: None,
            keeping: Keeping::default(),
            events: VecDeque::new(),
            stats: VhostUserStats::default(),
            vmm: 0,
            stopped_at: [0; 2],
            allows_unsealed_memory: config.allow_unsealed_memory,
            memory_max: config.memory_max,
            memory_is_limited: config.memory_is_limited,
            faults_seen: faults::count(),
            work_from_guest: 0,
            account,
        }
    }

    /// It is another device of the VM behind that port; no front-end has connected yet.
    pub fn belongs_to<E: Device>(&mut self, port: &VhostUserPort<E>) {
        self.account = port.account.beside();
        self.account.owner.set_mapped_max(spans::port_max(self.memory_max));
    }

    /// Notifications that may take long are written by a thread of the VM's own from now on.
    pub(crate) fn writes_aside(&self) {
        self.account.slow.go_aside();
    }

    /// Makes the socket. If that fails [`Self::go_on`] is to be called after a while.
    /// Errors: see [`ListenError`].
    pub fn listen(&mut self) -> Result<(), ListenError> {
        let listener = Listener::bind(&self.socket, self.access).inspect_err(|_| {
            self.events.push_back(Event::Rest(Source::Listener));
        })?;
        self.listener = Some(listener);
        self.events.push_back(Event::Watch(Source::Listener));
        Ok(())
    }

    /// A source has rested (see [`Event::Rest`]).
    pub fn go_on(&mut self, source: Source) {
        if source != Source::Listener {
            if self.fd(source).is_some() {
                self.events.push_back(Event::Watch(source));
            }
        } else if self.listener.is_some() {
            self.events.push_back(Event::Watch(Source::Listener));
        } else if self.listen().is_ok() {
            info!(port = self.name, "the path of the socket is free, and the socket is open now");
        }
    }

    /// Whether front-ends find its socket.
    #[must_use]
    pub const fn listens(&self) -> bool {
        self.listener.is_some()
    }

    /// Counters.
    #[must_use]
    pub const fn stats(&self) -> VhostUserStats {
        self.stats
    }

    /// The features that the driver accepts; `None` while there is none.
    #[must_use]
    pub fn link(&self) -> Option<PortFeatures> {
        self.connection.as_ref()?.1.link()
    }

    /// The virtio features that were negotiated; 0 while there is no driver.
    #[must_use]
    pub fn features(&self) -> u64 {
        self.connection.as_ref().map_or(0, |(_, session)| session.features())
    }

    /// The descriptor behind a source; `None` if it has none now.
    #[must_use]
    pub fn fd(&self, source: Source) -> Option<BorrowedFd<'_>> {
        match source {
            Source::Listener => Some(self.listener.as_ref()?.fd()),
            Source::Connection => Some(self.connection.as_ref()?.0.fd()),
            Source::Kick(vring) => self.connection.as_ref()?.1.kick_fd(vring),
        }
    }

    /// Whether it has a queue that must be polled; see [`Event::Poll`].
    #[must_use]
    pub fn is_polled(&self) -> bool {
        self.connection.as_ref().is_some_and(|(_, session)| session.is_polled())
    }

    /// Something waits at the listener. A second front-end is turned away as long as the first one
    /// is connected, and the next one waits for a second: QEMU connects again at once.
    pub fn handle_listener(&mut self) {
        let _part = self.account.part();
        if self.account.is_banned(monotonic_now()) {
            return self.events.push_back(Event::Rest(Source::Listener));
        }
        for _ in 0..ACCEPTS_PER_TURN {
            // A VM that was killed and started again may connect before its death was noticed. It
            // waits at the listener until its predecessor's connection has ended.
            if self.connection.as_ref().is_some_and(|(channel, _)| channel.has_hung_up()) {
                return self.disconnect("the front-end is gone and another one connects");
            }
            let Some(listener) = &self.listener else { return };
            if self.account.owner.is_behind() {
                return self.rest("descriptors or memory of earlier front-ends do not close");
            }
            let Some(shared) = spare::try_share() else { return };
            let accepted = listener.accept();
            drop(shared);
            let stream = match accepted {
                Ok(Some(stream)) => stream,
                Ok(None) => return,
                Err(error) => return self.rest(&error.to_string()),
            };
            if self.connection.is_some() {
                if self.account.may_log() {
                    warn!(port = self.name, "a second front-end was turned away");
                }
                drop(protocol::hang_up(stream, &self.account.owner));
                return self.events.push_back(Event::Rest(Source::Listener));
            }
            match self.connect(stream) {
                Ok(()) if self.account.may_log() => {
                    info!(port = self.name, peer = self.vmm, "a front-end connected");
                }
                Err(error) if self.account.may_log() => {
                    warn!(port = self.name, %error, "a front-end could not connect");
                }
                _ => {}
            }
            self.keep();
        }
    }

    /// Something waits on the connection.
    pub fn handle_connection(&mut self) {
        self.keeping.empty(&self.account.owner);
        self.obey();
        self.keep();
    }

    /// Obeys some of the messages that are there.
    fn obey(&mut self) {
        let _part = self.account.part();
        for _ in 0..MESSAGES_PER_TURN {
            let Some((channel, session)) = &mut self.connection else { return };
            let (link, logs) = (session.link(), session.logs());
            let (mut cost, mut is_alone) = (0, false);
            let held = self.held.take().map(|message| Ok(Some(message)));
            let may_leave = held.is_none();
            let Some(received) = held.or_else(|| receive(channel)) else { return };
            let outcome = match received {
                Ok(None) => return,
                Ok(Some(message)) if !message.fds.is_empty() && self.account.owner.is_behind() => {
                    Err(Broken::Behind)
                }
                Ok(Some(message)) if may_leave && session.leaves_by(&message) => {
                    self.held = Some(message);
                    return self.events.push_back(Event::Leaving);
                }
                Ok(Some(message)) => {
                    debug!(
                        target: "nightporterd::vhost", // as the documentation has it
                        port = self.name,
                        message = message.name(),
                        "vhost-user"
                    );
                    cost = messages::cost_of(&message);
                    is_alone = !message.fds.is_empty();
                    messages::answer(channel, session, message)
                }
                Err(broken) => Err(broken),
            };
            if session.link() != link || session.logs() != logs {
                cost += messages::COST_OF_LINK;
            }
            cost += session.take_work();
            while let Some(event) = session.poll_event() {
                self.stats.ring_faults += u64::from(matches!(event, Event::RingBroken { .. }));
                if matches!(event, Event::RingBroken { .. } | Event::Link(Some(_)))
                    && self.account.may_log()
                {
                    let limited = self.memory_is_limited;
                    report::report(&self.name, session, &event, limited, self.offer.mtu());
                }
                self.events.push_back(event);
            }
            match outcome {
                Ok(None) => {}
                Ok(Some(refusal)) => {
                    self.stats.refused += 1;
                    if self.account.may_log() {
                        warn!(port = self.name, refusal, "a vhost-user message was refused");
                    }
                    self.end_if(!may_leave);
                }
                Err(broken) => {
                    self.stats.refused += u64::from(matches!(broken, Broken::Refused { .. }));
                    self.disconnect(&broken.to_string());
                }
            }
            if cost > 0 {
                return self.spend(cost);
            }
            // A front-end can make its descriptors take long; the next message may come after a
            // turn.
            if is_alone {
                return;
            }
        }
    }

    /// A message was refused for which a VM has left.
    fn end_if(&mut self, has_left: bool) {
        if has_left {
            self.disconnect("its VM has left, and the message was refused");
        }
    }

    /// A message was costly: the next one is for the next turn, or, if there were too many lately,
    /// for a later time.
    fn spend(&mut self, cost: u32) {
        if self.account.pay(monotonic_now(), cost) && self.connection.is_some() {
            if self.account.may_log() {
                warn!(port = self.name, "it maps memory or changes its link too often, and waits");
            }
            self.events.push_back(Event::Rest(Source::Connection));
        }
    }

    /// Somewhere memory that a front-end gave us was not there, or a descriptor kept us waiting. If
    /// it was this one's, it goes.
    pub fn handle_faults(&mut self) {
        self.faults_seen = faults::count();
        let Some((_, session)) = &self.connection else { return };
        if session.has_faulted() {
            self.stats.memory_faults += 1;
            self.disconnect("memory that it shares is missing (SIGBUS)");
        } else if session.has_short_log() {
            self.disconnect("its log of written pages is shorter than its memory");
        } else if session.has_blocked() {
            let seconds = self.account.ban(monotonic_now());
            self.stats.blocked += 1;
            warn!(port = self.name, seconds, "the port takes no connections for this time");
            self.disconnect(
                "its eventfds kept the daemon waiting: without O_NONBLOCK, or with many waiters",
            );
        } else if self.account.is_banned(monotonic_now()) {
            self.disconnect("another device of the VM kept the daemon waiting");
        }
    }

    /// The number of the VM's account; see [`crate::sleeps`].
    pub(crate) const fn account(&self) -> u64 {
        self.account.number()
    }

    /// The worker had to sleep for so long until memory of the VM was there. If that was too much,
    /// the port goes, and with the next [`Self::handle_faults`] the VM's other device.
    pub(crate) fn handle_sleep(&mut self, now: Instant, time: Duration) {
        if self.account.has_slept(now, time) {
            let seconds = self.account.ban(now);
            self.stats.blocked += 1;
            watchdog::beware();
            warn!(port = self.name, seconds, "the port takes no connections for this time");
            self.disconnect(
                "its memory kept the daemon waiting: holes were punched in it repeatedly",
            );
        }
    }

    /// Whether memory of the front-end was missing since the last [`Self::handle_faults`]: data
    /// that was read since then may be zeros.
    #[must_use]
    pub fn has_new_fault(&self) -> bool {
        let session = self.connection.as_ref().map(|(_, session)| session);
        faults::count() != self.faults_seen && session.is_some_and(|s| s.has_faulted())
    }

    /// The driver kicked.
    pub fn handle_kick(&mut self, vring: u16) {
        let Some((_, session)) = &mut self.connection else { return };
        session.handle_kick(vring);
        self.stats.kicks += 1;
        self.events.extend(std::iter::from_fn(|| session.poll_event()));
    }

    /// The events, in order.
    #[must_use]
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// The process of the front-end, as the kernel names it; 0: unknown.
    pub(crate) const fn vmm(&self) -> i32 {
        self.vmm
    }

    /// Whether the guest is the last front-end's, as that one left it: the rings of the first queue
    /// pair begin where they stopped. In memory that is new, as after a boot, they begin at 0. Of
    /// the first front-end after a restart that is all that is known.
    pub(crate) fn has_same_guest(&self) -> bool {
        let Some((_, session)) = &self.connection else { return false };
        let began_at = session.began_at();
        let is_known = self.stopped_at != [0; 2];
        if is_known { began_at == self.stopped_at } else { !began_at.contains(&0) }
    }

    /// Whether a driver began on rings that ran elsewhere before: its guest did not boot here.
    pub(crate) fn has_arrived(&self) -> bool {
        let began_at = self.connection.as_ref().map(|(_, session)| session.began_at());
        began_at.is_some_and(|began_at| began_at != [0; 2])
    }

    /// Whether there may be one more line about this port; see [`Limit`].
    pub(crate) fn may_log(&mut self) -> bool {
        self.account.may_log()
    }

    fn connect(&mut self, stream: UnixStream) -> std::io::Result<()> {
        let peer = socket_peercred(&stream).map_or(0, |cred| cred.pid.as_raw_nonzero().get());
        let channel = Channel::new(stream, self.account.owner.clone())?;
        self.offer = self.next_offer;
        let session = Session::new(self.offer, self.allows_unsealed_memory);
        let session = session.charged_to(&self.account.slow);
        let session = session.sharing(Share::new(self.memory_max, &self.account.left));
        self.connection = Some((channel, session));
        self.stats.connections += 1;
        self.vmm = peer;
        self.events.push_back(Event::Connected);
        self.events.push_back(Event::Watch(Source::Connection));
        Ok(())
    }

    /// Takes no connections for a while.
    fn rest(&mut self, reason: &str) {
        if self.account.may_log() {
            warn!(port = self.name, reason, "the port takes no connections for a second");
        }
        self.events.push_back(Event::Rest(Source::Listener));
    }

    fn disconnect(&mut self, reason: &str) {
        let Some((channel, session)) = self.connection.take() else { return };
        self.keeping.empty(&self.account.owner);
        if self.account.may_log() {
            info!(port = self.name, reason, "the front-end disconnected");
        }
        self.held = None;
        let logged = session.logs();
        let (events, stopped_at) = session.close();
        if stopped_at != [0; 2] {
            self.stopped_at = stopped_at; // who had no rings says nothing of the guest
        }
        self.events.extend(events);
        self.events.push_back(Event::Unwatch(channel.into_fd()));
        self.events.push_back(Event::Disconnected(reason.to_owned()));
        if logged {
            self.events.push_back(Event::Logs(false)); // the guest is not there to be spoken for
        }
    }

    fn flush(&mut self, vring: usize) {
        let _part = self.account.part();
        let Some((_, session)) = &mut self.connection else { return };
        if session.vrings.get_mut(vring).is_some_and(Vring::flush) {
            self.stats.signals += 1;
        }
    }

    fn enable_kicks(&mut self, vring: usize) -> bool {
        let _part = self.account.part();
        let Some((_, session)) = &mut self.connection else { return false };
        let Some(queue) = session.vrings.get_mut(vring).and_then(Vring::usable) else {
            return false;
        };
        queue.ring().enable_kicks().unwrap_or_else(|fault| {
            self.fail(vring, fault);
            false
        })
    }

    fn disable_kicks(&mut self, vring: usize) {
        let _part = self.account.part();
        let Some((_, session)) = &mut self.connection else { return };
        if let Some(queue) = session.vrings.get_mut(vring).and_then(Vring::usable) {
            queue.ring().disable_kicks();
        }
    }

    /// The ring lies; or memory has gone, and zeros are read since then, also in rings: then the
    /// port goes after this turn, and not for a lie.
    #[cold]
    fn fail(&mut self, index: usize, fault: RingFault) {
        if self.has_new_fault() {
            return;
        }
        let vring = u16::try_from(index).expect("at most 256 queues");
        let Some((_, session)) = &mut self.connection else { return };
        session.fail(vring, fault);
        self.stats.ring_faults += 1;
        if self.account.may_log() {
            warn!(port = self.name, vring, %fault, "a queue is out of use");
        }
        self.events.extend(std::iter::from_fn(|| session.poll_event()));
        faults::raise(); // in the middle of a turn: the worker looks when it is over
    }
}

/// The next message; `None` while an operator needs a descriptor.
fn receive(channel: &mut Channel) -> Option<Result<Option<Message>, Broken>> {
    let _shared = spare::try_share()?;
    Some(channel.receive())
}
