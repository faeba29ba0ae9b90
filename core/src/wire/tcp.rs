//! The TCP header and its options (RFC 9293 section 3.1), read once.

use super::ip::offset;
use super::seq::Seq;
use super::{be16, be32};
use core::fmt;
use core::ops::{BitAnd, BitOr, Not};

/// Bytes of a TCP header without options.
pub const HEADER: usize = 20;
/// Most bytes of a TCP header: 15 words.
pub(super) const HEADER_MAX: usize = 60;
/// Where the flags are in the TCP header: the AE bit is the lowest of byte 12.
pub(super) const FLAGS_AT: usize = 12;
/// Where the window is in the TCP header.
pub(super) const WINDOW_AT: usize = 14;
/// Where the checksum is in the TCP header, as a virtio-net header has it.
pub const TCP_CHECKSUM_AT: u16 = 16;
/// The same.
pub(super) const CHECKSUM_AT: usize = TCP_CHECKSUM_AT as usize;

/// Option kind: end of options.
pub(super) const KIND_END: u8 = 0;
/// Option kind: no operation, one byte.
pub(super) const KIND_NOP: u8 = 1;
/// Option kind: maximum segment size.
pub(super) const KIND_MSS: u8 = 2;
/// Option kind: window scale (RFC 7323 section 2).
pub(super) const KIND_WINDOW_SCALE: u8 = 3;
/// Option kind: SACK permitted (RFC 2018).
pub(super) const KIND_SACK_PERMITTED: u8 = 4;
/// Option kind: SACK blocks (RFC 2018).
pub(super) const KIND_SACK: u8 = 5;
/// Option kind: timestamps (RFC 7323 section 3).
pub(super) const KIND_TIMESTAMPS: u8 = 8;
/// Option kind: MD5 signature (RFC 2385).
pub(super) const KIND_MD5: u8 = 19;
/// Option kind: TCP Authentication Option (RFC 5925).
pub(super) const KIND_AO: u8 = 29;
/// Option kind: Multipath TCP (RFC 8684).
const KIND_MPTCP: u8 = 30;
/// Option kind: TCP Fast Open cookie (RFC 7413).
const KIND_FAST_OPEN: u8 = 34;
/// Option kind: shared experimental (RFC 6994).
const KIND_EXPERIMENTAL: u8 = 254;
/// Experiment identifier of TCP Fast Open before it had a kind of its own (RFC 7413 appendix).
const EXID_FAST_OPEN: [u8; 2] = [0xf9, 0x89];
/// The start of almost every segment's options (RFC 7323 appendix A).
pub(super) const NOP_NOP_TIMESTAMPS: [u8; 4] = [KIND_NOP, KIND_NOP, KIND_TIMESTAMPS, 10];

/// The nine flag bits of a TCP header.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub struct TcpFlags(pub u16);

