//! The report: one page with every figure that was measured. It needs nothing else.

use std::fmt::Write as _;

use anyhow::Result;
use nightporter_plot::{self as plot, Chart, Curve, Marks, distribution};

use crate::always_on::{
    self, ARMS, Arm, BAR_MS, BURSTINESS, Density, GUEST, GUEST_COMPRESSED, HOST, RATE, REPEATED,
};
use crate::delays::{self, Wait};
use crate::demo::{
    ACKED, ANSWER, BACK_END_CPU, DELIVERED, Direction, NetPath, Terms, VMM_CPU, size,
};
use crate::experiment::Results;
use crate::experiment::stats::{Quantiles, Ratio, percentile};
use crate::link::Link;
use crate::placement::{HostCore, Placement};
use crate::sched::Scheduler;
use crate::together;

/// A chart in pixels.
const SIZE: (u32, u32) = (460, 330);
/// Faster, or slower, than tap for certain: the whole interval is beyond.
const NEVER_WORSE: f64 = 0.95;
/// Bytes of the requests that stand for pings.
const REQUEST: usize = 1_000;

/// A figure of a paper.
struct Figure {
    title: &'static str,
    /// The paper's text; its pictures' numbers are not here.
    paper: &'static str,
    /// How ours is to be read.
    reading: &'static str,
    charts: fn(&[Results], Scheduler) -> Vec<Chart>,
}

const FIGURES: [Figure; 11] = [
    Figure {
        title: "vSnoop, Figure 1(a): round trips to a VM among loaded ones",
        paper: "The round trip of a ping grows almost in proportion to the slice of 30 ms with the \
                number of VMs of 60 % on the core. Numbers: in the figure only.",
        reading: "Ours are requests of 1 KB with their answers on an open connection, whose \
                  application has to run: no acknowledgement of the host can shorten them, so the \
                  two curves are to lie on each other.",
        charts: round_trips,
    },
    Figure {
        title: "vSnoop, Figures 1(b) and 1(c): where segments wait",
        paper: "To one of three VMs of 60 %, on the core of the driver domain: that takes at most \
                0.45 ms for 93 % of the packets, and then they wait in steps of 30 ms for the VM. \
                From it: steps of 10 ms, and shorter.",
        reading: "Shares of segments of 1 MB uploads and downloads. In the host, and from the \
                  guest's ring to its ACK, or from an ACK for it to its next segment. With ack \
                  offload segments wait in the host for nobody but the guest, whose ring they \
                  fill.",
        charts: waits,
    },
    Figure {
        title: "vSnoop, Figure 5: 100 KB to one of three VMs",
        paper: "Medians of 1,000 transfers: vanilla 0.192, with tuning 0.778, with tuning and \
                vSnoop 6.003 MB/s; about a third of the latter, as the VM sees them, are above the \
                link's rate.",
        reading: "tap is QEMU's with its default ring; the paper's vanilla has few buffers posted. \
                  Acked is the sender's view, delivered the application's.",
        charts: distributions,
    },
    Figure {
        title: "vSnoop, Figure 6(a), (b), (e), (c): 1, 2, 3 and 5 VMs of 60 %, one core",
        paper: "vSnoop is ahead at every size and number of VMs, and its gain grows with their \
                number and with smaller sizes. Numbers: in the figure only.",
        reading: "Medians of MB/s. Guests, VMMs and the daemon share one core.",
        charts: by_guests,
    },
    Figure {
        title: "vSnoop, Figure 6(d), (e), (f): three VMs of 40, 60 and 80 %",
        paper: "The gain grows with the load. Numbers: in the figure only.",
        reading: "The load catches up on what time did not suffice for, so three of 40 % want more \
                  than a core already.",
        charts: by_load,
    },
    Figure {
        title: "vSnoop, Figure 6(g): ten connections at once",
        paper: "Ten uploads at once to one of three VMs of 60 %. Numbers: in the figure only.",
        reading: "All bytes over the time until the last of ten uploads is done.",
        charts: at_once,
    },
    Figure {
        title: "vSnoop, Figure 6(i): the host's side on a core of its own",
        paper: "Large gains up to 1 MB, which narrow above. Numbers: in the figure only.",
        reading: "The same three VMs of 60 %, with the daemon and the VMMs' threads on one core \
                  with them, and on the other.",
        charts: by_host,
    },
    Figure {
        title: "vFlood, Figure 1: one of three VMs of 40 % sends",
        paper: "3.2 to 12.5 times the throughput; which size has which is in the figure only. \
                100 MB: 23 to 31 %.",
        reading: "Downloads over tap, and with congestion offload and a guest that floods.",
        charts: senders,
    },
    Figure {
        title: "What the host's side costs",
        paper: "vSnoop took about 4.5 % more CPU of the driver domain.",
        reading: "Processor time of the VMM's threads that are no vCPU, and of the process that \
                  carries the VM's frames (nightporterd, passt; tap has none), for each GB of \
                  uploads to one of three VMs of 60 %, the host's side on its own core. Means, \
                  with all that they do between two uploads.",
        charts: costs,
    },
    Figure {
        title: "VM effects, Figures 2 to 6: times between ACKs",
        paper: "At 100 Mbit/s, of a Linux without a VM: 0.256, 1.072 and 1.752 ms in the mean for \
                1, 4 and 7 senders, most at two segments' time. One VM at the host looks the same; \
                of four that mode is gone. Seen in the guest about twice as many ACKs are \
                compressed, and of four VMs the times are nearly uniform.",
        reading: "Shares of all ACKs of one connection, by bars of 0.025 ms. Guests are the \
                  senders, all on one core. Times at the host, and in the guest by its own clock. \
                  With congestion offload the guest's ACKs are the host's, one for many segments.",
        charts: densities,
    },
    Figure {
        title: "VM effects: what senders without end get",
        paper: "In all about 95 Mbit/s with one VM, about 60 with 4 and 7.",
        reading: "The sum of all senders; ACKs that were compressed before the watched guest saw \
                  them; and how uneven the watched connection is, sigma over mu of the bytes \
                  acknowledged in 60 ms.",
        charts: always_on_over_senders,
    },
];

