//! The conditions of a case. A gain is promised of the median. "Not slower", and the part of its
//! gain that each way of two keeps, are judged by the whole interval.

use super::measures::{ACKED, DELIVERED, Terms, WHOLE, size};
use super::troubles::Trouble;
use super::{Direction, NetPath};
use crate::experiment::Results;
use crate::experiment::stats::{Ratio, round3};
use crate::experiment::verdict::{Check, Wanted};
use crate::link::Link;
use crate::placement::Placement;
use crate::sched::Scheduler;

/// No path may be slower than this, as a share of the speed of the paths before it.
const NEVER_WORSE: f64 = 0.95;

/// The least part of its gain alone that each way of a transfer both ways at once keeps.
const KEPT: f64 = 0.9;

const ACKED_BOUND: &str = "the guest answers the SYN and opens its window itself; and the daemon, \
    the sender, the link and QEMU's main threads share the other cores";
const DELIVERED_BOUND: &str = "the guest has to run to answer the SYN, to take the data and to \
    answer; a transfer that fits into one turn of the guest waits for one turn on every path";

const FLOODED_BOUND: &str = "the guest has to run to answer the SYN, to read the request and to \
    write, and has its own load beside that";

/// The gains over tap that this case wants, with the offload on: bytes, time, times faster.
fn wanted_gains(scheduler: Scheduler, link: Link) -> &'static [(usize, &'static str, f64)] {
    match (scheduler, link) {
        (Scheduler::Strict30, Link::Metro) => &[
            (100_000, ACKED, 2.5),
            (1_000_000, ACKED, 2.2),
            (1_000_000, DELIVERED.name, 1.7),
            (10_000_000, ACKED, 2.2),
            (10_000_000, DELIVERED.name, 1.7),
        ],
        (Scheduler::Eevdf, Link::Lan) => &[(100_000, ACKED, 15.0), (100_000, DELIVERED.name, 1.4)],
        _ => &[],
    }
}

/// The gains in goodput of downloads over tap that are wanted when the guest floods: bytes, times
/// as much.
fn wanted_of_floods(scheduler: Scheduler, link: Link) -> &'static [(usize, f64)] {
    match (scheduler, link) {
        (Scheduler::Strict30, Link::Metro) => &[(100_000, 1.3), (1_000_000, 1.8)],
        (Scheduler::Eevdf, Link::Lan) => &[(100_000, 1.3), (1_000_000, 1.3)],
        (Scheduler::Rr30, Link::Lan) => {
            &[(10_000, 3.2), (100_000, 3.2), (1_000_000, 3.2), (100_000_000, 1.31)]
        }
        _ => &[],
    }
}

/// The gain over tap that is wanted of the best small download when the guest floods: the vFlood
/// poster's best.
fn wanted_of_the_best(scheduler: Scheduler, link: Link) -> Option<f64> {
    (scheduler == Scheduler::Rr30 && link == Link::Lan).then_some(12.5)
}

/// The gains in delivered time over tap that are wanted with boost: direction, path, bytes, times
/// faster.
fn wanted_of_boosts(
    scheduler: Scheduler,
    link: Link,
) -> &'static [(Direction, NetPath, usize, f64)] {
    match (scheduler, link) {
        (Scheduler::Eevdf, Link::Lan) => &[
            (Direction::Up, NetPath::AckOffloadBoost, 100_000, 4.0),
            (Direction::Up, NetPath::AckOffloadBoost, 1_000_000, 3.3),
            (Direction::Down, NetPath::FloodRouteBoost, 100_000, 4.0),
            (Direction::Down, NetPath::FloodRouteBoost, 1_000_000, 4.0),
        ],
        _ => &[],
    }
}

/// A download that is no larger is a small flow, bytes.
const SMALL_MAX: usize = 1_000_000;

/// A case's transfers, as its conditions look at them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Measured<'a> {
    pub(super) terms: Terms,
    pub(super) results: &'a Results,
    /// The sizes of each direction.
    pub(super) kinds: &'a [(Direction, usize)],
    /// Bytes each way of transfers both ways at once.
    pub(super) both: usize,
}

