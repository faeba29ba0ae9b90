//! The way between hosts: streams of TCP, one for each connection of two guests, that are used
//! again when it is over.
//!
//! - `stream` is one of them: messages and payload, in and out; `heard` is what it may have.
//! - `beside` is UCX, if payload goes by that.
//! - `counts` says who may have one more.
//! - `encrypted` is how streams begin that go by TLS.
//! - `pipe` is what bytes go through: a socket, or TLS over it.
//! - `progress` says whether what waits in a stream is taken fast enough.
//! - `peers` is who may speak for whom, as the registry says.
//! - `reader` is a stream for the fuzzer.
//! - Here are all streams of this host: how they come, by [`Dialer`] and by listeners, those that
//!   are idle, and when one has waited long enough.
//!
//! A stream is watched for edges, once and for all: what it has is read until there is no more, or
//! until its guest has no room, and then it stays where it is, in the kernel's buffer.

mod arrival;
mod counts;
mod encrypted;
mod peers;
pub(super) mod pipe;
mod progress;
mod reader;
mod stream;
mod ways;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use nightporter_api::FabricStatus;
use nightporter_core::limits::{T_TOE_SILENCE, TOE_KEPT_MAX};
use nightporter_core::time::{Duration, Instant};
use nightporter_core::toe::id::{HostId, ShadowId, Side};
use nightporter_core::toe::sockets::SocketId;
use nix::sys::epoll::{Epoll, EpollEvent, EpollFlags};
use nix::sys::resource::{Resource, getrlimit};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketFlags, SocketType, acceptfrom_with, bind, ipproto, listen, socket_with,
    sockopt,
};

use crate::broker::dialer::{Dialer, Undialed, prepare};
pub(super) use crate::limits::STREAMS_MAX;
use crate::port::vhost_user::VhostUserPort;
use crate::sockets::batch::Batch;
use crate::sockets::trust::{ProofDoors, Trust, Way};
use crate::sockets::ucx::{Ucx, Worker};
use crate::token::Token;
use crate::vhost::vsock::Vsock;
pub use arrival::Heard;
pub(super) use arrival::{Lost, Waits};
use counts::Counts;
use encrypted::Handshakes;
pub(super) use peers::{Gone, Peers};
pub use reader::{SealedReader, StreamReader};
pub(super) use stream::Stream;

/// Idle streams to a host that are kept for the next connections.
const IDLE_MAX: usize = 64;
/// And so long.
const T_IDLE: Duration = Duration::from_secs(60);
/// A host that has not said hello after this is not going to: a program waits for it. A SYN that is
/// lost is repeated after 1 s.
const T_DIAL: Duration = Duration::from_secs(2);
/// A host that connects says hello within this, and one that is to hear of a reset takes it.
const T_HELLO: Duration = Duration::from_secs(10);
/// Nothing comes for so long of a message that has begun: its host is gone, or means no good. The
/// core does not notice, for to it the message has come.
const T_OWED: Duration = T_TOE_SILENCE;
/// Streams without a connection that another host has begun are its to close, after [`T_IDLE`].
const T_IDLE_HERE: Duration = Duration::from_secs(150);
/// Bytes that wait in a stream without a connection, at most: answers to what is late.
const ANSWERS_MAX: usize = 4096;
/// Something is said about other hosts so often.
const T_SAY: Duration = Duration::from_secs(10);
/// Connections that the kernel keeps until they are accepted.
const BACKLOG: i32 = 1024;
/// Connections accepted in a turn.
const ACCEPTS_PER_TURN: usize = 64;

/// A way for payload between the memory of a guest of this host and another host: the stream of TCP
/// itself, or UCX beside it. All else that two hosts say is said in the stream, whatever way
/// payload takes.
pub(super) trait Fabric {
    /// Its next arrival. Payload is to be taken by [`Self::receive`] before there is more.
    fn poll(&mut self) -> Heard;

    /// Payload, as much as is there and fits into the first `room` bytes of the guest's next
    /// packets, which have so many; how many bytes.
    ///
    /// # Errors
    /// WouldBlock: there is none now. UnexpectedEof and others: the end. EFAULT is the guest's.
    fn receive(&mut self, port: &mut VhostUserPort<Vsock>, room: usize) -> io::Result<usize>;

