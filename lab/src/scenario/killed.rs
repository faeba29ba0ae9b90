//! A daemon that is killed or restarted again and again while connections carry data: each next one
//! goes on with them (issue 43, sections 1 and 2).

use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};
use nightporter_guest::data::splitmix64;
use nix::sys::signal::Signal;

use super::{LIMIT, MB, nightporter};
use crate::download::download;
use crate::image::log_dir;
use crate::transfer::{Upload, echo};
use crate::world::World;

/// Bytes of each transfer and direction.
const BYTES: usize = 5 * MB;

/// The way of a transfer's data.
#[derive(Clone, Copy, Debug)]
enum Load {
    Up,
    Down,
    Both,
}

const LOADS: [Load; 3] = [Load::Up, Load::Down, Load::Both];

impl Load {
    /// One transfer, from the calling thread's namespace; its bytes arrive whole.
    fn carry(self, seed: u64) -> Result<()> {
        let is_right = match self {
            Self::Up => Upload::new(BYTES, seed).send(nightporter(), LIMIT)?.hash_ok,
            Self::Down => download(nightporter(), BYTES, seed, LIMIT)?.hash_ok,
            Self::Both => {
                echo(nightporter(), BYTES, seed, LIMIT)?; // has no word by UDP, which is lost
                true
            }
        };
        ensure!(is_right, "{self:?}: what was read is not what was sent");
        Ok(())
    }
}

pub(super) fn ten_times(world: &mut World) -> Result<()> {
    run(world, 10)
}

pub(super) fn a_hundred_times(world: &mut World) -> Result<()> {
    run(world, 100)
}

/// The way of a daemon to the next one.
#[derive(Clone, Copy, Debug)]
enum Way {
    /// It is killed, and QEMU connects again.
    Crash,
    /// By this signal, and a supervisor keeps QEMU's connection.
    Kept(Signal),
}

const WAYS: [Way; 4] =
    [Way::Crash, Way::Kept(Signal::SIGKILL), Way::Crash, Way::Kept(Signal::SIGTERM)];

impl Way {
    /// Takes it; returns when the next daemon answers.
    fn take(self, world: &mut World, log: &Path) -> Result<()> {
        match self {
            Self::Crash => world.daemon()?.crash(log),
            Self::Kept(signal) => world.daemon()?.restart(signal, log),
        }
    }

    /// The daemon's log, once it says by which connection it has QEMU: by the one that it should.
    ///
    /// A transfer that was over when the daemon was killed does not wait for QEMU, so this does.
    fn log_with_its_vmm(self, path: &Path) -> Result<String> {
        let deadline = Instant::now() + LIMIT;
        loop {
            let log = fs::read_to_string(path).with_context(|| path.display().to_string())?;
            let (kept, anew) =
                (log.contains("is still connected"), log.contains("a front-end connected"));
            if kept || anew {
                let is_right = match self {
                    Self::Crash => !kept,
                    Self::Kept(_) => !anew,
                };
                ensure!(is_right, "{self:?}: kept: {kept}, connected again: {anew}");
                return Ok(log);
            }
            ensure!(Instant::now() < deadline, "{self:?}: no QEMU after {LIMIT:?}");
            thread::sleep(Duration::from_millis(5)); // polls a file
        }
    }
}

/// Ends the daemon at a random moment of each of `kills` transfers, and starts the next.
fn run(world: &mut World, kills: u64) -> Result<()> {
    let mut random = SystemTime::now().duration_since(UNIX_EPOCH)?.subsec_nanos().into();
    println!("the moments are those of {random}");
    let mut typical = [Duration::ZERO; LOADS.len()];
    for (load, takes) in LOADS.into_iter().zip(&mut typical) {
        world.remote().enter(|| load.carry(0))?; // the first of a guest takes longer
        let begun = Instant::now();
        world.remote().enter(|| load.carry(1))?;
        *takes = begun.elapsed();
    }
    let mut longest = [Duration::ZERO; 2];
    let (mut resumed, mut reset, mut over) = (0, 0, 0);
    let loads = LOADS.into_iter().zip(typical).cycle();
    for ((n, way), (load, takes)) in (0..kills).zip(WAYS.into_iter().cycle()).zip(loads) {
        // In the first four fifths: transfers vary, and a kill behind one shows nothing.
        let part = 0.8 * (splitmix64(&mut random) >> 11) as f64 / (1_u64 << 53) as f64;
        let moment = takes.mul_f64(part);
        let log = log_dir("when_its_daemon_was_killed")?.join(format!("{n}.log"));
        let remote = world.remote().clone();
        let begun = Instant::now();
        let what = || format!("{way:?} {n}, {moment:?} after an {load:?} began");
        thread::scope(|scope| {
            let carrying = scope.spawn(move || remote.enter(|| load.carry(n + 2)));
            thread::sleep(moment); // the kill is to come at any moment, also before a connection
            let is_amid = !carrying.is_finished();
            let killed = Instant::now();
            way.take(world, &log)?;
            let away = killed.elapsed();
            let outcome = carrying.join().expect("does not panic");
            if outcome.as_ref().is_err_and(is_reset) {
                reset += 1;
            } else {
                outcome.with_context(what)?;
            }
            if is_amid {
                let longest = &mut longest[usize::from(matches!(way, Way::Kept(_)))];
                *longest = begun.elapsed().saturating_sub(takes + away).max(*longest);
            } else {
                over += 1;
            }
            anyhow::Ok(())
        })?;
        let log = way.log_with_its_vmm(&log).with_context(what)?;
        resumed += u32::from(log.contains("connections go on when their guests are back"));
    }
    ensure!(
        over <= kills * 2 / 3,
        "{over} of {kills} transfers were over when the daemon was killed"
    );
    ensure!(reset == 0, "{reset} of {kills} connections were reset");
    ensure!(resumed > 0, "no daemon went on with a connection of the one before");
    let [again, kept] = longest;
    println!(
        "{kills} kills and restarts, {over} of them behind a transfer; {reset} resets; {resumed} \
         daemons went on with a connection that owed; a transfer took {again:?} longer at most \
         where QEMU connected again, and {kept:?} where it did not, the daemon's absence not \
         counted"
    );
    Ok(())
}

fn is_reset(error: &anyhow::Error) -> bool {
    let mut causes = error.chain().filter_map(|cause| cause.downcast_ref::<std::io::Error>());
    causes.any(|cause| cause.kind() == ErrorKind::ConnectionReset)
}
