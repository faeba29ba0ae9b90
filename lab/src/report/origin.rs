//! The origin of a result, to compare results by.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

/// The host's kernel.
pub(crate) fn host_kernel() -> Result<String> {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").context("kernel version")?;
    Ok(release.trim().to_owned())
}

/// The directory of the programs has the name of the profile with which cargo built them.
pub(crate) fn profile() -> Result<String> {
    let program = std::env::current_exe()?;
    let name = program.parent().and_then(Path::file_name).context("the program has a directory")?;
    Ok(name.to_string_lossy().into_owned())
}
