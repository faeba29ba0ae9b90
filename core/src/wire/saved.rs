//! The saved form: the bytes of a state that goes on in another engine, perhaps on another host.
//!
//! [`saved!`] beside a type says what of it is saved. It reads and writes from one list, which has
//! to name each field of the type: one that is new has to be decided on.
//!
//! Numbers are little-endian. Times are relative to the moment of saving, because the other engine
//! has another clock: each field that is a time says in its list which clock it is of ([`Wall`],
//! [`Running`], and those that keep low bits of the former). An image comes from another host, so
//! nothing in it is believed: a number above [`NUMBER_MAX`] is none of ours, and each type
//! checks its orders.

use crate::time::{Duration, Instant};
use crate::wire::packet::{IpAddr16, IpVersion, SackBlocks, Seq};

/// No sequence number, count or time of ours is larger: a stream gets there in 1,169 years at 1
/// Gbit/s. So sums of two never overflow. Where `u64::MAX` stands for "none", or "without limit", a
/// list of fields says so ([`OrNone`]).
pub const NUMBER_MAX: u64 = 1 << 62;

/// Why bytes are not an image, or not one that may be used.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum BadImage {
    /// They begin with something else.
    NotAnImage,
    /// Another version of the program has written it.
    OtherVersion(u32),
    /// They are fewer or more than it says, or were changed on the way.
    Damaged,
    /// No engine can have been in such a state; in which part.
    Impossible(&'static str),
}

/// The two clocks of a VM, at the moment of saving or of reading.
#[derive(Clone, Copy, Debug, Default)]
pub struct Clocks {
    /// The engine's.
    pub now: Instant,
    /// The VM's running time.
    pub running: Instant,
}

/// An image that is being written.
#[derive(Debug)]
pub struct Writer {
    bytes: Vec<u8>,
    clocks: Clocks,
}

impl Writer {
    /// An empty one.
    #[must_use]
    pub const fn new(clocks: Clocks) -> Self {
        Self { bytes: Vec::new(), clocks }
    }

    /// Appends bytes as they are.
    pub fn put(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// How many there are.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Whether there is none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// All of them.
    #[must_use]
    pub fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }
}

/// An image that is being read.
#[derive(Clone, Copy, Debug)]
pub struct Reader<'a> {
    bytes: &'a [u8],
    clocks: Clocks,
}

impl<'a> Reader<'a> {
    /// The beginning of an image.
    #[must_use]
    pub const fn new(bytes: &'a [u8], clocks: Clocks) -> Self {
        Self { bytes, clocks }
    }

    /// The next bytes.
    ///
    /// # Errors
    /// There are fewer.
    pub fn take(&mut self, len: usize) -> Result<&'a [u8], BadImage> {
        let (taken, rest) = self.bytes.split_at_checked(len).ok_or(BadImage::Damaged)?;
        self.bytes = rest;
        Ok(taken)
    }

    /// The bytes that are left.
    #[must_use]
    pub const fn left(&self) -> usize {
        self.bytes.len()
    }

    /// From here on the VM's running time is this.
    pub(crate) const fn set_running(&mut self, running: Instant) {
        self.clocks.running = running;
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], BadImage> {
        let (taken, rest) = self.bytes.split_first_chunk().ok_or(BadImage::Damaged)?;
        self.bytes = rest;
        Ok(*taken)
    }
}

/// A value that is part of an image.
pub trait Saved: Sized {
    /// Writes it.
    fn saved(&self, image: &mut Writer);

    /// Reads it.
    ///
    /// # Errors
    /// See [`BadImage`].
    fn of_saved(image: &mut Reader<'_>) -> Result<Self, BadImage>;
}

/// A way to save values of a type that have more than one meaning.
pub trait SavedAs<T> {
    /// Writes one.
    fn put(value: &T, image: &mut Writer);

