//! A hostile machine: it speaks just enough TCP to establish its connections, then sends anything
//! with their addresses (P-06, P-07).
//!
//! As a remote it uses only addresses of its own, because the network decides which addresses it
//! may use. As a guest it uses any, and writes anything into its virtio headers; frames with
//! foreign addresses must not get past the host. It stops after [`FRAMES_MAX`] frames, so that runs
//! end. Nothing is expected of its connections, and it reports none.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use etherparse::checksum::Sum16BitWords;
use nightporter_core::time::{Duration, Instant};
use nightporter_core::wire::virtio_net::VirtioNetHdr;

use super::address::{Address, Key, Ports};
use super::emit::{ETHERNET, Options, Route, Segment};
use super::neighbor;
use super::{ConnId, EndReport, Stack};
use crate::plan::{ConnPlan, Machine};
use crate::random::Random;
use nightporter_check::frame::Frame;
use nightporter_check::stream::Stream;
use nightporter_check::wire::{Packet, TcpFlags, written};

/// Frames it sends in its life, besides answers to ARP and to SYNs.
const FRAMES_MAX: u32 = 1000;
/// Frames it sends at a time.
const BURST_MAX: u64 = 12;
/// After so long without an answer it sends another SYN.
const SYN_AGAIN: Duration = Duration::from_secs(1);
/// Longest pause between two bursts.
const PAUSE_MAX_US: u64 = 60_000;
/// Where the checksum is in an IPv4 header, and the fragment offset.
const V4_CHECKSUM_AT: usize = ETHERNET + 10;
const V4_FRAGMENT_AT: usize = ETHERNET + 6;

/// A machine that means harm.
pub(super) struct Hostile {
    machine: Machine,
    address: Address,
    mtu: u16,
    random: Random,
    conns: BTreeMap<Key, Conn>,
    /// When the clients among them send their SYN.
    opens: BTreeSet<(Instant, Key)>,
    /// The next burst, once it has a peer.
    next_at: Option<Instant>,
    left: u32,
    out: VecDeque<Frame>,
}

/// Its knowledge of a connection: the peer's last segment.
#[derive(Clone, Copy, Debug)]
struct Conn {
    route: Route,
    isn: u32,
    /// Its own next sequence number, as the peer says.
    seq: u32,
    /// The peer's next.
    ack: u32,
    /// The peer's newest timestamp.
    tsval: u32,
    /// Its own clock, if it has shown one: without, a segment may count for nothing.
    clock: Option<u32>,
    is_client: bool,
    /// A SYN came, or a SYN-ACK.
    is_open: bool,
}

impl Hostile {
    pub(super) fn new(machine: Machine, mtu: u16, seed: u64) -> Self {
        let mut random = Random::new(seed, "hostile");
        let left = u32::try_from(random.within(50, FRAMES_MAX.into())).unwrap_or(FRAMES_MAX);
        Self {
            machine,
            address: machine.address(),
            mtu,
            random,
            conns: BTreeMap::new(),
            opens: BTreeSet::new(),
            next_at: None,
            left,
            out: VecDeque::new(),
        }
    }

    fn bits(&mut self) -> u32 {
        u32::try_from(self.random.below(1 << 32)).unwrap_or(0)
    }

    fn word(&mut self) -> u16 {
        u16::try_from(self.random.below(1 << 16)).unwrap_or(0)
    }

    fn bytes(&mut self, len: u64) -> Vec<u8> {
        (0..len).map(|_| self.random.bits().to_le_bytes()[0]).collect()
    }

    // --- Proper behaviour --------------------------------------------------------------------

