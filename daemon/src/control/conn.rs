//! Small non-blocking connections inside the event loop: bounded in number, in their requests and
//! in their unread replies, so that no client can hurt the data path.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use nix::sys::epoll::EpollFlags;

/// Connections of one kind that may be open at a time; the idlest makes room for a new one.
pub(crate) const CLIENTS_MAX: usize = 16;
/// Connections accepted per wake-up, so that a client that connects all the time delays nothing
/// else.
pub(crate) const ACCEPTS_PER_TURN: usize = CLIENTS_MAX;
/// Bytes taken from a socket in one go.
const READ_CHUNK: usize = 4096;
/// Bytes written in one turn: an answer about 2,000 VMs is megabytes, and its readers may take them
/// as fast as they come.
const WRITES_MAX: usize = 128 << 10;
/// The least that a client gets in one turn when these are used up, so that no client waits for the
/// end of the others.
const WRITE_MIN: usize = 4 << 10;

/// Bytes that may still be written to all connections in this turn.
#[derive(Debug)]
pub(crate) struct Allowance(usize);

impl Default for Allowance {
    fn default() -> Self {
        Self(WRITES_MAX)
    }
}

/// A connection with bounded buffers. Register it level-triggered for its [`Conn::interest`].
#[derive(Debug)]
pub(crate) struct Conn<S> {
    stream: S,
    input: Vec<u8>,
    input_max: usize,
    output: VecDeque<Arc<Vec<u8>>>,
    /// Bytes in it, less those of its first piece that are written.
    pending: usize,
    written: usize,
    eof: bool,
    closing: bool,
}

impl<S: Read + Write + AsFd> Conn<S> {
    /// Over a non-blocking stream whose peer may send `input_max` bytes ahead of its reader.
    pub(crate) fn new(stream: S, input_max: usize) -> Self {
        Self {
            stream,
            input: Vec::new(),
            input_max,
            output: VecDeque::new(),
            pending: 0,
            written: 0,
            eof: false,
            closing: false,
        }
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    /// The event to wait for: room if there is output, else input.
    pub(crate) fn interest(&self) -> EpollFlags {
        if self.pending() > 0 { EpollFlags::EPOLLOUT } else { EpollFlags::EPOLLIN }
    }

    /// Reads once. A peer that does not read its answers is not read from either.
    pub(crate) fn fill(&mut self) -> io::Result<()> {
        if self.pending() > 0 || self.closing || self.input.len() >= self.input_max {
            return Ok(());
        }
        let mut chunk = [0; READ_CHUNK];
        let want = READ_CHUNK.min(self.input_max - self.input.len());
        match self.stream.read(&mut chunk[..want]) {
            Ok(0) => self.eof = true,
            Ok(n) => self.input.extend_from_slice(&chunk[..n]),
            Err(e) if matches!(e.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) => {}
            Err(e) => return Err(e),
        }
        Ok(())
    }

    /// Takes the input up to and with the first `end`, if that has come. None once it is closing.
    pub(crate) fn take_until(&mut self, end: &[u8]) -> Option<Vec<u8>> {
        if self.closing {
            return None;
        }
        let at = self.input.windows(end.len()).position(|w| w == end)?;
        Some(self.input.drain(..at + end.len()).collect())
    }

    /// Discards the peer's input.
    pub(crate) fn discard_input(&mut self) {
        self.input.clear();
    }

    /// Whether the peer has sent as much as it may, so that no request can become complete.
    pub(crate) fn is_overfull(&self) -> bool {
        !self.closing && self.input.len() >= self.input_max
    }

    /// Queues bytes for the peer. The caller bounds them: see [`Self::pending`].
    pub(crate) fn queue(&mut self, bytes: Vec<u8>) {
        self.queue_shared(Arc::new(bytes));
    }

    /// The same for bytes that others get too.
    pub(crate) fn queue_shared(&mut self, bytes: Arc<Vec<u8>>) {
        if !bytes.is_empty() {
            self.pending += bytes.len();
            self.output.push_back(bytes);
        }
    }

    /// Bytes queued and not yet taken by the kernel.
    pub(crate) const fn pending(&self) -> usize {
        self.pending
    }

    /// Closes the connection once all output is out.
    pub(crate) fn close_when_flushed(&mut self) {
        self.closing = true;
    }

    /// Writes as much as the kernel takes and `all` allows: while there is more, there is an event
    /// as soon as it has room.
    pub(crate) fn flush(&mut self, all: &mut Allowance) -> io::Result<()> {
        let mut left = all.0.max(WRITE_MIN);
        while left > 0
            && let Some(first) = self.output.front()
        {
            let rest = &first[self.written..];
            match self.stream.write(&rest[..rest.len().min(left)]) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(n) => {
                    self.written += n;
                    self.pending -= n;
                    left -= n;
                    all.0 = all.0.saturating_sub(n);
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                Err(e) => return Err(e),
            }
            if self.written == first.len() {
                self.written = 0;
                self.output.pop_front();
            }
        }
        Ok(())
    }

    /// Whether there is nothing left to do: close it.
    pub(crate) fn is_done(&self) -> bool {
        self.pending() == 0 && (self.closing || self.eof)
    }
}

/// The next connection out of an `accept()`; `None` when there is no more now. Errors: there may
/// be, but not for us.
pub(crate) fn accepted<S>(result: io::Result<S>) -> io::Result<Option<S>> {
    // Interrupted or aborted by the peer: the listener stays readable if there are more.
    let none = [ErrorKind::WouldBlock, ErrorKind::Interrupted, ErrorKind::ConnectionAborted];
    match result {
        Ok(stream) => Ok(Some(stream)),
        Err(e) if none.contains(&e.kind()) => Ok(None),
        Err(e) => Err(e),
    }
}

/// The places for the connections of one kind.
#[derive(Debug)]
pub(crate) struct Clients<C> {
    places: Vec<Option<(u64, C)>>,
    /// Counts uses, to find the idlest.
    clock: u64,
}

impl<C> Clients<C> {
    /// For [`CLIENTS_MAX`] of them.
    pub(crate) fn new() -> Self {
        Self::for_at_most(CLIENTS_MAX)
    }

