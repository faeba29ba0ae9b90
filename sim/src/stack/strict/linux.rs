//! Growth as today's Linux has it: CUBIC with HyStart (`tcp_cubic.c`), and a receive buffer that is
//! tuned (`tcp_rcv_space_adjust`). Which transfers a scheduler's pauses make slow depends on both:
//! HyStart takes a pause for a queue, and the buffer grows once a round trip.
//!
//! Simpler than there: delays are of the timestamps' milliseconds, so over less than one no train
//! of ACKs is seen; nothing is allowed for ACKs that were merged (`hystart_ack_delay`); samples
//! count below the low window, too.

use nightporter_core::time::{Duration, Instant};

use super::ranges::Place;

/// Below so many segments HyStart does not look, and samples of a round that it waits for.
const LOW_WINDOW: i64 = 16;
const SAMPLES_MIN: u32 = 8;
/// The delay that it takes for a queue: an eighth of the path's, within these.
const DELAY: [Duration; 2] = [Duration::from_millis(4), Duration::from_millis(16)];
/// ACKs that follow each other so closely are a train.
const TRAIN: Duration = Duration::from_millis(2);
/// While the bandwidth is unknown: at least 5 % a round trip.
const COUNT_MAX: i64 = 20;
/// Segments of the buffer that is tuned from the first.
const SPACE_FIRST: i64 = 10;

/// Slow start's end, and growth after it. Windows are in bytes.
#[derive(Debug, Default)]
pub(super) struct Cubic {
    now: Instant,
    /// The least round trip, and the least of this round.
    least: Option<Duration>,
    of_round: Option<Duration>,
    samples: u32,
    round_from: Instant,
    /// The round is over when this is acknowledged.
    round_to: Place,
    last_ack: Instant,
    /// The window of the last reduction, if there was one; and of this epoch.
    before: Option<i64>,
    epoch: Option<Epoch>,
}

/// Growth since a reduction, or since slow start.
#[derive(Clone, Copy, Debug)]
struct Epoch {
    from: Instant,
    /// The curve's middle: its window, and milliseconds until there.
    origin: i64,
    to_origin_ms: i64,
    /// Reno's window.
    reno: i64,
    acked: i64,
}

impl Cubic {
    /// Something new is acknowledged; the segment that asked for it left at `sent_ms`. Whether slow
    /// start is to end, with this window.
    pub(super) fn hear(
        &mut self,
        now: Instant,
        [una, nxt]: [Place; 2],
        sent_ms: Option<u64>,
        [window, mss]: [i64; 2],
    ) -> bool {
        self.now = now;
        if una > self.round_to {
            (self.round_from, self.round_to, self.last_ack) = (now, nxt, now);
            (self.of_round, self.samples) = (None, 0);
        }
        let Some(took) = sent_ms.and_then(|sent| now.as_millis().checked_sub(sent)) else {
            return false;
        };
        let took = Duration::from_millis(took);
        let least = self.least.map_or(took, |least| least.min(took));
        self.least = Some(least);
        let of_round = self.of_round.map_or(took, |of_round| of_round.min(took));
        (self.of_round, self.samples) = (Some(of_round), self.samples + 1);
        if window < LOW_WINDOW * mss {
            return false;
        }
        let is_train = now.since(self.last_ack) <= TRAIN;
        if is_train {
            self.last_ack = now;
        }
        let half = Duration::from_nanos(least.as_nanos() / 2);
        let long_train = is_train && half > Duration::ZERO && now.since(self.round_from) > half;
        let queue = Duration::from_nanos(least.as_nanos() / 8).clamp(DELAY[0], DELAY[1]);
        long_train || self.samples >= SAMPLES_MIN && of_round > least + queue
    }

    /// The window was so large when something was lost.
    pub(super) fn on_loss(&mut self, window: i64) {
        // `fast_convergence`
        let lower = self.before.is_some_and(|before| window < before);
        self.before = Some(if lower { window * 17 / 20 } else { window });
        self.epoch = None;
    }

    /// `bytes` were acknowledged behind slow start: by how much the window grows.
    pub(super) fn growth(&mut self, bytes: i64, window: i64, mss: i64) -> i64 {
        let (now, before) = (self.now, self.before);
        let epoch = self.epoch.get_or_insert_with(|| {
            let origin = before.unwrap_or(window).max(window);
            let to_origin_ms = cube_root((origin - window) / mss.max(1) * 10 / 4 * 1_000_000_000);
            Epoch { from: now, origin, to_origin_ms, reno: window, acked: 0 }
        });
        let passed = now.since(epoch.from) + self.least.unwrap_or(Duration::ZERO);
        let off = i64::try_from(passed.as_millis()).unwrap_or(i64::MAX) - epoch.to_origin_ms;
        let off = i128::from(off.clamp(-1_000_000, 1_000_000));
        // 0.4 segments times the cube of seconds
        let curve = off * off * off * 4 / 10 * i128::from(mss) / 1_000_000_000;
        let target = epoch.origin + i64::try_from(curve).unwrap_or(i64::MAX / 2);
        let mut count = if target > window { window / (target - window) } else { 100 * window };
        if before.is_none() {
            count = count.min(COUNT_MAX);
        }
        // As Reno would, with a reduction to 0.7: 0.53 segments a round trip.
        epoch.acked += bytes;
        let each = (window * 15 / 8).max(1);
        epoch.reno += epoch.acked / each * mss;
        epoch.acked %= each;
        if epoch.reno > window {
            count = count.min(window / (epoch.reno - window));
        }
        (bytes / count.max(2)).max(1)
    }
}

