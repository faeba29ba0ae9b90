//! The interface of a congestion controller, and the list of controllers.

use crate::congestion::cubic::Cubic;
use crate::congestion::pacer::Gain;
use crate::congestion::reno::Reno;
use crate::congestion::window::Window;
use crate::time::{Duration, Instant};
use crate::wire::saved::{BadImage, Reader, Saved, Writer};

/// An acknowledgement, as a controller sees it.
#[derive(Clone, Copy, Debug)]
pub struct Ack {
    /// When it came.
    pub now: Instant,
    /// Bytes that may widen the window. Bytes are counted and never ACKs, so that an R that splits
    /// its ACKs gains nothing (RFC 3465).
    pub delivered: u64,
    /// The highest acknowledgement, this one included.
    pub una: u64,
    /// End of what was sent: where a round that begins now will end.
    pub next: u64,
    /// The round trip of what it acknowledges, if that was sent once.
    pub rtt: Option<Duration>,
    /// The smoothed round trip.
    pub srtt: Duration,
}

/// How many bytes may be under way.
///
/// The sender asks it after every event and never lets more be under way, except as `prr` and the
/// loss probe allow. It calls [`Self::on_ack`] only for a window that was used (`validation`) and
/// that nothing reduces at the moment, and the others once for each event of their kind.
pub trait Controller {
    /// Bytes that may be under way.
    fn cwnd(&self) -> u64;

    /// Slow start ends at this window; after a reduction it is the window to arrive at.
    fn ssthresh(&self) -> u64;

    /// How fast a window may leave.
    fn pacing_gain(&self) -> Gain {
        if self.cwnd() < self.ssthresh() { Gain::SLOW_START } else { Gain::AVOIDANCE }
    }

    /// R has got more, and the window was used.
    fn on_ack(&mut self, ack: &Ack);

    /// For this long nothing was to be sent, or R showed no room: time that does not count.
    fn on_unused(&mut self, span: Duration);

    /// Something was lost or marked; `in_use`: bytes of the window that were really under way
    /// (RFC 7661 section 4.4.1). Sets `ssthresh`, and `cwnd` to it.
    fn on_congestion(&mut self, now: Instant, in_use: u64);

    /// The retransmission timeout has passed: one segment, then slow start (RFC 5681 section 3.1).
    /// `first`: the first timeout of these bytes, which alone sets `ssthresh`.
    fn on_timeout(&mut self, now: Instant, in_use: u64, first: bool);

    /// Nothing was sent for so long that the window says little about the path: it is `cwnd` now
    /// (RFC 5681 section 4.1).
    fn on_idle(&mut self, cwnd: u64);

    /// A reduction comes that may turn out to be for nothing: remembers the window.
    fn keep(&mut self);

    /// All reductions since [`Self::keep`] were for nothing: the segments that were thought lost
    /// had arrived (RFC 5682, RFC 4015).
    fn on_spurious(&mut self);

    /// Segments are of this size from now on (RFC 1191).
    fn on_mss(&mut self, mss: u64);
}

