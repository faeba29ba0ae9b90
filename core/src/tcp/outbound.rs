//! The outbound pipe, G to R: the bytes that R was sent, and R's answers.
//!
//! Without congestion offload these counters are the whole pipe: bytes leave as they arrive, so the
//! bytes sent to R ([`Outbound::sent`]) are the bytes that G has handed over. With congestion
//! offload the pipe has the parts of the inbound one, a receiver that faces G, a store and a sender
//! that faces R. They are in one box ([`relayed`]), because most flows only receive. G may then be
//! far ahead of `sent`.

pub(crate) mod departures;
mod intake;
pub(crate) mod relayed;

use crate::limits;
use crate::store::record::{FLAG_GUEST_IS_CLIENT, Record};
use crate::wire::packet::{SackBlocks, Tcp, TcpFlags, Timestamps};
use crate::wire::saved::saved;
use crate::wire::seq::Seq;

/// The news in an acknowledgement of R.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct AckUpdate {
    /// It acknowledges more.
    pub(crate) advanced: bool,
    /// G should know of it.
    pub(crate) new: bool,
}

/// A segment of R, as far as it concerns G's bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Said<'a> {
    /// Where it begins.
    pub(crate) seq: u64,
    pub(crate) ack: Seq,
    /// As received.
    pub(crate) window: u16,
    pub(crate) timestamps: Option<Timestamps>,
    pub(crate) sack: &'a SackBlocks,
    pub(crate) ece: bool,
    /// It has neither data nor a FIN.
    pub(crate) bare: bool,
}

/// The state of G's bytes on their way to R.
#[derive(Debug)]
pub(crate) struct Outbound {
    /// Highest acknowledgement from R (and the newest G has been shown).
    una: u64,
    /// End of the bytes sent to R, FIN included.
    sent: u64,
    /// G's initial sequence number; a SYN of G with another one starts a new connection.
    isn: Seq,
    /// Low bits of the sequence of the segment that showed `window` (RFC 9293 SND.WL1).
    window_seq: Seq,
    /// Largest window R ever showed, in bytes (SNOOP-03).
    window_max: u32,
    /// Pure ACKs of G that went no further.
    absorbed_acks: u32,
    /// R's newest window field, unscaled as received.
    window: u16,
    /// ACKs of R in a row for bytes that H did not see G send (`unseen`).
    unseen_acks: u8,
    /// Times that G has repeated its SYN or SYN-ACK: the first window depends on it (FLOOD-19).
    syn_copies: u8,
    /// G opened the connection.
    guest_is_client: bool,
    /// R was sent G's FIN: the last number below `sent`.
    fin_sent: bool,
    /// R's newest segment carried ECE, for G as the sender (INV-24).
    ece_to_guest: bool,
    /// The newest (ack, window) of R has not reached G yet (COM-30).
    ack_to_guest_due: bool,
}

saved!(Outbound {
    una, sent, isn, window_seq, window_max, absorbed_acks, window, unseen_acks, syn_copies,
    guest_is_client, fin_sent, ece_to_guest, ack_to_guest_due,
} check |it| it.unseen_acks <= limits::AHEAD_ACKS);

impl Outbound {
    /// Nothing but G's SYN or SYN-ACK was seen; its stream begins with `first`.
    pub(crate) fn new(isn: Seq, first: u64, guest_is_client: bool) -> Self {
        Self {
            una: first,
            sent: first,
            isn,
            window_seq: Seq(0),
            window_max: 0,
            absorbed_acks: 0,
            window: 0,
            unseen_acks: 0,
            syn_copies: 0,
            guest_is_client,
            fin_sent: false,
            ece_to_guest: false,
            ack_to_guest_due: false,
        }
    }

    /// The state in a predecessor's record: R was sent everything below `sent`.
    pub(crate) fn recovered(sent: u64) -> Self {
        Self::new(Seq(0), sent, false)
    }

    /// The same that goes on. R's newest segment was at most the next one.
    pub(crate) fn resumed(record: &Record, fin_sent: bool) -> Self {
        let is_client = record.flags & FLAG_GUEST_IS_CLIENT != 0;
        let window_max = u32::from(record.net_window) << record.s_r;
        Self {
            una: record.net_una,
            window: record.net_window,
            window_max: window_max.max(u16::MAX.into()),
            window_seq: Seq::wrap(record.guest_una),
            fin_sent,
            ..Self::new(Seq(record.guest_isn), record.net_nxt, is_client)
        }
    }

    /// Highest acknowledgement from R.
    #[inline]
    pub(crate) const fn una(&self) -> u64 {
        self.una
    }

    /// End of the bytes sent to R, FIN included. It is the sequence number of segments that H sends
    /// by itself, and the base for unwrapping G's numbers (COM-01).
    #[inline]
    pub(crate) const fn sent(&self) -> u64 {
        self.sent
    }

    /// R was sent some of G's stream (as far as a wrapped number shows).
    pub(crate) fn has_sent(&self) -> bool {
        Seq::wrap(self.sent) != self.isn + 1
    }

