//! From TOML to [`Config`]: defaults, ranges, and the checks that span sections.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::path::{Path, PathBuf};

use nightporter_api::RATE_LIMIT_MBIT_S_MAX;
use nightporter_core::congestion::Algorithm;
use nightporter_core::limits::{FLOWS_PER_VM, PAGE, VM_BUDGET};
use nightporter_core::port::Local;
use nightporter_registry::STATIONS_MAX;
use toml::de::DeValue;

use crate::limits::PLACES;
use crate::spans;

use super::reader::{
    Document, Problems, Section, boolean, bytes, human_bytes, integer, shown, string,
};
use super::{
    Config, DaemonConfig, RUN_DIR, UplinkConfig, UplinkKind, VmConfig, boost, overlay, registry,
    station, toe, toe_rule,
};

/// `sun_path` is 108 bytes with its terminator (unix(7)).
const SOCKET_PATH_BYTES_MAX: usize = 107;
/// `IFNAMSIZ` is 16 with its terminator (linux/if.h).
const IFNAME_BYTES_MAX: usize = 15;
const NAME_BYTES_MAX: usize = 32;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const STORE_BYTES_MAX: u64 = PLACES.pages as u64 * PAGE as u64;

pub(super) fn config(
    file: &str,
    text: &str,
    overrides: &BTreeMap<String, String>,
) -> Result<Config, Problems> {
    let mut doc = Document::parse(text, overrides);
    // After a syntax error the rest of the tree is guesswork: report that alone.
    let config = if doc.problems.is_empty() { Some(read(&mut doc)) } else { None };
    let mut list = doc.problems;
    match config {
        Some(config) if list.is_empty() => Ok(config),
        _ => {
            list.sort();
            Err(Problems { file: file.into(), list })
        }
    }
}

/// One VM out of `KEY=VALUE`s.
pub(super) fn vm_of(keys: &BTreeMap<String, String>) -> Result<VmConfig, Problems> {
    of("vm", keys, vm)
}

/// One uplink out of `KEY=VALUE`s.
pub(super) fn uplink_of(keys: &BTreeMap<String, String>) -> Result<UplinkConfig, Problems> {
    of("uplink", keys, uplink)
}

fn of<T>(
    kind: &'static str,
    keys: &BTreeMap<String, String>,
    read: impl Fn(Section<'_, '_>, &mut Unique) -> T,
) -> Result<T, Problems> {
    let mut doc = Document::parse("", keys);
    let it = read(doc.given(kind), &mut Unique::default());
    let list = doc.problems;
    if list.is_empty() { Ok(it) } else { Err(Problems { file: String::new(), list }) }
}

pub(super) fn known_keys() -> Vec<String> {
    let overrides = BTreeMap::new();
    let mut doc = Document::parse(
        "[registry]\n[toe]\n[[toe_rule]]\n[[uplink]]\n[[overlay]]\n[[station]]\n[[vm]]\n",
        &overrides,
    );
    read(&mut doc);
    doc.known.into_iter().map(|(section, key)| format!("{section}.{key}")).collect()
}

