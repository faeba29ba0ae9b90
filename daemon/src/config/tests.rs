//! Every message an operator can get out of a configuration file.

use std::collections::BTreeMap;

use super::*;

fn parse(text: &str) -> Result<Config, Problems> {
    Config::parse("np.toml", text, &BTreeMap::new())
}

/// The messages for `text`, one per line pair.
fn errors(text: &str) -> String {
    parse(text).expect_err("the configuration is wrong").to_string()
}

const GOOD: &str = r#"
[[uplink]]
name = "lan"
kind = "tap"
ifname = "np0"

[[vm]]
name = "web1"
"#;

#[test]
fn the_shortest_useful_file_gets_the_documented_defaults() {
    let c = parse(GOOD).unwrap();
    assert_eq!(c.daemon.control, Path::new("/run/nightporter/control.sock"));
    assert_eq!(c.daemon.metrics, Some("127.0.0.1:9469".parse().unwrap()));
    assert_eq!(c.daemon.arena, Path::new("/run/nightporter/arena"));
    assert_eq!((c.daemon.busy_poll_us, c.daemon.cpu, c.daemon.rt_priority), (0, None, 0));
    assert_eq!((c.daemon.log.as_str(), c.daemon.drain_timeout_s), ("info", 10));
    assert_eq!(c.daemon.plain_after_ms, 100);
    assert_eq!((c.uplinks[0].kind, c.uplinks[0].create), (UplinkKind::Tap, true));
    let vm = &c.vms[0];
    assert_eq!(vm.socket, Path::new("/run/nightporter/web1.sock"));
    assert_eq!((vm.mtu, vm.queue_pairs, vm.ack_offload), (1500, 1, true));
    assert_eq!((vm.local, vm.guest_ttl), (Local::Auto, None));
    assert_eq!((vm.congestion_offload, vm.congestion_control), (false, Algorithm::Cubic));
    let limits = (vm.rate_limit_from_guest_mbit_s, vm.rate_limit_to_guest_mbit_s);
    assert_eq!(limits, (None, None));
    assert!(!vm.allow_unsealed_memory && vm.memory_max.is_none());
    assert_eq!((vm.budget, vm.flows_max), (64 << 20, 16384));
    assert_eq!((vm.mac, &vm.ips), (None, &None));
}

#[test]
fn what_is_known_of_paths_is_memory() {
    let flooding = parse(&format!("{GOOD}congestion_offload = true\n")).unwrap();
    let more = flooding.memory_max() - parse(GOOD).unwrap().memory_max();
    assert_eq!(more, 16_384 * SENDER_MEMORY_BYTES as u64, "whole MiB");
}

#[test]
fn what_comes_by_ucx_and_is_not_taken_is_memory() {
    let memory = |vms: u8, fabric| {
        let mut text = "[[overlay]]\nname = \"over\"\nvni = 7\nlocal = \"192.0.2.1\"\n\
                        peers = [\"192.0.2.2\"]\n[toe]\n"
            .to_owned();
        for n in 1..=vms {
            text += &format!("[[vm]]\nname = \"a{n}\"\nips = [\"10.0.0.{n}\"]\ntoe = true\n");
        }
        let mut config = parse(&text).unwrap();
        // Set here, because a daemon that is built without UCX refuses it.
        config.toe.as_mut().unwrap().fabric = fabric;
        config.memory_max()
    };
    for (vms, mib) in [(0, 0), (1, 24), (2, 48), (8, 192), (16, 256), (40, 256)] {
        let more = memory(vms, FabricKind::Ucx) - memory(vms, FabricKind::Tcp);
        assert_eq!(more, mib << 20, "{vms} VMs");
    }
}

#[test]
fn what_tls_takes_for_streams_is_memory() {
    let overlay = "[[overlay]]\nname = \"over\"\nvni = 7\nlocal = \"192.0.2.1\"\n\
                   peers = [\"192.0.2.2\"]\n";
    let files = "ca = \"/a\"\ncertificate = \"/c\"\nkey = \"/k\"\n";
    let memory = |toe: &str| parse(&format!("{GOOD}\n{overlay}[toe]\n{toe}")).unwrap().memory_max();
    let sealed = memory(&format!("{files}encrypt = true\n"));
    assert_eq!(sealed - memory(""), (3 << 30) + (352 << 20));
}

