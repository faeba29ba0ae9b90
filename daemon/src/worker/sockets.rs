//! What the data path does for socket devices: their descriptors, their drivers, their kicks.

use nightporter_core::port::PortId;
use nightporter_core::time::Instant;
use nix::sys::epoll::Epoll;

use super::data_path::DataPath;
use super::guests::watch;
use crate::port::vhost_user::VhostUserPort;
use crate::toe::Member;
use crate::token::Token;
use crate::vhost::vsock::Vsock;
use crate::vhost::{Event, Source};

impl DataPath {
    /// The VM behind a port has a socket device from now on.
    pub(crate) fn add_toe(
        &mut self,
        now: Instant,
        epoll: &Epoll,
        port: PortId,
        device: VhostUserPort<Vsock>,
        member: Member,
    ) {
        self.toe.add(port, device, member);
        self.handle_toe_events(now, epoll, port);
    }

    /// And none from now on, if it had one: its sockets end.
    pub(crate) fn remove_toe(&mut self, now: Instant, epoll: &Epoll, port: PortId) {
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

    /// Obeys what a socket device reports.
    pub(crate) fn handle_toe_events(&mut self, now: Instant, epoll: &Epoll, port: PortId) {
        while let Some(device) = self.toe.port_mut(port)
            && let Some(event) = device.poll_event()
        {
            match event {
                Event::Watch(source) => {
                    watch(epoll, device.fd(source), Token::Toe(port.0, source));
                }
                Event::Rest(source) => {
                    // ENOENT: it was not watched, because it does not exist yet.
                    let _ = device.fd(source).map(|fd| epoll.delete(fd));
                    self.resting.add(now, Token::Toe(port.0, source));
                }
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
