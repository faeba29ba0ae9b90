//! Arrivals by UCX, and how much of them other hosts may have under way to each guest.
//!
//! UCX leaves nothing with its sender: what has arrived is kept here until its guest takes it,
//! which may be paused or have a rate limit. So the other host is told of room at a socket for its
//! *share* and no more ([`Host::limit_arrivals`]), and all shares together are bounded, for each
//! guest and for all guests. A sender for whom there is no room waits; nothing is dropped, and no
//! connection is reset, but that of a host that sends more than it was told of ([`Channel::push`]).
//!
//! A share is [`LEAST`] and an eighth of what is left for its guest. No guest gets more when it has
//! more than is left for the others, so there is some for one that has little. A socket gets no
//! more than its buffer has room for, and only as it receives: so many idle sockets do not take
//! all.
//!
//! Room that was told is not taken back: what was promised counts until the guest has taken that.
//! So guests that stop taking, each with as much under way as it may have, leave the others less,
//! the 16th and each later one half of what was left, down to [`LEAST`] for a socket.
//!
//! [`Channel::push`]: super::ucx::Channel::push
//! [`Host::limit_arrivals`]: nightporter_core::toe::host::Host::limit_arrivals

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;

use nightporter_core::limits::TOE_WINDOW_MAX;
use nightporter_core::time::Instant;

use super::fabric::StreamId;
use super::ucx::Event;
use super::{HERE, Toe};
use crate::limits::{
    ARRIVALS_LEAST as LEAST, ARRIVALS_MAX as ALL_MAX, ARRIVALS_OF_GUEST_MAX as GUEST_MAX,
    ARRIVALS_PART as PART,
};

/// A socket that has received nothing has no more, as one that has sent nothing is shown no more.
const FIRST: u64 = 32 << 10;

/// The promises beyond [`LEAST`] for each socket. See the module's doc.
#[derive(Debug, Default)]
pub(super) struct Promises {
    /// By the guest's device.
    of_guests: BTreeMap<usize, u64>,
    all: u64,
}

impl Promises {
    /// The share of a socket of the guest with this device. So much is promised at it now.
    fn share(&self, device: usize, promised: u64) -> u64 {
        let others = self.of(device) - promised;
        let of_guest = GUEST_MAX.saturating_sub(others);
        let of_all = ALL_MAX.saturating_sub(self.all - promised).saturating_sub(others);
        LEAST + of_guest.min(of_all) / PART
    }

    fn of(&self, device: usize) -> u64 {
        self.of_guests.get(&device).copied().unwrap_or(0)
    }

    /// At a socket of that guest so much was promised before, and all in all, [`LEAST`] included,
    /// so much is now; the promise that counts from now on.
    fn promise(&mut self, device: usize, before: u64, all: u64) -> u64 {
        let now = all - LEAST;
        self.set(device, before, now);
        now
    }

    /// At a socket of that guest so much was promised before, and now.
    fn set(&mut self, device: usize, before: u64, now: u64) {
        let of_guest = self.of(device) - before + now;
        self.all = self.all - before + now;
        if of_guest > 0 {
            self.of_guests.insert(device, of_guest);
        } else {
            self.of_guests.remove(&device);
        }
    }
}

impl Toe {
    /// Payload may come by UCX from now on.
    pub(super) fn begin_to_limit_arrivals(&mut self) {
        self.host.limit_first_arrivals(HERE, LEAST);
    }

    /// The other host is told of room for the share that its stream's socket has now; all that the
    /// guest has, if payload does not come by UCX.
    pub(super) fn promise(&mut self, now: Instant, id: StreamId) {
        let Self { host, streams, promises, .. } = self;
        if !streams.has_ucx() {
            return;
        }
        let Some(stream) = streams.get_mut(id) else { return };
        let Some(carried) = stream.carried else { return };
        let Some(it) = host.arrivals(carried.socket) else { return };
        let before = stream.promised;
        if stream.channel.introduction().is_none() {
            stream.promised = 0;
            promises.set(carried.device, before, 0);
            return host.limit_arrivals(now, carried.socket, u64::MAX);
        }
        // One that has not accepted has not said how large its buffer is.
        let buffer = if it.buffer > 0 { it.buffer } else { u64::MAX };
        let wanted = FIRST.saturating_add(it.delivered.saturating_mul(2)).min(buffer);
        let share = promises.share(carried.device, before).min(wanted);
        let share = share.clamp(LEAST, TOE_WINDOW_MAX);
        host.limit_arrivals(now, carried.socket, share);
        let promised = host.arrivals(carried.socket).map_or(0, |it| it.promised);
        stream.promised = promises.promise(carried.device, before, promised.max(share));
    }

