//! The outbound pipe as a pipe: what G hands over is kept until R has acknowledged it.
//!
//! The first part of congestion offload (ARCHITECTURE, "Congestion offload: the design"): the mode,
//! the store and its place. What is kept leaves at once still, as in a flow without it, and G
//! repeats what is lost. Its place is taken as it comes; a place for all that G may send comes with
//! an edge of H's own toward G.
//!
//! **End to end.** Nothing here acknowledges anything: G frees its bytes by R's own
//! acknowledgement. So these need not survive H: their pages are lent (`store/arena.rs`).

use crate::drops::DropReason;
use crate::store::arena::Arena;
use crate::store::flow_store::{FlowStore, Owner};
use crate::tcp::flow::Flow;
use crate::tcp::vm::Vm;
use crate::tcp::{FlowContext, Frame, index};

/// What of G's bytes is kept. Behind a box: most flows only receive.
#[derive(Debug, Default)]
pub(crate) struct Flooded {
    /// The bytes from R's acknowledgement to the end of what G has handed over.
    store: FlowStore,
    /// Pages of the VM's budget taken for them (INV-06).
    reserved_pages: u32,
}

impl Flooded {
    /// The bytes.
    pub(crate) const fn store(&self) -> &FlowStore {
        &self.store
    }

    /// Pages taken for them.
    pub(crate) const fn reserved_pages(&self) -> u32 {
        self.reserved_pages
    }

    /// Keeps `bytes`, which begin at `from`; all before `una` has gone.
    fn keep(
        &mut self,
        cx: &mut FlowContext<'_, '_>,
        una: u64,
        from: u64,
        bytes: &[u8],
    ) -> Result<(), DropReason> {
        let needed = FlowStore::pages_for(from + bytes.len() as u64 - una);
        let more = needed.saturating_sub(self.reserved_pages.into());
        if !cx.vm.reserve(more) {
            return Err(DropReason::NoStore);
        }
        self.reserved_pages += u32::try_from(more).unwrap_or(u32::MAX);
        let lent = Owner::Lent(cx.vm.name_hash);
        let kept = self.store.write(cx.arena, lent, from, bytes);
        if kept { Ok(()) } else { Err(DropReason::NoStore) }
    }

    /// R has everything below `una`; G has handed over everything below `accepted`.
    pub(crate) fn on_ack(&mut self, una: u64, accepted: u64, arena: &mut Arena<'_>, vm: &mut Vm) {
        self.store.release(arena, una);
        if una >= accepted {
            self.release(arena, vm);
        }
    }

    /// Everything goes back.
    pub(crate) fn release(&mut self, arena: &mut Arena<'_>, vm: &mut Vm) {
        self.store.clear(arena);
        vm.unreserve(core::mem::take(&mut self.reserved_pages).into());
    }

    /// The same for a flow whose VM is gone.
    pub(crate) fn clear(&mut self, arena: &mut Arena<'_>) {
        self.store.clear(arena);
    }
}

impl Flow {
    /// Bytes of G are kept that R has not acknowledged.
    pub(crate) fn keeps_bytes(&self) -> bool {
        self.losses.flooded().is_some_and(|flooded| flooded.reserved_pages > 0)
    }

    /// A data segment of G, which begins at `seq`: what of it is new is kept, if the VM wants that.
    /// An error: it is to be dropped, as if the network had lost it. G repeats it.
    pub(in crate::tcp) fn keep_from_guest(
        &mut self,
        cx: &mut FlowContext<'_, '_>,
        f: &Frame<'_>,
        seq: u64,
    ) -> Result<(), DropReason> {
        if !cx.vm.congestion_offload && self.losses.flooded().is_none() {
            return Ok(()); // nearly always
        }
        let (una, accepted) = (self.outbound.una(), self.outbound.accepted());
        // Taken over only while no byte is under way of which H has no copy (COM-28, mirrored).
        let through = una == accepted && seq == accepted && self.standing.is_on();
        if self.losses.flooded().is_none() && !through {
            return Ok(());
        }
        if seq > accepted {
            return Err(DropReason::OutOfOrderLimit); // nothing is held behind a hole yet
        }
        let payload = f.payload();
        let known = index(accepted - seq);
        if known >= payload.len() {
            return Ok(()); // a copy
        }
        self.losses.flooded_or_new().keep(cx, una, accepted, &payload[known..])
    }
}

#[cfg(test)]
mod tests;
