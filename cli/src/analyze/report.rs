//! The findings, as in JSON. Times are in the unit that their name ends with.

use nightporter_core::monitor::between::Between;
use nightporter_core::monitor::density::{AckDensity, BAR};
use nightporter_core::monitor::flow::Flow;
use nightporter_core::monitor::histogram::Histogram;
use nightporter_core::monitor::limited::Limit;
use nightporter_core::monitor::rate::Rate;
use nightporter_core::monitor::stream::Stream;
use nightporter_core::monitor::{Monitor, Side, Way};
use nightporter_core::time::{Duration, Instant};
use serde::Serialize;

/// Both sides, the network's first.
pub(super) const SIDES: [Side; 2] = [Side::Net, Side::Guest];
/// Of a capture with both of them.
pub(super) const BOTH: &str = "both";
/// Both directions.
pub(super) const WAYS: [Way; 2] = [Way::ToGuest, Way::FromGuest];

/// All of it.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub(super) captures: Vec<Captured>,
    /// In the order in which they began.
    pub(super) connections: Vec<Connection>,
    /// All connections together.
    pub(super) all: Streams,
    /// Segments of connections beyond the number that is watched.
    pub(super) unwatched_segments: u64,
    /// All frames of the VM, by side and direction; without an address of the VM those of TCP.
    pub(super) traffic: Vec<Traffic>,
    /// Of one capture nobody can tell which end is the VM: see `--vm`.
    pub(super) vm_is_a_guess: bool,
}

/// A file.
#[derive(Debug, Serialize)]
pub(super) struct Captured {
    pub(super) file: String,
    pub(super) side: &'static str,
    pub(super) frames: u64,
    pub(super) bytes: u64,
    /// When the first frame was captured, since 1970.
    pub(super) begins_s: f64,
    pub(super) lasts_s: f64,
    /// Frames that are not TCP's.
    pub(super) not_tcp: u64,
    /// Frames whose headers could not be read, by reason.
    pub(super) unread: Vec<(&'static str, u64)>,
    /// Packets without a time, and packets of a link that is not known.
    pub(super) left_out: u64,
    /// Frames that are earlier than the one before.
    pub(super) backwards: u64,
    /// Frames that the capture has missed, as far as it says.
    pub(super) missed: u64,
    /// `whole`, `cut` (in the middle of a frame) or `damaged`.
    pub(super) end: &'static str,
    /// The byte from which on no frame was found.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) damaged_at: Option<usize>,
}

/// A connection.
#[derive(Debug, Serialize)]
pub(super) struct Connection {
    /// Its number, from 1 on.
    pub(super) id: usize,
    pub(super) remote: String,
    pub(super) guest: String,
    /// After the first frame of all captures.
    pub(super) begins_s: f64,
    pub(super) lasts_s: f64,
    /// From the SYN to the handshake's last ACK.
    pub(super) handshake_us: Option<f64>,
    #[serde(flatten)]
    pub(super) streams: Streams,
}

/// Both directions, wherever they were seen.
#[derive(Debug, Serialize)]
pub(super) struct Streams {
    pub(super) streams: Vec<DirectionReport>,
    /// Between the sides, if there are captures of both.
    pub(super) host: Vec<HostDelays>,
}

/// One direction of data at one side. docs/monitor.md has the definitions.
#[derive(Debug, Default, Serialize)]
pub(super) struct DirectionReport {
    pub(super) side: &'static str,
    pub(super) way: &'static str,
    pub(super) segments: u64,
    pub(super) bytes: u64,
    pub(super) acked_bytes: u64,
    pub(super) gaps: u64,
    pub(super) out_of_order: u64,
    pub(super) filled_late: u64,
    pub(super) repeated: u64,
    pub(super) spurious: u64,
    pub(super) probes: u64,
    pub(super) acks: u64,
    pub(super) duplicate_acks: u64,
    pub(super) unseen_acks: u64,
    pub(super) zero_windows: u64,
    pub(super) full_windows: u64,
    /// From a segment to its ACK.
    pub(super) acked_after: Times,
    /// From an ACK to the sender's next new segment.
    pub(super) next_after: Times,
    pub(super) between_acks: Density,
    pub(super) limited: Limits,
    /// Of one connection only.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) rates: Vec<Rates>,
    pub(super) bursts: Bursts,
}

/// Between the two sides: one direction of data.
#[derive(Debug, Default, Serialize)]
pub(super) struct HostDelays {
    pub(super) way: &'static str,
    /// From a segment's arrival at the host until all of it has left.
    pub(super) delay: Times,
    /// Segments that left before they came.
    pub(super) backwards: u64,
    /// Bytes that the host acknowledged before the receiver did, and all others.
    pub(super) early_bytes: u64,
    pub(super) own_bytes: u64,
    /// By how much earlier.
    pub(super) lead: Times,
}

/// A distribution of times.
#[derive(Debug, Default, Serialize)]
pub(super) struct Times {
    pub(super) count: u64,
    pub(super) mean_us: f64,
    pub(super) p50_us: f64,
    pub(super) p90_us: f64,
    pub(super) p99_us: f64,
    pub(super) longest_us: f64,
    /// The time below which a bin's are, and how many these are.
    pub(super) bins: Vec<(f64, u32)>,
    #[serde(skip)]
    all: Histogram,
}

/// Times between ACKs of something new.
#[derive(Debug, Default, Serialize)]
pub(super) struct Density {
    #[serde(flatten)]
    pub(super) times: Times,
    /// The share of compressed ACKs, which came within a bar of the ACK before; and of the two
    /// leftmost bars.
    pub(super) compressed: Option<f64>,
    pub(super) first_two_bars: Option<f64>,
    pub(super) bar_us: f64,
    /// Times in each bar from the left, up to the last that is not empty.
    pub(super) bars: Vec<u32>,
    #[serde(skip)]
    all: AckDensity,
}

/// Times that the sender was held back, by reason.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(super) struct Limits {
    pub(super) sender_s: f64,
    pub(super) window_s: f64,
    pub(super) path_s: f64,
    /// Something was under way.
    pub(super) busy_s: f64,
}

