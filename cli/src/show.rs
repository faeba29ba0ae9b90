//! Answers as text for people.

use std::io::{self, Write};

use nightporter_api::{
    AttachedStatus, BridgeStatus, FlowInfo, Histogram, PortStatus, RegistryStatus, SkippedTap,
    StandingFlow, StationInfo, Status, ToeStatus, VmStatus,
};

use crate::changes::tap_of;
use crate::flows::OVER;

/// Ports of a bridge that are shown with the reason why they are not attached.
const SKIPPED_SHOWN: usize = 8;
/// Longest name in a table: with it a line has 80 columns.
const NAME_COLUMNS: usize = 16;

/// The daemon, a line for each port and one for the gain of each VM, then lines for drops, troubles
/// and limits.
pub(crate) fn status(out: &mut dyn Write, status: &Status) -> io::Result<()> {
    let stopping = if status.stopping { ", stopping" } else { "" };
    let up = duration(status.uptime_s);
    writeln!(out, "nightporterd {}, pid {}, up {up}{stopping}", status.version, status.pid)?;
    writeln!(out)?;
    let ports = whole(&status.ports);
    let heads = ["PORT", "KIND", "LINK", "OFFLOAD", "FLOWS", "HELD", "IN", "OUT", "DROPS"];
    let mut rows = vec![heads.map(String::from)];
    rows.extend(ports.iter().map(port_row));
    table(out, &rows)?;
    gains(out, status)?;
    for port in ports.iter().filter(|p| !p.drops.is_empty()) {
        let drops: Vec<_> = port.drops.iter().map(|(reason, n)| format!("{reason} {n}")).collect();
        writeln!(out, "{} dropped: {}{}", port.name, drops.join(", "), spoofed(port))?;
    }
    for (port, trouble) in status.ports.iter().filter_map(|p| Some((p, p.trouble.as_ref()?))) {
        writeln!(out, "{}: {trouble}", port.name)?;
    }
    for (name, vm) in status.ports.iter().filter_map(|p| Some((&p.name, p.vm.as_ref()?))) {
        troubles(out, name, vm)?;
    }
    status.bridges.iter().try_for_each(|it| bridge(out, it))?;
    registry(out, &status.registry)?;
    for (what, stalls) in [("frames", status.stalls), ("sockets", status.sockets.stalls)] {
        if stalls > 0 {
            writeln!(out, "{stalls} turns for {what} took longer than a second")?;
        }
    }
    if status.sockets.late {
        writeln!(out, "the thread for sockets did not answer: what it knows is missing here")?;
    }
    if status.broker_ended {
        writeln!(out, "uplinks can be neither added nor opened again: restart nightporterd")?;
    }
    if status.refused_calls > 0 {
        writeln!(out, "{} system calls were refused: see the log", status.refused_calls)?;
    }
    if status.log_lines_lost > 0 {
        writeln!(out, "{} log lines were lost", status.log_lines_lost)?;
    }
    Ok(())
}

/// A bridge whose taps are attached, and why others of its ports are not.
fn bridge(out: &mut dyn Write, it: &BridgeStatus) -> io::Result<()> {
    let BridgeStatus { bridge, taps, skipped, trouble } = it;
    if let Some(trouble) = trouble {
        return writeln!(out, "{bridge}: {trouble}");
    }
    let count = match taps.len() {
        0 => "no tap is".to_owned(),
        1 => "1 tap is".to_owned(),
        n => format!("{n} taps are"),
    };
    writeln!(out, "{bridge}: {count} attached as they come")?;
    for SkippedTap { ifname, why } in skipped.iter().take(SKIPPED_SHOWN) {
        writeln!(out, "{ifname} of {bridge} is not attached: {why}")?;
    }
    match skipped.len().saturating_sub(SKIPPED_SHOWN) {
        0 => Ok(()),
        more => writeln!(out, "{more} more of {bridge} are not attached (--json has them)"),
    }
}

