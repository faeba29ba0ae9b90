//! The common shell of every machine's TCP: connections by number and by ports, their timers, their
//! applications.
//!
//! A [`Shell`] finds the connection of a frame and runs its application afterwards; the [`Tcp`]
//! below it does the rest. Costs do not grow with connections that are over or not yet begun.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use nightporter_core::time::{Duration, Instant};

use super::address::{Key, Ports};
use super::app::{App, Phase, Socket};
use super::{Complaint, ConnId, EndReport, Stack};
use crate::plan::{ConnPlan, Machine, Offloads, Reuse};
use nightporter_check::frame::Frame;
use nightporter_check::stream::Stream;
use nightporter_check::wire::{Net, Packet};

/// A client uses the ports of one in TIME-WAIT again after this time (Linux `tcp_tw_reuse`: 1 s).
const REUSE_AFTER: Duration = Duration::from_secs(1);

/// A machine's TCP and the layers below; connections are its `Conn`s.
pub(super) trait Tcp {
    /// One connection.
    type Conn: Socket;

    /// Opens a connection.
    fn connect(&mut self, now: Instant, ends: &Ends) -> Self::Conn;

    /// Listens for one connection; the SYN that asks for it comes next.
    fn listen(&mut self, now: Instant, ends: &Ends) -> Self::Conn;

    /// A frame came. With `conn` it is a TCP segment of that connection.
    fn handle(&mut self, now: Instant, conn: Option<&mut Self::Conn>, frame: Frame);

    /// Sends what can be sent and says when `conn` has to be called again. `None`: it is over and
    /// can be forgotten.
    fn poll(&mut self, now: Instant, conn: &mut Self::Conn) -> Option<Instant>;

    /// The next frame that was made.
    fn next_frame(&mut self) -> Option<Frame>;

    /// It still waits for a SYN.
    fn is_listening(conn: &Self::Conn) -> bool;

    /// A new SYN may take the place of `conn` (it is in TIME-WAIT).
    fn may_be_replaced(conn: &Self::Conn) -> bool;

    /// The connection that an ICMP message is about, if it is one that matters.
    fn quoted(_frame: &[u8], _packet: &Packet) -> Option<Key> {
        None
    }

    /// See [`Stack::set_shrinking`].
    fn set_shrinking(&mut self, _on: bool) {}

    /// See [`Stack::set_offloads`].
    fn set_offloads(&mut self, _offloads: Offloads) {}

    /// See [`Stack::complaints`].
    fn complaints(&self) -> Vec<Complaint> {
        Vec::new()
    }
}

/// The two ends of a connection, as one of them sees it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ends {
    pub(super) conn: ConnId,
    pub(super) v6: bool,
    pub(super) own_port: u16,
    pub(super) peer: Machine,
    pub(super) peer_port: u16,
    /// The peer's stream.
    pub(super) expected: Stream,
    /// Other connections have the same ports, at other times.
    pub(super) reuse: Option<Reuse>,
    /// Nobody asks whether the other end is still there.
    pub(super) patient: bool,
}

impl Ends {
    pub(super) fn key(&self) -> Key {
        let peer = self.peer.address().ip(self.v6).0;
        Key { peer, own_port: self.own_port, peer_port: self.peer_port }
    }

    /// A SYN with this initial sequence number may be what opens it.
    fn opens_by(&self, isn: u32) -> bool {
        self.reuse.and_then(|reuse| reuse.isn).is_none_or(|own| own == isn)
    }
}

/// One connection.
struct Conn<T> {
    ends: Ends,
    app: App,
    /// `None`: not yet, or no more.
    tcp: Option<T>,
    timer: Option<Instant>,
}

/// A machine: implements [`Stack`] around any [`Tcp`].
pub(super) struct Shell<T: Tcp> {
    machine: Machine,
    tcp: T,
    conns: Vec<Conn<T::Conn>>,
    /// Indices of `conns` that are not over, in the order they use these ports.
    by_key: BTreeMap<Key, VecDeque<usize>>,
    /// Of every connection that wants to be called, when.
    timers: BTreeSet<(Instant, usize)>,
    /// How many of `conns` are over.
    over: usize,
    reading: bool,
}

impl<T: Tcp> Shell<T> {
    pub(super) fn new(machine: Machine, tcp: T) -> Self {
        Self {
            machine,
            tcp,
            conns: Vec::new(),
            by_key: BTreeMap::new(),
            timers: BTreeSet::new(),
            over: 0,
            reading: true,
        }
    }

