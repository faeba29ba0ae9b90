//! VMs whose taps are attached, in namespaces of the test's own: the test is the VMM, which holds
//! the VM's tap, and the network, a tap in the same bridge. Needs root.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use nightporter_api::Change;
use nightporter_attach::tap::Tap;
use nightporter_boost::process::holder;
use nightporter_boost::protocol::{Claim, Order};
use nightporter_core::wire::virtio_net::VirtioNetHdr;
use nix::libc;
use nix::mount::{MsFlags, mount};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::Signal;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule,
};

use crate::boost::Booster;
use crate::host::{Dir, Host, LIMIT, command};
use crate::segment::{ACK, End, PSH, RST, SYN, Seen, Segment, parse};
use crate::uplinks::ip;

/// Features of the VMM's reader (linux/if_tun.h): CSUM, TSO4, TSO6, ECN.
const OFFLOADS: u64 = 0x0f;
pub(crate) const G: End = End(1, 80);
pub(crate) const R: End = End(9, 5000);
/// Sequence numbers of R and G.
pub(crate) const R_ISN: u32 = 0xffff_ff00;
pub(crate) const G_ISN: u32 = 7000;
pub(crate) const MSS: [u8; 4] = [2, 4, 5, 0xb4];
/// No frame passes the daemon because the machine is busy.
pub(crate) const PATIENT: &str = "metrics = \"off\"\nplain_after_ms = 1000";
/// Frames pass the daemon if it stands, and hardly because the machine is busy.
const PASSED_BY: &str = "metrics = \"off\"\nplain_after_ms = 300";

/// The two taps of the test.
pub(crate) struct Street {
    pub(crate) vm: Tap,
    pub(crate) network: Tap,
}

impl Street {
    /// Runs a test in fresh namespaces, with its own view of the interfaces in /sys.
    pub(crate) fn run(test: impl FnOnce(Self) + Send + 'static) {
        let thread = thread::spawn(|| {
            unshare(CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWNS).unwrap();
            mount(
                None::<&str>,
                "/",
                None::<&str>,
                MsFlags::MS_REC | MsFlags::MS_PRIVATE,
                None::<&str>,
            )
            .unwrap();
            mount(Some("sysfs"), "/sys", Some("sysfs"), MsFlags::empty(), None::<&str>).unwrap();
            ip("link add br0 type bridge stp_state 0 mcast_snooping 0");
            is_silent("br0");
            ip("link set br0 up");
            test(Self { vm: member("vm0"), network: member("net0") });
        });
        thread.join().unwrap();
    }

    fn tap(&self, of: End) -> &Tap {
        if of.0 == G.0 { &self.vm } else { &self.network }
    }

    pub(crate) fn sends_frame(&self, from: End, frame: &[u8]) {
        let bytes = [&VirtioNetHdr::default().emit()[..], frame].concat();
        self.tap(from).file().write_all(&bytes).unwrap();
    }

    pub(crate) fn sends(&self, from: End, to: End, segment: &Segment<'_>) {
        self.sends_frame(from, &segment.frame(from, to));
    }

