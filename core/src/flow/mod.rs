//! Finding a flow and knowing when it wants attention: key, table, SYN records, timers.

mod index;
pub mod key;
pub mod syn_cache;
pub mod table;
pub mod timer;
