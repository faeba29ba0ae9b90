//! Rules of connections by the virtual TOE: as the switch lets frames pass, and nothing more.
//!
//! A guest reaches others of its network and VLAN on this host that have the device, too, and whose
//! address nobody else has; itself only if it is to. By an overlay of its network it reaches those
//! of other hosts, and they reach it, as the registry says where they are; that knows no VLANs, so
//! a guest in one does not. All else goes by guest TCP, and so does what the operator's rules say
//! (`[[toe_rule]]`): they are about who connects, so nobody asks them at the other end.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use nightporter_core::toe::control::Program;
use nightporter_core::toe::guest::{Policy, Route};
use nightporter_core::toe::id::HostId;
use nightporter_core::toe::message::Request;
use nightporter_core::toe::sockets::VmId;

use super::HERE;
use super::fabric::Peers;
use super::refusals::Refusals;
use crate::config::{ToeRule, VmConfig};
use crate::port::build::{device_of, network_of, toe_name};
use crate::port::vhost_user::VhostUserConfig;
use crate::vhost::listener::Access;

/// A VM that has the device.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Member {
    /// Its addresses: no socket has another (VTOE-09).
    pub ips: Vec<IpAddr>,
    /// Its network and its VLAN.
    pub network: (String, Option<u16>),
    /// It reaches no other VM of this host, and none reaches it.
    pub isolated: bool,
    /// It reaches itself, too.
    pub to_itself: bool,
}

/// Its socket device, and what the virtual TOE has to know of it; `None`: it has none.
pub(crate) fn toe_of(
    vm: &VmConfig,
    access: Access,
    memory_is_limited: bool,
) -> Option<(VhostUserConfig, Member)> {
    let device = VhostUserConfig {
        name: toe_name(&vm.name),
        socket: vm.toe_socket()?,
        ..device_of(vm, access, memory_is_limited)
    };
    let member = Member {
        ips: vm.ips.clone().unwrap_or_default(),
        network: (network_of(&vm.network).into(), vm.vlan),
        isolated: vm.isolated,
        to_itself: vm.toe_to_itself,
    };
    Some((device, member))
}

/// Numbers of networks from here on are for those that no other host knows; below are VNIs, which
/// have 24 bits.
const OWN: u32 = 1 << 24;

/// Overlays, by network: VNI, and the address of this host on it.
pub(crate) type Overlays = BTreeMap<String, (u32, IpAddr)>;

/// See the module's doc.
#[derive(Debug, Default)]
pub(super) struct Rules {
    members: BTreeMap<VmId, (Member, bool)>,
    /// By network and address: whose it is.
    by_address: BTreeMap<(u32, IpAddr), Vec<VmId>>,
    /// Members that were looked at.
    #[cfg(test)]
    looks: std::cell::Cell<usize>,
    /// The core's name of one without an overlay is its place here, and [`OWN`].
    networks: Vec<(String, Option<u16>)>,
    overlays: Overlays,
    /// The operator's own rules besides: the first that fits decides.
    pub(super) rules: Vec<ToeRule>,
    pub(super) peers: Peers,
    /// Guests that were refused lately.
    pub(super) refusals: Refusals,
    /// There is a way to other hosts.
    pub(super) is_open: bool,
}

impl Rules {
    /// Another one, or other rules for it; its driver does not run.
    pub(super) fn add(&mut self, vm: VmId, member: Member) {
        self.remove(vm);
        if !self.networks.contains(&member.network) {
            self.networks.push(member.network.clone());
        }
        self.list(vm, &member);
        self.members.insert(vm, (member, false));
    }

    pub(super) fn remove(&mut self, vm: VmId) {
        let Some((member, _)) = self.members.remove(&vm) else { return };
        let Some(network) = self.number(&member.network) else { return };
        for ip in member.ips {
            if let Some(there) = self.by_address.get_mut(&(network, ip)) {
                there.retain(|other| *other != vm);
                if there.is_empty() {
                    self.by_address.remove(&(network, ip));
                }
            }
        }
    }

