//! Judges two captures of a run: one of the uplink, one of a guest's port.
//!
//! An [`observer`](crate::observer) watches frames and an engine. Here there are only frames, from
//! a real host or a simulated one, so the engine's state has to follow from them: a segment that
//! leaves exactly as it came in was passed on, unless its flow owes the guest bytes; any other of
//! an open connection was made or edited by a flow with offload. Streams are not known either;
//! bytes are compared with those that their sender sent into the other capture. A flow is watched
//! from its SYN on.
//!
//! | Checked | How |
//! |---|---|
//! | INV-01, 02 | every copy of a byte is the one that came in; not that all of them arrive |
//! | INV-04, 05, 07 to 16, 18, 23 to 25 | as in a simulated run; of 18 packet storms only |
//! | INV-17 | if offload was off all the time ([`Options::offload`]): nothing may change |
//! | INV-19 | no answer for a guest that was silent for minutes |
//! | INV-21 | no RST to G before bytes that R was promised |
//! | ECHO, DUPLICATES, ODD-ACKS | as in a simulated run |
//! | FIELDS | the same, except pushes, lengths and virtio headers |
//! | WINDOW | that the edge moves by segments |
//! | INV-22 | a right checksum or a right partial one: captures do not show which |
//!
//! INV-03, 06 and 20 are about bytes that the host holds, which no capture shows. PROMPT-ACK,
//! RECOVERY and ECONOMY need to know when a flow is with offload and how much a guest has seen of
//! its ring, which captures do not show either. Nor do they show the ends of applications (the ends
//! of INV-01, 02, 18), the death of a daemon or commands of an operator (most of INV-21), and
//! forgeries.
//!
//! **Order.** The daemon stamps all frames of one turn with one time, the same in both captures. In
//! a turn it reads the uplinks, then the guests, then it gives the guests the frames that wait for
//! them; of an attached tap, whose ends are two ports, it reads the guest's first
//! ([`Options::attached`]). Frames of one time are put in this order (`read::Merged`). In captures
//! by other means, or of two clocks, effects seem to come before their causes.
//!
//! **A host that sends for its guests** ([`Options::sends`]): as in a simulated run, except that
//! the host's speed is not judged (INV-14), because captures do not show when it sends for a guest.
//!
//! Fragments are not put together: flows between addresses that send any are left out.

mod bytes;
mod read;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::io::Read;
use std::ops::Range;

use nightporter_core::limits::{PERSIST_MAX, T_PAUSED};
use nightporter_core::tcp::flow::State;
use nightporter_core::time::{Duration, Instant};
use nightporter_core::wire::virtio_net::VirtioNetHdr;

use crate::history::{BASE, History, Side};
use crate::out::Out;
use crate::rule::{Rule, Violation};
use crate::rules::{Verdict, check_out, checksums, quality};
use crate::tap::{FlowName, Tap, Tapped, fingerprint};
use crate::wire::{
    F_NEEDS_CSUM, Ip, IpAddr16, L4, Net, PROTOCOL_TCP, Packet, Seq, Tcp, TcpFlags, TcpOptions,
    ipv4_header_ok, pseudo_header, tcp_checksum_ok, unfinished,
};
use bytes::Bytes;
use read::{Frame, Frames, Merged};

/// A guest that is alive and has a connection sends a segment at least this often: it answers
/// probes of its window (INV-19).
const SILENT_MAX: Duration =
    Duration::from_nanos(T_PAUSED.as_nanos() + PERSIST_MAX.as_nanos() + 10_000_000_000);

/// Payload of a super-segment that counts as one packet more (INV-18).
const SEGMENT: u32 = 500;

/// Segments remembered because they may leave in pieces; a backlog holds no more.
const SUPERS_MAX: usize = 128;

/// Place of the first byte of a stream, after the SYN.
const FIRST: u64 = BASE + 1;

/// Findings that are kept; a connection has one at most.
const FINDINGS_MAX: usize = 100;

