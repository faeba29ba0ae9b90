//! A front-end connected to a port, and a guest with one queue pair behind it.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::atomic::{AtomicU32, Ordering};

use nightporter_core::port::PortFeatures;
use nightporter_core::wire::virtio_net::VirtioNetHdr;
use nightporterd::port::vhost_user::{VhostUserConfig, VhostUserPort};
use nightporterd::vhost::features::bit;
use nightporterd::vhost::listener::Access;
use nightporterd::vhost::{Event, Source};
use rustix::event::{EventfdFlags, eventfd};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
pub(crate) use vhost::vhost_user::message::FrontendReq as Req;

use crate::driver::{Driver, GUEST_BASE, Ram, USER_BASE};

/// Features that Linux's driver takes from us.
pub(crate) const LINUX: u64 = bit::VERSION_1
    | bit::EVENT_IDX
    | bit::INDIRECT_DESC
    | bit::MRG_RXBUF
    | bit::CSUM
    | bit::GUEST_CSUM
    | bit::GUEST_TSO4
    | bit::HOST_TSO4
    | bit::PROTOCOL_FEATURES;
/// Protocol features of most tests: BACKEND_REQ, REPLY_ACK and a few more do not matter to rings.
pub(crate) const REPLY_ACK: u64 = 1 << 3;
/// The message flag that asks for an acknowledgement.
pub(crate) const NEED_REPLY: u32 = 8;
/// Guest memory of a world.
pub(crate) const RAM_LEN: usize = 2 << 20;
/// Where the two rings are; buffers are free to be anywhere from [`BUFFERS`] on.
pub(crate) const RING_TO_GUEST: u64 = GUEST_BASE + 0x1_0000;
pub(crate) const RING_FROM_GUEST: u64 = GUEST_BASE + 0x2_0000;
pub(crate) const BUFFERS: u64 = GUEST_BASE + 0x8_0000;
/// Descriptors in each ring.
pub(crate) const QUEUE_SIZE: u16 = 64;

/// A path for a socket that no other test has.
pub(crate) fn socket_path() -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let unique = NEXT.fetch_add(1, Ordering::Relaxed);
    std::env::temp_dir().join(format!("nightporter-vhost-{}-{unique}", std::process::id()))
}

pub(crate) fn config(socket: PathBuf) -> VhostUserConfig {
    VhostUserConfig {
        name: "vm".to_owned(),
        socket,
        access: Access::default(),
        mac: Some([2, 0, 0, 0, 0, 7]),
        mtu: None,
        queue_pairs: 1,
        allow_unsealed_memory: false,
        memory_max: None,
        memory_is_limited: false,
    }
}

/// A port without a front-end.
pub(crate) fn port(queue_pairs: u16) -> (VhostUserPort, PathBuf) {
    let socket = socket_path();
    let config = VhostUserConfig { queue_pairs, ..config(socket.clone()) };
    (VhostUserPort::new(&config).unwrap(), socket)
}

pub(crate) fn new_eventfd() -> OwnedFd {
    eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).unwrap()
}

/// How often an eventfd was written since the last call.
pub(crate) fn count(fd: &OwnedFd) -> u64 {
    let mut value = [0; 8];
    match rustix::io::read(fd, &mut value) {
        Ok(_) => u64::from_ne_bytes(value),
        Err(_) => 0,
    }
}

/// The front-end's end of the connection.
#[derive(Debug)]
pub(crate) struct FrontEnd(UnixStream);

impl FrontEnd {
    /// Connects, and lets the port notice.
    pub(crate) fn connect(port: &mut VhostUserPort, socket: &PathBuf) -> Self {
        let stream = UnixStream::connect(socket).unwrap();
        stream.set_nonblocking(true).unwrap();
        port.handle_listener();
        Self(stream)
    }

    pub(crate) fn send(&self, code: u32, flags: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        let mut bytes = Vec::new();
        for word in [code, flags, u32::try_from(payload.len()).unwrap()] {
            bytes.extend(word.to_ne_bytes());
        }
        bytes.extend(payload);
        self.send_raw(&bytes, fds);
    }

