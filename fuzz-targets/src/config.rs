//! Configurations of any text, and of any values for any keys: each is refused with a helpful
//! message, or meets every condition on which the rest of the daemon relies.

use std::collections::{BTreeMap, BTreeSet};

use arbitrary::{Arbitrary, Unstructured};
use nightporterd::config::reader::Place;
use nightporterd::config::{Config, Problems, VmConfig};

/// Most lines of one message: the mistake, and the fix.
const MESSAGE_LINES: usize = 2;
/// Most bytes of one message, file name and all: it is read on a terminal.
const MESSAGE_BYTES_MAX: usize = 1500;

/// Judges one input: the text as it is, then a configuration made of it.
pub fn run(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    judge(&text, &BTreeMap::new());
    if let Ok((text, overrides)) = generated(&mut Unstructured::new(data)) {
        judge(&text, &overrides);
    }
}

/// The example, a configuration with every key, and one without any that is not needed.
#[must_use]
pub fn seeds() -> Vec<Vec<u8>> {
    let every_key = "[daemon]\ncontrol = \"/run/c\"\nmetrics = \"[::1]:9469\"\narena = \"/run/a\"\n\
        metrics_allow_remote = false\nsocket_user = \"kvm\"\nsocket_group = \"kvm\"\n\
        status_group = \"adm\"\n\
        busy_poll_us = 50\ncpu = 3\nrt_priority = 1\nplain_after_ms = 100\n\
        log = \"info,nightporterd::vhost=debug\"\n\
        drain_timeout_s = 0\n[[uplink]]\nname = \"lan\"\nkind = \"tap\"\nifname = \"np0\"\n\
        create = true\nbridge = \"br0\"\n[[uplink]]\nname = \"wan\"\nkind = \"macvtap\"\n\
        ifname = \"mv0\"\n[[vm]]\nname = \"web1\"\nsocket = \"/run/w\"\nmtu = 9000\n\
        mac = \"52:54:00:12:34:56\"\nips = [\"192.0.2.7\", \"2001:db8::7\"]\nqueue_pairs = 8\n\
        ack_offload = false\nbudget = \"64G\"\nflows_max = 16\n";
    let example = include_str!("../../examples/nightporter.toml");
    let texts =
        [example, every_key, "[[vm]]\nname = \"a\"\n", "vm = [1, {name = 2}]\n\"\\u0007\" ="];
    texts.map(|t| t.as_bytes().to_vec()).into()
}

fn judge(text: &str, overrides: &BTreeMap<String, String>) {
    match Config::parse("f.toml", text, overrides) {
        Ok(config) => is_consistent(&config),
        Err(problems) => is_clear(&problems, text),
    }
}

/// An operator can find the place, and reads the mistake and its fix.
fn is_clear(problems: &Problems, text: &str) {
    assert!(!problems.list.is_empty(), "refused without a reason");
    let lines = text.matches('\n').count() + 1;
    for problem in &problems.list {
        if let Place::Line(line) = problem.place {
            assert!((1..=lines).contains(&line), "line {line} of {lines}");
        }
        assert!(!problem.what.trim().is_empty() && !problem.fix.trim().is_empty(), "{problem:?}");
        let alone = Problems { file: problems.file.clone(), list: vec![problem.clone()] };
        let message = alone.to_string();
        assert!(message.lines().count() == MESSAGE_LINES, "more than one mistake: {message}");
        assert!(message.len() <= MESSAGE_BYTES_MAX, "{} bytes: {message:.200}", message.len());
        let control = message.chars().find(|c| c.is_control() && *c != '\n');
        assert!(control.is_none(), "{control:?} on the operator's terminal");
    }
}

