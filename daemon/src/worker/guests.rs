//! The data path's work for vhost-user ports: their descriptors, their links, their kicks.

use nightporter_core::port::{PortConfig, PortId, Vlans};
use nightporter_core::time::{Duration, Instant};
use nightporter_core::wire::virtio_net::VirtioNetHdr;
use nightporter_core::wire::vlan;
use nix::sys::epoll::Epoll;

use super::data_path::DataPath;
use crate::closer;
use crate::faults;
use crate::port::front_end::{FRONT_ENDS_PER_TURN, hear, watch};
use crate::port::vhost_user::bans;
use crate::sleeps;
use crate::sockets::orders::Order;
use crate::token::Token;
use crate::vhost::locker::Locker;
use crate::vhost::{Event, Source};

/// EtherType of a reverse ARP (RFC 903).
const ETHERTYPE_RARP: [u8; 2] = [0x80, 0x35];

/// VLANs in which the MAC of a guest that sees their tags is announced after one turn: each is a
/// broadcast, and counts for one of the guest's.
pub(super) const ANNOUNCEMENTS_PER_TURN: usize = 8;
/// Until that guest's next ones: it earns 20 broadcasts meanwhile, so most are left to the guest,
/// and all 4,094 VLANs take a second.
const ANNOUNCEMENTS_INTERVAL: Duration = Duration::from_millis(2);

/// A VMM has announced the MAC of a guest that is in several VLANs.
#[derive(Debug)]
pub(super) struct Announcement {
    pub(super) port: PortId,
    mac: [u8; 6],
    /// Of its VLANs.
    told: usize,
    /// When the next are told.
    pub(super) next: Instant,
}

impl DataPath {
    /// Something happened on a descriptor of a vhost-user port.
    pub(super) fn handle_guest(
        &mut self,
        now: Instant,
        epoll: &Epoll,
        port: PortId,
        source: Source,
    ) {
        let Some(guest) = self.ports.guest_mut(port) else { return };
        let Source::Kick(vring) = source else {
            return self.note_front_end(Token::Guest(port.0, source));
        };
        guest.port.handle_kick(vring);
        self.turn.handle_kick(now, &mut self.engine, port);
        self.handle_guest_events(now, epoll, port);
    }

    /// Goes on with the connections of VMMs that the last daemon has left.
    pub(super) fn take_over(&mut self, now: Instant, epoll: &Epoll, lockers: Vec<Locker>) {
        for locker in lockers {
            let port = self.ports.find(locker.vm());
            match port.and_then(|port| Some((port, self.ports.guest_mut(port)?))) {
                Some((port, guest)) => {
                    guest.port.take_over(locker);
                    self.handle_guest_events(now, epoll, port);
                }
                None => {
                    tracing::info!(vm = locker.vm(), "a VMM of a VM that is configured no more");
                    closer::later(None, locker.discard());
                }
            }
        }
    }

    /// A VMM has messages.
    pub(super) fn note_front_end(&mut self, token: Token) {
        if !self.front_ends.contains(&token) {
            self.front_ends.push_back(token);
        }
    }

    /// Handles VMMs with messages in the order of their arrival, because the kernel names the same
    /// ones first each time if all of them fit into one answer.
    pub(super) fn hear_front_ends(&mut self, now: Instant, epoll: &Epoll) {
        let heard = FRONT_ENDS_PER_TURN.min(self.front_ends.len());
        for _ in 0..heard {
            // Nothing happens if it has gone meanwhile.
            match self.front_ends.pop_front() {
                Some(token @ Token::Guest(port, source)) => {
                    let port = PortId(port);
                    let ends = matches!(source, Source::Listener) && self.engine.is_ending(port);
                    if ends || self.is_leaving(port) {
                        self.front_ends.push_back(token); // after whom was there before
                        continue;
                    }
                    if let Some(guest) = self.ports.guest_mut(port) {
                        hear(&mut guest.port, source);
                        self.handle_guest_events(now, epoll, port);
                    }
                }
                _ => return,
            }
        }
    }

