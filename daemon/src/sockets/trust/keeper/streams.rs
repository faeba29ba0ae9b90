//! Handshakes of streams, of those begun here and of those accepted.
//!
//! # Bounds
//!
//! - This host has [`BEGUN_TO_ONE_MAX`] handshakes with another one under way at once, and begins
//!   the next when one is done. The other host has at most twice as many from this one: it has
//!   answered each of them once, for it to be done here, and looks at what came before it accepts
//!   more. So an honest host is not refused any ([`ACCEPTED_OF_ONE_MAX`]).
//! - Of all handshakes under way a host has no more than it leaves free. Hosts that do not answer
//!   leave some to those that do, which are begun in turn.
//! - A host's handshakes are served at a rate ([`T_HANDSHAKE`]), those beyond it later. Of a host
//!   that begins more than it may have under way the others are hung up on.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use nightporter_core::time::{Duration, Instant};
use nightporter_registry::mail::Gone;
use rustls::ClientConnection;
use rustls::pki_types::ServerName;

use super::{Keeper, Stranger};
use crate::broker::dialer::Undialed;
use crate::limits::{HANDSHAKES_ACCEPTED_MAX, HANDSHAKES_BEGUN_MAX};
use crate::sockets::trust::conn::Conn;
use crate::sockets::trust::{Opening, Way};

/// A host that is connected to has shown what it has to show within this, since the stream was
/// wanted: a program waits for it. A little less than the worker waits (`T_DIAL`), which takes the
/// host for away if it has heard nothing.
const T_BEGIN: Duration = Duration::from_millis(1900);
/// And one that could not be begun within this is not: too little would be left for the other host
/// to answer, and that others wait says nothing of it.
const T_QUEUED: Duration = Duration::from_secs(1);
/// A host has a handshake served in such a time, on average: 500 in a second. One with keys for
/// P-256 took a core 0.3 ms at each side. So long is saved up: this many may come together.
const T_HANDSHAKE: Duration = Duration::from_millis(2);
const T_SAVED: Duration = T_HANDSHAKE.saturating_mul(32);
/// Of those that were begun here, with one host.
const BEGUN_TO_ONE_MAX: usize = 16;
/// Of those that others have begun, of one host.
const ACCEPTED_OF_ONE_MAX: usize = 2 * BEGUN_TO_ONE_MAX;
/// As [`has_share`] wants them.
pub(super) const ACCEPTED: (usize, usize) = (ACCEPTED_OF_ONE_MAX, HANDSHAKES_ACCEPTED_MAX);

/// The words when one fails.
const NO_STREAM: &str = "no encrypted stream to a host: its guests are reached by guest TCP";

/// One that was begun here.
pub(super) struct Beginning {
    way: Way,
    /// `None`: it is being dialed.
    pub(super) conn: Option<Conn>,
    /// When it ends.
    pub(super) until: Instant,
}

/// See the module's doc.
#[derive(Default)]
pub(super) struct Handshakes {
    /// Those that wait for others to be done, by their tags, since then.
    queued: BTreeMap<Way, VecDeque<(u64, Instant)>>,
    pub(super) begun: BTreeMap<u64, Beginning>,
    /// For each host, when the next one that it begins is served at the average rate.
    paced: BTreeMap<IpAddr, Instant>,
    /// The way of which one was begun last.
    last: Option<Way>,
    /// Hosts of which it was said that they have proved who they are.
    proven: BTreeSet<IpAddr>,
}

impl Handshakes {
    /// One more was accepted of this host: when it is served. `None`: now.
    pub(super) fn pace(&mut self, now: Instant, peer: IpAddr) -> Option<Instant> {
        let saved = Instant::from_nanos(now.as_nanos().saturating_sub(T_SAVED.as_nanos()));
        let before = self.paced.get(&peer).copied().unwrap_or(Instant::ZERO);
        let at = before.max(saved) + T_HANDSHAKE;
        self.paced.insert(peer, at);
        (at > now).then_some(at)
    }

