//! [`Mallory`], who does whatever comes to his mind as fast as he can, beside two VMs that hear
//! each other.
//!
//! In CI so many things are done, each kind of them is, each echo of the neighbours has to arrive,
//! and the daemon has to take no more memory than `--check` says. `make hostile` runs it for an
//! hour (`HOSTILE_S`, `SEED`), on a machine that does nothing else, and asks how long echoes take
//! that are due every millisecond (`times`), beside him and alone; each minute it says how it is.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::unix::fs::MetadataExt;
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use nightporterd::config::Source;
use nix::unistd::gettid;

use crate::guest::{Guest, PLAIN};
use crate::host::LIMIT;
use crate::mallory::kernel::{OVERLAY_VNI, PEER};
use crate::mallory::{Device, Mallory};
use crate::street::Street;
use crate::times::{Echoes, Times, at_fixed_times};

/// By when all has to be done and seen in CI that is to be.
const DEEDS_LIMIT: Duration = Duration::from_secs(120);
/// In hours: VMs by which he makes the daemon wait, and how many things are done to rings for one
/// of the others, which the daemon takes its time for.
const IN_HOURS: (usize, u64) = (12, 10);
/// Echoes beside him, then alone, and so on: a machine is not the same for an hour.
const ECHOES_BESIDE: u64 = 500;
const ECHOES_ALONE: u64 = 100;
/// Echoes in between that count for neither: what he did last is worked off by these.
const ECHOES_OF_REST: u64 = 10;
const REPORT_INTERVAL: Duration = Duration::from_secs(60);
/// He does nothing for so long if nobody of him could do anything so often.
const IDLE_TRIES: u32 = 64;
const IDLE: Duration = Duration::from_micros(200);

/// Messages between two threads.
#[derive(Default)]
struct Brake {
    lever: Mutex<Lever>,
    moved: Condvar,
    deeds: AtomicU64,
    /// His deeds done and not yet done when he last held.
    done: Mutex<(BTreeMap<&'static str, u64>, Vec<&'static str>)>,
}

#[derive(Default)]
struct Lever {
    /// He is to do nothing.
    on: bool,
    /// He does nothing.
    holds: bool,
    is_over: bool,
}

impl Brake {
    fn set(&self, on: bool) {
        let mut lever = self.lever.lock().unwrap();
        lever.on = on;
        self.moved.notify_all();
        let heard = self.moved.wait_timeout_while(lever, LIMIT, |lever| lever.holds != on);
        assert!(!heard.unwrap().1.timed_out(), "he does not hear");
    }

    /// He goes on until it is over.
    fn drive(&self, mallory: &mut Mallory) {
        let mut idle = 0;
        loop {
            let mut lever = self.lever.lock().unwrap();
            if lever.on {
                *self.done.lock().unwrap() = (mallory.done.clone(), mallory.missing());
                lever.holds = true;
                self.moved.notify_all();
                let waits = |lever: &mut Lever| lever.on && !lever.is_over;
                lever = self.moved.wait_while(lever, waits).unwrap();
                lever.holds = false;
                self.moved.notify_all();
            } else if idle > IDLE_TRIES {
                idle = 0;
                lever = self.moved.wait_timeout(lever, IDLE).unwrap().0;
            }
            if lever.is_over {
                return;
            }
            drop(lever);
            idle = if mallory.does_something() { 0 } else { idle + 1 };
            self.deeds.store(mallory.deeds(), Ordering::Relaxed);
        }
    }
}

/// A thread that waits for him to hold must not wait for ever if this thread ends.
struct Over<'a>(&'a Brake, u64);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.lever.lock().unwrap().is_over = true;
        self.0.moved.notify_all();
        if thread::panicking() {
            eprintln!("seed {}, {} deeds", self.1, self.0.deeds.load(Ordering::Relaxed));
        }
    }
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().expect("a number"))
}

/// VMs that he is the VMM of, what they have, and their devices. As many as `traps` are those by
/// which he makes the daemon wait: each of them is banned for a minute, then for two, and so on.
fn victims(traps: usize) -> Vec<(String, &'static str, Vec<Device>)> {
    let loose = "queue_pairs = 8\nallow_unsealed_memory = true";
    let sockets = "ips = [\"10.0.0.9\"]\ntoe = true\nallow_unsealed_memory = true";
    let traps = (0..traps).map(|n| {
        let kinds = [Device::Trap, Device::Crowd, Device::Sieve];
        (format!("trap{n}"), "", vec![kinds[n % kinds.len()]])
    });
    let others = [
        // There are two for one, of whom one is turned away.
        ("bad", loose, vec![Device::Card(8), Device::Card(8)]),
        ("sealed", "", vec![Device::Sealed]),
        ("sockets", sockets, vec![Device::Card(1), Device::Sockets]),
    ];
    others
        .map(|(name, more, devices)| (name.into(), more, devices))
        .into_iter()
        .chain(traps)
        .collect()
}

/// The daemon's memory by `--check`.
fn announced(street: &Street) -> u64 {
    let source = Source { path: street.dir.join("np.toml"), overrides: BTreeMap::new() };
    source.load().unwrap().memory_max()
}

/// The daemon's use of it, as text too: its own, its page tables, its store.
fn taken(street: &Street) -> (u64, String) {
    let [own, tables] = ["RssAnon:", "VmPTE:"].map(|kind| street.host.bytes(kind));
    let store = street.dir.join("arena").metadata().unwrap().blocks() * 512;
    let shown = [own, tables, store].map(|bytes| format!("{} KiB", bytes >> 10)).join(" + ");
    (own + tables + store, shown)
}

