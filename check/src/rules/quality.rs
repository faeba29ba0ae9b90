//! The rules about time and quality: a flow beside the same flow without the host, or with a
//! perfect one. Each is a file. Here are their common memory of a flow, and the order in which they
//! are applied.

use nightporter_core::time::Instant;

use super::{
    Ensure, Verdict, duplicates, echoes, economy, endings, field_by_field, first_wrong, flooding,
    late_ack, news, odd_acks, prompt_ack, recovery, right_edge, senders, windows,
};
use crate::guest_clock::GuestClock;
use crate::history::{History, Side};
use crate::out::{In, Out};
use crate::rule::Rule;
use crate::wire::{Ip, Tcp};

/// The rules' memory of a flow.
#[derive(Clone, Debug, Default)]
pub(crate) struct Quality {
    pub(crate) fields: field_by_field::Fields,
    pub(crate) waiting: prompt_ack::Waiting,
    pub(crate) echoes: echoes::Echoes,
    pub(crate) copies: duplicates::Copies,
    pub(crate) odd: odd_acks::Odd,
    pub(crate) windows: windows::Windows,
    pub(crate) recovery: recovery::Recovery,
    pub(crate) again: economy::Again,
    pub(crate) news: news::News,
    pub(crate) late: late_ack::LateAck,
    pub(crate) endings: endings::Endings,
    pub(crate) sending: senders::Sending,
    /// The flow had no place in the store after the last step.
    pub(crate) parked: bool,
    pub(crate) flooding: flooding::Flooding,
}

/// A whole segment came in, perhaps in another's name: it may be believed.
pub(crate) fn on_any(h: &mut History, at: Instant, from: Side, (ip, tcp): (&Ip, &Tcp)) {
    h.quality.fields.note_network(from, ip);
    odd_acks::on_in(h, at, from, tcp);
    prompt_ack::on_any(h, at);
    news::on_in(h, from, tcp);
}

/// A segment came in; all that follows from itself is in the history.
pub(crate) fn on_in(h: &mut History, s: &In<'_>) {
    field_by_field::on_in(h, s);
    duplicates::on_in(h, s);
    late_ack::on_in(h, s);
    echoes::on_in(h, s); // both before PROMPT-ACK notes what is held now
    prompt_ack::on_in(h, s);
    windows::on_in(h, s);
    economy::on_in(h, s);
    senders::on_in(h, s);
    right_edge::on_in(h, s.at);
}

/// Rules that need frames alone, for flows between honest ends.
pub(crate) fn on_out(h: &History, o: &Out<'_>) -> Verdict {
    let checks: [(Rule, Ensure); 9] = [
        (Rule::Fields, field_by_field::on_out(h, o)),
        (Rule::PromptAck, prompt_ack::on_out(h, o)),
        (Rule::Echo, echoes::on_out(h, o)),
        (Rule::Duplicates, duplicates::on_out(h, o)),
        (Rule::OddAcks, odd_acks::on_out(h, o)),
        (Rule::Window, windows::on_out(h, o)),
        (Rule::Economy, economy::on_out(h, o)),
        (Rule::News, news::on_out(h, o)),
        (Rule::LateAck, late_ack::on_out(h, o)),
    ];
    first_wrong(&checks)
}

/// A frame has left and was judged; the history does not know of it yet.
pub(crate) fn after_out(h: &mut History, o: &Out<'_>) {
    prompt_ack::after_out(h, o);
    late_ack::after_out(h, o);
    duplicates::after_out(h, o);
    echoes::after_out(h, o);
    odd_acks::after_out(h, o);
    windows::after_out(h, o);
    economy::after_out(h, o);
    news::after_out(h, o);
}

/// Rules about time, between two steps of the host.
pub(crate) fn on_step(h: &mut History, now: Instant, clock: &GuestClock) -> Verdict {
    senders::on_step(h).map_err(|what| (Rule::WireConformance, what))?;
    echoes::on_step(h);
    prompt_ack::on_step(h, now).map_err(|what| (Rule::PromptAck, what))?;
    windows::on_step(h, now, clock).map_err(|what| (Rule::Window, what))?;
    odd_acks::on_step(h, now).map_err(|what| (Rule::OddAcks, what))?;
    endings::on_step(h, now, clock).map_err(|what| (Rule::Endings, what))?;
    recovery::on_step(h, now, clock).map_err(|what| (Rule::Recovery, what))
}

impl History {
    /// An offloaded flow of two honest ends of which all is seen, and that nothing has come
    /// between: it must be no worse than its twin. The path behind a router differs for each
    /// (FWD-04); such flows are compared by their time.
    pub(crate) fn is_twinned(&self) -> bool {
        let gone = self.past || self.interrupted || self.broken || self.killed || self.must_reset;
        let reset = self.ends.iter().any(|e| e.reset || e.reset_to);
        let on = self.is_on() && !self.offline && self.was_on && self.is_open();
        on && !gone
            && !reset
            && !self.known.forwards
            && !self.opaque
            && self.known.hostile == [false; 2]
    }

    /// End of R's bytes that came without a hole, its FIN not counted.
    pub(crate) fn in_order(&self) -> u64 {
        self.acceptable.end().min(self.end(Side::R).fin.unwrap_or(u64::MAX))
    }

    /// Payload of a full segment for G by its MSS alone, and the least that its port's MTU may
    /// make of that, timestamps subtracted.
    pub(crate) fn segment_for_guest(&self) -> (u64, u64) {
        let options = if self.timestamps() { 12 } else { 0 };
        let offered = self.end(Side::G).offer.mss.unwrap_or(536);
        let by_mtu = self.known.mtu.map_or(536, |mtu| mtu.saturating_sub(60)).min(offered);
        (u64::from(offered.max(88)) - options, u64::from(by_mtu.max(88)) - options)
    }
}
