//! Random mutations: the list of cargo-mutants, and a sample of it.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context as _, ensure};
use serde::Deserialize;

use super::source::Edit;
use crate::random::Random;

/// A mutation of the list.
#[derive(Clone, Debug, Deserialize)]
pub struct Listed {
    /// `CRATE/src/FILE:LINE:COLUMN: its effect`.
    pub name: String,
    /// Path from the root of the repository.
    pub file: String,
    /// Its replacement.
    pub replacement: String,
    pub(super) span: Span,
}

#[derive(Clone, Debug, Deserialize)]
pub(super) struct Span {
    start: Place,
    end: Place,
}

/// Line and column in characters, from 1.
#[derive(Clone, Debug, Deserialize)]
struct Place {
    line: usize,
    column: usize,
}

impl Place {
    fn offset(&self, source: &str) -> Option<usize> {
        let lines = source.split_inclusive('\n');
        let before: usize = lines.clone().take(self.line - 1).map(str::len).sum();
        let line = lines.clone().nth(self.line - 1)?;
        let within = line.char_indices().nth(self.column - 1).map_or(line.len(), |(i, _)| i);
        Some(before + within)
    }
}

impl Listed {
    /// The beginning of its unit tests' names: the folder or file below the crate's `src`.
    #[must_use]
    pub fn room(&self) -> String {
        let below = self.file.split("/src/").nth(1).unwrap_or_default();
        let room = below.split(['/', '.']).next().unwrap_or_default();
        format!("{room}::")
    }

    /// The change of `source`, as mutation `n`.
    ///
    /// # Errors
    /// If the list is not of this source.
    pub fn edit(&self, n: usize, source: &str) -> anyhow::Result<Edit> {
        let range = self.span.start.offset(source).zip(self.span.end.offset(source));
        let (start, end) = range.with_context(|| format!("\"{}\": no such place", self.name))?;
        Ok(Edit { n, range: start..end, with: self.replacement.clone() })
    }
}

/// Reads the output of `cargo mutants --list --json`.
///
/// # Errors
/// If it is no such list, or an empty one.
pub fn read(path: &Path) -> anyhow::Result<Vec<Listed>> {
    let bytes = std::fs::read(path).with_context(|| format!("read {}", path.display()))?;
    let list: Vec<Listed> = serde_json::from_slice(&bytes)
        .with_context(|| format!("{} is no list of cargo-mutants", path.display()))?;
    ensure!(!list.is_empty(), "{} is an empty list", path.display());
    Ok(list)
}

/// `count` mutations of the list by chance from each of `rooms`, folders or files by the beginning
/// of their path; from the whole list if there are none.
#[must_use]
pub fn sample_rooms(list: &[Listed], rooms: &[String], count: usize, seed: u64) -> Vec<Listed> {
    if rooms.is_empty() {
        return sample(list.to_vec(), count, seed);
    }
    let of = |room: &String| list.iter().filter(|m| m.file.starts_with(room)).cloned().collect();
    rooms.iter().flat_map(|room| sample(of(room), count, seed)).collect()
}

/// `count` mutations of the list by chance, in the order in which they were drawn: the same for the
/// same seed, and the first of a larger sample. So those that were judged when time was over are a
/// sample too.
fn sample(list: Vec<Listed>, count: usize, seed: u64) -> Vec<Listed> {
    let mut random = Random::new(seed, "mutants");
    let keyed = list.into_iter().enumerate().map(|(i, m)| ((random.bits(), i), m));
    keyed.collect::<BTreeMap<_, _>>().into_values().take(count).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIST: &str = r#"[
        {"name": "a.rs:2:11: replace + with *", "file": "core/src/a.rs", "replacement": "*",
         "span": {"start": {"line": 2, "column": 11}, "end": {"line": 2, "column": 12}}},
        {"name": "a.rs:1:1: replace f", "file": "core/src/a.rs", "replacement": "0",
         "span": {"start": {"line": 1, "column": 3}, "end": {"line": 2, "column": 14}}}
    ]"#;

    #[test]
    fn a_room_is_a_folder_or_a_file_of_a_crate() {
        let list: Vec<Listed> = serde_json::from_str(LIST).expect("a list");
        let room = |file: &str| Listed { file: file.to_owned(), ..list[0].clone() }.room();
        assert_eq!(room("core/src/tcp/vm.rs"), "tcp::");
        assert_eq!(room("daemon/src/watchdog.rs"), "watchdog::");
    }

    #[test]
    fn a_place_is_counted_in_lines_and_characters() {
        let list: Vec<Listed> = serde_json::from_str(LIST).expect("a list");
        let source = "f {\n  \"é…\"; a + b\n}";
        let edit = list[0].edit(7, source).expect("a place");
        assert_eq!((edit.n, &source[edit.range.clone()], edit.with.as_str()), (7, "+", "*"));
        let edit = list[1].edit(8, source).expect("a place");
        assert_eq!(&source[edit.range], "{\n  \"é…\"; a + b");
        assert!(list[0].edit(7, "short").is_err());
    }

    #[test]
    fn a_sample_is_decided_by_its_seed_and_begins_a_larger_one() {
        let list: Vec<Listed> = serde_json::from_str(LIST).expect("a list");
        let list: Vec<Listed> = (0..50).flat_map(|_| list.clone()).collect();
        let names = |seed| {
            let drawn = sample(list.clone(), 20, seed);
            drawn.into_iter().map(|m| m.name).collect::<Vec<_>>()
        };
        assert_eq!(names(1), names(1));
        assert_ne!(names(1), names(2));
        let all = sample(list.clone(), 900, 1);
        assert_eq!((names(1).len(), all.len()), (20, 100));
        assert!(names(1).iter().eq(all[..20].iter().map(|m| &m.name)));
    }

    #[test]
    fn each_room_has_a_sample_of_its_own_that_others_do_not_change() {
        let list: Vec<Listed> = serde_json::from_str(LIST).expect("a list");
        let in_file = |i: usize, file: &str| -> Listed {
            Listed { name: i.to_string(), file: file.to_owned(), ..list[0].clone() }
        };
        let list: Vec<Listed> = (0..90)
            .map(|i| in_file(i, ["core/src/a.rs", "core/src/b/c.rs", "core/src/d.rs"][i % 3]))
            .collect();
        let names = |rooms: &[&str]| {
            let rooms: Vec<String> = rooms.iter().map(|&room| room.to_owned()).collect();
            let drawn = sample_rooms(&list, &rooms, 4, 1);
            drawn.into_iter().map(|m| (m.file, m.name)).collect::<Vec<_>>()
        };
        let both = names(&["core/src/b", "core/src/a.rs"]);
        assert_eq!(both[..4], names(&["core/src/b"]));
        assert_eq!(both[4..], names(&["core/src/a.rs"]));
        assert!(both[..4].iter().all(|(file, _)| file == "core/src/b/c.rs"));
        assert_eq!(names(&[]).len(), 4);
    }
}
