//! HTTP/1.1 (RFC 9112) as etcd's gateway speaks it: a POST, an answer of known length or in chunks,
//! or one that never ends.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, StreamOwned};

use crate::mail::Bell;

/// Longest silence of a member within an answer, and longest time of the whole answer.
const SILENT_MAX: Duration = Duration::from_secs(2);
const ANSWER_MAX: Duration = Duration::from_secs(10);
/// Least time for an answer, however short the lease is.
const ANSWER_MIN: Duration = Duration::from_secs(1);
/// Longest time of requests after the registry was dropped.
const STOP_MAX: Duration = Duration::from_secs(2);
/// Most bytes of an answer's head, and of its body or one line of it.
const HEAD_MAX: usize = 16 << 10;
const BODY_MAX: usize = 16 << 20;

/// A member of the cluster.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Endpoint {
    /// The member's address and port.
    pub address: SocketAddr,
    /// Whether the member speaks TLS.
    pub is_tls: bool,
}

/// Opens TCP connections to members, which are named by their place in the list. It returns within
/// a second or two, and the connection notices a dead peer by itself (SO_KEEPALIVE).
#[derive(Clone)]
pub struct Connector(Arc<Connect>);

type Connect = dyn Fn(usize) -> io::Result<TcpStream> + Send + Sync;

impl Connector {
    /// A connector that calls `connect`.
    pub fn new(connect: impl Fn(usize) -> io::Result<TcpStream> + Send + Sync + 'static) -> Self {
        Self(Arc::new(connect))
    }

    pub(super) fn connect(&self, member: usize) -> io::Result<TcpStream> {
        (self.0)(member)
    }
}

impl fmt::Debug for Connector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Connector")
    }
}

/// Time limits of a member.
#[derive(Clone, Debug)]
pub(super) struct Patience {
    answer: Duration,
    stop: Stop,
}

impl Patience {
    /// Limits for a lease of `ttl`: after a member that took too long, another can still renew it.
    pub(super) fn new(ttl: Duration, stop: Stop) -> Self {
        Self { answer: (ttl / 3).clamp(ANSWER_MIN, ANSWER_MAX), stop }
    }
}

/// The order to end requests, which cannot be taken back.
#[derive(Clone, Debug)]
pub(super) struct Stop {
    bell: Bell,
    /// The deadline; unset: requests go on.
    until: Arc<OnceLock<Instant>>,
}

impl Stop {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { bell: Bell::new()?, until: Arc::default() })
    }

    pub(super) fn say(&self) {
        let _ = self.until.set(Instant::now() + STOP_MAX);
        self.bell.ring();
    }
}

/// A socket that waits until a certain time.
struct Socket {
    tcp: TcpStream,
    /// `None`: it does not wait.
    until: Option<Instant>,
    patience: Patience,
}

impl Socket {
    /// Runs an operation as soon as the socket is ready.
    fn do_when<T>(
        &mut self,
        ready: PollFlags,
        mut something: impl FnMut(&mut TcpStream) -> io::Result<T>,
    ) -> io::Result<T> {
        let stop = &self.patience.stop;
        loop {
            match (something(&mut self.tcp), self.until) {
                (Err(e), Some(until)) if e.kind() == io::ErrorKind::WouldBlock => {
                    let stops = stop.until.get();
                    let until = stops.map_or(until, |stops| until.min(*stops));
                    let left = until.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return Err(io::Error::new(io::ErrorKind::TimedOut, "no answer"));
                    }
                    let left = Timespec::try_from(left).ok();
                    let mut fds = vec![PollFd::new(&self.tcp, ready)];
                    // The bell stays readable, so later polls see it too.
                    let bell = || PollFd::from_borrowed_fd(stop.bell.fd(), PollFlags::IN);
                    fds.extend(stops.is_none().then(bell));
                    let _ = poll(&mut fds, left.as_ref());
                }
                (Err(e), _) if e.kind() == io::ErrorKind::Interrupted => {}
                (result, _) => return result,
            }
        }
    }
}

impl Read for Socket {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.do_when(PollFlags::IN, |tcp| tcp.read(buf))
    }
}

