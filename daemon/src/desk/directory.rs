//! Who is where, as the registry knows: what this host has is told there, and what it tells of
//! others goes to the overlays.
//!
//! Both are compared as wholes ([`Desk::tell_registry`]) whenever ports, links or the configuration
//! have changed: no event has to be followed. A VM is claimed while its link is up: when a VMM
//! stops its rings or goes, as after a migration, the claim goes at once, and whoever waits for it
//! has it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};

use nightporter_api::{RegistryStatus, StationInfo, StationPage};
use nightporter_core::port::PortId;
use nightporter_registry::{
    Claim, FIRST_ADDRESS, Host, LAST_ADDRESS, Mac, News, Registry, STATIONS_MAX, Station, mac_text,
};

use super::Desk;
use crate::config::{Config, OverlayConfig, VmConfig};
use crate::port::Port;
use crate::worker::data_path::DataPath;

/// News that are heard in one turn.
const NEWS_PER_TURN: usize = 1024;

/// Stations in one reply.
const STATIONS_PER_PAGE: usize = 500;

/// A station: its overlay's number, its MAC.
type Key = (u32, Mac);

/// See the module doc.
#[derive(Debug)]
pub(super) struct Directory {
    registry: Box<dyn Registry>,
    /// Whether the registry answers.
    link: Result<(), String>,
    /// How often it did not any more.
    lost: u64,
    /// Of other hosts.
    hosts: BTreeMap<(u32, IpAddr), Host>,
    stations: BTreeMap<Key, Station>,
    /// This host on its overlays.
    joined: BTreeMap<u32, Host>,
    /// Overlays that know what the registry knows.
    told: BTreeMap<u32, OverlayConfig>,
    /// What is claimed here, and what has become of it.
    own: BTreeMap<Key, (Station, Claim)>,
}

impl Directory {
    pub(super) fn new(registry: Box<dyn Registry>) -> Self {
        Self {
            registry,
            link: Ok(()),
            lost: 0,
            hosts: BTreeMap::new(),
            stations: BTreeMap::new(),
            joined: BTreeMap::new(),
            told: BTreeMap::new(),
            own: BTreeMap::new(),
        }
    }

    /// What there is to say to operators.
    pub(super) fn status(&self) -> RegistryStatus {
        let mut claims = BTreeMap::new();
        for (_, claim) in self.own.values() {
            *claims.entry(claim_text(*claim).0.into()).or_insert(0) += 1;
        }
        RegistryStatus {
            kind: self.registry.kind().into(),
            trouble: self.link.clone().err(),
            lost: self.lost,
            hosts: self.hosts.len() as u64,
            stations: self.stations.len() as u64,
            claims,
        }
    }

    /// The station that is here, or else elsewhere.
    fn info(&self, key: &Key) -> Option<StationInfo> {
        let own = self.own.get(key);
        let station = own.map(|(station, _)| station).or_else(|| self.stations.get(key))?;
        let claim = own.map(|(_, claim)| claim_text(*claim));
        Some(StationInfo {
            vni: station.vni,
            mac: mac_text(station.mac),
            vm: station.vm.clone(),
            ips: station.ips.clone(),
            host: station.host,
            claim: claim.map(|(text, _)| text.into()),
            other: claim.and_then(|(_, other)| other),
        })
    }

    /// Another list of an operator.
    pub(super) fn set_list(&mut self, list: Vec<Station>) {
        self.registry.set_list(list);
    }

    /// Tells what this host has now.
    fn tell(&mut self, config: &Config, path: &mut DataPath) {
        let hosts = config
            .overlays
            .iter()
            .map(|o| (o.vni, Host { vni: o.vni, address: o.local.ip(), port: o.local.port() }));
        let hosts: BTreeMap<_, _> = hosts.collect();
        for vni in self.joined.keys().filter(|vni| !hosts.contains_key(vni)) {
            self.registry.leave(*vni);
        }
        for host in hosts.values().filter(|host| self.joined.get(&host.vni) != Some(host)) {
            self.registry.join(*host);
        }
        self.joined = hosts;
        let (here, away) = self.look(config, path);
        let gone: Vec<_> = self.own.keys().filter(|key| !here.contains_key(key)).copied().collect();
        let ports = overlay_ports(path);
        for key in gone {
            self.own.remove(&key);
            self.registry.release(key.0, key.1);
            if let Some(port) = ports.get(&key.0) {
                self.apply(path, *port, key);
            }
        }
        let mut before = std::mem::take(&mut self.own);
        for (key, station) in here {
            let known = before.remove(&key);
            let claim = known.as_ref().map_or(Claim::Waits, |(_, claim)| *claim);
            if known.is_none_or(|(before, _)| before != station) {
                self.registry.claim(station.clone());
            }
            self.own.insert(key, (station, claim));
        }
        for (port, is_away) in away {
            path.engine.set_away(port, is_away);
        }
    }

