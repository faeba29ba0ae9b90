use super::*;
use crate::demo::checks::tests::{note, results};
use crate::demo::measures::Terms;

const KINDS: [(Direction, usize); 4] = [
    (Direction::Up, 1_000_000),
    (Direction::Up, 10_000_000),
    (Direction::Down, 1_000_000),
    (Direction::Down, 10_000_000),
];

/// A case in which tap takes 1200 ms and all other paths so many.
fn with_case<T>(
    scheduler: Scheduler,
    delivered_ms: u64,
    is_whole: bool,
    look: impl FnOnce(Shown<'_>) -> T,
) -> T {
    let (mut results, terms) = (results(), Terms::usual(scheduler, Link::Metro));
    for &(direction, bytes) in &KINDS {
        let others = paths(direction, scheduler).into_iter().flatten();
        for path in [NetPath::Tap].into_iter().chain(others) {
            let ms = if path == NetPath::Tap { 1200 } else { delivered_ms };
            note(&mut results, terms.one_way(direction, bytes), path, (20, ms), is_whole);
        }
    }
    let measured = Measured { terms, results: &results, kinds: &KINDS, both: 0 };
    look(Shown { measured, boost_refused: None, machine: "tcg on 2 cores" })
}

#[test]
fn the_summary_has_80_columns_and_few_lines_and_says_what_is_wrong() {
    with_case(Scheduler::Strict30, 600, true, |slices| {
        with_case(Scheduler::Eevdf, 1200, true, |eevdf| {
            let good = [slices, eevdf];
            let text = summary(&good);
            assert!(text.lines().count() <= 30, "{text}");
            assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
            let same = text.contains("  2.0x ====          same\n");
            assert!(same && text.contains("arrived whole"), "{text}");
            assert!(text.contains(" ~1.0x ==") && text.contains("~: no gain"), "{text}");
            assert!(is_sound(&good));
            let page = page(&good);
            let has_boost = page.contains("ack-offload+boost") && page.contains("<td>30/30");
            assert!(has_boost && page.ends_with("</html>\n"), "{page}");
        });
    });
    with_case(Scheduler::Eevdf, 600, false, |damaged| {
        assert!(!is_sound(&[damaged]) && summary(&[damaged]).contains("DATA WAS WRONG"));
    });
    with_case(Scheduler::Eevdf, 2400, true, |slow| {
        assert!(!is_sound(&[slow]) && summary(&[slow]).contains("SLOWER THAN TAP: "));
    });
}
