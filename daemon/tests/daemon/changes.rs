//! Ports come, go and change while others work.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use nightporter_api::{Change, Only, PortStatus, Reply, Request};
use nightporter_core::wire::virtio_net::VirtioNetHdr;
use nix::net::if_::if_nametoindex;
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::Signal;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;

use crate::flows::World;
use crate::guest::{EVENTS, Guest, PLAIN};
use crate::host::{Dir, Host, LIMIT, command};
use crate::segment::{End, RST};
use crate::sockets::SocketGuest;
use crate::uplinks::ip;

const A: End = End(1, 0);
const B: End = End(2, 0);

fn keys(given: &[(&str, &str)]) -> BTreeMap<String, String> {
    given.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect()
}

/// A VM whose socket is in `dir`.
fn add(dir: &Dir, name: &str, more: &[(&str, &str)]) -> Change {
    let mut keys = keys(more);
    keys.insert("socket".into(), dir.join(name).to_str().unwrap().into());
    keys.entry("budget".into()).or_insert("4M".into());
    Change::AddVm { name: name.into(), keys }
}

fn remove(name: &str) -> Change {
    Change::RemoveVm { name: name.into(), drain_ms: None }
}

fn set(name: &str, given: &[(&str, &str)]) -> Change {
    Change::SetVm { name: name.into(), keys: keys(given) }
}

fn frame(from: End, to: [u8; 6]) -> (VirtioNetHdr, Vec<u8>) {
    let mut frame = [to, from.mac()].concat();
    frame.extend([0x88, 0xb5]); // "local experimental" (IEEE 802)
    frame.resize(100, 0);
    (VirtioNetHdr::default(), frame)
}

/// The daemon's answer to a broken or another file.
fn with_file(host: &Host, config: &Path, text: &str) -> (String, String) {
    let before = std::fs::read_to_string(config).unwrap();
    std::fs::write(config, text).unwrap();
    let said = host.refuses(Change::Reload {});
    std::fs::write(config, before).unwrap();
    said
}

#[test]
fn a_vm_comes_while_others_are_owed_bytes_and_the_store_grows_for_it() {
    let mut world = World::connected("");
    world.hold_1000_bytes();
    let plan = world.host.change(add(&world.dir, "late", &[("budget", "32M"), ("mtu", "9000")]));
    assert!(plan.done, "{plan:?}");
    assert!(plan.steps[0].starts_with("+ vm late: socket "), "{plan:?}");
    assert_eq!(world.host.port("late").vm.unwrap().budget_bytes, 32 << 20);
    let mut late = Guest::boot(&world.dir.join("late"), PLAIN);
    late.offer(8);
    world.guest.send(&[frame(B, [0xff; 6])]);
    assert_eq!(late.receive(1).len(), 1, "it is in the switch");
    world.remote.receive(1);
    // The connection goes on as if nothing had been.
    assert_eq!(world.flow().held_bytes, 1000);
    world.guest_sends(6, 1001, &[]);
    world.remote_sends(1001, 6, b"more");
    assert_eq!(world.at_guest().payload, b"more");
    assert_eq!(world.flow().state, "on");
}

