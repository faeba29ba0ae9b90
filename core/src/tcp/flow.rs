//! One tracked TCP connection: its variables, its state, and the orders that always hold.
//!
//! R is the remote, H is this host, G is the guest; `docs/spec.md` has a drawing of the variables
//! and one of the states. All sequence numbers are unwrapped to 64 bits (COM-01) and start above
//! 2^32, so that subtraction of a window can never underflow.

use crate::flow::table::Class;
use crate::limits::L2_MAX;
use crate::store::arena::RecordId;
use crate::store::flow_store::FlowStore;
use crate::store::ranges::Ranges;
use crate::tcp::handshake::{Offers, SynInfo};
use crate::tcp::state::Standing;
pub use crate::tcp::state::{State, Why};
use crate::tcp::timers::Timers;
use crate::time::Instant;
use crate::wire::packet::{Ip, SackBlocks};
use crate::wire::seq::Seq;

/// "No such sequence number": above anything 64-bit unwrapping can reach.
pub const NONE: u64 = u64::MAX;

/// What the two ends agreed on in the handshake.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Negotiated {
    /// Shift of windows in G to R packets; H writes its own windows to R with it (COM-20).
    pub shift_g: u8,
    /// Shift of windows in R to G packets.
    pub shift_r: u8,
    /// Every non-RST segment carries timestamps (COM-21).
    pub timestamps: bool,
    /// Both sent SACK-Permitted (COM-22).
    pub sack: bool,
    /// Classic ECN (RFC 3168; COM-23).
    pub ecn: bool,
    /// Largest segment payload G takes, timestamps already subtracted.
    pub mss_to_guest: u16,
    /// Largest segment payload R takes, for the record.
    pub mss_to_net: u16,
}

/// What H's frames look like below TCP, copied from the newest frames seen (COM-10).
///
/// There is one L2 header, G's: frames to G carry it turned round. G does not look at the source
/// MAC of what it gets, and the VLAN tags are the flow's.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Template {
    l2: [u8; L2_MAX],
    l2_len: u8,
    /// TTL or hop limit of frames to R (RFC 5082 peers insist on 255).
    pub ttl_to_net: u8,
    /// TTL or hop limit of frames to G.
    pub ttl_to_guest: u8,
    /// DSCP and ECN bits of frames to R.
    pub tos_to_net: u8,
    /// DSCP and ECN bits of frames to G.
    pub tos_to_guest: u8,
    /// IPv6 flow label of frames to R: 20 bits, big-endian.
    label_to_net: [u8; 3],
    /// IPv6 flow label of frames to G.
    label_to_guest: [u8; 3],
}

impl Template {
    /// Takes over the lower layers of a frame of G; `l2` is everything before the IP header.
    pub fn learn_from_guest(&mut self, l2: &[u8], ip: &Ip) {
        self.set_l2(l2);
        self.ttl_to_net = ip.ttl;
        self.tos_to_net = ip.tos;
        self.label_to_net = label(ip.flow_label);
    }

    /// Takes over the network layer of a frame of R.
    pub fn learn_from_net(&mut self, ip: &Ip) {
        self.ttl_to_guest = ip.ttl;
        self.tos_to_guest = ip.tos;
        self.label_to_guest = label(ip.flow_label);
    }

    /// The L2 header of frames to R, tags and EtherType included.
    #[must_use]
    pub fn l2_to_net(&self) -> &[u8] {
        &self.l2[..usize::from(self.l2_len)]
    }

    /// The L2 header of frames to G, in a buffer of which the first [`Self::l2_len`] bytes count.
    #[must_use]
    pub fn l2_to_guest(&self) -> [u8; L2_MAX] {
        let mut l2 = self.l2;
        l2[..12].rotate_left(6);
        l2
    }

    /// IPv6 flow label of frames to R.
    #[must_use]
    pub fn label_to_net(&self) -> u32 {
        let [a, b, c] = self.label_to_net;
        u32::from_be_bytes([0, a, b, c])
    }

