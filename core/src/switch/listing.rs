//! The table of MACs, for operators.

use super::learning::is_remark;
use super::{GUEST_VLAN, Mac, SERVICE, Switch, TOLD_VLAN, is_fresh};
use crate::port::PortId;
use crate::time::{Duration, Instant};

/// How the switch knows a MAC.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Known {
    /// It is a guest's own.
    Guest,
    /// The registry has it.
    Told,
    /// A frame came from there, so long ago.
    Heard(Duration),
}

/// A MAC, and the port behind which it is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct MacPlace {
    /// Where it stands in the table: the next page begins behind it.
    pub key: u64,
    /// The MAC.
    pub mac: Mac,
    /// The VLAN, by its outer tag: 0 is without a tag. `None`: on every VLAN.
    pub vlan: Option<u16>,
    /// That tag is a service provider's (802.1ad).
    pub is_service: bool,
    /// The port.
    pub port: PortId,
    /// How that is known.
    pub known: Known,
}

impl Switch {
    /// The first `most` MACs behind `after`, or of all, in the order of their keys. The whole table
    /// is looked at ([`MAC_ENTRIES_MAX`](crate::limits::MAC_ENTRIES_MAX)).
    pub(super) fn places(&self, now: Instant, after: Option<u64>, most: usize) -> Vec<MacPlace> {
        let is_behind = |key: &u64| after.is_none_or(|after| *key > after);
        let shown = self.macs.iter().filter(|entry| is_behind(&entry.key));
        let mut places: Vec<_> = shown
            .filter_map(|entry| {
                let [a, b, c, d, e, f, low, high] = entry.key.to_le_bytes();
                let vlan = u16::from_le_bytes([low, high]);
                let (vlan, known) = match vlan {
                    GUEST_VLAN => (None, Known::Guest),
                    TOLD_VLAN => (None, Known::Told),
                    vlan if is_remark(vlan) || !is_fresh(entry, now) => return None,
                    vlan => (Some(vlan), Known::Heard(now.since(entry.seen))),
                };
                Some(MacPlace {
                    key: entry.key,
                    mac: [a, b, c, d, e, f],
                    vlan: vlan.map(|vlan| vlan & !SERVICE),
                    is_service: vlan.is_some_and(|vlan| vlan & SERVICE != 0),
                    port: entry.port,
                    known,
                })
            })
            .collect();
        if places.len() > most {
            places.select_nth_unstable_by_key(most, |place| place.key);
            places.truncate(most);
        }
        places.sort_unstable_by_key(|place| place.key);
        places
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::tagged;
    use super::*;
    use crate::limits::MAC_AGE;
    use crate::wire::packet::VlanStack;

    const NOW: Instant = Instant::from_secs(1000);
    const LAN: PortId = PortId(0);
    const WEB: PortId = PortId(1);

    fn mac(n: u8) -> Mac {
        [2, 0, 0, 0, 0, n]
    }

    #[test]
    fn the_table_has_guests_stations_and_what_was_heard_lately() {
        let mut switch = Switch::new([1, 2, 3, 4]);
        switch.add_guest(WEB, Some(mac(1)), None).unwrap();
        switch.tell_station(LAN, mac(2));
        switch.learn(NOW, LAN, VlanStack::default(), mac(3));
        switch.learn(NOW, LAN, tagged(7), mac(4));
        let later = NOW + Duration::from_secs(60);
        let of = |it: &MacPlace| (it.mac[5], it.vlan, it.port, it.known);
        let minute = Known::Heard(Duration::from_secs(60));
        let mut all: Vec<_> = switch.places(later, None, 9).iter().map(of).collect();
        all.sort_unstable_by_key(|it| it.0);
        assert_eq!(
            all,
            [
                (1, None, WEB, Known::Guest),
                (2, None, LAN, Known::Told),
                (3, Some(0), LAN, minute),
                (4, Some(7), LAN, minute),
            ]
        );
        assert_eq!(switch.places(NOW + MAC_AGE, None, 9).len(), 2, "the others are forgotten");
    }

    #[test]
    fn pages_have_every_mac_once() {
        let mut switch = Switch::new([1, 2, 3, 4]);
        (0..100).for_each(|n| switch.learn(NOW, LAN, VlanStack::default(), mac(n)));
        let (mut seen, mut after) = (Vec::new(), None);
        loop {
            let page = switch.places(NOW, after, 7);
            let Some(last) = page.last() else { break };
            assert!(page.len() <= 7);
            after = Some(last.key);
            seen.extend(page.iter().map(|it| it.mac[5]));
        }
        seen.sort_unstable();
        assert!(seen.into_iter().eq(0..100));
    }
}
