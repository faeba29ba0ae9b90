//! Results of real guests: `result.json` of `nightporter-lab demo`.

use std::path::Path;

use anyhow::Context as _;
use serde_json::Value;

use super::FRAME_EMULATED_NS;
use super::place::{Direction, Place, Sharing};

/// One case of one size and direction.
#[derive(Clone, Debug)]
pub struct Measured {
    /// As the lab calls it.
    pub name: String,
    /// The same in virtual time.
    pub place: Place,
    /// Rounds that both paths completed.
    pub rounds: usize,
    /// How many times sooner it was acknowledged, and delivered, than over tap; by medians.
    pub acked: f64,
    /// See `acked`.
    pub delivered: f64,
    /// Medians until it was delivered, over tap and over ours.
    pub delivered_ms: [f64; 2],
}

/// VMs of the demo.
const VMS: u16 = 3;

/// The cases of a result that the map has a place for.
///
/// # Errors
/// It is no result of the demo.
pub fn read(path: &Path) -> anyhow::Result<Vec<Measured>> {
    let no_result = || format!("{} is no result of nightporter-lab demo", path.display());
    let text = std::fs::read(path).with_context(no_result)?;
    let result: Value = serde_json::from_slice(&text).with_context(no_result)?;
    let arms = result["arms"].as_array().with_context(no_result)?;
    let mut cases: Vec<&str> = arms.iter().filter_map(|arm| arm["case"].as_str()).collect();
    cases.dedup();
    Ok(cases.into_iter().filter_map(|case| of_case(case, arms)).collect())
}

fn of_case(case: &str, arms: &[Value]) -> Option<Measured> {
    let place = place(case)?;
    let ours = match place.direction {
        Direction::Up => "ack-offload",
        Direction::Down => "flood-route",
    };
    let samples = |name: &str| {
        let arm = arms.iter().find(|arm| arm["case"] == case && arm["arm"] == name)?;
        arm["samples"].as_array()
    };
    let (tap, ours) = (samples("tap")?, samples(ours)?);
    let of = |samples: &[Value], measure: &str| {
        let values: Vec<f64> =
            samples.iter().filter_map(|it| it["values"][measure].as_f64()).collect();
        (!values.is_empty()).then(|| median(values))
    };
    let delivered_ms = [of(tap, "delivered")?, of(ours, "delivered")?];
    Some(Measured {
        name: case.to_owned(),
        place,
        rounds: tap.len().min(ours.len()),
        acked: of(tap, "acked")? / of(ours, "acked")?,
        delivered: delivered_ms[0] / delivered_ms[1],
        delivered_ms,
    })
}

/// As the lab's: of an even number, the middle between two.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let upper = values[values.len() / 2];
    if values.len() % 2 == 1 { upper } else { f64::midpoint(values[values.len() / 2 - 1], upper) }
}

/// Of a name as "strict30 over metro: 1 MB up".
fn place(case: &str) -> Option<Place> {
    let (terms, transfer) = case.split_once(": ")?;
    let (scheduler, link) = terms.split_once(" over ")?;
    let (sharing, vms) = match scheduler {
        "strict30" => (Sharing::Slices { ms: 30 }, VMS),
        "eevdf" => (Sharing::Fair, VMS),
        "quota30" => (Sharing::Quota { ms: 30 }, VMS),
        _ => return None,
    };
    let (rate_bps, round_trip_us) = match link {
        "lan" => (10_000_000_000, 100),
        "metro" => (1_000_000_000, 10_000),
        "wan" => (100_000_000, 40_000),
        _ => return None,
    };
    let [count, unit, direction] = transfer.split(' ').collect::<Vec<_>>().try_into().ok()?;
    let unit = match unit {
        "KB" => 1_000,
        "MB" => 1_000_000,
        _ => return None,
    };
    let direction = match direction {
        "up" => Direction::Up,
        "down" => Direction::Down,
        _ => return None,
    };
    let (bytes, frame_ns) = (count.parse::<u64>().ok()? * unit, FRAME_EMULATED_NS);
    Some(Place { sharing, vms, round_trip_us, rate_bps, frame_ns, bytes, direction })
}
