//! Who another host is, proved by TLS: the worker's side.
//!
//! # Tickets
//!
//! A stream of guests' bytes (`fabric`) is plain TCP, for payload stays in guest memory. What it
//! has of TLS is a *ticket*: two secrets, which the host that is connected to has drawn and told
//! the host that connects over a connection of TLS, on which both have shown a certificate for
//! their address. Who connects shows the first, who is connected to answers with the second: so
//! each knows that the other one is who showed that certificate. A ticket is good for one stream.
//!
//! 1. A [`Way`] has a connection of TLS each way it is used: who connects asks, who is connected to
//!    tells. When that ends its tickets are good for nothing at both ends; streams that have begun
//!    go on.
//! 2. All of TLS is done by a thread (`keeper`). Between it and the worker there are states with a
//!    key and a channel with an end; the worker never waits, the thread may.
//! 3. Tickets are shown to the worker before they are told to the other host, so none comes too
//!    early.
//!
//! # Streams by TLS
//!
//! With `encrypt` there are no tickets: each stream is a connection of TLS itself, at the same
//! port, and told from the others by what it says it speaks (`proof`). The thread does the whole
//! handshake, and the worker gets what is [`Secured`]: it sees nothing of who has not shown the
//! certificate for its address.

mod conn;
mod keeper;
pub mod rehearsal;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
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

/// Bytes of one half of a ticket.
pub(super) const SECRET_LEN: usize = 32;
/// Tickets that are asked for when few are left, about, and when those are few.
const STOCK: usize = 32;
const FEW: usize = 8;
/// Tickets of a way that this host has or has asked for, at most.
const STOCK_MAX: usize = 128;
/// Tickets that another host has been told and not shown: more than it keeps, for those it has lost
/// are the oldest.
const TOLD_MAX: usize = 2 * STOCK_MAX;
/// News that wait for the worker, at most.
const NEWS_MAX: usize = 64;

/// What one host shows the other, and the answer to it.
#[derive(Clone, Copy, Eq, PartialEq)]
pub(super) struct Ticket {
    pub(super) shown: [u8; SECRET_LEN],
    pub(super) answer: [u8; SECRET_LEN],
}

impl Ticket {
    /// Of hosts that are told by their addresses alone.
    pub(super) const NONE: Self = Self { shown: [0; SECRET_LEN], answer: [0; SECRET_LEN] };
}

impl fmt::Debug for Ticket {
    /// Without the secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Ticket")
    }
}

/// Whether they are the same, in a time that does not tell where they differ.
pub(super) fn is_same(a: &[u8; SECRET_LEN], b: &[u8; SECRET_LEN]) -> bool {
    std::hint::black_box(a.iter().zip(b).fold(0, |all, (a, b)| all | (a ^ b))) == 0
}

/// From an address of this host to another host.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) struct Way {
    pub(super) own: IpAddr,
    pub(super) peer: IpAddr,
}

/// Where hosts prove who they are, and by what.
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

/// What became of streams that go by TLS.
#[derive(Debug)]
pub(super) enum Opening {
    /// The one with this tag has begun.
    Begun(u64, Secured),
    /// It has not. `true`: which says nothing of the other host.
    Failed(u64, bool),
    /// Another host has begun one.
    Came(Way, Secured),
    /// None can be begun any more.
    Shut,
}

/// What a wish is about: of each the last counts.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
enum Topic {
    Peer(IpAddr),
    Way(Way),
    Stream(u64),
}

/// What the worker wants.
#[derive(Clone, Copy, Debug)]
enum Wish {
    /// Guests are registered there, or not any more.
    Peer(IpAddr, bool),
    /// So many tickets, since the start.
    Tickets(Way, u64),
    /// A stream, with this tag.
    Stream(Way, u64),
}

/// What the thread has to say.
#[derive(Debug)]
enum News {
    /// The other host has told these.
    Came(Way, Vec<Ticket>),
    /// And those that it has told before are good for nothing; others do not come.
    Lost(Way),
    /// These are about to be told to the other host.
    Told(Way, Vec<Ticket>),
    /// Those that it was told are good for nothing any more.
    Forget(Way),
    /// Of streams that go by TLS.
    Opening(Opening),
}

/// What the worker has to do something about.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Event {
    /// There are tickets.
    Came(Way),
    /// There are none, and none come.
    Lost(Way),
}

/// Tickets for one way.
#[derive(Debug, Default)]
struct Stock {
    tickets: VecDeque<Ticket>,
    /// That have been asked for and have not come.
    due: usize,
    /// That were ever asked for.
    wanted: u64,
}

