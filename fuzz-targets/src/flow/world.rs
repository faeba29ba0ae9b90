//! Frames in, frames out, and time, as the daemon would have them; each step is judged.

use super::model::{G, How, Model, Out, R, Seen, place};
use super::segment::{
    Base, CWR, ECE, Extra, Len, SYN, Segment, Ts, Window, Wish, stream, timestamps,
};
use super::{CONNS, Conn, G_ADDRESS, GUEST, Rest, UPLINK, World};
use nightporter_check::wire;
use nightporter_core::engine::Engine;
use nightporter_core::port::PortId;
use nightporter_core::tcp::flow::State;
use nightporter_core::time::Duration;
use nightporter_core::turn::{Interrupted, Ports, Received, Sent, Step};
use nightporter_core::wire::packet::{Packet, Seq, Tcp};
use nightporter_core::wire::virtio_net::VirtioNetHdr;

/// Wake-ups in one stretch of time: a paused guest's timers are looked at every 100 ms.
const WAKES_MAX: usize = 5000;
/// Frames out of one step: a window of the smallest segments, and its acknowledgements.
const FRAMES_MAX: usize = 20_000;
/// Bytes of the largest buffer of the guest's ring.
const ROOM: usize = 65_562;

impl World<'_, '_> {
    // --- Frames in -----------------------------------------------------------------------------

    pub(super) fn takes(&mut self, conn: usize, window: Window) {
        self.sends(G, conn, Wish { window, ..Wish::usual(Len::Nothing) });
    }

    pub(super) fn sends(&mut self, from: usize, conn: usize, wish: Wish) {
        let segment = self.segment(from, conn, &wish);
        self.takes_in(from, conn, segment, None);
    }

    /// The timestamp clock of an end: milliseconds.
    pub(super) fn clock(&self, of: usize) -> u32 {
        let elapsed = self.s.now.since(self.s.started).as_millis();
        self.s.clocks[of].wrapping_add(Seq::wrap(elapsed).0)
    }

    /// The numbers of a wish.
    fn segment(&mut self, from: usize, conn: usize, wish: &Wish) -> Segment {
        let seen = self.seen(conn);
        let clock = self.clock(from);
        let Conn { model, window, .. } = &mut self.s.conns[conn];
        let at = |base: Base| numbers(model, seen.as_ref(), from, base);
        let seq = wish.seq.from(at(wish.seq.base).0);
        let ack = wish.ack.from(at(wish.ack.base).1);
        let other = matches!(wish.extra, Extra::OtherBytes);
        let flags = match wish.extra {
            Extra::Ecn(bits) if bits & 4 != 0 => wish.flags.bits() | ECE | CWR,
            _ => wish.flags.bits(),
        };
        window[from] = wish.window.field(window[from]);
        let tsval = match wish.ts {
            Ts::Right | Ts::Without => Some(clock),
            Ts::Older(n) => Some(clock.wrapping_sub(n.into())),
            Ts::Newer(n) => Some(clock.wrapping_add(n.into())),
            Ts::Far(n) => Some(clock.wrapping_add(n >> 3)),
        };
        let on = model.agreed.timestamps && !matches!(wish.ts, Ts::Without);
        let echo = model.tsval_to[from].unwrap_or(0);
        let mut options = tsval.filter(|_| on).map_or_else(Vec::new, |ts| timestamps(ts, echo));
        if let Extra::Sack(blocks) = wish.extra {
            options.extend([1, 1, 5, 18]);
            for (start, len) in blocks {
                let start = Seq::wrap(ack + 100 * u64::from(start));
                options.extend(start.0.to_be_bytes());
                options.extend(start.0.wrapping_add(100 * u32::from(len)).to_be_bytes());
            }
        }
        Segment {
            seq: Seq::wrap(seq).0,
            ack: Seq::wrap(ack).0,
            flags,
            window: window[from],
            options,
            payload: stream(seq, wish.len.bytes(), other),
            extra: wish.extra,
        }
    }

    /// A frame comes in. `old`: the model of the connection that it ends, if it does.
    pub(super) fn takes_in(
        &mut self,
        from: usize,
        conn: usize,
        segment: Segment,
        old: Option<Replaced>,
    ) {
        let (near, far, port) = if from == R {
            (self.s.conns[conn].address, G_ADDRESS, UPLINK)
        } else {
            (G_ADDRESS, self.s.conns[conn].address, GUEST)
        };
        let (hdr, bytes) = segment.frame(near, far);
        let packet = Packet::parse(&bytes).expect("made by the book");
        let tcp = *packet.tcp().expect("made by the book").1;
        if self.s.trace {
            eprintln!("  {} {packet}", if from == R { "R>" } else { "G>" });
        }
        self.s.conns[conn].model.on_sent(from, &tcp, segment.is_corrupt());
        self.s.frames = 0;
        self.s.seen = self.s.see(&self.engine);
        let mut frame = bytes.clone();
        self.s.handed = Some(Handed { from, conn, segment, bytes, tcp, old });
        let Self { engine, turn, s } = self;
        let result = turn.handle_frame(s.now, engine, *s, port, hdr, &mut frame);
        if s.trace {
            eprintln!("     {result:?} {:?}", s.seen[conn]);
        }
        assert_eq!(result.is_err(), s.dies, "only the end of the process interrupts it");
    }

