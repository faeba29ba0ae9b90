//! The stream from the guest: bytes sent so far, and the room for more (VTOE-10).

use super::message::Breach;
use crate::limits::TOE_WINDOW_MAX;

/// A guest's stream on its way out.
#[derive(Debug, Default)]
pub struct Outbound {
    /// Bytes that the guest has sent, all given to the fabric.
    sent: u64,
    /// The guest may send up to here: the end of the other guest's room.
    edge: u64,
}

impl Outbound {
    /// Bytes sent so far.
    #[must_use]
    pub const fn sent(&self) -> u64 {
        self.sent
    }

    /// The first byte that the guest may not send yet.
    #[must_use]
    pub const fn edge(&self) -> u64 {
        self.edge
    }

    /// The guest sends `len` bytes; returns the offset of the first.
    ///
    /// # Errors
    /// The guest had no room for them.
    pub fn send(&mut self, len: u64) -> Result<u64, Breach> {
        let offset = self.sent;
        let end = offset.checked_add(len).filter(|end| *end <= self.edge);
        self.sent = end.ok_or(Breach::NoRoom)?;
        Ok(offset)
    }

    /// The other end has room up to `edge`. Room never shrinks, and is at most that of this host's
    /// sockets (`TOE_WINDOW_MAX`).
    pub fn give_room(&mut self, edge: u64) {
        let most = self.sent.saturating_add(TOE_WINDOW_MAX);
        self.edge = self.edge.max(edge.min(most));
    }
}