    /// The next frame at a side, if there is one in time.
    pub(crate) fn next(&self, at: End, patience: Duration) -> Option<Vec<u8>> {
        let (deadline, mut buffer) = (Instant::now() + patience, vec![0; 1 << 17]);
        loop {
            match self.tap(at).file().read(&mut buffer) {
                Ok(len) => return Some(buffer[VirtioNetHdr::LEN..len].to_vec()),
                Err(e) => assert_eq!(e.kind(), ErrorKind::WouldBlock, "{e}"),
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            let mut ready = [PollFd::new(self.tap(at).file().as_fd(), PollFlags::POLLIN)];
            poll(&mut ready, PollTimeout::try_from(left).unwrap()).unwrap();
        }
    }

    #[track_caller]
    pub(crate) fn gets_frame(&self, at: End) -> Vec<u8> {
        self.next(at, LIMIT).expect("a frame")
    }

    /// The next segment; sums of made frames may be unfinished toward the VM.
    #[track_caller]
    pub(crate) fn gets(&self, at: End) -> Seen {
        parse(&self.gets_frame(at))
    }

    /// R opens a connection to G, and both know it.
    pub(crate) fn connects(&self) {
        let syn =
            Segment { flags: SYN, seq: R_ISN, window: 60_000, options: &MSS, ..Segment::default() };
        self.sends(R, G, &syn);
        assert_eq!(self.gets(G).flags, SYN);
        let syn_ack = Segment { flags: SYN | ACK, seq: G_ISN, ack: R_ISN.wrapping_add(1), ..syn };
        self.sends(G, R, &syn_ack);
        assert_eq!(self.gets(R).flags, SYN | ACK);
        self.acknowledges(R);
        assert_eq!(self.gets(G).flags, ACK);
    }

    /// A bare ACK of the other's handshake.
    fn acknowledges(&self, from: End) {
        let (seq, ack) = (R_ISN.wrapping_add(1), G_ISN + 1);
        let segment = Segment { flags: ACK, seq, ack, window: 60_000, ..Segment::default() };
        self.sends(from, G, &segment);
    }

    /// G gets these bytes, perhaps behind copies of others.
    #[track_caller]
    pub(crate) fn reads(&self, payload: [u8; 1000]) {
        while !self.gets_frame(G).ends_with(&payload) {} // their sum is unfinished
    }

    /// G sends bytes that begin so far behind its handshake, and has so many of R's.
    fn answers(&self, at: u32, ack: u32, payload: &[u8]) {
        let (seq, ack) = (G_ISN + 1 + at, R_ISN.wrapping_add(1 + ack));
        let segment = Segment { flags: ACK, seq, ack, window: 60_000, options: &[], payload };
        self.sends(G, R, &segment);
    }

    /// R sends bytes that begin so far behind its handshake.
    pub(crate) fn uploads(&self, at: u32, payload: &[u8]) {
        let seq = R_ISN.wrapping_add(1 + at);
        let (flags, ack, window) = (ACK | PSH, G_ISN + 1, 60_000);
        let segment = Segment { flags, seq, ack, window, options: &[], payload };
        self.sends(R, G, &segment);
    }
}

/// A tap in the bridge.
pub(crate) fn member(name: &str) -> Tap {
    silent_tap(name, " master br0")
}

fn silent_tap(name: &str, master: &str) -> Tap {
    let tap = Tap::of_vmm(name, OFFLOADS).unwrap();
    is_silent(name);
    ip(&format!("link set {name}{master} up"));
    tap
}

/// The host sends nothing of its own out of this interface.
fn is_silent(name: &str) {
    std::fs::write(format!("/proc/sys/net/ipv6/conf/{name}/disable_ipv6"), "1").unwrap();
}

pub(crate) fn links() -> String {
    let output = Command::new("ip").args(["-br", "link"]).output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

fn tc(arguments: &str) {
    assert!(Command::new("tc").args(arguments.split(' ')).status().unwrap().success());
}

/// Waits until this is so.
pub(crate) fn until(is_so: impl Fn() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < LIMIT, "{}", links());
    }
}

/// A frame that is no segment, with a number.
pub(crate) fn echo(number: u16) -> Vec<u8> {
    [&[0xff; 6][..], &G.mac(), &[0x88, 0xb5], &number.to_be_bytes(), &[0; 44]].concat()
}

pub(crate) fn vm() -> String {
    "[[vm]]\nname = \"web1\"\ntap = \"vm0\"\nbudget = \"4M\"\n".into()
}

#[test]
#[ignore = "needs root: it attaches taps"]
fn an_attached_vm_is_acknowledged_for_and_gets_all_bytes_and_a_daemon_that_ends_is_a_plain_wire() {
    Street::run(|street| {
        let dir = Dir::new();
        let host = Host::start(&dir, &dir.configure(PATIENT, &vm()));
        host.until("web1", |port| port.link);
        street.sends_frame(G, &echo(1));
        assert_eq!(street.gets_frame(R), echo(1));
        street.connects();
        // The VM reads nothing, and R is acknowledged.
        let payload = [7; 1000];
        street.uploads(0, &payload);
        let acknowledgement = street.gets(R);
        assert_eq!(acknowledgement.ack, R_ISN.wrapping_add(1001), "{acknowledgement:?}");
        // It reads them: nothing was lost.
        let frame = street.gets_frame(G);
        assert_eq!(frame[frame.len() - 1000..], payload);
        let status = host.port("web1").vm.unwrap();
        assert_eq!((status.owed_flows, status.held_bytes), (1, 1000), "{status:?}");
        let (seq, ack) = (G_ISN + 1, R_ISN.wrapping_add(1001));
        let segment = Segment { flags: ACK, seq, ack, window: 60_000, ..Segment::default() };
        street.sends(G, R, &segment);
        host.until("web1", |port| port.vm.as_ref().is_some_and(|vm| vm.owed_flows == 0));
        // It is killed: the programs go with it.
        host.signal(Signal::SIGKILL);
        host.wait();
        street.sends_frame(G, &echo(2));
        while street.next(R, LIMIT).expect("a plain wire") != echo(2) {}
        street.uploads(1000, &payload);
        assert_eq!(street.gets(G).payload, payload);
        // The next one attaches it again. It knows nothing of the connection, which goes on.
        let host = Host::start(&dir, &dir.join("np.toml"));
        host.until("web1", |port| port.link);
        street.uploads(2000, &payload);
        assert_eq!(street.gets(G).payload, payload);
        assert_eq!(host.port("web1").vm.unwrap().owed_flows, 0);
    });
}