#[test]
fn every_key_is_read() {
    let c = parse(
        r#"
        [daemon]
        control = "/c"
        metrics = "0.0.0.0:1"
        metrics_allow_remote = true
        arena = "/dev/shm/a"
        socket_user = "qemu"
        socket_group = "kvm"
        busy_poll_us = 200
        cpu = 3
        rt_priority = 40
        plain_after_ms = 30
        log = "info,nightporterd::vhost=debug"
        drain_timeout_s = 2
        [[uplink]]
        name = "a"
        network = "red"
        kind = "tap"
        ifname = "np0"
        create = false
        bridge = "br0"
        [[vm]]
        name = "b"
        socket = "/s"
        socket_user = "tenant"
        socket_group = "vms"
        mac = "52:54:00:12:34:56"
        ips = ["192.0.2.7", "2001:db8::7"]
        trunk = [10, 20]
        isolated = true
        trusted = true
        mtu = 9000
        queue_pairs = 2
        allow_unsealed_memory = true
        memory_max = "4G"
        ack_offload = false
        local = "never"
        guest_ttl = 200
        congestion_offload = false
        congestion_control = "reno"
        rate_limit_from_guest_mbit_s = 100
        rate_limit_to_guest_mbit_s = 1
        budget = "1G"
        flows_max = 1_000
        "#,
    )
    .unwrap();
    let d = &c.daemon;
    assert_eq!((d.busy_poll_us, d.cpu, d.rt_priority, d.drain_timeout_s), (200, Some(3), 40, 2));
    assert_eq!(d.plain_after_ms, 30);
    assert_eq!(d.metrics, Some("0.0.0.0:1".parse().unwrap()));
    assert_eq!((d.socket_user.as_deref(), d.socket_group.as_deref()), (Some("qemu"), Some("kvm")));
    assert_eq!((c.uplinks[0].create, c.uplinks[0].bridge.as_deref()), (false, Some("br0")));
    assert_eq!((c.uplinks[0].network.as_deref(), &c.vms[0].network), (Some("red"), &None));
    let vm = &c.vms[0];
    assert_eq!(vm.mac, Some([0x52, 0x54, 0, 0x12, 0x34, 0x56]));
    assert_eq!(vm.ips.as_ref().unwrap().len(), 2);
    assert_eq!((vm.mtu, vm.queue_pairs, vm.ack_offload), (9000, 2, false));
    assert_eq!((vm.local, vm.guest_ttl), (Local::Never, Some(200)));
    assert_eq!((vm.congestion_offload, vm.congestion_control), (false, Algorithm::Reno));
    let limits = (vm.rate_limit_from_guest_mbit_s, vm.rate_limit_to_guest_mbit_s);
    assert_eq!(limits, (Some(100), Some(1)));
    assert!(vm.allow_unsealed_memory && vm.isolated && vm.trusted);
    assert_eq!(vm.memory_max, Some(4 << 30));
    assert_eq!(vm.socket_user.as_deref().zip(vm.socket_group.as_deref()), Some(("tenant", "vms")));
    assert_eq!((vm.vlan, vm.trunk.as_deref()), (None, Some(&[10, 20][..])));
    assert_eq!((vm.budget, vm.flows_max), (1 << 30, 1000));
    assert_eq!(c.budget_sum(), 1 << 30);
}

#[test]
fn a_socket_device_needs_addresses_and_a_socket_of_its_own() {
    let vm = "[[vm]]\nname = \"a\"\nsocket = \"/run/x/first\"\ntoe = true\n";
    let with_ips = format!("{vm}ips = [\"10.0.0.1\"]\n");
    let config = Config::parse("np.toml", &with_ips, &BTreeMap::new()).unwrap();
    assert_eq!(config.vms[0].toe_socket(), Some("/run/x/a-toe.sock".into()));
    assert!(errors(vm).contains("vm.a.toe: needs ips"));
    assert!(errors(&format!("{with_ips}trunk = [1]\n")).contains("toe: does not go with trunk"));
    let other = "[[vm]]\nname = \"b\"\nsocket = \"/run/x/a-toe.sock\"\n";
    assert!(errors(&(with_ips + other)).contains("is already used by vm.a"));
    let long = format!("/{}/s", "d".repeat(97));
    let long = vm.replace("/run/x/first", &long) + "ips = [\"10.0.0.1\"]\n";
    assert!(errors(&long).contains("longer than a socket's path"));
}

