//! A front-end that does whatever comes to its mind, to devices of several VMs: messages and
//! descriptors of all kinds, ring contents, memory that goes. Its deeds come from a seed.
//!
//! It lives many lives. In each it sets up a device, waits until that is obeyed, and does so many
//! things with it that rings run most of the time; then it goes in one way or another.

pub(crate) mod kernel;
mod memory;
mod messages;
mod rings;
mod speech;

use std::collections::{BTreeMap, VecDeque};
use std::net::{SocketAddrV4, TcpStream};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc;
use std::thread;

use nightporter_core::wire::vsock::LEN;
use nightporterd::vhost::features::bit;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

use crate::driver::{GUEST_BASE, NEXT, Ram, USER_BASE};
use crate::guest::{PLAIN, RAM_LEN};
use crate::killed::Tmpfs;
use crate::plugged;
use memory::Sieve;

const QUEUE_SIZE: u64 = 256;
/// Where its rings are: descriptors, then the driver's area, then the device's; one after the
/// other.
const RING: u64 = 0x1_0000;
const AVAIL: u64 = QUEUE_SIZE * 16;
const USED: u64 = 0x8000;
/// Of a frame or packet in its memory, which begins behind the rings.
const PLACE: u64 = 2048;
const PLACES: u64 = GUEST_BASE + (2 << 20);
const PLACES_COUNT: u64 = (RAM_LEN - (2 << 20)) / PLACE;
/// Where a table of [`CRUMBS`] buffers is, and where these are.
const TABLE: u64 = GUEST_BASE + (1 << 20) + (1 << 19);
const CRUMBS: u64 = 1024;
/// Sizes of files without content.
const SPARSE: [u64; 6] = [1 << 20, 1 << 30, 1 << 34, 1 << 40, 1 << 41, 1 << 46];
/// Where that one is for the guest and the front-end, or twice as far, and so on.
const FAR_AWAY: u64 = 1 << 42;
/// A file of which pages far from each other are touched, for each takes a page of page tables; and
/// where it is.
const WIDE: u64 = 1 << 33;
const WIDE_AT: u64 = 1 << 40;
/// A file in which holes are punched, and where it is.
const SIEVE: u64 = 64 << 20;
const SIEVE_AT: u64 = 1 << 41;
/// Holes one after the other.
const HOLES: usize = 4;
/// Things done in one life at most.
const LIFE: u64 = 10_000;
/// Things done before it listens whether somebody is there.
const LISTENS_EVERY: u64 = 32;
/// Descriptors that wait for one eventfd: [`CROWD`] epolls of so many names for it.
const CROWD: usize = 150;
/// Protocol features: MQ, RARP, REPLY_ACK, INFLIGHT_SHMFD, CONFIGURE_MEM_SLOTS.
const PROTOCOL: u64 = 1 | 1 << 2 | 1 << 3 | 1 << 12 | 1 << 15;
/// CONFIGURE_MEM_SLOTS.
const SLOTS: u64 = 1 << 15;
/// REPLY_ACK, CONFIGURE_MEM_SLOTS.
const PROTOCOL_OF_SOCKETS: u64 = 1 << 3 | 1 << 15;
const VRING_NO_FD: u64 = 1 << 8;
/// Sockets given away at a time whose closing waits.
const PEERS: usize = 2;

/// SplitMix64 (Steele, Lea and Flood, 2014).
#[derive(Debug)]
pub(crate) struct Random(pub(crate) u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    fn of<T: Copy>(&mut self, list: &[T]) -> T {
        list[usize::try_from(self.below(list.len() as u64)).unwrap()]
    }

    /// A number as messages and rings have them.
    fn word(&mut self) -> u64 {
        let (near, bit) = (self.below(RAM_LEN), self.below(64));
        let (small, any) = (self.below(4), self.next());
        let usual = [QUEUE_SIZE, PLAIN, PLAIN | bit::EVENT_IDX, RAM_LEN, 1 << bit, any];
        match self.below(4) {
            0 => small,
            1 => GUEST_BASE + near,
            2 => USER_BASE + near,
            _ => self.of(&usual),
        }
    }
}

