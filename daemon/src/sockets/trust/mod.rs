//! The identity of another host, proved by TLS: the worker's side.
//!
//! With `encrypt` each stream of guests' bytes (`fabric`) is a connection of TLS, on which both
//! hosts have shown a certificate for their address; without it hosts are known by their addresses
//! alone, and there is nothing of this module.
//!
//! 1. A thread (`keeper`) does the whole handshake. The worker gets connections that are
//!    [`Secured`]: it sees nothing of a host that has not shown the certificate for its address.
//! 2. Between thread and worker there are wishes with a key and a channel with an end; the worker
//!    never waits, the thread may.

mod conn;
mod keeper;
pub mod rehearsal;

use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, TcpStream};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};

use nightporter_registry::mail::{Bell, Outbox, mail};
use nightporter_registry::tls::Tls;
use rustls::Connection;

use crate::broker::dialer::Dialer;
use crate::config::proof::Proof;
use keeper::Keeper;

/// Openings that wait for the worker, at most.
const OPENINGS_MAX: usize = 64;

/// From an address of this host to another host.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) struct Way {
    pub(super) own: IpAddr,
    pub(super) peer: IpAddr,
}

/// The port for encrypted streams, and this host's certificate.
#[derive(Debug)]
pub(crate) struct ProofDoors {
    /// Sockets that listen, with their addresses.
    pub(crate) listeners: Vec<(IpAddr, OwnedFd)>,
    pub(crate) dialer: Dialer,
    pub(crate) files: Tls<Proof>,
}

/// A connection over TLS on which both sides have shown who they are, and which waits for nothing.
/// It keeps 64 KiB at most of what is to be sent.
#[derive(Debug)]
pub(super) struct Secured {
    pub(super) socket: TcpStream,
    pub(super) tls: Box<Connection>,
}

/// The end of a handshake.
#[derive(Debug)]
pub(super) enum Opening {
    /// The stream with this tag has begun.
    Begun(u64, Secured),
    /// It has not. `true`: which says nothing of the other host.
    Failed(u64, bool),
    /// Another host has begun one.
    Came(Way, Secured),
    /// None can be begun any more.
    Shut,
}

/// The subject of a wish: of each the last counts.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
enum Topic {
    Peer(IpAddr),
    Stream(u64),
}

/// An order of the worker.
#[derive(Clone, Copy, Debug)]
enum Wish {
    /// Guests are registered there, or not any more.
    Peer(IpAddr, bool),
    /// A stream, with this tag.
    Stream(Way, u64),
}

/// See the module's doc.
#[derive(Debug)]
pub(super) struct Trust {
    peers: BTreeSet<IpAddr>,
    wishes: Outbox<Topic, Wish>,
    openings: Receiver<Opening>,
    bell: Bell,
    refused: Arc<AtomicU64>,
}

impl Trust {
    /// Starts the thread. To be called before the worker has its place, which threads inherit.
    ///
    /// # Errors
    /// The system's.
    pub(super) fn start(doors: ProofDoors) -> io::Result<Self> {
        let (near, far) = (Bell::new()?, Bell::new()?);
        let (wishes, inbox) = mail(&near, &far);
        let (tell, openings) = sync_channel(OPENINGS_MAX);
        let refused = Arc::new(AtomicU64::new(0));
        let keeper = Keeper::new(doors, (far, inbox), (near.clone(), tell), Arc::clone(&refused));
        std::thread::Builder::new().name("trust".into()).spawn(|| keeper.run())?;
        Ok(Self { peers: BTreeSet::new(), wishes, openings, bell: near, refused })
    }

    /// Readable when there may be openings.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.bell.fd()
    }

    /// Connections at the port for encrypted streams, of hosts that did not prove who they are.
    pub(super) fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    /// A stream is wanted on this way: [`Opening::Begun`] or [`Opening::Failed`] says what became
    /// of it, always and once.
    pub(super) fn open(&mut self, way: Way, tag: u64) {
        self.wishes.post(Topic::Stream(tag), Wish::Stream(way, tag));
    }

    /// Guests are registered there, or not any more.
    pub(super) fn set_peer(&mut self, peer: IpAddr, is_there: bool) {
        let is_new = if is_there { self.peers.insert(peer) } else { self.peers.remove(&peer) };
        if is_new {
            self.wishes.post(Topic::Peer(peer), Wish::Peer(peer, is_there));
        }
    }

    /// The openings that there are now. There can be no more at once, and later ones ring.
    pub(super) fn take(&mut self) -> Vec<Opening> {
        self.bell.silence();
        self.wishes.flush();
        self.openings.try_iter().take(OPENINGS_MAX + 1).collect()
    }
}

#[cfg(test)]
pub(in crate::sockets) mod tests {
    use std::sync::mpsc::SyncSender;

    use nightporter_registry::mail::Inbox;

    use super::*;

    /// The thread's side.
    #[derive(Debug)]
    pub(in crate::sockets) struct Thread {
        tell: SyncSender<Opening>,
        _inbox: Inbox<Wish>,
    }

    impl Thread {
        pub(in crate::sockets) fn says(&self, opening: Opening) {
            self.tell.send(opening).unwrap();
        }
    }

    /// Of a host whose streams are encrypted.
    pub(in crate::sockets) fn encrypting() -> (Trust, Thread) {
        let (bell, far) = (Bell::new().unwrap(), Bell::new().unwrap());
        let (wishes, _inbox) = mail(&bell, &far);
        let (tell, openings) = sync_channel(OPENINGS_MAX);
        let refused = Arc::default();
        let trust = Trust { peers: BTreeSet::new(), wishes, openings, bell, refused };
        (trust, Thread { tell, _inbox })
    }
}
