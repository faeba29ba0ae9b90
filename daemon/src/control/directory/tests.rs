use std::collections::VecDeque;
use std::num::NonZeroU64;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use nightporter_core::engine::{Engine, EngineConfig};
use nightporter_core::port::PortConfig;
use nightporter_core::turn::{Received, Sent};
use nightporter_core::wire::virtio_net::VirtioNetHdr;
use nightporter_registry::listed::Listed;
use nightporter_registry::mail::Bell;
use nightporter_registry::{Mac, STATIONS_MAX};
use nix::sys::epoll::{EpollCreateFlags, EpollTimeout};

use super::*;
use crate::arena_file;
use crate::port::Port;
use crate::port::overlay::OverlayPort;
use crate::port::shared::Sockets;
use crate::worker::orders::{WorkerMail, worker_mail};
use crate::worker::{Worker, WorkerConfig};

const START: Instant = Instant::from_secs(1000);
const VMS: [&str; 3] = ["vm0", "vm1", "vm2"];
const VNI: u32 = 7;
const PEER: &str = "127.0.9.2";

/// A registry that notes the calls of its owner, and has the news that it is given.
#[derive(Clone, Debug)]
struct Notes {
    /// `+` and the VM that is claimed, or `-` and the last byte of the MAC that is released.
    list: Arc<Mutex<Vec<String>>>,
    news: Arc<Mutex<VecDeque<News>>>,
    bell: Bell,
}

impl Notes {
    fn add(&self, note: String) {
        self.list.lock().unwrap().push(note);
    }

    fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.list.lock().unwrap())
    }

    /// The registry has news.
    fn say(&self, news: impl IntoIterator<Item = News>) {
        self.news.lock().unwrap().extend(news);
        self.bell.ring();
    }

    fn left(&self) -> usize {
        self.news.lock().unwrap().len()
    }
}

impl Registry for Notes {
    fn kind(&self) -> &'static str {
        "notes"
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.bell.fd()
    }

    fn is_shared(&self) -> bool {
        true
    }

    fn join(&mut self, _: Host) {}

    fn leave(&mut self, _: u32) {}

    fn claim(&mut self, station: Station) {
        self.add(format!("+{}", station.vm));
    }

    fn release(&mut self, _: u32, mac: Mac) {
        self.add(format!("-{}", mac[5]));
    }

    fn poll(&mut self) -> Option<News> {
        self.news.lock().unwrap().pop_front()
    }
}

/// Three VMs on an overlay.
fn config() -> Config {
    let mut text = format!(
        "[[overlay]]\nname = \"o\"\nvni = {VNI}\nlocal = \"127.0.9.1\"\npeers = [\"{PEER}\"]\n"
    );
    for (n, name) in VMS.iter().enumerate() {
        text += &format!(
            "[[vm]]\nname = \"{name}\"\nmac = \"02:00:00:00:00:0{n}\"\nips = [\"10.0.0.{n}\"]\n"
        );
    }
    Config::parse("np.toml", &text, &BTreeMap::new()).unwrap()
}

/// A directory of these VMs and of a registry, and both ends of its mail.
struct World {
    directory: Directory,
    control: ControlMail,
    worker: WorkerMail,
    notes: Notes,
    epoll: Epoll,
}

impl World {
    fn new() -> Self {
        let notes =
            Notes { list: Arc::default(), news: Arc::default(), bell: Bell::new().unwrap() };
        Self::with(Box::new(notes.clone()), notes)
    }