/// The device that a villain attacks.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Device {
    /// A network card with so many pairs, whose memory may shrink.
    Card(u64),
    /// A network card whose memory may not.
    Sealed,
    /// A network card whose signals the daemon has to wait for, or to tell very many. That bans it.
    Trap,
    Crowd,
    /// One in whose memory holes are punched all over while the daemon uses it. That bans it too.
    Sieve,
    /// A socket device, whose memory may shrink.
    Sockets,
}

impl Device {
    fn queues(self) -> u64 {
        match self {
            Self::Card(pairs) => 2 * pairs,
            Self::Sealed | Self::Trap | Self::Crowd | Self::Sieve => 2,
            Self::Sockets => 3,
        }
    }

    fn memory(self) -> Rc<Ram> {
        let len = usize::try_from(RAM_LEN).unwrap();
        let is_sealed = !matches!(self, Self::Card(_) | Self::Sockets);
        let ram = if is_sealed { Ram::new(len) } else { Ram::unsealed(len) };
        fill(&ram, self);
        ram
    }
}

/// Where its memory is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Place {
    Usual,
    /// In a file system without room, from the next life on.
    NextTight,
    Tight,
}

/// One of the devices, and what it has there.
struct Villain {
    device: Device,
    socket: PathBuf,
    stream: Option<OwnedFd>,
    /// Not all that it said was obeyed yet, as far as it knows.
    waits: bool,
    /// Things left to do in this life.
    left: u64,
    ram: Rc<Ram>,
    kick: OwnedFd,
    call: OwnedFd,
    avail_idx: Vec<u16>,
    log: Option<OwnedFd>,
    /// [`WIDE`] is part of its memory.
    is_wide: bool,
    place: Place,
    /// The file in which holes are punched, and whether a thread does so.
    sieve: Option<OwnedFd>,
    is_punched: Arc<AtomicBool>,
    puncher: mpsc::Sender<Sieve>,
    /// Epolls that make its signals slow.
    crowd: Vec<OwnedFd>,
    /// The thread that closes descriptors given away.
    closer: mpsc::Sender<OwnedFd>,
    /// Where the overlay of the host receives.
    overlay: SocketAddrV4,
    /// Peers of sockets given away, which do not read.
    peers: VecDeque<TcpStream>,
}

/// See the module's doc.
pub(crate) struct Mallory {
    pub(crate) seed: u64,
    random: Random,
    villains: Vec<Villain>,
    /// Where there is hardly any room, if there can be such a place.
    small: Option<Tmpfs>,
    /// How many things are done to rings for one of the others, in a measure of its own.
    rings: u64,
    /// Number of each deed.
    pub(crate) done: BTreeMap<&'static str, u64>,
}

type Deed = fn(&mut Villain, &mut Random, Option<&Tmpfs>) -> bool;

/// Deeds on rings, and their weights.
const OF_RINGS: &[(u64, &str, Deed)] = &[
    (300, "frames", |it, random, _| it.sends_frames(random)),
    (150, "buffers", |it, random, _| it.offers_buffers(random)),
    (100, "any descriptors", |it, random, _| it.offers(random)),
    (60, "crumbs", |it, random, _| it.offers_crumbs(random)),
    (60, "long chains", |it, random, _| it.offers_a_long_chain(random)),
    (60, "scribbles", |it, random, _| it.scribbles(random)),
    (60, "kicks", |it, random, _| it.kicks(random.below(64))),
    (8, "frames far apart", |it, random, _| it.sends_from_far_away(random)),
    (20, "holes", |it, random, _| it.punches_a_hole(random)),
];

