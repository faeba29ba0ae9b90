//! The overlay: one Ethernet over many hosts, by VXLAN (RFC 7348).
//!
//! # Theory of operation
//!
//! An overlay is a port of the switch like an uplink, with many stations behind it. The switch
//! knows that a station is behind this port; the [`Overlay`] knows behind which peer. So frames of
//! the overlay go the way of all frames, with ack offload and congestion offload, and no other part
//! knows of tunnels. A frame from one peer never goes to another (split horizon): the switch sends
//! no frame out of the port by which it came in.
//!
//! **Out.** [`Overlay::handle_frame`] chooses the receivers: the peer of the destination, or all
//! peers if the destination is a group or not known (head-end replication). [`Datagrams`] makes the
//! datagrams: TCP is cut to the inner MTU, checksums are finished. The source port of the outer UDP
//! header distinguishes flows for networks that spread them over links; the outer ECN field is the
//! inner one ([`ecn`]).
//!
//! **In.** [`Overlay::handle_datagram`] takes a frame of its own network from a known peer, learns
//! that its sender is there, and combines the marks of both headers. `arrival` decides how far a
//! checksum from a virtual link is trusted.
//!
//! **Told stations.** [`Overlay::tell_station`] sets the peer and the addresses of a station, from
//! a source that outranks frames (a registry). This host answers requests for such an address
//! ([`Overlay::answer`]), and sends them to no peer.
//!
//! **Too long packets.** The overlay's width toward a peer is the narrowest part of the path. A
//! narrow path is found by probes that peers of our kind answer ([`Overlay::poll_probe`]). One
//! that was noticed otherwise ([`Overlay::note_narrow`]) counts for [`PATH_MTU_AGE`] and for that
//! peer. TCP is cut to it, in broadcast frames too. Other broadcast packets go whole to the peers
//! whose paths take them. The sender of a packet that is too long for a peer is told
//! ([`Overlay::complain`]).
//!
//! A station that moves from one host to another is found with its first frame from there, which a
//! VMM or a guest sends after a migration (gratuitous ARP, RARP).

mod answers;
mod arrival;
mod datagrams;
pub mod ecn;
mod probe;
mod stations;
mod too_long;

use core::net::IpAddr;
use core::ops::RangeInclusive;

use ahash::RandomState;

use self::answers::Addresses;
pub use self::datagrams::{Batch, Datagrams};
use self::ecn::Ecn;
pub use self::probe::PROBE_BASE;
use self::probe::{Probe, Probes};
use self::stations::Stations;
use crate::bucket::Bucket;
use crate::drops::DropReason;
use crate::limits::{PATH_MTU_AGE, TOO_LONG_BURST, TOO_LONG_INTERVAL, TOO_LONG_SENDERS};
use crate::port::PortId;
use crate::switch::Mac;
use crate::time::Instant;
use crate::wire::packet::{Ip, IpAddr16, L4, Net, Packet};
use crate::wire::virtio_net::VirtioNetHdr;
use crate::wire::vxlan;

/// Source ports of outer headers (RFC 7348 section 5).
pub const SOURCE_PORTS: RangeInclusive<u16> = 49_152..=65_535;

/// Bytes of headers that the tunnel puts before an inner IP packet, between hosts with addresses
/// like `local`: IP, UDP, VXLAN and the inner Ethernet header.
#[must_use]
pub const fn overhead(local: IpAddr) -> u16 {
    match local {
        IpAddr::V4(_) => 20 + 8 + 8 + 14,
        IpAddr::V6(_) => 40 + 8 + 8 + 14,
    }
}

/// Another host of the overlay, by its place in [`OverlayConfig::peers`].
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct PeerId(pub u16);

/// An overlay.
#[derive(Clone, Debug)]
pub struct OverlayConfig {
    /// Its number, up to [`vxlan::VNI_MAX`].
    pub vni: u32,
    /// The other hosts.
    pub peers: Vec<IpAddr>,
    /// Bytes of the longest IP packet on it: the size that the path between hosts takes, minus the
    /// headers of the tunnel.
    pub mtu: u16,
    /// Unpredictable to guests and peers.
    pub hash_seeds: [u64; 4],
}

