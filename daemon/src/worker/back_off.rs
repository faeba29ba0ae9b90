//! Backing off: an attached tap whose worker is away often stays plain for a while, because each
//! absence costs its VM's connections more than they gain.
//!
//! Its connections first acknowledge late until none owes anything, however long that takes: none
//! is reset for this. Then its frames pass plain, as in an absence, and when they are turned again
//! connections come back as after one (LIFE-17).

use std::collections::VecDeque;

use nightporter_core::port::PortId;
use nightporter_core::tcp::Passed;
use nightporter_core::time::{Duration, Instant};

use super::data_path::DataPath;

/// So many absences within [`WITHIN`] are too many.
const ABSENCES_MAX: usize = 3;
/// See [`ABSENCES_MAX`].
const WITHIN: Duration = Duration::from_secs(10);
/// How long a tap stays plain at first; then twice as long each time.
const PLAIN_MIN: Duration = Duration::from_secs(10);
/// At most. A tap that was turned as long begins with the shortest time again.
const PLAIN_MAX: Duration = Duration::from_secs(300);

/// How an attached tap backs off.
#[derive(Debug)]
pub(super) struct BackOff {
    stage: Stage,
    /// The last absences, or when frames were turned again.
    absences: VecDeque<Instant>,
    /// How long it was plain last, or is.
    lasts: Duration,
    /// How often it has backed off.
    pub(super) times: u64,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Stage {
    /// Its frames are turned, since then.
    Turned(Instant),
    /// Its connections acknowledge late until none owes anything.
    Late,
    /// It is plain until then.
    Plain(Instant),
}

impl BackOff {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            stage: Stage::Turned(now),
            absences: VecDeque::new(),
            lasts: Duration::ZERO,
            times: 0,
        }
    }

    /// Frames have passed because the worker was away. Those that were counted less than `apart`
    /// after others are of the same absence. Returns how long the tap is to be plain, if that is
    /// once too often.
    fn handle_absence(&mut self, now: Instant, apart: Duration) -> Option<Duration> {
        let Stage::Turned(since) = self.stage else { return None };
        let last = self.absences.back().map_or(since, |last| *last);
        if now.since(last) < apart {
            return None;
        }
        self.absences.retain(|at| now.since(*at) < WITHIN);
        self.absences.push_back(now);
        if self.absences.len() < ABSENCES_MAX {
            return None;
        }
        self.absences.clear();
        let again = self.times > 0 && now.since(since) < PLAIN_MAX;
        self.lasts = if again { PLAIN_MAX.min(self.lasts + self.lasts) } else { PLAIN_MIN };
        self.stage = Stage::Late;
        self.times += 1;
        Some(self.lasts)
    }

    pub(super) fn is_plain(&self) -> bool {
        matches!(self.stage, Stage::Plain(_))
    }

    /// For how much longer it is plain, or will be.
    pub(super) fn plain_for(&self, now: Instant) -> Option<Duration> {
        match self.stage {
            Stage::Turned(_) => None,
            Stage::Late => Some(self.lasts),
            Stage::Plain(until) => Some(until.since(now)),
        }
    }

    /// When it is to be turned again.
    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        if let Stage::Plain(until) = self.stage { Some(until) } else { None }
    }
}

impl DataPath {
    /// Frames have passed the tap of this VM because the worker was away.
    pub(super) fn note_absence(&mut self, now: Instant, id: PortId) {
        let Some(apart) = self.attached.limit() else { return };
        let Some(at) = self.attached.of_mut(id) else { return };
        let Some(lasts) = at.back_off.handle_absence(now, apart) else { return };
        self.engine.set_late(now, id, true);
        tracing::warn!(
            vm = self.ports.of(id).name,
            seconds = lasts.as_millis() / 1000,
            "the worker was away {ABSENCES_MAX} times within {} s: the tap is plain for a while, \
             and its connections are not acknowledged for; give the worker a core of its own \
             (daemon.cpu) or a priority (daemon.rt_priority)",
            WITHIN.as_millis() / 1000
        );
    }

    /// Before frames that have passed are counted: taps whose time is over are turned again. These.
    pub(super) fn end_back_offs(&mut self, now: Instant) -> Vec<PortId> {
        let mut all = self.attached.backing_off(now);
        all.retain(|id| {
            let at = self.attached.of_mut(*id).map(|at| &mut at.back_off.stage);
            at.is_some_and(|stage| match *stage {
                Stage::Plain(until) if until <= now => {
                    *stage = Stage::Turned(now);
                    true
                }
                _ => false,
            })
        });
        for &id in &all {
            self.set_plain(id, false);
            self.engine.set_late(now, id, false);
            tracing::info!(vm = self.ports.of(id).name, "the tap's frames are turned again");
        }
        all
    }

    /// After a turn: taps of which nothing is owed any more are plain from now on.
    pub(super) fn go_on_backing_off(&mut self, now: Instant) {
        for id in self.attached.backing_off(now) {
            let Some(at) = self.attached.of_mut(id) else { continue };
            if at.back_off.stage == Stage::Late && self.engine.is_drained(id) {
                at.back_off.stage = Stage::Plain(now + at.back_off.lasts);
                self.set_plain(id, true);
                self.engine.handle_passed_plain(now, id, |_| Passed::Segments);
                self.catch_up(id);
            }
        }
    }

    fn set_plain(&mut self, id: PortId, all: bool) {
        let port = self.ports.of_mut(id).port.as_attached_mut();
        port.into_iter().for_each(|port| port.set_plain(all));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const APART: Duration = Duration::from_millis(100);

    fn at(ms: u64) -> Instant {
        Instant::ZERO + Duration::from_millis(ms)
    }

    /// Three absences, the last at this time.
    fn is_away(back_off: &mut BackOff, ms: u64) -> Option<Duration> {
        for before in [300, 150] {
            assert_eq!(back_off.handle_absence(at(ms - before), APART), None);
        }
        back_off.handle_absence(at(ms), APART)
    }

    #[test]
    fn three_absences_within_ten_seconds_are_too_many() {
        let mut it = BackOff::new(at(0));
        for ms in [1000, 6000, 11_001, 16_002, 16_050, 16_101] {
            assert_eq!(it.handle_absence(at(ms), APART), None, "{ms}: or the same as before");
        }
        assert_eq!(it.plain_for(at(16_102)), None);
        assert_eq!(it.handle_absence(at(16_102), APART), Some(PLAIN_MIN));
        assert_eq!(it.handle_absence(at(17_000), APART), None, "it backs off already");
        assert_eq!((it.times, it.plain_for(at(17_000))), (1, Some(PLAIN_MIN)));
    }

    #[test]
    fn each_time_is_twice_as_long_until_it_goes_well_for_as_long_as_the_longest() {
        let mut it = BackOff::new(at(0));
        let mut now = 1000;
        for seconds in [10, 20, 40, 80, 160, 300, 300] {
            assert_eq!(is_away(&mut it, now), Some(Duration::from_secs(seconds)));
            now += 1000;
            it.stage = Stage::Turned(at(now));
            now += 1000;
        }
        now += 300_000;
        assert_eq!(is_away(&mut it, now), Some(PLAIN_MIN));
    }
}
