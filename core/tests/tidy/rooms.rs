//! The rooms of `core` and `daemon`, and that none uses a room above its own.
//!
//! The order of rooms is total, so without an arrow up there is no cycle of files between rooms
//! either. Unit tests may look up.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use super::{File, expect_none, repository, root};

/// A crate's rooms from top to bottom: the name of each, and the modules in it. A module is in the
/// room of the longest entry that it begins with. The crate's root is above all rooms.
struct House {
    crate_dir: &'static str,
    rooms: &'static [(&'static str, &'static [&'static str])],
}

const HOUSES: &[House] = &[
    House {
        crate_dir: "core",
        rooms: &[
            ("turn", &["turn"]),
            ("engine", &["engine"]),
            ("tcp", &["tcp"]),
            ("overlay", &["overlay"]),
            ("switch", &["switch"]),
            ("toe", &["toe"]),
            ("monitor", &["monitor"]),
            ("port", &["port"]),
            ("congestion", &["congestion"]),
            ("store", &["store"]),
            ("flow", &["flow"]),
            ("trace", &["trace"]),
            ("wire", &["wire"]),
            ("limits", &["bucket", "counters", "drops", "limits", "time"]),
        ],
    },
    House {
        crate_dir: "daemon",
        rooms: &[
            ("start", &["arguments", "daemon_user", "host_check", "sandbox", "settle", "start"]),
            ("control", &["change", "control"]),
            ("worker", &["arena_file", "booster", "worker"]),
            ("sockets", &["sockets"]),
            ("port", &["port", "token"]),
            ("vhost", &["charges", "vhost"]),
            (
                "privilege",
                &["broker", "owners", "sandbox::calls", "sandbox::files", "sandbox::privileges"],
            ),
            ("config", &["config"]),
            (
                "guard",
                &[
                    "closer",
                    "errors",
                    "faults",
                    "log",
                    "pace",
                    "polling",
                    "random",
                    "refused",
                    "resting",
                    "sleeps",
                    "spans",
                    "spare",
                    "supervisor",
                    "sys",
                    "tap_address",
                    "timer",
                    "watchdog",
                    "watched",
                ],
            ),
            ("limits", &["limits"]),
        ],
    },
];

impl House {
    /// The room of a module: its place in the list, from the top.
    fn room_of(&self, module: &str) -> Option<usize> {
        let is_in = |entry: &str| {
            module.strip_prefix(entry).is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
        };
        let entries = self.rooms.iter().enumerate().flat_map(|(at, (_, modules))| {
            modules.iter().filter(|entry| is_in(entry)).map(move |entry| (entry.len(), at))
        });
        entries.max().map(|(_, at)| at)
    }
}

/// The words of a Rust file, without comments and literals: names, `::`, and single characters.
fn words(text: &str) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        let len = match c {
            '/' if rest.starts_with("//") => rest.find('\n').unwrap_or(rest.len()),
            '/' if rest.starts_with("/*") => rest.find("*/").map_or(rest.len(), |at| at + 2),
            'r' if rest.starts_with("r#\"") => {
                rest[3..].find("\"#").map_or(rest.len(), |at| 3 + at + 2)
            }
            '"' => {
                let mut escaped = false;
                let end = rest[1..].find(|c| {
                    let ends = c == '"' && !escaped;
                    escaped = c == '\\' && !escaped;
                    ends
                });
                end.map_or(rest.len(), |at| 1 + at + 1)
            }
            // A character, unless it is a lifetime.
            '\'' if rest[1..].starts_with('\\') => {
                rest[3..].find('\'').map_or(rest.len(), |at| 3 + at + 1)
            }
            '\'' => {
                let second = rest[1..].chars().next().map_or(0, char::len_utf8);
                if rest[1 + second..].starts_with('\'') { 2 + second } else { 1 }
            }
            ':' if rest.starts_with("::") => {
                words.push("::".into());
                2
            }
            c if c.is_alphanumeric() || c == '_' => {
                let is_word = |c: char| c.is_alphanumeric() || c == '_';
                let len = rest.find(|c| !is_word(c)).unwrap_or(rest.len());
                words.push(rest[..len].into());
                len
            }
            c => {
                if !c.is_whitespace() {
                    words.push(c.into());
                }
                c.len_utf8()
            }
        };
        rest = &rest[len..];
    }
    words
}

fn is_name(word: &str) -> bool {
    word.starts_with(|c: char| c.is_alphabetic() || c == '_')
}

type Path = Vec<String>;

