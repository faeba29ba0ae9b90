//! One direction of a line.

use std::collections::VecDeque;

use nightporter_guest::data::splitmix64;

use super::harm;
use super::lateness::{Late, Lateness};
use super::watch::Segment;
use super::{Shape, nanos};
use crate::host::FAR;

/// Bytes that may wait for a direction, and be under way on it: more than a sender's largest
/// window (Linux: `tcp_wmem`, 4 MiB, and as much again in flight).
const BUFFER_BYTES: usize = 32 << 20;
/// Preamble, checksum and gap of a frame on Ethernet (IEEE 802.3): bytes beyond the frame itself.
const FRAME_OVERHEAD: usize = 24;
/// Length of a virtio-net header in front of each frame of a tap.
pub(super) const VNET_LEN: usize = 10;
/// A packet that is longer has data: all headers of an acknowledgement fit.
const DATA_LEN: usize = VNET_LEN + 14 + 60 + 60;

/// One direction, as a function of time. Times are nanoseconds from any one moment.
#[derive(Debug)]
pub(super) struct Wire {
    rate: u64,
    /// Longest wait for the wire, ns.
    queue: u64,
    /// Frames with data that are lost, and marked, by chance, and the state of that chance.
    loss: f64,
    marks: f64,
    random: u64,
    /// Bytes of the longest IP packet that it takes.
    mtu: u16,
    /// The further delay of frames to [`FAR`], ns.
    far: u64,
    /// The last bit that was accepted has left by then.
    free_at: u64,
    /// Frames with data that arrive late, behind the queue.
    pub(super) late: Late,
    lateness: Lateness,
    /// When each frame arrives, in that order: those of an ordinary way, those of a longer one.
    frames: [VecDeque<(u64, Vec<u8>)>; 2],
    bytes: usize,
    pub(super) lost: u64,
    pub(super) marked: u64,
}

impl Wire {
    /// The way from the remote: nothing is lost on it.
    pub(super) fn from_remote(shape: Shape) -> Self {
        Self {
            rate: shape.rate,
            queue: u64::MAX,
            loss: 0.0,
            marks: 0.0,
            random: 0,
            mtu: u16::MAX,
            far: 0,
            free_at: 0,
            late: Late::Never,
            lateness: Lateness::default(),
            frames: [VecDeque::new(), VecDeque::new()],
            bytes: 0,
            lost: 0,
            marked: 0,
        }
    }

    /// The way to the remote.
    pub(super) fn to_remote(shape: Shape) -> Self {
        let queue = shape.queue.map_or(u64::MAX, nanos);
        let Shape { loss, marks, mtu, .. } = shape;
        Self { queue, loss, marks, mtu, far: nanos(shape.far), ..Self::from_remote(shape) }
    }

    /// The error for the sender of a packet that is too long, which is dropped.
    pub(super) fn refusal(&self, packet: &[u8]) -> Option<Vec<u8>> {
        harm::refusal(packet, self.mtu)
    }

    /// A packet of a tap begins its way, behind those before it; `delay` from its end to there.
    /// How long it waits for the wire, ns; `None` if it is lost.
    pub(super) fn accept(&mut self, now: u64, delay: u64, packet: &[u8]) -> Option<u64> {
        let waits = self.free_at.saturating_sub(now);
        let full = waits > self.queue || self.bytes + packet.len() > BUFFER_BYTES;
        if full || self.by_chance(self.loss, packet) {
            self.lost += 1;
            return None;
        }
        let bits = 8 * wire_bytes(packet) as u64;
        self.free_at = self.free_at.max(now) + bits * 1_000_000_000 / self.rate;
        let mut arrives = self.free_at + delay;
        if self.late != Late::Never && packet.len() > DATA_LEN {
            let by;
            (self.free_at, by) = self.lateness.next(self.late, now, self.free_at);
            arrives = self.free_at + delay + by;
        }
        let far = self.far > 0 && Segment::of(packet).is_some_and(|s| s.to.ip().octets()[3] == FAR);
        let longer = if far { self.far } else { 0 };
        let mut packet = packet.to_vec();
        if self.by_chance(self.marks, &packet) && harm::mark(&mut packet) {
            self.marked += 1;
        }
        self.bytes += packet.len();
        let way = &mut self.frames[usize::from(far)];
        let place = way.partition_point(|(at, _)| *at <= arrives + longer);
        way.insert(place, (arrives + longer, packet));
        Some(waits)
    }

    /// Whether something befalls a packet that befalls such a share of those with data.
    fn by_chance(&mut self, share: f64, packet: &[u8]) -> bool {
        share > 0.0
            && packet.len() > DATA_LEN
            && (splitmix64(&mut self.random) >> 11) as f64 / (1_u64 << 53) as f64 <= share
    }

    /// When the next packet arrives.
    pub(super) fn due(&self) -> Option<u64> {
        self.frames.iter().filter_map(|way| way.front()).map(|&(at, _)| at).min()
    }

    /// The next packet, if it has arrived.
    pub(super) fn arrived(&mut self, now: u64) -> Option<Vec<u8>> {
        let way = self.frames.iter_mut().filter(|way| way.front().is_some());
        let first = way.min_by_key(|way| way.front().map(|&(at, _)| at))?;
        let packet = first.pop_front_if(|(at, _)| *at <= now)?.1;
        self.bytes -= packet.len();
        Some(packet)
    }
}