/// Bytes acknowledged in intervals of one length.
#[derive(Debug, Serialize)]
pub(super) struct Rates {
    pub(super) interval_s: f64,
    /// Whole intervals.
    pub(super) intervals: u64,
    pub(super) mean_bytes: Option<f64>,
    /// The coefficient of variation.
    pub(super) burstiness: Option<f64>,
    /// The newest intervals: when each began, after the first bytes, and its bytes.
    pub(super) newest: Vec<(f64, u32)>,
}

/// Milliseconds with frames, those above the rate, and the most bytes of one.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(super) struct Bursts {
    pub(super) busy_ms: u64,
    pub(super) above_ms: u64,
    pub(super) most_bytes: u64,
}

/// Frames in one direction at one side.
#[derive(Debug, Serialize)]
pub(super) struct Traffic {
    pub(super) side: &'static str,
    pub(super) way: &'static str,
    pub(super) frames: u64,
    pub(super) bytes: u64,
    pub(super) bursts: Bursts,
}

/// `network` or `guest`.
pub(super) const fn name_of(side: Side) -> &'static str {
    match side {
        Side::Net => "network",
        Side::Guest => "guest",
    }
}

/// `to_guest` or `from_guest`.
pub(super) const fn name_of_way(way: Way) -> &'static str {
    match way {
        Way::ToGuest => "to_guest",
        Way::FromGuest => "from_guest",
    }
}

fn us(time: Duration) -> f64 {
    time.as_nanos() as f64 / 1e3
}

pub(super) fn seconds(time: Duration) -> f64 {
    time.as_nanos() as f64 / 1e9
}

