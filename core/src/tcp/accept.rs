//! Accept offload: H answers R's SYN for a guest that is off its core.
//!
//! `docs/design/accept-offload.md` is the theory, and says what is left. No flow uses this yet.
//!
//! 1. A SYN comes from a source of which G has lately accepted a connection ([`learned`]), and is
//!    one that H understands ([`grant`]).
//! 2. H answers it with numbers of its own ([`isn`]), and offers what G offered there last. If
//!    there is no place for more, the numbers are a [`cookie`].
//! 3. When R has completed the handshake ([`half_open`]), G gets a SYN that offers just what R was
//!    granted. G's answer says how its numbers differ from H's ([`opening`],
//!    [`crate::wire::translate`]).

pub mod cookie;
pub mod grant;
pub mod half_open;
pub mod isn;
pub mod learned;
pub mod opening;
mod sip;
