//! What the front-ends of one VM have taken lately, of its network card and its socket device
//! together: who has two devices has no two shares.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nightporter_core::time::{Duration, Instant};

use crate::closer::Owner;
use crate::log::Limit;
use crate::port::messages::Costs;
use crate::vhost::vring::SlowCalls;

/// After one of its front-ends has kept the worker waiting a VM takes no connections for so long;
/// after the next time twice as long, and so on. Nobody does that by mistake.
const BAN_S: u64 = 60;
/// It is doubled so often at most: 17 hours.
const BAN_DOUBLED_MAX: u64 = 10;

/// See the module's doc.
#[derive(Debug)]
pub(super) struct Account {
    /// Of what they pass.
    pub(super) owner: Owner,
    /// What their descriptors make slow.
    pub(super) slow: Arc<SlowCalls>,
    dues: Arc<Mutex<Dues>>,
}

#[derive(Debug)]
struct Dues {
    costs: Costs,
    log: Limit,
    bans: u64,
    banned_until: Instant,
}

impl Account {
    pub(super) fn new(name: &str) -> Self {
        let (costs, log) = (Costs::default(), Limit::new());
        let dues = Dues { costs, log, bans: 0, banned_until: Instant::ZERO };
        let (owner, slow) = (Owner::new(name), Arc::default());
        Self { owner, slow, dues: Arc::new(Mutex::new(dues)) }
    }

    /// For another device of the same VM. What is mapped of its front-end's memory counts for
    /// itself: both map all of the guest's.
    pub(super) fn beside(&self) -> Self {
        let (owner, slow) = (self.owner.beside(), Arc::clone(&self.slow));
        Self { owner, slow, dues: Arc::clone(&self.dues) }
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

    /// No connections from now on; for so many seconds.
    pub(super) fn ban(&self, now: Instant) -> u64 {
        let mut dues = self.dues();
        let seconds = BAN_S << dues.bans.min(BAN_DOUBLED_MAX);
        dues.bans += 1;
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
}
