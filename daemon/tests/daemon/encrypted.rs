//! Streams between hosts that are encrypted, and hosts that do not encrypt theirs. Needs root and
//! openssl.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;

use nightporter_core::toe::control::Ask;
use nightporter_core::toe::errno::Errno;
use nightporter_core::toe::message::{Kind, LEN, Message, Request};
use nix::sys::signal::Signal;
use rustls::{ClientConnection, StreamOwned};

use crate::fabric::{PORT, Stranger, configure, fabric, message};
use crate::host::{Dir, Host};
use crate::overlay::{Namespace, VNI, two_hosts};
use crate::sockets::{SocketGuest, ask, connect, listen, try_connect, until};
use crate::toe::{RESET, SERVER, boot, bytes, cross, one_is_not_read, outlives_its_writer, toe};
use crate::trust::{Hosts, PROOF_PORT, STREAM, certificates, encrypt, has_said, is_native, show};

/// Another protocol that such a certificate may be for.
const OTHER: &[u8] = b"h2";

/// How a host carries streams.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum By {
    Plain,
    Tls,
}

/// A daemon on host `n` with this VM.
fn start(on: &Namespace, n: u8, vm: &str, by: By, proofs: &Dir) -> (Dir, Host) {
    let dir = Dir::new();
    let toe = match by {
        By::Plain => String::new(),
        By::Tls => encrypt(&dir, proofs, "ca", n),
    };
    let config = configure(&dir, n, &toe, &[(vm, n, "")]);
    let log = File::create(dir.join("log")).unwrap();
    let host = on.enter(|| Host::start_with_log(&dir, &config, log.into()));
    (dir, host)
}

/// Two hosts with a guest each, which listens.
struct World {
    a: SocketGuest,
    b: SocketGuest,
    one: Host,
    two: Host,
    dirs: [Dir; 2],
    proofs: Dir,
    _names: Vec<Namespace>,
}

fn world_by(of_one: By, of_two: By) -> World {
    let (first, second) = two_hosts();
    let world = world_on([&first, &second], [of_one, of_two]);
    World { _names: vec![first, second], ..world }
}

fn world() -> World {
    world_by(By::Tls, By::Tls)
}

fn world_on(on: [&Namespace; 2], by: [By; 2]) -> World {
    let proofs = certificates();
    let (one_dir, one) = start(on[0], 1, "a", by[0], &proofs);
    let (two_dir, two) = start(on[1], 2, "b", by[1], &proofs);
    let (mut a, mut b) = (boot(&one_dir, "a"), boot(&two_dir, "b"));
    listen(&mut a, "10.0.0.1:80");
    listen(&mut b, SERVER);
    World { a, b, one, two, dirs: [one_dir, two_dir], proofs, _names: Vec::new() }
}

#[test]
#[ignore = "needs root: it makes network namespaces; and openssl"]
fn encrypted_bytes_cross_both_ways_and_both_ends_are_clean() {
    let World { mut a, mut b, one, two, dirs, .. } = world();
    cross(&mut a, &mut b);
    until(&mut [&mut a, &mut b], "nothing is left", |_| {
        toe(&one, "a").sockets == 0 && toe(&two, "b").sockets == 0
    });
    assert_eq!(toe(&two, "b").bytes_to_guest, 3_000_001);
    // The next connection has the same stream.
    let (at_a, at_b) = connect(&mut a, &mut b, SERVER);
    a.write(at_a, b"again");
    until(&mut [&mut a, &mut b], "bytes", |g| g[1].socket(at_b).got == b"again");
    let all = [fabric(&one), fabric(&two)].map(|it| (it.streams, it.encrypted, it.unproven));
    assert_eq!(all, [(1, 1, 0); 2]);
    assert_eq!((fabric(&one).dialed, fabric(&one).reused, fabric(&two).accepted), (1, 1, 1));
    // Ten at once, ten times, the other way as well. On a busy machine a hundred handshakes take
    // longer than a stream may take to begin.
    connect(&mut b, &mut a, "10.0.0.1:80");
    for tens in 0..10 {
        let ten: Vec<_> = (0..10).map(|_| try_connect(&mut a, SERVER).unwrap()).collect();
        until(&mut [&mut a, &mut b], "ten are open", |g| {
            ten.iter().all(|at| g[0].socket(*at).is_open)
        });
        for (at, n) in ten.iter().zip(10 * tens..) {
            a.write(*at, &bytes(n, 5000));
        }
    }
    let has = |b: &SocketGuest, n| b.sockets.values().any(|it| it.got == bytes(n, 5000));
    until(&mut [&mut a, &mut b], "all is there", |g| (0..100).all(|n| has(g[1], n)));
    let all = [fabric(&one), fabric(&two)].map(|it| (it.encrypted, it.lost, it.unproven));
    assert_eq!(all, [(102, 0, 0); 2]);
    assert_eq!([&one, &two].map(|host| host.status().refused_calls), [0, 0]);
    until(&mut [], "it is said", |_| has_said(&dirs[0], "a host has proved who it is"));
}

