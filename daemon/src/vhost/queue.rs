//! Frames in and out of one running queue.
//!
//! From the guest: a chain is copied into the caller's buffer and completed at once. To the guest:
//! chains are taken only when there is something to put into them, held until a frame needs them,
//! and filled in order; with MRG_RXBUF one frame may take several.

use std::collections::VecDeque;

use nightporter_core::wire::virtio_net::VirtioNetHdr;
use vm_memory::VolatileMemory;

use super::device::DeviceQueue;
use super::guest_mem::GuestMemory;
use super::ring::{Buffer, Ring, RingFault};

/// Completed frames are shown to the driver in groups of this many, so that both sides work at the
/// same time, but do not fight for a cache line at every frame: against DPDK's `virtio_user`,
/// groups of 1 and 8 moved fewer frames than 32 and 128 in all of five interleaved runs but one.
const PUBLISH_EVERY: u16 = 64;

/// Chains and buffers of a queue that are looked at in a turn: 64 frames of 32 buffers. A chain
/// that was begun is finished, so it may be one more chain.
pub const WORK_PER_TURN: usize = 2048;
/// A receive chain of more buffers than this has so many bytes in each of them, on average: a frame
/// of 64 KiB is written in 4,096 pieces at most.
pub(super) const CRUMBS: usize = 16;

/// How frames lie in a chain, by negotiation.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Layout {
    /// Bytes of the virtio-net header: 12, or 10 for a legacy driver without MRG_RXBUF.
    pub hdr_len: usize,
    /// VIRTIO_NET_F_MRG_RXBUF: a frame to the guest may take several chains.
    pub merge: bool,
}

/// The result of [`Queue::poll_frame`].
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Polled {
    /// Nothing on offer.
    Empty,
    /// A frame of so many bytes is in the buffer.
    Frame(VirtioNetHdr, usize),
    /// A chain shorter than the header; completed and lost.
    Truncated,
    /// A frame longer than the buffer; completed and lost.
    TooBig,
}

/// Why a frame was not given to the guest.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum PushError {
    /// Not enough buffers on offer, or no driver: try again when the guest offers more.
    Full,
    /// The driver takes one buffer per frame and this frame is longer than the next one; or it is
    /// longer than all buffers of the ring.
    TooBig,
}

/// A buffer to be filled: guest address and bytes.
type Piece = (u64, usize);

/// A chain that was taken to be filled.
#[derive(Debug)]
struct Held {
    head: u16,
    /// Bytes of all its buffers.
    len: usize,
    first: Piece,
    /// How many of `Queue::pieces` are its further buffers.
    more: usize,
}

/// A running queue, of either direction.
#[derive(Debug)]
pub struct Queue {
    /// The ring itself.
    pub ring: Ring,
    held: VecDeque<Held>,
    /// All but the first buffers of all held chains, in order.
    pieces: VecDeque<Piece>,
    /// Bytes in all held chains.
    held_len: usize,
    /// Chains and buffers that were looked at since the queue was last flushed.
    pub work: usize,
}

impl DeviceQueue for Queue {
    fn new(ring: Ring) -> Self {
        Self::new(ring)
    }

    fn ring(&mut self) -> &mut Ring {
        &mut self.ring
    }

    fn begin_turn(&mut self) {
        self.work = 0;
    }
}

impl Queue {
    /// A queue on a ring that was just started.
    #[must_use]
    pub const fn new(ring: Ring) -> Self {
        Self { ring, held: VecDeque::new(), pieces: VecDeque::new(), held_len: 0, work: 0 }
    }

    /// Takes the next frame from the guest: copies it into `buf` and completes its chain.
    #[inline]
    pub fn poll_frame(
        &mut self,
        memory: &GuestMemory,
        hdr_len: usize,
        buf: &mut [u8],
    ) -> Result<Polled, RingFault> {
        let Some(head) = self.ring.take()? else { return Ok(Polled::Empty) };
        self.work += 1;
        let polled = match self.ring.single(head)? {
            Some(buffer) if !buffer.writable => read_single(memory, buffer, hdr_len, buf),
            _ => None,
        };
        let polled = match polled {
            Some(polled) => polled,
            None => self.read_chain(memory, head, hdr_len, buf)?,
        };
        self.work += memory.take_work_of_frame();
        self.complete(head, 0)?;
        self.publish_some();
        Ok(polled)
    }

    /// The longest frame (without virtio-net header) that fits now. Looks for buffers only until
    /// `want` is reached.
    #[inline]
    pub fn room(
        &mut self,
        memory: &GuestMemory,
        layout: Layout,
        want: usize,
    ) -> Result<usize, RingFault> {
        let held = self.gather(memory, layout, want.saturating_add(layout.hdr_len))?;
        Ok(held.saturating_sub(layout.hdr_len))
    }

