//! `nightporter-check`: the course of a connection, from frames alone, and the rules that judge it.
//!
//! It is one oracle for all observers of a host: the simulator, the tests on real guests, the tests
//! of the core, fuzzing. [`wire`] reads frames, and shares no code with the core; [`history`]
//! records one flow; [`rule`] has the names of the rules, each a file in `rules`. There are two
//! entries: [`observer`] watches a host at work, with its engine, and [`trace`] two captures of
//! one.
#![forbid(unsafe_code)]

mod answered;
mod end;
pub mod event;
pub mod frame;
mod guest_clock;
pub mod history;
pub mod observer;
mod out;
mod ranges;
pub mod reach;
pub mod rule;
mod rules;
pub mod stream;
pub mod tap;
pub mod trace;
pub mod weight;
pub mod wire;

pub use rules::checksums::on_out as checksums;
