//! The tool beside a host that the test plays, in a network namespace of its own. Needs root.

mod flooding;
mod np_flood;
mod world;
