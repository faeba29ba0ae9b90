//! One UDP socket for all overlays of an address: VXLAN has one port for all its numbers (RFC 7348
//! section 5).
//!
//! Every overlay of a [`Set`] has a [`Seat`], and reads the socket when it is its turn. The
//! datagrams of one call are handed out at once, as a whole: those of other overlays wait for them
//! behind the earlier ones, and an overlay takes these before it reads again. So all datagrams of
//! one overlay keep their order, whichever overlay reads them and wherever turns end. An overlay
//! alone hands out nothing, and looks at nothing.
//!
//! An overlay that reads for others is not charged for their frames: the others take them in turns
//! of their own. It reads for them as much as a port may read in a turn ([`BYTES_PER_PORT`]), for a
//! whole set together. For each overlay [`WAITING_MAX`] bytes may wait; more are lost, and counted
//! there.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::mem::size_of;
use std::net::{SocketAddr, UdpSocket};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use nightporter_core::limits::{BYTES_PER_PORT, FRAMES_PER_PORT};
use nightporter_core::time::Instant;
use nightporter_core::wire::vxlan;
use nix::errno::Errno;
use rustix::event::{EventfdFlags, eventfd};

use super::inbox::{Head, INBOX_BYTES, Inbox};
use crate::limits::RECEIVE_BYTES;

/// Bytes that may wait for an overlay: with them the memory that they lie in, which doubles as it
/// grows, has as many as wait in a socket.
pub(crate) const WAITING_MAX: usize = RECEIVE_BYTES / 2;

/// The least cost of a call that brings something for others.
const CALL_COST: usize = BYTES_PER_PORT / FRAMES_PER_PORT;

/// The sockets that overlays of this process receive at, by their addresses.
#[derive(Clone, Debug, Default)]
pub struct Sockets(Arc<Mutex<BTreeMap<SocketAddr, Weak<Shared>>>>);

/// A socket, and its readers.
#[derive(Debug)]
pub(super) struct Shared {
    socket: UdpSocket,
    set: Mutex<Set>,
}

/// The overlays of a socket.
#[derive(Debug)]
struct Set {
    /// Datagrams that others have read for each, by its number.
    waiting: BTreeMap<u32, Waiting>,
    /// Bytes that were read for others in this turn, and the turn's time.
    read: (Instant, usize),
}

/// Datagrams that wait for an overlay.
#[derive(Debug)]
struct Waiting {
    /// Consecutive datagrams from one host, and their length.
    runs: VecDeque<(Head, usize)>,
    bytes: VecDeque<u8>,
    /// Datagrams for which there was no room.
    lost: u64,
    /// Rung when others have read some, until all are taken.
    bell: Arc<OwnedFd>,
    is_rung: bool,
}

/// An overlay's part of a socket. It is given back when it goes.
#[derive(Debug)]
pub(super) struct Seat {
    shared: Arc<Shared>,
    vni: u32,
    /// The socket, by a descriptor of its own.
    socket: UdpSocket,
    bell: Arc<OwnedFd>,
}

/// The content of the inbox now.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Filled {
    /// Datagrams for this overlay, or for none.
    Own,
    /// Nothing: the datagrams were for others.
    Nothing,
    /// Nothing: enough was read for others in this turn.
    Spent,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Sockets {
    /// A part of the socket at `local`, which `open` makes if there is none, for the overlay with
    /// the number `vni`.
    pub(super) fn seat(
        &self,
        local: SocketAddr,
        vni: u32,
        open: impl FnOnce(SocketAddr) -> io::Result<UdpSocket>,
    ) -> io::Result<Seat> {
        let bell = Arc::new(eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?);
        let mut all = lock(&self.0);
        all.retain(|_, shared| shared.strong_count() > 0);
        let shared = match all.get(&local).and_then(Weak::upgrade) {
            Some(shared) => shared,
            None => Arc::new(Shared {
                socket: open(local)?,
                set: Mutex::new(Set { waiting: BTreeMap::new(), read: (Instant::ZERO, 0) }),
            }),
        };
        let socket = shared.socket.try_clone()?;
        let mut set = lock(&shared.set);
        if set.waiting.contains_key(&vni) {
            return Err(io::ErrorKind::AddrInUse.into());
        }
        set.waiting.insert(vni, Waiting::new(Arc::clone(&bell)));
        drop(set);
        all.insert(local, Arc::downgrade(&shared));
        Ok(Seat { shared, vni, socket, bell })
    }
}

impl Shared {
    pub(super) fn socket(&self) -> &UdpSocket {
        &self.socket
    }
}