    /// Sends a SYN, or a SYN-ACK.
    fn greet(&mut self, key: Key) {
        let tsval = self.bits();
        let own_mss = self.mtu.saturating_sub(40);
        let Some(conn) = self.conns.get(&key).copied() else { return };
        let mut options = Options::default();
        if self.random.percent(80) {
            options.mss(self.random.pick(&[own_mss, 1, 88, 65_535]));
        }
        if self.random.percent(60) {
            options.sack_permitted();
        }
        let clock = self.random.percent(60).then_some(tsval);
        if let Some(tsval) = clock {
            options.timestamps(tsval, conn.tsval);
        }
        if self.random.percent(60) {
            options.window_scale(self.random.pick(&[0, 7, 14, 15, 255]));
        }
        if self.random.percent(10) {
            let odd = self.random.pick(&[vec![30, 4, 0, 0], vec![2, 0], vec![19, 18], vec![8, 10]]);
            options.raw(&odd);
        }
        let ecn = self.random.percent(20);
        let more = if ecn { TcpFlags::ECE | TcpFlags::CWR } else { TcpFlags::NONE };
        let ack = if conn.is_client { TcpFlags::NONE } else { TcpFlags::ACK };
        let segment = Segment {
            seq: conn.isn,
            ack: conn.ack,
            flags: TcpFlags::SYN | ack | more,
            window: self.random.pick(&[65_535, 1000, 1, 0]),
            options: options.bytes(),
            ..Segment::default()
        };
        self.out.push_back(segment.frame(&conn.route));
        if let Some(conn) = self.conns.get_mut(&key) {
            (conn.seq, conn.clock) = (conn.isn.wrapping_add(1), clock);
        }
    }

    /// Learns where the peer is; true for a SYN that wants an answer.
    fn learn(&mut self, key: Key, packet: &Packet) -> bool {
        let Some((_, tcp)) = packet.tcp() else { return false };
        let Some(conn) = self.conns.get_mut(&key) else { return false };
        let first = tcp.flags.syn() && !conn.is_open;
        conn.is_open |= tcp.flags.syn();
        conn.ack = (tcp.seq + tcp.seq_len()).0;
        if tcp.flags.ack() && !tcp.flags.syn() {
            conn.seq = tcp.ack.0;
        }
        conn.tsval = tcp.options.timestamps.map_or(0, |ts| ts.tsval);
        first && !conn.is_client
    }

    // --- Improper behaviour --------------------------------------------------------------------

    fn annoy(&mut self) {
        let open: Vec<Key> = self.conns.iter().filter(|c| c.1.is_open).map(|c| *c.0).collect();
        if open.is_empty() {
            return;
        }
        for _ in 0..self.random.within(1, BURST_MAX) {
            let key = self.random.pick(&open);
            let is_guest = matches!(self.machine, Machine::Guest(_));
            match self.random.below(if is_guest { 14 } else { 10 }) {
                0..=3 => self.segment(key),
                4 => self.optimist(key),
                5 => self.ack_division(key),
                6 if self.random.percent(30) => self.two_ends(key),
                6 => self.overlaps(key),
                7 => self.syn_flood(key),
                8 => self.fragments(key),
                9 => self.mangled(key),
                10 => self.stolen_addresses(key),
                11 => self.stolen_arp(),
                12 => self.noise(),
                _ => self.wild_header(key),
            }
        }
    }

    fn send(&mut self, frame: Frame) {
        if self.left > 0 {
            self.left -= 1;
            self.out.push_back(frame);
        }
    }

    fn conn(&self, key: Key) -> Conn {
        self.conns[&key]
    }

    /// A segment with arbitrary fields, many of them nearly right.
    fn any_segment(&mut self, key: Key) -> Frame {
        let conn = self.conn(key);
        let near = |random: &mut Random, at: u32, wild: u32| {
            let step = random.pick(&[0, 0, 0, 1, 1448, 65_535, 1 << 20]);
            match random.below(4) {
                0 => at,
                1 => at.wrapping_add(step),
                2 => at.wrapping_sub(step),
                _ => wild,
            }
        };
        let [wild_seq, wild_ack] = [self.bits(), self.bits()];
        let seq = near(&mut self.random, conn.seq, wild_seq);
        let ack = near(&mut self.random, conn.ack, wild_ack);
        let wild_flags = TcpFlags(self.word() & TcpFlags::ALL.0);
        let flags = self.random.pick(&[
            TcpFlags::ACK,
            TcpFlags::ACK,
            TcpFlags::ACK | TcpFlags::PSH,
            TcpFlags::ACK | TcpFlags::FIN,
            TcpFlags::ACK | TcpFlags::URG,
            TcpFlags::ACK | TcpFlags::ECE | TcpFlags::CWR,
            TcpFlags::RST,
            TcpFlags::RST | TcpFlags::ACK,
            TcpFlags::SYN,
            TcpFlags::SYN | TcpFlags::ACK,
            TcpFlags::NONE,
            TcpFlags::ALL,
            wild_flags,
        ]);
        let mut options = self.any_options(&conn);
        let room = u64::from(self.mtu).saturating_sub(100);
        let len = self.random.pick(&[0, 0, 1, 100, room]);
        let wild_window = self.word();
        let window = self.random.pick(&[0, 1, 1000, 65_535, wild_window]);
        let stream = Stream::of(usize::from(self.word()), true);
        let payload = (stream, self.random.below(1 << 20), usize::try_from(len).unwrap_or(0));
        let segment = Segment {
            seq,
            ack,
            flags,
            window,
            options: options.bytes(),
            ect: self.random.percent(10),
            payload: (len > 0).then_some(payload),
            ..Segment::default()
        };
        segment.frame(&conn.route)
    }

