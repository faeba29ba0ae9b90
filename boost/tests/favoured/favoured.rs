//! The program with real threads and cgroups: who is favoured, and that everything is taken back
//! (BST-03 to 06). Needs root and a cgroup hierarchy of version 1 with the `cpu` controller.

use std::time::{Duration, Instant};

use nightporter_api::BoostAccount;
use nightporter_boost::protocol::{Claim, Order};
use nix::sys::signal::Signal;

use crate::common::{Booster, Cgroup, Hog, SOON, skips, within};

/// Class, nice value.
const NORMAL: (i32, i32) = (0, 0);
const FAVOURED: (i32, i32) = (2, 0);

/// Two VMs in one cgroup on one core.
fn compete() -> (Cgroup, Hog, Hog, Booster) {
    let cgroup = Cgroup::new(Some(400_000));
    let (hog, other) = (Hog::new(&cgroup), Hog::new(&cgroup));
    let mut booster = Booster::start();
    booster.adds(1, &hog);
    booster.adds(2, &other);
    booster.is_ready(1, "nice");
    (cgroup, other, hog, booster)
}

/// A VM is boosted for a second, again after each turn of its neighbour.
fn boosted() -> (Cgroup, Hog, Hog, Booster) {
    let cgroup = Cgroup::new(Some(400_000));
    let (hog, other) = (Hog::new(&cgroup), Hog::new(&cgroup));
    let mut booster = Booster::start();
    booster.adds_with(1, &hog, 1_000_000, None);
    booster.adds(2, &other);
    booster.is_ready(1, "nice");
    booster.says(&Order::Boost { vm: 1, claim: Claim::Bytes, for_us: 1_000_000, taken: 0 });
    booster.until("it is favoured", || hog.class() == FAVOURED);
    (cgroup, other, hog, booster)
}

#[test]
#[ignore = "root, cgroups"]
fn bst_04_a_vm_is_favoured_and_pays_back_and_is_as_before() {
    let (_cgroup, other, hog, mut booster) = compete();
    let begin = Instant::now();
    booster.says(&Order::Boost { vm: 1, claim: Claim::Bytes, for_us: 1_000_000, taken: 0 });
    // Ten milliseconds in a row, then its neighbours have a turn: it pays.
    booster.until("it pays", || hog.class() == (0, 19));
    booster.until("it has paid", || hog.class() == NORMAL);
    assert_eq!(other.class(), NORMAL);
    // How often it was favoured depends on the other work of the machine. Each time ended because
    // its neighbours had a turn, or with an empty budget.
    let account = booster.account(1, |it| {
        let ended = it.waits + it.ended_by_budget;
        it.boosts > 0 && it.boosts == ended && it.unpaid_us == 0
    });
    let passed_us = u64::try_from(begin.elapsed().as_micros()).unwrap();
    assert_eq!((account.ended_by_time, account.ended_by_sleep), (0, 0), "{account:?}");
    // The booster looks every millisecond, and CPU time is as old as the last tick: 4 ms.
    let most = 15_000 + passed_us / 6 + 4_000 * account.boosts;
    assert!(account.favoured_us <= most, "at most {most}: {account:?}");
}

#[test]
#[ignore = "root, cgroups"]
fn bst_01_a_boost_begins_when_somebody_else_wants_the_core() {
    let cgroup = Cgroup::new(Some(400_000));
    let (hog, mut other) = (Hog::new(&cgroup), Hog::waiting("CPU 0/TCG", Some(&cgroup)));
    let mut booster = Booster::start();
    booster.adds(1, &hog);
    booster.adds(2, &other);
    booster.is_ready(1, "nice");
    let before = hog.used();
    let boost = Order::Boost { vm: 1, claim: Claim::Bytes, for_us: 50_000, taken: 0 };
    let runs = |it: &BoostAccount| it.boosts > 0 || hog.used() > before + 1.0;
    let account = booster.account_after(1, |booster| booster.says(&boost), runs);
    let [used, waited] = hog.times();
    if account.boosts > 0 && waited > 0.2 * used {
        skips(&format!("alone: something else has the core: {used} s, and {waited} s of waiting"));
        return;
    }
    assert_eq!(account.boosts, 0, "alone on its core, {used} s, {waited} s: {account:?}");
    other.begins();
    booster.until_asking(&boost, "it is favoured", || hog.class() == FAVOURED);
}

#[test]
#[ignore = "root, cgroups"]
fn bst_01_a_boost_ends_when_the_daemon_says_so() {
    let (_cgroup, _other, hog, mut booster) = boosted();
    booster.says(&Order::End { vm: 1 });
    booster.until("it is not favoured", || hog.class() != FAVOURED);
    let account = booster.account(1, |it| it.favoured_us > 0);
    assert_eq!((account.ended_by_time, account.ended_by_budget), (0, 0), "{account:?}");
}

