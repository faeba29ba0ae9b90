//! Orders and reports: all that the worker and the threads above it say to each other. Neither side
//! waits for the other: a word that the other side has not taken yet is replaced by the next about
//! the same subject (`nightporter_registry::mail`).

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use nightporter_api::Status;
use nightporter_registry::mail::{Bell, Gone, Inbox, Outbox, mail};

/// An order to the worker's thread.
#[derive(Debug)]
pub(crate) enum Order {
    /// Report a status for scrapes.
    Survey,
    /// The last reported status is formatted: the line of the control protocol for operators, unless
    /// a mistake of ours is in the way.
    Formatted(Option<Arc<Vec<u8>>>),
}

/// A report of the worker's thread.
#[derive(Debug)]
pub(crate) enum Report {
    /// A status, for those who wait for one. There is no other before it is formatted.
    Status { status: Box<Status>, for_operators: bool, for_scrapes: bool },
}

/// The subject of an order or report: of two about the same the later one is enough.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(crate) enum Subject {
    Survey,
    Status,
}

/// The worker's end of the mail.
pub(crate) type WorkerMail = MailEnd<Report, Order>;
/// Control's.
pub(crate) type ControlMail = MailEnd<Order, Report>;

/// One end of the mail between two threads.
#[derive(Debug)]
pub(crate) struct MailEnd<Out, In> {
    bell: Bell,
    outbox: Outbox<Subject, Out>,
    inbox: Inbox<In>,
}

/// Both ends. Errors: the system's.
pub(crate) fn worker_mail() -> io::Result<(WorkerMail, ControlMail)> {
    let (worker, control) = (Bell::new()?, Bell::new()?);
    let (orders_out, orders_in) = mail(&control, &worker);
    let (reports_out, reports_in) = mail(&worker, &control);
    let of_worker = MailEnd { bell: worker, outbox: reports_out, inbox: orders_in };
    Ok((of_worker, MailEnd { bell: control, outbox: orders_out, inbox: reports_in }))
}

impl Order {
    const fn subject(&self) -> Subject {
        match self {
            Self::Survey => Subject::Survey,
            Self::Formatted(_) => Subject::Status,
        }
    }
}

impl WorkerMail {
    /// Posts a report.
    pub(crate) fn report(&mut self, report: Report) {
        self.outbox.post(Subject::Status, report);
    }
}

impl ControlMail {
    /// Posts an order.
    pub(crate) fn order(&mut self, order: Order) {
        self.outbox.post(order.subject(), order);
    }
}

impl<Out, In> MailEnd<Out, In> {
    /// Readable when there is something to [`Self::take`].
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.bell.fd()
    }

    /// This end's bell, for who ends the other one.
    pub(crate) fn bell(&self) -> Bell {
        self.bell.clone()
    }

    /// The next word, if there is one; hands over what waited for room. Errors: the other end is
    /// gone.
    pub(crate) fn take(&mut self) -> Result<Option<In>, Gone> {
        self.outbox.flush();
        self.inbox.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_that_was_not_taken_is_not_given_twice_and_an_end_that_goes_is_noticed() {
        let (mut worker, mut control) = worker_mail().unwrap();
        assert!(matches!(worker.take(), Ok(None)));
        control.order(Order::Survey);
        control.order(Order::Formatted(None));
        assert!(matches!(worker.take(), Ok(Some(Order::Survey))));
        assert!(matches!(worker.take(), Ok(Some(Order::Formatted(None)))));
        assert!(matches!(worker.take(), Ok(None)));
        drop(control);
        assert!(worker.take().is_err());
    }
}
