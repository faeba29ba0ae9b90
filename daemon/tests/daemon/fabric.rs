//! The virtual TOE between two hosts: daemons in network namespaces, guests whose drivers are ours,
//! and hosts that lie. Needs root.

use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use nightporter_api::{Change, FabricStatus};
use nightporter_core::toe::control::Ask;
use nightporter_core::toe::errno::Errno;
use nightporter_core::toe::id::{ShadowId, Side};
use nightporter_core::toe::message::{Kind, LEN, Message, Request};
use nightporter_core::toe::vsock::Ports;
use nix::sys::signal::Signal;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::host::{Dir, Host, LIMIT, command_after};
use crate::overlay::{Namespace, VNI, overlay, two_hosts};
use crate::sockets::{SocketGuest, ask, connect, listen, try_connect, until};
use crate::toe::{
    NATIVE, RESET, SERVER, boot, bytes, cross, finds_a_listener_full, one_is_not_read,
    outlives_its_writer, socket, toe,
};

pub(crate) const PORT: u16 = 4793;

/// `[[station]]` of all VMs: the last byte of its address and that of its host.
const STATIONS: [(u8, u8); 4] = [(1, 1), (2, 2), (3, 2), (9, 3)];

fn stations() -> String {
    let station = |(vm, host): &(u8, u8)| {
        format!(
            "[[station]]\nvni = {VNI}\nmac = \"52:54:00:00:00:0{vm}\"\nhost = \"192.0.2.{host}\"\n\
             ips = [\"10.0.0.{vm}\"]\n"
        )
    };
    STATIONS.iter().map(station).collect()
}

/// A daemon on this host, with these VMs.
fn start(on: &Namespace, n: u8, vms: &[(&str, u8, &str)]) -> (Dir, Host) {
    let dir = Dir::new();
    let config = configure(&dir, n, "", vms);
    let host = on.start(&dir, &config);
    (dir, host)
}

/// The daemon's configuration, with these keys of `[toe]`.
pub(crate) fn configure(dir: &Dir, n: u8, toe: &str, vms: &[(&str, u8, &str)]) -> PathBuf {
    let peers: Vec<_> =
        (1..=3).filter(|it| *it != n).map(|it| format!("\"192.0.2.{it}\"")).collect();
    let vm = |&(name, ip, more): &(&str, u8, &str)| {
        let ips = format!("mac = \"52:54:00:00:00:0{ip}\"\nips = [\"10.0.0.{ip}\"]");
        dir.vm(name, &format!("{ips}\ntoe = true\n{more}"))
    };
    let over = overlay(&format!("192.0.2.{n}"), &peers.join(", "));
    let vms: String = vms.iter().map(vm).collect();
    dir.configure("metrics = \"off\"", &(format!("[toe]\n{toe}\n{over}") + &stations() + &vms))
}

/// Two hosts with a guest each, and another one on the second.
struct World {
    a: SocketGuest,
    b: SocketGuest,
    c: SocketGuest,
    one: Host,
    two: Host,
    dirs: [Dir; 2],
    names: (Namespace, Namespace),
}

fn world() -> World {
    let names = two_hosts();
    let (one_dir, one) = start(&names.0, 1, &[("a", 1, "")]);
    let (two_dir, two) = start(&names.1, 2, &[("b", 2, ""), ("c", 3, "")]);
    let a = boot(&one_dir, "a");
    let (mut b, mut c) = (boot(&two_dir, "b"), boot(&two_dir, "c"));
    listen(&mut b, SERVER);
    listen(&mut c, "10.0.0.3:80");
    World { a, b, c, one, two, dirs: [one_dir, two_dir], names }
}

pub(crate) fn fabric(host: &Host) -> FabricStatus {
    *host.status().fabric.expect("it has one")
}

#[test]
#[ignore = "needs root: it makes network namespaces"]
fn bytes_of_any_number_cross_both_ways_and_both_ends_are_clean() {
    let World { mut a, mut b, one, two, names: _names, dirs: _dirs, .. } = world();
    cross(&mut a, &mut b);
    until(&mut [&mut a, &mut b], "nothing is left", |_| {
        toe(&one, "a").sockets == 0 && toe(&two, "b").sockets == 0
    });
    assert_eq!(toe(&two, "b").bytes_to_guest, 3_000_001);
    // The next connection has the same stream.
    let (at_a, at_b) = connect(&mut a, &mut b, SERVER);
    a.write(at_a, b"again");
    until(&mut [&mut a, &mut b], "bytes", |g| g[1].socket(at_b).got == b"again");
    let (of_one, of_two) = (fabric(&one), fabric(&two));
    assert_eq!((of_one.streams, of_one.dialed, of_one.reused, of_one.lost), (1, 1, 1, 0));
    assert_eq!((of_two.streams, of_two.accepted, of_two.lost), (1, 1, 0));
}

