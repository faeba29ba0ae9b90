//! Readiness: epoll before connect(), poll, connections that are not established yet.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd};

use libc::SOL_SOCKET;
use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::socket::{SockFlag, SockaddrStorage, bind};

use crate::fork::{option, polled};
use crate::{Place, bare, connect, says, told};

pub(crate) fn run(place: &Place) {
    epoll_before_connect(place);
    what_poll_says(place);
    blocking_is_kept(place);
    errors(place);
    own_port(place);
}

fn wait(epoll: &Epoll) -> Vec<(u64, EpollFlags)> {
    let mut events = [EpollEvent::empty(); 4];
    let count = epoll.wait(&mut events, EpollTimeout::from(5_000_u16)).expect("an event");
    events[..count].iter().map(|event| (event.data(), event.events())).collect()
}

/// The events of a descriptor by poll(), of all that it can report.
pub(crate) fn poll_says(fd: &impl AsRawFd, timeout_ms: i32) -> Vec<&'static str> {
    let all = libc::POLLIN | libc::POLLOUT | libc::POLLRDHUP;
    let said = polled(fd.as_raw_fd(), all, timeout_ms);
    let names = [
        (libc::POLLIN, "in"),
        (libc::POLLOUT, "out"),
        (libc::POLLRDHUP, "rdhup"),
        (libc::POLLERR, "err"),
        (libc::POLLHUP, "hup"),
    ];
    names.into_iter().filter(|(flag, _)| said & flag != 0).map(|(_, name)| name).collect()
}

fn epoll_before_connect(place: &Place) {
    let listener = place.listener();
    let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).expect("an epoll");
    let other = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).expect("an epoll");
    let fd = bare(SockFlag::SOCK_NONBLOCK);
    let out = EpollFlags::EPOLLOUT | EpollFlags::EPOLLET;
    epoll.add(&fd, EpollEvent::new(out, 77)).expect("added");
    other.add(&fd, EpollEvent::new(EpollFlags::EPOLLIN, 78)).expect("added");
    let to = listener.local_addr().expect("its address");
    says("a connect() that does not block", connect(&fd, to));
    let events = wait(&epoll);
    says("whose epoll has the event", events.iter().map(|(data, _)| *data).collect::<Vec<_>>());
    says("that it can write", events.iter().all(|(_, e)| e.contains(EpollFlags::EPOLLOUT)));
    says("SO_ERROR", option(fd.as_raw_fd(), SOL_SOCKET, libc::SO_ERROR));
    let (mut server, _) = listener.accept().expect("accepted");
    server.write_all(b"hello").expect("written");
    says("another epoll sees data", wait(&other).iter().map(|e| e.0).collect::<Vec<_>>());
    let mut event = EpollEvent::new(EpollFlags::EPOLLIN, 79);
    says("it can be changed", epoll.modify(&fd, &mut event));
    says("and sees them, too", wait(&epoll).iter().map(|e| e.0).collect::<Vec<_>>());
    says("and can be forgotten", epoll.delete(&fd));
    says("once", epoll.delete(&fd));
    let mut stream = TcpStream::from(fd);
    let mut bytes = [0; 5];
    says("it reads", told(stream.read(&mut bytes)));
    says("and then there is nothing", told(stream.read(&mut bytes)));
}

fn what_poll_says(place: &Place) {
    let (mut client, mut server) = place.pair();
    says("an idle connection", poll_says(&client, 0));
    server.write_all(b"x").expect("written");
    says("one with data", polled_until(&client, libc::POLLIN));
    let mut byte = [0];
    client.read_exact(&mut byte).expect("read");
    says("without again", poll_says(&client, 0));
    server.shutdown(Shutdown::Write).expect("shut");
    says("one that has ended", polled_until(&client, libc::POLLRDHUP));
    says("may write still", told(client.write(b"y")));
    says("and reads the end", told(client.read(&mut byte)));
    says("again", told(client.read(&mut byte)));
}

fn polled_until(fd: &impl AsRawFd, flag: i16) -> Vec<&'static str> {
    polled(fd.as_raw_fd(), flag, 5_000);
    poll_says(fd, 0)
}

fn blocking_is_kept(place: &Place) {
    let listener = place.listener();
    let to = listener.local_addr().expect("its address");
    let stream = TcpStream::connect_timeout(&to, std::time::Duration::from_secs(5));
    let client = told(stream);
    says("with a time limit", client.as_ref().map(|_| ()));
    let mut accepted = listener.accept().expect("accepted").0;
    accepted.set_nonblocking(true).expect("set");
    let mut byte = [0];
    says("accepted, and then not blocking", told(accepted.read(&mut byte)));
    let fd = bare(SockFlag::empty());
    says("a blocking connect()", connect(&fd, to));
    says("a second one", connect(&fd, to));
    let stream = TcpStream::from(fd);
    let mut server = listener.accept().expect("accepted").0;
    let part = vec![7; 65_536];
    server.set_nonblocking(true).expect("set");
    let full = loop {
        if let Err(error) = server.write(&part) {
            break told::<()>(Err(error));
        }
    };
    says("who writes without end must wait", full);
    drop(stream);
}

/// How a connect() ends that does not block.
fn ends(fd: &OwnedFd, to: SocketAddr) -> Result<(), Errno> {
    match connect(fd, to) {
        Err(Errno::EINPROGRESS) => {
            polled(fd.as_raw_fd(), libc::POLLOUT, 5_000);
            match option(fd.as_raw_fd(), SOL_SOCKET, libc::SO_ERROR) {
                Ok(0) => Ok(()),
                Ok(errno) | Err(errno) => Err(Errno::from_raw(errno)),
            }
        }
        ended => ended,
    }
}

fn errors(place: &Place) {
    let closed = place.free();
    let fd = bare(SockFlag::empty());
    says("nobody listens", connect(&fd, closed));
    let listener = place.listener();
    let open = listener.local_addr().expect("its address");
    says("the same socket, where somebody does", connect(&fd, open));
    says("is connected", told(TcpStream::from(fd).peer_addr()).ok() == Some(open));
    let fd = bare(SockFlag::SOCK_NONBLOCK);
    says("nobody listens, and it does not block", ends(&fd, closed));
    says("said once", option(fd.as_raw_fd(), SOL_SOCKET, libc::SO_ERROR));
    // Linux remembers the connection that failed until it is asked once more.
    let retried = std::iter::repeat_with(|| ends(&fd, open));
    let retried = retried.take(2).find(|ended| *ended != Err(Errno::ECONNABORTED));
    says("where somebody does", retried);
    let nowhere = SocketAddr::new(place.nowhere, 80);
    says("no way there", connect(&bare(SockFlag::empty()), nowhere));
    says("nor without blocking", ends(&bare(SockFlag::SOCK_NONBLOCK), nowhere));
    let fd = bare(SockFlag::empty());
    let stream = TcpStream::from(fd);
    says("not connected", told(stream.peer_addr()).map(|_| ()));
    let mut reader = &stream;
    says("cannot read", told(reader.read(&mut [0])));
}

fn own_port(place: &Place) {
    let listener = place.listener();
    let free = place.free();
    let fd = bare(SockFlag::empty());
    says("bind", bind(fd.as_raw_fd(), &SockaddrStorage::from(free)));
    says("connect", connect(&fd, listener.local_addr().expect("its address")));
    says("comes from that port", listener.accept().expect("accepted").1 == free);
    let other = bare(SockFlag::empty());
    says("which is taken", bind(other.as_raw_fd(), &SockaddrStorage::from(free)));
    drop(fd);
}
