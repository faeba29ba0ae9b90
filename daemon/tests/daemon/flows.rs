//! A TCP connection between two guests, seen from outside: promises, and what becomes of them.

use std::fs::File;
use std::path::Path;

use nightporter_core::wire::heartbeat::Heartbeat;
use nix::sys::signal::Signal;

use nightporter_api::{FlowInfo, PortStatus, Reply, Request};

use crate::guest::{Guest, PLAIN};
use crate::host::{Dir, Host};
use crate::segment::{ACK, End, PSH, RST, SYN, Seen, Segment, parse};
use crate::systemd::Systemd;

/// The remote: its VM has no offload of its own, so its ACKs come from the other VM's.
const R: End = End(1, 40_001);
const G: End = End(2, 80);
const ISN_R: u32 = 0xffff_ff00;
const ISN_G: u32 = 5_000_001;
const MSS: &[u8] = &[2, 4, 0x05, 0xb4];

/// A host with a remote and a guest, whose connection has just been established.
pub(crate) struct World {
    pub(crate) dir: Dir,
    pub(crate) host: Host,
    pub(crate) remote: Guest,
    pub(crate) guest: Guest,
}

impl World {
    pub(crate) fn connected(daemon: &str) -> Self {
        Self::connected_with(daemon, "")
    }

    /// With more in the guest's section of the configuration.
    pub(crate) fn connected_with(daemon: &str, guest: &str) -> Self {
        Self::connected_of(daemon, "", guest)
    }

    fn connected_of(daemon: &str, remote: &str, guest: &str) -> Self {
        Self::connected_at(daemon, remote, guest, Host::start)
    }

    /// The daemon of such a host is started by `start`.
    fn connected_at(
        daemon: &str,
        remote: &str,
        guest: &str,
        start: impl FnOnce(&Dir, &Path) -> Host,
    ) -> Self {
        let dir = Dir::new();
        let remote = format!("ack_offload = false\n{remote}");
        let ports = dir.vm("remote", &remote) + &dir.vm("guest", guest);
        let config = dir.configure(&format!("metrics = \"off\"\n{daemon}"), &ports);
        let host = start(&dir, &config);
        let mut remote = Guest::boot(&dir.join("remote"), PLAIN);
        let mut guest = Guest::boot(&dir.join("guest"), PLAIN);
        remote.offer(64);
        guest.offer(64);
        // As their ARP requests would have done before any TCP.
        guest.send_plain(&hello(G));
        remote.receive(1);
        remote.send_plain(&hello(R));
        segments(&mut guest);
        let mut world = Self { dir, host, remote, guest };
        world.shake_hands();
        world
    }

    fn shake_hands(&mut self) {
        let syn = Segment { flags: SYN, seq: ISN_R, window: 64_000, ..Segment::default() };
        self.remote.send_plain(&Segment { options: MSS, ..syn }.frame(R, G));
        assert_eq!(self.at_guest().flags, SYN);
        let syn_ack = Segment { flags: SYN | ACK, seq: ISN_G, ack: ISN_R.wrapping_add(1), ..syn };
        self.guest.send_plain(&Segment { options: MSS, ..syn_ack }.frame(G, R));
        assert_eq!(self.at_remote().flags, SYN | ACK);
        self.remote_sends(1, 1, &[]);
        assert_eq!(self.at_guest().flags, ACK);
    }

    /// A segment of R; positions count payload from 1, as in a packet trace.
    pub(crate) fn remote_sends(&mut self, seq: u32, ack: u32, payload: &[u8]) {
        let flags = if payload.is_empty() { ACK } else { ACK | PSH };
        let (seq, ack) = (ISN_R.wrapping_add(seq), ISN_G.wrapping_add(ack));
        let segment = Segment { flags, seq, ack, window: 64_000, payload, ..Segment::default() };
        self.remote.send_plain(&segment.frame(R, G));
    }

    pub(crate) fn guest_sends(&mut self, seq: u32, ack: u32, payload: &[u8]) {
        self.guest.send_plain(&of_guest(seq, ack, payload));
    }

    pub(crate) fn at_guest(&mut self) -> Seen {
        one(segments(&mut self.guest))
    }

