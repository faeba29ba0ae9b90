//! `nightporter-boost` in a run, with a relay between it and the daemon: so that paths with and
//! without boost can take turns, and the tap can have the same boost from outside.
//!
//! The relay is the booster to the daemon, and the daemon to the booster. It passes on everything
//! but orders to boost while the path has none. On the tap it boosts by itself, as a program beside
//! a host could do it that sees nothing but frames: while they arrive, and some time longer. And it
//! can boost some VMs all the time, as traffic that never ends would.

use std::collections::BTreeMap;
use std::fs::read_to_string;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nightporter_api::BoostAccount;
use nightporter_boost::protocol::{Claim, Order, PACKET_BYTES_MAX, Report};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    AddressFamily, Backlog, MsgFlags, SockFlag, SockType, UnixAddr, bind, connect, listen, recv,
    send, socket,
};
use rustix::net::{SocketFlags, accept_with};

use crate::daemon::sibling;
use crate::link::Link;
use crate::process::Process;

/// How long anything may take.
const LIMIT: Duration = Duration::from_secs(20);
/// An account is told so often, so that this much later it is the last word.
const SETTLED: Duration = Duration::from_millis(250);
/// The tap is looked at so often.
const LOOK_MS: u8 = 1;
/// A boost that is to last all the time is ordered so often, and each time for so long.
const ORDER_MS: u8 = 4;
const ORDERED: Duration = Duration::from_millis(20);

/// The source of boosts now.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Source {
    /// Nobody.
    None,
    /// The daemon.
    Daemon,
    /// The relay, by the frames that arrive at the tap.
    Tap,
    /// The relay, so many VMs all the time.
    Always(usize),
}

#[derive(Debug)]
struct Shared {
    source: Mutex<Source>,
    accounts: Mutex<BTreeMap<u16, BoostAccount>>,
    /// When something was last boosted, in milliseconds after `began`.
    boosted_at: AtomicU64,
    began: Instant,
    stops: AtomicBool,
}

/// See the module doc. Dropping it ends the booster, which takes everything back.
#[derive(Debug)]
pub(crate) struct Boosting {
    shared: Arc<Shared>,
    relay: Option<JoinHandle<Result<()>>>,
    booster: Process,
    /// The relay's socket and the booster's log.
    path: PathBuf,
    log: PathBuf,
}

impl Boosting {
    /// Starts both, for the daemon whose sockets are in `dir`. `tap`: the interface of the boosted
    /// guest. In the network namespace of the calling thread.
    pub(crate) fn start(dir: &Path, log: &Path, tap: &str, link: Link) -> Result<Self> {
        let path = dir.join("relay.sock");
        let kind = SockType::SeqPacket;
        let listener = socket(AddressFamily::Unix, kind, SockFlag::SOCK_CLOEXEC, None)?;
        bind(listener.as_raw_fd(), &UnixAddr::new(&path)?)?;
        listen(&listener, Backlog::new(1)?)?;
        let daemon = socket(AddressFamily::Unix, kind, SockFlag::SOCK_CLOEXEC, None)?;
        connect(daemon.as_raw_fd(), &UnixAddr::new(&dir.join("boost.sock"))?)
            .context("the daemon's socket for the booster")?;
        let booster = spawn(&path, log)?;
        let shared = Arc::new(Shared {
            source: Mutex::new(Source::None),
            accounts: Mutex::default(),
            boosted_at: AtomicU64::new(0),
            began: Instant::now(),
            stops: AtomicBool::new(false),
        });
        let mut relay = Relay {
            shared: Arc::clone(&shared),
            daemon,
            listener,
            booster: None,
            greeting: Vec::new(),
            vms: Vec::new(),
            tap: tap.to_owned(),
            frames: 0,
            // Longer than a round trip lets the guest's own load use up the budget between flights.
            hold: Duration::from_millis(if link == Link::Lan { 10 } else { 3 }),
        };
        let relay = thread::Builder::new().name("relay".into()).spawn(move || relay.run())?;
        Ok(Self { shared, relay: Some(relay), booster, path, log: log.to_owned() })
    }

