//! The stream from the other guest: its order of delivery, its holes, and the room for it (VTOE-03,
//! VTOE-10).
//!
//! Offsets count the bytes of the stream; these never pass each other:
//!
//! ```text
//! delivered      <=  arrived  <=  claimed      <=  edge_told     <=  edge
//! in G's memory      has come     sent at least    room it knows of   room
//! ```

use super::message::Breach;
use crate::limits::{T_TOE_HOLE, TOE_CREDIT_STEP, TOE_HELD_MAX, TOE_WINDOW_MAX};
use crate::time::Instant;

/// The treatment of a message.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[must_use]
pub enum Verdict {
    /// Its payload is next: it goes to the guest behind earlier payload as soon as the guest has
    /// buffers, followed by a call of [`super::end::End::delivered`].
    Deliver,
    /// Data ahead of a hole. The fabric keeps it, and presents it again as held when others of that
    /// end have come.
    Hold,
    /// The message is done: its payload is dropped.
    Done,
}

/// The other guest's stream on its way in.
#[derive(Debug)]
pub struct Inbound {
    /// Bytes that are in the guest's memory.
    delivered: u64,
    /// All bytes before this one have arrived.
    arrived: u64,
    /// Bytes that the other end says it has sent.
    claimed: u64,
    /// Length of the stream, once it has ended.
    total: Option<u64>,
    /// The room's end. It never shrinks, because the other end may know it.
    edge: u64,
    /// The room's end that the other end knows.
    edge_told: u64,
    /// Least growth of the room that is announced.
    step: u64,
    /// Most room beyond the bytes that are in the guest's memory.
    limit: u64,
    /// Time since which a hole is open while the fabric is read.
    hole_since: Option<Instant>,
    /// Data that the fabric holds: offset and length, in order, without overlap.
    held: Vec<(u64, u64)>,
}

impl Default for Inbound {
    fn default() -> Self {
        Self {
            delivered: 0,
            arrived: 0,
            claimed: 0,
            total: None,
            edge: 0,
            edge_told: 0,
            step: 0,
            limit: TOE_WINDOW_MAX,
            hole_since: None,
            held: Vec::new(),
        }
    }
}

impl Inbound {
    /// Bytes that are in the guest's memory.
    #[must_use]
    pub const fn delivered(&self) -> u64 {
        self.delivered
    }

    /// Whether arrived bytes are not in the guest's memory yet.
    #[must_use]
    pub const fn has_undelivered(&self) -> bool {
        self.delivered < self.arrived
    }