    /// Says messages with payload behind them, that of the packets that the guest's queue keeps.
    ///
    /// # Errors
    /// It is at its end; or the guest's memory is not there, and it is of no use.
    fn carry(
        &mut self,
        now: Instant,
        batch: &Batch,
        port: &mut VhostUserPort<Vsock>,
    ) -> Result<(), Lost>;
}

/// Names a stream: its place, and how many had it before.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(in super::super) struct StreamId {
    place: u32,
    generation: u32,
}

impl StreamId {
    const fn tag(self) -> u64 {
        (self.generation as u64) << 32 | self.place as u64
    }

    /// The inverse of [`Self::tag`].
    fn of(tag: u64) -> Self {
        let narrow = |word: u64| u32::try_from(word & u64::from(u32::MAX)).expect("half of it");
        Self { place: narrow(tag), generation: narrow(tag >> 32) }
    }
}

#[derive(Debug, Default)]
struct Place {
    generation: u32,
    stream: Option<Box<Stream>>,
}

/// The parts at the start: the sockets that listen, with their addresses, and who connects.
#[derive(Debug)]
pub(crate) struct Doors {
    pub(crate) listeners: Vec<(IpAddr, OwnedFd)>,
    /// `None`: streams are encrypted.
    pub(crate) dialer: Option<Dialer>,
    /// The way of encrypted streams.
    pub(crate) proof: Option<ProofDoors>,
    /// By what payload goes, if not by TCP.
    pub(crate) ucx: Option<Worker>,
}

/// See the module's doc.
#[derive(Debug, Default)]
pub(super) struct Streams {
    listeners: Vec<(IpAddr, OwnedFd)>,
    dialer: Option<Dialer>,
    /// `None`: streams are not encrypted, and hosts are known by their addresses alone.
    trust: Option<Trust>,
    /// `None`: payload goes by TCP.
    ucx: Option<Ucx>,
    /// Bytes that it has brought and that are not with their guests.
    ucx_waits: Arc<AtomicUsize>,
    /// New ones that wait for their handshake.
    handshakes: Handshakes,
    /// Streams that are encrypted.
    encrypted: u64,
    /// Nobody begins any more that are.
    is_shut: bool,
    /// When something was said about who is not believed.
    said: Option<Instant>,
    /// When it was said that this host cannot connect.
    said_failed: Option<Instant>,
    counts: Counts,
    places: Vec<Place>,
    free: Vec<u32>,
    by_socket: BTreeMap<SocketId, StreamId>,
    /// By the guest of the other host: its network and address.
    by_guest: BTreeSet<(HostId, (u32, IpAddr), StreamId)>,
    /// To each host, from each address of this one.
    idle: BTreeMap<(IpAddr, HostId), Vec<StreamId>>,
    ready: VecDeque<StreamId>,
    deadlines: BTreeSet<(Instant, StreamId)>,
    pub(super) stats: FabricStatus,
}

/// A socket that listens at this address, which may come later than the daemon.
pub(crate) fn listen_at(address: SocketAddr) -> io::Result<OwnedFd> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(family, SocketType::STREAM, flags, Some(ipproto::TCP))?;
    sockopt::set_socket_reuseaddr(&socket, true)?;
    match address {
        SocketAddr::V4(_) => sockopt::set_ip_freebind(&socket, true)?,
        SocketAddr::V6(_) => sockopt::set_ipv6_freebind(&socket, true)?,
    }
    prepare(&socket)?;
    bind(&socket, &address)?;
    listen(&socket, BACKLOG)?;
    Ok(socket)
}

fn watch(epoll: &Epoll, fd: impl AsFd, place: u32) -> io::Result<()> {
    let edges = EpollFlags::EPOLLIN | EpollFlags::EPOLLOUT | EpollFlags::EPOLLET;
    Ok(epoll.add(fd, EpollEvent::new(edges, Token::Stream(place).pack()))?)
}

impl Streams {
    /// The doors are open from now on.
    ///
    /// # Errors
    /// The system's.
    pub(super) fn open_doors(&mut self, doors: Doors) -> io::Result<()> {
        self.trust = doors.proof.map(Trust::start).transpose()?;
        self.ucx = doors.ucx.map(Ucx::new);
        let files = getrlimit(Resource::RLIMIT_NOFILE).map_or(1024, |(soft, _)| soft);
        self.counts.set_most(usize::try_from(files / 2).unwrap_or(STREAMS_MAX).min(STREAMS_MAX));
        self.listeners = doors.listeners;
        self.dialer = doors.dialer;
        Ok(())
    }

