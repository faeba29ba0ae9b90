//! The layers below TCP in the frames that H makes (COM-10).

use crate::limits::L2_MAX;
use crate::wire::saved::saved;

/// Bytes of an Ethernet header without tags.
const ETHERNET: u8 = 14;

/// The layers below TCP of H's frames, copied from the newest frames seen (COM-10).
///
/// There is one L2 header, G's, which is reversed for frames to G. G does not look at the source
/// MAC of its frames, and the VLAN tags are the flow's.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Template {
    l2: [u8; L2_MAX],
    l2_len: u8,
    /// TTL or hop limit of frames to R (RFC 5082 peers insist on 255).
    ttl_to_net: u8,
    /// TTL or hop limit of frames to G.
    ttl_to_guest: u8,
    /// DSCP and ECN bits of frames to R.
    tos_to_net: u8,
    /// DSCP and ECN bits of frames to G.
    tos_to_guest: u8,
    /// IPv6 flow label of frames to R: 20 bits, little-endian.
    label_to_net: [u8; 3],
    /// IPv6 flow label of frames to G.
    label_to_guest: [u8; 3],
}

saved! {
    Template {
        l2, l2_len, ttl_to_net, ttl_to_guest, tos_to_net, tos_to_guest, label_to_net,
        label_to_guest,
    }
    check |it| usize::from(it.l2_len) <= L2_MAX
}

impl Template {
    /// Takes over the lower layers of a frame of G; `l2` is everything before the IP header.
    #[inline]
    pub(super) fn learn_from_guest(&mut self, l2: &[u8], tos: u8, ttl: u8, flow_label: u32) {
        self.set_l2(l2);
        self.ttl_to_net = ttl;
        self.tos_to_net = tos;
        self.label_to_net = label(flow_label);
    }

    /// Takes over the network layer of a frame of R.
    #[inline]
    pub(super) fn learn_from_net(&mut self, tos: u8, ttl: u8, flow_label: u32) {
        self.ttl_to_guest = ttl;
        self.tos_to_guest = tos;
        self.label_to_guest = label(flow_label);
    }

    /// The L2 header of frames to R, tags and EtherType included.
    pub(super) fn l2_to_net(&self) -> &[u8] {
        &self.l2[..usize::from(self.l2_len)]
    }

    /// The L2 header of frames to G, in a buffer of which the first [`Self::l2_len`] bytes count.
    pub(super) fn l2_to_guest(&self) -> [u8; L2_MAX] {
        let mut l2 = self.l2;
        l2[..12].rotate_left(6);
        l2
    }

    /// TTL or hop limit of frames to R.
    pub(super) const fn ttl_to_net(&self) -> u8 {
        self.ttl_to_net
    }

    /// TTL or hop limit of frames to G.
    pub(super) const fn ttl_to_guest(&self) -> u8 {
        self.ttl_to_guest
    }

    /// DSCP and ECN bits of frames to R.
    pub(super) const fn tos_to_net(&self) -> u8 {
        self.tos_to_net
    }

    /// DSCP and ECN bits of frames to G.
    pub(super) const fn tos_to_guest(&self) -> u8 {
        self.tos_to_guest
    }

    /// IPv6 flow label of frames to R.
    pub(super) fn label_to_net(&self) -> u32 {
        let [a, b, c] = self.label_to_net;
        u32::from_le_bytes([a, b, c, 0])
    }

    /// IPv6 flow label of frames to G.
    pub(super) fn label_to_guest(&self) -> u32 {
        let [a, b, c] = self.label_to_guest;
        u32::from_le_bytes([a, b, c, 0])
    }

    /// Bytes of the L2 header: at most 22.
    pub(super) fn l2_len(&self) -> u16 {
        self.l2_len.into()
    }

    /// A template for a flow rebuilt from its record: H's own frames need no more.
    pub(super) fn from_record(l2: &[u8], ttl_to_net: u8, ttl_to_guest: u8) -> Self {
        let mut t = Self { ttl_to_net, ttl_to_guest, ..Self::default() };
        t.set_l2(l2);
        t
    }

    #[inline]
    fn set_l2(&mut self, l2: &[u8]) {
        if let (Some(to), Some(untagged)) =
            (self.l2.first_chunk_mut(), l2.as_array::<{ ETHERNET as usize }>())
        {
            *to = *untagged; // nearly always: two moves instead of a call
            self.l2_len = ETHERNET;
        } else {
            self.set_tagged_l2(l2);
        }
    }

    #[inline(never)] // or the compiler makes one copy of any length out of both
    fn set_tagged_l2(&mut self, l2: &[u8]) {
        if let (Some(to), Ok(len)) = (self.l2.get_mut(..l2.len()), u8::try_from(l2.len())) {
            to.copy_from_slice(l2);
            self.l2_len = len;
        }
    }
}

#[inline]
fn label(flow_label: u32) -> [u8; 3] {
    let [a, b, c, _] = flow_label.to_le_bytes();
    [a, b, c]
}
