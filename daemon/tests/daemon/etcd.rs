//! Two daemons that find each other by etcd. Needs root and etcd (Debian's `etcd-server`).

use std::fs::File;
use std::net::{IpAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::guest::{Guest, PLAIN};
use crate::host::{Dir, Host, LIMIT};
use crate::overlay::{ALL, Namespace, numbered, two_hosts};
use crate::registry::stations;
use crate::segment::End;

/// The etcd of a test, in a namespace.
struct Etcd(Child);

impl Etcd {
    fn start(at: &Namespace, dir: &Dir) -> Self {
        let url = "http://192.0.2.1:2379";
        let child = at.enter(|| {
            Command::new("etcd")
                .args(["--listen-client-urls", url, "--advertise-client-urls", url, "--data-dir"])
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
const KEYS: &str = "ack_offload = false";

/// The host 192.0.2.`n` with a VM of its own, and one that may live on either.
fn start(at: &Namespace, dir: &Dir, n: u8, own: End) -> Host {
    let mac = |end: End| {
        let [.., last] = end.mac();
        format!("mac = \"02:00:00:00:00:{last:02x}\"\n{KEYS}")
    };
    let ports = format!(
        "[registry]\netcd = [\"http://192.0.2.1:2379\"]\nttl_s = 2\n\
         [[overlay]]\nname = \"over\"\nvni = 7\nlocal = \"192.0.2.{n}\"\n{}{}",
        dir.vm("own", &mac(own)),
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
    let host_a = start(&a, &dir_a, 1, ONE);
    let host_b = start(&b, &dir_b, 2, End(3, 3));
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