    /// IPv6 flow label of frames to G.
    #[must_use]
    pub fn label_to_guest(&self) -> u32 {
        let [a, b, c] = self.label_to_guest;
        u32::from_be_bytes([0, a, b, c])
    }

    /// Bytes of the L2 header: at most 22.
    #[must_use]
    pub fn l2_len(&self) -> u16 {
        self.l2_len.into()
    }

    /// A template for a flow rebuilt from its record: H's own frames need no more.
    #[must_use]
    pub fn from_record(l2: &[u8], ttl_to_net: u8, ttl_to_guest: u8) -> Self {
        let mut t = Self { ttl_to_net, ttl_to_guest, ..Self::default() };
        t.set_l2(l2);
        t
    }

    fn set_l2(&mut self, l2: &[u8]) {
        if let (Some(to), Ok(len)) = (self.l2.get_mut(..l2.len()), u8::try_from(l2.len())) {
            to.copy_from_slice(l2);
            self.l2_len = len;
        }
    }
}

fn label(flow_label: u32) -> [u8; 3] {
    let [_, a, b, c] = flow_label.to_be_bytes();
    [a, b, c]
}

/// The R to G half, in which H is the receiver for R and the sender for G.
///
/// Order: `g_una <= g_snd <= g_nxt <= rcv_nxt <= re`, counting a delivered FIN as one.
#[derive(Clone, Copy, Debug)]
pub struct RxHalf {
    /// Next in-order byte expected from R; an ACK of `rcv_nxt` promises every byte below it.
    pub rcv_nxt: u64,
    /// Highest acknowledgement number emitted to R (RFC 7323 Last.ACK.sent).
    pub ack_sent: u64,
    /// Highest right edge ever shown to R; H must take every byte below it.
    pub re: u64,
    /// Highest valid ACK from G; everything below it is G's and has left the store.
    pub g_una: u64,
    /// Next byte to hand to G; falls back to `g_una` after a local timeout.
    pub g_snd: u64,
    /// End of what was handed to G at least once, FIN included.
    pub g_nxt: u64,
    /// Newest right edge G has shown (it may move left; SNOOP-27).
    pub g_re: u64,
    /// Sequence of R's FIN once seen in window, or [`NONE`].
    pub fin_seen: u64,
    /// End of what reached G past the store: urgent data, what came before `On` (SNOOP-24).
    pub passed_max: u64,
    /// Bytes H may hold and promise for this flow at once.
    pub buffer_bytes: u32,
    /// Store pages reserved for that from the VM's budget (INV-06).
    pub reserved_pages: u32,
}

/// The G to R half. Congestion offload is off, so bytes go out as they come (F0).
#[derive(Clone, Copy, Debug)]
pub struct TxHalf {
    /// G's initial sequence number; a SYN of G with another one starts a new connection.
    pub isn: Seq,
    /// Highest acknowledgement from R (and the newest G has been shown).
    pub w_una: u64,
    /// End of what was forwarded to R, FIN included.
    pub w_nxt: u64,
    /// R's newest window field, unscaled as received.
    pub r_window: u16,
    /// Low bits of the sequence of the segment that showed it (RFC 9293 SND.WL1).
    pub r_window_seq: Seq,
    /// Largest window R ever showed, in bytes (SNOOP-03).
    pub r_window_max: u32,
    /// ACKs of R in a row for what H did not see G send (`unseen`).
    pub ahead: u8,
}

/// Timestamp state (RFC 7323; SNOOP-04, SNOOP-05, INV-08, INV-09).
#[derive(Clone, Copy, Debug, Default)]
pub struct TsState {
    /// R's TSval to echo.
    pub recent: u32,
    /// Second at which `recent` was taken; after 24 days PAWS lets go.
    pub recent_at_s: u32,
    /// Highest TSval emitted to R; every one of them came from G.
    pub emit_r: u32,
    /// Highest TSval emitted to G; every one of them came from R.
    pub emit_g: u32,
    /// TSecr that came with R's newest (ack, window).
    pub ecr_to_guest: u32,
}

