//! Settings that apply to all connections of the network namespace, IPv6 too.

use std::fs;
use std::io::ErrorKind;

use anyhow::{Context, Result};

/// A file of `/proc/sys`, and its value while connections flood.
#[derive(Debug)]
pub struct Setting {
    path: &'static str,
    ours: &'static str,
}

/// Whether connections give up their window while idle.
pub const SLOW_START: Setting =
    Setting { path: "/proc/sys/net/ipv4/tcp_slow_start_after_idle", ours: "0" };

/// The shortest pieces, in segments of the wire, into which the kernel cuts data to keep a pace;
/// two of them may wait for the NIC. The pace of a flood follows from the guest's own absence, or
/// from the ten segments before its first answer: pieces of two (`tcp_tso_autosize()`,
/// `tcp_small_queue_check()`; Linux 6.1). 44 are the 64 KB that a NIC takes at once.
pub const PIECES: Setting = Setting { path: "/proc/sys/net/ipv4/tcp_min_tso_segs", ours: "44" };

/// Both.
pub const ALL: [&Setting; 2] = [&SLOW_START, &PIECES];

impl Setting {
    /// The present value; `None` where the kernel has no such setting, as old ones have none for a
    /// container.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn read(&self) -> Result<Option<String>> {
        match fs::read_to_string(self.path) {
            Ok(text) => Ok(Some(text.trim().to_owned())),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).context(self.path),
        }
    }

    /// Sets it.
    ///
    /// # Errors
    /// It cannot be written: not root, or a container with a read-only `/proc/sys`.
    pub fn write(&self, value: &str) -> Result<()> {
        fs::write(self.path, value).context(self.path)
    }

    /// Whether it has our value.
    #[must_use]
    pub fn is_ours(&self, now: &str) -> bool {
        now == self.ours
    }

    /// The same comparison as [`crate::plan`]: the value to write, if any, and the earlier value if
    /// it is ours then.
    #[must_use]
    pub fn plan(
        &self,
        now: Option<&str>,
        before: Option<&str>,
        wanted: bool,
    ) -> (Option<String>, Option<String>) {
        let Some(now) = now else { return (None, None) };
        match (wanted, before) {
            (true, _) if now == self.ours => (None, before.map(str::to_owned)),
            (true, _) => (Some(self.ours.to_owned()), Some(now.to_owned())),
            (false, Some(before)) if now == self.ours => (Some(before.to_owned()), None),
            (false, _) => (None, None),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(value: &str) -> Option<String> {
        Some(value.to_owned())
    }

    fn plan(now: &str, before: Option<&str>, wanted: bool) -> (Option<String>, Option<String>) {
        SLOW_START.plan(Some(now), before, wanted)
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

    #[test]
    fn a_setting_that_the_kernel_has_not_is_left_alone() {
        assert_eq!(PIECES.plan(None, None, true), (None, None));
        assert_eq!(PIECES.plan(Some("2"), None, true), (set("44"), set("2")));
    }
}
