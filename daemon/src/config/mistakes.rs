//! Mistakes in a configuration file, as operators make them: each is named with its line and a fix.

use std::collections::BTreeMap;

use super::Config;

/// The first problem of a file.
fn first(text: &str) -> String {
    let found = Config::parse("np.toml", text, &BTreeMap::new()).expect_err(text).to_string();
    let lines: Vec<_> = found.lines().take(2).collect();
    assert!(lines.len() == 2 && lines[1].starts_with("    fix: "), "{text}: {found}");
    lines.join("\n")
}

/// Of each: the file's text, the begin of what is said, and a part of the fix.
#[track_caller]
fn all(mistakes: &[(&str, &str, &str)], in_front: &str) {
    for (text, what, fix) in mistakes {
        let said = first(&format!("{in_front}{text}\n"));
        assert!(said.starts_with(&format!("np.toml:{what}")), "{text}: {said}");
        assert!(said.contains(fix), "{text}: {said}");
    }
}

#[test]
fn mistakes_of_toml_and_of_sections() {
    let mistakes = [
        ("", "1: there is neither an [[uplink]] nor a [[vm]]", "add at least one [[vm]]"),
        ("[[vm]\nname = \"a\"", "1: not valid TOML", "see https://toml.io"),
        ("[[vm]]\nname = a", "2: not valid TOML: string values must be quoted", "toml.io"),
        ("[[vm]]\nname = \"a\"\nname = \"b\"", "3: not valid TOML: duplicate key", "toml.io"),
        ("[[vm]]\nname = \"a\u{0}\"", "2: not valid TOML", "toml.io"),
        ("[vm]\nname = \"a\"", "1: vm: is a table, not a list of tables", "[[vm]]"),
        ("[[vms]]\nname = \"a\"", "1: vms: unknown section", "did you mean `vm`?"),
        ("[[vm]]\nmtu = 1500", "1: vm.name: is missing", "give it a name"),
        ("[[vm]]\nname = \"\"", "2: vm.name: \"\" is not a name", "1 to 32 letters"),
        ("[[vm]]\nname = \"a/b\"", "2: vm.name: \"a/b\" is not a name", "1 to 32 letters"),
        ("[[vm]]\nname = 7", "2: vm.name: is an integer, not a string", "as in \"web1\""),
    ];
    all(&mistakes, "");
}

#[test]
fn mistakes_of_vms() {
    let mistakes = [
        ("mtus = 1500", "3: vm.a.mtus: unknown key", "did you mean `mtu`?"),
        ("mtu = \"big\"", "3: vm.a.mtu: is a string, not a number", "use 1500"),
        ("mtu = 1500.0", "3: vm.a.mtu: is a float, not a number", "use 1500"),
        ("mtu = -1", "3: vm.a.mtu: -1 is outside 68..=65535", "use 1500"),
        ("mac = \"01:00:5e:00:00:01\"", "3: vm.a.mac: \"01:00:5e:00:00:01\" is a group", "unicast"),
        ("mac = \"00:00:00:00:00:00\"", "3: vm.a.mac: is all zeroes", "unicast"),
        ("ips = [\"192.0.2.1/24\"]", "3: vm.a.ips: \"192.0.2.1/24\" is not an IP", "write a list"),
        ("ips = [\"224.0.0.1\"]", "3: vm.a.ips: 224.0.0.1 is not the address of a host", "a list"),
        ("ips = [\"127.0.0.1\"]", "3: vm.a.ips: 127.0.0.1 is not the address of a host", "a list"),
        ("ips = [\"::\"]", "3: vm.a.ips: :: is not the address of a host", "a list"),
        ("vlan = 4095", "3: vm.a.vlan: 4095 is outside 1..=4094", "one VLAN"),
        ("vlan = 5\ntrunk = [6]", "4: vm.a.trunk: does not go with vlan", "use vlan for a guest"),
        ("budget = \"0\"", "3: vm.a.budget: \"0\" is outside 1M to 64G", "as in \"64M\""),
        ("budget = \"64X\"", "3: vm.a.budget: \"64X\" is not a size", "as in \"64M\""),
        ("flows_max = 0", "3: vm.a.flows_max: 0 is outside 16..=1048576", "16384"),
        ("socket = \"a.sock\"", "3: vm.a.socket: \"a.sock\" is not an absolute path", "absolute"),
        ("tap = \"sixteen-bytes-ab\"", "3: vm.a.tap: \"sixteen-bytes-ab\" is not", "vnet0"),
        ("tap = \"t*0\"", "3: vm.a.tap: \"t*0\" has a * before its end", "vnet0"),
        ("tap = \"t*\"", "3: vm.a.tap: needs mac", "the whole name"),
        ("tap = \"t0\"\nvlan = 5", "4: vm.a.vlan: does not go with tap", "leave it out"),
        ("toe = true", "3: vm.a.toe: needs ips", "list the guest's addresses"),
        ("ack_offload = \"yes\"", "3: vm.a.ack_offload: is a string", "= true or false"),
        ("isolated = 1", "3: vm.a.isolated: is an integer", "= true or false"),
        ("queue_pairs = 9", "3: vm.a.queue_pairs: 9 is outside 1..=8", "use 1 unless"),
        ("boost = \"very\"", "3: vm.a.boost: \"very\" is not a budget", "15ms/90ms"),
        ("congestion_control = \"vegas\"", "3: vm.a.congestion_control: \"vegas\"", "cubic"),
        ("rate_limit_to_guest_mbit_s = 0", "3: vm.a.rate_limit_to_guest_mbit_s: 0", "no limit"),
        ("network = \"\"", "3: vm.a.network: \"\" is not a name", "leave it out"),
        ("[[vm]]\nname = \"a\"", "3: vm.a.name: \"a\" is already used by vm.a", "its own"),
    ];
    all(&mistakes, "[[vm]]\nname = \"a\"\n");
}

