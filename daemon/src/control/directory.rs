//! The stations of all hosts and the host of each, as the registry knows them: what this host has
//! is announced there, and the worker is told of the others.
//!
//! The configuration is compared as a whole ([`Directory::tell`]) whenever it or an overlay has
//! changed: no event of these has to be followed. A link that goes up or down concerns its VM
//! alone, because guests and VMMs decide how often that happens. News of the registry are applied
//! station by station, some in each turn of control, and none while many orders wait for the worker
//! ([`Directory::hear`]): then they wait in the registry.
//!
//! A VM is claimed while its link is up. When a VMM stops its rings or goes, as after a migration,
//! the claim is given up at once, and the host that waits for it has it. Claims of a VM have a
//! [`Pace`], so that a guest that resets its network card in a loop does not load the registry.

mod peers;
mod vms;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::ops::Bound;

use nightporter_api::{RegistryStatus, StationInfo, StationKey, StationPage};
use nightporter_core::time::{Duration, Instant};
use nightporter_registry::{
    Claim, FIRST_ADDRESS, Host, LAST_ADDRESS, Listeners, News, Registry, Station, mac_text,
};
use nix::sys::epoll::{Epoll, EpollEvent, EpollFlags};

use super::Control;
use crate::config::Config;
use crate::pace::{BURST, Pace, REFILL};
use crate::port::build::network_of;
use crate::token::Token;
use crate::worker::orders::{ControlMail, Order, VmPlace};
use peers::Peers;
use vms::{Vm, vms_of};

/// News that are heard in a turn; the others in the next.
const NEWS_PER_TURN: usize = 1024;
/// Orders that may wait for the worker before news are heard. One of a host may be about all its
/// stations, so at most `STATIONS_MAX` wait besides, of some 200 bytes each.
const WAITING_MAX: usize = 1024;

/// Stations in one reply.
const STATIONS_PER_PAGE: usize = 500;

/// A station.
type Key = StationKey;

/// See the module doc.
#[derive(Debug)]
pub(super) struct Directory {
    registry: Box<dyn Registry>,
    /// The registry may have news.
    has_news: bool,
    /// Whether the registry answers.
    link: Result<(), String>,
    /// How often it did not any more.
    lost: u64,
    /// Of other hosts.
    hosts: BTreeMap<(u32, IpAddr), Host>,
    stations: BTreeMap<Key, Station>,
    /// The same by their hosts.
    at: BTreeSet<(u32, IpAddr, [u8; 6])>,
    /// For how many of them there was no place.
    left_out: usize,
    /// This host on its overlays.
    joined: BTreeMap<u32, Host>,
    /// Open overlays, which know what the registry knows.
    overlays: BTreeMap<u32, Peers>,
    /// The claims of this host.
    own: BTreeMap<Key, Own>,
    /// VMs of this host on overlays, be they claimed or not.
    vms: BTreeMap<String, Vm>,
    /// Those with a MAC.
    cards: BTreeMap<Key, String>,
    /// VMs whose links are up, and their listeners.
    up: BTreeMap<String, Option<Listeners>>,
    /// The worker's places of VMs, without those that are as at first.
    places: BTreeMap<String, VmPlace>,
    /// Of claims whose links have come up.
    pace: Pace<Key>,
    /// How often a claim was made again because its listeners had changed.
    listener_writes: u64,
}

/// A station that is claimed here.
#[derive(Debug)]
struct Own {
    station: Station,
    /// The state of the claim.
    claim: Claim,
    /// Other hosts reach the VM's listeners.
    is_untagged: bool,
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
    /// Errors: the system's.
    pub(super) fn new(registry: Box<dyn Registry>, epoll: &Epoll) -> std::io::Result<Self> {
        // Once for each ring of its bell: while it waits for the worker, it is not asked.
        let flags = EpollFlags::EPOLLIN | EpollFlags::EPOLLET;
        epoll.add(registry.fd(), EpollEvent::new(flags, Token::Registry.pack()))?;
        Ok(Self {
            registry,
            has_news: false,
            link: Ok(()),
            lost: 0,
            hosts: BTreeMap::new(),
            stations: BTreeMap::new(),
            at: BTreeSet::new(),
            left_out: 0,
            joined: BTreeMap::new(),
            overlays: BTreeMap::new(),
            own: BTreeMap::new(),
            vms: BTreeMap::new(),
            cards: BTreeMap::new(),
            up: BTreeMap::new(),
            places: BTreeMap::new(),
            pace: Pace::new(Duration::ZERO),
            listener_writes: 0,
        })
    }

