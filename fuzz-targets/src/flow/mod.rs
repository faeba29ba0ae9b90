//! One flow of the real core, and a neighbour that squeezes its VM's budget, under any sequence of
//! operations: arbitrary segments of both ends, time, a full ring, a paused guest, commands,
//! crashes.
//!
//! After every step `model` checks that no byte was lost or changed, no promise made of nothing, no
//! edge or acknowledgement taken back, no budget exceeded. At the end the guest behaves, and all
//! promised bytes must reach it.
//!
//! With `NIGHTPORTER_FUZZ_TRACE` set every step is printed.

mod model;
mod segment;
mod world;

use std::cell::RefCell;

use crate::noise;
use arbitrary::{Arbitrary, Unstructured};
use model::{Agreed, G, Model, R, Seen};
use nightporter_core::engine::{Engine, EngineConfig};
use nightporter_core::flow::key::FlowKey;
use nightporter_core::limits::PAGE;
use nightporter_core::port::{GuestConfig, PortConfig, PortFeatures, PortId};
use nightporter_core::store::arena::Arena;
use nightporter_core::store::flow_store::recover;
use nightporter_core::time::{Duration, Instant};
use nightporter_core::turn::{Turn, TurnConfig};
use nightporter_core::wire::packet::{IpAddr16, IpVersion, Seq};
use segment::{ACK, Address, CWR, ECE, Extra, Len, MSS, SYN, Segment, Window, Wish, timestamps};
use world::{Handed, Left, Replaced};
use zerocopy::IntoBytes;

const CONNS: usize = 2;
const RECORDS_MAX: usize = 3;
const PAGES_MAX: usize = 48;
const OPS_MAX: usize = 400;
/// Virtual time in all that one input may let go by.
const TIME_MAX: Duration = Duration::from_secs(900);
/// The most rounds in which a well-behaved guest takes the held bytes.
const HEAL_ROUNDS: usize = 200;
const UPLINK: PortId = PortId(0);
const GUEST: PortId = PortId(1);
const G_ADDRESS: Address = Address { mac: [2, 0, 0, 0, 0, 1], ip: [10, 0, 0, 1], port: 80 };

