//! Limits of the bytes that other hosts have under way to a guest's sockets, if this host has to
//! keep arrived ones (VTOE-10).

use super::{Host, HostId, Instant, SocketId};

/// Bytes under way to a socket.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Arrivals {
    /// Bytes in the guest's memory.
    pub delivered: u64,
    /// Room beyond them that the other end knows.
    pub told: u64,
    /// Room that the other end knows or may learn without a further call.
    pub promised: u64,
    /// Bytes of the guest's empty buffer.
    pub buffer: u64,
}

impl Host {
    /// Bytes under way to a socket.
    #[must_use]
    pub fn arrivals(&self, socket: SocketId) -> Option<Arrivals> {
        let vsock = &self.sockets.get(socket)?.vsock;
        let end = vsock.end();
        Some(Arrivals {
            delivered: end.delivered_bytes(),
            told: end.told(),
            promised: end.promised(),
            buffer: vsock.buffer(),
        })
    }

    /// Limits the other end of a socket to `share` bytes under way, however much room the guest
    /// has. Announced room is not taken back.
    pub fn limit_arrivals(&mut self, now: Instant, socket: SocketId, share: u64) {
        if let Some(it) = self.sockets.get_mut(socket) {
            it.vsock.limit_arrivals(now, share);
            self.look_again(socket);
        }
    }

    /// Sets the first share of new sockets whose other end is at another host than `here`;
    /// [`Self::limit_arrivals`] changes it.
    pub const fn limit_first_arrivals(&mut self, here: HostId, share: u64) {
        self.first_share = Some((here, share));
    }
}
