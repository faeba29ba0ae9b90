//! The vhost-user back-end against a front-end and a driver of our own, over a real socket and a
//! real memfd.
//!
//! Everything runs in one thread, step by step: the front-end sends, the port handles. Nothing
//! waits, so nothing can time out, but in `foreign`, whose front-end is the `vhost` crate's.
//! `driver` is an independent split-ring driver; it shares no code with the rings under test.

mod data;
mod dirty;
#[allow(dead_code)] // shared with other tests, which use more of it
mod driver;
mod foreign;
mod fuzz;
mod inflight;
mod malicious;
mod packets;
mod session;
mod socket;
#[allow(dead_code)]
mod world;