/// The daemon's counts of him: frames, lies in rings, memory that was not there, packets,
/// connections dropped because they made it wait.
fn seen(street: &Street) -> [u64; 5] {
    let ports = street.host.status().ports;
    let vm = |name: &str| ports.iter().find(|port| port.name == name).unwrap();
    let (bad, sockets) = (vm("bad"), vm("sockets"));
    let [of_bad, of_sockets] = [bad, sockets].map(|port| port.vm.as_ref().unwrap());
    let blocked = ports.iter().filter_map(|port| port.vm.as_ref()).map(|vm| vm.blocked).sum();
    let packets = of_sockets.toe.as_ref().unwrap().packets_from_guest;
    [bad.frames_from_port, of_bad.ring_faults, of_bad.memory_faults, packets, blocked]
}

#[test]
fn whatever_a_front_end_does_its_neighbours_hear_each_other() {
    let seed = number("NIGHTPORTER_HOSTILE_SEED").unwrap_or(1);
    let limit = number("NIGHTPORTER_HOSTILE_S").map(Duration::from_secs);
    let (traps, rings) = if limit.is_some() { IN_HOURS } else { (3, 1) };
    let victims = victims(traps);
    let vms: Vec<_> = victims.iter().map(|(name, more, _)| (name.as_str(), *more)).collect();
    // Of this process: others on this host may do the same.
    let [.., high, low] = std::process::id().to_be_bytes();
    let ip = |last| Ipv4Addr::new(127, high, low, last);
    let (overlay, peer) = (SocketAddrV4::new(ip(1), 4789), ip(PEER));
    let ports = format!(
        "[[overlay]]\nname = \"over\"\nvni = {OVERLAY_VNI}\nlocal = \"{overlay}\"\n\
         peers = [\"{peer}\"]\n"
    );
    let mut street = Street::with(&vms, &ports);
    let path = |device, name: &str| match device {
        Device::Sockets => (device, street.dir.join(&format!("{name}-toe.sock"))),
        _ => (device, street.dir.join(name)),
    };
    let devices: Vec<_> = victims
        .iter()
        .flat_map(|(name, _, devices)| devices.iter().map(|device| path(*device, name)))
        .collect();
    let (brake, small) = (Brake::default(), street.dir.join("small"));
    thread::scope(|scope| {
        let over = Over(&brake, seed);
        let mallory = scope.spawn(|| {
            // His helpers have the priority that this thread has here.
            let mut mallory = Mallory::new(seed, &devices, overlay, small, rings);
            if limit.is_some() {
                // The neighbours are machines of their own, which he does not slow down: whoever
                // wakes takes the core from who is idle, and from a low priority only in the end.
                let thread = gettid().to_string();
                let idle = Command::new("chrt").args(["--idle", "--pid", "0", &thread]).status();
                assert!(idle.unwrap().success());
            }
            brake.drive(&mut mallory);
        });
        measure(&mut street, &brake, limit, seed);
        drop(over);
        mallory.join().unwrap();
    });
    let made_wait = street.host.port("bad").vm.unwrap().blocked;
    if made_wait > 0 {
        // He may lose his core in the middle of a small hole, to other tests or because of his
        // priority, and whoever touches that waits until he has it again.
        crate::skips("its port takes nobody in now, because it made the daemon wait");
        return;
    }
    // And its port is there for one that means well.
    street.host.until("bad", |bad| !bad.link);
    let _guest = Guest::boot(&street.dir.join("bad"), PLAIN);
    street.host.until("bad", |bad| bad.link);
}

/// Echoes beside him and alone, until there are enough.
fn measure(street: &mut Street, brake: &Brake, limit: Option<Duration>, seed: u64) {
    let (start, mut reported, most) = (Instant::now(), Instant::now(), announced(street));
    let (mut all, mut minute, mut rest) = (Echoes::default(), Echoes::default(), Times::default());
    loop {
        let Echoes { alone, beside, woken } = &mut minute;
        let mut ask = |count, times: &mut Times| {
            at_fixed_times(count, times, woken, || _ = street.echo());
        };
        brake.set(false);
        ask(ECHOES_BESIDE, beside);
        brake.set(true);
        ask(ECHOES_OF_REST, &mut rest);
        ask(ECHOES_ALONE, alone);
        let (takes, shown) = taken(street);
        assert!(takes <= most, "{shown}, and at most {most} bytes are announced");
        let (deeds, seen) = (brake.deeds.load(Ordering::Relaxed), seen(street));
        let (done, missing) = brake.done.lock().unwrap().clone();
        let is_complete = missing.is_empty() && seen.iter().all(|times| *times > 0);
        let is_over = limit.map_or(is_complete, |limit| start.elapsed() >= limit);
        if is_over || reported.elapsed() >= REPORT_INTERVAL {
            reported = Instant::now();
            let [frames, lies, faults, packets, blocked] = seen;
            eprintln!(
                "{:.0?}: seed {seed}, {deeds} deeds, {frames} frames, {packets} packets, {lies} \
                 lies, {faults} faults, {blocked} bans; {shown} of {} MiB; {} descriptors\n{}",
                start.elapsed(),
                most >> 20,
                street.host.descriptors(),
                minute.shown()
            );
            if limit.is_some() && !is_over {
                minute.judge_minute().unwrap();
            }
            all.join(&std::mem::take(&mut minute));
        }
        let time = limit.unwrap_or_default() + DEEDS_LIMIT;
        assert!(start.elapsed() < time, "never done: {missing:?}; seen: {seen:?}");
        if is_over {
            assert!(is_complete, "never done: {missing:?}; seen: {seen:?}");
            eprintln!("{done:?}\n{}", all.shown());
            break;
        }
    }
    if limit.is_some() {
        all.judge().unwrap();
    }
}
