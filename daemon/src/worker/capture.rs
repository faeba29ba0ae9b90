//! A copy of a port's frames for an operator: pcap records in a bounded buffer.

use std::time::{SystemTime, UNIX_EPOCH};

use nightporter_api::Only;
use nightporter_core::monitor::pcap::{file_header, record_header};
use nightporter_core::time::Instant;
use nightporter_core::wire::packet::{Ip, L4, Net};

use super::watch::Crossing;

/// Bytes of records that may wait for a slow reader; then frames are missed, and counted. A reader
/// that loses its processor for 100 ms misses none at 2.6 Gbit/s. Taken only while it is slow.
pub(super) const BUFFER_BYTES_MAX: usize = 32 << 20;

/// Wall-clock nanoseconds at instant zero, if the wall clock says that it is `now`.
pub(super) fn epoch_ns(now: Instant) -> u64 {
    let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(wall.as_nanos()).unwrap_or(u64::MAX).saturating_sub(now.as_nanos())
}

/// The frames that a client wants, and how much of each.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Taking {
    pub(super) snap_bytes: Option<u32>,
    pub(super) only: Only,
}

impl Taking {
    fn wants(&self, crossing: &Crossing<'_>) -> bool {
        if self.only == Only::default() {
            return true;
        }
        let Some((packet, frame)) = crossing.packet() else { return false };
        let (hosts, ports) = match packet.net {
            Net::Ip(ip) => ([ip.src.to_ip(), ip.dst.to_ip()], ports_of(&ip, frame)),
            Net::Arp(arp) => ([arp.sender_ip.into(), arp.target_ip.into()], None),
            Net::Other => return false,
        };
        self.only.host.is_none_or(|host| hosts.contains(&host))
            && self.only.port.is_none_or(|port| ports.is_some_and(|ports| ports.contains(&port)))
    }
}

fn ports_of(ip: &Ip, frame: &[u8]) -> Option<[u16; 2]> {
    match ip.l4 {
        L4::Tcp(tcp) => Some([tcp.src_port, tcp.dst_port]),
        L4::Udp => {
            let head = frame.get(usize::from(ip.payload_offset)..)?.first_chunk::<4>()?;
            let [a, b, c, d] = *head;
            Some([u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d])])
        }
        _ => None,
    }
}

/// Frames of one port on their way to one client.
#[derive(Debug)]
pub(super) struct Capture {
    /// Wall-clock nanoseconds at instant zero: monotonic time alone means nothing in a file.
    epoch_ns: u64,
    taking: Taking,
    buffer: Vec<u8>,
    /// Frames that found the buffer full.
    pub(super) missed: u64,
}

impl Capture {
    /// Starts at `now`, which is the wall clock's now.
    #[must_use]
    pub(super) fn new(now: Instant, taking: Taking) -> Self {
        Self { epoch_ns: epoch_ns(now), taking, buffer: file_header().to_vec(), missed: 0 }
    }

    /// Starts one that gives a moment the same time as `other` does, so that captures of two ports
    /// can be put in order, turn by turn.
    #[must_use]
    pub(super) fn beside(other: &Self, taking: Taking) -> Self {
        Self { epoch_ns: other.epoch_ns, taking, buffer: file_header().to_vec(), missed: 0 }
    }

    /// Records one frame, if it is wanted.
    pub(super) fn record(&mut self, crossing: &Crossing<'_>) {
        if !self.taking.wants(crossing) {
            return;
        }
        let (now, parts) = (crossing.now, crossing.parts);
        let len: usize = parts.iter().map(|p| p.len()).sum();
        let kept = self.taking.snap_bytes.map_or(len, |most| len.min(most as usize));
        if self.buffer.len() + 16 + kept > BUFFER_BYTES_MAX {
            self.missed += 1;
            return;
        }
        let ns = self.epoch_ns.saturating_add(now.as_nanos());
        self.buffer.extend(record_header(ns, kept, len));
        let end = self.buffer.len() + kept;
        for part in parts {
            let room = end - self.buffer.len();
            self.buffer.extend_from_slice(&part[..part.len().min(room)]);
        }
    }

    /// The bytes since the last call; first of all the file's header.
    pub(super) fn take(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.buffer)
    }
}

#[cfg(test)]
mod tests {
    use pcap_file::pcap::PcapReader;

    use nightporter_core::port::PortId;

    use super::super::watch::Direction;
    use super::*;

