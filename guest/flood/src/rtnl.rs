//! rtnetlink(7): reading all routes, changing one, and notifications of changes.

use std::io::IoSliceMut;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use anyhow::{Context, Result, bail};
use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, SockFlag, SockProtocol, recvmsg};

use crate::netlink::{NLM_F_DUMP, NLMSG_DONE, Netlink};
use crate::plan::RouteChange;
use crate::route::Route;

// include/uapi/linux/netlink.h and rtnetlink.h, Linux 6.1.
const RTM_NEWROUTE: u16 = 24;
const RTM_DELROUTE: u16 = 25;
const RTM_GETROUTE: u16 = 26;
const NLM_F_DUMP_INTR: u16 = 0x10;
const NLM_F_REPLACE: u16 = 0x100;
const NLM_F_CREATE: u16 = 0x400;
const NLM_F_APPEND: u16 = 0x800;
const RTMGRP_IPV4_ROUTE: u32 = 0x40;
const RTMGRP_IPV6_ROUTE: u32 = 0x400;
/// Families that TCP knows: AF_INET, AF_INET6.
const FAMILIES: [u8; 2] = [2, 10];
/// How often a list of routes is read again that changed while it was read.
const TRIES: usize = 20;

/// A socket for requests.
#[derive(Debug)]
pub struct Rtnl(Netlink);

/// A socket with notifications of routes that come, change and go.
#[derive(Debug)]
pub struct Changes(Netlink);

impl Rtnl {
    /// Opens it, in the caller's network namespace.
    ///
    /// # Errors
    /// The kernel has no netlink.
    pub fn open() -> Result<Self> {
        Netlink::open(SockProtocol::NetlinkRoute, 0, SockFlag::empty()).map(Self)
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
    pub fn change(&self, step: &RouteChange) -> Result<()> {
        if step.unique {
            self.0.request(RTM_NEWROUTE, NLM_F_REPLACE, &step.to.body())
        } else {
            // A replacement hits the first of those that have the same name, whichever it is.
            self.0.request(RTM_DELROUTE, 0, &step.from.body())?;
            self.0.request(RTM_NEWROUTE, NLM_F_CREATE | NLM_F_APPEND, &step.to.body())
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
            self.0.send(RTM_GETROUTE, NLM_F_DUMP, &body)?;
            self.0.answers(|kind, flags, body| {
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
}

impl Changes {
    /// Opens it, in the caller's network namespace.
    ///
    /// # Errors
    /// The kernel has no netlink.
    pub fn open() -> Result<Self> {
        let groups = RTMGRP_IPV4_ROUTE | RTMGRP_IPV6_ROUTE;
        Netlink::open(SockProtocol::NetlinkRoute, groups, SockFlag::SOCK_NONBLOCK).map(Self)
    }

    /// Whether there were any since the last call.
    ///
    /// # Errors
    /// The socket failed.
    pub fn take(&self) -> Result<bool> {
        let mut any = false;
        let mut byte = [0];
        loop {
            // The change itself does not matter: all routes are read again.
            let mut buffer = [IoSliceMut::new(&mut byte)];
            match recvmsg::<()>(self.0.as_fd().as_raw_fd(), &mut buffer, None, MsgFlags::empty()) {
                // ENOBUFS: there were so many that some were dropped.
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