impl Measured<'_> {
    /// How many times faster one path is than another.
    pub(super) fn gain(
        self,
        kind: (Direction, usize),
        path: NetPath,
        over: NetPath,
    ) -> Option<Ratio> {
        self.gain_of(kind, path, over, DELIVERED.name)
    }

    fn gain_of(
        self,
        (direction, bytes): (Direction, usize),
        path: NetPath,
        over: NetPath,
        time: &str,
    ) -> Option<Ratio> {
        let case = self.terms.one_way(direction, bytes);
        self.results.ratio(&case, over.name(), path.name(), time)
    }

    /// The paths of a case, in the table's order.
    fn paths(self, case: &str) -> Vec<NetPath> {
        self.results.arms(case).filter_map(|arm| NetPath::named(&arm.arm)).collect()
    }

    /// Transfers of a case that arrived whole, and all.
    pub(super) fn whole(self, case: &str) -> (usize, usize) {
        self.paths(case).into_iter().map(|path| self.whole_by(case, path)).fold((0, 0), add)
    }

    /// The same by one path.
    pub(super) fn whole_by(self, case: &str, path: NetPath) -> (usize, usize) {
        let mut sum = (0, 0);
        for arm in self.results.arms(case).filter(|arm| arm.arm == path.name()) {
            let whole = arm.samples.iter().filter_map(|sample| sample.value(WHOLE));
            sum.0 += whole.filter(|whole| *whole == 1.0).count();
            sum.1 += arm.samples.len() + arm.failures.len();
        }
        sum
    }

    /// All conditions of transfers one way at a time. Paths that were not measured promise nothing.
    pub(super) fn checks(self) -> Vec<Check> {
        let mut checks = Vec::new();
        let cases =
            self.kinds.iter().map(|&(direction, bytes)| self.terms.one_way(direction, bytes));
        let (right, tried) = cases.map(|case| self.whole(&case)).fold((0, 0), add);
        if tried > 0 {
            checks.push(self.share("share of transfers whose hash was right", right, tried));
        }
        if self.terms.placement == Placement::USUAL {
            checks.extend(self.wanted());
        }
        checks.extend(self.kinds.iter().flat_map(|kind| self.not_slower(*kind)));
        checks
    }

    /// The gains that some cases are to have.
    fn wanted(self) -> Vec<Check> {
        let mut checks = Vec::new();
        let Terms { scheduler, link, .. } = self.terms;
        for &(bytes, time, wanted) in wanted_gains(scheduler, link) {
            checks.extend(self.gained(bytes, time, wanted));
        }
        let floods = [NetPath::FloodRoute, NetPath::FloodBpf, NetPath::FloodRouteBoost];
        for &(bytes, wanted) in wanted_of_floods(scheduler, link) {
            checks.extend(floods.iter().filter_map(|&path| self.flooded(bytes, path, wanted)));
        }
        if let Some(wanted) = wanted_of_the_best(scheduler, link) {
            let small = self.kinds.iter().filter(|(way, _)| *way == Direction::Down);
            let small = small.filter(|(_, bytes)| *bytes <= SMALL_MAX);
            let of = |&(_, bytes): &(Direction, usize)| {
                floods.map(|path| self.flooded(bytes, path, wanted))
            };
            let all = small.flat_map(of).flatten();
            let best = all.max_by(|a, b| a.measured.total_cmp(&b.measured));
            checks.extend(best.map(|check| Check {
                what: format!("best of small downloads: {}", check.what),
                ..check
            }));
        }
        for &(direction, path, bytes, wanted) in wanted_of_boosts(scheduler, link) {
            let ratio = self.gain((direction, bytes), path, NetPath::Tap);
            let what = format!("{} {direction}, delivered: {path} over tap", size(bytes));
            let of = |ratio| self.check(Check::of_median(what, ratio, Wanted::AtLeast(wanted)));
            checks.extend(ratio.map(of));
        }
        checks
    }

    fn check(self, check: Check) -> Check {
        Check { what: format!("{}: {}", self.terms.name(), check.what), ..check }
    }

    /// All of them must be right.
    fn share(self, what: &str, right: usize, tried: usize) -> Check {
        self.check(Check::of(what, right as f64 / tried as f64, Wanted::AtLeast(1.0)))
    }

    fn gained(self, bytes: usize, time: &str, wanted: f64) -> Option<Check> {
        let (path, over) = (NetPath::AckOffload, NetPath::Tap);
        let ratio = self.gain_of((Direction::Up, bytes), path, over, time)?;
        let bound = if time == ACKED { ACKED_BOUND } else { DELIVERED_BOUND };
        let what = format!("{} up, {time}: {path} over {over}", size(bytes));
        let check = Check::of_median(what, ratio, Wanted::AtLeast(wanted));
        Some(self.check(check.bounded_by(bound)))
    }

    fn flooded(self, bytes: usize, path: NetPath, wanted: f64) -> Option<Check> {
        let ratio = self.gain((Direction::Down, bytes), path, NetPath::Tap)?;
        let what = format!("{} down, goodput: {path} over tap", size(bytes));
        let check = Check::of_median(what, ratio, Wanted::AtLeast(wanted));
        Some(self.check(check.bounded_by(FLOODED_BOUND)))
    }

    /// Others' times are not ours to promise, and no yardstick where nothing is promised of them.
    /// Two ways to flood are no alternatives, and a host is only as fast as its guest is scheduled.
    fn not_slower(self, kind: (Direction, usize)) -> Vec<Check> {
        let (direction, bytes) = kind;
        let paths = self.paths(&self.terms.one_way(direction, bytes));
        let mut checks = Vec::new();
        for &path in paths.iter().filter(|path| path.is_nightporter()) {
            let is_compared = |over: NetPath| match direction {
                Direction::Up => true,
                Direction::Down => !over.is_flood() && self.terms.scheduler == Scheduler::Idle,
            };
            for &over in paths.iter().filter(|over| **over < path && is_compared(**over)) {
                let is_yardstick = !over.is_passt() && over != NetPath::TapBoost;
                let Some(ratio) = self.gain(kind, path, over).filter(|_| is_yardstick) else {
                    continue;
                };
                let what = format!(
                    "{} {direction}, delivered: {path} not slower than {over}",
                    size(bytes)
                );
                let least = Wanted::AtLeast(NEVER_WORSE);
                checks.push(self.check(Check::of_interval(what, ratio, least)));
            }
        }
        checks
    }

    /// The condition of transfers both ways at once: each way keeps its gain over tap. Uploads have
    /// theirs alone without congestion offload.
    pub(super) fn of_both_ways(self) -> Vec<Check> {
        let bytes = self.both;
        let ways = [Direction::Up, Direction::Down];
        let cases = ways.map(|way| self.terms.both_ways(way, bytes));
        let (right, tried) = cases.iter().map(|case| self.whole(case)).fold((0, 0), add);
        if tried == 0 {
            return Vec::new();
        }
        let what = "share of transfers both ways whose hash was right";
        let mut checks = vec![self.share(what, right, tried)];
        for (way, case) in ways.into_iter().zip(&cases) {
            for path in self.paths(case).into_iter().filter(|path| path.is_flood()) {
                let alone = if way == Direction::Up { NetPath::AckOffload } else { path };
                let tap = NetPath::Tap;
                let both = self.results.ratio(case, tap.name(), path.name(), DELIVERED.name);
                let of_one = self.gain((way, bytes), alone, tap);
                let Some((both, of_one)) = both.zip(of_one) else { continue };
                let what = format!(
                    "{} both ways at once, {way}: gain of {path} over that of {alone} alone",
                    size(bytes)
                );
                let least = Wanted::AtLeast(KEPT);
                checks.push(self.check(Check::of_interval(what, both.over(of_one), least)));
            }
        }
        checks
    }

    /// Counters that no path of downloads may raise. Guests whose core is taken away have timeouts
    /// by themselves: the share of looks that find one may not be larger than over `tap`.
    pub(super) fn of_troubles(self, troubles: &[Trouble]) -> Vec<Check> {
        let without =
            |t: &Trouble| round3((t.looks - t.looks_with_timeouts) as f64 / t.looks as f64);
        let tap = troubles.iter().find(|t| t.path == NetPath::Tap).map_or(1.0, without);
        let floods = troubles.iter().filter(|t| t.path.is_flood() && t.looks > 0);
        let of = move |t: &Trouble| {
            let (clean, looks) = (t.looks - t.looks_with_remote, t.looks);
            let remote = format!(
                "share of looks after downloads over {} that found PAWSEstab and TCPACKSkipped of \
                 the remote as before",
                t.path
            );
            let guest = format!("the same of TCPTimeouts of the guest, over {}", t.path);
            let guest = Check::of(guest, without(t), Wanted::AtLeast(tap));
            [self.share(&remote, clean, looks), self.check(guest)]
        };
        floods.flat_map(of).collect()
    }
}

fn add(sum: (usize, usize), more: (usize, usize)) -> (usize, usize) {
    (sum.0 + more.0, sum.1 + more.1)
}

#[cfg(test)]
pub(super) mod tests;
