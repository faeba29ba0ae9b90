//! A guest behind its VMM's own tap, which is attached: no byte is lost by the daemon, by its death
//! nor while it is away.

use std::io::ErrorKind;
use std::net::Ipv4Addr;
use std::thread;

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::Signal;

use super::{LIMIT, MB};
use crate::image::log_dir;
use crate::transfer::{Upload, echo, fetch};
use crate::world::{Net, World, address, attached_name};

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
