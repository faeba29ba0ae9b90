//! CUBIC (RFC 9438): the window grows with the cube of the time since the last reduction, flat
//! where it was reduced, and never slower than Reno would.
//!
//! # Arithmetic
//!
//! The RFC counts segments and seconds: `W_cubic(t) = C * (t - K)^3 + W_max` with C = 2/5 segments
//! per s^3. Here windows are bytes, and times are in units of 2^-20 s ("fine"), so that the cube is
//! in units of 2^-60 s^3 and its division a shift:
//!
//! ```text
//! W_cubic(t) - W_max = 2/5 * mss * (t - K)^3 >> 60        bytes
//! K                  = cbrt(5/2 * (W_max - cwnd) / mss << 60)      fine
//! ```
//!
//! A time that differs from K by more than [`SPAN_MAX`] counts as that, so a cube fits 103 bits.

use crate::congestion::controller::{Ack, Controller};
use crate::congestion::window::{WINDOW_MAX, Window};
use crate::time::{Duration, Instant};
use crate::wire::saved::saved;

/// Units of time in a second: 2^20.
const FINE_BITS: u32 = 20;
/// Four and a half hours, in fine units.
const SPAN_MAX: i64 = 1 << 34;
/// `beta_cubic` 0.7: the part of the window that is left after a reduction (section 4.6).
const BETA: (u64, u64) = (7, 10);
/// With fast convergence `W_max` is (1 + beta) / 2 of the window (section 4.7).
const CONVERGENCE: (u64, u64) = (17, 20);
/// `alpha_cubic` = 3 * (1 - beta) / (1 + beta): segments a round trip that give the throughput of
/// Reno with this beta (section 4.3).
const ALPHA: (u64, u64) = (9, 17);

/// See the module doc.
#[derive(Clone, Debug)]
pub struct Cubic {
    window: Window,
    curve: Curve,
    /// As it was before reductions that may have been for nothing (section 4.9).
    before: Curve,
}

saved!(Cubic { window, curve, before });

/// How the window grows in congestion avoidance.
#[derive(Clone, Copy, Debug, Default)]
struct Curve {
    /// The window before the last reduction, or less, where the curve is flat (`W_max`).
    w_max: u64,
    /// The window that Reno would have (`W_est`).
    w_est: u64,
    /// The window right before the reduction: from there on Reno's is a segment per round trip
    /// (`cwnd_prior`).
    cwnd_prior: u64,
    /// When this congestion avoidance began; none before its first ACK.
    epoch: Option<Instant>,
    /// Fine units from the epoch to `w_max` (`K`).
    k: i64,
    /// Growth of the window that is not a whole byte yet.
    credit: u64,
    /// The same of `w_est`.
    credit_est: u64,
}

saved! {
    Curve { w_max, w_est, cwnd_prior, epoch as Wall, k, credit, credit_est }
    check |it| {
        let windows = [it.w_max, it.w_est, it.cwnd_prior];
        let spans = -SPAN_MAX..=SPAN_MAX;
        windows.iter().all(|window| *window <= WINDOW_MAX) && spans.contains(&it.k)
    }
}

impl Curve {
    /// The first ACK of congestion avoidance (section 4.2, and 4.8 and 4.10 where slow start came
    /// before, so that there is no plateau to go back to).
    fn begin(&mut self, now: Instant, cwnd: u64, mss: u64) {
        self.epoch = Some(now);
        self.w_est = cwnd;
        (self.credit, self.credit_est) = (0, 0);
        if self.w_max <= cwnd {
            self.w_max = cwnd;
            self.k = 0;
            return;
        }
        let missing = (u128::from(self.w_max - cwnd) * 5) << (3 * FINE_BITS);
        self.k = cube_root(missing / (2 * u128::from(mss)));
    }

    /// `W_cubic` at `at` fine units after the epoch, in bytes.
    fn w_cubic(&self, at: i64, mss: u64) -> u64 {
        let span = i128::from((at - self.k).clamp(-SPAN_MAX, SPAN_MAX));
        let twice = (span * span * span * 2 * i128::from(mss)) >> (3 * FINE_BITS);
        let twice = i64::try_from(twice).expect("at most 2^102 * 2^17 >> 60");
        self.w_max.saturating_add_signed(twice / 5)
    }

