//! Who is where: which stations there are on an overlay, and behind which host.
//!
//! # Short primer
//!
//! A *host* is a daemon on a VNI, known by its overlay address. A *station* is a VM's network card:
//! a MAC on a VNI, with its IPs, at a host. Every daemon says what it has ([`Registry::claim`],
//! [`Registry::join`]) and hears what others have ([`Registry::poll`]). A MAC has one host at a
//! time, on one VNI: who claims it later waits until the holder gives it up, or is gone.
//!
//! Two back-ends: [`listed`], a list that an operator wrote; [`etcd`], for hosts that find each
//! other.
//!
//! 1. What is said and heard are states, not events: the last word about a key holds, and a word
//!    that was not yet taken is replaced by the next (`mail`). So everything is bounded by the
//!    number of keys, and neither side waits for the other.
//! 2. While the back-end is away, what was heard stays, and claims wait.
//! 3. The caller hears only of others: its own stations come back as [`News::Claim`].
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

/// Most ports of a station's [`Listeners`] that are told.
pub const LISTENERS_MAX: usize = 64;

/// Most stations that a registry tells of; how many more there are is news. An overlay's table has
/// 65,536 places, the others of which are for stations of this host.
pub const STATIONS_MAX: usize = 60_000;

/// Of all addresses, in their order.
pub const FIRST_ADDRESS: IpAddr = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
/// Likewise.
pub const LAST_ADDRESS: IpAddr = IpAddr::V6(Ipv6Addr::from_bits(u128::MAX));

/// A VM's network card on an overlay.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Station {
    /// The overlay's number.
    pub vni: u32,
    /// On that overlay there is no other with it.
    pub mac: Mac,
    /// What its host calls it; empty if nobody has said.
    pub vm: String,
    /// Its addresses, as far as they are known.
    pub ips: Vec<IpAddr>,
    /// The overlay address of the host that it is on.
    pub host: IpAddr,
    /// Who listens there by the virtual TOE, some time ago; `None`: nobody has said. It is for
    /// people, and decides nothing: a connection's own request asks who listens now.
    pub listeners: Option<Listeners>,
}

/// Ports at which a VM's programs listen by the virtual TOE.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Listeners {
    /// The lowest [`LISTENERS_MAX`] of them, in order.
    pub ports: Vec<u16>,
    /// So many ports more.
    pub more: u32,
}

impl Listeners {
    /// These ports, in order, and so many more that are not named.
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

/// What has become of a claim.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Claim {
    /// The station is known to be here.
    Held,
    /// It is not known yet whether it can be: the registry does not answer.
    Waits,
    /// An operator's list does not have it: it is here, and may be elsewhere as well.
    Unlisted,
    /// It is another host's: this one waits for it to be given up.
    Refused(IpAddr),
    /// It is known to be here, and this other host claims it too.
    Contested(IpAddr),
}

/// What is new.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum News {
    /// A station of another host: it has come, moved or changed; `None`: it is gone.
    Station {
        /// The overlay's number.
        vni: u32,
        /// Whose.
        mac: Mac,
        /// As it is now.
        now: Option<Station>,
    },
    /// Another host.
    Host {
        /// The overlay's number.
        vni: u32,
        /// Whose.
        address: IpAddr,
        /// As it is now.
        now: Option<Host>,
    },
    /// What has become of an own claim.
    Claim {
        /// The overlay's number.
        vni: u32,
        /// Whose.
        mac: Mac,
        /// This.
        now: Claim,
    },
    /// So many stations are not told of, because there are [`STATIONS_MAX`] others.
    LeftOut(usize),
    /// Whether the registry answers: `Err` says what is wrong.
    Link(Result<(), String>),
}

/// Where to say what this host has, and hear what others have. Nothing here waits.
pub trait Registry: fmt::Debug + Send {
    /// What it is, for operators.
    fn kind(&self) -> &'static str;

    /// Whether claims are written where all hosts read them, so that each has a price.
    fn is_shared(&self) -> bool;

    /// Readable as long as [`Self::poll`] has something.
    fn fd(&self) -> BorrowedFd<'_>;

    /// This host is on the overlay `host.vni`, from now on.
    fn join(&mut self, host: Host);

    /// This host is no longer on that overlay.
    fn leave(&mut self, vni: u32);

    /// The station is here, from now on or with other addresses or listeners.
    fn claim(&mut self, station: Station);

    /// The station is no longer here.
    fn release(&mut self, vni: u32, mac: Mac);

    /// An operator's list is another now. Registries without one have nothing to do.
    fn set_list(&mut self, list: Vec<Station>) {
        let _ = list;
    }

    /// Something new; to be called until there is nothing.
    #[must_use]
    fn poll(&mut self) -> Option<News>;
}

/// As people write it: `52:54:00:00:00:01`.
#[must_use]
pub fn mac_text(mac: Mac) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}