/// Messages and deeds on memory, likewise. Some are obeyed only after a while.
const OTHERS: &[(u64, &str, Deed)] = &[
    (2, "cut memory", |it, _, _| it.cuts()),
    (2, "memory cut under frames", |it, random, _| it.cuts_what_it_offers(random)),
    (2, "memory without room", |it, _, small| small.is_some_and(|small| it.moves_to(small))),
    (4, "regions of terabytes", |it, random, _| it.shares_terabytes(random)),
    (4, "many regions", |it, random, _| it.shares_many(random)),
    (4, "regions taken away", |it, random, _| it.takes_regions_away(random)),
    (2, "a log of what is in flight", |it, random, _| it.gives_a_log(random)),
    (4, "lies in the log", |it, random, _| it.writes_into_its_log(random)),
    (2, "an unsealed log", |it, random, _| it.gives_an_unsealed_log(random)),
    (2, "a log that is cut", |it, _, _| it.cuts_its_log()),
    (40, "any message", |it, random, _| it.babbles(random)),
    (10, "other descriptors", |it, random, _| it.gives_other_descriptors(random)),
    (2, "its own connection", |it, random, _| it.gives_itself(random)),
    (10, "rings that stop and start", |it, random, _| it.stops_and_starts(random)),
    (10, "announcements", |it, random, _| it.announces(random)),
    (4, "rings without descriptors", |it, random, _| it.wants_to_be_polled(random)),
    (4, "kicks for ever", |it, random, _| it.kicks_for_ever(random)),
    (2, "bursts of datagrams", |it, _, _| it.sends_a_burst()),
    (10, "forged outer packets", |it, random, _| it.forges(random)),
    (4, "a log of what is dirty", |it, random, _| it.wants_to_know_what_is_dirty(random)),
    (2, "broken messages", |it, random, _| it.says_noise(random)),
    (2, "half a message", |it, random, _| it.says_half(random)),
    (2, "comes and goes", |it, random, _| it.comes_and_goes(random)),
    (2, "hangs up", |it, _, _| it.hangs_up()),
];

/// Deeds of a villain that the daemon has to wait for.
const OF_TRAPS: &[(u64, &str, Deed)] = &[
    (30, "frames", |it, random, _| it.sends_frames(random)),
    (30, "buffers", |it, random, _| it.offers_buffers(random)),
    (1, "full eventfds", |it, _, _| it.stuffs_its_signal()),
];
const OF_SIEVES: &[(u64, &str, Deed)] = &[
    (300, "frames from holes", |it, random, _| it.sends_from_holes(random)),
    (1, "holes all over", |it, _, _| it.punches_holes_all_over()),
];
const OF_CROWDS: &[(u64, &str, Deed)] = &[
    (300, "frames", |it, random, _| it.sends_frames(random)),
    (300, "buffers", |it, random, _| it.offers_buffers(random)),
    (1, "crowds at eventfds", |it, _, _| it.calls_a_crowd()),
];

impl Drop for Villain {
    fn drop(&mut self) {
        self.hangs_up();
    }
}

/// A failure prints the seed, to repeat the run.
impl Drop for Mallory {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("seed {}, {:?}", self.seed, self.done);
        }
    }
}

impl Mallory {
    /// Attacks these devices, their rings `rings` times as often as at least. Some of their memory
    /// is in a small file system at `small`, if it may make one.
    pub(crate) fn new(
        seed: u64,
        devices: &[(Device, PathBuf)],
        overlay: SocketAddrV4,
        small: PathBuf,
        rings: u64,
    ) -> Self {
        // The last close of such a descriptor blocks, and that may be the villain's.
        let (closer, things) = mpsc::channel::<OwnedFd>();
        thread::spawn(move || things.into_iter().for_each(drop));
        // A thread that loses its core in the middle of a hole makes others wait until it runs
        // again.
        let (puncher, sieves) = mpsc::channel();
        thread::spawn(move || sieves.into_iter().for_each(memory::punch));
        let new = |(device, socket): &(Device, PathBuf)| {
            Villain::new(*device, socket.clone(), closer.clone(), puncher.clone(), overlay)
        };
        let villains = devices.iter().map(new);
        Self {
            seed,
            random: Random(seed),
            villains: villains.collect(),
            small: Tmpfs::mount(small, "16M"),
            rings,
            done: BTreeMap::new(),
        }
    }

    /// All that was done.
    pub(crate) fn deeds(&self) -> u64 {
        self.done.values().sum()
    }

