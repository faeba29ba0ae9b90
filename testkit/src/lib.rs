//! `nightporter-testkit`: shared code of tests and the simulator.
//!
//! [`segment`] is the text form of a segment, [`device`] a device of smoltcp. Frames are built by
//! `nightporter_check::wire::Segment`, and filled by `nightporter_check::stream`.
#![forbid(unsafe_code)]

pub mod device;
pub mod segment;