#[test]
#[ignore = "root, cgroups"]
fn bst_03_a_dead_booster_leaves_nobody_favoured() {
    let (_cgroup, _other, hog, mut booster) = boosted();
    booster.signals_booster(Signal::SIGKILL);
    within(SOON, "it is as before", || hog.class() == NORMAL);
    booster.has_ended();
}

#[test]
#[ignore = "root, cgroups"]
fn bst_03_a_booster_that_stands_leaves_nobody_favoured() {
    let (_cgroup, _other, hog, mut booster) = boosted();
    booster.signals_booster(Signal::SIGSTOP);
    within(SOON, "it is as before", || hog.class() == NORMAL);
    booster.has_ended();
}

#[test]
#[ignore = "root, cgroups"]
fn bst_03_a_dead_watcher_leaves_nobody_favoured() {
    for signal in [Signal::SIGKILL, Signal::SIGSTOP] {
        let (_cgroup, _other, hog, mut booster) = boosted();
        booster.signals_watcher(signal);
        within(SOON, "it is as before", || hog.class() == NORMAL);
        booster.has_ended();
    }
}

#[test]
#[ignore = "root, cgroups"]
fn bst_03_a_dead_daemon_leaves_nobody_favoured() {
    let (_cgroup, _other, hog, mut booster) = boosted();
    booster.hangs_up();
    within(SOON, "it is as before", || hog.class() == NORMAL);
}

#[test]
#[ignore = "root, cgroups"]
fn bst_03_a_daemon_that_stands_leaves_nobody_favoured_or_paying() {
    let (cgroup, _other, hog, mut booster) = compete();
    // Ten milliseconds cost it a hundred among so many.
    let many: Vec<Hog> = (3..14).map(|_| Hog::new(&cgroup)).collect();
    (3..).zip(&many).for_each(|(vm, hog)| booster.adds(vm, hog));
    booster.account(1, |it| it.competitors_percent > 1200);
    for stands in [false, true] {
        booster.says(&Order::Boost { vm: 1, claim: Claim::Bytes, for_us: 1_000_000, taken: 0 });
        booster.until("it pays", || hog.class() == (0, 19));
        let begin = Instant::now();
        if stands {
            within(SOON, "it is as before", || hog.class() == NORMAL);
            continue;
        }
        booster.until("it has paid", || hog.class() == NORMAL);
        let took = begin.elapsed();
        assert!(took > SOON, "or the other half shows nothing");
    }
}

#[test]
#[ignore = "root, cgroups"]
fn bst_03_what_both_processes_left_is_taken_back_afterwards() {
    let (_cgroup, _other, hog, booster) = boosted();
    booster.signals_watcher(Signal::SIGSTOP);
    booster.signals_booster(Signal::SIGKILL);
    assert_ne!(hog.class(), NORMAL);
    booster.signals_watcher(Signal::SIGKILL);
    assert_eq!(booster.takes_back(), "taken back: 1\n");
    assert_eq!(hog.class(), NORMAL);
    assert_eq!(booster.takes_back(), "taken back: 0\n");
}

#[test]
#[ignore = "root, cgroups"]
fn bst_04_a_cgroup_of_its_own_is_boosted_by_weight() {
    let cgroups = [Cgroup::new(None), Cgroup::new(None)];
    let hogs = [Hog::new(&cgroups[0]), Hog::new(&cgroups[1])];
    cgroups[0].writes("cpu.shares", "512");
    let mut booster = Booster::start();
    booster.adds(1, &hogs[0]);
    booster.adds(2, &hogs[1]);
    booster.is_ready(1, "weight");
    let shares = || cgroups[0].reads("cpu.shares");
    for signal in [None, Some(Signal::SIGKILL)] {
        let nice = || hogs[0].class().1;
        let boost = Order::Boost { vm: 1, claim: Claim::Bytes, for_us: 1_000_000, taken: 0 };
        let is_favoured = || shares() == "262144" && (-5..0).contains(&nice());
        booster.until_asking(&boost, "it is favoured", is_favoured); // its budget may be empty
        match signal {
            None => {
                booster.says(&Order::End { vm: 1 });
                booster.until("it has paid", || shares() == "512");
            }
            Some(signal) => booster.signals_booster(signal),
        }
        within(SOON, "it is as before", || shares() == "512" && nice() == 0);
    }
    assert_eq!(hogs[0].class(), NORMAL);
}

