//! The invariants of the specification, checked on everything that leaves the engine.
//!
//! The monitor knows what each end sent and what each end was sent, never what the engine thinks,
//! but for one question: are the bytes below an ACK to R held? For that it reads the store and
//! compares byte by byte.

use std::collections::{BTreeMap, BTreeSet};

use super::segment::{Seen, pattern};
use super::setup::Setup;
use super::world::Side;
use nightporter_core::engine::Engine;
use nightporter_core::port::PortId;
use nightporter_core::tcp::flow::{Flow, State};
use nightporter_core::wire::checksum::{Checksum, sum};
use nightporter_core::wire::packet::{Ip, IpVersion, Seq, Tcp, tcp_pseudo_header};

/// Relative numbers are unwrapped around this, so that one below the first is positive too.
const BASE: u64 = 1 << 32;

/// What one end has sent, and what it was sent.
#[derive(Debug)]
struct Half {
    /// End of its stream so far, SYN and FIN counted.
    end: u64,
    /// Its FIN.
    fin: Option<u64>,
    /// Highest ACK it sent, and the edge that came with the newest.
    acked: u64,
    edge: u64,
    /// Its newest ACK, true or not.
    said: u32,
    /// TSvals it sent.
    tsvals: BTreeSet<u32>,
    /// Bytes it sent that are not the pattern; the first copy counts.
    bytes: BTreeMap<u64, u8>,
    /// Highest ACK, edge and TSval it was sent.
    ack_to: u64,
    edge_to: u64,
    tsval_to: Option<u32>,
    /// End of what it was sent.
    end_to: u64,
}

/// See the module doc.
#[derive(Debug)]
pub struct Monitor {
    halves: [Half; 2],
    isn_r: u32,
    ts: bool,
    sack: bool,
    shift: [u8; 2],
    /// Window scale, timestamps, SACK of the ends that made their offers themselves.
    offers: [Option<(Option<u8>, bool, bool)>; 2],
    /// Bytes that other copies may differ from: content is then only checked for INV-15.
    emitted: BTreeMap<u64, u8>,
    custom: bool,
    /// An RST went to this end: what follows is no stream any more.
    reset: [bool; 2],
    /// The streams end here: reset, forgotten, restarted.
    pub lenient: bool,
    /// What goes in is not worth checking what comes out.
    pub blind: bool,
    /// The edge may not even move left by less than the unit of the window field. It must do so
    /// (and may, RFC 7323 section 2.4) once rounding up would promise more than is reserved.
    pub strict_edge: bool,
    /// G sends past the engine, which does not know at once how far (SNOOP-42).
    pub unseen: bool,
    /// The handshake is over.
    settled: bool,
    /// Bytes below this were found in the store, and how often it was looked into.
    read_to: u64,
    settled_count: u32,
}

impl Monitor {
    pub fn new(setup: &Setup) -> Self {
        let half = || Half {
            end: BASE,
            fin: None,
            acked: BASE,
            edge: BASE,
            said: 0,
            tsvals: BTreeSet::new(),
            bytes: BTreeMap::new(),
            ack_to: BASE,
            edge_to: BASE,
            tsval_to: None,
            end_to: BASE,
        };
        let scaled = setup.scale[0].is_some() && setup.scale[1].is_some();
        let shift = |i: usize| setup.scale[i].filter(|_| scaled).map_or(0, |s| s.min(14));
        Self {
            halves: [half(), half()],
            isn_r: setup.isn[0],
            ts: Setup::both(setup.ts),
            sack: Setup::both(setup.sack),
            shift: [shift(0), shift(1)],
            offers: [None; 2],
            emitted: BTreeMap::new(),
            custom: false,
            reset: [false; 2],
            lenient: false,
            blind: false,
            strict_edge: false,
            unseen: false,
            settled: false,
            read_to: BASE,
            settled_count: 0,
        }
    }

