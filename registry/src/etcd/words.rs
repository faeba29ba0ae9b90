//! Keys and values: what is said of hosts and stations, as it stands in etcd.
//!
//! Behind the prefix: `host/VNI/ADDRESS`, `station/VNI/MAC`, and for a host that wants a MAC which
//! another has, `waiting/VNI/MAC/ADDRESS`. Values are JSON with room for more; what cannot be read
//! is nobody's.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::{Host, Mac, Station, mac_text};

/// What a key is about.
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
}

impl Key {
    /// As it is written behind the prefix.
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
    let Station { host, vm, ips, .. } = station.clone();
    serde_json::to_string(&StationValue { host, vm, ips }).unwrap_or_default()
}

pub(super) fn read_station(vni: u32, mac: Mac, value: &str) -> Option<Station> {
    let StationValue { host, vm, ips } = serde_json::from_str(value).ok()?;
    (mac[0] & 1 == 0).then_some(Station { vni, mac, vm, ips, host })
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
        let station = Station { vni: 7, mac, vm: "web\"1".into(), ips: vec![host, far], host: far };
        assert_eq!(read_station(7, mac, &write_station(&station)), Some(station));
        let more = r#"{"host":"192.0.2.1","listeners":[22]}"#;
        assert!(read_station(7, mac, more).is_some_and(|station| station.ips.is_empty()));
        assert_eq!(read_station(7, [1, 0, 0, 0, 0, 1], more), None, "a group");
        let own = Host { vni: 7, address: host, port: 4789 };
        assert_eq!(read_host(7, host, &write_host(&own)), Some(own));
        assert_eq!(read_host(7, host, "{}"), None);
    }
}
