//! The frames' worker's side of the mail with the sockets' worker.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;

use nightporter_core::bucket::SharedRate;
use nightporter_core::engine::Direction;
use nightporter_core::port::PortId;
use nightporter_registry::Listeners;
use nix::sys::epoll::Epoll;

use super::data_path::DataPath;
use super::executor::Executor;
use super::orders::Report;
use crate::port::vhost_user::VhostUserPort;
use crate::sockets::Member;
use crate::sockets::orders::{self, Addition, Change, FramesMail, Order, SocketsStatus};
use crate::token::{Token, watch_for};
use crate::vhost::vsock::Vsock;

/// Reports that are taken in one turn.
const REPORTS_PER_TURN: usize = 64;

/// The frames' worker's knowledge of the sockets' worker.
#[derive(Debug, Default)]
pub(super) struct Sockets {
    /// `None`: there is no such worker, and no device.
    mail: Option<FramesMail>,
    /// The last change that was ordered, and the last that was made.
    ordered: u64,
    done: u64,
    /// VMs with a device.
    ports: BTreeSet<PortId>,
    /// The last known listeners of VMs whose devices have a driver.
    listeners: BTreeMap<PortId, Listeners>,
    /// The number of the status that was ordered last.
    surveys: u64,
    /// That status, once it is there.
    status: Option<Box<SocketsStatus>>,
    has_ended: bool,
}

impl Sockets {
    /// Writes to the sockets' worker from now on. Errors: the system's.
    pub(super) fn set_mail(&mut self, epoll: &Epoll, mail: FramesMail) -> io::Result<()> {
        watch_for(epoll, &mail.fd(), Token::SocketsMail)?;
        self.mail = Some(mail);
        Ok(())
    }

    /// The sockets' worker has ended by a mistake of ours.
    pub(super) const fn has_ended(&self) -> bool {
        self.has_ended
    }

    /// A change that was ordered is not made yet. There is a report when it is.
    pub(super) const fn is_busy(&self) -> bool {
        self.done < self.ordered
    }

    /// Orders a change.
    pub(super) fn change(&mut self, change: Change) {
        if let Some(mail) = &mut self.mail {
            self.ordered = mail.change(change);
        }
    }

    /// Posts an order that is no change.
    pub(super) fn order(&mut self, order: Order) {
        if let Some(mail) = &mut self.mail {
            mail.order(order);
        }
    }

    /// The sockets of a VM are to end, because its device goes.
    pub(super) fn prepare_removal(&mut self, port: PortId) {
        if self.ports.contains(&port) {
            self.change(Change::PrepareRemoval(port));
        }
    }

    /// A VM has no device from now on, if it had one.
    pub(super) fn remove(&mut self, port: PortId) {
        self.listeners.remove(&port);
        if self.ports.remove(&port) {
            self.change(Change::Remove(port));
        }
    }

    /// Another rate limit for a VM.
    pub(super) fn set_rate_limit(
        &mut self,
        port: PortId,
        way: Direction,
        rate: Option<Arc<SharedRate>>,
    ) {
        if self.ports.contains(&port) {
            self.order(Order::SetRateLimit(port, way, rate));
        }
    }

    /// The listeners of a VM as they were reported last; see [`orders::Report::Listeners`].
    pub(super) fn listeners_of(&self, port: PortId) -> Option<Listeners> {
        self.listeners.get(&port).cloned()
    }

    /// Orders a status.
    pub(super) fn ask_for_status(&mut self) {
        self.status = None;
        self.surveys += 1;
        self.order(Order::Survey(self.surveys));
    }

    /// The status with this number has come.
    pub(super) fn handle_status(&mut self, number: u64, status: Box<SocketsStatus>) {
        // It may have come too late for those who asked for it, and is too old for the others.
        if number == self.surveys {
            self.status = Some(status);
        }
    }

    /// The status that was ordered. `None`: it is not there yet.
    pub(super) fn take_status(&mut self) -> Option<Box<SocketsStatus>> {
        if self.mail.is_none() { Some(Box::default()) } else { self.status.take() }
    }
}

impl DataPath {
    /// The VM behind a port has a socket device from now on.
    pub(super) fn add_toe(
        &mut self,
        port: PortId,
        mut device: VhostUserPort<Vsock>,
        member: Member,
    ) {
        if let Some(guest) = self.ports.guest_mut(port) {
            device.belongs_to(&guest.port);
        }
        let ways = [Direction::FromGuest, Direction::ToGuest];
        let limits = ways.map(|way| self.engine.shared_rate(port, way));
        self.sockets.ports.insert(port);
        self.sockets.change(Change::Add(port, Box::new(Addition { device, member, limits })));
    }
}

impl Executor {
    /// Takes some reports of the sockets' worker. There is an event for the others.
    pub(super) fn handle_sockets(&mut self, path: &mut DataPath) {
        for _ in 0..REPORTS_PER_TURN {
            let sockets = &mut path.sockets;
            let report = match sockets.mail.as_mut().map(FramesMail::take) {
                None | Some(Ok(None)) => return,
                Some(Ok(Some(report))) => report,
                Some(Err(_)) => return sockets.has_ended = true,
            };
            match report {
                orders::Report::Done(number) => sockets.done = number,
                orders::Report::Status(number, status) => sockets.handle_status(number, status),
                orders::Report::Look => path.look_again(),
                orders::Report::Listeners { port, listeners, is_news } => {
                    match listeners.clone().filter(|_| sockets.ports.contains(&port)) {
                        Some(listeners) => sockets.listeners.insert(port, listeners),
                        None => sockets.listeners.remove(&port),
                    };
                    let vm = path.ports.name_of(port);
                    if is_news && !vm.is_empty() {
                        self.report(Report::Listeners(vm.to_owned(), listeners));
                    }
                }
            }
        }
    }
}
