//! Segments as text: `P. 1:1001 ack 1 win 65536 <ts 10 5> <sack 2001:3001>`.
//!
//! The words, in any order; what is left out is chosen when sending and not looked at when
//! expecting:
//!
//! | word | meaning |
//! |---|---|
//! | `.` `P.` `F.` `S` `R.` ... | flags; left out: an ACK, PSH optional |
//! | `1:1001` or `1001` | sequence range; left out: what comes next |
//! | `ack 1` | left out: as in the segment before |
//! | `win 65536`, `edge 65537` | window in bytes, or where it ends |
//! | `<ts 10 5>` `<ts - 5>` `<nots>` | TSval and TSecr, relative to the two clocks |
//! | `<sack 2001:3001 ...>` | blocks; left out when expecting: none |
//! | `<opt 1e03..>` | raw option bytes |
//! | `fill A` | payload of this byte instead of the stream's pattern |
//! | `urg 5` | URG and the pointer |
//! | `ce` `ect0` `notect` | ECN codepoint |
//! | `badsum` `pad` `partial` `gso 1000` `ipopt` | what the frame is wrapped in |

use nightporter_core::wire::checksum::{Checksum, update16};
use nightporter_core::wire::packet::{Eth, IpVersion, Packet, Tcp, TcpFlags, tcp_pseudo_header};
use nightporter_core::wire::virtio_net::VirtioNetHdr;

/// A segment to send or to expect. Sequence numbers are relative.
#[derive(Clone, Debug, Default)]
pub struct Spec {
    pub flags: Option<TcpFlags>,
    pub seq: Option<(i64, i64)>,
    pub ack: Option<i64>,
    pub window: Option<u32>,
    pub edge: Option<i64>,
    pub tsval: Option<u32>,
    pub tsecr: Option<u32>,
    pub no_ts: bool,
    pub sack: Vec<(i64, i64)>,
    pub raw_options: Vec<u8>,
    pub fill: Option<u8>,
    pub urgent: Option<u16>,
    pub ecn: Option<u8>,
    pub bad_checksum: bool,
    pub padded: bool,
    pub partial: bool,
    pub gso: Option<u16>,
    pub ip_options: bool,
}

impl Spec {
    /// Reads the text form; panics on a word it does not know, since that is a broken test.
    pub fn parse(text: &str) -> Self {
        let mut spec = Self::default();
        let mut rest = text.trim();
        while !rest.is_empty() {
            let after;
            if let Some(option) = rest.strip_prefix('<') {
                let (option, tail) = option.split_once('>').expect("an option ends with >");
                spec.option(option);
                after = tail;
            } else {
                let (word, tail) = rest.split_once(' ').unwrap_or((rest, ""));
                after = spec.word(word, tail.trim_start());
            }
            rest = after.trim_start();
        }
        spec
    }

    fn word<'t>(&mut self, word: &str, tail: &'t str) -> &'t str {
        let mut tail = tail;
        let mut argument = || {
            let (word, rest) = tail.split_once(' ').unwrap_or((tail, ""));
            tail = rest;
            word.to_owned()
        };
        let number = |s: &str| s.parse::<i64>().unwrap_or_else(|_| panic!("`{s}`: no number"));
        match word {
            "ack" => self.ack = Some(number(&argument())),
            "win" => self.window = Some(argument().parse().expect("a window")),
            "edge" => self.edge = Some(number(&argument())),
            "fill" => self.fill = argument().bytes().next(),
            "urg" => self.urgent = Some(argument().parse().expect("a pointer")),
            "gso" => self.gso = Some(argument().parse().expect("a size")),
            "ce" => self.ecn = Some(3),
            "ect0" => self.ecn = Some(2),
            "notect" => self.ecn = Some(0),
            "badsum" => self.bad_checksum = true,
            "pad" => self.padded = true,
            "partial" => self.partial = true,
            "ipopt" => self.ip_options = true,
            _ if word.starts_with(|c: char| c.is_ascii_digit() || c == '-') => {
                let (from, to) = word.split_once(':').unwrap_or((word, word));
                self.seq = Some((number(from), number(to)));
            }
            _ => self.flags = Some(flags(word)),
        }
        tail
    }

    fn option(&mut self, text: &str) {
        let mut words = text.split_whitespace();
        match words.next() {
            Some("ts") => {
                self.tsval = words.next().and_then(|w| w.parse().ok());
                self.tsecr = words.next().and_then(|w| w.parse().ok());
            }
            Some("nots") => self.no_ts = true,
            Some("sack") => {
                let range = |w: &str| w.split_once(':').map(|(a, b)| (a.parse(), b.parse()));
                for (a, b) in words.map(|w| range(w).expect("a:b")) {
                    self.sack.push((a.expect("a number"), b.expect("a number")));
                }
            }
            Some("opt") => {
                let hex: String = words.collect();
                let byte = |i: usize| u8::from_str_radix(&hex[i..i + 2], 16).expect("hex");
                self.raw_options = (0..hex.len()).step_by(2).map(byte).collect();
            }
            other => panic!("option {other:?}"),
        }
    }
}

