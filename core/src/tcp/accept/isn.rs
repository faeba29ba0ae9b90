//! The numbers that H makes up for G (ACC-02): initial sequence numbers by RFC 6528, and the clock
//! that R is shown until G shows its own (ACC-12).

use super::sip;
use crate::flow::key::FlowKey;
use crate::time::Instant;
use crate::wire::seq::Seq;

/// Nanoseconds between two sequence numbers of one connection's name: RFC 6528's M is a clock of
/// four microseconds.
const ISN_TICK_NS: u64 = 4000;
/// Bytes of a connection's name: addresses, VLANs, ports.
pub(super) const NAME_LEN: usize = 16 + 16 + 8 + 2 + 2 + 2;

/// H's own key. It is unpredictable to remotes and to guests, and no other table's.
#[derive(Clone, Copy, Debug)]
pub struct IsnKey(pub [u64; 2]);

/// The number and the clock with which H answers a SYN.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Beginning {
    /// The initial sequence number.
    pub isn: Seq,
    /// The TSval of all segments until G's SYN-ACK. It is never 0, which says nothing of a clock
    /// (INV-08).
    pub clock: u32,
}

impl IsnKey {
    /// For a connection that begins now. A later one of the same name has a later number, as long
    /// as a 32-bit clock of 4 µs tells (4.8 hours), so no old segment fits it (RFC 6528 section 3).
    #[must_use]
    pub fn beginning(&self, now: Instant, key: &FlowKey) -> Beginning {
        let secret = sip::hash(self.0, &name(key));
        let low = |number: u64| Seq::wrap(number).0;
        let ticks = low(now.as_nanos() / ISN_TICK_NS);
        // The clock counts milliseconds, as Linux's does, from anywhere.
        let clock = low(secret >> 32).wrapping_add(low(now.as_millis()));
        Beginning { isn: Seq(low(secret).wrapping_add(ticks)), clock: clock.max(1) }
    }
}

/// All that tells one connection from another at one guest port.
pub(super) fn name(key: &FlowKey) -> [u8; NAME_LEN] {
    let mut name = [0; NAME_LEN];
    let mut rest = &mut name[..];
    let ports = [key.port, key.g_port, key.r_port].map(u16::to_le_bytes);
    let parts = [&key.g_addr.0[..], &key.r_addr.0, &key.vlan.to_le_bytes(), ports.as_flattened()];
    for part in parts {
        let (to, after) = rest.split_at_mut(part.len());
        to.copy_from_slice(part);
        rest = after;
    }
    name
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::time::Duration;
    use crate::wire::packet::{IpAddr16, IpVersion};
    use std::collections::BTreeSet;

    const NOW: Instant = Instant::from_secs(1000);
    const KEY: IsnKey = IsnKey([1, 2]);

    fn flow() -> FlowKey {
        FlowKey {
            g_addr: IpAddr16::from_v4([10, 0, 0, 2]),
            r_addr: IpAddr16::from_v4([10, 0, 0, 1]),
            vlan: 0,
            g_port: 443,
            r_port: 40_000,
            port: 3,
            version: IpVersion::V4,
        }
    }

    #[test]
    fn acc_02_a_number_follows_the_clock_of_four_microseconds() {
        let first = KEY.beginning(NOW, &flow());
        assert_eq!(KEY.beginning(NOW, &flow()), first, "a copy of the SYN gets the same answer");
        let later = KEY.beginning(NOW + Duration::from_millis(1), &flow());
        assert_eq!(later.isn - first.isn, 250);
        assert_eq!(later.clock.wrapping_sub(first.clock), 1);
    }

    #[test]
    fn acc_02_each_part_of_the_name_and_the_key_count() {
        let of = |key: FlowKey| KEY.beginning(NOW, &key);
        let all = [
            of(flow()),
            of(FlowKey { g_addr: IpAddr16::from_v4([10, 0, 0, 3]), ..flow() }),
            of(FlowKey { r_addr: IpAddr16::from_v4([10, 0, 0, 3]), ..flow() }),
            of(FlowKey { vlan: 1, ..flow() }),
            of(FlowKey { g_port: 80, ..flow() }),
            of(FlowKey { r_port: 40_001, ..flow() }),
            of(FlowKey { port: 4, ..flow() }),
            IsnKey([1, 3]).beginning(NOW, &flow()),
            IsnKey([3, 2]).beginning(NOW, &flow()),
        ];
        let isns: BTreeSet<u32> = all.iter().map(|b| b.isn.0).collect();
        let clocks: BTreeSet<u32> = all.iter().map(|b| b.clock).collect();
        assert_eq!((isns.len(), clocks.len()), (all.len(), all.len()));
        // Neighbours are not near each other.
        let gap = |a: Beginning, b: Beginning| a.isn.after(b.isn).unsigned_abs();
        assert!(all[1..].iter().all(|b| gap(*b, all[0]) > 1 << 16));
    }

    #[test]
    fn acc_12_no_clock_is_zero() {
        let secret = KEY.beginning(Instant::ZERO, &flow()).clock;
        let at = Instant::from_millis(u64::from(secret.wrapping_neg()));
        assert_eq!(KEY.beginning(at, &flow()).clock, 1);
    }
}
