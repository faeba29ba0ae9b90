//! An overlay as a port: frames in VXLAN datagrams, over UDP sockets of its own.
//!
//! One socket receives, at the port that peers know, for all overlays of an address (`shared`). A
//! UDP socket has one source port, and networks that spread flows over links tell flows apart by
//! the source port (RFC 7348 section 5). So there are [`SENDERS`] sockets to send from. Datagrams
//! of equal length leave by one call (UDP_SEGMENT) and arrive by one (UDP_GRO). The core reads and
//! writes their content (`core/src/overlay`).

mod probing;

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;

use nightporter_core::drops::DropReason;
use nightporter_core::limits::{FRAMES_PER_PORT, OVERLAY_DATAGRAM_BYTES_MAX, TOLD_MAX};
use nightporter_core::overlay::ecn::Ecn;
use nightporter_core::overlay::{self, Overlay, PeerId, SOURCE_PORTS, To};
use nightporter_core::port::PortId;
use nightporter_core::switch::Mac;
use nightporter_core::time::Instant;
use nightporter_core::turn::{Received, Sent};
use nightporter_core::wire::virtio_net::VirtioNetHdr;
use nightporter_registry::STATIONS_MAX;
use nix::errno::Errno;
use nix::sys::socket::{ControlMessage, MsgFlags, SockaddrStorage, sendmsg, setsockopt, sockopt};
use rustix::net::sockopt as option;

use super::inbox::Inbox;
use super::outcome::Outcome;
use super::paths::{Paths, SAID_MTU_MIN};
use super::shared::{Filled, Seat, Shared, Sockets};

use crate::config::OverlayConfig;
use crate::limits::{RECEIVE_BYTES, SEND_BYTES};
use crate::sys;

/// Sockets to send from: as many links can share the flows. A power of two.
const SENDERS: usize = 16;
/// Datagrams without a frame that are looked at in one turn; more wait for the next.
const BAD_DATAGRAMS_MAX: usize = 64;
/// Answers that wait to be received; questions beyond go to the peers.
const ANSWERS_MAX: usize = 64;
/// Answers that are received in one turn: an eighth of its frames. The rest is for datagrams, or
/// one VM's questions would keep all that peers send to this host waiting.
const ANSWERS_PER_TURN: usize = FRAMES_PER_PORT / 8;
/// Bytes of VXLAN's header and of an Ethernet header: what a datagram has before the inner packet.
const BEFORE_PACKET: u16 = 8 + 14;

/// See the module doc.
#[derive(Debug)]
pub struct OverlayPort {
    config: OverlayConfig,
    overlay: Overlay,
    /// Its part of the socket that receives.
    seat: Seat,
    senders: Arc<[UdpSocket]>,
    /// The kernel's buffers of these sockets are smaller than they should be, and may get larger.
    pub(crate) has_small_buffers: bool,
    peers: Vec<SockaddrStorage>,
    paths: Paths,
    inbox: Inbox,
    /// The peer whose datagrams are in it.
    from: PeerId,
    /// Answers in the name of stations that were told, as frames that come in here.
    answers: VecDeque<Vec<u8>>,
    received: Counts,
    outbox: Box<[u8]>,
    /// A frame that was given in pieces.
    whole: Vec<u8>,
    drops: [u64; DropReason::ALL.len()],
}

/// Packets that were received in a turn that began then.
#[derive(Debug)]
struct Counts {
    turn: Instant,
    answers: usize,
    /// Datagrams without a frame.
    bad: usize,
}

impl Counts {
    const fn of(turn: Instant) -> Self {
        Self { turn, answers: 0, bad: 0 }
    }
}

/// The sockets of an overlay, for control. They stay open as long as it has them, and an
/// overlay that is opened meanwhile at the same address shares the one that receives.
#[derive(Clone, Debug)]
pub(crate) struct OverlaySockets {
    receiver: Arc<Shared>,
    senders: Arc<[UdpSocket]>,
}

impl OverlaySockets {
    /// The one that receives, and those that send.
    pub(crate) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        std::iter::once(self.receiver.socket()).chain(&*self.senders).map(AsFd::as_fd)
    }
}

