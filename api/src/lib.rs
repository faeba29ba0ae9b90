//! Messages between the `nightporter` tool and the daemon.
//!
//! One JSON object per line each way, over the UNIX socket `daemon.control`. A client may send its
//! next request when it has the reply to the last. After the reply [`Reply::Stream`] the rest of
//! the connection is a byte stream: pcap or text, until either side closes.
#![forbid(unsafe_code)]

mod attached;
mod flows;
mod histogram;
mod macs;

use std::collections::BTreeMap;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

pub use attached::{AttachedStatus, BridgeStatus, SkippedTap};
pub use flows::{FlowInfo, FlowPage, SendInfo, StandingFlow};
pub use histogram::Histogram;
pub use macs::{MacCursor, MacInfo, MacPage};

/// Longest request, in bytes, with its newline.
pub const REQUEST_BYTES_MAX: usize = 4096;

/// Highest rate limit of a VM, in Mbit/s; the lowest is 1.
pub const RATE_LIMIT_MBIT_S_MAX: u32 = 100_000;

/// Which of a VM's two directions.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Direction {
    /// Its frames, to the network and to other VMs.
    FromGuest,
    /// Frames for it.
    ToGuest,
}

/// Other ports for a running daemon, or other keys of them: all of it or nothing, but for the
/// changes of a reload that need a restart.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(tag = "what", rename_all = "snake_case", deny_unknown_fields)]
pub enum Change {
    /// The present content of the configuration file. Ports that a command added stay.
    Reload {},
    /// A VM comes.
    AddVm {
        /// Its name.
        name: String,
        /// Keys as in `[[vm]]`, with values as in TOML; strings need no quotes.
        keys: BTreeMap<String, String>,
    },
    /// Other keys for a VM; its connections stay.
    SetVm {
        /// Its name.
        name: String,
        /// Likewise; an empty value is the default.
        keys: BTreeMap<String, String>,
    },
    /// A VM goes, with its connections.
    RemoveVm {
        /// Its name.
        name: String,
        /// Milliseconds that a VM with a tap waits for connections that owe; `None`: ten seconds.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        drain_ms: Option<u64>,
    },
    /// The taps of a bridge are attached, those that come later too.
    AddBridge {
        /// Its name.
        bridge: String,
        /// Keys as in `[[attach]]`.
        keys: BTreeMap<String, String>,
    },
    /// They are plain again, and those that come later stay plain.
    RemoveBridge {
        /// Its name.
        bridge: String,
    },
    /// An uplink comes.
    AddUplink {
        /// Its name.
        name: String,
        /// Keys as in `[[uplink]]`.
        keys: BTreeMap<String, String>,
    },
    /// An uplink goes.
    RemoveUplink {
        /// Its name.
        name: String,
    },
}

/// The effects of a change.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct Plan {
    /// A line for each step; none if everything is as it should be.
    pub steps: Vec<String>,
    /// Changes that only a restart can make: a command with one is refused, and a reload leaves
    /// them for the restart.
    pub needs_restart: Vec<String>,
    /// The section of a configuration file for the VM or bridge that is added; none if a file has
    /// it.
    #[serde(default)]
    pub section: Option<String>,
    /// It has been done.
    pub done: bool,
}

