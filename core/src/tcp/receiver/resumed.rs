//! A receiver that goes on after a kill, from its record (LIFE-09).

use crate::limits;
use crate::store::arena::RecordId;
use crate::store::flow_store::FlowStore;
use crate::tcp::receiver::Receiver;
use crate::tcp::receiver::window::Terms;
use crate::tcp::vm::Vm;
use crate::time::Instant;

impl Receiver {
    /// Bytes below `next` are in the store, and G may have others, below `passed`, without a copy.
    /// It acknowledges late until G has spoken.
    pub(crate) fn resumed(now: Instant, next: u64, passed: u64, record: RecordId) -> Self {
        let mut it = Self { passed, record: Some(record), ..Self::new(now, next) };
        it.set_late(true);
        it.set_anew();
        it
    }

    /// The edge that R was shown, and where its FIN is, above all if that is not known;
    /// `taken`: G has acknowledged it, and R may have been told so.
    pub(crate) fn resume(&mut self, edge: u64, fin: u64, taken: bool) {
        self.edge = edge.max(self.next);
        self.fin = fin;
        if taken {
            self.acks.on_fin_taken(self.next + 1);
        }
    }

    /// Reserves what a predecessor had reserved: everything from the first byte that is held to the
    /// edge. `false`: nothing changed.
    #[must_use]
    pub(crate) fn reserve_again(&mut self, t: &Terms, vm: &mut Vm) -> bool {
        let bytes = self.edge.saturating_sub(t.guest_una) + t.rounding_slack();
        let pages = FlowStore::pages_for(bytes);
        let fits = bytes <= limits::FLOW_BUFFER_MAX && vm.reserve(pages);
        if fits {
            self.set_buffer(t, pages, bytes);
        }
        fits
    }
}