#[test]
fn life_05_a_vm_goes_with_its_connections_and_another_gets_its_number() {
    let mut world = World::connected("");
    world.hold_1000_bytes();
    let mut capture = BufReader::new(world.host.connect());
    let asks = serde_json::to_vec(&Request::Capture {
        port: "guest".into(),
        snap_bytes: None,
        only: Only::default(),
    })
    .unwrap();
    capture.get_mut().write_all(&[&asks[..], b"\n"].concat()).unwrap();
    capture.read_until(b'\n', &mut Vec::new()).unwrap();
    assert_eq!(world.host.change(remove("guest")).steps, ["- vm guest: its connections end"]);
    assert_ne!(world.at_remote().flags & RST, 0, "it is told that the bytes are lost");
    capture.read_to_end(&mut Vec::new()).unwrap(); // who watched it is told by the end
    assert_eq!(world.host.names(), ["remote"]);
    assert!(!world.dir.join("guest").exists(), "its socket has gone");
    let (what, _) = world.host.refuses(remove("guest"));
    assert_eq!(what, "there is no VM \"guest\"");

    world.host.change(add(&world.dir, "next", &[]));
    let next = world.host.port("next");
    assert_eq!((next.frames_from_port, next.frames_to_port), (0, 0));
    assert_eq!(next.vm.unwrap().counters["early_acked_bytes"], 0);
    let mut guest = Guest::boot(&world.dir.join("next"), PLAIN);
    guest.offer(8);
    guest.send(&[frame(End(7, 0), [0xff; 6])]);
    world.remote.receive(1);
    // It may use the address of the one before it, and is another: nobody has had a word with it.
    world.remote.send(&[frame(End(1, 40_001), End(7, 0).mac())]);
    assert_eq!(guest.receive(1).len(), 1);
}

#[test]
fn other_keys_of_a_vm_count_at_once_and_its_connections_stay() {
    let mut world = World::connected("");
    world.hold_1000_bytes();
    let moved = world.dir.join("moved");
    let given = [
        ("budget", "1M"),
        ("rate_limit_to_guest_mbit_s", "500"),
        ("socket", moved.to_str().unwrap()),
        ("mtu", "9000"),
    ];
    let plan = world.host.change(set("guest", &given));
    assert!(plan.steps[0].contains("mtu 1500 -> 9000 (told when its VMM connects)"), "{plan:?}");
    let vm = world.host.port("guest").vm.unwrap();
    assert_eq!((vm.budget_bytes, vm.rate_limit_to_guest_mbit_s), (1 << 20, Some(500)));
    assert!(moved.exists() && !world.dir.join("guest").exists());
    assert_eq!(world.flow().held_bytes, 1000);
    world.guest_sends(6, 1001, &[]);
    world.remote_sends(1001, 6, b"more");
    assert_eq!(world.at_guest().payload, b"more");
    // An empty value is the default, and what is the same is no step.
    world.host.change(set("guest", &[("rate_limit_to_guest_mbit_s", ""), ("mtu", "")]));
    assert_eq!(world.host.port("guest").vm.unwrap().rate_limit_to_guest_mbit_s, None);
    assert!(world.host.change(set("guest", &[("mtu", "1500")])).steps.is_empty());
    let (what, fix) = world.host.refuses(set("guest", &[("mtu", "7")]));
    assert_eq!(what, "mtu=7: vm.guest.mtu: 7 is outside 68..=65535");
    assert!(fix.ends_with("nothing was changed"), "{fix}");
    let (what, _) = world.host.refuses(set("guest", &[("name", "other")]));
    assert_eq!(what, "a VM keeps its name");
    let (what, _) =
        world.host.refuses(set("guest", &[("socket", world.dir.join("remote").to_str().unwrap())]));
    assert!(what.contains("is already used by vm.remote"), "{what}");
    drop(world.guest);
    world.host.until("guest", |port| !port.link);
    let _guest = Guest::boot(&moved, PLAIN);
    world.host.until("guest", |port| port.link);
}

#[test]
fn a_reload_changes_the_filter_of_the_log_whose_lines_have_priorities_for_the_journal() {
    let dir = Dir::new();
    let vm = dir.vm("a", "");
    let config = dir.configure("metrics = \"off\"\nlog = \"error\"", &vm);
    let path = dir.join("log");
    let log = std::fs::File::create(&path).unwrap();
    let at = log.metadata().unwrap();
    let stream = format!("{}:{}", at.dev(), at.ino());
    let mut command = command(&config);
    let host = Host::start_unheard(&dir, command.env("JOURNAL_STREAM", stream).stderr(log));
    let guest = Guest::boot(&dir.join("a"), PLAIN);
    host.until("a", |port| port.link);
    drop(guest);
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "", "no error");
    dir.configure("metrics = \"off\"\nlog = \"warn,nightporterd::vhost=debug\"", &vm);
    let plan = host.change(Change::Reload {});
    assert_eq!(plan.steps, ["~ daemon: log \"error\" -> \"warn,nightporterd::vhost=debug\""]);
    let _guest = Guest::boot(&dir.join("a"), PLAIN);
    host.until("a", |port| port.link);
    let begun = Instant::now();
    let priorities = loop {
        let text = std::fs::read_to_string(&path).unwrap();
        let priorities: BTreeSet<_> = text.lines().map(|line| line[..3].to_owned()).collect();
        if priorities.len() >= 2 {
            break priorities;
        }
        assert!(begun.elapsed() < LIMIT, "{text}");
    };
    assert_eq!(priorities, BTreeSet::from(["<4>".into(), "<7>".into()]));
}

