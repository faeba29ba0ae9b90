//! The peers of an overlay: the hosts that it speaks with.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use crate::config::OverlayConfig;
use crate::config::overlay::{PEERS_MAX, may_be_peer};

/// See the module doc.
#[derive(Debug)]
pub(super) struct Peers {
    pub(super) config: OverlayConfig,
    /// Those of the configuration, then others.
    list: Vec<SocketAddr>,
    /// The number of hosts that are none, for lack of room.
    left_out: usize,
}

impl Peers {
    /// Those with which an overlay is opened.
    pub(super) fn new(config: &OverlayConfig) -> Self {
        Self { config: config.clone(), list: config.peers.clone(), left_out: 0 }
    }

    pub(super) fn list(&self) -> &[SocketAddr] {
        &self.list
    }

    /// The registry has these hosts. When there are too many, those that are peers stay. Returns
    /// the addresses of those that became peers or are peers no longer: their stations have to be
    /// told again.
    #[must_use]
    pub(super) fn set_registered(&mut self, mut hosts: Vec<SocketAddr>) -> BTreeSet<IpAddr> {
        let Self { config, list, .. } = self;
        hosts.retain(|host| {
            let may_be = may_be_peer(config.local, *host);
            if !may_be && host.ip() != config.local.ip() {
                let port = &config.name;
                tracing::debug!(%port, %host, "the registry has a host that cannot be a peer");
            }
            may_be && config.peers.iter().all(|peer| peer.ip() != host.ip())
        });
        hosts.sort_by_key(|host| list.iter().all(|peer| peer.ip() != host.ip()));
        let left_out = (config.peers.len() + hosts.len()).saturating_sub(PEERS_MAX);
        let now: Vec<_> = config.peers.iter().copied().chain(hosts).take(PEERS_MAX).collect();
        if std::mem::replace(&mut self.left_out, left_out) == 0 && left_out > 0 {
            let name = &config.name;
            tracing::warn!(
                port = %name, left_out,
                "an overlay has {PEERS_MAX} peers at most: nothing goes to and comes from the \
                 other hosts\n    fix: divide the hosts among several overlays"
            );
        }
        let ips = |hosts: &[SocketAddr]| hosts.iter().map(SocketAddr::ip).collect::<BTreeSet<_>>();
        let changed = &ips(list) ^ &ips(&now);
        *list = now;
        changed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(last: u8) -> SocketAddr {
        SocketAddr::from(([127, 0, 3, last], 4789))
    }

    fn peers() -> Peers {
        Peers::new(&OverlayConfig {
            name: "over".into(),
            network: None,
            vni: 7,
            local: host(1),
            peers: vec![host(2)],
            mtu: 1450,
        })
    }

    fn of(last: &[u8]) -> BTreeSet<IpAddr> {
        last.iter().map(|n| host(*n).ip()).collect()
    }

    #[test]
    fn news_of_a_host_are_of_its_stations_alone() {
        let mut peers = peers();
        let strangers = ["192.0.2.1:0", "224.0.0.1:4789", "127.0.3.9:50000"];
        let mut news = |last: &[u8]| {
            let strangers = strangers.iter().map(|it| it.parse().unwrap());
            peers.set_registered(last.iter().map(|n| host(*n)).chain(strangers).collect())
        };
        assert_eq!(news(&[1, 2, 3]), of(&[3]), "not this host, nor a configured peer");
        assert_eq!(news(&[3]), of(&[]));
        assert_eq!(news(&[4, 3]), of(&[4]));
        assert_eq!(news(&[]), of(&[3, 4]));
    }

    #[test]
    fn peers_stay_when_there_are_more_hosts_than_places() {
        let mut peers = peers();
        let most = u8::try_from(PEERS_MAX).unwrap();
        let many: Vec<_> = (100..100 + most).map(host).collect();
        let _ = peers.set_registered(many[1..].to_vec());
        assert_eq!((peers.list().len(), peers.list()[0]), (PEERS_MAX, host(2)));
        let (before, of_lower) = (peers.list().to_vec(), many[0].ip());
        assert_eq!(peers.set_registered(many.clone()), BTreeSet::new(), "{of_lower} is too many");
        assert_eq!(peers.list(), before);
        let changed = peers.set_registered([&many[..1], &many[2..]].concat());
        assert_eq!(changed, BTreeSet::from([of_lower, many[1].ip()]), "a place is free");
    }
}
