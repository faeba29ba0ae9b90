//! A guest of QEMU moves between two daemons, which are side by side on one bridge, there and back,
//! while a remote host sends to it and reads from it.
//!
//! Connections that owed bytes at the stop are reset (LIFE-06), and no other; whatever arrives is
//! right.

use std::fs;
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use super::{LIMIT, MB};
use crate::daemon::{Daemon, Vm};
use crate::download::both;
use crate::host::{self, Host, guest_nic};
use crate::image::Image;
use crate::transfer::{Upload, fetch};
use crate::vmm::{Attach, Guest, Move, Places, Spec, Vmm};
use crate::world::{BOOT_LIMIT, Net, address, guest_name};

/// A migration within one machine takes half a second.
const MIGRATION_LIMIT: Duration = Duration::from_secs(30);
const MEMORY_MIB: u32 = 192;
/// Short ones, so that a migration meets them at any place.
const TRANSFER: usize = 8 * MB;

/// A VMM's QMP channel.
struct Qmp(BufReader<UnixStream>);

impl Qmp {
    fn connect(path: &Path) -> Result<Self> {
        let mut qmp = Self(BufReader::new(UnixStream::connect(path).context("QMP")?));
        qmp.0.get_ref().set_read_timeout(Some(MIGRATION_LIMIT))?;
        qmp.call("qmp_capabilities", &json!({}))?;
        Ok(qmp)
    }

    /// Greetings and events are read over.
    fn call(&mut self, execute: &str, arguments: &Value) -> Result<Value> {
        let command = json!({ "execute": execute, "arguments": arguments });
        writeln!(self.0.get_mut(), "{command}")?;
        let mut line = String::new();
        loop {
            line.clear();
            ensure!(self.0.read_line(&mut line)? > 0, "QEMU has closed QMP");
            let mut answer: Value = serde_json::from_str(&line)?;
            if let Some(error) = answer.get("error") {
                bail!("{execute}: {error}");
            }
            if let Some(value) = answer.get_mut("return") {
                return Ok(value.take());
            }
        }
    }

    /// Moves the VM to the VMM that listens there; its downtime by QEMU's clock.
    fn migrate(&mut self, to: &Path) -> Result<Duration> {
        let uri = format!("unix:{}", to.display());
        self.call("migrate", &json!({ "uri": uri }))?;
        let deadline = Instant::now() + MIGRATION_LIMIT;
        loop {
            let state = self.call("query-migrate", &json!({}))?;
            match state["status"].as_str() {
                Some("completed") => {
                    let ms = state["downtime"].as_u64().context("a downtime")?;
                    return Ok(Duration::from_millis(ms));
                }
                Some("failed" | "cancelled") => bail!("the migration failed: {state}"),
                _ => ensure!(Instant::now() < deadline, "it took too long: {state}"),
            }
            thread::sleep(Duration::from_millis(10)); // polls a condition of QEMU
        }
    }
}

/// Connections that are over.
#[derive(Debug, Default)]
struct Ends {
    whole: AtomicU64,
    reset: AtomicU64,
}

impl Ends {
    /// One ended so: well with the right bytes, or by a reset.
    fn note(&self, outcome: Result<bool>) -> Result<()> {
        match outcome {
            Ok(true) => self.whole.fetch_add(1, Ordering::Relaxed),
            Ok(false) => bail!("wrong bytes arrived"),
            Err(error) if is_reset(&error) => self.reset.fetch_add(1, Ordering::Relaxed),
            Err(error) => return Err(error),
        };
        Ok(())
    }
}

fn is_reset(error: &anyhow::Error) -> bool {
    let kinds = [ErrorKind::ConnectionReset, ErrorKind::BrokenPipe];
    let io = error.chain().find_map(|cause| cause.downcast_ref::<std::io::Error>());
    io.is_some_and(|error| kinds.contains(&error.kind()))
}

/// One connection to the guest: an upload, a download or both at once.
fn transfer(way: u64, seed: u64) -> Result<bool> {
    let guest = address(0, Net::Nightporter);
    match way {
        0 => Ok(Upload::new(TRANSFER, seed).send(guest, LIMIT)?.hash_ok),
        1 => fetch(guest, TRANSFER, seed, LIMIT).map(|()| true),
        _ => {
            let both = both(guest, TRANSFER, seed, LIMIT)?;
            Ok(both.up.hash_ok && both.down.hash_ok)
        }
    }
}

