//! The data port: sink, source, echo and both at once (`nightporter_guest::data`).

use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::sync::{Mutex, RwLock, RwLockReadGuard};
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result};
use nightporter_guest::data::{self, Header, READ_ALL, Service, Source, Verdict, WATCHED_FILE};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sched::{CloneFlags, setns};

use crate::nic;

/// Connections served at a time. Workers wait in accept(), so a transfer starts no thread.
const WORKERS: usize = 10;

/// Largest payload a guest keeps, bytes: a bound on its memory.
const PAYLOAD_MAX: u64 = 100_000_000;

/// The data to send. All connections of a time read it.
static SOURCE: RwLock<Source> = RwLock::new(Source::new());

const LOCK: &str = "no panics under this lock";

/// Buffers are reused, so that page faults are not part of a measured transfer.
static BUFFERS: Mutex<Vec<Vec<u8>>> = Mutex::new(Vec::new());

/// Listens on every address of IPv4 and serves for ever. Returns once the port listens.
pub(crate) fn start() -> Result<()> {
    listen(Ipv4Addr::UNSPECIFIED.into())
}

fn listen(address: IpAddr) -> Result<()> {
    let listener = TcpListener::bind((address, data::PORT))
        .with_context(|| format!("listening on port {}", data::PORT))?;
    for _ in 0..WORKERS {
        let listener = listener.try_clone()?;
        thread::spawn(move || serve(&listener));
    }
    Ok(())
}

/// Likewise, also of IPv6, in a network namespace that ip(8) has made: that of a container, whose
/// processes these threads stand for.
pub(crate) fn start_inside(namespace: &str) -> Result<()> {
    let path = format!("/run/netns/{namespace}");
    let file = File::open(&path).context(path)?;
    let inside = thread::spawn(move || -> Result<()> {
        setns(&file, CloneFlags::CLONE_NEWNET).context("entering a network namespace")?;
        listen(Ipv6Addr::UNSPECIFIED.into()) // its threads are where this one is
    });
    inside.join().expect("does not panic")
}

fn serve(listener: &TcpListener) {
    loop {
        // A failed connection is the host's finding (it sees no verdict), not ours to survive by.
        let outcome = listener.accept().and_then(|(stream, _)| connection(stream));
        if let Err(error) = outcome {
            eprintln!("nightporter-lab-guest: data connection: {error}");
        }
    }
}

fn connection(mut stream: TcpStream) -> io::Result<()> {
    let accepted = Instant::now();
    stream.set_nodelay(true)?;
    let header = Header::read_from(&mut stream)?;
    if header.bytes > PAYLOAD_MAX {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "payload over the guest's limit"));
    }
    let length = usize::try_from(header.bytes).expect("PAYLOAD_MAX fits usize");
    match header.service {
        Service::Sink => with_buffer(length, |buffer| sink(&mut stream, header, buffer, accepted)),
        Service::Source => {
            stream.write_all(source(header.hash, length).piece(header.hash, length))?;
            finish(&mut stream)
        }
        Service::Both => with_buffer(length, |buffer| both(&mut stream, header, buffer, accepted)),
        Service::Echo => echo(&mut stream, header.bytes),
        Service::Pour => {
            data::pour(&mut stream);
            Ok(())
        }
        Service::Watched => {
            io::copy(&mut File::open(WATCHED_FILE)?, &mut stream)?;
            finish(&mut stream)
        }
    }
}

/// The source, which has so many bytes of this seed.
fn source(seed: u64, length: usize) -> RwLockReadGuard<'static, Source> {
    let source = SOURCE.read().expect(LOCK);
    if source.reaches(seed, length) {
        return source;
    }
    drop(source);
    SOURCE.write().expect(LOCK).reach(seed, length);
    SOURCE.read().expect(LOCK)
}

