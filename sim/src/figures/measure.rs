//! Runs of scenes, and their times.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use nightporter_core::time::{Duration, Instant};

use super::scene::Scene;
use crate::plan::{Machine, Plan};
use crate::random::Random;
use crate::stack::{EndReport, Outcome};
use crate::world::{Recorder, RunEnd, World};
use nightporter_check::frame::Frame;
use nightporter_check::tap::{Tap, Tapped};

/// How long one transfer took.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Transfer {
    /// Until the client's `connect` returned.
    pub connect: Duration,
    /// From then on until all was acknowledged to the client.
    pub acked: Duration,
    /// From then on until the guest's application had read all.
    pub delivered: Duration,
    /// From when the guest's `accept` returned until its application had read all.
    pub in_guest: Duration,
}

/// Which of the times of a [`Transfer`].
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Clock {
    /// See [`Transfer::acked`].
    Acked,
    /// See [`Transfer::delivered`].
    Delivered,
    /// See [`Transfer::in_guest`].
    InGuest,
    /// [`Transfer::connect`] and `acked`.
    ConnectAcked,
    /// [`Transfer::connect`] and `delivered`.
    ConnectDelivered,
}

impl Clock {
    /// In the order of the table.
    pub const ALL: [Self; 5] =
        [Self::Acked, Self::Delivered, Self::InGuest, Self::ConnectAcked, Self::ConnectDelivered];

    /// Its name in figures and tables.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Acked => "acked",
            Self::Delivered => "delivered",
            Self::InGuest => "in the guest's eyes",
            Self::ConnectAcked => "connect + acked",
            Self::ConnectDelivered => "connect + delivered",
        }
    }
}

impl Transfer {
    /// How long it took by `clock`.
    #[must_use]
    pub fn took(&self, clock: Clock) -> Duration {
        match clock {
            Clock::Acked => self.acked,
            Clock::Delivered => self.delivered,
            Clock::InGuest => self.in_guest,
            Clock::ConnectAcked => self.connect + self.acked,
            Clock::ConnectDelivered => self.connect + self.delivered,
        }
    }

    /// Megabytes (10^6) per second for `bytes`.
    #[must_use]
    pub fn throughput(&self, bytes: u64, clock: Clock) -> f64 {
        let took = self.took(clock);
        // Bytes that were read at once took a microsecond: the clock of an application shows no
        // less.
        bytes as f64 * 1e3 / took.as_nanos().max(1_000) as f64
    }
}

/// Calls `f` with 0, 1, ... on `jobs` threads; the results are in order, whoever made them.
///
/// # Panics
/// If `f` does.
pub fn in_parallel<T: Send>(jobs: usize, count: usize, f: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let next = AtomicUsize::new(0);
    let worker = || {
        let mut made = Vec::new();
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            if i >= count {
                return made;
            }
            made.push((i, f(i)));
        }
    };
    let mut all: Vec<(usize, T)> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..jobs.max(1)).map(|_| scope.spawn(worker)).collect();
        threads.into_iter().flat_map(|t| t.join().expect("a run's panic")).collect()
    });
    all.sort_by_key(|(i, _)| *i);
    all.into_iter().map(|(_, made)| made).collect()
}

/// The transfers of `scene`, once.
///
/// # Panics
/// If a transfer does not end well: there is nothing in a figure's world that could break it.
#[must_use]
pub fn transfers(scene: &Scene, seed: u64) -> Vec<Transfer> {
    let plan = scene.plan(seed);
    of_end(&plan, &world(&plan, false, None).run())
}

/// The world of `plan`. Until its first connection opens, strangers ask VMs for their addresses at
/// random instants. Each question wakes the driver domain, so the scheduler begins in another state
/// in every run. Without them it would repeat the same cycle in all.
#[must_use]
pub fn world<'r>(plan: &Plan, check: bool, recorder: Option<&'r mut dyn Recorder>) -> World<'r> {
    const EVERY_US: u64 = 20_000;
    let mut world = World::new(plan, check, recorder);
    let mut random = Random::new(plan.seed, "warm-up");
    let end = plan.conns.iter().map(|c| c.opens_at).min().unwrap_or(Instant::ZERO);
    let mut at = Instant::ZERO;
    while at < end {
        let guest = random.below(plan.guests.len() as u64);
        world.add_frame(at, ping(u16::try_from(guest).unwrap_or(0), NOBODY));
        at = at + Duration::from_micros(random.below(2 * EVERY_US));
    }
    world
}

fn of_end(plan: &Plan, end: &RunEnd) -> Vec<Transfer> {
    let mut ends: BTreeMap<usize, [Option<&EndReport>; 2]> = BTreeMap::new();
    for report in &end.ends {
        assert!(report.outcome == Outcome::Closed && report.wrong_at.is_none(), "{report:?}");
        let is_server = plan.conns[report.conn].server == report.machine;
        ends.entry(report.conn).or_default()[usize::from(is_server)] = Some(report);
    }
    let transfer = |pair: [Option<&EndReport>; 2]| {
        let [client, server] = [pair[0]?, pair[1]?];
        let [connected_at, accepted_at] = [client.connected_at?, server.connected_at?];
        Some(Transfer {
            connect: connected_at.since(client.opened_at?),
            acked: client.acked_at?.since(connected_at),
            delivered: server.delivered_at?.since(connected_at),
            in_guest: server.delivered_at?.since(accepted_at),
        })
    };
    ends.into_values().map(|pair| transfer(pair).expect("both ends closed")).collect()
}

/// The times of a ping.
#[derive(Clone, Copy, Debug)]
pub struct Ping {
    /// From the client and back.
    pub round_trip: Duration,
    /// From the host's network card into the guest's ring.
    pub in_host: Duration,
    /// From there until the host has the answer.
    pub in_guest: Duration,
}

