//! A TCP header as RFC 9293 section 3.1 draws it, and its options.

use core::fmt;
use core::ops::BitOr;

use etherparse::TcpHeaderSlice;

use super::Seq;

/// The nine flag bits of a TCP header.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct TcpFlags(pub u16);

macro_rules! flags {
    ($($doc:literal $name:ident $is_set:ident $place:literal;)+) => {
        impl TcpFlags {
            $(#[doc = $doc] pub const $name: Self = Self(1 << $place);
            #[doc = $doc] #[must_use] pub const fn $is_set(self) -> bool {
                self.0 >> $place & 1 == 1
            })+
        }
    };
}

flags! {
    "The sender has no more." FIN fin 0;
    "The number is the initial one." SYN syn 1;
    "The connection is gone." RST rst 2;
    "Push." PSH psh 3;
    "The acknowledgement counts." ACK ack 4;
    "The urgent pointer counts." URG urg 5;
    "Echo of congestion (RFC 3168)." ECE ece 6;
    "The window was reduced (RFC 3168)." CWR cwr 7;
    "Accurate ECN (RFC 9768)." AE ae 8;
}

impl TcpFlags {
    /// No flag.
    pub const NONE: Self = Self(0);
    /// All nine.
    pub const ALL: Self = Self(0x1ff);

    /// All of `others` are set.
    #[must_use]
    pub const fn contains(self, others: Self) -> bool {
        others.0 & !self.0 == 0
    }

    /// One of `others` is set, or more.
    #[must_use]
    pub const fn intersects(self, others: Self) -> bool {
        others.0 & self.0 != 0
    }

    /// These, but none of `others`.
    #[must_use]
    pub const fn without(self, others: Self) -> Self {
        Self(self.0 & !others.0)
    }

    /// These and `others`.
    #[must_use]
    pub const fn union(self, others: Self) -> Self {
        Self(self.0 | others.0)
    }
}

impl BitOr for TcpFlags {
    type Output = Self;

    fn bitor(self, others: Self) -> Self {
        self.union(others)
    }
}

impl fmt::Display for TcpFlags {
    /// A letter each, as tcpdump has them.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let letters = "FSRP.UEWe".chars().enumerate();
        letters
            .filter(|(place, _)| self.0 >> place & 1 == 1)
            .try_for_each(|(_, c)| write!(f, "{c}"))
    }
}

/// The timestamps option (RFC 7323 section 3).
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Timestamps {
    /// The sender's clock.
    pub tsval: u32,
    /// The receiver's newest clock.
    pub tsecr: u32,
}

/// The blocks of a SACK option (RFC 2018 section 3): first number, and the one after the last.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Sack {
    blocks: [(Seq, Seq); 4],
    count: usize,
}

impl Sack {
    /// In the order of the option.
    #[must_use]
    pub fn as_slice(&self) -> &[(Seq, Seq)] {
        &self.blocks[..self.count]
    }
}

/// The options of a segment.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct TcpOptions {
    /// The two clocks.
    pub timestamps: Option<Timestamps>,
    /// Longest segment, of a SYN.
    pub mss: Option<u16>,
    /// Window shift, of a SYN.
    pub window_scale: Option<u8>,
    /// SACK is wanted, of a SYN.
    pub sack_permitted: bool,
    /// The ranges out of order.
    pub sack: Sack,
    /// One that does not belong on this kind of segment, has the wrong length or comes twice
    /// (COM-05).
    pub unknown: bool,
    /// Multipath TCP, which is not `unknown`: it may be offered in vain (SNOOP-21).
    pub mptcp: bool,
    /// An impossible length (COM-04): the rest was not read.
    pub malformed: bool,
}

impl TcpOptions {
    /// Only options in the list of COM-05.
    #[must_use]
    pub const fn understood(&self) -> bool {
        !(self.unknown || self.mptcp || self.malformed)
    }

    /// Of a header's bytes behind the first 20.
    fn read(mut rest: &[u8], syn: bool) -> Self {
        let mut told = Self::default();
        loop {
            match rest {
                [] | [0, ..] => return told,
                [1, after @ ..] => rest = after,
                [kind, len, after @ ..] if *len >= 2 && after.len() + 2 >= usize::from(*len) => {
                    let (body, next) = after.split_at(usize::from(*len) - 2);
                    told.unknown |= !told.take(*kind, body, syn);
                    rest = next;
                }
                _ => {
                    told.malformed = true;
                    return told;
                }
            }
        }
    }

