//! The style of CONTRIBUTING.md, as far as a program can check it. Walks the repository.
//!
//! Three lists below are ratchets: they name what does not yet keep the rule, and may only shrink.

#[path = "tidy/links.rs"]
mod links;
#[path = "tidy/rooms.rs"]
mod rooms;
#[path = "tidy/sentences.rs"]
mod sentences;

use nightporter_core::drops::DropReason;
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

/// Longest line of a Rust file, in characters.
const COLUMNS_MAX: usize = 100;
/// Longest production part of a file (before its `#[cfg(test)]`), in lines.
const FILE_LINES_MAX: usize = 600;
/// Longest production function, in lines from `fn` to its closing brace.
const FUNCTION_LINES_MAX: usize = 70;

/// Ratchet: files over [`FILE_LINES_MAX`], with their length today.
const LONG_FILES: &[(&str, usize)] = &[];
/// Ratchet: functions over [`FUNCTION_LINES_MAX`] as `file:function`, with their length today.
const LONG_FUNCTIONS: &[(&str, usize)] = &[];
/// Ratchet: the only files that may contain `unsafe`.
const UNSAFE_FILES: &[&str] = &[
    "attach/src/bpf.rs",
    "attach/src/tap.rs",
    "boost/src/sys.rs",
    "daemon/src/sockets/ucx/ucp.rs",
    "daemon/src/sys.rs",
    "guest/flood/src/libbpf.rs",
    "guest/flood/src/packet.rs",
    "guest/src/bpf.rs",
    "guest/src/ioctl.rs",
    "guest/src/vectors.rs",
    "guest/toe/common/src/sys.rs",
    "guest/toe/launcher/watch.rs",
    "guest/toe/src/calls.rs",
    "guest/toe/src/calls/data.rs",
    "guest/toe/suite/fork.rs",
    "lab/src/sys.rs",
    "lab/uml/src/lib.rs",
    "lab/uml/src/tests.rs",
];

/// Words that promise what no test measures, or mark work left undone, with what to do instead.
const BANNED: &[(&str, &str)] = &[
    ("FIXME", "fix it, or open an issue"),
    ("TODO", "do it, or open an issue"),
    ("<<<<<<<", "say what is true of both"),
    (">>>>>>>", "say what is true of both"),
    ("dbg!", "use tracing, or a test"),
    ("#[should_panic", "a survey of mutations takes the first panic of a test for a mutation"),
    ("blazing", "give the number and its command"),
    ("seamless", "say what changes for the user"),
    ("state-of-the-art", "give the number and its command"),
    ("production-ready", "say what was tested"),
    ("world-class", "say what was tested"),
    ("tcp-spec", "name the rule, or docs/spec.md"),
    ("/home/", "paths of one machine do not belong here"),
    ("/root/", "paths of one machine do not belong here"),
];

/// One file of the repository.
struct File {
    /// Path from the root of the repository, with `/`.
    path: String,
    text: String,
}

impl File {
    fn is_rust(&self) -> bool {
        Path::new(&self.path).extension().is_some_and(|e| e == "rs")
    }

    /// Tests and benches in files of their own, as opposed to what ships.
    fn is_test(&self) -> bool {
        self.path.split('/').any(|part| ["tests", "benches", "tests.rs"].contains(&part))
    }

    /// The line count before the unit tests; 0 if all of the file is test.
    fn production_lines(&self) -> usize {
        if self.is_test() {
            return 0;
        }
        let lines = self.text.lines().enumerate();
        let mut tests = lines.filter(|(_, line)| line.trim_end() == "#[cfg(test)]");
        tests.next().map_or_else(|| self.text.lines().count(), |(i, _)| i)
    }

