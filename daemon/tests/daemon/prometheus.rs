//! Prometheus scrapes the daemon, and answers the expressions of the dashboard and of the alerts.

use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Instant;

use serde_json::Value;

use crate::host::LIMIT;
use crate::operators::{free_address, host, http};

/// A Prometheus of its own.
struct Prometheus(Child);

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The repository's file below `packaging`.
fn packaged(path: &str) -> String {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../packaging/");
    std::fs::read_to_string(format!("{root}{path}")).unwrap()
}

/// Values of `key`, wherever they stand.
fn values<'a>(json: &'a Value, key: &str, found: &mut Vec<&'a str>) {
    match json {
        Value::Object(map) => {
            found.extend(map.get(key).and_then(Value::as_str));
            map.values().for_each(|value| values(value, key, found));
        }
        Value::Array(all) => all.iter().for_each(|value| values(value, key, found)),
        _ => {}
    }
}

/// Names of our metrics in an expression.
fn names(expression: &str) -> Vec<&str> {
    let words = expression.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let ours = words.filter(|word| word.starts_with("nightporter_"));
    ours.map(|name| name.strip_suffix("_bucket").unwrap_or(name)).collect()
}

fn encoded(text: &str) -> String {
    text.bytes().map(|byte| format!("%{byte:02x}")).collect()
}

#[test]
#[ignore = "needs prometheus (package prometheus)"]
fn prometheus_answers_every_expression_of_the_dashboard() {
    let (dir, host, metrics) = host();
    let (address, config) = (free_address(), dir.join("prometheus.yml"));
    let scrapes = format!(
        "global: {{scrape_interval: 200ms, evaluation_interval: 1h}}\n\
         scrape_configs:\n- job_name: nightporter\n  static_configs:\n  - targets: ['{metrics}']\n"
    );
    std::fs::write(&config, scrapes).unwrap();
    let _prometheus = Prometheus(
        Command::new("prometheus")
            .arg("--log.level=error")
            .arg(format!("--config.file={}", config.display()))
            .arg(format!("--storage.tsdb.path={}", dir.join("tsdb").display()))
            .arg(format!("--web.listen-address={address}"))
            .stdout(Stdio::null())
            .spawn()
            .expect("prometheus (package prometheus)"),
    );
    let begun = Instant::now();
    let wait = |what: &str| {
        assert!(begun.elapsed() < LIMIT, "{what}");
        thread::yield_now();
    };
    let is_ready = || {
        let listens = TcpStream::connect(address).is_ok();
        listens && http(address, "GET /-/ready HTTP/1.0\r\n\r\n").contains(" 200 OK\r\n")
    };
    while !is_ready() {
        wait("prometheus does not start");
    }
    let ask = |expression: &str| -> Value {
        let path = format!("/api/v1/query?query={}", encoded(expression));
        let answer = http(address, &format!("GET {path} HTTP/1.0\r\n\r\n"));
        let body = answer.split_once("\r\n\r\n").unwrap().1;
        serde_json::from_str(body).unwrap_or_else(|e| panic!("{e}: {answer}"))
    };
    let results = |answer: &Value| answer["data"]["result"].as_array().map_or(0, Vec::len);
    // A rate needs two scrapes.
    while results(&ask("count_over_time(up{job=\"nightporter\"}[1m]) > 1 and on() up == 1")) == 0 {
        wait("no two scrapes succeed");
    }

    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/metrics.md"));
    let (page, scraped) = (page.unwrap(), http(metrics, "GET /metrics HTTP/1.0\r\n\r\n"));
    let dashboard: Value = serde_json::from_str(&packaged("grafana/nightporter.json")).unwrap();
    let mut expressions = Vec::new();
    values(&dashboard, "expr", &mut expressions);
    assert!(expressions.len() > 20, "{expressions:?}");
    let rules = packaged("prometheus/nightporter.rules.yml");
    let alerts = rules.lines().filter_map(|line| line.trim().strip_prefix("expr: "));
    let alerts: Vec<_> = alerts.filter(|line| *line != ">-").collect();
    for (is_alert, expression) in
        expressions.iter().map(|it| (false, *it)).chain(alerts.iter().map(|it| (true, *it)))
    {
        let asked = [("$__rate_interval", "1m"), ("$instance", ".*"), ("$port", ".*")];
        let asked = asked.iter().fold(expression.to_owned(), |it, (of, by)| it.replace(of, by));
        let answer = ask(&asked);
        assert_eq!(answer["status"], "success", "{asked}: {answer}");
        for name in names(expression) {
            assert!(page.contains(&format!("| `{name}` |")), "{name} is no metric: {expression}");
        }
        // Those of uplinks: the host has none.
        let here = |name: &&str| {
            scraped.contains(&format!("\n{name}{{port=\"web1\""))
                || scraped.contains(&format!("\n{name} "))
        };
        let has = names(expression).iter().all(here) && !expression.contains("kind!=\"vm\"");
        assert!(is_alert || !has || results(&answer) > 0, "{asked} shows nothing: {answer}");
    }
    assert!(host.port("web1").vm.is_some());
}
