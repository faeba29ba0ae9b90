//! The heartbeat of congestion offload (FLOOD-28): when a guest is told that this host controls its
//! congestion, or no longer does. `core::wire::heartbeat` has the frame, and how a guest treats it.
//!
//! Only guests with congestion offload are told. When the host no longer controls congestion, the
//! guest is told to stop, once; if that frame is lost, the missing heartbeats have the same effect.
//! A command takes effect at once. A change that the engine finds by itself (for example no place
//! for the next connections) is noticed within a period.

use std::num::NonZeroU64;

use nightporter_core::limits::HEARTBEAT_PERIOD;
use nightporter_core::port::PortId;
use nightporter_core::time::Instant;
use nightporter_core::wire::heartbeat::Heartbeat;

/// See the module doc.
#[derive(Debug)]
pub(super) struct Heartbeats {
    /// The next one, begun whenever control of a guest begins: connections of a time without were
    /// the guest's own to control.
    epoch: NonZeroU64,
    /// The last heartbeat of each guest, by the port's number.
    told: Vec<Option<Heartbeat>>,
    /// When they are told again.
    due: Instant,
    /// Guests that may have to be told something else before.
    changed: Vec<PortId>,
}

impl Heartbeats {
    /// The first epoch is `epoch`.
    pub(super) const fn new(epoch: NonZeroU64) -> Self {
        Self { epoch, told: Vec::new(), due: Instant::ZERO, changed: Vec::new() }
    }

