//! The observed state of a connection, and the conditions for the next observation.
//!
//! Numbers are those of the engine's 64-bit space, so that nothing wraps. The model believes the
//! engine in one thing only: which bytes it has taken. From then on these bytes are owed,
//! unchanged.
//!
//! It is not one of the rules of `nightporter-check`, because these follow a connection by its
//! frames, and hardly any holds while both ends jump, forge, shrink their windows and lie at will.
//! This model compares the engine's own account (`FlowStats`) and its store with the input, step by
//! step: whatever the ends send, the account moves by that alone, and the store matches the
//! account.

use std::collections::BTreeSet;

use super::segment::{ACK, FIN, RST, SYN, URG};
use nightporter_core::limits::PAGE;
use nightporter_core::store::arena::Arena;
use nightporter_core::tcp::flow::{Flow, State, unwrapped_isn};
use nightporter_core::wire::packet::{Seq, Tcp};

pub(super) const R: usize = 0;
pub(super) const G: usize = 1;

/// Bytes below the acknowledgement that are kept before they are dropped.
const SLACK: usize = 1 << 16;

/// A FIN that has not come.
const NONE: u64 = u64::MAX;

/// Sorted ranges that neither touch nor overlap.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(super) struct Spans(Vec<(u64, u64)>);

impl Spans {
    pub(super) fn insert(&mut self, mut from: u64, mut to: u64) {
        if from >= to {
            return;
        }
        let first = self.0.partition_point(|&(_, end)| end < from);
        let last = self.0.partition_point(|&(start, _)| start <= to);
        if first < last {
            from = from.min(self.0[first].0);
            to = to.max(self.0[last - 1].1);
        }
        self.0.splice(first..last, [(from, to)]);
    }

    /// The end of the run that starts at `from`.
    pub(super) fn run_from(&self, from: u64) -> u64 {
        let run = self.0.iter().find(|(a, b)| (*a..=*b).contains(&from));
        run.map_or(from, |&(_, end)| end)
    }

    fn remove_below(&mut self, floor: u64) {
        self.0.retain(|&(_, end)| end > floor);
        if let Some((start, _)) = self.0.first_mut() {
            *start = (*start).max(floor);
        }
    }

    fn contains(&self, from: u64, to: u64) -> bool {
        from >= to || self.0.iter().any(|&(a, b)| a <= from && to <= b)
    }

    /// The parts of `[from, to)` that are not in it.
    fn gaps(&self, from: u64, to: u64) -> Vec<(u64, u64)> {
        let mut gaps = Vec::new();
        let mut at = from;
        for &(a, b) in self.0.iter().filter(|(a, b)| *b > from && *a < to) {
            if at < a {
                gaps.push((at, a));
            }
            at = at.max(b);
        }
        if at < to {
            gaps.push((at, to));
        }
        gaps
    }
}

/// The engine's flow at one instant.
#[derive(Clone, Debug)]
pub(super) struct Seen {
    pub(super) state: State,
    pub(super) guest_una: u64,
    pub(super) guest_nxt: u64,
    pub(super) guest_edge: u64,
    pub(super) rcv_nxt: u64,
    pub(super) edge_to_net: u64,
    pub(super) fin: u64,
    pub(super) net_una: u64,
    pub(super) net_nxt: u64,
    pub(super) ooo_end: Option<u64>,
    pub(super) guest_isn: Seq,
    pub(super) reset_waits: bool,
    /// Bytes that the flow claims to have.
    held: Spans,
}

