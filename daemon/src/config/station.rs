//! `[[station]]`: who is behind which peer of an overlay, as the operator knows.

use nightporter_core::wire::vxlan;
use nightporter_registry::{Station, mac_text};

use super::keys::{self, Keys, plain, quoted};
use super::overlay::host;
use super::parse::{Unique, ips, mac};
use super::reader::{Section, integer, string};

/// Longest name of a VM, in bytes.
const NAME_BYTES_MAX: usize = 64;

/// All keys of a `[[station]]`.
#[must_use]
pub fn keys(station: &Station) -> Keys {
    vec![
        ("vni", plain(station.vni)),
        ("mac", Some(keys::mac(station.mac))),
        ("host", Some(quoted(station.host))),
        ("ips", (!station.ips.is_empty()).then(|| keys::ips(&station.ips))),
        ("vm", (!station.vm.is_empty()).then(|| quoted(&station.vm))),
    ]
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
    let vni = u32::try_from(vni?).ok()?;
    let mac = mac?;
    unique.add("mac", format!("{} of overlay {vni}", mac_text(mac)), &s);
    s.finish();
    let (vm, ips) = (vm.unwrap_or_default(), ips.unwrap_or_default());
    Some(Station { vni, mac, vm, ips, host: host?.ip() })
}
