//! The processes of this host that are VMs, and their names.

use std::fs::{read, read_dir, read_to_string};
use std::io::ErrorKind;

use serde::Serialize;

/// A virtual machine monitor.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Kind {
    Qemu,
    UserModeLinux,
    CloudHypervisor,
    Firecracker,
    Crosvm,
}

impl Kind {
    /// By the name of a program or thread, of which the kernel keeps 15 bytes.
    fn of(program: &str) -> Option<Self> {
        match program {
            "kvm" | "qemu-kvm" => Some(Self::Qemu),
            "firecracker" => Some(Self::Firecracker),
            "crosvm" => Some(Self::Crosvm),
            "linux" | "linux.uml" | "vmlinux" => Some(Self::UserModeLinux),
            _ if program.starts_with("qemu-system") => Some(Self::Qemu),
            _ if program.starts_with("cloud-hyperviso") => Some(Self::CloudHypervisor),
            _ => None,
        }
    }

    pub(super) const fn label(self) -> &'static str {
        match self {
            Self::Qemu => "QEMU",
            Self::UserModeLinux => "UML",
            Self::CloudHypervisor => "Cloud Hypervisor",
            Self::Firecracker => "Firecracker",
            Self::Crosvm => "crosvm",
        }
    }

    pub(super) const fn is_qemu(self) -> bool {
        matches!(self, Self::Qemu)
    }

    pub(super) const fn is_user_mode(self) -> bool {
        matches!(self, Self::UserModeLinux)
    }

    /// The VM's name, as its command line has it.
    fn name(self, arguments: &[String]) -> Option<String> {
        let after = |options: &[&str]| {
            let at = arguments.iter().position(|it| options.contains(&it.as_str()))?;
            arguments.get(at + 1).cloned()
        };
        match self {
            Self::Qemu => {
                let text = after(&["-name", "--name"])?;
                let mut parts = text.split(',');
                let first = parts.next().filter(|part| !part.contains('='));
                first
                    .or_else(|| text.split(',').find_map(|p| p.strip_prefix("guest=")))
                    .map(Into::into)
            }
            Self::UserModeLinux => {
                arguments.iter().find_map(|it| it.strip_prefix("umid=")).map(Into::into)
            }
            Self::Firecracker => after(&["--id"]),
            Self::Crosvm => after(&["--name"]),
            Self::CloudHypervisor => None,
        }
    }
}

/// Why nothing is known of a VM, or no longer.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Why {
    /// Its threads have no names.
    Names,
    /// Its threads may not be read.
    Rights,
    /// It has ended meanwhile.
    Ended,
}

/// A process that looks like a VM.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Vmm {
    pub(super) kind: Kind,
    pub(super) pid: i32,
    /// `None`: its command line has none.
    pub(super) name: Option<String>,
}

/// All that look like one.
#[derive(Debug, Default)]
pub(super) struct Found {
    pub(super) vmms: Vec<Vmm>,
    /// Processes of others may not be seen.
    pub(super) hidden: bool,
}

/// Looks at all processes.
pub(super) fn all() -> Found {
    let mut found = Found::default();
    for entry in read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        match (read(entry.path().join("comm")), read(entry.path().join("cmdline"))) {
            (Ok(comm), Ok(line)) => found.vmms.extend(vmm(pid, &comm, &line)),
            (Err(e), _) | (_, Err(e)) => found.hidden |= e.kind() == ErrorKind::PermissionDenied,
        }
    }
    let is_root = rustix::process::geteuid().is_root();
    found.hidden |= !is_root && hides(&read_to_string("/proc/self/mountinfo").unwrap_or_default());
    found.vmms.sort_by(|a, b| (&a.name, a.pid).cmp(&(&b.name, b.pid)));
    found
}

/// The VMM that a process is, by its name and its command line.
pub(super) fn vmm(pid: i32, comm: &[u8], command_line: &[u8]) -> Option<Vmm> {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let arguments: Vec<_> = command_line.split(|&byte| byte == 0).map(text).collect();
    let program = arguments[0].rsplit('/').next().unwrap_or_default();
    let kind = Kind::of(program).or_else(|| Kind::of(text(comm).trim_end()))?;
    // Anybody may run a program whose command line has escape sequences for our terminal.
    let plain = |name: String| name.replace(|c: char| c.is_control(), "?");
    let name = kind.name(&arguments).map(plain).filter(|name| !name.is_empty());
    Some(Vmm { kind, pid, name })
}

/// `/proc` is mounted so that it shows users no processes of others (proc(5), `hidepid`).
pub(super) fn hides(mountinfo: &str) -> bool {
    let is_proc = |line: &&str| line.split(' ').nth(4) == Some("/proc");
    let line = mountinfo.lines().rfind(is_proc).unwrap_or_default();
    let mut options = line.split([' ', ',']).filter_map(|it| it.strip_prefix("hidepid="));
    options.any(|value| !matches!(value, "0" | "off"))
}
