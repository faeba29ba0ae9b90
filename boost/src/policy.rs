//! The accounts: who may be favoured, and for how long (BST-01, BST-02).
//!
//! Sans-IO: times are arguments, in nanoseconds of one monotonic clock. A VM's **tokens** are its
//! budget. Its **debt** is the favoured CPU time that is not paid back; [`crate::lag`] says how
//! large it is.

use nightporter_api::BoostAccount;

use crate::protocol::{Budget, Claim};

/// Favoured CPU time on one core that is not paid back, of all VMs together.
pub const UNPAID_MAX_NS: u64 = 20_000_000;
/// Favoured CPU time on one core in a row; then its neighbours have a turn.
pub const ROW_MAX_NS: u64 = 10_000_000;
/// A neighbour's turn: a slice of the default class, which is 2.8 to 4 ms (`base_slice_ns`).
pub const SLICE_NS: u64 = 4_000_000;
/// A boost that could not be longer does not begin.
pub const LEAST_NS: u64 = 500_000;
/// Boosts end when the threads have slept longer.
pub const SLEEP_MAX_NS: u64 = 1_000_000;
/// A payment is put off for so long at most.
pub const DEFERRAL_MAX_NS: u64 = 50_000_000;
/// Ends that are remembered, and how many of them may be waste.
pub const ENDS: u32 = 32;
/// A quarter of them.
pub const WASTE_MAX: u32 = 8;
/// No boost for so long after that.
pub const REST_NS: u64 = 10_000_000_000;

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

/// The account of one VM.
#[derive(Clone, Debug)]
pub struct Account {
    budget_ns: u64,
    window_ns: u64,
    /// Below zero after a boost that had more than there was: it is looked at each millisecond.
    tokens_ns: i64,
    refilled_at: u64,
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
            ends: 0,
            rests_until: 0,
            numbers: BoostAccount::default(),
        }
    }

    /// Its whole budget.
    #[must_use]
    pub const fn budget_ns(&self) -> u64 {
        self.budget_ns
    }

    /// CPU time for which a boost for `claim` may favour it, from its beginning on, on a core where
    /// so much is not paid back by it and by others, or will not be, and neighbours want their turn
    /// after `row_ns`; `alone`: no other VM there has boost.
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
        let room = limit.saturating_sub(unpaid_ns).min(row_ns);
        if room < LEAST_NS {
            return Err(Wait::Neighbours);
        }
        let limit = if room < tokens { Ended::Neighbours } else { Ended::Budget };
        Ok(Allowance { cpu_ns: tokens.min(room), limit })
    }

    /// It was favoured for so much CPU time.
    pub fn spend(&mut self, now: u64, cpu_ns: u64) {
        self.refill(now);
        self.tokens_ns = self.tokens_ns.saturating_sub(signed(cpu_ns));
        self.numbers.favoured_us += cpu_ns / 1000;
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

/// A VM that is still owed bytes when its budget is empty does not pay yet. While it pays it has
/// less of its core than without boost: the last flight of a transfer would find it there.
#[derive(Clone, Copy, Debug, Default)]
pub struct Deferral {
    /// The daemon says that it is owed bytes, or a turn, until then.
    owed_until: u64,
    /// Since its budget was empty, and until it has paid.
    until: Option<u64>,
}

impl Deferral {
    /// The daemon's last word: it wants its core until then. Zero: no longer.
    pub fn wants(&mut self, until: u64) {
        self.owed_until = until;
    }

    /// Its budget is empty. Of one debt the payment is put off once.
    pub fn on_empty(&mut self, now: u64) {
        self.until.get_or_insert(now + DEFERRAL_MAX_NS);
    }

    /// It owes nothing any more.
    pub fn on_paid(&mut self) {
        self.until = None;
    }

    /// It has a debt whose payment is, or was, put off.
    #[must_use]
    pub const fn is_begun(&self) -> bool {
        self.until.is_some()
    }

    /// It does not pay now.
    #[must_use]
    pub fn lasts(&self, now: u64) -> bool {
        self.until.is_some_and(|until| now < until.min(self.owed_until))
    }
}

#[cfg(test)]
mod tests {
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

    #[test]
    fn bst_02_a_budget_is_a_bucket_of_rate_b_by_w_and_depth_b() {
        let mut it = account();
        assert_eq!(allowed(&mut it, 0, Claim::Bytes, 0, true), Ok(15 * MS));
        it.spend(0, 15 * MS);
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
                it.spend(now, allowed + overshoot);
            }
            most = most.max(used.saturating_sub(now / 6));
        }
        assert_eq!(most, 15 * MS + overshoot, "B and one overshoot beyond its rate");
        assert!(used > 150 * MS, "and all that came in: {used}");
    }

    #[test]
    fn bst_02_looking_often_does_not_lose_tokens() {
        let mut it = account();
        it.spend(0, 15 * MS);
        for at in 0..30 * MS / 7 {
            it.refill(at * 7);
        }
        assert_eq!(allowed(&mut it, 30 * MS, Claim::Bytes, 0, true).unwrap().div_ceil(MS), 5);
    }

    #[test]
    fn bst_01_half_of_the_budget_is_for_bytes() {
        let mut it = account();
        assert_eq!(allowed(&mut it, 0, Claim::Turn, 0, true), Ok(7_500_000));
        it.spend(0, 7_500_000);
        assert_eq!(allowed(&mut it, 0, Claim::Turn, 0, true), Err(Wait::Empty));
        assert_eq!(allowed(&mut it, 0, Claim::Bytes, 0, true), Ok(7_500_000));
        assert_eq!(allowed(&mut it, 0, Claim::Reading, 0, true), Ok(7_500_000));
    }

    #[test]
    fn bst_02_what_all_owe_on_a_core_is_bounded() {
        let mut it = account();
        assert_eq!(allowed(&mut it, 0, Claim::Bytes, 12 * MS, false), Ok(8 * MS));
        assert_eq!(allowed(&mut it, 0, Claim::Bytes, 20 * MS, false), Err(Wait::Neighbours));
        let mut alone = Account::new(0, Budget { cpu_us: 30_000, window_us: 90_000 });
        assert_eq!(allowed(&mut alone, 0, Claim::Bytes, 0, true), Ok(30 * MS));
        assert_eq!(allowed(&mut alone, 0, Claim::Bytes, 0, false), Ok(20 * MS));
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
        it.spend(0, 13 * MS);
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
    fn bst_02_a_payment_is_put_off_once_and_only_while_the_vm_is_owed_something() {
        let mut it = Deferral::default();
        it.wants(30 * MS);
        assert!(!it.lasts(0), "its budget has something left");
        it.on_empty(0);
        assert!(it.lasts(30 * MS - 1));
        assert!(!it.lasts(30 * MS), "the daemon has said no more");
        it.wants(90 * MS);
        assert!(it.lasts(40 * MS), "it has");
        it.wants(0);
        assert!(!it.lasts(41 * MS), "it has what it was owed");
        it.wants(90 * MS);
        it.on_empty(41 * MS);
        assert!(!it.lasts(DEFERRAL_MAX_NS), "for 50 ms in all");
        it.on_paid();
        it.on_empty(60 * MS);
        assert!(it.lasts(60 * MS));
    }
}
