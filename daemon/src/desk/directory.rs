//! Who is where, as the registry knows: what this host has is told there, and what it tells of
//! others goes to the overlays.
//!
//! What is here is compared as a whole ([`Desk::tell_registry`]) whenever ports, links or the
//! configuration have changed: no event has to be followed. A VM is claimed while its link is up:
//! when a VMM stops its rings or goes, as after a migration, the claim goes at once, and whoever
//! waits for it has it. What is heard is applied station by station.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::ops::Bound;

use nightporter_api::{RegistryStatus, StationInfo, StationKey, StationPage};
use nightporter_core::port::PortId;
use nightporter_core::time::Instant;
use nightporter_registry::{
    Claim, FIRST_ADDRESS, Host, LAST_ADDRESS, Mac, News, Registry, Station, mac_text,
};

use super::Desk;
use crate::config::{Config, OverlayConfig, VmConfig};
use crate::port::Port;
use crate::start::network_of;
use crate::timer::monotonic_now;
use crate::worker::data_path::DataPath;

/// News that are heard at once; the others in the next turn.
const NEWS_AT_ONCE: usize = 1024;

/// Stations in one reply.
const STATIONS_PER_PAGE: usize = 500;

/// A station.
type Key = StationKey;

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
    /// The same by their hosts.
    at: BTreeSet<(u32, IpAddr, Mac)>,
    /// For how many of them there was no place.
    left_out: usize,
    /// This host on its overlays.
    joined: BTreeMap<u32, Host>,
    /// Overlays that know what the registry knows.
    told: BTreeMap<u32, OverlayConfig>,
    /// What is claimed here, and what has become of it.
    own: BTreeMap<Key, (Station, Claim)>,
    /// VMs of this host with a MAC, be they claimed or not; whether their link is up.
    vms: BTreeMap<Key, (PortId, bool)>,
    /// Those that are claimed and whose listeners are told.
    listening: BTreeMap<PortId, Key>,
    /// How often a claim was made again because these had changed, and how often they had.
    listener_writes: u64,
    listener_changes: u64,
}

/// What this host has on its overlays.
#[derive(Default)]
struct Here<'a> {
    /// What is to be claimed, without listeners.
    stations: BTreeMap<Key, Station>,
    vms: BTreeMap<Key, (PortId, bool)>,
    listening: BTreeMap<PortId, Key>,
    /// VMs with a MAC that are on no overlay.
    alone: Vec<PortId>,
    /// By network: for these addresses nobody is answered, for their VMs do it, whatever a registry
    /// has told: a VM that was made anew has another MAC than the one on the list.
    ips: BTreeMap<&'a Option<String>, BTreeSet<IpAddr>>,
}

impl Directory {
    pub(super) fn new(registry: Box<dyn Registry>) -> Self {
        Self {
            registry,
            link: Ok(()),
            lost: 0,
            hosts: BTreeMap::new(),
            stations: BTreeMap::new(),
            at: BTreeSet::new(),
            left_out: 0,
            joined: BTreeMap::new(),
            told: BTreeMap::new(),
            own: BTreeMap::new(),
            vms: BTreeMap::new(),
            listening: BTreeMap::new(),
            listener_writes: 0,
            listener_changes: 0,
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
            left_out: self.left_out as u64,
            claims,
            listener_changes: self.listener_changes,
            listener_writes: self.listener_writes,
        }
    }

    /// The station that is here, or else elsewhere.
    fn info(&self, key: &Key) -> Option<StationInfo> {
        let own = self.own.get(key);
        let station = own.map(|(station, _)| station).or_else(|| self.stations.get(key))?;
        let claim = own.map(|(_, claim)| claim_text(*claim));
        let listeners = station.listeners.as_ref();
        Some(StationInfo {
            vni: station.vni,
            mac: mac_text(station.mac),
            vm: station.vm.clone(),
            ips: station.ips.clone(),
            host: station.host,
            claim: claim.map(|(text, _)| text.into()),
            other: claim.and_then(|(_, other)| other),
            listens: listeners.map(|listeners| listeners.ports.clone()),
            listens_more: listeners.map_or(0, |listeners| listeners.more.into()),
        })
    }