/// The two places of the guest.
struct Places2<'a> {
    daemons: Vec<Daemon>,
    vmm: Vmm,
    image: &'a Image,
    places: Places<'a>,
}

impl Places2<'_> {
    /// The VMM of the guest's `run`-th life, on each daemon in turn.
    fn start(&self, run: usize, waits: bool) -> Result<(Guest, PathBuf, PathBuf)> {
        let name = format!("guest0-{run}");
        let socket = |what| self.places.sockets.join(format!("{name}-{what}.sock"));
        let (qmp, incoming) = (socket("qmp"), socket("in"));
        let moves = Move { qmp: qmp.clone(), incoming: waits.then(|| incoming.clone()) };
        let daemon = &self.daemons[run % 2];
        let nic = guest_nic(0, Net::Nightporter.subnet());
        let nics = vec![(nic, Attach::VhostUser(daemon.socket(&guest_name(0))))];
        let neighbours = host::remote_neighbours(&[Net::Nightporter.subnet()]);
        let (vmm, memory_mib) = (self.vmm, MEMORY_MIB);
        let (toe, rx_ring, moves) = (None, None, Some(moves));
        let spec = Spec { name, vmm, memory_mib, nics, neighbours, toe, rx_ring, moves };
        let guest = Guest::start(&spec, self.image, self.places)?;
        let deadline = Instant::now() + MIGRATION_LIMIT;
        while waits && !incoming.exists() {
            ensure!(Instant::now() < deadline, "QEMU does not wait for a guest");
            thread::sleep(Duration::from_millis(5)); // polls a condition of QEMU
        }
        Ok((guest, qmp, incoming))
    }
}

/// Migrates so many times, with each kind of transfer in turn.
pub(super) fn run(
    (vmm, image): (Vmm, &Image),
    places: Places<'_>,
    migrations: usize,
) -> Result<()> {
    let host = Host::create(&[Net::Nightporter.subnet()], None)?;
    let nic = guest_nic(0, Net::Nightporter.subnet());
    host.remote().know(&nic)?;
    let mut daemons = Vec::new();
    for at in 0..2 {
        let (uplink, dir) = (format!("uplink{at}"), places.sockets.join(format!("host{at}")));
        host.add_tap(&uplink)?;
        fs::create_dir(&dir)?;
        let vm = Vm {
            name: guest_name(0),
            nic: nic.clone(),
            tap: None,
            behind: vec![],
            vmm,
            toe: false,
            boost: None,
        };
        let log = places.logs.join(format!("nightporterd{at}.log"));
        daemons.push(Daemon::start(&uplink, &[vm], &dir, &log)?);
    }
    let mut hosts = Places2 { daemons, vmm, image, places };
    let (mut guest, mut qmp, _) = hosts.start(0, false)?;
    guest.wait_ready(BOOT_LIMIT)?;
    for run in 1..=migrations {
        let way = run as u64 % 3;
        let (next, next_qmp, incoming) = hosts.start(run, true)?;
        let (ends, is_over) = (Ends::default(), AtomicBool::new(false));
        let downtime = thread::scope(|scope| {
            let talking = scope.spawn(|| {
                let mut seed = 1000 * run as u64;
                while !is_over.load(Ordering::Relaxed) {
                    seed += 1;
                    ends.note(host.remote().enter(|| transfer(way, seed)))?;
                }
                anyhow::Ok(())
            });
            let moved = Qmp::connect(&qmp).and_then(|mut qmp| qmp.migrate(&incoming));
            is_over.store(true, Ordering::Relaxed);
            talking.join().expect("does not panic").context("while it moved")?;
            moved
        })?;
        guest.die();
        (guest, qmp) = (next, next_qmp);
        // There nothing is amiss.
        let whole = host.remote().enter(|| transfer(way, run as u64));
        ensure!(whole.context("after it moved")?, "wrong bytes arrived after it moved");
        let early = hosts.daemons[run % 2].early_acked_bytes(&guest_name(0))?;
        ensure!(way == 1 || early > 0, "the next host acknowledges nothing early");
        let (whole, reset) = (ends.whole.into_inner(), ends.reset.into_inner());
        println!("migration {run}: downtime {downtime:?}, {whole} transfers whole, {reset} reset");
        ensure!(reset <= 1, "{reset} connections were reset, and one was there at a time");
    }
    drop(guest);
    hosts.daemons.into_iter().try_for_each(Daemon::stop)
}
