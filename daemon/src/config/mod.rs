//! The configuration: one TOML file, checked as a whole before anything starts.
//!
//! The structs here are the reference for every key; `docs/configuration.md` says the same for
//! operators, and a test holds the two together. Parsing lives in [`reader`] and in the private
//! `parse` module.

mod boost;
pub mod keys;
pub mod overlay;
mod parse;
pub(crate) mod proof;
pub mod reader;
pub mod registry;
pub(crate) mod registry_files;
pub mod station;
pub mod toe;
mod toe_rule;
pub(crate) mod warnings;

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use nightporter_boost::protocol::Budget;
use nightporter_core::congestion::Algorithm;
use nightporter_core::limits::{
    BACKLOGS_BYTES_MAX, FLOW_BUFFER_MIN, FLOW_BYTES_IDLE, FLOW_RECORD_BYTES, FLOWS_MAX,
    SENDER_MEMORY_BYTES, toe_bytes_max,
};
use nightporter_core::port::Local;
use nightporter_registry::Station;

pub use overlay::OverlayConfig;
pub(crate) use parse::is_ifname;
pub use reader::{Problem, Problems};
pub use registry::RegistryConfig;
pub use toe::{FabricKind, ToeConfig};
pub use toe_rule::ToeRule;

use crate::limits::{RECEIVE_BYTES, REGIONS_MAX, SEALED_BYTES_MAX, arrived_bytes_max};
use crate::spans;

/// The directory of the sockets and the arena unless configured otherwise.
pub const RUN_DIR: &str = "/run/nightporter";

/// The daemon's memory without VMs: itself, tables, operators' requests.
const OWN_BYTES: u64 = 64 << 20;
/// The further memory of a connection with bytes in the store, where each has [`FLOW_BUFFER_MIN`]:
/// bytes out of order, and the state for sending for its guest.
const BUSY_FLOW_BYTES: u64 = 4096;

/// A whole, consistent configuration: names, sockets and MACs are unique, sizes are in range.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Config {
    /// `[daemon]`.
    pub daemon: DaemonConfig,
    /// `[[uplink]]`, in file order. None is allowed: then VMs reach only each other.
    pub uplinks: Vec<UplinkConfig>,
    /// `[[overlay]]`, in file order.
    pub overlays: Vec<OverlayConfig>,
    /// `[registry]`: where hosts find each other.
    pub registry: Option<RegistryConfig>,
    /// `[toe]`: a way to guests' sockets on other hosts.
    pub toe: Option<ToeConfig>,
    /// `[[toe_rule]]`, in file order: the first that fits decides.
    pub toe_rules: Vec<ToeRule>,
    /// `[[station]]`, in file order: the operator's list of which station is behind which peer.
    pub stations: Vec<Station>,
    /// `[[vm]]`, in file order.
    pub vms: Vec<VmConfig>,
}

