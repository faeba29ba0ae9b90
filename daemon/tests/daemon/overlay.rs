//! Overlays: a host's switch and VXLAN peers in network namespaces of the test's own. Needs root.
//!
//! Peers are sockets of the test, which see every datagram; the kernel's own `vxlan` device, which
//! nobody here wrote; another daemon.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::Instant;

use nightporter_api::Change;
use nightporter_core::overlay::SOURCE_PORTS;
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rustix::net::sockopt::set_ip_tos;

use crate::fabric::{alone_with_descriptors, descriptors_under_way};
use crate::guest::{Guest, PLAIN, SENDS_SUPER};
use crate::host::{Dir, Host, LIMIT, command, command_after};
use crate::segment::{ACK, End, PSH, SYN, Segment, parse};

pub(crate) const VNI: u32 = 7;
const BULK: usize = 8 << 20;

/// A network namespace that goes with its descriptor.
pub(crate) struct Namespace(File);

impl Namespace {
    pub(crate) fn new() -> Self {
        let make = || {
            unshare(CloneFlags::CLONE_NEWNET).unwrap();
            File::open("/proc/thread-self/ns/net").unwrap()
        };
        let new = Self(thread::spawn(make).join().unwrap());
        new.ip("link set lo up");
        new
    }

    /// Runs `f` in it. Sockets and processes that it makes stay there.
    pub(crate) fn enter<T: Send>(&self, f: impl FnOnce() -> T + Send) -> T {
        let inside = || {
            setns(&self.0, CloneFlags::CLONE_NEWNET).unwrap();
            f()
        };
        thread::scope(|scope| scope.spawn(inside).join().unwrap())
    }

    fn run_ip(&self, arguments: &str) -> Output {
        self.enter(|| Command::new("ip").args(arguments.split(' ')).output().unwrap())
    }

    /// The output of `ip` there.
    pub(crate) fn says(&self, arguments: &str) -> String {
        String::from_utf8_lossy(&self.run_ip(arguments).stdout).into_owned()
    }

    pub(crate) fn ip(&self, arguments: &str) {
        let output = self.run_ip(arguments);
        assert!(output.status.success(), "ip {arguments}: {output:?}");
    }

    /// Until then an interface that is up drops what it is to send, and says nothing: the kernel
    /// gives it its queue when it has noticed the carrier, which waits for a lock that all
    /// namespaces share.
    fn until_it_sends(&self, dev: &str) {
        let start = Instant::now();
        while self.says(&format!("-o link show {dev}")).contains(" qdisc noop ") {
            assert!(start.elapsed() < LIMIT, "{dev} has no queue");
        }
    }

    /// A path that names it as long as it is there.
    pub(crate) fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.0.as_raw_fd())
    }

    pub(crate) fn start(&self, dir: &Dir, config: &Path) -> Host {
        self.enter(|| Host::start_as(dir, &mut command(config)))
    }
}

/// Two hosts joined by a veth pair: 192.0.2.1 has v0, and 192.0.2.2 and .3 have v1; over IPv6 they
/// are fd02::1 and fd02::2.
pub(crate) fn two_hosts() -> (Namespace, Namespace) {
    let (a, b) = (Namespace::new(), Namespace::new());
    a.ip(&format!("link add v0 type veth peer name v1 netns {}", b.path()));
    for (host, dev, n) in [(&a, "v0", 1), (&b, "v1", 2)] {
        host.ip(&format!("addr add 192.0.2.{n}/24 dev {dev}"));
        host.ip(&format!("addr add fd02::{n}/64 dev {dev} nodad"));
        host.ip(&format!("link set {dev} up"));
    }
    b.ip("addr add 192.0.2.3/24 dev v1");
    a.until_it_sends("v0");
    b.until_it_sends("v1");
    (a, b)
}

pub(crate) fn overlay(local: &str, peers: &str) -> String {
    format!("[[overlay]]\nname = \"over\"\nvni = {VNI}\nlocal = \"{local}\"\npeers = [{peers}]\n")
}

const LAN: &str = "[[uplink]]\nname = \"lan\"\nkind = \"tap\"\nifname = \"np0\"\n";

/// Where probes are for.
const NEAREST_BRIDGE: [u8; 6] = [1, 0x80, 0xc2, 0, 0, 0x0e];

/// A peer that is a socket of the test.
pub(crate) struct Peer(UdpSocket);

impl Peer {
    pub(crate) fn new(host: &Namespace, ip: &str) -> Self {
        let socket = host.enter(|| UdpSocket::bind((ip, 4789)).unwrap());
        socket.set_read_timeout(Some(LIMIT)).unwrap();
        Self(socket)
    }

    pub(crate) fn sends(&self, frame: &[u8]) {
        self.sends_bytes(&[&[8, 0, 0, 0, 0, 0, 7, 0], frame].concat());
    }

