//! A configuration as keys and values, as it would be written in the file: for changes by
//! `KEY=VALUE` at run time, and to show operators the differences.

use std::collections::BTreeMap;
use std::fmt::{Display, Write as _};

use super::reader::human_bytes;
use super::{Config, Problems, UplinkConfig, VmConfig, parse};

/// Keys of one table, and their values as TOML has them; `None` is not given.
pub type Keys = Vec<(&'static str, Option<String>)>;

/// The differences: key, value before, value now.
#[must_use]
pub fn differences(before: &Keys, now: &Keys) -> Vec<(&'static str, String, String)> {
    let shown = |value: &Option<String>| value.clone().unwrap_or_else(|| "none".into());
    let pairs = before.iter().zip(now).filter(|(a, b)| a.1 != b.1);
    pairs.map(|((key, before), (_, now))| (*key, shown(before), shown(now))).collect()
}

/// A string of TOML (toml.io, "Basic strings").
pub(crate) fn quoted(value: impl Display) -> String {
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

pub(super) fn strings(list: impl IntoIterator<Item: Display>) -> String {
    format!("[{}]", list.into_iter().map(quoted).collect::<Vec<_>>().join(", "))
}

pub(super) fn plain(value: impl Display) -> Option<String> {
    Some(value.to_string())
}

/// Bytes as an operator writes them.
pub(super) fn size(bytes: u64) -> Option<String> {
    Some(quoted(human_bytes(bytes)))
}

impl UplinkConfig {
    /// The uplink `name` with these keys.
    ///
    /// # Errors
    /// All that is wrong with them.
    pub fn of(name: &str, keys: &BTreeMap<String, String>) -> Result<Self, Problems> {
        parse::uplink_of(&named(name, keys))
    }
}

impl VmConfig {
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
        self.text(&self.vms)
    }

    /// The same with these VMs.
    fn text(&self, vms: &[VmConfig]) -> String {
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
        self.attach.iter().for_each(|bridge| table("[[attach]]\n", bridge.keys()));
        vms.iter().for_each(|vm| table("[[vm]]\n", vm.keys()));
        text
    }

    /// Whether its parts fit together, as after one of them has changed. Each VM is right by
    /// itself, and so is not read again: there may be a thousand.
    ///
    /// # Errors
    /// All that does not; the lines are those of no file.
    pub fn check(&self) -> Result<(), Problems> {
        parse::config("", &self.text(&[]), &BTreeMap::new(), &self.vms).map(drop)
    }
}