/// `[daemon]`: the process as a whole.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct DaemonConfig {
    /// UNIX socket the `nightporter` tool talks to; made with mode 0600.
    /// Default `/run/nightporter/control.sock`. At most 107 bytes (`sun_path`).
    pub control: PathBuf,
    /// Address and port that serve Prometheus metrics over HTTP, or `"off"`.
    /// Default `127.0.0.1:9469`. A scrape costs the worker a look at every tracked connection; it
    /// makes a new answer at most twice a second.
    pub metrics: Option<SocketAddr>,
    /// Allow `metrics` on an address that is not loopback. Default `false`: the endpoint has no
    /// authentication and names every VM.
    pub metrics_allow_remote: bool,
    /// The file of the store: bytes acknowledged to remotes that guests have not acknowledged yet.
    /// Default `/run/nightporter/arena`. It must be on a tmpfs; on a disk every write-back would
    /// stall the worker. Size: the sum of all `vm.budget`, plus the flow tables; allocated in full
    /// at start, so that running out of memory is a start-up error and never a crash. A restarted
    /// daemon needs the same file to know its predecessor's promises.
    pub arena: PathBuf,
    /// Owner of the vhost-user sockets, so that a VMM that is not root can connect.
    /// Default: the daemon's own user. With it or with `socket_group` the mode is 0660, else 0600.
    pub socket_user: Option<String>,
    /// Group of the vhost-user sockets. Default: the daemon's own group.
    pub socket_group: Option<String>,
    /// Directories in which VMs that come while the daemon runs may have their sockets, besides
    /// those of `control`, `arena` and the VMs of the file. Default: none.
    pub socket_dirs: Vec<PathBuf>,
    /// Bridges into which `nightporter uplink add` may put taps, which are new. Default: none. A
    /// change takes effect as soon as it is in the file.
    pub bridges: Vec<String>,
    /// Microseconds the worker keeps looking for work before it sleeps. Default 0 (sleep at once).
    /// It costs that much CPU after every burst and saves the wake-up (5 to 50 us) of frames that
    /// come within that time. The worker offers its core to others at every look, and does without
    /// polling for a while when another thread takes it. 1,000,000 keeps an idle core busy.
    pub busy_poll_us: u64,
    /// The core the worker is pinned to. Default: none, the kernel's scheduler decides. Give it a
    /// core the guests' vCPU threads do not use: the daemon acknowledges *while they wait*.
    pub cpu: Option<usize>,
    /// `SCHED_FIFO` priority of the worker, 1 to 99; 0 (default) is normal scheduling. Needed only
    /// where the worker must share a core with guests that run at a real-time priority; then
    /// choose one above theirs. With `busy_poll_us` too, everything below it on that core starves.
    pub rt_priority: u8,
    /// The log level, in `tracing` syntax: `error`, `warn`, `info` (default), `debug`, `trace`, or
    /// per module, as in `info,nightporterd::vhost=debug`. `debug` logs per vhost-user message,
    /// nothing logs per frame.
    pub log: String,
    /// Seconds a stopping daemon waits for guests to take the bytes it holds for them, before it
    /// exits anyway. Default 10. 0 exits at once, and remotes of undrained flows get resets when
    /// the daemon starts again.
    pub drain_timeout_s: u64,
}

/// `[[uplink]]`: a way out of the host.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct UplinkConfig {
    /// Unique name of the port, in metrics and in the CLI.
    pub name: String,
    /// The network that the port belongs to: frames go from port to port of one network and never
    /// into another. Default: the one that has no name.
    pub network: Option<String>,
    /// `"tap"` or `"macvtap"`.
    pub kind: UplinkKind,
    /// The network interface: a tap (made if missing, see `create`) or an existing macvtap.
    pub ifname: String,
    /// Tap only. Make the interface if it does not exist, and bring it up. Default `true`. A tap
    /// made so goes away with the daemon; an existing one (`ip tuntap add`) stays, with its MTU.
    pub create: bool,
    /// Tap only. Bridge that the interface is put into. Default: none. The bridge must exist.
    pub bridge: Option<String>,
}

/// The kinds of uplinks.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum UplinkKind {
    /// `/dev/net/tun`: usually a port of a Linux bridge.
    Tap,
    /// `/dev/tapN` of a macvtap link: straight onto a network card.
    Macvtap,
}

impl UplinkKind {
    /// As the configuration has it.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Tap => "tap",
            Self::Macvtap => "macvtap",
        }
    }
}

