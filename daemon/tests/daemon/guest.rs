//! A VMM and its guest in one: a front-end that speaks just enough, and a driver with one pair.
//!
//! The device runs in another process: where the driver writes a wish and then looks (or shows
//! something and then reads the device's wish), a full fence stands between the two.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::rc::Rc;
use std::sync::atomic::{Ordering, fence};

use nightporter_core::wire::virtio_net::VirtioNetHdr;
use nightporterd::vhost::features::bit;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{OFlags, fcntl_setfl};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use vhost::vhost_user::message::FrontendReq as Req;

use crate::driver::{Driver, GUEST_BASE, Ram, USER_BASE, WRITE};
use crate::host::LIMIT;

/// Bytes of one receive buffer, and of one place for a frame to send.
const BUFFER: u64 = 2048;
const QUEUE_SIZE: u16 = 256;
pub(crate) const RAM_LEN: u64 = 8 << 20;
const RX_BUFFERS: u64 = GUEST_BASE + (1 << 20);
/// Places of 64 KiB for frames to send, one per descriptor.
const TX_FRAMES: u64 = GUEST_BASE + (2 << 20);
const TX_FRAME_LEN: u64 = 64 << 10;
const TX_FRAMES_COUNT: u64 = 64;

/// Nothing but what every driver has.
pub(crate) const PLAIN: u64 = bit::VERSION_1 | bit::PROTOCOL_FEATURES;
/// As [`PLAIN`], with notifications asked for one by one.
pub(crate) const EVENTS: u64 = PLAIN | bit::EVENT_IDX;
/// Partial checksums and super-segments from the guest.
pub(crate) const SENDS_SUPER: u64 = PLAIN | bit::CSUM | bit::HOST_TSO4;

thread_local! {
    /// The step of a daemon that runs in this thread, if there is one.
    static DAEMON: RefCell<Option<Rc<dyn Fn()>>> = const { RefCell::new(None) };
}

/// A daemon of this thread, from now on.
pub(crate) fn is_served_by(daemon: Rc<dyn Fn()>) {
    DAEMON.with(|place| place.replace(Some(daemon)));
}

/// A daemon of this thread does what there is to do; whether there is one.
pub(crate) fn serve() -> bool {
    let daemon = DAEMON.with(|place| place.borrow().clone());
    daemon.map(|daemon| daemon()).is_some()
}

/// Connected and running.
#[derive(Debug)]
pub(crate) struct Guest {
    stream: UnixStream,
    ram: Rc<Ram>,
    rx: Driver,
    tx: Driver,
    kick: [OwnedFd; 2],
    call: [OwnedFd; 2],
    sent: u64,
    offered: VecDeque<u64>,
    event_idx: bool,
}

/// Another test may just start a program, which has a copy of the socket until it runs.
impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

fn state(index: u32, num: u32) -> Vec<u8> {
    [index, num].into_iter().flat_map(u32::to_ne_bytes).collect()
}

fn say(stream: &UnixStream, request: Req, flags: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) {
    let mut bytes = Vec::new();
    for word in [u32::from(request), 1 | flags, u32::try_from(payload.len()).unwrap()] {
        bytes.extend(word.to_ne_bytes());
    }
    bytes.extend(payload);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
    }
    let sent = sendmsg(stream, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL);
    assert_eq!(sent.unwrap(), bytes.len());
}