    /// When one of them is late.
    pub(super) fn ends(&self) -> impl Iterator<Item = Instant> {
        let queued =
            self.queued.values().filter_map(VecDeque::front).map(|(_, since)| *since + T_QUEUED);
        queued.chain(self.begun.values().map(|it| it.until))
    }

    /// Those that have waited too long for others to be done.
    fn take_late(&mut self, now: Instant) -> Vec<(Way, u64)> {
        let mut late = Vec::new();
        for (way, tags) in &mut self.queued {
            // They are in the order in which they are late.
            while let Some((tag, _)) = tags.pop_front_if(|(_, since)| *since + T_QUEUED <= now) {
                late.push((*way, tag));
            }
        }
        self.queued.retain(|_, tags| !tags.is_empty());
        late
    }

    /// The next that may begin, of each way in turn.
    fn begin_next(&mut self) -> Option<(Way, u64)> {
        if self.begun.len() >= HANDSHAKES_BEGUN_MAX {
            return None;
        }
        let may_begin = |way: &&Way| {
            has_share(
                self.begun_to(way.peer),
                self.begun.len(),
                (BEGUN_TO_ONE_MAX, HANDSHAKES_BEGUN_MAX),
            )
        };
        let behind = |way: &&Way| self.last.is_none_or(|last| **way > last);
        let mut ways = self.queued.keys().filter(may_begin);
        let first = self.queued.keys().filter(may_begin).find(behind);
        let way = *first.or_else(|| ways.next())?;
        let tags = self.queued.get_mut(&way)?;
        let (tag, since) = tags.pop_front()?;
        if tags.is_empty() {
            self.queued.remove(&way);
        }
        self.begun.insert(tag, Beginning { way, conn: None, until: since + T_BEGIN });
        self.last = Some(way);
        Some((way, tag))
    }

    fn begun_to(&self, peer: IpAddr) -> usize {
        self.begun.values().filter(|it| it.way.peer == peer).count()
    }
}

/// Whether a host that has so many of all there are may have one more: it has no more than are
/// free, nor than the first of `most`, of which the second is for all.
pub(super) fn has_share(of_one: usize, all: usize, most: (usize, usize)) -> bool {
    of_one < most.0.min(most.1.saturating_sub(all))
}

impl Keeper {
    /// The worker wants a stream.
    pub(super) fn want_stream(&mut self, now: Instant, way: Way, tag: u64) -> Result<(), Gone> {
        if self.dialer.is_none() {
            return self.fail(now, way, tag, "nobody connects any more: restart nightporterd");
        }
        self.handshakes.queued.entry(way).or_default().push_back((tag, now));
        Ok(())
    }

    /// As many begin as may.
    pub(super) fn begin_streams(&mut self, now: Instant) -> Result<(), Gone> {
        // The worker counts each until it is answered.
        for (way, tag) in self.handshakes.take_late(now) {
            self.fail(now, way, tag, "too many others were to be begun before it")?;
        }
        let Self { handshakes, dialer, .. } = self;
        let Some(dialer) = dialer else { return Ok(()) };
        while let Some((way, tag)) = handshakes.begin_next() {
            dialer.ask(tag, way.own, way.peer);
        }
        Ok(())
    }

    /// One has a socket, or gets none.
    pub(super) fn meet_stream(
        &mut self,
        now: Instant,
        tag: u64,
        socket: Result<OwnedFd, Undialed>,
    ) -> Result<(), Gone> {
        let Some(beginning) = self.handshakes.begun.get_mut(&tag) else {
            return Ok(()); // nobody waits for it any more
        };
        let way = beginning.way;
        let client = &self.proof.config().client;
        let tls = socket.map(|socket| {
            let tls = ClientConnection::new(Arc::clone(client), ServerName::from(way.peer));
            tls.map(|tls| Conn::new(socket, tls.into()))
        });
        match tls {
            Ok(Ok(conn)) => beginning.conn = Some(conn),
            Ok(Err(e)) => return self.refuse_stream(now, tag, &e.to_string()),
            Err(Undialed::There) => return self.refuse_stream(now, tag, "cannot connect to it"),
            Err(Undialed::Here(e)) => {
                self.handshakes.begun.remove(&tag);
                return self.fail(now, way, tag, &format!("this host cannot connect: {e}"));
            }
        }
        Ok(())
    }

