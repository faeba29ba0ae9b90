//! Opening the interface of an uplink, which takes privileges that only the broker has in a running
//! daemon.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use nightporter_core::wire::virtio_net::VirtioNetHdr;
use nix::libc;
use nix::net::if_::if_nametoindex;

use crate::config::{UplinkConfig, UplinkKind};
use crate::sys;
use crate::tap_address;

/// Why an uplink could not be opened. The text says what to do.
#[derive(Debug, thiserror::Error)]
#[error("{port}: {what}\n    fix: {fix}")]
pub struct OpenError {
    /// "uplink lan", "vm web1".
    pub(crate) port: String,
    pub(crate) what: String,
    pub(crate) fix: String,
    /// Another process has it, or this one, for an uplink that has just gone.
    pub(crate) is_busy: bool,
    /// Only a restart helps, with other rights or another kernel.
    pub(crate) is_final: bool,
}

impl OpenError {
    /// One that may go by itself.
    fn of(config: &UplinkConfig, what: String, fix: String) -> Self {
        let port = format!("uplink {}", config.name);
        Self { port, what, fix, is_busy: false, is_final: false }
    }

    /// Without the fix.
    pub(crate) fn what(&self) -> &str {
        &self.what
    }
}

/// Opens an interface, sets it up and puts it into its bridge; its number. `is_new`: no tap that
/// there is. Takes CAP_NET_ADMIN, which only the broker has in a running daemon.
pub(crate) fn open_file(config: &UplinkConfig, is_new: bool) -> Result<(File, u32), OpenError> {
    match config.kind {
        UplinkKind::Tap => open_tap(config, is_new),
        UplinkKind::Macvtap => open_macvtap(config),
    }
}

/// The command that makes the interface.
fn command(UplinkConfig { kind, ifname, .. }: &UplinkConfig) -> String {
    match kind {
        UplinkKind::Tap => {
            format!("ip tuntap add dev {ifname} mode tap vnet_hdr && ip link set {ifname} up")
        }
        UplinkKind::Macvtap => format!(
            "ip link add link eth0 name {ifname} type macvtap mode passthru && \
             ip link set {ifname} up (with your network card for eth0)"
        ),
    }
}

/// For `--check`: an interface is there with that name, and is of another kind.
pub(crate) fn wrong_interface(uplink: &UplinkConfig) -> Option<String> {
    let UplinkConfig { name, kind, ifname, .. } = uplink;
    let of = Path::new("/sys/class/net").join(ifname.as_str());
    let (mark, fix) = match kind {
        UplinkKind::Tap => {
            let fix = format!(
                "give the uplink a name of its own, as in ifname = \"np0\", and a bridge that has \
                 {ifname} as a member: bridge = \"br0\""
            );
            ("tun_flags", fix)
        }
        UplinkKind::Macvtap => {
            let fix = format!("ip link add link {ifname} name np0 type macvtap mode passthru");
            ("macvtap", fix + ", and ifname = \"np0\"")
        }
    };
    let (is_wrong, kind) = (of.exists() && !of.join(mark).exists(), kind.label());
    is_wrong.then(|| format!("uplink.{name}: {ifname} is there, and is no {kind}\n    fix: {fix}"))
}

/// For `--check`: there is no such interface or bridge.
pub(crate) fn missing_interface(uplink: &UplinkConfig) -> Option<String> {
    let UplinkConfig { name, kind, ifname, create, bridge, .. } = uplink;
    let is_missing = |ifname: &str| if_nametoindex(ifname).is_err();
    if let Some(bridge) = bridge.as_deref().filter(|bridge| is_missing(bridge)) {
        let fix = make_bridge(bridge);
        return Some(format!("uplink.{name}: there is no bridge {bridge}\n    fix: {fix}"));
    }
    let is_made = *kind == UplinkKind::Tap && *create;
    let fix = command(uplink);
    (!is_made && is_missing(ifname))
        .then(|| format!("uplink.{name}: there is no interface {ifname}\n    fix: {fix}"))
}

