//! The emission gates: every packet of an `On` or `Drain` flow passes one.
//!
//! EMIT-R keeps frames for R consistent with H's promises; EMIT-G makes frames for G look like
//! those of one remote endpoint. `docs/spec.md` has a table of each; K-01 to K-06 say why.

use core::ops::Range;

use crate::flow::key::FlowKey;
use crate::port::PortId;
use crate::switch::Mac;
use crate::tcp::flow::Flow;
use crate::tcp::outbound::RemoteSack;
use crate::tcp::outbound::departures::Departures;
use crate::tcp::outbound::relayed::Relayed;
use crate::tcp::receiver::window::Terms;
use crate::tcp::vm::Presence;
use crate::tcp::{FlowContext, Frame, RST_ACK};
use crate::time::Instant;
use crate::wire::edit::TcpEdit;
use crate::wire::emit::{CsumMode, TcpEmit};
use crate::wire::packet::{Ip, SackBlocks, Tcp, TcpFlags};
use crate::wire::seq::Seq;
use crate::wire::virtio_net::VirtioNetHdr;

/// The ECN bits of TOS and traffic class.
const ECN_MASK: u8 = 0b11;
const ECT0: u8 = 0b10;
/// Both ECN bits: congestion experienced.
pub(crate) const CE: u8 = 0b11;

/// Of an Ethernet header.
const SOURCE_MAC: Range<usize> = 6..12;

/// G's bytes in one frame that H sends to R.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DataToNet {
    pub(crate) seq: u64,
    pub(crate) flags: TcpFlags,
    /// Bytes of it, and of a segment.
    pub(crate) len: usize,
    pub(crate) mss: u16,
    /// R was sent them before, or it is a probe.
    pub(crate) again: bool,
}

/// A header-only frame H made for R, to be routed from `origin`'s side of the switch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ToNet {
    pub(crate) origin: PortId,
    pub(crate) len: usize,
    pub(crate) bytes: [u8; TcpEmit::MAX_LEN],
}

