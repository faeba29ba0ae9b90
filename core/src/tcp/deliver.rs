//! Bytes for G: what of the store goes out next, and its loss recovery (SNOOP-14, SNOOP-15,
//! SNOOP-27 to SNOOP-32).
//!
//! There is no congestion window here: the path to G is a ring. What limits delivery is G's own
//! window, the ring's room and, per frame, what the driver can take.

use crate::engine::TRANSMIT_PARTS_MAX;
use crate::limits;
use crate::tcp::flow::{Flow, Recovery, Why};
use crate::tcp::timers::Timer;
use crate::tcp::{Cx, Fate, RST_ACK, index};
use crate::time::{Duration, Instant};
use crate::wire::emit::{CsumMode, TcpEmit};
use crate::wire::packet::{IpVersion, TcpFlags};
use crate::wire::virtio_net::{F_NEEDS_CSUM, GSO_NONE, GSO_TCPV4, GSO_TCPV6, VirtioNetHdr};

/// One frame for G: a header, and the stored bytes `[from, to)`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Delivery {
    pub(crate) hdr: VirtioNetHdr,
    pub(crate) header_len: usize,
    pub(crate) from: u64,
    pub(crate) to: u64,
}

/// What a frame may carry: payload bytes, and bytes per wire segment if it is a super-segment.
#[derive(Clone, Copy)]
struct Limit {
    payload: u64,
    mss: u64,
}

/// The IP total length field bounds a super-segment.
const IP_LEN_MAX: u64 = 65_535;

impl Flow {
    /// The flow has, or may have, something for G: it joins its VM's delivery list.
    pub(crate) fn want_delivery(&mut self, cx: &mut Cx<'_, '_>) {
        if !self.flags.listed && self.has_delivery() {
            self.flags.listed = true;
            cx.vm.ready.push_back(cx.id);
        }
    }

    fn has_delivery(&self) -> bool {
        if self.standing.is_guest_untold() {
            return true;
        }
        self.standing.is_live()
            && (self.flags.probe_due
                || self.flags.ack_to_guest_due
                || self.retransmission_due()
                || self.fresh_bytes() > 0
                || self.fin_due()
                || self.rst_ready())
    }

    /// Bytes not handed over yet that G's window takes, SWS avoidance applied (SNOOP-27).
    fn fresh_bytes(&self) -> u64 {
        let held = self.rx.rcv_nxt.saturating_sub(self.rx.g_snd);
        let slow_start = self.losses.as_ref().map_or(u64::MAX, |l| l.in_flight_max);
        let edge = self.rx.g_re.min(self.rx.g_una.saturating_add(slow_start));
        let room = edge.saturating_sub(self.rx.g_snd);
        if room >= held {
            return held;
        }
        // RFC 9293 section 3.8.6.2.1: a full segment, or half of G's window. With nothing in
        // flight `room` is the whole window, so this never waits for an ACK that will not come.
        let window = self.rx.g_re.saturating_sub(self.rx.g_una);
        let useful = room >= u64::from(self.opt.mss_to_guest) || room * 2 >= window;
        if useful { room } else { 0 }
    }

    fn retransmission_due(&self) -> bool {
        self.losses.as_ref().is_some_and(|l| l.recovery.from < l.recovery.to)
    }

    fn fin_due(&self) -> bool {
        self.fin_fits() && self.fin_r() == Some(self.rx.g_snd) && self.rx.g_una <= self.rx.g_snd
    }

    /// R's FIN takes a sequence number of G's window like any byte: a segment that ends beyond the
    /// window may be dropped with its data (K-02).
    fn fin_fits(&self) -> bool {
        self.fin_r().is_some_and(|fin| fin < self.rx.g_re)
    }

    fn rst_ready(&self) -> bool {
        self.flags.rst_pending && self.rx.g_una >= self.delivery_end()
    }

    /// The next frame for G of at most `room` bytes. Its header is written to `buf`.
    pub(crate) fn next_delivery(
        &mut self,
        cx: &mut Cx<'_, '_>,
        buf: &mut [u8; TcpEmit::MAX_LEN],
        room: usize,
    ) -> Option<Delivery> {
        if self.standing.is_guest_untold() || self.rst_ready() {
            return Some(self.deliver_rst(cx, buf));
        }
        if !self.standing.is_live() {
            return None;
        }
        if self.flags.ack_to_guest_due && self.sack_to_guest_due() {
            return Some(self.deliver_ack(cx, buf)); // stored bytes leave no room for its blocks
        }
        let limit = self.frame_limit(cx, room);
        if self.retransmission_due() {
            return self.deliver_again(cx, buf, limit);
        }
        let fresh = self.fresh_bytes().min(limit.payload);
        if fresh > 0 || self.fin_due() {
            let from = self.rx.g_snd;
            return self.deliver_range(cx, buf, from, from + fresh, limit);
        }
        if self.flags.probe_due {
            self.flags.probe_due = false;
            let seq = self.rx.g_una - 1;
            return Some(self.deliver_bare(cx, buf, seq, TcpFlags::ACK));
        }
        self.flags.ack_to_guest_due.then(|| self.deliver_ack(cx, buf))
    }

