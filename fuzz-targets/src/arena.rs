//! A predecessor's memory, in any state: `Arena::open`, `recover`, and an engine that restarts over
//! it (LIFE-09).
//!
//! Input: a shape; then the source of the memory, either raw bytes over a header that is nearly
//! right, or records and pages as our own code writes them, with words of them overwritten
//! afterwards.

use arbitrary::{Arbitrary, Unstructured};
use nightporter_core::engine::{Engine, EngineConfig, Restarted};
use nightporter_core::flow::key::FlowKey;
use nightporter_core::limits::{T_ABORT, T_LEFT};
use nightporter_core::port::{GuestConfig, PortConfig, PortFeatures, PortId};
use nightporter_core::store::arena::Arena;
use nightporter_core::store::flow_store::recover;
use nightporter_core::store::record::{Fins, L2Header, MARK_TOLD, Record, name_hash};
use nightporter_core::time::{Duration, Instant};
use nightporter_core::turn::{Ports, Received, Sent, Turn, TurnConfig};
use nightporter_core::wire::packet::{
    IpAddr16, IpVersion, Packet, ipv4_header_ok, tcp_checksum_ok,
};
use nightporter_core::wire::virtio_net::VirtioNetHdr;
use zerocopy::IntoBytes;

const RECORDS_MAX: usize = 6;
const PAGES_MAX: usize = 6;
const WORD: usize = 8;
/// The word of the header with the number of records that may be used.
const HEADER_RECORDS: usize = 8;
/// Frames a flow may be worth to its two ends when it is reset, twice over for a repeated RST.
const FRAMES_PER_FLOW: usize = 8;
/// Timers a flow may need until it is forgotten.
const TIMERS_PER_FLOW: usize = 4000;
const VM: &str = "vm";

/// Judges one input.
pub fn run(data: &[u8]) {
    let mut u = Unstructured::new(data);
    let Ok((mut memory, records, pages)) = memory(&mut u) else { return };
    let bytes = memory.as_mut_bytes();
    let recovered = opens_and_recovers(&mut bytes.to_vec().into_words(), records, pages);
    if let Some(told) = recovered {
        let guest_is_there = u.arbitrary().unwrap_or(true);
        restarts(bytes, guest_is_there, told);
    }
}

/// Arenas with flows that owe bytes, whole and with words changed.
#[must_use]
pub fn seeds() -> Vec<Vec<u8>> {
    let pattern = |step: u16| (0..600).map(|i: u16| (i * step % 251) as u8).collect();
    let mut seeds: Vec<Vec<u8>> = [1, 7, 31, 103].map(pattern).into();
    seeds.push(vec![0; 600]);
    seeds.push(vec![0xff; 600]);
    seeds
}

/// Aligned memory of the same bytes.
trait IntoWords {
    fn into_words(self) -> Vec<u64>;
}

impl IntoWords for Vec<u8> {
    fn into_words(self) -> Vec<u64> {
        let words = self.chunks_exact(WORD);
        words.map(|w| u64::from_ne_bytes(w.try_into().expect("eight"))).collect()
    }
}

/// The memory, and the shape that its header should have.
fn memory(u: &mut Unstructured<'_>) -> arbitrary::Result<(Vec<u64>, usize, usize)> {
    let (records, pages) = (u.int_in_range(0..=RECORDS_MAX)?, u.int_in_range(0..=PAGES_MAX)?);
    let mut memory = vec![0_u64; Arena::layout_len(records, pages) / WORD];
    let bytes = memory.as_mut_bytes();
    let mut arena = Arena::format(bytes, records, pages, u.arbitrary()?).expect("the length fits");
    while !u.is_empty() && u.ratio(7, 8)? {
        let record = record(u)?;
        let Some(id) = arena.alloc_record(&record) else { break };
        for _ in 0..u.int_in_range(0..=3)? {
            let near = record.guest_una / nightporter_core::limits::PAGE as u64;
            let page_no = near.wrapping_add_signed(u.int_in_range(-2..=3)?);
            arena.alloc_page(id, page_no);
        }
        if u.ratio(1, 8)? {
            arena.free_record(id); // its pages have no owner then
        }
    }
    drop(arena);
    while !u.is_empty() && u.ratio(1, 3)? {
        // Mostly where everything is: the header and the tables behind it.
        let end =
            if u.ratio(7, 8)? { (4096 + 160 * records + 16 * pages) / WORD } else { memory.len() };
        let at = u.choose_index(end)?;
        memory[at] =
            if u.arbitrary()? { word(u)? } else { memory[at] ^ 1 << u.int_in_range(0..=63)? };
    }
    if u.ratio(1, 16)? {
        memory.truncate(u.choose_index(memory.len())?);
    }
    Ok((memory, records, pages))
}

