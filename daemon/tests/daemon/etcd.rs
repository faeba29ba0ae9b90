//! Two daemons that find each other by etcd. Needs root and etcd (Debian's `etcd-server`).

use std::fs::File;
use std::io::{Read, Write};
use std::net::{IpAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nightporter_api::Change;
use nightporter_core::toe::control::Ask;

use crate::fabric::{alone_with_descriptors, descriptors_under_way};
use crate::guest::{Guest, PLAIN};
use crate::host::{Dir, Host, LIMIT, command_after};
use crate::overlay::{ALL, Namespace, numbered, two_hosts};
use crate::registry::stations;
use crate::segment::End;
use crate::sockets::{ask, listen};
use crate::toe;

/// The etcd of a test, in a namespace.
struct Etcd(Child);

impl Etcd {
    fn start(at: &Namespace, dir: &Dir) -> Self {
        let (all, url) = ("http://0.0.0.0:2379", "http://192.0.2.1:2379");
        let child = at.enter(|| {
            Command::new("etcd")
                .args(["--listen-client-urls", all, "--advertise-client-urls", url, "--data-dir"])
                .arg(dir.join("etcd"))
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .expect("etcd runs")
        });
        let begun = Instant::now();
        while at.enter(|| TcpStream::connect("192.0.2.1:2379")).is_err() {
            assert!(begun.elapsed() < LIMIT, "etcd does not come up");
        }
        Self(child)
    }

    fn stop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        self.stop();
    }
}

const ONE: End = End(1, 1);
const MOVES: End = End(2, 2);
const FAR: End = End(3, 3);
const KEYS: &str = "ack_offload = false";

/// The host 192.0.2.`n` with a VM of its own, which has more keys, and one that may live on either.
fn start(at: &Namespace, dir: &Dir, n: u8, vm: (End, &str)) -> Host {
    start_with(at, dir, n, "192.0.2.1", "", vm)
}

/// Likewise, with etcd at an address, and more keys for the overlay.
fn start_with(
    at: &Namespace,
    dir: &Dir,
    n: u8,
    etcd: &str,
    overlay: &str,
    (own, more): (End, &str),
) -> Host {
    let mac = |end: End| {
        let [.., last] = end.mac();
        format!("mac = \"02:00:00:00:00:{last:02x}\"\n{KEYS}")
    };
    let ports = format!(
        "[registry]\netcd = [\"http://{etcd}:2379\"]\nttl_s = 2\n\
         [[overlay]]\nname = \"over\"\nvni = 7\nlocal = \"192.0.2.{n}\"\n{overlay}\n{}{}",
        dir.vm("own", &format!("{}\n{more}", mac(own))),
        dir.vm("moves", &mac(MOVES))
    );
    let config = dir.configure("metrics = \"off\"", &ports);
    let log = File::create(dir.join("log")).unwrap();
    at.enter(|| Host::start_with_log(dir, &config, log.into()))
}

/// Waits for an entry of the log, which begins with the year, that has all of these.
fn until_said(dir: &Dir, words: [&str; 4]) {
    let begun = Instant::now();
    loop {
        let log = std::fs::read_to_string(dir.join("log")).unwrap();
        if log.split("\n20").any(|entry| words.iter().all(|word| entry.contains(word))) {
            return;
        }
        assert!(begun.elapsed() < LIMIT, "{words:?}: {log}");
    }
}

/// Waits until `host` says this of the station `end`: where it is, and its claim.
fn until(host: &Host, end: End, at: u8, claim: Option<&str>) -> Duration {
    let begun = Instant::now();
    let address: IpAddr = [192, 0, 2, at].into();
    let [.., last] = end.mac();
    let mac = format!("02:00:00:00:00:{last:02x}");
    loop {
        let all = stations(host);
        let found = all.iter().find(|s| s.mac == mac);
        if found.is_some_and(|s| s.host == address && s.claim.as_deref() == claim) {
            return begun.elapsed();
        }
        assert!(begun.elapsed() < LIMIT, "{mac} at {at}, {claim:?}: {all:?}");
    }
}

