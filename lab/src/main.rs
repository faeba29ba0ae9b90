//! `nightporter-lab`: the demo and the tests on real guests, from the command line.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, Subcommand};
use nightporter_lab::accel::Accel;
use nightporter_lab::always_on;
use nightporter_lab::boosted;
use nightporter_lab::compare::{self, Cell, Which};
use nightporter_lab::crowd;
use nightporter_lab::delays;
use nightporter_lab::demo::{self, Direction, NetPath, Options, Terms};
use nightporter_lab::demo_toe::{self, Between};
use nightporter_lab::figures::{self, Effort};
use nightporter_lab::hpcc;
use nightporter_lab::image::Image;
use nightporter_lab::link::Link;
use nightporter_lab::outside;
use nightporter_lab::placement::{HostCore, Placement};
use nightporter_lab::process;
use nightporter_lab::scenario;
use nightporter_lab::sched::{Layout, Scheduler};
use nightporter_lab::together;

/// Boots real guests, makes them compete for a core, and measures.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Runs three guests on one core, and measures uploads into one of them and downloads from it
    /// over several paths, interleaved. Without --sched and --link: `eevdf` over `lan`, then
    /// `strict30` over `metro`.
    Demo(Box<DemoArguments>),
    /// Compares sockets over the host with guest TCP, between guests of one host and of two hosts.
    DemoToe {
        /// The kinds of guests.
        #[arg(long, value_enum, value_delimiter = ',', default_value = "uml,qemu")]
        guests: Vec<Between>,
        /// Seconds for the transfers of each kind.
        #[arg(long, default_value_t = 75)]
        seconds: u64,
        /// Fewest rounds, even if they take longer.
        #[arg(long, default_value_t = 3)]
        rounds_least: usize,
        /// Most rounds.
        #[arg(long, default_value_t = 15)]
        rounds: usize,
        /// The accelerator; by default, KVM is probed for.
        #[arg(long, value_enum)]
        accel: Option<Accel>,
    },
    /// Runs the HPC Challenge in guests of two hosts, by overlay and by TOE.
    Hpcc {
        /// Numbers of guests, half of them on each host, with one process each.
        #[arg(long, value_delimiter = ',', default_value = "2,4")]
        guests: Vec<usize>,
        /// The kind of guests.
        #[arg(long, value_enum, default_value = "uml")]
        vmm: Between,
        /// Runs by each path.
        #[arg(long, default_value_t = 3)]
        rounds: usize,
        /// Rows of the matrix, which determine the sizes of all tests.
        #[arg(long, default_value_t = 500)]
        size: usize,
        /// The accelerator; by default, KVM is probed for.
        #[arg(long, value_enum)]
        accel: Option<Accel>,
    },
    /// Compares uploads by curl with uploads by the demo's own client, in the same world.
    Outside {
        /// How the guests share their core.
        #[arg(long, value_enum, default_value = "strict30")]
        sched: Scheduler,
        /// The link to the guests.
        #[arg(long, value_enum, default_value = "metro")]
        link: Link,
        /// Size of each upload, bytes.
        #[arg(long, default_value_t = 1_000_000)]
        bytes: usize,
        /// Uploads with each client over each path.
        #[arg(long, default_value_t = 30)]
        rounds: usize,
        /// The accelerator of QEMU.
        #[arg(long, value_enum, default_value = "tcg")]
        accel: Accel,
    },
    /// Compares congestion offload with Linux's own CUBIC over one bottleneck: goodput, losses,
    /// fairness.
    Compare {
        /// The kinds of cells.
        #[arg(long, value_enum, value_delimiter = ',', default_value = "alone,beside,far")]
        which: Vec<Which>,
        /// The highest rate, Mbit/s. Rates above 100 need a machine that does nothing else.
        #[arg(long, default_value_t = 100)]
        rate_most: u64,
        /// Fairness: the numbers of Linux flows beside one flow of ours.
        #[arg(long, value_delimiter = ',', default_value = "1,2,4,8")]
        others: Vec<usize>,
        /// Run one cell instead: rate in Mbit/s, round trip in ms, queue in bandwidth-delay
        /// products, loss in percent, as 20,20,1,0.
        #[arg(long)]
        cell: Option<Cell>,
        /// Frames that come late and are not lost, instead: 10 MB over 16 Mbit/s and 40 ms.
        #[arg(long)]
        reorder: bool,
        /// With --reorder: the number of lines side by side.
        #[arg(long, default_value_t = 4)]
        lines: usize,
        /// With --reorder: only the cells whose name has this.
        #[arg(long)]
        only: Option<String>,
        /// Runs of each arm of a cell.
        #[arg(long, default_value_t = 5)]
        rounds: usize,
        /// Seconds of a run; by default, the time that the cell needs.
        #[arg(long)]
        seconds: Option<u64>,
        /// The file of the result, instead of `target/compare/result.json`.
        #[arg(long)]
        out: Option<PathBuf>,
    },
    /// Measures how many VMs whose guests do not run delay others: echoes, changes, statuses.
    Crowd {
        /// Number of these VMs.
        #[arg(long, default_value_t = 1000)]
        vms: usize,
        /// Number of echoes without them, and of echoes beside them.
        #[arg(long, default_value_t = 20_000)]
        echoes: usize,
        /// Number of VMs that are added and removed, and of statuses that are asked for.
        #[arg(long, default_value_t = 25)]
        changes: usize,
    },
    /// Measures boosted VMs that want their core all the time, without guests: the shares of three
    /// and their losses in windows of a second, and echoes that a worker on the same core forwards.
    Boosted {
        /// The cgroups in which the VMs compete.
        #[arg(long, value_enum, default_value = "session")]
        layout: Layout,
        /// Seconds without boosts, with one VM boosted all the time, and with all three, each.
        #[arg(long, default_value_t = 60)]
        seconds: u64,
        /// `vm.boost` of each VM.
        #[arg(long, default_value = "15ms/90ms")]
        boost: String,
    },
    /// A VM that wants its core all the time, for `boosted`.
    #[command(hide = true)]
    Hog {
        /// The daemon's socket.
        socket: PathBuf,
        /// The core.
        core: usize,
    },
    /// Measures the papers' figures on real guests, each once, and writes
    /// `target/report/index.html`.
    Figures {
        /// How long it may take.
        #[arg(long, value_enum, default_value = "usual")]
        effort: Effort,
        /// Measure again what was measured before.
        #[arg(long)]
        anew: bool,
        /// The accelerator; by default, KVM is probed for.
        #[arg(long, value_enum)]
        accel: Option<Accel>,
    },
    /// Guests that send without end, as in the study of VM effects: the ACKs of one of them, as the
    /// host and the guest see them.
    AlwaysOn {
        /// Numbers of senders: a case for each.
        #[arg(long, value_delimiter = ',', default_value = "1,4,7")]
        senders: Vec<usize>,
        /// How guests share their core.
        #[arg(long, value_enum, default_value = "strict30")]
        sched: Scheduler,
        /// The line.
        #[arg(long, value_enum, default_value = "hundred")]
        link: Link,
        /// Megabytes that each sends.
        #[arg(long, default_value_t = 250)]
        megabytes: u64,
        /// Samples of each arm.
        #[arg(long, default_value_t = 3)]
        rounds: usize,
        /// The accelerator; by default, KVM is probed for.
        #[arg(long, value_enum)]
        accel: Option<Accel>,
    },
    /// Where segments to and from one of three guests of 60 % wait: in the host, and for the guest.
    Delays {
        /// How guests share their core.
        #[arg(long, value_enum, default_value = "strict30")]
        sched: Scheduler,
        /// The line.
        #[arg(long, value_enum, default_value = "gigabit")]
        link: Link,
        /// Bytes of a transfer.
        #[arg(long, default_value_t = 1_000_000)]
        bytes: usize,
        /// Transfers each way in a sample.
        #[arg(long, default_value_t = 20)]
        transfers: usize,
        /// Samples of each path.
        #[arg(long, default_value_t = 3)]
        rounds: usize,
        /// The accelerator; by default, KVM is probed for.
        #[arg(long, value_enum)]
        accel: Option<Accel>,
    },
    /// Several uploads at once to one of three guests of 60 %.
    Together {
        /// How guests share their core.
        #[arg(long, value_enum, default_value = "strict30")]
        sched: Scheduler,
        /// The line.
        #[arg(long, value_enum, default_value = "gigabit")]
        link: Link,
        /// Uploads at once.
        #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u8).range(1..=10))]
        connections: u8,
        /// Sizes of each, bytes.
        #[arg(long, value_delimiter = ',', default_value = "10000,100000,1000000")]
        sizes: Vec<usize>,
        /// Samples of each path and size.
        #[arg(long, default_value_t = 30)]
        rounds: usize,
        /// The accelerator; by default, KVM is probed for.
        #[arg(long, value_enum)]
        accel: Option<Accel>,
    },
    /// Writes `target/report/index.html` of the figures that were measured.
    Report,
    /// Runs the tests on real guests, with libtest's output.
    Test {
        /// Run only tests whose name contains this.
        #[arg(default_value = "")]
        filter: String,
        /// Keep captures without findings in this directory.
        #[arg(long)]
        captures: Option<PathBuf>,
    },
    /// Downloads and builds the images that guests boot, so that a later run needs no network.
    Prepare {
        /// Also those with programs of Debian, for the tests on real guests.
        #[arg(long)]
        test: bool,
    },
}

