//! vsock packets in and out of one running queue (virtio 1.2 section 5.10.6).
//!
//! Only headers are copied. A packet of the guest stays in its chain until it is [`done`]. Payload
//! for the guest is written to the guest addresses in [`PacketQueue::payload`], which are behind
//! the header, in either direction, to read from or to fill.
//!
//! Chains are completed in the order in which they were taken (`ring`, invariant 2). If a packet
//! cannot be carried now, it stays there, and so do those behind it. Packets of the guest for one
//! system call are [`keep`]t until that call has carried them. Buffers for one system call are
//! looked up together ([`PacketQueue::rooms`]), and those that it did not reach stay the next ones.
//!
//! [`done`]: PacketQueue::done
//! [`keep`]: PacketQueue::keep

use std::collections::VecDeque;

use nightporter_core::wire::vsock::{Header, LEN};
use vm_memory::VolatileSlice;

use super::guest_mem::GuestMemory;
use super::queue::CRUMBS;
use super::ring::{Buffer, Ring, RingFault};

/// Chains and buffers of a queue that are looked at in a turn. A chain that was begun is finished,
/// so it may be one more chain.
pub const WORK_PER_TURN: usize = 2048;

/// Pieces of chains that were completed and are not cut off yet.
const DONE_MAX: usize = 4096;

/// A guest is told at once when buffers for this part of its queue are completed.
const UNTOLD_PART: usize = 4;

/// The smallest piece of memory that can be missing alone.
const PAGE: usize = 4096;

/// Bytes of guest memory: guest address and how many.
pub type Piece = (u64, usize);

/// A chain that was taken and not completed.
#[derive(Clone, Copy, Debug)]
struct Chain {
    head: u16,
    /// Of a packet of the guest.
    header: Option<Header>,
    /// How many pieces its header and its payload have.
    pieces: (usize, usize),
    /// Bytes behind the header.
    payload: usize,
}

/// Consecutive pieces of chains, of which the first are done.
#[derive(Debug, Default)]
struct Pieces {
    all: Vec<Piece>,
    first: usize,
}

impl Pieces {
    const fn new() -> Self {
        Self { all: Vec::new(), first: 0 }
    }

    fn get(&self) -> &[Piece] {
        &self.all[self.first..]
    }

    fn pop(&mut self, count: usize) {
        self.first += count;
        if self.first == self.all.len() {
            self.all.clear();
            self.first = 0;
        } else if self.first >= DONE_MAX {
            self.all.drain(..self.first);
            self.first = 0;
        }
    }
}

/// A running queue, of either direction.
#[derive(Debug)]
pub struct PacketQueue {
    /// The ring itself.
    pub ring: Ring,
    /// The first of them are kept; the next one is worked on.
    chains: VecDeque<Chain>,
    kept: usize,
    /// Pieces of payload that kept chains have.
    kept_pieces: usize,
    /// Where the headers of all these chains are, and the payload behind them.
    headers: Pieces,
    payloads: Pieces,
    /// Chains and buffers that were looked at since the turn began.
    pub work: usize,
    /// Of a queue from the guest: buffers that were completed since it was last told so, counted as
    /// if no chain were indirect.
    untold: usize,
}

impl PacketQueue {
    /// A queue on a ring that was just started.
    #[must_use]
    pub const fn new(ring: Ring) -> Self {
        Self {
            ring,
            chains: VecDeque::new(),
            kept: 0,
            kept_pieces: 0,
            headers: Pieces::new(),
            payloads: Pieces::new(),
            work: 0,
            // The ring's last user may have had no time to tell it.
            untold: 1,
        }
    }

    /// Shows the guest what was completed; when it is to be told so.
    pub fn show(&mut self) -> Tell {
        self.ring.publish();
        match self.untold {
            0 => Tell::Nothing,
            // It may be waiting for places in this queue.
            untold if untold * UNTOLD_PART >= usize::from(self.ring.size()) => Tell::Now,
            _ => Tell::Later,
        }
    }

    /// The guest is being told of all that was completed.
    pub const fn note_told(&mut self) {
        self.untold = 0;
    }

