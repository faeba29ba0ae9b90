//! The tests on real guests: `nightporter-lab test`.
//!
//! Each scenario has a world of its own: network namespaces, daemon, guest. The output is
//! libtest's, so that whoever counts tests can count these.

mod attached;
mod containers;
mod correct;
mod gaps;
mod killed;
mod migrated;
mod programs;
mod sockets;

use std::fs;
use std::io::ErrorKind;
use std::net::Ipv4Addr;
use std::panic;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nightporter_guest::control::{Command, Reply};
use nix::sys::signal::Signal;
use serde_json::Value;

use crate::accel::Accel;
use crate::download::{both, download};
use crate::figures;
use crate::flood::Flood;
use crate::host;
use crate::hosts::Hosts;
use crate::image::{Image, NO_NP_FLOOD, log_dir};
use crate::link::Shape;
use crate::process;
use crate::rundir::RunDir;
use crate::transfer::{Upload, echo, fetch};
use crate::vmm::{Places, Vmm};
use crate::world::{BOOT_LIMIT, Net, World, address, guest_name};

/// No transfer of a scenario takes this long, not even with 5 % of its frames dropped.
const LIMIT: Duration = Duration::from_secs(60);

const MB: usize = 1_000_000;

/// Memory of a guest of [`Hosts`]: Debian's programs are in it.
const PAIR_MEMORY_MIB: u32 = 640;

/// The actions in the world of one host.
type InWorld = fn(&mut World) -> Result<()>;
/// The actions between two.
type Between = fn(&mut Hosts) -> Result<()>;

/// The actions, and their world.
#[derive(Clone, Copy)]
enum Run {
    InWorld(InWorld),
    Between(Between),
    /// A guest that moves so often.
    Migrations(usize),
    /// A figure of a paper, measured and drawn.
    Figure,
}

/// Name, guests by kind, what happens in the world. A scenario whose name begins with `long_` is
/// run only if asked for.
const IN_WORLD: [(&str, Kind, InWorld); 30] = [
    ("ten_megabytes_arrive_whole_each_way_and_as_an_echo", Kind::Qemu, ten_megabytes_each_way),
    ("a_user_mode_linux_guest_takes_and_sends_data", Kind::Uml, ten_megabytes_each_way),
    ("threads_of_a_user_mode_linux_guest_keep_their_vector_registers", Kind::Uml, vectors),
    ("uploads_to_a_routed_container_of_a_guest", Kind::UmlRouter, containers::routed),
    ("uploads_to_a_container_behind_a_bridge_of_a_guest", Kind::UmlRouter, containers::bridged),
    ("uploads_to_a_container_behind_nat_of_a_guest", Kind::UmlNat, containers::translated),
    ("a_connection_survives_a_driver_reset", Kind::Qemu, driver_reset),
    ("a_rebooted_guest_is_reachable_again", Kind::Qemu, reboot),
    ("the_remote_learns_that_a_guest_died_with_data_in_the_store", Kind::Qemu, killed),
    ("frames_lost_inside_the_guest_are_invisible_to_the_remote", Kind::Qemu, lossy_guest),
    ("offload_off_is_a_plain_switch_port", Kind::Qemu, offload_off),
    ("what_routes_flood_arrives_whole_and_nobody_repeats_anything", Kind::Qemu, flood_by_routes),
    ("routes_of_a_guest_without_ipv6_flood_too", Kind::Uml, flood_by_routes),
    ("what_np_flood_floods_arrives_whole", Kind::Qemu, flood_by_bpf),
    ("what_routes_flood_arrives_whole_over_a_bad_path", Kind::Qemu, flood_over_a_bad_path),
    ("a_download_goes_on_when_its_daemon_was_killed", Kind::Qemu, daemon_killed_by_routes),
    ("a_np_flood_download_goes_on_when_its_daemon_was_killed", Kind::Qemu, daemon_killed_by_bpf),
    ("transfers_go_on_ten_times_when_their_daemon_was_killed", Kind::Qemu, killed::ten_times),
    (
        "long_transfers_go_on_a_hundred_times_when_their_daemon_was_killed",
        Kind::Qemu,
        killed::a_hundred_times,
    ),
    ("long_gaps_when_their_daemon_was_killed", Kind::Qemu, gaps::run),
    ("what_comes_by_a_tap_that_is_attached_is_never_lost", Kind::QemuAttached, attached::run),
    ("long_life_of_an_attached_tap_of_user_mode_linux", Kind::UmlAttached, attached::run),
    (
        "long_attaching_and_detaching_amid_transfers",
        Kind::QemuAttached,
        attached::attached_again_and_again,
    ),
    ("long_bulk_over_an_attached_tap", Kind::QemuAttached, attached::bulk),
    ("long_bulk_over_an_attached_tap_of_user_mode_linux", Kind::UmlAttached, attached::bulk),
    ("two_user_mode_linux_guests_have_sockets_over_their_host", Kind::UmlToe, sockets::run),
    ("two_qemu_guests_have_sockets_over_their_host", Kind::QemuToe, sockets::run),
    ("programs_see_of_sockets_over_their_host_what_they_see_of_tcp", Kind::UmlToe, sockets::suite),
    ("long_suite_of_sockets_under_qemu", Kind::QemuToe, sockets::suite),
    ("long_sleep_of_a_container_of_a_guest", Kind::UmlRouter, containers::asleep),
];

