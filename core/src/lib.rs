//! `nightporter-core`: everything about Nightporter that is deterministic.
//!
//! No I/O, no clock, no threads, no unsafe. Time is an argument, memory is handed in, and every
//! effect is a value the caller polls for. The same code runs in the daemon, in the simulator and
//! in the tests.
//!
//! Read [`engine`] first: it is the front door and states the drain order.
#![forbid(unsafe_code)]

pub mod bucket;
pub mod congestion;
pub mod counters;
pub mod drops;
pub mod engine;
pub mod flow;
pub mod limits;
pub mod monitor;
pub mod overlay;
pub mod port;
pub mod store;
pub mod switch;
pub mod tcp;
pub mod time;
pub mod toe;
pub mod trace;
pub mod turn;
pub mod wire;

// The packet traces of `tests/`, for tests that also look inside.
#[cfg(test)]
extern crate self as nightporter_core;
#[cfg(test)]
#[allow(dead_code, unreachable_pub, unused_imports, reason = "these tests use a part of it")]
#[allow(clippy::cast_possible_truncation, reason = "tests take numbers apart")]
#[path = "../tests/common"]
mod common {
    #[path = "unwatched.rs"]
    pub mod monitor;
    pub mod outside;
    pub mod random;
    pub mod segment;
    pub mod setup;
    pub mod world;

    pub use self::{
        random::Random,
        segment::Seen,
        setup::Setup,
        world::{Peer, Side, World},
    };
}