impl ToNet {
    /// The frame.
    pub(crate) fn frame(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// Frames for R, first made, first polled. They are built in place and stay there until the queue
/// is empty; as many places as were ever needed at once are kept.
#[derive(Debug)]
pub(crate) struct OutQueue {
    places: Vec<ToNet>,
    made: usize,
    polled: usize,
    /// The flows that have more than headers for R.
    pub(crate) departures: Departures,
}

impl OutQueue {
    /// Nothing is for R.
    pub(crate) fn new(now: Instant) -> Self {
        Self { places: vec![], made: 0, polled: 0, departures: Departures::new(now) }
    }

    /// A place for the next frame, with its earlier content.
    pub(crate) fn push(&mut self) -> &mut ToNet {
        if self.made == self.places.len() {
            self.places.push(ToNet { origin: PortId(0), len: 0, bytes: [0; TcpEmit::MAX_LEN] });
        }
        self.made += 1;
        &mut self.places[self.made - 1]
    }

    /// The frame that was made last has this source.
    fn set_last_source(&mut self, mac: Mac) {
        if let Some(made) = self.made.checked_sub(1).and_then(|at| self.places.get_mut(at)) {
            made.bytes[SOURCE_MAC].copy_from_slice(&mac);
        }
    }

    /// The place of the next frame, valid until the next call of this.
    #[inline]
    pub(crate) fn pop(&mut self) -> Option<usize> {
        if self.polled == self.made {
            (self.polled, self.made) = (0, 0);
            return None;
        }
        self.polled += 1;
        Some(self.polled - 1)
    }

    /// The frame at a place.
    pub(crate) fn at(&self, place: usize) -> &ToNet {
        &self.places[place]
    }

    /// The frame at a place, to edit.
    pub(crate) fn at_mut(&mut self, place: usize) -> &mut ToNet {
        &mut self.places[place]
    }
}

impl Flow {
    /// EMIT-R for a segment of G with data or FIN: edited in place, length unchanged (COM-15).
    /// It ends at `end`.
    pub(super) fn gate_to_net(
        &mut self,
        frame: &mut [u8],
        ip: &Ip,
        tcp: &Tcp,
        partial: bool,
        end: u64,
    ) {
        let ack = self.ack_to_net();
        let window = self.advertise_window(ack, end > self.outbound.una());
        let mut flags = tcp.flags.without(TcpFlags::ECE);
        if self.receiver.ece() {
            flags = flags.union(TcpFlags::ECE);
        }
        let mut edit = TcpEdit::new(frame, ip, tcp, partial);
        if tcp.flags.contains(TcpFlags::ACK) {
            edit.set_ack(Seq::wrap(ack));
            edit.set_window(window);
        }
        edit.set_flags(flags);
        edit.nop_out_sack();
        if tcp.options.timestamps.is_some() {
            let shown = self.timestamps.to_net();
            edit.set_timestamps(shown.tsval, shown.tsecr);
        }
        self.receiver.acks.on_sent(ack);
    }

    /// EMIT-R for a pure ACK that H makes, with SACK blocks (SNOOP-10) behind `dsack` (SNOOP-11).
    /// While G's clock is outdated there is none: G's next segment brings a new one.
    #[inline(never)]
    pub(super) fn ack_now(&mut self, cx: &mut FlowContext<'_, '_>, dsack: Option<(u64, u64)>) {
        if self.options.timestamps && self.timestamps.is_guest_outdated(cx.now) {
            return;
        }
        let seq = self.outbound.pure_ack_seq(self.options.shift_r);
        if dsack.is_none() && self.receiver.out_of_order().is_empty() {
            self.emit_plain_ack(cx, seq);
        } else {
            self.emit_to_net(cx, seq, TcpFlags::ACK, dsack);
        }
        cx.vm.counters.acks_made += 1;
        self.note_ack_left(cx);
    }

    /// An RST for R: G has reset the connection, or will not get bytes that were acknowledged. An R
    /// that has taken back its window takes none from beyond (K-06).
    pub(super) fn reset_to_net(&mut self, cx: &mut FlowContext<'_, '_>) {
        let seq = self.outbound.reset_seq(self.options.shift_r);
        self.emit_reset(cx, seq);
        if self.receiver.is_asking() || self.losses.past() > 0 {
            // R may have more of G than H has seen, and takes no RST from before. An ACK from there
            // it answers, and its answer gets an exact RST (INV-21).
            let probe = self.outbound.una() - 1;
            self.emit_to_net(cx, probe, TcpFlags::ACK, None);
        }
    }

    /// EMIT-R for an RST. While the rings of G are stopped, or about to stop because G moves, G may
    /// already run on another host, and the network would look for it here if a frame had its MAC
    /// (LIFE-07).
    pub(super) fn emit_reset(&mut self, cx: &mut FlowContext<'_, '_>, seq: u64) {
        self.emit_to_net(cx, seq, RST_ACK, None);
        if (cx.features.is_none() || cx.vm.presence == Presence::Moved)
            && let Some(mac) = cx.vm.host_mac
        {
            cx.out.set_last_source(mac);
        }
    }

    /// EMIT-R for any header-only segment. An RST carries ACK but no window to speak of.
    #[inline(never)]
    pub(super) fn emit_to_net(
        &mut self,
        cx: &mut FlowContext<'_, '_>,
        seq: u64,
        flags: TcpFlags,
        dsack: Option<(u64, u64)>,
    ) {
        let mut sack = [(Seq(0), Seq(0)); 4];
        let rst = flags.contains(TcpFlags::RST);
        let sack_len = if rst { 0 } else { self.sack_blocks(dsack, &mut sack) };
        let is_read = seq >= self.outbound.una();
        self.emit_bare_to_net(cx, seq, flags, &sack[..sack_len], is_read);
    }

    /// [`Self::emit_to_net`] for an ACK without blocks, in a straight line.
    #[inline(always)]
    fn emit_plain_ack(&mut self, cx: &mut FlowContext<'_, '_>, seq: u64) {
        self.emit_bare_to_net(cx, seq, TcpFlags::ACK, &[], true);
    }

    #[inline(always)]
    fn emit_bare_to_net(
        &mut self,
        cx: &mut FlowContext<'_, '_>,
        seq: u64,
        flags: TcpFlags,
        sack: &[(Seq, Seq)],
        is_read: bool,
    ) {
        let made = cx.out.push();
        made.origin = PortId(cx.key.port);
        let header = self.header_to_net(cx.key, seq, flags, sack, is_read);
        made.len = header.emit(&mut made.bytes, 0, CsumMode::Full(&[]));
    }

    /// EMIT-R for bytes that H sends for G: writes the header to `buf`. Returns its length, and the
    /// virtio header for the next hop.
    pub(super) fn emit_data_to_net(
        &mut self,
        cx: &FlowContext<'_, '_>,
        buf: &mut [u8; TcpEmit::MAX_LEN],
        d: &DataToNet,
    ) -> (usize, VirtioNetHdr) {
        let capable = self.options.ecn && !d.again && d.len > 0;
        // Of a copy or probe R may have all, and then it does not look at the window.
        let mut header = self.header_to_net(cx.key, d.seq, d.flags, &[], !d.again);
        if capable {
            header.tos |= ECT0; // RFC 3168 section 6.1.5: copies and probes are not
        }
        let len = header.emit(buf, d.len, CsumMode::Partial);
        (len, header.partial_hdr(len, d.len, d.mss))
    }

    /// EMIT-R for any segment that H makes: the present acknowledgement and window for R, and the
    /// newest TSval that G showed (FLOOD-35, FLOOD-41).
    #[inline(always)]
    fn header_to_net<'a>(
        &'a mut self,
        key: &FlowKey,
        seq: u64,
        flags: TcpFlags,
        sack: &'a [(Seq, Seq)],
        is_read: bool,
    ) -> TcpEmit<'a> {
        let rst = flags.contains(TcpFlags::RST);
        let ack = self.ack_to_net();
        let window = if rst { 0 } else { self.advertise_window(ack, is_read) };
        let ece = if self.receiver.ece() && !rst { TcpFlags::ECE } else { TcpFlags(0) };
        self.receiver.acks.on_sent(ack);
        TcpEmit {
            l2: self.template.l2_to_net(),
            version: key.version,
            src: key.g_addr,
            dst: key.r_addr,
            // A pure ACK is Not-ECT (RFC 3168 section 6.1.4).
            tos: self.template.tos_to_net() & !ECN_MASK,
            ttl: self.template.ttl_to_net(),
            flow_label: self.template.label_to_net(),
            src_port: key.g_port,
            dst_port: key.r_port,
            seq: Seq::wrap(seq),
            ack: Seq::wrap(ack),
            flags: flags.union(ece),
            window,
            timestamps: self.options.timestamps.then_some(self.timestamps.to_net()),
            sack,
            ip_id: 0,
        }
    }

