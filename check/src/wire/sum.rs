//! The Internet checksum (RFC 1071), summed by `etherparse`.

use etherparse::checksum::Sum16BitWords;

use super::{Ip, IpAddr16, IpVersion, PROTOCOL_TCP};

/// The pseudo-header before a segment of `len` bytes of `protocol` (RFC 9293 section 3.1, RFC 8200
/// section 8.1).
#[must_use]
pub fn pseudo_header(
    version: IpVersion,
    src: IpAddr16,
    dst: IpAddr16,
    protocol: u8,
    len: u32,
) -> Sum16BitWords {
    // Zeros count for nothing: a sum of all 16 bytes would be wrong for IPv4 by its two 0xffff.
    let from = if version == IpVersion::V4 { 12 } else { 0 };
    Sum16BitWords::new()
        .add_slice(&src.0[from..])
        .add_slice(&dst.0[from..])
        .add_2bytes([0, protocol])
        .add_4bytes(len.to_be_bytes())
}

/// The value of a header's field for this sum.
#[must_use]
pub fn written(sum: &Sum16BitWords) -> [u8; 2] {
    // `ones_complement` is in the order of this machine, whichever that is.
    sum.ones_complement().to_ne_bytes()
}

/// The value if the driver has to finish it: the sum itself.
#[must_use]
pub fn unfinished(sum: &Sum16BitWords) -> [u8; 2] {
    written(sum).map(|byte| !byte)
}

/// The header checksum is right; IPv6 has none.
#[must_use]
pub fn ipv4_header_ok(frame: &[u8], ip: &Ip) -> bool {
    let header = usize::from(ip.header_offset)..usize::from(ip.payload_offset);
    ip.version == IpVersion::V6
        || frame.get(header).is_some_and(|h| is_zero(Sum16BitWords::new(), h))
}

/// The TCP checksum is right.
#[must_use]
pub fn tcp_checksum_ok(frame: &[u8], ip: &Ip) -> bool {
    let at = u32::from(ip.payload_offset);
    let len = ip.end.saturating_sub(at);
    let pseudo = pseudo_header(ip.version, ip.src, ip.dst, PROTOCOL_TCP, len);
    frame.get(at as usize..ip.end as usize).is_some_and(|segment| is_zero(pseudo, segment))
}

fn is_zero(before: Sum16BitWords, bytes: &[u8]) -> bool {
    written(&before.add_slice(bytes)) == [0, 0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_example_of_rfc_1071_sums_to_what_it_says() {
        // Section 3: 0001 f203 f4f5 f6f7 sums to ddf2.
        let sum = Sum16BitWords::new().add_slice(&[0, 1, 0xf2, 3, 0xf4, 0xf5, 0xf6, 0xf7]);
        assert_eq!(unfinished(&sum), [0xdd, 0xf2]);
        assert_eq!(written(&sum), [0x22, 0x0d]);
    }

    #[test]
    fn a_mapped_address_sums_as_its_four_bytes() {
        let a = |last| IpAddr16([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, last]);
        let sum = pseudo_header(IpVersion::V4, a(1), a(2), PROTOCOL_TCP, 20);
        let plain = Sum16BitWords::new().add_slice(&[10, 0, 0, 1, 10, 0, 0, 2, 0, 6, 0, 20]);
        assert_eq!(written(&sum), written(&plain));
    }
}
