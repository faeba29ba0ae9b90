//! The judges of the core are not made of the core: the items of core that they may name.
//!
//! The list is a ratchet: it may only shrink. All of it are types that a judge has to hold in its
//! hands (the engine it looks into, an address, a span of time), and bounds that are promises.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// The rules and what they know; the simulator's machines, their cards and paths.
const JUDGES: &[&str] = &[
    "check/src",
    "sim/src/link.rs",
    "sim/src/observer",
    "sim/src/sched.rs",
    "sim/src/stack",
    "sim/src/world/node.rs",
];

/// Items that the judges may name.
const ALLOWED: &[&str] = &[
    "engine::Engine",
    "port::PortId",
    "flow::key::FlowKey",
    "limits::PERSIST_MAX",
    "limits::T_ALIVE",
    "limits::T_PAUSED",
    "limits::T_RST",
    "tcp::flow::Flow",
    "tcp::flow::State",
    "time::Duration",
    "time::Instant",
    "wire::ip::IpAddr16",
    "wire::ip::IpVersion",
    "wire::virtio_net::VirtioNetHdr",
];

/// Files of the simulator that drive the engine or print its words, and may read frames with it.
const DRIVERS: &[&str] = &["sim/src/figures", "sim/src/report.rs"];

/// Items of core's parsing and building of frames that the other files may name.
const ALLOWED_OF_WIRE: &[&str] =
    &["wire::ip::IpAddr16", "wire::ip::IpVersion", "wire::virtio_net::VirtioNetHdr"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Rust files at or below `path`, without their unit tests.
fn files(path: &Path) -> Vec<(PathBuf, String)> {
    if path.is_file() {
        let text = fs::read_to_string(path).expect("readable");
        let shipped = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
        let is_test = path.file_name().is_some_and(|name| name == "tests.rs");
        return if is_test { Vec::new() } else { vec![(path.into(), shipped.to_owned())] };
    }
    if path.ends_with("tests") {
        return Vec::new();
    }
    let entries = fs::read_dir(path).expect("a directory").map(|e| e.expect("readable").path());
    let mut below: Vec<PathBuf> = entries.collect();
    below.sort();
    below.iter().flat_map(|path| files(path)).collect()
}

/// The items of the core that `text` names, by their paths.
fn items(text: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for (at, name) in text.match_indices("nightporter_core::") {
        let rest = &text[at + name.len()..];
        let is_path = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
        let path = &rest[..rest.find(|c| !is_path(c)).unwrap_or(rest.len())];
        match rest[path.len()..].strip_prefix('{') {
            Some(list) => {
                let list = &list[..list.find('}').expect("a closed list")];
                let names = list.split(',').map(str::trim).filter(|name| !name.is_empty());
                found.extend(names.map(|name| format!("{path}{name}")));
            }
            None => {
                found.insert(path.to_owned());
            }
        }
    }
    // `time::Duration::from_millis` names a type.
    let to_type = |path: String| {
        let parts: Vec<&str> = path.split("::").collect();
        let is_type = |part: &&str| part.starts_with(char::is_uppercase);
        let end = parts.iter().position(is_type).map_or(parts.len(), |at| at + 1);
        parts[..end].join("::")
    };
    found.into_iter().map(to_type).collect()
}

#[test]
fn judges_name_nothing_of_the_core_but_what_is_listed() {
    let mut named = BTreeSet::new();
    for (path, text) in JUDGES.iter().flat_map(|judge| files(&root().join(judge))) {
        for item in items(&text) {
            assert!(ALLOWED.contains(&item.as_str()), "{}: {item}", path.display());
            named.insert(item);
        }
    }
    let stale: Vec<_> = ALLOWED.iter().filter(|item| !named.contains(**item)).collect();
    assert!(stale.is_empty(), "nobody names these any more, shorten the list: {stale:?}");
}

#[test]
fn frames_are_not_read_with_what_is_being_tested() {
    let drivers: Vec<PathBuf> = DRIVERS.iter().map(|driver| root().join(driver)).collect();
    for (path, text) in files(&root().join("sim/src")) {
        if drivers.iter().any(|driver| path.starts_with(driver)) {
            continue;
        }
        for item in items(&text).iter().filter(|item| item.starts_with("wire::")) {
            assert!(ALLOWED_OF_WIRE.contains(&item.as_str()), "{}: {item}", path.display());
        }
    }
}

#[test]
fn lists_and_paths_in_the_text_are_found() {
    let text = "use nightporter_core::a::{B, c::D};\nlet x = nightporter_core::e::F::new(1);\n";
    let found: Vec<_> = items(text).into_iter().collect();
    assert_eq!(found, ["a::B", "a::c::D", "e::F"]);
}
