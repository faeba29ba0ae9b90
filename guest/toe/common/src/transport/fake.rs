//! A host for tests: UNIX sockets in the directory that [`VARIABLE`] names. The guest's port 7 is
//! `g.7` there, the host's port 2 `h.2`. The kernel connects such sockets at once, so the host
//! sends one byte in place of vsock's RESPONSE, and ends without it in place of RST.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use nightporter_core::toe::vsock::Ports;

use crate::sys::{self, Fd, Name, Res};

/// A test waits no longer for the host that it plays.
pub(super) const PATIENCE_MS: i32 = 20_000;

/// Among all other tests it may be so much slower than a host.
pub(super) const SLOWNESS: i32 = 4;

const VARIABLE: &str = "NIGHTPORTER_TOE_FAKE_HOST";

static DIRECTORY: OnceLock<Option<PathBuf>> = OnceLock::new();
static NEXT_PORT: AtomicU32 = AtomicU32::new(0);

fn directory() -> Option<&'static Path> {
    DIRECTORY.get_or_init(|| std::env::var_os(VARIABLE).map(PathBuf::from)).as_deref()
}

fn address(side: char, port: u32) -> Name {
    let path = directory().expect("it is in use").join(format!("{side}.{port}"));
    let family = u16::try_from(libc::AF_UNIX).expect("1").to_ne_bytes();
    Name::of(&[&family, path.as_os_str().as_encoded_bytes(), &[0]].concat())
}

pub(super) fn port(name: &Name, side: char) -> Option<u32> {
    let path = std::str::from_utf8(name.bytes().get(2..)?).ok()?.trim_end_matches('\0');
    let name = Path::new(path).strip_prefix(directory()?).ok()?.to_str()?;
    name.strip_prefix(side)?.strip_prefix('.')?.parse().ok()
}

pub(super) fn is_in_use() -> bool {
    directory().is_some()
}

pub(super) fn socket() -> Res<Fd> {
    sys::new_socket(libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0)
}

pub(super) fn take_port(fd: Fd) -> Res<u32> {
    let own = u32::try_from(sys::pid()).expect("a number") << 12;
    loop {
        let port = own + (NEXT_PORT.fetch_add(1, Ordering::Relaxed) & 0xfff);
        match sys::bind_to(fd, &address('g', port)) {
            Ok(()) => return Ok(port),
            Err(libc::EADDRINUSE) => {}
            Err(errno) => return Err(errno),
        }
    }
}

pub(super) fn call(fd: Fd, port: u32) -> Res {
    sys::connect_to(fd, &address('h', port))?;
    if sys::is_nonblocking(fd) { Err(libc::EINPROGRESS) } else { Ok(()) }
}

pub(super) fn ports(fd: Fd) -> Option<Ports> {
    let guest = port(&sys::name_of(fd).ok()?, 'g')?;
    Some(Ports { guest, host: port(&sys::peer_of(fd).ok()?, 'h')? })
}

pub(super) fn outcome(fd: Fd) -> Res {
    match sys::receive(fd, &mut [0], 0) {
        Ok(1) => Ok(()),
        _ => Err(libc::ECONNRESET),
    }
}
