//! `nightporter-lab`: the demo and the tests on real guests, from the command line.

use clap::{Parser, Subcommand};
use nightporter_lab::accel::Accel;
use nightporter_lab::demo::{self, Options};
use nightporter_lab::image::Image;
use nightporter_lab::process;
use nightporter_lab::report::Path3;
use nightporter_lab::scenario;
use nightporter_lab::sched::Scheduler;

/// Boots real guests, makes them compete for a core, and measures.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Three guests on one core; uploads into one of them over three paths, interleaved.
    Demo {
        /// How the guests compete.
        #[arg(long, value_enum, default_value = "rr30")]
        sched: Scheduler,
        /// Transfers for each path and size, at least; twice that if there is time.
        #[arg(long, default_value_t = 30)]
        transfers: usize,
        /// Only these paths.
        #[arg(long, value_enum, value_delimiter = ',', default_value = "tap,off,ack-offload")]
        paths: Vec<Path3>,
        /// Do not probe for KVM but use this.
        #[arg(long, value_enum)]
        accel: Option<Accel>,
        /// Seed of payloads, pauses and order.
        #[arg(long, default_value_t = 1)]
        seed: u64,
    },
    /// The tests on real guests, with libtest's output.
    Test {
        /// Only those whose name contains this.
        #[arg(default_value = "")]
        filter: String,
    },
    /// Only download and build what the guests boot, so that a later run needs no network.
    Prepare,
}

fn main() {
    let passed = match Arguments::parse().command {
        Command::Demo { sched, transfers, paths, accel, seed } => {
            demo::run(&Options { scheduler: sched, transfers, paths, accel, seed }).map(|()| true)
        }
        Command::Prepare => Image::for_qemu().map(|_| true),
        Command::Test { filter } => scenario::run_all(&filter),
    };
    match passed {
        Ok(true) => {}
        Ok(false) => std::process::exit(1),
        Err(error) => {
            process::yield_to_signal();
            eprintln!("nightporter-lab: {error:#}");
            std::process::exit(1);
        }
    }
}
