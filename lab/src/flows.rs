//! Connections of comparisons: readers at the remote, and Linux's own senders.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddrV4, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nightporter_guest::data::{self, Header, Service};
use nix::sys::socket::{self, AddressFamily, SockFlag, SockType, SockaddrIn, bind, connect};

use crate::host::Remote;
use crate::sys;

/// Bytes are counted in slots of so long.
pub(crate) const SLOT: Duration = Duration::from_millis(100);
/// A reader looks at its clock so often.
const READ_LIMIT: Duration = Duration::from_millis(20);
/// Linux paces a connection whose rate is bounded, also if the bound is far away: bytes per second.
const PACED: u32 = 2_000_000_000;

/// The bytes of a reader.
#[derive(Debug, Clone)]
pub(crate) struct Received {
    pub(crate) sender: SocketAddrV4,
    pub(crate) reader: SocketAddrV4,
    /// Bytes in each slot since the connection was there.
    pub(crate) slots: Vec<u64>,
}

impl Received {
    /// In all.
    pub(crate) fn bytes(&self) -> u64 {
        self.slots.iter().sum()
    }
}

/// Connects from `reader`, whose port the kernel chooses, has `sender` pour, and reads for `time`.
pub(crate) fn receive(
    sender: SocketAddrV4,
    reader: SocketAddrV4,
    time: Duration,
) -> Result<Received> {
    let (mut stream, reader) = begin(sender, reader)?;
    let start = Instant::now();
    let slots = usize::try_from(time.as_nanos() / SLOT.as_nanos())?.max(1);
    let mut received = Received { sender, reader, slots: vec![0; slots] };
    let mut chunk = vec![0; 1 << 18];
    loop {
        let read = stream.read(&mut chunk);
        let slot = usize::try_from(start.elapsed().as_nanos() / SLOT.as_nanos())?;
        let Some(bytes) = received.slots.get_mut(slot) else { return Ok(received) };
        match read {
            Ok(0) => bail!("{sender} has ended the connection"),
            Ok(got) => *bytes += got as u64,
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            Err(e) => return Err(e).with_context(|| format!("reading from {sender}")),
        }
    }
}

/// The connection of which a reader asks all that comes, and its address there.
fn begin(sender: SocketAddrV4, reader: SocketAddrV4) -> Result<(TcpStream, SocketAddrV4)> {
    let flags = SockFlag::SOCK_CLOEXEC;
    let socket = socket::socket(AddressFamily::Inet, SockType::Stream, flags, None)?;
    bind(socket.as_raw_fd(), &SockaddrIn::from(reader))?;
    connect(socket.as_raw_fd(), &SockaddrIn::from(sender))
        .with_context(|| format!("connecting to {sender}"))?;
    let mut stream = TcpStream::from(socket);
    let reader = match stream.local_addr()? {
        std::net::SocketAddr::V4(address) => address,
        std::net::SocketAddr::V6(address) => bail!("bound to {address}"),
    };
    stream.set_read_timeout(Some(READ_LIMIT))?;
    stream.write_all(&Header { service: Service::Pour, bytes: 0, hash: 0 }.to_bytes())?;
    Ok((stream, reader))
}

/// Likewise, but reads so many bytes: how long they took, at most `limit`, and the reader's
/// address.
pub(crate) fn fetch(
    sender: SocketAddrV4,
    reader: SocketAddrV4,
    bytes: u64,
    limit: Duration,
) -> Result<(Duration, SocketAddrV4)> {
    let (mut stream, reader) = begin(sender, reader)?;
    let start = Instant::now();
    let (mut chunk, mut got) = (vec![0; data::POURED], 0);
    let expected = data::poured();
    while got < bytes && start.elapsed() < limit {
        // Up to the end of what is poured again and again.
        let at = usize::try_from(got % data::POURED as u64)?;
        match stream.read(&mut chunk[at..]) {
            Ok(0) => bail!("{sender} has ended the connection"),
            Ok(more) => {
                let whole = chunk[at..at + more] == expected[at..at + more];
                ensure!(
                    whole,
                    "{sender}: what was read is not what was poured, from byte {got} on"
                );
                got += more as u64;
            }
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            Err(e) => return Err(e).with_context(|| format!("reading from {sender}")),
        }
    }
    Ok((start.elapsed().min(limit), reader))
}

/// Pours into each connection to it, as a guest does. Ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Server {
    listeners: Vec<TcpListener>,
    threads: Vec<JoinHandle<()>>,
}

impl Server {
    /// On a machine's address: on the data port, and paced on the one behind it.
    pub(crate) fn start(machine: &Remote, address: Ipv4Addr) -> Result<Self> {
        let mut server = Self { listeners: Vec::new(), threads: Vec::new() };
        for paced in [false, true] {
            let port = data::PORT + u16::from(paced);
            let listener = machine.enter(|| TcpListener::bind((address, port)))?;
            server.listeners.push(listener.try_clone()?);
            server.threads.push(thread::spawn(move || serve(&listener, paced)));
        }
        Ok(server)
    }

    /// Where it paces.
    pub(crate) fn paced_port(&self) -> u16 {
        data::PORT + 1
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        for listener in &self.listeners {
            // Wakes accept() (Linux: EINVAL).
            let _ = socket::shutdown(listener.as_raw_fd(), socket::Shutdown::Both);
        }
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn serve(listener: &TcpListener, paced: bool) {
    while let Ok((mut stream, _)) = listener.accept() {
        thread::spawn(move || {
            let ready = stream.set_nodelay(true).is_ok()
                && (!paced || sys::set_pacing(&stream, PACED).is_ok())
                && Header::read_from(&mut stream).is_ok();
            if ready {
                data::pour(&mut stream);
            }
            let _ = stream.shutdown(Shutdown::Both);
        });
    }
}
