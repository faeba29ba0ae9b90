//! Connections of a guest that floods for which H does not send (FLOOD-28): the guest is told to
//! stop when it sends data on one.
//!
//! H does not send for a connection if it could not follow the handshake, or has forgotten the
//! connection. **Only data of the guest counts.** A remote, or anybody who sends in its name, can
//! make H miss a handshake, but that alone does not stop a guest. The guest sends data only to a
//! remote that has completed the handshake.
//!
//! **Each such connection counts once.** When the guest may flood again, another epoch begins, in
//! which connections of the one before do not flood. Otherwise a connection that is older than this
//! daemon would stop its guest as long as it lasts. For the same reason data of a connection
//! without an entry counts only if H has missed or forgotten a connection since such data last
//! stopped the guest. H cannot tell such connections from others without an entry.

use crate::engine::Engine;
use crate::flow::table::{FlowId, HashedKey};
use crate::tcp::flow::Flow;
use crate::time::Instant;

impl Engine<'_> {
    /// Data of a guest leaves as it comes, because no flow in the path has this key.
    #[inline(never)] // most VMs have no congestion offload
    pub(super) fn on_data_past_flows(&mut self, now: Instant, key: &HashedKey) {
        let Some(Some(port)) = self.ports.get_mut(usize::from(key.key.port)) else { return };
        let vm = &mut port.vm;
        if !vm.congestion_offload {
            return;
        }
        let is_first = match self.flows.lookup_hashed(key) {
            Some((.., flow)) => flow.on_data_past(),
            None => core::mem::take(&mut vm.missed_connection),
        };
        if is_first {
            vm.uncontrolled_at = Some(now);
        }
    }

    /// The entry is about to go, for lack of room or because the flow was idle for long. If
    /// `goes_on`, or if nobody has considered it yet, its connection does not end with it.
    pub(super) fn note_forgotten(&mut self, id: FlowId, goes_on: impl FnOnce(&Flow) -> bool) {
        let Some((key, flow)) = self.flows.entry_mut(id) else { return };
        if (goes_on(flow) || flow.is_unnoticed())
            && let Some(Some(port)) = self.ports.get_mut(usize::from(key.port))
        {
            port.vm.missed_connection = true;
        }
    }
}
