//! Connections that another daemon knew (FLOOD-28).
//!
//! A window that has flooded stays as large as it is until a loss reduces it. While routes flood it
//! also outlives pauses; and if the setting that shrinks it after a pause were on, it would shrink
//! only to the route's initial window (`tcp_cwnd_restart()`, Linux 6.1). So connections of an
//! earlier daemon would keep theirs for good as soon as routes flood again, although only the guest
//! controls their congestion. Routes therefore wait until such connections have ended, or have sent
//! after a pause and begun with a small window. Connections under `np_flood` notice it themselves.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU64;

use anyhow::Result;
use nightporter_core::time::{Duration, Instant};

use crate::beats::{Beats, Nic};
use crate::connections::Connection;

/// A congestion window that the network notices, in segments: ten times what a new connection has.
const LARGE: u32 = 100;
/// How often it is looked whether they are still there.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// A daemon draws its first epoch from all there are, and counts on from there.
const EPOCHS_OF_ONE_DAEMON: u64 = 1 << 32;

/// See the module doc. [`Self::is_asking`] says when to list connections, for [`Self::see`].
#[derive(Debug, Default)]
pub struct Earlier {
    /// The last epoch of each interface.
    epochs: BTreeMap<Nic, NonZeroU64>,
    /// Another daemon's heartbeat came, and connections were not listed since.
    is_another: bool,
    /// By their cookies.
    held: BTreeSet<u64>,
    /// The kernel did not list them when it was asked last.
    is_blind: bool,
    look_at: Instant,
}

impl Earlier {
    /// Why nothing floods now, if that is so.
    #[must_use]
    pub fn reason(&self) -> Option<String> {
        match self.held.len() {
            _ if self.is_blind => Some(
                "another daemon controls congestion, and this kernel does not tell which \
                 connections of before are left (tcp_diag): until it does, or `flood off` and \
                 `flood on`"
                    .to_owned(),
            ),
            0 => None,
            left => Some(format!(
                "another daemon controls congestion, and {left} of the connections of before have \
                 windows of more than {LARGE} segments (ss -ti: cwnd), or none yet"
            )),
        }
    }

    /// Takes the heartbeats of the interfaces; returns whether connections have to be listed now.
    pub fn is_asking(&mut self, now: Instant, beats: &Beats) -> bool {
        for (nic, beat) in beats.live() {
            let before = self.epochs.insert(nic, beat.epoch).unwrap_or(beat.epoch);
            self.is_another |= beat.epoch.get().wrapping_sub(before.get()) >= EPOCHS_OF_ONE_DAEMON;
        }
        self.is_another || (!self.held.is_empty() && now >= self.look_at)
    }

    /// When [`Self::is_asking`] will be true even without a heartbeat.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        (!self.held.is_empty()).then_some(self.look_at)
    }

    /// All connections.
    pub fn see(&mut self, now: Instant, all: Result<Vec<Connection>>) {
        self.look_at = now + LOOK_EVERY;
        self.is_blind = all.is_err();
        let Ok(all) = all else { return };
        let large = all.iter().filter(|c| c.window.is_none_or(|window| window > LARGE));
        let large = large.map(|c| c.cookie).collect();
        if std::mem::take(&mut self.is_another) {
            self.held = large;
        } else {
            self.held = self.held.intersection(&large).copied().collect();
        }
    }
}

#[cfg(test)]
mod tests {
    use nightporter_core::wire::heartbeat::Heartbeat;

    use super::*;

    const T0: Instant = Instant::from_secs(1_000);
    const DAEMON: u64 = u64::MAX - 1;
    const ANOTHER: u64 = 1 << 40;

    fn hears(earlier: &mut Earlier, now: Instant, nic: Nic, epoch: u64) -> bool {
        let mut beats = Beats::default();
        let epoch = NonZeroU64::new(epoch).unwrap();
        beats.heard(now, nic, Heartbeat { controls: true, epoch });
        earlier.is_asking(now, &beats)
    }

    /// Zero: it is in its handshake.
    fn of(windows: &[u32]) -> Result<Vec<Connection>> {
        let all = windows.iter().zip(1..);
        let window = |window| (window > 0).then_some(window);
        Ok(all.map(|(&w, cookie)| Connection { cookie, window: window(w) }).collect())
    }

    #[test]
    fn flood_28_another_daemon_waits_for_the_large_windows_of_the_one_before() {
        let mut earlier = Earlier::default();
        assert!(!hears(&mut earlier, T0, 2, DAEMON));
        assert!(hears(&mut earlier, T0, 2, ANOTHER));
        assert_eq!(earlier.poll_timeout(), None);
        earlier.see(T0, of(&[1000, 100, 5000, 0]));
        assert!(earlier.reason().unwrap().contains("3 of the connections of before"));
        assert!(!hears(&mut earlier, T0, 2, ANOTHER));
        let second = T0 + LOOK_EVERY;
        assert_eq!(earlier.poll_timeout(), Some(second));
        assert!(hears(&mut earlier, second, 2, ANOTHER));
        // One has begun with little, and one's handshake has not ended; a third grows by itself.
        earlier.see(second, of(&[10, 2000, 101, 0]));
        assert!(earlier.reason().unwrap().contains("2 of the connections of before"));
        assert!(hears(&mut earlier, second + LOOK_EVERY, 2, ANOTHER));
        // One has ended, and the other's handshake, after the routes had been undone.
        earlier.see(
            second,
            of(&[10, 2000, 101, 10]).map(|mut all| {
                all.remove(2);
                all
            }),
        );
        assert_eq!((earlier.reason(), earlier.poll_timeout()), (None, None));
    }

    #[test]
    fn flood_28_a_daemon_that_begins_again_knows_its_connections() {
        let mut earlier = Earlier::default();
        for epoch in [DAEMON, DAEMON, DAEMON + 1, 1, 2] {
            assert!(!hears(&mut earlier, T0, 2, epoch), "{epoch}");
        }
        assert!(!hears(&mut earlier, T0, 3, ANOTHER), "the other link's host");
        assert!(hears(&mut earlier, T0, 2, DAEMON), "it was moved back: nobody knows them");
    }

    #[test]
    fn flood_28_who_cannot_look_does_not_flood_before_he_can() {
        let mut earlier = Earlier::default();
        hears(&mut earlier, T0, 2, DAEMON);
        hears(&mut earlier, T0, 2, ANOTHER);
        let blind = || Err(anyhow::anyhow!("no tcp_diag"));
        earlier.see(T0, blind());
        assert!(earlier.reason().unwrap().contains("tcp_diag"));
        assert!(hears(&mut earlier, T0, 2, ANOTHER));
        earlier.see(T0, of(&[1000]));
        assert!(earlier.reason().unwrap().contains("1 of the connections of before"));
        earlier.see(T0, blind());
        assert!(earlier.reason().unwrap().contains("tcp_diag"));
        earlier.see(T0, of(&[10]));
        assert_eq!(earlier.reason(), None);
    }
}
