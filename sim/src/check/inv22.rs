//! INV-22, checksums: every frame emitted has a right one, or a right beginning of one and says so.

use nightporter_core::wire::checksum::{Checksum, sum};
use nightporter_core::wire::packet::{Ip, IpVersion, tcp_pseudo_header};
use nightporter_core::wire::virtio_net::VirtioNetHdr;

use super::Ensure;

pub(crate) fn on_out(hdr: &VirtioNetHdr, bytes: &[u8], ip: &Ip) -> Ensure {
    let wrong = |what: &str| Err(what.to_owned());
    let start = usize::from(ip.payload_offset);
    let segment = &bytes[start..ip.end as usize];
    if ip.version == IpVersion::V4 {
        let mut header = Checksum::new(0);
        header.add_bytes(&bytes[usize::from(ip.header_offset)..start]);
        if header.finish() != 0 {
            return wrong("IPv4 header checksum");
        }
    }
    let len = u32::try_from(segment.len()).unwrap_or(u32::MAX);
    let pseudo = tcp_pseudo_header(ip.version, ip.src, ip.dst, len);
    if hdr.needs_csum() {
        let field = u16::from_be_bytes([segment[16], segment[17]]);
        if field != Checksum::new(pseudo).fold() {
            return wrong("partial checksum is not the pseudo-header's");
        }
        if usize::from(hdr.csum_start) != start || hdr.csum_offset != 16 {
            return wrong("the virtio header points elsewhere");
        }
        if hdr.is_gso() && hdr.gso_size == 0 {
            return wrong("a super-segment without a size");
        }
        return Ok(());
    }
    if hdr.is_gso() {
        return wrong("a super-segment with a full checksum");
    }
    if Checksum::new(sum(segment, pseudo)).finish() != 0 {
        return wrong("TCP checksum");
    }
    Ok(())
}