/// Reads everything; where a value is wrong its default stands in, and the problem is recorded.
fn read(doc: &mut Document<'_>) -> Config {
    let has_daemon = doc.has("daemon");
    let daemon = daemon(doc.section("daemon"));
    let mut unique = Unique::default();
    let control = daemon.control.display().to_string();
    unique.seen.push(("socket", control, "daemon.control".into(), 0..0));
    let registry = doc.table("registry").map(registry::read);
    let mut uplinks = Vec::new();
    for value in doc.tables("uplink") {
        if let Some(section) = doc.open("uplink", value) {
            uplinks.push(uplink(section, &mut unique));
        }
    }
    let mut overlays = Vec::new();
    for value in doc.tables("overlay") {
        if let Some(section) = doc.open("overlay", value) {
            overlays.push(overlay::read(section, registry.is_some(), &mut unique));
        }
    }
    let toe = doc.table("toe").map(|section| toe::read(section, !overlays.is_empty()));
    let mut toe_rules = Vec::new();
    for value in doc.tables("toe_rule") {
        if let Some(section) = doc.open("toe_rule", value) {
            toe_rules.push(toe_rule::read(section));
        }
    }
    if toe_rules.len() > toe_rule::RULES_MAX {
        let (what, fix) = (format!("is there {} times", toe_rules.len()), toe_rule::RULES_MAX);
        doc.problem(&(0..0), "toe_rule", what, &format!("list {fix} at most"));
    }
    let mut stations = Vec::new();
    for value in doc.tables("station") {
        if let Some(section) = doc.open("station", value) {
            stations.extend(station::read(section, &mut unique));
        }
    }
    if stations.len() > STATIONS_MAX {
        let what = format!("is there {} times", stations.len());
        doc.problem(&(0..0), "station", what, &format!("list {STATIONS_MAX} at most"));
    }
    if registry.is_some() && !stations.is_empty() {
        let what = "is a list of what a [registry] tells".into();
        doc.problem(&(0..0), "station", what, "remove the list, or the registry");
    }
    let mut vms = Vec::new();
    for value in doc.tables("vm") {
        if let Some(section) = doc.open("vm", value) {
            vms.push(vm(section, &mut unique));
        }
    }
    let has_ports = !(uplinks.is_empty() && overlays.is_empty() && vms.is_empty());
    if !has_ports && !has_daemon && doc.problems.is_empty() {
        let what = "there is neither an [[uplink]] nor a [[vm]]".into();
        let fix = "add at least one [[vm]], or a [daemon] if they are to come by commands; see \
                   examples/nightporter.toml";
        doc.problem(&(0..0), "", what, fix);
    }
    let budget: u64 = vms.iter().map(|vm| vm.budget).sum();
    if budget > STORE_BYTES_MAX {
        let (sum, most) = (human_bytes(budget), human_bytes(STORE_BYTES_MAX));
        let what = format!("all vm.budget together are {sum}, and {most} is the most");
        doc.problem(&(0..0), "", what, "lower some of them, or run a second daemon");
    }
    doc.only_sections(&[
        "daemon", "uplink", "registry", "toe", "toe_rule", "overlay", "station", "vm",
    ]);
    unique.check(doc);
    Config { daemon, uplinks, overlays, registry, toe, toe_rules, stations, vms }
}

fn daemon(mut s: Section<'_, '_>) -> DaemonConfig {
    let allow_remote = "write metrics_allow_remote = true or false";
    let metrics_allow_remote = s.get("metrics_allow_remote", allow_remote, boolean);
    let metrics_allow_remote = metrics_allow_remote.unwrap_or(false);
    let metrics_fix = "write ADDRESS:PORT as in \"127.0.0.1:9469\", or \"off\"; another address \
                       than loopback needs metrics_allow_remote = true";
    let metrics = s
        .get("metrics", metrics_fix, |v| metrics(v, metrics_allow_remote))
        .unwrap_or(Some(SocketAddr::from(([127, 0, 0, 1], 9469))));
    let socket_fix = "give an absolute path of at most 107 bytes";
    let config = DaemonConfig {
        control: s
            .get("control", socket_fix, socket_path)
            .unwrap_or_else(|| PathBuf::from(RUN_DIR).join("control.sock")),
        metrics,
        metrics_allow_remote,
        arena: s
            .get("arena", "give the absolute path of a file on a tmpfs", path)
            .unwrap_or_else(|| PathBuf::from(RUN_DIR).join("arena")),
        socket_user: s.get("socket_user", USER_FIX, name),
        socket_group: s.get("socket_group", GROUP_FIX, name),
        socket_dirs: s
            .get("socket_dirs", "write a list of absolute paths, as in [\"/srv/vms\"]", paths)
            .unwrap_or_default(),
        bridges: s
            .get("bridges", "write a list of names, as in [\"br0\"]", ifnames)
            .unwrap_or_default(),
        busy_poll_us: s
            .get("busy_poll_us", "use 0 for none, 50 for low latency", integer(0..=1_000_000))
            .unwrap_or(0),
        cpu: s
            .get("cpu", "give the number of one core, or leave it out", integer(0..=1023))
            .and_then(|n| usize::try_from(n).ok()),
        rt_priority: s
            .get("rt_priority", "use 0 for normal scheduling, or 1 to 99", integer(0..=99))
            .and_then(|n| u8::try_from(n).ok())
            .unwrap_or(0),
        log: s
            .get("log", "use error, warn, info, debug or trace, or MODULE=LEVEL lists", log)
            .unwrap_or_else(|| "info".into()),
        drain_timeout_s: s
            .get("drain_timeout_s", "give seconds; 10 is the default", integer(0..=3600))
            .unwrap_or(10),
    };
    s.finish();
    config
}