    /// The stations that are here; of VMs with a MAC, whether another host has them.
    fn look(
        &self,
        config: &Config,
        path: &DataPath,
    ) -> (BTreeMap<Key, Station>, Vec<(PortId, bool)>) {
        let overlays: BTreeMap<_, _> = config.overlays.iter().map(|o| (&o.network, o)).collect();
        let vms: BTreeMap<&str, &VmConfig> =
            config.vms.iter().map(|vm| (vm.name.as_str(), vm)).collect();
        let (mut here, mut away) = (BTreeMap::new(), Vec::new());
        for (id, at) in path.ports.iter() {
            let Port::Guest(guest) = &at.port else { continue };
            let Some(vm) = vms.get(at.name.as_str()) else { continue };
            let Some(overlay) = overlays.get(&vm.network) else { continue };
            let Some(mac) = vm.mac else { continue };
            let key = (overlay.vni, mac);
            let is_up = guest.port.link().is_some();
            if is_up {
                let (vm, ips) = (vm.name.clone(), vm.ips.clone().unwrap_or_default());
                let host = overlay.local.ip();
                here.insert(key, Station { vni: overlay.vni, mac, vm, ips, host });
            }
            away.push((id, !is_up && self.stations.contains_key(&key)));
        }
        (here, away)
    }

    /// Hears what is new; the overlays whose hosts have changed. More may be left.
    fn hear(&mut self, path: &mut DataPath) -> BTreeSet<u32> {
        let (ports, mut changed) = (overlay_ports(path), BTreeSet::new());
        for _ in 0..NEWS_PER_TURN {
            let Some(news) = self.registry.poll() else { break };
            match news {
                News::Link(link) => self.set_link(link),
                News::Host { vni, address, now } => {
                    changed.insert(vni);
                    match now {
                        Some(host) => self.hosts.insert((vni, address), host),
                        None => self.hosts.remove(&(vni, address)),
                    };
                }
                News::Claim { vni, mac, now } => {
                    self.set_claim((vni, mac), now);
                    if let Some(port) = ports.get(&vni) {
                        self.apply(path, *port, (vni, mac));
                    }
                }
                News::Station { vni, mac, now } => {
                    path.ports_changed = true; // one of ours may be away now, or back
                    let key = (vni, mac);
                    self.stations.remove(&key);
                    if let Some(station) = now.filter(|_| self.stations.len() < STATIONS_MAX) {
                        self.stations.insert(key, station);
                    }
                    if let Some(port) = ports.get(&vni) {
                        self.apply(path, *port, key);
                    }
                }
            }
        }
        changed
    }

    fn set_link(&mut self, link: Result<(), String>) {
        if link == self.link {
            return;
        }
        let kind = self.registry.kind();
        match &link {
            Ok(()) => tracing::info!("the registry ({kind}) answers"),
            Err(what) => {
                self.lost += 1;
                tracing::warn!(
                    "the registry ({kind}) does not answer: {what}\n    what was known stays in \
                     force; it is tried again"
                );
            }
        }
        self.link = link;
    }

    fn set_claim(&mut self, key: Key, now: Claim) {
        let Some((station, claim)) = self.own.get_mut(&key) else { return };
        if std::mem::replace(claim, now) == now {
            return;
        }
        let (vm, mac, vni) = (&station.vm, mac_text(key.1), key.0);
        match now {
            Claim::Held | Claim::Waits => tracing::debug!(vm, mac, vni, ?now, "claim"),
            Claim::Refused(host) => tracing::error!(
                vm, mac, vni, %host,
                "refused: another host has a VM with this MAC, and frames for it go there\n    \
                 fix: give one of them another mac; a VM that has just moved is taken in when the \
                 other host lets go of it"
            ),
            Claim::Contested(host) => tracing::warn!(
                vm, mac, vni, %host,
                "another host has a VM with this MAC too, and was refused\n    \
                 fix: give one of them another mac; a VM that moves there will be gone here"
            ),
        }
    }