/// A daemon with the VM's tap, which knows its MAC and is passed by when it stands.
fn serve(street: &Street) -> (Dir, Host) {
    let dir = Dir::new();
    let host = Host::start(&dir, &dir.configure(PASSED_BY, &vm()));
    host.until("web1", |port| port.link);
    street.sends_frame(G, &echo(7));
    street.gets_frame(R);
    (dir, host)
}

/// A connection of which the daemon owes G 1,000 bytes.
fn promise(street: &Street) {
    street.connects();
    street.uploads(0, &[7; 1000]);
    assert_eq!(street.gets(R).ack, R_ISN.wrapping_add(1001));
    street.reads([7; 1000]);
}

/// The daemon stands until frames of the VM pass it by. Their numbers begin with `first`; all that
/// were sent, and those that came.
fn stands(street: &Street, host: &Host, first: u16) -> (Vec<u16>, Vec<u16>) {
    until(|| is_in_state(host.pid(), 'S')); // not in the middle of a turn
    host.signal(Signal::SIGSTOP);
    until(|| is_in_state(host.pid(), 'T'));
    let started = Instant::now();
    let (mut sent, mut came) = (vec![], vec![]);
    while came.is_empty() {
        assert!(started.elapsed() < LIMIT, "nothing passes");
        sent.push(first + u16::try_from(sent.len()).unwrap());
        street.sends_frame(G, &echo(*sent.last().unwrap()));
        came.extend(street.next(R, Duration::from_millis(1)).map(|frame| number_of(&frame)));
    }
    assert!(started.elapsed() > Duration::from_millis(50), "before the limit");
    (sent, came)
}

/// All threads of a process sleep, or are stopped (proc_pid_stat(5)).
fn is_in_state(pid: u32, state: char) -> bool {
    let mut threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    threads.all(|it| {
        let stat = std::fs::read_to_string(it.unwrap().path().join("stat"));
        stat.is_ok_and(|stat| stat.contains(&format!(") {state}")))
    })
}

fn number_of(echo: &[u8]) -> u16 {
    assert_eq!(echo[12..14], [0x88, 0xb5], "{echo:02x?}");
    u16::from_be_bytes([echo[14], echo[15]])
}

/// It goes on, and those that it had come late, each once.
fn goes_on(street: &Street, host: &Host, (sent, mut came): (Vec<u16>, Vec<u16>)) {
    host.signal(Signal::SIGCONT);
    while came.len() < sent.len() {
        came.push(number_of(&street.gets_frame(R)));
    }
    came.sort_unstable();
    assert_eq!(came, sent, "each once");
}

#[test]
#[ignore = "needs root: it attaches taps"]
fn a_daemon_that_stands_is_passed_by_and_goes_on_with_what_it_owes() {
    Street::run(|street| {
        let (_dir, host) = serve(&street);
        promise(&street);
        // Nothing of the connection passes: it goes on as if nothing had been.
        goes_on(&street, &host, stands(&street, &host, 100));
        street.uploads(1000, &[8; 1000]);
        assert_eq!(street.gets(R).ack, R_ISN.wrapping_add(2001));
        // Now the VM sends data, which R gets. It has lost what it was given.
        let echoes = stands(&street, &host, 10_000);
        street.answers(0, 0, &[9; 500]);
        assert_eq!(street.gets(R).payload, [9; 500]);
        goes_on(&street, &host, echoes);
        // It is asked what it has, and gets it again. Nobody is reset.
        while street.gets_frame(G)[38..42] != R_ISN.to_be_bytes() {} // a probe, behind copies
        let mut has = 0;
        street.answers(500, has, &[]);
        loop {
            let frame = street.gets_frame(G);
            let is_probe = frame[38..42] == R_ISN.wrapping_add(has).to_be_bytes();
            if frame.ends_with(&[8; 1000]) {
                break;
            } else if frame.ends_with(&[7; 1000]) {
                has = 1000; // behind a timeout it gets a segment at a time
            } else if !is_probe {
                continue;
            }
            street.answers(500, has, &[]); // again, if the worker was away when it did
        }
        street.answers(500, 2000, &[]);
        host.until("web1", |port| port.vm.as_ref().is_some_and(|vm| vm.owed_flows == 0));
        street.uploads(2000, &[6; 1000]);
        while street.gets(R).ack != R_ISN.wrapping_add(3001) {}
        street.reads([6; 1000]);
    });
}