    /// The connection a frame belongs to, and its initial sequence number if it opens one.
    fn key_of(&self, frame: &Frame) -> Option<(Key, Option<u32>)> {
        let packet = Packet::parse(&frame.bytes).ok()?;
        let Some((ip, tcp)) = packet.tcp() else {
            return T::quoted(&frame.bytes, &packet).map(|key| (key, None));
        };
        let own = self.machine.address();
        let for_us = ip.dst == own.ip(false) || ip.dst == own.ip(true);
        let key = Key { peer: ip.src.0, own_port: tcp.dst_port, peer_port: tcp.src_port };
        let opens = tcp.flags.syn() && !tcp.flags.ack();
        for_us.then_some((key, opens.then_some(tcp.seq.0)))
    }

    /// The connection that takes a segment; `syn` if it opens one.
    fn find(&mut self, now: Instant, key: &Key, syn: Option<u32>) -> Option<usize> {
        if let Some(isn) = syn {
            self.skip_to(key, isn);
            self.make_way(key, Some(isn));
        }
        let at = *self.by_key.get(key)?.front()?;
        let conn = &mut self.conns[at];
        let opens = syn.is_some_and(|isn| conn.ends.opens_by(isn));
        if conn.tcp.is_none() && opens && !conn.app.is_client() {
            conn.tcp = Some(self.tcp.listen(now, &conn.ends));
        }
        conn.tcp.is_some().then_some(at)
    }

    /// Something came for this connection: its application runs, then its TCP.
    fn run(&mut self, now: Instant, at: usize) {
        let conn = &mut self.conns[at];
        let Some(tcp) = &mut conn.tcp else { return };
        let was_over = conn.app.is_over();
        conn.app.run(now, tcp, self.reading);
        let next = self.tcp.poll(now, tcp);
        if !conn.app.is_over() && matches!(tcp.phase(), Phase::Closed | Phase::Reset) {
            conn.app.run(now, tcp, self.reading); // it gave up just now
        }
        let (is_over, wish) = (conn.app.is_over(), conn.app.poll_timeout());
        if next.is_none() && is_over {
            self.forget(at);
        } else {
            self.set_timer(at, next.into_iter().chain(wish).min());
        }
        if is_over && !was_over {
            self.over += 1;
            self.wake_next(at, now + REUSE_AFTER);
        }
    }

    /// A connection is over, and its ports are free.
    fn forget(&mut self, at: usize) {
        self.set_timer(at, None);
        self.conns[at].tcp = None;
        let key = self.conns[at].ends.key();
        let Some(queue) = self.by_key.get_mut(&key) else { return };
        queue.retain(|&other| other != at);
        if queue.is_empty() {
            self.by_key.remove(&key);
        }
        self.wake_next(at, Instant::ZERO);
    }

    /// Opens the connection that waited for the ports of this one, if there is one.
    fn wake_next(&mut self, at: usize, when: Instant) {
        let queue = self.by_key.get(&self.conns[at].ends.key());
        let Some(next) = queue.and_then(|q| q.iter().copied().find(|&n| n != at)) else { return };
        let conn = &self.conns[next];
        if conn.app.is_client() && conn.tcp.is_none() && conn.timer.is_none() {
            self.set_timer(next, Some(when));
        }
    }

    fn set_timer(&mut self, at: usize, timer: Option<Instant>) {
        let old = std::mem::replace(&mut self.conns[at].timer, timer);
        if old == timer {
            return;
        }
        if let Some(old) = old {
            self.timers.remove(&(old, at));
        }
        if let Some(new) = timer {
            self.timers.insert((new, at));
        }
    }

    /// Every connection under way gets its turn.
    fn wake_all(&mut self) {
        for at in 0..self.conns.len() {
            if self.conns[at].tcp.is_some() {
                self.set_timer(at, Some(Instant::ZERO));
            }
        }
    }

    /// A client that opens a later connection has given up the ones before: they will not come.
    fn skip_to(&mut self, key: &Key, isn: u32) {
        let Some(queue) = self.by_key.get_mut(key).filter(|queue| queue.len() > 1) else { return };
        let conns = &self.conns;
        if let Some(opened) = queue.iter().position(|&at| conns[at].ends.opens_by(isn)) {
            let opened = queue[opened];
            queue.retain(|&at| at >= opened || conns[at].tcp.is_some());
        }
    }

    /// If another connection waits for the ports of one in TIME-WAIT, that ends at once; at a
    /// server by the SYN that opens the other.
    fn make_way(&mut self, key: &Key, syn: Option<u32>) {
        let Some(queue) = self.by_key.get(key).filter(|queue| queue.len() > 1) else { return };
        let (old, next) = (queue[0], &self.conns[queue[1]].ends);
        if syn.is_some_and(|isn| !next.opens_by(isn)) {
            return;
        }
        if self.conns[old].tcp.as_ref().is_some_and(T::may_be_replaced) {
            self.forget(old);
        }
    }

