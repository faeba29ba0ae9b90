//! Which guest is at which host, as the registry says: what a peer is believed about.

use std::collections::BTreeMap;
use std::net::IpAddr;

use nightporter_core::time::{Duration, Instant};
use nightporter_core::toe::id::HostId;
use nightporter_registry::{Mac, Station};

use crate::broker::dialer::is_host;
use crate::sockets::HERE;

/// Hosts that are given a number, as long as the daemon runs. The requests of one take 32 KiB at
/// most.
const HOSTS_MAX: usize = 4096;
/// Addresses of a station that count.
const IPS_MAX: usize = 64;
/// So long nobody is sent to a host that was not reached, and twice as long each time after that.
const T_AWAY: Duration = Duration::from_secs(5);
const T_AWAY_MAX: Duration = Duration::from_secs(300);

/// A host that was not reached.
#[derive(Clone, Copy, Debug)]
struct Away {
    /// When somebody may try again; `None`: now.
    until: Option<Instant>,
    wait: Duration,
}

/// A guest of another host that is not there any more.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(in super::super) struct Gone {
    pub(in super::super) host: HostId,
    /// Its network and address.
    pub(in super::super) guest: (u32, IpAddr),
}

/// See the module's doc.
#[derive(Debug, Default)]
pub(in super::super) struct Peers {
    stations: BTreeMap<(u32, Mac), (IpAddr, Vec<IpAddr>)>,
    /// By VNI and address: hosts of stations that have it, and the first address of each.
    places: BTreeMap<(u32, IpAddr), Vec<(IpAddr, IpAddr)>>,
    /// Stations of each host, and its number.
    hosts: BTreeMap<IpAddr, (usize, HostId)>,
    /// By number, from 1 on: 0 is this host.
    addresses: Vec<IpAddr>,
    /// Hosts that were not reached.
    away: BTreeMap<HostId, Away>,
}

impl Peers {
    /// A station of another host, as it is now; the hosts that have one more or less by that, and
    /// guests that are not there any more.
    pub(in super::super) fn set(
        &mut self,
        vni: u32,
        mac: Mac,
        now: Option<&Station>,
    ) -> ([Option<IpAddr>; 2], Vec<Gone>) {
        let before = self.stations.get(&(vni, mac)).cloned();
        let touched = self.replace(vni, mac, now);
        let (host, ips) = before.map_or((None, Vec::new()), |(host, ips)| (Some(host), ips));
        let is_there = |ip| {
            let mut at = self.places.get(&(vni, ip)).into_iter().flatten();
            at.any(|(place, _)| Some(*place) == host)
        };
        let left = ips.into_iter().filter(|ip| !is_there(*ip));
        let number = host.and_then(|host| Some(self.hosts.get(&host)?.1));
        let gone = left.filter_map(|ip| Some(Gone { host: number?, guest: (vni, ip) }));
        (touched, gone.collect())
    }

    fn replace(&mut self, vni: u32, mac: Mac, now: Option<&Station>) -> [Option<IpAddr>; 2] {
        let before = self.stations.remove(&(vni, mac));
        let was_at = before.as_ref().map(|(host, _)| *host);
        if let Some((host, ips)) = before {
            let first = ips.first().copied();
            for ip in ips {
                let there = self.places.get_mut(&(vni, ip)).expect("it was listed");
                let at = there.iter().position(|(known, of)| (*known, Some(*of)) == (host, first));
                there.swap_remove(at.expect("with its host"));
                if there.is_empty() {
                    self.places.remove(&(vni, ip));
                }
            }
            self.hosts.get_mut(&host).expect("it had a station").0 -= 1;
        }
        let now = now.map(|it| Station { host: it.host.to_canonical(), ..it.clone() });
        let Some(station) = now.filter(|station| is_host(station.host)) else {
            return [was_at, None];
        };
        if !self.hosts.contains_key(&station.host) {
            if self.addresses.len() >= HOSTS_MAX {
                return [was_at, None]; // its guests are reached by guest TCP
            }
            self.addresses.push(station.host);
            let number = u32::try_from(self.addresses.len()).expect("few");
            self.hosts.insert(station.host, (0, HostId(number)));
        }
        self.hosts.get_mut(&station.host).expect("it is there").0 += 1;
        let mut ips: Vec<_> = station.ips.iter().take(IPS_MAX).copied().collect();
        ips.sort_unstable();
        ips.dedup();
        for ip in &ips {
            self.places.entry((vni, *ip)).or_default().push((station.host, ips[0]));
        }
        self.stations.insert((vni, mac), (station.host, ips));
        [was_at, Some(station.host)]
    }

    /// Hosts with a station.
    pub(in super::super) fn hosts(&self) -> impl Iterator<Item = IpAddr> {
        let there = self.hosts.iter().filter(|(_, (stations, _))| *stations > 0);
        there.map(|(host, _)| *host)
    }

    /// The host with this address, if a station is there.
    pub(in super::super) fn host_at(&self, address: IpAddr) -> Option<HostId> {
        let (stations, host) = self.hosts.get(&address.to_canonical())?;
        (*stations > 0).then_some(*host)
    }

    /// Where the guest with this address is. `None`: nobody has said, or two have.
    pub(in super::super) fn host_of(&self, vni: u32, ip: IpAddr) -> Option<HostId> {
        match &self.places.get(&(vni, ip))?[..] {
            [(host, _)] => self.host_at(*host),
            _ => None,
        }
    }

    /// The first address of the guest that has this one, if that is one guest.
    pub(in super::super) fn first_of(&self, vni: u32, ip: IpAddr) -> Option<IpAddr> {
        match &self.places.get(&(vni, ip))?[..] {
            [(_, first)] => Some(*first),
            _ => None,
        }
    }