fn sink(
    stream: &mut TcpStream,
    header: Header,
    buffer: &mut [u8],
    accepted: Instant,
) -> io::Result<()> {
    stream.read_exact(buffer)?;
    stream.write_all(&[READ_ALL])?; // before the hash: see the primer of `data`
    let read_ns = u64::try_from(accepted.elapsed().as_nanos()).unwrap_or(u64::MAX);
    let hash = data::hash(buffer);
    let interrupts = nic::interrupts()?;
    Verdict { hash_ok: hash == header.hash, hash, read_ns, interrupts }.write_to(stream)?;
    finish(stream)
}

/// Sends its own payload while it reads the host's into `buffer`.
fn both(
    stream: &mut TcpStream,
    header: Header,
    buffer: &mut [u8],
    accepted: Instant,
) -> io::Result<()> {
    let length = buffer.len();
    drop(source(header.seed_of_host(), length)); // the longer one or the shorter: both are there
    let source = source(header.hash, length);
    let ours = source.piece(header.hash, length);
    let bell = UdpSocket::bind((stream.local_addr()?.ip(), 0))?;
    stream.set_nonblocking(true)?;
    let (mut sent, mut got, mut read_ns) = (0, 0, 0);
    while sent < length || got < length {
        let mut wanted = PollFlags::empty();
        wanted.set(PollFlags::POLLOUT, sent < length);
        wanted.set(PollFlags::POLLIN, got < length);
        poll(&mut [PollFd::new(stream.as_fd(), wanted)], PollTimeout::NONE)?;
        if sent < length {
            sent += moved(stream.write(&ours[sent..]))?;
        }
        if got < length {
            got += moved(stream.read(&mut buffer[got..]))?;
            if got == length {
                bell.send_to(&[READ_ALL], stream.peer_addr()?)?;
                read_ns = u64::try_from(accepted.elapsed().as_nanos()).unwrap_or(u64::MAX);
            }
        }
    }
    stream.set_nonblocking(false)?;
    let hash_ok = source.piece(header.seed_of_host(), length) == buffer;
    let interrupts = nic::interrupts()?;
    Verdict { hash_ok, hash: 0, read_ns, interrupts }.write_to(stream)?;
    finish(stream)
}

/// Bytes that a call moved which does not wait; the end of the stream is too early.
fn moved(result: io::Result<usize>) -> io::Result<usize> {
    match result {
        Ok(0) => Err(ErrorKind::UnexpectedEof.into()),
        Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(0),
        result => result,
    }
}

fn echo(stream: &mut TcpStream, bytes: u64) -> io::Result<()> {
    let mut chunk = vec![0; 64 << 10];
    let mut left = bytes;
    while left > 0 {
        let wanted = usize::try_from(left).unwrap_or(usize::MAX).min(chunk.len());
        let got = stream.read(&mut chunk[..wanted])?;
        if got == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        stream.write_all(&chunk[..got])?;
        left -= got as u64;
    }
    finish(stream)
}

/// Sends FIN and waits for the host's, so that the host decides when a connection is over.
fn finish(stream: &mut TcpStream) -> io::Result<()> {
    stream.shutdown(Shutdown::Write)?;
    match io::copy(stream, &mut io::sink())? {
        0 => Ok(()),
        _ => Err(io::Error::new(io::ErrorKind::InvalidData, "bytes after the payload")),
    }
}

/// Lends a buffer of `length` bytes whose pages have been touched.
fn with_buffer<T>(length: usize, use_it: impl FnOnce(&mut [u8]) -> T) -> T {
    let mut free = BUFFERS.lock().expect(LOCK);
    let best = (0..free.len()).max_by_key(|&i| free[i].len());
    let mut buffer = best.map(|i| free.swap_remove(i)).unwrap_or_default();
    drop(free);
    if buffer.len() < length {
        buffer.resize(length, 1); // not 0: zeroed memory may come untouched from the kernel
    }
    let result = use_it(&mut buffer[..length]);
    BUFFERS.lock().expect(LOCK).push(buffer);
    result
}
