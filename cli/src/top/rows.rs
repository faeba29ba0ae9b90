//! Lines of the daemon's answers.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use nightporter_api::{FlowInfo, Histogram, PortStatus, Status, VmStatus};

use crate::flows::OVER;
use crate::show;
use crate::vms::decimal;

/// A column: its heading, and its width.
#[derive(Clone, Copy, Debug)]
pub(super) struct Column {
    pub(super) name: &'static str,
    pub(super) width: u16,
    is_number: bool,
}

impl Column {
    /// The text as wide as the column, numbers at its right end.
    pub(super) fn aligned(&self, text: &str) -> String {
        let width = usize::from(self.width);
        let text = match text.chars().count() {
            n if n > width => text.chars().take(width - 1).chain(['~']).collect(),
            _ => text.to_owned(),
        };
        if self.is_number { format!("{text:>width$}") } else { format!("{text:<width$}") }
    }
}

const fn text(name: &'static str, width: u16) -> Column {
    Column { name, width, is_number: false }
}

const fn number(name: &'static str, width: u16) -> Column {
    Column { name, width, is_number: true }
}

/// Together 79 columns, with one between two.
pub(super) const VM_COLUMNS: &[Column] = &[
    text("VM", 16),
    text("LINK", 4),
    text("OFFLOAD", 8),
    number("FLOWS", 6),
    number("HELD", 5),
    number("SENT/s", 6),
    number("RECV/s", 6),
    number("EARLY/s", 7),
    number("SAVED", 6),
    number("p99", 6),
];

/// Likewise.
pub(super) const FLOW_COLUMNS: &[Column] = &[
    number("ID", 5),
    text("VM", 9),
    text("GUEST", 20),
    text("", 2),
    text("REMOTE", 20),
    text("STATE", 5),
    number("HELD", 5),
    number("EARLY", 6),
];

/// A text, and the number that it stands for.
#[derive(Clone, Debug, Default)]
pub(super) struct Shown {
    pub(super) text: String,
    value: Option<f64>,
}

impl Shown {
    fn number(value: f64, text: String) -> Self {
        Self { text, value: Some(value) }
    }

    fn text(text: impl Into<String>) -> Self {
        Self { text: text.into(), value: None }
    }

    fn bytes(n: u64) -> Self {
        Self::number(n as f64, show::bytes(n))
    }

    /// Large numbers first, then texts by the alphabet.
    fn order(&self, other: &Self) -> Ordering {
        match (self.value, other.value) {
            (Some(a), Some(b)) => b.total_cmp(&a),
            (Some(_), None) => Ordering::Less,
            (None, Some(_)) => Ordering::Greater,
            (None, None) => self.text.cmp(&other.text),
        }
    }
}

/// A VM or a connection.
#[derive(Clone, Debug, Default)]
pub(super) struct Line {
    /// Of its VM.
    pub(super) name: String,
    pub(super) is_down: bool,
    pub(super) cells: Vec<Shown>,
}

/// All lines, and the one above them.
#[derive(Debug, Default)]
pub(super) struct Lines {
    pub(super) head: String,
    pub(super) rows: Vec<Line>,
}

impl Lines {
    /// By this column; equal lines keep their order.
    pub(super) fn sort(&mut self, column: usize, is_inverted: bool) {
        self.rows.sort_by(|a, b| match (a.cells.get(column), b.cells.get(column)) {
            (Some(a), Some(b)) if is_inverted => b.order(a),
            (Some(a), Some(b)) => a.order(b),
            _ => Ordering::Equal,
        });
    }
}

/// The last two looks at the daemon.
#[derive(Debug, Default)]
pub(super) struct Looks {
    before: Option<(Instant, Status)>,
    now: Option<(Instant, Status)>,
    flows: Vec<FlowInfo>,
}

impl Looks {
    pub(super) fn take(&mut self, at: Instant, status: Status, flows: Vec<FlowInfo>) {
        self.before = self.now.replace((at, status));
        self.flows = flows;
    }

    /// The time between the two.
    fn time(&self) -> Option<Duration> {
        let ((before, _), (now, _)) = (self.before.as_ref()?, self.now.as_ref()?);
        Some(now.duration_since(*before))
    }

    /// How much a counter has grown in a second. `None`: the port was not there before.
    fn rate(&self, port: &PortStatus, of: impl Fn(&PortStatus) -> u64) -> Option<u64> {
        let time = self.time()?;
        let before = self.before.as_ref()?.1.ports.iter().find(|it| it.name == port.name)?;
        let new = u128::from(of(port).saturating_sub(of(before)));
        u64::try_from(new * 1_000_000 / time.as_micros().max(1)).ok()
    }

