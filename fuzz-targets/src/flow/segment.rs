//! Segments by wish: numbers relative to where the connection stands, made into frames by hand, so
//! that nothing of what is tested makes what it is tested with.

use arbitrary::Arbitrary;
use nightporter_core::wire::checksum::{Checksum, fold, pseudo_header_v4, sum};
use nightporter_core::wire::virtio_net::{F_NEEDS_CSUM, GSO_NONE, GSO_TCPV4, VirtioNetHdr};

pub(super) const FIN: u8 = 1;
pub(super) const SYN: u8 = 2;
pub(super) const RST: u8 = 4;
pub(super) const PSH: u8 = 8;
pub(super) const ACK: u8 = 16;
pub(super) const URG: u8 = 32;
pub(super) const ECE: u8 = 64;
pub(super) const CWR: u8 = 128;

/// Payload bytes of a full segment.
pub(super) const MSS: u16 = 1000;
/// Longest payload in one frame.
const SUPER_MAX: u16 = 64_000;
const ETHERNET: usize = 14;
const TCP: u8 = 6;

/// A number of the connection.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub(super) enum Base {
    /// What an honest end would say.
    Usual,
    /// What the other has acknowledged.
    Low,
    /// The end of what is in order.
    High,
    /// The right edge.
    Edge,
    /// The end of what was handed over.
    Given,
    /// The end of what is out of order, or the FIN.
    Odd,
}

/// A distance from it.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub(super) enum By {
    Nothing,
    Little(i8),
    Segments(i8),
    Any(i32),
}

/// A sequence or acknowledgement number.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub(super) struct At {
    pub(super) base: Base,
    by: By,
}

impl At {
    pub(super) const USUAL: Self = Self { base: Base::Usual, by: By::Nothing };

    /// The number, `base` being what [`Self::base`] stands for.
    pub(super) fn from(self, base: u64) -> u64 {
        base.wrapping_add_signed(match self.by {
            By::Nothing => 0,
            By::Little(n) => n.into(),
            By::Segments(n) => i64::from(n) * i64::from(MSS),
            By::Any(n) => n.into(),
        })
    }
}

#[derive(Arbitrary, Clone, Copy, Debug)]
pub(super) enum Len {
    Nothing,
    Full,
    Short(u8),
    Super(u16),
}

impl Len {
    pub(super) fn bytes(self) -> u16 {
        match self {
            Self::Nothing => 0,
            Self::Full => MSS,
            Self::Short(n) => n.into(),
            Self::Super(n) => n % SUPER_MAX,
        }
    }
}

#[derive(Arbitrary, Clone, Copy, Debug)]
pub(super) enum Flags {
    Usual,
    Fin,
    Rst,
    Syn,
    Urgent,
    Odd(u8),
}

impl Flags {
    pub(super) const fn bits(self) -> u8 {
        match self {
            Self::Usual => ACK | PSH,
            Self::Fin => ACK | FIN,
            Self::Rst => RST,
            Self::Syn => SYN,
            Self::Urgent => ACK | URG,
            Self::Odd(bits) => bits,
        }
    }
}

#[derive(Arbitrary, Clone, Copy, Debug)]
pub(super) enum Window {
    Same,
    Shut,
    Small(u8),
    Any(u16),
}

impl Window {
    /// The field, `same` being the one before.
    pub(super) fn field(self, same: u16) -> u16 {
        match self {
            Self::Same => same,
            Self::Shut => 0,
            Self::Small(n) => n.into(),
            Self::Any(n) => n,
        }
    }
}

#[derive(Arbitrary, Clone, Copy, Debug)]
pub(super) enum Ts {
    Right,
    Older(u8),
    Newer(u8),
    /// Ahead, but not so far that two such steps are half the circle.
    Far(u32),
    Without,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
pub(super) enum Extra {
    Nothing,
    /// The checksum is wrong.
    BadSum,
    /// Not the bytes that were sent before, if they were.
    OtherBytes,
    /// A TCP option of this kind.
    Option(u8),
    /// SACK blocks above what is acknowledged: start and length in hundreds of bytes.
    Sack([(u8, u8); 2]),
    /// ECN bits.
    Ecn(u8),
    /// An IP option.
    IpOption,
    /// Bytes behind the packet.
    Padding,
    /// As the kernel hands it over: unfinished checksum, any length.
    Offloaded,
}

/// A segment that one end sends.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub(super) struct Wish {
    pub(super) seq: At,
    pub(super) len: Len,
    pub(super) flags: Flags,
    pub(super) ack: At,
    pub(super) window: Window,
    pub(super) ts: Ts,
    pub(super) extra: Extra,
}

impl Wish {
    /// What an honest end sends next.
    pub(super) const fn usual(len: Len) -> Self {
        Self {
            seq: At::USUAL,
            len,
            flags: Flags::Usual,
            ack: At::USUAL,
            window: Window::Same,
            ts: Ts::Right,
            extra: Extra::Nothing,
        }
    }
}

