//! A line's view of the connections over it: how much is under way, what is lost, and the sender's
//! reaction. It is the same instrument for every sender, at the queue that they share.
//!
//! Senders are on the host's side. "Under way" are the bytes that were sent and whose
//! acknowledgement has not come back to the sender, up to the highest byte: during a repair it does
//! not shrink, and after a recovery it is the sender's window.

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::time::{Duration, Instant};

use super::lateness::Late;
use super::wire::VNET_LEN;

/// How often the bytes under way are noted, ns.
const INTERVAL_NS: u64 = 10_000_000;

/// A TCP segment over IPv4.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Segment {
    pub(super) from: SocketAddrV4,
    pub(super) to: SocketAddrV4,
    seq: u32,
    ack: u32,
    payload: u32,
    /// Its sender reports that it has reduced its window (CWR, RFC 3168).
    reduced: bool,
}

impl Segment {
    /// Of a packet of a tap; `None` if it is something else.
    pub(super) fn of(packet: &[u8]) -> Option<Self> {
        let frame = packet.get(VNET_LEN..)?;
        let ip = frame.get(14..).filter(|_| frame[12..14] == [8, 0])?;
        let words = |header: &[u8], at: usize| usize::from(header[at] >> 4) * 4;
        let headers = usize::from(ip.first()? & 15) * 4;
        let tcp = ip.get(headers..).filter(|tcp| tcp.len() >= 20 && ip[9] == 6)?;
        let length = usize::from(u16::from_be_bytes([ip[2], ip[3]]));
        let address = |at: usize| Ipv4Addr::new(ip[at], ip[at + 1], ip[at + 2], ip[at + 3]);
        let port = |at: usize| u16::from_be_bytes([tcp[at], tcp[at + 1]]);
        let number =
            |at: usize| u32::from_be_bytes([tcp[at], tcp[at + 1], tcp[at + 2], tcp[at + 3]]);
        Some(Self {
            from: SocketAddrV4::new(address(12), port(0)),
            to: SocketAddrV4::new(address(16), port(2)),
            seq: number(4),
            ack: number(8),
            payload: u32::try_from(length.saturating_sub(headers + words(tcp, 12))).ok()?,
            reduced: tcp[13] & 0x80 != 0,
        })
    }
}

/// All connections that were seen since they were last taken, by sender and remote.
#[derive(Debug, Default)]
pub struct Watch {
    flows: HashMap<(SocketAddrV4, SocketAddrV4), Flow>,
    /// Since the line began.
    pub harm: Harm,
    /// The fate of frames with data to the remote from now on.
    pub late: Late,
    /// The frame that came last has left the queue by then.
    free_at: Option<Instant>,
}

/// The fates of frames to the remote, and the senders' reports.
#[derive(Debug, Default, Clone, Copy)]
pub struct Harm {
    /// Lost, in a full queue or by chance.
    pub lost: u64,
    /// Marked.
    pub marked: u64,
    /// Too long.
    pub refused: u64,
    /// Segments with data that report a reduced window.
    pub reduced: u64,
}

/// One connection. Stream positions are bytes from its first data.
#[derive(Debug, Clone, Default)]
pub struct Flow {
    base: u32,
    edge: u64,
    acked: u64,
    /// When its first data was seen, ns of the line.
    pub first_at: u64,
    /// Segments with data.
    pub segments: u64,
    /// Those of them without bytes beyond those sent before.
    pub repeated: u64,
    /// Those that the line lost.
    pub lost: u64,
    episode: Option<Episode>,
    /// Bytes under way at a loss, and at most within the round trip behind its recovery; losses
    /// before that are the same one.
    pub responses: Vec<(u64, u64)>,
    /// Each 10 ms in which something was sent.
    pub samples: Vec<Sample>,
}

/// A moment of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sample {
    /// Since its first data, ns.
    pub at: u64,
    /// Bytes.
    pub under_way: u64,
    /// A frame's wait for the wire, ns.
    pub waits: u64,
}

#[derive(Debug, Clone, Copy)]
struct Episode {
    before: u64,
    after: u64,
    recovered: bool,
    until: u64,
}

