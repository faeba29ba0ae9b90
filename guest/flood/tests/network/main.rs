//! The tool in a network namespace of its own, with a host that the test plays. Needs root.

mod flooding;
mod np_flood;
mod watching;
mod world;
