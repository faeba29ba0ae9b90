//! The desk: work that is not about frames. It executes the requests of operators, whom `control`
//! serves; it stops the daemon; it has the interfaces that go and come back.
//!
//! It works between two turns, never in one: an event changes the [`DataPath`] at once, and the
//! turn that follows carries the change out. Clients are bounded in number, and each has one
//! request under way, so none of them delays a turn for long. A status, which is about all
//! ports and flows, is made in as many turns as it needs (`survey`).

mod census;
mod changes;
mod commands;
mod directory;
mod here;
mod links;
mod mender;
mod report;
mod survey;

use std::io;

use nightporter_api::Change;
use nightporter_core::time::{Duration, Instant};
use nightporter_registry::Registry;
use nix::sys::epoll::Epoll;

use crate::token::{Token, watch_for};
use crate::worker::Others;
use crate::worker::data_path::DataPath;
use crate::worker::orders::{Order, Report, WorkerMail};
use changes::{Asked, Changes};
use directory::Directory;
pub(crate) use links::LinkWatch;
use mender::Mender;
use survey::Survey;
#[cfg(test)]
pub(crate) use {census::FlowSums, survey::PORTS_PER_TURN};

/// Orders of control that are taken between two turns.
const ORDERS_PER_TURN: usize = 64;
/// How often a stopping daemon looks whether it is done.
const STOP_LOOK_INTERVAL: Duration = Duration::from_millis(10);

/// A stop that waits for guests.
#[derive(Debug)]
struct Stop {
    /// It happens then in any case.
    deadline: Instant,
    /// When to look again whether anything is still owed.
    look_at: Instant,
}

/// See the module doc.
#[derive(Debug)]
pub(crate) struct Desk {
    drain_timeout: Duration,
    links: Option<LinkWatch>,
    /// To and from control. `None`: there are no operators.
    mail: Option<WorkerMail>,
    control_ended: bool,
    survey: Survey,
    changes: Changes,
    mender: Mender,
    directory: Option<Directory>,
    /// Set once the daemon was told to stop.
    stop: Option<Stop>,
    stopped: bool,
}

impl Desk {
    /// Without clients. A stop does not wait for guests.
    pub(crate) fn new() -> Self {
        Self {
            drain_timeout: Duration::ZERO,
            links: None,
            mail: None,
            control_ended: false,
            survey: Survey::default(),
            changes: Changes::default(),
            mender: Mender::default(),
            directory: None,
            stop: None,
            stopped: false,
        }
    }

    /// A client has asked for a status.
    #[cfg(test)]
    pub(crate) fn begin_survey(&mut self) {
        self.survey.begin();
    }

    /// Ports that a status has looked at so far.
    #[cfg(test)]
    pub(crate) fn looked_at(&self) -> usize {
        self.survey.looked_at()
    }

    /// The daemon has stopped.
    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped
    }

    /// Notices interfaces that go and come back.
    pub(crate) fn set_links(&mut self, epoll: &Epoll, links: LinkWatch) -> io::Result<()> {
        watch_for(epoll, &links.fd(), Token::Links)?;
        self.links = Some(links);
        Ok(())
    }

    /// Takes orders of control from now on.
    pub(crate) fn set_mail(&mut self, epoll: &Epoll, mail: WorkerMail) -> io::Result<()> {
        watch_for(epoll, &mail.fd(), Token::Mail)?;
        self.mail = Some(mail);
        Ok(())
    }

    /// Control's thread has ended, by a mistake of ours.
    pub(crate) const fn has_lost_control(&self) -> bool {
        self.control_ended
    }

    /// Sets the registry, which is asked and told which station is where.
    pub(crate) fn set_registry(
        &mut self,
        epoll: &Epoll,
        registry: Box<dyn Registry>,
    ) -> io::Result<()> {
        watch_for(epoll, &registry.fd(), Token::Registry)?;
        self.directory = Some(Directory::new(registry));
        Ok(())
    }

    /// Reports to control.
    fn report(&mut self, report: Report) {
        if let Some(mail) = &mut self.mail {
            mail.report(report);
        }
    }

    /// Takes some of control's orders, of requests one. There is an event for the others.
    fn handle_orders(&mut self, now: Instant, path: &mut DataPath) {
        for _ in 0..ORDERS_PER_TURN {
            match self.mail.as_mut().map(WorkerMail::take) {
                None | Some(Ok(None)) => return,
                Some(Ok(Some(Order::Survey))) => self.survey.ask_for_scrapes(),
                Some(Ok(Some(Order::Request(client, request)))) => {
                    return self.handle_request(now, path, client, request);
                }
                Some(Ok(Some(Order::Room(client)))) => path.ports.watchers.give_room(client),
                Some(Ok(Some(Order::Forget(client)))) => self.forget_client(path, client),
                Some(Ok(Some(Order::Reload))) => self.reload(path),
                Some(Ok(Some(Order::Drain))) => self.drain(now, path),
                Some(Ok(Some(Order::Stop))) => self.stopped = true,
                Some(Err(_)) => return self.control_ended = true,
            }
        }
    }

    fn reload(&mut self, path: &DataPath) {
        let change = Change::Reload {};
        match self.cannot_change() {
            None => self.ask(path, Asked { client: None, change, dry_run: false }),
            Some(refusal) => self.answer(None, refusal),
        }
    }

    /// Guests get the bytes that they are owed, and then the daemon stops.
    fn drain(&mut self, now: Instant, path: &mut DataPath) {
        self.stop = Some(Stop { deadline: now + self.drain_timeout, look_at: now });
        self.report(Report::Draining(self.drain_timeout));
        path.drain_all(now);
        self.refuse_waiting();
    }

    /// Ends a stop when nothing is owed any more, or the time is up.
    fn look_whether_done(&mut self, now: Instant, path: &DataPath) {
        let Some(stop) = self.stop.as_mut().filter(|stop| now >= stop.look_at) else { return };
        stop.look_at = stop.deadline.min(now + STOP_LOOK_INTERVAL);
        let late = now >= stop.deadline;
        if late {
            path.name_owing();
        }
        self.stopped |= late || path.owed() == 0 && !path.engine.is_draining();
    }
}

impl Others for Desk {
    /// Something happened that is not about a frame.
    fn handle_event(&mut self, now: Instant, epoll: &Epoll, path: &mut DataPath, token: Token) {
        match token {
            Token::Links => self.handle_links(now, path),
            Token::Changes => self.handle_prepared(path),
            Token::Opener => self.handle_opened(now, epoll, path),
            Token::Mail => self.handle_orders(now, path),
            Token::Registry => self.handle_registry(path),
            token => unreachable!("not the desk's: {token:?}"),
        }
    }

    /// A turn is over: watchers get their frames, and a stop may be done.
    fn after_turn(&mut self, now: Instant, epoll: &Epoll, path: &mut DataPath) {
        self.feed_watchers(path);
        if self.survey.goes_on() {
            self.go_on_surveying(now, path);
        }
        if self.mender.poll_timeout().is_some_and(|at| at <= now) {
            self.mend(now, path);
        }
        self.go_on_changing(now, epoll, path);
        self.tell_registry(now, path);
        self.look_whether_done(now, path);
    }

    /// When it has something to do by itself.
    fn poll_timeout(&self) -> Option<Instant> {
        let stop = self.stop.as_ref().map(|stop| stop.look_at);
        let goes_on = self.survey.goes_on() || self.changes.is_applying();
        let counts = goes_on.then_some(Instant::ZERO);
        let (mends, claims) = (self.mender.poll_timeout(), self.claim_timeout());
        [stop, counts, mends, claims].into_iter().flatten().min()
    }
}