/// The page of these results.
pub(super) fn page(results: &[Results]) -> Result<String> {
    let mut out = String::from(HEAD);
    for result in results {
        let (name, origin) = (escaped(result.name()), escaped(&result.origin_told()));
        let _ = writeln!(
            out,
            "<li><a href=\"../{name}/result.json\">{name}</a>: {origin}, {} samples</li>",
            result.samples()
        );
    }
    out += "</ul>\n";
    summary(&mut out, results);
    for figure in &FIGURES {
        let _ = write!(
            out,
            "<h2>{}</h2>\n<p><b>The paper:</b> {}</p>\n<p><b>Ours:</b> {}</p>\n",
            escaped(figure.title),
            escaped(figure.paper),
            escaped(figure.reading)
        );
        let charts = [Scheduler::Strict30, Scheduler::Eevdf]
            .map(|scheduler| (figure.charts)(results, scheduler))
            .concat();
        if charts.is_empty() {
            out += "<p class=\"none\">Not measured: make figures.</p>\n";
            continue;
        }
        let columns = charts.len().min(2);
        let _ = writeln!(out, "<figure>{}</figure>", plot::draw(SIZE, columns, &charts)?);
    }
    Ok(out + "</html>\n")
}

/// Wins and losses, one line each.
fn summary(out: &mut String, results: &[Results]) {
    *out += "<h2>All of it</h2>\n<p>How many times sooner than over tap, by medians, with the 95 % \
             interval.</p>\n<table><tr><th>case<th>path<th>samples<th>acked<th>delivered\
             <th>delivered is\n";
    for result in results {
        for case in result.cases() {
            for arm in result.arms(case).filter(|arm| arm.arm != NetPath::Tap.name()) {
                let gain = |time| result.ratio(case, NetPath::Tap.name(), &arm.arm, time);
                let Some(delivered) = gain(DELIVERED.name) else { continue };
                let told = |ratio: Ratio| {
                    format!("{:.2} [{:.2}, {:.2}]", ratio.ratio, ratio.low, ratio.high)
                };
                let _ = writeln!(
                    out,
                    "<tr class=\"{}\"><td>{}<td>{}<td>{}<td>{}<td>{}<td>{0}",
                    verdict(delivered),
                    escaped(case),
                    escaped(&arm.arm),
                    arm.samples.len(),
                    gain(ACKED).map_or_else(String::new, told),
                    told(delivered),
                );
            }
        }
    }
    *out += "</table>\n";
}

