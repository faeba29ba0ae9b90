//! `nightporter vm list` and `vm show`: the VMs in lines of 80 columns, and all about one of them.

use std::collections::BTreeMap;
use std::io::{self, IsTerminal, Write};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use clap::Args;
use nightporter_api::{Histogram, PortStatus, Status, VmStatus};

use crate::changes::tap_of;
use crate::client::Client;
use crate::flows::CLEAR;
use crate::show::{self, bytes};
use crate::{print, status};

const GREEN: &str = "\x1b[32m";
const RED: &str = "\x1b[31m";
const PLAIN: &str = "\x1b[0m";

/// Once or repeatedly.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct List {
    /// Repeat every so many seconds (1 if no number is given) until Ctrl-C, with rates in bit/s.
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "1")]
    watch: Option<u32>,
}

/// Bytes of each port at a moment.
struct Before {
    at: Instant,
    bytes: BTreeMap<String, [u64; 2]>,
}

impl Before {
    fn of(status: &Status) -> Self {
        let of = |p: &PortStatus| (p.name.clone(), [p.bytes_from_port, p.bytes_to_port]);
        Self { at: Instant::now(), bytes: status.ports.iter().map(of).collect() }
    }
}

/// Shows a line for each VM.
pub(crate) fn list(client: &mut Client, json: bool, options: List) -> Result<()> {
    let mut before: Option<Before> = None;
    loop {
        let mut status = status(client)?;
        status.ports.retain(|port| port.vm.is_some());
        let rates = before.as_ref().map(|it| (it, it.at.elapsed()));
        let is_terminal = io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
        print(json, &status.ports, |out| {
            if options.watch.is_some() && !json {
                out.write_all(CLEAR.as_bytes())?;
            }
            lines(out, &status.ports, rates, is_terminal)
        })?;
        let Some(seconds) = options.watch else { return Ok(()) };
        before = Some(Before::of(&status));
        thread::sleep(Duration::from_secs(seconds.max(1).into()));
    }
}

fn lines(
    out: &mut dyn Write,
    ports: &[PortStatus],
    rates: Option<(&Before, Duration)>,
    colours: bool,
) -> io::Result<()> {
    let [sent, received] = if rates.is_some() { ["SENT/s", "RECV/s"] } else { ["SENT", "RECV"] };
    let mut rows =
        vec![["VM", "LINK", "OFFLOAD", "FLOWS", "HELD", sent, received, "MAC"].map(String::from)];
    for (port, vm) in ports.iter().filter_map(|port| Some((port, port.vm.as_ref()?))) {
        let [sent, received] = volume(port, rates);
        rows.push([
            show::shortened(&port.name),
            if port.link { "up".into() } else { "down".into() },
            show::offload(vm).into(),
            show::live_flows(vm).to_string(),
            bytes(vm.held_bytes),
            sent,
            received,
            port.keys.get("mac").map_or("-", |mac| mac.trim_matches('"')).into(),
        ]);
    }
    let mut text = Vec::new();
    show::table(&mut text, &rows)?;
    for (i, line) in String::from_utf8_lossy(&text).lines().enumerate() {
        let link = rows[i].get(1).filter(|_| colours && i > 0);
        let colour = link.map(|link| if link == "up" { GREEN } else { RED });
        match colour {
            Some(colour) => writeln!(out, "{colour}{line}{PLAIN}")?,
            None => writeln!(out, "{line}")?,
        }
    }
    Ok(())
}

/// Bytes that the VM has sent and received so far, or bits in a second.
fn volume(port: &PortStatus, rates: Option<(&Before, Duration)>) -> [String; 2] {
    let now = [port.bytes_from_port, port.bytes_to_port];
    let Some((before, time)) = rates else { return now.map(bytes) };
    let Some(old) = before.bytes.get(&port.name) else { return ["-", "-"].map(String::from) };
    let rate = |now: u64, old: u64| {
        let bits = u128::from(now.saturating_sub(old)) * 8_000 / time.as_millis().max(1);
        decimal(u64::try_from(bits).unwrap_or(u64::MAX))
    };
    [rate(now[0], old[0]), rate(now[1], old[1])]
}

/// Three digits and a unit, in powers of 1000, as rates are.
pub(crate) fn decimal(n: u64) -> String {
    let (mut unit, mut rest) = (0, n as f64);
    while rest >= 999.5 && unit < 4 {
        rest /= 1000.0;
        unit += 1;
    }
    let name = ["", "k", "M", "G", "T"][unit];
    if unit > 0 && rest < 9.95 { format!("{rest:.1}{name}") } else { format!("{rest:.0}{name}") }
}