impl Seen {
    pub(super) fn of(flow: &Flow) -> Self {
        let at = flow.stats();
        let mut held = Spans::default();
        flow.out_of_order().iter().for_each(|(from, to)| held.insert(from, to));
        assert!(
            flow.out_of_order().iter().all(|(from, _)| from > at.rcv_nxt),
            "out of order, and next"
        );
        held.insert(at.guest_una, at.rcv_nxt);
        Self {
            state: flow.state(),
            guest_una: at.guest_una,
            guest_nxt: at.guest_nxt,
            guest_edge: at.guest_edge,
            rcv_nxt: at.rcv_nxt,
            edge_to_net: at.edge_to_net,
            fin: at.fin_from_net.unwrap_or(NONE),
            net_una: at.net_una,
            net_nxt: at.net_nxt,
            ooo_end: flow.out_of_order().max_end(),
            guest_isn: at.guest_isn,
            reset_waits: at.reset_waits,
            held,
        }
    }

    /// Every packet of it passes a gate.
    pub(super) const fn is_gated(&self) -> bool {
        matches!(self.state, State::On | State::Drain)
    }
}

/// How a frame came out.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum How {
    /// Made by the engine.
    Made,
    /// One end's own, edited.
    Gated,
    /// One end's own, unchanged.
    Verbatim,
}

/// The negotiated options.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Agreed {
    pub(super) timestamps: bool,
    pub(super) sack: bool,
    pub(super) shift: [u8; 2],
}

/// One connection, from one handshake to the next.
#[derive(Debug)]
pub(super) struct Model {
    pub(super) agreed: Agreed,
    /// First byte of each end's stream.
    pub(super) first: [u64; 2],
    /// End of the bytes of each end.
    pub(super) end: [u64; 2],
    /// Every TSval of each end, and the newest that the *other* was shown.
    pub(super) tsvals: [BTreeSet<u32>; 2],
    pub(super) tsval_to: [Option<u32>; 2],
    /// Highest acknowledgement each end was shown; R's highest right edge.
    pub(super) ack_to: [u64; 2],
    pub(super) edge_to_r: u64,
    /// Highest acknowledgement to R that we are answerable for.
    promised: u64,
    /// R's bytes are acknowledged late (LIFE-12).
    late: bool,
    /// G was not told yet that the connection is gone.
    pub(super) owed_to_g: bool,
    /// Bytes that were given to G in any way, a FIN like a byte; and the highest that it is
    /// believed to have.
    got: Spans,
    /// Those of them that an honest G took: no more than its window had room for.
    has: Spans,
    /// The end of the lowest FIN that it was given.
    last: u64,
    guest_una: u64,
    /// R's bytes that were taken: their ranges, and their content from `base` on.
    known: Spans,
    bytes: Vec<u8>,
    base: u64,
    /// An RST went to this end.
    pub(super) reset: [bool; 2],
    /// A SYN made something new of it: nothing is known until the next handshake.
    pub(super) lost: bool,
    /// The present segments are that handshake.
    pub(super) shakes: bool,
}

impl Model {
    pub(super) fn new(isn: [u32; 2], agreed: Agreed) -> Self {
        let first = isn.map(|isn| unwrapped_isn(Seq(isn)) + 1);
        Self {
            agreed,
            first,
            end: first,
            tsvals: Default::default(),
            tsval_to: [None; 2],
            ack_to: first,
            promised: first[R],
            late: false,
            edge_to_r: 0,
            got: Spans::default(),
            has: Spans::default(),
            last: u64::MAX,
            guest_una: first[R],
            owed_to_g: false,
            known: Spans::default(),
            bytes: Vec::new(),
            base: first[R],
            reset: [false; 2],
            lost: false,
            shakes: false,
        }
    }

    /// An unopened connection.
    pub(super) fn unknown() -> Self {
        Self { lost: true, ..Self::new([0; 2], Agreed::default()) }
    }

    /// An honest G's acknowledgement: the end of its bytes, up to a FIN.
    pub(super) fn got_end(&self) -> u64 {
        self.has.run_from(self.guest_una).min(self.last.max(self.guest_una))
    }

    fn index(&self, at: u64) -> usize {
        usize::try_from(at - self.base).expect("within a window")
    }

