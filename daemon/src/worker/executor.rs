//! Executes control's orders between two turns, and reports to control.
//!
//! It works never in a turn: an order changes the [`DataPath`] at once, and the turn that follows
//! carries the change out. Clients are bounded in number, and each has one request under way, so
//! none of them delays a turn for long. A status, which is about all ports and flows, is made in as
//! many turns as it needs (`survey`).

use std::io;

use nightporter_core::time::{Duration, Instant};
use nix::sys::epoll::Epoll;

use super::data_path::DataPath;
use super::orders::{Order, Report, WorkerMail};
use super::steps::{Opened, Step, Stepping};
use super::survey::Survey;
use crate::closer;
use crate::sockets::orders;
use crate::token::{Token, watch_for};

/// Orders of control that are taken between two turns.
const ORDERS_PER_TURN: usize = 64;
/// How often a stopping daemon looks whether it is done.
const STOP_LOOK_INTERVAL: Duration = Duration::from_millis(10);
/// Resets at the end of a stop have so long to find their guests' rings.
const RESETS_WITHIN: Duration = Duration::from_secs(1);

/// A stop that waits for guests.
#[derive(Debug)]
struct Stop {
    /// It happens then in any case.
    deadline: Instant,
    /// And not before.
    lingers: bool,
    /// The connections that the host has accepted are being reset: the next daemon could not
    /// translate either (ACC-08).
    resets: bool,
    /// When to look again whether anything is still owed.
    look_at: Instant,
}

/// See the module doc.
#[derive(Debug, Default)]
pub(super) struct Executor {
    /// To and from control. `None`: there are no operators.
    mail: Option<WorkerMail>,
    pub(super) control_ended: bool,
    pub(super) survey: Survey,
    /// The step of a change that is being taken.
    stepping: Option<Stepping>,
    /// The result of the step that was taken, until the sockets' worker has taken it, too.
    taken: Option<Result<(), String>>,
    /// Set once the daemon was told to stop.
    stop: Option<Stop>,
    pub(super) stopped: bool,
}

impl Executor {
    /// Takes orders of control from now on.
    pub(super) fn set_mail(&mut self, epoll: &Epoll, mail: WorkerMail) -> io::Result<()> {
        watch_for(epoll, &mail.fd(), Token::Mail)?;
        self.mail = Some(mail);
        Ok(())
    }

    /// Reports to control.
    pub(super) fn report(&mut self, report: Report) {
        if let Some(mail) = &mut self.mail {
            mail.report(report);
        }
    }

    /// Takes some of control's orders, of requests one. There is an event for the others.
    pub(super) fn handle_orders(&mut self, now: Instant, epoll: &Epoll, path: &mut DataPath) {
        for _ in 0..ORDERS_PER_TURN {
            let order = match self.mail.as_mut().map(WorkerMail::take) {
                None | Some(Ok(None)) => return,
                Some(Ok(Some(order))) => order,
                Some(Err(_)) => return self.control_ended = true,
            };
            match order {
                Order::Request(client, request) => {
                    return self.handle_request(now, path, client, request);
                }
                Order::Step(step) => {
                    // After the turn. Orders behind it may be about its port.
                    return self.stepping = Some(Stepping::new(step.0, step.1));
                }
                order => self.execute(now, epoll, path, order),
            }
        }
    }

    fn execute(&mut self, now: Instant, epoll: &Epoll, path: &mut DataPath, order: Order) {
        match order {
            Order::Request(..) | Order::Step(_) => unreachable!("they end a batch of orders"),
            Order::Survey => self.survey.ask_for_scrapes(),
            Order::Room(client) => path.ports.watchers.give_room(client),
            Order::Forget(client) => self.forget_client(path, client),
            Order::CountPages => self.report(Report::Pages(path.engine.pages_promised(None))),
            Order::Resize(size) => {
                let flows = u32::try_from(size.records).unwrap_or(u32::MAX);
                path.engine.resize(flows, size);
            }
            Order::Lose(name) => {
                path.ports.find(&name).into_iter().for_each(|id| path.lose(now, epoll, id));
            }
            // Its port need not be lost yet: of two words about an interface that wait for room
            // only the last arrives.
            Order::Regain(name, port) => match path.ports.find(&name) {
                Some(id) => path.regain(now, epoll, id, *port),
                None => closer::later(None, port), // it was removed meanwhile
            },
            Order::SetOverlays(overlays) => {
                path.sockets.order(orders::Order::SetOverlays(overlays));
            }
            Order::SetPeers(vni, peers) => path.set_peers(vni, &peers),
            Order::PlaceVm(name, place) => path.place_vm(&name, &place),
            Order::TellStation { key, elsewhere, is_here } => {
                path.tell_station(key, elsewhere.as_deref(), is_here);
            }
            Order::Drain(limit) => self.drain(now, limit, path),
            Order::Stop => self.stopped = true,
        }
    }

