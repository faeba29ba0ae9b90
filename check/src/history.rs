//! The observed traffic of one flow at both sides of the port, unwrapped to 64 bits.
//!
//! R is the remote, G the guest. Everything here follows from frames at the taps and from the
//! standards that stacks keep; the engine's view is asked for in one place only (`state`).

mod opening;
mod passing;
mod past;

use nightporter_core::tcp::flow::State;
use nightporter_core::time::{Duration, Instant};

pub use crate::end::{End, Offer, Side};
use crate::out::{In, Out};
use crate::rules::early_acceptance::{self, Acceptable};
use crate::rules::one_endpoint::has_odd_block;
use crate::rules::quality::{self, Quality};
use crate::rules::{Memory, ack_order, congestion_marks, endings, fail_stop, liveness, right_edge};
use crate::stream::Stream;
use crate::tap::{FlowName, Tapped};
use crate::wire::{Ip, Seq, Tcp, TcpFlags};

/// Relative numbers are unwrapped around this, so that one below the first is positive too.
pub const BASE: u64 = 1 << 32;
/// A connection that is idle for so long is forgotten (LIFE-02: an hour).
const FORGOTTEN_AFTER: Duration = Duration::from_secs(3600);
/// A clock that was last received so long ago may have gone half way round (`TCP_PAWS_WRAP` of
/// Linux 6.7: 2,147 s). The host counts in eights of seconds, and may let go by 11 s earlier.
pub(crate) const PAWS_AGE: Duration = Duration::from_secs(2_136);

/// Knowledge of a flow and its ends from elsewhere than its frames; the same for later connections
/// on its ports.
#[derive(Clone, Copy, Debug, Default)]
pub struct Known {
    /// Both ends speak classic ECN.
    pub ecn: bool,
    /// The host may send for G (congestion offload): not all leaves as G sent it.
    pub floods: bool,
    /// G is a router, and its end of the connection is behind it.
    pub forwards: bool,
    /// G takes nothing for minutes: all is repeated to it again and again.
    pub deaf: bool,
    /// G takes window back now and then.
    pub shrinks: bool,
    /// R is known not to.
    pub net_keeps_window: bool,
    /// G is sent fragments: the host may not have seen the bytes that G acknowledges.
    pub fragments: bool,
    /// Longest IP packet that G's port takes.
    pub mtu: Option<u16>,
    /// R, or G, is hostile: it is owed nothing, and less is expected of it.
    pub hostile: [bool; 2],
}