impl Seat {
    pub(super) fn socket(&self) -> &UdpSocket {
        &self.socket
    }

    /// The parts that all seats at this socket share.
    pub(super) fn shared(&self) -> Arc<Shared> {
        Arc::clone(&self.shared)
    }

    /// Readable when it was rung, until it is silenced.
    pub(super) fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    pub(super) fn ring(&self) {
        ring(&self.bell);
    }

    /// Unless something waits here.
    pub(super) fn silence(&self) {
        let set = lock(&self.shared.set);
        if set.waiting.get(&self.vni).is_none_or(|waiting| waiting.runs.is_empty()) {
            silence(&self.bell);
        }
    }

    /// Datagrams for which there was no room.
    pub(super) fn lost(&self) -> u64 {
        lock(&self.shared.set).waiting.get(&self.vni).map_or(0, |waiting| waiting.lost)
    }

    /// Puts the next datagrams into `inbox`, which is empty. `now` is the same in all calls of a
    /// turn. Call it when the bell is rung for nothing else. Errors: nothing has arrived.
    pub(super) fn fill(&self, now: Instant, inbox: &mut Inbox) -> Result<Filled, Errno> {
        let mut set = lock(&self.shared.set);
        if let Some(waiting) = set.waiting.get_mut(&self.vni)
            && waiting.pop_into(inbox)
        {
            return Ok(Filled::Own);
        }
        if set.waiting.len() == 1 {
            return inbox.fill(&self.socket).map(|()| Filled::Own);
        }
        if set.read.0 != now {
            set.read = (now, 0);
        }
        if set.read.1 >= BYTES_PER_PORT {
            return Ok(Filled::Spent);
        }
        inbox.fill(&self.socket)?;
        Ok(set.hand_out(self.vni, inbox))
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        lock(&self.shared.set).waiting.remove(&self.vni);
    }
}

impl Set {
    /// The overlay `reader` has read this. Datagrams of no overlay are its own.
    fn hand_out(&mut self, reader: u32, inbox: &mut Inbox) -> Filled {
        let owner = |waiting: &BTreeMap<u32, Waiting>, datagram: &[u8]| {
            let vni = vxlan::parse(datagram).unwrap_or(reader);
            if vni == reader || waiting.contains_key(&vni) { vni } else { reader }
        };
        let all = &inbox.bytes[inbox.left.clone()];
        let mut datagrams = all.chunks(inbox.head.datagram);
        if datagrams.all(|datagram| owner(&self.waiting, datagram) == reader) {
            return Filled::Own;
        }
        let mut for_others = 0;
        while let Some(mut run) = inbox.pop() {
            let to = owner(&self.waiting, &inbox.bytes[run.clone()]);
            loop {
                let before = inbox.left.start;
                match inbox.pop() {
                    Some(next) if owner(&self.waiting, &inbox.bytes[next.clone()]) == to => {
                        run.end = next.end;
                    }
                    _ => {
                        inbox.left.start = before;
                        break;
                    }
                }
            }
            let Some(waiting) = self.waiting.get_mut(&to) else { continue };
            if to != reader {
                for_others += run.len();
                waiting.wake();
            }
            waiting.push(inbox, run);
        }
        self.read.1 += for_others.max(CALL_COST);
        let own = self.waiting.get_mut(&reader);
        if own.is_some_and(|own| own.pop_into(inbox)) { Filled::Own } else { Filled::Nothing }
    }
}

impl Waiting {
    fn new(bell: Arc<OwnedFd>) -> Self {
        let (runs, bytes) = (VecDeque::new(), VecDeque::new());
        Self { runs, bytes, lost: 0, bell, is_rung: false }
    }

    fn wake(&mut self) {
        if !std::mem::replace(&mut self.is_rung, true) {
            ring(&self.bell);
        }
    }

    fn push(&mut self, inbox: &Inbox, at: Range<usize>) {
        let taken = self.bytes.len() + self.runs.len() * size_of::<(Head, usize)>();
        if taken + at.len() > WAITING_MAX {
            self.lost += at.len().div_ceil(inbox.head.datagram) as u64;
            return;
        }
        self.runs.push_back((inbox.head, at.len()));
        self.bytes.extend(&inbox.bytes[at]);
    }