#[test]
fn a_reload_does_what_the_file_says_and_leaves_what_commands_added() {
    let dir = Dir::new();
    let config = dir.configure("metrics = \"off\"", &(dir.vm("a", "") + &dir.vm("b", "")));
    let host = Host::start(&dir, &config);
    host.change(add(&dir, "c", &[]));
    host.change(set("a", &[("mtu", "9000")]));
    let offload = Request::Offload { vm: "b".into(), on: false };
    assert_eq!(host.ask(&offload), Reply::Done {});

    let (what, _) = with_file(&host, &config, "[daemon]\nbudget = 1\n");
    assert!(what.contains("np.toml:2: daemon.budget: unknown key"), "{what}");

    dir.configure("metrics = \"off\"\ndrain_timeout_s = 1", &(dir.vm("b", "") + &dir.vm("d", "")));
    let dry = Request::Change { change: Change::Reload {}, dry_run: true };
    let Reply::Plan(plan) = host.ask(&dry) else { panic!("no plan") };
    assert!(!plan.done);
    assert_eq!(
        plan.steps[..3],
        [
            "- vm a: its connections end",
            "~ vm b: ack_offload false -> true",
            "~ daemon: drain_timeout_s 10 -> 1",
        ]
    );
    assert!(plan.steps[3].starts_with("+ vm d: socket "), "{plan:?}");
    assert_eq!(host.names(), ["a", "b", "c"], "nothing was done");
    host.signal(Signal::SIGHUP);
    let start = std::time::Instant::now();
    while host.names() != ["d", "b", "c"] {
        assert!(start.elapsed() < LIMIT, "{:?}", host.names());
    }
    assert!(host.port("b").vm.unwrap().offload);
    assert!(host.change(Change::Reload {}).steps.is_empty());
}

#[test]
fn a_vm_is_written_as_it_was_added_and_a_reload_reads_it_in_a_file_of_its_own() {
    let dir = Dir::new();
    let config = dir.configure("metrics = \"off\"", &dir.vm("a", ""));
    let host = Host::start(&dir, &config);
    let added = add(&dir, "b", &[("ips", "192.0.2.3,2001:db8::3"), ("isolated", "true")]);
    let Reply::Plan(plan) = host.ask(&Request::Change { change: added, dry_run: true }) else {
        panic!("no plan")
    };
    let section = plan.section.unwrap();
    assert!(section.starts_with("[[vm]]\nname = \"b\"\n"), "{section}");
    assert!(section.contains("ips = [\"192.0.2.3\", \"2001:db8::3\"]\n"), "{section}");
    // The directory comes later than the daemon.
    std::fs::create_dir(dir.join("conf.d")).unwrap();
    std::fs::write(dir.join("conf.d/b.toml"), section).unwrap();
    assert!(host.change(Change::Reload {}).done);
    assert_eq!(host.names(), ["a", "b"]);
    assert_eq!(host.port("b").keys.get("isolated").map(String::as_str), Some("true"));
    // It is in a file now, so there is nothing to write.
    let plan =
        host.change(add(&dir, "b", &[("ips", "192.0.2.3,2001:db8::3"), ("isolated", "true")]));
    assert!(plan.steps.is_empty() && plan.section.is_none(), "{plan:?}");
    // The file may have it otherwise meanwhile, or no more.
    let asks = |mtu: &str| {
        let keys = [("ips", "192.0.2.3,2001:db8::3"), ("isolated", "true"), ("mtu", mtu)];
        host.ask(&Request::Change { change: add(&dir, "b", &keys), dry_run: true })
    };
    let Reply::Plan(plan) = asks("1500") else { panic!("no plan") };
    assert_eq!(plan.section, None, "the file agrees");
    host.change(set("b", &[("mtu", "9000")]));
    let Reply::Error { what, fix } = asks("9000") else { panic!("an error") };
    assert_eq!(what, "VM b is in a configuration file, with other keys");
    assert!(fix.starts_with("change it in the file"), "{fix}");
    std::fs::remove_file(dir.join("conf.d/b.toml")).unwrap();
    let Reply::Plan(plan) = asks("9000") else { panic!("no plan") };
    assert!(plan.section.is_some_and(|it| it.contains("mtu = 9000")), "it can be saved again");
    assert!(host.change(Change::Reload {}).done);
    assert_eq!(host.names(), ["a"]);
}

