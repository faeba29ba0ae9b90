//! The daemon's main thread: the worker, and the desk between two of its turns.

use std::io;
use std::os::fd::OwnedFd;

use nightporter_core::engine::{AddPortError, Engine};
use nightporter_core::port::{PortConfig, PortId};

use crate::change::{Prepared, Running};
use crate::control::{self, Control, ControlServer, Interfaces};
use crate::desk::Desk;
use crate::port::Port;
use crate::timer::monotonic_now;
use crate::toe::Doors;
use crate::worker::steps::Step;
use crate::worker::{Worker, WorkerConfig};

/// See the module doc.
#[derive(Debug)]
pub struct Daemon {
    pub(crate) worker: Worker,
    pub(crate) desk: Desk,
    /// It ends after the desk, which has the worker's end of its mail.
    control: Option<control::ControlThread>,
}

impl Daemon {
    /// A daemon without ports. Errors: the system has no epoll or no timer for it.
    pub fn new(config: &WorkerConfig, engine: Engine<'static>) -> io::Result<Self> {
        let worker = Worker::new(config, engine)?;
        Ok(Self { worker, desk: Desk::new(), control: None })
    }

    /// Serves operators from now on, in turns of the control that it returns. For tests. Errors:
    /// the system's.
    pub fn set_control(&mut self, operators: ControlServer) -> io::Result<Control> {
        let (control, mail) =
            Control::new(control::Endpoints { operators: Some(operators), ..Default::default() })?;
        self.desk.set_mail(&self.worker.epoll, mail)?;
        Ok(control)
    }

    /// Serves everybody who has to do with it from now on, on a thread of its own. Errors: the
    /// system's.
    pub(crate) fn start_control(&mut self, endpoints: control::Endpoints) -> io::Result<()> {
        let (control, mail) = Control::new(endpoints)?;
        self.control = Some(control.start(&mail)?);
        self.desk.set_mail(&self.worker.epoll, mail)
    }

    /// Adds a port; its number. Errors: see [`AddPortError`]. For tests and benches.
    pub fn add_port(&mut self, port: Port, config: PortConfig) -> Result<PortId, AddPortError> {
        self.worker.path.add_port(monotonic_now(), &self.worker.epoll, port, config)
    }

    /// Takes all steps of the change that the start is. The configuration that runs then, and the
    /// steps that failed.
    pub(crate) fn begin(
        &mut self,
        first: Prepared,
        interfaces: &mut Interfaces,
    ) -> (Running, Vec<(Step, String)>) {
        let Worker { path, epoll, .. } = &mut self.worker;
        self.desk.begin(monotonic_now(), epoll, path, first, interfaces)
    }

    /// There is a way to guests' sockets on other hosts. Errors: the system's.
    pub(crate) fn open_doors(&mut self, doors: Doors) -> io::Result<()> {
        self.worker.path.open_doors(&self.worker.epoll, doors)
    }

    /// A booster may connect at this socket. Errors: the system's.
    pub(crate) fn set_booster(&mut self, listener: OwnedFd, rt_priority: u8) -> io::Result<()> {
        self.worker.path.booster.set_listener(&self.worker.epoll, listener, rt_priority)
    }

    /// Looks for promises that a predecessor left in the arena; call after all ports were added.
    pub(crate) fn handle_restart(&mut self) {
        let reset = self.worker.path.engine.handle_restart(monotonic_now());
        if reset > 0 {
            tracing::warn!(reset, "connections lost bytes in the restart and were reset");
        }
    }

    /// Works until it is told to stop.
    pub(crate) fn run(&mut self) -> io::Result<()> {
        while !self.desk.is_stopped() {
            self.turn()?;
            if self.desk.has_lost_control() {
                return Err(io::Error::other("the control thread has ended"));
            }
        }
        Ok(())
    }

    /// One turn of the worker, and the desk.
    pub fn turn(&mut self) -> io::Result<()> {
        self.worker.turn(&mut self.desk, true)
    }

    /// One turn that never sleeps, for callers that bring the work themselves.
    pub fn turn_at_once(&mut self) -> io::Result<()> {
        self.worker.turn(&mut self.desk, false)
    }

    /// Connections with a byte, FIN or RST that is still owed.
    pub(crate) fn owed(&self) -> u32 {
        self.worker.path.owed()
    }
}