#[test]
#[ignore = "needs root: it makes network namespaces"]
fn who_cannot_be_reached_by_toe_is_reached_by_guest_tcp() {
    let World { mut a, mut b, c, one, two, names, dirs } = world();
    // Nobody listens there.
    let ports = try_connect(&mut a, "10.0.0.2:81").unwrap();
    until(&mut [&mut a, &mut b], "a refusal", |g| g[0].socket(ports).is_reset);
    assert_eq!(ask(&mut a, Ask::Describe(ports)), NATIVE);
    // The stream is as good as before.
    connect(&mut a, &mut b, SERVER);
    assert_eq!((fabric(&one).dialed, fabric(&one).reused), (1, 1));
    // There is no daemon, and the next ones need not find out.
    let ports = try_connect(&mut a, "10.0.0.9:80").unwrap();
    until(&mut [&mut a], "nobody", |g| g[0].socket(ports).is_reset);
    assert_eq!(ask(&mut a, Ask::Describe(ports)), NATIVE);
    assert_eq!(try_connect(&mut a, "10.0.0.9:80"), Err(NATIVE));
    // Nobody has said where it is.
    assert_eq!(try_connect(&mut a, "10.0.0.8:80"), Err(NATIVE));
    // Its VMM has gone, or it is isolated.
    drop(b);
    until(&mut [&mut a], "its driver has gone", |_| !toe(&two, "b").running);
    let ports = try_connect(&mut a, SERVER).unwrap();
    until(&mut [&mut a], "nobody", |g| g[0].socket(ports).is_reset);
    assert_eq!(ask(&mut a, Ask::Describe(ports)), NATIVE);
    let keys = [("isolated".into(), "true".into())].into();
    two.change(Change::SetVm { name: "c".into(), keys });
    drop(c);
    let mut c = boot(&dirs[1], "c");
    listen(&mut c, "10.0.0.3:80");
    assert_eq!(try_connect(&mut c, "10.0.0.1:80"), Err(NATIVE));
    let ports = try_connect(&mut a, "10.0.0.3:80").unwrap();
    until(&mut [&mut a, &mut c], "apart", |g| g[0].socket(ports).is_reset);
    assert_eq!(ask(&mut a, Ask::Describe(ports)), NATIVE);
    drop(names);
}

#[test]
#[ignore = "needs root: it makes network namespaces"]
fn when_a_daemon_dies_in_mid_stream_the_other_guest_reads_a_reset() {
    for sender_dies in [true, false] {
        let World { mut a, mut b, one, two, names: _names, dirs: _dirs, .. } = world();
        let (at_a, at_b) = connect(&mut a, &mut b, SERVER);
        a.write(at_a, &bytes(3, 4_000_000));
        until(&mut [&mut a, &mut b], "some of it", |g| g[1].socket(at_b).got.len() > 1_000_000);
        let (dies, mut stays, at) = match sender_dies {
            true => (one, b, at_b),
            false => (two, a, at_a),
        };
        dies.signal(Signal::SIGKILL);
        until(&mut [&mut stays], "it hears of it", |g| g[0].socket(at).is_reset);
        assert!(!stays.socket(at).has_ended, "no clean end");
        assert_eq!(ask(&mut stays, Ask::Describe(at)), RESET);
    }
}

#[test]
#[ignore = "needs root: it makes network namespaces"]
fn who_does_not_read_stops_the_writer_and_nobody_else() {
    let World { mut a, mut b, mut c, one, names: _names, dirs: _dirs, two: _two, .. } = world();
    let (at_a, at_b) = one_is_not_read(&mut a, &mut b, || {});
    let (to_c, at_c) = connect(&mut a, &mut c, "10.0.0.3:80");
    let (slow, quick) = (bytes(4, 2_000_000), bytes(5, 2_000_000));
    // It is off its CPU, and has no buffers.
    b.refills = false;
    let before = b.socket(at_b).got.len();
    a.write(at_a, &slow);
    a.write(to_c, &quick);
    until(&mut [&mut a, &mut c], "others go on", |g| g[1].socket(at_c).got.len() == quick.len());
    b.refill();
    until(&mut [&mut a, &mut b], "all is there", |g| {
        g[1].socket(at_b).got.len() == before + slow.len()
    });
    assert!(b.socket(at_b).got[before..] == slow && c.socket(at_c).got == quick);
    assert_eq!(toe(&one, "a").kept_bytes, 0);
}

#[test]
#[ignore = "needs root: it makes network namespaces"]
fn a_guest_that_closes_or_dies_is_heard_of_on_the_other_host() {
    let World { mut a, mut b, one, two, names: _names, dirs, .. } = world();
    let at_b = outlives_its_writer(&mut a, &mut b);
    b.close(at_b);
    // A VMM that goes resets.
    let (_, at_b) = connect(&mut a, &mut b, SERVER);
    drop(a);
    until(&mut [&mut b], "a reset", |g| g[0].socket(at_b).is_reset);
    assert_eq!(ask(&mut b, Ask::Describe(at_b)), RESET);
    let mut a = boot(&dirs[0], "a");
    let (at_a, at_b) = connect(&mut a, &mut b, SERVER);
    b.write(at_b, b"again");
    until(&mut [&mut a, &mut b], "bytes", |g| g[0].socket(at_a).got == b"again");
    until(&mut [&mut a, &mut b], "no stream is left over", |_| {
        fabric(&one).streams == fabric(&two).streams
    });
    assert_eq!((fabric(&one).nonsense, fabric(&two).nonsense), (0, 0));
}

