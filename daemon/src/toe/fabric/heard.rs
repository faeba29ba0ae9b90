//! What a stream has, and what becomes of it.

use nightporter_core::toe::message::{Message, Request};

/// What a stream has.
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
    /// What no honest host says.
    Nonsense,
}

/// What payload waits for.
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
