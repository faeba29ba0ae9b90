//! `net.ipv4.tcp_slow_start_after_idle`: whether connections give up their window while idle. One
//! setting for all connections of the network namespace, IPv6 too.

use std::fs;

use anyhow::{Context, Result};

const PATH: &str = "/proc/sys/net/ipv4/tcp_slow_start_after_idle";

/// What it is now.
///
/// # Errors
/// It cannot be read.
pub fn read() -> Result<String> {
    Ok(fs::read_to_string(PATH).context(PATH)?.trim().to_owned())
}

/// Sets it.
///
/// # Errors
/// It cannot be written: not root, or a container with a read-only `/proc/sys`.
pub fn write(value: &str) -> Result<()> {
    fs::write(PATH, value).context(PATH)
}

/// The same comparison as [`crate::plan`], for this setting: what to write, if anything, and what
/// it was before if it is ours then.
#[must_use]
pub fn plan(now: &str, before: Option<&str>, wanted: bool) -> (Option<String>, Option<String>) {
    match (wanted, before) {
        (true, _) if now == "0" => (None, before.map(str::to_owned)),
        (true, _) => (Some("0".to_owned()), Some(now.to_owned())),
        (false, Some(before)) if now == "0" => (Some(before.to_owned()), None),
        (false, _) => (None, None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(value: &str) -> Option<String> {
        Some(value.to_owned())
    }

    #[test]
    fn it_is_set_once_and_given_back() {
        assert_eq!(plan("1", None, true), (set("0"), set("1")));
        assert_eq!(plan("0", Some("1"), true), (None, set("1")));
        assert_eq!(plan("0", Some("1"), false), (set("1"), None));
        assert_eq!(plan("1", None, false), (None, None));
    }

    #[test]
    fn what_an_operator_set_stays() {
        assert_eq!(plan("0", None, true), (None, None)); // it was 0 without us
        assert_eq!(plan("0", None, false), (None, None));
        assert_eq!(plan("1", Some("1"), false), (None, None)); // it was set back already
    }
}
