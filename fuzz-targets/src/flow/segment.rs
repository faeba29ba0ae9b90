//! Arbitrary segments: numbers relative to the state of the connection, made into frames by code
//! that is not the core's, so that the code under test does not make its own input.

use arbitrary::Arbitrary;
use nightporter_check::frame::Frame;
use nightporter_check::stream::Stream;
use nightporter_check::wire::{self, TcpFlags};
use nightporter_core::wire::virtio_net::VirtioNetHdr;

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

/// A number of the connection.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub(super) enum Base {
    /// The number of an honest end.
    Usual,
    /// The other end's acknowledgement.
    Low,
    /// The end of the bytes in order.
    High,
    /// The right edge.
    Edge,
    /// The end of the bytes that were handed over.
    Given,
    /// The end of the bytes out of order, or the FIN.
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

    /// The number, where `base` is the meaning of [`Self::base`].
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
    /// SACK blocks above the acknowledgement: start and length in hundreds of bytes.
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
    /// The next segment of an honest end.
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

    /// The frame, and a tap's header for it.
    pub(super) fn frame(&self, from: Address, to: Address) -> (VirtioNetHdr, Vec<u8>) {
        let record_route = matches!(self.extra, Extra::IpOption);
        let mut options = self.options.clone();
        if let Extra::Option(kind) = self.extra {
            options.extend([kind, 4, 0, 0]);
        }
        options.truncate(40);
        let segment = wire::Segment {
            src_mac: from.mac,
            dst_mac: to.mac,
            src: from.ip.into(),
            dst: to.ip.into(),
            ecn: if let Extra::Ecn(bits) = self.extra { bits & 3 } else { 0 },
            id: 7,
            ip_options: if record_route { vec![7, 7, 4, 0, 0, 0, 0, 0] } else { Vec::new() },
            src_port: from.port,
            dst_port: to.port,
            seq: self.seq,
            ack: self.ack,
            flags: TcpFlags(self.flags.into()),
            window: self.window,
            urgent: if self.flags & URG != 0 { 5 } else { 0 },
            options,
            offload: self.is_offloaded().then_some(MSS),
            ..wire::Segment::default()
        };
        let Frame { hdr, mut bytes } = segment.frame(&self.payload);
        if self.is_corrupt() {
            let checksum = ETHERNET + 20 + segment.ip_options.len() + 16;
            bytes[checksum + 1] ^= 0x40;
        }
        if matches!(self.extra, Extra::Padding) {
            bytes.resize(bytes.len().max(60), 0xee);
        }
        (hdr, bytes)
    }
}

/// Byte `at` of the stream of one end and all behind it; `other` are not the right ones.
pub(super) fn stream(at: u64, len: u16, other: bool) -> Vec<u8> {
    let mut bytes = vec![0; len.into()];
    Stream::of(0, other).fill(at, &mut bytes);
    bytes
}
