//! A guest behind its VMM's own tap, which is attached: no byte is lost by the daemon, by its death
//! nor while it is away.

use std::io::ErrorKind;
use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::Signal;

use super::{LIMIT, MB};
use crate::experiment::stats::{Quantiles, Ratio};
use crate::image::log_dir;
use crate::transfer::{Upload, echo, fetch};
use crate::world::{ATTACHED, Net, World, address, attached_name};

/// Times that the daemon may be away while it is judged, on a busy machine.
const JUDGED_TRIES: u32 = 5;

pub(super) fn run(world: &mut World) -> Result<()> {
    captured(world)?;
    killed_amid_an_upload(world)?;
    killed_with_bytes_held(world)
}

fn guest() -> Ipv4Addr {
    address(0, Net::Attached)
}

/// Uploads, downloads, and both at once; the captures are judged. Frames that pass a daemon which
/// is away are in no capture: then only bytes can be judged, and all is done again.
fn captured(world: &mut World) -> Result<()> {
    for _ in 0..JUDGED_TRIES {
        let before = world.daemon()?.frames_that_passed(&attached_name())?;
        let captures = world.capture(0, Net::Attached, &log_dir("attached")?)?;
        upload(world, 10 * MB, 1)?;
        world.remote().enter(|| fetch(guest(), 10 * MB, 2, LIMIT)).context("download")?;
        world.remote().enter(|| echo(guest(), 10 * MB, 3, LIMIT)).context("echo")?;
        let passed = world.daemon()?.frames_that_passed(&attached_name())? - before;
        if passed == 0 {
            let report = captures.check(world.daemon()?, [true, false], None)?;
            ensure!(report.flows == 3, "three connections: {report}");
            println!("attached: {report}");
            return ensure_early(world);
        }
        println!("attached: {passed} frames passed the daemon by");
        while world.daemon()?.backs_off(&attached_name())? {}
    }
    bail!("the daemon was away each of {JUDGED_TRIES} times")
}

fn upload(world: &World, bytes: usize, seed: u64) -> Result<()> {
    let upload = Upload::new(bytes, seed);
    let outcome = world.remote().enter(|| upload.send(guest(), LIMIT)).context("upload")?;
    ensure!(outcome.hash_ok, "the guest read something else than was sent");
    Ok(())
}

/// The daemon has acknowledged something ahead of the guest since it was started.
fn ensure_early(world: &mut World) -> Result<()> {
    let early = world.daemon()?.early_acked_bytes(&attached_name())?;
    ensure!(early > 0, "nothing was acknowledged ahead of the guest");
    Ok(())
}

/// The upload arrives whole. Without a daemon the tap is a plain one; with the next, connections
/// have the offload again.
fn killed_amid_an_upload(world: &mut World) -> Result<()> {
    let remote = world.remote().clone();
    let log = log_dir("attached")?.join("second.log");
    thread::scope(|scope| {
        let before = world.daemon()?.early_acked_bytes(&attached_name())?;
        let sending = scope.spawn(move || {
            let upload = Upload::new(100 * MB, 4);
            remote.enter(|| upload.send(guest(), LIMIT))
        });
        while world.daemon()?.early_acked_bytes(&attached_name())? < before + MB as u64 {
            ensure!(!sending.is_finished(), "the upload was over before the daemon was killed");
        }
        world.daemon()?.kill();
        ensure!(!sending.is_finished(), "the upload was over before the daemon was killed");
        upload(world, MB, 5).context("without a daemon")?;
        world.daemon()?.start_again(&log)?;
        let outcome = sending.join().expect("does not panic").context("amid the kill")?;
        ensure!(outcome.hash_ok, "the guest read something else than was sent");
        upload(world, MB, 6).context("with the next daemon")?;
        ensure_early(world)
    })
}

/// Times that the tap is detached and attached.
const CYCLES: u32 = 100;

