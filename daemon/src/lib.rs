//! The daemon's parts, as a library for its binary and the tests.
//!
//! Read `worker` first: it is the event loop. `control` is a thread of its own for work that is not
//! about frames.
//! ARCHITECTURE.md lists the rooms, from top to bottom: none uses one above it. `unsafe` is only in
//! `sys`, and with UCX also in `sockets::ucx::ucp`.
#![deny(unsafe_code)]

pub mod arena_file;
pub mod arguments;
mod booster;
pub mod broker;
pub mod change;
mod charges;
pub mod closer;
pub mod config;
pub mod control;
mod daemon_user;
mod errors;
mod faults;
mod host_check;
mod limits;
pub mod log;
mod owners;
mod pace;
mod polling;
pub mod port;
mod random;
mod refused;
mod resting;
pub mod sandbox;
mod settle;
mod sleeps;
pub mod sockets;
pub mod spans;
mod spare;
mod start;
mod supervisor;
#[allow(unsafe_code)]
mod sys;
mod tap_address;
mod timer;
mod token;
pub mod vhost;
mod watchdog;
mod watched;
pub mod worker;

pub use daemon_user::Judge;
pub use errors::StartError;
pub use host_check::{Findings, check_host};
pub use settle::{settle, settling};
pub use start::{block_signals, run};
pub use supervisor::find_stored;
pub use vhost::locker::let_go;
