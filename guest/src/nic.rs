//! Network interfaces: addresses by ioctl, drivers by sysfs.

use std::fs;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nightporter_guest::bootline::{Bootline, Mac, Neighbour};

use crate::ioctl::{add_neighbour, bring_up, netmask};

const DRIVER: &str = "/sys/bus/virtio/drivers/virtio_net";

/// How long a device may take to appear after its module was loaded or its driver bound.
const APPEAR_LIMIT: Duration = Duration::from_secs(5);

/// Configures loopback and all NICs of the command line; their names, in order.
pub(crate) fn configure_all(bootline: &Bootline) -> Result<Vec<String>> {
    // Two NICs may sit on one Ethernet segment: each answers for its own address only.
    fs::write("/proc/sys/net/ipv4/conf/all/arp_ignore", "1").context("arp_ignore")?;
    fs::write("/proc/sys/net/ipv4/conf/all/arp_announce", "2").context("arp_announce")?;
    bring_up("lo", Ipv4Addr::LOCALHOST, 8)?;
    (0..bootline.nics.len()).map(|nic| configure(bootline, nic)).collect()
}

/// Configures one NIC; its name.
pub(crate) fn configure(bootline: &Bootline, nic: usize) -> Result<String> {
    let wanted = bootline.nics.get(nic).with_context(|| format!("no NIC {nic}"))?;
    let name = wait_for(wanted.mac)?;
    bring_up(&name, wanted.address, wanted.prefix)?;
    let mask = netmask(wanted.prefix);
    let on_link = |n: &&Neighbour| u32::from(n.address) & mask == u32::from(wanted.address) & mask;
    for neighbour in bootline.neighbours.iter().filter(on_link) {
        add_neighbour(&name, neighbour)?;
    }
    Ok(name)
}

/// Takes the driver off the NIC's device.
pub(crate) fn unbind(name: &str) -> Result<()> {
    let device = fs::read_link(format!("/sys/class/net/{name}/device"))
        .with_context(|| format!("{name} has no device"))?;
    let device = device.file_name().context("a device has a name")?.to_owned();
    let device = device.to_str().context("a device name is ASCII")?;
    fs::write(format!("{DRIVER}/unbind"), device).with_context(|| format!("unbinding {device}"))
}

/// Gives every network device without a driver back to virtio-net.
pub(crate) fn bind_all() -> Result<()> {
    for entry in fs::read_dir("/sys/bus/virtio/devices").context("listing virtio devices")? {
        let path = entry?.path();
        let kind = fs::read_to_string(path.join("device"))?;
        // Virtio 1.2, section 5: device ID 1 is the network card.
        if kind.trim() != "0x0001" || path.join("driver").exists() {
            continue;
        }
        let device = path.file_name().and_then(|n| n.to_str()).context("a device has a name")?;
        fs::write(format!("{DRIVER}/bind"), device).with_context(|| format!("binding {device}"))?;
    }
    Ok(())
}

/// The interface with this address, as soon as the kernel has it.
fn wait_for(mac: Mac) -> Result<String> {
    let deadline = Instant::now() + APPEAR_LIMIT;
    while Instant::now() < deadline {
        for entry in fs::read_dir("/sys/class/net")? {
            let path: PathBuf = entry?.path();
            let address = fs::read_to_string(path.join("address")).unwrap_or_default();
            if address.trim() == mac.to_string() {
                let name = path.file_name().and_then(|n| n.to_str());
                return Ok(name.context("an interface has a name")?.to_owned());
            }
        }
        thread::sleep(Duration::from_millis(10)); // polls the condition: sysfs cannot be waited on
    }
    bail!("no network device with address {mac}")
}
