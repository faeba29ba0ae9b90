//! Protection against late messages: copies of requests, and probes of ends that are over.

use std::collections::{BTreeMap, VecDeque};

use super::id::{HostId, ShadowId, Side};
use crate::limits::{T_TOE_SILENCE, TOE_INCARNATIONS_MAX, TOE_LATE_REQUESTS, TOE_OVER_MAX};
use crate::time::Instant;

const WORDS: usize = 1024;
const _: () = assert!(WORDS as u64 * 64 == TOE_LATE_REQUESTS);

/// Received requests of each host (VTOE-13): a copy of one would open its connection again.
#[derive(Debug, Default)]
pub(super) struct Requests {
    /// The newest incarnation is last.
    by_host: BTreeMap<HostId, VecDeque<Serials>>,
}

/// Received requests of an incarnation.
#[derive(Debug)]
struct Serials {
    incarnation: u64,
    /// All serials are below.
    end: u64,
    /// Bits of the last [`TOE_LATE_REQUESTS`] serials before `end`, at the serial modulo their
    /// number.
    came: Box<[u64; WORDS]>,
}

impl Requests {
    /// Notes a request. `false`: it is a copy, or too old to tell.
    pub(super) fn is_new(&mut self, host: HostId, name: ShadowId) -> bool {
        let incarnations = self.by_host.entry(host).or_default();
        let mut known = incarnations.iter_mut();
        if let Some(serials) = known.find(|s| s.incarnation == name.incarnation) {
            return serials.is_new(name.serial);
        }
        if incarnations.len() >= TOE_INCARNATIONS_MAX {
            incarnations.pop_front();
        }
        let mut serials =
            Serials { incarnation: name.incarnation, end: name.serial, came: Box::new([0; WORDS]) };
        let is_new = serials.is_new(name.serial);
        incarnations.push_back(serials);
        is_new
    }
}

impl Serials {
    fn is_new(&mut self, serial: u64) -> bool {
        // The last serial of all is never used.
        let Some(end) = serial.checked_add(1) else { return false };
        if end <= self.end.saturating_sub(TOE_LATE_REQUESTS) {
            return false;
        }
        // The serials between have not come.
        match end.saturating_sub(self.end) {
            TOE_LATE_REQUESTS.. => self.came.fill(0),
            _ => self.clear(self.end, end),
        }
        self.end = self.end.max(end);
        let (word, bit) = (Self::word(serial), 1 << (serial % 64));
        let came = self.came[word] & bit != 0;
        self.came[word] |= bit;
        !came
    }

    /// Marks serials as not received, fewer than the bitmap has. It works by words, because another
    /// host chooses how many serials it skips.
    fn clear(&mut self, mut from: u64, end: u64) {
        while from < end {
            let (bit, len) = (from % 64, (64 - from % 64).min(end - from));
            self.came[Self::word(from)] &= !(u64::MAX >> (64 - len) << bit);
            from += len;
        }
    }

    fn word(serial: u64) -> usize {
        usize::try_from(serial % TOE_LATE_REQUESTS / 64).expect("few")
    }
}

/// The name of an end, and the host of the other one.
pub(super) type Name = (HostId, ShadowId, Side);

/// Ends that were over without an error not long ago: the other end may still probe them.
#[derive(Debug, Default)]
pub(super) struct Over {
    since: BTreeMap<Name, Instant>,
    order: VecDeque<(Instant, Name)>,
}

impl Over {
    pub(super) fn add(&mut self, now: Instant, name: Name) {
        while let Some((since, first)) = self.order.front().copied()
            && (since + T_TOE_SILENCE <= now || self.order.len() >= TOE_OVER_MAX)
        {
            self.order.pop_front();
            self.since.remove(&first);
        }
        self.since.insert(name, now);
        self.order.push_back((now, name));
    }

