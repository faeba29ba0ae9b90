//! The spare descriptor for operators. When no other is left, control closes it and accepts an
//! operator with its number. Meanwhile no other thread accepts a connection or takes a descriptor
//! that somebody sends, which would get that number.

use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError};

/// The lock.
struct Spare(RwLock<()>);

static SPARE: Spare = Spare::new();

/// For control, while its spare descriptor is closed or about to be opened.
pub(crate) fn hold() -> RwLockWriteGuard<'static, ()> {
    SPARE.hold()
}

/// For another thread, which does not wait, while it accepts or receives; these threads do not keep
/// each other from that. `None`: it is to try again.
pub(crate) fn try_share() -> Option<RwLockReadGuard<'static, ()>> {
    SPARE.try_share()
}

impl Spare {
    const fn new() -> Self {
        Self(RwLock::new(()))
    }

    fn hold(&self) -> RwLockWriteGuard<'_, ()> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn try_share(&self) -> Option<RwLockReadGuard<'_, ()>> {
        match self.0.try_read() {
            Ok(shared) => Some(shared),
            Err(TryLockError::Poisoned(shared)) => Some(shared.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_accept_at_the_same_time_and_never_while_control_holds_the_spare_descriptor() {
        // Not that of the process: other tests accept.
        let spare = Spare::new();
        let shared = spare.try_share();
        let other =
            std::thread::scope(|it| it.spawn(|| spare.try_share().is_some()).join().unwrap());
        assert!(shared.is_some());
        assert!(other);
        drop(shared);
        let held = spare.hold();
        assert!(spare.try_share().is_none());
        drop(held);
    }
}
