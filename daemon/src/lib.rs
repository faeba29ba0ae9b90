//! The daemon's parts, as a library for its binary and the tests.
//!
//! Read `worker` first: it is the event loop. `unsafe` lives in `sys`, nowhere else.
#![deny(unsafe_code)]

pub mod arena_file;
pub mod capture;
pub mod config;
mod conn;
pub mod control;
mod metrics;
pub mod port;
mod start;
#[allow(unsafe_code)]
mod sys;
pub mod vhost;
pub mod worker;

pub use start::{StartError, run};
