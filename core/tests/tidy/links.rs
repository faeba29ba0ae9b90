//! Links of pages lead to a file and a heading: in the repository, and in the package, which has
//! some of its files.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::{expect_none, repository, root};

/// Files of the package `nightporter` by pattern: `packaging/deb` has the same line.
const PACKAGED: &str = "README.md ARCHITECTURE.md CONTRIBUTING.md CHANGELOG.md docs/*.md \
                        docs/design/*.md docs/img/*.svg examples/*";

/// The lines of a page that are not examples.
fn text(page: &str) -> impl Iterator<Item = &str> {
    let mut is_example = false;
    page.lines().filter(move |line| {
        let fence = line.trim_start().starts_with("```");
        is_example ^= fence;
        !is_example && !fence
    })
}

/// The name by which GitHub links to a heading.
fn anchor(heading: &str) -> String {
    let title = heading.trim_start_matches('#').trim();
    // A link in a heading counts by its words.
    let mut words = String::new();
    let mut rest = title;
    while let Some((before, after)) = rest.split_once("](") {
        words += before;
        rest = after.split_once(')').map_or("", |(_, behind)| behind);
    }
    words += rest;
    let keeps = |c: &char| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_');
    words.chars().filter(keeps).collect::<String>().to_lowercase().replace(' ', "-")
}

/// The targets of a page's links, without those into the web.
fn links(page: &str) -> Vec<String> {
    let lines = text(page).collect::<Vec<_>>().join("\n");
    let targets = lines.split("](").skip(1).filter_map(|rest| rest.split_once(')'));
    let targets = targets.map(|(target, _)| target.to_owned());
    targets.filter(|target| !target.contains("://") && !target.contains(' ')).collect()
}

/// `docs/design/../spec.md` without the detour.
fn plain(path: &Path) -> String {
    let mut parts: Vec<&str> = Vec::new();
    for part in path.to_str().unwrap_or_default().split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    parts.join("/")
}

/// The dead links of `pages` to `files`.
fn dead(pages: &BTreeMap<String, String>, files: &BTreeSet<String>) -> Vec<String> {
    let mut found = Vec::new();
    for (path, page) in pages {
        for link in links(page) {
            let (file, heading) = link.split_once('#').unwrap_or((&link, ""));
            let dir = Path::new(path).parent().unwrap_or(Path::new(""));
            let target = if file.is_empty() { path.clone() } else { plain(&dir.join(file)) };
            let is_there = files.contains(&target)
                || files.iter().any(|it| it.starts_with(&format!("{target}/")));
            let has_heading = |page: &String| {
                text(page).any(|line| line.starts_with('#') && anchor(line) == heading)
            };
            let is_right = heading.is_empty() || pages.get(&target).is_some_and(has_heading);
            if !is_there || !is_right {
                found.push(format!("{path}: {link}"));
            }
        }
    }
    found
}

fn is_packaged(path: &str) -> bool {
    PACKAGED.split(' ').any(|pattern| match pattern.split_once('*') {
        None => path == pattern,
        Some((before, after)) => {
            let middle = path.strip_prefix(before).and_then(|it| it.strip_suffix(after));
            middle.is_some_and(|it| !it.contains('/'))
        }
    })
}

#[test]
fn every_link_of_every_page_resolves_here_and_in_the_package() {
    let files = repository();
    let pages = |wanted: &dyn Fn(&str) -> bool| -> BTreeMap<String, String> {
        let pages = files.iter().filter(|file| file.path.ends_with(".md") && wanted(&file.path));
        pages.map(|file| (file.path.clone(), file.text.clone())).collect()
    };
    let names: BTreeSet<_> = files.iter().map(|file| file.path.clone()).collect();
    let all = pages(&|_| true);
    assert!(all.values().map(|page| links(page).len()).sum::<usize>() > 100, "links are found");
    expect_none("dead links", &dead(&all, &names));
    let packaged = names.into_iter().filter(|path| is_packaged(path)).collect();
    expect_none("dead links in the package", &dead(&pages(&is_packaged), &packaged));
    let script = std::fs::read_to_string(root().join("packaging/deb")).expect("the script");
    assert!(script.contains(&format!("for page in {PACKAGED}; do")), "packaging/deb has others");
}

#[test]
fn a_dead_link_is_found() {
    let page = "# A `b` (c)\n[x](#a-b-c) [y](docs/y.md#z)\n```\n[no](no.md)\n```\n[w](https://w)";
    let pages = |other: &str| {
        BTreeMap::from([("a.md".into(), page.into()), ("docs/y.md".into(), String::from(other))])
    };
    let files = BTreeSet::from(["a.md".into(), "docs/y.md".into()]);
    assert_eq!(dead(&pages("## Z"), &files), [""; 0]);
    assert_eq!(dead(&pages("## Other"), &files), ["a.md: docs/y.md#z"]);
    let up = "# Z\n[up](../a.md) [gone](../b.md)";
    assert_eq!(dead(&pages(up), &files), ["docs/y.md: ../b.md"]);
}

/// It is the first page that anybody reads.
#[test]
fn the_readme_is_short() {
    let page = std::fs::read_to_string(root().join("README.md")).expect("the page");
    assert!(page.lines().count() <= 150, "{} lines", page.lines().count());
}
