//! Log messages for operators about a port.

use nightporter_core::limits::MTU_DEFAULT;
use tracing::{info, warn};

use crate::vhost::Event;
use crate::vhost::device::Device;
use crate::vhost::features::bit;
use crate::vhost::session::Session;

/// Logs an event of a port, if an operator should know it.
pub(super) fn report<D: Device>(
    port: &str,
    session: &Session<D>,
    event: &Event,
    memory_is_limited: bool,
    mtu: Option<u16>,
) {
    match event {
        Event::RingBroken { vring, fault } => {
            warn!(port, vring, %fault, "a queue is out of use");
        }
        Event::Link(Some(_)) => {
            let features = format!("{:#x}", session.features());
            let sealed = session.memory.is_sealed();
            info!(port, features, sealed, "the guest's driver is running");
            if let Some(mtu) = mtu.filter(|mtu| *mtu != MTU_DEFAULT && !knows_mtu(session, *mtu)) {
                warn!(
                    port,
                    mtu,
                    "the guest was not told its MTU: set it in the guest, or tell the VMM \
                     (QEMU: host_mtu={mtu} for its virtio-net-pci)"
                );
            }
            if memory_is_limited && !session.memory.is_allocated() {
                warn!(
                    port,
                    "guest memory is not preallocated: pages that the daemon touches first count \
                     against its own memory limit (see docs/configuration.md, \"Memory\")"
                );
            }
        }
        _ => {}
    }
}

/// Whether the driver agreed to be told an MTU, by this device or by a VMM that has one configured.
fn knows_mtu<D: Device>(session: &Session<D>, mtu: u16) -> bool {
    session.features() & bit::MTU != 0 && session.mtu().is_none_or(|told| told == mtu)
}
