//! Headers of frames whose ends were cut off, as in a [`Log`](super::log::Log) or a capture of the
//! first bytes of each frame.

use crate::drops::DropReason;
use crate::limits::FRAME_BYTES_MAX;
use crate::wire::packet::{L4, Net, Packet};

/// Bytes that hold all headers: Ethernet with two tags 22, IPv6 with the extension headers that are
/// read 40 + 256, TCP 60.
const HEADERS_MAX: usize = 22 + 40 + 256 + 60;

/// Room for a frame, of which only the headers are ever filled in: the parser checks lengths, and
/// reads no payload.
#[derive(Clone, Debug)]
pub struct Headers(Box<[u8]>);

impl Default for Headers {
    fn default() -> Self {
        Self(vec![0; FRAME_BYTES_MAX].into())
    }
}

impl Headers {
    /// Reads a frame of `len` bytes of which `head` is left.
    ///
    /// # Errors
    /// As [`Packet::parse`], and [`DropReason::Truncated`] if headers were cut off, or if the frame
    /// is longer than [`FRAME_BYTES_MAX`].
    pub fn parse(&mut self, head: &[u8], len: usize) -> Result<Packet, DropReason> {
        if head.len() >= len {
            return Packet::parse(head);
        }
        let frame = self.0.get_mut(..len).ok_or(DropReason::Truncated)?;
        let known = head.len().min(HEADERS_MAX);
        frame[..known].copy_from_slice(&head[..known]);
        // Nothing of the frame before it is read as this one's.
        frame.iter_mut().take(HEADERS_MAX).skip(known).for_each(|b| *b = 0);
        let packet = Packet::parse(frame)?;
        let headers = match (&packet.net, packet.tcp()) {
            (_, Some((_, tcp))) => tcp.payload_offset as usize,
            (Net::Ip(ip), None) if ip.l4 == L4::MalformedTcp => usize::from(ip.payload_offset) + 20,
            (Net::Ip(ip), None) => usize::from(ip.payload_offset),
            (Net::Arp(_), None) => len,
            (Net::Other, None) => usize::from(packet.eth.len),
        };
        if headers <= known { Ok(packet) } else { Err(DropReason::Truncated) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::samples::{v4_segment, v6_segment};

    #[test]
    fn a_frame_is_read_as_the_whole_one_or_not_at_all() {
        let mut headers = Headers::default();
        let segments = [v4_segment(&[0x45; 900]), v6_segment(&[0x60; 900])];
        for frame in segments.map(|segment| segment.frame()) {
            let whole = Packet::parse(&frame).unwrap();
            let start = whole.tcp().unwrap().1.payload_offset as usize;
            for known in 0..frame.len() {
                let read = headers.parse(&frame[..known], frame.len());
                assert_eq!(read.ok(), (known >= start).then_some(whole), "{known} bytes");
            }
            assert_eq!(headers.parse(&frame, frame.len()), Ok(whole));
        }
        assert_eq!(headers.parse(&[0; 60], 1 << 20), Err(DropReason::Truncated));
    }
}
