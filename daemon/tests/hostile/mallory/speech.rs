//! How a villain comes, speaks, listens and goes.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::net::SocketAddrV4;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, mpsc};

use nightporterd::vhost::features::bit;
use rustix::net::{
    RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown, recv, sendmsg,
    shutdown,
};
use vhost::vhost_user::message::FrontendReq as Req;

use super::memory::Sieve;
use super::rings::ring;
use super::{
    AVAIL, Device, LIFE, PROTOCOL, PROTOCOL_OF_SOCKETS, Place, QUEUE_SIZE, Random, SLOTS, USED,
    Villain, new_eventfd, pair, words,
};
use crate::driver::{GUEST_BASE, USER_BASE};
use crate::guest::{PLAIN, RAM_LEN};
use crate::street::connect_at_once;

impl Villain {
    pub(super) fn new(
        device: Device,
        socket: PathBuf,
        closer: mpsc::Sender<OwnedFd>,
        puncher: mpsc::Sender<Sieve>,
        overlay: SocketAddrV4,
    ) -> Self {
        Self {
            device,
            socket,
            stream: None,
            waits: false,
            left: 0,
            ram: device.memory(),
            kick: new_eventfd(),
            call: new_eventfd(),
            avail_idx: vec![0; usize::try_from(device.queues()).unwrap()],
            log: None,
            is_wide: false,
            place: Place::Usual,
            sieve: None,
            is_punched: Arc::default(),
            puncher,
            crowd: Vec::new(),
            closer,
            overlay,
            peers: VecDeque::new(),
        }
    }

    pub(super) fn queues(&self) -> u64 {
        self.device.queues()
    }

    pub(super) fn queue(&self, random: &mut Random) -> u64 {
        random.below(self.queues())
    }

    /// A queue by which frames come from it.
    pub(super) fn queue_from(&self, random: &mut Random) -> u64 {
        1 + 2 * random.below(self.queues() / 2)
    }

    pub(super) fn says(
        &mut self,
        code: impl Into<u32>,
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> bool {
        self.says_with(1, code.into(), payload, fds)
    }

    pub(super) fn says_with(
        &mut self,
        flags: u32,
        code: u32,
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> bool {
        let len = u32::try_from(payload.len()).unwrap();
        let mut bytes: Vec<u8> =
            [code, flags, len].into_iter().flat_map(u32::to_ne_bytes).collect();
        bytes.extend(payload);
        self.sends(&bytes, fds)
    }

    /// Bytes that the socket does not take end the connection; the daemon may have hung up long
    /// ago.
    pub(super) fn sends(&mut self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> bool {
        let Some(stream) = &self.stream else { return false };
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let sent = sendmsg(stream, &[IoSlice::new(bytes)], &mut control, flags);
        if sent != Ok(bytes.len()) {
            self.stream = None;
        }
        sent.is_ok() // or something of it may be with the daemon
    }

    /// Asks for something, and does nothing until there is an answer.
    pub(super) fn asks(&mut self) -> bool {
        self.waits = self.says(Req::GET_QUEUE_NUM, &[], &[]);
        self.waits
    }

    /// Whether all was obeyed for whose answer it waits.
    pub(super) fn is_obeyed(&mut self) -> bool {
        self.hears() && !self.waits
    }

    /// Reads what the daemon has answered, if it has. `false`: it has hung up.
    pub(super) fn hears(&mut self) -> bool {
        let Some(stream) = &self.stream else { return false };
        let mut answers = [0_u8; 4096];
        match recv(stream, &mut answers[..], RecvFlags::DONTWAIT) {
            Ok((_, 0)) => self.stream = None,
            Ok((_, len)) => {
                // GET_QUEUE_NUM, which nobody asks else but by chance.
                let asked = u32::from(Req::GET_QUEUE_NUM).to_ne_bytes();
                self.waits &= !answers[..len].windows(4).any(|word| word == asked);
            }
            Err(rustix::io::Errno::AGAIN) => {}
            Err(_) => self.stream = None,
        }
        self.stream.is_some()
    }

    pub(super) fn hangs_up(&mut self) -> bool {
        // At once, also where another test just starts a program, which has a copy until it runs.
        self.stream.take().is_some_and(|stream| shutdown(stream, Shutdown::Both).is_ok())
    }

    /// The daemon takes nobody in as long as what was passed to it does not close.
    pub(super) fn gives_up(&mut self) -> bool {
        self.peers.clear();
        self.hangs_up()
    }

    /// A connection whose rings run, most likely.
    pub(super) fn boots(&mut self, random: &mut Random) -> bool {
        self.stream = connect_at_once(&self.socket).ok();
        if self.stream.is_none() {
            return self.gives_up();
        }
        self.left = 1 + random.below(LIFE);
        (self.log, self.sieve, self.is_wide) = (None, None, false);
        self.crowd.clear();
        (self.kick, self.call) = (new_eventfd(), new_eventfd());
        match self.place {
            Place::Usual => {}
            Place::NextTight => self.place = Place::Tight,
            Place::Tight => (self.place, self.ram) = (Place::Usual, self.device.memory()),
        }
        let (more, protocol) = match self.device {
            Device::Trap | Device::Crowd => (vec![0], 0),
            Device::Sieve => (vec![0], SLOTS),
            Device::Sockets => (vec![0, bit::EVENT_IDX, bit::INDIRECT_DESC], PROTOCOL_OF_SOCKETS),
            _ => (vec![0, bit::EVENT_IDX, bit::INDIRECT_DESC, bit::MRG_RXBUF], PROTOCOL),
        };
        let features = PLAIN | random.of(&more) | random.of(&more);
        self.says(Req::SET_PROTOCOL_FEATURES, &words(&[protocol]), &[]);
        self.says(Req::SET_FEATURES, &words(&[features]), &[]);
        let (ram, kick) = (self.ram.fd(), self.kick.try_clone().unwrap());
        let table = words(&[1, GUEST_BASE, RAM_LEN, USER_BASE, 0]);
        self.says(Req::SET_MEM_TABLE, &table, &[ram.as_fd()]);
        for index in 0..self.queues() {
            // Where the device was when it was last here.
            let at = usize::try_from(index).unwrap();
            self.avail_idx[at] = self.ram.u16(ring(index) + USED + 2);
            self.ram.set_u16(ring(index) + AVAIL + 2, self.avail_idx[at]);
            self.starts(index, &kick);
        }
        self.asks()
    }

    pub(super) fn starts(&mut self, index: u64, kick: &OwnedFd) {
        let user = ring(index) - GUEST_BASE + USER_BASE;
        let addr = words(&[index, user, user + USED, user + AVAIL, 0]);
        let (number, call) = (words(&[index]), self.call.try_clone().unwrap());
        self.says(Req::SET_VRING_NUM, &words(&[pair(index, QUEUE_SIZE)]), &[]);
        self.says(Req::SET_VRING_ADDR, &addr, &[]);
        self.says(Req::SET_VRING_CALL, &number, &[call.as_fd()]);
        self.says(Req::SET_VRING_KICK, &number, &[kick.as_fd()]);
        self.says(Req::SET_VRING_ENABLE, &words(&[pair(index, 1)]), &[]);
    }
}