    /// Reads one.
    ///
    /// # Errors
    /// See [`BadImage`].
    fn take(image: &mut Reader<'_>) -> Result<T, BadImage>;
}

/// Implements [`Saved`] for a type by the list of its fields: `field`, or `field as Clock`, for
/// those that are saved, and `reset { field = value }` for the others. `check f`: the image is
/// refused if this is false for the value that was read.
macro_rules! saved {
    (
        $type:ident { $($field:ident $(as $how:ident)?),* $(,)? }
        $(reset { $($reset:ident = $value:expr),* $(,)? })?
        $(check $check:expr)?
    ) => {
        impl $crate::wire::saved::Saved for $type {
            fn saved(&self, image: &mut $crate::wire::saved::Writer) {
                let Self { $($field,)* $($($reset: _,)*)? } = self;
                $($crate::wire::saved::saved!(@put $field, image $(, $how)?);)*
            }

            fn of_saved(
                image: &mut $crate::wire::saved::Reader<'_>,
            ) -> Result<Self, $crate::wire::saved::BadImage> {
                let value = Self {
                    $($field: $crate::wire::saved::saved!(@take image $(, $how)?),)*
                    $($($reset: $value,)*)?
                };
                $(
                    let check: fn(&Self) -> bool = $check;
                    if !check(&value) {
                        return Err($crate::wire::saved::BadImage::Impossible(stringify!($type)));
                    }
                )?
                Ok(value)
            }
        }
    };
    (@put $field:ident, $image:ident) => {
        $crate::wire::saved::Saved::saved($field, $image)
    };
    (@put $field:ident, $image:ident, $how:ident) => {
        <$crate::wire::saved::$how as $crate::wire::saved::SavedAs<_>>::put($field, $image)
    };
    (@take $image:ident) => { $crate::wire::saved::Saved::of_saved($image)? };
    (@take $image:ident, $how:ident) => {
        <$crate::wire::saved::$how as $crate::wire::saved::SavedAs<_>>::take($image)?
    };
}

/// The same for an enum without data: each variant and its number.
macro_rules! saved_enum {
    ($type:ident { $($variant:ident = $number:literal),* $(,)? }) => {
        impl $crate::wire::saved::Saved for $type {
            fn saved(&self, image: &mut $crate::wire::saved::Writer) {
                let number: u8 = match self { $(Self::$variant => $number,)* };
                number.saved(image);
            }

            fn of_saved(
                image: &mut $crate::wire::saved::Reader<'_>,
            ) -> Result<Self, $crate::wire::saved::BadImage> {
                match u8::of_saved(image)? {
                    $($number => Ok(Self::$variant),)*
                    _ => Err($crate::wire::saved::BadImage::Impossible(stringify!($type))),
                }
            }
        }
    };
}

pub(crate) use {saved, saved_enum};

// --- Numbers -----------------------------------------------------------------------------------

macro_rules! saved_numbers {
    ($($type:ty),*) => {
        $(impl Saved for $type {
            fn saved(&self, image: &mut Writer) {
                image.put(&self.to_le_bytes());
            }

            fn of_saved(image: &mut Reader<'_>) -> Result<Self, BadImage> {
                image.array().map(Self::from_le_bytes)
            }
        })*
    };
}

saved_numbers!(u8, u16, u32, i64);

impl Saved for u64 {
    fn saved(&self, image: &mut Writer) {
        image.put(&self.to_le_bytes());
    }

    fn of_saved(image: &mut Reader<'_>) -> Result<Self, BadImage> {
        let number = image.array().map(Self::from_le_bytes)?;
        if number <= NUMBER_MAX { Ok(number) } else { Err(BadImage::Impossible("number")) }
    }
}

/// A number or span that may be its type's largest: there is none, or it has no limit.
#[derive(Debug)]
pub struct OrNone;

impl SavedAs<u64> for OrNone {
    fn put(number: &u64, image: &mut Writer) {
        number.saved(image);
    }

