//! The learning switch: which station is behind which port, and which addresses a port may claim.
//!
//! - A guest port has one MAC: the configured one, the one that its VMM announced, or the first it
//!   used, unless that was heard elsewhere within [`MAC_AGE`]. It is static on every VLAN: neither
//!   the uplink nor another guest can take it over, and the guest may use no other.
//! - Behind an uplink there may be any number of MACs, learned per VLAN, bounded and aged. Those
//!   that the switch was told of (`told`) are static as well.
//! - A guest port may use the IPs on its list. Without a list it owns the first few it uses
//!   (COM-11), and may use any that is on no other list: it may be a router or a container node.
//!   Frames from addresses it does not own are forwarded and not offloaded.
//!
//! Frames to group addresses are flooded. Frames to unknown addresses are flooded too, except to
//! guests whose MAC is known. Guests that are not in the frame's VLAN (`vlans`) or are isolated
//! (`isolation`) get neither.
//!
//! A trusted guest is treated as an uplink, except for its VLANs and IPs (`trust`).
//!
//! VLAN tags are left alone: the port of a guest without tags inserts and removes them. Learning
//! from a guest trusts it once: give untrusted guests a MAC and IPs in the configuration. Frames of
//! guests with a list are checked more closely (`claims`).

use core::net::IpAddr;

mod claims;
mod isolation;
mod learning;
mod listing;
mod memo;
mod networks;
mod stations;
mod trust;
mod vlans;

use ahash::RandomState;
use hashbrown::HashTable;
use hashbrown::hash_table::Entry;

pub use self::listing::{Known, MacPlace};
use self::memo::Memo;
pub(crate) use self::networks::Networks;
use self::stations::TOLD_VLAN;
use crate::drops::DropReason;
use crate::limits::MAC_AGE;
use crate::port::{PortId, Vlans};
use crate::time::Instant;
use crate::wire::packet::{IpAddr16, Net, Packet, TPID_8021AD, VlanStack};

/// A MAC address.
pub type Mac = [u8; 6];

/// Where a frame goes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Out {
    /// Out of this port.
    Port(PortId),
    /// Out of every port but the one it came from.
    Flood,
    /// Nowhere.
    Drop(DropReason),
}

/// The MAC configured for a port is the configured MAC of another: give each guest its own.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct MacTaken(pub PortId);

#[derive(Debug)]
enum Ips {
    /// Sorted.
    Listed(Vec<IpAddr16>),
    /// With the time of the last use; at most [`LEARNED_IPS_PER_PORT`].
    Learned(Vec<(IpAddr16, Instant)>),
}

#[derive(Debug)]
struct GuestPort {
    mac: Option<Mac>,
    mac_configured: bool,
    /// [`Switch::set_away`].
    away: bool,
    ips: Ips,
    isolated: bool,
    trusted: bool,
    vlans: Vlans,
    /// The MAC in its VMM's last announcement.
    announced: Option<Mac>,
}

/// An IP on lists, and on how many: two guests may share one.
#[derive(Debug)]
struct Listed {
    ip: IpAddr16,
    /// The owner: [`LISTS_OF_ALL`], or those of one VLAN.
    of: u16,
    ports: u32,
}

/// In [`Listed`]: all lists.
const LISTS_OF_ALL: u16 = u16::MAX;
/// In [`Listed`]: those of guests that may be in any VLAN, or in several.
const LISTS_OF_MANY: u16 = u16::MAX - 1;

#[derive(Debug)]
struct MacEntry {
    /// [`mac_key`].
    key: u64,
    port: PortId,
    /// Meaningless for the MAC of a guest or of a told station.
    seen: Instant,
}

/// In place of a VLAN id in [`mac_key`]: a guest's MAC, on every VLAN.
const GUEST_VLAN: u16 = u16::MAX;

/// In a VLAN id: of a service provider (802.1ad), which is another VLAN.
const SERVICE: u16 = 1 << 12;

/// See the module doc.
#[derive(Debug)]
pub struct Switch {
    /// By port number; `None` is an uplink or no port.
    guests: Vec<Option<GuestPort>>,
    /// All addresses on any port's list: a frame costs one look, however many ports there are.
    listed: HashTable<Listed>,
    macs: HashTable<MacEntry>,
    /// How many of `macs` were learned from frames.
    learned: usize,
    swept: Instant,
    hasher: RandomState,
    /// Where frames went.
    found: Memo,
    /// Stations learned behind uplinks.
    taught: Memo,
    /// How often that was forgotten, from 1 on.
    changes: u64,
}

