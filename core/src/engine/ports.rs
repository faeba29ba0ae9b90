//! Adding, changing and removing ports.

use super::{Direction, Engine, Port};
use crate::bucket::Bucket;
use crate::drops::DropReason;
use crate::flow::table::Class;
use crate::limits::{self, GROUP_FRAMES_BURST, GROUP_FRAMES_INTERVAL};
use crate::port::{GuestConfig, PortConfig, PortId, PortKind};
use crate::store::arena::ArenaSize;
use crate::store::record::{name_hash, network_hash};
use crate::switch::Mac;
use crate::tcp::vm::{Presence, Vm};
use crate::time::Instant;
use crate::wire::packet::Eth;

/// Why a port could not be added.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum AddPortError {
    /// Another port has this name: give each port its own.
    NameTaken,
    /// Another VM is configured with this MAC: give each its own.
    MacTaken,
    /// All port slots are in use: raise the limit or remove a port.
    TooManyPorts,
    /// The budgets of all VMs together exceed the arena: lower a budget or enlarge the arena.
    BudgetExceedsArena,
}

/// Pages of the store that a VM may use.
fn budget_pages(guest: &GuestConfig) -> u64 {
    guest.budget_bytes / limits::PAGE as u64
}

fn mtu(guest: &GuestConfig) -> u16 {
    if guest.mtu == 0 { limits::MTU_DEFAULT } else { guest.mtu }
}