/// A VM whose tap is attached is two ports for the daemon, and one here: the drops at its other
/// end, `NAME/net`, are added to its own.
fn whole(ports: &[PortStatus]) -> Vec<PortStatus> {
    let of = |end: &PortStatus| {
        let vm = end.name.strip_suffix("/net")?;
        ports.iter().position(|port| port.name == vm && tap_of(port).is_some())
    };
    let mut all = ports.to_vec();
    for (end, vm) in ports.iter().filter_map(|end| Some((end, of(end)?))) {
        for (reason, n) in &end.drops {
            *all[vm].drops.entry(reason.clone()).or_default() += n;
        }
    }
    all.into_iter().filter(|port| of(port).is_none()).collect()
}

/// The troubles of a VM, and its limits.
pub(crate) fn troubles(out: &mut dyn Write, name: &str, vm: &VmStatus) -> io::Result<()> {
    let ways =
        [(vm.rate_limit_from_guest_mbit_s, "from it"), (vm.rate_limit_to_guest_mbit_s, "to it")];
    if !vm.listens {
        writeln!(out, "{name} has no socket: something else is at its path")?;
    }
    if vm.has_no_buffers {
        writeln!(
            out,
            "{name} has posted no receive buffer that the daemon sees: is the guest's interface \
             up, and the VM's memory shared (share=on)?"
        )?;
    }
    if let Some(AttachedStatus { plain_from_vm, plain_to_vm, lost_from_vm, lost_to_vm, .. }) =
        vm.attached
    {
        for (from, to, what) in [
            (plain_from_vm, plain_to_vm, "passed the daemon by, because it was away"),
            (lost_from_vm, lost_to_vm, "were lost, because the daemon did not take them in time"),
        ] {
            if from + to > 0 {
                writeln!(out, "{from} frames of {name} and {to} for it {what}")?;
            }
        }
    }
    if let Some(ms) = vm.attached.and_then(|tap| tap.plain_for_ms) {
        let seconds = ms.div_ceil(1000);
        writeln!(
            out,
            "{name} is a plain tap for {seconds} s more, because the daemon was away three times \
             in 10 s: give it a core (daemon.cpu) or a priority (daemon.rt_priority)"
        )?;
    }
    if vm.ring_faults > 0 {
        writeln!(
            out,
            "{name} lost a queue {} times: its driver broke virtio's rules",
            vm.ring_faults
        )?;
    }
    if vm.memory_faults > 0 {
        writeln!(out, "{name} went down {} times: its memory was not there", vm.memory_faults)?;
    }
    if vm.blocked > 0 {
        writeln!(out, "{name} went down {} times: its VMM kept the daemon waiting", vm.blocked)?;
    }
    if let Some(toe) = &vm.toe {
        device(out, name, toe)?;
    }
    if let Some(boost) = vm.boost.as_ref().filter(|boost| !boost.refused.is_empty()) {
        writeln!(out, "{name} is not boosted: {}", boost.refused)?;
    }
    if vm.translated_flows > 0 {
        let n = vm.translated_flows;
        writeln!(out, "translated: {n} connections of {name}, which a stop resets")?;
    }
    if let Some(flow) = &vm.stands {
        writeln!(out, "{name} has not acknowledged {}", standing(flow))?;
    }
    for (rate, way) in ways.iter().filter_map(|(rate, way)| Some(((*rate)?, way))) {
        writeln!(out, "{name} has a limit of {rate} Mbit/s {way}")?;
    }
    Ok(())
}

/// The MAC that was refused last.
pub(crate) fn spoofed(port: &PortStatus) -> String {
    let mac = port.spoofed_mac.as_ref();
    mac.map_or(String::new(), |mac| format!(" (the last MAC that is not its own: {mac})"))
}

/// A connection that owes.
pub(crate) fn standing(flow: &StandingFlow) -> String {
    let StandingFlow { id, guest, remote, held_bytes, seconds, is_unread } = flow;
    let why = if *is_unread { ": its application does not read" } else { "" };
    let held = bytes(*held_bytes);
    format!("{held} of connection {id} ({guest} with {remote}) for {seconds} s{why}")
}

