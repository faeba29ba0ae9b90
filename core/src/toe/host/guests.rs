//! Guests come, change and go.

use std::net::IpAddr;

use super::super::guest::{Guest, GuestConfig};
use super::{Host, Instant, VmId};

impl Host {
    /// A guest may have sockets from now on. Those of its addresses that another guest of its
    /// network has already are not its own, and are named. `goes_on`: its kernel is the one that
    /// was there when it was removed, and hears that its connections are gone.
    #[must_use]
    pub fn add_guest(&mut self, vm: VmId, config: GuestConfig, goes_on: bool) -> Vec<IpAddr> {
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

    /// A guest, its driver or its VMM is gone; what it had is reset.
    pub fn remove_guest(&mut self, now: Instant, vm: VmId) -> Option<GuestConfig> {
        let guest = self.guests.get(&vm)?;
        let all: Vec<_> = guest.ports.values().copied().collect();
        self.lost.insert(vm, guest.connections());
        all.into_iter().for_each(|id| self.lose(now, id));
        self.addresses.retain(|_, has| *has != vm);
        self.guests.remove(&vm).map(|guest| guest.config)
    }

    /// A virtual machine is no more, and its number may be another's: what it had closed and was to
    /// arrive elsewhere is reset as well.
    pub fn forget_vm(&mut self, now: Instant, vm: VmId) {
        let _ = self.remove_guest(now, vm);
        self.lost.remove(&vm);
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
