//! The kinds of frames.

use std::net::SocketAddr;

use etherparse::{IpHeaders, PacketBuilder, PacketBuilderStep};

/// linux/virtio_net.h.
const NEEDS_CSUM: u8 = 1;
const DATA_VALID: u8 = 2;
const TCPV4: u8 = 1;
const UDP: u8 = 3;
const TCPV6: u8 = 4;
const UDP_L4: u8 = 5;
const ECN: u8 = 0x80;

const SOURCE: [u8; 6] = [0x52, 0x54, 0, 1, 2, 3];
const DESTINATION: [u8; 6] = [0x52, 0x54, 0, 9, 8, 7];
/// Segments of super-segments.
const MSS: u16 = 1448;

/// A frame and its name.
pub(crate) struct Kind {
    pub(crate) name: &'static str,
    /// A virtio-net header and the frame.
    pub(crate) bytes: Vec<u8>,
    /// A super-segment of UDP of which the kernel makes fragments (UFO).
    pub(crate) is_ufo: bool,
}

/// An Ethernet header with tags: ethertype of each tag and its content.
fn ethernet(destination: [u8; 6], tags: &[(u16, u16)], ethertype: u16) -> Vec<u8> {
    let tags = tags.iter().flat_map(|(kind, tag)| [*kind, *tag]).chain([ethertype]);
    let mut bytes = [destination, SOURCE].concat();
    bytes.extend(tags.flat_map(u16::to_be_bytes));
    bytes
}

#[derive(Clone, Copy, Eq, PartialEq)]
enum Ip {
    V4,
    V6,
}

#[derive(Clone, Copy, Eq, PartialEq)]
enum L4 {
    Tcp,
    Udp,
}

/// A packet of IP without its Ethernet header, and the places of its checksum.
fn packet(ip: Ip, l4: L4, payload: usize, cwr: bool) -> (Vec<u8>, usize, usize) {
    let step: PacketBuilderStep<IpHeaders> = match ip {
        Ip::V4 => PacketBuilder::ipv4([192, 0, 2, 1], [192, 0, 2, 2], 64),
        Ip::V6 => PacketBuilder::ipv6([0x20; 16], [0x21; 16], 64),
    };
    let payload: Vec<u8> = (0..payload).map(|at| (at % 251).to_le_bytes()[0]).collect();
    let mut bytes = Vec::new();
    let start = if ip == Ip::V4 { 20 } else { 40 };
    match l4 {
        L4::Tcp => {
            let tcp = step.tcp(4000, 5000, 0xffff_fff0, 1000).ack(77).psh();
            let tcp = if cwr { tcp.cwr() } else { tcp };
            tcp.write(&mut bytes, &payload).unwrap();
            (bytes, start, 16)
        }
        L4::Udp => {
            step.udp(4000, 5000).write(&mut bytes, &payload).unwrap();
            (bytes, start, 6)
        }
    }
}

/// A virtio-net header.
fn header(flags: u8, gso: u8, len: usize, size: u16, start: usize, offset: usize) -> Vec<u8> {
    let words = [len, usize::from(size), start, offset].map(|it| u16::try_from(it).unwrap());
    [&[flags, gso][..], &words.map(u16::to_le_bytes).concat()].concat()
}

/// A packet with a header that says what is still to be done.
fn unfinished(gso: u8, tags: &[(u16, u16)], (ip, l4): (Ip, L4), payload: usize) -> Vec<u8> {
    let cwr = gso & ECN != 0;
    let (mut packet, start, offset) = packet(ip, l4, payload, cwr);
    // The sum of the pseudo-header: addresses, protocol and length.
    let addresses = if ip == Ip::V4 { &packet[12..20] } else { &packet[8..40] };
    let words = addresses.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]])));
    let protocol = if l4 == L4::Tcp { 6 } else { 17 };
    let mut sum = words.sum::<u32>() + protocol + u32::try_from(packet.len() - start).unwrap();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    let at = start + offset;
    packet[at..at + 2].copy_from_slice(&u16::try_from(sum).unwrap().to_be_bytes());
    let ethertype = if ip == Ip::V4 { 0x0800 } else { 0x86dd };
    let ethernet = ethernet(DESTINATION, tags, ethertype);
    let start = start + ethernet.len();
    let len = start + if l4 == L4::Tcp { 20 } else { 8 };
    let size = if gso == 0 { 0 } else { MSS };
    let header = header(NEEDS_CSUM, gso, len, size, start, offset);
    [header, ethernet, packet].concat()
}

