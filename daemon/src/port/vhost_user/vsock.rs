//! A socket device behind the port: packets in and out of its queues.
//!
//! - **From the guest**: `poll_packet`, then `read_payload` or `carry`, and `packet_done`, until
//!   there is none or the turn's share is spent. Packets for one socket of the host's are kept
//!   instead (`keep_packet`) and sent together (`send`), and then they are done (`kept_done`).
//! - **To the guest**: `room_to_guest`, `write_payload` or the `carry` of another one, then
//!   `give_packet`; or `rooms_to_guest`, `receive`, and `give_packet` for each that was filled.
//! - At the end of the turn `flush_packets`; before it sleeps `enable_packet_kicks`, and
//!   `enable_room_kicks` if there is more for the guest, as for a network card.

use std::io;
use std::os::fd::BorrowedFd;

use nightporter_core::wire::vsock::Header;
use rustix::io::Errno;

use super::VhostUserPort;
use crate::sys::{self, Part};
use crate::vhost::device::DeviceQueue;
use crate::vhost::guest_mem::GuestMemory;
use crate::vhost::packets::{self, Missing, PacketQueue, Piece, Tell};
use crate::vhost::ring::RingFault;
use crate::vhost::vring::Vring;
use crate::vhost::vsock::{FROM_GUEST, TO_GUEST, Vsock};
use crate::watchdog;

impl VhostUserPort<Vsock> {
    /// Whether the driver runs, and both its queues of packets keep the rules.
    #[must_use]
    pub fn is_up(&self) -> bool {
        let Some((_, session)) = &self.connection else { return false };
        session.link().is_some() && session.vrings.iter().take(2).all(|v| v.fault.is_none())
    }

    /// Whether the driver is one that was here before, of a guest that was stopped meanwhile: its
    /// rings were in use.
    #[must_use]
    pub fn goes_on(&mut self) -> bool {
        let mut is_used = |at| self.queue(at).is_some_and(|(queue, _)| queue.ring.base() != 0);
        is_used(TO_GUEST) || is_used(FROM_GUEST)
    }

    /// The packet of the guest that is next, and how many bytes are behind its header. `None`:
    /// there is none, or this turn has seen enough.
    #[must_use]
    pub fn poll_packet(&mut self) -> Option<(Header, usize)> {
        let _part = self.account.part();
        let (queue, memory) = self.queue(FROM_GUEST)?;
        let polled = queue.poll(memory);
        self.judge(FROM_GUEST, polled).flatten()
    }

    /// Copies payload of that packet, from byte `at` on. `false`: it is not there.
    #[must_use]
    pub fn read_payload(&mut self, at: usize, out: &mut [u8]) -> bool {
        let _part = self.account.part();
        let Some((queue, memory)) = self.queue(FROM_GUEST) else { return false };
        let read = packets::read(memory, queue.payload(), at, out);
        self.judge(FROM_GUEST, read.ok_or(RingFault::OutsideMemory)).is_some()
            && !self.has_new_fault()
    }

    /// That packet's buffers are the guest's again.
    pub fn packet_done(&mut self) {
        let _part = self.account.part();
        if let Some((queue, _)) = self.queue(FROM_GUEST) {
            let done = queue.done();
            self.judge(FROM_GUEST, done);
        }
    }

    /// Bytes of payload that the guest's next buffers have room for. `None`: there are none, or
    /// this turn has seen enough.
    #[must_use]
    pub fn room_to_guest(&mut self) -> Option<usize> {
        let _part = self.account.part();
        let (queue, memory) = self.queue(TO_GUEST)?;
        let room = queue.room(memory);
        self.judge(TO_GUEST, room).flatten()
    }

    /// Writes payload into these buffers, and into those that were looked up with them. `false`:
    /// they are not there.
    #[must_use]
    pub fn write_payload(&mut self, bytes: &[u8]) -> bool {
        self.write_payload_at(0, bytes)
    }

    /// Likewise, from byte `at` of them on.
    #[must_use]
    pub fn write_payload_at(&mut self, at: usize, bytes: &[u8]) -> bool {
        let _part = self.account.part();
        let Some((queue, memory)) = self.queue(TO_GUEST) else { return false };
        let written = packets::write(memory, queue.payloads(), at, bytes);
        self.judge(TO_GUEST, written.ok_or(RingFault::OutsideMemory)).is_some()
    }