impl Watch {
    /// A packet came to the queue, and waits so long there, ns, or was lost.
    pub(super) fn data_came(&mut self, now: u64, packet: &[u8], waits: Option<u64>) {
        let Some(segment) = Segment::of(packet).filter(|segment| segment.payload > 0) else {
            return;
        };
        self.harm.reduced += u64::from(segment.reduced);
        self.free_at = Some(Instant::now() + Duration::from_nanos(waits.unwrap_or_default()));
        let fresh = || Flow { base: segment.seq, first_at: now, ..Flow::default() };
        let flow = self.flows.entry((segment.from, segment.to)).or_insert_with(fresh);
        flow.sent(now, segment, waits);
    }

    /// A packet from the remote is at the end of its way.
    pub(super) fn answer_leaves(&mut self, packet: &[u8]) {
        let segment = Segment::of(packet);
        let flow = segment.and_then(|segment| self.flows.get_mut(&(segment.to, segment.from)));
        if let (Some(flow), Some(segment)) = (flow, segment) {
            flow.acknowledged(segment.ack);
        }
    }

    /// The observations of the connection from `sender` to `remote`.
    pub fn take(&mut self, sender: SocketAddrV4, remote: SocketAddrV4) -> Option<Flow> {
        self.flows.remove(&(sender, remote))
    }

    /// Frames still wait for the line.
    pub fn waits(&self) -> bool {
        self.free_at.is_some_and(|at| Instant::now() < at)
    }

    /// Forgets all connections.
    pub fn clear(&mut self) {
        self.flows.clear();
    }
}

impl Flow {
    /// Where a sequence number near the edge is in the stream.
    fn position(&self, seq: u32) -> Option<u64> {
        let here = u32::try_from(self.edge & u64::from(u32::MAX)).expect("masked");
        let offset = seq.wrapping_sub(self.base).wrapping_sub(here).cast_signed();
        self.edge.checked_add_signed(offset.into())
    }

    fn sent(&mut self, now: u64, segment: Segment, waits: Option<u64>) {
        let Some(end) = self.position(segment.seq).map(|at| at + u64::from(segment.payload)) else {
            return;
        };
        self.segments += 1;
        self.repeated += u64::from(end <= self.edge);
        self.edge = self.edge.max(end);
        let under_way = self.edge - self.acked;
        match waits {
            None => {
                self.lost += 1;
                match &mut self.episode {
                    Some(episode) if !episode.recovered => episode.until = self.edge,
                    _ => {
                        self.end_episode();
                        let (before, until) = (under_way, self.edge);
                        self.episode = Some(Episode { before, after: 0, recovered: false, until });
                    }
                }
            }
            Some(waits) => {
                let at = now - self.first_at;
                let last = self.samples.last();
                if last.is_none_or(|last| at / INTERVAL_NS > last.at / INTERVAL_NS) {
                    self.samples.push(Sample { at, under_way, waits });
                }
            }
        }
        if let Some(episode) = self.episode.as_mut().filter(|episode| episode.recovered) {
            episode.after = episode.after.max(under_way);
        }
    }

    fn acknowledged(&mut self, ack: u32) {
        let Some(acked) = self.position(ack).filter(|&acked| acked <= self.edge) else { return };
        self.acked = self.acked.max(acked);
        match &mut self.episode {
            Some(episode) if self.acked < episode.until => {}
            Some(episode) if !episode.recovered => {
                episode.recovered = true;
                episode.until = self.edge;
            }
            _ => self.end_episode(),
        }
    }

