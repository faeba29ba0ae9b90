//! The bottlenecks, and their senders.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use clap::ValueEnum;

use crate::link::Shape;

/// A sender.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Who {
    /// Linux with `cubic`, as it comes: windows leave in bursts.
    Linux,
    /// The same, paced by the kernel as beside the `fq` discipline.
    LinuxPaced,
    /// The host for a guest that floods.
    Nightporter,
}

/// The senders at the same time, each to the near or (`true`) the far address of the remote.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Arm {
    pub(super) name: String,
    pub(super) flows: Vec<(Who, bool)>,
}

/// A kind of cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Which {
    /// One flow alone: its goodput, and its reaction to losses.
    Alone,
    /// One flow of ours beside flows of Linux: fairness.
    Beside,
    /// Two flows of which one has a longer way: fairness of round trips.
    Far,
}

/// A bottleneck, and the arms that are compared over it.
#[derive(Debug, Clone)]
pub struct Cell {
    pub(super) which: Which,
    /// Bits per second.
    rate: u64,
    /// There and back.
    pub(super) round_trip: Duration,
    /// Bandwidth-delay products that fit into the queue.
    queue: f64,
    /// The share of frames lost by chance.
    loss: f64,
    /// How much longer the far way takes, there and back.
    far: Duration,
    /// How long a run takes.
    pub(super) time: Duration,
    pub(super) arms: Vec<Arm>,
}

/// A queue of a router has room for an initial window at least (RFC 6928): full frames on the wire.
const QUEUE_LEAST_BITS: u64 = 10 * 1538 * 8;

/// Of the far way, beside which the near one is 20 ms.
const FAR: Duration = Duration::from_millis(40);

/// Rate in Mbit/s, round trip in ms, queue in bandwidth-delay products, loss in percent, and
/// seconds of a run. One thing at a time differs from the first; then the corners.
const ALONE: [(u64, u64, f64, f64, u64); 16] = [
    (20, 20, 1.0, 0.0, 20),
    (10, 20, 1.0, 0.0, 20),
    (100, 20, 1.0, 0.0, 20),
    (20, 1, 1.0, 0.0, 15),
    (20, 60, 1.0, 0.0, 30),
    (20, 20, 0.2, 0.0, 20),
    (20, 20, 2.0, 0.0, 20),
    (20, 20, 1.0, 0.1, 30),
    (20, 20, 1.0, 1.0, 30),
    (100, 1, 1.0, 0.0, 15),
    (100, 60, 0.2, 0.0, 30),
    (100, 60, 2.0, 0.0, 30),
    (100, 20, 1.0, 1.0, 20),
    (10, 60, 0.2, 1.0, 30),
    (1000, 1, 1.0, 0.0, 10),
    (1000, 20, 1.0, 0.0, 20),
];

impl Cell {
    /// One flow alone: rate in Mbit/s, round trip in ms, queue in bandwidth-delay products, loss in
    /// percent.
    #[must_use]
    pub fn alone(rate: u64, round_trip: u64, queue: f64, loss: f64, seconds: u64) -> Self {
        let one = |name: &str, who| Arm { name: name.to_owned(), flows: vec![(who, false)] };
        Self {
            which: Which::Alone,
            rate: rate * 1_000_000,
            round_trip: Duration::from_millis(round_trip),
            queue,
            loss: loss / 100.0,
            far: Duration::ZERO,
            time: Duration::from_secs(seconds),
            arms: vec![
                one("linux", Who::Linux),
                one("linux-paced", Who::LinuxPaced),
                one("nightporter", Who::Nightporter),
            ],
        }
    }

    /// One flow of ours, or of Linux, with so many of Linux.
    #[must_use]
    pub fn beside(rate: u64, round_trip: u64, queue: f64, others: usize, seconds: u64) -> Self {
        let arm = |name: &str, who| {
            let mut flows = vec![(Who::Linux, false); others + 1];
            flows[0].0 = who;
            Arm { name: format!("{name}+{others}"), flows }
        };
        let arms = vec![arm("linux", Who::Linux), arm("nightporter", Who::Nightporter)];
        let which = Which::Beside;
        Self { which, arms, ..Self::alone(rate, round_trip, queue, 0.0, seconds) }
    }

