//! Where promised bytes live: one arena of pages that survives the process (LIFE-09).

pub mod arena;
pub mod flow_store;
pub mod ranges;
pub mod record;