#[test]
#[ignore = "needs root: it makes network namespaces"]
fn a_guest_that_is_on_no_list_any_more_loses_its_connections_and_others_go_on() {
    let World { mut a, mut b, mut c, one, names: _names, dirs, two: _two } = world();
    let (to_b, _) = connect(&mut a, &mut b, SERVER);
    let (to_c, at_c) = connect(&mut a, &mut c, "10.0.0.3:80");
    let path = dirs[0].join("np.toml");
    let text = std::fs::read_to_string(&path).unwrap();
    let listed = "host = \"192.0.2.2\"\nips = [\"10.0.0.2\"]";
    std::fs::write(&path, text.replace(listed, "host = \"192.0.2.3\"\nips = [\"10.0.0.2\"]"))
        .unwrap();
    one.signal(Signal::SIGHUP);
    until(&mut [&mut a, &mut b, &mut c], "a reset", |g| g[0].socket(to_b).is_reset);
    assert_eq!(ask(&mut a, Ask::Describe(to_b)), RESET);
    a.write(to_c, b"on");
    until(&mut [&mut a, &mut c], "bytes", |g| g[1].socket(at_c).got == b"on");
}

#[test]
#[ignore = "needs root: it makes network namespaces"]
fn memory_that_goes_is_told_from_a_ring_that_lies_whoever_copies() {
    let names = two_hosts();
    let more = "allow_unsealed_memory = true";
    let (one_dir, one) = start(&names.0, 1, &[("a", 1, more)]);
    let (two_dir, two) = start(&names.1, 2, &[("b", 2, more)]);
    for of_sender in [true, false] {
        let mut a = SocketGuest::boot_unsealed(&socket(&one_dir, "a"));
        let mut b = SocketGuest::boot_unsealed(&socket(&two_dir, "b"));
        listen(&mut b, SERVER);
        let (at_a, at_b) = connect(&mut a, &mut b, SERVER);
        a.write(at_a, &bytes(9, 1000));
        until(&mut [&mut a, &mut b], "bytes", |g| g[1].socket(at_b).got.len() == 1000);
        if of_sender {
            a.sends_without_memory(at_a, 1000);
            until(&mut [&mut b], "it is reset", |g| g[0].socket(at_b).is_reset);
            assert_eq!(b.socket(at_b).got, bytes(9, 1000));
        } else {
            b.has_no_buffers();
            a.write(at_a, &bytes(9, 1000));
            until(&mut [&mut a], "it is reset", |g| g[0].socket(at_a).is_reset);
        }
        let faults = |host, vm| (toe(host, vm).memory_faults, toe(host, vm).ring_faults);
        let all = [faults(&one, "a"), faults(&two, "b")];
        assert_eq!(all, [(1, 0), (u64::from(!of_sender), 0)]);
    }
}

/// A host that is a socket of the test.
pub(crate) struct Stranger(pub(crate) TcpStream);

impl Stranger {
    /// From the address with this last byte to the second host's.
    pub(crate) fn new(names: &Namespace, from: u8) -> Self {
        Self::at(names, from, PORT)
    }

    /// Likewise, to this port.
    pub(crate) fn at(names: &Namespace, from: u8, port: u16) -> Self {
        let connect = || {
            use rustix::net::{AddressFamily, SocketType, bind, connect, socket};
            let socket = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
            bind(&socket, &format!("192.0.2.{from}:0").parse::<std::net::SocketAddr>().unwrap())
                .unwrap();
            connect(&socket, &format!("192.0.2.2:{port}").parse::<std::net::SocketAddr>().unwrap())
                .unwrap();
            TcpStream::from(socket)
        };
        let stream = names.enter(connect);
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        Self(stream)
    }

    pub(crate) fn says(&mut self, bytes: &[u8]) -> &mut Self {
        // It may have been hung up on already.
        let _ = self.0.write_all(bytes);
        self
    }

    fn hello(&mut self) -> &mut Self {
        self.shows(&[0; 32])
    }

    /// Says hello, with this where zeros are to be.
    pub(crate) fn shows(&mut self, half: &[u8]) -> &mut Self {
        self.says(&[&b"npvtoe\0\x01"[..], half].concat())
    }

    /// The first host, when both have said hello. It connects again while the second one hangs up,
    /// as it does while it knows no peers, for a moment after its start.
    pub(crate) fn met(names: &Namespace) -> Self {
        let start = Instant::now();
        loop {
            let mut it = Self::new(names, 1);
            match it.hello().0.read_exact(&mut [0; 40]) {
                Ok(()) => return it,
                Err(e) => assert!(start.elapsed() < LIMIT, "{e}"),
            }
        }
    }

    pub(crate) fn asks(&mut self, serial: u64, from: &str, to: &str) -> &mut Self {
        let request =
            Request { network: VNI, from: from.parse().unwrap(), to: to.parse().unwrap() };
        let message = message(serial, Kind::Request { edge: 1 << 16 });
        self.says(&message.emit()).says(&request.emit())
    }

