//! Frames in, frames out, and time, as the daemon would have them; each step is judged.

use super::model::{G, How, Model, Out, R, Seen, place};
use super::segment::{
    Base, CWR, ECE, Extra, Len, SYN, Segment, Ts, Window, Wish, stream, timestamps,
};
use super::{Conn, G_ADDRESS, GUEST, UPLINK, World};
use nightporter_check::wire;
use nightporter_core::engine::{Transmit, Verdict};
use nightporter_core::tcp::flow::State;
use nightporter_core::time::Duration;
use nightporter_core::wire::packet::{Packet, Seq};
use nightporter_core::wire::virtio_net::VirtioNetHdr;

/// Wake-ups in one stretch of time: a paused guest's timers are looked at every 100 ms.
const WAKES_MAX: usize = 5000;
/// Frames out of one step: a window of the smallest segments, and its acknowledgements.
const FRAMES_MAX: usize = 20_000;

impl World<'_, '_> {
    // --- Frames in -----------------------------------------------------------------------------

    pub(super) fn takes(&mut self, conn: usize, window: Window) {
        self.sends(G, conn, Wish { window, ..Wish::usual(Len::Nothing) });
    }

    pub(super) fn sends(&mut self, from: usize, conn: usize, wish: Wish) {
        self.hands_in(from, conn, wish);
        self.transmits();
    }

