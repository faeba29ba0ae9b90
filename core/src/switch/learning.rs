//! What frames teach the switch: which MACs are behind an uplink, which one a guest has.

use hashbrown::hash_table::Entry;

use super::{Ips, Mac, MacEntry, Switch, is_fresh, is_group, is_guest_key, mac_key, vlan_id};
use crate::drops::DropReason;
use crate::limits::{LEARNED_IP_AGE, LEARNED_IPS_PER_PORT, MAC_SWEEP_INTERVAL, MACS_MAX};
use crate::port::PortId;
use crate::time::Instant;
use crate::wire::packet::{IpAddr16, VlanStack};

impl Switch {
    /// `mac` is behind the uplink `port` on this VLAN. Group addresses teach nothing, nor do frames
    /// of guest ports, whose MAC [`Self::check_source`] knows. Of a guest's MAC this is remembered
    /// for the time after the guest: while it is there, [`Self::lookup`] finds the guest.
    #[inline]
    pub fn learn(&mut self, now: Instant, port: PortId, vlan: VlanStack, mac: Mac) {
        let key = mac_key(vlan_id(vlan), mac);
        if self.taught.recall(now, key) != Some(port) {
            self.learn_afresh(now, port, key, mac);
        }
    }

    fn learn_afresh(&mut self, now: Instant, port: PortId, key: u64, mac: Mac) {
        let is_guest_port = matches!(self.guests.get(usize::from(port.0)), Some(Some(_)));
        if is_guest_port || is_group(mac) {
            return;
        }
        if self.learned >= MACS_MAX && now.since(self.swept) >= MAC_SWEEP_INTERVAL {
            self.swept = now;
            self.retain_macs(|entry| is_guest_key(entry.key) || is_fresh(entry, now));
        }
        let full = self.learned >= MACS_MAX;
        match self.entry(key) {
            Entry::Occupied(mut entry) => {
                let moved = entry.get().port != port;
                *entry.get_mut() = MacEntry { key, port, seen: now };
                if moved {
                    self.forget_found();
                }
                self.taught.note(now, key, port, Instant::MAX);
            }
            // Those who are known keep their place: an address flood cannot push them out.
            Entry::Vacant(_) if full => {}
            Entry::Vacant(entry) => {
                entry.insert(MacEntry { key, port, seen: now });
                self.learned += 1;
                self.taught.note(now, key, port, Instant::MAX);
            }
        }
    }

    #[inline(never)]
    pub(super) fn learn_guest(&mut self, port: PortId, mac: Mac) -> Result<(), DropReason> {
        let known = self.guest_mut(port).is_none_or(|guest| guest.mac.is_some());
        if known || is_group(mac) || mac == [0; 6] || self.guest_with(mac).is_some() {
            return Err(DropReason::SpoofedMac);
        }
        self.bind(mac, port);
        if let Some(guest) = self.guest_mut(port) {
            guest.mac = Some(mac);
        }
        Ok(())
    }

    /// Forgets what a guest port taught: the guest was replaced or restarted.
    pub fn forget_learned(&mut self, port: PortId) {
        let Some(guest) = self.guest_mut(port) else { return };
        if let Ips::Learned(learned) = &mut guest.ips {
            learned.clear();
        }
        if !guest.mac_configured {
            guest.mac = None;
            self.retain_macs(|entry| entry.port != port);
        }
    }
}

/// Adds a source IP, in place of one that was silent for [`LEARNED_IP_AGE`] if there is no room.
/// If there is none of those either, the IP stays unknown: it is forwarded, not offloaded.
pub(super) fn learn_ip(learned: &mut Vec<(IpAddr16, Instant)>, now: Instant, ip: IpAddr16) {
    if learned.len() < LEARNED_IPS_PER_PORT {
        learned.push((ip, now));
        return;
    }
    let oldest = learned.iter_mut().min_by_key(|(_, seen)| *seen);
    if let Some(oldest) = oldest.filter(|(_, seen)| now.since(*seen) >= LEARNED_IP_AGE) {
        *oldest = (ip, now);
    }
}