    /// Opens a connection to the second host's guest, which listens. It asks again while that host
    /// does not know whose guest this is: stations reach its sockets a moment after its start.
    pub(crate) fn opens(&mut self, b: &mut SocketGuest, serial: u64, from: &str) {
        let start = Instant::now();
        loop {
            self.asks(serial, from, SERVER);
            until(&mut [&mut *b], "an answer", |_| self.has_news());
            match self.hears() {
                Kind::Established { .. } => return,
                Kind::Reset(Errno::NotByToe) if start.elapsed() < LIMIT => {}
                other => panic!("{other:?}"),
            }
        }
    }

    fn has_news(&self) -> bool {
        let mut fds = [PollFd::new(&self.0, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec::default())).unwrap() > 0
    }

    pub(crate) fn hears(&mut self) -> Kind {
        let mut head = [0; LEN];
        self.0.read_exact(&mut head).unwrap();
        Message::parse(&head).unwrap().kind
    }

    /// It hears nothing more.
    pub(crate) fn is_hung_up_on(&mut self) {
        let mut rest = Vec::new();
        // A reset is an end as well.
        let end = self.0.read_to_end(&mut rest).map_err(|e| e.kind());
        assert!(matches!(end, Ok(_) | Err(std::io::ErrorKind::ConnectionReset)), "{end:?}");
    }
}

pub(crate) fn message(serial: u64, kind: Kind) -> Message {
    Message { id: ShadowId { incarnation: 77, serial }, to: Side::Acceptor, kind }
}

#[test]
#[ignore = "needs root: it makes network namespaces"]
fn a_host_speaks_for_guests_that_are_registered_there_and_says_what_hosts_say() {
    let names = two_hosts();
    names.0.ip("addr add 192.0.2.4/24 dev v0");
    let (dir, two) = start(&names.1, 2, &[("b", 2, "")]);
    let mut b = boot(&dir, "b");
    listen(&mut b, SERVER);
    let stranger = |from| Stranger::new(&names.0, from);
    // No guest is registered there.
    stranger(4).hello().asks(0, "10.0.0.1:5", SERVER).is_hung_up_on();
    assert_eq!(fabric(&two).refused, 1);
    // For another host's guest, and for one that is here; to a network that there is not.
    let mut one = Stranger::met(&names.0);
    let refused = Kind::Reset(Errno::NotByToe);
    assert_eq!(one.asks(1, "10.0.0.9:5", SERVER).hears(), refused);
    assert_eq!(one.asks(2, "10.0.0.2:5", SERVER).hears(), refused);
    let foreign = Request { network: 8, ..request() };
    let asked = message(3, Kind::Request { edge: 0 });
    assert_eq!(one.says(&asked.emit()).says(&foreign.emit()).hears(), refused);
    // Its own may, and once.
    one.opens(&mut b, 4, "10.0.0.1:5");
    let at_b = *b.sockets.keys().find(|ports| ports.host >= 1 << 16).unwrap();
    let socket = |b: &SocketGuest| (b.socket(at_b).is_reset, b.socket(at_b).got.clone());
    // Messages of others about it, and messages that no host sends, end their streams and not that
    // connection.
    let data = |serial, len| message(serial, Kind::Data { offset: 0, len }).emit();
    let before = fabric(&two).nonsense;
    let to_opener = Message { to: Side::Opener, ..message(4, Kind::Taken) };
    let lies: [&[u8]; 6] = [
        &data(4, 3),
        &message(4, Kind::Reset(Errno::Reset)).emit(),
        &data(99, 3),
        &to_opener.emit(),
        &[0xff; LEN],
        &[&message(5, Kind::Request { edge: 0 }).emit()[..], &[0; 40]].concat(),
    ];
    for lie in lies {
        stranger(1).hello().says(lie).is_hung_up_on();
    }
    stranger(1).says(&[0; 40]).is_hung_up_on();
    stranger(1).shows(&[7; 32]).is_hung_up_on();
    assert_eq!(fabric(&two).nonsense, before + 8);
    assert_eq!(socket(&b), (false, Vec::new()));
    one.says(&data(4, 3)).says(b"abc");
    until(&mut [&mut b], "bytes", |g| g[0].socket(at_b).got == b"abc");
    // Out of its place.
    one.says(&message(4, Kind::Data { offset: 5, len: 3 }).emit()).is_hung_up_on();
    until(&mut [&mut b], "a reset", |g| g[0].socket(at_b).is_reset);
    assert_eq!(ask(&mut b, Ask::Describe(at_b)), RESET);
    assert!(!b.socket(at_b).has_ended);
}

fn request() -> Request {
    Request { network: VNI, from: "10.0.0.1:5".parse().unwrap(), to: SERVER.parse().unwrap() }
}

#[test]
#[ignore = "needs root: it makes network namespaces"]
fn a_stream_that_ends_in_the_middle_of_a_message_is_no_end() {
    let names = two_hosts();
    let (dir, _two) = start(&names.1, 2, &[("b", 2, "")]);
    let mut b = boot(&dir, "b");
    listen(&mut b, SERVER);
    for cut in [7, LEN, LEN + 2] {
        let mut one = Stranger::met(&names.0);
        let serial = cut as u64;
        one.opens(&mut b, serial, "10.0.0.1:5");
        let at_b: Ports =
            *b.sockets.iter().find(|(p, s)| p.host >= 1 << 16 && !s.is_reset).unwrap().0;
        let data = message(serial, Kind::Data { offset: 0, len: 3 }).emit();
        one.says(&[&data[..], b"abc"].concat()[..cut]);
        one.0.shutdown(Shutdown::Both).unwrap();
        until(&mut [&mut b], "a reset", |g| g[0].socket(at_b).is_reset);
        assert!(!b.socket(at_b).has_ended);
        assert_eq!(ask(&mut b, Ask::Describe(at_b)), RESET);
    }
}