#[test]
fn a_misspelt_key_names_its_line_and_the_right_spelling() {
    assert_eq!(
        errors("[daemon]\nlog = \"info\"\ncontol = \"/x\"\n[[vm]]\nname = \"a\"\n"),
        "np.toml:3: daemon.contol: unknown key\n    fix: did you mean `control`?"
    );
    assert_eq!(
        errors("[[vm]]\nname = \"a\"\ncolour = 1\n"),
        "np.toml:3: vm.a.colour: unknown key\n    fix: remove it, or use one of: name, network, \
         socket, tap, socket_user, socket_group, mac, ips, vlan, trunk, isolated, trusted, mtu, \
         queue_pairs, allow_unsealed_memory, memory_max, ack_offload, local, guest_ttl, \
         congestion_offload, accept_offload, accept_from, congestion_control, toe, \
         toe_to_itself, boost, vcpu_cgroup, \
         rate_limit_from_guest_mbit_s, rate_limit_to_guest_mbit_s, budget, flows_max"
    );
    assert_eq!(
        errors("[[vms]]\nname = \"a\"\n[[vm]]\nname = \"a\"\n"),
        "np.toml:1: vms: unknown section\n    fix: did you mean `vm`?"
    );
}

#[test]
fn all_mistakes_are_reported_at_once_in_file_order() {
    let text = r#"
[daemon]
metrics = "192.0.2.1:80"
rt_priority = 100
[[uplink]]
name = "lan"
kind = "bridge"
[[vm]]
name = "web 1"
mac = "01:00:00:00:00:00"
mtu = 70000
budget = "64MB/s"
ips = []
socket = "relative"
ack_offload = "yes"
"#;
    let lines: Vec<_> = errors(text).lines().map(str::to_string).collect();
    let messages: Vec<_> = lines.iter().step_by(2).map(String::as_str).collect();
    assert_eq!(
        messages,
        [
            "np.toml:3: daemon.metrics: 192.0.2.1:80 is not a loopback address",
            "np.toml:4: daemon.rt_priority: 100 is outside 0..=99",
            "np.toml:5: uplink.lan.ifname: is missing",
            "np.toml:7: uplink.lan.kind: \"bridge\" is not a kind of uplink",
            "np.toml:9: vm.name: \"web 1\" is not a name",
            "np.toml:10: vm.mac: \"01:00:00:00:00:00\" is a group address",
            "np.toml:11: vm.mtu: 70000 is outside 68..=65535",
            "np.toml:12: vm.budget: \"64MB/s\" is not a size",
            "np.toml:13: vm.ips: is empty, which would block every packet of the guest",
            "np.toml:14: vm.socket: \"relative\" is not an absolute path",
            "np.toml:15: vm.ack_offload: is a string, not true or false",
        ]
    );
    assert!(lines.iter().skip(1).step_by(2).all(|l| l.starts_with("    fix: ")));
}

#[test]
fn two_ports_may_not_share_a_name_a_socket_or_a_mac() {
    let text = r#"[[uplink]]
name = "a"
kind = "tap"
ifname = "np0"
[[vm]]
name = "a"
socket = "/s"
mac = "52:54:00:00:00:01"
[[vm]]
name = "c"
socket = "/s"
mac = "52-54-00-00-00-01"
"#;
    assert_eq!(
        errors(text),
        "np.toml:5: vm.a.name: \"a\" is already used by uplink.a\n    fix: give each its own\n\
         np.toml:9: vm.c.mac: \"52:54:00:00:00:01\" is already used by vm.a\n    \
         fix: give each its own\n\
         np.toml:9: vm.c.socket: \"/s\" is already used by vm.a\n    fix: give each its own"
    );
}

#[test]
fn a_vm_with_a_tap_has_no_keys_of_the_switch_and_a_tap_is_of_one_vm() {
    let vm = |name: &str, more: &str| format!("[[vm]]\nname = \"{name}\"\ntap = \"t0\"\n{more}");
    let twice = errors(&(vm("a", "") + &vm("b", "")));
    assert!(twice.contains("vm.b.tap: \"t0\" is already used by vm.a"), "{twice}");
    for key in ["isolated = true", "ips = [\"192.0.2.7\"]", "vlan = 7", "congestion_offload = true"]
    {
        let name = key.split(' ').next().unwrap();
        let said = errors(&vm("a", key));
        assert!(said.contains(&format!("vm.a.{name}: does not go with tap")), "{said}");
    }
}

