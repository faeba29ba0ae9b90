//! From TOML to [`Config`]: defaults, ranges, and the checks that span sections.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::path::{Path, PathBuf};

use nightporter_api::RATE_LIMIT_MBIT_S_MAX;
use nightporter_core::congestion::Algorithm;
use nightporter_core::limits::PAGE;
use nightporter_core::port::Local;
use nightporter_registry::STATIONS_MAX;
use toml::de::DeValue;

use crate::limits::PLACES;

use super::reader::{Document, Problems, Section, boolean, human_bytes, integer, shown, string};
use super::{
    AttachConfig, Config, DaemonConfig, UplinkConfig, UplinkKind, VmConfig, attach, overlay,
    registry, station, toe, toe_rule,
};

/// `sun_path` is 108 bytes with its terminator (unix(7)).
const SOCKET_PATH_BYTES_MAX: usize = 107;
/// `IFNAMSIZ` is 16 with its terminator (linux/if.h).
const IFNAME_BYTES_MAX: usize = 15;
const NAME_BYTES_MAX: usize = 32;

const STORE_BYTES_MAX: u64 = PLACES.pages as u64 * PAGE as u64;

/// The configuration of this text. It fits together with the VMs `beside` it, which are not read:
/// each is right by itself.
pub(super) fn config(
    file: &str,
    text: &str,
    overrides: &BTreeMap<String, String>,
    beside: &[VmConfig],
) -> Result<Config, Problems> {
    let mut doc = Document::parse(text, overrides);
    // After a syntax error the rest of the tree is guesswork: report that alone.
    let config = if doc.problems.is_empty() { Some(read(&mut doc, beside)) } else { None };
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

/// One bridge whose taps are attached out of `KEY=VALUE`s.
pub(super) fn attach_of(keys: &BTreeMap<String, String>) -> Result<AttachConfig, Problems> {
    of("attach", keys, |section, _| attach::read(section, &[]))
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
        "[registry]\n[toe]\n[[toe_rule]]\n[[uplink]]\n[[overlay]]\n[[station]]\n[[attach]]\n\
         [[vm]]\n",
        &overrides,
    );
    read(&mut doc, &[]);
    doc.known.into_iter().map(|(section, key)| format!("{section}.{key}")).collect()
}

/// Reads everything; where a value is wrong its default stands in, and the problem is recorded.
fn read(doc: &mut Document<'_>, beside: &[VmConfig]) -> Config {
    let has_daemon = doc.has("daemon");
    let daemon = daemon(doc.section("daemon"));
    let mut unique = Unique::default();
    let control = daemon.control.display().to_string();
    unique.seen.push(("socket", control, "daemon.control".into(), 0..0));
    let registry = doc.table("registry").map(registry::read);
    let uplinks = list(doc, "uplink", |section| uplink(section, &mut unique));
    let read = |section: Section<'_, '_>| overlay::read(section, registry.is_some(), &mut unique);
    let overlays = list(doc, "overlay", read);
    let toe = doc.table("toe").map(|section| toe::read(section, !overlays.is_empty()));
    let toe_rules = list(doc, "toe_rule", toe_rule::read);
    if toe_rules.len() > toe_rule::RULES_MAX {
        let (what, fix) = (format!("is there {} times", toe_rules.len()), toe_rule::RULES_MAX);
        doc.problem(&(0..0), "toe_rule", what, &format!("list {fix} at most"));
    }
    let stations = list(doc, "station", |section| station::read(section, &mut unique));
    let stations: Vec<_> = stations.into_iter().flatten().collect();
    if stations.len() > STATIONS_MAX {
        let what = format!("is there {} times", stations.len());
        doc.problem(&(0..0), "station", what, &format!("list {STATIONS_MAX} at most"));
    }
    if registry.is_some() && !stations.is_empty() {
        let what = "is a list of what a [registry] tells".into();
        doc.problem(&(0..0), "station", what, "remove the list, or the registry");
    }
    let attach = attach::read_all(doc);
    beside.iter().for_each(|vm| unique.add_vm(vm));
    let vms = list(doc, "vm", |section| vm(section, &mut unique));
    doc.only_sections(&[
        "daemon", "uplink", "registry", "toe", "toe_rule", "overlay", "station", "attach", "vm",
    ]);
    let lacks_vms = attach.is_empty() && vms.is_empty();
    let has_ports = !(uplinks.is_empty() && overlays.is_empty() && lacks_vms);
    if !has_ports && !has_daemon && doc.problems.is_empty() {
        let what = "there is neither an [[uplink]] nor a [[vm]]".into();
        let fix = "add at least one [[vm]], or a [daemon] if they are to come by commands; see \
                   examples/nightporter.toml";
        doc.problem(&(0..0), "", what, fix);
    }
    let budget: u64 = vms.iter().chain(beside).map(|vm| vm.budget).sum();
    if budget > STORE_BYTES_MAX {
        let (sum, most) = (human_bytes(budget), human_bytes(STORE_BYTES_MAX));
        let what = format!("all vm.budget together are {sum}, and {most} is the most");
        doc.problem(&(0..0), "", what, "lower some of them, or run a second daemon");
    }
    unique.check(doc);
    Config { daemon, uplinks, overlays, registry, toe, toe_rules, stations, attach, vms }
}