    /// It is found by its addresses.
    fn list(&mut self, vm: VmId, member: &Member) {
        let Some(network) = self.number(&member.network) else { return };
        for ip in &member.ips {
            let there = self.by_address.entry((network, *ip)).or_default();
            if !there.contains(&vm) {
                there.push(vm);
            }
        }
    }

    /// Whether it is there, as such.
    pub(super) fn is(&self, vm: VmId, member: &Member) -> bool {
        self.members.get(&vm).is_some_and(|(known, _)| known == member)
    }

    /// Its driver runs from now on: its addresses and its network.
    pub(super) fn start(&mut self, vm: VmId) -> Option<(Vec<IpAddr>, u32)> {
        let (_, runs) = self.members.get_mut(&vm)?;
        *runs = true;
        let (member, _) = self.members.get(&vm)?;
        Some((member.ips.clone(), self.number(&member.network)?))
    }

    /// It does not any more.
    pub(super) fn stop(&mut self, vm: VmId) {
        if let Some((_, runs)) = self.members.get_mut(&vm) {
            *runs = false;
        }
    }

    /// A process of it listens there from now on, and whoever was refused there may try again.
    pub(super) fn note_listener(&mut self, vm: VmId, at: SocketAddr) {
        let Some((member, _)) = self.members.get(&vm) else { return };
        let Some(network) = self.number(&member.network) else { return };
        let any = at.ip().is_unspecified();
        for ip in member.ips.iter().filter(|ip| any || **ip == at.ip()) {
            self.refusals.forget((network, *ip, at.port()));
        }
    }

    /// Other overlays; VMs that are in another network by that.
    pub(super) fn set_overlays(&mut self, overlays: Overlays) -> Vec<VmId> {
        let numbers = |rules: &Self| {
            let all = rules.members.iter().map(|(vm, (it, _))| (*vm, rules.number(&it.network)));
            all.collect::<Vec<_>>()
        };
        let before = numbers(self);
        self.overlays = overlays;
        self.by_address.clear();
        let members = std::mem::take(&mut self.members);
        members.iter().for_each(|(vm, (member, _))| self.list(*vm, member));
        self.members = members;
        let changed = before.into_iter().zip(numbers(self)).filter(|(was, is)| was != is);
        changed.map(|((vm, _), _)| vm).collect()
    }

    /// This host's address on an overlay.
    pub(super) fn own_address(&self, vni: u32) -> Option<IpAddr> {
        self.overlays.values().find(|(known, _)| *known == vni).map(|(_, address)| *address)
    }

    /// Whether this connection between guests of this host may be.
    pub(super) fn may(&self, request: &Request) -> bool {
        let from = self.only(request.network, request.from.ip());
        from.is_some_and(|(vm, _)| self.way(vm, request) == Route::To(HERE))
    }

    /// Whether a guest of that host may connect to one of this: it is there, nobody else has its
    /// address, and this one may be reached.
    pub(super) fn may_come(&self, host: HostId, request: &Request) -> bool {
        let (network, from) = (request.network, request.from.ip());
        network < OWN
            && self.peers.host_of(network, from) == Some(host)
            && !self.has(network, from)
            && self.only(network, request.to.ip()).is_some_and(|(_, own)| !own.isolated)
    }

    /// The guest that connects, by one of its addresses, whichever it connects from: of this host,
    /// or as the registry says.
    pub(super) fn opener(&self, host: HostId, request: &Request) -> IpAddr {
        let (network, ip) = (request.network, request.from.ip());
        let first = match host {
            HERE => self.only(network, ip).and_then(|(_, own)| own.ips.iter().min().copied()),
            _ => self.peers.first_of(network, ip),
        };
        first.unwrap_or(ip)
    }

    /// The core's name of a network.
    fn number(&self, network: &(String, Option<u16>)) -> Option<u32> {
        if let (None, Some((vni, _))) = (network.1, self.overlays.get(&network.0)) {
            return Some(*vni);
        }
        let at = self.networks.iter().position(|known| known == network)?;
        Some(OWN + u32::try_from(at).ok()?)
    }