/// The fix for a wrong cgroup.
const CGROUP_FIX: &str = "give its path below the mount point of the cpu controller, as in \
                          \"machine.slice/web1.scope/vcpu0\"";
/// The fix for a wrong owner or group of sockets.
const USER_FIX: &str = "give the name of a user, as in \"libvirt-qemu\"";
const GROUP_FIX: &str = "give the name of a group, as in \"kvm\"";

fn uplink(mut s: Section<'_, '_>, unique: &mut Unique) -> UplinkConfig {
    let name = port_name(&mut s, unique);
    let network = network(&mut s);
    let ifname_fix = "give the interface's name, at most 15 bytes, as in \"np0\"";
    let ifname = s.require("ifname", ifname_fix, ifname).unwrap_or_default();
    let kind_fix = "write kind = \"tap\" or kind = \"macvtap\"";
    let kind = s.require("kind", kind_fix, uplink_kind);
    let tap_only = "remove it: only a tap can be made or bridged by the daemon";
    let create = s.get("create", "write create = true or false", boolean);
    let bridge =
        s.get("bridge", "give the name of an existing bridge, as in \"br0\"", self::ifname);
    if kind == Some(UplinkKind::Macvtap) {
        if create == Some(true) {
            s.problem("create", "does not apply to a macvtap".into(), tap_only);
        }
        if bridge.is_some() {
            s.problem("bridge", "does not apply to a macvtap".into(), tap_only);
        }
    }
    unique.add("ifname", ifname.clone(), &s);
    if let Some(bridge) = &bridge {
        unique.add("bridge", bridge.clone(), &s);
    }
    s.finish();
    let kind = kind.unwrap_or(UplinkKind::Tap);
    UplinkConfig { name, network, kind, ifname, create: create.unwrap_or(true), bridge }
}

fn vm(mut s: Section<'_, '_>, unique: &mut Unique) -> VmConfig {
    let name = port_name(&mut s, unique);
    let config = VmConfig {
        network: network(&mut s),
        socket: s
            .get("socket", "give an absolute path of at most 107 bytes", socket_path)
            .unwrap_or_else(|| PathBuf::from(RUN_DIR).join(format!("{name}.sock"))),
        name,
        socket_user: s.get("socket_user", USER_FIX, self::name),
        socket_group: s.get("socket_group", GROUP_FIX, self::name),
        mac: s.get(
            "mac",
            "write six hex bytes of a unicast address, as in \"52:54:00:12:34:56\"",
            mac,
        ),
        ips: s.get("ips", "write a list, as in [\"192.0.2.7\", \"2001:db8::7\"]", ips),
        vlan: s.get("vlan", "give the number of one VLAN, 1 to 4094", vlan),
        trunk: s.get("trunk", "write a list of VLANs, as in [10, 20]", trunk),
        isolated: s.get("isolated", "write isolated = true or false", boolean).unwrap_or(false),
        trusted: s.get("trusted", "write trusted = true or false", boolean).unwrap_or(false),
        mtu: s
            .get("mtu", "use 1500, or the uplink's own MTU", integer(68..=65535))
            .and_then(|n| u16::try_from(n).ok())
            .unwrap_or(1500),
        queue_pairs: s
            .get("queue_pairs", "use 1 unless the guest needs a queue per vCPU", integer(1..=8))
            .and_then(|n| u16::try_from(n).ok())
            .unwrap_or(1),
        allow_unsealed_memory: s
            .get("allow_unsealed_memory", "write allow_unsealed_memory = true or false", boolean)
            .unwrap_or(false),
        memory_max: memory_max(&mut s),
        ack_offload: s
            .get("ack_offload", "write ack_offload = true or false", boolean)
            .unwrap_or(true),
        local: local_of(&mut s),
        guest_ttl: guest_ttl(&mut s),
        congestion_offload: s
            .get("congestion_offload", "write congestion_offload = true or false", boolean)
            .unwrap_or(false),
        congestion_control: s
            .get("congestion_control", "write \"cubic\" or \"reno\"", algorithm)
            .unwrap_or_default(),
        toe: s.get("toe", "write toe = true or false", boolean).unwrap_or(false),
        toe_to_itself: s
            .get("toe_to_itself", "write toe_to_itself = true or false", boolean)
            .unwrap_or(false),
        boost: s.get("boost", "write CPU time and window, as in \"15ms/90ms\"", boost::read),
        vcpu_cgroup: s.get("vcpu_cgroup", CGROUP_FIX, cgroup),
        rate_limit_from_guest_mbit_s: rate_limit(&mut s, "rate_limit_from_guest_mbit_s"),
        rate_limit_to_guest_mbit_s: rate_limit(&mut s, "rate_limit_to_guest_mbit_s"),
        budget: s
            .get("budget", "write bytes, or a string as in \"64M\"", bytes(MIB..=64 * GIB))
            .unwrap_or(VM_BUDGET),
        flows_max: s
            .get(
                "flows_max",
                "use 16384, or twice the connections you expect",
                integer(16..=1 << 20),
            )
            .and_then(|n| u32::try_from(n).ok())
            .unwrap_or(FLOWS_PER_VM),
    };
    check_vm(&mut s, &config, unique);
    s.finish();
    config
}

