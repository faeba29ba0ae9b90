//! A VM whose front-end has gone: moved or dead? (LIFE-16) And one that may have rebooted
//! (LIFE-04b).
//!
//! For [`T_AWAITED`] its connections stand still, because the guest may have moved, or come back
//! as it was. Then they end, or go on.
//!
//! [`T_AWAITED`]: crate::limits::T_AWAITED

use crate::engine::{Deed, Engine};
use crate::port::PortId;
use crate::switch::Mac;
use crate::tcp::vm::Presence;
use crate::time::Instant;
use crate::wire::packet::IpAddr16;

impl Engine<'_> {
    /// The VMM of `port` has hung up, the port stays: its link is down. Its connections end after
    /// [`T_AWAITED`], or when [another guest's driver](Self::set_port_features) is there (LIFE-05);
    /// no VM is to be let in while they [end](Self::is_ending). Until then they stand still, and
    /// [`Self::handle_guest_back`] lets them go on.
    ///
    /// [`T_AWAITED`]: crate::limits::T_AWAITED
    pub fn handle_guest_gone(&mut self, now: Instant, port: PortId) {
        if self.port(port).is_some_and(|p| p.features.is_some()) {
            self.set_port_features(now, port, None);
        }
        if self.presence(port) != Some(Presence::Here) {
            return; // and it has just been waited for
        }
        self.handle_batch_end(now); // ACKs of bytes that were taken before
        if self.networks.of(port).is_announced_elsewhere(port) {
            return self.end_guest(now, port, Presence::Moved);
        }
        self.await_guest(now, port);
    }

    /// The connections of the guest of `port` stand still until it is there.
    pub(super) fn await_guest(&mut self, now: Instant, port: PortId) {
        self.set_presence(port, Presence::Awaited);
        self.walks.wait(now, port);
    }

    /// The VMM of a guest announces that the guest has just been moved here, and has this MAC: it
    /// is waited for nowhere else. `true`: a station that was lately heard elsewhere had it, and is
    /// not found any more.
    pub fn handle_announcement(&mut self, now: Instant, port: PortId, mac: Mac) -> bool {
        if let Some(before) = self.networks.of(port).is_had_by(mac, port)
            && self.presence(before) == Some(Presence::Awaited)
        {
            self.end_guest(now, before, Presence::Moved);
        }
        self.networks.of_mut(port).announce(now, port, mac)
    }

    /// The front-end that has come has the guest that was there, as it was: its rings begin where
    /// they had stopped. Call it before the driver is reported.
    pub fn handle_guest_back(&mut self, port: PortId) {
        if self.presence(port) == Some(Presence::Awaited) {
            self.set_presence(port, Presence::Here);
        }
    }

    pub(super) fn presence(&self, port: PortId) -> Option<Presence> {
        self.port(port).map(|p| p.vm.presence)
    }

    /// The guest of `port` has sent a packet from this address that is of no connection in the
    /// path. If its driver began anew, it may have rebooted (LIFE-04b).
    pub(super) fn note_spoke(&mut self, now: Instant, port: PortId, from: IpAddr16) {
        let Some(vm) = self.port_mut(port).map(|p| &mut p.vm) else { return };
        let Some(doubt) = &mut vm.doubt else { return };
        let running = vm.clock.now(now);
        if doubt.is_over(running) {
            vm.doubt = None;
        } else if doubt.on_heard(running, from) {
            self.walk(now, Deed::Spoke, port);
        }
    }

    /// The rings of the guest of `port` have stopped. From now on it is noted if it is heard
    /// elsewhere: one that moves is, often before its VMM here hangs up.
    pub(super) fn note_stopped(&mut self, now: Instant, port: PortId) {
        if let Some(p) = self.port_mut(port) {
            p.vm.stopped_at = now;
        }
        self.networks.of_mut(port).note_all_anew();
    }

    /// The guest did not come back in time.
    pub(super) fn give_up(&mut self, now: Instant, port: PortId) {
        let Some(since) = self.port(port).map(|p| p.vm.stopped_at) else { return };
        let has_moved = self.networks.of(port).was_heard_since(since, port);
        self.end_guest(now, port, if has_moved { Presence::Moved } else { Presence::Gone });
    }

    /// There is a driver behind `port`, or none any more. If another guest is waited for, this is
    /// not that guest.
    pub(super) fn settle_presence(&mut self, now: Instant, port: PortId, has_driver: bool) {
        if has_driver && self.presence(port) == Some(Presence::Awaited) {
            self.end_guest(now, port, Presence::Replaced);
        }
    }

    pub(super) fn end_guest(&mut self, now: Instant, port: PortId, how: Presence) {
        self.set_presence(port, how);
        self.walk(now, Deed::End, port);
        self.networks.of_mut(port).forget_learned(now, port);
        self.settle_away(port);
    }

    /// A guest is there. Another one than before counts as there when the connections of that one
    /// have ended.
    pub(super) fn welcome(&mut self, port: PortId) {
        let ends = self.is_ending(port) && self.presence(port) != Some(Presence::Here);
        self.set_presence(port, if ends { Presence::Replaced } else { Presence::Here });
    }

    /// A walk over the connections of the VM of `port` has taken a step.
    pub(super) fn welcome_next(&mut self, port: PortId) {
        if self.presence(port) == Some(Presence::Replaced) {
            self.welcome(port);
        }
    }
}