    /// One end sends a segment. A corrupt segment was never sent, except for its timestamp.
    pub(super) fn on_sent(&mut self, from: usize, tcp: &Tcp, corrupt: bool) {
        if let Some(ts) = tcp.options.timestamps {
            self.tsvals[from].insert(ts.tsval);
        }
        if tcp.flags.0 & u16::from(SYN | RST) == 0 && !(corrupt && from == R) {
            let end = tcp.seq.unwrap(self.end[from]) + u64::from(tcp.seq_len());
            self.end[from] = self.end[from].max(end);
        }
    }

    /// A segment with SYN has reached a flow: notes whether the flow is another one since.
    pub(super) fn on_syn(&mut self, was_gated: bool, is_gated: bool) {
        self.lost |= !(self.shakes || was_gated && is_gated);
    }

    /// A frame of R went in while every packet passed a gate.
    pub(super) fn on_from_net(
        &mut self,
        before: &Seen,
        after: &Seen,
        tcp: &Tcp,
        payload: &[u8],
        corrupt: bool,
    ) {
        let flags = tcp.flags.0;
        let from = tcp.seq.unwrap(before.rcv_nxt);
        let to = from + payload.len() as u64;
        let takes = !corrupt && flags & u16::from(SYN | RST | ACK) == u16::from(ACK);
        if takes {
            for &(a, b) in &after.held.0 {
                for (a, b) in self.known.gaps(a.max(from), b.min(to)) {
                    assert!(b <= before.edge_to_net, "a byte behind the edge was taken (INV-06)");
                    let has_ts = tcp.options.timestamps.is_some();
                    assert!(has_ts || !self.agreed.timestamps, "G would not take this (INV-25)");
                    self.learns(a, &payload[offset(a - from)..offset(b - from)]);
                }
            }
        }
        let fin_is_its = takes && flags & u16::from(FIN) != 0 && after.fin == to;
        assert!(after.fin == before.fin || fin_is_its, "a FIN from nowhere");
        assert_eq!(
            (after.guest_una, after.guest_edge),
            (before.guest_una, before.guest_edge),
            "R spoke, not G"
        );
        if after.net_nxt != before.net_nxt {
            // The engine believes R that G sends past the host (SNOOP-42): then the flow is on its
            // way out.
            let ack = tcp.ack.unwrap(before.net_una);
            assert!(!corrupt && after.net_nxt == ack && ack > before.net_nxt, "R spoke, not G");
            assert!(after.state != State::On, "a flow that is past the host stays");
            self.end[G] = self.end[G].max(ack);
        }
        let ack_is_its = !corrupt && after.net_una == tcp.ack.unwrap(before.net_una);
        let settled = before.state == State::Handshake;
        assert!(settled || after.net_una == before.net_una || ack_is_its, "an ACK from nowhere");
        assert!(after.net_una <= self.end[G], "R acknowledged what was never sent (INV-12)");
    }

    fn learns(&mut self, from: u64, bytes: &[u8]) {
        let to = from + bytes.len() as u64;
        let end = self.index(to);
        if end > self.bytes.len() {
            self.bytes.resize(end, 0);
        }
        let start = self.index(from);
        self.bytes[start..end].copy_from_slice(bytes);
        self.known.insert(from, to);
    }

    /// A frame of G went in while every packet passed a gate.
    pub(super) fn on_from_guest(&mut self, before: &Seen, after: &Seen, tcp: &Tcp) {
        let ack = tcp.ack.unwrap(before.guest_una);
        if after.guest_una != before.guest_una {
            assert!(after.guest_una == ack && ack > before.guest_una, "G never acknowledged that");
            assert!(
                ack <= self.got.run_from(before.guest_una),
                "an ACK of what G never got (SNOOP-24)"
            );
        }
        self.guest_una = after.guest_una;
        let edge = ack + (u64::from(tcp.window) << self.agreed.shift[G]);
        assert!(
            after.guest_edge == before.guest_edge || after.guest_edge == edge,
            "G never showed this edge"
        );
        assert_eq!((after.net_una, after.fin), (before.net_una, before.fin), "G spoke, not R");
        let end = tcp.seq.unwrap(before.net_nxt) + u64::from(tcp.seq_len());
        assert!(after.net_nxt == before.net_nxt || after.net_nxt == end, "G never sent that");
    }

