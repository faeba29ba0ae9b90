//! The steps from one configuration to another.

use std::collections::{BTreeMap, BTreeSet};

use nightporter_core::time::Duration;

use crate::config::keys::{Keys, differences, quoted};
use crate::config::{
    AttachConfig, Config, OverlayConfig, RegistryConfig, ToeConfig, UplinkConfig, VmConfig,
};
use crate::worker::steps::Step;

/// Keys of `[daemon]` that are changed in a running daemon.
pub(super) const LIVE: [&str; 1] = ["drain_timeout_s"];
/// Keys of an overlay that are changed in a running daemon.
const LIVE_OF_OVERLAYS: [&str; 2] = ["peers", "mtu"];
/// Keys of a VM that its VMM is told only when it connects.
const AT_CONNECT: [&str; 3] = ["mac", "mtu", "queue_pairs"];
/// Keys of a VM that a socket has from when it is made.
const OF_A_SOCKET: [&str; 2] = ["socket_user", "socket_group"];

/// Steps in an order in which each of them can be taken.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Plan {
    /// The steps.
    pub steps: Vec<Step>,
    /// For operators: a line for each step, in the same order, and those of what control does when
    /// all steps are done: bridges whose taps are attached, the log's filter.
    pub lines: Vec<String>,
    /// Changes that cannot be made while the daemon runs.
    pub needs_restart: Vec<String>,
    /// The VM or bridge that a command adds and no file has, as it is written in a file.
    pub section: Option<String>,
    /// The parts of the configuration that these are of.
    pub(super) waiting: BTreeSet<Part>,
}

/// A part of the configuration that changes as a whole or not at all.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) enum Part {
    /// Keys of `[daemon]` that are none of [`LIVE`].
    Daemon,
    /// `[registry]`.
    Registry,
    /// `[toe]`.
    Toe,
    /// The uplink with this name.
    Uplink(String),
    /// The overlay with this name.
    Overlay(String),
    /// The VM with this name.
    Vm(String),
}

impl Plan {
    /// From the running configuration to the wanted one, which is consistent ([`Config::check`]).
    #[must_use]
    pub fn between(now: &Config, wanted: &Config) -> Self {
        let mut plan = Self::default();
        let (vms_now, vms) = (by_name(&now.vms, |v| &v.name), by_name(&wanted.vms, |v| &v.name));
        let uplinks_now = by_name(&now.uplinks, |u| &u.name);
        let uplinks = by_name(&wanted.uplinks, |u| &u.name);
        plan.remove(now, &vms, &uplinks);
        plan.remove_overlays(now, wanted);
        for vm in &wanted.vms {
            if let Some(before) = vms_now.get(vm.name.as_str()) {
                plan.set_vm(before, vm, &vms, now);
            }
        }
        plan.set_daemon(now, wanted);
        let boosts = |config: &Config| config.vms.iter().any(|vm| vm.boost.is_some());
        if boosts(wanted) && !boosts(now) {
            for vm in wanted.vms.iter().filter(|vm| vm.boost.is_some()) {
                plan.wait(
                    Part::Vm(vm.name.clone()),
                    format!("vm.{}: the first with boost", vm.name),
                );
            }
        }
        plan.set_stations(now, wanted);
        for uplink in &wanted.uplinks {
            match uplinks_now.get(uplink.name.as_str()) {
                Some(before) if *before == uplink => {}
                Some(before) => plan.keep_uplink(before, uplink),
                None => plan.add_uplink(uplink, &now.uplinks),
            }
        }
        plan.set_overlays(now, wanted);
        for vm in wanted.vms.iter().filter(|vm| !vms_now.contains_key(vm.name.as_str())) {
            plan.add(Step::AddVm(Box::new(vm.clone())), &vm.name, given_keys(vm));
        }
        plan.set_bridges(now, wanted);
        if now.daemon.log != wanted.daemon.log {
            let (before, after) = (&now.daemon.log, &wanted.daemon.log);
            plan.lines.push(format!("~ daemon: log {before:?} -> {after:?}"));
        }
        plan
    }

    /// VMs that go have so many milliseconds until none of their connections owes anything.
    pub(super) fn set_drain(&mut self, ms: u64) {
        for step in &mut self.steps {
            if let Step::RemoveVm(_, drain) = step {
                *drain = Some(Duration::from_millis(ms));
            }
        }
    }