    /// Waits until the guest is told that all below a position has arrived; before, it may be shown
    /// more room.
    pub(crate) fn until_guest_is_told(&mut self, position: u32) {
        let (first, wanted) = (self.position_of_guest(1), self.position_of_guest(position));
        loop {
            let frames = segments(&mut self.guest);
            let acks: Vec<_> = frames.iter().map(|frame| parse(frame).ack).collect();
            assert!(acks.iter().all(|ack| [first, wanted].contains(ack)), "{acks:?}");
            if acks.contains(&wanted) {
                return;
            }
        }
    }

    pub(crate) fn at_remote(&mut self) -> Seen {
        one(self.remote.receive(1))
    }

    /// The sequence number of a position in what the guest sends.
    pub(crate) fn position_of_guest(&self, position: u32) -> u32 {
        ISN_G.wrapping_add(position)
    }

    /// R sends 1,000 bytes, H acknowledges them, and G, which gets them, says nothing.
    pub(crate) fn hold_1000_bytes(&mut self) {
        // G has to be heard once after its SYN-ACK before H trusts the handshake (COM-29).
        self.guest_sends(1, 1, b"hello");
        assert_eq!(self.at_remote().payload, b"hello");
        self.remote_sends(1, 6, &[7; 1000]);
        let ack = self.at_remote();
        assert_eq!((ack.flags, ack.ack), (ACK, ISN_R.wrapping_add(1001)), "H acknowledges");
        assert_eq!(self.at_guest().payload, [7; 1000]);
    }

    pub(crate) fn flow(&self) -> FlowInfo {
        match self.host.ask(&Request::Flows { vm: Some("guest".into()), from: 0 }) {
            Reply::Flows(page) => page.flows.into_iter().next().expect("a flow"),
            other => panic!("{other:?}"),
        }
    }
}

/// A segment of G.
fn of_guest(seq: u32, ack: u32, payload: &[u8]) -> Vec<u8> {
    let (seq, ack) = (ISN_G.wrapping_add(seq), ISN_R.wrapping_add(ack));
    let segment = Segment { flags: ACK, seq, ack, window: 64_000, payload, ..Segment::default() };
    segment.frame(G, R)
}

/// A broadcast that says where a station is.
fn hello(who: End) -> Vec<u8> {
    let mut frame = [[0xff; 6], who.mac()].concat();
    frame.extend([0x88, 0xb5]); // "local experimental" (IEEE 802)
    frame.resize(60, 0);
    frame
}

/// The next frames that are no heartbeats.
fn segments(guest: &mut Guest) -> Vec<Vec<u8>> {
    loop {
        let mut frames = guest.receive(1);
        frames.retain(|frame| Heartbeat::parse(frame).is_none());
        if !frames.is_empty() {
            return frames;
        }
    }
}

fn one(frames: Vec<Vec<u8>>) -> Seen {
    assert_eq!(frames.len(), 1, "{frames:x?}");
    parse(&frames[0])
}

/// The next daemon of a machine with systemd.
fn next_of(systemd: &mut Systemd, dir: &Dir, config: &Path) -> Host {
    let program = Path::new(env!("CARGO_BIN_EXE_nightporterd"));
    let (mut command, _copies) = systemd.command(program);
    Host::start_as(dir, command.arg("--config").arg(config))
}

#[test]
fn a_connection_that_owes_nothing_goes_on_with_the_offload_when_its_daemon_stops() {
    let mut before = None;
    let World { dir, host, remote, guest } = World::connected_at("", "", "", |dir, config| {
        let mut systemd = Systemd::new(dir.join("notify")).unwrap();
        let host = next_of(&mut systemd, dir, config);
        before = Some((systemd, config.to_owned()));
        host
    });
    let (mut systemd, config) = before.unwrap();
    let mut w = World { dir, host, remote, guest };
    w.guest_sends(1, 1, b"hello");
    assert_eq!(w.at_remote().payload, b"hello");
    w.remote_sends(1, 6, &[]);
    assert_eq!(w.at_guest().flags, ACK);
    for _ in 0..2 {
        let World { dir, host, remote, guest } = w;
        host.signal(Signal::SIGTERM);
        assert_eq!(host.wait(), Some(0));
        systemd.keeps();
        assert!(dir.join("arena.empty").exists(), "nobody is owed anything");
        let host = next_of(&mut systemd, &dir, &config);
        w = World { dir, host, remote, guest };
        assert_eq!(w.flow().state, "on");
    }
    for probe in segments(&mut w.guest) {
        let Seen { flags, payload, .. } = parse(&probe);
        assert_eq!((flags, payload.len()), (ACK, 0), "each daemon asks for its window");
    }
    w.guest_sends(6, 1, &[]);
    assert_eq!(w.at_remote().flags, ACK);
    w.remote_sends(1, 6, &[7; 1000]);
    let ack = w.at_remote();
    assert_eq!((ack.flags, ack.ack), (ACK, ISN_R.wrapping_add(1001)), "H acknowledges");
}

