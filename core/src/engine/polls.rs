//! The frames that the engine wants sent, and the time of its next wake-up.

use crate::drops::DropReason;
use crate::engine::{Direction, Engine, Port, Transmit, Verdict, context};
use crate::flow::table::FlowId;
use crate::limits::{TIMERS_PER_CALL, TRANSMIT_PARTS_MAX};
use crate::port::PortId;
use crate::store::flow_store::FlowStore;
use crate::tcp::flow::Flow;
use crate::tcp::{Delivery, FlowContext, index};
use crate::time::Instant;
use crate::wire::emit::TcpEmit;
use crate::wire::glance::untagged_dst;
use crate::wire::packet::{Eth, Packet, VlanStack};
use crate::wire::virtio_net::VirtioNetHdr;

/// Room for a header.
type Header = [u8; TcpEmit::MAX_LEN];

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
        if !self.common.out.departures.is_asleep() {
            // An empty wheel stands still: the first sender after a long pause may be woken early.
            self.wake_senders(now);
        }
        if self.rates.any() {
            self.lift_limits(now);
        }
        if self.walks.any() {
            self.go_on_walking(now);
        }
        if self.left.until.is_some_and(|until| until <= now) {
            self.forget_left();
        }
        if self.half_open_due <= now {
            self.repeat_syn_acks(now);
        }
        for _ in 0..TIMERS_PER_CALL {
            let Some(id) = self.timers.expired(now) else { return };
            if self.with_flow(now, id, |flow, cx| flow.on_timeout(cx)) == Some(true) {
                self.note_forgotten(id, Flow::is_live); // G has given up an old handshake itself
                self.remove_flow(id);
            }
        }
    }

    #[inline(never)] // nobody sends, nearly always
    fn wake_senders(&mut self, now: Instant) {
        for _ in 0..TIMERS_PER_CALL {
            let Some(id) = self.common.out.departures.expired(now) else { return };
            self.with_flow(now, id, |flow, cx| flow.on_sender_woken(cx));
        }
    }

    /// The next instant at which [`Self::handle_timeout`] has something to do.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        let flows = self.timers.next();
        let half_open = self.common.half_open > 0;
        let is_left = self.left.until.is_some();
        let is_any = self.rates.any() || self.walks.any() || is_left || half_open;
        if self.common.out.departures.is_asleep() && !is_any {
            return flows; // nearly always
        }
        let departures = self.common.out.departures.next();
        let answers = half_open.then_some(self.half_open_due);
        let rare = self.rates.next().into_iter().chain(self.walks.next());
        let rare = rare.chain(self.left.until).chain(answers);
        flows.into_iter().chain(departures).chain(rare).min()
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
        self.uplink_of(now, made.origin, made.frame())
    }

    #[inline(always)]
    fn uplink_of(&self, now: Instant, origin: PortId, frame: &[u8]) -> Option<PortId> {
        if let Some(end) = self.end_of_wire(origin) {
            return end;
        }
        let out = self.networks.alone().peek(now, VlanStack::default(), untagged_dst(frame)?)?;
        let is_uplink = |out| self.port(out).is_some_and(|port| !port.config.is_guest());
        (out != origin && is_uplink(out)).then_some(out)
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
            match port {
                Some(port) => self.note_given(now, port),
                None => {
                    let made = *self.common.out.at(place);
                    self.note_flooded(now, origin, made.frame());
                }
            }
            return Some(Transmit::of_header(port, origin, self.common.out.at(place).frame()));
        }
    }

    /// Where a frame in `self.common.out` goes; another VM's inbound pipe may edit or absorb it.
    fn route_made(&mut self, now: Instant, place: usize) -> Result<Verdict, DropReason> {
        // The frame is out of the queue while that pipe looks at it, because the pipe may add to
        // the queue.
        let mut made = *self.common.out.at(place);
        let frame = &mut made.bytes[..made.len];
        let verdict = self.route(now, made.origin, &VirtioNetHdr::default(), frame);
        *self.common.out.at_mut(place) = made;
        verdict
    }

    /// Where a frame goes that H has made; another VM's inbound pipe may edit or absorb it.
    fn route(
        &mut self,
        now: Instant,
        origin: PortId,
        hdr: &VirtioNetHdr,
        frame: &mut [u8],
    ) -> Result<Verdict, DropReason> {
        let eth = Eth::parse(frame)?;
        let Some(out) = self.egress(now, origin, eth.vlan, eth.dst)? else {
            return Ok(Verdict::Flood);
        };
        if !self.port(out).is_some_and(|p| p.config.is_guest()) {
            return Ok(Verdict::Forward(out)); // before it is parsed
        }
        let packet = Packet::parse(frame)?;
        self.process_toward(now, out, hdr, frame, &packet)
    }

    /// Whether [`Self::poll_departure`] may have something.
    #[inline]
    #[must_use]
    pub fn wants_departure(&self) -> bool {
        self.common.out.departures.any()
    }

    /// The next bytes of a guest that H sends to their remote, in a frame; flows take turns.
    ///
    /// For a remote that is another VM of this host it first passes the inbound pipe there, which
    /// may absorb it.
    #[inline(never)] // as `handle_staged`
    #[must_use]
    pub fn poll_departure(&mut self, now: Instant) -> Option<Departure<'_>> {
        let (id, origin, made) = self.next_departure(now)?;
        let header = &self.made[..made.header_len];
        if let Some(uplink) = self.uplink_of(now, origin, header) {
            let store = self.flows.get(id).and_then(Flow::departing);
            return Some(Departure::Given(self.assemble(Some(uplink), origin, &made, store)));
        }
        let port = match self.route_departure(now, id, origin, &made) {
            Ok(Verdict::Forward(port)) => Some(port),
            Ok(Verdict::Flood) => None,
            Ok(Verdict::Absorbed) => return Some(Departure::Taken(self.whole.len())),
            Ok(Verdict::Drop(reason)) | Err(reason) => {
                self.count_drop(origin, reason);
                return Some(Departure::Taken(self.whole.len()));
            }
        };
        if let Some(port) = port {
            self.note_given(now, port);
        } else {
            let whole = std::mem::take(&mut self.whole);
            self.note_flooded(now, origin, &whole);
            self.whole = whole;
        }
        let frame = Transmit::of_header(port, origin, &self.whole);
        Some(Departure::Given(Transmit { hdr: made.hdr, ..frame }))
    }

    /// The next flow that has something to send, its frame, and the port on whose behalf it is
    /// sent.
    fn next_departure(&mut self, now: Instant) -> Option<(FlowId, PortId, Delivery)> {
        loop {
            let id = self.common.out.departures.pop()?;
            let poll = |flow: &mut Flow, cx: &mut FlowContext<'_, '_>, header: &mut _| {
                let made = flow.poll_departure(cx, header)?;
                Some((PortId(cx.key.port), made))
            };
            if let Some((origin, departure)) = self.make_with_flow(now, id, poll) {
                if self.rates.any() {
                    let bytes = departure.header_len + index(departure.to - departure.from);
                    self.charge(now, origin, Direction::FromGuest, bytes);
                }
                return Some((id, origin, departure));
            }
        }
    }

    /// Routes a departure that is not for an uplink, put together in one buffer.
    fn route_departure(
        &mut self,
        now: Instant,
        id: FlowId,
        origin: PortId,
        d: &Delivery,
    ) -> Result<Verdict, DropReason> {
        // Out of `self` while another VM's inbound pipe looks at it.
        let mut whole = std::mem::take(&mut self.whole);
        whole.clear();
        whole.extend_from_slice(&self.made[..d.header_len]);
        if let Some(store) = self.flows.get(id).and_then(Flow::departing) {
            store.slices(&self.common.arena, d.from, d.to).for_each(|p| whole.extend_from_slice(p));
        }
        let verdict = self.route(now, origin, &d.hdr, &mut whole);
        self.whole = whole;
        verdict
    }

    /// A port for whose guest there is, or may be, something new to deliver. Each is named once; if
    /// its ring lacks room, the caller has to come back.
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
        let may = |p: &&Port| p.features.is_some() && !p.vm.deliveries_held;
        self.port(port).filter(|p| p.config.is_guest()).filter(may)?;
        if room < TcpEmit::MAX_LEN {
            // Not even a bare ACK is sure to fit. The flow keeps its turn; otherwise the first flow
            // in a ring with little room would always go first.
            self.handle_no_room(now, port);
            return None;
        }
        let listed = self.port(port)?.vm.ready.len();
        let mut found = None;
        for _ in 0..listed {
            let id = self.port_mut(port)?.vm.ready.pop_front()?;
            let poll = |flow: &mut Flow, cx: &mut FlowContext<'_, '_>, header: &mut _| {
                let made = flow.poll_delivery(cx, header, room)?;
                // Before the flow asks to be woken.
                if flow.only_tells(&made) {
                    cx.vm.clock.on_forwarded(now);
                } else {
                    cx.vm.clock.on_delivery(now);
                }
                Some(made)
            };
            if let Some(delivery) = self.make_with_flow(now, id, poll) {
                found = Some((id, delivery));
                break;
            }
        }
        if found.is_none() {
            self.handle_no_room(now, port);
        }
        let (id, delivery) = found?;
        if self.rates.any() {
            let bytes = delivery.header_len + index(delivery.to - delivery.from);
            self.charge(now, port, Direction::ToGuest, bytes);
        }
        let has_bytes = delivery.from < delivery.to;
        let store = if has_bytes { self.flows.get(id).map(Flow::store) } else { None };
        Some(self.assemble(Some(port), port, &delivery, store))
    }

    /// Runs `make` on a flow, which may write a header to `self.made`, and then the end of such an
    /// event.
    #[inline(always)]
    fn make_with_flow<R>(
        &mut self,
        now: Instant,
        id: FlowId,
        make: impl FnOnce(&mut Flow, &mut FlowContext<'_, '_>, &mut Header) -> Option<R>,
    ) -> Option<R> {
        let (key, flow) = self.flows.entry_mut(id)?;
        let mut cx = context(now, id, key, &mut self.ports, &mut self.common)?;
        let was_live = flow.is_live();
        let made = make(flow, &mut cx, &mut self.made);
        let wake_at = flow.end_making(&mut cx);
        let class = flow.class_if_new(was_live);
        self.end_event(id, wake_at, class);
        made
    }

    /// The ring of `port` takes nothing more. If something is due to its guest, that has yet to be
    /// seen as if it lay in the ring: a paused guest with a full ring does not count as idle.
    pub fn handle_no_room(&mut self, now: Instant, port: PortId) {
        if let Some(p) = self.port_mut(port).filter(|p| !p.vm.ready.is_empty()) {
            p.vm.clock.on_delivery(now);
        }
    }

    /// The frame whose header was made last, with its bytes in `store`.
    #[inline(always)]
    fn assemble(
        &self,
        port: Option<PortId>,
        ingress: PortId,
        d: &Delivery,
        store: Option<&FlowStore>,
    ) -> Transmit<'_> {
        let mut parts: [&[u8]; TRANSMIT_PARTS_MAX] = [&[]; TRANSMIT_PARTS_MAX];
        parts[0] = &self.made[..d.header_len];
        let mut n = 1;
        if let Some(store) = store.filter(|_| d.from < d.to) {
            for piece in store.slices(&self.common.arena, d.from, d.to) {
                parts[usize::from(n)] = piece;
                n += 1;
            }
        }
        Transmit { port, ingress, hdr: d.hdr, parts, parts_len: n }
    }
}

/// Bytes of a guest that leave for their remote.
#[derive(Clone, Copy, Debug)]
pub enum Departure<'a> {
    /// The caller sends this frame.
    Given(Transmit<'a>),
    /// A frame of so many bytes: another VM's inbound pipe took it, or it was dropped and counted.
    Taken(usize),
}
