//! A villain's acts on its memory, and on its log of buffers in flight.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, ftruncate, memfd_create};
use vhost::vhost_user::message::FrontendReq as Req;

use super::{
    Device, FAR_AWAY, HOLES, PLACES, Place, QUEUE_SIZE, Random, SIEVE, SPARSE, Villain, sparse,
    words,
};
use crate::asleep::mapped;
use crate::driver::{GUEST_BASE, Ram, USER_BASE};
use crate::guest::RAM_LEN;
use crate::killed::Tmpfs;

/// A file, and whether somebody punches holes in it.
pub(super) type Sieve = (OwnedFd, Arc<AtomicBool>);

/// It has mapped them so often itself: each mapping makes a hole take longer.
const MAPPINGS: usize = 8;

/// Punches holes all over these.
pub(super) fn punch((file, is_punched): Sieve) {
    let _maps = mapped(&file, 0, SIEVE, MAPPINGS);
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    for flags in [FallocateFlags::empty(), hole].repeat(HOLES) {
        fallocate(&file, flags, 0, SIEVE).unwrap();
    }
    is_punched.store(false, Ordering::Relaxed);
}

impl Villain {
    pub(super) fn punches_a_hole(&mut self, random: &mut Random) -> bool {
        if self.place == Place::Tight {
            return false; // or we are who finds no room
        }
        let (at, len) = (random.below(RAM_LEN), 1 + random.below(1 << 16));
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(self.ram.fd(), hole, at, len).unwrap();
        true
    }

    /// While the daemon reads frames from there another thread takes the memory away, and gives it
    /// back, and so on.
    pub(super) fn punches_holes_all_over(&mut self) -> bool {
        let Some(sieve) = &self.sieve else { return false };
        if self.is_punched.swap(true, Ordering::Relaxed) {
            return false;
        }
        let sieve = (sieve.try_clone().unwrap(), Arc::clone(&self.is_punched));
        self.puncher.send(sieve).is_ok()
    }

    /// Its memory goes while its rings run; the end of this life is near.
    pub(super) fn cuts(&mut self) -> bool {
        if self.device == Device::Sealed {
            return false;
        }
        self.ram.cut();
        self.kicks(1);
        self.ram = self.device.memory();
        self.place = Place::Usual;
        self.left = self.left.min(64);
        true
    }

    /// Its rings stay; each of the thousands of buffers that they name is in a page that goes.
    pub(super) fn cuts_what_it_offers(&mut self, random: &mut Random) -> bool {
        if self.device == Device::Sealed {
            return false;
        }
        self.offers_crumbs(random);
        self.ram.cut_from(PLACES - GUEST_BASE);
        self.kicks(1);
        self.ram = self.device.memory();
        self.place = Place::Usual;
        self.left = self.left.min(64);
        true
    }

    /// It will be in a file system without room when it is here next, and its guest has touched
    /// hardly any of it.
    pub(super) fn moves_to(&mut self, small: &Tmpfs) -> bool {
        if self.device == Device::Sealed {
            return false;
        }
        // Rings are there, frames and buffers are not.
        let Some(file) = small.file(RAM_LEN, PLACES - GUEST_BASE) else { return false };
        self.ram = Ram::of(file, usize::try_from(RAM_LEN).unwrap());
        self.place = Place::NextTight;
        self.hangs_up()
    }

    pub(super) fn region(&mut self, at: u64, len: u64, file: &OwnedFd) -> bool {
        self.says(Req::ADD_MEM_REG, &words(&[0, at, len, at, 0]), &[file.as_fd()])
    }

    pub(super) fn shares_terabytes(&mut self, random: &mut Random) -> bool {
        let len = random.of(&SPARSE);
        let file = sparse(len);
        if random.below(2) == 0 {
            return self.region(FAR_AWAY << random.below(5), len, &file);
        }
        // With its own memory, so that its rings run on.
        self.is_wide = false;
        let ram = self.ram.fd();
        let table = [2, GUEST_BASE, RAM_LEN, USER_BASE, 0, FAR_AWAY, len, FAR_AWAY, 0];
        self.says(Req::SET_MEM_TABLE, &words(&table), &[ram.as_fd(), file.as_fd()]) && self.asks()
    }

    pub(super) fn shares_many(&mut self, random: &mut Random) -> bool {
        let (len, file) = (random.of(&[4096, 1 << 30]), sparse(1 << 30));
        (0..70).all(|n| self.region(FAR_AWAY + n * len, len, &file)) && self.asks()
    }

    pub(super) fn takes_regions_away(&mut self, random: &mut Random) -> bool {
        let len = random.of(&[4096, 1 << 30, RAM_LEN]);
        let (at, count) = (random.of(&[GUEST_BASE, FAR_AWAY]), 1 + random.below(64));
        (0..count).all(|n| {
            let at = at + n * len;
            self.says(Req::REM_MEM_REG, &words(&[0, at, len, at, 0]), &[])
        })
    }

    /// Bytes of a log for two queues of so many entries each.
    pub(super) fn log_len(size: u64) -> u64 {
        2 * (16 + 16 * size).next_multiple_of(64)
    }

    pub(super) fn gives(&mut self, log: OwnedFd, size: u64) -> bool {
        let ask = words(&[Self::log_len(size), 0, 2 | size << 16]);
        let given = self.says(Req::SET_INFLIGHT_FD, &ask, &[log.as_fd()]);
        self.log = Some(log);
        given
    }

    pub(super) fn gives_a_log(&mut self, random: &mut Random) -> bool {
        let size = random.of(&[QUEUE_SIZE, 32_768]);
        let log = sparse(Self::log_len(size));
        self.gives(log, size) && self.stops_and_starts(random)
    }

    pub(super) fn gives_an_unsealed_log(&mut self, random: &mut Random) -> bool {
        let size = random.of(&[QUEUE_SIZE, 32_768]);
        let log = memfd_create("log", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&log, Self::log_len(size)).unwrap();
        self.gives(log, size)
    }

    pub(super) fn writes_into_its_log(&mut self, random: &mut Random) -> bool {
        let Some(log) = &self.log else { return self.gives_a_log(random) };
        let noise = words(&(0..64).map(|_| random.word()).collect::<Vec<_>>());
        let at = random.below(Self::log_len(QUEUE_SIZE));
        let _ = rustix::io::pwrite(log, &noise, at);
        self.stops_and_starts(random)
    }

    pub(super) fn cuts_its_log(&mut self) -> bool {
        let log = memfd_create("log", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&log, Self::log_len(QUEUE_SIZE)).unwrap();
        let cut = log.try_clone().unwrap();
        let given = self.gives(log, QUEUE_SIZE) && self.says_start(0) && self.says_start(1);
        ftruncate(&cut, 0).unwrap();
        given
    }
}