    fn sends_bytes(&self, datagram: &[u8]) {
        self.0.send_to(datagram, "192.0.2.1:4789").unwrap();
    }

    /// The frame of the next datagram, and its source port.
    pub(crate) fn gets(&self) -> (Vec<u8>, u16) {
        let mut bytes = vec![0; 1 << 16];
        let (len, from) = loop {
            let got = self.0.recv_from(&mut bytes).unwrap();
            // Whether it answers probes is asked beside frames.
            if bytes[8..14] != NEAREST_BRIDGE {
                break got;
            }
        };
        assert_eq!(bytes[..8], [8, 0, 0, 0, 0, 0, 7, 0]);
        assert_eq!(from.ip().to_string(), "192.0.2.1");
        assert!(SOURCE_PORTS.contains(&from.port()), "{from}");
        (bytes[8..len].to_vec(), from.port())
    }
}

/// A host with a VM, and its two peers, which are sockets.
pub(crate) struct World {
    pub(crate) dir: Dir,
    pub(crate) host: Host,
    pub(crate) peers: [Peer; 2],
    /// Where the daemon is.
    a: Namespace,
    /// Where the peers are.
    pub(crate) b: Namespace,
}

/// A failure prints how far frames came.
impl Drop for World {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("{:#?}", self.host.status().ports);
            for host in [&self.a, &self.b] {
                eprintln!("{}", host.says("-s link") + &host.says("neigh"));
            }
        }
    }
}

pub(crate) fn world(vm: &str) -> World {
    let (a, b) = two_hosts();
    let dir = Dir::new();
    let ports = overlay("192.0.2.1", "\"192.0.2.2\", \"192.0.2.3\"") + &dir.vm("a", vm);
    let config = dir.configure("metrics = \"off\"", &ports);
    let host = a.start(&dir, &config);
    let peers = ["192.0.2.2", "192.0.2.3"].map(|ip| Peer::new(&b, ip));
    World { dir, host, peers, a, b }
}

pub(crate) const VM: End = End(1, 40_001);
pub(crate) const FAR: End = End(2, 80);

/// A frame that is nothing but Ethernet, with a number in it.
pub(crate) fn numbered(to: [u8; 6], from: End, n: u8) -> Vec<u8> {
    let mut frame = [to, from.mac()].concat();
    frame.extend([0x88, 0xb5, n]); // "local experimental" (IEEE 802)
    frame.resize(60, 0);
    frame
}

pub(crate) const ALL: [u8; 6] = [0xff; 6];

/// The next frame that is IPv4, of a guest that is sent one at a time.
fn next_ipv4(guest: &mut Guest) -> Vec<u8> {
    loop {
        let mut got = guest.receive(1);
        got.retain(|frame| frame[12..14] == [8, 0]);
        if let Some(frame) = got.pop() {
            return frame;
        }
    }
}

#[test]
#[ignore = "needs root: it makes network namespaces"]
fn frames_go_to_where_a_station_was_heard_and_never_from_peer_to_peer() {
    let w = world("ack_offload = false");
    let (host, [one, two]) = (&w.host, &w.peers);
    let mut a = Guest::boot(&w.dir.join("a"), PLAIN);
    a.offer(16);
    a.send_plain(&numbered(ALL, VM, 1));
    for peer in [one, two] {
        assert_eq!(peer.gets().0, numbered(ALL, VM, 1), "everybody gets what is for everybody");
    }
    a.send_plain(&numbered(FAR.mac(), VM, 2));
    for peer in [one, two] {
        assert_eq!(peer.gets().0, numbered(FAR.mac(), VM, 2), "and what is for somebody unknown");
    }
    one.sends(&numbered(ALL, FAR, 3));
    assert_eq!(a.receive(1), [numbered(ALL, FAR, 3)]);
    a.send_plain(&numbered(FAR.mac(), VM, 4));
    assert_eq!(one.gets().0, numbered(FAR.mac(), VM, 4), "it is there");
    // It moves, and says so.
    two.sends(&numbered(ALL, FAR, 5));
    assert_eq!(a.receive(1), [numbered(ALL, FAR, 5)]);
    a.send_plain(&numbered(FAR.mac(), VM, 6));
    // Nothing came before: neither what the other peer sent to all, nor what was for it alone.
    assert_eq!(two.gets().0, numbered(FAR.mac(), VM, 6));
    a.send_plain(&numbered(ALL, VM, 7));
    for peer in [one, two] {
        assert_eq!(peer.gets().0, numbered(ALL, VM, 7));
    }
    let over = host.port("over");
    assert_eq!((over.kind.as_str(), over.link), ("overlay", true));
    assert_eq!((over.frames_from_port, over.frames_to_port), (2, 5));
    assert!(over.drops.is_empty(), "{:?}", over.drops);
}