#[test]
#[ignore = "needs root: it makes network namespaces; and openssl"]
fn who_does_not_read_what_is_encrypted_stops_its_writer_and_nobody_else() {
    let World { mut a, mut b, one, two, dirs: _dirs, .. } = world();
    let (at_a, at_b) = one_is_not_read(&mut a, &mut b, || {});
    // It is off its CPU, and has no buffers.
    b.refills = false;
    let (before, sent) = (b.socket(at_b).got.len(), bytes(4, 3_000_000));
    a.write(at_a, &sent);
    until(&mut [&mut a, &mut b], "it has none", |g| !g[1].has_buffers());
    let from_b = bytes(5, 1000);
    b.write(at_b, &from_b);
    until(&mut [&mut a, &mut b], "the other way goes on", |g| {
        g[0].socket(at_a).got.len() == from_b.len()
    });
    b.refill();
    until(&mut [&mut a, &mut b], "all is there", |g| {
        g[1].socket(at_b).got.len() == before + sent.len()
    });
    assert!(b.socket(at_b).got[before..] == sent && a.socket(at_a).got == from_b);
    until(&mut [&mut a, &mut b], "nothing is kept", |_| {
        toe(&one, "a").kept_bytes == 0 && toe(&two, "b").kept_bytes == 0
    });
    assert_eq!((fabric(&one).lost, fabric(&two).lost), (0, 0));
}

#[test]
#[ignore = "needs root: it makes network namespaces; and openssl"]
fn when_a_guest_resets_or_a_daemon_dies_the_other_guest_reads_a_reset() {
    let World { mut a, mut b, one, two, dirs: _dirs, .. } = world();
    outlives_its_writer(&mut a, &mut b);
    let (at_a, at_b) = connect(&mut a, &mut b, SERVER);
    a.write(at_a, &bytes(3, 4_000_000));
    until(&mut [&mut a, &mut b], "some of it", |g| g[1].socket(at_b).got.len() > 1_000_000);
    one.signal(Signal::SIGKILL);
    until(&mut [&mut b], "it hears of it", |g| g[0].socket(at_b).is_reset);
    assert!(!b.socket(at_b).has_ended, "no clean end");
    assert_eq!(ask(&mut b, Ask::Describe(at_b)), RESET);
    assert_eq!(fabric(&two).nonsense, 0);
}

/// A fault of the next bytes under way, from the first host or to it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Deed {
    /// The byte at this place is another.
    Change { to_second: bool, at: usize },
    /// No more than so many come, and nothing after them.
    Cut { to_second: bool, at: usize },
}

/// Something that stands between two hosts and passes on the bytes of their streams.
struct Relay {
    /// All that has passed.
    seen: Arc<Mutex<Vec<u8>>>,
    deed: Arc<Mutex<Option<Deed>>>,
    listener: TcpListener,
}

