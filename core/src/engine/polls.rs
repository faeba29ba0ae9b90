//! What the engine wants sent, and when it wants to be woken.

use crate::drops::DropReason;
use crate::engine::{Engine, Transmit, Verdict};
use crate::limits::{TIMERS_PER_CALL, TRANSMIT_PARTS_MAX};
use crate::port::PortId;
use crate::tcp::flow::Flow;
use crate::tcp::{Delivery, FlowContext};
use crate::time::Instant;
use crate::wire::emit::TcpEmit;
use crate::wire::glance::untagged_dst;
use crate::wire::packet::{Eth, Packet, VlanStack};
use crate::wire::virtio_net::VirtioNetHdr;

impl Engine<'_> {
    /// The end of a batch of frames: pending ACKs become due (SNOOP-07).
    #[inline]
    pub fn handle_batch_end(&mut self, now: Instant) {
        if !self.common.ack_list.is_empty() {
            self.make_pending_acks(now);
        }
    }

    #[inline(never)] // as `handle_staged`
    fn make_pending_acks(&mut self, now: Instant) {
        while let Some(id) = self.common.ack_list.pop() {
            let Some((flow, mut cx)) = self.flow_and_context(now, id) else { continue };
            let was_live = flow.is_live();
            flow.on_batch_end(&mut cx);
            if let Some(class) = flow.class_if_new(was_live) {
                self.flows.set_class(id, class);
            }
        }
    }

    /// Timers that are due at `now` run, at most [`TIMERS_PER_CALL`] of them.
    pub fn handle_timeout(&mut self, now: Instant) {
        for _ in 0..TIMERS_PER_CALL {
            let Some(id) = self.timers.expired(now) else { return };
            if self.with_flow(now, id, |flow, cx| flow.on_timeout(cx)) == Some(true) {
                self.remove_flow(id);
            }
        }
    }

    /// The next instant at which [`Self::handle_timeout`] has something to do.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.timers.next()
    }

    /// The next frame the engine made itself (ACK, RST, probe, window update), routed to a port.
    ///
    /// For a remote that is another VM of this host it first passes the inbound pipe there, which
    /// may absorb it.
    #[inline]
    #[must_use]
    pub fn poll_transmit(&mut self, now: Instant) -> Option<Transmit<'_>> {
        let place = self.common.out.pop()?;
        self.route_next(now, place)
    }

    #[inline(never)] // as `handle_staged`
    fn route_next(&mut self, now: Instant, place: usize) -> Option<Transmit<'_>> {
        let Some(uplink) = self.uplink_of_made(now, place) else {
            return self.route_any(now, place);
        };
        let made = self.common.out.at(place);
        Some(Transmit::of_header(Some(uplink), made.origin, made.frame()))
    }

    /// The uplink behind which the remote of a frame in `self.out` is, as nearly all are. `None`:
    /// it may be anywhere.
    #[inline(always)]
    fn uplink_of_made(&self, now: Instant, place: usize) -> Option<PortId> {
        let made = self.common.out.at(place);
        let dst = untagged_dst(made.frame())?;
        let out = self.switch.peek(now, VlanStack::default(), dst)?;
        let is_uplink = |out| self.port(out).is_some_and(|port| !port.config.is_guest());
        (out != made.origin && is_uplink(out)).then_some(out)
    }

    #[inline(never)]
    fn route_any(&mut self, now: Instant, mut place: usize) -> Option<Transmit<'_>> {
        loop {
            let origin = self.common.out.at(place).origin;
            let port = match self.route_made(now, place) {
                Ok(Verdict::Forward(port)) => Some(port),
                Ok(Verdict::Flood) => None,
                Ok(Verdict::Absorbed) => {
                    place = self.common.out.pop()?;
                    continue;
                }
                Ok(Verdict::Drop(reason)) | Err(reason) => {
                    self.count_drop(origin, reason);
                    place = self.common.out.pop()?;
                    continue;
                }
            };
            self.note_given(now, origin, port);
            return Some(Transmit::of_header(port, origin, self.common.out.at(place).frame()));
        }
    }

    /// Where a frame in `self.common.out` goes; another VM's inbound pipe may edit or absorb it.
    fn route_made(&mut self, now: Instant, place: usize) -> Result<Verdict, DropReason> {
        let made = self.common.out.at(place);
        let eth = Eth::parse(made.frame())?;
        let Some(out) = self.egress(now, made.origin, eth.vlan, eth.dst)? else {
            return Ok(Verdict::Flood);
        };
        if !self.port(out).is_some_and(|p| p.config.is_guest()) {
            return Ok(Verdict::Forward(out)); // before it is parsed
        }
        // Out of the queue while that pipe looks at it, for that may add to the queue.
        let mut made = *self.common.out.at(place);
        let frame = &mut made.bytes[..made.len];
        let packet = Packet::parse(frame)?;
        let hdr = VirtioNetHdr::default();
        let verdict = self.process_toward(now, out, &hdr, frame, &packet);
        *self.common.out.at_mut(place) = made;
        verdict
    }

    /// A port for whose guest there is something new to deliver, or may be. Each is named once;
    /// what its ring has no room for is the caller's to come back for.
    #[must_use]
    pub fn poll_ready(&mut self) -> Option<PortId> {
        let port = self.common.ready_ports.pop_front()?;
        if let Some(p) = self.port_mut(port) {
            p.vm.announced = false;
        }
        Some(port)
    }

    /// The next stored bytes for the guest of `port`, in a frame of at most `room` bytes.
    ///
    /// Call while the ring has room; flows take turns. See the drain order for a ring that is full.
    #[must_use]
    pub fn poll_delivery(
        &mut self,
        now: Instant,
        port: PortId,
        room: usize,
    ) -> Option<Transmit<'_>> {
        self.port(port).filter(|p| p.config.is_guest() && p.features.is_some())?;
        if room < TcpEmit::MAX_LEN {
            // Not even a bare ACK is sure to fit. Whose turn it is keeps that, or who comes first
            // in a ring with little room would always do so.
            self.handle_no_room(now, port);
            return None;
        }
        let listed = self.port(port)?.vm.ready.len();
        let mut found = None;
        for _ in 0..listed {
            let id = self.port_mut(port)?.vm.ready.pop_front()?;
            let mut header = [0; TcpEmit::MAX_LEN];
            let poll = |flow: &mut Flow, cx: &mut FlowContext<'_, '_>| {
                let made = flow.poll_delivery(cx, &mut header, room)?;
                cx.vm.clock.on_delivery(now); // before the flow asks to be woken
                Some(made)
            };
            let delivery = self.with_flow(now, id, poll);
            if let Some(Some(delivery)) = delivery {
                self.made = header;
                found = Some((id, delivery));
                break;
            }
        }
        if found.is_none() {
            self.handle_no_room(now, port);
        }
        let (id, delivery) = found?;
        Some(self.assemble(port, id, delivery))
    }

    /// The ring of `port` takes nothing more. If something is due to its guest, that has yet to be
    /// seen as if it lay in the ring: a paused guest with a full ring does not count as idle.
    pub fn handle_no_room(&mut self, now: Instant, port: PortId) {
        if let Some(p) = self.port_mut(port).filter(|p| !p.vm.ready.is_empty()) {
            p.vm.clock.on_delivery(now);
        }
    }

    fn assemble(&self, port: PortId, id: crate::flow::table::FlowId, d: Delivery) -> Transmit<'_> {
        let mut parts: [&[u8]; TRANSMIT_PARTS_MAX] = [&[]; TRANSMIT_PARTS_MAX];
        parts[0] = &self.made[..d.header_len];
        let mut n = 1;
        if let Some(flow) = self.flows.get(id).filter(|_| d.from < d.to) {
            for piece in flow.store().slices(&self.common.arena, d.from, d.to) {
                parts[usize::from(n)] = piece;
                n += 1;
            }
        }
        Transmit { port: Some(port), ingress: port, hdr: d.hdr, parts, parts_len: n }
    }
}
