//! A copy of `core` and the simulator with all mutations in it, built once.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::Permissions;
use std::hash::{DefaultHasher, Hasher as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};
use serde::Deserialize;

use super::source::{Edit, Mutated, mutate};

/// Which mutation is on, by its number from 1; none or 0: `core` as it is.
pub const VARIABLE: &str = "NIGHTPORTER_MUTANT";

/// Set for tests: the first panic ends the program and names the test, past libtest's capture.
/// More failures would only take time. The simulator's panics are caught by itself.
pub const FIRST_PANIC: &str = "NIGHTPORTER_FIRST_PANIC";

/// The crates that are copied: `core`, and those that run it.
const MEMBERS: [&str; 4] = ["core", "check", "testkit", "sim"];

/// The module that is added to the copy of `core`.
const MODULE: &str = r#"
#[allow(missing_docs)]
pub mod mutant {
    use std::io::Write as _;
    pub fn on() -> u32 {
        static ON: std::sync::OnceLock<u32> = std::sync::OnceLock::new();
        *ON.get_or_init(|| {
            let chosen = || std::env::var("NIGHTPORTER_MUTANT").ok()?.parse().ok();
            if std::env::var_os("NIGHTPORTER_FIRST_PANIC").is_some() {
                std::panic::set_hook(Box::new(|_| {
                    let thread = std::thread::current();
                    let name = thread.name().unwrap_or("?");
                    let _ = writeln!(std::io::stderr(), "first panic in {name}");
                    std::process::exit(101);
                }));
            }
            chosen().unwrap_or(0)
        })
    }
}
"#;

/// Test programs of `core`, the quickest first; the style (`tidy`) is no judge of behaviour.
const TESTS: [&str; 4] = ["scenarios", "two_party", "rules", LIB];
const LIB: &str = "nightporter_core";

/// Rounds of leaving out mutations that do not compile: an error of one kind hides those of the
/// next.
const ROUNDS: usize = 12;

/// Changes by file below `core/src`.
pub type Edits = BTreeMap<String, Vec<Edit>>;

/// The result of a build.
#[derive(Clone, Debug)]
pub struct Built {
    /// The simulator.
    pub simulator: PathBuf,
    /// The test programs of `core`, in the order of [`TESTS`].
    pub tests: Vec<PathBuf>,
    /// The copy of `core`.
    pub core: PathBuf,
    /// Mutations that this form cannot express.
    pub left_out: BTreeSet<usize>,
    /// Mutations that do not compile.
    pub uncompilable: BTreeSet<usize>,
    /// Of the sources as they were copied, mutations aside.
    pub version: String,
}

/// A mutation may violate a lint, but must not be a compiler error. The dependencies are compiled
/// as elsewhere, and so only once.
const COMPILER: &str = "#!/bin/sh\nexec \"$@\" --cap-lints=allow\n";

/// The simulator runs few seeds here, so that optimising more of it than `core` takes longer.
const SIMULATOR: &str = "profile.sim.package.nightporter-sim.opt-level=1";

/// The folders of a build.
struct Workshop<'a> {
    root: &'a Path,
    copy: PathBuf,
    target: PathBuf,
    compiler: PathBuf,
}

/// Copies [`MEMBERS`] below `dir`, with `edits`, and builds them.
///
/// # Errors
/// What could not be read, written or built.
pub fn build(root: &Path, dir: &Path, mut edits: Edits) -> anyhow::Result<Built> {
    let (copy, target) = (dir.join("source"), dir.join("target"));
    let shop = Workshop { root, copy, target, compiler: dir.join("compiler") };
    let mut hasher = DefaultHasher::new();
    let sources = shop.lay_out(&mut hasher)?;
    let version = format!("{:016x}", hasher.finish());
    let (mut left_out, mut uncompilable) = (BTreeSet::new(), BTreeSet::new());
    for round in 0.. {
        ensure!(round < ROUNDS, "the mutated core does not compile");
        let mut mutated = BTreeMap::new();
        for (file, source) in &sources {
            let m = mutate(source, edits.get(file).map_or(&[], Vec::as_slice));
            left_out.extend(&m.left_out);
            let module = if file == "lib.rs" { MODULE } else { "" };
            put(&shop.copy.join("core/src").join(file), &format!("{}{module}", m.text))?;
            mutated.insert(format!("core/src/{file}"), m);
        }
        let broken = shop.simulator(&mutated)?;
        if broken.is_empty() {
            break;
        }
        edits.values_mut().for_each(|edits| edits.retain(|e| !broken.contains(&e.n)));
        uncompilable.extend(broken);
    }
    let simulator = shop.target.join("sim/nightporter-sim");
    let (tests, core) = (shop.tests()?, shop.copy.join("core"));
    Ok(Built { simulator, tests, core, left_out, uncompilable, version })
}

/// A message of cargo's, as far as it matters here.
#[derive(Deserialize)]
struct Message {
    message: Option<Diagnostic>,
    target: Option<Target>,
    executable: Option<PathBuf>,
}

#[derive(Deserialize)]
struct Target {
    name: String,
}

#[derive(Deserialize)]
struct Diagnostic {
    level: String,
    rendered: Option<String>,
    spans: Vec<Span>,
}

#[derive(Deserialize)]
struct Span {
    file_name: String,
    line_start: usize,
    is_primary: bool,
}

