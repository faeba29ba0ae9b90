//! The origin of a result, to compare results by.

use std::fs;
use std::path::Path;
use std::thread::available_parallelism;
use std::time::UNIX_EPOCH;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

/// The machine and the program.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Origin {
    host_kernel: String,
    cpu: String,
    cores: usize,
    profile: String,
    /// When the newest of our programs was built, seconds since 1970.
    built_at: u64,
}

impl std::fmt::Display for Origin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { host_kernel, cpu, cores, profile, .. } = self;
        write!(
            f,
            "{cpu}, {cores} core(s) beside the guests', Linux {host_kernel}, profile {profile}"
        )
    }
}

impl Origin {
    /// Of this process.
    pub(super) fn here() -> Result<Self> {
        let cpus = fs::read_to_string("/proc/cpuinfo").context("the CPU's name")?;
        let cpu = cpus.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
        Ok(Self {
            host_kernel: host_kernel()?,
            cpu: cpu.map_or_else(|| "unknown".to_owned(), |(_, name)| name.to_owned()),
            cores: available_parallelism()?.get(),
            profile: profile()?,
            built_at: built_at()?,
        })
    }
}

/// Of this program, and of those beside it that it starts.
fn built_at() -> Result<u64> {
    let program = std::env::current_exe()?;
    let dir = program.parent().context("the program has a directory")?;
    let mut newest = 0;
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with("nightporter") {
            let built = entry.metadata()?.modified()?.duration_since(UNIX_EPOCH)?;
            newest = newest.max(built.as_secs());
        }
    }
    Ok(newest)
}

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
