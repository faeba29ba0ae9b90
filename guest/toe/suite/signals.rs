//! Signals: which calls they interrupt, and which go on.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use nix::unistd::gettid;

use crate::fork::{handle_signals, owned, signal_thread, signals_handled};
use crate::{Place, says, told};

/// How far apart signals are that come all the time.
const BETWEEN: Duration = Duration::from_millis(1);

pub(crate) fn run(place: &Place) {
    for restarts in [false, true] {
        says("SA_RESTART", restarts);
        handle_signals(restarts);
        accepting(place, restarts);
        reading(place, restarts);
        connecting(place);
    }
}

/// Until a thread waits for something; a call that another process does for it shows as "D".
pub(crate) fn wait_until_asleep(thread: libc::pid_t) {
    let stat = format!("/proc/self/task/{thread}/stat");
    let sleeps = |text: String| text.contains(") S ") || text.contains(") D ");
    while !std::fs::read_to_string(&stat).is_ok_and(sleeps) {
        thread::yield_now();
    }
}

/// Runs `call` in a thread, and signals come while it waits: until it ends, or if it is to go on
/// one, and then what it waits for.
fn disturbed<T: Send + 'static>(
    restarts: bool,
    call: impl FnOnce() -> T + Send + 'static,
    then: impl FnOnce(),
) -> T {
    let (tells, who) = channel();
    let calling = thread::spawn(move || {
        tells.send(gettid().as_raw()).expect("told");
        call()
    });
    let thread = who.recv().expect("a thread");
    wait_until_asleep(thread);
    let before = signals_handled();
    signal_thread(thread);
    while signals_handled() == before {
        thread::yield_now();
    }
    if restarts {
        then();
    }
    while !restarts && !calling.is_finished() {
        // It may have slept before the call.
        signal_thread(thread);
        thread::yield_now();
    }
    calling.join().expect("joined")
}

fn accepting(place: &Place, restarts: bool) {
    let listener = place.listener();
    let to = listener.local_addr().expect("its address");
    let mut client = None;
    // std calls again what was interrupted.
    let accept = move || nix::sys::socket::accept(listener.as_raw_fd());
    let accepted = disturbed(restarts, accept, || client = TcpStream::connect(to).ok());
    says("accept()", accepted.map(|fd| drop(owned(fd))));
}

fn reading(place: &Place, restarts: bool) {
    let (client, mut server) = place.pair();
    let mut byte = [0];
    let read = move || nix::unistd::read(&client, &mut byte);
    let got = disturbed(restarts, read, || server.write_all(b"x").expect("written"));
    says("read()", got);
}

/// Signals come all the time, and each connection is made once.
fn connecting(place: &Place) {
    let listener = place.listener();
    let to = listener.local_addr().expect("its address");
    let (tells, who) = channel();
    let clients = thread::spawn(move || {
        tells.send(gettid().as_raw()).expect("told");
        let made = (0..20_u8).map(|i| {
            let mut stream = TcpStream::connect(to)?;
            stream.write_all(&[i])
        });
        told(made.collect::<std::io::Result<Vec<()>>>()).map(|made| made.len())
    });
    let thread = who.recv().expect("a thread");
    let (ends, ended) = channel::<()>();
    let disturbing = thread::spawn(move || {
        while ended.recv_timeout(BETWEEN) == Err(RecvTimeoutError::Timeout) {
            signal_thread(thread);
        }
    });
    let mut got: Vec<u8> = Vec::new();
    for _ in 0..20 {
        listener.accept().expect("accepted").0.read_to_end(&mut got).expect("read");
    }
    drop(ends);
    disturbing.join().expect("joined");
    says("connect()", clients.join().expect("joined"));
    says("each came once", got == (0..20).collect::<Vec<u8>>());
    listener.set_nonblocking(true).expect("set");
    says("and nobody else", told(listener.accept()).map(|_| ()));
}
