//! vsock packets in rings: headers and payload in whatever buffers, and drivers that lie.

use nightporter_core::wire::vsock::{HOST_CID, Header, LEN, Op, STREAM};
use nightporterd::vhost::guest_mem::GuestMemory;
use nightporterd::vhost::packets::{Missing, PacketQueue, Piece, copy, read, write};
use nightporterd::vhost::ring::RingFault::{self, *};
use nightporterd::vhost::ring::{Ring, RingAddrs, RingFeatures};
use proptest::prelude::*;
use std::rc::Rc;
use vhost::vhost_user::message::VhostUserMemoryRegion;

use crate::driver::{Driver, GUEST_BASE, Ram, USER_BASE, WRITE};
use crate::world::{BUFFERS, RAM_LEN};

/// A guest with one queue, and the device's side of it.
struct Guest {
    ram: Rc<Ram>,
    memory: GuestMemory,
    driver: Driver,
    queue: PacketQueue,
}

impl Guest {
    fn new() -> Self {
        let ram = Ram::new(RAM_LEN);
        let region = VhostUserMemoryRegion::new(GUEST_BASE, ram.len() as u64, USER_BASE, 0);
        let memory = GuestMemory::new([(region, ram.fd())]).unwrap();
        let driver = Driver::new(&ram, GUEST_BASE + 0x1_0000, 64);
        let user = |guest: u64| guest - GUEST_BASE + USER_BASE;
        let addrs = RingAddrs {
            desc: user(driver.desc),
            avail: user(driver.avail),
            used: user(driver.used),
        };
        let features = RingFeatures { event_idx: false, indirect: true };
        let ring = Ring::start(&memory, addrs, 64, features, None).unwrap();
        Self { ram, memory, driver, queue: PacketQueue::new(ring) }
    }

    /// Offers a packet in buffers that end where `cuts` say.
    fn sends(&mut self, at: u64, header: &Header, payload: &[u8], cuts: &[usize]) {
        let bytes = [&header.emit()[..], payload].concat();
        self.ram.write(at, &bytes);
        let buffers = pieces(at, bytes.len(), cuts);
        self.driver.offer(&buffers, 0);
    }

    fn read(&self, pieces: &[Piece]) -> Vec<u8> {
        pieces.iter().flat_map(|(at, len)| self.ram.read(*at, *len)).collect()
    }

    fn poll(&mut self) -> Result<Option<(Header, usize)>, RingFault> {
        self.queue.poll(&self.memory)
    }

    fn room(&mut self) -> Result<Option<usize>, RingFault> {
        self.queue.room(&self.memory)
    }
}

/// Buffers of `len` bytes in all, one behind the other.
fn pieces(at: u64, len: usize, cuts: &[usize]) -> Vec<(u64, u32)> {
    let mut ends: Vec<usize> = cuts.iter().copied().filter(|cut| (1..len).contains(cut)).collect();
    ends.push(len);
    ends.sort_unstable();
    ends.dedup();
    let starts = std::iter::once(0).chain(ends.iter().copied());
    let both = starts.zip(&ends);
    both.map(|(from, to)| (at + from as u64, u32::try_from(to - from).unwrap())).collect()
}

fn header(len: usize) -> Header {
    Header {
        src_cid: 3,
        dst_cid: HOST_CID,
        src_port: 1025,
        dst_port: 2,
        len: u32::try_from(len).unwrap(),
        kind: STREAM,
        op: Some(Op::Data),
        flags: 0,
        buf_alloc: 1,
        fwd_cnt: 2,
    }
}

#[test]
fn packets_have_room_together_for_their_credit_and_for_nothing_behind_one_without_room() {
    let mut guest = Guest::new();
    for (n, room) in [100, 100, 0, 100].into_iter().enumerate() {
        let len = u32::try_from(LEN + room).unwrap();
        guest.driver.offer(&[(BUFFERS + n as u64 * 4096, len)], WRITE);
    }
    let Guest { memory, queue, .. } = &mut guest;
    let mut rooms = |len, most, credit: [u64; 4]| {
        queue
            .rooms(memory, len, most, |packets| credit[usize::try_from(packets).unwrap() - 1])
            .unwrap()
    };
    assert_eq!(rooms(1000, 4, [1000; 4]), 200, "the third has no room");
    assert_eq!(rooms(1000, 1, [1000; 4]), 100);
    assert_eq!(rooms(150, 4, [1000; 4]), 150);
    assert_eq!(rooms(1000, 4, [190, 170, 150, 130]), 170);
    assert_eq!(rooms(1000, 4, [90, 70, 50, 30]), 90, "a second packet costs credit");
    assert_eq!(rooms(1000, 4, [0; 4]), 0);
}