/// Why an overlay could not be opened. The text says what to do.
#[derive(Debug, thiserror::Error)]
#[error("overlay {name}: {what}\n    fix: {fix}")]
pub struct OpenError {
    name: String,
    what: String,
    fix: String,
    /// It is not the address: only a restart helps, with other rights or limits.
    pub(crate) is_final: bool,
}

impl OpenError {
    /// Without the fix.
    pub(crate) fn what(&self) -> &str {
        &self.what
    }
}

impl OverlayPort {
    /// Opens the sockets of `config`; that to receive may be in `sockets` already. `hash_seeds`
    /// must be unpredictable to guests and peers.
    ///
    /// # Errors
    /// The address is not of this host, or its port is taken.
    pub fn open(
        config: &OverlayConfig,
        hash_seeds: [u64; 4],
        sockets: &Sockets,
    ) -> Result<Self, OpenError> {
        let error = |what: String, fix: &str| OpenError {
            name: config.name.clone(),
            what,
            fix: fix.into(),
            is_final: true,
        };
        let seat = sockets.seat(config.local, config.vni, receiver).map_err(|e| {
            let errno = e.raw_os_error().map(Errno::from_raw);
            let fix = match errno {
                Some(Errno::EADDRNOTAVAIL) => "give local an address of this host: ip -br addr",
                Some(Errno::EADDRINUSE) => {
                    "a vxlan device or another daemon has that port: stop it, or choose another"
                }
                _ => "allow UDP sockets",
            };
            let is_final = !matches!(errno, Some(Errno::EADDRNOTAVAIL | Errno::EADDRINUSE));
            OpenError { is_final, ..error(format!("cannot listen on {}: {e}", config.local), fix) }
        })?;
        let senders = senders(config.local.ip()).map_err(|e| {
            error(format!("cannot send from {}: {e}", config.local.ip()), "free some UDP ports")
        })?;
        let overlay = Overlay::new(&overlay::OverlayConfig {
            vni: config.vni,
            peers: config.peers.iter().map(SocketAddr::ip).collect(),
            mtu: config.mtu,
            hash_seeds,
        });
        Ok(Self {
            overlay,
            seat,
            senders: senders.into(),
            has_small_buffers: false,
            peers: config.peers.iter().map(|&peer| peer.into()).collect(),
            paths: Paths::new(config.peers.len()),
            config: config.clone(),
            inbox: Inbox::new(),
            from: PeerId(0),
            answers: VecDeque::new(),
            received: Counts::of(Instant::ZERO),
            outbox: vec![0; OVERLAY_DATAGRAM_BYTES_MAX].into(),
            whole: Vec::new(),
            drops: [0; DropReason::ALL.len()],
        })
    }

    /// The configuration with which it was opened.
    #[must_use]
    pub fn config(&self) -> &OverlayConfig {
        &self.config
    }

    /// All its sockets.
    pub(crate) fn sockets(&self) -> OverlaySockets {
        OverlaySockets { receiver: self.seat.shared(), senders: Arc::clone(&self.senders) }
    }

