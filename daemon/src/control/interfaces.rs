//! The uplinks and overlays as control knows them: it looks whether their interfaces are all there
//! and get frames anywhere, opens again what is missing or has gone, gets large buffers for
//! overlays, and puts uplinks back into bridges from which they were taken.
//!
//! It tries at once when an interface changes, and then once a second, one port in a turn: to open
//! one waits for the broker or the kernel's lock of the network configuration. An uplink is put
//! back into its bridge less often, so that two programs that both put it somewhere do not fight
//! all the time. To keep an uplink out of its bridge, an operator removes `bridge` from the
//! configuration.

use std::collections::BTreeMap;

use nightporter_api::PortStatus;
use nightporter_core::time::{Duration, Instant};
use nix::errno::Errno;
use nix::net::if_::if_nametoindex;

use super::Control;
use super::links::LinkWatch;
use crate::config::{OverlayConfig, UplinkConfig};
use crate::port::build::Openings;
use crate::port::overlay::OverlaySockets;
use crate::port::{Port, Wanted};
use crate::timer::monotonic_now;
use crate::watchdog;
use crate::worker::orders::{ControlMail, Order};

/// Between two tries.
const RETRY: Duration = Duration::from_secs(1);
/// Between the times that an uplink is put back into its bridge.
const JOIN_INTERVAL: Duration = Duration::from_secs(10);

/// See the module doc.
#[derive(Debug, Default)]
pub(crate) struct Interfaces {
    /// `None`: nobody notices when one changes.
    pub(super) links: Option<LinkWatch>,
    /// `None`: nothing is opened again.
    openings: Option<Openings>,
    /// In the order in which they came.
    ports: Vec<Interface>,
}

/// An uplink or overlay.
#[derive(Debug)]
struct Interface {
    wanted: Wanted,
    state: State,
    /// The name of its interface, when it was opened.
    ifname: Option<String>,
    trouble: Option<Trouble>,
    /// When it may be tried again.
    not_before: Instant,
}

#[derive(Debug)]
enum State {
    /// It is not there, and why.
    Lost(String),
    /// The number of its interface, or of the VM's tap.
    Uplink(u32),
    /// Its sockets, and whether another attempt may give them larger buffers.
    Overlay(OverlaySockets, bool),
}

/// The fault of an uplink or overlay.
#[derive(Clone, Debug, Eq, PartialEq)]
struct Trouble {
    what: String,
    /// Its frames get nowhere; else they get too far.
    is_down: bool,
}

/// An attempt.
enum Task {
    /// It is missing.
    Open(Wanted),
    /// It is in no bridge, and should be in one.
    Join(UplinkConfig),
    Enlarge(OverlaySockets),
}

impl State {
    /// `None`: the port is a VM's.
    fn of(port: &Port) -> Option<(Wanted, Self)> {
        let state = match port {
            Port::Overlay(overlay) => Self::Overlay(overlay.sockets(), overlay.has_small_buffers),
            Port::Lost(lost) => Self::Lost(lost.why.clone()),
            _ => Self::Uplink(port.index()?),
        };
        Some((port.wanted()?, state))
    }
}

impl Interface {
    /// It is lost, if it is an open uplink whose interface's name and number are not those of one
    /// that `is_there`; its name.
    fn lose_unless(&mut self, is_there: impl Fn(&str, u32) -> bool) -> Option<String> {
        let State::Uplink(index) = &self.state else { return None };
        let ifname = self.ifname.as_deref()?;
        let gone = (!is_there(ifname, *index)).then(|| State::Lost(format!("{ifname} is gone")));
        self.state = gone?;
        Some(self.wanted.name().to_owned())
    }
}

impl Interfaces {
    pub(crate) fn new(links: Option<LinkWatch>, openings: Openings) -> Self {
        Self { links, openings: Some(openings), ports: Vec::new() }
    }

