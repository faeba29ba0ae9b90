//! The control connection of a process: its requests to the host, and the answers.

use std::mem;
use std::sync::{Arc, Mutex, PoisonError};

use nightporter_core::toe::control::{Ask, Asked, LEN, PORT, Reply};

use crate::pause::Pause;
use crate::sys::{self, Fd, Res, Undisturbed};
use crate::table::{self, Hidden, Kind};
use crate::transport::{self, Patience};

/// A host that has taken a connection and does not answer for so long has no daemon any more.
const ANSWER_MS: i64 = 5_000;

/// [`Line`], of all threads.
pub(crate) type Shared = Arc<Mutex<Line>>;

/// The control connection, if there is one.
#[derive(Debug, Default)]
pub(crate) struct Line {
    open: Option<Open>,
    tag: u16,
    pause: Pause,
}

#[derive(Debug)]
struct Open {
    fd: Hidden,
    /// Its identity when it is used: its number could be another file's.
    identity: (u64, u64),
}

impl Line {
    fn open(&mut self, patience: Patience) -> Option<Fd> {
        if let Some(open) = &self.open {
            if table::is_confined() || sys::identity(open.fd.0) == Ok(open.identity) {
                return Some(open.fd.0);
            }
            // The program has closed it. The number, if it is in use, is not ours to close.
            table::set_kind(open.fd.0, Kind::Unknown);
            self.open = None;
        }
        let may_try = patience == Patience::Long || self.pause.is_over(sys::now_ms());
        if table::is_confined() || !may_try {
            return None;
        }
        let opened = connect(patience).and_then(|fd| Hidden::instead_of(fd, true));
        let opened = opened.and_then(|fd| sys::identity(fd.0).map(|i| Open { fd, identity: i }));
        match opened {
            Ok(open) => Some(self.open.insert(open).fd.0),
            Err(errno) => {
                let absent = [libc::EAFNOSUPPORT, libc::ENODEV, libc::EACCES, libc::EPERM];
                if absent.contains(&errno) {
                    // Each attempt makes the kernel look for a module.
                    self.pause.is_absent(sys::now_ms());
                } else {
                    self.pause.failed(sys::now_ms());
                }
                None
            }
        }
    }
}

/// A new control connection.
pub(crate) fn connect(patience: Patience) -> Res<Fd> {
    let fd = transport::socket()?;
    let wait = [ANSWER_MS / 1000, 0].map(i64::to_ne_bytes).concat();
    let ready = transport::call_within(fd, PORT, patience)
        .and_then(|()| sys::set_option(fd, libc::SOL_SOCKET, libc::SO_RCVTIMEO, &wait))
        .and_then(|()| sys::set_option(fd, libc::SOL_SOCKET, libc::SO_SNDTIMEO, &wait));
    if let Err(errno) = ready {
        sys::close_fd(fd);
        return Err(errno);
    }
    Ok(fd)
}

/// Asks over a control connection.
pub(crate) fn exchange(fd: Fd, asked: Asked) -> Res<Reply> {
    let request = asked.emit();
    let mut sent = 0;
    let confined = table::is_confined();
    while sent < LEN {
        let rest = &request[sent..];
        sent += if confined { sys::write_some(fd, rest) } else { sys::send(fd, rest) }?;
    }
    let mut bytes = [0; LEN];
    let mut got = 0;
    while got < LEN {
        let rest = &mut bytes[got..];
        match if confined { sys::read_some(fd, rest) } else { sys::receive(fd, rest, 0) }? {
            0 => return Err(libc::ECONNRESET),
            count => got += count,
        }
    }
    let answer = Reply::parse(&bytes).ok_or(libc::EPROTO)?;
    if answer.tag == asked.tag { Ok(answer) } else { Err(libc::EPROTO) }
}

/// Does something with the control connection of this process. The table must not be locked,
/// because the answer may take long.
fn with_line<T>(does: impl FnOnce(&mut Line) -> T) -> T {
    let line = Arc::clone(table::lock().line.get_or_insert_default());
    let undisturbed = Undisturbed::begin();
    let result = does(&mut line.lock().unwrap_or_else(PoisonError::into_inner));
    drop(undisturbed);
    result
}

/// A child of fork() has no use for the line of its parent, which another thread may have locked
/// for ever: then its descriptor stays. It need not find out again that the host is away.
pub(crate) fn leave_behind(line: Shared) -> Option<Shared> {
    let pause = line.try_lock().ok().map(|line| line.pause.clone());
    let Some(pause) = pause else {
        mem::forget(line);
        return None;
    };
    Some(Arc::new(Mutex::new(Line { pause, ..Line::default() })))
}

/// Whether the host can be asked.
pub(crate) fn is_there(patience: Patience) -> bool {
    with_line(|line| line.open(patience).is_some())
}

/// Asks the host. `None`: there is no answer.
pub(crate) fn ask(ask: Ask) -> Option<Reply> {
    with_line(|line| {
        // A connection may have died since it was used, which only a read or write shows.
        for _ in 0..2 {
            let fd = line.open(Patience::Brief)?;
            line.tag = line.tag.wrapping_add(1);
            match exchange(fd, Asked { tag: line.tag, ask }) {
                Ok(answer) => {
                    line.pause.succeeded();
                    return Some(answer);
                }
                Err(errno) => {
                    line.open = None;
                    if errno == libc::EAGAIN {
                        // It is there, and does not answer.
                        break;
                    }
                }
            }
        }
        line.pause.failed(sys::now_ms());
        None
    })
}