impl Relay {
    /// It has the second host's address for the first one, and the first one's for the second.
    fn start(near: &Namespace, far: &Namespace, port: u16) -> Self {
        let listener = near.enter(|| TcpListener::bind(("192.0.2.2", port)).unwrap());
        let (seen, deed) = (Arc::default(), Arc::default());
        let relay = Self { seen, deed, listener };
        let (seen, deed) = (Arc::clone(&relay.seen), Arc::clone(&relay.deed));
        let accepts = relay.listener.try_clone().unwrap();
        // Threads go into a namespace for ever.
        let far = File::open(far.path()).unwrap();
        thread::spawn(move || {
            nix::sched::setns(far, nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
            while let Ok((first, _)) = accepts.accept() {
                let Ok(second) = TcpStream::connect(("192.0.2.2", port)) else { continue };
                for to_second in [true, false] {
                    let ends = [&first, &second].map(|it| it.try_clone().unwrap());
                    let (seen, deed) = (Arc::clone(&seen), Arc::clone(&deed));
                    thread::spawn(move || {
                        let [first, second] = ends;
                        let (from, to) = if to_second { (first, second) } else { (second, first) };
                        pass_on(from, to, to_second, &seen, &deed);
                    });
                }
            }
        });
        relay
    }

    fn does(&self, deed: Deed) {
        *self.deed.lock().unwrap() = Some(deed);
    }

    fn is_done(&self) -> bool {
        self.deed.lock().unwrap().is_none()
    }

    fn has_seen(&self, what: &[u8]) -> bool {
        self.seen.lock().unwrap().windows(what.len()).any(|there| there == what)
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        // Nobody waits for connections any more (shutdown(2) of Linux).
        let _ = rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both);
    }
}

fn pass_on(
    mut from: TcpStream,
    mut to: TcpStream,
    to_second: bool,
    seen: &Mutex<Vec<u8>>,
    deed: &Mutex<Option<Deed>>,
) {
    let mut bytes = [0; 16 << 10];
    while let Ok(len @ 1..) = from.read(&mut bytes) {
        let mut now = &mut bytes[..len];
        seen.lock().unwrap().extend(&*now);
        let mut next = deed.lock().unwrap();
        let mut goes_on = true;
        match *next {
            Some(Deed::Change { to_second: its, at }) if its == to_second && at < len => {
                now[at] ^= 1;
                *next = None;
            }
            Some(Deed::Cut { to_second: its, at }) if its == to_second && at < len => {
                now = &mut now[..at];
                goes_on = false;
                *next = None;
            }
            _ => {}
        }
        drop(next);
        if to.write_all(now).is_err() || !goes_on {
            break;
        }
    }
    let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
}

/// Two hosts that reach each other by what is between them alone.
fn with_relay(by: By) -> (World, Relay) {
    let (near, far) = (two_hosts(), two_hosts());
    let port = if by == By::Tls { PROOF_PORT } else { PORT };
    let relay = Relay::start(&near.1, &far.0, port);
    let world = world_on([&near.0, &far.1], [by, by]);
    (World { _names: vec![near.0, near.1, far.0, far.1], ..world }, relay)
}

#[test]
#[ignore = "needs root: it makes network namespaces; and openssl"]
fn who_is_between_two_hosts_reads_nothing_of_what_is_encrypted() {
    for by in [By::Plain, By::Tls] {
        let (world, relay) = with_relay(by);
        let World { mut a, mut b, one: _one, two: _two, dirs: _dirs, .. } = world;
        let (at_a, at_b) = connect(&mut a, &mut b, SERVER);
        let [up, down] = ["there and back, ", "back and there, "].map(|text| text.repeat(50_000));
        a.write(at_a, up.as_bytes());
        b.write(at_b, down.as_bytes());
        until(&mut [&mut a, &mut b], "all is there", |g| {
            g[0].socket(at_a).got.len() == down.len() && g[1].socket(at_b).got.len() == up.len()
        });
        assert!(a.socket(at_a).got == down.as_bytes() && b.socket(at_b).got == up.as_bytes());
        assert!(relay.seen.lock().unwrap().len() > up.len() + down.len());
        // Nor of hello, and who speaks to whom.
        let request = Request {
            network: VNI,
            from: "10.0.0.1:2000".parse().unwrap(),
            to: SERVER.parse().unwrap(),
        };
        let guests = &request.emit()[8..];
        for what in [&up.as_bytes()[..20], &down.as_bytes()[..20], b"npvtoe", guests] {
            assert_eq!(relay.has_seen(what), by == By::Plain, "{by:?}: {what:?}");
        }
    }
}