/// A host that listens at the third address, and the next connection to it.
fn accept(listener: &TcpListener) -> (Stranger, Message) {
    let (stream, _) = listener.accept().unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    let mut it = Stranger(stream);
    it.0.read_exact(&mut [0; 40]).unwrap();
    it.hello();
    let asked = it.is_asked();
    (it, asked)
}

impl Stranger {
    fn is_asked(&mut self) -> Message {
        let mut asked = [0; LEN + 40];
        self.0.read_exact(&mut asked).unwrap();
        Message::parse(asked.first_chunk().unwrap()).unwrap()
    }

    /// About the connection that was asked for.
    fn answers(&mut self, asked: &Message, kind: Kind) -> &mut Self {
        self.says(&Message { to: Side::Opener, kind, ..*asked }.emit())
    }
}

#[test]
#[ignore = "needs root: it makes network namespaces"]
fn what_is_late_of_one_connection_means_nothing_for_the_next_of_its_stream() {
    let names = two_hosts();
    let (dir, one) = start(&names.0, 1, &[("a", 1, "")]);
    let mut a = boot(&dir, "a");
    let listener = names.1.enter(|| TcpListener::bind(("192.0.2.3", PORT)).unwrap());
    let established = Kind::Established { edge: 1 << 20 };
    let at = try_connect(&mut a, "10.0.0.9:80").unwrap();
    let (mut host, first) = accept(&listener);
    host.answers(&first, established);
    until(&mut [&mut a], "it is open", |g| g[0].socket(at).is_open);
    a.shut_down(at);
    assert_eq!(host.hears(), Kind::Fin { total: 0 });
    host.answers(&first, Kind::Taken).answers(&first, Kind::Fin { total: 0 });
    until(&mut [&mut a], "its end", |g| g[0].socket(at).has_ended);
    assert_eq!(host.hears(), Kind::Taken);
    a.close(at);
    // It has the same stream, where the first one's answer comes once more.
    let at = try_connect(&mut a, "10.0.0.9:80").unwrap();
    let second = host.is_asked();
    host.answers(&first, Kind::Taken).answers(&second, established);
    host.answers(&second, Kind::Fin { total: 0 });
    until(&mut [&mut a], "the other stream's end", |g| g[0].socket(at).has_ended);
    assert_eq!(host.hears(), Kind::Taken);
    a.write(at, b"abc");
    until(&mut [&mut a], "it is sent", |g| g[0].socket(at).is_written());
    assert_eq!(host.hears(), Kind::Data { offset: 0, len: 3 });
    assert_eq!(fabric(&one).lost, 0);
}

#[test]
#[ignore = "needs root: it makes network namespaces"]
fn a_host_that_was_connected_to_asks_for_no_connection_in_that_stream() {
    let names = two_hosts();
    let (dir, one) = start(&names.0, 1, &[("a", 1, "")]);
    let mut a = boot(&dir, "a");
    let listener = names.1.enter(|| TcpListener::bind(("192.0.2.3", PORT)).unwrap());
    let at = try_connect(&mut a, "10.0.0.9:80").unwrap();
    let (mut host, asked) = accept(&listener);
    host.answers(&asked, Kind::Reset(Errno::NotByToe));
    until(&mut [&mut a], "it is refused", |g| g[0].socket(at).is_reset);
    assert_eq!(fabric(&one).idle, 1);
    host.answers(&message(1, Kind::Taken), Kind::Request { edge: 0 });
    host.says(&request().emit()).is_hung_up_on();
    let FabricStatus { nonsense, idle, streams, .. } = fabric(&one);
    assert_eq!((nonsense, idle, streams), (1, 0, 0));
    // Its guests are reached as before, but where one was refused just now.
    assert_eq!(try_connect(&mut a, "10.0.0.9:80"), Err(NATIVE));
    let at = try_connect(&mut a, "10.0.0.9:81").unwrap();
    let (mut host, asked) = accept(&listener);
    host.answers(&asked, Kind::Established { edge: 1 << 20 });
    until(&mut [&mut a], "it is open", |g| g[0].socket(at).is_open);
}

#[test]
#[ignore = "needs root: it makes network namespaces"]
fn who_finds_a_listener_of_another_host_full_waits_by_guest_tcp() {
    let World { mut a, mut b, one, two: _two, names: _names, dirs: _dirs, .. } = world();
    finds_a_listener_full(&mut a, &mut b);
    let FabricStatus { dialed, reused, lost, .. } = fabric(&one);
    assert_eq!((dialed, reused, lost), (1, 1, 0), "the stream is as good as before");
}

