//! The monitor: what a host, its VMs and its network do to connections, from frames alone.
//!
//! It is the successor of `tcpmon`, the monitor of "Virtual Machine Effects on Network Traffic
//! Dynamics". Frames that pass at the sides of a VM's port go in, statistics of each connection and
//! each VM come out. It changes nothing and judges nothing.
//!
//! ```text
//!               Side::Net                         Side::Guest
//!   R  ── Way::ToGuest ─────►  host (store)  ──── Way::ToGuest ────►  G
//!   R  ◄─ Way::FromGuest ────                ◄─── Way::FromGuest ───  G
//! ```
//!
//! - A [`stream::Stream`] is one direction of a connection at one side: its data one way, the ACKs
//!   of it the other way. Each statistic is a type of its own, in a file of its own, with its
//!   definition, unit and source.
//! - [`between::Between`] is one direction at both sides: the host's part of its delay, and which
//!   bytes the host acknowledged early.
//! - Of the three parts of a segment's delay, the host's is [`between::Between::delay`]. The
//!   guest's is [`round_trip::RoundTrip::segments`] toward it, and [`turnaround::Turnaround`] from
//!   it, at `Side::Guest`. The network's are the same two, the other way round, at `Side::Net`.
//!
//! **Two steps.** The data path only copies the headers of a frame into a [`log::Log`]; that is all
//! that a packet costs there. [`Monitor::handle`] computes, away from the data path, or from a
//! capture.
//!
//! **Bounds.** Memory is bounded by [`Settings::flows_max`] and by the number of VMs. A connection
//! allocates when its first segment passes at each side, then never. Sequence numbers are
//! unwrapped, so connections may carry more than 4 GiB. Connections that began before are watched
//! from their first segment on; their window scale is not known. Fragments are not put together.

pub mod between;
pub mod bursts;
pub mod density;
pub mod flow;
pub mod headers;
pub mod histogram;
pub mod limited;
pub mod log;
pub mod order;
pub mod pcap;
pub mod rate;
mod ring;
pub mod round_trip;
pub mod stream;
pub mod turnaround;
pub mod windows;

use crate::flow::key::FlowKey;
use crate::limits::{MONITOR_FLOW_BYTES, MONITOR_FLOWS_MAX, MONITOR_VMS_MAX};
use crate::time::{Duration, Instant};
use crate::wire::packet::Packet;
use bursts::Bursts;
use flow::Flow;
use hashbrown::HashTable;

const _: () = assert!(flow::BYTES <= MONITOR_FLOW_BYTES);
const _: () = assert!(size_of::<Vm>() == 256);

/// A side of a VM's port.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum Side {
    /// Toward the network: between the host and R.
    Net,
    /// Toward the guest: its ring.
    Guest,
}

/// The direction of a frame.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum Way {
    /// R to G.
    ToGuest,
    /// G to R.
    FromGuest,
}

impl Way {
    /// The other one.
    #[must_use]
    pub const fn back(self) -> Self {
        match self {
            Self::ToGuest => Self::FromGuest,
            Self::FromGuest => Self::ToGuest,
        }
    }

    /// Frames of this direction come into the host at this side; else they leave it there.
    #[must_use]
    pub const fn comes_at(self, side: Side) -> bool {
        matches!((self, side), (Self::ToGuest, Side::Net) | (Self::FromGuest, Side::Guest))
    }
}

/// A frame that passes.
#[derive(Clone, Copy, Debug)]
pub struct Frame<'a> {
    /// When. Frames are given in this order.
    pub at: Instant,
    /// The VM's number.
    pub vm: u16,
    /// Where.
    pub side: Side,
    /// In which direction.
    pub way: Way,
    /// Its bytes, without FCS and virtio-net header.
    pub len: u32,
    /// Its headers.
    pub packet: &'a Packet,
}

/// Settings of an operator.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Connections that are watched; later ones are counted in [`Monitor::unwatched`]. At most
    /// [`MONITOR_FLOWS_MAX`].
    pub flows_max: usize,
    /// The interval of burstiness, which should be a round trip of the path. The study's, and the
    /// default, is 60 ms. It must not be zero.
    pub round_trip: Duration,
    /// A millisecond with more than this is a burst, in Mbit/s. The study's, and the default, is
    /// 200, twice what its bottleneck carried.
    pub burst_mbit_s: u32,
}

