//! A frame on its way through the world.

use nightporter_core::wire::virtio_net::VirtioNetHdr;

/// An Ethernet frame and what a driver says about its checksum and segmentation.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Frame {
    /// Default on a physical wire; on a ring, what virtio-net carries.
    pub hdr: VirtioNetHdr,
    /// From the destination MAC on, without frame check sequence.
    pub bytes: Vec<u8>,
}

impl Frame {
    /// A frame as it is on a physical wire.
    #[must_use]
    pub fn on_wire(bytes: Vec<u8>) -> Self {
        Self { hdr: VirtioNetHdr::default(), bytes }
    }
}