macro_rules! flags {
    ($($doc:literal $name:ident $has:ident = $bit:literal,)+) => {
        impl TcpFlags {
            $(#[doc = $doc] pub const $name: Self = Self($bit);)+
            $(#[doc = concat!("Has ", stringify!($name), ".")]
            #[inline] #[must_use] pub const fn $has(self) -> bool { self.0 & $bit != 0 })+
        }
    };
}

flags! {
    "No more data from the sender." FIN fin = 0x001,
    "Synchronise sequence numbers." SYN syn = 0x002,
    "Reset the connection." RST rst = 0x004,
    "Push." PSH psh = 0x008,
    "The acknowledgement field counts." ACK ack = 0x010,
    "The urgent pointer counts." URG urg = 0x020,
    "ECN echo (RFC 3168)." ECE ece = 0x040,
    "Congestion window reduced (RFC 3168)." CWR cwr = 0x080,
    "Accurate ECN (RFC 9768), formerly the nonce sum." AE ae = 0x100,
}

impl TcpFlags {
    /// All nine bits.
    pub const ALL: Self = Self(0x1ff);
    /// No flag.
    pub const NONE: Self = Self(0);

    /// Every flag of `other` is set.
    #[inline]
    #[must_use]
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// At least one flag of `other` is set.
    #[inline]
    #[must_use]
    pub const fn intersects(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    /// Both sets together, in constants.
    #[inline]
    #[must_use]
    pub const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// `self` without the flags of `other`.
    #[inline]
    #[must_use]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }
}

impl BitOr for TcpFlags {
    type Output = Self;
    fn bitor(self, other: Self) -> Self {
        self.union(other)
    }
}

impl BitAnd for TcpFlags {
    type Output = Self;
    fn bitand(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }
}

impl Not for TcpFlags {
    type Output = Self;
    fn not(self) -> Self {
        Self(!self.0 & Self::ALL.0)
    }
}

impl fmt::Display for TcpFlags {
    /// As tcpdump: `S`, `S.`, `P.`, `FP.`, `.`, `R`; `none` without any.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const LETTERS: [(TcpFlags, &str); 9] = [
            (TcpFlags::FIN, "F"),
            (TcpFlags::SYN, "S"),
            (TcpFlags::RST, "R"),
            (TcpFlags::PSH, "P"),
            (TcpFlags::ACK, "."),
            (TcpFlags::URG, "U"),
            (TcpFlags::ECE, "E"),
            (TcpFlags::CWR, "W"),
            (TcpFlags::AE, "e"),
        ];
        if !self.intersects(Self::ALL) {
            return f.write_str("none");
        }
        for (_, letter) in LETTERS.iter().filter(|(flag, _)| self.contains(*flag)) {
            f.write_str(letter)?;
        }
        Ok(())
    }
}

/// The timestamps option (RFC 7323 section 3), in the sender's ticks.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub struct Timestamps {
    /// The sender's clock.
    pub tsval: u32,
    /// The newest clock that the sender received.
    pub tsecr: u32,
}

/// Up to four SACK blocks, each `(first byte, byte after the last)`, in the order of the option.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[repr(align(8))]
pub struct SackBlocks {
    len: u8,
    blocks: [(Seq, Seq); Self::MAX],
}

impl SackBlocks {
    /// Most blocks one option can hold: `(40 - 2) / 8`.
    pub const MAX: usize = 4;

    /// The first four of `blocks`.
    #[must_use]
    pub fn new(blocks: &[(Seq, Seq)]) -> Self {
        let mut out = Self::default();
        for (slot, block) in out.blocks.iter_mut().zip(blocks) {
            *slot = *block;
            out.len += 1;
        }
        out
    }

    /// The blocks.
    #[inline]
    #[must_use]
    pub fn as_slice(&self) -> &[(Seq, Seq)] {
        &self.blocks[..usize::from(self.len)]
    }

    /// Each edge becomes another.
    pub(super) fn each_edge(&mut self, edge: impl Fn(Seq) -> Seq) {
        for (from, to) in &mut self.blocks[..usize::from(self.len)] {
            (*from, *to) = (edge(*from), edge(*to));
        }
    }

    /// No block: the option was not there.
    #[inline]
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// The options of one segment.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct TcpOptions {
    /// Timestamps.
    pub timestamps: Option<Timestamps>,
    /// Maximum segment size, of a SYN.
    pub mss: Option<u16>,
    /// Window scale as sent, of a SYN; more than 14 means 14 (COM-20).
    pub window_scale: Option<u8>,
    /// SACK may be used, of a SYN.
    pub sack_permitted: bool,
    /// SACK blocks.
    pub sack: SackBlocks,
    /// A TCP Fast Open cookie or cookie request, of a SYN.
    pub tfo: bool,
    /// An option outside the whitelist for this kind of segment, of the wrong size, or there
    /// twice (COM-05).
    pub unknown: bool,
    /// Multipath TCP. It alone does not set `unknown`: a SYN may offer it in vain (SNOOP-21).
    pub mptcp: bool,
    /// The walk met a length below 2 or past the end of the header (COM-04).
    pub malformed: bool,
    /// Where the timestamps option starts in the TCP header (20 ..); 0 if it is not there.
    pub ts_offset: u8,
    /// Where the SACK option starts in the TCP header (20 ..); 0 if it is not there.
    pub sack_offset: u8,
}