/// Of what is not negative.
fn cube_root(of: i64) -> i64 {
    let (mut low, mut high) = (0_i64, 2_000_000);
    while low < high {
        let middle = (low + high + 1) / 2;
        let cube = middle * middle * middle;
        if cube <= of { low = middle } else { high = middle - 1 }
    }
    low
}

/// A receive buffer that grows with what is read in a round trip.
#[derive(Debug, Default)]
pub(super) struct Tuned {
    round_trip: Option<Duration>,
    since: Instant,
    /// The application had read so far then, and read so much in the round trip before.
    read: Place,
    space: i64,
}

impl Tuned {
    /// The peer has answered what left at `sent_ms`.
    pub(super) fn hear(&mut self, now: Instant, sent_ms: Option<u64>) {
        let Some(took) = sent_ms.and_then(|sent| now.as_millis().checked_sub(sent)) else { return };
        let took = took * 1_000_000;
        let before = self.round_trip.map(Duration::as_nanos);
        let smooth = before.map_or(took, |before| before - before / 8 + took / 8);
        self.round_trip = Some(Duration::from_nanos(smooth));
    }

    /// The application has read everything before `read`: what the buffer is to be now.
    pub(super) fn buffer(&mut self, now: Instant, read: Place, mss: i64) -> Option<i64> {
        let space = if self.space == 0 { SPACE_FIRST * mss } else { self.space };
        let round_trip = self.round_trip?;
        if now.since(self.since) < round_trip {
            return None;
        }
        let copied = read - self.read;
        (self.since, self.read, self.space) = (now, read, space.max(copied));
        (copied > space).then(|| {
            let window = 2 * copied + 16 * mss;
            window + 2 * (window * (copied - space) / space)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pause_ends_slow_start_and_a_steady_path_does_not() {
        for (pause_ms, ends) in [(0, false), (30, true)] {
            let mut cubic = Cubic::default();
            let mut found = false;
            for n in 0..40_i64 {
                // Each round of ten ACKs is of a path of 10 ms; those of the later ones were late.
                let late = if n >= 20 { pause_ms } else { 0 };
                let at = Instant::from_millis(100 + 40 * (n / 10).unsigned_abs());
                let sent = at.as_millis() - 10 - late;
                found |= cubic.hear(at, [n * 1000, n / 10 * 10_000 + 10_000], Some(sent), [20, 1]);
            }
            assert_eq!(found, ends, "{pause_ms}");
        }
    }

    #[test]
    fn behind_slow_start_a_window_grows_by_five_percent_a_round_trip_and_comes_back_after_a_loss() {
        let mut cubic = Cubic::default();
        let grown: i64 = (0..100).map(|_| cubic.growth(1_000, 100_000, 1_000)).sum();
        assert!((4_900..=5_300).contains(&grown), "{grown}");
        cubic.on_loss(100_000);
        cubic.now = Instant::from_secs(10);
        assert!(cubic.growth(1_000, 70_000, 1_000) < 50, "it begins slowly");
        cubic.now = Instant::from_secs(14); // 4.2 s until the window is there again
        assert!(cubic.growth(1_000, 70_000, 1_000) > 200);
    }

    #[test]
    fn a_buffer_grows_once_a_round_trip_by_what_was_read() {
        let mut tuned = Tuned::default();
        assert_eq!(tuned.buffer(Instant::from_millis(50), 50_000, 1_000), None, "no round trip");
        tuned.hear(Instant::from_millis(60), Some(50));
        let first = tuned.buffer(Instant::from_millis(60), 60_000, 1_000);
        assert_eq!(first, Some(2 * 60_000 + 16_000 + 2 * (136_000 * 5)));
        assert_eq!(tuned.buffer(Instant::from_millis(65), 90_000, 1_000), None, "too soon");
        assert_eq!(tuned.buffer(Instant::from_millis(71), 110_000, 1_000), None, "no more");
    }

    #[test]
    fn cube_roots() {
        assert_eq!([0, 1, 7, 8, 26, 27, 4_251_528].map(cube_root), [0, 1, 1, 2, 2, 3, 162]);
    }
}
