//! Stations that the switch was told of: they are behind that port, whatever frames say.

use hashbrown::hash_table::Entry;

use super::{GUEST_VLAN, Mac, Switch, mac_key};
use crate::port::PortId;

/// In place of a VLAN id in [`mac_key`]: a MAC that was told of, on every VLAN.
pub(super) const TOLD_VLAN: u16 = u16::MAX - 3;

impl Switch {
    /// The station `mac` is behind `port`, an overlay, on every VLAN: a frame that contradicts it
    /// changes nothing, and a guest that merely uses this MAC loses it. A guest that was configured
    /// with the MAC keeps it while it is here. The caller bounds the number of stations.
    pub fn tell_station(&mut self, port: PortId, mac: Mac) {
        let key = mac_key(TOLD_VLAN, mac);
        if self.find(key).is_some_and(|entry| entry.port == port) {
            return;
        }
        self.put(key, port);
        let holder = self.guest_with(mac).and_then(|holder| self.guest_mut(holder));
        if let Some(guest) = holder.filter(|guest| !guest.mac_configured) {
            guest.mac = None;
            self.remove(mac_key(GUEST_VLAN, mac));
        }
    }

    /// From now on frames decide where the station `mac` is.
    pub fn forget_station(&mut self, mac: Mac) {
        self.remove(mac_key(TOLD_VLAN, mac));
    }

    /// The port behind which `mac` was told to be.
    pub(super) fn told(&self, mac: Mac) -> Option<PortId> {
        self.find(mac_key(TOLD_VLAN, mac)).map(|entry| entry.port)
    }

    fn remove(&mut self, key: u64) {
        if let Entry::Occupied(entry) = self.entry(key) {
            entry.remove();
            self.forget_found();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Out;
    use super::*;
    use crate::drops::DropReason;
    use crate::limits::{MAC_AGE, MAC_ENTRIES_MAX};
    use crate::time::{Duration, Instant};
    use crate::wire::packet::{IpAddr16, VlanStack};

    const OVERLAY: PortId = PortId(0);
    const LAN: PortId = PortId(1);
    const A: PortId = PortId(2);
    const B: PortId = PortId(3);
    const M: Mac = [2, 0, 0, 0, 0, 7];
    const OWN: Mac = [2, 0, 0, 0, 0, 9];
    const NOW: Instant = Instant::from_secs(1000);

    /// Two guests, of which A has a MAC.
    fn switch() -> Switch {
        let mut switch = Switch::new([1, 2, 3, 4]);
        switch.add_guest(A, Some(OWN), None).unwrap();
        switch.add_guest(B, None, None).unwrap();
        switch
    }

    fn way(switch: &mut Switch, mac: Mac) -> Out {
        switch.lookup(NOW, A, VlanStack::default(), mac)
    }

    fn uses(switch: &mut Switch, port: PortId, mac: Mac) -> Result<(), DropReason> {
        switch.check_ip_source(NOW, port, mac, IpAddr16::from_v4([10, 0, 0, 1]))
    }

    #[test]
    fn what_was_told_is_found_before_it_was_heard_and_whatever_is_heard() {
        let mut switch = switch();
        assert_eq!(way(&mut switch, M), Out::Flood);
        switch.tell_station(OVERLAY, M);
        assert_eq!(way(&mut switch, M), Out::Port(OVERLAY));
        switch.learn(NOW, LAN, VlanStack::default(), M);
        assert_eq!(way(&mut switch, M), Out::Port(OVERLAY));
        switch.forget_station(M);
        assert_eq!(way(&mut switch, M), Out::Port(LAN), "where it was heard");
    }

    #[test]
    fn nobody_here_has_the_mac_of_a_station_that_was_told() {
        let mut switch = switch();
        assert_eq!(uses(&mut switch, B, M), Ok(()));
        assert_eq!(way(&mut switch, M), Out::Port(B));
        switch.tell_station(OVERLAY, M);
        assert_eq!(way(&mut switch, M), Out::Port(OVERLAY), "it only said so");
        assert_eq!(uses(&mut switch, B, M), Err(DropReason::SpoofedMac));
        assert!(!switch.announce(NOW, B, M), "nor by its VMM");
        assert_eq!(uses(&mut switch, B, M), Err(DropReason::SpoofedMac));
        let other = [2, 0, 0, 0, 0, 8];
        assert_eq!(uses(&mut switch, B, other), Ok(()));
        assert_eq!(way(&mut switch, other), Out::Port(B));
    }

    #[test]
    fn who_is_configured_with_it_keeps_it_while_it_is_here() {
        let mut switch = switch();
        switch.tell_station(OVERLAY, OWN);
        let from_lan = |switch: &mut Switch| switch.lookup(NOW, LAN, VlanStack::default(), OWN);
        assert_eq!(uses(&mut switch, A, OWN), Ok(()));
        assert_eq!(from_lan(&mut switch), Out::Port(A));
        switch.set_away(A, true);
        assert_eq!(from_lan(&mut switch), Out::Port(OVERLAY));
        switch.set_away(A, false);
        assert_eq!(from_lan(&mut switch), Out::Port(A));
    }

    #[test]
    fn what_was_told_neither_ages_nor_takes_a_place_and_goes_with_its_port() {
        let mut switch = switch();
        switch.tell_station(OVERLAY, M);
        let later = NOW + MAC_AGE + Duration::from_secs(1);
        let heard = u32::try_from(MAC_ENTRIES_MAX).unwrap() + 1;
        for n in 0..heard {
            let [a, b, c, d] = n.to_be_bytes();
            switch.learn(later, LAN, VlanStack::default(), [6, 0, a, b, c, d]);
        }
        assert_eq!(switch.learned, MAC_ENTRIES_MAX);
        assert_eq!(switch.lookup(later, A, VlanStack::default(), M), Out::Port(OVERLAY));
        switch.remove_port(LAN);
        assert_eq!((switch.learned, switch.told(M)), (0, Some(OVERLAY)));
        switch.remove_port(OVERLAY);
        assert_eq!(way(&mut switch, M), Out::Flood);
    }
}
