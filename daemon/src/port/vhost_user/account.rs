//! The recent work of one VM's front-ends, for its network card and its socket device together, so
//! that a VM with two devices does not have two shares.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nightporter_core::time::{Duration, Instant};

use crate::charges::Left;
use crate::closer::Owner;
use crate::log::Limit;
use crate::port::messages::Costs;
use crate::sleeps::{self, Part};
use crate::vhost::signals::SlowCalls;

/// After one of its front-ends has kept the worker waiting, a VM takes no connections for so long,
/// after the next time twice as long, and so on. It does not happen by mistake.
const BAN_S: u64 = 60;
/// It is doubled so often at most: 17 hours.
const BAN_DOUBLED_MAX: u64 = 10;

/// The memory of a VM may make the worker sleep for a hundredth of the time. A sleep is forgotten
/// when this many times its length has passed.
const SLEEP_SHARE: u64 = 100;
/// Sleeps that are not forgotten and last this long together are too much.
const SLEEP_MAX: Duration = Duration::from_millis(20);
/// One sleep alone is not, because a host that is short of memory makes one,
const SLEEPS_MAX: u32 = 2;
/// unless it lasts longer than this: a hole over memory that is mapped thousands of times takes
/// seconds, and nobody can see beforehand how often it is mapped.
const SLEEP_ALONE_MAX: Duration = Duration::from_millis(200);

/// Bans so far, of all VMs.
static BANS: AtomicU64 = AtomicU64::new(0);

/// Bans so far, of all VMs. After one the VM's other device is to be looked at as after a fault.
pub(crate) fn bans() -> u64 {
    BANS.load(Ordering::Relaxed)
}

/// See the module's doc.
#[derive(Debug)]
pub(super) struct Account {
    /// Which one it is, among all that there ever were; from 1 on.
    number: u64,
    /// The owner of their descriptors.
    pub(super) owner: Owner,
    /// Calls that their descriptors made slow.
    pub(super) slow: Arc<SlowCalls>,
    /// Files that this device's front-ends share no longer.
    pub(super) left: Arc<Left>,
    dues: Arc<Mutex<Dues>>,
}

#[derive(Debug)]
struct Dues {
    costs: Costs,
    log: Limit,
    sleeps: Sleeps,
    bans: u64,
    banned_until: Instant,
}

/// How long the memory of a VM has made the worker sleep.
#[derive(Debug, Default)]
struct Sleeps {
    /// So many times,
    count: u32,
    /// and until then it is not forgotten.
    until: Instant,
}

impl Sleeps {
    /// It did so again. `true`: that is enough.
    fn add(&mut self, now: Instant, time: Duration) -> bool {
        if now >= self.until {
            *self = Self { count: 0, until: now };
        }
        self.count += 1;
        self.until = self.until + time.saturating_mul(SLEEP_SHARE);
        let most = now + SLEEP_MAX.saturating_mul(SLEEP_SHARE);
        let are_enough = self.count >= SLEEPS_MAX && self.until >= most;
        let is_enough = are_enough || time > SLEEP_ALONE_MAX;
        if is_enough {
            *self = Self::default();
        }
        is_enough
    }
}

impl Account {
    pub(super) fn new(name: &str) -> Self {
        static NUMBERS: AtomicU64 = AtomicU64::new(0);
        let (costs, log, sleeps) = (Costs::default(), Limit::new(), Sleeps::default());
        let dues = Dues { costs, log, sleeps, bans: 0, banned_until: Instant::ZERO };
        let (owner, slow, left) = (Owner::new(name), Arc::default(), Arc::default());
        let number = NUMBERS.fetch_add(1, Ordering::Relaxed) + 1;
        Self { number, owner, slow, left, dues: Arc::new(Mutex::new(dues)) }
    }