/// A client's requests.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(tag = "cmd", rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// The daemon and its ports: [`Reply::Status`].
    Status {},
    /// Tracked TCP connections: [`Reply::Flows`].
    Flows {
        /// Only those of this VM.
        #[serde(default)]
        vm: Option<String>,
        /// Only those with this number or a higher one: [`FlowPage::next`] of the page before.
        #[serde(default)]
        from: u64,
    },
    /// Stations of overlays, and where they are: [`Reply::Stations`].
    Stations {
        /// Only those behind this one: [`StationPage::next`] of the page before.
        #[serde(default)]
        after: Option<StationKey>,
    },
    /// The MACs that the switch knows, and their ports: [`Reply::Macs`].
    Macs {
        /// Only those behind this port.
        #[serde(default)]
        port: Option<String>,
        /// From here on: [`MacPage::next`] of the page before.
        #[serde(default)]
        from: MacCursor,
    },
    /// One connection: [`Reply::Flow`].
    Flow {
        /// Its number.
        id: u64,
    },
    /// The segments of one connection from now on, as text: [`Reply::Stream`].
    Trace {
        /// Its number.
        id: u64,
    },
    /// The frames of one port from now on, as a pcap stream: [`Reply::Stream`].
    Capture {
        /// Name of a VM or an uplink.
        port: String,
        /// At most so many bytes of each frame; `None`: all.
        #[serde(default)]
        snap_bytes: Option<u32>,
        /// Only frames of these.
        #[serde(default)]
        only: Only,
    },
    /// The headers of a VM's frames from now on, as a pcapng stream: [`Reply::Stream`].
    Monitor {
        /// Name of the VM.
        vm: String,
    },
    /// Ack offload of one VM on, for new connections, or off: [`Reply::Done`].
    Offload {
        /// Name of the VM.
        vm: String,
        /// On or off.
        on: bool,
    },
    /// Congestion offload of one VM on, if a connection has ack offload, or off: [`Reply::Done`].
    CongestionOffload {
        /// Name of the VM.
        vm: String,
        /// On or off.
        on: bool,
    },
    /// Another rate limit for one VM: [`Reply::Done`].
    RateLimit {
        /// Name of the VM.
        vm: String,
        /// Which of its two.
        direction: Direction,
        /// In Mbit/s, 1 to [`RATE_LIMIT_MBIT_S_MAX`]; `None` is no limit.
        mbit_s: Option<u32>,
    },
    /// Ports come, go and change: [`Reply::Plan`], when it is done.
    Change {
        /// How.
        change: Change,
        /// Only show the plan.
        #[serde(default)]
        dry_run: bool,
    },
    /// No new promises for this VM: [`Reply::Done`]. All are kept when [`VmStatus::owed_flows`] is
    /// 0. `Offload` with `on` ends it.
    Drain {
        /// Name of the VM.
        vm: String,
    },
}

impl Request {
    /// Whether it changes nothing, and shows no frame.
    #[must_use]
    pub const fn only_looks(&self) -> bool {
        match self {
            Self::Status {}
            | Self::Flows { .. }
            | Self::Stations { .. }
            | Self::Macs { .. }
            | Self::Flow { .. } => true,
            Self::Trace { .. }
            | Self::Capture { .. }
            | Self::Monitor { .. }
            | Self::Offload { .. }
            | Self::CongestionOffload { .. }
            | Self::RateLimit { .. }
            | Self::Change { .. }
            | Self::Drain { .. } => false,
        }
    }
}

/// Which frames are captured: those that fit all that is given.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Only {
    /// From or to this address: IP, and ARP.
    #[serde(default)]
    pub host: Option<IpAddr>,
    /// From or to this port of TCP or UDP.
    #[serde(default)]
    pub port: Option<u16>,
}

/// The daemon's answers.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply {
    /// To [`Request::Status`].
    Status(Box<Status>),
    /// To [`Request::Flows`].
    Flows(FlowPage),
    /// To [`Request::Stations`].
    Stations(StationPage),
    /// To [`Request::Macs`].
    Macs(MacPage),
    /// To [`Request::Flow`].
    Flow(Box<FlowInfo>),
    /// To [`Request::Change`].
    Plan(Plan),
    /// A byte stream follows this line.
    Stream {},
    /// It is done, or under way.
    Done {},
    /// It is not.
    Error {
        /// The error.
        what: String,
        /// Its fix.
        fix: String,
    },
}