    /// No segment was sent.
    pub(super) fn on_nothing(&self, before: &Seen, after: &Seen) {
        let of = |s: &Seen| (s.guest_una, s.guest_edge, s.net_una, s.net_nxt, s.fin, s.rcv_nxt);
        assert_eq!(of(before), of(after), "time alone moves nothing");
    }

    /// A frame goes to one end. `at`: the flow when it left.
    pub(super) fn on_emitted(&mut self, to: usize, at: Option<&Seen>, how: How, frame: &Out<'_>) {
        let tcp = frame.tcp;
        let flags = tcp.flags.0;
        if to == G {
            self.note_given(at, frame);
        }
        if flags & u16::from(RST) != 0 {
            self.reset[to] |= how != How::Verbatim;
            return;
        }
        let syn = flags & u16::from(SYN) != 0;
        if syn && at.is_some_and(Seen::is_gated) {
            return; // a repeated one, which an established end challenges and does not read
        }
        if self.lost || syn || how == How::Verbatim {
            self.note_verbatim(to, frame);
            return;
        }
        self.check_timestamps(to, how, tcp);
        if flags & u16::from(ACK) != 0 {
            // A G that jumps about may be half the circle ahead of the last number that it was
            // told.
            let near = at.filter(|at| to == G && at.is_gated()).map(|at| at.net_una);
            let ack = tcp.ack.unwrap(near.unwrap_or(self.ack_to[to]));
            assert!(ack >= self.ack_to[to], "an ACK moved back (INV-07)");
            if to == G && how == How::Gated && frame.payload.is_empty() && ack > self.end[G] {
                return; // R's own, for what H did not see G send: G judges it (SNOOP-42)
            }
            assert!(ack <= self.end[to], "an ACK of what was never sent (INV-11)");
            self.ack_to[to] = ack;
            if to == R {
                self.promised = ack;
                self.check_edge(ack + (u64::from(tcp.window) << self.agreed.shift[G]));
                self.check_sack(tcp);
            }
        }
        match at {
            Some(at) if to == G && at.is_gated() => self.check_delivery(at, how, frame),
            _ => {}
        }
    }

    /// The numbers that count before anything is promised by us.
    fn note_verbatim(&mut self, to: usize, frame: &Out<'_>) {
        let tcp = frame.tcp;
        if let Some(ts) = tcp.options.timestamps {
            self.tsval_to[to] = Some(ts.tsval);
        }
        if tcp.flags.0 & u16::from(ACK) == 0 {
            return;
        }
        let ack = tcp.ack.unwrap(self.ack_to[to]);
        self.ack_to[to] = self.ack_to[to].max(ack.min(self.end[to]));
        if to == R {
            let syn = tcp.flags.0 & u16::from(SYN) != 0;
            let shift = if syn { 0 } else { self.agreed.shift[G] };
            self.edge_to_r = ack + (u64::from(tcp.window) << shift);
        }
    }

    fn note_given(&mut self, at: Option<&Seen>, frame: &Out<'_>) {
        let tcp = frame.tcp;
        if tcp.flags.0 & u16::from(SYN | RST) != 0 {
            return;
        }
        let from = tcp.seq.unwrap(self.guest_una);
        if tcp.seq_len() == 0 {
            return;
        }
        let to = from + u64::from(tcp.seq_len());
        self.got.insert(from, to);
        if tcp.flags.0 & u16::from(FIN) != 0 {
            self.last = self.last.min(to);
        }
        let room =
            at.filter(|at| at.is_gated()).map_or(u64::MAX, |at| at.guest_edge.max(at.guest_nxt));
        self.has.insert(from, to.min(room));
    }

