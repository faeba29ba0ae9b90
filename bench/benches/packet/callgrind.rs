//! Reads a profile of callgrind (valgrind manual, "Callgrind Format Specification").

use std::collections::BTreeSet;

/// Instructions of the whole profile.
pub(crate) fn total(profile: &str) -> Option<u64> {
    profile.lines().find_map(|line| line.strip_prefix("totals: "))?.trim().parse().ok()
}

/// Instructions of all calls to methods of the engine with these names, and of what they called.
///
/// A call is `cfn=(number) name`, where the name stands only once, then `calls=…`, then a line with
/// the position and the cost.
pub(crate) fn inclusive(profile: &str, methods: &[&str]) -> u64 {
    let is_meant = |name: &str| {
        name.contains("Engine") && methods.iter().any(|m| name.ends_with(&format!("::{m}")))
    };
    let mut numbers = BTreeSet::new();
    let (mut called, mut sum) = ("", 0);
    let mut lines = profile.lines();
    while let Some(line) = lines.next() {
        if let Some((_, function)) = line.split_once("fn=") {
            let (number, name) = function.split_once(' ').unwrap_or((function, ""));
            if is_meant(name) {
                numbers.insert(number);
            }
            if line.starts_with("cfn=") {
                called = number;
            }
        } else if line.starts_with("calls=") {
            let cost = lines.next().and_then(|line| line.split(' ').nth(1));
            if numbers.contains(called) {
                sum += cost.and_then(|cost| cost.parse::<u64>().ok()).unwrap_or(0);
            }
        }
    }
    sum
}
