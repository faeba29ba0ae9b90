//! One run as data: everything that a seed decides, before anything happens.
//!
//! A plan is printed on failure, written as JSON, and made smaller by `shrink`. Everything follows
//! from a plan and the streams of [`crate::random`] named after its parts.

mod cores;
mod defaults;
mod faults;
mod forward;

use nightporter_core::time::{Duration, Instant};
use nightporter_core::wire::virtio_net::VirtioNetHdr;
use serde::{Deserialize, Serialize};

pub use self::cores::{CorePlan, Policy};
pub(crate) use self::defaults::{backlog_frames, flows_per_step};
pub use self::forward::ForwardPlan;
use nightporter_check::wire::{GSO_ECN, GSO_NONE, GSO_TCPV4, GSO_TCPV6};

/// A machine: a VM on the host under test, or a remote on the network.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
pub enum Machine {
    /// Index into [`Plan::guests`].
    Guest(u16),
    /// Index into [`Plan::remotes`].
    Remote(u16),
}

/// Everything about one run.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Plan {
    /// Names the streams of chance.
    pub seed: u64,
    /// The host under test; a migration goes to a second one that is made alike.
    pub host: HostPlan,
    /// Physical cores of the host that VMs share.
    pub cores: Vec<CorePlan>,
    /// VMs.
    pub guests: Vec<GuestPlan>,
    /// Machines on the network.
    pub remotes: Vec<RemotePlan>,
    /// The VLAN that all of them are in, tagged (IEEE 802.1Q).
    #[serde(default)]
    pub vlan: Option<u16>,
    /// Connections.
    pub conns: Vec<ConnPlan>,
    /// The faults, with their times; all that begin before `heal_at` are over then.
    pub faults: Vec<Fault>,
    /// From here on nothing is lost, every guest runs, and all must make progress.
    #[serde(with = "nanos")]
    pub heal_at: Instant,
    /// If not everything has ended by then, that is a violation of INV-18.
    #[serde(with = "nanos")]
    pub give_up_at: Instant,
}

/// The daemon and its machine.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct HostPlan {
    /// Store pages of the arena.
    pub arena_pages: usize,
    /// Flow records of the arena.
    pub arena_records: usize,
    /// Flow entries of all VMs together.
    pub flows_max: u32,
    /// Frames read from one port in one turn of the worker.
    pub turn_frames: usize,
    /// Processor time of a turn, and of each frame in it, in nanoseconds.
    pub turn_ns: u64,
    /// See `turn_ns`.
    pub frame_ns: u64,
    /// The worker shares this core with guests, as a driver domain does; `None`: one of its own.
    pub core: Option<u16>,
    /// Frames the uplink's queue holds while the worker is busy or dead (a tap's `txqueuelen`).
    pub uplink_queue_frames: usize,
    /// The uplink's card collects frames for so long before the worker hears of them, in
    /// microseconds (interrupt moderation).
    #[serde(default)]
    pub uplink_wait_us: u32,
    /// Segments that follow each other there become one (GRO); a tap delivers them so.
    #[serde(default)]
    pub merges: bool,
    /// Frames that wait in the worker for room in a guest's ring; the next is dropped.
    #[serde(default = "backlog_frames")]
    pub backlog_frames: usize,
    /// Actions on all flows of a guest are done to so many at once.
    #[serde(default = "flows_per_step")]
    pub flows_per_step: u32,
    /// Uplink and guest are the ends of a wire: the guest's tap is attached.
    #[serde(default)]
    pub wire: bool,
}

/// Unfinished work that a driver takes, and that its stack makes if it can.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct Offloads {
    /// Checksums that are not finished.
    pub csum: bool,
    /// Super-segments over IPv4.
    pub tso4: bool,
    /// Super-segments over IPv6.
    pub tso6: bool,
    /// Super-segments with CWR.
    pub ecn: bool,
}

impl Offloads {
    /// All there is.
    pub const ALL: Self = Self { csum: true, tso4: true, tso6: true, ecn: true };
    /// Plain frames only.
    pub const NONE: Self = Self { csum: false, tso4: false, tso6: false, ecn: false };

    /// A frame with this header is taken as it is.
    #[must_use]
    pub fn takes(self, hdr: &VirtioNetHdr) -> bool {
        let family = match hdr.gso_type & !GSO_ECN {
            GSO_NONE => true,
            GSO_TCPV4 => self.tso4,
            GSO_TCPV6 => self.tso6,
            _ => false,
        };
        let ecn = self.ecn || hdr.gso_type & GSO_ECN == 0;
        family && ecn && (self.csum || !hdr.needs_csum())
    }
}

