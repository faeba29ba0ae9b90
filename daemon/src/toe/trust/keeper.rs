//! The thread that proves to other hosts who this one is, looks at what they show, and tells and
//! hears tickets.
//!
//! Whoever asks, asks with a byte for so many tickets; whoever was connected to tells them, 64
//! bytes each. Nothing else is said. If streams go by TLS (`streams`), there are no tickets, and a
//! connection is the worker's as soon as both hosts have shown who they are.

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
use rustix::rand::{GetRandomFlags, getrandom};
use rustls::pki_types::ServerName;
use rustls::{ClientConnection, ServerConnection};

use super::conn::Conn;
use super::{News, Opening, ProofDoors, SECRET_LEN, Ticket, Way, Wish};
use crate::broker::dialer::{Dialer, Undialed};
use crate::config::proof::{Proof, is_of};
use crate::timer::monotonic_now;
use streams::{ACCEPTED, Handshakes, has_share};

/// A host that connects has shown what it has to show within this.
const T_SHOW: Duration = Duration::from_secs(5);
/// And one that is connected to has told a ticket: a program waits for it.
const T_TELL: Duration = Duration::from_secs(2);
/// A connection is proved anew after this: a certificate that has run out holds no longer.
const T_LIFE: Duration = Duration::from_secs(3600);
/// How often files are looked at.
const T_LOOK: Duration = Duration::from_secs(2);
/// What is wrong with a host is said so often.
const T_SAY: Duration = Duration::from_secs(60);
/// When there is no descriptor for another connection.
const T_REST: Duration = Duration::from_secs(1);
/// A host is told a ticket in such a time, on average: 5,000 in a second.
const T_TICKET: Duration = Duration::from_micros(200);
/// Connections each way, at most; of those who have not proved who they are, all and of one host.
const CONNS_MAX: usize = 1024;
const STRANGERS_MAX: usize = 64;
const STRANGERS_OF_ONE_MAX: usize = 2;
/// Connections accepted in a turn.
const ACCEPTS_PER_TURN: usize = 16;
/// Bytes of a ticket.
const TICKET_LEN: usize = 2 * SECRET_LEN;
/// Of what is wrong, at most, in characters.
const WHY_MAX: usize = 300;

/// To a host whose tickets this one wants.
struct Asking {
    /// `None`: it is being dialed.
    conn: Option<Conn>,
    /// The dialer's number for it.
    tag: u64,
    /// When it ends.
    until: Instant,
    coming: Coming,
    /// Some has been told.
    is_believed: bool,
}

/// Tickets that another host tells, in pieces of any length.
#[derive(Debug, Default)]
pub(super) struct Coming {
    /// Those that it has been asked for and has not told.
    pub(super) due: usize,
    /// The beginning of one.
    part: Vec<u8>,
}

