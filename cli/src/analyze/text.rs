//! The report as text, 100 columns at most.

use std::io::{self, Write};

use nightporter_core::monitor::Way;

use super::report::{
    BOTH, Captured, Connection, DirectionReport, HostDelays, Report, SIDES, Streams, Times, WAYS,
    name_of_way,
};
use crate::show::{bytes, table};

/// Connections in the list.
const LISTED: usize = 20;

pub(super) fn write(out: &mut dyn Write, report: &Report) -> io::Result<()> {
    report.captures.iter().try_for_each(|it| captured(out, it))?;
    if report.vm_is_a_guess {
        writeln!(out, "which end is the VM is a guess by the first frame of each: --vm says it")?;
    }
    writeln!(out)?;
    match &report.connections[..] {
        [] => return writeln!(out, "no connection"),
        [one] => {
            writeln!(out, "{} (remote) and {} (guest), {}", one.remote, one.guest, when(one))?;
            streams(out, &one.streams)?;
        }
        many => {
            list(out, many)?;
            writeln!(out)?;
            writeln!(out, "all {} connections; --flow ID shows one", many.len())?;
            streams(out, &report.all)?;
        }
    }
    if report.unwatched_segments > 0 {
        let n = report.unwatched_segments;
        writeln!(out, "{n} segments are of further connections, which were not watched")?;
    }
    if report.all.host.iter().any(|it| it.backwards > it.delay.count) {
        writeln!(
            out,
            "most segments left before they came: give the network's side first, and captures of \
             one clock"
        )?;
    }
    Ok(())
}

fn captured(out: &mut dyn Write, it: &Captured) -> io::Result<()> {
    let Captured { file, side, frames, lasts_s, .. } = it;
    let size = bytes(it.bytes);
    let sides = if *side == BOTH { "both sides".into() } else { format!("{side}'s side") };
    writeln!(out, "{file}, {sides}: {frames} frames, {size} bytes in {lasts_s:.3} s")?;
    let mut rest: Vec<_> = it.unread.iter().map(|(why, n)| format!("{n} {why}")).collect();
    for (n, what) in [
        (it.not_tcp, "not TCP"),
        (it.left_out, "without a time or of an unknown link, left out"),
        (it.backwards, "earlier than the one before"),
    ] {
        rest.extend((n > 0).then(|| format!("{n} {what}")));
    }
    if !rest.is_empty() {
        writeln!(out, "  of them {}", rest.join(", "))?;
    }
    if it.missed > 0 {
        writeln!(out, "  {} more were missed: the reader was too slow", it.missed)?;
    }
    match it.damaged_at {
        Some(at) => writeln!(out, "  damaged: no frame was found from byte {at} on"),
        None if it.end == "cut" => writeln!(out, "  the file ends in the middle of a frame"),
        None => Ok(()),
    }
}

fn when(it: &Connection) -> String {
    let begins = format!("{:.3} s after the first frame, for {:.3} s", it.begins_s, it.lasts_s);
    match it.handshake_us {
        Some(us) => format!("{begins}; handshake {}", time(us)),
        None => begins,
    }
}

/// The connections with the most bytes.
fn list(out: &mut dyn Write, connections: &[Connection]) -> io::Result<()> {
    let size = |it: &Connection| WAYS.map(|way| it.streams.bytes(way));
    let mut largest: Vec<_> = connections.iter().collect();
    largest.sort_by_key(|it| std::cmp::Reverse(size(it).iter().sum::<u64>()));
    let heads = ["ID", "REMOTE", "GUEST", "BEGAN", "LASTED", "TO GUEST", "FROM GUEST", "AGAIN"];
    let mut rows = vec![heads.map(String::from)];
    for it in largest.iter().take(LISTED) {
        let [to, from] = size(it);
        let again =
            it.streams.streams.iter().map(DirectionReport::retransmissions).max().unwrap_or(0);
        rows.push([
            it.id.to_string(),
            it.remote.clone(),
            it.guest.clone(),
            format!("{:.3} s", it.begins_s),
            format!("{:.3} s", it.lasts_s),
            bytes(to),
            bytes(from),
            again.to_string(),
        ]);
    }
    table(out, &rows)?;
    if connections.len() > LISTED {
        writeln!(out, "and {} with fewer bytes; --csv has all", connections.len() - LISTED)?;
    }
    Ok(())
}

