//! The memory that the programs of a worker's ports and the worker share: a map of one value.
//!
//! Its first words are the time of the first frame turned since the worker was last awake, and the
//! limit; a worker awake clears one word for all of its ports. Behind them is a bit for each hash
//! of addresses and ports, which a TCP segment sets that passes plain, and as many for SYNs; then
//! every port has a slot with its counts of plain frames.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::Duration;

use crate::bpf;
use crate::code::Program;

/// Of the first words, a cache line.
const FIRST_WORDS: usize = 8;
/// Bits of a hash (`bpf/turn.bpf.c`).
const HASH_BITS: u32 = 16;
/// Of the bits of all hashes.
const BIT_WORDS: usize = 1 << HASH_BITS >> 6;
/// Of a direction of a slot: plain frames, their bytes, those frames that were not understood, and
/// whether all are to pass.
const WAY_WORDS: usize = 4;
/// Ports of one area.
pub const SLOTS: usize = 252;
const SLOTS_FROM: usize = FIRST_WORDS + 2 * BIT_WORDS;
/// 64-bit words of an area, in whole pages of 4 KiB.
pub(crate) const WORDS: usize = (SLOTS_FROM + SLOTS * 2 * WAY_WORDS).next_multiple_of(512);

/// The bounds of a limit: shorter, and a worker that shares its core is taken for dead; longer, and
/// TCP notices that of a dead one (RFC 6298: its timeout is a second at first).
pub const LIMIT_MIN: Duration = Duration::from_millis(10);
/// See [`LIMIT_MIN`].
pub const LIMIT_MAX: Duration = Duration::from_secs(1);

/// Where a program counts its plain frames, in bytes.
pub(crate) fn plain_at(slot: usize, program: Program) -> u32 {
    assert!(slot < SLOTS, "slots are below {SLOTS}");
    let direction = usize::from(program == Program::TurnFromNet);
    let word = SLOTS_FROM + (slot * 2 + direction) * WAY_WORDS;
    u32::try_from(word * size_of::<u64>()).expect("a few pages")
}

/// Frames of a port that passed plain. They wrap, like all counts.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Plain {
    /// The VM's.
    pub from_vm: u64,
    /// The network's.
    pub from_net: u64,
    /// Bytes of all of them.
    pub bytes: u64,
    /// Those that may have been a part of any TCP segment.
    pub unread: u64,
}

impl Plain {
    /// Those since then.
    #[must_use]
    pub const fn since(&self, before: &Self) -> Self {
        Self {
            from_vm: self.from_vm.wrapping_sub(before.from_vm),
            from_net: self.from_net.wrapping_sub(before.from_net),
            bytes: self.bytes.wrapping_sub(before.bytes),
            unread: self.unread.wrapping_sub(before.unread),
        }
    }
}

/// The place of a connection's bit: the same whichever end is named first.
fn hash(ends: [SocketAddr; 2]) -> usize {
    let mix = |hash: u32, word: u32| {
        let hash = (hash ^ word).wrapping_mul(0x9e37_79b1);
        hash ^ hash >> 15
    };
    // The programs read numbers as they are in the frame.
    let words = |port: u16, address: &[u8]| {
        let words = address.as_chunks().0.iter().map(|word| u32::from_ne_bytes(*word));
        words.fold(port.to_be().into(), mix)
    };
    let end = |end: SocketAddr| match end.ip() {
        IpAddr::V4(ip) => words(end.port(), &ip.octets()),
        IpAddr::V6(ip) => words(end.port(), &ip.octets()),
    };
    let [one, other] = ends.map(end);
    (mix(0, one.wrapping_add(other)) >> (u32::BITS - HASH_BITS)) as usize
}

/// The connections that may have had segments that passed plain, on any port.
#[derive(Clone, Debug)]
pub struct Marked {
    segments: Box<[u64]>,
    syns: Box<[u64]>,
}

impl Marked {
    /// A segment of the connection between these has passed, or one of another with its hash.
    #[must_use]
    pub fn has_segment(&self, ends: [SocketAddr; 2]) -> bool {
        Self::has(&self.segments, hash(ends))
    }

    /// The same of a segment with SYN.
    #[must_use]
    pub fn has_syn(&self, ends: [SocketAddr; 2]) -> bool {
        Self::has(&self.syns, hash(ends))
    }