#[derive(clap::Args)]
struct DemoArguments {
    /// How the guests share their core.
    #[arg(long, value_enum)]
    sched: Option<Scheduler>,
    /// The link to the guests.
    #[arg(long, value_enum)]
    link: Option<Link>,
    /// The cgroups in which they share it.
    #[arg(long, value_enum, default_value = "session")]
    layout: Layout,
    /// Numbers of guests that share it: a case for each.
    #[arg(long, value_delimiter = ',', default_value = "3",
        value_parser = clap::value_parser!(u8).range(1..=7))]
    guests: Vec<u8>,
    /// Each guest's demand of the core, percent: a case for each.
    #[arg(long, value_delimiter = ',', default_value = "100",
        value_parser = clap::value_parser!(u64).range(1..=100))]
    loads: Vec<u64>,
    /// Where the daemon, passt and the VMMs' own threads run.
    #[arg(long, value_enum, default_value = "own")]
    host: HostCore,
    /// Most transfers for each path and size.
    #[arg(long, default_value_t = 100)]
    transfers: usize,
    /// Seconds for the transfers of one case.
    #[arg(long, default_value_t = 90)]
    seconds: u64,
    /// Sizes of the transfers, bytes. The default ends at 10 MB, without competition at 50 MB.
    #[arg(long, value_delimiter = ',')]
    sizes: Option<Vec<usize>>,
    /// The directions of the transfers.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "up,down")]
    directions: Vec<Direction>,
    /// The paths of uploads.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "tap,off,ack-offload")]
    paths: Vec<NetPath>,
    /// The paths of downloads.
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_value = "tap,off,flood-route,flood-bpf"
    )]
    down_paths: Vec<NetPath>,
    /// Requests and answers of 1 KB over each path of uploads, 20 a second, after the
    /// transfers and beside --seconds.
    #[arg(long, default_value_t = 0)]
    requests: usize,
    /// `vm.boost` of the guest at the other end, for the paths with boost.
    #[arg(long, default_value = "15ms/90ms")]
    boost: String,
    /// Buffers in the receive rings of the guests' NICs: 256, 512 or 1024 (QEMU 7.2). The
    /// default is QEMU's, 256.
    #[arg(long)]
    rx_ring: Option<u16>,
    /// Add downloads of 10 and 100 MB.
    #[arg(long)]
    full: bool,
    /// Three columns (tap, as installed, with all that is opt-in) and four sizes in two cases,
    /// in at most 30 lines, and `target/demo/report.html`. Fails only if data was wrong, or
    /// something is slower than tap for certain.
    #[arg(long, conflicts_with_all = ["sched", "link", "sizes", "full"])]
    short: bool,
    /// The accelerator; by default, KVM is probed for.
    #[arg(long, value_enum)]
    accel: Option<Accel>,
    /// Seed of the payloads, of the times and of the order.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