    fn with(registry: Box<dyn Registry>, notes: Notes) -> Self {
        let (worker, control) = worker_mail().unwrap();
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).unwrap();
        let directory = Directory::new(registry, &epoll).unwrap();
        let mut new = Self { directory, control, worker, notes, epoll };
        new.configure(|_| true);
        new
    }

    fn configure(&mut self, is_open: impl Fn(&str) -> bool) {
        self.directory.tell(START, &config(), is_open, &mut self.control);
    }

    /// The link of a VM goes up or down.
    fn link(&mut self, now: Instant, vm: &str, is_up: bool) {
        self.directory.handle_link(now, &mut self.control, (vm.into(), is_up), None);
    }

    fn hear(&mut self) {
        self.directory.hear(&mut self.control);
    }

    /// All orders so far.
    fn orders(&mut self) -> Vec<Order> {
        let mut all = Vec::new();
        while let Some(order) = self.worker.take().unwrap() {
            all.push(order);
            self.control.take().unwrap(); // hands over orders that waited
        }
        all
    }

    /// The places of VMs that were ordered.
    fn places(&mut self) -> Vec<(String, VmPlace)> {
        let orders = self.orders().into_iter();
        let places = orders.filter_map(|order| match order {
            Order::PlaceVm(vm, place) => Some((vm, place)),
            _ => None,
        });
        places.collect()
    }
}

fn key(n: u32) -> Key {
    let [a, b, c, d] = n.to_be_bytes();
    (VNI, [2, 1, a, b, c, d])
}

/// A station of the peer.
fn station((vni, mac): Key) -> Station {
    let ips = vec![[10, 1, mac[4], mac[5]].into()];
    Station { vni, mac, vm: "far".into(), ips, host: PEER.parse().unwrap(), listeners: None }
}

fn comes(key: Key) -> News {
    News::Station { vni: key.0, mac: key.1, now: Some(station(key)) }
}

fn goes(key: Key) -> News {
    News::Station { vni: key.0, mac: key.1, now: None }
}

#[test]
fn a_link_that_goes_down_concerns_its_vm_alone() {
    let mut w = World::new();
    assert_eq!(w.notes.take(), [""; 0], "no link is up yet");
    VMS.into_iter().for_each(|vm| w.link(START, vm, true));
    w.link(START, VMS[0], true);
    assert_eq!(w.notes.take(), ["+vm0", "+vm1", "+vm2"], "each once");
    w.link(START, VMS[1], false);
    assert_eq!(w.notes.take(), ["-1"]);
    w.link(START, "another", true);
    w.configure(|_| true);
    assert_eq!(w.notes.take(), [""; 0]);
}

#[test]
fn a_vm_that_is_reset_in_a_loop_is_claimed_eight_times_and_then_once_a_minute() {
    let mut w = World::new();
    for n in 0..BURST {
        w.link(START, VMS[0], true);
        assert_eq!(w.notes.take(), ["+vm0"], "at once: {n}");
        w.link(START, VMS[0], false);
        assert_eq!(w.notes.take(), ["-0"], "and given up at once: {n}");
    }
    w.link(START, VMS[0], true);
    assert_eq!(w.notes.take(), [""; 0]);
    let mut told = Vec::new();
    for ms in 1..300_000 {
        let now = START + Duration::from_millis(ms);
        w.link(now, VMS[0], false);
        w.link(now, VMS[0], true);
        w.directory.claim_due(now);
        told.extend(w.notes.take().into_iter().map(|note| (ms, note)));
    }
    let told: Vec<_> = told.iter().map(|(ms, note)| (*ms, note.as_str())).collect();
    let minutes = [60_000, 120_000, 180_000, 240_000];
    let claims = minutes.iter().flat_map(|ms| [(*ms, "+vm0"), (ms + 1, "-0")]);
    assert_eq!(told, claims.collect::<Vec<_>>());
    // Others are claimed at once, and the VM itself as soon as its time has come.
    let now = START + Duration::from_secs(299);
    w.link(now, VMS[1], true);
    assert_eq!(w.notes.take(), ["+vm1"]);
    w.hear();
    let due = w.directory.poll_timeout(&w.control);
    assert_eq!(due, Some(START + Duration::from_secs(300)));
    w.directory.claim_due(due.unwrap());
    assert_eq!(w.notes.take(), ["+vm0"]);
    assert_eq!(w.directory.poll_timeout(&w.control), None);
}

