//! Transfers both ways at once: the gain of each way, as a part of its gain alone.

use serde::Serialize;

use super::{Cell, Direction, Gain, NetPath, Row};
use crate::experiment::stats::Ratio;

/// All transfers both ways at once.
#[derive(Debug, Clone, Serialize)]
pub struct BothWays {
    /// One per way and path. The cost of a transfer is that of both ways.
    pub rows: Vec<Row>,
    /// Of the path that floods over `tap`, each way.
    pub gains: Vec<Gain>,
    /// The gain both ways at once over the gain alone, each way, where both were measured.
    pub kept: Vec<Kept>,
}

/// How much of what a way gains alone it gains beside the other.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Kept {
    /// The way.
    pub direction: Direction,
    /// The path of the transfers both ways, over `tap`.
    pub path: NetPath,
    /// The path that gives the way its gain alone, over `tap`: no congestion offload for uploads.
    pub alone: NetPath,
    /// Bytes of each way.
    pub bytes: usize,
    /// Gain of goodput both ways at once over the gain alone.
    pub delivered: Ratio,
    /// Goodput both ways at once over the goodput alone, by the two paths themselves: where this is
    /// kept and the gain is not, `tap` is faster both ways at once.
    pub goodput: Ratio,
}

impl BothWays {
    /// Sums up; `None` if there were no such transfers.
    #[must_use]
    pub fn of(cells: &[Cell], one_way: &[Row], alone: &[Gain]) -> Option<Self> {
        let rows: Vec<Row> = cells.iter().filter_map(Row::of).collect();
        let gains = Gain::all(&rows);
        let kept = gains.iter().filter_map(|gain| {
            let path = match gain.direction {
                Direction::Up => NetPath::AckOffload,
                Direction::Down => gain.path,
            };
            let kind = |g: &Gain| (g.direction, g.over, g.bytes);
            let alone = alone.iter().find(|a| kind(a) == kind(gain) && a.path == path)?;
            let both = rows.iter().find(|r| (r.direction, r.path) == (gain.direction, gain.path));
            let mut one_way = one_way.iter().filter(|r| r.direction == gain.direction);
            let one_way = one_way.find(|r| (r.path, r.bytes) == (path, gain.bytes))?;
            Some(Kept {
                direction: gain.direction,
                path: gain.path,
                alone: path,
                bytes: gain.bytes,
                delivered: gain.delivered.over(alone.delivered),
                goodput: Gain::of(both?, one_way)?.delivered,
            })
        });
        let kept = kept.collect();
        (!rows.is_empty()).then_some(Self { rows, gains, kept })
    }
}