/// The daemon as a whole.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct Status {
    /// Of the daemon.
    pub version: String,
    /// Its process.
    pub pid: u32,
    /// Whole seconds since it started.
    pub uptime_s: u64,
    /// It was told to stop, and waits for its guests.
    pub stopping: bool,
    /// Log lines that were not written: standard error did not take them, or one port had too many.
    pub log_lines_lost: u64,
    /// Turns of the frames' worker that took longer than a second.
    pub stalls: u64,
    /// CPU time of the frames' worker, in microseconds.
    #[serde(default)]
    pub worker_cpu_us: u64,
    /// The sockets' worker.
    #[serde(default)]
    pub sockets: Box<SocketsStatus>,
    /// System calls that were refused: the daemon makes none of them.
    pub refused_calls: u64,
    /// The process that opens uplinks has ended: no uplink can be opened any more, or come back.
    #[serde(default)]
    pub broker_ended: bool,
    /// The way to guests' sockets on other hosts, if there is one.
    #[serde(default)]
    pub fabric: Option<Box<FabricStatus>>,
    /// The state of the registry.
    #[serde(default)]
    pub registry: Box<RegistryStatus>,
    /// Bridges whose taps are attached.
    #[serde(default)]
    pub bridges: Vec<BridgeStatus>,
    /// Uplinks, overlays, then VMs, in the order of the configuration.
    pub ports: Vec<PortStatus>,
}

/// The worker with the devices of the virtual TOE.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct SocketsStatus {
    /// As [`Status::stalls`].
    pub stalls: u64,
    /// As [`Status::worker_cpu_us`].
    pub cpu_us: u64,
    /// It did not answer within a second: [`VmStatus::toe`] is missing of all VMs, and
    /// [`Status::fabric`] is what it said last.
    pub late: bool,
}

/// The registry in which hosts publish their VMs.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct RegistryStatus {
    /// `list` or `etcd`.
    pub kind: String,
    /// Why it does not answer; known stations stay in force.
    pub trouble: Option<String>,
    /// How often it did not answer any more.
    pub lost: u64,
    /// Other hosts that it knows.
    pub hosts: u64,
    /// Stations that it knows on other hosts.
    pub stations: u64,
    /// Stations for which there was no place: they are found by their frames alone.
    pub left_out: u64,
    /// VMs of this host by the state of their claims: `held`, `unlisted`, `waiting`, `refused`,
    /// `contested`.
    pub claims: BTreeMap<String, u64>,
    /// How often guests of this host began or ceased to listen by the virtual TOE, or came or went.
    #[serde(default)]
    pub listener_changes: u64,
    /// How often a VM's entry was written again because of that: a guest whose listeners change
    /// all the time does not have each change written.
    #[serde(default)]
    pub listener_writes: u64,
}

/// Some stations, in order of their overlays and MACs.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct StationPage {
    /// At most 500.
    pub stations: Vec<StationInfo>,
    /// The last of these, if there are more.
    pub next: Option<StationKey>,
}

/// The number of an overlay, and a MAC there.
pub type StationKey = (u32, [u8; 6]);

/// A VM on an overlay, as the registry knows it.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct StationInfo {
    /// Number of the overlay.
    pub vni: u32,
    /// Its MAC.
    pub mac: String,
    /// Its name, if it is known.
    pub vm: String,
    /// Its addresses, as far as they are known.
    pub ips: Vec<IpAddr>,
    /// The overlay address of its host.
    pub host: IpAddr,
    /// Of a VM of this host: `held`, `waiting`, `refused`, `contested`.
    pub claim: Option<String>,
    /// The host that has it if it was refused, or wants it too if it is contested.
    pub other: Option<IpAddr>,
    /// Ports at which it listens by the virtual TOE, as its host said last: the lowest 64 of them.
    /// `None`: its host has published nothing about them, or the VM has no socket device with a
    /// driver.
    #[serde(default)]
    pub listens: Option<Vec<u16>>,
    /// The number of its ports that are not in `listens`.
    #[serde(default)]
    pub listens_more: u64,
}

