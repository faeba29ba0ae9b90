//! Errors about the paths of an overlay that somebody makes up. Needs root.

use std::net::{Ipv4Addr, SocketAddrV4, UdpSocket};
use std::time::{Duration, Instant};

use nightporter_core::overlay::SOURCE_PORTS;
use rustix::net::{AddressFamily, SendFlags, SocketType, ipproto, sendto, socket};

use crate::host::{Dir, Host, LIMIT};
use crate::overlay::{Namespace, host_with_lan, overlay, two_hosts, vxlan_device};

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

/// Two hosts, of which the other one is `other`, and somebody who says that the path is narrow: the
/// daemon of the first, and what sends so many bytes to the other and hears them arrive.
fn told_of_a_narrow_path<T>(
    other: impl FnOnce(&Namespace) -> T,
    judge: impl FnOnce(&Host, &UdpSocket, &UdpSocket),
) {
    let (a, b) = two_hosts();
    let dir = Dir::new();
    let host = host_with_lan(&a, &dir, &overlay("192.0.2.1", "\"192.0.2.2\""), 1);
    let _other = other(&b);
    let udp = a.enter(|| UdpSocket::bind("[fd09::1]:0").unwrap());
    let sink = b.enter(|| UdpSocket::bind("[fd09::2]:0").unwrap());
    sink.set_read_timeout(Some(LIMIT)).unwrap();
    // So that whether it answers probes is known.
    for len in [10, FITS_ALWAYS, FITS_ALWAYS, FITS, FITS] {
        arrives(&udp, &sink, len);
    }
    let start = Instant::now();
    while !a.says("route get 192.0.2.2").contains(&format!("mtu {SAID}")) {
        assert!(start.elapsed() < LIMIT, "the kernel of host a believes it");
        forge(&b, Ipv4Addr::new(192, 0, 2, 1), Ipv4Addr::new(192, 0, 2, 2));
    }
    judge(&host, &udp, &sink);
    for _ in 0..3 {
        arrives(&udp, &sink, FITS_ALWAYS);
    }
}

/// Bytes behind UDP's and IPv6's headers that the path takes, and that every path does.
const FITS: usize = 1450 - 48;
const FITS_ALWAYS: usize = 1280 - 48;

fn arrives(udp: &UdpSocket, sink: &UdpSocket, len: usize) {
    udp.send_to(&vec![7; len], sink.local_addr().unwrap()).unwrap();
    let (got, _) = sink.recv_from(&mut [0; 2000]).expect("it arrives");
    assert_eq!(got, len);
}

#[test]
#[ignore = "needs root: it makes network namespaces"]
fn an_error_that_somebody_makes_up_of_the_kernels_vxlan_device_leaves_room_for_ipv6() {
    let judge = |host: &Host, udp: &UdpSocket, sink: &UdpSocket| {
        let (start, address) = (Instant::now(), sink.local_addr().unwrap());
        // Long ones make the daemon ask the kernel, again and again; those that fit go on.
        while !host.port("over").drops.contains_key("too_big") {
            assert!(start.elapsed() < LIMIT, "it is believed as far as that");
            let _ = udp.send_to(&[1; FITS], address);
            udp.send_to(&[7; 10], address).unwrap();
            while sink.recv_from(&mut [0; 2000]).expect("it arrives").0 != 10 {}
        }
        let drops = host.port("over").drops;
        assert_eq!(drops.keys().collect::<Vec<_>>(), ["too_big"], "{drops:?}");
    };
    told_of_a_narrow_path(|b| vxlan_device(b, ""), judge);
}

#[test]
#[ignore = "needs root: it makes network namespaces"]
fn an_error_that_somebody_makes_up_of_a_daemon_is_not_believed_at_all() {
    let dir = Dir::new();
    let other = |b: &Namespace| host_with_lan(b, &dir, &overlay("192.0.2.2", "\"192.0.2.1\""), 2);
    told_of_a_narrow_path(other, |host, udp, sink| {
        // Longer than the kernel is asked once.
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(1) {
            arrives(udp, sink, FITS);
        }
        let drops = host.port("over").drops;
        assert!(drops.is_empty(), "{drops:?}");
    });
}