    /// Whether connections can be made to other hosts.
    pub(super) fn is_open(&self) -> bool {
        self.dialer.is_some() || self.encrypts() && !self.is_shut
    }

    /// Whether there was ever a way to other hosts: what has begun goes on without [`Dialer`].
    pub(super) const fn was_opened(&self) -> bool {
        self.counts.most() > 0
    }

    /// Whether a stream has more waiting than anybody honest makes it have.
    pub(super) fn is_overfull(&self, id: StreamId) -> bool {
        let most = |stream: &Stream| match stream.carried {
            Some(_) => TOE_KEPT_MAX,
            None => ANSWERS_MAX,
        };
        self.get(id).is_some_and(|stream| !stream.closes && stream.waiting() > most(stream))
    }

    /// It has been heard: when somebody looks whether the rest of a message has come.
    pub(super) fn note_owed(&mut self, now: Instant, id: StreamId) {
        let Some(stream) = self.get(id).filter(|it| it.is_proven) else { return };
        match (stream.is_owed(), stream.deadline) {
            (true, _) => self.set_deadline(id, Some(now + T_OWED)),
            (false, Some(_)) if stream.carried.is_some() => self.set_deadline(id, None),
            (false, _) => {}
        }
    }

    /// It is served again in the next turn, if no event says when.
    pub(super) fn flush_again(&mut self, id: StreamId) {
        if self.get_mut(id).is_some_and(Stream::take_more) {
            self.wake(id);
        }
    }

    /// Sockets that listen.
    pub(super) fn listeners(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.listeners.iter().map(|(_, fd)| fd.as_fd())
    }