    fn any_options(&mut self, conn: &Conn) -> Options {
        let mut options = Options::default();
        let wild = self.bits();
        match self.random.below(8) {
            0..=2 => options.timestamps(wild, conn.tsval),
            3 => options.timestamps(conn.tsval, wild),
            4 => {
                options.timestamps(wild, conn.tsval);
                let blocks = [(conn.ack, wild), (wild, conn.ack), (conn.ack, conn.ack)];
                options.sack(blocks.into_iter());
            }
            5 => options.raw(&self.random.pick(&[
                vec![8, 0],
                vec![8, 1],
                vec![8, 255],
                vec![5, 2],
                vec![5, 9, 0, 0],
                vec![253, 6, 1, 2, 3, 4],
                vec![30, 4, 1, 1],
                vec![0, 8, 8, 8],
            ])),
            6 => {
                let len = self.random.below(41);
                let bytes = self.bytes(len);
                options.raw(&bytes);
            }
            _ => {}
        }
        options
    }

    fn segment(&mut self, key: Key) {
        let frame = self.any_segment(key);
        self.send(frame);
    }

    fn pure_ack(&mut self, key: Key, ack: u32, window: u16) {
        let conn = self.conn(key);
        let segment =
            Segment { seq: conn.seq, ack, flags: TcpFlags::ACK, window, ..Segment::default() };
        self.send(segment.frame(&conn.route));
    }

    /// `len` bytes, `off` behind its next place, of its stream number `n`; with `fin` its last.
    fn data(&mut self, key: Key, off: u32, len: usize, n: usize, fin: bool) {
        let conn = self.conn(key);
        let mut options = Options::default();
        if let Some(clock) = conn.clock {
            options.timestamps(clock, conn.tsval);
        }
        let segment = Segment {
            seq: conn.seq.wrapping_add(off),
            ack: conn.ack,
            flags: if fin { TcpFlags::ACK | TcpFlags::FIN } else { TcpFlags::ACK },
            window: 65_535,
            options: options.bytes(),
            payload: (len > 0).then_some((Stream::of(n, true), 0, len)),
            ..Segment::default()
        };
        self.send(segment.frame(&conn.route));
    }

    /// Acknowledges bytes that have not arrived yet.
    fn optimist(&mut self, key: Key) {
        let ack = self.conn(key).ack.wrapping_add(self.random.pick(&[1, 1448, 14_480, 100_000]));
        self.pure_ack(key, ack, 65_535);
    }

    /// Acknowledges the same a byte at a time, forwards or backwards.
    fn ack_division(&mut self, key: Key) {
        let at = self.conn(key).ack;
        let back = self.random.percent(50);
        for n in 0..5 {
            let off = if back { n } else { 5 - n };
            self.pure_ack(key, at.wrapping_sub(off), 1000);
        }
    }

    /// Sends the same place twice with different bytes, and perhaps earlier bytes.
    fn overlaps(&mut self, key: Key) {
        let gap = self.random.pick(&[0, 10, 1000]);
        for n in 0..2_u32 {
            let off = if self.random.percent(50) { 0 } else { n * 50 };
            self.data(key, gap + off, 100, n as usize, false);
        }
        if self.random.percent(50) {
            self.data(key, 0, gap as usize, 2, false);
        }
    }

