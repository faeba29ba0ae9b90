//! The errors of connections, as applications see them (VTOE-06).

/// An errno of Linux, of those that a TOE connection can end with.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Errno {
    /// EACCES: policy forbids the destination.
    Access,
    /// EOPNOTSUPP: no TOE listener takes it now; guest TCP may find one, or wait for a full one.
    /// Applications never see it: the answer to processes is [`super::control::Code::Native`].
    NotByToe,
    /// EADDRINUSE: the port has another listener.
    AddressInUse,
    /// EADDRNOTAVAIL: the guest does not have the address that it binds.
    AddressNotAvailable,
    /// ENETUNREACH: the guest's network has no such destination.
    NetUnreachable,
    /// ECONNRESET: the other side or the fabric gave up.
    Reset,
    /// ETIMEDOUT: no answer has come.
    TimedOut,
    /// ECONNREFUSED: the guest that listens has refused, perhaps because its listener is full. Only
    /// older daemons send it, and it is taken for [`Self::NotByToe`]: guest TCP finds out.
    Refused,
    /// EHOSTUNREACH: the host of the destination does not answer.
    HostUnreachable,
}

impl Errno {
    /// Every errno.
    pub const ALL: [Self; 9] = [
        Self::Access,
        Self::NotByToe,
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
            Self::NotByToe => 95,
            Self::AddressInUse => 98,
            Self::AddressNotAvailable => 99,
            Self::NetUnreachable => 101,
            Self::Reset => 104,
            Self::TimedOut => 110,
            Self::Refused => 111,
            Self::HostUnreachable => 113,
        }
    }

    /// The errno with this number. `None`: no connection ends with it.
    #[must_use]
    pub fn of(number: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|errno| errno.number() == number)
    }
}
