//! The descriptors of a front-end in a worker, whichever device is behind the port.

use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollEvent, EpollFlags};

use super::vhost_user::VhostUserPort;
use crate::token::Token;
use crate::vhost::Source;
use crate::vhost::device::Device;

/// VMMs that a worker handles in one turn, however many have messages: of each some messages, or
/// one that takes long.
pub(crate) const FRONT_ENDS_PER_TURN: usize = 16;

/// Something waits at a socket of a VM, or on its connection.
pub(crate) fn hear<D: Device>(port: &mut VhostUserPort<D>, source: Source) {
    match source {
        Source::Listener => port.handle_listener(),
        Source::Connection => port.handle_connection(),
        Source::Kick(_) => {}
    }
}

/// Waits for a descriptor, if it is still there.
pub(crate) fn watch<D: Device>(
    epoll: &Epoll,
    port: &mut VhostUserPort<D>,
    source: Source,
    token: Token,
) {
    let Some(fd) = port.fd(source) else { return };
    let flags = match source {
        // Each kick is reported once, and eventfds are not read (`vhost::signals`).
        Source::Kick(_) => EpollFlags::EPOLLIN | EpollFlags::EPOLLET,
        Source::Listener | Source::Connection => EpollFlags::EPOLLIN,
    };
    match epoll.add(fd, EpollEvent::new(flags, token.pack())) {
        // EEXIST: named twice before we came to watch it.
        Ok(()) | Err(Errno::EEXIST) => {}
        Err(error) if port.may_log() => {
            tracing::error!(?token, %error, "cannot wait for a descriptor");
        }
        Err(_) => {}
    }
}