    /// The next of them. `false`: there are none.
    fn pop_into(&mut self, inbox: &mut Inbox) -> bool {
        let Some((head, len)) = self.runs.pop_front() else { return false };
        let (front, back) = self.bytes.as_slices();
        let cut = front.len().min(len);
        inbox.bytes[..cut].copy_from_slice(&front[..cut]);
        inbox.bytes[cut..len].copy_from_slice(&back[..len - cut]);
        self.bytes.drain(..len);
        if self.runs.is_empty() {
            self.bytes.shrink_to(INBOX_BYTES); // what a burst took
            if std::mem::take(&mut self.is_rung) {
                silence(&self.bell);
            }
        }
        (inbox.left, inbox.head) = (0..len, head);
        true
    }
}

fn ring(bell: &OwnedFd) {
    let _ = rustix::io::write(bell, &1_u64.to_ne_bytes());
}

fn silence(bell: &OwnedFd) {
    let _ = rustix::io::read(bell, &mut [0; 8]);
}

#[cfg(test)]
mod tests {
    use nightporter_core::drops::DropReason;
    use nightporter_core::time::Duration;
    use nightporter_core::turn::Received;
    use nix::sys::socket::{ControlMessage, MsgFlags, SockaddrStorage, sendmsg};
    use proptest::prelude::*;
    use std::os::fd::AsRawFd;

    use super::*;
    use crate::config::OverlayConfig;
    use crate::port::overlay::OverlayPort;

    /// Of two overlays on one address; the third number is of none.
    const VNIS: [u32; 3] = [7, 8, 9];

    /// `n` distinguishes tests.
    fn host(n: u8, last: u8) -> SocketAddr {
        SocketAddr::from(([127, 1, n, last], 4789))
    }

    fn open(n: u8, vni: u32, sockets: &Sockets) -> OverlayPort {
        let config = OverlayConfig {
            name: "over".into(),
            network: None,
            vni,
            local: host(n, 1),
            peers: vec![host(n, 2)],
            mtu: 1450,
        };
        OverlayPort::open(&config, [1, 2, 3, 4], sockets).unwrap()
    }

    /// A frame with a number in it, of a network.
    fn datagram(vni: u32, n: u16, len: usize) -> Vec<u8> {
        let frame = [&[2; 12][..], &[0x88, 0xb5], &n.to_be_bytes()].concat(); // "experimental"
        let mut datagram = [&vxlan::emit(vni)[..], &frame].concat();
        datagram.resize(datagram.len().max(len), 0);
        datagram
    }

    /// The numbers of so many frames that come next, or fewer; whether there may be more now.
    fn receive(port: &mut OverlayPort, now: Instant, frames: usize) -> (Vec<u16>, bool) {
        let (mut got, mut buf) = (Vec::new(), [0; 2000]);
        while got.len() < frames {
            match port.receive(now, &mut buf) {
                Received::Frame(..) => got.push(u16::from_be_bytes([buf[14], buf[15]])),
                left => return (got, left == Received::Spent),
            }
        }
        (got, true)
    }

    #[derive(Clone, Debug)]
    enum Event {
        /// Datagrams of these overlays (a place in [`VNIS`]), which leave by one call and so may
        /// come by one.
        Sends(Vec<usize>),
        /// One of the two overlays has its turn, with room for so many frames.
        Reads(usize, usize),
    }

