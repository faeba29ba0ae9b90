//! Tests against etcd itself: three members on loopback in a namespace of the test's own, which are
//! killed and restarted. Hosts are cut off by relays that stop.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use nix::sched::{CloneFlags, unshare};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::{Value, json};

use super::http::Patience;
use super::session::connect;
use super::*;
use crate::{Claim, Listeners, mac_text};

/// Longest wait of a test; only a failure reaches it.
pub(super) const LIMIT: Duration = Duration::from_secs(60);
pub(super) const VNI: u32 = 7;
const TTL_S: u16 = 2;
const TTL: Duration = Duration::from_secs(2);
/// How long all of etcd is stopped: many leases.
const AWAY: Duration = Duration::from_secs(30);
pub(super) const MAC: Mac = [2, 0, 0, 0, 0, 7];

/// A host's configuration with these members.
pub(super) fn config(members: Vec<Endpoint>) -> Config {
    let addresses: Vec<_> = members.iter().map(|member| member.address).collect();
    let connector = Connector::new(move |member| {
        let socket = TcpStream::connect_timeout(&addresses[member], Duration::from_secs(1))?;
        socket.set_nodelay(true)?;
        Ok(socket)
    });
    Config { members, connector, tls: None, user: None, prefix: "/np/".into(), ttl_s: TTL_S }
}

/// A cluster with its data on a tmpfs.
struct Cluster {
    dir: PathBuf,
    members: Vec<(SocketAddr, SocketAddr)>,
    running: Vec<Option<Child>>,
    tls: bool,
}

/// Gives this thread, and all that it starts, a loopback of its own.
fn leave_the_network() {
    unshare(CloneFlags::CLONE_NEWNET).unwrap();
    let up = Command::new("ip").args(["link", "set", "lo", "up"]).status().unwrap();
    assert!(up.success(), "ip");
}

impl Cluster {
    fn start(members: usize, tls: bool) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let unique = NEXT.fetch_add(1, Ordering::Relaxed);
        let dir = PathBuf::from(format!("/dev/shm/np-etcd-{}-{unique}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        if tls {
            make_certificates(&dir);
        }
        // Below those that the kernel gives to connections.
        let address = |port: usize| ([127, 0, 0, 1], u16::try_from(port).unwrap()).into();
        let ports = 10_000 + 100 * unique as usize..;
        let pairs = ports.step_by(2).map(|port| (address(port), address(port + 1)));
        let members = pairs.take(members).collect();
        let mut cluster = Self { dir, members, running: Vec::new(), tls };
        cluster.running.resize_with(cluster.members.len(), || None);
        (0..cluster.members.len()).for_each(|n| cluster.run(n));
        cluster.until_ready();
        cluster
    }

    fn run(&mut self, n: usize) {
        let name = |n: usize| format!("m{n}");
        let (client, peer) = self.members[n];
        let scheme = if self.tls { "https" } else { "http" };
        let all = self.members.iter().enumerate();
        let all: Vec<_> = all.map(|(n, (_, peer))| format!("m{n}=http://{peer}")).collect();
        let mut command = Command::new("setpriv"); // the member ends with the test
        command
            .args(["--pdeathsig", "KILL", "--", "etcd"])
            .args(["--name", &name(n), "--logger", "zap", "--log-level", "error"])
            .args(["--heartbeat-interval", "50", "--election-timeout", "500"])
            .args(["--listen-client-urls", &format!("{scheme}://{client}")])
            .args(["--advertise-client-urls", &format!("{scheme}://{client}")])
            .args(["--listen-peer-urls", &format!("http://{peer}")])
            .args(["--initial-advertise-peer-urls", &format!("http://{peer}")])
            .args(["--initial-cluster", &all.join(",")])
            .arg("--data-dir")
            .arg(self.dir.join(name(n)))
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        if self.tls {
            let file = |name: &str| self.dir.join(name);
            command.arg("--cert-file").arg(file("member.pem"));
            command.arg("--key-file").arg(file("member.key"));
            command.arg("--trusted-ca-file").arg(file("ca.pem")).arg("--client-cert-auth");
        }
        self.running[n] = Some(command.spawn().expect("etcd runs"));
    }

