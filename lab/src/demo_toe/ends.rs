//! Sender and receiver: a program in a guest, or a thread on a host.

use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use nightporter_guest::peer::{Answer, Ask, Peer};

use super::driver::Driver;
use crate::host::Remote;
use crate::peer::Sockets;
use crate::process::CpuUse;
use crate::vmm::Guest;

/// One end of a connection.
pub(super) trait End {
    /// Asks; the answer is waited for later.
    fn tell(&mut self, ask: Ask) -> Result<()>;

    /// Waits for the answer.
    fn hear(&mut self) -> Result<Answer>;

    /// Its core time so far.
    fn cpu(&self) -> Result<Duration>;

    /// Asks, and waits.
    fn ask(&mut self, ask: Ask) -> Result<Answer> {
        self.tell(ask)?;
        self.hear()
    }
}

/// A program in a guest.
pub(super) struct InGuest<'a> {
    pub(super) guest: &'a mut Guest,
    pub(super) sockets: Sockets,
}

impl End for InGuest<'_> {
    fn tell(&mut self, ask: Ask) -> Result<()> {
        self.guest.tell_peer(self.sockets, ask)
    }

    fn hear(&mut self) -> Result<Answer> {
        self.guest.hear_peer()
    }

    /// Of all of its VMM.
    fn cpu(&self) -> Result<Duration> {
        let (vcpu, others) = self.guest.cpu_use()?;
        Ok(vcpu.time + others.time)
    }
}

/// A thread of the lab, of a host or of none. It ends with this.
#[derive(Debug)]
pub(super) struct InThread {
    asks: Sender<Ask>,
    told: Receiver<Answer>,
    thread: i32,
}

impl InThread {
    /// On a host, with its sockets.
    pub(super) fn on(host: &Remote) -> Result<Self> {
        let (mut peer, host) = (Peer::default(), host.clone());
        Self::start(move || host.move_in(), move |ask| peer.obey(ask))
    }

    /// A driver of a socket device, which is behind this socket.
    pub(super) fn driving(socket: &Path) -> Result<Self> {
        let mut driver = Driver::start(socket)?;
        Self::start(|| {}, move |ask| driver.obey(ask))
    }

    fn start(
        begin: impl FnOnce() + Send + 'static,
        mut obey: impl FnMut(Ask) -> Answer + Send + 'static,
    ) -> Result<Self> {
        let (asks, asked) = channel();
        let (tells, told) = channel();
        let (name, named) = channel();
        thread::spawn(move || {
            begin();
            let begun = name.send(nix::unistd::gettid().as_raw());
            while let (Ok(()), Ok(ask)) = (begun, asked.recv()) {
                if tells.send(obey(ask)).is_err() {
                    break;
                }
            }
        });
        Ok(Self { asks, told, thread: named.recv().context("a thread of the lab")? })
    }
}

impl End for InThread {
    fn tell(&mut self, ask: Ask) -> Result<()> {
        self.asks.send(ask).context("a thread of the lab has ended")
    }

    fn hear(&mut self) -> Result<Answer> {
        self.told.recv().context("a thread of the lab has ended")
    }

    fn cpu(&self) -> Result<Duration> {
        Ok(CpuUse::of_thread(self.thread)?.time)
    }
}