    /// Copies `len` bytes of the present packet's payload, from byte `at` on, into the next buffers
    /// of another guest. `false`: the memory of one of them is not there.
    #[must_use]
    pub fn carry(&mut self, at: usize, to: &mut Self, len: usize) -> bool {
        if watchdog::searches() {
            // The watchdog should see for whose memory the worker waits.
            let mut bytes = vec![0; len];
            return self.read_payload(at, &mut bytes) && to.write_payload(&bytes);
        }
        let (Some(source), Some(target)) = (self.place(FROM_GUEST), to.place(TO_GUEST)) else {
            return false;
        };
        match packets::copy(source, at, target, len) {
            Ok(()) => return !self.has_new_fault() && !to.has_new_fault(),
            Err(Missing::Source) => self.fail(FROM_GUEST, RingFault::OutsideMemory),
            Err(Missing::Target) => to.fail(TO_GUEST, RingFault::OutsideMemory),
        }
        false
    }

    /// That packet stays where it is, and there may be another one.
    pub fn keep_packet(&mut self) {
        if let Some((queue, _)) = self.queue(FROM_GUEST) {
            queue.keep();
        }
    }

    /// The buffers of all packets that were kept are the guest's again.
    pub fn kept_done(&mut self) {
        if let Some((queue, _)) = self.queue(FROM_GUEST) {
            let done = queue.kept_done();
            self.judge(FROM_GUEST, done);
        }
    }

    /// Copies payload of a packet that is kept, from byte `at` on. `false`: it is not there.
    #[must_use]
    pub fn read_kept(&mut self, packet: usize, at: usize, out: &mut [u8]) -> bool {
        let _part = self.account.part();
        let Some((queue, memory)) = self.queue(FROM_GUEST) else { return false };
        let pieces = queue.kept().nth(packet);
        let read = pieces.and_then(|pieces| packets::read(memory, pieces, at, out));
        self.judge(FROM_GUEST, read.ok_or(RingFault::OutsideMemory)).is_some()
            && !self.has_new_fault()
    }

    /// Writes the packets that are kept to a socket, of each so many bytes of payload, and before
    /// it what goes there; how many bytes in all.
    ///
    /// # Errors
    /// The socket's. EFAULT: the memory is not there, and the device goes down, in this turn or
    /// after it.
    pub fn send<'a>(
        &mut self,
        socket: BorrowedFd<'_>,
        packets: impl Iterator<Item = (Option<&'a [u8]>, usize)>,
    ) -> io::Result<usize> {
        let _part = self.account.part();
        let parts = self.parts(packets).ok_or(Errno::FAULT.into());
        let sent = parts.and_then(|parts| sys::write_parts(socket, &parts));
        self.judge_call(FROM_GUEST, sent)
    }

