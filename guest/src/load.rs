//! A CPU load whose demand is counted in work done.
//!
//! A load that sleeps by the clock does less work when its time is stolen, and hides the effect of
//! competition. This one owes `percent` of a period's worth of calibrated loops every period, and
//! carries unfinished work over without limit. So three guests that each demand 60 % of one core
//! keep that core busy for good.

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

/// Demand is added once per period.
const PERIOD_MS: u64 = 10;

/// Calibration takes the fastest of this many bursts: a burst can only be slowed, never sped up.
const BURSTS: usize = 40;

/// Length of one calibration burst, loops. (About 2 to 20 ms, depending on the machine.)
const BURST_LOOPS: u64 = 1_000_000;

/// The one unit of work: a dependent multiply-add that the compiler must not fold.
fn work(loops: u64) {
    let mut x = black_box(1_u64);
    for i in 0..loops {
        x = black_box(x.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(i));
    }
    black_box(x);
}

/// Loops per millisecond of this vCPU, to be called while nobody competes with it.
pub(crate) fn calibrate() -> u64 {
    let fastest = (0..BURSTS)
        .map(|_| {
            let start = Instant::now();
            work(BURST_LOOPS);
            start.elapsed()
        })
        .min()
        .expect("BURSTS is not zero");
    let ns = u64::try_from(fastest.as_nanos()).expect("a burst takes less than centuries").max(1);
    (BURST_LOOPS * 1_000_000 / ns).max(1)
}

/// A running load. Dropping it stops it.
pub(crate) struct Load {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    stop: AtomicBool,
    done_loops: AtomicU64,
    start: Instant,
    loops_per_ms: u64,
    loops_per_period: u64,
}

impl Shared {
    fn owed_loops(&self) -> u64 {
        let elapsed_ms = u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX);
        (elapsed_ms / PERIOD_MS + 1).saturating_mul(self.loops_per_period)
    }
}

impl Load {
    /// Starts the load. `percent` may exceed 100: the backlog then grows by design.
    pub(crate) fn start(loops_per_ms: u64, percent: u64) -> Result<Self> {
        let loops_per_period = loops_per_ms * PERIOD_MS * percent / 100;
        ensure!(loops_per_ms > 0 && loops_per_period > 0, "a load of nothing");
        let shared = Arc::new(Shared {
            stop: AtomicBool::new(false),
            done_loops: AtomicU64::new(0),
            start: Instant::now(),
            loops_per_ms,
            loops_per_period,
        });
        let in_thread = Arc::clone(&shared);
        Ok(Self { shared, thread: Some(thread::spawn(move || run(&in_thread))) })
    }

    /// Milliseconds of uncontended vCPU time: done, and owed but not done. And the age in ms.
    pub(crate) fn status(&self) -> (u64, u64, u64) {
        let done = self.shared.done_loops.load(Ordering::Relaxed);
        let backlog = self.shared.owed_loops().saturating_sub(done);
        let age_ms = u64::try_from(self.shared.start.elapsed().as_millis()).unwrap_or(u64::MAX);
        (done / self.shared.loops_per_ms, backlog / self.shared.loops_per_ms, age_ms)
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().expect("the load thread does not panic");
        }
    }
}

fn run(shared: &Shared) {
    while !shared.stop.load(Ordering::Relaxed) {
        let done = shared.done_loops.load(Ordering::Relaxed);
        let owed = shared.owed_loops();
        if owed > done {
            let chunk = (owed - done).min(shared.loops_per_ms); // a millisecond: stops promptly
            work(chunk);
            shared.done_loops.fetch_add(chunk, Ordering::Relaxed);
        } else {
            let period = Duration::from_millis(PERIOD_MS);
            let into_period = shared.start.elapsed().as_nanos() % period.as_nanos();
            let into_period = Duration::from_nanos(u64::try_from(into_period).unwrap_or(0));
            thread::sleep(period - into_period);
        }
    }
}
