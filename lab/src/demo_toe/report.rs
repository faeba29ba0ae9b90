//! The numbers of a transfer, and the conditions.

use serde::Serialize;

use super::{Between, Case, Path, Sample};
use crate::experiment::verdict::{Check, Wanted};
use crate::experiment::{Better, Cell, Measure, Results, Values, measure};

const RATE: &str = "rate";
const ROUND_TRIP: &str = "round trip";
/// The receiving VMM and the daemon of its host; without a guest the receiving thread instead of a
/// VMM, and of the hosts' own TCP that alone.
const CPU: &str = "receiver's CPU";
/// It arrived as it was sent: 1, or 0.
const WHOLE: &str = "arrived whole";

pub(super) const MEASURES: [Measure; 4] = [
    measure(RATE, "Mbit/s", Better::More),
    measure(ROUND_TRIP, "us", Better::Less),
    measure(CPU, "s per GB", Better::Less),
    measure(WHOLE, "", Better::Neither),
];

/// A row of issue 11's table: the first path over the second.
struct Must {
    case: Case,
    measure: &'static str,
    path: Path,
    over: Path,
    wanted: Wanted,
    /// The VTOE paper's value, over InfiniBand.
    paper: Option<&'static str>,
}

const fn must(
    (case, measure): (Case, &'static str),
    [path, over]: [Path; 2],
    wanted: Wanted,
    paper: Option<&'static str>,
) -> Must {
    Must { case, measure, path, over, wanted, paper }
}

const STREAM: (Case, &str) = (Case::Stream, RATE);
const OVERLAY: [Path; 2] = [Path::ToeTcp, Path::Overlay];

/// Between guests.
const MUSTS: [Must; 6] = [
    must(STREAM, OVERLAY, Wanted::AtLeast(2.7), Some("2.7")),
    must(STREAM, [Path::ToeTcp, Path::Switch], Wanted::AtLeast(1.3), None),
    must((Case::Duplex, RATE), OVERLAY, Wanted::AtLeast(2.7), Some("full duplex kept")),
    must((Case::RoundTrip, ROUND_TRIP), OVERLAY, Wanted::AtMost(0.5), Some("0.5")),
    must(STREAM, [Path::ToeLocal, Path::ToeTcp], Wanted::AtLeast(2.0), None),
    must((Case::Stream, CPU), OVERLAY, Wanted::AtMost(0.6), Some("0.77")),
];

/// Between hosts.
const ALONE: Must = must(STREAM, [Path::Fabric, Path::Host], Wanted::AtLeast(0.94), Some("0.94"));

/// As JSON has it.
fn word(of: impl Serialize) -> String {
    let value = serde_json::to_value(of).unwrap_or_default();
    value.as_str().unwrap_or_default().to_owned()
}

fn case_of(guests: Between, case: Case) -> String {
    match guests {
        Between::None => format!("no guests, {}", word(case)),
        _ => format!("{} guests, {}", word(guests), word(case)),
    }
}

/// A path between these guests. The hosts' own paths are one arm, beside whichever guests they are
/// measured.
pub(super) fn cell(between: Between, path: Path, case: Case) -> Cell {
    let guests = match path {
        Path::Fabric | Path::Encrypted | Path::Host => Between::None,
        _ => between,
    };
    Cell::new(case_of(guests, case), word(path))
}

impl Sample {
    /// Its numbers.
    pub(super) fn values(&self, case: Case) -> Values {
        let mut of = match case {
            Case::RoundTrip => vec![(ROUND_TRIP, self.rtt_us)],
            Case::Duplex => vec![(RATE, self.rate * 8e-6)],
            Case::Stream => {
                vec![(RATE, self.rate * 8e-6), (CPU, self.cpu_s / (self.bytes / 1e9))]
            }
        };
        of.push((WHOLE, f64::from(u8::from(self.whole))));
        Values { of, ..Values::default() }
    }
}

/// The table of issue 11, as far as its paths were measured.
pub(super) fn judge(results: &mut Results) {
    let of = |cell: (&str, &str)| results.values(cell.0, cell.1, WHOLE);
    let cases: Vec<String> = results.cases().into_iter().map(str::to_owned).collect();
    let arms =
        cases.iter().flat_map(|case| results.arms(case).map(move |arm| (&**case, &*arm.arm)));
    let whole: Vec<f64> = arms.flat_map(of).collect();
    let share = whole.iter().sum::<f64>() / whole.len() as f64;
    results.check(Check::of("share of transfers that arrived whole", share, Wanted::AtLeast(1.0)));
    let guests = [Between::Uml, Between::Qemu];
    let all = guests.iter().flat_map(|guests| MUSTS.iter().map(move |must| (*guests, must)));
    for (guests, must) in all.chain([(Between::None, &ALONE)]) {
        let Must { case, measure, wanted, paper, .. } = *must;
        let case = case_of(guests, case);
        let [path, over] = [must.path, must.over].map(word);
        let Some(ratio) = results.ratio(&case, &path, &over, measure) else { continue };
        let check =
            Check::of_interval(format!("{case}, {measure}: {path} over {over}"), ratio, wanted);
        results.check(Check { paper, ..check });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiment::verdict::Verdict;

    fn note(results: &mut Results, between: Between, path: Path, case: Case, value: f64) {
        let (rate, rtt_us, cpu_s) = (value * 125_000.0, value, value / 1000.0);
        let sample = Sample { rate, rtt_us, cpu_s, bytes: 1e9, whole: true };
        (0..8).for_each(|round| {
            results.note(&cell(between, path, case), round, sample.values(case));
        });
    }

    fn verdicts(results: &mut Results) -> Vec<(String, Verdict)> {
        judge(results);
        let check = |check: &Check| (check.what.clone(), check.verdict);
        results.checks().iter().skip(1).map(check).collect()
    }

    #[test]
    fn times_and_processor_time_have_to_be_less() {
        let of = |toe| {
            let mut results = Results::of_nothing(&MEASURES);
            for (path, value) in [(Path::Overlay, 100.0), (Path::ToeTcp, toe)] {
                for case in [Case::RoundTrip, Case::Stream] {
                    note(&mut results, Between::Qemu, path, case, value);
                }
            }
            let all = verdicts(&mut results);
            let word = |what: &str| all.iter().find(|(name, _)| name.contains(what)).unwrap().1;
            (word(ROUND_TRIP), word(CPU))
        };
        assert_eq!(of(50.0), (Verdict::Kept, Verdict::Kept));
        assert_eq!(of(55.0), (Verdict::Broken, Verdict::Kept));
        assert_eq!(of(61.0), (Verdict::Broken, Verdict::Broken));
    }

    #[test]
    fn a_path_without_guests_is_one_of_all_kinds_and_judged_once() {
        let mut results = Results::of_nothing(&MEASURES);
        for path in [Path::Fabric, Path::Host] {
            note(&mut results, Between::Uml, path, Case::Stream, 100.0);
        }
        assert!(results.has(&cell(Between::Qemu, Path::Host, Case::Stream), 7));
        let said = verdicts(&mut results);
        let what = "no guests, stream, rate: toe-tcp over host".to_owned();
        assert_eq!(said, [(what, Verdict::Kept)]);
    }

    #[test]
    fn a_damaged_transfer_is_told() {
        let mut results = Results::of_nothing(&MEASURES);
        let sample = Sample { rate: 1e9, rtt_us: 1.0, cpu_s: 1.0, bytes: 1e9, whole: false };
        let path = cell(Between::Uml, Path::Overlay, Case::Stream);
        results.note(&path, 0, sample.values(Case::Stream));
        judge(&mut results);
        assert_eq!(results.checks()[0].verdict, Verdict::Broken);
    }
}
