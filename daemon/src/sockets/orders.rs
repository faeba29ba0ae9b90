//! Orders and reports: all that the frames' worker and the sockets' worker say to each other.
//! Neither waits for the other (`nightporter_registry::mail`).
//!
//! A *change* has a number, and is answered by [`Report::Done`] when its effect is there. No later
//! word replaces it. Changes are few: one for each VM at the start, and then those of the one step
//! that control has ordered. Of other words the last about a subject is enough.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use nightporter_api::{FabricStatus, StationKey, ToeStatus};
use nightporter_core::bucket::SharedRate;
use nightporter_core::engine::Direction;
use nightporter_core::port::PortId;
pub(super) use nightporter_registry::mail::Gone;
use nightporter_registry::mail::{Bell, MailEnd, both_ends};
use nightporter_registry::{Listeners, Station};

use super::rules::{Member, Overlays};
use crate::config::ToeRule;
use crate::port::vhost_user::{Socket, VhostUserConfig, VhostUserPort};
use crate::vhost::vsock::Vsock;

/// An order to the sockets' worker. A VM is named by the number of its port.
#[derive(Debug)]
pub(crate) enum Order {
    /// A change, and its number.
    Change(u64, Change),
    /// Another rate limit of a VM, which its frames have, too.
    SetRateLimit(PortId, Direction, Option<Arc<SharedRate>>),
    /// The overlays of networks have changed.
    SetOverlays(Overlays),
    /// The station's place on another host has changed.
    SetStation(StationKey, Option<Box<Station>>),
    /// Report a status, with this number.
    Survey(u64),
    /// A VM was banned.
    Look,
}

/// A change of a device, or of the rules of all.
#[derive(Debug)]
pub(crate) enum Change {
    /// The VM has this device from now on.
    Add(PortId, Box<Addition>),
    /// Other keys of the VM.
    Set(PortId, Box<Setting>),
    /// Its device is about to go: its sockets end. It is done when all have ended.
    PrepareRemoval(PortId),
    /// The device goes, and what it still has ends.
    Remove(PortId),
    /// Other rules of the operator's.
    SetRules(Vec<ToeRule>),
}

/// A device that comes.
#[derive(Debug)]
pub(crate) struct Addition {
    pub(crate) device: VhostUserPort<Vsock>,
    pub(crate) member: Member,
    /// By [`Direction`].
    pub(crate) limits: [Option<Arc<SharedRate>>; 2],
}

/// Other keys for a device that stays.
#[derive(Debug)]
pub(crate) struct Setting {
    pub(crate) config: VhostUserConfig,
    pub(crate) member: Member,
    /// Front-ends find it elsewhere.
    pub(crate) moves: Option<Socket>,
}

/// A report of the sockets' worker.
#[derive(Debug)]
pub(crate) enum Report {
    /// The change with this number has been made.
    Done(u64),
    /// The ports at which the VM listens; `None`: its device has no driver. `is_news`: others are
    /// to be told.
    Listeners { port: PortId, listeners: Option<Listeners>, is_news: bool },
    /// The status that was ordered with this number.
    Status(u64, Box<SocketsStatus>),
    /// A VM was banned.
    Look,
}

/// The sockets' worker's part of a status.
#[derive(Debug, Default)]
pub(crate) struct SocketsStatus {
    /// Devices, by the numbers of their VMs' ports.
    pub(crate) devices: BTreeMap<PortId, ToeStatus>,
    /// The streams to other hosts, if there is a way to them.
    pub(crate) fabric: Option<FabricStatus>,
    /// How often VMs' listeners have changed.
    pub(crate) listener_changes: u64,
}

/// The subject of an order or report. Of words that wait for room the first subject's goes first.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
enum Subject {
    Look,
    Listeners(PortId),
    /// After the listeners that it may be about.
    Change(u64),
    Limit(PortId, bool),
    Overlays,
    Survey,
    Station(StationKey),
}

const fn limit_of(port: PortId, way: Direction) -> Subject {
    Subject::Limit(port, matches!(way, Direction::ToGuest))
}

/// The frames' worker's end of the mail.
#[derive(Debug)]
pub(crate) struct FramesMail {
    end: MailEnd<Subject, Order, Report>,
    /// The number of the last change.
    changes: u64,
}

/// The sockets' worker's.
#[derive(Debug)]
pub(crate) struct SocketsMail(MailEnd<Subject, Report, Order>);

/// Both ends. Errors: the system's.
pub(crate) fn sockets_mail() -> io::Result<(FramesMail, SocketsMail)> {
    let (end, sockets) = both_ends()?;
    Ok((FramesMail { end, changes: 0 }, SocketsMail(sockets)))
}

