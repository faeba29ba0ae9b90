//! Payload between guests of this host: from ring to ring, and through what is kept.

use nightporter_core::engine::Direction;
use nightporter_core::time::Instant;
use nightporter_core::toe::inbound::Verdict;
use nightporter_core::toe::message::{Kind, Message};
use nightporter_core::toe::sockets::{SocketId, VmId};

use super::backlog::Kept;
use super::device::Blocked;
use super::{HERE, Toe, len_of};

impl Toe {
    /// Payload of the present packet of a guest goes to another one.
    pub(super) fn carry(
        &mut self,
        now: Instant,
        (from, sender): (usize, SocketId),
        message: &Message,
    ) {
        let Kind::Data { len, .. } = message.kind else { return };
        let met = self.host.handle_message(now, HERE, message);
        match (met.verdict, met.socket) {
            (Verdict::Deliver, Some(socket)) => {
                self.deliver(now, from, socket, message, len as usize);
                self.show_share(now, (from, sender), socket, true);
            }
            (Verdict::Hold, _) => self.reset(now, (message.id, message.to)), // nothing overtakes
            (Verdict::Deliver | Verdict::Done, _) => {}
        }
    }

    /// From ring to ring, and what does not fit is kept.
    pub(super) fn deliver(
        &mut self,
        now: Instant,
        from: usize,
        socket: SocketId,
        message: &Message,
        len: usize,
    ) {
        let Some(VmId(to)) = self.host.vm_of(socket) else { return };
        let (to, mut done) = (to as usize, 0);
        if !self.kept.has(socket)
            && !self.is_behind(now, to)
            && self.give_packets(to)
            && let Ok([Some(source), Some(target)]) = self.devices.get_disjoint_mut([from, to])
        {
            while done < len && !target.limits.is_spent(Direction::ToGuest) {
                let takes = self.host.takes(socket, (len - done) as u64);
                let Some(room) = target.room(takes, len - done) else { break };
                if !source.port.carry(done, &mut target.port, room) {
                    return; // one of them goes down
                }
                let Some(header) = self.host.give(now, socket, len_of(room)) else { return };
                target.give(now, &header);
                done += room;
            }
        }
        if done < len {
            let mut rest = vec![0; len - done];
            let source = self.device_mut(from);
            if source.is_some_and(|source| source.port.read_payload(done, &mut rest)) {
                let name = (message.id, message.to);
                self.kept.add(now, socket, Kept { name, from, to }, rest);
                self.wake_device(to);
            }
        }
    }

    /// Packets that wait for a guest go into its ring, a packet of each socket in turn, `most`
    /// bytes or little more; how many.
    pub(super) fn give_waiting(&mut self, now: Instant, at: usize, most: usize) -> usize {
        let Some(device) = self.device_mut(at) else { return 0 };
        device.blocked = None;
        let (mut next, mut bytes) = (device.served_last, 0);
        let streams_first = device.limits.streams_first();
        if self.give_packets(at) && !streams_first {
            while let Some(socket) = self.kept.after(at, next)
                && !self.is_limited(now, at, Direction::ToGuest)
            {
                next = Some(socket);
                let takes = self.takes(socket);
                if takes == 0 {
                    self.kept.rest(at, socket);
                    continue;
                }
                let given = self.give_kept(now, at, socket, takes);
                bytes += given;
                if given == 0 || bytes >= most {
                    let why = if given == 0 { Blocked::Ring } else { Blocked::Turn };
                    self.device_mut(at).expect("it was there").blocked = Some(why);
                    break;
                }
            }
            self.device_mut(at).expect("it was there").served_last = next;
        }
        self.hear(now);
        self.wake_waiting(now, at);
        bytes
    }

    /// Bytes of what is kept for a socket that go into a packet now.
    fn takes(&self, socket: SocketId) -> u64 {
        let len = self.kept.len(socket) as u64;
        match self.kept.of(socket) {
            Some(of) if self.kept.may_hold(of.from) => self.host.takes(socket, len),
            _ => self.host.room_to_guest(socket).min(len),
        }
    }

    /// A packet of what is kept for a socket, which takes so many bytes; how many there were.
    fn give_kept(&mut self, now: Instant, at: usize, socket: SocketId, takes: u64) -> usize {
        let Self { host, devices, kept, .. } = self;
        let Some(device) = devices[at].as_mut() else { return 0 };
        let Some(room) = device.room(takes, kept.len(socket)) else { return 0 };
        if !device.port.write_payload(&kept.front(socket, room)) {
            return 0;
        }
        let Some(header) = host.give(now, socket, len_of(room)) else { return 0 };
        device.give(now, &header);
        let sender = kept.of(socket);
        kept.taken(socket, room);
        if let Some(Kept { name: (id, side), from, .. }) = sender
            && !kept.has(socket)
            && let Some(sender) = host.socket(HERE, id, side.other())
        {
            self.show_share(now, (from, sender), socket, false);
        }
        room
    }
}