    fn take(image: &mut Reader<'_>) -> Result<u64, BadImage> {
        let number = Bits::take(image)?;
        let is_ours = number <= NUMBER_MAX || number == u64::MAX;
        if is_ours { Ok(number) } else { Err(BadImage::Impossible("number")) }
    }
}

impl SavedAs<Duration> for OrNone {
    fn put(span: &Duration, image: &mut Writer) {
        span.saved(image);
    }

    fn take(image: &mut Reader<'_>) -> Result<Duration, BadImage> {
        <Self as SavedAs<u64>>::take(image).map(Duration::from_nanos)
    }
}

impl SavedAs<[Duration; 2]> for OrNone {
    fn put(spans: &[Duration; 2], image: &mut Writer) {
        spans.saved(image);
    }

    fn take(image: &mut Reader<'_>) -> Result<[Duration; 2], BadImage> {
        Ok([Self::take(image)?, Self::take(image)?])
    }
}

/// A `u64` that is a pattern of bits.
#[derive(Debug)]
pub struct Bits;

impl SavedAs<u64> for Bits {
    fn put(bits: &u64, image: &mut Writer) {
        image.put(&bits.to_le_bytes());
    }

    fn take(image: &mut Reader<'_>) -> Result<u64, BadImage> {
        image.array().map(u64::from_le_bytes)
    }
}

impl Saved for bool {
    fn saved(&self, image: &mut Writer) {
        u8::from(*self).saved(image);
    }

    fn of_saved(image: &mut Reader<'_>) -> Result<Self, BadImage> {
        match u8::of_saved(image)? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(BadImage::Impossible("bool")),
        }
    }
}

impl Saved for Duration {
    fn saved(&self, image: &mut Writer) {
        self.as_nanos().saved(image);
    }

    fn of_saved(image: &mut Reader<'_>) -> Result<Self, BadImage> {
        u64::of_saved(image).map(Self::from_nanos)
    }
}

impl<T: Saved> Saved for Option<T> {
    fn saved(&self, image: &mut Writer) {
        self.is_some().saved(image);
        if let Some(value) = self {
            value.saved(image);
        }
    }

    fn of_saved(image: &mut Reader<'_>) -> Result<Self, BadImage> {
        if bool::of_saved(image)? { T::of_saved(image).map(Some) } else { Ok(None) }
    }
}

impl<T: Saved> Saved for Box<T> {
    fn saved(&self, image: &mut Writer) {
        (**self).saved(image);
    }

    fn of_saved(image: &mut Reader<'_>) -> Result<Self, BadImage> {
        T::of_saved(image).map(Self::new)
    }
}

impl<A: Saved, B: Saved> Saved for (A, B) {
    fn saved(&self, image: &mut Writer) {
        self.0.saved(image);
        self.1.saved(image);
    }

    fn of_saved(image: &mut Reader<'_>) -> Result<Self, BadImage> {
        Ok((A::of_saved(image)?, B::of_saved(image)?))
    }
}

impl<A: Saved, B: Saved, C: Saved> Saved for (A, B, C) {
    fn saved(&self, image: &mut Writer) {
        self.0.saved(image);
        self.1.saved(image);
        self.2.saved(image);
    }

    fn of_saved(image: &mut Reader<'_>) -> Result<Self, BadImage> {
        Ok((A::of_saved(image)?, B::of_saved(image)?, C::of_saved(image)?))
    }
}

impl<T: Saved + Copy + Default, const N: usize> Saved for [T; N] {
    fn saved(&self, image: &mut Writer) {
        self.iter().for_each(|value| value.saved(image));
    }

    fn of_saved(image: &mut Reader<'_>) -> Result<Self, BadImage> {
        let mut values = [T::default(); N];
        for value in &mut values {
            *value = T::of_saved(image)?;
        }
        Ok(values)
    }
}

/// At most `u16::MAX` values; each takes a byte at least, so there is no more memory than image.
impl<T: Saved> Saved for Vec<T> {
    fn saved(&self, image: &mut Writer) {
        debug_assert!(self.len() <= usize::from(u16::MAX), "a list without a bound");
        u16::try_from(self.len()).unwrap_or(u16::MAX).saved(image);
        self.iter().take(u16::MAX.into()).for_each(|value| value.saved(image));
    }