    /// Grows the estimate of Reno's window (section 4.3).
    fn grow_estimate(&mut self, delivered: u64, cwnd: u64, mss: u64) {
        // In parts of ALPHA.1, whichever the fraction is.
        let alpha = if self.w_est >= self.cwnd_prior { ALPHA.1 } else { ALPHA.0 };
        let whole = ALPHA.1 * cwnd;
        self.credit_est += alpha * delivered * mss;
        self.w_est += self.credit_est / whole;
        self.credit_est %= whole;
    }

    /// Bytes of window that `delivered` bytes are worth on the way to `target` (sections 4.4, 4.5).
    fn growth(&mut self, target: u64, delivered: u64, cwnd: u64) -> u64 {
        self.credit += delivered.min(cwnd) * (target - cwnd);
        let growth = self.credit / cwnd;
        self.credit %= cwnd;
        growth
    }

    /// Changes the curve for a reduction (sections 4.6 and 4.7).
    fn on_reduction(&mut self, cwnd: u64) {
        self.cwnd_prior = cwnd;
        let converges = cwnd < self.w_max;
        self.w_max = if converges { cwnd * CONVERGENCE.0 / CONVERGENCE.1 } else { cwnd };
        self.epoch = None;
    }
}

impl Cubic {
    /// A window of `cwnd` bytes for segments of `mss`, in slow start.
    #[must_use]
    pub fn new(mss: u64, cwnd: u64) -> Self {
        Self::resumed(Window::new(mss, cwnd))
    }

    /// Goes on from this window, as where slow start has ended (section 4.10).
    #[must_use]
    pub fn resumed(window: Window) -> Self {
        let curve = Curve::default();
        Self { window, curve, before: curve }
    }
}

impl Controller for Cubic {
    fn cwnd(&self) -> u64 {
        self.window.cwnd()
    }

    fn ssthresh(&self) -> u64 {
        self.window.ssthresh()
    }

    fn on_ack(&mut self, ack: &Ack) {
        let delivered = self.window.slow_start(ack);
        if delivered == 0 || self.window.is_in_slow_start() {
            return;
        }
        let (cwnd, mss, curve) = (self.window.cwnd(), self.window.mss(), &mut self.curve);
        if curve.epoch.is_none() {
            curve.begin(ack.now, cwnd, mss);
        }
        let at = fine(ack.now.since(curve.epoch.unwrap_or(ack.now)));
        curve.grow_estimate(delivered, cwnd, mss);
        let growth = if curve.w_cubic(at, mss) < curve.w_est {
            curve.w_est.saturating_sub(cwnd) // as fast as Reno (section 4.3)
        } else {
            let target = curve.w_cubic(at + fine(ack.srtt), mss);
            curve.growth(target.clamp(cwnd, cwnd + cwnd / 2), delivered, cwnd)
        };
        self.window.grow(growth);
    }

    /// Time in which the window was not used is no time in which the path had room (section 5.8).
    fn on_unused(&mut self, span: Duration) {
        self.curve.epoch = self.curve.epoch.map(|epoch| epoch + span);
    }

    fn on_congestion(&mut self, _now: Instant, in_use: u64) {
        self.curve.on_reduction(self.window.cwnd());
        self.window.reduce(in_use * BETA.0 / BETA.1);
    }

    fn on_timeout(&mut self, _now: Instant, in_use: u64, first: bool) {
        if first {
            self.curve.on_reduction(self.window.cwnd());
        }
        self.window.collapse(first.then_some(in_use * BETA.0 / BETA.1));
        self.curve.epoch = None;
        self.curve.w_max = 0; // slow start comes first, so K will be 0 (section 4.8)
    }

    fn on_idle(&mut self, cwnd: u64) {
        self.window.restart(cwnd);
        self.curve.epoch = None;
    }

    fn keep(&mut self) {
        self.before = self.curve;
        self.window.keep();
    }

    fn on_spurious(&mut self) {
        self.curve = self.before;
        self.window.undo();
    }

    fn on_mss(&mut self, mss: u64) {
        self.window.set_mss(mss);
        self.curve.epoch = None;
    }
}

/// A duration in units of 2^-20 s.
fn fine(span: Duration) -> i64 {
    // 2^20 / 10^9 = 2^11 / 5^9. Ten days are more than any span that counts.
    let ns = span.as_nanos().min(864_000_000_000_000);
    i64::try_from((ns << 11) / 1_953_125).unwrap_or(i64::MAX)
}

/// The integer cube root, a bit at a time from the highest.
fn cube_root(n: u128) -> i64 {
    let mut root: u128 = 0;
    for bit in (0..35).rev() {
        let larger = root | 1 << bit;
        if larger * larger * larger <= n {
            root = larger;
        }
    }
    i64::try_from(root).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests;
