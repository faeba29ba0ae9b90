//! The configuration: one TOML file, checked as a whole before anything starts.
//!
//! The structs here are the reference for every key; `docs/configuration.md` says the same for
//! operators, and a test holds the two together. Parsing lives in [`reader`] and in the private
//! `parse` module.

pub(crate) mod accept;
pub mod attach;
mod boost;
pub(crate) mod conf_dir;
pub mod keys;
pub mod overlay;
mod parse;
pub(crate) mod proof;
pub mod reader;
pub mod registry;
pub(crate) mod registry_files;
pub mod station;
mod table;
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
    FLOWS_PER_VM, SENDER_MEMORY_BYTES, VM_BUDGET, toe_bytes_max,
};
use nightporter_core::port::Local;
use nightporter_registry::Station;

pub use accept::{AcceptPorts, AcceptSources};
pub use attach::AttachConfig;
use conf_dir::Texts;
pub use overlay::OverlayConfig;
pub(crate) use parse::is_ifname;
pub use reader::{Problem, Problems};
pub use registry::RegistryConfig;
pub use toe::{FabricKind, ToeConfig};
pub use toe_rule::ToeRule;

use keys::{quoted, size};
use parse::{
    Unique, algorithm, cgroup, create, ifname, ifnames, ips, local, log, mac, metrics, name,
    network, path, paths, port_name, rate_limit, socket_path, tap_pattern, tap_patterns, trunk,
    uplink_kind, vlan,
};
use reader::{bytes, integer};
use table::table;

use crate::limits::{RECEIVE_BYTES, REGIONS_MAX, SEALED_BYTES_MAX, arrived_bytes_max};
use crate::spans;

/// The directory of the sockets and the arena unless configured otherwise.
pub const RUN_DIR: &str = "/run/nightporter";

/// The daemon's memory without VMs: itself, tables, operators' requests.
const OWN_BYTES: u64 = 64 << 20;
/// The further memory of a connection with bytes in the store, where each has [`FLOW_BUFFER_MIN`]:
/// bytes out of order, and the state for sending for its guest.
const BUSY_FLOW_BYTES: u64 = 4096;

/// The fix for a wrong path of a socket.
const SOCKET_FIX: &str = "give an absolute path of at most 107 bytes";
/// The fix for a wrong owner or group of sockets.
const USER_FIX: &str = "give the name of a user, as in \"libvirt-qemu\"";
const GROUP_FIX: &str = "give the name of a group, as in \"kvm\"";
/// The fix for a wrong rate limit.
const RATE_FIX: &str = "give Mbit/s, or leave it out for no limit";

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
    /// `[[attach]]`, in file order: bridges whose taps are VMs as they come.
    pub attach: Vec<AttachConfig>,
    /// `[[vm]]`, in file order.
    pub vms: Vec<VmConfig>,
}

