//! A flow's record in the arena: what a restarted daemon needs to keep a promise (LIFE-09).
//!
//! 22 little-endian words. The first nine are the state word and those that change with traffic;
//! each of these is committed by one aligned store. The others are written once, before the state
//! word makes the record valid.
//!
//! A kill may hit between two of these stores, so a record may have old and new words beside each
//! other. No frame of the event has left then: R and G know the old state, the memory is in the
//! new one. [`super::flow_store::recover`] and `Flow::resumed` take of each order the safe side.
//!
//! R's FIN has no word: the numbers that may end with it say so in their highest bit, so no store
//! moves one without the other.

use core::sync::atomic::{AtomicU64, Ordering};

use crate::flow::key::FlowKey;
use crate::limits::{FLOW_RECORD_BYTES, L2_MAX};
use crate::wire::packet::{IpAddr16, IpVersion};

/// Words of a record.
pub(super) const WORDS: usize = FLOW_RECORD_BYTES / 8;
/// A record as it lies in the arena.
pub(super) type RawRecord = [AtomicU64; WORDS];

/// Word 0: zero while free, else the checksum of the static words.
pub(super) const STATE: usize = 0;
pub(super) const RCV_NXT: usize = 1;
pub(super) const GUEST_UNA: usize = 2;
pub(super) const GUEST_NXT: usize = 3;
/// End of the bytes sent to R (low half) and R's acknowledgement of them (high half), as they are
/// on the wire.
pub(super) const TO_NET: usize = 4;
pub(super) const EDGE_TO_NET: usize = 5;
/// Last TSval emitted to R (low half) and to G (high half).
pub(super) const TS_EMIT: usize = 6;
/// R's TSval that is echoed (low half), the eight seconds in which it was taken, R's window field.
pub(super) const FROM_NET: usize = 7;
/// `MARK_*` bits. Written last, because they are about the words before.
pub(super) const MARKS: usize = 8;
/// First of the static words.
pub(super) const STATIC: usize = 9;
/// First static word: identity of the VM across restarts.
pub(super) const NAME_HASH: usize = STATIC;
const STATIC_BYTES: usize = (WORDS - STATIC) * 8;

/// Timestamps are in use on this flow (COM-21).
pub const FLAG_TS: u8 = 1;
/// SACK is in use on this flow (COM-22).
pub const FLAG_SACK: u8 = 2;
/// Classic ECN is in use on this flow (COM-23).
pub const FLAG_ECN: u8 = 4;
/// G has opened the connection.
pub const FLAG_GUEST_IS_CLIENT: u8 = 8;

/// Both sides were reset after a restart: the next one repeats that, and does not count it.
pub const MARK_TOLD: u8 = 1;
/// The record says all that a successor needs to go on (LIFE-09).
pub const MARK_RESUMABLE: u8 = 2;
/// R was sent G's FIN, the last number below `net_nxt`.
pub const MARK_FIN_OF_GUEST: u8 = 4;
/// CE was seen and R has not answered with CWR.
pub const MARK_ECE: u8 = 8;
/// The connection ends in a container of G (FWD-01).
pub const MARK_NEAR: u8 = 16;
/// G has sent nothing but its SYN-ACK (COM-29).
pub const MARK_NEW: u8 = 32;
/// H has accepted the connection for G, whose numbers are others than R's: it is never passed, and
/// reset if nobody goes on with it (ACC-07).
pub const MARK_TRANSLATED: u8 = 64;
/// No place is reserved for R's bytes, because G has room for those that R may send after a pause.
pub const MARK_PARKED: u8 = 128;

/// The highest bit of a number of R's stream: R's FIN is there, see [`Fins`].
const FIN: u64 = 1 << 63;

/// In the high half of unwrapped numbers of G that a record has: above all distances (COM-01).
const BASE_TO_NET: u64 = 2 << 32;