    /// Waits until the booster has judged so many guests; why it refuses one, if it does.
    pub(crate) fn wait_judged(&mut self, guests: usize) -> Result<Option<String>> {
        let begin = Instant::now();
        loop {
            self.booster.check_alive()?;
            let accounts = self.accounts();
            let is_judged = |it: &&BoostAccount| !it.refused.is_empty() || !it.means.is_empty();
            if accounts.iter().filter(is_judged).count() >= guests {
                let mut refused = accounts.into_iter().map(|it| it.refused);
                return Ok(refused.find(|why| !why.is_empty()));
            }
            ensure!(begin.elapsed() < LIMIT, "the booster says nothing of the guests");
            thread::sleep(Duration::from_millis(5)); // polls two conditions
        }
    }

    /// From now on this one boosts. Waits until everything is paid back, so that no path has the
    /// debts of the one before.
    pub(crate) fn select(&mut self, source: Source) -> Result<()> {
        *self.shared.source.lock().unwrap_or_else(PoisonError::into_inner) = Source::None;
        let begin = Instant::now();
        let shared = Arc::clone(&self.shared);
        let settled = || {
            let at = Duration::from_millis(shared.boosted_at.load(Ordering::Relaxed));
            at == Duration::ZERO || shared.began.elapsed() > at + SETTLED
        };
        while !settled() || self.accounts().iter().any(|it| it.unpaid_us > 0) {
            self.restart_if_ended()?;
            ensure!(begin.elapsed() < LIMIT, "a guest does not pay back: {:?}", self.accounts());
            thread::sleep(Duration::from_millis(5)); // polls two conditions
        }
        self.shared.boosted_at.store(0, Ordering::Relaxed);
        *self.shared.source.lock().unwrap_or_else(PoisonError::into_inner) = source;
        Ok(())
    }

    /// A booster ends when it or its watcher missed beats. As its unit does, another is started.
    fn restart_if_ended(&mut self) -> Result<()> {
        let Err(why) = self.booster.check_alive() else { return Ok(()) };
        eprintln!("the booster is started again: {why:#}");
        let guests = self.accounts().len();
        self.shared.accounts.lock().unwrap_or_else(PoisonError::into_inner).clear();
        self.booster = spawn(&self.path, &self.log)?;
        self.wait_judged(guests).map(drop)
    }

    /// The accounts of the guests that have boost.
    pub(crate) fn accounts(&self) -> Vec<BoostAccount> {
        let accounts = self.shared.accounts.lock().unwrap_or_else(PoisonError::into_inner);
        accounts.values().cloned().collect()
    }
}

impl Drop for Boosting {
    fn drop(&mut self) {
        self.shared.stops.store(true, Ordering::Relaxed);
        if let Some(relay) = self.relay.take()
            && let Ok(Err(error)) = relay.join()
        {
            eprintln!("the relay to the booster: {error:#}");
        }
    }
}

struct Relay {
    shared: Arc<Shared>,
    daemon: OwnedFd,
    listener: OwnedFd,
    booster: Option<OwnedFd>,
    /// The daemon's orders that each booster has to hear first.
    greeting: Vec<Vec<u8>>,
    /// The guests that have boost.
    vms: Vec<u16>,
    tap: String,
    /// That were sent to it.
    frames: u64,
    hold: Duration,
}

impl Relay {
    fn run(&mut self) -> Result<()> {
        let mut last = Source::None;
        while !self.shared.stops.load(Ordering::Relaxed) {
            let source = *self.shared.source.lock().unwrap_or_else(PoisonError::into_inner);
            let wait = match source {
                Source::Tap => LOOK_MS,
                Source::Always(_) => ORDER_MS,
                Source::None | Source::Daemon => 20,
            };
            self.pass(wait, source)?;
            if source != last {
                self.vms.iter().try_for_each(|&vm| self.tell(&Order::End { vm }))?; // of the last
            }
            match source {
                Source::Tap => self.look_at_tap(last != source)?,
                Source::Always(count) => {
                    let mut vms = self.vms.iter().take(count);
                    vms.try_for_each(|&vm| self.boost(vm, ORDERED))?;
                }
                Source::None | Source::Daemon => {}
            }
            last = source;
        }
        Ok(())
    }