    /// The descriptor to wait on.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.seat.socket().as_fd()
    }

    /// Another descriptor to wait on: for frames that are not in the socket.
    #[must_use]
    pub fn bell(&self) -> BorrowedFd<'_> {
        self.seat.bell()
    }

    /// Datagrams that were dropped for `reason`.
    #[must_use]
    pub fn drops(&self, reason: DropReason) -> u64 {
        let lost = if reason == DropReason::QueueFull { self.seat.lost() } else { 0 };
        self.drops[reason as usize] + lost
    }

    /// Another MTU from now on; peers come by [`Self::set_peers`], and the rest of `config` is as
    /// it was.
    pub fn set(&mut self, config: &OverlayConfig) {
        self.config = config.clone();
        self.overlay.set_mtu(config.mtu);
    }

    /// Other peers from now on: those of the configuration, and hosts of a registry.
    pub fn set_peers(&mut self, peers: &[SocketAddr]) {
        let now: Vec<_> = peers.iter().map(|&peer| SockaddrStorage::from(peer)).collect();
        if now != self.peers {
            self.overlay.set_peers(&peers.iter().map(SocketAddr::ip).collect::<Vec<_>>());
            self.peers = now;
            self.paths = Paths::new(peers.len()); // their places may be others now
            self.inbox.left = 0..0; // from a peer that may have another place now
        }
    }

    /// The station `mac` is at `host` and has these addresses. `false`: that is no peer, or there
    /// is no room, and it is nowhere.
    pub fn tell(&mut self, mac: Mac, host: IpAddr, ips: &[IpAddr]) -> bool {
        let peer = self.overlay.peer(host);
        let is_told = peer.is_some_and(|peer| self.overlay.tell_station(mac, peer, ips));
        if !is_told {
            self.overlay.forget_station(mac);
        }
        is_told
    }

    /// The station of this host behind `port` has these addresses from now on, and no others:
    /// requests for them are not answered.
    pub fn set_own_ips(&mut self, port: PortId, ips: &[IpAddr]) {
        self.overlay.set_own_ips(port, ips);
    }

    /// The station `mac` is on this host, and nowhere else.
    pub fn tell_here(&mut self, mac: Mac) {
        self.overlay.tell_here(mac);
    }

    /// The station is no longer told; frames may teach its place.
    pub fn forget(&mut self, mac: Mac) {
        self.overlay.forget_station(mac);
    }

    /// Reads the next frame into `buf`, which should hold 64 KiB and an Ethernet header. `now` is
    /// the same in all calls of a turn.
    pub fn receive(&mut self, now: Instant, buf: &mut [u8]) -> Received {
        if self.received.turn != now {
            self.received = Counts::of(now);
        }
        if self.received.answers < ANSWERS_PER_TURN
            && let Some(answer) = self.answers.pop_front()
        {
            self.received.answers += 1;
            if self.answers.is_empty() {
                self.seat.silence();
            }
            let len = answer.len().min(buf.len());
            buf[..len].copy_from_slice(&answer[..len]);
            return Received::Frame(VirtioNetHdr::default(), len);
        }
        while self.received.bad < BAD_DATAGRAMS_MAX {
            let Some(at) = self.inbox.pop() else {
                match self.seat.fill(now, &mut self.inbox) {
                    Ok(Filled::Own) => self.look_whose(),
                    Ok(Filled::Nothing) | Err(Errno::EINTR) => {}
                    Ok(Filled::Spent) => return Received::Spent,
                    // The bell may be silent: datagrams that waited have silenced it.
                    Err(_) if !self.answers.is_empty() => return Received::Spent,
                    // Nothing else is wrong for longer than a datagram.
                    Err(_) => return Received::Empty,
                }
                continue;
            };
            if let Some(answer) = self.hear_probe(now, at.clone()) {
                self.received.bad += 1; // there is no frame in it
                let _ = answer.map(|answer| self.post_alone(self.from, &answer)); // or it is lost
                continue;
            }
            let Inbox { bytes, head, .. } = &mut self.inbox;
            match self.overlay.handle_datagram(now, self.from, head.ecn, &mut bytes[at]) {
                Ok((hdr, frame)) => {
                    let len = frame.len().min(buf.len());
                    buf[..len].copy_from_slice(&frame[..len]);
                    return Received::Frame(hdr, len);
                }
                Err(reason) => self.drop_datagram(reason),
            }
        }
        Received::Spent
    }

    /// Datagrams have arrived. Those from an unknown host are dropped, and count for one, even if
    /// they are empty.
    fn look_whose(&mut self) {
        if let Some(peer) = self.inbox.head.from.and_then(|from| self.overlay.peer(from)) {
            self.from = peer;
            return;
        }
        self.received.bad += 1;
        while self.inbox.pop().is_some() {
            self.drops[DropReason::UnknownPeer as usize] += 1;
        }
    }

    fn drop_datagram(&mut self, reason: DropReason) {
        self.received.bad += 1;
        self.drops[reason as usize] += 1;
    }

    /// Sends one frame, given in pieces, to the peer behind which its receiver is, or to all. If
    /// some of them cannot be reached, the others have it.
    pub fn send(&mut self, now: Instant, hdr: &VirtioNetHdr, parts: &[&[u8]]) -> Sent {
        let Self { overlay, senders, peers, outbox, whole, answers, seat, .. } = self;
        let frame: &[u8] = if let [one] = parts {
            one
        } else {
            whole.clear();
            parts.iter().for_each(|part| whole.extend_from_slice(part));
            whole
        };
        let answer = |answers: &mut VecDeque<_>, answer| {
            answers.push_back(answer);
            seat.ring();
        };
        let has_room = answers.len() < ANSWERS_MAX;
        if has_room && let Some(said) = overlay.answer(frame) {
            answer(answers, said);
            return Sent::Done;
        }
        let handled = overlay.handle_frame(now, hdr, frame);
        if matches!(handled, Err(DropReason::TooBig))
            && has_room
            && let Some(said) = overlay.complain(now, frame)
        {
            answer(answers, said);
        }
        let (route, mut datagrams) = match handled {
            Ok(way) => way,
            Err(reason) => return Sent::Dropped(reason),
        };
        let (first, peers) = match route.to {
            To::Peer(PeerId(peer)) => (peer, std::slice::from_ref(&peers[usize::from(peer)])),
            To::All => (0, &peers[..]),
        };
        if peers.is_empty() {
            return Sent::Dropped(DropReason::PortDown);
        }
        let to = route.to;
        let sender = &senders[usize::try_from(route.flow_hash).unwrap_or(0) % SENDERS];
        let mut outcome = Outcome::default();
        while let Some(batch) = datagrams.next_into(outbox) {
            let bytes = &outbox[..batch.len];
            for (place, peer) in peers.iter().enumerate() {
                outcome.note(place, batch, post(sender, peer, bytes, batch.datagram, route.ecn));
            }
        }
        let count = peers.len();
        let sent = outcome.of(count);
        if let To::Peer(peer) = to {
            self.probe(now, peer);
        }
        if outcome.narrow != 0 {
            let refused = outcome.refused.saturating_sub(BEFORE_PACKET);
            self.look_at_paths(now, first, outcome.narrow, Some(refused));
        } else if outcome.longest > SAID_MTU_MIN + BEFORE_PACKET {
            let all = u64::MAX >> (u64::BITS as usize - count.min(64));
            self.look_at_paths(now, first, all, None);
        }
        sent
    }

    /// Long datagrams leave by the paths to these peers, by their bits from `first` on, or packets
    /// of `refused` bytes do not.
    fn look_at_paths(&mut self, now: Instant, first: u16, mut peers: u64, refused: Option<u16>) {
        while peers != 0 {
            let place = u16::try_from(peers.trailing_zeros()).expect("64 at most");
            peers &= peers - 1;
            self.look_at_path(now, PeerId(first + place), refused);
        }
    }

    /// If the path to `peer` takes less than the configuration says, TCP for it is cut to what the
    /// path takes from now on.
    fn look_at_path(&mut self, now: Instant, peer: PeerId, refused: Option<u16>) {
        let Some(to) = self.peers.get(usize::from(peer.0)) else { return };
        let believed = self.overlay.mtu(now, To::Peer(peer));
        // An error that the kernel does not take itself is true. The rest is what others say.
        let is_said = refused.is_none();
        let ends = (self.config.local.ip(), to);
        let Some(mtu) = self.paths.ask(now, usize::from(peer.0), ends, refused, believed) else {
            return;
        };
        if mtu < believed {
            if is_said && self.overlay.suspect(now, peer) {
                return;
            }
            let (name, configured) = (&self.config.name, self.config.mtu);
            let what = "the path to the peer has a smaller MTU";
            tracing::warn!(port = %name, peer = %to, mtu, configured, "{what}");
            self.overlay.note_narrow(now, peer, mtu);
        }
    }
}

