//! An image of a VM's connections, from a host that lies: `Engine::import`, and an engine that goes
//! on with what it has read (LIFE-09).
//!
//! Input: how an honest connection begins and goes on; then the bytes that are put in the place of
//! others in its image, which is sealed again; then the segments that both ends send to the engine
//! that has read it, and time. The engine may refuse the image, and nothing has changed then. Else
//! every frame that it makes is one that a receiver can take, there is a bound on their number, and
//! in the end all memory comes back.

use arbitrary::{Arbitrary, Unstructured};
use nightporter_check::wire::{Segment, TcpFlags};
use nightporter_core::engine::{Engine, EngineConfig, seal_image};
use nightporter_core::limits::PAGE;
use nightporter_core::port::{GuestConfig, PortConfig, PortFeatures, PortId};
use nightporter_core::store::arena::Arena;
use nightporter_core::time::{Duration, Instant};
use nightporter_core::turn::{Ports, Received, Sent, Turn, TurnConfig};
use nightporter_core::wire::packet::{Packet, ipv4_header_ok, tcp_checksum_ok};
use nightporter_core::wire::virtio_net::VirtioNetHdr;
use zerocopy::IntoBytes;

use crate::noise;

const RECORDS: usize = 4;
const PAGES: usize = 40;
const UPLINK: PortId = PortId(0);
const GUEST: PortId = PortId(1);
/// Bytes of an image before what the checksum covers.
const HEADER: usize = 24;
const MSS: u16 = 1000;
const SYN: u8 = 2;
const ACK: u8 = 16;
const OPS_MAX: usize = 60;
/// Segments that a window may be, all of the smallest size, and their acknowledgements.
const FRAMES_MAX: usize = 20_000;
const WAKES_MAX: usize = 5_000;

/// How the connection begins.
#[derive(Arbitrary, Clone, Copy, Debug)]
struct Shape {
    timestamps: bool,
    sack: bool,
    guest_is_client: bool,
    isn: [u32; 2],
    window: [u16; 2],
    /// H sends for G.
    floods: bool,
    /// The other host's clock is ahead by so many milliseconds.
    shift: u16,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Op {
    /// R sends so many bytes, from so far behind its last ones.
    Data {
        len: u16,
        skips: u8,
        flags: u8,
    },
    /// G acknowledges so much more, and sends so many bytes.
    Takes {
        more: u16,
        window: u16,
        len: u16,
        flags: u8,
    },
    Millis(u16),
    /// Frames that the guest's ring takes from here on.
    Ring(u8),
    Late(bool),
}

/// Judges one input.
pub fn run(data: &[u8]) {
    let mut u = Unstructured::new(data);
    let _ = judge(&mut u);
}

/// Connections with bytes at both ends, and a hole.
#[must_use]
pub fn seeds() -> Vec<Vec<u8>> {
    (1..9).map(|n| noise(n, 120 * n as usize)).collect()
}

fn judge(u: &mut Unstructured<'_>) -> arbitrary::Result<()> {
    let shape = Shape::arbitrary(u)?;
    let mut memories = [memory(), memory()];
    let [here, there] = memories.each_mut().map(|m| m.as_mut_bytes());
    let mut world = World::new(here, Instant::from_secs(1_000), shape);
    world.connects();
    for _ in 0..u.int_in_range(0..=12)? {
        world.obeys(u.arbitrary()?);
    }
    world.engine.hand_back(world.now, GUEST);
    world.settles();
    let Ok(mut image) = world.engine.export(world.now, GUEST) else { return Ok(()) };
    let was_changed = change(u, &mut image)?;
    let now = world.now + Duration::from_millis(shape.shift.into());
    let mut other = World { ends: world.ends, ..World::new(there, now, shape) };
    let imported = other.engine.import(now, GUEST, &image);
    assert!(was_changed || imported.is_ok(), "an honest image is refused: {imported:?}");
    if imported.is_err() {
        other.is_empty();
        return Ok(());
    }
    for _ in 0..OPS_MAX {
        if u.is_empty() {
            break;
        }
        other.obeys(u.arbitrary()?);
    }
    other.turn.remove_port(other.now, &mut other.engine, GUEST);
    other.settles();
    other.is_empty();
    Ok(())
}

fn memory() -> Vec<u64> {
    vec![0; Arena::layout_len(RECORDS, PAGES) / 8]
}

/// Puts bytes and numbers in the place of others.
fn change(u: &mut Unstructured<'_>, image: &mut Vec<u8>) -> arbitrary::Result<bool> {
    let before = image.clone();
    if u.ratio(1, 16)? {
        image.truncate(HEADER);
        image.extend(u.bytes(u.len() / 2)?);
    }
    for _ in 0..u.int_in_range(0..=4)? {
        let len = image.len() - HEADER;
        if len < 8 {
            break;
        }
        let at = HEADER + u.choose_index(len - 7)?;
        match u.int_in_range(0..=3)? {
            0 => image[at..at + 8].copy_from_slice(&number(u)?.to_le_bytes()),
            1 => {
                let old = u64::from_le_bytes(image[at..at + 8].try_into().expect("eight"));
                let near = old.wrapping_add_signed(u.int_in_range(-70_000..=70_000)?);
                image[at..at + 8].copy_from_slice(&near.to_le_bytes());
            }
            _ => image[at] = u.arbitrary()?,
        }
    }
    seal_image(image);
    Ok(before != *image)
}

/// A number near an edge, or any.
fn number(u: &mut Unstructured<'_>) -> arbitrary::Result<u64> {
    let edge = *u.choose(&[0, 1 << 31, 1 << 32, 1 << 33, 1 << 62, 1 << 63])?;
    if u.ratio(3, 4)? {
        return Ok(u64::wrapping_add_signed(edge, u.int_in_range(-70_000..=70_000)?));
    }
    u.arbitrary()
}

struct World<'m> {
    engine: Engine<'m>,
    turn: Turn,
    now: Instant,
    shape: Shape,
    ends: Ends,
}