    /// Nothing more comes for the socket of this stream.
    pub(super) fn forget_promise(&mut self, id: StreamId) {
        if let Some(stream) = self.streams.get_mut(id)
            && let Some(carried) = stream.carried
        {
            self.promises.set(carried.device, std::mem::take(&mut stream.promised), 0);
        }
    }

    /// UCX does its work, and what it says is heard.
    pub(super) fn hear_ucx(&mut self, now: Instant) {
        self.streams.progress_ucx();
        while let Some(event) = self.streams.poll_ucx() {
            match event {
                Event::Arrived(head, payload) => {
                    let Self { host, streams, .. } = self;
                    let told = |socket| host.arrivals(socket).map_or(0, |it| it.told);
                    if let Err(id) = streams.arrive(&head, payload, told) {
                        self.confuse(now, id);
                    }
                }
                Event::Sent(tag, len) => {
                    if let Some(id) = self.streams.note_sent(now, tag, len) {
                        self.said(now, id, Ok(()));
                        self.show_room(now, id);
                    }
                }
                Event::Failed(end) => {
                    for id in self.streams.fail(end) {
                        self.lose_stream(now, id);
                    }
                }
            }
            self.hear(now);
        }
    }

    /// Readable when UCX has something to do.
    pub(crate) fn ucx_fd(&self) -> Option<BorrowedFd<'_>> {
        self.streams.ucx_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The promise at each of these sockets, of the guests with these devices, after all have asked
    /// in turn again and again. `takes`: guests take what was promised; else it stays.
    fn settle(promises: &mut Promises, sockets: &mut [(usize, u64)], takes: bool) {
        for _ in 0..400 {
            for (device, promised) in sockets.iter_mut() {
                let share = promises.share(*device, *promised).min(TOE_WINDOW_MAX);
                let all = if takes { share } else { share.max(*promised + LEAST) };
                *promised = promises.promise(*device, *promised, all);
            }
        }
    }

    /// So many sockets of each of so many guests.
    fn sockets(guests: usize, each: usize) -> Vec<(usize, u64)> {
        (0..guests * each).map(|n| (n % guests, 0)).collect()
    }

    #[test]
    fn a_guest_has_no_more_than_its_bound_and_all_have_no_more_than_theirs() {
        for (guests, each) in [(1, 1), (1, 2000), (7, 50), (40, 40), (500, 3)] {
            let (mut promises, mut all) = (Promises::default(), sockets(guests, each));
            settle(&mut promises, &mut all, false);
            assert_eq!(all.iter().map(|(_, promised)| promised).sum::<u64>(), promises.all);
            assert!(promises.all <= ALL_MAX, "{} of {guests}", promises.all);
            let most = (0..guests).map(|device| promises.of(device)).max().expect("one");
            assert!(most <= GUEST_MAX, "{most} of {guests}");
            assert!(promises.share(guests, 0) >= LEAST);
            for (device, promised) in all {
                promises.set(device, promised, 0);
            }
            assert_eq!((promises.all, promises.of_guests.len()), (0, 0));
        }
    }

    #[test]
    fn one_socket_has_a_whole_window_and_one_guest_leaves_the_others_theirs() {
        let mut promises = Promises::default();
        assert!(promises.share(7, 0) >= TOE_WINDOW_MAX);
        settle(&mut promises, &mut [(7, 0); 2000], false);
        assert!(promises.of(7) > GUEST_MAX / 2);
        assert!(promises.share(7, 0) < 2 * LEAST);
        assert!(promises.share(8, 0) >= TOE_WINDOW_MAX);
    }

    #[test]
    fn guests_that_take_what_they_were_sent_leave_as_much_to_one_that_comes() {
        let (mut promises, mut all) = (Promises::default(), sockets(24, 30));
        all.sort_unstable(); // one guest after the other
        all.chunks_mut(30).for_each(|of_guest| settle(&mut promises, of_guest, false));
        assert!(promises.share(24, 0) < 2 * LEAST, "little is left");
        settle(&mut promises, &mut all, true);
        let most = all.iter().map(|(_, promised)| *promised).max().expect("one");
        assert!(promises.all > ALL_MAX / 2 && promises.share(24, 0) >= most, "{most}");
    }
}
