//! The arrivals of a stream, and what becomes of them.

use nightporter_core::toe::message::{Message, Request};

/// An arrival of a stream.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Heard {
    /// Nothing more for now.
    Nothing,
    /// The other host has said hello, which is answered.
    Hello,
    /// Where its worker of UCX is: `Stream::take_introduction`.
    Introduced,
    /// A message that is not a request. Behind data the payload comes next.
    Message(Message),
    /// A message that was ahead of others is presented again.
    Held(Message),
    /// Somebody wants to connect.
    Request(Message, Request),
    /// So many bytes of payload.
    Payload(u32),
    /// Its end, or the network's.
    Lost,
    /// Words of no honest host.
    Nonsense,
}

/// The reason why payload waits.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(in super::super) enum Waits {
    /// Buffers of its guest.
    Ring,
    /// Room in its guest's socket.
    Credit,
}

/// Why a stream did not take what was said.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(in super::super) struct Lost;