impl FramesMail {
    /// Readable when there is something to [`Self::take`].
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.end.fd()
    }

    /// For those who end the other end: they ring it.
    pub(crate) fn bell(&self) -> Bell {
        self.end.bell()
    }

    /// The next report, if there is one. Errors: the other end is gone.
    pub(crate) fn take(&mut self) -> Result<Option<Report>, Gone> {
        self.end.take()
    }

    /// Orders a change; its number.
    pub(crate) fn change(&mut self, change: Change) -> u64 {
        if let Change::Remove(port) = change {
            for way in [Direction::FromGuest, Direction::ToGuest] {
                // Another VM may get the number.
                let _ = self.end.take_back(&limit_of(port, way));
            }
        }
        self.changes += 1;
        let number = self.changes;
        self.end.post(Subject::Change(number), Order::Change(number, change));
        number
    }

    /// Posts an order that is no change.
    pub(crate) fn order(&mut self, order: Order) {
        let subject = match &order {
            Order::Change(number, _) => Subject::Change(*number),
            Order::SetRateLimit(port, way, _) => limit_of(*port, *way),
            Order::SetOverlays(_) => Subject::Overlays,
            Order::SetStation(key, _) => Subject::Station(*key),
            Order::Survey(_) => Subject::Survey,
            Order::Look => Subject::Look,
        };
        self.end.post(subject, order);
    }
}

impl SocketsMail {
    /// Readable when there is something to [`Self::take`].
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.0.fd()
    }

    /// For those who end the other end: they ring it.
    pub(crate) fn bell(&self) -> Bell {
        self.0.bell()
    }

    /// The next order, if there is one. Errors: the other end is gone.
    pub(crate) fn take(&mut self) -> Result<Option<Order>, Gone> {
        self.0.take()
    }

    /// Posts a report.
    pub(crate) fn report(&mut self, mut report: Report) {
        if let Report::Listeners { port, is_news, .. } = &mut report
            && let Some(Report::Listeners { is_news: was_news, .. }) =
                self.0.take_back(&Subject::Listeners(*port))
        {
            // Others have not been told of the one that this one replaces.
            *is_news |= was_news;
        }
        let subject = match &report {
            Report::Done(number) => Subject::Change(*number),
            Report::Listeners { port, .. } => Subject::Listeners(*port),
            Report::Status(..) => Subject::Survey,
            Report::Look => Subject::Look,
        };
        self.0.post(subject, report);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_listeners_the_last_report_is_the_last_that_arrives_and_news_stay_news() {
        let (mut frames, mut sockets) = sockets_mail().unwrap();
        let report = |sockets: &mut SocketsMail, port, is_news| {
            let listeners = Some(Listeners::new([port], 0));
            sockets.report(Report::Listeners { port: PortId(7), listeners, is_news });
        };
        // More than the channel holds.
        (0..3000).for_each(|n| sockets.report(Report::Done(n)));
        for (port, is_news) in [(1, false), (2, true), (3, false)] {
            report(&mut sockets, port, is_news);
        }
        let mut heard = Vec::new();
        while let Some(said) = frames.take().unwrap() {
            if let Report::Listeners { listeners, is_news, .. } = said {
                heard.push((listeners, is_news));
            }
            sockets.0.flush();
        }
        assert_eq!(heard, [(Some(Listeners::new([3], 0)), true)]);
    }

    #[test]
    fn no_change_is_replaced_and_the_limit_of_a_vm_that_goes_is_taken_back() {
        let (mut frames, mut sockets) = sockets_mail().unwrap();
        // More than the channel holds.
        let last = (0..3000).map(|n| frames.change(Change::PrepareRemoval(PortId(n)))).max();
        let limit = |of| Order::SetRateLimit(PortId(of), Direction::ToGuest, None);
        [7, 8].into_iter().for_each(|of| frames.order(limit(of)));
        assert_eq!(frames.change(Change::Remove(PortId(7))), last.unwrap() + 1);
        let (mut numbers, mut limited) = (Vec::new(), Vec::new());
        while let Some(order) = sockets.take().unwrap() {
            match order {
                Order::Change(number, _) => numbers.push(number),
                Order::SetRateLimit(port, ..) => limited.push(port),
                other => panic!("{other:?}"),
            }
            frames.end.flush();
        }
        assert_eq!(numbers, (1..=3001).collect::<Vec<_>>());
        assert_eq!(limited, [PortId(8)]);
        drop(frames);
        assert!(sockets.take().is_err());
    }
}
