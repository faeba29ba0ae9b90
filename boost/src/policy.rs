//! The accounts: who may be favoured, for how long, and when it has paid back (BST-01, BST-02).
//!
//! Sans-IO: times are arguments, in nanoseconds of one monotonic clock. A VM's **tokens** are its
//! budget. Its **debt** is the favoured CPU time that is not paid back. With `n` competitors for a
//! core, a fair share of it is 1/n: a VM that ran for D while it was favoured had D (n-1)/n more
//! than its share. A paying VM gets next to nothing. It is even after a wall time of D (n-1), of
//! which its share would have been D (n-1)/n. If it has CPU time meanwhile, its payment takes
//! longer; CPU time beyond its share is added to the debt, up to [`DEBT_MAX_NS`]. `n` is measured
//! over the last second: [`competitors`]. Without competition nobody pays, and nothing is owed.

use nightporter_api::BoostAccount;

use crate::protocol::{Budget, Claim};

/// Favoured CPU time on one core that is not paid back, of all VMs together.
pub const UNPAID_MAX_NS: u64 = 20_000_000;
/// A payment in which a VM has more than its share does not make its debt larger than this, so that
/// it ends. Boosts of its own wait at a fifth of it.
pub const DEBT_MAX_NS: u64 = 100_000_000;
/// Favoured CPU time on one core in a row; then its neighbours have a turn.
pub const ROW_MAX_NS: u64 = 10_000_000;
/// A neighbour's turn: a slice of the default class, which is 2.8 to 4 ms (`base_slice_ns`).
pub const SLICE_NS: u64 = 4_000_000;
/// A boost that could not be longer does not begin.
pub const LEAST_NS: u64 = 500_000;
/// Boosts end when the threads have slept longer.
pub const SLEEP_MAX_NS: u64 = 1_000_000;
/// Ends that are remembered, and how many of them may be waste.
pub const ENDS: u32 = 32;
/// A quarter of them.
pub const WASTE_MAX: u32 = 8;
/// No boost for so long after that.
pub const REST_NS: u64 = 10_000_000_000;
/// More competitors are not believed.
const COMPETITORS_MAX: f64 = 64.0;
/// Fewer competitors than this are none.
const COMPETITION_MIN: f64 = 1.05;

/// Why a boost ended.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Ended {
    /// The daemon said so, or the time for reading was over.
    Served,
    /// The guest had not acknowledged in time.
    Time,
    /// The budget is empty.
    Budget,
    /// The threads slept.
    Slept,
    /// The core's neighbours have a turn, or are owed too much.
    Neighbours,
    /// Something failed, or somebody is gone.
    TakenBack,
}

/// CPU time for which a VM may be favoured.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Allowance {
    /// So much.
    pub cpu_ns: u64,
    /// Why a boost ends that has used it up.
    pub limit: Ended,
}

/// Why a boost does not begin now.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Wait {
    /// The budget, or the half of it that this claim may have, is used up.
    Empty,
    /// Boosts were learned to be waste.
    Rests,
    /// Too much is owed on the core, or it is the neighbours' turn.
    Neighbours,
}

/// A while in which a VM paid.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    /// Its length.
    pub wall_ns: u64,
    /// CPU time that the VM had meanwhile.
    pub cpu_ns: u64,
    /// Competitors for each core.
    pub n: f64,
    /// Cores that the VM wants itself, at least 1.
    pub own: f64,
}

impl Step {
    /// Debt that is paid. A debt of D is D (n-1)/n more than the VM's share, which of this while
    /// was `own`/n. Below zero: it had more than that share, at most all that it had.
    #[must_use]
    pub fn paid_ns(&self) -> i64 {
        let Self { wall_ns, cpu_ns, n, own } = *self;
        #[expect(clippy::cast_precision_loss, reason = "milliseconds are far below 2^52 ns")]
        let (wall, cpu) = (wall_ns as f64, cpu_ns as f64);
        let paid = (own.max(1.0) * wall - n * cpu) / (n - 1.0).max(COMPETITION_MIN - 1.0);
        #[expect(clippy::cast_possible_truncation, reason = "it is not")]
        let paid = paid.max(-cpu) as i64;
        paid
    }
}

