//! Finding a flow, and the times at which it needs attention: key, table, SYN records, timers.

mod index;
pub mod key;
pub mod syn_cache;
pub mod table;
pub mod timer;
