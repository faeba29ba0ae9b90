//! Packets to guests: the state of their sockets, when the ring has room.

use super::super::guest::{Guest, Packet};
use super::{Code, Host, SocketId, VmId};

impl Host {
    /// Whether a guest is owed so many answers that no packets of it are to be taken until it takes
    /// some (virtio 1.2 section 5.10.6.1).
    #[must_use]
    pub fn owes_answers(&self, vm: VmId) -> bool {
        self.guests.get(&vm).is_some_and(Guest::owes_answers)
    }

    /// Whether [`Self::poll_packet`] may have one.
    #[must_use]
    pub fn has_packets(&self, vm: VmId) -> bool {
        self.guests.get(&vm).is_some_and(|guest| guest.is_ready)
    }

    /// The next packet for a guest, without payload of others; there must be room for it. Its
    /// content is the present state.
    #[must_use]
    pub fn poll_packet(&mut self, vm: VmId) -> Option<Packet> {
        let guest = self.guests.get_mut(&vm)?;
        if let Some(packet) = guest.poll() {
            return Some(packet);
        }
        // One of each socket in turn.
        while let Some(id) = guest.ready.pop_front() {
            let Some(socket) = self.sockets.get_mut(id) else { continue };
            let packet = socket.vsock.poll_packet();
            socket.has_packet = socket.vsock.has_packet();
            if socket.has_packet {
                guest.ready.push_back(id);
            }
            if let Some(header) = packet {
                self.look_again(id);
                return Some((header, None));
            }
        }
        guest.is_ready = false;
        None
    }

    /// The guest's kernel has dropped a socket, or gets its reset when the ring has room.
    pub(super) fn unlist(&mut self, id: SocketId) {
        self.sockets.unlist(id);
        let Some(socket) = self.sockets.get_mut(id) else { return };
        let resets = socket.vsock.take_reset();
        let is_spent = socket.vsock.is_spent();
        let code = Code::of(socket.vsock.end().errno());
        let (vm, ports, request) = (socket.vm, socket.vsock.ports(), socket.request);
        if let Some(guest) = self.guests.get_mut(&vm) {
            guest.forget(ports, code, request);
            if resets {
                guest.reset(ports);
                self.look_at(vm);
            }
        }
        if !is_spent {
            self.sockets.list_orphan(id);
        }
    }

    pub(super) fn look_at_control(&mut self, vm: VmId, port: u32) {
        if let Some(guest) = self.guests.get_mut(&vm) {
            guest.look_at_control(port);
            let changes = guest.take_listener_changes();
            self.note_listeners(vm, changes);
        }
        self.look_at(vm);
    }

    /// Queues a guest that may have packets.
    pub(super) fn look_at(&mut self, vm: VmId) {
        if let Some(guest) = self.guests.get_mut(&vm)
            && !std::mem::replace(&mut guest.is_ready, true)
        {
            self.ready_guests.push_back(vm);
        }
    }
}