    /// The functions that ship: name and length in lines. Relies on rustfmt's indentation.
    fn functions(&self) -> Vec<(&str, usize)> {
        let lines: Vec<&str> = self.text.lines().take(self.production_lines()).collect();
        let mut found = Vec::new();
        for (start, line) in lines.iter().enumerate() {
            let body = line.trim_start();
            let Some(at) = body.find("fn ").filter(|&at| {
                body[..at].split_whitespace().all(|word| {
                    word.starts_with("pub")
                        || ["const", "unsafe", "async", "extern", "\"C\"", "in"].contains(&word)
                })
            }) else {
                continue;
            };
            let name = body[at + 3..].split(['(', '<']).next().unwrap_or_default();
            let close = format!("{}}}", &line[..line.len() - body.len()]);
            let length = lines[start..].iter().position(|l| *l == close).map_or(1, |n| n + 1);
            found.push((name, if line.ends_with(['}', ';']) { 1 } else { length }));
        }
        found
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("core is a member").to_path_buf()
}

/// Every text file of the repository outside `target/` and `.git/`, in path order.
fn repository() -> Vec<File> {
    let mut files = Vec::new();
    let mut dirs = vec![root()];
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(&dir).expect("readable").map(|e| e.expect("readable")) {
            let path = entry.path();
            let name = entry.file_name();
            let kind = entry.file_type().expect("a file type");
            if kind.is_dir() && name != "target" && name != ".git" {
                dirs.push(path);
            } else if kind.is_file() && name != ".git" {
                let relative = path.strip_prefix(root()).expect("below the root");
                let path_text = relative.to_string_lossy().into_owned();
                if let Ok(text) = fs::read_to_string(&path) {
                    files.push(File { path: path_text, text });
                }
            }
        }
    }
    files.sort_by(|a, b| a.path.cmp(&b.path));
    assert!(files.iter().filter(|f| f.is_rust()).count() > 5, "the walk found no sources");
    files
}

/// Fails with one line per finding.
fn expect_none(rule: &str, findings: &[String]) {
    assert!(findings.is_empty(), "{rule}:\n{}", findings.join("\n"));
}

/// Compares what is over a limit with its ratchet list, both ways.
fn expect_ratchet(over: &[(String, usize)], allowed: &[(&str, usize)], limit: usize) {
    let mut findings = Vec::new();
    for (name, length) in over {
        let allowance = allowed.iter().find(|(n, _)| n == name).map_or(limit, |(_, n)| *n);
        if *length > allowance {
            findings.push(format!("{name}: {length} lines, allowed {allowance}: split it"));
        } else if *length < allowance {
            findings.push(format!("{name}: shrunk to {length}: lower its entry in tidy.rs"));
        }
    }
    for (name, _) in allowed.iter().filter(|(a, _)| !over.iter().any(|(n, _)| n == a)) {
        findings.push(format!("{name}: within the limit now: remove its entry from tidy.rs"));
    }
    expect_none("too long", &findings);
}

#[test]
fn lines_have_at_most_100_columns() {
    let mut findings = Vec::new();
    for file in repository().iter().filter(|f| f.is_rust()) {
        for (i, line) in file.text.lines().enumerate() {
            let columns = line.chars().count();
            if columns > COLUMNS_MAX {
                findings.push(format!("{}:{}: {columns} columns", file.path, i + 1));
            }
        }
    }
    expect_none("too wide", &findings);
}

#[test]
fn every_rust_file_opens_with_a_module_header() {
    let files = repository();
    // The `tests.rs` of a module needs no words of its own.
    let rust = files.iter().filter(|f| f.is_rust() && !f.path.ends_with("/tests.rs"));
    let bare = rust.filter(|f| !f.text.starts_with("//! "));
    expect_none("no `//!` header", &bare.map(|f| f.path.clone()).collect::<Vec<_>>());
}

#[test]
fn production_files_are_short() {
    let files = repository();
    let lengths = files.iter().filter(|f| f.is_rust()).map(|f| (&f.path, f.production_lines()));
    let over = lengths.filter(|(_, n)| *n > FILE_LINES_MAX).map(|(p, n)| (p.clone(), n));
    expect_ratchet(&over.collect::<Vec<_>>(), LONG_FILES, FILE_LINES_MAX);
}

#[test]
fn production_functions_are_short() {
    let mut over = Vec::new();
    let mut seen = 0;
    for file in repository().iter().filter(|f| f.is_rust()) {
        for (name, length) in file.functions() {
            seen += 1;
            if length > FUNCTION_LINES_MAX {
                over.push((format!("{}:{name}", file.path), length));
            }
        }
    }
    assert!(seen > 20, "only {seen} functions found: the scan is broken");
    expect_ratchet(&over, LONG_FUNCTIONS, FUNCTION_LINES_MAX);
}

