//! How many streams hosts and guests have, and who may have one more.
//!
//! - Another host may begin a quarter of the streams that there may be. It takes for away whom it
//!   does not reach, and so does this host: so each counts only the streams that the other one has
//!   begun, and does not begin more than the other one takes.
//! - A guest of this host may have no more streams to a host than it leaves free of a quarter, and
//!   no more in all than it leaves free of all, so that the next guest finds some: half of them,
//!   as of the places for sockets (`Host::offer` of the core). Its other connections use guest TCP.
//!
//! Idle streams to a host count, for no guest.

use std::collections::BTreeMap;

use nightporter_core::toe::id::HostId;

/// See the module's doc.
#[derive(Debug, Default)]
pub(super) struct Counts {
    /// Streams there may be.
    most: usize,
    all: usize,
    /// By the host that has begun them, and by the host to which this one has.
    from: BTreeMap<HostId, usize>,
    to: BTreeMap<HostId, usize>,
    /// Those of `to` that have a connection, by the device of its guest.
    of_guest: BTreeMap<usize, usize>,
    of_guest_to: BTreeMap<(usize, HostId), usize>,
}

pub(super) fn count<K: Ord>(counts: &BTreeMap<K, usize>, key: &K) -> usize {
    counts.get(key).copied().unwrap_or(0)
}

pub(super) fn add<K: Ord>(counts: &mut BTreeMap<K, usize>, key: K) {
    *counts.entry(key).or_default() += 1;
}

pub(super) fn subtract<K: Ord>(counts: &mut BTreeMap<K, usize>, key: &K) {
    let left = counts.get_mut(key).expect("it was added");
    *left -= 1;
    if *left == 0 {
        counts.remove(key);
    }
}

impl Counts {
    /// Streams there may be.
    pub(super) const fn most(&self) -> usize {
        self.most
    }

    /// Streams there are.
    pub(super) const fn all(&self) -> usize {
        self.all
    }

    /// Whether this host may begin one more.
    pub(super) fn may_come_from(&self, host: HostId) -> bool {
        self.all < self.most && count(&self.from, &host) < self.most / 4
    }

    /// Whether one more may be begun to this host, for the guest with this device.
    pub(super) fn may_go_to(&self, host: HostId, device: usize) -> bool {
        let free = self.most.saturating_sub(self.all);
        let free_to = (self.most / 4).saturating_sub(count(&self.to, &host));
        let of_guest = count(&self.of_guest, &device);
        of_guest < free && count(&self.of_guest_to, &(device, host)) < free_to
    }

    /// So many streams there may be from now on.
    pub(super) const fn set_most(&mut self, most: usize) {
        self.most = most;
    }

    /// A stream was begun: by this host, or by that one.
    pub(super) fn begin(&mut self, host: HostId, is_ours: bool) {
        self.all += 1;
        add(if is_ours { &mut self.to } else { &mut self.from }, host);
    }

    /// Such a stream is no more.
    pub(super) fn end(&mut self, host: HostId, is_ours: bool) {
        self.all -= 1;
        subtract(if is_ours { &mut self.to } else { &mut self.from }, &host);
    }

    /// A stream that this host has begun has a connection of the guest with this device.
    pub(super) fn give(&mut self, host: HostId, device: usize) {
        add(&mut self.of_guest, device);
        add(&mut self.of_guest_to, (device, host));
    }

    /// It has none any more.
    pub(super) fn take_back(&mut self, host: HostId, device: usize) {
        subtract(&mut self.of_guest, &device);
        subtract(&mut self.of_guest_to, &(device, host));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The guest begins as many streams to this host as it may, 4,096 at most; how many.
    fn begin_all(counts: &mut Counts, host: HostId, device: usize) -> usize {
        let mut begun = 0;
        while begun < 4096 && counts.may_go_to(host, device) {
            counts.begin(host, true);
            counts.give(host, device);
            begun += 1;
        }
        begun
    }

    #[test]
    fn a_guest_leaves_as_many_streams_to_a_host_as_it_has() {
        let (mut counts, host) = (Counts::default(), HostId(7));
        counts.set_most(1024);
        let all: Vec<usize> = (0..9).map(|guest| begin_all(&mut counts, host, guest)).collect();
        assert_eq!(all, [128, 64, 32, 16, 8, 4, 2, 1, 1]);
        // One that it gives back is anybody's.
        counts.take_back(host, 0);
        counts.end(host, true);
        assert_eq!(begin_all(&mut counts, host, 9), 1);
        assert!(!counts.may_go_to(host, 0) && counts.may_go_to(HostId(8), 0));
    }

    #[test]
    fn guests_that_send_to_many_hosts_leave_streams_to_others() {
        let mut counts = Counts::default();
        counts.set_most(32_768);
        let all = (0..12).map(|guest| begin_all(&mut counts, HostId(1 + guest), guest as usize));
        assert_eq!(all.collect::<Vec<_>>()[..8], [4096, 4096, 4096, 4096, 4096, 4096, 4096, 2048]);
        assert!(counts.may_go_to(HostId(1), 99));
    }

    #[test]
    fn what_was_begun_to_a_host_does_not_keep_it_from_beginning_as_much() {
        let (mut counts, host) = (Counts::default(), HostId(7));
        counts.set_most(1024);
        for guest in 0..9 {
            begin_all(&mut counts, host, guest);
        }
        assert!(!counts.may_go_to(host, 9));
        for _ in 0..256 {
            assert!(counts.may_come_from(host));
            counts.begin(host, false);
        }
        assert!(!counts.may_come_from(host));
        counts.end(host, false);
        assert!(counts.may_come_from(host) && !counts.may_go_to(host, 9));
    }
}