/// Times of one ping at the taps.
#[derive(Clone, Copy, Default)]
struct Times {
    sent: Instant,
    into_ring: Option<Instant>,
    from_guest: Option<Instant>,
    to_net: Option<Instant>,
}

/// Pings by number, which is in the asker's MAC.
struct Pings(Vec<Times>);

/// The number of a stranger, which is not measured.
const NOBODY: u16 = u16::MAX;

/// Strangers' MACs begin so; no machine of a plan has such a one.
const ASKER: [u8; 4] = [2, 0, 0, 3];

impl Recorder for Pings {
    fn frame(&mut self, tapped: &Tapped<'_>) {
        let (dst, src) = (&tapped.bytes[..6], &tapped.bytes[6..12]);
        let asker = if src.starts_with(&ASKER) { src } else { dst };
        let n = usize::from(u16::from_be_bytes([asker[4], asker[5]]));
        let Some(times) = self.0.get_mut(n).filter(|_| asker.starts_with(&ASKER)) else { return };
        let slot = match tapped.tap {
            Tap::ToGuest(0) => &mut times.into_ring,
            Tap::FromGuest(0) => &mut times.from_guest,
            Tap::ToNet => &mut times.to_net,
            _ => return,
        };
        slot.get_or_insert(tapped.at);
    }
}

/// An ARP request of stranger `n` for a guest's address: one small frame there, and one back.
fn ping(guest: u16, n: u16) -> Frame {
    let guest = Machine::Guest(guest).address();
    let [hi, lo] = n.to_be_bytes();
    let asker = [ASKER.as_slice(), &[hi, lo]].concat();
    let mut bytes =
        [guest.mac.as_slice(), &asker, &[8, 6, 0, 1, 8, 0, 6, 4, 0, 1], &asker].concat();
    bytes.extend([10, 3, hi, lo]);
    bytes.extend([0; 6]);
    bytes.extend(guest.v4);
    Frame::on_wire(bytes)
}

/// `count` pings, once in 200 ms on average.
///
/// # Panics
/// If one is not answered.
#[must_use]
pub fn pings(scene: &Scene, seed: u64, count: u16) -> Vec<Ping> {
    const EVERY_US: u64 = 200_000;
    let mut plan = scene.plan(seed);
    let mut random = Random::new(seed, "pings");
    let wire = Duration::from_micros(plan.remotes[0].to_host.delay_us.into());
    let first = plan.conns[0].opens_at;
    let at = |i| first + Duration::from_micros(u64::from(i) * EVERY_US + random.below(EVERY_US));
    let sent: Vec<Instant> = (0..count).map(at).collect();
    // The world ends with its connections: one that opens when the last ping is answered.
    plan.conns[0].opens_at = first + Duration::from_micros(EVERY_US * u64::from(count + 10));
    let mut seen = Pings(sent.iter().map(|&sent| Times { sent, ..Times::default() }).collect());
    let mut world = World::new(&plan, false, Some(&mut seen));
    for (n, &at) in (0..).zip(&sent) {
        world.add_frame(at + wire, ping(0, n));
    }
    let _ = world.run();
    let ping = |times: &Times| {
        let (into_ring, from_guest) = (times.into_ring?, times.from_guest?);
        Some(Ping {
            round_trip: (times.to_net? + wire).since(times.sent),
            in_host: into_ring.since(times.sent + wire),
            in_guest: from_guest.since(into_ring),
        })
    };
    seen.0.iter().map(|times| ping(times).expect("an answer")).collect()
}

/// How far a stream has come at the host's uplink, and when.
#[derive(Default)]
struct Sequence {
    points: Vec<(Instant, u32)>,
    base: Option<u32>,
}

impl Sequence {
    fn since(&self, from: Instant) -> Vec<(f64, f64)> {
        let point =
            |&(at, bytes): &(Instant, u32)| (seconds(at.since(from)), f64::from(bytes) / 1e6);
        self.points.iter().map(point).collect()
    }
}

impl Recorder for Sequence {
    fn frame(&mut self, tapped: &Tapped<'_>) {
        let Some((_, tcp)) = tapped.packet.and_then(|p| p.tcp()) else { return };
        if tapped.tap == Tap::FromNet {
            let base = *self.base.get_or_insert(tcp.seq.0);
            self.points.push((tapped.at, (tcp.seq + tcp.seq_len()).0.wrapping_sub(base)));
        }
    }
}

/// The data of one transfer as it comes to the host: seconds since the SYN, and megabytes.
#[must_use]
pub fn sequence(scene: &Scene, seed: u64) -> Vec<(f64, f64)> {
    let plan = scene.plan(seed);
    let mut seen = Sequence::default();
    let _ = world(&plan, false, Some(&mut seen)).run();
    seen.since(plan.conns[0].opens_at)
}

/// The same of the first connection of a plan.
#[must_use]
pub fn sequence_of(plan: &Plan) -> Vec<(f64, f64)> {
    let mut seen = Sequence::default();
    let _ = World::new(plan, false, Some(&mut seen)).run();
    seen.since(plan.conns[0].opens_at)
}

/// As a number of seconds.
#[must_use]
pub fn seconds(span: Duration) -> f64 {
    span.as_nanos() as f64 / 1e9
}

/// As a number of milliseconds.
#[must_use]
pub fn millis(span: Duration) -> f64 {
    span.as_nanos() as f64 / 1e6
}

/// The value below which `share` (0 to 1) of the values are.
///
/// # Panics
/// Without values.
#[must_use]
pub fn quantile(values: &[f64], share: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let last = sorted.len().checked_sub(1).expect("values");
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "an index")]
    let at = (share * last as f64).round() as usize;
    sorted[at.min(last)]
}
