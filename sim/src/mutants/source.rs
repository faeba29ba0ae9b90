//! Many versions of one source file in one: each function that a mutation changes is there once
//! unchanged and once per mutation, behind a `match` on the mutation that is on.

use std::ops::Range;

/// One change of a source file.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Edit {
    /// The mutation's number, from 1.
    pub n: usize,
    /// Bytes of the file that are replaced.
    pub range: Range<usize>,
    /// Its replacement.
    pub with: String,
}

/// A source file with all its mutations.
#[derive(Clone, Debug, Default)]
pub struct Mutated {
    /// The text for the compiler.
    pub text: String,
    /// For each mutated function: its lines in `text`, from 1, and those of each mutation.
    pub functions: Vec<Function>,
    /// Mutations that this form cannot express: see [`Body::switchable`].
    pub left_out: Vec<usize>,
}

/// Where a function's versions are in the text for the compiler.
#[derive(Clone, Debug)]
pub struct Function {
    /// Lines of all versions.
    pub lines: Range<usize>,
    /// Lines of the version of each mutation.
    pub versions: Vec<(Range<usize>, usize)>,
}

impl Mutated {
    /// The mutations that a compiler's error at `line` speaks of.
    #[must_use]
    pub fn at_line(&self, line: usize) -> Vec<usize> {
        let Some(f) = self.functions.iter().find(|f| f.lines.contains(&line)) else {
            return Vec::new();
        };
        match f.versions.iter().find(|(lines, _)| lines.contains(&line)) {
            Some((_, n)) => vec![*n],
            None => f.versions.iter().map(|(_, n)| *n).collect(),
        }
    }
}

/// Puts all `edits` into `source`.
#[must_use]
pub fn mutate(source: &str, edits: &[Edit]) -> Mutated {
    let mut out = Mutated::default();
    let mut copied = 0;
    let mut placed = vec![false; edits.len()];
    for body in bodies(source).into_iter().filter(|body| body.switchable) {
        let inside = |e: &Edit| body.range.start <= e.range.start && e.range.end <= body.range.end;
        let here: Vec<usize> = (0..edits.len()).filter(|&i| inside(&edits[i])).collect();
        if here.is_empty() {
            continue;
        }
        out.text += &source[copied..body.range.start];
        copied = body.range.end;
        let first = line_of(&out.text);
        let mut versions = Vec::new();
        out.text += "match crate::mutant::on() {\n";
        for i in here {
            let (e, from) = (&edits[i], line_of(&out.text));
            placed[i] = true;
            let before = &source[body.range.start..e.range.start];
            let after = &source[e.range.end..body.range.end];
            out.text += &format!("{} => {{{before}{}{after}}}\n", e.n, e.with);
            versions.push((from..line_of(&out.text), e.n));
        }
        out.text += &format!("_ => {{{}}}\n}}\n", &source[body.range]);
        out.functions.push(Function { lines: first..line_of(&out.text) + 1, versions });
    }
    out.text += &source[copied..];
    let left = edits.iter().zip(placed).filter(|(_, placed)| !placed);
    out.left_out = left.map(|(e, _)| e.n).collect();
    out
}

/// The line, from 1, on which the next character will be.
fn line_of(text: &str) -> usize {
    text.matches('\n').count() + 1
}

/// A function that is not inside another.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Body {
    /// Its name.
    pub(super) name: Range<usize>,
    /// The text between its braces.
    pub(super) range: Range<usize>,
    /// `const` functions cannot ask which mutation is on, and the versions of one that returns
    /// `impl Trait` would be of different types.
    switchable: bool,
}

/// All functions of a source file, in order.
pub(super) fn bodies(source: &str) -> Vec<Body> {
    let code = blanked(source);
    let is_word = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
    let mut found = Vec::new();
    let mut at = 0;
    while let Some(offset) = code[at..].find("fn ") {
        let begin = at + offset;
        at = begin + 3;
        if begin > 0 && is_word(code.as_bytes()[begin - 1]) {
            continue;
        }
        let Some(open) = opening_brace(&code, at) else { continue };
        let Some(close) = closing_brace(&code, open) else { continue };
        let is_const = code[..begin].trim_end().ends_with("const");
        let opaque = code[begin..open].rsplit_once("->").is_some_and(|(_, t)| t.contains("impl "));
        let len = code[begin + 3..].bytes().take_while(|b| is_word(*b)).count();
        let name = begin + 3..begin + 3 + len;
        found.push(Body { name, range: open + 1..close, switchable: !is_const && !opaque });
        at = close;
    }
    found
}

