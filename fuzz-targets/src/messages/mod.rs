//! A front-end that sends anything: vhost-user messages with descriptors over a socket, to the port
//! as the worker drives it, with a little traffic on whatever rings come to run.
//!
//! Input: operations. Conditions: questions are answered in turn; the descriptors that the worker
//! waits for are those that exist; rings start and stop by turns; only memory that was shared is
//! written. When the front-end has gone, no descriptor and no mapping of it is kept, and the next
//! one is served.

mod ask;

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io::{ErrorKind, IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;

use crate::noise;
use arbitrary::{Arbitrary, Unstructured};
use ask::{Ask, Bits, Fd, Fds, Number, Region, halves, is_question};
use nightporter_core::wire::virtio_net::VirtioNetHdr;
use nightporterd::closer;
use nightporterd::port::vhost_user::{VhostUserConfig, VhostUserPort};
use nightporterd::vhost::listener::Access;
use nightporterd::vhost::{Event, Source};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::net::{
    RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, recvmsg,
    sendmsg,
};
use rustix::pipe::{PipeFlags, pipe_with};

const PAIRS: u16 = 2;
const RINGS: u16 = 2 * PAIRS;
const OPS_MAX: usize = 200;
const FILE_LEN: usize = 0x1_0000;
/// The content of the file where nothing was written.
const NOBODYS: u8 = 0xa7;
/// Guest and user address, place in the file and length of the regions an honest front-end has.
const REGIONS: [[u64; 4]; 3] = [
    [0x4000_0000, 0x7f00_0000_0000, 0x1000, 0x8000],
    [0x4000_8000, 0x7f00_1000_0000, 0xa000, 0x2000],
    [0x1_0000_0000, 0x7f00_2000_0000, 0xd000, 0x2000],
];
/// A ring's place in the first region, its parts, and the length that all of it may have.
const RING_AREA: u64 = 0x1000;
const AVAIL: u64 = 0x400;
const USED: u64 = 0x800;
/// Header, bytes.
const HEADER_LEN: usize = 12;
const VERSION: u32 = 1;
const F_REPLY: u32 = 4;
const F_NEED_REPLY: u32 = 8;
/// Descriptors with one message at most: more than any back-end takes.
const FDS_MAX: usize = 40;
/// Turns of the worker after which every message has been read.
const TURNS: usize = 3;

#[derive(Arbitrary, Clone, Debug)]
enum Op {
    Says(Ask, Manner),
    SaysSlowly(Ask, Manner),
    Says2([Ask; 2]),
    Raw(Vec<u8>, Fds),
    /// Everything that a ring needs, in one go.
    SetsUp(u8),
    Offers {
        ring: u8,
        len: u16,
        flags: u8,
        region: u8,
        at: u16,
    },
    Scribbles {
        at: u16,
        word: u64,
    },
    Kicks(u8),
    Traffic,
    HangsUp,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Manner {
    Usual,
    NeedsReply,
    Flags(u32),
    Longer(u8),
    Shorter(u8),
    With(Fds),
}

/// Judges one input.
pub fn run(data: &[u8]) {
    thread_local! {
        static HOST: RefCell<Host> = RefCell::new(Host::new());
    }
    HOST.with_borrow_mut(|host| {
        let mut u = Unstructured::new(data);
        let mut front = Front::connects(host);
        for _ in 0..OPS_MAX {
            let Some(op) = (!u.is_empty()).then(|| Op::arbitrary(&mut u)) else { break };
            let Ok(op) = op else { break };
            if matches!(op, Op::HangsUp) {
                front.ends(host);
                front = Front::connects(host);
            } else {
                front.does(host, &op);
            }
        }
        front.ends(host);
    });
}

/// Front-ends that set a device up, change their minds, and go.
#[must_use]
pub fn seeds() -> Vec<Vec<u8>> {
    (1..9).map(|n| noise(0x100 + n, 200 * n as usize)).collect()
}

/// The port, and the descriptors of its worker.
struct Host {
    port: VhostUserPort,
    /// The listening socket's file, which has no name any more.
    socket: OwnedFd,
    watched: BTreeMap<i32, Source>,
    running: [bool; RINGS as usize],
    link: bool,
    connected: bool,
}

impl Host {
    fn new() -> Self {
        let name = format!("nightporter-fuzz-{}-{:?}", std::process::id(), thread());
        let path = std::env::temp_dir().join(name);
        let config = VhostUserConfig {
            name: "vm".to_owned(),
            socket: path.clone(),
            access: Access::default(),
            mac: Some([2, 0, 0, 0, 0, 1]),
            mtu: Some(1500),
            queue_pairs: PAIRS,
            allow_unsealed_memory: true,
            memory_max: None,
            memory_is_limited: false,
        };
        let port = VhostUserPort::new(&config).expect("a port");
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let socket = rustix::fs::open(&path, flags, Mode::empty()).expect("the socket");
        std::fs::remove_file(&path).expect("the socket");
        let running = [false; RINGS as usize];
        let watched = BTreeMap::new();
        let mut host = Self { port, socket, watched, running, link: false, connected: false };
        host.obeys_events();
        host
    }

    /// As the worker does.
    fn obeys_events(&mut self) {
        while let Some(event) = self.port.poll_event() {
            match event {
                Event::Watch(source) => {
                    let Some(fd) = self.port.fd(source) else { continue };
                    let before = self.watched.insert(fd.as_raw_fd(), source);
                    assert!(before.is_none_or(|b| b == source), "woken for {before:?} as well");
                }
                Event::Unwatch(fd) => {
                    self.watched.remove(&fd.as_fd().as_raw_fd());
                }
                Event::Connected => self.connected = true,
                Event::Disconnected(_) => self.connected = false,
                Event::Link(features) => self.link = features.is_some(),
                Event::RingStarted(n) => self.turns(n, true),
                Event::RingStopped(n) => self.turns(n, false),
                Event::Rest(source) => self.port.go_on(source), // a second later
                // A message that waited is taken with the next ones, as late as the worker may.
                Event::Leaving | Event::Logs(_) => {}
                Event::RingBroken { .. } | Event::Rarp(_) | Event::Poll => {}
            }
        }
    }

    fn turns(&mut self, ring: u16, on: bool) {
        let before = std::mem::replace(&mut self.running[usize::from(ring)], on);
        assert_ne!(before, on, "ring {ring} starts and stops by turns");
    }

    fn works(&mut self) {
        for _ in 0..TURNS {
            self.port.handle_connection();
            self.obeys_events();
        }
        let kicks = (0..RINGS).map(Source::Kick);
        let sources = kicks.chain([Source::Listener, Source::Connection]);
        let there: BTreeMap<i32, Source> = sources
            .filter_map(|source| Some((self.port.fd(source)?.as_raw_fd(), source)))
            .collect();
        assert_eq!(there, self.watched, "waits for other descriptors than there are");
        assert_eq!(self.link, self.port.link().is_some(), "the link");
        assert!(!self.link || self.running[0] && self.running[1], "a link without rings");
        assert!(self.connected || self.running == [false; 4], "rings without a front-end");
        for pair in 0..PAIRS {
            let runs = self.port.is_running_to_guest(pair.into());
            assert!(!runs || self.running[usize::from(2 * pair)], "a ring that was not started");
        }
    }

    /// The data path, in any state.
    fn moves_frames(&mut self) {
        let mut buf = [0; 4096];
        for pair in 0..usize::from(PAIRS) {
            for _ in 0..4 {
                if self.port.poll_from_guest(pair, &mut buf).is_none() {
                    break;
                }
            }
            let _ = self.port.room_to_guest(pair, 2000);
            let parts: [&[u8]; 2] = [&[1; 100], &[2; 700]];
            let _ = self.port.push_to_guest(pair, &VirtioNetHdr::default(), &parts);
            self.port.flush_from_guest(pair);
            self.port.flush_to_guest(pair);
            let _ = self.port.enable_kicks_from_guest(pair);
            let _ = self.port.enable_kicks_to_guest(pair);
            let _ = self.port.guest_progress(pair);
            self.port.disable_kicks_from_guest(pair);
        }
        self.obeys_events();
    }
}

fn thread() -> std::thread::ThreadId {
    std::thread::current().id()
}

/// One front-end, its guest's memory, and its expected answers.
struct Front {
    stream: UnixStream,
    memory: File,
    /// Stretches of the file that were shared, whether or not the back-end took them.
    shared: Vec<(u64, u64)>,
    reader: OwnedFd,
    writer: OwnedFd,
    /// Requests sent, and whether they must be answered.
    asked: VecDeque<(u32, bool)>,
    /// Where a message begins is not known any more.
    garbled: bool,
    avail: [u16; RINGS as usize],
    received: Vec<u8>,
}

impl Front {
    fn connects(host: &mut Host) -> Self {
        let path = format!("/proc/self/fd/{}", host.socket.as_raw_fd());
        let stream = UnixStream::connect(path).expect("it listens");
        stream.set_nonblocking(true).expect("a socket");
        host.port.handle_listener();
        host.obeys_events();
        assert!(host.connected, "the next front-end was not let in");
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let memory = memfd_create("fuzz", flags).expect("a memfd");
        ftruncate(&memory, FILE_LEN as u64).expect("a length");
        let memory = File::from(memory);
        memory.write_all_at(&[NOBODYS; FILE_LEN], 0).expect("a file");
        let (at, len) = (REGIONS[0][2], REGIONS[0][3]);
        memory.write_all_at(&vec![0; small(len)], at).expect("a file");
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).expect("a pipe");
        let mut front = Self {
            stream,
            memory,
            shared: vec![(at, at + len)],
            reader,
            writer,
            asked: VecDeque::new(),
            garbled: false,
            avail: [0; RINGS as usize],
            received: Vec::new(),
        };
        front.says(Ask::GetFeatures, Manner::Usual, 1, host);
        front
    }

    fn does(&mut self, host: &mut Host, op: &Op) {
        match *op {
            Op::Says(ask, manner) => self.says(ask, manner, 1, host),
            Op::SaysSlowly(ask, manner) => self.says(ask, manner, 3, host),
            Op::Says2(asks) => {
                for ask in asks {
                    self.sends_whole(ask, Manner::Usual, 1, host);
                }
                self.listens(host);
            }
            Op::Raw(ref bytes, fds) => {
                self.garbled = true;
                let fds = self.descriptors(fds);
                self.sends(bytes, &fds);
                self.listens(host);
            }
            Op::SetsUp(ring) => self.sets_up(host, ring),
            Op::Offers { ring, len, flags, region, at } => {
                let [guest, _, _, size] = REGIONS[usize::from(region) % REGIONS.len()];
                let buffer = guest + u64::from(at) % size;
                self.offers(usize::from(ring) % usize::from(RINGS), buffer, len, flags);
            }
            Op::Scribbles { at, word } => {
                let at = u64::from(at) % (REGIONS[0][3] - 8);
                self.memory.write_all_at(&word.to_ne_bytes(), REGIONS[0][2] + at).expect("a file");
            }
            Op::Kicks(ring) => {
                host.port.handle_kick(u16::from(ring) % RINGS);
                host.obeys_events();
            }
            Op::Traffic => host.moves_frames(),
            Op::HangsUp => {}
        }
        host.works();
    }

    fn sets_up(&mut self, host: &mut Host, ring: u8) {
        let ring = ring % 4;
        let whole = |which| Region { which, changed: None };
        let number = Number::Small(ring);
        for ask in [
            Ask::SetProtocolFeatures(Bits::All),
            Ask::SetFeatures(Bits::All),
            Ask::MemoryTable { count: 2, regions: [whole(0), whole(1)] },
            Ask::Num(ring, Number::Power(5)),
            Ask::Base(ring, Number::Small(0)),
            Ask::Addr { ring, place: ring, changed: None },
            Ask::Call(number),
            Ask::Kick(number),
            Ask::Enable(ring, true),
        ] {
            self.sends_whole(ask, Manner::Usual, 1, host);
        }
        self.listens(host);
    }

    /// A chain of one buffer, by the layout that [`Ask::Addr`] usually gives.
    fn offers(&mut self, ring: usize, buffer: u64, len: u16, flags: u8) {
        let base = REGIONS[0][2] + RING_AREA * ring as u64;
        let index = u64::from(self.avail[ring] % 32);
        let mut descriptor = buffer.to_le_bytes().to_vec();
        descriptor.extend(u32::from(len).to_le_bytes());
        descriptor.extend([flags & 7, 0, flags >> 3, 0]);
        let put = |at, bytes: &[u8]| self.memory.write_all_at(bytes, at).expect("a file");
        put(base + 16 * index, &descriptor);
        put(base + AVAIL + 4 + 2 * index, &[(index & 31) as u8, 0]);
        self.avail[ring] = self.avail[ring].wrapping_add(1);
        put(base + AVAIL + 2, &self.avail[ring].to_le_bytes());
    }

    // --- Messages ------------------------------------------------------------------------------

    fn says(&mut self, ask: Ask, manner: Manner, pieces: usize, host: &mut Host) {
        self.sends_whole(ask, manner, pieces, host);
        self.listens(host);
    }

    fn sends_whole(&mut self, ask: Ask, manner: Manner, pieces: usize, host: &mut Host) {
        let (request, mut payload, mut fds) = ask.message();
        self.note_shared(ask);
        let code = u32::from(request);
        let mut flags = VERSION;
        match manner {
            Manner::Usual => {}
            Manner::NeedsReply => flags |= F_NEED_REPLY,
            Manner::Flags(any) => flags = any,
            Manner::Longer(n) => payload.resize(payload.len() + usize::from(n), n),
            Manner::Shorter(n) => payload.truncate(payload.len().saturating_sub(n.into())),
            Manner::With(other) => fds = Some(other),
        }
        let mut bytes = halves([code, flags, u32::try_from(payload.len()).expect("short")]);
        bytes.extend(payload);
        let fds = fds.map_or_else(Vec::new, |fds| self.descriptors(fds));
        let plain = fds.is_empty() && matches!(manner, Manner::Usual | Manner::NeedsReply);
        self.asked.push_back((code, plain && is_question(request)));
        let piece = bytes.len().div_ceil(pieces);
        for (n, bytes) in bytes.chunks(piece).enumerate() {
            self.sends(bytes, if n == 0 { &fds } else { &[] });
            if pieces > 1 {
                host.works();
            }
        }
    }

    /// The memory that the back-end may write to from now on.
    fn note_shared(&mut self, ask: Ask) {
        let mut note = |at: u64, len: u64| {
            let end = at.saturating_add(len).min(FILE_LEN as u64);
            self.shared.push((at.min(end), end));
        };
        match ask {
            Ask::MemoryTable { regions, .. } => regions.iter().for_each(|region| {
                let [_, len, _, at] = region.words();
                note(at, len);
            }),
            Ask::AddRegion(region) => {
                let [_, len, _, at] = region.words();
                note(at, len);
            }
            Ask::SetInflight { len, offset, .. } => note(offset.value(), len.value()),
            _ => {}
        }
    }

    fn descriptors(&self, fds: Fds) -> Vec<OwnedFd> {
        let make = |_| -> OwnedFd {
            match fds.what {
                Fd::Eventfd => eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd"),
                Fd::Pipe => self.writer.try_clone().expect("a pipe"),
                Fd::Memory => self.memory.try_clone().expect("a file").into(),
                Fd::Null => File::open("/dev/null").expect("a device").into(),
                // Not the connection itself: a socket that travels inside itself is collected
                // later.
                Fd::Socket => UnixStream::pair().expect("two sockets").0.into(),
            }
        };
        (0..usize::from(fds.count) % FDS_MAX).map(make).collect()
    }

    fn sends(&mut self, bytes: &[u8], fds: &[OwnedFd]) {
        let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(&fds)), "room for them");
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        if sendmsg(&self.stream, &[IoSlice::new(bytes)], &mut control, flags) != Ok(bytes.len()) {
            self.garbled = true; // the connection is gone, or full
        }
    }

    /// Lets the worker work, and reads its answers.
    fn listens(&mut self, host: &mut Host) {
        host.works();
        self.receives();
        while let Some(header) = self.received.first_chunk::<HEADER_LEN>() {
            let word = |n: usize| u32::from_ne_bytes(header[n..n + 4].try_into().expect("four"));
            let (code, flags, len) = (word(0), word(4), word(8) as usize);
            assert_eq!(flags, VERSION | F_REPLY, "the flags of a reply");
            assert!(self.received.len() >= HEADER_LEN + len, "half a reply");
            self.received.drain(..HEADER_LEN + len);
            if self.garbled {
                continue;
            }
            loop {
                let (asked, must) = self.asked.pop_front().expect("an answer to nothing");
                if asked == code {
                    assert!(!must || len == 8, "{len} bytes in answer to {code}");
                    break;
                }
                assert!(!must, "question {asked} was not answered before {code}");
            }
        }
        let left = self.asked.iter().find(|(_, must)| *must);
        let may = self.garbled || !host.connected;
        assert!(may || left.is_none(), "question {left:?} was not answered");
        self.asked.clear();
    }

    fn receives(&mut self) {
        let mut chunk = [0; 4096];
        loop {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut to = [IoSliceMut::new(&mut chunk)];
            let got = recvmsg(&self.stream, &mut to, &mut control, RecvFlags::CMSG_CLOEXEC);
            control.drain().for_each(drop);
            match got {
                Ok(got) if got.bytes > 0 => self.received.extend(&chunk[..got.bytes]),
                _ => return,
            }
        }
    }

    // --- The end -------------------------------------------------------------------------------

    /// It goes, and nothing of it stays.
    fn ends(&mut self, host: &mut Host) {
        self.stream.shutdown(std::net::Shutdown::Both).expect("a socket");
        self.receives(); // a descriptor of the socket itself may wait there
        host.works();
        assert!(!host.connected && !host.link, "it has not noticed");
        assert_eq!(host.watched.len(), 1, "the listener alone");
        closer::flush();
        let sealed = fcntl_add_seals(&self.memory, SealFlags::WRITE);
        assert_eq!(sealed, Ok(()), "a mapping was kept");
        self.expect_nobodys_bytes();
        let (reader, _) = pipe_with(PipeFlags::CLOEXEC).expect("a pipe");
        let reader = File::from(std::mem::replace(&mut self.reader, reader));
        self.writer = File::open("/dev/null").expect("a device").into();
        expect_end(reader);
    }

    fn expect_nobodys_bytes(&self) {
        let mut bytes = vec![0; FILE_LEN];
        self.memory.read_exact_at(&mut bytes, 0).expect("a file");
        for &(from, to) in &self.shared {
            bytes[small(from)..small(to)].fill(NOBODYS);
        }
        assert!(bytes.iter().all(|b| *b == NOBODYS), "written where nothing was shared");
    }
}

fn small(n: u64) -> usize {
    usize::try_from(n).expect("within the file")
}

/// The last writer of a pipe is gone.
fn expect_end(mut reader: File) {
    let mut bytes = [0; 4096];
    loop {
        match reader.read(&mut bytes) {
            Ok(0) => return,
            Ok(_) => {}
            Err(error) => {
                assert_ne!(error.kind(), ErrorKind::WouldBlock, "a descriptor was kept");
                return;
            }
        }
    }
}