/// Small numbers, numbers near an edge, and any.
fn word(u: &mut Unstructured<'_>) -> arbitrary::Result<u64> {
    let edge = *u.choose(&[0, 1 << 14, 1 << 31, 1 << 32, 1 << 33, 1 << 63])?;
    Ok(match u.int_in_range(0..=3)? {
        0 => u.arbitrary()?,
        1 => u.int_in_range(0..=16)?,
        _ => u64::wrapping_add_signed(edge, u.int_in_range(-70_000..=70_000)?),
    })
}

fn record(u: &mut Unstructured<'_>) -> arbitrary::Result<Record> {
    let v6: bool = u.arbitrary()?;
    let addr = |u: &mut Unstructured<'_>| -> arbitrary::Result<IpAddr16> {
        let last = u.int_in_range(1..=3)?;
        let mut v6_addr = [0xfd; 16];
        v6_addr[15] = last;
        Ok(if v6 { IpAddr16(v6_addr) } else { IpAddr16::from_v4([10, 0, 0, last]) })
    };
    let mut l2 = [2; 22];
    l2[12..14].copy_from_slice(&if v6 { [0x86, 0xdd] } else { [8, 0] });
    let l2_len = if u.ratio(7, 8)? { 14 } else { u.int_in_range(0..=22)? };
    let guest_una = word(u)?;
    let above = |u: &mut Unstructured<'_>| -> arbitrary::Result<u64> {
        let some = u.int_in_range(0..=50_000)?;
        if u.ratio(7, 8)? { Ok(guest_una.wrapping_add(some)) } else { word(u) }
    };
    Ok(Record {
        name_hash: if u.ratio(7, 8)? { name_hash(VM) } else { u.arbitrary()? },
        network_hash: if u.ratio(7, 8)? { 0 } else { u.arbitrary()? },
        key: FlowKey {
            g_addr: addr(u)?,
            r_addr: addr(u)?,
            g_port: u.int_in_range(80..=81)?,
            r_port: u.int_in_range(1000..=1002)?,
            port: 0,
            vlan: if u.ratio(3, 4)? { 0 } else { u.arbitrary()? },
            version: if v6 { IpVersion::V6 } else { IpVersion::V4 },
        },
        l2: L2Header::new(&l2[..l2_len]).expect("at most 22"),
        ttl: u.arbitrary()?,
        ttl_to_g: u.arbitrary()?,
        s_g: u.int_in_range(0..=14)?,
        s_r: u.int_in_range(0..=14)?,
        flags: u.arbitrary()?,
        mss_to_g: u.arbitrary()?,
        mss_to_r: u.arbitrary()?,
        rcv_nxt: above(u)?,
        guest_una,
        guest_nxt: above(u)?,
        guest_isn: u.arbitrary()?,
        marks: u.arbitrary()?,
        fins: Fins { next: u.arbitrary()?, taken: u.arbitrary()?, given: u.arbitrary()? },
        net_nxt: word(u)?,
        net_una: word(u)?,
        net_window: u.arbitrary()?,
        edge_to_net: above(u)?,
        ts_recent: u.arbitrary()?,
        ts_recent_at: u.arbitrary()?,
        ts_emit_r: u32::arbitrary(u)?,
        ts_emit_g: u32::arbitrary(u)?,
    })
}