fn flags(word: &str) -> TcpFlags {
    word.chars().fold(TcpFlags::NONE, |sum, c| {
        sum | match c {
            '.' => TcpFlags::ACK,
            'S' => TcpFlags::SYN,
            'F' => TcpFlags::FIN,
            'R' => TcpFlags::RST,
            'P' => TcpFlags::PSH,
            'U' => TcpFlags::URG,
            'E' => TcpFlags::ECE,
            'W' => TcpFlags::CWR,
            'e' => TcpFlags::AE,
            '0' => TcpFlags::NONE,
            _ => panic!("`{word}`: no word of a segment"),
        }
    })
}

/// Byte `offset` (relative to the ISN, modulo 2^32) of the stream with this `salt`.
pub fn pattern(salt: u32, offset: u32) -> u8 {
    let x = (offset ^ salt).wrapping_mul(0x9e37_79b1);
    (x >> 24) as u8 ^ (x >> 13) as u8
}

/// `len` bytes of the stream from `offset` on.
pub fn pattern_bytes(salt: u32, offset: u32, len: usize) -> Vec<u8> {
    (offset..).take(len).map(|at| pattern(salt, at)).collect()
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
                Some(flags) => tcp.flags.without(TcpFlags::PSH) == flags.without(TcpFlags::PSH),
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

/// Adds TCP options behind those a frame has; `options` must fill whole words.
pub fn insert_options(frame: &mut Vec<u8>, options: &[u8]) {
    if options.is_empty() {
        return;
    }
    let packet = Packet::parse(frame).expect("our own frame");
    let (_, tcp) = packet.tcp().expect("TCP");
    let at = tcp.payload_offset as usize;
    let l4 = usize::from(packet.tcp().expect("TCP").0.payload_offset);
    frame.splice(at..at, options.iter().copied());
    frame[l4 + 12] += u8::try_from(options.len() / 4 * 16).expect("fits a header");
    lengthen(frame, options.len());
    fix_tcp_checksum(frame);
}

/// Adds an IPv4 record-route option, of which nothing is filled in.
pub fn insert_ip_options(frame: &mut Vec<u8>, l2_len: usize) {
    assert_eq!(frame[l2_len], 0x45, "IPv4 without options");
    frame.splice(l2_len + 20..l2_len + 20, [7, 7, 4, 0, 0, 0, 0, 0]);
    frame[l2_len] = 0x47;
    lengthen(frame, 8);
}

/// The IP header counts `more` bytes.
fn lengthen(frame: &mut [u8], more: usize) {
    let more = u16::try_from(more).expect("small");
    let l2 = usize::from(Eth::parse(frame).expect("Ethernet").len);
    let v4 = frame[l2] >> 4 == 4;
    let at = if v4 { l2 + 2 } else { l2 + 4 };
    let len = u16::from_be_bytes([frame[at], frame[at + 1]]) + more;
    frame[at..at + 2].copy_from_slice(&len.to_be_bytes());
    if v4 {
        fix_ip_checksum(frame, l2);
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
    let header = usize::from(frame[l2] & 15) * 4;
    frame[l2 + 10..l2 + 12].fill(0);
    let mut sum = Checksum::new(0);
    sum.add_bytes(&frame[l2..l2 + header]);
    let check = sum.finish();
    frame[l2 + 10..l2 + 12].copy_from_slice(&check.to_be_bytes());
}

/// Recomputes the TCP checksum from nothing.
pub fn fix_tcp_checksum(frame: &mut [u8]) {
    let l2 = usize::from(Eth::parse(frame).expect("Ethernet").len);
    let (version, at, end) = if frame[l2] >> 4 == 4 {
        let total = usize::from(u16::from_be_bytes([frame[l2 + 2], frame[l2 + 3]]));
        (IpVersion::V4, l2 + usize::from(frame[l2] & 15) * 4, l2 + total)
    } else {
        let payload = usize::from(u16::from_be_bytes([frame[l2 + 4], frame[l2 + 5]]));
        (IpVersion::V6, l2 + 40, l2 + 40 + payload)
    };
    let packet = Packet::parse(frame).expect("parses");
    let nightporter_core::wire::packet::Net::Ip(ip) = packet.net else { panic!("IP") };
    let len = u32::try_from(end - at).expect("small");
    frame[at + 16..at + 18].fill(0);
    let mut sum = Checksum::new(tcp_pseudo_header(version, ip.src, ip.dst, len));
    sum.add_bytes(&frame[at..end]);
    let check = sum.finish();
    frame[at + 16..at + 18].copy_from_slice(&check.to_be_bytes());
}

/// Overwrites a 16-bit word of the TCP header at `l4` and keeps the full checksum right.
pub fn put_tcp_word(frame: &mut [u8], l4: usize, at: usize, word: u16) {
    let old = u16::from_be_bytes([frame[l4 + at], frame[l4 + at + 1]]);
    frame[l4 + at..l4 + at + 2].copy_from_slice(&word.to_be_bytes());
    let check = update16(u16::from_be_bytes([frame[l4 + 16], frame[l4 + 17]]), old, word);
    frame[l4 + 16..l4 + 18].copy_from_slice(&check.to_be_bytes());
}