    /// The window field for R. `is_read`: R does not have all of the segment. Otherwise R answers
    /// without looking at the window (RFC 9293 section 3.10.7.4), so a window that has opened is
    /// not shown by it.
    #[inline(always)]
    fn advertise_window(&mut self, ack: u64, is_read: bool) -> u16 {
        let terms = self.terms_for(ack);
        self.receiver.advertise_window(&Terms { on: terms.on && is_read, ..terms })
    }

    #[inline]
    fn sack_blocks(&mut self, dsack: Option<(u64, u64)>, out: &mut [(Seq, Seq); 4]) -> usize {
        let held = self.receiver.out_of_order();
        if !self.options.sack || (dsack.is_none() && held.is_empty()) {
            return 0;
        }
        if self.withholds() || self.awaits_copies() {
            return 0;
        }
        let room = if self.options.timestamps { 3 } else { 4 };
        let blocks = dsack.into_iter().chain(held.newest_first()).take(room);
        let mut n = 0;
        for (slot, (from, to)) in out.iter_mut().zip(blocks) {
            *slot = (Seq::wrap(from), Seq::wrap(to));
            n += 1;
        }
        if self.receiver.is_late() {
            held.newest_first().take(n).for_each(|(from, end)| self.losses.note_sacked(from, end));
        }
        n
    }

    /// EMIT-G for a segment of R that goes on by itself: a pure ACK or keepalive (COM-30), or one
    /// that H does not take over (SNOOP-13). Edited in place.
    pub(super) fn gate_to_guest(&mut self, f: &mut Frame<'_>, seq: u64) {
        let (ip, tcp) = (f.ip, f.tcp);
        let mut edit = TcpEdit::new(f.bytes, ip, tcp, f.hdr.needs_csum());
        let (ack, window) = self.shown_to_guest();
        edit.set_seq(Seq::wrap(seq));
        edit.set_ack(Seq::wrap(ack));
        // With a new sequence number, G would believe an old window (K-05).
        edit.set_window(window);
        if let Some(ts) = tcp.options.timestamps {
            self.timestamps.on_tsval_from_net(ts.tsval);
            edit.set_timestamps(self.timestamps.to_guest().tsval, ts.tsecr);
        }
        if self.options.ecn && ip.tos & ECN_MASK == CE && tcp.payload_len > 0 {
            edit.set_ecn(ECT0); // H echoes it; of a mark without data it says nothing to R
        }
        if self.losses.relayed().is_some() {
            // Blocks and marks answer segments of H, even if H only sent them twice (FLOOD-09).
            edit.nop_out_sack();
            edit.set_flags(tcp.flags.without(TcpFlags::ECE));
        } else if self.outbound.is_old_ack(tcp) {
            edit.nop_out_sack(); // below the newer ACK these blocks would be DSACKs
        } else if let Some(sack) = self.losses.of_net_mut().filter(|_| !tcp.options.sack.is_empty())
        {
            sack.on_shown(); // it carries them itself
        }
        self.outbound.on_ack_shown(self.sack_to_guest_due());
    }