table! {
    /// `[daemon]`: the process as a whole.
    DaemonConfig(s) {
        /// UNIX socket the `nightporter` tool talks to; made with mode 0600, or with 0660 and
        /// `status_group`. Default `/run/nightporter/control.sock`. At most 107 bytes (`sun_path`).
        control: PathBuf = default(
            PathBuf::from(RUN_DIR).join("control.sock"), socket_path, SOCKET_FIX);
        /// Group whose members may connect to `control` and look: they change nothing, and see no
        /// frames. Default: none.
        status_group: Option<String> = optional(name, GROUP_FIX);
        /// Allow `metrics` on an address that is not loopback. Default `false`: the endpoint has no
        /// authentication and names every VM.
        metrics_allow_remote: bool = flag(false);
        /// Address and port that serve Prometheus metrics over HTTP, or `"off"`. Default
        /// `127.0.0.1:9469`. A scrape costs the worker a look at every tracked connection; it makes
        /// a new answer at most twice a second.
        metrics: Option<SocketAddr> = default(
            Some(SocketAddr::from(([127, 0, 0, 1], 9469))),
            |v| metrics(v, metrics_allow_remote),
            "write ADDRESS:PORT as in \"127.0.0.1:9469\", or \"off\"; another address than \
             loopback needs metrics_allow_remote = true"),
            shown(|daemon| Some(daemon.metrics.map_or_else(|| quoted("off"), quoted)));
        /// The file of the store: bytes acknowledged to remotes that guests have not acknowledged
        /// yet. Default `/run/nightporter/arena`. It must be on a tmpfs; on a disk every write-back
        /// would stall the worker. Size: the sum of all `vm.budget`, plus the flow tables;
        /// allocated in full at start, so that running out of memory is a start-up error and never
        /// a crash. A restarted daemon needs the same file to know its predecessor's promises.
        arena: PathBuf = default(
            PathBuf::from(RUN_DIR).join("arena"), path,
            "give the absolute path of a file on a tmpfs");
        /// Owner of the vhost-user sockets, so that a VMM that is not root can connect. Default:
        /// the daemon's own user. With it or with `socket_group` the mode is 0660, else 0600.
        socket_user: Option<String> = optional(name, USER_FIX);
        /// Group of the vhost-user sockets. Default: the daemon's own group.
        socket_group: Option<String> = optional(name, GROUP_FIX);
        /// Directories in which VMs that come while the daemon runs may have their sockets, besides
        /// those of `control`, `arena` and the VMs of the file. Default: none.
        socket_dirs: Vec<PathBuf> = default(
            Vec::new(), paths, "write a list of absolute paths, as in [\"/srv/vms\"]");
        /// Bridges into which `nightporter uplink add` may put taps, which are new. Default: none.
        /// A change takes effect as soon as it is in the file.
        bridges: Vec<String> = default(
            Vec::new(), ifnames, "write a list of names, as in [\"br0\"]");
        /// Taps that `nightporter attach` may attach, by their names; `*` at the end is anything.
        /// Default: none. A change takes effect as soon as it is in the file.
        taps: Vec<String> = default(
            Vec::new(), tap_patterns, "write a list of names, as in [\"vnet*\"]");
        /// Microseconds the worker keeps looking for work before it sleeps. Default 0 (sleep at
        /// once). It costs that much CPU after every burst and saves the wake-up (5 to 50 us) of
        /// frames that come within that time. The worker offers its core to others at every look,
        /// and does without polling for a while when another thread takes it. 1,000,000 keeps an
        /// idle core busy.
        busy_poll_us: u64 = default(
            0, integer(0..=1_000_000), "use 0 for none, 50 for low latency");
        /// The core the worker is pinned to. Default: none, the kernel's scheduler decides. Give it
        /// a core the guests' vCPU threads do not use: the daemon acknowledges *while they wait*.
        cpu: Option<usize> = optional(
            integer(0..=1023), "give the number of one core, or leave it out");
        /// `SCHED_FIFO` priority of the worker, 1 to 99; 0 (default) is normal scheduling. Needed
        /// only where the worker must share a core with guests that run at a real-time priority;
        /// then choose one above theirs. With `busy_poll_us` too, everything below it on that core
        /// starves.
        rt_priority: u8 = default(0, integer(0..=99), "use 0 for normal scheduling, or 1 to 99");
        /// Frames of attached taps pass the worker by when one has waited for it so long, in
        /// milliseconds. Default 100. Shorter, and a worker that shares its core with whole time
        /// slices of guests is passed by often, which costs active connections the offload for a
        /// moment; longer, and a daemon that stands is felt as long.
        plain_after_ms: u64 = default(
            100, integer(10..=1000), "give milliseconds from 10 to 1000; 100 is the default");
        /// The log level, in `tracing` syntax: `error`, `warn`, `info` (default), `debug`, `trace`,
        /// or per module, as in `info,nightporterd::vhost=debug`. `debug` logs per vhost-user
        /// message, nothing logs per frame.
        log: String = default(
            "info".into(), log, "use error, warn, info, debug or trace, or MODULE=LEVEL lists");
        /// Seconds a stopping daemon waits for guests to take the bytes it holds for them, before
        /// it exits anyway. Default 10. 0 exits at once, and remotes of undrained flows get resets
        /// when the daemon starts again.
        drain_timeout_s: u64 = default(10, integer(0..=3600), "give seconds; 10 is the default");
    }
}

