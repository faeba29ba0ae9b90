//! Internet addresses, in the kernel's form and in the form of requests to the host.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use libc::{AF_INET, AF_INET6, c_int};

use crate::sys::Name;

fn family_bytes(family: c_int) -> [u8; 2] {
    u16::try_from(family).unwrap_or(0).to_ne_bytes()
}

/// The address in `name`, an IPv4 address also if it is mapped into IPv6. `None`: it is none.
pub fn parse(name: &Name) -> Option<SocketAddr> {
    let bytes = name.bytes();
    let port = u16::from_be_bytes(bytes.get(2..4)?.try_into().ok()?);
    let ip = if bytes[..2] == family_bytes(AF_INET) {
        IpAddr::from(<[u8; 4]>::try_from(bytes.get(4..8)?).ok()?)
    } else if bytes[..2] == family_bytes(AF_INET6) {
        IpAddr::from(<[u8; 16]>::try_from(bytes.get(8..24)?).ok()?).to_canonical()
    } else {
        return None;
    };
    Some(SocketAddr::new(ip, port))
}

/// An address for a socket of this family.
pub fn name(family: c_int, address: SocketAddr) -> Name {
    let port = address.port().to_be_bytes();
    let bytes = match (family, address.ip()) {
        (AF_INET, IpAddr::V4(ip)) => {
            [&family_bytes(family)[..], &port, &ip.octets(), &[0; 8]].concat()
        }
        (_, ip) => {
            let ip = match ip {
                IpAddr::V4(ip) => ip.to_ipv6_mapped(),
                IpAddr::V6(ip) => ip,
            };
            [&family_bytes(AF_INET6)[..], &port, &[0; 4], &ip.octets(), &[0; 4]].concat()
        }
    };
    Name::of(&bytes)
}

/// No address in particular, of a family.
pub fn unspecified(family: c_int) -> IpAddr {
    match family {
        AF_INET => Ipv4Addr::UNSPECIFIED.into(),
        _ => Ipv6Addr::UNSPECIFIED.into(),
    }
}

/// The same, of a socket of this family.
pub fn any(family: c_int, port: u16) -> Name {
    name(family, SocketAddr::new(unspecified(family), port))
}

/// The own address of a socket that connects to `to`: of the same family, or any if it is bound to
/// none.
pub fn from(own: Option<SocketAddr>, to: SocketAddr, port: u16) -> SocketAddr {
    let any: IpAddr = match to.ip() {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let own = own.map(|own| own.ip()).filter(|ip| ip.is_ipv4() == to.is_ipv4());
    SocketAddr::new(own.unwrap_or(any), port)
}

/// Whether the host can be asked for a way there: an address that is more than this guest's, and
/// means the same at the host.
pub fn is_elsewhere(to: SocketAddr) -> bool {
    let ip = to.ip();
    let local = match ip {
        IpAddr::V4(ip) => ip.is_broadcast(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    };
    to.port() != 0 && !local && !ip.is_loopback() && !ip.is_unspecified() && !ip.is_multicast()
}
