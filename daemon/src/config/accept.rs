//! `vm.accept_offload` and `vm.accept_from`: at which ports the host answers SYNs, and for whom.

use std::net::IpAddr;
use std::ops::RangeInclusive;

use ipnet::IpNet;
use nightporter_core::tcp::accept::AcceptConfig;
use nightporter_core::tcp::accept::learned::{AcceptFrom, Prefix};
use nightporter_core::time::Instant;
use nightporter_core::wire::packet::IpAddr16;
use toml::de::{DeString, DeValue};

use super::VmConfig;
use super::keys::{quoted, strings};
use super::reader::shown;
use super::table::Shown;
use super::toe_rule::{network, port_range};

/// Ranges of ports that a VM may have; each SYN to it looks at all of them.
const RANGES_MAX: usize = 64;

/// The guest's ports at which the host may answer.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct AcceptPorts(Vec<RangeInclusive<u16>>);

impl AcceptPorts {
    /// None: accept offload is off.
    #[must_use]
    pub const fn is_off(&self) -> bool {
        self.0.is_empty()
    }

    fn all() -> Self {
        Self(vec![1..=u16::MAX])
    }
}

impl Shown for AcceptPorts {
    fn shown(&self) -> Option<String> {
        let port = |it: &RangeInclusive<u16>| match (it.start(), it.end()) {
            (first, last) if first == last => first.to_string(),
            (first, last) => format!("{first}-{last}"),
        };
        let list = || strings(self.0.iter().map(port));
        (!self.is_off()).then(|| if *self == Self::all() { "true".into() } else { list() })
    }
}

/// Those whose connections speak for a source.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub enum AcceptSources {
    /// The source itself.
    #[default]
    Itself,
    /// Any in the same one of these networks, too.
    Networks(Vec<IpNet>),
    /// Anybody.
    Any,
}

impl Shown for AcceptSources {
    fn shown(&self) -> Option<String> {
        match self {
            Self::Itself => None,
            Self::Networks(networks) => Some(strings(networks)),
            Self::Any => Some(quoted("any")),
        }
    }
}

/// Accept offload of a VM for the engine, from an instant on; `None`: it is off.
#[must_use]
pub(crate) fn of_vm(vm: &VmConfig, begins_at: Instant) -> Option<AcceptConfig> {
    let prefix = |net: &IpNet| {
        let bits = u32::from(net.prefix_len());
        let address = match net.network() {
            IpAddr::V4(address) => IpAddr16::from_v4(address.octets()),
            IpAddr::V6(address) => IpAddr16(address.octets()),
        };
        Prefix::of(address, bits, bits)
    };
    let from = match &vm.accept_from {
        AcceptSources::Itself => AcceptFrom::Itself,
        AcceptSources::Networks(networks) => {
            AcceptFrom::Networks(networks.iter().map(prefix).collect())
        }
        AcceptSources::Any => AcceptFrom::Any,
    };
    let ports = vm.accept_offload.0.clone();
    (!vm.accept_offload.is_off()).then_some(AcceptConfig { ports, from, begins_at })
}

pub(super) fn ports(v: &DeValue<'_>) -> Result<AcceptPorts, String> {
    match v.as_bool() {
        Some(true) => return Ok(AcceptPorts::all()),
        Some(false) => return Ok(AcceptPorts::default()),
        None => {}
    }
    let mut ports = items(v, port_range)?;
    ports.sort_unstable_by_key(|range| (*range.start(), *range.end()));
    ports.dedup();
    Ok(AcceptPorts(ports))
}

pub(super) fn sources(v: &DeValue<'_>) -> Result<AcceptSources, String> {
    match v.as_str() {
        Some("any") => Ok(AcceptSources::Any),
        _ => items(v, network).map(AcceptSources::Networks),
    }
}