    fn of_saved(image: &mut Reader<'_>) -> Result<Self, BadImage> {
        let len = u16::of_saved(image)?;
        (0..len).map(|_| T::of_saved(image)).collect()
    }
}

// --- Of frames ---------------------------------------------------------------------------------

impl Saved for Seq {
    fn saved(&self, image: &mut Writer) {
        self.0.saved(image);
    }

    fn of_saved(image: &mut Reader<'_>) -> Result<Self, BadImage> {
        u32::of_saved(image).map(Self)
    }
}

impl Saved for IpAddr16 {
    fn saved(&self, image: &mut Writer) {
        self.0.saved(image);
    }

    fn of_saved(image: &mut Reader<'_>) -> Result<Self, BadImage> {
        <[u8; 16]>::of_saved(image).map(Self)
    }
}

impl Saved for SackBlocks {
    fn saved(&self, image: &mut Writer) {
        self.as_slice().to_vec().saved(image);
    }

    fn of_saved(image: &mut Reader<'_>) -> Result<Self, BadImage> {
        let blocks = Vec::<(Seq, Seq)>::of_saved(image)?;
        let fits = blocks.len() <= Self::MAX;
        if fits { Ok(Self::new(&blocks)) } else { Err(BadImage::Impossible("SackBlocks")) }
    }
}

saved_enum!(IpVersion { V4 = 4, V6 = 6 });

// --- Times -------------------------------------------------------------------------------------

/// In place of a distance: never.
const NEVER: i64 = i64::MAX;

/// The distance from `now`. One of more than 146 years is as good as that.
fn put_instant(at: Instant, now: Instant, image: &mut Writer) {
    let distance = i128::from(at.as_nanos()) - i128::from(now.as_nanos());
    let most = i128::from(NUMBER_MAX);
    let distance = i64::try_from(distance.clamp(-most, most)).unwrap_or(0);
    (if at == Instant::MAX { NEVER } else { distance }).saved(image);
}

/// An instant before the clock began is its beginning.
fn take_instant(now: Instant, image: &mut Reader<'_>) -> Result<Instant, BadImage> {
    let distance = i64::of_saved(image)?;
    let span = Duration::from_nanos(distance.unsigned_abs());
    match distance {
        NEVER => Ok(Instant::MAX),
        _ if distance.unsigned_abs() > NUMBER_MAX => Err(BadImage::Impossible("time")),
        0.. => Ok(now + span),
        _ => Ok(now - span),
    }
}

/// An instant of the engine's clock.
#[derive(Debug)]
pub struct Wall;

/// An instant of the VM's running time.
#[derive(Debug)]
pub struct Running;

macro_rules! saved_instants {
    ($($how:ident of $clock:ident),*) => {
        $(
            impl SavedAs<Instant> for $how {
                fn put(at: &Instant, image: &mut Writer) {
                    put_instant(*at, image.clocks.$clock, image);
                }

                fn take(image: &mut Reader<'_>) -> Result<Instant, BadImage> {
                    take_instant(image.clocks.$clock, image)
                }
            }

            impl<T: Saved> SavedAs<(T, Instant)> for $how {
                fn put((value, at): &(T, Instant), image: &mut Writer) {
                    value.saved(image);
                    Self::put(at, image);
                }

                fn take(image: &mut Reader<'_>) -> Result<(T, Instant), BadImage> {
                    Ok((T::of_saved(image)?, Self::take(image)?))
                }
            }

            impl<T> SavedAs<Option<T>> for $how where Self: SavedAs<T> {
                fn put(value: &Option<T>, image: &mut Writer) {
                    value.is_some().saved(image);
                    if let Some(value) = value {
                        Self::put(value, image);
                    }
                }

                fn take(image: &mut Reader<'_>) -> Result<Option<T>, BadImage> {
                    if bool::of_saved(image)? { Self::take(image).map(Some) } else { Ok(None) }
                }
            }

            impl<T> SavedAs<Vec<T>> for $how where Self: SavedAs<T> {
                fn put(values: &Vec<T>, image: &mut Writer) {
                    debug_assert!(values.len() <= usize::from(u16::MAX), "a list without a bound");
                    u16::try_from(values.len()).unwrap_or(u16::MAX).saved(image);
                    values.iter().take(u16::MAX.into()).for_each(|value| Self::put(value, image));
                }

                fn take(image: &mut Reader<'_>) -> Result<Vec<T>, BadImage> {
                    let len = u16::of_saved(image)?;
                    (0..len).map(|_| Self::take(image)).collect()
                }
            }
        )*
    };
}

saved_instants!(Wall of now, Running of running);

/// The low bits of a unit of the engine's clock: how long ago that unit began is saved. `UP`: where
/// the units of the two clocks begin at other moments, the later one is taken.
#[derive(Debug)]
pub struct Units<const NS: i128, const UP: bool>;

impl<const NS: i128, const UP: bool> Units<NS, UP> {
    /// `at`: the low bits, of which there are so many.
    fn put_bits(at: u32, bits: u32, image: &mut Writer) {
        let now = i128::from(image.clocks.now.as_nanos());
        let units = (now / NS - i128::from(at)).rem_euclid(1 << bits);
        let age = now % NS + units * NS;
        u64::try_from(age).unwrap_or(NUMBER_MAX).min(NUMBER_MAX).saved(image);
    }