/// See the module doc.
#[derive(Clone, Debug)]
pub struct History {
    /// The name of the flow, and of its connection.
    pub name: FlowName,
    /// See `name`.
    pub conn: Option<usize>,
    /// See its type.
    pub known: Known,
    /// It does so now, by the engine's account.
    pub is_relayed: bool,
    /// Time to live of G's last segment.
    pub ttl: Option<u8>,
    /// When the VM last had less budget to spare than a connection may want.
    pub cramped_at: Instant,
    /// Bytes of the VM's budget that are free for more than first windows.
    pub spare: u64,
    /// The memory of the rules about time and quality.
    pub(crate) quality: Quality,
    /// The memory of the others.
    pub(crate) rules: Memory,
    /// R, then G.
    pub ends: [End; 2],
    /// The content of R's and G's streams, if it is known.
    pub streams: Option<[Stream; 2]>,
    /// There is no engine to ask: the flow's state has to follow from its frames.
    pub offline: bool,
    /// The engine's state of the flow after its last step; `None`: not tracked.
    pub state: Option<State>,
    /// The flow is, or was, with offload in this incarnation.
    pub was_on: bool,
    /// A promise was broken by a crash, or its guest is gone: both sides must be told.
    pub broken: bool,
    /// It was a crash that broke the promise.
    pub broken_by_crash: bool,
    /// The next engine may go on with it, from its record.
    pub may_resume: bool,
    /// The engine was taken away from it: a crash, a reboot, a move.
    pub interrupted: bool,
    /// Both sides must see an RST, or R alone.
    pub must_reset: bool,
    /// See `must_reset`.
    pub must_tell_r: bool,
    /// A middlebox reset it.
    pub killed: bool,
    /// R's newest segment brings at most an octet: it asks for an answer.
    pub asks: bool,
    /// It does, and with nothing but that: a keepalive, just before what is acknowledged.
    pub idles: bool,
    /// When R last sent anything.
    pub(crate) heard_from_remote: Instant,
    /// When G last sent anything.
    pub heard_from_guest: Instant,
    /// Some of G's segments go past the host, or through it in fragments: R has received more of G
    /// than the host saw.
    pub past: bool,
    /// So did its SYN: the host may have the connection before on these ports.
    pub(crate) opened_past: bool,
    /// R's newest ACK of what G had sent by then: the host's own say no more. Of an R that lies a
    /// later one may wait for the ring until it is true.
    pub(crate) ack_of_sent: u64,
    /// The host has accepted the connection, and G has yet to do so.
    pub(crate) waits_for_guest: bool,
    /// The host has accepted the connection, and nobody else can translate for it.
    pub is_of_host: bool,
    /// R's FIN came before the host had a place for such a one, which may have dropped it.
    pub(crate) fin_may_be_lost: bool,
    /// Such a one has ended because G did not answer, or was never asked.
    pub was_given_up: bool,
    /// Both ends are guests of one host: the frames between the two flows are not seen.
    pub opaque: bool,
    /// The bytes that a conforming G would have accepted by now (INV-25).
    pub acceptable: Acceptable,
    /// Since when the guest has been paused.
    pub paused_since: Option<Instant>,
    /// Since when it has been so with a frame to look at.
    pub silent_since: Option<Instant>,
    /// Initial sequence numbers of G's answers to one SYN of R, with what they offered: G may take
    /// the ACK of any (SYN cookies).
    answers: Vec<(u32, Offer)>,
    /// SYN of R that no SYN-ACK has answered, and when its first copy came.
    syn: Option<(u32, Offer, Option<u32>, Instant)>,
    /// The connection that the newest SYN is part of, and whether G is its client: another one than
    /// `conn` if its ports are used again.
    next: Option<(usize, bool)>,
    /// Connections of these ports before this one that were answered.
    pub earlier: Vec<usize>,
}

impl History {
    /// Nothing was seen yet.
    #[must_use]
    pub fn new(
        name: FlowName,
        conn: Option<usize>,
        opaque: bool,
        streams: Option<[Stream; 2]>,
    ) -> Self {
        Self {
            name,
            conn,
            known: Known::default(),
            is_relayed: false,
            ttl: None,
            cramped_at: Instant::ZERO,
            spare: 0,
            quality: Quality::default(),
            rules: Memory::default(),
            ends: [End::new(), End::new()],
            streams,
            offline: false,
            state: None,
            was_on: false,
            broken: false,
            broken_by_crash: false,
            may_resume: false,
            interrupted: false,
            must_reset: false,
            must_tell_r: false,
            killed: false,
            asks: false,
            idles: false,
            heard_from_remote: Instant::ZERO,
            heard_from_guest: Instant::ZERO,
            past: false,
            opened_past: false,
            ack_of_sent: BASE + 1,
            waits_for_guest: false,
            is_of_host: false,
            fin_may_be_lost: false,
            was_given_up: false,
            opaque,
            acceptable: Acceptable::default(),
            paused_since: None,
            silent_since: None,
            answers: Vec::new(),
            syn: None,
            next: None,
            earlier: Vec::new(),
        }
    }

    /// One end.
    #[must_use]
    pub fn end(&self, side: Side) -> &End {
        &self.ends[side as usize]
    }

    fn end_mut(&mut self, side: Side) -> &mut End {
        &mut self.ends[side as usize]
    }