impl Write for Socket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.do_when(PollFlags::OUT, |tcp| tcp.write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The bytes of a connection.
enum Stream {
    Plain(Socket),
    Tls(Box<StreamOwned<ClientConnection, Socket>>),
}

impl Stream {
    fn socket(&self) -> &Socket {
        match self {
            Self::Plain(socket) => socket,
            Self::Tls(tls) => tls.get_ref(),
        }
    }

    fn wait_until(&mut self, until: Option<Instant>) {
        match self {
            Self::Plain(socket) => socket.until = until,
            Self::Tls(tls) => tls.get_mut().until = until,
        }
    }

    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(socket) => socket.read(buf),
            Self::Tls(tls) => tls.read(buf),
        }
    }

    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::Plain(socket) => socket.write_all(bytes),
            Self::Tls(tls) => tls.write_all(bytes).and_then(|()| tls.flush()),
        }
    }
}

/// A connection to a member.
pub(super) struct Conn {
    endpoint: Endpoint,
    stream: Stream,
    patience: Patience,
    /// Bytes that were read and not used yet.
    rest: Vec<u8>,
}

/// How the body of an answer ends.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Length {
    Known(usize),
    Chunked,
}

/// The first lines of an answer.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Head {
    status: u16,
    length: Length,
}

impl Conn {
    pub(super) fn open(
        endpoint: Endpoint,
        tcp: TcpStream,
        tls: Option<&Arc<ClientConfig>>,
        patience: &Patience,
    ) -> io::Result<Self> {
        tcp.set_nonblocking(true)?;
        let socket = Socket { tcp, until: None, patience: patience.clone() };
        let stream = match tls.filter(|_| endpoint.is_tls) {
            None if endpoint.is_tls => return Err(io::Error::other("no CA for TLS")),
            None => Stream::Plain(socket),
            Some(config) => {
                let name = ServerName::from(endpoint.address.ip());
                let connection = ClientConnection::new(Arc::clone(config), name);
                let connection = connection.map_err(io::Error::other)?;
                Stream::Tls(Box::new(StreamOwned::new(connection, socket)))
            }
        };
        Ok(Self { endpoint, stream, patience: patience.clone(), rest: Vec::new() })
    }

    /// Sends a request and waits for the answer: status and body. Errors: `FileTooLarge` for more
    /// than [`BODY_MAX`] bytes; after any error the connection is unusable.
    pub(super) fn ask(
        &mut self,
        path: &str,
        token: Option<&str>,
        body: &[u8],
    ) -> io::Result<(u16, Vec<u8>)> {
        let end = Instant::now() + self.patience.answer;
        self.post(path, token, body)?;
        let head = self.head(end)?;
        let mut chunks = Chunks::default();
        let mut whole = Vec::new();
        loop {
            match head.length {
                Length::Known(len) if len > BODY_MAX => return Err(too_large()),
                Length::Known(len) if self.rest.len() >= len => {
                    let after = self.rest.split_off(len);
                    return Ok((head.status, std::mem::replace(&mut self.rest, after)));
                }
                Length::Known(_) => {}
                Length::Chunked => {
                    chunks.take(&mut self.rest, &mut whole)?;
                    if chunks.is_at_end() {
                        return Ok((head.status, whole));
                    }
                }
            }
            if self.rest.len() + whole.len() > BODY_MAX {
                return Err(too_large());
            }
            self.fill(end)?;
        }
    }

    /// Sends a request whose answer is an endless stream.
    pub(super) fn follow(
        mut self,
        path: &str,
        token: Option<&str>,
        body: &[u8],
    ) -> io::Result<Lines> {
        let end = Instant::now() + self.patience.answer;
        self.post(path, token, body)?;
        let head = self.head(end)?;
        if head.status != 200 || head.length != Length::Chunked {
            return Err(io::Error::other(format!("HTTP status {} to a watch", head.status)));
        }
        self.stream.wait_until(None);
        Ok(Lines { conn: self, chunks: Chunks::default(), text: Vec::new() })
    }

    fn post(&mut self, path: &str, token: Option<&str>, body: &[u8]) -> io::Result<()> {
        let token = token.map_or_else(String::new, |token| format!("Authorization: {token}\r\n"));
        let host = self.endpoint.address;
        // A member that knows no leader is to say so instead of keeping silent.
        let head = format!(
            "POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n\
             Grpc-Metadata-hasleader: true\r\n{token}Content-Length: {}\r\n\r\n",
            body.len()
        );
        self.stream.wait_until(Some(Instant::now() + SILENT_MAX.min(self.patience.answer)));
        self.stream.write_all(&[head.as_bytes(), body].concat())
    }