/// Uploads and downloads go on meanwhile: none breaks, and all bytes are those that were sent.
pub(super) fn attached_again_and_again(world: &mut World) -> Result<()> {
    let remote = world.remote().clone();
    let ends = AtomicBool::new(false);
    let go_on = |transfer: &(dyn Fn(u64) -> Result<bool> + Sync)| -> Result<u64> {
        let mut done = 0;
        while !ends.load(Ordering::Relaxed) {
            ensure!(
                remote.enter(|| transfer(done))?,
                "the guest read something else than was sent"
            );
            done += 1;
        }
        Ok(done)
    };
    let up = |seed| Ok(Upload::new(10 * MB, seed).send(guest(), LIMIT)?.hash_ok);
    let down = |seed| fetch(guest(), 10 * MB, seed, LIMIT).map(|_| true);
    thread::scope(|scope| {
        let transfers = [scope.spawn(|| go_on(&up)), scope.spawn(|| go_on(&down))];
        let cycles = (0..CYCLES).try_for_each(|_| {
            let daemon = world.daemon()?;
            daemon.cli(&["vm", "remove", &attached_name()])?;
            daemon.cli(&["vm", "add", &attached_name(), &format!("tap={ATTACHED}")]).map(drop)
        });
        ends.store(true, Ordering::Relaxed);
        let [up, down] = transfers.map(|it| it.join().expect("does not panic"));
        cycles?;
        println!("{CYCLES} cycles, {} uploads and {} downloads of 10 MB", up?, down?);
        Ok(())
    })
}

/// The ways of [`bulk`]; the first is what the others are compared with.
const WAYS: [(&str, Net); 3] =
    [("tap", Net::Tap), ("vhost-user", Net::Nightporter), ("attached", Net::Attached)];
/// The measures of each.
const MEASURES: [&str; 3] = ["upload, ms", "download, ms", "round trip, us"];
/// Rounds, bytes of a transfer, and connections of a round whose SYN is timed.
const BULK_ROUNDS: u64 = 15;
const BULK: usize = 20 * MB;
const CONNECTS: u64 = 40;

/// One transfer at a time over each way, by turns, without any load: medians, and how many times
/// quicker it is than over the tap, with the 95 % interval.
pub(super) fn bulk(world: &mut World) -> Result<()> {
    let mut samples: [[Vec<f64>; 3]; 3] = Default::default();
    for (round, turn) in (0..BULK_ROUNDS).flat_map(|round| (0..3).map(move |turn| (round, turn))) {
        let way = (turn + usize::try_from(round)?) % 3;
        let (name, net) = WAYS[way];
        let guest = address(0, net);
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        let [up, down, trip] = &mut samples[way];
        let upload = Upload::new(BULK, round);
        let outcome = world.remote().enter(|| upload.send(guest, LIMIT)).context(name)?;
        ensure!(outcome.hash_ok, "the guest read something else than was sent");
        up.push(ms(outcome.delivered));
        let took = world.remote().enter(|| fetch(guest, BULK, round, LIMIT)).context(name)?;
        down.push(ms(took));
        let small = Upload::new(1000, round);
        for _ in 0..CONNECTS {
            let outcome = world.remote().enter(|| small.send(guest, LIMIT)).context(name)?;
            trip.push(ms(outcome.connect) * 1e3);
        }
    }
    for (at, what) in MEASURES.into_iter().enumerate() {
        for ((name, _), sample) in WAYS.into_iter().zip(&samples) {
            let pairs: Vec<_> =
                samples[0][at].iter().copied().zip(sample[at].iter().copied()).collect();
            let median = Quantiles::of(sample[at].iter().copied()).context("no sample")?.p50;
            let ratio = Ratio::of_medians(&pairs).context("no sample")?;
            let n = sample[at].len();
            println!("{what}, {name}: {median:.1} of {n}; {ratio:?}");
        }
    }
    Ok(())
}

fn is_reset(error: &anyhow::Error) -> bool {
    let mut causes = error.chain().filter_map(|cause| cause.downcast_ref::<std::io::Error>());
    causes.any(|cause| cause.kind() == ErrorKind::ConnectionReset)
}

/// The guest stands, and the daemon has acknowledged all bytes when it dies. The next one delivers
/// them, or the remote is told that they are lost: of a guest that has sent no more than its
/// SYN-ACK the record says too little (LIFE-09).
fn killed_with_bytes_held(world: &mut World) -> Result<()> {
    let remote = world.remote().clone();
    let held = Upload::new(100_000, 7);
    let mut sending = remote.enter(|| held.connect(guest(), LIMIT))?;
    world.guests[0].signal(Signal::SIGSTOP)?;
    sending.write()?;
    sending.wait_acked().context("waiting for the ACK of a guest that is stopped")?;
    world.daemon()?.crash(&log_dir("attached")?.join("third.log"))?;
    world.guests[0].signal(Signal::SIGCONT)?;
    match sending.finish() {
        Ok(outcome) => ensure!(outcome.hash_ok, "the guest read something else than was sent"),
        Err(error) if is_reset(&error) => {}
        Err(error) => bail!("neither whole nor reset: {error:#}"),
    }
    upload(world, MB, 8).context("after that")
}