#[test]
#[ignore = "needs root: it attaches taps"]
fn a_connection_whose_bytes_passed_plain_comes_back_by_a_segment_of_each_end() {
    Street::run(|street| {
        let (_dir, host) = serve(&street);
        street.connects();
        let echoes = stands(&street, &host, 100);
        street.uploads(0, &[5; 1000]);
        assert_eq!(street.gets_frame(G)[54..], [5; 1000]);
        goes_on(&street, &host, echoes);
        comes_back(&street, 1000);
    });
}

/// So many bytes of R have gone by, the last ones past the daemon.
fn comes_back(street: &Street, at: u32) {
    street.uploads(at, &[4; 1000]);
    street.reads([4; 1000]);
    assert_eq!(street.next(R, Duration::from_millis(20)), None, "it passes");
    street.answers(0, at + 1000, &[]);
    assert_eq!(street.gets(R).ack, R_ISN.wrapping_add(at + 1001));
    street.uploads(at + 1000, &[3; 1000]);
    assert_eq!(street.gets(R).ack, R_ISN.wrapping_add(at + 2001), "ahead of the VM");
    street.reads([3; 1000]);
}

#[test]
#[ignore = "needs root: it attaches taps"]
fn a_tap_whose_daemon_is_away_often_is_plain_for_a_while_once_nothing_is_owed() {
    Street::run(|street| {
        let (_dir, host) = serve(&street);
        promise(&street);
        let tap = || host.port("web1").vm.unwrap().attached.unwrap();
        // Three absences, of which a busy machine may make some itself.
        let mut stood = 0;
        while tap().back_offs == 0 {
            assert!(stood < 3 && tap().plain_for_ms.is_none());
            goes_on(&street, &host, stands(&street, &host, 100 + 10_000 * stood));
            stood += 1;
        }
        assert_eq!(tap().back_offs, 1);
        // Nothing more is promised, and it is not plain before what is owed was delivered.
        street.uploads(1000, &[8; 1000]);
        assert_eq!(street.next(R, Duration::from_millis(20)), None);
        let before = tap();
        assert_eq!(before.plain_for_ms, Some(10_000));
        street.answers(0, 1000, &[]);
        until(|| tap().plain_for_ms.is_some_and(|ms| ms < 10_000));
        street.uploads(1000, &[8; 1000]); // R was not told of them
        street.reads([8; 1000]);
        street.answers(0, 2000, &[]);
        while street.gets(R).ack != R_ISN.wrapping_add(2001) {}
        let passed = tap();
        assert_eq!(passed.plain_to_vm, before.plain_to_vm + 1, "{passed:?}");
        until(|| tap().plain_for_ms.is_none());
        comes_back(&street, 2000);
        assert_eq!(tap().plain_to_vm, passed.plain_to_vm);
    });
}

#[test]
#[ignore = "needs root: it attaches taps"]
fn frames_that_have_waited_for_a_daemon_that_stood_for_long_are_dropped() {
    Street::run(|street| {
        let (_dir, host) = serve(&street);
        let (sent, came) = stands(&street, &host, 100);
        assert!(sent.len() > came.len(), "the first was turned");
        assert!(street.next(R, Duration::from_millis(1100)).is_none());
        host.signal(Signal::SIGCONT);
        host.until("web1", |port| port.link);
        street.sends_frame(G, &echo(9999));
        assert_eq!(street.gets_frame(R), echo(9999));
        // Toward the VM, too, and what comes later is turned as before.
        street.sends_frame(R, &echo(1));
        assert_eq!(street.gets_frame(G), echo(1));
    });
}

