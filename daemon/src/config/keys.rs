//! A configuration as keys and values, as it would be written in the file: for changes by
//! `KEY=VALUE` at run time, and to show operators the differences.

use std::collections::BTreeMap;
use std::fmt::{Display, Write as _};
use std::path::{Path, PathBuf};

use super::reader::human_bytes;
use super::{Config, DaemonConfig, Problems, UplinkConfig, VmConfig, parse};

/// Keys of one table, and their values as TOML has them; `None` is not given.
pub type Keys = Vec<(&'static str, Option<String>)>;

/// Keys of a VM whose defaults depend on the VM.
const OWN_KEYS: [&str; 2] = ["name", "socket"];

/// The differences: key, value before, value now.
#[must_use]
pub fn differences(before: &Keys, now: &Keys) -> Vec<(&'static str, String, String)> {
    let shown = |value: &Option<String>| value.clone().unwrap_or_else(|| "none".into());
    let pairs = before.iter().zip(now).filter(|(a, b)| a.1 != b.1);
    pairs.map(|((key, before), (_, now))| (*key, shown(before), shown(now))).collect()
}

/// A string of TOML (toml.io, "Basic strings").
pub(super) fn quoted(value: impl Display) -> String {
    let mut text = String::from("\"");
    for c in value.to_string().chars() {
        // Writing to a String cannot fail.
        let _ = match c {
            '"' | '\\' => write!(text, "\\{c}"),
            c if c.is_control() => write!(text, "\\U{:08x}", u32::from(c)),
            c => write!(text, "{c}"),
        };
    }
    text + "\""
}

pub(super) fn path(path: &Path) -> Option<String> {
    Some(quoted(path.display()))
}

fn list(paths: &[PathBuf]) -> String {
    strings(paths.iter().map(|path| path.display()))
}

pub(super) fn strings(list: impl IntoIterator<Item: Display>) -> String {
    format!("[{}]", list.into_iter().map(quoted).collect::<Vec<_>>().join(", "))
}

pub(super) fn plain(value: impl Display) -> Option<String> {
    Some(value.to_string())
}

pub(super) fn mac(mac: [u8; 6]) -> String {
    quoted(mac.map(|byte| format!("{byte:02x}")).join(":"))
}

pub(super) fn ips(ips: &[std::net::IpAddr]) -> String {
    strings(ips)
}

impl DaemonConfig {
    /// All keys of `[daemon]`.
    #[must_use]
    pub fn keys(&self) -> Keys {
        vec![
            ("control", path(&self.control)),
            ("metrics", Some(self.metrics.map_or_else(|| quoted("off"), quoted))),
            ("metrics_allow_remote", plain(self.metrics_allow_remote)),
            ("arena", path(&self.arena)),
            ("socket_user", self.socket_user.as_ref().map(quoted)),
            ("socket_group", self.socket_group.as_ref().map(quoted)),
            ("socket_dirs", (!self.socket_dirs.is_empty()).then(|| list(&self.socket_dirs))),
            ("bridges", (!self.bridges.is_empty()).then(|| strings(&self.bridges))),
            ("busy_poll_us", plain(self.busy_poll_us)),
            ("cpu", self.cpu.map(|cpu| cpu.to_string())),
            ("rt_priority", plain(self.rt_priority)),
            ("log", Some(quoted(&self.log))),
            ("drain_timeout_s", plain(self.drain_timeout_s)),
        ]
    }
}

impl UplinkConfig {
    /// All keys of an `[[uplink]]`.
    #[must_use]
    pub fn keys(&self) -> Keys {
        let tap = self.kind == super::UplinkKind::Tap;
        vec![
            ("name", Some(quoted(&self.name))),
            ("network", self.network.as_ref().map(quoted)),
            ("kind", Some(quoted(self.kind.label()))),
            ("ifname", Some(quoted(&self.ifname))),
            ("create", tap.then(|| self.create.to_string())),
            ("bridge", self.bridge.as_ref().map(quoted)),
        ]
    }

    /// The uplink `name` with these keys.
    ///
    /// # Errors
    /// All that is wrong with them.
    pub fn of(name: &str, keys: &BTreeMap<String, String>) -> Result<Self, Problems> {
        parse::uplink_of(&named(name, keys))
    }
}

impl VmConfig {
    /// All keys of a `[[vm]]`.
    #[must_use]
    pub fn keys(&self) -> Keys {
        vec![
            ("name", Some(quoted(&self.name))),
            ("network", self.network.as_ref().map(quoted)),
            ("socket", path(&self.socket)),
            ("socket_user", self.socket_user.as_ref().map(quoted)),
            ("socket_group", self.socket_group.as_ref().map(quoted)),
            ("mac", self.mac.map(mac)),
            ("ips", self.ips.as_deref().map(ips)),
            ("vlan", self.vlan.map(|vlan| vlan.to_string())),
            ("trunk", self.trunk.as_ref().map(|trunk| format!("{trunk:?}"))),
            ("isolated", plain(self.isolated)),
            ("trusted", plain(self.trusted)),
            ("mtu", plain(self.mtu)),
            ("queue_pairs", plain(self.queue_pairs)),
            ("allow_unsealed_memory", plain(self.allow_unsealed_memory)),
            ("memory_max", self.memory_max.map(|bytes| quoted(human_bytes(bytes)))),
            ("ack_offload", plain(self.ack_offload)),
            ("local", Some(quoted(self.local.label()))),
            ("guest_ttl", self.guest_ttl.map(|ttl| ttl.to_string())),
            ("congestion_offload", plain(self.congestion_offload)),
            ("congestion_control", Some(quoted(self.congestion_control.label()))),
            ("toe", plain(self.toe)),
            ("toe_to_itself", plain(self.toe_to_itself)),
            ("boost", self.boost.map(|budget| quoted(super::boost::shown_as(budget)))),
            ("vcpu_cgroup", self.vcpu_cgroup.as_ref().map(quoted)),
            (
                "rate_limit_from_guest_mbit_s",
                self.rate_limit_from_guest_mbit_s.map(|limit| limit.to_string()),
            ),
            (
                "rate_limit_to_guest_mbit_s",
                self.rate_limit_to_guest_mbit_s.map(|limit| limit.to_string()),
            ),
            ("budget", Some(quoted(human_bytes(self.budget)))),
            ("flows_max", plain(self.flows_max)),
        ]
    }

    /// The keys that differ from `default`, which are the keys of another VM, and the two whose
    /// default depends on the VM.
    fn given(&self, default: &Keys) -> Keys {
        let own = self.keys().into_iter().zip(default);
        let given = own.filter(|(own, default)| own != *default || OWN_KEYS.contains(&own.0));
        given.map(|(own, _)| own).collect()
    }

    /// The VM `name` with these keys; what is not given has its default.
    ///
    /// # Errors
    /// All that is wrong with them.
    pub fn of(name: &str, keys: &BTreeMap<String, String>) -> Result<Self, Problems> {
        parse::vm_of(&named(name, keys))
    }

    /// The same VM with other values for these keys; an empty one is the default.
    ///
    /// # Errors
    /// All that is wrong with them.
    pub fn with(&self, keys: &BTreeMap<String, String>) -> Result<Self, Problems> {
        let own = self.keys().into_iter().filter_map(|(key, value)| Some((key.into(), value?)));
        let mut all: BTreeMap<String, String> = own.collect();
        all.extend(keys.iter().map(|(key, value)| (key.clone(), value.clone())));
        all.retain(|_, value| !value.trim().is_empty());
        Self::of(&self.name, &all)
    }
}

fn named(name: &str, keys: &BTreeMap<String, String>) -> BTreeMap<String, String> {
    let mut keys = keys.clone();
    keys.insert("name".into(), quoted(name));
    keys
}

impl Config {
    /// The file with this content.
    #[must_use]
    pub fn to_text(&self) -> String {
        self.text(VmConfig::keys)
    }

    /// The same without keys that have a VM's default: a thousand VMs are read in a fraction of the
    /// time.
    pub(super) fn short_text(&self) -> String {
        let default = VmConfig::of("default", &BTreeMap::new()).map(|vm| vm.keys());
        self.text(|vm| match &default {
            Ok(default) => vm.given(default),
            Err(_) => vm.keys(),
        })
    }

    fn text(&self, of_vm: impl Fn(&VmConfig) -> Keys) -> String {
        let mut text = String::new();
        let mut table = |head: &str, keys: Keys| {
            text += head;
            for (key, value) in keys {
                if let Some(value) = value {
                    text += &format!("{key} = {value}\n");
                }
            }
        };
        table("[daemon]\n", self.daemon.keys());
        self.registry.iter().for_each(|registry| table("[registry]\n", registry.keys()));
        self.toe.iter().for_each(|toe| table("[toe]\n", toe.keys()));
        self.toe_rules.iter().for_each(|rule| table("[[toe_rule]]\n", rule.keys()));
        self.uplinks.iter().for_each(|uplink| table("[[uplink]]\n", uplink.keys()));
        self.overlays.iter().for_each(|overlay| table("[[overlay]]\n", overlay.keys()));
        self.stations.iter().for_each(|s| table("[[station]]\n", super::station::keys(s)));
        self.vms.iter().for_each(|vm| table("[[vm]]\n", of_vm(vm)));
        text
    }

    /// Whether its parts fit together, as after one of them has changed. What runs may have
    /// congestion offload without ack offload, for commands turn off one by one.
    ///
    /// # Errors
    /// All that does not; the lines are those of no file.
    pub fn check(&self) -> Result<(), Problems> {
        let mut config = self.clone();
        config.vms.iter_mut().for_each(|vm| vm.ack_offload |= vm.congestion_offload);
        Self::parse("", &config.short_text(), &BTreeMap::new()).map(drop)
    }
}
