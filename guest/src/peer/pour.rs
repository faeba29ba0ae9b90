//! Streams that are longer than memory: written by a thread of their own, compared as they are
//! read.

use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};

use crate::data::Source;

/// The stream repeats after so many bytes. It is no power of two, so that blocks or pages that are
/// lost or come twice are noticed.
const PERIOD: usize = 1_000_003;
/// A write, or a read.
const PIECE: usize = 64 << 10;

/// A stream that is being written.
#[derive(Debug)]
pub(super) struct Pouring {
    written: Arc<AtomicUsize>,
    thread: Option<JoinHandle<io::Result<()>>>,
}

impl Pouring {
    /// Begins.
    pub(super) fn start(stream: &TcpStream, bytes: usize, seed: u64) -> io::Result<Self> {
        let (mut stream, written) = (stream.try_clone()?, Arc::new(AtomicUsize::new(0)));
        let counter = Arc::clone(&written);
        let thread = thread::spawn(move || {
            let source = source(seed);
            let mut at = 0;
            while at < bytes {
                let piece = piece(&source, seed, at);
                let sent = stream.write(&piece[..piece.len().min(bytes - at)])?;
                at += sent;
                counter.store(at, Ordering::Relaxed);
            }
            Ok(())
        });
        Ok(Self { written, thread: Some(thread) })
    }

    /// Bytes that the kernel has taken so far; or why it takes no more.
    pub(super) fn written(&mut self) -> io::Result<usize> {
        if self.thread.as_ref().is_some_and(JoinHandle::is_finished) {
            self.finish()?;
        }
        Ok(self.written.load(Ordering::Relaxed))
    }

    /// Waits until all is written.
    pub(super) fn finish(&mut self) -> io::Result<()> {
        self.thread.take().map_or(Ok(()), |thread| thread.join().expect("does not panic"))
    }
}

/// Reads so many bytes; returns whether they match this seed.
pub(super) fn drain(mut stream: &TcpStream, bytes: usize, seed: u64) -> io::Result<bool> {
    let (source, mut got) = (source(seed), vec![0; PIECE]);
    let mut at = 0;
    while at < bytes {
        let wanted = piece(&source, seed, at);
        let len = wanted.len().min(bytes - at);
        let count = match stream.read(&mut got[..len])? {
            0 => return Err(ErrorKind::UnexpectedEof.into()),
            count => count,
        };
        if got[..count] != wanted[..count] {
            return Ok(false);
        }
        at += count;
    }
    Ok(true)
}

fn source(seed: u64) -> Source {
    let mut source = Source::new();
    source.reach(seed, PERIOD);
    source
}

/// The bytes at this place of the stream, at most [`PIECE`].
fn piece(source: &Source, seed: u64, at: usize) -> &[u8] {
    let rest = &source.piece(seed, PERIOD)[at % PERIOD..];
    &rest[..rest.len().min(PIECE)]
}