    /// Kills a member.
    fn kill(&mut self, n: usize) {
        let mut child = self.running[n].take().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    fn endpoints(&self) -> Vec<Endpoint> {
        let endpoint =
            |(address, _): &(SocketAddr, _)| Endpoint { address: *address, is_tls: self.tls };
        self.members.iter().map(endpoint).collect()
    }

    fn tls_config(&self) -> Option<Tls> {
        let file = |name: &str| self.dir.join(name);
        let own = Some((file("host.pem"), file("host.key")));
        self.tls.then(|| Tls::new(Files { ca: file("ca.pem"), own }).unwrap())
    }

    fn config(&self) -> Config {
        Config { tls: self.tls_config(), ..config(self.endpoints()) }
    }

    /// A member's answer.
    fn ask(&self, n: usize, path: &str, body: &Value) -> std::io::Result<Value> {
        let patience = Patience::new(LIMIT, Stop::new()?);
        let mut conn = connect(&self.config(), &patience, n)?;
        let (status, answer) = conn.ask(path, None, body.to_string().as_bytes())?;
        let said: Value = serde_json::from_slice(&answer).map_err(std::io::Error::other)?;
        if status == 200 { Ok(said) } else { Err(std::io::Error::other(said.to_string())) }
    }

    fn until_ready(&self) {
        let begun = Instant::now();
        let all = api::range("/np/");
        for n in (0..self.members.len()).filter(|n| self.running[*n].is_some()) {
            while let Err(e) = self.ask(n, "/v3/kv/range", &all) {
                assert!(begun.elapsed() < LIMIT, "etcd does not come up: {e}");
                let _ = poll(&mut [], Some(&Timespec { tv_sec: 0, tv_nsec: 20_000_000 }));
            }
        }
    }

    /// How often the value of a station has been written.
    fn writes(&self, mac: Mac) -> u64 {
        let range = api::range(&format!("/np/{}", Key::Station(VNI, mac).text()));
        let said = self.ask(0, "/v3/kv/range", &range).unwrap();
        said["kvs"][0]["version"].as_str().expect("it is there").parse().unwrap()
    }

    fn leader(&self) -> usize {
        let is_leader = |n: &usize| {
            let said = self.ask(*n, "/v3/maintenance/status", &json!({})).unwrap();
            said["leader"] == said["header"]["member_id"]
        };
        (0..self.members.len()).find(is_leader).expect("a leader")
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        (0..self.running.len()).for_each(|n| {
            if self.running[n].is_some() {
                self.kill(n);
            }
        });
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

/// A certificate for 127.0.0.1 and one for a host, by a CA of the test's own.
fn make_certificates(dir: &std::path::Path) {
    let script = "openssl req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.pem -days 2 \
        -subj /CN=ca -addext basicConstraints=critical,CA:TRUE 2>/dev/null
        for who in member host; do
            openssl req -newkey rsa:2048 -nodes -keyout $who.key -out $who.csr \
                -subj /O=$who 2>/dev/null
            printf 'subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n' >$who.ext
            openssl x509 -req -in $who.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 \
                -extfile $who.ext -out $who.pem 2>/dev/null
        done";
    let made = Command::new("sh").args(["-ec", script]).current_dir(dir).status().unwrap();
    assert!(made.success(), "openssl");
}

/// A host and the changes reported to it.
pub(super) struct Near {
    registry: Etcd,
    address: IpAddr,
    pub(super) stations: BTreeMap<Mac, Station>,
    hosts: BTreeMap<IpAddr, Host>,
    pub(super) claims: BTreeMap<Mac, Claim>,
    pub(super) link: Option<Result<(), String>>,
}

fn ip(last: u8) -> IpAddr {
    [192, 0, 2, last].into()
}

pub(super) fn mac(n: u16) -> Mac {
    let [high, low] = n.to_be_bytes();
    [2, 0, 0, 1, high, low]
}

impl Near {
    pub(super) fn new(config: Config, last: u8) -> Self {
        let mut registry = Etcd::start(config).unwrap();
        registry.join(Host { vni: VNI, address: ip(last), port: 4789 });
        Self {
            registry,
            address: ip(last),
            stations: BTreeMap::new(),
            hosts: BTreeMap::new(),
            claims: BTreeMap::new(),
            link: None,
        }
    }

    fn station(&self, mac: Mac) -> Station {
        let (vm, ips) = (mac_text(mac), vec![ip(200)]);
        Station { vni: VNI, mac, vm, ips, host: self.address, listeners: None }
    }

    pub(super) fn claims(&mut self, mac: Mac) {
        let station = self.station(mac);
        self.registry.claim(station);
    }

    /// Claims a station that listens at these ports.
    fn claims_with(&mut self, mac: Mac, ports: impl IntoIterator<Item = u16>) {
        let listeners = Some(Listeners::new(ports, 0));
        let station = Station { listeners, ..self.station(mac) };
        self.registry.claim(station);
    }

    /// Whether this host knows these listeners of another host's VM.
    fn hears_of(&self, mac: Mac, ports: &[u16]) -> bool {
        let listeners = self.stations.get(&mac).and_then(|station| station.listeners.as_ref());
        listeners.is_some_and(|listeners| listeners.ports == ports)
    }

    fn hears(&mut self) {
        while let Some(news) = self.registry.poll() {
            match news {
                News::Link(link) => self.link = Some(link),
                News::LeftOut(n) => panic!("{n} are left out"),
                News::Claim { mac, now, .. } => drop(self.claims.insert(mac, now)),
                News::Station { mac, now: Some(now), .. } => drop(self.stations.insert(mac, now)),
                News::Station { mac, now: None, .. } => drop(self.stations.remove(&mac)),
                News::Host { address, now: Some(now), .. } => drop(self.hosts.insert(address, now)),
                News::Host { address, now: None, .. } => drop(self.hosts.remove(&address)),
            }
        }
    }

    pub(super) fn knows_at(&self, mac: Mac, last: u8) -> bool {
        self.stations.get(&mac).is_some_and(|station| station.host == ip(last))
    }
}

/// Waits until the condition holds.
pub(super) fn until<const N: usize>(
    mut hosts: [&mut Near; N],
    what: &str,
    is: impl Fn(&[&mut Near; N]) -> bool,
) {
    let begun = Instant::now();
    loop {
        hosts.iter_mut().for_each(|host| host.hears());
        if is(&hosts) {
            return;
        }
        let told: Vec<_> =
            hosts.iter().map(|h| (&h.link, &h.claims, h.stations.len(), h.hosts.len())).collect();
        assert!(begun.elapsed() < LIMIT, "{what}: {told:?}");
        let fds = hosts.iter().map(|host| host.registry.fd());
        let mut fds: Vec<_> = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        let _ = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 100_000_000 }));
    }
}

