//! Which event met a flow in which state: a counted table of states and events.

use std::fmt::Write as _;

use nightporter_core::tcp::flow::State;

use crate::event::Event;
use crate::history::{History, Side};
use crate::wire::{Tcp, TcpFlags};

/// Columns: no entry, then [`State::ALL`].
const STATES: usize = 1 + State::ALL.len();

/// Rows, in the order of [`Happening`].
const NAMES: [&str; HAPPENINGS] = [
    "R: SYN",
    "R: SYN-ACK",
    "R: RST",
    "R: FIN",
    "R: data, next",
    "R: data, ahead",
    "R: data, old",
    "R: pure ACK",
    "R: probe or keepalive",
    "R: broken or forged",
    "G: SYN",
    "G: SYN-ACK",
    "G: RST",
    "G: FIN",
    "G: data, next",
    "G: data, ahead",
    "G: data, old",
    "G: pure ACK",
    "G: probe or keepalive",
    "G: broken or forged",
    "guest paused",
    "guest runs again",
    "guest rebooted",
    "guest destroyed",
    "guest migrated",
    "driver reset",
    "drain",
    "offload off",
    "offload on",
    "daemon died",
];
const HAPPENINGS: usize = 30;
/// Where G's rows begin, and those of the host and the machines.
const FROM_GUEST: usize = 10;
const OTHERS: usize = 20;

/// An event that meets a flow; a row of the table.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Happening(usize);

impl Happening {
    /// A segment of `from`, judged by the earlier segments of that end.
    pub(crate) fn segment(h: &History, from: Side, tcp: &Tcp) -> Self {
        let end = h.end(from).end;
        let seq = h.unwrap(from, tcp.seq, end);
        let len = u64::from(tcp.payload_len);
        let probe = h.is_open() && len <= 1 && seq + 1 == h.end(from.other()).acked.min(end);
        let row = match () {
            () if tcp.flags.contains(TcpFlags::SYN.union(TcpFlags::ACK)) => 1,
            () if tcp.flags.syn() => 0,
            () if tcp.flags.rst() => 2,
            () if tcp.flags.fin() => 3,
            () if probe => 8,
            () if len == 0 => 7,
            () if seq == end => 4,
            () if seq > end => 5,
            () => 6,
        };
        Self(row + if from == Side::G { FROM_GUEST } else { 0 })
    }

    /// A segment that counts for nothing.
    pub(crate) fn broken(from: Side) -> Self {
        Self(9 + if from == Side::G { FROM_GUEST } else { 0 })
    }

    /// An event that is not a frame. `None` if it concerns no flow in particular.
    pub(crate) fn event(event: Event) -> Option<Self> {
        let row = match event {
            Event::Paused { .. } => 0,
            Event::Resumed(_) => 1,
            Event::Rebooted(_) => 2,
            Event::Destroyed(_) => 3,
            Event::Migrated(_) => 4,
            Event::DriverReset(_) => 5,
            Event::Draining(_) => 6,
            Event::Offload(_, false) => 7,
            Event::Offload(_, true) => 8,
            Event::Crashed => 9,
            // A daemon that is back knows of no flow; one that was killed meets an RST.
            // And a VMM that hangs up has just reset its driver.
            Event::Restarted { .. }
            | Event::Killed(..)
            | Event::Awaited(_)
            | Event::DriverBack(_)
            | Event::Healed => return None,
        };
        Some(Self(OTHERS + row))
    }
}

/// How often each event met a flow in each state.
#[derive(Clone, Debug, Default, Eq, PartialEq, serde::Deserialize, serde::Serialize)]
pub struct Reach([[u64; STATES]; HAPPENINGS]);

impl Reach {
    /// It happened once more.
    pub(crate) fn note(&mut self, state: Option<State>, what: Happening) {
        let column = state.map_or(0, |s| 1 + State::ALL.iter().take_while(|t| **t != s).count());
        self.0[what.0][column] += 1;
    }

    /// The sum of two.
    pub fn merge(&mut self, other: &Self) {
        for (row, more) in self.0.iter_mut().flatten().zip(other.0.iter().flatten()) {
            *row += more;
        }
    }

    /// The table as Markdown, and below it the events that never happened.
    #[must_use]
    pub fn table(&self) -> String {
        let states = || std::iter::once("no entry").chain(State::ALL.iter().map(|s| s.label()));
        let mut text = format!("| event | {} |\n", states().collect::<Vec<_>>().join(" | "));
        text += &format!("|---|{}\n", "---|".repeat(STATES));
        let mut never = Vec::new();
        for (name, row) in NAMES.iter().zip(&self.0) {
            let _ = write!(text, "| {name} |");
            for (state, times) in states().zip(row) {
                let _ = write!(text, " {times} |");
                if *times == 0 {
                    never.push(format!("{name} in {state}"));
                }
            }
            text.push('\n');
        }
        let never = if never.is_empty() { "nothing".to_owned() } else { never.join("; ") };
        text + "\nnever: " + &never + "\n"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_never_happened_is_listed_and_what_did_is_not() {
        let mut reach = Reach::default();
        let paused = Happening::event(Event::Paused { guest: 0, unseen: true }).expect("a row");
        reach.note(Some(State::On), paused);
        reach.note(None, paused);
        let mut twice = reach.clone();
        twice.merge(&reach);
        let text = twice.table();
        assert!(text.contains("| guest paused | 2 | 0 | 0 | 2 | 0 | 0 | 0 | 0 |"), "{text}");
        assert!(text.contains("guest paused in pass") && !text.contains("guest paused in on"));
        assert_eq!(Happening::event(Event::Healed), None);
    }
}
