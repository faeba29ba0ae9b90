//! One direction of a path: rate, delay and queue, and its faults.

use std::collections::VecDeque;

use etherparse::checksum::Sum16BitWords;
use nightporter_core::time::{Duration, Instant};

use crate::plan::{FaultKind, LinkPlan};
use crate::random::Random;
use nightporter_check::frame::Frame;
use nightporter_check::wire::{IpVersion, Packet, written};

/// Bytes that a frame costs on the wire besides itself: preamble, check sequence, gap.
const WIRE_OVERHEAD: u64 = 24;

/// Counters of frames' fates.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct LinkCounters {
    /// Lost by chance, one by one or in bursts, or while the path was cut.
    pub lost: u64,
    /// Lost because the queue was full.
    pub overflowed: u64,
    /// Held back, so that later ones overtook them.
    pub reordered: u64,
    /// Delivered twice.
    pub duplicated: u64,
    /// Delivered with one bit flipped.
    pub corrupted: u64,
    /// Marked CE.
    pub marked: u64,
    /// Too long for the path.
    pub too_long: u64,
}

/// See the module doc.
#[derive(Debug)]
pub struct Link {
    plan: LinkPlan,
    random: Random,
    faults: Vec<FaultKind>,
    /// In the bad state of the burst loss process.
    bursting: bool,
    /// When the wire is free, and when each frame in the queue leaves it.
    free_at: Instant,
    departures: VecDeque<Instant>,
    last_arrival: Instant,
    counters: LinkCounters,
}

impl Link {
    /// A path without faults; its chances are those called `name` of `seed`.
    #[must_use]
    pub fn new(plan: LinkPlan, seed: u64, name: &str) -> Self {
        Self {
            plan,
            random: Random::new(seed, name),
            faults: Vec::new(),
            bursting: false,
            free_at: Instant::ZERO,
            departures: VecDeque::new(),
            last_arrival: Instant::ZERO,
            counters: LinkCounters::default(),
        }
    }

    /// Counters of frames' fates so far.
    #[must_use]
    pub fn counters(&self) -> LinkCounters {
        self.counters
    }

    /// A fault begins. Those that are not about paths are ignored.
    pub fn start(&mut self, fault: FaultKind) {
        self.faults.push(fault);
    }

    /// A fault that began is over.
    pub fn stop(&mut self, fault: FaultKind) {
        if let Some(at) = self.faults.iter().position(|f| *f == fault) {
            self.faults.swap_remove(at);
        }
    }

    /// A frame enters at `now`; its arrivals (none, one or two) are added to `out`.
    pub fn send(&mut self, now: Instant, mut frame: Frame, out: &mut Vec<(Instant, Frame)>) {
        let Some(held_back) = self.suffer(&mut frame) else { return };
        let Some(arrival) = self.carry(now, frame.bytes.len() as u64) else { return };
        let copy = self.copied_after();
        let at = arrival + held_back;
        if held_back == Duration::ZERO {
            self.last_arrival = at;
        }
        if let Some(after) = copy {
            self.counters.duplicated += 1;
            out.push((at + after, frame.clone()));
        }
        out.push((at, frame));
    }

    /// Applies the path's faults. `None`: lost; otherwise how long the frame is held back.
    fn suffer(&mut self, frame: &mut Frame) -> Option<Duration> {
        let cut = self.faults.iter().any(|f| matches!(f, FaultKind::Cut { .. }));
        let independent = self.chance(|f| match f {
            FaultKind::Loss { ppm, .. } => ppm,
            _ => 0,
        });
        if cut || independent || self.in_burst() {
            self.counters.lost += 1;
            return None;
        }
        let mtu = self.faults.iter().filter_map(|f| match f {
            FaultKind::Mtu { mtu, .. } => Some(*mtu),
            _ => None,
        });
        let mtu = mtu.min().unwrap_or(u16::MAX).min(self.plan.mtu);
        if longest(frame) > usize::from(mtu) + 18 {
            self.counters.too_long += 1;
            return None;
        }
        if self.chance(|f| match f {
            FaultKind::Mark { ppm, .. } => ppm,
            _ => 0,
        }) && mark(&mut frame.bytes)
        {
            self.counters.marked += 1;
        }
        if self.chance(|f| match f {
            FaultKind::Corrupt { ppm, .. } => ppm,
            _ => 0,
        }) {
            self.corrupt(&mut frame.bytes);
        }
        Some(self.hold_back())
    }