#[test]
#[ignore = "needs root: it makes network namespaces"]
fn what_is_not_of_the_overlay_is_dropped_and_counted() {
    let w = world("ack_offload = false");
    let (host, [one, _], b) = (&w.host, &w.peers, &w.b);
    let stranger = || UdpSocket::bind("192.0.2.2:5000").unwrap();
    let frame = numbered(ALL, FAR, 1);
    one.sends_bytes(&[&[8, 0, 0, 0, 0, 0, 8, 0], &frame[..]].concat());
    one.sends_bytes(&[&[0, 0, 0, 0, 0, 0, 7, 0], &frame[..]].concat());
    one.sends_bytes(&[8]);
    one.sends(&frame[..13]);
    b.ip("addr add 192.0.2.4/24 dev v1");
    let other = b.enter(|| UdpSocket::bind("192.0.2.4:4789").unwrap());
    other.send_to(&[8; 100], "192.0.2.1:4789").unwrap();
    // A peer's frames count from whatever port it sends them.
    let datagram = [&[8, 0, 0, 0, 0, 0, 7, 0], &frame[..]].concat();
    b.enter(stranger).send_to(&datagram, "192.0.2.1:4789").unwrap();
    let over = host.until("over", |over| over.frames_from_port == 1);
    let expected = [("not_vxlan", 2), ("truncated", 1), ("unknown_peer", 1), ("unknown_vni", 1)];
    assert_eq!(over.drops, expected.map(|(reason, n)| (reason.to_owned(), n)).into());
}

#[test]
#[ignore = "needs root: it makes network namespaces"]
fn a_super_segment_of_a_guest_leaves_as_datagrams_and_marks_arrive() {
    let w = world("ack_offload = false\nmtu = 1450");
    let (host, [one, _]) = (&w.host, &w.peers);
    let mut a = Guest::boot(&w.dir.join("a"), SENDS_SUPER);
    a.offer(16);
    one.sends(&numbered(VM.mac(), FAR, 1));
    a.send_plain(&numbered(FAR.mac(), VM, 1)); // so that it is known by its MAC
    one.gets();
    let payload: Vec<u8> = (0..40_000).map(|i| u8::try_from(i % 251).unwrap()).collect();
    let flags = ACK | PSH;
    let segment =
        Segment { flags, seq: 7, ack: 9, window: 500, payload: &payload, ..Segment::default() };
    a.send(&[segment.super_frame(VM, FAR, 1460)]);
    let (mut got, mut ports) = (Vec::new(), Vec::new());
    while got.len() < payload.len() {
        let (frame, port) = one.gets();
        assert!(frame.len() <= 1464, "{} bytes", frame.len());
        let seen = parse(&frame); // its checksums are right
        assert_eq!(seen.seq as usize, 7 + got.len());
        got.extend(seen.payload);
        ports.push(port);
    }
    assert_eq!(got, payload);
    ports.dedup();
    assert_eq!(ports.len(), 1, "one flow, one source port");
    // Congestion on the way between the hosts.
    let mut marked = Segment { flags, payload: &payload[..10], ..segment }.frame(FAR, VM);
    marked[15] = 2; // ECT(0); the sum of the header's words grows by two
    let check = u16::from_be_bytes([marked[24], marked[25]]) - 2;
    marked[24..26].copy_from_slice(&check.to_be_bytes());
    set_ip_tos(&one.0, 3).unwrap();
    one.sends(&marked);
    let got = next_ipv4(&mut a);
    parse(&got); // the header's checksum is right
    assert_eq!(got[15], 3, "the guest is told of it");
    one.sends(&numbered(VM.mac(), FAR, 2));
    let over = host.until("over", |over| over.drops.contains_key("ecn_mismatch"));
    assert_eq!(over.drops["ecn_mismatch"], 1, "who cannot be told so gets nothing");
}

/// A segment of a connection whose window is never small.
fn segment(flags: u8, seq: u32, ack: u32, payload: &[u8]) -> Segment<'_> {
    Segment { flags, seq, ack, window: 64_000, payload, ..Segment::default() }
}

/// A connection that the station at `peer` opens. Its first byte has number 101, the VM's 501.
fn connected(a: &mut Guest, peer: &Peer) {
    a.offer(64);
    peer.sends(&numbered(ALL, FAR, 1));
    a.send_plain(&numbered(FAR.mac(), VM, 1));
    peer.gets();
    let options: &[u8] = &[2, 4, 0x05, 0x82]; // an MSS of 1410
    peer.sends(&Segment { options, ..segment(SYN, 100, 0, &[]) }.frame(FAR, VM));
    assert_eq!(parse(&next_ipv4(a)).flags, SYN);
    a.send_plain(&Segment { options, ..segment(SYN | ACK, 500, 101, &[]) }.frame(VM, FAR));
    assert_eq!(parse(&peer.gets().0).flags, SYN | ACK);
    peer.sends(&segment(ACK, 101, 501, &[]).frame(FAR, VM));
    assert_eq!(parse(&next_ipv4(a)).flags, ACK);
}

