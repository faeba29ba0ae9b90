//! The taps of bridges as VMs, as they come and go (`[[attach]]`).
//!
//! Control compares the ports of each bridge with the VMs that there are, whenever an interface or
//! the configuration has changed, and makes one change at a time, as a command would, when no
//! operator's waits. A VM has the address of its tap as its name, because that is its identity in
//! the store, and the names of taps come again: libvirt's begin with vnet0 after each start of the
//! host, and are another VM's then.

use std::collections::{BTreeMap, BTreeSet};

use nightporter_api::{BridgeStatus, Change, Reply, SkippedTap};
use nightporter_attach::tap::{FROM_VM, TO_NET};
use nightporter_core::time::{Duration, Instant};

use super::Control;
use super::links::{Link, LinkWatch};
use crate::config::{AttachConfig, Config, VmConfig};

/// A tap that could not be attached is tried again after that.
const RETRY: Duration = Duration::from_secs(10);
/// The names of a nightporterd's taps for uplinks (`broker::rules`) and for attached taps.
const OWN_NAMES: [&str; 3] = ["np", FROM_VM, TO_NET];
/// Of addresses that libvirt gives to taps, instead of the VM's first byte.
const LIBVIRT: u8 = 0xfe;
/// The first bytes of QEMU's addresses, which libvirt gives to VMs.
const QEMU: [u8; 3] = [0x52, 0x54, 0];

/// See the module doc.
#[derive(Debug, Default)]
pub(crate) struct Bridges {
    /// The VMs that are there because of them, by name.
    own: BTreeMap<String, Tap>,
    /// Taps that an operator has detached, by number, until they go.
    detached: BTreeSet<u32>,
    /// Those that could not be attached: why, and when they are tried again.
    failed: BTreeMap<u32, (String, Instant)>,
    /// The change that is under way.
    asked: Option<Asked>,
    /// Nothing has changed since they wanted nothing.
    is_settled: bool,
}

/// A tap, and the VM that it is to be.
#[derive(Clone, Debug, Eq, PartialEq)]
struct Tap {
    index: u32,
    vm: VmConfig,
}

/// A change of a VM.
#[derive(Debug)]
enum Asked {
    Add(Tap),
    Set(Tap),
    Remove(String),
}

/// The ports of all bridges.
#[derive(Debug, Default)]
struct Found {
    /// Those that are VMs, by the VM's name.
    taps: BTreeMap<String, Tap>,
    bridges: Vec<BridgeStatus>,
}

impl Bridges {
    /// The configuration with the VMs of the bridges' taps that are there when the daemon starts,
    /// so that they are attached before it looks at its predecessor's promises.
    pub(crate) fn begin(config: &Config, links: Option<&LinkWatch>) -> (Self, Config) {
        let mut bridges = Self::default();
        let found = links.map(|links| bridges.look(config, links)).unwrap_or_default();
        let mut whole = config.clone();
        for (name, tap) in found.taps {
            whole.vms.push(tap.vm.clone());
            if whole.check().is_ok() {
                bridges.own.insert(name, tap);
            } else {
                whole.vms.pop(); // as it is now the change fails, and says why
            }
        }
        (bridges, whole)
    }

    /// The tap of this VM cannot be attached now. `false`: it is none of theirs.
    pub(crate) fn give_up(&mut self, now: Instant, vm: &str, why: &str) -> bool {
        let Some(tap) = self.own.remove(vm) else { return false };
        let ifname = tap.vm.tap.unwrap_or_default();
        tracing::warn!("the bridge's tap {ifname} is not attached: {why}");
        self.failed.insert(tap.index, (why.to_owned(), now + RETRY));
        true
    }

    /// Whether it has this VM.
    pub(crate) fn has(&self, vm: &str) -> bool {
        self.own.contains_key(vm)
    }

    /// The names of their VMs.
    pub(crate) fn names(&self) -> BTreeSet<String> {
        self.own.keys().cloned().collect()
    }