/// Identity of a port across restarts: FNV-1a (64 bit) of its name, never zero.
#[must_use]
pub fn name_hash(name: &str) -> u64 {
    let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |h, b| {
        (h ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    hash.max(1)
}

/// Which network a port is in, across restarts: of its name; 0 for the one that has none.
#[must_use]
pub fn network_hash(name: &str) -> u32 {
    let [low, high]: [u32; 2] = zerocopy::transmute!(name_hash(name));
    if name.is_empty() { 0 } else { u32::max(low ^ high, 1) }
}

/// An L2 header of at most [`L2_MAX`] bytes, copied from the newest frame of that direction.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct L2Header {
    len: u8,
    bytes: [u8; L2_MAX],
}

impl L2Header {
    /// `None` if `bytes` is longer than [`L2_MAX`].
    #[must_use]
    pub fn new(bytes: &[u8]) -> Option<Self> {
        let mut header = Self { len: u8::try_from(bytes.len()).ok()?, bytes: [0; L2_MAX] };
        header.bytes.get_mut(..bytes.len())?.copy_from_slice(bytes);
        Some(header)
    }

    /// Destination MAC first, EtherType last.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }
}

/// A flow's record: written whole by `Arena::alloc_record`, read whole after a restart.
///
/// Sequence numbers are unwrapped: the low 32 bits are those on the wire (COM-01).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Record {
    /// [`name_hash`] of the guest port's name.
    pub name_hash: u64,
    /// [`network_hash`] of the guest port's network.
    pub network_hash: u32,
    /// The flow. `port` is not stored and reads as 0: port numbers do not survive a restart, look
    /// `name_hash` up.
    pub key: FlowKey,
    /// L2 header of frames to R; turned round it is that of frames to G.
    pub l2: L2Header,
    /// TTL or hop limit of frames to R, as G sends it (GTSM peers need 255).
    pub ttl: u8,
    /// TTL or hop limit of frames to G, as R's arrive.
    pub ttl_to_g: u8,
    /// Window shift of windows sent to R (G's SYN offered it).
    pub s_g: u8,
    /// Window shift of windows sent to G (R's SYN offered it).
    pub s_r: u8,
    /// `FLAG_*` bits.
    pub flags: u8,
    /// Payload bytes per segment to G.
    pub mss_to_g: u16,
    /// Payload bytes per segment to R.
    pub mss_to_r: u16,
    /// `h.rcv_nxt`: every byte below was accepted and may have been acknowledged.
    pub rcv_nxt: u64,
    /// `g.una`: every byte below was acknowledged by G.
    pub guest_una: u64,
    /// `g.nxt`: every byte below was given to G at least once, also past the store.
    pub guest_nxt: u64,
    /// G's initial sequence number.
    pub guest_isn: u32,
    /// `MARK_*` bits.
    pub marks: u8,
    /// Where R's FIN is among `rcv_nxt`, `guest_una` and `guest_nxt`.
    pub fins: Fins,
    /// `w.nxt`: every byte of G below was sent to R. Only the low half is stored, and reads as a
    /// number of its own base.
    pub net_nxt: u64,
    /// `w.una`: every byte of G below was acknowledged by R, near `net_nxt`.
    pub net_una: u64,
    /// R's newest window field, as received.
    pub net_window: u16,
    /// `ts.recent`: R's TSval that is echoed.
    pub ts_recent: u32,
    /// The eight seconds of the clock in which it was taken.
    pub ts_recent_at: u16,
    /// `h.re`: the highest right edge advertised to R.
    pub edge_to_net: u64,
    /// `ts.emit_r`: the highest TSval emitted to R.
    pub ts_emit_r: u32,
    /// `ts.emit_g`: the highest TSval emitted to G.
    pub ts_emit_g: u32,
}

/// Where R's FIN is.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Fins {
    /// It has the number `rcv_nxt`.
    pub next: bool,
    /// G has acknowledged it, behind the bytes below `guest_una`.
    pub taken: bool,
    /// It has the last number below `guest_nxt`.
    pub given: bool,
}

impl Fins {
    /// The words of `rcv_nxt`, `guest_una` and `guest_nxt`.
    #[inline(always)]
    pub(super) fn words(self, next: u64, una: u64, given: u64) -> [u64; 3] {
        let word = |number: u64, fin: bool| number | u64::from(fin) << FIN.trailing_zeros();
        [word(next, self.next), word(una, self.taken), word(given, self.given)]
    }
}

/// The words of a record that change with traffic; their meaning is that of [`Record`]'s fields.
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "the same fields as those of `Record`")]
pub struct Progress {
    pub rcv_nxt: u64,
    pub guest_una: u64,
    pub guest_nxt: u64,
    pub net_nxt: u64,
    pub net_una: u64,
    pub net_window: u16,
    pub edge_to_net: u64,
    pub ts_recent: u32,
    pub ts_recent_at: u16,
    pub ts_emit_r: u32,
    pub ts_emit_g: u32,
    pub fins: Fins,
}

/// The argument of `Arena::alloc_record`.
pub type RecordInit = Record;

/// Bytes of the static part, appended and taken in the same order.
struct Cursor {
    bytes: [u8; STATIC_BYTES],
    at: usize,
}

impl Cursor {
    fn put(&mut self, b: &[u8]) {
        self.bytes[self.at..self.at + b.len()].copy_from_slice(b);
        self.at += b.len();
    }

    fn take<const N: usize>(&mut self) -> [u8; N] {
        let mut out = [0; N];
        out.copy_from_slice(&self.bytes[self.at..self.at + N]);
        self.at += N;
        out
    }

