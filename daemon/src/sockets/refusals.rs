//! Where guests were refused lately: they connect there by guest TCP at once.
//!
//! A guest that has the device need not listen by TOE at a port, or its listener is full. Only its
//! answer says so, and a program that does not block may see that its connection has changed the
//! way meanwhile. So for [`T_REFUSED`] a guest that was refused at an address and port is sent to
//! guest TCP without a question. It may try again before if a guest of this host begins to listen
//! there; of other hosts nobody says when.
//!
//! Each guest has the answers that it was given itself: a host refuses also a guest that has more
//! than its share of another one's places (VTOE-10), and that must not send others to guest TCP.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use nightporter_core::time::{Duration, Instant};
use nightporter_core::toe::errno::Errno;
use nightporter_core::toe::id::{HostId, Side};
use nightporter_core::toe::message::{Kind, Message, Request};
use nightporter_core::toe::sockets::VmId;

use super::Toe;

/// Long enough for a program that tries again and again, and a listener that is new, or has a place
/// again, is found as soon as people notice.
const T_REFUSED: Duration = Duration::from_secs(5);
/// Of one guest, some 10 KiB. A refusal beyond these is not remembered.
const REFUSALS_MAX: usize = 64;

/// A network's number, an address, a port.
type Place = (u32, IpAddr, u16);

/// See the module's doc.
#[derive(Debug, Default)]
pub(super) struct Refusals {
    /// Guests that were refused, where, and until when that counts.
    until: BTreeMap<(Place, VmId), Instant>,
    /// The same, the first one first.
    order: BTreeSet<(Instant, Place, VmId)>,
    /// How many there are of each guest that has some.
    counts: BTreeMap<VmId, usize>,
}

impl Refusals {
    /// Whether this guest was refused there lately.
    pub(super) fn has(&self, vm: VmId, request: &Request) -> bool {
        self.until.contains_key(&(place(request), vm))
    }

    /// It was refused.
    pub(super) fn note(&mut self, now: Instant, vm: VmId, request: &Request) {
        let place = place(request);
        self.remove(place, vm);
        let count = self.counts.get(&vm).copied().unwrap_or(0);
        if count < REFUSALS_MAX {
            let until = now + T_REFUSED;
            self.until.insert((place, vm), until);
            self.order.insert((until, place, vm));
            self.counts.insert(vm, count + 1);
        }
    }

    /// Time has passed.
    pub(super) fn forgive(&mut self, now: Instant) {
        while let Some(&(_, place, vm)) = self.order.first().filter(|(until, ..)| *until <= now) {
            self.remove(place, vm);
        }
    }

    /// A guest that was refused there may try again.
    pub(super) fn forget(&mut self, place: Place) {
        let all = (place, VmId(0))..=(place, VmId(u32::MAX));
        let refused: Vec<VmId> = self.until.range(all).map(|((_, vm), _)| *vm).collect();
        refused.into_iter().for_each(|vm| self.remove(place, vm));
    }

    fn remove(&mut self, place: Place, vm: VmId) {
        let Some(until) = self.until.remove(&(place, vm)) else { return };
        self.order.remove(&(until, place, vm));
        let count = self.counts.get_mut(&vm).expect("it has some");
        *count -= 1;
        if *count == 0 {
            self.counts.remove(&vm);
        }
    }
}

const fn place(request: &Request) -> Place {
    (request.network, request.to.ip(), request.to.port())
}

impl Toe {
    /// A message comes from the other end of a connection, and may say that nobody takes it there.
    /// To be asked before the core hears of it.
    pub(super) fn note_refusal(&mut self, now: Instant, from: HostId, message: &Message) {
        // Daemons of before say of a full listener that it refuses.
        if let Kind::Reset(Errno::NotByToe | Errno::Refused) = message.kind
            && message.to == Side::Opener
            && let Some((vm, request)) = self.host.asking(from, message.id)
        {
            self.rules.refusals.note(now, vm, &request);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::*;

    const START: Instant = Instant::from_secs(1000);
    const A: VmId = VmId(1);
    const B: VmId = VmId(2);

    fn after(ms: u64) -> Instant {
        START + Duration::from_millis(ms)
    }

    fn to(port: u16) -> Request {
        let at = |last, port| SocketAddr::from(([10, 0, 0, last], port));
        Request { network: 7, from: at(1, 1000), to: at(2, port) }
    }

    #[test]
    fn a_refusal_counts_for_five_seconds_from_the_last_one_on() {
        let mut refusals = Refusals::default();
        refusals.note(START, A, &to(80));
        refusals.note(after(1000), A, &to(81));
        refusals.forgive(after(4999));
        assert!(refusals.has(A, &to(80)) && !refusals.has(B, &to(80)));
        assert!(!refusals.has(A, &Request { network: 8, ..to(80) }));
        refusals.forgive(after(5000));
        assert!(!refusals.has(A, &to(80)) && refusals.has(A, &to(81)));
        refusals.note(after(5500), A, &to(81)); // it had been said before
        refusals.forgive(after(10_499));
        assert!(refusals.has(A, &to(81)));
        refusals.forgive(after(10_500));
        assert!(refusals.until.is_empty() && refusals.order.is_empty());
        assert!(refusals.counts.is_empty());
    }

    #[test]
    fn whoever_was_refused_where_somebody_listens_now_may_try_again() {
        let mut refusals = Refusals::default();
        for (vm, port) in [(A, 80), (B, 80), (A, 79), (A, 81)] {
            refusals.note(START, vm, &to(port));
        }
        refusals.forget(place(&to(80)));
        let has =
            [(A, 80), (B, 80), (A, 79), (A, 81)].map(|(vm, port)| refusals.has(vm, &to(port)));
        assert_eq!(has, [false, false, true, true]);
    }

    #[test]
    fn what_a_guest_makes_the_host_remember_is_bounded_and_keeps_no_place_of_others() {
        let mut refusals = Refusals::default();
        for port in 1..=1000 {
            refusals.note(after(port.into()), A, &to(port));
        }
        // It is refused, and listens there, and is refused again.
        for n in 0..1000 {
            refusals.note(after(2000 + n), B, &to(80));
            refusals.forget(place(&to(80)));
            refusals.note(after(2000 + n), B, &to(81));
        }
        let all = (refusals.until.len(), refusals.order.len(), refusals.counts.len());
        assert_eq!(all, (REFUSALS_MAX + 1, REFUSALS_MAX + 1, 2));
        assert!(refusals.has(A, &to(64)) && !refusals.has(A, &to(65)) && refusals.has(B, &to(81)));
        // A guest that has as many as there may be is told of the same one again, and of others
        // later.
        refusals.note(after(3000), A, &to(64));
        refusals.forgive(after(5001));
        refusals.note(after(5001), A, &to(1000));
        assert!(refusals.has(A, &to(64)) && refusals.has(A, &to(1000)));
    }
}