#[test]
#[ignore = "needs root: it makes network namespaces"]
fn the_remotes_data_is_acknowledged_across_the_overlay_for_a_guest_that_is_silent() {
    let w = world("mtu = 1450");
    let [one, _] = &w.peers;
    let mut a = Guest::boot(&w.dir.join("a"), PLAIN);
    connected(&mut a, one);
    for n in 0..20 {
        one.sends(&segment(ACK | PSH, 101 + 1400 * n, 501, &[7; 1400]).frame(FAR, VM));
    }
    let mut acked = 0;
    while acked < 101 + 1400 * 20 {
        acked = parse(&one.gets().0).ack; // the guest has said nothing
    }
}

#[test]
#[ignore = "needs root: it makes network namespaces"]
fn what_the_host_sends_for_a_guest_crosses_the_overlay() {
    let w = world("mtu = 1450\ncongestion_offload = true");
    let [one, _] = &w.peers;
    let mut a = Guest::boot(&w.dir.join("a"), PLAIN);
    connected(&mut a, one);
    let payload: Vec<u8> = (0..14_000).map(|i| u8::try_from(i % 251).unwrap()).collect();
    let mut seq = 501;
    for part in payload.chunks(1400) {
        a.send_plain(&segment(ACK | PSH, seq, 101, part).frame(VM, FAR));
        seq += 1400;
    }
    let (mut got, mut next) = (Vec::new(), 501);
    while got.len() < payload.len() {
        let seen = parse(&one.gets().0);
        if seen.payload.is_empty() || seen.seq != next {
            continue; // an ACK, or a copy
        }
        next += u32::try_from(seen.payload.len()).unwrap();
        got.extend(seen.payload);
        one.sends(&segment(ACK, 101, next, &[]).frame(FAR, VM));
    }
    assert_eq!(got, payload);
    let vm = w.host.until("a", |a| {
        a.vm.as_ref().is_some_and(|vm| vm.counters.contains_key("sent_for_guest_bytes"))
    });
    assert_eq!(vm.vm.unwrap().counters["sent_for_guest_bytes"], 14_000, "the host sent it");
}

#[test]
#[ignore = "needs root: it makes network namespaces"]
fn a_peer_comes_and_another_goes_while_the_daemon_runs() {
    let w = world("ack_offload = false");
    let [one, two] = &w.peers;
    let mut a = Guest::boot(&w.dir.join("a"), PLAIN);
    a.offer(16);
    let reload = |peers: &str| {
        let ports = overlay("192.0.2.1", peers) + &w.dir.vm("a", "ack_offload = false");
        w.dir.configure("metrics = \"off\"", &ports);
        w.host.change(Change::Reload {}).steps.len()
    };
    assert_eq!(reload("\"192.0.2.3\""), 1);
    a.send_plain(&numbered(ALL, VM, 1));
    assert_eq!(two.gets().0, numbered(ALL, VM, 1));
    one.sends(&numbered(ALL, FAR, 2));
    w.host.until("over", |over| over.drops.get("unknown_peer") == Some(&1));
    assert_eq!(reload("\"192.0.2.2\", \"192.0.2.3\""), 1);
    a.send_plain(&numbered(ALL, VM, 3));
    assert_eq!(one.gets().0, numbered(ALL, VM, 3), "and nothing of what came before");
    one.sends(&numbered(ALL, FAR, 4));
    assert_eq!(a.receive(1), [numbered(ALL, FAR, 4)]);
    // The overlay goes and comes.
    w.dir.configure("metrics = \"off\"", &w.dir.vm("a", "ack_offload = false"));
    assert_eq!(w.host.change(Change::Reload {}).steps, ["- overlay over"]);
    assert_eq!(w.host.names(), ["a"]);
    assert_eq!(reload("\"192.0.2.2\""), 1);
    a.send_plain(&numbered(ALL, VM, 5));
    assert_eq!(one.gets().0, numbered(ALL, VM, 5));
}

/// A connection from one namespace to an address in another; both its ends.
fn connect(from: &Namespace, to: &Namespace, ip: &str) -> (TcpStream, TcpStream) {
    let ip: std::net::IpAddr = ip.parse().unwrap();
    let listener = to.enter(|| TcpListener::bind(SocketAddr::new(ip, 0)).unwrap());
    let address = listener.local_addr().unwrap();
    let near = from.enter(|| TcpStream::connect_timeout(&address, LIMIT).unwrap());
    let (far, _) = listener.accept().unwrap();
    for stream in [&near, &far] {
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        stream.set_write_timeout(Some(LIMIT)).unwrap();
    }
    (near, far)
}

/// Sends [`BULK`] bytes, every one of which is looked at.
fn carry(mut from: &TcpStream, mut to: &TcpStream) {
    let bytes: Vec<u8> =
        (0_u32..).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).take(BULK).collect();
    thread::scope(|scope| {
        scope.spawn(|| from.write_all(&bytes).unwrap());
        let mut got = vec![0; BULK];
        to.read_exact(&mut got).unwrap();
        assert!(got == bytes, "the bytes are those that were sent");
    });
}