    /// The packet of the guest that is next, and how many bytes are behind its header. The same one
    /// until it is [`Self::done`] or [`Self::keep`]t. `None`: there is none, or this turn has seen
    /// enough.
    ///
    /// # Errors
    /// The guest's ring lies. A chain too short for a header is one lie, one of crumbs another.
    pub fn poll(&mut self, memory: &GuestMemory) -> Result<Option<(Header, usize)>, RingFault> {
        if self.chains.len() == self.kept && self.take(memory, false)? {
            let chain = self.chains.back_mut().expect("it was taken");
            let all = self.headers.get();
            let mut bytes = [0; LEN];
            let mut at = 0;
            for (guest, len) in &all[all.len() - chain.pieces.0..] {
                let to = &mut bytes[at..at + len];
                memory.read(*guest, to).ok_or(RingFault::OutsideMemory)?;
                at += len;
            }
            chain.header = Some(Header::parse(&bytes));
        }
        let current = self.chains.get(self.kept);
        Ok(current.and_then(|chain| Some((chain.header?, chain.payload))))
    }

    /// The places of the payload behind the current header, to read or to fill.
    #[must_use]
    pub fn payload(&self) -> &[Piece] {
        let len = self.chains.get(self.kept).map_or(0, |chain| chain.pieces.1);
        &self.payloads.get()[self.kept_pieces..][..len]
    }

    /// The packet of the guest is not carried yet: it stays where it is, and the next one can be
    /// polled.
    pub fn keep(&mut self) {
        let chain = self.chains.get(self.kept).expect("a chain is worked on");
        self.kept_pieces += chain.pieces.1;
        self.kept += 1;
    }

    /// Where the payload of each packet is that is kept, in their order.
    pub fn kept(&self) -> impl Iterator<Item = &[Piece]> {
        let mut rest = self.payloads.get();
        self.chains.iter().take(self.kept).map(move |chain| {
            let (now, later) = rest.split_at(chain.pieces.1);
            rest = later;
            now
        })
    }

    /// The packets of the guest that were kept are carried.
    ///
    /// # Errors
    /// The ring is outside guest memory.
    pub fn kept_done(&mut self) -> Result<(), RingFault> {
        let kept = std::mem::take(&mut self.kept);
        self.kept_pieces = 0;
        (0..kept).try_for_each(|_| self.complete(0))
    }

    /// The packet of the guest is carried: its buffers are the guest's again. None is kept.
    ///
    /// # Errors
    /// The ring is outside guest memory.
    pub fn done(&mut self) -> Result<(), RingFault> {
        assert_eq!(self.kept, 0, "chains are completed in order");
        self.complete(0)
    }

    /// Bytes of payload that the next buffers of the guest have room for. `None`: there are none,
    /// or this turn has seen enough.
    ///
    /// # Errors
    /// The guest's ring lies. As of [`Self::poll`].
    pub fn room(&mut self, memory: &GuestMemory) -> Result<Option<usize>, RingFault> {
        if self.chains.is_empty() && !self.take(memory, true)? {
            return Ok(None);
        }
        Ok(self.chains.front().map(|chain| chain.payload))
    }

    /// Likewise of the next packets of the guest together: of as many as `len` bytes fill, but
    /// `most`. In the first `n` of them may be as many bytes as `credit` says; each packet has a
    /// cost of its own, so that may be less than in fewer.
    ///
    /// # Errors
    /// The guest's ring lies. As of [`Self::poll`].
    pub fn rooms(
        &mut self,
        memory: &GuestMemory,
        len: usize,
        most: usize,
        credit: impl Fn(u64) -> u64,
    ) -> Result<usize, RingFault> {
        let (mut count, mut bytes) = (0, 0);
        while count < most && bytes < len {
            if count == self.chains.len() && !self.take(memory, true)? {
                break;
            }
            bytes = self.chains[count].payload.saturating_add(bytes);
            count += 1;
        }
        let may = |packets| usize::try_from(credit(packets)).unwrap_or(usize::MAX).min(len);
        let rooms = self.chains.iter().take(count).map(|chain| chain.payload);
        // No payload has a place behind a packet that has room for none.
        let filled = rooms.take_while(|room| *room > 0).zip(1..);
        Ok(filled.fold(0_usize, |sum, (room, packets)| {
            sum.max(sum.saturating_add(room).min(may(packets)))
        }))
    }