/// All tables `[[name]]`.
fn list<T>(
    doc: &mut Document<'_>,
    name: &'static str,
    mut read: impl FnMut(Section<'_, '_>) -> T,
) -> Vec<T> {
    let mut list = Vec::new();
    for value in doc.tables(name) {
        list.extend(doc.open(name, value).map(&mut read));
    }
    list
}

fn daemon(mut s: Section<'_, '_>) -> DaemonConfig {
    let config = DaemonConfig::read(&mut s);
    s.finish();
    config
}

fn uplink(mut s: Section<'_, '_>, unique: &mut Unique) -> UplinkConfig {
    let config = UplinkConfig::read(&mut s, unique);
    if config.kind == UplinkKind::Macvtap && config.bridge.is_some() {
        s.problem("bridge", "does not apply to a macvtap".into(), TAP_ONLY);
    }
    unique.add("ifname", config.ifname.clone(), &s);
    if let Some(bridge) = &config.bridge {
        unique.add("bridge", bridge.clone(), &s);
    }
    s.finish();
    config
}

/// The fix for a key of taps that a macvtap has.
const TAP_ONLY: &str = "remove it: only a tap can be made or bridged by the daemon";

/// Whether an uplink of this kind is made if it is missing.
pub(super) fn create(s: &mut Section<'_, '_>, kind: UplinkKind) -> bool {
    let create = s.get("create", "write create = true or false", boolean);
    if kind == UplinkKind::Macvtap && create == Some(true) {
        s.problem("create", "does not apply to a macvtap".into(), TAP_ONLY);
    }
    create.unwrap_or(true)
}

fn vm(mut s: Section<'_, '_>, unique: &mut Unique) -> VmConfig {
    let config = VmConfig::read(&mut s, unique);
    check_vm(&mut s, &config, unique);
    s.finish();
    config
}

