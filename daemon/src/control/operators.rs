//! The control socket's server: requests in, replies and streams out, all without blocking. A
//! client that is neither root's nor the daemon's user's is of `daemon.status_group`, and may only
//! look.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;

use nightporter_api::{REQUEST_BYTES_MAX, Reply, Request};
use nightporter_core::bucket::Bucket;
use nightporter_core::time::{Duration, Instant};
use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollEvent};
use nix::unistd::geteuid;
use rustix::net::sockopt::socket_peercred;

use super::conn::{ACCEPTS_PER_TURN, Allowance, CLIENTS_MAX, Clients, Conn};
use crate::spare;
use crate::timer::monotonic_now;
use crate::token::Token;
use crate::vhost::listener::{Access, ListenError, Listener};
use crate::worker::orders::Client;

/// Clients of `daemon.status_group` at a time: there is always room for others.
const LOOKERS_MAX: usize = CLIENTS_MAX / 2;

/// Requests of all these clients together that are answered at once, and the interval of more: each
/// costs the worker what a scrape or a page of connections does. `top` has a status and up to 20
/// pages each second, so there is room for two.
const LOOKS_BURST: u64 = 100;
const LOOKS_INTERVAL: Duration = Duration::from_millis(20);

/// Stream bytes that may wait for a client; then its capture buffers, and then it misses frames.
const STREAM_PENDING_MAX: usize = 1 << 20;

/// The listener and its clients.
#[derive(Debug)]
pub struct ControlServer {
    listener: Listener,
    clients: Clients<Operator>,
    /// The clients of whom the worker knows, for they have asked for something, by their places.
    known: BTreeMap<u16, Client>,
    /// Clients so far.
    count: Client,
    /// Our own user.
    own: u32,
    /// The requests that clients of `daemon.status_group` may still make.
    looks: Bucket,
    /// Those of their requests that wait, one for a client.
    late: VecDeque<(Client, Request)>,
    /// Clients that have gone since [`Self::take_gone`].
    gone: Vec<Client>,
    /// A spare descriptor, which is closed for a client when there is no other: so an operator is
    /// served even if all descriptors are in use.
    reserve: Option<OwnedFd>,
}

#[derive(Debug)]
struct Operator {
    client: Client,
    conn: Conn<UnixStream>,
    /// It may change nothing.
    only_looks: bool,
    /// After [`Reply::Stream`] it is not listened to any more.
    streaming: bool,
    /// The worker may send one piece of its stream.
    granted: bool,
    /// Its last request is not answered yet.
    held: bool,
}

/// A reply as the control protocol has it.
pub(super) fn line(reply: &Reply) -> Vec<u8> {
    let mut line = serde_json::to_vec(reply).expect("replies are plain data");
    line.push(b'\n');
    line
}

impl ControlServer {
    /// Listens at `path`, for our own user and those of this group. Errors: see [`ListenError`].
    pub fn new(path: &Path, access: Access) -> Result<Self, ListenError> {
        let listener = Listener::bind(path, access)?;
        let reserve = listener.fd().try_clone_to_owned().ok();
        let (clients, known, gone) = (Clients::new(), BTreeMap::new(), Vec::new());
        let own = geteuid().as_raw();
        let (looks, late) = (Bucket::new(LOOKS_BURST, LOOKS_INTERVAL), VecDeque::new());
        Ok(Self { listener, clients, known, count: 0, own, looks, late, gone, reserve })
    }

    /// When a request that waits may be taken at the latest.
    pub(super) fn poll_timeout(&self, now: Instant) -> Option<Instant> {
        (!self.late.is_empty()).then(|| now + LOOKS_INTERVAL)
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.listener.fd()
    }