/// The troubles of a VM's socket device.
fn device(out: &mut dyn Write, vm: &str, toe: &ToeStatus) -> io::Result<()> {
    if !toe.listens {
        writeln!(out, "{vm}'s socket device has no socket: something else is at its path")?;
    }
    let faults = toe.memory_faults + toe.blocked + toe.ring_faults;
    if faults > 0 {
        writeln!(out, "{vm}'s socket device went down {faults} times: see the log")?;
    }
    Ok(())
}

/// The troubles of the registry.
fn registry(out: &mut dyn Write, registry: &RegistryStatus) -> io::Result<()> {
    if let Some(trouble) = &registry.trouble {
        writeln!(out, "the registry ({}) does not answer: {trouble}", registry.kind)?;
    }
    if registry.left_out > 0 {
        writeln!(out, "{} stations of other hosts are left out: too many", registry.left_out)?;
    }
    let unsettled = ["waiting", "refused", "contested"];
    for (state, n) in registry.claims.iter().filter(|(s, _)| unsettled.contains(&s.as_str())) {
        writeln!(out, "{state} in the registry: {n} VMs; see nightporter stations")?;
    }
    Ok(())
}

/// A line for each station.
pub(crate) fn stations(out: &mut dyn Write, stations: &[StationInfo]) -> io::Result<()> {
    let mut rows = vec![["VNI", "MAC", "VM", "HOST", "CLAIM", "IPS", "LISTENS"].map(String::from)];
    rows.extend(stations.iter().map(|s| {
        let ips: Vec<_> = s.ips.iter().map(ToString::to_string).collect();
        let claim = match (&s.claim, s.other) {
            (None, _) => "-".into(),
            (Some(claim), None) => claim.clone(),
            (Some(claim), Some(other)) => format!("{claim} {other}"),
        };
        let or_dash = |text: String| if text.is_empty() { "-".into() } else { text };
        let (vm, ips) = (or_dash(s.vm.clone()), or_dash(ips.join(",")));
        [s.vni.to_string(), s.mac.clone(), vm, s.host.to_string(), claim, ips, listens(s)]
    }));
    table(out, &rows)
}

/// The ports at which a station listens by the virtual TOE: `80,443,+3` are two ports and three
/// more that are only counted.
fn listens(station: &StationInfo) -> String {
    let Some(ports) = &station.listens else { return "-".into() };
    let more = (station.listens_more > 0).then(|| format!("+{}", station.listens_more));
    let all: Vec<_> = ports.iter().map(ToString::to_string).chain(more).collect();
    if all.is_empty() { "none".into() } else { all.join(",") }
}

fn port_row(port: &PortStatus) -> [String; 9] {
    let of_vm = port.vm.as_ref().map_or(["-"; 3].map(String::from), |vm| {
        [offload(vm).into(), live_flows(vm).to_string(), bytes(vm.held_bytes)]
    });
    let [offload, flows, held] = of_vm;
    [
        shortened(&port.name),
        if tap_of(port).is_some() { "vm/tap".into() } else { port.kind.clone() },
        if port.link { "up".into() } else { "down".into() },
        offload,
        flows,
        held,
        bytes(port.bytes_from_port),
        bytes(port.bytes_to_port),
        bytes(port.drops.values().sum()),
    ]
}

/// The gain of each VM: bytes acknowledged early, and by how much ACKs and sends of the host were
/// ahead of the guest (median, 99 %).
fn gains(out: &mut dyn Write, status: &Status) -> io::Result<()> {
    let heads = ["VM", "CONGESTION", "EARLY", "SAVED/ACK", "p99", "SAVED/SEND", "p99"];
    let mut rows = vec![heads.map(String::from)];
    for (port, vm) in status.ports.iter().filter_map(|port| Some((port, port.vm.as_ref()?))) {
        let [acks, acks_p99] = ahead(&vm.ack_saved);
        let [sends, sends_p99] = ahead(&vm.send_saved);
        let early = bytes(early_bytes(vm));
        let congestion = congestion(vm).into();
        rows.push([shortened(&port.name), congestion, early, acks, acks_p99, sends, sends_p99]);
    }
    if rows.len() == 1 {
        return Ok(());
    }
    writeln!(out)?;
    table(out, &rows)
}

