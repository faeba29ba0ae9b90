//! The entries in etcd, the entries that this host wants there, and the steps that follow from
//! both. No I/O: the session feeds it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use super::Topic;
use super::api::{If, KeyChange, Kv, Outcome, WatchEvent};
use super::schema::{Key, read_host, read_station};
use crate::{Claim, Mac, News, Station};

/// Most keys, and most bytes of keys and values.
pub(super) const KEYS_MAX: usize = 1 << 18;
pub(super) const BYTES_MAX: usize = 128 << 20;

/// An entry that this host wants in etcd.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Wanted {
    /// This host's overlay address.
    pub(super) host: IpAddr,
    pub(super) value: String,
}

/// See the module doc.
#[derive(Debug)]
pub(super) struct EntryTable {
    prefix: String,
    /// The lease of own entries; `None`: it has expired, and there is no other yet.
    lease: Option<i64>,
    wanted: BTreeMap<Key, Wanted>,
    there: BTreeMap<Key, Kv>,
    /// Bytes of the entries.
    bytes: usize,
    /// Keys that were ours under this lease. Another holder of one is alive, even with our address.
    taken: BTreeSet<Key>,
    /// Keys that may have changed.
    changed: BTreeSet<Key>,
    /// Stations that were reported, their limit, and the stations beyond it.
    told: BTreeSet<(u32, Mac)>,
    told_max: usize,
    left_out: BTreeSet<(u32, Mac)>,
    /// Number of left-out stations that was last reported.
    said: usize,
}

impl EntryTable {
    pub(super) fn new(prefix: &str, told_max: usize) -> Self {
        Self {
            prefix: prefix.into(),
            lease: None,
            wanted: BTreeMap::new(),
            there: BTreeMap::new(),
            bytes: 0,
            taken: BTreeSet::new(),
            changed: BTreeSet::new(),
            told: BTreeSet::new(),
            told_max,
            left_out: BTreeSet::new(),
            said: 0,
        }
    }

    /// Number of keys, and bytes of keys and values.
    pub(super) fn len(&self) -> (usize, usize) {
        (self.there.len(), self.bytes)
    }

    /// Sets the lease of own entries; entries of the lease before count as left by a dead process.
    pub(super) fn set_lease(&mut self, lease: Option<i64>) {
        self.lease = lease;
        self.taken.clear();
        self.changed.extend(self.wanted.keys());
    }

    /// Sets or removes a wanted entry.
    pub(super) fn want(&mut self, key: Key, wanted: Option<Wanted>) {
        self.changed.insert(key);
        if let Key::Host(vni, _) = key {
            // Foreign entries of that overlay become own ones, or the other way round.
            let of_vni = self.there.range(Key::Station(vni, [0; 6])..=Key::Station(vni, [0xff; 6]));
            self.changed.extend(of_vni.map(|(key, _)| *key));
        }
        match wanted {
            Some(wanted) => self.wanted.insert(key, wanted),
            None => self.wanted.remove(&key),
        };
    }

    /// Replaces all entries.
    pub(super) fn set_all(&mut self, kvs: Vec<Kv>) {
        let read = kvs.into_iter().filter_map(|kv| Some((self.key(&kv)?, kv)));
        let now: BTreeMap<_, _> = read.collect();
        self.bytes = now.values().map(Kv::len).sum();
        let before = std::mem::replace(&mut self.there, now);
        let differs = |(key, kv): &(&Key, &Kv)| before.get(key) != Some(kv);
        self.changed.extend(self.there.iter().filter(differs).map(|(key, _)| *key));
        self.changed.extend(before.into_keys().filter(|key| !self.there.contains_key(key)));
        self.changed.extend(self.wanted.keys());
    }

    /// An entry was written or deleted.
    pub(super) fn handle_event(&mut self, event: WatchEvent) {
        let Some(key) = self.key(&event.kv) else { return };
        if self.there.get(&key).is_some_and(|kv| kv.mod_revision >= event.kv.mod_revision) {
            return; // a step of our own is newer
        }
        self.set(key, (!event.is_deletion()).then_some(event.kv));
    }

    /// The outcome of a step.
    pub(super) fn handle_outcome(
        &mut self,
        key: Key,
        step: &KeyChange,
        is: Outcome,
        revision: i64,
    ) {
        if !is.succeeded {
            return self.set(key, is.found());
        }
        if step.value.is_some() {
            self.taken.insert(key);
        }
        let (key_bytes, lease) = (step.key.clone().into_bytes(), self.lease.unwrap_or_default());
        let value = step.value.clone();
        let kv = value.map(|value| Kv { key: key_bytes, value, mod_revision: revision, lease });
        self.set(key, kv);
    }

    fn set(&mut self, key: Key, kv: Option<Kv>) {
        self.changed.insert(key);
        if let Key::Waiting(vni, mac, _) = key {
            self.changed.insert(Key::Station(vni, mac));
        }
        let len = kv.as_ref().map_or(0, Kv::len);
        let before = match kv {
            Some(_) if self.there.len() >= KEYS_MAX && !self.there.contains_key(&key) => return,
            Some(kv) => self.there.insert(key, kv),
            None => self.there.remove(&key),
        };
        self.bytes = self.bytes + len - before.as_ref().map_or(0, Kv::len);
    }