    /// Turns of the worker, until nothing is left to do.
    pub(super) fn settles(&mut self) {
        let Self { engine, turn, s } = self;
        s.frames = 0;
        s.seen = s.see(engine);
        loop {
            turn.run(s.now, engine, *s).expect("nothing interrupts it");
            if !turn.rest(*s) {
                break;
            }
        }
    }

    // --- Time ----------------------------------------------------------------------------------

    pub(super) fn lets_time_go_by(&mut self, span: Duration) {
        self.settles();
        let target = (self.s.now + span).min(self.s.end);
        let mut wakes = 0;
        while let Some(at) = self.engine.poll_timeout().filter(|at| *at <= target) {
            self.s.now = self.s.now.max(at);
            self.settles();
            wakes += 1;
            assert!(wakes <= WAKES_MAX, "a timer storm");
        }
        self.s.now = target;
    }
}

/// A frame on its way in.
pub(super) struct Handed {
    from: usize,
    conn: usize,
    segment: Segment,
    bytes: Vec<u8>,
    tcp: Tcp,
    old: Option<Replaced>,
}

/// A connection that a handshake takes the place of, unless the flow that was there stays.
pub(super) struct Replaced {
    pub(super) model: Model,
    pub(super) guest_isn: Option<Seq>,
}

/// A frame on its way out: whether to R or G, its header and its bytes.
pub(super) type Left = (usize, VirtioNetHdr, Vec<u8>);

/// Both ends take every frame; the guest's ring has room for deliveries when its input says so. A
/// frame is judged when the step that made it is over, with the engine before and after.
impl Ports for Rest {
    fn receive(&mut self, _: PortId, _: &mut [u8]) -> Received {
        Received::Empty
    }

    fn send(&mut self, port: PortId, hdr: &VirtioNetHdr, parts: &[&[u8]], _waited: bool) -> Sent {
        if !self.adapts {
            self.left.push((if port == UPLINK { R } else { G }, *hdr, parts.concat()));
        }
        Sent::Done
    }

    fn room(&mut self, _: PortId, want: usize) -> usize {
        if self.slots > 0 { want.min(ROOM) } else { 0 }
    }

    fn progress(&mut self, _: PortId) -> Option<bool> {
        (!self.paused).then_some(true)
    }

    /// The engine's frame is judged, not the turn's cut of it.
    fn before_adapting(&mut self, port: PortId, hdr: &VirtioNetHdr, parts: &[&[u8]]) {
        assert!(self.handed.is_some(), "a frame that the driver does not take (COM-17)");
        let _ = self.send(port, hdr, parts, false);
        self.adapts = true;
    }

    fn after_step(&mut self, engine: &Engine<'_>, step: Step) -> Result<(), Interrupted> {
        let now = self.see(engine);
        let before = std::mem::replace(&mut self.seen, now);
        self.adapts = false;
        match step {
            Step::Timers => self.judge_timers(&before),
            Step::Frame => {
                self.judge_frame(&before);
                if self.dies {
                    return Err(Interrupted);
                }
            }
            Step::BatchEnd => {}
            Step::Departure => unreachable!("nobody here has congestion offload"),
            Step::Made => {
                let now = self.seen.clone();
                self.judge_made(&now);
            }
            Step::Delivery => {
                self.slots -= usize::from(self.slots != usize::MAX);
                self.judge_made(&before);
            }
        }
        assert!(self.left.is_empty(), "a frame that nothing made");
        Ok(())
    }
}

impl Rest {
    /// The flows of both connections.
    pub(super) fn see(&self, engine: &Engine<'_>) -> [Option<Seen>; CONNS] {
        std::array::from_fn(|conn| engine.find_flow(&self.key(conn)).map(Seen::of))
    }

    fn judge_timers(&mut self, before: &[Option<Seen>; CONNS]) {
        for (conn, before) in before.iter().enumerate() {
            if let (Some(before), Some(after)) = (before, &self.seen[conn])
                && after.is_gated()
            {
                self.conns[conn].model.on_nothing(before, after);
            }
        }
    }