    /// Judges all ports of the bridges.
    fn look(&self, config: &Config, links: &LinkWatch) -> Found {
        let mut found = Found::default();
        for attach in &config.attach {
            let name = &attach.bridge;
            let mut status = BridgeStatus { bridge: name.clone(), ..BridgeStatus::default() };
            match links.ports_of(name) {
                None => status.trouble = Some("there is no such bridge".into()),
                Some(ports) => ports.for_each(|(index, link)| {
                    match self.judge(config, attach, index, link, &found.taps) {
                        Ok(Some(tap)) => {
                            status.taps.push(link.name.clone());
                            found.taps.insert(tap.vm.name.clone(), tap);
                        }
                        Ok(None) => status.taps.push(link.name.clone()),
                        Err(why) => {
                            let (ifname, why) = (link.name.clone(), why.to_owned());
                            status.skipped.push(SkippedTap { ifname, why });
                        }
                    }
                }),
            }
            found.bridges.push(status);
        }
        found
    }

    /// The VM that a port of a bridge is to be; `None`: it is one that somebody else has named.
    /// Errors: why it is none.
    fn judge(
        &self,
        config: &Config,
        attach: &AttachConfig,
        index: u32,
        link: &Link,
        others: &BTreeMap<String, Tap>,
    ) -> Result<Option<Tap>, &str> {
        let Some(takes_headers) = link.tap else { return Err("it is no tap") };
        let is_uplink = config.uplinks.iter().any(|uplink| uplink.ifname == link.name);
        if is_uplink || OWN_NAMES.iter().any(|begin| link.name.starts_with(begin)) {
            return Err("it is a tap of a nightporterd");
        }
        let [first, rest @ ..] = link.address;
        let name = format!("tap-{}", link.address.map(|byte| format!("{byte:02x}")).concat());
        let is_named = |vm: &VmConfig| match (vm.tap_begins(), vm.mac) {
            (Some(begin), Some([_, of_vm @ ..])) => {
                link.name.starts_with(begin) && first == LIBVIRT && rest == of_vm
            }
            _ => vm.tap.as_ref() == Some(&link.name),
        };
        if config.vms.iter().any(|vm| vm.name != name && is_named(vm)) {
            return Ok(None);
        }
        let is_own = self.own.get(&name).is_some_and(|own| own.index == index);
        if self.detached.contains(&index) {
            return Err("it was detached by a command (`nightporter attach` attaches it)");
        } else if others.contains_key(&name) {
            return Err("another tap has its address");
        } else if !is_own && !link.is_running() {
            return Err("nobody holds it: its VM does not run");
        } else if !takes_headers && first != LIBVIRT {
            return Err(
                "it may be no VM's: its address is none of libvirt's, and its holder takes \
                        no virtio-net headers (`nightporter attach` attaches it)",
            );
        } else if let Some((why, _)) = self.failed.get(&index) {
            return Err(why);
        }
        let is_qemu = first == LIBVIRT && rest[..2] == QEMU[1..];
        let mac = is_qemu.then(|| [QEMU[0], rest[0], rest[1], rest[2], rest[3], rest[4]]);
        let vm = attach.vm(&name, &link.name, mac).ok_or("its keys are none of a VM's")?;
        Ok(Some(Tap { index, vm }))
    }

    /// An interface or the configuration may have changed.
    pub(super) fn note_change(&mut self) {
        self.is_settled = false;
    }

    /// When a tap that could not be attached is tried again.
    fn poll_timeout(&self, config: &Config) -> Option<Instant> {
        let times = self.failed.values().map(|(_, at)| *at);
        times.min().filter(|_| self.wants_any(config))
    }

    fn wants_any(&self, config: &Config) -> bool {
        !(config.attach.is_empty() && self.own.is_empty())
    }

    /// The next change that the bridges want.
    fn poll_change(&mut self, now: Instant, config: &Config, links: &LinkWatch) -> Option<Change> {
        let is_due = self.poll_timeout(config).is_some_and(|at| at <= now);
        if !self.wants_any(config) || self.is_settled && !is_due {
            return None;
        }
        self.is_settled = true;
        self.detached.retain(|index| links.has(*index));
        self.failed.retain(|index, (_, at)| *at > now && links.has(*index));
        let has = |name: &String| config.vms.iter().any(|vm| vm.name == *name);
        // An operator has removed it, or it could not be added.
        let gone: Vec<_> = self.own.keys().filter(|name| !has(name)).cloned().collect();
        let gone = gone.iter().filter_map(|name| self.own.remove(name));
        self.detached.extend(gone.map(|tap| tap.index));
        let wanted = self.look(config, links).taps;
        let is_same = |own: &Tap, tap: &Tap| own.index == tap.index && own.vm.tap == tap.vm.tap;
        let goes =
            |(name, own): &(&String, &Tap)| wanted.get(*name).is_none_or(|tap| !is_same(own, tap));
        let asked = if let Some((name, _)) = self.own.iter().find(goes) {
            Asked::Remove(name.clone())
        } else {
            let news = |(name, tap): &(&String, &Tap)| self.own.get(*name) != Some(tap);
            let (name, tap) = wanted.iter().find(news)?;
            match self.own.contains_key(name) {
                true => Asked::Set(tap.clone()),
                false => Asked::Add(tap.clone()),
            }
        };
        let change = asked.change();
        self.is_settled = false;
        self.asked = Some(asked);
        Some(change)
    }