    fn key(&self, kv: &Kv) -> Option<Key> {
        Key::read(str::from_utf8(&kv.key).ok()?.strip_prefix(&self.prefix)?)
    }

    fn is_own(&self, kv: &Kv) -> bool {
        self.lease == Some(kv.lease)
    }

    /// The steps from the present entries to the wanted ones, as far as both are known.
    #[must_use]
    pub(super) fn steps(&self) -> Vec<(Key, KeyChange)> {
        let mut steps = Vec::new();
        let mut add = |key: Key, condition, value: Option<&str>| {
            let text = format!("{}{}", self.prefix, key.text());
            steps.push((key, KeyChange { key: text, condition, value: value.map(str::to_owned) }));
        };
        for (key, Wanted { host, value }) in &self.wanted {
            match self.there.get(key) {
                None => add(*key, If::Vacant, Some(value)),
                Some(kv) if self.is_own(kv) && kv.value == *value => {}
                Some(kv) if self.is_own(kv) || self.is_of_a_former_life(*key, kv, *host) => {
                    add(*key, If::Since(kv.mod_revision), Some(value));
                }
                Some(_) => {
                    if let Some(waiting) = waiting(*key, *host)
                        && self.there.get(&waiting).is_none_or(|kv| !self.is_own(kv))
                    {
                        add(waiting, If::Any, Some("{}"));
                    }
                }
            }
        }
        for (key, kv) in self.there.iter().filter(|(_, kv)| self.is_own(kv)) {
            let is_wanted = match *key {
                Key::Waiting(vni, mac, host) => {
                    let station = Key::Station(vni, mac);
                    let has_it = self.there.get(&station).is_none_or(|kv| self.is_own(kv));
                    self.wanted.get(&station).is_some_and(|it| it.host == host) && !has_it
                }
                key => self.wanted.contains_key(&key),
            };
            if !is_wanted {
                add(*key, If::Leased(kv.lease), None);
            }
        }
        steps
    }

    /// Whether an entry is of an earlier process of this host. An impostor's entry looks the same,
    /// but the impostor would have taken it from us.
    fn is_of_a_former_life(&self, key: Key, kv: &Kv, host: IpAddr) -> bool {
        !self.taken.contains(&key) && holder(key, kv) == Some(host)
    }

    /// Changes since the last call.
    pub(super) fn take_news(&mut self) -> Vec<(Topic, News)> {
        let mut news = Vec::new();
        while let Some(key) = self.changed.pop_first() {
            match key {
                Key::Host(vni, address) => {
                    let kv = self.there.get(&key).filter(|_| !self.wanted.contains_key(&key));
                    let now = kv.and_then(|kv| read_host(vni, address, &kv.value));
                    news.push((Topic::Of(key), News::Host { vni, address, now }));
                }
                Key::Station(vni, mac) => {
                    let kv = self.there.get(&key);
                    let station = kv.and_then(|kv| read_station(vni, mac, &kv.value));
                    let now =
                        station.filter(|s| !self.wanted.contains_key(&Key::Host(vni, s.host)));
                    let now = self.placed((vni, mac), now);
                    news.push((Topic::Of(key), News::Station { vni, mac, now }));
                    if let Some(now) = self.claim(vni, mac) {
                        news.push((Topic::Claim(vni, mac), News::Claim { vni, mac, now }));
                    }
                }
                Key::Waiting(..) => {}
            }
        }
        let left_out = self.left_out.len();
        if std::mem::replace(&mut self.said, left_out) != left_out {
            news.push((Topic::LeftOut, News::LeftOut(left_out)));
        }
        news
    }

    /// The station, if it is within the limit of reported ones.
    fn placed(&mut self, key: (u32, Mac), now: Option<Station>) -> Option<Station> {
        if now.is_some() && !self.told.contains(&key) && self.told.len() >= self.told_max {
            self.left_out.insert(key);
            return None;
        }
        self.left_out.remove(&key);
        if now.is_some() {
            self.told.insert(key);
        } else if self.told.remove(&key)
            && let Some((vni, mac)) = self.left_out.first()
        {
            self.changed.insert(Key::Station(*vni, *mac));
        }
        now
    }

    /// State of a claim of this host.
    fn claim(&self, vni: u32, mac: Mac) -> Option<Claim> {
        let key = Key::Station(vni, mac);
        let wanted = self.wanted.get(&key)?;
        Some(match self.there.get(&key) {
            None => Claim::Waits,
            Some(kv) if self.is_own(kv) => {
                let first = Key::Waiting(vni, mac, crate::FIRST_ADDRESS);
                let last = Key::Waiting(vni, mac, crate::LAST_ADDRESS);
                let others = self.there.range(first..=last).map(|(key, _)| key);
                let other = others.filter_map(|key| match key {
                    Key::Waiting(.., host) if *host != wanted.host => Some(*host),
                    _ => None,
                });
                other.min().map_or(Claim::Held, Claim::Contested)
            }
            Some(kv) if self.is_of_a_former_life(key, kv, wanted.host) => Claim::Waits,
            // An unreadable entry has a holder all the same.
            Some(kv) => Claim::Refused(holder(key, kv).unwrap_or(crate::FIRST_ADDRESS)),
        })
    }
}

