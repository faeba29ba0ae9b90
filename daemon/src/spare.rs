//! The spare descriptor for operators. When no other is left, control closes it and accepts an
//! operator with its number. Meanwhile the worker accepts no front-end, which would get it.

use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

static SPARE: Mutex<()> = Mutex::new(());

/// For control, while its spare descriptor is closed or about to be opened.
pub(crate) fn hold() -> MutexGuard<'static, ()> {
    SPARE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// For the worker, which does not wait, while it accepts. `None`: it is to try again.
pub(crate) fn try_hold() -> Option<MutexGuard<'static, ()>> {
    match SPARE.try_lock() {
        Ok(held) => Some(held),
        Err(TryLockError::Poisoned(held)) => Some(held.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}
