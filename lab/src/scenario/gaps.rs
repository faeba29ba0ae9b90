//! How long a guest is not there for others while its daemon is restarted or killed, with a
//! supervisor that keeps QEMU's connection and without.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, ipproto, recv, sendto,
    socket_with,
};
use serde_json::json;

use super::{LIMIT, nightporter};
use crate::experiment::{Better, Cell, Experiment, Measure, Results, Rounds, Values, measure};
use crate::image::log_dir;
use crate::progress::Progress;
use crate::world::World;

/// Daemons for each way.
const RESTARTS: usize = 12;
/// An echo is asked for in each of these.
const INTERVAL: Duration = Duration::from_millis(1);
/// QEMU connects again within a second, and its guest's link is up soon after.
const AFTERWARDS: Duration = Duration::from_secs(2);

const GAP: &str = "longest gap between echoes";
const MEASURES: [Measure; 1] = [measure(GAP, "ms", Better::Less)];
const SIGNALS: [Signal; 2] = [Signal::SIGTERM, Signal::SIGKILL];
/// Whether QEMU's connection is kept.
const WAYS: [(&str, bool); 2] = [("connects again", false), ("is kept", true)];

pub(super) fn run(world: &mut World) -> Result<()> {
    let ways: Vec<_> = SIGNALS.iter().flat_map(|by| WAYS.map(|way| (*by, way))).collect();
    let cell = |(signal, (arm, _)): &(Signal, (&str, bool))| Cell::new(signal.as_str(), *arm);
    let cells: Vec<Cell> = ways.iter().map(cell).collect();
    let mut results = Results::open(&Experiment {
        name: "gaps-of-echoes",
        measures: &MEASURES,
        settings: json!({ "restarts": RESTARTS }),
        out: None,
    })?;
    let rounds = Rounds::exactly(RESTARTS);
    results.rounds(&cells, rounds, &mut Progress::start(), |index, round| {
        let (signal, (_, is_kept)) = ways[index];
        let log = log_dir("gaps_of_echoes")?.join(format!("{round}-{is_kept}-{signal}.log"));
        let gap = around(world, |world| {
            let daemon = world.daemon()?;
            if !is_kept {
                daemon.forget_vmms();
            }
            daemon.restart(signal, &log)
        })?;
        Ok(Values { of: vec![(GAP, gap.as_secs_f64() * 1e3)], ..Values::default() })
    })?;
    results.finish().map(drop)
}

/// The longest gap between two echoes of the guest around an action.
fn around(world: &mut World, action: impl FnOnce(&mut World) -> Result<()>) -> Result<Duration> {
    let (remote, is_over) = (world.remote().clone(), AtomicBool::new(false));
    let (begun, begins) = channel();
    thread::scope(|scope| {
        let is_over = &is_over;
        let echoes =
            scope.spawn(move || remote.enter(|| longest_gap(nightporter(), &begun, is_over)));
        let acted = begins.recv_timeout(LIMIT).context("no echo").and_then(|()| action(world));
        is_over.store(true, Ordering::Relaxed);
        let gap = echoes.join().expect("does not panic");
        acted.and(gap)
    })
}

/// Asks until a while after it is over; tells when the first echo has come.
fn longest_gap(of: Ipv4Addr, begun: &Sender<()>, is_over: &AtomicBool) -> Result<Duration> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let kind = SocketType::RAW;
    let socket = socket_with(AddressFamily::INET, kind, flags, Some(ipproto::ICMP))?;
    let to = SocketAddrV4::new(of, 0);
    let (mut longest, mut last, mut over) = (Duration::ZERO, None, None);
    let (mut next, start) = (Instant::now(), Instant::now());
    loop {
        let now = Instant::now();
        ensure!(now - start < LIMIT, "no echo for {:?}", last.map(|last: Instant| now - last));
        if now >= next {
            next += INTERVAL;
            // While there is no way to the guest it is lost.
            let _ = sendto(&socket, &ECHO_REQUEST, SendFlags::empty(), &to);
        }
        let mut packet = [0; 128];
        while recv(&socket, &mut packet, RecvFlags::empty()).is_ok() {
            // Behind 20 bytes of IP; requests to ourselves do not come here.
            if packet[20] != ECHO_REPLY {
                continue;
            }
            match last.replace(Instant::now()) {
                None => begun.send(())?,
                Some(before) => longest = longest.max(before.elapsed()),
            }
        }
        if is_over.load(Ordering::Relaxed) {
            let over = *over.get_or_insert(now);
            let is_back = last.is_some_and(|last| now - last < 20 * INTERVAL);
            if now - over > AFTERWARDS && is_back {
                return Ok(longest);
            }
        }
        let wait = Timespec::try_from(next.saturating_duration_since(Instant::now()))?;
        poll(&mut [PollFd::new(&socket, PollFlags::IN)], Some(&wait))?;
    }
}

/// RFC 792: type 8, its checksum, identifier 1, and 0 bytes of data.
const ECHO_REQUEST: [u8; 8] = [8, 0, 0xf7, 0xfe, 0, 1, 0, 0];
const ECHO_REPLY: u8 = 0;