/// Checks that counters which no conforming peer moves are zero.
fn nothing_was_wrong(host: &Host) {
    nothing_was_wrong_at(host, "over");
}

fn nothing_was_wrong_at(host: &Host, port: &str) {
    let drops = host.port(port).drops;
    let lost = ["queue_full"]; // a network may lose
    assert!(drops.keys().all(|reason| lost.contains(&reason.as_str())), "{drops:?}");
}

/// A host whose LAN is a tap of its own kernel, 10.9.0.1 and fd09::1.
pub(crate) fn host_with_lan(namespace: &Namespace, dir: &Dir, overlay: &str, n: u8) -> Host {
    let config = dir.configure("metrics = \"off\"", &(LAN.to_owned() + overlay));
    let host = namespace.start(dir, &config);
    namespace.ip(&format!("addr add 10.9.0.{n}/24 dev np0"));
    namespace.ip(&format!("addr add fd09::{n}/64 dev np0 nodad"));
    host
}

/// The kernel's own tunnel endpoint on host b. On a machine without it `make test` skips the tests
/// that need it.
pub(crate) fn vxlan_device(b: &Namespace, more: &str) {
    vxlan_device_of(b, 1450, ["192.0.2.2", "192.0.2.1"], more);
}

fn vxlan_device_of(b: &Namespace, mtu: u16, [local, remote]: [&str; 2], more: &str) {
    b.ip(&format!(
        "link add vx0 mtu {mtu} type vxlan id {VNI} dstport 4789 local {local} remote {remote}\
         {more}"
    ));
    b.ip("addr add 10.9.0.2/24 dev vx0");
    b.ip("addr add fd09::2/64 dev vx0 nodad");
    b.ip("link set vx0 up");
}

#[test]
#[ignore = "needs root: it makes network namespaces"]
fn two_networks_of_one_port_are_two_vxlan_devices_of_the_kernel() {
    let (a, b) = two_hosts();
    let dir = Dir::new();
    let peer = "\"192.0.2.2\"";
    let lan = LAN.replace("lan", "red").replace("np0", "np1") + "network = \"red\"\n";
    let red = overlay("192.0.2.1", peer).replace("over\"", "red-over\"\nnetwork = \"red\"");
    let red = red.replace(&format!("vni = {VNI}"), "vni = 8");
    let host = host_with_lan(&a, &dir, &(overlay("192.0.2.1", peer) + &lan + &red), 1);
    a.ip("addr add 10.8.0.1/24 dev np1");
    for dev in ["np0", "np1"] {
        a.ip(&format!("link set {dev} mtu 1450"));
    }
    vxlan_device(&b, "");
    b.ip("link add vx1 mtu 1450 type vxlan id 8 dstport 4789 local 192.0.2.2 remote 192.0.2.1");
    b.ip("addr add 10.8.0.2/24 dev vx1");
    b.ip("link set vx1 up");
    let both = ["10.9.0.2", "10.8.0.2"].map(|ip| connect(&a, &b, ip));
    thread::scope(|scope| {
        for (near, far) in &both {
            scope.spawn(|| carry(near, far));
            scope.spawn(|| carry(far, near));
        }
    });
    for port in ["over", "red-over"] {
        nothing_was_wrong_at(&host, port);
    }
}

#[test]
#[ignore = "needs root: it makes network namespaces"]
fn tcp_goes_to_and_from_the_kernels_vxlan_device_with_all_offloads() {
    for checksums in [" udpcsum", " noudpcsum"] {
        let (a, b) = two_hosts();
        let dir = Dir::new();
        let host = host_with_lan(&a, &dir, &overlay("192.0.2.1", "\"192.0.2.2\""), 1);
        a.ip("link set np0 mtu 1450");
        vxlan_device(&b, checksums);
        let (near, far) = connect(&a, &b, "10.9.0.2");
        carry(&near, &far);
        let over = host.port("over");
        let segments = u64::try_from(BULK / 1398).unwrap();
        assert!(over.frames_to_port < segments, "super-segments reach the tunnel: {over:?}");
        carry(&far, &near);
        let (near, far) = connect(&b, &a, "fd09::1");
        carry(&near, &far);
        carry(&far, &near);
        nothing_was_wrong(&host);
    }
}

