//! A bad path's treatment of IPv4 packets on their way to the remote, besides losses: it marks them
//! (RFC 3168), and it refuses packets that are too long for it and reports that (RFC 1191).

use std::net::Ipv4Addr;

use super::wire::VNET_LEN;

/// Bytes of an Ethernet header, of an IPv4 header without options.
const ETHERNET: usize = 14;
const IPV4: usize = 20;
/// Where a field is in an IPv4 header.
const TOS: usize = 1;
const TOTAL: usize = 2;
const FRAGMENT: usize = 6;
const CHECKSUM: usize = 10;
/// ECN-capable, of both kinds; both bits are the mark.
const ECN: u8 = 0b11;
/// "Do not fragment", in the first byte of the fragment offset.
const DONT_FRAGMENT: u8 = 0x40;
/// The quotation of a refused packet: its header, and so many bytes of its payload.
const QUOTED: usize = 8;
/// The last number of the address of the router that refuses.
const ROUTER: u8 = 254;

/// Marks a packet of a tap, if it is ECN-capable and has no mark yet; whether it is now marked.
pub(super) fn mark(packet: &mut [u8]) -> bool {
    let Some(ip) = ipv4(packet).map(|ip| &mut packet[VNET_LEN + ETHERNET..][..ip]) else {
        return false;
    };
    if !matches!(ip[TOS] & ECN, 1 | 2) {
        return false;
    }
    ip[TOS] |= ECN;
    ip[CHECKSUM..CHECKSUM + 2].fill(0);
    let sum = checksum(ip).to_be_bytes();
    ip[CHECKSUM..CHECKSUM + 2].copy_from_slice(&sum);
    true
}

/// The router's answer to a packet that is longer than `mtu` (bytes of IP) and must not be cut: a
/// packet of a tap for its sender. `None`: the packet may go on.
pub(super) fn refusal(packet: &[u8], mtu: u16) -> Option<Vec<u8>> {
    let header = ipv4(packet)?;
    let (ethernet, ip) = packet[VNET_LEN..].split_at(ETHERNET);
    let total = u16::from_be_bytes([ip[TOTAL], ip[TOTAL + 1]]);
    if total <= mtu || ip[FRAGMENT] & DONT_FRAGMENT == 0 {
        return None;
    }
    let mut icmp = vec![3, 4, 0, 0, 0, 0]; // fragmentation needed, a checksum, nothing
    icmp.extend(mtu.to_be_bytes());
    icmp.extend(ip.get(..header + QUOTED)?);
    let sum = checksum(&icmp).to_be_bytes();
    icmp[2..4].copy_from_slice(&sum);
    let mut head = [0; IPV4];
    head[0] = 0x45;
    head[TOTAL..][..2].copy_from_slice(&u16::try_from(IPV4 + icmp.len()).ok()?.to_be_bytes());
    (head[8], head[9]) = (64, 1); // hops left, ICMP
    let [a, b, c, _] = Ipv4Addr::from_octets(*ip[16..].first_chunk()?).octets();
    head[12..16].copy_from_slice(&[a, b, c, ROUTER]);
    head[16..20].copy_from_slice(&ip[12..16]);
    let sum = checksum(&head).to_be_bytes();
    head[CHECKSUM..][..2].copy_from_slice(&sum);
    let answer = [&[0; VNET_LEN][..], &ethernet[6..12], &ethernet[..6], &[8, 0], &head, &icmp];
    Some(answer.concat())
}

/// Bytes of the IPv4 header of a packet of a tap, if it has one.
fn ipv4(packet: &[u8]) -> Option<usize> {
    let frame = packet.get(VNET_LEN..)?;
    let ip = frame.get(ETHERNET..).filter(|_| frame[12..14] == [8, 0])?;
    let header = usize::from(ip.first()? & 15) * 4;
    (header >= IPV4 && ip.len() >= header).then_some(header)
}

/// RFC 1071.
fn checksum(bytes: &[u8]) -> u16 {
    let words = bytes.chunks(2).map(|w| u32::from(w[0]) << 8 | u32::from(*w.get(1).unwrap_or(&0)));
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !u16::try_from(sum).expect("folded")
}

#[cfg(test)]
mod tests {
    use super::super::watch::tests::segment;
    use super::*;

    const IP: usize = VNET_LEN + ETHERNET;

    fn capable() -> Vec<u8> {
        let mut packet = segment(1, 1, 1448);
        packet[IP + TOS] = 0b1010_1010;
        packet[IP + FRAGMENT] = DONT_FRAGMENT;
        packet[..VNET_LEN + 12][VNET_LEN..].copy_from_slice(b"remoteguest0");
        packet
    }

    #[test]
    fn who_is_ecn_capable_is_marked_once_and_nobody_else() {
        let mut packet = capable();
        assert!(mark(&mut packet));
        assert_eq!(packet[IP + TOS], 0b1010_1011);
        assert_eq!(checksum(&packet[IP..IP + IPV4]), 0, "a sum with its checksum");
        let marked = packet.clone();
        assert!(!mark(&mut packet) && packet == marked);
        for (at, value) in [(IP + TOS, 0b1010_1000), (VNET_LEN + 12, 0x86), (IP, 0x44)] {
            let mut packet = capable();
            packet[at] = value;
            assert!(!mark(&mut packet));
        }
        assert!(!mark(&mut capable()[..IP + 19]));
    }

    #[test]
    fn what_is_too_long_is_refused_and_its_sender_told_how_long_it_may_be() {
        let packet = capable();
        assert_eq!(refusal(&packet, 1488), None, "as long as it may be");
        let answer = refusal(&packet, 1400).expect("too long");
        assert_eq!(&answer[VNET_LEN..IP], b"guest0remote\x08\x00");
        let (ip, icmp) = answer[IP..].split_at(IPV4);
        assert_eq!((checksum(ip), checksum(icmp)), (0, 0));
        assert_eq!(usize::from(u16::from_be_bytes([ip[2], ip[3]])), answer.len() - IP);
        assert_eq!((&ip[12..16], &ip[16..20]), (&[10, 77, 3, 254][..], &[10, 77, 3, 10][..]));
        assert_eq!((icmp[0], icmp[1], &icmp[6..8]), (3, 4, &1400_u16.to_be_bytes()[..]));
        assert_eq!(icmp[8..], packet[IP..][..IPV4 + QUOTED]);
        let mut may_be_cut = packet;
        may_be_cut[IP + FRAGMENT] = 0;
        assert_eq!(refusal(&may_be_cut, 1400), None);
    }
}