/// Both ends, as far as an honest connection has numbers.
#[derive(Clone, Copy)]
struct Ends {
    /// The next bytes of R and of G, and the end of the bytes that G has acknowledged.
    next: [u32; 2],
    taken: u32,
    /// Frames that the guest's ring takes.
    slots: usize,
    /// Frames of the engine in this step.
    frames: usize,
}

impl<'m> World<'m> {
    fn new(memory: &'m mut [u8], now: Instant, shape: Shape) -> Self {
        let arena = Arena::format(memory, RECORDS, PAGES, 1).expect("the length fits");
        let mut engine = Engine::new(now, EngineConfig::new(16, [1, 2, 3, 4]), arena);
        let mut turn = Turn::new(TurnConfig::default());
        let guest = GuestConfig {
            mac: Some([2, 0, 0, 0, 0, 1]),
            ack_offload: true,
            congestion_offload: shape.floods,
            budget_bytes: (PAGES * PAGE) as u64,
            flows_max: 16,
            ..GuestConfig::default()
        };
        for config in [PortConfig::uplink("uplink"), PortConfig::guest("vm", guest)] {
            let port = turn.add_port(now, &mut engine, config).expect("there is room");
            turn.set_features(now, &mut engine, port, Some(PortFeatures::ALL));
        }
        let next = shape.isn.map(|isn| isn.wrapping_add(1));
        let ends = Ends { next, taken: next[0], slots: usize::MAX, frames: 0 };
        Self { engine, turn, now, shape, ends }
    }

    fn connects(&mut self) {
        let (client, server) = if self.shape.guest_is_client { (1, 0) } else { (0, 1) };
        self.sends(client, SYN, -1, 0);
        self.sends(server, SYN | ACK, -1, 0);
        self.sends(client, ACK, 0, 0);
    }

    fn obeys(&mut self, op: Op) {
        match op {
            Op::Data { len, skips, flags } => {
                let len = len % 8_000;
                self.ends.next[0] = self.ends.next[0].wrapping_add(u32::from(skips / 64) * 700);
                self.sends(0, ACK | flags & !SYN, 0, len);
                self.ends.next[0] = self.ends.next[0].wrapping_add(len.into());
            }
            Op::Takes { more, window, len, flags } => {
                self.ends.taken = self.ends.taken.wrapping_add(more.into());
                self.shape.window[1] = window;
                let len = len % 8_000;
                self.sends(1, ACK | flags & !SYN, 0, len);
                self.ends.next[1] = self.ends.next[1].wrapping_add(len.into());
            }
            Op::Millis(ms) => self.lets_time_go_by(Duration::from_millis(ms.into())),
            Op::Ring(slots) => {
                self.ends.slots = if slots < 128 { slots.into() } else { usize::MAX };
                self.turn.wake(GUEST);
            }
            Op::Late(late) => self.engine.set_late(self.now, GUEST, late),
        }
        self.settles();
    }

