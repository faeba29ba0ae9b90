//! Frames in and out of one running queue.
//!
//! From the guest: a chain is copied into the caller's buffer and completed at once. To the guest:
//! chains are taken only when there is something to put into them, held until a frame needs them,
//! and filled in order; with MRG_RXBUF one frame may take several.

use std::collections::VecDeque;

use nightporter_core::wire::virtio_net::VirtioNetHdr;

use super::guest_mem::GuestMemory;
use super::ring::{Ring, RingFault};

/// Completed frames are shown to the driver in groups of this many, so that both sides work at the
/// same time. Measured against DPDK's `virtio_user`; 1 costs a cache line bounce per frame.
const PUBLISH_EVERY: u16 = 32;

/// How frames lie in a chain, by negotiation.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Layout {
    /// Bytes of the virtio-net header: 12, or 10 for a legacy driver without MRG_RXBUF.
    pub hdr_len: usize,
    /// VIRTIO_NET_F_MRG_RXBUF: a frame to the guest may take several chains.
    pub merge: bool,
}

/// What [`Queue::poll_frame`] found.
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
    /// The driver takes one buffer per frame and this frame is longer than the next one.
    TooBig,
}

/// A chain that was taken to be filled.
#[derive(Debug)]
struct Held {
    head: u16,
    pieces: usize,
    len: usize,
}

/// A running queue, of either direction.
#[derive(Debug)]
pub struct Queue {
    /// The ring itself.
    pub ring: Ring,
    held: VecDeque<Held>,
    /// The buffers of all held chains, in order: guest address and bytes.
    pieces: VecDeque<(u64, usize)>,
    /// Bytes in all held chains.
    held_len: usize,
}

impl Queue {
    /// A queue on a ring that was just started.
    #[must_use]
    pub const fn new(ring: Ring) -> Self {
        Self { ring, held: VecDeque::new(), pieces: VecDeque::new(), held_len: 0 }
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
        let mut hdr = [0; VirtioNetHdr::LEN_MRG];
        let (mut hdr_have, mut len, mut fits) = (0, 0_usize, true);
        self.ring.walk(memory, head, |buffer| {
            if buffer.writable {
                return Err(RingFault::WrongDirection);
            }
            let mut left = buffer.len as usize;
            let to_hdr = left.min(hdr_len - hdr_have);
            if to_hdr > 0 {
                let to = &mut hdr[hdr_have..hdr_have + to_hdr];
                memory.read(buffer.guest, to).ok_or(RingFault::OutsideMemory)?;
                hdr_have += to_hdr;
                left -= to_hdr;
            }
            // Below: the bytes before `from` were just read, so it cannot wrap when `left` > 0.
            let from = buffer.guest.wrapping_add(to_hdr as u64);
            match buf.get_mut(len..len.saturating_add(left)) {
                Some(to) => memory.read(from, to).ok_or(RingFault::OutsideMemory)?,
                None => fits = false,
            }
            len = len.saturating_add(left);
            Ok(())
        })?;
        self.ring.complete(head, 0)?;
        if self.ring.unpublished() >= PUBLISH_EVERY {
            self.ring.publish();
        }
        let common = hdr.first_chunk().expect("twelve bytes start with ten");
        Ok(match (hdr_have == hdr_len, fits) {
            (true, true) => Polled::Frame(VirtioNetHdr::parse(common), len),
            (false, _) => Polled::Truncated,
            (true, false) => Polled::TooBig,
        })
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
        if self.gather(memory, layout, total)? < total {
            let never = !layout.merge && !self.held.is_empty();
            return Ok(Err(if never { PushError::TooBig } else { PushError::Full }));
        }
        let mut covered = 0;
        let chains = self.held.iter().take_while(|held| {
            let more = covered < total;
            covered += held.len;
            more
        });
        let chains = u16::try_from(chains.count()).expect("a ring has at most 32768 chains");
        let mut start = [0; VirtioNetHdr::LEN_MRG];
        start[..VirtioNetHdr::LEN].copy_from_slice(&hdr.emit());
        start[VirtioNetHdr::LEN..].copy_from_slice(&chains.to_le_bytes());

        let mut source = Source { piece: &start[..layout.hdr_len], rest: parts };
        for _ in 0..chains {
            self.fill(memory, &mut source)?;
        }
        if self.ring.unpublished() >= PUBLISH_EVERY {
            self.ring.publish();
        }
        Ok(Ok(()))
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
        while self.held_len < need && (layout.merge || self.held.is_empty()) {
            if !self.hold(memory, layout.hdr_len)? {
                break;
            }
        }
        Ok(match self.held.front() {
            Some(first) if !layout.merge => first.len,
            _ => self.held_len,
        })
    }

    /// Takes one more chain to fill later; `false` if there is none.
    fn hold(&mut self, memory: &GuestMemory, hdr_len: usize) -> Result<bool, RingFault> {
        let Some(head) = self.ring.take()? else { return Ok(false) };
        let (mut count, mut len) = (0, 0_usize);
        let pieces = &mut self.pieces;
        self.ring.walk(memory, head, |buffer| {
            if !buffer.writable {
                return Err(RingFault::WrongDirection);
            }
            if !memory.contains(buffer.guest, buffer.len as usize) {
                return Err(RingFault::OutsideMemory);
            }
            pieces.push_back((buffer.guest, buffer.len as usize));
            count += 1;
            len = len.saturating_add(buffer.len as usize);
            Ok(())
        })?;
        // Virtio 1.2 section 5.1.6.3.1: every buffer holds at least the header.
        if len < hdr_len {
            return Err(RingFault::BufferTooSmall);
        }
        self.held.push_back(Held { head, pieces: count, len });
        self.held_len = self.held_len.saturating_add(len);
        Ok(true)
    }

    /// Fills the oldest held chain with what `source` still has, and completes it.
    #[inline]
    fn fill(&mut self, memory: &GuestMemory, source: &mut Source<'_>) -> Result<(), RingFault> {
        let held = self.held.pop_front().expect("counted before");
        self.held_len -= held.len;
        let mut written = 0;
        for (guest, len) in self.pieces.drain(..held.pieces) {
            let mut at = 0;
            while at < len {
                let bytes = source.next(len - at);
                if bytes.is_empty() {
                    break;
                }
                memory.write(guest + at as u64, bytes).ok_or(RingFault::OutsideMemory)?;
                at += bytes.len();
            }
            written += at;
        }
        // A frame and its header fit u32: `room` counted in the same bytes.
        self.ring.complete(held.head, u32::try_from(written).unwrap_or(u32::MAX))
    }
}

/// The bytes of a frame that are still to be written.
struct Source<'a> {
    piece: &'a [u8],
    rest: &'a [&'a [u8]],
}

impl<'a> Source<'a> {
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
