//! TCP options of a handshake: the offers of each side, and their result (COM-20 to COM-24).
//!
//! A connection with anything that is not understood exactly is PASS for life.

use crate::limits;
use crate::tcp::distance::{Distance, Signs, clock_ms};
use crate::tcp::flow::unwrapped_isn;
use crate::tcp::state::Why;
use crate::time::Instant;
use crate::wire::packet::{IpAddr16, IpVersion, Tcp, TcpFlags};
use crate::wire::saved::saved;
use crate::wire::seq::Seq;

/// The result of the handshake's offers.
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
    /// Where the connection ends, as far as H knows (FWD-01).
    pub distance: Distance,
    /// Largest segment payload G takes, timestamps already subtracted.
    pub mss_to_guest: u16,
    /// Largest segment payload R takes, for the record.
    pub mss_to_net: u16,
}

saved! {
    Negotiated { shift_g, shift_r, timestamps, sack, ecn, distance, mss_to_guest, mss_to_net }
    check |it| it.shift_g <= 14 && it.shift_r <= 14
}

/// The offers of a SYN or SYN-ACK. 16 bytes, as it stands in the SYN cache.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct SynInfo {
    /// Initial sequence number.
    pub isn: Seq,
    /// TSval of the newest copy, if [`Self::HAS_TIMESTAMPS`].
    pub tsval: u32,
    /// Payload bytes on the SYN (TCP Fast Open; COM-26).
    pub data_len: u16,
    /// MSS option, or the default of RFC 9293 section 3.7.1.
    pub mss: u16,
    /// Window scale, at most 14, or [`Self::NO_SCALE`].
    pub window_scale: u8,
    /// `HAS_*` bits and the ECN flags.
    pub bits: u8,
    /// When the first copy passed, in milliseconds (`distance::clock_ms`).
    pub passed_ms: u16,
}

saved! {
    SynInfo { isn, tsval, data_len, mss, window_scale, bits, passed_ms as Millis }
    check |it| it.window_scale <= 14 || it.window_scale == Self::NO_SCALE
}

impl SynInfo {
    /// `window_scale` when the option was absent.
    pub const NO_SCALE: u8 = 255;
    /// Timestamps were offered.
    pub const HAS_TIMESTAMPS: u8 = 1;
    /// SACK-Permitted was offered.
    pub const HAS_SACK: u8 = 2;
    /// An option outside the whitelist, MPTCP not counted.
    pub const HAS_UNKNOWN: u8 = 4;
    /// MPTCP was offered.
    pub const HAS_MPTCP: u8 = 8;
    /// ECE, CWR, AE, in this order.
    pub const ECE: u8 = 16;
    /// See [`Self::ECE`].
    pub const CWR: u8 = 32;
    /// See [`Self::ECE`].
    pub const AE: u8 = 64;
    /// Copies of this SYN disagree (COM-24).
    pub const AMBIGUOUS: u8 = 128;
    const ECN: u8 = Self::ECE | Self::CWR | Self::AE;
    const FORMAT: u8 = Self::HAS_TIMESTAMPS | Self::HAS_SACK | Self::HAS_UNKNOWN | Self::HAS_MPTCP;

    /// The offers of `tcp`, a SYN or SYN-ACK.
    #[must_use]
    pub fn learn(now: Instant, tcp: &Tcp, version: IpVersion) -> Self {
        let o = &tcp.options;
        let mut bits = 0;
        let mut set = |on: bool, bit: u8| bits |= if on { bit } else { 0 };
        set(o.timestamps.is_some(), Self::HAS_TIMESTAMPS);
        set(o.sack_permitted, Self::HAS_SACK);
        set(o.mptcp, Self::HAS_MPTCP);
        set(o.unknown || o.malformed, Self::HAS_UNKNOWN);
        set(tcp.flags.contains(TcpFlags::ECE), Self::ECE);
        set(tcp.flags.contains(TcpFlags::CWR), Self::CWR);
        set(tcp.flags.contains(TcpFlags::AE), Self::AE);
        let default_mss = if version == IpVersion::V4 { 536 } else { 1220 };
        Self {
            isn: tcp.seq,
            tsval: o.timestamps.map_or(0, |ts| ts.tsval),
            data_len: u16::try_from(tcp.payload_len).unwrap_or(u16::MAX),
            mss: o.mss.unwrap_or(default_mss),
            // RFC 7323 section 2.3: larger is 14. It must not be mistaken for none.
            window_scale: o.window_scale.map_or(Self::NO_SCALE, |shift| shift.min(14)),
            bits,
            passed_ms: clock_ms(now),
        }
    }

    /// Merges an earlier copy of the same SYN: what matters must agree (COM-24). ECN may be dropped
    /// on retransmission; then only a SYN-ACK without ECE is unambiguous, which [`negotiate`] sees
    /// by the surviving ECN bits of the *newer* copy.
    #[must_use]
    pub fn after(self, earlier: Self) -> Self {
        if earlier.isn != self.isn {
            return self;
        }
        let same = earlier.window_scale == self.window_scale
            && earlier.bits & Self::FORMAT == self.bits & Self::FORMAT
            && earlier.bits & Self::AMBIGUOUS == 0;
        let mut merged = self;
        if !same {
            merged.bits |= Self::AMBIGUOUS;
        }
        if earlier.bits & Self::ECN != self.bits & Self::ECN {
            merged.bits &= !Self::ECN;
            merged.bits |= Self::CWR; // an impossible offer: any ECE in the SYN-ACK is ambiguous
        }
        merged.data_len = self.data_len.max(earlier.data_len);
        merged.passed_ms = earlier.passed_ms;
        merged
    }