impl TcpOptions {
    /// The options of a segment without any.
    pub const NONE: Self = Self::only_timestamps(None, 0);

    /// Timestamps, if any, and nothing else.
    #[inline(always)]
    const fn only_timestamps(timestamps: Option<Timestamps>, ts_offset: u8) -> Self {
        // Spelt out, because the compiler makes `..Self::NONE` a detour over the stack.
        Self {
            timestamps,
            mss: None,
            window_scale: None,
            sack_permitted: false,
            sack: SackBlocks { len: 0, blocks: [(Seq(0), Seq(0)); SackBlocks::MAX] },
            tfo: false,
            unknown: false,
            mptcp: false,
            malformed: false,
            ts_offset,
            sack_offset: 0,
        }
    }

    /// Only options that the whitelist of COM-05 allows.
    #[inline]
    #[must_use]
    pub const fn understood(&self) -> bool {
        !self.unknown && !self.mptcp && !self.malformed
    }

    /// Walks the option bytes of a segment; `syn` says which whitelist of COM-05 holds.
    #[must_use]
    pub fn parse(options: &[u8], syn: bool) -> Self {
        let mut out = Self::NONE;
        out.walk(options, syn);
        out
    }

    /// Reads the options that nearly all segments have, timestamps after two NOPs or none at all,
    /// which any kind of segment may carry; `None` for any others.
    #[inline(always)]
    fn usual(options: &[u8]) -> Option<Self> {
        let (timestamps, ts_offset) = match options {
            [] => (None, 0),
            &[KIND_NOP, KIND_NOP, KIND_TIMESTAMPS, 10, ref ts @ ..] if ts.len() == 8 => {
                (Some(Timestamps { tsval: be32(ts, 0), tsecr: be32(ts, 4) }), 22)
            }
            _ => return None,
        };
        Some(Self::only_timestamps(timestamps, ts_offset))
    }

    fn walk(&mut self, options: &[u8], syn: bool) {
        let mut rest = options;
        while let Some((&kind, after)) = rest.split_first() {
            match kind {
                KIND_END => return,
                KIND_NOP => rest = after,
                _ => {
                    let len = after.first().map_or(0, |&len| usize::from(len));
                    let Some((option, next)) = rest.split_at_checked(len).filter(|_| len >= 2)
                    else {
                        self.malformed = true;
                        return;
                    };
                    #[expect(clippy::cast_possible_truncation, reason = "a header has 60 bytes")]
                    let at = (HEADER + options.len() - rest.len()) as u8;
                    self.take(kind, &option[2..], at, syn);
                    rest = next;
                }
            }
        }
    }

    /// Takes in one option whose contents are `body` and which starts `at` bytes into the header.
    fn take(&mut self, kind: u8, body: &[u8], at: u8, syn: bool) {
        match (kind, body) {
            (KIND_TIMESTAMPS, &[_, _, _, _, _, _, _, _]) if self.ts_offset == 0 => {
                self.timestamps = Some(Timestamps { tsval: be32(body, 0), tsecr: be32(body, 4) });
                self.ts_offset = at;
            }
            (KIND_SACK, [_, ..])
                if !syn && body.len().is_multiple_of(8) && self.sack_offset == 0 =>
            {
                self.sack_offset = at;
                for (slot, b) in self.sack.blocks.iter_mut().zip(body.chunks_exact(8)) {
                    *slot = (Seq(be32(b, 0)), Seq(be32(b, 4)));
                    self.sack.len += 1;
                }
            }
            (KIND_MSS, &[hi, lo]) if syn && self.mss.is_none() => {
                self.mss = Some(u16::from_be_bytes([hi, lo]));
            }
            (KIND_WINDOW_SCALE, &[shift]) if syn && self.window_scale.is_none() => {
                self.window_scale = Some(shift);
            }
            (KIND_SACK_PERMITTED, []) if syn && !self.sack_permitted => self.sack_permitted = true,
            (KIND_FAST_OPEN, _) if syn => self.tfo = true,
            (KIND_EXPERIMENTAL, [a, b, ..]) if syn && [*a, *b] == EXID_FAST_OPEN => self.tfo = true,
            (KIND_MPTCP, _) => self.mptcp = true,
            _ => self.unknown = true,
        }
    }
}