/// The account of one VM.
#[derive(Clone, Debug)]
pub struct Account {
    budget_ns: u64,
    window_ns: u64,
    /// Below zero after a boost that had more than there was: it is looked at each millisecond.
    tokens_ns: i64,
    refilled_at: u64,
    debt_ns: u64,
    /// The last ends, newest lowest; a bit is one that was waste.
    ends: u32,
    rests_until: u64,
    /// Its numbers for operators.
    pub numbers: BoostAccount,
}

impl Account {
    /// A full bucket.
    #[must_use]
    pub fn new(now: u64, budget: Budget) -> Self {
        Self {
            budget_ns: budget.cpu_us.saturating_mul(1000),
            window_ns: budget.window_us.saturating_mul(1000).max(1),
            tokens_ns: signed(budget.cpu_us.saturating_mul(1000)),
            refilled_at: now,
            debt_ns: 0,
            ends: 0,
            rests_until: 0,
            numbers: BoostAccount::default(),
        }
    }

    /// Favoured CPU time that is not paid back.
    #[must_use]
    pub const fn debt_ns(&self) -> u64 {
        self.debt_ns
    }

    /// Its whole budget.
    #[must_use]
    pub const fn budget_ns(&self) -> u64 {
        self.budget_ns
    }

    /// CPU time for which a boost for `claim` may favour it, from its beginning on, on a core where
    /// others owe `unpaid_ns`, or will, and neighbours want their turn after `row_ns`; `alone`: no
    /// other VM there has boost.
    ///
    /// # Errors
    /// It may not be favoured.
    pub fn allowance(
        &mut self,
        now: u64,
        claim: Claim,
        (unpaid_ns, alone): (u64, bool),
        row_ns: u64,
    ) -> Result<Allowance, Wait> {
        if now < self.rests_until {
            return Err(Wait::Rests);
        }
        self.refill(now);
        let kept = if claim == Claim::Turn { self.budget_ns / 2 } else { 0 };
        let tokens = u64::try_from(self.tokens_ns - signed(kept)).unwrap_or(0);
        if tokens < LEAST_NS {
            return Err(Wait::Empty);
        }
        let limit = if alone { UNPAID_MAX_NS.max(self.budget_ns) } else { UNPAID_MAX_NS };
        let room = limit.saturating_sub(unpaid_ns + self.debt_ns).min(row_ns);
        if room < LEAST_NS {
            return Err(Wait::Neighbours);
        }
        let limit = if room < tokens { Ended::Neighbours } else { Ended::Budget };
        Ok(Allowance { cpu_ns: tokens.min(room), limit })
    }

    /// It was favoured for a while: for as long as it ran and waited for a core ([`favoured_ns`]),
    /// with `own` 1.
    pub fn spend(&mut self, now: u64, step: Step) {
        self.refill(now);
        self.tokens_ns = self.tokens_ns.saturating_sub(signed(step.cpu_ns));
        self.numbers.favoured_us += step.cpu_ns / 1000;
        if step.n >= COMPETITION_MIN {
            // By weight it may have waited longer than it would have without.
            self.debt_ns = self.debt_ns.saturating_add_signed(step.paid_ns().saturating_neg());
        }
    }

    /// Wall time after which it is even, with `n` competitors, if it wants `own` cores.
    #[must_use]
    pub fn payment_ns(&self, n: f64, own: f64) -> u64 {
        #[expect(clippy::cast_precision_loss, reason = "milliseconds are far below 2^52 ns")]
        let wall = self.debt_ns as f64 * (n - 1.0).max(0.0) / own.max(1.0);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it is not")]
        let wall = wall as u64;
        wall
    }

    /// After [`Self::pay`] it would be even.
    #[must_use]
    pub fn would_be_even(&self, step: Step) -> bool {
        step.n < COMPETITION_MIN || step.paid_ns() >= signed(self.debt_ns)
    }

    /// It paid for a while. If threads of other VMs waited for its cores (`contested`), CPU time
    /// beyond its share is added to the debt, which does not grow beyond [`DEBT_MAX_NS`] by that.
    /// `true`: it is even.
    pub fn pay(&mut self, step: Step, contested: bool) -> bool {
        if step.n < COMPETITION_MIN {
            self.debt_ns = 0;
        } else {
            let paid = step.paid_ns();
            let paid = if contested { paid } else { paid.max(0) };
            let most = self.debt_ns.max(DEBT_MAX_NS);
            self.debt_ns = self.debt_ns.saturating_add_signed(paid.saturating_neg()).min(most);
        }
        self.debt_ns == 0
    }