#[test]
#[ignore = "needs root: it makes network namespaces; and openssl"]
fn who_changes_or_cuts_what_is_encrypted_causes_a_reset_and_never_a_clean_end() {
    let (World { mut a, mut b, one, two, dirs, .. }, relay) = with_relay(By::Tls);
    let deeds = [true, false].into_iter().flat_map(|to_second| {
        let change = [3, 5, 6, 30, 50].map(|at| Deed::Change { to_second, at });
        let cut = [0, 7, 30, 50].map(|at| Deed::Cut { to_second, at });
        change.into_iter().chain(cut)
    });
    for (deed, n) in deeds.zip(0..) {
        let (at_a, at_b) = connect(&mut a, &mut b, SERVER);
        let sent = bytes(n, 300_000);
        a.write(at_a, &sent);
        b.write(at_b, &sent);
        until(&mut [&mut a, &mut b], "all is there", |g| {
            g[0].socket(at_a).got.len() == sent.len() && g[1].socket(at_b).got.len() == sent.len()
        });
        relay.does(deed);
        // It is done to bytes, or to the end.
        // (Of a record that is said to be longer, the rest is waited for.)
        let is_of_end = n % 2 == 1 && !matches!(deed, Deed::Change { at: 3, .. });
        for (guest, at) in [(&mut a, at_a), (&mut b, at_b)] {
            if is_of_end {
                guest.shut_down(at);
            } else {
                guest.write(at, &sent);
            }
        }
        until(&mut [&mut a, &mut b], &format!("a reset: {deed:?}"), |g| {
            g[0].socket(at_a).is_reset && g[1].socket(at_b).is_reset
        });
        assert!(relay.is_done());
        let (Deed::Change { to_second, .. } | Deed::Cut { to_second, .. }) = deed;
        let (guest, at) = if to_second { (&mut b, at_b) } else { (&mut a, at_a) };
        assert!(!guest.socket(at).has_ended, "{deed:?}");
        assert_eq!(ask(guest, Ask::Describe(at)), RESET);
        for (guest, at) in [(&a, at_a), (&b, at_b)] {
            assert!(sent.starts_with(&guest.socket(at).got[sent.len()..]), "{deed:?}");
        }
    }
    assert_eq!((fabric(&one).nonsense, fabric(&two).nonsense), (0, 0));
    assert!(!has_said(&dirs[0], "does not take an encrypted stream"));
    // The next is as good as ever.
    let (at_a, at_b) = connect(&mut a, &mut b, SERVER);
    a.write(at_a, b"on");
    until(&mut [&mut a, &mut b], "bytes", |g| g[1].socket(at_b).got == b"on");
}

#[test]
#[ignore = "needs root: it makes network namespaces; and openssl"]
fn hosts_of_which_one_encrypts_streams_reach_each_others_guests_by_guest_tcp() {
    let World { mut a, mut b, one, two, dirs, .. } = world_by(By::Tls, By::Plain);
    is_native(&mut a, SERVER);
    let said = "no encrypted stream to a host";
    until(&mut [], said, |_| fabric(&one).unproven > 0 && has_said(&dirs[0], said));
    let before = fabric(&one).unproven;
    is_native(&mut b, "10.0.0.1:80");
    until(&mut [], "it is counted", |_| fabric(&one).unproven > before);
    let said = "a host does not encrypt streams, and this one does";
    until(&mut [], said, |_| has_said(&dirs[0], said));
    for host in [&one, &two] {
        assert_eq!((fabric(host).streams, fabric(host).encrypted), (0, 0));
    }
}