    /// How long after a frame its copy comes, if it has one.
    fn copied_after(&mut self) -> Option<Duration> {
        let mut after = None;
        for i in 0..self.faults.len() {
            if let FaultKind::Duplicate { ppm, delay_us, .. } = self.faults[i]
                && ppm > 0
                && self.random.ppm(ppm)
            {
                let late = if delay_us > 0 { self.random.below(delay_us.into()) } else { 0 };
                after = Some(Duration::from_micros(1 + late));
            }
        }
        after
    }

    fn hold_back(&mut self) -> Duration {
        for i in 0..self.faults.len() {
            if let FaultKind::Reorder { ppm, delay_us, .. } = self.faults[i]
                && self.random.ppm(ppm)
            {
                self.counters.reordered += 1;
                return Duration::from_micros(1 + self.random.below(u64::from(delay_us).max(1)));
            }
        }
        Duration::ZERO
    }

    /// One bit, beyond the MACs: those no checksum covers.
    fn corrupt(&mut self, bytes: &mut [u8]) {
        const MACS_AND_TYPE: usize = 14;
        if bytes.len() > MACS_AND_TYPE {
            let at = self.random.below((bytes.len() - MACS_AND_TYPE) as u64 * 8);
            let (byte, bit) = (usize::try_from(at / 8).unwrap_or(0), at % 8);
            bytes[MACS_AND_TYPE + byte] ^= 1 << bit;
            self.counters.corrupted += 1;
        }
    }

    fn chance(&mut self, ppm_of: impl Fn(FaultKind) -> u32) -> bool {
        let mut hit = false;
        for i in 0..self.faults.len() {
            let ppm = ppm_of(self.faults[i]);
            hit |= ppm > 0 && self.random.ppm(ppm);
        }
        hit
    }

    /// Gilbert's process: `ppm` of the frames are lost, in runs of `burst_frames` on average.
    fn in_burst(&mut self) -> bool {
        let burst = self.faults.iter().find_map(|f| match f {
            FaultKind::BurstLoss { ppm, burst_frames, .. } => Some((*ppm, *burst_frames)),
            _ => None,
        });
        let Some((ppm, burst_frames)) = burst else {
            self.bursting = false;
            return false;
        };
        let burst_frames = burst_frames.max(1);
        let change = if self.bursting { 1_000_000 / burst_frames } else { ppm / burst_frames };
        if self.random.ppm(change.max(1)) {
            self.bursting = !self.bursting;
        }
        self.bursting
    }

    /// Queue, wire and distance. `None`: the queue is full.
    fn carry(&mut self, now: Instant, bytes: u64) -> Option<Instant> {
        while self.departures.front().is_some_and(|at| *at <= now) {
            self.departures.pop_front();
        }
        if self.departures.len() >= self.plan.queue_frames {
            self.counters.overflowed += 1;
            return None;
        }
        let slow = self.faults.iter().filter_map(|f| match f {
            FaultKind::Rate { rate_bps, .. } => Some(*rate_bps),
            _ => None,
        });
        let rate = slow.min().unwrap_or(u64::MAX).min(self.plan.rate_bps).max(1);
        let wire = Duration::from_nanos((bytes + WIRE_OVERHEAD) * 8_000_000_000 / rate);
        self.free_at = self.free_at.max(now) + wire;
        self.departures.push_back(self.free_at);
        let delay = Duration::from_micros(self.plan.delay_us.into());
        Some((self.free_at + delay).max(self.last_arrival))
    }
}

/// Bytes of the longest piece of a frame, or all of it.
fn longest(frame: &Frame) -> usize {
    let len = frame.bytes.len();
    if !frame.hdr.is_gso() {
        return len;
    }
    let tcp = usize::from(frame.hdr.csum_start);
    let header = frame.bytes.get(tcp + 12).map_or(0, |words| usize::from(words >> 4) * 4);
    len.min(tcp + header + usize::from(frame.hdr.gso_size))
}

