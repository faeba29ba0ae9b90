//! What the worker does for vhost-user ports: their descriptors, their links, their kicks.

use nightporter_core::wire::virtio_net::VirtioNetHdr;

use super::*;
use crate::port::vhost_user::VhostUserPort;
use crate::vhost::{Event, Source};

/// EtherType of a reverse ARP (RFC 903).
const ETHERTYPE_RARP: [u8; 2] = [0x80, 0x35];

impl Worker {
    /// Something happened on a descriptor of a vhost-user port.
    pub(super) fn handle_guest(&mut self, now: Instant, slot: SlotId, source: Source) {
        let at = &mut self.slots.list[slot];
        let Port::Guest(guest) = &mut at.port else { return };
        match source {
            Source::Listener => guest.port.handle_listener(),
            Source::Connection => guest.port.handle_connection(),
            Source::Kick(vring) => {
                guest.port.handle_kick(vring);
                at.wake();
                // A kick is evidence that the guest runs, even if the ring did not move.
                self.engine.handle_guest_progress(now, at.id, false);
            }
        }
        self.handle_guest_events(now, slot);
    }

    /// Obeys what a vhost-user port reports.
    pub(super) fn handle_guest_events(&mut self, now: Instant, slot: SlotId) {
        loop {
            let at = &mut self.slots.list[slot];
            let Port::Guest(guest) = &mut at.port else { return };
            let Some(event) = guest.port.poll_event() else { return };
            match event {
                Event::Watch(source) => watch(&self.epoll, &guest.port, slot, source),
                Event::Unwatch(fd) => {
                    // ENOENT: it was replaced before we came to watch it.
                    let _ = self.epoll.delete(&fd);
                }
                Event::Link(features) => {
                    tracing::info!(vm = %at.name, up = features.is_some(), "link");
                    at.features = features;
                    if features.is_none() {
                        at.link_down();
                    }
                    self.engine.set_port_features(now, at.id, features);
                }
                Event::RingStarted(_) => at.wake(),
                Event::Connected | Event::RingStopped(_) | Event::RingBroken { .. } => {}
                // With the front-end goes the guest's memory: whoever connects next has just been
                // started (LIFE-05).
                Event::Disconnected(_) => self.engine.handle_guest_gone(now, at.id),
                Event::Rarp(mac) => self.announce(now, slot, mac),
            }
        }
    }

    /// Broadcasts a reverse ARP from `mac`, which teaches switches where a migrated guest is now.
    fn announce(&mut self, now: Instant, slot: SlotId, mac: [u8; 6]) {
        let mut frame = [0; 60];
        frame[..6].fill(0xff);
        frame[6..12].copy_from_slice(&mac);
        frame[12..14].copy_from_slice(&ETHERTYPE_RARP);
        frame[14..22].copy_from_slice(&[0, 1, 8, 0, 6, 4, 0, 3]);
        frame[22..28].copy_from_slice(&mac);
        frame[32..38].copy_from_slice(&mac);
        self.frame[..frame.len()].copy_from_slice(&frame);
        self.forward(now, slot, VirtioNetHdr::default(), frame.len());
    }
}

/// Waits for `source` of the port in `slot`.
fn watch(epoll: &Epoll, port: &VhostUserPort, slot: SlotId, source: Source) {
    let Some(fd) = port.fd(source) else { return };
    let slot = u16::try_from(slot).expect("add_port checked it");
    match epoll.add(fd, EpollEvent::new(EpollFlags::EPOLLIN, Token::Guest(slot, source).pack())) {
        // EEXIST: named twice before we came to watch it.
        Ok(()) | Err(Errno::EEXIST) => {}
        Err(error) => tracing::error!(?source, %error, "cannot wait for a descriptor"),
    }
}