/// Information besides the captures.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Options {
    /// MACs of the guests whose ports were captured: they show the direction of a frame.
    pub guests: Vec<[u8; 6]>,
    /// Ack offload may have been on; if not, every segment must pass as it is.
    pub offload: bool,
    /// The host may have sent for the guests (congestion offload).
    pub sends: bool,
    /// Both captures go on to the end. Otherwise frames of one after the end of the other do not
    /// count, and a record that is cut off is forgiven.
    pub whole: bool,
    /// The guest's port is an attached tap, which is read before the other end of its wire.
    pub attached: bool,
}

/// A violation, when it was seen and in whose connection.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Finding {
    /// Time of the frame, from 1970 on if the captures say so.
    pub at: Instant,
    /// The guest's end and the remote's.
    pub flow: String,
    /// The violation.
    pub violation: Violation,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (s, ns) = (self.at.as_secs(), self.at.as_nanos() % 1_000_000_000);
        write!(f, "{s}.{ns:09} {}: {}", self.flow, self.violation)
    }
}

/// The result of a check.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Report {
    /// Frames in both captures.
    pub frames: u64,
    /// TCP segments that left the host and were checked.
    pub checked: u64,
    /// Of those, how many did not leave as they had come.
    pub made: u64,
    /// Connections watched.
    pub flows: u64,
    /// Of those, how many were offloaded at some time.
    pub offloaded: u64,
    /// Segments of connections that had begun before, which cannot be judged.
    pub unknown: u64,
    /// Violations, the first of each connection, up to a hundred.
    pub findings: Vec<Finding>,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { frames, checked, made, flows, offloaded, unknown, findings } = self;
        write!(
            f,
            "{flows} connections, {offloaded} offloaded at some time: of {frames} frames {checked} \
             segments left the host and were checked, {made} of them not as they had come; \
             {unknown} segments of other connections; {} violations",
            findings.len()
        )
    }
}

/// Checks two captures.
///
/// # Errors
/// One of them is no capture of whole Ethernet frames. The message names it and the fault.
pub fn check(remote: impl Read, guest: impl Read, options: &Options) -> anyhow::Result<Report> {
    let remote = Frames::new("remote side", Side::R, Box::new(remote), options.whole)?;
    let guest = Frames::new("guest side", Side::G, Box::new(guest), options.whole)?;
    let mut checker = Checker::new(options);
    let mut merged = Merged::new(remote, guest, options);
    while let Some(turn) = merged.next_turn()? {
        for frame in turn {
            checker.on_frame(&frame);
        }
    }
    Ok(checker.report())
}

/// One connection and the address it uses, for guests with several.
type Key = (IpAddr16, FlowName);

struct Flow {
    history: History,
    /// The bytes that came in from R, and from G.
    sent: [Bytes; 2],
    /// The bytes that went out to G.
    given: Bytes,
    /// Recent frames that may leave in pieces, the newest first.
    supers: VecDeque<Super>,
    /// R, then G, had ECE in its SYN.
    ecn: [bool; 2],
    /// Its SYN was seen to come in and to leave.
    begun: bool,
    /// It had a violation: later ones are its consequences.
    wrong: bool,
}

/// A long segment that came in: bytes of the stream, ACK, window and options.
struct Super {
    from: Side,
    bytes: Range<u64>,
    head: (Seq, u16, TcpOptions),
}

struct Checker<'o> {
    options: &'o Options,
    flows: BTreeMap<Key, Flow>,
    /// Guest and remote address between which fragments were seen.
    fragmented: BTreeSet<(IpAddr16, IpAddr16)>,
    /// When each guest sent anything at all.
    heard: Vec<Option<Instant>>,
    report: Report,
}

/// A segment and where it was seen.
struct Seen<'a> {
    at: Instant,
    /// The sender.
    from: Side,
    /// It came into the host here; else it left.
    is_input: bool,
    bytes: &'a [u8],
    packet: &'a Packet,
    ip: &'a Ip,
    tcp: &'a Tcp,
}

