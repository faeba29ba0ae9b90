//! A villain's messages and descriptors.

use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use nix::sys::timerfd::{ClockId, TimerFd, TimerFlags};
use rustix::event::epoll;
use rustix::fs::{Mode, OFlags, fcntl_setfl, inotify, open};
use rustix::io::dup;
use vhost::vhost_user::message::FrontendReq as Req;

use super::rings::ring;
use super::{
    AVAIL, CROWD, PEERS, Random, USED, VRING_NO_FD, Villain, new_eventfd, pair, sparse, words,
};
use crate::blocked::{lingering, unclosable};
use crate::driver::{GUEST_BASE, Ram, USER_BASE};
use crate::guest::RAM_LEN;
use crate::street::connect_at_once;

impl Villain {
    /// A message of anything, with descriptors of anything that does not wait. Most do not end the
    /// connection, and with it what it could do otherwise.
    pub(super) fn babbles(&mut self, random: &mut Random) -> bool {
        let (code, len) = (u32::try_from(random.below(48)).unwrap(), random.below(12));
        let mut payload: Vec<u8> = (0..len).flat_map(|_| random.word().to_ne_bytes()).collect();
        payload.truncate(payload.len().saturating_sub(usize::try_from(random.below(9)).unwrap()));
        let count = random.of(&[0, 0, 1, 1, 1, 2, 5]);
        let fds: Vec<OwnedFd> = (0..count).map(|_| self.descriptor(random)).collect();
        let flags = random.of(&[&[1, 9].repeat(32)[..], &[0, 5]].concat());
        self.gives_away(flags, code, &payload, fds)
    }

    /// Says something with descriptors whose closing may wait: no longer ours to close.
    pub(super) fn gives_away(
        &mut self,
        flags: u32,
        code: u32,
        payload: &[u8],
        fds: Vec<OwnedFd>,
    ) -> bool {
        let borrowed: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        let given = self.says_with(flags, code, payload, &borrowed);
        fds.into_iter().for_each(|fd| self.closer.send(fd).unwrap());
        given
    }

    pub(super) fn descriptor(&mut self, random: &mut Random) -> OwnedFd {
        match random.below(6) {
            0 | 1 => self.ram.fd(),
            2 => new_eventfd(),
            3 => Ram::unsealed(4096).fd(),
            4 => self.other_descriptor(random),
            _ => self.kick.try_clone().unwrap(),
        }
    }

    /// A descriptor that is neither memory nor an eventfd.
    pub(super) fn other_descriptor(&mut self, random: &mut Random) -> OwnedFd {
        match random.below(12) {
            0 => {
                let epolls = [(); 3].map(|()| epoll::create(epoll::CreateFlags::CLOEXEC).unwrap());
                let data = epoll::EventData::new_u64(0);
                for (outer, inner) in epolls.iter().zip(&epolls[1..]) {
                    epoll::add(outer, inner, data, epoll::EventFlags::IN).unwrap();
                }
                let [outer, ..] = epolls;
                outer
            }
            1 => rustix::pipe::pipe().unwrap().0,
            2 => rustix::pipe::pipe().unwrap().1,
            3 => UnixStream::pair().unwrap().0.into(),
            4 => {
                let (stream, peer) = lingering();
                self.keeps(peer);
                stream.into()
            }
            5 => open("/", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).unwrap(),
            6 => TimerFd::new(ClockId::CLOCK_MONOTONIC, TimerFlags::TFD_CLOEXEC).unwrap().into(),
            7 => inotify::init(inotify::CreateFlags::CLOEXEC).unwrap(),
            8 => std::fs::File::open("/dev/null").unwrap().into(),
            9 => std::fs::File::open("/proc/self/maps").unwrap().into(),
            10 => std::net::UdpSocket::bind("127.0.0.1:0").unwrap().into(),
            _ => {
                let (outer, peer) = unclosable();
                self.keeps(peer);
                outer.into()
            }
        }
    }

    /// The connection itself, from its other end; not with what keeps it, or its port is nobody
    /// else's for ever.
    pub(super) fn gives_itself(&mut self, random: &mut Random) -> bool {
        let Some(end) = self.stream.as_ref().map(|stream| dup(stream).unwrap()) else {
            return false;
        };
        let request = random.of(&[Req::SET_VRING_KICK, Req::SET_VRING_CALL, Req::SET_LOG_FD]);
        self.gives_away(9, request.into(), &words(&[0]), vec![end])
    }

    /// As long as it does so whoever closes what was given away waits.
    pub(super) fn keeps(&mut self, peer: TcpStream) {
        self.peers.push_back(peer);
        if self.peers.len() > PEERS {
            self.peers.pop_front();
        }
    }