    /// A boost ended. `served`: the VM took some of what it was owed, so that time or an empty
    /// budget did no more than limit it.
    pub fn end(&mut self, now: u64, ended: Ended, served: bool) {
        let numbers = &mut self.numbers;
        match ended {
            Ended::Served | Ended::TakenBack => {}
            Ended::Time => numbers.ended_by_time += 1,
            Ended::Budget => numbers.ended_by_budget += 1,
            Ended::Slept => numbers.ended_by_sleep += 1,
            Ended::Neighbours => numbers.waits += 1,
        }
        if ended == Ended::TakenBack {
            return;
        }
        let waste = matches!(ended, Ended::Time | Ended::Budget) && !served;
        self.ends = self.ends << 1 | u32::from(waste);
        if self.ends.count_ones() > WASTE_MAX {
            self.ends = 0;
            self.rests_until = now + REST_NS;
            self.numbers.rests += 1;
        }
    }

    /// A boost did not begin.
    pub fn wait(&mut self, wait: Wait) {
        match wait {
            Wait::Empty => self.numbers.empty += 1,
            Wait::Neighbours => self.numbers.waits += 1,
            Wait::Rests => {}
        }
    }

    fn refill(&mut self, now: u64) {
        let passed = u128::from(now.saturating_sub(self.refilled_at));
        let gained = passed * u128::from(self.budget_ns) / u128::from(self.window_ns);
        if gained == 0 {
            return; // so that short spans add up
        }
        let gained = i64::try_from(gained).unwrap_or(i64::MAX);
        self.tokens_ns = self.tokens_ns.saturating_add(gained).min(signed(self.budget_ns));
        self.refilled_at = now;
    }
}

/// Time for which favoured threads ran and waited on so many cores in `wall_ns`. By weight they may
/// wait: `schedstat` counted `waited_ns`, also of waits that began before the boost, so that it is
/// believed only as far as the threads' states (`runnable_ns`) agree. Threads of a VM that wait for
/// each other do not wait for a neighbour: together they have at most all of the cores.
#[must_use]
pub fn favoured_ns(
    (used_ns, waited_ns): (u64, u64),
    runnable_ns: u64,
    cores: usize,
    wall_ns: u64,
) -> u64 {
    let waited_ns = waited_ns.min(runnable_ns.saturating_sub(used_ns));
    let most_ns = wall_ns.saturating_mul(u64::try_from(cores).unwrap_or(1));
    (used_ns + waited_ns).min(most_ns).max(used_ns)
}

/// Nanoseconds that are few.
fn signed(ns: u64) -> i64 {
    i64::try_from(ns).unwrap_or(i64::MAX)
}

/// Favoured CPU time in a row on the cores of a VM, of all VMs there, so that a neighbour waits at
/// most [`ROW_MAX_NS`] longer.
#[derive(Clone, Copy, Debug, Default)]
pub struct Row {
    favoured_ns: u64,
    last_at: u64,
    turn_until: u64,
}

impl Row {
    /// Nobody there is favoured now. The neighbours may have had a slice: then the row is over.
    pub fn pause(&mut self, now: u64) {
        if now.saturating_sub(self.last_at) >= SLICE_NS {
            self.favoured_ns = 0;
        }
    }

    /// CPU time that a boost may have from its beginning on; none while the neighbours have their
    /// turn. `others_ns`: that boosts of other VMs which last have had.
    #[must_use]
    pub const fn room(&self, now: u64, others_ns: u64) -> u64 {
        if now < self.turn_until {
            return 0;
        }
        ROW_MAX_NS.saturating_sub(self.favoured_ns + others_ns)
    }

    /// A boost has ended that had so much, with `n` competitors.
    pub fn note(&mut self, now: u64, cpu_ns: u64, n: f64) {
        self.favoured_ns += cpu_ns;
        self.last_at = now;
        if self.favoured_ns + LEAST_NS > ROW_MAX_NS {
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "few")]
            let neighbours = (n - 1.0).clamp(1.0, 64.0).ceil() as u64;
            self.turn_until = now + SLICE_NS * neighbours;
            self.favoured_ns = 0;
        }
    }
}

