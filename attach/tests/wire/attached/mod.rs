//! The frames of an attached tap.

mod absent;
mod coming;
mod frames;
mod same;
mod world;
