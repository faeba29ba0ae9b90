//! Connections to other hosts, for the virtual TOE. The daemon makes no TCP sockets. Another small
//! process does, which has no capability, opens no file, and connects to one port alone.
//!
//! The daemon's worker asks, so nothing here waits: a request is a message, and so is the answer, a
//! socket whose connection has only begun.

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::exit;
use std::time::Duration;

use nix::sys::prctl::{set_name, set_pdeathsig};
use nix::sys::signal::Signal;
use nix::sys::socket::{setsockopt, sockopt as option};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, bind, connect, ipproto,
    socket_with, sockopt,
};

use super::ANSWER_MAX;
use super::connector::Connector;
use super::shut::shut_dialer;
use super::words::{Channel, Received, Refusal, is_end};
use crate::errors::{StartError, error};
use crate::sys;

/// A peer that is silent for so long gets keepalive probes, so often, so many times (tcp(7)): half
/// a minute finds a peer that is gone, and a thousand idle ones cost nothing noticeable.
const SILENT_FOR: Duration = Duration::from_secs(20);
const ASK_EVERY: Duration = Duration::from_secs(5);
const ASK_TIMES: u32 = 3;

/// A number of the daemon's choice, then the address to connect from and the one to connect to.
const REQUEST: usize = TAG + 16 + 16;
const TAG: usize = 8;

/// That number, then this host's error or 0. With 0 and no descriptor the other host is not
/// reached.
const ANSWER: usize = TAG + 4;

/// Why a connection has not begun.
#[derive(Debug)]
pub(crate) enum Undialed {
    /// The other host is not reached.
    There,
    /// This host lacks something, which says nothing of the other one.
    Here(io::Error),
}

/// The daemon's side.
#[derive(Debug)]
pub(crate) struct Dialer {
    channel: Channel,
    /// Requests for which there was no room.
    waiting: VecDeque<[u8; REQUEST]>,
}

impl Dialer {
    /// Starts the process, for this port. To be called while there is one thread, and before the
    /// broker is started, whose channel it would have; the connector's it closes.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn start(port: u16, connector: &mut Option<Connector>) -> Result<Self, StartError> {
        let failed = |e: io::Error| {
            let what = format!("cannot start the process that connects to other hosts: {e}");
            error(what, "report this")
        };
        let (ours, theirs) = Channel::pair(ANSWER_MAX).map_err(failed)?;
        if sys::split().map_err(failed)? {
            drop((ours, connector.take()));
            run(port, &theirs);
        }
        drop(theirs);
        match ours.hear().map_err(failed)? {
            Ok(_) => Ok(Self::of(ours)),
            Err(no) => Err(error(no.what, &no.fix)),
        }
    }

    /// Of a process that answers by the other end.
    pub(super) fn of(channel: Channel) -> Self {
        Self { channel, waiting: VecDeque::new() }
    }

    /// Readable when a socket has come, or the process has ended.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.channel.fd()
    }

    /// A connection between these addresses is wanted; `tag` comes back with it.
    pub(crate) fn ask(&mut self, tag: u64, from: IpAddr, to: IpAddr) {
        let mut request = [0; REQUEST];
        request[..TAG].copy_from_slice(&tag.to_le_bytes());
        request[TAG..TAG + 16].copy_from_slice(&octets(from));
        request[TAG + 16..].copy_from_slice(&octets(to));
        self.waiting.push_back(request);
        self.flush();
    }

    fn flush(&mut self) {
        while let Some(request) = self.waiting.front() {
            // If the process has ended, reading shows it.
            if self.channel.send_with(request, &[], SendFlags::DONTWAIT).is_err() {
                return;
            }
            self.waiting.pop_front();
        }
    }

    /// The next connection that has begun, or failed. `None`: there is none yet.
    ///
    /// # Errors
    /// The process has ended.
    pub(crate) fn poll(&mut self) -> io::Result<Option<(u64, Result<OwnedFd, Undialed>)>> {
        self.flush();
        let mut answer = [0; ANSWER];
        match self.channel.receive_with(&mut answer, RecvFlags::DONTWAIT) {
            Ok(Received { len: ANSWER, fds, is_cut }) => {
                let (tag, error) = answer.split_at(TAG);
                let tag = u64::from_le_bytes(tag.try_into().expect("eight"));
                let dialed = match i32::from_le_bytes(error.try_into().expect("four")) {
                    // No descriptor is free here.
                    0 if is_cut => Err(Undialed::Here(Errno::MFILE.into())),
                    0 => fds.into_iter().next().ok_or(Undialed::There),
                    raw => Err(Undialed::Here(io::Error::from_raw_os_error(raw))),
                };
                Ok(Some((tag, dialed)))
            }
            Ok(_) => Err(Errno::PROTO.into()),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(e) => Err(e),
        }
    }
}

/// Until the daemon ends.
fn run(port: u16, daemon: &Channel) -> ! {
    let _ = set_name(c"np-toe"); // for `ps`
    // If it has ended already, its end of the channel has.
    let _ = set_pdeathsig(Signal::SIGKILL);
    let ready = shut_dialer(port).map(|()| None).map_err(Refusal::from);
    if daemon.say(&ready).is_ok() && ready.is_ok() {
        while serve(port, daemon, is_host).is_ok() {}
    }
    exit(0);
}