#[test]
#[ignore = "needs root: it makes network namespaces; and openssl"]
fn a_host_that_does_not_believe_the_one_that_begins_is_not_waited_for_and_it_is_said() {
    let names = two_hosts();
    let proofs = certificates();
    let (one_dir, one) = start(&names.0, 1, "a", By::Tls, &proofs);
    // It shows what the first one believes, and believes others.
    let dir = Dir::new();
    let keys = encrypt(&dir, &proofs, "ca", 2);
    std::fs::copy(proofs.join("other.pem"), dir.join("ca.pem")).unwrap();
    let config = configure(&dir, 2, &keys, &[("b", 2, "")]);
    let two = names.1.start(&dir, &config);
    let (mut a, mut b) = (boot(&one_dir, "a"), boot(&dir, "b"));
    listen(&mut b, SERVER);
    is_native(&mut a, SERVER);
    let said = "a host does not take an encrypted stream";
    until(&mut [], said, |_| has_said(&one_dir, said) && has_said(&one_dir, "alert"));
    until(&mut [], "it is counted", |_| fabric(&one).unproven == 1 && fabric(&two).unproven == 1);
    assert_eq!((fabric(&two).accepted, fabric(&one).encrypted), (0, 0));
}

#[test]
#[ignore = "needs root: it makes network namespaces; and openssl"]
fn certificates_that_change_end_no_encrypted_stream() {
    let World { mut a, mut b, one, dirs, proofs, two: _two, .. } = world();
    let (at_a, at_b) = connect(&mut a, &mut b, SERVER);
    let sent = bytes(3, 3_000_000);
    b.reads(at_b, false);
    a.write(at_a, &sent);
    let changed =
        |dir| move |_: &mut [&mut SocketGuest]| has_said(dir, "certificates have changed");
    show(&dirs[1], &proofs, "other", 2);
    until(&mut [&mut a, &mut b], "the second host has seen it", changed(&dirs[1]));
    b.reads(at_b, true);
    until(&mut [&mut a, &mut b], "what flows goes on", |g| {
        g[1].socket(at_b).got.len() == sent.len()
    });
    assert!(b.socket(at_b).got == sent);
    // The next needs what holds now.
    is_native(&mut a, SERVER);
    show(&dirs[0], &proofs, "other", 1);
    until(&mut [&mut a, &mut b], "the first host has seen it", changed(&dirs[0]));
    connect(&mut b, &mut a, "10.0.0.1:80");
    a.write(at_a, b"!");
    until(&mut [&mut a, &mut b], "bytes", |g| g[1].socket(at_b).got.len() == sent.len() + 1);
    assert_eq!(fabric(&one).lost, 1, "the one that went by guest TCP");
}

/// A host of the test whose stream is encrypted.
struct Sealed(StreamOwned<ClientConnection, TcpStream>);

impl Sealed {
    /// Host 1 of the CA, at the second host's port.
    fn new(hosts: &Hosts<'_>, names: &(Namespace, Namespace)) -> Self {
        Self(hosts.client(Some("ca-1"), STREAM, Stranger::at(&names.0, 1, PROOF_PORT).0))
    }

    fn says(&mut self, bytes: &[u8]) -> &mut Self {
        // It may have been hung up on already.
        let _ = self.0.write_all(bytes);
        self
    }

    fn shows(&mut self, half: &[u8; 32]) -> &mut Self {
        self.says(&[&b"npvtoe\0\x01"[..], half].concat())
    }

    /// Both have said hello.
    fn meets(&mut self) -> &mut Self {
        let mut hello = [1; 40];
        self.shows(&[0; 32]).0.read_exact(&mut hello).unwrap();
        assert_eq!(hello[8..], [0; 32]);
        self
    }

    fn asks(&mut self, serial: u64, from: &str) -> &mut Self {
        let to = SERVER.parse().unwrap();
        let request = Request { network: VNI, from: from.parse().unwrap(), to };
        let asked = message(serial, Kind::Request { edge: 1 << 16 });
        self.says(&[&asked.emit()[..], &request.emit()].concat())
    }

    fn hears(&mut self) -> Kind {
        let mut head = [0; LEN];
        self.0.read_exact(&mut head).unwrap();
        Message::parse(&head).unwrap().kind
    }

    /// It hears nothing more.
    fn is_hung_up_on(&mut self) {
        assert!(!matches!(self.0.read(&mut [0; 64]), Ok(1..)));
    }
}

