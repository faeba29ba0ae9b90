//! `[[attach]]`: the taps of a bridge, each as a VM.

use std::collections::BTreeMap;

use nightporter_core::limits::{FLOWS_PER_VM, VM_BUDGET};
use nightporter_core::port::Local;
use toml::de::DeValue;

use super::keys::{quoted, size};
use super::parse::{self, local, rate_limit};
use super::reader::{Document, Section, bytes, integer};
use super::table::table;
use super::{Problems, RATE_FIX, VmConfig};

table! {
    /// `[[attach]]`: the taps of a bridge are attached, those that come later too. The other keys
    /// are those of each VM ([`VmConfig`]).
    AttachConfig(s) {
        /// The bridge. It need not exist yet.
        bridge: String = required(
            bridge, "give the name of a bridge, as in \"virbr0\": letters, digits, `-`, `_`, `.`");
        /// As [`VmConfig::ack_offload`].
        ack_offload: bool = flag(true);
        /// As [`VmConfig::local`].
        local: Local = default(
            Local::default(), local, "write \"auto\", \"always\" or \"never\"");
        /// As [`VmConfig::guest_ttl`].
        guest_ttl: Option<u8> = optional(
            integer(1..=255), "give the TTL of the guests' packets, 1 to 255");
        /// As [`VmConfig::mtu`].
        mtu: u16 = default(1500, integer(68..=65535), "use 1500, or the bridge's own MTU");
        /// As [`VmConfig::rate_limit_from_guest_mbit_s`].
        rate_limit_from_guest_mbit_s: Option<u32> = optional(rate_limit(), RATE_FIX);
        /// As [`VmConfig::rate_limit_to_guest_mbit_s`].
        rate_limit_to_guest_mbit_s: Option<u32> = optional(rate_limit(), RATE_FIX);
        /// As [`VmConfig::budget`], of each VM.
        budget: u64 = default(
            VM_BUDGET, bytes(1 << 20..=64 << 30), "write bytes, or a string as in \"64M\""),
            shown(|it| size(it.budget));
        /// As [`VmConfig::flows_max`], of each VM.
        flows_max: u32 = default(
            FLOWS_PER_VM, integer(16..=1 << 20), "use 16384, or twice the connections you expect");
    }
}

impl AttachConfig {
    /// Those of a bridge with these keys.
    ///
    /// # Errors
    /// All that is wrong with them.
    pub fn of(bridge: &str, keys: &BTreeMap<String, String>) -> Result<Self, Problems> {
        let mut keys = keys.clone();
        keys.insert("bridge".into(), quoted(bridge));
        parse::attach_of(&keys)
    }

    /// The VM with such a tap. `None`: a bug, for all of its keys are a VM's.
    pub(crate) fn vm(&self, name: &str, tap: &str, mac: Option<[u8; 6]>) -> Option<VmConfig> {
        VmConfig::of(name, &self.keys_of(tap, mac)).ok()
    }

    /// The keys of the VM with such a tap, as a command would give them.
    fn keys_of(&self, tap: &str, mac: Option<[u8; 6]>) -> BTreeMap<String, String> {
        let own = self.keys().into_iter().filter(|(key, _)| *key != "bridge");
        let mut keys: BTreeMap<String, String> =
            own.filter_map(|(key, value)| Some((key.to_owned(), value?))).collect();
        keys.insert("tap".into(), quoted(tap));
        if let Some(mac) = mac {
            keys.insert("mac".into(), quoted(mac.map(|byte| format!("{byte:02x}")).join(":")));
        }
        keys
    }
}

pub(super) fn read_all(doc: &mut Document<'_>) -> Vec<AttachConfig> {
    let mut list = Vec::new();
    for value in doc.tables("attach") {
        if let Some(section) = doc.open("attach", value) {
            list.push(read(section, &list));
        }
    }
    list
}

pub(super) fn read(mut s: Section<'_, '_>, before: &[AttachConfig]) -> AttachConfig {
    let config = AttachConfig::read(&mut s);
    s.label = format!("{}.{}", s.label, config.bridge);
    if before.iter().any(|other| other.bridge == config.bridge) {
        s.problem("bridge", "is in another [[attach]]".into(), "keep one of them");
    }
    s.finish();
    config
}

/// It is in names of files, too.
fn bridge(v: &DeValue<'_>) -> Result<String, String> {
    parse::name(v).and_then(|_| parse::ifname(v))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn read(text: &str) -> Result<Config, String> {
        Config::parse("np.toml", text, &BTreeMap::new()).map_err(|e| e.to_string())
    }

    #[test]
    fn each_tap_of_a_bridge_is_a_vm_with_its_keys() {
        let text = "[[attach]]\nbridge = \"virbr0\"\nbudget = \"8M\"\nack_offload = false\n\
                    local = \"never\"\nguest_ttl = 7\nmtu = 9000\n\
                    rate_limit_from_guest_mbit_s = 5\nrate_limit_to_guest_mbit_s = 6\n\
                    flows_max = 32\n";
        let config = read(text).unwrap();
        assert_eq!(read(&config.to_text()).unwrap(), config);
        let mac = [0x52, 0x54, 0, 1, 2, 3];
        let vm = config.attach[0].vm("tap-1", "vnet0", Some(mac)).unwrap();
        let plain = VmConfig::of("tap-1", &BTreeMap::new()).unwrap();
        let expected = VmConfig {
            tap: Some("vnet0".into()),
            mac: Some(mac),
            budget: 8 << 20,
            ack_offload: false,
            local: Local::Never,
            guest_ttl: Some(7),
            mtu: 9000,
            rate_limit_from_guest_mbit_s: Some(5),
            rate_limit_to_guest_mbit_s: Some(6),
            flows_max: 32,
            ..plain
        };
        assert_eq!(vm, expected);
    }

    #[test]
    fn a_bridge_is_named_once_and_nothing_of_a_switch_goes_with_it() {
        let virbr0 = "[[attach]]\nbridge = \"virbr0\"\n";
        let twice = read(&format!("{virbr0}{virbr0}")).unwrap_err();
        assert!(twice.contains("np.toml:4: attach.virbr0.bridge: is in another"), "{twice}");
        assert!(read("[[attach]]\n").unwrap_err().contains("attach.bridge: is missing"));
        let boost = read(&format!("{virbr0}boost = \"15ms/90ms\"\n")).unwrap_err();
        assert!(boost.contains("attach.virbr0.boost: unknown key"), "{boost}");
    }
}
