//! SYN cookies (RFC 4987 section 3.6; ACC-15): answers to SYNs for which there is no place. R's
//! third ACK brings back all that H has to know.
//!
//! The sequence number has R's segment size, the time, and a code over these, the connection's
//! name, R's number and H's clock. The clock, which R echoes, has the other options; without
//! timestamps none are granted.

use super::grant::{Grant, Offered};
use super::isn::{Beginning, NAME_LEN, name};
use super::sip;
use crate::flow::key::FlowKey;
use crate::limits::{COOKIE_PERIOD, COOKIES_TRIED};
use crate::tcp::options::SynInfo;
use crate::time::Instant;
use crate::wire::packet::{Ip, Seq, Tcp};

/// Segment sizes of R that a cookie tells apart: the defaults, then those of tunnels, Ethernet with
/// IPv6 and without, FDDI, jumbo frames. R's is rounded down.
const SIZES: [u16; 8] = [536, 1220, 1300, 1360, 1440, 1460, 4312, 8940];
/// Low bits of the sequence number that are the code; the period and the size are above.
const CODE_BITS: u32 = 27;
/// Bits of the period above them.
const PERIOD_BITS: u32 = 2;
/// Low bits of the clock that are options: two scales, SACK, ECN.
const OPTION_BITS: u32 = 10;
const SACK: u32 = 1 << 8;
const ECN: u32 = 1 << 9;
/// Where a scale was not granted.
const NO_SCALE: u32 = 15;

/// The cookies of one VM.
#[derive(Clone, Copy, Debug)]
pub struct Cookies {
    key: [u64; 2],
    /// The last one was given then.
    given_at: Option<Instant>,
}

impl Cookies {
    /// None was given. `key` must be unpredictable, and no other table's.
    #[must_use]
    pub const fn new(key: [u64; 2]) -> Self {
        Self { key, given_at: None }
    }

    /// The answer to a SYN of which nothing is remembered: [`Grant::of`] with fewer options, and
    /// with numbers that are a cookie.
    #[must_use]
    pub fn give(
        &mut self,
        now: Instant,
        key: &FlowKey,
        ip: &Ip,
        tcp: &Tcp,
        server: &Offered,
    ) -> Option<Grant> {
        let any = Beginning { isn: Seq(0), clock: 1 };
        let mut grant = Grant::of(now, ip, tcp, server, any)?;
        if !grant.has_timestamps() {
            grant = grant.without_options();
        }
        let mss = grant.of_net().mss;
        let size = SIZES.iter().rposition(|&size| size <= mss)?;
        self.given_at = Some(now);
        let clock = if grant.has_timestamps() { self.clock(key, &grant) } else { 0 };
        let isn = self.isn(period(now), key, tcp.seq, clock, size);
        Some(grant.with_mss_of_net(SIZES[size]).numbered(Beginning { isn, clock }))
    }

    /// The grant that a segment of R completes, if it does. `server`: its newest offer.
    #[must_use]
    pub fn take(
        &self,
        now: Instant,
        key: &FlowKey,
        ip: &Ip,
        tcp: &Tcp,
        server: &Offered,
    ) -> Option<Grant> {
        let given_at = self.given_at?;
        let plain = tcp.flags.ack() && !tcp.flags.syn() && !tcp.flags.rst();
        if now.since(given_at) > COOKIES_TRIED || !plain {
            return None;
        }
        let (isn, isn_of_net) = (tcp.ack - 1, tcp.seq - 1);
        let clock = tcp.options.timestamps.map_or(0, |ts| ts.tsecr);
        let size = (isn.0 >> (CODE_BITS + PERIOD_BITS)) as usize;
        let is_of = |then: u64| self.isn(then, key, isn_of_net, clock, size) == isn;
        let current = period(now);
        if !is_of(current) && !current.checked_sub(1).is_some_and(is_of) {
            return None;
        }
        let has_clock = tcp.options.timestamps.is_some();
        let has = |bit: u32| has_clock && clock & bit != 0;
        let scale = |at: u32| match (clock >> at) & 0xf {
            NO_SCALE => SynInfo::NO_SCALE,
            _ if !has_clock => SynInfo::NO_SCALE,
            scale => scale.to_le_bytes()[0],
        };
        let flag = |on: bool, bits: u8| if on { bits } else { 0 };
        let options = flag(has_clock, SynInfo::HAS_TIMESTAMPS) | flag(has(SACK), SynInfo::HAS_SACK);
        let of_net = SynInfo {
            isn: isn_of_net,
            tsval: tcp.options.timestamps.map_or(0, |ts| ts.tsval),
            mss: SIZES[size],
            window_scale: scale(0),
            bits: options | flag(has(ECN), SynInfo::ECE | SynInfo::CWR),
            ..SynInfo::default()
        };
        let shown = SynInfo {
            isn,
            tsval: clock,
            window_scale: scale(4),
            bits: options | flag(has(ECN), SynInfo::ECE),
            ..server.syn_ack
        };
        Some(Grant::remembered(ip, tcp, of_net, shown, server))
    }

    /// R's number is in the code, so that nobody can choose another.
    fn isn(&self, period: u64, key: &FlowKey, of_net: Seq, clock: u32, size: usize) -> Seq {
        let [place, ..] = (size << PERIOD_BITS).to_le_bytes();
        let [low, ..] = period.to_le_bytes();
        let place = place | (low & 3);
        let mut bytes = [0; NAME_LEN + 17];
        let parts = [
            &name(key)[..],
            &of_net.0.to_le_bytes(),
            &clock.to_le_bytes(),
            &period.to_le_bytes(),
            &[place],
        ];
        let mut rest = bytes.iter_mut();
        parts.into_iter().flatten().zip(&mut rest).for_each(|(from, to)| *to = *from);
        let code = Seq::wrap(sip::hash(self.key, &bytes)).0 >> (32 - CODE_BITS);
        Seq(u32::from(place) << CODE_BITS | code)
    }

    /// The options, below bits that tell nothing. It is never 0.
    fn clock(&self, key: &FlowKey, grant: &Grant) -> u32 {
        let (of_net, shown) = (grant.of_net(), grant.shown());
        let scale = |scale: u8| if scale == SynInfo::NO_SCALE { NO_SCALE } else { scale.into() };
        let flag = |bit: u8, flag: u32| if shown.bits & bit != 0 { flag } else { 0 };
        let options = scale(of_net.window_scale)
            | scale(shown.window_scale) << 4
            | flag(SynInfo::HAS_SACK, SACK)
            | flag(SynInfo::ECE, ECN);
        let rest = Seq::wrap(sip::hash(self.key, &name(key))).0 >> OPTION_BITS;
        rest.max(1) << OPTION_BITS | options
    }
}

/// The number of the time in which a cookie was given.
fn period(now: Instant) -> u64 {
    now.as_nanos() / COOKIE_PERIOD.as_nanos()
}

#[cfg(test)]
mod tests;