/// A VM.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct GuestPlan {
    /// Index into [`Plan::cores`].
    pub core: u16,
    /// Its share relative to others; 256 is normal.
    pub weight: u32,
    /// Percent of a core its other work wants. It is never shed: stolen time is caught up on.
    pub load_percent: u32,
    /// Posted receive buffers when all are free.
    pub ring_slots: usize,
    /// The offloads of its driver.
    pub offloads: Offloads,
    /// Largest IP packet in bytes.
    pub mtu: u16,
    /// Most bytes its flows hold and promise (INV-06).
    pub budget_bytes: u64,
    /// Most flow entries.
    pub flows_max: u32,
    /// Ack offload is on.
    pub ack_offload: bool,
    /// The host sends for it (congestion offload).
    #[serde(default)]
    pub congestion_offload: bool,
    /// The host answers SYNs for it (accept offload).
    #[serde(default)]
    pub accepts: Accepts,
    /// By NewReno instead of CUBIC.
    #[serde(default)]
    pub new_reno: bool,
    /// Processor time per received frame, in nanoseconds.
    pub frame_ns: u64,
    /// It is a router, and `stack` is of a machine behind it.
    #[serde(default)]
    pub forwards: Option<ForwardPlan>,
    /// Its TCP.
    pub stack: StackPlan,
}

/// Accept offload of a VM.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub enum Accepts {
    /// It has none.
    #[default]
    No,
    /// A source's own connections speak for it.
    BySource,
    /// All of them do.
    ForAny,
}

/// A machine on the network, and the path to it.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct RemotePlan {
    /// From the remote to the host.
    pub to_host: LinkPlan,
    /// From the host to the remote.
    pub from_host: LinkPlan,
    /// Its TCP.
    pub stack: StackPlan,
    /// The unfinished frames that its path takes: all, if it is on the host's own bridge.
    #[serde(default)]
    pub offloads: Offloads,
    /// It shares a core with others itself, by this policy, at this load in percent, with so many
    /// others of the same load. `None`: its own machine.
    pub shares: Option<(Policy, u32, u16)>,
}

/// One direction of a path while nothing is wrong with it.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct LinkPlan {
    /// Bits per second.
    pub rate_bps: u64,
    /// Propagation delay in microseconds.
    pub delay_us: u32,
    /// Frames that wait for the wire; the next is dropped.
    pub queue_frames: usize,
    /// Frames longer than this IP length are dropped, silently; 1500 unless a fault says otherwise.
    pub mtu: u16,
}

/// A TCP implementation and its habits.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct StackPlan {
    /// Which one.
    pub kind: StackKind,
    /// Receive buffer in bytes.
    pub receive_bytes: usize,
    /// Send buffer in bytes.
    pub send_bytes: usize,
    /// Window shift offered, or none.
    pub window_scale: Option<u8>,
    /// Timestamps offered.
    pub timestamps: bool,
    /// SACK-Permitted offered.
    pub sack: bool,
    /// Classic ECN offered and accepted.
    pub ecn: bool,
    /// The MSS option, or the link's.
    pub mss: Option<u16>,
    /// All initial sequence numbers, or by chance.
    pub isn: Option<u32>,
    /// Raw bytes of further SYN options.
    pub syn_options: Vec<u8>,
    /// Segments sent before the first ACK, and in the first window shown; strict stacks only.
    /// `None`: ten and 64 KB, as Linux since 2.6.39.
    #[serde(default)]
    pub first_segments: Option<u16>,
    /// Rare behaviour of strict stacks.
    #[serde(default)]
    pub quirks: Quirks,
}

/// Lawful, and rare.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(default)]
pub struct Quirks {
    /// The timestamp clock at a connection's beginning; `None`: drawn at random.
    pub clock_first: Option<u32>,
    /// That clock counts microseconds (`tcp_usec_ts` of Linux 6.7), or else milliseconds.
    pub clock_us: bool,
    /// A remote leaves the timestamp out of some segments though it was agreed on, as middleboxes
    /// do. All machines of its world bear that.
    pub omits_clock: bool,
    /// It answers every SYN with another SYN cookie, and takes the ACK of any of them.
    pub syn_cookies: bool,
    /// Its IPv6 packets have a destination options header.
    pub extension_header: bool,
    /// Its IPv4 packets have options.
    pub ip_options: bool,
    /// Some of what it writes is urgent, in line.
    pub urgent: bool,
    /// The timestamp of its SYN or SYN-ACK is 0, wherever its clock stands.
    pub no_clock_in_syn: bool,
    /// A SYN that it repeats offers nothing but its MSS.
    pub plain_second_syn: bool,
    /// Lost bytes leave again in super-segments if its driver cuts them (`tcp_retransmit_skb`).
    pub resends_whole: bool,
    /// In a sleep of days it asks every half hour whether the other end is still there.
    pub asks_in_sleep: bool,
    /// Its congestion window does not bound it.
    pub floods: Floods,
    /// It acknowledges in a hundred pieces what came at once (RFC 3465 section 2.3's ACK division).
    pub splits_acks: bool,
    /// Now and then it acknowledges what cannot have been sent yet.
    pub acks_ahead: bool,
    /// Now and then it throws away what it has SACKed (RFC 2018 section 8).
    pub reneges: bool,
    /// No rarity: its congestion window grows by CUBIC with HyStart, and its receive buffer, which
    /// `receive_bytes` bounds then, is tuned, as in Linux by default. It needs timestamps.
    pub as_linux: bool,
}

