//! One deadline per flow, O(1) for everything (SEC-12): a hashed timing wheel in two levels.
//!
//! # Primer
//!
//! Time is counted in ticks: of 1 ms for flows ([`TimerWheel`]), of 64 us for senders toward R,
//! whose pace is finer ([`PaceWheel`]). A deadline is rounded up to its tick, so nothing fires
//! early. The numbers below are for 1 ms.
//!
//! - The fine level has a bucket per tick for the next 4096 ticks. A bucket holds one tick only.
//! - The coarse level has a bucket per block of 4096 ticks (4.1 s) for the next 4096 blocks (4.7
//!   h). When time enters a block, its entries move to the fine level. A deadline beyond that
//!   waits in the last bucket and is looked at again; one beyond 24 days fires after 24 days.
//!
//! So an entry is touched once per expiry and at most once more per 4.7 h of waiting: a million
//! idle flows with hour-long timers cost nothing per tick, and the wheel never asks to be woken
//! before something is due or a block that is not empty begins.
//!
//! Buckets are doubly linked lists through one array of links indexed by the flow's slot.

use super::table::FlowId;
use crate::time::{Duration, Instant};

/// Buckets per level.
const BUCKETS: u32 = 4096;
const BLOCK_BITS: u32 = BUCKETS.trailing_zeros();
const WORDS: usize = BUCKETS as usize / 64;
/// Entries that one [`TimerWheel::expired`] moves from coarse to fine before it returns.
const MOVES_MAX: u32 = 256;
/// The farthest deadline: links hold the low 32 bits of the tick.
const FAR_TICKS: u64 = 1 << 31;

/// A tick that does not come.
const NEVER: u64 = u64::MAX;

/// In `next`: end of the list. In `prev`: not scheduled. (`FlowId` leaves the two top bits free.)
const NONE: u32 = u32::MAX;
/// In `prev`: first of the list; the low bits are the bucket.
const HEAD: u32 = 1 << 31;

/// One flow's place in the wheel.
#[derive(Clone, Copy, Debug)]
struct TimerLinks {
    prev: u32,
    next: u32,
    /// Low 32 bits of the deadline's tick.
    at: u32,
}

const UNSCHEDULED: TimerLinks = TimerLinks { prev: NONE, next: NONE, at: 0 };
const _: () = assert!(size_of::<TimerLinks>() == crate::limits::FLOW_TIMER_BYTES);

/// Deadlines of flows, with a tick of so many nanoseconds. The caller keeps one per flow: its
/// earliest.
#[derive(Debug)]
pub struct Wheel<const TICK_NS: u64> {
    links: Vec<TimerLinks>,
    /// First flow of each bucket: fine level, then coarse level.
    heads: Box<[u32]>,
    fine: Bitmap,
    coarse: Bitmap,
    /// Everything due before this tick was popped.
    tick: u64,
}

/// The deadlines of flows.
pub type TimerWheel = Wheel<1_000_000>;

/// The deadlines of senders toward R.
pub type PaceWheel = Wheel<65_536>;

impl<const TICK_NS: u64> Wheel<TICK_NS> {
    /// An empty wheel whose time starts at `now`.
    #[must_use]
    pub fn new(now: Instant) -> Self {
        Self {
            links: Vec::new(),
            heads: vec![NONE; 2 * BUCKETS as usize].into_boxed_slice(),
            fine: Bitmap::default(),
            coarse: Bitmap::default(),
            tick: now.as_nanos() / TICK_NS,
        }
    }

    /// Wakes the flow at `at` or, if it already has an earlier deadline, then.
    ///
    /// A flow that wants a later one says so when it is woken: moving a deadline on every packet
    /// would cost more than one early wake-up.
    pub fn schedule(&mut self, id: FlowId, at: Instant) {
        if self.links.len() <= id.index() {
            self.links.resize(id.index() + 1, UNSCHEDULED);
        }
        let at = Self::tick_of(at).clamp(self.tick, self.tick.saturating_add(FAR_TICKS - 1));
        let links = self.links[id.index()];
        if links.prev != NONE {
            if self.full_tick(links.at) <= at {
                return;
            }
            self.unlink(id);
        }
        self.link(id, at);
    }

    /// Reads the place of the flow in slot `index`.
    #[inline]
    #[must_use]
    pub fn fetch(&self, index: usize) -> u64 {
        self.links.get(index).map_or(0, |links| links.at.into())
    }

    /// The flow has no deadline any more. Call before the flow is removed.
    pub fn cancel(&mut self, id: FlowId) {
        if self.links.get(id.index()).is_some_and(|l| l.prev != NONE) {
            self.unlink(id);
        }
    }

    /// The next flow whose deadline is not after `now`, in order of deadlines; it has none then.
    ///
    /// The work of a call is bounded, however far time jumped (LIFE-11). `None` means nothing is
    /// due, or that more entries must be sorted in than one call does; then [`Self::next`] is not
    /// after `now` and the caller comes back after it has done something else.
    #[must_use]
    pub fn expired(&mut self, now: Instant) -> Option<FlowId> {
        let target = now.as_nanos() / TICK_NS;
        for _ in 0..MOVES_MAX {
            let block = self.tick >> BLOCK_BITS;
            if let Some(id) = self.first(BUCKETS + low_bits(block)) {
                let at = self.full_tick(self.links[id.index()].at);
                self.unlink(id);
                self.link(id, at);
                continue;
            }
            if let Some(id) = self.first(low_bits(self.tick)).filter(|_| self.tick <= target) {
                self.unlink(id);
                return Some(id);
            }
            let next = self.next_tick().min(target);
            if next <= self.tick {
                return None;
            }
            self.tick = next;
        }
        None
    }

