//! Guests that are believed as an uplink is: other stations may be behind them, as behind a router,
//! a bridge, or a machine with guests of its own.

use super::{Mac, Switch, is_group, is_host_address, is_static_key};
use crate::drops::DropReason;
use crate::port::PortId;
use crate::time::Instant;
use crate::wire::packet::{Eth, IpAddr16, VlanStack};

impl Switch {
    /// From now on the guest behind `port` is trusted: it may use any MAC that is no other guest's,
    /// and stations behind it are learned. Or it is no longer, and those are forgotten.
    pub fn set_trusted(&mut self, port: PortId, trusted: bool) {
        let Some(guest) = self.guest_mut(port) else { return };
        if core::mem::replace(&mut guest.trusted, trusted) && !trusted {
            self.forget_stations(port);
        }
    }

    /// Whether an unknown station may be behind `port`: it is an uplink, or its guest has not shown
    /// its MAC yet, or is trusted.
    #[must_use]
    pub fn may_be_behind(&self, port: PortId) -> bool {
        self.guest(port).is_none_or(|guest| guest.mac.is_none() || guest.trusted)
    }

    /// Whether a frame from `port` may have this source.
    pub(super) fn check_mac(
        &mut self,
        now: Instant,
        port: PortId,
        vlan: VlanStack,
        mac: Mac,
    ) -> Result<(), DropReason> {
        match self.guest_mut(port) {
            Some(guest) if guest.mac == Some(mac) => Ok(()),
            Some(guest) if guest.trusted => {
                self.check_station(port, mac)?;
                self.learn(now, port, vlan, mac);
                Ok(())
            }
            Some(_) => self.learn_guest(now, port, mac),
            None => Ok(()),
        }
    }

    /// Whether H may make frames with these source addresses in the name of the guest of `port`:
    /// its connections arrive from another host. Where the guest was, its MAC may have been heard a
    /// moment ago. Nothing is learned.
    ///
    /// # Errors
    /// The guest may not send such frames itself.
    pub fn check_arrivals(
        &self,
        port: PortId,
        sources: &[(Eth, IpAddr16)],
    ) -> Result<(), DropReason> {
        for (eth, ip) in sources {
            self.check_vlan(port, eth)?;
            let may_have = match self.guest(port) {
                Some(guest) if guest.mac == Some(eth.src) => true,
                Some(guest) if guest.trusted => self.check_station(port, eth.src).is_ok(),
                Some(_) => self.may_have(port, eth.src) && eth.src == sources[0].0.src,
                None => true,
            };
            if !may_have {
                return Err(DropReason::SpoofedMac);
            }
            if !self.may_use(port, *ip) {
                return Err(DropReason::SpoofedIp);
            }
        }
        Ok(())
    }

    /// They have arrived: what the guest's own frames would teach is learned. A MAC that was heard
    /// elsewhere is not taken from there; the guest's VMM announces it (SEND_RARP).
    pub fn learn_arrivals(&mut self, now: Instant, port: PortId, sources: &[(Eth, IpAddr16)]) {
        for (eth, ip) in sources {
            if self.check_mac(now, port, eth.vlan, eth.src).is_ok() {
                let _ = self.check_ip(now, port, *ip);
            }
        }
    }

    /// Whether the guest of `port` has this IP, or may be the first to use it.
    pub(super) fn may_use(&self, port: PortId, ip: IpAddr16) -> bool {
        self.guest(port).is_none_or(|guest| {
            let is_free = is_host_address(ip) && !self.is_listed(ip, guest.vlan());
            guest.owns(ip) || guest.needs_no_list(ip) || (is_free && !guest.has_list())
        })
    }

    /// Whether a station with this MAC may be behind a trusted guest: no other guest here has it,
    /// and the switch was told of no such station.
    fn check_station(&self, port: PortId, mac: Mac) -> Result<(), DropReason> {
        let is_one = !is_group(mac) && mac != [0; 6];
        let is_others = self.guest_with(mac).is_some_and(|holder| holder != port);
        if is_one && !is_others && self.told(mac).is_none() {
            Ok(())
        } else {
            Err(DropReason::SpoofedMac)
        }
    }

    /// Forgets the stations that were learned behind a guest.
    pub(super) fn forget_stations(&mut self, port: PortId) {
        self.retain_macs(|entry| entry.port != port || is_static_key(entry.key));
    }
}
