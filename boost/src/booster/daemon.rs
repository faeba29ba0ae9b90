//! The connection to the daemon.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nightporter_api::BoostAccount;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recv,
    send, socket_with,
};

use super::nanos;
use crate::protocol::{Order, PACKET_BYTES_MAX, Report};
use crate::{BEAT, SILENCE_MAX};

/// See the module doc.
#[derive(Debug)]
pub(super) struct Daemon {
    socket: OwnedFd,
    /// The first ping that it has not answered.
    unanswered: Option<u64>,
    pinged_at: u64,
    /// It stands, and was told so.
    stands: bool,
    told: std::collections::BTreeMap<u16, BoostAccount>,
}

impl Daemon {
    /// `None`: there is no daemon yet.
    pub(super) fn connect(path: &Path, now: u64) -> Result<Option<Self>> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        let address = SocketAddrUnix::new(path).context("the path of the daemon's socket")?;
        if connect(&socket, &address).is_err() {
            return Ok(None);
        }
        // The socket can be replaced by root and the daemon's user alone; a stranger's is refused.
        let owner = std::os::unix::fs::MetadataExt::uid(&std::fs::metadata(path)?);
        let peer = socket_peercred(&socket)?;
        if peer.uid.as_raw() != owner && !peer.uid.is_root() {
            bail!("the socket is not served by its owner");
        }
        Ok(Some(Self {
            socket,
            unanswered: None,
            pinged_at: now,
            stands: false,
            told: std::collections::BTreeMap::new(),
        }))
    }

    pub(super) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// The next order. Errors: the connection is of no more use.
    pub(super) fn receive(&mut self, _now: u64) -> io::Result<Option<Order>> {
        let mut buf = [0; PACKET_BYTES_MAX];
        let (len, _) = match recv(&self.socket, &mut buf[..], RecvFlags::DONTWAIT) {
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return Ok(None),
            result => result?,
        };
        if len == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.unanswered = None;
        self.stands = false;
        let order = serde_json::from_slice(&buf[..len]);
        order.map(Some).map_err(|e| io::Error::other(format!("an order is not understood: {e}")))
    }

    /// While something is favoured it has to answer. `true`: it stands, since now.
    pub(super) fn stands(&mut self, now: u64, favours: bool) -> bool {
        if !favours {
            self.unanswered = None;
            return false;
        }
        if now >= self.pinged_at + nanos(BEAT) {
            self.pinged_at = now;
            self.send(&Report::Ping {});
            self.unanswered.get_or_insert(now);
        }
        let silent = self.unanswered.is_some_and(|since| now > since + nanos(SILENCE_MAX));
        silent && !std::mem::replace(&mut self.stands, true)
    }

    /// Tells the account of a VM, if it is not the one that was told last.
    pub(super) fn tell(&mut self, vm: u16, account: &BoostAccount) {
        if self.told.get(&vm) != Some(account) {
            self.told.insert(vm, account.clone());
            self.send(&Report::Account { vm, account: account.clone() });
        }
    }

    /// Nobody else wants this VM's cores: it is to ask again after so long.
    pub(super) fn defer(&self, vm: u16, by: Duration) {
        let for_us = u64::try_from(by.as_micros()).unwrap_or(u64::MAX);
        self.send(&Report::Later { vm, for_us });
    }

    /// A report that finds no room is lost: the next account says the same, and a ping without an
    /// answer is what it is for.
    fn send(&self, report: &Report) {
        let _ = send(&self.socket, &report.packet(), SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
    }
}