impl Workshop<'_> {
    /// Copies everything but the sources of `core`, which it returns by their path below
    /// `core/src`.
    fn lay_out(&self, hasher: &mut DefaultHasher) -> anyhow::Result<BTreeMap<String, String>> {
        let mut sources = BTreeMap::new();
        for (file, text) in files(self.root, &MEMBERS)? {
            hasher.write(text.as_bytes());
            match file.strip_prefix("core/src/") {
                Some(file) => drop(sources.insert(file.to_owned(), text)),
                None => put(&self.copy.join(file), &text)?,
            }
        }
        for (file, text) in files(self.root, &["docs"])? {
            put(&self.copy.join(file), &text)?; // tests of core read them
        }
        let manifest = std::fs::read_to_string(self.root.join("Cargo.toml"))?;
        let (head, rest) = manifest.split_once("members = [").context("no members")?;
        let (_, tail) = rest.split_once("]\n").context("no end of members")?;
        let manifest = format!("{head}members = {MEMBERS:?}\n{tail}");
        put(&self.copy.join("Cargo.toml"), &manifest)?;
        std::fs::copy(self.root.join("Cargo.lock"), self.copy.join("Cargo.lock"))?;
        put(&self.compiler, COMPILER)?;
        std::fs::set_permissions(&self.compiler, Permissions::from_mode(0o755))?;
        Ok(sources)
    }

    fn command(&self, args: &[&str]) -> anyhow::Result<Command> {
        let mut cargo = Command::new(std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned()));
        cargo.args(args).args(["--quiet", "--config", SIMULATOR]);
        cargo.env("RUSTC_WORKSPACE_WRAPPER", &self.compiler);
        let shared = std::env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
        let shared = shared.unwrap_or_else(|| self.root.join("target"));
        cargo.env("CARGO_BUILD_BUILD_DIR", std::path::absolute(shared)?);
        cargo.env("CARGO_TARGET_DIR", &self.target).current_dir(&self.copy);
        Ok(cargo)
    }

    /// Cargo's messages, and whether all went well.
    fn messages(&self, args: &[&str]) -> anyhow::Result<(Vec<Message>, bool)> {
        let mut cargo = self.command(args)?;
        let output = cargo.arg("--message-format=json").output().context("run cargo")?;
        let text = String::from_utf8_lossy(&output.stdout);
        let messages = text.lines().filter_map(|line| serde_json::from_str(line).ok());
        Ok((messages.collect(), output.status.success()))
    }

    /// Builds the simulator. The mutations that the compiler's errors speak of: if there are any,
    /// it ends before it has made code.
    fn simulator(&self, mutated: &BTreeMap<String, Mutated>) -> anyhow::Result<BTreeSet<usize>> {
        let what = ["build", "--package=nightporter-sim", "--profile=sim"];
        let (messages, well) = self.messages(&what)?;
        let mut broken = BTreeSet::new();
        for error in messages.into_iter().filter_map(|m| m.message).filter(|d| d.level == "error") {
            let primary = error.spans.iter().filter(|s| s.is_primary);
            let named =
                primary.filter_map(|s| Some(mutated.get(&s.file_name)?.at_line(s.line_start)));
            let named: Vec<usize> = named.flatten().collect();
            let about_all = error.spans.is_empty(); // "aborting due to 3 previous errors"
            let text = error.rendered.unwrap_or_default();
            ensure!(about_all || !named.is_empty(), "the core as it is does not compile:\n{text}");
            broken.extend(named);
        }
        ensure!(well || !broken.is_empty(), "cargo build fails and names no place");
        Ok(broken)
    }

    fn tests(&self) -> anyhow::Result<Vec<PathBuf>> {
        let mut args = vec!["test", "--no-run", "--package=nightporter-core", "--profile=sim"];
        args.extend(TESTS.iter().flat_map(|name| match *name {
            LIB => vec!["--lib"],
            name => vec!["--test", name],
        }));
        let (messages, well) = self.messages(&args)?;
        ensure!(well, "the tests of the mutated core do not build");
        let programs: BTreeMap<String, PathBuf> = messages
            .into_iter()
            .filter_map(|m| Some((m.target?.name.replace('-', "_"), m.executable?)))
            .collect();
        let find = |name: &&str| programs.get(*name).cloned().with_context(|| format!("no {name}"));
        TESTS.iter().map(find).collect()
    }
}

/// The text files below `folders` of `root`, by their path below it.
pub(super) fn files(root: &Path, folders: &[&str]) -> anyhow::Result<BTreeMap<String, String>> {
    let mut found = BTreeMap::new();
    let mut left: Vec<String> = folders.iter().map(|&f| f.to_owned()).collect();
    while let Some(folder) = left.pop() {
        let path = root.join(&folder);
        for entry in path.read_dir().with_context(|| format!("read {}", path.display()))? {
            let entry = entry?;
            let below = format!("{folder}/{}", entry.file_name().to_string_lossy());
            if entry.file_type()?.is_dir() {
                left.push(below);
            } else if let Ok(text) = std::fs::read_to_string(entry.path()) {
                found.insert(below, text);
            }
        }
    }
    Ok(found)
}

/// Writes a file, unless it is there already as it should be: cargo goes by its time.
fn put(path: &Path, text: &str) -> anyhow::Result<()> {
    if std::fs::read_to_string(path).is_ok_and(|old| old == text) {
        return Ok(());
    }
    std::fs::create_dir_all(path.parent().unwrap_or(path))?;
    std::fs::write(path, text).with_context(|| format!("write {}", path.display()))
}