#[test]
#[ignore = "needs root: it makes network namespaces"]
fn a_refusal_of_a_daemon_of_before_leaves_it_to_guest_tcp() {
    let names = two_hosts();
    let (dir, _one) = start(&names.0, 1, &[("a", 1, "")]);
    let mut a = boot(&dir, "a");
    let listener = names.1.enter(|| TcpListener::bind(("192.0.2.3", PORT)).unwrap());
    let at = try_connect(&mut a, "10.0.0.9:80").unwrap();
    let (mut host, asked) = accept(&listener);
    host.answers(&asked, Kind::Reset(Errno::Refused));
    until(&mut [&mut a], "it is refused", |g| g[0].socket(at).is_reset);
    assert_eq!(ask(&mut a, Ask::Describe(at)), NATIVE);
}

#[test]
#[ignore = "needs root: it makes network namespaces"]
fn a_daemon_that_stands_is_not_waited_for() {
    let World { mut a, two, one, names: _names, dirs: _dirs, b: _b, .. } = world();
    two.signal(Signal::SIGSTOP);
    // The kernel accepts for it.
    let at = try_connect(&mut a, SERVER).unwrap();
    until(&mut [&mut a], "it says nothing", |g| g[0].socket(at).is_reset);
    assert_eq!(ask(&mut a, Ask::Describe(at)), NATIVE);
    assert_eq!(try_connect(&mut a, SERVER), Err(NATIVE), "and it is known now");
    two.signal(Signal::SIGCONT);
    assert_eq!(fabric(&one).streams, 0);
}

#[test]
#[ignore = "needs root: it makes network namespaces"]
fn who_is_spoken_to_first_hears_that_it_is_connected_before() {
    let World { mut a, mut b, names: _names, dirs: _dirs, one: _one, two: _two, .. } = world();
    // It is off its CPU when the other one accepts and writes.
    let at_a = try_connect(&mut a, SERVER).unwrap();
    a.refills = false;
    a.give_up_buffers();
    until(&mut [&mut b], "it is called", |g| g[0].sockets.len() == 2);
    let at_b = *b.sockets.keys().find(|ports| ports.host >= 1 << 16).unwrap();
    b.write(at_b, b"welcome");
    until(&mut [&mut b], "it is written", |g| g[0].socket(at_b).is_written());
    a.refill();
    until(&mut [&mut a, &mut b], "bytes", |g| g[0].socket(at_a).got == b"welcome");
    assert!(a.socket(at_a).is_open);
}

#[test]
#[ignore = "needs root: it makes network namespaces"]
fn connections_go_on_when_nobody_makes_new_ones() {
    let World { mut a, mut b, two, one, names: _names, dirs: _dirs, .. } = world();
    let (at_a, at_b) = connect(&mut a, &mut b, SERVER);
    b.reads(at_b, false);
    let sent = bytes(8, 2_000_000);
    a.write(at_a, &sent);
    until(&mut [&mut a, &mut b], "it is full", |g| g[1].socket(at_b).unread.len() > 200_000);
    for host in [&one, &two] {
        let pid = host.pid();
        let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
        let is_it = |pid: &&str| {
            std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|it| it == "np-toe\n")
        };
        let dialer = children.split_whitespace().find(is_it).unwrap().parse().unwrap();
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(dialer), Signal::SIGKILL).unwrap();
    }
    until(&mut [&mut a], "nobody connects", |g| try_connect(g[0], SERVER) == Err(NATIVE));
    b.reads(at_b, true);
    until(&mut [&mut a, &mut b], "all is there", |g| g[1].socket(at_b).got.len() == sent.len());
    assert!(b.socket(at_b).got == sent);
    assert_eq!(fabric(&one).streams, 1);
}

/// The kernel counts descriptors under way of all processes of a user: tests that have many take
/// turns.
pub(crate) fn alone_with_descriptors() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// So many descriptors that were sent and that nobody has received.
pub(crate) fn descriptors_under_way(count: usize) -> [OwnedFd; 2] {
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
    const AT_ONCE: usize = 250;
    let flags = rustix::net::SocketFlags::CLOEXEC;
    let (family, kind) = (rustix::net::AddressFamily::UNIX, rustix::net::SocketType::STREAM);
    let (near, far) = rustix::net::socketpair(family, kind, flags, None).unwrap();
    let file = std::fs::File::open("/dev/null").unwrap();
    for _ in 0..count.div_ceil(AT_ONCE) {
        let files = [file.as_fd(); AT_ONCE];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(AT_ONCE))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&files)));
        sendmsg(&near, &[IoSlice::new(b"!")], &mut control, SendFlags::empty()).unwrap();
    }
    [near, far]
}