    /// Guests get the bytes that they are owed, and then the daemon stops.
    pub(super) fn drain(&mut self, now: Instant, limit: Duration, path: &mut DataPath) {
        self.stop =
            Some(Stop { deadline: now + limit, lingers: false, resets: false, look_at: now });
        path.drain_all(now);
    }

    /// It has stopped, and goes on for `time`.
    pub(super) fn linger(&mut self, now: Instant, time: Duration) {
        self.stop = Some(Stop { deadline: now + time, lingers: true, resets: false, look_at: now });
        self.stopped = false;
    }

    /// Goes on with the step that is being taken.
    fn go_on_stepping(&mut self, now: Instant, epoll: &Epoll, path: &mut DataPath) {
        if let Some(mut it) = self.stepping.take() {
            if !it.prepare(now, epoll, path) {
                self.stepping = Some(it);
                return; // it takes some more turns
            }
            self.taken = Some(self.take_step(now, epoll, path, it.step, it.opened));
        }
        // The sockets' worker reports its part, too.
        if !path.sockets.is_busy()
            && let Some(result) = self.taken.take()
        {
            self.report(Report::Step(result));
        }
    }

    /// Takes a step of a change. Errors: those that should not occur.
    pub(super) fn take_step(
        &mut self,
        now: Instant,
        epoll: &Epoll,
        path: &mut DataPath,
        step: Step,
        opened: Opened,
    ) -> Result<(), String> {
        if let Step::RemoveVm(name, _) = &step {
            path.ports.find(name).into_iter().for_each(|id| self.survey.forget_port(id));
        }
        let gone = path.take_step(now, epoll, step, opened)?;
        gone.into_iter().for_each(|client| self.report(Report::End(client)));
        Ok(())
    }

    /// Reports VMs' links that have changed.
    fn report_links(&mut self, path: &mut DataPath) {
        for (vm, (is_up, listeners)) in std::mem::take(&mut path.links) {
            self.report(Report::Link { vm, is_up, listeners });
        }
    }

    /// Ends a stop when nothing is owed any more, or the time is up.
    fn look_whether_done(&mut self, now: Instant, path: &mut DataPath) {
        let Some(stop) = self.stop.as_mut().filter(|stop| now >= stop.look_at) else { return };
        stop.look_at = stop.deadline.min(now + STOP_LOOK_INTERVAL);
        let late = now >= stop.deadline;
        if late && !stop.lingers && !stop.resets {
            path.name_owing();
        }
        let is_done = !stop.lingers && path.owed() == 0 && !path.engine.is_draining();
        let translated = path.translated();
        if (late || is_done) && !stop.lingers && !stop.resets && translated > 0 {
            tracing::info!(translated, "connections that the host has accepted are reset");
            path.engine.end_translated(now);
            stop.resets = true;
            (stop.deadline, stop.look_at) = (now + RESETS_WITHIN, now);
            return;
        }
        self.stopped |= late || is_done;
    }

    /// A turn is over: watchers get their frames, and a stop may be done.
    pub(super) fn after_turn(&mut self, now: Instant, epoll: &Epoll, path: &mut DataPath) {
        self.feed_watchers(path);
        for (name, index) in std::mem::take(&mut path.ports.lost) {
            self.report(Report::Lost(name, index));
        }
        self.go_on_surveying(now, path);
        self.go_on_stepping(now, epoll, path);
        self.report_links(path);
        self.look_whether_done(now, path);
    }

    /// When it has something to do by itself.
    pub(super) fn poll_timeout(&self, path: &DataPath) -> Option<Instant> {
        let stop = self.stop.as_ref().map(|stop| stop.look_at);
        // There is an event when the sockets' worker has done its part of a step.
        let steps = self.stepping.as_ref().filter(|_| !path.sockets.is_busy());
        [stop, self.survey.poll_timeout(), steps.map(Stepping::look_at)].into_iter().flatten().min()
    }
}
