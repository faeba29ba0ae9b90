//! The thread that does handshakes: it shows other hosts the certificate of this one, and judges
//! theirs.
//!
//! A connection is the worker's as soon as both hosts have shown who they are. `streams` has the
//! handshakes that were begun here, and the bounds of all.

mod streams;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::SyncSender;

use nightporter_core::time::{Duration, Instant};
use nightporter_registry::mail::{Bell, Gone, Inbox};
use nightporter_registry::tls::Tls;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SocketFlags, acceptfrom_with};
use rustls::ServerConnection;

use super::conn::Conn;
use super::{Opening, ProofDoors, Way, Wish};
use crate::broker::dialer::Dialer;
use crate::config::proof::{Proof, is_of};
use crate::spare;
use crate::timer::monotonic_now;
use streams::{ACCEPTED, Handshakes, has_share};

/// A host that connects has shown what it has to show within this.
const T_SHOW: Duration = Duration::from_secs(5);
/// How often files are looked at.
const T_LOOK: Duration = Duration::from_secs(2);
/// The fault of a host is said so often.
const T_SAY: Duration = Duration::from_secs(60);
/// When there is no descriptor for another connection.
const T_REST: Duration = Duration::from_secs(1);
/// Connections accepted in a turn.
const ACCEPTS_PER_TURN: usize = 16;
/// Of what is wrong, at most, in characters.
const WHY_MAX: usize = 300;

/// A host that has connected and has not shown yet who it is.
struct Stranger {
    way: Way,
    conn: Conn,
    until: Instant,
    /// It has to wait until then.
    rests: Option<Instant>,
}

/// See the module's doc.
pub(super) struct Keeper {
    proof: Tls<Proof>,
    listeners: Vec<(IpAddr, OwnedFd)>,
    /// `None`: it has ended.
    dialer: Option<Dialer>,
    bell: Bell,
    wishes: Inbox<Wish>,
    worker: Bell,
    openings: SyncSender<Opening>,
    refused: Arc<AtomicU64>,
    /// Hosts with guests.
    peers: BTreeSet<IpAddr>,
    strangers: Vec<Stranger>,
    handshakes: Handshakes,
    /// When something was said about a way.
    said: BTreeMap<Way, Instant>,
    /// When files are looked at.
    look: Instant,
    /// There was no descriptor for another connection: none is accepted until then.
    accepts: Instant,
}

impl Keeper {
    pub(super) fn new(
        doors: ProofDoors,
        (bell, wishes): (Bell, Inbox<Wish>),
        (worker, openings): (Bell, SyncSender<Opening>),
        refused: Arc<AtomicU64>,
    ) -> Self {
        Self {
            proof: doors.files,
            listeners: doors.listeners,
            dialer: Some(doors.dialer),
            bell,
            wishes,
            worker,
            openings,
            refused,
            peers: BTreeSet::new(),
            strangers: Vec::new(),
            handshakes: Handshakes::default(),
            said: BTreeMap::new(),
            look: monotonic_now() + T_LOOK,
            accepts: Instant::ZERO,
        }
    }

    /// Until nobody wants it any more.
    pub(super) fn run(mut self) {
        while self.turn(monotonic_now()).is_ok() {
            self.wait();
        }
    }

    fn turn(&mut self, now: Instant) -> Result<(), Gone> {
        if self.look <= now {
            self.look = now + T_LOOK;
            self.look_at_files()?;
        }
        while let Some(wish) = self.wishes.take()? {
            self.handle_wish(now, wish)?;
        }
        self.take_dialed(now)?;
        self.shake_hands(now)?;
        self.begin_streams(now)?;
        self.accept(now);
        self.look_at_strangers(now)
    }

