//! Statuses and replies as their readers get them.

use std::collections::BTreeSet;
use std::sync::Arc;

use nightporter_api::{Reply, Status};

use super::metrics::scrape;

/// The same text for all clients that have asked.
#[derive(Debug, Default)]
pub(crate) struct Texts {
    /// A line of the control protocol.
    pub(crate) for_operators: Option<Arc<Vec<u8>>>,
    /// An answer to a scrape.
    pub(super) for_scrapes: Option<Arc<Vec<u8>>>,
}

/// The texts that are wanted.
pub(crate) fn format(mut status: Status, for_operators: bool, for_scrapes: bool) -> Texts {
    // One that was removed and added meanwhile was seen twice.
    let mut names = BTreeSet::new();
    status.ports.retain(|port| names.insert(port.name.clone()));
    let for_scrapes = for_scrapes.then(|| Arc::new(scrape(&status)));
    let for_operators = for_operators.then(|| Arc::new(line(&Reply::Status(status))));
    Texts { for_operators, for_scrapes }
}

/// A reply as the control protocol has it.
pub(crate) fn line(reply: &Reply) -> Vec<u8> {
    let mut line = serde_json::to_vec(reply).expect("replies are plain data");
    line.push(b'\n');
    line
}
