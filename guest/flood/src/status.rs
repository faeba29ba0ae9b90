//! `flood status`: the present state, and the limits of the data that a connection hands over at
//! once.

use std::fmt::Write as _;
use std::fs;

use anyhow::Result;

use crate::np_flood;
use crate::plan::{Plan, plan};
use crate::record::{Place, Record};
use crate::rtnl::Rtnl;
use crate::settings::{PIECES, SLOW_START, Setting};

/// The state of a guest for [`text`].
#[derive(Debug)]
struct Seen {
    watched: bool,
    record: Record,
    plan: Plan,
    slow_start: Option<String>,
    pieces: Option<String>,
    /// `np_flood` can be chosen, and the congestion control of connections that choose none.
    np_flood: (bool, String),
    /// Largest send buffer, bytes (`tcp_wmem`).
    send_buffer: u64,
    /// `tcp_limit_output_bytes`.
    tsq: u64,
}

/// The text for an operator.
///
/// # Errors
/// Routes or settings cannot be read.
pub fn status(place: &Place) -> Result<String> {
    let record = place.read()?;
    let nics = record.live.iter().filter_map(|name| nix::net::if_::if_nametoindex(&**name).ok());
    let segments = record.segments.unwrap_or_default();
    let plan = plan(&Rtnl::open()?.routes()?, &record.routes, &nics.collect(), segments)?;
    Ok(text(&Seen {
        watched: place.is_watched()?,
        plan,
        slow_start: SLOW_START.read()?,
        pieces: PIECES.read()?,
        np_flood: (np_flood::is_registered()?, text_of("tcp_congestion_control")?),
        send_buffer: sysctl("tcp_wmem")?,
        tsq: sysctl("tcp_limit_output_bytes")?,
        record,
    }))
}

fn text(seen: &Seen) -> String {
    let mut out = String::new();
    let routes = &seen.record.routes;
    let flooding = !routes.is_empty();
    let state = match (seen.watched, seen.record.live.is_empty(), &seen.record.held_back) {
        (true, false, _) => "on, a host controls congestion",
        (true, true, Some(reason)) => &format!("on, but nothing floods yet: {reason}"),
        (true, true, None) => "on, but no host says that it controls congestion: nothing floods",
        (false, ..) if flooding => "off, BUT NOT UNDONE: run `nightporter-guest flood off`",
        (false, ..) => "off",
    };
    let _ = writeln!(out, "flooding     {state}");
    let _ = writeln!(out, "heard on     {}", or_none(&seen.record.live.join(", ")));
    for (i, route) in routes.iter().enumerate() {
        let head = if i == 0 { "routes" } else { "" };
        let before = route.before.map_or("none".to_owned(), |n| n.to_string());
        let (name, ours) = (&route.name, route.ours);
        let _ = writeln!(out, "{head:12} {name}: initcwnd {ours}, before {before}");
    }
    if !flooding {
        let _ = writeln!(out, "routes       none floods");
    }
    for (name, reason) in &seen.plan.left_alone {
        let _ = writeln!(out, "left alone   {name}: {reason}");
    }
    let (there, default) = &seen.np_flood;
    let whether = match (seen.record.np_flood, there) {
        (true, true) => "connections that use it flood; routes are left alone",
        (true, false) => "NOT THERE, although it was asked for",
        (false, true) => "there, and hears no heartbeat from here: it is CUBIC",
        (false, false) => "not loaded (flood on --np-flood)",
    };
    let _ = writeln!(out, "np_flood     {whether}; the default is {default}");
    let idle = setting(&SLOW_START, &seen.slow_start, &seen.record.slow_start, seen);
    let _ = writeln!(out, "while idle   tcp_slow_start_after_idle {idle}");
    let pieces = setting(&PIECES, &seen.pieces, &seen.record.pieces, seen);
    let _ = writeln!(out, "in pieces    tcp_min_tso_segs {pieces}");
    let at_first = seen.record.segments.unwrap_or(10);
    let (buffer, tsq) = (seen.send_buffer, seen.tsq);
    let limits = [
        "the least of: the window that the host shows (ss -tin: snd_wnd);".to_owned(),
        format!("{at_first} segments at first (flood on --segments);"),
        format!("{buffer} bytes of send buffer, headers included (net.ipv4.tcp_wmem);"),
        format!("{tsq} bytes that the host has not taken yet (net.ipv4.tcp_limit_output_bytes)"),
    ];
    let _ = writeln!(out, "depth        {}", limits.join("\n             "));
    out
}

