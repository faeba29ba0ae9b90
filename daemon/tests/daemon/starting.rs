//! Messages to an operator when the daemon does not start.

use std::collections::BTreeMap;
use std::io::Read;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixStream};
use std::time::{Duration, Instant};

use nightporter_api::Change;
use nightporterd::vhost::features::bit;
use nix::sys::signal::Signal;

use crate::guest::{Guest, PLAIN};
use crate::host::{Dir, Host, LIMIT, NOBODY, command, run};

/// Of one VM with 4 MiB of store, and 16,384 connections. Its page tables reach 2 TiB at most.
const MEMORY: &str = ", at most 143M of memory, and 2M for each GiB of guests' memory (worst case \
                      with hostile VMMs: 4105M, and all of guests' memory, because vm.memory_max \
                      is not set)\n";

/// Its last output.
fn refusal(config: &std::path::Path) -> String {
    let output = run(&["--config", config.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1));
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn check_says_what_it_found_and_starts_nothing() {
    let dir = Dir::new();
    let config = dir.configure("", &dir.vm("a", ""));
    let output = run(&["--config", config.to_str().unwrap(), "--check"]);
    assert_eq!(output.status.code(), Some(0));
    let said = String::from_utf8(output.stdout).unwrap();
    assert_eq!(said, format!("{}: 0 uplinks, 1 VM, 4M of store{MEMORY}", config.display()));
    assert!(!dir.join("a").exists() && !dir.join("arena").exists());

    let config = dir.configure("", &dir.vm("a", "memory_max = \"2G\""));
    let output = run(&["--config", config.to_str().unwrap(), "--check"]);
    let said = String::from_utf8(output.stdout).unwrap();
    let most = "(worst case with hostile VMMs: 17M, and 2G of guests' memory)\n";
    assert!(said.ends_with(most), "{said}");

    let config = dir.configure("", &dir.vm("a", "mtu = 1"));
    let output = run(&["--config", config.to_str().unwrap(), "--check"]);
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("np.toml:9: vm.a.mtu: 1 is outside 68..=65535\n    fix: "), "{said}");
}

#[test]
fn check_says_what_this_host_lacks() {
    let dir = Dir::new();
    let lan = "[[uplink]]\nname = \"lan\"\nkind = \"tap\"\nifname = \"npnone0\"\n";
    let daemon = "socket_group = \"no-such-group\"\ncpu = 1000";
    let said = |more: &str| {
        let config = dir.configure(daemon, &format!("{lan}{more}\n{}", dir.vm("a", "")));
        let output = run(&["--config", config.to_str().unwrap(), "--check"]);
        assert_eq!(output.status.code(), Some(1));
        let found = String::from_utf8(output.stdout).unwrap();
        assert!(found.ends_with(&format!("1 uplink, 1 VM, 4M of store{MEMORY}")), "{found}");
        String::from_utf8(output.stderr).unwrap()
    };
    let all = said("bridge = \"npnone1\"");
    for what in [
        "this host: there is no group \"no-such-group\" on this host\n    fix: ",
        "this host: daemon.cpu = 1000: ",
        "this host: uplink.lan: there is no bridge npnone1\n    fix: ip link add npnone1",
    ] {
        assert!(all.contains(what), "{all}");
    }
    let missing = said("create = false");
    assert!(missing.contains("uplink.lan: there is no interface npnone0"), "{missing}");
    assert!(!said("").contains("npnone0"), "it is made");
}

#[test]
fn check_says_that_an_overlays_address_is_of_another_host() {
    let dir = Dir::new();
    let overlay = "[[overlay]]\nname = \"o\"\nvni = 7\nlocal = \"192.0.2.77\"\n\
                   peers = [\"192.0.2.2\"]\n";
    let config = dir.configure("", overlay);
    let output = run(&["--config", config.to_str().unwrap(), "--check"]);
    assert_eq!(output.status.code(), Some(0), "it would start, and wait for the address");
    let (found, said) = (output.stdout, String::from_utf8(output.stderr).unwrap());
    let expected = b"0 uplinks, 1 overlay, 0 VMs, 0 of store, at most 128M of memory\n";
    assert!(found.ends_with(expected), "{found:?}");
    assert!(
        said.contains("overlay.o: cannot use 192.0.2.77: ") && said.contains("fix: "),
        "{said}"
    );
}

