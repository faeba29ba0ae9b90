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

    /// Whether nothing goes from one of these ports to the other: both have guests, and one of
    /// these is isolated. What a memory of the switch says holds all the same, for it is asked on
    /// top of that.
    #[must_use]
    pub fn are_apart(&self, one: PortId, other: PortId) -> bool {
        let Some(one) = self.guest(one) else { return false };
        self.guest(other).is_some_and(|other| one.isolated || other.isolated)
    }
}
