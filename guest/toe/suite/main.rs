//! Uses sockets as programs do, and prints the results, a line each. The output is the same on TCP
//! and through the virtual TOE: `nightporter-toe-suite ADDRESS UNREACHABLE [SECTION]`, both IPv4,
//! the first of this machine itself.

mod ends;
mod fork;
mod listeners;
mod readiness;
mod signals;
mod streams;

use std::env;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::process::Command;

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, SockFlag, SockProtocol, SockType, SockaddrStorage, bind, socket,
};

/// Its parts.
const SECTIONS: [(&str, Section); 5] = [
    ("streams", streams::run),
    ("readiness", readiness::run),
    ("ends", ends::run),
    ("listeners", listeners::run),
    ("signals", signals::run),
];

type Section = fn(&Place);

/// Where everything happens.
pub(crate) struct Place {
    /// An address of this machine.
    pub(crate) ip: IpAddr,
    /// An address that cannot be reached.
    pub(crate) nowhere: IpAddr,
}

impl Place {
    pub(crate) fn listener(&self) -> TcpListener {
        TcpListener::bind((self.ip, 0)).expect("a listener")
    }

    /// An address that never had a listener.
    pub(crate) fn free(&self) -> SocketAddr {
        let fd = bare(SockFlag::empty());
        let any = SockaddrStorage::from(SocketAddr::new(self.ip, 0));
        bind(fd.as_raw_fd(), &any).expect("a port");
        told(TcpListener::from(fd).local_addr()).expect("its address")
    }

    /// A connection: the end that connected, and the end that accepted.
    pub(crate) fn pair(&self) -> (TcpStream, TcpStream) {
        let listener = self.listener();
        let address = listener.local_addr().expect("its address");
        let client = TcpStream::connect(address).expect("connected");
        (client, listener.accept().expect("accepted").0)
    }
}

/// A line.
pub(crate) fn says(what: &str, how: impl std::fmt::Debug) {
    println!("{what}: {how:?}");
}

/// The result of a call, errors by name.
pub(crate) fn told<T>(result: std::io::Result<T>) -> Result<T, Errno> {
    result.map_err(|e| Errno::from_raw(e.raw_os_error().unwrap_or(0)))
}

/// A TCP socket that is not connected.
pub(crate) fn bare(flags: SockFlag) -> OwnedFd {
    let (family, kind) = (AddressFamily::Inet, SockType::Stream);
    socket(family, kind, flags | SockFlag::SOCK_CLOEXEC, SockProtocol::Tcp).expect("a socket")
}

/// connect().
pub(crate) fn connect(fd: &impl AsRawFd, to: SocketAddr) -> Result<(), Errno> {
    nix::sys::socket::connect(fd.as_raw_fd(), &SockaddrStorage::from(to))
}

/// Reads all there is.
pub(crate) fn all_of(stream: &mut TcpStream) -> Result<Vec<u8>, Errno> {
    let mut bytes = Vec::new();
    told(stream.read_to_end(&mut bytes)).map(|_| bytes)
}

/// Bytes that tell where they belong.
pub(crate) fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 31 + i / 251).to_le_bytes()[0]).collect()
}

/// The program that inherits a connection from another run of it.
fn inherited(fd: RawFd) {
    let mut stream = TcpStream::from(fork::owned(fd));
    let peer = stream.peer_addr().expect("a peer");
    let own = stream.local_addr().expect("an address");
    let mut bytes = [0; 5];
    stream.read_exact(&mut bytes).expect("five bytes");
    stream.write_all(format!("{} {} {bytes:?}", peer.ip(), own.ip()).as_bytes()).expect("written");
}

/// The client that another run's listener waits for.
fn client(to: &str) {
    let mut stream = TcpStream::connect(to).expect("connected");
    stream.write_all(b"native").expect("written");
}

/// The program that inherits a listener from another run of it.
fn server(fd: RawFd) {
    let listener = TcpListener::from(fork::owned(fd));
    let (mut stream, _) = listener.accept().expect("accepted");
    stream.write_all(b"from a server by exec").expect("written");
}

fn main() {
    let words: Vec<String> = env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        ["--inherited", fd] => inherited(fd.parse().expect("a number")),
        ["--server", fd] => server(fd.parse().expect("a number")),
        ["--client", to] => client(to),
        [ip, nowhere, section] => {
            let address = |text: &str| text.parse().expect("an address");
            let place = Place { ip: address(ip), nowhere: address(nowhere) };
            let (_, run) = SECTIONS.iter().find(|(name, _)| *name == section).expect("a section");
            run(&place);
        }
        [ip, nowhere] => {
            for (section, _) in SECTIONS {
                let mut suite = Command::new("/proc/self/exe");
                assert!(suite.args([ip, nowhere, section]).status().expect("it ran").success());
            }
        }
        _ => panic!("usage: nightporter-toe-suite ADDRESS UNREACHABLE [SECTION]"),
    }
}