    /// Readable when a connection has begun.
    pub(super) fn dialer_fd(&self) -> Option<BorrowedFd<'_>> {
        self.dialer.as_ref().map(Dialer::fd)
    }

    /// An operator's view.
    pub(super) fn status(&self) -> Option<FabricStatus> {
        let streams = self.counts.all() as u64;
        let idle = self.idle.values().map(|list| list.len() as u64).sum();
        let unproven = self.stats.unproven + self.trust.as_ref().map_or(0, Trust::refused);
        let (endpoints, waiting) = (self.ends_of_ucx(), self.waits_by_ucx());
        let of_ucx =
            FabricStatus { ucx_endpoints: endpoints, ucx_waiting_bytes: waiting, ..self.stats };
        let encrypted = self.encrypted;
        self.was_opened().then_some(FabricStatus { streams, idle, encrypted, unproven, ..of_ucx })
    }

    pub(super) fn get(&self, id: StreamId) -> Option<&Stream> {
        let place = self.places.get(id.place as usize)?;
        place.stream.as_deref().filter(|_| place.generation == id.generation)
    }

    pub(super) fn get_mut(&mut self, id: StreamId) -> Option<&mut Stream> {
        let place = self.places.get_mut(id.place as usize)?;
        place.stream.as_deref_mut().filter(|_| place.generation == id.generation)
    }

    /// The stream that a socket's connection has.
    pub(super) fn of(&self, socket: SocketId) -> Option<StreamId> {
        self.by_socket.get(&socket).copied()
    }

    /// Streams that are used for connections of that host's guest.
    pub(super) fn of_guest(&self, host: HostId, guest: (u32, IpAddr)) -> Vec<StreamId> {
        let place = |place| StreamId { place, generation: place };
        let all = (host, guest, place(0))..=(host, guest, place(u32::MAX));
        self.by_guest.range(all).map(|(_, _, id)| *id).collect()
    }

    /// Streams that are used for guests with this device and have taken too little since then.
    pub(super) fn stuck(&self, device: usize, since: Instant) -> Vec<StreamId> {
        let all = self.places.iter().zip(0..).filter_map(|(place, at)| {
            let stream = place.stream.as_deref()?;
            let is_its = stream.carried.is_some_and(|it| it.device == device);
            (is_its && stream.is_stuck(since))
                .then_some(StreamId { place: at, generation: place.generation })
        });
        all.collect()
    }

    /// For so long nobody was served, and no stream was asked to take anything.
    pub(super) fn forgive(&mut self, pause: Duration) {
        let all = self.places.iter_mut().filter_map(|place| place.stream.as_deref_mut());
        all.for_each(|stream| stream.progress.forgive(pause));
    }

    fn insert(&mut self, stream: Stream) -> StreamId {
        let place = self.free.pop().unwrap_or_else(|| {
            self.places.push(Place::default());
            u32::try_from(self.places.len() - 1).expect("they are bounded")
        });
        self.counts.begin(stream.host, stream.ours == Side::Opener);
        let at = &mut self.places[place as usize];
        at.generation = at.generation.wrapping_add(1);
        let id = StreamId { place, generation: at.generation };
        at.stream = Some(Box::new(stream));
        id
    }

    /// A stream for a connection of the guest with this device, from this address to that host: an
    /// idle one, or a new one. `None`: the guest has as many as it may.
    pub(super) fn take(
        &mut self,
        now: Instant,
        (device, from): (usize, IpAddr),
        (host, address): (HostId, IpAddr),
    ) -> Option<StreamId> {
        if let Some(id) = self.idle.get_mut(&(from, host)).and_then(Vec::pop) {
            self.set_deadline(id, None);
            self.stats.reused += 1;
            return Some(id);
        }
        let may_begin = self.counts.may_go_to(host, device) && self.may_begin(host, device);
        if !self.is_open() || !may_begin {
            return None;
        }
        let id = self.insert(Stream::to(now, host, from));
        self.note_begun(id, host, device);
        self.introduce(id);
        self.set_deadline(id, Some(now + T_DIAL));
        let way = Way { own: from, peer: address };
        if let Some(trust) = &mut self.trust {
            trust.open(way, id.tag());
            self.stats.dialed += 1;
        } else if let Some(dialer) = &mut self.dialer {
            // Without it the stream ends when it has waited long enough.
            dialer.ask(id.tag(), way.own, way.peer);
            self.stats.dialed += 1;
        }
        Some(id)
    }

    /// A stream has this connection from now on, of a guest with this device and that one of the
    /// other host.
    pub(super) fn give(
        &mut self,
        id: StreamId,
        name: ShadowId,
        (socket, device): (SocketId, usize),
        guest: (u32, IpAddr),
    ) {
        let Some(stream) = self.get_mut(id) else { return };
        stream.set_carried(name, (socket, device), guest);
        let host = stream.host;
        let is_ours = stream.ours == Side::Opener;
        let is_new = !stream.is_proven && is_ours;
        if is_ours {
            self.counts.give(host, device);
        }
        self.by_socket.insert(socket, id);
        self.by_guest.insert((host, guest, id));
        if !is_new {
            self.set_deadline(id, None);
        }
    }

    /// Its connection is over, or was refused: it is there for the next. `false`: it is not needed
    /// any more.
    pub(super) fn give_back(&mut self, now: Instant, id: StreamId) -> bool {
        self.part(id);
        let Some(stream) = self.get(id) else { return true };
        if stream.ours == Side::Acceptor {
            self.set_deadline(id, Some(now + T_IDLE_HERE));
            return true; // the other host says when
        }
        let idle = self.idle.entry((stream.own, stream.host)).or_default();
        if idle.contains(&id) {
            return true; // or two connections would have it
        }
        if idle.len() >= IDLE_MAX {
            return false;
        }
        idle.push(id);
        self.set_deadline(id, Some(now + T_IDLE));
        true
    }

    /// It is to end when all is said, or at once if that is much: its end is a reset as well.
    /// `true`: at once.
    pub(super) fn retire(&mut self, now: Instant, id: StreamId) -> bool {
        self.part(id);
        if let Some(stream) = self.get_mut(id) {
            if !stream.is_proven || stream.waiting() > ANSWERS_MAX {
                return true;
            }
            stream.closes = true;
            self.set_deadline(id, Some(now + T_HELLO));
            self.wake(id);
        }
        false
    }

    fn part(&mut self, id: StreamId) {
        let Some(stream) = self.get_mut(id) else { return };
        let (host, is_ours) = (stream.host, stream.ours == Side::Opener);
        if let Some(carried) = stream.carried.take() {
            self.by_socket.remove(&carried.socket);
            self.by_guest.remove(&(host, carried.guest, id));
            if is_ours {
                self.counts.take_back(host, carried.device);
            }
        }
    }

    /// It is no more; as it was.
    pub(super) fn remove(&mut self, id: StreamId) -> Option<Stream> {
        let carried = self.get(id)?.carried;
        self.set_deadline(id, None);
        self.part(id);
        let mut stream = *self.places[id.place as usize].stream.take()?;
        stream.carried = carried;
        self.free.push(id.place);
        self.encrypted -= u64::from(stream.is_sealed());
        self.leave_worker(&stream);
        self.counts.end(stream.host, stream.ours == Side::Opener);
        if let Some(idle) = self.idle.get_mut(&(stream.own, stream.host)) {
            idle.retain(|known| *known != id);
        }
        Some(stream)
    }

    /// There may be something to do for it.
    pub(super) fn wake(&mut self, id: StreamId) {
        if let Some(stream) = self.get_mut(id)
            && !std::mem::replace(&mut stream.is_ready, true)
        {
            self.ready.push_back(id);
        }
    }

    /// Likewise, by its place.
    pub(super) fn wake_place(&mut self, place: u32) {
        if let Some(at) = self.places.get(place as usize) {
            self.wake(StreamId { place, generation: at.generation });
        }
    }

    /// How many are to be served.
    pub(super) fn ready(&self) -> usize {
        self.ready.len()
    }

    /// The next of them.
    pub(super) fn pop_ready(&mut self) -> Option<StreamId> {
        let id = self.ready.pop_front()?;
        if let Some(stream) = self.get_mut(id) {
            stream.is_ready = false;
        }
        Some(id)
    }

    /// When somebody looks at it; it has one such time.
    fn set_deadline(&mut self, id: StreamId, at: Option<Instant>) {
        let Some(stream) = self.get_mut(id) else { return };
        if let Some(before) = std::mem::replace(&mut stream.deadline, at) {
            self.deadlines.remove(&(before, id));
        }
        self.deadlines.extend(at.map(|at| (at, id)));
    }

    /// When the next has waited long enough.
    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        self.deadlines.first().map(|(at, _)| *at)
    }

    /// One that has.
    pub(super) fn pop_due(&mut self, now: Instant) -> Option<StreamId> {
        let (at, id) = *self.deadlines.first()?;
        if at > now {
            return None;
        }
        self.set_deadline(id, None);
        Some(id)
    }

    /// Connections that other hosts have made. Strangers are hung up on.
    ///
    /// # Errors
    /// There is no descriptor for another one.
    pub(super) fn accept(
        &mut self,
        now: Instant,
        epoll: &Epoll,
        listener: u16,
        peers: &Peers,
    ) -> io::Result<()> {
        for _ in 0..ACCEPTS_PER_TURN {
            let Some((own, listener)) = self.listeners.get(usize::from(listener)) else {
                return Ok(());
            };
            let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
            let (socket, from) = match acceptfrom_with(listener, flags) {
                Ok((socket, from)) => (socket, from),
                Err(Errno::AGAIN) => return Ok(()),
                Err(e @ (Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM)) => {
                    return Err(e.into());
                }
                Err(_) => continue, // it has gone already (accept(2))
            };
            let from = from.and_then(|from| SocketAddr::try_from(from).ok());
            let host = from.and_then(|from| peers.host_at(from.ip()));
            if let Some(from) = from.filter(|_| host.is_some() && self.encrypts()) {
                self.refuse_plain(now, from.ip());
                continue;
            }
            let Some(host) = host.filter(|host| self.counts.may_come_from(*host)) else {
                self.stats.refused += 1;
                continue;
            };
            let id = self.insert(Stream::from(now, (host, *own), socket));
            self.stats.accepted += 1;
            self.introduce(id);
            self.set_deadline(id, Some(now + T_HELLO));
            let fd = self.get(id).and_then(Stream::fd).expect("it has one");
            if watch(epoll, fd, id.place).is_err() {
                self.remove(id);
            }
        }
        Ok(())
    }

    /// Connections that have begun, and that cannot be: those are named.
    ///
    /// # Errors
    /// Nobody makes any more.
    pub(super) fn take_dialed(&mut self, now: Instant, epoll: &Epoll) -> io::Result<Vec<StreamId>> {
        let mut failed = Vec::new();
        while let Some(dialer) = &mut self.dialer {
            let Some((tag, socket)) = dialer.poll()? else { break };
            let id = StreamId::of(tag);
            let Some(stream) = self.get_mut(id).filter(|stream| !stream.has_pipe()) else {
                continue; // nobody waits for it any more
            };
            let watched = socket.and_then(|socket| match watch(epoll, &socket, id.place) {
                Ok(()) => Ok(socket),
                Err(e) => Err(Undialed::Here(e)),
            });
            match watched {
                Ok(socket) => {
                    stream.set_pipe(socket);
                    self.wake(id);
                }
                Err(Undialed::There) => failed.push(id),
                Err(Undialed::Here(error)) => {
                    stream.has_failed_here = true;
                    failed.push(id);
                    if self.said_failed.is_none_or(|at| now.since(at) >= T_SAY) {
                        self.said_failed = Some(now);
                        tracing::warn!(
                            %error,
                            "toe: this host cannot connect to another one: its guests use guest TCP"
                        );
                    }
                }
            }
        }
        Ok(failed)
    }

    /// Nobody makes connections any more. Those that wait for theirs.
    pub(super) fn lose_dialer(&mut self, epoll: &Epoll) -> Vec<StreamId> {
        if let Some(dialer) = self.dialer.take() {
            // Another process has a copy of its descriptor, so closing it is not enough.
            let _ = epoll.delete(dialer.fd());
        }
        self.without_pipe()
    }
}