/// Reads the tree of a `use` from `at` on: each path and the name that it gets. Returns the place
/// behind the tree.
fn use_tree(words: &[String], mut at: usize, from: &Path, all: &mut Vec<(Path, String)>) -> usize {
    let mut path = from.clone();
    while let Some(word) = words.get(at) {
        match word.as_str() {
            "{" => {
                at += 1;
                while words.get(at).is_some_and(|word| word != "}") {
                    at = use_tree(words, at, &path, all);
                    at += usize::from(words.get(at).is_some_and(|word| word == ","));
                }
                return at + 1;
            }
            "," | ";" | "}" => break,
            "as" => {
                let alias = words.get(at + 1).cloned().unwrap_or_default();
                all.push((path, alias));
                return at + 2;
            }
            "::" => {}
            // `self` at the end of a path is that path.
            "self" if !path.is_empty() => {}
            word => path.push(word.into()),
        }
        at += 1;
    }
    let name = path.last().cloned().unwrap_or_default();
    all.push((path, name));
    at
}

/// A module of a crate: one file.
#[derive(Default)]
struct Module {
    file: String,
    /// The paths that are imported, and their names here.
    uses: Vec<(Path, String)>,
    /// Paths elsewhere in the text.
    inline: Vec<Path>,
}

impl Module {
    /// Reads what ships of a file.
    fn read(file: &File) -> Self {
        let tests = file.text.find("\n#[cfg(test)]\nmod tests");
        let words = words(&file.text[..tests.unwrap_or(file.text.len())]);
        let mut module = Self { file: file.path.clone(), ..Self::default() };
        let mut at = 0;
        while at < words.len() {
            // `use<'a>` of a return type imports nothing.
            if words[at] == "use" && words.get(at + 1).is_none_or(|word| word != "<") {
                at = use_tree(&words, at + 1, &Vec::new(), &mut module.uses);
                continue;
            }
            let mut path = Vec::new();
            while is_name(&words[at]) {
                path.push(words[at].clone());
                let goes_on = words.get(at + 1).is_some_and(|word| word == "::")
                    && words.get(at + 2).is_some_and(|word| is_name(word));
                if !goes_on {
                    break;
                }
                at += 2;
            }
            // `pub(in PATH)` uses nothing.
            let is_visibility = at > 0 && path.len() > 1 && {
                let before = at - 2 * (path.len() - 1);
                before > 1 && words[before - 1] == "in" && words[before - 2] == "("
            };
            if path.len() > 1 && !is_visibility {
                module.inline.push(path);
            }
            at += 1;
        }
        module
    }
}

/// The modules of a crate, by their paths; its root is `""`.
struct Crate(BTreeMap<String, Module>);

impl Crate {
    fn read<'a>(dir: &str, files: impl Iterator<Item = &'a File>) -> Self {
        let source = format!("{dir}/src/");
        let mut modules = BTreeMap::new();
        let mut of_tests = BTreeSet::new();
        for file in files.filter(|file| file.is_rust() && !file.is_test()) {
            let Some(path) = file.path.strip_prefix(&source) else { continue };
            let path = path.trim_end_matches(".rs");
            let path = path.trim_end_matches("/mod").replace('/', "::");
            let path = if path == "lib" { String::new() } else { path };
            if path == "main" {
                continue; // a crate of its own
            }
            for (_, after) in file.text.match_indices("\n#[cfg(test)]\n").filter_map(|(at, it)| {
                let line = file.text[at + it.len()..].lines().next()?;
                Some((at, line.split_once("mod ")?.1.strip_suffix(';')?))
            }) {
                of_tests.insert(if path.is_empty() {
                    after.to_owned()
                } else {
                    format!("{path}::{after}")
                });
            }
            modules.insert(path, Module::read(file));
        }
        modules.retain(|path, _| !of_tests.contains(path));
        Self(modules)
    }

    /// The path from the crate's root that `path` is in `module`; `None`: it is of another crate.
    fn absolute(&self, module: &str, path: &[String]) -> Option<Path> {
        let mut base: Path =
            module.split("::").filter(|it| !it.is_empty()).map(Into::into).collect();
        let mut rest = path;
        match rest.first()?.as_str() {
            "crate" => return Some(rest[1..].to_vec()),
            "self" => rest = &rest[1..],
            "super" => {
                while rest.first().is_some_and(|it| it == "super") {
                    base.pop();
                    rest = &rest[1..];
                }
            }
            first => {
                base.push(first.into());
                let is_child = self.0.contains_key(&base.join("::"));
                base.pop();
                if !is_child {
                    return None;
                }
            }
        }
        base.extend_from_slice(rest);
        Some(base)
    }

    /// The module in which `path` is defined: re-exports are followed. `steps` ends circles.
    fn definer(&self, path: &[String], steps: u32) -> String {
        let cut = (0..=path.len()).rev().find(|&n| self.0.contains_key(&path[..n].join("::")));
        let cut = cut.expect("the root is a module");
        let module = path[..cut].join("::");
        let named = path.get(cut).filter(|_| steps > 0).and_then(|name| {
            let (from, _) = self.0[&module].uses.iter().find(|(_, alias)| alias == name)?;
            let mut whole = self.absolute(&module, from)?;
            whole.extend_from_slice(&path[cut + 1..]);
            (whole != path).then_some(whole)
        });
        named.map_or(module, |whole| self.definer(&whole, steps - 1))
    }

    /// Uses of other modules by each module: the path as it is written, and its module.
    fn arrows(&self) -> Vec<(String, String, String)> {
        let mut arrows = Vec::new();
        for (name, module) in &self.0 {
            let imported = module.uses.iter().map(|(path, _)| path.clone());
            let inline = module.inline.iter().map(|path| {
                let (head, rest) = path.split_first().expect("a path has a name");
                let known = module.uses.iter().find(|(_, alias)| alias == head);
                let mut whole = known.map_or_else(|| vec![head.clone()], |(path, _)| path.clone());
                whole.extend_from_slice(rest);
                whole
            });
            for path in imported.chain(inline) {
                if let Some(whole) = self.absolute(name, &path) {
                    let definer = self.definer(&whole, 8);
                    arrows.push((name.clone(), path.join("::"), definer));
                }
            }
        }
        arrows
    }
}