/// How a guest floods (`guest/flood`).
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub enum Floods {
    /// It does not.
    #[default]
    No,
    /// A route says that the first window has 1,000 segments, and after a pause again; losses
    /// reduce it.
    Route,
    /// Nothing reduces it (`np_flood`).
    Always,
}

/// An independent stack, our own with more features, or a hostile one.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub enum StackKind {
    /// smoltcp; it has window scaling, timestamps and SACK blocks for received bytes, no ECN.
    Smoltcp,
    /// Our scripted endpoint: SACK, ECN, options, Linux's acceptance rules (K-01 to K-06).
    Strict,
    /// Arbitrary frames with the addresses of its connections; no stream is expected of it.
    Hostile,
}

/// One connection.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct ConnPlan {
    /// The end that sends the SYN.
    pub client: Machine,
    /// The end that listens.
    pub server: Machine,
    /// IPv6 instead of IPv4.
    pub v6: bool,
    /// When the SYN is sent.
    #[serde(with = "nanos")]
    pub opens_at: Instant,
    /// The applications' behaviour.
    pub workload: Workload,
    /// The difference from others with the same ports; none: its ports are its own.
    #[serde(default)]
    pub reuse: Option<Reuse>,
}

/// A connection of two machines whose ports others have, too. They follow each other in the plan's
/// order: the next opens as soon as the one before is over for its client (S-40, RFC 6191).
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Reuse {
    /// The client's TCP port.
    pub port: u16,
    /// The client's initial sequence number, which no other connection of these ports has: it tells
    /// which one a SYN opens. Strict stacks only; without, the next.
    pub isn: Option<u32>,
}

/// The behaviour of the two applications of a connection. Sizes are in bytes.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub enum Workload {
    /// The client writes `up`, the server `down`, at once; each closes when it has written.
    Bulk {
        /// Client to server.
        up: u64,
        /// Server to client.
        down: u64,
    },
    /// `count` times: the client writes `request`, waits for `response`; then it closes.
    RequestResponse {
        /// Bytes of one request.
        request: u64,
        /// Bytes of one response.
        response: u64,
        /// Rounds.
        count: u32,
    },
    /// The client writes `up` and closes its half; only then the server writes `down`.
    HalfClose {
        /// Client to server.
        up: u64,
        /// Server to client.
        down: u64,
    },
    /// The client writes `up` and resets the connection as soon as that is acknowledged, as health
    /// checks do.
    Reset {
        /// Client to server.
        up: u64,
    },
    /// A little each way, then nothing for `idle_s` seconds but keepalives, then a little again;
    /// more of it after a sleep of days.
    Idle {
        /// Seconds of silence; with more than a day of them there are no keepalives.
        idle_s: u32,
    },
}

/// Something that goes wrong for a while.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Fault {
    /// When it starts.
    #[serde(with = "nanos")]
    pub at: Instant,
    /// How long it lasts; events that have no length ignore it.
    #[serde(with = "nanos_span")]
    pub lasts: Duration,
    /// Its kind.
    pub kind: FaultKind,
}

