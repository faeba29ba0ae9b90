//! The deadlines of a flow, and their reasons.
//!
//! There are two clocks: waiting for G counts the time in which it could have acted ("running
//! time", `vm.rs`); all other waiting is wall time. The timing wheel has one instant for each flow,
//! the earliest.

use crate::limits;
use crate::time::{Duration, Instant};
use crate::wire::saved::saved;

/// In which timeouts are longer: 255 of them are four seconds.
const RTO_UNIT: Duration = Duration::from_millis(16);

/// An expired timer.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Timer {
    /// G has not acknowledged bytes that it was given, or an RST of R has waited for that long
    /// enough (SNOOP-29, SNOOP-15). Running time.
    Retransmission,
    /// G's window has been shut for a while (SNOOP-31). Running time.
    Probe,
    /// The window update may not have reached R (SNOOP-34). Wall time.
    WindowUpdate,
}

/// The event that is awaited from G.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum FromGuest {
    /// It has all there is, or the ring has no room for more.
    Nothing,
    /// An acknowledgement of bytes that are under way to it.
    Acknowledgement,
    /// Room: bytes wait, and its window is shut.
    Window,
}

/// The deadlines of one flow. `Instant::MAX` is "not set".
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timers {
    /// [`Timer::Retransmission`] or [`Timer::Probe`]; running clock.
    guest: Instant,
    /// [`Timer::WindowUpdate`]; wall clock.
    window_update: Instant,
    /// When the timing wheel wakes the flow, at the latest: it is asked only for earlier.
    wheel: Instant,
    /// Second in which a frame of the flow was last seen.
    seen_at_s: u32,
    /// `guest` is a [`Timer::Probe`].
    probing: bool,
    /// Consecutive timeouts without progress of G: each doubles the next.
    timeouts: u8,
    /// The first timeout is longer than [`limits::LOCAL_RTO_MIN`] by this, in [`RTO_UNIT`].
    rto_beyond: u8,
    /// G waits for R: its keepalive or probe went on, and no ACK of R to it since.
    guest_asks: bool,
}

saved!(Timers {
    guest as Running, window_update as Wall, wheel as Wall, seen_at_s as Second, probing, timeouts,
    rto_beyond, guest_asks,
});

impl Timers {
    /// Nothing is waited for.
    pub(crate) fn new(now: Instant) -> Self {
        Self {
            guest: Instant::MAX,
            window_update: Instant::MAX,
            wheel: Instant::MAX,
            seen_at_s: now.second(),
            probing: false,
            timeouts: 0,
            rto_beyond: 0,
            guest_asks: false,
        }
    }

    /// Second in which a frame of the flow was last seen.
    pub(crate) const fn seen_at_s(&self) -> u32 {
        self.seen_at_s
    }

    /// The end of `span` after the last frame.
    #[inline]
    pub(crate) fn idle_until(&self, span: Duration) -> Instant {
        // One more, for `seen_at_s` is rounded down.
        Instant::from_secs(u64::from(self.seen_at_s) + 1) + span
    }

    /// G's window is shut, and it is probed.
    #[inline]
    pub(crate) const fn is_probing(&self) -> bool {
        self.probing
    }

    /// G waits for R's answer.
    pub(crate) const fn guest_asks(&self) -> bool {
        self.guest_asks
    }

    /// The earliest instant of the wall clock at which something may be due. `running`: the running
    /// clock, and for how long it has stood.
    #[inline]
    pub(crate) fn next(
        &self,
        now: Instant,
        running: Instant,
        stood_for: Option<Duration>,
    ) -> Instant {
        if self.guest == Instant::MAX {
            return self.window_update;
        }
        let left = self.guest.since(running);
        let after = match stood_for {
            None => left.max(limits::TIMER_FLOOR),
            // The guest may have seen all long ago without a look at it since: then its time has
            // been counted too short. A paused guest is looked at less and less often.
            Some(stood) => left.min(stood).max(limits::TIMER_FLOOR_PAUSED),
        };
        (now + after).min(self.window_update)
    }

    /// No event is awaited: the next deadline is the end of the flow's idle time.
    #[inline]
    pub(crate) fn is_idle(&self) -> bool {
        self.guest == Instant::MAX && self.window_update == Instant::MAX
    }

    /// A frame of the flow was seen.
    #[inline]
    pub(crate) fn on_seen(&mut self, now: Instant) {
        self.seen_at_s = now.second();
    }

    /// When the timing wheel wakes the flow; no later than `latest`, whatever an image says.
    pub(crate) fn bound_wake_up(&mut self, latest: Instant) {
        self.wheel = self.wheel.min(latest);
    }

    /// When the timing wheel wakes the flow, at the latest.
    pub(crate) const fn wakes_at(&self) -> Instant {
        self.wheel
    }