    /// G's initial sequence number.
    pub(crate) const fn isn(&self) -> Seq {
        self.isn
    }

    /// G opened the connection.
    pub(crate) const fn guest_is_client(&self) -> bool {
        self.guest_is_client
    }

    /// R's newest window field, as received and as shown to G.
    #[inline]
    pub(crate) const fn window(&self) -> u16 {
        self.window
    }

    /// Largest window R ever showed, in bytes.
    pub(crate) const fn window_max(&self) -> u32 {
        self.window_max
    }

    /// Pure ACKs of G that went no further.
    pub(crate) const fn absorbed_acks(&self) -> u32 {
        self.absorbed_acks
    }

    /// ACKs of R in a row for bytes that H did not see G send.
    pub(crate) const fn unseen_acks(&self) -> u8 {
        self.unseen_acks
    }

    /// R was sent G's FIN.
    #[inline]
    pub(crate) const fn fin_sent(&self) -> bool {
        self.fin_sent
    }

    /// R has acknowledged G's FIN.
    pub(crate) const fn fin_acked(&self) -> bool {
        self.fin_sent && self.una == self.sent
    }

    /// R's newest segment carried ECE.
    pub(crate) const fn ece_to_guest(&self) -> bool {
        self.ece_to_guest
    }

    /// G has not been shown R's newest (ack, window).
    #[inline]
    pub(crate) const fn ack_to_guest_due(&self) -> bool {
        self.ack_to_guest_due
    }

    /// Newest right edge R has shown.
    pub(crate) fn edge(&self, shift: u8) -> u64 {
        self.una + (u64::from(self.window) << shift)
    }

    /// The sequence number of an ACK of H that R takes (K-01, K-06).
    #[inline]
    pub(crate) fn pure_ack_seq(&self, shift: u8) -> u64 {
        self.sent().min(self.edge(shift)).max(self.una)
    }

    /// The sequence number of an RST that R takes: the same, except that R's edge may be up to a
    /// unit further than its window field can show, because G was told of it in a SYN-ACK without a
    /// unit (FLOOD-37).
    pub(crate) fn reset_seq(&self, shift: u8) -> u64 {
        let within = self.sent() < self.edge(shift) + (1 << shift);
        if within && self.window > 0 { self.sent() } else { self.pure_ack_seq(shift) }
    }

    /// RFC 5961 section 5.2, by the bytes that R was really sent (SNOOP-03, INV-12).
    #[inline]
    pub(crate) fn ack_in_range(&self, ack: Seq) -> bool {
        let ack = ack.unwrap(self.una);
        ack <= self.sent() && ack + u64::from(self.window_max) >= self.una
    }

    /// R's (ack, window) is the one it has shown before.
    #[inline]
    pub(crate) fn is_known(&self, ack: Seq, window: u16) -> bool {
        ack == Seq::wrap(self.una) && window == self.window
    }

    /// A segment repeats what R has shown before: the part of [`Self::on_ack`] that then applies.
    #[inline]
    pub(crate) fn on_known_ack(&mut self, seq: u64) {
        let newer = Seq::wrap(seq).gt(self.window_seq) || self.window == 0;
        if newer {
            self.window_seq = Seq::wrap(seq);
        }
    }

    /// The ACK is older than one that G was shown.
    pub(crate) fn is_old_ack(&self, tcp: &Tcp) -> bool {
        self.is_old(tcp.ack)
    }

    /// The same of its number.
    #[inline]
    pub(crate) fn is_old(&self, ack: Seq) -> bool {
        ack.unwrap(self.una) < self.una
    }

    /// H believes that G sends past it.
    #[inline]
    pub(crate) const fn sends_unseen(&self) -> bool {
        self.unseen_acks == limits::AHEAD_ACKS
    }

    /// A conforming G that got those of these ACKs that were forwarded may have sent this.
    pub(crate) fn is_plausible(&self, tcp: &Tcp) -> bool {
        let ack = tcp.ack.unwrap(self.una);
        let shown = u64::from(self.unseen_acks % limits::AHEAD_ACKS);
        let windows = 1 + limits::AHEAD_WINDOWS * shown;
        let end = self.una + u64::from(self.window_max) * windows;
        tcp.flags.contains(TcpFlags::ACK)
            && !self.fin_sent
            && (self.sent() + 1..=end).contains(&ack)
    }

    /// R's SYN-ACK acknowledges G's SYN up to `ack`; G had sent everything below `sent`. Its window
    /// is not scaled (RFC 7323 section 2.2), but in all that it will be shown with.
    pub(crate) fn on_syn_ack_from_net(&mut self, ack: u64, sent: u64, tcp: &Tcp, shift: u8) {
        self.una = ack;
        self.sent = sent;
        self.window = tcp.window >> shift;
        self.window_max = u32::from(tcp.window);
        self.window_seq = tcp.seq;
    }

    /// R's third ACK acknowledges G's SYN-ACK.
    pub(crate) fn on_third_ack_from_net(&mut self, tcp: &Tcp, shift: u8) {
        self.una = self.sent;
        self.window = tcp.window;
        self.window_max = u32::from(tcp.window) << shift;
        self.window_seq = tcp.seq;
    }