/// What the threads of a VM have of the cores and wait for, over about a second.
#[derive(Clone, Copy, Debug, Default)]
pub struct Demand {
    last: Option<(u64, [u64; 2])>,
    /// Cores that it has, and that it waits for.
    means: [f64; 2],
    threads: f64,
}

impl Demand {
    /// At `now` they had used and waited for so many nanoseconds since they began; `threads`: how
    /// many there are, and how many run or wait, which is what is known of them at first.
    pub fn note(&mut self, now: u64, used_and_waited_ns: [u64; 2], threads: [usize; 2]) {
        #[expect(clippy::cast_precision_loss, reason = "few threads")]
        let [count, runnable] = threads.map(|threads| threads as f64);
        self.threads = count;
        let Some((at, before)) = self.last.replace((now, used_and_waited_ns)) else {
            self.means = [0.0, runnable];
            return;
        };
        let ns = |ns: u64, before: u64| {
            #[expect(clippy::cast_precision_loss, reason = "differences are far below 2^52 ns")]
            let ns = ns.saturating_sub(before) as f64;
            ns
        };
        let span = ns(now, at);
        if span > 0.0 {
            let weight = (span / 1e9).min(1.0);
            for (place, mean) in self.means.iter_mut().enumerate() {
                let cores = ns(used_and_waited_ns[place], before[place]) / span;
                // The kernel counts a wait when it is over: a span may have those of the one
                // before.
                *mean += weight * (cores.min(4.0 * count.max(1.0)) - *mean);
            }
        }
    }

    /// Cores that it wants.
    #[must_use]
    pub const fn wanted(&self) -> f64 {
        self.means[0] + self.means[1]
    }

    /// Cores that its threads can want at once: waits are counted when they are over, so that
    /// [`Self::wanted`] may be more for a moment.
    const fn wanted_at_once(&self) -> f64 {
        self.wanted().min(self.threads)
    }

    /// Those of so many cores that it wants.
    #[must_use]
    pub fn wanted_of(&self, cores: usize) -> f64 {
        self.wanted().min(count(cores))
    }

    /// Cores that it has.
    #[must_use]
    pub const fn had(&self) -> f64 {
        self.means[0]
    }
}

/// How many compete for each of the `cores` of a VM whose demand is `own`. Of another VM counts the
/// part of its cores that are among them. If threads wait, the cores have run other VMs or other
/// programs: where those take half of a core, twice as many compete for the rest. A VM whose vCPUs
/// wait for each other does not compete with itself: it counts as one that wants all its cores, and
/// its share stays that of all its vCPUs.
#[must_use]
pub fn competitors<'a>(
    cores: usize,
    own: &Demand,
    others: impl Iterator<Item = (f64, &'a Demand)>,
) -> f64 {
    let sum = |(wanted, had): (f64, f64), (part, it): (f64, &Demand)| {
        (wanted + part * it.wanted(), had + part * it.had())
    };
    let (wanted, had) = others.fold((own.wanted(), own.had()), sum);
    let cores = count(cores);
    let n = if had < wanted / COMPETITORS_MAX {
        wanted / cores // Nothing is known at first, and little where the VMs have hardly run.
    } else {
        // A VM that may run elsewhere, too, and does not wait has CPU time there.
        1.0 + (wanted - had) / had.min(cores)
    };
    (n * (cores / own.wanted_at_once()).min(1.0)).max(1.0)
}

/// So many cores, at least 1.
fn count(cores: usize) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "few cores")]
    let cores = cores.max(1) as f64;
    cores
}

#[cfg(test)]
mod tests {
    use std::iter;

    use super::*;

    const MS: u64 = 1_000_000;

    fn account() -> Account {
        Account::new(0, Budget { cpu_us: 15_000, window_us: 90_000 })
    }

    /// The allowance without a limit by a row.
    fn allowed(
        it: &mut Account,
        now: u64,
        claim: Claim,
        unpaid_ns: u64,
        alone: bool,
    ) -> Result<u64, Wait> {
        let allowance = it.allowance(now, claim, (unpaid_ns, alone), u64::MAX);
        allowance.map(|it| it.cpu_ns)
    }

    /// All the time.
    fn ran(ns: u64, n: f64) -> Step {
        Step { wall_ns: ns, cpu_ns: ns, n, own: 1.0 }
    }