    fn events() -> impl Strategy<Value = Vec<Event>> {
        let sends = prop::collection::vec(0..VNIS.len(), 1..30).prop_map(Event::Sends);
        let reads = (0..2_usize, 1..40_usize).prop_map(|(port, frames)| Event::Reads(port, frames));
        prop::collection::vec(prop_oneof![sends, reads], 1..40)
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]
        #[test]
        fn what_is_of_an_overlay_arrives_there_whole_and_in_order(events in events()) {
            let sockets = Sockets::default();
            let mut ports = [7, 8].map(|vni| open(1, vni, &sockets));
            let peer = UdpSocket::bind(host(1, 2)).unwrap();
            let to = SockaddrStorage::from(host(1, 1));
            let (mut sent, mut got) = ([vec![], vec![], vec![]], [vec![], vec![]]);
            let mut now = Instant::from_secs(1);
            for (n, event) in (0_u16..).zip(events) {
                match event {
                    Event::Sends(of) => {
                        let mut bytes = Vec::new();
                        for (i, place) in (0_u16..).zip(of) {
                            let number = n * 32 + i;
                            bytes.extend(datagram(VNIS[place], number, 100));
                            sent[place].push(number);
                        }
                        let from = [io::IoSlice::new(&bytes)];
                        let cut = [ControlMessage::UdpGsoSegments(&100)];
                        let flags = MsgFlags::empty();
                        sendmsg(peer.as_raw_fd(), &from, &cut, flags, Some(&to)).unwrap();
                    }
                    Event::Reads(port, frames) => {
                        now = now + Duration::from_nanos(1);
                        got[port].extend(receive(&mut ports[port], now, frames).0);
                    }
                }
            }
            // Turns, until no overlay has anything left.
            let mut is_left = true;
            while is_left {
                now = now + Duration::from_nanos(1);
                is_left = false;
                for (port, got) in ports.iter_mut().zip(&mut got) {
                    let (frames, is_more) = receive(port, now, FRAMES_PER_PORT);
                    is_left |= is_more || !frames.is_empty();
                    got.extend(frames);
                }
            }
            prop_assert_eq!(&got[..], &sent[..2]);
            let count = |reason| ports.iter().map(|port| port.drops(reason)).sum::<u64>();
            prop_assert_eq!(count(DropReason::UnknownVni), sent[2].len() as u64);
            let all: u64 = DropReason::ALL.iter().map(|reason| count(*reason)).sum();
            prop_assert_eq!(all, sent[2].len() as u64, "and nothing else was dropped");
        }
    }

    #[test]
    fn who_reads_for_others_stops_when_it_was_enough_and_they_are_rung_for() {
        let sockets = Sockets::default();
        let [mut one, mut two] = [7, 8].map(|vni| open(2, vni, &sockets));
        let peer = UdpSocket::bind(host(2, 2)).unwrap();
        let most = u16::try_from(FRAMES_PER_PORT).unwrap();
        (0..most + 2).for_each(|n| {
            // Of lengths that the kernel puts not together.
            peer.send_to(&datagram(8, n, 100 + usize::from(n)), host(2, 1)).unwrap();
        });
        peer.send_to(&datagram(7, 9, 0), host(2, 1)).unwrap();
        let (first, second) = (Instant::from_secs(1), Instant::from_secs(2));
        let is_rung = |port: &OverlayPort| {
            let mut fds = [rustix::event::PollFd::from_borrowed_fd(
                port.bell(),
                rustix::event::PollFlags::IN,
            )];
            rustix::event::poll(&mut fds, Some(&rustix::event::Timespec::default())).unwrap() == 1
        };
        assert!(!is_rung(&two));
        assert_eq!(receive(&mut one, first, 1), (vec![], true), "that was enough");
        assert!(is_rung(&two) && !is_rung(&one));
        assert_eq!(receive(&mut one, second, 1), (vec![9], true));
        let all: Vec<_> = (0..most + 2).collect();
        assert_eq!(receive(&mut two, second, 1000), (all, false));
        assert!(!is_rung(&two), "nothing waits");
    }

    #[test]
    fn what_waits_for_an_overlay_that_does_not_read_is_bounded_and_more_is_counted() {
        let bell = || Arc::new(eventfd(0, EventfdFlags::NONBLOCK).unwrap());
        let waiting = VNIS[..2].iter().map(|vni| (*vni, Waiting::new(bell()))).collect();
        let mut set = Set { waiting, read: (Instant::ZERO, 0) };
        let mut inbox = Inbox::new();
        let bytes = datagram(8, 0, 1000).repeat(64);
        let rounds = WAITING_MAX / bytes.len() + 2;
        for _ in 0..rounds {
            inbox.bytes[..bytes.len()].copy_from_slice(&bytes);
            (inbox.left, inbox.head.datagram) = (0..bytes.len(), 1000);
            assert_eq!(set.hand_out(7, &mut inbox), Filled::Nothing);
        }
        let waiting = set.waiting.get_mut(&8).unwrap();
        assert_eq!(waiting.lost % 64, 0);
        assert!(waiting.bytes.capacity() <= RECEIVE_BYTES);
        let mut taken = 0;
        while waiting.pop_into(&mut inbox) {
            taken += inbox.left.len() / 1000;
        }
        assert!(taken * 1000 > WAITING_MAX - 2 * INBOX_BYTES, "{taken}");
        assert_eq!(taken as u64 + waiting.lost, 64 * rounds as u64);
        assert!(waiting.lost > 0 && waiting.bytes.capacity() <= 2 * INBOX_BYTES);
    }

    #[test]
    fn a_seat_that_is_given_back_can_be_taken_again_and_one_that_is_taken_cannot() {
        let sockets = Sockets::default();
        let one = open(3, 7, &sockets);
        let taken = sockets.seat(host(3, 1), 7, |_| panic!("there is a socket"));
        assert_eq!(taken.unwrap_err().kind(), io::ErrorKind::AddrInUse);
        let two = open(3, 8, &sockets);
        drop(one);
        let again = open(3, 7, &sockets);
        drop((two, again));
        drop(UdpSocket::bind(host(3, 1)).unwrap());
    }
}
