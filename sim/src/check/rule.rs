//! What can be wrong: the invariants of the specification, and the rules about time and quality.

use core::fmt;

use super::FlowName;

/// An invariant or a rule, by its number: 1 to 25 are INV-01 to INV-25.
pub const PROMPT: u8 = 31;
/// See [`PROMPT`]; `field_by_field`.
pub const FIELDS: u8 = 32;
/// See [`PROMPT`]; `recovery`.
pub const RECOVERY: u8 = 33;
/// See [`PROMPT`]; `economy`.
pub const ECONOMY: u8 = 34;
/// See [`PROMPT`]; `echoes`.
pub const ECHO: u8 = 35;
/// See [`PROMPT`]; `duplicates`.
pub const DUPLICATES: u8 = 36;
/// See [`PROMPT`]; `windows`.
pub const WINDOW: u8 = 37;
/// See [`PROMPT`]; `odd_acks`.
pub const ODD_ACKS: u8 = 38;
/// See [`PROMPT`]; `turns`.
pub const TURNS: u8 = 39;
/// See [`PROMPT`]; `news`.
pub const NEWS: u8 = 40;

/// Names of the rules that are not invariants of the specification.
const NAMES: &[(u8, &str)] = &[
    (PROMPT, "PROMPT-ACK"),
    (FIELDS, "FIELDS"),
    (RECOVERY, "RECOVERY"),
    (ECONOMY, "ECONOMY"),
    (ECHO, "ECHO"),
    (DUPLICATES, "DUPLICATES"),
    (WINDOW, "WINDOW"),
    (ODD_ACKS, "ODD-ACKS"),
    (TURNS, "TURNS"),
    (NEWS, "NEWS"),
];

/// What a number is called.
#[must_use]
pub fn name(rule: u8) -> String {
    let known = NAMES.iter().find(|(number, _)| *number == rule);
    known.map_or_else(|| format!("INV-{rule:02}"), |(_, name)| (*name).to_owned())
}

/// An invariant or a rule that does not hold.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Violation {
    /// Its number; see [`name`].
    pub invariant: u8,
    /// What was seen, in one line.
    pub what: String,
    /// The flow it concerns, if it concerns one.
    pub flow: Option<FlowName>,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", name(self.invariant), self.what)
    }
}