    fn parts<'m, 'a: 'm>(
        &'m self,
        packets: impl Iterator<Item = (Option<&'a [u8]>, usize)>,
    ) -> Option<Vec<Part<'m>>> {
        let (memory, queue) = self.side(FROM_GUEST)?;
        let mut parts = Vec::new();
        for ((head, len), pieces) in packets.zip(queue.kept()) {
            parts.extend(head.map(Part::Own));
            parts.extend(packets::slices(memory, pieces, 0, len)?.into_iter().map(Part::Guest));
        }
        Some(parts)
    }

    /// Bytes of payload that the guest's next packets have room for, as many of them as `len` bytes
    /// fill, but `most`; in the first `n` of them all together may be as many as `credit` says.
    /// `None`: as of [`Self::room_to_guest`].
    #[must_use]
    pub fn rooms_to_guest(
        &mut self,
        len: usize,
        most: usize,
        credit: impl Fn(u64) -> u64,
    ) -> Option<usize> {
        let _part = self.account.part();
        let (queue, memory) = self.queue(TO_GUEST)?;
        let sum = queue.rooms(memory, len, most, credit);
        self.judge(TO_GUEST, sum).filter(|sum| *sum > 0)
    }

    /// Fills the first `len` bytes of the guest's next packets from a socket, and then `rest`; how
    /// many bytes of both together.
    ///
    /// # Errors
    /// As of [`Self::send`].
    pub fn receive(
        &mut self,
        socket: BorrowedFd<'_>,
        len: usize,
        rest: &mut [u8],
    ) -> io::Result<usize> {
        let _part = self.account.part();
        let side = self.side(TO_GUEST);
        let slices =
            side.and_then(|(memory, queue)| packets::slices(memory, queue.payloads(), 0, len));
        let got = slices.ok_or(Errno::FAULT.into());
        let got = got.and_then(|slices| sys::read_guest(socket, &slices, rest));
        self.judge_call(TO_GUEST, got)
    }

    /// Puts this header before the payload that was written, and gives both to the guest.
    pub fn give_packet(&mut self, header: &Header) {
        let _part = self.account.part();
        if let Some((queue, memory)) = self.queue(TO_GUEST) {
            let given = queue.give(memory, header);
            self.judge(TO_GUEST, given);
        }
    }

    /// The guest offers buffers that no driver of this device offers.
    pub fn refuse_buffers(&mut self) {
        self.fail(TO_GUEST, RingFault::BufferTooSmall);
    }

    /// Whether there may be more than it seems: a queue's share of this turn is used up.
    #[must_use]
    pub fn has_spent_packets(&mut self) -> bool {
        let spent = |port: &mut Self, at| port.queue(at).is_some_and(|(q, _)| q.has_spent());
        spent(self, FROM_GUEST) || spent(self, TO_GUEST)
    }

    /// Shows the guest the packets that were taken and given, and signals those that were given, if
    /// it wants that. A turn ends. Whether it is still owed a signal for those that were taken, by
    /// [`Self::signal_taken`].
    #[must_use]
    pub fn flush_packets(&mut self) -> bool {
        self.flush(TO_GUEST);
        let _part = self.account.part();
        let Some((queue, _)) = self.queue(FROM_GUEST) else { return false };
        queue.begin_turn();
        match queue.show() {
            Tell::Nothing => false,
            Tell::Later => true,
            Tell::Now => {
                self.signal_taken();
                false
            }
        }
    }

    /// Signals the guest, if it wants that, that packets of it were taken.
    pub fn signal_taken(&mut self) {
        if let Some((queue, _)) = self.queue(FROM_GUEST) {
            queue.note_told();
        }
        self.flush(FROM_GUEST);
    }

    /// Asks for a kick when the guest sends. `true`: it just has; poll again.
    #[must_use]
    pub fn enable_packet_kicks(&mut self) -> bool {
        self.enable_kicks(FROM_GUEST)
    }

    /// Asks for a kick when the guest offers buffers. `true`: it just has.
    #[must_use]
    pub fn enable_room_kicks(&mut self) -> bool {
        self.enable_kicks(TO_GUEST)
    }

    /// No kicks for packets: they are polled for.
    pub fn disable_packet_kicks(&mut self) {
        self.disable_kicks(FROM_GUEST);
    }

    /// No kicks for buffers.
    pub fn disable_room_kicks(&mut self) {
        self.disable_kicks(TO_GUEST);
    }

    fn queue(&mut self, at: usize) -> Option<(&mut PacketQueue, &GuestMemory)> {
        let (_, session) = self.connection.as_mut()?;
        let queue = session.vrings.get_mut(at).and_then(Vring::usable)?;
        Some((queue, &session.memory))
    }

    fn side(&self, at: usize) -> Option<(&GuestMemory, &PacketQueue)> {
        let (_, session) = self.connection.as_ref()?;
        let vring = session.vrings.get(at).filter(|vring| vring.fault.is_none())?;
        Some((&session.memory, vring.queue.as_ref()?))
    }

    fn place(&self, at: usize) -> Option<(&GuestMemory, &[Piece])> {
        let (memory, queue) = self.side(at)?;
        Some((memory, queue.payload()))
    }

    /// Missing memory is no error of the socket. The kernel reports it by EFAULT, and no signal
    /// comes. A look at the memory shows whether it is missing, or the ring lies.
    fn judge_call(&mut self, at: usize, result: io::Result<usize>) -> io::Result<usize> {
        if result.as_ref().is_err_and(|e| e.raw_os_error() == Some(Errno::FAULT.raw_os_error())) {
            if let Some((memory, queue)) = self.side(at) {
                packets::look_at(memory, queue.payloads());
            }
            self.fail(at, RingFault::OutsideMemory);
        }
        result
    }

    fn judge<T>(&mut self, at: usize, result: Result<T, RingFault>) -> Option<T> {
        result.map_err(|fault| self.fail(at, fault)).ok()
    }
}