    fn take_units(image: &mut Reader<'_>) -> Result<i128, BadImage> {
        let now = i128::from(image.clocks.now.as_nanos());
        let began = now - i128::from(u64::of_saved(image)?);
        Ok(if UP { -(-began).div_euclid(NS) } else { began.div_euclid(NS) })
    }
}

/// The second in which something was last seen: an idle time ends no earlier.
pub type Second = Units<1_000_000_000, true>;

/// The eight seconds in which a clock was seen: it is outdated no later.
pub type Eights = Units<8_000_000_000, false>;

/// The millisecond of the last of several: the next one comes no earlier.
pub type Millis = Units<1_000_000, true>;

impl SavedAs<u32> for Second {
    fn put(at: &u32, image: &mut Writer) {
        Self::put_bits(*at, 32, image);
    }

    fn take(image: &mut Reader<'_>) -> Result<u32, BadImage> {
        // Before the clock began nothing was seen.
        Self::take_units(image).map(|units| low_bits(units.max(0)))
    }
}

impl SavedAs<u32> for Millis {
    fn put(at: &u32, image: &mut Writer) {
        Self::put_bits(*at, 32, image);
    }

    fn take(image: &mut Reader<'_>) -> Result<u32, BadImage> {
        Self::take_units(image).map(low_bits)
    }
}

impl SavedAs<u16> for Millis {
    fn put(at: &u16, image: &mut Writer) {
        Self::put_bits((*at).into(), 16, image);
    }

    fn take(image: &mut Reader<'_>) -> Result<u16, BadImage> {
        Self::take_units(image).map(|units| low_half(low_bits(units)))
    }
}

impl SavedAs<u16> for Eights {
    fn put(at: &u16, image: &mut Writer) {
        Self::put_bits((*at).into(), 16, image);
    }

    fn take(image: &mut Reader<'_>) -> Result<u16, BadImage> {
        Self::take_units(image).map(|units| low_half(low_bits(units)))
    }
}

fn low_bits(units: i128) -> u32 {
    u32::try_from(units.rem_euclid(1 << 32)).unwrap_or(0)
}

fn low_half(bits: u32) -> u16 {
    u16::try_from(bits & 0xffff).unwrap_or(0)
}

#[cfg(test)]
mod tests;
