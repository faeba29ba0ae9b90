//! The switch learns from frames: the MACs behind an uplink, the MAC of a guest.

use hashbrown::hash_table::Entry;

use super::{Ips, Mac, MacEntry, Switch, is_fresh, is_group, is_static_key, mac_key, vlan_id};
use crate::drops::DropReason;
use crate::limits::{LEARNED_IP_AGE, LEARNED_IPS_PER_PORT, MAC_ENTRIES_MAX, MAC_SWEEP_INTERVAL};
use crate::port::{PortId, Vlans};
use crate::time::Instant;
use crate::wire::packet::{IpAddr16, VlanStack};

/// In place of a VLAN id in [`mac_key`]: a MAC that was heard behind an uplink, with whatever tag.
/// It decides which guests may not take the MAC, and not where frames go.
const ANY_VLAN: u16 = u16::MAX - 1;
/// Likewise: the MAC of a guest that has gone.
const GONE_VLAN: u16 = u16::MAX - 2;

/// An entry with this in place of a VLAN id says who may not take a MAC, not where frames go.
pub(super) const fn is_remark(vlan: u16) -> bool {
    matches!(vlan, ANY_VLAN | GONE_VLAN)
}

impl Switch {
    /// `mac` is behind the uplink `port` on this VLAN. Group addresses teach nothing, nor do frames
    /// of guest ports that are not trusted, whose MAC [`Self::check_source`] knows. Of a guest's
    /// MAC this is remembered for the time after the guest: while it is there, [`Self::lookup`]
    /// finds the guest.
    #[inline]
    pub fn learn(&mut self, now: Instant, port: PortId, vlan: VlanStack, mac: Mac) {
        let key = mac_key(vlan_id(vlan), mac);
        if self.taught.recall(now, key) != Some(port) {
            self.learn_afresh(now, port, key, mac);
        }
    }

    fn learn_afresh(&mut self, now: Instant, port: PortId, key: u64, mac: Mac) {
        let is_uplink = self.guest(port).is_none_or(|guest| guest.trusted);
        if !is_uplink || is_group(mac) {
            return;
        }
        let any = mac_key(ANY_VLAN, mac);
        // A MAC that was heard with a tag counts here too.
        if key != mac_key(0, mac) && self.note_heard(now, port, any).is_none() {
            return;
        }
        let Some(moved) = self.note_heard(now, port, key) else { return };
        if moved {
            self.forget_found();
        }
        self.taught.note(now, key, port, Instant::MAX);
    }

    /// A station was heard at `port`. `Some(true)`: at another one before; `None`: the table is
    /// full and no entry can be forgotten. Known stations keep their place: an address flood cannot
    /// push them out.
    fn note_heard(&mut self, now: Instant, port: PortId, key: u64) -> Option<bool> {
        if self.learned >= MAC_ENTRIES_MAX && now.since(self.swept) >= MAC_SWEEP_INTERVAL {
            self.swept = now;
            self.retain_macs(|entry| is_static_key(entry.key) || is_fresh(entry, now));
        }
        let full = self.learned >= MAC_ENTRIES_MAX;
        match self.entry(key) {
            Entry::Occupied(mut entry) => {
                let moved = entry.get().port != port;
                *entry.get_mut() = MacEntry { key, port, seen: now };
                Some(moved)
            }
            Entry::Vacant(_) if full => None,
            Entry::Vacant(entry) => {
                entry.insert(MacEntry { key, port, seen: now });
                self.learned += 1;
                Some(false)
            }
        }
    }

    /// Where a station was heard last, however long ago. Only a full table forgets that.
    #[must_use]
    pub fn last_heard(&self, vlan: VlanStack, mac: Mac) -> Option<PortId> {
        self.find(mac_key(vlan_id(vlan), mac)).map(|entry| entry.port)
    }

    /// A guest uses this MAC for the first time. One that was heard at another port within
    /// [`MAC_AGE`](crate::limits::MAC_AGE) is not taken from there by a frame, unless its VMM has
    /// announced it.
    #[inline(never)]
    pub(super) fn learn_guest(
        &mut self,
        now: Instant,
        port: PortId,
        mac: Mac,
    ) -> Result<(), DropReason> {
        if !self.may_have(port, mac) {
            Err(DropReason::SpoofedMac)
        } else if self.was_heard_elsewhere(now, port, mac) && !self.was_announced(port, mac) {
            Err(DropReason::MacElsewhere)
        } else {
            self.bind_guest(port, mac);
            Ok(())
        }
    }