impl Report {
    /// `first`: of all captures; `only`: the connection with this number.
    pub(super) fn new(
        captures: Vec<Captured>,
        monitor: &Monitor,
        first: Instant,
        only: Option<usize>,
    ) -> Self {
        let flows = (1..).zip(monitor.flows());
        let chosen = || flows.clone().filter(|(id, _)| only.is_none_or(|only| only == *id));
        Self {
            captures,
            connections: chosen().map(|(id, flow)| Connection::new(id, flow, first)).collect(),
            all: Streams::new(chosen().map(|(_, flow)| flow)),
            unwatched_segments: monitor.unwatched(),
            traffic: monitor.vms().first().map(traffic).unwrap_or_default(),
            vm_is_a_guess: false,
        }
    }
}

fn traffic(vm: &nightporter_core::monitor::Vm) -> Vec<Traffic> {
    let places = SIDES.into_iter().flat_map(|side| WAYS.map(|way| (side, way)));
    let of = |(side, way)| {
        let it = vm.traffic(side, way);
        let bursts = Bursts::new(&it.bursts);
        let (side, way) = (name_of(side), name_of_way(way));
        Traffic { side, way, frames: it.frames, bytes: it.bytes, bursts }
    };
    places.map(of).filter(|it| it.frames > 0).collect()
}

impl Connection {
    fn new(id: usize, flow: &Flow, first: Instant) -> Self {
        let key = flow.key();
        let end = |address: nightporter_core::wire::ip::IpAddr16, port| {
            std::net::SocketAddr::new(address.to_ip(), port).to_string()
        };
        Self {
            id,
            remote: end(key.r_addr, key.r_port),
            guest: end(key.g_addr, key.g_port),
            begins_s: seconds(flow.first().since(first)),
            lasts_s: seconds(flow.duration()),
            handshake_us: SIDES.into_iter().find_map(|s| flow.first_round_trip(s)).map(us),
            streams: Streams::new(std::iter::once(flow)),
        }
    }
}

impl Streams {
    fn new<'a>(flows: impl Iterator<Item = &'a Flow> + Clone) -> Self {
        let places = SIDES.into_iter().flat_map(|side| WAYS.map(|way| (side, way)));
        let streams = places.filter_map(|(side, way)| {
            let streams = flows.clone().filter_map(|flow| flow.stream(side, way));
            DirectionReport::new(side, way, streams)
        });
        let host = WAYS.into_iter().filter_map(|way| {
            let between = flows.clone().filter_map(|flow| flow.between(way));
            HostDelays::new(way, between)
        });
        Self { streams: streams.collect(), host: host.collect() }
    }

    /// One direction at one side, if it was seen there.
    pub(super) fn at(&self, side: Side, way: Way) -> Option<&DirectionReport> {
        let (side, way) = (name_of(side), name_of_way(way));
        self.streams.iter().find(|it| (it.side, it.way) == (side, way))
    }

    /// The most payload of a direction that was seen anywhere.
    pub(super) fn bytes(&self, way: Way) -> u64 {
        let seen = SIDES.into_iter().filter_map(|side| self.at(side, way));
        seen.map(|it| it.acked_bytes.max(it.bytes)).max().unwrap_or(0)
    }
}

