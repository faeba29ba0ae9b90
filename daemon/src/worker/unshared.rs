//! Guests whose driver runs, while the daemon sees no receive buffer of theirs. The interface of
//! such a guest is down, or its memory is not shared: then the daemon reads pages of the file that
//! the guest, which writes to pages of its own, left as they were. Neither is an error that anybody
//! reports.

use nightporter_core::port::PortId;
use nightporter_core::time::{Duration, Instant};

/// How long a driver that runs may take to post its first buffers.
const PATIENCE: Duration = Duration::from_secs(5);

/// See the module doc.
#[derive(Debug, Default)]
pub(super) struct Unshared {
    /// Guests without a buffer so far: since when, and whether that was said.
    list: Vec<(PortId, Instant, bool)>,
    /// When to [`Self::look`]. Each turn asks, so it is not looked for in the list each time.
    due: Option<Instant>,
}

impl Unshared {
    /// The driver of this guest runs from now on, or runs no longer.
    pub(super) fn on_link(&mut self, now: Instant, port: PortId, is_up: bool) {
        self.list.retain(|(known, ..)| *known != port);
        if is_up {
            self.list.push((port, now, false));
        }
        self.find_due();
    }

    /// When to [`Self::look`].
    pub(super) const fn poll_timeout(&self) -> Option<Instant> {
        self.due
    }

    fn find_due(&mut self) {
        let waiting = self.list.iter().filter(|(.., said)| !said);
        self.due = waiting.map(|(_, since, _)| *since + PATIENCE).min();
    }

    /// The guests that have posted nothing for too long, each once.
    pub(super) fn look(
        &mut self,
        now: Instant,
        has_buffers: impl Fn(PortId) -> bool,
    ) -> Vec<PortId> {
        if self.due.is_none_or(|at| at > now) {
            return Vec::new(); // nearly always
        }
        self.list.retain(|(port, ..)| !has_buffers(*port));
        let late = self.list.iter_mut().filter(|(_, at, said)| !said && now.since(*at) >= PATIENCE);
        let named = late.map(|(port, _, said)| {
            *said = true;
            *port
        });
        let named = named.collect();
        self.find_due();
        named
    }

    /// It was one of them, when it was last looked at.
    pub(super) fn has(&self, port: PortId) -> bool {
        self.list.iter().any(|(known, _, said)| *known == port && *said)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_without_a_buffer_is_named_once_and_forgotten_when_it_has_one() {
        let at = Instant::from_secs;
        let (web1, web2) = (PortId(1), PortId(2));
        let mut unshared = Unshared::default();
        unshared.on_link(at(10), web1, true);
        unshared.on_link(at(11), web2, true);
        assert_eq!(unshared.poll_timeout(), Some(at(15)));
        assert_eq!(unshared.look(at(14), |_| false), []);
        assert_eq!(unshared.look(at(15), |_| false), [web1]);
        assert!(unshared.has(web1) && !unshared.has(web2));
        assert_eq!(unshared.poll_timeout(), Some(at(16)));
        assert_eq!(unshared.look(at(16), |port| port == web2), []);
        assert_eq!(unshared.poll_timeout(), None);
        assert!(unshared.has(web1) && !unshared.has(web2));
        unshared.on_link(at(20), web1, false);
        assert!(!unshared.has(web1));
        unshared.on_link(at(30), web1, true);
        assert_eq!(unshared.look(at(35), |_| false), [web1], "another driver");
    }
}