impl Switch {
    /// A switch without ports. `seeds` must be unpredictable for those behind the uplinks.
    #[must_use]
    pub fn new(seeds: [u64; 4]) -> Self {
        Self {
            guests: Vec::new(),
            listed: HashTable::new(),
            macs: HashTable::new(),
            learned: 0,
            swept: Instant::ZERO,
            hasher: RandomState::with_seeds(seeds[0], seeds[1], seeds[2], seeds[3]),
            found: Memo::new(),
            taught: Memo::new(),
            changes: 1,
        }
    }

    /// Adds the port of a guest. `mac` and `ips` bind it to its addresses; `None` learns them. Of
    /// uplinks the switch needs to know nothing.
    pub fn add_guest(
        &mut self,
        port: PortId,
        mac: Option<Mac>,
        ips: Option<&[IpAddr]>,
    ) -> Result<(), MacTaken> {
        if let Some(mac) = mac {
            if let Some(holder) = self.guest_with(mac) {
                let other = self.guest_mut(holder).filter(|_| holder != port);
                match other {
                    Some(other) if other.mac_configured => return Err(MacTaken(holder)),
                    // The other guest only used it; this one is configured with it.
                    Some(other) => other.mac = None,
                    None => {}
                }
            }
            self.bind(mac, port);
        }
        let ips = match ips {
            Some(list) => {
                let mut list: Vec<_> = list.iter().map(|&ip| IpAddr16::from(ip)).collect();
                list.sort_unstable();
                list.dedup();
                Ips::Listed(list)
            }
            None => Ips::Learned(Vec::new()),
        };
        let at = usize::from(port.0);
        if self.guests.len() <= at {
            self.guests.resize_with(at + 1, || None);
        }
        let mac_configured = mac.is_some();
        let (isolated, trusted, vlans, away) = (false, false, Vlans::Any, false);
        let announced = None;
        let guest =
            GuestPort { mac, mac_configured, away, ips, isolated, trusted, vlans, announced };
        self.list(&guest);
        self.guests[at] = Some(guest);
        Ok(())
    }

    /// Other addresses for the guest behind `port`, as if it had just been added with them; of
    /// those that are not configured it keeps what it has taught.
    ///
    /// # Errors
    /// Nothing has changed.
    pub fn set_guest(
        &mut self,
        port: PortId,
        mac: Option<Mac>,
        ips: Option<&[IpAddr]>,
    ) -> Result<(), MacTaken> {
        let holder = mac.and_then(|mac| self.guest_with(mac)).filter(|holder| *holder != port);
        if let Some(holder) = holder
            && self.guest_mut(holder).is_some_and(|other| other.mac_configured)
        {
            return Err(MacTaken(holder));
        }
        let Some(before) = self.guests.get_mut(usize::from(port.0)).and_then(Option::take) else {
            return Ok(());
        };
        self.unlist(&before);
        self.retain_macs(|entry| entry.port != port);
        self.add_guest(port, mac, ips)?;
        let taught = before.mac.filter(|mac_before| {
            mac.is_none() && !before.mac_configured && self.guest_with(*mac_before).is_none()
        });
        if let Some(taught) = taught {
            self.bind(taught, port);
        }
        if let Some(guest) = self.guest_mut(port) {
            guest.away = before.away && mac.is_some() && mac == before.mac;
            guest.mac = mac.or(taught);
            (guest.isolated, guest.announced) = (before.isolated, before.announced);
            guest.trusted = before.trusted;
        }
        self.set_vlans(port, before.vlans);
        let ips = self.guest_mut(port).map(|guest| &mut guest.ips);
        if let (Some(Ips::Learned(learned)), Ips::Learned(known)) = (ips, before.ips) {
            *learned = known;
        }
        Ok(())
    }

    /// Forgets a port and every MAC behind it.
    pub fn remove_port(&mut self, port: PortId) {
        let guest = self.guests.get_mut(usize::from(port.0)).and_then(Option::take);
        if let Some(guest) = guest {
            self.unlist(&guest);
        }
        self.retain_macs(|entry| entry.port != port);
    }

    /// The addresses on the guest's list are on one list more.
    fn list(&mut self, guest: &GuestPort) {
        for (ip, of) in guest.listings() {
            self.listed_entry(ip, of).or_insert(Listed { ip, of, ports: 0 }).into_mut().ports += 1;
        }
    }