#[test]
#[ignore = "needs root: it makes network namespaces; and etcd"]
fn daemons_find_each_other_and_a_vm_that_moves_without_a_list() {
    let (a, b) = two_hosts();
    let (dir_a, dir_b, dir) = (Dir::new(), Dir::new(), Dir::new());
    let mut etcd = Etcd::start(&a, &dir);
    let host_a = start(&a, &dir_a, 1, (ONE, ""));
    let host_b = start(&b, &dir_b, 2, (FAR, ""));
    let boot = |dir: &Dir, name: &str| {
        let mut guest = Guest::boot(&dir.join(name), PLAIN);
        guest.offer(32);
        guest
    };
    let mut one = boot(&dir_a, "own");
    let mut near = boot(&dir_a, "moves");
    until(&host_b, ONE, 1, None);
    until(&host_b, MOVES, 1, None);
    // It is started a second time: refused, and the first says so too.
    let mut far = boot(&dir_b, "moves");
    until(&host_b, MOVES, 2, Some("refused"));
    until(&host_a, MOVES, 1, Some("contested"));
    let [.., last] = MOVES.mac();
    let mac = format!("02:00:00:00:00:{last:02x}");
    until_said(&dir_b, ["ERROR", "refused: another host has a VM", &mac, "192.0.2.1"]);
    until_said(&dir_a, ["WARN", "another host has a VM with this MAC too", &mac, "192.0.2.2"]);
    let frame = numbered(ONE.mac(), MOVES, 1);
    far.send_plain(&frame);
    host_a.until("over", |over| over.drops.get("spoofed_mac") == Some(&1));
    near.send_plain(&frame);
    assert_eq!(one.receive(1), [frame], "what it sends is believed of its host alone");
    // The first stops: as after a migration, the second is it.
    drop(near);
    host_a.until("moves", |vm| !vm.link);
    let took = until(&host_a, MOVES, 2, None).max(until(&host_b, MOVES, 2, Some("held")));
    assert!(took < Duration::from_secs(1), "{took:?}");
    // etcd is away, and nothing stops.
    etcd.stop();
    let begun = Instant::now();
    while host_b.status().registry.trouble.is_none() || begun.elapsed() < Duration::from_secs(4) {
        assert!(begun.elapsed() < LIMIT, "it does not notice");
    }
    for (n, to) in [(2, MOVES.mac()), (3, ALL)] {
        let there = numbered(to, ONE, n);
        one.send_plain(&there);
        assert_eq!(far.receive(1), [there], "longer than the lease");
        let back = numbered(ONE.mac(), MOVES, n);
        far.send_plain(&back);
        assert_eq!(one.receive(1), [back]);
    }
    for host in [&host_a, &host_b] {
        let over = host.port("over");
        assert!(over.drops.keys().all(|reason| reason == "spoofed_mac"), "{:?}", over.drops);
    }
}

#[test]
#[ignore = "needs root: it makes network namespaces; and etcd"]
fn a_peer_that_alone_loses_etcd_is_reached_until_its_vm_is_claimed_elsewhere() {
    let (a, b) = two_hosts();
    let (dir_a, dir_b, dir) = (Dir::new(), Dir::new(), Dir::new());
    a.ip("addr add 198.51.100.1/24 dev v0");
    b.ip("addr add 198.51.100.2/24 dev v1");
    let _etcd = Etcd::start(&a, &dir);
    let peers = |n| format!("peers = [\"192.0.2.{n}\"]");
    let host_a = start_with(&a, &dir_a, 1, "192.0.2.1", &peers(2), (ONE, ""));
    let host_b = start_with(&b, &dir_b, 2, "198.51.100.1", &peers(1), (FAR, ""));
    let boot = |dir: &Dir, name: &str| {
        let mut guest = Guest::boot(&dir.join(name), PLAIN);
        guest.offer(32);
        guest
    };
    let mut one = boot(&dir_a, "own");
    let mut far = boot(&dir_b, "own");
    until(&host_a, FAR, 2, None);
    until(&host_b, ONE, 1, None);
    // The way to etcd is cut for one host, and its lease runs out.
    b.ip("route add blackhole 198.51.100.1/32");
    let begun = Instant::now();
    while stations(&host_a).len() > 1 {
        assert!(begun.elapsed() < LIMIT, "it is still there");
    }
    let there = numbered(FAR.mac(), ONE, 1);
    one.send_plain(&there);
    assert_eq!(far.receive(1), [there]);
    let back = numbered(ONE.mac(), FAR, 2);
    far.send_plain(&back);
    assert_eq!(one.receive(1), [back]);
    // The VM is started on another host, which has the MAC from then on.
    let socket = dir_a.join("far");
    let keys = [
        ("mac", "02:00:00:00:00:03"),
        ("ack_offload", "false"),
        ("budget", "4M"),
        ("socket", socket.to_str().unwrap()),
    ];
    let keys = keys.map(|(key, value)| (key.into(), value.into()));
    host_a.change(Change::AddVm { name: "far".into(), keys: keys.into() });
    let mut near = boot(&dir_a, "far");
    until(&host_a, FAR, 1, Some("held"));
    far.send_plain(&numbered(ONE.mac(), FAR, 3));
    host_a.until("over", |over| over.drops.get("spoofed_mac") == Some(&1));
    let there = numbered(FAR.mac(), ONE, 4);
    one.send_plain(&there);
    assert_eq!(near.receive(1), [there]);
    b.ip("route del blackhole 198.51.100.1/32");
    until(&host_b, FAR, 2, Some("refused"));
}

