//! The watcher: waits for heartbeats, and makes routes follow them; and its keeper.
//!
//! There are two processes, so that no single death leaves a guest flooding without a process to
//! stop it (see the crate's doc): the keeper starts the watcher and waits. If the watcher ends in
//! any other way than by SIGTERM or SIGINT, the keeper undoes its changes. If the keeper dies, the
//! kernel sends the watcher SIGTERM.

use std::collections::BTreeSet;
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Command, ExitStatus};

use anyhow::{Context, Result, bail};
use nightporter_core::time::{Duration, Instant};
use nightporter_core::wire::heartbeat::{self, Heartbeat};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::prctl;
use nix::sys::signal::{SigSet, Signal, kill};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::socket::{LinkAddr, recvfrom};
use nix::time::{ClockId, clock_gettime};
use nix::unistd::{Pid, getppid};
use rustix::net::{AddressFamily, Protocol, SocketFlags, SocketType, socket_with};

use crate::beats::{Beats, Nic};
use crate::connections::connections;
use crate::earlier::Earlier;
use crate::np_flood::NpFlood;
use crate::plan::plan;
use crate::record::{Place, Record};
use crate::rtnl::{Changes, Rtnl};
use crate::settings;

/// Rounds of reading and changing routes before the watcher reports that another program changes
/// them back.
const ROUNDS_MAX: usize = 5;
/// `sll_pkttype` of a frame to a group (packet(7), include/uapi/linux/if_packet.h).
const PACKET_MULTICAST: u8 = 2;

/// How a guest floods.
#[derive(Clone, Copy, Debug)]
pub struct How {
    /// The segments that a new connection hands over before its first acknowledgement.
    pub segments: u32,
    /// By the congestion control `np_flood` of single connections, not by routes.
    pub np_flood: bool,
}

impl How {
    /// The command line with these options.
    #[must_use]
    pub fn arguments(&self) -> Vec<String> {
        let mut arguments = vec!["--segments".to_owned(), self.segments.to_string()];
        arguments.extend(self.np_flood.then(|| "--np-flood".to_owned()));
        arguments
    }
}

/// Runs a watcher until it is told to stop, and undoes what it left. `None` if one runs already.
///
/// # Errors
/// It cannot be started, or died.
pub fn keep(place: &Place, how: How) -> Result<Option<()>> {
    let Some(lock) = place.try_lock()? else { return Ok(None) };
    Place::sign(&lock)?;
    let mut signals = SigSet::empty();
    for signal in [Signal::SIGCHLD, Signal::SIGTERM, Signal::SIGINT] {
        signals.add(signal);
    }
    signals.thread_block()?; // the watcher inherits this, and adds nothing
    let tool = std::env::current_exe().context("finding this program")?;
    let mut watcher = Command::new(tool)
        .args(["flood", "watch", "--keeper", &std::process::id().to_string()])
        .args(how.arguments())
        // The lock is this description's: it is held until both have ended.
        .stdin(lock.as_fd().try_clone_to_owned()?)
        .spawn()
        .context("starting the watcher")?;
    let pid = Pid::from_raw(i32::try_from(watcher.id())?);
    let status = loop {
        if let Some(status) = watcher.try_wait()? {
            break status;
        }
        match signals.wait()? {
            Signal::SIGTERM | Signal::SIGINT => kill(pid, Signal::SIGTERM)?,
            _ => {}
        }
    };
    undo(place)?;
    died_of(status).map(Some)
}

fn died_of(status: ExitStatus) -> Result<()> {
    if !status.success() {
        bail!("the watcher died ({status}); what it had changed is undone");
    }
    Ok(())
}

