//! Room ahead of a G that is off its core (SNOOP-39).
//!
//! R fills any room that it has while G waits for its core, and then stops until G is back. So each
//! time that R has used half of its room, it gets twice as much, up to what the window field can
//! show and the VM's budget has. Half of the budget stays as it is, for other flows. At the end of
//! its wait G finds no more than R has sent meanwhile.
//!
//! More than a flow has by doubling ([`FLOW_BUFFER_DOUBLED_MAX`]), or than G itself shows, is only
//! lent. R keeps what it was shown (INV-05), and its place stays reserved (INV-06). But once G has
//! acknowledged a byte of it, the place goes back to the VM, and R is not shown as much again
//! before G is off its core once more: to a G that runs it would only add delay.

use crate::limits::{FLOW_BUFFER_DOUBLED_MAX, PAGE};
use crate::store::flow_store::FlowStore;
use crate::tcp::receiver::Receiver;
use crate::tcp::receiver::window::Terms;
use crate::tcp::vm::Vm;

impl Receiver {
    /// R has less than half of its room left.
    #[inline(always)]
    pub(crate) fn has_used_half(&self) -> bool {
        self.edge.saturating_sub(self.next) < u64::from(self.buffer_bytes / 2)
    }

    /// R has, and G is off its core.
    pub(crate) fn grow_ahead(&mut self, t: &Terms, vm: &mut Vm) {
        let (now, own) = (u64::from(self.buffer_bytes), u64::from(self.reserved_pages));
        let spare = (vm.budget_pages / 2).saturating_sub(vm.reserved_pages);
        if t.is_behind || !t.is_open() || spare == 0 {
            return;
        }
        self.grow(t, vm, (now * 2).min((own + spare - 1) * PAGE as u64));
        self.lent |= u64::from(self.buffer_bytes) > now.max(FLOW_BUFFER_DOUBLED_MAX);
    }

    /// A part of the buffer is lent.
    #[inline(always)]
    pub(crate) const fn is_lent(&self) -> bool {
        self.lent
    }

    /// G has acknowledged bytes: the buffer keeps room for those that R may still send.
    pub(crate) fn return_lent(&mut self, t: &Terms, vm: &mut Vm) {
        let kept = FLOW_BUFFER_DOUBLED_MAX.max(t.guest_edge.saturating_sub(t.guest_una));
        let bytes = kept.max(self.edge.saturating_sub(t.guest_una));
        if bytes < u64::from(self.buffer_bytes) {
            let pages = FlowStore::pages_for(bytes + t.rounding_slack());
            let less = u64::from(self.reserved_pages).saturating_sub(pages);
            vm.unreserve(less);
            self.reserved_pages -= u16::try_from(less).unwrap_or(0);
            self.buffer_bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        }
        self.lent = bytes > kept;
    }
}
