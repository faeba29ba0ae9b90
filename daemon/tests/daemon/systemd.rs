//! A played systemd: it holds the socket for notices (sd_notify(3)), keeps the descriptors that a
//! daemon gives it, and starts the next daemon with them (sd_listen_fds(3)).

use std::ffi::OsStr;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::io::{FdFlags, fcntl_setfd};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// See the module doc.
#[derive(Debug)]
pub(crate) struct Systemd {
    path: PathBuf,
    notices: UnixDatagram,
    /// The descriptors that it keeps, by name, in the order in which they came.
    pub(crate) store: Vec<(String, OwnedFd)>,
}

impl Systemd {
    /// Makes its socket there.
    pub(crate) fn new(path: PathBuf) -> std::io::Result<Self> {
        let notices = UnixDatagram::bind(&path)?;
        notices.set_nonblocking(true)?;
        Ok(Self { path, notices, store: Vec::new() })
    }

    /// How to start the next daemon with all that is kept, while the copies are there.
    pub(crate) fn command(&mut self, program: &Path) -> (Command, Vec<OwnedFd>) {
        self.hears();
        let copy = |(_, fd): &(_, OwnedFd)| fd.try_clone().expect("a free descriptor");
        let copies: Vec<_> = self.store.iter().map(copy).collect();
        // bash, because other shells move no descriptors beyond the ninth.
        let moves = copies
            .iter()
            .zip(3..)
            .fold(String::new(), |moves, (fd, to)| moves + &format!("{to}<&{}- ", fd.as_raw_fd()));
        let names: Vec<_> = self.store.iter().map(|(name, _)| name.as_str()).collect();
        let mut command = Command::new("bash");
        let run = format!("exec {moves}; LISTEN_PID=$$ exec \"$0\" \"$@\"");
        command.args([OsStr::new("-c"), OsStr::new(&run), program.as_os_str()]);
        command.env("NOTIFY_SOCKET", &self.path).env("LISTEN_FDS", names.len().to_string());
        command.env("LISTEN_FDNAMES", names.join(":"));
        // Another program that is started now may get them, too, and does not look.
        for fd in &copies {
            fcntl_setfd(fd, FdFlags::empty()).expect("it is open");
        }
        (command, copies)
    }

    /// Takes what daemons have said so far.
    fn hears(&mut self) {
        while let Some((said, fds)) = receive(&self.notices) {
            let said = String::from_utf8(said).expect("text");
            let has = |line: &str| said.lines().any(|it| it == line);
            let name = said.lines().find_map(|line| line.strip_prefix("FDNAME="));
            if has("FDSTORE=1") {
                assert!(has("FDPOLL=0"), "systemd would look at what is no file of the service's");
                let name = name.expect("a name").to_owned();
                self.store.extend(fds.into_iter().map(|fd| (name.clone(), fd)));
            } else if has("FDSTOREREMOVE=1") {
                self.store.retain(|(it, _)| Some(it.as_str()) != name);
            }
        }
    }

    /// Closes all that it keeps, as if the service had been stopped.
    pub(crate) fn forgets(&mut self) {
        self.hears();
        self.store.clear();
    }

    /// The names of what it keeps.
    pub(crate) fn keeps(&mut self) -> Vec<&str> {
        self.hears();
        self.store.iter().map(|(name, _)| name.as_str()).collect()
    }
}

/// A message that waits there.
pub(crate) fn receive(socket: impl AsFd) -> Option<(Vec<u8>, Vec<OwnedFd>)> {
    let (mut bytes, mut fds) = (vec![0; 64 << 10], Vec::new());
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let got = recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags).ok()?;
    bytes.truncate(got.bytes);
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(more) = message {
            fds.extend(more);
        }
    }
    Some((bytes, fds))
}

/// Sends one.
pub(crate) fn send(socket: impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
    sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::empty()).expect("room for it");
}
