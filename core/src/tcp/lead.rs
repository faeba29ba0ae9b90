//! How far H is ahead of G: the time that the offloads save.
//!
//! - **ACKs.** An ACK of G that covers new bytes gives one sample: the time since H's own ACK that
//!   covered the highest of them left. Without ack offload R would have waited for so long. A flow
//!   keeps the last [`MOMENTS`] ACKs of H. If G is away for longer, the sample begins with the
//!   oldest of them that still covers the byte, so it is never too long.
//! - **Sends.** With congestion offload, an ACK of R that makes room lets H send at once. G is told
//!   of that ACK, and takes it with its next turn: its rings say when. One sample is the time
//!   between the two.
//!
//! Samples are numbers for operators. No decision depends on them, and no image contains them.

use crate::flow::table::FlowId;
use crate::limits::{ACK_MOMENTS_BYTES, LEAD_SENDS_MAX};
use crate::time::Instant;
use crate::wire::seq::Seq;

/// ACKs that a flow keeps.
const MOMENTS: u8 = 8;
/// The highest sample of the lowest bucket, in ticks.
const TICKS_LEAST: u32 = 32;
/// Flows whose moments are allocated at once, as in the flow table: they never move.
const CHUNK: usize = 256;

/// Counts of samples by their size, in buckets of powers of two.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Histogram {
    counts: [u64; Self::BOUNDS_NS.len() + 1],
    sum_ticks: u64,
}

impl Histogram {
    /// The highest sample of each bucket, in nanoseconds: 33 us to 1.07 s. One bucket more has all
    /// that are longer.
    pub const BOUNDS_NS: [u64; 16] = {
        let (mut bounds, mut i) = ([TICKS_LEAST as u64 * Instant::TICK; 16], 1);
        while i < 16 {
            bounds[i] = bounds[i - 1] * 2;
            i += 1;
        }
        bounds
    };

    /// Samples in each bucket, those above all bounds last.
    #[must_use]
    pub const fn counts(&self) -> &[u64] {
        &self.counts
    }

    /// The sum of all samples, in nanoseconds.
    #[must_use]
    pub const fn sum_ns(&self) -> u64 {
        self.sum_ticks * Instant::TICK
    }

    #[inline(always)]
    fn observe(&mut self, ticks: u32) {
        let units = ticks.saturating_sub(1) / TICKS_LEAST;
        let bucket = (u32::BITS - units.leading_zeros()) as usize;
        self.counts[bucket.min(Self::BOUNDS_NS.len())] += 1;
        self.sum_ticks += u64::from(ticks);
    }
}

/// The samples of one VM, and the sends of which its guest is to take the ACK.
#[derive(Clone, Copy, Debug, Default)]
pub struct Leads {
    acks: Histogram,
    sends: Histogram,
    /// When H sent by an ACK that the guest has not seen; the first `unseen` of them.
    sent: [u32; LEAD_SENDS_MAX],
    unseen: u8,
}

impl Leads {
    /// From H's ACK until G's.
    #[must_use]
    pub const fn acks(&self) -> &Histogram {
        &self.acks
    }

    /// From H's send until G took the ACK that allowed it.
    #[must_use]
    pub const fn sends(&self) -> &Histogram {
        &self.sends
    }

    /// H sends by an ACK of R that the guest has yet to see. Those beyond [`LEAD_SENDS_MAX`] at a
    /// time give no sample.
    #[inline(never)] // only with congestion offload
    pub(crate) fn on_sent(&mut self, now: Instant) {
        if let Some(place) = self.sent.get_mut(usize::from(self.unseen)) {
            *place = now.low_ticks();
            self.unseen += 1;
        }
    }

    /// The guest has seen everything.
    #[inline(always)]
    pub(crate) fn on_seen(&mut self, now: Instant) {
        if self.unseen > 0 {
            self.end_sends(now);
        }
    }

    #[inline(never)] // as `on_sent`
    fn end_sends(&mut self, now: Instant) {
        for i in 0..usize::from(core::mem::take(&mut self.unseen)) {
            self.sends.observe(now.low_ticks().wrapping_sub(self.sent[i]));
        }
    }
}

/// The last ACKs of H for one flow, in a ring.
#[derive(Clone, Copy, Debug, Default)]
struct Moments {
    /// Low bits of the acknowledgement, and of the tick in which it left.
    acks: [(u32, u32); MOMENTS as usize],
    newest: u8,
    len: u8,
}

const _: () = assert!(size_of::<Moments>() == ACK_MOMENTS_BYTES);

/// The last ACKs of H for each flow, beside the flow table: a flow is found by its slot.
#[derive(Debug, Default)]
pub(crate) struct AckMoments {
    chunks: Vec<Box<[Moments; CHUNK]>>,
}

impl AckMoments {
    #[inline(always)]
    fn of(&mut self, id: FlowId) -> Option<&mut Moments> {
        let index = id.index();
        Some(&mut self.chunks.get_mut(index / CHUNK)?[index % CHUNK])
    }

    /// H's ACK of everything below `ack`, which G has not acknowledged, has just left, or is the
    /// last one still.
    #[inline(never)] // so that its callers need no registers for it
    pub(crate) fn on_sent(&mut self, now: Instant, id: FlowId, ack: u64) {
        match self.of(id) {
            Some(moments) => moments.push(Seq::wrap(ack).0, now.low_ticks()),
            None => self.begin(now, id, ack),
        }
    }

