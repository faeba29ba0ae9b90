//! How much other hosts may have under way to a guest's sockets, if this host has to keep what has
//! arrived (VTOE-10).

use super::{Host, HostId, Instant, SocketId};

/// What is on its way to a socket, in bytes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Arrivals {
    /// The guest has so many.
    pub delivered: u64,
    /// The other end knows of room for so many beyond these.
    pub told: u64,
    /// It knows of room for so many, or may be told of it without a further call.
    pub promised: u64,
    /// The guest's socket has room for so many when it is empty.
    pub buffer: u64,
}

impl Host {
    /// What is on its way to a socket.
    #[must_use]
    pub fn arrivals(&self, socket: SocketId) -> Option<Arrivals> {
        let joint = &self.sockets.get(socket)?.joint;
        let end = joint.end();
        Some(Arrivals {
            delivered: end.delivered_bytes(),
            told: end.told(),
            promised: end.promised(),
            buffer: joint.buffer(),
        })
    }

    /// From now on the other end of a socket may have `share` bytes under way, however much room
    /// the guest has. Room that it was told is not taken back.
    pub fn limit_arrivals(&mut self, now: Instant, socket: SocketId, share: u64) {
        if let Some(it) = self.sockets.get_mut(socket) {
            it.joint.limit_arrivals(now, share);
            self.look_again(socket);
        }
    }

    /// Sockets that come from now on and whose other end is at another host than `here` begin with
    /// this share, until [`Self::limit_arrivals`] says another one.
    pub const fn limit_first_arrivals(&mut self, here: HostId, share: u64) {
        self.first_share = Some((here, share));
    }
}
