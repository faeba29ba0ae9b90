//! INV-21, fail-stop: when a promise can no longer be kept, both sides are told; neither is left
//! with a stream that has a hole.

use nightporter_core::limits::T_RST;
use nightporter_core::tcp::flow::State;
use nightporter_core::time::{Duration, Instant};

use super::Ensure;
use crate::history::{History, Side};
use crate::out::Out;

/// After a restart R is told at once, and G in the time that a busy guest needs to take a frame.
const TELL_R: Duration = Duration::from_secs(1);
/// See [`TELL_R`].
const TELL_G: Duration = Duration::from_secs(10);

/// Broken promises, and the ends that are to be told.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FailStop {
    /// Until when R, and G, must have been told.
    tell_by: [Option<Instant>; 2],
    /// G has opened anew on these ports before it acknowledged all bytes that were acknowledged to
    /// R.
    owed_before: bool,
    /// When R sent its first RST.
    reset_at: Option<Instant>,
}

impl FailStop {
    /// Both sides must be told from now on.
    pub(crate) fn expect(&mut self, now: Instant) {
        self.tell_by = [now + TELL_R, now + TELL_G].map(Some);
    }

    /// G need not be told any more.
    pub(crate) const fn forgive_guest(&mut self) {
        self.tell_by[Side::G as usize] = None;
    }

    /// Nor need R.
    pub(crate) const fn forgive_both(&mut self) {
        self.tell_by = [None; 2];
    }
}

/// R has reset the connection.
pub(crate) fn on_reset(h: &mut History, at: Instant) {
    h.rules.fail_stop.reset_at.get_or_insert(at);
}

/// G has opened anew and was owed bytes before.
pub(crate) const fn on_begun_anew(h: &mut History) {
    h.rules.fail_stop.owed_before = true;
}

/// An end that is owed an RST has got it by its own next segment.
pub(crate) fn on_in(at: Instant, h: &History, from: Side) -> Ensure {
    let told = |side: Side| h.end(side).reset_to || h.end(side).reset;
    match h.rules.fail_stop.tell_by[from as usize] {
        Some(by) if at > by && !told(from) && h.is_judged() => {
            Err(format!("after a restart {from:?} was not told in time"))
        }
        _ => Ok(()),
    }
}

/// No RST without a cause; and promised bytes come before R's own RST (SNOOP-15), for as long as
/// T_rst.
pub(crate) fn on_out(h: &History, o: &Out<'_>) -> Ensure {
    let (r, g) = (h.end(Side::R), h.end(Side::G));
    // H's own reason counts while G has its CPU: a paused guest is waited for (SNOOP-32).
    let given_up = h.state == Some(State::Abort) && h.paused_since.is_none();
    let cause = r.reset || g.reset || h.broken || h.interrupted || given_up;
    // G has forgotten bytes that R believes delivered (SNOOP-17).
    let forgotten = h.rules.fail_stop.owed_before && h.is_of_earlier(Side::G, o.seq);
    let cause = cause || o.to == Side::R && forgotten;
    if o.to == Side::R && o.gated && o.tcp.flags.rst() && !cause && h.streams.is_some() {
        return Err("an RST to R that nothing asked for".to_owned());
    }
    let aborted = h.state == Some(State::Abort);
    let late = o.waited && h.is_refused(o); // it was for the connection before
    if o.to == Side::G && o.gated && o.tcp.flags.rst() && !cause && !aborted && !late {
        return Err("an RST to G that nothing asked for".to_owned());
    }
    if o.to != Side::G || !o.gated || !o.tcp.flags.rst() || !r.reset || !h.is_open() {
        return Ok(());
    }
    let soon = h.rules.fail_stop.reset_at.is_some_and(|at| o.at.since(at) < T_RST);
    if soon && !h.broken && !h.interrupted && g.acked < r.ack_to.min(r.fin.unwrap_or(u64::MAX)) {
        return Err(format!("an RST before {} promised bytes", r.ack_to - g.acked));
    }
    Ok(())
}