/// One port.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct PortStatus {
    /// Its name in the configuration.
    pub name: String,
    /// `vm`, `tap`, `macvtap` or `overlay`.
    pub kind: String,
    /// Whether frames can pass: the interface is there and has no `trouble`, the guest's driver is
    /// running.
    pub link: bool,
    /// Why the frames of an uplink get nowhere, or too far: it is down, or not in its bridge. Why
    /// the link of a VM is down.
    #[serde(default)]
    pub trouble: Option<String>,
    /// Its keys of the configuration as they are in force, with values as in TOML; those without a
    /// value are left out.
    #[serde(default)]
    pub keys: BTreeMap<String, String>,
    /// Frames that entered the switch here. A super-segment is one frame.
    pub frames_from_port: u64,
    /// Their bytes.
    pub bytes_from_port: u64,
    /// Frames that left the switch here.
    pub frames_to_port: u64,
    /// Their bytes.
    pub bytes_to_port: u64,
    /// Bytes that wait for the guest to post receive buffers.
    pub backlog_bytes: u64,
    /// Dropped frames by reason (docs/drop-reasons.md); reasons that never occurred are left out.
    pub drops: BTreeMap<String, u64>,
    /// The MAC that the last frame claimed which was dropped for `spoofed_mac`.
    #[serde(default)]
    pub spoofed_mac: Option<String>,
    /// Captures running.
    pub captures: u32,
    /// Frames that running captures missed because their reader was slow.
    pub captures_missed: u64,
    /// The state of a VM; `None` for an uplink.
    pub vm: Option<VmStatus>,
}

/// One VM's ack offload.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct VmStatus {
    /// On for new connections.
    pub offload: bool,
    /// Which of its connections end in the guest: `auto`, `always` or `never`.
    pub local: String,
    /// Congestion offload is wanted.
    pub congestion_offload: bool,
    /// The host controls congestion for the guest, and says so in its heartbeats: both offloads are
    /// on, the VM is not draining, there is a place for its next connections, and it has lately
    /// sent nothing that the host cannot control.
    pub controls_congestion: bool,
    /// Seconds until the host answers SYNs for it, 0 if it does; `None`: accept offload is off.
    pub accepts_in_s: Option<u64>,
    /// Connections that it has accepted so, and translates for their lives: a stop resets them.
    #[serde(default)]
    pub translated_flows: u64,
    /// No new promises are made, until the offload is turned on again.
    pub draining: bool,
    /// Its VMM logs written pages, as when the VM begins to migrate: bytes are acknowledged late.
    #[serde(default)]
    pub migrating: bool,
    /// The rate that it may send, in Mbit/s; `None` is no limit.
    pub rate_limit_from_guest_mbit_s: Option<u32>,
    /// The rate that it may be sent, in Mbit/s; `None` is no limit.
    pub rate_limit_to_guest_mbit_s: Option<u32>,
    /// Connections with a byte, FIN or RST that is still owed; 0 is drained.
    pub owed_flows: u64,
    /// Of the connections whose guest has yet to acknowledge bytes that were acknowledged for it,
    /// the one that has stood for the longest; `None`: none has stood for ten seconds, or, while
    /// the VM is draining, there is none.
    pub stands: Option<StandingFlow>,
    /// Tracked connections by state ([`FlowInfo::state`]); all states are named.
    pub flows: BTreeMap<String, u64>,
    /// VMMs find its socket; if not, something else has its path.
    pub listens: bool,
    /// The process of the VMM that is connected, as the daemon sees it.
    pub vmm_pid: Option<i32>,
    /// Places of its first receive and transmit ring, while they run.
    pub rings: Option<[u16; 2]>,
    /// Its driver runs, and the daemon has seen no receive buffer of it for seconds: the guest's
    /// interface is down, or its memory is not shared with the daemon.
    #[serde(default)]
    pub has_no_buffers: bool,
    /// Queues put out of use because the guest broke the rules, which took down the link.
    #[serde(default)]
    pub ring_faults: u64,
    /// Times that memory which its VMM shares was not there, which took down the port.
    pub memory_faults: u64,
    /// Times that a descriptor of its VMM kept the daemon waiting, which took down the port.
    pub blocked: u64,
    /// The state of its tap; `None`: it has none, or the tap is not there.
    pub attached: Option<AttachedStatus>,
    /// Bytes of store that the VM may use.
    pub budget_bytes: u64,
    /// Bytes of it that are reserved for promises, held or not.
    pub promised_bytes: u64,
    /// Bytes acknowledged to remotes that the guest has not acknowledged.
    pub held_bytes: u64,
    /// Its socket device; `None`: it has none.
    pub toe: Option<ToeStatus>,
    /// Its account at the booster; `None`: it has no boost.
    pub boost: Option<BoostAccount>,
    /// By how much ACKs of the host were ahead of the guest's own.
    #[serde(default)]
    pub ack_saved: Histogram,
    /// By how much the host has sent for the guest before the guest could.
    #[serde(default)]
    pub send_saved: Histogram,
    /// Counters since the daemon started, by name: `core/src/counters.rs` lists them all.
    #[serde(flatten)]
    pub counters: BTreeMap<String, u64>,
}