/// The receivers of a frame.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum To {
    /// This peer.
    Peer(PeerId),
    /// All of them, a copy each.
    All,
}

/// The receivers of a frame, and the values of its outer headers.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Route {
    /// The receivers.
    pub to: To,
    /// Alike for all frames of a flow: chooses the source port of the outer UDP header.
    pub flow_hash: u64,
    /// The outer ECN field.
    pub ecn: Ecn,
}

/// See the module doc.
#[derive(Debug)]
pub struct Overlay {
    vni: u32,
    mtu: u16,
    /// Sorted by address.
    peers: Vec<(IpAddr16, PeerId)>,
    /// Peers whose path takes less than `mtu`, and how long that counts.
    narrow: Vec<(PeerId, u16, Instant)>,
    probes: Probes,
    /// Makes the number of the next probe another one.
    probed: u64,
    /// By the hash of the sender that is told, so that no sender takes all errors from the others.
    complaints: Box<[Bucket]>,
    stations: Stations,
    /// Addresses of stations that were told.
    addresses: Addresses,
    hasher: RandomState,
}

impl Overlay {
    /// An overlay without known stations.
    #[must_use]
    pub fn new(config: &OverlayConfig) -> Self {
        let [a, b, c, d] = config.hash_seeds;
        let hasher = RandomState::with_seeds(a, b, c, d);
        let (peers, stations) = (numbered(&config.peers), Stations::new(hasher.clone()));
        Self {
            vni: config.vni,
            mtu: config.mtu,
            peers,
            narrow: Vec::new(),
            probes: Probes::default(),
            probed: 0,
            complaints: [Bucket::new(TOO_LONG_BURST, TOO_LONG_INTERVAL); TOO_LONG_SENDERS].into(),
            stations,
            addresses: Addresses::default(),
            hasher,
        }
    }

    /// Bytes of the longest IP packet that leaves for this peer, or for all.
    #[must_use]
    pub fn mtu(&self, now: Instant, to: To) -> u16 {
        let counts = |(peer, _, until): &&(PeerId, u16, Instant)| {
            now < *until && (to == To::All || to == To::Peer(*peer))
        };
        let peer = if let To::Peer(peer) = to { Some(peer) } else { None };
        let said = self.narrow.iter().filter(counts).map(|(_, mtu, _)| *mtu);
        said.chain(self.probes.narrow(peer)).min().unwrap_or(self.mtu)
    }

    /// The peer that has this address.
    #[must_use]
    pub fn peer(&self, ip: IpAddr) -> Option<PeerId> {
        let ip = IpAddr16::from(ip);
        let at = self.peers.binary_search_by_key(&ip, |(ip, _)| *ip).ok()?;
        Some(self.peers[at].1)
    }

