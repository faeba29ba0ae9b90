//! The command line of `nightporterd`, also for its manual page and completions.

use std::path::PathBuf;

use clap::{Command, CommandFactory, Parser};

/// The Nightporter daemon: a vhost-user network back-end that acknowledges TCP for guests that wait
/// for their CPU.
#[derive(Debug, Parser)]
#[command(version)]
pub struct Arguments {
    /// The configuration file (TOML); see configuration.md and examples/nightporter.toml, which the
    /// Debian package has in /usr/share/doc/nightporter.
    #[arg(long, value_name = "FILE")]
    pub config: PathBuf,
    /// Check the configuration and exit. Check also that this host has the interfaces, addresses
    /// and cores that it names. Prints a summary, or every mistake with its fix.
    #[arg(long)]
    pub check: bool,
    /// Finish what a daemon that has ended left undone for VMs with taps, and exit: deliver the
    /// bytes that it had acknowledged for them, and reset the connections of those that take none
    /// within 30 seconds. A daemon that starts meanwhile takes over. nightporter-settle.service
    /// does this, 5 seconds after a daemon has ended.
    #[arg(long, conflicts_with = "check")]
    pub settle: bool,
    /// Set a key of [daemon] instead of its value in the file, as in --set log=debug. May be
    /// repeated.
    #[arg(long, value_name = "KEY=VALUE", value_parser = key_value)]
    pub set: Vec<(String, String)>,
}

fn key_value(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("write KEY=VALUE, as in log=debug")?;
    Ok((key.trim().into(), value.trim().into()))
}

/// The arguments, for the manual page and the completions.
#[must_use]
pub fn command() -> Command {
    Arguments::command()
}