#[test]
#[ignore = "needs root: it attaches taps"]
fn a_tap_is_attached_and_detached_amid_a_connection_which_goes_on() {
    Street::run(|street| {
        let dir = Dir::new();
        let host = Host::start(
            &dir,
            &dir.configure("metrics = \"off\"\nplain_after_ms = 1000\ntaps = [\"vm*\"]", ""),
        );
        street.connects();
        let keys = |tap: &str| {
            BTreeMap::from([
                ("tap".to_owned(), tap.to_owned()),
                ("budget".to_owned(), "4M".to_owned()),
            ])
        };
        let (what, fix) = host.refuses(Change::AddVm { name: "web1".into(), keys: keys("net0") });
        assert!(what.contains("does not allow to attach net0"), "{what}: {fix}");
        let (what, fix) = host.refuses(Change::AddVm { name: "web1".into(), keys: keys("vm9") });
        assert!(
            what.starts_with("vm web1: there is no interface vm9") && fix.contains("start the VM"),
            "{what}: {fix}"
        );
        // Whether it is a tap at all comes first.
        let (what, fix) = host.refuses(Change::AddVm { name: "web1".into(), keys: keys("lo") });
        assert!(what.contains("lo is not a tap"), "{what}: {fix}");
        let (what, fix) = host.refuses(Change::AddVm { name: "npv9".into(), keys: keys("npv9") });
        assert!(what.contains("npv9 is called as those taps"), "{what}: {fix}");
        for round in 0..3 {
            host.change(Change::AddVm { name: "web1".into(), keys: keys("vm0") });
            // Once more, as when it is saved; and by another name.
            let again = host.change(Change::AddVm { name: "web1".into(), keys: keys("vm0") });
            assert!(again.steps.is_empty() && again.section.is_some(), "{again:?}");
            let (what, _) = host.refuses(Change::AddVm { name: "web2".into(), keys: keys("vm0") });
            assert_eq!(what, "vm0 is attached already, as VM web1");
            let payload = [round; 500];
            street.uploads(u32::from(round) * 1000, &payload);
            assert_eq!(street.gets(G).payload, payload, "an old connection passes");
            host.change(Change::RemoveVm { name: "web1".into(), drain_ms: None });
            street.uploads(u32::from(round) * 1000 + 500, &payload);
            assert_eq!(street.gets(G).payload, payload);
            street.sends_frame(G, &echo(round.into()));
            assert_eq!(street.gets_frame(R), echo(round.into()));
        }
        assert!(host.names().is_empty(), "{:?}", host.names());
        // They are closed behind the worker.
        until(|| !links().contains("npv") && !links().contains("npn"));
    });
}

#[test]
#[ignore = "needs root: it attaches taps"]
fn a_tap_is_detached_as_late_as_is_wanted_and_what_is_still_owed_then_is_reset() {
    Street::run(|street| {
        let dir = Dir::new();
        let host = Host::start(&dir, &dir.configure(PATIENT, &vm()));
        host.until("web1", |port| port.link);
        street.sends_frame(G, &echo(7)); // which shows its MAC
        street.gets_frame(R);
        street.connects();
        street.uploads(0, &[7; 1000]);
        assert_eq!(street.gets(R).ack, R_ISN.wrapping_add(1001));
        let start = Instant::now();
        host.change(Change::RemoveVm { name: "web1".into(), drain_ms: Some(300) });
        let took = start.elapsed();
        assert!(took >= Duration::from_millis(300) && took < Duration::from_secs(8), "{took:?}");
        assert_ne!(street.gets(R).flags & RST, 0);
    });
}

#[test]
#[ignore = "needs root: it attaches taps"]
fn a_vm_that_reads_nothing_has_a_window_and_gets_all_frames_later() {
    Street::run(|street| {
        let dir = Dir::new();
        let host = Host::start(&dir, &dir.configure(PATIENT, &vm()));
        host.until("web1", |port| port.link);
        ip("link set vm0 txqueuelen 200");
        // More than the queue of the VM's tap has, and less than that of the daemon's. At once: a
        // VM that stands is given 64 more each 4 s, and loses frames when they are too many.
        let all = 400;
        (0..all).for_each(|number| street.sends_frame(R, &echo(number)));
        host.until("web1/net", |port| port.frames_from_port >= u64::from(all));
        for number in 0..all {
            assert_eq!(street.gets_frame(G), echo(number));
        }
    });
}

#[test]
#[ignore = "needs root: it attaches taps"]
fn a_qdisc_that_drops_does_not_close_the_window() {
    Street::run(|street| {
        let dir = Dir::new();
        let host = Host::start(&dir, &dir.configure(PATIENT, &vm()));
        host.until("web1", |port| port.link);
        // Two frames, and what is too much is dropped, as libvirt's <bandwidth> does it.
        tc("qdisc add dev vm0 root tbf rate 8kbit burst 128 limit 256");
        // More than the window has, and the daemon takes them all.
        (0..80).for_each(|number| street.sends_frame(R, &echo(number)));
        let has_sent = |frames| host.port("web1").frames_to_port >= frames;
        until(|| has_sent(80));
        tc("qdisc del dev vm0 root");
        while street.next(G, Duration::ZERO).is_some() {}
        // The whole window is open again, although the VM reads nothing.
        let start = Instant::now();
        (80..130).for_each(|number| street.sends_frame(R, &echo(number)));
        until(|| has_sent(130));
        assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
        (80..130).for_each(|number| assert_eq!(street.gets_frame(G), echo(number)));
    });
}