/// Bytes that were acknowledged ahead of the guest.
pub(crate) fn early_bytes(vm: &VmStatus) -> u64 {
    vm.counters.get("early_acked_bytes").copied().unwrap_or(0)
}

/// The median of samples, and the size below which 99 of 100 are.
pub(crate) fn ahead(saved: &Histogram) -> [String; 2] {
    [0.5, 0.99].map(|q| saved.quantile_ns(q).map_or("-".into(), span))
}

/// Two digits and a unit.
pub(crate) fn span(ns: f64) -> String {
    let (value, unit) = match ns {
        0.0..1e6 => (ns / 1e3, "us"),
        1e6..1e9 => (ns / 1e6, "ms"),
        _ => (ns / 1e9, "s"),
    };
    if value < 9.95 { format!("{value:.1} {unit}") } else { format!("{value:.0} {unit}") }
}

/// Whether ack offload is on for new connections.
pub(crate) const fn offload(vm: &VmStatus) -> &'static str {
    match (vm.draining, vm.owed_flows, vm.offload) {
        (true, 0, _) => "drained",
        (true, ..) => "draining",
        (false, ..) if vm.migrating => "migrating",
        (false, _, true) => "on",
        (false, _, false) => "off",
    }
}

/// Whether congestion offload is on.
pub(crate) const fn congestion(vm: &VmStatus) -> &'static str {
    match (vm.controls_congestion, vm.congestion_offload) {
        (true, _) => "on",
        (false, true) => "paused", // `VmStatus::controls_congestion` says why
        (false, false) => "off",
    }
}

/// Whether accept offload is on, and what it has done.
pub(crate) fn accept(vm: &VmStatus) -> String {
    let count = |name: &str| vm.counters.get(name).copied().unwrap_or(0);
    let state = match vm.accepts_in_s {
        None => "off".into(),
        Some(0) => "on".into(),
        Some(seconds) => format!("on in {seconds} s"),
    };
    let accepted = count("flows_accepted");
    if accepted == 0 {
        return state;
    }
    let (live, refused) = (vm.translated_flows, count("accepts_refused"));
    format!("{state}, {accepted} accepted, {live} of them live, {refused} refused by the guest")
}

/// Connections that have not ended.
pub(crate) fn live_flows(vm: &VmStatus) -> u64 {
    let live = vm.flows.iter().filter(|(state, _)| !OVER.contains(&state.as_str()));
    live.map(|(_, n)| n).sum()
}

/// A line for each connection.
pub(crate) fn flows(out: &mut dyn Write, flows: &[FlowInfo]) -> io::Result<()> {
    let mut rows = vec![
        ["ID", "VM", "GUEST", "", "REMOTE", "STATE", "HELD", "EARLY", "IDLE", "WHY"]
            .map(String::from),
    ];
    rows.extend(flows.iter().map(|f| {
        [
            f.id.to_string(),
            f.vm.clone(),
            f.guest.clone(),
            if f.guest_is_client { "->".into() } else { "<-".into() },
            f.remote.clone(),
            f.state.clone(),
            bytes(f.held_bytes),
            bytes(f.early_acked_bytes),
            duration(f.idle_s.into()),
            if f.why == "nothing" { String::new() } else { f.why.clone() },
        ]
    }));
    table(out, &rows)
}

