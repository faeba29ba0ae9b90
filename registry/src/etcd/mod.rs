//! etcd: hosts that find each other, with leases, by its gateway (JSON over HTTP).
//!
//! A host's entries have its lease: they expire after the host's death. The first claim of a MAC
//! wins; a later one is a waiting key beside it (`schema`), which the holder sees, and wins when
//! the MAC is free. The thread (`session`) waits for etcd, so that the caller never does.
//!
//! The gateway and not gRPC, because that would bring 63 crates, a compiler for its interfaces and
//! an asynchronous runtime, where this needs TLS, base64 and 250 lines of HTTP
//! (docs/design/many-hosts.md). The gateway cannot log in by the name in a client certificate: the
//! certificate is shown if there is one, and names come with a password.

mod api;
mod entries;
mod http;
mod rehearsal;
mod schema;
mod session;

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;
use std::thread::JoinHandle;

use crate::mail::{Bell, Gone, Inbox, Outbox, mail};
pub use crate::tls::{Files, Tls, TlsError};
use crate::{Host, Mac, News, Registry, Station};
use entries::Wanted;
use http::Stop;
pub use http::{Connector, Endpoint};
pub use rehearsal::Rehearsal;
use schema::{Key, write_host, write_station};
use session::Thread;

/// Configuration of the etcd back-end.
#[derive(Clone)]
pub struct Config {
    /// Members of the cluster, at least one.
    pub members: Vec<Endpoint>,
    /// Opens connections to members.
    pub connector: Connector,
    /// TLS configuration for members that need it.
    pub tls: Option<Tls>,
    /// User name and password.
    pub user: Option<(String, String)>,
    /// Prefix of all keys.
    pub prefix: String,
    /// Seconds until the entries of a silent host expire.
    pub ttl_s: u16,
}

impl fmt::Debug for Config {
    /// Without the password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Config").field("members", &self.members).finish_non_exhaustive()
    }
}

/// Subject of a change; the last change of each subject counts.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
enum Topic {
    /// Whether etcd answers.
    Link,
    /// Number of left-out stations.
    LeftOut,
    /// Another host or a station of it.
    Of(Key),
    /// A claim of this host.
    Claim(u32, Mac),
}

/// See the module doc.
#[derive(Debug)]
pub struct Etcd {
    /// `None`: the thread is to end.
    wishes: Option<Outbox<Key, (Key, Option<Wanted>)>>,
    news: Inbox<News>,
    bell: Bell,
    /// The thread's bell.
    far: Bell,
    stop: Stop,
    thread: Option<JoinHandle<()>>,
    joined: BTreeMap<u32, Host>,
    is_gone: bool,
}

impl Etcd {
    /// Starts the thread, which inherits the privileges of the caller's.
    ///
    /// # Errors
    /// The system call's.
    pub fn start(config: Config) -> io::Result<Self> {
        let (mut new, thread) = Self::prepare(config)?;
        let thread = std::thread::Builder::new().name("registry".into()).spawn(|| thread.run())?;
        new.thread = Some(thread);
        Ok(new)
    }

    /// A registry and its thread, which does not run yet.
    fn prepare(config: Config) -> io::Result<(Self, Thread)> {
        let (near, far) = (Bell::new()?, Bell::new()?);
        let (wishes, from_worker) = mail(&near, &far);
        let (to_worker, news) = mail(&far, &near);
        let stop = Stop::new()?;
        let thread = Thread::new(config, far.clone(), stop.clone(), from_worker, to_worker);
        let new = Self {
            wishes: Some(wishes),
            news,
            bell: near,
            far,
            stop,
            thread: None,
            joined: BTreeMap::new(),
            is_gone: false,
        };
        Ok((new, thread))
    }

    fn wish(&mut self, key: Key, wanted: Option<Wanted>) {
        if let Some(wishes) = &mut self.wishes {
            wishes.post(key, (key, wanted));
        }
    }
}

impl Registry for Etcd {
    fn kind(&self) -> &'static str {
        "etcd"
    }

    fn is_shared(&self) -> bool {
        true
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.bell.fd()
    }

    fn join(&mut self, host: Host) {
        let before = self.joined.insert(host.vni, host);
        if let Some(before) = before.filter(|before| before.address != host.address) {
            self.wish(Key::Host(before.vni, before.address), None);
        }
        let wanted = Wanted { host: host.address, value: write_host(&host) };
        self.wish(Key::Host(host.vni, host.address), Some(wanted));
    }

    fn leave(&mut self, vni: u32) {
        if let Some(before) = self.joined.remove(&vni) {
            self.wish(Key::Host(vni, before.address), None);
        }
    }

    fn claim(&mut self, station: Station) {
        let wanted = Wanted { host: station.host, value: write_station(&station) };
        self.wish(Key::Station(station.vni, station.mac), Some(wanted));
    }

    fn release(&mut self, vni: u32, mac: Mac) {
        self.wish(Key::Station(vni, mac), None);
    }

    fn poll(&mut self) -> Option<News> {
        // Then the wishes: one bell says that there are news and that there is room for wishes.
        let news = self.news.take();
        if let Some(wishes) = &mut self.wishes {
            wishes.flush();
        }
        match news {
            Ok(news) => news,
            Err(Gone) if std::mem::replace(&mut self.is_gone, true) => None,
            Err(Gone) => Some(News::Link(Err("its thread has ended: report this".into()))),
        }
    }
}

impl Drop for Etcd {
    /// Deletes the entries of this host, if etcd answers within seconds.
    fn drop(&mut self) {
        self.wishes = None;
        self.stop.say();
        self.far.ring();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod script;
#[cfg(test)]
mod tests;
