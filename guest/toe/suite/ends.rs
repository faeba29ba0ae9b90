//! How connections end: clean, half, by a reset, with their process.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use libc::SOL_SOCKET;
use nix::sys::signal::Signal;
use nix::sys::socket::{MsgFlags, send, setsockopt, sockopt};
use nix::sys::wait::WaitStatus;

use crate::fork::{disconnect, in_a_child, option, polled};
use crate::signals::wait_until_asleep;
use crate::{Place, all_of, connect, pattern, says, told};

pub(crate) fn run(place: &Place) {
    half(place);
    taken_back(place);
    shut_both(place);
    readers_wake(place);
    undone(place);
    resets(place);
    pipes(place);
    with_the_process(place);
    many(place);
}

fn half(place: &Place) {
    let (mut client, mut server) = place.pair();
    client.write_all(b"all I have").expect("written");
    client.shutdown(Shutdown::Write).expect("shut");
    says("half closed", all_of(&mut server).map(|bytes| bytes.len()));
    says("TCP_INFO has who finished", settled_state(&client));
    says("and who has not", settled_state(&server));
    let answer = thread::spawn(move || server.write_all(&pattern(5_000_000)));
    says("the other half goes on", all_of(&mut client).map(|b| b == pattern(5_000_000)));
    says("to its end", told(answer.join().expect("joined")));
    says("no more is written", send(client.as_raw_fd(), b"x", MsgFlags::MSG_NOSIGNAL));
}

/// TCP_INFO's state, as soon as the other side has all that was sent.
fn settled_state(stream: &TcpStream) -> Result<i32, i32> {
    const FIN_WAIT_1: i32 = 4;
    let begun = Instant::now();
    loop {
        let word = option(stream.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_INFO);
        let state = word.map(|word| word & 0xff);
        if state != Ok(FIN_WAIT_1) || begun.elapsed() > Duration::from_secs(5) {
            return state;
        }
        thread::yield_now();
    }
}

fn taken_back(place: &Place) {
    let (client, mut server) = place.pair();
    for onoff in [1, 0] {
        let linger = libc::linger { l_onoff: onoff, l_linger: 0 };
        setsockopt(&client, sockopt::Linger, &linger).expect("set");
    }
    drop(client);
    says("SO_LINGER of 0 s, and taken back", all_of(&mut server));
}

fn shut_both(place: &Place) {
    let (mut client, mut server) = place.pair();
    client.write_all(b"never read").expect("written");
    server.write_all(b"the answer").expect("written");
    // The request is there, and nobody reads it.
    let mut byte = [0];
    server.peek(&mut byte).expect("a byte");
    says("both directions shut", told(server.shutdown(Shutdown::Both)));
    says("the answer arrives", all_of(&mut client).map(|bytes| bytes.len()));
    let (client, mut server) = place.pair();
    says("reading shut", told(server.shutdown(Shutdown::Read)));
    says("nothing to read", told(server.read(&mut byte)));
    says("writing goes on", told(server.write(b"z")));
    drop(client);
}

fn readers_wake(place: &Place) {
    for how in [Shutdown::Both, Shutdown::Read] {
        let (client, mut server) = place.pair();
        let mut reader = client.try_clone().expect("a second one");
        let (tells, who) = channel();
        let reading = thread::spawn(move || {
            tells.send(nix::unistd::gettid().as_raw()).expect("told");
            told(reader.read(&mut [0]))
        });
        wait_until_asleep(who.recv().expect("a thread"));
        says(&format!("somebody reads, and {how:?} is shut"), told(client.shutdown(how)));
        says("it reads", reading.join().expect("joined"));
        let written = told((&client).write(b"z"));
        drop(client);
        says("it writes", (written, all_of(&mut server).map(|bytes| bytes.len())));
    }
}

fn undone(place: &Place) {
    let (mut client, mut server) = place.pair();
    let listener = place.listener();
    says("connected to nobody", disconnect(client.as_raw_fd()));
    says("the other side", all_of(&mut server));
    says("nobody is there", told(client.peer_addr()));
    let again = connect(&client, listener.local_addr().expect("its address"));
    says("connected again", again);
    let (accepted, _) = listener.accept().expect("accepted");
    says("accepted, and connected to nobody", disconnect(accepted.as_raw_fd()));
    says("the other side", all_of(&mut client));
    says("nobody is there", told(accepted.peer_addr()));
}

fn gone(stream: &TcpStream) {
    polled(stream.as_raw_fd(), libc::POLLRDHUP, 5_000);
}

fn resets(place: &Place) {
    let mut byte = [0];
    for (how, lingers) in [("SO_LINGER of 0 s", true), ("close() with unread data", false)] {
        for first in ["read", "write", "SO_ERROR"] {
            let (client, mut server) = place.pair();
            if lingers {
                let linger = libc::linger { l_onoff: 1, l_linger: 0 };
                setsockopt(&client, sockopt::Linger, &linger).expect("set");
            } else {
                server.write_all(b"unread").expect("written");
                client.peek(&mut byte).expect("a byte");
            }
            drop(client);
            gone(&server);
            says(how, first);
            let fd = server.as_raw_fd();
            match first {
                "read" => says("gives", told(server.read(&mut byte))),
                "write" => says("gives", send(fd, b"x", MsgFlags::MSG_NOSIGNAL)),
                _ => says("gives", option(fd, SOL_SOCKET, libc::SO_ERROR)),
            }
            says("and then", told(server.read(&mut byte)));
            says("and", send(fd, b"x", MsgFlags::MSG_NOSIGNAL));
            says("and", option(fd, SOL_SOCKET, libc::SO_ERROR));
            says("with nobody", told(server.peer_addr()).map(|_| ()));
        }
    }
}

fn pipes(place: &Place) {
    let (client, _server) = place.pair();
    client.shutdown(Shutdown::Write).expect("shut");
    let ended = in_a_child(|| {
        // std ignores SIGPIPE when it starts.
        crate::fork::default_sigpipe();
        let _ = nix::unistd::write(&client, b"x");
    });
    let killed = matches!(ended, WaitStatus::Signaled(_, Signal::SIGPIPE, _));
    says("who writes all the same is killed", killed);
    says("or told", nix::unistd::write(&client, b"x"));
}

fn with_the_process(place: &Place) {
    let listener = place.listener();
    let to = listener.local_addr().expect("its address");
    let reading = thread::spawn(move || all_of(&mut listener.accept().expect("accepted").0));
    let mut suite = std::process::Command::new("/proc/self/exe");
    let status = suite.args(["--client", &to.to_string()]).status();
    says("a process that ends", status.expect("it ran").success());
    let all = reading.join().expect("joined");
    says("has sent all", all.map(|bytes| String::from_utf8_lossy(&bytes).into_owned()));
}

fn many(place: &Place) {
    let listener = place.listener();
    let to = listener.local_addr().expect("its address");
    let serving = thread::spawn(move || {
        for _ in 0..300 {
            let mut stream = listener.accept().expect("accepted").0;
            let bytes = all_of(&mut stream).expect("read");
            stream.write_all(&bytes).expect("written");
        }
    });
    let mut same = 0;
    for i in 0..300_u32 {
        let mut stream = TcpStream::connect(to).expect("connected");
        stream.write_all(&i.to_le_bytes()).expect("written");
        stream.shutdown(Shutdown::Write).expect("shut");
        same += u32::from(all_of(&mut stream) == Ok(i.to_le_bytes().to_vec()));
        // Now and then a word, for a reader that waits for one.
        if i % 50 == 49 {
            says("one after the other", same);
        }
    }
    serving.join().expect("served");
}