    /// Those that were begun here go on.
    pub(super) fn shake_hands(&mut self, now: Instant) -> Result<(), Gone> {
        for tag in self.handshakes.begun.keys().copied().collect::<Vec<_>>() {
            let Some(beginning) = self.handshakes.begun.get_mut(&tag) else { continue };
            let way = beginning.way;
            match beginning.turn(now) {
                Ok(false) => {}
                Ok(true) => {
                    let conn = self.handshakes.begun.remove(&tag).and_then(|it| it.conn);
                    self.note_proven(way);
                    if let Some(conn) = conn {
                        let begun = Opening::Begun(tag, conn.into_secured());
                        self.post(begun)?;
                    }
                }
                Err(why) => self.refuse_stream(now, tag, &why)?,
            }
        }
        Ok(())
    }

    /// The other host's certificate, or its behaviour, is wrong.
    fn refuse_stream(&mut self, now: Instant, tag: u64, why: &str) -> Result<(), Gone> {
        let Some(Beginning { way, .. }) = self.handshakes.begun.remove(&tag) else { return Ok(()) };
        self.say(now, way, NO_STREAM, why);
        self.refused.fetch_add(1, Ordering::Relaxed);
        self.post(Opening::Failed(tag, false))
    }

    /// This host lacks something, which says nothing of the other one.
    fn fail(&mut self, now: Instant, way: Way, tag: u64, why: &str) -> Result<(), Gone> {
        self.say(now, way, NO_STREAM, why);
        self.post(Opening::Failed(tag, true))
    }

    /// Another host has begun one, and has shown what it has to show.
    pub(super) fn pass_on(&mut self, stranger: Stranger) -> Result<(), Gone> {
        self.note_proven(stranger.way);
        let came = Opening::Came(stranger.way, stranger.conn.into_secured());
        self.post(came)
    }

    fn note_proven(&mut self, way: Way) {
        if self.handshakes.proven.insert(way.peer) {
            tracing::info!(peer = %way.peer, "toe: a host has proved who it is");
        }
    }

    /// Certificates have changed, or no guests are registered at a host any more (those of this
    /// one, then): what is under way has shown what does not hold.
    pub(super) fn end_handshakes(&mut self, of: Option<IpAddr>) -> Result<(), Gone> {
        let Handshakes { queued, begun, paced, proven, .. } = &mut self.handshakes;
        let is_its = |peer: IpAddr| of.is_none_or(|of| of == peer);
        let mut ended: Vec<_> =
            begun.iter().filter(|(_, it)| is_its(it.way.peer)).map(|(tag, _)| *tag).collect();
        begun.retain(|_, it| !is_its(it.way.peer));
        if let Some(of) = of {
            // By new certificates these can begin.
            queued.retain(|way, tags| {
                let stays = way.peer != of;
                if !stays {
                    ended.extend(tags.iter().map(|(tag, _)| *tag));
                }
                stays
            });
            paced.remove(&of);
        }
        proven.retain(|peer| !is_its(*peer));
        ended.into_iter().try_for_each(|tag| self.post(Opening::Failed(tag, true)))
    }
}