    /// A client's time has come.
    fn open(&mut self, now: Instant, at: usize) {
        let ends = self.conns[at].ends;
        self.make_way(&ends.key(), None);
        let is_first = self.by_key.get(&ends.key()).and_then(VecDeque::front) == Some(&at);
        if is_first {
            let conn = &mut self.conns[at];
            conn.tcp = Some(self.tcp.connect(now, &ends));
            conn.app.opens(now);
        } else {
            self.set_timer(at, None); // `wake_next` will call
        }
    }
}

impl<T: Tcp> Stack for Shell<T> {
    fn handle_frame(&mut self, now: Instant, frame: Frame) {
        let Some((key, syn)) = self.key_of(&frame) else {
            let answer = is_neighbor_answer(&frame);
            self.tcp.handle(now, None, frame);
            if answer {
                self.wake_all();
                self.handle_timeout(now);
            }
            return;
        };
        let Some(at) = self.find(now, &key, syn) else {
            self.tcp.handle(now, None, frame);
            return;
        };
        let conn = &mut self.conns[at];
        self.tcp.handle(now, conn.tcp.as_mut(), frame);
        if conn.app.report().opened_at.is_none() {
            if conn.tcp.as_ref().is_some_and(T::is_listening) {
                conn.tcp = None; // it was not a SYN that it would answer
                return;
            }
            conn.app.opens(now);
        }
        self.run(now, at);
    }

    fn handle_timeout(&mut self, now: Instant) {
        while let Some(&(due, at)) = self.timers.first().filter(|(due, _)| *due <= now) {
            debug_assert_eq!(self.conns[at].timer, Some(due));
            match &mut self.conns[at].tcp {
                Some(tcp) => _ = self.tcp.poll(now, tcp),
                None => self.open(now, at),
            }
            self.run(now, at);
            assert!(self.conns[at].timer.is_none_or(|next| next > now), "a timer that stands");
        }
    }

    fn poll_transmit(&mut self, _now: Instant) -> Option<Frame> {
        self.tcp.next_frame()
    }

    fn poll_timeout(&mut self, _now: Instant) -> Option<Instant> {
        self.timers.first().map(|&(due, _)| due)
    }

    fn add_conn(&mut self, id: ConnId, plan: &ConnPlan) {
        let ports = Ports::of(id, plan);
        let app = App::new(id, plan, self.machine);
        let is_client = app.is_client();
        let (peer, own_port, peer_port) = if is_client {
            (plan.server, ports.client, ports.server)
        } else {
            (plan.client, ports.server, ports.client)
        };
        let ends = Ends {
            conn: id,
            patient: plan.workload.is_patient(),
            v6: plan.v6,
            own_port,
            peer,
            peer_port,
            expected: app.expected(),
            reuse: plan.reuse,
        };
        let at = self.conns.len();
        self.conns.push(Conn { ends, app, tcp: None, timer: None });
        self.by_key.entry(ends.key()).or_default().push_back(at);
        if is_client {
            self.set_timer(at, Some(plan.opens_at));
        }
    }

    fn set_reading(&mut self, on: bool) {
        self.reading = on;
        self.wake_all();
    }

    fn set_shrinking(&mut self, on: bool) {
        self.tcp.set_shrinking(on);
        self.wake_all();
    }

    fn set_offloads(&mut self, offloads: Offloads) {
        self.tcp.set_offloads(offloads);
    }

    fn ends(&self) -> Vec<EndReport> {
        self.conns.iter().map(|conn| conn.app.report().clone()).collect()
    }

    fn ends_open(&self) -> usize {
        self.conns.len() - self.over
    }

    fn complaints(&self) -> Vec<Complaint> {
        self.tcp.complaints()
    }
}

/// An ARP reply or a neighbour advertisement: something may have waited for it.
fn is_neighbor_answer(frame: &Frame) -> bool {
    const REPLY: u16 = 2;
    const ADVERTISEMENT: u8 = 136;
    match Packet::parse(&frame.bytes) {
        Ok(packet) => match packet.net {
            Net::Arp(arp) => arp.op == REPLY,
            Net::Ip(ip) => frame.bytes.get(usize::from(ip.payload_offset)) == Some(&ADVERTISEMENT),
            Net::Other => false,
        },
        Err(_) => false,
    }
}
