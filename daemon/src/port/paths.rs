//! The widths of the paths to peers of an overlay.
//!
//! The kernel refuses a datagram that is longer than its own interface takes, and nothing else: it
//! learns of narrower paths from ICMP errors, which anybody on the way can make up (the addresses
//! and ports that such an error has to quote are no secret). So the sockets ignore what the kernel
//! has learned (IP_PMTUDISC_PROBE), and the kernel is asked for it while long datagrams leave. It
//! is believed down to a width at which all of Ethernet goes on, IPv6 with its tags, too. Where the
//! kernel itself refuses datagrams of that width, it is believed further.

use std::io;
use std::net::{IpAddr, UdpSocket};
use std::os::fd::AsRawFd;

use nightporter_core::overlay::{PROBE_BASE, overhead};
use nightporter_core::time::{Duration, Instant};
use nix::sys::socket::{SockaddrStorage, connect};
use rustix::net::sockopt as option;

/// Others are believed down to this width of the inner packet.
pub(super) const SAID_MTU_MIN: u16 = PROBE_BASE;
/// The smallest MTU that a narrow interface makes of the configured one: Linux takes no path for
/// narrower than 552 bytes (`net.ipv4.route.min_pmtu`), less the headers of the tunnel over IPv4.
const NARROW_MTU_MIN: u16 = 502;
/// How often the kernel is asked for the MTU of one path, at most: as often as a TCP that loses all
/// it sends tries again (RFC 6298; Linux' minimum).
const ASK_INTERVAL: Duration = Duration::from_millis(200);

/// When the kernel was last asked, for each peer.
#[derive(Debug)]
pub(super) struct Paths(Vec<Option<Instant>>);

impl Paths {
    pub(super) fn new(peers: usize) -> Self {
        Self(vec![None; peers])
    }

    /// The width of the path to the peer at this place, which is at `to`: bytes of the longest
    /// inner packet. A packet of `refused` bytes was refused by the kernel, and `believed` is its
    /// width so far. `None`: it was asked just now, or cannot tell.
    pub(super) fn ask(
        &mut self,
        now: Instant,
        place: usize,
        (local, to): (IpAddr, &SockaddrStorage),
        refused: Option<u16>,
        believed: u16,
    ) -> Option<u16> {
        let asked = self.0.get_mut(place)?;
        let is_wrong = refused.is_some_and(|refused| refused <= believed);
        if !is_wrong && asked.is_some_and(|asked| now.since(asked) < ASK_INTERVAL) {
            return None;
        }
        *asked = Some(now);
        let mtu = path_mtu(local, to).ok()?;
        Some(width(mtu.saturating_sub(overhead(local)), refused))
    }
}

/// The width to believe in, if the kernel says this one.
fn width(said: u16, refused: Option<u16>) -> u16 {
    let is_ours = refused.is_some_and(|refused| refused <= SAID_MTU_MIN);
    said.max(if is_ours { NARROW_MTU_MIN } else { SAID_MTU_MIN })
}

/// Bytes of the longest IP packet on the way to `peer`, as far as the kernel knows.
fn path_mtu(local: IpAddr, peer: &SockaddrStorage) -> io::Result<u16> {
    let socket = UdpSocket::bind((local, 0))?;
    connect(socket.as_raw_fd(), peer)?;
    let mtu = if local.is_ipv4() { option::ip_mtu(&socket) } else { option::ipv6_mtu(&socket) }?;
    Ok(u16::try_from(mtu).unwrap_or(u16::MAX))
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::*;

    #[test]
    fn what_is_said_of_a_path_leaves_room_for_ipv6_unless_the_kernel_refuses_that() {
        for (said, refused, believed) in [
            (1400, None, 1400),
            (502, None, SAID_MTU_MIN),
            (0, Some(1450), SAID_MTU_MIN),
            (650, Some(SAID_MTU_MIN + 1), SAID_MTU_MIN),
            (650, Some(SAID_MTU_MIN), 650),
            (20, Some(600), NARROW_MTU_MIN),
        ] {
            assert_eq!(width(said, refused), believed, "{said} {refused:?}");
        }
    }

    #[test]
    fn the_kernel_is_asked_now_and_then_and_at_once_if_it_was_believed_in_vain() {
        let local = IpAddr::from([127, 0, 0, 1]);
        let to = SockaddrStorage::from(SocketAddr::new(local, 4789));
        let (mut paths, start) = (Paths::new(1), Instant::from_secs(1000));
        let mut ask = |now, refused| paths.ask(now, 0, (local, &to), refused, 1450);
        let loopback = Some(u16::MAX - overhead(local));
        assert_eq!(ask(start, None), loopback);
        assert_eq!(ask(start + ASK_INTERVAL - Duration::from_millis(1), Some(1451)), None);
        assert_eq!(ask(start, Some(1450)), loopback);
        assert_eq!(ask(start + ASK_INTERVAL, None), loopback);
        assert_eq!(paths.ask(start, 1, (local, &to), None, 1450), None, "there is no such peer");
    }
}
