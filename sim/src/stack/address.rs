//! The addresses and ports of all machines, which follow from the plan and need not be exchanged.

use super::ConnId;
use crate::plan::{ConnPlan, Machine};
use nightporter_check::wire::IpAddr16;

/// Connections between the same two machines differ in the client's port, from this one on.
const CLIENT_PORT_FIRST: u16 = 1024;
/// After so many connections the next server port is used.
const CLIENT_PORTS: usize = 60_000;
/// The first port that servers listen on.
const SERVER_PORT_FIRST: u16 = 80;

/// Bits of the IPv4 and IPv6 network that all machines are in.
pub(super) const PREFIX: [u8; 2] = [8, 64];

/// Addresses of a machine; both ends derive them from the [`Machine`] alone.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Address {
    /// Ethernet.
    pub mac: [u8; 6],
    /// IPv4: one network 10.0.0.0/8 without routers.
    pub v4: [u8; 4],
    /// IPv6: one network fd00::/64 without routers.
    pub v6: [u8; 16],
}

impl Machine {
    /// Its addresses: guest 258 is 10.1.1.2, fd00::1:102 and 02:00:00:01:01:02; remotes have a 2 in
    /// place of the 1.
    #[must_use]
    pub const fn address(self) -> Address {
        let (kind, n) = match self {
            Self::Guest(n) => (1, n),
            Self::Remote(n) => (2, n),
        };
        let [hi, lo] = n.to_be_bytes();
        Address {
            mac: [2, 0, 0, kind, hi, lo],
            v4: [10, kind, hi, lo],
            v6: [0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, kind, hi, lo],
        }
    }
}

/// The machine with this MAC; the reverse of [`Machine::address`].
#[must_use]
pub const fn machine_of(mac: [u8; 6]) -> Option<Machine> {
    match mac {
        [2, 0, 0, 1, hi, lo] => Some(Machine::Guest(u16::from_be_bytes([hi, lo]))),
        [2, 0, 0, 2, hi, lo] => Some(Machine::Remote(u16::from_be_bytes([hi, lo]))),
        _ => None,
    }
}

impl Address {
    /// One of its IP addresses; IPv4 is mapped into IPv6.
    #[must_use]
    pub const fn ip(&self, v6: bool) -> IpAddr16 {
        if v6 { IpAddr16(self.v6) } else { IpAddr16::from_v4(self.v4) }
    }
}

/// The TCP ports of a connection.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Ports {
    /// The client's.
    pub client: u16,
    /// The server's.
    pub server: u16,
}

impl Ports {
    /// The ports of connection number `id`: of its own, unless the plan names the client's.
    ///
    /// # Panics
    /// After 3.8 thousand million connections.
    #[must_use]
    pub fn of(id: ConnId, plan: &ConnPlan) -> Self {
        let nth = |n: usize| u16::try_from(n).expect("below 65,536");
        match plan.reuse {
            Some(reuse) => Self { client: reuse.port, server: SERVER_PORT_FIRST - 1 },
            None => Self {
                client: CLIENT_PORT_FIRST + nth(id % CLIENT_PORTS),
                server: SERVER_PORT_FIRST + nth(id / CLIENT_PORTS),
            },
        }
    }
}

/// The identity of a connection within one machine.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) struct Key {
    pub(super) peer: [u8; 16],
    pub(super) own_port: u16,
    pub(super) peer_port: u16,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_machine_has_addresses_of_its_own() {
        let machines = (0..3000).flat_map(|n| [Machine::Guest(n), Machine::Remote(n)]);
        let all: std::collections::BTreeSet<[u8; 26]> = machines
            .map(|m| {
                let Address { mac, v4, v6 } = m.address();
                let mut all = [0; 26];
                all[..6].copy_from_slice(&mac);
                all[6..10].copy_from_slice(&v4);
                all[10..].copy_from_slice(&v6);
                all
            })
            .collect();
        assert_eq!(all.len(), 6000);
        assert_eq!(Machine::Guest(258).address().ip(false).to_string(), "10.1.1.2");
        assert_eq!(Machine::Guest(258).address().ip(true).to_string(), "fd00::1:102");
    }
}