    /// The overlay at `port` knows of one station what the registry knows.
    fn apply(&self, path: &mut DataPath, port: PortId, key: Key) {
        let Port::Overlay(overlay) = &mut path.ports.of_mut(port).port else { return };
        let claim = self.own.get(&key).map(|(_, claim)| *claim);
        match (claim, self.stations.get(&key)) {
            (Some(Claim::Held | Claim::Contested(_)), _) => overlay.tell_here(key.1),
            (_, Some(station)) => overlay.tell(key.1, station.host, &station.ips),
            (_, None) => overlay.forget(key.1),
        }
    }

    /// The overlays of these numbers know all that the registry knows.
    fn apply_all(&self, path: &mut DataPath, vnis: impl Iterator<Item = u32>) {
        let ports = overlay_ports(path);
        for (vni, port) in vnis.filter_map(|vni| Some((vni, *ports.get(&vni)?))) {
            let Port::Overlay(overlay) = &mut path.ports.of_mut(port).port else { continue };
            let hosts =
                self.hosts.range((vni, FIRST_ADDRESS)..=(vni, LAST_ADDRESS)).map(|(_, host)| host);
            overlay.set_registered(hosts.map(|h| SocketAddr::new(h.address, h.port)).collect());
            let all = (vni, [0; 6])..=(vni, [0xff; 6]);
            for key in self.stations.range(all.clone()).map(|(key, _)| key) {
                self.apply(path, port, *key);
            }
            for key in self.own.range(all).map(|(key, _)| key) {
                self.apply(path, port, *key);
            }
        }
    }
}

fn overlay_ports(path: &DataPath) -> BTreeMap<u32, PortId> {
    let ports = path.ports.iter().filter_map(|(id, at)| match &at.port {
        Port::Overlay(overlay) => Some((overlay.config().vni, id)),
        _ => None,
    });
    ports.collect()
}

/// In one word, and who else has to do with it.
fn claim_text(claim: Claim) -> (&'static str, Option<IpAddr>) {
    match claim {
        Claim::Held => ("held", None),
        Claim::Waits => ("waiting", None),
        Claim::Refused(host) => ("refused", Some(host)),
        Claim::Contested(host) => ("contested", Some(host)),
    }
}

impl Desk {
    /// Stations from the one at place `from` on.
    pub(super) fn station_page(&self, from: u64) -> StationPage {
        let Some(directory) = &self.directory else { return StationPage::default() };
        let keys: BTreeSet<_> = directory.stations.keys().chain(directory.own.keys()).collect();
        let from = usize::try_from(from).unwrap_or(usize::MAX);
        let page = keys.iter().skip(from).take(STATIONS_PER_PAGE);
        let stations: Vec<_> = page.filter_map(|key| directory.info(key)).collect();
        let next = from.saturating_add(stations.len());
        StationPage { stations, next: (next < keys.len()).then_some(next as u64) }
    }

    /// The registry may have something new.
    pub(super) fn handle_registry(&mut self, path: &mut DataPath) {
        let Some(directory) = &mut self.directory else { return };
        let changed = directory.hear(path);
        directory.apply_all(path, changed.into_iter());
    }

    /// If ports have changed since last time: tells the registry what there is now, and new
    /// overlays what there is elsewhere.
    pub(super) fn tell_registry(&mut self, path: &mut DataPath) {
        // What is heard may change what is here: a VM that lives elsewhere.
        while std::mem::take(&mut path.ports_changed) {
            let Some(config) = self.changes.running() else { return };
            let Some(directory) = &mut self.directory else { return };
            directory.tell(&config, path);
            let now =
                config.overlays.iter().map(|overlay| (overlay.vni, overlay.clone())).collect();
            let before = std::mem::replace(&mut directory.told, now);
            let told = &directory.told;
            let new = told.iter().filter(|(vni, overlay)| before.get(vni) != Some(overlay));
            directory.apply_all(path, new.map(|(vni, _)| *vni));
            self.handle_registry(path);
        }
    }
}
