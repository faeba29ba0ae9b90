//! The socket that front-ends connect to.

use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, chown};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

pub use crate::owners::Access;

/// Why a socket could not be made.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// Another process listens there: stop it, or give this port another path.
    #[error("{0}: the socket path is taken by a running process; stop it or use another path")]
    Taken(PathBuf),
    /// Something that is not a socket is there and is left alone.
    #[error("{0}: exists and is not a socket; remove it or use another path")]
    NotASocket(PathBuf),
    /// The system refused.
    #[error("{path}: {what}: {error}")]
    Io {
        /// The socket's path.
        path: PathBuf,
        /// The operation.
        what: &'static str,
        /// The system's error.
        error: io::Error,
    },
}

impl ListenError {
    /// The daemon may make sockets, and not there: a rule of its own, or of the unit's.
    #[must_use]
    pub fn is_elsewhere(&self) -> bool {
        use io::ErrorKind::{PermissionDenied, ReadOnlyFilesystem};
        let Self::Io { what: LISTEN, error, .. } = self else { return false };
        matches!(error.kind(), PermissionDenied | ReadOnlyFilesystem)
    }

    /// The socket could be made, and not be given to its group or owner.
    #[must_use]
    pub fn is_not_given(&self) -> bool {
        matches!(self, Self::Io { what: CHOWN, .. })
    }

    /// The fix.
    #[must_use]
    pub fn fix(&self) -> &'static str {
        match self {
            Self::Io { what: CHOWN, .. } => {
                "put the daemon's user into daemon.socket_group (SupplementaryGroups= in its unit) \
                 or give it CAP_CHOWN; daemon.socket_user needs more, see docs/configuration.md"
            }
            _ if self.is_elsewhere() => {
                "choose a vm.socket where the daemon may make one, or let it (systemd: \
                 ReadWritePaths= in its unit)"
            }
            _ => "free that path, or choose another vm.socket",
        }
    }
}

/// The operation.
const LISTEN: &str = "listen";
const CHOWN: &str = "change its owner";

/// A listening socket. Its file goes when it is dropped, unless someone else has replaced it.
#[derive(Debug)]
pub struct Listener {
    /// Goes before the socket is closed: until then its inode is no other file's.
    name: Name,
    socket: UnixListener,
}

#[derive(Debug)]
struct Name {
    path: PathBuf,
    /// Device and inode of the file we made.
    identity: (u64, u64),
}

impl Listener {
    /// Listens at `path`. A socket file without a listener is replaced.
    pub fn bind(path: &Path, access: Access) -> Result<Self, ListenError> {
        let io = |what| move |error| ListenError::Io { path: path.to_path_buf(), what, error };
        if let Ok(found) = fs::symlink_metadata(path) {
            if !found.file_type().is_socket() {
                return Err(ListenError::NotASocket(path.to_path_buf()));
            }
            match knock(path) {
                Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => {
                    fs::remove_file(path).map_err(io("remove the stale socket"))?;
                }
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                // So many front-ends wait there already that one more would have to wait for a
                // place.
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    return Err(ListenError::Taken(path.to_path_buf()));
                }
                Err(e) => return Err(io("ask who listens there")(e)),
                Ok(()) => return Err(ListenError::Taken(path.to_path_buf())),
            }
        }
        let socket = UnixListener::bind(path).map_err(io(LISTEN))?;
        let made = fs::symlink_metadata(path).map_err(io("look at the socket"))?;
        let name = Name { path: path.to_path_buf(), identity: (made.dev(), made.ino()) };
        let listener = Self { name, socket };
        listener.socket.set_nonblocking(true).map_err(io("make it non-blocking"))?;
        // As long as it is ours.
        if let Some(mode) = access.mode {
            let mode = fs::Permissions::from_mode(mode);
            fs::set_permissions(path, mode).map_err(io("change its mode"))?;
        }
        if access.uid.is_some() || access.gid.is_some() {
            chown(path, access.uid, access.gid).map_err(io(CHOWN))?;
        }
        Ok(listener)
    }

    /// The socket, to wait for.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Its file disappears. Closing the descriptor closes the connections that wait there, with all
    /// descriptors that were passed over them.
    #[must_use]
    pub fn into_fd(self) -> OwnedFd {
        let Self { name, socket } = self;
        drop(name);
        socket.into()
    }

    /// The next connection; `None` if none waits.
    pub fn accept(&self) -> io::Result<Option<UnixStream>> {
        loop {
            match self.socket.accept() {
                Ok((stream, _)) => return Ok(Some(stream)),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                // The other end gave up while it waited (accept(2)).
                Err(e) if e.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                // The kernel needs a descriptor (EMFILE) before it looks whether a connection
                // waits.
                Err(_) if !somebody_waits(&self.socket) => return Ok(None),
                Err(e) => return Err(e),
            }
        }
    }
}

/// Whether there is a connection to accept.
pub(crate) fn somebody_waits(listener: &impl AsFd) -> bool {
    let mut fds = [PollFd::new(listener, PollFlags::IN)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut fds, Some(&now)).is_ok_and(|ready| ready > 0)
}

/// Connects to `path`, if that takes no waiting, and goes away again.
fn knock(path: &Path) -> io::Result<()> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    Ok(connect(&socket, &SocketAddrUnix::new(path)?)?)
}

impl Drop for Name {
    fn drop(&mut self) {
        let there = fs::symlink_metadata(&self.path).map(|m| (m.dev(), m.ino()));
        if there.is_ok_and(|id| id == self.identity) {
            let _ = fs::remove_file(&self.path);
        }
    }
}
