//! The sender toward R: how much of G's stream may be under way, which bytes are lost, and when the
//! next segment leaves.
//!
//! # Primer
//!
//! With congestion offload G hands over its data in one time slice, and H sends it as any good TCP
//! would. This module is the part of that work which needs no frame, no store and no flow: it sees
//! ranges of a stream, acknowledgements and time.
//!
//! ```text
//!             what R acknowledged, SACKed, marked                     what leaves, and when
//!   ACK ----> Scoreboard ----> Rack ----> Controller and Prr ----> Sender::poll ----> segment
//!             what is where    what is    how much may be          in order: what     [from, to)
//!                              lost       under way                is lost, what
//!             RttEstimator: how long an answer takes                is new, a probe
//! ```
//!
//! | File | What it decides | Source |
//! |---|---|---|
//! | [`sender`] | the next segment; all others are its parts | RFC 5681, 6298 section 5 |
//! | [`episode`] | when a window is reduced: once in a round trip | RFC 5681, 6582, 3168 |
//! | [`controller`] | the [`Controller`] trait, and the list of controllers | |
//! | [`reno`], [`cubic`] | a controller each | RFC 5681, RFC 9438 |
//! | [`window`] | slow start, which both share, with HyStart++ | RFC 5681, RFC 9406 |
//! | [`validation`] | whether the window was used, so that it may grow | RFC 7661 |
//! | [`copies`] | whether a repair was for nothing | FLOOD-44, RFC 3708 |
//! | [`prr`] | how much is sent for each ACK during a reduction | RFC 9937 |
//! | [`scoreboard`] | which bytes are under way, SACKed, lost, sent again | RFC 2018, RFC 6675 |
//! | [`rack`] | which of them are lost, and when a probe is due | RFC 8985 |
//! | [`rtt`] | round trip and retransmission timeout | RFC 6298 |
//! | [`pacer`] | that a window is not sent as one burst | |
//!
//! # Units
//!
//! Windows, ranges and counts are bytes, sequence numbers are unwrapped (COM-01), times are
//! [`crate::time`]'s nanoseconds. There are no floating-point numbers: a fraction is a pair of
//! integers, and a product that could overflow is made in 128 bits.
//!
//! # A new controller
//!
//! A file with a type that implements [`Controller`], and a line in the list at the end of
//! [`controller`].

pub mod controller;
pub mod copies;
pub mod cubic;
pub mod episode;
pub mod pacer;
pub mod prr;
pub mod rack;
pub mod reno;
pub mod rtt;
pub mod scoreboard;
pub mod sender;
pub mod validation;
pub mod window;

pub use controller::{Ack, Algorithm, AnyController, Controller};
pub use sender::{Learned, Segment, Sender, SenderConfig};

#[cfg(test)]
mod tests;
