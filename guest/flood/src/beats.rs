//! Which NICs receive heartbeats of a host that controls congestion (FLOOD-28).

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU64;

use nightporter_core::limits::HEARTBEAT_STALE;
use nightporter_core::time::{Duration, Instant};
use nightporter_core::wire::heartbeat::Heartbeat;

/// A host that is silent for so long is gone. It is a quarter of a second less than the rule
/// allows, because within that time the routes must be changed by a guest that may have to wait for
/// its core.
pub const SILENCE_MAX: Duration =
    Duration::from_nanos(HEARTBEAT_STALE.as_nanos() - Duration::from_millis(250).as_nanos());

/// The number of an interface (`ifindex`).
pub type Nic = u32;

/// See the module doc. Drain order: [`Self::heard`] for all heartbeats, then
/// [`Self::handle_timeout`], because after a long pause heartbeats are waiting.
#[derive(Debug, Default)]
pub struct Beats(BTreeMap<Nic, Beat>);

/// The meaning of a NIC's last heartbeat.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Beat {
    /// When it is stale.
    pub until: Instant,
    /// The host's.
    pub epoch: NonZeroU64,
}

impl Beats {
    /// The NICs by which connections may flood now.
    pub fn live(&self) -> impl Iterator<Item = (Nic, Beat)> {
        self.0.iter().map(|(nic, beat)| (*nic, *beat))
    }

    /// The same, without the content of the heartbeats.
    #[must_use]
    pub fn nics(&self) -> BTreeSet<Nic> {
        self.0.keys().copied().collect()
    }

    /// A heartbeat came in by `nic`.
    pub fn heard(&mut self, now: Instant, nic: Nic, beat: Heartbeat) {
        if beat.controls {
            self.0.insert(nic, Beat { until: now + SILENCE_MAX, epoch: beat.epoch });
        } else {
            self.0.remove(&nic);
        }
    }

    /// Forgets hosts that have been silent for too long.
    pub fn handle_timeout(&mut self, now: Instant) {
        self.0.retain(|_, beat| now < beat.until);
    }

    /// When [`Self::handle_timeout`] has something to do unless another heartbeat comes.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.0.values().map(|beat| beat.until).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const T0: Instant = Instant::from_secs(1_000);
    const GOES: Heartbeat = Heartbeat { controls: true, epoch: NonZeroU64::new(77).unwrap() };
    const STOP: Heartbeat = Heartbeat { controls: false, ..GOES };

    fn ms(ms: u64) -> Instant {
        T0 + Duration::from_millis(ms)
    }

    #[test]
    fn flood_28_a_nic_floods_from_its_first_heartbeat_until_the_host_is_silent() {
        let mut beats = Beats::default();
        assert_eq!(beats.poll_timeout(), None);
        beats.heard(T0, 2, GOES);
        assert!(beats.live().eq([(2, Beat { until: ms(1750), epoch: GOES.epoch })]));
        beats.heard(ms(500), 2, GOES);
        assert_eq!(beats.poll_timeout(), Some(ms(2250)));
        beats.handle_timeout(ms(2249));
        assert_eq!(beats.nics(), [2].into());
        beats.handle_timeout(ms(2250));
        assert_eq!(beats.nics(), [].into());
        assert_eq!(beats.poll_timeout(), None);
        beats.heard(ms(9000), 2, GOES); // and it comes back
        assert_eq!(beats.nics(), [2].into());
    }

    #[test]
    fn flood_28_each_nic_has_a_host_of_its_own() {
        let mut beats = Beats::default();
        beats.heard(T0, 2, GOES);
        beats.heard(ms(500), 3, GOES);
        assert_eq!(beats.poll_timeout(), Some(ms(1750)));
        beats.handle_timeout(ms(1800));
        assert_eq!(beats.nics(), [3].into());
    }

    #[test]
    fn flood_28_a_host_that_says_stop_is_obeyed_at_once() {
        let mut beats = Beats::default();
        beats.heard(T0, 2, GOES);
        beats.heard(ms(1), 2, STOP);
        assert_eq!(beats.nics(), [].into());
        beats.heard(ms(2), 3, STOP); // and the first word may be that
        assert_eq!(beats.nics(), [].into());
    }

    #[test]
    fn flood_28_three_heartbeats_in_a_row_may_be_lost_and_a_fourth_ends_it() {
        let mut beats = Beats::default();
        beats.heard(T0, 2, GOES);
        beats.handle_timeout(ms(1600)); // of 500, 1000 and 1500 none came
        assert_eq!(beats.nics(), [2].into());
        beats.handle_timeout(ms(2000));
        assert_eq!(beats.nics(), [].into());
    }

    #[test]
    fn flood_28_after_a_long_pause_what_waited_is_heard_before_the_clock_is_asked() {
        let mut beats = Beats::default();
        beats.heard(T0, 2, GOES);
        let now = ms(60_000);
        beats.heard(now, 2, GOES);
        beats.handle_timeout(now);
        assert_eq!(beats.nics(), [2].into());
    }
}