    /// ACK number and window field for G: R's own, unless H sends for G (FLOOD-12, FLOOD-14).
    #[inline(always)]
    fn shown_to_guest(&mut self) -> (u64, u16) {
        match self.losses.relayed_mut() {
            None => self.shown_to_guest_by_net(),
            Some(relayed) => relayed.shown_to_guest(self.options.shift_r),
        }
    }

    /// SACK blocks of R, or H's own for missing bytes, wait for a pure ACK to G.
    pub(super) fn sack_to_guest_due(&self) -> bool {
        self.losses.of_net().is_some_and(RemoteSack::is_due)
            || self.losses.relayed().is_some_and(Relayed::owes_duplicate)
    }

    /// The SACK blocks of R for a segment to G: all that are new, on a pure ACK.
    fn sack_to_guest(&mut self, pure_ack: bool) -> SackBlocks {
        let room = if self.options.sack { 4 - usize::from(self.options.timestamps) } else { 0 };
        if let Some(relayed) = self.losses.relayed_mut().filter(|f| pure_ack && f.owes_duplicate())
        {
            let blocks = relayed.duplicate(room);
            self.outbound.note_ack_to_guest(relayed.owes_duplicate());
            return blocks;
        }
        match self.losses.of_net_mut() {
            Some(sack) if pure_ack && sack.is_due() => {
                sack.on_shown();
                sack.blocks()
            }
            _ => SackBlocks::default(),
        }
    }

    /// EMIT-G for an ACK of R that is for G to judge: only its sequence number and TSval, which G
    /// looks at first, are ours.
    pub(super) fn gate_unseen_to_guest(&mut self, f: &mut Frame<'_>) {
        let seq = self.sender.pure_ack_seq(self.receiver.passed());
        let mut edit = TcpEdit::new(f.bytes, f.ip, f.tcp, f.hdr.needs_csum());
        edit.set_seq(Seq::wrap(seq));
        if let Some(ts) = f.tcp.options.timestamps {
            edit.set_timestamps(self.timestamps.to_guest().tsval, ts.tsecr);
        }
    }

    /// EMIT-G for a segment H makes: the header for `payload_len` bytes from `seq` on.
    /// Returns its length in `buf`.
    pub(super) fn emit_to_guest(
        &mut self,
        cx: &FlowContext<'_, '_>,
        buf: &mut [u8; TcpEmit::MAX_LEN],
        seq: u64,
        flags: TcpFlags,
        payload_len: usize,
        csum: CsumMode<'_>,
    ) -> usize {
        let l2 = self.template.l2_to_guest();
        let tos = self.template.tos_to_guest();
        let ecn = match tos & ECN_MASK {
            CE if self.options.ecn => ECT0,
            other => other,
        };
        self.outbound.on_ack_shown(false);
        let mut timestamps = self.options.timestamps.then_some(self.timestamps.to_guest());
        let (ack, window, sack) = if self.losses.any() {
            let pure = flags == TcpFlags::ACK && payload_len == 0;
            let (ack, window) = self.shown_to_guest();
            let (ack, sack) = (Seq::wrap(ack), self.sack_to_guest(pure));
            match self.losses.translated() {
                Some(it) => it.numbers.of_made(flags, ack, window, sack, &mut timestamps),
                None => (ack, window, sack),
            }
        } else {
            // Nearly always.
            (Seq::wrap(self.outbound.una()), self.outbound.window(), SackBlocks::default())
        };
        let echo = self.outbound.ece_to_guest() && !flags.contains(TcpFlags::RST);
        let flags = if echo { flags.union(TcpFlags::ECE) } else { flags };
        let (src, dst) = (cx.key.r_addr, cx.key.g_addr);
        TcpEmit {
            l2: &l2[..usize::from(self.template.l2_len())],
            version: cx.key.version,
            src,
            dst,
            tos: tos & !ECN_MASK | ecn,
            ttl: self.template.ttl_to_guest(),
            flow_label: self.template.label_to_guest(),
            src_port: cx.key.r_port,
            dst_port: cx.key.g_port,
            seq: Seq::wrap(seq),
            ack,
            flags,
            window,
            timestamps,
            sack: sack.as_slice(),
            ip_id: 0,
        }
        .emit(buf, payload_len, csum)
    }
}
