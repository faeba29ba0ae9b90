//! The memory that the programs of a worker's ports and the worker share: a map of one value.
//!
//! Its first words are the time of the first frame turned since the worker was last awake, and the
//! limit; behind them every port has a slot with its counts of plain frames. A worker awake clears
//! one word for all of its ports.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::Duration;

use crate::bpf;
use crate::code::Program;

/// 64-bit words of an area: one page, so that a mapping is one.
pub(crate) const WORDS: usize = 512;
/// Of the first words, a cache line.
const FIRST_WORDS: usize = 8;
/// Of a slot: plain frames of the VM, and of the network.
const SLOT_WORDS: usize = 2;
/// Ports of one area.
pub const SLOTS: usize = (WORDS - FIRST_WORDS) / SLOT_WORDS;

/// The bounds of a limit: shorter, and a worker that shares its core is taken for dead; longer, and
/// TCP notices that of a dead one (RFC 6298: its timeout is a second at first).
pub const LIMIT_MIN: Duration = Duration::from_millis(10);
/// See [`LIMIT_MIN`].
pub const LIMIT_MAX: Duration = Duration::from_secs(1);

/// Where a program counts its plain frames, in bytes.
pub(crate) fn plain_at(slot: usize, program: Program) -> u32 {
    assert!(slot < SLOTS, "slots are below {SLOTS}");
    let direction = usize::from(program == Program::TurnFromNet);
    let word = FIRST_WORDS + slot * SLOT_WORDS + direction;
    u32::try_from(word * size_of::<u64>()).expect("less than a page")
}

/// Frames of a port that passed plain, by their senders. They wrap, like all counts.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Plain {
    /// The VM's.
    pub from_vm: u64,
    /// The network's.
    pub from_net: u64,
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

    /// The worker is awake, or is about to sleep and has left nothing. Counts of plain frames that
    /// are read from now on have all frames that passed before (the other half of this handshake is
    /// in `bpf/turn.bpf.c`).
    pub fn wake(&self) {
        self.0[0].store(0, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Frames of a slot that passed plain.
    #[must_use]
    pub fn plain(&self, slot: usize) -> Plain {
        let word = |program| {
            let at = plain_at(slot, program) as usize / size_of::<u64>();
            self.0[at].load(Ordering::Relaxed)
        };
        Plain { from_vm: word(Program::TurnFromVm), from_net: word(Program::TurnFromNet) }
    }
}
