//! Frames that leave the engine, compared with those that a trace expects; frames changed by hand.

use etherparse::checksum::Sum16BitWords;
use nightporter_check::stream::streams_of;
use nightporter_check::wire::{self, written};
use nightporter_core::wire::packet::{Packet, Tcp, TcpFlags};
use nightporter_core::wire::virtio_net::VirtioNetHdr;
use nightporter_testkit::segment::Spec;

/// `len` bytes of the stream of R (0) or G (1) from number `first` on, relative to the ISN. Bytes
/// before a stream are rubbish.
pub fn pattern_bytes(side: u32, first: i64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    let rubbish = usize::try_from(1 - first).unwrap_or(0).min(len);
    let stream = streams_of(0, true)[side as usize];
    stream.fill(u64::try_from(first - 1).unwrap_or(0), &mut bytes[rubbish..]);
    bytes
}

/// A frame that came out of the engine.
#[derive(Clone, Debug)]
pub struct Seen {
    pub hdr: VirtioNetHdr,
    pub bytes: Vec<u8>,
    pub packet: Packet,
    /// Initial sequence numbers of who sent it and of who gets it, and their clocks.
    pub isn: [u32; 2],
    pub clock: [u32; 2],
    /// Shift of its window.
    pub shift: u8,
}

impl Seen {
    /// The TCP segment; panics if it is something else.
    pub fn tcp(&self) -> &Tcp {
        self.packet.tcp().expect("a TCP segment").1
    }

    /// Its payload.
    pub fn payload(&self) -> &[u8] {
        let from = self.tcp().payload_offset as usize;
        &self.bytes[from..from + self.tcp().payload_len as usize]
    }

    /// Relative sequence range, SYN and FIN not counted.
    pub fn range(&self) -> (u32, u32) {
        let from = self.tcp().seq.0.wrapping_sub(self.isn[0]);
        (from, from.wrapping_add(self.tcp().payload_len))
    }

    /// Relative acknowledgement number.
    pub fn ack(&self) -> u32 {
        self.tcp().ack.0.wrapping_sub(self.isn[1])
    }

    /// Window in bytes.
    pub fn window(&self) -> u32 {
        u32::from(self.tcp().window) << if self.tcp().flags.syn() { 0 } else { self.shift }
    }

    /// SACK blocks, relative.
    pub fn sack(&self) -> Vec<(u32, u32)> {
        let blocks = self.tcp().options.sack;
        let relative = |seq: u32| seq.wrapping_sub(self.isn[1]);
        blocks.as_slice().iter().map(|(a, b)| (relative(a.0), relative(b.0))).collect()
    }

    /// Compares with what a test expects; the error says what differs.
    pub fn matches(&self, want: &Spec) -> Result<(), String> {
        let tcp = self.tcp();
        let check = |what: &str, ok: bool| if ok { Ok(()) } else { Err(what.to_owned()) };
        let usual = TcpFlags::ACK | TcpFlags::PSH;
        check(
            "flags",
            match want.flags {
                Some(want) => (tcp.flags.0 ^ want.0) & !TcpFlags::PSH.0 == 0,
                None => tcp.flags.ack() && !tcp.flags.intersects(!usual),
            },
        )?;
        let low = |n: i64| u32::try_from(n & 0xffff_ffff).expect("masked");
        if let Some((from, to)) = want.seq {
            check("sequence range", self.range() == (low(from), low(to)))?;
        }
        if let Some(ack) = want.ack {
            check("ack", self.ack() == low(ack))?;
        }
        if let Some(window) = want.window {
            check(&format!("window, which is {}", self.window()), self.window() == window)?;
        }
        if let Some(edge) = want.edge {
            let is = self.ack().wrapping_add(self.window());
            check(&format!("edge, which is {is}"), is == low(edge))?;
        }
        let blocks: Vec<_> = want.sack.iter().map(|&(a, b)| (low(a), low(b))).collect();
        check("SACK blocks", self.sack() == blocks)?;
        let ts = tcp.options.timestamps;
        let is = ts.map(|t| [t.tsval, t.tsecr]).unwrap_or_default();
        let of = |i: usize| is[i].wrapping_sub(self.clock[i]);
        check("timestamps are there", !want.no_ts || ts.is_none())?;
        if let Some(tsval) = want.tsval {
            check(&format!("TSval, which is {}", of(0)), ts.is_some() && of(0) == tsval)?;
        }
        if let Some(tsecr) = want.tsecr {
            check(&format!("TSecr, which is {}", of(1)), ts.is_some() && of(1) == tsecr)?;
        }
        if let Some(fill) = want.fill {
            check("payload", self.payload().iter().all(|b| *b == fill))?;
        }
        if let Some(urgent) = want.urgent {
            check("urgent pointer", tcp.urgent == urgent)?;
        }
        if let Some(ecn) = want.ecn {
            check("ECN", self.packet.tcp().expect("TCP").0.tos & 3 == ecn)?;
        }
        Ok(())
    }
}

/// Cuts an IPv4 frame in two fragments; the first holds `first` bytes of IP payload.
pub fn fragments(frame: &[u8], first: usize) -> [Vec<u8>; 2] {
    let payload = &frame[34..];
    assert_eq!(first % 8, 0);
    let piece = |bytes: &[u8], offset: u16, more: bool| {
        let mut f = [&frame[..34], bytes].concat();
        let len = u16::try_from(bytes.len() + 20).expect("small");
        f[16..18].copy_from_slice(&len.to_be_bytes());
        let word = (offset / 8) | if more { 0x2000 } else { 0 };
        f[20..22].copy_from_slice(&word.to_be_bytes());
        fix_ip_checksum(&mut f, 14);
        f
    };
    let second = u16::try_from(first).expect("small");
    [piece(&payload[..first], 0, true), piece(&payload[first..], second, false)]
}

/// Recomputes the checksum of an IPv4 header that starts at `l2`.
pub fn fix_ip_checksum(frame: &mut [u8], l2: usize) {
    let header = l2..l2 + usize::from(frame[l2] & 15) * 4;
    frame[l2 + 10..l2 + 12].fill(0);
    let sum = Sum16BitWords::new().add_slice(&frame[header]);
    frame[l2 + 10..l2 + 12].copy_from_slice(&written(&sum));
}

/// Recomputes the TCP checksum from nothing.
pub fn fix_tcp_checksum(frame: &mut [u8]) {
    let packet = wire::Packet::parse(frame).expect("parses");
    let wire::Net::Ip(ip) = packet.net else { panic!("IP") };
    let (at, end) = (usize::from(ip.payload_offset), ip.end as usize);
    frame[at + 16..at + 18].fill(0);
    let len = u32::try_from(end - at).expect("small");
    let pseudo = wire::pseudo_header(ip.version, ip.src, ip.dst, wire::PROTOCOL_TCP, len);
    let check = written(&pseudo.add_slice(&frame[at..end]));
    frame[at + 16..at + 18].copy_from_slice(&check);
}