/// See the module's doc.
#[derive(Debug)]
pub(super) struct Trust {
    stocks: BTreeMap<Way, Stock>,
    told: BTreeMap<Way, VecDeque<Ticket>>,
    peers: BTreeSet<IpAddr>,
    wishes: Outbox<Topic, Wish>,
    news: Receiver<News>,
    events: VecDeque<Event>,
    openings: VecDeque<Opening>,
    /// Streams go by TLS.
    encrypts: bool,
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
        let (tell, news) = sync_channel(NEWS_MAX);
        let refused = Arc::new(AtomicU64::new(0));
        let encrypts = doors.files.config().encrypts();
        let keeper = Keeper::new(doors, (far, inbox), (near.clone(), tell), Arc::clone(&refused));
        std::thread::Builder::new().name("trust".into()).spawn(|| keeper.run())?;
        Ok(Self {
            stocks: BTreeMap::new(),
            told: BTreeMap::new(),
            peers: BTreeSet::new(),
            wishes,
            news,
            events: VecDeque::new(),
            openings: VecDeque::new(),
            encrypts,
            bell: near,
            refused,
        })
    }

    /// Readable when there are news.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.bell.fd()
    }

    /// Connections at the door where hosts prove who they are, of those that did not.
    pub(super) fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    /// Whether streams go by TLS: then there are no tickets.
    pub(super) const fn encrypts(&self) -> bool {
        self.encrypts
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

    /// A ticket for a stream on this way, if there is one; if not, they come, or [`Event::Lost`].
    /// `waiting`: so many streams wait for theirs besides.
    pub(super) fn take(&mut self, way: Way, waiting: usize) -> Option<Ticket> {
        let stock = self.stocks.entry(way).or_default();
        let ticket = stock.tickets.pop_front();
        let wanted = waiting + usize::from(ticket.is_none());
        let have = stock.tickets.len() + stock.due;
        if have < wanted + FEW && have < STOCK_MAX {
            let more = (wanted + STOCK).min(STOCK_MAX) - have;
            stock.due += more;
            stock.wanted += more as u64;
            self.wishes.post(Topic::Way(way), Wish::Tickets(way, stock.wanted));
        }
        ticket
    }

    /// The answer to what another host has shown, once. `None`: it was not told that.
    pub(super) fn admit(&mut self, way: Way, shown: &[u8; SECRET_LEN]) -> Option<[u8; SECRET_LEN]> {
        self.hear(); // what was told before this was shown
        let told = self.told.get_mut(&way)?;
        // All are looked at, so that the time does not tell which it is.
        let all = told.iter().enumerate();
        let at = all.fold(None, |at, (i, it)| if is_same(&it.shown, shown) { Some(i) } else { at });
        told.remove(at?).map(|ticket| ticket.answer)
    }

    /// Takes note of what the thread has said, as much as there can be at once.
    pub(super) fn hear(&mut self) {
        self.bell.silence();
        self.wishes.flush();
        for _ in 0..=NEWS_MAX {
            let Ok(news) = self.news.try_recv() else { break };
            self.handle_news(news);
        }
        if !self.events.is_empty() || !self.openings.is_empty() {
            self.bell.ring(); // if nobody looks at them now
        }
    }

    fn handle_news(&mut self, news: News) {
        match news {
            News::Came(way, tickets) => {
                let stock = self.stocks.entry(way).or_default();
                stock.due = stock.due.saturating_sub(tickets.len());
                let room = STOCK_MAX.saturating_sub(stock.tickets.len());
                stock.tickets.extend(tickets.into_iter().take(room));
                self.events.push_back(Event::Came(way));
            }
            News::Lost(way) => {
                let stock = self.stocks.entry(way).or_default();
                stock.tickets.clear();
                stock.due = 0;
                self.events.push_back(Event::Lost(way));
            }
            News::Told(way, tickets) => {
                let told = self.told.entry(way).or_default();
                told.extend(tickets);
                let old = told.len().saturating_sub(TOLD_MAX);
                told.drain(..old);
            }
            News::Forget(way) => drop(self.told.remove(&way)),
            News::Opening(opening) => self.openings.push_back(opening),
        }
    }

    /// What has happened, behind [`Self::hear`].
    #[must_use]
    pub(super) fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// What became of streams that go by TLS, behind [`Self::hear`].
    #[must_use]
    pub(super) fn poll_opening(&mut self) -> Option<Opening> {
        self.openings.pop_front()
    }
}

#[cfg(test)]
pub(in crate::toe) mod tests {
    use std::net::Ipv4Addr;
    use std::sync::mpsc::SyncSender;

    use nightporter_registry::mail::Inbox;

    use super::*;