impl Engine<'_> {
    /// Adds a port; frames may be given for it at once.
    ///
    /// # Errors
    /// See [`AddPortError`]; nothing was added.
    pub fn add_port(&mut self, now: Instant, config: PortConfig) -> Result<PortId, AddPortError> {
        self.removed_wire = None;
        let taken = |p: &Port| p.config.name == config.name;
        if self.ports.iter().flatten().any(taken) {
            return Err(AddPortError::NameTaken);
        }
        let budget_pages = config.as_guest().map_or(0, self::budget_pages);
        if self.pages_promised(None) + budget_pages > self.common.arena.pages_total() as u64 {
            return Err(AddPortError::BudgetExceedsArena);
        }
        let slot = self.ports.iter().position(Option::is_none).unwrap_or(self.ports.len());
        let id = PortId(u16::try_from(slot).map_err(|_| AddPortError::TooManyPorts)?);
        let network_hash = network_hash(&config.network);
        let is_uplink = !config.is_guest();
        let vm = Vm {
            offload: config.as_guest().is_some_and(|g| g.ack_offload),
            congestion_offload: config.as_guest().is_some_and(|g| g.congestion_offload),
            congestion_control: config.as_guest().map(|g| g.congestion_control).unwrap_or_default(),
            local: config.as_guest().map(|g| g.local).unwrap_or_default(),
            guest_ttl: config.as_guest().and_then(|g| g.guest_ttl),
            budget_pages,
            mtu: config.as_guest().map_or(limits::MTU_DEFAULT, mtu),
            host_mac: self.host_mac(network_hash),
            network_hash,
            ..Vm::new(now, name_hash(&config.name))
        };
        let wire = config.wire.then(|| self.wire_for(&config));
        if let Some(guest) = config.as_guest() {
            self.flows.set_quota(id.0, guest.flows_max);
        }
        if wire.is_some() {
            self.join_wire(id, &config.network);
        } else if let (switch, Some(guest)) =
            (self.networks.join(id, &config.network), config.as_guest())
        {
            if switch.add_guest(id, guest.mac, guest.ips.as_deref()).is_err() {
                self.networks.leave(id);
                return Err(AddPortError::MacTaken);
            }
            switch.set_isolated(id, guest.isolated);
            switch.set_trusted(id, guest.trusted);
            switch.set_vlans(id, guest.vlans.clone());
        }
        let drops = [0; DropReason::ALL.len()];
        let group_frames = Bucket::new(GROUP_FRAMES_BURST, GROUP_FRAMES_INTERVAL);
        let (features, elsewhere, spoofed) = (None, false, None);
        let port = Port { config, features, vm, elsewhere, wire, group_frames, drops, spoofed };
        if slot == self.ports.len() {
            self.ports.push(Some(port));
        } else {
            self.ports[slot] = Some(port);
        }
        if is_uplink {
            self.settle_host_macs();
        }
        Ok(id)
    }

    /// An uplink has come or gone: every VM knows an address of the host in its network (LIFE-07).
    fn settle_host_macs(&mut self) {
        for place in 0..self.ports.len() {
            let Some(port) = self.ports[place].as_ref().filter(|port| port.config.is_guest())
            else {
                continue;
            };
            let mac = self.host_mac(port.vm.network_hash);
            if let Some(port) = &mut self.ports[place] {
                port.vm.host_mac = mac;
            }
        }
    }

    /// The host's address behind the first uplink of the network with this hash.
    pub(super) fn host_mac(&self, network: u32) -> Option<Mac> {
        let of_network = |p: &&Port| p.vm.network_hash == network;
        self.ports.iter().flatten().filter(of_network).find_map(|port| port.config.host_mac())
    }

    /// The port and its VM are gone for good (LIFE-05). Remotes with promises are told; drain
    /// `poll_transmit` before the next call. See [`Self::prepare_removal`].
    pub fn remove_port(&mut self, now: Instant, port: PortId) {
        self.walks.forget(Some(port), |_| true);
        self.settle_prediction();
        self.abort_flows(now, port);
        self.networks.of_mut(port).forget_learned(now, port);
        for class in [Class::Unproven, Class::Live, Class::Spent] {
            self.for_each(port, class, |engine, id| engine.remove_flow(id));
        }
        self.set_presence(port, Presence::Here); // whoever gets its number is there
        for way in [Direction::FromGuest, Direction::ToGuest] {
            self.set_rate_limit(port, way, None);
        }
        self.syn_cache.remove_port(port.0);
        self.set_accept_offload(port, None);
        let slot = self.ports.get_mut(usize::from(port.0));
        if let Some(gone) = slot.and_then(Option::take) {
            if let Some(wire) = gone.wire {
                self.leave_wire(port, wire);
            } else {
                self.networks.leave(port);
            }
            if !gone.config.is_guest() {
                self.settle_host_macs();
            }
        }
    }

    /// Whether the registry lists the MAC of the guest of `port`, which is configured, for another
    /// host, until it gets another MAC. While it has no driver here it lives there: its MAC may be
    /// behind an overlay then.
    pub fn set_elsewhere(&mut self, port: PortId, elsewhere: bool) {
        let Some(p) = self.port_mut(port) else { return };
        p.elsewhere = elsewhere;
        self.settle_away(port);
    }

    /// From now on the station `mac` is behind the overlay at `port`, whatever frames say, and no
    /// guest of that network may use its MAC but one that is configured with it.
    pub fn tell_station(&mut self, port: PortId, mac: Mac) {
        self.networks.of_mut(port).tell_station(port, mac);
    }

    /// From now on frames say where that station is.
    pub fn forget_station(&mut self, port: PortId, mac: Mac) {
        self.networks.of_mut(port).forget_station(mac);
    }

    /// Another policy for the VM behind `port`, from now on. Its connections stay: with a smaller
    /// budget or table those that are there keep what they have, and those whose offload is turned
    /// off drain. The MTU counts for new connections. In other VLANs its connections end as if the
    /// VM had gone: what remotes were promised is not for those whom the guest meets there. See
    /// [`Self::prepare_move`].
    ///
    /// # Errors
    /// See [`AddPortError`]; nothing has changed, but for connections that have ended before.
    pub fn set_guest(
        &mut self,
        now: Instant,
        port: PortId,
        guest: GuestConfig,
    ) -> Result<(), AddPortError> {
        if self.vm(port).is_none() {
            return Ok(());
        }
        let before = self.port_config(port).and_then(PortConfig::as_guest);
        let moves = before.is_some_and(|before| before.vlans != guest.vlans);
        let set = self.set_policy(now, port, guest);
        if moves {
            if set.is_ok() {
                self.abort_flows(now, port);
            }
            if self.port_mut(port).is_some_and(|p| p.features.is_some()) {
                self.set_presence(port, Presence::Here); // see `prepare_move`
            }
        }
        set
    }

    fn set_policy(
        &mut self,
        now: Instant,
        port: PortId,
        guest: GuestConfig,
    ) -> Result<(), AddPortError> {
        let budget_pages = self::budget_pages(&guest);
        if self.pages_promised(Some(port)) + budget_pages > self.common.arena.pages_total() as u64 {
            return Err(AddPortError::BudgetExceedsArena);
        }
        if let Some(wire) = self.wire_mut(port) {
            wire.mac = guest.mac.or(wire.mac);
        } else {
            let switch = self.networks.of_mut(port);
            let added = switch.set_guest(port, guest.mac, guest.ips.as_deref());
            added.map_err(|_| AddPortError::MacTaken)?;
            switch.set_isolated(port, guest.isolated);
            switch.set_trusted(port, guest.trusted);
            switch.set_vlans(port, guest.vlans.clone());
        }
        self.flows.set_quota(port.0, guest.flows_max);
        if let Some(p) = self.port_mut(port) {
            p.vm.budget_pages = budget_pages;
            p.vm.set_congestion_offload(guest.congestion_offload);
            p.vm.congestion_control = guest.congestion_control;
            p.vm.mtu = mtu(&guest);
            (p.vm.local, p.vm.guest_ttl) = (guest.local, guest.guest_ttl);
            let offload = guest.ack_offload;
            p.elsewhere &= p.config.as_guest().is_some_and(|before| before.mac == guest.mac);
            p.config.kind = PortKind::Guest(guest);
            if p.vm.offload != offload {
                self.set_offload(now, port, offload);
            }
        }
        Ok(())
    }

    /// Whether a frame is of a VLAN that the guest behind `port` is in.
    #[must_use]
    pub fn is_in_vlan(&self, port: PortId, frame: &[u8]) -> bool {
        Eth::parse(frame).is_ok_and(|eth| self.networks.of(port).is_in(port, eth.vlan))
    }

    /// Sets the number of flows, and the part of the arena that has memory; see
    /// [`Arena::resize`](crate::store::arena::Arena::resize).
    pub fn resize(&mut self, flows_max: u32, arena: ArenaSize) {
        self.flows.set_capacity(flows_max);
        self.common.arena.resize(arena);
    }

    /// Connections of which the arena tells the next process.
    #[must_use]
    pub fn recorded(&self) -> usize {
        self.common.arena.recorded()
    }

    /// Pages that the VMs except `except` may use, or still use: a budget that became smaller is
    /// free for others only when the excess is released.
    #[must_use]
    pub fn pages_promised(&self, except: Option<PortId>) -> u64 {
        let others = (0..).map(PortId).zip(&self.ports).filter(|(id, _)| Some(*id) != except);
        let vms = others.filter_map(|(_, port)| Some(&port.as_ref()?.vm));
        vms.map(|vm| vm.budget_pages.max(vm.reserved_pages)).sum()
    }
}
