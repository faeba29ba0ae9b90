//! H's answer to a SYN of R, the SYN that G gets later, and what G's own answer changes (ACC-02,
//! ACC-05, ACC-13, ACC-14).

use super::isn::Beginning;
use crate::tcp::options::SynInfo;
use crate::time::Instant;
use crate::wire::emit::TcpEmit;
use crate::wire::packet::{Ip, Seq, Tcp, TcpFlags, Timestamps};
use crate::wire::saved::saved;
use crate::wire::syn::SynEmit;
use crate::wire::translate::Translation;

/// ECN of a SYN that offers it, and of a SYN-ACK that accepts it (RFC 3168 section 6.1.1).
const ECN_OFFERED: TcpFlags = TcpFlags::ECE.union(TcpFlags::CWR);
const ECN_BITS: u8 = SynInfo::ECE | SynInfo::CWR | SynInfo::AE;
/// Bits of an offer that H does not understand well enough to make it for another.
const STRANGE: u8 = SynInfo::HAS_UNKNOWN | SynInfo::HAS_MPTCP | SynInfo::AMBIGUOUS;

/// The fields of an IP header that H copies from an end's own frame.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Lower {
    ttl: u8,
    tos: u8,
    flow_label: u32,
}

saved!(Lower { ttl, tos, flow_label });

impl Lower {
    /// TTL or hop limit.
    #[must_use]
    pub const fn ttl(&self) -> u8 {
        self.ttl
    }

    /// DSCP, and no ECN.
    #[must_use]
    pub const fn tos(&self) -> u8 {
        self.tos
    }

    /// IPv6 flow label, 20 bits.
    #[must_use]
    pub const fn flow_label(&self) -> u32 {
        self.flow_label
    }

    /// Of the frame that `ip` was read from. A segment that opens is not ECN-capable (RFC 3168
    /// section 6.1.1).
    #[must_use]
    pub const fn of(ip: &Ip) -> Self {
        Self { ttl: ip.ttl, tos: ip.tos & !0b11, flow_label: ip.flow_label }
    }
}

/// A SYN-ACK of G: what a server offers.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Offered {
    /// Its numbers and options.
    pub syn_ack: SynInfo,
    /// Its window, which is never scaled.
    pub window: u16,
    /// Its IP header.
    pub lower: Lower,
}

impl Offered {
    /// Of an option that the SYN has not `asked` for it says nothing, and the offer `before` does;
    /// nor does an answer to more than H grants say what G would do without.
    #[must_use]
    pub fn without_unasked(mut self, asked: &SynInfo, before: &Self) -> Self {
        let (syn_ack, before) = (&mut self.syn_ack, &before.syn_ack);
        let keep = |of: u8, it: u8| if asked.bits & of == of { 0 } else { it };
        let ts = keep(SynInfo::HAS_TIMESTAMPS, SynInfo::HAS_TIMESTAMPS);
        let kept = ts
            | keep(SynInfo::HAS_SACK, SynInfo::HAS_SACK)
            | keep(SynInfo::ECE | SynInfo::CWR, ECN_BITS)
            | (asked.bits & (SynInfo::HAS_UNKNOWN | SynInfo::HAS_MPTCP));
        syn_ack.bits = syn_ack.bits & !kept | before.bits & kept;
        if ts != 0 {
            syn_ack.tsval = before.tsval;
        }
        if asked.window_scale == SynInfo::NO_SCALE {
            syn_ack.window_scale = before.window_scale;
        }
        self
    }
}

/// R's offers, and H's answer.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Grant {
    /// R's offers but for those that it was not granted. So the answer to these can only be less.
    of_net: SynInfo,
    window_of_net: u16,
    lower_of_net: Lower,
    /// R's SYN had an MSS.
    has_mss: bool,
    /// H's SYN-ACK: its numbers, and what of R's offers it grants.
    shown: SynInfo,
    window_shown: u16,
    lower_shown: Lower,
}

saved!(Grant { of_net, window_of_net, lower_of_net, has_mss, shown, window_shown, lower_shown });

/// The connection as G has accepted it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Settled {
    /// Between G's numbers and R's.
    pub translation: Translation,
    /// G reads marks of congestion.
    pub ecn: bool,
    /// The payload that fits a segment for G, timestamps not yet subtracted.
    pub mss_to_guest: u16,
}

/// Why a SYN-ACK of G ends the connection for both.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Unfit {
    /// R was granted timestamps, and G's segments have none: they cannot grow (COM-15).
    NoTimestamps,
    /// It shows a clock of 0, as some do although their clock stands elsewhere (INV-08): R could
    /// take the next one for old (ACC-12).
    NoClock,
    /// It offers what the SYN did not: it answers another one.
    More,
}

