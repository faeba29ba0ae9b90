//! The desk: work that is not about frames. It executes the requests of operators, whom `control`
//! serves; it stops the daemon; it has the interfaces that go and come back.
//!
//! It works between two turns, never in one: an event changes the [`DataPath`] at once, and the
//! turn that follows carries the change out. Clients are bounded in number, and each has one
//! request under way, so none of them delays a turn for long. A status, which is about all
//! ports and flows, is made in as many turns as it needs (`survey`).

mod census;
mod commands;
mod report;
mod survey;

use std::io;

use nightporter_core::time::{Duration, Instant};
use nix::sys::epoll::Epoll;

use crate::change::{Prepared, Running};
use crate::charges;
use crate::closer;
use crate::control::Interfaces;
use crate::token::{Token, watch_for};
use crate::worker::Others;
use crate::worker::data_path::DataPath;
use crate::worker::orders::{Order, Report, WorkerMail};
use crate::worker::steps::{Opened, Step, Stepping};
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
    /// To and from control. `None`: there are no operators.
    mail: Option<WorkerMail>,
    control_ended: bool,
    survey: Survey,
    /// The step of a change that is being taken.
    stepping: Option<Stepping>,
    /// Set once the daemon was told to stop.
    stop: Option<Stop>,
    stopped: bool,
}

impl Desk {
    /// Without clients.
    pub(crate) fn new() -> Self {
        Self {
            mail: None,
            control_ended: false,
            survey: Survey::default(),
            stepping: None,
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

    /// Reports to control.
    fn report(&mut self, report: Report) {
        if let Some(mail) = &mut self.mail {
            mail.report(report);
        }
    }

    /// Takes some of control's orders, of requests one. There is an event for the others.
    fn handle_orders(&mut self, now: Instant, epoll: &Epoll, path: &mut DataPath) {
        for _ in 0..ORDERS_PER_TURN {
            let order = match self.mail.as_mut().map(WorkerMail::take) {
                None | Some(Ok(None)) => return,
                Some(Ok(Some(order))) => order,
                Some(Err(_)) => return self.control_ended = true,
            };
            match order {
                Order::Survey => self.survey.ask_for_scrapes(),
                Order::Request(client, request) => {
                    return self.handle_request(now, path, client, request);
                }
                Order::Room(client) => path.ports.watchers.give_room(client),
                Order::Forget(client) => self.forget_client(path, client),
                Order::CountPages => {
                    self.report(Report::Pages(path.engine.pages_promised(None)));
                }
                Order::Resize(size) => {
                    let flows = u32::try_from(size.records).unwrap_or(u32::MAX);
                    path.engine.resize(flows, size);
                }
                Order::Step(step) => {
                    // After the turn. Orders behind it may be about its port.
                    return self.stepping = Some(Stepping::new(step.0, step.1));
                }
                Order::Lose(name) => {
                    path.ports.find(&name).into_iter().for_each(|id| path.lose(now, id));
                }
                // Its port need not be lost yet: of two words about an interface that wait for room
                // only the last arrives.
                Order::Regain(name, port) => match path.ports.find(&name) {
                    Some(id) => path.regain(now, epoll, id, *port),
                    None => closer::later(None, port), // it was removed meanwhile
                },
                Order::SetOverlays(overlays) => path.toe.set_overlays(now, overlays),
                Order::SetPeers(vni, peers) => path.set_peers(vni, &peers),
                Order::PlaceVm(name, place) => path.place_vm(&name, &place),
                Order::TellStation { key, elsewhere, is_here } => {
                    path.tell_station(key, elsewhere.as_deref(), is_here);
                }
                Order::Drain(limit) => {
                    // Guests get the bytes that they are owed, and then the daemon stops.
                    self.stop = Some(Stop { deadline: now + limit, look_at: now });
                    path.drain_all(now);
                }
                Order::Stop => self.stopped = true,
            }
        }
    }

    /// Takes all steps of the start's change: nothing runs yet that could wait meanwhile. The steps
    /// that failed, and their errors.
    pub(crate) fn begin(
        &mut self,
        now: Instant,
        epoll: &Epoll,
        path: &mut DataPath,
        mut prepared: Prepared,
        interfaces: &mut Interfaces,
    ) -> (Running, Vec<(Step, String)>) {
        let mut failed = Vec::new();
        for step in std::mem::take(&mut prepared.plan.steps) {
            let opened = prepared.resources.take(&step, &prepared.owners);
            opened.port.iter().for_each(|port| interfaces.add(port));
            if let Err(e) = self.take_step(now, epoll, path, step.clone(), opened) {
                prepared.target.without(&step);
                failed.push((step, e));
            }
        }
        charges::set_max(prepared.target.config.charges_max());
        (prepared.target, failed)
    }

    /// Goes on with the step that is being taken.
    fn go_on_stepping(&mut self, now: Instant, epoll: &Epoll, path: &mut DataPath) {
        let Some(mut it) = self.stepping.take() else { return };
        if !it.prepare(now, epoll, path) {
            self.stepping = Some(it);
            return; // it takes some more turns
        }
        let result = self.take_step(now, epoll, path, it.step, it.opened);
        self.report(Report::Step(result));
    }

    fn take_step(
        &mut self,
        now: Instant,
        epoll: &Epoll,
        path: &mut DataPath,
        step: Step,
        opened: Opened,
    ) -> Result<(), String> {
        if let Step::RemoveVm(name) = &step {
            path.ports.find(name).into_iter().for_each(|id| self.survey.census.forget(id));
        }
        let gone = path.take_step(now, epoll, step, opened)?;
        gone.into_iter().for_each(|client| self.report(Report::End(client)));
        Ok(())
    }

    /// Reports VMs' links and listeners that have changed.
    fn report_vms(&mut self, now: Instant, path: &mut DataPath) {
        for (vm, (is_up, listeners)) in std::mem::take(&mut path.links) {
            self.report(Report::Link { vm, is_up, listeners });
        }
        for port in path.toe.take_bulletins(now) {
            let vm = path.ports.of(port).name.clone();
            if !vm.is_empty() {
                self.report(Report::Listeners(vm, path.toe.listeners_of(port)));
            }
        }
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
            Token::Mail => self.handle_orders(now, epoll, path),
            token => unreachable!("not the desk's: {token:?}"),
        }
    }

    /// A turn is over: watchers get their frames, and a stop may be done.
    fn after_turn(&mut self, now: Instant, epoll: &Epoll, path: &mut DataPath) {
        self.feed_watchers(path);
        for (name, index) in std::mem::take(&mut path.ports.lost) {
            self.report(Report::Lost(name, index));
        }
        if self.survey.goes_on() {
            self.go_on_surveying(now, path);
        }
        self.go_on_stepping(now, epoll, path);
        self.report_vms(now, path);
        self.look_whether_done(now, path);
    }

    /// When it has something to do by itself.
    fn poll_timeout(&self) -> Option<Instant> {
        let stop = self.stop.as_ref().map(|stop| stop.look_at);
        let goes_on = self.survey.goes_on() || self.stepping.is_some();
        let counts = goes_on.then_some(Instant::ZERO);
        [stop, counts].into_iter().flatten().min()
    }
}