    /// Deeds that are possible here and not done yet.
    pub(crate) fn missing(&self) -> Vec<&'static str> {
        let has_place = self.small.is_some();
        let all = [OF_RINGS, OTHERS, OF_TRAPS, OF_CROWDS, OF_SIEVES].into_iter().flatten();
        let all = all.map(|&(_, name, _)| name);
        all.filter(|name| !self.done.contains_key(name))
            .filter(|name| has_place || *name != "memory without room")
            .collect()
    }

    /// One of them does something, if it is not waiting for the daemon.
    pub(crate) fn does_something(&mut self) -> bool {
        let at = self.random.below(self.villains.len() as u64);
        let it = &mut self.villains[usize::try_from(at).unwrap()];
        let name = if it.stream.is_none() {
            it.boots(&mut self.random).then_some("boots")
        } else if it.waits && !it.is_obeyed() {
            // Now and then it does not wait for the answer.
            (self.random.below(2000) == 0 && it.gives_up()).then_some("goes unheard")
        } else if it.left == 0 {
            it.hangs_up().then_some("ends")
        } else if it.left.is_multiple_of(LISTENS_EVERY) && !it.hears() {
            None // the daemon has hung up
        } else {
            it.left -= 1;
            let (name, deed) = draw(&mut self.random, it.device, self.rings);
            deed(it, &mut self.random, self.small.as_ref()).then_some(name)
        };
        if let Some(name) = name {
            *self.done.entry(name).or_default() += 1;
        }
        name.is_some()
    }
}

/// The next deed.
fn draw(random: &mut Random, device: Device, rings: u64) -> (&'static str, Deed) {
    let (more, deeds) = match device {
        Device::Trap => (1, [OF_TRAPS, &[]]),
        Device::Crowd => (1, [OF_CROWDS, &[]]),
        Device::Sieve => (1, [OF_SIEVES, &[]]),
        _ => (rings, [OF_RINGS, OTHERS]),
    };
    let weighed: Vec<_> = deeds
        .iter()
        .zip([more, 1])
        .flat_map(|(deeds, times)| {
            deeds.iter().map(move |(weight, name, deed)| (weight * times, *name, *deed))
        })
        .collect();
    let mut at = random.below(weighed.iter().map(|(weight, ..)| weight).sum());
    for (weight, name, deed) in weighed {
        match at.checked_sub(weight) {
            Some(left) => at = left,
            None => return (name, deed),
        }
    }
    unreachable!("it is below the sum")
}

/// Guest memory full of frames, each in a place of [`PLACE`] bytes behind a virtio-net header. They
/// are for a station that is nowhere: the neighbours' rings are for what these say. A few are for
/// all. Or full of packets of sockets, of which much makes sense.
fn fill(ram: &Ram, device: Device) {
    let mut random = plugged::Random(7);
    for n in 0..PLACES_COUNT {
        let to = if n % 500 == 0 { [0xff; 6] } else { [2, 0, 0, 0, 0, 0x77] };
        let mut bytes = [&[0; 12][..], &to, &[2, 0, 0, 0, 0, 0x66, 0x88, 0xb5]].concat();
        if device == Device::Sockets {
            let (header, payload) = plugged::packet(&mut random);
            bytes = header.emit().to_vec();
            bytes.extend(payload.into_iter().take(usize::try_from(PLACE).unwrap() - LEN));
        }
        ram.write(PLACES + n * PLACE, &bytes);
    }
    let crumbs = (0..CRUMBS).flat_map(|n| {
        let flags = if n + 1 < CRUMBS { u64::from(NEXT) } else { 0 };
        [PLACES + n * PLACE, pair(64, flags | (n + 1) << 16)]
    });
    ram.write(TABLE, &words(&crumbs.collect::<Vec<_>>()));
}

fn words(list: &[u64]) -> Vec<u8> {
    list.iter().copied().flat_map(u64::to_ne_bytes).collect()
}

/// Two numbers of 32 bits.
fn pair(low: u64, high: u64) -> u64 {
    low & 0xffff_ffff | high << 32
}

/// A file of so many bytes that are not there.
fn sparse(len: u64) -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = memfd_create("sparse", flags).unwrap();
    ftruncate(&file, len).unwrap();
    fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
    file
}

fn new_eventfd() -> OwnedFd {
    eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).unwrap()
}