    /// Handles the reports of a vhost-user port.
    pub(super) fn handle_guest_events(&mut self, now: Instant, epoll: &Epoll, port: PortId) {
        while let Some(guest) = self.ports.guest_mut(port)
            && let Some(event) = guest.port.poll_event()
        {
            match event {
                Event::Watch(source) => {
                    watch(epoll, &mut guest.port, source, Token::Guest(port.0, source));
                }
                Event::Rest(source) => {
                    // ENOENT: it was not watched, because it does not exist yet.
                    let _ = guest.port.fd(source).map(|fd| epoll.delete(fd));
                    self.resting.add(now, Token::Guest(port.0, source));
                }
                Event::Poll => self.polled.add(now, Token::Guest(port.0, Source::Connection)),
                Event::Unwatch(fd) => {
                    // ENOENT: it was replaced before we came to watch it.
                    let _ = epoll.delete(&fd);
                }
                Event::Link(features) => {
                    let arrives = features.is_some() && guest.port.has_arrived();
                    if features.is_some() && guest.port.has_same_guest() {
                        self.engine.handle_guest_back(port); // LIFE-16
                    }
                    if guest.port.may_log() {
                        let vm = &self.ports.of(port).name;
                        tracing::info!(vm, up = features.is_some(), "link");
                    }
                    self.turn.set_features(now, &mut self.engine, port, features);
                    if arrives {
                        self.announce_arrival(now, port);
                    }
                    self.unshared.on_link(now, port, features.is_some());
                    let listeners = features.and_then(|_| self.sockets.listeners_of(port));
                    let name = self.ports.of(port).name.clone();
                    self.links.insert(name, (features.is_some(), listeners));
                }
                Event::Logs(migrates) => {
                    if guest.port.may_log() {
                        let vm = &self.ports.of(port).name;
                        tracing::info!(vm, migrates, "the VMM logs written pages");
                    }
                    self.engine.set_migrating(now, port, migrates);
                }
                Event::Leaving => self.begin_leaving(port),
                Event::RingStarted(_) => self.turn.wake(port),
                Event::Connected => self.booster.set_vmm(port, guest.port.vmm()),
                Event::RingStopped(_) | Event::RingBroken { .. } => {}
                // The next front-end has another guest, or goes on with this one (LIFE-16).
                Event::Disconnected(_) => {
                    self.booster.set_vmm(port, 0);
                    self.leaving.retain(|it| it.port != port);
                    self.engine.handle_guest_gone(now, port);
                }
                Event::Rarp(mac) => self.announce(now, port, mac),
            }
        }
    }

    /// Warns of guests that have posted no buffer for long.
    pub(super) fn look_for_buffers(&mut self, now: Instant) {
        let Self { unshared, ports, .. } = self;
        for port in unshared.look(now, |port| ports.of(port).port.has_seen_buffers()) {
            let vm = &ports.of(port).name;
            tracing::warn!(
                vm,
                "the driver runs, and has posted no receive buffer that the daemon sees: is the \
                 guest's interface up, and the VM's memory shared (share=on)?"
            );
        }
    }

    /// Sources that have rested are waited for again.
    pub(super) fn wake_resting(&mut self, now: Instant, epoll: &Epoll) {
        for token in self.resting.take_due(now) {
            if let Token::Guest(port, source) = token
                && let Some(guest) = self.ports.guest_mut(PortId(port))
            {
                guest.port.go_on(source);
                self.handle_guest_events(now, epoll, PortId(port));
            }
        }
    }

    /// Polls queues without notifications, when it is time.
    pub(super) fn look_at_polled(&mut self, now: Instant) {
        let Self { polled, ports, turn, .. } = self;
        polled.keep_due(now, |token| {
            let Token::Guest(port, _) = *token else { return false };
            let port = PortId(port);
            turn.wake(port);
            ports.of_mut(port).port.is_polled()
        });
    }