    /// Ends its stream in two places, with bytes between them, and then sends what lies before.
    fn two_ends(&mut self, key: Key) {
        self.data(key, 50, 50, 0, true);
        self.data(key, 100, 50, 0, true);
        self.data(key, 0, 50, 0, false);
        let fin = self.random.percent(50);
        self.data(key, 100, 50, 1, fin);
    }

    /// Asks for connections that it does not want.
    fn syn_flood(&mut self, key: Key) {
        let server = if self.conn(key).is_client { key.peer_port } else { 80 };
        let mac = self.conn(key).route.peer_mac();
        for _ in 0..self.random.within(1, 20) {
            let key = Key { peer: key.peer, own_port: self.word(), peer_port: server };
            if self.conns.contains_key(&key) {
                continue;
            }
            let route = Route::new(&self.address, &key, mac);
            let mut options = Options::default();
            options.mss(1460);
            let segment = Segment {
                seq: self.bits(),
                flags: TcpFlags::SYN,
                window: 1000,
                options: options.bytes(),
                ..Segment::default()
            };
            self.send(segment.frame(&route));
        }
    }

    /// A segment as IPv4 fragments: overlapping, in any order, or incomplete.
    fn fragments(&mut self, key: Key) {
        let whole = self.any_segment(key).bytes;
        if whole[12..14] != [8, 0] || whole.len() < ETHERNET + 44 {
            return self.send(Frame::on_wire(whole));
        }
        let (head, body) = whole.split_at(ETHERNET + 20);
        let cut = body.len() / 2 / 8 * 8;
        let mut pieces = vec![(0, &body[..cut], true), (cut, &body[cut..], false)];
        if self.random.percent(30) {
            pieces.push((cut.saturating_sub(8), &body[cut..], false));
        }
        if self.random.percent(50) {
            pieces.reverse();
        }
        if self.random.percent(20) {
            pieces.pop();
        }
        for (at, piece, more) in pieces {
            let mut bytes = [head, piece].concat();
            let len = u16::try_from(20 + piece.len()).unwrap_or(u16::MAX);
            let place = u16::try_from(at / 8).unwrap_or(0) | if more { 0x2000 } else { 0 };
            bytes[ETHERNET + 2..ETHERNET + 4].copy_from_slice(&len.to_be_bytes());
            bytes[V4_FRAGMENT_AT..V4_FRAGMENT_AT + 2].copy_from_slice(&place.to_be_bytes());
            repair_v4(&mut bytes);
            self.send(Frame::on_wire(bytes));
        }
    }

    /// A segment with some bytes of its headers changed, cut off or padded.
    fn mangled(&mut self, key: Key) {
        let mut bytes = self.any_segment(key).bytes;
        match self.random.below(4) {
            0 => bytes.truncate(usize::try_from(self.random.below(80)).unwrap_or(0).max(ETHERNET)),
            1 => bytes.extend([0; 40]),
            _ => {
                for _ in 0..self.random.within(1, 4) {
                    // The source stays.
                    let at = self.random.within(12, bytes.len() as u64 - 1);
                    let at = usize::try_from(at).unwrap_or(12);
                    let is_source = (ETHERNET + 8..ETHERNET + 24).contains(&at);
                    if !is_source {
                        bytes[at] = self.random.bits().to_le_bytes()[0];
                    }
                }
                if self.random.percent(50) {
                    repair_v4(&mut bytes);
                }
            }
        }
        self.send(Frame::on_wire(bytes));
    }

    /// A segment with another machine's addresses.
    fn stolen_addresses(&mut self, key: Key) {
        let mut frame = self.any_segment(key);
        let victim = self.somebody().address();
        if self.random.percent(50) {
            frame.bytes[6..12].copy_from_slice(&victim.mac);
        }
        if frame.bytes[12..14] == [8, 0] {
            frame.bytes[ETHERNET + 12..ETHERNET + 16].copy_from_slice(&victim.v4);
            repair_v4(&mut frame.bytes);
        } else {
            frame.bytes[ETHERNET + 8..ETHERNET + 24].copy_from_slice(&victim.v6);
        }
        self.send(frame);
    }