#[test]
fn bytes_are_acknowledged_before_the_guest_does_and_held_until_it_has() {
    let mut w = World::connected("");
    w.hold_1000_bytes();
    let flow = w.flow();
    assert_eq!((flow.state.as_str(), flow.held_bytes), ("on", 1000));
    assert_eq!((flow.guest.as_str(), flow.remote.as_str()), ("10.0.0.2:80", "10.0.0.1:40001"));
    w.guest_sends(6, 1001, &[]);
    w.host.until("guest", |g| g.vm.as_ref().is_some_and(|vm| vm.held_bytes == 0));
    let vm = w.host.port("guest").vm.unwrap();
    assert_eq!((vm.counters["early_acked_bytes"], vm.flows["on"], vm.owed_flows), (1000, 1, 0));
    assert_eq!(w.flow().held_bytes, 0);
}

#[test]
fn a_vlan_of_which_both_know_nothing_changes_nothing() {
    let mut w = World::connected_of("", "vlan = 7", "vlan = 7");
    w.hold_1000_bytes();
    assert_eq!((w.flow().held_bytes, w.flow().vlan), (1000, 0x8100_0007_0000_0000));
    w.guest_sends(6, 1001, &[]);
    w.host.until("guest", |g| g.vm.as_ref().is_some_and(|vm| vm.held_bytes == 0));
}

/// Found by simulation: as long as anything waited for the ring, nothing came from the store.
#[test]
fn promised_bytes_are_not_starved_by_what_waits_for_the_ring() {
    let mut w = World::connected("");
    let flood = |w: &mut World, n: usize| (0..n).for_each(|_| w.remote.send_plain(&hello(R)));
    w.guest_sends(1, 1, b"hello");
    assert_eq!(w.at_remote().payload, b"hello");
    let room = 64 - 3;
    flood(&mut w, room + 100);
    w.host.until("guest", |g| g.backlog_bytes == 100 * 60);
    for n in 0..10 {
        w.remote_sends(1 + 1000 * n, 6, &[7; 1000]);
    }
    w.host.until("guest", |g| {
        g.vm.as_ref().is_some_and(|vm| vm.counters["early_acked_bytes"] == 10_000)
    });
    w.guest.receive(room);
    w.guest.offer(40);
    w.guest.receive(40);
    // Each frame that left made place for a segment; the next hundred come behind those.
    flood(&mut w, 100);
    w.host.until("guest", |g| g.backlog_bytes >= 160 * 60);
    w.guest.offer(80);
    let got = w.guest.receive(80);
    let segments = got.iter().filter(|frame| frame[12..14] == [8, 0]);
    assert_eq!(segments.map(|frame| parse(frame).payload.len()).sum::<usize>(), 10_000);
}

#[test]
fn a_guest_killed_with_bytes_in_the_store_is_made_known_to_the_remote() {
    let mut w = World::connected("");
    w.hold_1000_bytes();
    drop(w.guest);
    let told = one(w.remote.receive(1));
    assert!(told.flags & RST != 0, "{told:?}");
}

#[test]
fn life_16_a_guest_whose_vmm_is_another_one_keeps_its_connections_if_its_rings_go_on() {
    let mut world = World::connected("");
    world.hold_1000_bytes();
    world.guest.goes_on(&world.dir.join("guest"), PLAIN);
    world.host.until("guest", |port| port.link);
    let flow = world.flow();
    assert_eq!((flow.state.as_str(), flow.held_bytes), ("on", 1000));
    assert_eq!(world.at_guest().payload, [7; 1000], "what lay in the old ring may be lost");
    world.guest_sends(6, 1001, &[]);
    world.remote_sends(1001, 6, b"more");
    assert_eq!(world.at_remote().flags, ACK);
    assert_eq!(world.at_guest().payload, b"more");
}