    /// The addresses on the guest's list are on one list less.
    fn unlist(&mut self, guest: &GuestPort) {
        for (ip, of) in guest.listings() {
            if let Entry::Occupied(mut entry) = self.listed_entry(ip, of) {
                entry.get_mut().ports -= 1;
                if entry.get().ports == 0 {
                    entry.remove();
                }
            }
        }
    }

    /// Whether a frame from `port` may have its source addresses. Learns a guest's first MAC and
    /// IPs; frames from an uplink may have any.
    pub fn check_source(
        &mut self,
        now: Instant,
        port: PortId,
        packet: &Packet,
    ) -> Result<(), DropReason> {
        if self.guest_mut(port).is_none() {
            return Ok(());
        }
        self.check_vlan(port, &packet.eth)?;
        let mac = packet.eth.src;
        self.check_mac(now, port, packet.eth.vlan, mac)?;
        match packet.net {
            Net::Ip(ip) => self.check_ip(now, port, ip.src),
            Net::Arp(arp) if arp.sender_mac != mac => Err(DropReason::SpoofedMac),
            Net::Arp(arp) => self.check_ip(now, port, IpAddr16::from(arp.sender_ip)),
            Net::Other => Ok(()),
        }
    }

    /// The same for a packet with this source, and no tag.
    #[inline]
    pub fn check_ip_source(
        &mut self,
        now: Instant,
        port: PortId,
        mac: Mac,
        ip: IpAddr16,
    ) -> Result<(), DropReason> {
        if let Some(guest) = self.guest_mut(port)
            && guest.mac.is_some_and(|known| mac_key(0, known) == mac_key(0, mac))
            && guest.uses(now, ip)
        {
            return Ok(()); // nearly always
        }
        self.check_other_source(now, port, mac, ip)
    }

    #[inline(never)] // so that what is nearly always so need not pay for it
    fn check_other_source(
        &mut self,
        now: Instant,
        port: PortId,
        mac: Mac,
        ip: IpAddr16,
    ) -> Result<(), DropReason> {
        self.check_mac(now, port, VlanStack::default(), mac)?;
        self.check_ip(now, port, ip)
    }

    /// Whether `ip` is on the guest port's list, or was learned from it (COM-11).
    #[must_use]
    pub fn is_own_ip(&self, port: PortId, ip: IpAddr16) -> bool {
        self.guest(port).is_some_and(|guest| guest.owns(ip))
    }

    /// The MAC of the guest behind `port`, once it is known.
    #[must_use]
    pub fn mac_of(&self, port: PortId) -> Option<Mac> {
        self.guest(port)?.mac
    }

    /// Where a frame that came in on `ingress` goes.
    #[inline]
    #[must_use]
    pub fn lookup(&mut self, now: Instant, ingress: PortId, vlan: VlanStack, dst: Mac) -> Out {
        let key = mac_key(vlan_id(vlan), dst);
        let out = match self.found.recall(now, key) {
            Some(port) => Out::Port(port),
            None => self.search(now, key, dst),
        };
        match out {
            Out::Port(port) if port == ingress => Out::Drop(DropReason::Hairpin),
            Out::Port(port) if self.are_apart(ingress, port) => Out::Drop(DropReason::Isolated),
            out => out,
        }
    }

    /// Where a frame for `dst` most likely goes, if a frame lately went there.
    #[inline]
    #[must_use]
    pub fn peek(&self, now: Instant, vlan: VlanStack, dst: Mac) -> Option<PortId> {
        self.found.recall(now, mac_key(vlan_id(vlan), dst))
    }

    /// A frame from `mac` that came in on `port` teaches nothing.
    #[inline]
    #[must_use]
    pub fn is_taught(&self, now: Instant, port: PortId, vlan: VlanStack, mac: Mac) -> bool {
        self.taught.recall(now, mac_key(vlan_id(vlan), mac)) == Some(port)
    }

    /// While this number is the same, results of [`Self::peek`] and [`Self::is_taught`] from the
    /// same time stay valid. Never 0.
    #[inline]
    #[must_use]
    pub const fn changes(&self) -> u64 {
        self.changes
    }