#[test]
fn two_uplinks_into_one_bridge_are_refused_and_so_are_vlan_and_trunk_together() {
    let uplink = |name: &str, ifname: &str| {
        let keys = "kind = \"tap\"\nbridge = \"br0\"\n";
        format!("[[uplink]]\nname = \"{name}\"\nifname = \"{ifname}\"\n{keys}")
    };
    assert_eq!(
        errors(&(uplink("a", "np0") + &uplink("b", "np1"))),
        "np.toml:6: uplink.b.bridge: \"br0\" is already used by uplink.a\n    \
         fix: keep one of them: two uplinks into one bridge make a loop"
    );
    assert_eq!(
        errors("[[vm]]\nname = \"a\"\nvlan = 7\ntrunk = [8]\n"),
        "np.toml:4: vm.a.trunk: does not go with vlan\n    \
         fix: use vlan for a guest that sees no tags, or trunk for one that does"
    );
    for (vlans, wrong) in [
        ("vlan = 0", "vlan: 0 is outside 1..=4094"),
        ("trunk = [4095]", "trunk: 4095 is outside 1..=4094"),
        ("trunk = []", "trunk: is empty: the guest would reach nobody"),
        ("trunk = \"7,x\"", "trunk: x is not a VLAN"),
    ] {
        let said = errors(&format!("[[vm]]\nname = \"a\"\n{vlans}\n"));
        assert!(said.starts_with(&format!("np.toml:3: vm.a.{wrong}\n")), "{said}");
    }
}

#[test]
fn a_vm_may_not_sit_on_the_control_socket() {
    assert_eq!(
        errors("[daemon]\ncontrol = \"/s\"\n[[vm]]\nname = \"a\"\nsocket = \"/s\"\n"),
        "np.toml:3: vm.a.socket: \"/s\" is already used by daemon.control\n    \
         fix: give each its own"
    );
}

#[test]
fn a_configuration_is_read_back_from_its_text() {
    let all = "[[vm]]\nname = \"x\"\nsocket = \"/run/nightporter/default.sock\"\n\
               network = \"n\"\nmac = \"52:54:00:00:00:01\"\nips = [\"10.0.0.1\"]\nvlan = 7\n\
               isolated = true\ntrusted = true\nmtu = 9000\nqueue_pairs = 2\n\
               allow_unsealed_memory = true\nmemory_max = \"3G\"\ncongestion_offload = true\n\
               congestion_control = \"reno\"\ntoe = true\ntoe_to_itself = true\n\
               rate_limit_from_guest_mbit_s = 5\nrate_limit_to_guest_mbit_s = 6\n\
               boost = \"15ms/90ms\"\nvcpu_cgroup = \"a/vcpu0\"\n\
               local = \"always\"\nguest_ttl = 200\n\
               flows_max = 32\nsocket_user = \"u\"\nsocket_group = \"g\"\n";
    let config = parse(&format!("[daemon]\n[[vm]]\nname = \"plain\"\n{all}")).unwrap();
    assert_eq!(parse(&config.to_text()).unwrap(), config);
}

#[test]
fn a_vm_that_comes_fits_with_those_that_are_there_as_in_a_file() {
    let mac = "mac = \"52:54:00:00:00:01\"";
    let vm = |keys: &str| format!("[[vm]]\n{keys}\n");
    for (there, comes, fits) in [
        ("", "", true),
        ("", "name = \"a\"", false),
        ("socket = \"/s\"", "socket = \"/s\"", false),
        ("socket = \"/b-toe.sock\"", "socket = \"/s\"\ntoe = true\nips = [\"10.0.0.1\"]", false),
        (mac, mac, false),
        (mac, &format!("network = \"n\"\n{mac}"), true),
        ("tap = \"t0\"", "tap = \"t0\"", false),
        ("tap = \"t0\"", "tap = \"t1\"", true),
        (&format!("{mac}\ntap = \"t*\""), "tap = \"t1\"", true),
    ] {
        let name = if comes.starts_with("name") { "" } else { "name = \"b\"\n" };
        let [there, comes] =
            [format!("name = \"a\"\n{there}"), format!("{name}{comes}")].map(|it| vm(&it));
        assert_eq!(parse(&(there.clone() + &comes)).is_ok(), fits, "{there}{comes}");
        let mut running = parse(&there).unwrap();
        running.vms.extend(parse(&comes).unwrap().vms);
        assert_eq!(running.check().is_ok(), fits, "{there}{comes}");
    }
    let mut running = parse(&vm("name = \"a\"\nbudget = \"64G\"")).unwrap();
    let of = |n: usize| VmConfig { name: format!("a{n}"), ..running.vms[0].clone() };
    let more: Vec<_> = (0..16).map(of).collect();
    running.vms.extend(more);
    let why = running.check().unwrap_err().to_string();
    assert!(why.contains("all vm.budget together are 1088G"), "{why}");
    running.vms.truncate(1);
    running.check().unwrap();
    running.daemon.control = running.vms[0].socket.clone();
    assert!(running.check().is_err(), "a VM may not sit on the control socket");
}

