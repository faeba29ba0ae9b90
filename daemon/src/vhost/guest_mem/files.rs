//! The files behind mapped memory, to be passed on.

use std::os::fd::{AsFd, BorrowedFd};

use vhost::vhost_user::message::VhostUserSingleMemoryRegion;

use super::{GuestMemory, Window};

impl Window {
    /// Its file, and where it begins there.
    pub(crate) fn file(&self) -> Option<(BorrowedFd<'_>, u64)> {
        let file = self.map.file_offset()?;
        Some((file.file().as_fd(), file.start() + self.at as u64))
    }
}

impl GuestMemory {
    /// The regions as the front-end named them, and the files behind them.
    pub(crate) fn regions_and_files(
        &self,
    ) -> impl Iterator<Item = (VhostUserSingleMemoryRegion, BorrowedFd<'_>)> {
        self.regions.iter().filter_map(|it| {
            let (file, offset) = it.bytes.file()?;
            Some((VhostUserSingleMemoryRegion::new(it.guest, it.len, it.user, offset), file))
        })
    }
}
