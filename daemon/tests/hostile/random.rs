//! A front-end that does whatever comes to its mind: messages, ring contents, memory that goes, all
//! from a seed. Beside it two VMs hear each other.
//!
//! In CI so many things are done, and each echo of the neighbours has to arrive. For hours, and for
//! how long an echo takes: `NIGHTPORTER_HOSTILE_S=3600 NIGHTPORTER_HOSTILE_SEED=1 cargo test -p
//! nightporterd --test hostile random -- --nocapture`, on a machine that does nothing else.

use std::collections::BTreeMap;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::time::{Duration, Instant};

use nightporterd::config::Source;
use nightporterd::vhost::features::bit;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{FallocateFlags, fallocate};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use vhost::vhost_user::message::FrontendReq as Req;

use crate::driver::{GUEST_BASE, Ram, USER_BASE};
use crate::guest::{Guest, PLAIN, RAM_LEN};
use crate::host::Dir;
use crate::street::Street;

/// Things done in CI.
const DEEDS: u64 = 10_000;
/// Between two echoes of the neighbours.
const DEEDS_PER_ECHO: u64 = 10;
/// Echoes beside it, then alone, and so on: a machine is not the same for an hour.
const ECHOES_IN_TURN: usize = 100;
/// Echoes in between that count for neither.
const ECHOES_OF_REST: usize = 10;
const QUEUE_SIZE: u64 = 256;
/// Where its rings are: descriptors, then the driver's area, then the device's.
const RINGS: [u64; 2] = [GUEST_BASE + 0x1_0000, GUEST_BASE + 0x2_0000];
const AVAIL: u64 = QUEUE_SIZE * 16;
const USED: u64 = 0x8000;
/// Of a frame in its memory.
const PLACE: u64 = 2048;

/// SplitMix64 (Steele, Lea and Flood, 2014).
struct Random(u64);

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

struct Mallory {
    seed: u64,
    random: Random,
    /// Things done.
    deeds: u64,
    socket: std::path::PathBuf,
    stream: Option<UnixStream>,
    ram: Rc<Ram>,
    kick: OwnedFd,
    avail_idx: [u16; 2],
}

/// Whoever finds that something is wrong wants to do the same again.
impl Drop for Mallory {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("seed {}, after {} deeds", self.seed, self.deeds);
        }
    }
}

/// Guest memory full of frames, each in a place of [`PLACE`] bytes behind a virtio-net header. They
/// are for a station that is nowhere: the neighbours' rings are for what these say.
fn memory() -> Rc<Ram> {
    let ram = Ram::unsealed(usize::try_from(RAM_LEN).unwrap());
    let frame = [&[0; 12][..], &[2, 0, 0, 0, 0, 0x77, 2, 0, 0, 0, 0, 0x66, 0x88, 0xb5]].concat();
    (0..RAM_LEN / PLACE).for_each(|n| ram.write(GUEST_BASE + n * PLACE, &frame));
    ram
}

fn words(list: &[u64]) -> Vec<u8> {
    list.iter().copied().flat_map(u64::to_ne_bytes).collect()
}

/// Two numbers of 32 bits.
fn pair(low: u64, high: u64) -> u64 {
    low & 0xffff_ffff | high << 32
}

impl Mallory {
    fn says(&mut self, code: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        let len = u32::try_from(payload.len()).unwrap();
        // All but the first two end the connection, and with it what it could do otherwise.
        let flags = self.random.of(&[&[1, 9].repeat(32)[..], &[0, 5]].concat());
        let mut bytes: Vec<u8> =
            [code, flags, len].into_iter().flat_map(u32::to_ne_bytes).collect();
        bytes.extend(payload);
        self.sends(&bytes, fds);
    }

    /// What the socket does not take is lost; the daemon may have hung up long ago.
    fn sends(&mut self, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
        let Some(stream) = &self.stream else { return };
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        if sendmsg(stream, &[IoSlice::new(bytes)], &mut control, flags).is_err() {
            self.stream = None;
        }
    }

    fn connects(&mut self) {
        self.stream = UnixStream::connect(&self.socket).ok();
        self.avail_idx = [0; 2];
    }