#[test]
fn a_boost_has_cpu_time_and_a_window() {
    let vm = |boost: &str| format!("[[vm]]\nname = \"a\"\nboost = \"{boost}\"\n");
    let boost = parse(&vm("15ms/90ms")).unwrap().vms[0].boost.unwrap();
    assert_eq!((boost.cpu_us, boost.window_us), (15_000, 90_000));
    for (wrong, why) in [
        ("15", "is not a budget"),
        ("15ms", "is not a budget"),
        ("15/90", "is not a budget"),
        ("0ms/90ms", "between 1 and half of the window"),
        ("46ms/90ms", "between 1 and half of the window"),
        ("1ms/9ms", "outside 10..=1000"),
        ("1ms/1001ms", "outside 10..=1000"),
    ] {
        assert!(errors(&vm(wrong)).contains(why), "{wrong}: {}", errors(&vm(wrong)));
    }
    let cgroup = "[[vm]]\nname = \"a\"\nvcpu_cgroup = \"../a\"\n";
    assert!(errors(cgroup).contains("is not a cgroup"));
}

#[test]
fn congestion_offload_is_for_connections_with_ack_offload() {
    let vm = |more: &str| format!("[[vm]]\nname = \"a\"\n{more}\ncongestion_offload = true\n");
    assert!(parse(&vm("")).unwrap().vms[0].congestion_offload);
    // A running VM may have the one without the other: a command turned it off.
    let mut running = parse(&vm("")).unwrap();
    running.vms[0].ack_offload = false;
    running.check().unwrap();
    let set = BTreeMap::from([("mtu".into(), "9000".into())]);
    assert_eq!(running.vms[0].with(&set).unwrap().mtu, 9000);
    assert_eq!(
        errors(&vm("ack_offload = false")),
        "np.toml:4: vm.a.congestion_offload: needs ack_offload = true\n    \
         fix: turn both on, or congestion_offload off"
    );
    assert_eq!(
        errors(&vm("congestion_control = \"bbr\"")),
        "np.toml:3: vm.a.congestion_control: \"bbr\" is not a congestion control\n    \
         fix: write \"cubic\" or \"reno\""
    );
}

#[test]
fn wrong_shapes_are_named_for_what_they_are() {
    assert!(errors("vm = 3\n").starts_with("np.toml:1: vm: is an integer, not a list of tables"));
    assert!(errors("[vm]\nname = \"a\"\n").contains("write it as [[vm]]"));
    assert!(errors("daemon = []\n").contains("write it as [daemon]"));
    assert!(errors("").contains("neither an [[uplink]] nor a [[vm]]"));
    assert!(parse("[daemon]\n").is_ok(), "its VMs come by commands");
    let syntax = errors("[daemon]\nlog = \"info\n[[vm]]\n");
    assert!(syntax.starts_with("np.toml:2: not valid TOML"), "{syntax}");
}

#[test]
fn a_macvtap_cannot_be_made_or_bridged() {
    let text = "[[uplink]]\nname = \"a\"\nkind = \"macvtap\"\nifname = \"m0\"\nbridge = \"br0\"\n";
    assert!(errors(text).starts_with("np.toml:5: uplink.a.bridge: does not apply to a macvtap"));
}