/// If it is an arena, nothing of it belongs to two, and all of it can be had. Then this returns how
/// many of its flows a predecessor had reset.
fn opens_and_recovers(memory: &mut [u64], records: usize, pages: usize) -> Option<usize> {
    let said = memory.get(HEADER_RECORDS).copied();
    let Ok(mut arena) = Arena::open(memory.as_mut_bytes()) else { return None };
    let owned = arena.owned_pages().count();
    assert_eq!(arena.free_pages() + owned, arena.pages_total(), "a page is lost or doubled");
    let shape = arena.pages_total() == pages && said == Some((records as u64).to_le());
    let found = recover(&mut arena);
    assert!(!shape || found.len() + arena.free_records() == records, "a record is lost or doubled");
    let (mut held, mut told) = (0, 0);
    for mut flow in found {
        let (from, to) = (flow.record.guest_una, flow.record.rcv_nxt);
        assert!(from <= to, "promises end before they begin");
        held += flow.store.held_pages() as usize;
        told += usize::from(flow.record.marks & MARK_TOLD != 0);
        if flow.complete {
            let bytes: usize = flow.store.slices(&arena, from, to).map(<[u8]>::len).sum();
            assert_eq!(bytes as u64, to - from, "complete, and not all there");
        }
        flow.store.clear(&mut arena);
        arena.free_record(flow.id);
    }
    assert!(held <= owned);
    assert_eq!(arena.free_pages(), arena.pages_total(), "a page was kept");
    Some(told)
}

/// INV-21: an engine over this memory tells both ends of every flow, those that it resumes when
/// another guest is there, or none; and then it keeps nothing. Flows for which there is no way to
/// R, as of a network in which nobody is, are left for [`T_LEFT`] (LIFE-17).
fn restarts(memory: &mut [u8], guest_is_there: bool, told: usize) {
    let arena = Arena::open(memory).expect("it opened before");
    let mut now = Instant::from_millis(1_000_000);
    let config = EngineConfig::new(64, [1, 2, 3, 4]);
    let mut engine = Engine::new(now, config, arena);
    let (mut turn, mut ends) = (Turn::new(TurnConfig::default()), Ends::default());
    let uplink = turn.add_port(now, &mut engine, PortConfig::uplink("uplink"));
    let all = Some(PortFeatures::ALL);
    turn.set_features(now, &mut engine, uplink.expect("an uplink"), all);
    let guest =
        GuestConfig { ack_offload: true, budget_bytes: 0, flows_max: 64, ..GuestConfig::default() };
    let port = turn.add_port(now, &mut engine, PortConfig::guest(VM, guest)).expect("a guest");
    let Restarted { resumed, reset } = engine.handle_restart(now);
    assert!(resumed + reset <= RECORDS_MAX);
    let flows = resumed + reset + told; // the last are told once more
    let features = Some(PortFeatures::default());
    if guest_is_there {
        turn.set_features(now, &mut engine, port, features);
    }
    let uninterrupted = "nothing interrupts it";
    turn.run(now, &mut engine, &mut ends).expect(uninterrupted);
    let left = if engine.left() > 0 { T_LEFT } else { Duration::ZERO };
    let end = now + T_ABORT + T_ABORT + left + Duration::from_secs(1);
    let mut timers = 0;
    while let Some(at) = engine.poll_timeout().filter(|at| *at <= end) {
        now = now.max(at);
        turn.run(now, &mut engine, &mut ends).expect(uninterrupted);
        timers += 1;
        assert!(timers <= TIMERS_PER_FLOW * (1 + flows), "a timer storm");
    }
    let frames = ends.frames;
    assert!(frames <= FRAMES_PER_FLOW * flows, "{frames} frames for {flows} flows");
    assert_eq!(engine.arena().free_pages(), engine.arena().pages_total(), "a page was kept");
    if guest_is_there {
        assert_eq!(engine.flows().count(), 0, "a flow was kept");
        assert_eq!(engine.arena().records().count(), 0, "a record was kept");
    }
}

/// Both ends: they take all there is, and each frame must be one that a receiver can take.
#[derive(Default)]
struct Ends {
    frames: usize,
}

impl Ports for Ends {
    fn receive(&mut self, _: PortId, _: &mut [u8]) -> Received {
        Received::Empty
    }

    fn send(&mut self, _: PortId, _: &VirtioNetHdr, parts: &[&[u8]], _waited: bool) -> Sent {
        self.frames += 1;
        let bytes = parts.concat();
        // A layer-2 header that is none makes a frame that goes nowhere.
        let Ok(packet) = Packet::parse(&bytes) else { return Sent::Done };
        let Some((ip, tcp)) = packet.tcp() else { return Sent::Done };
        assert!(ipv4_header_ok(&bytes, ip) && tcp_checksum_ok(&bytes, ip, tcp), "{packet}");
        assert!(tcp.flags.rst() && tcp.payload_len == 0, "{packet}");
        Sent::Done
    }
}
