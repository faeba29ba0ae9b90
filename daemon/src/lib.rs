//! The daemon's parts, as a library for its binary and the tests.
//!
//! Read `worker` first: it is the event loop. `desk` is all work that is not about frames. `unsafe`
//! is only in `sys`, and with UCX also in `toe::ucx::ucp`.
#![deny(unsafe_code)]

pub mod arena_file;
pub mod arguments;
mod aside;
mod booster;
pub mod broker;
pub mod change;
mod charges;
pub mod closer;
pub mod config;
mod daemon_user;
pub mod desk;
mod faults;
mod host_check;
pub mod log;
mod opener;
mod owners;
mod pace;
pub mod port;
mod resting;
pub mod sandbox;
mod sleeps;
pub mod spans;
mod start;
mod supervisor;
#[allow(unsafe_code)]
mod sys;
mod timer;
pub mod toe;
mod token;
pub mod vhost;
mod watchdog;
pub mod worker;

pub use daemon_user::Judge;
pub use host_check::{Findings, check_host};
pub use start::{StartError, block_signals, run};
