//! The sockets' worker's events: descriptors of devices and their front-ends, of streams to other
//! hosts, and VMMs that take memory away or keep the worker waiting.

use std::io;

use nightporter_core::port::PortId;
use nightporter_core::time::Instant;

use super::fabric::Doors;
use super::orders::Report;
use super::worker::SocketsWorker;
use crate::port::front_end::{FRONT_ENDS_PER_TURN, hear, watch};
use crate::port::vhost_user::bans;
use crate::token::{Token, watch_for};
use crate::vhost::{Event, Source};
use crate::{faults, sleeps, spare};

impl SocketsWorker {
    /// Something happened on a descriptor of a device.
    pub(super) fn handle_device(&mut self, now: Instant, port: PortId, source: Source) {
        let Source::Kick(vring) = source else {
            let token = Token::Toe(port.0, source);
            if !self.front_ends.contains(&token) {
                self.front_ends.push_back(token);
            }
            return;
        };
        if let Some(device) = self.toe.port_mut(port) {
            device.handle_kick(vring);
            self.toe.wake(port);
            self.handle_device_events(now, port);
        }
    }

    /// Handles VMMs with messages in the order of their arrival, because the kernel names the same
    /// ones first each time if all of them fit into one answer.
    pub(super) fn hear_front_ends(&mut self, now: Instant) {
        for _ in 0..FRONT_ENDS_PER_TURN.min(self.front_ends.len()) {
            let Some(Token::Toe(port, source)) = self.front_ends.pop_front() else { return };
            let port = PortId(port);
            if let Some(device) = self.toe.port_mut(port) {
                hear(device, source);
                self.handle_device_events(now, port);
            }
        }
    }

    /// Obeys the reports of a device.
    pub(super) fn handle_device_events(&mut self, now: Instant, port: PortId) {
        while let Some(device) = self.toe.port_mut(port)
            && let Some(event) = device.poll_event()
        {
            match event {
                Event::Watch(source) => {
                    watch(&self.epoll, device, source, Token::Toe(port.0, source));
                }
                Event::Rest(source) => {
                    // ENOENT: it was not watched, because it does not exist yet.
                    let _ = device.fd(source).map(|fd| self.epoll.delete(fd));
                    self.resting.add(now, Token::Toe(port.0, source));
                }
                Event::Poll => self.polled.add(now, Token::Toe(port.0, Source::Connection)),
                Event::Unwatch(fd) => {
                    // ENOENT: it was replaced before we came to watch it.
                    let _ = self.epoll.delete(&fd);
                }
                Event::Link(None) => {
                    self.toe.lose(now, port);
                    self.report_listeners(port, false);
                }
                Event::Link(Some(_)) | Event::RingBroken { .. } => {
                    self.toe.look_at_link(now, port);
                    self.report_listeners(port, false);
                }
                Event::RingStarted(_) => self.toe.wake(port),
                Event::Connected
                | Event::Disconnected(_)
                | Event::RingStopped(_)
                | Event::Rarp(_)
                | Event::Logs(_)
                | Event::Leaving => {}
            }
        }
    }

    /// The VM is about to lose its device: hangs up, and begins to end its sockets.
    pub(super) fn prepare_removal(&mut self, now: Instant, port: PortId) {
        self.toe.prepare_removal(port);
        if let Some(device) = self.toe.port_mut(port) {
            device.close();
        }
        self.handle_device_events(now, port);
    }

    /// The VM has no device from now on, if it had one: its sockets end.
    pub(super) fn remove(&mut self, now: Instant, port: PortId) {
        let Some(device) = self.toe.port_mut(port) else { return };
        device.close();
        self.handle_device_events(now, port);
        self.toe.remove(now, port);
        let is_its = |token: &Token| matches!(token, Token::Toe(of, _) if *of == port.0);
        self.resting.forget(is_its);
        self.polled.forget(is_its);
        self.front_ends.retain(|token| !is_its(token));
    }

