//! A copy of a crate and of those that run it, with all mutations in it, built once.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::Permissions;
use std::hash::{DefaultHasher, Hasher as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, bail, ensure};
use serde::Deserialize;

use super::source::{Edit, Mutated, mutate};

/// Which mutation is on, by its number from 1; none or 0: the crate as it is.
pub const VARIABLE: &str = "NIGHTPORTER_MUTANT";

/// Set for tests: the first panic ends the program and names the test, past libtest's capture.
/// More failures would only take time. The simulator's panics are caught by itself.
pub const FIRST_PANIC: &str = "NIGHTPORTER_FIRST_PANIC";

/// A crate that can be broken, and its judges.
#[derive(Clone, Copy, Debug)]
pub struct Subject {
    /// Its folder.
    pub folder: &'static str,
    package: &'static str,
    /// The crates that are copied: it, those that it needs, and those that run it.
    members: &'static [&'static str],
    /// Folders that its tests read.
    read: &'static [&'static str],
    /// Its test programs, the quickest first; the style (`tidy`) is no judge of behaviour.
    tests: &'static [&'static str],
    /// Whether the simulator's seeds may judge it.
    pub has_seeds: bool,
}

/// The test program of a crate's library.
const LIB: &str = "--lib";

/// The crates that can be broken.
const SUBJECTS: &[Subject] = &[
    Subject {
        folder: "core",
        package: "nightporter-core",
        members: &["core", "check", "plot", "testkit", "sim"],
        read: &["docs"],
        tests: &["scenarios", "two_party", "rules", LIB],
        has_seeds: true,
    },
    Subject {
        folder: "daemon",
        package: "nightporterd",
        members: &["daemon", "api", "attach", "boost", "core", "check", "testkit", "registry"],
        read: &["docs", "examples", "packaging"],
        tests: &[LIB, "vhost_user"], // in one process each: nothing of it outlives a panic
        has_seeds: false,
    },
    Subject {
        folder: "registry",
        package: "nightporter-registry",
        members: &["registry"],
        read: &[],
        tests: &[LIB],
        has_seeds: false,
    },
];

impl Subject {
    /// The crate that a file or folder of the repository is in.
    ///
    /// # Errors
    /// If it is none that can be broken.
    pub fn of(path: &str) -> anyhow::Result<Self> {
        let folder = path.split('/').next().unwrap_or_default();
        let found = SUBJECTS.iter().find(|subject| subject.folder == folder).copied();
        found.with_context(|| format!("{path} is in none of the crates that can be broken"))
    }

    /// The path of a file of it below its sources.
    ///
    /// # Errors
    /// If it is of another crate.
    pub fn below<'f>(&self, file: &'f str) -> anyhow::Result<&'f str> {
        let below = file.strip_prefix(self.folder).and_then(|rest| rest.strip_prefix("/src/"));
        below.with_context(|| format!("{file} is no source of {}", self.folder))
    }
}

/// The module that is added to the copy.
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

/// Rounds of leaving out mutations that do not compile: an error of one kind hides those of the
/// next.
const ROUNDS: usize = 12;

/// Changes by file below the crate's `src`.
pub type Edits = BTreeMap<String, Vec<Edit>>;

/// The result of a build.
#[derive(Clone, Debug)]
pub struct Built {
    /// The simulator, if seeds are to judge.
    pub simulator: Option<PathBuf>,
    /// The test programs, in the order of the subject's.
    pub tests: Vec<PathBuf>,
    /// The copy of the crate.
    pub dir: PathBuf,
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

/// Each test runs but once or twice here, so that optimising more takes longer than it gives.
const OPTIMISED: &str = "profile.sim.opt-level=1";

/// The folders of a build.
struct Workshop<'a> {
    subject: Subject,
    root: &'a Path,
    copy: PathBuf,
    target: PathBuf,
    compiler: PathBuf,
}

