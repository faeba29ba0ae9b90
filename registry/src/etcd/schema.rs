//! Keys and values in etcd: entries of hosts and stations.
//!
//! Keys behind the prefix: `host/VNI/ADDRESS`, `station/VNI/MAC`, and for a host that wants a MAC
//! which another has, `waiting/VNI/MAC/ADDRESS`. Values are JSON with room for more fields; an
//! unreadable entry has no owner.

use std::fmt::Write as _;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::{Host, Listeners, Mac, Station, mac_text};

/// Most bytes of a value; a longer one is unreadable.
pub(super) const VALUE_BYTES_MAX: usize = 4096;
/// Most addresses of a station, and most bytes of its VM's name.
const IPS_MAX: usize = 64;
const VM_BYTES_MAX: usize = 64;

/// A key.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) enum Key {
    Host(u32, IpAddr),
    Station(u32, Mac),
    Waiting(u32, Mac, IpAddr),
}

#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(default)]
struct HostValue {
    port: u16,
}

#[derive(Debug, Deserialize, Serialize)]
struct StationValue {
    host: IpAddr,
    #[serde(default)]
    vm: String,
    #[serde(default)]
    ips: Vec<IpAddr>,
    /// Missing in the values of older daemons, which ignore the field.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    toe: Option<ToeValue>,
}

/// The same for a value whose `toe` cannot be read. Other fields are skipped, whatever their
/// content, depth or number.
#[derive(Debug, Deserialize)]
struct BareValue {
    host: IpAddr,
    #[serde(default)]
    vm: String,
    #[serde(default)]
    ips: Vec<IpAddr>,
}

#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(default)]
struct ToeValue {
    ports: Vec<u16>,
    more: u32,
}

impl Key {
    /// The key's text behind the prefix.
    pub(super) fn text(self) -> String {
        match self {
            Self::Host(vni, address) => format!("host/{vni}/{address}"),
            Self::Station(vni, mac) => format!("station/{vni}/{}", mac_text(mac)),
            Self::Waiting(vni, mac, host) => format!("waiting/{vni}/{}/{host}", mac_text(mac)),
        }
    }

    pub(super) fn read(text: &str) -> Option<Self> {
        let mut parts = text.split('/');
        let (kind, vni, what) = (parts.next()?, parts.next()?.parse().ok()?, parts.next()?);
        let key = match (kind, parts.next()) {
            ("host", None) => Self::Host(vni, what.parse().ok()?),
            ("station", None) => Self::Station(vni, mac(what)?),
            ("waiting", Some(host)) => Self::Waiting(vni, mac(what)?, host.parse().ok()?),
            _ => return None,
        };
        parts.next().is_none().then_some(key).filter(|key| key.text() == text)
    }
}

fn mac(text: &str) -> Option<Mac> {
    let mut bytes = text.split(':').map(|byte| u8::from_str_radix(byte, 16));
    let mut mac = [0; 6];
    for byte in &mut mac {
        *byte = bytes.next()?.ok()?;
    }
    bytes.next().is_none().then_some(mac)
}

pub(super) fn write_host(host: &Host) -> String {
    serde_json::to_string(&HostValue { port: host.port }).unwrap_or_default()
}

pub(super) fn read_host(vni: u32, address: IpAddr, value: &str) -> Option<Host> {
    let HostValue { port } = serde_json::from_str(value).ok()?;
    (port > 0).then_some(Host { vni, address, port })
}

pub(super) fn write_station(station: &Station) -> String {
    let Station { host, vm, mut ips, listeners, .. } = station.clone();
    ips.truncate(IPS_MAX);
    let toe = listeners.map(|Listeners { ports, more }| ToeValue { ports, more });
    serde_json::to_string(&StationValue { host, vm, ips, toe }).unwrap_or_default()
}

pub(super) fn read_station(vni: u32, mac: Mac, value: &str) -> Option<Station> {
    // Unreadable listeners do not hide the station.
    let bare = |_| {
        let BareValue { host, vm, ips } = serde_json::from_str(value).ok()?;
        Some(StationValue { host, vm, ips, toe: None })
    };
    let StationValue { host, vm, mut ips, toe } =
        serde_json::from_str(value).map_or_else(bare, Some)?;
    ips.truncate(IPS_MAX);
    let vm = plain(&vm, VM_BYTES_MAX);
    let listeners = toe.map(|ToeValue { ports, more }| Listeners::new(ports, more));
    (mac[0] & 1 == 0).then_some(Station { vni, mac, vm, ips, host, listeners })
}