/// Sends datagrams that lie one behind the other.
fn post(
    socket: &UdpSocket,
    peer: &SockaddrStorage,
    bytes: &[u8],
    datagram: u16,
    ecn: Ecn,
) -> Result<(), Errno> {
    let (tos, class) = (ecn as u8, i32::from(ecn as u8));
    let mark = if peer.as_sockaddr_in().is_some() {
        ControlMessage::Ipv4Tos(&tos)
    } else {
        ControlMessage::Ipv6TClass(&class)
    };
    let send = |bytes: &[u8], said: &[ControlMessage<'_>]| loop {
        let from = [io::IoSlice::new(bytes)];
        match sendmsg(socket.as_raw_fd(), &from, said, MsgFlags::MSG_DONTWAIT, Some(peer)) {
            Err(Errno::EINTR) => {}
            result => return result.map(drop),
        }
    };
    if bytes.len() <= datagram.into() {
        return send(bytes, &[mark]);
    }
    match send(bytes, &[mark, ControlMessage::UdpGsoSegments(&datagram)]) {
        // The device does not do checksums (net/ipv4/udp.c, udp_send_skb).
        Err(Errno::EIO) => {
            bytes.chunks(datagram.into()).try_for_each(|one| send(one, std::slice::from_ref(&mark)))
        }
        result => result,
    }
}