    /// Whether this SYN-ACK has an option that only an answer to the same one has, and `syn` has
    /// not.
    fn answers_more_than(&self, syn: Self) -> bool {
        let unasked = self.bits & !syn.bits & (Self::HAS_TIMESTAMPS | Self::HAS_SACK);
        let scales = self.window_scale != Self::NO_SCALE;
        unasked != 0 || (scales && syn.window_scale == Self::NO_SCALE)
    }

    /// A SYN-ACK that acknowledges `ack` answers this SYN, with all of its data or some.
    pub(crate) fn is_acknowledged_by(&self, ack: Seq) -> bool {
        let first = unwrapped_isn(self.isn) + 1;
        (first..=first + u64::from(self.data_len)).contains(&ack.unwrap(first))
    }

    const fn has(self, bit: u8) -> bool {
        self.bits & bit != 0
    }
}

/// The options that the two offers give, or why the flow must stay PASS.
///
/// `client` is the SYN, `server` the SYN-ACK. The shifts and sizes come out by guest and remote.
pub fn negotiate(client: SynInfo, server: SynInfo) -> Result<(bool, bool, bool), Why> {
    if client.has(SynInfo::AMBIGUOUS) || server.has(SynInfo::AMBIGUOUS) {
        return Err(Why::Ambiguous);
    }
    // SNOOP-21: a SYN may offer MPTCP; only an echo makes it one.
    if client.has(SynInfo::HAS_UNKNOWN) || server.has(SynInfo::HAS_UNKNOWN | SynInfo::HAS_MPTCP) {
        return Err(Why::Options);
    }
    let ecn = match (client.bits & SynInfo::ECN, server.bits & SynInfo::ECN) {
        (_, 0) => false,
        (c, SynInfo::ECE) if c & (SynInfo::ECE | SynInfo::CWR) == SynInfo::ECE | SynInfo::CWR => {
            true
        }
        _ => return Err(Why::Options), // AccECN, a reflected SYN, or ambiguous (COM-23, COM-24)
    };
    let both = |bit| client.has(bit) && server.has(bit);
    Ok((both(SynInfo::HAS_TIMESTAMPS), both(SynInfo::HAS_SACK), ecn))
}

/// The two offers of a handshake. R's is empty until a SYN or SYN-ACK of it was seen.
#[derive(Clone, Copy, Debug, Default)]
pub struct Offers {
    /// R's.
    pub r: SynInfo,
    /// G's.
    pub g: SynInfo,
    /// TTL or hop limit of the frame of G that came first.
    pub ttl_g: u8,
    /// It had another source MAC than G's.
    pub is_of_a_station: bool,
}

saved!(Offers { r, g, ttl_g, is_of_a_station });

impl Offers {
    /// The signs of G in the handshake, which it completes or in which it has answered R; `server`:
    /// if it is that.
    pub(crate) fn signs(&self, now: Instant, server: Option<(IpAddr16, u16)>) -> Signs {
        Signs {
            ttl: self.ttl_g,
            is_of_a_station: self.is_of_a_station,
            answer_ms: self.answer_ms(now, server.is_none()),
            server,
        }
    }

    /// How long G took to answer R's SYN, or R's SYN-ACK now, in milliseconds of wall time. Of
    /// copies the first counts.
    pub(crate) fn answer_ms(&self, now: Instant, guest_is_client: bool) -> u16 {
        let answered_ms = if guest_is_client { clock_ms(now) } else { self.g.passed_ms };
        answered_ms.wrapping_sub(self.r.passed_ms)
    }

    /// The window shifts of G and of R (COM-20).
    pub(crate) fn shifts(&self) -> (u8, u8) {
        let both =
            self.g.window_scale != SynInfo::NO_SCALE && self.r.window_scale != SynInfo::NO_SCALE;
        let shift = |s: u8| if both { s } else { 0 };
        (shift(self.g.window_scale), shift(self.r.window_scale))
    }

    /// Turns two offers into [`Negotiated`] (COM-20 to COM-23). `mtu`: of the guest port, bytes.
    pub(crate) fn negotiate(
        &self,
        guest_is_client: bool,
        version: IpVersion,
        mtu: u16,
    ) -> Result<Negotiated, Why> {
        let (client, server) = if guest_is_client { (self.g, self.r) } else { (self.r, self.g) };
        if !guest_is_client && server.answers_more_than(client) {
            // G answers another copy of R's SYN, which has left the cache (COM-24, LIFE-01).
            return Err(Why::Ambiguous);
        }
        let (timestamps, sack, ecn) = negotiate(client, server)?;
        let (shift_g, shift_r) = self.shifts();
        let ip_tcp: u16 = if version == IpVersion::V4 { 40 } else { 60 };
        let ts_len = if timestamps { 12 } else { 0 };
        let payload = |mss: u16| mss.min(mtu.saturating_sub(ip_tcp)).max(limits::MSS_MIN) - ts_len;
        Ok(Negotiated {
            shift_g,
            shift_r,
            timestamps,
            sack,
            ecn,
            distance: Distance::default(),
            mss_to_guest: payload(self.g.mss),
            mss_to_net: payload(self.r.mss),
        })
    }
}