    /// Where a host is.
    pub(in super::super) fn address_of(&self, host: HostId) -> Option<IpAddr> {
        let at = (host.0 as usize).checked_sub(1).filter(|_| host != HERE)?;
        self.addresses.get(at).copied()
    }

    /// It was not reached.
    pub(in super::super) fn note_away(&mut self, now: Instant, host: HostId) {
        let before = self.away.get(&host).map(|it| it.wait);
        let wait = before.map_or(T_AWAY, |wait| (wait + wait).min(T_AWAY_MAX));
        self.away.insert(host, Away { until: Some(now + wait), wait });
    }

    /// It was.
    pub(in super::super) fn note_reached(&mut self, host: HostId) {
        self.away.remove(&host);
    }

    /// Time has passed.
    pub(in super::super) fn forgive(&mut self, now: Instant) {
        for away in self.away.values_mut() {
            away.until = away.until.filter(|until| now < *until);
        }
    }

    /// Whether it was not reached lately.
    pub(in super::super) fn is_away(&self, host: HostId) -> bool {
        self.away.get(&host).is_some_and(|it| it.until.is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VNI: u32 = 7;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn station(host: &str, ips: &[&str]) -> Station {
        let ips = ips.iter().map(|it| ip(it)).collect();
        let (vm, host) = (String::new(), ip(host));
        Station { vni: VNI, mac: [2; 6], vm, ips, host, listeners: None }
    }

    #[test]
    fn a_guest_is_where_its_station_is_and_nowhere_if_two_have_its_address() {
        let mut peers = Peers::default();
        peers.set(VNI, [2; 6], Some(&station("192.0.2.2", &["10.0.0.2", "10.0.0.2"])));
        peers.set(VNI, [3; 6], Some(&station("192.0.2.3", &["10.0.0.3"])));
        let two = peers.host_of(VNI, ip("10.0.0.2")).unwrap();
        assert_eq!(peers.address_of(two), Some(ip("192.0.2.2")));
        assert_eq!(peers.host_at(ip("::ffff:192.0.2.2")), Some(two));
        assert_eq!(peers.host_of(VNI, ip("10.0.0.4")), None);
        assert_eq!(peers.host_of(8, ip("10.0.0.2")), None, "another overlay");
        peers.set(VNI, [3; 6], Some(&station("192.0.2.3", &["10.0.0.3", "10.0.0.2"])));
        assert_eq!(peers.host_of(VNI, ip("10.0.0.2")), None, "both say so");
        assert_eq!(peers.host_at(ip("192.0.2.3")), Some(HostId(2)));
        peers.set(VNI, [3; 6], None);
        assert_eq!(peers.host_of(VNI, ip("10.0.0.2")), Some(two));
        assert_eq!(peers.host_at(ip("192.0.2.3")), None, "it has no station any more");
        assert_eq!((peers.address_of(HERE), peers.address_of(HostId(9))), (None, None));
    }

    #[test]
    fn a_guest_is_gone_when_no_station_of_its_host_has_its_address() {
        let mut peers = Peers::default();
        let mut gone = |mac, now: Option<&Station>| -> Vec<(u32, IpAddr)> {
            let (_, gone) = peers.set(VNI, [mac; 6], now);
            gone.into_iter().map(|it| (it.host.0, it.guest.1)).collect()
        };
        let two = |ips: &[&str]| station("192.0.2.2", ips);
        assert_eq!(gone(2, Some(&two(&["10.0.0.2", "10.0.0.3"]))), []);
        assert_eq!(gone(2, Some(&two(&["10.0.0.2", "10.0.0.3"]))), [], "as it was");
        assert_eq!(gone(2, Some(&two(&["10.0.0.2"]))), [(1, ip("10.0.0.3"))]);
        // Another one there has it, too; another host's does not count.
        assert_eq!(gone(3, Some(&two(&["10.0.0.2"]))), []);
        assert_eq!(gone(4, Some(&station("192.0.2.4", &["10.0.0.2"]))), []);
        assert_eq!(gone(2, None), []);
        assert_eq!(gone(3, Some(&station("192.0.2.3", &["10.0.0.2"]))), [(1, ip("10.0.0.2"))]);
        assert_eq!(gone(4, None), [(2, ip("10.0.0.2"))]);
        assert_eq!(gone(9, None), []);
    }

    #[test]
    fn nobody_is_sent_to_where_no_host_is() {
        for host in ["127.0.0.1", "224.0.0.1", "0.0.0.0", "255.255.255.255", "fe80::1", "::1"] {
            let mut peers = Peers::default();
            peers.set(VNI, [2; 6], Some(&station(host, &["10.0.0.2"])));
            assert_eq!(peers.host_of(VNI, ip("10.0.0.2")), None, "{host}");
        }
    }

    #[test]
    fn who_was_not_reached_is_left_alone_for_a_while() {
        let (mut peers, now) = (Peers::default(), Instant::from_secs(1000));
        peers.note_away(now, HostId(1));
        peers.forgive(now + Duration::from_secs(4));
        assert!(peers.is_away(HostId(1)) && !peers.is_away(HostId(2)));
        peers.forgive(now + T_AWAY);
        assert!(!peers.is_away(HostId(1)));
        // Twice as long each time, until it is reached.
        for wait in [10, 20, 40, 80, 160, 300, 300] {
            peers.note_away(now, HostId(1));
            peers.forgive(now + Duration::from_secs(wait - 1));
            assert!(peers.is_away(HostId(1)), "{wait}");
            peers.forgive(now + Duration::from_secs(wait));
            assert!(!peers.is_away(HostId(1)), "{wait}");
        }
        peers.note_reached(HostId(1));
        peers.note_away(now, HostId(1));
        peers.forgive(now + T_AWAY);
        assert!(!peers.is_away(HostId(1)));
    }
}
