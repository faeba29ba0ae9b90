//! A whole daemon under its sandbox, as all these tests have it; what an intruder could do is in
//! `intruder.rs`.

use std::collections::BTreeMap;
use std::fs::read_to_string;
use std::io::Write;
use std::time::Instant;

use landlock::{AccessFs, CompatLevel, Compatible, Ruleset, RulesetAttr};
use nightporter_api::{Change, Reply, Request};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::guest::{Guest, PLAIN};
use crate::host::{Dir, Host, LIMIT};

/// The value behind `name` in /proc/PID/status.
fn field(status: &str, name: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(":\t"));
    u64::from_str_radix(line.unwrap().trim(), 16).unwrap()
}

#[test]
fn every_thread_has_given_away_all_capabilities_and_is_filtered() {
    let dir = Dir::new();
    let host = Host::start(&dir, &dir.configure("metrics = \"off\"", &dir.vm("a", "")));
    let _guest = Guest::boot(&dir.join("a"), PLAIN);
    host.until("a", |port| port.link);
    let own = read_to_string("/proc/self/status").unwrap();
    let mut threads = 0;
    for thread in std::fs::read_dir(format!("/proc/{}/task", host.pid())).unwrap() {
        let status = read_to_string(thread.unwrap().path().join("status")).unwrap();
        let of = |name| field(&status, name);
        assert_eq!((of("CapPrm"), of("CapEff")), (0, 0), "{status}");
        assert_eq!((of("CapInh"), of("CapAmb")), (0, 0), "{status}");
        assert_eq!((of("NoNewPrivs"), of("Seccomp")), (1, 2), "{status}");
        assert_eq!(of("Seccomp_filters"), field(&own, "Seccomp_filters") + 3, "{status}");
        threads += 1;
    }
    assert!(threads >= 4, "worker, log, watchdog, changes");
}

#[test]
fn the_broker_has_two_capabilities_and_ends_with_its_daemon_however_that_ends() {
    let own = read_to_string("/proc/self/status").unwrap();
    let two = field(&own, "CapPrm") & (1 << 12 | 1 << 39); // CAP_NET_ADMIN, CAP_BPF
    for end in [Signal::SIGKILL, Signal::SIGTERM] {
        let dir = Dir::new();
        let host = Host::start(&dir, &dir.configure("metrics = \"off\"", &dir.vm("a", "")));
        let broker = host.broker().unwrap();
        let status = read_to_string(format!("/proc/{broker}/status")).unwrap();
        let of = |name| field(&status, name);
        assert_eq!((of("CapPrm"), of("CapEff")), (two, two), "{status}");
        assert_eq!((of("CapInh"), of("CapAmb")), (0, 0), "{status}");
        assert_eq!((of("NoNewPrivs"), of("Seccomp")), (1, 2), "{status}");
        // As a service manager does it, to all of them.
        kill(pid(broker), Signal::SIGTERM).unwrap();
        host.status();
        host.signal(end);
        host.wait();
        until_gone(broker);
    }
}

#[test]
fn a_daemon_goes_on_without_its_broker_and_says_so() {
    let dir = Dir::new();
    let ports = [dir.vm("a", ""), dir.vm("b", "")].concat();
    let daemon = "metrics = \"off\"\nbridges = [\"br0\"]";
    let host = Host::start(&dir, &dir.configure(daemon, &ports));
    let mut a = Guest::boot(&dir.join("a"), PLAIN);
    let mut b = Guest::boot(&dir.join("b"), PLAIN);
    host.until("a", |port| port.link);
    host.until("b", |port| port.link);
    let broker = host.broker().unwrap();
    kill(pid(broker), Signal::SIGKILL).unwrap();
    let start = Instant::now();
    let ended = || matches!(host.ask(&Request::Status {}), Reply::Status(it) if it.broker_ended);
    while !ended() {
        assert!(start.elapsed() < LIMIT, "nobody noticed");
    }
    while host.broker().is_some() {
        assert!(start.elapsed() < LIMIT, "its remains are there");
    }
    b.offer(1);
    let frame = [&[0xff; 6][..], &[2; 6], &[0x88, 0xb5], &[0; 46]].concat(); // "local experimental"
    a.send_plain(&frame);
    assert_eq!(b.receive(1), [frame]);
    let keys = [("kind", "tap"), ("ifname", "np0"), ("bridge", "br0")];
    let keys = keys.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
    let (what, fix) = host.refuses(Change::AddUplink { name: "lan".into(), keys });
    assert!(what.contains("has ended") && fix.contains("restart"), "{what} {fix}");
    // All else can change.
    host.change(Change::RemoveVm { name: "b".into(), drain_ms: None });
}

fn pid(of: u32) -> Pid {
    Pid::from_raw(i32::try_from(of).unwrap())
}

/// Or nobody has buried it yet.
fn until_gone(process: u32) {
    let start = Instant::now();
    while read_to_string(format!("/proc/{process}/stat")).is_ok_and(|it| !it.contains(") Z ")) {
        assert!(start.elapsed() < LIMIT, "it is there");
    }
}

#[test]
fn a_socket_in_a_directory_that_was_not_named_is_refused_with_those_that_were() {
    let strictly = Ruleset::default().set_compatibility(CompatLevel::HardRequirement);
    if strictly.handle_access(AccessFs::ReadFile).is_err() {
        // Past libtest's capture: `.ci/test` counts such lines.
        let _ = writeln!(std::io::stderr(), "SKIPPED: this kernel has no Landlock");
        return;
    }
    let (dir, other) = (Dir::new(), Dir::new());
    let add = || {
        let socket = other.join("b").display().to_string();
        let keys = [("socket", socket), ("budget", "4M".into())];
        let keys: BTreeMap<_, _> = keys.map(|(key, value)| (key.to_owned(), value)).into();
        Change::AddVm { name: "b".into(), keys }
    };
    let host = Host::start(&dir, &dir.configure("metrics = \"off\"", &dir.vm("a", "")));
    let (what, fix) = host.refuses(add());
    assert!(what.contains("Permission denied"), "{what}");
    let own = dir.join("").display().to_string();
    assert!(fix.contains(own.trim_end_matches('/')), "{fix}");
    assert!(fix.contains("daemon.socket_dirs") && !other.join("b").exists(), "{fix}");
    drop(host);
    let daemon = format!("metrics = \"off\"\nsocket_dirs = [\"{}\"]", other.join("").display());
    let host = Host::start(&dir, &dir.configure(&daemon, &dir.vm("a", "")));
    host.change(add());
    let _guest = Guest::boot(&other.join("b"), PLAIN);
    host.until("b", |port| port.link);
}
