//! What a worker does between the engine and its ports.

pub mod adapt;
pub mod backlog;
