//! vsock packets in and out of one running queue (virtio 1.2 section 5.10.6).
//!
//! Only headers are copied. A packet of the guest stays in its chain until it is [`done`], and
//! payload for the guest is written where the caller finds it: [`PacketQueue::payload`] are the
//! guest addresses of what is behind the header, in either direction, to read from or to fill.
//!
//! One chain at a time is worked on, and chains are completed in the order in which they were
//! taken (`ring`, invariant 2). Whoever cannot carry a packet now leaves it there, and with it
//! those behind it.
//!
//! [`done`]: PacketQueue::done

use nightporter_core::wire::vsock::{Header, LEN};
use vm_memory::VolatileSlice;

use super::guest_mem::GuestMemory;
use super::queue::CRUMBS;
use super::ring::{Buffer, Ring, RingFault};

/// Chains and buffers of a queue that are looked at in a turn. A chain that was begun is finished,
/// so it may be one more chain.
pub const WORK_PER_TURN: usize = 2048;

/// Of what can be missing alone, the least.
const PAGE: usize = 4096;

/// Bytes of guest memory: guest address and how many.
pub type Piece = (u64, usize);

/// The chain that is worked on.
#[derive(Clone, Copy, Debug)]
struct Current {
    head: u16,
    /// Of a packet of the guest.
    header: Option<Header>,
    /// Bytes behind the header.
    payload: usize,
}

/// A running queue, of either direction.
#[derive(Debug)]
pub struct PacketQueue {
    /// The ring itself.
    pub ring: Ring,
    current: Option<Current>,
    /// Where the header of the current chain is, and the payload behind it.
    header: Vec<Piece>,
    payload: Vec<Piece>,
    /// Chains and buffers that were looked at since the turn began.
    pub work: usize,
}

impl PacketQueue {
    /// A queue on a ring that was just started.
    #[must_use]
    pub const fn new(ring: Ring) -> Self {
        Self { ring, current: None, header: Vec::new(), payload: Vec::new(), work: 0 }
    }

    /// The packet of the guest that is next, and how many bytes are behind its header. The same one
    /// until it is [`Self::done`]. `None`: there is none, or this turn has seen enough.
    ///
    /// # Errors
    /// The guest's ring lies. A chain too short for a header is one lie, one of crumbs another.
    pub fn poll(&mut self, memory: &GuestMemory) -> Result<Option<(Header, usize)>, RingFault> {
        if self.current.is_none() && self.take(memory, false)? {
            let mut bytes = [0; LEN];
            let mut at = 0;
            for (guest, len) in &self.header {
                let to = &mut bytes[at..at + len];
                memory.read(*guest, to).ok_or(RingFault::OutsideMemory)?;
                at += len;
            }
            if let Some(current) = &mut self.current {
                current.header = Some(Header::parse(&bytes));
            }
        }
        let current = self.current.as_ref();
        Ok(current.and_then(|current| Some((current.header?, current.payload))))
    }

    /// Where the payload behind the current header is, or is to be.
    #[must_use]
    pub fn payload(&self) -> &[Piece] {
        &self.payload
    }

    /// The packet of the guest is carried: its buffers are the guest's again.
    ///
    /// # Errors
    /// The ring is outside guest memory.
    pub fn done(&mut self) -> Result<(), RingFault> {
        self.complete(0)
    }

    /// Bytes of payload that the next buffers of the guest have room for. `None`: there are none,
    /// or this turn has seen enough.
    ///
    /// # Errors
    /// The guest's ring lies. As of [`Self::poll`].
    pub fn room(&mut self, memory: &GuestMemory) -> Result<Option<usize>, RingFault> {
        if self.current.is_none() && !self.take(memory, true)? {
            return Ok(None);
        }
        Ok(self.current.as_ref().map(|current| current.payload))
    }

    /// Puts this header before the payload that was written, and gives both to the guest. There
    /// must be room.
    ///
    /// # Errors
    /// Memory has gone since [`Self::room`].
    pub fn give(&mut self, memory: &GuestMemory, header: &Header) -> Result<(), RingFault> {
        let bytes = header.emit();
        let mut at = 0;
        for (guest, len) in &self.header {
            memory.write(*guest, &bytes[at..at + len]).ok_or(RingFault::OutsideMemory)?;
            at += len;
        }
        let room = self.current.as_ref().map_or(0, |current| current.payload);
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
        self.header.clear();
        self.payload.clear();
        let Self { ring, header, payload, work, .. } = self;
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
                header.push((buffer.guest, first));
            }
            if len > first {
                // Cannot wrap: all of it is mapped.
                payload.push((buffer.guest.wrapping_add(first as u64), len - first));
                bytes = bytes.saturating_add(len - first);
            }
            Ok(())
        })?;
        self.work += memory.take_work();
        // Each buffer is a step for whoever copies, of either guest.
        let pieces = payload.len();
        if left > 0 || pieces > CRUMBS && bytes < pieces * CRUMBS {
            return Err(RingFault::BufferTooSmall);
        }
        self.current = Some(Current { head, header: None, payload: bytes });
        Ok(true)
    }

    fn complete(&mut self, written: usize) -> Result<(), RingFault> {
        let current = self.current.take().expect("a chain is worked on");
        let written = u32::try_from(written).expect("packets are shorter than 4 GiB");
        self.ring.complete(current.head, written)
    }
}

/// Whose memory is not there.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Missing {
    /// That of who sends, or there are not so many bytes of it.
    Source,
    /// That of who receives, likewise.
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

/// Copies payload in, to the beginning. `None`: it is not mapped, or there is no room for it.
#[must_use]
pub fn write(memory: &GuestMemory, pieces: &[Piece], bytes: &[u8]) -> Option<()> {
    let mut rest = bytes;
    let visit = |(guest, len): Piece| {
        let (now, later) = rest.split_at(len);
        rest = later;
        memory.write(guest, now).ok_or(())
    };
    (for_each_piece(pieces, 0, bytes.len(), visit).ok()? == bytes.len()).then_some(())
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

/// Visits what lies from byte `at` on, `len` bytes at most; how many there were.
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