    /// Takes a datagram of a peer, with this ECN field in its outer header. Returns the frame in
    /// it, and the state of its checksum.
    ///
    /// # Errors
    /// Why it is dropped.
    pub fn handle_datagram<'d>(
        &mut self,
        now: Instant,
        from: PeerId,
        outer: Ecn,
        datagram: &'d mut [u8],
    ) -> Result<(VirtioNetHdr, &'d mut [u8]), DropReason> {
        if vxlan::parse(datagram)? != self.vni {
            return Err(DropReason::UnknownVni);
        }
        let frame = &mut datagram[vxlan::LEN..];
        let packet = Packet::parse(frame)?;
        self.stations.learn(now, packet.eth.src, from)?;
        let inner = Ecn::of(&packet);
        let ecn = inner.decapsulated(outer).ok_or(DropReason::EcnMismatch)?;
        if let Net::Ip(ip) = &packet.net
            && ecn != inner
        {
            ecn.put(frame, ip);
        }
        Ok((arrival::marks(frame, &packet, self.mtu), frame))
    }

    /// A frame is to leave by the overlay: where it goes, and the datagrams that it becomes.
    ///
    /// # Errors
    /// Why it cannot.
    pub fn handle_frame<'f>(
        &mut self,
        now: Instant,
        hdr: &VirtioNetHdr,
        frame: &'f [u8],
    ) -> Result<(Route, Datagrams<'f>), DropReason> {
        let packet = Packet::parse(frame)?;
        let to = self.stations.find(now, packet.eth.dst).map_or(To::All, To::Peer);
        let route = Route { to, flow_hash: self.flow_hash(frame, &packet), ecn: Ecn::of(&packet) };
        let header = vxlan::emit(self.vni);
        // A packet that cannot be cut goes to all peers whose path takes it.
        let is_whole = to == To::All && packet.tcp().is_none();
        let mtu = if is_whole { self.mtu } else { self.mtu(now, to) };
        Ok((route, Datagrams::new(header, hdr, frame, &packet, mtu)?))
    }

    /// A frame was dropped as too long: the error for its sender, as a frame that comes in. `None`:
    /// there is none, because the frame was not for a station that is known to be behind a peer,
    /// forbids errors, or too many were sent.
    #[must_use]
    pub fn complain(&mut self, now: Instant, frame: &[u8]) -> Option<Vec<u8>> {
        let packet = Packet::parse(frame).ok()?;
        let peer = self.stations.find(now, packet.eth.dst)?;
        let error = too_long::error(frame, &packet, self.mtu(now, To::Peer(peer)))?;
        let sender = self.hasher.hash_one(packet.eth.src) % TOO_LONG_SENDERS as u64;
        let bucket = &mut self.complaints[usize::try_from(sender).unwrap_or(0)];
        bucket.allows(now).then_some(error)
    }

    /// Sets another MTU, for all peers; the known MTUs of paths are forgotten.
    pub fn set_mtu(&mut self, mtu: u16) {
        self.mtu = mtu;
        self.narrow.clear();
        self.probes.clear();
    }

    /// The path to `peer` takes no longer IP packets than this, for [`PATH_MTU_AGE`] from now on.
    pub fn note_narrow(&mut self, now: Instant, peer: PeerId, mtu: u16) {
        self.narrow.retain(|(known, ..)| *known != peer);
        self.narrow.push((peer, mtu, now + PATH_MTU_AGE));
    }

    /// A frame leaves for `peer`, and it is time to look at its path: [`Self::poll_probe`].
    #[must_use]
    pub fn is_probe_due(&self, now: Instant, peer: PeerId) -> bool {
        self.probes.is_due(now, peer)
    }

    /// The datagram that leaves beside a frame for `peer` to find out what the path takes, if it is
    /// time for one.
    #[must_use]
    pub fn poll_probe(&mut self, now: Instant, peer: PeerId) -> Option<Vec<u8>> {
        let Self { hasher, probed, .. } = self;
        let nonce = || {
            *probed += 1;
            hasher.hash_one((*probed, peer.0))
        };
        let frame = self.probes.poll(now, peer, self.mtu, nonce)?;
        Some([&vxlan::emit(self.vni)[..], &frame].concat())
    }

    /// The last probe for `peer` has not left, because the kernel had no room for it: it does not
    /// count as lost.
    pub fn handle_unsent_probe(&mut self, peer: PeerId) {
        self.probes.handle_unsent(peer);
    }

    /// A datagram of a peer is a probe, or answers one: it is for [`Self::handle_probe`].
    #[must_use]
    pub fn is_probe(datagram: &[u8]) -> bool {
        datagram.get(vxlan::LEN..).is_some_and(|frame| Probe::parse(frame).is_some())
    }

    /// Takes a datagram of a peer if it is a probe, or answers one; then [`Self::handle_datagram`]
    /// need not. Returns the datagram that answers it, if any; `None`: it is something else.
    pub fn handle_probe(
        &mut self,
        now: Instant,
        from: PeerId,
        datagram: &[u8],
    ) -> Option<Option<Vec<u8>>> {
        let probe = Probe::parse(datagram.get(vxlan::LEN..)?)?;
        if vxlan::parse(datagram) != Ok(self.vni) {
            return None;
        }
        self.probes.handle_answer(now, from, probe, self.mtu);
        let answer = probe.answer();
        Some(answer.map(|frame| [&vxlan::emit(self.vni)[..], &frame].concat()))
    }

    /// Somebody says that the path to `peer` is narrow. `true`: the peer answers probes, so that
    /// one of these will show it.
    pub fn suspect(&mut self, now: Instant, peer: PeerId) -> bool {
        self.probes.suspect(now, peer)
    }

    /// Sets other peers. Stations stay behind the peers that stay. A station behind another peer
    /// has to be heard, or told, again; until then frames for it go to all peers.
    pub fn set_peers(&mut self, peers: &[IpAddr]) {
        let before = core::mem::replace(&mut self.peers, numbered(peers));
        let now = &self.peers;
        let place = |was| {
            let (ip, _) = before.iter().find(|(_, id)| *id == was)?;
            now.binary_search_by_key(ip, |(ip, _)| *ip).ok().map(|at| now[at].1)
        };
        let narrow = self.narrow.iter();
        let narrow = narrow.filter_map(|(was, mtu, until)| Some((place(*was)?, *mtu, *until)));
        self.narrow = narrow.collect();
        self.probes.renumber(place);
        // As a rule one has come behind the others.
        if before.iter().any(|(_, id)| place(*id) != Some(*id)) {
            self.stations.renumber(place);
        }
    }

    /// From now on the station `mac` is behind `peer`, whatever frames say, and has these
    /// addresses. `false`: [`TOLD_MAX`](crate::limits::TOLD_MAX) others were told, and frames
    /// teach it.
    pub fn tell_station(&mut self, mac: Mac, peer: PeerId, ips: &[IpAddr]) -> bool {
        let is_told = self.stations.tell(mac, peer);
        if is_told {
            self.addresses.set(mac, ips);
        }
        is_told
    }

    /// From now on the station `mac` is on this host: frames of peers that are from it are not.
    pub fn tell_here(&mut self, mac: Mac) {
        self.stations.tell_here(mac);
        self.addresses.set(mac, &[]); // it answers itself
    }

    /// The station `mac` is no longer told; from now on frames teach its place.
    pub fn forget_station(&mut self, mac: Mac) {
        self.stations.forget(mac);
        self.addresses.set(mac, &[]);
    }

    /// The station of this host behind `port` has these addresses from now on, and no others:
    /// requests for them are not answered.
    pub fn set_own_ips(&mut self, port: PortId, ips: &[IpAddr]) {
        self.addresses.set_here(port, ips);
    }

    /// The answer to a frame that asks for the MAC of a station that was told (ARP, neighbour
    /// solicitation), as that station would give it. `None`: it asks nothing, or the station itself
    /// must be asked.
    #[must_use]
    pub fn answer(&self, frame: &[u8]) -> Option<Vec<u8>> {
        // Requests are broadcast, or go to a group of IPv6 neighbours.
        if self.addresses.is_empty() || frame.first().is_none_or(|first| first & 1 == 0) {
            return None;
        }
        self.addresses.answer(frame)
    }

    /// A hash of the fields that name a flow: addresses and ports. Fragments have no ports, so that
    /// all fragments of a packet keep their order; frames that are not IP have MACs.
    fn flow_hash(&self, frame: &[u8], packet: &Packet) -> u64 {
        match &packet.net {
            Net::Ip(ip) => self.hasher.hash_one((ip.src, ip.dst, ip.protocol, ports(frame, ip))),
            Net::Arp(_) | Net::Other => self.hasher.hash_one((packet.eth.src, packet.eth.dst)),
        }
    }
}

/// Peers and their places, sorted by address.
fn numbered(peers: &[IpAddr]) -> Vec<(IpAddr16, PeerId)> {
    let peers = peers.iter().map(|&ip| IpAddr16::from(ip));
    let mut peers: Vec<_> = peers.zip((0..).map(PeerId)).collect();
    peers.sort_unstable();
    peers
}

/// Both ports of TCP or UDP, which have them at the same place.
fn ports(frame: &[u8], ip: &Ip) -> [u8; 4] {
    let l4 = frame.get(usize::from(ip.payload_offset)..ip.end as usize).unwrap_or_default();
    match (&ip.l4, l4.first_chunk()) {
        (L4::Tcp(_) | L4::Udp, Some(ports)) => *ports,
        _ => [0; 4],
    }
}

#[cfg(test)]
mod tests;
