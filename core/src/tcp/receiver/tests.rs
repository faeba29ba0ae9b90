//! A receiver by itself: where in the stream it places segments.

use super::Place::{Keepalive, Old, Outside, Window};
use super::*;

/// The next byte; its low 32 bits are about to wrap.
const NEXT: u64 = (3 << 32) - 1001;

fn receiver() -> Receiver {
    let mut receiver = Receiver::new(Instant::from_secs(1), NEXT);
    receiver.on_third_ack_from_guest(NEXT + 5000);
    receiver
}

/// A segment of `len` bytes from `seq` on, counted from [`NEXT`].
fn segment(seq: i64, len: u64, fin: bool) -> Range {
    let seq = NEXT.wrapping_add_signed(seq);
    Range { seq, end: seq + len, fin }
}

#[test]
fn snoop_02_where_a_segment_lies() {
    let cases = [
        ((-2, 0, false), Outside),
        ((-1, 0, false), Keepalive),
        ((0, 0, false), Window),
        ((5000, 0, false), Window),
        ((5001, 0, false), Outside),
        ((-1, 1, false), Old),
        ((-1000, 1000, false), Old),
        ((-1000, 1001, false), Window),
        ((-1000, 1000, true), Window), // the FIN is new
        ((4999, 1, false), Window),
        ((5000, 1, false), Outside),
        ((5000, 0, true), Window), // a FIN may lie at the edge
        ((5001, 0, true), Outside),
    ];
    for ((seq, len, fin), place) in cases {
        assert_eq!(receiver().place(segment(seq, len, fin)), place, "{seq} {len} {fin}");
    }
}

#[test]
fn snoop_14_behind_a_fin_everything_is_old_and_a_keepalive_lies_in_its_place() {
    let mut receiver = receiver();
    receiver.on_fin(NEXT);
    assert_eq!(receiver.place(segment(-1000, 1000, true)), Old);
    assert_eq!(receiver.place(segment(0, 0, false)), Keepalive);
    assert_eq!(receiver.place(segment(0, 1, false)), Old);
    assert!(receiver.is_keepalive(segment(0, 1, false)));
    assert_eq!(receiver.place(segment(1, 0, false)), Window);
}

#[test]
fn snoop_15_an_rst_counts_at_the_next_number_and_at_the_fin() {
    let mut receiver = receiver();
    let taken = |r: &Receiver| [-1_i64, 0, 1].map(|n| r.takes_reset(NEXT.wrapping_add_signed(n)));
    assert_eq!(taken(&receiver), [false, true, false]);
    receiver.on_fin(NEXT);
    assert_eq!(taken(&receiver), [false, true, true]);
}
