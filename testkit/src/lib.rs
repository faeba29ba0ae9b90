//! `nightporter-testkit`: what tests share, and the simulator with them.
//!
//! [`segment`] is the text form of a segment, [`device`] what smoltcp sends and receives by. Frames
//! are built by `nightporter_check::wire::Segment`, and filled by `nightporter_check::stream`.
#![forbid(unsafe_code)]

pub mod device;
pub mod segment;
