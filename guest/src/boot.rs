//! From the kernel's hand-over to working devices.

use std::fs::{self, File};
use std::io;

use anyhow::{Context, Result};
use nightporter_guest::bootline::Bootline;
use nix::errno::Errno;
use nix::kmod::{ModuleInitFlags, finit_module};
use nix::mount::{MsFlags, mount};
use nix::sys::reboot::{RebootMode, reboot, set_cad_enabled};

/// Where the initramfs keeps the kernel modules, named so that sorting gives the load order.
const MODULES: &str = "/modules";

/// Least, first and largest receive buffer of a connection, bytes: the values of a Linux guest with
/// 768 MiB and more (net/ipv4/tcp.c, `tcp_init`, 6.1). Lab guests have less memory, and a window
/// that is small only because of that would make the host look good.
const TCP_RMEM: &str = "4096 131072 6291456";

/// The same for the send buffer, which bounds the data that a guest hands over at once.
const TCP_WMEM: &str = "4096 16384 4194304";

/// The directory for programs' files while they run.
const RUN: &str = "/run";

/// Mounts the kernel's file systems, loads the modules and reads the command line.
pub(crate) fn bring_up() -> Result<Bootline> {
    for (kind, target) in [("proc", "/proc"), ("sysfs", "/sys"), ("devtmpfs", "/dev")] {
        mount_at(kind, target)?;
    }
    fs::create_dir_all(RUN).context(RUN)?;
    load_modules()?;
    fs::write("/proc/sys/net/ipv4/tcp_wmem", TCP_WMEM).context("tcp_wmem")?;
    fs::write("/proc/sys/net/ipv4/tcp_rmem", TCP_RMEM).context("tcp_rmem")?;
    let cmdline = fs::read_to_string("/proc/cmdline").context("reading /proc/cmdline")?;
    cmdline.parse()
}

fn mount_at(kind: &str, target: &str) -> Result<()> {
    fs::create_dir_all(target).with_context(|| format!("creating {target}"))?;
    match mount(Some(kind), target, Some(kind), MsFlags::empty(), None::<&str>) {
        Ok(()) | Err(Errno::EBUSY) => Ok(()), // some kernels mount devtmpfs themselves
        Err(errno) => Err(errno).with_context(|| format!("mounting {kind} on {target}")),
    }
}

fn load_modules() -> Result<()> {
    let mut paths = match fs::read_dir(MODULES) {
        Ok(entries) => entries.map(|e| Ok(e?.path())).collect::<io::Result<Vec<_>>>()?,
        Err(e) if e.kind() == io::ErrorKind::NotFound => Vec::new(), // all built in (UML)
        Err(e) => return Err(e).context("listing the kernel modules"),
    };
    paths.sort();
    for path in paths {
        let file = File::open(&path)?;
        match finit_module(&file, c"", ModuleInitFlags::empty()) {
            Ok(()) | Err(Errno::EEXIST) => {}
            Err(errno) => {
                return Err(errno).with_context(|| format!("loading {}", path.display()));
            }
        }
    }
    Ok(())
}

/// Reboots without closing anything.
pub(crate) fn reboot_now() -> ! {
    leave(RebootMode::RB_AUTOBOOT)
}

/// Powers off without closing anything.
pub(crate) fn power_off() -> ! {
    leave(RebootMode::RB_POWER_OFF)
}

/// Panics the kernel.
pub(crate) fn crash() -> ! {
    // All of SysRq's functions are off limits on a Debian kernel unless asked for.
    let _ = fs::write("/proc/sys/kernel/sysrq", "1");
    let error = fs::write("/proc/sysrq-trigger", "c");
    panic!("the kernel outlived a SysRq crash: {error:?}");
}

fn leave(mode: RebootMode) -> ! {
    let _ = set_cad_enabled(false);
    match reboot(mode) {
        Ok(never) => match never {},
        Err(errno) => panic!("reboot({mode:?}): {errno}"), // init's death panics the kernel
    }
}
