//! The place of a mutation in the source: by the name of a function and by tokens, so that neither
//! a move to another file nor a line break nor a comment matters, and a new name rarely does.
//!
//! A place is searched in functions of the given name, then, if it is long enough to be unique, in
//! all others. In each it is searched as it is written, then as if up to [`RENAMED_MAX`] of its
//! words had new names; its replacement then uses these too. The first of these searches that finds
//! anything must find one place only.

use std::collections::BTreeMap;
use std::ops::Range;

use anyhow::{Context as _, ensure};

use super::source::{bodies, token_to_blank};

/// Words of a place that may have been renamed since it was written.
const RENAMED_MAX: usize = 2;

/// Tokens of a place that is looked for in functions of other names too.
const ELSEWHERE_MIN: usize = 8;

/// Words that are never renamed.
const KEYWORDS: [&str; 26] = [
    "Self", "as", "async", "await", "break", "const", "continue", "crate", "else", "false", "fn",
    "for", "if", "impl", "in", "let", "loop", "match", "mut", "ref", "return", "self", "super",
    "true", "unsafe", "while",
];

/// A function, by its tokens.
#[derive(Clone, Debug)]
pub(super) struct Function<'s> {
    file: &'s str,
    name: &'s str,
    tokens: Vec<Token<'s>>,
}

#[derive(Clone, Copy, Debug)]
struct Token<'s> {
    text: &'s str,
    /// Where it begins, in bytes.
    at: usize,
}

impl Token<'_> {
    fn is_name(&self) -> bool {
        self.text.starts_with(|c: char| c.is_alphabetic() || c == '_')
            && !KEYWORDS.contains(&self.text)
    }
}

/// The result for a place.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Found<'s> {
    pub(super) file: &'s str,
    /// Bytes between the marks.
    pub(super) range: Range<usize>,
    /// New names of words, by the old ones.
    renamed: BTreeMap<String, String>,
}

impl Found<'_> {
    /// `text` with the new names.
    pub(super) fn rename(&self, text: &str) -> String {
        let mut out = text.to_owned();
        for token in tokens(text, 0).iter().rev() {
            if let Some(new) = self.renamed.get(token.text) {
                out.replace_range(token.at..token.at + token.text.len(), new);
            }
        }
        out
    }
}

/// All functions of a file that are not inside another.
pub(super) fn functions<'s>(file: &'s str, source: &'s str) -> Vec<Function<'s>> {
    let of = |name: Range<usize>, body: Range<usize>| Function {
        file,
        name: &source[name],
        tokens: tokens(&source[body.clone()], body.start),
    };
    bodies(source).into_iter().map(|body| of(body.name, body.range)).collect()
}

/// The one place that `place` names in a function called `name`; `[[` and `]]` are around what is
/// replaced, or it is all of it.
///
/// # Errors
/// If there is none, or more than one.
pub(super) fn find<'s>(
    functions: &[Function<'s>],
    name: &str,
    place: &str,
) -> anyhow::Result<Found<'s>> {
    let marks = place.find("[[").zip(place.find("]]"));
    let (from, to) = marks.map_or((0, place.len()), |(from, to)| (from, to - 2));
    let plain = place.replace("[[", "").replace("]]", "");
    let wanted = tokens(&plain, 0);
    let marked: Vec<usize> =
        (0..wanted.len()).filter(|&n| (from..to).contains(&wanted[n].at)).collect();
    let (first, last) = marked.first().zip(marked.last()).context("nothing is marked")?;
    let elsewhere = wanted.len() >= ELSEWHERE_MIN;
    for here in [true, false].into_iter().filter(|here| *here || elsewhere) {
        for renamed_max in [0, RENAMED_MAX] {
            let mut found = Vec::new();
            for function in functions.iter().filter(|f| (f.name == name) == here) {
                for tokens in function.tokens.windows(wanted.len()) {
                    let Some(renamed) = same(&wanted, tokens, renamed_max) else { continue };
                    let end = tokens[*last].at + tokens[*last].text.len();
                    let range = tokens[*first].at..end;
                    found.push(Found { file: function.file, range, renamed });
                }
            }
            let fewest = found.iter().map(|f| f.renamed.len()).min();
            found.retain(|f| Some(f.renamed.len()) == fewest);
            ensure!(found.len() < 2, "occurs {} times", found.len());
            if let Some(found) = found.pop() {
                return Ok(found);
            }
        }
    }
    anyhow::bail!("occurs nowhere")
}

