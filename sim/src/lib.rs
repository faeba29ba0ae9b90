//! `nightporter-sim`: a world in virtual time around the same `core` the daemon runs.
//!
//! One seed decides everything ([`plan`]); the same seed gives the same trace, bit for bit, on
//! every machine. In a run there are no threads and no clock; chance comes from [`random`] only.
#![forbid(unsafe_code)]

pub mod captures;
pub mod figures;
pub mod link;
pub mod long;
pub mod map;
pub mod mutants;
pub mod observer;
pub mod plan;
pub mod random;
pub mod report;
pub mod run;
pub mod sched;
pub mod shrink;
pub mod stack;
pub mod swarm;
pub mod world;