    /// The worker gets this port.
    pub(crate) fn add(&mut self, port: &Port) {
        let Some((wanted, state)) = State::of(port) else { return };
        let why = if let State::Lost(why) = &state { Some(why.clone()) } else { None };
        let trouble = why.map(|what| Trouble { what, is_down: true });
        let ifname = port.ifname();
        self.ports.push(Interface { wanted, state, ifname, trouble, not_before: Instant::ZERO });
    }

    /// The port with this name goes; the number of its tap, if it is attached.
    pub(crate) fn remove(&mut self, name: &str) -> Option<u32> {
        let at = self.ports.iter().position(|at| at.wanted.name() == name)?;
        match self.ports.remove(at) {
            Interface { wanted: Wanted::Attached(_), state: State::Uplink(index), .. } => {
                Some(index)
            }
            _ => None,
        }
    }

    /// The port of an attached tap has gone.
    pub(super) fn detach(&self, index: u32) {
        self.openings.iter().for_each(|it| it.broker.detach(index));
    }

    /// Whether the overlay with this name is open.
    pub(super) fn is_open(&self, name: &str) -> bool {
        let is_open = |at: &Interface| matches!(at.state, State::Overlay(..));
        self.ports.iter().any(|at| at.wanted.name() == name && is_open(at))
    }

    /// Another policy for an overlay.
    pub(super) fn set(&mut self, overlay: &OverlayConfig) {
        let ports = self.ports.iter_mut().filter(|at| at.wanted.name() == overlay.name);
        ports.for_each(|at| at.wanted = Wanted::Overlay(overlay.clone()));
    }

    /// The interface of an uplink has gone, as its descriptor said, unless it was opened again; or
    /// the worker could not take a port that was opened again, the only loss of an overlay.
    pub(super) fn lose(&mut self, name: &str, index: u32) {
        for at in self.ports.iter_mut().filter(|at| at.wanted.name() == name) {
            if let State::Overlay(..) = at.state {
                at.state = State::Lost("the worker cannot wait for its frames".into());
            }
            at.lose_unless(|_, now| now != index);
        }
    }

    /// The uplinks whose interface is another one by now, or none: the descriptor of a macvtap
    /// outlives its link and does not show it. An attached tap may get another name meanwhile.
    fn take_gone(&mut self) -> Vec<String> {
        let links = self.links.as_ref();
        // Without descriptors it cannot be asked, which says nothing of the interface.
        let is_called = |ifname: &str, index| match if_nametoindex(ifname) {
            Ok(now) => now == index,
            Err(Errno::ENODEV | Errno::ENXIO) => false,
            Err(_) => true,
        };
        let gone = self.ports.iter_mut().filter_map(|at| {
            let is_attached = matches!(at.wanted, Wanted::Attached(_));
            let is_known = |index| is_attached && links.is_some_and(|links| links.has(index));
            at.lose_unless(|ifname, index| is_called(ifname, index) || is_known(index))
        });
        gone.collect()
    }

    /// Notes faults, and logs changes.
    fn judge(&mut self) {
        let Some(links) = &self.links else { return };
        let mut bridges: BTreeMap<u32, String> = BTreeMap::new();
        for at in &mut self.ports {
            let name = at.wanted.name();
            let (trouble, bridge) = match (&at.wanted, &at.state) {
                (Wanted::Uplink(config), State::Uplink(index)) => links.judge(config, *index),
                (Wanted::Attached(_), State::Uplink(index)) => (links.judge_tap(*index), 0),
                (_, State::Lost(why)) => (Some(why.clone()), 0),
                _ => (None, 0),
            };
            let twin = (bridge != 0).then(|| bridges.insert(bridge, name.to_owned())).flatten();
            let down = trouble.map(|what| Trouble { what, is_down: true });
            let trouble = down.or_else(|| {
                let what = format!("in the same bridge as {}: frames loop", twin?);
                Some(Trouble { what, is_down: false })
            });
            if at.trouble != trouble {
                match &trouble {
                    Some(trouble) => tracing::warn!(port = %name, "{}", trouble.what),
                    None => tracing::info!(port = %name, "the port works again"),
                }
                at.trouble = trouble;
            }
        }
    }