#[test]
fn the_command_line_overrides_the_daemon_section() {
    let set = |k: &str, v: &str| {
        let overrides = BTreeMap::from([(k.to_string(), v.to_string())]);
        Config::parse("np.toml", GOOD, &overrides)
    };
    assert_eq!(set("cpu", "2").unwrap().daemon.cpu, Some(2));
    assert_eq!(set("log", "debug").unwrap().daemon.log, "debug");
    assert_eq!(
        set("cpu", "two").unwrap_err().to_string(),
        "--set cpu=two: daemon.cpu: is a string, not a number\n    \
         fix: give the number of one core, or leave it out"
    );
    assert_eq!(
        set("cpus", "2").unwrap_err().to_string(),
        "--set cpus=2: daemon.cpus: unknown key\n    fix: did you mean `cpu`?"
    );
}

#[test]
fn sizes_read_and_print_in_powers_of_1024() {
    let budget =
        |b: &str| parse(&format!("[[vm]]\nname = \"a\"\nbudget = {b}\n")).map(|c| c.vms[0].budget);
    assert_eq!(budget("1048576").unwrap(), 1 << 20);
    assert_eq!(budget("\"2048 KiB\"").unwrap(), 2 << 20);
    let outside = budget("\"1K\"").unwrap_err().to_string();
    assert!(outside.contains("\"1K\" is outside 1M to 64G"), "{outside}");
    assert!(budget("\"99999999999999999999G\"").is_err());
    assert_eq!(reader::human_bytes(1536 << 10), "1536K");
}

#[test]
fn the_example_file_is_valid() {
    parse(include_str!("../../../examples/nightporter.toml")).unwrap();
}

#[test]
fn every_key_is_in_the_document() {
    let doc = include_str!("../../../docs/configuration.md");
    for key in Config::known_keys() {
        let (section, key) = key.split_once('.').unwrap();
        let chapter = doc
            .split("\n## ")
            .find(|c| c.lines().next().is_some_and(|h| h.contains(section)))
            .unwrap_or_else(|| panic!("no chapter for {section}"));
        assert!(chapter.contains(&format!("### `{key}`")), "{section}.{key} is not documented");
    }
}

#[test]
fn a_sign_is_no_hex_digit_of_a_mac() {
    let errors = errors("[[vm]]\nname = \"a\"\nmac = \"+2:+4:+0:12:34:56\"\n");
    assert!(errors.contains("\"+2:+4:+0:12:34:56\" is not a MAC address"), "{errors}");
}

