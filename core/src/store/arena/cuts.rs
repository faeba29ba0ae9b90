//! The process is killed between any two stores into the arena, also inside one call of the engine:
//! between payload, record and ACK. Each store and each outgoing ACK is noted. For every prefix of
//! that list the memory is as a successor would find it.

#![allow(clippy::cast_possible_truncation, reason = "numbers on the wire are 32 bits")]

use std::cell::RefCell;

use zerocopy::IntoBytes;

use super::*;
use crate::common::segment::pattern_bytes;
use crate::common::{Peer, Random, Setup, Side, World};
use crate::store::flow_store::{FlowStore, Recovered, recover};
use crate::tcp::flow::{Flow, unwrapped_isn};
use crate::time::Instant;
use crate::wire::seq::Seq;

/// Plans, each with connections, losses and pauses of its own.
const PLANS: u64 = 1000;
const EVENTS: u64 = 16;
const CONNECTIONS: usize = 2;

enum Entry {
    /// A store, by its address.
    Write(usize, Vec<u8>),
    /// An ACK to R left, or one of G came: connection, and up to where on R's stream.
    Promised(usize, u32),
    Taken(usize, u32),
}

thread_local! {
    static LOG: RefCell<Option<Vec<Entry>>> = const { RefCell::new(None) };
}

fn log(entry: Entry) {
    LOG.with_borrow_mut(|log| {
        if let Some(log) = log {
            log.push(entry);
        }
    });
}

/// A store has executed. Nothing outside the test below listens.
pub(in crate::store) fn on_write(address: usize, bytes: &[u8]) {
    if LOG.with_borrow(Option::is_some) {
        log(Entry::Write(address, bytes.to_vec()));
    }
}

fn on_emitted(conn: usize, to: Side, ack: u32) {
    if to == Side::R {
        log(Entry::Promised(conn, ack));
    }
}

/// The memory as a successor would find it, and what the successor must know.
struct Successor {
    /// The memory as it is at the cut; the records and descriptors of a copy may be touched.
    memory: Vec<u64>,
    copy: Vec<u64>,
    address: usize,
    isn: u32,
    pages_at: usize,
    /// R's stream.
    stream: Vec<u8>,
    promised: [u32; CONNECTIONS],
    taken: [u32; CONNECTIONS],
    cuts: u64,
    resumed: u64,
}

impl Successor {
    fn replay(&mut self, entries: Vec<Entry>, w: &World<'_>) {
        for entry in entries {
            match entry {
                Entry::Promised(conn, ack) => {
                    self.promised[conn] = self.promised[conn].max(ack);
                    self.check(w);
                }
                Entry::Taken(conn, ack) => self.taken[conn] = self.taken[conn].max(ack),
                Entry::Write(address, bytes) => {
                    let at = address - self.address;
                    for memory in [&mut self.memory, &mut self.copy] {
                        memory.as_mut_bytes()[at..at + bytes.len()].copy_from_slice(&bytes);
                    }
                    self.check(w);
                }
            }
        }
    }

    /// INV-21, LIFE-09: bytes that were promised and not taken are in a record, and in pages.
    fn check(&mut self, w: &World<'_>) {
        self.cuts += 1;
        let meta = ..self.pages_at;
        self.copy.as_mut_bytes()[meta].copy_from_slice(&self.memory.as_bytes()[meta]);
        let mut arena = Arena::open(self.copy.as_mut_bytes()).expect("formatted");
        let found = recover(&mut arena);
        for (conn, (&promised, &taken)) in self.promised.iter().zip(&self.taken).enumerate() {
            let port = 40_000 + u16::try_from(conn).expect("few");
            let mut records = found.iter().filter(|f| f.record.key.r_port == port);
            let flow = records.next();
            assert!(records.next().is_none(), "two records of one flow\n{}", w.trace());
            let relative = |seq: u64| (seq as u32).wrapping_sub(self.isn);
            if promised > taken {
                let record = flow.expect("a record of what is owed").record;
                let (held, una) = (relative(record.rcv_nxt), relative(record.guest_una));
                assert!(
                    held >= promised,
                    "R was told {promised}, the record {held}\n{}",
                    w.trace()
                );
                assert!(una <= taken, "G took {taken}, the record says {una}\n{}", w.trace());
            }
            let Some(flow) = flow else { continue };
            assert!(flow.complete, "pages of {:?} are missing\n{}", flow.record, w.trace());
            self.resumed += u64::from(resumes(flow, relative, (promised, taken), w));
            let mut at = relative(flow.record.guest_una) as usize;
            for piece in flow.store.slices(&arena, flow.record.guest_una, flow.record.rcv_nxt) {
                let same = self.stream.get(at..at + piece.len()) == Some(piece);
                assert!(same, "bytes from {at} on are not R's\n{}", w.trace());
                at += piece.len();
            }
        }
    }
}

