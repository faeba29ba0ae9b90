//! The command line.

use std::path::PathBuf;

use clap::{CommandFactory, Parser};

/// Lets virtual machines that are owed bytes by nightporterd run at once, within their own share of
/// the core.
///
/// It takes its orders from the daemon, and takes everything back when the daemon or one of its own
/// two processes ends or stands.
#[derive(Clone, Debug, Parser)]
#[command(name = "nightporter-boost", version)]
pub struct Arguments {
    /// The daemon's socket for it (daemon.boost_socket).
    #[arg(long, value_name = "PATH", default_value = "/run/nightporter/boost.sock")]
    pub socket: PathBuf,
    /// A file on a tmpfs that has what is favoured now.
    #[arg(long, value_name = "PATH", default_value = "/run/nightporter-boost/journal")]
    pub journal: PathBuf,
    /// Take back what the journal has, and end; for after a crash of the whole unit.
    #[arg(long)]
    pub take_back: bool,
    /// Be the watcher of this process; the program starts it itself.
    #[arg(long, value_name = "PID", hide = true)]
    pub watch: Option<i32>,
}

/// For manual page and completions.
#[must_use]
pub fn command() -> clap::Command {
    Arguments::command()
}