    #[cold]
    fn begin(&mut self, now: Instant, id: FlowId, ack: u64) {
        let chunks = id.index() / CHUNK + 1; // slots are dense
        self.chunks.resize_with(chunks, || Box::new([Moments::default(); CHUNK]));
        self.on_sent(now, id, ack);
    }

    /// G acknowledges everything below `ack`: a sample, if H did before.
    #[inline(never)] // as `on_sent`
    pub(crate) fn on_ack_from_guest(
        &mut self,
        leads: &mut Leads,
        now: Instant,
        id: FlowId,
        ack: u64,
    ) {
        if let Some(at) = self.of(id).and_then(|moments| moments.covering(Seq::wrap(ack).0)) {
            leads.acks.observe(now.low_ticks().wrapping_sub(at));
        }
    }

    /// The flow has gone; another one may get its slot.
    pub(crate) fn forget(&mut self, id: FlowId) {
        if let Some(moments) = self.of(id) {
            moments.len = 0;
        }
    }
}

impl Moments {
    #[inline(always)]
    fn newest(&self) -> (u32, u32) {
        self.acks[usize::from(self.newest % MOMENTS)]
    }

    #[inline(always)]
    fn push(&mut self, ack: u32, at: u32) {
        if self.newest().0 == ack && self.len > 0 {
            return; // a window update
        }
        self.newest = (self.newest + 1) % MOMENTS;
        self.acks[usize::from(self.newest)] = (ack, at);
        self.len += u8::from(self.len < MOMENTS);
    }

    /// When the first ACK left that covers everything below `ack`.
    #[inline(always)]
    fn covering(&self, ack: u32) -> Option<u32> {
        let (covered, at) = self.newest();
        if covered == ack { Some(at) } else { self.first_beyond(ack) }
    }

    /// The same of those beyond `ack`. Behind them are those that G has acknowledged.
    #[inline(never)] // nearly always G acknowledges all that H did
    fn first_beyond(&self, ack: u32) -> Option<u32> {
        let mut found = None;
        for i in 0..self.len {
            let place = self.newest.wrapping_sub(i) % MOMENTS;
            let (covered, at) = self.acks[usize::from(place)];
            if covered.wrapping_sub(ack) >= 1 << 31 {
                break;
            }
            found = Some(at);
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_is_in_the_bucket_of_the_least_bound_that_it_does_not_exceed() {
        let bounds = Histogram::BOUNDS_NS;
        assert_eq!((bounds[0], bounds[15]), (1 << 15, 1 << 30));
        for (i, bound) in bounds.into_iter().enumerate() {
            let bound = u32::try_from(bound / Instant::TICK).unwrap();
            for (ticks, bucket) in [(bound - 1, i), (bound, i), (bound + 1, i + 1)] {
                let mut histogram = Histogram::default();
                histogram.observe(ticks);
                assert_eq!(histogram.counts()[bucket], 1, "{ticks} ticks in bucket {bucket}");
                assert_eq!(histogram.sum_ns(), u64::from(ticks) * 1024);
            }
        }
        let mut histogram = Histogram::default();
        [0, u32::MAX].into_iter().for_each(|ticks| histogram.observe(ticks));
        assert_eq!((histogram.counts()[0], histogram.counts()[16]), (1, 1));
    }

    /// An instant so many ticks after another one.
    fn at(ticks: u64) -> Instant {
        Instant::from_nanos((1 << 30) + ticks * Instant::TICK)
    }

    /// A sample is exact while H's ACK is among the last eight, and else begins later.
    #[test]
    fn a_sample_begins_with_the_first_ack_that_covers_the_byte() {
        let (mut moments, id) = (AckMoments::default(), FlowId::NONE);
        let base = u64::from(u32::MAX) - 5_000; // the low bits wrap in between
        let sample = |moments: &mut AckMoments, ack| {
            let mut leads = Leads::default();
            moments.on_ack_from_guest(&mut leads, at(100), id, ack);
            let samples = leads.acks().counts().iter().sum::<u64>();
            (samples > 0).then(|| leads.acks().sum_ns() / Instant::TICK)
        };
        assert_eq!(sample(&mut moments, base), None);
        for i in 1..=12 {
            moments.on_sent(at(i), id, base + i * 1000);
            moments.on_sent(at(i + 50), id, base + i * 1000); // a window update
        }
        assert_eq!(sample(&mut moments, base + 1_000), Some(95), "the eighth last");
        assert_eq!(sample(&mut moments, base + 6_500), Some(93));
        assert_eq!(sample(&mut moments, base + 7_000), Some(93), "the rest of it");
        assert_eq!(sample(&mut moments, base + 12_000), Some(88));
        assert_eq!(sample(&mut moments, base + 12_500), None, "H did not acknowledge that");
        moments.on_sent(at(90), id, base + 13_000);
        moments.forget(id);
        assert_eq!(sample(&mut moments, base + 12_500), None);
    }

    #[test]
    fn sends_are_sampled_when_the_guest_has_seen_everything() {
        let mut leads = Leads::default();
        leads.on_sent(at(0));
        leads.on_sent(at(900));
        leads.on_seen(at(1_000));
        leads.on_seen(at(2_000));
        let mut expected = Histogram::default();
        [1_000, 100].into_iter().for_each(|ticks| expected.observe(ticks));
        assert_eq!(leads.sends(), &expected);
        (0..100).for_each(|_| leads.on_sent(at(0)));
        leads.on_seen(at(1));
        assert_eq!(leads.sends().counts()[0], LEAD_SENDS_MAX as u64);
    }
}
