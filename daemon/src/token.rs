//! The subject of an epoll event.

use std::io;
use std::os::fd::AsFd;

use nix::sys::epoll::{Epoll, EpollEvent, EpollFlags};

use crate::vhost::Source;

/// The meaning of a descriptor in the epoll set of a worker or of control, packed into its 64
/// bits of user data.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Token {
    /// SIGTERM, SIGINT or SIGHUP arrived.
    Signal,
    /// The timer expired: a flow's deadline, or housekeeping.
    Timer,
    /// An interface of the host changed.
    Links,
    /// The broker has ended.
    Broker,
    /// There is mail: orders to a worker, or reports to control.
    Mail,
    /// The sockets' worker has reported something to the frames' worker.
    SocketsMail,
    /// The registry has something new.
    Registry,
    /// A client connects to the control socket.
    ControlListener,
    /// A control client; the index of its place.
    Control(u16),
    /// A booster connects.
    BoosterListener,
    /// The booster has reported something.
    Booster,
    /// A client connects to the metrics address.
    MetricsListener,
    /// A metrics client; the index of its place.
    Metrics(u16),
    /// An uplink has a frame, or is gone; its slot.
    Uplink(u16),
    /// A descriptor of a vhost-user port; its slot.
    Guest(u16, Source),
    /// A descriptor of the socket device of the VM behind that port.
    Toe(u16, Source),
    /// Another host connects to guests' sockets; which of the listeners.
    StreamListener(u16),
    /// A connection to another host has begun.
    Dialer,
    /// Encrypted streams may have begun.
    Trust,
    /// A stream between hosts; its place.
    Stream(u32),
    /// UCX has something to do.
    Ucx,
}

impl Token {
    /// The 64 bits to register.
    #[must_use]
    pub(crate) fn pack(self) -> u64 {
        let pack = |kind: u64, slot: u16, vring: u16| {
            kind << 32 | u64::from(slot) << 16 | u64::from(vring)
        };
        match self {
            Self::Signal => pack(1, 0, 0),
            Self::Timer => pack(2, 0, 0),
            Self::Links => pack(11, 0, 0),
            Self::Registry => pack(13, 0, 0),
            Self::Mail => pack(15, 0, 0),
            Self::Broker => pack(16, 0, 0),
            Self::ControlListener => pack(3, 0, 0),
            Self::Control(i) => pack(4, i, 0),
            Self::MetricsListener => pack(5, 0, 0),
            Self::Metrics(i) => pack(6, i, 0),
            Self::Uplink(slot) => pack(7, slot, 0),
            Self::Guest(slot, Source::Listener) => pack(8, slot, 0),
            Self::Guest(slot, Source::Connection) => pack(9, slot, 0),
            Self::Guest(slot, Source::Kick(vring)) => pack(10, slot, vring),
            Self::Toe(slot, Source::Listener) => pack(17, slot, 0),
            Self::Toe(slot, Source::Connection) => pack(18, slot, 0),
            Self::Toe(slot, Source::Kick(vring)) => pack(19, slot, vring),
            Self::StreamListener(i) => pack(20, i, 0),
            Self::Dialer => pack(21, 0, 0),
            Self::Trust => pack(23, 0, 0),
            Self::Ucx => pack(24, 0, 0),
            Self::BoosterListener => pack(25, 0, 0),
            Self::Booster => pack(26, 0, 0),
            Self::SocketsMail => pack(27, 0, 0),
            Self::Stream(place) => 22 << 32 | u64::from(place),
        }
    }

    /// The inverse of [`Self::pack`].
    ///
    /// # Panics
    /// On bits that `pack` does not make.
    #[must_use]
    pub(crate) fn unpack(bits: u64) -> Self {
        let [0, 0, 0, kind, s1, s0, v1, v0] = bits.to_be_bytes() else {
            panic!("{bits:#x} is not a token");
        };
        let (slot, vring) = (u16::from_be_bytes([s1, s0]), u16::from_be_bytes([v1, v0]));
        match kind {
            1 => Self::Signal,
            2 => Self::Timer,
            11 => Self::Links,
            13 => Self::Registry,
            15 => Self::Mail,
            16 => Self::Broker,
            3 => Self::ControlListener,
            4 => Self::Control(slot),
            5 => Self::MetricsListener,
            6 => Self::Metrics(slot),
            7 => Self::Uplink(slot),
            8 => Self::Guest(slot, Source::Listener),
            9 => Self::Guest(slot, Source::Connection),
            10 => Self::Guest(slot, Source::Kick(vring)),
            17 => Self::Toe(slot, Source::Listener),
            18 => Self::Toe(slot, Source::Connection),
            19 => Self::Toe(slot, Source::Kick(vring)),
            20 => Self::StreamListener(slot),
            21 => Self::Dialer,
            23 => Self::Trust,
            24 => Self::Ucx,
            25 => Self::BoosterListener,
            26 => Self::Booster,
            27 => Self::SocketsMail,
            22 => Self::Stream(u32::from_be_bytes([s1, s0, v1, v0])),
            _ => panic!("{bits:#x} is not a token"),
        }
    }
}

/// Registers a descriptor for reading, level-triggered.
pub(crate) fn watch_for(epoll: &Epoll, fd: &impl AsFd, token: Token) -> io::Result<()> {
    Ok(epoll.add(fd, EpollEvent::new(EpollFlags::EPOLLIN, token.pack()))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_token_survives_its_bits() {
        for token in [
            Token::Signal,
            Token::Timer,
            Token::Links,
            Token::Broker,
            Token::Registry,
            Token::ControlListener,
            Token::Control(u16::MAX),
            Token::MetricsListener,
            Token::Metrics(7),
            Token::Mail,
            Token::SocketsMail,
            Token::Uplink(300),
            Token::Guest(3, Source::Listener),
            Token::Guest(4, Source::Connection),
            Token::Guest(u16::MAX, Source::Kick(u16::MAX)),
            Token::Toe(5, Source::Listener),
            Token::Toe(6, Source::Connection),
            Token::Toe(7, Source::Kick(2)),
            Token::StreamListener(1),
            Token::Dialer,
            Token::Trust,
            Token::Ucx,
            Token::BoosterListener,
            Token::Booster,
            Token::Stream(u32::MAX),
        ] {
            assert_eq!(Token::unpack(token.pack()), token);
        }
    }
}
