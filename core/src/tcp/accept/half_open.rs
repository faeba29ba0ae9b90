//! SYNs that H has answered, and whose third ACK has not come (ACC-03, ACC-11, ACC-13, ACC-15).
//!
//! Anybody who knows an address that may be answered can send SYNs in its name. So an entry has no
//! place in the store, no record and no flow, there are [`HALF_OPEN_MAX`] of a VM, and a SYN that
//! finds none is for G.

use ahash::RandomState;

use crate::flow::key::FlowKey;
use crate::limits::{
    HALF_OPEN_INTERVAL, HALF_OPEN_MAX, HALF_OPEN_REPEATED_PER_SOURCE, HALF_OPEN_REPEATS,
};
use crate::store::record::L2Header;
use crate::tcp::accept::grant::Grant;
use crate::tcp::accept::learned::Server;
use crate::tcp::accept::server;
use crate::time::Instant;
use crate::wire::packet::{Seq, Tcp};

/// A SYN and H's answer to it.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// The connection.
    pub key: FlowKey,
    /// R's offers, and H's answer.
    pub grant: Grant,
    /// The layer-2 header of the answer.
    pub l2: L2Header,
    /// R's options, as its SYN has them.
    pub asked: Asked,
}

/// The options of a SYN, without a clock: a copy of it has the same. Some clients give options up
/// when they repeat a SYN; they ignore those in an answer to their first one, and the server would
/// go on to use them (COM-24).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Asked {
    mss: Option<u16>,
    window_scale: Option<u8>,
    sack: bool,
    timestamps: bool,
}

impl Asked {
    /// Those of this SYN.
    #[must_use]
    pub const fn of(tcp: &Tcp) -> Self {
        let options = &tcp.options;
        Self {
            mss: options.mss,
            window_scale: options.window_scale,
            sack: options.sack_permitted,
            timestamps: options.timestamps.is_some(),
        }
    }
}

/// An entry, and when its answer is repeated.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    entry: Entry,
    /// When it is repeated next, or goes.
    due: Instant,
    repeats: u32,
    /// It is one of the few of its source that are repeated.
    is_repeated: bool,
}

/// The meaning of a segment of R for a SYN that H has answered.
#[derive(Clone, Copy, Debug)]
pub enum Reply {
    /// It completes the handshake. The entry goes once there is a flow ([`HalfOpen::forget`]).
    Completes(Entry),
    /// It is the same SYN again: so is the answer.
    Again(Entry),
    /// It resets it: there is nothing to be told to G.
    Resets,
    /// It is for G, as if H had answered nothing. A SYN with another number has taken the place of
    /// the one before.
    ForGuest,
    /// Nobody gets it.
    Nothing,
}

/// The half-open connections of one VM.
#[derive(Debug)]
pub struct HalfOpen {
    /// A hash of each entry's key, in the order of `waiting`.
    tags: Vec<u64>,
    waiting: Vec<Waiting>,
    hasher: RandomState,
}

impl HalfOpen {
    /// None. `seeds` must be unpredictable for remotes.
    #[must_use]
    pub fn new(seeds: [u64; 4]) -> Self {
        let [a, b, c, d] = seeds;
        let hasher = RandomState::with_seeds(a, b, c, d);
        Self { tags: Vec::new(), waiting: Vec::new(), hasher }
    }

    /// So many.
    #[must_use]
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// There is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// There is one of this name.
    #[must_use]
    pub fn has(&self, key: &FlowKey) -> bool {
        self.find(key).is_some()
    }

    /// So many of a server.
    pub(crate) fn of_server(&self, of: Server) -> u32 {
        let of_it = self.waiting.iter().filter(|waiting| server(&waiting.entry.key) == of);
        u32::try_from(of_it.count()).unwrap_or(u32::MAX)
    }

    /// When [`Self::poll_due`] has something next.
    #[must_use]
    pub fn due_at(&self) -> Instant {
        self.waiting.iter().map(|waiting| waiting.due).min().unwrap_or(Instant::MAX)
    }

    /// H answers a SYN. An earlier one of that name goes (ACC-13). `false`: there is no place, and
    /// the SYN is for G.
    #[must_use]
    pub fn on_answered(&mut self, now: Instant, entry: Entry) -> bool {
        self.forget(&entry.key);
        if self.waiting.len() == HALF_OPEN_MAX {
            return false;
        }
        let source = entry.key.r_addr;
        let of_source =
            self.waiting.iter().filter(|w| w.is_repeated && w.entry.key.r_addr == source);
        let is_repeated = of_source.count() < HALF_OPEN_REPEATED_PER_SOURCE;
        self.tags.push(self.hasher.hash_one(entry.key));
        let due = now + HALF_OPEN_INTERVAL;
        self.waiting.push(Waiting { entry, due, repeats: 0, is_repeated });
        true
    }