    /// A change was made or refused. `false`: it was none that they wanted.
    pub(super) fn handle_reply(&mut self, now: Instant, reply: &Reply) -> bool {
        self.note_change();
        let Some(asked) = self.asked.take() else { return false };
        let refused = match reply {
            Reply::Error { what, .. } => Some(what),
            _ => None,
        };
        match (asked, refused) {
            (Asked::Add(tap) | Asked::Set(tap), None) => {
                self.own.insert(tap.vm.name.clone(), tap);
            }
            (Asked::Remove(name), None) => drop(self.own.remove(&name)),
            (Asked::Add(tap), Some(what)) => {
                let name = tap.vm.name.clone();
                self.own.insert(name.clone(), tap);
                self.give_up(now, &name, what);
            }
            // Not again before something else changes.
            (Asked::Set(tap), Some(what)) => {
                let name = tap.vm.name.clone();
                tracing::warn!("vm {name} does not get the keys of its bridge: {what}");
                self.own.insert(name, tap);
            }
            (Asked::Remove(name), Some(what)) => {
                tracing::warn!("vm {name} has left its bridge, and is not removed: {what}");
                self.own.remove(&name);
            }
        }
        true
    }
}

impl Asked {
    fn change(&self) -> Change {
        let given = |vm: &VmConfig| {
            let keys = vm.keys().into_iter().filter(|(key, _)| *key != "name" && *key != "socket");
            keys.map(|(key, value)| (key.to_owned(), value.unwrap_or_default())).collect()
        };
        match self {
            Self::Add(tap) => {
                let mut keys: BTreeMap<String, String> = given(&tap.vm);
                keys.retain(|_, value| !value.is_empty());
                Change::AddVm { name: tap.vm.name.clone(), keys }
            }
            Self::Set(tap) => Change::SetVm { name: tap.vm.name.clone(), keys: given(&tap.vm) },
            Self::Remove(name) => Change::RemoveVm { name: name.clone(), drain_ms: None },
        }
    }
}

impl Control {
    /// Begins with the next change that the bridges want, if no other is under way or waits.
    pub(super) fn follow_bridges(&mut self, now: Instant) {
        if self.can_follow_bridges()
            && let Some((config, links)) = self.changes.config().zip(self.interfaces.links.as_ref())
            && let Some(change) = self.bridges.poll_change(now, config, links)
        {
            self.begin_change(None, change, false);
        }
    }

    /// When it is to do so. `None` while it cannot: no time would end that, and control would turn.
    pub(super) fn bridges_due(&self) -> Option<Instant> {
        let config = self.changes.config().filter(|_| self.can_follow_bridges())?;
        self.bridges.poll_timeout(config)
    }

    fn can_follow_bridges(&self) -> bool {
        self.interfaces.links.is_some() && !self.stops && self.changes.is_idle()
    }

