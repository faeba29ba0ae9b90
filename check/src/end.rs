//! One end of a flow: the frames that it sent into the host, and those that the host sent to it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::history::BASE;
use crate::wire::Tcp;

/// R or G; the other one is `Side::other`.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Side {
    /// The remote.
    R,
    /// The guest.
    G,
}

impl Side {
    /// The other end.
    #[must_use]
    pub const fn other(self) -> Self {
        match self {
            Self::R => Self::G,
            Self::G => Self::R,
        }
    }
}

/// The offer of an end in its SYN or SYN-ACK.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Offer {
    /// Longest segment.
    pub mss: Option<u16>,
    /// Window shift.
    pub scale: Option<u8>,
    /// Timestamps.
    pub timestamps: bool,
    /// SACK-Permitted.
    pub sack: bool,
    /// Options that the host does not understand, whatever the other end answers.
    pub odd: bool,
    /// Congestion marks, or that it accepts them (COM-23).
    pub marks: bool,
    /// MPTCP; without an echo it is ordinary TCP (SNOOP-21).
    pub mptcp: bool,
}

/// One end: the frames that it sent into the host, and those that the host sent to it.
#[derive(Clone, Debug)]
pub struct End {
    /// Its initial sequence number, once seen.
    pub isn: Option<u32>,
    /// See [`Offer`].
    pub offer: Offer,
    /// End of its stream so far, SYN and FIN counted.
    pub end: u64,
    /// Its FIN.
    pub fin: Option<u64>,
    /// Highest ACK it sent, the edge that came with the newest, and the highest edge.
    pub acked: u64,
    /// Highest ACK for bytes that it had not been sent, if that is known to be a lie.
    pub lied: u64,
    /// Such ACKs: one that waits for the ring may be true by the time it leaves, and those behind
    /// it are lower.
    pub(crate) lies: BTreeSet<u64>,
    /// Highest ACK in a segment that the host has read: not beyond its window (SNOOP-02), and not
    /// in bytes that the end has sent before (seed 47690).
    pub(crate) heard: u64,
    /// It has sent SACK blocks that its own ACK contradicts.
    pub(crate) odd_sack: bool,
    /// Its recent earlier acknowledgements: a probe made then may have waited since.
    pub acked_before: BTreeSet<u64>,
    /// See `acked`.
    pub edge: u64,
    /// See `acked`.
    pub edge_max: u64,
    /// The newest of its segments that shows a window (RFC 9293: SND.WL1), and its edge.
    pub(crate) newest: (u64, u64),
    /// TSvals it sent.
    pub tsvals: BTreeSet<u32>,
    /// It sent an RST.
    pub reset: bool,
    /// Frames, and payload bytes in them, that it sent.
    pub frames: u64,
    /// See `frames`.
    pub bytes: u64,
    /// Highest ACK, edge and TSval it was sent.
    pub ack_to: u64,
    /// See `ack_to`.
    pub edge_to: u64,
    /// The other's own edge when it was last sent one.
    pub(crate) told_of: u64,
    /// See `ack_to`.
    pub tsval_to: Option<u32>,
    /// It has sent a segment without timestamps, though they may have been agreed on.
    pub(crate) lacks_clock: bool,
    /// End of the bytes that it was sent, SYN and FIN counted.
    pub end_to: u64,
    /// It was sent an RST.
    pub reset_to: bool,
    /// Frames, and payload bytes in them, that it was sent.
    pub frames_to: u64,
    /// See `frames_to`.
    pub bytes_to: u64,
    /// Of frames that came out unchanged, the last few: one that the host made may look the same,
    /// and have been taken for one of them.
    pub(crate) came_out: VecDeque<u64>,
    /// Fingerprints of frames for it that may still come out unchanged, oldest first, and whether
    /// they count.
    pub(crate) unchanged: VecDeque<(u64, bool)>,
    /// Bytes that it was sent from `copies_from` on, for streams of unknown content.
    pub(crate) copies: BTreeMap<u64, u8>,
}

impl End {
    pub(crate) fn new() -> Self {
        Self {
            isn: None,
            offer: Offer::default(),
            end: BASE,
            fin: None,
            acked: BASE,
            lied: BASE,
            heard: BASE,
            lies: BTreeSet::new(),
            odd_sack: false,
            edge: BASE,
            edge_max: BASE,
            newest: (BASE, BASE),
            tsvals: BTreeSet::new(),
            reset: false,
            frames: 0,
            bytes: 0,
            ack_to: BASE,
            edge_to: BASE,
            told_of: BASE,
            tsval_to: None,
            lacks_clock: false,
            end_to: BASE,
            reset_to: false,
            frames_to: 0,
            bytes_to: 0,
            came_out: VecDeque::new(),
            unchanged: VecDeque::new(),
            acked_before: BTreeSet::new(),
            copies: BTreeMap::new(),
        }
    }

    /// It has sent a segment that is no SYN.
    pub(crate) fn note_clock(&mut self, tcp: &Tcp) {
        self.tsvals.extend(tcp.options.timestamps.map(|ts| ts.tsval));
        self.lacks_clock |= tcp.options.timestamps.is_none() && !tcp.flags.rst();
    }

    /// It is sent an ACK of `ack` that shows `edge`. `anew`: earlier edges count no longer. `unit`:
    /// room may be lent, and goes back by a unit of the window at least.
    pub(crate) fn is_told(&mut self, ack: u64, edge: u64, anew: bool, unit: Option<u64>) {
        let shrinks = unit.is_some_and(|unit| ack >= self.ack_to && edge + unit <= self.edge_to);
        self.ack_to = self.ack_to.max(ack);
        self.edge_to = if anew || shrinks { edge } else { self.edge_to.max(edge) };
    }
}
