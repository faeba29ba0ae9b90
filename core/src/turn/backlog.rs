//! Frames that wait for a guest to post receive buffers; the counterpart of a tap's transmit queue.
//!
//! Several ports may send to one guest. As long as there is room each frame is taken. When there is
//! none, a frame of a port takes the place of the newest frame of the port that has most of the
//! queue, if that still has more than the other one afterwards. So one that sends without end
//! leaves the others their shares, and alone it has all of it. Data that the host itself gives the
//! guest neither gives way nor makes others do so: it would have to be sent again.

use std::collections::VecDeque;

use crate::limits::{BACKLOG_BYTES_MAX, BACKLOG_FRAMES_MAX};
use crate::port::PortId;
use crate::wire::virtio_net::VirtioNetHdr;

/// The cost of a frame in the queue besides its bytes, because the queue is bounded in frames too.
const FRAME_COST: usize = BACKLOG_BYTES_MAX / BACKLOG_FRAMES_MAX;

/// A frame that waits.
#[derive(Debug)]
pub struct Waiting {
    /// The port that it came from; `None`: the host's store.
    pub from: Option<PortId>,
    /// Its header.
    pub hdr: VirtioNetHdr,
    /// All of it.
    pub frame: Box<[u8]>,
}

impl Waiting {
    fn cost(&self) -> usize {
        self.frame.len() + FRAME_COST
    }
}

/// A bounded first-in first-out queue of frames.
#[derive(Debug)]
pub struct Backlog {
    frames: VecDeque<Waiting>,
    frames_max: usize,
    bytes: usize,
    /// Ports with frames in it, and what these take.
    shares: Vec<(PortId, usize)>,
}

impl Backlog {
    /// For so many frames, and [`BACKLOG_BYTES_MAX`] or what all queues together leave free.
    #[must_use]
    pub fn new(frames_max: usize) -> Self {
        Self { frames: VecDeque::new(), frames_max, bytes: 0, shares: Vec::new() }
    }

    /// Whether nothing waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// Bytes waiting.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Takes a copy of a frame that came from a port, for which all queues together have `free`
    /// bytes. Returns how many frames are lost by it: itself, or others that had to give way.
    pub fn push(
        &mut self,
        from: Option<PortId>,
        hdr: &VirtioNetHdr,
        parts: &[&[u8]],
        free: usize,
    ) -> usize {
        let len: usize = parts.iter().map(|p| p.len()).sum();
        let (before, mut lost) = (self.bytes, 0);
        loop {
            let bytes_max = BACKLOG_BYTES_MAX.min(free.saturating_add(before - self.bytes));
            if self.frames.len() < self.frames_max && self.bytes + len <= bytes_max {
                break;
            }
            lost += 1;
            let gives_way = |from| len <= free && self.gives_way(from, len + FRAME_COST);
            if !from.is_some_and(gives_way) {
                return lost;
            }
        }
        self.put(Waiting { from, hdr: *hdr, frame: parts.concat().into_boxed_slice() }, false);
        lost
    }

    /// Drops the newest frame of the port that has most, for one of `from` that takes so much.
    /// `false`: `from` would have more than that then.
    #[cold]
    fn gives_way(&mut self, from: PortId, cost: usize) -> bool {
        let own = self.shares.iter().find(|(port, _)| *port == from).map_or(0, |(_, has)| *has);
        let Some(&(most, has)) = self.shares.iter().max_by_key(|(_, has)| *has) else {
            return false;
        };
        let newest = self.frames.iter().rposition(|waiting| waiting.from == Some(most));
        let Some(newest) = newest.filter(|_| most != from) else { return false };
        if has < own + cost + self.frames[newest].cost() {
            return false;
        }
        let dropped = self.frames.remove(newest).expect("it is there");
        self.note_gone(&dropped);
        true
    }

    fn put(&mut self, waiting: Waiting, is_first: bool) {
        self.bytes += waiting.frame.len();
        if let Some(from) = waiting.from {
            match self.shares.iter_mut().find(|(port, _)| *port == from) {
                Some((_, has)) => *has += waiting.cost(),
                None => self.shares.push((from, waiting.cost())),
            }
        }
        if is_first {
            self.frames.push_front(waiting);
        } else {
            self.frames.push_back(waiting);
        }
    }

    fn note_gone(&mut self, waiting: &Waiting) {
        self.bytes -= waiting.frame.len();
        let Some(from) = waiting.from else { return };
        let at = self.shares.iter().position(|(port, _)| *port == from);
        let at = at.expect("it has a share as long as a frame of it waits");
        self.shares[at].1 -= waiting.cost();
        if self.shares[at].1 == 0 {
            self.shares.swap_remove(at);
        }
    }

    /// Takes out the frame that has waited longest.
    pub fn pop(&mut self) -> Option<Waiting> {
        let waiting = self.frames.pop_front()?;
        self.note_gone(&waiting);
        Some(waiting)
    }

    /// Puts a frame back where [`Self::pop`] took it from.
    pub fn put_back(&mut self, waiting: Waiting) {
        self.put(waiting, true);
    }