table! {
    /// `[[uplink]]`: a way out of the host.
    UplinkConfig(s, unique: &mut Unique) {
        /// Unique name of the port, in metrics and in the CLI.
        name: String = by(port_name(s, unique));
        /// The network that the port belongs to: frames go from port to port of one network and
        /// never into another. Default: the one that has no name.
        network: Option<String> = by(network(s));
        /// `"tap"` or `"macvtap"`.
        kind: UplinkKind = by(uplink_kind(s));
        /// The network interface: a tap (made if missing, see `create`) or an existing macvtap.
        ifname: String = required(
            ifname, "give the interface's name, at most 15 bytes, as in \"np0\"");
        /// Tap only. Make the interface if it does not exist, and bring it up. Default `true`. A
        /// tap made so goes away with the daemon; an existing one (`ip tuntap add`) stays, with its
        /// MTU.
        create: bool = by(create(s, kind)),
            shown(|it| (it.kind == UplinkKind::Tap).then(|| it.create.to_string()));
        /// Tap only. Bridge that the interface is put into. Default: none. The bridge must exist.
        bridge: Option<String> = optional(
            parse::ifname, "give the name of an existing bridge, as in \"br0\"");
    }
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
    /// All of them. Daemon and broker name one to each other by its place here.
    pub const ALL: [Self; 2] = [Self::Tap, Self::Macvtap];

    /// As the configuration has it.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Tap => "tap",
            Self::Macvtap => "macvtap",
        }
    }
}