    /// Another list of an operator.
    pub(super) fn set_list(&mut self, list: Vec<Station>) {
        self.registry.set_list(list);
    }

    /// Tells what this host has now, and new overlays what there is elsewhere.
    fn tell(&mut self, config: &Config, path: &mut DataPath) {
        if config.overlays.is_empty() && self.joined.is_empty() {
            return;
        }
        let overlays = config.overlays.iter();
        let overlays = overlays.map(|o| (network_of(&o.network).into(), (o.vni, o.local.ip())));
        path.toe.set_overlays(monotonic_now(), overlays.collect());
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
        let mut here = look(config, path);
        let ports = overlay_ports(path);
        for port in ports.values() {
            if let Port::Overlay(overlay) = &mut path.ports.of_mut(*port).port {
                let ips = here.ips.remove(&overlay.config().network);
                overlay.set_own_ips(ips.into_iter().flatten());
            }
        }
        let is_gone = |key: &&Key| !here.stations.contains_key(*key);
        let gone: Vec<_> = self.own.keys().filter(is_gone).copied().collect();
        for key in gone {
            self.own.remove(&key);
            self.registry.release(key.0, key.1);
            self.apply(path, &ports, key);
        }
        let mut before = std::mem::take(&mut self.own);
        for (key, mut station) in here.stations {
            let known = before.remove(&key);
            let port = here.vms.get(&key).map(|(port, _)| *port);
            let port = port.filter(|port| here.listening.contains_key(port));
            let was_told = port.is_some_and(|port| self.listening.get(&port) == Some(&key));
            station.listeners = match &known {
                // Changes have a pace of their own.
                Some((before, _)) if was_told => before.listeners.clone(),
                _ => port.and_then(|port| path.toe.listeners_of(port)),
            };
            let claim = known.as_ref().map_or(Claim::Waits, |(_, claim)| *claim);
            if known.is_none_or(|(before, _)| before != station) {
                self.registry.claim(station.clone());
            }
            self.own.insert(key, (station, claim));
        }
        (self.vms, self.listening) = (here.vms, here.listening);
        for key in self.vms.keys() {
            self.look_whether_away(path, key);
        }
        for port in here.alone {
            path.engine.set_away(port, false);
        }
        // One that is not there yet is told when it comes.
        let there = config.overlays.iter().filter(|overlay| ports.contains_key(&overlay.vni));
        let now = there.map(|overlay| (overlay.vni, overlay.clone())).collect();
        let before = std::mem::replace(&mut self.told, now);
        let is_new = |vni: &&u32| before.get(*vni) != self.told.get(*vni);
        self.apply_all(path, &ports, self.told.keys().filter(is_new).copied());
    }

    /// Tells at which ports these VMs listen now.
    fn tell_listeners(&mut self, path: &DataPath, ports: Vec<PortId>) {
        self.listener_changes = path.toe.listener_changes();
        for port in ports {
            let key = self.listening.get(&port);
            let Some((station, _)) = key.and_then(|key| self.own.get_mut(key)) else { continue };
            let now = path.toe.listeners_of(port);
            if station.listeners != now {
                station.listeners = now;
                self.listener_writes += 1;
                self.registry.claim(station.clone());
            }
        }
    }

    /// A VM whose link is down may be on another host.
    fn look_whether_away(&self, path: &mut DataPath, key: &Key) {
        if let Some((port, is_up)) = self.vms.get(key) {
            path.engine.set_away(*port, !is_up && self.stations.contains_key(key));
        }
    }