    #[test]
    fn bst_02_a_budget_is_a_bucket_of_rate_b_by_w_and_depth_b() {
        let mut it = account();
        assert_eq!(allowed(&mut it, 0, Claim::Bytes, 0, true), Ok(15 * MS));
        it.spend(0, ran(15 * MS, 1.0));
        assert_eq!(allowed(&mut it, 0, Claim::Bytes, 0, true), Err(Wait::Empty));
        assert_eq!(allowed(&mut it, 30 * MS, Claim::Bytes, 0, true), Ok(5 * MS));
        assert_eq!(allowed(&mut it, 90 * MS, Claim::Bytes, 0, true), Ok(15 * MS));
        assert_eq!(
            allowed(&mut it, 900 * MS, Claim::Bytes, 0, true),
            Ok(15 * MS),
            "no more than B"
        );
        assert_eq!(it.numbers.favoured_us, 15_000);
    }

    #[test]
    fn bst_02_what_a_boost_used_beyond_its_tokens_is_paid_from_the_next_ones() {
        let mut it = account();
        let (overshoot, mut most) = (MS, 0);
        let mut used = 0;
        for now in (0..900 * MS).step_by(100_000) {
            if let Ok(allowed) = allowed(&mut it, now, Claim::Bytes, 0, true) {
                used += allowed + overshoot;
                it.spend(now, ran(allowed + overshoot, 1.0));
            }
            most = most.max(used.saturating_sub(now / 6));
        }
        assert_eq!(most, 15 * MS + overshoot, "B and one overshoot beyond its rate");
        assert!(used > 150 * MS, "and all that came in: {used}");
    }

    #[test]
    fn bst_02_what_a_favoured_vm_waits_is_paid() {
        let mut it = account();
        it.spend(0, ran(6 * MS, 3.0));
        assert_eq!(it.debt_ns(), 6 * MS);
        // By weight it waits for 2 ms before it has the core.
        it.spend(0, Step { wall_ns: 5 * MS, cpu_ns: 3 * MS, n: 3.0, own: 1.0 });
        assert_eq!(it.debt_ns(), 8 * MS);
        it.spend(0, Step { wall_ns: 4 * MS, cpu_ns: 0, n: 3.0, own: 1.0 });
        assert_eq!(it.debt_ns(), 6 * MS);
        assert_eq!(it.numbers.favoured_us, 9_000);
    }

    #[test]
    fn bst_02_only_what_the_kernel_counted_as_a_wait_is_one() {
        // The states that are seen each millisecond have 3 ms, by chance; nothing waited.
        assert_eq!(favoured_ns((2 * MS, 0), 3 * MS, 1, 3 * MS), 2 * MS);
        assert_eq!(favoured_ns((2 * MS, MS / 2), 3 * MS, 1, 3 * MS), 5 * MS / 2);
        // A wait of 20 ms that began before the boost.
        assert_eq!(favoured_ns((2 * MS, 20 * MS), 3 * MS, 1, 3 * MS), 3 * MS);
        // Four vCPUs on two cores wait for each other.
        assert_eq!(favoured_ns((10 * MS, 10 * MS), 20 * MS, 2, 5 * MS), 10 * MS);
        // Times are as old as a tick.
        assert_eq!(favoured_ns((4 * MS, 0), MS, 1, MS), 4 * MS);
    }

    #[test]
    fn bst_02_looking_often_does_not_lose_tokens() {
        let mut it = account();
        it.spend(0, ran(15 * MS, 1.0));
        for at in 0..30 * MS / 7 {
            it.refill(at * 7);
        }
        assert_eq!(allowed(&mut it, 30 * MS, Claim::Bytes, 0, true).unwrap().div_ceil(MS), 5);
    }

    #[test]
    fn bst_01_half_of_the_budget_is_for_bytes() {
        let mut it = account();
        assert_eq!(allowed(&mut it, 0, Claim::Turn, 0, true), Ok(7_500_000));
        it.spend(0, ran(7_500_000, 1.0));
        assert_eq!(allowed(&mut it, 0, Claim::Turn, 0, true), Err(Wait::Empty));
        assert_eq!(allowed(&mut it, 0, Claim::Bytes, 0, true), Ok(7_500_000));
        assert_eq!(allowed(&mut it, 0, Claim::Reading, 0, true), Ok(7_500_000));
    }