    /// The part of a status; the worker knows how often VMs' listeners have changed.
    pub(super) fn status(&self, listener_changes: u64) -> RegistryStatus {
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
            listener_changes,
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
        self.has_news = true;
    }

    /// Tells what this host has now, and overlays that have opened or changed what there is
    /// elsewhere. `is_open`: of the overlay with this name.
    pub(super) fn tell(
        &mut self,
        now: Instant,
        config: &Config,
        is_open: impl Fn(&str) -> bool,
        mail: &mut ControlMail,
    ) {
        if config.overlays.is_empty() && self.joined.is_empty() {
            return;
        }
        self.has_news = true; // it answers
        self.tell_hosts(config, mail);
        // One that is not open yet is told when it is.
        let open = config.overlays.iter().filter(|overlay| is_open(&overlay.name));
        let open: BTreeMap<_, _> = open.map(|overlay| (overlay.vni, overlay)).collect();
        self.overlays.retain(|vni, _| open.contains_key(vni));
        let mut changed = BTreeSet::new();
        for (vni, overlay) in open {
            let peers = self.overlays.entry(vni).or_insert_with(|| {
                changed.insert(vni);
                Peers::new(overlay)
            });
            if peers.config != *overlay {
                peers.config = overlay.clone();
                changed.insert(vni);
            }
        }
        self.tell_vms(now, config, mail);
        changed.into_iter().for_each(|vni| self.apply_all(mail, vni));
    }