fn verdict(ratio: Ratio) -> &'static str {
    match ratio {
        Ratio { low, .. } if low > 1.0 => "faster",
        Ratio { high, .. } if high < NEVER_WORSE => "slower",
        _ => "undecided",
    }
}

fn terms(scheduler: Scheduler, guests: usize, load_percent: u64, host: HostCore) -> Terms {
    let placement = Placement { guests, load_percent, host };
    Terms { scheduler, link: Link::Gigabit, placement }
}

/// The result that has this case.
fn find<'a>(results: &'a [Results], case: &str) -> Option<&'a Results> {
    results.iter().find(|result| result.cases().contains(&case))
}

/// All sizes of studies.
const SIZES: [usize; 5] = [10_000, 100_000, 1_000_000, 10_000_000, 100_000_000];

/// The sizes that a study has of this world and direction, by its cases' names.
fn sizes(results: &[Results], terms: Terms, direction: Direction) -> Vec<usize> {
    let is_there = |bytes: &usize| find(results, &terms.one_way(direction, *bytes)).is_some();
    SIZES.into_iter().filter(is_there).collect()
}

fn quantiles(results: &[Results], case: &str, path: NetPath, time: &str) -> Option<Quantiles> {
    find(results, case)?.quantiles(case, path.name(), time)
}

/// Median MB/s.
fn rate(results: &[Results], case: &str, path: NetPath, time: &str, bytes: usize) -> Option<f64> {
    quantiles(results, case, path, time).map(|times| bytes as f64 / 1e3 / times.p50)
}

/// The paths that are compared, with their clocks.
const UP: [(NetPath, &str); 4] = [
    (NetPath::Tap, ACKED),
    (NetPath::Tap, DELIVERED.name),
    (NetPath::AckOffload, ACKED),
    (NetPath::AckOffload, DELIVERED.name),
];

/// One chart a size: curves of [`UP`] over the worlds' `x`.
fn over(results: &[Results], title: &str, x_label: &str, worlds: &[(f64, Terms)]) -> Vec<Chart> {
    let Some((_, first)) = worlds.first() else { return Vec::new() };
    let chart = |bytes: usize| {
        let curve = |&(path, time): &(NetPath, &str)| {
            let point = |(x, terms): &(f64, Terms)| {
                let case = terms.one_way(Direction::Up, bytes);
                Some((*x, rate(results, &case, path, time, bytes)?))
            };
            let points = worlds.iter().filter_map(point).collect();
            Curve { name: format!("{path}, {time}"), points, marks: Marks::LineAndDots }
        };
        let title = format!("{} {title}", size(bytes));
        chart_of(title, x_label, "MB/s", UP.iter().map(curve).collect())
    };
    sizes(results, *first, Direction::Up).into_iter().map(chart).collect()
}

/// A chart that has room for all of its curves.
fn chart_of(title: String, x_label: &str, y_label: &str, curves: Vec<Curve>) -> Chart {
    let points = || curves.iter().flat_map(|curve| &curve.points);
    let most = points().map(|point| point.1).fold(0.0, f64::max);
    let (first, last) = points()
        .fold((f64::MAX, f64::MIN), |(low, high), point| (low.min(point.0), high.max(point.0)));
    let room = ((last - first) * 0.05).max(0.1);
    Chart {
        title,
        x_label: x_label.to_owned(),
        y_label: y_label.to_owned(),
        x: first - room..last + room,
        y: 0.0..(most * 1.6).max(1e-3), // room for the legend
        log_x: false,
        legend_left: true,
        curves,
    }
}

/// Worlds of one core with so many guests of 60 %, as far as they were measured.
fn of_guests(results: &[Results], scheduler: Scheduler) -> Vec<(f64, Terms)> {
    let of = |guests: usize| {
        let terms = terms(scheduler, guests, 60, HostCore::Guests);
        let is_there = !sizes(results, terms, Direction::Up).is_empty();
        is_there.then_some((guests as f64, terms))
    };
    (1..=7).filter_map(of).collect()
}