/// Everything about one connection, a line each.
pub(crate) fn flow(out: &mut dyn Write, f: &FlowInfo) -> io::Result<()> {
    let arrow = if f.guest_is_client { "->" } else { "<-" };
    writeln!(out, "flow {} of {}: {} {arrow} {}", f.id, f.vm, f.guest, f.remote)?;
    let yes = |b: bool| String::from(if b { "yes" } else { "no" });
    let rows = [
        ("state", format!("{} ({})", f.state, f.why)),
        ("vlan", if f.vlan == 0 { "none".into() } else { format!("{:#x}", f.vlan) }),
        ("idle", duration(f.idle_s.into())),
        ("held for the guest", bytes(f.held_bytes)),
        ("buffer", bytes(f.buffer_bytes)),
        ("not yet delivered", bytes(f.undelivered_bytes)),
        ("in flight to the guest", bytes(f.in_flight_to_guest)),
        ("window of the guest", bytes(f.window_of_guest)),
        ("window shown to the remote", bytes(f.window_to_remote)),
        ("not yet acked to the remote", bytes(f.unacked_to_remote)),
        ("in flight to the remote", bytes(f.in_flight_to_remote)),
        ("timestamps", yes(f.timestamps)),
        ("sack", yes(f.sack)),
        ("ecn", yes(f.ecn)),
        ("mss to the guest", f.mss_to_guest.to_string()),
        ("acked ahead of the guest", bytes(f.early_acked_bytes)),
        ("local retransmissions", f.local_retransmissions.to_string()),
        ("guest's ACKs absorbed", f.acks_absorbed.to_string()),
    ];
    let sends = f.sends.as_ref().map(|s| {
        let rtt =
            s.srtt_us.map_or("not known".into(), |us| format!("{}.{:03} ms", us / 1000, us % 1000));
        [
            ("kept for the remote", bytes(s.kept_bytes)),
            ("not yet sent", bytes(s.unsent_bytes)),
            ("under way", bytes(s.in_flight_bytes)),
            ("congestion window", bytes(s.cwnd_bytes)),
            ("slow start threshold", s.ssthresh_bytes.map_or("none".into(), bytes)),
            ("round trip", rtt),
            ("mss to the remote", s.mss.to_string()),
            ("retransmissions", s.retransmissions.to_string()),
            ("timeouts in a row", s.timeouts_in_a_row.to_string()),
        ]
    });
    for (name, value) in rows.into_iter().chain(sends.into_iter().flatten()) {
        writeln!(out, "  {name:<28} {value}")?;
    }
    Ok(())
}

/// Writes columns as wide as their widest entry; lines do not end in spaces.
pub(crate) fn table<const N: usize>(out: &mut dyn Write, rows: &[[String; N]]) -> io::Result<()> {
    let mut widths = [0; N];
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = cell.len().max(*width);
        }
    }
    for row in rows {
        let cells = row.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}"));
        writeln!(out, "{}", cells.collect::<Vec<_>>().join("  ").trim_end())?;
    }
    Ok(())
}

/// A name that fits into a table of 80 columns.
pub(crate) fn shortened(name: &str) -> String {
    if name.chars().count() <= NAME_COLUMNS {
        name.into()
    } else {
        name.chars().take(NAME_COLUMNS - 1).chain(['~']).collect()
    }
}

/// Three digits and a unit, in powers of 1024.
pub(crate) fn bytes(n: u64) -> String {
    let mut shift = 0;
    while shift < 60 && n >> shift >= 1000 {
        shift += 10;
    }
    let unit = ["", "K", "M", "G", "T", "P", "E"][shift / 10];
    let tenths = (u128::from(n) * 10) >> shift;
    match tenths {
        _ if shift == 0 => n.to_string(),
        0..100 => format!("{}.{}{unit}", tenths / 10, tenths % 10),
        _ => format!("{}{unit}", tenths / 10),
    }
}

