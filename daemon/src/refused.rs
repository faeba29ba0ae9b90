//! System calls that the sandbox has refused: counted in the handler of a signal, and logged by the
//! watchdog.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

/// Calls that were refused.
static REFUSED: AtomicU64 = AtomicU64::new(0);
/// The number of the last one.
static LAST: AtomicI64 = AtomicI64::new(0);

/// Calls that were refused so far.
pub(crate) fn count() -> u64 {
    REFUSED.load(Ordering::Relaxed)
}

/// Another call was refused: in the handler of a signal.
pub(crate) fn note(call: i64) {
    LAST.store(call, Ordering::Relaxed);
    REFUSED.fetch_add(1, Ordering::Relaxed);
}

/// Called now and then: logs calls that were refused since `known`.
pub(crate) fn report(known: &mut u64) {
    let all = count();
    if std::mem::replace(known, all) != all {
        let call = LAST.load(Ordering::Relaxed);
        tracing::error!(
            call,
            refused = all,
            "a system call was refused, because the daemon never makes it"
        );
    }
}
