//! How a connection fails, as an application hears of it (VTOE-06).

/// An errno of Linux, of those that a TOE connection can end with.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Errno {
    /// EACCES: policy forbids the destination.
    Access,
    /// EADDRINUSE: the port has another listener.
    AddressInUse,
    /// EADDRNOTAVAIL: the guest does not have the address it wants to be.
    AddressNotAvailable,
    /// ENETUNREACH: the guest's network has no such destination.
    NetUnreachable,
    /// ECONNRESET: the other side gave up, or the fabric did.
    Reset,
    /// ETIMEDOUT: nobody has answered.
    TimedOut,
    /// ECONNREFUSED: nobody listens there.
    Refused,
    /// EHOSTUNREACH: the host of the destination does not answer.
    HostUnreachable,
}

/// What a failure is to the guest, in the words of the VTOE paper (section 4.3).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Failure {
    /// CONNECT_REJECTED.
    Rejected,
    /// UNREACHABLE.
    Unreachable,
    /// ADDRESS_ERROR.
    AddressError,
    /// DISCONNECTED.
    Disconnected,
}

impl Errno {
    /// Every one.
    pub const ALL: [Self; 8] = [
        Self::Access,
        Self::AddressInUse,
        Self::AddressNotAvailable,
        Self::NetUnreachable,
        Self::Reset,
        Self::TimedOut,
        Self::Refused,
        Self::HostUnreachable,
    ];

    /// Its number (`include/uapi/asm-generic/errno.h` of Linux; x86 and arm64 have these).
    #[must_use]
    pub const fn number(self) -> u32 {
        match self {
            Self::Access => 13,
            Self::AddressInUse => 98,
            Self::AddressNotAvailable => 99,
            Self::NetUnreachable => 101,
            Self::Reset => 104,
            Self::TimedOut => 110,
            Self::Refused => 111,
            Self::HostUnreachable => 113,
        }
    }

    /// The one with this number. `None`: no connection ends with it.
    #[must_use]
    pub fn of(number: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|errno| errno.number() == number)
    }

    /// The paper's event for it.
    #[must_use]
    pub const fn failure(self) -> Failure {
        match self {
            Self::Access | Self::Refused => Failure::Rejected,
            Self::NetUnreachable | Self::TimedOut | Self::HostUnreachable => Failure::Unreachable,
            Self::AddressInUse | Self::AddressNotAvailable => Failure::AddressError,
            Self::Reset => Failure::Disconnected,
        }
    }
}
