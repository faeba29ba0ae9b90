//! The pictures of the map: what the idea is, and what it gains.

use std::path::Path;

use nightporter_plot::{self as plot, Chart, Curve, Marks};

use super::place::{Direction, Place, Sharing};
use super::{Gain, Map, usual};
use crate::figures::measure::sequence_of;

/// The sharing of the idea's picture, its transfer, and the moment that it begins at.
const IDEA: (Sharing, u64, u64) = (Sharing::Slices { ms: 30 }, 1_000_000, 3);

/// One upload beside itself: what of it has come to the host by when.
pub(super) fn idea(path: &Path) -> anyhow::Result<()> {
    let (sharing, bytes, seed) = IDEA;
    let place = usual(sharing, bytes, Direction::Up);
    let curve = |name: &str, offload| Curve {
        name: name.to_owned(),
        points: sequence_of(&place.plan(seed, offload)),
        marks: Marks::Line,
    };
    let curves = vec![curve("without Nightporter", false), curve("with Nightporter", true)];
    let end = curves.iter().flat_map(|c| &c.points).map(|p| p.0).fold(0.0, f64::max);
    let chart = Chart {
        title: "1 MB to a VM that has 30 ms of each 90, 10 ms away".to_owned(),
        x_label: "seconds since the SYN".to_owned(),
        y_label: "MB at the host".to_owned(),
        x: 0.0..end * 1.05,
        y: 0.0..1.05,
        log_x: false,
        legend_left: false,
        curves,
    };
    plot::write(path, (640, 360), 1, &[chart])
}

/// Gains by size: curves of the model, dots of real guests.
pub(super) fn gain(map: &Map, path: &Path) -> anyhow::Result<()> {
    let chart = |title: &str, direction| {
        let kinds = [
            ("whole slices of 30 ms, 10 ms away", Sharing::Slices { ms: 30 }, 10_000),
            ("Linux's default class, 0.1 ms away", Sharing::Fair, 100),
        ];
        let mut curves = Vec::new();
        for (name, sharing, round_trip_us) in kinds {
            let is_it = |place: &Place| {
                (place.sharing, place.direction, place.round_trip_us)
                    == (sharing, direction, round_trip_us)
            };
            let point = |(place, gain): &(Place, Gain)| (megabytes(place), gain.delivered);
            let cells = map.cells.iter().filter(|(place, _)| is_it(place)).map(point);
            let of = |points, marks, name: String| Curve { name, points, marks };
            curves.push(of(cells.collect(), Marks::Line, name.to_owned()));
            let real = || map.checks.iter().filter(|(it, _)| is_it(&it.place));
            let rate = real().next().map_or(0, |(it, _)| it.place.rate_bps / 1_000_000_000);
            let points = real().map(|(it, _)| (megabytes(&it.place), it.delivered)).collect();
            let name = format!("the same, real guests, {rate} Gbit/s");
            curves.push(of(points, Marks::Dots, name));
        }
        let most = curves.iter().flat_map(|c| &c.points).map(|p| p.1).fold(1.0, f64::max);
        Chart {
            title: title.to_owned(),
            x_label: "MB".to_owned(),
            y_label: "times sooner delivered".to_owned(),
            x: 0.009..110.0,
            y: 0.0..(most * 1.6).ceil(), // room for the legend
            log_x: true,
            legend_left: true,
            curves,
        }
    };
    let charts = [
        chart("To the VM, as installed", Direction::Up),
        chart("From the VM, with congestion offload", Direction::Down),
    ];
    plot::write(path, (480, 380), 2, &charts)
}

fn megabytes(place: &Place) -> f64 {
    place.bytes as f64 / 1e6
}
