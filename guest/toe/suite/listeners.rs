//! Listeners: which clients are accepted, which wait, and which process gets them.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::process::Command;
use std::thread;

use libc::SOL_SOCKET;
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, SockaddrStorage, bind, listen, socket,
};
use nix::sys::time::{TimeVal, TimeValLike};

use crate::fork::{in_a_child, option, set_option};
use crate::readiness::poll_says;
use crate::{Place, all_of, bare, says, told};

pub(crate) fn run(place: &Place) {
    waiting(place);
    watched_before(place);
    taken(place);
    several_processes(place);
    native_clients(place);
    both_families(place);
    one_family(place);
}

fn waiting(place: &Place) {
    let listener = place.listener();
    let to = listener.local_addr().expect("its address");
    listener.set_nonblocking(true).expect("set");
    says("nobody comes", told(listener.accept()).map(|_| ()));
    says("poll", poll_says(&listener, 0));
    let client = TcpStream::connect(to).expect("connected");
    says("somebody comes", poll_says(&listener, 5_000));
    let accepted = listener.accept().expect("accepted");
    says("it is who has come", Some(accepted.1) == client.local_addr().ok());
    says("poll", poll_says(&listener, 0));
    says("SO_ACCEPTCONN", option(listener.as_raw_fd(), SOL_SOCKET, libc::SO_ACCEPTCONN));
    says("SO_REUSEADDR", option(listener.as_raw_fd(), SOL_SOCKET, libc::SO_REUSEADDR));
    says("SO_TYPE", option(listener.as_raw_fd(), SOL_SOCKET, libc::SO_TYPE));
    says("SO_DOMAIN", option(listener.as_raw_fd(), SOL_SOCKET, libc::SO_DOMAIN));
    listener.set_nonblocking(false).expect("set");
    let limit = TimeVal::milliseconds(20);
    let limited =
        nix::sys::socket::setsockopt(&listener, nix::sys::socket::sockopt::ReceiveTimeout, &limit);
    says("a limit", limited);
    says("passes", told(listener.accept()).map(|_| ()));
}

fn watched_before(place: &Place) {
    let fd = bare(SockFlag::SOCK_NONBLOCK);
    let free = place.free();
    let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).expect("an epoll");
    let exclusive = EpollFlags::EPOLLIN | EpollFlags::EPOLLEXCLUSIVE;
    epoll.add(&fd, EpollEvent::new(EpollFlags::EPOLLIN, 5)).expect("added");
    let third = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).expect("an epoll");
    third.add(&fd, EpollEvent::new(exclusive, 7)).expect("added");
    says("bind", bind(fd.as_raw_fd(), &SockaddrStorage::from(free)));
    says("listen", listen(&fd, Backlog::new(5).expect("five")));
    says("listen again", listen(&fd, Backlog::new(7).expect("seven")));
    let second = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).expect("an epoll");
    says("EPOLLEXCLUSIVE", second.add(&fd, EpollEvent::new(exclusive, 6)));
    let _client = TcpStream::connect(free).expect("connected");
    let mut events = [EpollEvent::empty(); 4];
    let count = epoll.wait(&mut events, EpollTimeout::from(5_000_u16));
    says("an epoll has", (count, events[0].data(), events[0].events()));
    let listener = TcpListener::from(fd);
    says("its address", told(listener.local_addr()).ok() == Some(free));
    says("accepts", told(listener.accept()).map(|_| ()));
}

fn taken(place: &Place) {
    let listener = place.listener();
    let at = listener.local_addr().expect("its address");
    says("a port that is taken", told(TcpListener::bind(at)).map(|_| ()));
    let copy = listener.try_clone().expect("a copy");
    drop(listener);
    let _client = TcpStream::connect(at).expect("connected");
    says("a copy accepts", told(copy.accept()).map(|_| ()));
    drop(copy);
    says("and then the port is free", told(TcpListener::bind(at)).map(|_| ()));
}

fn several_processes(place: &Place) {
    let listener = place.listener();
    let to = listener.local_addr().expect("its address");
    let mut client = TcpStream::connect(to).expect("connected");
    in_a_child(|| {
        let mut stream = listener.accept().expect("accepted").0;
        stream.write_all(b"from a child").expect("written");
    });
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    says("a child accepts", all_of(&mut client).map(text));
    let mut client = TcpStream::connect(to).expect("connected");
    fcntl(listener.as_fd(), FcntlArg::F_SETFD(FdFlag::empty())).expect("inherited");
    let mut server = Command::new("/proc/self/exe");
    let server = server.args(["--server", &listener.as_raw_fd().to_string()]).status();
    says("a program that inherits it", server.expect("it ran").success());
    says("accepts", all_of(&mut client).map(text));
    let _client = TcpStream::connect(to).expect("connected");
    says("and so do we", told(listener.accept()).map(|_| ()));
}

fn native_clients(place: &Place) {
    let listener = place.listener();
    let to = listener.local_addr().expect("its address");
    let native = thread::spawn(move || {
        let mut suite = Command::new("/proc/self/exe");
        suite.env("NIGHTPORTER_TOE", "off").args(["--client", &to.to_string()]).status()
    });
    let mut stream = TcpStream::connect(to).expect("connected");
    stream.write_all(b"ours").expect("written");
    drop(stream);
    let mut heard: Vec<_> = (0..2)
        .map(|_| {
            let mut text = String::new();
            listener.accept().expect("accepted").0.read_to_string(&mut text).expect("read");
            text
        })
        .collect();
    heard.sort();
    says("both ways come to one listener", heard);
    says("and end well", native.join().expect("joined").expect("it ran").success());
}

fn both_families(place: &Place) {
    let any = IpAddr::V6(Ipv6Addr::UNSPECIFIED);
    let listener = TcpListener::bind((any, 0));
    let Ok(listener) = listener else { return says("no IPv6 here", told(listener).map(|_| ())) };
    let port = listener.local_addr().expect("its address").port();
    let client = TcpStream::connect((place.ip, port)).expect("connected");
    says("a client by IPv4", told(client.peer_addr()).map(|at| at.ip()));
    let (stream, from) = listener.accept().expect("accepted");
    says("is mapped", from.ip());
    says("in all names", told(stream.peer_addr()).ok() == Some(from));
    says("its own too", told(stream.local_addr()).map(|at| at.ip()));
    says("SO_DOMAIN", option(stream.as_raw_fd(), SOL_SOCKET, libc::SO_DOMAIN));
    says("poll", poll_says(&stream, 0));
}

fn one_family(place: &Place) {
    let (family, kind) = (AddressFamily::Inet6, SockType::Stream);
    let fd = match socket(family, kind, SockFlag::SOCK_CLOEXEC, None) {
        Ok(fd) => fd,
        Err(errno) => return says("no IPv6 here", errno),
    };
    let only = set_option(fd.as_raw_fd(), libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, 1);
    says("IPV6_V6ONLY", only);
    let any = SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0));
    says("bind", bind(fd.as_raw_fd(), &SockaddrStorage::from(any)));
    says("listen", listen(&fd, Backlog::new(5).expect("five")));
    let port = TcpListener::from(fd);
    let to = (place.ip, port.local_addr().expect("its address").port());
    says("hears no IPv4", told(TcpStream::connect(to)).map(|_| ()));
}