    fn head(&mut self, end: Instant) -> io::Result<Head> {
        loop {
            if let Some(end) = find(&self.rest, b"\r\n\r\n") {
                let head = parse_head(&self.rest[..end])?;
                self.rest.drain(..end + 4);
                return Ok(head);
            }
            if self.rest.len() > HEAD_MAX {
                return Err(io::Error::other("not HTTP"));
            }
            self.fill(end)?;
        }
    }

    /// Reads more bytes, until `end` at the latest.
    fn fill(&mut self, end: Instant) -> io::Result<()> {
        self.stream.wait_until(Some(end.min(Instant::now() + SILENT_MAX)));
        self.read_some()
    }

    fn read_some(&mut self) -> io::Result<()> {
        let mut buf = [0; 1 << 14];
        match self.stream.read(&mut buf)? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            n => {
                self.rest.extend_from_slice(&buf[..n]);
                Ok(())
            }
        }
    }
}

/// An endless answer, line by line.
pub(super) struct Lines {
    conn: Conn,
    chunks: Chunks,
    text: Vec<u8>,
}

impl Lines {
    /// Readable when there may be lines.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.conn.stream.socket().tcp.as_fd()
    }

    /// The lines received since. After an error no more lines come.
    pub(super) fn take(&mut self) -> io::Result<Vec<Vec<u8>>> {
        let ended = loop {
            self.chunks.take(&mut self.conn.rest, &mut self.text)?;
            if self.chunks.is_at_end() || self.text.len() > BODY_MAX {
                break Some(io::ErrorKind::UnexpectedEof.into());
            }
            match self.conn.read_some() {
                Ok(()) => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break None,
                Err(e) => break Some(e),
            }
        };
        let mut lines = Vec::new();
        let mut at = 0;
        while let Some(len) = self.text[at..].iter().position(|byte| *byte == b'\n') {
            lines.push(self.text[at..at + len].to_vec());
            at += len + 1;
        }
        self.text.drain(..at);
        match ended {
            Some(e) if lines.is_empty() => Err(e),
            _ => Ok(lines), // the error comes next time
        }
    }
}

/// Where a chunked body is (RFC 9112 section 7.1).
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
enum Chunks {
    /// Before the length of a chunk.
    #[default]
    Length,
    /// Within a chunk: bytes of data to come.
    Data(usize),
    /// Behind the data.
    AfterData,
    /// Behind the last chunk.
    Trailer,
    End,
}

impl Chunks {
    const fn is_at_end(self) -> bool {
        matches!(self, Self::End)
    }

    /// Moves the data in `bytes` to `data`.
    fn take(&mut self, bytes: &mut Vec<u8>, data: &mut Vec<u8>) -> io::Result<()> {
        let bad = || io::Error::other("a chunk without a length");
        let mut at = 0;
        while *self != Self::End {
            let left = &bytes[at..];
            if let Self::Data(n) = *self {
                let n_now = n.min(left.len());
                data.extend_from_slice(&left[..n_now]);
                at += n_now;
                *self = if n_now < n { Self::Data(n - n_now) } else { Self::AfterData };
                if n_now < n {
                    break;
                }
                continue;
            }
            let Some(len) = find(left, b"\r\n") else {
                if left.len() > HEAD_MAX {
                    return Err(bad());
                }
                break;
            };
            let line = &left[..len];
            at += len + 2;
            *self = match *self {
                Self::Length => {
                    let digits = line.split(|byte| *byte == b';').next().unwrap_or_default();
                    let digits = std::str::from_utf8(digits).map_err(|_| bad())?;
                    match usize::from_str_radix(digits.trim(), 16).map_err(|_| bad())? {
                        0 => Self::Trailer,
                        n => Self::Data(n),
                    }
                }
                Self::AfterData => Self::Length,
                Self::Trailer if line.is_empty() => Self::End,
                other => other,
            };
        }
        bytes.drain(..at);
        Ok(())
    }
}

fn too_large() -> io::Error {
    io::Error::new(io::ErrorKind::FileTooLarge, "an answer without an end")
}

fn find(bytes: &[u8], what: &[u8]) -> Option<usize> {
    bytes.windows(what.len()).position(|window| window == what)
}

