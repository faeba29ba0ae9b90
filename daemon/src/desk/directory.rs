//! Who is where, as the registry knows: what this host has is told there, and what it tells of
//! others goes to the overlays.
//!
//! What is here is compared as a whole ([`Desk::tell_registry`]) whenever ports or the
//! configuration have changed: no event of these has to be followed. A link that goes up or down
//! concerns its VM alone, because guests and VMMs decide how often that happens. What is heard is
//! applied station by station.
//!
//! A VM is claimed while its link is up. When a VMM stops its rings or goes, as after a migration,
//! the claim is given up at once, and the host that waits for it has it. Claims of a VM have a
//! [`Pace`], so that a guest that resets its network card in a loop does not load the registry.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::ops::Bound;

use nightporter_api::{RegistryStatus, StationInfo, StationKey, StationPage};
use nightporter_core::port::PortId;
use nightporter_core::time::{Duration, Instant};
use nightporter_registry::{
    Claim, FIRST_ADDRESS, Host, LAST_ADDRESS, Mac, News, Registry, Station, mac_text,
};

use super::Desk;
use super::here::{Vm, look, overlay_ports};
use crate::config::{Config, OverlayConfig};
use crate::pace::{BURST, Pace, REFILL};
use crate::port::Port;
use crate::port::build::network_of;
use crate::port::overlay::OverlayPort;
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
    /// The ports of the overlays with these numbers.
    overlays: BTreeMap<u32, PortId>,
    /// What is claimed here.
    own: BTreeMap<Key, Own>,
    /// VMs of this host on overlays, be they claimed or not.
    vms: BTreeMap<PortId, Vm>,
    /// Those with a MAC.
    cards: BTreeMap<Key, PortId>,
    /// Of claims whose links have come up.
    pace: Pace<Key>,
    /// How often a claim was made again because these had changed, and how often they had.
    listener_writes: u64,
    listener_changes: u64,
}

/// A station that is claimed here.
#[derive(Debug)]
struct Own {
    station: Station,
    /// What has become of the claim.
    claim: Claim,
    /// The port of the VM, if other hosts reach its listeners.
    listening: Option<PortId>,
    /// The registry was told. Otherwise its pace does not allow it yet.
    is_told: bool,
}