    /// Until there is something to do.
    fn wait(&mut self) {
        let now = monotonic_now();
        let rests = now < self.accepts;
        let listeners = self.listeners.iter().filter(|_| !rests).map(|(_, fd)| fd.as_fd());
        let doors = std::iter::once(self.bell.fd()).chain(listeners);
        let doors = doors.chain(self.dialer.as_ref().map(Dialer::fd));
        let mut fds: Vec<_> = doors.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        let first = fds.len();
        let begun = self.handshakes.begun.values().filter_map(|it| it.conn.as_ref());
        fds.extend(begun.map(Conn::polled));
        fds.extend(self.strangers.iter().filter_map(Stranger::polled));
        let strangers = self.strangers.iter().map(|it| it.rests.unwrap_or(it.until));
        let ends = self.handshakes.ends().chain(strangers);
        let due =
            ends.chain([self.look]).chain(rests.then_some(self.accepts)).min().unwrap_or(self.look);
        let left = std::time::Duration::from_nanos(due.since(now).as_nanos());
        // EINTR: there is nothing, then.
        let _ = poll(&mut fds, Timespec::try_from(left).ok().as_ref());
        let ready: Vec<_> = fds[first..].iter().map(|fd| !fd.revents().is_empty()).collect();
        let begun = self.handshakes.begun.values_mut().filter_map(|it| it.conn.as_mut());
        let strangers = self.strangers.iter_mut().filter(|it| it.is_watched());
        let all = begun.chain(strangers.map(|it| &mut it.conn));
        all.zip(ready).for_each(|(conn, is_ready)| conn.is_ready |= is_ready);
    }

    fn post(&self, opening: Opening) -> Result<(), Gone> {
        self.openings.send(opening).map_err(|_| Gone)?;
        self.worker.ring();
        Ok(())
    }

    /// Certificates that were renewed hold for all, from now on.
    fn look_at_files(&mut self) -> Result<(), Gone> {
        match self.proof.renew() {
            Ok(false) => return Ok(()),
            Err(e) => {
                tracing::warn!("toe: {e}; what was there before is used");
                return Ok(());
            }
            Ok(true) => tracing::info!("toe: certificates have changed"),
        }
        self.said.clear(); // what is wrong now is news
        self.strangers.clear();
        self.end_handshakes(None)
    }

    fn handle_wish(&mut self, now: Instant, wish: Wish) -> Result<(), Gone> {
        match wish {
            Wish::Peer(peer, true) => drop(self.peers.insert(peer)),
            Wish::Peer(peer, false) => {
                self.peers.remove(&peer);
                self.strangers.retain(|it| it.way.peer != peer);
                self.said.retain(|way, _| way.peer != peer);
                self.end_handshakes(Some(peer))?;
            }
            Wish::Stream(way, tag) => self.want_stream(now, way, tag)?,
        }
        Ok(())
    }

    fn take_dialed(&mut self, now: Instant) -> Result<(), Gone> {
        while let Some(dialer) = &mut self.dialer
            && let Some(_shared) = spare::try_share()
        {
            match dialer.poll() {
                Ok(Some((tag, socket))) => self.meet_stream(now, tag, socket)?,
                Ok(None) => break,
                Err(e) => {
                    tracing::error!(
                        "the process that connects to where hosts prove who they are has ended: \
                         {e}\n    fix: restart nightporterd"
                    );
                    self.dialer = None;
                    self.post(Opening::Shut)?;
                }
            }
        }
        Ok(())
    }

    /// Something is wrong with a host; said once in a while.
    fn say(&mut self, now: Instant, way: Way, what: &str, why: &str) {
        if self.said.get(&way).is_some_and(|at| now.since(*at) < T_SAY) {
            return;
        }
        self.said.insert(way, now);
        // A certificate's names are what somebody else has written.
        let why: String = why.chars().take(WHY_MAX).flat_map(char::escape_debug).collect();
        tracing::warn!(peer = %way.peer, "toe: {what}: {why}");
    }

