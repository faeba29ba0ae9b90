//! The two text formats of metrics, and which of them a scraper wants.

/// A format of metrics.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Format {
    /// Prometheus' text format 0.0.4, which every tool reads.
    Text,
    /// OpenMetrics 1.0, for those that ask for it.
    OpenMetrics,
}

impl Format {
    pub(super) const fn content_type(self) -> &'static str {
        match self {
            Self::Text => "text/plain; version=0.0.4; charset=utf-8",
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }

    /// By the `Accept` of a request's head: OpenMetrics if that is wanted at least as much as text
    /// (RFC 9110 section 12.5.1).
    pub(super) fn accepted(head: &[u8]) -> Self {
        let head = String::from_utf8_lossy(head).to_ascii_lowercase();
        let mut accept = head.lines().filter_map(|line| line.strip_prefix("accept:"));
        let ranges = accept.next().unwrap_or_default();
        let weight = |wanted: &str| {
            let mut of = ranges.split(',').map(|range| range.split(';').map(str::trim));
            let range = of.find_map(|mut it| (it.next() == Some(wanted)).then_some(it))?;
            let q = range.filter_map(|parameter| parameter.strip_prefix("q=")).next();
            Some(q.and_then(|q| q.parse().ok()).unwrap_or(1.0_f32))
        };
        let open = weight("application/openmetrics-text").unwrap_or(0.0);
        if open > 0.0 && open >= weight("text/plain").unwrap_or(0.0) {
            Self::OpenMetrics
        } else {
            Self::Text
        }
    }
}

/// OpenMetrics text in the format 0.0.4: there a counter's family has the name of its samples, and
/// the end has no mark.
pub(super) fn as_text(open_metrics: &str) -> String {
    let mut text = String::with_capacity(open_metrics.len() + 4096);
    let mut lines = open_metrics.lines().filter(|line| *line != "# EOF").peekable();
    while let Some(line) = lines.next() {
        let help = line.strip_prefix("# HELP ").and_then(|rest| rest.split_once(' '));
        let kind = lines.peek().and_then(|next| next.strip_prefix("# TYPE "));
        if let (Some((name, help)), Some(true)) = (help, kind.map(|it| it.ends_with(" counter"))) {
            text += &format!("# HELP {name}_total {help}\n# TYPE {name}_total counter\n");
            lines.next();
        } else {
            text += line;
            text.push('\n');
        }
    }
    text
}
