//! Orders and reports: all that the worker and control say to each other. Neither side waits for
//! the other: a word that the other side has no room for yet is replaced by the next about the same
//! subject (`nightporter_registry::mail`).

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::BorrowedFd;

use nightporter_api::{FabricStatus, PortStatus, Reply, Request, StationKey};
use nightporter_core::store::arena::ArenaSize;
use nightporter_core::time::Duration;
use nightporter_registry::mail::{Bell, Gone, MailEnd, both_ends};
use nightporter_registry::{Listeners, Station};

use super::steps::{Opened, Step};
use crate::port::Port;
use crate::sockets::Overlays;

/// A client of control, by a number that no other has had.
pub(crate) type Client = u64;

/// An order to the worker's thread.
#[derive(Debug)]
pub(crate) enum Order {
    /// Report a status for scrapes.
    Survey,
    /// An operator's request: it is answered with one report. A client has one at a time.
    Request(Client, Request),
    /// There is room for one piece of the client's stream.
    Room(Client),
    /// The client has gone, with its request and its stream.
    Forget(Client),
    /// Report how many pages VMs may use, or still use.
    CountPages,
    /// The arena has grown to this size.
    Resize(ArenaSize),
    /// Take a step of a change, and report its result. There is one at a time.
    Step(Box<(Step, Opened)>),
    /// The interface of the uplink with this name has gone.
    Lose(String),
    /// The uplink or overlay with this name is there again.
    Regain(String, Box<Port>),
    /// The overlays of networks have changed.
    SetOverlays(Overlays),
    /// The peers of the overlay with this number have changed.
    SetPeers(u32, Vec<SocketAddr>),
    /// The place of the VM with this name on its overlay has changed.
    PlaceVm(String, VmPlace),
    /// A station has another place: that on another host, as the registry knows it, and whether
    /// this host holds it.
    TellStation { key: StationKey, elsewhere: Option<Box<Station>>, is_here: bool },
    /// Stop when nothing is owed any more, or after this time.
    Drain(Duration),
    /// Stop at once.
    Stop,
}

/// The place of a VM of this host.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(crate) struct VmPlace {
    /// The number of its overlay.
    pub(crate) vni: u32,
    /// The addresses for which it answers there.
    pub(crate) ips: Vec<IpAddr>,
    /// The registry lists its MAC for another host. There it lives while its link is down here.
    pub(crate) is_elsewhere: bool,
}

/// A report of the worker's thread.
#[derive(Debug)]
pub(crate) enum Report {
    /// The status that these operators have asked for, and that scrapes wait for or not.
    Status { status: WorkerStatus, clients: Vec<Client>, for_scrapes: bool },
    /// The answer to the client's request.
    Reply(Client, Reply),
    /// A piece of the client's stream.
    Piece(Client, Vec<u8>),
    /// The client's stream ends, because its port is gone.
    End(Client),
    /// The pages that VMs may use, or still use.
    Pages(u64),
    /// The interface with this number, of the uplink with this name, has gone; or an uplink or
    /// overlay that was opened again could not be taken.
    Lost(String, u32),
    /// The link of the VM with this name is up or down now; its listeners, if others may be told.
    Link { vm: String, is_up: bool, listeners: Option<Listeners> },
    /// The registry is to be told of the listeners of the VM with this name.
    Listeners(String, Option<Listeners>),
    /// A step was taken; errors should not occur.
    Step(Result<(), String>),
}

/// The worker's part of a status.
#[derive(Debug)]
pub(crate) struct WorkerStatus {
    pub(crate) ports: Vec<PortStatus>,
    /// Sockets over the host's own network, if there are any.
    pub(crate) fabric: Option<FabricStatus>,
    /// How often VMs' listeners have changed.
    pub(crate) listener_changes: u64,
    /// The sockets' worker has not answered: devices are missing, the rest is its last answer's.
    pub(crate) sockets_late: bool,
}

/// The subject of an order or report. There is one word at a time about each, or the later one is
/// enough. Of words that wait for room the first subject's goes first: an overlay before its peers,
/// and peers before their stations, which may be many.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
enum Subject {
    Survey,
    /// By the first client; each waits for one.
    Status(Option<Client>),
    Request(Client),
    Reply(Client),
    Room(Client),
    Piece(Client),
    End(Client),
    Pages,
    Resize,
    Step,
    /// An uplink or overlay, after the step by which it came.
    Interface(String),
    Stop,
    Overlays,
    Peers(u32),
    Vm(String),
    Listeners(String),
    Station(StationKey),
}

