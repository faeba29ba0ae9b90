//! Names of connections (VTOE-13).
//!
//! There is no TIME_WAIT: a port may be used again at once. A late message of an earlier connection
//! does not reach a later one, because no two connections ever have the same name.

/// A side of a connection.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Side {
    /// Its guest called connect().
    Opener,
    /// Its guest listened.
    Acceptor,
}

impl Side {
    /// The other side.
    #[must_use]
    pub const fn other(self) -> Self {
        match self {
            Self::Opener => Self::Acceptor,
            Self::Acceptor => Self::Opener,
        }
    }
}

/// A host of the fabric, this one as well, by a number of the caller's choice.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct HostId(pub u32);

/// The name of a shadow connection, given by the host of its opener; both ends have the same.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct ShadowId {
    /// A random number that the daemon drew when it started: other daemons, and the same one before
    /// and after, have another.
    pub incarnation: u64,
    /// Counts the connections that this daemon opened.
    pub serial: u64,
}

/// Gives names. At a million connections a second they last for half a million years.
#[derive(Debug)]
pub struct ShadowIds {
    incarnation: u64,
    next: u64,
}

impl ShadowIds {
    /// Names of a daemon that has drawn this number.
    #[must_use]
    pub const fn new(incarnation: u64) -> Self {
        Self { incarnation, next: 0 }
    }

    /// A new name.
    #[must_use]
    pub fn name(&mut self) -> ShadowId {
        let serial = self.next;
        self.next = serial.checked_add(1).expect("2^64 connections take longer than this host");
        ShadowId { incarnation: self.incarnation, serial }
    }
}
