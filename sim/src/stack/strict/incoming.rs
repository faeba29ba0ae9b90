//! A frame as a connection sees it: verified, and with unwrapped numbers.

use super::super::emit::TCP_CHECKSUM_AT;
use super::complaints::maybe_network;
use super::ranges::Place;
use crate::plan::Offloads;
use nightporter_check::frame::Frame;
use nightporter_check::wire::{
    F_DATA_VALID, Ip, PROTOCOL_TCP, Seq, Tcp, TcpFlags, Timestamps, ipv4_header_ok, pseudo_header,
    unfinished, written,
};

/// Congestion experienced, in the low two bits of the traffic class.
const CE: u8 = 3;

/// A segment of a connection. Numbers are unwrapped.
#[derive(Clone, Debug)]
pub(super) struct Incoming<'a> {
    pub(super) seq: Place,
    /// End of the payload: the place of the FIN, if there is one.
    pub(super) end: Place,
    pub(super) ack: Place,
    pub(super) flags: TcpFlags,
    /// As in the header.
    pub(super) window: u16,
    pub(super) timestamps: Option<Timestamps>,
    pub(super) sack: Vec<(Place, Place)>,
    pub(super) payload: &'a [u8],
    /// ECN bits of the IP header.
    pub(super) ecn: u8,
    /// Payload bytes per segment on a wire.
    pub(super) segment: usize,
    /// Bytes of TCP options.
    pub(super) options_len: usize,
}

impl<'a> Incoming<'a> {
    /// `isn` are the peer's and our own; `near` what is expected of sequence number and ACK.
    pub(super) fn new(
        frame: &'a Frame,
        ip: &Ip,
        tcp: &Tcp,
        isn: [u32; 2],
        near: [Place; 2],
    ) -> Self {
        let [peer, own] = isn;
        let at = tcp.payload_offset as usize;
        let payload = &frame.bytes[at..ip.end as usize];
        let seq = unwrap(tcp.seq.0, peer, near[0]) + i64::from(tcp.flags.syn());
        let gso = usize::from(frame.hdr.gso_size);
        let sack = tcp.options.sack.as_slice().iter();
        Self {
            seq: seq - i64::from(tcp.flags.syn()),
            end: seq + i64::try_from(payload.len()).expect("at most 64 KiB"),
            ack: unwrap(tcp.ack.0, own, near[1]),
            flags: tcp.flags,
            window: tcp.window,
            timestamps: tcp.options.timestamps,
            sack: sack
                .map(|b| (unwrap(b.0.0, own, near[1]), unwrap(b.1.0, own, near[1])))
                .collect(),
            payload,
            ecn: ip.tos & 3,
            segment: if frame.hdr.is_gso() { gso } else { payload.len() },
            options_len: at - usize::from(ip.payload_offset) - 20,
        }
    }

    /// It takes sequence space.
    pub(super) fn has_content(&self) -> bool {
        self.end > self.seq || self.flags.fin()
    }

    /// A router marked it.
    pub(super) const fn is_marked(&self) -> bool {
        self.ecn == CE
    }
}

/// The place whose number is `number` and that is nearest to `near`; place 0 has number `isn`.
pub(super) fn unwrap(number: u32, isn: u32, near: Place) -> Place {
    near + i64::from(Seq(number).after(Seq(wrap(near, isn))))
}

/// The number of a place.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "modulo 2^32")]
pub(super) const fn wrap(place: Place, isn: u32) -> u32 {
    isn.wrapping_add(place as u32)
}

/// The fault in a checksum or in the driver's flags for it, if there is one.
pub(super) fn checksum_fault(
    frame: &Frame,
    ip: &Ip,
    offloads: Offloads,
) -> Result<(), &'static str> {
    let (at, end) = (usize::from(ip.payload_offset), ip.end as usize);
    let len = u32::try_from(end - at).expect("at most 64 KiB");
    let pseudo = pseudo_header(ip.version, ip.src, ip.dst, PROTOCOL_TCP, len);
    let hdr = &frame.hdr;
    if !ipv4_header_ok(&frame.bytes, ip) {
        return Err(maybe_network!("wrong IP header checksum"));
    }
    if !offloads.takes(hdr) {
        return Err("unfinished segment for a driver without that offload");
    }
    if hdr.is_gso() && hdr.gso_size == 0 {
        return Err("super-segment without a segment size");
    }
    if hdr.needs_csum() {
        let field = &frame.bytes[at + TCP_CHECKSUM_AT..][..2];
        let right = usize::from(hdr.csum_start) == at
            && usize::from(hdr.csum_offset) == TCP_CHECKSUM_AT
            && field == unfinished(&pseudo);
        return if right { Ok(()) } else { Err("wrong partial checksum") };
    }
    if hdr.flags & F_DATA_VALID != 0 {
        return Ok(());
    }
    let check = written(&pseudo.add_slice(&frame.bytes[at..end]));
    if check == [0, 0] { Ok(()) } else { Err(maybe_network!("wrong checksum")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_unwrap_near_what_is_expected_also_across_zero() {
        assert_eq!(unwrap(5, 0xffff_fff0, 0), 21);
        assert_eq!(unwrap(0xffff_ffef, 0xffff_fff0, 0), -1);
        let far = 5 << 32;
        for near in [far - 1000, far, far + 1_000_000] {
            assert_eq!(unwrap(wrap(far, 77), 77, near), far);
        }
    }
}