#[test]
fn a_guest_that_is_not_told_its_mtu_is_named_in_the_log() {
    let dir = Dir::new();
    let config = dir.configure("metrics = \"off\"", &dir.vm("a", "mtu = 9000"));
    let log = std::fs::File::create(dir.join("log")).unwrap();
    let host = Host::start_with_log(&dir, &config, log.into());
    let warnings = || {
        let log = std::fs::read_to_string(dir.join("log")).unwrap();
        log.lines().filter(|line| line.contains("the guest was not told its MTU")).count()
    };
    drop(Guest::boot(&dir.join("a"), PLAIN | bit::MTU));
    host.until("a", |a| !a.link);
    drop(Guest::boot(&dir.join("a"), PLAIN));
    host.signal(Signal::SIGTERM);
    assert_eq!(host.wait(), Some(0));
    assert_eq!(warnings(), 1, "only who does not know it");
}

#[test]
fn a_guest_without_a_buffer_is_named_in_status_and_log() {
    let dir = Dir::new();
    let config = dir.configure("metrics = \"off\"", &dir.vm("a", ""));
    let log = std::fs::File::create(dir.join("log")).unwrap();
    let host = Host::start_with_log(&dir, &config, log.into());
    let mut guest = Guest::boot(&dir.join("a"), PLAIN);
    let up = host.until("a", |a| a.link).vm.unwrap();
    assert_eq!((up.rings, up.has_no_buffers), (Some([256; 2]), false));
    host.until("a", |a| a.vm.as_ref().is_some_and(|vm| vm.has_no_buffers));
    guest.offer(1);
    assert!(!host.port("a").vm.unwrap().has_no_buffers, "it has one");
    host.signal(Signal::SIGTERM);
    assert_eq!(host.wait(), Some(0));
    let log = std::fs::read_to_string(dir.join("log")).unwrap();
    assert_eq!(log.matches("the VM's memory shared (share=on)?").count(), 1, "{log}");
}

#[test]
fn a_second_vmm_that_tries_all_the_time_is_turned_away_once_a_second() {
    let dir = Dir::new();
    let config = dir.configure("metrics = \"off\"", &dir.vm("a", ""));
    let host = Host::start(&dir, &config);
    let _first = Guest::boot(&dir.join("a"), PLAIN);
    host.until("a", |a| a.link);
    let begun = Instant::now();
    for _ in 0..4 {
        let mut second = UnixStream::connect(dir.join("a")).unwrap();
        second.set_read_timeout(Some(LIMIT)).unwrap();
        assert_eq!(second.read(&mut [0; 20]).unwrap(), 0, "it is turned away");
    }
    assert!(begun.elapsed() >= Duration::from_secs(2), "three of them have waited");
}

#[test]
fn a_missing_file_is_named() {
    let said = refusal(std::path::Path::new("/nowhere/np.toml"));
    assert!(said.starts_with("/nowhere/np.toml:1: cannot read the file: No such file"), "{said}");
}

#[test]
fn a_second_daemon_is_told_that_there_is_a_first() {
    let dir = Dir::new();
    let config = dir.configure("metrics = \"off\"", &dir.vm("a", ""));
    let _first = Host::start(&dir, &config);
    let said = refusal(&config);
    assert!(
        said.contains("/arena is in use by another nightporterd\n    fix: stop that"),
        "{said}"
    );
}