    fn take_u8(&mut self) -> u8 {
        self.take::<1>()[0]
    }

    fn take_u16(&mut self) -> u16 {
        u16::from_le_bytes(self.take())
    }
}

impl Record {
    /// The flow was idle: G has taken all that it was given, and no place was reserved.
    #[must_use]
    pub fn is_parked(&self) -> bool {
        let taken = self.guest_una == self.rcv_nxt;
        let given = self.guest_nxt <= self.rcv_nxt + u64::from(self.fins.taken);
        self.marks & MARK_PARKED != 0 && taken && given
    }

    /// Writes everything but the state word, which it returns (never zero).
    pub(super) fn encode(&self, generation: u32, raw: &RawRecord) -> u64 {
        let [next, una, given] = self.fins.words(self.rcv_nxt, self.guest_una, self.guest_nxt);
        store(raw, RCV_NXT, next);
        store(raw, GUEST_UNA, una);
        store(raw, GUEST_NXT, given);
        store(raw, TO_NET, to_net_word(self.net_nxt, self.net_una));
        store(raw, EDGE_TO_NET, self.edge_to_net);
        store(raw, TS_EMIT, ts_word(self.ts_emit_r, self.ts_emit_g));
        let from_net = from_net_word(self.ts_recent, self.ts_recent_at, self.net_window);
        store(raw, FROM_NET, from_net);
        store(raw, MARKS, self.marks.into());
        let mut c = Cursor { bytes: [0; STATIC_BYTES], at: 0 };
        c.put(&self.name_hash.to_le_bytes());
        c.put(&generation.to_le_bytes());
        c.put(&self.key.g_addr.0);
        c.put(&self.key.r_addr.0);
        c.put(&self.key.g_port.to_le_bytes());
        c.put(&self.key.r_port.to_le_bytes());
        c.put(&self.key.vlan.to_le_bytes());
        let version = match self.key.version {
            IpVersion::V4 => 4,
            IpVersion::V6 => 6,
        };
        c.put(&[version, self.ttl, self.ttl_to_g, self.s_g, self.s_r, self.flags]);
        c.put(&self.mss_to_g.to_le_bytes());
        c.put(&self.mss_to_r.to_le_bytes());
        c.put(&[self.l2.len]);
        c.put(&self.l2.bytes);
        c.put(&self.network_hash.to_le_bytes());
        c.put(&self.guest_isn.to_le_bytes());
        for (i, chunk) in c.bytes.chunks_exact(8).enumerate() {
            let mut w = [0; 8];
            w.copy_from_slice(chunk);
            store(raw, STATIC + i, u64::from_le_bytes(w));
        }
        checksum(raw)
    }

    /// The record, or `None` if it is free, half-written or not one.
    pub(super) fn decode(raw: &RawRecord) -> Option<Self> {
        let state = load(raw, STATE);
        if state == 0 || state != checksum(raw) {
            return None;
        }
        let mut c = Cursor { bytes: [0; STATIC_BYTES], at: 0 };
        for i in STATIC..WORDS {
            c.put(&load(raw, i).to_le_bytes());
        }
        c.at = 0;
        let name_hash = u64::from_le_bytes(c.take());
        let _generation: [u8; 4] = c.take();
        let (g_addr, r_addr) = (IpAddr16(c.take()), IpAddr16(c.take()));
        let (g_port, r_port) = (c.take_u16(), c.take_u16());
        let vlan = u64::from_le_bytes(c.take());
        let [version, ttl, ttl_to_g, s_g, s_r, flags] = c.take();
        let (mss_to_g, mss_to_r) = (c.take_u16(), c.take_u16());
        let l2 = L2Header { len: c.take_u8(), bytes: c.take() };
        let network_hash = u32::from_le_bytes(c.take());
        let guest_isn = u32::from_le_bytes(c.take());
        let version = match version {
            4 => IpVersion::V4,
            6 => IpVersion::V6,
            _ => return None,
        };
        let shape_ok = s_g <= 14 && s_r <= 14 && usize::from(l2.len) <= L2_MAX;
        let [next, una, given] = [RCV_NXT, GUEST_UNA, GUEST_NXT].map(|word| load(raw, word));
        let (ts_emit_r, ts_emit_g) = halves(load(raw, TS_EMIT));
        let (sent, acknowledged) = halves(load(raw, TO_NET));
        let net_nxt = BASE_TO_NET + u64::from(sent);
        let [marks, ..] = load(raw, MARKS).to_le_bytes();
        let (ts_recent, rest) = halves(load(raw, FROM_NET));
        let [at_low, at_high, window_low, window_high] = rest.to_le_bytes();
        shape_ok.then_some(Self {
            name_hash,
            network_hash,
            key: FlowKey { g_addr, r_addr, g_port, r_port, port: 0, vlan, version },
            l2,
            ttl,
            ttl_to_g,
            s_g,
            s_r,
            flags,
            mss_to_g,
            mss_to_r,
            rcv_nxt: next & !FIN,
            guest_una: una & !FIN,
            guest_nxt: given & !FIN,
            guest_isn,
            marks,
            fins: Fins { next: next >= FIN, taken: una >= FIN, given: given >= FIN },
            net_nxt,
            net_una: net_nxt - u64::from(sent.wrapping_sub(acknowledged)),
            net_window: u16::from_le_bytes([window_low, window_high]),
            edge_to_net: load(raw, EDGE_TO_NET),
            ts_recent,
            ts_recent_at: u16::from_le_bytes([at_low, at_high]),
            ts_emit_r,
            ts_emit_g,
        })
    }
}