    /// Hears what is new. More may be left, which the registry's descriptor says.
    fn hear(&mut self, path: &mut DataPath) {
        let (ports, mut changed) = (overlay_ports(path), BTreeSet::new());
        for _ in 0..NEWS_AT_ONCE {
            let Some(news) = self.registry.poll() else { break };
            match news {
                News::Link(link) => self.set_link(link),
                News::LeftOut(n) => self.set_left_out(n),
                News::Host { vni, address, now } => {
                    changed.insert(vni);
                    match now {
                        Some(host) => self.hosts.insert((vni, address), host),
                        None => self.hosts.remove(&(vni, address)),
                    };
                }
                News::Claim { vni, mac, now } => {
                    self.set_claim((vni, mac), now);
                    self.apply(path, &ports, (vni, mac));
                }
                News::Station { vni, mac, now } => {
                    let key = (vni, mac);
                    self.at.extend(now.as_ref().map(|it| (vni, it.host, mac)));
                    let host = now.as_ref().map(|it| it.host);
                    let before = match now {
                        Some(station) => self.stations.insert(key, station),
                        None => self.stations.remove(&key),
                    };
                    if let Some(before) = before.filter(|it| Some(it.host) != host) {
                        self.at.remove(&(vni, before.host, mac));
                    }
                    path.toe.set_station(key, self.stations.get(&key));
                    self.look_whether_away(path, &key);
                    self.apply(path, &ports, key);
                }
            }
        }
        for (vni, port) in changed.into_iter().filter_map(|vni| Some((vni, *ports.get(&vni)?))) {
            for host in self.apply_hosts(path, vni, port) {
                let of_host = (vni, host, [0; 6])..=(vni, host, [0xff; 6]);
                for (vni, _, mac) in self.at.range(of_host) {
                    self.apply(path, &ports, (*vni, *mac));
                }
            }
        }
    }

    fn set_left_out(&mut self, n: usize) {
        match (std::mem::replace(&mut self.left_out, n), n) {
            (0, 1..) => tracing::warn!(
                left_out = n,
                "there are more stations on other hosts than there is room for: the others are \
                 found by their frames alone\n    fix: divide them among several prefixes"
            ),
            (1.., 0) => tracing::info!("there is room for all stations again"),
            _ => {}
        }
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
                    "the registry ({kind}) does not answer: {what}\n    known entries stay in \
                     force; the daemon tries again"
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
            Claim::Held | Claim::Unlisted | Claim::Waits => {
                tracing::debug!(vm, mac, vni, ?now, "claim");
            }
            Claim::Refused(host) => tracing::error!(
                vm, mac, vni, %host,
                "refused: another host has a VM with this MAC, and frames for it go there\n    \
                 fix: give one of the VMs another mac; a VM that has just moved is accepted when \
                 the other host releases its claim"
            ),
            Claim::Contested(host) => tracing::warn!(
                vm, mac, vni, %host,
                "another host has a VM with this MAC too, and was refused\n    \
                 fix: give one of the VMs another mac, unless this VM is moving there"
            ),
        }
    }

    /// Its overlay and the switch know of one station what the registry knows.
    fn apply(&self, path: &mut DataPath, ports: &BTreeMap<u32, PortId>, key: Key) {
        let Some(&port) = ports.get(&key.0) else { return };
        let Port::Overlay(overlay) = &mut path.ports.of_mut(port).port else { return };
        let claim = self.own.get(&key).map(|(_, claim)| *claim);
        let is_told = match (claim, self.stations.get(&key)) {
            (Some(Claim::Held | Claim::Contested(_)), _) => {
                overlay.tell_here(key.1);
                false
            }
            (_, Some(station)) => overlay.tell(key.1, station.host, &station.ips),
            (_, None) => {
                overlay.forget(key.1);
                false
            }
        };
        if is_told {
            path.engine.tell_station(port, key.1);
        } else {
            path.engine.forget_station(port, key.1);
        }
    }

    /// The overlay knows all hosts that the registry knows. Which have become peers or are none any
    /// more.
    fn apply_hosts(&self, path: &mut DataPath, vni: u32, port: PortId) -> BTreeSet<IpAddr> {
        let Port::Overlay(overlay) = &mut path.ports.of_mut(port).port else {
            return BTreeSet::new();
        };
        let hosts = self.hosts.range((vni, FIRST_ADDRESS)..=(vni, LAST_ADDRESS));
        let hosts = hosts.map(|(_, host)| SocketAddr::new(host.address, host.port));
        overlay.set_registered(hosts.collect())
    }

    /// The overlays of these numbers know all that the registry knows.
    fn apply_all(
        &self,
        path: &mut DataPath,
        ports: &BTreeMap<u32, PortId>,
        vnis: impl Iterator<Item = u32>,
    ) {
        for (vni, port) in vnis.filter_map(|vni| Some((vni, *ports.get(&vni)?))) {
            self.apply_hosts(path, vni, port); // of all whatever they are
            let all = (vni, [0; 6])..=(vni, [0xff; 6]);
            for key in self.stations.range(all.clone()).map(|(key, _)| key) {
                self.apply(path, ports, *key);
            }
            for key in self.own.range(all).map(|(key, _)| key) {
                self.apply(path, ports, *key);
            }
        }
    }
}