/// RFC 7348 section 5: datagrams without a checksum are taken, over IPv6, too.
#[test]
#[ignore = "needs root: it makes network namespaces"]
fn tcp_goes_to_and_from_the_kernels_vxlan_device_over_ipv6() {
    for checksums in [" udp6zerocsumtx", " udp6zerocsumtx udp6zerocsumrx", ""] {
        let (a, b) = two_hosts();
        let dir = Dir::new();
        let host = host_with_lan(&a, &dir, &overlay("fd02::1", "\"fd02::2\""), 1);
        a.ip("link set np0 mtu 1430");
        vxlan_device_of(&b, 1430, ["fd02::2", "fd02::1"], checksums);
        for (near, far) in [connect(&a, &b, "10.9.0.2"), connect(&b, &a, "fd09::1")] {
            carry(&near, &far);
            carry(&far, &near);
        }
        nothing_was_wrong(&host);
    }
}

#[test]
#[ignore = "needs root: it makes network namespaces"]
fn two_daemons_are_one_ethernet_and_an_mtu_that_is_too_large_costs_tcp_nothing() {
    for (one, two, mtu) in [("192.0.2.1", "192.0.2.2", 1450), ("fd02::1", "fd02::2", 1430)] {
        let (a, b) = two_hosts();
        let dirs = [Dir::new(), Dir::new()];
        let host = host_with_lan(&a, &dirs[0], &overlay(one, &format!("\"{two}\"")), 1);
        let other = host_with_lan(&b, &dirs[1], &overlay(two, &format!("\"{one}\"")), 2);
        for (from, to, ip) in [(&a, &b, "10.9.0.2"), (&b, &a, "fd09::1")] {
            let (near, far) = connect(from, to, ip); // both LANs have an MTU of 1500
            carry(&near, &far);
            carry(&far, &near);
        }
        nothing_was_wrong(&host);
        nothing_was_wrong(&other);
        let udp = a.enter(|| UdpSocket::bind("10.9.0.1:0").unwrap());
        let sink = b.enter(|| UdpSocket::bind("10.9.0.2:0").unwrap());
        sink.set_read_timeout(Some(LIMIT)).unwrap();
        let address = sink.local_addr().unwrap();
        let fits = mtu - 28;
        udp.send_to(&vec![1; fits + 1], address).unwrap();
        udp.send_to(&vec![2; fits], address).unwrap();
        let mut got = [0; 2000];
        let (len, _) = sink.recv_from(&mut got).unwrap();
        assert_eq!((len, got[0]), (fits, 2), "of datagrams those that fit arrive");
        assert_eq!(host.port("over").drops.get("too_big"), Some(&1));
        // The sender has been told, and cuts the next itself.
        loop {
            let _ = udp.send_to(&vec![3; fits + 1], address);
            let _ = udp.send_to(&[4], address);
            let (len, _) = sink.recv_from(&mut got).unwrap();
            if (len, got[0]) == (fits + 1, 3) {
                break;
            }
            assert_eq!((len, got[0]), (1, 4));
        }
    }
}

#[test]
#[ignore = "needs root: it makes network namespaces"]
fn a_path_that_takes_less_is_found_out_and_tcp_goes_on() {
    for mtu in [1400, 700] {
        let (a, b) = two_hosts();
        let dirs = [Dir::new(), Dir::new()];
        let host = host_with_lan(&a, &dirs[0], &overlay("192.0.2.1", "\"192.0.2.2\""), 1);
        let _other = host_with_lan(&b, &dirs[1], &overlay("192.0.2.2", "\"192.0.2.1\""), 2);
        a.ip(&format!("link set v0 mtu {mtu}"));
        let (near, far) = connect(&a, &b, "10.9.0.2");
        carry(&near, &far);
        assert!(host.port("over").drops.contains_key("too_big"));
    }
}

#[test]
#[ignore = "needs root: it makes network namespaces"]
fn a_path_that_silently_drops_what_is_long_is_found_out_and_tcp_goes_on() {
    let (a, b) = two_hosts();
    // A veth drops what is longer than its peer takes, and tells nobody. Not so what is to be cut
    // into datagrams, which is cut before therefore.
    a.ip("link set v0 gso_max_segs 1");
    b.ip("link set v1 mtu 1400");
    let dirs = [Dir::new(), Dir::new()];
    let log = File::create(dirs[0].join("log")).unwrap();
    let config = LAN.to_owned() + &overlay("192.0.2.1", "\"192.0.2.2\"");
    let config = dirs[0].configure("metrics = \"off\"", &config);
    let _host = a.enter(|| Host::start_unheard(&dirs[0], command(&config).stderr(log)));
    a.ip("addr add 10.9.0.1/24 dev np0");
    let _other = host_with_lan(&b, &dirs[1], &overlay("192.0.2.2", "\"192.0.2.1\""), 2);
    let (near, far) = connect(&a, &b, "10.9.0.2");
    carry(&near, &far);
    let log = std::fs::read_to_string(dirs[0].join("log")).unwrap();
    let line = log.lines().find(|line| line.contains("silently drops long packets"));
    assert!(line.is_some_and(|line| line.contains("192.0.2.2")), "{log}");
    // The sender of a datagram that cannot be cut is told.
    let udp = a.enter(|| UdpSocket::bind("10.9.0.1:0").unwrap());
    let sink = b.enter(|| UdpSocket::bind("10.9.0.2:0").unwrap());
    sink.set_read_timeout(Some(LIMIT)).unwrap();
    let (mut got, mut len) = ([0; 2000], 0);
    let began = Instant::now();
    while len != 1400 {
        assert!(began.elapsed() < LIMIT, "the long datagram does not arrive");
        let _ = udp.send_to(&[3; 1400], sink.local_addr().unwrap());
        let _ = udp.send_to(&[4], sink.local_addr().unwrap());
        len = sink.recv_from(&mut got).unwrap().0;
    }
}

