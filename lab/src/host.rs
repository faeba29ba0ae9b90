//! The network of a run: a host in a namespace of its own, and a remote host in another.
//!
//! ```text
//!   remote namespace          host namespace (this thread and its children)
//!   ┌──────────────┐          ┌─────────────────────────────────────────────────┐
//!   │ sender       │          │            ┌── tap ── QEMU (plain path)         │
//!   │  eth0 ═══════╪══ link ══╪══ bridge ══╡                                    │
//!   │  10.77.P.1   │          │            └── uplink tap ── nightporterd ══ QEMU│
//!   └──────────────┘          └─────────────────────────────────────────────────┘
//! ```
//!
//! The link is a veth pair, or a delay line between two taps ([`crate::link`]). Neither namespace
//! has a name or a mount: they, the bridge and the taps vanish with the last process in them. The
//! host's firewall and bridge settings do not apply inside.

use std::fs::{self, File};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::thread;

use anyhow::{Context, Result};
use nightporter_guest::bootline::{Mac, Neighbour, Nic};
use nix::sched::{CloneFlags, setns, unshare};

use crate::link::watch::Watch;
use crate::link::{DelayLine, Measured, Shape};
use crate::process::run;
use crate::sys;

/// Ethernet address of the remote host.
pub const REMOTE_MAC: Mac = Mac([0x02, 0x4e, 0x50, 0, 0, 1]);

/// Last number of the remote host's address that is farther away, where there is one.
pub const FAR: u8 = 2;

/// Prefix length of every path's subnet.
pub const PREFIX: u8 = 24;

/// Addresses behind a guest that forwards.
const BEHIND: u8 = 200;
/// Of IPv6. With those of IPv4 they are fewer than `ips` of a VM may have.
const BEHIND_6: u16 = 40;

const BRIDGE: &str = "bridge";

/// The subnet of the host itself, without guests: for measuring the link.
const HOST_SUBNET: u8 = 0;

/// The host's side: bridge and taps, in the calling thread's new network namespace.
#[derive(Debug)]
pub struct Host {
    remote: Remote,
    line: Option<DelayLine>,
    measured: Option<Measured>,
}

/// A network namespace, for example the remote host's; clones are the same one.
#[derive(Debug, Clone)]
pub struct Remote {
    namespace: Arc<File>,
}

/// Address of the remote host on the subnet of path `path`.
#[must_use]
pub fn remote_address(path: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 77, path, 1)
}

fn remote_address_6(path: u8) -> Ipv6Addr {
    Ipv6Addr::new(0xfd00, 0x77, path.into(), 0, 0, 0, 0, 1)
}

/// Guest `guest`'s NIC on path `path`.
#[must_use]
pub fn guest_nic(guest: u8, path: u8) -> Nic {
    Nic {
        mac: Mac([0x52, 0x54, 0, 0x4e, path, guest]),
        address: Ipv4Addr::new(10, 77, path, 10 + guest),
        prefix: PREFIX,
    }
}

/// Addresses behind guest 0, which the remote host reaches by its NIC on path `path`.
pub fn behind(path: u8) -> impl Iterator<Item = Ipv4Addr> {
    (1..=BEHIND).map(move |n| Ipv4Addr::new(10, 78, path, n))
}

/// Likewise of IPv6.
pub fn behind_6(path: u8) -> impl Iterator<Item = Ipv6Addr> {
    (1..=BEHIND_6).map(move |n| Ipv6Addr::new(0xfd00, 0x78, path.into(), 0, 0, 0, 0, n))
}

/// The addresses that guest 0 needs on that path for what is behind it, its own of IPv6 among them.
pub(crate) fn all_behind(path: u8) -> impl Iterator<Item = IpAddr> {
    let all = behind_6(path).chain([guest_address_6(path)]).map(IpAddr::from);
    behind(path).map(IpAddr::from).chain(all)
}

/// Address of guest 0 on the subnet of path `path`, if it forwards.
#[must_use]
pub fn guest_address_6(path: u8) -> Ipv6Addr {
    Ipv6Addr::new(0xfd00, 0x77, path.into(), 0, 0, 0, 0, 10)
}

/// The remote host as guests see it, on the subnets of `paths`.
#[must_use]
pub fn remote_neighbours(paths: &[u8]) -> Vec<Neighbour> {
    paths.iter().map(|&p| Neighbour { address: remote_address(p), mac: REMOTE_MAC }).collect()
}