    /// Passes on what there is, or comes within so many milliseconds.
    fn pass(&mut self, wait: u8, source: Source) -> Result<()> {
        let other = self.booster.as_ref().unwrap_or(&self.listener);
        let mut fds = [
            PollFd::new(self.daemon.as_fd(), PollFlags::POLLIN),
            PollFd::new(other.as_fd(), PollFlags::POLLIN),
        ];
        poll(&mut fds, PollTimeout::from(wait))?;
        if self.booster.is_none() && fds[1].any() == Some(true) {
            let booster = accept_with(&self.listener, SocketFlags::CLOEXEC)?;
            for order in &self.greeting {
                send(booster.as_raw_fd(), order, MsgFlags::MSG_NOSIGNAL)?;
            }
            self.booster = Some(booster);
        }
        let mut buf = [0; PACKET_BYTES_MAX];
        while let Some(len) = receive(&self.daemon, &mut buf)? {
            let order = serde_json::from_slice(&buf[..len])?;
            if matches!(order, Order::Hello { .. } | Order::Vm { .. }) {
                self.greeting.push(buf[..len].to_vec());
            }
            match order {
                Order::Vm { vm, boost: Some(_), .. } if !self.vms.contains(&vm) => {
                    self.vms.push(vm);
                }
                Order::Boost { .. } if source != Source::Daemon => continue,
                Order::Boost { .. } => self.note_boost(),
                _ => {}
            }
            self.send(&buf[..len]);
        }
        self.hear_booster(&mut buf)
    }

    /// Passes on its reports. One that has ended may come again.
    fn hear_booster(&mut self, buf: &mut [u8]) -> Result<()> {
        while let Some(booster) = &self.booster {
            let Ok(received) = receive(booster, buf) else {
                self.booster = None;
                return Ok(());
            };
            let Some(len) = received else { return Ok(()) };
            if let Report::Account { vm, account } = serde_json::from_slice(&buf[..len])? {
                let accounts = &self.shared.accounts;
                let mut accounts = accounts.lock().unwrap_or_else(PoisonError::into_inner);
                accounts.insert(vm, account);
            }
            send(self.daemon.as_raw_fd(), &buf[..len], MsgFlags::MSG_NOSIGNAL)?;
        }
        Ok(())
    }

    /// Boosts while frames arrive. `first`: those that are there already are of another path.
    fn look_at_tap(&mut self, first: bool) -> Result<()> {
        // Of this thread's network namespace; what the host sends is what the guest gets.
        let text = read_to_string("/proc/thread-self/net/dev")?;
        let line = text.lines().find_map(|line| line.trim().strip_prefix(&self.tap));
        let line = line.context("the guest's tap")?.trim_start_matches(':');
        let frames = line.split_whitespace().nth(9).context("sent packets")?.parse()?;
        let arrived = std::mem::replace(&mut self.frames, frames) != frames && !first;
        match self.vms.first() {
            Some(&vm) if arrived => self.boost(vm, self.hold),
            _ => Ok(()),
        }
    }

    fn boost(&self, vm: u16, time: Duration) -> Result<()> {
        self.note_boost();
        let for_us = u64::try_from(time.as_micros())?;
        // A boost that ends with its time would count as waste.
        self.tell(&Order::Boost { vm, claim: Claim::Reading, for_us, taken: 0 })
    }

    fn note_boost(&self) {
        let at = u64::try_from(self.shared.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.shared.boosted_at.store(at, Ordering::Relaxed);
    }

    fn tell(&self, order: &Order) -> Result<()> {
        self.send(&serde_json::to_vec(order)?);
        Ok(())
    }

    /// To the booster. One that has ended is noticed by what it does not report.
    fn send(&self, packet: &[u8]) {
        let booster = self.booster.as_ref();
        booster.map(|it| send(it.as_raw_fd(), packet, MsgFlags::MSG_NOSIGNAL));
    }
}

/// Starts the booster of the relay at `path`.
fn spawn(path: &Path, log: &Path) -> Result<Process> {
    let mut command = Command::new(sibling("nightporter-boost")?);
    command.arg("--socket").arg(path).arg("--journal").arg(path.with_file_name("journal"));
    Process::spawn("nightporter-boost", command, log)
}

/// A packet, if there is one. Errors: the other end is gone.
fn receive(fd: &OwnedFd, buf: &mut [u8]) -> Result<Option<usize>> {
    match recv(fd.as_raw_fd(), buf, MsgFlags::MSG_DONTWAIT) {
        Err(Errno::EAGAIN | Errno::EINTR) => Ok(None),
        Ok(0) => anyhow::bail!("the other end is gone"),
        result => Ok(Some(result?)),
    }
}