    /// Hosts that connect.
    fn accept(&mut self, now: Instant) {
        if now < self.accepts {
            return;
        }
        let Some(_shared) = spare::try_share() else { return };
        let server = &self.proof.config().server;
        for (own, listener) in &self.listeners {
            for _ in 0..ACCEPTS_PER_TURN {
                let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
                let (socket, from) = match acceptfrom_with(listener, flags) {
                    Ok(accepted) => accepted,
                    Err(Errno::AGAIN) => break,
                    Err(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => {
                        self.accepts = now + T_REST;
                        return;
                    }
                    Err(_) => continue, // it has gone already (accept(2))
                };
                let from = from.and_then(|from| SocketAddr::try_from(from).ok());
                let peer = from.map(|from| from.ip().to_canonical());
                let peer = peer.filter(|peer| self.peers.contains(peer));
                let of_one =
                    |peer: &IpAddr| self.strangers.iter().filter(|it| it.way.peer == *peer).count();
                let has_room =
                    |peer: &IpAddr| has_share(of_one(peer), self.strangers.len(), ACCEPTED);
                let tls = ServerConnection::new(Arc::clone(server));
                let (Some(peer), Ok(tls)) = (peer.filter(has_room), tls) else {
                    self.refused.fetch_add(1, Ordering::Relaxed);
                    continue;
                };
                let (way, until) = (Way { own: *own, peer }, now + T_SHOW);
                let rests = self.handshakes.pace(now, peer);
                let conn = Conn::new(socket, tls.into());
                self.strangers.push(Stranger { way, conn, until, rests });
            }
        }
    }

    fn look_at_strangers(&mut self, now: Instant) -> Result<(), Gone> {
        for mut stranger in std::mem::take(&mut self.strangers) {
            match stranger.shows(now) {
                Ok(false) => self.strangers.push(stranger),
                Ok(true) => self.pass_on(stranger)?,
                Err(why) => {
                    self.say(now, stranger.way, "a host did not prove who it is", &why);
                    self.refused.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
        Ok(())
    }
}

impl Stranger {
    /// Whether something is done when its socket has something.
    const fn is_watched(&self) -> bool {
        self.rests.is_none()
    }

    /// The question for poll(2): nothing at all of one that rests, or it would tell all the time
    /// that the other host has hung up.
    fn polled(&self) -> Option<PollFd<'_>> {
        self.is_watched().then(|| self.conn.polled())
    }

    /// Whether it has shown that it is who is at its address. Errors: it is not.
    fn shows(&mut self, now: Instant) -> Result<bool, String> {
        if self.until <= now {
            return Err("it takes too long".into());
        }
        if self.rests.is_some_and(|until| until <= now) {
            (self.rests, self.conn.is_ready) = (None, true);
        }
        if self.conn.is_ready && self.rests.is_none() {
            self.conn.turn()?;
        }
        if !self.conn.is_open() {
            return Ok(false);
        }
        let certificate = self.conn.certificate().ok_or("it shows no certificate")?;
        if is_of(certificate, self.way.peer) {
            return Ok(true);
        }
        Err("its certificate is not for its address".into())
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;
    use crate::sockets::fabric::pipe::tests::{ends, sockets};

    #[test]
    fn who_hangs_up_while_it_rests_is_not_heard_before_it_has_rested() {
        let now = Instant::from_secs(1000);
        let [own, peer] = [1, 2].map(|n| IpAddr::from(Ipv4Addr::new(192, 0, 2, n)));
        let (ours, theirs) = sockets();
        let conn = Conn::new(ours, ends(Vec::new(), None).1);
        let (way, until) = (Way { own, peer }, now + T_SHOW);
        let mut stranger = Stranger { way, conn, until, rests: Some(now + T_REST) };
        drop(theirs);
        let ready = |stranger: &Stranger| {
            let mut fds: Vec<_> = stranger.polled().into_iter().collect();
            poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap()
        };
        stranger.conn.is_ready = false;
        assert_eq!((ready(&stranger), stranger.shows(now)), (0, Ok(false)));
        stranger.rests = None;
        assert_eq!(ready(&stranger), 1);
        stranger.rests = Some(now);
        assert_eq!(stranger.shows(now), Err("it hung up".to_owned()));
    }
}