    /// A connection whose rings run, most likely.
    fn boots(&mut self) {
        self.connects();
        let ram = Rc::clone(&self.ram).fd();
        let kick = self.kick.try_clone().unwrap();
        let features =
            PLAIN | self.random.of(&[0, bit::EVENT_IDX, bit::INDIRECT_DESC, bit::MRG_RXBUF]);
        self.says(Req::SET_FEATURES.into(), &words(&[features]), &[]);
        let table = words(&[1, GUEST_BASE, RAM_LEN, USER_BASE, 0]);
        self.says(Req::SET_MEM_TABLE.into(), &table, &[ram.as_fd()]);
        for (index, ring) in (0..).zip(RINGS) {
            let user = ring - GUEST_BASE + USER_BASE;
            let addr = words(&[index, user, user + USED, user + AVAIL, 0]);
            let number = words(&[index]);
            self.says(Req::SET_VRING_NUM.into(), &words(&[pair(index, QUEUE_SIZE)]), &[]);
            self.says(Req::SET_VRING_BASE.into(), &words(&[pair(index, 0)]), &[]);
            self.says(Req::SET_VRING_ADDR.into(), &addr, &[]);
            self.says(Req::SET_VRING_CALL.into(), &number, &[kick.as_fd()]);
            self.says(Req::SET_VRING_KICK.into(), &number, &[kick.as_fd()]);
            self.says(Req::SET_VRING_ENABLE.into(), &words(&[pair(index, 1)]), &[]);
        }
    }

    /// A message of anything, with descriptors of anything that does not wait.
    fn babbles(&mut self) {
        let code = u32::try_from(self.random.below(48)).unwrap();
        let len = self.random.below(12);
        let mut payload: Vec<u8> =
            (0..len).flat_map(|_| self.random.word().to_ne_bytes()).collect();
        payload
            .truncate(payload.len().saturating_sub(usize::try_from(self.random.below(9)).unwrap()));
        let count = self.random.of(&[0, 0, 1, 1, 1, 2, 5]);
        let fds: Vec<OwnedFd> = (0..count).map(|_| self.descriptor()).collect();
        self.says(code, &payload, &fds.iter().map(AsFd::as_fd).collect::<Vec<_>>());
    }

    fn descriptor(&mut self) -> OwnedFd {
        match self.random.below(6) {
            0 | 1 => self.ram.fd(),
            2 => eventfd(0, EventfdFlags::NONBLOCK).unwrap(),
            3 => Ram::unsealed(4096).fd(),
            4 => std::fs::File::open("/dev/null").unwrap().into(),
            _ => self.kick.try_clone().unwrap(),
        }
    }

    /// Descriptors of anything, offered in any order.
    fn offers(&mut self) {
        let queue = usize::try_from(self.random.below(2)).unwrap();
        let ring = RINGS[queue];
        for _ in 0..self.random.below(64) {
            let at = ring + 16 * self.random.below(QUEUE_SIZE);
            let usual = [0, 1, 12, 72, 1526, 4096, 65_562, 0xffff_ffff];
            let (len, flags) = (self.random.of(&usual), self.random.below(8));
            let addr = match self.random.below(8) {
                0 => self.random.word(),
                1..4 => GUEST_BASE + self.random.below(RAM_LEN),
                _ => GUEST_BASE + self.random.below(RAM_LEN / PLACE) * PLACE,
            };
            let next = self.random.below(QUEUE_SIZE + 2);
            self.ram.write(at, &words(&[addr, pair(len, flags | next << 16)]));
        }
        let count = self.random.of(&[1, 1, 2, 17, 256, 300, 40_000]);
        for n in 0..count.min(QUEUE_SIZE) {
            let head = u16::try_from(self.random.below(QUEUE_SIZE + 1)).unwrap();
            self.names(queue, n, head);
        }
        self.has_offered(queue, count);
    }

    /// Frames, as somebody sends them who means well; so that there is more to its life than its
    /// end.
    fn sends_frames(&mut self) {
        let count = 1 + self.random.below(16);
        for n in 0..count {
            let at = GUEST_BASE + self.random.below(RAM_LEN / PLACE) * PLACE;
            let len = self.random.of(&[72, 1526]);
            self.ram.write(RINGS[1] + 16 * n, &words(&[at, len]));
            self.names(1, n, u16::try_from(n).unwrap());
        }
        self.has_offered(1, count);
    }

    /// The next but `n` chain of a queue begins with this descriptor.
    fn names(&self, queue: usize, n: u64, head: u16) {
        let slot = (u64::from(self.avail_idx[queue]) + n) % QUEUE_SIZE;
        self.ram.set_u16(RINGS[queue] + AVAIL + 4 + 2 * slot, head);
    }

    fn has_offered(&mut self, queue: usize, count: u64) {
        self.avail_idx[queue] = self.avail_idx[queue].wrapping_add(u16::try_from(count).unwrap());
        self.ram.set_u16(RINGS[queue] + AVAIL + 2, self.avail_idx[queue]);
        self.kicks();
    }