    /// INV-05, with the exception of RFC 7323 section 2.4: less than the unit of the field.
    fn check_edge(&mut self, edge: u64) {
        let unit = 1 << self.agreed.shift[G];
        assert!(edge + unit > self.edge_to_r, "the edge moved left (INV-05)");
        self.edge_to_r = self.edge_to_r.max(edge);
    }

    /// INV-08, INV-09, COM-21.
    fn check_timestamps(&mut self, to: usize, how: How, tcp: &Tcp) {
        let Some(ts) = tcp.options.timestamps else {
            assert!(how == How::Gated || !self.agreed.timestamps, "no timestamp (COM-21)");
            return;
        };
        if !self.agreed.timestamps {
            assert!(how == How::Gated, "a timestamp that was not agreed on (COM-21)");
            return;
        }
        assert!(self.tsvals[1 - to].contains(&ts.tsval), "a TSval of nobody (INV-09)");
        let newest = self.tsval_to[to].replace(ts.tsval);
        assert!(newest.is_none_or(|n| Seq(n).le(Seq(ts.tsval))), "TSval moved back (INV-08)");
        if to == R {
            let echo = self.tsvals[R].contains(&ts.tsecr);
            assert!(echo, "an echo of nothing that R sent");
        }
    }

    /// Behind the first block, which may name a duplicate, only held bytes (RFC 2018, RFC 2883).
    fn check_sack(&self, tcp: &Tcp) {
        let blocks = tcp.options.sack;
        assert!(self.agreed.sack || blocks.is_empty(), "SACK was not agreed on (COM-22)");
        for (n, (from, to)) in blocks.as_slice().iter().enumerate() {
            let (from, to) = (from.unwrap(self.ack_to[R]), to.unwrap(self.ack_to[R]));
            assert!(from < to && to <= self.end[R], "SACK of what was never sent");
            let held = from > self.ack_to[R] && self.known.contains(from, to);
            assert!(n == 0 || held, "SACK of what is not held");
        }
    }

    /// INV-01, INV-10, INV-13, INV-15.
    fn check_delivery(&self, at: &Seen, how: How, frame: &Out<'_>) {
        let tcp = frame.tcp;
        let from = tcp.seq.unwrap(at.guest_una);
        let to = from + frame.payload.len() as u64;
        let flags = tcp.flags.0 & u16::from(FIN | URG);
        if frame.payload.is_empty() && flags == 0 {
            let given = at.guest_nxt.max(self.got.run_from(at.guest_una));
            assert!(from + 1 >= at.guest_una && from <= given, "G would not take this (INV-10)");
            return;
        }
        if how == How::Gated {
            return; // urgent or odd: R answers for its numbers
        }
        assert!(flags == 0 || to == at.fin, "a FIN in the wrong place");
        assert!(from >= at.guest_una, "G has this already");
        assert!(to <= at.guest_edge || to <= at.guest_nxt, "more than G has room for (INV-13)");
        assert!(self.known.contains(from, to), "a byte from nowhere (INV-01)");
        if from < to {
            let right = &self.bytes[self.index(from)..self.index(to)];
            assert!(frame.payload == right, "G gets another byte than was taken (INV-15)");
        }
    }

    /// Between two steps: promised bytes are there.
    pub(super) fn check(&mut self, flow: Option<(&Flow, &Seen)>, arena: &Arena<'_>) {
        if self.lost {
            return;
        }
        let Some((flow, seen)) = flow.filter(|(_, seen)| seen.is_gated()) else {
            assert!(self.promised <= self.guest_una || self.reset[R], "a broken promise (INV-03)");
            return;
        };
        self.late = flow.acknowledges_late();
        self.known.remove_below(seen.guest_una);
        self.trim(seen.guest_una);
        assert!(self.known == seen.held, "taken {:?}, held {:?}", self.known, seen.held);
        let fin_too = self.promised == seen.guest_una;
        assert!(self.promised <= seen.rcv_nxt || fin_too, "an ACK of nothing (INV-03)");
        assert!(seen.edge_to_net >= self.edge_to_r, "R was shown more than is remembered (INV-05)");
        assert!(seen.guest_una == self.guest_una && seen.guest_nxt >= seen.guest_una);
        for &(from, to) in &self.known.0 {
            let mut right = &self.bytes[self.index(from)..self.index(to)];
            for piece in flow.store().slices(arena, from, to) {
                let (now, later) = right.split_at(piece.len());
                assert!(piece == now, "the store has another byte than was taken (INV-15)");
                right = later;
            }
            assert!(right.is_empty(), "the store has fewer bytes than were taken (INV-03)");
        }
        self.check_record(flow, seen, arena);
    }