/// The host that holds the entry.
fn holder(key: Key, kv: &Kv) -> Option<IpAddr> {
    match key {
        Key::Host(_, address) => Some(address),
        Key::Station(vni, mac) => read_station(vni, mac, &kv.value).map(|station| station.host),
        Key::Waiting(..) => None,
    }
}

/// The key by which `host` waits for a station.
fn waiting(key: Key, host: IpAddr) -> Option<Key> {
    match key {
        Key::Station(vni, mac) => Some(Key::Waiting(vni, mac, host)),
        Key::Host(..) | Key::Waiting(..) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOST: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 2));

    fn station(last: u8, mod_revision: i64) -> Kv {
        let key = format!("/np/station/7/02:00:00:00:00:{last:02x}");
        let key = key.into_bytes();
        Kv { key, value: format!(r#"{{"host":"{HOST}"}}"#), mod_revision, lease: 1 }
    }

    /// Stations added (`true`) and removed since the last call, and the number of left-out ones.
    fn news(known: &mut EntryTable) -> (Vec<(u8, bool)>, Option<usize>) {
        let (mut stations, mut left_out) = (Vec::new(), None);
        for (_, news) in known.take_news() {
            match news {
                News::Station { mac, now, .. } => stations.push((mac[5], now.is_some())),
                News::LeftOut(n) => left_out = Some(n),
                other => panic!("{other:?}"),
            }
        }
        (stations, left_out)
    }

    #[test]
    fn a_station_that_is_left_out_comes_in_when_there_is_a_place() {
        let mut known = EntryTable::new("/np/", 2);
        known.set_all((1..5).map(|n| station(n, 1)).collect());
        let in_and_out = vec![(1, true), (2, true), (3, false), (4, false)];
        assert_eq!(news(&mut known), (in_and_out, Some(2)));
        let goes = |last| WatchEvent { kind: "DELETE".into(), kv: station(last, 2) };
        known.handle_event(goes(1));
        assert_eq!(news(&mut known), (vec![(1, false), (3, true)], Some(1)));
        known.handle_event(WatchEvent { kind: String::new(), kv: station(3, 3) });
        assert_eq!(news(&mut known), (vec![(3, true)], None), "it has its place");
        known.handle_event(goes(4));
        known.handle_event(goes(2));
        assert_eq!(news(&mut known), (vec![(2, false), (4, false)], Some(0)));
        known.set_all(vec![station(3, 3), station(1, 4)]);
        assert_eq!(news(&mut known), (vec![(1, true)], None));
    }

    #[test]
    fn who_has_what_it_waited_for_waits_no_more() {
        let mac = [2, 0, 0, 0, 0, 3];
        let key = Key::Station(7, mac);
        let mut known = EntryTable::new("/np/", 2);
        known.set_lease(Some(1));
        known.want(key, Some(Wanted { host: HOST, value: station(3, 1).value }));
        let waits = format!("/np/{}", Key::Waiting(7, mac, HOST).text());
        let waits = Kv { key: waits.into_bytes(), value: "{}".into(), mod_revision: 2, lease: 1 };
        let steps = |known: &EntryTable| {
            let steps = known.steps().into_iter();
            steps.map(|(key, step)| (key, step.value.is_some())).collect::<Vec<_>>()
        };
        known.set_all(vec![Kv { lease: 5, ..station(3, 1) }, waits.clone()]);
        known.taken.insert(key);
        assert_eq!(steps(&known), [], "another has it");
        known.set_all(vec![station(3, 3), waits]);
        assert_eq!(steps(&known), [(Key::Waiting(7, mac, HOST), false)]);
    }

    #[test]
    fn there_are_no_more_entries_than_there_may_be_and_those_that_are_there_change() {
        let of = |n: usize, mod_revision| {
            let [a, b, c] = [n >> 16, n >> 8, n].map(|byte| byte & 0xff);
            let key = format!("/np/station/7/02:00:00:{a:02x}:{b:02x}:{c:02x}").into_bytes();
            Kv { key, value: String::new(), mod_revision, lease: 1 }
        };
        let mut known = EntryTable::new("/np/", 2);
        known.set_all((0..KEYS_MAX - 1).map(|n| of(n, 1)).collect());
        let len = of(0, 1).len();
        let comes = |kv| WatchEvent { kind: String::new(), kv };
        known.handle_event(comes(of(KEYS_MAX, 2)));
        known.handle_event(comes(of(KEYS_MAX + 1, 3)));
        assert_eq!(known.len(), (KEYS_MAX, KEYS_MAX * len));
        known.handle_event(comes(Kv { value: "{}".into(), ..of(3, 4) }));
        assert_eq!(known.len(), (KEYS_MAX, KEYS_MAX * len + 2));
    }
}