#[cfg(test)]
mod tests {
    use nightporter_core::toe::message::{Kind, Message};

    use super::pipe::Pipe;
    use super::pipe::tests::{sealed, sockets};
    use super::*;

    const NOW: Instant = Instant::from_secs(1000);
    const HERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1));

    /// A pipe, and what its bytes come out of.
    fn pipe(is_sealed: bool) -> (Pipe, OwnedFd) {
        let (ours, theirs) = sockets();
        if !is_sealed {
            return (ours.into(), theirs);
        }
        let (pipe, other) = sealed((ours, theirs));
        (pipe, other.socket.into())
    }

    /// A stream that another host has begun, and that host's end of it.
    fn stream(streams: &mut Streams) -> (StreamId, OwnedFd) {
        stream_by(streams, false)
    }

    fn stream_by(streams: &mut Streams, is_sealed: bool) -> (StreamId, OwnedFd) {
        let (a, b) = pipe(is_sealed);
        let id = streams.insert(Stream::from(NOW, (HostId(1), HERE), a));
        (id, b)
    }

    fn message(kind: Kind) -> Message {
        let id = ShadowId { incarnation: 7, serial: 7 };
        Message { id, to: Side::Acceptor, kind }
    }

    #[test]
    fn what_is_written_is_not_kept_while_there_is_always_more() {
        for is_sealed in [false, true] {
            let mut streams = Streams::default();
            let (id, other) = stream_by(&mut streams, is_sealed);
            let credit = message(Kind::Credit { edge: 1 });
            let stream = streams.get_mut(id).unwrap();
            let (mut took, mut said) = (0, 0);
            while said < 1_000_000 {
                while stream.waiting() < 100_000 {
                    stream.say(NOW, &credit, None).unwrap();
                    said += 1;
                }
                took += rustix::io::read(&other, &mut [0; 65536]).unwrap();
                stream.flush(NOW).unwrap();
                assert!(stream.kept_len() < 1 << 20, "{} of {said} messages", stream.kept_len());
            }
            assert!(took > 30 << 20, "{took}");
        }
    }

    #[test]
    fn a_host_that_takes_a_little_now_and_then_is_stuck_and_one_that_takes_a_quarter_is_not() {
        for (bytes, is_stuck, is_sealed) in [
            (8_000, true, false),
            (300_000, false, false),
            (8_000, true, true),
            (300_000, false, true),
        ] {
            let (ours, theirs) = pipe(is_sealed);
            let mut stream = Stream::to(NOW, HostId(1), HERE);
            while stream.waiting() < 1 << 20 {
                stream.say(NOW, &message(Kind::Credit { edge: 1 }), None).unwrap();
            }
            stream.set_pipe(ours);
            let mut now = NOW;
            while stream.waiting() > 0 && !stream.is_stuck(now - Duration::from_secs(5)) {
                now = now + Duration::from_secs(3);
                let (mut taken, before) = (0, stream.waiting());
                stream.flush(now).unwrap();
                while (taken < bytes || stream.waiting() == before)
                    && let Ok(len) = rustix::io::read(&theirs, &mut [0; 4096])
                {
                    taken += len;
                    stream.flush(now).unwrap();
                }
                assert!(stream.waiting() < before);
            }
            assert_eq!(stream.waiting() > 1 << 19, is_stuck, "{} of 1 MiB", stream.waiting());
        }
    }

    #[test]
    fn what_waits_for_the_first_time_in_a_long_while_is_not_stuck_at_once() {
        for is_sealed in [false, true] {
            let mut streams = Streams::default();
            let (id, _other) = stream_by(&mut streams, is_sealed);
            let stream = streams.get_mut(id).unwrap();
            let later = NOW + Duration::from_secs(1000);
            while stream.waiting() == 0 {
                stream.say(later, &message(Kind::Credit { edge: 1 }), None).unwrap();
            }
            assert!(!stream.is_stuck(later - Duration::from_secs(5)), "{is_sealed}");
            assert!(stream.is_stuck(later), "{is_sealed}");
        }
    }

    #[test]
    fn a_message_that_has_begun_and_does_not_go_on_is_noticed() {
        let mut streams = Streams::default();
        let (id, other) = stream(&mut streams);
        let data = message(Kind::Data { offset: 0, len: 100 });
        let said = [&b"npvtoe\0\x01"[..], &[0; 32], &data.emit(), &[0; 10]].concat();
        rustix::io::write(&other, &said).unwrap();
        assert_eq!(streams.get_mut(id).unwrap().poll(), Heard::Hello);
        assert_eq!(streams.get_mut(id).unwrap().poll(), Heard::Message(data));
        streams.note_owed(NOW, id);
        assert_eq!(streams.poll_timeout(), Some(NOW + T_OWED));
        // Not if its guest has no place for it: then nothing is read.
        streams.get_mut(id).unwrap().waits = Some(Waits::Ring);
        assert!(!streams.get(id).unwrap().is_owed());
        streams.get_mut(id).unwrap().waits = None;
        assert_eq!(streams.pop_due(NOW + T_OWED), Some(id));
        assert!(streams.get(id).unwrap().is_owed());
    }

    #[test]
    fn an_idle_stream_is_there_for_one_connection_however_often_it_is_given_back() {
        let mut streams = Streams::default();
        let id = streams.insert(Stream::to(NOW, HostId(1), HERE));
        assert!(streams.give_back(NOW, id) && streams.give_back(NOW, id));
        let mut take = || streams.take(NOW, (0, HERE), (HostId(1), HERE));
        assert_eq!((take(), take()), (Some(id), None));
    }

    #[test]
    fn a_stream_ends_when_all_is_said_or_at_once_if_that_is_much_or_nobody_has_proven_it() {
        let mut streams = Streams::default();
        let id = streams.insert(Stream::to(NOW, HostId(1), HERE));
        assert!(streams.retire(NOW, id));
        streams.get_mut(id).unwrap().is_proven = true;
        assert!(!streams.retire(NOW, id));
        assert_eq!((streams.ready(), streams.poll_timeout()), (1, Some(NOW + T_HELLO)));
        let stream = streams.get_mut(id).unwrap();
        assert!(stream.closes);
        while stream.waiting() <= ANSWERS_MAX {
            stream.say(NOW, &message(Kind::Credit { edge: 1 }), None).unwrap();
        }
        assert!(!streams.is_overfull(id), "it ends anyway");
        assert!(streams.retire(NOW, id));
        streams.get_mut(id).unwrap().closes = false;
        assert!(streams.is_overfull(id));
    }

    #[test]
    fn a_stream_that_another_host_does_not_use_any_more_is_not_kept_for_ever() {
        let mut streams = Streams::default();
        let (id, _other) = stream(&mut streams);
        assert!(streams.give_back(NOW, id));
        assert_eq!(streams.poll_timeout(), Some(NOW + T_IDLE_HERE));
    }
}