impl Grant {
    /// H's answer to the SYN that `ip` and `tcp` were read from: what the `server` offered last, as
    /// far as R's SYN allows. `None`: it is for G to answer.
    #[must_use]
    pub fn of(
        now: Instant,
        ip: &Ip,
        tcp: &Tcp,
        server: &Offered,
        beginning: Beginning,
    ) -> Option<Self> {
        let is_strange = server.syn_ack.bits & STRANGE != 0 || hides_clock(&server.syn_ack);
        if !may_be_answered(ip, tcp) || is_strange {
            return None;
        }
        let (mut of_net, last) = (SynInfo::learn(now, tcp, ip.version), server.syn_ack);
        let mut bits = of_net.bits & last.bits & (SynInfo::HAS_TIMESTAMPS | SynInfo::HAS_SACK);
        let ecn = tcp.flags.contains(ECN_OFFERED) && last.bits & ECN_BITS == SynInfo::ECE;
        of_net.bits = bits | if ecn { SynInfo::ECE | SynInfo::CWR } else { 0 };
        bits |= if ecn { SynInfo::ECE } else { 0 };
        let mut window_scale = last.window_scale;
        if [of_net.window_scale, window_scale].contains(&SynInfo::NO_SCALE) {
            (of_net.window_scale, window_scale) = (SynInfo::NO_SCALE, SynInfo::NO_SCALE);
        }
        let shown = SynInfo {
            isn: beginning.isn,
            tsval: if bits & SynInfo::HAS_TIMESTAMPS != 0 { beginning.clock } else { 0 },
            window_scale,
            bits,
            data_len: 0,
            ..last
        };
        Some(Self {
            of_net,
            window_of_net: tcp.window,
            lower_of_net: Lower::of(ip),
            has_mss: tcp.options.mss.is_some(),
            shown,
            window_shown: server.window,
            lower_shown: server.lower,
        })
    }

    /// The grant that a cookie has brought back with a segment of R, from which `ip` and `tcp` were
    /// read. The window of its SYN is forgotten; this segment's is newer.
    pub(super) fn remembered(
        ip: &Ip,
        tcp: &Tcp,
        of_net: SynInfo,
        shown: SynInfo,
        server: &Offered,
    ) -> Self {
        let scale = of_net.window_scale;
        let shift = if scale == SynInfo::NO_SCALE { 0 } else { scale };
        Self {
            of_net,
            window_of_net: u16::try_from(u32::from(tcp.window) << shift).unwrap_or(u16::MAX),
            lower_of_net: Lower::of(ip),
            has_mss: true,
            shown,
            window_shown: server.window,
            lower_shown: server.lower,
        }
    }

    /// Nothing is granted that has to be remembered, but for R's segment size.
    pub(super) const fn without_options(mut self) -> Self {
        (self.of_net.bits, self.shown.bits) = (0, 0);
        (self.of_net.window_scale, self.shown.window_scale) =
            (SynInfo::NO_SCALE, SynInfo::NO_SCALE);
        self
    }

    /// R is sent segments of this size.
    pub(super) const fn with_mss_of_net(mut self, mss: u16) -> Self {
        self.of_net.mss = mss;
        self
    }

    /// The same with these numbers.
    pub(super) const fn numbered(mut self, beginning: Beginning) -> Self {
        (self.shown.isn, self.shown.tsval) = (beginning.isn, beginning.clock);
        self
    }

    /// R's offers that were granted.
    #[must_use]
    pub const fn of_net(&self) -> &SynInfo {
        &self.of_net
    }

    /// H's SYN-ACK, as if it were one of G.
    #[must_use]
    pub const fn shown(&self) -> &SynInfo {
        &self.shown
    }

    /// The IP header of H's SYN-ACK, which is that of G's frames.
    #[must_use]
    pub const fn lower_shown(&self) -> Lower {
        self.lower_shown
    }

    /// Every segment that is no RST has timestamps.
    #[must_use]
    pub const fn has_timestamps(&self) -> bool {
        self.shown.bits & SynInfo::HAS_TIMESTAMPS != 0
    }

    /// The window of H's SYN-ACK, in bytes.
    #[must_use]
    pub const fn window_shown(&self) -> u16 {
        self.window_shown
    }

