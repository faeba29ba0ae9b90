//! `[[station]]`: the operator's list of which station is behind which peer of an overlay.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use nightporter_core::wire::vxlan;
use nightporter_registry::{Station, mac_text};

use super::Config;
use super::keys::{Keys, plain, quoted};
use super::overlay::host;
use super::parse::{Unique, ips, mac};
use super::reader::{Section, integer, string};
use super::table::Shown as _;

/// Longest name of a VM, in bytes.
const NAME_BYTES_MAX: usize = 64;

/// All keys of a `[[station]]`.
#[must_use]
pub fn keys(station: &Station) -> Keys {
    vec![
        ("vni", plain(station.vni)),
        ("mac", station.mac.shown()),
        ("host", Some(quoted(station.host))),
        ("ips", station.ips.shown()),
        ("vm", (!station.vm.is_empty()).then(|| quoted(&station.vm))),
    ]
}

/// Of hosts at which stations are listed and that are no peers of their overlay here: nothing goes
/// there.
pub fn at_strangers(config: &Config) -> impl Iterator<Item = String> {
    let mut hosts = BTreeMap::new();
    for station in &config.stations {
        *hosts.entry((station.vni, station.host)).or_insert(0) += 1;
    }
    hosts.into_iter().filter_map(|((vni, host), stations)| {
        let overlay = config.overlays.iter().find(|overlay| overlay.vni == vni)?;
        let mut known = overlay.peers.iter().chain([&overlay.local]).map(SocketAddr::ip);
        let name = &overlay.name;
        (!known.any(|known| known == host)).then(|| {
            format!(
                "overlay.{name}: {stations} of its stations are listed at {host}, which is not one \
                 of its peers: no frames go there\n    fix: add it to peers, or correct host"
            )
        })
    })
}

pub(super) fn read(mut s: Section<'_, '_>, unique: &mut Unique) -> Option<Station> {
    let vni_fix = "give the number of its overlay, 1 to 16777215";
    let vni = s.require("vni", vni_fix, integer(1..=vxlan::VNI_MAX.into()));
    let mac_fix = "write six hex bytes of a unicast address, as in \"52:54:00:12:34:56\"";
    let mac = s.require("mac", mac_fix, mac);
    let host_fix = "give the overlay address of its host, as in \"192.0.2.2\"";
    let host = s.require("host", host_fix, host);
    let ips = s.get("ips", "write a list, as in [\"192.0.2.7\", \"2001:db8::7\"]", ips);
    let vm = s.get("vm", "give its name, at most 64 bytes", |v| {
        string(v).and_then(|name| match name.len() {
            0..=NAME_BYTES_MAX => Ok(name),
            n => Err(format!("is {n} bytes long, and may have 64")),
        })
    });
    let (vni, mac) = (vni?, mac?);
    unique.add("mac", format!("{} of overlay {vni}", mac_text(mac)), &s);
    s.finish();
    let (vm, ips) = (vm.unwrap_or_default(), ips.unwrap_or_default());
    Some(Station { vni, mac, vm, ips, host: host?.ip(), listeners: None })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_station_at_a_host_that_is_no_peer_is_told() {
        let told = |vni: u32, host: &str| {
            let text = format!(
                "[[overlay]]\nname = \"o\"\nvni = 1\nlocal = \"192.0.2.1\"\n\
                 peers = [\"192.0.2.2\"]\n[[station]]\nvni = {vni}\n\
                 mac = \"52:54:00:00:00:77\"\nhost = \"{host}\"\n"
            );
            let config = Config::parse("np.toml", &text, &BTreeMap::new()).unwrap();
            at_strangers(&config).collect::<Vec<_>>()
        };
        for (vni, host) in [(1, "192.0.2.1"), (1, "192.0.2.2"), (2, "192.0.2.3")] {
            assert_eq!(told(vni, host), [""; 0], "{vni} {host}");
        }
        let [said] = &told(1, "192.0.2.3")[..] else { panic!("one line") };
        assert!(
            said.contains("overlay.o: 1 of its stations are listed at 192.0.2.3, which is not"),
            "{said}"
        );
    }
}