/// A VM's account at the booster (docs/boost.md), as `nightporter-boost` tells it. Counters are
/// since the booster knows the VM.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct BoostAccount {
    /// How it is boosted and pays back: `nice` or `weight`; empty: not known yet.
    pub means: String,
    /// Why it is not boosted; empty: it is.
    pub refused: String,
    /// Boosts that began.
    pub boosts: u64,
    /// CPU time for which it was favoured, in microseconds.
    pub favoured_us: u64,
    /// Of this, not paid back yet.
    pub unpaid_us: u64,
    /// Boosts that ended because the guest had not acknowledged within 50 ms.
    pub ended_by_time: u64,
    /// Boosts that ended with an empty budget.
    pub ended_by_budget: u64,
    /// Boosts that ended because the vCPUs slept.
    pub ended_by_sleep: u64,
    /// Boosts that did not begin, or ended, because the core's neighbours had to have a turn.
    pub waits: u64,
    /// Boosts that did not begin, because the budget was empty.
    pub empty: u64,
    /// VMs that want a core on which it may run, itself included, in hundredths.
    pub competitors_percent: u64,
    /// Times that boosts were learned to be waste, and none began for 10 s.
    pub rests: u64,
}

/// A VM's socket device, for the virtual TOE. Counters are since the device was made.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct ToeStatus {
    /// VMMs find its socket; if not, something else has its path.
    pub listens: bool,
    /// The guest's driver runs.
    pub running: bool,
    /// Sockets, also those that the guest has closed and that are not over.
    pub sockets: u64,
    /// Bytes that it has sent and that are kept for guests without receive buffers.
    pub kept_bytes: u64,
    /// Packets that it has sent.
    pub packets_from_guest: u64,
    /// Packets that it was given.
    pub packets_to_guest: u64,
    /// Payload in these, of other guests' streams.
    pub bytes_to_guest: u64,
    /// Queues put out of use because their guest broke the rules.
    pub ring_faults: u64,
    /// Times that memory which its VMM shares was not there, which took down the device.
    pub memory_faults: u64,
    /// Times that a descriptor of its VMM kept the daemon waiting, which took down the device.
    pub blocked: u64,
}

/// Streams of TCP to other hosts, for the virtual TOE. Counters are since the daemon started.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct FabricStatus {
    /// That there are.
    pub streams: u64,
    /// Of these, to be used again.
    pub idle: u64,
    /// Of these, those with encrypted bytes (`encrypt` of `[toe]`): all that have begun, or none.
    #[serde(default)]
    pub encrypted: u64,
    /// That this host has begun.
    pub dialed: u64,
    /// Connections for which an idle one was there.
    pub reused: u64,
    /// That other hosts have begun.
    pub accepted: u64,
    /// Hung up on: no guest is registered there, or there are too many.
    pub refused: u64,
    /// That ended with a connection of guests in them, which was reset or went by guest TCP.
    pub lost: u64,
    /// Of these, those with a message that no honest host sends.
    pub nonsense: u64,
    /// With `encrypt` of `[toe]`: hosts that did not prove who they are, and streams in the clear.
    #[serde(default)]
    pub unproven: u64,
    /// Endpoints of UCX to other hosts, if payload goes by that (`fabric` of `[toe]`).
    #[serde(default)]
    pub ucx_endpoints: u64,
    /// Messages with payload that were sent by UCX.
    #[serde(default)]
    pub ucx_sent: u64,
    /// Messages with payload that have come by UCX, for an existing connection.
    #[serde(default)]
    pub ucx_received: u64,
    /// And those that were dropped, because there was no connection, or they did not show its key.
    #[serde(default)]
    pub ucx_strays: u64,
    /// Bytes that have come by UCX and are not with their guests.
    #[serde(default)]
    pub ucx_waiting_bytes: u64,
}