fn answers(host: &Near) -> bool {
    host.link == Some(Ok(()))
}

fn is_lost(host: &Near) -> bool {
    matches!(host.link, Some(Err(_)))
}

/// A relay to a member that can stop: bytes wait, connections stay.
struct Relay {
    address: SocketAddr,
    stands: Arc<(Mutex<bool>, Condvar)>,
}

impl Relay {
    fn new(to: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let stands = Arc::new((Mutex::new(false), Condvar::new()));
        let gate = Arc::clone(&stands);
        thread::spawn(move || {
            for near in listener.incoming().flatten() {
                let Ok(far) = TcpStream::connect(to) else { continue };
                let ends = [(near.try_clone(), far.try_clone()), (Ok(far), Ok(near))];
                for (from, to) in ends {
                    let (Ok(from), Ok(to)) = (from, to) else { continue };
                    let gate = Arc::clone(&gate);
                    thread::spawn(move || relay(from, to, &gate));
                }
            }
        });
        Self { address, stands }
    }

    fn set(&self, stands: bool) {
        *self.stands.0.lock().unwrap() = stands;
        self.stands.1.notify_all();
    }
}

fn relay(mut from: TcpStream, mut to: TcpStream, gate: &(Mutex<bool>, Condvar)) {
    let mut buf = [0; 1 << 14];
    while let Ok(n @ 1..) = from.read(&mut buf) {
        let stands = gate.0.lock().unwrap();
        drop(gate.1.wait_while(stands, |stands| *stands).unwrap());
        if to.write_all(&buf[..n]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(std::net::Shutdown::Both);
    let _ = from.shutdown(std::net::Shutdown::Both);
}

#[test]
fn a_thread_that_has_ended_is_told_of_once() {
    let (mut etcd, thread) = Etcd::prepare(config(vec![])).unwrap();
    assert_eq!((etcd.kind(), etcd.is_shared(), etcd.poll()), ("etcd", true, None));
    drop(thread);
    assert!(matches!(etcd.poll(), Some(News::Link(Err(_)))));
    assert_eq!(etcd.poll(), None);
}

#[test]
#[ignore = "needs etcd, and root for a namespace"]
fn who_claims_first_has_it_and_who_waits_gets_it_when_it_is_given_up() {
    leave_the_network();
    let cluster = Cluster::start(3, false);
    let [mut a, mut b, mut c] = [1, 2, 3].map(|n| Near::new(cluster.config(), n));
    until([&mut a, &mut b, &mut c], "hosts", |all| all.iter().all(|host| host.hosts.len() == 2));
    a.claims(MAC);
    until([&mut a, &mut b, &mut c], "a has it", |[a, b, c]| {
        a.claims.get(&MAC) == Some(&Claim::Held) && b.knows_at(MAC, 1) && c.knows_at(MAC, 1)
    });
    assert_eq!(c.stations[&MAC], a.station(MAC));
    b.claims(MAC);
    until([&mut a, &mut b], "refused and contested", |[a, b]| {
        b.claims.get(&MAC) == Some(&Claim::Refused(ip(1)))
            && a.claims.get(&MAC) == Some(&Claim::Contested(ip(2)))
    });
    assert!(c.knows_at(MAC, 1));
    // The station moves.
    let begun = Instant::now();
    a.registry.release(VNI, MAC);
    until([&mut a, &mut b, &mut c], "it has moved", |[a, b, c]| {
        b.claims.get(&MAC) == Some(&Claim::Held) && a.knows_at(MAC, 2) && c.knows_at(MAC, 2)
    });
    let took = begun.elapsed();
    println!("a station was found at its new host after {took:?}");
    assert!(took < Duration::from_secs(1), "{took:?}");
    assert!(!b.stations.contains_key(&MAC), "it is no other host's");
    // A host that ends deletes its entries.
    let begun = Instant::now();
    drop(b);
    until([&mut a, &mut c], "b is gone", |[a, c]| {
        !a.stations.contains_key(&MAC) && !c.hosts.contains_key(&ip(2))
    });
    assert!(begun.elapsed() < TTL, "before its lease ran out");
}

#[test]
#[ignore = "needs etcd, and root for a namespace"]
fn members_die_and_come_back_and_nobody_forgets_anything() {
    leave_the_network();
    let mut cluster = Cluster::start(3, false);
    let [mut a, mut b] = [1, 2].map(|n| Near::new(cluster.config(), n));
    a.claims(MAC);
    until([&mut a, &mut b], "all know", |[a, b]| b.knows_at(MAC, 1) && a.hosts.len() == 1);
    // The member that both talk to, then the leader.
    for round in 1..=2 {
        let victim = if round == 1 { 0 } else { cluster.leader() };
        cluster.kill(victim);
        b.claims(mac(round));
        until([&mut a, &mut b], "claims go on", |[a, b]| {
            b.claims.get(&mac(round)) == Some(&Claim::Held) && a.knows_at(mac(round), 2)
        });
        assert!(b.knows_at(MAC, 1));
        cluster.run(victim);
        cluster.until_ready();
    }
    // All members, for longer than any lease.
    (0..3).for_each(|n| cluster.kill(n));
    until([&mut a, &mut b], "they notice", |[a, b]| is_lost(a) && is_lost(b));
    b.claims(mac(3));
    let gone_until = Instant::now() + AWAY;
    until([&mut a, &mut b], "what was known stays", |[a, b]| {
        assert!(b.knows_at(MAC, 1) && a.knows_at(mac(1), 2) && a.knows_at(mac(2), 2));
        assert!(a.hosts.contains_key(&ip(2)) && b.hosts.contains_key(&ip(1)));
        assert_eq!(a.claims[&MAC], Claim::Held);
        Instant::now() > gone_until
    });
    assert_eq!(b.claims.get(&mac(3)), Some(&Claim::Waits), "a new claim waits");
    (0..3).for_each(|n| cluster.run(n));
    until([&mut a, &mut b], "all is well again", |[a, b]| {
        assert!(b.knows_at(MAC, 1) && a.hosts.contains_key(&ip(2)), "nobody went meanwhile");
        answers(a) && answers(b) && a.knows_at(mac(3), 2)
    });
    assert_eq!((a.claims[&MAC], b.claims[&mac(1)]), (Claim::Held, Claim::Held));
}

#[test]
#[ignore = "needs etcd, and root for a namespace"]
fn listeners_are_their_hosts_to_tell_and_are_written_when_etcd_is_back() {
    leave_the_network();
    let mut cluster = Cluster::start(1, false);
    let [mut a, mut b] = [1, 2].map(|n| Near::new(cluster.config(), n));
    a.claims(MAC);
    until([&mut a, &mut b], "b knows", |[_, b]| b.knows_at(MAC, 1));
    assert_eq!(b.stations[&MAC].listeners, None);
    a.claims_with(MAC, [80]);
    until([&mut a, &mut b], "b hears of it", |[_, b]| b.hears_of(MAC, &[80]));
    assert_eq!(cluster.writes(MAC), 2);
    // A host without the station does not write its listeners.
    b.claims_with(MAC, [666]);
    until([&mut a, &mut b], "it is refused", |[_, b]| {
        b.claims.get(&MAC) == Some(&Claim::Refused(ip(1)))
    });
    assert!(b.hears_of(MAC, &[80]));
    assert_eq!(cluster.writes(MAC), 2);
    b.registry.release(VNI, MAC);
    // etcd is stopped for longer than a lease: known entries stay, and the last message is written.
    cluster.kill(0);
    until([&mut a, &mut b], "they notice", |[a, b]| is_lost(a) && is_lost(b));
    (1000..1100).for_each(|port| a.claims_with(MAC, [80, port]));
    let gone_until = Instant::now() + TTL + TTL;
    until([&mut a, &mut b], "what was known stays", |[a, b]| {
        assert!(b.hears_of(MAC, &[80]));
        assert!(matches!(a.claims[&MAC], Claim::Held | Claim::Contested(_)), "{:?}", a.claims);
        Instant::now() > gone_until
    });
    cluster.run(0);
    cluster.until_ready();
    until([&mut a, &mut b], "it is told", |[a, b]| {
        answers(a) && answers(b) && b.hears_of(MAC, &[80, 1099])
    });
    assert_eq!(cluster.writes(MAC), 3, "once for all that was said meanwhile");
    // Listeners go with their VM.
    drop(a);
    until([&mut b], "it is gone", |[b]| b.stations.is_empty());
}

#[test]
#[ignore = "needs etcd, and root for a namespace"]
fn a_host_that_is_cut_off_is_gone_for_others_and_knows_what_it_knew() {
    leave_the_network();
    let cluster = Cluster::start(3, false);
    let relays: Vec<_> = cluster.endpoints().iter().map(|e| Relay::new(e.address)).collect();
    let members = relays.iter().map(|r| Endpoint { address: r.address, is_tls: false }).collect();
    let mut cut = Near::new(config(members), 1);
    let mut other = Near::new(cluster.config(), 2);
    cut.claims(MAC);
    cut.claims(mac(1));
    other.claims(mac(2));
    until([&mut cut, &mut other], "all know", |[cut, other]| {
        other.knows_at(MAC, 1) && other.knows_at(mac(1), 1) && cut.knows_at(mac(2), 2)
    });
    relays.iter().for_each(|relay| relay.set(true));
    until([&mut cut, &mut other], "it is gone", |[cut, other]| {
        let gone = other.stations.is_empty() && other.hosts.is_empty();
        gone && is_lost(cut)
    });
    assert!(cut.knows_at(mac(2), 2) && cut.hosts.contains_key(&ip(2)), "it knows what it knew");
    assert_eq!(cut.claims[&MAC], Claim::Held, "as far as it knows");
    // Meanwhile one of its VMs is started elsewhere, one moves away from there, and old revisions
    // are compacted.
    other.claims(MAC);
    other.registry.release(VNI, mac(2));
    until([&mut other], "the other has it", |[o]| o.claims.get(&MAC) == Some(&Claim::Held));
    let said = cluster.ask(0, "/v3/kv/range", &api::range("/np/")).unwrap();
    let revision = said["header"]["revision"].clone();
    cluster.ask(0, "/v3/kv/compaction", &json!({"revision": revision})).unwrap();
    relays.iter().for_each(|relay| relay.set(false));
    until([&mut cut, &mut other], "it is back", |[cut, other]| {
        answers(cut) && other.hosts.contains_key(&ip(1)) && other.knows_at(mac(1), 1)
    });
    until([&mut cut, &mut other], "both know who has it", |[cut, other]| {
        cut.claims[&MAC] == Claim::Refused(ip(2))
            && other.claims[&MAC] == Claim::Contested(ip(1))
            && cut.knows_at(MAC, 2)
            && !cut.stations.contains_key(&mac(2))
    });
}

#[test]
#[ignore = "needs etcd, and root for a namespace"]
fn a_thousand_vms_on_twenty_hosts_are_known_to_all() {
    const HOSTS: u8 = 20;
    const VMS: u16 = 50;
    leave_the_network();
    let cluster = Cluster::start(3, false);
    let begun = Instant::now();
    let mut hosts: Vec<_> = (1..=HOSTS).map(|n| Near::new(cluster.config(), n)).collect();
    for (n, host) in (0..).zip(&mut hosts) {
        (0..VMS).for_each(|vm| host.claims(mac(n * VMS + vm)));
    }
    let others = usize::from(HOSTS - 1);
    for host in &mut hosts {
        until([host], "all are known", |[host]| {
            host.stations.len() == others * usize::from(VMS) && host.hosts.len() == others
        });
    }
    println!("1,000 stations of 20 hosts were known to all after {:?}", begun.elapsed());
    // One station moves.
    let begun = Instant::now();
    hosts[0].registry.release(VNI, mac(0));
    hosts[1].claims(mac(0));
    for host in hosts.iter_mut().skip(2) {
        until([host], "it has moved", |[host]| host.knows_at(mac(0), 2));
    }
    let took = begun.elapsed();
    println!("one that moved was known to all after {took:?}");
    assert!(took < Duration::from_secs(1), "{took:?}");
}

#[test]
#[ignore = "needs etcd, and root for a namespace"]
fn a_restarted_host_takes_over_what_it_had_and_a_double_is_refused() {
    leave_the_network();
    let cluster = Cluster::start(1, false);
    let relay = Relay::new(cluster.endpoints()[0].address);
    let members = vec![Endpoint { address: relay.address, is_tls: false }];
    let mut old = Near::new(Config { ttl_s: 60, ..config(members) }, 1);
    old.claims(MAC);
    until([&mut old], "it has it", |[old]| old.claims.get(&MAC) == Some(&Claim::Held));
    relay.set(true); // the host is cut off, and its lease lives for a minute
    let mut new = Near::new(cluster.config(), 1);
    new.claims(MAC);
    until([&mut new], "the next has it", |[new]| new.claims.get(&MAC) == Some(&Claim::Held));
    // The host was not dead, and has the same address: the last holder keeps the station.
    relay.set(false);
    until([&mut old, &mut new], "one of them is refused", |[old, new]| {
        old.claims[&MAC] == Claim::Refused(ip(1)) && new.claims[&MAC] == Claim::Held
    });
}

#[test]
#[ignore = "needs etcd, and root for a namespace"]
fn members_prove_who_they_are_and_ask_for_a_password() {
    leave_the_network();
    let cluster = Cluster::start(1, true);
    let ask = |path: &str, body: Value| cluster.ask(0, path, &body).unwrap();
    for (name, password) in [("root", "secret"), ("np", "word")] {
        ask("/v3/auth/user/add", json!({"name": name, "password": password}));
    }
    ask("/v3/auth/user/grant", json!({"user": "root", "role": "root"}));
    ask("/v3/auth/role/add", json!({"name": "np"}));
    let range = api::range("/np/");
    let (key, range_end) = (&range["key"], &range["range_end"]);
    let permission = json!({"permType": "READWRITE", "key": key, "range_end": range_end});
    ask("/v3/auth/role/grant", json!({"name": "np", "perm": permission}));
    ask("/v3/auth/user/grant", json!({"user": "np", "role": "np"}));
    ask("/v3/auth/enable", json!({}));
    let user = |password: &str| Some(("np".to_owned(), password.to_owned()));
    let mut a = Near::new(Config { user: user("word"), ..cluster.config() }, 1);
    let mut b = Near::new(Config { user: user("word"), ..cluster.config() }, 2);
    a.claims(MAC);
    until([&mut a, &mut b], "b knows", |[_, b]| b.knows_at(MAC, 1));
    let refused = |config: Config, why: &str| {
        let mut host = Near::new(config, 3);
        until([&mut host], why, |[host]| is_lost(host));
        let Some(Err(said)) = host.link.clone() else { panic!("{:?}", host.link) };
        assert!(said.contains(why), "{said}");
    };
    refused(Config { user: user("wrong"), ..cluster.config() }, "authentication failed");
    refused(cluster.config(), "etcdserver: ");
    let prefix = String::from("/other/");
    refused(Config { user: user("word"), prefix, ..cluster.config() }, "permission denied");
    // A member whose CA is unknown.
    let stranger = Cluster::start(1, true);
    refused(Config { tls: cluster.tls_config(), ..stranger.config() }, "certificate");
}