    /// For so many.
    pub(crate) fn for_at_most(clients: usize) -> Self {
        Self { places: std::iter::repeat_with(|| None).take(clients).collect(), clock: 0 }
    }

    /// Takes out the client that was unused for longest; its place. Those at some places are left
    /// alone as long as there are others.
    pub(crate) fn remove_idlest(&mut self, stays: impl Fn(u16) -> bool) -> Option<u16> {
        let taken = (0..).zip(&self.places).filter_map(|(i, p)| Some((i, p.as_ref()?.0)));
        let (place, _) = taken.min_by_key(|(place, used)| (stays(*place), *used))?;
        self.remove(place);
        Some(place)
    }

    /// Puts a client into a free place, or into that of the one unused for longest. Those at some
    /// places are left alone as long as there are others.
    pub(crate) fn insert_beside(&mut self, client: C, stays: impl Fn(u16) -> bool) -> u16 {
        self.clock += 1;
        let rank = |(place, taken): &(u16, &Option<(u64, C)>)| {
            taken.as_ref().map_or((false, 0), |(used, _)| (stays(*place), *used))
        };
        let places = (0..).zip(&self.places);
        let place = places.min_by_key(rank).map_or(0, |(place, _)| place);
        self.places[usize::from(place)] = Some((self.clock, client));
        place
    }

    /// The client at `place`, which counts as used now.
    pub(crate) fn at(&mut self, place: u16) -> Option<&mut C> {
        self.clock += 1;
        let (used, client) = self.places[usize::from(place)].as_mut()?;
        *used = self.clock;
        Some(client)
    }

    /// The same, and it does not.
    pub(crate) fn get(&self, place: u16) -> Option<&C> {
        self.places[usize::from(place)].as_ref().map(|(_, client)| client)
    }

