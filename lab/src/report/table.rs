//! The tables for readers.

use std::fmt::Write as _;

use super::both::BothWays;
use super::checks::size;
use super::{Direction, Gain, GuestTcp, NetPath, Report, Row, Trouble};
use crate::experiment::stats::{Quantiles, Ratio};
use crate::sched::Scheduler;

impl Report {
    /// All tables and verdicts of a case.
    #[must_use]
    pub fn table(&self) -> String {
        let mut out = format!("\n{}\n{LEGEND}", self.headline());
        let mut kind = (Direction::Up, 0);
        for row in &self.rows {
            if (row.direction, row.bytes) != kind {
                if (row.direction, kind.0) == (Direction::Down, Direction::Up) {
                    out.push_str(DOWN_LEGEND);
                }
                kind = (row.direction, row.bytes);
                let _ = writeln!(out, "\n{:>7}{}", size(row.bytes), HEADER);
            }
            let gain = self.gains.iter().find(|g| {
                (g.direction, g.bytes) == kind && (g.path, g.over) == (row.path, NetPath::Tap)
            });
            let _ = writeln!(out, "{}", times_line(row, gain));
        }
        if let Some(both) = &self.both_ways {
            both_ways(&mut out, both);
        }
        if !self.requests.is_empty() {
            out.push_str(REQUESTS);
        }
        for requests in &self.requests {
            let _ = writeln!(out, "{requests}");
        }
        let _ = writeln!(out, "\n{COSTS}");
        for row in &self.rows {
            let _ = writeln!(out, "{}", cost_line(row));
        }
        let GuestTcp { timeouts, loss_probes, losses_probed } = self.guest_tcp;
        let _ = writeln!(
            out,
            "The guest's TCP, over all paths: {timeouts} timeouts, {loss_probes} loss probes, of \
             which it took {losses_probed} for a loss repaired."
        );
        for trouble in &self.troubles {
            let Trouble { path, looks, guest_timeouts: timeouts, .. } = trouble;
            let (paws, skipped) = (trouble.remote_paws, trouble.remote_acks_skipped);
            let (copies, segments) = (trouble.guest_copies, trouble.guest_segments);
            let _ = writeln!(
                out,
                "{looks:4} looks after downloads over {:11}: {timeouts} timeouts of the guest; \
                 {paws} PAWSEstab and {skipped} TCPACKSkipped of the remote;\n     \
                 of {segments} segments the guest sent {copies} again.",
                path.name()
            );
        }
        if !self.checks.is_empty() {
            out.push_str(CHECKS);
        }
        for check in &self.checks {
            let _ = writeln!(out, "{check}");
        }
        out
    }

    fn headline(&self) -> String {
        let shares: Vec<String> = self
            .guests
            .iter()
            .map(|g| format!("{} % in {:.0} turns a second", g.cpu_percent, g.switches_per_s))
            .collect();
        let load = match self.scheduler.load_percent() {
            None => "The guests have nothing else to do".to_owned(),
            Some(_) => format!("Each wants all of it; they got {}", shares.join(", ")),
        };
        let link = self.link_measured.map_or_else(String::new, |m| {
            format!(": {:.2} ms round trip, {:.0} Mbit/s", m.round_trip_ms, m.rate_mbit_s)
        });
        let artefact = match self.scheduler {
            Scheduler::Rr30 => {
                "\nUnder TCG this case is no model of a KVM or Xen host: a vCPU that waits for \
                 QEMU's lock\nloses the rest of its slice. strict30 keeps slices whole."
            }
            _ => "",
        };
        format!(
            "Transfers over a {}{link} with one of three guests that share a core ({}, {}).\n\
             {load}.{artefact}",
            self.link, self.scheduler, self.accel
        )
    }
}

const LEGEND: &str = "
  connect    the sender calls connect() ... it returns
  acked      connect() has returned ... everything written is acknowledged: the sender is done
  both       the two together
  delivered  the sender calls connect() ... the guest's application has read everything
  All in ms. p50: half are faster; p10, p90: one in ten is faster, slower; mean: what is paid.
  gain       times faster than tap by medians, and its 95 % interval
";

const DOWN_LEGEND: &str = "
Downloads from the same guest: it sends.
  acked      connect() has returned ... the remote's application has read everything
  delivered  the remote calls connect() ... the same
";

const HEADER: &str = "   \
    connect         acked          both          delivered                    gain
path          p50  mean    p50  mean    p50  mean    p10   p50   p90  mean   \
    acked             delivered";

const REQUESTS: &str = "
Requests and answers of 1 KB on an open connection, 20 a second, from when each was due: ms, and of
the tap's. Beside them what another guest lost against an equal share in a window of a second,
percent of that second.
path                   n     p50     p90     p99  p50/tap p99/tap  loss50  loss99 (windows)
";

const COSTS: &str = "What one transfer cost (means): interrupts of the guest's NICs; \
    ms of CPU of the receiver's vCPU
(under load: its share of the core) and how often it was switched to, of its VMM's other threads, of
the daemon
                       interrupts   vCPU  switches     VMM  daemon   hashes";

const CHECKS: &str = "
What this run had to show (medians; in brackets the 95 % interval). Not decided: what is wanted is
within the interval.
";

fn times_line(row: &Row, gain: Option<&Gain>) -> String {
    let two = |q: &Quantiles| format!("{} {}", ms(q.p50), ms(q.mean));
    let of = |ratio: fn(&Gain) -> Ratio| gain.map_or_else(String::new, |g| times(&ratio(g)));
    let line = format!(
        "{:11} {}  {}  {}  {} {} {} {}  {:17} {}",
        row.path.name(),
        two(&row.connect_ms),
        two(&row.acked_ms),
        two(&row.connect_acked_ms),
        ms(row.delivered_ms.p10),
        ms(row.delivered_ms.p50),
        ms(row.delivered_ms.p90),
        ms(row.delivered_ms.mean),
        of(|g| g.acked),
        of(|g| g.delivered),
    );
    line.trim_end().to_owned()
}

fn both_ways(out: &mut String, both: &BothWays) {
    let Some(bytes) = both.rows.first().map(|row| size(row.bytes)) else { return };
    let _ =
        writeln!(out, "\nBoth ways at once, {bytes} each, over one connection.\n       {HEADER}");
    for row in &both.rows {
        let kind = |g: &&Gain| (g.direction, g.path) == (row.direction, row.path);
        let line = times_line(row, both.gains.iter().find(kind));
        let _ = writeln!(out, "{line}  {}", row.direction);
    }
}

fn cost_line(row: &Row) -> String {
    let cost = &row.cost;
    format!(
        "{:>6} {:4} {:11} {:9.0} {:6.1} {:9.1} {:7.2} {:7.2}   {}/{}",
        size(row.bytes),
        if row.direction == Direction::Up { "up" } else { "down" },
        row.path.name(),
        cost.interrupts,
        cost.vcpu_ms,
        cost.vcpu_switches,
        cost.vmm_ms,
        cost.daemon_ms,
        row.hash_ok,
        row.n
    )
}

/// Three significant digits or so, five columns.
fn ms(value: f64) -> String {
    match value {
        v if v < 9.995 => format!("{v:5.2}"),
        v if v < 99.95 => format!("{v:5.1}"),
        v => format!("{v:5.0}"),
    }
}

fn times(ratio: &Ratio) -> String {
    let digits = |v: f64| if v < 9.95 { format!("{v:.1}") } else { format!("{v:.0}") };
    format!("{}x [{}, {}]", digits(ratio.ratio), digits(ratio.low), digits(ratio.high))
}