#[test]
#[ignore = "needs root: it makes network namespaces"]
fn a_peer_that_cannot_be_reached_takes_nothing_from_the_others() {
    let (a, b) = two_hosts();
    let dir = Dir::new();
    let ports = overlay("192.0.2.1", "\"192.0.2.2\", \"198.51.100.9\"") + &dir.vm("a", "");
    let host = a.start(&dir, &dir.configure("metrics = \"off\"", &ports));
    let one = Peer::new(&b, "192.0.2.2");
    let mut guest = Guest::boot(&dir.join("a"), PLAIN);
    guest.send_plain(&numbered(ALL, VM, 1));
    assert_eq!(one.gets().0, numbered(ALL, VM, 1));
    let over = host.until("over", |over| over.frames_to_port == 1);
    assert!(over.drops.is_empty(), "{:?}", over.drops);
    // Where nobody can be reached it is dropped.
    a.ip("link set v0 down");
    guest.send_plain(&numbered(ALL, VM, 2));
    host.until("over", |over| over.drops.get("port_down") == Some(&1));
}

#[test]
#[ignore = "needs root: it makes network namespaces"]
fn frames_of_a_vlan_leave_with_its_tag_and_take_the_path() {
    let w = world("ack_offload = false\nvlan = 7");
    let [one, _] = &w.peers;
    let mut a = Guest::boot(&w.dir.join("a"), SENDS_SUPER);
    a.offer(16);
    let payload: Vec<u8> = (0..20_000).map(|i| u8::try_from(i % 251).unwrap()).collect();
    let segment = segment(ACK | PSH, 7, 9, &payload);
    a.send(&[segment.super_frame(VM, FAR, 1460)]);
    let mut got = Vec::new();
    while got.len() < payload.len() {
        let (mut frame, _) = one.gets();
        assert!(frame.len() <= 1464, "{} bytes", frame.len());
        assert_eq!(frame.drain(12..16).collect::<Vec<_>>(), [0x81, 0, 0, 7]);
        got.extend(parse(&frame).payload);
    }
    assert_eq!(got, payload);
    let tagged = |n| {
        let mut frame = numbered(ALL, FAR, n);
        frame.splice(12..12, [0x81, 0, 0, n]);
        frame
    };
    (8..10).chain([7]).for_each(|n| one.sends(&tagged(n)));
    assert_eq!(a.receive(1), [numbered(ALL, FAR, 7)], "and nothing of another VLAN");
}

#[test]
#[ignore = "needs root: it makes network namespaces"]
fn an_overlay_that_comes_to_a_running_daemon_may_do_all_that_it_has_to() {
    for (one, two) in [("192.0.2.1", "192.0.2.2"), ("fd02::1", "fd02::2")] {
        let (a, b) = two_hosts();
        let dirs = [Dir::new(), Dir::new()];
        let host = host_with_lan(&a, &dirs[0], "", 1);
        let _other = host_with_lan(&b, &dirs[1], &overlay(two, &format!("\"{one}\"")), 2);
        let ports = LAN.to_owned() + &overlay(one, &format!("\"{two}\""));
        dirs[0].configure("metrics = \"off\"", &ports);
        let steps = host.change(Change::Reload {}).steps;
        assert!(steps.len() == 1 && steps[0].starts_with("+ overlay over"), "{steps:?}");
        // So that it asks what the path takes. At both ends: what is too long for the one that
        // receives is lost without a word.
        a.ip("link set v0 mtu 1400");
        b.ip("link set v1 mtu 1400");
        let (near, far) = connect(&a, &b, "10.9.0.2");
        carry(&near, &far);
        carry(&far, &near);
        let over = host.port("over"); // of a status that knows of no refused call
        assert!(over.drops.contains_key("too_big"), "{over:?}");
    }
}

/// tshark's capture of what is on the wire at host b.
struct Capture(Child);