    fn remove(
        &mut self,
        now: &Config,
        vms: &BTreeMap<&str, &VmConfig>,
        uplinks: &BTreeMap<&str, &UplinkConfig>,
    ) {
        for name in
            now.vms.iter().map(|vm| &vm.name).filter(|name| !vms.contains_key(name.as_str()))
        {
            self.steps.push(Step::RemoveVm(name.clone(), None));
            self.lines.push(format!("- vm {name}: its connections end"));
        }
        let gone = now.uplinks.iter().map(|uplink| &uplink.name);
        for name in gone.filter(|name| !uplinks.contains_key(name.as_str())) {
            self.steps.push(Step::RemoveUplink(name.clone()));
            self.lines.push(format!("- uplink {name}"));
        }
    }

    fn set_vm(
        &mut self,
        before: &VmConfig,
        vm: &VmConfig,
        wanted: &BTreeMap<&str, &VmConfig>,
        now: &Config,
    ) {
        if before == vm {
            return; // most are, and their keys are some fifty texts each
        }
        let differ = differences(&before.keys(), &vm.keys());
        if differ.is_empty() {
            return;
        }
        let moves = before.socket != vm.socket;
        if before.network != vm.network {
            let [before, after] = [before, vm].map(|vm| vm.network.as_deref().unwrap_or("none"));
            let what = format!("vm.{}.network {before} -> {after}", vm.name);
            self.wait(Part::Vm(vm.name.clone()), what);
        }
        for (key, before, after) in &differ {
            if *key == "tap" {
                let how = "(remove the VM, and add it)";
                let what = format!("vm.{}.tap {before} -> {after} {how}", vm.name);
                self.wait(Part::Vm(vm.name.clone()), what);
            } else if OF_A_SOCKET.contains(key) && !moves {
                let what = format!("vm.{}.{key} {before} -> {after}", vm.name);
                self.wait(Part::Vm(vm.name.clone()), what);
            }
        }
        // The present holder gives it up in a step of its own, which may be a later one.
        let holder = now.vms.iter().find(|other| {
            let has_mac = vm.mac.is_some() && other.mac == vm.mac && other.network == vm.network;
            let sockets = |vm: &VmConfig| [Some(vm.socket.clone()), vm.toe_socket()];
            let mut own = sockets(vm).into_iter().flatten();
            let taken = own.any(|own| sockets(other).contains(&Some(own))) || has_mac;
            other.name != vm.name && taken && wanted.contains_key(other.name.as_str())
        });
        if let Some(holder) = holder {
            let (vm, holder) = (&vm.name, &holder.name);
            self.waiting.insert(Part::Vm(holder.clone()));
            let what = format!("vm.{vm} gets what vm.{holder} has now (two changes)");
            self.wait(Part::Vm(vm.clone()), what);
        }
        let what: Vec<_> = differ
            .iter()
            .map(|(key, before, now)| {
                let later =
                    if AT_CONNECT.contains(key) { " (told when its VMM connects)" } else { "" };
                format!("{key} {before} -> {now}{later}")
            })
            .collect();
        self.lines.push(format!("~ vm {}: {}", vm.name, what.join(", ")));
        self.steps.push(Step::SetVm(Box::new((before.clone(), vm.clone()))));
    }

    fn set_daemon(&mut self, now: &Config, wanted: &Config) {
        for (key, before, after) in differences(&now.daemon.keys(), &wanted.daemon.keys()) {
            if ["bridges", "taps", "log"].contains(&key) {
                // The broker's own: it reads the file itself. The log is last.
            } else if LIVE.contains(&key) {
                self.steps.push(Step::SetDrainTimeout(wanted.daemon.drain_timeout_s));
                self.lines.push(format!("~ daemon: {key} {before} -> {after}"));
            } else {
                self.wait(Part::Daemon, format!("daemon.{key} {before} -> {after}"));
            }
        }
    }

    fn set_bridges(&mut self, now: &Config, wanted: &Config) {
        let before = by_name(&now.attach, |it| &it.bridge);
        let after = by_name(&wanted.attach, |it| &it.bridge);
        for bridge in before.keys().filter(|bridge| !after.contains_key(**bridge)) {
            self.lines.push(format!("- attach {bridge}: its taps become plain, one by one"));
        }
        for (bridge, attach) in after {
            let what = match before.get(bridge) {
                None => format!("+ attach {bridge}: its taps are attached, one by one"),
                Some(before) => {
                    let differ = differences(&before.keys(), &attach.keys()).into_iter();
                    let differ = differ.map(|(key, old, new)| format!("{key} {old} -> {new}"));
                    let differ: Vec<_> = differ.collect();
                    if differ.is_empty() {
                        continue;
                    }
                    format!("~ attach {bridge}: {}", differ.join(", "))
                }
            };
            self.lines.push(what);
        }
    }