    pub(super) fn contains(&self, now: Instant, name: Name) -> bool {
        self.since.get(&name).is_some_and(|since| now < *since + T_TOE_SILENCE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Instant = Instant::from_secs(1000);

    fn name(incarnation: u64, serial: u64) -> ShadowId {
        ShadowId { incarnation, serial }
    }

    #[test]
    fn vtoe_13_a_request_is_new_once_however_late_and_in_whatever_order() {
        let mut requests = Requests::default();
        let host = HostId(1);
        for serial in [5, 3, 4, 100_000, 99_000, 34_465, u64::MAX - 1] {
            assert!(requests.is_new(host, name(7, serial)), "{serial}");
            assert!(!requests.is_new(host, name(7, serial)), "{serial} again");
        }
        for old in [5, 99_000, 34_464, 0, u64::MAX] {
            assert!(!requests.is_new(host, name(7, old)), "{old}");
        }
        assert!(requests.is_new(HostId(2), name(7, 5)), "another host's");
        assert!(requests.is_new(host, name(8, 5)), "another incarnation's");
        assert!(!requests.is_new(host, name(7, 5)), "of the one before");
    }

    #[test]
    fn what_was_skipped_has_not_come_also_where_others_had_their_place() {
        let mut requests = Requests::default();
        for serial in 0..1000 {
            assert!(requests.is_new(HostId(1), name(7, serial)));
        }
        for serial in [TOE_LATE_REQUESTS + 999, TOE_LATE_REQUESTS + 500, TOE_LATE_REQUESTS] {
            assert!(requests.is_new(HostId(1), name(7, serial)), "{serial}");
        }
        assert!(requests.is_new(HostId(1), name(7, 1000)));
        assert!(!requests.is_new(HostId(1), name(7, 999)), "too late to be known");
    }

    #[test]
    fn serials_that_jump_clear_what_they_skip_and_nothing_else() {
        let mut serials = Serials { incarnation: 7, end: 0, came: Box::new([u64::MAX; WORDS]) };
        // Every beginning in a word, and every length of up to three words.
        for jump in 0..200_u64 {
            let (before, end) = (serials.end, serials.end + jump + 1);
            assert!(serials.is_new(end - 1), "{jump}");
            for skipped in before..end - 1 {
                assert!(serials.is_new(skipped), "{skipped} of {before}..{end}");
            }
            for came in before.saturating_sub(200)..end {
                assert!(!serials.is_new(came), "{came} of {before}..{end}");
            }
        }
        // As many as are known, and more.
        for jump in [TOE_LATE_REQUESTS - 1, TOE_LATE_REQUESTS, TOE_LATE_REQUESTS + 1] {
            let last = serials.end - 1;
            assert!(serials.is_new(last + jump));
            assert!(serials.is_new(last + 2) && serials.is_new(last + jump - 1));
            assert!(!serials.is_new(last) && !serials.is_new(last + jump));
        }
    }

    #[test]
    fn a_host_that_starts_anew_again_and_again_is_not_remembered_for_ever() {
        let mut requests = Requests::default();
        for incarnation in 0..100 {
            assert!(requests.is_new(HostId(1), name(incarnation, 0)));
        }
        assert_eq!(requests.by_host[&HostId(1)].len(), TOE_INCARNATIONS_MAX);
        assert!(!requests.is_new(HostId(1), name(99, 0)));
    }

    #[test]
    fn ends_that_are_over_are_known_for_as_long_as_anybody_asks_and_there_are_so_many() {
        let mut over = Over::default();
        let end = |serial| (HostId(1), name(7, serial), Side::Opener);
        over.add(NOW, end(0));
        assert!(over.contains(NOW, end(0)) && !over.contains(NOW, end(1)));
        assert!(!over.contains(NOW + T_TOE_SILENCE, end(0)));
        for serial in 1..=TOE_OVER_MAX as u64 {
            over.add(NOW, end(serial));
        }
        assert!(!over.contains(NOW, end(0)) && over.contains(NOW, end(1)));
        over.add(NOW + T_TOE_SILENCE, end(0));
        assert_eq!((over.since.len(), over.order.len()), (1, 1));
    }
}