/// The watcher itself. `ready` is called once it hears heartbeats.
///
/// # Errors
/// Something of the kernel is missing or fails. The keeper undoes what was changed.
pub fn watch(place: &Place, how: How, keeper: u32, ready: impl FnOnce()) -> Result<()> {
    prctl::set_pdeathsig(Signal::SIGTERM)?;
    if getppid() != Pid::from_raw(i32::try_from(keeper)?) {
        bail!("the keeper has gone");
    }
    // In time even on a busy core. Where that is not allowed, as well as any process.
    let _ = rustix::process::nice(-10);
    let mut stop = SigSet::empty();
    stop.add(Signal::SIGTERM);
    stop.add(Signal::SIGINT);
    stop.thread_block()?;
    let stop = SignalFd::with_flags(&stop, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)?;
    let ears = heartbeats()?;
    let changes = Changes::open()?;
    let rtnl = Rtnl::open()?;
    let mut beats = Beats::default();
    let mut earlier = Earlier::default();
    let mut live = Live::default();
    follow(place, &rtnl, &live, how)?; // undoes the changes of an earlier watcher
    let mut np_flood = how.np_flood.then(NpFlood::load).transpose()?;
    ready();
    while stop.read_signal()?.is_none() {
        let until = beats.poll_timeout().into_iter().chain(earlier.poll_timeout()).min();
        wait(&[ears.as_fd(), changes.as_fd(), stop.as_fd()], until)?;
        hear(&ears, &mut beats)?;
        let now = now()?;
        beats.handle_timeout(now);
        if let Some(np_flood) = &mut np_flood {
            np_flood.tell(&beats, how.segments)?;
        } else if earlier.is_asking(now, &beats) {
            earlier.see(now, connections());
        }
        let heard = Live::of(&beats, earlier.reason());
        // Both are asked: a change that is not taken wakes the next round at once.
        if changes.take()? | (heard != live) {
            tell(&live, &heard);
            live = heard;
            follow(place, &rtnl, &live, how)?;
        }
    }
    undo(place)
}

/// Undoes all that is recorded.
///
/// # Errors
/// A route cannot be changed back.
pub fn undo(place: &Place) -> Result<()> {
    let mut record = place.read()?;
    apply(place, &mut record, &Rtnl::open()?, &BTreeSet::new(), 0)?;
    place.write(&Record::default())
}

/// The interfaces by which connections may flood now.
#[derive(Debug, Default, Eq, PartialEq)]
struct Live {
    nics: BTreeSet<Nic>,
    /// Why there are none, although heartbeats arrive.
    held_back: Option<String>,
}

impl Live {
    fn of(beats: &Beats, reason: Option<String>) -> Self {
        let nics = beats.nics();
        match reason {
            Some(reason) if !nics.is_empty() => {
                Self { nics: BTreeSet::new(), held_back: Some(reason) }
            }
            _ => Self { nics, held_back: None },
        }
    }
}

fn follow(place: &Place, rtnl: &Rtnl, live: &Live, how: How) -> Result<()> {
    let mut record = place.read()?;
    record.watcher = Some(i32::try_from(std::process::id())?);
    record.segments = Some(how.segments);
    record.np_flood = how.np_flood;
    record.live = live.nics.iter().map(|nic| name(*nic)).collect();
    record.held_back.clone_from(&live.held_back);
    let no_route = BTreeSet::new();
    let by_route = if how.np_flood { &no_route } else { &live.nics };
    apply(place, &mut record, rtnl, by_route, how.segments)
}

/// Sets routes and settings to the wanted values, and records the changes to undo: each before it
/// is made, and each that was undone afterwards.
fn apply(
    place: &Place,
    record: &mut Record,
    rtnl: &Rtnl,
    live: &BTreeSet<Nic>,
    segments: u32,
) -> Result<()> {
    let mut refused = BTreeSet::new();
    for _ in 0..ROUNDS_MAX {
        let mut plan = plan(&rtnl.routes()?, &record.routes, live, segments)?;
        plan.steps.retain(|step| !refused.contains(&step.from.name()));
        let mut settings = Vec::new(); // values to write, and the values before
        for (setting, before) in settings::ALL.into_iter().zip(record.settings()) {
            let now = setting.read()?;
            settings.push(setting.plan(now.as_deref(), before.as_deref(), plan.only_live));
        }
        if plan.steps.is_empty() && settings.iter().all(|(write, _)| write.is_none()) {
            record.routes = plan.records;
            for (was, (_, before)) in record.settings().into_iter().zip(settings) {
                *was = before;
            }
            return place.write(record);
        }
        let new = plan.records.iter().filter(|new| !record.routes.contains(new));
        let new: Vec<_> = new.cloned().collect();
        record.routes.extend(new);
        for (was, (_, before)) in record.settings().into_iter().zip(&settings) {
            if before.is_some() {
                was.clone_from(before);
            }
        }
        place.write(record)?;
        for step in &plan.steps {
            if let Err(error) = rtnl.change(step) {
                eprintln!("{error:#}"); // perhaps it has gone since it was read
                if step.to.initcwnd() == Some(segments) {
                    refused.insert(step.from.name()); // it does not flood, and the others do
                }
            }
        }
        for (setting, (write, _)) in settings::ALL.into_iter().zip(settings) {
            if let Some(value) = write {
                setting.write(&value)?;
            }
        }
    }
    bail!(
        "routes were changed {ROUNDS_MAX} times and are not as they should be: who else sets them?"
    )
}