    fn remove_overlays(&mut self, now: &Config, wanted: &Config) {
        let after = by_name(&wanted.overlays, |o| &o.name);
        for name in now.overlays.iter().map(|o| &o.name) {
            if !after.contains_key(name.as_str()) {
                self.steps.push(Step::RemoveOverlay(name.clone()));
                self.lines.push(format!("- overlay {name}"));
            }
        }
    }

    fn set_overlays(&mut self, now: &Config, wanted: &Config) {
        let before = by_name(&now.overlays, |o| &o.name);
        for overlay in &wanted.overlays {
            let name = &overlay.name;
            let Some(before) = before.get(name.as_str()) else {
                self.add_overlay(overlay, now);
                continue;
            };
            let differ = differences(&before.keys(), &overlay.keys());
            for (key, before, after) in &differ {
                if !LIVE_OF_OVERLAYS.contains(key) {
                    let what = format!("overlay.{name}.{key} {before} -> {after}");
                    self.wait(Part::Overlay(name.clone()), what);
                }
            }
            let what = differ.iter().map(|(key, before, now)| format!("{key} {before} -> {now}"));
            let what: Vec<_> = what.collect();
            if !what.is_empty() {
                self.lines.push(format!("~ overlay {name}: {}", what.join(", ")));
                self.steps.push(Step::SetOverlay(Box::new(overlay.clone())));
            }
        }
    }

    /// A table that only a restart changes.
    fn keep(&mut self, part: &Part, name: &str, now: Option<Keys>, wanted: Option<Keys>) {
        let differ = match (now, wanted) {
            (None, None) => vec![],
            (Some(now), Some(wanted)) => differences(&now, &wanted)
                .into_iter()
                .map(|(key, before, after)| format!("{name}.{key} {before} -> {after}"))
                .collect(),
            (None, Some(_)) => vec![format!("{name} comes")],
            (Some(_), None) => vec![format!("{name} goes")],
        };
        differ.into_iter().for_each(|what| self.wait(part.clone(), what));
    }

    /// Only a restart makes this change, which is a part of the configuration or in one.
    fn wait(&mut self, part: Part, what: String) {
        self.needs_restart.push(what);
        self.waiting.insert(part);
    }

    fn set_stations(&mut self, now: &Config, wanted: &Config) {
        let registry = |config: &Config| config.registry.as_ref().map(RegistryConfig::keys);
        self.keep(&Part::Registry, "registry", registry(now), registry(wanted));
        let toe = |config: &Config| config.toe.as_ref().map(ToeConfig::keys);
        self.keep(&Part::Toe, "toe", toe(now), toe(wanted));
        if now.toe_rules != wanted.toe_rules {
            let (before, after) = (now.toe_rules.len(), wanted.toe_rules.len());
            self.lines
                .push(format!("~ toe rules: {before} -> {after}, for connections from now on"));
            self.steps.push(Step::SetToeRules(wanted.toe_rules.clone()));
        }
        if now.stations != wanted.stations {
            let (before, after) = (now.stations.len(), wanted.stations.len());
            self.lines.push(format!("~ stations: {before} listed -> {after}"));
            self.steps.push(Step::SetStations(wanted.stations.clone()));
        }
    }

    fn add_overlay(&mut self, overlay: &OverlayConfig, now: &Config) {
        // Its sockets are opened before any port goes.
        let place = |it: &OverlayConfig| (it.local, it.vni);
        if let Some(holder) = now.overlays.iter().find(|it| place(it) == place(overlay)) {
            let (name, holder) = (&overlay.name, &holder.name);
            self.waiting.insert(Part::Overlay(holder.clone()));
            let what = format!("overlay.{name} gets what overlay.{holder} has now (two changes)");
            self.wait(Part::Overlay(name.clone()), what);
        }
        self.add(Step::AddOverlay(Box::new(overlay.clone())), &overlay.name, overlay.keys());
    }

    fn keep_uplink(&mut self, before: &UplinkConfig, uplink: &UplinkConfig) {
        for (key, before, after) in differences(&before.keys(), &uplink.keys()) {
            let name = &uplink.name;
            let what = format!("uplink.{name}.{key} {before} -> {after}");
            self.wait(Part::Uplink(name.clone()), what);
        }
    }

