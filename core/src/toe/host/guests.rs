//! Guests come, change and go.

use std::net::IpAddr;

use super::super::guest::{Guest, GuestConfig};
use super::{Host, Instant, Socket, SocketId, VmId};
use crate::limits::TOE_SOCKETS_PER_STEP;

impl Host {
    /// A guest may have sockets from now on. Those of its addresses that another guest of its
    /// network has already are not its own, and are named. `goes_on`: its kernel is the one that
    /// was there when it was removed, and hears that its connections are gone.
    #[must_use]
    pub fn add_guest(&mut self, vm: VmId, config: GuestConfig, goes_on: bool) -> Vec<IpAddr> {
        assert!(!self.is_ending(vm), "{vm:?} has sockets of the guest before it");
        let (own, others) = self.take_addresses(vm, &config);
        let before = self.guests.insert(vm, Guest::new(config, own));
        assert!(before.is_none(), "{vm:?} is there already");
        let lost = self.lost.remove(&vm).filter(|_| goes_on);
        if let (Some(lost), Some(guest)) = (lost, self.guests.get_mut(&vm)) {
            lost.into_iter().for_each(|ports| guest.reset(ports));
            self.look_at(vm);
        }
        others
    }

    /// A guest is in another network, has other addresses or may reach others from now on: all that
    /// it has is reset, and it hears so. As of [`Self::add_guest`].
    #[must_use]
    pub fn set_guest(&mut self, now: Instant, vm: VmId, config: GuestConfig) -> Vec<IpAddr> {
        let Some(guest) = self.guests.get(&vm) else { return Vec::new() };
        for id in guest.ports.values().copied().collect::<Vec<_>>() {
            let socket = self.sockets.get_mut(id).expect("listed sockets are there");
            socket.joint.handle_reset(now);
            self.look_again(id);
        }
        self.reset_orphans(now, vm);
        self.addresses.retain(|_, has| *has != vm);
        let (own, others) = self.take_addresses(vm, &config);
        self.guests.get_mut(&vm).expect("asked before").begin_anew(config, own);
        self.look_at(vm);
        others
    }

    /// A guest, its driver or its VMM is gone. What it had is reset: `TOE_SOCKETS_PER_STEP` sockets
    /// now, and more by [`Self::go_on_ending`] as long as it [is ending](Self::is_ending), or as
    /// soon as somebody says something of them. Nobody comes by its number before that is over.
    pub fn remove_guest(&mut self, now: Instant, vm: VmId) -> Option<GuestConfig> {
        let guest = self.guests.remove(&vm)?;
        self.lost.insert(vm, guest.connections());
        let all: Vec<_> = guest.ports.into_values().collect();
        self.ending.extend((!all.is_empty()).then_some((vm, all)));
        self.addresses.retain(|_, has| *has != vm);
        self.go_on_ending(now);
        Some(guest.config)
    }

    /// Whether a guest has gone and some of its sockets have not been told.
    #[must_use]
    pub fn is_ending(&self, vm: VmId) -> bool {
        self.ending.iter().any(|(of, _)| *of == vm)
    }

    /// Whether there is more for [`Self::go_on_ending`].
    #[must_use]
    pub fn ends(&self) -> bool {
        !self.ending.is_empty()
    }

    /// Resets some of what guests that have gone had, of the one that has waited longest.
    pub fn go_on_ending(&mut self, now: Instant) {
        let mut left = TOE_SOCKETS_PER_STEP;
        while left > 0
            && let Some((vm, mut all)) = self.ending.pop_front()
        {
            let rest = all.split_off(left.min(all.len()));
            left -= all.len();
            all.into_iter().for_each(|id| self.end(now, id));
            if !rest.is_empty() {
                self.ending.push_front((vm, rest));
            }
        }
    }

    /// Whoever still speaks of a socket whose guest has gone ends it.
    pub(super) fn end_if_its_guest_has_gone(&mut self, now: Instant, id: SocketId) {
        if self.sockets.get(id).is_some_and(|socket| !self.has_guest(socket)) {
            self.end(now, id);
        }
    }

    /// Its guest has gone, unless it was told so before.
    fn end(&mut self, now: Instant, id: SocketId) {
        if self.sockets.get(id).is_some_and(|socket| socket.is_listed) {
            self.lose(now, id);
        }
    }

    /// Whether the guest is there whose kernel knows a socket: payload may be given to it.
    pub(super) fn has_guest(&self, socket: &Socket) -> bool {
        self.ending.is_empty() || !socket.is_listed || self.guests.contains_key(&socket.vm)
    }

    /// A virtual machine is no more, and its number may be another's: what it had closed and was to
    /// arrive elsewhere is reset as well. All that is left of it is reset now.
    pub fn forget_vm(&mut self, now: Instant, vm: VmId) {
        let _ = self.remove_guest(now, vm);
        self.lost.remove(&vm);
        let own = self.ending.iter().position(|(of, _)| *of == vm);
        if let Some((_, own)) = own.and_then(|at| self.ending.remove(at)) {
            own.into_iter().for_each(|id| self.end(now, id));
        }
        self.reset_orphans(now, vm);
    }

    /// What a guest has closed arrives nowhere any more.
    fn reset_orphans(&mut self, now: Instant, vm: VmId) {
        while let Some(id) = self.sockets.pop_orphan(vm) {
            self.lose(now, id);
        }
    }

    /// The addresses that it gets, and those that it does not.
    fn take_addresses(&mut self, vm: VmId, config: &GuestConfig) -> (Vec<IpAddr>, Vec<IpAddr>) {
        let has = |ip: &IpAddr| *self.addresses.entry((config.network, *ip)).or_insert(vm) == vm;
        config.ips.iter().copied().partition(has)
    }
}