#[test]
#[ignore = "root, cgroups"]
fn bst_03_what_is_not_boosted_says_why() {
    let cgroup = Cgroup::new(Some(100_000));
    let hog = Hog::new(&cgroup);
    let mut booster = Booster::start();
    booster.adds(1, &hog);
    booster.is_ready(1, "weight");
    hog.set_class("-r", "1");
    booster.is_refused(1, "has a real-time class of its own");
    hog.set_class("-b", "0");
    booster.is_refused(1, "has a scheduling class of its own");
    hog.set_class("-o", "0");
    booster.is_ready(1, "weight");
    hog.set_nice(5);
    booster.is_refused(1, "has nice 5 of its own");
    hog.set_nice(0);
    booster.is_ready(1, "weight");
    cgroup.writes("cpu.cfs_quota_us", "50000");
    booster.is_refused(1, "has a CPU quota");
    booster.says(&Order::Boost { vm: 1, claim: Claim::Bytes, for_us: 1_000_000, taken: 0 });
    cgroup.writes("cpu.cfs_quota_us", "-1");
    booster.is_ready(1, "weight");
    assert_eq!(booster.account(1, |_| true).boosts, 0);
}

#[test]
#[ignore = "root, cgroups"]
fn bst_03_a_cgroup_that_refuses_real_time_is_a_refusal() {
    let cgroup = Cgroup::new(None);
    let (hog, other) = (Hog::new(&cgroup), Hog::new(&cgroup));
    let mut booster = Booster::start();
    booster.adds(1, &hog);
    booster.adds(2, &other);
    booster.is_ready(1, "nice");
    booster.says(&Order::Boost { vm: 1, claim: Claim::Bytes, for_us: 1_000_000, taken: 0 });
    booster.is_refused(1, "the kernel refuses a real-time class here");
    assert_eq!(hog.class(), NORMAL);
}

#[test]
#[ignore = "root, cgroups"]
fn bst_06_a_worker_on_the_same_core_has_a_class_above_or_nobody_is_boosted() {
    let cgroup = Cgroup::new(None);
    let hog = Hog::new(&cgroup);
    let worker = Hog::named("worker", None);
    let mut booster = Booster::silent();
    booster.says(&booster.hello(&worker, 0));
    booster.adds(1, &hog);
    booster.is_refused(1, "the daemon's worker may run on its cores");
    booster.hangs_up();
    booster.meets_again();
    booster.says(&booster.hello(&worker, 2));
    booster.adds(1, &hog);
    booster.is_ready(1, "weight");
    assert_eq!(worker.class(), (1, 0), "SCHED_FIFO");
    booster.hangs_up();
    within(SOON, "the worker's class is as before", || worker.class() == NORMAL);
}

#[test]
#[ignore = "root, cgroups"]
fn bst_05_threads_without_a_name_are_found_in_a_cgroup() {
    let (cgroup, vcpus) = (Cgroup::new(None), Cgroup::new(None));
    let hog = Hog::named("vmm", Some(&cgroup));
    let mut booster = Booster::start();
    booster.adds(1, &hog);
    booster.is_refused(1, "no vCPU threads are found");
    booster.adds_in(1, &hog, vcpus.name());
    booster.is_refused(1, "has no thread of process");
    booster.adds_in(1, &hog, cgroup.name());
    booster.is_ready(1, "weight");
}

#[test]
#[ignore = "root, cgroups"]
fn bst_01_a_budget_that_ends_a_boost_is_waste_only_where_the_vm_took_nothing() {
    let cgroup = Cgroup::new(Some(400_000));
    let (hog, other) = (Hog::new(&cgroup), Hog::new(&cgroup));
    let mut booster = Booster::start();
    booster.adds_with(1, &hog, 2_000, None);
    booster.adds(2, &other);
    booster.is_ready(1, "nice");
    let boost = |taken| Order::Boost { vm: 1, claim: Claim::Bytes, for_us: 1_000_000, taken };
    // An order that meets an empty bucket begins nothing, so it is told again and again.
    let mut taken = 0;
    let mut ends = |takes, fits: fn(&BoostAccount) -> bool| {
        let more = |booster: &Booster| {
            booster.says(&boost(taken));
            taken += takes;
            booster.says(&boost(taken));
        };
        booster.account_after(1, more, fits)
    };
    let account = ends(1, |it| it.ended_by_budget >= 12);
    assert_eq!(account.rests, 0, "{account:?}");
    ends(0, |it| it.rests > 0);
}

/// Parts of the core.
struct Parts {
    vms: [f64; 3],
    /// Of all that compete, and the booster.
    all: f64,
}