/// Which connections end in the guest.
fn local_of(s: &mut Section<'_, '_>) -> Local {
    s.get("local", "write \"auto\", \"always\" or \"never\"", local).unwrap_or_default()
}

fn memory_max(s: &mut Section<'_, '_>) -> Option<u64> {
    s.get("memory_max", "write bytes, or a string as in \"4G\"", bytes(MIB..=spans::PORT_MAX))
}

fn guest_ttl(s: &mut Section<'_, '_>) -> Option<u8> {
    let ttl = s.get("guest_ttl", "give the TTL of the guest's packets, 1 to 255", integer(1..=255));
    ttl.and_then(|n| u8::try_from(n).ok())
}

/// Combinations of keys, and values that two VMs must not share.
fn check_vm(s: &mut Section<'_, '_>, config: &VmConfig, unique: &mut Unique) {
    // A command may turn one off and leave the other.
    if config.congestion_offload && !config.ack_offload && !s.is_of_a_command() {
        let what = "needs ack_offload = true".into();
        s.problem("congestion_offload", what, "turn both on, or congestion_offload off");
    }
    if config.vlan.is_some() && config.trunk.is_some() {
        let fix = "use vlan for a guest that sees no tags, or trunk for one that does";
        s.problem("trunk", "does not go with vlan".into(), fix);
    }
    unique.add("socket", config.socket.display().to_string(), s);
    if let Some(socket) = config.toe_socket() {
        check_toe(s, config, &socket);
        unique.add("socket", socket.display().to_string(), s);
    }
    if let Some(mac) = config.mac {
        let mac = mac.map(|b| format!("{b:02x}")).join(":");
        let of = config.network.as_ref().map(|network| format!(" in network {network}"));
        unique.add("mac", mac + &of.unwrap_or_default(), s);
    }
}

/// The requirements of the virtual TOE.
fn check_toe(s: &mut Section<'_, '_>, config: &VmConfig, socket: &Path) {
    if config.ips.is_none() {
        let what = "needs ips: no socket may have another address".into();
        s.problem("toe", what, "list the guest's addresses, as in ips = [\"192.0.2.7\"]");
    }
    if config.trunk.is_some() {
        let what = "does not go with trunk: a socket is in one network".into();
        s.problem("toe", what, "leave one of them out");
    }
    if socket.as_os_str().len() > SOCKET_PATH_BYTES_MAX {
        let what = format!("{} is longer than a socket's path may be", socket.display());
        s.problem("toe", what, "choose a shorter directory for socket, or a shorter name");
    }
}

fn rate_limit(s: &mut Section<'_, '_>, key: &'static str) -> Option<u32> {
    let range = 1..=RATE_LIMIT_MBIT_S_MAX.into();
    let limit = s.get(key, "give Mbit/s, or leave it out for no limit", integer(range));
    limit.and_then(|n| u32::try_from(n).ok())
}

pub(super) fn port_name(s: &mut Section<'_, '_>, unique: &mut Unique) -> String {
    let fix = "give it a name of 1 to 32 letters, digits, `-`, `_` or `.`, as in \"web1\"";
    let name = s.require("name", fix, name).unwrap_or_default();
    if !name.is_empty() {
        s.label = format!("{}.{name}", s.label);
        unique.add("name", name.clone(), s);
    }
    name
}

/// Of every kind of port.
pub(super) fn network(s: &mut Section<'_, '_>) -> Option<String> {
    let fix = "name the network, as in \"red\", or leave it out for the one without a name";
    s.get("network", fix, name)
}