    /// Accepts waiting clients. Errors: a client still waits, and cannot be accepted.
    pub(super) fn handle_listener(&mut self, epoll: &Epoll) -> io::Result<()> {
        let mut held = None;
        for _ in 0..ACCEPTS_PER_TURN {
            let stream = match self.listener.accept() {
                Ok(Some(stream)) => stream,
                Ok(None) => break,
                Err(error) => {
                    held.get_or_insert_with(spare::hold);
                    if self.reserve.take().is_some() {
                        continue;
                    }
                    // The one unused for longest makes room.
                    let served = self.served();
                    let idlest = self.clients.remove_idlest(|place| served.contains(&place));
                    let Some(place) = idlest else { return Err(error) };
                    self.gone.extend(self.known.remove(&place));
                    continue;
                }
            };
            if stream.set_nonblocking(true).is_err() {
                continue;
            }
            let only_looks = self.only_looks(&stream);
            if only_looks && !self.make_room_for_looker() {
                continue;
            }
            let conn = Conn::new(stream, REQUEST_BYTES_MAX);
            self.count += 1;
            let client = self.count;
            let operator = Operator {
                client,
                conn,
                only_looks,
                streaming: false,
                granted: false,
                held: false,
            };
            let served = self.served();
            let place = self.clients.insert_beside(operator, |place| served.contains(&place));
            self.gone.extend(self.known.remove(&place));
            let added = self.clients.at(place).map(|c| {
                let event = EpollEvent::new(c.conn.interest(), Token::Control(place).pack());
                epoll.add(c.conn.fd(), event)
            });
            if added != Some(Ok(())) {
                held = None;
                self.close(place);
            }
        }
        Ok(())
    }

    /// Whether its client is neither root nor our own user.
    fn only_looks(&self, stream: &UnixStream) -> bool {
        let uid = socket_peercred(stream).map(|peer| peer.uid.as_raw());
        !uid.is_ok_and(|uid| [0, self.own].contains(&uid))
    }

    /// If there are [`LOOKERS_MAX`], the one unused for longest goes. `false`: all of them wait for
    /// answers, and stay.
    fn make_room_for_looker(&mut self) -> bool {
        let looks = |place: &u16| self.clients.get(*place).is_some_and(|it| it.only_looks);
        let places = 0..u16::try_from(CLIENTS_MAX).expect("a few");
        let mut lookers: Vec<_> = places.filter(looks).collect();
        if lookers.len() < LOOKERS_MAX {
            return true;
        }
        let served = self.served();
        lookers.retain(|place| !served.contains(place));
        if lookers.is_empty() {
            return false;
        }
        let idlest = self.clients.remove_idlest(|place| !lookers.contains(&place));
        self.gone.extend(idlest.and_then(|place| self.known.remove(&place)));
        true
    }

    /// The places of clients that wait for an answer or have a stream.
    fn served(&self) -> Vec<u16> {
        let is_served =
            |place: &u16| self.clients.get(*place).is_some_and(|it| it.held || it.streaming);
        self.known.keys().copied().filter(is_served).collect()
    }

    /// The clients that have gone, or made room for others, since the last call.
    pub(super) fn take_gone(&mut self) -> Vec<Client> {
        std::mem::take(&mut self.gone)
    }

    /// Something happened on the connection at `place`. `false`: it is broken.
    pub(super) fn handle_client(&mut self, all: &mut Allowance, place: u16) -> bool {
        let Some(client) = self.clients.at(place) else { return false };
        let alive = client.conn.flush(all).is_ok() && client.conn.fill().is_ok();
        if client.streaming {
            // The input of a streaming client does not matter, only its end.
            client.conn.discard_input();
        }
        alive
    }

    /// The next request of the client at `place`, if one is complete and the last was answered. It
    /// is held until [`Self::release`], unless this is the answer.
    pub(super) fn poll_request(&mut self, place: u16) -> Option<(Client, Result<Request, Reply>)> {
        let client = self.clients.at(place)?;
        let id = client.client;
        if client.streaming || client.held || client.conn.pending() > 0 {
            return None;
        }
        if let Some(line) = client.conn.take_until(b"\n") {
            let request = serde_json::from_slice(&line).map_err(|e| Reply::Error {
                what: format!("not a request: {e}"),
                fix: "use a `nightporter` of the daemon's version".into(),
            });
            let only_looks = client.only_looks;
            let request = request.and_then(|it: Request| match only_looks && !it.only_looks() {
                true => Err(Reply::Error {
                    what: "members of daemon.status_group may look at states, and nothing else"
                        .into(),
                    fix: "run it as root, or as the user that nightporterd runs as".into(),
                }),
                false => Ok(it),
            });
            client.held = request.is_ok();
            if client.held {
                self.known.insert(place, id);
            }
            return match request {
                Ok(request) if only_looks && !self.may_look() => {
                    self.late.push_back((id, request));
                    None
                }
                request => Some((id, request)),
            };
        }
        if client.conn.is_overfull() {
            client.conn.close_when_flushed();
            let what = format!("a request has at most {REQUEST_BYTES_MAX} bytes");
            let fix = "send one JSON object per line".into();
            return Some((id, Err(Reply::Error { what, fix })));
        }
        None
    }