impl Host {
    /// Moves the calling thread into a new network namespace with a bridge, and connects a remote
    /// host that has an address on the subnets of `paths`: over `link`, which is measured first if
    /// it is to be exact, or by a cable without delay.
    ///
    /// # Errors
    /// No permission, no iproute2, or a link that is not what it should be.
    pub fn create(paths: &[u8], link: Option<Shape>) -> Result<Self> {
        unshare(CloneFlags::CLONE_NEWNET).context("making a network namespace")?;
        ip("link set lo up")?;
        ip(&format!("link add {BRIDGE} type bridge stp_state 0 mcast_snooping 0"))?;
        ip(&format!("link set {BRIDGE} up"))?;
        let remote = Remote { namespace: Arc::new(new_namespace()?) };
        let line = match link {
            Some(link) => Some(connect_over(link, &remote)?),
            None => cable(&remote, "remote").map(|()| None)?,
        };
        ip(&format!("link set remote master {BRIDGE} up"))?;
        remote.enter(|| -> Result<()> {
            ip("link set lo up")?;
            ip(&format!("link set eth0 address {REMOTE_MAC} up"))?;
            // The state of a path that one transfer learns must not help or hurt the next one.
            sysctl("net/ipv4/tcp_no_metrics_save", "1")?;
            let mut subnets = paths.iter().chain(&[HOST_SUBNET]);
            subnets.try_for_each(|&path| join_subnet(remote_address(path)))
        })?;
        let host = Ipv4Addr::new(10, 77, HOST_SUBNET, 2);
        ip(&format!("address add {host}/{PREFIX} dev {BRIDGE}"))?;
        let exact = line.as_ref().filter(|_| link.is_some_and(|link| link.exact));
        let measured = exact.map(|line| line.calibrate(&remote, host)).transpose()?;
        Ok(Self { remote, line, measured })
    }

    /// The measured values of the link, if there is one.
    #[must_use]
    pub fn measured(&self) -> Option<Measured> {
        self.measured
    }

    /// The line's view of connections.
    #[must_use]
    pub fn watch(&self) -> Option<&Mutex<Watch>> {
        self.line.as_ref().map(DelayLine::watch)
    }

    /// Makes a machine with a stack of its own on the bridge, a Linux without hypervisor, and the
    /// remote host known to it.
    ///
    /// # Errors
    /// Those of ip(8).
    pub fn add_machine(&self, name: &str, nic: &Nic) -> Result<Remote> {
        let machine = Remote { namespace: Arc::new(new_namespace()?) };
        cable(&machine, name)?;
        ip(&format!("link set {name} master {BRIDGE} up"))?;
        machine.enter(|| -> Result<()> {
            ip("link set lo up")?;
            ip(&format!("link set eth0 address {} up", nic.mac))?;
            sysctl("net/ipv4/tcp_no_metrics_save", "1")?;
            join_subnet(nic.address)
        })?;
        self.remote.know(nic)?;
        Ok(machine)
    }

    /// Makes a tap with virtio-net headers and puts it on the bridge.
    ///
    /// # Errors
    /// Those of ip(8).
    pub fn add_tap(&self, name: &str) -> Result<()> {
        ip(&format!("tuntap add dev {name} mode tap vnet_hdr"))?;
        ip(&format!("link set {name} master {BRIDGE} up"))
    }

    /// The remote host.
    #[must_use]
    pub fn remote(&self) -> &Remote {
        &self.remote
    }
}

impl Remote {
    /// Runs `action` in a thread inside the remote host's namespace.
    ///
    /// # Panics
    /// When the namespace cannot be entered (it was made by us), and when `action` panics.
    pub fn enter<T: Send>(&self, action: impl FnOnce() -> T + Send) -> T {
        thread::scope(|scope| {
            let inside = scope.spawn(|| {
                self.move_in();
                action()
            });
            inside.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Moves the calling thread, and all that it starts from now on, into the namespace.
    ///
    /// # Panics
    /// When it cannot be entered: it was made by us.
    pub fn move_in(&self) {
        setns(&*self.namespace, CloneFlags::CLONE_NEWNET).expect("our own namespace");
    }

    /// Reaches what is [`behind`] guest 0 by its NIC on path `path`.
    ///
    /// # Errors
    /// Those of ip(8).
    pub fn reach_behind(&self, path: u8) -> Result<()> {
        let (router, source) = (guest_nic(0, path).address, remote_address(path));
        let way = format!("10.78.{path}.0/{PREFIX} via {router} src {source} congctl cubic");
        let [source_6, router_6] = [remote_address_6(path), guest_address_6(path)];
        let way_6 = format!("fd00:78:{path}::/64 via {router_6} src {source_6} congctl cubic");
        self.enter(|| {
            ip(&format!("route add {way}"))?;
            ip(&format!("address add {source_6}/64 dev eth0 nodad"))?;
            ip(&format!("-6 route add {way_6}"))
        })
    }

    /// A command that runs `program` in the namespace, as a child of the caller.
    #[must_use]
    pub fn command(&self, program: &Path) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", self.path())).arg(program);
        command
    }

    /// Where other processes find it: they can open our descriptors.
    fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.namespace.as_raw_fd())
    }

