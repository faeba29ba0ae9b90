//! Curves as SVG: one or more small charts in one picture.
#![forbid(unsafe_code)]

use std::ops::Range;
use std::path::Path;

use anyhow::Context as _;
use plotters::prelude::*;

/// Colours that colour-blind people can tell apart (Okabe and Ito), in the order of the curves.
const COLORS: [RGBColor; 5] = [
    RGBColor(213, 94, 0),
    RGBColor(230, 159, 0),
    RGBColor(0, 114, 178),
    RGBColor(0, 158, 115),
    RGBColor(86, 86, 86),
];

/// A curve.
#[derive(Clone, Debug)]
pub struct Curve {
    /// Its text in the legend.
    pub name: String,
    /// From left to right.
    pub points: Vec<(f64, f64)>,
    /// How they are drawn.
    pub marks: Marks,
}

/// How the points of a curve are drawn.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Marks {
    /// A line through all.
    Line,
    /// The same, with a dot at each.
    LineAndDots,
    /// Dots alone, in the colour of the curve before.
    Dots,
}

/// Axes and curves.
#[derive(Clone, Debug)]
pub struct Chart {
    /// Above it.
    pub title: String,
    /// Below it.
    pub x_label: String,
    /// Beside it.
    pub y_label: String,
    /// The visible range; with `log_x` powers of ten.
    pub x: Range<f64>,
    /// See `x`.
    pub y: Range<f64>,
    /// Equal distances are equal ratios.
    pub log_x: bool,
    /// The legend is in the upper left corner, not the lower right.
    pub legend_left: bool,
    /// Drawn in this order.
    pub curves: Vec<Curve>,
}

/// Writes `charts` in rows of `columns` to `path`; `size` is that of one chart in pixels.
///
/// # Errors
/// If the file cannot be written.
pub fn write(
    path: &Path,
    size: (u32, u32),
    columns: usize,
    charts: &[Chart],
) -> anyhow::Result<()> {
    let svg = draw(size, columns, charts)?;
    std::fs::write(path, svg).with_context(|| format!("write {}", path.display()))
}

/// The same as text.
///
/// # Errors
/// If a chart has no range.
pub fn draw(size: (u32, u32), columns: usize, charts: &[Chart]) -> anyhow::Result<String> {
    let rows = charts.len().div_ceil(columns);
    let pixels = |n: usize, each: u32| u32::try_from(n).unwrap_or(1) * each;
    let mut svg = String::new();
    {
        let whole = (pixels(columns, size.0), pixels(rows, size.1));
        let area = SVGBackend::with_string(&mut svg, whole).into_drawing_area();
        area.fill(&WHITE).map_err(cannot_draw)?;
        for (chart, place) in charts.iter().zip(area.split_evenly((rows, columns))) {
            chart.draw(&place).map_err(cannot_draw)?;
        }
        area.present().map_err(cannot_draw)?;
    }
    Ok(svg)
}

fn cannot_draw<E: std::error::Error>(error: E) -> anyhow::Error {
    anyhow::anyhow!("cannot draw: {error}")
}

type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;
type DrawError<'a> = DrawingAreaErrorKind<<SVGBackend<'a> as DrawingBackend>::ErrorType>;

impl Chart {
    fn draw<'a>(&self, area: &Area<'a>) -> Result<(), DrawError<'a>> {
        let log = self.log_x;
        let place = move |x: f64| if log { x.log10() } else { x };
        let mut chart = ChartBuilder::on(area)
            .caption(&self.title, ("sans-serif", 16))
            .margin(12)
            .x_label_area_size(40)
            .y_label_area_size(56)
            .build_cartesian_2d(place(self.x.start)..place(self.x.end), self.y.clone())?;
        chart
            .configure_mesh()
            .light_line_style(TRANSPARENT)
            .x_labels(if log { 6 } else { 8 })
            .x_label_formatter(&|x| number(if log { 10_f64.powf(*x) } else { *x }))
            .y_label_formatter(&|y| number(*y))
            .x_desc(&self.x_label)
            .y_desc(&self.y_label)
            .label_style(("sans-serif", 13))
            .draw()?;
        let mut colors = COLORS.iter().cycle();
        let mut color = COLORS[0];
        for curve in &self.curves {
            let points = || curve.points.iter().map(|&(x, y)| (place(x), y));
            if curve.marks == Marks::Dots {
                chart
                    .draw_series(points().map(|p| Circle::new(p, 5, color.filled())))?
                    .label(&curve.name)
                    .legend(move |(x, y)| Circle::new((x + 8, y), 5, color.filled()));
                continue;
            }
            color = *colors.next().expect("it goes round");
            chart
                .draw_series(LineSeries::new(points(), color.stroke_width(2)))?
                .label(&curve.name)
                .legend(move |(x, y)| {
                    PathElement::new([(x, y), (x + 16, y)], color.stroke_width(2))
                });
            if curve.marks == Marks::LineAndDots {
                chart.draw_series(points().map(|p| Circle::new(p, 3, color.filled())))?;
            }
        }
        chart
            .configure_series_labels()
            .position(if self.legend_left {
                SeriesLabelPosition::UpperLeft
            } else {
                SeriesLabelPosition::LowerRight
            })
            .background_style(WHITE.mix(0.8))
            .border_style(BLACK.mix(0.3))
            .label_font(("sans-serif", 12))
            .draw()
    }
}

/// With as many digits as tell numbers on an axis apart.
fn number(n: f64) -> String {
    let digits = if n.abs() >= 10.0 || n == 0.0 { 0 } else { 2 };
    let text = format!("{n:.digits$}");
    if digits == 0 { text } else { text.trim_end_matches('0').trim_end_matches('.').to_owned() }
}

/// The share of `values` up to each of them, as a curve of steps, from `from` to `to`.
#[must_use]
pub fn distribution(name: &str, values: &[f64], from: f64, to: f64) -> Curve {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let mut points = vec![(from, 0.0)];
    let share = |n: usize| n as f64 / sorted.len().max(1) as f64;
    for (i, &value) in sorted.iter().enumerate() {
        let value = value.clamp(from, to);
        // One corner for values that are the same to the eye.
        if i + 1 < sorted.len() && sorted[i + 1].clamp(from, to) - value < value * 1e-3 {
            continue;
        }
        let below = points.last().map_or(0.0, |p| p.1);
        points.extend([(value, below), (value, share(i + 1))]);
    }
    points.push((to, 1.0));
    Curve { name: name.to_owned(), points, marks: Marks::Line }
}
