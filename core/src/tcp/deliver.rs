//! Frames for G: the sender's next bytes, in frames that this ring and driver take (COM-17).

use crate::limits::TRANSMIT_PARTS_MAX;
use crate::port::PortId;
use crate::tcp::flow::{Flow, State, Why};
use crate::tcp::sender::Segment;
use crate::tcp::{FlowContext, RST_ACK, index};
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

/// Bounds of a frame: payload bytes, and bytes per wire segment if it is a super-segment.
#[derive(Clone, Copy)]
struct Limit {
    payload: u64,
    mss: u64,
}

/// The IP total length field bounds a super-segment.
pub(super) const IP_LEN_MAX: u64 = 65_535;

impl Flow {
    /// The flow has, or may have, something for G: it joins its VM's delivery list.
    #[inline(always)]
    pub(super) fn want_delivery(&mut self, cx: &mut FlowContext<'_, '_>) {
        if !self.sender.is_listed() && self.has_delivery() && self.sender.enter_list() {
            cx.vm.ready.push_back(cx.id);
            if !std::mem::replace(&mut cx.vm.announced, true) {
                cx.ready_ports.push_back(PortId(cx.key.port));
            }
        }
    }

    #[inline(always)]
    fn has_delivery(&self) -> bool {
        if !self.standing.is_live() {
            return self.standing.is_guest_untold();
        }
        self.outbound.ack_to_guest_due() || self.rst_ready() || self.has_bytes()
    }

    /// The sender has something for G.
    #[inline]
    fn has_bytes(&self) -> bool {
        let (stream, mss) = (self.receiver.stream(), self.options.mss_to_guest.into());
        self.sender.has_something(stream, mss, &self.losses)
    }

    fn rst_ready(&self) -> bool {
        self.receiver.reset_waits() && self.sender.una() >= self.delivery_end()
    }

    /// The flow's turn: the next frame for G of at most `room` bytes. Its header is written to
    /// `buf`.
    #[must_use]
    pub(crate) fn poll_delivery(
        &mut self,
        cx: &mut FlowContext<'_, '_>,
        buf: &mut [u8; TcpEmit::MAX_LEN],
        room: usize,
    ) -> Option<Delivery> {
        self.sender.on_left_list(); // `after_event` lists the flow again if it has more
        if self.standing.is_guest_untold() || self.rst_ready() {
            return Some(self.deliver_rst(cx, buf));
        }
        if !self.standing.is_live() {
            return None;
        }
        if self.state() == State::Opening {
            return self.deliver_opening(cx, buf);
        }
        if self.outbound.ack_to_guest_due() && (self.sack_to_guest_due() || !self.has_bytes()) {
            return Some(self.deliver_ack(cx, buf)); // stored bytes leave no room for its blocks
        }
        let limit = self.frame_limit(cx, room);
        let (sender, mut sending) = self.sending(cx);
        if sender.retransmission_due(sending.mss, sending.losses) {
            let segment = sender.poll_retransmission(limit.payload, &mut sending)?;
            cx.vm.counters.local_retransmissions += 1;
            return Some(self.deliver(cx, buf, segment, limit));
        }
        if let Some(segment) = sender.poll_fresh(limit.payload, &mut sending) {
            return Some(self.deliver(cx, buf, segment, limit));
        }
        if self.sender.poll_probe() {
            let seq = self.sender.probe_seq();
            return Some(self.deliver_bare(cx, buf, seq, TcpFlags::ACK));
        }
        self.outbound.ack_to_guest_due().then(|| self.deliver_ack(cx, buf))
    }

    /// A frame without bytes that is not urgent: R's acknowledgement and window, as if they had
    /// passed.
    #[inline]
    pub(crate) fn only_tells(&self, made: &Delivery) -> bool {
        made.to == 0 && self.timers.is_idle()
    }

    /// R's newest (ack, window) by itself (COM-30).
    fn deliver_ack(
        &mut self,
        cx: &mut FlowContext<'_, '_>,
        buf: &mut [u8; TcpEmit::MAX_LEN],
    ) -> Delivery {
        let seq = self.sender.pure_ack_seq(self.receiver.passed());
        self.deliver_bare(cx, buf, seq, TcpFlags::ACK)
    }