    pub(super) fn hands_in(&mut self, from: usize, conn: usize, wish: Wish) {
        let segment = self.segment(from, conn, &wish);
        self.takes_in(from, conn, &segment);
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

    /// A frame comes in; what comes out of it directly goes on.
    pub(super) fn takes_in(&mut self, from: usize, conn: usize, segment: &Segment) {
        let (near, far, port) = if from == R {
            (self.s.conns[conn].address, G_ADDRESS, UPLINK)
        } else {
            (G_ADDRESS, self.s.conns[conn].address, GUEST)
        };
        let (mut hdr, original) = segment.frame(near, far);
        let packet = Packet::parse(&original).expect("made by the book");
        let (_, tcp) = packet.tcp().expect("made by the book");
        if self.s.trace {
            eprintln!("  {} {packet}", if from == R { "R>" } else { "G>" });
        }
        let before = self.seen(conn);
        self.s.conns[conn].model.on_sent(from, tcp, segment.is_corrupt());
        let mut frame = original.clone();
        let verdict = self.engine.handle_frame(self.s.now, port, &mut hdr, &mut frame);
        let after = self.seen(conn);
        if self.s.trace {
            eprintln!("     {verdict:?} {after:?}");
        }
        let model = &mut self.s.conns[conn].model;
        let was_gated = before.as_ref().is_some_and(Seen::is_gated);
        let is_gated = after.as_ref().is_some_and(Seen::is_gated);
        if segment.flags & SYN != 0 {
            model.on_syn(was_gated, is_gated);
        }
        if let (Some(before), Some(after)) = (&before, &after)
            && (is_gated || was_gated && after.state == State::Pass)
            && !model.lost
        {
            let payload = &segment.payload;
            match from {
                R => model.on_from_net(before, after, tcp, payload, segment.is_corrupt()),
                _ => model.on_from_guest(before, after, tcp),
            }
        }
        if from == R
            && self.engine.find_flow(&self.key(conn)).is_some_and(|f| f.stats().reset_waits)
        {
            self.s.conns[conn].model.reset[R] = true; // it wants nothing any more
        }
        if let Verdict::Forward(_) | Verdict::Flood = verdict {
            assert_eq!(frame.len(), original.len(), "an edit changed the length (COM-15)");
            let edited = was_gated || (is_gated && !segment.payload.is_empty());
            let how = if edited { How::Gated } else { How::Verbatim };
            assert!(edited || frame == original, "changed in passing (INV-17)");
            let at = tcp.payload_offset as usize;
            assert!(frame[at..] == original[at..], "a byte was changed (INV-01, INV-02)");
            self.emitted(1 - from, after.as_ref(), how, hdr, &frame, segment.is_corrupt());
        }
    }

    // --- Frames out ----------------------------------------------------------------------------

    pub(super) fn transmits(&mut self) {
        let mut frames = 0;
        while let Some((hdr, frame)) = self.engine.poll_transmit(self.s.now).map(copy) {
            let conn = self.conn_of(&frame);
            let at = conn.and_then(|conn| self.seen(conn));
            self.emitted(R, at.as_ref(), How::Made, hdr, &frame, false);
            frames += 1;
            assert!(frames <= FRAMES_MAX, "no end of frames (INV-18)");
        }
    }

    fn delivers(&mut self) -> bool {
        let mut any = false;
        let mut frames = 0;
        while self.s.slots > 0 && self.s.link {
            let before = [0, 1].map(|conn| self.seen(conn));
            let room = 65_562;
            let Some(made) = self.engine.poll_delivery(self.s.now, GUEST, room) else { break };
            let (hdr, frame) = copy(made);
            assert!(frame.len() <= room, "a frame of {} bytes", frame.len());
            let f = self.s.features;
            assert!(f.csum || !hdr.needs_csum(), "a partial checksum for none (COM-17)");
            assert!(f.tso4 || !hdr.is_gso(), "a super-segment for none (COM-17)");
            if self.s.slots != usize::MAX {
                self.s.slots -= 1;
            }
            let at = self.conn_of(&frame).and_then(|conn| before[conn].clone());
            self.emitted(G, at.as_ref(), How::Made, hdr, &frame, false);
            any = true;
            frames += 1;
            assert!(frames <= FRAMES_MAX, "no end of frames (INV-18)");
        }
        any
    }

    fn conn_of(&self, frame: &[u8]) -> Option<usize> {
        let packet = Packet::parse(frame).ok()?;
        let (_, tcp) = packet.tcp()?;
        let is = |c: &Conn| c.address.port == tcp.src_port || c.address.port == tcp.dst_port;
        self.s.conns.iter().position(is)
    }

    fn emitted(
        &mut self,
        to: usize,
        at: Option<&Seen>,
        how: How,
        hdr: VirtioNetHdr,
        frame: &[u8],
        corrupt: bool,
    ) {
        let packet = Packet::parse(frame).expect("it came out");
        let (_, tcp) = packet.tcp().expect("it came out");
        if self.s.trace {
            eprintln!("  {} {how:?} {packet}", if to == R { ">R" } else { ">G" });
        }
        if corrupt && to == G {
            return; // in passing, and not for long
        }
        if !corrupt {
            let whole = wire::Packet::parse(frame).expect("it came out");
            let (ip, _) = whole.tcp().expect("it came out");
            assert_eq!(nightporter_check::checksums(&hdr, frame, ip), Ok(()), "INV-22");
        }
        let conn = self.conn_of(frame).expect("one of ours");
        let from = tcp.payload_offset as usize;
        let payload = &frame[from..from + tcp.payload_len as usize];
        self.s.conns[conn].model.on_emitted(to, at, how, &Out { tcp, payload });
    }

    /// The drain order of the engine, until nothing is left to do.
    pub(super) fn settles(&mut self) {
        self.engine.handle_batch_end(self.s.now);
        self.transmits();
        while self.delivers() {
            self.transmits();
        }
    }

    // --- Time ----------------------------------------------------------------------------------

    pub(super) fn lets_time_go_by(&mut self, span: Duration) {
        self.settles();
        let target = (self.s.now + span).min(self.s.end);
        let mut wakes = 0;
        while let Some(at) = self.engine.poll_timeout().filter(|at| *at <= target) {
            self.s.now = self.s.now.max(at);
            self.shows_life();
            let before = [0, 1].map(|conn| self.seen(conn));
            self.engine.handle_timeout(self.s.now);
            for (conn, before) in before.iter().enumerate() {
                if let (Some(before), Some(after)) = (before, self.seen(conn))
                    && after.is_gated()
                {
                    self.s.conns[conn].model.on_nothing(before, &after);
                }
            }
            self.settles();
            wakes += 1;
            assert!(wakes <= WAKES_MAX, "a timer storm");
        }
        self.s.now = target;
    }

    fn shows_life(&mut self) {
        if !self.s.paused {
            self.engine.handle_guest_progress(self.s.now, GUEST, true);
        }
    }
}

/// What a sequence and an acknowledgement number start from.
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

fn copy(made: Transmit<'_>) -> (VirtioNetHdr, Vec<u8>) {
    (made.hdr, made.parts().concat())
}