    /// R's newest (ack, window) by itself (COM-30).
    fn deliver_ack(&mut self, cx: &mut Cx<'_, '_>, buf: &mut [u8; TcpEmit::MAX_LEN]) -> Delivery {
        let seq = self.rx.g_nxt.min(self.rx.g_re).max(self.rx.g_una);
        self.deliver_bare(cx, buf, seq, TcpFlags::ACK)
    }

    /// What one frame may carry into this ring, given the features negotiated now (COM-17).
    fn frame_limit(&self, cx: &Cx<'_, '_>, room: usize) -> Limit {
        let v4 = cx.key.version == IpVersion::V4;
        let tso = cx.features.csum && if v4 { cx.features.tso4 } else { cx.features.tso6 };
        let options = if self.opt.timestamps { 12 } else { 0 };
        let ip_tcp = if v4 { 40 } else { 60 } + options;
        let mss = u64::from(self.opt.mss_to_guest);
        let room = (room as u64).saturating_sub(u64::from(self.template.l2_len()) + ip_tcp);
        let payload = if tso { (IP_LEN_MAX - ip_tcp) / mss * mss } else { mss };
        Limit { payload: payload.min(room), mss }
    }

    fn deliver_again(
        &mut self,
        cx: &mut Cx<'_, '_>,
        buf: &mut [u8; TcpEmit::MAX_LEN],
        limit: Limit,
    ) -> Option<Delivery> {
        let r = self.losses.as_mut().map(|l| &mut l.recovery).filter(|_| limit.payload > 0)?;
        let from = r.from.max(self.rx.g_una);
        let to = r.to.min(from + limit.payload);
        if from >= to {
            r.from = r.to;
            return None;
        }
        r.from = to;
        self.counters.local_retransmissions += 1;
        cx.vm.counters.local_retransmissions += 1;
        self.deliver_range(cx, buf, from, to, limit)
    }

    fn deliver_range(
        &mut self,
        cx: &mut Cx<'_, '_>,
        buf: &mut [u8; TcpEmit::MAX_LEN],
        from: u64,
        to: u64,
        limit: Limit,
    ) -> Option<Delivery> {
        let with_fin = self.fin_fits() && self.fin_r() == Some(to) && from >= self.rx.g_snd;
        if from == to && !with_fin {
            return None; // the ring has no room for even one byte
        }
        let mut flags = TcpFlags::ACK;
        if to == self.rx.rcv_nxt {
            flags = flags.union(TcpFlags::PSH); // the last byte there is: push it (SNOOP-12)
        }
        if with_fin {
            flags = flags.union(TcpFlags::FIN);
        }
        let len = index(to - from);
        let header_len = if cx.features.csum {
            self.emit_to_guest(cx, buf, from, flags, len, CsumMode::Partial)
        } else {
            let mut parts: [&[u8]; TRANSMIT_PARTS_MAX - 1] = [&[]; TRANSMIT_PARTS_MAX - 1];
            for (slot, part) in parts.iter_mut().zip(self.store.slices(cx.arena, from, to)) {
                *slot = part;
            }
            self.emit_to_guest(cx, buf, from, flags, len, CsumMode::Full(&parts))
        };
        let end = to + u64::from(with_fin);
        self.rx.g_snd = self.rx.g_snd.max(end);
        self.rx.g_nxt = self.rx.g_nxt.max(end);
        self.arm_guest_timer(cx, false);
        let hdr = self.virtio_hdr(cx, len as u64, limit.mss);
        Some(Delivery { hdr, header_len, from, to })
    }