    pub(crate) fn send_raw(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
        }
        // The port may have hung up already; what matters is what it does then.
        let _ = sendmsg(&self.0, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL);
    }

    /// The next reply: request code, payload, descriptor. `None` if there is none.
    pub(crate) fn reply(&self) -> Option<(u32, Vec<u8>, Option<OwnedFd>)> {
        let mut bytes = [0; 4096];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut header = [0; 12];
        let mut to = [IoSliceMut::new(&mut header)];
        let got = recvmsg(&self.0, &mut to, &mut control, RecvFlags::DONTWAIT).ok()?;
        if got.bytes == 0 {
            return None;
        }
        assert_eq!(got.bytes, 12, "a whole header");
        let fd = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
            _ => None,
        });
        let word = |i: usize| u32::from_ne_bytes(header[i..i + 4].try_into().unwrap());
        assert_eq!(word(4), 5, "version 1, a reply");
        let len = word(8) as usize;
        if len > 0 {
            assert_eq!(rustix::io::read(&self.0, &mut bytes[..len]).unwrap(), len);
        }
        Some((word(0), bytes[..len].to_vec(), fd))
    }

    /// Closes our end, as the death of the process does.
    pub(crate) fn hang_up(&mut self) {
        self.0 = UnixStream::pair().unwrap().0;
    }

    /// Whether the port has closed the connection.
    pub(crate) fn is_hung_up(&self) -> bool {
        let mut byte = [0];
        loop {
            match rustix::io::read(&self.0, &mut byte) {
                Ok(0) => return true,
                Ok(_) => {}
                Err(e) => return e == rustix::io::Errno::CONNRESET,
            }
        }
    }
}

/// The `struct vhost_user_mem_table` entry of a region.
pub(crate) fn region(guest: u64, len: u64, user: u64, offset: u64) -> Vec<u8> {
    [guest, len, user, offset].into_iter().flat_map(u64::to_ne_bytes).collect()
}

/// SET_MEM_TABLE with these regions.
pub(crate) fn mem_table(regions: &[Vec<u8>]) -> Vec<u8> {
    let mut payload = u32::try_from(regions.len()).unwrap().to_ne_bytes().to_vec();
    payload.extend([0; 4]);
    payload.extend(regions.concat());
    payload
}

/// SET_VRING_NUM, _BASE and _ENABLE.
pub(crate) fn vring_state(index: u32, num: u32) -> Vec<u8> {
    [index, num].into_iter().flat_map(u32::to_ne_bytes).collect()
}

/// SET_VRING_ADDR for a driver's ring.
pub(crate) fn vring_addr(index: u32, driver: &Driver) -> Vec<u8> {
    let user = |guest: u64| guest - GUEST_BASE + USER_BASE;
    let mut payload = vring_state(index, 0);
    for addr in [user(driver.desc), user(driver.used), user(driver.avail), 0] {
        payload.extend(addr.to_ne_bytes());
    }
    payload
}

/// Everything together: a port, its front-end, and a guest with one queue pair.
#[derive(Debug)]
pub(crate) struct World {
    pub(crate) port: VhostUserPort,
    pub(crate) socket: PathBuf,
    pub(crate) front: FrontEnd,
    pub(crate) ram: Rc<Ram>,
    pub(crate) rx: Driver,
    pub(crate) tx: Driver,
    /// Kick, call and error descriptors of both queues.
    pub(crate) kick: [OwnedFd; 2],
    pub(crate) call: [OwnedFd; 2],
    pub(crate) err: [OwnedFd; 2],
}

impl World {
    /// Connected; nothing negotiated.
    pub(crate) fn connected(queue_pairs: u16) -> Self {
        let (mut port, socket) = port(queue_pairs);
        let front = FrontEnd::connect(&mut port, &socket);
        let ram = Ram::new(RAM_LEN);
        let rx = Driver::new(&ram, RING_TO_GUEST, QUEUE_SIZE);
        let tx = Driver::new(&ram, RING_FROM_GUEST, QUEUE_SIZE);
        let fds = || [new_eventfd(), new_eventfd()];
        let (kick, call, err) = (fds(), fds(), fds());
        Self { port, socket, front, ram, rx, tx, kick, call, err }
    }

