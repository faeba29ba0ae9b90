//! The launcher's requests to its host: as the library's `control`, for all its programs at once.

use std::net::SocketAddr;
use std::sync::{Mutex, PoisonError};

use nightporter_core::toe::control::{Ask, Asked, Code, LEN, PORT, Reply};
use nightporter_core::toe::vsock::Ports;

use crate::pause::Pause;
use crate::sys::{self, Res};
use crate::transport::{self, Patience};
use crate::watch::Owned;

/// A host that does not answer for so long has no daemon, as for the library.
const ANSWER_S: i64 = 5;

/// The control connection.
#[derive(Debug, Default)]
pub(crate) struct HostControl {
    line: Mutex<Line>,
}

#[derive(Debug, Default)]
struct Line {
    open: Option<Owned>,
    tag: u16,
    pause: Pause,
}

/// A new control connection.
fn connect(patience: Patience) -> Res<Owned> {
    let fd = Owned(transport::socket()?);
    transport::call_within(fd.0, PORT, patience)?;
    let wait = [ANSWER_S, 0].map(i64::to_ne_bytes).concat();
    for limit in [libc::SO_RCVTIMEO, libc::SO_SNDTIMEO] {
        sys::set_option(fd.0, libc::SOL_SOCKET, limit, &wait)?;
    }
    Ok(fd)
}

/// A control connection that lives as long as the listener that was asked for over it.
pub(crate) fn lease(ask: Ask) -> Res<Owned> {
    let line = connect(Patience::Long)?;
    match exchange(&line, Asked { tag: 0, ask })?.code {
        Code::Done => Ok(line),
        _ => Err(libc::EOPNOTSUPP),
    }
}

/// Whether that still is there.
pub(crate) fn is_alive(lease: &Owned) -> bool {
    let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
    sys::receive(lease.0, &mut [0], flags) == Err(libc::EAGAIN)
}

/// Asks over a control connection.
fn exchange(line: &Owned, asked: Asked) -> Res<Reply> {
    let mut sent = 0;
    while sent < LEN {
        sent += sys::send(line.0, &asked.emit()[sent..])?;
    }
    let (mut bytes, mut got) = ([0; LEN], 0);
    while got < LEN {
        match sys::receive(line.0, &mut bytes[got..], 0)? {
            0 => return Err(libc::ECONNRESET),
            count => got += count,
        }
    }
    Reply::parse(&bytes).filter(|reply| reply.tag == asked.tag).ok_or(libc::EPROTO)
}

impl HostControl {
    /// Asks the host. `None`: there is no answer.
    pub(crate) fn ask(&self, ask: Ask) -> Option<Reply> {
        self.ask_with(Patience::Brief, ask)
    }

    /// The same, for a caller that may be held up so long.
    pub(crate) fn ask_with(&self, patience: Patience, ask: Ask) -> Option<Reply> {
        let mut line = self.line.lock().unwrap_or_else(PoisonError::into_inner);
        if patience == Patience::Brief && !line.pause.is_over(sys::now_ms()) {
            return None;
        }
        // A connection may have died since it was used.
        for _ in 0..2 {
            if line.open.is_none() {
                line.open = connect(patience).ok();
            }
            line.tag = line.tag.wrapping_add(1);
            let asked = Asked { tag: line.tag, ask };
            match line.open.as_ref().map(|open| exchange(open, asked)) {
                Some(Ok(reply)) => {
                    line.pause.succeeded();
                    return Some(reply);
                }
                Some(Err(errno)) => {
                    line.open = None;
                    if errno == libc::EAGAIN {
                        // It is there, and does not answer.
                        break;
                    }
                }
                None => break,
            }
        }
        line.pause.failed(sys::now_ms());
        None
    }

    /// From now on the close of a socket is a reset, so that nothing ends clean by the launcher's
    /// death. Its addresses, if the host knows it.
    pub(crate) fn hold(&self, ports: Ports) -> Option<(SocketAddr, SocketAddr)> {
        self.ask(Ask::Linger(ports)).and_then(|reply| reply.addresses)
    }

    /// How it is with a socket: `Ok` if it is well or has ended clean.
    pub(crate) fn describe(&self, ask: Ask) -> Result<(), Option<i32>> {
        match self.ask(ask).map(|reply| reply.code) {
            Some(Code::Done) => Ok(()),
            Some(Code::Native) => Err(None),
            Some(Code::Failed(errno)) => {
                Err(Some(i32::try_from(errno.number()).unwrap_or(libc::ECONNRESET)))
            }
            None => Err(Some(libc::ECONNRESET)),
        }
    }
}