#[test]
fn a_reload_does_what_can_be_done_and_names_what_waits_for_a_restart() {
    let dir = Dir::new();
    let config = dir.configure("metrics = \"off\"", &dir.vm("a", ""));
    let host = Host::start(&dir, &config);
    dir.configure(
        "metrics = \"off\"\ncpu = 0",
        &(dir.vm("a", "network = \"red\"") + &dir.vm("b", "")),
    );
    let waits = ["vm.a.network none -> red", "daemon.cpu none -> 0"];
    let dry = Request::Change { change: Change::Reload {}, dry_run: true };
    let Reply::Plan(plan) = host.ask(&dry) else { panic!("no plan") };
    assert!(!plan.done && plan.needs_restart == waits, "{plan:?}");
    assert_eq!(host.names(), ["a"]);
    let plan = host.change(Change::Reload {});
    assert!(plan.done && plan.needs_restart == waits, "{plan:?}");
    assert!(matches!(&plan.steps[..], [step] if step.starts_with("+ vm b")), "{plan:?}");
    assert_eq!(host.names(), ["a", "b"]);
    let plan = host.change(Change::Reload {});
    assert!(plan.done && plan.steps.is_empty() && plan.needs_restart == waits, "they still wait");
    let (what, fix) = host.refuses(set("a", &[("network", "red")]));
    assert_eq!(what, "needs a restart: vm.a.network none -> red");
    assert!(fix.ends_with("nothing was changed"), "{fix}");
}

#[test]
fn a_vm_whose_ack_offload_is_off_for_now_keeps_nobody_from_changes() {
    let dir = Dir::new();
    let config = dir.configure("metrics = \"off\"", &dir.vm("a", "congestion_offload = true"));
    let host = Host::start(&dir, &config);
    assert_eq!(host.ask(&Request::Offload { vm: "a".into(), on: false }), Reply::Done {});
    host.change(add(&dir, "b", &[]));
    host.change(set("a", &[("budget", "8M")]));
    let vm = host.port("a").vm.unwrap();
    assert!(!vm.offload && vm.congestion_offload);
    host.change(Change::Reload {});
    assert!(host.port("a").vm.unwrap().offload);
}