    fn sends(&mut self, from: usize, flags: u8, off: i32, len: u16) {
        let mac = |n: usize| [2, 0, 0, 0, 0, if n == 1 { 1 } else { 2 }];
        let ip = |n: usize| [10, 0, 0, if n == 1 { 1 } else { 2 }];
        let port = |n: usize| if n == 1 { 80 } else { 40_000 };
        let syn = flags & SYN != 0;
        let mut options = if syn { [[2, 4], MSS.to_be_bytes()].concat() } else { Vec::new() };
        if self.shape.timestamps {
            let clock = u32::try_from(self.now.as_millis() & 0xffff_ffff).expect("32 bits");
            options.extend([1, 1, 8, 10]);
            options.extend([clock.to_be_bytes(), clock.to_be_bytes()].concat());
        }
        if self.shape.sack && syn {
            options.extend([4, 2, 1, 1]);
        }
        let acked = if from == 0 { self.ends.next[1] } else { self.ends.taken };
        let segment = Segment {
            src_mac: mac(from),
            dst_mac: mac(1 - from),
            src: ip(from).into(),
            dst: ip(1 - from).into(),
            src_port: port(from),
            dst_port: port(1 - from),
            seq: self.ends.next[from].wrapping_add_signed(off),
            ack: if flags & ACK != 0 { acked } else { 0 },
            flags: TcpFlags(flags.into()),
            window: self.shape.window[from],
            options,
            offload: (len > MSS).then_some(MSS),
            ..Segment::default()
        };
        let frame = segment.frame(&vec![[b'r', b'g'][from]; len.into()]);
        let mut bytes = frame.bytes;
        let Self { engine, turn, ends, now, .. } = self;
        ends.frames = 0;
        let port = [UPLINK, GUEST][from];
        let _ = turn.handle_frame(*now, engine, ends, port, frame.hdr, &mut bytes);
        self.settles();
    }

    /// Turns of the worker, until nothing is left to do.
    fn settles(&mut self) {
        let Self { engine, turn, ends, now, .. } = self;
        ends.frames = 0;
        loop {
            turn.run(*now, engine, ends).expect("nothing interrupts it");
            if !turn.rest(ends) {
                break;
            }
        }
        let vm = self.engine.vm(GUEST);
        assert!(vm.is_none_or(|vm| vm.reserved_pages <= vm.budget_pages), "INV-06");
    }

    fn lets_time_go_by(&mut self, span: Duration) {
        let target = self.now + span;
        let mut wakes = 0;
        while let Some(at) = self.engine.poll_timeout().filter(|at| *at <= target) {
            self.now = self.now.max(at);
            self.settles();
            wakes += 1;
            assert!(wakes <= WAKES_MAX, "a timer storm");
        }
        self.now = target;
    }

    /// Nothing is held for anybody.
    fn is_empty(&self) {
        let arena = self.engine.arena();
        assert_eq!(arena.free_pages(), arena.pages_total(), "a page was kept");
        assert_eq!(arena.free_records(), RECORDS, "a record was kept");
        assert_eq!(self.engine.flows_len(), 0, "a flow was kept");
    }
}

impl Ports for Ends {
    fn receive(&mut self, _: PortId, _: &mut [u8]) -> Received {
        Received::Empty
    }

    fn send(&mut self, port: PortId, hdr: &VirtioNetHdr, parts: &[&[u8]], _waited: bool) -> Sent {
        if port == GUEST && self.slots == 0 {
            return Sent::Full;
        }
        self.slots -= usize::from(port == GUEST && self.slots < usize::MAX);
        self.frames += 1;
        assert!(self.frames <= FRAMES_MAX, "a storm of frames");
        let bytes = parts.concat();
        let packet = Packet::parse(&bytes).expect("a frame that a receiver reads");
        let Some((ip, tcp)) = packet.tcp() else { return Sent::Done };
        let is_whole = hdr.needs_csum() || tcp_checksum_ok(&bytes, ip, tcp);
        assert!(ipv4_header_ok(&bytes, ip) && is_whole, "{packet}");
        Sent::Done
    }
}