    /// The VMM of `port` says that its guest has this MAC, and has just been moved here
    /// (SEND_RARP). That counts more than what was heard elsewhere, and no more than what is
    /// configured. While another guest has the MAC, which may have stopped to move, it is only
    /// remembered. `true`: it is the guest's now, and was heard elsewhere.
    pub fn announce(&mut self, now: Instant, port: PortId, mac: Mac) -> bool {
        if let Some(guest) = self.guest_mut(port) {
            guest.announced = Some(mac);
        }
        let takes = self.may_have(port, mac);
        let was_elsewhere = takes && self.was_heard_elsewhere(now, port, mac);
        if takes {
            self.bind_guest(port, mac);
        }
        was_elsewhere
    }

    /// The port at which the guest with this MAC is known, unless that is `port`, or the MAC is
    /// configured there, which counts more than an announcement.
    pub(crate) fn is_had_by(&self, mac: Mac, port: PortId) -> Option<PortId> {
        let has_learned = |other: &PortId| self.guest(*other).is_some_and(|it| !it.mac_configured);
        self.guest_with(mac).filter(|other| *other != port).filter(has_learned)
    }

    /// Whether the VMM of another port has announced the MAC that was learned of the guest of
    /// `port`.
    pub(crate) fn is_announced_elsewhere(&self, port: PortId) -> bool {
        let learned = self.guest(port).filter(|guest| !guest.mac_configured);
        let Some(mac) = learned.and_then(|guest| guest.mac) else { return false };
        let mut ports = (0..).map(PortId).take(self.guests.len());
        ports.any(|other| other != port && self.was_announced(other, mac))
    }

    /// Whether this MAC was lately heard at a port other than `port`, where that counts: a guest
    /// without knowledge of VLANs is not affected by uplinks' stations in other VLANs.
    fn was_heard_elsewhere(&self, now: Instant, port: PortId, mac: Mac) -> bool {
        let heard = match self.guest(port).map(|guest| &guest.vlans) {
            Some(Vlans::Access(vlan)) => [*vlan, GONE_VLAN, GONE_VLAN],
            _ => [0, ANY_VLAN, GONE_VLAN],
        };
        let mut heard = heard.into_iter().filter_map(|vlan| self.find(mac_key(vlan, mac)));
        heard.any(|entry| entry.port != port && is_fresh(entry, now))
    }

    /// Whether the MAC of the guest behind `port` was heard at another port since then: the guest
    /// has moved. Of a station that is heard all the time this is noted once a second.
    pub(crate) fn was_heard_since(&self, since: Instant, port: PortId) -> bool {
        let Some(mac) = self.mac_of(port) else { return false };
        let vlans = match self.guest(port).map(|guest| &guest.vlans) {
            Some(Vlans::Access(vlan)) => [*vlan; 2],
            _ => [0, ANY_VLAN],
        };
        let mut heard = vlans.into_iter().filter_map(|vlan| self.find(mac_key(vlan, mac)));
        heard.any(|entry| entry.port != port && entry.seen > since)
    }

    fn was_announced(&self, port: PortId, mac: Mac) -> bool {
        self.guest(port).is_some_and(|guest| guest.announced == Some(mac))
    }

    /// Whether the guest of `port` has no MAC yet, and this one is free.
    pub(super) fn may_have(&self, port: PortId, mac: Mac) -> bool {
        let has_none = self.guest(port).is_some_and(|guest| guest.mac.is_none());
        let is_one = !is_group(mac) && mac != [0; 6];
        has_none && is_one && self.told(mac).is_none() && self.guest_with(mac).is_none()
    }

    fn bind_guest(&mut self, port: PortId, mac: Mac) {
        self.bind(mac, port);
        if let Some(guest) = self.guest_mut(port) {
            guest.mac = Some(mac);
        }
    }

    /// Whether the guest of `port`, whose MAC is configured, lives elsewhere for now, as after a
    /// migration: then its MAC may be behind an uplink. It stays this guest's MAC: no other guest
    /// here may use it, and this guest may use no other.
    pub fn set_away(&mut self, port: PortId, is_away: bool) {
        if let Some(guest) = self.guest_mut(port)
            && guest.away != (is_away && guest.mac_configured)
        {
            guest.away = !guest.away;
            self.forget_found();
        }
    }

    pub(super) fn is_away(&self, port: PortId) -> bool {
        self.guest(port).is_some_and(|guest| guest.away)
    }

    /// Forgets what was learned from a guest port: the guest was replaced or restarted. No other
    /// guest gets its MAC for as long as an uplink's would be kept.
    pub fn forget_learned(&mut self, now: Instant, port: PortId) {
        let Some(guest) = self.guest_mut(port) else { return };
        if let Ips::Learned(learned) = &mut guest.ips {
            learned.clear();
        }
        guest.announced = None;
        if guest.trusted {
            self.forget_stations(port);
        }
        let Some(guest) = self.guest_mut(port) else { return };
        if !guest.mac_configured
            && let Some(mac) = guest.mac.take()
        {
            self.retain_macs(|entry| entry.port != port);
            self.note_heard(now, port, mac_key(GONE_VLAN, mac));
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