/// The position of the body of the function whose name is at `at`; `None` if it has no body.
fn opening_brace(code: &str, at: usize) -> Option<usize> {
    let mut depth = 0;
    for (i, b) in code.bytes().enumerate().skip(at) {
        match b {
            b'(' | b'[' => depth += 1,
            b')' | b']' => depth -= 1,
            b'{' if depth == 0 => return Some(i),
            b';' if depth == 0 => return None,
            _ => {}
        }
    }
    None
}

fn closing_brace(code: &str, open: usize) -> Option<usize> {
    let mut depth = 0;
    for (i, b) in code.bytes().enumerate().skip(open) {
        match b {
            b'{' => depth += 1,
            b'}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some(i);
        }
    }
    None
}

/// The source with spaces for comments, strings and characters; every other byte at its place.
fn blanked(source: &str) -> String {
    let bytes = source.as_bytes();
    let mut out = bytes.to_vec();
    let mut at = 0;
    while at < bytes.len() {
        let end = at + token_to_blank(&bytes[at..]);
        if end > at {
            out[at..end].fill(b' ');
            at = end;
        } else {
            at += 1;
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

/// Bytes of the comment, string or character that `rest` begins with; 0 if it begins with neither.
pub(super) fn token_to_blank(rest: &[u8]) -> usize {
    let until = |what: &[u8], from: usize| {
        let tail = rest.get(from..).unwrap_or_default();
        let found = tail.windows(what.len()).position(|w| w == what);
        found.map_or(rest.len(), |i| from + i + what.len())
    };
    match rest {
        [b'/', b'/', ..] => until(b"\n", 2) - 1,
        [b'/', b'*', ..] => until(b"*/", 2),
        [b'r', b'#', b'"', ..] => until(b"\"#", 3),
        [b'"', ..] => {
            let mut end = 1;
            while end < rest.len() && rest[end] != b'"' {
                end += if rest[end] == b'\\' { 2 } else { 1 };
            }
            (end + 1).min(rest.len())
        }
        [b'\'', b'\\', _, ..] => until(b"'", 3),
        [b'\'', _, b'\'', ..] => 3, // and not a lifetime
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: &str = "\
// fn comment() {
impl X {
    /// \"fn\" {
    pub(crate) fn a<'x>(&'x self, n: [u8; 3]) -> char {
        let open = |c: char| c == '{' || \"}\".contains(c);
        fn inner() -> u8 { 7 }
        if open('x') { 'a' } else { '\\'' }
    }
    const fn b() -> u32 { 1 + 2 }
    fn c(&self) -> impl Iterator<Item = u8> { 1..5 + 2 }
    fn declared(&self);
}
fn d(f: fn (u8)) { f(1 + 1); }
";

    fn edit(n: usize, what: &str, with: &str) -> Edit {
        let at = SOURCE.find(what).expect("it is there");
        Edit { n, range: at..at + what.len(), with: with.to_owned() }
    }

    #[test]
    fn functions_are_found_whatever_is_in_comments_strings_and_characters() {
        let found = bodies(SOURCE);
        let text: Vec<_> = found.iter().map(|b| SOURCE[b.range.clone()].trim()).collect();
        assert_eq!(text.len(), 4, "{text:?}");
        assert!(text[0].starts_with("let open") && text[0].ends_with("else { '\\'' }"));
        assert_eq!(text[1..], ["1 + 2", "1..5 + 2", "f(1 + 1);"]);
        let switchable: Vec<_> = found.iter().map(|b| b.switchable).collect();
        assert_eq!(switchable, [true, false, false, true]);
    }

    #[test]
    fn each_mutation_has_a_version_and_an_error_in_it_names_it() {
        let edits = [
            edit(3, "7", "8"),
            edit(5, "'a'", "'b'"),
            edit(6, "1 + 2", "1 - 2"),
            edit(9, "1 + 1", "1 * 1"),
        ];
        let mutated = mutate(SOURCE, &edits);
        assert_eq!(mutated.left_out, [6]);
        let lines: Vec<&str> = mutated.text.lines().collect();
        let at = |what: &str| lines.iter().position(|l| l.contains(what)).expect(what) + 1;
        assert_eq!(mutated.at_line(at("-> u8 { 8 }")), [3]);
        assert_eq!(mutated.at_line(at("{ 'b' }")), [5]);
        assert_eq!(mutated.at_line(at("9 => { f(1 * 1); }")), [9]);
        assert_eq!(mutated.at_line(at("_ => {")), [3, 5], "the function as it is, and so all");
        assert!(mutated.at_line(1).is_empty());
        assert_eq!(mutated.text.matches("1 + 2").count(), 1);
    }
}