#[test]
fn life_06_when_the_vmm_is_answered_the_remote_has_all_that_this_host_says_of_a_vm_that_moves() {
    for acknowledged in [1, 1001] {
        let mut world = World::connected("");
        world.hold_1000_bytes();
        world.guest.begins_to_migrate(PLAIN);
        world.guest.stops_behind(&of_guest(6, acknowledged, b"last"));
        // Nothing is waited for: it is there now.
        let told: Vec<_> = world.remote.received().iter().map(|frame| parse(frame)).collect();
        assert_eq!(told[0].payload, b"last");
        let resets: Vec<_> = told.iter().map(|seen| seen.flags & RST != 0).collect();
        let owes = acknowledged == 1;
        assert_eq!(resets, if owes { vec![false, true] } else { vec![false] }, "{told:?}");
    }
}

#[test]
fn life_16_a_guest_that_boots_in_the_place_of_another_is_told_and_so_is_the_remote() {
    let mut world = World::connected("");
    world.hold_1000_bytes();
    drop(world.guest);
    let mut guest = Guest::boot(&world.dir.join("guest"), PLAIN);
    guest.offer(8);
    assert_ne!(one(world.remote.receive(1)).flags & RST, 0);
    assert_ne!(one(guest.receive(1)).flags & RST, 0);
}

#[test]
fn a_stop_waits_until_the_guest_has_its_bytes_and_leaves_nothing_behind() {
    let mut w = World::connected("drain_timeout_s = 60");
    w.hold_1000_bytes();
    w.host.signal(Signal::SIGTERM);
    w.host.until("guest", |g| g.vm.as_ref().is_some_and(|vm| vm.draining));
    assert!(w.host.status().stopping);
    w.guest_sends(6, 1001, &[]);
    assert_eq!(w.host.wait(), Some(0));
    assert!(!w.dir.join("arena").exists() && !w.dir.join("control").exists());
}

#[test]
fn life_08_a_stop_names_the_connections_that_owe_when_its_time_is_up() {
    let log = |dir: &Dir| dir.join("log");
    let mut w = World::connected_at("drain_timeout_s = 2", "", "", |dir, config| {
        Host::start_with_log(dir, config, File::create(log(dir)).unwrap().into())
    });
    w.hold_1000_bytes();
    w.host.signal(Signal::SIGTERM);
    let stands = |guest: &PortStatus| guest.vm.as_ref().and_then(|vm| vm.stands.clone());
    let guest = w.host.until("guest", |guest| stands(guest).is_some());
    let stands = stands(&guest).unwrap();
    assert_eq!((stands.guest.as_str(), stands.remote.as_str()), ("10.0.0.2:80", "10.0.0.1:40001"));
    assert_eq!((stands.held_bytes, stands.is_unread), (1000, false));
    assert_eq!(w.host.wait(), Some(0));
    let log = std::fs::read_to_string(log(&w.dir)).unwrap();
    let line = log.lines().find(|line| line.contains("a connection is still owed")).expect(&log);
    for part in ["vm=\"guest\"", "guest=10.0.0.2:80", "remote=10.0.0.1:40001", "held=1000"] {
        assert!(line.contains(part), "{line}");
    }
}

#[test]
fn a_second_signal_does_not_wait() {
    let mut w = World::connected("drain_timeout_s = 3600");
    w.hold_1000_bytes();
    w.host.signal(Signal::SIGTERM);
    w.host.until("guest", |g| g.vm.as_ref().is_some_and(|vm| vm.draining));
    w.host.signal(Signal::SIGINT);
    assert_eq!(w.host.wait(), Some(0));
    assert!(w.dir.join("arena").exists(), "what is owed is remembered");
}

