//! The widest window of a conforming sender, if all acknowledged bytes have used it.

use nightporter_core::time::Instant;

/// The rest after a reduction, in tenths (RFC 9438 section 4.6), and two segments at least.
const LEFT_TENTHS: u64 = 7;
/// RFC 9438's constant, segments per second cubed.
const CUBIC: f64 = 0.4;

/// The widest window of a conforming sender.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Window {
    pub(super) size: u64,
    /// Slow start may go on to here.
    pub(super) slow_to: u64,
    /// When it was last reduced, and from what.
    reduced: Option<(Instant, u64)>,
    /// The window by RFC 5681 since then.
    reno: f64,
}

impl Window {
    /// Before anything was lost or marked.
    pub(super) fn first(size: u64) -> Self {
        Self { size, slow_to: u64::MAX, ..Self::default() }
    }

    /// The same, if it is not narrower than this.
    pub(super) fn at_least(self, size: u64) -> Self {
        Self { size: self.size.max(size), reno: self.reno.max(size as f64), ..self }
    }

    pub(super) fn reduce(&mut self, at: Instant, used: u64, mss: u64) {
        self.reduced = Some((at, self.size));
        self.size = (self.size.min(used) * LEFT_TENTHS / 10).max(2 * mss).min(self.size);
        (self.slow_to, self.reno) = (self.size, self.size as f64);
    }

    /// `bytes` more are acknowledged, and all of it was used.
    #[expect(clippy::cast_sign_loss, clippy::cast_possible_truncation, reason = "bytes")]
    pub(super) fn grow(&mut self, at: Instant, bytes: u64, mss: u64) {
        if self.size < self.slow_to {
            self.size = self.slow_to.min(self.size + bytes);
            self.reno = self.size as f64;
            return;
        }
        self.reno += bytes as f64 * mss as f64 / self.reno;
        let most = self.curve(at, mss).max(self.reno).min(1e15) as u64;
        self.size = self.size.max(most.min(self.size + bytes));
    }

    /// RFC 9438's window: the larger of the curve that is flat where the window was reduced, and of
    /// the one that is flat where it was left. No curve of a narrower window lies above both.
    fn curve(&self, at: Instant, mss: u64) -> f64 {
        let Some((reduced_at, before)) = self.reduced else { return 0.0 };
        let t = at.since(reduced_at).as_nanos() as f64 / 1e9;
        let (before, mss) = (before as f64, mss as f64);
        let k = (0.3 * before / (CUBIC * mss)).cbrt();
        let cube = |t: f64| CUBIC * mss * t.powi(3);
        (before + cube(t - k)).max(0.7 * before + cube(t))
    }
}