/// etcd's answer for a key, which is in base64.
fn says(at: &Namespace, key: &str) -> String {
    let body = format!("{{\"key\": \"{key}\"}}");
    let mut stream = at.enter(|| TcpStream::connect("192.0.2.1:2379")).unwrap();
    let len = body.len();
    write!(stream, "POST /v3/kv/range HTTP/1.0\r\nContent-Length: {len}\r\n\r\n{body}").unwrap();
    let mut said = String::new();
    stream.read_to_string(&mut said).unwrap();
    said
}

/// The number with this name in what etcd says.
fn number(said: &str, name: &str) -> u64 {
    let found = said.split(&format!("\"{name}\":\"")).nth(1);
    let found = found.unwrap_or_else(|| panic!("no {name}: {said}"));
    found.split('"').next().unwrap().parse().unwrap()
}

/// How often ONE's entry has been written, as etcd says.
fn versions(at: &Namespace) -> u64 {
    number(&says(at, "L25pZ2h0cG9ydGVyL3N0YXRpb24vNy8wMjowMDowMDowMDowMDowMQ=="), "version")
}

/// How often anything has been written in etcd.
fn writes(at: &Namespace) -> u64 {
    number(&says(at, "AA=="), "revision")
}

/// An entry that was rewritten often waits for so long before the next time.
const ENTRY_PAUSE: Duration = Duration::from_secs(60);

/// Waits until `host` says that ONE listens at these ports.
fn until_it_listens(host: &Host, ports: Option<&[u16]>) {
    let begun = Instant::now();
    loop {
        let all = stations(host);
        let found = all.iter().find(|station| station.vm == "own" && station.mac.ends_with("01"));
        if found.is_some_and(|station| station.listens.as_deref() == ports) {
            return;
        }
        assert!(begun.elapsed() < LIMIT + ENTRY_PAUSE, "{ports:?}: {all:?}");
    }
}

#[test]
#[ignore = "needs root: it makes network namespaces; and etcd"]
fn who_listens_by_toe_is_known_on_all_hosts_and_a_loop_of_it_is_not_written_as_such() {
    let (a, b) = two_hosts();
    let (dir_a, dir_b, dir) = (Dir::new(), Dir::new(), Dir::new());
    let mut etcd = Etcd::start(&a, &dir);
    let host_a = start(&a, &dir_a, 1, (ONE, "ips = [\"10.0.0.1\"]\ntoe = true"));
    let host_b = start(&b, &dir_b, 2, (FAR, ""));
    let mut card = Guest::boot(&dir_a.join("own"), PLAIN);
    card.offer(32);
    until(&host_b, ONE, 1, None);
    until_it_listens(&host_b, None);
    let mut one = toe::boot(&dir_a, "own");
    until_it_listens(&host_b, Some(&[]));
    listen(&mut one, "10.0.0.1:80");
    for host in [&host_a, &host_b] {
        until_it_listens(host, Some(&[80]));
    }
    let before = host_a.status().registry;
    let begun = Instant::now();
    let written = versions(&a);
    for n in 0..500 {
        let at = "0.0.0.0:22".parse().unwrap();
        assert_eq!(ask(&mut one, Ask::Listen { guest: 9, at, v4: false }), 0);
        // All that is here is compared whenever another VM comes or goes, and claims go at once.
        if n % 100 == 0 {
            let other = Guest::boot(&dir_a.join("moves"), PLAIN);
            host_a.until("moves", |vm| vm.link);
            drop(other);
            host_a.until("moves", |vm| !vm.link);
        }
        assert_eq!(ask(&mut one, Ask::Unlisten { guest: 9 }), 0);
    }
    listen(&mut one, "0.0.0.0:443");
    until_it_listens(&host_b, Some(&[80, 443]));
    let (after, took) = (host_a.status().registry, begun.elapsed());
    assert_eq!(after.listener_changes - before.listener_changes, 1001);
    let writes = after.listener_writes - before.listener_writes;
    assert!((1..=1 + took.as_secs()).contains(&writes), "{writes} in {took:?}");
    assert!(versions(&a) - written <= writes, "no claim was made again but for these");
    // etcd is away, and what is told stays; then it is back, and all is told.
    etcd.stop();
    let begun = Instant::now();
    while host_a.status().registry.trouble.is_none() {
        assert!(begun.elapsed() < LIMIT, "it does not notice");
    }
    listen(&mut one, "0.0.0.0:8080");
    until_it_listens(&host_a, Some(&[80, 443, 8080]));
    until_it_listens(&host_b, Some(&[80, 443]));
    let _etcd = Etcd::start(&a, &dir);
    until_it_listens(&host_b, Some(&[80, 443, 8080]));
    // Its driver goes, and the VM stays.
    drop(one);
    until_it_listens(&host_b, None);
}