    fn add_uplink(&mut self, uplink: &UplinkConfig, now: &[UplinkConfig]) {
        // Its interface is opened before any port goes.
        if let Some(holder) = now.iter().find(|other| other.ifname == uplink.ifname) {
            let (name, holder) = (&uplink.name, &holder.name);
            self.waiting.insert(Part::Uplink(holder.clone()));
            let what = format!("uplink.{name} gets what uplink.{holder} has now (two changes)");
            self.wait(Part::Uplink(name.clone()), what);
        }
        self.add(Step::AddUplink(uplink.clone()), &uplink.name, uplink.keys());
    }

    fn add(&mut self, step: Step, name: &str, keys: Keys) {
        let kind = match step {
            Step::AddVm(_) => "vm",
            Step::AddOverlay(_) => "overlay",
            _ => "uplink",
        };
        let keys = keys.into_iter().filter(|(key, _)| *key != "name");
        let keys: Vec<_> =
            keys.filter_map(|(key, value)| Some(format!("{key} {}", value?))).collect();
        let colon = if keys.is_empty() { "" } else { ": " };
        self.lines.push(format!("+ {kind} {name}{colon}{}", keys.join(", ")));
        self.steps.push(step);
    }
}

/// A VM that is there, as it is written in a file.
pub(super) fn section_of(vm: &VmConfig) -> String {
    let keys = given_keys(vm).into_iter().filter(|(key, _)| *key != "name");
    let lines = keys.filter_map(|(key, value)| Some(format!("{key} = {}\n", value?)));
    format!("[[vm]]\nname = {}\n{}", quoted(&vm.name), lines.collect::<String>())
}

/// Likewise, a bridge.
pub(super) fn section_of_bridge(attach: &AttachConfig) -> String {
    let default = AttachConfig::of(&attach.bridge, &BTreeMap::new()).map(|it| it.keys());
    let keys = default.map_or_else(|_| attach.keys(), |default| given(&default, attach.keys()));
    let lines = keys.into_iter().filter(|(key, _)| *key != "bridge");
    let lines = lines.filter_map(|(key, value)| Some(format!("{key} = {}\n", value?)));
    let bridge = quoted(&attach.bridge);
    format!("[[attach]]\nbridge = {bridge}\n{}", lines.collect::<String>())
}

fn given_keys(vm: &VmConfig) -> Keys {
    let default = VmConfig::of(&vm.name, &BTreeMap::new()).map(|vm| vm.keys());
    default.map_or_else(|_| vm.keys(), |default| given(&default, vm.keys()))
}

/// The keys that differ from the default.
fn given(default: &Keys, keys: Keys) -> Keys {
    default.iter().zip(keys).filter(|(default, key)| *default != key).map(|(_, key)| key).collect()
}

