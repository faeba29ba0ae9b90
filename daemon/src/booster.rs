//! Orders to the booster (BST-01 to 06): a program of its own, which may touch the scheduling of
//! VMMs. The daemon listens, because its sandbox lets it accept, and the booster comes back after
//! each of its ends.
//!
//! Nothing here waits for the booster: an order that finds no room is lost, and the next one says
//! the same. Without VMs that have boost there is no socket, and no turn looks here.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use nightporter_api::BoostAccount;
use nightporter_boost::protocol::{Budget, Claim, Order, PACKET_BYTES_MAX, Report, VERSION};
use nightporter_core::engine::Engine;
use nightporter_core::port::PortId;
use nightporter_core::tcp::wanting;
use nightporter_core::time::{Duration, Instant};
use nix::sys::epoll::Epoll;
use rustix::fs::Uid;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with,
    bind, listen, recv, send, socket_with,
};

use crate::config::{Config, VmConfig};
use crate::spare;
use crate::token::{Token, watch_for};

/// While a guest has yet to see a frame, whether it has is looked at so often.
const LOOK_INTERVAL: Duration = Duration::from_millis(1);
/// An end that moves by less is not told; and so often at most is told that a guest takes what it
/// is owed.
const STEP: Duration = Duration::from_millis(5);
/// The booster may let orders wait for so long.
const LATER_MAX_US: u64 = 100_000;
/// Packets of the booster that are read in one turn.
const REPORTS_PER_TURN: usize = 64;

/// A VM, with or without boost: all of them compete.
#[derive(Debug)]
struct Known {
    port: PortId,
    name: String,
    boost: Option<Budget>,
    vcpu_cgroup: Option<String>,
    /// Its VMM, or 0.
    pid: i32,
    /// Its tap, if that is attached.
    tap: Option<String>,
    /// The last order to the booster.
    told: Option<wanting::Want>,
    /// When it was told last that its guest takes what it is owed.
    taken_at: Instant,
    /// Until then nobody else wants its cores, as far as the booster knows, and nothing is told.
    later: Instant,
    account: Option<BoostAccount>,
}

impl Known {
    fn order(&self) -> Order {
        Order::Vm {
            vm: self.port.0,
            name: self.name.clone(),
            pid: self.pid,
            tap: self.tap.clone(),
            boost: self.boost,
            vcpu_cgroup: self.vcpu_cgroup.clone(),
        }
    }

    /// The order that the booster needs, now that the VM has this `want`.
    fn tell(&mut self, now: Instant, want: Option<wanting::Want>) -> Option<Order> {
        let vm = self.port.0;
        if now < self.later {
            return None;
        }
        let told = self.told.filter(|told| told.until > now);
        let order = match want {
            None => told.map(|_| Order::End { vm }),
            Some(want) => {
                if !is_news(want, told, now >= self.taken_at + STEP) {
                    return None;
                }
                let claim = match want.claim {
                    wanting::Claim::Bytes => Claim::Bytes,
                    wanting::Claim::Reading => Claim::Reading,
                    wanting::Claim::Turn => Claim::Turn,
                };
                let for_us = want.until.since(now).as_nanos() / 1000;
                Some(Order::Boost { vm, claim, for_us, taken: want.taken })
            }
        };
        if want.zip(told).is_some_and(|(want, told)| want.taken != told.taken) {
            self.taken_at = now;
        }
        self.told = want;
        order
    }

    /// Its order was void, and the next one comes so much later.
    fn defer(&mut self, now: Instant, by: Duration) {
        self.told = None;
        self.later = now + by;
    }

    /// After [`Self::tell`]: when to look again.
    fn look_at(&self, now: Instant, want: Option<wanting::Want>) -> Option<Instant> {
        let want = want?;
        if now < self.later {
            return Some(self.later);
        }
        let turn = (want.claim == wanting::Claim::Turn).then_some(now + LOOK_INTERVAL);
        let told = self.told.is_none_or(|told| told.taken == want.taken);
        let taken = (!told).then_some(self.taken_at + STEP);
        turn.into_iter().chain(taken).min()
    }
}

/// See the module doc.
#[derive(Debug, Default)]
pub(crate) struct Booster {
    listener: Option<OwnedFd>,
    connection: Option<OwnedFd>,
    /// The daemon's user; asked for before the sandbox.
    own: Option<Uid>,
    /// Class that the worker is to have from outside.
    rt_priority: u8,
    vms: Vec<Known>,
    /// Some VM has boost.
    any: bool,
    look_at: Option<Instant>,
}

/// Whether some VM has boost.
pub(crate) fn is_wanted(config: &Config) -> bool {
    config.vms.iter().any(|vm| vm.boost.is_some())
}

/// Where a booster connects: its path, if some VM has boost.
pub(crate) fn path(config: &Config) -> Option<PathBuf> {
    is_wanted(config).then(|| config.daemon.control.with_file_name("boost.sock"))
}