/// The same of those between two hosts.
const BETWEEN: [(&str, Kind, Between); 9] = [
    ("programs_of_debian_have_sockets_over_hosts", Kind::UmlPrograms, programs::some),
    ("streams_over_hosts_lose_nothing", Kind::UmlToe, correct::short),
    ("streams_of_whoever_is_killed_are_reset", Kind::UmlToe, correct::killed),
    ("long_programs_of_debian", Kind::UmlAll, programs::all),
    ("long_programs_of_debian_under_qemu", Kind::QemuAll, programs::all),
    ("long_streams_over_hosts", Kind::UmlToe, correct::long),
    ("long_streams_over_hosts_under_qemu", Kind::QemuToe, correct::short),
    ("long_streams_of_whoever_is_killed_under_qemu", Kind::QemuToe, correct::killed),
    ("long_wait_for_a_host_that_vanished", Kind::UmlToe, correct::vanished),
];

/// The same of guests of QEMU that migrate so many times.
const MIGRATIONS: [(&str, usize); 2] =
    [("a_guest_migrates_under_load", 3), ("long_migrations_under_load", 20)];

/// That of a figure.
const FIGURE: &str = "a_figure_is_measured_on_a_guest_and_drawn";

/// Needless retransmissions that a 50 MB upload may have on a busy host. Beside six busy loops on
/// four cores half of the uploads had none; the worst of ten had 8 with captures, 19 without.
const PROBES_MAX: u64 = 10;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Qemu,
    Uml,
    /// One that forwards to a container.
    UmlRouter,
    /// One that translates its address, too.
    UmlNat,
    /// One with a tap that is attached.
    QemuAttached,
    UmlAttached,
    /// Two guests with socket devices.
    QemuToe,
    UmlToe,
    /// The same, with programs of Debian.
    UmlPrograms,
    /// And with all others.
    QemuAll,
    UmlAll,
}

