//! The spare descriptor for operators. When no other is left, control closes it and accepts an
//! operator with its number. Meanwhile no worker accepts a front-end, which would get it.

use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError};

static SPARE: RwLock<()> = RwLock::new(());

/// For control, while its spare descriptor is closed or about to be opened.
pub(crate) fn hold() -> RwLockWriteGuard<'static, ()> {
    SPARE.write().unwrap_or_else(PoisonError::into_inner)
}

/// For a worker, which does not wait, while it accepts; workers do not keep each other from that.
/// `None`: it is to try again.
pub(crate) fn try_share() -> Option<RwLockReadGuard<'static, ()>> {
    match SPARE.try_read() {
        Ok(shared) => Some(shared),
        Err(TryLockError::Poisoned(shared)) => Some(shared.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_accept_at_the_same_time_and_never_while_control_holds_the_spare_descriptor() {
        let shared = try_share();
        let other = std::thread::spawn(|| try_share().is_some()).join().unwrap();
        assert!(shared.is_some());
        assert!(other);
        drop(shared);
        let held = hold();
        assert!(try_share().is_none());
        drop(held);
    }
}