#[test]
#[ignore = "needs root: it attaches taps"]
fn a_vm_is_known_by_its_mac_whatever_its_tap_is_called() {
    Street::run(|street| {
        let Street { vm: first, network } = street;
        drop(first);
        let named = |name: &str| {
            let tap = Tap::of_vmm(name, OFFLOADS).unwrap();
            is_silent(name);
            // As libvirt gives it.
            ip(&format!("link set {name} address fe:00:00:00:00:01 master br0 up"));
            tap
        };
        let vm = vm().replace("vm0", "vm*") + "mac = \"02:00:00:00:00:01\"\n";
        let dir = Dir::new();
        let street = Street { vm: named("vm7"), network };
        let others = [member("vm1"), member("vm8")];
        let config = format!("{PATIENT}\ntaps = [\"vm7\"]");
        let host = Host::start(&dir, &dir.configure(&config, &vm));
        host.until("web1", |port| port.link);
        street.connects(); // its MAC is known
        street.uploads(0, &[7; 1000]);
        assert_eq!(street.gets(R).ack, R_ISN.wrapping_add(1001));
        // It is nobody else's meanwhile.
        let keys = BTreeMap::from([("tap".to_owned(), "vm7".to_owned())]);
        let (what, _) = host.refuses(Change::AddVm { name: "web2".into(), keys });
        assert_eq!(what, "vm web2: vm7 is attached already, for another VM");
        // The VM is started again, and has another one.
        let Street { vm: old, network } = street;
        drop(old);
        host.until("web1", |port| !port.link);
        let street = Street { vm: named("vm9"), network };
        host.until("web1", |port| port.link);
        street.sends_frame(G, &echo(1));
        while street.gets_frame(R) != echo(1) {}
        drop(others);
    });
}

#[test]
#[ignore = "needs root: it attaches taps"]
fn a_tap_that_goes_and_comes_back_is_attached_again() {
    Street::run(|street| {
        let Street { vm: old, network } = street;
        let dir = Dir::new();
        let host = Host::start(
            &dir,
            &dir.configure("metrics = \"off\"\nplain_after_ms = 1000\ntaps = [\"vm1\"]", &vm()),
        );
        host.until("web1", |port| port.link);
        let descriptors = host.descriptors();
        drop(old);
        host.until("web1", |port| !port.link);
        let street = Street { vm: member("vm0"), network };
        host.until("web1", |port| port.link);
        street.sends_frame(G, &echo(1));
        assert_eq!(street.gets_frame(R), echo(1));
        street.connects();
        street.uploads(0, &[7; 1000]);
        assert_eq!(street.gets(R).ack, R_ISN.wrapping_add(1001));
        until(|| host.descriptors() <= descriptors);
        // A VM that has lost its tap has no socket to lose; with another tap it has lost nothing.
        drop(street);
        host.until("web1", |port| !port.link);
        assert!(host.port("web1").vm.is_some_and(|vm| vm.listens));
        host.change(Change::RemoveVm { name: "web1".into(), drain_ms: None });
        let _other = member("vm1");
        let keys = BTreeMap::from([("tap".to_owned(), "vm1".to_owned())]);
        host.change(Change::AddVm { name: "web1".into(), keys });
        assert_eq!(host.port("web1").trouble, None);
    });
}

/// From now on the kernel knows no links for this thread and its children, as before Linux 6.6.
fn without_links() {
    let link_create = SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, 28);
    let rules = vec![SeccompRule::new(vec![link_create.unwrap()]).unwrap()];
    let (allow, refuse) = (SeccompAction::Allow, SeccompAction::Errno(libc::EINVAL as u32));
    let rules = BTreeMap::from([(libc::SYS_bpf, rules)]);
    let arch = std::env::consts::ARCH.try_into().unwrap();
    let filter = SeccompFilter::new(rules, allow, refuse, arch).unwrap();
    seccompiler::apply_filter(&BpfProgram::try_from(filter).unwrap()).unwrap();
}

/// The filters of the VM's tap.
fn filters() -> usize {
    let of = |hook| {
        let output = Command::new("tc").args(["filter", "show", "dev", "vm0", hook]).output();
        String::from_utf8(output.unwrap().stdout).unwrap().matches("nightporter").count()
    };
    of("ingress") + of("egress")
}