    /// For another device of the same VM. Mappings of its front-end's memory are counted apart,
    /// because both devices map all of the guest's memory.
    pub(super) fn beside(&self) -> Self {
        let (owner, slow) = (self.owner.beside(), Arc::clone(&self.slow));
        let left = Arc::default();
        Self { number: self.number, owner, slow, left, dues: Arc::clone(&self.dues) }
    }

    pub(super) const fn number(&self) -> u64 {
        self.number
    }

    /// The worker may wait for memory of the VM as long as this lives.
    #[inline]
    pub(super) fn part(&self) -> Part {
        sleeps::part(self.number)
    }

    /// Its memory made the worker sleep so long. `true`: that is enough.
    #[must_use]
    pub(super) fn has_slept(&self, now: Instant, time: Duration) -> bool {
        self.dues().sleeps.add(now, time)
    }

    /// Whether there may be one more line in the log; see [`Limit`].
    pub(super) fn may_log(&self) -> bool {
        self.dues().log.allows()
    }

    pub(super) fn is_banned(&self, now: Instant) -> bool {
        now < self.dues().banned_until
    }

    /// A message was costly. `true`: that is enough for a while.
    #[must_use]
    pub(super) fn pay(&self, now: Instant, cost: u32) -> bool {
        self.dues().costs.add(now, cost)
    }

    /// Takes no connections from now on; returns for how many seconds.
    pub(super) fn ban(&self, now: Instant) -> u64 {
        let mut dues = self.dues();
        let seconds = BAN_S << dues.bans.min(BAN_DOUBLED_MAX);
        dues.bans += 1;
        BANS.fetch_add(1, Ordering::Relaxed);
        dues.banned_until = now + Duration::from_secs(seconds);
        seconds
    }

    fn dues(&self) -> MutexGuard<'_, Dues> {
        self.dues.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_devices_of_a_vm_have_one_share_and_one_ban() {
        let (card, now) = (Account::new("vm"), Instant::from_secs(1000));
        let (sockets, other) = (card.beside(), Account::new("other"));
        let costly = |account: &Account| account.pay(now, 40);
        assert_eq!([&card, &other, &sockets, &other].map(costly), [false, false, true, true]);
        assert!(Arc::ptr_eq(&card.slow, &sockets.slow), "what they make slow counts together");
        let lines = |account: &Account| (0..80).filter(|_| account.may_log()).count();
        assert_eq!([&card, &sockets, &other].map(lines), [50, 0, 50]);
        assert_eq!([card.ban(now), sockets.ban(now), other.ban(now)], [60, 120, 60]);
        let at = now + Duration::from_secs(119);
        assert_eq!([&card, &sockets, &other].map(|it| it.is_banned(at)), [true, true, false]);
        assert!(!card.is_banned(at + Duration::from_secs(1)));
    }

    #[test]
    fn memory_that_makes_the_worker_sleep_may_do_so_for_a_hundredth_of_the_time() {
        let ms = Duration::from_millis;
        // One long sleep is forgiven: a host that was frozen. The next one in time is not.
        for (first, second, after, is_enough) in
            [(60, 60, 5999, true), (60, 1, 4000, true), (60, 60, 6000, false), (5, 5, 100, false)]
        {
            let (mut sleeps, now) = (Sleeps::default(), Instant::from_secs(1000));
            assert!(!sleeps.add(now, ms(first)));
            assert_eq!(sleeps.add(now + ms(after), ms(second)), is_enough, "{first} {second}");
        }
        // One that no honest host makes.
        for (ms_alone, is_enough) in [(200, false), (201, true)] {
            assert_eq!(Sleeps::default().add(Instant::from_secs(1), ms(ms_alone)), is_enough);
        }
        // Small ones, one after the other: the sixth. One in each second: none.
        let enough = |apart: u64| {
            let (mut sleeps, now) = (Sleeps::default(), Instant::from_secs(1000));
            (1..100).find(|n| sleeps.add(now + ms(apart * n), ms(4)))
        };
        assert_eq!((enough(5), enough(400)), (Some(6), None));
    }
}