    /// An end of which nothing was known sent its SYN or SYN-ACK.
    pub fn on_offer(&mut self, side: Side, tcp: &Tcp) {
        let o = &tcp.options;
        if side == Side::R {
            self.isn_r = tcp.seq.0;
        }
        self.offers[side as usize] =
            Some((o.window_scale, o.timestamps.is_some(), o.sack_permitted));
        if let [Some(r), Some(g)] = self.offers {
            let shift = |own: Option<u8>, other: Option<u8>| {
                own.filter(|_| other.is_some()).map_or(0, |s| s.min(14))
            };
            self.shift = [shift(r.0, g.0), shift(g.0, r.0)];
            self.ts = r.1 && g.1;
            self.sack = r.2 && g.2;
        }
    }

    /// The window shift of an end.
    pub fn shift(&self, side: Side) -> u8 {
        self.shift[side as usize]
    }

    /// An end sent a segment. One with a bad checksum counts for nothing but its timestamp, and
    /// the ACK of a liar is not believed.
    pub fn on_sent(&mut self, side: Side, seen: &Seen, bad: bool, lies: bool) {
        let tcp = seen.tcp();
        let half = &mut self.halves[side as usize];
        if let Some(ts) = tcp.options.timestamps {
            half.tsvals.insert(ts.tsval);
        }
        let seq = unwrap(tcp.seq.0.wrapping_sub(seen.isn[0]), half.end);
        if tcp.flags.rst() && !bad && seq == half.end {
            self.reset[side as usize] = true; // it wants nothing any more
        }
        if bad || tcp.flags.rst() {
            return;
        }
        let mut end = seq + u64::from(tcp.payload_len);
        for (at, byte) in (seq..).zip(seen.payload()) {
            if *byte != pattern(side as u32, low(at)) || half.bytes.contains_key(&at) {
                self.custom = true;
                half.bytes.entry(at).or_insert(*byte);
            }
        }
        if tcp.flags.fin() {
            half.fin = Some(end);
            end += 1;
        }
        half.end = half.end.max(end + u64::from(tcp.flags.syn()));
        half.said = tcp.ack.0.wrapping_sub(seen.isn[1]);
        if tcp.flags.ack() && !lies {
            let ack = unwrap(tcp.ack.0.wrapping_sub(seen.isn[1]), half.acked);
            let shift = if tcp.flags.syn() { 0 } else { self.shift[side as usize] };
            if ack >= half.acked && ack < half.acked + (1 << 30) {
                half.acked = ack;
                half.edge = ack + (u64::from(tcp.window) << shift);
            }
        }
    }

    /// A frame goes to `to`. `gated`: H made it or let it through a gate; else it was forwarded as
    /// it came in, and only what holds of any forwarding is checked.
    pub fn on_emitted(&mut self, to: Side, seen: &Seen, gated: bool) -> Result<(), String> {
        if self.blind {
            return Ok(());
        }
        checksums_right(seen)?;
        let tcp = seen.tcp();
        if tcp.flags.rst() {
            self.reset[to as usize] = true;
            return Ok(());
        }
        if tcp.flags.syn() {
            self.note_tsval(to, seen);
            return Ok(());
        }
        self.settled = true;
        if self.lenient || !gated {
            self.note_forwarded(to, seen);
            return Ok(());
        }
        let has_ts = tcp.options.timestamps.is_some();
        ensure(has_ts == self.ts, "timestamps on every segment or on none (COM-21)")?;
        let may_sack = self.sack || tcp.options.sack.is_empty();
        ensure(may_sack, "SACK was not agreed on (COM-22)")?;
        self.check_tsval(to, seen)?;
        if tcp.flags.ack() {
            self.check_ack(to, seen)?;
        }
        self.check_bytes(to, seen)
    }

    fn note_tsval(&mut self, to: Side, seen: &Seen) {
        if let Some(ts) = seen.tcp().options.timestamps {
            self.halves[to as usize].tsval_to = Some(ts.tsval);
        }
    }

    fn note_forwarded(&mut self, to: Side, seen: &Seen) {
        self.note_tsval(to, seen);
        let half = &mut self.halves[to as usize];
        let ack = unwrap(seen.ack(), half.ack_to);
        half.ack_to = half.ack_to.max(ack);
        half.edge_to = half.edge_to.max(ack + u64::from(seen.window()));
        let from = unwrap(seen.range().0, half.end_to);
        half.end_to = half.end_to.max(from + u64::from(seen.tcp().seq_len()));
    }