/// The two largest units.
pub(crate) fn duration(s: u64) -> String {
    match s {
        0..60 => format!("{s} s"),
        60..3600 => format!("{} min {} s", s / 60, s % 60),
        3600..86400 => format!("{} h {} min", s / 3600, s / 60 % 60),
        _ => format!("{} d {} h", s / 86400, s / 3600 % 24),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use nightporter_api::VmStatus;

    use super::*;

    #[test]
    fn sizes_and_times_stay_short() {
        assert_eq!([0, 999, 1000, 1024, 1 << 20].map(bytes), ["0", "999", "0.9K", "1.0K", "1.0M"]);
        assert_eq!(bytes(64 << 20), "64M");
        assert_eq!(bytes(u64::MAX), "15E");
        assert_eq!(
            [5, 65, 3_700, 90_000].map(duration),
            ["5 s", "1 min 5 s", "1 h 1 min", "1 d 1 h"]
        );
    }

    #[test]
    fn a_station_listens_at_ports_at_none_or_nobody_has_said() {
        let shown = |ports: Option<&[u16]>, more| {
            let listens_of = StationInfo {
                vni: 7,
                mac: "52:54:00:00:00:01".into(),
                vm: "web1".into(),
                ips: vec!["10.0.0.1".parse().unwrap()],
                host: "192.0.2.1".parse().unwrap(),
                claim: None,
                other: None,
                listens: ports.map(<[u16]>::to_vec),
                listens_more: more,
            };
            let mut out = Vec::new();
            stations(&mut out, &[listens_of]).unwrap();
            let text = String::from_utf8(out).unwrap();
            assert!(text.lines().next().unwrap().ends_with("IPS       LISTENS"), "{text}");
            text.split_whitespace().last().unwrap().to_owned()
        };
        assert_eq!(shown(None, 0), "-");
        assert_eq!(shown(Some(&[]), 0), "none");
        assert_eq!(shown(Some(&[80, 443]), 0), "80,443");
        assert_eq!(shown(Some(&[80, 443]), 3), "80,443,+3");
    }

    fn bridges() -> Vec<BridgeStatus> {
        let skipped = SkippedTap { ifname: "eth0".into(), why: "it is no tap".into() };
        let virbr0 = BridgeStatus {
            bridge: "virbr0".into(),
            taps: vec!["vnet0".into()],
            skipped: vec![skipped],
            ..BridgeStatus::default()
        };
        let trouble = Some("there is no such bridge".into());
        vec![virbr0, BridgeStatus { bridge: "br1".into(), trouble, ..BridgeStatus::default() }]
    }

    #[test]
    fn status_is_a_table_with_the_drops_below() {
        let lan = PortStatus {
            name: "lan".into(),
            kind: "tap".into(),
            link: true,
            bytes_from_port: 5 << 20,
            drops: BTreeMap::from([("hairpin".into(), 2)]),
            ..PortStatus::default()
        };
        let vm = VmStatus {
            listens: true,
            offload: true,
            congestion_offload: true,
            flows: BTreeMap::from([("on".into(), 3), ("pass".into(), 1), ("closed".into(), 7)]),
            held_bytes: 2048,
            counters: BTreeMap::from([("early_acked_bytes".into(), 12_000_000)]),
            ack_saved: Histogram {
                buckets: vec![(1 << 24, 20), (1 << 25, 50), (1 << 26, 30)],
                ..Histogram::default()
            },
            rate_limit_to_guest_mbit_s: Some(100),
            stands: Some(StandingFlow {
                id: 7,
                guest: "10.0.0.2:80".into(),
                remote: "10.0.0.9:4000".into(),
                held_bytes: 2048,
                seconds: 75,
                is_unread: true,
            }),
            ..VmStatus::default()
        };
        let wan = PortStatus {
            name: "wan".into(),
            kind: "tap".into(),
            trouble: Some("np1 is not in br0".into()),
            ..PortStatus::default()
        };
        let web1 = PortStatus {
            name: "web1".into(),
            kind: "vm".into(),
            vm: Some(vm),
            ..PortStatus::default()
        };
        let attached = AttachedStatus {
            plain_to_vm: 3,
            lost_from_vm: 7,
            plain_for_ms: Some(9001),
            ..Default::default()
        };
        let vnet0 = PortStatus {
            name: "vnet0".into(),
            kind: "vm".into(),
            link: true,
            keys: BTreeMap::from([("tap".into(), "\"vnet0\"".into())]),
            drops: BTreeMap::from([("duplicate".into(), 1)]),
            vm: Some(VmStatus { listens: true, attached: Some(attached), ..VmStatus::default() }),
            ..PortStatus::default()
        };
        let end = PortStatus {
            name: "vnet0/net".into(),
            kind: "tap".into(),
            drops: BTreeMap::from([("duplicate".into(), 2)]),
            ..PortStatus::default()
        };
        let s = Status {
            version: "1.2.3".into(),
            pid: 7,
            uptime_s: 61,
            ports: vec![lan, wan, web1, vnet0, end],
            bridges: bridges(),
            ..Status::default()
        };
        let mut text = Vec::new();
        status(&mut text, &s).unwrap();
        assert_eq!(
            String::from_utf8(text).unwrap(),
            "nightporterd 1.2.3, pid 7, up 1 min 1 s\n\
             \n\
             PORT   KIND    LINK  OFFLOAD  FLOWS  HELD  IN    OUT  DROPS\n\
             lan    tap     up    -        -      -     5.0M  0    2\n\
             wan    tap     down  -        -      -     0     0    0\n\
             web1   vm      down  on       4      2.0K  0     0    0\n\
             vnet0  vm/tap  up    off      0      0     0     0    3\n\
             \n\
             VM     CONGESTION  EARLY  SAVED/ACK  p99    SAVED/SEND  p99\n\
             web1   paused      11M    27 ms      66 ms  -           -\n\
             vnet0  off         0      -          -      -           -\n\
             lan dropped: hairpin 2\n\
             vnet0 dropped: duplicate 3\n\
             wan: np1 is not in br0\n\
             web1 has not acknowledged 2.0K of connection 7 (10.0.0.2:80 with 10.0.0.9:4000) for \
             75 s: its application does not read\n\
             web1 has a limit of 100 Mbit/s to it\n\
             0 frames of vnet0 and 3 for it passed the daemon by, because it was away\n\
             7 frames of vnet0 and 0 for it were lost, because the daemon did not take them in \
             time\n\
             vnet0 is a plain tap for 10 s more, because the daemon was away three times in 10 s: \
             give it a core (daemon.cpu) or a priority (daemon.rt_priority)\n\
             virbr0: 1 tap is attached as they come\n\
             eth0 of virbr0 is not attached: it is no tap\n\
             br1: there is no such bridge\n"
        );
    }

    #[test]
    fn the_tables_of_a_status_have_80_columns() {
        let longest =
            Histogram { buckets: vec![(999_000, 99), (999_000_000, 9)], ..Histogram::default() };
        let vm = VmStatus {
            draining: true,
            owed_flows: 1,
            listens: true,
            congestion_offload: true,
            flows: BTreeMap::from([("on".into(), 999_999)]),
            held_bytes: 999 << 20,
            ack_saved: longest.clone(),
            send_saved: longest,
            ..VmStatus::default()
        };
        let port = PortStatus {
            name: "a-name-of-many-bytes-as-vms-have".into(),
            kind: "macvtap".into(),
            bytes_from_port: u64::MAX / 1000,
            bytes_to_port: 999 << 30,
            vm: Some(vm),
            ..PortStatus::default()
        };
        let mut text = Vec::new();
        status(&mut text, &Status { ports: vec![port], ..Status::default() }).unwrap();
        let text = String::from_utf8(text).unwrap();
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        assert_eq!(text.matches("a-name-of-many-~").count(), 2, "{text}");
    }

    #[test]
    fn half_of_all_samples_are_below_the_median() {
        let of = |buckets: &[(u64, u64)], above| Histogram {
            buckets: buckets.to_vec(),
            above,
            sum_ns: 0,
        };
        let quantiles = |it: &Histogram| [0.5, 0.99].map(|q| it.quantile_ns(q));
        assert_eq!(quantiles(&Histogram::default()), [None; 2]);
        assert_eq!(quantiles(&of(&[(32, 0), (64, 0)], 0)), [None; 2]);
        let even = of(&[(32, 0), (64, 100), (128, 0)], 0);
        assert_eq!(even.quantile_ns(0.5), Some(48.0));
        assert_eq!(even.quantile_ns(1.0), Some(64.0));
        let two = of(&[(32, 50), (64, 0), (128, 50)], 0);
        assert_eq!([two.quantile_ns(0.5), two.quantile_ns(0.75)], [Some(32.0), Some(96.0)]);
        assert_eq!(of(&[(32, 1), (64, 0)], 99).quantile_ns(0.5), Some(64.0), "above all bounds");
        assert_eq!(
            [0.0, 9_949.0, 9_950.0, 999_400.0].map(span),
            ["0.0 us", "9.9 us", "10 us", "999 us"]
        );
        assert_eq!([1e6, 27_500_000.0, 1_073_741_824.0].map(span), ["1.0 ms", "28 ms", "1.1 s"]);
    }
}