    /// The places of the payload of all packets that were taken and are not completed, in their
    /// order.
    #[must_use]
    pub fn payloads(&self) -> &[Piece] {
        self.payloads.get()
    }

    /// Puts this header before the payload that was written, and gives both to the guest. There
    /// must be room.
    ///
    /// # Errors
    /// Memory has gone since [`Self::room`].
    pub fn give(&mut self, memory: &GuestMemory, header: &Header) -> Result<(), RingFault> {
        let chain = self.chains.front().expect("there is room");
        let bytes = header.emit();
        let mut at = 0;
        for (guest, len) in &self.headers.get()[..chain.pieces.0] {
            memory.write(*guest, &bytes[at..at + len]).ok_or(RingFault::OutsideMemory)?;
            at += len;
        }
        let room = chain.payload;
        assert!(header.len as usize <= room, "{} bytes where {room} fit", header.len);
        self.complete(header.len as usize + LEN)
    }

    /// Whether it has looked at enough until the next turn.
    #[must_use]
    pub const fn has_spent(&self) -> bool {
        self.work >= WORK_PER_TURN
    }

    /// Takes a chain, if there is one: `writable` as all its buffers have to be.
    fn take(&mut self, memory: &GuestMemory, writable: bool) -> Result<bool, RingFault> {
        if self.has_spent() {
            return Ok(false);
        }
        let Some(head) = self.ring.take()? else { return Ok(false) };
        let Self { ring, headers, payloads, work, .. } = self;
        let before = (headers.all.len(), payloads.all.len());
        let (mut left, mut bytes) = (LEN, 0_usize);
        *work += 1;
        ring.walk(memory, head, |buffer: Buffer| {
            *work += 1;
            if buffer.writable != writable {
                return Err(RingFault::WrongDirection);
            }
            let len = buffer.len as usize;
            if !memory.contains(buffer.guest, len) {
                return Err(RingFault::OutsideMemory);
            }
            let first = len.min(left);
            left -= first;
            if first > 0 {
                headers.all.push((buffer.guest, first));
            }
            if len > first {
                // Cannot wrap: all of it is mapped.
                payloads.all.push((buffer.guest.wrapping_add(first as u64), len - first));
                bytes = bytes.saturating_add(len - first);
            }
            Ok(())
        })?;
        self.work += memory.take_work();
        // Each buffer of either guest is a step for the code that copies.
        let pieces = (headers.all.len() - before.0, payloads.all.len() - before.1);
        if left > 0 || pieces.1 > CRUMBS && bytes < pieces.1 * CRUMBS {
            return Err(RingFault::BufferTooSmall);
        }
        self.chains.push_back(Chain { head, header: None, pieces, payload: bytes });
        Ok(true)
    }

    fn complete(&mut self, written: usize) -> Result<(), RingFault> {
        let chain = self.chains.pop_front().expect("a chain is worked on");
        self.headers.pop(chain.pieces.0);
        self.payloads.pop(chain.pieces.1);
        self.untold += chain.pieces.0 + chain.pieces.1;
        let written = u32::try_from(written).expect("packets are shorter than 4 GiB");
        self.ring.complete(chain.head, written)
    }
}

/// When a guest is to be told of packets that were taken.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Tell {
    /// It was told of all.
    Nothing,
    /// Some time.
    Later,
    /// At once.
    Now,
}

/// The guest whose memory is missing.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Missing {
    /// The sender's, or it has fewer bytes.
    Source,
    /// The receiver's, likewise.
    Target,
}

