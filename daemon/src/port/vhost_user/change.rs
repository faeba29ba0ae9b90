//! Another configuration for a port that runs.

use std::path::PathBuf;

use tracing::warn;

use super::{VhostUserConfig, VhostUserPort};
use crate::closer::Foreign;
use crate::spans;
use crate::vhost::device::Device;
use crate::vhost::features::Offer;
use crate::vhost::listener::Listener;
use crate::vhost::{Event, Source};

/// The socket of a VM that comes or moves.
#[derive(Debug)]
pub(crate) enum Socket {
    /// It is open.
    Open(Listener),
    /// A port that goes still has its path.
    Later,
    /// It could not be made, and the error was reported.
    Failed,
}

impl VhostUserPort {
    /// Applies `config`, except the socket ([`Self::move_to`]). Values that a front-end was told
    /// when it connected stay until the next one connects.
    pub fn set(&mut self, config: &VhostUserConfig) {
        let VhostUserConfig { mac, mtu, queue_pairs, .. } = *config;
        self.next_offer = Offer { mac, mtu, queue_pairs };
        if self.connection.is_none() {
            self.offer = self.next_offer;
        }
        self.set_rules(config);
    }
}

impl<D: Device> VhostUserPort<D> {
    /// Sets the users who may connect, and the memory that they may have.
    pub fn set_rules(&mut self, config: &VhostUserConfig) {
        self.access = config.access;
        self.allows_unsealed_memory = config.allow_unsealed_memory;
        self.memory_max = config.memory_max;
        self.account.owner.set_mapped_max(spans::port_max(config.memory_max));
    }

    /// Front-ends find it at another path from now on; one that is connected stays. It does not
    /// listen yet.
    pub fn move_to(&mut self, socket: PathBuf) {
        self.socket = socket;
        self.stop_listening();
    }

    /// Its socket could not be made, which was reported: it is tried again every second.
    pub fn listen_later(&mut self) {
        self.events.push_back(Event::Rest(Source::Listener));
    }

    /// Listens, or logs the error; it is tried again every second.
    pub fn listen_or_say_so(&mut self) {
        if let Err(e) = self.listen() {
            warn!(port = self.name, "the port has no socket yet, and tries again: {e}");
        }
    }

    /// Listens there, as [`Self::listen`] would.
    pub fn take(&mut self, listener: Listener) {
        self.listener = Some(listener);
        self.events.push_back(Event::Watch(Source::Listener));
    }

    /// The port listens, if its path is free by now; otherwise it tries again.
    pub(crate) fn listen_by(&mut self, socket: Socket) {
        match socket {
            Socket::Open(listener) => self.take(listener),
            Socket::Later => self.listen_or_say_so(),
            Socket::Failed => self.listen_later(),
        }
    }

    /// The port goes: its socket disappears, and its front-end is disconnected.
    pub fn close(&mut self) {
        self.stop_listening();
        self.disconnect("the VM was removed");
        self.keeping.end();
    }

    /// Front-ends that wait there may have passed any descriptors: these are closed where they
    /// block nothing.
    fn stop_listening(&mut self) {
        if let Some(listener) = self.listener.take() {
            let fd = Foreign::of(&self.account.owner, listener.into_fd());
            self.events.push_back(Event::Unwatch(fd));
        }
    }
}