/// The new names with which `have` equals `wanted`; not more than `renamed_max`, and fewer than the
/// unchanged names.
fn same(
    wanted: &[Token<'_>],
    have: &[Token<'_>],
    renamed_max: usize,
) -> Option<BTreeMap<String, String>> {
    let mut names = BTreeMap::new();
    for (want, have) in wanted.iter().zip(have) {
        if want.is_name() && have.is_name() {
            if *names.entry(want.text).or_insert(have.text) != have.text {
                return None;
            }
        } else if want.text != have.text {
            return None;
        }
        let renamed = names.iter().filter(|(old, new)| old != new).count();
        if renamed > renamed_max {
            return None;
        }
    }
    let (kept, renamed): (Vec<_>, Vec<_>) = names.into_iter().partition(|(old, new)| old == new);
    let owned = |(old, new): (&str, &str)| (old.to_owned(), new.to_owned());
    (renamed.is_empty() || renamed.len() < kept.len())
        .then(|| renamed.into_iter().map(owned).collect())
}

/// Words, literals and single signs of `source`, which begins at byte `base` of its file. Comments
/// and a comma before a closing bracket are none.
fn tokens(source: &str, base: usize) -> Vec<Token<'_>> {
    let bytes = source.as_bytes();
    let is_word = |b: &u8| b.is_ascii_alphanumeric() || *b == b'_';
    let mut found: Vec<Token<'_>> = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        let rest = &bytes[at..];
        let literal = token_to_blank(rest);
        let word = rest.iter().take_while(|b| is_word(b)).count();
        let len = [literal, word, 1].into_iter().find(|len| *len > 0).unwrap_or(1);
        let text = source.get(at..at + len).unwrap_or_default();
        let is_comment = text.starts_with("//") || text.starts_with("/*");
        if !is_comment && !text.trim().is_empty() {
            let closes = matches!(text, ")" | "]" | "}");
            if closes && found.last().is_some_and(|token| token.text == ",") {
                found.pop();
            }
            found.push(Token { text, at: base + at });
        }
        at += len;
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLACE: &str = "if self.una < [[ack.min(limit, self.next)]] { drop(self.next); }";
    const INSTEAD: &str = "self.next.max(ack)";

    fn found(source: &str) -> anyhow::Result<(String, String)> {
        let functions = functions("a.rs", source);
        let found = find(&functions, "on_ack", PLACE)?;
        Ok((source[found.range.clone()].to_owned(), found.rename(INSTEAD)))
    }

    #[test]
    fn a_place_is_found_whatever_stands_around_it_and_however_its_lines_are_broken() {
        let source = "
            fn other(&self) { drop(self.next); }
            fn on_ack(&self) {
                if self.una // not yet
                    < ack.min(
                        limit, /* of a window */
                        self.next,
                    )
                {
                    drop(self.next);
                }
            }";
        let (marked, with) = found(source).expect("a place");
        assert!(marked.starts_with("ack.min(") && marked.ends_with(')'), "{marked}");
        assert_eq!(with, INSTEAD);
        let moved = source.replace("on_ack", "on_guest_ack");
        assert!(found(&moved).is_ok(), "in a function of another name");
    }

    #[test]
    fn new_names_are_taken_over_and_too_many_of_them_are_another_place() {
        let renamed = "fn on_ack() {
            if self.acked < ack.min(limit, self.sent) { drop(self.sent); } }";
        let (marked, with) = found(renamed).expect("a place");
        assert_eq!(
            (marked.as_str(), with.as_str()),
            ("ack.min(limit, self.sent)", "self.sent.max(ack)")
        );
        let other = renamed.replace("limit", "edge");
        assert!(found(&other).is_err(), "three new names");
        let inconsistent = renamed.replace("drop(self.sent)", "drop(self.next)");
        assert!(found(&inconsistent).is_err(), "half a new name");
    }

    #[test]
    fn a_place_that_occurs_twice_is_none() {
        let body = "{ if self.una < ack.min(limit, self.next) { drop(self.next); } }";
        let twice = format!("fn on_ack() {body} fn b() {body}");
        assert!(found(&twice).is_ok(), "the other function is of another name");
        let error = found(&twice.replace("fn b", "fn on_ack")).expect_err("two of them");
        assert!(error.to_string().contains("occurs 2 times"), "{error}");
    }
}