    /// Up and running with these virtio features.
    pub(crate) fn running(features: u64) -> Self {
        Self::prepared(features, |_| {})
    }

    /// Likewise, after the test has prepared the rings.
    pub(crate) fn prepared(features: u64, prepare: impl FnOnce(&mut Self)) -> Self {
        let mut world = Self::connected(1);
        prepare(&mut world);
        world.negotiate(features);
        world.set_memory();
        world.start_rings();
        let link = world.port.link();
        assert!(link.is_some(), "the link is up");
        world.events();
        world
    }

    /// Sends one message and lets the port handle it.
    pub(crate) fn say(&mut self, request: Req, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        self.front.send(request.into(), 1, payload, fds);
        self.port.handle_connection();
    }

    /// Sends one message and reads the reply.
    pub(crate) fn ask(&mut self, request: Req, payload: &[u8]) -> (Vec<u8>, Option<OwnedFd>) {
        self.say(request, payload, &[]);
        let (code, payload, fd) = self.front.reply().expect("a reply");
        assert_eq!(code, u32::from(request));
        (payload, fd)
    }

    /// Asks for a value of 64 bits.
    pub(crate) fn ask_u64(&mut self, request: Req, payload: &[u8]) -> u64 {
        u64::from_ne_bytes(self.ask(request, payload).0.try_into().expect("eight bytes"))
    }

    /// Sends one message that asks for an acknowledgement; whether it was obeyed.
    pub(crate) fn is_obeyed(&mut self, request: Req, payload: &[u8], fds: &[OwnedFd]) -> bool {
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        self.front.send(request.into(), 1 | NEED_REPLY, payload, &fds);
        self.port.handle_connection();
        let (_, payload, _) = self.front.reply().expect("an acknowledgement");
        payload == 0_u64.to_ne_bytes()
    }

    pub(crate) fn negotiate(&mut self, features: u64) {
        self.say(Req::SET_OWNER, &[], &[]);
        let offered = self.ask_u64(Req::GET_FEATURES, &[]);
        assert_eq!(features & !offered, 0, "offered");
        if features & bit::PROTOCOL_FEATURES != 0 {
            let protocol = self.ask_u64(Req::GET_PROTOCOL_FEATURES, &[]);
            self.say(Req::SET_PROTOCOL_FEATURES, &protocol.to_ne_bytes(), &[]);
        }
        self.say(Req::SET_FEATURES, &features.to_ne_bytes(), &[]);
    }

    pub(crate) fn set_memory(&mut self) {
        let table = mem_table(&[region(GUEST_BASE, RAM_LEN as u64, USER_BASE, 0)]);
        let fd = self.ram.fd();
        self.say(Req::SET_MEM_TABLE, &table, &[fd.as_fd()]);
    }

    /// Starts both rings, in QEMU's order.
    pub(crate) fn start_rings(&mut self) {
        for index in 0..2 {
            self.start_ring(index);
        }
        for index in 0..2 {
            self.say(Req::SET_VRING_ENABLE, &vring_state(index, 1), &[]);
        }
    }

    /// Everything for one ring but SET_VRING_ENABLE.
    pub(crate) fn start_ring(&mut self, index: u32) {
        let i = index as usize;
        let driver = [&self.rx, &self.tx][i];
        let (size, addr) = (u32::from(driver.size), vring_addr(index, driver));
        let fds = [&self.kick[i], &self.call[i], &self.err[i]].map(|fd| fd.try_clone().unwrap());
        let [kick, call, err] = &fds;
        let number = u64::from(index).to_ne_bytes();
        self.say(Req::SET_VRING_NUM, &vring_state(index, size), &[]);
        self.say(Req::SET_VRING_BASE, &vring_state(index, 0), &[]);
        self.say(Req::SET_VRING_ADDR, &addr, &[]);
        self.say(Req::SET_VRING_ERR, &number, &[err.as_fd()]);
        self.say(Req::SET_VRING_CALL, &number, &[call.as_fd()]);
        self.say(Req::SET_VRING_KICK, &number, &[kick.as_fd()]);
    }

