//! The test and the seed that noticed each mutation of the table when it was last hunted through
//! all tests and seeds. They are tried first, so most mutations cost one test and one seed.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use anyhow::Context as _;

/// The record, below the root of the repository: a line for each mutation, with tabs between the
/// seed, the test and the name.
pub const FILE: &str = "sim/src/mutants/noticed.tsv";
const NOBODY: &str = "-";

/// The test and the seed that noticed a mutation.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Known {
    /// The first seed that did; none of those tried if there is none.
    pub seed: Option<u64>,
    /// The first test of `core` that did, as `PROGRAM: TEST`.
    pub test: Option<String>,
}

/// By the mutation's name.
pub type Record = BTreeMap<String, Known>;

/// Reads the record of the repository at `root`.
///
/// # Errors
/// If there is none, or a line of it cannot be read.
pub fn read(root: &Path) -> anyhow::Result<Record> {
    let path = root.join(FILE);
    let text = std::fs::read_to_string(&path).with_context(|| format!("read {FILE}"))?;
    let lines = text.lines().map(|line| parse(line).with_context(|| format!("{FILE}: {line}")));
    lines.collect()
}

fn parse(line: &str) -> anyhow::Result<(String, Known)> {
    let mut fields = line.split('\t');
    let mut next = || fields.next().context("a field is missing");
    let mut somebody = || anyhow::Ok(Some(next()?).filter(|&field| field != NOBODY));
    let (seed, test) = (somebody()?, somebody()?);
    let known = Known { seed: seed.map(str::parse).transpose()?, test: test.map(str::to_owned) };
    Ok((next()?.to_owned(), known))
}

/// The record as text, in the order of `names`.
pub fn text<'a>(record: &Record, names: impl Iterator<Item = &'a str>) -> String {
    let mut text = String::new();
    for name in names {
        let Some(known) = record.get(name) else { continue };
        let seed = known.seed.map_or_else(|| NOBODY.to_owned(), |seed| seed.to_string());
        let _ = writeln!(text, "{seed}\t{}\t{name}", known.test.as_deref().unwrap_or(NOBODY));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mutants::all;

    #[test]
    fn the_record_is_of_the_table_and_reads_as_it_was_written() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let record = read(&root).expect("a record");
        let written = text(&record, all().map(|m| m.name));
        assert_eq!(written, std::fs::read_to_string(root.join(FILE)).expect("the record"));
    }
}