/// A scenario: its name, its guests, and what happens.
type Scenario = (&'static str, Kind, Run);

/// Those with `filter` in their names, and all others.
fn choose(filter: &str) -> (Vec<Scenario>, Vec<Scenario>) {
    let in_world = IN_WORLD.iter().map(|&(name, kind, run)| (name, kind, Run::InWorld(run)));
    let between = BETWEEN.iter().map(|&(name, kind, run)| (name, kind, Run::Between(run)));
    let is_chosen = |name: &str| {
        name.contains(filter) && (filter.starts_with("long") || !name.starts_with("long"))
    };
    let migrations = MIGRATIONS.iter().map(|&(name, n)| (name, Kind::Qemu, Run::Migrations(n)));
    let figure = [(FIGURE, Kind::Qemu, Run::Figure)];
    in_world.chain(between).chain(migrations).chain(figure).partition(|(name, ..)| is_chosen(name))
}

/// Downloads, builds and packs the guests of [`run_all`], which then need not.
///
/// # Errors
/// See [`Image`].
pub fn make_images(filter: &str) -> Result<()> {
    Images::make(&choose(filter).0).map(drop)
}

/// Runs the scenarios whose name contains `filter`, and those that take long only if it begins as
/// their names do; whether all of them passed. Captures in which nothing was found are kept in
/// `captures`, as `SCENARIO-{with,without}-{remote,guest}.pcap`.
///
/// # Errors
/// The lab itself could not be set up.
pub fn run_all(filter: &str, captures: Option<&Path>) -> Result<bool> {
    process::die_cleanly_on_signals()?;
    let (chosen, others) = choose(filter);
    println!("\nrunning {} tests", chosen.len());
    let start = Instant::now();
    if let Some(dir) = captures {
        fs::create_dir_all(dir)?;
    }
    let lab = Lab::prepare(&chosen)?;
    println!("preparing took {:.1} s", start.elapsed().as_secs_f64());
    let (mut failures, mut ignored) = (Vec::new(), 0);
    for &(name, kind, run) in &chosen {
        if let Some(why) = lab.images.lacks(name, kind) {
            println!("test {name} ... ignored, {why}");
            ignored += 1;
            continue;
        }
        let begun = Instant::now();
        // A thread of its own, because a world takes its thread into its network namespace.
        let outcome = thread::scope(|scope| {
            let inside = scope.spawn(|| lab.run(name, kind, run, captures));
            inside.join().unwrap_or_else(|panic| panic::resume_unwind(panic))
        });
        process::yield_to_signal();
        println!("{name} took {:.1} s", begun.elapsed().as_secs_f64());
        println!("test {name} ... {}", if outcome.is_ok() { "ok" } else { "FAILED" });
        if let Err(error) = outcome {
            failures.push((name, error));
        }
    }
    for (name, error) in &failures {
        println!("\n---- {name} ----\n{error:#}");
    }
    let (failed, filtered) = (failures.len(), others.len());
    println!(
        "\ntest result: {}. {} passed; {failed} failed; {ignored} ignored; 0 measured; \
         {filtered} filtered out; finished in {:.2}s\n",
        if failed == 0 { "ok" } else { "FAILED" },
        chosen.len() - failed - ignored,
        start.elapsed().as_secs_f64()
    );
    Ok(failed == 0)
}

impl Kind {
    fn has_toe(self) -> bool {
        !matches!(self, Self::Qemu | Self::Uml) && !self.forwards() && !self.is_attached()
    }

    fn is_attached(self) -> bool {
        matches!(self, Self::QemuAttached | Self::UmlAttached)
    }

    fn forwards(self) -> bool {
        matches!(self, Self::UmlRouter | Self::UmlNat)
    }
}

/// The guests' images.
struct Images {
    qemu: Image,
    uml: Image,
    /// Those with more in them, by who has them.
    larger: Vec<(Kind, Image)>,
    /// Why there is none that translates addresses.
    no_nat: Option<String>,
}

impl Images {
    fn make(scenarios: &[Scenario]) -> Result<Self> {
        let (qemu, uml) = (Image::for_qemu()?, Image::for_uml()?);
        let mut larger = Vec::new();
        let mut no_nat = None;
        if scenarios.iter().any(|(_, of, _)| *of == Kind::UmlNat) {
            match uml.with_nat() {
                Ok(image) => larger.push((Kind::UmlNat, image)),
                Err(error) => no_nat = Some(format!("{error:#}")),
            }
        }
        for kind in [
            Kind::UmlRouter,
            Kind::QemuToe,
            Kind::UmlToe,
            Kind::UmlPrograms,
            Kind::QemuAll,
            Kind::UmlAll,
        ] {
            if scenarios.iter().any(|(_, of, _)| *of == kind) {
                let image = match kind {
                    Kind::UmlRouter => uml.with_router()?,
                    Kind::QemuToe => qemu.with_sockets()?,
                    Kind::UmlPrograms => programs::image(&uml.with_sockets()?)?,
                    Kind::QemuAll => programs::image_of_all(&qemu.with_sockets()?)?,
                    Kind::UmlAll => programs::image_of_all(&uml.with_sockets()?)?,
                    _ => uml.with_sockets()?,
                };
                larger.push((kind, image));
            }
        }
        Ok(Self { qemu, uml, larger, no_nat })
    }
}

impl Images {
    /// A thing that is not to be had here, and this scenario needs.
    fn lacks(&self, name: &str, kind: Kind) -> Option<&str> {
        match kind {
            Kind::UmlNat => self.no_nat.as_deref(),
            _ if name.contains("np_flood") && !self.qemu.np_flood => Some(NO_NP_FLOOD),
            _ => None,
        }
    }
}

struct Lab {
    accel: Accel,
    images: Images,
}

impl Lab {
    fn prepare(scenarios: &[Scenario]) -> Result<Self> {
        let images = Images::make(scenarios)?;
        Ok(Self { accel: Accel::probe(&images.qemu)?, images })
    }

    fn guest(&self, kind: Kind) -> Result<(Vmm, &Image)> {
        let vmm = match kind {
            Kind::Qemu | Kind::QemuAttached | Kind::QemuToe | Kind::QemuAll => {
                Vmm::Qemu(self.accel)
            }
            Kind::Uml
            | Kind::UmlAttached
            | Kind::UmlRouter
            | Kind::UmlNat
            | Kind::UmlToe
            | Kind::UmlPrograms
            | Kind::UmlAll => Vmm::Uml,
        };
        let larger = self.images.larger.iter().find(|(of, _)| *of == kind).map(|(_, image)| image);
        let image = match kind {
            Kind::Qemu | Kind::QemuAttached => Some(&self.images.qemu),
            Kind::Uml | Kind::UmlAttached => Some(&self.images.uml),
            _ => larger,
        };
        Ok((vmm, image.context("the image was not prepared")?))
    }

    fn run(&self, name: &str, kind: Kind, run: Run, keep: Option<&Path>) -> Result<()> {
        let run_dir = RunDir::create()?;
        let places = Places { sockets: run_dir.path(), logs: &log_dir(name)? };
        let guest = self.guest(kind)?;
        match run {
            Run::Migrations(count) => migrated::run(guest, places, count),
            Run::Figure => figures::one(self.accel),
            Run::Between(run) => {
                let mut hosts = Hosts::start(guest.0, guest.1, PAIR_MEMORY_MIB, places)?;
                run(&mut hosts)?;
                hosts.stop()
            }
            // Two guests that reach each other by the switch, and have sockets over their host.
            Run::InWorld(run) if kind.has_toe() => {
                let mut world = World::start_with_toe(&[guest, guest], places)?;
                run(&mut world)?;
                world.stop()
            }
            Run::InWorld(run) if kind.forwards() => {
                let mut world = World::start_router(guest, places)?;
                run(&mut world)?;
                world.stop()
            }
            Run::InWorld(run) if kind.is_attached() => {
                let mut world = World::start_attached(guest, places)?;
                run(&mut world)?;
                world.stop()
            }
            Run::InWorld(run) => one_guest(name, guest, run, places, keep),
        }
    }
}

/// One guest, whose connections are captured and judged.
fn one_guest(
    name: &str,
    guest: (Vmm, &Image),
    run: InWorld,
    places: Places<'_>,
    keep: Option<&Path>,
) -> Result<()> {
    let path = name.ends_with("bad_path").then_some(Shape::BAD);
    let mut world = World::start(&[guest], true, path, places)?;
    let captured = !name.ends_with("daemon_was_killed"); // a capture ends with its daemon
    let captures = captured.then(|| world.capture(0, Net::Nightporter, places.logs)).transpose()?;
    run(&mut world)?;
    if let Some(captures) = captures {
        // Only this one never had it on; and the host sends for guests that flood.
        let offload = !name.starts_with("offload_off");
        let sends = name.contains("flood");
        let word = if offload { "with" } else { "without" };
        let keep = keep.map(|dir| dir.join(format!("{name}-{word}")));
        let report = captures.check(world.daemon()?, [offload, sends], keep.as_deref())?;
        ensure!(report.flows > 0, "the captures hold no connection: {report}");
        println!("{name}: {report}");
    }
    world.stop()
}

fn nightporter() -> Ipv4Addr {
    address(0, Net::Nightporter)
}

fn upload(world: &World, bytes: usize, seed: u64) -> Result<u32> {
    let upload = Upload::new(bytes, seed);
    let outcome = world.remote().enter(|| upload.send(nightporter(), LIMIT)).context("upload")?;
    ensure!(outcome.hash_ok, "the guest read something else than was sent");
    Ok(outcome.retransmits)
}

fn ten_megabytes_each_way(world: &mut World) -> Result<()> {
    upload(world, 10 * MB, 1)?;
    world.remote().enter(|| fetch(nightporter(), 10 * MB, 2, LIMIT)).context("download")?;
    world.remote().enter(|| echo(nightporter(), 10 * MB, 3, LIMIT)).context("echo")
}

/// Two threads of the guest take its CPU from each other, and interrupts take it from both.
fn vectors(world: &mut World) -> Result<()> {
    world.guests[0].send(&Command::Vectors { rounds: 2_000 })?;
    ten_megabytes_each_way(world)?;
    match world.guests[0].hear_within(LIMIT)? {
        Reply::Ok => Ok(()),
        other => bail!("vectors was answered with {other:?}"),
    }
}

/// The driver leaves the device in the middle of an upload and comes back.
fn driver_reset(world: &mut World) -> Result<()> {
    let remote = world.remote().clone();
    thread::scope(|scope| {
        let sending = scope.spawn(move || {
            let upload = Upload::new(50 * MB, 4);
            remote.enter(|| upload.send(nightporter(), LIMIT))
        });
        let nic = Net::Nightporter.nic();
        world.guests[0].call(&Command::DriverUnbind { nic })?;
        ensure!(!sending.is_finished(), "the upload was over before the driver was reset");
        world.guests[0].call(&Command::DriverBind { nic })?;
        let outcome = sending.join().expect("does not panic").context("upload")?;
        ensure!(outcome.hash_ok, "the guest read something else than was sent");
        Ok(())
    })
}

fn reboot(world: &mut World) -> Result<()> {
    upload(world, MB, 5)?;
    world.guests[0].send(&Command::Reboot)?;
    world.guests[0].wait_ready(BOOT_LIMIT)?;
    upload(world, MB, 6).map(drop)
}

/// The guest is stopped with a connection open, takes nothing more, and is then killed. Bytes that
/// the daemon has acknowledged by then can never be delivered; the remote must get a reset.
fn killed(world: &mut World) -> Result<()> {
    let remote = world.remote().clone();
    let upload = Upload::new(100_000, 7);
    let mut sending = remote.enter(|| upload.connect(nightporter(), LIMIT))?;
    world.guests[0].signal(Signal::SIGSTOP)?;
    sending.write()?;
    sending.wait_acked().context("waiting for the ACK of a guest that is stopped")?;
    world.guests.remove(0).kill();
    let end = sending.wait_failed()?;
    ensure!(end == ErrorKind::ConnectionReset, "the connection ended with {end:?}");
    Ok(())
}

fn lossy_guest(world: &mut World) -> Result<()> {
    let nic = Net::Nightporter.nic();
    world.guests[0].call(&Command::DropFrames { nic, percent: 5 })?;
    let retransmits = upload(world, 50 * MB, 8)?;
    match world.guests[0].call(&Command::DropStatus { nic })? {
        Reply::Dropped { seen, dropped } => {
            ensure!(dropped * 50 > seen, "the guest dropped {dropped} of {seen} frames only");
        }
        other => bail!("drop status was answered with {other:?}"),
    }
    // On a busy host an ACK may be some milliseconds late, and the remote then sends its last
    // segment once more (a tail loss probe, RFC 8985 section 7). The daemon has it already and
    // counts a duplicate. A segment that was lost or refused would not be one.
    let duplicates = duplicates_from_remote(world)?;
    ensure!(
        u64::from(retransmits) <= duplicates.min(PROBES_MAX),
        "the remote retransmitted {retransmits} segments; {duplicates} of them were not needed"
    );
    Ok(())
}

/// Segments of the remote that brought nothing new.
fn duplicates_from_remote(world: &mut World) -> Result<u64> {
    let status = world.daemon()?.cli(&["--json", "status"])?;
    let status: Value = serde_json::from_str(&status).context("reading the daemon's status")?;
    let uplink = &status["ports"][0];
    ensure!(uplink["kind"] == "tap", "the first port is the uplink: {status}");
    Ok(uplink["drops"]["duplicate"].as_u64().unwrap_or(0))
}

fn offload_off(world: &mut World) -> Result<()> {
    world.daemon()?.set_offload(&guest_name(0), false)?;
    ten_megabytes_each_way(world)
}

/// Has the guest flood in this way, and H send for it.
fn flood(world: &mut World, how: Flood) -> Result<()> {
    world.daemon()?.set_congestion_offload(&guest_name(0), true)?;
    world.guests[0].flood(Some(how))
}

fn fetch_whole(world: &World, bytes: usize, seed: u64) -> Result<Duration> {
    let outcome = world.remote().enter(|| download(nightporter(), bytes, seed, LIMIT));
    let outcome = outcome.context("download")?;
    ensure!(outcome.hash_ok, "the remote read something else than the guest had to send");
    Ok(outcome.delivered)
}

fn flood_by_routes(world: &mut World) -> Result<()> {
    flood(world, Flood::Route)?;
    let before = world.complaints(0)?;
    fetch_whole(world, 10 * MB, 9)?;
    ten_megabytes_each_way(world)?;
    both_ways(world, 10 * MB, 13)?;
    let after = world.complaints(0)?;
    ensure!(!after.rose_since(&before), "complaints rose from {before:?} to {after:?}");
    let sent = world.daemon()?.vm_counter("sent_for_guest_bytes")?;
    ensure!(sent >= 40_000_000, "the daemon has sent {sent} bytes only of four times 10 MB");
    world.guests[0].flood(None)
}

fn flood_by_bpf(world: &mut World) -> Result<()> {
    flood(world, Flood::Bpf)?;
    let before = world.complaints(0)?;
    fetch_whole(world, 10 * MB, 10)?;
    both_ways(world, 10 * MB, 12)?;
    let after = world.complaints(0)?;
    ensure!(!after.rose_since(&before), "complaints rose from {before:?} to {after:?}");
    let sent = world.daemon()?.vm_counter("sent_for_guest_bytes")?;
    ensure!(sent >= 20_000_000, "the daemon has sent {sent} bytes only of twice 10 MB");
    world.guests[0].flood(None)
}

/// Frames are lost, marked and too long. The daemon repeats lost ones, and the guest sees none of
/// it; it answers losses and marks by smaller windows, and the router by shorter segments.
fn flood_over_a_bad_path(world: &mut World) -> Result<()> {
    world.remote().enter(|| host::sysctl("net/ipv4/tcp_ecn", "1"))?;
    flood(world, Flood::Route)?;
    // The guest gets the router's error as well, repeats the packets that were too long, and sends
    // shorter ones from then on.
    fetch_whole(world, 5 * MB, 14)?;
    let before = world.guests[0].counted(["TCPSackRecovery"])?;
    both_ways(world, 5 * MB, 15)?;
    let after = world.guests[0].counted(["TCPSackRecovery"])?;
    ensure!(before == after, "the guest recovers, {after:?} times, {before:?} before");
    let harm = world.host().watch().context("a line")?.lock().expect("no panics").harm;
    ensure!(harm.marked > 0 && harm.refused > 0 && harm.lost > 0, "a good path: {harm:?}");
    // Each loss is answered once at most, so the others are answers to marks.
    ensure!(harm.reduced > harm.lost, "marks are not answered: {harm:?}");
    let repeated = world.daemon()?.vm_counter("remote_retransmissions")?;
    ensure!(repeated >= harm.lost, "the daemon has repeated {repeated} segments: {harm:?}");
    let sent = world.daemon()?.vm_counter("sent_for_guest_bytes")?;
    ensure!(sent >= 10_000_000, "the daemon has sent {sent} bytes only of twice 5 MB");
    println!("a bad path: {harm:?}, {repeated} segments repeated");
    world.guests[0].flood(None)
}

/// One connection that carries so many bytes each way at the same time.
fn both_ways(world: &World, bytes: usize, seed: u64) -> Result<()> {
    let outcome = world.remote().enter(|| both(nightporter(), bytes, seed, LIMIT));
    let outcome = outcome.context("both ways at once")?;
    ensure!(outcome.up.hash_ok, "the guest read something else than was sent");
    ensure!(outcome.down.hash_ok, "the remote read something else than the guest had to send");
    Ok(())
}

fn daemon_killed_by_routes(world: &mut World) -> Result<()> {
    daemon_killed(world, Flood::Route)
}

fn daemon_killed_by_bpf(world: &mut World) -> Result<()> {
    daemon_killed(world, Flood::Bpf)
}

/// The guest has every byte that the remote has not acknowledged, and sends it by itself.
fn daemon_killed(world: &mut World, how: Flood) -> Result<()> {
    flood(world, how)?;
    let remote = world.remote().clone();
    thread::scope(|scope| {
        let fetching =
            scope.spawn(move || remote.enter(|| download(nightporter(), 100 * MB, 11, LIMIT)));
        while world.daemon()?.vm_counter("sent_for_guest_bytes")? < 10_000_000 {
            ensure!(!fetching.is_finished(), "the download was over before the daemon was killed");
        }
        let log = log_dir("when_its_daemon_was_killed")?.join("second.log");
        world.daemon()?.crash(&log)?;
        let outcome = fetching.join().expect("does not panic").context("download")?;
        ensure!(outcome.hash_ok, "the remote read something else than the guest had to send");
        Ok(())
    })
}
