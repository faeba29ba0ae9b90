//! Congestion marks through a tunnel (RFC 6040): copied out on the way in, combined on the way out.

use crate::wire::checksum::update16;
use crate::wire::packet::{Ip, IpVersion, Net, Packet};

/// The ECN field of an IP header (RFC 3168 section 5).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[repr(u8)]
pub enum Ecn {
    /// The sender does not understand marks.
    NotEct = 0,
    /// It does.
    Ect1 = 1,
    /// It does.
    Ect0 = 2,
    /// Congestion experienced.
    Ce = 3,
}

impl Ecn {
    /// Of a TOS byte or a traffic class.
    #[must_use]
    pub const fn of_tos(tos: u8) -> Self {
        match tos & 3 {
            0 => Self::NotEct,
            1 => Self::Ect1,
            2 => Self::Ect0,
            _ => Self::Ce,
        }
    }

    /// The mark in the outer header for a frame, in normal mode (RFC 6040 section 4.1). A frame
    /// that is not IP understands no marks.
    #[must_use]
    pub const fn of(packet: &Packet) -> Self {
        match &packet.net {
            Net::Ip(ip) => Self::of_tos(ip.tos),
            Net::Arp(_) | Net::Other => Self::NotEct,
        }
    }

    /// The inner mark behind the tunnel if the outer one was `outer` (RFC 6040 section 4.2, figure
    /// 4). `None`: the packet must be dropped, because only a loss can tell its sender.
    #[must_use]
    pub const fn decapsulated(self, outer: Self) -> Option<Self> {
        match (self, outer) {
            (Self::NotEct, Self::Ce) => None,
            (Self::NotEct, _) => Some(Self::NotEct),
            (_, Self::Ce) => Some(Self::Ce),
            (Self::Ect0, Self::Ect1) => Some(Self::Ect1),
            _ => Some(self),
        }
    }

    /// Writes it into the IP header of a frame that `ip` was parsed from.
    pub(super) fn put(self, frame: &mut [u8], ip: &Ip) {
        let header = &mut frame[usize::from(ip.header_offset)..];
        let (shift, before) = match ip.version {
            IpVersion::V4 => (0, u16::from_be_bytes([header[0], header[1]])),
            IpVersion::V6 => (4, 0),
        };
        header[1] = header[1] & !(3 << shift) | (self as u8) << shift;
        if ip.version == IpVersion::V4 {
            let check = u16::from_be_bytes([header[10], header[11]]);
            let after = u16::from_be_bytes([header[0], header[1]]);
            header[10..12].copy_from_slice(&update16(check, before, after).to_be_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::packet::ipv4_header_ok;
    use crate::wire::samples::{Segment, v4_segment, v6_segment};

    const ALL: [Ecn; 4] = [Ecn::NotEct, Ecn::Ect0, Ecn::Ect1, Ecn::Ce];

    #[test]
    fn marks_are_combined_as_in_figure_4_of_rfc_6040() {
        use Ecn::{Ce, Ect0, Ect1, NotEct};
        let table = ALL.map(|inner| ALL.map(|outer| inner.decapsulated(outer)));
        assert_eq!(
            table,
            [
                [Some(NotEct), Some(NotEct), Some(NotEct), None],
                [Some(Ect0), Some(Ect0), Some(Ect1), Some(Ce)],
                [Some(Ect1), Some(Ect1), Some(Ect1), Some(Ce)],
                [Some(Ce), Some(Ce), Some(Ce), Some(Ce)],
            ]
        );
    }

    #[test]
    fn a_mark_changes_two_bits_and_leaves_the_header_valid() {
        for segment in [v4_segment(b"x"), v6_segment(b"x")] {
            for (was, now) in ALL.into_iter().flat_map(|was| ALL.map(|now| (was, now))) {
                let tos = 0xb8 | was as u8;
                let mut frame = Segment { tos, ..segment.clone() }.frame();
                let packet = Packet::parse(&frame).unwrap();
                assert_eq!(Ecn::of(&packet), was);
                let (ip, _) = packet.tcp().unwrap();
                now.put(&mut frame, ip);
                let after = Packet::parse(&frame).unwrap();
                let (ip, _) = after.tcp().unwrap();
                assert_eq!(ip.tos, 0xb8 | now as u8);
                assert!(ipv4_header_ok(&frame, ip));
                now.put(&mut frame, ip);
                was.put(&mut frame, ip);
                let before = Segment { tos, ..segment.clone() }.frame();
                assert_eq!(frame, before, "and back");
            }
        }
    }
}
