//! The peer of each station: a bounded table of MACs, learned from frames or told. Learned and told
//! stations have a bound each, so a flood of addresses takes no place from told stations, nor they
//! from others.

use ahash::RandomState;
use hashbrown::HashTable;
use hashbrown::hash_table::Entry;

use super::PeerId;
use crate::drops::DropReason;
use crate::limits::{MAC_AGE, MAC_SWEEP_INTERVAL, MACS_MAX, TOLD_MAX};
use crate::switch::Mac;
use crate::time::Instant;

/// In place of a peer: on this host itself.
const HERE: PeerId = PeerId(u16::MAX);

#[derive(Clone, Copy, Debug)]
struct Station {
    mac: Mac,
    peer: PeerId,
    /// When it was last heard; `None`: it was told, and frames do not change it.
    heard: Option<Instant>,
}

impl Station {
    fn is_fresh(&self, now: Instant) -> bool {
        self.heard.is_none_or(|heard| now.since(heard) < MAC_AGE)
    }
}

/// See the module doc.
#[derive(Debug)]
pub(super) struct Stations {
    table: HashTable<Station>,
    /// How many of them were told.
    told: usize,
    hasher: RandomState,
    swept: Instant,
}

impl Stations {
    pub(super) fn new(hasher: RandomState) -> Self {
        Self { table: HashTable::new(), told: 0, hasher, swept: Instant::ZERO }
    }

    /// The peer behind which `mac` is.
    pub(super) fn find(&self, now: Instant, mac: Mac) -> Option<PeerId> {
        let found = self.table.find(self.hasher.hash_one(mac), |station| station.mac == mac);
        let found = found.filter(|station| station.is_fresh(now) && station.peer != HERE);
        found.map(|station| station.peer)
    }

    /// A frame of `mac` came from `peer`. If the station was behind another it has moved, and who
    /// sends to it next finds it there. Group addresses teach nothing.
    ///
    /// # Errors
    /// [`DropReason::SpoofedMac`]: it was told where that station is, and it is not there.
    pub(super) fn learn(&mut self, now: Instant, mac: Mac, peer: PeerId) -> Result<(), DropReason> {
        if mac[0] & 1 != 0 {
            return Ok(());
        }
        if self.heard() >= MACS_MAX && now.since(self.swept) >= MAC_SWEEP_INTERVAL {
            self.swept = now;
            self.table.retain(|station| station.is_fresh(now));
        }
        let is_full = self.heard() >= MACS_MAX;
        match self.entry(mac) {
            Entry::Occupied(mut entry) => {
                let Station { heard: Some(heard), peer: at, .. } = entry.get_mut() else {
                    let is_there = entry.get().peer == peer;
                    return if is_there { Ok(()) } else { Err(DropReason::SpoofedMac) };
                };
                (*heard, *at) = (now, peer);
            }
            // Known stations keep their place: an address flood cannot push them out.
            Entry::Vacant(_) if is_full => {}
            Entry::Vacant(entry) => {
                entry.insert(Station { mac, peer, heard: Some(now) });
            }
        }
        Ok(())
    }

    /// From now on `mac` is behind `peer`, whatever frames say. `false`: [`TOLD_MAX`] were told.
    pub(super) fn tell(&mut self, mac: Mac, peer: PeerId) -> bool {
        let station = Station { mac, peer, heard: None };
        let is_full = self.told >= TOLD_MAX;
        match self.entry(mac) {
            Entry::Occupied(mut entry) if entry.get().heard.is_none() => {
                *entry.get_mut() = station;
                return true;
            }
            _ if is_full => return false,
            Entry::Occupied(mut entry) => *entry.get_mut() = station,
            Entry::Vacant(entry) => {
                entry.insert(station);
            }
        }
        self.told += 1;
        true
    }

    /// From now on `mac` is here, and behind no peer.
    pub(super) fn tell_here(&mut self, mac: Mac) {
        self.tell(mac, HERE);
    }

    /// The station `mac` is no longer told; from now on frames teach its place.
    pub(super) fn forget(&mut self, mac: Mac) {
        if let Entry::Occupied(entry) = self.entry(mac)
            && entry.get().heard.is_none()
        {
            entry.remove();
            self.told -= 1;
        }
    }

    /// Peers have other places: `place` gives the new one of each that stays. A station behind
    /// another peer is unknown.
    pub(super) fn renumber(&mut self, place: impl Fn(PeerId) -> Option<PeerId>) {
        self.table.retain(|station| match place(station.peer) {
            _ if station.peer == HERE => true,
            Some(peer) => {
                station.peer = peer;
                true
            }
            None => false,
        });
        self.told = self.table.iter().filter(|station| station.heard.is_none()).count();
    }

    fn heard(&self) -> usize {
        self.table.len() - self.told
    }

