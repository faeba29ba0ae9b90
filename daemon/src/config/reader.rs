//! Reading TOML so that an operator sees every mistake at once, each with its line and its fix.
//!
//! serde stops at the first error and knows no ranges, so the tables are walked by hand: a
//! [`Section`] hands out one key at a time, remembers which keys exist, and reports the rest as
//! unknown with the nearest name that does.

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};
use std::ops::{Range, RangeInclusive};

use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// Most characters of a key or a description that are shown.
const PLAIN_CHARS_MAX: usize = 300;

/// One mistake in a configuration.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct Problem {
    /// Where: `FILE:LINE`, or the command-line flag.
    pub place: Place,
    /// Which key, as in `vm.web1.mtu`; empty for a syntax error.
    pub key: String,
    /// The mistake.
    pub what: String,
    /// Its fix.
    pub fix: String,
}

impl Problem {
    /// Whether it was given on a command line.
    #[must_use]
    pub const fn is_of_a_flag(&self) -> bool {
        matches!(self.place, Place::Flag(_))
    }
}

/// Where a value was written.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Place {
    /// A line of the file, counted from 1.
    Line(usize),
    /// A line of a file in `conf.d`.
    Beside(String, usize),
    /// `--set KEY=VALUE` on the daemon's command line, or `KEY=VALUE` of a command.
    Flag(String),
}

/// All mistakes of one configuration, in file order.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Problems {
    /// The file's name as the operator gave it.
    pub file: String,
    /// The mistakes; never empty when returned as an error.
    pub list: Vec<Problem>,
}

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, p) in self.list.iter().enumerate() {
            if i > 0 {
                writeln!(f)?;
            }
            match &p.place {
                Place::Line(line) => write!(f, "{}:{line}: ", self.file)?,
                Place::Beside(file, line) => write!(f, "{file}:{line}: ")?,
                Place::Flag(flag) => write!(f, "{}: ", Plain(flag))?,
            }
            if !p.key.is_empty() {
                write!(f, "{}: ", Plain(&p.key))?;
            }
            write!(f, "{}\n    fix: {}", Plain(&p.what), p.fix)?;
        }
        Ok(())
    }
}

impl std::error::Error for Problems {}

/// Text with pieces of the file in it, as one line of a terminal: control characters are spelt out,
/// and text that is too long to read ends in dots.
struct Plain<'a>(&'a str);

impl fmt::Display for Plain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for c in self.0.chars().take(PLAIN_CHARS_MAX) {
            match c {
                c if c.is_control() => write!(f, "{}", c.escape_default())?,
                c => f.write_char(c)?,
            }
        }
        if self.0.chars().nth(PLAIN_CHARS_MAX).is_some() { f.write_str("...") } else { Ok(()) }
    }
}

/// A parsed file, and the mistakes that were found in it so far.
pub(super) struct Document<'i> {
    text: &'i str,
    root: DeTable<'i>,
    overrides: &'i BTreeMap<String, String>,
    pub(super) problems: Vec<Problem>,
    /// Every key asked for, with its section: the list the documentation test walks.
    pub(super) known: Vec<(&'static str, &'static str)>,
}

impl<'i> Document<'i> {
    /// Parses `text`; `overrides` are keys of `[daemon]` given on the command line.
    pub(super) fn parse(text: &'i str, overrides: &'i BTreeMap<String, String>) -> Self {
        let (root, errors) = DeTable::parse_recoverable(text);
        let problems = errors
            .iter()
            .map(|e| Problem {
                place: Place::Line(line_of(text, e.span().map_or(0, |s| s.start))),
                key: String::new(),
                what: format!("not valid TOML: {}", e.message().trim()),
                fix: "see https://toml.io for the syntax, and examples/nightporter.toml".into(),
            })
            .collect();
        Self { text, root: root.into_inner(), overrides, problems, known: Vec::new() }
    }

    /// Records a mistake at a byte range of the file.
    pub(super) fn problem(&mut self, at: &Range<usize>, key: &str, what: String, fix: &str) {
        self.problems.push(Problem {
            place: Place::Line(line_of(self.text, at.start)),
            key: key.into(),
            what,
            fix: fix.into(),
        });
    }

    /// Rejects tables other than `names`.
    pub(super) fn only_sections(&mut self, names: &[&str]) {
        let bad: Vec<_> = self
            .root
            .keys()
            .filter(|k| !names.contains(&k.get_ref().as_ref()))
            .map(|k| (k.span(), k.get_ref().to_string()))
            .collect();
        for (span, key) in bad {
            let fix = unknown_fix(&key, names);
            self.problem(&span, &key, "unknown section".into(), &fix);
        }
    }

    /// Whether the file has a table of that name.
    pub(super) fn has(&self, name: &str) -> bool {
        self.root.contains_key(name)
    }

    /// The single table `[name]`, if the file has one. The command line does not apply to it.
    pub(super) fn table(&mut self, name: &'static str) -> Option<Section<'_, 'i>> {
        let is_there = self.root.contains_key(name);
        let mut section = self.section(name);
        section.overrides.clear();
        is_there.then_some(section)
    }