    /// There is a way to other hosts.
    pub(super) fn open_doors(&mut self, doors: Doors) -> io::Result<()> {
        self.toe.open_doors(doors)?;
        let Self { toe, epoll, .. } = self;
        toe.trust_fd().map_or(Ok(()), |fd| watch_for(epoll, &fd, Token::Trust))?;
        toe.ucx_fd().map_or(Ok(()), |fd| watch_for(epoll, &fd, Token::Ucx))?;
        toe.dialer_fd().map_or(Ok(()), |fd| watch_for(epoll, &fd, Token::Dialer))?;
        for listener in 0..self.toe.listeners().count() {
            self.watch_listener(u16::try_from(listener).expect("one for each overlay"))?;
        }
        Ok(())
    }

    fn watch_listener(&self, listener: u16) -> io::Result<()> {
        let fd = self.toe.listeners().nth(listener.into());
        fd.map_or(Ok(()), |fd| watch_for(&self.epoll, &fd, Token::StreamListener(listener)))
    }

    /// Another host connects.
    pub(super) fn accept_stream(&mut self, now: Instant, listener: u16) {
        let Some(_shared) = spare::try_share() else { return };
        if let Err(error) = self.toe.accept(now, &self.epoll, listener) {
            tracing::warn!(%error, "cannot accept connections of other hosts; again in a second");
            let _ = self.toe.listeners().nth(listener.into()).map(|fd| self.epoll.delete(fd));
            self.resting.add(now, Token::StreamListener(listener));
        }
    }

    /// Connections to other hosts have begun, or nobody makes any more.
    pub(super) fn take_dialed(&mut self, now: Instant) {
        let Some(_shared) = spare::try_share() else { return };
        if !self.toe.take_dialed(now, &self.epoll) {
            tracing::error!(
                "the process that connects to other hosts has ended: sockets go to guests of this \
                 host alone\n    fix: restart nightporterd"
            );
        }
    }

    /// Sources that have rested are waited for again.
    pub(super) fn wake_resting(&mut self, now: Instant) {
        for token in self.resting.take_due(now) {
            if let Token::Toe(port, source) = token
                && let Some(device) = self.toe.port_mut(PortId(port))
            {
                device.go_on(source);
                self.handle_device_events(now, PortId(port));
            } else if let Token::StreamListener(listener) = token
                && let Err(error) = self.watch_listener(listener)
            {
                // Without memory for that nobody connects until the daemon is started again.
                tracing::error!(%error, "cannot wait for other hosts' connections");
            }
        }
    }

    /// Polls queues without notifications, when it is time.
    pub(super) fn look_at_polled(&mut self, now: Instant) {
        let Self { polled, toe, .. } = self;
        polled.keep_due(now, |token| {
            let Token::Toe(port, _) = *token else { return false };
            toe.wake(PortId(port));
            toe.port_mut(PortId(port)).is_some_and(|device| device.is_polled())
        });
    }

    /// Takes down devices whose front-ends took memory away or kept a worker waiting, if there was
    /// one since last time.
    pub(super) fn handle_faults(&mut self, now: Instant) {
        let count = faults::count();
        if std::mem::replace(&mut self.faults_seen, count) == count {
            return;
        }
        let (before, ports) = (bans(), self.toe.ports());
        for slept in sleeps::take() {
            // It may have been removed meanwhile.
            let is_its = |port: &&PortId| {
                self.toe.port_mut(**port).is_some_and(|device| device.account() == slept.vm)
            };
            if let Some(port) = ports.iter().find(is_its)
                && let Some(device) = self.toe.port_mut(*port)
            {
                device.handle_sleep(now, slept.time);
            }
        }
        for port in ports {
            if let Some(device) = self.toe.port_mut(port) {
                device.handle_faults();
                self.handle_device_events(now, port);
            }
        }
        if bans() != before {
            self.mail.report(Report::Look);
        }
    }
}
