//! The states of an end, and all transitions between them.
//!
//! [`Standing`] alone changes a state, by [`after`]; a test compares the table of all transitions
//! with the one in `docs/virtual-toe.md`. [`super::end`] knows when a step is made.

use super::errno::Errno;

/// The state of an end. In brackets the similar state of TCP.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum State {
    /// The other host was asked to connect (SYN-SENT).
    Asking,
    /// The guest that listens was offered the connection (SYN-RECEIVED).
    Offered,
    /// Both streams are open (ESTABLISHED).
    Open,
    /// The guest has finished, the other one does not have all of it yet (FIN-WAIT-1).
    Finishing,
    /// The guest has finished, the other one has all of it (FIN-WAIT-2).
    Finished,
    /// The other one has finished, and the guest has all of it; it may go on (CLOSE-WAIT).
    Remaining,
    /// Both have finished, the other one does not have all of it yet (CLOSING, LAST-ACK).
    Closing,
    /// Both have finished and have everything. *Caveats*: an end is dropped only here and in
    /// `Failed`, so that an end that has not got everything finds the other one.
    Over,
    /// The connection has ended with an errno.
    Failed,
}

impl State {
    /// Every state.
    pub const ALL: [Self; 9] = [
        Self::Asking,
        Self::Offered,
        Self::Open,
        Self::Finishing,
        Self::Finished,
        Self::Remaining,
        Self::Closing,
        Self::Over,
        Self::Failed,
    ];

    /// Established, and neither over nor failed.
    #[must_use]
    pub const fn is_live(self) -> bool {
        matches!(
            self,
            Self::Open | Self::Finishing | Self::Finished | Self::Remaining | Self::Closing
        )
    }

    /// Whether the guest's stream is still open.
    #[must_use]
    pub const fn may_send(self) -> bool {
        matches!(self, Self::Open | Self::Remaining)
    }

    /// Whether the guest's stream has ended: a FIN was sent.
    #[must_use]
    pub const fn has_finished(self) -> bool {
        matches!(self, Self::Finishing | Self::Finished | Self::Closing | Self::Over)
    }

    /// Whether the other guest's stream is still open, or on its way.
    #[must_use]
    pub const fn may_receive(self) -> bool {
        matches!(self, Self::Open | Self::Finishing | Self::Finished)
    }
}

/// A transition of an end.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Transition {
    /// The guest that listens has accepted, or its host says so.
    Established,
    /// The guest finished its stream.
    Finish,
    /// The other stream has ended, and the guest has all of it.
    Ended,
    /// The other guest has all of this one's.
    Taken,
    /// The connection fails.
    Fail(Errno),
}

/// The state after a transition; `None`: it is not allowed there.
#[must_use]
pub const fn after(state: State, step: Transition) -> Option<State> {
    Some(match (state, step) {
        (State::Asking | State::Offered, Transition::Established) => State::Open,
        (State::Open, Transition::Finish) => State::Finishing,
        (State::Remaining, Transition::Finish) | (State::Finishing, Transition::Ended) => {
            State::Closing
        }
        (State::Open, Transition::Ended) => State::Remaining,
        (State::Finishing, Transition::Taken) => State::Finished,
        (State::Finished, Transition::Ended) | (State::Closing, Transition::Taken) => State::Over,
        (State::Over | State::Failed, Transition::Fail(_)) => return None,
        (_, Transition::Fail(_)) => State::Failed,
        _ => return None,
    })
}

/// An end's state, and its error.
#[derive(Debug)]
pub struct Standing {
    state: State,
    errno: Option<Errno>,
}

impl Standing {
    /// State of an opener, which begins with a request.
    #[must_use]
    pub const fn asking() -> Self {
        Self { state: State::Asking, errno: None }
    }

    /// State of an acceptor.
    #[must_use]
    pub const fn offered() -> Self {
        Self { state: State::Offered, errno: None }
    }

    /// The state.
    #[must_use]
    pub const fn state(&self) -> State {
        self.state
    }

    /// The error, if the connection failed.
    #[must_use]
    pub const fn errno(&self) -> Option<Errno> {
        self.errno
    }

    /// Makes a transition. `false`: it is not allowed here, and nothing has changed.
    #[must_use]
    pub fn go(&mut self, step: Transition) -> bool {
        let Some(next) = after(self.state, step) else { return false };
        self.state = next;
        if let Transition::Fail(errno) = step {
            self.errno = Some(errno);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The table as it is in the page.
    fn table() -> String {
        let steps = [
            Transition::Established,
            Transition::Finish,
            Transition::Ended,
            Transition::Taken,
            Transition::Fail(Errno::Reset),
        ];
        let mut lines = vec![format!("{:12}Established  Finish     Ended      Taken     Fail", "")];
        for state in State::ALL {
            let to = steps.map(|step| after(state, step).map_or("-".into(), |s| format!("{s:?}")));
            let [a, b, c, d, e] = to;
            let name = format!("{state:?}");
            lines.push(format!("{name:12}{a:13}{b:11}{c:11}{d:10}{e}"));
        }
        lines.iter().map(|line| line.trim_end().to_owned() + "\n").collect()
    }

    #[test]
    fn the_table_of_all_transitions_is_that_of_the_page() {
        let page = include_str!("../../../docs/virtual-toe.md");
        let table = table();
        assert!(page.contains(&format!("```text\n{table}```")), "not in the page:\n{table}");
    }

    #[test]
    fn every_state_is_reached_and_all_but_the_last_two_can_be_left() {
        for state in State::ALL {
            let steps =
                [Transition::Established, Transition::Finish, Transition::Ended, Transition::Taken];
            let from = |to| State::ALL.iter().any(|s| steps.iter().any(|e| after(*s, *e) == to));
            let begins = matches!(state, State::Asking | State::Offered | State::Failed);
            assert!(begins || from(Some(state)), "{state:?} is not reached");
            let last = matches!(state, State::Over | State::Failed);
            let leaves = after(state, Transition::Fail(Errno::Reset)).is_some();
            assert_eq!(leaves, !last, "{state:?}");
        }
    }
}