/// Shows all about one VM.
pub(crate) fn show(client: &mut Client, json: bool, name: &str) -> Result<()> {
    let status = status(client)?;
    let Some(port) = status.ports.iter().find(|port| port.name == name && port.vm.is_some()) else {
        let names = status.ports.iter().filter(|port| port.vm.is_some()).map(|port| &*port.name);
        let names = names.collect::<Vec<_>>().join(", ");
        let names = if names.is_empty() { "there is none".into() } else { names };
        bail!("there is no VM \"{name}\"\n    fix: use one of: {names}")
    };
    print(json, port, |out| all(out, port))
}

/// By how much the host was ahead.
fn ahead(saved: &Histogram) -> String {
    match saved.samples() {
        0 => "never".into(),
        n => {
            let [median, most] = show::ahead(saved);
            format!("{n} times: {median} (median), {most} (99 %)")
        }
    }
}

fn all(out: &mut dyn Write, port: &PortStatus) -> io::Result<()> {
    let Some(vm) = &port.vm else { return Ok(()) };
    let link = match (&port.trouble, port.link) {
        (_, true) => "up".into(),
        (Some(why), false) => format!("down: {why}"),
        (None, false) => "down".into(),
    };
    let vmm = vm.vmm_pid.map_or("not connected".into(), |pid| format!("pid {pid}"));
    let rings = vm.rings.map_or("not running".into(), |[receive, transmit]| {
        format!("{receive} places to receive, {transmit} to transmit")
    });
    let flows = vm.flows.iter().filter(|(_, n)| **n > 0).map(|(state, n)| format!("{n} {state}"));
    let flows = flows.collect::<Vec<_>>().join(", ");
    let both = |frames: u64, of: u64| format!("{} in {frames} frames", bytes(of));
    let mut rows = vec![("link", link)];
    match tap_of(port) {
        Some(tap) => rows.extend(attached(tap, vm)),
        None => rows.extend([("VMM", vmm), ("rings", rings)]),
    }
    rows.extend([
        ("ack offload", show::offload(vm).into()),
        ("congestion offload", show::congestion(vm).into()),
        ("accept offload", show::accept(vm)),
        ("connections", if flows.is_empty() { "none".into() } else { flows }),
        ("acknowledged early", bytes(show::early_bytes(vm))),
        ("ACKs ahead of the guest's", ahead(&vm.ack_saved)),
        ("sends ahead of the guest's", ahead(&vm.send_saved)),
        ("held for the guest", bytes(vm.held_bytes)),
        (
            "promised of its budget",
            format!("{} of {}", bytes(vm.promised_bytes), bytes(vm.budget_bytes)),
        ),
        ("sent by the guest", both(port.frames_from_port, port.bytes_from_port)),
        ("sent to the guest", both(port.frames_to_port, port.bytes_to_port)),
        ("waits for its buffers", bytes(port.backlog_bytes)),
    ]);
    if let Some(boost) = &vm.boost {
        let state = if boost.refused.is_empty() { "on" } else { boost.refused.as_str() };
        rows.push(("boost", format!("{state}; {} boosts", boost.boosts)));
    }
    writeln!(out, "{}", port.name)?;
    let line =
        |out: &mut dyn Write, (name, value): (&str, &str)| writeln!(out, "  {name:<28} {value}");
    rows.iter().try_for_each(|(name, value)| line(out, (name, value)))?;
    section(out, "dropped frames, by reason", &port.drops)?;
    let counters: BTreeMap<_, _> = vm.counters.iter().filter(|(_, n)| **n > 0).collect();
    section(out, "counters", &counters)?;
    if let Some(mac) = &port.spoofed_mac {
        writeln!(out, "{} sent with {mac}, which is not its own", port.name)?;
    }
    show::troubles(out, &port.name, vm)?;
    section(out, "configuration", &port.keys)
}

/// How a VM is attached.
fn attached(tap: &str, vm: &VmStatus) -> Vec<(&'static str, String)> {
    let mut rows = vec![("attached by its tap", tap.to_owned())];
    if let Some(it) = &vm.attached {
        let both = |from: u64, to: u64| format!("{from} frames of the guest, {to} for it");
        let [queue, window] = [it.queue_bytes, it.window_bytes].map(bytes);
        let queue =
            format!("{} of {} frames, {queue} of {window}", it.queue_frames, it.window_frames);
        rows.extend([
            ("in the tap's queue", queue),
            ("passed the daemon by", both(it.plain_from_vm, it.plain_to_vm)),
            ("lost before the daemon", both(it.lost_from_vm, it.lost_to_vm)),
        ]);
    }
    rows
}