/// What this host has.
fn look<'a>(config: &'a Config, path: &DataPath) -> Here<'a> {
    let overlays: BTreeMap<_, _> = config.overlays.iter().map(|o| (&o.network, o)).collect();
    let vms: BTreeMap<&str, &VmConfig> =
        config.vms.iter().map(|vm| (vm.name.as_str(), vm)).collect();
    let mut here = Here::default();
    for (id, at) in path.ports.iter() {
        let Port::Guest(guest) = &at.port else { continue };
        let Some(vm) = vms.get(at.name.as_str()) else { continue };
        let Some(overlay) = overlays.get(&vm.network) else {
            here.alone.extend(vm.mac.map(|_| id));
            continue;
        };
        let is_up = guest.port.link().is_some();
        // A claim has no VLAN, and who asks without a tag cannot reach who is in one.
        let is_untagged = vm.vlan.is_none() && vm.trunk.is_none();
        let ips = vm.ips.clone().filter(|_| is_untagged).unwrap_or_default();
        if is_up {
            here.ips.entry(&vm.network).or_default().extend(&ips);
        }
        let Some(mac) = vm.mac else { continue };
        let key = (overlay.vni, mac);
        here.vms.insert(key, (id, is_up));
        if is_up {
            // Nor does another host reach it there by the virtual TOE.
            here.listening.extend(is_untagged.then_some((id, key)));
            let (vm, host) = (vm.name.clone(), overlay.local.ip());
            let station = Station { vni: overlay.vni, mac, vm, ips, host, listeners: None };
            here.stations.insert(key, station);
        }
    }
    here
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
        Claim::Unlisted => ("unlisted", None),
        Claim::Waits => ("waiting", None),
        Claim::Refused(host) => ("refused", Some(host)),
        Claim::Contested(host) => ("contested", Some(host)),
    }
}

impl Desk {
    /// Stations behind this one, or the first.
    pub(super) fn station_page(&self, after: Option<Key>) -> StationPage {
        let Some(directory) = &self.directory else { return StationPage::default() };
        let behind = (after.map_or(Bound::Unbounded, Bound::Excluded), Bound::Unbounded);
        let elsewhere = directory.stations.range(behind).map(|(key, _)| *key);
        let own = directory.own.range(behind).map(|(key, _)| *key);
        let most = STATIONS_PER_PAGE + 1;
        let keys: BTreeSet<_> = elsewhere.take(most).chain(own.take(most)).collect();
        let page: Vec<_> = keys.iter().take(STATIONS_PER_PAGE).collect();
        let next = page.last().filter(|_| keys.len() > page.len()).map(|key| **key);
        let stations = page.into_iter().filter_map(|key| directory.info(key)).collect();
        StationPage { stations, next }
    }

    /// The registry may have something new.
    pub(super) fn handle_registry(&mut self, path: &mut DataPath) {
        if let Some(directory) = &mut self.directory {
            directory.hear(path);
        }
    }

    /// If ports have changed since last time, or who listens there has: tells the registry what
    /// there is now, and hears what it says to that.
    pub(super) fn tell_registry(&mut self, now: Instant, path: &mut DataPath) {
        let listening = path.toe.take_bulletins(now);
        if let Some(directory) = &mut self.directory {
            directory.tell_listeners(path, listening);
        }
        if !std::mem::take(&mut path.ports_changed) {
            return;
        }
        let Some(config) = self.changes.running() else { return };
        let Some(directory) = &mut self.directory else { return };
        directory.tell(&config, path);
        directory.hear(path);
    }
}
