//! The plan of a guest that forwards.

use serde::{Deserialize, Serialize};

use super::LinkPlan;

/// The way from a guest that forwards to the machine behind it, which runs by itself.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct ForwardPlan {
    /// From the guest to the machine.
    pub to_end: LinkPlan,
    /// And back.
    pub from_end: LinkPlan,
    /// The guest sets the TTL of what it forwards as if it were its own.
    pub hides_ttl: bool,
    /// The machine sleeps from the first of these milliseconds to the second.
    pub sleeps: Option<(u64, u64)>,
}