#[test]
#[ignore = "needs root: it attaches taps"]
fn on_a_kernel_without_links_filters_do_it_and_go_with_the_daemon_or_at_the_next_start() {
    Street::run(|street| {
        without_links();
        let (dir, host) = serve(&street);
        assert_eq!(filters(), 2);
        street.connects();
        street.uploads(0, &[7; 1000]);
        assert_eq!(street.gets(R).ack, R_ISN.wrapping_add(1001));
        street.reads([7; 1000]);
        street.answers(0, 1000, &[]);
        host.until("web1", |port| port.vm.as_ref().is_some_and(|vm| vm.owed_flows == 0));
        // It stands, and is passed by; then it is killed: the filters stay, and all frames pass.
        let (sent, came) = stands(&street, &host, 100);
        assert!(sent.len() > came.len());
        host.signal(Signal::SIGKILL);
        host.wait();
        assert_eq!(filters(), 2);
        street.sends_frame(R, &echo(2));
        assert_eq!(street.gets_frame(G), echo(2));
        // The next one takes them away, if it has the tap or not; its own go with it.
        let other = Dir::new();
        let host = Host::start(&other, &other.configure(PASSED_BY, ""));
        assert_eq!(filters(), 0);
        host.signal(Signal::SIGTERM);
        host.wait();
        let host = Host::start(&dir, &dir.join("np.toml"));
        host.until("web1", |port| port.link);
        assert_eq!(filters(), 2);
        street.sends_frame(G, &echo(3));
        while street.gets_frame(R) != echo(3) {}
        host.change(Change::RemoveVm { name: "web1".into(), drain_ms: None });
        assert_eq!(filters(), 0);
        // A change leaves none that is refused because of another tap.
        let other = vm().replace("web1", "web2").replace("vm0", "none0");
        dir.configure(PASSED_BY, &(vm() + &other));
        let (what, _) = host.refuses(Change::Reload {});
        assert!(what.contains("there is no interface none0"), "{what}");
        assert_eq!(filters(), 0);
        let keys = [("tap", "vm0"), ("budget", "4M")].map(|(k, v)| (k.into(), v.into()));
        host.change(Change::AddVm { name: "web1".into(), keys: BTreeMap::from(keys) });
        assert_eq!(filters(), 2);
        host.signal(Signal::SIGTERM);
        host.wait();
        assert_eq!(filters(), 0);
        street.sends_frame(G, &echo(4));
        assert_eq!(street.gets_frame(R), echo(4));
        // Nor does a daemon that cannot start.
        let path = dir.configure(&format!("{PASSED_BY}\ncpu = 1000"), &vm());
        let said = command(&path).output().unwrap().stderr;
        let said = String::from_utf8(said).unwrap();
        assert!(said.contains("cpu = 1000: "), "{said}");
        assert_eq!(filters(), 0);
    });
}

#[test]
#[ignore = "needs root: it attaches taps"]
fn bst_01_the_holder_of_a_tap_is_its_vmm_and_an_empty_queue_is_no_turn() {
    Street::run(|street| {
        // The test itself is in another network namespace than this thread.
        let held = street.vm.file().try_clone().unwrap();
        let mut vmm = Command::new("sleep").arg("1000").stdin(held).spawn().unwrap();
        let dir = Dir::new();
        let ports = vm() + "boost = \"15ms/90ms\"\n";
        let host = Host::start(&dir, &dir.configure(PATIENT, &ports));
        host.until("web1", |port| port.link);
        let (mut booster, worker) = Booster::begin(&dir);
        let Order::Vm { vm, pid: 0, tap: Some(tap), boost: Some(_), .. } = booster.hears() else {
            panic!("no VM with a tap")
        };
        booster.vm = vm;
        let found = [holder(&tap, worker), holder("net0", worker)];
        vmm.kill().unwrap();
        vmm.wait().unwrap();
        assert_eq!(found[0], Ok(vmm.id().cast_signed()));
        assert!(found[1].as_ref().is_err_and(|why| why.contains("holds net0")), "{found:?}");
        assert!(holder(&tap, worker).is_err(), "it has ended");
        // Its SYN, its ACK and frames that leave the queue are no reason to favour it.
        street.sends_frame(G, &echo(1));
        street.gets_frame(R);
        street.connects();
        street.uploads(0, &[7; 1000]);
        let before = booster.hears_boost(Claim::Bytes, 50_000);
        street.gets(R);
        street.reads([7; 1000]);
        street.answers(0, 1000, &[]);
        assert_eq!(booster.hears_boost(Claim::Reading, 2_000), before + 1, "it took them");
        ip("link del vm0");
        let gone = || match booster.hears() {
            Order::Vm { pid: 0, tap: None, .. } => true,
            Order::End { .. } => false,
            Order::Gone { vm } if vm != booster.vm => false, // the other end of the wire
            other => panic!("{other:?}"),
        };
        while !gone() {}
    });
}