#[test]
fn all_of_a_change_is_done_or_nothing() {
    let dir = Dir::new();
    let config = dir.configure("metrics = \"off\"", &dir.vm("a", ""));
    let host = Host::start(&dir, &config);
    std::fs::write(dir.join("taken"), "precious").unwrap();
    dir.configure("metrics = \"off\"", &(dir.vm("b", "") + &dir.vm("taken", "")));
    let (what, fix) = host.refuses(Change::Reload {});
    assert!(what.starts_with("vm taken: ") && what.contains("is not a socket"), "{what}");
    assert!(fix.ends_with("nothing was changed"), "{fix}");
    assert_eq!(host.names(), ["a"]);
    assert!(!dir.join("b").exists(), "what was opened for it is gone");
    // A tebibyte: no machine of ours has that.
    let huge: String = (0..16).map(|n| dir.vm(&format!("h{n}"), "").replace("4M", "63G")).collect();
    dir.configure("metrics = \"off\"", &(dir.vm("a", "") + &huge));
    let (what, _) = host.refuses(Change::Reload {});
    assert!(what.starts_with("there is no room for an arena of "), "{what}");
    assert_eq!(host.names(), ["a"]);
    // The path of who goes is free for who comes.
    let moved = dir.vm("z", "").replace("/z\"", "/a\"");
    dir.configure("metrics = \"off\"", &moved);
    host.change(Change::Reload {});
    let _guest = Guest::boot(&dir.join("a"), PLAIN);
    host.until("z", |port| port.link);
}

#[test]
fn a_hundred_vms_come_and_go_and_two_others_lose_no_frame() {
    let dir = Dir::new();
    let others: String = (0..100).map(|n| dir.vm(&format!("o{n}"), "")).collect();
    let config =
        dir.configure("metrics = \"off\"", &(dir.vm("a", "") + &dir.vm("b", "") + &others));
    let text = std::fs::read_to_string(&config).unwrap();
    std::fs::write(&config, text.replace("\"4M\"", "\"1M\"\nflows_max = 64")).unwrap();
    let host = Host::start(&dir, &config);
    let (mut a, mut b) = (Guest::boot(&dir.join("a"), EVENTS), Guest::boot(&dir.join("b"), EVENTS));
    b.offer(128);
    a.offer(8);
    b.send(&[frame(B, A.mac())]);
    a.receive(1);
    let (mut sent, mut got) = (0, 0);
    for n in 0..50 {
        let name = format!("late{n}");
        let mut stream = BufReader::new(host.connect());
        for change in [add(&dir, &name, &[("budget", "2M")]), remove(&format!("o{n}"))] {
            let request = Request::Change { change, dry_run: false };
            let line = [serde_json::to_vec(&request).unwrap(), b"\n".to_vec()].concat();
            stream.get_mut().write_all(&line).unwrap();
            // Others work while the daemon changes.
            a.send(&vec![frame(A, B.mac()); 64]);
            sent += 64;
            while got < sent {
                let some = b.receive(1).len();
                b.offer(some as u64);
                got += some;
            }
            let mut reply = String::new();
            stream.read_line(&mut reply).unwrap();
            assert!(reply.contains("\"done\":true"), "{reply}");
        }
    }
    let b_port = host.port("b");
    assert_eq!((b_port.frames_to_port, got), (sent as u64, sent));
    assert!(b_port.drops.is_empty(), "{b_port:?}");
    assert_eq!(host.names().len(), 102);
}

#[test]
fn a_vm_that_cannot_be_listened_at_where_another_was_is_named_in_the_log_and_tried_again() {
    let dir = Dir::new();
    std::fs::create_dir(dir.join("sub")).unwrap();
    let config = dir.configure(
        "metrics = \"off\"",
        &dir.vm("sub/b", "").replace("name = \"sub/b", "name = \"b"),
    );
    let log = std::fs::File::create(dir.join("log")).unwrap();
    let host = Host::start_with_log(&dir, &config, log.into());
    std::fs::remove_dir_all(dir.join("sub")).unwrap();
    let other = std::fs::read_to_string(&config).unwrap().replace("name = \"b\"", "name = \"c\"");
    std::fs::write(&config, other).unwrap();
    assert!(host.change(Change::Reload {}).done);
    assert!(!host.port("c").vm.unwrap().listens);
    std::fs::create_dir(dir.join("sub")).unwrap();
    host.until("c", |c| c.vm.as_ref().is_some_and(|vm| vm.listens));
    host.signal(Signal::SIGTERM);
    assert_eq!(host.wait(), Some(0));
    let log = std::fs::read_to_string(dir.join("log")).unwrap();
    assert!(log.contains("the port has no socket yet, and tries again"), "{log}");
}

