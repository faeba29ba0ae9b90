//! A world for packet traces: one engine between a remote R and a guest G, written as text.
//!
//! ```text
//! let (w, r, g) = Setup::new().established();
//! r.sends("1:1001 ack 1");            // R> into H
//! r.gets("1:1 ack 1001");             // >R out of H
//! g.gets("1:1001 ack 1");             // >G
//! g.sends("ack 1001");                // G>
//! r.gets_nothing();
//! ```
//!
//! Numbers are relative to the initial sequence numbers. [`monitor`] checks all frames of a step
//! against the invariants of the specification; a scenario only says what is special to it.
#![allow(dead_code, unreachable_pub, reason = "each test program uses its part of it")]
#![allow(clippy::cast_possible_truncation, reason = "tests take numbers apart")]

pub mod monitor;
pub mod outside;
pub mod random;
pub mod segment;
pub mod setup;
pub mod world;

#[allow(unused_imports, reason = "as above")]
pub use self::{
    random::Random,
    segment::Seen,
    setup::Setup,
    world::{Peer, Side, World},
};
#[allow(unused_imports, reason = "as above")]
pub use nightporter_testkit::segment::Spec;
