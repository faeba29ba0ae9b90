//! How long echoes take whose times are fixed beforehand, and whether that is too long.
//!
//! A sender of one echo after the other sends none while the other side stands: a worker that
//! stands for 50 ms in each 200 makes one echo of thousands slow. So an echo is due every
//! [`EVERY`], whatever became of the one before, and the time since it was due counts. Then each of
//! them is so much of the time that passes: a hundredth of the echoes is a hundredth of it.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};

/// An echo is due every so often.
pub(crate) const EVERY: Duration = Duration::from_millis(1);
/// An echo may take so long in 99 of 100 cases, or [`TIMES_ALONE`] as long as alone.
const P99_MAX: Duration = Duration::from_millis(2);
const TIMES_ALONE: u32 = 5;
/// An echo beside an attack may take so long at most, or twice as long as the longest alone.
const LONGEST_MAX: Duration = Duration::from_millis(20);
/// An echo that takes longer is part of a stall.
const STALL: Duration = Duration::from_millis(2);
/// Of a hundred thousand echoes so many more than alone may be part of stalls, and so many in any
/// one minute: those who make the worker wait have their 100 ms and 10 ms early.
const STALLED_MAX: u64 = 1_000;
const STALLED_MAX_IN_A_MINUTE: u64 = 5_000;

/// How many things took so many microseconds.
#[derive(Clone, Default)]
pub(crate) struct Times {
    counts: BTreeMap<u64, u64>,
}

impl Times {
    pub(crate) fn add(&mut self, time: Duration) {
        let us = u64::try_from(time.as_micros()).unwrap();
        // Three digits are enough, and few enough for an hour.
        let unit = 10_u64.pow(us.max(1).ilog10().saturating_sub(2));
        *self.counts.entry(us / unit * unit).or_default() += 1;
    }

    pub(crate) fn join(&mut self, other: &Self) {
        other.counts.iter().for_each(|(us, n)| *self.counts.entry(*us).or_default() += n);
    }

    fn all(&self) -> u64 {
        self.counts.values().sum()
    }

    /// So many of a thousand took no longer.
    fn at(&self, of_1000: u64) -> Duration {
        let mut left = (self.all() * of_1000).div_ceil(1000).max(1);
        let mut counts = self.counts.iter();
        let us = counts.find(|(_, n)| {
            left = left.saturating_sub(**n);
            left == 0
        });
        Duration::from_micros(us.map_or(0, |(us, _)| *us))
    }

    /// Of a hundred thousand so many were part of stalls.
    fn stalled(&self) -> u64 {
        let stall = u64::try_from(STALL.as_micros()).unwrap();
        let stalled: u64 = self.counts.range(stall + 1..).map(|(_, n)| n).sum();
        stalled * 100_000 / self.all().max(1)
    }

    pub(crate) fn shown(&self) -> String {
        let [median, p99, p999, longest] = [500, 990, 999, 1000].map(|part| self.at(part));
        let (all, stalled) = (self.all(), self.stalled());
        format!(
            "{all} times: median {median:?}, p99 {p99:?}, p99.9 {p999:?}, longest {longest:?}, \
             beyond {STALL:?} {}.{:03} %",
            stalled / 1000,
            stalled % 1000
        )
    }
}

/// Echoes of a minute, or of all of them.
#[derive(Clone, Default)]
pub(crate) struct Echoes {
    pub(crate) alone: Times,
    pub(crate) beside: Times,
    /// How late we were woken for them, where none before was late: what the machine, and not the
    /// daemon, has made of these times.
    pub(crate) woken: Times,
}

impl Echoes {
    pub(crate) fn join(&mut self, other: &Self) {
        self.alone.join(&other.alone);
        self.beside.join(&other.beside);
        self.woken.join(&other.woken);
    }

    pub(crate) fn shown(&self) -> String {
        let [alone, beside, woken] = [&self.alone, &self.beside, &self.woken].map(Times::shown);
        format!("  alone:  {alone}\n  beside: {beside}\n  woken:  {woken}")
    }

    /// The fault of a complete set of times, if there is one.
    pub(crate) fn judge(&self) -> Result<(), String> {
        let most = P99_MAX.max(self.alone.at(990) * TIMES_ALONE);
        if self.beside.at(990) > most {
            return Err(format!("an echo in a hundred takes longer than {most:?}"));
        }
        self.judge_stalls(STALLED_MAX)
    }

    /// Likewise, if they are a few hundred, of a test: none may be long. `is_of_core`: the attack
    /// takes the core itself, for some milliseconds at a time, so that p99 tells of it alone.
    pub(crate) fn judge_all(&self, is_of_core: bool) -> Result<(), String> {
        let [p99, longest] = [990, 1000].map(|part| self.beside.at(part));
        let (alone, most) = (self.alone.at(990), self.alone.at(1000));
        let is_slow = p99 > P99_MAX.max(alone * TIMES_ALONE);
        if is_slow && !is_of_core {
            return Err(format!("p99 is {p99:?}, and {alone:?} alone"));
        }
        if longest > LONGEST_MAX.max(2 * most) {
            return Err(format!("the longest is {longest:?}, and {most:?} alone"));
        }
        Ok(())
    }

