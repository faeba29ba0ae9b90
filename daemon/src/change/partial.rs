//! A reload makes the changes that can be made while the daemon runs, and leaves the others for the
//! restart. A port changes as a whole or not at all, and so do the keys of `[daemon]` that only a
//! restart changes.

use std::collections::BTreeSet;

use super::plan::Part;
use super::{Plan, Refusal};
use crate::config::keys::differences;
use crate::config::{Config, DaemonConfig};

/// The configuration to which the daemon can go from `now` toward `wanted`, and the changes that
/// wait for a restart.
///
/// # Errors
/// It would be inconsistent: a part that comes needs one that waits.
pub(super) fn reachable(now: &Config, wanted: &Config) -> Result<(Config, Vec<String>), Refusal> {
    let mut waiting = BTreeSet::new();
    let mut waits: Vec<String> = Vec::new();
    let mut reached = wanted.clone();
    loop {
        let plan = Plan::between(now, &reached);
        let new: BTreeSet<_> = plan.waiting.difference(&waiting).cloned().collect();
        if new.is_empty() {
            break;
        }
        waits.extend(plan.needs_restart);
        waiting.extend(new);
        reached = holding_back(now, wanted, &waiting);
    }
    let is_consistent = waits.is_empty() || reached.check().is_ok();
    if !is_consistent {
        return Err(Refusal {
            what: format!("needs a restart: {}", waits.join("; ")),
            fix: "put that back as it was, or restart nightporterd; nothing was changed, because \
                  the rest cannot be without it"
                .into(),
        });
    }
    for part in &waiting {
        waits.extend(held_back(now, wanted, part, &waits));
    }
    Ok((reached, waits))
}

/// The keys of a part that could change, and wait because another one of it does. `named`: the
/// lines of those.
fn held_back(now: &Config, wanted: &Config, part: &Part, named: &[String]) -> Vec<String> {
    let (of, before, after) = match part {
        // All of their keys that wait are named, each for itself.
        Part::Daemon | Part::Registry | Part::Toe | Part::Uplink(_) => return Vec::new(),
        Part::Overlay(name) => {
            let keys = |config: &Config| {
                config.overlays.iter().find(|it| it.name == *name).map(|it| it.keys())
            };
            (format!("overlay.{name}"), keys(now), keys(wanted))
        }
        Part::Vm(name) => {
            let keys =
                |config: &Config| config.vms.iter().find(|it| it.name == *name).map(|it| it.keys());
            (format!("vm.{name}"), keys(now), keys(wanted))
        }
    };
    let Some((before, after)) = before.zip(after) else { return Vec::new() };
    let lines = differences(&before, &after).into_iter().filter_map(|(key, before, after)| {
        let key = format!("{of}.{key}");
        let is_named = named.iter().any(|line| line.split(' ').next() == Some(&key));
        (!is_named).then(|| format!("{key} {before} -> {after}"))
    });
    lines.collect()
}

/// `wanted`, with these parts as they are `now`.
fn holding_back(now: &Config, wanted: &Config, waiting: &BTreeSet<Part>) -> Config {
    let mut config = wanted.clone();
    for part in waiting {
        match part {
            Part::Daemon => {
                let DaemonConfig { drain_timeout_s, log, bridges, .. } = wanted.daemon.clone();
                config.daemon =
                    DaemonConfig { drain_timeout_s, log, bridges, ..now.daemon.clone() };
            }
            Part::Registry => config.registry.clone_from(&now.registry),
            Part::Toe => config.toe.clone_from(&now.toe),
            Part::Uplink(name) => hold(&mut config.uplinks, &now.uplinks, |it| it.name == *name),
            Part::Overlay(name) => hold(&mut config.overlays, &now.overlays, |it| it.name == *name),
            Part::Vm(name) => hold(&mut config.vms, &now.vms, |it| it.name == *name),
        }
    }
    config
}

