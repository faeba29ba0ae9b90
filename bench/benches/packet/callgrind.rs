//! Reads a profile of callgrind (valgrind manual, "Callgrind Format Specification").

use std::collections::BTreeMap;

/// Instructions of the whole profile.
pub(crate) fn total(profile: &str) -> Option<u64> {
    profile.lines().find_map(|line| line.strip_prefix("totals: "))?.trim().parse().ok()
}

/// Instructions of all calls to methods of the engine with these names, and of what they called.
pub(crate) fn inclusive(profile: &str, methods: &[&str]) -> u64 {
    let is_meant = |name: &str| {
        name.contains("Engine") && methods.iter().any(|m| name.ends_with(&format!("::{m}")))
    };
    calls(profile).iter().filter(|(_, called, _)| is_meant(called)).map(|(_, _, cost)| cost).sum()
}

/// Instructions of copies that the turn does not make itself: the engine's.
pub(crate) fn copies(profile: &str) -> u64 {
    let is_meant = |by: &str, called: &str| called.contains("memcpy") && !by.contains("::turn::");
    calls(profile).iter().filter(|(by, to, _)| is_meant(by, to)).map(|(_, _, cost)| cost).sum()
}

/// All calls: by which function, of which, and their instructions.
///
/// A function is `fn=(number) name`, where the name stands only once. A call is `cfn=`, likewise,
/// then `calls=…`, then a line with the position and the cost.
fn calls(profile: &str) -> Vec<(&str, &str, u64)> {
    let mut names = BTreeMap::new();
    let (mut by, mut called, mut calls) = ("", "", vec![]);
    let mut lines = profile.lines();
    while let Some(line) = lines.next() {
        if let Some((_, function)) = line.split_once("fn=") {
            let (number, name) = function.split_once(' ').unwrap_or((function, ""));
            let name = *names.entry(number).or_insert(name);
            *(if line.starts_with("cfn=") { &mut called } else { &mut by }) = name;
        } else if line.starts_with("calls=") {
            let cost = lines.next().and_then(|line| line.split(' ').nth(1));
            calls.push((by, called, cost.and_then(|cost| cost.parse().ok()).unwrap_or(0)));
        }
    }
    calls
}
