//! The daemon's parts, as a library for its binary, the CLI and the tests.
//!
//! Read `worker` first: it is the event loop. `unsafe` lives in `sys` and in `vhost`, nowhere
//! else.

pub mod arena_file;
pub mod capture;
pub mod config;
mod conn;
pub mod control;
mod metrics;
pub mod port;
mod start;
pub mod stats;
mod sys;
pub mod vhost;
mod worker;

pub use start::{StartError, run};