    /// When to [`Self::beat`].
    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        let due = if self.changed.is_empty() { self.due } else { Instant::ZERO };
        (due < Instant::MAX).then_some(due)
    }

    /// Any guest may have to be told something else.
    pub(super) const fn handle_change(&mut self) {
        self.due = Instant::ZERO;
    }

    /// This guest may have to be told something else.
    pub(super) fn handle_change_of(&mut self, port: PortId) {
        self.changed.push(port);
    }

    /// Another guest may have this number: it was told nothing yet.
    pub(super) fn forget(&mut self, port: PortId) {
        if let Some(told) = self.told.get_mut(usize::from(port.0)) {
            *told = None;
        }
        self.changed.retain(|changed| *changed != port);
    }

    /// The guests to look at now; `None`: all.
    pub(super) fn look_at(&mut self, now: Instant) -> Option<Vec<PortId>> {
        let changed = std::mem::take(&mut self.changed);
        let all = self.due <= now;
        if all {
            self.due = Instant::MAX;
        }
        (!all).then_some(changed)
    }

    /// The heartbeats for the guests that are looked at. For each guest: whether it should have
    /// congestion offload, and whether the host controls its congestion.
    pub(super) fn beat(
        &mut self,
        now: Instant,
        vms: impl Iterator<Item = (PortId, bool, bool)>,
    ) -> Vec<(PortId, Heartbeat)> {
        let Self { epoch, told, due, .. } = self;
        let mut beats = Vec::new();
        for (port, wanted, controls) in vms {
            if wanted {
                *due = (*due).min(now + HEARTBEAT_PERIOD);
            }
            let at = usize::from(port.0);
            if told.len() <= at {
                told.resize(at + 1, None);
            }
            let beat = match (told[at], controls) {
                (None, false) => continue,
                (None, true) => {
                    let begun = *epoch;
                    *epoch = begun.checked_add(1).unwrap_or(NonZeroU64::MIN);
                    Heartbeat { controls, epoch: begun }
                }
                (Some(before), _) => Heartbeat { controls, ..before },
            };
            told[at] = controls.then_some(beat);
            beats.push((port, beat));
        }
        beats
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nightporter_core::time::Duration;

    const T0: Instant = Instant::from_secs(1000);

    fn epoch(n: u64) -> NonZeroU64 {
        NonZeroU64::new(n).unwrap()
    }

    fn says(port: u16, controls: bool, n: u64) -> (PortId, Heartbeat) {
        (PortId(port), Heartbeat { controls, epoch: epoch(n) })
    }

    fn beat(h: &mut Heartbeats, now: Instant, controls: [bool; 2]) -> Vec<(PortId, Heartbeat)> {
        assert_eq!(h.look_at(Instant::MAX), None, "all are due");
        beat_of(h, now, None, controls)
    }

    fn beat_of(
        h: &mut Heartbeats,
        now: Instant,
        looked_at: Option<Vec<PortId>>,
        controls: [bool; 2],
    ) -> Vec<(PortId, Heartbeat)> {
        let vms = [PortId(1), PortId(4)].into_iter().zip(controls);
        let vms = vms.filter(|(port, _)| looked_at.as_ref().is_none_or(|of| of.contains(port)));
        h.beat(now, vms.map(|(port, controls)| (port, controls, controls)))
    }

    #[test]
    fn flood_28_a_guest_that_changes_is_told_alone_and_at_once() {
        let mut h = Heartbeats::new(epoch(70));
        assert_eq!(beat(&mut h, T0, [true, false]), [says(1, true, 70)]);
        let soon = T0 + Duration::from_millis(10);
        h.handle_change_of(PortId(4));
        assert_eq!(h.poll_timeout(), Some(Instant::ZERO));
        let looked_at = h.look_at(soon);
        assert_eq!(looked_at, Some(vec![PortId(4)]));
        assert_eq!(beat_of(&mut h, soon, looked_at, [true; 2]), [says(4, true, 71)]);
        assert_eq!(h.poll_timeout(), Some(T0 + HEARTBEAT_PERIOD), "as it was for the other");
        h.handle_change_of(PortId(4));
        h.forget(PortId(4));
        assert_eq!(h.poll_timeout(), Some(T0 + HEARTBEAT_PERIOD), "it is gone");
        assert_eq!(h.look_at(T0 + HEARTBEAT_PERIOD), None, "all");
        // Where nobody had congestion offload, one that comes with it is told again.
        let mut h = Heartbeats::new(epoch(70));
        assert!(beat(&mut h, T0, [false; 2]).is_empty());
        h.handle_change_of(PortId(1));
        let looked_at = h.look_at(soon);
        assert_eq!(beat_of(&mut h, soon, looked_at, [true; 2]), [says(1, true, 70)]);
        assert_eq!(h.poll_timeout(), Some(soon + HEARTBEAT_PERIOD));
    }

    #[test]
    fn flood_28_only_guests_with_congestion_offload_are_told_and_every_half_second() {
        let mut h = Heartbeats::new(epoch(70));
        assert_eq!(h.poll_timeout(), Some(Instant::ZERO), "it looks once");
        assert_eq!(beat(&mut h, T0, [false, true]), [says(4, true, 70)]);
        assert_eq!(h.poll_timeout(), Some(T0 + Duration::from_millis(500)));
        assert_eq!(beat(&mut h, T0, [false, true]), [says(4, true, 70)]);
        assert_eq!(beat(&mut h, T0, [false, false]), [says(4, false, 70)]);
        assert_eq!(h.poll_timeout(), None, "there is nobody to tell anything");
        h.handle_change();
        assert!(beat(&mut h, T0, [false, false]).is_empty());
    }

    #[test]
    fn flood_28_what_the_engine_finds_by_itself_is_said_once_and_looked_at_each_period() {
        let mut h = Heartbeats::new(epoch(70));
        let mut beat = |controls| {
            assert_eq!(h.look_at(Instant::MAX), None);
            h.beat(T0, [(PortId(1), true, controls)].into_iter())
        };
        assert_eq!(beat(true), [says(1, true, 70)]);
        assert_eq!(beat(false), [says(1, false, 70)]);
        assert!(beat(false).is_empty());
        assert_eq!(beat(true), [says(1, true, 71)]);
        beat(false);
        assert_eq!(h.poll_timeout(), Some(T0 + HEARTBEAT_PERIOD), "it may come back");
    }

    #[test]
    fn flood_28_control_that_begins_again_is_another_epoch() {
        let mut h = Heartbeats::new(NonZeroU64::MAX);
        assert_eq!(beat(&mut h, T0, [true, true]), [says(1, true, u64::MAX), says(4, true, 1)]);
        beat(&mut h, T0, [false, true]);
        assert_eq!(beat(&mut h, T0, [true, true]), [says(1, true, 2), says(4, true, 1)]);
    }
}
