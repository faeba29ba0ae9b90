//! The Ethernet address of a tap that the daemon makes.
//!
//! A Linux bridge without an address of its own has the lowest address of its ports
//! (`br_stp_recalculate_bridge_id` in net/bridge/br_stp_if.c), so a tap with a random one may
//! change the address under which the network knows this host. Therefore all taps begin with `fe`,
//! as those of libvirt do. The rest is a hash of the tap's name, of this host's identity and of the
//! place of the configuration file. So a tap that is made again has the same address, and no two
//! daemons that an overlay joins have the same one, be they on one host.

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::OnceLock;

use twox_hash::XxHash64;

/// The name that tells this host from others, of the first that can be read: machine-id(5), its
/// name.
const IDENTITIES: [&str; 2] = ["/etc/machine-id", "/proc/sys/kernel/hostname"];

/// This host's, and the daemon's on it.
static IDENTITY: OnceLock<u64> = OnceLock::new();

/// Reads this host's identity, which the process may not be allowed to do later. The daemon has its
/// configuration from this file.
pub(crate) fn know_host(configuration: &Path) {
    IDENTITY.get_or_init(|| identity(configuration));
}

fn identity(configuration: &Path) -> u64 {
    let read = IDENTITIES.iter().find_map(|path| fs::read(path).ok());
    let host = XxHash64::oneshot(0, &read.unwrap_or_default());
    XxHash64::oneshot(host, configuration.as_os_str().as_bytes())
}

/// The address of the tap `name` on this host.
pub(crate) fn of(name: &str) -> [u8; 6] {
    on_host(*IDENTITY.get_or_init(|| identity(Path::new(""))), name)
}

/// The address of the daemon's own end of the uplink or overlay `name`: the source of frames that
/// it sends in no guest's name. It is not that of a tap itself, because a Linux bridge reports a
/// frame from there as a loop ("with own address as source address", `br_fdb_update`).
pub(crate) fn of_own_end(name: &str) -> [u8; 6] {
    let mut address = of(name);
    address[0] ^= 4;
    address
}

fn on_host(identity: u64, name: &str) -> [u8; 6] {
    let [a, b, c, d, e, ..] = XxHash64::oneshot(identity, name.as_bytes()).to_le_bytes();
    [0xfe, a, b, c, d, e]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::port::uplink_port;

    #[test]
    fn life_07_the_daemons_own_end_of_an_uplink_has_an_address_that_no_port_of_a_bridge_has() {
        let mac = uplink_port("np0", &None).host_mac().expect("an address");
        assert_eq!((mac[0], &mac[1..]), (0xfa, &of("np0")[1..]));
    }

    #[test]
    fn an_address_is_the_same_in_each_version_and_another_for_each_name_and_daemon() {
        let address = on_host(7, "np0");
        assert_eq!(address, [0xfe, 216, 33, 96, 107, 173]);
        assert_eq!(address[0] & 3, 2, "of one station, and given by no vendor");
        assert_ne!(address, on_host(7, "np1"));
        assert_ne!(address, on_host(8, "np0"));
        let daemon = |path: &str| identity(Path::new(path));
        assert_eq!(daemon("a.toml"), daemon("a.toml"));
        assert_ne!(daemon("a.toml"), daemon("b.toml"));
    }
}
