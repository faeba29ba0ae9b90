//! A list written by an operator: the default back-end. Nobody checks the list.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::os::fd::BorrowedFd;

use crate::mail::Bell;
use crate::{Claim, Host, Mac, News, Registry, Station};

/// See the module doc.
#[derive(Debug)]
pub struct Listed {
    stations: BTreeMap<(u32, Mac), Station>,
    /// Claims of this host.
    claims: BTreeSet<(u32, Mac)>,
    own: BTreeMap<u32, Host>,
    news: VecDeque<News>,
    /// It rings as long as there are changes to report.
    bell: Bell,
}

impl Listed {
    /// A registry with this list, in which a VNI has each station once.
    ///
    /// # Errors
    /// No descriptor is left for the bell.
    pub fn new(list: Vec<Station>) -> io::Result<Self> {
        let mut new = Self {
            stations: BTreeMap::new(),
            claims: BTreeSet::new(),
            own: BTreeMap::new(),
            news: VecDeque::new(),
            bell: Bell::new()?,
        };
        new.set_list(list);
        Ok(new)
    }

    fn add(&mut self, news: News) {
        self.news.push_back(news);
        self.bell.ring();
    }

    /// Reports a listed station, unless it is of this host.
    fn tell(&mut self, key: (u32, Mac)) {
        let Some(station) = self.stations.get(&key) else { return };
        let is_own = self.own.get(&key.0).is_some_and(|own| own.address == station.host);
        let now = (!is_own).then(|| station.clone());
        self.add(News::Station { vni: key.0, mac: key.1, now });
    }

    /// Judges a claim: refused if the list has the station elsewhere, unlisted without an entry.
    fn judge(&mut self, key: (u32, Mac)) {
        let own = self.own.get(&key.0).map(|own| own.address);
        let listed = self.stations.get(&key).map(|station| station.host);
        let now = match listed {
            Some(host) if Some(host) != own => Claim::Refused(host),
            Some(_) => Claim::Held,
            None => Claim::Unlisted,
        };
        self.add(News::Claim { vni: key.0, mac: key.1, now });
    }
}

impl Registry for Listed {
    fn kind(&self) -> &'static str {
        "list"
    }

    fn is_shared(&self) -> bool {
        false
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.bell.fd()
    }

    fn join(&mut self, host: Host) {
        if self.own.insert(host.vni, host) == Some(host) {
            return;
        }
        let of_vni = |(vni, _): &&(u32, Mac)| *vni == host.vni;
        let stations: Vec<_> = self.stations.keys().filter(of_vni).copied().collect();
        stations.into_iter().for_each(|key| self.tell(key));
        let claims: Vec<_> = self.claims.iter().filter(of_vni).copied().collect();
        claims.into_iter().for_each(|key| self.judge(key));
    }

    fn leave(&mut self, vni: u32) {
        self.own.remove(&vni);
    }

    fn claim(&mut self, station: Station) {
        let key = (station.vni, station.mac);
        self.claims.insert(key);
        self.judge(key);
    }

    fn release(&mut self, vni: u32, mac: Mac) {
        self.claims.remove(&(vni, mac));
    }

    fn set_list(&mut self, list: Vec<Station>) {
        let list: BTreeMap<_, _> = list.into_iter().map(|s| ((s.vni, s.mac), s)).collect();
        let before = std::mem::replace(&mut self.stations, list);
        let gone = before.keys().filter(|key| !self.stations.contains_key(key));
        let gone: Vec<_> = gone.copied().collect();
        for (vni, mac) in gone {
            self.add(News::Station { vni, mac, now: None });
        }
        let new = self.stations.iter().filter(|(key, s)| before.get(key) != Some(s));
        let new: Vec<_> = new.map(|(key, _)| *key).collect();
        new.into_iter().for_each(|key| self.tell(key));
        let claims: Vec<_> = self.claims.iter().copied().collect();
        claims.into_iter().for_each(|key| self.judge(key));
    }

    fn poll(&mut self) -> Option<News> {
        let news = self.news.pop_front();
        if self.news.is_empty() {
            self.bell.silence();
        }
        news
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use std::net::IpAddr;

    const MAC: Mac = [2, 0, 0, 0, 0, 7];
    const OTHER: Mac = [2, 0, 0, 0, 0, 8];

    fn ip(last: u8) -> IpAddr {
        [192, 0, 2, last].into()
    }

    fn station(mac: Mac, host: u8) -> Station {
        let (vm, ips) = (String::new(), vec![ip(100)]);
        Station { vni: 7, mac, vm, ips, host: ip(host), listeners: None }
    }

    fn news(list: &mut Listed) -> Vec<News> {
        std::iter::from_fn(|| list.poll()).collect()
    }

    fn told(mac: Mac, now: Option<Station>) -> News {
        News::Station { vni: 7, mac, now }
    }

    fn claimed(mac: Mac, now: Claim) -> News {
        News::Claim { vni: 7, mac, now }
    }

    #[test]
    fn what_is_listed_is_told_and_what_is_taken_off_the_list_is_gone() {
        let mut list = Listed::new(vec![station(MAC, 2)]).unwrap();
        assert_eq!((list.kind(), list.is_shared()), ("list", false));
        assert_eq!(news(&mut list), [told(MAC, Some(station(MAC, 2)))]);
        list.set_list(vec![station(MAC, 2), station(OTHER, 2)]);
        assert_eq!(news(&mut list), [told(OTHER, Some(station(OTHER, 2)))]);
        list.set_list(vec![station(OTHER, 3)]);
        assert_eq!(news(&mut list), [told(MAC, None), told(OTHER, Some(station(OTHER, 3)))]);
    }

    #[test]
    fn an_own_station_is_told_to_nobody_and_one_that_is_listed_elsewhere_is_refused() {
        let mut list = Listed::new(vec![station(MAC, 1), station(OTHER, 2)]).unwrap();
        list.join(Host { vni: 7, address: ip(1), port: 4789 });
        let _ = news(&mut list);
        list.join(Host { vni: 7, address: ip(1), port: 4789 });
        assert_eq!(news(&mut list), [], "it knew that");
        list.claim(station(MAC, 1));
        list.claim(station(OTHER, 1));
        let expected = [claimed(MAC, Claim::Held), claimed(OTHER, Claim::Refused(ip(2)))];
        assert_eq!(news(&mut list), expected);
        list.set_list(vec![station(MAC, 1), station(OTHER, 1)]);
        let expected = [told(OTHER, None), claimed(MAC, Claim::Held), claimed(OTHER, Claim::Held)];
        assert_eq!(news(&mut list), expected);
        list.release(7, MAC);
        list.set_list(vec![station(OTHER, 2)]);
        let expected = [
            told(MAC, None),
            told(OTHER, Some(station(OTHER, 2))),
            claimed(OTHER, Claim::Refused(ip(2))),
        ];
        assert_eq!(news(&mut list), expected);
        list.set_list(Vec::new());
        assert_eq!(news(&mut list), [told(OTHER, None), claimed(OTHER, Claim::Unlisted)]);
    }

    #[test]
    fn its_descriptor_is_readable_as_long_as_there_is_something() {
        let mut list = Listed::new(vec![station(MAC, 2), station(OTHER, 2)]).unwrap();
        for is_left in [true, true, false] {
            let mut fds = [PollFd::from_borrowed_fd(list.fd(), PollFlags::IN)];
            let ready = poll(&mut fds, Some(&Timespec::default())).unwrap() == 1;
            assert_eq!((ready, list.poll().is_some()), (is_left, is_left));
        }
    }
}
