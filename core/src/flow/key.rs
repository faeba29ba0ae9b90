//! The key of a flow: two segments with the same key are of the same flow.

use core::fmt;
use core::hash::{Hash, Hasher};

use crate::wire::glance::Glance;
use crate::wire::packet::{Eth, Ip, IpAddr16, IpVersion, Tcp};
use crate::wire::saved::saved;

/// The identity of a flow, seen from its guest port.
///
/// The port is part of the key: between two VMs on one host the same addresses and ports are two
/// flows, one per guest.
#[derive(Clone, Copy, Eq)]
pub struct FlowKey {
    /// The guest's address.
    pub g_addr: IpAddr16,
    /// The remote's address.
    pub r_addr: IpAddr16,
    /// The VLANs, as `VlanStack::key` has them: without priority bits, which may differ by
    /// direction (COM-10).
    pub vlan: u64,
    /// The guest's TCP port.
    pub g_port: u16,
    /// The remote's TCP port.
    pub r_port: u16,
    /// The guest's switch port (`PortId.0`).
    pub port: u16,
    /// The family of both addresses.
    pub version: IpVersion,
}

saved! {
    FlowKey { g_addr, r_addr, vlan as Bits, g_port, r_port, version }
    reset {
        port = 0, // numbers of ports are each engine's own
    }
    check |it| it.version == IpVersion::V6 || [it.g_addr, it.r_addr].iter().all(is_mapped)
}

/// An IPv4 address, as [`IpAddr16`] has it.
fn is_mapped(ip: &IpAddr16) -> bool {
    ip.0[..12] == IpAddr16::from_v4([0; 4]).0[..12]
}

impl PartialEq for FlowKey {
    #[inline(always)] // every look-up asks, and the derived one is a call
    fn eq(&self, other: &Self) -> bool {
        let Self { g_addr, r_addr, vlan, g_port, r_port, port, version } = *other;
        let number = |addr: IpAddr16| u128::from_ne_bytes(addr.0);
        number(self.g_addr) == number(g_addr)
            && number(self.r_addr) == number(r_addr)
            && (self.vlan, self.g_port, self.r_port) == (vlan, g_port, r_port)
            && (self.port, self.version) == (port, version)
    }
}

impl FlowKey {
    /// The flow of a segment that the guest of `port` sent.
    #[must_use]
    pub fn from_guest(port: u16, eth: &Eth, ip: &Ip, tcp: &Tcp) -> Self {
        Self {
            g_addr: ip.src,
            r_addr: ip.dst,
            vlan: eth.vlan.key(),
            g_port: tcp.src_port,
            r_port: tcp.dst_port,
            port,
            version: ip.version,
        }
    }

    /// The flow of a segment on its way to the guest of `port`.
    #[must_use]
    pub fn from_net(port: u16, eth: &Eth, ip: &Ip, tcp: &Tcp) -> Self {
        Self {
            g_addr: ip.dst,
            r_addr: ip.src,
            vlan: eth.vlan.key(),
            g_port: tcp.dst_port,
            r_port: tcp.src_port,
            port,
            version: ip.version,
        }
    }
}

impl FlowKey {
    /// The flow of an untagged segment that the guest of `port` sent.
    #[inline]
    #[must_use]
    pub fn of_glance_from_guest(port: u16, it: &Glance) -> Self {
        Self {
            g_addr: it.src,
            r_addr: it.dst,
            vlan: 0,
            g_port: it.src_port,
            r_port: it.dst_port,
            port,
            version: it.version,
        }
    }

    /// The flow of an untagged segment on its way to the guest of `port`.
    #[inline]
    #[must_use]
    pub fn of_glance_from_net(port: u16, it: &Glance) -> Self {
        Self {
            g_addr: it.dst,
            r_addr: it.src,
            vlan: 0,
            g_port: it.dst_port,
            r_port: it.src_port,
            port,
            version: it.version,
        }
    }
}

impl Hash for FlowKey {
    /// Writes one wide word for IPv4 without VLANs, three for IPv6, because the flow index hashes
    /// once per packet. `eq` compares the fields that this leaves out.
    #[inline]
    fn hash<H: Hasher>(&self, state: &mut H) {
        let [g, r] = [self.g_addr, self.r_addr].map(|addr| u128::from_le_bytes(addr.0));
        let ports = [self.g_port, self.r_port, self.port].map(u128::from);
        let ports = ports[0] << 32 | ports[1] << 16 | ports[2];
        match self.version {
            // The first 12 bytes are the same in all IPv4 addresses; the others are on top here.
            IpVersion::V4 => state.write_u128(g >> 96 << 96 | r >> 96 << 64 | ports),
            IpVersion::V6 => {
                state.write_u128(g);
                state.write_u128(r);
                state.write_u128(ports);
            }
        }
        if self.vlan != 0 {
            state.write_u64(self.vlan);
        }
    }
}