fn by_guests(results: &[Results], scheduler: Scheduler) -> Vec<Chart> {
    let worlds = of_guests(results, scheduler);
    over(results, &format!("up, {scheduler}"), "VMs on the core", &worlds)
}

fn by_load(results: &[Results], scheduler: Scheduler) -> Vec<Chart> {
    let of = |load: u64| {
        let terms = terms(scheduler, 3, load, HostCore::Guests);
        let is_there = !sizes(results, terms, Direction::Up).is_empty();
        is_there.then_some((load as f64, terms))
    };
    let worlds: Vec<_> = [40, 60, 80].into_iter().filter_map(of).collect();
    over(results, &format!("up, {scheduler}"), "load of each VM, percent", &worlds)
}

fn by_host(results: &[Results], scheduler: Scheduler) -> Vec<Chart> {
    let worlds = [HostCore::Guests, HostCore::Own].map(|host| terms(scheduler, 3, 60, host));
    let sizes = sizes(results, worlds[1], Direction::Up);
    if sizes.is_empty() {
        return Vec::new();
    }
    let curve = |(terms, name): (Terms, &str)| {
        let point = |&bytes: &usize| {
            let case = terms.one_way(Direction::Up, bytes);
            let of = |path| Some(quantiles(results, &case, path, DELIVERED.name)?.p50);
            Some((bytes as f64 / 1e6, of(NetPath::Tap)? / of(NetPath::AckOffload)?))
        };
        let points = sizes.iter().filter_map(point).collect();
        Curve { name: name.to_owned(), points, marks: Marks::LineAndDots }
    };
    let names = ["on the guests' core", "on its own core"];
    let curves = worlds.into_iter().zip(names).map(curve).collect();
    let title = format!("ack offload over tap, {scheduler}");
    vec![by_size(chart_of(title, "MB", "times sooner delivered", curves))]
}

fn by_size(chart: Chart) -> Chart {
    Chart { x: 0.008..120.0, log_x: true, ..chart }
}

fn at_once(results: &[Results], scheduler: Scheduler) -> Vec<Chart> {
    const CONNECTIONS: usize = 10;
    let terms = terms(scheduler, 3, 60, HostCore::Guests);
    let curve = |(path, time): (NetPath, &str)| {
        let point = |&bytes: &usize| {
            let case = together::case(terms, CONNECTIONS, bytes);
            Some((bytes as f64 / 1e6, rate(results, &case, path, time, CONNECTIONS * bytes)?))
        };
        let points = SIZES.iter().filter_map(point).collect();
        Curve { name: format!("{path}, {time}"), points, marks: Marks::LineAndDots }
    };
    let curves: Vec<_> = UP.map(curve).into();
    if curves.iter().all(|curve| curve.points.is_empty()) {
        return Vec::new();
    }
    vec![by_size(chart_of(format!("ten up, {scheduler}"), "MB each", "MB/s of all", curves))]
}

fn round_trips(results: &[Results], scheduler: Scheduler) -> Vec<Chart> {
    let worlds = of_guests(results, scheduler);
    let mut curves = Vec::new();
    for path in [NetPath::Tap, NetPath::AckOffload] {
        let mut of = |name: &str, value: &dyn Fn(&[f64]) -> Option<f64>| {
            let point = |(guests, terms): &(f64, Terms)| {
                let case = terms.requests(REQUEST);
                let all = find(results, &case)?.values(&case, path.name(), ANSWER);
                Some((*guests, value(&all)?))
            };
            let points: Vec<_> = worlds.iter().filter_map(point).collect();
            let name = format!("{path}, {name}");
            curves.push(Curve { name, points, marks: Marks::LineAndDots });
        };
        of("mean", &|all| Quantiles::of(all.to_vec()).map(|q| q.mean));
        of("one in ten above", &|all| percentile(all, 900));
    }
    if curves.iter().all(|curve| curve.points.is_empty()) {
        return Vec::new();
    }
    vec![chart_of(format!("answers, {scheduler}"), "VMs on the core", "ms", curves)]
}