fn parse_head(head: &[u8]) -> io::Result<Head> {
    let bad = || io::Error::other("not HTTP");
    let head = std::str::from_utf8(head).map_err(|_| bad())?;
    let mut lines = head.split("\r\n");
    let status = lines.next().and_then(|line| line.strip_prefix("HTTP/1."));
    let status = status.and_then(|line| line.get(2..5)?.parse().ok()).ok_or_else(bad)?;
    let mut length = Length::Known(0);
    for (name, value) in lines.filter_map(|line| line.split_once(':')) {
        if name.eq_ignore_ascii_case("content-length") {
            length = Length::Known(value.trim().parse().map_err(|_| bad())?);
        } else if name.eq_ignore_ascii_case("transfer-encoding") {
            length = Length::Chunked;
            break; // it overrides the length (section 6.3)
        }
    }
    Ok(Head { status, length })
}

#[cfg(test)]
mod tests {
    use std::net::{Shutdown, TcpListener};

    use super::*;

    #[test]
    fn a_head_says_how_the_body_ends() {
        let head = |text: &str| parse_head(text.as_bytes()).ok();
        let known = |status, n| Some(Head { status, length: Length::Known(n) });
        assert_eq!(head("HTTP/1.1 200 OK\r\ncontent-Length: 17"), known(200, 17));
        assert_eq!(head("HTTP/1.1 503 Service Unavailable"), known(503, 0));
        let chunked = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 3";
        assert_eq!(head(chunked), Some(Head { status: 200, length: Length::Chunked }));
        for bad in
            ["", "HTTP/1.1", "HTTP/1.1 20", "SSH-2.0-x 200", "HTTP/1.1 200\r\nContent-Length: x"]
        {
            assert_eq!(head(bad), None, "{bad}");
        }
    }

    #[test]
    fn chunks_are_put_together_wherever_they_are_cut() {
        let body = b"4;x=y\r\nabcd\r\n00b\r\nefghi\r\njklm\r\n0\r\nA: b\r\n\r\nnext";
        for cut in 0..body.len() {
            let (mut chunks, mut bytes, mut data) = (Chunks::default(), Vec::new(), Vec::new());
            for part in [&body[..cut], &body[cut..]] {
                bytes.extend_from_slice(part);
                chunks.take(&mut bytes, &mut data).unwrap();
            }
            assert_eq!(data, b"abcdefghi\r\njklm", "cut at {cut}");
            assert!(chunks.is_at_end());
            assert_eq!(bytes, b"next");
        }
        let mut bad = b"zz\r\n".to_vec();
        assert!(Chunks::default().take(&mut bad, &mut Vec::new()).is_err());
        let mut endless = vec![b'1'; HEAD_MAX + 1];
        assert!(Chunks::default().take(&mut endless, &mut Vec::new()).is_err());
    }

    /// A connection to a member that has said this, and is gone.
    fn conn(said: &str) -> Conn {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let near = TcpStream::connect(address).unwrap();
        let (mut far, _) = listener.accept().unwrap();
        far.write_all(said.as_bytes()).unwrap();
        far.shutdown(Shutdown::Write).unwrap();
        let patience = Patience::new(Duration::from_secs(60), Stop::new().unwrap());
        Conn::open(Endpoint { address, is_tls: false }, near, None, &patience).unwrap()
    }

    #[test]
    fn a_body_that_says_that_it_is_too_long_is_not_waited_for() {
        let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", BODY_MAX + 1);
        let error = conn(&head).ask("/", None, b"").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::FileTooLarge);
    }

    #[test]
    fn an_endless_answer_that_ends_gives_its_lines_and_then_an_error() {
        let said = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nab\nc\r\n";
        let mut lines = conn(said).follow("/", None, b"").unwrap();
        // The end comes after the bytes, perhaps in a call of its own.
        let mut got = vec![];
        let kinds: Vec<_> = (0..10)
            .filter_map(|_| {
                wait_for(&lines);
                lines.take().map(|some| got.extend(some)).err()
            })
            .map(|error| error.kind())
            .collect();
        assert_eq!(got, [b"ab"]);
        assert!(kinds.len() > 7 && kinds.iter().all(|kind| *kind == io::ErrorKind::UnexpectedEof));
    }

    fn wait_for(lines: &Lines) {
        let limit = Timespec { tv_sec: 60, tv_nsec: 0 };
        let mut fds = [PollFd::from_borrowed_fd(lines.fd(), PollFlags::IN)];
        assert_eq!(poll(&mut fds, Some(&limit)).unwrap(), 1);
    }
}
