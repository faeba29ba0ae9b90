//! A guest of QEMU moves between two daemons, which are side by side on one bridge, there and back,
//! while a remote host sends to it and reads from it.
//!
//! Connections that owed bytes at the stop are reset (LIFE-06), and no other; whatever arrives is
//! right. Before the guest goes on, its memory there is compared with its memory here (LIFE-15).
//!
//! **QEMU under TCG loses writes of its own guest**, also with a tap and no daemon at all. When it
//! looks for dirty pages it makes vCPUs report writes again only if it finds pages of which it did
//! not know (`cpu_physical_memory_sync_dirty_bitmap()` of QEMU 7.2, `num_dirty`). When it begins it
//! knows all pages to be dirty, and of those that are not sent yet later on, too. So it does not
//! notice writes to pages that a vCPU has in its TLB then, until that is flushed. Here QEMU looks
//! twice: when it begins, and when the guest stands (without a downtime that is allowed, it sends
//! all pages once before that). After the first time its TLB is flushed by a change of its map of
//! addresses, such as the bus master bit of a PCI device; until then hardly a page is sent.

use std::fs;
use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use super::{LIMIT, MB};
use crate::daemon::{Daemon, Vm};
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
/// Bytes that a migration may send in a second: hardly a page until the TLB is flushed, then any
/// number.
const TRICKLE: u64 = 4096;
const FAST: u64 = 1 << 30;
/// The command register of the SATA controller of QEMU's q35, which no guest here uses, at the
/// ports for PCI's configuration; its bus master bit is turned on, then off.
const PCI_COMMAND: u32 = 0x8000_fa04;
const BUS_MASTER: [u16; 2] = [4, 0];
const PAGE: usize = 4096;
/// Memory is compared in such pieces.
const CHUNK: usize = 1 << 20;

/// A VMM's QMP channel.
struct Qmp(BufReader<UnixStream>);