    /// Gives the guest one frame: `hdr`, then `parts`. The inner error is not the guest's fault.
    #[inline]
    pub fn push_frame(
        &mut self,
        memory: &GuestMemory,
        layout: Layout,
        hdr: &VirtioNetHdr,
        parts: &[&[u8]],
    ) -> Result<Result<(), PushError>, RingFault> {
        let total = layout.hdr_len + parts.iter().map(|p| p.len()).sum::<usize>();
        if self.held.is_empty() {
            if self.has_spent() {
                return Ok(Err(PushError::Full));
            }
            let Some(head) = self.ring.take()? else { return Ok(Err(PushError::Full)) };
            let start = &start_bytes(hdr, 1)[..layout.hdr_len];
            if let Some(buffer) = self.ring.single(head)?
                && write_single(memory, buffer, total, start, parts)
            {
                self.work += memory.take_work();
                self.complete(head, total)?;
                self.publish_some();
                return Ok(Ok(()));
            }
            self.hold(memory, head, layout.hdr_len)?;
        }
        self.push_over_chains(memory, layout, hdr, parts, total)
    }

    /// Reads a frame out of a chain of any form.
    fn read_chain(
        &mut self,
        memory: &GuestMemory,
        head: u16,
        hdr_len: usize,
        buf: &mut [u8],
    ) -> Result<Polled, RingFault> {
        let mut hdr = [0; VirtioNetHdr::LEN_MRG];
        let (mut hdr_have, mut len, mut fits) = (0, 0_usize, true);
        let Self { ring, work, .. } = self;
        ring.walk(memory, head, |buffer| {
            *work += 1;
            if buffer.writable {
                return Err(RingFault::WrongDirection);
            }
            let to_hdr = (buffer.len as usize).min(hdr_len - hdr_have);
            let to = &mut hdr[hdr_have..hdr_have + to_hdr];
            memory.read(buffer.guest, to).ok_or(RingFault::OutsideMemory)?;
            hdr_have += to_hdr;
            // Cannot wrap while bytes are left: those before were just read.
            let from = buffer.guest.wrapping_add(to_hdr as u64);
            let left = buffer.len as usize - to_hdr;
            match buf.get_mut(len..len.saturating_add(left)) {
                Some(to) => memory.read(from, to).ok_or(RingFault::OutsideMemory)?,
                None => fits = false,
            }
            len = len.saturating_add(left);
            Ok(())
        })?;
        let common = hdr.first_chunk().expect("twelve bytes start with ten");
        Ok(match (hdr_have == hdr_len, fits) {
            (true, true) => Polled::Frame(VirtioNetHdr::parse(common), len),
            (false, _) => Polled::Truncated,
            (true, false) => Polled::TooBig,
        })
    }

    /// Gives the guest a frame of `total` bytes, header included, over as many chains as it takes.
    fn push_over_chains(
        &mut self,
        memory: &GuestMemory,
        layout: Layout,
        hdr: &VirtioNetHdr,
        parts: &[&[u8]],
        total: usize,
    ) -> Result<Result<(), PushError>, RingFault> {
        if self.gather(memory, layout, total)? < total {
            let all = self.held.len() >= usize::from(self.ring.size());
            let never = all || !layout.merge && !self.held.is_empty();
            return Ok(Err(if never { PushError::TooBig } else { PushError::Full }));
        }
        let chains = self.chains_for(total);
        let start = start_bytes(hdr, chains);
        let mut source = Source { piece: &start[..layout.hdr_len], rest: parts };
        for _ in 0..chains {
            self.fill(memory, &mut source)?;
        }
        self.publish_some();
        Ok(Ok(()))
    }

    /// How many of the held chains take `total` bytes.
    #[inline]
    fn chains_for(&self, total: usize) -> u16 {
        let (mut chains, mut len) = (0, 0);
        for held in &self.held {
            if len >= total {
                break;
            }
            len += held.len;
            chains += 1;
        }
        chains
    }

    /// Holds chains until they have `need` bytes for one frame, header included, or there are no
    /// more; the bytes that they have.
    #[inline]
    fn gather(
        &mut self,
        memory: &GuestMemory,
        layout: Layout,
        need: usize,
    ) -> Result<usize, RingFault> {
        while self.held_len < need && (layout.merge || self.held.is_empty()) && !self.has_spent() {
            let Some(head) = self.ring.take()? else { break };
            self.hold(memory, head, layout.hdr_len)?;
        }
        Ok(match self.held.front() {
            Some(first) if !layout.merge => first.len,
            _ => self.held_len,
        })
    }

    /// Whether looking at chains was enough work until the next flush.
    #[must_use]
    pub const fn has_spent(&self) -> bool {
        self.work >= WORK_PER_TURN
    }