    fn rated(&self, port: &PortStatus, of: impl Fn(&PortStatus) -> u64) -> Shown {
        self.rate(port, of).map_or(Shown::number(-1.0, "-".into()), |rate| {
            Shown::number(rate as f64, decimal(rate))
        })
    }

    fn head(&self) -> String {
        let Some((_, status)) = &self.now else { return String::new() };
        let vms = status.ports.iter().filter_map(|port| port.vm.as_ref());
        let (count, flows) = vms.fold((0, 0), |(n, all), vm| (n + 1, all + show::live_flows(vm)));
        let share = self.time().zip(self.before.as_ref()).map(|(time, (_, before))| {
            let used = u128::from(status.worker_cpu_us.saturating_sub(before.worker_cpu_us));
            format!(", {} % of a core", used * 100 / time.as_micros().max(1))
        });
        let (version, share) = (&status.version, share.unwrap_or_default());
        format!("nightporterd {version}: {count} VMs, {flows} connections{share}")
    }

    /// A line for each VM.
    pub(super) fn vms(&self) -> Lines {
        let ports = self.now.iter().flat_map(|(_, status)| &status.ports);
        let rows = ports.filter_map(|port| Some(self.vm(port, port.vm.as_ref()?))).collect();
        Lines { head: self.head(), rows }
    }

    fn vm(&self, port: &PortStatus, vm: &VmStatus) -> Line {
        let flows = show::live_flows(vm);
        let [median, most] = self.saved(port, vm);
        let early = |port: &PortStatus| port.vm.as_ref().map_or(0, show::early_bytes);
        Line {
            name: port.name.clone(),
            is_down: !port.link,
            cells: vec![
                Shown::text(&port.name),
                Shown::text(if port.link { "up" } else { "down" }),
                Shown::text(show::offload(vm)),
                Shown::number(flows as f64, flows.to_string()),
                Shown::bytes(vm.held_bytes),
                self.rated(port, |port| port.bytes_from_port.saturating_mul(8)),
                self.rated(port, |port| port.bytes_to_port.saturating_mul(8)),
                self.rated(port, early),
                median,
                most,
            ],
        }
    }

    /// By how much ACKs were ahead since the last look: median, 99 %.
    fn saved(&self, port: &PortStatus, vm: &VmStatus) -> [Shown; 2] {
        let before = self.before.as_ref().map(|(_, status)| &status.ports);
        let before = before.and_then(|ports| ports.iter().find(|it| it.name == port.name));
        let before = before.and_then(|port| port.vm.as_ref()).map(|vm| &vm.ack_saved);
        let new = before.map(|before| since(&vm.ack_saved, before)).unwrap_or_default();
        [0.5, 0.99].map(|q| match new.quantile_ns(q) {
            Some(ns) => Shown::number(ns, show::span(ns)),
            None => Shown::number(-1.0, "-".into()),
        })
    }

    /// A line for each connection that has not ended.
    pub(super) fn flows(&self) -> Lines {
        let live = self.flows.iter().filter(|flow| !OVER.contains(&flow.state.as_str()));
        let rows = live.map(|flow| Line {
            name: flow.vm.clone(),
            is_down: false,
            cells: vec![
                Shown::number(-(flow.id as f64), flow.id.to_string()),
                Shown::text(&flow.vm),
                Shown::text(&flow.guest),
                Shown::text(if flow.guest_is_client { "->" } else { "<-" }),
                Shown::text(&flow.remote),
                Shown::text(&flow.state),
                Shown::bytes(flow.held_bytes),
                Shown::bytes(flow.early_acked_bytes),
            ],
        });
        Lines { head: self.head(), rows: rows.collect() }
    }
}

/// The samples that are new since `before`.
fn since(now: &Histogram, before: &Histogram) -> Histogram {
    let old: BTreeMap<_, _> = before.buckets.iter().copied().collect();
    let less =
        |(bound, n): &(u64, u64)| (*bound, n.saturating_sub(old.get(bound).copied().unwrap_or(0)));
    Histogram {
        buckets: now.buckets.iter().map(less).collect(),
        above: now.above.saturating_sub(before.above),
        sum_ns: now.sum_ns.saturating_sub(before.sum_ns),
    }
}
