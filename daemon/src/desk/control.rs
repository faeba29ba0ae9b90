//! The control socket's server: requests in, replies and streams out, all without blocking.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;

use nightporter_api::{REQUEST_BYTES_MAX, Reply, Request};
use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollEvent};

use crate::control::conn::{ACCEPTS_PER_TURN, Allowance, Clients, Conn};
use crate::control::format::line;
use crate::token::Token;
use crate::vhost::listener::{Access, ListenError, Listener};

/// Stream bytes that may wait for a client; then its capture buffers, and then it misses frames.
const STREAM_PENDING_MAX: usize = 1 << 20;

/// The listener and its clients.
#[derive(Debug)]
pub struct ControlServer {
    listener: Listener,
    clients: Clients<Client>,
    /// A spare descriptor, which is closed for a client when there is no other: so an operator is
    /// served even if all descriptors are in use.
    reserve: Option<OwnedFd>,
}

#[derive(Debug)]
struct Client {
    conn: Conn<UnixStream>,
    /// After [`Reply::Stream`] it is not listened to any more.
    streaming: bool,
    /// Its last request is not answered yet.
    held: bool,
}

impl ControlServer {
    /// Listens at `path`, for our own user only. Errors: see [`ListenError`].
    pub fn new(path: &Path) -> Result<Self, ListenError> {
        let access = Access { mode: Some(0o600), ..Access::default() };
        let listener = Listener::bind(path, access)?;
        let reserve = listener.fd().try_clone_to_owned().ok();
        Ok(Self { listener, clients: Clients::new(), reserve })
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.listener.fd()
    }

    /// Accepts waiting clients. Returns the places that have another client now. An error: a client
    /// still waits, and cannot be accepted.
    pub(crate) fn handle_listener(&mut self, epoll: &Epoll) -> (Vec<u16>, io::Result<()>) {
        let mut places = Vec::new();
        for _ in 0..ACCEPTS_PER_TURN {
            let stream = match self.listener.accept() {
                Ok(Some(stream)) => stream,
                Ok(None) => break,
                Err(_) if self.reserve.take().is_some() => continue,
                // The one unused for longest makes room.
                Err(error) => match self.clients.remove_idlest() {
                    Some(place) => {
                        places.push(place);
                        continue;
                    }
                    None => return (places, Err(error)),
                },
            };
            if stream.set_nonblocking(true).is_err() {
                continue;
            }
            let conn = Conn::new(stream, REQUEST_BYTES_MAX);
            let place = self.clients.insert(Client { conn, streaming: false, held: false });
            places.push(place);
            let added = self.clients.at(place).map(|c| {
                let event = EpollEvent::new(c.conn.interest(), Token::Control(place).pack());
                epoll.add(c.conn.fd(), event)
            });
            if added != Some(Ok(())) {
                self.close(place);
            }
        }
        (places, Ok(()))
    }

    /// Something happened on the connection at `place`. `false`: it is broken.
    pub(crate) fn handle_client(&mut self, all: &mut Allowance, place: u16) -> bool {
        let Some(client) = self.clients.at(place) else { return false };
        let alive = client.conn.flush(all).is_ok() && client.conn.fill().is_ok();
        if client.streaming {
            // The input of a streaming client does not matter, only its end.
            client.conn.discard_input();
        }
        alive
    }

    /// The next request of the client at `place`, if one is complete and the last was answered.
    pub(crate) fn poll_request(&mut self, place: u16) -> Option<Result<Request, Reply>> {
        let client = self.clients.at(place)?;
        if client.streaming || client.held || client.conn.pending() > 0 {
            return None;
        }
        if let Some(line) = client.conn.take_until(b"\n") {
            return Some(serde_json::from_slice(&line).map_err(|e| Reply::Error {
                what: format!("not a request: {e}"),
                fix: "use a `nightporter` of the daemon's version".into(),
            }));
        }
        if client.conn.is_overfull() {
            client.conn.close_when_flushed();
            return Some(Err(Reply::Error {
                what: format!("a request has at most {REQUEST_BYTES_MAX} bytes"),
                fix: "send one JSON object per line".into(),
            }));
        }
        None
    }

    /// The request of the client at `place` is answered later.
    pub(crate) fn hold(&mut self, place: u16) {
        if let Some(client) = self.clients.at(place) {
            client.held = true;
        }
    }

    /// It is answered now. `false`: that client is gone.
    pub(crate) fn release(&mut self, place: u16) -> bool {
        self.clients.at(place).is_some_and(|client| std::mem::take(&mut client.held))
    }

    /// Answers the client at `place`.
    pub(crate) fn reply(&mut self, place: u16, reply: &Reply) {
        let Some(client) = self.clients.at(place) else { return };
        client.streaming = matches!(reply, Reply::Stream {});
        client.conn.queue(line(reply));
    }

    /// Answers the client at `place` with a line that others get too.
    pub(crate) fn answer(&mut self, place: u16, line: Arc<Vec<u8>>) {
        if let Some(client) = self.clients.at(place) {
            client.conn.queue_shared(line);
        }
    }

    /// Whether a streaming client has room for more; `None` if it is gone.
    pub(crate) fn stream_room(&mut self, place: u16) -> Option<bool> {
        let client = self.clients.at(place)?;
        Some(client.conn.pending() < STREAM_PENDING_MAX)
    }

    /// Sends stream bytes.
    pub(crate) fn stream(&mut self, place: u16, bytes: Vec<u8>) {
        if let Some(client) = self.clients.at(place) {
            client.conn.queue(bytes);
        }
    }

    /// Writes the queued output for `place`. `false`: the connection is closed now. A client that
    /// waits for an answer is not read until then, because its input, or its end, would wake the
    /// worker over and over.
    pub(crate) fn finish(&mut self, epoll: &Epoll, all: &mut Allowance, place: u16) -> bool {
        let Some(Client { conn, held, .. }) = self.clients.at(place) else { return false };
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

    pub(crate) fn close(&mut self, place: u16) {
        self.clients.remove(place);
        if self.reserve.is_none() {
            self.reserve = self.listener.fd().try_clone_to_owned().ok();
        }
    }
}
