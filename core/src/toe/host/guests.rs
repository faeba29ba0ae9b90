//! Guests are added, changed and removed.

use std::collections::BTreeMap;
use std::net::IpAddr;

use super::super::guest::{Guest, GuestConfig};
use super::{Host, Instant, Socket, SocketId, VmId};
use crate::limits::TOE_SOCKETS_PER_STEP;

impl Host {
    /// Adds a guest. Addresses that another guest of its network has already are not given to it,
    /// and are returned. `goes_on`: its kernel is the one that was there when it was removed, and
    /// gets resets of its connections; its processes may still ask for the results of earlier ones.
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

    /// A guest, its driver or its VMM is gone, or the guest begins anew because its network, its
    /// addresses or its permissions change. Its sockets are reset: `TOE_SOCKETS_PER_STEP` now, and
    /// more by [`Self::go_on_ending`] as long as it [is ending](Self::is_ending), or when a message
    /// for one comes. Its number is not used again before that is over.
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

    /// Sockets that a guest has closed and whose data is still to be delivered elsewhere end as
    /// well, in the same steps; without this call the data is delivered after the guest has gone.
    /// To be called before [`Self::remove_guest`].
    pub fn end_closed(&mut self, vm: VmId) {
        let closed = self.sockets.orphans_of(vm);
        self.list_ending(vm, closed);
    }

    fn list_ending(&mut self, vm: VmId, sockets: Vec<SocketId>) {
        self.ending.extend((!sockets.is_empty()).then_some((vm, sockets)));
    }

    /// Whether sockets of a guest that has gone, or some that it had closed, are still to be reset.
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

    /// A message for a socket whose guest has gone ends it.
    pub(super) fn end_if_its_guest_has_gone(&mut self, now: Instant, id: SocketId) {
        if self.sockets.get(id).is_some_and(|socket| !self.has_guest(socket)) {
            self.end(now, id);
        }
    }

    /// Ends a socket whose guest has gone, unless it has ended before, or a closed one whose data
    /// is not to be delivered any more.
    fn end(&mut self, now: Instant, id: SocketId) {
        if self.sockets.get(id).is_some_and(|socket| socket.is_listed || socket.is_orphan()) {
            self.lose(now, id);
        }
    }

    /// Guests whose listeners may have changed since the last call, also added and removed ones,
    /// and the number of changes: [`Self::listening_ports`].
    pub fn take_listener_changes(&mut self) -> BTreeMap<VmId, u64> {
        std::mem::take(&mut self.listener_changes)
    }

    /// Counts changes of a guest's listeners.
    pub(super) fn note_listeners(&mut self, vm: VmId, changes: u64) {
        if changes > 0 {
            *self.listener_changes.entry(vm).or_default() += changes;
        }
    }

    /// Whether a socket's guest is present and has the socket, so that payload may be given to it.
    pub(super) fn has_guest(&self, socket: &Socket) -> bool {
        self.ending.is_empty() || !socket.is_listed || self.guests.contains_key(&socket.vm)
    }

    /// A virtual machine is removed for good: all its sockets are reset in steps as by
    /// [`Self::remove_guest`], closed ones too. Its number may be used again when none of them [is
    /// ending](Self::is_ending).
    pub fn forget_vm(&mut self, now: Instant, vm: VmId) {
        self.end_closed(vm);
        let _ = self.remove_guest(now, vm);
        self.left.remove(&vm);
    }

    /// The addresses that the guest gets, and those that it does not get.
    fn take_addresses(&mut self, vm: VmId, config: &GuestConfig) -> (Vec<IpAddr>, Vec<IpAddr>) {
        let has = |ip: &IpAddr| *self.addresses.entry((config.network, *ip)).or_insert(vm) == vm;
        config.ips.iter().copied().partition(has)
    }
}
