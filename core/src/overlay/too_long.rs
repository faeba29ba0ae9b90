//! ICMP errors for packets that are too long for the overlay, as a router on the path would send
//! them: they tell the sender the largest size (RFC 1191, RFC 8201). So the sender cuts its packets
//! itself instead of losing them.
//!
//! The source address of the error is the packet's destination, because no other address on this
//! Ethernet goes with a MAC behind the overlay (Linux does the same for tunnels below a bridge).
//! TCP gets no error, because it is cut. Nor do packets for which an error is forbidden: to groups,
//! fragments, errors, or from a sender without an address (RFC 1122 section 3.2.2, RFC 4443 section
//! 2.4). A packet that does not ask for an error (IPv4 without DF) is lost silently, because no
//! error may be sent for it.

use crate::wire::checksum::{Checksum, pseudo_header_v6};
use crate::wire::packet::{Ip, IpVersion, L4, Net, Packet};

/// Numbers of the protocols (IANA).
const ICMP: u8 = 1;
const ICMPV6: u8 = 58;
/// Fragmentation needed (RFC 792, 1191); packet too big (RFC 4443).
const NEEDED: [u8; 2] = [3, 4];
const TOO_BIG: [u8; 2] = [2, 0];
/// Bytes of the error's packet at most (RFC 1812 section 4.3.2.3; RFC 4443 section 2.4).
const V4_MAX: usize = 576;
const V6_MAX: usize = 1280;
/// The headers of the error: IP's and ICMP's.
const V4_HEADERS: usize = 20 + 8;
const V6_HEADERS: usize = 40 + 8;
/// No IPv6 path is narrower (RFC 8200 section 5).
const V6_MTU_MIN: u16 = 1280;
const TTL: u8 = 64;

/// The error for a frame that `packet` was parsed from, whose IP packet may have `mtu` bytes with
/// the VLAN tags before it. `None`: nobody is to be told, or it is not too long.
pub(super) fn error(frame: &[u8], packet: &Packet, mtu: u16) -> Option<Vec<u8>> {
    let Net::Ip(ip) = &packet.net else { return None };
    let at = usize::from(ip.header_offset);
    let mtu = mtu.saturating_sub(u16::from(packet.eth.len).saturating_sub(14));
    let quoted = frame.get(at..ip.end as usize)?;
    if quoted.len() <= usize::from(mtu) || !may_be_told(frame, packet, ip) {
        return None;
    }
    let body = match ip.version {
        IpVersion::V4 => v4(ip, quoted, mtu),
        IpVersion::V6 if mtu >= V6_MTU_MIN => v6(ip, quoted, mtu),
        IpVersion::V6 => return None,
    };
    Some([&packet.eth.src[..], &packet.eth.dst, &frame[12..at], &body].concat())
}

fn may_be_told(frame: &[u8], packet: &Packet, ip: &Ip) -> bool {
    let is_group = packet.eth.dst[0] & 1 != 0 || ip.dst.is_multicast() || ip.dst.is_broadcast();
    let is_nobody = ip.src.is_unspecified() || ip.src.is_multicast() || ip.src.is_broadcast();
    let is_error = || match (ip.version, frame.get(usize::from(ip.payload_offset))) {
        (IpVersion::V4, Some(kind)) => [3, 4, 5, 11, 12].contains(kind),
        (IpVersion::V6, Some(kind)) => *kind < 128,
        _ => true,
    };
    let is_fine = match ip.l4 {
        L4::Udp | L4::Other | L4::Opaque => true,
        L4::Icmp => !is_error(),
        L4::Tcp(_) | L4::MalformedTcp | L4::Fragment => false,
    };
    is_fine && ip.dont_fragment && !is_group && !is_nobody
}

fn v4(ip: &Ip, quoted: &[u8], mtu: u16) -> Vec<u8> {
    let quoted = &quoted[..quoted.len().min(V4_MAX - V4_HEADERS)];
    let [high, low] = mtu.to_be_bytes();
    let mut icmp = [&NEEDED[..], &[0, 0, 0, 0, high, low], quoted].concat();
    let sum = sum_of(&icmp, 0);
    icmp[2..4].copy_from_slice(&sum);
    let len = u16::try_from(20 + icmp.len()).unwrap_or(u16::MAX).to_be_bytes();
    let mut header = [0x45, 0, len[0], len[1], 0, 0, 0, 0, TTL, ICMP, 0, 0].to_vec();
    header.extend(ip.dst.v4_bytes());
    header.extend(ip.src.v4_bytes());
    let sum = sum_of(&header, 0);
    header[10..12].copy_from_slice(&sum);
    [header, icmp].concat()
}

fn v6(ip: &Ip, quoted: &[u8], mtu: u16) -> Vec<u8> {
    let quoted = &quoted[..quoted.len().min(V6_MAX - V6_HEADERS)];
    let mut icmp = [&TOO_BIG[..], &[0; 2], &u32::from(mtu).to_be_bytes(), quoted].concat();
    let len = u16::try_from(icmp.len()).unwrap_or(u16::MAX);
    let sum = sum_of(&icmp, pseudo_header_v6(ip.dst.0, ip.src.0, ICMPV6, len.into()));
    icmp[2..4].copy_from_slice(&sum);
    let len = len.to_be_bytes();
    let header = [0x60, 0, 0, 0, len[0], len[1], ICMPV6, TTL];
    [&header[..], &ip.dst.0, &ip.src.0, &icmp].concat()
}