    pub(super) fn gives_other_descriptors(&mut self, random: &mut Random) -> bool {
        let takes = [
            Req::SET_VRING_KICK,
            Req::SET_VRING_CALL,
            Req::SET_VRING_ERR,
            Req::SET_LOG_FD,
            Req::SET_INFLIGHT_FD,
            Req::SET_MEM_TABLE,
            Req::SET_BACKEND_REQ_FD,
        ];
        let (request, fd) = (random.of(&takes), self.other_descriptor(random));
        let payload = match request {
            Req::SET_MEM_TABLE => words(&[1, GUEST_BASE, RAM_LEN, USER_BASE, 0]),
            Req::SET_INFLIGHT_FD => words(&[Self::log_len(64), 0, 2 | 64 << 16]),
            Req::SET_LOG_FD | Req::SET_BACKEND_REQ_FD => vec![],
            _ => words(&[self.queue(random)]),
        };
        // Asked whether it was obeyed, the daemon says so and stays.
        self.gives_away(9, request.into(), &payload, vec![fd])
    }

    pub(super) fn says_start(&mut self, index: u64) -> bool {
        let kick = self.kick.try_clone().unwrap();
        self.says(Req::SET_VRING_KICK, &words(&[index]), &[kick.as_fd()])
            && self.says(Req::SET_VRING_ENABLE, &words(&[pair(index, 1)]), &[])
    }

    pub(super) fn stops_and_starts(&mut self, random: &mut Random) -> bool {
        let (index, times) = (self.queue(random), 1 + random.below(4));
        (0..times).all(|_| match random.below(3) {
            0 => self.says(Req::GET_VRING_BASE, &words(&[index]), &[]) && self.says_start(index),
            1 => {
                let enable = |on| words(&[pair(index, on)]);
                self.says(Req::SET_VRING_ENABLE, &enable(0), &[])
                    && self.says(Req::SET_VRING_ENABLE, &enable(1), &[])
            }
            _ => {
                let user = ring(index) - GUEST_BASE + USER_BASE;
                let addr = words(&[index, user, user + USED, user + AVAIL, 0]);
                self.says(Req::SET_VRING_ADDR, &addr, &[])
            }
        }) && self.asks()
    }

    /// It is another station each time, which all are to hear of.
    pub(super) fn announces(&mut self, random: &mut Random) -> bool {
        (0..1 + random.below(64)).all(|_| {
            let mac = words(&[random.next() & !1]);
            self.says(Req::SEND_RARP, &mac, &[])
        }) && self.asks()
    }

    pub(super) fn wants_to_be_polled(&mut self, random: &mut Random) -> bool {
        let number = words(&[self.queue(random) | VRING_NO_FD]);
        self.says(random.of(&[Req::SET_VRING_KICK, Req::SET_VRING_CALL]), &number, &[])
    }

    /// Which is not offered.
    pub(super) fn wants_to_know_what_is_dirty(&mut self, random: &mut Random) -> bool {
        let (len, fd) = (random.of(&[4096, 1 << 40]), sparse(1 << 40));
        self.says_with(9, Req::SET_LOG_BASE.into(), &words(&[len, 0]), &[fd.as_fd()])
    }

    pub(super) fn says_noise(&mut self, random: &mut Random) -> bool {
        let noise = words(&[random.next(), random.word()]);
        let len = 1 + usize::try_from(random.below(15)).unwrap();
        self.sends(&noise[..len], &[])
    }

    /// And goes, or says the rest later, which is then another message.
    pub(super) fn says_half(&mut self, random: &mut Random) -> bool {
        let fd = self.other_descriptor(random);
        let half = u32::from(Req::SET_MEM_TABLE).to_ne_bytes();
        let given = self.sends(&half, &[fd.as_fd()]);
        self.closer.send(fd).unwrap();
        given && (random.below(2) == 0 || self.hangs_up())
    }

    pub(super) fn comes_and_goes(&mut self, random: &mut Random) -> bool {
        self.hangs_up();
        (0..1 + random.below(64)).filter(|_| connect_at_once(&self.socket).is_ok()).count() > 0
    }

    /// A writer of its signal for frames blocks from now on.
    pub(super) fn stuffs_its_signal(&mut self) -> bool {
        fcntl_setfl(&self.call, OFlags::NONBLOCK).unwrap(); // else we are who waits
        while rustix::io::write(&self.call, &(u64::MAX - 1).to_ne_bytes()).is_err() {
            let _ = rustix::io::read(&self.call, &mut [0; 8]);
        }
        fcntl_setfl(&self.call, OFlags::empty()).unwrap();
        true
    }

    /// A signal wakes very many waiters.
    pub(super) fn calls_a_crowd(&mut self) -> bool {
        if !self.crowd.is_empty() {
            return false;
        }
        let names: Vec<_> = (0..CROWD).map(|_| dup(&self.call).unwrap()).collect();
        for _ in 0..CROWD {
            let some = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
            let data = epoll::EventData::new_u64(0);
            for name in &names {
                epoll::add(&some, name, data, epoll::EventFlags::IN).unwrap();
            }
            self.crowd.push(some);
        }
        true
    }
}
