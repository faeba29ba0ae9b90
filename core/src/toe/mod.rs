//! Virtual TOE: a guest's sockets over the host's own network instead of over guest TCP.
//!
//! # Short primer
//!
//! A socket of the guest is a vsock connection to this host. Behind it stands an [`end::End`]; the
//! two ends of two guests' sockets together are a *shadow connection*, which a *fabric* carries
//! (host TCP, memory of the same host, UCX). `docs/virtual-toe.md` has the theory and the states.
//!
//! Nothing here does I/O, and nothing here holds payload: an end counts bytes and says of each
//! message whether its payload is to be given to the guest now, is to wait, or is not wanted. So a
//! daemon can leave payload where it is until it knows where it goes, and copy it nowhere between.
//!
//! Read in this order: [`state`] (where an end stands), [`message`] (what ends say to each other),
//! [`inbound`] and [`outbound`] (a direction each), [`end`] (all of it together), [`id`] (names
//! that are never used again), [`errno`] (how a connection fails). Toward the guest: [`vsock`] (its
//! vsock connection), [`joint`] (that and the end behind it), [`control`] (what it asks besides).
//! And [`host`], all sockets of all guests, with [`guest`], [`sockets`] and, for what comes late,
//! `late.rs`.
//!
//! # Invariants
//!
//! 1. A guest's stream ends clean only if every byte of the other guest's stream was delivered to
//!    it, and that stream had ended (VTOE-04, VTOE-05). Everything else ends with an errno.
//! 2. No end sends what the other guest has no room for; no guest is offered more than
//!    `TOE_WINDOW_MAX` beyond what the other one has taken (VTOE-10).
//! 3. A name is used once, and a request opens one connection at most (VTOE-13): whatever is late
//!    is for nobody. Only the host of the other end may speak of a connection.

pub mod control;
pub mod end;
pub mod errno;
pub mod guest;
pub mod host;
pub mod id;
pub mod inbound;
pub mod joint;
mod late;
pub mod message;
pub mod outbound;
pub mod sockets;
pub mod state;
pub mod vsock;

#[cfg(test)]
mod tests;
