//! Packets of a socket device over guest memory that the input writes (`daemon::vhost::packets`).
//!
//! Input: which features there are and whether the guest or the host writes, then the bytes of the
//! guest's memory from the ring on, in chunks, each with a number of chains that are offered.

use nightporter_core::wire::vsock::Header;
use nightporterd::vhost::guest_mem::GuestMemory;
use nightporterd::vhost::packets::{PacketQueue, read, write};
use nightporterd::vhost::ring::{Ring, RingAddrs, RingFeatures};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use vhost::vhost_user::message::VhostUserMemoryRegion;

use crate::noise;

const GUEST: u64 = 0x4000_0000;
const USER: u64 = 0x7f00_0000_0000;
const LEN: u64 = 0x2_0000;
/// Bytes in the file behind those of the guest.
const NOBODYS: [u8; 64] = [0xa7; 64];
const SIZE: u16 = 16;
/// Where the ring's areas are, and where they end.
const AVAIL: u64 = 0x100;
const USED: u64 = 0x200;
const RING_END: u64 = 0x300;
/// Packets that are looked at for a chunk of the input.
const PACKETS_MAX: usize = 64;

/// Judges one input.
pub fn run(data: &[u8]) {
    let Some((&shape, mut rest)) = data.split_first() else { return };
    let file = memfd_create("packets", MemfdFlags::CLOEXEC).expect("a memfd");
    ftruncate(&file, LEN + NOBODYS.len() as u64).expect("it grows");
    let region = |len| {
        let file = file.try_clone().expect("a descriptor");
        GuestMemory::new([(VhostUserMemoryRegion::new(GUEST, len, USER, 0), file)])
    };
    let (memory, whole) = (region(LEN).expect("mapped"), region(LEN + 64).expect("mapped"));
    whole.write(GUEST + LEN, &NOBODYS).expect("inside");
    let addrs = RingAddrs { desc: USER, avail: USER + AVAIL, used: USER + USED };
    let features = RingFeatures { event_idx: shape & 1 != 0, indirect: shape & 2 != 0 };
    let ring = Ring::start(&memory, addrs, SIZE, features, None).expect("it is inside");
    let (mut queue, mut avail) = (PacketQueue::new(ring), 0_u16);
    while let Some((&[at, offers], bytes)) = rest.split_first_chunk::<2>() {
        let (chunk, after) = bytes.split_at(bytes.len().min(256));
        rest = after;
        // Descriptors, heads, or what is behind the ring.
        let at = [0, AVAIL + 4, RING_END, u64::from(at) * 0x200][usize::from(at) % 4];
        let _ = memory.write(GUEST + at, chunk);
        avail = avail.wrapping_add(u16::from(offers % 24));
        memory.write(GUEST + AVAIL + 2, &avail.to_le_bytes()).expect("inside");
        queue.work = 0;
        let step = if shape & 4 != 0 { from_guest } else { to_guest };
        if (0..PACKETS_MAX).any(|_| !step(&mut queue, &memory)) {
            let _ = queue.show();
        }
    }
    let mut behind = [0; NOBODYS.len()];
    whole.read(GUEST + LEN, &mut behind).expect("inside");
    assert_eq!(behind, NOBODYS, "nothing is written outside guest memory");
}

/// Reads a packet. `false`: there is none, or the ring lies.
fn from_guest(queue: &mut PacketQueue, memory: &GuestMemory) -> bool {
    let Ok(Some((_, payload))) = queue.poll(memory) else { return false };
    let pieces = queue.payload();
    let sum = pieces.iter().fold(0_usize, |sum, (_, len)| sum.saturating_add(*len));
    assert_eq!(sum, payload, "all of the payload has places");
    let mut out = vec![0; payload.min(70_000)];
    assert!(read(memory, pieces, 0, &mut out).is_some(), "they are inside");
    queue.done().is_ok()
}

/// Gives a packet that fills its place, as far as one does.
fn to_guest(queue: &mut PacketQueue, memory: &GuestMemory) -> bool {
    let Ok(Some(room)) = queue.room(memory) else { return false };
    let bytes = vec![7; room.min(70_000)];
    let header = Header { len: u32::try_from(bytes.len()).expect("short"), ..header() };
    assert!(write(memory, queue.payloads(), 0, &bytes).is_some(), "it is inside");
    queue.give(memory, &header).is_ok()
}

fn header() -> Header {
    Header::parse(&[0; nightporter_core::wire::vsock::LEN])
}

/// A packet of the guest in two buffers, one for it, and noise.
#[must_use]
pub fn seeds() -> Vec<Vec<u8>> {
    let descriptor = |at: u64, len: u32, flags: u16, next: u16| {
        let [at, len] = [&(GUEST + at).to_le_bytes()[..], &len.to_le_bytes()].map(<[u8]>::to_vec);
        [at, len, flags.to_le_bytes().to_vec(), next.to_le_bytes().to_vec()].concat()
    };
    let chain = |flags: u16| {
        [descriptor(0x400, 44, 1 | flags, 1), descriptor(0x800, 1000, flags, 0)].concat()
    };
    let of = |shape: u8, flags: u16| [&[shape, 0, 1][..], &chain(flags)].concat();
    (0..4).flat_map(|it| [of(4 | it, 0), of(it, 2)]).chain([noise(3, 3000)]).collect()
}