impl Own {
    /// Tells the registry the claim as it is now, if it was told of it before.
    fn tell(&self, registry: &mut dyn Registry) {
        if self.is_told {
            registry.claim(self.station.clone());
        }
    }
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
            overlays: BTreeMap::new(),
            own: BTreeMap::new(),
            vms: BTreeMap::new(),
            cards: BTreeMap::new(),
            pace: Pace::new(Duration::ZERO),
            listener_writes: 0,
            listener_changes: 0,
        }
    }

    /// What there is to say to operators.
    pub(super) fn status(&self) -> RegistryStatus {
        let mut claims = BTreeMap::new();
        for own in self.own.values() {
            *claims.entry(claim_text(own.claim).0.into()).or_insert(0) += 1;
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
        let station = own.map(|own| &own.station).or_else(|| self.stations.get(key))?;
        let claim = own.map(|own| claim_text(own.claim));
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
    fn tell(&mut self, now: Instant, config: &Config, path: &mut DataPath) {
        if config.overlays.is_empty() && self.joined.is_empty() {
            return;
        }
        self.tell_hosts(now, config, path);
        self.overlays = overlay_ports(path);
        let (vms, alone) = look(config, path);
        self.vms = vms;
        let cards = self.vms.iter().filter_map(|(port, vm)| Some((vm.key()?, *port)));
        let before = std::mem::replace(&mut self.cards, cards.collect());
        for key in before.keys().filter(|key| !self.cards.contains_key(key)) {
            self.pace.forget(*key);
        }
        for vni in self.overlays.keys() {
            if let Some(overlay) = self.overlay(path, *vni) {
                overlay.forget_own_ips();
            }
        }
        let is_up = |key: &Key| self.cards.get(key).is_some_and(|port| self.vms[port].is_up);
        let gone: Vec<_> = self.own.keys().filter(|key| !is_up(key)).copied().collect();
        gone.into_iter().for_each(|key| self.release(path, key));
        let ports: Vec<_> = self.vms.keys().copied().collect();
        ports.into_iter().for_each(|port| self.tell_vm(now, path, port));
        for port in alone {
            path.engine.set_away(port, false);
        }
        // One that is not there yet is told when it comes.
        let overlays = config.overlays.iter();
        let there = overlays.filter(|overlay| self.overlays.contains_key(&overlay.vni));
        let told = there.map(|overlay| (overlay.vni, overlay.clone())).collect();
        let before = std::mem::replace(&mut self.told, told);
        let is_new = |vni: &&u32| before.get(*vni) != self.told.get(*vni);
        self.apply_all(path, self.told.keys().filter(is_new).copied());
    }

    /// Tells on which overlays this host is.
    fn tell_hosts(&mut self, now: Instant, config: &Config, path: &mut DataPath) {
        let overlays = config.overlays.iter();
        let overlays = overlays.map(|o| (network_of(&o.network).into(), (o.vni, o.local.ip())));
        path.toe.set_overlays(now, overlays.collect());
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
    }

    /// The link of the VM behind `port` may have gone up or down, and nothing else has changed.
    fn tell_link(&mut self, now: Instant, path: &mut DataPath, port: PortId, is_up: bool) {
        let Some(vm) = self.vms.get_mut(&port) else { return };
        if std::mem::replace(&mut vm.is_up, is_up) != is_up {
            self.tell_vm(now, path, port);
        }
    }

    /// Tells what there is of the VM behind `port`.
    fn tell_vm(&mut self, now: Instant, path: &mut DataPath, port: PortId) {
        let Some(vm) = self.vms.get(&port) else { return };
        let is_up = vm.is_up;
        // Nobody is answered for its addresses, because the VM answers, whatever a registry has
        // told: a VM that was made anew has another MAC than the one on the list.
        if let Some(overlay) = self.overlay(path, vm.vni) {
            overlay.set_own_ips(port, &vm.ips, is_up);
        }
        let Some(key) = vm.key() else { return };
        if is_up {
            self.claim(now, path, port, key);
        } else if self.own.contains_key(&key) {
            self.release(path, key);
        }
        self.look_whether_away(path, &key);
    }

    fn claim(&mut self, now: Instant, path: &DataPath, port: PortId, key: Key) {
        let Some(vm) = self.vms.get(&port) else { return };
        let known = self.own.get(&key);
        let listening = vm.is_untagged.then_some(port);
        let listeners = match known {
            // Changes have a pace of their own.
            Some(own) if own.listening == listening => own.station.listeners.clone(),
            _ => listening.and_then(|port| path.toe.listeners_of(port)),
        };
        let Vm { vni, host, .. } = *vm;
        let (name, ips) = (vm.name.clone(), vm.ips.clone());
        let station = Station { vni, mac: key.1, vm: name, ips, host, listeners };
        if let Some(own) = self.own.get_mut(&key) {
            own.listening = listening;
            if own.station != station {
                own.station = station;
                own.tell(&mut *self.registry);
            }
            return;
        }
        let mut own = Own { station, claim: Claim::Waits, listening, is_told: false };
        if !self.registry.is_shared() {
            own.is_told = true;
            own.tell(&mut *self.registry);
        }
        let waits = !own.is_told && self.pace.note(now, key);
        self.own.insert(key, own);
        self.claim_due(now);
        if waits && let Some(Own { station, is_told: false, .. }) = self.own.get(&key) {
            let (vm, mac) = (&station.vm, mac_text(key.1));
            let seconds = REFILL.as_millis() / 1000;
            tracing::warn!(
                vm,
                mac,
                vni,
                "the VM's link has come up more than {BURST} times within minutes: its claim \
                 waits, {seconds} s at most\n    until then other hosts find the VM by its frames"
            );
        }
    }

    /// Tells the registry of VMs whose links have come up, as their pace allows.
    fn claim_due(&mut self, now: Instant) {
        let Self { pace, own, registry, .. } = self;
        let waits = |own: Option<&Own>| own.is_some_and(|own| !own.is_told);
        while let Some(key) = pace.poll_due(now, |key| waits(own.get(&key))) {
            if let Some(own) = own.get_mut(&key) {
                own.is_told = true;
                own.tell(&mut **registry);
            }
        }
    }

    fn release(&mut self, path: &mut DataPath, key: Key) {
        if self.own.remove(&key).is_some_and(|own| own.is_told) {
            self.registry.release(key.0, key.1);
        }
        self.apply(path, key);
    }

    /// Tells at which ports these VMs listen now.
    fn tell_listeners(&mut self, path: &DataPath, ports: Vec<PortId>) {
        self.listener_changes = path.toe.listener_changes();
        for port in ports {
            let vm = self.vms.get(&port).filter(|vm| vm.is_untagged);
            let own = vm.and_then(Vm::key).and_then(|key| self.own.get_mut(&key));
            let Some(own) = own else { continue };
            let now = path.toe.listeners_of(port);
            if own.station.listeners != now {
                own.station.listeners = now;
                self.listener_writes += u64::from(own.is_told);
                own.tell(&mut *self.registry);
            }
        }
    }

    /// A VM whose link is down may be on another host.
    fn look_whether_away(&self, path: &mut DataPath, key: &Key) {
        if let Some((port, vm)) = self.cards.get(key).and_then(|it| self.vms.get_key_value(it)) {
            path.engine.set_away(*port, !vm.is_up && self.stations.contains_key(key));
        }
    }

    /// Hears what is new. More may be left, which the registry's descriptor says.
    fn hear(&mut self, path: &mut DataPath) {
        let mut changed = BTreeSet::new();
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
                    self.apply(path, (vni, mac));
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
                    self.apply(path, key);
                }
            }
        }
        for vni in changed {
            for host in self.apply_hosts(path, vni) {
                let of_host = (vni, host, [0; 6])..=(vni, host, [0xff; 6]);
                for (vni, _, mac) in self.at.range(of_host) {
                    self.apply(path, (*vni, *mac));
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
        let Some(Own { station, claim, is_told: true, .. }) = self.own.get_mut(&key) else {
            return; // it is about a claim that was given up
        };
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

    /// The port of the overlay `vni`. `None`: it is not there.
    fn overlay<'p>(&self, path: &'p mut DataPath, vni: u32) -> Option<&'p mut OverlayPort> {
        match &mut path.ports.of_mut(*self.overlays.get(&vni)?).port {
            Port::Overlay(overlay) => Some(overlay),
            _ => None, // it goes, and the next look at all ports is about to come
        }
    }

    /// Its overlay and the switch know of one station what the registry knows.
    fn apply(&self, path: &mut DataPath, key: Key) {
        let Some(&port) = self.overlays.get(&key.0) else { return };
        let Some(overlay) = self.overlay(path, key.0) else { return };
        let claim = self.own.get(&key).map(|own| own.claim);
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
    fn apply_hosts(&self, path: &mut DataPath, vni: u32) -> BTreeSet<IpAddr> {
        let Some(overlay) = self.overlay(path, vni) else { return BTreeSet::new() };
        let hosts = self.hosts.range((vni, FIRST_ADDRESS)..=(vni, LAST_ADDRESS));
        let hosts = hosts.map(|(_, host)| SocketAddr::new(host.address, host.port));
        overlay.set_registered(hosts.collect())
    }

    /// The overlays of these numbers know all that the registry knows.
    fn apply_all(&self, path: &mut DataPath, vnis: impl Iterator<Item = u32>) {
        for vni in vnis {
            self.apply_hosts(path, vni); // of all whatever they are
            let all = (vni, [0; 6])..=(vni, [0xff; 6]);
            for key in self.stations.range(all.clone()).map(|(key, _)| key) {
                self.apply(path, *key);
            }
            for key in self.own.range(all).map(|(key, _)| key) {
                self.apply(path, *key);
            }
        }
    }
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

    /// When [`Self::tell_registry`] has something to tell, if nothing else happens.
    pub(super) fn claim_timeout(&self) -> Option<Instant> {
        self.directory.as_ref()?.pace.poll_timeout()
    }

    /// The registry may have something new.
    pub(super) fn handle_registry(&mut self, path: &mut DataPath) {
        if let Some(directory) = &mut self.directory {
            directory.hear(path);
        }
    }

    /// If ports or links have changed since last time, or listeners have: tells the registry what
    /// there is now, and hears what it says to that.
    pub(super) fn tell_registry(&mut self, now: Instant, path: &mut DataPath) {
        let listening = path.toe.take_bulletins(now);
        let ports_changed = std::mem::take(&mut path.ports_changed);
        let links = std::mem::take(&mut path.links_changed);
        let Some(directory) = &mut self.directory else { return };
        directory.tell_listeners(path, listening);
        if !ports_changed && links.is_empty() {
            directory.claim_due(now);
            return;
        }
        if ports_changed {
            let Some(config) = &self.config else { return };
            directory.tell(now, config, path); // of all links, too
        } else {
            for port in links {
                let guest = path.ports.guest_mut(port);
                let is_up = guest.is_some_and(|guest| guest.port.link().is_some());
                directory.tell_link(now, path, port, is_up);
            }
        }
        directory.claim_due(now); // of links that are up now
        directory.hear(path);
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;
    use std::os::fd::BorrowedFd;
    use std::path::PathBuf;
    use std::sync::{Arc, Mutex};

    use nightporter_core::engine::{Engine, EngineConfig};
    use nightporter_core::port::{GuestConfig, PortConfig};
    use nightporter_registry::mail::Bell;
    use nix::sys::epoll::{Epoll, EpollCreateFlags};

    use super::*;
    use crate::arena_file::{self, ArenaFile};
    use crate::port::build::device_of;
    use crate::port::guest::GuestPort;
    use crate::port::vhost_user::VhostUserPort;
    use crate::vhost::listener::Access;

    /// A registry that notes what it is told, and tells nothing.
    #[derive(Clone, Debug)]
    struct Notes {
        /// `+` and the VM that is claimed, or `-` and the last byte of the MAC that is released.
        list: Arc<Mutex<Vec<String>>>,
        bell: Bell,
    }

    impl Notes {
        fn add(&self, note: String) {
            self.list.lock().unwrap().push(note);
        }

        fn take(&self) -> Vec<String> {
            std::mem::take(&mut self.list.lock().unwrap())
        }
    }

    impl Registry for Notes {
        fn kind(&self) -> &'static str {
            "notes"
        }

        fn fd(&self) -> BorrowedFd<'_> {
            self.bell.fd()
        }

        fn is_shared(&self) -> bool {
            true
        }

        fn join(&mut self, _: Host) {}

        fn leave(&mut self, _: u32) {}

        fn claim(&mut self, station: Station) {
            self.add(format!("+{}", station.vm));
        }

        fn release(&mut self, _: u32, mac: Mac) {
            self.add(format!("-{}", mac[5]));
        }

        fn poll(&mut self) -> Option<News> {
            None
        }
    }

    /// A desk whose directory knows of three VMs on an overlay, all without a VMM; nothing is
    /// known of the configuration any more.
    struct World {
        desk: Desk,
        path: DataPath,
        notes: Notes,
        dir: PathBuf,
        _lock: ArenaFile,
    }

    const START: Instant = Instant::from_secs(1000);
    const VMS: [PortId; 3] = [PortId(0), PortId(1), PortId(2)];

    impl World {
        fn new(name: &str) -> Self {
            let mut text = "[[overlay]]\nname = \"o\"\nvni = 7\nlocal = \"127.0.0.1\"\n\
                            peers = [\"127.0.0.2\"]\n"
                .to_owned();
            for n in 0..VMS.len() {
                text += &format!("[[vm]]\nname = \"vm{n}\"\nmac = \"02:00:00:00:00:0{n}\"\n");
            }
            let config = Config::parse("np.toml", &text, &BTreeMap::new()).unwrap();
            let dir = std::env::temp_dir().join(format!("np-told-{}-{name}", std::process::id()));
            std::fs::create_dir(&dir).unwrap();
            let size = arena_file::size_for(1, 1);
            let (arena, lock) = arena_file::open(&dir.join("arena"), size).unwrap();
            let engine = Engine::new(START, EngineConfig::new(1, [1, 2, 3, 4]), arena);
            let mut path = DataPath::new(START, engine, NonZeroU64::MIN);
            let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).unwrap();
            for vm in &config.vms {
                let device = device_of(vm, Access::default(), false);
                let port = VhostUserPort::without_socket(&device).unwrap();
                let port = Port::Guest(Box::new(GuestPort::new(port, None)));
                let config = PortConfig::guest(&vm.name, GuestConfig::default());
                path.add_port(START, &epoll, port, config).unwrap();
            }
            let notes = Notes { list: Arc::default(), bell: Bell::new().unwrap() };
            let mut desk = Desk::new();
            let mut directory = Directory::new(Box::new(notes.clone()));
            directory.tell(START, &config, &mut path);
            desk.directory = Some(directory);
            path.ports_changed = false;
            path.links_changed.clear();
            Self { desk, path, notes, dir, _lock: lock }
        }

        /// The link of a VM goes up or down, as its directory is told.
        fn link(&mut self, now: Instant, port: PortId, is_up: bool) {
            self.desk.directory.as_mut().unwrap().tell_link(now, &mut self.path, port, is_up);
        }
    }

    impl Drop for World {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.dir);
        }
    }

    #[test]
    fn a_link_that_goes_down_concerns_its_vm_alone() {
        let mut w = World::new("link");
        assert_eq!(w.notes.take(), [""; 0], "no link is up yet");
        VMS.into_iter().for_each(|port| w.link(START, port, true));
        w.link(START, VMS[0], true);
        assert_eq!(w.notes.take(), ["+vm0", "+vm1", "+vm2"], "each once");
        // In truth all are down. It looks at the one of which it is told, and at no other.
        w.path.links_changed.insert(VMS[1]);
        w.desk.tell_registry(START, &mut w.path);
        assert_eq!(w.notes.take(), ["-1"]);
        w.desk.tell_registry(START, &mut w.path);
        assert_eq!(w.notes.take(), [""; 0]);
    }

    #[test]
    fn a_vm_that_is_reset_in_a_loop_is_claimed_eight_times_and_then_once_a_minute() {
        let mut w = World::new("reset");
        for n in 0..BURST {
            w.link(START, VMS[0], true);
            assert_eq!(w.notes.take(), ["+vm0"], "at once: {n}");
            w.link(START, VMS[0], false);
            assert_eq!(w.notes.take(), ["-0"], "and given up at once: {n}");
        }
        w.link(START, VMS[0], true);
        assert_eq!(w.notes.take(), [""; 0]);
        let mut told = Vec::new();
        for ms in 1..300_000 {
            let now = START + Duration::from_millis(ms);
            w.link(now, VMS[0], false);
            w.link(now, VMS[0], true);
            w.desk.tell_registry(now, &mut w.path);
            told.extend(w.notes.take().into_iter().map(|note| (ms, note)));
        }
        let told: Vec<_> = told.iter().map(|(ms, note)| (*ms, note.as_str())).collect();
        let minutes = [60_000, 120_000, 180_000, 240_000];
        let claims = minutes.iter().flat_map(|ms| [(*ms, "+vm0"), (ms + 1, "-0")]);
        assert_eq!(told, claims.collect::<Vec<_>>());
        // Others are claimed at once, and the VM itself as soon as its time has come.
        let now = START + Duration::from_secs(299);
        w.link(now, VMS[1], true);
        assert_eq!(w.notes.take(), ["+vm1"]);
        let due = w.desk.claim_timeout();
        assert_eq!(due, Some(START + Duration::from_secs(300)));
        w.desk.tell_registry(due.unwrap(), &mut w.path);
        assert_eq!(w.notes.take(), ["+vm0"]);
        assert_eq!(w.desk.claim_timeout(), None);
    }

    #[test]
    fn a_claim_that_waits_is_told_as_it_is_when_its_time_has_come() {
        let mut w = World::new("waits");
        for _ in 0..=BURST {
            w.link(START, VMS[0], false);
            w.link(START, VMS[0], true);
        }
        w.notes.take();
        let claims = w.desk.directory.as_ref().unwrap().status().claims;
        assert_eq!(claims, BTreeMap::from([("waiting".into(), 1)]));
        // Its link goes down: there is nothing to give up, and nothing to claim later.
        w.link(START, VMS[0], false);
        w.desk.tell_registry(START + REFILL, &mut w.path);
        assert_eq!(w.notes.take(), [""; 0]);
        // It is claimed at once when it comes up after that, because the time has passed.
        w.link(START + REFILL, VMS[0], true);
        assert_eq!(w.notes.take(), ["+vm0"]);
    }
}
