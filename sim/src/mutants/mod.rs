//! The checks that check the checks: `core` broken in one way after the other.
//!
//! The sources of `core` know nothing of this. A copy of `core` and `sim` is made in which every
//! mutation of the table is there at once, behind a question which one is on; it is built once, and
//! run once per mutation until a seed notices.

mod table;

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, bail, ensure};
pub use table::{MUTATIONS, Mutation};

/// Which mutation is on, by its number from 1; none or 0: `core` as it is.
const VARIABLE: &str = "NIGHTPORTER_MUTANT";

/// What is added to the copy of `core`.
const MODULE: &str = r#"
#[allow(missing_docs)]
pub mod mutant {
    pub fn is_on(n: u32) -> bool {
        static ON: std::sync::OnceLock<u32> = std::sync::OnceLock::new();
        let chosen = || std::env::var("NIGHTPORTER_MUTANT").ok()?.parse().ok();
        *ON.get_or_init(|| chosen().unwrap_or(0)) == n
    }
}
"#;

/// How a mutation was noticed.
#[derive(Clone, Debug)]
pub struct Caught {
    /// Seeds that were needed.
    pub seeds: u64,
    /// What the first seed that noticed said.
    pub by: String,
}

/// The text of a source file with all its mutations.
///
/// # Errors
/// A place that does not occur exactly once: the table is older than the source.
pub fn mutate(file: &str, source: &str) -> anyhow::Result<String> {
    let mut text = source.to_owned();
    for (i, m) in MUTATIONS.iter().enumerate().filter(|(_, m)| m.file == file) {
        let plain = m.place.replace("[[", "").replace("]]", "");
        // Once in the source as it is; earlier mutations of the file may have rewritten around it.
        let count = source.matches(&plain).count();
        ensure!(
            count == 1,
            "\"{}\": its place occurs {count} times in {file}: mend the table",
            m.name
        );
        let (before, rest) = m.place.split_once("[[").context("no [[")?;
        let (old, after) = rest.split_once("]]").context("no ]]")?;
        let n = i + 1;
        let on = format!("crate::mutant::is_on({n})");
        let new = match (old.ends_with(';'), m.instead) {
            (true, "") => format!("if !{on} {{ {old} }}"),
            (true, instead) => format!("if {on} {{ {instead} }} else {{ {old} }}"),
            (false, instead) => format!("(if {on} {{ {instead} }} else {{ {old} }})"),
        };
        let changed = text.replacen(&plain, &format!("{before}{new}{after}"), 1);
        ensure!(changed != text, "\"{}\" overlaps another mutation: mend the table", m.name);
        text = changed;
    }
    Ok(text)
}

/// Copies, mutates and builds `core` and `sim` below `dir`. Returns the path of the simulator.
///
/// # Errors
/// See [`mutate`]; or what could not be read, written or built.
pub fn build(root: &Path, dir: &Path) -> anyhow::Result<std::path::PathBuf> {
    let copy = dir.join("source");
    for member in ["core", "sim"] {
        copy_tree(&root.join(member), &copy.join(member), member)?;
    }
    let manifest = std::fs::read_to_string(root.join("Cargo.toml"))?;
    let (head, rest) = manifest.split_once("members = [").context("no members")?;
    let (_, tail) = rest.split_once("]\n").context("no end of members")?;
    let manifest = format!("{head}members = [\"core\", \"sim\"]\n{tail}");
    put(&copy.join("Cargo.toml"), &manifest)?;
    std::fs::copy(root.join("Cargo.lock"), copy.join("Cargo.lock"))?;
    let target = dir.join("target");
    let status = Command::new(std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned()))
        .args(["build", "--quiet", "--profile", "sim", "--package", "nightporter-sim"])
        .current_dir(&copy)
        .env("CARGO_TARGET_DIR", &target)
        .env("RUSTFLAGS", "-Awarnings")
        .status()
        .context("run cargo")?;
    ensure!(status.success(), "the mutated core does not build: see above");
    Ok(target.join("sim/nightporter-sim"))
}