    /// GET_VRING_BASE, which stops a ring; where it stood.
    pub(crate) fn stop_ring(&mut self, index: u32) -> u32 {
        let (payload, _) = self.ask(Req::GET_VRING_BASE, &vring_state(index, 0));
        assert_eq!(payload[..4], index.to_ne_bytes());
        u32::from_ne_bytes(payload[4..8].try_into().unwrap())
    }

    /// Another port, to which the front-end has just connected.
    pub(crate) fn anew(&mut self, config: VhostUserConfig) {
        self.socket = socket_path();
        let socket = self.socket.clone();
        self.port = VhostUserPort::new(&VhostUserConfig { socket, ..config }).unwrap();
        self.front = FrontEnd::connect(&mut self.port, &self.socket);
    }

    /// The front-end goes and comes back; nothing is negotiated.
    pub(crate) fn reconnect(&mut self) {
        self.front.hang_up();
        self.port.handle_connection();
        self.events();
        self.front = FrontEnd::connect(&mut self.port, &self.socket);
    }

    /// The events since the last call, as short texts; descriptors handed back are closed.
    pub(crate) fn events(&mut self) -> Vec<String> {
        std::iter::from_fn(|| self.port.poll_event()).map(|event| text(&event)).collect()
    }

    /// The link, as the last event about it has it.
    pub(crate) fn link(&self) -> Option<PortFeatures> {
        self.port.link()
    }

    /// Puts a frame with a virtio-net header of `hdr_len` zero bytes at `at`, in one buffer.
    pub(crate) fn put_frame(&self, at: u64, hdr_len: usize, frame: &[u8]) -> (u64, u32) {
        let mut bytes = vec![0; hdr_len];
        bytes.extend(frame);
        self.ram.write(at, &bytes);
        (at, u32::try_from(bytes.len()).unwrap())
    }

    /// All frames that the port finds, and shows the guest that they were taken.
    pub(crate) fn poll_frames(&mut self) -> Vec<(VirtioNetHdr, Vec<u8>)> {
        let mut frames = Vec::new();
        let mut buf = vec![0xee; 70_000];
        while let Some((hdr, len)) = self.port.poll_from_guest(0, &mut buf) {
            frames.push((hdr, buf[..len].to_vec()));
        }
        self.port.flush_from_guest(0);
        frames
    }

    /// Offers `n` receive buffers of `len` bytes, one after the other from `at` on.
    pub(crate) fn offer_buffers(&mut self, at: u64, n: u64, len: u32) {
        for i in 0..n {
            self.rx.offer(&[(at + i * u64::from(len), len)], crate::driver::WRITE);
        }
    }
}

/// An event in a few words.
pub(crate) fn text(event: &Event) -> String {
    match event {
        Event::Watch(Source::Kick(vring)) => format!("watch {vring}"),
        Event::Watch(source) => format!("watch {source:?}"),
        Event::Rest(source) => format!("rest {source:?}"),
        Event::Poll => "poll".to_owned(),
        Event::Unwatch(_) => "unwatch".to_owned(),
        Event::Link(link) => format!("link {}", if link.is_some() { "up" } else { "down" }),
        Event::RingStarted(vring) => format!("started {vring}"),
        Event::RingStopped(vring) => format!("stopped {vring}"),
        Event::RingBroken { vring, fault } => format!("broken {vring}: {fault:?}"),
        Event::Logs(on) => format!("logs {on}"),
        Event::Leaving => "leaving".to_owned(),
        Event::Rarp(mac) => format!("rarp {mac:?}"),
        Event::Connected => "connected".to_owned(),
        Event::Disconnected(_) => "disconnected".to_owned(),
    }
}