    /// Keeps the chain at `head` to fill it later.
    fn hold(&mut self, memory: &GuestMemory, head: u16, hdr_len: usize) -> Result<(), RingFault> {
        let mut held = Held { head, len: 0, first: (0, 0), more: 0 };
        let Self { ring, pieces, work, .. } = self;
        ring.walk(memory, head, |buffer| {
            *work += 1;
            if !buffer.writable {
                return Err(RingFault::WrongDirection);
            }
            let piece = (buffer.guest, buffer.len as usize);
            if !memory.contains(piece.0, piece.1) {
                return Err(RingFault::OutsideMemory);
            }
            if held.len == 0 {
                held.first = piece;
            } else {
                pieces.push_back(piece);
                held.more += 1;
            }
            held.len += piece.1;
            Ok(())
        })?;
        self.work += memory.take_work();
        // Virtio 1.2 section 5.1.6.3.1: every buffer holds at least the header. And tiny buffers
        // would make this code write 64 KiB in as many pieces.
        if held.len < hdr_len || held.more > CRUMBS && held.len < held.more * CRUMBS {
            return Err(RingFault::BufferTooSmall);
        }
        self.held_len += held.len;
        self.held.push_back(held);
        Ok(())
    }

    /// Fills the oldest held chain with the rest of `source`, and completes it.
    #[inline]
    fn fill(&mut self, memory: &GuestMemory, source: &mut Source<'_>) -> Result<(), RingFault> {
        let held = self.held.pop_front().expect("counted before");
        self.held_len -= held.len;
        let mut written = source.write(memory, held.first)?;
        for _ in 0..held.more {
            let piece = self.pieces.pop_front().expect("counted when it was held");
            written += source.write(memory, piece)?;
        }
        self.work += memory.take_work_of_frame();
        self.complete(held.head, written)
    }

    #[inline]
    fn complete(&mut self, head: u16, written: usize) -> Result<(), RingFault> {
        self.ring.complete(head, u32::try_from(written).expect("frames are shorter than 4 GiB"))
    }

    /// Publishes completed chains when there are enough. Never in the middle of a frame: the driver
    /// would drop a frame whose further buffers it cannot see.
    #[inline]
    fn publish_some(&mut self) {
        if self.ring.unpublished() >= PUBLISH_EVERY {
            self.ring.publish();
        }
    }
}

/// The virtio-net header with `num_buffers`.
#[inline]
fn start_bytes(hdr: &VirtioNetHdr, chains: u16) -> [u8; VirtioNetHdr::LEN_MRG] {
    let mut start = [0; VirtioNetHdr::LEN_MRG];
    start[..VirtioNetHdr::LEN].copy_from_slice(&hdr.emit());
    start[VirtioNetHdr::LEN..].copy_from_slice(&chains.to_le_bytes());
    start
}

/// Reads a frame that is one buffer in one region. `None`: it is not, or something is wrong.
#[inline]
fn read_single(
    memory: &GuestMemory,
    buffer: Buffer,
    hdr_len: usize,
    buf: &mut [u8],
) -> Option<Polled> {
    let from = memory.whole(buffer.guest, buffer.len as usize)?;
    let len = from.len().checked_sub(hdr_len)?;
    let to = buf.get_mut(..len)?;
    // Two loads, where an array of bytes would take ten.
    let mut hdr = [0; VirtioNetHdr::LEN];
    hdr[..8].copy_from_slice(&from.get_ref::<u64>(0).ok()?.load().to_ne_bytes());
    hdr[8..].copy_from_slice(&from.get_ref::<u16>(8).ok()?.load().to_ne_bytes());
    from.offset(hdr_len).ok()?.copy_to(to);
    Some(Polled::Frame(VirtioNetHdr::parse(&hdr), len))
}

/// Writes a frame of `total` bytes into one buffer in one region; `false`: it does not fit, or
/// something is wrong.
#[inline]
fn write_single(
    memory: &GuestMemory,
    buffer: Buffer,
    total: usize,
    start: &[u8],
    parts: &[&[u8]],
) -> bool {
    if !buffer.writable || total > buffer.len as usize {
        return false;
    }
    let Some(mut to) = memory.whole(buffer.guest, buffer.len as usize) else { return false };
    to.copy_from(start);
    let mut len = start.len();
    for part in parts {
        let Ok(rest) = to.offset(len) else { return false };
        to = rest;
        to.copy_from(part);
        len = part.len();
    }
    memory.mark(buffer.guest, total);
    true
}

/// The bytes of a frame that are still to be written.
struct Source<'a> {
    piece: &'a [u8],
    rest: &'a [&'a [u8]],
}

impl<'a> Source<'a> {
    /// Writes into one buffer until either end; bytes written.
    #[inline]
    fn write(&mut self, memory: &GuestMemory, to: Piece) -> Result<usize, RingFault> {
        let mut written = 0;
        loop {
            let bytes = self.next(to.1 - written);
            if bytes.is_empty() {
                return Ok(written);
            }
            // Cannot wrap: the bytes before were just written.
            let at = to.0.wrapping_add(written as u64);
            memory.write(at, bytes).ok_or(RingFault::OutsideMemory)?;
            written += bytes.len();
        }
    }

    /// At most `max` of the next bytes; empty only at the end.
    #[inline]
    fn next(&mut self, max: usize) -> &'a [u8] {
        while self.piece.is_empty() {
            let Some((first, rest)) = self.rest.split_first() else { return &[] };
            self.piece = first;
            self.rest = rest;
        }
        let (bytes, piece) = self.piece.split_at(max.min(self.piece.len()));
        self.piece = piece;
        bytes
    }
}