/// `[[vm]]`: a guest's network card.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct VmConfig {
    /// Unique name of the port: in metrics, in the CLI, and the VM's identity across restarts of
    /// the daemon, so do not reuse a name for another VM.
    pub name: String,
    /// The network that the port belongs to: frames go from port to port of one network and never
    /// into another. Default: the one that has no name.
    pub network: Option<String>,
    /// vhost-user socket that the VMM connects to. Default `/run/nightporter/NAME.sock`.
    pub socket: PathBuf,
    /// Owner of its sockets. Default: as `[daemon]` has it.
    pub socket_user: Option<String>,
    /// Group of its sockets. Default: as `[daemon]` has it.
    pub socket_group: Option<String>,
    /// The only source MAC the guest may use; also told to the guest where the VMM asks for it.
    /// Default: the first one it uses is learned, and no other is accepted.
    pub mac: Option<[u8; 6]>,
    /// The only source IP addresses the guest may use (IPv4, IPv6, in any mix), besides link-local
    /// and unspecified ones, which need no list. Default: they are learned.
    pub ips: Option<Vec<IpAddr>>,
    /// The VLAN of the guest, which knows nothing of it: its frames have this tag behind its port,
    /// and no other frames reach it. Default: none; 1 to 4094. Not with `trunk`.
    pub vlan: Option<u16>,
    /// The VLANs whose tagged frames the guest sends and gets, and no others. Default: all frames
    /// pass as they are, tagged or not.
    pub trunk: Option<Vec<u16>>,
    /// The guest reaches no other VM of this daemon and none reaches it: only uplinks. Default
    /// `false`.
    pub isolated: bool,
    /// The guest may use any MAC that is no other VM's, and others may be behind it: it is a
    /// router, a bridge, or has guests of its own. Default `false`.
    pub trusted: bool,
    /// Largest IP packet, in bytes, offered to the guest as its MTU. Default 1500; 68 to 65535.
    /// Above the uplink's own MTU, packets are lost on the way out.
    pub mtu: u16,
    /// Pairs of queues offered to the guest. Default 1, at most 8. One worker serves all of them,
    /// so more than one helps only guests whose kernel needs a queue per vCPU.
    pub queue_pairs: u16,
    /// Take guest memory in files that can shrink (without F_SEAL_SHRINK). Default `false`. QEMU's
    /// `memory-backend-memfd` is sealed; `memory-backend-file` and user-mode Linux are not.
    pub allow_unsealed_memory: bool,
    /// Bytes of guest memory that the VMM may share, with each of the VM's devices. Default: no
    /// limit but that of addresses (2 TiB); 1M to 2048G. Formula: the guest's memory. Pages of it
    /// that the daemon is the first to touch are charged to the daemon, also after the VMM has
    /// shared other files instead. Too small: the VMM is refused, and the VM has no network. Too
    /// large: a VMM that means harm can have so much charged to the daemon.
    pub memory_max: Option<u64>,
    /// Acknowledge TCP for this guest. Default `true`. `false` makes the port a plain switch port;
    /// `nightporter offload on|off VM` changes it at run time for new connections.
    pub ack_offload: bool,
    /// Which connections end in the guest: `"auto"` (default), `"always"` or `"never"`. The others
    /// end behind it, as with a router, and pass without the offload. `"auto"` finds out, by TTL,
    /// source MAC and ICMP; `"never"` is for a router that hides it, `"always"` for a guest that
    /// looks like one and is none. Cost of a wrong `"always"`: connections through it are slow.
    pub local: Local,
    /// The TTL (hop limit) of the guest's own packets, if it is none of 64, 128 and 255. Without it
    /// the connections of such a guest pass.
    pub guest_ttl: Option<u8>,
    /// Send TCP for this guest: it hands over all its data, and the host sends it by a congestion
    /// control of its own. Default `false`. Only for connections with ack offload. A guest gains by
    /// it when it floods (`nightporter-guest flood on`); the host's heartbeat tells it that it may.
    /// `nightporter congestion-offload on|off VM` changes it at run time.
    pub congestion_offload: bool,
    /// How the host sends for this guest: `"cubic"` (default) or `"reno"`.
    pub congestion_control: Algorithm,
    /// The guest has a socket device beside its network card: its sockets may go by the virtual
    /// TOE. Default `false`. A second vhost-user socket is made for it, `NAME-toe.sock` beside
    /// `socket`. Needs `ips`; not with `trunk`.
    pub toe: bool,
    /// Connections of the guest to its own addresses go by the virtual TOE, too. Default `false`:
    /// its own stack is nearer.
    pub toe_to_itself: bool,
    /// CPU time for which the VM's vCPUs may be favoured while it is owed bytes, and the window:
    /// `"15ms/90ms"`. Default: none, it is never boosted. Needs the program `nightporter-boost`,
    /// and the worker on a core of its own or `daemon.rt_priority` of 2 or more. The VM pays it
    /// back; see `docs/boost.md`.
    pub boost: Option<Budget>,
    /// The cgroup that has the VM's vCPU threads, below the mount point of the `cpu` controller.
    /// Default: the threads are found by their names, as QEMU gives them with `debug-threads=on`.
    pub vcpu_cgroup: Option<String>,
    /// The most that the guest may send in a second, to the network and to other VMs, in Mbit (10^6
    /// bits) of frames. Default: no limit; 1 to 100000. `nightporter rate-limit` changes it at run
    /// time.
    pub rate_limit_from_guest_mbit_s: Option<u32>,
    /// Likewise, the most that may be sent to it.
    pub rate_limit_to_guest_mbit_s: Option<u32>,
    /// Bytes that may be held and promised for this guest together, over all its flows. Default
    /// `64M`; 1M to 64G. Cost: that much memory, allocated at start. Formula: rate x the longest
    /// wait for the CPU: 10 Gbit/s x 50 ms = 60M. Too small: flows beyond it run without the
    /// offload, or in smaller windows. Too large: only memory is lost.
    pub budget: u64,
    /// Connections tracked for this guest. Default 16384; 16 to 1048576. Cost: at most 512 bytes
    /// each, allocated at start. Connections beyond it pass through without the offload.
    pub flows_max: u32,
}