#[test]
fn a_claim_that_waits_is_told_as_it_is_when_its_time_has_come() {
    let mut w = World::new();
    for _ in 0..=BURST {
        w.link(START, VMS[0], false);
        w.link(START, VMS[0], true);
    }
    w.notes.take();
    let claims = w.directory.status(0).claims;
    assert_eq!(claims, BTreeMap::from([("waiting".into(), 1)]));
    // Its link goes down: there is nothing to give up, and nothing to claim later.
    w.link(START, VMS[0], false);
    w.directory.claim_due(START + REFILL);
    assert_eq!(w.notes.take(), [""; 0]);
    // It is claimed at once when it comes up after that, because the time has passed.
    w.link(START + REFILL, VMS[0], true);
    assert_eq!(w.notes.take(), ["+vm0"]);
}

#[test]
fn the_worker_is_told_the_place_of_a_vm_that_has_changed_and_of_no_other() {
    let mut w = World::new();
    let own = (VNI, [2, 0, 0, 0, 0, 0]);
    let none = VmPlace::default();
    assert_eq!(w.places(), VMS.map(|vm| (vm.into(), none.clone())), "the overlay is new");
    w.link(START, VMS[0], true);
    let here = VmPlace { vni: VNI, ips: vec![[10, 0, 0, 0].into()], is_elsewhere: false };
    assert_eq!(w.places(), [(VMS[0].into(), here.clone())]);
    w.notes.say([comes(own)]);
    w.directory.note_news();
    w.hear();
    let both = VmPlace { is_elsewhere: true, ..here.clone() };
    assert_eq!(w.places(), [(VMS[0].into(), both)], "two have it, and the worker sees a link");
    w.link(START, VMS[0], false);
    let away = VmPlace { is_elsewhere: true, ..VmPlace::default() };
    assert_eq!(w.places(), [(VMS[0].into(), away.clone())]);
    w.configure(|_| true);
    assert_eq!(w.places(), []);
    // Its port is another now, which has no place yet.
    w.directory.forget_place(VMS[0], &mut w.control);
    w.configure(|_| true);
    assert_eq!(w.places(), [(VMS[0].into(), away.clone())]);
    // It gets another MAC, which is elsewhere too: the worker has forgotten that of the old one.
    w.directory.forget_mac(VMS[0]);
    w.configure(|_| true);
    assert_eq!(w.places(), [(VMS[0].into(), away.clone())]);
    w.directory.forget_overlay("o");
    w.configure(|_| true);
    let [_, one, two] = VMS.map(|vm| (vm.into(), none.clone()));
    assert_eq!(w.places(), [(VMS[0].into(), away), one, two]);
    w.notes.say([goes(own)]);
    w.directory.note_news();
    w.hear();
    assert_eq!(w.places(), [(VMS[0].into(), none)]);
}

#[test]
fn an_overlay_that_opens_is_told_its_peers_and_then_their_stations() {
    let mut w = World::new();
    w.orders();
    let (host, port) = ("127.0.9.3".parse().unwrap(), 4789);
    let far = Station { host, ..station(key(1)) };
    let host_comes =
        News::Host { vni: VNI, address: host, now: Some(Host { vni: VNI, address: host, port }) };
    w.notes.say([News::Station { vni: VNI, mac: far.mac, now: Some(far.clone()) }, host_comes]);
    w.directory.note_news();
    w.hear();
    let orders = w.orders();
    let is_far = |order: &Order| match order {
        Order::TellStation { elsewhere, .. } => elsewhere.as_deref() == Some(&far),
        _ => false,
    };
    let peers = [PEER.parse().unwrap(), host].map(|ip| SocketAddr::new(ip, port));
    let are_peers = |order: &Order| matches!(order, Order::SetPeers(VNI, it) if **it == peers);
    let [first, second, third] = &orders[..] else { panic!("{orders:?}") };
    assert!(is_far(first) && are_peers(second) && is_far(third), "again: it has a peer now");
    w.configure(|_| true);
    assert!(!w.orders().iter().any(|order| is_far(order) || are_peers(order)), "it knows that");
    w.configure(|_| false);
    assert!(!w.orders().iter().any(|order| is_far(order) || are_peers(order)), "it is closed");
    w.configure(|_| true);
    let orders = w.orders();
    let (set, told) = (orders.iter().position(are_peers), orders.iter().position(is_far));
    assert!(set.is_some() && set < told, "{orders:?}");
}