/// Whether the flow goes on (LIFE-09). If it does, it promises what R was told, believes no more of
/// G than G has said, and is in order.
fn resumes(
    found: &Recovered,
    relative: impl Fn(u64) -> u32,
    (promised, taken): (u32, u32),
    w: &World<'_>,
) -> bool {
    let now = Instant::from_millis(1);
    let flow = Flow::resumed(now, &found.record, found.id, FlowStore::default());
    let Ok(flow) = flow else { return false };
    let (next, una, ack) = flow.numbers();
    assert!(relative(next) >= promised, "R was told {promised}\n{}", w.trace());
    assert!(relative(una) <= taken && una <= next, "G took {taken}\n{}", w.trace());
    assert!(ack <= next, "an ACK beyond what is held\n{}", w.trace());
    true
}

/// One thing that happens.
fn happens(w: &World<'_>, pairs: &[(Peer<'_>, Peer<'_>)], sent: &mut [i64], random: &mut Random) {
    let conn = usize::try_from(random.below(CONNECTIONS as u64)).expect("few");
    let ((r, g), next) = (&pairs[conn], &mut sent[conn]);
    let len = i64::try_from(1 + random.below(1000)).expect("small");
    match random.below(8) {
        0..3 => {
            r.sends(&format!("{next}:{}", *next + len));
            *next += len;
        }
        3 => {
            // Out of order, and then the hole.
            let hole = *next + len;
            r.sends(&format!("{hole}:{}", hole + len));
            r.sends(&format!("{next}:{hole}"));
            *next = hole + len;
        }
        4 => drop(r.sends(&format!("{}:{next}", (*next - len).max(1)))),
        5 => g.stops(usize::try_from(random.below(3)).expect("small")),
        6 => {
            g.runs();
            let took = |seen: &crate::common::Seen| seen.range().1;
            if let Some(most) = g.takes_all().iter().map(took).max() {
                let acked = g.end(|end| end.acked).max(i64::from(most));
                log(Entry::Taken(conn, u32::try_from(acked).expect("small")));
                g.sends(&format!("ack {acked}"));
            }
        }
        _ => w.after_ms(random.below(600)),
    }
}

/// Memory of a predecessor: each page was of a record that is the first of its place again, and
/// held what R sends first.
fn used_memory(setup: &Setup) -> Vec<u64> {
    let (pages, records) = setup.arena;
    let mut memory = vec![0_u64; setup.memory_len() / 8];
    let descs_at = HEADER_WORDS + records * record::WORDS;
    let first = unwrapped_isn(Seq(setup.isn[0])) / PAGE as u64;
    let descs = memory[descs_at..].chunks_exact_mut(DESC_WORDS).take(pages);
    for ((n, desc), owner) in (0..).zip(descs).zip((1..=records as u64).cycle()) {
        desc[OWNER] = (1_u64 << 32 | owner).to_le();
        desc[PAGE_NO] = (first + n / records as u64).to_le();
    }
    memory
}

#[test]
fn life_09_a_kill_between_any_two_stores_leaves_every_promise_in_the_arena() {
    let setup = Setup { arena: (16, 4), budget_bytes: 16 << 14, ..Setup::new() };
    let (mut cuts, mut resumed) = (0, 0);
    for plan in 0..PLANS {
        let mut random = Random::new(plan + 1);
        let mut memory = used_memory(&setup);
        let address = memory.as_ptr().addr();
        let w = setup.opens_in(memory.as_mut_bytes());
        let mut successor = Successor {
            memory: vec![0; setup.memory_len() / 8],
            copy: vec![0; setup.memory_len() / 8],
            address,
            isn: setup.isn[0],
            pages_at: setup.memory_len() - setup.arena.0 * PAGE,
            stream: pattern_bytes(Side::R as u32, 0, 40_000),
            promised: [1; CONNECTIONS],
            taken: [1; CONNECTIONS],
            cuts: 0,
            resumed: 0,
        };
        // As `format` left it.
        let mut fresh = used_memory(&setup);
        drop(Arena::format(fresh.as_mut_bytes(), 4, 16, 1).expect("it fits"));
        LOG.set(Some(Vec::new()));
        successor.memory.copy_from_slice(&fresh);
        successor.copy.copy_from_slice(&fresh);
        w.0.borrow_mut().outside.watcher = Some(on_emitted);
        let pairs = [(); CONNECTIONS].map(|()| w.connects());
        // G's bytes are kept too, with numbers near R's: none may be found instead of these.
        let port = w.guest_port();
        w.engine(|e, _| e.set_congestion_offload(port, plan % 2 == 0));
        let (mut sent, mut handed_over) = ([1; CONNECTIONS], [1; CONNECTIONS]);
        for _ in 0..EVENTS {
            let conn = random.below(2) as usize;
            let ((r, g), next) = (&pairs[conn], &mut handed_over[conn]);
            if random.below(3) == 0 {
                g.sends(&format!("{next}:{}", *next + 3000));
                *next += 3000;
            } else if random.below(3) == 0 {
                r.sends(&format!("ack {next}"));
            }
            happens(&w, &pairs, &mut sent, &mut random);
            let entries = LOG.take().unwrap_or_default(); // a successor's stores are not noted
            successor.replay(entries, &w);
            LOG.set(Some(Vec::new()));
        }
        LOG.set(None);
        cuts += successor.cuts;
        resumed += successor.resumed;
    }
    assert!(resumed > cuts / 4, "{resumed} of {cuts} cuts are of flows that go on");
    assert!(cuts > 50 * PLANS, "{cuts} cuts");
}