/// The bytes of a tap's packet on an Ethernet: a super-segment is as many frames as its virtio-net
/// header says, each with headers of its own.
fn wire_bytes(packet: &[u8]) -> usize {
    let field = |at: usize| {
        packet.get(at..at + 2).map_or(0, |b| usize::from(u16::from_le_bytes([b[0], b[1]])))
    };
    let frame = packet.len().saturating_sub(VNET_LEN);
    // struct virtio_net_hdr: flags, gso_type, hdr_len, gso_size.
    let (headers, segment) = (field(2), field(4));
    let frames = match segment {
        0 => 1,
        _ => frame.saturating_sub(headers).div_ceil(segment).max(1),
    };
    frame + (frames - 1) * headers + frames * FRAME_OVERHEAD
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::Link;
    use super::super::watch::tests::segment;
    use super::*;

    const WAY: u64 = 20_000_000;

    /// A packet as a tap gives it: a virtio-net header and so many bytes.
    fn packet(headers: u16, segment: u16, frame: usize) -> Vec<u8> {
        let mut packet = vec![0; VNET_LEN + frame];
        packet[2..4].copy_from_slice(&headers.to_le_bytes());
        packet[4..6].copy_from_slice(&segment.to_le_bytes());
        packet
    }

    #[test]
    fn a_frame_takes_its_bits_and_one_way_of_delay() {
        let mut wire = Wire::to_remote(Link::Wan.shape());
        // 1250 bytes on the wire: 0.1 ms at 100 Mbit/s.
        wire.accept(1_000, WAY, &packet(0, 0, 1226));
        assert_eq!(wire.due(), Some(1_000 + 100_000 + WAY));
        assert_eq!(wire.arrived(20_100_999), None);
        assert_eq!(wire.arrived(20_101_000).map(|p| p.len()), Some(1236));
        assert_eq!((wire.due(), wire.bytes), (None, 0));
    }

    #[test]
    fn frames_follow_each_other_and_none_waits_for_a_wire_that_is_free() {
        let mut wire = Wire::to_remote(Link::Wan.shape());
        for now in [0, 0, 50_000, 1_000_000] {
            wire.accept(now, WAY, &packet(0, 0, 1226));
        }
        let at: Vec<u64> = wire.frames[0].iter().map(|(at, _)| at - WAY).collect();
        assert_eq!(at, [100_000, 200_000, 300_000, 1_100_000]);
    }

    #[test]
    fn a_super_segment_takes_as_long_as_its_segments() {
        let segments = 44 * (66 + 1448 + FRAME_OVERHEAD);
        assert_eq!(wire_bytes(&packet(66, 1448, 66 + 44 * 1448)), segments);
        assert_eq!(wire_bytes(&packet(66, 1448, 66 + 43 * 1448 + 1)), segments - 1447);
        assert_eq!(wire_bytes(&packet(0, 0, 60)), 84);
        assert_eq!(wire_bytes(&packet(66, 1448, 10)), 10 + FRAME_OVERHEAD, "shorter than it says");
    }

    #[test]
    fn a_full_buffer_loses_the_newest() {
        let mut wire = Wire::to_remote(Link::Wan.shape());
        for _ in 0..1000 {
            wire.accept(0, WAY, &packet(66, 1448, 65_000));
        }
        assert_eq!(wire.frames[0].len() as u64 + wire.lost, 1000);
        assert!(wire.bytes <= BUFFER_BYTES && wire.lost > 0);
    }

    #[test]
    fn who_would_wait_longer_than_the_queue_is_long_is_lost() {
        let queue = Some(Duration::from_micros(250));
        let mut wire = Wire::to_remote(Shape { queue, ..Link::Wan.shape() });
        let waits: Vec<_> = (0..4).map(|_| wire.accept(0, WAY, &packet(0, 0, 1226))).collect();
        assert_eq!(waits, [Some(0), Some(100_000), Some(200_000), None]);
    }

    #[test]
    fn one_frame_of_a_hundred_is_lost_by_chance_and_never_one_without_data() {
        let mut wire = Wire::to_remote(Shape { loss: 0.01, ..Link::Lan.shape() });
        for turn in 0..20_000 {
            wire.accept(turn * 2_000, 0, &packet(0, 0, 1514));
            wire.accept(turn * 2_000, 0, &packet(0, 0, 66));
            while wire.arrived(u64::MAX).is_some() {}
        }
        assert!((150..250).contains(&wire.lost), "{} of 20,000", wire.lost);
    }

    #[test]
    fn one_ecn_capable_frame_of_a_hundred_is_marked_by_chance_and_arrives() {
        let mut wire = Wire::to_remote(Shape { marks: 0.01, ..Link::Lan.shape() });
        let mut capable = segment(0, 0, 1448);
        capable[VNET_LEN + 14 + 1] = 2;
        let mut marked = 0;
        for turn in 0..20_000 {
            wire.accept(turn * 2_000, 0, &capable);
            let arrived = wire.arrived(u64::MAX).expect("nothing is lost");
            marked += u64::from(arrived[VNET_LEN + 14 + 1] == 3);
        }
        assert!((150..250).contains(&marked) && marked == wire.marked, "{marked} of 20,000");
    }

    #[test]
    fn a_longer_way_holds_up_nobody_else() {
        let far = Duration::from_millis(7);
        let mut wire = Wire::to_remote(Shape { far, ..Link::Wan.shape() });
        let mut frames = [segment(0, 0, 100), segment(0, 0, 101)];
        frames[0][VNET_LEN + 14 + 19] = FAR;
        for frame in &frames {
            wire.accept(0, WAY, frame);
        }
        assert_eq!(wire.arrived(u64::MAX).as_ref(), Some(&frames[1]));
        assert!(wire.due() > Some(WAY + 7_000_000));
        assert_eq!(wire.arrived(u64::MAX).as_ref(), Some(&frames[0]));
    }
}