impl<'o> Checker<'o> {
    fn new(options: &'o Options) -> Self {
        Self {
            options,
            flows: BTreeMap::new(),
            fragmented: BTreeSet::new(),
            heard: vec![None; options.guests.len()],
            report: Report::default(),
        }
    }

    fn on_frame(&mut self, frame: &Frame) {
        self.report.frames += 1;
        let Some((guest, from)) = sender(&frame.bytes, &self.options.guests) else { return };
        let is_input = from == frame.side;
        if is_input && from == Side::G {
            self.heard[usize::from(guest)] = Some(frame.at);
        }
        let Ok(packet) = Packet::parse(&frame.bytes) else { return };
        let Net::Ip(ip) = &packet.net else { return };
        let (own, remote) = if from == Side::G { (ip.src, ip.dst) } else { (ip.dst, ip.src) };
        let L4::Tcp(tcp) = &ip.l4 else {
            if ip.l4 == L4::Fragment && self.fragmented.insert((own, remote)) {
                self.flows.retain(|(ip, name), _| (*ip, name.remote) != (own, remote.0));
            }
            return;
        };
        let (guest_port, remote_port) = match from {
            Side::G => (tcp.src_port, tcp.dst_port),
            Side::R => (tcp.dst_port, tcp.src_port),
        };
        let key = (own, FlowName { guest, guest_port, remote: remote.0, remote_port });
        let begins = tcp.flags.syn() && !tcp.flags.ack();
        if begins && is_input && !self.fragmented.contains(&(own, remote)) {
            self.flows.entry(key).or_insert_with(|| Flow::new(key.1, self.options));
        }
        // Both captures must have its first segment, or one of them began later.
        let flow = self.flows.get_mut(&key).filter(|flow| begins || flow.begun);
        let Some(flow) = flow else {
            self.flows.remove(&key);
            self.report.unknown += 1;
            return;
        };
        flow.begun |= begins && !is_input;
        let bytes = &frame.bytes;
        let seen = Seen { at: frame.at, from, is_input, bytes, packet: &packet, ip, tcp };
        if is_input {
            flow.on_in(&seen);
            return;
        }
        self.report.checked += 1;
        let heard = self.heard[usize::from(guest)];
        match flow.on_out(&seen, heard) {
            Ok(gated) => self.report.made += u64::from(gated),
            Err((rule, what)) => {
                flow.wrong = true;
                if self.report.findings.len() < FINDINGS_MAX {
                    let flow = format!("{own}:{guest_port} <-> {remote}:{remote_port}");
                    let violation = Violation { rule, what, flow: Some(key.1) };
                    self.report.findings.push(Finding { at: frame.at, flow, violation });
                }
            }
        }
    }

    fn report(mut self) -> Report {
        self.report.flows = self.flows.values().filter(|f| f.begun).count() as u64;
        self.report.offloaded = self.flows.values().filter(|f| f.history.was_on).count() as u64;
        self.report
    }
}

impl Flow {
    fn new(name: FlowName, options: &Options) -> Self {
        let mut history = History::new(name, None, false, None);
        history.offline = true;
        history.known.floods = options.sends;
        history.state = (!options.offload && !options.sends).then_some(State::Pass);
        let [r, g, given] = [FIRST; 3].map(Bytes::new);
        Self {
            history,
            sent: [r, g],
            given,
            supers: VecDeque::new(),
            ecn: [false; 2],
            begun: false,
            wrong: false,
        }
    }