    fn of<'a>(
        &'a self,
        network: u32,
        ip: IpAddr,
    ) -> impl Iterator<Item = (VmId, &'a Member, bool)> + 'a {
        let there = self.by_address.get(&(network, ip)).into_iter().flatten();
        there.filter_map(|vm| {
            #[cfg(test)]
            self.looks.set(self.looks.get() + 1);
            self.members.get(vm).map(|(member, runs)| (*vm, member, *runs))
        })
    }

    /// Whether a VM of this host has this address, if it runs or not.
    fn has(&self, network: u32, ip: IpAddr) -> bool {
        self.of(network, ip).next().is_some()
    }

    /// The one whose address this is, if it runs.
    fn only(&self, network: u32, ip: IpAddr) -> Option<(VmId, &Member)> {
        let mut all = self.of(network, ip);
        let (vm, member, runs) = all.next()?;
        (runs && all.next().is_none()).then_some((vm, member))
    }
}

impl Policy for Rules {
    fn connect(&self, vm: VmId, program: Program, request: &Request) -> Route {
        let way = match self.rules.iter().find(|rule| rule.fits(program, request.to)) {
            Some(rule) if rule.native => Route::Native,
            _ => self.way(vm, request),
        };
        // Not a part of the way, by which a request that is said already is judged again.
        if self.refusals.has(vm, request) { Route::Native } else { way }
    }
}

