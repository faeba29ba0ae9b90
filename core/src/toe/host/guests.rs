//! Guests come, change and go.

use std::collections::BTreeMap;
use std::net::IpAddr;

use super::super::guest::{Guest, GuestConfig};
use super::{Host, Instant, Socket, SocketId, VmId};
use crate::limits::TOE_SOCKETS_PER_STEP;

impl Host {
    /// A guest may have sockets from now on. Those of its addresses that another guest of its
    /// network has already are not its own, and are named. `goes_on`: its kernel is the one that
    /// was there when it was removed, and hears that its connections are gone; its processes may
    /// still ask how those ended that were over before.
    #[must_use]
    pub fn add_guest(&mut self, vm: VmId, config: GuestConfig, goes_on: bool) -> Vec<IpAddr> {
        assert!(!self.is_ending(vm), "{vm:?} has sockets of the guest before it");
        let (own, others) = self.take_addresses(vm, &config);
        let before = self.guests.insert(vm, Guest::new(config, own));
        assert!(before.is_none(), "{vm:?} is there already");
        self.note_listeners(vm, 1);
        let left = self.left.remove(&vm).filter(|_| goes_on);
        if let (Some(left), Some(guest)) = (left, self.guests.get_mut(&vm)) {
            guest.take_up(left);
            self.look_at(vm);
        }
        others
    }

    /// A guest, its driver or its VMM is gone, or it is to begin anew because its network, its
    /// addresses or those it may reach change. What it had is reset: `TOE_SOCKETS_PER_STEP` sockets
    /// now, and more by [`Self::go_on_ending`] as long as it [is ending](Self::is_ending), or as
    /// soon as somebody says something of them. Nobody comes by its number before that is over.
    pub fn remove_guest(&mut self, now: Instant, vm: VmId) -> Option<GuestConfig> {
        let removed = self.guests.remove(&vm).map(|guest| {
            let config = guest.config.clone();
            let (sockets, left) = guest.leave();
            self.left.insert(vm, left);
            self.addresses.retain(|_, has| *has != vm);
            self.list_ending(vm, sockets);
            self.note_listeners(vm, 1);
            config
        });
        self.go_on_ending(now);
        removed
    }

    /// What a guest has closed and is to arrive elsewhere ends as well, in the same steps: without
    /// this it arrives also when the guest has gone. To be said before [`Self::remove_guest`].
    pub fn end_closed(&mut self, vm: VmId) {
        let closed = self.sockets.orphans_of(vm);
        self.list_ending(vm, closed);
    }

    fn list_ending(&mut self, vm: VmId, sockets: Vec<SocketId>) {
        self.ending.extend((!sockets.is_empty()).then_some((vm, sockets)));
    }

    /// Whether sockets of a guest that has gone, or some that it had closed, have not been told.
    #[must_use]
    pub fn is_ending(&self, vm: VmId) -> bool {
        self.ending.iter().any(|(of, _)| *of == vm)
    }

    /// Whether there is more for [`Self::go_on_ending`].
    #[must_use]
    pub fn ends(&self) -> bool {
        !self.ending.is_empty()
    }

    /// Resets `TOE_SOCKETS_PER_STEP` sockets of guests that have gone, of the one that has waited
    /// longest.
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

    /// Its guest has gone, unless it was told so before; or what its guest has closed arrives
    /// nowhere any more.
    fn end(&mut self, now: Instant, id: SocketId) {
        if self.sockets.get(id).is_some_and(|socket| socket.is_listed || socket.is_orphan()) {
            self.lose(now, id);
        }
    }

    /// Guests whose listeners may have changed since this was asked last, also those that have come
    /// or gone, and how often they did: [`Self::listening_ports`].
    pub fn take_listener_changes(&mut self) -> BTreeMap<VmId, u64> {
        std::mem::take(&mut self.listener_changes)
    }

    /// Listeners of a guest have changed so often.
    pub(super) fn note_listeners(&mut self, vm: VmId, changes: u64) {
        if changes > 0 {
            *self.listener_changes.entry(vm).or_default() += changes;
        }
    }

    /// Whether the guest is there whose kernel knows a socket: payload may be given to it.
    pub(super) fn has_guest(&self, socket: &Socket) -> bool {
        self.ending.is_empty() || !socket.is_listed || self.guests.contains_key(&socket.vm)
    }

    /// A virtual machine is no more: all that is left of it is reset, in steps as of
    /// [`Self::remove_guest`], what it had closed as well. Its number may be another's when none of
    /// it [is ending](Self::is_ending).
    pub fn forget_vm(&mut self, now: Instant, vm: VmId) {
        self.end_closed(vm);
        let _ = self.remove_guest(now, vm);
        self.left.remove(&vm);
    }

    /// The addresses that it gets, and those that it does not.
    fn take_addresses(&mut self, vm: VmId, config: &GuestConfig) -> (Vec<IpAddr>, Vec<IpAddr>) {
        let has = |ip: &IpAddr| *self.addresses.entry((config.network, *ip)).or_insert(vm) == vm;
        config.ips.iter().copied().partition(has)
    }
}