/// Marks an ECN-capable packet CE (RFC 3168); `false` if it is not one, or already marked.
fn mark(bytes: &mut [u8]) -> bool {
    let Ok(packet) = Packet::parse(bytes) else { return false };
    let Some((ip, _)) = packet.tcp() else { return false };
    if !matches!(ip.tos & 3, 1 | 2) {
        return false;
    }
    let at = usize::from(ip.header_offset);
    match ip.version {
        IpVersion::V4 => {
            let old = [bytes[at], bytes[at + 1]];
            bytes[at + 1] |= 3;
            let new = [bytes[at], bytes[at + 1]];
            // RFC 1624 section 3: a wrong sum stays wrong.
            let before = [!bytes[at + 10], !bytes[at + 11]];
            let sum = Sum16BitWords::new().add_2bytes(before).add_2bytes(old.map(|b| !b));
            bytes[at + 10..at + 12].copy_from_slice(&written(&sum.add_2bytes(new)));
        }
        // The traffic class lies across the first two bytes; ECN is bits 4 and 5 of the second.
        IpVersion::V6 => bytes[at + 1] |= 0x30,
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAN: LinkPlan =
        LinkPlan { rate_bps: 8_000_000_000, delay_us: 50, queue_frames: 3, mtu: 1500 };

    fn arrivals(link: &mut Link, frames: usize) -> Vec<u64> {
        let mut out = Vec::new();
        for _ in 0..frames {
            link.send(Instant::ZERO, Frame::on_wire(vec![0; 976]), &mut out);
        }
        out.iter().map(|(at, _)| at.as_nanos()).collect()
    }

    #[test]
    fn frames_follow_each_other_at_the_rate_of_the_wire_and_a_full_queue_drops() {
        let mut link = Link::new(PLAN, 1, "test");
        assert_eq!(arrivals(&mut link, 5), [51_000, 52_000, 53_000]);
        assert_eq!(link.counters().overflowed, 2);
    }

    #[test]
    fn every_fault_of_a_path_happens_while_it_lasts_and_no_longer() {
        let (remote, to_host) = (0, true);
        let all = 1_000_000;
        for fault in [
            FaultKind::Loss { remote, to_host, ppm: all },
            FaultKind::Cut { remote, to_host },
            FaultKind::Duplicate { remote, to_host, ppm: all, delay_us: 0 },
            FaultKind::Corrupt { remote, to_host, ppm: all },
            FaultKind::Mtu { remote, to_host, mtu: 900 },
            FaultKind::Reorder { remote, to_host, ppm: all, delay_us: 100 },
            FaultKind::Rate { remote, to_host, rate_bps: 8_000_000 },
        ] {
            let mut link = Link::new(PLAN, 1, "test");
            link.start(fault);
            let with = arrivals(&mut link, 1);
            link.stop(fault);
            let counters = link.counters();
            let changed = counters != LinkCounters::default() || with != [51_000];
            assert!(changed, "{fault:?} did nothing");
            let mut out = Vec::new();
            let later = Instant::from_secs(1);
            link.send(later, Frame::on_wire(vec![0; 976]), &mut out);
            assert_eq!(out.len(), 1, "{fault:?} is over");
            assert_eq!(link.counters(), counters, "{fault:?} is over");
        }
    }

    #[test]
    fn bursts_lose_their_share_in_runs() {
        let plan = LinkPlan { queue_frames: usize::MAX, ..PLAN };
        let mut link = Link::new(plan, 7, "bursts");
        let kind = FaultKind::BurstLoss { remote: 0, to_host: true, ppm: 100_000, burst_frames: 5 };
        link.start(kind);
        let mut out = Vec::new();
        for _ in 0..20_000 {
            link.send(Instant::ZERO, Frame::on_wire(vec![0; 60]), &mut out);
        }
        let lost = link.counters().lost;
        assert!((1_400..2_300).contains(&lost), "{lost} of 20000");
    }
}
