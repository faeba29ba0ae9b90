//! A flow's record in the arena: taken, brought up to date, given back (INV-03, LIFE-09).

use crate::store::arena::Arena;
use crate::store::record::{
    FLAG_ECN, FLAG_GUEST_IS_CLIENT, FLAG_SACK, FLAG_TS, Fins, L2Header, Progress, RecordInit,
};
use crate::tcp::FlowContext;
use crate::tcp::flow::Flow;

impl Flow {
    /// A record that says how the flow's frames look now: while it had no place for bytes nobody
    /// brought that up to date. `false`: there is none.
    pub(super) fn renew_record(&mut self, cx: &mut FlowContext<'_, '_>) -> bool {
        if self.is_bound() && self.receiver.record().is_some() {
            return true; // it is never without one (ACC-07)
        }
        self.free_record(cx.arena);
        self.take_record(cx)
    }

    pub(super) fn take_record(&mut self, cx: &mut FlowContext<'_, '_>) -> bool {
        self.take_record_for(cx, self.receiver.next())
    }

    /// The same for bytes below `promised`.
    pub(super) fn take_record_for(&mut self, cx: &mut FlowContext<'_, '_>, promised: u64) -> bool {
        let bit = |on: bool, flag: u8| if on { flag } else { 0 };
        let Some(l2) = L2Header::new(self.template.l2_to_net()) else { return false };
        let shown = (self.timestamps.to_net(), self.timestamps.to_guest());
        let init = RecordInit {
            name_hash: cx.vm.name_hash,
            network_hash: cx.vm.network_hash,
            key: *cx.key,
            l2,
            ttl: self.template.ttl_to_net(),
            ttl_to_g: self.template.ttl_to_guest(),
            flags: bit(self.options.timestamps, FLAG_TS)
                | bit(self.options.sack, FLAG_SACK)
                | bit(self.options.ecn, FLAG_ECN)
                | bit(self.outbound.guest_is_client(), FLAG_GUEST_IS_CLIENT),
            s_g: self.options.shift_g,
            s_r: self.options.shift_r,
            mss_to_g: self.options.mss_to_guest,
            mss_to_r: self.options.mss_to_net,
            rcv_nxt: promised,
            guest_una: self.sender.una(),
            guest_nxt: self.given(),
            edge_to_net: self.receiver.edge(),
            guest_isn: self.outbound.isn().0,
            marks: 0, // until the event has ended
            fins: self.fins(promised),
            net_nxt: self.outbound.sent(),
            net_una: self.outbound.una(),
            net_window: self.outbound.window(),
            ts_recent: self.timestamps.recent(),
            ts_recent_at: self.timestamps.recent_at(),
            ts_emit_r: shown.0.tsval,
            ts_emit_g: shown.1.tsval,
        };
        let record = cx.arena.alloc_record(&init);
        self.receiver.set_record(record);
        record.is_some()
    }

    /// Brings the record up to date: R believes bytes below `promised` delivered, or will soon. The
    /// payload is in the store; frames that H made for the event leave only when they are polled.
    /// So this happens between the two (INV-03: payload, commit record, ACK).
    #[inline(always)]
    pub(super) fn commit(&self, cx: &mut FlowContext<'_, '_>, promised: u64) {
        let Some(rec) = self.receiver.record() else { return };
        let progress = Progress {
            rcv_nxt: promised,
            guest_una: self.sender.una().min(self.receiver.next()),
            guest_nxt: self.given(),
            net_nxt: self.outbound.sent(),
            net_una: self.outbound.una(),
            net_window: self.outbound.window(),
            edge_to_net: self.receiver.edge(),
            ts_recent: self.timestamps.recent(),
            ts_recent_at: self.timestamps.recent_at(),
            ts_emit_r: self.timestamps.to_net().tsval,
            ts_emit_g: self.timestamps.to_guest().tsval,
            fins: self.fins(promised),
        };
        cx.arena.commit(rec, &progress);
    }

    /// End of the bytes that G was given, from the store or past it.
    #[inline(always)]
    fn given(&self) -> u64 {
        self.sender.sent().max(self.receiver.passed())
    }

    /// Where R's FIN is in the record: below it are bytes that were promised.
    #[inline(always)]
    fn fins(&self, promised: u64) -> Fins {
        if self.receiver.has_fin() { self.fins_at_end(promised) } else { Fins::default() }
    }

    #[cold]
    fn fins_at_end(&self, promised: u64) -> Fins {
        let fin = self.receiver.fin();
        let next = self.receiver.is_closed() && fin == promised;
        Fins { next, taken: next && self.sender.una() > fin, given: self.given() > fin }
    }

    /// Whether the flow may go on after a kill. No ordinary segment changes that, so the predicted
    /// path leaves it.
    pub(super) fn commit_marks(&self, cx: &mut FlowContext<'_, '_>) {
        if let Some(rec) = self.receiver.record() {
            cx.arena.commit_marks(rec, self.marks());
        }
    }

    /// A flow that nobody may forget keeps its record (ACC-07).
    pub(super) fn give_record_back(&mut self, arena: &mut Arena<'_>) {
        if !self.is_bound() {
            self.free_record(arena);
        }
    }

    pub(super) fn free_record(&mut self, arena: &mut Arena<'_>) {
        if let Some(rec) = self.receiver.record() {
            self.receiver.set_record(None);
            arena.free_record(rec);
        }
    }
}