/// Says it, and waits until it was obeyed.
pub(crate) fn tell(mut stream: &UnixStream, request: Req, payload: &[u8], fds: &[BorrowedFd<'_>]) {
    say(stream, request, 8, payload, fds);
    serve();
    let mut reply = [0; 20];
    stream.read_exact(&mut reply).unwrap();
    assert_eq!(reply[12..], [0; 8], "{request:?} is obeyed");
}

/// Negotiates, shares [`RAM_LEN`] bytes of memory, and starts rings: each with the descriptors for
/// kicks and calls.
pub(crate) fn set_up(
    stream: &UnixStream,
    features: u64,
    ram: &Ram,
    rings: &[(&Driver, &OwnedFd, &OwnedFd)],
) {
    negotiate(stream, features);
    assert!(shares(stream, ram, RAM_LEN), "its memory is taken");
    start(stream, rings);
}

fn negotiate(stream: &UnixStream, features: u64) {
    say(stream, Req::SET_OWNER, 0, &[], &[]);
    say(stream, Req::SET_PROTOCOL_FEATURES, 0, &8_u64.to_ne_bytes(), &[]); // REPLY_ACK
    tell(stream, Req::SET_FEATURES, &features.to_ne_bytes(), &[]);
}

/// Shares so much memory; whether that is allowed.
fn shares(mut stream: &UnixStream, ram: &Ram, len: u64) -> bool {
    say(stream, Req::SET_MEM_TABLE, 8, &mem_table(len), &[ram.fd().as_fd()]);
    serve();
    let mut reply = [0; 20];
    stream.read_exact(&mut reply).unwrap();
    reply[12..] == [0; 8]
}

/// One region, of so many bytes.
fn mem_table(len: u64) -> Vec<u8> {
    let words = [1, GUEST_BASE, len, USER_BASE, 0]; // with padding behind the number
    words.into_iter().flat_map(u64::to_ne_bytes).collect()
}

/// Where the device stands in a ring.
fn used(driver: &Driver) -> u16 {
    driver.ram.u16(driver.used + 2)
}

/// Takes rings away, as QEMU does when the VM is stopped, and brings them back.
pub(crate) fn stop_and_go_on(mut stream: &UnixStream, rings: &[(&Driver, &OwnedFd, &OwnedFd)]) {
    for (index, (driver, ..)) in (0..).zip(rings) {
        say(stream, Req::GET_VRING_BASE, 0, &state(index, 0), &[]);
        let mut reply = [0; 20];
        stream.read_exact(&mut reply).unwrap();
        assert_eq!(reply[16..], u32::from(used(driver)).to_ne_bytes());
    }
    start(stream, rings);
}

/// Starts rings where they stand.
fn start(stream: &UnixStream, rings: &[(&Driver, &OwnedFd, &OwnedFd)]) {
    let tell =
        |request, payload: &[u8], fds: &[BorrowedFd<'_>]| tell(stream, request, payload, fds);
    for (index, (driver, kick, call)) in (0..).zip(rings) {
        let user = |guest: u64| guest - GUEST_BASE + USER_BASE;
        let mut addr = state(index, 0);
        for area in [user(driver.desc), user(driver.used), user(driver.avail), 0] {
            addr.extend(area.to_ne_bytes());
        }
        let number = u64::from(index).to_ne_bytes();
        tell(Req::SET_VRING_NUM, &state(index, driver.size.into()), &[]);
        tell(Req::SET_VRING_BASE, &state(index, used(driver).into()), &[]);
        tell(Req::SET_VRING_ADDR, &addr, &[]);
        tell(Req::SET_VRING_CALL, &number, &[call.as_fd()]);
        tell(Req::SET_VRING_KICK, &number, &[kick.as_fd()]);
        tell(Req::SET_VRING_ENABLE, &state(index, 1), &[]);
    }
}

impl Guest {
    /// Connects to a port and brings its link up; no receive buffers are offered yet.
    pub(crate) fn boot(socket: &Path, features: u64) -> Self {
        Self::boot_in(socket, features, Ram::new(usize::try_from(RAM_LEN).unwrap()))
    }

    /// Likewise, in memory of [`RAM_LEN`] bytes.
    pub(crate) fn boot_in(socket: &Path, features: u64, ram: Rc<Ram>) -> Self {
        Self::try_boot_in(socket, features, ram).expect("its memory is taken")
    }

    /// The same. `None`: its memory is refused.
    pub(crate) fn try_boot_in(socket: &Path, features: u64, ram: Rc<Ram>) -> Option<Self> {
        let stream = UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        let rx = Driver::new(&ram, GUEST_BASE + 0x1_0000, QUEUE_SIZE);
        let tx = Driver::new(&ram, GUEST_BASE + 0x2_0000, QUEUE_SIZE);
        let fd = || eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).unwrap();
        let (kick, call) = ([fd(), fd()], [fd(), fd()]);
        let offered = VecDeque::new();
        let event_idx = features & bit::EVENT_IDX != 0;
        negotiate(&stream, features);
        if !shares(&stream, &ram, RAM_LEN) {
            return None;
        }
        start(&stream, &[(&rx, &kick[0], &call[0]), (&tx, &kick[1], &call[1])]);
        Some(Self { stream, ram, rx, tx, kick, call, sent: 0, offered, event_idx })
    }

    /// Its VMM hangs up, and another one goes on with it where it stands.
    pub(crate) fn goes_on(&mut self, socket: &Path, features: u64) {
        self.stream.shutdown(Shutdown::Both).unwrap();
        self.stream = UnixStream::connect(socket).unwrap();
        self.stream.set_read_timeout(Some(LIMIT)).unwrap();
        let (kick, call) = (&self.kick, &self.call);
        let rings = [(&self.rx, &kick[0], &call[0]), (&self.tx, &kick[1], &call[1])];
        set_up(&self.stream, features, &self.ram, &rings);
    }

    /// Its VMM begins to migrate it: it wants to know which pages are written.
    pub(crate) fn begins_to_migrate(&self, features: u64) {
        self.passes_log();
        self.wants_marks(features);
    }

    /// Its VMM has a place for marks of written pages.
    pub(crate) fn passes_log(&self) {
        let log = Ram::new(usize::try_from((GUEST_BASE + RAM_LEN) >> 15).unwrap());
        let protocol = 1 << 1 | 1 << 3_u64; // LOG_SHMFD, REPLY_ACK
        tell(&self.stream, Req::SET_PROTOCOL_FEATURES, &u64::to_ne_bytes(protocol), &[]);
        let spec = [log.len() as u64, 0].map(u64::to_ne_bytes).concat();
        tell(&self.stream, Req::SET_LOG_BASE, &spec, &[log.fd().as_fd()]);
    }

    /// It wants them there.
    pub(crate) fn wants_marks(&self, features: u64) {
        tell(&self.stream, Req::SET_FEATURES, &(features | bit::LOG_ALL).to_ne_bytes(), &[]);
    }

    /// Its vCPUs stand after it has offered this frame; then its VMM takes its rings away.
    pub(crate) fn stops_behind(&mut self, frame: &[u8]) {
        let bytes = [&[0; VirtioNetHdr::LEN_MRG][..], frame].concat();
        self.ram.write(TX_FRAMES, &bytes);
        self.tx.offer(&[(TX_FRAMES, u32::try_from(bytes.len()).unwrap())], 0);
        for (index, driver) in [(0, &self.rx), (1, &self.tx)] {
            say(&self.stream, Req::GET_VRING_BASE, 0, &state(index, 0), &[]);
            let mut reply = [0; 20];
            (&self.stream).read_exact(&mut reply).unwrap();
            assert_eq!(reply[16..], u32::from(used(driver)).to_ne_bytes());
        }
        assert_eq!(used(&self.tx), self.tx.avail_idx, "its last frame was taken");
    }

    /// Its VMM says that it has just been moved here.
    pub(crate) fn is_announced(&self, mac: [u8; 6]) {
        tell(&self.stream, Req::SEND_RARP, &[&mac[..], &[0; 2]].concat(), &[]);
    }

    /// Offers `n` receive buffers of 2 KiB.
    pub(crate) fn offer(&mut self, n: u64) {
        let old = self.rx.avail_idx;
        for _ in 0..n {
            let at = RX_BUFFERS + u64::from(self.rx.avail_idx % QUEUE_SIZE) * BUFFER;
            self.rx.offer(&[(at, u32::try_from(BUFFER).unwrap())], WRITE);
            self.offered.push_back(at);
        }
        self.kick(0, old);
    }

    /// Sends frames, with one kick for all.
    pub(crate) fn send(&mut self, frames: &[(VirtioNetHdr, Vec<u8>)]) {
        assert!(frames.len() as u64 <= TX_FRAMES_COUNT);
        let old = self.tx.avail_idx;
        for (hdr, frame) in frames {
            let at = TX_FRAMES + self.sent % TX_FRAMES_COUNT * TX_FRAME_LEN;
            self.sent += 1;
            let bytes = [&hdr.emit()[..], &[0, 0], frame].concat();
            self.ram.write(at, &bytes);
            self.tx.offer(&[(at, u32::try_from(bytes.len()).unwrap())], 0);
        }
        self.kick(1, old);
        // Their places are free when the device says so.
        let mut taken = 0;
        while taken < frames.len() {
            self.tx.set_used_event(self.tx.used_idx);
            fence(Ordering::SeqCst);
            match self.tx.used().len() {
                0 => wait(&self.call[1]),
                n => taken += n,
            }
        }
    }

    /// Puts a frame that needs nothing into its ring, and waits for nobody.
    pub(crate) fn puts(&mut self, frame: &[u8]) {
        let old = self.tx.avail_idx;
        let at = TX_FRAMES + self.sent % TX_FRAMES_COUNT * TX_FRAME_LEN;
        self.sent += 1;
        let bytes = [&[0; VirtioNetHdr::LEN_MRG][..], frame].concat();
        self.ram.write(at, &bytes);
        self.tx.offer(&[(at, u32::try_from(bytes.len()).unwrap())], 0);
        self.kick(1, old);
    }

    /// Its VMM's connection.
    pub(crate) fn connection(&self) -> &UnixStream {
        &self.stream
    }

    /// Sends one frame that needs nothing.
    pub(crate) fn send_plain(&mut self, frame: &[u8]) {
        self.send(&[(VirtioNetHdr::default(), frame.to_vec())]);
    }

    /// Waits for `n` frames.
    pub(crate) fn receive(&mut self, n: usize) -> Vec<Vec<u8>> {
        let mut frames = Vec::new();
        while frames.len() < n {
            self.rx.set_used_event(self.rx.used_idx);
            fence(Ordering::SeqCst);
            let some = self.received();
            if some.is_empty() {
                wait(&self.call[0]);
            }
            frames.extend(some);
        }
        frames
    }

    /// Waits for frames, as in [`Self::receive`], and offers their buffers again.
    pub(crate) fn hears(&mut self) -> Vec<Vec<u8>> {
        let frames = self.receive(1);
        self.offer(frames.len() as u64);
        frames
    }

    /// Takes what there is, and has `all` buffers on offer again: it has seen everything.
    pub(crate) fn catches_up(&mut self, all: u64) {
        self.received();
        self.offer(all - self.offered.len() as u64);
    }

    /// The frames that are there now. Each has a buffer: merging was not negotiated.
    pub(crate) fn received(&mut self) -> Vec<Vec<u8>> {
        let used = self.rx.used();
        let mut frame = |len: u32| {
            let at = self.offered.pop_front().expect("it was offered");
            self.ram.read(at, len as usize)[VirtioNetHdr::LEN_MRG..].to_vec()
        };
        used.into_iter().map(|(_, len)| frame(len)).collect()
    }

    /// Half of a message that takes nothing, with descriptors.
    pub(crate) fn says_half(stream: &UnixStream, fds: &[BorrowedFd<'_>]) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
        let code = u32::from(Req::SET_OWNER).to_ne_bytes();
        let sent = sendmsg(stream, &[IoSlice::new(&code)], &mut control, SendFlags::NOSIGNAL);
        assert_eq!(sent.unwrap(), 4);
    }

    /// GET_FEATURES.
    pub(crate) fn begins_to_ask_for_features(mut stream: &UnixStream) {
        let words = [u32::from(Req::GET_FEATURES), 1, 0];
        stream.write_all(&words.map(u32::to_ne_bytes).concat()).unwrap();
    }

    /// Half of that.
    pub(crate) fn begins_to_ask_for_half(mut stream: &UnixStream) {
        stream.write_all(&u32::from(Req::GET_FEATURES).to_ne_bytes()).unwrap();
    }

    /// And waits for the answer.
    pub(crate) fn asks_for_features(mut stream: &UnixStream) {
        Self::begins_to_ask_for_features(stream);
        stream.read_exact(&mut [0; 20]).unwrap();
    }

    /// And the rest of it.
    pub(crate) fn says_the_rest(mut stream: &UnixStream) {
        stream.write_all(&[1_u32.to_ne_bytes(), [0; 4]].concat()).unwrap();
    }

    /// A writer of its signal for frames blocks from now on.
    pub(crate) fn stuffs_its_signal(&self) {
        stuff(&self.call[0]);
    }

    /// Says that it has offered more than its ring for sending holds.
    pub(crate) fn lies(&mut self) {
        let too_far = self.tx.avail_idx.wrapping_add(QUEUE_SIZE + 1);
        self.tx.set_avail_idx(too_far);
        self.kicks(1);
    }

    /// Its VMM says that its memory is so long, before anything is in it.
    pub(crate) fn has_memory(&self, len: u64) {
        assert!(self.may_have_memory(len), "{len} bytes of memory are refused");
    }

    /// Likewise; whether that is allowed.
    pub(crate) fn may_have_memory(&self, len: u64) -> bool {
        shares(&self.stream, &self.ram, len)
    }

    /// Its VMM shares so much of a file besides, so far behind the beginning of its memory.
    pub(crate) fn has_more_memory(&self, from: u64, len: u64, file: BorrowedFd<'_>) {
        let at = GUEST_BASE + from;
        let words = [0, at, len, at, 4096]; // with padding, and not from where its tables begin
        let slot = words.map(u64::to_ne_bytes).concat();
        tell(&self.stream, Req::ADD_MEM_REG, &slot, &[file]);
    }

    /// Sends a frame of zeros in so many pieces, one every so many bytes from there on.
    pub(crate) fn sends_scattered(&mut self, from: u64, apart: u64, pieces: u64) {
        let old = self.tx.avail_idx;
        let list: Vec<_> = (0..pieces).map(|n| (GUEST_BASE + from + n * apart, 60)).collect();
        let table = TX_FRAMES + self.sent % TX_FRAMES_COUNT * TX_FRAME_LEN;
        self.sent += 1;
        self.tx.offer_indirect(table, &list, 0);
        self.kick(1, old);
    }

    /// Frames that were taken since the last call, or since it last sent some otherwise.
    pub(crate) fn taken(&mut self) -> usize {
        self.tx.used().len()
    }

    /// Its VMM has no descriptors for kicks, and wants the queues to be polled.
    pub(crate) fn is_polled(&self) {
        for queue in 0..2_u64 {
            tell(&self.stream, Req::SET_VRING_KICK, &(queue | 1 << 8).to_ne_bytes(), &[]);
        }
    }

    /// Its VMM has another descriptor for the kicks of a queue.
    pub(crate) fn is_kicked_by(&self, queue: u64, kick: &OwnedFd) {
        tell(&self.stream, Req::SET_VRING_KICK, &queue.to_ne_bytes(), &[kick.as_fd()]);
    }

    /// Likewise for its signals.
    pub(crate) fn is_signalled_by(&self, queue: u64, call: &OwnedFd) {
        tell(&self.stream, Req::SET_VRING_CALL, &queue.to_ne_bytes(), &[call.as_fd()]);
    }

    /// Kicks a queue, whatever the device has asked for.
    pub(crate) fn kicks(&self, queue: usize) {
        rustix::io::write(&self.kick[queue], &1_u64.to_ne_bytes()).unwrap();
    }

    /// Kicks, if the device has asked for one since `old` was the index.
    fn kick(&self, queue: usize, old: u16) {
        fence(Ordering::SeqCst);
        let driver = [&self.rx, &self.tx][queue];
        let new = driver.avail_idx;
        let wanted = if self.event_idx {
            new.wrapping_sub(driver.avail_event()).wrapping_sub(1) < new.wrapping_sub(old)
        } else {
            !driver.kicks_are_off()
        };
        if wanted {
            self.kicks(queue);
        }
    }
}

/// A writer blocks from now on: the eventfd is full, and has no O_NONBLOCK.
pub(crate) fn stuff(eventfd: &OwnedFd) {
    // Not while the device signals, which it may just do.
    while rustix::io::write(eventfd, &(u64::MAX - 1).to_ne_bytes()).is_err() {
        let _ = rustix::io::read(eventfd, &mut [0; 8]);
    }
    fcntl_setfl(eventfd, OFlags::empty()).unwrap();
}

/// Waits for an eventfd and clears it.
fn wait(fd: &OwnedFd) {
    let mut fds = [PollFd::new(fd, PollFlags::IN)];
    let limit = Timespec { tv_sec: i64::try_from(LIMIT.as_secs()).unwrap(), tv_nsec: 0 };
    assert_eq!(poll(&mut fds, Some(&limit)).unwrap(), 1, "no signal from the device");
    rustix::io::read(fd, &mut [0; 8]).unwrap();
}
