//! Timestamps of both ends (RFC 7323; SNOOP-04, SNOOP-05, INV-08, INV-09).

use crate::limits;
use crate::store::record::Record;
use crate::time::{Duration, Instant};
use crate::wire::packet::Timestamps;
use crate::wire::saved::saved;
use crate::wire::seq::Seq;

/// Serial comparison (RFC 7323 section 5.2): `a` is older than `b`.
fn older(a: u32, b: u32) -> bool {
    Seq(a).lt(Seq(b))
}

fn newest(a: u32, b: u32) -> u32 {
    if older(a, b) { b } else { a }
}

/// A clock that was last seen in the eight seconds `at_eight` may have gone half way round, if it
/// counts microseconds. Never true later than the kernel lets go, or there would be seconds in
/// which H drops all that R sends; and up to 11 s earlier.
fn outdated(now: Instant, at_eight: u16) -> bool {
    const IDLE: u64 = limits::PAWS_IDLE.as_nanos() / Duration::from_secs(Instant::EIGHT).as_nanos();
    u64::from(now.low_eights().wrapping_sub(at_eight)) >= IDLE
}

/// The clocks that H echoes, and those that it has shown.
#[derive(Debug, Default)]
pub(crate) struct TimestampState {
    /// R's TSval to echo.
    recent: u32,
    /// Eight seconds in which `recent` was taken; PAWS lets go after [`limits::PAWS_IDLE`].
    recent_at: u16,
    /// Those in which G's clock was last seen; R lets go of `to_net`, too.
    to_net_at: u16,
    /// Highest TSval emitted to R; every one of them came from G.
    to_net: u32,
    /// Highest TSval emitted to G; every one of them came from R.
    to_guest: u32,
    /// TSecr that came with R's newest (ack, window).
    echo_to_guest: u32,
}

saved!(TimestampState {
    recent, recent_at as Eights, to_net_at as Eights, to_net, to_guest, echo_to_guest,
});

impl TimestampState {
    /// The clocks in a predecessor's record. G's is as old as R's; of those that it was echoed the
    /// newest is one that it has sent.
    pub(crate) fn recovered(record: &Record) -> Self {
        Self {
            recent: record.ts_recent,
            recent_at: record.ts_recent_at,
            to_net_at: record.ts_recent_at,
            to_net: record.ts_emit_r,
            to_guest: record.ts_emit_g,
            echo_to_guest: record.ts_emit_r,
        }
    }

    /// R's TSval that is echoed.
    pub(crate) const fn recent(&self) -> u32 {
        self.recent
    }

    /// The eight seconds in which it was taken.
    pub(crate) const fn recent_at(&self) -> u16 {
        self.recent_at
    }

    /// The timestamps of a segment for R.
    #[inline]
    pub(crate) const fn to_net(&self) -> Timestamps {
        Timestamps { tsval: self.to_net, tsecr: self.recent }
    }

    /// The timestamps of a segment of H for G.
    #[inline]
    pub(crate) const fn to_guest(&self) -> Timestamps {
        Timestamps { tsval: self.to_guest, tsecr: self.echo_to_guest }
    }

    /// PAWS, as Linux has it (`tcp_paws_check`, 6.18): a TSval at most `ticks` older than the
    /// newest is no old one. Nor is any other if the newest is 0, as some put into a SYN although
    /// their clock stands elsewhere, or so old itself that R's clock may have gone half round.
    pub(crate) fn is_current(&self, now: Instant, tsval: u32, ticks: i32) -> bool {
        Seq(self.recent).after(Seq(tsval)) <= ticks
            || self.recent == 0
            || outdated(now, self.recent_at)
    }

    /// R's clock may have gone half way round since it was last seen.
    pub(crate) fn is_outdated(&self, now: Instant) -> bool {
        outdated(now, self.recent_at)
    }

    /// The TSvals of two SYNs. R has got that of G, whether its ACK says so or has no timestamp.
    pub(crate) fn on_syns(&mut self, of_guest: u32, of_net: u32) {
        self.to_net = of_guest;
        self.echo_to_guest = of_guest;
        self.recent = of_net;
        self.to_guest = of_net;
    }

    /// R's third ACK.
    pub(crate) fn on_third_ack_from_net(&mut self, ts: Timestamps) {
        self.recent = ts.tsval;
        self.to_guest = ts.tsval;
        self.echo_to_guest = ts.tsecr;
    }

    /// G's third ACK.
    pub(crate) fn on_third_ack_from_guest(&mut self, tsval: u32) {
        self.to_net = tsval;
    }

    /// The flow is taken into the path: both clocks are as old as this.
    pub(crate) fn on_taken_on(&mut self, now: Instant) {
        (self.recent_at, self.to_net_at) = (now.low_eights(), now.low_eights());
    }

    /// A TSval of R that H echoes from now on.
    pub(crate) fn on_recent(&mut self, now: Instant, tsval: u32) {
        if older(tsval, self.recent) && self.to_guest == self.recent {
            self.to_guest = tsval; // void or outdated for G as well
        }
        self.recent = tsval;
        self.recent_at = now.low_eights();
    }

    /// The TSecr that came with R's newest (ack, window).
    pub(crate) fn on_echo_from_net(&mut self, tsecr: u32) {
        self.echo_to_guest = tsecr;
    }

    /// A TSval of R that is about to be (or may now be) emitted to G (INV-08, INV-09).
    pub(crate) fn on_tsval_from_net(&mut self, tsval: u32) {
        self.to_guest = newest(self.to_guest, tsval);
    }

    /// G was silent for so long that R no longer trusts its clock (PAWS). R would take a clock that
    /// H shows now for G's newest, and G's next one for old.
    pub(crate) fn is_guest_outdated(&self, now: Instant) -> bool {
        outdated(now, self.to_net_at)
    }

    /// A TSval of G; H's own ACKs use the newest (EMIT-R). A 0 in G's SYN-ACK says nothing about
    /// its clock: R takes it for void (`tcp_paws_check`), as it does an outdated one.
    pub(crate) fn on_tsval_from_guest(&mut self, now: Instant, tsval: u32) {
        let void = self.to_net == 0 || self.is_guest_outdated(now);
        self.to_net = if void { tsval } else { newest(self.to_net, tsval) };
        self.to_net_at = now.low_eights();
    }
}