    /// The worker's side, and what the thread has.
    fn trust() -> (Trust, Inbox<Wish>, SyncSender<News>) {
        let (bell, far) = (Bell::new().unwrap(), Bell::new().unwrap());
        let (wishes, inbox) = mail(&bell, &far);
        let (tell, news) = sync_channel(NEWS_MAX);
        let trust = Trust {
            stocks: BTreeMap::new(),
            told: BTreeMap::new(),
            peers: BTreeSet::new(),
            wishes,
            news,
            events: VecDeque::new(),
            openings: VecDeque::new(),
            encrypts: false,
            bell,
            refused: Arc::default(),
        };
        (trust, inbox, tell)
    }

    /// What the thread would say.
    #[derive(Debug)]
    pub(in crate::toe) struct Thread {
        tell: SyncSender<News>,
        _inbox: Inbox<Wish>,
    }

    impl Thread {
        pub(in crate::toe) fn says(&self, opening: Opening) {
            self.tell.send(News::Opening(opening)).unwrap();
        }
    }

    /// Of a host whose streams go by TLS.
    pub(in crate::toe) fn encrypting() -> (Trust, Thread) {
        let (trust, _inbox, tell) = trust();
        (Trust { encrypts: true, ..trust }, Thread { tell, _inbox })
    }

    fn way(last: u8) -> Way {
        let [own, peer] = [1, last].map(|n| IpAddr::from(Ipv4Addr::new(192, 0, 2, n)));
        Way { own, peer }
    }

    fn tickets(range: std::ops::Range<u64>) -> Vec<Ticket> {
        let secret = |n: u64| {
            let mut secret = [0; SECRET_LEN];
            secret[..8].copy_from_slice(&n.to_le_bytes());
            secret
        };
        range.map(|n| Ticket { shown: secret(n), answer: secret(!n) }).collect()
    }

    /// What is wanted since the start.
    fn wanted(inbox: &Inbox<Wish>) -> Option<u64> {
        let last = std::iter::from_fn(|| inbox.take().unwrap()).last();
        last.map(|wish| if let Wish::Tickets(_, n) = wish { n } else { panic!("{wish:?}") })
    }

    #[test]
    fn a_stock_is_filled_before_it_is_empty_and_as_far_as_streams_wait() {
        let (mut trust, inbox, tell) = trust();
        assert_eq!(trust.take(way(2), 0), None);
        assert_eq!(wanted(&inbox), Some(33), "one for who waits, and a stock");
        assert_eq!(trust.take(way(2), 1), None);
        assert_eq!(wanted(&inbox), None, "they are under way");
        tell.send(News::Came(way(2), tickets(0..33))).unwrap();
        trust.hear();
        assert_eq!(trust.poll_event(), Some(Event::Came(way(2))));
        for n in 0..25 {
            assert_eq!(trust.take(way(2), 0), Some(tickets(n..n + 1)[0]));
            assert_eq!(wanted(&inbox), None, "{n}");
        }
        assert!(trust.take(way(2), 0).is_some());
        assert_eq!(wanted(&inbox), Some(33 + 25));
        assert_eq!(trust.take(way(3), 0), None, "another host's are no good");
        // Those who wait are many, and so is what comes at once.
        assert_eq!(trust.take(way(4), 1000), None);
        assert!(trust.stocks[&way(4)].due <= STOCK_MAX);
        tell.send(News::Came(way(4), tickets(0..1000))).unwrap();
        trust.hear();
        assert_eq!(trust.stocks[&way(4)].tickets.len(), STOCK_MAX);
        // What was told is good for nothing when the connection has ended.
        tell.send(News::Lost(way(2))).unwrap();
        trust.hear();
        assert_eq!(trust.take(way(2), 0), None);
    }

    #[test]
    fn what_was_told_is_good_once_and_not_for_ever() {
        let (mut trust, _inbox, tell) = trust();
        let all = tickets(0..TOLD_MAX as u64 + 10);
        tell.send(News::Told(way(2), all.clone())).unwrap();
        // It is known before anybody has heard of it.
        assert_eq!(trust.admit(way(2), &all[200].shown), Some(all[200].answer));
        assert_eq!(trust.admit(way(2), &all[200].shown), None, "twice");
        assert_eq!(trust.admit(way(3), &all[201].shown), None, "another host");
        assert_eq!(trust.admit(way(2), &all[201].answer), None, "the other half");
        assert_eq!(trust.admit(way(2), &all[9].shown), None, "too many have come since");
        assert_eq!(trust.admit(way(2), &all[10].shown), Some(all[10].answer));
        tell.send(News::Forget(way(2))).unwrap();
        assert_eq!(trust.admit(way(2), &all[201].shown), None);
        assert!(trust.told.is_empty());
    }
}