#[test]
fn all_that_is_in_the_way_is_named_at_once() {
    let dir = Dir::new();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let _a = std::os::unix::net::UnixListener::bind(dir.join("a")).unwrap();
    std::fs::write(dir.join("b"), "precious").unwrap();
    let daemon = format!(
        "metrics = \"{}\"\nsocket_group = \"no-such-group\"\ncpu = 1000",
        taken.local_addr().unwrap()
    );
    let group = refusal(&dir.configure(&daemon, &dir.vm("a", "")));
    assert!(group.contains("there is no group \"no-such-group\" on this host"), "{group}");
    let metrics = "metrics: cannot listen on 127.0.0.1:";
    assert!(group.contains(metrics) && group.contains("there are none until then"), "{group}");
    assert!(group.contains("cpu = 1000: "), "{group}");
    assert!(!dir.join("arena").exists(), "the store of a daemon that does not run");
    let sockets =
        refusal(&dir.configure("metrics = \"off\"", &(dir.vm("a", "") + &dir.vm("b", ""))));
    assert!(sockets.contains("vm a: ") && sockets.contains("taken by a running"), "{sockets}");
    assert!(sockets.contains("vm b: ") && sockets.contains("is not a socket"), "{sockets}");
    assert_eq!(std::fs::read_to_string(dir.join("b")).unwrap(), "precious");
}

#[test]
fn metrics_whose_port_is_taken_keep_no_network_down_and_check_names_them() {
    let dir = Dir::new();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let daemon = format!("metrics = \"{}\"", taken.local_addr().unwrap());
    let config = dir.configure(&daemon, &dir.vm("a", ""));
    let check = || {
        let output = run(&["--config", config.to_str().unwrap(), "--check"]);
        assert_eq!(output.status.code(), Some(0), "it would start");
        String::from_utf8(output.stderr).unwrap()
    };
    let said = check();
    assert!(said.contains("this host: metrics: cannot listen on 127.0.0.1:"), "{said}");
    let host = Host::start(&dir, &config);
    let _guest = Guest::boot(&dir.join("a"), PLAIN);
    host.until("a", |a| a.link);
    host.signal(Signal::SIGTERM);
    assert_eq!(host.wait(), Some(0));
    drop(taken);
    let _host = Host::start(&dir, &config);
    assert_eq!(check(), "", "a nightporterd has it, whose successor this one would be");
}

#[test]
fn check_names_a_directory_that_the_start_would_make() {
    let dir = Dir::new();
    let vm = dir.vm("mistyped/a", "").replace("name = \"mistyped/a\"", "name = \"a\"");
    let config = dir.configure("metrics = \"off\"", &vm);
    let output = run(&["--config", config.to_str().unwrap(), "--check"]);
    assert_eq!(output.status.code(), Some(0));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("this host: vm.a.socket: there is no directory "), "{said}");
    assert!(
        said.contains("/mistyped, and the start makes it\n    fix: correct the path"),
        "{said}"
    );
    assert!(!dir.join("mistyped").exists());
}

#[test]
fn check_finds_budgets_beyond_memory_and_an_interface_that_is_no_tap() {
    let dir = Dir::new();
    let lan = "[[uplink]]\nname = \"lan\"\nkind = \"tap\"\nifname = \"lo\"\n";
    let large: String =
        (0..16).map(|n| dir.vm(&format!("v{n}"), "").replace("4M", "60G")).collect();
    let config = dir.configure("metrics = \"off\"", &(lan.to_owned() + &large));
    let output = run(&["--config", config.to_str().unwrap(), "--check"]);
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8(output.stderr).unwrap();
    for what in [
        "this host: the budgets of all VMs are 960G, and this host's memory has ",
        "this host: uplink.lan: lo is there, and is no tap\n    fix: give the uplink a name",
    ] {
        assert!(said.contains(what), "{said}");
    }
}

