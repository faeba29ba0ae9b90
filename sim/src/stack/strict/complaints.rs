//! Faults of the other side.

use std::collections::BTreeMap;

use super::super::{Complaint, ConnId};

/// Causes that start with this may also be the work of a network that loses, reorders, repeats or
/// corrupts, or of a stranger; all others need a peer, or a host between, that is wrong.
pub const MAYBE_NETWORK: &str = "perhaps the network: ";

/// A cause that starts with [`MAYBE_NETWORK`].
macro_rules! maybe_network {
    ($cause:literal) => {
        concat!("perhaps the network: ", $cause)
    };
}
pub(super) use maybe_network;

/// Connections, causes and how often.
#[derive(Debug, Default)]
pub(super) struct Complaints(BTreeMap<(ConnId, &'static str), u64>);

impl Complaints {
    pub(super) fn note(&mut self, conn: ConnId, cause: &'static str) {
        *self.0.entry((conn, cause)).or_default() += 1;
    }

    /// All of them, by connection and name.
    pub(super) fn list(&self) -> Vec<Complaint> {
        self.0.iter().map(|(&(conn, cause), &count)| Complaint { conn, cause, count }).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_be_the_network_says_so() {
        assert!(maybe_network!("x").starts_with(MAYBE_NETWORK));
    }
}
