//! The daemon's parts, as a library for its binary, the CLI and the tests.
//!
//! `unsafe` lives in `sys`, in `port::tap`'s ioctls and in `vhost`; nowhere else.

pub mod port;
pub mod vhost;