    /// Judges the frame that was handed in, and the part of it that passed on.
    fn judge_frame(&mut self, before: &[Option<Seen>; CONNS]) {
        let handed = self.handed.take().expect("a frame");
        let Handed { from, conn, segment, bytes: original, tcp, old } = handed;
        let (before, after) = (&before[conn], self.seen[conn].clone());
        let model = &mut self.conns[conn].model;
        let was_gated = before.as_ref().is_some_and(Seen::is_gated);
        let is_gated = after.as_ref().is_some_and(Seen::is_gated);
        if segment.flags & SYN != 0 {
            model.on_syn(was_gated, is_gated);
        }
        if let (Some(before), Some(after)) = (before, &after)
            && (is_gated || was_gated && after.state == State::Pass)
            && !model.lost
        {
            let payload = &segment.payload;
            match from {
                R => model.on_from_net(before, after, &tcp, payload, segment.is_corrupt()),
                _ => model.on_from_guest(before, after, &tcp),
            }
        }
        if from == R && after.as_ref().is_some_and(|after| after.reset_waits) {
            model.reset[R] = true; // it wants nothing any more
        }
        if let Some((to, hdr, frame)) = self.left.pop() {
            assert_eq!(to, 1 - from, "back where it came from");
            assert_eq!(frame.len(), original.len(), "an edit changed the length (COM-15)");
            let edited = was_gated || (is_gated && !segment.payload.is_empty());
            let how = if edited { How::Gated } else { How::Verbatim };
            assert!(edited || frame == original, "changed in passing (INV-17)");
            let at = tcp.payload_offset as usize;
            assert!(frame[at..] == original[at..], "a byte was changed (INV-01, INV-02)");
            self.judge_left((to, hdr, frame), after.as_ref(), how, segment.is_corrupt());
        }
        let guest_isn = after.map(|after| after.guest_isn);
        if let Some(old) = old
            && guest_isn.is_some()
            && guest_isn == old.guest_isn
        {
            self.conns[conn].model = old.model;
        }
    }

    /// Frames of the engine's own; `at`: the flows when they left.
    fn judge_made(&mut self, at: &[Option<Seen>; CONNS]) {
        for left in std::mem::take(&mut self.left) {
            self.frames += 1;
            assert!(self.frames <= FRAMES_MAX, "no end of frames (INV-18)");
            let at = self.conn_of(&left.2).and_then(|conn| at[conn].as_ref());
            self.judge_left(left, at, How::Made, false);
        }
    }

    fn conn_of(&self, frame: &[u8]) -> Option<usize> {
        let packet = Packet::parse(frame).ok()?;
        let (_, tcp) = packet.tcp()?;
        let is = |c: &Conn| c.address.port == tcp.src_port || c.address.port == tcp.dst_port;
        self.conns.iter().position(is)
    }

    fn judge_left(&mut self, left: Left, at: Option<&Seen>, how: How, corrupt: bool) {
        let (to, hdr, frame) = left;
        assert!(frame.len() <= ROOM, "a frame of {} bytes", frame.len());
        let packet = Packet::parse(&frame).expect("it came out");
        let (_, tcp) = packet.tcp().expect("it came out");
        if self.trace {
            eprintln!("  {} {how:?} {packet}", if to == R { ">R" } else { ">G" });
        }
        if corrupt && to == G {
            return; // in passing, and not for long
        }
        if !corrupt {
            let whole = wire::Packet::parse(&frame).expect("it came out");
            let (ip, _) = whole.tcp().expect("it came out");
            assert_eq!(nightporter_check::checksums(&hdr, &frame, ip), Ok(()), "INV-22");
        }
        let conn = self.conn_of(&frame).expect("one of ours");
        let from = tcp.payload_offset as usize;
        let payload = &frame[from..from + tcp.payload_len as usize];
        self.conns[conn].model.on_emitted(to, at, how, &Out { tcp, payload });
    }
}

/// The bases of a sequence and an acknowledgement number.
fn numbers(model: &Model, seen: Option<&Seen>, from: usize, base: Base) -> (u64, u64) {
    let to = 1 - from;
    let usual = (model.end[from], if from == R { model.end[G] } else { model.got_end() });
    let Some(s) = seen.filter(|s| s.is_gated()) else { return usual };
    if from == R {
        let next = s.rcv_nxt + u64::from(s.fin == s.rcv_nxt);
        match base {
            Base::Usual => (next, s.net_nxt),
            Base::Low => (s.guest_una, s.net_una),
            Base::High => (model.end[R], s.net_nxt),
            Base::Edge => (s.edge_to_net, model.end[to]),
            Base::Given => (s.guest_nxt, s.net_nxt),
            Base::Odd => (s.ooo_end.unwrap_or_else(|| place(s.fin, s.rcv_nxt)), model.first[to]),
        }
    } else {
        match base {
            Base::Usual => (s.net_nxt, usual.1),
            Base::Low => (s.net_una, s.guest_una),
            Base::High => (s.net_nxt, s.rcv_nxt),
            Base::Edge => (s.net_una, s.edge_to_net),
            Base::Given => (s.net_una, s.guest_nxt),
            Base::Odd => (model.first[from], place(s.fin, s.rcv_nxt) + 1),
        }
    }
}