/// Foreign text for operators: characters that a terminal would not show are escaped, and at most
/// `bytes_max` bytes remain.
pub(super) fn plain(text: &str, bytes_max: usize) -> String {
    let mut plain = String::new();
    for c in text.chars() {
        let before = plain.len();
        match c {
            '"' | '\'' => plain.push(c),
            _ => drop(write!(plain, "{}", c.escape_debug())),
        }
        if plain.len() > bytes_max {
            plain.truncate(before);
            break;
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_and_values_read_as_they_were_written() {
        let (host, far): (IpAddr, IpAddr) = ([192, 0, 2, 1].into(), "fd00::1".parse().unwrap());
        let mac = [2, 0, 0, 0, 0, 0x1f];
        for key in [Key::Host(7, host), Key::Host(7, far), Key::Station(7, mac)] {
            assert_eq!(Key::read(&key.text()), Some(key));
        }
        let waiting = Key::Waiting(7, mac, far);
        assert_eq!(waiting.text(), "waiting/7/02:00:00:00:00:1f/fd00::1");
        assert_eq!(Key::read(&waiting.text()), Some(waiting));
        for bad in ["", "host/7", "host/x/192.0.2.1", "host/7/192.0.2.1/", "station/7/2:0:0:0:0:1f"]
        {
            assert_eq!(Key::read(bad), None, "{bad}");
        }
        let (vm, ips) = (String::from("wéb\"1"), vec![host, far]);
        let station = Station { vni: 7, mac, vm, ips, host: far, listeners: None };
        let text = write_station(&station);
        assert!(!text.contains("toe"), "{text}");
        assert_eq!(read_station(7, mac, &text).as_ref(), Some(&station));
        for ports in [vec![], vec![22, 80]] {
            let station =
                Station { listeners: Some(Listeners { ports, more: 3 }), ..station.clone() };
            assert_eq!(read_station(7, mac, &write_station(&station)), Some(station));
        }
        let more = r#"{"host":"192.0.2.1","listens":[22]}"#;
        assert!(read_station(7, mac, more).is_some_and(|station| station.ips.is_empty()));
        assert_eq!(read_station(7, [1, 0, 0, 0, 0, 1], more), None, "a group");
        let own = Host { vni: 7, address: host, port: 4789 };
        assert_eq!(read_host(7, host, &write_host(&own)), Some(own));
        assert_eq!(read_host(7, host, "{}"), None);
    }

    /// A value as read by a daemon without listeners.
    #[derive(Deserialize)]
    struct OldValue {
        host: IpAddr,
        #[serde(default)]
        ips: Vec<IpAddr>,
    }

    #[test]
    fn listeners_are_read_as_far_as_they_are_any_and_older_daemons_read_the_rest() {
        let (host, mac) = (IpAddr::from([192, 0, 2, 1]), [2, 0, 0, 0, 0, 0x1f]);
        let read = |toe: &str| {
            let value = format!(r#"{{"host":"192.0.2.1"{toe}}}"#);
            read_station(7, mac, &value).expect("a station is a station").listeners
        };
        let some = |ports: &[u16], more| Some(Listeners { ports: ports.to_vec(), more });
        assert_eq!(read(""), None, "of an older daemon");
        assert_eq!(read(r#","toe":{"ports":[443,80,80],"of":"later"}"#), some(&[80, 443], 0));
        for bad in ["null", "7", "[22]", r#"{"ports":["ssh"]}"#, r#"{"ports":[65536]}"#] {
            assert_eq!(read(&format!(r#","toe":{bad}"#)), None, "{bad}");
        }
        let deep = "[".repeat(1000) + &"]".repeat(1000);
        for bad in ["1e999", &deep, r#"{"ports":[22]},"toe":{"ports":[22]}"#] {
            assert_eq!(read(&format!(r#","toe":{bad}"#)), None, "{bad}");
        }
        let all: Vec<u16> = (1..=100).collect();
        let lowest: Vec<u16> = (1..=64).collect();
        assert_eq!(read(&format!(r#","toe":{{"ports":{all:?},"more":7}}"#)), some(&lowest, 43));
        let listeners = Some(Listeners::new(all, 0));
        let station = Station { vni: 7, mac, vm: String::new(), ips: vec![host], host, listeners };
        let old: OldValue = serde_json::from_str(&write_station(&station)).unwrap();
        assert_eq!((old.host, old.ips), (host, vec![host]));
    }

    #[test]
    fn nobodys_words_are_long_or_do_anything_to_a_terminal() {
        let (mac, host) = ([2, 0, 0, 0, 0, 0x1f], [192, 0, 2, 1].into());
        let vm = "\u{1b}[2J\u{202e}\n".repeat(100);
        let listeners = Some(Listeners::new(60_000..60_100, u32::MAX));
        let station = Station { vni: 7, mac, vm, ips: vec![host; 1000], host, listeners };
        let text = write_station(&station);
        assert!(serde_json::from_str::<StationValue>(&text).unwrap().ips.len() == IPS_MAX);
        let read = read_station(7, mac, &text).unwrap();
        assert!(read.vm.starts_with("\\u{1b}[2J\\u{202e}\\n\\u{1b}"), "{}", read.vm);
        assert!(read.vm.len() <= VM_BYTES_MAX, "{}", read.vm);
        let far = "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff".parse().unwrap();
        let longest = Station { vm: "w".repeat(VM_BYTES_MAX), ips: vec![far; IPS_MAX], ..station };
        assert!(write_station(&longest).len() <= VALUE_BYTES_MAX, "a host's own can be read");
    }
}