#[test]
#[ignore = "needs root: it attaches taps"]
fn frames_that_find_the_taps_of_the_daemon_full_are_counted() {
    Street::run(|street| {
        let dir = Dir::new();
        let host = Host::start(&dir, &dir.configure(PATIENT, &vm()));
        host.until("web1", |port| port.link);
        host.signal(Signal::SIGSTOP);
        // Before the limit more than a queue of the kernel has, and then until one goes its way.
        let (mut sent, mut came) = (0, None);
        while came.is_none() {
            street.sends_frame(G, &echo(sent));
            sent += 1;
            came = if sent < 1500 { None } else { street.next(R, Duration::from_millis(1)) };
        }
        assert_eq!(street.next(R, Duration::ZERO), None);
        host.signal(Signal::SIGCONT);
        let attached = host.port("web1").vm.unwrap().attached.unwrap();
        assert_eq!((attached.plain_from_vm, attached.plain_to_vm), (1, 0), "{attached:?}");
        assert_eq!(attached.lost_from_vm + 1001, u64::from(sent), "{attached:?}");
        assert_eq!((attached.lost_to_vm, attached.window_frames), (0, 64), "{attached:?}");
    });
}

#[test]
#[ignore = "needs root: it attaches taps"]
fn idle_taps_cost_a_busy_one_nothing_and_wake_nobody() {
    Street::run(|street| {
        let dir = Dir::new();
        // In no bridge, so that nobody sends them anything.
        let taps: Vec<_> = (1..=20).map(|n| (n, silent_tap(&format!("idle{n}"), ""))).collect();
        let vms = taps.iter().map(|(n, _)| {
            vm().replace("web1", &format!("i{n}")).replace("vm0", &format!("idle{n}"))
        });
        let host = Host::start(&dir, &dir.configure(PATIENT, &(vm() + &vms.collect::<String>())));
        for (n, _) in &taps {
            host.until(&format!("i{n}"), |port| port.link);
        }
        let count = |file: &str, key: &str| -> u64 {
            let text = std::fs::read_to_string(format!("/proc/{}/{file}", host.pid())).unwrap();
            let line = text.lines().find_map(|line| line.strip_prefix(key)).unwrap();
            line.trim().parse().unwrap()
        };
        // A frame has its turn, in which no counter of an idle tap is read.
        let frames = 100;
        let before = count("io", "syscr:");
        for number in 0..frames {
            street.sends_frame(G, &echo(number));
            assert_eq!(street.gets_frame(R), echo(number));
        }
        let reads = count("io", "syscr:") - before;
        assert!(reads < 20 * u64::from(frames), "{reads} reads");
        // The worker is the main thread, whose waits end when something is to be done.
        let before = count("status", "voluntary_ctxt_switches:");
        assert_eq!(street.next(R, Duration::from_secs(1)), None);
        let wakes = count("status", "voluntary_ctxt_switches:") - before;
        assert!(wakes < 20, "{wakes} in a second");
    });
}

#[test]
#[ignore = "needs root: it attaches taps"]
fn a_tap_that_flaps_leaks_nothing_and_its_remotes_are_reset_when_there_is_a_way_again() {
    Street::run(|street| {
        let Street { vm: mut tap, network } = street;
        drop(tap); // the VM has not started yet
        let dir = Dir::new();
        let host = Host::start(&dir, &dir.configure(PATIENT, &vm()));
        let lost = host.until("web1", |port| !port.link).trouble.unwrap();
        assert!(lost.starts_with("there is no interface vm0"), "{lost}");
        let (mut network, mut held) = (network, None);
        for round in 0..2 {
            tap = member("vm0");
            host.until("web1", |port| port.link);
            let street = Street { vm: tap, network };
            if round > 0 {
                // Bytes that it had promised went with the VM. R tells by its next segment.
                street.uploads(1000, &[7; 1000]);
                let reset = street.gets(R);
                assert_ne!(reset.flags & RST, 0, "{reset:?}");
            }
            street.sends_frame(G, &echo(7)); // which shows its MAC
            assert_eq!(street.gets_frame(R), echo(7));
            street.connects();
            street.uploads(0, &[7; 1000]);
            assert_eq!(street.gets(R).ack, R_ISN.wrapping_add(1001));
            let own = links().matches("np").count();
            let broker = std::fs::read_dir(format!("/proc/{}/fd", host.broker().unwrap()));
            let now = (own, broker.unwrap().count());
            assert_eq!(*held.get_or_insert(now), now, "{}", links());
            drop(street.vm);
            network = street.network;
            // For 2 s the VM may come back as it was (LIFE-16).
            host.until("web1", |port| port.vm.as_ref().unwrap().owed_flows == 0);
        }
        until(|| links().matches("np").count() == 0);
    });
}
