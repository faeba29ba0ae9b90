//! CPU time that a VM has had of its cores beyond its fair share (BST-02).
//!
//! Sans-IO. A **share** is what the kernel would let a VM have of its cores at a moment: a thread
//! that wants a core together with `n - 1` others has 1/n of it. The **excess** is the CPU time
//! that the VM has had since its first boost, less its share of all that time: favoured, paying or
//! neither. Nothing is estimated and forgotten, so that an error does not add up: whatever made the
//! VM have too little, as the turns of its neighbours that follow a payment, is made good by a
//! shorter next one. A VM that boosts give too little has a **credit**, up to [`CREDIT_MAX_NS`].
//!
//! Other programs, weights of cgroups, and real-time threads take or give a part of the share. That
//! part is measured where nobody on these cores has been boosted lately, so that boosts have no
//! effect on it.

use crate::favour::Mode;
use crate::process::Turns;

/// A VM that has had less than its share is owed no more than this.
const CREDIT_MAX_NS: f64 = 20e6;
/// A VM that is neither favoured nor pays has beyond its share at most the turn that the kernel has
/// just given it: two slices.
const TURN_MAX_NS: f64 = 10e6;
/// CPU time of a VM while it pays does not make its excess larger than this.
const EXCESS_MAX_NS: f64 = 100e6;
/// A VM that pays and wants its cores is even after this time, or nobody takes what it leaves.
const PAYMENT_MAX_NS: u64 = 2_000_000_000;
/// So long after the last boost the share is kept count of.
pub(crate) const ACTIVE_NS: u64 = 1_000_000_000;
/// So long after the last boost or payment on its cores a VM has what it has without boosts.
const SETTLED_NS: u64 = 50_000_000;
/// The part of its share that a VM has is a mean over about so long, and is believed to be all of
/// it at first, as if that had been seen for a moment.
const CALM_NS: f64 = 5e9;
const CALM_FIRST_NS: f64 = 50e6;
/// The mean of competitors is over so long.
const COMPETITORS_NS: f64 = 1e9;
/// Fewer competitors than this are none.
const COMPETITION_MIN: f64 = 1.05;
/// A thread that is woken on an idle core waits for about 10 us, and runs for 100 us or more. With
/// one neighbour that wants the core all the time it waits as long as it runs.
const WAIT_PART: f64 = 0.25;

/// A VM's share of its cores at a moment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Share {
    /// Its threads sleep: the share is that of one which would want a core.
    asleep: bool,
    /// Cores.
    cores: f64,
    /// Those on which one of its threads wants to run.
    wanted: f64,
}

impl Share {
    /// `crowds`: for each core on which threads of the VM want to run, how many of them and how
    /// many of all VMs do; `last`: how many do on the core of a thread that sleeps.
    pub(crate) fn new(crowds: impl Iterator<Item = (u32, u32)>, last: u32) -> Self {
        let (mut cores, mut wanted) = (0.0, 0.0);
        for (own, all) in crowds {
            cores += f64::from(own) / f64::from(all.max(own).max(1));
            wanted += 1.0;
        }
        if wanted > 0.0 {
            Self { asleep: false, cores, wanted }
        } else {
            Self { asleep: true, cores: 1.0 / f64::from(last + 1), wanted: 1.0 }
        }
    }

    fn awake(self) -> f64 {
        if self.asleep { 0.0 } else { self.cores }
    }

    fn competitors(self) -> f64 {
        self.wanted / self.cores
    }

    /// Nobody else wants these cores.
    pub(crate) fn is_whole(self) -> bool {
        self.competitors() <= 1.0
    }
}

/// See the module doc.
#[derive(Clone, Debug, Default)]
pub(crate) struct Lag {
    /// When it had had this, and its share.
    last: Option<(u64, Turns, Share)>,
    excess_ns: f64,
    competitors: f64,
    /// CPU time that it had, and its share, while nobody was boosted.
    calm: [f64; 2],
    /// CPU time that it had, and how long it waited for its cores, while it was neither boosted nor
    /// paid: its neighbours may have been.
    unaided: [f64; 2],
    /// The last moment at which somebody on its cores was favoured or paid, and at which it did.
    busy_at: u64,
    own_at: Option<u64>,
    pays_since: Option<u64>,
}