    pub(crate) fn remove(&mut self, place: u16) -> Option<C> {
        self.places[usize::from(place)].take().map(|(_, client)| client)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    fn pair(input_max: usize) -> (Conn<UnixStream>, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        (Conn::new(ours, input_max), theirs)
    }

    #[test]
    fn lines_come_out_whole_however_they_come_in() {
        let (mut conn, mut peer) = pair(100);
        peer.write_all(b"one\ntw").unwrap();
        conn.fill().unwrap();
        assert_eq!(conn.take_until(b"\n").unwrap(), b"one\n");
        assert_eq!(conn.take_until(b"\n"), None);
        peer.write_all(b"o\n").unwrap();
        drop(peer);
        conn.fill().unwrap();
        assert_eq!(conn.take_until(b"\n").unwrap(), b"two\n");
        assert!(!conn.is_done());
        conn.fill().unwrap();
        assert!(conn.is_done());
    }

    #[test]
    fn a_line_without_end_fills_its_buffer_and_no_more() {
        let (mut conn, mut peer) = pair(10_000);
        peer.write_all(&[b'x'; 60_000]).unwrap();
        for _ in 0..10 {
            conn.fill().unwrap();
        }
        assert!(conn.is_overfull());
        assert_eq!(conn.input.len(), 10_000);
    }

    #[test]
    fn a_peer_that_never_reads_is_not_read_from() {
        let (mut conn, mut peer) = pair(100);
        conn.queue(vec![1; 10 << 20]);
        conn.flush(&mut Allowance::default()).unwrap();
        assert!(conn.pending() > 0);
        peer.write_all(b"more\n").unwrap();
        conn.fill().unwrap();
        assert_eq!(conn.take_until(b"\n"), None);
    }

    #[test]
    fn a_long_answer_is_written_in_bounded_pieces_and_comes_whole() {
        let (mut conn, mut peer) = pair(100);
        let shared = Arc::new(vec![2; 3 * WRITES_MAX]);
        conn.queue(vec![1; 10]);
        conn.queue_shared(Arc::clone(&shared));
        conn.queue(Vec::new());
        conn.queue(vec![3]);
        let whole = [&[1; 10], &shared[..], &[3]].concat();
        let (mut got, mut buf) = (Vec::new(), vec![0; 2 * WRITES_MAX]);
        while conn.pending() > 0 {
            let before = conn.pending();
            conn.flush(&mut Allowance::default()).unwrap();
            assert!((1..=WRITES_MAX).contains(&(before - conn.pending())));
            let n = peer.read(&mut buf).unwrap();
            got.extend_from_slice(&buf[..n]);
        }
        drop(conn);
        peer.read_to_end(&mut got).unwrap();
        assert!(got == whole, "{} bytes of {}", got.len(), whole.len());
    }

    #[test]
    fn what_all_clients_get_in_a_turn_is_bounded_and_each_gets_some() {
        let mut pairs: Vec<_> = (0..CLIENTS_MAX).map(|_| pair(100)).collect();
        let shared = Arc::new(vec![1; 2 * WRITES_MAX]);
        let mut all = Allowance::default();
        let mut sum = 0;
        for (conn, _) in &mut pairs {
            conn.queue_shared(Arc::clone(&shared));
            conn.flush(&mut all).unwrap();
            let wrote = shared.len() - conn.pending();
            assert!(wrote >= WRITE_MIN, "{wrote}");
            sum += wrote;
        }
        assert!(sum <= WRITES_MAX + CLIENTS_MAX * WRITE_MIN, "{sum}");
    }

    #[test]
    fn the_idlest_client_makes_room_for_a_new_one() {
        let mut clients = Clients::new();
        for n in 0..CLIENTS_MAX {
            assert_eq!(usize::from(clients.insert_beside(n, |_| false)), n);
        }
        clients.at(0).unwrap();
        assert_eq!(clients.insert_beside(99, |_| false), 1);
        clients.remove(5);
        assert_eq!(clients.insert_beside(100, |_| false), 5);
        assert_eq!(clients.insert_beside(101, |_| false), 2);
        assert_eq!(clients.remove_idlest(|_| false), Some(3));
        assert_eq!(Clients::<()>::new().remove_idlest(|_| false), None);
    }

    #[test]
    fn those_that_stay_make_room_last() {
        let mut clients = Clients::for_at_most(4);
        assert_eq!([0, 1, 2, 3].map(|n| clients.insert_beside(n, |_| false)), [0, 1, 2, 3]);
        assert_eq!(clients.insert_beside(4, |place| place < 2), 2);
        assert_eq!(clients.insert_beside(5, |place| place < 3), 3);
        assert_eq!(clients.insert_beside(6, |_| true), 0);
        clients.remove(1);
        assert_eq!(clients.insert_beside(7, |_| true), 1);
        let freed = [0, 1, 2].map(|_| clients.remove_idlest(|place| place != 0));
        assert_eq!(freed, [Some(0), Some(2), Some(3)], "then by their age");
    }
}