table! {
    /// `[[vm]]`: a guest's network card.
    VmConfig(s, unique: &mut Unique) {
        /// Unique name of the port: in metrics, in the CLI, and the VM's identity across restarts
        /// of the daemon, so do not reuse a name for another VM.
        name: String = by(port_name(s, unique));
        /// The network that the port belongs to: frames go from port to port of one network and
        /// never into another. Default: the one that has no name.
        network: Option<String> = by(network(s));
        /// vhost-user socket that the VMM connects to. Default `/run/nightporter/NAME.sock`.
        socket: PathBuf = default(
            PathBuf::from(RUN_DIR).join(format!("{name}.sock")), socket_path, SOCKET_FIX);
        /// Instead of a socket: the tap of a VM that needs no other configuration. Its frames go
        /// through the daemon as through a wire; if the daemon is dead or stands, they pass it by.
        /// With `mac` it may be the beginning of the name, as in `"vnet*"`: then the tap is the one
        /// whose address is `mac` with `fe` as its first byte, as libvirt gives it. Default: none.
        /// Takes Linux 6.1. Not with keys of the switch (`network`, `ips`, `vlan`,
        /// `trunk`, `isolated`, `trusted`), nor with `congestion_offload`, `accept_offload` or
        /// `toe`.
        tap: Option<String> = optional(
            tap_pattern, "give the name of the VM's tap, as in \"vnet0\"");
        /// Owner of its sockets. Default: as `[daemon]` has it.
        socket_user: Option<String> = optional(parse::name, USER_FIX);
        /// Group of its sockets. Default: as `[daemon]` has it.
        socket_group: Option<String> = optional(parse::name, GROUP_FIX);
        /// The only source MAC the guest may use; also told to the guest where the VMM asks for it.
        /// Default: the first one it uses is learned, and no other is accepted.
        mac: Option<[u8; 6]> = optional(
            mac, "write six hex bytes of a unicast address, as in \"52:54:00:12:34:56\"");
        /// The only source IP addresses the guest may use (IPv4, IPv6, in any mix), besides
        /// link-local and unspecified ones, which need no list. Default: they are learned.
        ips: Option<Vec<IpAddr>> = optional(
            ips, "write a list, as in [\"192.0.2.7\", \"2001:db8::7\"]");
        /// The VLAN of the guest, which knows nothing of it: its frames have this tag behind its
        /// port, and no other frames reach it. Default: none; 1 to 4094. Not with `trunk`.
        vlan: Option<u16> = optional(vlan, "give the number of one VLAN, 1 to 4094");
        /// The VLANs whose tagged frames the guest sends and gets, and no others. Default: all
        /// frames pass as they are, tagged or not.
        trunk: Option<Vec<u16>> = optional(trunk, "write a list of VLANs, as in [10, 20]");
        /// The guest reaches no other VM of this daemon and none reaches it: only uplinks. Default
        /// `false`.
        isolated: bool = flag(false);
        /// The guest may use any MAC that is no other VM's, and others may be behind it: it is a
        /// router, a bridge, or has guests of its own. Default `false`.
        trusted: bool = flag(false);
        /// Largest IP packet, in bytes, offered to the guest as its MTU. Default 1500; 68 to 65535.
        /// Above the uplink's own MTU, packets are lost on the way out.
        mtu: u16 = default(1500, integer(68..=65535), "use 1500, or the uplink's own MTU");
        /// Pairs of queues offered to the guest. Default 1, at most 8. One worker serves all of
        /// them, so more than one helps only guests whose kernel needs a queue per vCPU.
        queue_pairs: u16 = default(
            1, integer(1..=8), "use 1 unless the guest needs a queue per vCPU");
        /// Take guest memory in files that can shrink (without F_SEAL_SHRINK). Default `false`.
        /// QEMU's `memory-backend-memfd` is sealed; `memory-backend-file` and user-mode Linux are
        /// not.
        allow_unsealed_memory: bool = flag(false);
        /// Bytes of guest memory that the VMM may share, with each of the VM's devices. Default: no
        /// limit but that of addresses (2 TiB); 1M to 2048G. Formula: the guest's memory. Pages of
        /// it that the daemon is the first to touch are charged to the daemon, also after the VMM
        /// has shared other files instead. Too small: the VMM is refused, and the VM has no
        /// network. Too large: a VMM that means harm can have so much charged to the daemon.
        memory_max: Option<u64> = optional(
            bytes(1 << 20..=spans::PORT_MAX), "write bytes, or a string as in \"4G\""),
            shown(|vm| vm.memory_max.and_then(size));
        /// Acknowledge TCP for this guest. Default `true`. `false` makes the port a plain switch
        /// port; `nightporter offload VM on|off` changes it at run time for new connections.
        ack_offload: bool = flag(true);
        /// Which connections end in the guest: `"auto"` (default), `"always"` or `"never"`. The
        /// others end behind it, as with a router, and pass without the offload. `"auto"` finds
        /// out, by TTL, source MAC and ICMP; `"never"` is for a router that hides it, `"always"`
        /// for a guest that looks like one and is none. Cost of a wrong `"always"`: connections
        /// through it are slow.
        local: Local = default(
            Local::default(), local, "write \"auto\", \"always\" or \"never\"");
        /// The TTL (hop limit) of the guest's own packets, if it is none of 64, 128 and 255.
        /// Without it the connections of such a guest pass.
        guest_ttl: Option<u8> = optional(
            integer(1..=255), "give the TTL of the guest's packets, 1 to 255");
        /// Send TCP for this guest: it hands over all its data, and the host sends it by a
        /// congestion control of its own. Default `false`. Only for connections with ack offload. A
        /// guest gains by it when it floods (`nightporter-guest flood on`); the host's heartbeat
        /// tells it that it may. `nightporter congestion-offload VM on|off` changes it at run time.
        congestion_offload: bool = flag(false);
        /// Answer SYNs for this guest while it is off its core: `true` at all ports, or a list of
        /// ports and ranges, as in `["443", "8000-8099"]`. Default `false`. Only for connections
        /// with ack offload. A connection that the guest then refuses was open for a moment:
        /// `docs/accept-offload.md` says what that means for clients and for load balancers.
        accept_offload: AcceptPorts = default(
            AcceptPorts::default(), accept::ports,
            "write true, false, or ports, as in [\"443\", \"8000-8099\"]");
        /// The sources that are answered: those of which the guest has accepted a connection at
        /// that port within a minute (default); with a list of networks, as in `["10.0.0.0/8"]`,
        /// also their neighbours there; with `"any"` everybody, once anybody was accepted. Cost of
        /// `"any"`: the guest's filter of sources no longer hides that the port is open.
        accept_from: AcceptSources = default(
            AcceptSources::default(), accept::sources,
            "write a list of networks, as in [\"10.0.0.0/8\"], or \"any\"");
        /// How the host sends for this guest: `"cubic"` (default) or `"reno"`.
        congestion_control: Algorithm = default(
            Algorithm::default(), algorithm, "write \"cubic\" or \"reno\"");
        /// The guest has a socket device beside its network card: its sockets may go by the virtual
        /// TOE. Default `false`. A second vhost-user socket is made for it, `NAME-toe.sock` beside
        /// `socket`. Needs `ips`; not with `trunk`.
        toe: bool = flag(false);
        /// Connections of the guest to its own addresses go by the virtual TOE, too. Default
        /// `false`: its own stack is nearer.
        toe_to_itself: bool = flag(false);
        /// CPU time for which the VM's vCPUs may be favoured while it is owed bytes, and the
        /// window: `"15ms/90ms"`. Default: none, it is never boosted. Needs the program
        /// `nightporter-boost`, and the worker on a core of its own or `daemon.rt_priority` of 2 or
        /// more. The VM pays it back; see `docs/boost.md`.
        boost: Option<Budget> = optional(
            boost::read, "write CPU time and window, as in \"15ms/90ms\"");
        /// The cgroup that has the VM's vCPU threads, below the mount point of the `cpu`
        /// controller. Default: the threads are found by their names, as QEMU gives them with
        /// `debug-threads=on`.
        vcpu_cgroup: Option<String> = optional(
            cgroup,
            "give its path below the mount point of the cpu controller, as in \
             \"machine.slice/web1.scope/vcpu0\"");
        /// The most that the guest may send in a second, to the network and to other VMs, in Mbit
        /// (10^6 bits) of frames. Default: no limit; 1 to 100000. `nightporter rate-limit` changes
        /// it at run time.
        rate_limit_from_guest_mbit_s: Option<u32> = optional(rate_limit(), RATE_FIX);
        /// Likewise, the most that may be sent to it.
        rate_limit_to_guest_mbit_s: Option<u32> = optional(rate_limit(), RATE_FIX);
        /// Bytes that may be held and promised for this guest together, over all its flows. Default
        /// `64M`; 1M to 64G. Cost: that much memory, allocated at start. Formula: rate x the
        /// longest wait for the CPU: 10 Gbit/s x 50 ms = 60M. Too small: flows beyond it run
        /// without the offload, or in smaller windows. Too large: only memory is lost.
        budget: u64 = default(
            VM_BUDGET, bytes(1 << 20..=64 << 30), "write bytes, or a string as in \"64M\""),
            shown(|vm| size(vm.budget));
        /// Connections tracked for this guest. Default 16384; 16 to 1048576. Cost: at most 512
        /// bytes each, allocated at start. Connections beyond it pass through without the offload.
        flows_max: u32 = default(
            FLOWS_PER_VM, integer(16..=1 << 20), "use 16384, or twice the connections you expect");
    }
}