    /// INV-08 and INV-09.
    fn check_tsval(&mut self, to: Side, seen: &Seen) -> Result<(), String> {
        let Some(ts) = seen.tcp().options.timestamps else { return Ok(()) };
        let authentic = self.halves[to.other() as usize].tsvals.contains(&ts.tsval);
        ensure(authentic, "TSval that its owner never sent (INV-09)")?;
        let half = &mut self.halves[to as usize];
        let newest = half.tsval_to.replace(ts.tsval);
        // A 0, as some put into a SYN, counts for nothing (`tcp_paws_check`).
        let monotone = newest.is_none_or(|b| b == 0 || Seq(b).le(Seq(ts.tsval)));
        ensure(monotone, "TSval moved back (INV-08)")
    }

    /// INV-04, INV-05, INV-07, INV-11.
    fn check_ack(&mut self, to: Side, seen: &Seen) -> Result<(), String> {
        let guest_acked = self.halves[Side::G as usize].acked;
        let said = self.halves[Side::R as usize].said;
        let half = &mut self.halves[to as usize];
        let ack = unwrap(seen.ack(), half.ack_to);
        let bare = seen.tcp().payload_len == 0;
        if to == Side::G && bare && seen.ack() == said && (ack > half.end || self.unseen) {
            return Ok(()); // R's own word, for G to judge
        }
        ensure(ack >= half.ack_to, "ACK moved back (INV-07)")?;
        ensure(ack <= half.end, "ACK of what was never sent (INV-11)")?;
        half.ack_to = ack;
        let edge = ack + u64::from(seen.window());
        if to == Side::R {
            let unit = 1 << self.shift[Side::G as usize];
            let least = half.edge_to - if self.strict_edge { 0 } else { unit - 1 };
            ensure(edge >= least, "right edge moved left (INV-05)")?;
            half.edge_to = half.edge_to.max(edge);
            let fin_early = half.fin.is_some_and(|fin| ack > fin) && guest_acked < ack;
            ensure(!fin_early, "FIN acknowledged before G did (INV-04)")?;
        }
        Ok(())
    }

    /// INV-01, INV-02, INV-10, INV-13, INV-15.
    fn check_bytes(&mut self, to: Side, seen: &Seen) -> Result<(), String> {
        let source = &self.halves[to.other() as usize];
        let receiver = &self.halves[to as usize];
        let from = unwrap(seen.range().0, receiver.end_to);
        let len = u64::from(seen.tcp().payload_len);
        let end = from + len + u64::from(seen.tcp().flags.fin());
        ensure(end <= source.end.max(receiver.acked), "sequence range of nobody (INV-10)")?;
        if seen.tcp().flags.fin() {
            ensure(source.fin == Some(from + len), "a FIN in the wrong place")?;
        }
        if to == Side::G && end > receiver.end_to {
            let fits = end <= receiver.edge;
            ensure(fits, &format!("new bytes beyond G's edge {} (INV-13)", receiver.edge - BASE))?;
        }
        for (at, byte) in (from..).zip(seen.payload()) {
            let expected = source.bytes.get(&at).copied().unwrap_or(pattern_at(to.other(), at));
            ensure(self.custom || *byte == expected, "a byte was changed (INV-01, INV-02)")?;
            if self.custom && to == Side::G {
                let first = *self.emitted.entry(at).or_insert(*byte);
                ensure(first == *byte, "two copies of a byte differ (INV-15)")?;
            }
        }
        if len == 0 && !seen.tcp().flags.fin() && to == Side::R {
            let probe = from + 1 == receiver.acked;
            let fits = from >= receiver.acked && from <= source.end;
            ensure(
                probe || fits || self.unseen,
                "sequence of a pure ACK is unacceptable (INV-10)",
            )?;
        }
        let half = &mut self.halves[to as usize];
        half.end_to = half.end_to.max(end);
        Ok(())
    }