fn copy_tree(from: &Path, to: &Path, member: &str) -> anyhow::Result<()> {
    for entry in std::fs::read_dir(from).with_context(|| format!("read {}", from.display()))? {
        let entry = entry?;
        let (name, path) = (entry.file_name(), entry.path());
        if entry.file_type()?.is_dir() {
            copy_tree(&path, &to.join(name), member)?;
            continue;
        }
        let Ok(mut text) = std::fs::read_to_string(&path) else { continue };
        if member == "core" {
            let below = path.to_string_lossy().into_owned();
            let below = below.rsplit_once("core/src/").map_or("", |(_, file)| file).to_owned();
            text = mutate(&below, &text)?;
            if below == "lib.rs" {
                text.push_str(MODULE);
            }
        }
        put(&to.join(name), &text)?;
    }
    Ok(())
}

/// Writes a file, unless it is there already as it should be: cargo goes by its time.
fn put(path: &Path, text: &str) -> anyhow::Result<()> {
    if std::fs::read_to_string(path).is_ok_and(|old| old == text) {
        return Ok(());
    }
    std::fs::create_dir_all(path.parent().unwrap_or(path))?;
    std::fs::write(path, text).with_context(|| format!("write {}", path.display()))
}

/// Runs seeds with mutation `n` (0: none) until one notices, `seeds` at most.
///
/// # Errors
/// If the simulator does not run, or says what nobody understands.
pub fn hunt(simulator: &Path, n: usize, seeds: u64, jobs: usize) -> anyhow::Result<Option<Caught>> {
    let output = Command::new(simulator)
        .args(["run", "--first", "--seeds", &seeds.to_string(), "--jobs", &jobs.to_string()])
        .env(VARIABLE, n.to_string())
        .output()
        .with_context(|| format!("run {}", simulator.display()))?;
    let text = String::from_utf8_lossy(&output.stdout);
    match (output.status.code(), text.lines().find_map(|line| line.strip_prefix("seed "))) {
        (Some(0), _) => Ok(None),
        (Some(10..=12), Some(line)) => {
            let (seed, by) = line.split_once(": ").context("a seed without a reason")?;
            let seeds = seed.parse::<u64>().context("a seed that is no number")? + 1;
            Ok(Some(Caught { seeds, by: by.to_owned() }))
        }
        (code, _) => bail!("exit code {code:?}: {}", String::from_utf8_lossy(&output.stderr)),
    }
}

/// Hunts all mutations and gives the lines of the table to `tell`. Returns those that survived.
///
/// # Errors
/// See [`build`] and [`hunt`].
pub fn hunt_all(
    root: &Path,
    dir: &Path,
    seeds: u64,
    jobs: usize,
    tell: impl Fn(&str),
) -> anyhow::Result<Vec<String>> {
    tell(&format!("building core with {} mutations", MUTATIONS.len()));
    let simulator = build(root, dir)?;
    if let Some(caught) = hunt(&simulator, 0, seeds.min(200), jobs)? {
        bail!("the core as it is does not pass: {}", caught.by);
    }
    tell("\n| # | mutation | breaks | caught by | seeds |\n|---|---|---|---|---|");
    let mut survived = Vec::new();
    let mut by_checker: BTreeMap<String, u32> = BTreeMap::new();
    for (i, m) in MUTATIONS.iter().enumerate() {
        let n = i + 1;
        match hunt(&simulator, n, seeds, jobs)? {
            Some(Caught { seeds, by }) => {
                let who = by.split(':').next().unwrap_or_default().to_owned();
                tell(&format!("| {n} | {} | {} | {by} | {seeds} |", m.name, m.breaks));
                *by_checker.entry(who).or_default() += 1;
            }
            None => {
                tell(&format!("| {n} | {} | {} | **nobody** | {seeds} |", m.name, m.breaks));
                survived.push(m.name.to_owned());
            }
        }
    }
    let by: Vec<String> = by_checker.iter().map(|(who, n)| format!("{who} {n}")).collect();
    tell(&format!("\ncaught by: {}", by.join(", ")));
    Ok(survived)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mutation_finds_its_place_once() {
        let core = Path::new(env!("CARGO_MANIFEST_DIR")).join("../core/src");
        for m in MUTATIONS {
            let source = std::fs::read_to_string(core.join(m.file)).expect("a file of core");
            let mutated = mutate(m.file, &source).expect("a place for each");
            assert!(mutated.contains("crate::mutant::is_on("), "{}", m.name);
        }
    }
}