/// Values that no two ports may share, and where each was given.
#[derive(Default)]
pub(super) struct Unique {
    seen: Vec<(&'static str, String, String, Range<usize>)>,
}

impl Unique {
    pub(super) fn add(&mut self, key: &'static str, value: String, s: &Section<'_, '_>) {
        self.seen.push((key, value, s.label.clone(), s.span.clone()));
    }

    fn check(self, doc: &mut Document<'_>) {
        let mut first: BTreeMap<(&str, &str), &str> = BTreeMap::new();
        for (key, value, label, span) in &self.seen {
            match first.entry((*key, value)) {
                Entry::Vacant(entry) => {
                    entry.insert(label);
                }
                Entry::Occupied(entry) => {
                    let what = format!("\"{value}\" is already used by {}", entry.get());
                    let fix = match *key {
                        "bridge" => "keep one of them: two uplinks into one bridge make a loop",
                        _ => "give each its own",
                    };
                    doc.problem(span, &format!("{label}.{key}"), what, fix);
                }
            }
        }
    }
}

fn name(v: &DeValue<'_>) -> Result<String, String> {
    let s = string(v)?;
    let good = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if s.is_empty() || s.len() > NAME_BYTES_MAX || !s.chars().all(good) || s.starts_with('.') {
        return Err(format!("{} is not a name", shown(v)));
    }
    Ok(s)
}

fn ifname(v: &DeValue<'_>) -> Result<String, String> {
    let s = string(v)?;
    if is_ifname(&s) { Ok(s) } else { Err(format!("{} is not an interface name", shown(v))) }
}

/// Whether an interface may be called so.
pub(crate) fn is_ifname(s: &str) -> bool {
    let bad = |c: char| c == '/' || c.is_whitespace() || c.is_control() || c == ':' || c == '%';
    !(s.is_empty() || s.len() > IFNAME_BYTES_MAX || s == "." || s == ".." || s.contains(bad))
}

fn ifnames(v: &DeValue<'_>) -> Result<Vec<String>, String> {
    let list = v.as_array().ok_or_else(|| format!("{} is not a list", shown(v)))?;
    list.iter().map(|v| ifname(v.get_ref())).collect()
}

pub(super) fn path(v: &DeValue<'_>) -> Result<PathBuf, String> {
    let p = PathBuf::from(string(v)?);
    if p.is_absolute() { Ok(p) } else { Err(format!("{} is not an absolute path", shown(v))) }
}

fn paths(v: &DeValue<'_>) -> Result<Vec<PathBuf>, String> {
    let list = v.as_array().ok_or_else(|| format!("{} is not a list", shown(v)))?;
    list.iter().map(|v| path(v.get_ref())).collect()
}

fn socket_path(v: &DeValue<'_>) -> Result<PathBuf, String> {
    let p = path(v)?;
    match p.as_os_str().len() {
        0..=SOCKET_PATH_BYTES_MAX => Ok(p),
        n => Err(format!("is {n} bytes long, and a socket's path may have 107")),
    }
}

fn metrics(v: &DeValue<'_>, allow_remote: bool) -> Result<Option<SocketAddr>, String> {
    let s = string(v)?;
    if s == "off" {
        return Ok(None);
    }
    let address: SocketAddr = s.parse().map_err(|_| format!("{} is not ADDRESS:PORT", shown(v)))?;
    if !address.ip().is_loopback() && !allow_remote {
        return Err(format!("{address} is not a loopback address"));
    }
    Ok(Some(address))
}

fn log(v: &DeValue<'_>) -> Result<String, String> {
    let s = string(v)?;
    // The filter takes a word that is no level for the name of a module, and would log nothing
    // else.
    let levels = ["off", "error", "warn", "info", "debug", "trace"];
    let is_one = |word: &str| {
        let level = word.trim().to_ascii_lowercase();
        word.contains(['=', ':', '[']) || levels.contains(&level.as_str())
    };
    if let Some(word) = s.split(',').find(|word| !is_one(word)) {
        return Err(format!("\"{}\" is not a level", word.trim()));
    }
    let filter = tracing_subscriber::EnvFilter::builder().parse(&s);
    filter.map(|_| s).map_err(|e| format!("{} is not a log filter: {e}", shown(v)))
}

fn uplink_kind(v: &DeValue<'_>) -> Result<UplinkKind, String> {
    match string(v)?.as_str() {
        "tap" => Ok(UplinkKind::Tap),
        "macvtap" => Ok(UplinkKind::Macvtap),
        _ => Err(format!("{} is not a kind of uplink", shown(v))),
    }
}

fn algorithm(v: &DeValue<'_>) -> Result<Algorithm, String> {
    let s = string(v)?;
    let found = Algorithm::ALL.into_iter().find(|algorithm| algorithm.label() == s);
    found.ok_or_else(|| format!("{} is not a congestion control", shown(v)))
}

fn local(v: &DeValue<'_>) -> Result<Local, String> {
    let s = string(v)?;
    let found = Local::ALL.into_iter().find(|local| local.label() == s);
    found.ok_or_else(|| format!("{} does not say which connections end in the guest", shown(v)))
}

pub(super) fn mac(v: &DeValue<'_>) -> Result<[u8; 6], String> {
    let s = string(v)?;
    let mut mac = [0; 6];
    let mut parts = s.split([':', '-']);
    for byte in &mut mac {
        *byte = parts
            .next()
            .filter(|p| p.len() == 2 && p.bytes().all(|b| b.is_ascii_hexdigit()))
            .and_then(|p| u8::from_str_radix(p, 16).ok())
            .ok_or_else(|| format!("{} is not a MAC address", shown(v)))?;
    }
    if parts.next().is_some() {
        return Err(format!("{} is not a MAC address", shown(v)));
    }
    match mac {
        [0, 0, 0, 0, 0, 0] => Err("is all zeroes".into()),
        [first, ..] if first & 1 != 0 => Err(format!("{} is a group address", shown(v))),
        mac => Ok(mac),
    }
}

pub(super) fn ips(v: &DeValue<'_>) -> Result<Vec<IpAddr>, String> {
    if let Some(text) = v.as_str() {
        // On a command line: ips=192.0.2.7,2001:db8::7
        let parse = |ip: &str| ip.trim().parse().map_err(|_| format!("{ip} is not an IP address"));
        return text.split(',').map(parse).collect::<Result<Vec<_>, _>>().and_then(hosts);
    }
    let list = v.as_array().ok_or_else(|| format!("{} is not a list", shown(v)))?;
    if list.is_empty() {
        return Err("is empty, which would block every packet of the guest".into());
    }
    let parse = |v: &DeValue<'_>| {
        string(v)?.parse().map_err(|_| format!("{} is not an IP address", shown(v)))
    };
    let ips = list.iter().map(|v| parse(v.get_ref())).collect::<Result<Vec<_>, String>>();
    ips.and_then(hosts)
}