/// The kinds of faults. `ppm` is chances in a million per frame.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[allow(missing_docs, reason = "the fields mean what they are called; units are in their names")]
pub enum FaultKind {
    /// Independent loss.
    Loss { remote: u16, to_host: bool, ppm: u32 },
    /// A two-state loss process (Gilbert and Elliott): mean run of lost frames `burst_frames`.
    BurstLoss { remote: u16, to_host: bool, ppm: u32, burst_frames: u32 },
    /// A frame is held back by up to `delay_us`.
    Reorder { remote: u16, to_host: bool, ppm: u32, delay_us: u32 },
    /// A frame arrives twice, the second time by up to `delay_us` later.
    Duplicate {
        remote: u16,
        to_host: bool,
        ppm: u32,
        #[serde(default)]
        delay_us: u32,
    },
    /// A bit is flipped. Checksums then fail, but for chance 2^-16 with several bits: one bit only.
    Corrupt { remote: u16, to_host: bool, ppm: u32 },
    /// ECN-capable packets are marked CE.
    Mark { remote: u16, to_host: bool, ppm: u32 },
    /// The path takes smaller packets, and does not say so (RFC 4821 section 1's black hole).
    Mtu { remote: u16, to_host: bool, mtu: u16 },
    /// The path becomes slow.
    Rate { remote: u16, to_host: bool, rate_bps: u64 },
    /// Nothing passes.
    Cut { remote: u16, to_host: bool },
    /// The VM does not run at all.
    Pause { guest: u16 },
    /// The VM starts again: its connections are forgotten, its ring is empty.
    Reboot { guest: u16 },
    /// The VM is destroyed for good (LIFE-05).
    Destroy { guest: u16 },
    /// The operator drains the VM, then it runs on at the other host (LIFE-06).
    Migrate { guest: u16 },
    /// The driver resets the device and sets it up again (LIFE-04).
    DriverReset { guest: u16 },
    /// Applications of the machine stop reading.
    StopReading { machine: Machine },
    /// The guest drops delivered frames before TCP sees them.
    DropDelivered { guest: u16, ppm: u32 },
    /// The machine takes window back (Linux `tcp_shrink_window`); strict stacks only.
    ShrinkWindow { machine: Machine },
    /// The guest's frames to the network go past the host, by another card of the guest (SNOOP-42);
    /// with `fragments`, through it, in IP fragments if they are IPv4.
    OneWay { guest: u16, fragments: bool },
    /// The daemon dies between two steps of a turn and is started again after `lasts`. With
    /// `arena`, its arena is still there (LIFE-09).
    Crash { arena: bool, step: u32 },
    /// The daemon stands, behind a tap that is attached: frames pass it by after so long.
    Away { plain_after_us: u32 },
    /// The operator turns ack offload off for the VM, and on again when it is over.
    OffloadOff { guest: u16 },
    /// The same with congestion offload; it is on when that is over, whether it was before or not.
    FloodsOff { guest: u16 },
    /// The operator drains the VM; it is over with `set_offload(on)`.
    Drain { guest: u16 },
    /// The VM's bytes are acknowledged late (LIFE-12).
    Late { guest: u16 },
    /// The VM's flows are handed over to another engine, and back, unless H sends for one of them.
    /// Without `moves` nothing happens.
    Handover { guest: u16, moves: bool },
    /// Connections without answers fill the VM's flow table (eviction, LIFE-02).
    FlowFlood { remote: u16, guest: u16, per_ms: u32 },
    /// The guest routes for so many others: their frames leave with its MAC and their addresses.
    ManyAddresses { guest: u16, addresses: u16 },
    /// A middlebox resets a connection of the guest: an exact RST to either side in the other's
    /// name.
    Kill { guest: u16 },
    /// Somebody sends forged segments with the addresses of live connections (SEC-04); with a
    /// `per_ms` of 0 one in 600 ms, all of the newest connection.
    Forge { guest: u16, per_ms: u32 },
}

impl Plan {
    /// Whether everything it names is there: one that was written by hand may be wrong.
    ///
    /// # Errors
    /// What is missing.
    pub fn check(&self) -> Result<(), String> {
        let there = |m: Machine| match m {
            Machine::Guest(g) => usize::from(g) < self.guests.len(),
            Machine::Remote(r) => usize::from(r) < self.remotes.len(),
        };
        if self.guests.is_empty() || self.remotes.is_empty() {
            return Err("it needs a guest and a remote at least".to_owned());
        }
        let cores = self.guests.iter().map(|g| g.core).chain(self.host.core);
        if let Some(core) = cores.into_iter().find(|core| usize::from(*core) >= self.cores.len()) {
            return Err(format!("there is no core {core}"));
        }
        let ends = self.conns.iter().flat_map(|conn| [conn.client, conn.server]);
        let victims = self.faults.iter().flat_map(|f| f.kind.machines()).flatten();
        match ends.chain(victims).find(|m| !there(*m)) {
            Some(machine) => Err(format!("there is no {machine:?}")),
            None => Ok(()),
        }
    }
}

/// Instants as nanoseconds.
mod nanos {
    use nightporter_core::time::Instant;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(at: &Instant, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_u64(at.as_nanos())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Instant, D::Error> {
        u64::deserialize(d).map(Instant::from_nanos)
    }
}

/// Spans as nanoseconds.
mod nanos_span {
    use nightporter_core::time::Duration;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(span: &Duration, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_u64(span.as_nanos())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Duration, D::Error> {
        u64::deserialize(d).map(Duration::from_nanos)
    }
}