#[test]
fn a_value_with_control_characters_stays_one_line_of_the_operators_terminal() {
    let text = "[[vm]]\nname = \"a\\u001b[2J\\nb\"\n\"x\\ty\" = 1\n";
    let errors = errors(text);
    assert!(errors.contains(r#""a\u{1b}[2J\nb" is not a name"#), "{errors}");
    assert!(errors.contains(r"vm.x\ty: unknown key"), "{errors}");
    assert_eq!(errors.lines().count(), 4, "two lines for each of two mistakes: {errors}");
}

#[test]
fn a_value_too_long_to_read_is_cut() {
    let errors = errors(&format!("[[vm]]\nname = \"{}\"\n", "n".repeat(100_000)));
    assert!(errors.len() < 500 && errors.contains("nnn..."), "{errors:.600}");
}

fn given(given: &[(&str, &str)]) -> BTreeMap<String, String> {
    given.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect()
}

#[test]
fn a_configuration_that_is_written_down_reads_as_the_same() {
    let examples = [
        include_str!("../../../examples/nightporter.toml"),
        include_str!("../../../examples/overlay-a.toml"),
        include_str!("../../../examples/overlay-b.toml"),
        include_str!("../../../examples/etcd-a.toml"),
        include_str!("../../../examples/etcd-b.toml"),
        include_str!("../../../examples/toe-a.toml"),
        include_str!("../../../examples/toe-b.toml"),
    ];
    for text in examples.into_iter().chain([GOOD, "[[vm]]\nname = \"a\"\n"]) {
        let config = parse(text).unwrap();
        assert_eq!(parse(&config.to_text()).unwrap(), config);
    }
    let strange =
        VmConfig { socket: "/a \"b\"\\\n\u{1b}".into(), ..parse(GOOD).unwrap().vms[0].clone() };
    assert_eq!(strange.with(&BTreeMap::new()).unwrap(), strange);
}

#[test]
fn every_key_is_written_down() {
    let overlay = "vni = 1\nlocal = \"192.0.2.1\"\npeers = [\"192.0.2.2\"]\n";
    let station = "vni = 1\nmac = \"52:54:00:00:00:77\"\nhost = \"192.0.2.2\"\n";
    let tables = format!("[[overlay]]\nname = \"o\"\n{overlay}[[station]]\n{station}");
    let rule = "[[toe_rule]]\nuse = \"native\"\n";
    let attach = "[[attach]]\nbridge = \"virbr0\"\n";
    let config = parse(&format!("{GOOD}\n{tables}{rule}{attach}")).unwrap();
    let toe = parse(&format!("{GOOD}\n[toe]\n{tables}")).unwrap().toe.unwrap().keys();
    let etcd = "[registry]\netcd = [\"http://192.0.2.9:2379\"]\n";
    let registry = parse(&format!("{GOOD}\n{etcd}")).unwrap().registry.unwrap().keys();
    let tables = [
        ("daemon", config.daemon.keys()),
        ("uplink", config.uplinks[0].keys()),
        ("overlay", config.overlays[0].keys()),
        ("registry", registry),
        ("toe", toe),
        ("toe_rule", config.toe_rules[0].keys()),
        ("station", station::keys(&config.stations[0])),
        ("attach", config.attach[0].keys()),
        ("vm", config.vms[0].keys()),
    ];
    let named = tables
        .iter()
        .flat_map(|(table, keys)| keys.iter().map(move |(key, _)| format!("{table}.{key}")));
    let mut named: Vec<_> = named.collect();
    let mut known = Config::known_keys();
    named.sort();
    known.sort();
    assert_eq!(named, known);
}

#[test]
fn a_vm_is_changed_key_by_key_and_an_empty_value_is_the_default() {
    let vm =
        VmConfig::of("web9", &given(&[("mac", "52:54:00:00:00:09"), ("budget", "8M")])).unwrap();
    assert_eq!((vm.budget, vm.mtu, vm.name.as_str()), (8 << 20, 1500, "web9"));
    let more = [("ips", "192.0.2.7, 2001:db8::7"), ("mtu", "9000"), ("mac", "")];
    let other = vm.with(&given(&more)).unwrap();
    assert_eq!((other.mac, other.mtu, other.budget), (None, 9000, 8 << 20));
    assert_eq!(other.ips.as_ref().map(Vec::len), Some(2));
    let differ = keys::differences(&vm.keys(), &other.keys());
    assert_eq!(
        differ,
        [
            ("mac", "\"52:54:00:00:00:09\"".into(), "none".into()),
            ("ips", "none".into(), "[\"192.0.2.7\", \"2001:db8::7\"]".into()),
            ("mtu", "1500".into(), "9000".into()),
        ]
    );
    let wrong = vm.with(&given(&[("mtu", "7"), ("ipz", "1")])).unwrap_err().to_string();
    assert!(wrong.contains("\nipz=1: vm.web9.ipz: unknown key\n"), "{wrong}");
    assert!(wrong.starts_with("mtu=7: vm.web9.mtu: 7 is outside 68..=65535\n"), "{wrong}");
    assert!(UplinkConfig::of("lan", &given(&[])).unwrap_err().to_string().contains("is missing"));
}

#[test]
fn the_store_has_an_end_and_connections_may_be_promised_to_more_than_there_can_be() {
    let vms = |n: usize, more: &str| {
        (0..n).map(|n| format!("[[vm]]\nname = \"a{n}\"\n{more}")).collect::<String>()
    };
    assert_eq!(parse(&vms(256, "")).unwrap().flows_sum(), (1 << 22) - 1);
    let errors = errors(&vms(17, "budget = \"64G\"\n"));
    assert!(errors.contains("all vm.budget together are 1088G, and 1024G is the most"), "{errors}");
}

#[test]
fn a_word_that_is_no_level_would_log_nothing() {
    let log = |log: &str| parse(&format!("[daemon]\nlog = \"{log}\"\n{GOOD}"));
    for good in
        ["warn", "off", "INFO", "info,nightporterd::vhost=debug", "nightporterd=trace, warn"]
    {
        assert!(log(good).is_ok(), "{good}");
    }
    for bad in ["verbose", "info,nightporterd", ""] {
        let said = log(bad).unwrap_err().to_string();
        assert!(said.contains("is not a level"), "{said}");
    }
}