    /// The timing wheel woke the flow.
    pub(crate) fn on_wheel(&mut self) {
        self.wheel = Instant::MAX;
    }

    /// G makes progress: the next timeout is the first again.
    #[inline]
    pub(crate) fn on_guest_progress(&mut self) {
        self.timeouts = 0;
    }

    /// Timeouts toward G are longer than for a local guest.
    pub(crate) const fn has_rto_beyond(&self) -> bool {
        self.rto_beyond > 0
    }

    /// Bytes toward G take time by themselves: timeouts are longer by this (FWD-04).
    pub(crate) fn set_rto_beyond(&mut self, beyond: Duration) {
        let units = beyond.as_nanos().div_ceil(RTO_UNIT.as_nanos());
        self.rto_beyond = u8::try_from(units).unwrap_or(u8::MAX);
    }

    /// A keepalive or probe of G went on to R, which has to answer it.
    pub(crate) fn on_guest_asks(&mut self) {
        self.guest_asks = true;
    }

    /// An ACK of R went on to G.
    #[inline]
    pub(crate) fn on_guest_answered(&mut self) {
        self.guest_asks = false;
    }

    /// R was sent the window.
    #[inline]
    pub(crate) fn on_window_shown(&mut self) {
        self.window_update = Instant::MAX;
    }

    /// One timeout more; how many in a row that makes.
    pub(crate) fn back_off(&mut self) -> u8 {
        self.timeouts = self.timeouts.saturating_add(1);
        self.timeouts
    }

    /// Waits for `what` from G, at most until `latest`. `restart`: G has just moved.
    #[inline]
    pub(crate) fn wait_for_guest(
        &mut self,
        what: FromGuest,
        running: Instant,
        restart: bool,
        latest: Instant,
    ) {
        let probing = what == FromGuest::Window;
        let changed = self.probing != probing;
        self.probing = probing;
        if probing && changed {
            self.timeouts = 0; // those of the way to G say nothing of its reader
        }
        let timeout = running + self.guest_timeout();
        if what == FromGuest::Nothing {
            self.guest = Instant::MAX;
        } else if restart || changed || self.guest > timeout {
            self.guest = timeout; // what stood there may have been `latest` alone
        }
        self.guest = self.guest.min(latest);
    }

    /// Waits for the same again, a whole timeout.
    pub(crate) fn wait_again(&mut self, running: Instant) {
        self.guest = running + self.guest_timeout();
    }

    /// An answer to a probe is waited for until then, whatever else is.
    pub(crate) fn wait_for_probe(&mut self, until: Instant) {
        self.guest = until;
    }

    /// G has acknowledged something: nothing is waited for until [`Self::wait_for_guest`].
    #[inline]
    pub(crate) fn stop_waiting_for_guest(&mut self) {
        self.guest = Instant::MAX;
    }

    /// A window update has just left for R; it is repeated once.
    pub(crate) fn repeat_window_update(&mut self, now: Instant) {
        self.window_update = now + limits::WINDOW_UPDATE_REPEAT;
    }

    /// The flow waits for nothing any more.
    pub(crate) fn stop(&mut self) {
        self.guest = Instant::MAX;
        self.window_update = Instant::MAX;
    }

    /// When the timing wheel must be asked to wake the flow, which wants it `at`; `Instant::MAX` if
    /// it need not be asked.
    #[must_use]
    #[inline]
    pub(crate) fn wake_at(&mut self, at: Instant) -> Instant {
        if at >= self.wheel {
            return Instant::MAX;
        }
        self.wheel = at;
        at
    }

    /// The timer that is due. It is off then.
    #[must_use]
    pub(crate) fn poll(&mut self, now: Instant, running: Instant) -> Option<Timer> {
        if self.guest <= running {
            self.guest = Instant::MAX;
            return Some(if self.probing { Timer::Probe } else { Timer::Retransmission });
        }
        if self.window_update <= now {
            self.window_update = Instant::MAX;
            return Some(Timer::WindowUpdate);
        }
        None
    }

    /// How long G is given: local RTO (SNOOP-29) or persist interval (SNOOP-31), running time.
    #[inline]
    fn guest_timeout(&self) -> Duration {
        let (first, most) = if self.probing {
            (limits::PERSIST_MIN, limits::PERSIST_MAX)
        } else {
            let first = limits::LOCAL_RTO_MIN + RTO_UNIT.saturating_mul(self.rto_beyond.into());
            (first, first.max(limits::LOCAL_RTO_MAX))
        };
        if self.timeouts == 0 {
            return first;
        }
        let backed_off = first.saturating_mul(1 << self.timeouts.min(10));
        if backed_off > most { most } else { backed_off }
    }
}
