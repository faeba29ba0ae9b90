//! Huge pages for a test; the daemon's unit tests have this file, too.

/// Huge pages of `1 << shift` bytes that this host has set aside, until the end of a test.
pub(crate) struct HugePages {
    count: String,
    before: u64,
}

impl HugePages {
    /// So many more. `None`, which is said: there are none here.
    pub(crate) fn reserve(shift: u32, more: u64) -> Option<Self> {
        let kib = 1 << (shift - 10);
        let count = format!("/sys/kernel/mm/hugepages/hugepages-{kib}kB/nr_hugepages");
        let reserved = Self::try_reserve(count, more);
        if reserved.is_none() {
            // As `skips` of `hostile`: the daemon's unit tests have this file, too.
            use std::io::Write;
            let why = format!("this host sets no huge pages of {kib} KiB aside (root)");
            let _ = writeln!(std::io::stderr(), "SKIPPED: {why}");
        }
        reserved
    }

    fn try_reserve(count: String, more: u64) -> Option<Self> {
        let read = |count: &str| std::fs::read_to_string(count).ok()?.trim().parse::<u64>().ok();
        let reserved = Self { before: read(&count)?, count };
        let wanted = reserved.before + more;
        std::fs::write(&reserved.count, wanted.to_string()).ok()?;
        (read(&reserved.count)? >= wanted).then_some(reserved)
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        let _ = std::fs::write(&self.count, self.before.to_string());
    }
}
