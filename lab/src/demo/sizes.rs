//! The sizes of transfers, in bytes.

use super::{Direction, Options, short};
use crate::sched::Scheduler;

pub(super) const SIZES: [usize; 4] = [10_000, 100_000, 1_000_000, 10_000_000];
/// Sizes of downloads, and more that take longer. Nobody competes: the first of those too.
const DOWN_SIZES: [usize; 3] = [10_000, 100_000, 1_000_000];
const DOWN_SIZES_MORE: [usize; 2] = [10_000_000, 100_000_000];

/// The sizes of one direction's transfers.
pub(super) fn sizes(direction: Direction, scheduler: Scheduler, options: &Options) -> Vec<usize> {
    match (&options.sizes, direction) {
        (Some(sizes), _) => sizes.clone(),
        (None, _) if options.is_short => short::sizes(scheduler).to_vec(),
        (None, Direction::Up) => SIZES.to_vec(),
        (None, Direction::Down) => {
            let more = match (options.full, scheduler) {
                (true, _) => DOWN_SIZES_MORE.len(),
                (false, Scheduler::Idle) => 1,
                (false, _) => 0,
            };
            [&DOWN_SIZES[..], &DOWN_SIZES_MORE[..more]].concat()
        }
    }
}