/// Makes the socket at `path`. Every process that reaches it may connect, and only root and the
/// daemon's own user are listened to: a booster that is root has no right to pass over file modes.
pub(crate) fn open(path: &Path) -> io::Result<OwnedFd> {
    use std::fs::{Permissions, remove_file, set_permissions, symlink_metadata};
    use std::os::unix::fs::{FileTypeExt, PermissionsExt};
    if symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket()) {
        remove_file(path)?; // the arena's lock has shown that no other daemon runs
    }
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    bind(&socket, &SocketAddrUnix::new(path)?)?;
    set_permissions(path, Permissions::from_mode(0o666))?;
    listen(&socket, 1)?;
    Ok(socket)
}

impl Booster {
    /// Listens from now on, at a socket of [`open`].
    pub(crate) fn set_listener(
        &mut self,
        epoll: &Epoll,
        listener: OwnedFd,
        rt_priority: u8,
    ) -> io::Result<()> {
        watch_for(epoll, &listener, Token::BoosterListener)?;
        self.listener = Some(listener);
        self.own = Some(rustix::process::getuid());
        self.rt_priority = rt_priority;
        Ok(())
    }

    /// A VM has come, or has other keys.
    pub(crate) fn set_vm(&mut self, engine: &mut Engine<'_>, port: PortId, vm: &VmConfig) {
        engine.set_boost(port, vm.boost.is_some());
        let at = match self.vms.iter_mut().position(|known| known.port == port) {
            Some(at) => at,
            None => {
                self.vms.push(Known {
                    port,
                    name: vm.name.clone(),
                    boost: None,
                    vcpu_cgroup: None,
                    pid: 0,
                    tap: None,
                    told: None,
                    taken_at: Instant::ZERO,
                    later: Instant::ZERO,
                    account: None,
                });
                self.vms.len() - 1
            }
        };
        let known = &mut self.vms[at];
        known.boost = vm.boost;
        known.vcpu_cgroup.clone_from(&vm.vcpu_cgroup);
        self.any = self.vms.iter().any(|known| known.boost.is_some());
        self.tell_of(at);
    }

    /// The VMM of a VM has connected; 0: it has gone.
    pub(crate) fn set_vmm(&mut self, port: PortId, pid: i32) {
        if let Some(at) = self.vms.iter().position(|known| known.port == port) {
            self.vms[at].pid = pid;
            self.tell_of(at);
        }
    }

    /// The tap of a VM is attached; `None`: it has gone.
    pub(crate) fn set_tap(&mut self, port: PortId, tap: Option<&str>) {
        let known = self.vms.iter().position(|known| known.port == port);
        if let Some(at) = known.filter(|&at| self.vms[at].tap.as_deref() != tap) {
            self.vms[at].tap = tap.map(str::to_owned);
            self.tell_of(at);
        }
    }

    /// A VM is gone.
    pub(crate) fn forget(&mut self, port: PortId) {
        self.vms.retain(|known| known.port != port);
        self.any = self.vms.iter().any(|known| known.boost.is_some());
        self.send(&Order::Gone { vm: port.0 });
    }

    /// The booster's account of a VM; `None`: the VM has no boost.
    pub(crate) fn status(&self, port: PortId) -> Option<BoostAccount> {
        let known = self.vms.iter().find(|known| known.port == port && known.boost.is_some())?;
        let mut account = known.account.clone().unwrap_or_default();
        if self.connection.is_none() {
            account.refused = "nightporter-boost is not connected".into();
        }
        Some(account)
    }

    /// Takes the booster that waits, in the place of the one before.
    pub(crate) fn accept(&mut self, epoll: &Epoll) {
        let Some(listener) = &self.listener else { return };
        let Some(_shared) = spare::try_share() else { return };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let Ok(socket) = accept_with(listener, flags) else { return };
        let is_known = |it: rustix::net::UCred| it.uid.is_root() || Some(it.uid) == self.own;
        let is_known = socket_peercred(&socket).is_ok_and(is_known);
        if !is_known || watch_for(epoll, &socket, Token::Booster).is_err() {
            return;
        }
        if let Some(before) = self.connection.replace(socket) {
            let _ = epoll.delete(before);
        }
        tracing::info!("the booster has connected");
        let worker = rustix::thread::gettid().as_raw_nonzero().get();
        self.send(&Order::Hello { version: VERSION, worker, rt_priority: self.rt_priority });
        for at in 0..self.vms.len() {
            self.vms[at].account = None;
            self.vms[at].later = Instant::ZERO;
            self.tell_of(at);
        }
    }