#[test]
#[ignore = "needs root: it makes network namespaces; and openssl"]
fn who_does_not_prove_who_it_is_begins_no_encrypted_stream() {
    let (names, proofs) = (two_hosts(), certificates());
    let (dir, two) = start(&names.1, 2, "b", By::Tls, &proofs);
    let mut b = boot(&dir, "b");
    listen(&mut b, SERVER);
    let hosts = Hosts(&proofs);
    let cases = [
        (None, STREAM, "peer sent no certificates"),
        (Some("other-1"), STREAM, "invalid peer certificate"),
        (Some("ca-3"), STREAM, "its certificate is not for its address"),
        (Some("ca-1"), OTHER, "peer doesn't support any known protocol"),
    ];
    for (n, (name, protocol, why)) in (1..).zip(cases) {
        let tcp = Stranger::at(&names.0, 1, PROOF_PORT).0;
        Sealed(hosts.client(name, protocol, tcp)).shows(&[0; 32]).is_hung_up_on();
        until(&mut [], why, |_| fabric(&two).unproven == n);
        // Each is another day's news, but this is the same minute.
        until(&mut [], why, |_| n > 1 || has_said(&dir, why));
    }
    // Bytes that are not TLS; a host without guests there.
    names.0.ip("addr add 192.0.2.4/24 dev v0");
    Stranger::at(&names.0, 1, PROOF_PORT).says(&[0; 64]).is_hung_up_on();
    Stranger::at(&names.0, 4, PROOF_PORT).is_hung_up_on();
    until(&mut [], "they are counted", |_| fabric(&two).unproven == 6);
    // A stream in the clear, of a host with guests and of one without.
    Stranger::new(&names.0, 1).shows(&[0; 32]).is_hung_up_on();
    let said = "a host does not encrypt streams, and this one does";
    until(&mut [], said, |_| has_said(&dir, said));
    Stranger::new(&names.0, 4).is_hung_up_on();
    let all = fabric(&two);
    assert_eq!((all.unproven, all.refused, all.streams, all.accepted), (7, 1, 0, 0));
    // A host shows nothing else, speaks for no others, and does not lie.
    Sealed::new(&hosts, &names).shows(&[7; 32]).is_hung_up_on();
    let mut one = Sealed::new(&hosts, &names);
    let refused = Kind::Reset(Errno::NotByToe);
    assert_eq!(one.meets().asks(1, "10.0.0.9:5").hears(), refused);
    one.says(&[0xff; LEN]).is_hung_up_on();
    let all = fabric(&two);
    assert_eq!((all.unproven, all.nonsense, all.encrypted), (7, 2, 0));
}

#[test]
#[ignore = "needs root: it makes network namespaces; and openssl"]
fn a_host_may_change_its_keys_and_ends_a_stream_as_it_likes_and_none_is_a_clean_end() {
    let (names, proofs) = (two_hosts(), certificates());
    let (dir, two) = start(&names.1, 2, "b", By::Tls, &proofs);
    let mut b = boot(&dir, "b");
    listen(&mut b, SERVER);
    let hosts = Hosts(&proofs);
    for (serial, says_its_end) in [(1, true), (2, false)] {
        let mut one = Sealed::new(&hosts, &names);
        one.meets().asks(serial, "10.0.0.1:5");
        let open =
            |b: &SocketGuest| b.sockets.values().filter(|it| it.is_open && !it.is_reset).count();
        until(&mut [&mut b], "a connection", |g| open(g[0]) == 2);
        assert!(matches!(one.hears(), Kind::Established { .. }));
        let is_it = |b: &SocketGuest| {
            let mut all = b.sockets.iter().filter(|(at, it)| at.host >= 1 << 16 && !it.is_reset);
            *all.next().unwrap().0
        };
        let at_b = is_it(&b);
        let sent = bytes(serial, 30_000);
        for (part, at) in sent.chunks(1000).zip((0..).step_by(1000)) {
            one.0.conn.refresh_traffic_keys().unwrap();
            let data = Kind::Data { offset: at, len: 1000 };
            // The header of one message and the payload of another are in one record.
            one.says(&[&message(serial, data).emit()[..], &part[..400]].concat());
            one.says(&part[400..]);
        }
        until(&mut [&mut b], "bytes", |g| g[0].socket(at_b).got == sent);
        b.write(at_b, b"keys of its own");
        until(&mut [&mut b], "it is sent", |g| g[0].socket(at_b).is_written());
        while !matches!(one.hears(), Kind::Data { len: 15, .. }) {}
        let mut got = [0; 15];
        one.0.read_exact(&mut got).unwrap();
        assert_eq!(&got, b"keys of its own");
        if says_its_end {
            one.0.conn.send_close_notify();
            one.0.flush().unwrap();
        }
        drop(one.0.sock.shutdown(Shutdown::Write));
        until(&mut [&mut b], "a reset", |g| g[0].socket(at_b).is_reset);
        assert!(!b.socket(at_b).has_ended);
        assert_eq!(ask(&mut b, Ask::Describe(at_b)), RESET);
    }
    assert_eq!(fabric(&two).nonsense, 0);
}