/// The port is as it was, or is not there if it was not.
fn hold<T: Clone>(ports: &mut Vec<T>, now: &[T], is_it: impl Fn(&T) -> bool) {
    let before = now.iter().find(|port| is_it(port));
    match (ports.iter_mut().find(|port| is_it(port)), before) {
        (Some(port), Some(before)) => port.clone_from(before),
        (None, Some(before)) => ports.push(before.clone()),
        (Some(_), None) => ports.retain(|port| !is_it(port)),
        (None, None) => {}
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn config(text: &str) -> Config {
        Config::parse("np.toml", text, &BTreeMap::new()).unwrap()
    }

    const LAN: &str = "[[uplink]]\nname = \"lan\"\nkind = \"tap\"\nifname = \"np0\"\n";
    const VMS: &str = "[[vm]]\nname = \"a\"\n[[vm]]\nname = \"b\"\n";

    fn now() -> Config {
        config(&format!("{LAN}{VMS}"))
    }

    /// The lines of the plan that is made, and those that wait.
    fn reached(wanted: &str) -> (Vec<String>, Vec<String>) {
        let (reached, waits) = reachable(&now(), &config(wanted)).unwrap();
        let plan = Plan::between(&now(), &reached);
        assert!(plan.needs_restart.is_empty(), "{plan:?}");
        (plan.lines, waits)
    }

    #[test]
    fn all_is_reached_if_nothing_waits() {
        let (lines, waits) = reached(&format!("{LAN}{VMS}[[vm]]\nname = \"c\"\n"));
        assert_eq!((lines, waits), (vec!["+ vm c".into()], vec![]));
    }

    #[test]
    fn keys_of_the_daemon_wait_and_ports_come() {
        let daemon = "[daemon]\ncpu = 3\ndrain_timeout_s = 3\n";
        let (lines, waits) = reached(&format!("{daemon}{LAN}{VMS}[[vm]]\nname = \"c\"\n"));
        assert_eq!(lines, ["~ daemon: drain_timeout_s 10 -> 3", "+ vm c"]);
        assert_eq!(waits, ["daemon.cpu none -> 3"]);
    }

    #[test]
    fn a_vm_changes_as_a_whole_or_waits() {
        let wanted = "[[vm]]\nname = \"a\"\nmtu = 9000\nnetwork = \"red\"\n\
                      [[vm]]\nname = \"b\"\nmtu = 9000\n";
        let (lines, waits) = reached(&format!("{LAN}{wanted}"));
        assert_eq!(lines, ["~ vm b: mtu 1500 -> 9000 (told when its VMM connects)"]);
        assert_eq!(waits, ["vm.a.network none -> red", "vm.a.mtu 1500 -> 9000"]);
    }

    #[test]
    fn an_uplink_with_another_name_does_not_go_before_it_can_come() {
        let renamed = LAN.replace("\"lan\"", "\"wan\"");
        let (lines, waits) = reached(&format!("{renamed}{VMS}[[vm]]\nname = \"c\"\n"));
        assert_eq!(lines, ["+ vm c"]);
        assert_eq!(waits, ["uplink.wan gets what uplink.lan has now (two changes)"]);
    }

    #[test]
    fn vms_that_exchange_a_mac_wait_together() {
        let mac = "mac = \"52:54:00:00:00:01\"\n";
        let [had, gets] = [
            format!("{LAN}[[vm]]\nname = \"a\"\n{mac}[[vm]]\nname = \"b\"\n"),
            format!("{LAN}[[vm]]\nname = \"a\"\nmtu = 9000\n[[vm]]\nname = \"b\"\n{mac}"),
        ]
        .map(|text| config(&text));
        let (reached, waits) = reachable(&had, &gets).unwrap();
        assert_eq!(Plan::between(&had, &reached), Plan::default());
        let mac = "\"52:54:00:00:00:01\"";
        let held = [
            "vm.b gets what vm.a has now (two changes)".into(),
            format!("vm.a.mac {mac} -> none"),
            "vm.a.mtu 1500 -> 9000".into(),
            format!("vm.b.mac none -> {mac}"),
        ];
        assert_eq!(waits, held);
    }

    #[test]
    fn all_keys_of_an_overlay_that_waits_are_named() {
        let overlay = |vni: u32, peer: &str, mtu: u32| {
            let keys = format!("vni = {vni}\nlocal = \"192.0.2.1\"\npeers = [\"{peer}\"]");
            config(&format!("{VMS}[[overlay]]\nname = \"o\"\n{keys}\nmtu = {mtu}\n"))
        };
        let (now, wanted) = (overlay(7, "192.0.2.2", 1450), overlay(8, "192.0.2.3", 1450));
        let (reached, waits) = reachable(&now, &wanted).unwrap();
        assert_eq!(Plan::between(&now, &reached), Plan::default());
        let peers = "overlay.o.peers [\"192.0.2.2:4789\"] -> [\"192.0.2.3:4789\"]";
        assert_eq!(waits, ["overlay.o.vni 7 -> 8", peers]);
    }

    #[test]
    fn a_rest_that_cannot_be_alone_is_refused_with_all() {
        // The VM that stays in its network has the socket that another one is to get.
        let wanted = "[[vm]]\nname = \"a\"\nnetwork = \"red\"\nsocket = \"/run/x\"\n\
                      [[vm]]\nname = \"b\"\n\
                      [[vm]]\nname = \"c\"\nsocket = \"/run/nightporter/a.sock\"\n";
        let wanted = config(&format!("{LAN}{wanted}"));
        let refusal = reachable(&now(), &wanted).unwrap_err();
        assert!(refusal.what.starts_with("needs a restart: vm.a.network"), "{refusal:?}");
        assert!(refusal.fix.contains("the rest cannot be without it"), "{refusal:?}");
    }
}
