//! Time as an argument: `core` never reads a clock.
//!
//! An [`Instant`] is a count of nanoseconds on a monotonic clock that the caller owns
//! (CLOCK_MONOTONIC in the daemon, a counter in the simulator; LIFE-11). 2^64 ns is 584 years.

use core::fmt;
use core::ops::{Add, AddAssign, Sub};

/// A point on the caller's monotonic clock, in nanoseconds since an epoch of its choice.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Instant(u64);

impl Instant {
    /// The epoch.
    pub const ZERO: Self = Self(0);
    /// Later than every instant a caller can pass.
    pub const MAX: Self = Self(u64::MAX);

    /// The instant `ns` nanoseconds after the epoch.
    #[must_use]
    pub const fn from_nanos(ns: u64) -> Self {
        Self(ns)
    }

    /// The instant `us` microseconds after the epoch.
    #[must_use]
    pub const fn from_micros(us: u64) -> Self {
        Self(us.saturating_mul(1_000))
    }

    /// The instant `s` seconds after the epoch.
    #[must_use]
    pub const fn from_secs(s: u64) -> Self {
        Self(s.saturating_mul(1_000_000_000))
    }

    /// The instant `ms` milliseconds after the epoch.
    #[must_use]
    pub const fn from_millis(ms: u64) -> Self {
        Self(ms.saturating_mul(1_000_000))
    }

    /// Nanoseconds since the epoch.
    #[must_use]
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// Whole milliseconds since the epoch.
    #[must_use]
    pub const fn as_millis(self) -> u64 {
        self.0 / 1_000_000
    }

    /// Whole seconds since the epoch.
    #[must_use]
    pub const fn as_secs(self) -> u64 {
        self.0 / 1_000_000_000
    }

    /// The low bits of the second it is in; they repeat after 136 years.
    #[must_use]
    #[inline]
    pub(crate) fn second(self) -> u32 {
        (self.as_secs() & u64::from(u32::MAX)).try_into().unwrap_or(u32::MAX)
    }

    /// The low bits of the millisecond it is in.
    #[must_use]
    pub(crate) fn low_millis(self) -> u32 {
        (self.as_millis() & u64::from(u32::MAX)).try_into().unwrap_or(u32::MAX)
    }

    /// Nanoseconds in a tick.
    pub(crate) const TICK: u64 = 1 << 10;

    /// The low bits of its number of [`Self::TICK`]s; they repeat after 73 minutes.
    #[must_use]
    #[inline(always)]
    pub(crate) fn low_ticks(self) -> u32 {
        let [a, b, c, d, ..] = (self.0 / Self::TICK).to_le_bytes();
        u32::from_le_bytes([a, b, c, d])
    }

    /// Seconds.
    pub(crate) const EIGHT: u64 = 8;

    /// The low bits of its number of [`Self::EIGHT`]s; they repeat after six days.
    #[must_use]
    pub(crate) fn low_eights(self) -> u16 {
        (self.as_secs() / Self::EIGHT % (1 << 16)).try_into().unwrap_or(0)
    }

    /// Time from `earlier` to `self`; zero if `earlier` is later.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Duration {
        Duration(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for Instant {
    type Output = Self;
    fn add(self, rhs: Duration) -> Self {
        Self(self.0.saturating_add(rhs.0))
    }
}

impl Sub<Duration> for Instant {
    type Output = Self;
    fn sub(self, rhs: Duration) -> Self {
        Self(self.0.saturating_sub(rhs.0))
    }
}

impl fmt::Display for Instant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:06}s", self.0 / 1_000_000_000, self.0 / 1_000 % 1_000_000)
    }
}

/// A span of time in nanoseconds.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Duration(u64);

impl Duration {
    /// No time at all.
    pub const ZERO: Self = Self(0);

    /// `ns` nanoseconds.
    #[must_use]
    pub const fn from_nanos(ns: u64) -> Self {
        Self(ns)
    }

    /// `us` microseconds.
    #[must_use]
    pub const fn from_micros(us: u64) -> Self {
        Self(us.saturating_mul(1_000))
    }

    /// `ms` milliseconds.
    #[must_use]
    pub const fn from_millis(ms: u64) -> Self {
        Self(ms.saturating_mul(1_000_000))
    }

    /// `s` seconds.
    #[must_use]
    pub const fn from_secs(s: u64) -> Self {
        Self(s.saturating_mul(1_000_000_000))
    }

    /// The span in nanoseconds.
    #[must_use]
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// The span in whole milliseconds.
    #[must_use]
    pub const fn as_millis(self) -> u64 {
        self.0 / 1_000_000
    }

    /// `self * factor`, saturating.
    #[must_use]
    pub const fn saturating_mul(self, factor: u64) -> Self {
        Self(self.0.saturating_mul(factor))
    }
}

impl Add for Duration {
    type Output = Self;
    fn add(self, rhs: Self) -> Self {
        Self(self.0.saturating_add(rhs.0))
    }
}

impl AddAssign for Duration {
    fn add_assign(&mut self, rhs: Self) {
        *self = *self + rhs;
    }
}