    /// Of the bridges, for a status.
    pub(super) fn status_of_bridges(&self) -> Vec<BridgeStatus> {
        let both = self.changes.config().zip(self.interfaces.links.as_ref());
        let found = both.map(|(config, links)| self.bridges.look(config, links));
        found.map_or_else(Vec::new, |found| found.bridges)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIBVIRTS: [u8; 6] = [0xfe, 0x54, 0, 1, 2, 3];

    fn config(vms: &str) -> Config {
        let text = format!("[[attach]]\nbridge = \"br0\"\n{vms}");
        Config::parse("np.toml", &text, &BTreeMap::new()).unwrap()
    }

    /// The bridge with these ports, the first of which has number 11.
    fn links(ports: impl IntoIterator<Item = Link>) -> LinkWatch {
        let ports = (11..).zip(ports);
        LinkWatch::of(ports.chain([(10, Link::new("br0", 0, [2; 6], None))]))
    }

    fn port(name: &str, address: [u8; 6], tap: Option<bool>) -> Link {
        Link::new(name, 10, address, tap)
    }

    #[test]
    fn each_port_is_a_vm_or_has_a_reason_why_not() {
        let own = [2, 0, 0, 0, 0, 1];
        let links = links([
            port("eth0", [1; 6], None),
            port("npv7", [2; 6], Some(true)),
            port("vnet0", LIBVIRTS, Some(false)), // e1000
            port("vnet1", LIBVIRTS, Some(true)),
            port("tap0", [2, 0, 0, 0, 0, 9], Some(false)),
            port("fc0", own, Some(true)),
            port("vnet2", [0xfe, 1, 2, 3, 4, 5], Some(true)).unheld(),
            port("vnet3", [0xfe, 9, 9, 9, 9, 9], Some(true)),
            port("vnet4", [0xfe, 8, 8, 8, 8, 8], Some(true)),
            Link::new("vnet5", 99, [0xfe, 7, 7, 7, 7, 7], Some(true)),
        ]);
        let vms = "[[vm]]\nname = \"a\"\ntap = \"vnet3\"\n[[vm]]\nname = \"b\"\n\
                   tap = \"vnet*\"\nmac = \"52:08:08:08:08:08\"\n";
        let Found { taps, bridges } = Bridges::default().look(&config(vms), &links);
        let found = |name: &str| taps[name].vm.tap.clone().map(|tap| (tap, taps[name].vm.mac));
        let mac = Some([0x52, 0x54, 0, 1, 2, 3]);
        assert_eq!(found("tap-fe5400010203"), Some(("vnet0".into(), mac)));
        assert_eq!(found("tap-020000000001"), Some(("fc0".into(), None)));
        assert_eq!(bridges[0].taps, ["vnet0", "fc0", "vnet3", "vnet4"]);
        let expected = [
            ("eth0", "it is no tap"),
            ("npv7", "it is a tap of a nightporterd"),
            ("vnet1", "another tap has its address"),
            ("tap0", "it may be no VM's: its address"),
            ("vnet2", "nobody holds it: its VM"),
        ];
        let begins = |(tap, why): &(&str, &str)| {
            let said = bridges[0].skipped.iter().find(|it| it.ifname == *tap);
            assert!(said.is_some_and(|it| it.why.starts_with(why)), "{tap}: {said:?}");
        };
        expected.iter().for_each(begins);
        assert_eq!(bridges[0].skipped.len(), expected.len());
        let none = Bridges::default().look(&config(""), &LinkWatch::of([])).bridges;
        assert_eq!(none[0].trouble.as_deref(), Some("there is no such bridge"));
    }

    #[test]
    fn a_tap_that_failed_is_tried_again_and_one_that_was_detached_is_not() {
        let links = links([port("vnet0", LIBVIRTS, Some(true))]);
        let (mut bridges, mut config) = (Bridges::default(), config(""));
        let at = Instant::from_secs(1000);
        let adds = |change: Option<Change>| matches!(change, Some(Change::AddVm { .. }));
        assert!(adds(bridges.poll_change(at, &config, &links)));
        let no = Reply::Error { what: "no memory".into(), fix: String::new() };
        assert!(bridges.handle_reply(at, &no) && !bridges.handle_reply(at, &no));
        assert_eq!(bridges.look(&config, &links).bridges[0].skipped[0].why, "no memory");
        let again = bridges.poll_timeout(&config).unwrap();
        assert!(!adds(bridges.poll_change(at, &config, &links)));
        assert!(adds(bridges.poll_change(again, &config, &links)));
        bridges.handle_reply(at, &Reply::Done {});
        config.vms.extend(bridges.look(&config, &links).taps.into_values().map(|tap| tap.vm));
        assert_eq!(bridges.poll_change(again, &config, &links), None);
        config.vms.clear(); // an operator has removed it
        bridges.note_change();
        assert_eq!(bridges.poll_change(again, &config, &links), None);
        let other = self::links([]);
        bridges.note_change();
        assert_eq!(bridges.poll_change(again, &config, &other), None);
        bridges.note_change();
        assert!(adds(bridges.poll_change(again, &config, &links)), "it was made anew");
        bridges.handle_reply(at, &no);
        config.attach.clear();
        assert_eq!(bridges.poll_change(again, &config, &links), None);
        assert_eq!(
            bridges.poll_timeout(&config),
            None,
            "control does not look for it without a pause"
        );
    }
}