impl VmConfig {
    /// Where the VMM connects the socket device, if there is one: beside the other socket.
    #[must_use]
    pub fn toe_socket(&self) -> Option<PathBuf> {
        self.toe.then(|| self.socket.with_file_name(format!("{}-toe.sock", self.name)))
    }
}

/// Where a configuration comes from.
#[derive(Clone, Debug)]
pub struct Source {
    /// The file.
    pub path: PathBuf,
    /// Keys of `[daemon]` that win over it.
    pub overrides: BTreeMap<String, String>,
}

impl Source {
    /// Reads and checks it, now. Errors: as [`Config::load`].
    pub fn load(&self) -> Result<Config, Problems> {
        Config::load(&self.path, &self.overrides)
    }
}

impl Config {
    /// Reads and checks `path`. `overrides` are `[daemon]` keys from the command line, by name.
    ///
    /// Errors: all [`Problems`] found, or one that says why the file cannot be read.
    pub fn load(path: &Path, overrides: &BTreeMap<String, String>) -> Result<Self, Problems> {
        let file = path.display().to_string();
        match std::fs::read_to_string(path) {
            Ok(text) => Self::parse(&file, &text, overrides),
            Err(e) => Err(Problems {
                file,
                list: vec![Problem {
                    place: reader::Place::Line(1),
                    key: String::new(),
                    what: format!("cannot read the file: {e}"),
                    fix: "give the path of a readable file: nightporterd --config FILE".into(),
                }],
            }),
        }
    }

    /// Checks `text`; `file` is only its name in messages. Errors as [`Self::load`].
    pub fn parse(
        file: &str,
        text: &str,
        overrides: &BTreeMap<String, String>,
    ) -> Result<Self, Problems> {
        parse::config(file, text, overrides)
    }

    /// Every key, as `section.key`: the documentation must cover them.
    #[must_use]
    pub fn known_keys() -> Vec<String> {
        parse::known_keys()
    }

    /// One line about a good configuration.
    #[must_use]
    pub fn summary(&self) -> String {
        let count = |n: usize, what: &str| format!("{n} {what}{}", if n == 1 { "" } else { "s" });
        let (uplinks, vms) = (count(self.uplinks.len(), "uplink"), count(self.vms.len(), "VM"));
        let overlays = match self.overlays.len() {
            0 => String::new(),
            n => count(n, "overlay") + ", ",
        };
        let (store, memory) = (self.budget_sum(), self.memory_max());
        let [store, memory] = [store, memory].map(reader::human_bytes);
        let devices = self.vms.iter().map(|vm| 1 + u64::from(vm.toe)).max();
        let tables = devices.map(|devices| {
            let per_gib = reader::human_bytes(devices * (page_tables_max(1 << 30) >> 20 << 20));
            let tables = reader::human_bytes(self.page_tables_max());
            let most = match self.guest_memory_max() {
                Some(pages) => format!("{tables} and {} of its pages", reader::human_bytes(pages)),
                None => format!("{tables} and all of its pages, without vm.memory_max,"),
            };
            format!(", and {per_gib} for each GiB of guests' memory ({most} if VMMs mean harm)")
        });
        let tables = tables.unwrap_or_default();
        format!("{uplinks}, {overlays}{vms}, {store} of store, at most {memory} of memory{tables}")
    }

