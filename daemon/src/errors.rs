//! Why the daemon could not start, for all parts that start something.

use std::fmt;

/// Why the daemon could not start, or stopped. The text says what to do.
#[derive(Clone, Debug)]
pub struct StartError(pub(crate) String);

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for StartError {}

/// Of `what`, and how to mend it.
pub(crate) fn error(what: impl fmt::Display, fix: &str) -> StartError {
    StartError(format!("{what}\n    fix: {fix}"))
}