impl Qmp {
    /// As soon as it listens.
    fn connect(path: &Path) -> Result<Self> {
        let deadline = Instant::now() + MIGRATION_LIMIT;
        let stream = loop {
            match UnixStream::connect(path) {
                Err(_) if Instant::now() < deadline => {}
                done => break done.context("QMP")?,
            }
            thread::sleep(Duration::from_millis(5)); // polls a condition of QEMU
        };
        let mut qmp = Self(BufReader::new(stream));
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

    /// Makes vCPUs report all writes from now on; see the module's doc.
    fn flush_tlb(&mut self) -> Result<()> {
        for bit in BUS_MASTER {
            for line in [format!("o /w 0xcf8 {PCI_COMMAND}"), format!("o /h 0xcfc {bit}")] {
                let said = self.call("human-monitor-command", &json!({ "command-line": line }))?;
                ensure!(said == "", "{line}: {said}");
            }
        }
        Ok(())
    }

    /// Moves the VM to another VMM, where it does not go on by itself, over this socket; its
    /// downtime by QEMU's clock.
    fn migrate(&mut self, to: &mut Self, socket: &Path) -> Result<Duration> {
        let uri = format!("unix:{}", socket.display());
        to.call("migrate-incoming", &json!({ "uri": uri }))?;
        let deadline = Instant::now() + MIGRATION_LIMIT;
        let parameters = json!({ "max-bandwidth": TRICKLE, "downtime-limit": 0 });
        self.call("migrate-set-parameters", &parameters)?;
        self.call("migrate", &json!({ "uri": uri }))?;
        let mut is_flushed = false;
        loop {
            let state = self.call("query-migrate", &json!({}))?;
            match state["status"].as_str() {
                Some("active") if !is_flushed => {
                    self.flush_tlb()?;
                    self.call("migrate-set-parameters", &json!({ "max-bandwidth": FAST }))?;
                    is_flushed = true;
                }
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

/// The memory of a VMM's guest.
fn memory(vmm: i32) -> Result<File> {
    for entry in fs::read_dir(format!("/proc/{vmm}/fd"))? {
        let path = entry?.path();
        // One that was closed meanwhile has no name.
        let name = fs::read_link(&path).unwrap_or_default();
        if name.to_string_lossy().contains("memory-backend-memfd") {
            return Ok(File::open(path)?);
        }
    }
    bail!("QEMU has no memory in a file")
}

/// The pages that are not the same in two VMMs, whose guests both stand.
fn differences(vmms: [i32; 2]) -> Result<Vec<usize>> {
    let [mut one, mut other] = [memory(vmms[0])?, memory(vmms[1])?];
    let mut chunks = [vec![0; CHUNK], vec![0; CHUNK]];
    let mut differ = Vec::new();
    for chunk in 0..MEMORY_MIB as usize {
        one.read_exact(&mut chunks[0])?;
        other.read_exact(&mut chunks[1])?;
        let pages = chunks[0].chunks(PAGE).zip(chunks[1].chunks(PAGE)).enumerate();
        let pages = pages.filter(|(_, (one, other))| one != other);
        differ.extend(pages.map(|(at, _)| chunk * CHUNK / PAGE + at));
    }
    Ok(differ)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Up,
    Down,
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

/// An upload to the guest, a download, or one of each at once.
fn transfer(ways: &[Way], seed: u64, ends: &Ends) -> Result<()> {
    let guest = address(0, Net::Nightporter);
    thread::scope(|scope| {
        let transfers = ways.iter().map(|way| {
            scope.spawn(move || match way {
                Way::Up => Ok(Upload::new(TRANSFER, seed).send(guest, LIMIT)?.hash_ok),
                Way::Down => fetch(guest, TRANSFER, seed, LIMIT).map(|_| true),
            })
        });
        let transfers: Vec<_> = transfers.collect();
        let mut outcomes = transfers.into_iter().map(|it| it.join().expect("does not panic"));
        outcomes.try_for_each(|outcome| ends.note(outcome))
    })
}

/// The two places of the guest.
struct Places2<'a> {
    daemons: Vec<Daemon>,
    vmm: Vmm,
    image: &'a Image,
    places: Places<'a>,
}

impl Places2<'_> {
    /// The VMM of the guest's `run`-th life, on each daemon in turn; but in its first the guest
    /// comes from another one.
    fn start(&self, run: usize) -> Result<(Guest, Qmp)> {
        let name = format!("guest0-{run}");
        let qmp = self.socket(&format!("{name}-qmp"));
        let moves = Move { qmp: qmp.clone(), waits: run > 0 };
        let daemon = &self.daemons[run % 2];
        let nic = guest_nic(0, Net::Nightporter.subnet());
        let nics = vec![(nic, Attach::VhostUser(daemon.socket(&guest_name(0))))];
        let neighbours = host::remote_neighbours(&[Net::Nightporter.subnet()]);
        let (vmm, memory_mib) = (self.vmm, MEMORY_MIB);
        let (toe, rx_ring, moves) = (None, None, Some(moves));
        let spec = Spec { name, vmm, memory_mib, nics, neighbours, toe, rx_ring, moves };
        let guest = Guest::start(&spec, self.image, self.places)?;
        Ok((guest, Qmp::connect(&qmp)?))
    }

    fn socket(&self, name: &str) -> PathBuf {
        self.places.sockets.join(format!("{name}.sock"))
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
    let (mut guest, mut qmp) = hosts.start(0)?;
    guest.wait_ready(BOOT_LIMIT)?;
    for run in 1..=migrations {
        let ways: &[Way] = [&[Way::Up, Way::Down], &[Way::Up][..], &[Way::Down]][run % 3];
        let (next, mut next_qmp) = hosts.start(run)?;
        let (ends, is_over) = (Ends::default(), AtomicBool::new(false));
        let downtime = thread::scope(|scope| {
            let talking = scope.spawn(|| {
                let mut seed = 1000 * run as u64;
                while !is_over.load(Ordering::Relaxed) {
                    seed += 1;
                    host.remote().enter(|| transfer(ways, seed, &ends))?;
                }
                anyhow::Ok(())
            });
            let moved = qmp.migrate(&mut next_qmp, &hosts.socket("moves")).and_then(|downtime| {
                let differ = differences([guest.pid(), next.pid()])?;
                ensure!(differ.is_empty(), "pages {differ:x?} are not as they were");
                next_qmp.call("cont", &json!({}))?;
                Ok(downtime)
            });
            is_over.store(true, Ordering::Relaxed);
            let talked = talking.join().expect("does not panic").context("while it moved");
            let downtime = moved?; // a guest that does not go on ends the talk, too
            talked.map(|()| downtime)
        })?;
        guest.die();
        (guest, qmp) = (next, next_qmp);
        let (whole, reset) = (ends.whole.into_inner(), ends.reset.into_inner());
        println!("migration {run}: downtime {downtime:?}, {whole} transfers whole, {reset} reset");
        let most = ways.len() as u64;
        // Of a download the remote was promised nothing.
        let owe = ways.iter().filter(|way| **way == Way::Up).count() as u64;
        ensure!(reset <= owe, "{reset} connections were reset, and {owe} may have owed something");
        // There nothing is amiss.
        let after = Ends::default();
        host.remote().enter(|| transfer(ways, run as u64, &after)).context("after it moved")?;
        ensure!(after.whole.into_inner() == most, "connections were reset after it moved");
        let early = hosts.daemons[run % 2].early_acked_bytes(&guest_name(0))?;
        ensure!(ways == [Way::Down] || early > 0, "the next host acknowledges nothing early");
    }
    drop(guest);
    hosts.daemons.into_iter().try_for_each(Daemon::stop)
}