impl VmConfig {
    /// Where the VMM connects the socket device, if there is one: beside the other socket.
    #[must_use]
    pub fn toe_socket(&self) -> Option<PathBuf> {
        self.toe.then(|| self.socket.with_file_name(format!("{}-toe.sock", self.name)))
    }

    /// Values that no other port may have, besides its name, by their keys.
    fn unique(&self) -> Vec<(&'static str, String)> {
        let socket = |path: PathBuf| ("socket", path.display().to_string());
        let of_port = match &self.tap {
            None => Some(socket(self.socket.clone())),
            Some(_) if self.tap_begins().is_some() => None,
            Some(tap) => Some(("tap", tap.clone())),
        };
        let mac = self.mac.map(|mac| {
            let of = self.network.as_ref().map(|network| format!(" in network {network}"));
            ("mac", mac.map(|b| format!("{b:02x}")).join(":") + &of.unwrap_or_default())
        });
        of_port.into_iter().chain(self.toe_socket().map(socket)).chain(mac).collect()
    }

    /// The beginning of the name of its tap, if there is no more in the configuration.
    pub(crate) fn tap_begins(&self) -> Option<&str> {
        self.tap.as_deref()?.strip_suffix('*')
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
    /// Reads and checks `path`, and the files in `conf.d` beside it. `overrides` are `[daemon]`
    /// keys from the command line, by name.
    ///
    /// Errors: all [`Problems`] found, or one that says why the file cannot be read.
    pub fn load(path: &Path, overrides: &BTreeMap<String, String>) -> Result<Self, Problems> {
        let texts = Texts::read(path)?;
        let config = Self::parse(&path.display().to_string(), &texts.text, overrides);
        config.map_err(|problems| texts.locate(problems))
    }

    /// Checks `text`; `file` is only its name in messages. Errors as [`Self::load`].
    pub fn parse(
        file: &str,
        text: &str,
        overrides: &BTreeMap<String, String>,
    ) -> Result<Self, Problems> {
        parse::config(file, text, overrides, &[])
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
                Some(pages) => format!("{} of guests' memory", reader::human_bytes(pages)),
                None => "all of guests' memory, because vm.memory_max is not set".into(),
            };
            format!(
                ", and {per_gib} for each GiB of guests' memory (worst case with hostile VMMs: \
                 {tables}, and {most})"
            )
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
mod mistakes;
#[cfg(test)]
mod tests;