    /// The bounds of one frame for this ring, with the features negotiated now (COM-17).
    fn frame_limit(&self, cx: &FlowContext<'_, '_>, room: usize) -> Limit {
        let v4 = cx.key.version == IpVersion::V4;
        let features = cx.features.unwrap_or_default();
        let tso = features.csum && if v4 { features.tso4 } else { features.tso6 };
        let ip_tcp = self.ip_tcp_len(cx);
        let mss = u64::from(self.options.mss_to_guest);
        let room = (room as u64).saturating_sub(u64::from(self.template.l2_len()) + ip_tcp);
        let payload = if tso { (IP_LEN_MAX - ip_tcp) / mss * mss } else { mss };
        Limit { payload: payload.min(room), mss }
    }

    /// Bytes of the IP and TCP headers of a segment with data, in either direction.
    #[inline(always)]
    pub(super) fn ip_tcp_len(&self, cx: &FlowContext<'_, '_>) -> u64 {
        let options = if self.options.timestamps { 12 } else { 0 };
        options + if cx.key.version == IpVersion::V4 { 40 } else { 60 }
    }

    fn deliver(
        &mut self,
        cx: &mut FlowContext<'_, '_>,
        buf: &mut [u8; TcpEmit::MAX_LEN],
        segment: Segment,
        limit: Limit,
    ) -> Delivery {
        let Segment { from, to, fin, push } = segment;
        let mut flags = TcpFlags::ACK;
        if push {
            flags = flags.union(TcpFlags::PSH); // the last byte there is: push it (SNOOP-12)
        }
        if fin {
            flags = flags.union(TcpFlags::FIN);
        }
        let len = index(to - from);
        let header_len = if cx.features.is_some_and(|f| f.csum) {
            self.emit_to_guest(cx, buf, from, flags, len, CsumMode::Partial)
        } else {
            let mut parts: [&[u8]; TRANSMIT_PARTS_MAX - 1] = [&[]; TRANSMIT_PARTS_MAX - 1];
            for (slot, part) in parts.iter_mut().zip(self.store.slices(cx.arena, from, to)) {
                *slot = part;
            }
            self.emit_to_guest(cx, buf, from, flags, len, CsumMode::Full(&parts))
        };
        let hdr = self.virtio_hdr(cx, len as u64, limit.mss);
        Delivery { hdr, header_len, from, to }
    }

    fn virtio_hdr(&self, cx: &FlowContext<'_, '_>, len: u64, mss: u64) -> VirtioNetHdr {
        if !cx.features.is_some_and(|f| f.csum) {
            return VirtioNetHdr::default();
        }
        let v4 = cx.key.version == IpVersion::V4;
        let options = if self.options.timestamps { 12 } else { 0 };
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
            gso_size: if gso == GSO_NONE { 0 } else { self.options.mss_to_guest },
            csum_start: l4,
            csum_offset: 16,
        }
    }

    fn deliver_bare(
        &mut self,
        cx: &mut FlowContext<'_, '_>,
        buf: &mut [u8; TcpEmit::MAX_LEN],
        seq: u64,
        flags: TcpFlags,
    ) -> Delivery {
        let header_len = self.emit_to_guest(cx, buf, seq, flags, 0, CsumMode::Full(&[]));
        Delivery { hdr: VirtioNetHdr::default(), header_len, from: 0, to: 0 }
    }

    /// R's RST, exact for G (SNOOP-15); or ours, when promises cannot be kept.
    fn deliver_rst(
        &mut self,
        cx: &mut FlowContext<'_, '_>,
        buf: &mut [u8; TcpEmit::MAX_LEN],
    ) -> Delivery {
        let ours = self.standing.is_guest_untold();
        let seq = if ours { self.sender.reset_seq() } else { self.sender.una() };
        // One without ACK needs no number of G, and none may be known.
        let is_translated = self.receiver.is_translated();
        let flags = if is_translated { TcpFlags::RST } else { RST_ACK };
        let d = self.deliver_bare(cx, buf, seq, flags);
        if ours {
            self.standing.tell_guest(false);
        } else {
            self.abort(cx, Why::Reset, false);
        }
        d
    }
}
