//! The report as SVG: for each direction with data, times between ACKs as the study's Figures 2 to
//! 6 have them, and the three parts of a delay as the vSnoop paper's Figure 1.

use std::path::Path;

use anyhow::{Context, Result, anyhow};
use nightporter_core::monitor::{Side, Way};
use plotters::coord::Shift;
use plotters::prelude::*;

use super::report::{DirectionReport, Report, SIDES, Times, WAYS, name_of, name_of_way};

/// Of one chart, in pixels.
const SIZE: (u32, u32) = (560, 320);
/// Colours that colour-blind people can tell apart (Okabe and Ito).
const COLORS: [RGBColor; 3] = [RGBColor(0, 114, 178), RGBColor(213, 94, 0), RGBColor(0, 158, 115)];
/// Times that a chart of delays shows, in powers of ten of microseconds: 1 µs to 100 s.
const DELAYS: std::ops::Range<f64> = 0.0..8.0;

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type DrawError<'a> = DrawingAreaErrorKind<<SVGBackend<'a> as DrawingBackend>::ErrorType>;

/// Writes the file.
pub(super) fn write(path: &Path, report: &Report) -> Result<()> {
    let ways: Vec<_> = WAYS.into_iter().filter(|way| report.all.bytes(*way) > 0).collect();
    let mut svg = String::new();
    {
        let rows = ways.len().max(1);
        let height = SIZE.1 * u32::try_from(rows).unwrap_or(1);
        let area = SVGBackend::with_string(&mut svg, (2 * SIZE.0, height)).into_drawing_area();
        area.fill(&WHITE).map_err(cannot_draw)?;
        let places = area.split_evenly((rows, 2));
        for (way, row) in ways.iter().zip(places.chunks(2)) {
            density(&row[0], report, *way).map_err(cannot_draw)?;
            delays(&row[1], report, *way).map_err(cannot_draw)?;
        }
        area.present().map_err(cannot_draw)?;
    }
    std::fs::write(path, svg).with_context(|| format!("cannot write {}", path.display()))
}

fn cannot_draw<E: std::error::Error>(error: E) -> anyhow::Error {
    anyhow!("cannot draw: {error}")
}

const fn title(way: Way) -> &'static str {
    match way {
        Way::ToGuest => "data to the guest",
        Way::FromGuest => "data from the guest",
    }
}

/// Shares of the times between ACKs, in bars of 25 µs.
fn density<'a>(area: &Area<'a>, report: &Report, way: Way) -> Result<(), DrawError<'a>> {
    let seen = |side| report.all.at(side, way);
    let shares = |it: &DirectionReport| {
        let all = it.between_acks.times.count.max(1) as f64;
        let bars = it.between_acks.bars.iter().map(|n| f64::from(*n) / all);
        bars.collect::<Vec<_>>()
    };
    let curves: Vec<_> = SIDES
        .into_iter()
        .filter_map(|side| seen(side).map(|it| (side, it.between_acks.bar_us, shares(it))))
        .collect();
    let most = curves.iter().flat_map(|(.., bars)| bars).copied().fold(0.01, f64::max);
    let last = curves.iter().map(|(_, bar, bars)| bar * bars.len() as f64).fold(100.0, f64::max);
    let mut chart = ChartBuilder::on(area)
        .caption(format!("between ACKs, {}", title(way)), ("sans-serif", 16))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(56)
        .build_cartesian_2d(0.0..last / 1e3, 0.0..most * 1.05)?;
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .x_desc("ms")
        .y_desc("share of ACKs in a bar of 0.025 ms")
        .draw()?;
    for ((side, bar, bars), color) in curves.iter().zip(COLORS) {
        let steps = bars.iter().enumerate().flat_map(|(at, share)| {
            let from = at as f64 * bar / 1e3;
            [(from, *share), (from + bar / 1e3, *share)]
        });
        chart
            .draw_series(LineSeries::new(steps, color.stroke_width(2)))?
            .label(format!("{}'s side", name_of(*side)))
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], color.stroke_width(2)));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK.mix(0.3))
        .draw()
}

/// The parts of a delay that these captures show, with what each is.
fn parts(report: &Report, way: Way) -> Vec<(&'static str, &Times)> {
    let at = |side| report.all.at(side, way);
    let host = report.all.host.iter().find(|it| it.way == name_of_way(way));
    let (net, guest) = (at(Side::Net), at(Side::Guest));
    let parts = match way {
        Way::ToGuest => [
            ("network: ACK to next segment", net.map(|it| &it.next_after)),
            ("host", host.map(|it| &it.delay)),
            ("guest: until it acknowledges", guest.map(|it| &it.acked_after)),
        ],
        Way::FromGuest => [
            ("network: until it acknowledges", net.map(|it| &it.acked_after)),
            ("host", host.map(|it| &it.delay)),
            ("guest: ACK to next segment", guest.map(|it| &it.next_after)),
        ],
    };
    parts.into_iter().filter_map(|(name, it)| Some((name, it.filter(|it| it.count > 0)?))).collect()
}

/// Shares of the times up to each time.
fn delays<'a>(area: &Area<'a>, report: &Report, way: Way) -> Result<(), DrawError<'a>> {
    let mut chart = ChartBuilder::on(area)
        .caption(format!("delays, {}", title(way)), ("sans-serif", 16))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(56)
        .build_cartesian_2d(DELAYS, 0.0..1.0)?;
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .x_labels(9)
        .x_label_formatter(&|x| power(*x))
        .x_desc("time")
        .y_desc("share of segments")
        .draw()?;
    for ((name, times), color) in parts(report, way).into_iter().zip(COLORS) {
        let mut below = 0.0;
        let mut points = vec![(DELAYS.start, 0.0)];
        for (edge_us, n) in &times.bins {
            let x = edge_us.log10().clamp(DELAYS.start, DELAYS.end);
            points.push((x, below));
            below += f64::from(*n) / times.count as f64;
            points.push((x, below));
        }
        points.push((DELAYS.end, below));
        chart
            .draw_series(LineSeries::new(points, color.stroke_width(2)))?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], color.stroke_width(2)));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::LowerRight)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK.mix(0.3))
        .draw()
}

/// A power of ten of microseconds.
fn power(of_ten: f64) -> String {
    let text = ["1 µs", "10 µs", "0.1 ms", "1 ms", "10 ms", "0.1 s", "1 s", "10 s", "100 s"];
    let at = text.iter().zip(0..).find(|(_, n)| (f64::from(*n) - of_ten).abs() < 0.01);
    at.map_or_else(String::new, |(text, _)| (*text).to_owned())
}