#[test]
#[ignore = "needs root: it makes network namespaces; and etcd"]
fn a_vm_that_is_reset_in_a_loop_is_claimed_at_once_at_first_and_then_rarely() {
    let (a, b) = two_hosts();
    let (dir_a, dir_b, dir) = (Dir::new(), Dir::new(), Dir::new());
    let _etcd = Etcd::start(&a, &dir);
    let host_a = start(&a, &dir_a, 1, (ONE, ""));
    let host_b = start(&b, &dir_b, 2, (FAR, ""));
    let boot = |name: &str| {
        let mut guest = Guest::boot(&dir_a.join(name), PLAIN);
        guest.offer(32);
        host_a.until(name, |vm| vm.link);
        guest
    };
    let ends = |guest: Guest, name: &str| {
        drop(guest);
        host_a.until(name, |vm| !vm.link);
    };
    let before = writes(&a);
    for _ in 0..3 {
        let guest = boot("own");
        let took = until(&host_a, ONE, 1, Some("held"));
        assert!(took < Duration::from_secs(1), "{took:?}");
        ends(guest, "own");
    }
    for _ in 0..12 {
        ends(boot("own"), "own");
    }
    let mut one = boot("own");
    until(&host_a, ONE, 1, Some("waiting"));
    until_said(&dir_a, ["WARN", "its claim waits", "own", "02:00:00:00:00:01"]);
    // Eight claims and their ends, and the two hosts.
    let writes = writes(&a) - before;
    assert!((6..=18).contains(&writes), "{writes} writes of 16 starts");
    // Frames teach others where it is, and another VM is claimed at once.
    let mut moves = boot("moves");
    let took = until(&host_b, MOVES, 1, None);
    assert!(took < Duration::from_secs(1), "{took:?}");
    let mut other = Guest::boot(&dir_b.join("own"), PLAIN);
    other.offer(32);
    for (guest, from, n) in [(&mut one, ONE, 1), (&mut moves, MOVES, 2)] {
        let frame = numbered(FAR.mac(), from, n);
        guest.send_plain(&frame);
        assert_eq!(other.receive(1), [frame]);
    }
}

#[test]
#[ignore = "needs root: it makes network namespaces; and etcd"]
fn who_sends_descriptors_that_nobody_receives_keeps_etcd_away_and_no_longer() {
    let _alone = alone_with_descriptors();
    let (a, _b) = two_hosts();
    let (dir_a, dir) = (Dir::new(), Dir::new());
    let registry = "[registry]\netcd = [\"http://192.0.2.1:2379\"]\n\
                    [[overlay]]\nname = \"over\"\nvni = 7\nlocal = \"192.0.2.1\"\n";
    let config = dir_a.configure("metrics = \"off\"", registry);
    let host = a.enter(|| Host::start_as(&dir_a, &mut command_after("ulimit -n 512", &config)));
    let until = |what: &str, is: &dyn Fn(Option<&str>) -> bool| {
        let begun = Instant::now();
        while !is(host.status().registry.trouble.as_deref()) {
            assert!(begun.elapsed() < LIMIT, "{what}: {:?}", host.status().registry);
        }
    };
    until("there is none", &|it| it.is_some_and(|it| it.contains("refused")));
    let crowd = descriptors_under_way(600);
    let _etcd = Etcd::start(&a, &dir);
    until("it is told", &|it| it.is_some_and(|it| it.contains("sent too many descriptors")));
    drop(crowd);
    until("it is there", &|it| it.is_none());
}
