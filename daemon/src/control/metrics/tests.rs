use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use nightporter_api::{
    AttachedStatus, BoostAccount, Histogram, PortStatus, SocketsStatus, VmStatus,
};
use nightporter_core::counters::VmCounters;
use nightporter_core::drops::DropReason;
use nightporter_core::tcp::flow::State;

use super::*;

/// A status in which every family has a value, and every drop reason has happened.
fn full() -> Status {
    let drops = DropReason::ALL.iter().map(|reason| (reason.label().into(), 1)).collect();
    let tap = PortStatus { name: "lan".into(), kind: "tap".into(), drops, ..PortStatus::default() };
    let counters = VmCounters::ALL.iter().map(|it| (it.name.into(), 7)).collect();
    let states = State::ALL.iter().map(|it| it.label()).chain(["closed", "reset"]);
    let vm = VmStatus {
        flows: states.map(|state| (state.into(), 1)).collect(),
        attached: Some(AttachedStatus::default()),
        boost: Some(BoostAccount { favoured_us: 1_500_000, ..BoostAccount::default() }),
        counters,
        ack_saved: Histogram {
            buckets: vec![(1 << 15, 2), (1 << 16, 3)],
            above: 1,
            sum_ns: 2_000_250_000,
        },
        ..VmStatus::default()
    };
    let web1 = PortStatus {
        name: "web1".into(),
        kind: "vm".into(),
        vm: Some(vm),
        ..PortStatus::default()
    };
    Status {
        version: "1.2.3".into(),
        pid: 7,
        uptime_s: 61,
        worker_cpu_us: 2_250_000,
        sockets: SocketsStatus { stalls: 3, cpu_us: 1_500_000, late: false }.into(),
        ports: vec![tap, web1],
        ..Status::default()
    }
}

fn text() -> String {
    formats::as_text(&families::render(full()))
}

/// Labels of a family: their names and values, without the names of ports.
fn labels(text: &str, name: &str) -> BTreeMap<String, Vec<String>> {
    let mut found = BTreeMap::<String, Vec<String>>::new();
    let sample = |line: &'_ str| {
        let labels = line.strip_prefix(name)?;
        labels.strip_prefix("_count").unwrap_or(labels).strip_prefix('{').map(String::from)
    };
    let samples: Vec<_> = text.lines().filter_map(sample).collect();
    for sample in &samples {
        let (pairs, _) = sample.split_once('}').unwrap();
        for (label, value) in pairs.split(',').map(|pair| pair.split_once('=').unwrap()) {
            let values = found.entry(label.into()).or_default();
            let value = value.trim_matches('"').to_owned();
            if !["port", "version"].contains(&label) && !values.contains(&value) {
                values.push(value);
            }
        }
    }
    if let Some(kinds) = found.get_mut("kind").filter(|kinds| kinds.contains(&"tap".into())) {
        *kinds = ["vm", "tap", "macvtap", "overlay"].map(String::from).to_vec();
    }
    found
}

/// docs/metrics.md, from the metrics themselves.
fn page(text: &str) -> String {
    let mut page = String::from(
        "# Metrics\n\n\
         The daemon serves these at `http://ADDRESS/metrics` \
         ([`metrics`](configuration.md#metrics)), as Prometheus' text 0.0.4 or,\n\
         to those that accept it, as OpenMetrics. The text says `# TYPE` and `# HELP` of each; \
         this page is made of it, by a test.\n\n\
         Counters are since the daemon started, or since the port was added. `port` is the name of \
         a VM, uplink or overlay in the\n\
         configuration, `kind` tells them apart. The other labels have the values in brackets. \
         [drop-reasons.md](drop-reasons.md)\n\
         explains the reasons of drops; a reason has no value before it has dropped a frame.\n\n\
         A dashboard for Grafana and alert rules for Prometheus are in `packaging/grafana` and \
         `packaging/prometheus`; the\n\
         package has them in `/usr/share/doc/nightporter`.\n\n\
         ## Prometheus\n\n\
         `apt-get install prometheus` brings a file that has both lists already, so these are the \
         entries to add:\n\n```yaml\n",
    );
    page += include_str!("../../../../packaging/prometheus/prometheus.yml");
    page.push_str(
        "```\n\n\
         In Debian's file, as root:\n\n\
         ```sh\n\
         sed -i -e 's|^rule_files:|&\\n  - /usr/share/doc/nightporter/prometheus/*.rules.yml|' \\\n\
         \x20   -e 's|^scrape_configs:|&\\n  - job_name: nightporter\\n    static_configs:\\n      \
         - targets: [\"127.0.0.1:9469\"]|' \\\n\
         \x20   /etc/prometheus/prometheus.yml\n\
         promtool check config /etc/prometheus/prometheus.yml\n\
         systemctl reload prometheus\n```\n\n\
         After a minute `nightporter_ack_saved_seconds_count` counts the ACKs of each VM that the \
         host was ahead of. Send to the\n\
         VMs again then: a `rate` is of what comes between two scrapes, and without it the median \
         is NaN. Two scrapes later, half a\n\
         minute with Debian's file, this is that time in the median, in seconds:\n\n\
         ```sh\ncurl --silent http://127.0.0.1:9090/api/v1/query --data-urlencode \\\n    \
         'query=histogram_quantile(0.5, rate(nightporter_ack_saved_seconds_bucket[5m]))'\n```\n\n\
         ## All of them\n\n| Metric | Type | Labels | Meaning |\n|---|---|---|---|\n",
    );
    for (help, kind) in text.lines().zip(text.lines().skip(1)) {
        let Some((name, help)) = help.strip_prefix("# HELP ").and_then(|it| it.split_once(' '))
        else {
            continue;
        };
        let kind = kind.rsplit(' ').next().unwrap();
        let labels = labels(text, name).into_iter().map(|(label, values)| match values.len() {
            1..=9 => format!("{label} ({})", values.join(", ")),
            _ => label,
        });
        let labels = labels.collect::<Vec<_>>().join("; ");
        page += &format!("| `{name}` | {kind} | {labels} | {help} |\n");
    }
    page
}

