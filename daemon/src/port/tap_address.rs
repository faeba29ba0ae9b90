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

/// What tells this host from others, of the first that can be read: machine-id(5), its name.
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

fn on_host(identity: u64, name: &str) -> [u8; 6] {
    let [a, b, c, d, e, ..] = XxHash64::oneshot(identity, name.as_bytes()).to_le_bytes();
    [0xfe, a, b, c, d, e]
}

#[cfg(test)]
mod tests {
    use super::*;

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
