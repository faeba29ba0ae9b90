//! What makes two segments part of one flow.

use core::fmt;
use core::hash::{Hash, Hasher};
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The identity of a flow, seen from its guest port (spec section 1).
///
/// The port is part of the key: between two VMs on one host the same addresses and ports are two
/// flows, one per guest. Addresses are 16 bytes; IPv4 uses the first four, the rest is zero.
#[derive(Clone, Copy, Eq, PartialEq)]
pub struct FlowKey {
    /// The guest's address.
    pub g_addr: [u8; 16],
    /// The remote's address.
    pub r_addr: [u8; 16],
    /// The guest's TCP port.
    pub g_port: u16,
    /// The remote's TCP port.
    pub r_port: u16,
    /// The guest's switch port (`PortId.0`).
    pub port: u16,
    /// VLAN ids, outer first; 0 where there is no tag. A priority tag (id 0) is no VLAN, and
    /// priority bits differ by direction, so neither is in the key (COM-10).
    pub vlan: [u16; 2],
    /// 4 or 6.
    pub version: u8,
}

impl Hash for FlowKey {
    /// Seven words in all: the flow index hashes once per packet.
    fn hash<H: Hasher>(&self, state: &mut H) {
        let word = |b: &[u8; 16], i: usize| {
            let mut w = [0; 8];
            w.copy_from_slice(&b[i..i + 8]);
            u64::from_le_bytes(w)
        };
        let ports = u64::from(self.g_port) << 48
            | u64::from(self.r_port) << 32
            | u64::from(self.vlan[0]) << 16
            | u64::from(self.vlan[1]);
        state.write_u64(ports);
        state.write_u64(u64::from(self.port) << 8 | u64::from(self.version));
        state.write_u64(word(&self.g_addr, 0));
        state.write_u64(word(&self.r_addr, 0));
        if self.version != 4 {
            state.write_u64(word(&self.g_addr, 8));
            state.write_u64(word(&self.r_addr, 8));
        }
    }
}

impl FlowKey {
    fn ip(&self, addr: &[u8; 16]) -> IpAddr {
        if self.version == 4 {
            IpAddr::V4(Ipv4Addr::new(addr[0], addr[1], addr[2], addr[3]))
        } else {
            IpAddr::V6(Ipv6Addr::from(*addr))
        }
    }
}

impl fmt::Display for FlowKey {
    /// `port 3 10.0.0.2:80 <-> 10.0.0.9:40000`, with ` vlan 7` or ` vlan 7.8` after the port.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "port {}", self.port)?;
        match self.vlan {
            [0, 0] => {}
            [outer, 0] => write!(f, " vlan {outer}")?,
            [outer, inner] => write!(f, " vlan {outer}.{inner}")?,
        }
        let (g, r) = (self.ip(&self.g_addr), self.ip(&self.r_addr));
        if self.version == 4 {
            write!(f, " {g}:{} <-> {r}:{}", self.g_port, self.r_port)
        } else {
            write!(f, " [{g}]:{} <-> [{r}]:{}", self.g_port, self.r_port)
        }
    }
}

impl fmt::Debug for FlowKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