/// From a host that may want tickets.
struct Telling {
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
    dialed: u64,
    bell: Bell,
    wishes: Inbox<Wish>,
    worker: Bell,
    news: SyncSender<News>,
    refused: Arc<AtomicU64>,
    /// Hosts with guests.
    peers: BTreeSet<IpAddr>,
    asking: BTreeMap<Way, Asking>,
    /// Tickets that were ever asked for.
    asked: BTreeMap<Way, u64>,
    /// And that the worker has wanted.
    wanted: BTreeMap<Way, u64>,
    strangers: Vec<Telling>,
    telling: BTreeMap<Way, Telling>,
    /// Of streams that go by TLS.
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
        (worker, news): (Bell, SyncSender<News>),
        refused: Arc<AtomicU64>,
    ) -> Self {
        Self {
            proof: doors.files,
            listeners: doors.listeners,
            dialer: Some(doors.dialer),
            dialed: 0,
            bell,
            wishes,
            worker,
            news,
            refused,
            peers: BTreeSet::new(),
            asking: BTreeMap::new(),
            asked: BTreeMap::new(),
            wanted: BTreeMap::new(),
            strangers: Vec::new(),
            telling: BTreeMap::new(),
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
        let asking: Vec<_> = self.asking.keys().copied().collect();
        for way in asking {
            if let Err(why) = self.hear_tickets(now, way)? {
                self.lose(now, way, &why)?;
            }
        }
        self.look_at_strangers(now)?;
        let telling: Vec<_> = self.telling.keys().copied().collect();
        for way in telling {
            if let Err(why) = self.tell_tickets(now, way)? {
                tracing::debug!(peer = %way.peer, why, "a host asks for no tickets any more");
                self.forget(way)?;
            }
        }
        Ok(())
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
        let asking = self.asking.values().filter_map(|it| it.conn.as_ref());
        let begun = self.handshakes.begun.values().filter_map(|it| it.conn.as_ref());
        fds.extend(asking.chain(begun).map(Conn::polled));
        let telling = self.strangers.iter().chain(self.telling.values());
        fds.extend(telling.filter_map(Telling::polled));
        let ends = self.asking.values().map(|it| it.until);
        let ends = ends.chain(self.handshakes.ends());
        let telling = self.strangers.iter().chain(self.telling.values());
        let ends = ends.chain(telling.map(|it| it.rests.unwrap_or(it.until)));
        let due =
            ends.chain([self.look]).chain(rests.then_some(self.accepts)).min().unwrap_or(self.look);
        let left = std::time::Duration::from_nanos(due.since(now).as_nanos());
        // EINTR: there is nothing, then.
        let _ = poll(&mut fds, Timespec::try_from(left).ok().as_ref());
        let ready: Vec<_> = fds[first..].iter().map(|fd| !fd.revents().is_empty()).collect();
        let asking = self.asking.values_mut().filter_map(|it| it.conn.as_mut());
        let begun = self.handshakes.begun.values_mut().filter_map(|it| it.conn.as_mut());
        let asking = asking.chain(begun);
        let telling = self.strangers.iter_mut().chain(self.telling.values_mut());
        let telling = telling.filter(|it| it.is_watched());
        let all = asking.chain(telling.map(|it| &mut it.conn));
        all.zip(ready).for_each(|(conn, is_ready)| conn.is_ready |= is_ready);
    }

    fn post(&self, news: News) -> Result<(), Gone> {
        self.news.send(news).map_err(|_| Gone)?;
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
        for way in self.telling.keys().copied().collect::<Vec<_>>() {
            self.forget(way)?;
        }
        for way in self.asking.keys().copied().collect::<Vec<_>>() {
            self.end(way)?;
        }
        self.end_handshakes(None)
    }

    fn handle_wish(&mut self, now: Instant, wish: Wish) -> Result<(), Gone> {
        match wish {
            Wish::Peer(peer, true) => drop(self.peers.insert(peer)),
            Wish::Peer(peer, false) => {
                self.peers.remove(&peer);
                self.strangers.retain(|it| it.way.peer != peer);
                let is_its = |way: &&Way| way.peer == peer;
                for way in self.telling.keys().filter(is_its).copied().collect::<Vec<_>>() {
                    self.forget(way)?;
                }
                for way in self.asking.keys().filter(is_its).copied().collect::<Vec<_>>() {
                    self.end(way)?;
                }
                self.said.retain(|way, _| way.peer != peer);
                self.end_handshakes(Some(peer))?;
            }
            Wish::Stream(way, tag) => self.want_stream(now, way, tag)?,
            Wish::Tickets(way, wanted) => {
                self.wanted.insert(way, wanted);
                if !self.asking.contains_key(&way) {
                    return self.dial(now, way);
                }
            }
        }
        Ok(())
    }

    fn dial(&mut self, now: Instant, way: Way) -> Result<(), Gone> {
        if self.asking.len() >= CONNS_MAX {
            return self.lose(now, way, "there are too many hosts");
        }
        let Some(dialer) = &mut self.dialer else {
            return self.lose(now, way, "nobody connects any more: restart nightporterd");
        };
        self.dialed += 1;
        dialer.ask(self.dialed, way.own, way.peer);
        let asking = Asking {
            conn: None,
            tag: self.dialed,
            until: now + T_TELL,
            coming: Coming::default(),
            is_believed: false,
        };
        self.asking.insert(way, asking);
        Ok(())
    }

    fn take_dialed(&mut self, now: Instant) -> Result<(), Gone> {
        while let Some(dialer) = &mut self.dialer {
            let (tag, socket) = match dialer.poll() {
                Ok(Some(dialed)) => dialed,
                Ok(None) => break,
                Err(e) => {
                    tracing::error!(
                        "the process that connects to where hosts prove who they are has ended: \
                         {e}\n    fix: restart nightporterd"
                    );
                    self.dialer = None;
                    if self.proof.config().encrypts() {
                        self.post(News::Opening(Opening::Shut))?;
                    }
                    break;
                }
            };
            if self.proof.config().encrypts() {
                self.meet_stream(now, tag, socket)?;
                continue;
            }
            let Some((way, asking)) = self.asking.iter_mut().find(|(_, it)| it.tag == tag) else {
                continue; // nobody waits for it any more
            };
            let way = *way;
            let socket = match socket {
                Ok(socket) => socket,
                Err(Undialed::There) => {
                    self.lose(now, way, "cannot connect to it")?;
                    continue;
                }
                Err(Undialed::Here(e)) => {
                    self.lose(now, way, &format!("this host cannot connect: {e}"))?;
                    continue;
                }
            };
            let proof = self.proof.config();
            match ClientConnection::new(Arc::clone(&proof.client), ServerName::from(way.peer)) {
                Ok(tls) => asking.conn = Some(Conn::new(socket, tls.into(), proof.protocol)),
                Err(e) => self.lose(now, way, &e.to_string())?,
            }
        }
        Ok(())
    }

    /// Tickets do not come any more.
    fn end(&mut self, way: Way) -> Result<(), Gone> {
        self.asking.remove(&way);
        self.asked.insert(way, self.wanted.get(&way).copied().unwrap_or(0));
        self.post(News::Lost(way))
    }

    /// Likewise, and an operator may want to know.
    fn lose(&mut self, now: Instant, way: Way, why: &str) -> Result<(), Gone> {
        let was_believed = self.asking.get(&way).is_some_and(|it| it.is_believed);
        if was_believed {
            tracing::debug!(peer = %way.peer, why, "a host tells no tickets any more");
        } else {
            self.say(now, way, "no tickets from a host: its guests are reached by guest TCP", why);
            self.refused.fetch_add(1, Ordering::Relaxed);
        }
        self.end(way)
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

    /// Asks for tickets, and passes on those that come. Errors: its end, and why.
    fn hear_tickets(&mut self, now: Instant, way: Way) -> Result<Result<(), String>, Gone> {
        let Some(asking) = self.asking.get_mut(&way) else { return Ok(Ok(())) };
        if asking.until <= now {
            return Ok(Err("it takes too long".into()));
        }
        let wanted = self.wanted.get(&way).copied().unwrap_or(0);
        let asked = self.asked.entry(way).or_default();
        let heard = asking.turn(wanted, asked);
        let tickets = match heard {
            Ok(tickets) if tickets.is_empty() => return Ok(Ok(())),
            Ok(tickets) => tickets,
            Err(why) => return Ok(Err(why)),
        };
        if !std::mem::replace(&mut asking.is_believed, true) {
            asking.until = now + T_LIFE;
            tracing::info!(peer = %way.peer, "toe: a host has proved who it is");
        }
        self.post(News::Came(way, tickets))?;
        Ok(Ok(()))
    }

    /// Hosts that connect.
    fn accept(&mut self, now: Instant) {
        if now < self.accepts {
            return;
        }
        let proof = self.proof.config();
        let encrypts = proof.encrypts();
        let most = if encrypts { ACCEPTED } else { (STRANGERS_OF_ONE_MAX, STRANGERS_MAX) };
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
                let has_room = |peer: &IpAddr| has_share(of_one(peer), self.strangers.len(), most);
                let server = ServerConnection::new(Arc::clone(&proof.server));
                let (Some(peer), Ok(tls)) = (peer.filter(has_room), server) else {
                    self.refused.fetch_add(1, Ordering::Relaxed);
                    continue;
                };
                let conn = Conn::new(socket, tls.into(), proof.protocol);
                let (way, until) = (Way { own: *own, peer }, now + T_SHOW);
                let rests = if encrypts { self.handshakes.pace(now, peer) } else { None };
                self.strangers.push(Telling { way, conn, until, rests });
            }
        }
    }

    fn look_at_strangers(&mut self, now: Instant) -> Result<(), Gone> {
        for mut stranger in std::mem::take(&mut self.strangers) {
            let way = stranger.way;
            match stranger.shows(now) {
                Ok(false) => self.strangers.push(stranger),
                Ok(true) if self.proof.config().encrypts() => self.pass_on(stranger)?,
                Ok(true) if self.telling.len() >= CONNS_MAX => {
                    self.refused.fetch_add(1, Ordering::Relaxed);
                }
                Ok(true) => {
                    // What it had before is from before it was started again.
                    self.post(News::Forget(way))?;
                    stranger.until = now + T_LIFE;
                    stranger.conn.is_ready = true;
                    self.telling.insert(way, stranger);
                }
                Err(why) => {
                    self.say(now, way, "a host did not prove who it is", &why);
                    self.refused.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
        Ok(())
    }

    fn forget(&mut self, way: Way) -> Result<(), Gone> {
        self.telling.remove(&way);
        self.post(News::Forget(way))
    }

    /// Tells tickets to who wants some. Errors: its end, and why.
    fn tell_tickets(&mut self, now: Instant, way: Way) -> Result<Result<(), String>, Gone> {
        let Some(telling) = self.telling.get_mut(&way) else { return Ok(Ok(())) };
        let tickets = match telling.wants(now) {
            Ok(0) => return Ok(Ok(())),
            Ok(wanted) => (0..wanted).map(|_| draw()).collect::<Result<Vec<_>, _>>(),
            Err(why) => return Ok(Err(why)),
        };
        let tickets = match tickets {
            Ok(tickets) => tickets,
            Err(why) => return Ok(Err(why)),
        };
        let bytes: Vec<_> = tickets.iter().flat_map(|it| [it.shown, it.answer]).flatten().collect();
        // Before they are told: the worker is not surprised by one.
        self.post(News::Told(way, tickets))?;
        let Some(telling) = self.telling.get_mut(&way) else { return Ok(Ok(())) };
        Ok(telling.conn.write(&bytes))
    }
}

/// A new one.
fn draw() -> Result<Ticket, String> {
    let secret = || {
        let mut secret = [0; SECRET_LEN];
        // So few come whole (getrandom(2)).
        getrandom(&mut secret, GetRandomFlags::empty()).map_err(|e| e.to_string())?;
        Ok::<_, String>(secret)
    };
    Ok(Ticket { shown: secret()?, answer: secret()? })
}

impl Asking {
    /// Asks for as many as are wanted; those that have come.
    fn turn(&mut self, wanted: u64, asked: &mut u64) -> Result<Vec<Ticket>, String> {
        let Some(conn) = &mut self.conn else { return Ok(Vec::new()) };
        if conn.is_ready {
            conn.turn()?;
        }
        if !conn.is_open() {
            return Ok(Vec::new());
        }
        while *asked < wanted {
            let many = u8::try_from(wanted - *asked).unwrap_or(u8::MAX);
            conn.write(&[many])?;
            *asked += u64::from(many);
            self.coming.due += usize::from(many);
        }
        let mut tickets = Vec::new();
        let mut bytes = [0; 16 * TICKET_LEN];
        loop {
            let len = conn.read(&mut bytes)?;
            if len == 0 {
                return Ok(tickets);
            }
            tickets.extend(self.coming.take(&bytes[..len])?);
        }
    }
}

impl Coming {
    /// The tickets that are whole with these bytes. Errors: it tells more than it was asked for.
    pub(super) fn take(&mut self, bytes: &[u8]) -> Result<Vec<Ticket>, String> {
        self.part.extend(bytes);
        let (whole, rest) = self.part.as_chunks::<TICKET_LEN>();
        if whole.len() > self.due {
            return Err("it tells more than it was asked for".into());
        }
        self.due -= whole.len();
        let tickets = whole.iter().map(|ticket| {
            let (halves, _) = ticket.as_chunks();
            Ticket { shown: halves[0], answer: halves[1] }
        });
        let tickets = tickets.collect();
        self.part = rest.to_vec();
        Ok(tickets)
    }
}

impl Telling {
    /// Whether something is done when its socket has something.
    const fn is_watched(&self) -> bool {
        self.rests.is_none()
    }

    /// What poll(2) is asked: nothing at all of one that rests, or it would tell all the time that
    /// the other host has hung up.
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

    /// How many tickets it wants now. Errors: its end, and why.
    fn wants(&mut self, now: Instant) -> Result<u8, String> {
        if self.until <= now {
            return Err("it is to prove who it is again".into());
        }
        if self.rests.is_some_and(|until| until <= now) {
            (self.rests, self.conn.is_ready) = (None, true);
        }
        if !self.conn.is_ready || self.rests.is_some() {
            return Ok(0);
        }
        self.conn.turn()?;
        if !self.conn.is_flushed() {
            return Ok(0); // it takes what it has been told first
        }
        let mut wanted = [0];
        if self.conn.read(&mut wanted)? == 0 {
            return Ok(0);
        }
        let [wanted] = wanted;
        if wanted == 0 {
            return Err("it asks for nothing".into());
        }
        self.rests = Some(now + T_TICKET.saturating_mul(wanted.into()));
        Ok(wanted)
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;
    use crate::toe::fabric::pipe::tests::{ends, sockets};

    #[test]
    fn who_hangs_up_while_it_rests_is_not_heard_before_it_has_rested() {
        let now = Instant::from_secs(1000);
        let [own, peer] = [1, 2].map(|n| IpAddr::from(Ipv4Addr::new(192, 0, 2, n)));
        let (ours, theirs) = sockets();
        let conn = Conn::new(ours, ends(Vec::new(), None).1, b"x");
        let (way, until) = (Way { own, peer }, now + T_SHOW);
        let mut stranger = Telling { way, conn, until, rests: Some(now + T_REST) };
        drop(theirs);
        let ready = |stranger: &Telling| {
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