#[test]
fn a_wrong_group_and_a_wrong_path_keep_no_other_vm_away() {
    let dir = Dir::new();
    let vms = [
        dir.vm("a", "socket_group = \"no-such-group\""),
        dir.vm("b", ""),
        dir.vm("nowhere/deep/c", "").replace("name = \"nowhere/deep/c\"", "name = \"c\""),
    ];
    let config = dir.configure("metrics = \"off\"", &vms.concat());
    let host = Host::start(&dir, &config);
    assert_eq!(host.names(), ["a", "b", "c"]);
    let _guest = Guest::boot(&dir.join("b"), PLAIN);
    host.until("b", |b| b.link);
    // Nobody else's until the group is known.
    assert_eq!(std::fs::metadata(dir.join("a")).unwrap().mode() & 0o777, 0o600);
    // Nor do they keep others from changing.
    dir.configure("metrics = \"off\"", &(vms.concat() + &dir.vm("d", "")));
    host.change(Change::Reload {});
    assert!(dir.join("d").exists());
    let e = dir.vm("e", "socket_group = \"no-such-group\"");
    dir.configure("metrics = \"off\"", &(vms.concat() + &dir.vm("d", "") + &e));
    let (what, _) = host.refuses(Change::Reload {});
    assert!(what.contains("vm e: no VM had that socket_user"), "{what}");
    dir.configure("metrics = \"off\"", &(vms[1].clone() + &dir.vm("d", "")));
    host.change(Change::Reload {});
    assert_eq!(host.names(), ["b", "d"]);
}

#[test]
fn one_socket_path_that_is_taken_keeps_no_other_vm_away_and_is_opened_when_it_is_free() {
    let dir = Dir::new();
    let taken = std::os::unix::net::UnixListener::bind(dir.join("a")).unwrap();
    let config = dir.configure("metrics = \"off\"", &(dir.vm("a", "") + &dir.vm("b", "")));
    let host = Host::start(&dir, &config);
    let names: Vec<_> = host.status().ports.into_iter().map(|port| port.name).collect();
    assert_eq!(names, ["a", "b"]);
    let listens = |name: &str| host.port(name).vm.unwrap().listens;
    assert!(!listens("a") && listens("b"));
    drop(taken);
    host.until("a", |port| port.vm.as_ref().is_some_and(|vm| vm.listens));
    let _guest = Guest::boot(&dir.join("a"), PLAIN);
    host.until("a", |port| port.link);
}

#[test]
fn systemd_hears_that_the_daemon_is_ready_lives_and_stops() {
    let dir = Dir::new();
    let path = dir.join("notify");
    hears(&dir, UnixDatagram::bind(&path).unwrap(), path.to_str().unwrap());
}

#[test]
fn a_manager_whose_socket_has_no_file_hears_it_too() {
    let name = format!("np-starting-{}", std::process::id());
    let at = SocketAddr::from_abstract_name(&name).unwrap();
    hears(&Dir::new(), UnixDatagram::bind_addr(&at).unwrap(), &format!("@{name}"));
}

fn hears(dir: &Dir, systemd: UnixDatagram, address: &str) {
    let config = dir.configure("metrics = \"off\"\ndrain_timeout_s = 60", &dir.vm("a", ""));
    systemd.set_read_timeout(Some(LIMIT)).unwrap();
    let mut command = command(&config);
    command.env("NOTIFY_SOCKET", address).env("WATCHDOG_USEC", "30000");
    let host = Host::start_as(dir, &mut command);
    let until = |what: &str| {
        let mut said = [0; 60];
        while systemd.recv(&mut said).map(|n| &said[..n]).unwrap() != what.as_bytes() {}
    };
    until("READY=1");
    until("WATCHDOG=1");
    until("WATCHDOG=1");
    host.signal(Signal::SIGTERM);
    until("STOPPING=1\nEXTEND_TIMEOUT_USEC=70000000"); // TimeoutStopSec= may be less
    assert_eq!(host.wait(), Some(0));
}