/// Answers the next request. Errors: the daemon is gone.
fn serve(port: u16, daemon: &Channel, may: fn(IpAddr) -> bool) -> io::Result<()> {
    let mut request = [0; REQUEST];
    daemon.recv(&mut request)?;
    let (tag, ends) = request.split_at(TAG);
    let address = |bytes: &[u8]| IpAddr::from(<[u8; 16]>::try_from(bytes).expect("sixteen"));
    let (from, to) = (address(&ends[..16]).to_canonical(), address(&ends[16..]).to_canonical());
    let dialed = if may(to) { dial(from, SocketAddr::new(to, port)) } else { Ok(None) };
    let error = |e: &io::Error| e.raw_os_error().unwrap_or(Errno::IO.raw_os_error());
    let answer = |error: i32| [tag, &error.to_le_bytes()].concat();
    match dialed {
        Ok(socket) => match daemon.send(&answer(0), socket.as_ref().map(AsFd::as_fd).as_slice()) {
            Err(e) if !is_end(&e) => daemon.send(&answer(error(&e)), &[]), // nor is the next lost
            sent => sent,
        },
        Err(e) => daemon.send(&answer(error(&e)), &[]),
    }
}

/// Begins a connection. `None`: the other host is not reached. Errors: this host's.
fn dial(from: IpAddr, to: SocketAddr) -> io::Result<Option<OwnedFd>> {
    let family = if to.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(family, SocketType::STREAM, flags, Some(ipproto::TCP))?;
    prepare(&socket)?;
    // Otherwise one port would be for one connection, whatever its destination (ip(7)).
    setsockopt(&socket, option::IpBindAddressNoPort, &true).map_err(io::Error::from)?;
    bind(&socket, &SocketAddr::new(from, 0))?;
    match connect(&socket, &to) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(Some(socket)),
        // No free port (connect(2)), and no memory.
        Err(e @ (Errno::ADDRNOTAVAIL | Errno::AGAIN | Errno::NOBUFS | Errno::NOMEM)) => {
            Err(e.into())
        }
        Err(_) => Ok(None),
    }
}

/// Whether an address can be another host's.
pub(crate) fn is_host(address: IpAddr) -> bool {
    let is_one = !address.is_unspecified() && !address.is_multicast() && !address.is_loopback();
    is_one
        && match address {
            IpAddr::V4(ip) => !ip.is_broadcast() && !ip.is_link_local(),
            IpAddr::V6(ip) => !ip.is_unicast_link_local(),
        }
}

/// Makes a socket send without delay, and ask whether a silent peer lives. One that listens gives
/// it to those that it accepts.
pub(crate) fn prepare(socket: &OwnedFd) -> io::Result<()> {
    sockopt::set_tcp_nodelay(socket, true)?;
    sockopt::set_socket_keepalive(socket, true)?;
    sockopt::set_tcp_keepidle(socket, SILENT_FOR)?;
    sockopt::set_tcp_keepintvl(socket, ASK_EVERY)?;
    sockopt::set_tcp_keepcnt(socket, ASK_TIMES)?;
    Ok(())
}

fn octets(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
        IpAddr::V6(ip) => Ipv6Addr::octets(&ip),
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::thread;

    use rustix::event::{PollFd, PollFlags, poll};

    use super::*;

    #[test]
    fn sockets_come_with_their_numbers_from_the_address_that_was_wanted() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let (ours, theirs) = Channel::pair(ANSWER_MAX).unwrap();
        let may = |to: IpAddr| to != IpAddr::from([127, 0, 0, 3]);
        let process = thread::spawn(move || while serve(port, &theirs, may).is_ok() {});
        let mut dialer = Dialer::of(ours);
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        let is_good = |tag: u64| tag.is_multiple_of(50);
        let is_far = |tag: u64| tag % 50 == 1;
        assert!(dialer.poll().unwrap().is_none());
        // More than there is room for at once.
        for tag in 0..1000 {
            let from = if is_good(tag) { "127.0.0.2" } else { "192.0.2.99" };
            dialer.ask(tag, ip(from), ip(if is_far(tag) { "127.0.0.3" } else { "127.0.0.1" }));
        }
        for expected in 0..1000 {
            let (tag, socket) = loop {
                if let Some(got) = dialer.poll().unwrap() {
                    break got;
                }
                let _ = poll(&mut [PollFd::from_borrowed_fd(dialer.fd(), PollFlags::IN)], None);
            };
            assert_eq!(tag, expected);
            match socket {
                Ok(_) => {
                    let (_, from) = listener.accept().unwrap();
                    assert_eq!((from.ip(), is_good(tag)), (ip("127.0.0.2"), true));
                }
                Err(Undialed::There) => assert!(is_far(tag)),
                Err(Undialed::Here(e)) => {
                    assert!(!is_good(tag) && !is_far(tag));
                    assert_eq!(e.kind(), io::ErrorKind::AddrNotAvailable, "not our address");
                }
            }
        }
        drop(dialer);
        process.join().unwrap();
    }
}
