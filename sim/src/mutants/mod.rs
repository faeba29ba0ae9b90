//! The checks that check the tests: a crate, broken in one way after the other.
//!
//! cargo-mutants lists the ways ([`chance`]). [`build`] makes a copy of the crate that contains a
//! sample of them at once, behind a switch that selects one; [`judge`] runs the tests, and for
//! `core` the simulator's seeds, with one after the other; [`survey`] keeps a record of what
//! noticed each. The sources know nothing of this.

pub mod build;
pub mod chance;
pub mod judge;
pub mod source;
pub mod survey;