/// The arrows up, and modules without a room.
fn arrows_up(house: &House, modules: &Crate) -> Vec<String> {
    let mut findings = BTreeSet::new();
    for (module, of) in modules.0.iter().filter(|(module, _)| !module.is_empty()) {
        if house.room_of(module).is_none() {
            findings.insert(format!("{}: give it a room in tidy/rooms.rs", of.file));
        }
    }
    for (module, path, definer) in modules.arrows() {
        let Some(own) = house.room_of(&module) else { continue };
        let above = house.room_of(&definer);
        if above.is_none_or(|above| above < own) {
            let (own, file) = (house.rooms[own].0, &modules.0[&module].file);
            let above = above.map_or("the crate's root", |above| house.rooms[above].0);
            findings.insert(format!("{file}: `{path}`: {own} is below {above}"));
        }
    }
    findings.into_iter().collect()
}

#[test]
fn no_room_uses_one_above_it() {
    let files = repository();
    for house in HOUSES {
        let modules = Crate::read(house.crate_dir, files.iter());
        let arrows = modules.arrows();
        assert!(arrows.len() > 300, "only {} arrows found: the scan is broken", arrows.len());
        for entry in house.rooms.iter().flat_map(|(_, entries)| *entries) {
            assert!(
                modules.0.contains_key(*entry),
                "{}: there is no module {entry}",
                house.crate_dir
            );
        }
        expect_none("arrows up between rooms", &arrows_up(house, &modules));
    }
}

#[test]
fn the_map_says_the_same_order_of_rooms() {
    let map = fs::read_to_string(root().join("ARCHITECTURE.md")).expect("the map exists");
    let map = map.split_whitespace().collect::<Vec<_>>().join(" ");
    for house in HOUSES {
        let names: Vec<_> = house.rooms.iter().map(|(name, _)| format!("`{name}`")).collect();
        let order = names.join(" > ");
        assert!(map.contains(&order), "ARCHITECTURE.md does not say: {order}");
    }
}

#[test]
fn an_arrow_up_is_found_however_it_is_written() {
    let house = House {
        crate_dir: "x",
        rooms: &[("top", &["top"]), ("low", &["low"]), ("base", &["base"])],
    };
    let found = |low: &str| {
        let file = |path: &str, text: &str| File { path: path.into(), text: text.into() };
        let files = [
            file("x/src/lib.rs", "mod base;\nmod low;\nmod top;\npub use top::Thing;\n"),
            file("x/src/top/mod.rs", "pub mod part;\npub use part::Part;\npub struct Thing;\n"),
            file("x/src/top/part.rs", "use crate::low::Low;\npub struct Part;\n"),
            file("x/src/low/mod.rs", "mod deep;\npub use crate::base::Base;\n"),
            file("x/src/low/deep.rs", low),
            file("x/src/base.rs", "pub struct Base;\n"),
        ];
        arrows_up(&house, &Crate::read("x", files.iter()))
    };
    for up in [
        "use crate::top::Thing;",
        "use crate::{base::Base, top::{self, Part as Other}};",
        "fn f(_: &crate::top::part::Part) {}",
        "use super::super::top;",
        "fn f() -> super::super::top::Thing { todo }",
        "use crate::Thing;",
        "const C: char = '\"'; use crate::top::Thing; const D: char = '\"';",
    ] {
        assert!(!found(up).is_empty(), "{up}");
    }
    for fine in [
        "use crate::base::Base;",
        "use super::Base;",
        "// crate::top::Thing\nconst TEXT: &str = \"crate::top::Thing\";",
        "fn f<'a>(_: &'a other::top::Thing) {}",
        "use crate::base::Base;\n#[cfg(test)]\nmod tests {\n    use crate::top::Thing;\n}",
    ] {
        assert_eq!(found(fine), Vec::<String>::new(), "{fine}");
    }
}