/// What is being handed to G again. Over, or never begun, while `end <= g_una`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Recovery {
    /// Range that `poll_delivery` sends next; empty if `from >= to`.
    pub from: u64,
    /// End of that range.
    pub to: u64,
    /// Everything below was retransmitted in this recovery.
    pub done: u64,
    /// Recovery ends when G acknowledges this.
    pub end: u64,
}

/// What there is to know while segments are missing, on either half. Most flows need none of it.
#[derive(Clone, Copy, Debug)]
pub struct Losses {
    /// Of bytes that G has not got.
    pub recovery: Recovery,
    /// After a local timeout: bytes that may be under way to G at once, a segment at first and up
    /// to twice as many with each ACK (RFC 6298 section 5.4). Else `u64::MAX`, no limit.
    pub in_flight_max: u64,
    /// The SACK blocks that came with R's newest acknowledgement number, for G as the sender.
    pub sack: SackBlocks,
    /// They have not reached G yet (COM-30).
    pub sack_due: bool,
}

impl Default for Losses {
    fn default() -> Self {
        Self {
            recovery: Recovery::default(),
            in_flight_max: u64::MAX,
            sack: SackBlocks::default(),
            sack_due: false,
        }
    }
}

/// Single-bit facts about a flow.
#[derive(Clone, Copy, Debug, Default)]
pub struct Flags {
    /// G opened the connection.
    pub guest_is_client: bool,
    /// G has sent a non-SYN segment, so it is ESTABLISHED (COM-29).
    pub proven: bool,
    /// CE was seen and R has not answered with CWR (SNOOP-19).
    pub ece: bool,
    /// R's newest segment carried ECE, for G as the sender (INV-24).
    pub ece_to_guest: bool,
    /// An ACK to R is due at the end of the batch.
    pub ack_due: bool,
    /// The newest (ack, window) of R has not reached G yet (COM-30).
    pub ack_to_guest_due: bool,
    /// R's keepalive or SYN was passed to G; its answer triggers H's ACK (SNOOP-17, SNOOP-36).
    pub keepalive: bool,
    /// A valid RST of R waits behind the store (SNOOP-15).
    pub rst_pending: bool,
    /// A window probe to G is due (SNOOP-31).
    pub probe_due: bool,
    /// The flow stands in its port's delivery list.
    pub listed: bool,
    /// The flow stands in the engine's ACK list.
    pub ack_listed: bool,
    /// The store ran into its bound since it was last empty (SNOOP-39).
    pub filled: bool,
    /// G has sent its FIN: the last byte of `w_nxt`.
    pub fin_from_guest: bool,
    /// The flow is counted in its VM's `owing_flows`.
    pub owing: bool,
}

/// Counters shown by `nightporter flow`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counters {
    /// Payload bytes acknowledged to R ahead of G.
    pub early_acked_bytes: u64,
    /// Frames handed to G again.
    pub local_retransmissions: u32,
    /// Pure ACKs of G that went no further.
    pub absorbed_acks: u32,
}

/// One tracked connection; see `limits` for what it weighs.
#[derive(Debug)]
pub struct Flow {
    /// The record in the arena, while `On` or `Drain` (unless parked), or rebuilt.
    pub rec: Option<RecordId>,
    /// Where the connection stands, and why.
    pub(super) standing: Standing,
    /// Agreed options.
    pub opt: Negotiated,
    /// Facts.
    pub flags: Flags,
    /// Quick-ACKs left (SNOOP-07).
    pub quick_acks: u8,
    /// Full segments accepted since the last ACK (SNOOP-07).
    pub unacked_segments: u8,
    /// Duplicate ACKs from G since `g_una` moved.
    pub dup_acks: u8,
    /// R to G half.
    pub rx: RxHalf,
    /// G to R half.
    pub tx: TxHalf,
    /// Timestamps.
    pub ts: TsState,
    /// Bytes held.
    pub store: FlowStore,
    /// Out-of-order ranges above `rcv_nxt`.
    pub ooo: Ranges,
    /// Losses, while there are any.
    pub losses: Option<Box<Losses>>,
    /// Lower layers of the frames H makes.
    pub template: Template,
    /// What it waits for.
    pub(crate) timers: Timers,
    /// Since when (running clock) G has acknowledged nothing although bytes wait (SNOOP-32).
    pub stuck_since: Instant,
    /// Low bits of the millisecond of the last limited (challenge, odd) ACK (COM-31).
    pub limited_ack_ms: u32,
    /// Counters.
    pub counters: Counters,
}

