//! The workers: the threads that touch guest memory and whose turns are watched.
//!
//! The watchdog and the search for sleeps keep a place for each of them. A thread finds its own
//! place without an argument, because accesses to memory lie deep below the turn.

use std::cell::Cell;

/// A worker.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Watched {
    /// It moves frames.
    Frames,
    /// It has the socket devices and the streams to other hosts.
    Sockets,
}

impl Watched {
    /// Each of them, in the order of their places.
    pub(crate) const ALL: [Self; 2] = [Self::Frames, Self::Sockets];

    /// For log lines.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Frames => "frames",
            Self::Sockets => "sockets",
        }
    }

    /// The calling thread is this worker from now on.
    pub(crate) fn begin(self) {
        HERE.with(|here| here.set(self));
    }

    /// The worker that the calling thread is; the frames' worker, if it is none.
    #[inline]
    pub(crate) fn here() -> Self {
        HERE.with(Cell::get)
    }

    /// The value for the calling thread's worker.
    #[inline]
    pub(crate) fn own<T>(of_each: &[Apart<T>; Self::ALL.len()]) -> &T {
        &of_each[Self::here() as usize].0
    }

    /// The value for this worker.
    pub(crate) fn of<T>(self, of_each: &[Apart<T>; Self::ALL.len()]) -> &T {
        &of_each[self as usize].0
    }
}

/// A value of one worker, in a cache line of its own: the worker writes to it very often.
#[repr(align(128))]
#[derive(Debug)]
pub(crate) struct Apart<T>(pub(crate) T);

thread_local! {
    static HERE: Cell<Watched> = const { Cell::new(Watched::Frames) };
}