/// A heading and a line for each entry, if there is one.
fn section<K: AsRef<str>, V: ToString>(
    out: &mut dyn Write,
    heading: &str,
    entries: &BTreeMap<K, V>,
) -> io::Result<()> {
    if entries.is_empty() {
        return Ok(());
    }
    writeln!(out, "{heading}:")?;
    for (name, value) in entries {
        writeln!(out, "  {:<28} {}", name.as_ref(), value.to_string())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use nightporter_api::AttachedStatus;

    use super::*;

    fn port(name: &str, mac: Option<&str>) -> PortStatus {
        PortStatus {
            name: name.into(),
            kind: "vm".into(),
            link: name == "web1",
            bytes_from_port: u64::MAX / 1000,
            bytes_to_port: 999 << 30,
            keys: mac.map(|mac| ("mac".into(), format!("\"{mac}\""))).into_iter().collect(),
            trouble: Some("no VMM is connected".into()),
            vm: Some(VmStatus {
                listens: true,
                draining: true,
                owed_flows: 1,
                held_bytes: 999,
                flows: BTreeMap::from([("on".into(), 999_999), ("closed".into(), 7)]),
                counters: BTreeMap::from([("acks_made".into(), 3), ("acks_hidden".into(), 0)]),
                ..VmStatus::default()
            }),
            ..PortStatus::default()
        }
    }

    fn listed(ports: &[PortStatus], rates: Option<(&Before, Duration)>, colours: bool) -> String {
        let mut out = Vec::new();
        lines(&mut out, ports, rates, colours).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn a_list_has_80_columns_and_colours_for_a_terminal_alone() {
        let ports = [
            port("web1", Some("52:54:00:12:34:56")),
            port("a-name-of-many-bytes-as-vms-have", None),
        ];
        let text = listed(&ports, None, false);
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        assert!(text.contains("web1") && text.contains("a-name-of-many-~"), "{text}");
        assert!(text.lines().nth(1).unwrap().ends_with(" 52:54:00:12:34:56"), "{text}");
        assert!(!text.contains('\x1b'));
        let coloured = listed(&ports, None, true);
        assert!(coloured.contains("\n\x1b[32mweb1 ") && coloured.contains("\n\x1b[31ma-name"));
    }

    #[test]
    fn rates_are_those_since_the_last_look() {
        let mut now = port("web1", None);
        let old = [now.bytes_from_port - 125_000, now.bytes_to_port];
        let before = Before { at: Instant::now(), bytes: [("web1".into(), old)].into() };
        let two_s = Some((&before, Duration::from_secs(2)));
        assert_eq!(volume(&now, two_s), ["500k", "0"]);
        now.name = "new".into();
        assert_eq!(volume(&now, two_s), ["-", "-"]);
        let text = listed(&[now], two_s, false);
        assert!(
            text.starts_with("VM   LINK  OFFLOAD   FLOWS   HELD  SENT/s  RECV/s  MAC\n"),
            "{text}"
        );
        let all = [0, 999, 1_000, 9_960, 999_400, 25_000_000_000].map(decimal);
        assert_eq!(all, ["0", "999", "1.0k", "10k", "999k", "25G"]);
    }

    #[test]
    fn all_about_a_vm_has_its_keys_and_why_its_link_is_down() {
        let mut out = Vec::new();
        all(&mut out, &port("web2", Some("52:54:00:12:34:56"))).unwrap();
        let text = String::from_utf8(out).unwrap();
        for line in [
            "  link                         down: no VMM is connected\n",
            "  VMM                          not connected\n",
            "  ack offload                  draining\n",
            "  connections                  7 closed, 999999 on\n",
            "counters:\n  acks_made                    3\nconfiguration:\n",
            "  mac                          \"52:54:00:12:34:56\"\n",
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
        let mut attached = port("web3", None);
        attached.keys.insert("tap".into(), "\"vnet0\"".into());
        let queue = AttachedStatus {
            queue_frames: 3,
            queue_bytes: 2048,
            window_frames: 64,
            window_bytes: 2 << 20,
            ..AttachedStatus::default()
        };
        attached.vm.as_mut().unwrap().attached = Some(queue);
        let mut out = Vec::new();
        all(&mut out, &attached).unwrap();
        let text = String::from_utf8(out).unwrap();
        let tap = "  attached by its tap          vnet0\n";
        assert!(
            text.contains("  in the tap's queue           3 of 64 frames, 2.0K of 2.0M\n"),
            "{text}"
        );
        assert!(
            text.contains(tap) && !text.contains("  VMM ") && !text.contains("rings"),
            "{text}"
        );
    }
}