#[test]
fn a_packet_of_the_guest_stays_until_it_is_done() {
    let mut guest = Guest::new();
    assert_eq!(guest.poll(), Ok(None));
    guest.sends(BUFFERS, &header(5), b"first", &[LEN]);
    guest.sends(BUFFERS + 4096, &header(6), b"second", &[7, 46]);
    for _ in 0..2 {
        assert_eq!(guest.poll(), Ok(Some((header(5), 5))));
    }
    assert_eq!(guest.read(guest.queue.payload()), b"first");
    guest.queue.ring.publish();
    assert_eq!(guest.driver.used(), []);
    guest.queue.done().unwrap();
    assert_eq!(guest.poll(), Ok(Some((header(6), 6))));
    assert_eq!(guest.read(guest.queue.payload()), b"second");
    guest.queue.done().unwrap();
    guest.queue.ring.publish();
    assert_eq!(guest.driver.used(), [(0, 0), (2, 0)]);
    assert_eq!(guest.poll(), Ok(None));
}

#[test]
fn packets_that_are_kept_are_completed_together_before_those_behind_them() {
    let mut guest = Guest::new();
    for (at, payload) in [(0, &b"first"[..]), (1, b"second"), (2, b"third")] {
        guest.sends(BUFFERS + 4096 * at, &header(payload.len()), payload, &[LEN, LEN + 2]);
    }
    for len in [5, 6] {
        assert_eq!(guest.poll(), Ok(Some((header(len), len))));
        guest.queue.keep();
    }
    let kept: Vec<_> = guest.queue.kept().map(|pieces| guest.read(pieces)).collect();
    assert_eq!(kept, [&b"first"[..], b"second"]);
    // The one behind them is worked on as ever.
    assert_eq!(guest.poll(), Ok(Some((header(5), 5))));
    assert_eq!(guest.read(guest.queue.payload()), b"third");
    guest.queue.ring.publish();
    assert_eq!(guest.driver.used(), []);
    guest.queue.kept_done().unwrap();
    guest.queue.ring.publish();
    assert_eq!(guest.driver.used(), [(0, 0), (3, 0)]);
    assert_eq!(guest.read(guest.queue.payload()), b"third");
    guest.queue.done().unwrap();
    guest.queue.ring.publish();
    assert_eq!(guest.driver.used(), [(6, 0)]);
}

#[test]
fn buffers_that_are_looked_up_together_are_filled_one_after_the_other() {
    let mut guest = Guest::new();
    for at in 0..4 {
        guest.driver.offer(&pieces(BUFFERS + 4096 * at, LEN + 100, &[LEN]), WRITE);
    }
    // And so many have been looked up by then.
    let rooms = |guest: &mut Guest, len, most| {
        let room = guest.queue.rooms(&guest.memory, len, most, |_| u64::MAX).unwrap();
        (room, guest.queue.payloads().len())
    };
    assert_eq!(rooms(&mut guest, 250, 32), (250, 3), "as many as that fills");
    assert_eq!(rooms(&mut guest, 1000, 2), (200, 3));
    assert_eq!(rooms(&mut guest, 1000, 32), (400, 4), "there are no more");
    let starts: Vec<u64> = guest.queue.payloads().iter().map(|(at, _)| *at).collect();
    assert_eq!(starts, [0, 1, 2, 3].map(|at| BUFFERS + 4096 * at + LEN as u64));
    for len in [100, 30] {
        assert_eq!(guest.room(), Ok(Some(100)));
        guest.queue.give(&guest.memory, &header(len)).unwrap();
    }
    guest.queue.ring.publish();
    let head = u32::try_from(LEN).unwrap();
    assert_eq!(guest.driver.used(), [(0, head + 100), (2, head + 30)]);
    // Those that were not reached are the next ones.
    assert_eq!(guest.queue.payload(), [(BUFFERS + 2 * 4096 + LEN as u64, 100)]);
}

