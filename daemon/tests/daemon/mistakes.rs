//! Mistakes of operators, in commands and about the host: each is named with a fix, and changes
//! nothing.

use std::io::{BufRead, BufReader, Write};
use std::process::Output;

use nightporter_api::Reply;

use crate::host::{Dir, Host, run};

#[test]
fn mistakes_in_commands_change_nothing() {
    let dir = Dir::new();
    let config = dir.configure("metrics = \"off\"", &dir.vm("web1", ""));
    let host = Host::start(&dir, &config);
    let mut stream = BufReader::new(host.connect());
    let mut ask = |request: &str| {
        stream.get_mut().write_all(format!("{{\"cmd\":{request}}}\n").as_bytes()).unwrap();
        let mut line = String::new();
        stream.read_line(&mut line).unwrap();
        match serde_json::from_str(&line).unwrap() {
            Reply::Error { what, fix } => format!("{what}\n    fix: {fix}"),
            other => panic!("{request}: {other:?}"),
        }
    };
    for (request, what, fix) in [
        ("\"flows\",\"vm\":\"web9\"", "there is no VM \"web9\"", "use one of: web1"),
        ("\"flow\",\"id\":99", "there is no flow 99", "nightporter flows lists"),
        ("\"trace\",\"id\":99", "there is no flow 99", "nightporter flows lists"),
        ("\"macs\",\"port\":\"web9\"", "there is no port \"web9\"", "use one of: web1"),
        ("\"capture\",\"port\":\"web9\"", "there is no port \"web9\"", "use one of: web1"),
        ("\"monitor\",\"vm\":\"web9\"", "there is no VM \"web9\"", "use one of: web1"),
        ("\"offload\",\"vm\":\"web9\",\"on\":true", "there is no VM \"web9\"", "web1"),
        ("\"congestion_offload\",\"vm\":\"web9\",\"on\":true", "there is no VM \"web9\"", "web1"),
        (
            "\"rate_limit\",\"vm\":\"web9\",\"direction\":\"to_guest\",\"mbit_s\":1",
            "there is no VM \"web9\"",
            "web1",
        ),
        ("\"drain\",\"vm\":\"web9\"", "there is no VM \"web9\"", "use one of: web1"),
        ("\"dance\"", "not a request: ", "of the daemon's version"),
    ] {
        let said = ask(request);
        assert!(said.starts_with(what) && said.contains(fix), "{request}: {said}");
    }
    let web1 = host.port("web1").keys;
    for (change, name, keys, what, fix) in [
        ("add_vm", "web1", "", "there is a VM web1 already", "vm set web1 KEY=VALUE"),
        ("add_vm", "a/b", "", "name=\"a/b\": vm.name: \"a/b\" is not a name", "32 letters"),
        ("add_vm", "b", "mtu=1", "mtu=1: vm.b.mtu: 1 is outside", "use 1500"),
        ("add_vm", "b", "budget=64X", "budget=64X: vm.b.budget: \"64X\" is not a size", "64M"),
        ("add_vm", "b", "colour=red", "colour=red: vm.b.colour: unknown key", "use one of: name"),
        ("add_vm", "b", "mac=01:00:5e:00:00:01", "mac=01:00:5e:00:00:01: vm.b.mac", "unicast"),
        ("add_vm", "b", "socket=/proc/np/x.sock", "cannot make the directory of", "mkdir -p"),
        ("add_vm", "b", "socket_group=nobodys", "vm b: no VM had that socket_user", "restart"),
        ("add_vm", "b", "tap=vnet0 vlan=5", "vm.b.vlan: does not go with tap", "leave it out"),
        ("set_vm", "web9", "mtu=9000", "there is no VM \"web9\"", "nightporter status lists"),
        ("set_vm", "web1", "name=x", "a VM keeps its name", "remove this one"),
        ("set_vm", "web1", "network=red", "needs a restart: vm.web1.network", "into the file"),
        ("set_vm", "web1", "tap=vnet0", "needs a restart: vm.web1.tap", "into the file"),
        ("remove_vm", "web9", "", "there is no VM \"web9\"", "nightporter status lists"),
        ("add_uplink", "lan", "kind=tap", "uplink.lan.ifname: is missing", "as in \"np0\""),
        ("add_uplink", "lan", "kind=bridge ifname=b", "kind=bridge: uplink.lan.kind", "\"tap\""),
        (
            "add_uplink",
            "web1",
            "kind=tap ifname=np0 bridge=b",
            "vm.web1.name: \"web1\" is already used by uplink",
            "its own",
        ),
        ("remove_uplink", "web1", "", "there is no uplink \"web1\"", "nightporter status lists"),
    ] {
        let keys: Vec<_> = keys.split_whitespace().filter_map(|it| it.split_once('=')).collect();
        let keys = keys.iter().map(|(key, value)| format!("\"{key}\":\"{value}\""));
        let keys = match change.starts_with("remove") {
            true => String::new(),
            false => format!(",\"keys\":{{{}}}", keys.collect::<Vec<_>>().join(",")),
        };
        let change = format!("{{\"what\":\"{change}\",\"name\":\"{name}\"{keys}}}");
        let said = ask(&format!("\"change\",\"change\":{change}"));
        assert!(said.starts_with(what) && said.contains(fix), "{change}: {said}");
    }
    assert_eq!(host.names(), ["web1"]);
    assert_eq!(host.port("web1").keys, web1);
}

