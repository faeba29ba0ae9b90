//! A VM that migrates to another host (LIFE-06): what its VMM's messages mean for its flows.
//!
//! While it may migrate its flows acknowledge late, and no congestion offload begins, so that
//! little is owed when its rings stop. Then, before the VMM is answered, this host ends its part:
//! whatever is owed is reset toward R, the other flows are forgotten, and nothing more is said in
//! the VM's name (LIFE-07) until its rings start here again.

use crate::engine::Engine;
use crate::port::PortId;
use crate::tcp::vm::Presence;
use crate::time::Instant;

impl Engine<'_> {
    /// The VMM of `port` wants to know which pages are written, as it does when the VM begins to
    /// migrate; or no more, because that was called off.
    pub fn set_migrating(&mut self, now: Instant, port: PortId, migrates: bool) {
        let Some(p) = self.port_mut(port) else { return };
        if p.vm.migrates() != migrates {
            p.vm.set_migrating(migrates);
            self.set_late(now, port, migrates);
        }
    }

    /// The VMM of `port` is about to stop the rings of a VM that may migrate. Its connections are
    /// over here when [they have ended](Self::is_ending) and
    /// [`poll_transmit`](Self::poll_transmit) has nothing more; the VMM may be answered then.
    pub fn handle_guest_leaves(&mut self, now: Instant, port: PortId) {
        if self.presence(port) == Some(Presence::Here) {
            self.handle_batch_end(now); // ACKs of bytes that were taken before
            self.end_guest(now, port, Presence::Moved);
        }
    }

    /// The MAC of the guest of `port`, which is configured, may be behind an uplink if its guest is
    /// elsewhere: a registry says so, or it has moved.
    pub(super) fn settle_away(&mut self, port: PortId) {
        let Some(p) = self.port(port) else { return };
        let has_left = p.elsewhere || p.vm.presence == Presence::Moved;
        let is_away = has_left && p.features.is_none();
        self.networks.of_mut(port).set_away(port, is_away);
    }
}
