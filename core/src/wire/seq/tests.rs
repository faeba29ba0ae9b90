//! COM-01 and P-10: serial order and unwrapping, around every edge.

use super::*;
use crate::wire::samples::arb_u32;
use proptest::prelude::*;

/// Sequence numbers where something could go wrong (P-10).
const EDGES: [u32; 6] = [0, 1, 0x7fff_ffff, 0x8000_0000, 0xffff_ff00, 0xffff_ffff];

proptest! {
    #[test]
    fn com_01_a_number_unwraps_to_itself_near_itself(
        x in 1u64 << 32..1 << 60,
        delta in -0x8000_0000i64..0x8000_0000,
    ) {
        let near = x.wrapping_add_signed(-delta);
        prop_assert_eq!(Seq::wrap(x).unwrap(near), x);
    }

    #[test]
    fn unwrapping_never_loses_the_wire_form(seq in arb_u32(), near in any::<u64>()) {
        prop_assert_eq!(Seq::wrap(Seq(seq).unwrap(near)), Seq(seq));
    }

    #[test]
    fn order_is_that_of_the_unwrapped_numbers(x in 1u64 << 33..1 << 60, ahead in 1u32..1 << 31) {
        let (a, b) = (Seq::wrap(x), Seq::wrap(x + u64::from(ahead)));
        prop_assert!(a.lt(b) && a.le(b) && b.gt(a) && b.ge(a));
        prop_assert!(!b.lt(a) && !b.le(a) && !a.gt(b) && !a.ge(b));
        prop_assert_eq!(a + ahead, b);
        prop_assert_eq!(b - ahead, a);
        prop_assert_eq!(b - a, ahead);
        prop_assert_eq!(i64::from(b.after(a)), i64::from(ahead));
    }
}

#[test]
fn five_gib_after_any_first_number_is_still_told_apart_byte_by_byte() {
    for isn in EDGES {
        let first = (1 << 32) + u64::from(isn);
        let mut near = first;
        // Steps of nearly half the number space: the longest that may be told apart.
        while near < first + (5 << 30) {
            let next = near + 0x7fff_ffff;
            assert_eq!(Seq::wrap(next).unwrap(near), next, "from {isn:#x}");
            assert!(Seq::wrap(next).gt(Seq::wrap(near)));
            near = next;
        }
    }
}

#[test]
fn a_number_is_neither_before_nor_after_itself() {
    for n in EDGES.map(Seq) {
        assert!(n.le(n) && n.ge(n) && !n.lt(n) && !n.gt(n));
    }
}
