//! The registry: the stations of an overlay and the host of each.
//!
//! # Short primer
//!
//! A *host* is a daemon on a VNI, known by its overlay address. A *station* is a VM's network card:
//! a MAC on a VNI, with its IPs, at a host. Every daemon announces its own stations
//! ([`Registry::claim`], [`Registry::join`]) and receives those of others ([`Registry::poll`]). A
//! MAC has one host at a time, on one VNI: a later claim waits until the holder releases the MAC or
//! is gone.
//!
//! Two back-ends: [`listed`], a list written by an operator; [`etcd`], for hosts that find each
//! other.
//!
//! 1. Messages are states, not events: the last message about a key holds, and one that was not yet
//!    taken is replaced by the next (`mail`). So the number of keys bounds all memory, and neither
//!    side waits for the other.
//! 2. While the back-end does not answer, the known stations stay, and claims wait.
//! 3. The caller receives stations of other hosts only; its own come back as [`News::Claim`].
#![forbid(unsafe_code)]

pub mod etcd;
pub mod listed;
pub mod mail;
pub mod tls;

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::BorrowedFd;

/// A MAC address.
pub type Mac = [u8; 6];

/// Most ports in a station's [`Listeners`].
pub const LISTENERS_MAX: usize = 64;

/// Most stations that a registry reports ([`News::LeftOut`] counts the rest). An overlay's table
/// has 65,536 places; the others are for stations of this host.
pub const STATIONS_MAX: usize = 60_000;

/// The lowest address in `IpAddr`'s order.
pub const FIRST_ADDRESS: IpAddr = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
/// The highest address in `IpAddr`'s order.
pub const LAST_ADDRESS: IpAddr = IpAddr::V6(Ipv6Addr::from_bits(u128::MAX));

/// A VM's network card on an overlay.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Station {
    /// The overlay's number.
    pub vni: u32,
    /// Unique on that overlay.
    pub mac: Mac,
    /// The VM's name at its host; empty if unknown.
    pub vm: String,
    /// Its known addresses.
    pub ips: Vec<IpAddr>,
    /// The overlay address of its host.
    pub host: IpAddr,
    /// Listeners of the virtual TOE, some time ago; `None`: unknown. They are shown to operators
    /// and decide nothing: a connection request looks up the listener itself.
    pub listeners: Option<Listeners>,
}

/// Ports at which a VM's programs listen by the virtual TOE.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Listeners {
    /// The lowest [`LISTENERS_MAX`] of them, in order.
    pub ports: Vec<u16>,
    /// Ports beyond those.
    pub more: u32,
}

impl Listeners {
    /// Listeners at `ports`, which are in order, and at `more` ports that are not in it.
    #[must_use]
    pub fn new(ports: impl IntoIterator<Item = u16>, more: u32) -> Self {
        let mut ports: Vec<_> = ports.into_iter().collect();
        ports.sort_unstable();
        ports.dedup();
        let unnamed = ports.len().saturating_sub(LISTENERS_MAX);
        ports.truncate(LISTENERS_MAX);
        // There are 65,535 ports.
        let more = more.saturating_add(u32::try_from(unnamed).unwrap_or(u32::MAX));
        Self { ports, more: more.min(u16::MAX.into()) }
    }
}

/// A daemon on an overlay.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Host {
    /// The overlay's number.
    pub vni: u32,
    /// Its overlay address, by which it is known.
    pub address: IpAddr,
    /// The UDP port that it listens at.
    pub port: u16,
}

/// State of a claim.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Claim {
    /// The station is known to be here.
    Held,
    /// Not decided yet: the registry does not answer.
    Waits,
    /// An operator's list does not have it: it is here, and may be elsewhere as well.
    Unlisted,
    /// Another host has the station: this one waits for its release.
    Refused(IpAddr),
    /// The station is known to be here, and this other host claims it too.
    Contested(IpAddr),
}

/// A change that [`Registry::poll`] reports.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum News {
    /// A station of another host: added, moved, changed or removed.
    Station {
        /// The overlay's number.
        vni: u32,
        /// The station's MAC.
        mac: Mac,
        /// Its state now; `None`: it is gone.
        now: Option<Station>,
    },
    /// Another host.
    Host {
        /// The overlay's number.
        vni: u32,
        /// The host's overlay address.
        address: IpAddr,
        /// Its state now; `None`: it is gone.
        now: Option<Host>,
    },
    /// State of an own claim.
    Claim {
        /// The overlay's number.
        vni: u32,
        /// The station's MAC.
        mac: Mac,
        /// Its state now.
        now: Claim,
    },
    /// Number of stations that are not reported, because there are [`STATIONS_MAX`] others.
    LeftOut(usize),
    /// Whether the registry answers; `Err` has the reason.
    Link(Result<(), String>),
}

/// Announces stations of this host and reports those of others. No method blocks.
pub trait Registry: fmt::Debug + Send {
    /// Name of the back-end, for operators.
    fn kind(&self) -> &'static str;

    /// Whether claims are written where all hosts read them, so that each has a price.
    fn is_shared(&self) -> bool;

    /// Readable as long as [`Self::poll`] has something.
    fn fd(&self) -> BorrowedFd<'_>;

    /// Announces this host on the overlay `host.vni`.
    fn join(&mut self, host: Host);

    /// Withdraws this host from that overlay.
    fn leave(&mut self, vni: u32);

    /// Claims a station for this host, or updates its addresses or listeners.
    fn claim(&mut self, station: Station);

    /// Releases a station of this host.
    fn release(&mut self, vni: u32, mac: Mac);

    /// Replaces the operator's list. Registries without a list ignore it.
    fn set_list(&mut self, list: Vec<Station>) {
        let _ = list;
    }

    /// The next change; to be called until there is none.
    #[must_use]
    fn poll(&mut self) -> Option<News>;
}

/// The MAC as text: `52:54:00:00:00:01`.
#[must_use]
pub fn mac_text(mac: Mac) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}
