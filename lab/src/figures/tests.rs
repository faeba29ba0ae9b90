use std::io::Write as _;
use std::process::Command;

use super::page::page;
use super::*;
use crate::experiment::{Cell, Results, Values};

/// A study that was measured: ack offload is three times as fast, but for one cell.
fn measured(study: &Study) -> Results {
    let mut results = Results::of_nothing(demo::result(study.name).measures);
    for terms in study.terms(Effort::Quick) {
        for bytes in study.options(Effort::Quick, None).sizes.expect("sizes") {
            let case = terms.one_way(study.direction, bytes);
            let ours = match study.direction {
                Direction::Up => NetPath::AckOffload,
                Direction::Down => NetPath::FloodRoute,
            };
            let is_slow = study.direction == Direction::Down && bytes == 100_000;
            for (path, ms) in [(NetPath::Tap, 90.0), (ours, if is_slow { 200.0 } else { 30.0 })] {
                for round in 0..8 {
                    let ms = ms + round as f64;
                    let cost = [(demo::VMM_CPU, 1.0), (demo::BACK_END_CPU, 2.0)];
                    let times = [(demo::ACKED, ms), (demo::DELIVERED.name, 2.0 * ms)];
                    let of = [times, cost].concat();
                    let values = Values { of, ..Values::default() };
                    results.note(&Cell::new(&*case, path.name()), round, values);
                }
            }
        }
    }
    results
}

/// Guests that sent without end: the more, the less.
fn measured_always_on() -> Results {
    let mut results = Results::of_nothing(always_on::result(ALWAYS_ON).measures);
    for senders in [1, 4] {
        let case = always_on::case(Scheduler::Strict30, Link::Hundred, senders);
        for arm in always_on::ARMS {
            let density = always_on::Density { bars: vec![3, 0, 7], count: 20 };
            let detail = json!({ "host": density, "guest": density });
            let of = vec![(always_on::RATE, 95.0 / senders as f64)];
            results.note(&Cell::new(&*case, arm.name()), 0, Values { of, detail });
        }
    }
    results
}

/// Segments that wait for a millisecond.
fn measured_delays() -> Results {
    let (name, scheduler) = DELAYS[0];
    let mut results = Results::of_nothing(delays::result(name).measures);
    let case = delays::case(delays(Effort::Quick, scheduler, None).terms);
    for path in delays::PATHS {
        let bins =
            |wait: delays::Wait| (wait.name().to_owned(), json!([[1000.0, 30], [30000.0, 10]]));
        let detail = Value::Object(delays::WAITS.map(bins).into_iter().collect());
        results.note(&Cell::new(&*case, path.name()), 0, Values { of: Vec::new(), detail });
    }
    results
}

/// Ten uploads at once.
fn measured_together() -> Results {
    let (name, scheduler) = TOGETHER[0];
    let mut results = Results::of_nothing(together::result(name).measures);
    let options = together(Effort::Quick, scheduler, None);
    for bytes in options.sizes {
        let case = together::case(options.terms, options.connections, bytes);
        for path in together::PATHS {
            let of = vec![(demo::ACKED, 20.0), (demo::DELIVERED.name, 40.0)];
            results.note(&Cell::new(&*case, path.name()), 0, Values { of, ..Values::default() });
        }
    }
    results
}

fn whole_page() -> String {
    let mut all: Vec<_> = STUDIES.iter().map(measured).collect();
    all.extend([measured_together(), measured_delays(), measured_always_on()]);
    page(&all).expect("a page")
}

#[test]
fn a_study_has_its_guests_loads_and_placement() {
    let terms = STUDIES[0].terms(Effort::Usual);
    let names: Vec<String> =
        terms.iter().map(|terms| terms.one_way(Direction::Up, 1_000_000)).collect();
    assert_eq!(names[0], "strict30 over gigabit, 1 guest, 60 % load, one core: 1 MB up");
    assert_eq!(names[6], "eevdf over gigabit, 60 % load, one core: 1 MB up");
    assert_eq!(names.len(), 8);
}

#[test]
fn the_report_shows_losses_as_plainly_as_wins_and_says_what_was_not_measured() {
    let nothing = page(&[]).expect("a page");
    assert_eq!(nothing.matches("Not measured: make figures.").count(), 11);
    let page = whole_page();
    // No requests are among them.
    assert_eq!(page.matches("Not measured: make figures.").count(), 1);
    assert_eq!(page.matches("<svg").count(), 10);
    for curve in ["tap, in the guest", "4 x 100 Mbit/s, strict30"] {
        assert!(page.contains(curve), "{curve}");
    }
    let row = |class: &str, case: &str| {
        page.lines().any(|line| line.contains(class) && line.contains(case))
    };
    assert!(row("faster", "strict30 over gigabit, 60 % load, one core: 1 MB up"));
    assert!(row("slower", "strict30 over gigabit, 40 % load, one core: 100 KB down"));
}

#[test]
fn a_browser_opens_the_report_without_an_error_and_shows_its_figures() {
    const BROWSER: &str = "chromium-headless-shell";
    if Command::new(BROWSER).arg("--version").output().is_err() {
        let why = format!("SKIPPED: the report in a browser: there is no {BROWSER} (apt-get)");
        let _ = writeln!(std::io::stderr(), "{why}"); // the harness shows what it does not catch
        return;
    }
    let dir = std::env::temp_dir().join(format!("nightporter-report-{}", std::process::id()));
    fs::create_dir_all(&dir).expect("a directory");
    let open = |name: &str, text: &str| {
        let (html, picture) = (dir.join(name), dir.join(format!("{name}.png")));
        fs::write(&html, text).expect("a page");
        let run = |argument: &str| {
            let output = Command::new(BROWSER)
                .args(["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"])
                .args(["--enable-logging=stderr", "--v=0"])
                .args(["--window-size=1000,3000", argument])
                .arg(format!("file://{}", html.display()))
                .output()
                .expect("it was there a moment ago");
            assert!(output.status.success(), "{output:?}");
            output
        };
        let seen = run("--dump-dom");
        run(&format!("--screenshot={}", picture.display()));
        let said = String::from_utf8_lossy(&seen.stderr).into_owned();
        let bytes = fs::metadata(&picture).expect("a screenshot").len();
        (String::from_utf8_lossy(&seen.stdout).into_owned(), said, bytes)
    };
    let (.., blank) = open("blank.html", "<!doctype html>");
    let (dom, said, bytes) = open("report.html", &whole_page());
    assert!(!said.contains("CONSOLE"), "{said}");
    assert_eq!(dom.matches("</svg>").count(), 10);
    assert!(bytes > 5 * blank, "{bytes} bytes of a picture, and {blank} of nothing");
    fs::remove_dir_all(&dir).expect("it goes");
}