fn finished(flags: u8, tags: &[(u16, u16)], ip: Ip, l4: L4, payload: usize) -> Vec<u8> {
    let (packet, ..) = packet(ip, l4, payload, false);
    let ethertype = if ip == Ip::V4 { 0x0800 } else { 0x86dd };
    [header(flags, 0, 0, 0, 0, 0), ethernet(DESTINATION, tags, ethertype), packet].concat()
}

/// A frame that is not IP.
fn other(destination: [u8; 6], tags: &[(u16, u16)], ethertype: u16, payload: usize) -> Vec<u8> {
    let ethernet = ethernet(destination, tags, ethertype);
    [header(0, 0, 0, 0, 0, 0), ethernet, vec![0x5a; payload]].concat()
}

/// All of them.
pub(crate) fn all() -> Vec<Kind> {
    use Ip::{V4, V6};
    use L4::{Tcp, Udp};
    let q = |id: u16| (0x8100, id);
    let ad = |id: u16| (0x88a8, id);
    let group = |last: u8| [0x01, 0x80, 0xc2, 0, 0, last];
    let fragment = |mut bytes: Vec<u8>, field: u16| {
        // The field was DF, and the header's sum is that of one's complement.
        let sum = u16::from_be_bytes([bytes[34], bytes[35]]) + 0x4000 - field;
        bytes[30..32].copy_from_slice(&field.to_be_bytes());
        bytes[34..36].copy_from_slice(&sum.to_be_bytes());
        bytes
    };
    let to = |destination: [u8; 6], mut bytes: Vec<u8>| {
        bytes[10..16].copy_from_slice(&destination);
        bytes
    };
    let longest = 65_535 - 20 - 20; // an IPv4 packet has 16 bits for its length
    let kinds = [
        ("ARP, broadcast", other([0xff; 6], &[], 0x0806, 46)),
        ("UDP", finished(0, &[], V4, Udp, 100)),
        ("UDP over IPv6", finished(0, &[], V6, Udp, 100)),
        ("TCP", finished(0, &[], V4, Tcp, 1000)),
        ("TCP, verified", finished(DATA_VALID, &[], V4, Tcp, 1000)),
        ("TCP without data", finished(0, &[], V6, Tcp, 0)),
        ("UDP, sum unfinished", unfinished(0, &[], (V4, Udp), 100)),
        ("UDP over IPv6, sum unfinished", unfinished(0, &[], (V6, Udp), 100)),
        ("TCP, sum unfinished", unfinished(0, &[], (V4, Tcp), 1000)),
        ("TCP over IPv6, sum unfinished", unfinished(0, &[], (V6, Tcp), 1000)),
        ("TSO4", unfinished(TCPV4, &[], (V4, Tcp), 30_000)),
        ("TSO4, two segments", unfinished(TCPV4, &[], (V4, Tcp), 1449)),
        ("TSO4, longest", unfinished(TCPV4, &[], (V4, Tcp), longest)),
        ("TSO4 with CWR", unfinished(TCPV4 | ECN, &[], (V4, Tcp), 30_000)),
        ("TSO6", unfinished(TCPV6, &[], (V6, Tcp), 30_000)),
        ("TSO6 with CWR", unfinished(TCPV6 | ECN, &[], (V6, Tcp), 30_000)),
        ("USO4", unfinished(UDP_L4, &[], (V4, Udp), 30_000)),
        ("USO6", unfinished(UDP_L4, &[], (V6, Udp), 30_000)),
        ("UFO", unfinished(UDP, &[], (V4, Udp), 8_000)),
        ("UFO over IPv6", unfinished(UDP, &[], (V6, Udp), 8_000)),
        ("VLAN", finished(0, &[q(7)], V4, Udp, 100)),
        ("VLAN, sum unfinished", unfinished(0, &[q(7)], (V4, Tcp), 1000)),
        ("VLAN, TSO4", unfinished(TCPV4, &[q(7)], (V4, Tcp), 30_000)),
        ("VLAN, TSO6", unfinished(TCPV6, &[q(4094)], (V6, Tcp), 30_000)),
        ("VLAN, USO4", unfinished(UDP_L4, &[q(7)], (V4, Udp), 30_000)),
        ("priority tag", finished(0, &[q(5 << 13)], V4, Udp, 100)),
        ("priority tag, TSO4", unfinished(TCPV4, &[q(5 << 13)], (V4, Tcp), 30_000)),
        ("service tag", finished(0, &[ad(8)], V4, Udp, 100)),
        ("QinQ", finished(0, &[ad(8), q(7)], V4, Udp, 100)),
        ("QinQ by 802.1Q twice", finished(0, &[q(8), q(7)], V4, Udp, 100)),
        ("QinQ, sum unfinished", unfinished(0, &[ad(8), q(7)], (V4, Tcp), 1000)),
        ("QinQ, TSO4", unfinished(TCPV4, &[ad(8), q(7)], (V4, Tcp), 30_000)),
        ("three tags", finished(0, &[ad(8), q(7), q(6)], V4, Udp, 100)),
        ("VLAN, not IP", other(DESTINATION, &[q(7)], 0x88b5, 46)),
        ("jumbo", finished(0, &[], V4, Udp, 8972)),
        ("jumbo, sum unfinished", unfinished(0, &[], (V6, Tcp), 8940)),
        ("jumbo, VLAN", finished(0, &[q(7)], V4, Udp, 8972)),
        ("first fragment", fragment(finished(0, &[], V4, Udp, 104), 0x2000)),
        ("last fragment", fragment(finished(0, &[], V4, Udp, 104), 13)),
        ("multicast of IPv4", to([1, 0, 0x5e, 0, 0, 0xfb], finished(0, &[], V4, Udp, 100))),
        ("multicast of IPv6", to([0x33, 0x33, 0, 0, 0, 1], finished(0, &[], V6, Udp, 100))),
        ("STP", other(group(0), &[], 38, 38)),
        ("pause", other(group(1), &[], 0x8808, 46)),
        ("LLDP", other(group(0x0e), &[], 0x88cc, 46)),
        ("802.3 with LLC", other(DESTINATION, &[], 46, 46)),
        ("unknown ethertype", other(DESTINATION, &[], 0x9999, 1400)),
        ("nothing behind the header", other(DESTINATION, &[], 0x9999, 0)),
        ("one byte", other(DESTINATION, &[], 0x9999, 1)),
        ("MPLS", other(DESTINATION, &[], 0x8847, 64)),
    ];
    let kind = |(name, bytes): (&'static str, Vec<u8>)| {
        let is_ufo = bytes[1] == UDP;
        Kind { name, bytes, is_ufo }
    };
    kinds.into_iter().map(kind).collect()
}

