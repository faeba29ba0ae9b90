//! Ports of the switch: their names, kinds and policy.

use core::net::IpAddr;

use crate::congestion::Algorithm;

/// The operator's word on the connections of a VM.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Local {
    /// H finds out which end in the guest.
    #[default]
    Auto,
    /// All of them end in the guest.
    Always,
    /// None does: the guest is a router.
    Never,
}

impl Local {
    /// Every value.
    pub const ALL: [Self; 3] = [Self::Auto, Self::Always, Self::Never];

    /// The name in the configuration.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Always => "always",
            Self::Never => "never",
        }
    }
}

/// A port of the switch. Stable until the port is removed; then reused.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct PortId(pub u16);

/// The frames that a port's peer accepts *now* (it may change by driver reset or
/// CTRL_GUEST_OFFLOADS; COM-17).
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct PortFeatures {
    /// Partial checksums may be handed over.
    pub csum: bool,
    /// IPv4 TCP super-segments may be handed over.
    pub tso4: bool,
    /// IPv6 TCP super-segments may be handed over.
    pub tso6: bool,
    /// Super-segments may carry CWR.
    pub ecn: bool,
    /// Super-segments of UDP may be handed over (USO). No port of the switch offers them; those of
    /// a wire do.
    pub uso: bool,
}

impl PortFeatures {
    /// Takes everything, as the kernel's half of a tap does.
    pub const ALL: Self = Self { csum: true, tso4: true, tso6: true, ecn: true, uso: true };
}

/// A port to add.
#[derive(Clone, Debug)]
pub struct PortConfig {
    /// Unique name: in metrics, in the CLI, and the identity of a VM across daemon restarts.
    pub name: String,
    /// The peer behind it.
    pub kind: PortKind,
    /// Frames go from port to port of one network. The first has no name.
    pub network: String,
    /// Its network is a wire between two ports, a VM's and an uplink: each frame that enters at one
    /// leaves at the other, and no switch is asked.
    pub wire: bool,
}

/// The peer behind a port.
#[derive(Clone, Debug)]
pub enum PortKind {
    /// The network. The sources of its frames are believed.
    Uplink {
        /// The source of frames that leave there in no guest's name: an address of the host that
        /// no guest has (LIFE-07). `None`: they have the guest's.
        mac: Option<[u8; 6]>,
    },
    /// One VM.
    Guest(GuestConfig),
}

/// The policy for one VM.
#[derive(Clone, Debug, Default)]
pub struct GuestConfig {
    /// Anti-spoof: the only source MAC allowed. `None` learns the first one seen.
    pub mac: Option<[u8; 6]>,
    /// Anti-spoof: the only source IPs allowed. `None` learns (COM-11).
    pub ips: Option<Vec<IpAddr>>,
    /// The VLANs that it is in.
    pub vlans: Vlans,
    /// It reaches no other VM of this switch and none reaches it: only uplinks.
    pub isolated: bool,
    /// It may use any MAC that is no other guest's, and stations may be behind it: it is a router,
    /// a bridge, or has guests of its own.
    pub trusted: bool,
    /// Ack offload wanted.
    pub ack_offload: bool,
    /// Which of its connections end in the guest.
    pub local: Local,
    /// The TTL or hop limit of the guest's own packets, if it is none of 64, 128 and 255.
    pub guest_ttl: Option<u8>,
    /// Congestion offload wanted, for connections that have ack offload.
    pub congestion_offload: bool,
    /// The congestion control by which the host sends for the guest.
    pub congestion_control: Algorithm,
    /// Most bytes this VM's flows may hold and promise together (INV-06).
    pub budget_bytes: u64,
    /// Most flow entries this VM may have (LIFE-01).
    pub flows_max: u32,
    /// Largest IP packet the guest takes, bytes (virtio-net MTU); 0 is Ethernet's 1500.
    pub mtu: u16,
}

/// Which VLANs (IEEE 802.1Q) a VM is in.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub enum Vlans {
    /// Any: its frames pass unchanged, with whatever tags.
    #[default]
    Any,
    /// One, unknown to the guest: the switch sees its frames with this tag, the guest without
    /// ([`wire::vlan`](crate::wire::vlan)).
    Access(u16),
    /// These: its frames have the tag of one of them.
    Trunk(Vec<u16>),
}

impl PortConfig {
    /// A port to the network.
    pub fn uplink(name: impl Into<String>) -> Self {
        let kind = PortKind::Uplink { mac: None };
        Self { name: name.into(), kind, network: String::new(), wire: false }
    }

    /// The same uplink, behind which this address is the host's.
    #[must_use]
    pub fn with_mac(mut self, address: [u8; 6]) -> Self {
        if let PortKind::Uplink { mac } = &mut self.kind {
            *mac = Some(address);
        }
        self
    }

    /// The port of a VM.
    pub fn guest(name: impl Into<String>, config: GuestConfig) -> Self {
        let kind = PortKind::Guest(config);
        Self { name: name.into(), kind, network: String::new(), wire: false }
    }

    /// The same port in another network.
    #[must_use]
    pub fn in_network(self, network: impl Into<String>) -> Self {
        Self { network: network.into(), ..self }
    }

    /// The same port at an end of the wire of this name.
    #[must_use]
    pub fn on_wire(self, name: impl Into<String>) -> Self {
        Self { wire: true, ..self.in_network(name) }
    }

    /// The host's own address behind an uplink.
    #[must_use]
    pub const fn host_mac(&self) -> Option<[u8; 6]> {
        match self.kind {
            PortKind::Uplink { mac } => mac,
            PortKind::Guest(_) => None,
        }
    }

    /// The VM's policy, if one is behind the port.
    #[must_use]
    pub const fn as_guest(&self) -> Option<&GuestConfig> {
        match &self.kind {
            PortKind::Uplink { .. } => None,
            PortKind::Guest(guest) => Some(guest),
        }
    }

    /// Whether a VM is behind the port.
    #[must_use]
    pub const fn is_guest(&self) -> bool {
        matches!(self.kind, PortKind::Guest(_))
    }
}