    fn entry(&mut self, mac: Mac) -> Entry<'_, Station> {
        let hasher = &self.hasher;
        self.table.entry(
            hasher.hash_one(mac),
            |station| station.mac == mac,
            |station| hasher.hash_one(station.mac),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::time::Duration;

    const A: PeerId = PeerId(0);
    const B: PeerId = PeerId(1);
    const START: Instant = Instant::from_secs(1000);

    fn stations() -> Stations {
        Stations::new(RandomState::with_seeds(1, 2, 3, 4))
    }

    fn mac(n: u32) -> Mac {
        let [a, b, c, d] = n.to_be_bytes();
        [2, 0, a, b, c, d]
    }

    #[test]
    fn a_station_is_where_it_was_last_heard_and_nowhere_after_five_minutes() {
        let mut stations = stations();
        assert_eq!(stations.find(START, mac(7)), None);
        stations.learn(START, mac(7), A).unwrap();
        assert_eq!(stations.find(START, mac(7)), Some(A));
        let later = START + Duration::from_secs(299);
        stations.learn(later, mac(7), B).unwrap();
        assert_eq!(stations.find(later, mac(7)), Some(B), "it has moved");
        assert_eq!(stations.find(later + MAC_AGE, mac(7)), None);
    }

    #[test]
    fn a_station_that_was_told_is_nowhere_else_and_does_not_age() {
        let mut stations = stations();
        stations.learn(START, mac(7), B).unwrap();
        assert!(stations.tell(mac(7), A));
        assert_eq!(stations.learn(START, mac(7), A), Ok(()));
        assert_eq!(stations.learn(START, mac(7), B), Err(DropReason::SpoofedMac));
        assert_eq!(stations.find(START + MAC_AGE + MAC_AGE, mac(7)), Some(A));
    }

    #[test]
    fn what_was_told_can_be_taken_back_and_what_was_heard_cannot() {
        let mut stations = stations();
        stations.tell(mac(7), A);
        stations.learn(START, mac(8), A).unwrap();
        (7..9).for_each(|n| stations.forget(mac(n)));
        assert_eq!(
            (7..9).map(|n| stations.find(START, mac(n))).collect::<Vec<_>>(),
            [None, Some(A)]
        );
        stations.learn(START, mac(7), B).unwrap();
        assert_eq!(stations.find(START, mac(7)), Some(B), "frames teach it again");
    }

    #[test]
    fn a_station_that_is_here_is_behind_no_peer_whatever_peers_say() {
        let mut stations = stations();
        stations.tell_here(mac(7));
        stations.renumber(|_| None);
        assert_eq!(stations.learn(START, mac(7), A), Err(DropReason::SpoofedMac));
        assert_eq!(stations.find(START, mac(7)), None);
        stations.forget(mac(7));
        stations.learn(START, mac(7), A).unwrap();
        assert_eq!(stations.find(START, mac(7)), Some(A));
    }

    #[test]
    fn stations_stay_with_their_peers() {
        let mut stations = stations();
        stations.tell(mac(7), A);
        stations.learn(START, mac(8), B).unwrap();
        stations.renumber(|peer| (peer == B).then_some(A));
        assert_eq!(stations.find(START, mac(7)), None);
        assert_eq!(stations.find(START, mac(8)), Some(A));
    }

    #[test]
    fn a_group_is_nobodys_station() {
        let mut stations = stations();
        stations.learn(START, [0xff; 6], A).unwrap();
        assert_eq!(stations.find(START, [0xff; 6]), None);
    }

    #[test]
    fn a_flood_of_addresses_takes_a_bounded_table_and_nobodys_place() {
        let mut stations = stations();
        let most = u32::try_from(MACS_MAX).unwrap();
        (0..2 * most).for_each(|n| stations.learn(START, mac(n), A).unwrap());
        assert_eq!(stations.table.len(), MACS_MAX);
        assert_eq!(stations.find(START, mac(0)), Some(A));
        assert_eq!(stations.find(START, mac(most)), None);
        let later = START + MAC_AGE;
        stations.learn(later, mac(most), B).unwrap();
        assert_eq!(stations.find(later, mac(most)), Some(B), "there is room when those are gone");
    }

    #[test]
    fn a_flood_of_addresses_and_what_is_told_take_no_place_from_each_other() {
        let mut stations = stations();
        let (heard, told) = (u32::try_from(MACS_MAX).unwrap(), u32::try_from(TOLD_MAX).unwrap());
        (0..2 * heard).for_each(|n| stations.learn(START, mac(n), A).unwrap());
        // The first of them was heard, and leaves its place to another.
        let all = heard - 1..heard - 1 + told;
        assert!(all.clone().all(|n| stations.tell(mac(n), B)));
        assert!(stations.tell(mac(all.start), A), "it was told already");
        assert!(!stations.tell(mac(all.end), B) && !stations.tell(mac(0), B));
        assert_eq!(stations.find(START, mac(all.end)), None);
        assert_eq!(stations.find(START, mac(0)), Some(A), "as it was heard");
        stations.learn(START, mac(all.end), A).unwrap();
        assert_eq!(stations.find(START, mac(all.end)), Some(A));
        stations.renumber(|peer| (peer == A).then_some(A));
        assert_eq!(stations.table.len(), MACS_MAX + 1);
        stations.forget(mac(all.start));
        assert_eq!(stations.heard(), MACS_MAX);
        assert!(all.take(TOLD_MAX).all(|n| stations.tell(mac(n), B)), "there is room again");
    }
}
