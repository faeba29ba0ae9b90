//! The rules about time and quality: what a guest and its remote would have without the host, or
//! with a perfect one. Each is a file; here is what they remember of a flow, and who asks them.

use nightporter_core::time::Instant;

use super::guest_clock::GuestClock;
use super::history::{History, Side};
use super::judge::first_wrong;
use super::out::{In, Out};
use super::rule::{DUPLICATES, ECHO, ECONOMY, FIELDS, NEWS, ODD_ACKS, PROMPT, RECOVERY, WINDOW};
use super::{
    Ensure, duplicates, echoes, economy, field_by_field, news, odd_acks, prompt_ack, recovery,
    windows,
};
use crate::wire::{Ip, Tcp};

/// What the rules remember of a flow.
#[derive(Clone, Debug, Default)]
pub(crate) struct Quality {
    pub(super) fields: field_by_field::Fields,
    pub(super) waiting: prompt_ack::Waiting,
    pub(super) echoes: echoes::Echoes,
    pub(super) copies: duplicates::Copies,
    pub(super) odd: odd_acks::Odd,
    pub(super) windows: windows::Windows,
    pub(super) recovery: recovery::Recovery,
    pub(super) again: economy::Again,
    pub(super) news: news::News,
}

/// A whole segment came in, perhaps in another's name: it may be believed.
pub(crate) fn on_any(h: &mut History, at: Instant, from: Side, (ip, tcp): (&Ip, &Tcp)) {
    h.quality.fields.note_network(from, ip);
    odd_acks::on_in(h, at, from, tcp);
    prompt_ack::on_any(h, at);
    news::on_in(h, from, tcp);
}

/// A segment came in; all that follows from itself is in the history.
pub(super) fn on_in(h: &mut History, s: &In<'_>) {
    field_by_field::on_in(h, s);
    prompt_ack::on_in(h, s);
    echoes::on_in(h, s);
    duplicates::on_in(h, s);
    windows::on_in(h, s);
    economy::on_in(h, s);
}

/// Rules that need frames alone, for flows between honest ends.
pub(super) fn on_out(h: &History, o: &Out<'_>) -> Result<(), (u8, String)> {
    let checks: [(u8, Ensure); 7] = [
        (FIELDS, field_by_field::on_out(h, o)),
        (ECHO, echoes::on_out(h, o)),
        (DUPLICATES, duplicates::on_out(h, o)),
        (ODD_ACKS, odd_acks::on_out(h, o)),
        (WINDOW, windows::on_out(h, o)),
        (ECONOMY, economy::on_out(h, o)),
        (NEWS, news::on_out(h, o)),
    ];
    first_wrong(&checks)
}

/// A frame has left and was judged; the history does not know of it yet.
pub(super) fn after_out(h: &mut History, o: &Out<'_>) {
    prompt_ack::after_out(h, o);
    duplicates::after_out(h, o);
    echoes::after_out(h, o);
    odd_acks::after_out(h, o);
    windows::after_out(h, o);
    economy::after_out(h, o);
    news::after_out(h, o);
}

/// Rules about time, between two steps of the host.
pub(super) fn on_step(
    h: &mut History,
    now: Instant,
    clock: &GuestClock,
) -> Result<(), (u8, String)> {
    prompt_ack::on_step(h, now).map_err(|what| (PROMPT, what))?;
    windows::on_step(h, now).map_err(|what| (WINDOW, what))?;
    recovery::on_step(h, now, clock).map_err(|what| (RECOVERY, what))
}

impl History {
    /// An offloaded flow of two honest ends of which all is seen, and that nothing has come
    /// between: it must be no worse than its twin.
    pub(super) fn is_twinned(&self) -> bool {
        let gone = self.past || self.interrupted || self.broken || self.killed || self.must_reset;
        let reset = self.ends.iter().any(|e| e.reset || e.reset_to);
        let on = self.is_on() && !self.offline && self.was_on && self.is_open();
        on && !gone && !reset && !self.opaque && self.hostile == [false; 2]
    }

    /// End of R's bytes that came without a hole, its FIN not counted.
    pub(super) fn in_order(&self) -> u64 {
        self.acceptable.end().min(self.end(Side::R).fin.unwrap_or(u64::MAX))
    }

    /// Payload of a full segment for G by its MSS alone, and the least that its port's MTU may
    /// make of that, timestamps subtracted.
    pub(super) fn segment_for_guest(&self) -> (u64, u64) {
        let options = if self.timestamps() { 12 } else { 0 };
        let offered = self.end(Side::G).offer.mss.unwrap_or(536);
        let by_mtu = self.mtu.map_or(536, |mtu| mtu.saturating_sub(60)).min(offered);
        (u64::from(offered.max(88)) - options, u64::from(by_mtu.max(88)) - options)
    }
}