const _: () = assert!(STATIONS_MAX <= TOLD_MAX);

fn receiver(local: SocketAddr) -> io::Result<UdpSocket> {
    let socket = UdpSocket::bind(local)?;
    socket.set_nonblocking(true)?;
    setsockopt(&socket, sockopt::UdpGroSegment, &true)?;
    if local.is_ipv4() {
        option::set_ip_recvtos(&socket, true)?;
    } else {
        option::set_ipv6_recvtclass(&socket, true)?;
        sys::take_without_checksum(&socket)?;
    }
    // As much as net.core.rmem_max allows; the broker can do more.
    option::set_socket_recv_buffer_size(&socket, RECEIVE_BYTES)?;
    Ok(socket)
}

/// Sockets at the first source ports that are free.
fn senders(local: IpAddr) -> io::Result<Vec<UdpSocket>> {
    let mut senders = Vec::new();
    for port in SOURCE_PORTS {
        match UdpSocket::bind((local, port)) {
            Ok(socket) => {
                socket.set_nonblocking(true)?;
                // Datagrams sent to it are not read, so it has the smallest buffer.
                option::set_socket_recv_buffer_size(&socket, 0)?;
                // As of the receiver: `net.core.wmem_max`.
                option::set_socket_send_buffer_size(&socket, SEND_BYTES)?;
                // The tunnel's packets are not cut on the way (RFC 7348 section 4.3), and leave
                // whatever others say of the path (`paths`).
                match local {
                    IpAddr::V4(_) => {
                        option::set_ip_mtu_discover(&socket, option::Ipv4PathMtuDiscovery::PROBE)?;
                    }
                    IpAddr::V6(_) => {
                        option::set_ipv6_mtu_discover(
                            &socket,
                            option::Ipv6PathMtuDiscovery::PROBE,
                        )?;
                    }
                }
                senders.push(socket);
            }
            Err(e) if e.kind() == io::ErrorKind::AddrInUse => {}
            Err(e) => return Err(e),
        }
        if senders.len() == SENDERS {
            return Ok(senders);
        }
    }
    Err(io::ErrorKind::AddrInUse.into())
}

#[cfg(test)]
mod tests {
    use nightporter_core::overlay::overhead;

    use super::*;

    /// On this host alone, with a peer that is a socket; `n` distinguishes tests.
    fn port_and_peer(n: u8) -> (OverlayPort, UdpSocket) {
        let host = |last| SocketAddr::from(([127, 0, n, last], 4789));
        let config = OverlayConfig {
            name: "over".into(),
            network: None,
            vni: 7,
            local: host(1),
            peers: vec![host(2)],
            mtu: 1450,
        };
        let port = OverlayPort::open(&config, [1, 2, 3, 4], &Sockets::default()).unwrap();
        (port, UdpSocket::bind(host(2)).unwrap())
    }

    #[test]
    fn bad_datagrams_between_good_ones_are_as_many_in_a_turn_as_they_are_alone() {
        let (mut port, peer) = port_and_peer(1);
        let frame = [&[2; 12][..], &[0x88, 0xb5], &[0; 40]].concat(); // "local experimental"
        let good = [&[8, 0, 0, 0, 0, 0, 7, 0], &frame[..]].concat();
        for _ in 0..70 {
            peer.send_to(&[0; 20], port.config.local).unwrap();
            peer.send_to(&good, port.config.local).unwrap();
        }
        let mut turn = |now| {
            let received = std::iter::repeat_with(|| port.receive(now, &mut [0; 2000]));
            let mut left = received.skip_while(|it| matches!(it, Received::Frame(..)));
            (left.next(), port.drops(DropReason::NotVxlan))
        };
        let (first, second) = (Instant::from_secs(1), Instant::from_secs(2));
        assert_eq!(turn(first), (Some(Received::Spent), 64));
        assert_eq!(turn(second), (Some(Received::Empty), 70));
    }