impl Capture {
    fn start(b: &Namespace, file: &Path) -> Self {
        let mut command = Command::new("tshark");
        command
            .args(["-q", "-i", "v1", "-B", "64", "-f", "udp", "-w"])
            .arg(file)
            .stderr(Stdio::piped());
        let mut child = b.enter(|| command.spawn()).expect("tshark");
        let mut said = Vec::new();
        let mut stderr = child.stderr.take().unwrap();
        while !String::from_utf8_lossy(&said).contains("Capturing on") {
            let mut byte = [0];
            assert_eq!(stderr.read(&mut byte).unwrap(), 1, "tshark ended: {said:?}");
            said.extend(byte);
        }
        thread::spawn(move || std::io::copy(&mut stderr, &mut std::io::sink()));
        let start = Instant::now();
        while !file.exists() {
            assert!(start.elapsed() < LIMIT, "no capture");
        }
        Self(child)
    }

    fn end(mut self) {
        kill(Pid::from_raw(i32::try_from(self.0.id()).unwrap()), Signal::SIGINT).unwrap();
        self.0.wait().unwrap();
    }
}

/// The numbers of the frames of `file` for which `filter` holds.
fn frames(file: &Path, filter: &str) -> Vec<String> {
    let mut tshark = Command::new("tshark");
    tshark.args(["-o", "tcp.check_checksum:TRUE", "-o", "ip.check_checksum:TRUE", "-r"]).arg(file);
    tshark.args(["-Y", filter, "-T", "fields", "-e", "frame.number"]);
    let output = tshark.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
}

#[test]
#[ignore = "needs root: it makes network namespaces"]
fn tshark_decodes_every_frame_on_the_wire() {
    let (a, b) = two_hosts();
    // As a network card would, each end of the link cuts what is too long for the wire.
    a.ip("link set v0 gso_max_segs 1");
    b.ip("link set v1 gso_max_segs 1");
    let dir = Dir::new();
    let host = host_with_lan(&a, &dir, &overlay("192.0.2.1", "\"192.0.2.2\""), 1);
    vxlan_device(&b, " udpcsum");
    let file = dir.join("wire.pcap");
    let capture = Capture::start(&b, &file);
    let (near, far) = connect(&a, &b, "10.9.0.2");
    carry(&near, &far);
    carry(&far, &near);
    capture.end();
    nothing_was_wrong(&host);
    let ours = "ip.src == 192.0.2.1";
    let data = frames(&file, &format!("{ours} and vxlan.vni == {VNI} and tcp.len > 0"));
    assert!(data.len() >= BULK / 1398, "{} segments", data.len());
    let not_ours = format!("{ours} and not vxlan.vni == {VNI}");
    assert_eq!(frames(&file, &not_ours), [""; 0], "all of it is VXLAN");
    let wrong = "_ws.malformed or ip.checksum.status == 0 or tcp.checksum.status == 0";
    assert_eq!(frames(&file, &format!("{ours} and ({wrong})")), [""; 0]);
    let cut = format!("{ours} and (ip.flags.df#1 == 0 or ip.flags.mf == 1 or frame.len > 1514)");
    assert_eq!(frames(&file, &cut), [""; 0], "nobody on the way may cut it, nor need to");
}

/// Bytes that the kernel keeps for the socket that receives there (socket(7): twice what was set).
fn receive_bytes(at: &Namespace) -> usize {
    let said = at.enter(|| Command::new("ss").args(["-uanmH", "sport = :4789"]).output().unwrap());
    let said = String::from_utf8_lossy(&said.stdout).into_owned();
    let bytes = said.split_once(",rb").unwrap_or_else(|| panic!("no socket: {said}")).1;
    bytes.split(',').next().unwrap().parse().unwrap()
}

#[test]
#[ignore = "needs root: it makes network namespaces"]
fn an_overlay_whose_sockets_could_not_be_sent_gets_its_buffers_later() {
    const LARGE: usize = 16 << 20;
    let _alone = alone_with_descriptors();
    let (a, _b) = two_hosts();
    let dir = Dir::new();
    let vm = dir.vm("a", "ack_offload = false");
    let config = dir.configure("metrics = \"off\"", &vm);
    let log = File::create(dir.join("log")).unwrap();
    let mut command = command_after("ulimit -n 512", &config);
    let host = a.enter(|| Host::start_unheard(&dir, command.stderr(log)));
    let crowd = descriptors_under_way(600);
    let overlay = overlay("192.0.2.1", "\"192.0.2.2\"");
    dir.configure("metrics = \"off\"", &(overlay + &vm));
    assert!(host.change(Change::Reload {}).done);
    let log = || std::fs::read_to_string(dir.join("log")).unwrap();
    let has_small = "the overlay has small buffers";
    let begun = Instant::now();
    while log().matches(has_small).count() == 0 {
        assert!(begun.elapsed() < LIMIT, "{}", log());
    }
    assert!(host.port("over").link && receive_bytes(&a) < LARGE);
    drop(crowd);
    while receive_bytes(&a) < LARGE {
        assert!(begun.elapsed() < LIMIT, "{}", log());
    }
    while !log().contains("the overlay has its large buffers now") {
        assert!(begun.elapsed() < LIMIT, "{}", log());
    }
    assert_eq!(log().matches(has_small).count(), 1, "it is said once");
}