/// `UPDATE=1 cargo test -p nightporterd the_page_of_metrics` writes it.
#[test]
fn the_page_of_metrics_is_current() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/metrics.md");
    let page = page(&text());
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(&path, &page).unwrap();
    }
    assert_eq!(std::fs::read_to_string(path).unwrap(), page, "run this test with UPDATE=1");
}

#[test]
fn counters_have_the_names_of_their_samples_in_text_and_not_in_openmetrics() {
    let open = families::render(full());
    assert!(open.contains("# TYPE nightporter_frames counter\n") && open.ends_with("# EOF\n"));
    let text = text();
    assert!(text.contains("# TYPE nightporter_frames_total counter\nnightporter_frames_total{"));
    assert!(text.contains("\nnightporter_build_info{version=\"1.2.3\"} 1\n"), "{text}");
    for sample in [
        "worker_cpu_seconds_total{worker=\"frames\"} 2.25",
        "worker_cpu_seconds_total{worker=\"sockets\"} 1.5",
        "stalls_total{worker=\"frames\"} 0",
        "stalls_total{worker=\"sockets\"} 3",
    ] {
        assert!(text.contains(&format!("\nnightporter_{sample}\n")), "{text}");
    }
    for sample in [
        "bucket{le=\"0.000032768\",port=\"web1\"} 2",
        "bucket{le=\"0.000065536\",port=\"web1\"} 5",
        "bucket{le=\"+Inf\",port=\"web1\"} 6",
        "count{port=\"web1\"} 6",
        "sum{port=\"web1\"} 2.00025",
    ] {
        let sample = format!("\nnightporter_ack_saved_seconds_{sample}\n");
        assert!(text.contains(&sample), "{sample}{text}");
    }
    assert!(text.contains("\nnightporter_boost_favoured_seconds_total{port=\"web1\"} 1.5\n"));
    assert!(text.contains("\nnightporter_link_up{port=\"lan\",kind=\"tap\"} 0\n"), "{text}");
    assert!(!text.contains("# EOF"));
    let samples = |text: &str| text.lines().filter(|it| !it.starts_with('#')).count();
    assert_eq!(samples(&text), samples(&open));
}

#[test]
fn a_reason_that_never_dropped_a_frame_has_no_series() {
    let mut status = full();
    status.ports[0].drops = BTreeMap::from([("hairpin".into(), 2)]);
    let text = formats::as_text(&families::render(status));
    let drops: Vec<_> = text.lines().filter(|it| it.starts_with("nightporter_drops")).collect();
    assert_eq!(drops, ["nightporter_drops_total{port=\"lan\",kind=\"tap\",reason=\"hairpin\"} 2"]);
}

#[test]
fn openmetrics_is_for_those_that_accept_it() {
    let of =
        |accept: &str| Format::accepted(format!("GET /metrics\r\n{accept}\r\n\r\n").as_bytes());
    for text in [
        "Host: x",
        "Accept: */*",
        "Accept: text/plain",
        "Accept: application/openmetrics-text;q=0,*/*",
        "Accept: application/openmetrics-text; q=0.4, text/plain;version=0.0.4;q=0.5",
    ] {
        assert_eq!(of(text), Format::Text, "{text}");
    }
    for open in [
        "Accept: application/openmetrics-text",
        // Prometheus 2.42.
        "accept:application/openmetrics-text;version=1.0.0,application/openmetrics-text;\
         version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
    ] {
        assert_eq!(of(open), Format::OpenMetrics, "{open}");
    }
}

/// Prometheus' own tool on `input` and a file of the repository.
fn promtool(arguments: &[&str], input: &str) {
    let mut tool = Command::new("promtool")
        .args(arguments)
        .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging/prometheus"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("promtool (package prometheus)");
    tool.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = tool.wait_with_output().unwrap();
    let said = [output.stdout, output.stderr].map(|it| String::from_utf8_lossy(&it).into_owned());
    assert!(output.status.success(), "promtool {arguments:?}: {}", said.concat());
}

#[test]
#[ignore = "needs promtool (package prometheus)"]
fn promtool_finds_nothing_wrong_with_the_metrics() {
    promtool(&["check", "metrics"], &text());
}

#[test]
#[ignore = "needs promtool (package prometheus)"]
fn promtool_finds_nothing_wrong_with_the_alerts_and_they_fire() {
    promtool(&["check", "config", "prometheus.yml"], "");
    promtool(&["check", "rules", "--lint-fatal", "nightporter.rules.yml"], "");
    promtool(&["test", "rules", "nightporter.test.yml"], "");
}