    /// Two flows, of which the second has the longer way.
    #[must_use]
    pub fn far(rate: u64, round_trip: u64, queue: f64, seconds: u64) -> Self {
        let arm = |name: &str, near, far| Arm {
            name: name.to_owned(),
            flows: vec![(near, false), (far, true)],
        };
        let (linux, ours) = (Who::Linux, Who::Nightporter);
        let arms = vec![
            arm("linux+far-linux", linux, linux),
            arm("nightporter+far-linux", ours, linux),
            arm("linux+far-nightporter", linux, ours),
            arm("nightporter+far-nightporter", ours, ours),
        ];
        let which = Which::Far;
        Self { which, far: FAR, arms, ..Self::alone(rate, round_trip, queue, 0.0, seconds) }
    }

    /// All cells of these kinds, up to this rate in Mbit/s, and with so many others.
    #[must_use]
    pub fn all(which: &[Which], rate_most: u64, others: &[usize]) -> Vec<Self> {
        let alone = ALONE.iter().filter(|(rate, ..)| *rate <= rate_most);
        let alone =
            alone.map(|&(rate, rtt, queue, loss, s)| Self::alone(rate, rtt, queue, loss, s));
        let beside = others.iter().map(|&others| Self::beside(20, 20, 1.0, others, 40));
        let mut all: Vec<Self> = alone.chain(beside).collect();
        all.push(Self::far(20, 20, 1.0, 60));
        all.retain(|cell| which.contains(&cell.which));
        all
    }

    /// The behaviour of the line.
    #[must_use]
    pub(super) fn shape(&self) -> Shape {
        let least = Duration::from_nanos(QUEUE_LEAST_BITS * 1_000_000_000 / self.rate);
        Shape {
            rate: self.rate,
            round_trip: self.round_trip,
            queue: Some(self.round_trip.mul_f64(self.queue).max(least)),
            loss: self.loss,
            far: self.far,
            by_frame: true,
            ..Shape::GOOD
        }
    }
}

/// As `20,20,1,0`: one flow alone over 20 Mbit/s, 20 ms, one product, no losses.
impl FromStr for Cell {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts: Vec<&str> = text.split(',').collect();
        let [rate, round_trip, queue, loss] = parts[..] else {
            return Err("four numbers: Mbit/s, ms, products, percent".to_owned());
        };
        let whole = |part: &str| part.parse::<u64>().map_err(|e| format!("{part}: {e}"));
        let part = |part: &str| part.parse::<f64>().map_err(|e| format!("{part}: {e}"));
        Ok(Self::alone(whole(rate)?, whole(round_trip)?, part(queue)?, part(loss)?, 20))
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (rate, rtt) = (self.rate / 1_000_000, self.round_trip.as_millis());
        let (queue, loss) = (self.queue, self.loss * 100.0);
        write!(f, "{rate} Mbit/s, {rtt} ms, {queue} BDP, {loss} % lost")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_holds_its_share_of_the_product_and_ten_frames_at_least() {
        let queue = |rate, rtt, part| Cell::alone(rate, rtt, part, 0.0, 1).shape().queue;
        assert_eq!(queue(20, 20, 2.0), Some(Duration::from_millis(40)));
        assert_eq!(queue(10, 1, 0.2), Some(Duration::from_nanos(12_304_000)));
    }

    #[test]
    fn a_flow_of_ours_stands_beside_as_many_of_linux_as_a_flow_of_linux_does() {
        for cell in Cell::all(&[Which::Beside], 20, &[1, 2, 4, 8]) {
            let linux = |arm: &Arm| arm.flows.iter().filter(|f| f.0 == Who::Linux).count();
            assert_eq!(cell.arms.iter().map(linux).collect::<Vec<_>>(), {
                let others = cell.arms[0].flows.len() - 1;
                [others + 1, others]
            });
        }
    }
}