fn by_name<T>(list: &[T], name: impl Fn(&T) -> &String) -> BTreeMap<&str, &T> {
    list.iter().map(|it| (name(it).as_str(), it)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(text: &str) -> Config {
        Config::parse("np.toml", text, &BTreeMap::new()).unwrap()
    }

    const NOW: &str = "[[uplink]]\nname = \"lan\"\nkind = \"tap\"\nifname = \"np0\"\n\
                       [[vm]]\nname = \"a\"\n[[vm]]\nname = \"b\"\nmac = \"52:54:00:00:00:0b\"\n";

    #[test]
    fn what_is_the_same_needs_no_step() {
        assert_eq!(Plan::between(&config(NOW), &config(NOW)), Plan::default());
    }

    #[test]
    fn who_goes_makes_room_before_others_change_and_come() {
        let wanted = "[daemon]\ndrain_timeout_s = 3\nlog = \"warn\"\n\
                      [[uplink]]\nname = \"wan\"\nkind = \"tap\"\nifname = \"np1\"\n\
                      [[vm]]\nname = \"a\"\nmac = \"52:54:00:00:00:0b\"\nmtu = 9000\n\
                      budget = \"8M\"\n\
                      [[vm]]\nname = \"c\"\nack_offload = false\n[[vm]]\nname = \"d\"\n";
        let plan = Plan::between(&config(NOW), &config(wanted));
        assert_eq!(
            plan.lines,
            [
                "- vm b: its connections end",
                "- uplink lan",
                "~ vm a: mac none -> \"52:54:00:00:00:0b\" (told when its VMM connects), \
                 mtu 1500 -> 9000 (told when its VMM connects), budget \"64M\" -> \"8M\"",
                "~ daemon: drain_timeout_s 10 -> 3",
                "+ uplink wan: kind \"tap\", ifname \"np1\", create true",
                "+ vm c: ack_offload false",
                "+ vm d",
                "~ daemon: log \"info\" -> \"warn\"",
            ]
        );
        assert_eq!(plan.steps.len(), 7, "the log is no step");
        assert!(plan.needs_restart.is_empty());
    }

    fn overlay_text(name: &str, more: &str) -> String {
        let keys = "vni = 7\nlocal = \"192.0.2.1\"\npeers = [\"192.0.2.2\"]";
        format!("{NOW}[[overlay]]\nname = \"{name}\"\n{keys}\n{more}")
    }

    fn overlay(name: &str, more: &str) -> Config {
        config(&overlay_text(name, more))
    }

    #[test]
    fn ports_come_in_the_order_in_which_they_are_numbered_at_a_start() {
        let none = Config { vms: Vec::new(), uplinks: Vec::new(), ..config(NOW) };
        let plan = Plan::between(&none, &overlay("o", ""));
        let begins: Vec<_> = plan.lines.iter().map(|line| line.get(..9).unwrap_or(line)).collect();
        assert_eq!(begins, ["+ uplink ", "+ overlay", "+ vm a", "+ vm b: m"]);
    }

    #[test]
    fn overlays_come_go_and_get_other_peers() {
        let plan = |now: &Config, wanted: &Config| Plan::between(now, wanted);
        let peers = overlay_text("o", "").replace("[\"192.0.2.2\"]", "[\"192.0.2.3\"]");
        let found = plan(&overlay("o", ""), &config(&(peers + "mtu = 8950\n")));
        assert_eq!(
            found.lines,
            ["~ overlay o: peers [\"192.0.2.2:4789\"] -> [\"192.0.2.3:4789\"], mtu 1450 -> 8950"]
        );
        assert!(
            matches!(&found.steps[..], [Step::SetOverlay(_)]) && found.needs_restart.is_empty()
        );
        let found = plan(&config(NOW), &overlay("o", ""));
        let keys = "vni 7, local \"192.0.2.1:4789\", peers [\"192.0.2.2:4789\"], mtu 1450";
        assert_eq!(found.lines, [format!("+ overlay o: {keys}")]);
        assert_eq!(plan(&overlay("o", ""), &config(NOW)).lines, ["- overlay o"]);
    }

    #[test]
    fn what_needs_a_restart_is_named() {
        let wanted = NOW.replace("np0", "np1");
        let wanted = format!("[daemon]\ncpu = 3\n{wanted}");
        assert_eq!(
            Plan::between(&config(NOW), &config(&wanted)).needs_restart,
            ["daemon.cpu none -> 3", "uplink.lan.ifname \"np0\" -> \"np1\"",]
        );
        let taken = NOW.replace("name = \"a\"\n", "name = \"a\"\nmac = \"52:54:00:00:00:0b\"\n");
        let taken = taken.replacen(
            "0b\"\n[[vm]]\nname = \"b\"\nmac = \"52:54:00:00:00:0b\"",
            "0b\"\n[[vm]]\nname = \"b\"",
            1,
        );
        assert_eq!(
            Plan::between(&config(NOW), &config(&taken)).needs_restart,
            ["vm.a gets what vm.b has now (two changes)"]
        );
        let moved = NOW.replacen("name = \"a\"\n", "name = \"a\"\nnetwork = \"red\"\n", 1);
        assert_eq!(
            Plan::between(&config(NOW), &config(&moved)).needs_restart,
            ["vm.a.network none -> red"]
        );
        let other = config(&overlay_text("o", "").replace("vni = 7", "vni = 8"));
        assert_eq!(
            Plan::between(&overlay("o", ""), &other).needs_restart,
            ["overlay.o.vni 7 -> 8"]
        );
        assert_eq!(
            Plan::between(&overlay("o", ""), &overlay("p", "")).needs_restart,
            ["overlay.p gets what overlay.o has now (two changes)"]
        );
        let renamed = NOW.replace("name = \"lan\"", "name = \"wan\"");
        assert_eq!(
            Plan::between(&config(NOW), &config(&renamed)).needs_restart,
            ["uplink.wan gets what uplink.lan has now (two changes)"]
        );
    }
}
