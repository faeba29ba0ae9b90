//! The program; see the library.

use anyhow::Result;
use clap::Parser;
use nightporter_boost::arguments::Arguments;
use nightporter_boost::{booster, take_back, watcher};

fn main() -> Result<()> {
    let Arguments { socket, journal, take_back: only, watch } = Arguments::parse();
    if only {
        println!("taken back: {}", take_back(&journal)?);
        return Ok(());
    }
    match watch {
        Some(pid) => watcher::run(pid, &journal),
        None => booster::run(&socket, &journal),
    }
}
