//! How often the registry's entry of a VM is written again because the VM's listeners have changed.
//!
//! Only operators read the listeners in that entry. Changes within [`MERGED_FOR`] are one write,
//! and the writes of one VM have a [`Pace`].

use std::collections::BTreeMap;

use nightporter_core::port::PortId;
use nightporter_core::time::{Duration, Instant};
use nightporter_core::toe::sockets::VmId;
use nightporter_registry::Listeners;

use super::{Toe, vm};
use crate::pace::Pace;

/// A program that starts has its listeners within this, as a rule; and nobody waits for the entry.
const MERGED_FOR: Duration = Duration::from_secs(1);

/// See the module's doc.
#[derive(Debug)]
pub(super) struct Listings {
    /// VMs of which the registry is to be told.
    pace: Pace<VmId>,
    changes: u64,
}

impl Listings {
    pub(super) const fn new() -> Self {
        Self { pace: Pace::new(MERGED_FOR), changes: 0 }
    }

    /// The listeners of these have changed so often.
    fn note(&mut self, now: Instant, changed: BTreeMap<VmId, u64>) {
        for (vm, times) in changed {
            self.changes += times;
            self.pace.note(now, vm);
        }
    }

    /// One that is to be told of now.
    fn pop_due(&mut self, now: Instant) -> Option<VmId> {
        self.pace.poll_due(now, |_| true)
    }

    /// When the next is to be told of.
    fn poll_timeout(&self) -> Option<Instant> {
        self.pace.poll_timeout()
    }

    /// A VM's socket device is no more. If others are to be told of the VM, they still are: they
    /// know its old listeners.
    pub(super) fn forget(&mut self, vm: VmId) {
        self.pace.forget(vm);
    }
}

impl Toe {
    /// VMs of which others are to be told now at which ports they listen: [`Self::listeners_of`].
    /// To be called after each turn.
    pub(crate) fn take_listings(&mut self, now: Instant) -> Vec<PortId> {
        let changed = self.host.take_listener_changes();
        self.listings.note(now, changed);
        let due = std::iter::from_fn(|| self.listings.pop_due(now));
        due.filter_map(|VmId(at)| Some(PortId(u16::try_from(at).ok()?))).collect()
    }

    /// When [`Self::take_listings`] has something, if nothing else happens.
    pub(crate) fn listings_timeout(&self) -> Option<Instant> {
        self.listings.poll_timeout()
    }

    /// How often listeners have changed.
    pub(crate) fn listener_changes(&self) -> u64 {
        self.listings.changes
    }

    /// Ports at which the VM behind this port listens now. `None`: its socket device has no driver,
    /// or there is no such device.
    pub(crate) fn listeners_of(&self, port: PortId) -> Option<Listeners> {
        Some(Listeners::new(self.host.listening_ports(vm(port.0.into()))?, 0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: Instant = Instant::from_secs(1000);
    const VM: VmId = VmId(7);

    /// When it is told of if it changes every so often, for so long: seconds, rounded down.
    fn told(listings: &mut Listings, from: Instant, every: Duration, lasts: Duration) -> Vec<u64> {
        let (mut now, mut told) = (from, Vec::new());
        while now.since(from) < lasts {
            listings.note(now, BTreeMap::from([(VM, 1)]));
            now = now + every;
            while listings.pop_due(now).is_some() {
                told.push(now.since(from).as_nanos() / 1_000_000_000);
            }
        }
        told
    }

    #[test]
    fn who_listens_and_closes_in_a_loop_is_told_of_eight_times_and_then_once_a_minute() {
        let mut listings = Listings::new();
        let every = Duration::from_millis(1);
        let at = told(&mut listings, START, every, Duration::from_secs(300));
        assert_eq!(at, [1, 2, 3, 4, 5, 6, 7, 8, 61, 121, 181, 241]);
        assert_eq!(listings.changes, 300_000);
        // It rests, and has its eight again.
        let later = START + Duration::from_secs(2000);
        let at = told(&mut listings, later, every, Duration::from_secs(20));
        assert_eq!(at, [0, 1, 2, 3, 4, 5, 6, 7], "what was left of before, and seven more");
    }

    #[test]
    fn one_change_is_told_of_a_second_later_with_those_behind_it_whatever_others_do() {
        let mut listings = Listings::new();
        told(&mut listings, START, Duration::from_millis(1), Duration::from_secs(290));
        let now = START + Duration::from_secs(290);
        let other = VmId(8);
        for ms in [0, 999] {
            let at = now + Duration::from_millis(ms);
            listings.note(at, BTreeMap::from([(other, 1)]));
            assert_eq!(listings.pop_due(at), None);
        }
        assert_eq!(listings.poll_timeout(), Some(now + MERGED_FOR));
        assert_eq!(listings.pop_due(now + MERGED_FOR), Some(other));
        assert_eq!(listings.pop_due(now + MERGED_FOR), None);
        // Its device goes, and what others know of it is out of date.
        listings.forget(VM);
        let due = listings.poll_timeout().unwrap();
        assert_eq!(listings.pop_due(due), Some(VM));
        // The number may be another VM's, which has not been told of.
        listings.forget(VM);
        assert_eq!(listings.poll_timeout(), None);
        listings.note(due, BTreeMap::from([(VM, 1)]));
        assert_eq!(listings.poll_timeout(), Some(due + MERGED_FOR));
    }
}