impl Beginning {
    /// Whether both sides have shown what they have to show. Errors: it is no use, and why.
    fn turn(&mut self, now: Instant) -> Result<bool, String> {
        if self.until <= now {
            return Err("it takes too long".into());
        }
        let Some(conn) = &mut self.conn else { return Ok(false) };
        if conn.is_ready {
            conn.turn()?;
        }
        Ok(conn.is_open())
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[test]
    fn each_that_waits_too_long_for_others_is_answered_once() {
        let mut handshakes = Handshakes::default();
        let now = Instant::from_secs(1000);
        let [own, peer, other] = [1, 2, 3].map(|n| IpAddr::from(Ipv4Addr::new(192, 0, 2, n)));
        let [way, second] = [peer, other].map(|peer| Way { own, peer });
        let since = |ms| now + Duration::from_millis(ms);
        let at = |ms| since(ms) + T_QUEUED;
        handshakes.queued.insert(way, [(1, since(10)), (2, since(20)), (3, since(30))].into());
        handshakes.queued.insert(second, [(4, since(15))].into());
        assert_eq!(handshakes.ends().min(), Some(at(10)));
        assert_eq!(handshakes.take_late(at(9)), []);
        assert_eq!(handshakes.take_late(at(20)), [(way, 1), (way, 2), (second, 4)]);
        assert_eq!((handshakes.take_late(at(20)), handshakes.ends().min()), (vec![], Some(at(30))));
        assert_eq!(handshakes.take_late(at(30)), [(way, 3)]);
        assert!(handshakes.queued.is_empty());
    }

    #[test]
    fn some_hosts_with_many_handshakes_leave_some_to_the_next() {
        let mut all = 0;
        let hosts = std::iter::repeat_with(|| {
            let of_one = (0..).take_while(|n| has_share(*n, all + n, ACCEPTED)).count();
            all += of_one;
            of_one
        });
        let hosts: Vec<usize> = hosts.take(13).collect();
        assert_eq!(hosts, [32, 32, 32, 32, 32, 32, 32, 16, 8, 4, 2, 1, 1]);
        assert_eq!(all, HANDSHAKES_ACCEPTED_MAX);
    }

    #[test]
    fn hosts_that_do_not_answer_leave_handshakes_to_those_that_do() {
        let mut handshakes = Handshakes::default();
        let now = Instant::from_secs(1000);
        let way = |n| {
            let [own, peer] = [0, n].map(|n| IpAddr::from(Ipv4Addr::new(192, 0, 2, n)));
            Way { own, peer }
        };
        let mut tags = 0..;
        for n in 1..=32 {
            handshakes
                .queued
                .insert(way(n), tags.by_ref().take(64).map(|tag| (tag, now)).collect());
        }
        let mut begun = BTreeMap::<Way, usize>::new();
        let first: Vec<_> = std::iter::from_fn(|| handshakes.begin_next()).collect();
        let in_turn: Vec<_> = (1..=32).chain([1]).map(way).collect();
        assert_eq!(first.iter().take(33).map(|(way, _)| *way).collect::<Vec<_>>(), in_turn);
        first.iter().for_each(|(way, _)| *begun.entry(*way).or_default() += 1);
        assert!(begun.len() == 32 && begun.values().all(|n| *n <= BEGUN_TO_ONE_MAX), "{begun:?}");
        assert!(first.len() < HANDSHAKES_BEGUN_MAX, "who comes now finds some");
        handshakes.queued.insert(way(99), [(u64::MAX, now)].into());
        assert_eq!(handshakes.begin_next(), Some((way(99), u64::MAX)));
        // One that is done makes place for the next.
        handshakes.begun.retain(|tag, _| *tag != first[31].1);
        assert_eq!(handshakes.begin_next().map(|(way, _)| way), Some(first[31].0));
        assert!(handshakes.begun.values().all(|it| it.until == now + T_BEGIN));
    }

    #[test]
    fn handshakes_of_a_host_are_served_at_a_rate_and_some_at_once() {
        let mut handshakes = Handshakes::default();
        let peer = |n| IpAddr::from(Ipv4Addr::new(192, 0, 2, n));
        let mut now = Instant::from_secs(1000);
        let at_once = (0..100).take_while(|_| handshakes.pace(now, peer(1)).is_none()).count();
        assert_eq!(at_once, 32);
        assert_eq!(handshakes.pace(now, peer(1)), Some(now + T_HANDSHAKE.saturating_mul(2)));
        assert_eq!(handshakes.pace(now, peer(2)), None, "another host has its own");
        // It is owed what it took too early; what it has not used for long is not saved up.
        now = now + T_HANDSHAKE;
        assert_eq!(handshakes.pace(now, peer(1)), Some(now + T_HANDSHAKE.saturating_mul(2)));
        now = now + Duration::from_secs(3600);
        let at_once = (0..100).take_while(|_| handshakes.pace(now, peer(1)).is_none()).count();
        assert_eq!(at_once, 32);
    }
}