#[test]
fn mtus_that_become_uneven_are_told_at_a_change_and_once() {
    let dir = Dir::new();
    let both =
        |of_a: &str| dir.configure("metrics = \"off\"", &(dir.vm("a", of_a) + &dir.vm("b", "")));
    let config = both("");
    let log = std::fs::File::create(dir.join("log")).unwrap();
    let host = Host::start_with_log(&dir, &config, log.into());
    both("mtu = 9000");
    assert!(host.change(Change::Reload {}).done);
    assert!(host.change(set("b", &[("isolated", "false"), ("flows_max", "100")])).done);
    host.signal(Signal::SIGTERM);
    assert_eq!(host.wait(), Some(0));
    let log = std::fs::read_to_string(dir.join("log")).unwrap();
    assert_eq!(log.matches("vm.b: has an MTU of 1500, and a of 9000").count(), 1, "{log}");
}

#[test]
#[ignore = "needs root: it makes taps"]
fn an_uplink_comes_and_goes_and_its_interface_with_it() {
    let thread = std::thread::spawn(|| {
        // The namespace is this thread's, and goes with it and the daemon that it starts.
        unshare(CloneFlags::CLONE_NEWNET).unwrap();
        ip("link add br0 up type bridge");
        let dir = Dir::new();
        let daemon =
            |more: &str| dir.configure(&format!("metrics = \"off\"\n{more}"), &dir.vm("a", ""));
        let host = Host::start(&dir, &daemon(""));
        let mut a = Guest::boot(&dir.join("a"), PLAIN);
        let add =
            |given: &[(&str, &str)]| Change::AddUplink { name: "lan".into(), keys: keys(given) };
        let lan = || add(&[("kind", "tap"), ("ifname", "np0"), ("bridge", "br0")]);
        let (what, fix) = host.refuses(lan());
        assert!(what.contains("br0 is not among the bridges"), "{what}");
        assert!(fix.contains("daemon.bridges"), "{fix}");
        daemon("bridges = [\"br0\"]"); // a reload would find nothing to do
        for _ in 0..2 {
            host.change(lan());
            assert!(host.port("lan").link && if_nametoindex("np0").is_ok());
            a.send(&[frame(A, [0xff; 6])]);
            host.until("lan", |port| port.frames_to_port == 1);
            let (what, _) = host.refuses(lan());
            assert!(what.contains("is already used by uplink.lan"), "{what}");
            host.change(Change::RemoveUplink { name: "lan".into() });
            assert_eq!(host.names(), ["a"]);
            let start = std::time::Instant::now();
            while if_nametoindex("np0").is_ok() {
                assert!(start.elapsed() < LIMIT, "the interface stays");
            }
        }
        host.change(lan());
        ip("link set np0 nomaster"); // it is put back
        let start = std::time::Instant::now();
        let shown = || Command::new("ip").args(["link", "show", "np0"]).output().unwrap().stdout;
        while !String::from_utf8(shown()).unwrap().contains("master br0") {
            assert!(start.elapsed() < LIMIT, "it is left out");
        }
        host.change(Change::RemoveUplink { name: "lan".into() });
        // At once: its interface may still be closing.
        for _ in 0..20 {
            host.change(lan());
            host.change(Change::RemoveUplink { name: "lan".into() });
        }
        // An interface with another owner, and one that no bridge keeps from the host.
        ip("tuntap add dev np7 mode tap");
        let (what, fix) =
            host.refuses(add(&[("kind", "tap"), ("ifname", "np7"), ("bridge", "br0")]));
        assert!(what.contains("np7 is there already"), "{what}");
        assert!(fix.starts_with("choose another name"), "{fix}");
        for given in [
            &[("kind", "tap"), ("ifname", "en7"), ("bridge", "br0")][..],
            &[("kind", "tap"), ("ifname", "np0")],
            &[("kind", "tap"), ("ifname", "np7"), ("bridge", "br0"), ("create", "false")],
            &[("kind", "macvtap"), ("ifname", "lo")],
        ] {
            let (what, fix) = host.refuses(add(given));
            assert!(what.contains("a command may"), "{what}");
            assert!(fix.ends_with("nothing was changed"), "{fix}");
        }
    });
    thread.join().unwrap();
}