/// Combinations of keys, and values that two VMs must not share.
fn check_vm(s: &mut Section<'_, '_>, config: &VmConfig, unique: &mut Unique) {
    // A command may turn one off and leave the other.
    if config.congestion_offload && !config.ack_offload && !s.is_of_a_command() {
        let what = "needs ack_offload = true".into();
        s.problem("congestion_offload", what, "turn both on, or congestion_offload off");
    }
    if !config.accept_offload.is_off() && !config.ack_offload && !s.is_of_a_command() {
        let what = "needs ack_offload = true".into();
        s.problem("accept_offload", what, "turn both on, or accept_offload off");
    }
    if config.vlan.is_some() && config.trunk.is_some() {
        let fix = "use vlan for a guest that sees no tags, or trunk for one that does";
        s.problem("trunk", "does not go with vlan".into(), fix);
    }
    if config.tap.is_some() {
        check_tap(s, config);
    }
    if config.tap_begins().is_some() && config.mac.is_none() {
        let fix = "give the VM's mac, or the whole name of its tap";
        s.problem("tap", "needs mac, because it is no whole name".into(), fix);
    }
    if let Some(socket) = config.toe_socket() {
        check_toe(s, config, &socket);
    }
    config.unique().into_iter().for_each(|(key, value)| unique.add(key, value, s));
}