fn distributions(results: &[Results], scheduler: Scheduler) -> Vec<Chart> {
    const BYTES: usize = 100_000;
    let case = terms(scheduler, 3, 60, HostCore::Guests).one_way(Direction::Up, BYTES);
    let Some(result) = find(results, &case) else { return Vec::new() };
    let chart = |time: &str| {
        let curve = |path: NetPath| {
            let times = result.values(&case, path.name(), time);
            let rates: Vec<f64> = times.iter().map(|ms| BYTES as f64 / 1e3 / ms).collect();
            distribution(path.name(), &rates, 0.1, 1000.0)
        };
        Chart {
            title: format!("100 KB {time}, {scheduler}"),
            x_label: "MB/s".to_owned(),
            y_label: "share of transfers".to_owned(),
            x: 0.1..1000.0,
            y: 0.0..1.02,
            log_x: true,
            legend_left: true,
            curves: [NetPath::Tap, NetPath::AckOffload].map(curve).into(),
        }
    };
    [ACKED, DELIVERED.name].map(chart).into()
}

fn waits(results: &[Results], scheduler: Scheduler) -> Vec<Chart> {
    let case = delays::case(terms(scheduler, 3, 60, HostCore::Guests));
    let Some(result) = find(results, &case) else { return Vec::new() };
    let chart = |(title, [host, guest]): (&str, [Wait; 2])| {
        let mut curves = Vec::new();
        for path in delays::PATHS {
            for (wait, place) in [(host, "host"), (guest, "guest")] {
                let bins = delays::bins(result, &case, path, wait);
                let all: f64 = bins.iter().map(|bin| bin.1).sum();
                let mut sum = 0.0;
                let point = |(ms, count): (f64, f64)| {
                    sum += count;
                    (ms.clamp(0.001, 1000.0), sum / all)
                };
                let points = bins.into_iter().map(point).collect();
                curves.push(Curve { name: format!("{path}, {place}"), points, marks: Marks::Line });
            }
        }
        Chart {
            title: format!("{title}, {scheduler}"),
            x_label: "ms".to_owned(),
            y_label: "share of segments".to_owned(),
            x: 0.001..1000.0,
            y: 0.0..1.02,
            log_x: true,
            legend_left: true,
            curves,
        }
    };
    let ways = [
        ("to the guest", [Wait::ToHost, Wait::ToGuest]),
        ("from the guest", [Wait::FromHost, Wait::FromGuest]),
    ];
    ways.map(chart).into()
}

fn costs(results: &[Results], scheduler: Scheduler) -> Vec<Chart> {
    let terms = terms(scheduler, 3, 60, HostCore::Own);
    let sizes = sizes(results, terms, Direction::Up);
    let curve = |path: NetPath| {
        let point = |&bytes: &usize| {
            let case = terms.one_way(Direction::Up, bytes);
            let mean = |what| Some(quantiles(results, &case, path, what)?.mean);
            let ms = mean(VMM_CPU)? + mean(BACK_END_CPU)?;
            Some((bytes as f64 / 1e6, ms / (bytes as f64 / 1e6)))
        };
        let points = sizes.iter().filter_map(point).collect();
        Curve { name: path.to_string(), points, marks: Marks::LineAndDots }
    };
    let paths = [NetPath::Tap, NetPath::AckOffload, NetPath::Passt, NetPath::PasstTuned];
    let mut curves: Vec<_> = paths.map(curve).into();
    curves.retain(|curve| !curve.points.is_empty());
    if curves.is_empty() {
        return Vec::new();
    }
    vec![by_size(chart_of(format!("up, {scheduler}"), "MB", "s of CPU per GB", curves))]
}

fn senders(results: &[Results], scheduler: Scheduler) -> Vec<Chart> {
    let terms = terms(scheduler, 3, 40, HostCore::Guests);
    let sizes = sizes(results, terms, Direction::Down);
    if sizes.is_empty() {
        return Vec::new();
    }
    let curve = |path: NetPath| {
        let point = |&bytes: &usize| {
            let case = terms.one_way(Direction::Down, bytes);
            Some((bytes as f64 / 1e6, rate(results, &case, path, DELIVERED.name, bytes)?))
        };
        let points = sizes.iter().filter_map(point).collect();
        Curve { name: path.to_string(), points, marks: Marks::LineAndDots }
    };
    let curves = [NetPath::Tap, NetPath::FloodRoute].map(curve).into();
    vec![by_size(chart_of(format!("down, {scheduler}"), "MB", "MB/s", curves))]
}