    /// No flow has a deadline.
    #[inline]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.fine.summary | self.coarse.summary == 0
    }

    /// When [`Self::expired`] has something to do; `None` if no flow has a deadline.
    #[must_use]
    pub fn next(&self) -> Option<Instant> {
        let tick = Some(self.next_tick()).filter(|&tick| tick != NEVER);
        tick.map(|tick| Instant::from_nanos(tick.saturating_mul(TICK_NS)))
    }

    /// The tick at which the first fine bucket is due or the first coarse one is to be sorted in;
    /// [`NEVER`] if all are empty.
    fn next_tick(&self) -> u64 {
        let fine = self.fine.next_from(low_bits(self.tick)).map_or(NEVER, |d| self.tick + d);
        let block = self.tick >> BLOCK_BITS;
        // A block is due when it begins, so the current one was.
        let coarse = self.coarse.next_from(low_bits(block));
        let coarse = coarse.map_or(NEVER, |d| (block + d) << BLOCK_BITS);
        fine.min(coarse)
    }

    /// The 64-bit tick whose low half is `at`: the one nearest to now.
    fn full_tick(&self, at: u32) -> u64 {
        let ahead = at.wrapping_sub(low_half(self.tick)).cast_signed();
        self.tick.saturating_add_signed(i64::from(ahead))
    }

    fn tick_of(at: Instant) -> u64 {
        (at + Duration::from_nanos(TICK_NS - 1)).as_nanos() / TICK_NS
    }

    fn first(&self, bucket: u32) -> Option<FlowId> {
        let head = self.heads[bucket as usize];
        (head != NONE).then_some(FlowId(head))
    }

    fn link(&mut self, id: FlowId, at: u64) {
        let bucket = if at - self.tick < u64::from(BUCKETS) {
            self.fine.set(low_bits(at));
            low_bits(at)
        } else {
            let last = (self.tick >> BLOCK_BITS) + u64::from(BUCKETS) - 1;
            let block = low_bits((at >> BLOCK_BITS).min(last));
            self.coarse.set(block);
            BUCKETS + block
        };
        let next = core::mem::replace(&mut self.heads[bucket as usize], id.0);
        if next != NONE {
            self.links[FlowId(next).index()].prev = id.0;
        }
        self.links[id.index()] = TimerLinks { prev: HEAD | bucket, next, at: low_half(at) };
    }

    fn unlink(&mut self, id: FlowId) {
        let TimerLinks { prev, next, .. } =
            core::mem::replace(&mut self.links[id.index()], UNSCHEDULED);
        if next != NONE {
            self.links[FlowId(next).index()].prev = prev;
        }
        if prev & HEAD == 0 {
            self.links[FlowId(prev).index()].next = next;
            return;
        }
        let bucket = prev & !HEAD;
        self.heads[bucket as usize] = next;
        if next == NONE {
            let level = if bucket < BUCKETS { &mut self.fine } else { &mut self.coarse };
            level.clear(bucket % BUCKETS);
        }
    }
}

/// Which buckets of a level are not empty.
#[derive(Debug)]
struct Bitmap {
    words: [u64; WORDS],
    /// Which words are not zero.
    summary: u64,
}

const _: () = assert!(WORDS == 64);

impl Default for Bitmap {
    fn default() -> Self {
        Self { words: [0; WORDS], summary: 0 }
    }
}

impl Bitmap {
    fn set(&mut self, bit: u32) {
        self.words[bit as usize / 64] |= 1 << (bit % 64);
        self.summary |= 1 << (bit / 64);
    }

    fn clear(&mut self, bit: u32) {
        let word = &mut self.words[bit as usize / 64];
        *word &= !(1 << (bit % 64));
        if *word == 0 {
            self.summary &= !(1 << (bit / 64));
        }
    }

    /// Distance from `from`, going up and around, to the first bit that is set.
    fn next_from(&self, from: u32) -> Option<u64> {
        let (word, bit) = (from / 64, from % 64);
        let here = self.words[word as usize] >> bit;
        if here != 0 {
            return Some(here.trailing_zeros().into());
        }
        // The words after this one, around, and last this one again with its lower bits.
        let after = self.summary.rotate_right(word + 1);
        if after == 0 {
            return None;
        }
        let found = (word + 1 + after.trailing_zeros()) % 64;
        let found_bit = found * 64 + self.words[found as usize].trailing_zeros();
        Some((found_bit.wrapping_sub(from) % BUCKETS).into())
    }
}

fn low_half(tick: u64) -> u32 {
    // The loss of the upper half is the purpose.
    #[expect(clippy::cast_possible_truncation)]
    let low = tick as u32;
    low
}

/// The bucket of a tick or block in its level.
fn low_bits(n: u64) -> u32 {
    low_half(n) % BUCKETS
}

#[cfg(test)]
mod tests;