/// Makes [`Algorithm`] and [`AnyController`] of a list of types and their labels.
macro_rules! controllers {
    ($($(#[$doc:meta])* $name:ident = $label:literal,)*) => {
        /// The controllers there are.
        #[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
        pub enum Algorithm {
            $($(#[$doc])* $name,)*
        }

        impl Algorithm {
            /// Every controller.
            pub const ALL: [Self; [$($label),*].len()] = [$(Self::$name),*];

            /// The stable lower-case name used by configuration and metrics.
            #[must_use]
            pub const fn label(self) -> &'static str {
                match self {
                    $(Self::$name => $label,)*
                }
            }

            /// A controller for segments of `mss` bytes that begins with a window of `cwnd`.
            #[must_use]
            pub fn controller(self, mss: u64, cwnd: u64) -> AnyController {
                match self {
                    $(Self::$name => AnyController::$name($name::new(mss, cwnd)),)*
                }
            }

            /// The same that goes on from where a controller of another kind was: slow start ends
            /// at `ssthresh`.
            #[must_use]
            pub fn resumed(self, mss: u64, cwnd: u64, ssthresh: u64) -> AnyController {
                match self {
                    $(Self::$name => {
                        AnyController::$name($name::resumed(Window::resumed(mss, cwnd, ssthresh)))
                    })*
                }
            }
        }

        /// A controller of any kind. No trait object, for every segment and ACK asks for its window
        /// several times.
        #[derive(Clone, Debug)]
        pub enum AnyController {
            $(#[doc = $label] $name($name),)*
        }

        impl Saved for AnyController {
            fn saved(&self, image: &mut Writer) {
                let place = Algorithm::ALL.iter().position(|it| *it == self.algorithm());
                place.and_then(|place| u8::try_from(place).ok()).unwrap_or(u8::MAX).saved(image);
                match self {
                    $(Self::$name(c) => c.saved(image),)*
                }
            }

            fn of_saved(image: &mut Reader<'_>) -> Result<Self, BadImage> {
                let place = usize::from(u8::of_saved(image)?);
                match Algorithm::ALL.get(place) {
                    $(Some(Algorithm::$name) => $name::of_saved(image).map(Self::$name),)*
                    None => Err(BadImage::Impossible("AnyController")),
                }
            }
        }

        impl AnyController {
            /// The kind of this controller.
            #[must_use]
            pub const fn algorithm(&self) -> Algorithm {
                match self {
                    $(Self::$name(_) => Algorithm::$name,)*
                }
            }
        }

        impl Controller for AnyController {
            fn cwnd(&self) -> u64 {
                match self {
                    $(Self::$name(c) => c.cwnd(),)*
                }
            }

            fn ssthresh(&self) -> u64 {
                match self {
                    $(Self::$name(c) => c.ssthresh(),)*
                }
            }

            fn pacing_gain(&self) -> Gain {
                match self {
                    $(Self::$name(c) => c.pacing_gain(),)*
                }
            }

            fn on_ack(&mut self, ack: &Ack) {
                match self {
                    $(Self::$name(c) => c.on_ack(ack),)*
                }
            }

            fn on_unused(&mut self, span: Duration) {
                match self {
                    $(Self::$name(c) => c.on_unused(span),)*
                }
            }

            fn on_congestion(&mut self, now: Instant, in_use: u64) {
                match self {
                    $(Self::$name(c) => c.on_congestion(now, in_use),)*
                }
            }

            fn on_timeout(&mut self, now: Instant, in_use: u64, first: bool) {
                match self {
                    $(Self::$name(c) => c.on_timeout(now, in_use, first),)*
                }
            }

            fn on_idle(&mut self, cwnd: u64) {
                match self {
                    $(Self::$name(c) => c.on_idle(cwnd),)*
                }
            }

            fn keep(&mut self) {
                match self {
                    $(Self::$name(c) => c.keep(),)*
                }
            }

            fn on_spurious(&mut self) {
                match self {
                    $(Self::$name(c) => c.on_spurious(),)*
                }
            }

            fn on_mss(&mut self, mss: u64) {
                match self {
                    $(Self::$name(c) => c.on_mss(mss),)*
                }
            }
        }
    };
}

controllers! {
    /// RFC 9438, the default of Linux.
    #[default]
    Cubic = "cubic",
    /// RFC 5681 and RFC 6582.
    Reno = "reno",
}

/// The initial window: ten segments, or one if the SYN or SYN-ACK was lost more than once (RFC 6928
/// section 2). Jumbo frames too, as Linux has it (`TCP_INIT_CWND`); the RFC's limit of 14,600 bytes
/// is not the field's (FLOOD-19).
#[must_use]
pub fn initial_window(mss: u64, handshake_was_lost: bool) -> u64 {
    if handshake_was_lost { mss } else { 10 * mss }
}