    fn record(capture: &mut Capture, now: Instant, parts: &[&[u8]]) {
        capture.record(&Crossing::new(now, PortId(0), Direction::ToPort, parts));
    }

    #[test]
    fn another_implementation_reads_what_is_written() {
        let start = Instant::from_millis(7);
        let mut capture = Capture::new(start, Taking::default());
        record(&mut capture, start, &[b"headers", b"payload"]);
        record(&mut capture, Instant::from_millis(9), &[&[0x55; 65_000]]);
        let file = capture.take();
        let mut reader = PcapReader::new(&file[..]).unwrap();
        let first = reader.next_packet().unwrap().unwrap().into_owned();
        let second = reader.next_packet().unwrap().unwrap().into_owned();
        assert_eq!(&first.data[..], b"headerspayload");
        assert_eq!((second.data.len(), second.orig_len), (65_000, 65_000));
        assert_eq!((second.timestamp - first.timestamp).as_micros(), 2000);
        assert!(reader.next_packet().is_none());
    }

    /// IPv4, with these bytes behind its header.
    fn packet(src: [u8; 4], dst: [u8; 4], protocol: u8, body: &[u8]) -> Vec<u8> {
        let len = 20 + u8::try_from(body.len()).unwrap();
        let head = [0x45, 0, 0, len, 0, 0, 0, 0, 64, protocol, 0, 0];
        [&[2; 12][..], &[8, 0], &head, &src, &dst, body].concat()
    }

    #[test]
    fn only_what_is_wanted_is_taken_and_as_much_of_it() {
        let (a, b) = ([10, 0, 0, 1], [10, 0, 0, 2]);
        let udp = packet(a, b, 17, &[0, 53, 0x9c, 0x40, 0, 8, 0, 0]);
        let tcp =
            packet(b, a, 6, &[&[0x9c, 0x40, 0, 80][..], &[0; 8], &[0x50, 16], &[0; 6]].concat());
        let icmp = packet(a, b, 1, &[8; 8]);
        let arp =
            [&[2; 12][..], &[8, 6, 0, 1, 8, 0, 6, 4, 0, 1], &[2; 6], &a, &[0; 6], &b].concat();
        let other = [&[2; 12][..], &[0x88, 0xb5], &[0; 46]].concat();
        let frames = [udp, tcp, icmp, arp, other];
        let host = |ip: [u8; 4]| Some(ip.into());
        for (only, taken) in [
            (Only::default(), [true; 5]),
            (Only { host: host(a), port: None }, [true, true, true, true, false]),
            (Only { host: host([10, 0, 0, 3]), port: None }, [false; 5]),
            (Only { host: None, port: Some(53) }, [true, false, false, false, false]),
            (Only { host: None, port: Some(40_000) }, [true, true, false, false, false]),
            (Only { host: host(b), port: Some(80) }, [false, true, false, false, false]),
        ] {
            for (frame, taken) in frames.iter().zip(taken) {
                let mut capture =
                    Capture::new(Instant::ZERO, Taking { snap_bytes: Some(20), only });
                let (head, rest) = frame.split_at(14);
                record(&mut capture, Instant::ZERO, &[head, rest]);
                let file = capture.take();
                let first = PcapReader::new(&file[..])
                    .unwrap()
                    .next_packet()
                    .map(|p| p.unwrap().into_owned());
                let seen = first.map(|p| (p.data.to_vec(), p.orig_len as usize));
                assert_eq!(seen, taken.then(|| (frame[..20].to_vec(), frame.len())), "{only:?}");
            }
        }
    }

    #[test]
    fn captures_that_run_together_give_a_moment_the_same_time() {
        let mut first = Capture::new(Instant::from_millis(7), Taking::default());
        let mut second = Capture::beside(&first, Taking::default());
        for capture in [&mut first, &mut second] {
            record(capture, Instant::from_millis(9), &[b"a frame"]);
        }
        assert_eq!(first.take(), second.take());
    }

    #[test]
    fn a_full_buffer_misses_whole_frames() {
        let mut capture = Capture::new(Instant::ZERO, Taking::default());
        let frames = BUFFER_BYTES_MAX / 65_016 + 3;
        for _ in 0..frames {
            record(&mut capture, Instant::ZERO, &[&[0; 65_000]]);
        }
        assert_eq!(capture.missed, 3);
        assert_eq!(capture.take().len(), 24 + (frames - 3) * 65_016);
    }
}
