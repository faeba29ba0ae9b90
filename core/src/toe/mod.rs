//! Virtual TOE: a guest's sockets over the host's own network instead of over guest TCP.
//!
//! # Short primer
//!
//! A socket of the guest is a vsock connection to this host. Behind it stands an [`end::End`]; the
//! two ends of two guests' sockets together are a *shadow connection*, which a *fabric* carries
//! (host TCP, memory of the same host, UCX). `docs/virtual-toe.md` has the theory and the states.
//!
//! Nothing here does I/O or holds payload: an end counts bytes and decides for each message whether
//! its payload is delivered to the guest now, waits, or is dropped. So a daemon can leave payload
//! where it is until its destination is known, and copy it once.
//!
//! Read in this order: [`state`] (the states of an end), [`message`] (the protocol between ends),
//! [`inbound`] and [`outbound`] (a direction each), [`end`] (all of it together), [`id`] (names
//! that are never used again), [`errno`] (how a connection fails). Toward the guest: [`vsock`] (its
//! vsock connection), [`vsock_end`] (that and the end behind it), [`control`] (its other requests).
//! And [`host`], all sockets of all guests, with [`guest`], [`sockets`] and, against late messages,
//! `replays.rs`.
//!
//! # Invariants
//!
//! 1. A guest's stream ends clean only if every byte of the other guest's stream was delivered to
//!    it, and that stream had ended (VTOE-04, VTOE-05). Everything else ends with an errno.
//! 2. No end sends more than the other guest has room for; no guest is offered more than
//!    `TOE_WINDOW_MAX` beyond what the other one has taken (VTOE-10).
//! 3. A name is used once, and a request opens one connection at most (VTOE-13): late messages
//!    reach no connection. Messages of a connection are accepted from the host of its other end
//!    only.

pub mod control;
pub mod end;
pub mod errno;
pub mod guest;
pub mod host;
pub mod id;
pub mod inbound;
pub mod message;
pub mod outbound;
mod replays;
pub mod sockets;
pub mod state;
pub mod vsock;
pub mod vsock_end;

#[cfg(test)]
mod tests;