impl Lag {
    /// Until now it was in `mode` and has had `turns`; `share` is that of this moment.
    /// `busy`: somebody on its cores is favoured or pays.
    pub(crate) fn note(&mut self, now: u64, turns: Turns, share: Share, mode: Mode, busy: bool) {
        let now = self.last.map_or(now, |(at, ..)| now.max(at));
        if busy {
            self.see_busy(now);
        }
        if mode != Mode::Normal {
            self.own_at = Some(now);
        }
        let (at, before, was) = self.last.replace((now, turns, share)).unwrap_or_else(|| {
            self.competitors = share.competitors();
            (now, turns, share)
        });
        let ns = |ns: u64| {
            #[expect(clippy::cast_precision_loss, reason = "differences are far below 2^52 ns")]
            let ns = ns as f64;
            ns
        };
        let span = ns(now.saturating_sub(at));
        let had = ns(turns.ran_ns.saturating_sub(before.ran_ns));
        let awake = span * f64::midpoint(was.awake(), share.awake());
        let all = span * f64::midpoint(was.cores, share.cores);
        if !share.asleep {
            let news = (span / COMPETITORS_NS).min(1.0);
            self.competitors += news * (share.competitors() - self.competitors);
        }
        if at >= self.busy_at + SETTLED_NS {
            let old = (1.0 - span / CALM_NS).max(0.0);
            self.calm = [self.calm[0] * old + had, self.calm[1] * old + awake];
        }
        if mode == Mode::Normal && self.own_at.is_none_or(|own| at >= own + SETTLED_NS) {
            let old = (1.0 - span / CALM_NS).max(0.0);
            let waited = ns(turns.waited_ns.saturating_sub(before.waited_ns));
            self.unaided = [self.unaided[0] * old + had, self.unaided[1] * old + waited];
        }
        if self.is_active(at) {
            let part = self.part();
            self.count(had - part * awake, part * (all - awake), mode);
        }
        self.forgive(now, mode);
    }

    /// Somebody on its cores is favoured or pays at this moment.
    pub(crate) fn see_busy(&mut self, now: u64) {
        self.busy_at = self.busy_at.max(now);
    }

    /// Threads have begun or ended, which had used so much.
    pub(crate) fn rebase(&mut self, begun_ns: u64, ended_ns: u64) {
        if let Some((_, turns, _)) = &mut self.last {
            turns.ran_ns = (turns.ran_ns + begun_ns).saturating_sub(ended_ns);
            turns.waited_ns = u64::MAX; // until the next sample no wait counts
        }
    }

    /// It had so much more than its share; while it slept so much was its share.
    fn count(&mut self, more: f64, asleep: f64, mode: Mode) {
        let most = match mode {
            Mode::Favoured => f64::INFINITY,
            Mode::Paying => EXCESS_MAX_NS,
            Mode::Normal => TURN_MAX_NS,
        };
        let most = most.max(self.excess_ns);
        self.excess_ns = (self.excess_ns + more).clamp(-CREDIT_MAX_NS, most);
        // A VM that sleeps leaves its neighbours its share, but is not owed it.
        if self.excess_ns > 0.0 {
            self.excess_ns = (self.excess_ns - asleep).max(0.0);
        }
    }

    /// Where nobody competes, nobody is paid.
    fn forgive(&mut self, now: u64, mode: Mode) {
        if mode != Mode::Paying {
            self.pays_since = None;
            return;
        }
        let since = *self.pays_since.get_or_insert(now);
        if now > since + PAYMENT_MAX_NS {
            self.calm = [0.0; 2]; // other programs that took a part of its share are gone
            self.excess_ns = self.excess_ns.min(0.0);
        } else if self.competitors() < COMPETITION_MIN {
            self.excess_ns = self.excess_ns.min(0.0);
        }
    }

    /// It has been boosted lately.
    #[must_use]
    pub(crate) fn is_active(&self, now: u64) -> bool {
        self.own_at.is_some_and(|at| now <= at + ACTIVE_NS)
    }

    /// CPU time beyond its share; below zero: less than that.
    #[must_use]
    pub(crate) const fn excess_ns(&self) -> f64 {
        self.excess_ns
    }