    fn search(&mut self, now: Instant, key: u64, dst: Mac) -> Out {
        if is_group(dst) {
            return if is_link_constrained(dst) {
                Out::Drop(DropReason::ReservedGroup)
            } else {
                Out::Flood
            };
        }
        let [.., vlan_low, vlan_high] = key.to_le_bytes();
        let vlan = u16::from_le_bytes([vlan_low, vlan_high]);
        let is_there = |port: &PortId| !self.is_away(*port) && self.is_in_id(*port, vlan);
        let guest = self.guest_with(dst).filter(is_there);
        let guest = guest.map(|port| (port, Instant::MAX));
        let told = || self.told(dst).map(|port| (port, Instant::MAX));
        let found = guest.or_else(told).or_else(|| {
            let entry = self.find(key)?;
            let is_found = is_fresh(entry, now) && is_there(&entry.port);
            is_found.then_some((entry.port, entry.seen + MAC_AGE))
        });
        let Some((port, expiry)) = found else { return Out::Flood };
        self.found.note(now, key, port, expiry);
        Out::Port(port)
    }

    fn check_ip(&mut self, now: Instant, port: PortId, ip: IpAddr16) -> Result<(), DropReason> {
        let Some(guest) = self.guest_mut(port) else { return Ok(()) };
        if guest.uses(now, ip) {
            return Ok(());
        }
        if guest.owns(ip) || guest.needs_no_list(ip) {
            return Ok(());
        }
        if !self.may_use(port, ip) {
            return Err(DropReason::SpoofedIp);
        }
        if let Some(Ips::Learned(learned)) = self.guest_mut(port).map(|guest| &mut guest.ips) {
            learning::learn_ip(learned, now, ip);
        }
        Ok(())
    }

    fn has_list(&self, port: PortId) -> bool {
        self.guest(port).is_some_and(GuestPort::has_list)
    }

    /// Whether `ip` is on the list of `port`, or made of its MAC.
    fn owns_by_list(&self, port: PortId, ip: IpAddr16) -> bool {
        self.guest(port).is_some_and(|guest| guest.owns(ip) || guest.is_own_link_local(ip))
    }

    /// Whether `ip` is on the list of a guest that shares this VLAN, or on any list.
    fn is_listed(&self, ip: IpAddr16, vlan: Option<u16>) -> bool {
        let is_on = |of: u16| {
            let at = self.hasher.hash_one((ip, of));
            self.listed.find(at, |entry| entry.ip == ip && entry.of == of).is_some()
        };
        vlan.map_or_else(|| is_on(LISTS_OF_ALL), |vlan| is_on(vlan) || is_on(LISTS_OF_MANY))
    }

    fn listed_entry(&mut self, ip: IpAddr16, of: u16) -> Entry<'_, Listed> {
        let hasher = &self.hasher;
        self.listed.entry(
            hasher.hash_one((ip, of)),
            |entry| entry.ip == ip && entry.of == of,
            |entry| hasher.hash_one((entry.ip, entry.of)),
        )
    }

    #[inline]
    fn guest(&self, port: PortId) -> Option<&GuestPort> {
        self.guests.get(usize::from(port.0))?.as_ref()
    }

    fn guest_mut(&mut self, port: PortId) -> Option<&mut GuestPort> {
        self.guests.get_mut(usize::from(port.0))?.as_mut()
    }

    /// The guest port that has this MAC, be its guest here or away.
    fn guest_with(&self, mac: Mac) -> Option<PortId> {
        self.find(mac_key(GUEST_VLAN, mac)).map(|entry| entry.port)
    }

    fn bind(&mut self, mac: Mac, port: PortId) {
        self.put(mac_key(GUEST_VLAN, mac), port);
    }

    /// It is at `port` until a later frame or call says otherwise.
    fn put(&mut self, key: u64, port: PortId) {
        self.forget_found();
        let bound = MacEntry { key, port, seen: Instant::ZERO };
        match self.entry(key) {
            Entry::Occupied(mut entry) => *entry.get_mut() = bound,
            Entry::Vacant(entry) => {
                entry.insert(bound);
            }
        }
    }

    fn find(&self, key: u64) -> Option<&MacEntry> {
        self.macs.find(self.hasher.hash_one(key), |entry| entry.key == key)
    }

    fn entry(&mut self, key: u64) -> Entry<'_, MacEntry> {
        let hasher = &self.hasher;
        self.macs.entry(
            hasher.hash_one(key),
            |entry| entry.key == key,
            |entry| hasher.hash_one(entry.key),
        )
    }

    fn forget_found(&mut self) {
        self.found.forget();
        self.changes += 1;
    }

    /// Each MAC is noted as seen when its next frame comes, however lately it was.
    pub(crate) fn note_all_anew(&mut self) {
        self.taught.forget();
        self.changes += 1;
    }

    fn retain_macs(&mut self, keep: impl Fn(&MacEntry) -> bool) {
        self.macs.retain(|entry| keep(entry));
        self.forget_found();
        self.taught.forget();
        self.learned = self.macs.iter().filter(|entry| !is_static_key(entry.key)).count();
    }
}

