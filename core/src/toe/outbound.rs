//! What the guest sends: how much of it there was, and how much there may be (VTOE-10).

use super::message::Breach;
use crate::limits::TOE_WINDOW_MAX;

/// A guest's stream on its way out.
#[derive(Debug, Default)]
pub struct Outbound {
    /// Bytes that the guest has sent, all given to the fabric.
    sent: u64,
    /// The guest may send up to here: so far the other guest has room.
    edge: u64,
}

impl Outbound {
    /// Bytes so far.
    #[must_use]
    pub const fn sent(&self) -> u64 {
        self.sent
    }

    /// The first byte that the guest may not send yet.
    #[must_use]
    pub const fn edge(&self) -> u64 {
        self.edge
    }

    /// The guest sends so many bytes: the offset of the first.
    ///
    /// # Errors
    /// It was not given room for them.
    pub fn send(&mut self, len: u64) -> Result<u64, Breach> {
        let offset = self.sent;
        let end = offset.checked_add(len).filter(|end| *end <= self.edge);
        self.sent = end.ok_or(Breach::NoRoom)?;
        Ok(offset)
    }

    /// The other end has room up to `edge`. Room does not shrink, and there is none beyond what the
    /// sockets of this host can take (`TOE_WINDOW_MAX`).
    pub fn give_room(&mut self, edge: u64) {
        let most = self.sent.saturating_add(TOE_WINDOW_MAX);
        self.edge = self.edge.max(edge.min(most));
    }
}