/// Visits the options that [`TcpOptions::parse`] reads, each with kind and length, but for NOPs.
pub(super) fn options_mut(options: &mut [u8], mut visit: impl FnMut(u8, &mut [u8])) {
    let mut at = 0;
    while let Some(&kind) = options.get(at) {
        let len = match kind {
            KIND_END => return,
            KIND_NOP => {
                at += 1;
                continue;
            }
            _ => options.get(at + 1).map_or(0, |&len| usize::from(len)),
        };
        let Some(option) = options.get_mut(at..at + len).filter(|_| len >= 2) else { return };
        visit(kind, option);
        at += len;
    }
}

/// A TCP segment inside a frame. Offsets count from the start of the frame.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Tcp {
    /// The sender's port.
    pub src_port: u16,
    /// The receiver's port.
    pub dst_port: u16,
    /// Sequence number of the first payload byte, or of the SYN or FIN if one comes first.
    pub seq: Seq,
    /// Acknowledgement number; counts only with [`TcpFlags::ACK`].
    pub ack: Seq,
    /// Flags.
    pub flags: TcpFlags,
    /// Window as on the wire, not scaled.
    pub window: u16,
    /// Urgent pointer; counts only with [`TcpFlags::URG`].
    pub urgent: u16,
    /// Options.
    pub options: TcpOptions,
    /// Where the payload starts.
    pub payload_offset: u32,
    /// Bytes of payload, by the length in the IP header (COM-02).
    pub payload_len: u32,
}

impl Tcp {
    /// Sequence space the segment takes: payload, and one each for SYN and FIN.
    #[inline]
    #[must_use]
    pub fn seq_len(&self) -> u32 {
        self.payload_len + u32::from(self.flags.syn()) + u32::from(self.flags.fin())
    }
}

/// Reads the segment that fills `segment` and starts `start` bytes into its frame.
///
/// `None`: the header does not fit or its length is below 20 (COM-03).
pub(super) fn parse(segment: &[u8], start: usize) -> Option<Tcp> {
    let h: &[u8; HEADER] = segment.first_chunk()?;
    let options = segment.get(HEADER..header_len(h))?;
    Some(assemble(h, TcpOptions::parse(options, flags(h).syn()), start, segment.len()))
}

/// As [`parse`] for the options nearly all segments have, and `None` for any others.
#[inline(always)]
pub(super) fn parse_usual(segment: &[u8], start: usize) -> Option<Tcp> {
    let h: &[u8; HEADER] = segment.first_chunk()?;
    let options = TcpOptions::usual(segment.get(HEADER..header_len(h))?)?;
    Some(assemble(h, options, start, segment.len()))
}

/// The ports and the flags that [`parse`] would read.
#[inline(always)]
pub(super) fn glance(segment: &[u8]) -> Option<(u16, u16, TcpFlags)> {
    let h: &[u8; HEADER] = segment.first_chunk()?;
    let sane = (HEADER..=segment.len()).contains(&header_len(h));
    sane.then(|| (be16(h, 0), be16(h, 2), flags(h)))
}

/// Bytes of the header, by its data offset.
#[inline(always)]
pub(super) fn header_len(h: &[u8; HEADER]) -> usize {
    usize::from(h[FLAGS_AT] >> 4) * 4
}

#[inline(always)]
fn flags(h: &[u8; HEADER]) -> TcpFlags {
    TcpFlags(be16(h, FLAGS_AT)) & TcpFlags::ALL
}

#[inline(always)]
fn assemble(h: &[u8; HEADER], options: TcpOptions, start: usize, segment_len: usize) -> Tcp {
    Tcp {
        src_port: be16(h, 0),
        dst_port: be16(h, 2),
        seq: Seq(be32(h, 4)),
        ack: Seq(be32(h, 8)),
        flags: flags(h),
        window: be16(h, WINDOW_AT),
        urgent: be16(h, 18),
        options,
        payload_offset: offset(start + header_len(h)),
        payload_len: offset(segment_len - header_len(h)),
    }
}
