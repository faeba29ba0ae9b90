//! Another configuration for a port that runs.

use std::path::PathBuf;

use tracing::warn;

use super::{VhostUserConfig, VhostUserPort};
use crate::closer::Foreign;
use crate::vhost::device::Device;
use crate::vhost::features::Offer;
use crate::vhost::listener::Listener;
use crate::vhost::{Event, Source};

impl VhostUserPort {
    /// From now on as in `config`, of which the socket is another matter ([`Self::move_to`]). What
    /// a front-end was told when it connected holds until the next one.
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
    /// Who may connect, and with what memory, from now on.
    pub fn set_rules(&mut self, config: &VhostUserConfig) {
        self.access = config.access;
        self.allows_unsealed_memory = config.allow_unsealed_memory;
    }

    /// Front-ends find it at another path from now on; one that is connected stays. Without a
    /// listener the path is taken, and tried again.
    pub fn move_to(&mut self, socket: PathBuf, listener: Option<Listener>) {
        self.socket = socket;
        self.stop_listening();
        match listener {
            Some(listener) => self.take(listener),
            None => self.listen_or_say_so(),
        }
    }

    /// Listens, or says in the log why not; it is tried again every second.
    pub fn listen_or_say_so(&mut self) {
        if let Err(e) = self.listen() {
            warn!(port = self.name, "it has no socket yet, and tries again: {e}");
        }
    }

    /// Listens there, as [`Self::listen`] would.
    pub fn take(&mut self, listener: Listener) {
        self.listener = Some(listener);
        self.events.push_back(Event::Watch(Source::Listener));
    }

    /// The port goes: nobody finds it, and who is connected is not any more.
    pub fn close(&mut self) {
        self.stop_listening();
        self.disconnect("the VM was removed");
    }

    /// Who waits there may have passed anything: it is closed where it keeps nobody.
    fn stop_listening(&mut self) {
        if let Some(listener) = self.listener.take() {
            let fd = Foreign::of(&self.account.owner, listener.into_fd());
            self.events.push_back(Event::Unwatch(fd));
        }
    }
}