impl DemoArguments {
    fn options(self) -> Options {
        let guests: Vec<usize> = self.guests.iter().map(|&guests| guests.into()).collect();
        Options {
            cases: cases((self.sched, self.link), &guests, &self.loads, self.host),
            layout: self.layout,
            transfers: self.transfers,
            time: Duration::from_secs(self.seconds),
            sizes: self.sizes,
            directions: self.directions,
            paths: self.paths,
            down_paths: self.down_paths,
            requests: self.requests,
            boost: self.boost,
            rx_ring: self.rx_ring,
            full: self.full,
            is_short: self.short,
            accel: self.accel,
            seed: self.seed,
        }
    }
}

/// The demo's cases: the two cases that say most, or those that were asked for.
fn cases(
    (sched, link): (Option<Scheduler>, Option<Link>),
    guests: &[usize],
    loads: &[u64],
    host: HostCore,
) -> Vec<Terms> {
    let worlds = match (sched, link) {
        (None, None) => vec![(Scheduler::Eevdf, Link::Lan), (Scheduler::Strict30, Link::Metro)],
        _ => vec![(sched.unwrap_or(Scheduler::Eevdf), link.unwrap_or(Link::Lan))],
    };
    let mut cases = Vec::new();
    for (scheduler, link) in worlds {
        for &guests in guests {
            cases.extend(loads.iter().map(|&load_percent| {
                let placement = Placement { guests, load_percent, host };
                Terms { scheduler, link, placement }
            }));
        }
    }
    cases
}