    /// A successor would find the promised bytes, in pages with the right owner (LIFE-09).
    fn check_record(&self, flow: &Flow, seen: &Seen, arena: &Arena<'_>) {
        let Some(rec) = flow.record() else {
            let owed = seen.rcv_nxt.saturating_sub(seen.guest_una);
            assert!(owed == 0 && flow.store().held_pages() == 0, "bytes without a record");
            return;
        };
        let record = arena.record(rec).expect("a valid record");
        let said = (record.guest_una, record.edge_to_net);
        let is = (seen.guest_una.min(seen.rcv_nxt), seen.edge_to_net);
        assert_eq!(said, is, "the record lags behind");
        // Of bytes that are acknowledged late it has those that R was acknowledged (LIFE-12).
        let shown = self.ack_to[R].min(seen.rcv_nxt);
        let least = if flow.acknowledges_late() { shown } else { seen.rcv_nxt };
        let promised = record.rcv_nxt;
        assert!((least..=seen.rcv_nxt).contains(&promised), "the record lags behind: {promised}");
        let owed = promised.saturating_sub(seen.guest_una);
        let mut found = 0;
        for (_, page_no, page) in arena.owned_pages().filter(|(id, ..)| *id == rec) {
            let start = page_no * PAGE as u64;
            let (from, to) = (start.max(seen.guest_una), (start + PAGE as u64).min(promised));
            if from < to {
                let right = &self.bytes[self.index(from)..self.index(to)];
                let bytes = &arena.page(page)[offset(from - start)..offset(to - start)];
                assert!(bytes == right, "a successor would find another byte");
                found += to - from;
            }
        }
        assert_eq!(found, owed, "a successor would find another number of bytes");
    }

    fn trim(&mut self, floor: u64) {
        let below = self.index(floor.max(self.base)).min(self.bytes.len());
        if floor > self.base && below >= SLACK {
            self.bytes.drain(..below);
            self.base += below as u64;
        }
        if self.known.0.is_empty() && floor > self.base {
            self.bytes.clear();
            self.base = floor;
        }
    }

    /// End of the bytes that R believes delivered, or may soon, and where those G lacks begin.
    pub(super) fn owed(&self) -> (u64, u64) {
        let held = self.known.run_from(self.guest_una);
        let end = if self.late { held.min(self.ack_to[R]).max(self.guest_una) } else { held };
        (self.guest_una, if self.lost || self.reset[R] { self.guest_una } else { end })
    }

    /// Whether a record may say that R was acknowledged this: of bytes that are acknowledged late
    /// some may have been acknowledged by a frame that has not left.
    pub(super) fn may_have_promised(&self, end: u64) -> bool {
        let (_, least) = self.owed();
        end == least || self.late && (least..=self.known.run_from(self.guest_una)).contains(&end)
    }

    /// Bytes that were taken.
    pub(super) fn taken(&self, from: u64, to: u64) -> &[u8] {
        &self.bytes[self.index(from)..self.index(to)]
    }
}

/// A frame that came out.
pub(super) struct Out<'a> {
    pub(super) tcp: &'a Tcp,
    pub(super) payload: &'a [u8],
}

fn offset(distance: u64) -> usize {
    usize::try_from(distance).expect("within a frame")
}

/// A number that stands for "none" is no place.
pub(super) fn place(at: u64, otherwise: u64) -> u64 {
    if at == NONE { otherwise } else { at }
}