/// The value of a setting, and its owner.
fn setting(
    setting: &Setting,
    now: &Option<String>,
    before: &Option<String>,
    seen: &Seen,
) -> String {
    let Some(now) = now else { return "is not there".to_owned() };
    match (before, seen.record.live.is_empty() || seen.record.np_flood) {
        (Some(before), _) => format!("{now} (ours, before {before})"),
        (None, true) => format!("{now} (not ours)"),
        (None, false) if setting.is_ours(now) => format!("{now} (not ours)"),
        (None, false) => {
            format!("{now} (left alone: other networks are reached by other NICs too)")
        }
    }
}

fn or_none(text: &str) -> &str {
    if text.is_empty() { "no interface" } else { text }
}

/// The last number of a setting in net.ipv4.
fn sysctl(name: &str) -> Result<u64> {
    Ok(text_of(name)?.split_whitespace().next_back().unwrap_or_default().parse()?)
}

fn text_of(name: &str) -> Result<String> {
    Ok(fs::read_to_string(format!("/proc/sys/net/ipv4/{name}"))?.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::RouteRecord;

    fn seen() -> Seen {
        Seen {
            watched: true,
            record: Record::default(),
            plan: Plan::default(),
            slow_start: Some("1".to_owned()),
            pieces: Some("2".to_owned()),
            np_flood: (false, "cubic".to_owned()),
            send_buffer: 4_194_304,
            tsq: 1_048_576,
        }
    }

    #[test]
    fn a_guest_that_floods() {
        let mut seen = seen();
        let name = "default metric 100".to_owned();
        seen.record = Record {
            watcher: Some(4711),
            segments: Some(1000),
            np_flood: false,
            live: vec!["eth0".to_owned()],
            held_back: None,
            routes: vec![RouteRecord { name, before: None, ours: 1000 }],
            slow_start: Some("1".to_owned()),
            pieces: None,
        };
        seen.slow_start = Some("0".to_owned());
        let reason = "another route has the same destination and metric";
        seen.plan.left_alone = vec![("10.1.0.0/16".to_owned(), reason)];
        assert_eq!(
            text(&seen),
            "\
flooding     on, a host controls congestion
heard on     eth0
routes       default metric 100: initcwnd 1000, before none
left alone   10.1.0.0/16: another route has the same destination and metric
np_flood     not loaded (flood on --np-flood); the default is cubic
while idle   tcp_slow_start_after_idle 0 (ours, before 1)
in pieces    tcp_min_tso_segs 2 (left alone: other networks are reached by other NICs too)
depth        the least of: the window that the host shows (ss -tin: snd_wnd);
             1000 segments at first (flood on --segments);
             4194304 bytes of send buffer, headers included (net.ipv4.tcp_wmem);
             1048576 bytes that the host has not taken yet (net.ipv4.tcp_limit_output_bytes)
"
        );
    }

    #[test]
    fn a_guest_whose_host_is_silent() {
        let text = text(&seen());
        assert!(text.starts_with("flooding     on, but no host says"), "{text}");
        assert!(text.contains("routes       none floods"), "{text}");
        assert!(text.contains("tcp_slow_start_after_idle 1 (not ours)"), "{text}");
    }

    #[test]
    fn a_guest_that_waits_for_earlier_connections() {
        let mut seen = seen();
        seen.record.held_back = Some("another daemon".to_owned());
        let text = text(&seen);
        assert!(text.starts_with("flooding     on, but nothing floods yet: another"), "{text}");
    }

    #[test]
    fn np_flood_is_there_or_is_missed() {
        let mut seen = seen();
        seen.record.np_flood = true;
        assert!(text(&seen).contains("np_flood     NOT THERE"));
        seen.np_flood.0 = true;
        assert!(text(&seen).contains("np_flood     connections that use it flood"));
    }

    #[test]
    fn what_a_dead_watcher_left_is_said_loudly() {
        let mut seen = Seen { watched: false, ..seen() };
        assert!(text(&seen).starts_with("flooding     off\n"));
        let name = "default".to_owned();
        seen.record.routes = vec![RouteRecord { name, before: None, ours: 1000 }];
        assert!(text(&seen).starts_with("flooding     off, BUT NOT UNDONE"));
    }
}