    /// R's (ack, window), by the rule of RFC 9293 section 3.10.7.4. `None`: an old ACK.
    #[inline]
    pub(crate) fn on_ack(
        &mut self,
        seq: u64,
        ack: Seq,
        window: u16,
        shift: u8,
    ) -> Option<AckUpdate> {
        let ack = ack.unwrap(self.una);
        if ack < self.una {
            return None;
        }
        let bytes = u32::from(window) << shift;
        let edge = ack + u64::from(bytes);
        let shown = self.edge(shift);
        let newer_segment = Seq::wrap(seq).gt(self.window_seq);
        let newer = ack > self.una || newer_segment || edge > shown || bytes == 0;
        let advanced = ack > self.una;
        self.una = ack;
        if newer {
            self.window = window;
            // A window that is believed for its size alone, and is that of an older segment, makes
            // none of those in between newer.
            if newer_segment || advanced {
                self.window_seq = Seq::wrap(seq);
            }
            self.window_max = self.window_max.max(bytes);
        }
        Some(AckUpdate { advanced, new: advanced || (newer && edge != shown) })
    }

    /// An acceptable segment of R: takes its congestion marks.
    #[inline]
    pub(crate) fn on_segment_from_net(&mut self, flags: TcpFlags) {
        self.ece_to_guest = flags.contains(TcpFlags::ECE);
    }

    /// R's newest (ack, window) is for G, if `new`.
    pub(crate) fn note_ack_to_guest(&mut self, new: bool) {
        self.ack_to_guest_due |= new;
    }

    /// G was shown R's newest (ack, window); `more`: SACK blocks are still to come.
    pub(crate) fn on_ack_shown(&mut self, more: bool) {
        self.ack_to_guest_due = more;
    }

    /// R is sent everything below `end`, and G's FIN behind it if `fin`.
    pub(crate) fn on_sent(&mut self, end: u64, fin: bool) {
        if fin {
            self.fin_sent = true;
        }
        self.sent = self.sent.max(end + u64::from(fin));
    }

    /// G has sent R everything below `end` past H.
    pub(crate) fn on_past(&mut self, end: u64) {
        self.sent = self.sent.max(end);
    }

    /// G repeats its SYN or SYN-ACK.
    pub(crate) fn on_syn_copy(&mut self) {
        self.syn_copies = self.syn_copies.saturating_add(1);
    }

    /// Times that it has.
    pub(crate) const fn syn_copies(&self) -> u8 {
        self.syn_copies
    }

    /// A pure ACK of G went no further.
    pub(crate) fn on_absorbed(&mut self) {
        self.absorbed_acks += 1;
    }

    /// Counts a plausible ACK above the bytes that H saw. One with data or FIN (not `bare`) counts
    /// only if G was shown one before. `true`: it is believed, and G has sent that far.
    pub(crate) fn on_unseen_ack(&mut self, tcp: &Tcp, bare: bool, fragments: bool) -> bool {
        if !self.is_plausible(tcp) {
            return false;
        }
        let insists = tcp.payload_len > 1 || tcp.flags.contains(TcpFlags::FIN);
        if fragments {
            self.unseen_acks = limits::AHEAD_ACKS;
        } else if bare || insists && self.unseen_acks > 0 {
            self.unseen_acks = limits::AHEAD_ACKS.min(self.unseen_acks + 1);
        }
        if self.sends_unseen() {
            self.sent = tcp.ack.unwrap(self.una);
        }
        self.sends_unseen()
    }

    /// R or G have shown that G sent nothing past H.
    #[inline]
    pub(crate) fn on_seen(&mut self) {
        if !self.sends_unseen() {
            self.unseen_acks = 0;
        }
    }

    /// The flow leaves the path by a reset: G is shown no ACKs any more.
    pub(crate) fn stop(&mut self) {
        self.ack_to_guest_due = false;
    }

    /// The orders that always hold.
    pub(crate) fn assert_order(&self) {
        debug_assert!(self.una <= self.sent, "ACK beyond what was sent (INV-12)");
    }
}

/// The SACK blocks of R's newest acknowledgement number, for G as the sender.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RemoteSack {
    blocks: SackBlocks,
    /// They have not reached G yet (COM-30).
    due: bool,
}

saved!(RemoteSack { blocks, due });

impl RemoteSack {
    /// The newest blocks.
    pub(crate) const fn blocks(&self) -> SackBlocks {
        self.blocks
    }

    /// They wait for a pure ACK to G.
    pub(crate) const fn is_due(&self) -> bool {
        self.due
    }

    /// There is nothing to remember.
    pub(super) fn is_over(&self) -> bool {
        self.blocks.is_empty()
    }

    /// R has sent these.
    pub(crate) fn on_blocks(&mut self, blocks: SackBlocks) {
        self.blocks = blocks;
        self.due = !blocks.is_empty();
    }

    /// G has got them.
    pub(crate) fn on_shown(&mut self) {
        self.due = false;
    }
}
