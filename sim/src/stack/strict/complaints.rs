//! What the other side did that it should not have done.

use std::collections::BTreeMap;

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

/// Causes and how often.
#[derive(Debug, Default)]
pub(super) struct Complaints(BTreeMap<&'static str, u64>);

impl Complaints {
    pub(super) fn note(&mut self, cause: &'static str) {
        *self.0.entry(cause).or_default() += 1;
    }

    /// All of them, by name.
    pub(super) fn list(&self) -> Vec<(&'static str, u64)> {
        self.0.iter().map(|(&cause, &count)| (cause, count)).collect()
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
