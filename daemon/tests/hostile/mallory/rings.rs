//! A villain's deeds on its rings.

use super::{
    AVAIL, CRUMBS, PLACE, PLACES, PLACES_COUNT, QUEUE_SIZE, RING, Random, SIEVE, SIEVE_AT, TABLE,
    USED, Villain, WIDE, WIDE_AT, pair, sparse, words,
};
use crate::driver::{GUEST_BASE, INDIRECT, NEXT, WRITE};
use crate::guest::RAM_LEN;

impl Villain {
    /// Frames or packets, as somebody sends them who means well; so that there is more to its life
    /// than its end.
    pub(super) fn sends_frames(&mut self, random: &mut Random) -> bool {
        let (queue, count) = (self.queue_from(random), 1 + random.below(16));
        for n in 0..count {
            let at = PLACES + random.below(PLACES_COUNT) * PLACE;
            let len = random.of(&[72, 1526]);
            let head = self.slot(queue, n);
            self.ram.write(ring(queue) + 16 * head, &words(&[at, len]));
            self.names(queue, n, head);
        }
        self.has_offered(queue, count)
    }

    /// Likewise, of pages that are far from each other.
    pub(super) fn sends_from_far_away(&mut self, random: &mut Random) -> bool {
        if !std::mem::replace(&mut self.is_wide, true) {
            let wide = sparse(WIDE);
            return self.region(WIDE_AT, WIDE, &wide) && self.asks();
        }
        let queue = self.queue_from(random);
        for n in 0..16 {
            let at = WIDE_AT + random.below(WIDE >> 21) * (2 << 20);
            let head = self.slot(queue, n);
            self.ram.write(ring(queue) + 16 * head, &words(&[at, 72]));
            self.names(queue, n, head);
        }
        self.has_offered(queue, 16)
    }

    /// Likewise, of pages that may be in a hole.
    pub(super) fn sends_from_holes(&mut self, random: &mut Random) -> bool {
        if self.sieve.is_none() {
            let sieve = sparse(SIEVE);
            let given = self.region(SIEVE_AT, SIEVE, &sieve) && self.asks();
            self.sieve = Some(sieve);
            return given;
        }
        let queue = self.queue_from(random);
        for n in 0..16 {
            let at = SIEVE_AT + random.below(SIEVE >> 12) * 4096;
            let head = self.slot(queue, n);
            self.ram.write(ring(queue) + 16 * head, &words(&[at, 72]));
            self.names(queue, n, head);
        }
        self.has_offered(queue, 16)
    }

    pub(super) fn offers_buffers(&mut self, random: &mut Random) -> bool {
        let (queue, count) = (2 * random.below(self.queues() / 2), 1 + random.below(16));
        for n in 0..count {
            let at = PLACES + random.below(PLACES_COUNT) * PLACE;
            let head = self.slot(queue, n);
            let buffer = words(&[at, pair(PLACE, WRITE.into())]);
            self.ram.write(ring(queue) + 16 * head, &buffer);
            self.names(queue, n, head);
        }
        self.has_offered(queue, count)
    }

    /// Chains of a thousand buffers each, as many as a ring holds.
    pub(super) fn offers_crumbs(&mut self, random: &mut Random) -> bool {
        let queue = self.queue(random);
        for n in 0..QUEUE_SIZE {
            let table = words(&[TABLE, pair(16 * CRUMBS, INDIRECT.into())]);
            self.ram.write(ring(queue) + 16 * n, &table);
            self.names(queue, n, n);
        }
        self.has_offered(queue, QUEUE_SIZE)
    }

