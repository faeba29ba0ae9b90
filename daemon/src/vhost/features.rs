//! The device's offers: virtio feature bits, protocol features, and the configuration space.

use nightporter_core::limits::MTU_DEFAULT;
use nightporter_core::port::PortFeatures;
use nightporter_core::wire::virtio_net::VirtioNetHdr;
use vhost::vhost_user::message::VhostUserProtocolFeatures as Protocol;

use super::device::Device;
use super::queue::{Layout, Queue};
use super::ring::RingFeatures;

/// Bit numbers of virtio 1.2 sections 5.1.3 and 6, as masks.
pub mod bit {
    /// VIRTIO_NET_F_CSUM: the guest may hand over partial checksums.
    pub const CSUM: u64 = 1 << 0;
    /// VIRTIO_NET_F_GUEST_CSUM: we may.
    pub const GUEST_CSUM: u64 = 1 << 1;
    /// VIRTIO_NET_F_MTU: the configuration space has the largest MTU.
    pub const MTU: u64 = 1 << 3;
    /// VIRTIO_NET_F_MAC: the configuration space has the MAC.
    pub const MAC: u64 = 1 << 5;
    /// VIRTIO_NET_F_GUEST_TSO4: we may hand over IPv4 super-segments.
    pub const GUEST_TSO4: u64 = 1 << 7;
    /// VIRTIO_NET_F_GUEST_TSO6: IPv6 ones.
    pub const GUEST_TSO6: u64 = 1 << 8;
    /// VIRTIO_NET_F_GUEST_ECN: and with CWR.
    pub const GUEST_ECN: u64 = 1 << 9;
    /// VIRTIO_NET_F_HOST_TSO4: the guest may hand over IPv4 super-segments.
    pub const HOST_TSO4: u64 = 1 << 11;
    /// VIRTIO_NET_F_HOST_TSO6: IPv6 ones.
    pub const HOST_TSO6: u64 = 1 << 12;
    /// VIRTIO_NET_F_HOST_ECN: and with CWR.
    pub const HOST_ECN: u64 = 1 << 13;
    /// VIRTIO_NET_F_MRG_RXBUF: a frame to the guest may take several buffers.
    pub const MRG_RXBUF: u64 = 1 << 15;
    /// VIRTIO_NET_F_STATUS: the configuration space has the state of the link.
    pub const STATUS: u64 = 1 << 16;
    /// VIRTIO_NET_F_MQ: several queue pairs.
    pub const MQ: u64 = 1 << 22;
    /// VHOST_F_LOG_ALL: writes to guest memory are to be logged. Not the driver's, and no transport
    /// feature.
    pub const LOG_ALL: u64 = 1 << 26;
    /// VIRTIO_F_INDIRECT_DESC.
    pub const INDIRECT_DESC: u64 = 1 << 28;
    /// VIRTIO_F_EVENT_IDX.
    pub const EVENT_IDX: u64 = 1 << 29;
    /// VHOST_USER_F_PROTOCOL_FEATURES.
    pub const PROTOCOL_FEATURES: u64 = 1 << 30;
    /// VIRTIO_F_VERSION_1.
    pub const VERSION_1: u64 = 1 << 32;
}

/// The offer for every front-end.
const ALWAYS: u64 = bit::CSUM
    | bit::GUEST_CSUM
    | bit::GUEST_TSO4
    | bit::GUEST_TSO6
    | bit::GUEST_ECN
    | bit::HOST_TSO4
    | bit::HOST_TSO6
    | bit::HOST_ECN
    | bit::MRG_RXBUF
    | bit::STATUS
    | bit::INDIRECT_DESC
    | bit::EVENT_IDX
    | bit::PROTOCOL_FEATURES
    | bit::VERSION_1;

/// The protocol features we serve.
///
/// BACKEND_REQ is there because UML 6.1 has no interrupt without it; we never send a request.
/// Nothing is there that would make us need the guest's page tables, and no postcopy.
const PROTOCOL: Protocol = Protocol::MQ
    .union(Protocol::RARP)
    .union(Protocol::LOG_SHMFD)
    .union(Protocol::REPLY_ACK)
    .union(Protocol::MTU)
    .union(Protocol::BACKEND_REQ)
    .union(Protocol::CONFIG)
    .union(Protocol::INFLIGHT_SHMFD)
    .union(Protocol::RESET_DEVICE)
    .union(Protocol::CONFIGURE_MEM_SLOTS)
    .union(Protocol::STATUS);