    /// Tells on which overlays this host is.
    fn tell_hosts(&mut self, config: &Config, mail: &mut ControlMail) {
        let overlays = config.overlays.iter();
        let overlays = overlays.map(|o| (network_of(&o.network).into(), (o.vni, o.local.ip())));
        mail.order(Order::SetOverlays(overlays.collect()));
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

    /// Tells which VMs this host has.
    fn tell_vms(&mut self, now: Instant, config: &Config, mail: &mut ControlMail) {
        self.vms = vms_of(config);
        let cards = self.vms.iter().filter_map(|(name, vm)| Some((vm.key()?, name.clone())));
        let before = std::mem::replace(&mut self.cards, cards.collect());
        for key in before.keys().filter(|key| !self.cards.contains_key(key)) {
            self.pace.forget(*key);
        }
        let is_up = |key: &Key| self.cards.get(key).is_some_and(|vm| self.up.contains_key(vm));
        let gone: Vec<_> = self.own.keys().filter(|key| !is_up(key)).copied().collect();
        gone.into_iter().for_each(|key| self.release(mail, key));
        let vms: BTreeSet<_> = self.vms.keys().chain(self.places.keys()).cloned().collect();
        vms.iter().for_each(|vm| self.tell_vm(now, mail, vm));
    }

    /// The VM gets a port that has no place yet.
    pub(super) fn forget_place(&mut self, vm: &str, mail: &mut ControlMail) {
        self.places.remove(vm);
        mail.forget_vm(vm);
    }

    /// The VM gets another MAC, of which the worker does not know that it is elsewhere.
    pub(super) fn forget_mac(&mut self, vm: &str) {
        self.places.get_mut(vm).into_iter().for_each(|place| place.is_elsewhere = false);
    }

    /// The overlay is opened again, and knows nothing.
    pub(super) fn forget_overlay(&mut self, name: &str) {
        self.overlays.retain(|_, peers| peers.config.name != name);
    }

    /// The link of a VM is up or down now.
    pub(super) fn handle_link(
        &mut self,
        now: Instant,
        mail: &mut ControlMail,
        (vm, is_up): (String, bool),
        listeners: Option<Listeners>,
    ) {
        let was_up = match is_up {
            true => self.up.insert(vm.clone(), listeners),
            false => self.up.remove(&vm),
        };
        if was_up.is_some() != is_up {
            self.tell_vm(now, mail, &vm);
        }
    }

    /// Tells what there is of the VM.
    fn tell_vm(&mut self, now: Instant, mail: &mut ControlMail, name: &str) {
        self.place(mail, name, false);
        let Some(key) = self.vms.get(name).and_then(Vm::key) else { return };
        if self.up.contains_key(name) {
            self.claim(now, name, key);
        } else if self.own.contains_key(&key) {
            self.release(mail, key);
        }
    }

    /// The worker learns the place of a VM if it has changed, or in any case.
    fn place(&mut self, mail: &mut ControlMail, name: &str, in_any_case: bool) {
        let mut place = VmPlace::default();
        if let Some(vm) = self.vms.get(name) {
            // Nobody is answered for its addresses while it is up, because the VM answers, whatever
            // a registry has told: a VM that was made anew has another MAC than the one listed.
            if self.up.contains_key(name) {
                (place.vni, place.ips) = (vm.vni, vm.ips.clone());
            }
            place.is_elsewhere = vm.key().is_some_and(|key| self.stations.contains_key(&key));
        }
        let before = self.places.remove(name).unwrap_or_default();
        if place != VmPlace::default() {
            self.places.insert(name.into(), place.clone());
        }
        if in_any_case || place != before {
            mail.order(Order::PlaceVm(name.into(), place));
        }
    }

    fn claim(&mut self, now: Instant, name: &str, key: Key) {
        let Some(vm) = self.vms.get(name) else { return };
        let listeners = match self.own.get(&key) {
            // Changes have a pace of their own.
            Some(own) if own.is_untagged == vm.is_untagged => own.station.listeners.clone(),
            _ => self.up.get(name).cloned().flatten().filter(|_| vm.is_untagged),
        };
        let Vm { vni, host, is_untagged, .. } = *vm;
        let (vm, ips) = (name.to_owned(), vm.ips.clone());
        let station = Station { vni, mac: key.1, vm, ips, host, listeners };
        self.has_news = true; // it answers
        if let Some(own) = self.own.get_mut(&key) {
            own.is_untagged = is_untagged;
            if own.station != station {
                own.station = station;
                own.tell(&mut *self.registry);
            }
            return;
        }
        let mut own = Own { station, claim: Claim::Waits, is_untagged, is_told: false };
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
    pub(super) fn claim_due(&mut self, now: Instant) {
        let Self { pace, own, registry, .. } = self;
        let waits = |own: Option<&Own>| own.is_some_and(|own| !own.is_told);
        while let Some(key) = pace.poll_due(now, |key| waits(own.get(&key))) {
            if let Some(own) = own.get_mut(&key) {
                own.is_told = true;
                own.tell(&mut **registry);
            }
        }
    }

    fn release(&mut self, mail: &mut ControlMail, key: Key) {
        if self.own.remove(&key).is_some_and(|own| own.is_told) {
            self.registry.release(key.0, key.1);
        }
        self.apply(mail, key);
    }

    /// Tells at which ports a VM listens now.
    pub(super) fn handle_listeners(&mut self, name: &str, now: Option<Listeners>) {
        self.up.get_mut(name).into_iter().for_each(|known| known.clone_from(&now));
        let vm = self.vms.get(name).filter(|vm| vm.is_untagged);
        let Some(own) = vm.and_then(Vm::key).and_then(|key| self.own.get_mut(&key)) else { return };
        if own.station.listeners != now {
            own.station.listeners = now;
            self.listener_writes += u64::from(own.is_told);
            own.tell(&mut *self.registry);
        }
    }

    /// The registry may have news.
    pub(super) fn note_news(&mut self) {
        self.has_news = true;
    }

    /// When there is something to do, if nothing else happens; mail that moves is an event.
    pub(super) fn poll_timeout(&self, mail: &ControlMail) -> Option<Instant> {
        let can_hear = self.has_news && mail.waiting() < WAITING_MAX;
        if can_hear { Some(Instant::ZERO) } else { self.pace.poll_timeout() }
    }

    /// Hears news, unless many orders wait for the worker.
    pub(super) fn hear(&mut self, mail: &mut ControlMail) {
        let mut changed = BTreeSet::new();
        for _ in 0..NEWS_PER_TURN {
            if !self.has_news || mail.waiting() >= WAITING_MAX {
                break;
            }
            match self.registry.poll() {
                None => self.has_news = false,
                Some(News::Link(link)) => self.set_link(link),
                Some(News::LeftOut(n)) => self.set_left_out(n),
                Some(News::Host { vni, address, now }) => {
                    changed.insert(vni);
                    match now {
                        Some(host) => self.hosts.insert((vni, address), host),
                        None => self.hosts.remove(&(vni, address)),
                    };
                }
                Some(News::Claim { vni, mac, now }) => {
                    self.set_claim((vni, mac), now);
                    self.apply(mail, (vni, mac));
                }
                Some(News::Station { vni, mac, now }) => self.set_station(mail, (vni, mac), now),
            }
        }
        for vni in changed {
            for host in self.apply_hosts(mail, vni) {
                let of_host = (vni, host, [0; 6])..=(vni, host, [0xff; 6]);
                for (vni, _, mac) in self.at.range(of_host) {
                    self.apply(mail, (*vni, *mac));
                }
            }
        }
    }

    fn set_station(&mut self, mail: &mut ControlMail, key: Key, now: Option<Station>) {
        let (vni, mac) = key;
        self.at.extend(now.as_ref().map(|it| (vni, it.host, mac)));
        let host = now.as_ref().map(|it| it.host);
        let before = match now {
            Some(station) => self.stations.insert(key, station),
            None => self.stations.remove(&key),
        };
        if let Some(before) = before.filter(|it| Some(it.host) != host) {
            self.at.remove(&(vni, before.host, mac));
        }
        if let Some(vm) = self.cards.get(&key).cloned() {
            self.place(mail, &vm, false);
        }
        self.apply(mail, key);
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

    /// The worker knows of one station what the registry knows.
    fn apply(&self, mail: &mut ControlMail, key: Key) {
        let claim = self.own.get(&key).map(|own| own.claim);
        let is_here = matches!(claim, Some(Claim::Held | Claim::Contested(_)));
        let elsewhere = self.stations.get(&key).cloned().map(Box::new);
        mail.order(Order::TellStation { key, elsewhere, is_here });
    }

    /// The overlay knows all hosts that the registry knows. Which have become peers or are none any
    /// more.
    fn apply_hosts(&mut self, mail: &mut ControlMail, vni: u32) -> BTreeSet<IpAddr> {
        let Some(peers) = self.overlays.get_mut(&vni) else { return BTreeSet::new() };
        let hosts = self.hosts.range((vni, FIRST_ADDRESS)..=(vni, LAST_ADDRESS));
        let hosts = hosts.map(|(_, host)| SocketAddr::new(host.address, host.port));
        let changed = peers.set_registered(hosts.collect());
        mail.order(Order::SetPeers(vni, peers.list().to_vec()));
        changed
    }

    /// The overlay with this number knows all that the registry knows.
    fn apply_all(&mut self, mail: &mut ControlMail, vni: u32) {
        self.apply_hosts(mail, vni); // of all whatever they are
        let all = (vni, [0; 6])..=(vni, [0xff; 6]);
        let elsewhere = self.stations.range(all.clone()).map(|(key, _)| key);
        elsewhere.chain(self.own.range(all).map(|(key, _)| key)).for_each(|key| {
            self.apply(mail, *key);
        });
        let vms = self.vms.iter().filter(|(_, vm)| vm.vni == vni).map(|(name, _)| name.clone());
        vms.collect::<Vec<_>>().iter().for_each(|vm| self.place(mail, vm, true));
    }

    /// Stations behind this one, or the first.
    pub(super) fn page(&self, after: Option<Key>) -> StationPage {
        let behind = (after.map_or(Bound::Unbounded, Bound::Excluded), Bound::Unbounded);
        let elsewhere = self.stations.range(behind).map(|(key, _)| *key);
        let own = self.own.range(behind).map(|(key, _)| *key);
        let most = STATIONS_PER_PAGE + 1;
        let keys: BTreeSet<_> = elsewhere.take(most).chain(own.take(most)).collect();
        let page: Vec<_> = keys.iter().take(STATIONS_PER_PAGE).collect();
        let next = page.last().filter(|_| keys.len() > page.len()).map(|key| **key);
        let stations = page.into_iter().filter_map(|key| self.info(key)).collect();
        StationPage { stations, next }
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

impl Control {
    /// The configuration or an overlay has changed: the registry is told what this host has now,
    /// and the worker what the registry says to that.
    pub(super) fn tell_registry(&mut self, now: Instant) {
        let Self { directory: Some(directory), changes, interfaces, mail, .. } = self else {
            return;
        };
        let Some(config) = changes.config() else { return };
        directory.tell(now, config, |name| interfaces.is_open(name), mail);
        self.hear_registry(now);
    }

    /// Does what is due for the registry, and hears its news.
    pub(super) fn hear_registry(&mut self, now: Instant) {
        if let Some(directory) = &mut self.directory {
            directory.claim_due(now);
            directory.hear(&mut self.mail);
        }
    }
}

#[cfg(test)]
mod tests;