    /// A segment of R whose checksum is right.
    #[must_use]
    pub fn on_segment_from_net(&mut self, key: &FlowKey, tcp: &Tcp) -> Reply {
        let Some(at) = self.find(key) else { return Reply::ForGuest };
        let entry = self.waiting[at].entry;
        let (of_net, flags) = (entry.grant.of_net(), tcp.flags);
        if flags.syn() && !flags.ack() && !flags.rst() {
            if tcp.seq == of_net.isn {
                // Which of two R would use, nobody knows: it is not answered until R sends the
                // first one again, or the entry goes.
                let is_same = Asked::of(tcp) == entry.asked;
                return if is_same { Reply::Again(entry) } else { Reply::Nothing };
            }
            self.remove(at);
            return Reply::ForGuest;
        }
        if flags.rst() {
            // Exactly, or a forger would only have to guess a window (RFC 5961 section 3).
            if tcp.seq != of_net.isn + 1 {
                return Reply::Nothing;
            }
            self.remove(at);
            return Reply::Resets;
        }
        if completes(&entry.grant, tcp) {
            return Reply::Completes(entry);
        }
        // G answers an ACK of something else by an RST with its number.
        if flags.ack() && tcp.ack != entry.grant.shown().isn + 1 {
            return Reply::ForGuest;
        }
        Reply::Nothing
    }

    /// All are over, and nobody is told.
    pub fn clear(&mut self) {
        self.tags.clear();
        self.waiting.clear();
    }

    /// It is a flow now. Or G sends a SYN of that name: nothing is owed to R (ACC-11). Or R's SYN
    /// is another one.
    pub fn forget(&mut self, key: &FlowKey) {
        if let Some(at) = self.find(key) {
            self.remove(at);
        }
    }

    /// The next answer that is due to be repeated; entries whose time is over go.
    #[must_use]
    pub fn poll_due(&mut self, now: Instant) -> Option<Entry> {
        while let Some(at) = self.waiting.iter().position(|waiting| waiting.due <= now) {
            let waiting = &mut self.waiting[at];
            if waiting.repeats == HALF_OPEN_REPEATS {
                self.remove(at);
                continue;
            }
            waiting.repeats += 1;
            waiting.due = now + HALF_OPEN_INTERVAL.saturating_mul(1 << waiting.repeats);
            if waiting.is_repeated {
                return Some(waiting.entry);
            }
        }
        None
    }

    fn find(&self, key: &FlowKey) -> Option<usize> {
        let tag = self.hasher.hash_one(key);
        let at = self.tags.iter().position(|&it| it == tag)?;
        (self.waiting[at].entry.key == *key).then_some(at)
    }

    fn remove(&mut self, at: usize) {
        self.tags.swap_remove(at);
        self.waiting.swap_remove(at);
    }
}

const _: () = assert!(HALF_OPEN_MAX * (size_of::<Waiting>() + 8) <= 52 << 10);

/// R's third ACK, or data behind it: it acknowledges H's SYN, lies in the window that H showed, and
/// echoes H's clock if there is one.
fn completes(grant: &Grant, tcp: &Tcp) -> bool {
    let (first, shown) = (grant.of_net().isn + 1, grant.shown());
    let window = i32::from(grant.window_shown());
    let fits = (0..window.max(1)).contains(&tcp.seq.after(first));
    // Some leave them out (SNOOP-04), and Linux asks for an echo only where there is one
    // (`tcp_check_req`).
    let has_clock = grant.has_timestamps();
    let echoes = tcp.options.timestamps.is_none_or(|ts| has_clock && ts.tsecr == shown.tsval);
    let of_syn = grant.of_net().tsval; // 0 says nothing of R's clock (INV-08)
    let is_current = |tsval: u32| of_syn == 0 || Seq(tsval).ge(Seq(of_syn));
    let current = tcp.options.timestamps.is_none_or(|ts| is_current(ts.tsval));
    let plain = tcp.flags.ack() && !tcp.flags.syn();
    plain && tcp.ack == shown.isn + 1 && fits && echoes && current
}

#[cfg(test)]
mod tests;