    fn kicks(&self) {
        let _ = rustix::io::write(&self.kick, &1_u64.to_ne_bytes());
    }

    /// Its memory says something else.
    fn scribbles(&mut self) {
        let at = self.random.of(&RINGS) + self.random.below(2 * USED);
        let noise: Vec<u8> = (0..8).flat_map(|_| self.random.word().to_ne_bytes()).collect();
        self.ram.write(at, &noise);
        self.kicks();
    }

    fn punches_a_hole(&mut self) {
        let (at, len) = (self.random.below(RAM_LEN), 1 + self.random.below(1 << 20));
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(self.ram.fd(), hole, at, len).unwrap();
    }

    /// Its memory goes, now and then while its rings run.
    fn shrinks(&mut self) {
        self.ram.cut();
        self.kicks();
        self.ram = memory();
    }

    fn does_something(&mut self) {
        self.deeds += 1;
        match self.random.below(400) {
            0..10 => self.boots(),
            10..12 => self.connects(),
            12..14 => self.stream = None,
            14..18 => {
                let noise = words(&[self.random.next(), self.random.word()]);
                let len = usize::try_from(self.random.below(16)).unwrap();
                self.sends(&noise[..len], &[]);
            }
            18..36 => self.punches_a_hole(),
            36..44 => self.shrinks(),
            44..84 => self.babbles(),
            84..114 => self.scribbles(),
            114..154 => self.offers(),
            _ => self.sends_frames(),
        }
    }
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().expect("a number"))
}

/// The middle, one of a hundred, and the longest.
fn shown(mut times: Vec<Duration>) -> String {
    times.sort_unstable();
    let at = |part: usize| times[(times.len() - 1) * part / 100];
    format!("{} echoes: median {:?}, p99 {:?}, longest {:?}", times.len(), at(50), at(99), at(100))
}

/// What `--check` says of the daemon's memory, without its store, which is a file.
fn announced(dir: &Dir) -> u64 {
    let source = Source { path: dir.join("np.toml"), overrides: BTreeMap::new() };
    let config = source.load().unwrap();
    config.memory_max() - config.budget_sum()
}

#[test]
fn whatever_a_front_end_does_its_neighbours_hear_each_other() {
    let mut street = Street::new("allow_unsealed_memory = true");
    let seed = number("NIGHTPORTER_HOSTILE_SEED").unwrap_or(1);
    let mut mallory = Mallory {
        seed,
        random: Random(seed),
        deeds: 0,
        socket: street.dir.join("bad"),
        stream: None,
        ram: memory(),
        kick: eventfd(0, EventfdFlags::NONBLOCK).unwrap(),
        avail_idx: [0; 2],
    };
    let limit = number("NIGHTPORTER_HOSTILE_S").map(Duration::from_secs);
    let (start, mut alone, mut beside) = (Instant::now(), Vec::new(), Vec::new());
    let most = announced(&street.dir);
    while limit.map_or(mallory.deeds < DEEDS, |limit| start.elapsed() < limit) {
        for _ in 0..ECHOES_IN_TURN {
            for _ in 0..DEEDS_PER_ECHO {
                mallory.does_something();
            }
            beside.push(street.echo());
        }
        // It keeps its connection and says nothing: what it did last is worked off by these.
        for _ in 0..ECHOES_OF_REST {
            street.echo();
        }
        alone.extend((0..ECHOES_IN_TURN).map(|_| street.echo()));
        let takes = street.host.own_bytes();
        assert!(takes <= most, "{takes} bytes, and at most {most} are announced");
    }
    let (deeds, bad) = (mallory.deeds, street.host.port("bad"));
    let (frames, faults) = (bad.frames_from_port, bad.vm.unwrap().memory_faults);
    assert!(frames > 0 && faults > 0, "its rings ran, its memory went: {frames}, {faults}");
    eprintln!(
        "seed {seed}, {deeds} deeds, {frames} frames, {faults} faults\nalone: {}\nbeside it: {}",
        shown(alone),
        shown(beside)
    );
    // And its port is there for one that means well.
    drop(mallory);
    street.host.until("bad", |bad| !bad.link);
    let _guest = Guest::boot(&street.dir.join("bad"), PLAIN);
    street.host.until("bad", |bad| bad.link);
    assert!(street.host.port("bad").vm.is_some_and(|vm| vm.blocked == 0), "it made nobody wait");
}