    /// One option; `false` if it may not be here.
    fn take(&mut self, kind: u8, body: &[u8], syn: bool) -> bool {
        let word = |at: usize| {
            body.get(at..at + 4)
                .map_or(0, |b| b.iter().fold(0, |word, byte| word << 8 | u32::from(*byte)))
        };
        match (kind, body.len()) {
            (2, 2) if syn => {
                let mss = u16::from_be_bytes([body[0], body[1]]);
                self.mss.replace(mss).is_none()
            }
            (3, 1) if syn => self.window_scale.replace(body[0]).is_none(),
            (4, 0) if syn => !std::mem::replace(&mut self.sack_permitted, true),
            (5, 8 | 16 | 24 | 32) if !syn => {
                let again = self.sack.count > 0;
                self.sack.count = body.len() / 8;
                for (n, block) in self.sack.blocks[..body.len() / 8].iter_mut().enumerate() {
                    *block = (Seq(word(8 * n)), Seq(word(8 * n + 4)));
                }
                !again
            }
            (8, 8) => {
                let clocks = Timestamps { tsval: word(0), tsecr: word(4) };
                self.timestamps.replace(clocks).is_none()
            }
            (30, _) => {
                self.mptcp = true;
                true
            }
            // TCP Fast Open, with its own kind and as an experiment (RFC 7413).
            (34, _) => syn,
            (254, 2..) => syn && body[..2] == [0xf9, 0x89],
            _ => false,
        }
    }
}

/// A TCP segment inside a frame. Offsets count from the start of the frame.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Tcp {
    /// The sender's port.
    pub src_port: u16,
    /// The receiver's port.
    pub dst_port: u16,
    /// Number of the first byte.
    pub seq: Seq,
    /// Number of the byte expected next, with [`TcpFlags::ACK`].
    pub ack: Seq,
    /// Flags.
    pub flags: TcpFlags,
    /// Window, unscaled.
    pub window: u16,
    /// Urgent pointer.
    pub urgent: u16,
    /// Options.
    pub options: TcpOptions,
    /// Where the payload starts.
    pub payload_offset: u32,
    /// Its bytes, by the IP header.
    pub payload_len: u32,
}

impl Tcp {
    /// Places it takes in the sequence.
    #[must_use]
    pub fn seq_len(&self) -> u32 {
        self.payload_len + u32::from(self.flags.fin()) + u32::from(self.flags.syn())
    }

    /// The segment that begins `at` bytes into its frame; `None` if its header is not whole.
    pub(super) fn read(segment: &[u8], at: usize) -> Option<Self> {
        let h = TcpHeaderSlice::from_slice(segment).ok()?;
        let header_len = h.slice().len();
        let flags = TcpFlags(u16::from_be_bytes([h.slice()[12], h.slice()[13]]) & 0x1ff);
        Some(Self {
            src_port: h.source_port(),
            dst_port: h.destination_port(),
            seq: Seq(h.sequence_number()),
            ack: Seq(h.acknowledgment_number()),
            flags,
            window: h.window_size(),
            urgent: h.urgent_pointer(),
            options: TcpOptions::read(h.options(), flags.syn()),
            payload_offset: u32::try_from(at + header_len).ok()?,
            payload_len: u32::try_from(segment.len() - header_len).ok()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_that_belong_on_a_syn_are_unknown_elsewhere_and_the_other_way_round() {
        let offer = [2, 4, 5, 180, 4, 2, 8, 10, 0, 0, 0, 7, 0, 0, 0, 0, 1, 3, 3, 7];
        let told = TcpOptions::read(&offer, true);
        assert_eq!((told.mss, told.window_scale, told.sack_permitted), (Some(1460), Some(7), true));
        assert_eq!(told.timestamps, Some(Timestamps { tsval: 7, tsecr: 0 }));
        assert!(told.understood() && !TcpOptions::read(&offer, false).understood());
        let sack = [1, 1, 5, 10, 0, 0, 1, 0, 0, 0, 2, 0];
        let told = TcpOptions::read(&sack, false);
        assert_eq!(told.sack.as_slice(), [(Seq(256), Seq(512))]);
        assert!(told.understood() && TcpOptions::read(&sack, true).unknown);
    }

    #[test]
    fn a_length_that_cannot_be_ends_the_walk_and_an_end_hides_what_follows() {
        for bad in [&[30, 0][..], &[8, 1], &[8, 10, 0, 0], &[9]] {
            assert!(TcpOptions::read(bad, false).malformed, "{bad:?}");
        }
        assert!(TcpOptions::read(&[1, 0, 99, 0], false).understood());
        let twice = [1, 3, 3, 7, 1, 3, 3, 8];
        assert!(TcpOptions::read(&twice, true).unknown);
        assert!(TcpOptions::read(&[30, 4, 1, 2], true).mptcp);
    }
}