    fn somebody(&mut self) -> Machine {
        let n = self.random.below(4).try_into().unwrap_or(0);
        let somebody = self.random.pick(&[Machine::Guest(n), Machine::Remote(n)]);
        if somebody == self.machine { Machine::Remote(9) } else { somebody }
    }

    /// An ARP message that claims another machine's address.
    fn stolen_arp(&mut self) {
        let victim = self.somebody().address();
        let mut bytes = vec![0xff; 6];
        bytes.extend(self.address.mac);
        bytes.extend([8, 6, 0, 1, 8, 0, 6, 4, 0, self.random.pick(&[1, 2])]);
        bytes.extend(if self.random.percent(50) { self.address.mac } else { victim.mac });
        bytes.extend(victim.v4);
        bytes.extend([0; 6]);
        bytes.extend(victim.v4);
        self.send(Frame::on_wire(bytes));
    }

    fn noise(&mut self) {
        let len = self.random.below(200);
        let mut bytes = self.bytes(len);
        if bytes.len() >= ETHERNET {
            bytes[6..12].copy_from_slice(&self.address.mac);
            let ethertype = self.random.pick(&[[8, 0], [0x86, 0xdd], [0x81, 0], [8, 6], [0, 5]]);
            bytes[12..14].copy_from_slice(&ethertype);
        }
        self.send(Frame::on_wire(bytes));
    }

    /// A segment with an arbitrary virtio header.
    fn wild_header(&mut self, key: Key) {
        let mut frame = self.any_segment(key);
        let odd = |it: &mut Self, right: u16| {
            let wild = it.word();
            it.random.pick(&[0, 1, right, right, 65_535, wild])
        };
        frame.hdr = VirtioNetHdr {
            flags: self.random.bits().to_le_bytes()[0],
            gso_type: self.random.pick(&[0, 1, 1, 3, 4, 4, 5, 0x81, 0xff]),
            hdr_len: odd(self, 54),
            gso_size: odd(self, 1448),
            csum_start: odd(self, 34),
            csum_offset: odd(self, 16),
        };
        self.send(frame);
    }
}

/// Makes the checksum of an IPv4 header right, so that receivers read on.
fn repair_v4(bytes: &mut [u8]) {
    if bytes.len() >= ETHERNET + 20 && bytes[12..14] == [8, 0] {
        bytes[V4_CHECKSUM_AT..V4_CHECKSUM_AT + 2].fill(0);
        let sum = Sum16BitWords::new().add_slice(&bytes[ETHERNET..ETHERNET + 20]);
        bytes[V4_CHECKSUM_AT..V4_CHECKSUM_AT + 2].copy_from_slice(&written(&sum));
    }
}

impl Stack for Hostile {
    fn handle_frame(&mut self, now: Instant, frame: Frame) {
        let Ok(packet) = Packet::parse(&frame.bytes) else { return };
        if let Some(answer) = neighbor::answer(&self.address, &frame.bytes, &packet) {
            self.out.push_back(Frame::on_wire(answer));
            return;
        }
        let Some((ip, tcp)) = packet.tcp() else { return };
        let key = Key { peer: ip.src.0, own_port: tcp.dst_port, peer_port: tcp.src_port };
        if self.learn(key, &packet) {
            self.greet(key);
        }
        if self.conns.get(&key).is_some_and(|conn| conn.is_open) && self.left > 0 {
            self.next_at.get_or_insert(now);
            if self.random.percent(50) {
                // Often it says the right thing: the handshake should come to its end.
                let ack = self.conn(key).ack;
                self.pure_ack(key, ack, 65_535);
            }
        }
    }

    fn handle_timeout(&mut self, now: Instant) {
        while let Some(&(at, key)) = self.opens.first().filter(|(at, _)| *at <= now) {
            self.opens.remove(&(at, key));
            if self.conn(key).is_open {
                continue;
            }
            self.greet(key);
            if self.left > 0 {
                self.left -= 1;
                self.opens.insert((at.max(now) + SYN_AGAIN, key)); // perhaps with better options
            }
        }
        if self.next_at.is_some_and(|at| at <= now) {
            self.annoy();
            let pause = Duration::from_micros(self.random.within(10, PAUSE_MAX_US));
            self.next_at = (self.left > 0).then_some(now + pause);
        }
    }

