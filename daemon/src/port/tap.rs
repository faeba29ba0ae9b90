//! A tap as a port: whole frames with virtio-net headers, super-segments uncut.
//!
//! A macvtap queue speaks the same protocol and becomes a [`TapPort`] too.

use std::fs::File;
use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};

use nightporter_core::drops::DropReason;
use nightporter_core::limits::TRANSMIT_PARTS_MAX;
use nightporter_core::turn::{Received, Sent};
use nightporter_core::wire::virtio_net::VirtioNetHdr;
use nix::libc;
use nix::net::if_::if_nametoindex;

pub use crate::broker::uplink::OpenError;
use crate::broker::uplink::open_file;
use crate::config::{UplinkConfig, UplinkKind};

/// An open tap or macvtap queue.
#[derive(Debug)]
pub struct TapPort {
    file: File,
    config: UplinkConfig,
    /// Of the interface behind `file`: another one by the same name is another interface.
    index: u32,
}

impl TapPort {
    /// Opens, and if so configured makes, the interface of `config`.
    ///
    /// # Errors
    /// The interface is missing, in use, of another kind, or may not be opened by this user.
    pub fn open(config: &UplinkConfig) -> Result<Self, OpenError> {
        open_file(config, false).map(|(file, index)| Self::of(file, index, config))
    }

    /// The interface of `config`, which `file` is, by its number.
    pub(crate) fn of(file: File, index: u32, config: &UplinkConfig) -> Self {
        Self { file, config: config.clone(), index }
    }

    /// The configuration with which it was opened.
    #[must_use]
    pub fn config(&self) -> &UplinkConfig {
        &self.config
    }

    /// The interface's number.
    #[must_use]
    pub fn index(&self) -> u32 {
        self.index
    }

    /// Whether the interface is still the one that was opened. The descriptor of a macvtap outlives
    /// its link and does not show it.
    #[must_use]
    pub fn is_present(&self) -> bool {
        if_nametoindex(self.config.ifname.as_str()).unwrap_or(0) == self.index
    }

    /// The descriptor to wait on.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// A port over any descriptor that carries one frame with its header per read and write.
    #[must_use]
    pub fn from_fd(fd: std::os::fd::OwnedFd) -> Self {
        let config = UplinkConfig {
            name: String::new(),
            network: None,
            kind: UplinkKind::Tap,
            ifname: "no such if".into(),
            create: false,
            bridge: None,
        };
        Self { file: File::from(fd), config, index: 0 }
    }

    /// Reads one frame into `buf`, which should hold 64 KiB and an Ethernet header.
    pub fn receive(&mut self, buf: &mut [u8]) -> Received {
        let mut hdr = [0; VirtioNetHdr::LEN];
        loop {
            let mut iov = [IoSliceMut::new(&mut hdr), IoSliceMut::new(buf)];
            match self.file.read_vectored(&mut iov) {
                // A datagram shorter than its header is no frame of a tap; skip it.
                Ok(n) if n > VirtioNetHdr::LEN => {
                    let len = (n - VirtioNetHdr::LEN).min(buf.len());
                    return Received::Frame(VirtioNetHdr::parse(&hdr), len);
                }
                Ok(0) => return Received::Gone,
                Ok(_) => {}
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Received::Empty,
                Err(_) => return Received::Gone,
            }
        }
    }

    /// Drops the frames that wait to be read, `most` at most. How many those were.
    pub(crate) fn discard(&mut self, most: usize) -> usize {
        let mut buf = [0; 64]; // the rest of each is cut off
        (0..most).take_while(|_| matches!(self.receive(&mut buf), Received::Frame(..))).count()
    }

    /// Writes one frame, given in pieces, of which there are at most `TRANSMIT_PARTS_MAX`.
    pub fn send(&mut self, hdr: &VirtioNetHdr, parts: &[&[u8]]) -> Sent {
        let hdr = hdr.emit();
        let mut iov = [IoSlice::new(&[]); 1 + TRANSMIT_PARTS_MAX];
        iov[0] = IoSlice::new(&hdr);
        for (slot, part) in iov[1..].iter_mut().zip(parts) {
            *slot = IoSlice::new(part);
        }
        let used = 1 + parts.len();
        assert!(used <= iov.len(), "a Transmit has at most TRANSMIT_PARTS_MAX parts");
        loop {
            match self.file.write_vectored(&iov[..used]) {
                Ok(_) => return Sent::Done,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return not_sent(&e),
            }
        }
    }
}

/// The meaning of a write's errors in drivers/net/tun.c and tap.c (6.18).
fn not_sent(e: &io::Error) -> Sent {
    match e.raw_os_error() {
        Some(libc::EAGAIN | libc::ENOBUFS | libc::ENOMEM) => Sent::Full,
        Some(libc::EIO | libc::ENETDOWN) => Sent::Dropped(DropReason::PortDown),
        Some(libc::EMSGSIZE) => Sent::Dropped(DropReason::TooBig),
        Some(libc::EINVAL) => Sent::Dropped(DropReason::MalformedVirtioHeader),
        _ => Sent::Gone,
    }
}