    #[test]
    fn bst_02_what_all_owe_on_a_core_is_bounded() {
        let mut it = account();
        assert_eq!(allowed(&mut it, 0, Claim::Bytes, 12 * MS, false), Ok(8 * MS));
        it.spend(0, ran(8 * MS, 3.0));
        assert_eq!(it.debt_ns(), 8 * MS, "all of it");
        assert_eq!(allowed(&mut it, 0, Claim::Bytes, 12 * MS, false), Err(Wait::Neighbours));
        let mut alone = Account::new(0, Budget { cpu_us: 30_000, window_us: 90_000 });
        assert_eq!(allowed(&mut alone, 0, Claim::Bytes, 0, true), Ok(30 * MS));
        assert_eq!(allowed(&mut alone, 0, Claim::Bytes, 0, false), Ok(20 * MS));
    }

    #[test]
    fn bst_02_with_n_competitors_a_debt_costs_n_minus_1_times_its_length() {
        let step = |wall_ns, cpu_ns, n| Step { wall_ns, cpu_ns, n, own: 1.0 };
        for n in [2, 3, 5_u32] {
            let mut it = account();
            it.spend(0, ran(6 * MS, n.into()));
            for ms in 1..=6 * (n - 1) {
                assert_eq!(it.would_be_even(step(MS, 0, n.into())), ms == 6 * (n - 1));
                assert_eq!(it.payment_ns(n.into(), 1.0), u64::from(6 * (n - 1) + 1 - ms) * MS);
                assert_eq!(it.pay(step(MS, 0, n.into()), true), ms == 6 * (n - 1), "{n}: {ms}");
            }
        }
        // What it got while it paid is not paid.
        let mut it = account();
        it.spend(0, ran(6 * MS, 2.0));
        assert!(!it.pay(step(6 * MS, MS, 2.0), true));
        assert_eq!(it.debt_ns(), 2 * MS);
        // And nobody is there to be paid.
        assert!(it.pay(step(0, 0, 1.0), false));
        it.spend(0, ran(MS, 1.0));
        assert_eq!(it.debt_ns(), 0);
        // Two vCPUs have two shares to stand back from.
        it.spend(0, ran(6 * MS, 2.0));
        assert!(it.pay(Step { wall_ns: 3 * MS, cpu_ns: 0, n: 2.0, own: 2.0 }, true));
    }

    #[test]
    fn bst_02_what_a_vm_has_beyond_its_share_while_it_pays_is_owed_too() {
        let step = |wall_ns, cpu_ns| Step { wall_ns, cpu_ns, n: 3.0, own: 1.0 };
        let mut it = account();
        it.spend(0, ran(2 * MS, 3.0));
        // Its neighbours waited while it finished its slice.
        assert!(!it.pay(step(3 * MS, 3 * MS), true));
        assert_eq!(it.debt_ns(), 5 * MS);
        // Nobody wanted the core.
        assert!(!it.pay(step(3 * MS, 3 * MS), false));
        assert_eq!(it.debt_ns(), 5 * MS);
        assert!(it.pay(step(10 * MS, 0), true));
        // In any case never more than it had.
        it.spend(0, ran(MS, 3.0));
        it.pay(step(0, 3 * MS), true);
        assert_eq!(it.debt_ns(), 4 * MS);
    }

    #[test]
    fn bst_01_a_quarter_of_waste_stops_boosts_for_ten_seconds() {
        let mut it = account();
        let wastes = |it: &mut Account, ended, times| {
            for _ in 0..times {
                it.end(0, ended, false);
            }
        };
        wastes(&mut it, Ended::Time, 4);
        wastes(&mut it, Ended::Served, 24);
        wastes(&mut it, Ended::Budget, 4);
        wastes(&mut it, Ended::TakenBack, 40);
        assert_eq!(it.numbers.rests, 0);
        wastes(&mut it, Ended::Slept, 4); // the first four are forgotten
        wastes(&mut it, Ended::Time, 4);
        assert_eq!(it.numbers.rests, 0);
        wastes(&mut it, Ended::Budget, 1);
        assert_eq!(it.numbers.rests, 1);
        assert_eq!(allowed(&mut it, REST_NS - 1, Claim::Bytes, 0, true), Err(Wait::Rests));
        assert_eq!(allowed(&mut it, REST_NS, Claim::Bytes, 0, true), Ok(15 * MS));
        let numbers = &it.numbers;
        assert_eq!((numbers.ended_by_time, numbers.ended_by_budget), (8, 5));
    }

