//! Comments are plain sentences, and names of files have a noun.
//!
//! A sentence has a noun as its subject, not a clause ("What waits is sent"). A program finds the
//! clauses that begin a sentence; questions may.

use super::{expect_none, repository};

/// Words that begin a clause, at the beginning of a sentence.
const CLAUSES: &[&str] = &["What", "Whatever", "Who", "Whoever", "Whose"];

/// Names of files that say nothing of their subject.
const NAMES_WITHOUT_NOUN: &[&str] = &[
    "beside", "bulletin", "carry", "doors", "eye", "heard", "here", "joint", "kept", "late", "told",
];

/// The comment of a line and whether code precedes it.
fn comment(line: &str) -> Option<(&str, bool)> {
    let code = line.trim_start();
    if let Some(text) = code.strip_prefix("//") {
        return Some((text.trim_start_matches(['/', '!']).trim(), false));
    }
    line.split_once(" // ").map(|(_, text)| (text.trim(), true))
}

/// Paragraphs of comments: their words, each with the number of its line. Examples are skipped.
fn paragraphs(text: &str) -> Vec<Vec<(usize, &str)>> {
    let mut all = vec![Vec::new()];
    let mut is_example = false;
    for (i, line) in text.lines().enumerate() {
        let found = comment(line);
        let (text, trails) = found.unwrap_or_default();
        let fence = text.starts_with("```");
        is_example = found.is_some() && (is_example != fence);
        let begins = trails || text.is_empty() || text.starts_with(['-', '*', '|', '#']);
        if begins || fence {
            all.push(Vec::new());
        }
        if !is_example && !fence {
            let words = text.split_whitespace().map(|word| (i + 1, word));
            all.last_mut().expect("one at least").extend(words);
        }
        if trails {
            all.push(Vec::new());
        }
    }
    all
}

/// Where sentences begin with a clause: the line and the first word of each.
fn clauses(text: &str) -> Vec<(usize, &str)> {
    let mut found = Vec::new();
    for words in paragraphs(text) {
        let is_end = |(_, word): &(usize, &str)| {
            word.trim_end_matches(['"', '\'', ')', '*', '`']).ends_with(['.', ':', '?', '!'])
        };
        for sentence in words.split_inclusive(is_end) {
            let is_word = |word: &&(usize, &str)| word.1.contains(char::is_alphanumeric);
            let Some((line, first)) = sentence.iter().find(is_word) else { continue };
            let first = first.trim_matches(|c: char| !c.is_alphanumeric());
            let is_question = sentence.last().is_some_and(|(_, word)| word.contains('?'));
            if CLAUSES.contains(&first) && !is_question {
                found.push((*line, first));
            }
        }
    }
    found
}

#[test]
fn a_clause_that_begins_a_sentence_is_found() {
    // This file is checked, too: `@` stands for the beginning of a comment.
    let lines = |text: &str| {
        let text = text.replace('@', "//");
        clauses(&text).iter().map(|(line, _)| *line).collect::<Vec<_>>()
    };
    assert_eq!(lines("@/ What waits.\n@! Who\n@! waits.\nfn f() {} @ Whoever waits"), [1, 2, 4]);
    assert_eq!(lines("@ It waits. \"What\n@ waits\" is sent: Whatever it is.\n"), [1, 2]);
    assert_eq!(lines("@ --- What it sends ---\n@ - Whose it is\n@ - x"), [1, 2]);
    let plain = "@ What is it?\n@ It says what waits: who asks, waits.\n@ ```\n@ What\n@ ```\n";
    assert_eq!(lines(plain), [0; 0]);
    assert_eq!(lines("let what = \"What waits\";\n@ Whatsoever, and\n@ What it is"), [0; 0]);
}

#[test]
fn no_comment_has_a_clause_as_its_subject() {
    let mut findings = Vec::new();
    for file in repository().iter().filter(|f| f.is_rust()) {
        let of = |(line, word): &(usize, &str)| format!("{}:{line}: {word} ...", file.path);
        findings.extend(clauses(&file.text).iter().map(of));
    }
    expect_none("begin with a noun, not with a clause", &findings);
}

#[test]
fn names_of_files_have_a_noun() {
    let files = repository();
    let bare = |path: &str| {
        let parts = path.split(['/', '.']);
        path.ends_with(".rs") && parts.into_iter().any(|part| NAMES_WITHOUT_NOUN.contains(&part))
    };
    let found: Vec<String> = files.iter().map(|f| f.path.clone()).filter(|p| bare(p)).collect();
    expect_none("say what a file is about by a noun in its name", &found);
}
