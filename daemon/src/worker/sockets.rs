//! The data path's work for socket devices (their descriptors, drivers and kicks), and for streams
//! to other hosts.

use std::io;

use nightporter_core::engine::Direction;
use nightporter_core::port::PortId;
use nightporter_core::time::Instant;
use nix::sys::epoll::Epoll;

use super::data_path::DataPath;
use super::guests::watch;
use crate::port::vhost_user::VhostUserPort;
use crate::toe::{Doors, Member};
use crate::token::{Token, watch_for};
use crate::vhost::vsock::Vsock;
use crate::vhost::{Event, Source};

impl DataPath {
    /// The VM behind a port has a socket device from now on.
    pub(super) fn add_toe(
        &mut self,
        now: Instant,
        epoll: &Epoll,
        port: PortId,
        mut device: VhostUserPort<Vsock>,
        member: Member,
    ) {
        if let Some(guest) = self.ports.guest_mut(port) {
            device.belongs_to(&guest.port);
        }
        self.toe.add(port, device, member);
        for way in [Direction::FromGuest, Direction::ToGuest] {
            self.toe.set_rate_limit(now, port, way, self.engine.rate_limit(port, way));
        }
        self.handle_toe_events(now, epoll, port);
    }

    /// And none from now on, if it had one: its sockets end.
    pub(super) fn remove_toe(&mut self, now: Instant, epoll: &Epoll, port: PortId) {
        if let Some(device) = self.toe.port_mut(port) {
            device.close();
            self.handle_toe_events(now, epoll, port);
            self.toe.remove(now, port);
            self.forget_sources(|token| matches!(token, Token::Toe(of, _) if *of == port.0));
        }
    }

    /// Something happened on a descriptor of a socket device.
    pub(super) fn handle_toe(&mut self, now: Instant, epoll: &Epoll, port: PortId, source: Source) {
        let Source::Kick(vring) = source else {
            return self.note_front_end(Token::Toe(port.0, source));
        };
        if let Some(device) = self.toe.port_mut(port) {
            device.handle_kick(vring);
            self.toe.wake(port);
            self.handle_toe_events(now, epoll, port);
        }
    }

    /// There is a way to other hosts.
    pub(super) fn open_doors(&mut self, epoll: &Epoll, doors: Doors) -> io::Result<()> {
        self.toe.open_doors(doors)?;
        self.toe.trust_fd().map_or(Ok(()), |fd| watch_for(epoll, &fd, Token::Trust))?;
        self.toe.ucx_fd().map_or(Ok(()), |fd| watch_for(epoll, &fd, Token::Ucx))?;
        for listener in 0..self.toe.listeners().count() {
            self.watch_listener(epoll, u16::try_from(listener).expect("one for each overlay"))?;
        }
        self.toe.dialer_fd().map_or(Ok(()), |fd| watch_for(epoll, &fd, Token::Dialer))
    }

    fn watch_listener(&self, epoll: &Epoll, listener: u16) -> io::Result<()> {
        let fd = self.toe.listeners().nth(listener.into());
        fd.map_or(Ok(()), |fd| watch_for(epoll, &fd, Token::StreamListener(listener)))
    }

    /// Another host connects.
    pub(super) fn accept_stream(&mut self, now: Instant, epoll: &Epoll, listener: u16) {
        if let Err(error) = self.toe.accept(now, epoll, listener) {
            tracing::warn!(%error, "cannot accept connections of other hosts; again in a second");
            let _ = self.toe.listeners().nth(listener.into()).map(|fd| epoll.delete(fd));
            self.resting.add(now, Token::StreamListener(listener));
        }
    }

    /// A listener has rested.
    pub(super) fn wake_listener(&self, epoll: &Epoll, listener: u16) {
        // Without memory for that nobody connects any more, until the daemon is started again.
        if let Err(error) = self.watch_listener(epoll, listener) {
            tracing::error!(%error, "cannot wait for other hosts' connections");
        }
    }

    /// Connections to other hosts have begun, or nobody makes any more.
    pub(super) fn take_dialed(&mut self, now: Instant, epoll: &Epoll) {
        if !self.toe.take_dialed(now, epoll) {
            tracing::error!(
                "the process that connects to other hosts has ended: sockets go to guests of this \
                 host alone\n    fix: restart nightporterd"
            );
        }
    }

    /// Obeys what a socket device reports.
    pub(super) fn handle_toe_events(&mut self, now: Instant, epoll: &Epoll, port: PortId) {
        while let Some(device) = self.toe.port_mut(port)
            && let Some(event) = device.poll_event()
        {
            match event {
                Event::Watch(source) => {
                    watch(epoll, device, source, Token::Toe(port.0, source));
                }
                Event::Rest(source) => {
                    // ENOENT: it was not watched, because it does not exist yet.
                    let _ = device.fd(source).map(|fd| epoll.delete(fd));
                    self.resting.add(now, Token::Toe(port.0, source));
                }
                Event::Poll => self.polled.add(now, Token::Toe(port.0, Source::Connection)),
                Event::Unwatch(fd) => {
                    // ENOENT: it was replaced before we came to watch it.
                    let _ = epoll.delete(&fd);
                }
                Event::Link(None) => self.toe.lose(now, port),
                Event::Link(Some(_)) | Event::RingBroken { .. } => {
                    self.toe.look_at_link(now, port);
                }
                Event::RingStarted(_) => self.toe.wake(port),
                Event::Connected
                | Event::Disconnected(_)
                | Event::RingStopped(_)
                | Event::Rarp(_) => {}
            }
        }
    }
}
