//! INV-22, checksums: every emitted frame has a right one, or a right partial one that is marked
//! so.

use nightporter_core::wire::virtio_net::VirtioNetHdr;

use super::Ensure;
use crate::wire::{Ip, PROTOCOL_TCP, ipv4_header_ok, pseudo_header, unfinished, written};

/// A frame that leaves, with what its virtio header says of it.
///
/// # Errors
/// What is wrong.
pub fn on_out(hdr: &VirtioNetHdr, bytes: &[u8], ip: &Ip) -> Ensure {
    let wrong = |what: &str| Err(what.to_owned());
    let start = usize::from(ip.payload_offset);
    let segment = &bytes[start..ip.end as usize];
    if !ipv4_header_ok(bytes, ip) {
        return wrong("IPv4 header checksum");
    }
    let len = u32::try_from(segment.len()).unwrap_or(u32::MAX);
    let pseudo = pseudo_header(ip.version, ip.src, ip.dst, PROTOCOL_TCP, len);
    if hdr.needs_csum() {
        if segment[16..18] != unfinished(&pseudo) {
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
    if written(&pseudo.add_slice(segment)) != [0, 0] {
        return wrong("TCP checksum");
    }
    Ok(())
}