    /// Tells the remote host where a guest's NIC is, so that no ARP is part of a measurement.
    ///
    /// # Errors
    /// Those of ip(8).
    pub fn know(&self, nic: &Nic) -> Result<()> {
        self.enter(|| {
            let (address, mac) = (nic.address, nic.mac);
            ip(&format!("neighbour replace {address} lladdr {mac} dev eth0 nud permanent"))
        })
    }
}

/// Two machines with stacks of their own, these addresses, and a cable between them.
///
/// # Errors
/// No permission, no iproute2.
pub fn cabled(addresses: [Ipv4Addr; 2]) -> Result<[Remote; 2]> {
    let machine = || Ok::<_, anyhow::Error>(Remote { namespace: Arc::new(new_namespace()?) });
    let machines = [machine()?, machine()?];
    machines[0].enter(|| cable(&machines[1], "cable"))?;
    for ((machine, address), name) in machines.iter().zip(addresses).zip(["cable", "eth0"]) {
        machine.enter(|| -> Result<()> {
            ip("link set lo up")?;
            ip(&format!("link set {name} up"))?;
            ip(&format!("address add {address}/{PREFIX} dev {name}"))
        })?;
    }
    Ok(machines)
}

/// A cable without delay, `name` at the bridge's end.
fn cable(remote: &Remote, name: &str) -> Result<()> {
    ip(&format!("link add {name} type veth peer name eth0"))?;
    ip(&format!("link set eth0 netns {}", remote.path())) // ip(8) takes a path for a namespace
}

fn connect_over(link: Shape, remote: &Remote) -> Result<DelayLine> {
    let theirs = remote.enter(|| sys::make_tap("eth0", true)).context("making the remote's tap")?;
    let ours = sys::make_tap("remote", !link.by_frame).context("making the link's tap")?;
    if link.by_frame {
        // The queue is the line's.
        ip("link set remote txqueuelen 20000")?;
    }
    DelayLine::start(link, [theirs, ours])
}

/// Gives the calling thread's machine this address.
///
/// # Errors
/// Those of ip(8).
pub(crate) fn add_address(address: Ipv4Addr) -> Result<()> {
    ip(&format!("address add {address}/{PREFIX} dev eth0 noprefixroute"))
}

/// Gives it this address too, and the way to its subnet.
///
/// # Errors
/// Those of ip(8).
pub(crate) fn join_subnet(address: Ipv4Addr) -> Result<()> {
    add_address(address)?;
    let [a, b, c, _] = address.octets();
    // Linux's default, whatever this host prefers: BBR, for example, paces, and takes a guest that
    // waits for its core for a slow path. A namespace may not choose its own.
    ip(&format!("route add {a}.{b}.{c}.0/{PREFIX} dev eth0 src {address} congctl cubic"))
}

/// An empty network namespace.
fn new_namespace() -> Result<File> {
    let inside = thread::spawn(|| -> Result<File> {
        unshare(CloneFlags::CLONE_NEWNET).context("making a network namespace")?;
        Ok(File::open("/proc/thread-self/ns/net")?)
    });
    inside.join().expect("does not panic")
}

pub(crate) fn ip(arguments: &str) -> Result<()> {
    run("ip", &arguments.split(' ').collect::<Vec<_>>()).map(drop)
}

/// Sets a sysctl of the calling thread's network namespace.
pub(crate) fn sysctl(name: &str, value: &str) -> Result<()> {
    let path = Path::new("/proc/sys").join(name);
    fs::write(&path, value).with_context(|| format!("writing {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_guest_nic_has_its_own_address_on_the_subnet_of_its_path() {
        let nics: Vec<Nic> =
            [(0, 1), (1, 1), (0, 2), (1, 2)].map(|(g, p)| guest_nic(g, p)).to_vec();
        for (i, a) in nics.iter().enumerate() {
            for b in &nics[i + 1..] {
                assert!(a.mac != b.mac && a.address != b.address, "{a} and {b}");
            }
        }
        assert_eq!(guest_nic(0, 2).address.octets()[..3], remote_address(2).octets()[..3]);
    }
}