/// Copies the crate and those that it is built with below `dir`, with `edits`, and builds its
/// tests, and the simulator if seeds are to judge.
///
/// # Errors
/// What could not be read, written or built.
pub fn build(
    subject: Subject,
    root: &Path,
    dir: &Path,
    mut edits: Edits,
    with_seeds: bool,
) -> anyhow::Result<Built> {
    let (copy, target) = (dir.join("source"), dir.join("target"));
    let shop = Workshop { subject, root, copy, target, compiler: dir.join("compiler") };
    let mut hasher = DefaultHasher::new();
    let sources = shop.lay_out(&mut hasher)?;
    let version = format!("{:016x}", hasher.finish());
    let (mut left_out, mut uncompilable) = (BTreeSet::new(), BTreeSet::new());
    let mut programs = None;
    for _ in 0..ROUNDS {
        let mut mutated = BTreeMap::new();
        for (file, source) in &sources {
            let m = mutate(source, edits.get(file).map_or(&[], Vec::as_slice));
            left_out.extend(&m.left_out);
            let module = if file == "lib.rs" { MODULE } else { "" };
            let path = format!("{}/src/{file}", subject.folder);
            put(&shop.copy.join(&path), &format!("{}{module}", m.text))?;
            mutated.insert(path, m);
        }
        let (messages, broken) = shop.tests(&mutated)?;
        if broken.is_empty() {
            programs = Some(messages);
            break;
        }
        edits.values_mut().for_each(|edits| edits.retain(|e| !broken.contains(&e.n)));
        uncompilable.extend(broken);
    }
    let programs = programs.context("the mutated crate does not compile")?;
    let tests = shop.programs(programs)?;
    let simulator = with_seeds.then(|| shop.simulator()).transpose()?;
    let dir = shop.copy.join(subject.folder);
    Ok(Built { simulator, tests, dir, left_out, uncompilable, version })
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
    /// Copies everything but the sources of the crate, which it returns by their path below its
    /// `src`.
    fn lay_out(&self, hasher: &mut DefaultHasher) -> anyhow::Result<BTreeMap<String, String>> {
        let mut sources = BTreeMap::new();
        for (file, text) in files(self.root, self.subject.members)? {
            hasher.write(text.as_bytes());
            match self.subject.below(&file) {
                Ok(file) => drop(sources.insert(file.to_owned(), text)),
                Err(_) => put(&self.copy.join(file), &text)?,
            }
        }
        for (file, text) in files(self.root, self.subject.read)? {
            put(&self.copy.join(file), &text)?;
        }
        let manifest = std::fs::read_to_string(self.root.join("Cargo.toml"))?;
        let (head, rest) = manifest.split_once("members = [").context("no members")?;
        let (_, tail) = rest.split_once("]\n").context("no end of members")?;
        let manifest = format!("{head}members = {:?}\n{tail}", self.subject.members);
        put(&self.copy.join("Cargo.toml"), &manifest)?;
        std::fs::copy(self.root.join("Cargo.lock"), self.copy.join("Cargo.lock"))?;
        put(&self.compiler, COMPILER)?;
        std::fs::set_permissions(&self.compiler, Permissions::from_mode(0o755))?;
        Ok(sources)
    }

    fn command(&self, args: &[&str]) -> anyhow::Result<Command> {
        let mut cargo = Command::new(std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned()));
        cargo.args(args).args(["--quiet", "--config", OPTIMISED]);
        cargo.env("RUSTC_WORKSPACE_WRAPPER", &self.compiler);
        let shared = std::env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
        let shared = shared.unwrap_or_else(|| self.root.join("target"));
        cargo.env("CARGO_BUILD_BUILD_DIR", std::path::absolute(shared)?);
        cargo.env("CARGO_TARGET_DIR", &self.target).current_dir(&self.copy);
        Ok(cargo)
    }

    /// Cargo's messages, and if not all went well, what it says besides.
    fn messages(&self, args: &[&str]) -> anyhow::Result<(Vec<Message>, Option<String>)> {
        let mut cargo = self.command(args)?;
        let output = cargo.arg("--message-format=json").output().context("run cargo")?;
        let text = String::from_utf8_lossy(&output.stdout);
        let messages = text.lines().filter_map(|line| serde_json::from_str(line).ok());
        let said = || String::from_utf8_lossy(&output.stderr).into_owned();
        Ok((messages.collect(), (!output.status.success()).then(said)))
    }

    /// Builds the tests. The mutations that the compiler's errors speak of: if there are any, it
    /// ends before it has made code.
    fn tests(
        &self,
        mutated: &BTreeMap<String, Mutated>,
    ) -> anyhow::Result<(Vec<Message>, BTreeSet<usize>)> {
        let package = format!("--package={}", self.subject.package);
        let mut args = vec!["test", "--no-run", "--profile=sim", &package];
        args.extend(self.subject.tests.iter().flat_map(|name| match *name {
            LIB => vec![LIB],
            name => vec!["--test", name],
        }));
        let (messages, failure) = self.messages(&args)?;
        let mut broken = BTreeSet::new();
        let diagnostics = messages.iter().filter_map(|m| m.message.as_ref());
        for error in diagnostics.filter(|d| d.level == "error") {
            let primary = error.spans.iter().filter(|s| s.is_primary);
            let named =
                primary.filter_map(|s| Some(mutated.get(&s.file_name)?.at_line(s.line_start)));
            let named: Vec<usize> = named.flatten().collect();
            let about_all = error.spans.is_empty(); // "aborting due to 3 previous errors"
            let text = error.rendered.as_deref().unwrap_or_default();
            ensure!(about_all || !named.is_empty(), "the crate as it is does not compile:\n{text}");
            broken.extend(named);
        }
        if let Some(said) = failure {
            ensure!(!broken.is_empty(), "cargo test --no-run fails and names no place:\n{said}");
        }
        Ok((messages, broken))
    }

    /// The test programs of a build's messages.
    fn programs(&self, messages: Vec<Message>) -> anyhow::Result<Vec<PathBuf>> {
        let programs: BTreeMap<String, PathBuf> = messages
            .into_iter()
            .filter_map(|m| Some((m.target?.name.replace('-', "_"), m.executable?)))
            .collect();
        let library = self.subject.package.replace('-', "_");
        let names =
            self.subject.tests.iter().map(|&name| if name == LIB { &library } else { name });
        names
            .map(|name| programs.get(name).cloned().with_context(|| format!("no {name}")))
            .collect()
    }

    fn simulator(&self) -> anyhow::Result<PathBuf> {
        let what = ["build", "--package=nightporter-sim", "--profile=sim"];
        if let (_, Some(said)) = self.messages(&what)? {
            bail!("the simulator does not build with the mutated core:\n{said}");
        }
        Ok(self.target.join("sim/nightporter-sim"))
    }
}

/// The text files below `folders` of `root`, by their path below it.
fn files(root: &Path, folders: &[&str]) -> anyhow::Result<BTreeMap<String, String>> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_has_all_crates_that_it_needs() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let read = |file: String| std::fs::read_to_string(root.join(file)).unwrap();
        let all = read("Cargo.toml".into());
        for subject in SUBJECTS {
            for member in subject.members {
                let manifest = read(format!("{member}/Cargo.toml"));
                let needed =
                    manifest.lines().filter_map(|line| line.strip_suffix(".workspace = true"));
                for name in needed.filter(|name| name.starts_with("nightporter")) {
                    let (_, folder) = all.split_once(&format!("\n{name} = {{ path = \"")).unwrap();
                    let folder = folder.split('"').next().unwrap();
                    assert!(subject.members.contains(&folder), "{folder}, for {member}");
                }
            }
        }
    }
}
