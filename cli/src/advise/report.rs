//! The findings as text of two lines a VM and as JSON.

use std::cmp::Ordering;
use std::io::{self, Write};

use serde::Serialize;

use super::find::{Kind, Vmm, Why};

/// Columns of a terminal.
const COLUMNS: usize = 80;
/// A VM that wants its core for less than this share of the time is idle.
const IDLE_SHARE: f64 = 0.02;
/// A VM that waits for less than this share hardly ever waits.
const WAITS_SHARE: f64 = 0.01;
/// The round trip of a local network, in ms: an ACK that is late by less is not missed.
const ROUND_TRIP_MS: f64 = 0.2;
/// Two distances of remotes for which the gain is named: round trips in ms.
const DISTANCES_MS: [f64; 2] = [1.0, 10.0];

/// All that was seen.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub(super) seconds: f64,
    /// VMs of other users may be missing.
    pub(super) hidden: bool,
    pub(super) vms: Vec<VmReport>,
}

/// One vCPU.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct VcpuReport {
    pub(super) tid: i32,
    pub(super) name: String,
    /// Of the time it ran.
    pub(super) ran_share: f64,
    /// Of the time it could have run and waited.
    pub(super) waited_share: f64,
    pub(super) turns_per_s: f64,
    /// Waited before a turn, in the mean.
    pub(super) mean_wait_ms: f64,
    /// The wait that a moment of waiting belongs to, in the mean.
    pub(super) typical_wait_ms: f64,
    /// How late the vCPU takes a frame that arrives at any moment, in the mean.
    pub(super) late_ms: f64,
}

/// The gain by ack offload.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Gain {
    /// It wants its core too seldom to tell.
    Idle,
    /// It hardly ever waits.
    None,
    /// It waits for shorter times than a round trip takes.
    Little,
    /// Its ACKs are late by [`VcpuReport::late_ms`].
    Gains,
}

/// One VM.
#[derive(Debug, Serialize)]
pub(super) struct VmReport {
    name: Option<String>,
    vmm: Kind,
    pid: i32,
    /// Why `gain` is not known.
    why_not: Option<Why>,
    pub(super) gain: Option<Gain>,
    /// How many times sooner what a remote sends is acknowledged, by its round trip in ms.
    acked_sooner: Vec<(f64, f64)>,
    pub(super) vcpus: Vec<VcpuReport>,
}

impl VmReport {
    pub(super) fn new(vmm: Vmm, vcpus: Vec<VcpuReport>, why_not: Option<Why>) -> Self {
        let Vmm { kind, pid, name } = vmm;
        let mut report =
            Self { name, vmm: kind, pid, why_not, gain: None, acked_sooner: vec![], vcpus };
        if let Some(worst) = report.worst().cloned().filter(|_| why_not.is_none()) {
            report.gain = Some(Gain::of(&worst));
            let sooner = |rtt: f64| (rtt, (rtt + worst.late_ms) / rtt);
            report.acked_sooner = DISTANCES_MS.map(sooner).to_vec();
        }
        report
    }

    /// The vCPU that waited most. A VM's frames may be the work of any.
    pub(super) fn worst(&self) -> Option<&VcpuReport> {
        let by = |a: &&VcpuReport, b: &&VcpuReport| {
            a.waited_share.partial_cmp(&b.waited_share).unwrap_or(Ordering::Equal)
        };
        self.vcpus.iter().max_by(by)
    }
}

impl Gain {
    fn of(vcpu: &VcpuReport) -> Self {
        if vcpu.ran_share + vcpu.waited_share < IDLE_SHARE {
            Self::Idle
        } else if vcpu.waited_share < WAITS_SHARE {
            Self::None
        } else if vcpu.typical_wait_ms < ROUND_TRIP_MS {
            Self::Little
        } else {
            Self::Gains
        }
    }
}

/// Two lines a VM.
pub(super) fn show(out: &mut dyn Write, report: &Report) -> io::Result<()> {
    if report.vms.is_empty() {
        writeln!(out, "no VM was found: no QEMU, user-mode Linux, Cloud Hypervisor, Firecracker")?;
        writeln!(out, "or crosvm runs here")?;
    } else {
        let s = report.seconds;
        writeln!(out, "How long the VMs of this host waited for a core, over {s:.1} s:")?;
    }
    for vm in &report.vms {
        let [facts, gain] = vm.lines();
        writeln!(out, "{facts}\n  {gain}")?;
    }
    if report.hidden {
        writeln!(out, "/proc hides processes of other users: run as root to see all VMs")?;
    }
    Ok(())
}

impl VmReport {
    fn lines(&self) -> [String; 2] {
        let (facts, gain) = match (self.why_not, self.worst()) {
            (Some(Why::Ended), _) => ("has ended meanwhile".into(), "nothing is known".into()),
            (Some(Why::Rights), _) => {
                ("may not be looked at".into(), "nothing is known: run as root".into())
            }
            (_, None) => (
                "its vCPUs' threads have no names".into(),
                "nothing is known: start it with -name NAME,debug-threads=on".into(),
            ),
            (None | Some(Why::Names), Some(vcpu)) => (vcpu.facts(), self.advice(vcpu)),
        };
        let what = format!(" ({}, pid {}): {facts}", self.vmm.label(), self.pid);
        let room = COLUMNS.saturating_sub(what.chars().count());
        let name = self.name.clone().unwrap_or_else(|| "a VM".into());
        [shortened(&name, room) + &what, gain]
    }

    fn advice(&self, vcpu: &VcpuReport) -> String {
        match self.gain.unwrap_or(Gain::Idle) {
            Gain::Idle => "is idle: look again while it has work and traffic".into(),
            Gain::None => "gains nothing: it hardly ever waits for a core".into(),
            Gain::Little => {
                let wait = ms(vcpu.typical_wait_ms);
                format!("gains little: its waits ({wait}) are shorter than a round trip")
            }
            Gain::Gains => {
                let sooner: Vec<_> = self.acked_sooner.iter().map(|(_, it)| times(*it)).collect();
                format!(
                    "its ACKs are {} late; acked up to {} sooner at 1 ms, {} at 10 ms",
                    ms(vcpu.late_ms),
                    sooner[0],
                    sooner[1]
                )
            }
        }
    }
}

impl VcpuReport {
    fn facts(&self) -> String {
        let wait = ms(self.mean_wait_ms);
        let percent = self.waited_share * 100.0;
        let percent =
            if percent < 9.95 { format!("{percent:.1}") } else { format!("{percent:.0}") };
        format!("waits {percent} %, {wait} a turn, {:.0} turns/s", self.turns_per_s)
    }
}

/// Two or three digits.
fn ms(ms: f64) -> String {
    match ms {
        ..0.095 => format!("{ms:.2} ms"),
        ..9.95 => format!("{ms:.1} ms"),
        ..9_950.0 => format!("{ms:.0} ms"),
        _ => format!("{:.0} s", ms / 1000.0),
    }
}

/// A factor with two digits.
fn times(factor: f64) -> String {
    if factor < 9.95 { format!("{factor:.1}x") } else { format!("{factor:.0}x") }
}

fn shortened(text: &str, columns: usize) -> String {
    if text.chars().count() <= columns {
        text.into()
    } else {
        text.chars().take(columns.saturating_sub(1)).chain(['~']).collect()
    }
}