impl GuestPort {
    /// The IP is the first of its list, or was learned and is used now.
    #[inline]
    fn uses(&mut self, now: Instant, ip: IpAddr16) -> bool {
        match &mut self.ips {
            Ips::Listed(list) => list.first() == Some(&ip),
            Ips::Learned(learned) => {
                let known = learned.iter_mut().find(|(known, _)| *known == ip);
                known.is_some_and(|(_, at)| {
                    *at = now;
                    true
                })
            }
        }
    }

    const fn has_list(&self) -> bool {
        matches!(self.ips, Ips::Listed(_))
    }

    /// Each IP of its list, with the lists among which that counts.
    fn listings(&self) -> impl Iterator<Item = (IpAddr16, u16)> {
        let list: &[IpAddr16] = match &self.ips {
            Ips::Listed(list) => list,
            Ips::Learned(_) => &[],
        };
        let own = self.vlan().unwrap_or(LISTS_OF_MANY);
        list.iter().flat_map(move |ip| [(*ip, LISTS_OF_ALL), (*ip, own)])
    }

    /// The VLAN that it is in and knows nothing of.
    const fn vlan(&self) -> Option<u16> {
        match self.vlans {
            Vlans::Access(vlan) => Some(vlan),
            Vlans::Any | Vlans::Trunk(_) => None,
        }
    }

    fn is_own_link_local(&self, ip: IpAddr16) -> bool {
        self.mac.is_some_and(|mac| claims::link_local_of(mac) == ip)
    }

    /// Sources every host uses before or beside its addresses: 0.0.0.0 (DHCP, RFC 5227 probes),
    /// `::` (DAD, RFC 4862) and IPv6 link-local (fe80::/10). If it has a list, its link-local
    /// address is the one that its MAC makes, and [`Switch::check_claims`] knows what may be said
    /// without an address.
    fn needs_no_list(&self, ip: IpAddr16) -> bool {
        let is_link_local = ip.0[0] == 0xfe && ip.0[1] & 0xc0 == 0x80;
        ip.is_unspecified() || is_link_local && (!self.has_list() || self.is_own_link_local(ip))
    }

    fn owns(&self, ip: IpAddr16) -> bool {
        match &self.ips {
            Ips::Listed(list) => list.binary_search(&ip).is_ok(),
            Ips::Learned(learned) => learned.iter().any(|(known, _)| *known == ip),
        }
    }
}

/// Whether a host can have this address at all (RFC 1122 section 3.2.1.3, RFC 4291 section 2.7).
fn is_host_address(ip: IpAddr16) -> bool {
    !ip.is_multicast() && !ip.is_broadcast() && !ip.to_ip().is_loopback()
}

/// The id of the outer VLAN, with [`SERVICE`] if the tag is one of 802.1ad; 0 without one. Behind a
/// priority tag it is that of the next tag.
fn vlan_id(vlan: VlanStack) -> u16 {
    let outer = vlan.key() >> 32;
    let id = (outer & 0xfff) as u16;
    let is_service = outer >> 16 == u64::from(TPID_8021AD);
    if is_service && id != 0 { id | SERVICE } else { id }
}

fn is_group(mac: Mac) -> bool {
    mac[0] & 1 != 0
}

/// 01:80:c2:00:00:00 to 0f: for this link only, bridges do not forward (IEEE 802.1D table 7-10).
fn is_link_constrained(mac: Mac) -> bool {
    mac[..5] == [0x01, 0x80, 0xc2, 0, 0] && mac[5] <= 0x0f
}

fn mac_key(vlan: u16, mac: Mac) -> u64 {
    // Little-endian, because that is how the bytes lie in a register.
    let [a, b, c, d, e, f] = mac;
    u64::from_le_bytes([a, b, c, d, e, f, 0, 0]) | u64::from(vlan) << 48
}

/// Not learned from frames.
fn is_static_key(key: u64) -> bool {
    [GUEST_VLAN, TOLD_VLAN].map(u64::from).contains(&(key >> 48))
}

fn is_fresh(entry: &MacEntry, now: Instant) -> bool {
    now.since(entry.seen) < MAC_AGE
}

#[cfg(test)]
mod tests;