fn is_consistent(config: &Config) {
    let unique = |values: Vec<String>, what: &str| {
        let count = values.len();
        assert_eq!(BTreeSet::from_iter(values).len(), count, "two ports share a {what}");
    };
    let vms = || config.vms.iter();
    let uplinks = || config.uplinks.iter();
    unique(
        vms().map(|v| v.name.clone()).chain(uplinks().map(|u| u.name.clone())).collect(),
        "name",
    );
    let mac = |vm: &VmConfig| vm.mac.map(|mac| format!("{mac:?} {:?}", vm.network));
    unique(vms().filter_map(mac).collect(), "MAC in a network");
    unique(uplinks().map(|u| u.ifname.clone()).collect(), "interface");
    let control = config.daemon.control.display().to_string();
    unique(vms().map(|v| v.socket.display().to_string()).chain([control]).collect(), "socket");
    for vm in vms() {
        assert!((68..=65535).contains(&vm.mtu) && (1..=8).contains(&vm.queue_pairs));
        assert!(
            (1 << 20..=64 << 30).contains(&vm.budget) && (16..=1 << 20).contains(&vm.flows_max)
        );
        assert!(vm.socket.is_absolute() && vm.socket.as_os_str().len() <= 107);
        assert!(vm.mac.is_none_or(|mac| mac[0] & 1 == 0 && mac != [0; 6]));
        assert!(vm.ips.as_ref().is_none_or(|ips| !ips.is_empty()));
    }
    assert!(uplinks().all(|u| (1..=15).contains(&u.ifname.len())));
    assert!(config.daemon.busy_poll_us <= 1_000_000 && config.daemon.rt_priority <= 99);
    assert!(config.flows_sum() <= nightporter_core::limits::FLOWS_MAX);
    assert!(!config.summary().is_empty() && config.budget_sum() > 0 || config.vms.is_empty());
}

/// A configuration of known keys, mostly, with values that are mostly of the right kind.
fn generated(u: &mut Unstructured<'_>) -> arbitrary::Result<(String, BTreeMap<String, String>)> {
    let keys = Config::known_keys();
    let mut text = String::new();
    for _ in 0..u.int_in_range(1..=6)? {
        let section = *u.choose(&["daemon", "uplink", "vm", "vm", "network"])?;
        let open = if section == "daemon" { "[daemon]" } else { &format!("[[{section}]]") };
        text += &format!("{open}\n");
        if section != "daemon" && u.ratio(9, 10)? {
            text += &format!("name = \"p{}\"\n", u.int_in_range(0..=9)?);
        }
        for _ in 0..u.int_in_range(0..=6)? {
            let key = match u.choose(&keys)?.split_once('.') {
                Some((of, key)) if of == section => key.to_owned(),
                _ if u.ratio(19, 20)? => continue,
                _ => format!("{:?}", word(u)?),
            };
            text += &format!("{key} = {}\n", value(u, &key)?);
        }
    }
    let mut overrides = BTreeMap::new();
    while !u.is_empty() && u.ratio(1, 4)? {
        let key = u.choose(&keys)?.rsplit('.').next().unwrap_or_default().to_owned();
        let value = value(u, &key)?;
        overrides.insert(key, value);
    }
    Ok((text, overrides))
}

fn value(u: &mut Unstructured<'_>, key: &str) -> arbitrary::Result<String> {
    let usual: &[&str] = match key {
        "mac" => &["\"52:54:00:12:34:56\"", "\"52:54:00:12:34:57\"", "\"+2:+4:+0:12:34:56\""],
        "ips" => &["[\"192.0.2.7\"]", "[\"2001:db8::7\", \"192.0.2.8\"]", "[]", "[\"::\"]"],
        "budget" => &["\"64M\"", "1048576", "\"18446744073709551615G\"", "\"1 GiB\"", "0x100000"],
        "kind" => &["\"tap\"", "\"macvtap\""],
        "ifname" | "bridge" => &["\"np0\"", "\"br0\"", "\"..\"", "\"abcdefghijklmnop\""],
        "metrics" => &["\"off\"", "\"127.0.0.1:1\"", "\"0.0.0.0:1\"", "\"[::1]:65536\""],
        "log" => &["\"info\"", "\"a=b=c\"", "\"nightporterd::vhost=debug\"", "\"[{x=1}]=trace\""],
        "control" | "arena" | "socket" => &["\"/run/a\"", "\"a\"", "\"/run/p1.sock\""],
        _ => &["true", "0", "1", "16", "1500", "65536", "1048576", "-1", "+7", "0o17", "1e400"],
    };
    Ok(match u.int_in_range(0..=9)? {
        0..=6 => (*u.choose(usual)?).to_owned(),
        7 => u64::arbitrary(u)?.to_string(),
        8 => format!("{:?}", word(u)?),
        _ => (*u.choose(&[
            "[[1], {a = 2}]",
            "1979-05-27",
            "nan",
            "{}",
            "'''\nx\n'''",
            "\"\\u0000\"",
        ])?)
        .to_owned(),
    })
}

fn word(u: &mut Unstructured<'_>) -> arbitrary::Result<String> {
    let bytes = u.int_in_range(0..=40)?;
    (0..bytes).map(|_| u.arbitrary::<char>()).collect()
}
