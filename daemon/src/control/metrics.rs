//! Prometheus metrics over HTTP: one GET per connection, bounded, inside control's event loop.

mod families;
mod formats;

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use nightporter_api::Status;
use nightporter_core::time::{Duration, Instant};
use nix::sys::epoll::{Epoll, EpollEvent};

use super::conn::{ACCEPTS_PER_TURN, Allowance, Clients, Conn, accepted};
use crate::log::Limit;
use crate::token::Token;
use crate::vhost::listener::somebody_waits;
pub use formats::Format;

/// Scrapes within this time get the same answer: everybody on the host may ask, and an answer
/// takes a walk over all flows.
const RENDER_INTERVAL: Duration = Duration::from_millis(500);
/// Connections at a time. Everybody on the host may open some and say nothing, and the idlest makes
/// room for a new one: with so many places a scrape that is sent within milliseconds is there
/// before it has to.
const SCRAPERS_MAX: usize = 256;
/// Bytes of an HTTP request's head at most.
const REQUEST_BYTES_MAX: usize = 8192;

/// The listener and its clients.
#[derive(Debug)]
pub(crate) struct MetricsServer {
    listener: TcpListener,
    clients: Clients<Conn<TcpStream>>,
    /// The last answer to a scrape, and when it was made.
    rendered: Option<(Instant, Scrape)>,
    /// Places of clients whose scrape waits for a status, and the formats that they want.
    waiting: Vec<(u16, Format)>,
    log: Limit,
}

impl MetricsServer {
    pub(crate) fn new(address: SocketAddr) -> io::Result<Self> {
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        Ok(Self {
            listener,
            clients: Clients::for_at_most(SCRAPERS_MAX),
            rendered: None,
            waiting: Vec::new(),
            log: Limit::new(),
        })
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }

    #[cfg(test)]
    pub(crate) fn address(&self) -> SocketAddr {
        self.listener.local_addr().unwrap()
    }

    /// Accepts waiting clients, whose requests may be there already. Errors: a client still waits,
    /// and cannot be accepted.
    pub(crate) fn handle_listener(
        &mut self,
        epoll: &Epoll,
        all: &mut Allowance,
        now: Instant,
    ) -> io::Result<()> {
        for _ in 0..ACCEPTS_PER_TURN {
            let accepted = accepted(self.listener.accept().map(|(stream, _)| stream));
            let stream = match accepted {
                Ok(Some(stream)) => stream,
                Ok(None) => return Ok(()),
                Err(_) if !somebody_waits(&self.listener) => return Ok(()),
                Err(error) => {
                    if self.log.allows() {
                        tracing::warn!(%error, "metrics: takes no connections for a second");
                    }
                    return Err(error);
                }
            };
            if stream.set_nonblocking(true).is_err() {
                continue;
            }
            // A user that has asked waits for the next answer, which is there soon.
            let has_asked = |place| self.waiting.iter().any(|(waits, _)| *waits == place);
            let conn = Conn::new(stream, REQUEST_BYTES_MAX);
            let place = self.clients.insert_beside(conn, has_asked);
            self.waiting.retain(|(waits, _)| *waits != place);
            let added = self.clients.at(place).map(|conn| {
                let event = EpollEvent::new(conn.interest(), Token::Metrics(place).pack());
                epoll.add(conn.fd(), event)
            });
            if added == Some(Ok(())) {
                self.handle_client(epoll, all, now, place);
            } else {
                self.clients.remove(place);
            }
        }
        Ok(())
    }

    /// Some scrape waits for [`Self::handle_answer`].
    pub(super) fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Something happened on the connection at `place`; a complete request gets the last answer, or
    /// waits for the next.
    pub(crate) fn handle_client(
        &mut self,
        epoll: &Epoll,
        all: &mut Allowance,
        now: Instant,
        place: u16,
    ) {
        let Self { clients, rendered, waiting, .. } = self;
        let Some(conn) = clients.at(place) else { return };
        let mut alive = conn.fill().is_ok();
        if let Some(head) = conn.take_until(b"\r\n\r\n") {
            let fresh = |r: &&(Instant, _)| now.since(r.0) < RENDER_INTERVAL;
            match (is_metrics_request(&head), rendered.as_ref().filter(fresh)) {
                (Err(refusal), _) => end_with(conn, Arc::new(refusal)),
                (Ok(format), Some((_, answer))) => end_with(conn, answer.of(format)),
                (Ok(format), None) => waiting.push((place, format)),
            }
        } else if conn.is_overfull() {
            let refusal = response("431 Request Header Fields Too Large", "text/plain", "");
            end_with(conn, Arc::new(refusal));
        }
        let waits = waiting.iter().any(|(waits, _)| *waits == place);
        alive = alive && conn.flush(all).is_ok() && (waits || !conn.is_done());
        self.finish(epoll, place, alive);
    }

