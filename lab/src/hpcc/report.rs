//! The numbers of a run of the HPC Challenge.

use anyhow::{Context, Result, ensure};

use super::name;
use crate::experiment::verdict::{Check, Wanted};
use crate::experiment::{Better, Measure, Results, Values, measure};
use crate::peer::Sockets;

const RATE: &str = "Mbit/s";

pub(super) const MEASURES: [Measure; 9] = [
    measure("ping-pong latency", "us", Better::Less),
    measure("ping-pong bandwidth", RATE, Better::More),
    measure("natural ring latency", "us", Better::Less),
    measure("natural ring", RATE, Better::More),
    measure("random ring latency", "us", Better::Less),
    measure("random ring", RATE, Better::More),
    measure("MPIRandomAccess", "kUP/s", Better::More),
    measure("PTRANS", RATE, Better::More),
    measure("MPIFFT", "Mflop/s", Better::More),
];

/// Of each measure: its name in hpcc's summary, the factor for its number there, and the TOE's gain
/// over the overlay in the VTOE paper (its figures 5 and 6 and their text).
const SOURCES: [(&str, f64, &str); MEASURES.len()] = [
    ("AvgPingPongLatency_usec", 1.0, "2"),
    ("AvgPingPongBandwidth_GBytes", 8000.0, "2 to 3"),
    ("NaturallyOrderedRingLatency_usec", 1.0, "2"),
    ("NaturallyOrderedRingBandwidth_GBytes", 8000.0, "2 to 3"),
    ("RandomlyOrderedRingLatency_usec", 1.0, "2"),
    ("RandomlyOrderedRingBandwidth_GBytes", 8000.0, "2 to 3"),
    ("MPIRandomAccess_GUPs", 1e6, "1.3 to 1.6"),
    ("PTRANS_GBs", 8000.0, "10 to 20"),
    ("MPIFFT_Gflops", 1000.0, "2 to 5"),
];

/// Of what hpcc has written.
///
/// # Errors
/// It says that it failed, or that what it has computed is wrong; or there is a number missing.
pub(super) fn read(guests: usize, text: &str) -> Result<Values> {
    let number = |name: &str| -> Result<f64> {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
        let line = line.with_context(|| format!("no {name} in what hpcc wrote: {text}"))?;
        line.trim().parse().with_context(|| format!("{name}={line}"))
    };
    ensure!(number("Success")? == 1.0, "hpcc has failed: {text}");
    ensure!(number("CommWorldProcs")? == guests as f64, "not all processes took part");
    // It lets one in a hundred updates be lost; none may be lost here.
    ensure!(number("MPIRandomAccess_Errors")? == 0.0, "MPIRandomAccess has lost updates");
    let failed = text.lines().find(|line| line.contains("FAILED") && !line.contains(" 0 "));
    ensure!(failed.is_none(), "hpcc has failed: {failed:?}");
    let value = |(of, (name, factor, _)): (&Measure, &(&str, f64, &str))| {
        Ok((of.name, number(name)? * factor))
    };
    let of = MEASURES.iter().zip(&SOURCES).map(value).collect::<Result<_>>()?;
    Ok(Values { of, ..Values::default() })
}

/// The TOE is to be better in each measure.
pub(super) fn judge(results: &mut Results, case: &str) {
    let [overlay, toe] = [Sockets::Native, Sockets::Toe].map(name);
    for (measure, (.., paper)) in MEASURES.iter().zip(SOURCES) {
        let Some(gain) = results.gain(case, toe, overlay, measure) else { continue };
        let what = format!("{case}, {}: times better by {toe}", measure.name);
        let check = Check::of_median(what, gain, Wanted::AtLeast(1.0));
        results.check(Check { paper: Some(paper), ..check });
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;

    use super::*;
    use crate::experiment::Cell;
    use crate::experiment::verdict::Verdict;

    /// The output of hpcc, if each number is this one.
    fn said(number: f64, errors: u32) -> String {
        let mut text = format!(
            "Begin of Summary section.\nSuccess=1\nCommWorldProcs=2\n\
             MPIRandomAccess_Errors={errors}\n"
        );
        for (name, ..) in SOURCES {
            let _ = writeln!(text, "{name}={number:e}");
        }
        text
    }

    #[test]
    fn half_the_latency_and_half_the_bandwidth_are_better_and_worse() {
        let mut results = Results::of_nothing(&MEASURES);
        for (path, number) in [(Sockets::Native, 0.004), (Sockets::Toe, 0.002)] {
            let values = read(2, &said(number, 0)).expect("whole");
            results.note(&Cell::new("2 guests", name(path)), 0, values);
        }
        judge(&mut results, "2 guests");
        let checks: Vec<_> = results.checks().iter().map(|c| (c.measured, c.verdict)).collect();
        assert_eq!(checks[..2], [(2.0, Verdict::Kept), (0.5, Verdict::Broken)]);
        assert_eq!(results.values("2 guests", "toe", MEASURES[1].name), [16.0], "in Mbit/s");
    }

    #[test]
    fn a_run_that_lost_updates_or_a_number_is_none() {
        assert!(read(2, &said(1.0, 1)).is_err());
        assert!(read(4, &said(1.0, 0)).is_err(), "of other processes");
        let text = said(1.0, 0).replace("PTRANS_GBs", "PTRANS");
        assert!(read(2, &text).is_err());
    }
}