    /// Both initial sequence numbers are known.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.ends.iter().all(|e| e.isn.is_some())
    }

    /// With offload; offline an open flow that is not known to pass counts as one.
    #[must_use]
    pub fn is_on(&self) -> bool {
        let may_be = self.offline && self.state.is_none() && self.is_open();
        may_be || matches!(self.state, Some(State::Opening | State::On | State::Drain))
    }

    /// Both ends offered timestamps.
    #[must_use]
    pub fn timestamps(&self) -> bool {
        self.ends.iter().all(|e| e.offer.timestamps)
    }

    /// Both ends offered SACK.
    #[must_use]
    pub fn sack(&self) -> bool {
        self.ends.iter().all(|e| e.offer.sack)
    }

    /// Both ends agreed on congestion marks.
    #[must_use]
    pub fn marks(&self) -> bool {
        self.ends.iter().all(|e| e.offer.marks)
    }

    /// An end offered an option that the host does not understand.
    #[must_use]
    pub fn odd(&self) -> bool {
        self.ends.iter().any(|e| e.offer.odd) || self.ends.iter().all(|e| e.offer.mptcp)
    }

    /// The shift of windows that `side` sends.
    #[must_use]
    pub fn shift(&self, side: Side) -> u8 {
        let both = self.ends.iter().all(|e| e.offer.scale.is_some());
        self.end(side).offer.scale.filter(|_| both).map_or(0, |s| s.min(14))
    }

    /// A sequence number of `side`, unwrapped near `near`.
    #[must_use]
    pub fn unwrap(&self, side: Side, seq: Seq, near: u64) -> u64 {
        Seq(seq.0.wrapping_sub(self.end(side).isn.unwrap_or(0))).unwrap(near)
    }

    /// If the engine after a crash goes on with it no promise is broken.
    pub fn note_resumed(&mut self) {
        if !self.may_resume || self.state.is_none_or(|state| state == State::Abort) {
            return;
        }
        (self.may_resume, self.broken, self.broken_by_crash) = (false, false, false);
        self.must_reset = false;
        self.rules.fail_stop.forgive_both();
        liveness::on_resumed(self);
    }

    /// End of the bytes that were acknowledged to R and not by G, if there are any.
    #[must_use]
    pub fn promised(&self) -> Option<u64> {
        let (r, g) = (self.end(Side::R), self.end(Side::G));
        let promised = r.ack_to.min(r.fin.unwrap_or(u64::MAX));
        (promised > g.acked && !r.reset && !r.reset_to).then_some(promised)
    }

    /// Between two guests of one host not everything is seen, and a hostile end is owed nothing.
    #[must_use]
    pub fn is_judged(&self) -> bool {
        !self.opaque && self.known.hostile == [false; 2]
    }

    /// R has acknowledged bytes that G sent past the host.
    #[must_use]
    pub(crate) fn net_has_unseen(&self) -> bool {
        let r = self.end(Side::R);
        self.past && r.acked > r.end_to
    }

    /// A frame came in that counts for nothing; it may be passed on, though. `in_any_state`: it is
    /// broken or a SYN, and its receiver will refuse it.
    pub(crate) fn on_in_forged(&mut self, from: Side, fingerprint: u64, in_any_state: bool) {
        self.may_pass(from, fingerprint, false, in_any_state);
    }

    /// A frame came in from `from`, and counts: it is whole, and really from there. Returns it
    /// unless it is a SYN or RST.
    pub(crate) fn on_in<'a>(
        &mut self,
        t: &Tapped<'a>,
        from: Side,
        ip: &'a Ip,
        tcp: &'a Tcp,
        fingerprint: u64,
    ) -> Option<In<'a>> {
        let at = t.at;
        self.may_pass(from, fingerprint, true, tcp.flags.syn());
        let begins = tcp.flags.syn() && !tcp.flags.ack();
        self.note_silence(at, from);
        self.asks = from == Side::R && tcp.payload_len <= 1 && !begins;
        self.idles = false;
        liveness::on_any(self, from);
        if from == Side::G {
            (self.heard_from_guest, self.ttl) = (at, Some(ip.ttl));
        }
        let flags = tcp.flags;
        if flags.syn() {
            self.on_syn(at, from, tcp);
            return None;
        }
        self.end_mut(from).bytes += u64::from(tcp.payload_len);
        self.end_mut(from).note_clock(tcp);
        if !self.is_open() {
            return None;
        }
        self.note_choice(from, tcp);
        // A hostile end may use any numbers.
        let near = if from == Side::R { self.end(from).ack_to } else { self.end(from).end };
        let seq = self.unwrap(from, tcp.seq, near.max(BASE + 1));
        self.idles = self.asks && !flags.fin() && seq + 1 == self.end(Side::R).ack_to;
        if flags.rst() {
            self.note_reset(at, from, seq);
            return None;
        }
        liveness::on_look(self, at, from, tcp);
        let mut end = seq + u64::from(tcp.payload_len);
        if flags.fin() {
            self.end_mut(from).fin = Some(end);
            self.fin_may_be_lost &= from == Side::G;
            self.fin_may_be_lost |= from == Side::R && self.is_of_host && self.state.is_none();
            end += 1;
        }
        let mut counts = true;
        if from == Side::R {
            counts = early_acceptance::on_segment_from_net(self, tcp, seq, end);
        }
        let shift = self.shift(from);
        let ack = self.unwrap(from.other(), tcp.ack, self.end(from).acked);
        if from == Side::R {
            let refused = !counts || tcp.flags.ack() && self.is_long_acked(ack);
            congestion_marks::on_in(self, ip, tcp, (seq, end), !refused);
        }
        let e = self.end_mut(from);
        e.end = e.end.max(end);
        if flags.ack() {
            self.end_mut(from).odd_sack |= has_odd_block(self, from.other(), tcp, ack);
            self.note_ack(from, seq, ack, u64::from(tcp.window) << shift);
            let e = self.end_mut(from);
            if counts && seq <= e.edge_to && end >= e.ack_to {
                e.heard = e.heard.max(ack);
            }
        }
        let end = seq + u64::from(tcp.payload_len);
        let s = In { at, from, bytes: t.bytes, ip, tcp, seq, end, ack, counts };
        quality::on_in(self, &s);
        Some(s)
    }

    /// An end acknowledges the bytes below `ack`, and shows a window.
    fn note_ack(&mut self, from: Side, seq: u64, ack: u64, window: u64) {
        if from == Side::R && ack <= self.end(Side::G).end {
            self.ack_of_sent = self.ack_of_sent.max(ack);
        }
        let floods = self.known.floods && from == Side::R;
        let can_have = if self.past { self.end(from.other()).end } else { self.end(from).end_to };
        let e = self.end_mut(from);
        if floods {
            // R has shown that, whether its number is old, true or a lie that another path hides.
            e.edge_max = e.edge_max.max(ack + window);
        }
        if floods && ack > can_have {
            // Of what the host has kept so far, or nobody sent (FLOOD-08); G may come to judge it.
            e.lied = e.lied.max(ack);
            e.lies.insert(ack);
            e.lies = e.lies.split_off(&e.acked.saturating_sub(1 << 21));
        } else if (e.acked..e.acked + (1 << 30)).contains(&ack) {
            e.acked_before.insert(e.acked);
            e.acked_before = e.acked_before.split_off(&ack.saturating_sub(1 << 21));
            e.acked = ack;
            e.edge = ack + window;
            if seq >= e.newest.0 {
                e.newest = (seq, e.edge);
            }
            e.edge_max = e.edge_max.max(e.edge);
            e.copies = e.copies.split_off(&ack.saturating_sub(1 << 21));
        }
    }

    /// An RST; one of a connection before on these ports ends nothing.
    fn note_reset(&mut self, at: Instant, from: Side, seq: u64) {
        if self.is_of_earlier(from, seq) {
            return;
        }
        self.end_mut(from).reset = true;
        if from == Side::R {
            fail_stop::on_reset(self, at);
            endings::on_reset(self, seq);
        }
    }

    /// After a long silence of an end less is known of it.
    fn note_silence(&mut self, at: Instant, from: Side) {
        let heard_at = match from {
            Side::R => std::mem::replace(&mut self.heard_from_remote, at),
            Side::G => self.heard_from_guest,
        };
        let silent = at.since(heard_at);
        if silent > FORGOTTEN_AFTER && self.is_open() {
            right_edge::on_forgotten(self);
        }
        if silent > PAWS_AGE {
            self.end_mut(from.other()).tsval_to = None;
            self.quality.echoes.forget(from);
            if from == Side::R {
                self.acceptable.recent = None;
            }
        }
    }

    /// An ACK of R older than a whole window: its segment is refused (SNOOP-03; RFC 5961 section
    /// 5.2).
    pub(crate) fn is_long_acked(&self, ack: u64) -> bool {
        let r = self.end(Side::R);
        ack + r.edge.saturating_sub(r.acked) < r.acked
    }

    /// A frame in the flow's terms.
    #[must_use]
    pub(crate) fn out<'a>(
        &self,
        t: &Tapped<'a>,
        to: Side,
        gated: bool,
        ip: &'a Ip,
        tcp: &'a Tcp,
    ) -> Out<'a> {
        let from = tcp.payload_offset as usize;
        let payload = &t.bytes[from..from + tcp.payload_len as usize];
        let seq = self.unwrap(to.other(), tcp.seq, self.end(to).end_to.max(BASE + 1));
        let ack = tcp.flags.ack().then(|| self.unwrap(to, tcp.ack, self.end(to).ack_to));
        let shift = if tcp.flags.syn() { 0 } else { self.shift(to.other()) };
        let edge = ack.unwrap_or(BASE) + (u64::from(tcp.window) << shift);
        let end = seq + u64::from(tcp.payload_len);
        let (at, waited, hdr, bytes) = (t.at, t.waited, t.hdr, t.bytes);
        Out { at, to, gated, waited, hdr, bytes, ip, tcp, payload, seq, end, ack, edge }
    }

    /// A frame left, and was checked.
    pub(crate) fn on_out(&mut self, o: &Out<'_>) {
        quality::after_out(self, o);
        self.was_on |= self.is_on() && o.gated;
        liveness::after_out(self, o);
        let (is_open, is_earlier) = (self.is_open(), self.is_of_earlier(o.to.other(), o.seq));
        let is_refused = self.is_refused(o);
        let e = self.end_mut(o.to);
        e.frames_to += 1;
        e.bytes_to += u64::from(o.tcp.payload_len);
        if o.tcp.flags.rst() && (is_earlier || is_refused) {
            return;
        }
        if o.tcp.flags.rst() {
            // One of G's own may lie where R does not believe it.
            let believed = !is_open || (e.acked..=e.end_to).contains(&o.seq);
            e.reset_to |= o.gated || o.to == Side::G || believed;
            return;
        }
        // Another SYN in a connection that is open is for its receiver to refuse.
        let isn = self.end(o.to.other()).isn;
        let takes = !o.tcp.flags.syn() || !self.is_open() || isn == Some(o.tcp.seq.0);
        let e = self.end_mut(o.to);
        if let Some(ts) = o.tcp.options.timestamps.filter(|_| takes) {
            let newer = e.tsval_to.is_none_or(|before| Seq(before).lt(Seq(ts.tsval)));
            e.tsval_to = if newer { Some(ts.tsval) } else { e.tsval_to };
        }
        ack_order::after_out(self, o);
        let r = self.end(Side::R);
        let said = match self.known.hostile[Side::R as usize] {
            true => self.ack_of_sent,
            false if r.lied > BASE => r.acked, // a lie of what the host keeps lies below G's end
            false => u64::MAX,
        };
        // G may judge a lie by more than it had sent when that came (seed 37737).
        let lie = o.waited && o.ack.is_some_and(|ack| r.lies.contains(&ack));
        let lends = self.known.floods && o.to == Side::G;
        let ends = lends && right_edge::has_stood_long(self, o.at);
        let unit = 1 << self.shift(Side::R);
        let newest = self.end(o.to.other()).newest.1;
        let e = self.end_mut(o.to);
        // G refuses an ACK for bytes that it has not sent.
        let refused = o.to == Side::G && (lie || o.ack.is_some_and(|ack| ack > e.end.min(said)));
        if let Some(ack) = o.ack.filter(|_| !refused) {
            e.told_of = newest;
            e.is_told(ack, o.edge, ends, lends.then_some(unit));
        }
        let syn = u64::from(o.tcp.flags.syn());
        let is_shown = o.to == Side::G && o.ack.is_some() && !refused;
        if takes {
            e.end_to = e.end_to.max(o.end + syn + u64::from(o.tcp.flags.fin()));
        }
        if is_shown {
            right_edge::on_shown(self);
        }
        self.remember_bytes(o);
    }

    /// For a stream of unknown content the first copy counts.
    fn remember_bytes(&mut self, o: &Out<'_>) {
        let known = self.streams.is_some() || self.offline;
        if !known && o.gated && !o.is_verbatim() {
            let copies = &mut self.end_mut(o.to).copies;
            for (at, byte) in (o.seq..).zip(o.payload) {
                copies.entry(at).or_insert(*byte);
            }
        }
    }

    /// The byte that was sent to `to` before as number `at`, if that is remembered.
    #[must_use]
    pub(crate) fn copy_of(&self, to: Side, at: u64) -> Option<u8> {
        self.end(to).copies.get(&at).copied()
    }
}

/// A byte's offset in its stream: the first after the SYN is number 0.
#[must_use]
pub fn offset(at: u64) -> u64 {
    at.saturating_sub(BASE + 1)
}