    /// The SYN-ACK for R. `base` has the layer-2 header, the addresses and the ports.
    #[must_use]
    pub fn syn_ack<'a>(&self, base: TcpEmit<'a>) -> SynEmit<'a> {
        let timestamps = Timestamps { tsval: self.shown.tsval, tsecr: self.of_net.tsval };
        let base = TcpEmit {
            ack: self.of_net.isn + 1,
            window: self.window_shown,
            flags: TcpFlags::SYN | TcpFlags::ACK | flags_of(self.shown.bits),
            ..base
        };
        self.emit(&self.shown, self.lower_shown, base, timestamps)
    }

    /// The SYN for G: R's, but for what it was not granted (ACC-14).
    #[must_use]
    pub fn syn<'a>(&self, base: TcpEmit<'a>) -> SynEmit<'a> {
        let timestamps = Timestamps { tsval: self.of_net.tsval, tsecr: 0 };
        let base = TcpEmit {
            ack: Seq(0),
            window: self.window_of_net,
            flags: TcpFlags::SYN | flags_of(self.of_net.bits),
            ..base
        };
        self.emit(&self.of_net, self.lower_of_net, base, timestamps)
    }

    fn emit<'a>(
        &self,
        it: &SynInfo,
        lower: Lower,
        base: TcpEmit<'a>,
        timestamps: Timestamps,
    ) -> SynEmit<'a> {
        let Lower { ttl, tos, flow_label } = lower;
        let has_timestamps = it.bits & SynInfo::HAS_TIMESTAMPS != 0;
        let timestamps = has_timestamps.then_some(timestamps);
        let segment = TcpEmit { ttl, tos, flow_label, seq: it.isn, timestamps, sack: &[], ..base };
        SynEmit {
            segment,
            mss: self.has_mss.then_some(it.mss),
            window_scale: (it.window_scale != SynInfo::NO_SCALE).then_some(it.window_scale),
            sack_permitted: it.bits & SynInfo::HAS_SACK != 0,
        }
    }

    /// G's answer to [`Self::syn`]: less than R was granted is adapted to (ACC-05).
    ///
    /// # Errors
    /// [`Unfit`]: both sides have to be reset.
    pub fn settle(&self, of_guest: &SynInfo) -> Result<Settled, Unfit> {
        let (g, shown) = (of_guest, &self.shown);
        let scales = g.window_scale != SynInfo::NO_SCALE;
        let was_scaled = shown.window_scale != SynInfo::NO_SCALE;
        // Of a SYN-ACK all bits are options that it has, or of ECN.
        if g.bits & !shown.bits != 0 || (scales && !was_scaled) {
            return Err(Unfit::More);
        }
        let lacks = shown.bits & !g.bits;
        if lacks & SynInfo::HAS_TIMESTAMPS != 0 {
            return Err(Unfit::NoTimestamps);
        }
        if hides_clock(g) {
            return Err(Unfit::NoClock);
        }
        let shift = |syn: &SynInfo, there: bool| if there { syn.window_scale } else { 0 };
        let translation = Translation {
            seq: shown.isn - g.isn,
            clock: shown.tsval.wrapping_sub(g.tsval),
            shift_of_guest: shift(g, scales),
            shift_to_net: shift(shown, was_scaled),
            shift_unknown: shift(&self.of_net, was_scaled && !scales),
            hides_sack: lacks & SynInfo::HAS_SACK != 0,
        };
        let ecn = g.bits & SynInfo::ECE != 0;
        Ok(Settled { translation, ecn, mss_to_guest: g.mss })
    }
}

/// ACC-13: nothing is in this SYN that H would have to understand better than G does. The caller
/// has verified the checksum, and knows of no connection under its key.
fn may_be_answered(ip: &Ip, tcp: &Tcp) -> bool {
    let options = &tcp.options;
    [TcpFlags::SYN, TcpFlags::SYN | ECN_OFFERED].contains(&tcp.flags)
        && tcp.payload_len == 0
        && !ip.options
        && options.understood()
        && !options.tfo
}

/// It has timestamps, and its own says nothing of its clock.
const fn hides_clock(syn: &SynInfo) -> bool {
    syn.bits & SynInfo::HAS_TIMESTAMPS != 0 && syn.tsval == 0
}

/// The flags of an offer of ECN, or of its acceptance.
fn flags_of(bits: u8) -> TcpFlags {
    let flag = |bit: u8, flag: TcpFlags| if bits & bit != 0 { flag } else { TcpFlags::NONE };
    flag(SynInfo::ECE, TcpFlags::ECE) | flag(SynInfo::CWR, TcpFlags::CWR)
}

#[cfg(test)]
pub(in crate::tcp) mod tests;