    #[test]
    fn bst_01_a_boost_in_which_the_vm_took_some_of_what_it_was_owed_was_limited_and_not_waste() {
        let mut it = account();
        for _ in 0..40 {
            it.end(0, Ended::Budget, true);
            it.end(0, Ended::Time, true);
        }
        assert_eq!((it.numbers.ended_by_budget, it.numbers.ended_by_time), (40, 40));
        assert_eq!(it.numbers.rests, 0);
    }

    #[test]
    fn bst_02_a_boost_knows_what_limits_it() {
        let mut it = account();
        let mut limit = |unpaid_ns, row_ns| {
            it.allowance(0, Claim::Bytes, (unpaid_ns, false), row_ns).map(|it| it.limit)
        };
        assert_eq!(limit(0, u64::MAX), Ok(Ended::Budget));
        assert_eq!(limit(0, 14 * MS), Ok(Ended::Neighbours), "a row");
        assert_eq!(limit(6 * MS, u64::MAX), Ok(Ended::Neighbours), "others' debts");
        assert_eq!(limit(0, LEAST_NS - 1), Err(Wait::Neighbours));
        it.spend(0, ran(13 * MS, 1.0));
        // Its budget had less than the row when it began, whatever has come in since.
        let allowance = it.allowance(0, Claim::Bytes, (0, false), 10 * MS);
        assert_eq!(allowance, Ok(Allowance { cpu_ns: 2 * MS, limit: Ended::Budget }));
    }

    #[test]
    fn bst_02_after_ten_milliseconds_in_a_row_each_neighbour_has_a_slice() {
        let mut row = Row::default();
        let at = 100 * MS;
        row.pause(at);
        assert_eq!(row.room(at, 0), ROW_MAX_NS);
        row.note(at + 6 * MS, 6 * MS, 3.0);
        row.pause(at + 7 * MS);
        assert_eq!(row.room(at + 7 * MS, 0), 4 * MS);
        row.note(at + 11 * MS, 4 * MS, 3.0);
        assert_eq!(row.room(at + 11 * MS, 0), 0);
        assert_eq!(row.room(at + 19 * MS - 1, 0), 0);
        row.pause(at + 19 * MS);
        assert_eq!(row.room(at + 19 * MS, 0), ROW_MAX_NS);
        // A slice without a boost ends a row.
        row.note(at + 40 * MS, 6 * MS, 3.0);
        row.pause(at + 44 * MS);
        assert_eq!(row.room(at + 44 * MS, 0), ROW_MAX_NS);
    }

    #[test]
    fn bst_02_a_boost_that_lasts_does_not_end_the_row_that_it_is_in() {
        let mut row = Row::default();
        let at = 100 * MS;
        row.pause(at);
        row.note(at + 6 * MS, 6 * MS, 3.0);
        // The next one begins at once: it has 4 ms. After 4 ms of it an order comes once more.
        row.pause(at + 7 * MS);
        assert_eq!(row.room(at + 7 * MS, 0), 4 * MS);
        assert_eq!(row.room(at + 11 * MS, 0), 4 * MS, "from its beginning on");
        // And what others have meanwhile is of the same row.
        assert_eq!(row.room(at + 11 * MS, 3 * MS), MS);
    }

    #[test]
    fn bst_02_competitors_are_those_who_use_the_core_or_wait_for_it() {
        let mut demand = Demand::default();
        demand.note(0, [0, 0], [2, 1]);
        assert!((demand.wanted() - 1.0).abs() < 1e-9);
        for tenth in 1..=50 {
            demand.note(tenth * 100 * MS, [tenth * 30 * MS, tenth * 20 * MS], [2, 1]);
        }
        assert!((demand.wanted() - 0.5).abs() < 0.01, "{demand:?}");
        assert!((demand.had() - 0.3).abs() < 0.01, "{demand:?}");
    }