    /// The single table `[name]`; empty if the file has none. Command-line overrides apply to it.
    pub(super) fn section(&mut self, name: &'static str) -> Section<'_, 'i> {
        let (table, span) = match self.root.remove(name) {
            None => (DeTable::default(), 0..0),
            Some(value) => {
                let span = value.span();
                match value.into_inner() {
                    DeValue::Table(t) => (t, span),
                    other => {
                        let what = format!("is {}, not a table", a_type(&other));
                        self.problem(&span, name, what, &format!("write it as [{name}]"));
                        (DeTable::default(), span)
                    }
                }
            }
        };
        let mut section = Section::new(self, name, table, span);
        section.overrides = section.doc.overrides.clone();
        section
    }

    /// A table of which the command line has every key.
    pub(super) fn given(&mut self, name: &'static str) -> Section<'_, 'i> {
        let mut section = Section::new(self, name, DeTable::default(), 0..0);
        section.overrides = section.doc.overrides.clone();
        section.flag = "";
        section
    }

    /// The tables of `[[name]]`, to be opened one by one with [`Self::open`].
    pub(super) fn tables(&mut self, name: &'static str) -> Vec<Spanned<DeValue<'i>>> {
        let Some(value) = self.root.remove(name) else { return Vec::new() };
        let span = value.span();
        match value.into_inner() {
            DeValue::Array(list) => list.into_iter().collect(),
            other => {
                let what = format!("is {}, not a list of tables", a_type(&other));
                self.problem(&span, name, what, &format!("write it as [[{name}]]"));
                Vec::new()
            }
        }
    }

    /// One table out of [`Self::tables`].
    pub(super) fn open(
        &mut self,
        name: &'static str,
        value: Spanned<DeValue<'i>>,
    ) -> Option<Section<'_, 'i>> {
        let span = value.span();
        match value.into_inner() {
            DeValue::Table(t) => Some(Section::new(self, name, t, span)),
            other => {
                let what = format!("is {}, not a table", a_type(&other));
                self.problem(&span, name, what, &format!("write it as [[{name}]]"));
                None
            }
        }
    }
}

/// One table, read key by key.
pub(super) struct Section<'d, 'i> {
    pub(super) doc: &'d mut Document<'i>,
    kind: &'static str,
    /// How problems name this table: `vm`, and `vm.web1` once its name is known.
    pub(super) label: String,
    /// Where the table starts.
    pub(super) span: Range<usize>,
    table: DeTable<'i>,
    overrides: BTreeMap<String, String>,
    /// The flag before those on the command line.
    flag: &'static str,
    known: Vec<&'static str>,
    /// Where the keys are that were read.
    places: BTreeMap<&'static str, Range<usize>>,
}

impl<'d, 'i> Section<'d, 'i> {
    /// It is out of `KEY=VALUE`s, not of a file.
    pub(super) fn is_of_a_command(&self) -> bool {
        self.flag.is_empty()
    }

    fn new(
        doc: &'d mut Document<'i>,
        kind: &'static str,
        table: DeTable<'i>,
        span: Range<usize>,
    ) -> Self {
        let (label, overrides, known) = (kind.to_string(), BTreeMap::new(), Vec::new());
        let places = BTreeMap::new();
        Self { doc, kind, label, span, table, overrides, flag: "--set ", known, places }
    }