    /// Answers the clients that wait for it.
    pub(super) fn handle_answer(
        &mut self,
        epoll: &Epoll,
        all: &mut Allowance,
        now: Instant,
        answer: Scrape,
    ) {
        self.answer_all(epoll, all, |format| answer.of(format));
        self.rendered = Some((now, answer));
    }

    /// There is none for them.
    pub(super) fn handle_failure(&mut self, epoll: &Epoll, all: &mut Allowance) {
        let answer = response("500 Internal Server Error", "text/plain", "see the log\n");
        let answer = Arc::new(answer);
        self.answer_all(epoll, all, |_| Arc::clone(&answer));
    }

    fn answer_all(
        &mut self,
        epoll: &Epoll,
        all: &mut Allowance,
        answer: impl Fn(Format) -> Arc<Vec<u8>>,
    ) {
        for (place, format) in std::mem::take(&mut self.waiting) {
            let Some(conn) = self.clients.at(place) else { continue };
            end_with(conn, answer(format));
            let alive = conn.flush(all).is_ok() && !conn.is_done();
            self.finish(epoll, place, alive);
        }
    }

    /// Waits for the next input on the connection at `place`, or forgets it.
    fn finish(&mut self, epoll: &Epoll, place: u16, mut alive: bool) {
        let Some(conn) = self.clients.at(place) else { return };
        if alive {
            let mut event = EpollEvent::new(conn.interest(), Token::Metrics(place).pack());
            alive = epoll.modify(conn.fd(), &mut event).is_ok();
        }
        if !alive {
            self.waiting.retain(|(waits, _)| *waits != place);
            self.clients.remove(place);
        }
    }
}

/// Reads a request's head: the format in which it asks for the metrics.
///
/// # Errors
/// It does not ask for them: the response to it.
pub fn is_metrics_request(head: &[u8]) -> Result<Format, Vec<u8>> {
    let line = head.split(|&b| b == b'\r').next().unwrap_or_default();
    let mut words = line.split(|&b| b == b' ');
    match (words.next(), words.next()) {
        (Some(b"GET"), Some(b"/metrics")) => Ok(Format::accepted(head)),
        (Some(b"GET"), _) => Err(response("404 Not Found", "text/plain", "see /metrics\n")),
        _ => Err(response("405 Method Not Allowed", "text/plain", "GET /metrics\n")),
    }
}

/// The last output on a connection.
fn end_with(conn: &mut Conn<TcpStream>, answer: Arc<Vec<u8>>) {
    conn.queue_shared(answer);
    conn.close_when_flushed();
}

/// The answer to a scrape, in each format.
#[derive(Debug)]
pub(super) struct Scrape {
    open_metrics: Arc<Vec<u8>>,
    text: Arc<Vec<u8>>,
}

impl Scrape {
    pub(super) fn new(status: Status) -> Self {
        let body = families::render(status);
        let of =
            |format: Format, body: &str| Arc::new(response("200 OK", format.content_type(), body));
        Self {
            text: of(Format::Text, &formats::as_text(&body)),
            open_metrics: of(Format::OpenMetrics, &body),
        }
    }

    fn of(&self, format: Format) -> Arc<Vec<u8>> {
        Arc::clone(match format {
            Format::OpenMetrics => &self.open_metrics,
            Format::Text => &self.text,
        })
    }
}

fn response(status: &str, kind: &str, body: &str) -> Vec<u8> {
    let length = body.len();
    format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n\
         Connection: close\r\n\r\n{body}"
    )
    .into_bytes()
}

#[cfg(test)]
mod tests;
