//! What an operator should know of what happens to a port.

use tracing::{info, warn};

use crate::vhost::Event;
use crate::vhost::session::Session;

/// Says what happened to a port, if an operator should know.
pub(super) fn report(port: &str, session: &Session, event: &Event, memory_is_limited: bool) {
    match event {
        Event::RingBroken { vring, fault } => {
            warn!(port, vring, %fault, "a queue is out of use");
        }
        Event::Link(Some(_)) => {
            let features = format!("{:#x}", session.features());
            let sealed = session.memory.is_sealed();
            info!(port, features, sealed, "the driver is there");
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
