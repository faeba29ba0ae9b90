//! A villain's system calls, and its forgeries of other hosts.

use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsFd;

use rustix::event::{EventfdFlags, eventfd};
use vhost::vhost_user::message::FrontendReq as Req;

use super::{Random, Villain, words};

/// The number of the overlay, and the last bytes of the address of a peer of it that nobody is and
/// of somebody who is none.
pub(crate) const OVERLAY_VNI: u8 = 7;
pub(crate) const PEER: u8 = 2;
const STRANGER: u8 = 3;
/// Datagrams that are sent one after the other: a softirq reads 300 at a time.
const BURST: usize = 512;
const FORGED: u64 = 32;

impl Villain {
    /// An eventfd of which each read takes away one of very many kicks.
    pub(super) fn kicks_for_ever(&mut self, random: &mut Random) -> bool {
        let kick = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::SEMAPHORE).unwrap();
        rustix::io::write(&kick, &(1_u64 << 62).to_ne_bytes()).unwrap();
        let index = self.queue(random);
        self.says(Req::SET_VRING_KICK, &words(&[index]), &[kick.as_fd()])
    }

    /// Datagrams for nobody, which cost a softirq of whatever core they come to.
    pub(super) fn sends_a_burst(&mut self) -> bool {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let to = socket.local_addr().unwrap();
        (0..BURST).filter(|_| socket.send_to(&[7; 100], to).is_ok()).count() == BURST
    }

    /// Datagrams of a peer, or of somebody else, which are a frame, nearly one, or nothing.
    pub(super) fn forges(&mut self, random: &mut Random) -> bool {
        let [net, high, low, _] = self.overlay.ip().octets();
        let from = [net, high, low, random.of(&[PEER, PEER, PEER, STRANGER])];
        let socket = UdpSocket::bind(SocketAddr::from((from, 0))).unwrap();
        for _ in 0..FORGED {
            let vni = random.of(&[OVERLAY_VNI, OVERLAY_VNI, OVERLAY_VNI, 0]);
            let flags = random.of(&[8, 8, 8, 0, 0xff]);
            let mut datagram = vec![flags, 0, 0, 0, 0, 0, vni, 0];
            let to = random.of(&[[0xff; 6], [2, 0, 0, 0, 0, 0x77], [2, 0, 0, 0, 0, 1]]);
            datagram.extend(to);
            datagram.extend([2, 0, 0, 0, 1, u8::try_from(random.below(256)).unwrap()]);
            datagram.extend(random.of(&[[0x88, 0xb5], [8, 0], [8, 6], [0x86, 0xdd], [0x81, 0]]));
            let noise: Vec<u8> = (0..32).flat_map(|_| random.next().to_ne_bytes()).collect();
            datagram.extend(noise);
            let len = usize::try_from(random.below(256)).unwrap();
            let _ = socket.send_to(&datagram[..len], self.overlay);
        }
        true
    }
}