#[test]
#[ignore = "needs root: it makes network namespaces"]
fn who_sends_descriptors_that_nobody_receives_ends_no_process_of_the_daemon() {
    let _alone = alone_with_descriptors();
    let names = two_hosts();
    let dir = Dir::new();
    let config = configure(&dir, 1, "", &[("a", 1, "")]);
    let few = || Host::start_as(&dir, &mut command_after("ulimit -n 512", &config));
    let one = names.0.enter(few);
    let (two_dir, _two) = start(&names.1, 2, &[("b", 2, "")]);
    let (mut a, mut b) = (boot(&dir, "a"), boot(&two_dir, "b"));
    listen(&mut b, SERVER);
    let crowd = descriptors_under_way(600);
    let at = try_connect(&mut a, SERVER).unwrap();
    until(&mut [&mut a, &mut b], "it fails", |g| g[0].socket(at).is_reset);
    assert_eq!(ask(&mut a, Ask::Describe(at)), NATIVE);
    drop(crowd);
    // The other host is not taken for away.
    let at = try_connect(&mut a, SERVER).unwrap();
    until(&mut [&mut a, &mut b], "the next one does not", |g| g[0].socket(at).is_open);
    assert_eq!(fabric(&one).streams, 1);
}

#[test]
#[ignore = "needs root: it makes network namespaces"]
fn what_a_host_asks_again_and_again_beside_a_connection_is_not_answered() {
    let names = two_hosts();
    let (dir, _two) = start(&names.1, 2, &[("b", 2, "")]);
    let mut b = boot(&dir, "b");
    listen(&mut b, SERVER);
    let mut one = Stranger::met(&names.0);
    one.opens(&mut b, 4, "10.0.0.1:5");
    let at_b = *b.sockets.keys().find(|ports| ports.host >= 1 << 16).unwrap();
    assert_eq!(one.says(&message(4, Kind::Fin { total: 0 }).emit()).hears(), Kind::Taken);
    for _ in 0..1000 {
        let probe = |finished| Kind::Probe { sent: 0, finished, edge: 1 << 16 };
        one.says(&message(99, probe(false)).emit()).says(&message(4, probe(true)).emit());
    }
    // There is room for the rest as soon as all that has been heard.
    one.says(&message(4, Kind::Credit { edge: 1 << 20 }).emit());
    let (sent, mut got) = (bytes(7, 100_000), Payload::default());
    b.write(at_b, &sent);
    until(&mut [&mut b], "all is there, and nothing else", |_| {
        got.read(&mut one);
        got.bytes.len() == sent.len()
    });
    assert_eq!(got.bytes, sent);
}

#[test]
#[ignore = "needs root: it makes network namespaces"]
fn a_guest_leaves_as_many_streams_to_a_host_as_it_has_and_that_host_has_its_own() {
    let names = two_hosts();
    let few = |on: &Namespace, n, vms: &[(&str, u8, &str)]| {
        let dir = Dir::new();
        let config = configure(&dir, n, "", vms);
        // Of these there may be 128 streams, a quarter of them to a host.
        let host = on.enter(|| Host::start_as(&dir, &mut command_after("ulimit -n 256", &config)));
        (dir, host)
    };
    let (one_dir, one) = few(&names.0, 1, &[("a", 1, "")]);
    let (two_dir, two) = few(&names.1, 2, &[("b", 2, ""), ("c", 3, "")]);
    let [mut a, mut b, mut c] =
        [(&one_dir, "a"), (&two_dir, "b"), (&two_dir, "c")].map(|(dir, vm)| boot(dir, vm));
    listen(&mut a, "10.0.0.1:80");
    listen(&mut b, SERVER);
    let connect = |from: &mut SocketGuest, to: &mut SocketGuest, server| {
        let at = try_connect(from, server).unwrap();
        until(&mut [from, to], "an answer", |g| {
            g[0].socket(at).is_open || g[0].socket(at).is_reset
        });
        from.socket(at).is_open
    };
    let mut to_a = |from: &mut SocketGuest| {
        let open = (0..40).map(|_| connect(from, &mut a, "10.0.0.1:80"));
        open.filter(|is_open| *is_open).count()
    };
    assert_eq!([to_a(&mut b), to_a(&mut c)], [16, 8]);
    // It is not taken for away.
    assert!((0..10).all(|_| connect(&mut a, &mut b, SERVER)));
    let all = [fabric(&one), fabric(&two)].map(|it| (it.streams, it.refused, it.lost));
    assert_eq!(all, [(34, 0, 0); 2]);
}

/// The received payload of a connection.
#[derive(Default)]
struct Payload {
    raw: Vec<u8>,
    bytes: Vec<u8>,
}

impl Payload {
    /// Takes what is there.
    fn read(&mut self, from: &mut Stranger) {
        from.0.set_nonblocking(true).unwrap();
        let end = from.0.read_to_end(&mut self.raw).map_err(|e| e.kind());
        assert_eq!(end, Err(std::io::ErrorKind::WouldBlock));
        let mut rest = &self.raw[..];
        while let Some((head, behind)) = rest.split_first_chunk::<LEN>() {
            let (offset, len) = match Message::parse(head).unwrap().kind {
                Kind::Data { offset, len } => (offset, len),
                Kind::Probe { sent, .. } => (sent, 0),
                kind => panic!("{kind:?}"),
            };
            let Some((payload, behind)) = behind.split_at_checked(len as usize) else { break };
            assert_eq!(offset, self.bytes.len() as u64);
            self.bytes.extend(payload);
            rest = behind;
        }
        let done = self.raw.len() - rest.len();
        self.raw.drain(..done);
    }
}

/// A guest's connections to a host, that host's ends, and what came there.
type Slow = Vec<(Ports, Stranger, Payload)>;