/// One end, below and beside TCP.
#[derive(Clone, Copy, Debug)]
pub(super) struct Address {
    pub(super) mac: [u8; 6],
    pub(super) ip: [u8; 4],
    pub(super) port: u16,
}

/// A segment with all its numbers.
#[derive(Clone, Debug)]
pub(super) struct Segment {
    pub(super) seq: u32,
    pub(super) ack: u32,
    pub(super) flags: u8,
    pub(super) window: u16,
    /// Whole words.
    pub(super) options: Vec<u8>,
    pub(super) payload: Vec<u8>,
    pub(super) extra: Extra,
}

/// The timestamps option, padded.
pub(super) fn timestamps(tsval: u32, tsecr: u32) -> Vec<u8> {
    let mut option = vec![1, 1, 8, 10];
    option.extend(tsval.to_be_bytes());
    option.extend(tsecr.to_be_bytes());
    option
}

impl Segment {
    /// The checksum that is in the frame will not do.
    pub(super) fn is_corrupt(&self) -> bool {
        matches!(self.extra, Extra::BadSum) && !self.is_offloaded()
    }

    fn is_offloaded(&self) -> bool {
        matches!(self.extra, Extra::Offloaded) || self.payload.len() > usize::from(MSS) + 448
    }

    /// The frame, and what a tap says about it.
    pub(super) fn frame(&self, from: Address, to: Address) -> (VirtioNetHdr, Vec<u8>) {
        let ip_options: &[u8] =
            if matches!(self.extra, Extra::IpOption) { &[7, 7, 4, 0, 0, 0, 0, 0] } else { &[] };
        let mut options = self.options.clone();
        if let Extra::Option(kind) = self.extra {
            options.extend([kind, 4, 0, 0]);
        }
        options.truncate(40);
        let tcp_len = 20 + options.len() + self.payload.len();
        let ip_len = 20 + ip_options.len() + tcp_len;
        let mut frame = Vec::with_capacity(ETHERNET + ip_len);
        frame.extend(to.mac);
        frame.extend(from.mac);
        frame.extend([8, 0, 0x45 + octet(ip_options.len() / 4)]);
        frame.push(if let Extra::Ecn(bits) = self.extra { bits & 3 } else { 0 });
        frame.extend(word(ip_len).to_be_bytes());
        frame.extend([0, 7, 0x40, 0, 64, TCP, 0, 0]);
        frame.extend(from.ip);
        frame.extend(to.ip);
        frame.extend(ip_options);
        let l4 = frame.len();
        let check = Checksum::new(sum(&frame[ETHERNET..], 0)).finish();
        frame[ETHERNET + 10..ETHERNET + 12].copy_from_slice(&check.to_be_bytes());
        frame.extend(from.port.to_be_bytes());
        frame.extend(to.port.to_be_bytes());
        frame.extend(self.seq.to_be_bytes());
        frame.extend(self.ack.to_be_bytes());
        frame.extend([octet((5 + options.len() / 4) << 4), self.flags]);
        frame.extend(self.window.to_be_bytes());
        frame.extend([0, 0, 0, if self.flags & URG != 0 { 5 } else { 0 }]);
        frame.extend(options);
        let header_len = frame.len();
        frame.extend(&self.payload);
        let pseudo = pseudo_header_v4(from.ip, to.ip, TCP, word(tcp_len).into());
        let mut hdr = VirtioNetHdr::default();
        let check = if self.is_offloaded() {
            let gso = self.payload.len() > usize::from(MSS);
            hdr = VirtioNetHdr {
                flags: F_NEEDS_CSUM,
                gso_type: if gso { GSO_TCPV4 } else { GSO_NONE },
                hdr_len: word(header_len),
                gso_size: if gso { MSS } else { 0 },
                csum_start: word(l4),
                csum_offset: 16,
            };
            fold(pseudo)
        } else {
            let right = Checksum::new(sum(&frame[l4..], pseudo)).finish();
            if self.is_corrupt() { right ^ 0x40 } else { right }
        };
        frame[l4 + 16..l4 + 18].copy_from_slice(&check.to_be_bytes());
        if matches!(self.extra, Extra::Padding) {
            frame.resize(frame.len().max(60), 0xee);
        }
        (hdr, frame)
    }
}

/// Byte `at` of the stream of one end and all behind it; `other` are not the right ones.
pub(super) fn stream(at: u64, len: u16, other: bool) -> Vec<u8> {
    let byte = |at: u64| {
        let x = at.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        x.to_be_bytes()[0] ^ x.to_be_bytes()[4] ^ if other { 0x5a } else { 0 }
    };
    (at..).take(len.into()).map(byte).collect()
}

fn octet(n: usize) -> u8 {
    u8::try_from(n).expect("a header field")
}

fn word(n: usize) -> u16 {
    u16::try_from(n).expect("a header field")
}