    /// A segment of R or G came in.
    fn on_in(&mut self, s: &Seen<'_>) {
        let h = &mut self.history;
        let print = fingerprint(s.bytes, s.ip);
        h.ends[s.from as usize].frames += u64::from(s.tcp.payload_len / SEGMENT);
        if !ipv4_header_ok(s.bytes, s.ip) || !(tcp_checksum_ok(s.bytes, s.ip) || s.partial()) {
            h.on_in_forged(s.from, print, true);
            return;
        }
        let isn = h.end(Side::G).isn;
        let at = h.unwrap(s.from, s.tcp.seq, h.end(s.from).end);
        h.on_in(&s.tapped(false), s.from, s.ip, s.tcp, print);
        quality::on_any(h, s.at, s.from, (s.ip, s.tcp));
        let g = h.end(Side::G);
        h.known.shrinks |= h.is_open() && g.edge + (1 << h.shift(Side::G)) <= g.edge_max;
        if s.tcp.flags.syn() {
            if s.from == Side::G && isn != h.end(Side::G).isn {
                let [r, g, given] = [FIRST; 3].map(Bytes::new);
                (self.sent, self.given) = ([r, g], given);
            }
            // A SYN offers with ECE and CWR, a SYN-ACK accepts with ECE alone (RFC 3168, 6.1.1).
            let offer = if s.tcp.flags.ack() { TcpFlags::NONE } else { TcpFlags::CWR };
            let both = s.tcp.flags.0 & (TcpFlags::ECE | TcpFlags::CWR).0;
            self.ecn[s.from as usize] = both == (TcpFlags::ECE | offer).0;
            h.known.ecn = self.ecn == [true; 2];
        } else if h.is_open() && !s.tcp.flags.rst() {
            self.sent[s.from as usize].put(at, s.payload());
            if s.tcp.payload_len > SEGMENT && (h.odd() || h.state == Some(State::Pass)) {
                let bytes = at..at + u64::from(s.tcp.payload_len);
                let head = (s.tcp.ack, s.tcp.window, s.tcp.options);
                self.supers.truncate(SUPERS_MAX - 1);
                self.supers.push_front(Super { from: s.from, bytes, head });
            }
            // Bytes that the receiver has taken are never compared again.
            self.sent[s.from.other() as usize].forget(h.end(s.from).acked);
            if s.from == Side::G {
                self.given.forget(h.end(Side::G).acked);
            }
        }
    }

    /// A segment left. Returns whether the host had a hand in it.
    fn on_out(&mut self, s: &Seen<'_>, heard: Option<Instant>) -> Result<bool, (Rule, String)> {
        let h = &mut self.history;
        let to = s.from.other();
        let print = fingerprint(s.bytes, s.ip);
        let unchanged = h.was_unchanged(to, print);
        if unchanged == Some(false) || self.wrong {
            return Ok(false);
        }
        // A flow that owes G anything does not pass: each of its segments went through a gate, and
        // it is chance if that changed nothing.
        let promised = h.end(Side::R).ack_to.min(h.end(Side::R).fin.unwrap_or(u64::MAX));
        let owes = h.is_open() && promised > h.end(Side::G).acked && !s.tcp.flags.syn();
        let gated = owes || unchanged.is_none() && !self.is_piece(s);
        let h = &mut self.history;
        h.cramped_at = s.at; // nobody knows what budget was left
        let o = h.out(&s.tapped(false), to, gated, s.ip, s.tcp);
        let result = judge(h, &o, s, heard).and_then(|()| self.compare(&o));
        self.history.on_out(&o);
        if to == Side::G && self.history.is_open() {
            self.given.put(o.seq, o.payload);
        }
        result.map(|()| gated)
    }

    /// Part of a super-segment that came in as it is, of a connection that must pass: a guest that
    /// takes none gets it in pieces.
    fn is_piece(&self, s: &Seen<'_>) -> bool {
        let h = &self.history;
        let (acked, window) = (s.tcp.ack, s.tcp.window);
        let at = h.unwrap(s.from, s.tcp.seq, h.end(s.from).end);
        let all = at..at + u64::from(s.tcp.payload_len);
        let of = |x: &Super| x.from == s.from && x.head == (acked, window, s.tcp.options);
        let holds = |x: &Super| x.bytes.start <= all.start && all.end <= x.bytes.end;
        let whole = self.sent[s.from as usize].differs(at, s.payload()).is_none();
        whole && !all.is_empty() && self.supers.iter().any(|x| of(x) && holds(x))
    }

