//! Errors about the paths of an overlay that somebody makes up. Needs root.

use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, UdpSocket};
use std::time::Instant;

use nightporter_core::overlay::SOURCE_PORTS;
use rustix::net::{AddressFamily, SendFlags, SocketType, ipproto, sendto, socket};

use crate::host::{Dir, LIMIT};
use crate::overlay::{Namespace, host_with_lan, overlay, two_hosts};

/// The MTU that the error tells, and the least that Linux takes.
const SAID: u16 = 552;

fn checksum(bytes: &[u8]) -> [u8; 2] {
    let words =
        bytes.chunks(2).map(|it| u32::from(it[0]) << 8 | it.get(1).map_or(0, |b| u32::from(*b)));
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum >> 16) + (sum & 0xffff);
    }
    (!u16::try_from(sum).unwrap()).to_be_bytes()
}

/// Fragmentation is needed, says somebody at `from` of a datagram that went from one to the other.
fn forge(from: &Namespace, source: Ipv4Addr, destination: Ipv4Addr) {
    let icmp = from.enter(|| socket(AddressFamily::INET, SocketType::RAW, Some(ipproto::ICMP)));
    let icmp = icmp.unwrap();
    let [high, low] = SOURCE_PORTS.start().to_be_bytes();
    let quoted = [
        &[0x45, 0, 5, 0xdc, 0, 0, 0x40, 0, 64, 17, 0, 0][..],
        &source.octets(),
        &destination.octets(),
        &[high, low, 0x12, 0xb5, 5, 0xc8, 0, 0],
    ];
    let [high, low] = SAID.to_be_bytes();
    let mut error = [&[3, 4, 0, 0, 0, 0, high, low][..], &quoted.concat()].concat();
    let sum = checksum(&error);
    error[2..4].copy_from_slice(&sum);
    let to = SocketAddrV4::new(source, 0);
    assert_eq!(sendto(&icmp, &error, SendFlags::empty(), &to), Ok(error.len()));
}

#[test]
#[ignore = "needs root: it makes network namespaces"]
fn an_error_that_somebody_makes_up_leaves_a_path_its_room_for_ipv6() {
    let (a, b) = two_hosts();
    let dirs = [Dir::new(), Dir::new()];
    let host = host_with_lan(&a, &dirs[0], &overlay("192.0.2.1", "\"192.0.2.2\""), 1);
    let _other = host_with_lan(&b, &dirs[1], &overlay("192.0.2.2", "\"192.0.2.1\""), 2);
    let udp = a.enter(|| UdpSocket::bind("[fd09::1]:0").unwrap());
    let sink = b.enter(|| UdpSocket::bind("[fd09::2]:0").unwrap());
    sink.set_read_timeout(Some(LIMIT)).unwrap();
    let address: SocketAddr = sink.local_addr().unwrap();
    let arrives = |len: usize| {
        udp.send_to(&vec![7; len], address).unwrap();
        let (got, _) = sink.recv_from(&mut [0; 2000]).expect("it arrives");
        assert_eq!(got, len);
    };
    arrives(10);
    arrives(1280 - 48);
    let start = Instant::now();
    while !a.says("route get 192.0.2.2").contains(&format!("mtu {SAID}")) {
        assert!(start.elapsed() < LIMIT, "the kernel of host a believes it");
        forge(&b, Ipv4Addr::new(192, 0, 2, 1), Ipv4Addr::new(192, 0, 2, 2));
    }
    // Long ones make the daemon ask the kernel, again and again; those that fit go on.
    while !host.port("over").drops.contains_key("too_big") {
        assert!(start.elapsed() < LIMIT, "it is believed as far as that");
        let _ = udp.send_to(&[1; 1450 - 48], address);
        udp.send_to(&[7; 10], address).unwrap();
        while sink.recv_from(&mut [0; 2000]).expect("it arrives").0 != 10 {}
    }
    for _ in 0..3 {
        arrives(1280 - 48);
    }
    let drops = host.port("over").drops;
    assert_eq!(drops.keys().collect::<Vec<_>>(), ["too_big"], "{drops:?}");
}
