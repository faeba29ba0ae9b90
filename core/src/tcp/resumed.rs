//! A flow that goes on after a kill, from its record and the bytes in the arena (LIFE-09).
//!
//! A record has less than an image: not the edge that G shows, nor its clock. So the flow begins in
//! late ACK (LIFE-12): what R was promised stays so, and nothing is added before G's first segment
//! has shown both. G is given again, inside the window that it had shown before, what it has not
//! acknowledged, as with a new ring (LIFE-04); a G of which no room is known is asked.
//!
//! H sends for G no more: bytes that H had of it and R had not acknowledged are G's still, and G
//! repeats them. H begins anew with the next data. Ranges out of order are forgotten: R was not
//! acknowledged them.
//!
//! Only a flow of which the record says all is marked ([`Flow::marks`]). Any other is reset on both
//! sides if it owes something.

use crate::limits;
use crate::store::arena::RecordId;
use crate::store::flow_store::FlowStore;
use crate::store::record::{
    FLAG_ECN, FLAG_GUEST_IS_CLIENT, FLAG_SACK, FLAG_TS, Fins, MARK_ECE, MARK_FIN_OF_GUEST,
    MARK_NEAR, MARK_NEW, MARK_PARKED, MARK_RESUMABLE, MARK_TRANSLATED, Record,
};
use crate::tcp::FlowContext;
use crate::tcp::distance::Distance;
use crate::tcp::flow::{Flow, Why};
use crate::tcp::options::{Negotiated, Offers};
use crate::tcp::outbound::Outbound;
use crate::tcp::receiver::Receiver;
use crate::tcp::receiver::window::edge_after_pause;
use crate::tcp::sender::Sender;
use crate::tcp::template::Template;
use crate::tcp::timestamps::TimestampState;
use crate::time::Instant;

impl Flow {
    /// The marks of its record. A flow may go on after a kill if it makes promises to R, no RST of
    /// R waits, and H has not sent for G, which may have handed over or been shown more than the
    /// record says.
    pub(super) fn marks(&self) -> u8 {
        let bit = |on: bool, mark: u8| if on { mark } else { 0 };
        // A daemon that stops drains; what is left then goes on in the next one (LIFE-08).
        let stops = self.standing.draining() == Some(Why::Operator);
        let promises = self.standing.is_on() || stops;
        let relays = self.losses.promised() > 0 || self.losses.shown() > self.outbound.sent();
        let is_translated = self.receiver.is_translated();
        let resumes = promises && !self.receiver.reset_waits() && !relays && !is_translated;
        bit(resumes, MARK_RESUMABLE)
            | bit(is_translated, MARK_TRANSLATED)
            | bit(!self.sender.is_established(), MARK_NEW)
            | bit(self.options.distance != Distance::Local, MARK_NEAR)
            | bit(self.rests(), MARK_PARKED)
            | bit(self.outbound.fin_sent(), MARK_FIN_OF_GUEST)
            | bit(self.receiver.ece(), MARK_ECE)
    }

    /// It is parked, and R may send: G has room for that.
    fn rests(&self) -> bool {
        let has_room = || self.receiver.guest_has_room(&self.terms());
        self.is_parked() && self.receiver.edge() > self.receiver.next() && has_room()
    }

    /// The flow of a record whose bytes are in `store`.
    ///
    /// # Errors
    /// It cannot go on: the record says too little, or what no flow can have come to.
    pub(crate) fn resumed(
        now: Instant,
        record: &Record,
        id: RecordId,
        store: FlowStore,
    ) -> Result<Self, FlowStore> {
        let has = |mark: u8| record.marks & mark != 0;
        let (una, next, given) = (record.guest_una, record.rcv_nxt, record.guest_nxt);
        let Fins { next: is_next, taken, given: is_given } = record.fins;
        let is_number = |n: &u64| (1 << 32..=1 << 61).contains(n);
        if ![una, next, record.edge_to_net, given].iter().all(is_number) {
            return Err(store);
        }
        let known = if is_next { Some(next) } else { is_given.then(|| given - 1) };
        let fin = known.unwrap_or(u64::MAX);
        let all = next + u64::from(fin == next);
        // Late, G was given bytes that R was not acknowledged: of those there is no copy any more.
        let passed = if given > all { given } else { una };
        let ends = fin >= next && given - 1 <= fin && (!taken || (una == next && una == fin));
        let una = una + u64::from(taken);
        let edge = record.edge_to_net.max(next);
        let segments = record.mss_to_g.min(record.mss_to_r) >= limits::PAYLOAD_MIN;
        let numbers = edge.max(passed) - record.guest_una <= limits::FLOW_BUFFER_MAX;
        let outward = record.net_nxt - record.net_una <= 1 << 31;
        if !(has(MARK_RESUMABLE) && segments && numbers && outward && ends) {
            return Err(store);
        }
        let flag = |flag: u8| record.flags & flag != 0;
        let options = Negotiated {
            shift_g: record.s_g,
            shift_r: record.s_r,
            timestamps: flag(FLAG_TS),
            sack: flag(FLAG_SACK),
            ecn: flag(FLAG_ECN),
            distance: if has(MARK_NEAR) { Distance::Near } else { Distance::Local },
            mss_to_guest: record.mss_to_g,
            mss_to_net: record.mss_to_r,
        };
        let sent = given.clamp(una, all.max(una));
        let sender = match has(MARK_NEW) {
            // It parked because G had that much room, and may have more.
            false if record.is_parked() => {
                Sender::resumed_idle(una, edge_after_pause(next, edge, record.mss_to_g.into()))
            }
            false => Sender::resumed(una, sent),
            true if next > una => Sender::resumed_new(una, sent, record.mss_to_g.into()),
            true => return Err(store), // nothing tells whether G has taken R's third ACK
        };
        let mut flow = Self {
            options,
            receiver: Receiver::resumed(now, next, passed, id),
            store,
            sender,
            outbound: Outbound::resumed(record, has(MARK_FIN_OF_GUEST)),
            timestamps: TimestampState::recovered(record),
            template: Template::from_record(record.l2.bytes(), record.ttl, record.ttl_to_g),
            ..Self::new(now, Offers::default(), flag(FLAG_GUEST_IS_CLIENT))
        };
        flow.receiver.resume(edge, fin, taken);
        flow.receiver.on_congestion_marks(false, has(MARK_ECE));
        flow.standing.take_on();
        Ok(flow)
    }

    /// Next byte of R, G's acknowledgement, and the acknowledgement for R.
    #[cfg(test)]
    pub(crate) fn numbers(&self) -> (u64, u64, u64) {
        (self.receiver.next(), self.sender.una(), self.receiver.acks.sent())
    }

    /// G has sent more than its SYN or SYN-ACK.
    pub(crate) fn guest_has_spoken(&self) -> bool {
        self.sender.is_established()
    }

    /// It does not go on.
    pub(crate) fn into_store(self) -> FlowStore {
        self.store
    }

    /// The place that the flow had is reserved again, unless it was parked. `false`: there is none
    /// any more, or the VM makes no promises now, and nothing has changed.
    pub(crate) fn resume(&mut self, cx: &mut FlowContext<'_, '_>, record: &Record) -> bool {
        let terms = self.terms();
        let may = cx.vm.offload && !cx.vm.draining;
        may && (record.is_parked() || self.receiver.reserve_again(&terms, cx.vm))
    }
}