    fn virtio_hdr(&self, cx: &Cx<'_, '_>, len: u64, mss: u64) -> VirtioNetHdr {
        if !cx.features.csum {
            return VirtioNetHdr::default();
        }
        let v4 = cx.key.version == IpVersion::V4;
        let options = if self.opt.timestamps { 12 } else { 0 };
        let l4 = self.template.l2_len() + if v4 { 20 } else { 40 };
        let gso = if len <= mss {
            GSO_NONE
        } else if v4 {
            GSO_TCPV4
        } else {
            GSO_TCPV6
        };
        VirtioNetHdr {
            flags: F_NEEDS_CSUM,
            gso_type: gso,
            hdr_len: l4 + 20 + options,
            gso_size: if gso == GSO_NONE { 0 } else { self.opt.mss_to_guest },
            csum_start: l4,
            csum_offset: 16,
        }
    }

    fn deliver_bare(
        &mut self,
        cx: &mut Cx<'_, '_>,
        buf: &mut [u8; TcpEmit::MAX_LEN],
        seq: u64,
        flags: TcpFlags,
    ) -> Delivery {
        let header_len = self.emit_to_guest(cx, buf, seq, flags, 0, CsumMode::Full(&[]));
        Delivery { hdr: VirtioNetHdr::default(), header_len, from: 0, to: 0 }
    }

    /// R's RST, exact for G (SNOOP-15); or ours, when promises cannot be kept.
    fn deliver_rst(&mut self, cx: &mut Cx<'_, '_>, buf: &mut [u8; TcpEmit::MAX_LEN]) -> Delivery {
        let ours = self.standing.is_guest_untold();
        self.standing.tell_guest(false);
        let seq = if ours { self.rx.g_nxt.min(self.rx.g_re) } else { self.rx.g_una };
        let d = self.deliver_bare(cx, buf, seq, RST_ACK);
        if !ours {
            self.abort(cx, Why::Reset, false);
        }
        d
    }

    /// The guest timer ran out: G had its time and did not move (SNOOP-29, SNOOP-31, SNOOP-32,
    /// SNOOP-42).
    pub(crate) fn on_guest_timeout(&mut self, cx: &mut Cx<'_, '_>, timer: Timer) {
        let running = cx.vm.clock.now(cx.now);
        let stuck = running.since(self.stuck_since.min(running));
        if self.flags.rst_pending && stuck >= limits::T_RST {
            self.abort(cx, Why::Reset, true);
            return;
        }
        let timeouts = self.timers.back_off();
        let tried = u32::from(timeouts) >= limits::REFUSED_RETRANSMISSIONS;
        if tried && stuck >= limits::REFUSED_RUNNING {
            cx.vm.refuse(cx.now, cx.key.r_addr, cx.key.g_port);
            self.abort_both(cx, Why::GuestRefuses);
            return;
        }
        if timer == Timer::Probe {
            self.flags.probe_due = true;
        } else {
            // It took nothing, nor did it say so.
            if self.dup_acks == 0 && stuck >= limits::T_ASYMMETRIC {
                self.drain(Why::Asymmetric);
            }
            // Everything unacknowledged counts as lost, but what is first is sent first: G may have
            // been slow, and may have the rest.
            self.rx.g_snd = self.rx.g_una;
            let losses = self.losses.get_or_insert_default();
            losses.recovery = Recovery::default();
            losses.in_flight_max = self.opt.mss_to_guest.into();
            self.counters.local_retransmissions += 1;
            cx.vm.counters.local_retransmissions += 1;
        }
        self.timers.wait_again(running);
    }

    /// A segment of either side meets a flow in `Abort`: a challenge ACK gets an exact RST.
    pub(crate) fn on_segment_in_abort(
        &mut self,
        cx: &mut Cx<'_, '_>,
        from_guest: bool,
        tcp: &crate::wire::packet::Tcp,
    ) -> Fate {
        let rst = tcp.flags.contains(TcpFlags::RST);
        if !rst && tcp.flags.contains(TcpFlags::ACK) {
            if from_guest {
                // What R was told stands: `g_una` is not moved by what G says now (INV-07).
                let ack = tcp.ack.unwrap(self.rx.g_nxt);
                self.rx.g_nxt = ack;
                self.rx.g_re = ack;
                self.standing.tell_guest(true);
            } else if self.abort_rst_allowed(cx.now) {
                let seq = tcp.ack.unwrap(self.tx.w_nxt);
                self.emit_to_net(cx, seq, RST_ACK, None);
            }
        }
        Fate::Drop(crate::drops::DropReason::FlowAborted)
    }

    fn abort_rst_allowed(&mut self, now: Instant) -> bool {
        let since = u64::from(now.low_millis().wrapping_sub(self.limited_ack_ms));
        let allowed = Duration::from_millis(since) >= limits::ABORT_RST_INTERVAL;
        if allowed {
            self.limited_ack_ms = now.low_millis();
        }
        allowed
    }
}