    /// Reads what the booster reports.
    pub(crate) fn hear(&mut self, now: Instant, epoll: &Epoll) {
        for _ in 0..REPORTS_PER_TURN {
            let Some(connection) = &self.connection else { return };
            let mut buf = [0; PACKET_BYTES_MAX];
            let report = match recv(connection, &mut buf[..], RecvFlags::DONTWAIT) {
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return,
                Ok((len @ 1.., _)) => serde_json::from_slice(&buf[..len]).ok(),
                Ok(_) | Err(_) => None,
            };
            match report {
                Some(Report::Ping {}) => self.send(&Order::Pong {}),
                Some(Report::Later { vm, for_us }) => {
                    let for_us = for_us.min(LATER_MAX_US);
                    let known = self.vms.iter_mut().find(|known| known.port.0 == vm);
                    if let Some(known) = known {
                        known.defer(now, Duration::from_micros(for_us));
                    }
                }
                Some(Report::Account { vm, account }) => {
                    let known = self.vms.iter_mut().find(|known| known.port.0 == vm);
                    if let Some(known) = known {
                        let changes = known.account.as_ref().map(|it| &it.refused);
                        if changes != Some(&account.refused) && !account.refused.is_empty() {
                            let (vm, why) = (&known.name, &account.refused);
                            tracing::warn!(vm, why, "the VM is not boosted");
                        }
                        known.account = Some(account);
                    }
                }
                None => {
                    if let Some(connection) = self.connection.take() {
                        let _ = epoll.delete(connection);
                    }
                    tracing::warn!("the booster is gone: no VM is boosted");
                }
            }
        }
    }

    /// At the end of a turn: tells who wants the core, and who no longer.
    pub(crate) fn after_turn(&mut self, now: Instant, engine: &mut Engine<'_>) {
        if !self.any {
            return;
        }
        self.look_at = None;
        for at in 0..self.vms.len() {
            let known = &self.vms[at];
            if known.boost.is_none() {
                continue;
            }
            let want = engine.poll_want(now, known.port);
            let order = self.vms[at].tell(now, want);
            self.look_at = self.look_at.into_iter().chain(self.vms[at].look_at(now, want)).min();
            if let Some(order) = order {
                self.send(&order);
            }
        }
    }

    /// When a turn is to look again whether a guest has seen what it was given.
    pub(crate) const fn poll_timeout(&self) -> Option<Instant> {
        self.look_at
    }

    fn tell_of(&mut self, at: usize) {
        self.vms[at].told = None;
        self.send(&self.vms[at].order());
    }

    fn send(&self, order: &Order) {
        let (Some(connection), Ok(packet)) = (&self.connection, serde_json::to_vec(order)) else {
            return;
        };
        // See the module doc.
        let _ = send(connection, &packet, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
    }
}

/// The booster has to be told. `is_due`: also that the VM takes what it is owed.
fn is_news(want: wanting::Want, told: Option<wanting::Want>, is_due: bool) -> bool {
    told.is_none_or(|told| {
        let (claim, taken) = (want.claim != told.claim, want.taken != told.taken);
        let until = want.until < told.until || want.until.since(told.until) >= STEP;
        claim || until || taken && is_due
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known() -> Known {
        Known {
            port: PortId(3),
            name: "vm".into(),
            boost: None,
            vcpu_cgroup: None,
            pid: 0,
            tap: None,
            told: None,
            taken_at: Instant::ZERO,
            later: Instant::ZERO,
            account: None,
        }
    }

    fn at(ms: u64) -> Instant {
        Instant::ZERO + Duration::from_millis(1000 + ms)
    }

    fn want(taken: u32) -> Option<wanting::Want> {
        Some(wanting::Want { claim: wanting::Claim::Bytes, until: at(500), taken })
    }

    #[test]
    fn bst_01_that_a_guest_takes_what_it_is_owed_is_told_at_most_each_5_ms() {
        let mut known = known();
        let took = |order: Option<Order>| match order {
            Some(Order::Boost { taken, .. }) => Some(taken),
            other => panic!("{other:?}"),
        };
        assert_eq!(took(known.tell(at(0), want(0))), Some(0));
        // It acknowledges each millisecond. The first time is told at once: it says that the boost
        // is no waste.
        let mut told = Vec::new();
        for ms in 1..=12_u64 {
            if let Some(order) = known.tell(at(ms), want(u32::try_from(ms).unwrap())) {
                told.push((ms, took(Some(order)).unwrap()));
            }
        }
        assert_eq!(told, [(1, 1), (6, 6), (11, 11)]);
        assert_eq!(known.look_at(at(12), want(12)), Some(at(16)), "and the last one, too");
        assert_eq!(known.tell(at(13), want(12)), None);
        assert_eq!(took(known.tell(at(16), want(12))), Some(12));
        assert_eq!(known.look_at(at(16), want(12)), None);
        // An end is told at once.
        assert_eq!(known.tell(at(17), None), Some(Order::End { vm: 3 }));
        assert_eq!(known.tell(at(18), None), None);
    }
    #[test]
    fn bst_01_of_a_vm_whose_core_nobody_else_wants_an_order_is_told_each_10_ms_at_most() {
        let mut known = known();
        assert!(known.tell(at(0), want(0)).is_some());
        known.defer(at(1), Duration::from_millis(10));
        for ms in 2..11 {
            assert_eq!(known.tell(at(ms), (ms % 2 == 0).then(|| want(0)).flatten()), None, "{ms}");
        }
        // There is nothing to take back, and no look if it wants nothing.
        assert_eq!(known.look_at(at(10), None), None);
        assert_eq!(known.look_at(at(10), want(1)), Some(at(11)));
        assert!(matches!(known.tell(at(11), want(1)), Some(Order::Boost { taken: 1, .. })));
        assert_eq!(known.tell(at(12), None), Some(Order::End { vm: 3 }));
    }
}