    /// Who has 10.0.0.2? Asked by 10.0.0.1.
    fn arp() -> Vec<u8> {
        let (mac, head) = ([2, 0, 0, 0, 0, 1], [8, 6, 0, 1, 8, 0, 6, 4, 0, 1]);
        [&[0xff; 6][..], &mac, &head, &mac, &[10, 0, 0, 1], &[0; 6], &[10, 0, 0, 2]].concat()
    }

    #[test]
    fn what_one_vm_asks_leaves_most_of_a_turn_to_what_peers_send() {
        let (mut port, peer) = port_and_peer(4);
        let station = [2, 0, 0, 0, 0, 2];
        assert!(port.tell(station, port.config.peers[0].ip(), &[[10, 0, 0, 2].into()]));
        let frame = [&[2; 12][..], &[0x88, 0xb5], &[0; 40]].concat(); // "local experimental"
        let datagram = [&[8, 0, 0, 0, 0, 0, 7, 0], &frame[..]].concat();
        for _ in 0..100 {
            peer.send_to(&datagram, port.config.local).unwrap();
        }
        // In each turn the VM asks as often as it is answered. Answers, frames, and what then is.
        let mut turn = |secs, asks| {
            let now = Instant::from_secs(secs);
            for _ in 0..asks {
                let asked = port.send(now, &VirtioNetHdr::default(), &[&arp()]);
                assert_eq!(asked, Sent::Done);
            }
            let (mut answers, mut frames, mut buf) = (0, 0, [0; 2000]);
            while answers + frames < FRAMES_PER_PORT {
                match port.receive(now, &mut buf) {
                    Received::Frame(..) if buf[6..12] == station => answers += 1,
                    Received::Frame(..) => frames += 1,
                    last => return (answers, frames, Some(last)),
                }
            }
            (answers, frames, None)
        };
        assert_eq!(turn(1, ANSWERS_MAX), (8, 56, None));
        assert_eq!(turn(2, 8), (8, 44, Some(Received::Spent)), "answers wait");
        for secs in 3..9 {
            assert_eq!(turn(secs, 0), (8, 0, Some(Received::Spent)));
        }
        assert_eq!(turn(9, 0), (8, 0, Some(Received::Empty)));
    }

    #[test]
    fn a_frame_that_goes_to_no_peer_is_dropped() {
        let (mut port, peer) = port_and_peer(5);
        let frame = [&[0xff; 6][..], &[2; 6], &[0x88, 0xb5], &[0; 40]].concat();
        let mut send = |peers: &[SocketAddr]| {
            port.set_peers(peers);
            port.send(Instant::from_secs(1), &VirtioNetHdr::default(), &[&frame])
        };
        assert_eq!(send(&[]), Sent::Dropped(DropReason::PortDown));
        assert_eq!(send(&[peer.local_addr().unwrap()]), Sent::Done);
    }

    #[test]
    fn all_narrow_paths_of_a_broadcast_are_noticed_at_once() {
        let (mut port, _peer) = port_and_peer(6);
        let peers = [2, 3, 4].map(|last| SocketAddr::from(([127, 0, 6, last], 4789)));
        // The loopback takes 64 KiB less the headers: every path is narrower than this.
        port.set(&OverlayConfig { mtu: u16::MAX, ..port.config.clone() });
        port.set_peers(&peers);
        let now = Instant::from_secs(1);
        let mtus =
            |port: &OverlayPort| [0, 1, 2].map(|n| port.overlay.mtu(now, To::Peer(PeerId(n))));
        let narrow = u16::MAX - overhead(port.config.local.ip());
        port.look_at_paths(now, 0, 0b101, Some(u16::MAX));
        assert_eq!(mtus(&port), [narrow, u16::MAX, narrow]);
        port.look_at_paths(now, 1, 0b1, None);
        assert_eq!(mtus(&port), [narrow; 3], "the others alone were asked just now");
    }

    #[test]
    fn sockets_to_send_from_have_room_for_bursts() {
        let (port, _peer) = port_and_peer(2);
        let most = std::fs::read_to_string("/proc/sys/net/core/wmem_max").unwrap();
        let most: usize = most.trim().parse().unwrap();
        for sender in &*port.senders {
            let room = option::socket_send_buffer_size(sender).unwrap();
            assert!(room >= 2 * SEND_BYTES.min(most), "{room}"); // socket(7): doubled
        }
    }
}