    /// Each descriptor names the next, and the last may name the first.
    pub(super) fn offers_a_long_chain(&mut self, random: &mut Random) -> bool {
        let (queue, len) = (self.queue(random), random.of(&[0, 1, 64, 65_562, 0xffff_ffff]));
        let write = random.of(&[0, WRITE]);
        for n in 0..QUEUE_SIZE {
            let last = n + 1 == QUEUE_SIZE && random.below(2) == 0;
            let flags = u64::from(write | if last { 0 } else { NEXT });
            let next = ((n + 1) % QUEUE_SIZE) << 16;
            let desc = words(&[PLACES + n * PLACE, pair(len, flags | next)]);
            self.ram.write(ring(queue) + 16 * n, &desc);
            self.names(queue, n, 0);
        }
        self.has_offered(queue, random.of(&[1, 2, 16, QUEUE_SIZE]))
    }

    /// Descriptors of anything, offered in any order.
    pub(super) fn offers(&mut self, random: &mut Random) -> bool {
        let queue = self.queue(random);
        for _ in 0..random.below(64) {
            let at = ring(queue) + 16 * random.below(QUEUE_SIZE);
            let usual = [0, 1, 12, 72, 1526, 4096, 65_562, 0xffff_ffff];
            let (len, flags) = (random.of(&usual), random.below(8));
            let addr = match random.below(8) {
                0 => random.word(),
                1..4 => GUEST_BASE + random.below(RAM_LEN),
                _ => PLACES + random.below(PLACES_COUNT) * PLACE,
            };
            let next = random.below(QUEUE_SIZE + 2);
            self.ram.write(at, &words(&[addr, pair(len, flags | next << 16)]));
        }
        // One lie, and the ring is out of use: most of the time it tells none.
        let lie = u64::from(random.below(64) == 0);
        let count = random.of(&[1, 1, 2, 17, 256, if lie == 1 { 40_000 } else { 3 }]);
        for n in 0..count.min(QUEUE_SIZE) {
            let head = random.below(QUEUE_SIZE + lie);
            self.names(queue, n, head);
        }
        self.has_offered(queue, count)
    }

    /// Where the next but `n` chain of a queue is named.
    pub(super) fn slot(&self, queue: u64, n: u64) -> u64 {
        (u64::from(self.avail_idx[usize::try_from(queue).unwrap()]) + n) % QUEUE_SIZE
    }

    /// That chain begins with this descriptor.
    pub(super) fn names(&self, queue: u64, n: u64, head: u64) {
        let at = ring(queue) + AVAIL + 4 + 2 * self.slot(queue, n);
        self.ram.set_u16(at, u16::try_from(head).unwrap());
    }

    /// No more than the ring holds, unless that is more than it ever holds.
    pub(super) fn has_offered(&mut self, queue: u64, count: u64) -> bool {
        let used = self.ram.u16(ring(queue) + USED + 2);
        let idx = &mut self.avail_idx[usize::try_from(queue).unwrap()];
        let waits = u64::from(idx.wrapping_sub(used));
        let count =
            if count > QUEUE_SIZE { count } else { count.min(QUEUE_SIZE.saturating_sub(waits)) };
        *idx = idx.wrapping_add(u16::try_from(count).unwrap());
        self.ram.set_u16(ring(queue) + AVAIL + 2, *idx);
        self.kicks(1)
    }

    pub(super) fn kicks(&mut self, count: u64) -> bool {
        for _ in 0..count {
            let _ = rustix::io::write(&self.kick, &1_u64.to_ne_bytes());
        }
        true
    }

    /// Its memory says something else.
    pub(super) fn scribbles(&mut self, random: &mut Random) -> bool {
        let queue = self.queue(random);
        // In the areas of driver and device seldom: their numbers are soon lies.
        let len = if random.below(16) == 0 { 2 * USED } else { AVAIL };
        let at = ring(queue) + random.below(len.min(RING) - 64);
        let noise: Vec<u8> = (0..8).flat_map(|_| random.word().to_ne_bytes()).collect();
        self.ram.write(at, &noise);
        self.kicks(1)
    }
}

pub(super) fn ring(index: u64) -> u64 {
    GUEST_BASE + RING * (1 + index)
}