/// Copies `len` bytes of payload, those from byte `at` on of one guest's pieces, to the beginning
/// of another's, once.
///
/// # Errors
/// Some of it is not mapped; what came before is written.
pub fn copy(
    from: (&GuestMemory, &[Piece]),
    at: usize,
    to: (&GuestMemory, &[Piece]),
    len: usize,
) -> Result<(), Missing> {
    let mut targets = to.1.iter().copied();
    let mut target = (0, 0);
    let visit = |mut source: Piece| {
        while source.1 > 0 {
            if target.1 == 0 {
                target = targets.next().ok_or(Missing::Target)?;
            }
            let most = source.1.min(target.1);
            let read = from.0.slice(source.0, most).ok_or(Missing::Source)?;
            let write = to.0.slice(target.0, read.len()).ok_or(Missing::Target)?;
            read.copy_to_volatile_slice(write);
            let done = read.len().min(write.len());
            source = (source.0.wrapping_add(done as u64), source.1 - done);
            target = (target.0.wrapping_add(done as u64), target.1 - done);
        }
        Ok(())
    };
    if for_each_piece(from.1, at, len, visit)? == len { Ok(()) } else { Err(Missing::Source) }
}

/// Copies payload out, from byte `at` on. `None`: it is not mapped, or there is less of it.
#[must_use]
pub fn read(memory: &GuestMemory, pieces: &[Piece], at: usize, out: &mut [u8]) -> Option<()> {
    let (len, mut done) = (out.len(), 0);
    let visit = |(guest, len): Piece| {
        let to = &mut out[done..done + len];
        done += len;
        memory.read(guest, to).ok_or(())
    };
    (for_each_piece(pieces, at, len, visit).ok()? == len).then_some(())
}

/// Copies payload in, from byte `at` on. `None`: it is not mapped, or there is no room for it.
#[must_use]
pub fn write(memory: &GuestMemory, pieces: &[Piece], at: usize, bytes: &[u8]) -> Option<()> {
    let mut rest = bytes;
    let visit = |(guest, len): Piece| {
        let (now, later) = rest.split_at(len);
        rest = later;
        memory.write(guest, now).ok_or(())
    };
    (for_each_piece(pieces, at, bytes.len(), visit).ok()? == bytes.len()).then_some(())
}

/// The memory of `len` bytes of payload from byte `at` on. `None`: it is not mapped, or there is
/// less of it.
#[must_use]
pub fn slices<'m>(
    memory: &'m GuestMemory,
    pieces: &[Piece],
    at: usize,
    len: usize,
) -> Option<Vec<VolatileSlice<'m>>> {
    let mut slices = Vec::with_capacity(pieces.len());
    let visit = |mut piece: Piece| {
        while piece.1 > 0 {
            let slice = memory.slice(piece.0, piece.1).ok_or(())?;
            piece = (piece.0.wrapping_add(slice.len() as u64), piece.1 - slice.len());
            slices.push(slice);
        }
        Ok::<(), ()>(())
    };
    (for_each_piece(pieces, at, len, visit).ok()? == len).then_some(slices)
}

/// Touches every page of it, so that one that is missing is noticed ([`crate::faults`]).
pub fn look_at(memory: &GuestMemory, pieces: &[Piece]) {
    for (guest, len) in pieces {
        let ends = (0..*len).step_by(PAGE).chain(len.checked_sub(1));
        for at in ends {
            let _ = memory.read(guest.wrapping_add(at as u64), &mut [0]);
        }
    }
}

/// Visits the pieces from byte `at` on, `len` bytes at most; returns how many bytes there were.
fn for_each_piece<E>(
    pieces: &[Piece],
    at: usize,
    len: usize,
    mut visit: impl FnMut(Piece) -> Result<(), E>,
) -> Result<usize, E> {
    let (mut skip, mut left) = (at, len);
    for (guest, piece) in pieces {
        let before = skip.min(*piece);
        skip -= before;
        let now = (piece - before).min(left);
        left -= now;
        if now > 0 {
            // Cannot wrap: all of it was mapped when it was taken.
            visit((guest.wrapping_add(before as u64), now))?;
        }
        if left == 0 {
            break;
        }
    }
    Ok(len - left)
}