impl fmt::Display for FlowKey {
    /// `port 3 10.0.0.2:80 <-> 10.0.0.9:40000`, with ` vlan 7` or ` vlan 7.8` after the port.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "port {}", self.port)?;
        let [outer, inner] = [self.vlan >> 32, self.vlan & u64::from(u32::MAX)];
        match (outer & 0xfff, inner & 0xfff) {
            _ if self.vlan == 0 => {}
            (outer, _) if inner == 0 => write!(f, " vlan {outer}")?,
            (outer, inner) => write!(f, " vlan {outer}.{inner}")?,
        }
        let (g, r) = (self.g_addr, self.r_addr);
        match self.version {
            IpVersion::V4 => write!(f, " {g}:{} <-> {r}:{}", self.g_port, self.r_port),
            IpVersion::V6 => write!(f, " [{g}]:{} <-> [{r}]:{}", self.g_port, self.r_port),
        }
    }
}

impl fmt::Debug for FlowKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::wire::packet::Packet;
    use crate::wire::samples::v4_segment;
    use core::net::Ipv6Addr;
    use proptest::prelude::*;

    /// Of guest port 3: 10.0.0.2:80 and 10.0.x.x, the n-th of 2^32 remotes.
    pub(crate) fn key(n: u32) -> FlowKey {
        let [a, b, c, d] = n.to_be_bytes();
        FlowKey {
            g_addr: IpAddr16::from_v4([10, 0, 0, 2]),
            r_addr: IpAddr16::from_v4([10, 0, a, b]),
            vlan: 0,
            g_port: 80,
            r_port: u16::from_be_bytes([c, d]),
            port: 3,
            version: IpVersion::V4,
        }
    }

    /// Any two keys differ in few places, as those of real flows do.
    fn any_key() -> impl Strategy<Value = FlowKey> {
        let addr = prop_oneof![
            (0_u8..3).prop_map(|n| (IpVersion::V4, IpAddr16::from_v4([10, 0, 0, n]))),
            (0_u16..3).prop_map(|n| {
                let ip = Ipv6Addr::new(0x2001, 0xdb8, 0, n, 0, 0, 0, n % 2);
                (IpVersion::V6, IpAddr16(ip.octets()))
            }),
        ];
        (addr, 0_u64..3, 0_u16..3, 0_u16..3, 0_u16..2).prop_map(|(addr, vlan, g, r, port)| {
            FlowKey {
                g_addr: addr.1,
                r_addr: addr.1,
                vlan,
                g_port: g,
                r_port: r,
                port,
                version: addr.0,
            }
        })
    }

    fn hash_of(key: &FlowKey) -> u64 {
        ahash::RandomState::with_seeds(1, 2, 3, 4).hash_one(key)
    }

    proptest! {
        #[test]
        fn keys_hash_the_same_exactly_when_they_are_equal(a in any_key(), b in any_key()) {
            prop_assert_eq!(a == b, hash_of(&a) == hash_of(&b));
        }
    }

    #[test]
    fn keys_that_differ_in_one_place_hash_differently() {
        let v4 = key(1);
        let [v6, other] = [1, 2].map(|n| IpAddr16(Ipv6Addr::new(n, 0, 0, 0, 0, 0, 0, 0).octets()));
        let v6 = FlowKey { g_addr: v6, r_addr: v6, version: IpVersion::V6, ..v4 };
        for (key, addr) in [(v4, IpAddr16::from_v4([10, 9, 9, 9])), (v6, other)] {
            let keys = [
                key,
                FlowKey { vlan: 7, ..key },
                FlowKey { vlan: 8, ..key },
                FlowKey { g_addr: addr, ..key },
                FlowKey { r_addr: addr, ..key },
                FlowKey { g_port: 7, ..key },
                FlowKey { r_port: 7, ..key },
                FlowKey { port: 7, ..key },
            ];
            let hashes: std::collections::BTreeSet<_> = keys.iter().map(hash_of).collect();
            assert_eq!(hashes.len(), keys.len());
        }
    }

    #[test]
    fn the_same_segment_on_two_vlans_is_two_flows_and_priority_is_not_looked_at() {
        let vlan_of = |tci: [u8; 2]| {
            let mut segment = v4_segment(b"x");
            segment.l2.splice(12..12, [0x81, 0x00, tci[0], tci[1]]);
            Packet::parse(&segment.frame()).unwrap().eth.vlan.key()
        };
        let on = |vlan| FlowKey { vlan, ..key(1) };
        assert_ne!(on(vlan_of([0, 7])), on(vlan_of([0, 8])));
        assert_eq!(on(vlan_of([0, 7])), on(vlan_of([0xa0, 7])));
        assert_eq!(on(vlan_of([0, 7])).to_string(), "port 3 vlan 7 10.0.0.2:80 <-> 10.0.0.0:1");
        let both = vlan_of([0, 7]) | vlan_of([0, 8]) >> 32;
        assert_eq!(on(both).to_string(), "port 3 vlan 7.8 10.0.0.2:80 <-> 10.0.0.0:1");
        assert_eq!(key(1).to_string(), "port 3 10.0.0.2:80 <-> 10.0.0.0:1");
    }

    #[test]
    fn a_key_costs_48_bytes() {
        assert_eq!(size_of::<FlowKey>(), 48);
    }
}