impl DirectionReport {
    /// `None` if there is none of them.
    fn new<'a>(side: Side, way: Way, streams: impl Iterator<Item = &'a Stream>) -> Option<Self> {
        let (side, way) = (name_of(side), name_of_way(way));
        let mut sum = Self { side, way, ..Self::default() };
        let mut many = 0;
        for stream in streams {
            many += 1;
            sum.add(stream);
            sum.rates = if many == 1 { sum.rates } else { Vec::new() };
        }
        sum.acked_after.finish();
        sum.next_after.finish();
        sum.between_acks.finish();
        (many > 0).then_some(sum)
    }

    fn add(&mut self, it: &Stream) {
        self.segments += it.order.segments;
        self.bytes += it.order.bytes;
        self.acked_bytes += it.acked_bytes;
        self.gaps += it.order.gaps;
        self.out_of_order += it.order.out_of_order;
        self.filled_late += it.order.filled_late;
        self.repeated += it.order.repeated;
        self.spurious += it.order.spurious;
        self.probes += it.probes;
        self.acks += it.acks;
        self.duplicate_acks += it.duplicate_acks;
        self.unseen_acks += it.unseen_acks;
        self.zero_windows += it.windows.zero;
        self.full_windows += it.windows.full;
        self.acked_after.all.merge(&it.round_trip.segments);
        self.next_after.all.merge(&it.turnaround.times);
        self.between_acks.all.merge(&it.density);
        self.limited.sender_s += seconds(it.limited.time(Limit::Sender));
        self.limited.window_s += seconds(it.limited.time(Limit::Window));
        self.limited.path_s += seconds(it.limited.time(Limit::Path));
        self.limited.busy_s += seconds(it.limited.busy());
        self.rates = [&it.per_round_trip, &it.per_second].map(Rates::new).into();
        let bursts = Bursts::new(&it.bursts);
        self.bursts.busy_ms += bursts.busy_ms;
        self.bursts.above_ms += bursts.above_ms;
        self.bursts.most_bytes = self.bursts.most_bytes.max(bursts.most_bytes);
    }

    /// Retransmissions: repeated bytes, or bytes that fill a hole late.
    pub(super) const fn retransmissions(&self) -> u64 {
        self.repeated + self.filled_late
    }

    /// The share of segments that were lost: retransmissions that were not spurious.
    pub(super) fn loss(&self) -> Option<f64> {
        let lost = self.retransmissions() - self.spurious;
        (self.segments > 0).then(|| lost as f64 / self.segments as f64)
    }
}

impl HostDelays {
    fn new<'a>(way: Way, all: impl Iterator<Item = &'a Between>) -> Option<Self> {
        let mut sum = Self { way: name_of_way(way), ..Self::default() };
        let mut many = 0;
        for it in all {
            many += 1;
            sum.delay.all.merge(&it.delay);
            sum.lead.all.merge(&it.lead);
            sum.backwards += it.backwards;
            sum.early_bytes += it.early_bytes;
            sum.own_bytes += it.own_bytes;
        }
        sum.delay.finish();
        sum.lead.finish();
        (many > 0).then_some(sum)
    }
}

impl Times {
    fn finish(&mut self) {
        let quantile = |share| self.all.quantile(share).map_or(0.0, us);
        (self.p50_us, self.p90_us, self.p99_us) = (quantile(0.5), quantile(0.9), quantile(0.99));
        self.count = self.all.count();
        self.mean_us = self.all.mean().map_or(0.0, us);
        self.longest_us = us(self.all.longest());
        self.bins = self.all.bins().map(|(edge, n)| (us(edge), n)).collect();
    }
}

impl Density {
    fn finish(&mut self) {
        self.times.all.merge(self.all.gaps());
        self.times.finish();
        self.compressed = self.all.share_of_first(1);
        self.first_two_bars = self.all.share_of_first(2);
        self.bar_us = us(BAR);
        let bars = self.all.bars();
        let len = bars.iter().rposition(|n| *n > 0).map_or(0, |last| last + 1);
        self.bars = bars[..len].to_vec();
    }
}

impl Rates {
    fn new(rate: &Rate) -> Self {
        Self {
            interval_s: seconds(rate.interval()),
            intervals: rate.intervals(),
            mean_bytes: rate.mean(),
            burstiness: rate.variation(),
            newest: rate.series().map(|(at, bytes)| (seconds(at), bytes)).collect(),
        }
    }
}

impl Bursts {
    const fn new(it: &nightporter_core::monitor::bursts::Bursts) -> Self {
        Self { busy_ms: it.busy(), above_ms: it.above(), most_bytes: it.most_bytes() }
    }
}