/// A VM that wants its core all the time, beside two others and a program of no VM, without boost
/// and with it.
fn shares(cgroups: &[&Cgroup; 4], means: &str) -> [Parts; 2] {
    let [hogs @ .., other] = cgroups.map(Hog::new);
    let mut booster = Booster::start();
    (1..).zip(&hogs).for_each(|(vm, hog)| booster.adds(vm, hog));
    booster.is_ready(1, means);
    booster.account(1, |it| it.competitors_percent > 350);
    [false, true].map(|wants| {
        let used = || [&hogs[0], &hogs[1], &hogs[2], &other].map(Hog::used);
        let (before, own_before) = (used(), booster.used());
        let begin = Instant::now();
        let more = |booster: &Booster| {
            if wants {
                booster.says(&Order::Boost {
                    vm: 1,
                    claim: Claim::Reading,
                    for_us: 8_000,
                    taken: 0,
                });
            }
        };
        let account = booster.account_after(1, more, |_| begin.elapsed().as_secs() >= 6);
        let span = begin.elapsed().as_secs_f64();
        let after = used();
        let parts: [f64; 4] = std::array::from_fn(|at| (after[at] - before[at]) / span);
        let own = (booster.used() - own_before) / span;
        let all = parts.iter().sum::<f64>() + own;
        println!("{means}, {wants}: {parts:.3?} and {own:.3} of the core; {account:?}");
        Parts { vms: [parts[0], parts[1], parts[2]], all }
    })
}

/// The booster's own time is not on the VM's account: all lose a part of it.
#[test]
#[ignore = "root, cgroups"]
fn bst_02_over_seconds_a_boosted_vm_has_no_more_than_its_share() {
    let one = Cgroup::new(Some(400_000));
    let own = [(); 4].map(|()| Cgroup::new(None));
    for (cgroups, means) in [([&one; 4], "nice"), (own.each_ref(), "weight")] {
        let [without, with] = shares(&cgroups, means);
        // A VM's share is known from before its boosts.
        if without.all.min(with.all) < 0.9 || (without.all - with.all).abs() > 0.04 {
            skips(&format!(
                "shares, {means}: a busy core, {:.2} and {:.2} of it for these",
                without.all, with.all
            ));
            continue;
        }
        // It may be a little less where the machine's other work changes all the time.
        let more = with.vms[0] / without.vms[0] - 1.0;
        assert!(more < 0.06, "{means}: {:.3?}, with boost {:.3?}", without.vms, with.vms);
        assert!(more > -0.15, "{means}: {:.3?}, with boost {:.3?}", without.vms, with.vms);
    }
}

#[test]
#[ignore = "root, cgroups"]
fn bst_02_a_boost_has_ten_milliseconds_in_a_row() {
    let mut rows = [(); 5].map(|()| {
        let (_cgroup, _other, hog, mut booster) = boosted();
        booster.until("its neighbour has a turn", || hog.class() != FAVOURED);
        booster.says(&Order::End { vm: 1 });
        let account = booster.account(1, |it| it.waits > 0);
        assert_eq!(account.ended_by_budget, 0, "it had more: {account:?}");
        account.favoured_us / account.boosts
    });
    rows.sort_unstable();
    assert!((5_000..12_000).contains(&rows[2]), "{rows:?}");
}

#[test]
#[ignore = "root, cgroups"]
fn bst_02_boosts_that_follow_each_other_are_one_row() {
    let (_cgroup, _other, hog, mut booster) = boosted();
    let boost = Order::Boost { vm: 1, claim: Claim::Bytes, for_us: 1_000_000, taken: 0 };
    // The second time it may have something to pay: its nice value shows that.
    let is_favoured = || hog.class().0 == FAVOURED.0;
    let mut rows = Vec::new();
    // On a busy machine the first boost may have had it all, and an order may come late.
    for _ in 0..100 {
        if rows.len() == 5 {
            break;
        }
        booster.says(&Order::End { vm: 1 });
        booster.until("it is not favoured", || !is_favoured());
        // A slice without a boost ends a row, and so does a turn of all neighbours.
        let before = booster.account(1, |it| it.unpaid_us == 0).favoured_us;
        let ends = booster.account(1, |_| true).waits + 1;
        for lasts_ms in [3, 5] {
            booster.says(&Order::End { vm: 1 });
            booster.says(&boost);
            booster.until("it is favoured", is_favoured);
            booster.passes(Duration::from_millis(lasts_ms));
        }
        // A slice after the first boost, in the middle of the second, which may have what was left
        // when it began.
        let lasts = is_favoured();
        booster.says(&boost);
        booster.until("it is not favoured", || !is_favoured());
        booster.says(&Order::End { vm: 1 });
        let account = booster.account(1, |it| it.waits >= ends);
        if lasts && account.waits == ends {
            rows.push(account.favoured_us - before);
        }
    }
    rows.sort_unstable();
    assert!(rows.len() == 5 && (5_000..12_000).contains(&rows[2]), "{rows:?}");
}