impl Rules {
    /// How a guest's socket gets there.
    fn way(&self, vm: VmId, request: &Request) -> Route {
        let Some((from, own)) = self.only(request.network, request.from.ip()) else {
            return Route::Native;
        };
        if from != vm {
            return Route::Native;
        }
        let (network, to) = (request.network, request.to.ip());
        let elsewhere = self.peers.host_of(network, to).filter(|_| network < OWN);
        match (self.only(network, to), elsewhere) {
            (Some((to, other)), None) => {
                let may = if to == vm { own.to_itself } else { !own.isolated && !other.isolated };
                if may { Route::To(HERE) } else { Route::Native }
            }
            (None, Some(host))
                if self.is_open
                    && !own.isolated
                    && !self.has(network, to)
                    && !self.peers.is_away(host) =>
            {
                Route::To(host)
            }
            _ => Route::Native,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(ip: &str, vlan: Option<u16>, isolated: bool) -> Member {
        let ips = vec![ip.parse().unwrap()];
        Member { ips, network: (String::new(), vlan), isolated, to_itself: false }
    }

    fn rules(members: &[(&str, Option<u16>, bool)]) -> Rules {
        let mut rules = Rules::default();
        for (vm, (ip, vlan, isolated)) in (0..).map(VmId).zip(members) {
            rules.add(vm, member(ip, *vlan, *isolated));
            rules.start(vm);
        }
        rules
    }

    fn request(from: &str, to: &str) -> Request {
        let at = |ip: &str, port| std::net::SocketAddr::new(ip.parse().unwrap(), port);
        Request { network: OWN, from: at(from, 1000), to: at(to, 80) }
    }

    #[test]
    fn a_guest_reaches_those_whom_its_frames_reach() {
        let ask = |members: &[(&str, Option<u16>, bool)], to: &str| {
            let (rules, request) = (rules(members), request("10.0.0.1", to));
            let way = rules.connect(VmId(0), Program::NONE, &request);
            assert_eq!(rules.may(&request), way == Route::To(HERE));
            way
        };
        let own = ("10.0.0.1", None, false);
        assert_eq!(ask(&[own, ("10.0.0.2", None, false)], "10.0.0.2"), Route::To(HERE));
        assert_eq!(ask(&[own, ("10.0.0.2", None, false)], "10.0.0.3"), Route::Native);
        assert_eq!(ask(&[own, ("10.0.0.2", Some(5), false)], "10.0.0.2"), Route::Native);
        assert_eq!(ask(&[own, ("10.0.0.2", None, true)], "10.0.0.2"), Route::Native);
        let isolated = ("10.0.0.1", None, true);
        assert_eq!(ask(&[isolated, ("10.0.0.2", None, false)], "10.0.0.2"), Route::Native);
        assert_eq!(ask(&[own], "10.0.0.1"), Route::Native, "itself");
        let two = [own, ("10.0.0.2", None, false), ("10.0.0.2", None, false)];
        assert_eq!(ask(&two, "10.0.0.2"), Route::Native, "whose it is nobody knows");
    }

    #[test]
    fn a_request_looks_at_those_whose_address_it_has_and_at_nobody_else() {
        let ips: Vec<_> = (0..1000).map(|n| format!("10.0.{}.{}", n / 250, n % 250 + 1)).collect();
        let members: Vec<_> = ips.iter().map(|ip| (&**ip, None, false)).collect();
        let mut rules = rules(&members);
        let request = request("10.0.0.1", "10.0.0.2");
        let ask =
            |rules: &Rules| (rules.connect(VmId(0), Program::NONE, &request), rules.looks.take());
        assert_eq!(ask(&rules), (Route::To(HERE), 2));
        // Those who have left, or have another address, are found no more.
        rules.add(VmId(1), member("10.0.9.9", None, false));
        assert_eq!(ask(&rules), (Route::Native, 1));
        rules.add(VmId(1), member("10.0.0.2", None, false));
        rules.start(VmId(1));
        assert_eq!(ask(&rules).0, Route::To(HERE));
        rules.remove(VmId(1));
        assert_eq!(ask(&rules).0, Route::Native);
    }

    #[test]
    fn vms_of_a_network_are_found_by_the_number_that_its_overlay_gives_it() {
        let mut rules = rules(&[("10.0.0.1", None, false), ("10.0.0.2", None, false)]);
        let overlay = "192.0.2.1".parse().unwrap();
        let moved = rules.set_overlays(Overlays::from([(String::new(), (7, overlay))]));
        assert_eq!(moved, [VmId(0), VmId(1)]);
        let of = |network| Request { network, ..request("10.0.0.1", "10.0.0.2") };
        assert_eq!(rules.connect(VmId(0), Program::NONE, &of(7)), Route::To(HERE));
        assert_eq!(rules.connect(VmId(0), Program::NONE, &of(OWN)), Route::Native);
        rules.set_overlays(Overlays::new());
        assert_eq!(rules.connect(VmId(0), Program::NONE, &of(OWN)), Route::To(HERE));
        assert_eq!(rules.connect(VmId(0), Program::NONE, &of(7)), Route::Native);
    }

    #[test]
    fn the_first_rule_that_fits_says_what_connects_by_guest_tcp() {
        let mut rules = rules(&[("10.0.0.1", None, false), ("10.0.0.2", None, false)]);
        let rule = |program: &str, native| ToeRule {
            to: vec!["10.0.0.2/32".parse().unwrap()],
            port: None,
            program: Some(program.into()),
            native,
        };
        rules.rules = vec![
            rule("curl", false),
            ToeRule { program: None, ..rule("", true) },
            rule("wget", false),
        ];
        let request = request("10.0.0.1", "10.0.0.2");
        let ask = |rules: &Rules, program: &str| {
            rules.connect(VmId(0), Program::of(program.as_bytes()), &request)
        };
        assert_eq!(ask(&rules, "curl"), Route::To(HERE));
        assert_eq!(ask(&rules, "wget"), Route::Native);
        assert_eq!(ask(&rules, ""), Route::Native);
        // A listener asks nobody which program connects.
        assert!(rules.may(&request));
        rules.add(VmId(1), member("10.0.0.2", Some(5), false));
        rules.start(VmId(1));
        assert_eq!(ask(&rules, "curl"), Route::Native, "a rule opens no way");
    }

    #[test]
    fn who_opens_is_the_same_whichever_of_its_addresses_it_has() {
        let mut rules = rules(&[("10.0.0.1", None, false), ("10.0.0.2", None, false)]);
        let two = ["10.0.0.7", "10.0.0.3"].map(|ip| ip.parse().unwrap());
        rules.add(VmId(0), Member { ips: two.into(), ..member("10.0.0.3", None, false) });
        rules.start(VmId(0));
        let ask = |rules: &Rules, host, network, from| {
            let request = Request { network, ..request(from, "10.0.0.2") };
            rules.opener(host, &request).to_string()
        };
        for from in ["10.0.0.7", "10.0.0.3"] {
            assert_eq!(ask(&rules, HERE, OWN, from), "10.0.0.3");
        }
        assert_eq!(ask(&rules, HERE, OWN, "10.0.0.2"), "10.0.0.2");
        // Of another host, as the registry says.
        let there = nightporter_registry::Station {
            vni: 7,
            mac: [2; 6],
            vm: String::new(),
            ips: ["10.0.0.7", "10.0.0.6"].map(|ip| ip.parse().unwrap()).into(),
            host: "192.0.2.2".parse().unwrap(),
            listeners: None,
        };
        rules.peers.set(7, [2; 6], Some(&there));
        let host = rules.peers.host_at(there.host).unwrap();
        for from in ["10.0.0.7", "10.0.0.6"] {
            assert_eq!(ask(&rules, host, 7, from), "10.0.0.6");
        }
        assert_eq!(ask(&rules, host, 7, "10.0.0.9"), "10.0.0.9");
    }

    #[test]
    fn whose_driver_does_not_run_is_not_reached() {
        let mut rules = rules(&[("10.0.0.1", None, false), ("10.0.0.2", None, false)]);
        let request = request("10.0.0.1", "10.0.0.2");
        assert_eq!(rules.connect(VmId(0), Program::NONE, &request), Route::To(HERE));
        rules.stop(VmId(1));
        assert_eq!(rules.connect(VmId(0), Program::NONE, &request), Route::Native);
        rules.start(VmId(1));
        rules.add(VmId(1), member("10.0.0.2", Some(7), false));
        rules.start(VmId(1));
        assert_eq!(rules.connect(VmId(0), Program::NONE, &request), Route::Native);
    }

    #[test]
    fn who_was_refused_tries_again_when_somebody_listens_there() {
        let mut rules = rules(&[
            ("10.0.0.1", None, false),
            ("10.0.0.2", None, false),
            ("10.0.0.3", None, false),
        ]);
        let two = ["10.0.0.2", "fd00::2"].map(|ip| ip.parse().unwrap());
        rules.add(VmId(1), Member { ips: two.into(), ..member("10.0.0.2", None, false) });
        rules.start(VmId(1));
        let now = nightporter_core::time::Instant::from_secs(1000);
        let request = request("10.0.0.1", "10.0.0.2");
        let ask = |rules: &Rules, request: &Request| rules.connect(VmId(0), Program::NONE, request);
        for (vm, listens, way) in [
            (1, "10.0.0.2:80", Route::To(HERE)),
            (1, "0.0.0.0:80", Route::To(HERE)),
            (1, "[::]:80", Route::To(HERE)),
            (1, "[fd00::2]:80", Route::Native),
            (1, "10.0.0.2:81", Route::Native),
            (2, "0.0.0.0:80", Route::Native),
        ] {
            rules.refusals.note(now, VmId(0), &request);
            assert_eq!(ask(&rules, &request), Route::Native);
            assert!(rules.may(&request), "a request that was said before is carried");
            rules.note_listener(VmId(vm), listens.parse().unwrap());
            assert_eq!(ask(&rules, &request), way, "{listens}");
        }
        let other = Request { to: "10.0.0.2:81".parse().unwrap(), ..request };
        assert_eq!(ask(&rules, &other), Route::To(HERE), "another port");
        let other = Request { from: "10.0.0.3:5".parse().unwrap(), ..request };
        let way = rules.connect(VmId(2), Program::NONE, &other);
        assert_eq!(way, Route::To(HERE), "another guest has its own answers");
    }

    #[test]
    fn itself_is_reached_by_who_is_to() {
        let mut rules = rules(&[("10.0.0.1", None, true)]);
        let request = request("10.0.0.1", "10.0.0.1");
        assert_eq!(rules.connect(VmId(0), Program::NONE, &request), Route::Native);
        rules.add(VmId(0), Member { to_itself: true, ..member("10.0.0.1", None, true) });
        rules.start(VmId(0));
        assert_eq!(rules.connect(VmId(0), Program::NONE, &request), Route::To(HERE));
        assert!(rules.may(&request));
    }
}