#[test]
fn stations_that_come_and_go_while_the_worker_stands_wait_in_the_registry() {
    const TIMES: u32 = 10_000;
    let mut w = World::new();
    for n in 0..TIMES {
        w.notes.say([comes(key(n)), goes(key(n))]);
        w.directory.note_news();
        w.hear();
        assert!(w.control.waiting() <= WAITING_MAX, "{n}: {}", w.control.waiting());
    }
    assert!(w.notes.left() > TIMES as usize, "{}", w.notes.left());
    assert_eq!(w.directory.poll_timeout(&w.control), None, "it does not spin meanwhile");
    // The worker works again.
    let mut known = BTreeSet::new();
    while w.directory.has_news {
        for order in w.orders() {
            if let Order::TellStation { key, elsewhere, .. } = order {
                if elsewhere.is_some() {
                    known.insert(key)
                } else {
                    known.remove(&key)
                };
            }
        }
        assert_eq!(w.directory.poll_timeout(&w.control), Some(Instant::ZERO));
        w.hear();
    }
    for order in w.orders() {
        if let Order::TellStation { key, elsewhere: None, .. } = order {
            known.remove(&key);
        }
    }
    assert!(w.directory.stations.is_empty() && known.is_empty());
}

/// The worker, its overlay and the directory of 60,000 stations.
#[test]
fn sixty_thousand_stations_at_once_take_a_thousand_turns_and_all_arrive() {
    let last = u32::try_from(STATIONS_MAX).unwrap() - 1;
    let list = (0..=last).map(|n| station(key(n))).collect();
    let listed = Listed::new(list).unwrap();
    let dir = TemporaryDir::new("many");
    let (arena, _lock) =
        arena_file::open(&dir.0.join("arena"), arena_file::size_for(1, 1)).unwrap();
    let engine = Engine::new(START, EngineConfig::new(1, [1, 2, 3, 4]), arena);
    let settings = WorkerConfig { busy_poll: Duration::ZERO, epoch: NonZeroU64::MIN };
    let mut worker = Worker::new(&settings, engine).unwrap();
    let overlay = OverlayPort::open(&config().overlays[0], [1, 2, 3, 4], &Sockets::default());
    let port = Port::Overlay(Box::new(overlay.unwrap()));
    worker.add_port(port, PortConfig::uplink("o")).unwrap();
    let notes = World::new().notes;
    let World { mut directory, mut control, worker: mail, epoll, .. } =
        World::with(Box::new(listed), notes);
    worker.set_mail(mail).unwrap();
    let mut turns = 0;
    while directory.has_news || control.waiting() > 0 {
        let _ = epoll.wait(&mut [EpollEvent::empty()], EpollTimeout::ZERO);
        let _ = control.take().unwrap();
        directory.hear(&mut control);
        worker.turn_at_once().unwrap();
        turns += 1;
    }
    assert!(turns > STATIONS_MAX / 64 - 1024 / 64, "{turns} turns");
    (0..1024 / 64).for_each(|_| worker.turn_at_once().unwrap());
    // Who has the address of the last? It is known.
    let mac = key(last).1;
    let (asker, head) = ([2, 0, 0, 0, 0, 1], [8, 6, 0, 1, 8, 0, 6, 4, 0, 1]);
    let arp = [&[0xff; 6][..], &asker, &head, &asker, &[10, 0, 0, 1], &[0; 6]].concat();
    let arp = [&arp[..], &[10, 1, mac[4], mac[5]]].concat();
    let overlay = worker.overlay_mut(VNI);
    assert_eq!(overlay.send(START, &VirtioNetHdr::default(), &[&arp]), Sent::Done);
    let mut buf = [0; 100];
    assert!(matches!(overlay.receive(START, &mut buf), Received::Frame(..)));
    assert_eq!(buf[6..12], mac);
}

struct TemporaryDir(PathBuf);

impl TemporaryDir {
    fn new(name: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("np-told-{}-{name}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        Self(dir)
    }
}

impl Drop for TemporaryDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
