//! Which guest is in which VLAN. A station is known by its VLAN and MAC; uplinks are in all VLANs.

use super::{GuestPort, Ips, Switch, vlan_id};
use crate::drops::DropReason;
use crate::port::{PortId, Vlans};
use crate::wire::packet::{Eth, VlanStack, is_tag};

impl Switch {
    /// Sets the VLANs of the guest behind `port`. Addresses that it used in other VLANs are not
    /// learned for these, and no other guest there keeps a learned address that is on its list.
    pub fn set_vlans(&mut self, port: PortId, vlans: Vlans) {
        if let Some(mut guest) = self.guests.get_mut(usize::from(port.0)).and_then(Option::take) {
            self.unlist(&guest);
            let before = core::mem::replace(
                &mut guest.vlans,
                match vlans {
                    Vlans::Trunk(mut own) => {
                        own.sort_unstable(); // each tagged frame asks
                        Vlans::Trunk(own)
                    }
                    vlans => vlans,
                },
            );
            if let Ips::Learned(learned) = &mut guest.ips
                && before != guest.vlans
            {
                learned.clear();
            }
            self.list(&guest);
            self.take_back_ips(&guest);
            self.guests[usize::from(port.0)] = Some(guest);
            self.forget_found();
        }
    }

    /// Takes the addresses on the list of `guest` from guests that have learned them, where the
    /// list applies.
    fn take_back_ips(&mut self, guest: &GuestPort) {
        let Ips::Listed(list) = &guest.ips else { return };
        for other in self.guests.iter_mut().flatten() {
            let apart =
                guest.vlan().is_some_and(|own| other.vlan().is_some_and(|vlan| vlan != own));
            if let Ips::Learned(learned) = &mut other.ips
                && !apart
            {
                learned.retain(|(ip, _)| list.binary_search(ip).is_err());
            }
        }
    }

    /// Whether frames with these tags are for the peer behind `port`.
    #[must_use]
    pub fn is_in(&self, port: PortId, vlan: VlanStack) -> bool {
        self.is_in_id(port, vlan_id(vlan))
    }

    /// The same by [`vlan_id`].
    pub(super) fn is_in_id(&self, port: PortId, vlan: u16) -> bool {
        self.guest(port).is_none_or(|guest| match &guest.vlans {
            Vlans::Any => true,
            Vlans::Access(own) => *own == vlan,
            Vlans::Trunk(own) => own.binary_search(&vlan).is_ok(),
        })
    }

    /// Whether `port` may send a frame with these tags. A guest without knowledge of its VLAN has
    /// the tag that its port has inserted, and no other. Behind priority tags alone, a third tag
    /// would hide its VLAN from us.
    pub(super) fn check_vlan(&self, port: PortId, eth: &Eth) -> Result<(), DropReason> {
        let is_fine = match self.guest(port).map(|guest| &guest.vlans) {
            None | Some(Vlans::Any) => true,
            Some(Vlans::Access(_)) => self.is_in(port, eth.vlan) && eth.vlan.tags().len() == 1,
            Some(Vlans::Trunk(_)) => {
                let is_hidden = eth.vlan.key() == 0 && is_tag(eth.ethertype);
                self.is_in(port, eth.vlan) && !is_hidden
            }
        };
        if is_fine { Ok(()) } else { Err(DropReason::Vlan) }
    }
}