#[test]
fn payload_goes_behind_the_header_into_buffers_of_both_kinds_of_linux() {
    // 6.1 has a buffer for the header, later ones have one for both.
    for cuts in [&[LEN][..], &[]] {
        let mut guest = Guest::new();
        assert_eq!(guest.room(), Ok(None));
        guest.driver.offer(&pieces(BUFFERS, LEN + 4096, cuts), WRITE);
        assert_eq!(guest.room(), Ok(Some(4096)));
        assert_eq!(guest.queue.payload(), [(BUFFERS + LEN as u64, 4096)]);
        guest.memory.write(BUFFERS + LEN as u64, b"hello").unwrap();
        guest.queue.give(&guest.memory, &header(5)).unwrap();
        guest.queue.ring.publish();
        assert_eq!(guest.driver.used(), [(0, u32::try_from(LEN).unwrap() + 5)]);
        let seen = guest.ram.read(BUFFERS, LEN + 5);
        assert_eq!(seen, [&header(5).emit()[..], b"hello"].concat());
    }
}

#[test]
fn a_driver_that_lies_is_found_out() {
    let short = u32::try_from(LEN).unwrap() - 1;
    let lie = |buffers: &[(u64, u32)], flags, to_guest, fault| {
        let mut guest = Guest::new();
        guest.driver.offer(buffers, flags);
        let found = if to_guest { guest.room().err() } else { guest.poll().err() };
        assert_eq!(found, Some(fault), "{buffers:x?}");
    };
    lie(&[(BUFFERS, short)], 0, false, BufferTooSmall);
    lie(&[(BUFFERS, short)], WRITE, true, BufferTooSmall);
    lie(&[(BUFFERS, 100)], WRITE, false, WrongDirection);
    lie(&[(BUFFERS, 100)], 0, true, WrongDirection);
    lie(&[(BUFFERS, 100), (GUEST_BASE + RAM_LEN as u64 - 1, 2)], 0, false, OutsideMemory);
    lie(&[(BUFFERS, 100), (u64::MAX, 2)], WRITE, true, OutsideMemory);
}

#[test]
fn a_turn_looks_at_so_many_chains() {
    let mut guest = Guest::new();
    let mut seen = 0;
    loop {
        guest.sends(BUFFERS, &header(0), b"", &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]);
        if guest.poll().unwrap().is_none() {
            break;
        }
        guest.queue.done().unwrap();
        guest.queue.ring.publish();
        seen += 1;
    }
    assert_eq!(seen, 2048_usize.div_ceil(17), "of 16 buffers each");
    guest.queue.work = 0;
    assert!(guest.poll().unwrap().is_some(), "the next turn goes on");
}

proptest! {
    #[test]
    fn payload_is_copied_from_guest_to_guest_whatever_buffers_it_is_in(
        payload in proptest::collection::vec(any::<u8>(), 1..9000),
        from_cuts in proptest::collection::vec(1..9000_usize, 0..12),
        to_cuts in proptest::collection::vec(1..9000_usize, 0..12),
        at in any::<proptest::sample::Index>(),
    ) {
        let at = at.index(payload.len());
        let (mut a, mut b) = (Guest::new(), Guest::new());
        let header = header(payload.len());
        a.sends(BUFFERS + 3, &header, &payload, &from_cuts);
        b.driver.offer(&pieces(BUFFERS + 0x1_0001, LEN + 9000, &to_cuts), WRITE);
        prop_assert_eq!(a.poll(), Ok(Some((header, payload.len()))));
        prop_assert_eq!(b.room(), Ok(Some(9000)));
        let from = (&a.memory, a.queue.payload());
        let to = (&b.memory, b.queue.payload());
        copy(from, at, to, payload.len() - at).unwrap();
        prop_assert_eq!(copy(from, at, to, payload.len() - at + 1), Err(Missing::Source));
        let mut copied = vec![0; payload.len() - at];
        read(&a.memory, a.queue.payload(), at, &mut copied).unwrap();
        prop_assert_eq!(&copied, &payload[at..]);
        write(&b.memory, b.queue.payload(), 0, &copied).unwrap();
        prop_assert_eq!(read(&a.memory, a.queue.payload(), 1, &mut vec![0; payload.len()]), None);
        prop_assert_eq!(write(&b.memory, b.queue.payload(), 0, &[0; 9001]), None);
        copy(from, 0, to, payload.len()).unwrap();
        b.queue.give(&b.memory, &header).unwrap();
        let seen = b.ram.read(BUFFERS + 0x1_0001, LEN + payload.len());
        prop_assert_eq!(&seen[..LEN], &header.emit()[..]);
        prop_assert_eq!(&seen[LEN..], &payload[..]);
    }
}
