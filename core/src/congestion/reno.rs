//! NewReno: one segment more per round trip, half the window after a loss (RFC 5681, RFC 6582).

use crate::congestion::controller::{Ack, Controller};
use crate::congestion::window::{WINDOW_MAX, Window};
use crate::time::{Duration, Instant};
use crate::wire::saved::saved;

/// See the module doc.
#[derive(Clone, Debug)]
pub struct Reno {
    window: Window,
    /// Bytes delivered in congestion avoidance that have not yet become a segment of window.
    credit: u64,
}

saved!(Reno { window, credit } check |it| it.credit <= WINDOW_MAX);

impl Reno {
    /// A window of `cwnd` bytes for segments of `mss`, in slow start.
    #[must_use]
    pub fn new(mss: u64, cwnd: u64) -> Self {
        Self::resumed(Window::new(mss, cwnd))
    }

    /// Goes on from this window.
    #[must_use]
    pub const fn resumed(window: Window) -> Self {
        Self { window, credit: 0 }
    }
}

impl Controller for Reno {
    fn cwnd(&self) -> u64 {
        self.window.cwnd()
    }

    fn ssthresh(&self) -> u64 {
        self.window.ssthresh()
    }

    /// RFC 5681 section 3.1 with byte counting (RFC 3465 section 2.1): once a window was delivered
    /// the window is a segment larger.
    fn on_ack(&mut self, ack: &Ack) {
        self.credit += self.window.slow_start(ack);
        while self.credit >= self.window.cwnd() && !self.window.is_in_slow_start() {
            self.credit -= self.window.cwnd();
            self.window.grow(self.window.mss());
        }
    }

    /// Growth counts bytes, not time.
    fn on_unused(&mut self, _span: Duration) {}

    fn on_congestion(&mut self, _now: Instant, in_use: u64) {
        self.window.reduce(in_use / 2);
        self.credit = 0;
    }

    fn on_timeout(&mut self, _now: Instant, in_use: u64, first: bool) {
        self.window.collapse(first.then_some(in_use / 2));
        self.credit = 0;
    }

    fn on_idle(&mut self, cwnd: u64) {
        self.window.restart(cwnd);
    }

    fn keep(&mut self) {
        self.window.keep();
    }

    fn on_spurious(&mut self) {
        self.window.undo();
    }

    fn on_mss(&mut self, mss: u64) {
        self.window.set_mss(mss);
    }
}

#[cfg(test)]
mod tests;