    /// INV-01, INV-02 and INV-15 by the earlier frames in and out.
    fn compare(&self, o: &Out<'_>) -> Verdict {
        let h = &self.history;
        let flags = TcpFlags::SYN.union(TcpFlags::RST);
        if !o.gated || !h.is_open() || o.is_keepalive(h) || o.tcp.flags.intersects(flags) {
            return Ok(());
        }
        let number = |at: u64| at.wrapping_sub(FIRST);
        let sent = &self.sent[o.to.other() as usize];
        if !sent.contradicts
            && let Some(at) = sent.differs(o.seq, o.payload)
        {
            let rule = if o.to == Side::G { Rule::BytesToGuest } else { Rule::BytesToNet };
            return Err((rule, format!("byte {} of the stream was changed", number(at))));
        }
        let again = if o.to == Side::G { self.given.differs(o.seq, o.payload) } else { None };
        match again {
            Some(at) => Err((Rule::Immutable, format!("two copies of byte {} differ", number(at)))),
            None => Ok(()),
        }
    }
}

/// Asks every checker that can do without an engine.
fn judge(h: &History, o: &Out<'_>, s: &Seen<'_>, heard: Option<Instant>) -> Verdict {
    if o.gated {
        let hdr = s.tapped(s.partial() && !tcp_checksum_ok(s.bytes, s.ip)).hdr;
        checksums::on_out(&hdr, s.bytes, s.ip).map_err(|what| (Rule::Checksums, what))?;
        let silent = heard.is_some_and(|at| o.at.since(at) > SILENT_MAX);
        if o.to == Side::R && silent && h.asks && !o.tcp.flags.rst() {
            let what = "an answer for a guest of which nothing was heard for minutes";
            return Err((Rule::DeadGuest, what.to_owned()));
        }
    }
    check_out(h, o, false)
}

impl<'a> Seen<'a> {
    fn payload(&self) -> &'a [u8] {
        let from = self.tcp.payload_offset as usize;
        &self.bytes[from..from + self.tcp.payload_len as usize]
    }

    /// The checksum is the pseudo-header's: the receiver's driver has to finish it.
    fn partial(&self) -> bool {
        let start = usize::from(self.ip.payload_offset);
        let len = self.ip.end - u32::from(self.ip.payload_offset);
        let pseudo = pseudo_header(self.ip.version, self.ip.src, self.ip.dst, PROTOCOL_TCP, len);
        self.bytes[start + 16..start + 18] == unfinished(&pseudo)
    }

    fn tapped(&self, partial: bool) -> Tapped<'a> {
        let hdr = VirtioNetHdr {
            flags: if partial { F_NEEDS_CSUM } else { 0 },
            csum_start: self.ip.payload_offset,
            csum_offset: 16,
            ..VirtioNetHdr::default()
        };
        let (at, packet) = (self.at, Some(self.packet));
        let tap = if self.is_input { Tap::FromNet } else { Tap::ToNet }; // nobody looks at it
        Tapped { at, host: 0, tap, hdr, bytes: self.bytes, packet, forged: false, waited: true }
    }
}

/// The guest of a frame, and whether it or its remote sent it. `None` between two guests: the frame
/// passes two flows of which only the outer sides are seen.
fn sender(frame: &[u8], guests: &[[u8; 6]]) -> Option<(u16, Side)> {
    let place = |at: usize| {
        let mac = frame.get(at..at + 6)?;
        let guest = guests.iter().position(|g| g == mac)?;
        u16::try_from(guest).ok()
    };
    match (place(0), place(6)) {
        (Some(guest), None) => Some((guest, Side::R)),
        (None, Some(guest)) => Some((guest, Side::G)),
        _ => None,
    }
}
