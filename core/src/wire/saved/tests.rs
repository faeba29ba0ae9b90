//! Times and numbers of an image, read on another clock.

use super::*;
use proptest::prelude::*;

fn clocks(ns: u64) -> Clocks {
    let now = Instant::from_nanos(ns);
    Clocks { now, running: now }
}

/// The value that is read on the other clock.
fn moved<T, H: SavedAs<T>>(value: &T, from: u64, to: u64) -> T {
    let mut image = Writer::new(clocks(from));
    H::put(value, &mut image);
    let bytes = image.into_bytes();
    let mut image = Reader::new(&bytes, clocks(to));
    let value = H::take(&mut image).expect("it was written");
    assert_eq!(image.left(), 0);
    value
}

const DAY: u64 = 86_400_000_000_000;
const SECOND_NS: u64 = 1_000_000_000;

proptest! {
    #[test]
    fn an_instant_is_as_far_from_now_as_before(
        from in DAY..9 * DAY,
        to in DAY..9 * DAY,
        at in 0..9 * DAY,
    ) {
        let now = Instant::from_nanos(to);
        let read: Instant = moved::<_, Wall>(&Instant::from_nanos(at), from, to);
        prop_assert_eq!(read, Instant::from_nanos((to + at).saturating_sub(from)));
        prop_assert_eq!(moved::<_, Running>(&Instant::MAX, from, to), Instant::MAX);
        prop_assert_eq!(moved::<_, Wall>(&Instant::from_nanos(from), from, to), now);
    }

    /// By less than one unit off, and only to the side that its user stands.
    #[test]
    fn a_unit_of_a_clock_is_at_most_one_off(
        from in 2 * DAY..9 * DAY,
        to in 2 * DAY..9 * DAY,
        ago in 0..DAY,
    ) {
        let at = Instant::from_nanos(from - ago);
        let read: u32 = moved::<_, Second>(&at.second(), from, to);
        let began = at.as_secs() * SECOND_NS;
        let exact = i128::from(to) - i128::from(from - began);
        let off = i128::from(read) * i128::from(SECOND_NS) - exact;
        prop_assert!((0..i128::from(SECOND_NS)).contains(&off), "a second: {off}");
        let read: u16 = moved::<_, Eights>(&at.low_eights(), from, to);
        let now = Instant::from_nanos(to).low_eights();
        let age = i128::from(now.wrapping_sub(read)) * 8;
        prop_assert!((-8..=16).contains(&(age - i128::from(ago / SECOND_NS))), "eights: {age}");
        let same: u16 = moved::<_, Eights>(&at.low_eights(), from, from + 128 * SECOND_NS);
        prop_assert_eq!(same, at.low_eights().wrapping_add(16));
        let ms: u32 = moved::<_, Millis>(&at.low_millis(), from, to);
        let age = Instant::from_nanos(to).low_millis().wrapping_sub(ms);
        prop_assert!(i64::from(age).abs_diff(i64::try_from(ago / 1_000_000).unwrap()) <= 1);
    }
}

#[test]
fn a_number_that_no_stream_reaches_is_refused() {
    let read = |number: u64| u64::of_saved(&mut Reader::new(&number.to_le_bytes(), clocks(0)));
    assert_eq!(read(NUMBER_MAX), Ok(NUMBER_MAX));
    for number in [NUMBER_MAX + 1, u64::MAX] {
        assert_eq!(read(number), Err(BadImage::Impossible("number")));
    }
    let bytes = |number: u64| number.to_le_bytes();
    let read_or_none = |number: u64| -> Result<u64, BadImage> {
        OrNone::take(&mut Reader::new(&bytes(number), clocks(0)))
    };
    assert_eq!((read_or_none(NUMBER_MAX), read_or_none(u64::MAX)), (Ok(NUMBER_MAX), Ok(u64::MAX)));
    assert_eq!(read_or_none(NUMBER_MAX + 1), Err(BadImage::Impossible("number")));
    assert_eq!(
        bool::of_saved(&mut Reader::new(&[2], clocks(0))),
        Err(BadImage::Impossible("bool"))
    );
    assert_eq!(u16::of_saved(&mut Reader::new(&[2], clocks(0))), Err(BadImage::Damaged));
}