fn open_tap(config: &UplinkConfig, is_new: bool) -> Result<(File, u32), OpenError> {
    let UplinkConfig { ifname, create, bridge, .. } = config;
    let error = |what: String, fix: String| OpenError::of(config, what, fix);
    let make = command(config);
    if !create && if_nametoindex(ifname.as_str()).is_err() {
        let what = format!("there is no interface {ifname}");
        return Err(error(what, format!("{make}; or set create = true")));
    }
    if let Some(bridge) = bridge
        && if_nametoindex(bridge.as_str()).is_err()
    {
        // Before an interface is made in vain.
        return Err(error(format!("there is no bridge {bridge}"), make_bridge(bridge)));
    }
    let file = open_device("/dev/net/tun").map_err(|e| {
        let fix = "load the module (modprobe tun), let everybody open it as udev does (chmod 0666 \
                   /dev/net/tun), and run as root or with CAP_NET_ADMIN; a daemon that had no tap \
                   at its start can open one after a restart";
        let what = format!("cannot open /dev/net/tun: {e}");
        OpenError { is_final: true, ..error(what, fix.into()) }
    })?;
    let before = if_nametoindex(ifname.as_str()).ok();
    sys::tun_attach(&file, ifname, is_new).map_err(|e| match e.raw_os_error() {
        Some(libc::EBUSY) if is_new => {
            let fix = "choose another name, or write the uplink into the file and reload";
            error(format!("{ifname} is there already"), fix.into())
        }
        Some(libc::EBUSY) => {
            let fix = "stop that process, or choose another interface".into();
            let what = format!("{ifname} is in use by another process");
            OpenError { is_busy: true, ..error(what, fix) }
        }
        Some(libc::EINVAL) => {
            let (what, fix) = no_such_tap(ifname, &make);
            error(what, fix)
        }
        Some(libc::EPERM) => {
            let what = format!("not allowed to open {ifname}");
            let fix = "run as root or with CAP_NET_ADMIN".into();
            OpenError { is_final: true, ..error(what, fix) }
        }
        _ => error(format!("cannot attach to {ifname}: {e}"), make.clone()),
    })?;
    let index = if_nametoindex(ifname.as_str())
        .map_err(|e| error(format!("{ifname} has gone again: {e}"), make.clone()))?;
    // The one that was there may have gone in between, and this is another.
    let is_made = before != Some(index);
    configure(&file, config, is_made)?; // before a bridge looks at its address
    match join_bridge(config, index) {
        Ok(()) => {}
        // An operator who names the bridge here configured it so before.
        Err(e) if e.raw_os_error() == Some(libc::EBUSY) && !is_new => {}
        Err(e) => {
            let bridge = bridge.as_deref().unwrap_or_default();
            let what = format!("cannot put {ifname} into {bridge}: {e}");
            return Err(error(what, make_bridge(bridge)));
        }
    }
    // The host itself receives nothing from a tap that comes up in its bridge.
    sys::interface_up(ifname).map_err(|e| {
        error(format!("cannot bring {ifname} up: {e}"), format!("ip link set {ifname} up"))
    })?;
    Ok((file, index))
}

/// Puts an uplink with this number into its bridge, if it has one. EBUSY: it is in some bridge
/// already.
pub(crate) fn join_bridge(config: &UplinkConfig, index: u32) -> io::Result<()> {
    config.bridge.as_ref().map_or(Ok(()), |bridge| sys::bridge_add(bridge, index))
}

fn make_bridge(bridge: &str) -> String {
    format!("ip link add {bridge} type bridge && ip link set {bridge} up")
}

fn open_macvtap(config: &UplinkConfig) -> Result<(File, u32), OpenError> {
    let ifname = &config.ifname;
    let error = |what: String, fix: String| OpenError::of(config, what, fix);
    let make = command(config);
    let index = if_nametoindex(ifname.as_str())
        .map_err(|_| error(format!("there is no interface {ifname}"), make.clone()))?;
    let device = format!("/dev/tap{index}");
    let file = open_device(&device).map_err(|e| {
        let is_busy = e.raw_os_error() == Some(libc::EBUSY);
        let (what, fix) = match e.raw_os_error() {
            Some(libc::EBUSY) => {
                (format!("{ifname} is in use by another process"), "stop that process".into())
            }
            Some(libc::EACCES | libc::EPERM) => {
                let fix = format!(
                    "run as root, or chown {device}; a daemon that had no macvtap at its start \
                     can open one after a restart"
                );
                (format!("not allowed to open {device}"), fix)
            }
            Some(libc::ENOENT) => {
                let dev = format!("/sys/class/net/{ifname}/macvtap/tap{index}/dev");
                let mknod = format!("mknod {device} c $(tr : ' ' < {dev})");
                let what = format!("there is no {device}: {ifname} is no macvtap, or no udev runs");
                (what, format!("{make}; without udev: {mknod}"))
            }
            _ => (format!("cannot open {device}: {e}"), make.clone()),
        };
        OpenError { is_busy, ..error(what, fix) }
    })?;
    configure(&file, config, false)?;
    sys::interface_up(ifname).map_err(|e| {
        error(format!("cannot bring {ifname} up: {e}"), format!("ip link set {ifname} up"))
    })?;
    Ok((file, index))
}

/// Why the interface with this name is no tap of ours, and the fix: a network card is not removed.
fn no_such_tap(ifname: &str, make: &str) -> (String, String) {
    let is_tun = Path::new("/sys/class/net").join(ifname).join("tun_flags").exists();
    if is_tun {
        let fix = format!("choose another name, or: ip link del {ifname} && {make}");
        return (format!("{ifname} exists and is not a single-queue tap"), fix);
    }
    let fix = "give the uplink a name of its own, and a bridge with that interface".into();
    (format!("{ifname} is there, and is no tap"), fix)
}

fn open_device(path: &str) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(path)
}

/// Sets up what was opened, and the address of a tap that was made.
fn configure(file: &File, config: &UplinkConfig, is_made: bool) -> Result<(), OpenError> {
    let ifname = config.ifname.as_str();
    let error = |what: String, fix: &str| OpenError {
        is_final: true,
        ..OpenError::of(config, what, fix.into())
    };
    sys::tun_configure(file, VirtioNetHdr::LEN).map_err(|e| {
        let what = format!("{ifname} does not do virtio-net headers with offloads: {e}");
        error(what, "use a kernel of 4.8 or later")
    })?;
    if is_made {
        sys::tun_set_address(file, ifname, tap_address::of(ifname)).map_err(|e| {
            let what = format!("cannot set the Ethernet address of {ifname}: {e}");
            error(what, "run as root or with CAP_NET_ADMIN")
        })?;
    }
    Ok(())
}