fn main() {
    let passed = match Arguments::parse().command {
        Command::Demo(arguments) => demo::run(&arguments.options()),
        Command::DemoToe { guests, seconds, rounds_least, rounds, accel } => {
            let (time, rounds) = (Duration::from_secs(seconds), (rounds_least, rounds));
            demo_toe::run(&demo_toe::Options { guests, time, rounds, accel })
        }
        Command::Hpcc { guests, vmm, rounds, size, accel } => {
            hpcc::run(&hpcc::Options { guests, between: vmm, rounds, size, accel })
        }
        Command::Outside { sched: scheduler, link, bytes, rounds, accel } => {
            outside::run(&outside::Options { scheduler, link, bytes, rounds, accel })
        }
        Command::Compare { reorder: true, lines, only, rounds, out, .. } => {
            compare::run_reorder(lines, rounds, only.as_deref(), out)
        }
        Command::Compare { which, rate_most, others, cell, rounds, seconds, out, .. } => {
            let cells = match cell {
                None => Cell::all(&which, rate_most, &others),
                Some(cell) => vec![cell],
            };
            let time = seconds.map(Duration::from_secs);
            compare::run(&compare::Options { cells, rounds, time, out })
        }
        Command::Crowd { vms, echoes, changes } => {
            crowd::run(&crowd::Options { vms, echoes, changes })
        }
        Command::Boosted { layout, seconds, boost } => {
            let time = Duration::from_secs(seconds);
            boosted::run(&boosted::Options { layout, time, boost })
        }
        Command::AlwaysOn { senders, sched, link, megabytes, rounds, accel } => {
            let bytes = megabytes * 1_000_000;
            let (scheduler, exact) = (sched, true);
            let options =
                always_on::Options { senders, scheduler, link, bytes, rounds, exact, accel };
            always_on::run(&options)
        }
        Command::Delays { sched: scheduler, link, bytes, transfers, rounds, accel } => {
            let placement = Placement { guests: 3, load_percent: 60, host: HostCore::Guests };
            let terms = Terms { scheduler, link, placement };
            delays::run(&delays::Options { terms, bytes, transfers, rounds, accel })
        }
        Command::Together { sched: scheduler, link, connections, sizes, rounds, accel } => {
            let placement = Placement { guests: 3, load_percent: 60, host: HostCore::Guests };
            let terms = Terms { scheduler, link, placement };
            let connections = connections.into();
            together::run(&together::Options { terms, connections, sizes, rounds, accel })
        }
        Command::Figures { effort, anew, accel } => figures::run(effort, anew, accel),
        Command::Report => figures::report().map(|()| true),
        Command::Hog { socket, core } => boosted::hog(&socket, core),
        Command::Prepare { test } => prepare(test).map(|()| true),
        Command::Test { filter, captures } => scenario::run_all(&filter, captures.as_deref()),
    };
    end(passed);
}

/// Builds the images.
fn prepare(for_tests: bool) -> anyhow::Result<()> {
    if for_tests {
        return scenario::make_images("");
    }
    Image::for_qemu()?.with_sockets()?;
    Ok(())
}

/// Ends the process: 0 if everything was as it has to be.
fn end(passed: anyhow::Result<bool>) {
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
