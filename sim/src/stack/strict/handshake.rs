//! SYN, SYN-ACK, and their negotiation (RFC 9293 section 3.5, RFC 7323, RFC 3168 section 6.1.1).

use nightporter_core::time::Instant;

use super::super::app::Phase;
use super::super::emit::{Options, Segment};
use super::Shared;
use super::complaints::maybe_network;
use super::conn::{Agreed, Conn, Stage};
use super::incoming::{Incoming, wrap};
use nightporter_check::wire::{TcpFlags, TcpOptions};

/// Widest shift there is (RFC 7323 section 2.3).
const SHIFT_MAX: u8 = 14;
/// The MSS of a peer that says none (RFC 9293 section 3.7.1).
const MSS_DEFAULT: u16 = 536;
/// Payload per segment whatever the peer says (`TCP_MIN_SND_MSS`).
const PAYLOAD_MIN: i64 = 8;

impl Conn {
    /// Starts the handshake.
    pub(super) fn connect(&mut self) {
        self.stage = Stage::SynSent;
        self.syn_due = true;
    }

    /// Sends a SYN or SYN-ACK if one is due.
    pub(super) fn transmit_syn(&mut self, now: Instant, shared: &mut Shared) {
        if self.send.timer().is_some_and(|at| at <= now) {
            self.send.on_syn_timeout();
            self.syn_due = true;
        }
        if !std::mem::take(&mut self.syn_due) {
            return;
        }
        let is_answer = self.stage == Stage::SynReceived;
        self.send.on_syn_sent(now);
        let mut options = self.syn_options(now, is_answer);
        let mut flags = if is_answer { TcpFlags::SYN | TcpFlags::ACK } else { TcpFlags::SYN };
        if is_answer && self.agreed.ecn {
            flags = flags | TcpFlags::ECE;
        } else if !is_answer && self.plan.ecn && self.syns_sent == 0 {
            flags = flags | TcpFlags::ECE | TcpFlags::CWR; // not again: it may be what was dropped
        }
        self.syns_sent += 1;
        let segment = Segment {
            seq: self.habits.isn,
            ack: if is_answer { wrap(1, self.peer_isn) } else { 0 },
            flags,
            window: self.recv.syn_window(),
            options: options.bytes(),
            ..Segment::default()
        };
        self.put_bare(shared, &segment);
    }

    /// The options of a SYN, or those accepted in a SYN-ACK.
    fn syn_options(&self, now: Instant, is_answer: bool) -> Options {
        let mut options = Options::default();
        options.mss(self.own_mss);
        if !is_answer && self.syns_sent > 0 && self.plan.quirks.plain_second_syn {
            return options;
        }
        if self.plan.sack && (!is_answer || self.agreed.sack) {
            options.sack_permitted();
        }
        if self.plan.timestamps && (!is_answer || self.agreed.timestamps) {
            let said = !self.plan.quirks.no_clock_in_syn;
            options.timestamps(if said { self.clock(now) } else { 0 }, self.ts_recent);
        }
        if let Some(shift) = self.plan.window_scale
            && (!is_answer || self.scales)
        {
            options.window_scale(shift);
        }
        options.raw(&self.plan.syn_options);
        options
    }

    /// Takes in what the peer's SYN or SYN-ACK says.
    fn agree(&mut self, now: Instant, segment: &Incoming<'_>, options: &TcpOptions) {
        self.scales = self.plan.window_scale.is_some() && options.window_scale.is_some();
        let shift = |shift: Option<u8>| {
            if self.scales { shift.unwrap_or(0).min(SHIFT_MAX) } else { 0 }
        };
        let ecn = match self.stage {
            Stage::SynSent => segment.flags.ece() && !segment.flags.cwr(),
            _ => segment.flags.contains(TcpFlags::ECE | TcpFlags::CWR) && !segment.flags.ae(),
        };
        self.agreed = Agreed {
            timestamps: self.plan.timestamps && options.timestamps.is_some(),
            sack: self.plan.sack && options.sack_permitted,
            ecn: self.plan.ecn && ecn,
            shift: shift(options.window_scale),
        };
        let own_shift = shift(self.plan.window_scale);
        self.recv.set_shift(own_shift);
        self.ts_recent = options.timestamps.map_or(0, |ts| ts.tsval);
        self.ts_recent_at = now;
        self.peer_mss = options.mss.filter(|&mss| mss > 0).unwrap_or(MSS_DEFAULT);
    }

    /// Both SYNs are through; `segment` is what said so.
    fn establish(&mut self, now: Instant, segment: &Incoming<'_>, window: i64) {
        let options = if self.agreed.timestamps { 12 } else { 0 };
        let options = options + self.route.extension_len(); // `icsk_ext_hdr_len`
        let payload = (i64::from(self.peer_mss) - options).min(self.payload_of(self.mtu.into()));
        self.send.on_established(now, segment.seq, window, payload.max(PAYLOAD_MIN));
        self.stage = Stage::Synchronized;
        self.heard_at = now;
    }

    pub(super) fn on_listen(&mut self, now: Instant, segment: &Incoming<'_>, options: &TcpOptions) {
        if segment.flags.syn() && !segment.flags.intersects(TcpFlags::ACK | TcpFlags::RST) {
            self.agree(now, segment, options);
            self.stage = Stage::SynReceived;
            self.syn_due = true;
            self.heard_at = now;
        }
    }

    pub(super) fn on_syn_sent(
        &mut self,
        now: Instant,
        shared: &mut Shared,
        segment: &Incoming<'_>,
        options: &TcpOptions,
    ) {
        let answers = segment.flags.ack() && segment.ack == 1 && self.syns_sent > 0;
        if segment.flags.ack() && !answers {
            if !segment.flags.rst() {
                self.refuse(shared, segment);
            }
        } else if segment.flags.rst() {
            if answers {
                self.finish(Phase::Reset, Stage::Over);
            }
        } else if segment.flags.syn() && answers {
            self.agree(now, segment, options);
            self.establish(now, segment, segment.window.into());
            self.transmit_ack(now, shared);
        }
    }

    pub(super) fn on_syn_received(
        &mut self,
        now: Instant,
        shared: &mut Shared,
        segment: &Incoming<'_>,
    ) {
        if segment.flags.syn() && !segment.flags.ack() && segment.seq == 0 {
            self.syn_due = true; // it did not hear the answer
            return;
        }
        if self.is_paws_reject(now, segment) {
            return;
        }
        if segment.seq < 1 || segment.seq > self.recv.edge() {
            self.syn_due = !segment.flags.rst();
        } else if segment.flags.rst() {
            if segment.seq == 1 {
                self.finish(Phase::Reset, Stage::Over);
            }
        } else if segment.flags.syn() || !segment.flags.ack() {
            // Neither can be part of a handshake.
        } else if segment.ack != 1 {
            self.complain(shared, maybe_network!("wrong ACK of a SYN-ACK"));
            self.refuse(shared, segment);
        } else {
            self.establish(now, segment, i64::from(segment.window) << self.agreed.shift);
            self.on_synchronized(now, shared, segment);
        }
    }

    /// An ACK of what was never sent: there must be another connection at the other end.
    fn refuse(&self, shared: &mut Shared, segment: &Incoming<'_>) {
        let seq = wrap(segment.ack, self.habits.isn);
        self.put_bare(shared, &Segment { seq, flags: TcpFlags::RST, ..Segment::default() });
    }
}