    /// Their lines in a status.
    pub(super) fn complete(&self, ports: &mut [PortStatus]) {
        for port in ports {
            let at = self.ports.iter().find(|at| at.wanted.name() == port.name);
            if let Some(trouble) = at.and_then(|at| at.trouble.as_ref()) {
                port.link &= !trouble.is_down;
                port.trouble = Some(trouble.what.clone());
            }
        }
    }

    /// The attempt that a port wants.
    fn task(&self, at: &Interface) -> Option<Task> {
        self.openings.as_ref()?;
        match (&at.wanted, &at.state) {
            (wanted, State::Lost(_)) => Some(Task::Open(wanted.clone())),
            (Wanted::Uplink(config), State::Uplink(index)) => {
                let is_outside = self.links.as_ref()?.is_outside(config, *index);
                is_outside.then(|| Task::Join(config.clone()))
            }
            (_, State::Overlay(sockets, true)) => Some(Task::Enlarge(sockets.clone())),
            _ => None,
        }
    }

    /// When the next of them may be tried.
    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        let wants = self.ports.iter().filter(|at| self.task(at).is_some());
        wants.map(|at| at.not_before).min()
    }

    /// Makes the attempt that is due, if the broker can read its file, for which it would wait.
    /// Returns the name of a port that was opened.
    fn try_one(&mut self, now: Instant, can_read: bool, mail: &mut ControlMail) -> Option<String> {
        let mut due = (0..).zip(&self.ports).filter(|(_, at)| at.not_before <= now);
        let found: Option<(usize, _)> = due.find_map(|(n, at)| Some((n, self.task(at)?)));
        let ((n, task), openings) = found.zip(self.openings.as_ref())?;
        watchdog::handle_control(Some(monotonic_now()));
        let at = &mut self.ports[n];
        let name = at.wanted.name().to_owned();
        let (mut wait, mut opened) = (RETRY, None);
        match task {
            _ if !can_read => {}
            Task::Open(wanted) => match openings.open(&wanted) {
                Ok(port) => {
                    at.trouble = None;
                    at.ifname = port.ifname();
                    if let Some((_, state)) = State::of(&port) {
                        at.state = state;
                    }
                    mail.order(Order::Regain(name.clone(), Box::new(port)));
                    opened = Some(name);
                }
                Err(failure) => at.state = State::Lost(failure.what),
            },
            Task::Enlarge(sockets) => {
                let small = openings.enlarge(&name, &sockets, true);
                at.state = State::Overlay(sockets, small);
            }
            Task::Join(config) => match openings.broker.join(&config) {
                Ok(()) => {
                    let (bridge, ifname) = (config.bridge.unwrap_or_default(), config.ifname);
                    tracing::warn!(uplink = %name, "{ifname} was put back into {bridge}");
                    wait = JOIN_INTERVAL;
                }
                Err(error) => tracing::debug!(uplink = %name, %error, "not put into its bridge"),
            },
        }
        at.not_before = monotonic_now() + wait;
        opened
    }
}

impl Control {
    /// Some interface changed: looks whether ours are all there.
    pub(super) fn handle_links(&mut self) {
        let Some(links) = &mut self.interfaces.links else { return };
        links.read();
        self.bridges.note_change();
        let gone = self.interfaces.take_gone();
        gone.into_iter().for_each(|name| self.mail.order(Order::Lose(name)));
        self.interfaces.judge();
    }

    /// Tries one of the missing uplinks and overlays that may be tried by now.
    pub(super) fn reopen(&mut self, now: Instant) {
        if self.interfaces.poll_timeout().is_some_and(|at| at <= now) {
            let can_read = self.changes.can_read();
            if let Some(name) = self.interfaces.try_one(now, can_read, &mut self.mail) {
                self.directory.iter_mut().for_each(|it| it.forget_overlay(&name));
                self.tell_registry(now);
            }
            self.handle_links();
        }
    }
}