/// Those of a list. On a command line: `accept_offload=443,8000-8099`.
fn items<T>(
    v: &DeValue<'_>,
    read: fn(&DeValue<'_>) -> Result<T, String>,
) -> Result<Vec<T>, String> {
    let items: Vec<T> = match (v.as_array(), v.as_str()) {
        (Some(list), _) => list.iter().map(|v| read(v.get_ref())).collect::<Result<_, _>>()?,
        (None, Some(text)) => {
            let item = |item: &str| read(&DeValue::String(DeString::Borrowed(item.trim())));
            text.split(',').map(item).collect::<Result<_, _>>()?
        }
        (None, None) => vec![read(v)?],
    };
    match items.len() {
        0 => Err(format!("{} is empty", shown(v))),
        1..=RANGES_MAX => Ok(items),
        n => Err(format!("has {n} items, and {RANGES_MAX} are the most")),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::config::Config;

    fn vm(text: &str) -> VmConfig {
        let text = format!("[[vm]]\nname = \"a\"\n{text}\n");
        Config::parse("np.toml", &text, &BTreeMap::new()).unwrap().vms.remove(0)
    }

    fn error(text: &str) -> String {
        let text = format!("[[vm]]\nname = \"a\"\n{text}\n");
        Config::parse("np.toml", &text, &BTreeMap::new()).unwrap_err().to_string()
    }

    #[test]
    fn acc_01_ports_and_networks_are_read_and_written() {
        let of = |text: &str| {
            let vm = vm(text);
            let value = |key: &str| vm.keys().into_iter().find(|(k, _)| *k == key).unwrap().1;
            let config = of_vm(&vm, Instant::ZERO);
            let ports = config.map(|config| config.ports).unwrap_or_default();
            (ports, value("accept_offload"), value("accept_from"))
        };
        assert_eq!(of(""), (vec![], None, None));
        assert_eq!(of("accept_offload = false"), (vec![], None, None));
        assert_eq!(of("accept_offload = true"), (vec![1..=u16::MAX], Some("true".into()), None));
        let (ports, written, _) = of("accept_offload = [\"8000-8099\", 443, \"443\"]");
        assert_eq!(ports, [443..=443, 8000..=8099]);
        assert_eq!(written.unwrap(), "[\"443\", \"8000-8099\"]");
        let (.., from) =
            of("accept_offload = true\naccept_from = [\"10.0.0.0/8\", \"2001:db8::/32\"]");
        assert_eq!(from.unwrap(), "[\"10.0.0.0/8\", \"2001:db8::/32\"]");
        let (.., from) = of("accept_offload = true\naccept_from = \"any\"");
        assert_eq!(from.unwrap(), "\"any\"");
    }

    #[test]
    fn acc_01_a_command_line_has_no_lists() {
        let keys = [("accept_offload", "443,8000-8099"), ("accept_from", "10.0.0.0/8,192.0.2.7")];
        let keys: BTreeMap<_, _> = keys.map(|(k, v)| (k.to_owned(), v.to_owned())).into();
        let vm = VmConfig::of("a", &keys).unwrap();
        let config = of_vm(&vm, Instant::ZERO).unwrap();
        assert_eq!(config.ports, [443..=443, 8000..=8099]);
        let networks = [([10, 0, 0, 0], 8), ([192, 0, 2, 7], 32)];
        let networks = networks.map(|(net, bits)| Prefix::of(IpAddr16::from_v4(net), bits, 0));
        assert_eq!(config.from, AcceptFrom::Networks(networks.to_vec()));
    }

    #[test]
    fn acc_01_mistakes_are_refused_with_their_reason() {
        for (text, what) in [
            ("accept_offload = \"https\"", "neither a port nor a range"),
            ("accept_offload = [\"8099-8000\"]", "neither a port nor a range"),
            ("accept_offload = []", "is empty"),
            ("accept_from = \"all\"", "not a network"),
            ("accept_from = [\"10.0.0.1/8\"]", "bits beyond its prefix"),
            ("accept_offload = true\nack_offload = false", "needs ack_offload = true"),
            ("tap = \"vnet0\"\naccept_offload = true", "accept_offload: does not go with tap"),
        ] {
            let error = error(text);
            assert!(error.contains(what), "{error}");
        }
    }
}