/// IEEE 802.1Q: 0 is no VLAN, 4095 is reserved.
fn cgroup(v: &DeValue<'_>) -> Result<String, String> {
    let s = string(v)?;
    let is_inside = !s.is_empty() && s.len() <= 255 && !s.split('/').any(|part| part == "..");
    is_inside.then(|| s.to_owned()).ok_or_else(|| format!("{} is not a cgroup", shown(v)))
}

fn vlan(v: &DeValue<'_>) -> Result<u16, String> {
    let number = integer(1..=4094)(v)?;
    u16::try_from(number).map_err(|e| e.to_string())
}

fn trunk(v: &DeValue<'_>) -> Result<Vec<u16>, String> {
    if let Some(text) = v.as_str() {
        // On a command line: trunk=10,20
        let range = |vlan: &u16| (1..=4094).contains(vlan);
        let parse = |vlan: &str| vlan.trim().parse().ok().filter(range);
        let list = text.split(',').map(|vlan| parse(vlan).ok_or(format!("{vlan} is not a VLAN")));
        return list.collect::<Result<Vec<_>, _>>().map(ordered);
    }
    let list = match v.as_array() {
        None => vlan(v).map(|vlan| vec![vlan]),
        Some(list) if list.is_empty() => Err("is empty: the guest would reach nobody".into()),
        Some(list) => list.iter().map(|v| vlan(v.get_ref())).collect(),
    };
    list.map(ordered)
}

/// The same VLANs are the same value.
fn ordered(mut vlans: Vec<u16>) -> Vec<u16> {
    vlans.sort_unstable();
    vlans.dedup();
    vlans
}

/// Addresses that a host can have.
fn hosts(ips: Vec<IpAddr>) -> Result<Vec<IpAddr>, String> {
    let bad = ips.iter().find(|ip| {
        matches!(ip, IpAddr::V4(a) if a.is_multicast() || a.is_broadcast())
            || matches!(ip, IpAddr::V6(a) if a.is_multicast())
    });
    bad.map_or_else(|| Ok(ips.clone()), |ip| Err(format!("{ip} is not a unicast address")))
}
