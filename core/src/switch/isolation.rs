//! Guests that reach no other guest, only uplinks.

use super::Switch;
use crate::port::PortId;

impl Switch {
    /// From now on the guest behind `port` is isolated, or not.
    pub fn set_isolated(&mut self, port: PortId, isolated: bool) {
        if let Some(guest) = self.guest_mut(port) {
            guest.isolated = isolated;
        }
    }

    /// Whether no frames go between these ports: both have guests, and one of these is isolated.
    /// The switch's memories stay valid, because this is checked in addition to them.
    #[must_use]
    pub fn are_apart(&self, one: PortId, other: PortId) -> bool {
        let Some(one) = self.guest(one) else { return false };
        self.guest(other).is_some_and(|other| one.isolated || other.isolated)
    }
}