    /// Takes down ports whose front-ends took memory away or kept the worker waiting, if there was
    /// one since last time.
    pub(super) fn handle_faults(&mut self, now: Instant, epoll: &Epoll) {
        let count = faults::count();
        if std::mem::replace(&mut self.faults_seen, count) == count {
            return;
        }
        let before = bans();
        for slept in sleeps::take() {
            let guests = self.ports.list.iter_mut().filter_map(|at| at.port.as_guest_mut());
            let guest = guests.map(|guest| &mut guest.port).find(|it| it.account() == slept.vm);
            // It may have been removed meanwhile.
            let _ = guest.map(|guest| guest.handle_sleep(now, slept.time));
        }
        for port in (0..).map(PortId).take(self.ports.list.len()) {
            if let Some(guest) = self.ports.guest_mut(port) {
                guest.port.handle_faults();
                self.handle_guest_events(now, epoll, port);
            }
        }
        if bans() != before {
            self.sockets.order(Order::Look);
        }
    }

    /// A VM was banned by the sockets' worker: ports are looked at after this turn.
    pub(super) const fn look_again(&mut self) {
        self.faults_seen = u64::MAX;
    }

    /// A guest that ran before is here, and VMMs may leave it to it to say so.
    fn announce_arrival(&mut self, now: Instant, port: PortId) {
        let guest = self.engine.port_config(port).and_then(PortConfig::as_guest);
        if let Some(mac) = guest.and_then(|guest| guest.mac) {
            self.announce(now, port, mac);
        }
    }

    /// Broadcasts a reverse ARP from `mac`, which teaches switches where a migrated guest is now.
    pub(super) fn announce(&mut self, now: Instant, port: PortId, mac: [u8; 6]) {
        let was_elsewhere = self.engine.handle_announcement(now, port, mac);
        if let Some(guest) = self.ports.guest_mut(port)
            && was_elsewhere
            && guest.port.may_log()
        {
            let (vm, mac) = (&self.ports.of(port).name, mac.map(|b| format!("{b:02x}")).join(":"));
            tracing::info!(vm, mac, "the VMM announces a MAC that was heard elsewhere");
        }
        if self.vlans_of(port).is_some_and(|vlans| matches!(vlans, Vlans::Trunk(_))) {
            self.announcements.retain(|it| it.port != port);
            self.announcements.push_front(Announcement { port, mac, told: 0, next: now });
            return;
        }
        let vlan = self.ports.guest_mut(port).and_then(|guest| guest.vlan());
        self.announce_in(now, port, mac, vlan);
    }

    /// An announcement for a trunk is made in each of its VLANs, in some of them after each turn.
    pub(super) fn go_on_announcing(&mut self, now: Instant) {
        let Some(mut it) = self.announcements.pop_front_if(|it| it.next <= now) else { return };
        for _ in 0..ANNOUNCEMENTS_PER_TURN {
            let vlan = match self.vlans_of(it.port) {
                Some(Vlans::Trunk(list)) => list.get(it.told).copied(),
                _ => None, // it is none any more
            };
            if vlan.is_none() {
                return;
            }
            self.announce_in(now, it.port, it.mac, vlan);
            it.told += 1;
        }
        it.next = now + ANNOUNCEMENTS_INTERVAL;
        self.announcements.push_back(it);
    }

    fn vlans_of(&self, port: PortId) -> Option<&Vlans> {
        let guest = self.engine.port_config(port).and_then(PortConfig::as_guest)?;
        Some(&guest.vlans)
    }

    fn announce_in(&mut self, now: Instant, port: PortId, mac: [u8; 6], vlan: Option<u16>) {
        let (mut bytes, mut hdr) = ([0; vlan::TAG + 60], VirtioNetHdr::default());
        let frame = &mut bytes[vlan::TAG..];
        frame[..6].fill(0xff);
        frame[6..12].copy_from_slice(&mac);
        frame[12..14].copy_from_slice(&ETHERTYPE_RARP);
        frame[14..22].copy_from_slice(&[0, 1, 8, 0, 6, 4, 0, 3]);
        frame[22..28].copy_from_slice(&mac);
        frame[32..38].copy_from_slice(&mac);
        let frame = match vlan {
            None => frame,
            Some(vlan) => {
                let len = vlan::put(vlan, &mut hdr, &mut bytes);
                &mut bytes[..len]
            }
        };
        self.ports.now = now;
        let (engine, ports) = (&mut self.engine, &mut self.ports);
        // Nothing interrupts a turn here.
        let _ = self.turn.handle_frame(now, engine, ports, port, hdr, frame);
    }
}