    /// The value of `key`, or `None` if it is absent or wrong (then `fix` is reported).
    pub(super) fn get<T>(
        &mut self,
        key: &'static str,
        fix: &str,
        parse: impl Fn(&DeValue<'_>) -> Result<T, String>,
    ) -> Option<T> {
        self.known.push(key);
        self.doc.known.push((self.kind, key));
        let label = || format!("{}.{key}", self.label);
        if let Some(text) = self.overrides.remove(key) {
            self.table.remove(key);
            let value = DeValue::parse(&text).map(Spanned::into_inner);
            let value = value.unwrap_or_else(|_| DeValue::String(text.as_str().into()));
            return parse(&value)
                .map_err(|what| {
                    let place = Place::Flag(format!("{}{key}={text}", self.flag));
                    self.doc.problems.push(Problem { place, key: label(), what, fix: fix.into() });
                })
                .ok();
        }
        let value = self.table.remove(key)?;
        self.places.insert(key, value.span());
        parse(value.get_ref())
            .map_err(|what| self.doc.problem(&value.span(), &label(), what, fix))
            .ok()
    }

    /// As [`Self::get`], but reports an absent key too.
    pub(super) fn require<T>(
        &mut self,
        key: &'static str,
        fix: &str,
        parse: impl Fn(&DeValue<'_>) -> Result<T, String>,
    ) -> Option<T> {
        if !self.table.contains_key(key) && !self.overrides.contains_key(key) {
            self.problem(key, "is missing".into(), fix);
        }
        self.get(key, fix, parse)
    }

    /// Records a mistake about this table's `key`, at its line, or at the table's first one if it
    /// is not there.
    pub(super) fn problem(&mut self, key: &str, what: String, fix: &str) {
        let label = format!("{}.{key}", self.label);
        let place = self.places.get(key).unwrap_or(&self.span).clone();
        self.doc.problem(&place, &label, what, fix);
    }

    /// Reports every key that was not asked for.
    pub(super) fn finish(mut self) {
        for (key, _) in std::mem::take(&mut self.table) {
            let label = format!("{}.{}", self.label, key.get_ref());
            let fix = unknown_fix(key.get_ref(), &self.known);
            self.doc.problem(&key.span(), &label, "unknown key".into(), &fix);
        }
        for (key, value) in std::mem::take(&mut self.overrides) {
            self.doc.problems.push(Problem {
                place: Place::Flag(format!("{}{key}={value}", self.flag)),
                fix: unknown_fix(&key, &self.known),
                key: format!("{}.{key}", self.label),
                what: "unknown key".into(),
            });
        }
    }
}

/// `true` or `false`.
pub(super) fn boolean(v: &DeValue<'_>) -> Result<bool, String> {
    v.as_bool().ok_or_else(|| format!("is {}, not true or false", a_type(v)))
}

/// A string.
pub(super) fn string(v: &DeValue<'_>) -> Result<String, String> {
    v.as_str().map(Into::into).ok_or_else(|| format!("is {}, not a string", a_type(v)))
}

/// A whole number in `range`, which the type has.
pub(super) fn integer<N: TryFrom<u64>>(
    range: RangeInclusive<u64>,
) -> impl Fn(&DeValue<'_>) -> Result<N, String> {
    move |v| {
        let i = v.as_integer().ok_or_else(|| format!("is {}, not a number", a_type(v)))?;
        let outside = || format!("{i} is outside {}..={}", range.start(), range.end());
        let n = u64::from_str_radix(i.as_str(), i.radix()).map_err(|_| outside())?;
        N::try_from(n).ok().filter(|_| range.contains(&n)).ok_or_else(outside)
    }
}

/// Bytes in `range`: a number, or a string with K, M or G (powers of 1024).
pub(super) fn bytes(range: RangeInclusive<u64>) -> impl Fn(&DeValue<'_>) -> Result<u64, String> {
    move |v| {
        let n = match v {
            DeValue::Integer(i) => u64::from_str_radix(i.as_str(), i.radix()).ok(),
            DeValue::String(s) => parse_bytes(s),
            _ => None,
        };
        let n = n.ok_or_else(|| format!("{} is not a size", shown(v)))?;
        if range.contains(&n) {
            return Ok(n);
        }
        let (low, high) = (human_bytes(*range.start()), human_bytes(*range.end()));
        Err(format!("{} is outside {low} to {high}", shown(v)))
    }
}

/// `"64M"` as bytes.
fn parse_bytes(s: &str) -> Option<u64> {
    let s = s.trim();
    let digits = s.find(|c: char| !c.is_ascii_digit()).unwrap_or(s.len());
    let shift = match s[digits..].trim().to_ascii_uppercase().as_str() {
        "" | "B" => 0,
        "K" | "KB" | "KIB" => 10,
        "M" | "MB" | "MIB" => 20,
        "G" | "GB" | "GIB" => 30,
        _ => return None,
    };
    s[..digits].parse::<u64>().ok()?.checked_mul(1 << shift)
}

/// Bytes as an operator writes them: `64M`, `1536K`, `10`.
#[must_use]
pub fn human_bytes(n: u64) -> String {
    match n {
        0 => "0".into(),
        n if n.is_multiple_of(1 << 30) => format!("{}G", n >> 30),
        n if n.is_multiple_of(1 << 20) => format!("{}M", n >> 20),
        n if n.is_multiple_of(1 << 10) => format!("{}K", n >> 10),
        n => n.to_string(),
    }
}

/// A value as the operator wrote it, near enough to recognise it.
pub(super) fn shown(v: &DeValue<'_>) -> String {
    match v {
        DeValue::String(s) => format!("\"{s}\""),
        DeValue::Integer(i) => i.to_string(),
        DeValue::Float(x) => x.to_string(),
        DeValue::Boolean(b) => b.to_string(),
        other => a_type(other),
    }
}

fn a_type(v: &DeValue<'_>) -> String {
    let name = v.type_str();
    let article = if name.starts_with(['a', 'e', 'i', 'o', 'u']) { "an" } else { "a" };
    format!("{article} {name}")
}

fn line_of(text: &str, offset: usize) -> usize {
    1 + text.as_bytes()[..offset.min(text.len())].iter().filter(|&&b| b == b'\n').count()
}

fn unknown_fix(key: &str, known: &[&str]) -> String {
    let nearest = known.iter().map(|k| (distance(key, k), *k)).min();
    match nearest {
        Some((d, k)) if d <= 1 + k.len() / 3 => format!("did you mean `{k}`?"),
        _ => format!("remove it, or use one of: {}", known.join(", ")),
    }
}

/// Levenshtein distance, in bytes: keys are ASCII and short.
fn distance(a: &str, b: &str) -> usize {
    let b = b.as_bytes();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, ca) in a.bytes().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, cb) in b.iter().enumerate() {
            let substitute = diagonal + usize::from(ca != *cb);
            diagonal = row[j + 1];
            row[j + 1] = substitute.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}