impl Flow {
    /// A flow in `Handshake`, created on G's SYN or SYN-ACK.
    #[must_use]
    pub fn new(now: Instant, syn_r: SynInfo, syn_g: SynInfo) -> Self {
        let r = unwrapped_isn(syn_r.isn) + 1;
        let g = unwrapped_isn(syn_g.isn) + 1;
        Self {
            rec: None,
            standing: Standing::handshake(Offers { r: syn_r, g: syn_g }),
            opt: Negotiated::default(),
            flags: Flags::default(),
            quick_acks: 16,
            unacked_segments: 0,
            dup_acks: 0,
            rx: RxHalf {
                rcv_nxt: r,
                ack_sent: r,
                re: r,
                g_una: r,
                g_snd: r,
                g_nxt: r,
                g_re: r,
                fin_seen: NONE,
                passed_max: r,
                buffer_bytes: 0,
                reserved_pages: 0,
            },
            tx: TxHalf {
                isn: syn_g.isn,
                w_una: g,
                w_nxt: g,
                r_window: 0,
                r_window_seq: Seq(0),
                r_window_max: 0,
                ahead: 0,
            },
            ts: TsState::default(),
            store: FlowStore::default(),
            ooo: Ranges::default(),
            losses: None,
            template: Template::default(),
            timers: Timers::new(now),
            stuck_since: Instant::MAX,
            limited_ack_ms: now.low_millis().wrapping_sub(u32::MAX / 2),
            counters: Counters::default(),
        }
    }

    /// Where the connection stands.
    #[must_use]
    pub fn state(&self) -> State {
        self.standing.state()
    }

    /// What the two ends agreed on.
    #[must_use]
    pub const fn options(&self) -> &Negotiated {
        &self.opt
    }

    /// The bytes held.
    #[must_use]
    pub const fn store(&self) -> &FlowStore {
        &self.store
    }

    /// What came out of order and is held.
    #[must_use]
    pub const fn out_of_order(&self) -> &Ranges {
        &self.ooo
    }

    /// What says in the arena what the flow has promised; none while it is parked.
    #[must_use]
    pub const fn record(&self) -> Option<RecordId> {
        self.rec
    }

    /// In the path: `On` or `Drain`.
    #[must_use]
    #[inline]
    pub fn is_live(&self) -> bool {
        self.standing.is_live()
    }

    /// What was offered, while `Handshake`.
    pub(crate) fn offers_mut(&mut self) -> Option<&mut Offers> {
        self.standing.offers_mut()
    }

    /// Why it is there, or, while an RST of R waits, will soon not be there.
    #[must_use]
    pub fn why(&self) -> Why {
        if self.flags.rst_pending { Why::Reset } else { self.standing.why() }
    }

    /// While `On` or `Drain`: it gave its record and its reservation back, since it was idle.
    #[must_use]
    pub fn is_parked(&self) -> bool {
        self.rec.is_none()
    }

    /// The acknowledgement number for R: every byte held, and R's FIN once G has it (INV-04).
    #[must_use]
    pub fn ack_to_net(&self) -> u64 {
        if self.fin_acked_by_guest() { self.rx.rcv_nxt + 1 } else { self.rx.rcv_nxt }
    }

    /// R's FIN, once it is next in order.
    #[must_use]
    pub fn fin_r(&self) -> Option<u64> {
        (self.rx.fin_seen == self.rx.rcv_nxt).then_some(self.rx.fin_seen)
    }