/// The word that holds both emitted timestamps, so that one store commits both.
pub(super) fn ts_word(to_r: u32, to_g: u32) -> u64 {
    u64::from(to_g) << 32 | u64::from(to_r)
}

/// The word that holds what R was sent and has acknowledged.
#[inline]
pub(super) fn to_net_word(sent: u64, acknowledged: u64) -> u64 {
    acknowledged << 32 | sent & 0xffff_ffff
}

/// The word that holds R's clock and window.
#[inline]
pub(super) fn from_net_word(recent: u32, recent_at: u16, window: u16) -> u64 {
    u64::from(window) << 48 | u64::from(recent_at) << 32 | u64::from(recent)
}

/// The low half of a word, and the high one.
fn halves(word: u64) -> (u32, u32) {
    let [a, b, c, d, e, f, g, h] = word.to_le_bytes();
    (u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h]))
}

/// The generation of the record, which is part of a page descriptor's owner.
pub(super) fn generation(raw: &RawRecord) -> u32 {
    let word = load(raw, STATIC + 1).to_le_bytes();
    u32::from_le_bytes([word[0], word[1], word[2], word[3]])
}

pub(super) fn load(raw: &RawRecord, word: usize) -> u64 {
    u64::from_le(raw[word].load(Ordering::Relaxed))
}

pub(super) fn store(raw: &RawRecord, word: usize, value: u64) {
    put(&raw[word], value);
}

/// One store into the memory. After any end of the process earlier stores are there if this one is.
pub(super) fn put(word: &AtomicU64, value: u64) {
    word.store(value.to_le(), Ordering::Release);
    #[cfg(test)]
    super::arena::cuts::on_write(core::ptr::from_ref(word).addr(), &value.to_le_bytes());
}

/// Of the static words; never zero. Guards against half-written memory, not against forgery.
fn checksum(raw: &RawRecord) -> u64 {
    let sum = (STATIC..WORDS).fold(0x9e37_79b9_7f4a_7c15_u64, |h, i| {
        let mixed = (h ^ load(raw, i)).wrapping_mul(0xff51_afd7_ed55_8ccd);
        mixed ^ mixed >> 32
    });
    sum.max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::arena::tests::record;

    /// A record that claims to be whole, with one static byte changed.
    fn forged(byte: usize, value: u8) -> Option<Record> {
        let raw = RawRecord::default();
        record("vm").encode(1, &raw);
        let (word, shift) = (STATIC + byte / 8, byte % 8 * 8);
        store(&raw, word, load(&raw, word) & !(0xff << shift) | u64::from(value) << shift);
        store(&raw, STATE, checksum(&raw));
        Record::decode(&raw)
    }

    #[test]
    fn a_record_that_no_version_of_us_can_have_written_is_none() {
        // Offsets of the static part: see `encode`.
        let (version, s_g, s_r, l2) = (56, 59, 60, 66);
        assert_eq!(forged(version, 4), Some(record("vm")));
        assert_eq!(forged(version, 5), None);
        assert_eq!((forged(s_g, 14).unwrap().s_g, forged(s_r, 0).unwrap().s_r), (14, 0));
        assert_eq!((forged(s_g, 15), forged(s_r, 15)), (None, None));
        assert!(forged(l2, 22).is_some() && forged(l2, 0).is_some());
        assert_eq!((forged(l2, 23), forged(l2, 255)), (None, None));
    }

    #[test]
    fn an_l2_header_has_at_most_two_tags() {
        assert_eq!(L2Header::new(&[7; 22]).unwrap().bytes(), [7; 22]);
        assert_eq!(L2Header::new(&[7; 23]), None);
        assert_eq!(L2Header::new(&[7; 300]), None);
    }
}