#[test]
fn mistakes_of_uplinks_and_overlays() {
    let vm = "[[vm]]\nname = \"a\"\n";
    let uplink = format!("{vm}[[uplink]]\nname = \"lan\"\n");
    let mistakes = [
        ("kind = \"bridge\"\nifname = \"b\"", "5: uplink.lan.kind: \"bridge\" is not", "\"tap\""),
        ("kind = \"tap\"", "3: uplink.lan.ifname: is missing", "as in \"np0\""),
        ("kind = \"tap\"\nifname = \"n/0\"", "6: uplink.lan.ifname: \"n/0\" is not", "15 bytes"),
        (
            "kind = \"macvtap\"\nifname = \"m0\"\ncreate = true",
            "7: uplink.lan.create: does not apply to a macvtap",
            "remove it",
        ),
    ];
    all(&mistakes, &uplink);
    let overlay = format!("{vm}[[overlay]]\nname = \"o\"\n");
    let local = "local = \"192.0.2.1\"";
    let mistakes = [
        (format!("vni = 0\n{local}\npeers = [\"192.0.2.2\"]"), "5: overlay.o.vni: 0 is outside"),
        (format!("vni = 7\n{local}\npeers = []"), "7: overlay.o.peers: has 0 hosts"),
        (format!("vni = 7\n{local}\npeers = [\"192.0.2.1\"]"), "7: overlay.o.peers: 192.0.2.1 is"),
        (format!("vni = 7\n{local}\npeers = [\"2001:db8::1\"]"), "7: overlay.o.peers: [2001:db8"),
        ("vni = 7\npeers = [\"192.0.2.2\"]".into(), "3: overlay.o.local: is missing"),
    ];
    let mistakes: Vec<_> = mistakes.iter().map(|(text, what)| (&**text, *what, "")).collect();
    all(&mistakes, &overlay);
}

#[test]
fn mistakes_of_the_daemon() {
    let mistakes = [
        ("metric = \"off\"", "2: daemon.metric: unknown key", "did you mean `metrics`?"),
        ("metrics = \"0.0.0.0:9469\"", "2: daemon.metrics: 0.0.0.0:9469 is not", "metrics_allow"),
        ("metrics = \"127.0.0.1\"", "2: daemon.metrics: \"127.0.0.1\" is not ADDRESS:PORT", "off"),
        ("cpu = \"2-3\"", "2: daemon.cpu: is a string, not a number", "one core"),
        ("cpu = 4096", "2: daemon.cpu: 4096 is outside 0..=1023", "one core"),
        ("rt_priority = 100", "2: daemon.rt_priority: 100 is outside 0..=99", "use 0"),
        ("log = \"inof\"", "2: daemon.log: \"inof\" is not a level", "use error, warn"),
        ("arena = \"arena\"", "2: daemon.arena: \"arena\" is not an absolute path", "tmpfs"),
        ("drain_timeout_s = -1", "2: daemon.drain_timeout_s: -1 is outside", "give seconds"),
        ("plain_after_ms = 1", "2: daemon.plain_after_ms: 1 is outside", "milliseconds"),
        ("taps = \"vnet*\"", "2: daemon.taps: \"vnet*\" is not a list", "[\"vnet*\"]"),
        ("taps = [\"*net0\"]", "2: daemon.taps: \"*net0\" has a * before its end", "[\"vnet*\"]"),
        ("status_group = \"\"", "2: daemon.status_group: \"\" is not", "name of a group"),
        ("[toe]\nlisten = \"x\"", "2: toe.port: needs an [[overlay]]", "add the overlay"),
        ("[registry]\nendpoints = []", "2: registry.etcd: is missing", "client URLs"),
        ("[[station]]\nmac = \"52:54:00:00:00:01\"", "2: station.host: is missing", "overlay"),
    ];
    all(&mistakes, "[daemon]\n");
}
