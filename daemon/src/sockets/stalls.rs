//! Senders that wait for receivers, and for how long; and what a pause of the daemon changes.

use nightporter_core::time::{Duration, Instant};

use super::Toe;

/// How long a sender waits for receivers that take nothing, and how often it is looked at then. A
/// guest of this host must take each byte within this time, and a stream to another host a quarter
/// of what waits for it.
const T_STALL: Duration = Duration::from_secs(5);
const T_STALL_AGAIN: Duration = Duration::from_secs(1);
/// A turn that is so late was kept from being taken: what has come meanwhile is heard first.
const T_LATE: Duration = Duration::from_secs(1);

impl Toe {
    /// A daemon that stood still has not heard others, who were not silent.
    pub(super) fn note_pause(&mut self, now: Instant) {
        let due = self.poll_timeout().filter(|at| *at + T_LATE <= now);
        let Some(due) = due.filter(|_| now >= self.patient_until) else { return };
        self.patient_until = now + T_LATE;
        let pause = now.since(due);
        self.stalled.iter_mut().for_each(|(_, at)| *at = *at + pause);
        self.kept.forgive(pause);
        self.streams.forgive(pause);
    }

    /// Whether a sender waits for receivers.
    pub(super) fn stalls(&mut self, now: Instant, at: usize) -> bool {
        let known = self.stalled.iter().position(|(stalled, _)| *stalled == at);
        let stalls = self.kept.is_full(at, known.is_some());
        match known {
            None if stalls => self.stalled.push((at, now + T_STALL)),
            Some(known) if !stalls => drop(self.stalled.swap_remove(known)),
            _ => {}
        }
        stalls
    }

    /// Connections are reset for which a sender has waited too long.
    pub(super) fn end_stalls(&mut self, now: Instant) {
        for i in 0..self.stalled.len() {
            let (at, look) = self.stalled[i];
            if look <= now {
                self.stalled[i].1 = now + T_STALL_AGAIN;
                let Self { kept, devices, .. } = self;
                let is_delayed =
                    |to: usize| devices[to].as_ref().is_some_and(|device| device.limits.delays());
                for name in kept.stuck(at, now - T_STALL, is_delayed) {
                    self.reset(now, name);
                }
                for stream in self.streams.stuck(at, now - T_STALL) {
                    self.lose_stream(now, stream);
                }
                self.hear(now);
            }
        }
    }

    /// Senders that need not wait any more go on.
    pub(super) fn wake_stalled(&mut self) {
        for i in 0..self.stalled.len() {
            let at = self.stalled[i].0;
            if !self.kept.is_full(at, true) {
                self.wake_device(at);
            }
        }
    }
}
