//! Who is where, as the registry knows: what this host has is told there, and what it tells of
//! others goes to the overlays.
//!
//! What is here is compared as a whole ([`Desk::tell_registry`]) whenever ports or the
//! configuration have changed: no event of these has to be followed. A link that goes up or down
//! concerns its VM alone, because guests and VMMs decide how often that happens. What is heard is
//! applied station by station.
//!
//! A VM is claimed while its link is up. When a VMM stops its rings or goes, as after a migration,
//! the claim is given up at once, and the host that waits for it has it.

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
use super::here::{Vm, look, overlay_ports};
use crate::config::{Config, OverlayConfig};
use crate::port::Port;
use crate::port::overlay::OverlayPort;
use crate::start::network_of;
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
        self.cards = cards.collect();
        for vni in self.overlays.keys() {
            if let Some(overlay) = self.overlay(path, *vni) {
                overlay.forget_own_ips();
            }
        }
        let is_up = |key: &Key| self.cards.get(key).is_some_and(|port| self.vms[port].is_up);
        let gone: Vec<_> = self.own.keys().filter(|key| !is_up(key)).copied().collect();
        gone.into_iter().for_each(|key| self.release(path, key));
        let ports: Vec<_> = self.vms.keys().copied().collect();
        ports.into_iter().for_each(|port| self.tell_vm(path, port));
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
    fn tell_link(&mut self, path: &mut DataPath, port: PortId, is_up: bool) {
        let Some(vm) = self.vms.get_mut(&port) else { return };
        if std::mem::replace(&mut vm.is_up, is_up) != is_up {
            self.tell_vm(path, port);
        }
    }

    /// Tells what there is of the VM behind `port`.
    fn tell_vm(&mut self, path: &mut DataPath, port: PortId) {
        let Some(vm) = self.vms.get(&port) else { return };
        let is_up = vm.is_up;
        // Nobody is answered for its addresses, because the VM answers, whatever a registry has
        // told: a VM that was made anew has another MAC than the one on the list.
        if let Some(overlay) = self.overlay(path, vm.vni) {
            overlay.set_own_ips(port, &vm.ips, is_up);
        }
        let Some(key) = vm.key() else { return };
        if is_up {
            self.claim(path, port, key);
        } else if self.own.contains_key(&key) {
            self.release(path, key);
        }
        self.look_whether_away(path, &key);
    }

    fn claim(&mut self, path: &DataPath, port: PortId, key: Key) {
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
        let claim = known.map_or(Claim::Waits, |own| own.claim);
        if known.is_none_or(|own| own.station != station) {
            self.registry.claim(station.clone());
        }
        self.own.insert(key, Own { station, claim, listening });
    }

    fn release(&mut self, path: &mut DataPath, key: Key) {
        self.own.remove(&key);
        self.registry.release(key.0, key.1);
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
                self.listener_writes += 1;
                self.registry.claim(own.station.clone());
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
        let Some(Own { station, claim, .. }) = self.own.get_mut(&key) else { return };
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
            return;
        }
        if ports_changed {
            let Some(config) = self.changes.running() else { return };
            directory.tell(now, &config, path); // of all links, too
        } else {
            for port in links {
                let guest = path.ports.guest_mut(port);
                let is_up = guest.is_some_and(|guest| guest.port.link().is_some());
                directory.tell_link(path, port, is_up);
            }
        }
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
    use nightporter_core::time::Duration;
    use nightporter_registry::mail::Bell;
    use nix::sys::epoll::{Epoll, EpollCreateFlags};

    use super::*;
    use crate::arena_file::{self, ArenaFile};
    use crate::port::guest::GuestPort;
    use crate::port::vhost_user::VhostUserPort;
    use crate::start::device_of;
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
            let mut desk = Desk::new(START, Duration::ZERO);
            let mut directory = Directory::new(Box::new(notes.clone()));
            directory.tell(START, &config, &mut path);
            desk.directory = Some(directory);
            path.ports_changed = false;
            path.links_changed.clear();
            Self { desk, path, notes, dir, _lock: lock }
        }

        /// The link of a VM goes up or down, as its directory is told.
        fn link(&mut self, port: PortId, is_up: bool) {
            self.desk.directory.as_mut().unwrap().tell_link(&mut self.path, port, is_up);
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
        VMS.into_iter().for_each(|port| w.link(port, true));
        w.link(VMS[0], true);
        assert_eq!(w.notes.take(), ["+vm0", "+vm1", "+vm2"], "each once");
        // In truth all are down. It looks at the one of which it is told, and at no other.
        w.path.links_changed.insert(VMS[1]);
        w.desk.tell_registry(START, &mut w.path);
        assert_eq!(w.notes.take(), ["-1"]);
        w.desk.tell_registry(START, &mut w.path);
        assert_eq!(w.notes.take(), [""; 0]);
    }
}