#[test]
fn check_finds_mistakes_about_this_host() {
    let dir = Dir::new();
    let check = |daemon: &str, ports: &str| -> Output {
        let config = dir.configure(daemon, ports);
        run(&["--config", config.to_str().unwrap(), "--check"])
    };
    let vm = |more: &str| dir.vm("a", more);
    let of_socket =
        |path: &str| format!("[[vm]]\nname = \"a\"\nsocket = \"{path}\"\nbudget = \"4M\"\n");
    let uplink = |ifname: &str, more: &str| {
        let keys = format!("kind = \"tap\"\nifname = \"{ifname}\"\n{more}\n");
        format!("[[uplink]]\nname = \"lan\"\n{keys}{}", vm(""))
    };
    let off = "metrics = \"off\"";
    for (daemon, ports, fails, what, fix) in [
        (off, vm("tap = \"lo\""), true, "vm.a: lo is there, and is no tap", "type tun"),
        (off, uplink("lo", ""), true, "uplink.lan: lo is there, and is no tap", "np0"),
        (off, uplink("np0", "bridge = \"nobr\""), false, "there is no bridge nobr", "ip link add"),
        (
            off,
            of_socket("/etc/passwd"),
            true,
            "/etc/passwd is there, and is no socket",
            "vm.socket",
        ),
        (off, of_socket("/nowhere/x.sock"), false, "there is no directory /nowhere", "mistyped"),
        (
            off,
            vm("socket_user = \"nobodys\""),
            true,
            "there is no user \"nobodys\"",
            "vm.a.socket_user",
        ),
    ] {
        let output = check(daemon, &ports);
        let said =
            String::from_utf8(output.stdout).unwrap() + &String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.success(), !fails, "{ports}: {said}");
        assert!(said.contains(what) && said.contains(fix), "{ports}: {said}");
    }
    for (daemon, what, fix) in [
        ("socket_group = \"nobodys\"", "there is no group \"nobodys\"", "daemon.socket_group"),
        ("status_group = \"nobodys\"", "there is no group \"nobodys\"", "daemon.status_group"),
        ("cpu = 1000", "daemon.cpu = 1000: ", "that is online"),
    ] {
        let output = check(&format!("{off}\n{daemon}"), &vm(""));
        let said =
            String::from_utf8(output.stdout).unwrap() + &String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{daemon}: {said}");
        assert!(said.contains(what) && said.contains(fix), "{daemon}: {said}");
    }
}