#[test]
fn a_file_that_is_not_read_holds_up_no_command_and_no_stop() {
    let dir = Dir::new();
    let config = dir.configure("metrics = \"off\"", &dir.vm("a", ""));
    let host = Host::start(&dir, &config);
    // A reader of it blocks until a write, as on a file system that does not answer.
    let kept = dir.join("kept.toml");
    std::fs::rename(&config, &kept).unwrap();
    mkfifo(&config, Mode::S_IRUSR | Mode::S_IWUSR).unwrap();
    let not_read = "the configuration file was not read in 3 s";
    assert_eq!(host.refuses(Change::Reload {}).0, not_read);
    assert!(host.change(add(&dir, "b", &[])).done);
    let asked = Instant::now();
    for _ in 0..10 {
        assert_eq!(host.refuses(Change::Reload {}).0, not_read);
    }
    assert!(asked.elapsed() < LIMIT, "nobody waits for it once more, which would be 30 s");
    // The broker would read it for an uplink, and be given up after 30 s.
    let up = [("kind", "tap"), ("ifname", "npstands"), ("bridge", "npnone"), ("create", "true")];
    let up = Change::AddUplink { name: "up".into(), keys: keys(&up) };
    assert_eq!(host.refuses(up).0, not_read);
    assert!(host.change(add(&dir, "c", &[])).done);
    assert!(!host.status().broker_ended);
    // It is there again: who stood has read it, and nobody wants to know any more.
    let fifo = File::options().write(true).open(&config).unwrap();
    std::fs::rename(&kept, &config).unwrap();
    drop(fifo);
    let start = Instant::now();
    while let Reply::Error { what, .. } =
        host.ask(&Request::Change { change: Change::Reload {}, dry_run: false })
    {
        assert!(what == not_read && start.elapsed() < LIMIT, "{what}");
    }
    assert_eq!(host.names(), ["a", "b", "c"]);
    std::fs::remove_file(&config).unwrap();
    mkfifo(&config, Mode::S_IRUSR | Mode::S_IWUSR).unwrap();
    // The one who is to read it stands again, and nobody waits for that either.
    host.signal(Signal::SIGHUP);
    host.signal(Signal::SIGTERM);
    assert_eq!(host.wait(), Some(0));
}

#[test]
fn an_address_of_two_vms_is_named_in_the_log_and_not_for_ever() {
    let dir = Dir::new();
    let same = "ips = [\"10.0.0.1\"]\ntoe = true";
    let config = dir.configure("metrics = \"off\"", &(dir.vm("a", same) + &dir.vm("b", same)));
    let log = File::create(dir.join("log")).unwrap();
    let host = Host::start_with_log(&dir, &config, log.into());
    let _guests = ["a", "b"].map(|vm| SocketGuest::boot(&dir.join(&format!("{vm}-toe.sock"))));
    let runs = |port: &PortStatus| {
        port.vm.as_ref().is_some_and(|vm| vm.toe.as_ref().is_some_and(|toe| toe.running))
    };
    for vm in ["a", "b"] {
        host.until(vm, runs);
    }
    let start = Instant::now();
    for n in 0..120 {
        let isolated = if n % 2 == 0 { "true" } else { "false" };
        host.change(set("b", &[("isolated", isolated)]));
    }
    let seconds = usize::try_from(start.elapsed().as_secs()).unwrap();
    host.signal(Signal::SIGTERM);
    assert_eq!(host.wait(), Some(0));
    let log = std::fs::read_to_string(dir.join("log")).unwrap();
    let lines = log.lines().filter(|line| line.contains("another VM has this address")).count();
    assert!((1..=52 + seconds).contains(&lines), "{lines}");
}