impl Default for Settings {
    fn default() -> Self {
        let round_trip = Duration::from_millis(60);
        Self { flows_max: MONITOR_FLOWS_MAX, round_trip, burst_mbit_s: 200 }
    }
}

/// All frames of a VM in one direction at one side, TCP or not.
#[derive(Clone, Copy, Debug)]
pub struct Traffic {
    /// Frames.
    pub frames: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Milliseconds above the rate.
    pub bursts: Bursts,
}

/// A VM's traffic, by side, then by direction.
#[derive(Clone, Copy, Debug)]
pub struct Vm([[Traffic; 2]; 2]);

impl Vm {
    /// The traffic in one direction at one side.
    #[must_use]
    pub const fn traffic(&self, side: Side, way: Way) -> &Traffic {
        &self.0[side as usize][way as usize]
    }
}

/// See the module doc.
#[derive(Clone, Debug)]
pub struct Monitor {
    settings: Settings,
    vms: Vec<Vm>,
    flows: Vec<Flow>,
    /// Places in `flows`, by the hash of their key; of connections of one name the newest.
    index: HashTable<usize>,
    hasher: ahash::RandomState,
    unwatched: u64,
}

impl Monitor {
    /// Watches nothing yet.
    #[must_use]
    pub fn new(settings: Settings) -> Self {
        // The seeds of a hash choose no order that anybody sees.
        let hasher = ahash::RandomState::with_seeds(1, 2, 3, 4);
        let (vms, flows, index) = (Vec::new(), Vec::new(), HashTable::new());
        Self { settings, vms, flows, index, hasher, unwatched: 0 }
    }

    /// The connections, in the order in which they began.
    #[must_use]
    pub fn flows(&self) -> &[Flow] {
        &self.flows
    }

    /// The VMs, by their numbers.
    #[must_use]
    pub fn vms(&self) -> &[Vm] {
        &self.vms
    }

    /// Segments of connections beyond [`Settings::flows_max`].
    #[must_use]
    pub const fn unwatched(&self) -> u64 {
        self.unwatched
    }

    /// Takes in a frame. Frames of VMs beyond [`MONITOR_VMS_MAX`] are ignored.
    pub fn handle(&mut self, frame: &Frame<'_>) {
        if usize::from(frame.vm) >= MONITOR_VMS_MAX {
            return;
        }
        self.vm(frame.vm).on_frame(frame);
        let Some((ip, tcp)) = frame.packet.tcp() else { return };
        let eth = &frame.packet.eth;
        let key = match frame.way {
            Way::ToGuest => FlowKey::from_net(frame.vm, eth, ip, tcp),
            Way::FromGuest => FlowKey::from_guest(frame.vm, eth, ip, tcp),
        };
        let hash = self.hasher.hash_one(key);
        let is_it = |at: &usize| *self.flows[*at].key() == key;
        if let Ok(known) = self.index.find_entry(hash, is_it) {
            let flow = &mut self.flows[*known.get()];
            if !flow.is_other(frame.way, tcp) {
                flow.handle(frame, tcp, &self.settings);
                return;
            }
            known.remove();
        }
        if self.flows.len() >= self.settings.flows_max.min(MONITOR_FLOWS_MAX) {
            self.unwatched += 1;
            return;
        }
        let mut flow = Flow::new(key, frame.at);
        flow.handle(frame, tcp, &self.settings);
        self.flows.push(flow);
        let (flows, hasher) = (&self.flows, &self.hasher);
        let rehash = |at: &usize| hasher.hash_one(flows[*at].key());
        self.index.insert_unique(hash, flows.len() - 1, rehash);
    }

    fn vm(&mut self, number: u16) -> &mut Vm {
        let number = usize::from(number);
        if self.vms.len() <= number {
            let bursts = Bursts::new(self.settings.burst_mbit_s);
            let none = Traffic { frames: 0, bytes: 0, bursts };
            self.vms.resize(number + 1, Vm([[none; 2]; 2]));
        }
        &mut self.vms[number]
    }
}

impl Vm {
    fn on_frame(&mut self, frame: &Frame<'_>) {
        let traffic = &mut self.0[frame.side as usize][frame.way as usize];
        traffic.frames += 1;
        traffic.bytes += u64::from(frame.len);
        traffic.bursts.add(frame.at, frame.len);
    }
}