/// Receives heartbeats on every interface of the namespace.
fn heartbeats() -> Result<OwnedFd> {
    let protocol = u32::from(heartbeat::ETHERTYPE.to_be()).try_into()?;
    socket_with(
        AddressFamily::PACKET,
        SocketType::RAW,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        Some(Protocol::from_raw(protocol)),
    )
    .context("listening for heartbeats (packet(7)): run this as root")
}

fn hear(ears: &OwnedFd, beats: &mut Beats) -> Result<()> {
    use std::os::fd::AsRawFd;
    let mut frame = [0; heartbeat::FRAME_BYTES];
    loop {
        match recvfrom::<LinkAddr>(ears.as_raw_fd(), &mut frame) {
            Ok((length, Some(from))) if from.pkttype() == PACKET_MULTICAST => {
                if let Some(beat) = Heartbeat::parse(&frame[..length]) {
                    beats.heard(now()?, Nic::try_from(from.ifindex())?, beat);
                }
            }
            Ok(_) | Err(Errno::EINTR) => {}
            Err(Errno::EAGAIN) => return Ok(()),
            // Of an interface that went down; the others go on.
            Err(Errno::ENETDOWN) => {}
            Err(errno) => return Err(errno).context("hearing heartbeats"),
        }
    }
}

fn wait(on: &[std::os::fd::BorrowedFd<'_>], until: Option<Instant>) -> Result<()> {
    let mut fds: Vec<_> = on.iter().map(|fd| PollFd::new(*fd, PollFlags::POLLIN)).collect();
    let timeout = match until {
        None => PollTimeout::NONE,
        // Rounded up: it is not woken before there is something to do.
        Some(until) => {
            let ns = until.since(now()?).as_nanos();
            PollTimeout::try_from(ns.div_ceil(1_000_000)).unwrap_or(PollTimeout::MAX)
        }
    };
    match poll(&mut fds, timeout) {
        Ok(_) | Err(Errno::EINTR) => Ok(()),
        Err(errno) => Err(errno).context("waiting"),
    }
}

/// The time since boot, sleep included: a host that was silent meanwhile was silent.
fn now() -> Result<Instant> {
    let time = clock_gettime(ClockId::CLOCK_BOOTTIME)?;
    let seconds = u64::try_from(time.tv_sec())?;
    Ok(Instant::from_secs(seconds) + Duration::from_nanos(u64::try_from(time.tv_nsec())?))
}

fn tell(before: &Live, after: &Live) {
    for nic in after.nics.difference(&before.nics) {
        eprintln!("{}: the host controls congestion, connections flood", name(*nic));
    }
    if let Some(reason) = &after.held_back {
        eprintln!("new connections do not flood: {reason}");
        return;
    }
    for nic in before.nics.difference(&after.nics) {
        eprintln!("{}: no host controls congestion, new connections do not flood", name(*nic));
    }
}

/// An interface's name, as far as it has one.
fn name(nic: Nic) -> String {
    let name = nix::net::if_::if_indextoname(nic).ok();
    name.and_then(|name| name.into_string().ok()).unwrap_or_else(|| format!("interface {nic}"))
}