#[test]
fn life_09_a_guest_that_boots_while_the_daemon_is_dead_is_told_and_so_is_the_remote() {
    let mut w = World::connected("");
    w.hold_1000_bytes();
    w.host.signal(Signal::SIGKILL);
    assert_eq!(w.host.wait(), None);
    let host = Host::start(&w.dir, &w.dir.join("np.toml"));
    assert_eq!(host.port("guest").vm.unwrap().flows["on"], 1);
    let mut guest = Guest::boot(&w.dir.join("guest"), PLAIN);
    guest.offer(8);
    let told = one(guest.receive(1));
    assert!(told.flags & RST != 0, "{told:?}");
    assert_eq!(told.seq, ISN_R.wrapping_add(1001), "where the guest's receiver stands");
}

/// The daemon is killed five times in the middle of an upload.
#[test]
fn life_09_an_upload_goes_on_when_its_daemon_was_killed() {
    let mut w = World::connected("");
    w.guest_sends(1, 1, b"hello");
    assert_eq!(w.at_remote().payload, b"hello");
    for round in 0..5_u8 {
        let (at, end) = (1 + 1000 * u32::from(round), 1001 + 1000 * u32::from(round));
        w.remote_sends(at, 6, &[round; 1000]);
        // Frames before it may say that the window has grown.
        let acknowledges = |frame: &Vec<u8>| parse(frame).ack == ISN_R.wrapping_add(end);
        while !segments(&mut w.remote).iter().any(acknowledges) {}
        assert_eq!(w.at_guest().payload, [round; 1000]);
        w.host.signal(Signal::SIGKILL);
        assert_eq!(w.host.wait(), None);
        w.host = Host::start(&w.dir, &w.dir.join("np.toml"));
        w.remote.goes_on(&w.dir.join("remote"), PLAIN);
        w.guest.goes_on(&w.dir.join("guest"), PLAIN);
        w.host.until("guest", |port| port.link);
        w.remote.offer(8);
        w.guest.offer(8);
        let again = w.at_guest();
        assert_eq!((again.flags & RST, again.seq), (0, ISN_R.wrapping_add(at)));
        assert_eq!(again.payload, [round; 1000], "what lay in the old ring may be lost");
        w.guest_sends(6, end, &[]);
    }
    let flow = w.flow();
    assert_eq!((flow.state.as_str(), flow.held_bytes), ("on", 0));
}

#[test]
fn drain_and_offload_are_seen_in_the_status() {
    let w = World::connected("");
    let vm = || w.host.port("guest").vm.unwrap();
    let guest = || String::from("guest");
    assert!(vm().offload && !vm().draining);
    assert_eq!(w.host.ask(&Request::Drain { vm: guest() }), Reply::Done {});
    assert!(vm().draining);
    assert_eq!(w.host.ask(&Request::Offload { vm: guest(), on: true }), Reply::Done {});
    assert!(vm().offload && !vm().draining);
    assert_eq!(w.host.ask(&Request::Offload { vm: guest(), on: false }), Reply::Done {});
    assert!(!vm().offload);
}

#[test]
fn a_trace_shows_each_segment_where_it_passes() {
    use std::io::{BufRead, BufReader, Write};
    let mut w = World::connected("");
    let id = w.flow().id;
    let mut stream = BufReader::new(w.host.connect());
    writeln!(stream.get_mut(), "{{\"cmd\":\"trace\",\"id\":{id}}}").unwrap();
    let mut lines = stream.lines().map(|line| line.unwrap());
    assert_eq!(lines.next().unwrap(), "{\"stream\":{}}");
    assert!(lines.next().unwrap().contains("10.0.0.2:80 <-> 10.0.0.1:40001: "));
    w.hold_1000_bytes();
    w.guest_sends(6, 1001, &[]);
    // Without the times, and without the windows, which are H's to choose.
    let mut segment = || {
        let line = lines.next().unwrap();
        let (_, segment) = line.trim_start().split_once(' ').unwrap();
        segment.split(" win ").next().unwrap().to_string()
    };
    let shown: Vec<_> = (0..6).map(|_| segment()).collect();
    assert_eq!(
        shown,
        [
            "G> . 0:5 ack 0",
            ">R . 0:5 ack 0",
            "R> P. 0:1000 ack 5",
            ">R . 5:5 ack 1000",
            ">G P. 0:1000 ack 5",
            "G> . 5:5 ack 1000",
        ]
    );
}
