//! rtnetlink(7): reading all routes, changing one, and hearing that some changed.

use std::io::IoSliceMut;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use anyhow::{Context, Result, bail, ensure};
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, recvmsg,
    send, socket,
};

use crate::plan::Step;
use crate::route::Route;

// include/uapi/linux/netlink.h and rtnetlink.h, Linux 6.1.
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const RTM_NEWROUTE: u16 = 24;
const RTM_DELROUTE: u16 = 25;
const RTM_GETROUTE: u16 = 26;
const NLM_F_REQUEST: u16 = 0x01;
const NLM_F_ACK: u16 = 0x04;
const NLM_F_DUMP_INTR: u16 = 0x10;
const NLM_F_REPLACE: u16 = 0x100;
const NLM_F_DUMP: u16 = 0x300;
const NLM_F_CREATE: u16 = 0x400;
const NLM_F_APPEND: u16 = 0x800;
const RTMGRP_IPV4_ROUTE: u32 = 0x40;
const RTMGRP_IPV6_ROUTE: u32 = 0x400;
/// Bytes of `struct nlmsghdr`.
const NLMSGHDR: usize = 16;
/// More than any answer of the kernel (NLMSG_GOODSIZE is at most 8 KiB, a dump's skb 32 KiB).
const ANSWER_BYTES_MAX: usize = 64 * 1024;
/// Families that TCP knows: AF_INET, AF_INET6.
const FAMILIES: [u8; 2] = [2, 10];
/// How often a list of routes is read again that changed while it was read.
const TRIES: usize = 20;

/// A socket for requests.
#[derive(Debug)]
pub struct Rtnl(OwnedFd);

/// A socket that hears of routes that come, change and go.
#[derive(Debug)]
pub struct Changes(OwnedFd);

impl Rtnl {
    /// Opens it, in the caller's network namespace.
    ///
    /// # Errors
    /// The kernel has no netlink.
    pub fn open() -> Result<Self> {
        open(0, SockFlag::empty()).map(Self)
    }

    /// All routes of both families.
    ///
    /// # Errors
    /// The kernel's answer makes no sense, or the routes never stand still.
    pub fn routes(&self) -> Result<Vec<Route>> {
        for _ in 0..TRIES {
            if let Some(routes) = self.try_routes().context("reading the routes")? {
                return Ok(routes);
            }
        }
        bail!("the routes change all the time: {TRIES} times while they were read")
    }

    /// Changes a route.
    ///
    /// # Errors
    /// The kernel refuses, or the route is no longer there.
    pub fn change(&self, step: &Step) -> Result<()> {
        if step.unique {
            self.request(RTM_NEWROUTE, NLM_F_REPLACE, &step.to.body())
        } else {
            // A replacement hits the first of those that have the same name, whichever it is.
            self.request(RTM_DELROUTE, 0, &step.from.body())?;
            self.request(RTM_NEWROUTE, NLM_F_CREATE | NLM_F_APPEND, &step.to.body())
        }
        .with_context(|| format!("changing the route {}", step.from.name()))
    }

    /// `None` if they changed meanwhile.
    fn try_routes(&self) -> Result<Option<Vec<Route>>> {
        let mut routes = Vec::new();
        let mut steady = true;
        for family in FAMILIES {
            let mut body = [0; 12];
            body[0] = family;
            self.send(RTM_GETROUTE, NLM_F_DUMP, &body)?;
            self.answers(|kind, flags, body| {
                steady &= flags & NLM_F_DUMP_INTR == 0;
                // A kernel that does not know a family lists those of all families instead
                // (net/core/rtnetlink.c, rtnl_dump_all): one without IPv6 has each route twice.
                if kind == RTM_NEWROUTE && body.first() == Some(&family) {
                    routes.push(Route::parse(body)?);
                }
                Ok(kind == NLMSG_DONE)
            })?;
        }
        Ok(steady.then_some(routes))
    }

    fn request(&self, kind: u16, flags: u16, body: &[u8]) -> Result<()> {
        self.send(kind, flags | NLM_F_ACK, body)?;
        self.answers(|kind, _, _| Ok(kind == NLMSG_ERROR)) // one that is none: an acknowledgement
    }

    fn send(&self, kind: u16, flags: u16, body: &[u8]) -> Result<()> {
        let length = u32::try_from(NLMSGHDR + body.len())?;
        let head = [
            &length.to_ne_bytes()[..],
            &kind.to_ne_bytes(),
            &(flags | NLM_F_REQUEST).to_ne_bytes(),
            &[0; 8],
        ];
        send(self.0.as_raw_fd(), &[&head.concat(), body].concat(), MsgFlags::empty())?;
        Ok(())
    }

    /// Reads the kernel's messages until `is_last` says so of one; it gets type, flags and body.
    fn answers(&self, mut is_last: impl FnMut(u16, u16, &[u8]) -> Result<bool>) -> Result<()> {
        let mut buffer = vec![0; ANSWER_BYTES_MAX];
        loop {
            let length = recv(self.0.as_raw_fd(), &mut buffer, MsgFlags::MSG_TRUNC)?;
            let mut rest = buffer.get(..length).context("an answer that is too long")?;
            while let Some((head, _)) = rest.split_first_chunk::<NLMSGHDR>() {
                let length = u32::from_ne_bytes([head[0], head[1], head[2], head[3]]);
                let length = usize::try_from(length)?;
                ensure!((NLMSGHDR..=rest.len()).contains(&length), "a message of {length} bytes");
                let kind = u16::from_ne_bytes([head[4], head[5]]);
                let flags = u16::from_ne_bytes([head[6], head[7]]);
                let body = &rest[NLMSGHDR..length];
                if kind == NLMSG_ERROR {
                    let code = body.first_chunk().context("an error without a number")?;
                    match i32::from_ne_bytes(*code) {
                        0 => {}
                        code => return Err(Errno::from_raw(-code).into()),
                    }
                }
                if is_last(kind, flags, body)? {
                    return Ok(());
                }
                rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
            }
        }
    }
}

impl Changes {
    /// Opens it, in the caller's network namespace.
    ///
    /// # Errors
    /// The kernel has no netlink.
    pub fn open() -> Result<Self> {
        open(RTMGRP_IPV4_ROUTE | RTMGRP_IPV6_ROUTE, SockFlag::SOCK_NONBLOCK).map(Self)
    }

    /// Whether there were any since the last call.
    ///
    /// # Errors
    /// The socket failed.
    pub fn take(&self) -> Result<bool> {
        let mut any = false;
        let mut byte = [0];
        loop {
            // What changed does not matter: all routes are read again.
            let mut buffer = [IoSliceMut::new(&mut byte)];
            match recvmsg::<()>(self.0.as_raw_fd(), &mut buffer, None, MsgFlags::empty()) {
                // ENOBUFS: so many that some were dropped.
                Ok(_) | Err(Errno::ENOBUFS) => any = true,
                Err(Errno::EAGAIN) => return Ok(any),
                Err(Errno::EINTR) => {}
                Err(errno) => return Err(errno).context("hearing of changed routes"),
            }
        }
    }
}

impl AsFd for Changes {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn open(groups: u32, flags: SockFlag) -> Result<OwnedFd> {
    let flags = flags | SockFlag::SOCK_CLOEXEC;
    let route = SockProtocol::NetlinkRoute;
    let fd = socket(AddressFamily::Netlink, SockType::Raw, flags, route).context("netlink")?;
    bind(fd.as_raw_fd(), &NetlinkAddr::new(0, groups)).context("netlink")?;
    Ok(fd)
}
