//! Sums against the plainest possible one, and increments against sums (COM-14, P-09).

use super::*;
use crate::wire::samples::{arb_u32, plain_checksum};
use proptest::prelude::*;

fn bytes(len: core::ops::Range<usize>) -> impl Strategy<Value = Vec<u8>> {
    let any = proptest::collection::vec(any::<u8>(), len.clone());
    // Carries ripple furthest through ones.
    let ones = len.prop_map(|n| vec![0xff; n]);
    prop_oneof![4 => any, 1 => ones]
}

proptest! {
    #[test]
    fn the_fast_sum_is_the_plain_sum(b in bytes(0..300), skip in 0..9usize) {
        // From every alignment.
        let b = b.get(skip..).unwrap_or_default();
        prop_assert_eq!(!fold(sum(b, 0)), plain_checksum(&[b]));
    }

    #[test]
    fn pieces_of_any_length_sum_to_the_whole(
        b in bytes(0..300),
        cuts in proptest::collection::vec(0..300usize, 0..5),
        start in any::<u32>(),
    ) {
        let mut whole = Checksum::new(start.into());
        whole.add_bytes(&b);
        let mut cuts: Vec<usize> = cuts.into_iter().map(|c| c.min(b.len())).collect();
        cuts.extend([0, b.len()]);
        cuts.sort_unstable();
        let mut pieces = Checksum::new(start.into());
        for cut in cuts.windows(2) {
            pieces.add_bytes(&b[cut[0]..cut[1]]);
        }
        prop_assert_eq!(pieces.finish(), whole.finish());
    }

    #[test]
    fn p_09_an_increment_is_a_full_sum(
        mut b in bytes(8..80), at in 0..70usize, new in arb_u32(), wide in any::<bool>(),
    ) {
        let at = at % (b.len() / 2 - 1) * 2;
        let before = plain_checksum(&[&b]);
        let field: [u8; 4] = b[at..at + 4].try_into().unwrap();
        let after = if wide {
            b[at..at + 4].copy_from_slice(&new.to_be_bytes());
            update32(before, u32::from_be_bytes(field), new)
        } else {
            let (old, new) = (u16::from_be_bytes([field[0], field[1]]), (new >> 16) as u16);
            b[at..at + 2].copy_from_slice(&new.to_be_bytes());
            update16(before, old, new)
        };
        // Zeroes only are the one case where the two forms of zero differ.
        let full = plain_checksum(&[&b]);
        prop_assert!(after == full || (after == 0 && full == 0xffff), "{after:#x} {full:#x}");
    }

    #[test]
    fn pseudo_headers_sum_as_their_bytes(
        src in any::<[u8; 16]>(), dst in any::<[u8; 16]>(), protocol: u8, len in 0..0x2_0000u32,
    ) {
        let tail = [&len.to_be_bytes()[..], &[0, 0, 0, protocol]].concat();
        prop_assert_eq!(
            !fold(pseudo_header_v6(src, dst, protocol, len)),
            plain_checksum(&[&src, &dst, &tail])
        );
        let (src4, dst4): ([u8; 4], [u8; 4]) =
            (src[..4].try_into().unwrap(), dst[..4].try_into().unwrap());
        prop_assert_eq!(
            !fold(pseudo_header_v4(src4, dst4, protocol, len)),
            plain_checksum(&[&src4, &dst4, &tail])
        );
    }
}

#[test]
fn the_example_of_rfc_1624_section_4_gives_zero_not_minus_zero() {
    assert_eq!(update16(0xdd2f, 0x5555, 0x3285), 0x0000);
}

#[test]
fn long_runs_of_ones_do_not_overflow() {
    assert_eq!(fold(sum(&[0xff; 1 << 17], u64::from(u32::MAX))), 0xffff);
    assert_eq!(fold(u64::MAX), 0xffff);
    assert_eq!(fold32(0x8000_8000), 1);
    assert_eq!(fold(0), 0);
}

/// The carry of the carries, which chance does not find: words that sum up to 2^65 - 1.
#[test]
fn the_carries_may_overflow_as_well() {
    let b = [[0xff; 8], [0xff; 8], 1_u64.to_ne_bytes()].concat();
    assert_eq!(!fold(sum(&b, 0)), plain_checksum(&[&b]));
}