#[test]
fn the_worker_alone_is_placed_on_its_core() {
    let dir = Dir::new();
    let config = dir.configure("metrics = \"off\"\ncpu = 0", &dir.vm("a", ""));
    let host = Host::start(&dir, &config);
    let pid = host.status().pid;
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let cores = |task: std::io::Result<std::fs::DirEntry>| {
        let task = task.unwrap();
        let read = |what: &str| std::fs::read_to_string(task.path().join(what)).unwrap();
        let cores = read("status").lines().find_map(|line| {
            line.strip_prefix("Cpus_allowed_list:").map(|list| list.trim().to_owned())
        });
        (read("comm").trim().to_owned(), cores.unwrap())
    };
    let all: BTreeMap<_, _> = tasks.map(cores).collect();
    assert_eq!(all["nightporterd"], "0");
    assert!(all.contains_key("control") && all.contains_key("watchdog"), "{all:?}");
    let ours = std::thread::available_parallelism().unwrap().get();
    let others = all.iter().filter(|(name, _)| *name != "nightporterd");
    assert!(ours == 1 || others.clone().all(|(_, cores)| cores != "0"), "{all:?}");
}

#[test]
fn the_command_line_wins_over_the_file() {
    let dir = Dir::new();
    let config = dir.configure("metrics = \"off\"", &dir.vm("a", ""));
    let output = run(&["--config", config.to_str().unwrap(), "--set", "cpu=x", "--check"]);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.starts_with("--set cpu=x: daemon.cpu: is a string, not a number"), "{said}");
}

#[test]
#[ignore = "needs root: it gives sockets away"]
fn each_vms_sockets_are_whose_it_says() {
    let dir = Dir::new();
    let ports = [
        dir.vm("a", ""),
        dir.vm("b", "socket_user = \"nobody\""),
        dir.vm("c", "socket_group = \"daemon\"\ntoe = true\nips = [\"10.0.0.1\"]"),
    ];
    let daemon = "metrics = \"off\"\nsocket_group = \"root\"";
    let host = Host::start(&dir, &dir.configure(daemon, &ports.concat()));
    let is = |socket: &str| {
        let found = std::fs::metadata(dir.join(socket)).unwrap();
        (found.uid(), found.gid(), found.mode() & 0o777)
    };
    assert_eq!((is("a"), is("b")), ((0, 0, 0o660), (NOBODY, 0, 0o660)));
    assert_eq!((is("c"), is("c-toe.sock")), ((0, 1, 0o660), (0, 1, 0o660)), "Debian's daemon");
    // One that comes may be whose another is, and nobody's who was not known.
    let add = |name: &str, user: &str| {
        let socket = dir.join(name).display().to_string();
        let keys = [("socket", socket), ("budget", "4M".into()), ("socket_user", user.into())];
        let keys = keys.map(|(key, value): (&str, String)| (key.to_owned(), value)).into();
        Change::AddVm { name: name.into(), keys }
    };
    host.change(add("d", "nobody"));
    assert_eq!(is("d"), (NOBODY, 0, 0o660));
    let (what, fix) = host.refuses(add("e", "bin"));
    assert!(what.contains("no VM had that socket_user") && fix.contains("restart"), "{what} {fix}");
    // It is another's when it is made anew.
    let set = |keys: &[(&str, &str)]| {
        let keys = keys.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        Change::SetVm { name: "d".into(), keys: keys.collect() }
    };
    let (what, _) = host.refuses(set(&[("socket_user", "")]));
    assert!(what.contains("needs a restart: vm.d.socket_user"), "{what}");
    let moved = dir.join("moved").display().to_string();
    host.change(set(&[("socket_user", ""), ("socket", &moved)]));
    assert_eq!(is("moved"), (0, 0, 0o660));
}

#[test]
fn two_hundred_and_fifty_six_vms_start_with_the_default_of_connections() {
    let dir = Dir::new();
    let vms: String = (0..256).map(|n| dir.vm(&format!("v{n}"), "")).collect();
    let config = dir.configure("metrics = \"off\"", &vms.replace("\"4M\"", "\"1M\""));
    let host = Host::start(&dir, &config);
    let ports = host.status().ports;
    assert_eq!(
        ports.iter().filter(|port| port.vm.as_ref().is_some_and(|vm| vm.listens)).count(),
        256
    );
    let _guest = Guest::boot(&dir.join("v255"), PLAIN);
    host.until("v255", |port| port.link);
}