    /// Likewise, if they are those of a minute.
    pub(crate) fn judge_minute(&self) -> Result<(), String> {
        self.judge_stalls(STALLED_MAX_IN_A_MINUTE)
    }

    fn judge_stalls(&self, most: u64) -> Result<(), String> {
        let (alone, beside) = (self.alone.stalled(), self.beside.stalled());
        let stalls = || format!("{beside} of 100,000 beyond {STALL:?}, and {alone} alone");
        if beside > alone + most { Err(stalls()) } else { Ok(()) }
    }
}

/// Echoes beside an attack and alone, by turns, so that a machine that others use too is the same
/// for both: `attack` says whether it goes on now, `echo` is one echo. Errors: as of
/// [`Echoes::judge_all`], of each of [`ATTEMPTS`]: a stall of the machine is not there again.
pub(crate) fn judge_beside(is_of_core: bool, mut attack: impl FnMut(bool), mut echo: impl FnMut()) {
    let mut once = || {
        let (mut echoes, mut rest) = (Echoes::default(), Times::default());
        for _ in 0..ROUNDS {
            attack(true);
            let Echoes { alone, beside, woken } = &mut echoes;
            at_fixed_times(ECHOES, beside, woken, &mut echo);
            attack(false);
            at_fixed_times(ECHOES_OF_REST, &mut rest, woken, &mut echo);
            at_fixed_times(ECHOES, alone, woken, &mut echo);
        }
        echoes.judge_all(is_of_core).map_err(|why| format!("{why}\n{}", echoes.shown()))
    };
    for _ in 1..ATTEMPTS {
        match once() {
            Ok(()) => return,
            Err(why) => eprintln!("once more: {why}"),
        }
    }
    once().unwrap_or_else(|why| panic!("{why}"));
}

const ATTEMPTS: usize = 3;

/// Of each such round, and what an attack has left behind is worked off by these.
const ROUNDS: usize = 4;
const ECHOES: u64 = 200;
const ECHOES_OF_REST: u64 = 20;

/// Asks for so many echoes, one every [`EVERY`]: `times` gets how long after its time each was
/// there, and `woken` how late we were woken for it.
pub(crate) fn at_fixed_times(
    count: u64,
    times: &mut Times,
    woken: &mut Times,
    mut echo: impl FnMut(),
) {
    let timer = TimerFd::new(ClockId::CLOCK_MONOTONIC, TimerFlags::TFD_CLOEXEC).unwrap();
    let (mut due, mut left) = (Instant::now(), 0);
    let mut woke = due;
    timer.set(Expiration::Interval(EVERY.into()), TimerSetTimeFlags::empty()).unwrap();
    for _ in 0..count {
        due += EVERY;
        if left == 0 {
            let waits = Instant::now() < due;
            let mut expiries = [0; 8];
            rustix::io::read(&timer, &mut expiries).unwrap();
            left = u64::from_ne_bytes(expiries);
            woken.add(due.elapsed());
            woke = if waits { Instant::now() } else { due };
        }
        left -= 1;
        echo();
        // That we were woken late is not the daemon's fault, nor that of what it has to do with.
        times.add(due.max(woke).elapsed());
    }
}

#[test]
fn echoes_that_are_due_while_one_waits_count_as_late() {
    let (mut times, mut woken, mut n) = (Times::default(), Times::default(), 0);
    at_fixed_times(20, &mut times, &mut woken, || {
        n += 1;
        let start = Instant::now();
        while n == 5 && start.elapsed() < 10 * EVERY {}
    });
    assert_eq!(times.all(), 20);
    let late = times.counts.range(5_000..).map(|(_, n)| n).sum::<u64>();
    assert!(late >= 5, "that one, and those for which 5 ms of its 10 were left: {late}");
}

#[test]
fn a_worker_that_stands_a_quarter_of_the_time_is_found_out() {
    // It stands for so long of each 200 ms. Alone one of 50 echoes takes so long.
    let echoes = |ms: u64, alone: Duration| {
        let mut echoes = Echoes::default();
        for n in 0..1000 {
            let left = EVERY * u32::try_from(ms.saturating_sub(n % 200)).unwrap();
            echoes.beside.add(Duration::from_micros(60) + left);
            echoes.alone.add(if n % 50 == 0 { alone } else { Duration::from_micros(60) });
        }
        echoes
    };
    let [usual, slow] = [Duration::from_micros(90), Duration::from_millis(11)];
    assert_eq!(echoes(0, usual).judge(), Ok(()));
    let p99 = "an echo in a hundred takes longer than 2ms";
    assert_eq!(echoes(51, usual).judge(), Err(p99.into()));
    // And on a machine whose p99 alone would let it pass.
    let stalls = "25000 of 100,000 beyond 2ms, and 2000 alone";
    assert_eq!(echoes(51, slow).judge(), Err(stalls.into()));
    assert_eq!(echoes(51, slow).judge_minute(), Err(stalls.into()));
    assert_eq!(echoes(10, usual).judge_minute(), Ok(()), "as the first who makes it wait may");
}