/// Numbers of senders that were measured.
fn sender_counts(results: &[Results], scheduler: Scheduler) -> Vec<(usize, String)> {
    let of = |senders| (senders, always_on::case(scheduler, Link::Hundred, senders));
    (1..=7).map(of).filter(|(_, case)| find(results, case).is_some()).collect()
}

fn densities(results: &[Results], scheduler: Scheduler) -> Vec<Chart> {
    let curves = [
        (Arm::Linux, HOST, "no VM, at the host"),
        (Arm::Tap, HOST, "tap, at the host"),
        (Arm::Tap, GUEST, "tap, in the guest"),
        (Arm::CongestionOffload, GUEST, "congestion offload, in the guest"),
    ];
    let chart = |(senders, case): (usize, String)| {
        let result = find(results, &case)?;
        let curve = |(arm, at, name): (Arm, &str, &str)| {
            let Density { bars, count } = Density::of(result, &case, arm, at).unwrap_or_default();
            let share = |n: u32| 100.0 * f64::from(n) / f64::from(count.max(1));
            let points =
                (0..).zip(bars).map(|(bar, n)| ((f64::from(bar) + 0.5) * BAR_MS, share(n)));
            Curve { name: name.to_owned(), points: points.collect(), marks: Marks::Line }
        };
        let title = format!("{senders} x 100 Mbit/s, {scheduler}");
        let curves = curves.into_iter().map(curve).collect();
        let chart = chart_of(title, "ms from ACK to ACK", "percent of ACKs", curves);
        Some(Chart { x: 0.0..2.0, ..chart })
    };
    sender_counts(results, scheduler).into_iter().filter_map(chart).collect()
}

fn always_on_over_senders(results: &[Results], scheduler: Scheduler) -> Vec<Chart> {
    let counts = sender_counts(results, scheduler);
    if counts.is_empty() {
        return Vec::new();
    }
    let chart = |(measure, label): (&str, &str)| {
        let curve = |arm: Arm| {
            let point = |(senders, case): &(usize, String)| {
                let found = find(results, case)?.quantiles(case, arm.name(), measure)?;
                Some((*senders as f64, found.p50))
            };
            let points = counts.iter().filter_map(point).collect();
            Curve { name: arm.name().to_owned(), points, marks: Marks::LineAndDots }
        };
        let mut curves: Vec<_> = ARMS.map(curve).into();
        curves.retain(|curve| !curve.points.is_empty());
        let title = format!("{label}, {scheduler}");
        (!curves.is_empty()).then(|| chart_of(title, "senders", label, curves))
    };
    let all = [
        (RATE, "Mbit/s of all"),
        (GUEST_COMPRESSED, "percent compressed in the guest"),
        (BURSTINESS, "burstiness at 60 ms"),
        (REPEATED, "percent of segments repeated"),
    ];
    all.into_iter().filter_map(chart).collect()
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

const HEAD: &str = "<!doctype html>\n<html lang=\"en\"><meta charset=\"utf-8\">\
<title>Nightporter: the papers' figures on real guests</title>\n<style>\
body{font:15px sans-serif;max-width:62em;margin:2em auto;padding:0 1em}\
table{border-collapse:collapse}td,th{padding:2px 8px;text-align:left}\
.faster td:last-child{color:#063}.slower td:last-child{color:#a00;font-weight:bold}\
figure{margin:0}svg{max-width:100%;height:auto}.none{color:#777}\
@media print{h2{break-after:avoid}figure{break-inside:avoid}}</style>\n\
<h1>The papers' figures on real guests</h1>\n<p>Guests of QEMU under a real scheduler, over a line \
of the lab; <a href=\"../../docs/demo.md\">docs/demo.md</a> says how times are taken. Where a \
number stands in a picture of the paper only, it is not printed here.</p>\n<ul>\n";