    /// The favoured CPU time that is not paid back: with `n` competitors D of it is D (n-1)/n more
    /// than the VM's share.
    #[must_use]
    pub(crate) fn debt_ns(&self) -> u64 {
        let debt = self.excess_ns.max(0.0) / (1.0 - 1.0 / self.competitors().max(COMPETITION_MIN));
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it is not")]
        let debt = debt as u64;
        debt
    }

    /// How many compete for each of its cores, itself included, other programs by what they take.
    #[must_use]
    pub(crate) fn competitors(&self) -> f64 {
        (self.competitors / self.part()).max(1.0)
    }

    /// While it was not boosted it waited for its cores at most [`WAIT_PART`] of what it had of
    /// them, whoever had them meanwhile. That is believed at first.
    #[must_use]
    pub(crate) fn hardly_waits(&self) -> bool {
        let [had, waited] = self.unaided;
        waited <= WAIT_PART * (had + CALM_FIRST_NS)
    }

    /// The part of its share that it has.
    fn part(&self) -> f64 {
        let [had, share] = self.calm.map(|it| it + CALM_FIRST_NS);
        (had / share).clamp(1.0 / 64.0, 64.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    /// The share of a VM with one thread beside so many others.
    fn beside(others: u32) -> Share {
        Share::new([(1, 1 + others)].into_iter(), 0)
    }

    fn idle(others: u32) -> Share {
        Share::new(std::iter::empty(), others)
    }

    /// A VM with one thread, and its lag.
    #[derive(Default)]
    struct Vm {
        lag: Lag,
        now: u64,
        used_ns: u64,
        waited_ns: u64,
    }

    impl Vm {
        /// For so long it is in `mode` and has so much of the core.
        fn runs(&mut self, mode: Mode, span_ns: u64, used_ns: u64, share: Share) {
            if self.now == 0 {
                self.now = 1000 * MS;
                self.lag.note(self.now, Turns::default(), share, Mode::Normal, false);
            }
            self.now += span_ns;
            self.used_ns += used_ns;
            let turns = Turns { ran_ns: self.used_ns, waited_ns: self.waited_ns, count: 0 };
            self.lag.note(self.now, turns, share, mode, mode != Mode::Normal);
        }

        fn excess_us(&self) -> f64 {
            (self.lag.excess_ns() / 1e3).round()
        }

        fn debt_us(&self) -> u64 {
            (self.lag.debt_ns() + 500) / 1000
        }
    }

    #[test]
    fn bst_02_among_n_a_debt_is_paid_by_n_minus_1_times_its_length() {
        for n in [2, 3, 5_u32] {
            let mut vm = Vm::default();
            vm.runs(Mode::Favoured, 6 * MS, 6 * MS, beside(n - 1));
            assert_eq!(vm.debt_us(), 6000, "{n}");
            for ms in 1..=6 * (n - 1) {
                assert!(vm.debt_us() > 0, "{n}: {ms}");
                vm.runs(Mode::Paying, MS, 0, beside(n - 1));
            }
            assert_eq!((vm.debt_us(), vm.excess_us()), (0, 0.0), "{n}");
        }
    }

    #[test]
    fn bst_02_a_wait_after_a_payment_makes_the_next_one_shorter() {
        let mut vm = Vm::default();
        vm.runs(Mode::Favoured, 6 * MS, 6 * MS, beside(2));
        vm.runs(Mode::Paying, 12 * MS, 0, beside(2));
        vm.runs(Mode::Normal, 6 * MS, 0, beside(2)); // its neighbours have their turns
        assert_eq!(vm.excess_us(), -2000.0);
        vm.runs(Mode::Favoured, 6 * MS, 6 * MS, beside(2));
        assert_eq!((vm.excess_us(), vm.debt_us()), (2000.0, 3000));
        // And so does what a VM waits that is favoured by weight.
        vm.runs(Mode::Favoured, 3 * MS, 0, beside(2));
        assert_eq!(vm.excess_us(), 1000.0);
    }

    #[test]
    fn bst_01_a_vm_that_waits_for_its_core_does_so_whoever_has_it() {
        let mut vm = Vm::default();
        let mut runs = |mode, waited_ns| {
            vm.waited_ns += waited_ns;
            vm.runs(mode, 10 * MS, 4 * MS, beside(0));
            vm.lag.hardly_waits()
        };
        // Woken a hundred times.
        assert!(runs(Mode::Normal, 0) && runs(Mode::Normal, MS));
        // A program of no VM has the core as long as it does.
        assert!((0..50).any(|_| !runs(Mode::Normal, 4 * MS)));
        // With boosts it does not wait; that says nothing.
        assert!((0..200).all(|_| !runs(Mode::Favoured, 0)));
        // The program has ended.
        assert!((0..2000).any(|_| runs(Mode::Normal, 0)));
    }

    #[test]
    fn bst_02_a_credit_is_bounded_and_so_is_a_turn_of_the_kernels() {
        let mut vm = Vm::default();
        vm.runs(Mode::Favoured, MS, 0, beside(1));
        vm.runs(Mode::Normal, 1000 * MS, 0, beside(1));
        assert_eq!(vm.excess_us(), -20_000.0);
        vm.runs(Mode::Favoured, 40 * MS, 40 * MS, beside(1));
        assert_eq!(vm.excess_us(), 0.0);
        vm.runs(Mode::Normal, 500 * MS, 500 * MS, beside(1));
        assert_eq!(vm.excess_us(), 10_000.0);
        vm.runs(Mode::Paying, 500 * MS, 500 * MS, beside(1));
        assert_eq!(vm.excess_us(), 100_000.0);
    }

    #[test]
    fn bst_02_a_vm_that_sleeps_pays_and_has_no_credit() {
        let mut vm = Vm::default();
        vm.runs(Mode::Favoured, 2 * MS, 2 * MS, beside(1));
        vm.runs(Mode::Paying, 0, 0, idle(1));
        vm.runs(Mode::Paying, MS, 0, idle(1));
        assert_eq!(vm.debt_us(), 1000);
        vm.runs(Mode::Paying, MS, 0, idle(1));
        assert_eq!(vm.debt_us(), 0);
        vm.runs(Mode::Normal, 100 * MS, 0, idle(1));
        assert_eq!(vm.excess_us(), 0.0);
    }

    #[test]
    fn bst_02_without_competition_nothing_is_owed() {
        let mut vm = Vm::default();
        vm.runs(Mode::Favoured, 10 * MS, 10 * MS, beside(0));
        assert_eq!(vm.debt_us(), 0);
        vm.runs(Mode::Favoured, 0, 0, beside(1));
        vm.runs(Mode::Favoured, 10 * MS, 10 * MS, beside(1));
        assert!(vm.debt_us() > 0);
        // Its neighbour sleeps and leaves it the core.
        vm.runs(Mode::Paying, 0, 0, beside(0));
        for _ in 0..300 {
            vm.runs(Mode::Paying, 10 * MS, 10 * MS, beside(0));
        }
        assert_eq!(vm.debt_us(), 0);
    }

    #[test]
    fn bst_02_other_programs_count_by_what_they_take_without_boosts() {
        let mut vm = Vm::default();
        // One other VM; and a program, so that it has a third.
        for _ in 0..30 {
            vm.runs(Mode::Normal, 900 * MS, 300 * MS, beside(1));
        }
        assert!((vm.lag.competitors() - 3.0).abs() < 0.05, "{}", vm.lag.competitors());
        vm.runs(Mode::Favoured, 6 * MS, 6 * MS, beside(1));
        vm.runs(Mode::Paying, 12 * MS, 0, beside(1));
        assert!(vm.excess_us().abs() < 100.0, "{}", vm.excess_us());
        // Its CPU time beside boosts says nothing.
        for _ in 0..100 {
            vm.runs(Mode::Favoured, 10 * MS, 10 * MS, beside(1));
            vm.runs(Mode::Normal, 40 * MS, 40 * MS, beside(1));
        }
        assert!((vm.lag.competitors() - 3.0).abs() < 0.05, "{}", vm.lag.competitors());
    }

    #[test]
    fn bst_02_a_payment_that_nobody_takes_ends() {
        let mut vm = Vm::default();
        for _ in 0..30 {
            vm.runs(Mode::Normal, 900 * MS, 450 * MS, beside(0)); // a program has the other half
        }
        vm.runs(Mode::Favoured, 10 * MS, 10 * MS, beside(0));
        assert!(vm.debt_us() > 0);
        for ms in 0..3000 {
            vm.runs(Mode::Paying, MS, MS, beside(0)); // it has ended
            if vm.debt_us() == 0 {
                assert!(ms > 1000);
                return;
            }
        }
        panic!("{:?}", vm.lag);
    }

    #[test]
    fn bst_02_vcpus_of_a_vm_do_not_compete_with_each_other() {
        let alone = Share::new([(2, 2), (2, 2)].into_iter(), 0);
        let mut vm = Vm::default();
        vm.runs(Mode::Favoured, 10 * MS, 20 * MS, alone);
        assert_eq!(vm.excess_us(), 0.0);
        assert!((vm.lag.competitors() - 1.0).abs() < 1e-9);
        // A fifth thread on one of the two cores takes a third of that.
        let beside = Share::new([(2, 3), (2, 2)].into_iter(), 0);
        let mut vm = Vm::default();
        vm.runs(Mode::Favoured, 12 * MS, 24 * MS, beside);
        assert_eq!(vm.excess_us(), 4000.0);
        // 16 vCPUs on 16 cores: the one that shares a core has half of it.
        let wide = Share::new((0..16).map(|core| (1, 1 + u32::from(core == 0))), 0);
        let mut vm = Vm::default();
        vm.runs(Mode::Normal, 10 * MS, 155 * MS, wide);
        vm.runs(Mode::Favoured, 10 * MS, 155 * MS, wide);
        assert_eq!(vm.excess_us(), 0.0);
    }

    /// A core with three VMs that always want it. The kernel gives turns of 4 ms; who has paid, or
    /// is favoured no longer, is last.
    #[test]
    fn bst_02_boosted_all_the_time_every_vm_has_its_share() {
        for boosted in [1, 3_usize] {
            let mut vms = [(); 3].map(|()| (Vm::default(), Mode::Normal));
            let mut queue = std::collections::VecDeque::from([0, 1, 2]);
            let (mut turn, mut favoured, mut rest) = (0, None, 0);
            for ms in 0..60_000_u64 {
                let owed = vms.iter().map(|vm| vm.0.lag.debt_ns()).sum::<u64>();
                if favoured.is_none() && ms >= rest && owed < 10 * MS {
                    let excess = |at: usize| vms[at].0.lag.excess_ns();
                    let next = (0..boosted).min_by(|a, b| excess(*a).total_cmp(&excess(*b)));
                    favoured = next.map(|at| (at, ms + 10));
                    vms[next.unwrap()].1 = Mode::Favoured;
                }
                let runs = match favoured {
                    Some((at, _)) => at,
                    None => *queue.iter().find(|at| vms[**at].1 == Mode::Normal).unwrap_or(&0),
                };
                for (at, (vm, mode)) in vms.iter_mut().enumerate() {
                    vm.runs(*mode, MS, if at == runs { MS } else { 0 }, beside(2));
                    if *mode == Mode::Paying && vm.debt_us() == 0 {
                        *mode = Mode::Normal;
                        queue.retain(|it| *it != at);
                        queue.push_back(at);
                    }
                }
                if let Some((at, until)) = favoured {
                    if ms + 1 >= until {
                        let pays = vms[at].0.debt_us() > 0;
                        vms[at].1 = if pays { Mode::Paying } else { Mode::Normal };
                        (favoured, rest) = (None, ms + 20);
                    }
                } else {
                    turn += 1;
                    if turn >= 4 {
                        turn = 0;
                        queue.retain(|it| *it != runs);
                        queue.push_back(runs);
                    }
                }
            }
            for (vm, _) in &vms {
                #[expect(clippy::cast_precision_loss, reason = "a minute")]
                let share = 100.0 * vm.used_ns as f64 / 60e9;
                assert!((share - 33.3).abs() < 0.5, "{boosted} boosted: {share:.2}");
            }
        }
    }

    #[test]
    fn bst_02_the_time_of_threads_that_come_and_go_counts() {
        let mut vm = Vm::default();
        vm.runs(Mode::Favoured, 10 * MS, 10 * MS, beside(1));
        let before = vm.lag.excess_ns();
        // One that had used 3 ms ends, one that has used 1 ms begins, and they have run on.
        vm.lag.rebase(MS, 3 * MS);
        vm.used_ns -= 2 * MS;
        vm.runs(Mode::Favoured, 10 * MS, 10 * MS, beside(1));
        let more = vm.lag.excess_ns() - before;
        assert!((more - 5e6).abs() < 1.0, "{more}");
    }
}