/// Keys that a VM with a tap cannot have: no switch is asked for its frames, its driver is unknown,
/// and a wire that is plain for a moment must not carry what the offload has made.
fn check_tap(s: &mut Section<'_, '_>, config: &VmConfig) {
    for (key, is_given) in [
        ("network", config.network.is_some()),
        ("ips", config.ips.is_some()),
        ("vlan", config.vlan.is_some()),
        ("trunk", config.trunk.is_some()),
        ("isolated", config.isolated),
        ("trusted", config.trusted),
        ("congestion_offload", config.congestion_offload),
        ("accept_offload", !config.accept_offload.is_off()),
        ("toe", config.toe),
    ] {
        if is_given {
            let fix = "leave it out, or give the VM a vhost-user socket instead of a tap";
            s.problem(key, "does not go with tap".into(), fix);
        }
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

pub(super) fn rate_limit() -> impl Fn(&DeValue<'_>) -> Result<u32, String> {
    integer(1..=RATE_LIMIT_MBIT_S_MAX.into())
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

    /// Those of a VM that is not read.
    fn add_vm(&mut self, vm: &VmConfig) {
        let label = format!("vm.{}", vm.name);
        let values = std::iter::once(("name", vm.name.clone())).chain(vm.unique());
        self.seen.extend(values.map(|(key, value)| (key, value, label.clone(), 0..0)));
    }

    fn check(self, doc: &mut Document<'_>) {
        let mut first: BTreeMap<(&str, &str), &str> = BTreeMap::new();
        for (key, value, label, span) in &self.seen {
            let kind = if *key == "tap" { "ifname" } else { key };
            match first.entry((kind, value)) {
                Entry::Vacant(entry) => {
                    entry.insert(label);
                }
                Entry::Occupied(entry) => {
                    let what = format!("\"{value}\" is already used by {}", entry.get());
                    let fix = match *key {
                        "tap" => "keep one of them: an interface is one port's",
                        "bridge" => "keep one of them: two uplinks into one bridge make a loop",
                        _ => "give each its own",
                    };
                    doc.problem(span, &format!("{label}.{key}"), what, fix);
                }
            }
        }
    }
}

pub(super) fn name(v: &DeValue<'_>) -> Result<String, String> {
    let s = string(v)?;
    let good = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if s.is_empty() || s.len() > NAME_BYTES_MAX || !s.chars().all(good) || s.starts_with('.') {
        return Err(format!("{} is not a name", shown(v)));
    }
    Ok(s)
}

pub(super) fn ifname(v: &DeValue<'_>) -> Result<String, String> {
    let s = string(v)?;
    if is_ifname(&s) { Ok(s) } else { Err(format!("{} is not an interface name", shown(v))) }
}

/// Whether an interface may be called so.
pub(crate) fn is_ifname(s: &str) -> bool {
    let bad = |c: char| c == '/' || c.is_whitespace() || c.is_control() || c == ':' || c == '%';
    !(s.is_empty() || s.len() > IFNAME_BYTES_MAX || s == "." || s == ".." || s.contains(bad))
}

pub(super) fn ifnames(v: &DeValue<'_>) -> Result<Vec<String>, String> {
    let list = v.as_array().ok_or_else(|| format!("{} is not a list", shown(v)))?;
    list.iter().map(|v| ifname(v.get_ref())).collect()
}

/// Names of taps, of which each may end in `*`.
pub(super) fn tap_patterns(v: &DeValue<'_>) -> Result<Vec<String>, String> {
    let list = v.as_array().ok_or_else(|| format!("{} is not a list", shown(v)))?;
    list.iter().map(|v| tap_pattern(v.get_ref())).collect()
}

/// The name of a tap, which may end in `*`.
pub(super) fn tap_pattern(v: &DeValue<'_>) -> Result<String, String> {
    let name = ifname(v)?;
    let is_right = !name.strip_suffix('*').unwrap_or(&name).contains('*');
    if is_right { Ok(name) } else { Err(format!("{name:?} has a * before its end")) }
}

pub(super) fn path(v: &DeValue<'_>) -> Result<PathBuf, String> {
    let p = PathBuf::from(string(v)?);
    if p.is_absolute() { Ok(p) } else { Err(format!("{} is not an absolute path", shown(v))) }
}

pub(super) fn paths(v: &DeValue<'_>) -> Result<Vec<PathBuf>, String> {
    let list = v.as_array().ok_or_else(|| format!("{} is not a list", shown(v)))?;
    list.iter().map(|v| path(v.get_ref())).collect()
}

pub(super) fn socket_path(v: &DeValue<'_>) -> Result<PathBuf, String> {
    let p = path(v)?;
    match p.as_os_str().len() {
        0..=SOCKET_PATH_BYTES_MAX => Ok(p),
        n => Err(format!("is {n} bytes long, and a socket's path may have 107")),
    }
}

pub(super) fn metrics(v: &DeValue<'_>, allow_remote: bool) -> Result<Option<SocketAddr>, String> {
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

pub(super) fn log(v: &DeValue<'_>) -> Result<String, String> {
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

/// The kind of an uplink; a tap stands in for a wrong one.
pub(super) fn uplink_kind(s: &mut Section<'_, '_>) -> UplinkKind {
    let kind = |v: &DeValue<'_>| {
        let label = string(v)?;
        let known = UplinkKind::ALL.into_iter().find(|kind| kind.label() == label);
        known.ok_or_else(|| format!("{} is not a kind of uplink", shown(v)))
    };
    let fix = "write kind = \"tap\" or kind = \"macvtap\"";
    s.require("kind", fix, kind).unwrap_or(UplinkKind::Tap)
}

pub(super) fn algorithm(v: &DeValue<'_>) -> Result<Algorithm, String> {
    let s = string(v)?;
    let found = Algorithm::ALL.into_iter().find(|algorithm| algorithm.label() == s);
    found.ok_or_else(|| format!("{} is not a congestion control", shown(v)))
}

pub(super) fn local(v: &DeValue<'_>) -> Result<Local, String> {
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

pub(super) fn cgroup(v: &DeValue<'_>) -> Result<String, String> {
    let s = string(v)?;
    let is_inside = !s.is_empty() && s.len() <= 255 && !s.split('/').any(|part| part == "..");
    is_inside.then(|| s.to_owned()).ok_or_else(|| format!("{} is not a cgroup", shown(v)))
}

/// IEEE 802.1Q: 0 is no VLAN, 4095 is reserved.
pub(super) fn vlan(v: &DeValue<'_>) -> Result<u16, String> {
    integer(1..=4094)(v)
}

pub(super) fn trunk(v: &DeValue<'_>) -> Result<Vec<u16>, String> {
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
        let is_broadcast = matches!(ip, IpAddr::V4(ip) if ip.is_broadcast());
        is_broadcast || ip.is_multicast() || ip.is_loopback() || ip.is_unspecified()
    });
    let wrong = bad.map(|ip| format!("{ip} is not the address of a host"));
    wrong.map_or(Ok(ips), Err)
}