/// VIRTIO_NET_S_LINK_UP in the configuration space's `status`.
const LINK_UP: u16 = 1;
/// Smallest MTU of IPv4 (RFC 791) and of the specification.
pub const MTU_MIN: u16 = 68;
/// Length of `struct virtio_net_config` as of virtio 1.2.
const CONFIG_LEN: usize = 24;

/// The offer of a port: fixed when it is made.
#[derive(Clone, Copy, Debug)]
pub struct Offer {
    /// The MAC to tell a guest that asks us (UML, `virtio_user`; QEMU tells its guests its own).
    pub mac: Option<[u8; 6]>,
    /// The largest MTU, likewise.
    pub mtu: Option<u16>,
    /// Queue pairs.
    pub queue_pairs: u16,
}

impl Device for Offer {
    type Queue = Queue;

    /// Two for each pair.
    fn queues(&self) -> usize {
        2 * usize::from(self.queue_pairs)
    }

    fn queue_num(&self) -> u64 {
        self.queue_pairs.into()
    }

    /// The virtio features for a front-end that has negotiated `protocol`.
    ///
    /// MQ and MTU depend on it. MQ without the control queue fails Linux's probe, and the control
    /// queue is the front-end's business: QEMU has one and negotiates the MQ protocol feature, UML
    /// hands every queue to us and does not. GUEST_ANNOUNCE needs the control queue as well and is
    /// left out; SEND_RARP does its job. LOG_ALL is nothing without the log's memory.
    fn features(&self, protocol: Protocol) -> u64 {
        let mut features = ALWAYS;
        if self.mac.is_some() {
            features |= bit::MAC;
        }
        if self.mtu.is_some() || protocol.contains(Protocol::MTU) {
            features |= bit::MTU;
        }
        if self.queue_pairs > 1 && protocol.contains(Protocol::MQ) {
            features |= bit::MQ;
        }
        if protocol.contains(Protocol::LOG_SHMFD) {
            features |= bit::LOG_ALL;
        }
        features
    }

    fn protocol(&self) -> Protocol {
        PROTOCOL
    }

    /// `struct virtio_net_config`: `len` bytes from `offset` on, zero where nothing is defined.
    fn config(&self, offset: usize, len: usize) -> Vec<u8> {
        let mut all = [0; CONFIG_LEN];
        all[0..6].copy_from_slice(&self.mac.unwrap_or_default());
        all[6..8].copy_from_slice(&LINK_UP.to_le_bytes());
        all[8..10].copy_from_slice(&self.queue_pairs.to_le_bytes());
        // A front-end that offers the MTU feature by itself reads it, configured or not.
        all[10..12].copy_from_slice(&self.mtu.unwrap_or(MTU_DEFAULT).to_le_bytes());
        (offset..offset + len).map(|at| all.get(at).copied().unwrap_or(0)).collect()
    }

    fn mtu(&self) -> Option<u16> {
        self.mtu
    }

    fn is_network_card(&self) -> bool {
        true
    }
}

/// The features that the guest's driver accepts.
#[must_use]
pub const fn port_features(features: u64) -> PortFeatures {
    PortFeatures {
        csum: features & bit::GUEST_CSUM != 0,
        tso4: features & bit::GUEST_TSO4 != 0,
        tso6: features & bit::GUEST_TSO6 != 0,
        ecn: features & bit::GUEST_ECN != 0,
        uso: false,
    }
}

/// How frames lie in buffers.
#[must_use]
pub const fn layout(features: u64) -> Layout {
    let merge = features & bit::MRG_RXBUF != 0;
    let long = merge || features & bit::VERSION_1 != 0;
    Layout { hdr_len: if long { VirtioNetHdr::LEN_MRG } else { VirtioNetHdr::LEN }, merge }
}

/// The features of the rings.
#[must_use]
pub const fn ring_features(features: u64) -> RingFeatures {
    RingFeatures {
        event_idx: features & bit::EVENT_IDX != 0,
        indirect: features & bit::INDIRECT_DESC != 0,
    }
}