    #[test]
    fn bst_02_other_programs_that_have_a_part_of_the_core_make_competitors_more() {
        // Each of three always wants a core, and has so many hundredths of one.
        for (hundredths, expected) in [(33, 3.0), (25, 4.0), (10, 10.0)] {
            let mut demands = [Demand::default(); 3];
            for demand in &mut demands {
                for tenth in 0..=50 {
                    let used = tenth * hundredths * MS;
                    demand.note(tenth * 100 * MS, [used, tenth * 100 * MS - used], [1, 1]);
                }
            }
            let n = competitors(1, &demands[0], demands[1..].iter().map(|it| (1.0, it)));
            assert!((n - expected).abs() < 0.1, "{n}, not {expected}");
        }
        let mut idle = Demand::default();
        assert!((competitors(1, &idle, iter::empty()) - 1.0).abs() < 1e-9);
        idle.note(0, [0, 0], [3, 2]);
        let n = competitors(2, &idle, [(0.5, &idle)].into_iter());
        assert!((n - 1.5).abs() < 1e-9, "as long as nothing else is known: {n}");
        for tenth in 1..=100 {
            idle.note(tenth * 100 * MS, [tenth * 40 * MS, 0], [3, 1]);
        }
        let n = competitors(1, &idle, iter::empty());
        assert!((n - 1.0).abs() < 0.01, "it has all that it wants: {n}");
    }

    /// A VM that has had and waited for so many hundredths of a core for five seconds.
    fn demand(had: u64, waited: u64) -> Demand {
        let mut it = Demand::default();
        for tenth in 0..=50 {
            it.note(tenth * 100 * MS, [had, waited].map(|it| tenth * it * MS), [16, 1]);
        }
        it
    }

    #[test]
    fn bst_02_a_vm_that_runs_on_other_cores_is_no_competitor() {
        // The other one may run on all of 16 cores, has 15 of them and does not wait.
        let n = competitors(1, &demand(100, 0), [(1.0 / 16.0, &demand(1500, 0))].into_iter());
        assert!((n - 1.0).abs() < 0.01, "{n}");
        // With a 16th vCPU it waits, and the VM, too: one core has two threads.
        let n = competitors(1, &demand(50, 50), [(1.0 / 16.0, &demand(1550, 50))].into_iter());
        assert!((1.5..2.0).contains(&n), "{n}");
    }

    #[test]
    fn bst_02_a_vm_does_not_compete_with_itself() {
        let n = competitors(2, &demand(200, 200), iter::empty());
        assert!((n - 1.0).abs() < 0.01, "four vCPUs on two cores: {n}");
        // Beside a fifth thread four have four fifths of both cores.
        let own = demand(160, 240);
        let n = competitors(2, &own, [(1.0, &demand(40, 60))].into_iter());
        assert!((own.wanted_of(2) / n - 1.6).abs() < 0.01, "{n}");
        // Favoured for 5 ms of both cores, they have 2 ms too much.
        let mut it = account();
        it.spend(0, ran(10 * MS, n));
        let paid = |wall_ns| Step { wall_ns, cpu_ns: 0, n, own: own.wanted_of(2) }.paid_ns();
        assert!((9_000_000..11_000_000).contains(&paid(1_250_000)), "{}", paid(1_250_000));
    }

    #[test]
    fn bst_02_a_wait_that_is_counted_late_does_not_make_a_vm_compete_with_itself() {
        let late = || {
            let mut it = Demand::default();
            it.note(0, [0, 0], [1, 1]);
            it.note(1000 * MS, [300 * MS, 1200 * MS], [1, 1]);
            it
        };
        let n = competitors(1, &late(), [(1.0, &late()), (1.0, &late())].into_iter());
        assert!((n - 5.0).abs() < 0.01, "{n}");
    }

    #[test]
    fn bst_02_a_payment_does_not_make_a_debt_of_more_than_a_hundred_milliseconds() {
        let mut it = account();
        it.spend(0, ran(10 * MS, 2.0));
        for _ in 0..1000 {
            assert!(!it.pay(ran(MS, 2.0), true));
        }
        assert_eq!(it.debt_ns(), DEBT_MAX_NS);
        // A VM that alone has boost on its cores may owe more, and that does not grow.
        it.spend(0, ran(20 * MS, 2.0));
        assert!(!it.pay(ran(MS, 2.0), true));
        assert_eq!(it.debt_ns(), DEBT_MAX_NS + 20 * MS);
    }
}