    /// Bytes of memory that the daemon takes at most, whatever guests and remotes do, in whole MiB:
    /// the store, all connections that may be tracked and what is known of their paths, frames that
    /// wait for full rings and for overlays that share a UDP port, payload of sockets, also that
    /// which has come by UCX, streams that are encrypted, and [`OWN_BYTES`]. Guests' memory is not
    /// among it, nor are its [page tables](page_tables_max), what UCX has for its transports, or
    /// what others write into a registry (`docs/overlay.md`).
    #[must_use]
    pub fn memory_max(&self) -> u64 {
        let flow = (FLOW_BYTES_IDLE + FLOW_RECORD_BYTES) as u64;
        let toe_guests = self.vms.iter().filter(|vm| vm.toe).count();
        let has_ucx = self.toe.as_ref().is_some_and(ToeConfig::has_ucx);
        let arrived = if has_ucx { arrived_bytes_max(toe_guests) } else { 0 };
        let store = self.budget_sum();
        let busy = store / FLOW_BUFFER_MIN * BUSY_FLOW_BYTES;
        let senders = self.vms.iter().filter(|vm| vm.congestion_offload);
        let paths = senders.map(|vm| u64::from(vm.flows_max)).sum::<u64>().min(FLOWS_MAX.into());
        let share = |overlay: &&OverlayConfig| {
            self.overlays.iter().filter(|other| other.local == overlay.local).count() > 1
        };
        let waiting = self.overlays.iter().filter(share).count() * RECEIVE_BYTES;
        let encrypts = self.toe.as_ref().is_some_and(|toe| toe.encrypt.is_some());
        let sealed = if encrypts { SEALED_BYTES_MAX } else { 0 };
        let fixed = OWN_BYTES + (BACKLOGS_BYTES_MAX + waiting + sealed) as u64;
        let sum = store
            + u64::from(self.flows_sum()) * flow
            + paths * SENDER_MEMORY_BYTES as u64
            + busy
            + toe_bytes_max(toe_guests) as u64
            + arrived
            + fixed;
        sum.next_multiple_of(1 << 20)
    }

    /// Bytes of page tables of guests' memory at most, in whole MiB: if each VMM shares as much as
    /// it may, of files that need not have any content, and has its devices touch a byte in each
    /// 2 MiB of it.
    #[must_use]
    pub fn page_tables_max(&self) -> u64 {
        let devices = self.vms.iter().map(|vm| 1 + u64::from(vm.toe)).sum::<u64>();
        let of_vm = |vm: &VmConfig| (1 + u64::from(vm.toe)) * spans::port_max(vm.memory_max);
        let spans = self.vms.iter().map(of_vm).sum::<u64>().min(spans::ALL_MAX);
        let regions = devices * REGIONS_MAX as u64;
        (page_tables_max(spans) + regions * REGION_TABLES).next_multiple_of(1 << 20)
    }

    /// Bytes of guests' memory that may be charged to the daemon: if VMMs share files without
    /// content with each of their devices, and have all of it touched. `None`: some VM has no
    /// [`VmConfig::memory_max`].
    #[must_use]
    pub fn guest_memory_max(&self) -> Option<u64> {
        self.vms.iter().map(|vm| Some((1 + u64::from(vm.toe)) * vm.memory_max?)).sum()
    }

    /// All that is charged to the daemon at most; `None`: that has no bound.
    #[must_use]
    pub fn charges_max(&self) -> Option<u64> {
        Some(self.memory_max() + self.page_tables_max() + self.guest_memory_max()?)
    }

    /// Connections that all VMs together may have tracked.
    #[must_use]
    pub fn flows_sum(&self) -> u32 {
        let sum: u64 = self.vms.iter().map(|vm| u64::from(vm.flows_max)).sum();
        u32::try_from(sum).unwrap_or(FLOWS_MAX).min(FLOWS_MAX)
    }

    /// Bytes of store that all VMs together may use.
    #[must_use]
    pub fn budget_sum(&self) -> u64 {
        self.vms.iter().map(|vm| vm.budget).sum()
    }
}

/// Bytes of page tables that a region takes besides, because it need not begin where a page of them
/// does: one for each of three levels (Linux, x86-64).
pub const REGION_TABLES: u64 = 3 * 4096;

/// Bytes of page tables with which a device of a VM maps so much memory of its guest, all of it: an
/// entry of 8 bytes for each page, and a page of tables for each gibibyte of such.
#[must_use]
pub const fn page_tables_max(guest_bytes: u64) -> u64 {
    guest_bytes / 512 + guest_bytes.div_ceil(1 << 30) * 4096
}

#[cfg(test)]
mod tests;