    fn poll_transmit(&mut self, _now: Instant) -> Option<Frame> {
        self.out.pop_front()
    }

    fn poll_timeout(&mut self, _now: Instant) -> Option<Instant> {
        let opens = self.opens.first().map(|&(at, _)| at);
        opens.into_iter().chain(self.next_at).min()
    }

    fn add_conn(&mut self, id: ConnId, plan: &ConnPlan) {
        let ports = Ports::of(id, plan);
        let is_client = plan.client == self.machine;
        let (peer, own_port, peer_port) = if is_client {
            (plan.server, ports.client, ports.server)
        } else {
            (plan.client, ports.server, ports.client)
        };
        let address = peer.address();
        let key = Key { peer: address.ip(plan.v6).0, own_port, peer_port };
        let route = Route::new(&self.address, &key, address.mac);
        let isn = self.bits();
        let clock = None;
        let conn =
            Conn { route, isn, seq: isn, ack: 0, tsval: 0, clock, is_client, is_open: false };
        self.conns.insert(key, conn);
        if is_client {
            self.opens.insert((plan.opens_at, key));
        }
    }

    fn set_reading(&mut self, _on: bool) {}

    fn set_shrinking(&mut self, _on: bool) {}

    fn ends(&self) -> Vec<EndReport> {
        Vec::new()
    }

    fn ends_open(&self) -> usize {
        0
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{conn, plan};
    use super::super::{Outcome, build};
    use super::*;
    use crate::plan::{StackKind, Workload};

    /// A stack against one that means harm: all frames that were sent, and how the stack ended.
    fn fight(kind: StackKind, seed: u64, hostile_is_client: bool) -> (Vec<Frame>, Outcome) {
        let mut conn = conn(Workload::Bulk { up: 100_000, down: 100_000 });
        if !hostile_is_client {
            std::mem::swap(&mut conn.client, &mut conn.server);
        }
        let honest = if hostile_is_client { conn.server } else { conn.client };
        let hostile = if hostile_is_client { conn.client } else { conn.server };
        let mut ends = [build(&plan(kind), honest, 1500, seed), {
            build(&plan(StackKind::Hostile), hostile, 1500, seed)
        }];
        ends.iter_mut().for_each(|end| end.add_conn(0, &conn));
        let (mut now, mut frames) = (Instant::ZERO, Vec::new());
        while let Some(at) = ends.iter_mut().filter_map(|end| end.poll_timeout(now)).min() {
            now = at.max(now) + Duration::from_micros(1);
            ends.iter_mut().for_each(|end| end.handle_timeout(now));
            for _ in 0..20_000 {
                let Some((to, frame)) = (0..2)
                    .find_map(|from| ends[from].poll_transmit(now).map(|frame| (1 - from, frame)))
                else {
                    break;
                };
                frames.push(frame.clone());
                ends[to].handle_frame(now, frame);
            }
            if now > Instant::from_secs(3600) {
                break;
            }
        }
        let outcome = ends[0].ends()[0].outcome;
        (frames, outcome)
    }

    #[test]
    fn whoever_talks_to_it_survives_and_comes_to_an_end() {
        for seed in 0..20 {
            for kind in [StackKind::Smoltcp, StackKind::Strict] {
                let (frames, outcome) = fight(kind, seed, seed % 2 == 0);
                assert!(frames.len() > 30, "seed {seed}: {} frames", frames.len());
                assert_ne!(outcome, Outcome::Open, "seed {seed} {kind:?}");
            }
        }
    }

    #[test]
    fn it_sends_malformed_and_well_formed_frames_and_the_same_for_the_same_seed() {
        let (frames, _) = fight(StackKind::Strict, 7, false);
        let bad = frames.iter().filter(|frame| Packet::parse(&frame.bytes).is_err()).count();
        assert!(bad > 0 && bad < frames.len() / 2, "{bad} of {}", frames.len());
        assert_eq!(fight(StackKind::Strict, 7, false).0, frames);
    }
}