#[test]
fn unsafe_stays_in_its_few_files() {
    let files = repository();
    let has = |f: &&File| {
        let code = f.text.lines().map(|l| l.split("//").next().unwrap_or_default());
        f.is_rust() && code.flat_map(|l| l.split_whitespace()).any(|word| word == "unsafe")
    };
    let found: Vec<&str> = files.iter().filter(has).map(|f| f.path.as_str()).collect();
    assert_eq!(found, UNSAFE_FILES, "left: files with unsafe; right: files allowed to have it");
}

#[test]
fn no_test_sleeps() {
    let mut findings = Vec::new();
    let repository = repository();
    let files = repository.iter().filter(|f| f.is_rust() && !f.path.contains("/benches/"));
    for file in files {
        for (i, line) in file.text.lines().enumerate().skip(file.production_lines()) {
            if line.contains(concat!("sleep", "(")) {
                findings.push(format!("{}:{}: wait on a condition", file.path, i + 1));
            }
        }
    }
    expect_none("tests that sleep", &findings);
}

#[test]
fn banned_words_stay_out() {
    let mut findings = String::new();
    let text = ["rs", "md", "toml", "sh"].map(std::ffi::OsStr::new);
    for file in repository().iter().filter(|f| f.path != "core/tests/tidy.rs") {
        if !Path::new(&file.path).extension().is_some_and(|e| text.contains(&e)) {
            continue;
        }
        for (i, line) in file.text.lines().enumerate() {
            for (word, instead) in BANNED.iter().filter(|(word, _)| line.contains(word)) {
                let _ = writeln!(findings, "{}:{}: `{word}`: {instead}", file.path, i + 1);
            }
        }
    }
    assert!(findings.is_empty(), "banned words:\n{findings}");
}

#[test]
fn every_drop_reason_is_documented() {
    let page = fs::read_to_string(root().join("docs/drop-reasons.md")).expect("the page exists");
    let rows = DropReason::ALL.iter().map(|r| format!("| `{}` | {} |", r.label(), r.doc().trim()));
    let missing: Vec<String> = rows.filter(|row| !page.contains(row)).collect();
    expect_none("add to docs/drop-reasons.md", &missing);
}

#[test]
fn every_test_that_the_hardening_page_names_exists() {
    let page = fs::read_to_string(root().join("docs/hardening.md")).expect("the page exists");
    let is_one = |word: &&str| word.matches('_').count() >= 3 && !word.contains([' ', '.']);
    let named = page.split('`').skip(1).step_by(2).filter(is_one);
    // In the list of intruder.rs a test is a name and what it tries.
    let files = repository();
    let exists = |name: &str| {
        let (function, entry) = (format!("fn {name}("), format!("\"{name}\""));
        let has = |text: &str| text.contains(&function) || text.contains(&entry);
        files.iter().any(|f| f.is_rust() && has(&f.text))
    };
    let missing: Vec<_> = named.filter(|name| !exists(name)).map(String::from).collect();
    expect_none("docs/hardening.md names tests that do not exist", &missing);
}

#[test]
fn each_row_of_the_threat_model_has_a_test() {
    let page = fs::read_to_string(root().join("docs/hardening.md")).expect("the page exists");
    let mut bare = Vec::new();
    let mut rows = 0;
    for table in page.split("| He | Test |\n|---|---|\n").skip(1) {
        for row in table.lines().take_while(|line| line.starts_with('|')) {
            let (he, tests) = row[2..].split_once(" | ").expect("two cells");
            rows += 1;
            // A possible attack needs no test.
            if !tests.contains('`') && !he.starts_with("**can**") {
                bare.push(he.to_owned());
            }
        }
    }
    assert!(rows > 40, "only {rows} rows found: the scan is broken");
    expect_none("docs/hardening.md has claims that no test shows", &bare);
}

/// Where the rules of the specification are.
const SPEC: &str = "docs/spec.md";

