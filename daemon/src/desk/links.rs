//! Interfaces that go and come back while the daemon runs.
//!
//! A tap says so itself when it is read or written; the descriptor of a deleted macvtap stays
//! silent, and nothing but a notification tells that an interface is back.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use nightporter_core::port::PortId;
use nightporter_core::time::Instant;
use nix::errno::Errno;
use nix::net::if_::if_nametoindex;
use nix::sys::epoll::Epoll;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, socket,
};

use super::Desk;
use crate::port::Port;
use crate::port::tap::TapPort;
use crate::worker::data_path::DataPath;

/// The multicast group of link changes (linux/rtnetlink.h, RTMGRP_LINK).
const LINK_GROUP: u32 = 1;

/// A netlink socket that becomes readable when an interface changes.
#[derive(Debug)]
pub(crate) struct LinkWatch(OwnedFd);

impl LinkWatch {
    pub(crate) fn new() -> io::Result<Self> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let protocol = SockProtocol::NetlinkRoute;
        let fd = socket(AddressFamily::Netlink, SockType::Raw, flags, protocol)?;
        bind(fd.as_raw_fd(), &NetlinkAddr::new(0, LINK_GROUP))?;
        Ok(Self(fd))
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Throws the messages away: what matters is that there were some.
    fn clear(&self) {
        let mut message = [0; 8192];
        // ENOBUFS says that messages were lost, which is as good as having read them.
        while matches!(
            recv(self.0.as_raw_fd(), &mut message, MsgFlags::empty()),
            Ok(_) | Err(Errno::ENOBUFS | Errno::EINTR)
        ) {}
    }
}

impl Desk {
    /// Some interface changed: looks whether ours are all there, and whether lost ones are back.
    pub(super) fn handle_links(&mut self, now: Instant, epoll: &Epoll, path: &mut DataPath) {
        if let Some(links) = &self.links {
            links.clear();
        }
        for id in (0..).map(PortId).take(path.ports.list.len()) {
            let at = path.ports.of(id);
            match &at.port {
                Port::Uplink(tap) if !tap.is_present() => path.lose(now, id),
                Port::Lost(config) if if_nametoindex(config.ifname.as_str()).is_ok() => {
                    match TapPort::open(config) {
                        Ok(tap) => path.regain(now, epoll, id, tap),
                        // Half made: the next change brings us back here.
                        Err(error) => tracing::debug!(port = %at.name, %error, "not back yet"),
                    }
                }
                Port::Uplink(_) | Port::Guest(_) | Port::Lost(_) | Port::Vacant => {}
            }
        }
    }
}
