//! Where both pipes remember losses: in one box, for most flows have none.

use crate::tcp::outbound::RemoteSack;
use crate::tcp::sender::Recovery;

/// What there is to know while segments are missing.
#[derive(Debug, Default)]
pub(crate) struct Losses(Option<Box<Known>>);

#[derive(Debug, Default)]
struct Known {
    /// Of bytes that G has not got.
    guest: Recovery,
    /// Of bytes of G that R has not got.
    net: RemoteSack,
}

impl Losses {
    /// There is something to know.
    #[inline]
    pub(crate) const fn any(&self) -> bool {
        self.0.is_some()
    }

    /// What G has not got.
    #[inline]
    pub(crate) fn of_guest(&self) -> Option<&Recovery> {
        self.0.as_ref().map(|known| &known.guest)
    }

    pub(crate) fn of_guest_mut(&mut self) -> Option<&mut Recovery> {
        self.0.as_mut().map(|known| &mut known.guest)
    }

    pub(crate) fn of_guest_or_new(&mut self) -> &mut Recovery {
        &mut self.0.get_or_insert_default().guest
    }

    /// What R has not got.
    #[inline]
    pub(crate) fn of_net(&self) -> Option<&RemoteSack> {
        self.0.as_ref().map(|known| &known.net)
    }

    pub(crate) fn of_net_mut(&mut self) -> Option<&mut RemoteSack> {
        self.0.as_mut().map(|known| &mut known.net)
    }

    pub(crate) fn of_net_or_new(&mut self) -> &mut RemoteSack {
        &mut self.0.get_or_insert_default().net
    }

    /// Without losses there is nothing to remember of them; G has everything below `guest_una`.
    pub(crate) fn forget(&mut self, guest_una: u64) {
        let over = |known: &Known| known.guest.is_over(guest_una) && known.net.is_over();
        if self.0.as_deref().is_some_and(over) {
            self.0 = None;
        }
    }

    /// The flow leaves the path.
    pub(crate) fn clear(&mut self) {
        self.0 = None;
    }
}