/// The rule that `text` begins with, as in `SNOOP-24`: its family and its number.
fn rule_at(text: &str) -> Option<(&str, u32)> {
    let family = &text[..text.find(|c: char| !c.is_ascii_uppercase())?];
    let (number, rest) = text[family.len()..].strip_prefix('-')?.split_at_checked(2)?;
    let ends = !rest.starts_with(|c: char| c.is_alphanumeric() || c == '_');
    let digits = number.bytes().all(|b| b.is_ascii_digit());
    if family.is_empty() || !digits || !ends { None } else { Some((family, number.parse().ok()?)) }
}

/// The rules that a line cites: by their IDs, all from one to another ("SNOOP-01 to SNOOP-03"), and
/// in names of tests (`fn snoop_01_...`).
fn rules_cited(line: &str) -> Vec<String> {
    let mut cited = Vec::new();
    let starts = |at: usize| {
        let before = line[..at].chars().next_back();
        !before.is_some_and(|c| c.is_alphanumeric() || c == '_' || c == '-')
    };
    for (at, _) in line.char_indices().filter(|(at, _)| starts(*at)) {
        let Some((family, first)) = rule_at(&line[at..]) else { continue };
        let behind = &line[at + family.len() + 3..];
        let range = behind.strip_prefix(" to ").and_then(rule_at).filter(|(f, _)| *f == family);
        let last = range.map_or(first, |(_, last)| last);
        cited.extend((first..=last).map(|n| format!("{family}-{n:02}")));
    }
    let named = line.trim_start().strip_prefix("fn ").and_then(|name| {
        let (family, rest) = name.split_once('_')?;
        let (number, _) = rest.split_once('_')?;
        let id = format!("{}-{number}", family.to_ascii_uppercase());
        rule_at(&id).is_some().then_some(id)
    });
    cited.extend(named);
    cited
}

#[test]
fn a_rule_is_found_however_it_is_cited() {
    assert_eq!(rules_cited("(SNOOP-24, INV-03): x"), ["SNOOP-24", "INV-03"]);
    assert_eq!(rules_cited("INV-01 to INV-03"), ["INV-01", "INV-02", "INV-03", "INV-03"]);
    assert_eq!(rules_cited("    fn p_09_sums() {"), ["P-09"]);
    let others = "RFC-2119, INV-1, INV-001, xINV-01, -INV-01, INV-01x; fn p09_sums(), let p_09_x";
    assert!(rules_cited(others).is_empty(), "{:?}", rules_cited(others));
}

#[test]
fn every_rule_that_is_cited_is_in_the_specification_and_the_other_way_round() {
    let spec = fs::read_to_string(root().join(SPEC)).expect("the specification exists");
    let defined: BTreeSet<String> = spec
        .split("**")
        .filter_map(rule_at)
        .map(|(family, number)| format!("{family}-{number:02}"))
        .collect();
    let mut findings = Vec::new();
    let mut unused = defined.clone();
    for file in repository() {
        if !file.is_rust() && Path::new(&file.path).extension().is_none_or(|e| e != "md") {
            continue;
        }
        for (i, line) in file.text.lines().enumerate() {
            for id in rules_cited(line) {
                if !defined.contains(&id) {
                    findings.push(format!("{}:{}: {SPEC} has no {id}", file.path, i + 1));
                } else if file.path != SPEC {
                    unused.remove(&id);
                }
            }
        }
    }
    findings.extend(unused.iter().map(|id| format!("{SPEC}: nothing cites {id}: remove it")));
    expect_none("rules", &findings);
}

#[test]
fn every_member_is_in_the_map_and_keeps_the_lints() {
    let manifest = fs::read_to_string(root().join("Cargo.toml")).expect("readable");
    let map = fs::read_to_string(root().join("ARCHITECTURE.md")).expect("the map exists");
    let list = manifest.split_once("members = [").and_then(|(_, rest)| rest.split_once("\n]"));
    let members: Vec<&str> =
        list.expect("members").0.lines().filter_map(|l| l.split('"').nth(1)).collect();
    assert!(members.contains(&"core"), "the list of members was not understood: {members:?}");
    for member in members {
        assert!(map.contains(&format!("`{member}/`")), "`{member}/` is not in ARCHITECTURE.md");
        let own = fs::read_to_string(root().join(member).join("Cargo.toml")).expect("readable");
        assert!(own.contains("[lints]\nworkspace = true"), "{member} does not keep the lints");
    }
}
