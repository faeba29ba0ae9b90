//! The heartbeat of congestion offload (FLOOD-28): the host tells a guest that it controls
//! congestion for the guest, so that the guest may hand over all its data at once.
//!
//! The host puts this frame into the guest's ring every [`HEARTBEAT_PERIOD`]. A guest that has not
//! received one for [`HEARTBEAT_STALE`] must no longer flood. It is an untagged Ethernet frame of
//! 60 bytes:
//!
//! | Bytes | What |
//! |---|---|
//! | 0 to 5 | [`DESTINATION`] |
//! | 6 to 11 | [`SOURCE`]; not read |
//! | 12, 13 | [`ETHERTYPE`] |
//! | 14 to 17 | `npcc` |
//! | 18 | version: 1. A guest ignores other versions, and does not flood |
//! | 19 | 1: the host controls congestion; 0: it does not, stop at once |
//! | 20 to 27 | the epoch, big-endian, not 0 |
//! | 28 to 59 | zeros, up to Ethernet's shortest frame |
//!
//! **It is received on one link only.** The destination is one of the sixteen group addresses that
//! no bridge forwards (IEEE 802.1Q-2018, section 8.6.3). So after a migration no plain bridge
//! carries a heartbeat to the guest, neither a neighbour's nor one from the network. Our own switch
//! drops such frames from guests and uplinks alike (`DropReason::ReservedGroup`); the host's own
//! frames bypass it, straight to the guest's port. Of the sixteen, ...:0e would be the obvious one,
//! but bridges are told to forward it for LLDP (Linux, `group_fwd_mask`).
//! **An epoch** is a time in which the host controls the connections that began under it. It ends
//! when the guest sends on one that the host does not control, perhaps because the host has
//! forgotten it. A daemon that starts, and a host that takes a guest over, begins another epoch: it
//! does not control the connections of the one before. A daemon draws its first epoch at random,
//! and each later one is one more than the one before. A guest that receives an epoch which is not
//! a little ahead of the last takes it for another daemon's.

use core::num::NonZeroU64;

use super::be16;
#[cfg(doc)]
use crate::limits::{HEARTBEAT_PERIOD, HEARTBEAT_STALE};

/// "IEEE MAC-specific control protocols", a link's own business (IEEE 802.1Q-2018, table 8-1).
pub const DESTINATION: [u8; 6] = [0x01, 0x80, 0xc2, 0x00, 0x00, 0x04];
/// Locally administered; the same for every host.
pub const SOURCE: [u8; 6] = [0x02, b'n', b'p', b'c', b'c', 0x00];
/// Local experimental EtherType 1 (IEEE 802-2014, section 9.2.4).
pub const ETHERTYPE: u16 = 0x88b5;
/// Bytes of the frame: the shortest that Ethernet has, without its checksum.
pub const FRAME_BYTES: usize = 60;

const ETHERTYPE_AT: usize = 12;
const MAGIC_AT: usize = 14;
const MAGIC: [u8; 4] = *b"npcc";
const VERSION_AT: usize = 18;
const VERSION: u8 = 1;
const CONTROLS_AT: usize = 19;
const EPOCH_AT: usize = 20;
const END: usize = 28;

/// See the module doc.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Heartbeat {
    /// The host controls the congestion of this guest's connections.
    pub controls: bool,
    /// Connections that began under another epoch are the guest's own to control.
    pub epoch: NonZeroU64,
}

impl Heartbeat {
    /// The frame, for the guest's ring.
    #[must_use]
    pub fn emit(self) -> [u8; FRAME_BYTES] {
        let mut frame = [0; FRAME_BYTES];
        frame[..6].copy_from_slice(&DESTINATION);
        frame[6..ETHERTYPE_AT].copy_from_slice(&SOURCE);
        frame[ETHERTYPE_AT..MAGIC_AT].copy_from_slice(&ETHERTYPE.to_be_bytes());
        frame[MAGIC_AT..VERSION_AT].copy_from_slice(&MAGIC);
        frame[VERSION_AT] = VERSION;
        frame[CONTROLS_AT] = u8::from(self.controls);
        frame[EPOCH_AT..END].copy_from_slice(&self.epoch.get().to_be_bytes());
        frame
    }

    /// The content of `frame`, if it is a heartbeat of a known version.
    #[must_use]
    pub fn parse(frame: &[u8]) -> Option<Self> {
        let ours = frame.len() >= FRAME_BYTES
            && frame[..6] == DESTINATION
            && be16(frame, ETHERTYPE_AT) == ETHERTYPE
            && frame[MAGIC_AT..VERSION_AT] == MAGIC
            && frame[VERSION_AT] == VERSION;
        if !ours {
            return None;
        }
        let controls = match frame[CONTROLS_AT] {
            0 => false,
            1 => true,
            _ => return None,
        };
        let epoch = u64::from_be_bytes(frame[EPOCH_AT..END].try_into().ok()?);
        Some(Self { controls, epoch: NonZeroU64::new(epoch)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const BEAT: Heartbeat =
        Heartbeat { controls: true, epoch: NonZeroU64::new(0x0102_0304_0506_0708).unwrap() };

    #[test]
    fn flood_28_the_frame_byte_by_byte() {
        let frame = BEAT.emit();
        assert_eq!(frame[..14], *b"\x01\x80\xc2\0\0\x04\x02npcc\0\x88\xb5");
        assert_eq!(frame[14..28], *b"npcc\x01\x01\x01\x02\x03\x04\x05\x06\x07\x08");
        assert_eq!(frame[28..], [0; 32]);
    }

    #[test]
    fn flood_28_a_frame_that_differs_anywhere_is_no_heartbeat() {
        let frame = BEAT.emit();
        // The source, the epoch and the padding may be anything.
        for at in (0..6).chain(12..20) {
            let mut other = frame;
            other[at] ^= 0x80;
            assert_eq!(Heartbeat::parse(&other), None, "byte {at}");
        }
        let mut no_epoch = frame;
        no_epoch[20..28].fill(0);
        assert_eq!(Heartbeat::parse(&no_epoch), None);
    }

    proptest! {
        #[test]
        fn flood_28_what_was_emitted_is_parsed(
            controls: bool,
            epoch: NonZeroU64,
            more in 0_usize..9,
        ) {
            let beat = Heartbeat { controls, epoch };
            let frame = [&beat.emit()[..], &vec![0xee; more]].concat();
            prop_assert_eq!(Heartbeat::parse(&frame), Some(beat));
            for end in 0..FRAME_BYTES {
                prop_assert_eq!(Heartbeat::parse(&frame[..end]), None);
            }
        }
    }
}
