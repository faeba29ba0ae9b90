//! The places of stations, as control orders them.

use std::net::{IpAddr, SocketAddr};

use nightporter_api::StationKey;
use nightporter_core::port::PortId;
use nightporter_registry::Station;

use super::data_path::DataPath;
use super::orders::VmPlace;
use crate::port::Port;
use crate::port::overlay::OverlayPort;
use crate::sockets::orders::Order;

impl DataPath {
    /// An overlay may have come or gone.
    pub(super) fn look_for_overlays(&mut self) {
        let overlays = self.ports.iter().filter_map(|(id, at)| match &at.port {
            Port::Overlay(overlay) => Some((overlay.config().vni, id)),
            _ => None,
        });
        self.overlays = overlays.collect();
    }

    /// The overlay with this number, and its port. `None`: it is not there.
    pub(super) fn overlay_mut(&mut self, vni: u32) -> Option<(PortId, &mut OverlayPort)> {
        let id = *self.overlays.get(&vni)?;
        match &mut self.ports.of_mut(id).port {
            Port::Overlay(overlay) => Some((id, overlay)),
            _ => None,
        }
    }

    /// Other peers for an overlay.
    pub(super) fn set_peers(&mut self, vni: u32, peers: &[SocketAddr]) {
        self.overlay_mut(vni).into_iter().for_each(|(_, overlay)| overlay.set_peers(peers));
    }

    /// A VM of this host has this place.
    pub(super) fn place_vm(&mut self, name: &str, place: &VmPlace) {
        let Some(port) = self.ports.find(name) else { return };
        self.set_own_ips(port, place.vni, &place.ips);
        self.engine.set_elsewhere(port, place.is_elsewhere);
    }

    /// The VM behind `port` has these addresses on the overlay `vni`, and none on others.
    pub(super) fn set_own_ips(&mut self, port: PortId, vni: u32, ips: &[IpAddr]) {
        for of in self.overlays.keys().copied().collect::<Vec<_>>() {
            let ips = if of == vni { ips } else { &[] };
            self.overlay_mut(of)
                .into_iter()
                .for_each(|(_, overlay)| overlay.set_own_ips(port, ips));
        }
    }

    /// The sockets, the overlay and the switch know of a station what the registry knows.
    pub(super) fn tell_station(
        &mut self,
        key: StationKey,
        elsewhere: Option<&Station>,
        is_here: bool,
    ) {
        let (vni, mac) = key;
        self.sockets.order(Order::SetStation(key, elsewhere.cloned().map(Box::new)));
        let Some((port, overlay)) = self.overlay_mut(vni) else { return };
        let is_told = match elsewhere {
            _ if is_here => {
                overlay.tell_here(mac);
                false
            }
            Some(station) => overlay.tell(mac, station.host, &station.ips),
            None => {
                overlay.forget(mac);
                false
            }
        };
        if is_told {
            self.engine.tell_station(port, mac);
        } else {
            self.engine.forget_station(port, mac);
        }
    }
}