/// So many connections of a guest to a host that has room for all and reads nothing by itself.
fn connect_to_slow(a: &mut SocketGuest, names: &(Namespace, Namespace), n: usize) -> Slow {
    let listener = names.1.enter(|| TcpListener::bind(("192.0.2.3", PORT)).unwrap());
    rustix::net::sockopt::set_socket_recv_buffer_size(&listener, 4096).unwrap();
    let connect = |_| {
        let ports = try_connect(a, "10.0.0.9:80").unwrap();
        let (mut host, asked) = accept(&listener);
        host.answers(&asked, Kind::Established { edge: 1 << 30 });
        until(&mut [&mut *a], "a connection", |g| g[0].socket(ports).is_open);
        (ports, host, Payload::default())
    };
    (0..n).map(connect).collect()
}

#[test]
#[ignore = "needs root: it makes network namespaces"]
fn a_host_that_takes_a_little_now_and_then_does_not_stop_a_guest_for_ever() {
    let names = two_hosts();
    let (one_dir, one) = start(&names.0, 1, &[("a", 1, "")]);
    let (dir, _two) = start(&names.1, 2, &[("b", 2, "")]);
    let (mut a, mut b) = (boot(&one_dir, "a"), boot(&dir, "b"));
    listen(&mut b, SERVER);
    let (to_b, at_b) = connect(&mut a, &mut b, SERVER);
    // The kernel keeps little.
    let tcp_wmem = || std::fs::write("/proc/sys/net/ipv4/tcp_wmem", "4096 16384 65536");
    names.0.enter(tcp_wmem).unwrap();
    let mut slow = connect_to_slow(&mut a, &names, 40);
    // The first sender, after others have been idle for a while, is shown much room and keeps it.
    for group in slow.chunks(8) {
        let (first, others) = group.split_at(2);
        let mut wrote = None::<Instant>;
        until(&mut [&mut a], "they have room", |g| {
            if wrote.is_none_or(|at| at.elapsed().as_millis() >= 50) {
                wrote = Some(Instant::now());
                first.iter().for_each(|(at, ..)| g[0].write(*at, b"!"));
            }
            first.iter().all(|(at, ..)| g[0].room(*at) > 900 << 10)
        });
        for (at, ..) in others {
            a.write(*at, b"!");
            until(&mut [&mut a], "it has room", |g| g[0].room(*at) > 64 << 10);
        }
    }
    let sent = bytes(7, 1 << 20);
    slow.iter().for_each(|(at, ..)| a.write(*at, &sent));
    until(&mut [&mut a], "so much is kept", |_| toe(&one, "a").kept_bytes > 16 << 20);
    a.write(to_b, b"late, but not never");
    let mut read = Instant::now();
    until(&mut [&mut a, &mut b], "it goes on", |g| {
        if read.elapsed().as_millis() >= 250 {
            read = Instant::now();
            slow.iter_mut().for_each(|(_, host, _)| drop(host.0.read(&mut [0; 2048])));
        }
        g[1].socket(at_b).got.ends_with(b"never")
    });
    assert!(slow.iter().any(|(at, ..)| a.socket(*at).is_reset));
}

#[test]
#[ignore = "needs root: it makes network namespaces"]
fn a_host_that_takes_nothing_does_not_stop_a_guest_for_others() {
    let names = two_hosts();
    let (one_dir, one) = start(&names.0, 1, &[("a", 1, "")]);
    let (dir, _two) = start(&names.1, 2, &[("b", 2, "")]);
    let (mut a, mut b) = (boot(&one_dir, "a"), boot(&dir, "b"));
    listen(&mut b, SERVER);
    let mut slow = connect_to_slow(&mut a, &names, 60);
    let (to_b, at_b) = connect(&mut a, &mut b, SERVER);
    let sent = bytes(7, 1 << 20);
    slow.iter().for_each(|(at, ..)| a.write(*at, &sent));
    until(&mut [&mut a], "nobody may send more", |g| {
        // They are when the guest's ring has waited for them.
        assert!(slow.iter().all(|(at, ..)| !g[0].socket(*at).is_reset), "{:?}", toe(&one, "a"));
        slow.iter().all(|(at, ..)| g[0].socket(*at).is_written() || !g[0].has_room(*at))
            && toe(&one, "a").kept_bytes > 1 << 20
    });
    let quick = bytes(8, 8 << 20);
    a.write(to_b, &quick);
    until(&mut [&mut a, &mut b], "others go on", |g| g[1].socket(at_b).got.len() == quick.len());
    assert!(b.socket(at_b).got == quick);
    assert!(slow.iter().all(|(at, ..)| !a.socket(*at).is_reset));
    assert!(slow.iter().any(|(at, ..)| !a.socket(*at).is_written()));
    // When it reads again they go on, and nothing is missing.
    until(&mut [&mut a], "all is there", |_| {
        slow.iter_mut().all(|(_, host, payload)| {
            payload.read(host);
            payload.bytes.len() == sent.len()
        })
    });
    assert!(slow.iter().all(|(.., payload)| payload.bytes == sent));
    assert_eq!(toe(&one, "a").kept_bytes, 0);
}