    /// G has acknowledged R's FIN.
    #[must_use]
    pub fn fin_acked_by_guest(&self) -> bool {
        self.fin_r().is_some_and(|fin| self.rx.g_una > fin)
    }

    /// R has acknowledged G's FIN.
    #[must_use]
    pub fn fin_acked_by_net(&self) -> bool {
        self.flags.fin_from_guest && self.tx.w_una == self.tx.w_nxt
    }

    /// Newest right edge R has shown.
    #[must_use]
    pub fn edge_of_net(&self) -> u64 {
        self.tx.w_una + (u64::from(self.tx.r_window) << self.opt.shift_r)
    }

    /// End of G's obligation: the stored bytes, and the FIN behind them.
    #[must_use]
    pub fn delivery_end(&self) -> u64 {
        self.rx.rcv_nxt + u64::from(self.fin_r().is_some())
    }

    /// Bytes H has acknowledged to R (or holds for it) that G has not.
    #[must_use]
    pub fn held_bytes(&self) -> u64 {
        self.rx.rcv_nxt.saturating_sub(self.rx.g_una)
    }

    /// H owes nobody any byte, FIN, RST or news: a stop now loses nothing.
    #[must_use]
    pub fn owes_nothing(&self) -> bool {
        if !self.standing.is_live() {
            return !self.standing.is_guest_untold();
        }
        self.held_bytes() == 0
            && self.rx.g_una >= self.delivery_end()
            && self.rx.ack_sent >= self.ack_to_net()
            && !self.flags.rst_pending
            && !self.flags.ack_to_guest_due
    }

    /// What the entry is worth when the table is full.
    pub(crate) fn class(&self) -> Class {
        self.standing.class()
    }

    /// [`Self::class`], if it may have changed since the flow was in state `was`.
    pub(crate) fn class_if_new(&self, was: State) -> Option<Class> {
        (self.state() != was || was == State::Abort).then(|| self.class())
    }

    /// The RX half may be taken out of the path without anyone noticing.
    #[must_use]
    pub fn quiescent(&self) -> bool {
        if !self.standing.is_live() {
            return self.owes_nothing();
        }
        let closed = self.fin_acked_by_guest() && self.fin_acked_by_net();
        self.owes_nothing() && self.ooo.is_empty() && (closed || self.rx.g_re >= self.rx.re)
    }

    /// In the path without more.
    #[cfg(test)]
    pub(crate) fn take_on(&mut self) {
        self.standing.take_on();
    }

    /// The orders that always hold; called after every event in debug builds.
    pub(crate) fn assert_order(&self) {
        let rx = &self.rx;
        if !self.standing.is_live() {
            return;
        }
        debug_assert!(rx.g_una <= rx.g_snd, "g_una {} > g_snd {}", rx.g_una, rx.g_snd);
        debug_assert!(rx.g_snd <= rx.g_nxt, "g_snd {} > g_nxt {}", rx.g_snd, rx.g_nxt);
        debug_assert!(rx.g_nxt <= self.delivery_end(), "delivered beyond what is held");
        debug_assert!(rx.ack_sent <= self.ack_to_net(), "ack_sent beyond what is held (INV-03)");
        debug_assert!(self.tx.w_una <= self.tx.w_nxt, "w_una beyond w_nxt (INV-12)");
        let backed = self.is_parked() || rx.re <= self.reserved_edge();
        debug_assert!(backed, "an edge nothing is reserved for (INV-06)");
        debug_assert!(self.store.held_pages() <= self.rx.reserved_pages, "more held than reserved");
    }
}

/// An initial sequence number in the 64-bit space, well above zero.
#[must_use]
pub fn unwrapped_isn(isn: Seq) -> u64 {
    (1 << 32) | u64::from(isn.0)
}

const _: () = assert!(size_of::<Flow>() <= crate::limits::FLOW_STATE_BYTES);