    /// Whether one more request is taken at once: behind those that wait, none is.
    fn may_look(&mut self) -> bool {
        self.late.is_empty() && self.looks.allows(monotonic_now())
    }

    /// The next request that has waited long enough.
    pub(super) fn poll_late(&mut self) -> Option<(Client, Request)> {
        let known = &self.known;
        self.late.retain(|(client, _)| known.values().any(|it| it == client));
        let is_due = !self.late.is_empty() && self.looks.allows(monotonic_now());
        if is_due { self.late.pop_front() } else { None }
    }

    /// Answers the client at `place` at once: it is not held. `false`: its connection is broken.
    pub(super) fn refuse(&mut self, all: &mut Allowance, place: u16, reply: &Reply) -> bool {
        let Some(client) = self.clients.at(place) else { return false };
        client.held = false;
        client.conn.queue(line(reply));
        client.conn.flush(all).is_ok()
    }

    /// Answers a client that was held; its place. `streams`: its stream follows. `None`: it has
    /// gone.
    pub(super) fn release(
        &mut self,
        client: Client,
        line: Arc<Vec<u8>>,
        streams: bool,
    ) -> Option<u16> {
        let place = self.find(client)?;
        let client = self.clients.at(place)?;
        (client.held, client.streaming) = (false, streams);
        client.conn.queue_shared(line);
        Some(place)
    }

    /// Sends a piece of a client's stream; its place. `None`: it is gone.
    pub(super) fn put_piece(&mut self, client: Client, bytes: Vec<u8>) -> Option<u16> {
        let place = self.find(client)?;
        let client = self.clients.at(place)?;
        client.granted = false;
        client.conn.queue(bytes);
        Some(place)
    }

    /// The client at `place`, if its stream has room for a piece that was not granted yet.
    pub(super) fn grant(&mut self, place: u16) -> Option<Client> {
        let id = *self.known.get(&place)?;
        let client = self.clients.at(place)?;
        let has_room = client.streaming && client.conn.pending() < STREAM_PENDING_MAX;
        (has_room && !std::mem::replace(&mut client.granted, true)).then_some(id)
    }

    /// The stream of a client is over: it gets what there is of it, and its connection is closed.
    /// Returns its place; `None` if it has gone.
    pub(super) fn hang_up(&mut self, client: Client) -> Option<u16> {
        let place = self.find(client)?;
        self.clients.at(place)?.conn.close_when_flushed();
        Some(place)
    }

    fn find(&self, client: Client) -> Option<u16> {
        self.known.iter().find(|(_, known)| **known == client).map(|(place, _)| *place)
    }

    /// Writes the queued output for `place`. `false`: the connection is closed now. A client that
    /// waits for an answer is not read until then, because its input, or its end, would wake
    /// control over and over.
    pub(super) fn finish(&mut self, epoll: &Epoll, all: &mut Allowance, place: u16) -> bool {
        let Some(Operator { conn, held, .. }) = self.clients.at(place) else { return false };
        let mut alive = conn.flush(all).is_ok() && (*held || !conn.is_done());
        if alive {
            let mut event = EpollEvent::new(conn.interest(), Token::Control(place).pack());
            alive = match *held {
                true => matches!(epoll.delete(conn.fd()), Ok(()) | Err(Errno::ENOENT)),
                false => match epoll.modify(conn.fd(), &mut event) {
                    Err(Errno::ENOENT) => epoll.add(conn.fd(), event).is_ok(),
                    result => result.is_ok(),
                },
            };
        }
        if !alive {
            self.close(place);
        }
        alive
    }

    pub(super) fn close(&mut self, place: u16) {
        let _held = self.reserve.is_none().then(spare::hold);
        self.clients.remove(place);
        self.gone.extend(self.known.remove(&place));
        if self.reserve.is_none() {
            self.reserve = self.listener.fd().try_clone_to_owned().ok();
        }
    }
}