/// The worker's end of the mail.
#[derive(Debug)]
pub(crate) struct WorkerMail(MailEnd<Subject, Report, Order>);

/// Control's.
#[derive(Debug)]
pub(crate) struct ControlMail(MailEnd<Subject, Order, Report>);

/// Both ends. Errors: the system's.
pub(crate) fn worker_mail() -> io::Result<(WorkerMail, ControlMail)> {
    let (worker, control) = both_ends()?;
    Ok((WorkerMail(worker), ControlMail(control)))
}

impl WorkerMail {
    /// Readable when there is something to [`Self::take`].
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.0.fd()
    }

    /// For those who end the other end: they ring it.
    pub(crate) fn bell(&self) -> Bell {
        self.0.bell()
    }

    /// The next order, if there is one. Errors: control's end is gone.
    pub(crate) fn take(&mut self) -> Result<Option<Order>, Gone> {
        self.0.take()
    }

    /// Posts a report.
    pub(crate) fn report(&mut self, report: Report) {
        let subject = match &report {
            Report::Status { clients, .. } => Subject::Status(clients.first().copied()),
            Report::Reply(client, _) => Subject::Reply(*client),
            Report::Piece(client, _) => Subject::Piece(*client),
            Report::End(client) => Subject::End(*client),
            Report::Pages(_) => Subject::Pages,
            Report::Lost(name, _) => Subject::Interface(name.clone()),
            Report::Link { vm, .. } => Subject::Vm(vm.clone()),
            Report::Listeners(vm, _) => Subject::Listeners(vm.clone()),
            Report::Step(_) => Subject::Step,
        };
        self.0.post(subject, report);
    }
}

impl ControlMail {
    /// Readable when there is something to [`Self::take`].
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.0.fd()
    }

    /// For those who end the other end: they ring it.
    pub(crate) fn bell(&self) -> Bell {
        self.0.bell()
    }

    /// The next report, if there is one. Errors: the worker's end is gone.
    pub(crate) fn take(&mut self) -> Result<Option<Report>, Gone> {
        self.0.take()
    }

    /// Orders that wait for room.
    pub(crate) fn waiting(&self) -> usize {
        self.0.waiting()
    }

    /// The port of the VM with this name goes: an order about its place that waits is void.
    pub(crate) fn forget_vm(&mut self, vm: &str) {
        let _ = self.0.take_back(&Subject::Vm(vm.to_owned()));
    }

    /// The client has gone. The worker need not know of one whose request it never had: `false`.
    pub(crate) fn forget(&mut self, client: Client) -> bool {
        let _ = self.0.take_back(&Subject::Room(client));
        let is_known = self.0.take_back(&Subject::Request(client)).is_none();
        if is_known {
            self.order(Order::Forget(client));
        }
        is_known
    }

    /// Posts an order.
    pub(crate) fn order(&mut self, order: Order) {
        let subject = match &order {
            Order::Survey => Subject::Survey,
            Order::Request(client, _) => Subject::Request(*client),
            Order::Room(client) => Subject::Room(*client),
            Order::Forget(client) => Subject::End(*client),
            Order::CountPages => Subject::Pages,
            Order::Resize(_) => Subject::Resize,
            Order::Step(_) => Subject::Step,
            Order::Lose(name) | Order::Regain(name, _) => Subject::Interface(name.clone()),
            Order::SetOverlays(_) => Subject::Overlays,
            Order::SetPeers(vni, _) => Subject::Peers(*vni),
            Order::PlaceVm(vm, _) => Subject::Vm(vm.clone()),
            Order::TellStation { key, .. } => Subject::Station(*key),
            Order::Drain(_) | Order::Stop => Subject::Stop,
        };
        self.0.post(subject, order);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_arrive_in_order_and_an_end_that_goes_is_noticed() {
        let (mut worker, mut control) = worker_mail().unwrap();
        assert!(matches!(worker.take(), Ok(None)));
        control.order(Order::Request(7, Request::Status {}));
        control.order(Order::Forget(7));
        control.order(Order::Survey);
        assert!(matches!(worker.take(), Ok(Some(Order::Request(7, Request::Status {})))));
        assert!(matches!(worker.take(), Ok(Some(Order::Forget(7)))));
        assert!(matches!(worker.take(), Ok(Some(Order::Survey))));
        assert!(matches!(worker.take(), Ok(None)));
        worker.report(Report::End(7));
        assert!(matches!(control.take(), Ok(Some(Report::End(7)))));
        drop(control);
        assert!(worker.take().is_err());
    }
}