    /// Between events: INV-03 by reading the store, INV-06 by counting.
    pub fn on_settled(
        &mut self,
        flow: Option<&Flow>,
        engine: &Engine<'_>,
        port: u16,
    ) -> Result<(), String> {
        let r = &self.halves[Side::R as usize];
        let g = &self.halves[Side::G as usize];
        if let Some(vm) = engine.vm(PortId(port)) {
            ensure(vm.reserved_pages <= vm.budget_pages, "reserved more than the budget (INV-06)")?;
        }
        if self.blind || self.lenient || self.reset[0] || !self.settled {
            return Ok(());
        }
        let promised = r.ack_to.min(r.fin.unwrap_or(u64::MAX));
        if promised <= g.acked {
            return Ok(());
        }
        let Some(flow) = flow.filter(|f| matches!(f.state(), State::On | State::Drain)) else {
            return Err(format!("{} bytes promised and no flow (INV-03)", promised - g.acked));
        };
        let held = flow.stats().guest_una..flow.stats().rcv_nxt;
        let una = unwrap(low(held.start).wrapping_sub(self.isn_r), g.acked);
        ensure(una <= g.acked, "bytes were let go before G acknowledged them (INV-03)")?;
        ensure(una + (held.end - held.start) >= promised, "a promise nobody holds (INV-03)")?;
        // What is newly promised every time, all of it now and then: this is most of the time of
        // the tests.
        self.settled_count += 1;
        let all = self.settled_count.is_multiple_of(64);
        let from = if all { una } else { self.read_to.clamp(una, promised) };
        self.read_to = promised;
        let start = held.start + (from - una);
        let end = held.start + (promised - una);
        let mut at = from;
        for byte in flow.store().slices(engine.arena(), start, end).flatten() {
            let right = self.custom || *byte == pattern_at(Side::R, at);
            ensure(right, "the store holds another byte than R sent (INV-03)")?;
            at += 1;
        }
        ensure(at == promised, "fewer bytes in the store than it should hold (INV-03)")
    }

    /// End of what R was promised, relative.
    pub fn acked_to(&self, side: Side) -> u32 {
        low(self.halves[side as usize].ack_to)
    }
}

fn pattern_at(side: Side, at: u64) -> u8 {
    pattern(side as u32, low(at))
}

fn low(n: u64) -> u32 {
    Seq::wrap(n).0
}

fn unwrap(relative: u32, near: u64) -> u64 {
    Seq(relative).unwrap(near)
}

fn ensure(ok: bool, what: &str) -> Result<(), String> {
    if ok { Ok(()) } else { Err(what.to_owned()) }
}

/// INV-22: full and right, or partial and said so.
pub fn checksums_right(seen: &Seen) -> Result<(), String> {
    let (ip, tcp) = seen.packet.tcp().ok_or("no TCP segment")?;
    let start = usize::from(ip.payload_offset);
    let segment = &seen.bytes[start..ip.end as usize];
    if ip.version == IpVersion::V4 {
        let mut header = Checksum::new(0);
        header.add_bytes(&seen.bytes[usize::from(ip.header_offset)..start]);
        ensure(header.finish() == 0, "IPv4 header checksum (INV-22)")?;
    }
    let field = u16::from_be_bytes([segment[16], segment[17]]);
    if seen.hdr.needs_csum() {
        let pseudo = Checksum::new(pseudo(ip, segment.len())).fold();
        ensure(field == pseudo, "partial checksum is not the pseudo-header's (INV-22)")?;
        let placed = usize::from(seen.hdr.csum_start) == start && seen.hdr.csum_offset == 16;
        ensure(placed, "the virtio header points elsewhere (INV-22)")?;
        let whole = !seen.hdr.is_gso() || seen.hdr.gso_size > 0;
        return ensure(whole, "a super-segment without a size");
    }
    ensure(!seen.hdr.is_gso(), "a super-segment with a full checksum")?;
    let total = Checksum::new(sum(segment, pseudo(ip, segment.len()))).finish();
    ensure(total == 0, &format!("TCP checksum of {tcp} (INV-22)"))
}

fn pseudo(ip: &Ip, len: usize) -> u64 {
    tcp_pseudo_header(ip.version, ip.src, ip.dst, u32::try_from(len).expect("small"))
}
