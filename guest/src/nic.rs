//! Network interfaces: addresses by ioctl, drivers by sysfs.

use std::fs;
use std::io;
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

/// Interrupts of all NICs since the guest booted.
pub(crate) fn interrupts() -> io::Result<u64> {
    Ok(count_interrupts(&fs::read_to_string("/proc/interrupts")?))
}

/// Sums up the lines of /proc/interrupts whose action is a virtio device: `virtio0` where the
/// device has one interrupt, `virtio0-input.0` and so on where it has one per queue.
fn count_interrupts(table: &str) -> u64 {
    let ours = |line: &&str| line.split_whitespace().any(|word| word.starts_with("virtio"));
    let counts = |line| str::split_whitespace(line).skip(1).map_while(|w| w.parse::<u64>().ok());
    table.lines().filter(ours).flat_map(counts).sum()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interrupts_of_virtio_devices_are_summed_up_over_cpus_and_queues() {
        let table = "           CPU0       CPU1\n  \
             4:        900          1   IO-APIC   4-edge      ttyS0\n \
            10:         17          3   IO-APIC  10-fasteoi   virtio1, virtio0\n \
            25:        100          0   PCI-MSI 49153-edge      virtio2-input.0\n";
        assert_eq!(count_interrupts(table), 120);
    }
}