/// A frame, and what the programs are to see in it when it passes plain.
pub(crate) struct Passing {
    pub(crate) name: &'static str,
    /// A virtio-net header and the frame.
    pub(crate) bytes: Vec<u8>,
    /// It is a segment of TCP between these.
    pub(crate) ends: Option<[SocketAddr; 2]>,
    pub(crate) is_syn: bool,
    /// It can be told whether it is one.
    pub(crate) is_read: bool,
}

/// So many of [`passing`] have right sums.
pub(crate) const WHOLE: usize = 5;

/// Frames with and without TCP in them.
pub(crate) fn passing() -> Vec<Passing> {
    let v4 = || Some([([192, 0, 2, 1], 4000).into(), ([192, 0, 2, 2], 5000).into()]);
    let v6 = || Some([([0x20_u8; 16], 4000).into(), ([0x21_u8; 16], 5000).into()]);
    let (q, ad) = ((0x8100, 7), (0x88a8, 8));
    // Bytes of a frame without tags: the protocol of IPv4 and its fragment offset, the next header
    // of IPv6, what comes first behind that, and the flags of TCP in IPv4.
    let [protocol, offset, next, behind, flags] = [23, 20, 20, 54, 47].map(|at: usize| 10 + at);
    let with = |mut bytes: Vec<u8>, changes: &[(usize, u8)]| {
        changes.iter().for_each(|(at, byte)| bytes[*at] = *byte);
        bytes
    };
    let tcp = |tags: &[(u16, u16)], ip| finished(0, tags, ip, L4::Tcp, 100);
    let (plain, of_6) = (tcp(&[], Ip::V4), tcp(&[], Ip::V6));
    let is = |name, bytes: Vec<u8>, ends, is_syn, is_read| Passing {
        name,
        bytes,
        ends,
        is_syn,
        is_read,
    };
    let ihl = |mut bytes: Vec<u8>| {
        bytes[10 + 14] = 0x46;
        bytes.splice(10 + 34..10 + 34, [1; 4]); // NOP
        bytes
    };
    vec![
        is("TCP", plain.clone(), v4(), false, true),
        is("TCP over IPv6", of_6.clone(), v6(), false, true),
        is("TSO4", unfinished(TCPV4, &[], (Ip::V4, L4::Tcp), 30_000), v4(), false, true),
        is("VLAN", tcp(&[q], Ip::V4), v4(), false, true),
        is("QinQ", tcp(&[ad, q], Ip::V6), v6(), false, true),
        is("with options of IP", ihl(plain.clone()), v4(), false, true),
        is("SYN", with(plain.clone(), &[(flags, 0x02)]), v4(), true, true),
        is("SYN-ACK", with(plain.clone(), &[(flags, 0x12)]), v4(), true, true),
        is("UDP", finished(0, &[], Ip::V4, L4::Udp, 100), None, false, true),
        is("UDP over IPv6", finished(0, &[q], Ip::V6, L4::Udp, 100), None, false, true),
        is("STP", other([1, 0x80, 0xc2, 0, 0, 0], &[], 38, 38), None, false, true),
        is("many tags", tcp(&[ad, ad, q, q], Ip::V4), None, false, false),
        is("first fragment", with(plain.clone(), &[(offset, 0x20)]), None, false, false),
        is("last fragment", with(plain.clone(), &[(offset + 1, 9)]), None, false, false),
        is(
            "fragment of UDP",
            with(plain.clone(), &[(offset, 0x20), (protocol, 17)]),
            None,
            false,
            true,
        ),
        is("cut", plain[..10 + 40].to_vec(), None, false, false),
        is("behind a header", with(of_6.clone(), &[(next, 0), (behind, 6)]), None, false, false),
        is("of a group", with(of_6, &[(next, 0), (behind, 58)]), None, false, true),
    ]
}

/// A frame with a number, by which others end.
pub(crate) fn numbered(number: u64) -> Vec<u8> {
    let mut bytes = other([0xff; 6], &[], 0x88b5, 46);
    bytes[10 + 14..10 + 14 + 8].copy_from_slice(&number.to_be_bytes());
    bytes
}

/// Its number.
pub(crate) fn number_of(bytes: &[u8]) -> Option<u64> {
    let frame = &bytes[10..];
    let is_numbered = frame[..6] == [0xff; 6] && frame[12..14] == [0x88, 0xb5];
    is_numbered.then(|| u64::from_be_bytes(*frame[14..].first_chunk().unwrap()))
}

/// The frame without what the kernel chooses anew for each fragment that it makes: whether the sum
/// was verified, and the identification of IPv6.
pub(crate) fn forget_fragmentation(bytes: &mut [u8]) {
    bytes[0] &= !DATA_VALID;
    if bytes[10 + 12..10 + 14] == [0x86, 0xdd] {
        let header = 10 + 14 + 40; // of the fragment
        bytes[header + 4..header + 8].fill(0);
    }
}