fn streams(out: &mut dyn Write, streams: &Streams) -> io::Result<()> {
    for way in WAYS {
        if streams.bytes(way) == 0 {
            continue;
        }
        let name = match way {
            Way::ToGuest => "to the guest",
            Way::FromGuest => "from the guest",
        };
        for it in SIDES.into_iter().filter_map(|side| streams.at(side, way)) {
            writeln!(out)?;
            writeln!(out, "{name}, {}'s side", it.side)?;
            direction(out, it)?;
        }
        for it in streams.host.iter().filter(|it| it.way == name_of_way(way)) {
            writeln!(out)?;
            writeln!(out, "{name}, in the host between the sides")?;
            host(out, it)?;
        }
    }
    Ok(())
}

fn direction(out: &mut dyn Write, it: &DirectionReport) -> io::Result<()> {
    let (size, acked) = (bytes(it.bytes), bytes(it.acked_bytes));
    row(out, "data", &format!("{} segments, {size} bytes, {acked} acknowledged", it.segments))?;
    row(
        out,
        "order",
        &format!(
            "{} gaps, {} out of order, {} filled late, {} repeated, {} of them spurious; loss {}",
            it.gaps,
            it.out_of_order,
            it.filled_late,
            it.repeated,
            it.spurious,
            percent(it.loss())
        ),
    )?;
    row(
        out,
        "ACKs",
        &format!(
            "{}, {} duplicate, {} of bytes that did not pass here",
            it.acks, it.duplicate_acks, it.unseen_acks
        ),
    )?;
    let acks = &it.between_acks;
    row(
        out,
        "between ACKs",
        &format!("{}; compressed {}", times(&acks.times), percent(acks.compressed)),
    )?;
    row(out, "until acked", &times(&it.acked_after))?;
    row(out, "ACK to data", &times(&it.next_after))?;
    row(
        out,
        "window",
        &format!(
            "{} times full, {} times zero; {} probes",
            it.full_windows, it.zero_windows, it.probes
        ),
    )?;
    let limits = &it.limited;
    row(
        out,
        "limited",
        &format!(
            "by the sender {:.3} s, by the window {:.3} s, by the path {:.3} s",
            limits.sender_s, limits.window_s, limits.path_s
        ),
    )?;
    for rate in &it.rates {
        let Some(mean) = rate.mean_bytes else { continue };
        let mbit_s = mean * 8.0 / rate.interval_s / 1e6;
        let burstiness = rate.burstiness.map_or_else(|| "-".to_owned(), |it| format!("{it:.2}"));
        let name = format!("in {} ms", rate.interval_s * 1e3);
        row(out, &name, &format!("{mbit_s:.2} Mbit/s, burstiness {burstiness}"))?;
    }
    let bursts = &it.bursts;
    let most = bytes(bursts.most_bytes);
    row(
        out,
        "bursts",
        &format!("{} of {} ms with data, at most {most} bytes", bursts.above_ms, bursts.busy_ms),
    )
}

fn host(out: &mut dyn Write, it: &HostDelays) -> io::Result<()> {
    row(out, "delay", &times(&it.delay))?;
    if it.backwards > 0 {
        row(out, "", &format!("{} segments left before they came", it.backwards))?;
    }
    let (early, own) = (bytes(it.early_bytes), bytes(it.own_bytes));
    row(out, "acked", &format!("{early} bytes by the host, {own} by the receiver"))?;
    if it.lead.count > 0 {
        row(out, "earlier by", &times(&it.lead))?;
    }
    Ok(())
}

fn row(out: &mut dyn Write, name: &str, text: &str) -> io::Result<()> {
    writeln!(out, "  {name:<13}{text}")
}

fn times(it: &Times) -> String {
    if it.count == 0 {
        return "-".to_owned();
    }
    let [p50, p90, p99, longest] = [it.p50_us, it.p90_us, it.p99_us, it.longest_us].map(time);
    format!("p50 {p50}, p90 {p90}, p99 {p99}, longest {longest}")
}

/// Microseconds, with three digits.
fn time(us: f64) -> String {
    let (number, unit) = match us {
        ..1e3 => (us, "µs"),
        1e3..1e6 => (us / 1e3, "ms"),
        _ => (us / 1e6, "s"),
    };
    let digits = match number {
        ..10.0 => 2,
        10.0..100.0 => 1,
        _ => 0,
    };
    format!("{number:.digits$} {unit}")
}

fn percent(share: Option<f64>) -> String {
    share.map_or_else(|| "-".to_owned(), |share| format!("{:.2} %", share * 100.0))
}