    /// Whether the stream has ended and the guest has all of it.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.total == Some(self.delivered)
    }

    /// Time at which a hole counts as lost. While the guest takes no data, as when it is paused,
    /// the fabric may not be read, and the missing bytes may be there.
    #[must_use]
    pub fn hole_deadline(&self) -> Option<Instant> {
        let since = self.hole_since.filter(|_| !self.has_undelivered())?;
        Some(since + T_TOE_HOLE)
    }

    /// `len` bytes from `offset` on have come.
    ///
    /// # Errors
    /// An honest end would not send them at this offset.
    pub fn take(&mut self, now: Instant, offset: u64, len: u64) -> Result<Verdict, Breach> {
        let end = offset.checked_add(len).ok_or(Breach::Offset)?;
        self.claim(now, end)?;
        if len == 0 || end <= self.arrived {
            return Ok(Verdict::Done);
        }
        if offset > self.arrived {
            return self.hold(offset, len);
        }
        // Copies have the same boundaries as their originals.
        if offset < self.arrived {
            return Err(Breach::Offset);
        }
        self.arrived = end;
        self.hole_since = self.is_missing_some().then_some(now);
        Ok(Verdict::Deliver)
    }

    /// Held bytes are presented again.
    ///
    /// # Errors
    /// As of [`Self::take`].
    pub fn take_held(&mut self, now: Instant, offset: u64, len: u64) -> Result<Verdict, Breach> {
        let Ok(at) = self.held.binary_search(&(offset, len)) else { return Ok(Verdict::Done) };
        if offset > self.arrived {
            return Ok(Verdict::Hold);
        }
        self.held.remove(at);
        self.take(now, offset, len)
    }

    /// Holds bytes that are ahead of a hole, if they are not held already.
    fn hold(&mut self, offset: u64, len: u64) -> Result<Verdict, Breach> {
        let Err(at) = self.held.binary_search(&(offset, len)) else { return Ok(Verdict::Done) };
        let overlaps = |a: &(u64, u64), b: &(u64, u64)| a.0 + a.1 > b.0;
        let new = (offset, len);
        if at.checked_sub(1).is_some_and(|before| overlaps(&self.held[before], &new))
            || self.held.get(at).is_some_and(|behind| overlaps(&new, behind))
        {
            return Err(Breach::Offset);
        }
        if self.held.len() >= TOE_HELD_MAX {
            return Err(Breach::NoRoom);
        }
        self.held.insert(at, new);
        Ok(Verdict::Hold)
    }

    /// The other end says that it has sent `sent` bytes.
    ///
    /// # Errors
    /// There was no room for so many, or the stream had ended before.
    pub fn claim(&mut self, now: Instant, sent: u64) -> Result<(), Breach> {
        if sent > self.edge_told {
            return Err(Breach::NoRoom);
        }
        if self.total.is_some_and(|total| sent > total) {
            return Err(Breach::AfterEnd);
        }
        self.claimed = self.claimed.max(sent);
        if self.is_missing_some() {
            self.hole_since.get_or_insert(now);
        }
        Ok(())
    }

    /// The other end says that its stream has `total` bytes.
    ///
    /// # Errors
    /// More were sent, or the stream had another end before.
    pub fn end(&mut self, now: Instant, total: u64) -> Result<(), Breach> {
        if self.claimed > total || self.total.is_some_and(|known| known != total) {
            return Err(Breach::AfterEnd);
        }
        self.claim(now, total)?;
        self.total = Some(total);
        Ok(())
    }

    /// `len` bytes more are in the guest's memory. The time of a hole counts from now on.
    pub fn deliver(&mut self, now: Instant, len: u64) {
        let undelivered = self.arrived - self.delivered;
        assert!(len <= undelivered, "{len} bytes were delivered, {undelivered} have come");
        self.delivered += len;
        self.hole_since = self.hole_since.map(|_| now);
    }

    /// The guest has room up to `edge`.
    pub fn give_room(&mut self, edge: u64) {
        let most = self.delivered.saturating_add(self.limit);
        self.edge = self.edge.max(edge.min(most));
    }

    /// Limits the other end to `share` bytes under way, however much room the guest has, and never
    /// more than `TOE_WINDOW_MAX`. Announced room is not taken back.
    pub fn limit(&mut self, share: u64) {
        self.limit = share.min(TOE_WINDOW_MAX);
        let most = self.delivered.saturating_add(self.limit);
        self.edge = self.edge.min(most).max(self.edge_told);
    }

    /// Sets the size of the guest's buffer: small parts of it are not announced as room (RFC 1122
    /// section 4.2.3.3), because each would be a packet for the other guest.
    pub fn set_buffer(&mut self, buffer: u64) {
        self.step = (buffer / 2).min(TOE_CREDIT_STEP);
    }

    /// The room to announce to the other end: it is much more than the known one, or the other end
    /// may have stopped for lack of it.
    #[must_use]
    pub const fn is_credit_due(&self) -> bool {
        let news = self.edge - self.edge_told;
        let is_enough = news >= self.step || news >= self.little();
        news >= TOE_CREDIT_STEP || news > 0 && is_enough && self.is_low()
    }

    /// Whether the room known to the other end is small.
    #[must_use]
    pub const fn is_low(&self) -> bool {
        self.edge_told - self.arrived < self.little()
    }

    /// The bound below which room is small: for a small share half of it.
    const fn little(&self) -> u64 {
        let half = self.limit / 2;
        if half < TOE_CREDIT_STEP { half } else { TOE_CREDIT_STEP }
    }

    /// Bytes that the other end may have under way: the room that it was shown.
    #[must_use]
    pub const fn told(&self) -> u64 {
        self.edge_told - self.delivered
    }

    /// Bytes that may have to be delivered before there is more room.
    #[must_use]
    pub fn promised(&self) -> u64 {
        self.total.unwrap_or(self.edge) - self.delivered
    }

    /// Announces the room.
    #[must_use]
    pub const fn tell_edge(&mut self) -> u64 {
        self.edge_told = self.edge;
        self.edge
    }

    const fn is_missing_some(&self) -> bool {
        self.arrived < self.claimed
    }
}