    /// Drops all other frames, and returns how many.
    pub fn retain(&mut self, keeps: impl Fn(&[u8]) -> bool) -> usize {
        let before = self.frames.len();
        let (frames, frames_max) = (std::mem::take(&mut self.frames), self.frames_max);
        *self = Self::new(frames_max);
        let kept = frames.into_iter().filter(|waiting| keeps(&waiting.frame));
        kept.for_each(|waiting| self.put(waiting, false));
        before - self.frames.len()
    }

    /// Drops all frames, and returns how many there were.
    pub fn clear(&mut self) -> usize {
        let count = self.frames.len();
        *self = Self::new(self.frames_max);
        count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FRAMES_MAX: usize = 1000;
    const FREE: usize = usize::MAX;
    const A: Option<PortId> = Some(PortId(1));
    const B: Option<PortId> = Some(PortId(2));
    const C: Option<PortId> = Some(PortId(3));

    /// How many frames are lost by one more of so many bytes.
    fn lost(b: &mut Backlog, from: Option<PortId>, len: usize) -> usize {
        b.push(from, &VirtioNetHdr::default(), &[&vec![0; len]], FREE)
    }

    #[test]
    fn frames_come_out_in_order_and_count_their_bytes() {
        let mut b = Backlog::new(FRAMES_MAX);
        assert_eq!(b.push(A, &VirtioNetHdr::default(), &[b"ab", b"c"], FREE), 0);
        assert_eq!(b.push(B, &VirtioNetHdr::default(), &[b"defg"], FREE), 0);
        let first = b.pop().unwrap();
        assert_eq!((b.bytes(), &*first.frame), (4, &b"abc"[..]));
        b.put_back(first);
        assert_eq!(b.bytes(), 7);
        assert_eq!(b.retain(|frame| frame == b"abc"), 1);
        assert_eq!((b.bytes(), &b.shares[..]), (3, &[(A.unwrap(), 3 + FRAME_COST)][..]));
        assert_eq!(&*b.pop().unwrap().frame, b"abc");
        assert!(b.is_empty() && b.bytes() == 0 && b.shares.is_empty() && b.pop().is_none());
    }

    #[test]
    fn the_queue_is_bounded_in_frames_and_in_bytes() {
        let mut b = Backlog::new(FRAMES_MAX);
        for _ in 0..FRAMES_MAX {
            assert_eq!(lost(&mut b, A, 60), 0);
        }
        assert_eq!(lost(&mut b, A, 60), 1);
        assert_eq!(b.clear(), FRAMES_MAX);
        let fit = (0..FRAMES_MAX).take_while(|_| lost(&mut b, A, 65_000) == 0);
        assert_eq!(fit.count(), BACKLOG_BYTES_MAX / 65_000);
        assert_eq!(lost(&mut b, A, 60), 0, "a small one still fits");
    }

    /// Waiting frames of each of them.
    fn frames_of(b: &Backlog) -> [usize; 3] {
        [A, B, C].map(|port| b.frames.iter().filter(|waiting| waiting.from == port).count())
    }

    #[test]
    fn who_sends_without_end_leaves_others_their_shares_of_a_full_queue() {
        let mut b = Backlog::new(FRAMES_MAX);
        for _ in 0..2 * FRAMES_MAX {
            lost(&mut b, A, 60);
        }
        assert_eq!(frames_of(&b), [FRAMES_MAX, 0, 0], "alone it has all of it");
        for n in 1..=10 {
            assert_eq!(lost(&mut b, B, 60), 1);
            assert_eq!(lost(&mut b, A, 60), 1, "its own");
            assert_eq!(frames_of(&b), [FRAMES_MAX - n, n, 0]);
        }
        for _ in 0..2 * FRAMES_MAX {
            lost(&mut b, B, 60);
            lost(&mut b, C, 60);
        }
        let [a, b_has, c] = frames_of(&b);
        assert_eq!(a + b_has + c, FRAMES_MAX);
        assert!(
            [a, b_has, c].iter().all(|has| has.abs_diff(FRAMES_MAX / 3) <= 1),
            "{a} {b_has} {c}"
        );
        // The oldest frame of each is still there, and first.
        assert_eq!(b.pop().unwrap().from, A);
    }

    #[test]
    fn a_long_frame_takes_the_place_of_several_and_of_none_in_vain() {
        let mut b = Backlog::new(FRAMES_MAX);
        while lost(&mut b, A, 8000) == 0 {}
        let before = BACKLOG_BYTES_MAX / 8000;
        assert_eq!((frames_of(&b), lost(&mut b, B, 40_000)), ([before, 0, 0], 5));
        assert_eq!(frames_of(&b), [before - 5, 1, 0]);
        // Frames of the host for the guest stay, and take no other's place.
        b.clear();
        for _ in 0..FRAMES_MAX {
            lost(&mut b, None, 60);
        }
        assert_eq!([lost(&mut b, A, 60), lost(&mut b, None, 60)], [1, 1]);
        assert_eq!(b.clear(), FRAMES_MAX);
        // One for which all queues leave no room.
        lost(&mut b, A, 4000);
        assert_eq!(b.push(C, &VirtioNetHdr::default(), &[&[0; 60]], 0), 1);
        assert_eq!(b.bytes(), 4000);
    }
}