    /// None has passed.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.segments.iter().chain(&self.syns).all(|word| *word == 0)
    }

    /// Has those of `other`, too.
    pub fn add(&mut self, other: &Self) {
        let add = |words: &mut [u64], others: &[u64]| {
            words.iter_mut().zip(others).for_each(|(word, other)| *word |= other);
        };
        add(&mut self.segments, &other.segments);
        add(&mut self.syns, &other.syns);
    }

    fn has(words: &[u64], hash: usize) -> bool {
        words[hash / 64] >> (hash % 64) & 1 != 0
    }
}

/// The map. It needs CAP_BPF to be made, and nothing to be mapped.
#[derive(Debug)]
pub struct Area(OwnedFd);

impl Area {
    /// Makes one, with this limit.
    ///
    /// # Errors
    /// The kernel's.
    pub fn new(limit: Duration) -> io::Result<Self> {
        let area = Self(bpf::make_area()?);
        area.view()?.set_limit(limit);
        Ok(area)
    }

    /// One that another process has made.
    #[must_use]
    pub const fn from_fd(fd: OwnedFd) -> Self {
        Self(fd)
    }

    /// The map's descriptor.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Maps it, for as long as the process lives.
    ///
    /// # Errors
    /// The kernel's; it is none.
    pub fn view(&self) -> io::Result<View> {
        bpf::map_area(self.fd()).map(View)
    }
}

/// An area as the worker sees it.
#[derive(Clone, Copy, Debug)]
pub struct View(&'static [AtomicU64; WORDS]);

impl View {
    /// From now on frames pass plain if they find one that was turned so long ago.
    pub fn set_limit(&self, limit: Duration) {
        let nanos = u64::try_from(limit.clamp(LIMIT_MIN, LIMIT_MAX).as_nanos()).expect("a second");
        self.0[1].store(nanos, Ordering::Relaxed);
    }

    /// When the first frame was turned since the worker was last awake, in nanoseconds of
    /// CLOCK_MONOTONIC. 0: none was.
    #[must_use]
    pub fn turned_at(&self) -> u64 {
        self.0[0].load(Ordering::Relaxed)
    }

    /// The worker is awake, or is about to sleep and has left nothing. Counts and bits of plain
    /// frames that are read from now on have all frames that passed before (the other half of this
    /// handshake is in `bpf/turn.bpf.c`).
    pub fn wake(&self) {
        self.0[0].store(0, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Frames that find one turned so long ago pass plain.
    #[must_use]
    pub fn limit_ns(&self) -> u64 {
        self.0[1].load(Ordering::Relaxed)
    }

    /// From now on all frames of a slot pass plain, are counted, and mark their connections; or
    /// none does while the worker is awake. Counts and bits that are read from then on have all
    /// that passed before, as after [`Self::wake`].
    pub fn set_plain(&self, slot: usize, all: bool) {
        for program in [Program::TurnFromVm, Program::TurnFromNet] {
            let at = plain_at(slot, program) as usize / size_of::<u64>();
            self.0[at + WAY_WORDS - 1].store(all.into(), Ordering::Relaxed);
        }
        fence(Ordering::SeqCst);
    }

    /// Frames of a slot that passed plain.
    #[must_use]
    pub fn plain(&self, slot: usize) -> Plain {
        let words = |program| {
            let at = plain_at(slot, program) as usize / size_of::<u64>();
            [0, 1, 2].map(|word| self.0[at + word].load(Ordering::Relaxed))
        };
        let [from_vm, bytes, unread] = words(Program::TurnFromVm);
        let [from_net, more_bytes, more_unread] = words(Program::TurnFromNet);
        let (bytes, unread) = (bytes.wrapping_add(more_bytes), unread.wrapping_add(more_unread));
        Plain { from_vm, from_net, bytes, unread }
    }

    /// Takes the bits of all ports: they are clear then.
    #[must_use]
    pub fn take_marked(&self) -> Marked {
        let take = |word: &AtomicU64| match word.load(Ordering::Relaxed) {
            0 => 0, // nearly all
            _ => word.swap(0, Ordering::Relaxed),
        };
        let (segments, syns) = self.0[FIRST_WORDS..SLOTS_FROM].split_at(BIT_WORDS);
        Marked {
            segments: segments.iter().map(take).collect(),
            syns: syns.iter().map(take).collect(),
        }
    }
}
