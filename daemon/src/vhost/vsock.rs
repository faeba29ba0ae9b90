//! The socket device (virtio 1.2 section 5.10): its features, and its three queues: of packets to
//! the guest, packets from it, and events. The events' buffers are left alone, because no event is
//! sent yet.
//!
//! QEMU (7.2) keeps the queue of events to itself and sets up the first two; UML (6.1) sets up all.

use vhost::vhost_user::message::VhostUserProtocolFeatures as Protocol;

use super::device::{Device, DeviceQueue};
use super::features::bit;
use super::packets::PacketQueue;
use super::ring::Ring;

/// The queue of packets to the guest.
pub const TO_GUEST: usize = 0;
/// The queue of packets from the guest.
pub const FROM_GUEST: usize = 1;
const QUEUES: usize = 3;

/// No VIRTIO_VSOCK_F_*: without any, there are stream sockets and nothing else.
const FEATURES: u64 = bit::INDIRECT_DESC | bit::EVENT_IDX | bit::PROTOCOL_FEATURES | bit::VERSION_1;

/// QEMU reads the configuration space by CONFIG. BACKEND_REQ: see [`super::features`].
const PROTOCOL: Protocol = Protocol::REPLY_ACK
    .union(Protocol::BACKEND_REQ)
    .union(Protocol::CONFIG)
    .union(Protocol::RESET_DEVICE)
    .union(Protocol::CONFIGURE_MEM_SLOTS)
    .union(Protocol::STATUS);

/// A socket device.
#[derive(Clone, Copy, Debug)]
pub struct Vsock {
    /// The guest's CID.
    pub cid: u64,
}

impl Device for Vsock {
    type Queue = PacketQueue;

    fn queues(&self) -> usize {
        QUEUES
    }

    fn queue_num(&self) -> u64 {
        QUEUES as u64
    }

    fn features(&self, _: Protocol) -> u64 {
        FEATURES
    }

    fn protocol(&self) -> Protocol {
        PROTOCOL
    }

    /// `struct virtio_vsock_config`: the CID, 64 bits.
    fn config(&self, offset: usize, len: usize) -> Vec<u8> {
        let all = self.cid.to_le_bytes();
        (offset..offset + len).map(|at| all.get(at).copied().unwrap_or(0)).collect()
    }

    fn is_network_card(&self) -> bool {
        false
    }
}

impl DeviceQueue for PacketQueue {
    fn new(ring: Ring) -> Self {
        Self::new(ring)
    }

    fn ring(&mut self) -> &mut Ring {
        &mut self.ring
    }

    fn begin_turn(&mut self) {
        self.work = 0;
    }
}