fn sum_of(bytes: &[u8], before: u64) -> [u8; 2] {
    let mut sum = Checksum::new(before);
    sum.add_bytes(bytes);
    sum.finish().to_be_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::packet::ipv4_header_ok;
    use crate::wire::samples::{v4_segment, v6_segment};

    const MTU: u16 = 1450;
    const UDP: u8 = 17;

    /// Frames with so many bytes behind the IP header and TCP's, of this protocol.
    fn of(protocol: u8, payload: usize) -> [Vec<u8>; 2] {
        let payload = vec![7; payload];
        let mut frames = [v4_segment(&payload).frame(), v6_segment(&payload).frame()];
        frames[0][23] = protocol;
        frames[1][20] = protocol;
        frames
    }

    fn told(frame: &[u8]) -> Option<Vec<u8>> {
        error(frame, &Packet::parse(frame).unwrap(), MTU)
    }

    #[test]
    fn who_sends_too_long_a_packet_is_told_how_long_it_may_be() {
        for (frame, max) in of(UDP, 1500).into_iter().zip([V4_MAX, V6_MAX]) {
            let (sent, error) = (Packet::parse(&frame).unwrap(), told(&frame).unwrap());
            let got = Packet::parse(&error).unwrap();
            assert_eq!((got.eth.dst, got.eth.src), (sent.eth.src, sent.eth.dst));
            let (Net::Ip(sent), Net::Ip(got)) = (sent.net, got.net) else { panic!("{got:?}") };
            assert_eq!((got.src, got.dst, got.l4), (sent.dst, sent.src, L4::Icmp));
            assert_eq!(error.len(), 14 + max);
            let icmp = &error[usize::from(got.payload_offset)..];
            let at = usize::from(sent.header_offset);
            assert_eq!(icmp[8..], frame[at..at + icmp.len() - 8]);
            let (kind, mtu, before) = match got.version {
                IpVersion::V4 => (NEEDED, u16::from_be_bytes([icmp[6], icmp[7]]).into(), 0),
                IpVersion::V6 => {
                    let mtu = u32::from_be_bytes([icmp[4], icmp[5], icmp[6], icmp[7]]);
                    let len = u32::try_from(icmp.len()).unwrap();
                    (TOO_BIG, mtu, pseudo_header_v6(got.src.0, got.dst.0, ICMPV6, len))
                }
            };
            assert_eq!((&icmp[..2], mtu), (&kind[..], u32::from(MTU)));
            assert_eq!(sum_of(icmp, before), [0; 2]);
            assert!(got.version == IpVersion::V6 || ipv4_header_ok(&error, &got));
        }
    }

    #[test]
    fn a_tag_takes_its_place_and_is_the_errors_too() {
        for mut frame in of(UDP, 1500) {
            frame.splice(12..12, [0x81, 0, 0, 7]);
            let error = told(&frame).unwrap();
            let packet = Packet::parse(&error).unwrap();
            let Net::Ip(ip) = &packet.net else { panic!("{packet:?}") };
            assert_eq!(error[12..16], [0x81, 0, 0, 7]);
            let field = usize::from(ip.payload_offset) + 6;
            assert_eq!(error[field..field + 2], (MTU - 4).to_be_bytes());
        }
    }

    #[test]
    fn nobody_is_told_of_what_fits_or_forbids_it() {
        for frame in of(UDP, 1000).iter().chain(&of(6, 1500)) {
            assert_eq!(told(frame), None, "it fits, or is cut");
        }
        let [v4, v6] = of(UDP, 1500);
        let but = |frame: &[u8], at: usize, bytes: &[u8]| {
            let mut frame = frame.to_vec();
            frame[at..at + bytes.len()].copy_from_slice(bytes);
            told(&frame).is_some()
        };
        assert!(but(&v4, 20, &[0x40, 0]));
        for (at, bytes, why) in [
            (20, &[0, 0][..], "it may be fragmented"),
            (20, &[0x60, 0], "a fragment"),
            (0, &[0xff; 6], "for everybody"),
            (30, &[224, 0, 0, 9], "for a group"),
            (26, &[0; 4], "from nobody"),
        ] {
            assert!(!but(&v4, at, bytes), "{why}");
        }
        assert!(!but(&v6, 38, &[0xff, 2]), "for a group");
        let [v4, v6] = of(ICMP, 1500).map(|frame| frame[..].to_vec());
        assert!(but(&v4, 34, &[8]) && !but(&v4, 34, &[11]), "an error");
        let v6 = [&v6[..20], &[ICMPV6], &v6[21..]].concat();
        assert!(but(&v6, 54, &[128]) && !but(&v6, 54, &[1]), "an error");
        let packet = Packet::parse(&v6).unwrap();
        assert_eq!(error(&v6, &packet, V6_MTU_MIN - 1), None, "no path is so narrow");
    }
}