/// The beginning of an input.
#[derive(Arbitrary, Clone, Copy, Debug)]
struct Shape {
    pages: u8,
    records: u8,
    clocks: [u32; 2],
    features: u8,
    connect: Connect,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Op {
    /// R sends the next bytes.
    Data(Len),
    /// G acknowledges its bytes.
    Takes(Window),
    FromNet(Wish),
    FromGuest(Wish),
    /// To the neighbour, or to its guest's side.
    Beside(bool, Wish),
    /// Several segments of R come in one batch.
    Batch([Wish; 2]),
    Time(Span),
    /// Frames that the guest's ring takes from here on.
    Ring(u8),
    Paused(bool),
    Connect(Connect),
    Rare(Rare),
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Span {
    Millis(u8),
    Tenths(u8),
    Seconds(u8),
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Rare {
    Features(u8),
    NoDriver,
    GuestGone,
    Offload(bool),
    Drain,
    Crash,
    /// In the middle of a step: the frames made for this segment never left.
    CrashWithin(Wish),
}

/// A handshake.
#[derive(Arbitrary, Clone, Copy, Debug)]
struct Connect {
    beside: bool,
    guest_is_client: bool,
    isn: [u32; 2],
    offers: [Offer; 2],
    window: [u16; 2],
    ecn: bool,
    /// Segments of it that are left out at the end.
    cut: u8,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
struct Offer {
    timestamps: bool,
    sack: bool,
    scale: Option<u8>,
}

/// Judges one input.
pub fn run(data: &[u8]) {
    thread_local! {
        static MEMORY: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
    }
    let mut u = Unstructured::new(data);
    let Ok(shape) = Shape::arbitrary(&mut u) else { return };
    MEMORY.with_borrow_mut(|words| {
        let mut state = Rest::new(shape);
        let (records, pages) = state.size;
        words.resize(Arena::layout_len(RECORDS_MAX, PAGES_MAX) / 8, 0);
        let memory = &mut words.as_mut_bytes()[..Arena::layout_len(records, pages)];
        drop(Arena::format(memory, records, pages, 1).expect("the length fits"));
        loop {
            let mut world = World::new(Arena::open(memory).expect("our own"), &mut state);
            if world.s.ops == 0 {
                world.connects(&shape.connect);
            }
            let crashed = world.runs(&mut u);
            if !crashed {
                world.heals();
                return;
            }
            state.expect_recoverable(memory);
        }
    });
}

/// Transfers that stall, lose, overlap and end.
#[must_use]
pub fn seeds() -> Vec<Vec<u8>> {
    (1..9).map(|n| noise(n, 300 * n as usize)).collect()
}

/// The state that outlives the engine.
struct Rest {
    now: Instant,
    started: Instant,
    /// No later than this.
    end: Instant,
    size: (usize, usize),
    features: PortFeatures,
    clocks: [u32; 2],
    conns: [Conn; CONNS],
    /// Frames that the ring takes, and whether the guest is off its CPU.
    slots: usize,
    paused: bool,
    link: bool,
    trace: bool,
    ops: usize,
    /// The process ends in the middle of the step.
    dies: bool,
    /// The flows after the last step, the frame in work, and the frames that have left in this
    /// step.
    seen: [Option<Seen>; CONNS],
    handed: Option<Handed>,
    left: Vec<Left>,
    /// A frame that has left is being cut for its driver.
    adapts: bool,
    /// Frames that the engine made in this operation.
    frames: usize,
}

struct Conn {
    address: Address,
    model: Model,
    window: [u16; 2],
    isn: [u32; 2],
}

fn features(bits: u8) -> PortFeatures {
    let csum = bits & 1 == 0;
    let tso = csum && bits & 2 == 0;
    PortFeatures { csum, tso4: tso, tso6: tso, ecn: tso && bits & 4 == 0, uso: false }
}

impl Rest {
    fn new(shape: Shape) -> Self {
        let now = Instant::from_secs(1_000_000);
        let conn = |n: u8| Conn {
            address: Address {
                mac: [2, 0, 0, 0, 0, 2],
                ip: [10, 0, 0, 2],
                port: 40_000 + u16::from(n),
            },
            model: Model::unknown(),
            window: [1000; 2],
            isn: [0; 2],
        };
        Self {
            now,
            started: now,
            end: now + TIME_MAX,
            size: (
                1 + usize::from(shape.records) % RECORDS_MAX,
                5 + usize::from(shape.pages) % (PAGES_MAX - 4),
            ),
            features: features(shape.features),
            clocks: shape.clocks,
            conns: [conn(0), conn(1)],
            slots: usize::MAX,
            paused: false,
            link: true,
            trace: std::env::var_os("NIGHTPORTER_FUZZ_TRACE").is_some(),
            ops: 0,
            dies: false,
            seen: [None, None],
            handed: None,
            left: Vec::new(),
            adapts: false,
            frames: 0,
        }
    }

    fn key(&self, conn: usize) -> FlowKey {
        let address = &self.conns[conn].address;
        FlowKey {
            g_addr: IpAddr16::from_v4(G_ADDRESS.ip),
            r_addr: IpAddr16::from_v4(address.ip),
            vlan: 0,
            g_port: G_ADDRESS.port,
            r_port: address.port,
            port: GUEST.0,
            version: IpVersion::V4,
        }
    }

    /// Before the successor opens the arena: all that it needs is there.
    fn expect_recoverable(&self, memory: &[u8]) {
        let mut words = vec![0_u64; memory.len() / 8];
        words.as_mut_bytes().copy_from_slice(memory);
        let mut arena = Arena::open(words.as_mut_bytes()).expect("our own");
        let found = recover(&mut arena);
        for conn in &self.conns {
            let (from, to) = conn.model.owed();
            if from == to {
                continue;
            }
            let of = |port| found.iter().find(move |f| f.record.key.r_port == port);
            let flow = of(conn.address.port).expect("a record of what is owed");
            assert!(flow.complete, "promised bytes are not there (LIFE-09)");
            assert_eq!(flow.record.guest_una, from);
            assert!(
                conn.model.may_have_promised(flow.record.rcv_nxt),
                "{} of {to}",
                flow.record.rcv_nxt
            );
            let bytes: Vec<u8> = flow.store.slices(&arena, from, to).flatten().copied().collect();
            assert!(bytes == conn.model.taken(from, to), "a successor finds other bytes");
        }
    }
}

struct World<'m, 's> {
    engine: Engine<'m>,
    turn: Turn,
    s: &'s mut Rest,
}

impl<'m, 's> World<'m, 's> {
    /// An engine over an arena, of a predecessor or not.
    fn new(arena: Arena<'m>, s: &'s mut Rest) -> Self {
        let config = EngineConfig::new(16, [1, 2, 3, 4]);
        let mut engine = Engine::new(s.now, config, arena);
        let mut turn = Turn::new(TurnConfig::default());
        let uplink = PortConfig::uplink("uplink");
        assert_eq!(turn.add_port(s.now, &mut engine, uplink), Ok(UPLINK));
        let guest = GuestConfig {
            mac: Some(G_ADDRESS.mac),
            ack_offload: true,
            budget_bytes: (s.size.1 * PAGE) as u64,
            flows_max: 8,
            ..GuestConfig::default()
        };
        let guest = PortConfig::guest("vm", guest);
        assert_eq!(turn.add_port(s.now, &mut engine, guest), Ok(GUEST));
        turn.set_features(s.now, &mut engine, UPLINK, Some(PortFeatures::ALL));
        let owed: Vec<bool> = s.conns.iter().map(|c| c.model.owed()).map(|(a, b)| a < b).collect();
        engine.handle_restart(s.now);
        turn.set_features(s.now, &mut engine, GUEST, Some(s.features));
        s.dies = false;
        let link = s.link.then_some(s.features);
        let mut world = Self { engine, turn, s };
        world.set_features(link);
        world.settles();
        for (conn, owed) in world.s.conns.iter_mut().zip(owed) {
            assert!(!owed || conn.model.reset[R], "R was not told (INV-21)");
            conn.model.owed_to_g |= owed;
        }
        world
    }

    /// Until the input ends or the process does: `true`.
    fn runs(&mut self, u: &mut Unstructured<'_>) -> bool {
        while !u.is_empty() && self.s.ops < OPS_MAX {
            let Ok(op) = Op::arbitrary(u) else { return false };
            self.s.ops += 1;
            if self.s.trace {
                eprintln!("{:?} {op:?}", self.s.now.since(self.s.started));
            }
            if self.obeys(op) {
                return true;
            }
            self.settles();
            self.check();
        }
        false
    }

    /// One operation. `true`: the process is gone.
    fn obeys(&mut self, op: Op) -> bool {
        match op {
            Op::Data(len) => self.sends(R, 0, Wish::usual(len)),
            Op::Takes(window) => self.takes(0, window),
            Op::FromNet(wish) => self.sends(R, 0, wish),
            Op::FromGuest(wish) => self.sends(G, 0, wish),
            Op::Beside(from_guest, wish) => self.sends(usize::from(from_guest), 1, wish),
            Op::Batch(wishes) => wishes.into_iter().for_each(|wish| self.sends(R, 0, wish)),
            Op::Time(span) => self.lets_time_go_by(match span {
                Span::Millis(n) => Duration::from_millis(n.into()),
                Span::Tenths(n) => Duration::from_millis(100).saturating_mul(n.into()),
                Span::Seconds(n) => Duration::from_secs(n.into()),
            }),
            Op::Ring(slots) => {
                self.s.slots = if slots < 128 { slots.into() } else { usize::MAX };
                self.turn.wake(GUEST);
            }
            Op::Paused(paused) => self.s.paused = paused,
            Op::Connect(how) => self.connects(&how),
            Op::Rare(rare) => return self.obeys_rare(rare),
        }
        false
    }

    fn obeys_rare(&mut self, rare: Rare) -> bool {
        let now = self.s.now;
        match rare {
            Rare::Features(bits) => self.set_features(Some(features(bits))),
            Rare::NoDriver => self.set_features(None),
            Rare::GuestGone => {
                self.engine.handle_guest_gone(now, GUEST);
                self.s.conns.iter_mut().for_each(|c| c.model.owed_to_g = false);
            }
            Rare::Offload(on) => self.engine.set_offload(now, GUEST, on),
            Rare::Drain => self.engine.drain(now, GUEST),
            Rare::Crash => return true,
            Rare::CrashWithin(wish) => {
                self.s.dies = true;
                self.sends(R, 0, wish);
                return true;
            }
        }
        false
    }

    /// The turn is not told that a link is down: what is forwarded then counts as given.
    fn set_features(&mut self, features: Option<PortFeatures>) {
        self.s.link = features.is_some();
        match features {
            Some(_) => self.turn.set_features(self.s.now, &mut self.engine, GUEST, features),
            None => self.engine.set_port_features(self.s.now, GUEST, None),
        }
        self.s.features = features.unwrap_or(self.s.features);
    }

    fn seen(&self, conn: usize) -> Option<Seen> {
        self.engine.find_flow(&self.s.key(conn)).map(Seen::of)
    }

    // --- Handshakes ----------------------------------------------------------------------------

    fn connects(&mut self, how: &Connect) {
        let n = usize::from(how.beside);
        let conn = &mut self.s.conns[n];
        let (client, server) = if how.guest_is_client { (G, R) } else { (R, G) };
        for side in [R, G] {
            conn.isn[side] = conn.isn[side].wrapping_add(how.isn[side] | 1);
            conn.window[side] = how.window[side];
        }
        let both = |f: fn(&Offer) -> bool| how.offers.iter().all(f);
        let scaled = both(|o| o.scale.is_some());
        let shift = how.offers.map(|o| o.scale.filter(|_| scaled).map_or(0, |s| s.min(14)));
        let agreed = Agreed { timestamps: both(|o| o.timestamps), sack: both(|o| o.sack), shift };
        // A SYN with the number of the flow that is there would be that flow's, once more.
        let there = self.engine.find_flow(&self.s.key(n)).map(|flow| flow.stats().guest_isn);
        let conn = &mut self.s.conns[n];
        conn.isn[G] = conn.isn[G].wrapping_add(u32::from(there == Some(Seq(conn.isn[G]))));
        let isn = conn.isn;
        let ecn = if how.ecn { [ECE | CWR, ECE] } else { [0, 0] };
        let steps = usize::from(how.cut % 8 + 1).min(3);
        for (step, from) in [client, server, client].into_iter().enumerate().take(steps) {
            let mut old = None;
            if from == G && step < 2 {
                // From here on the old connection is gone, unless it outlives the SYN-ACK.
                let model = &mut self.s.conns[n].model;
                old = Some(std::mem::replace(model, Model::new(isn, agreed)));
                for side in [R, G] {
                    let clock = self.clock(side);
                    self.s.conns[n].model.tsvals[side].insert(clock);
                    old.iter_mut().for_each(|model| _ = model.tsvals[side].insert(clock));
                }
            }
            if step == 2 {
                self.sends(from, n, Wish::usual(Len::Nothing));
            } else {
                let flags = SYN | ecn[step] | if step == 1 { ACK } else { 0 };
                let segment = Segment {
                    seq: isn[from],
                    ack: if step == 1 { isn[1 - from].wrapping_add(1) } else { 0 },
                    flags,
                    window: how.window[from],
                    options: self.syn_options(from, &how.offers[from]),
                    payload: Vec::new(),
                    extra: Extra::Nothing,
                };
                self.s.conns[n].model.shakes = true;
                let old = old.map(|model| Replaced { model, guest_isn: there });
                self.takes_in(from, n, segment, old);
                self.s.conns[n].model.shakes = false;
            }
        }
    }

    fn syn_options(&self, from: usize, offer: &Offer) -> Vec<u8> {
        let mut options = vec![2, 4];
        options.extend((MSS + if offer.timestamps { 12 } else { 0 }).to_be_bytes());
        if offer.timestamps {
            options.extend(timestamps(self.clock(from), 0));
        }
        if offer.sack {
            options.extend([4, 2, 1, 1]);
        }
        if let Some(shift) = offer.scale {
            options.extend([3, 3, shift, 1]);
        }
        options
    }

    // --- Verdicts ------------------------------------------------------------------------------

    /// The conditions between two steps.
    fn check(&mut self) {
        let engine = &self.engine;
        let vm = engine.vm(GUEST).expect("a guest");
        assert!(vm.reserved_pages <= vm.budget_pages, "over the budget (INV-06)");
        let flows = || engine.flows().map(|(_, _, flow)| flow);
        let reserved: u64 = flows().map(|f| u64::from(f.stats().reserved_pages)).sum();
        assert_eq!(reserved, vm.reserved_pages, "a reservation of nobody (INV-06)");
        let held: usize = flows().map(|f| f.store().held_pages() as usize).sum();
        let arena = engine.arena();
        assert_eq!(arena.free_pages() + held, arena.pages_total(), "a page is lost or doubled");
        assert_eq!(arena.owned_pages().count(), held, "a page of nobody");
        let records = flows().filter(|f| f.stats().has_record).count();
        assert_eq!(arena.free_records() + records, self.s.size.0, "a record is lost or doubled");
        for conn in 0..CONNS {
            let flow = engine.find_flow(&self.s.key(conn));
            let seen = flow.map(Seen::of);
            self.s.conns[conn].model.check(flow.zip(seen.as_ref()), arena);
        }
    }

    /// The guest behaves from now on: it gets all promised bytes, or both ends get a reset.
    fn heals(&mut self) {
        (self.s.slots, self.s.paused) = (usize::MAX, false);
        self.set_features(Some(features(0)));
        self.s.end = self.s.now + TIME_MAX;
        self.settles();
        for _ in 0..HEAL_ROUNDS {
            let needy = |s: Seen| s.is_gated() && s.guest_una < s.rcv_nxt;
            if !(0..CONNS).any(|conn| self.seen(conn).is_some_and(needy)) {
                break;
            }
            for conn in 0..CONNS {
                if self.seen(conn).is_some_and(|seen| seen.is_gated()) {
                    self.takes(conn, Window::Any(0x7fff));
                }
            }
            self.lets_time_go_by(Duration::from_millis(250));
            self.settles();
            self.check();
        }
        for conn in 0..CONNS {
            let model = &self.s.conns[conn].model;
            let deaf = model.owed_to_g && !model.lost && !model.reset[G];
            assert!(!deaf, "G was not told (INV-21)");
            let Some(seen) = self.seen(conn).filter(Seen::is_gated) else { continue };
            let lost = self.s.conns[conn].model.lost;
            assert!(lost || seen.guest_una >= seen.rcv_nxt, "{seen:?} never gets to G (INV-18)");
        }
    }
}
