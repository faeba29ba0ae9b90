//! One daemon at a time for each tap.
//!
//! The programs of two would take each other's frames for the VM's, and turn them for ever. A
//! socket's abstract name (unix(7)) is unique in a network namespace, as an interface's number is,
//! and goes with the last descriptor of the socket, as links do. Nobody connects to it. Any process
//! of the host may take it, so the error says how to find out which one has.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use nix::libc;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, bind, socket};

use crate::AttachError;

/// The claim on the tap with this number, as long as it is open.
pub(crate) fn claim(index: u32) -> Result<OwnedFd, AttachError> {
    let claim = || -> nix::Result<OwnedFd> {
        let fd = socket(AddressFamily::Unix, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)?;
        bind(fd.as_raw_fd(), &UnixAddr::new_abstract(name(index).as_bytes())?)?;
        Ok(fd)
    };
    claim().map_err(|e| match e as i32 {
        libc::EADDRINUSE => AttachError::Claimed(index),
        _ => AttachError::of("claim the tap", io::Error::from(e)),
    })
}

pub(crate) fn name(index: u32) -> String {
    format!("nightporter/tap/{index}")
}