    fn end_episode(&mut self) {
        let over = self.episode.take().filter(|episode| episode.after > 0);
        self.responses.extend(over.map(|episode| (episode.before, episode.after)));
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    const SENDER: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(10, 77, 3, 10), 5001);
    const REMOTE: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(10, 77, 3, 1), 40_000);

    /// A packet of a tap from the sender.
    pub(in super::super) fn segment(seq: u32, ack: u32, payload: u16) -> Vec<u8> {
        let mut packet = vec![0; VNET_LEN + 54 + usize::from(payload)];
        let frame = &mut packet[VNET_LEN..];
        frame[12] = 8;
        frame[14] = 0x45;
        frame[16..18].copy_from_slice(&(40 + payload).to_be_bytes());
        frame[23] = 6;
        frame[26..30].copy_from_slice(&SENDER.ip().octets());
        frame[30..34].copy_from_slice(&REMOTE.ip().octets());
        frame[34..36].copy_from_slice(&SENDER.port().to_be_bytes());
        frame[36..38].copy_from_slice(&REMOTE.port().to_be_bytes());
        frame[38..42].copy_from_slice(&seq.to_be_bytes());
        frame[42..46].copy_from_slice(&ack.to_be_bytes());
        frame[46] = 0x50;
        packet
    }

    fn answer(ack: u32) -> Vec<u8> {
        let mut packet = segment(77, ack, 0);
        let frame = &mut packet[VNET_LEN..];
        frame[26..30].copy_from_slice(&REMOTE.ip().octets());
        frame[30..34].copy_from_slice(&SENDER.ip().octets());
        frame[34..36].copy_from_slice(&REMOTE.port().to_be_bytes());
        frame[36..38].copy_from_slice(&SENDER.port().to_be_bytes());
        packet
    }

    const BASE: u32 = u32::MAX - 1500;

    /// The sender sends these thousands of bytes, of which the line loses `lost`.
    fn send(watch: &mut Watch, thousands: std::ops::Range<u32>, lost: &[u32]) {
        for thousand in thousands {
            let waits = (!lost.contains(&thousand)).then_some(0);
            let seq = BASE.wrapping_add(thousand * 1000);
            watch.data_came(u64::from(thousand) * 1_000_000, &segment(seq, 77, 1000), waits);
        }
    }

    fn acknowledge(watch: &mut Watch, thousand: u32) {
        watch.answer_leaves(&answer(BASE.wrapping_add(thousand * 1000)));
    }

    #[test]
    fn what_is_under_way_is_noted_each_ten_milliseconds_across_the_end_of_sequence_numbers() {
        let mut watch = Watch::default();
        send(&mut watch, 0..12, &[]);
        acknowledge(&mut watch, 5);
        send(&mut watch, 12..25, &[]);
        let flow = watch.take(SENDER, REMOTE).expect("seen");
        let samples: Vec<_> = flow.samples.iter().map(|s| (s.at, s.under_way)).collect();
        assert_eq!(samples, [(0, 1000), (10_000_000, 11_000), (20_000_000, 16_000)]);
        assert_eq!((flow.segments, flow.repeated, flow.lost), (25, 0, 0));
        assert!(watch.take(SENDER, REMOTE).is_none());
    }

    #[test]
    fn losses_of_a_window_are_one_and_the_answer_is_the_window_behind_the_recovery() {
        let mut watch = Watch::default();
        send(&mut watch, 0..10, &[7, 9]);
        acknowledge(&mut watch, 7);
        send(&mut watch, 10..12, &[]);
        send(&mut watch, 7..8, &[]);
        send(&mut watch, 9..10, &[]);
        acknowledge(&mut watch, 12);
        send(&mut watch, 12..18, &[]);
        acknowledge(&mut watch, 14);
        send(&mut watch, 18..19, &[]);
        let flow = watch.take(SENDER, REMOTE).expect("seen");
        // 8 of 10 were under way at the first loss; the recovery ended at 12.
        assert_eq!(flow.responses, [(8_000, 6_000)]);
        assert_eq!((flow.repeated, flow.lost), (2, 2));
    }

    #[test]
    fn what_is_no_tcp_over_ipv4_is_not_watched() {
        for (at, value) in [(VNET_LEN + 12, 0x86), (VNET_LEN + 23, 17)] {
            let mut packet = segment(0, 0, 100);
            packet[at] = value;
            assert_eq!(Segment::of(&packet), None);
        }
        assert_eq!(Segment::of(&segment(0, 0, 100)[..VNET_LEN + 40]), None);
        assert_eq!(Segment::of(&[0; 5]), None);
    }
}
