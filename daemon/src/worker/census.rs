//! The number of the VMs' connections in each state, counted in parts between turns, because
//! counting a million takes as long as a hundred turns.

use nightporter_core::engine::Engine;
use nightporter_core::port::PortId;
use nightporter_core::time::{Duration, Instant};

use super::status::{STATES, held_bytes, state_of};

/// Places for connections that are looked at in one go, some 50 us. With no more of them a count is
/// done as soon as it is wanted.
const PLACES_PER_TURN: usize = 1024;

/// Sums over the connections of one port.
#[derive(Clone, Debug, Default)]
pub(super) struct FlowSums {
    pub(super) by_state: [u64; STATES.len()],
    pub(super) held_bytes: u64,
    /// The place of the connection that has owed for the longest.
    pub(super) stands: Option<(usize, Duration)>,
}

/// One place for a connection, if there is one in it.
#[derive(Clone, Copy, Debug)]
struct Found {
    port: usize,
    state: usize,
    held_bytes: u64,
    /// For how long its guest has acknowledged nothing of what it owes.
    owes_for: Option<Duration>,
}

/// See the module doc. A count that has begun goes on with every [`Self::go_on`] until it is done.
#[derive(Debug, Default)]
pub(super) struct Census {
    sums: Vec<FlowSums>,
    /// The next place, while a count goes on.
    at: Option<usize>,
}

impl Census {
    /// The last count, or the count so far.
    pub(super) fn of(&self, port: PortId) -> FlowSums {
        self.sums.get(usize::from(port.0)).cloned().unwrap_or_default()
    }

    /// The port has gone, and another may get its number before the count is done.
    pub(super) fn forget(&mut self, port: PortId) {
        if let Some(sums) = self.sums.get_mut(usize::from(port.0)) {
            *sums = FlowSums::default();
        }
    }

    /// Begins to count, if no count goes on; clients that want one together get the same.
    pub(super) fn begin(&mut self) {
        if self.at.is_none() {
            self.sums.clear();
            self.at = Some(0);
        }
    }

    /// Counts some more. `true`: it is done. It is not done while a VM is being drained in steps: a
    /// client that asks whether anything is still owed would be told no before all its flows know
    /// of the drain.
    pub(super) fn go_on(&mut self, now: Instant, engine: &Engine<'_>) -> bool {
        self.count(engine.flow_places(), engine.is_draining(), |place| {
            let (_, key, flow) = engine.flow(place)?;
            let debt = engine.vm(PortId(key.port)).and_then(|vm| flow.debt(now, vm));
            Some(Found {
                port: usize::from(key.port),
                state: state_of(flow),
                held_bytes: held_bytes(flow),
                owes_for: debt.map(|debt| debt.age),
            })
        })
    }

    fn count(&mut self, places: usize, waits: bool, look: impl Fn(usize) -> Option<Found>) -> bool {
        let Some(from) = self.at else { return false };
        let to = places.min(from + PLACES_PER_TURN);
        for (place, found) in (from..to).filter_map(|place| Some((place, look(place)?))) {
            if self.sums.len() <= found.port {
                self.sums.resize_with(found.port + 1, FlowSums::default);
            }
            let sum = &mut self.sums[found.port];
            sum.by_state[found.state] += 1;
            sum.held_bytes += found.held_bytes;
            if let Some(time) = found.owes_for
                && sum.stands.is_none_or(|(_, longest)| time > longest)
            {
                sum.stands = Some((place, time));
            }
        }
        self.at = (to < places || waits).then_some(to);
        self.at.is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OF_FIVE: Found = Found { port: 5, state: 1, held_bytes: 10, owes_for: None };

    #[test]
    fn a_count_takes_as_many_turns_as_there_are_thousands() {
        let mut census = Census::default();
        // Every third place is free; the rest are of two ports by turns.
        let look = |place| (place % 3 > 0).then_some(Found { port: place % 2, ..OF_FIVE });
        assert!(!census.count(5000, false, look), "nobody wants it");
        for _ in 0..2 {
            census.begin();
            let mut turns = 1;
            while !census.count(5000, false, look) {
                census.begin(); // it goes on
                turns += 1;
            }
            assert_eq!(turns, 5);
            let [a, b] = [0, 1].map(|port| census.of(PortId(port)));
            assert_eq!(a.by_state[1] + b.by_state[1], 3333);
            assert_eq!(a.held_bytes, 10 * a.by_state[1]);
            assert_eq!(census.of(PortId(9)).by_state[1], 0);
        }
    }

    #[test]
    fn who_gets_the_number_of_a_port_that_went_does_not_get_its_connections() {
        let mut census = Census::default();
        let look = |_| Some(OF_FIVE);
        census.begin();
        assert!(!census.count(PLACES_PER_TURN + 3, false, look));
        census.forget(PortId(5));
        census.forget(PortId(6)); // of which there were none
        assert!(census.count(PLACES_PER_TURN + 3, false, look));
        assert_eq!(census.of(PortId(5)).held_bytes, 30, "what was found behind the change");
    }

    #[test]
    fn life_12_the_connection_that_has_owed_for_the_longest_is_known() {
        let mut census = Census::default();
        let ages =
            [None, Some(3), None, Some(7), Some(7), Some(2)].map(|s| s.map(Duration::from_secs));
        census.begin();
        assert!(census.count(6, false, |place| Some(Found { owes_for: ages[place], ..OF_FIVE })));
        assert_eq!(census.of(PortId(5)).stands, Some((3, Duration::from_secs(7))));
    }

    #[test]
    fn with_few_places_it_is_done_at_once() {
        let mut census = Census::default();
        census.begin();
        assert!(census.count(0, false, |_| None));
        census.begin();
        assert!(census.count(PLACES_PER_TURN, false, |_| None));
    }

    #[test]
    fn a_count_is_not_done_before_all_flows_know_that_they_are_drained() {
        let mut census = Census::default();
        census.begin();
        let look = |_| Some(Found { port: 0, ..OF_FIVE });
        for _ in 0..3 {
            assert!(!census.count(100, true, look));
        }
        assert!(census.count(100, false, look));
        assert_eq!(census.of(PortId(0)).by_state[1], 100, "each once");
    }
}