#[test]
#[ignore = "needs root: it makes network namespaces; and openssl"]
fn a_host_with_many_handshakes_keeps_no_other_host_from_its_own() {
    let (names, proofs) = (two_hosts(), certificates());
    let (dir, two) = start(&names.1, 2, "b", By::Tls, &proofs);
    let _b = boot(&dir, "b");
    // As many as there may be say nothing; for the others there is no place.
    let crowd: Vec<_> = (0..100).map(|_| Stranger::at(&names.0, 1, PROOF_PORT)).collect();
    until(&mut [], "others are hung up on", |_| fabric(&two).unproven >= 68);
    let tcp = Stranger::at(&names.1, 3, PROOF_PORT).0;
    let mut three = Sealed(Hosts(&proofs).client(Some("ca-3"), STREAM, tcp));
    three.meets();
    assert_eq!((fabric(&two).encrypted, fabric(&two).accepted), (1, 1));
    drop(crowd);
}

#[test]
#[ignore = "needs root: it makes network namespaces; and openssl"]
fn a_host_that_is_begun_to_proves_who_it_is_before_it_is_told_anything() {
    let (names, proofs) = (two_hosts(), certificates());
    let hosts = Hosts(&proofs);
    let door = names.1.enter(|| TcpListener::bind(("192.0.2.3", PROOF_PORT)).unwrap());
    // Another host's certificate, another CA's, another protocol, no TLS, silence.
    for case in ["ca-2", "other-3", "ca-3", "", "-"] {
        let (dir, one) = start(&names.0, 1, "a", By::Tls, &proofs);
        let mut a = boot(&dir, "a");
        let mut told = Vec::new();
        thread::scope(|scope| {
            let it = scope.spawn(|| {
                let (mut tcp, _) = door.accept().unwrap();
                match case {
                    "" => drop(tcp.write_all(b"HTTP/1.1 200 OK\r\n\r\n")),
                    "-" => drop(tcp.read_to_end(&mut Vec::new())),
                    _ => drop(hosts.server(case, OTHER, tcp).read_to_end(&mut told)),
                }
            });
            is_native(&mut a, "10.0.0.9:80");
            drop(it.join());
        });
        assert_eq!(told, b"", "{case}");
        until(&mut [], case, |_| fabric(&one).unproven == 1);
        until(&mut [], case, |_| has_said(&dir, "no encrypted stream to a host"));
    }
}

#[test]
#[ignore = "needs root: it makes network namespaces; and openssl"]
fn encrypted_streams_go_on_when_nobody_begins_new_ones() {
    let World { mut a, mut b, one, dirs: _dirs, two: _two, .. } = world();
    let (at_a, at_b) = connect(&mut a, &mut b, SERVER);
    let pid = one.pid();
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    let is_it = |pid: &&str| {
        std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|it| it == "np-toe\n")
    };
    let dialers: Vec<_> = children.split_whitespace().filter(is_it).collect();
    assert_eq!(dialers.len(), 1);
    let dialer = nix::unistd::Pid::from_raw(dialers[0].parse().unwrap());
    nix::sys::signal::kill(dialer, Signal::SIGKILL).unwrap();
    until(&mut [&mut a], "nobody connects", |g| try_connect(g[0], SERVER).is_err());
    a.write(at_a, b"on");
    until(&mut [&mut a, &mut b], "bytes", |g| g[1].socket(at_b).got == b"on");
}
