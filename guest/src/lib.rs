//! The protocols between a lab guest and the lab on the host.
//!
//! Two channels, so that steering a guest never depends on the network path being measured:
//!
//! - **control** ([`control`]): JSON lines over a serial port. One [`control::Command`] from the
//!   host, one [`control::Reply`] from the guest, in turn. The guest opens with `Reply::Ready`.
//! - **data** ([`data`]): TCP port [`data::PORT`]. A 24-byte [`data::Header`] gives the purpose of
//!   the connection.
//!
//! The control channel also carries the commands for a [`peer`]'s sockets.
//!
//! The guest learns its addresses from the kernel command line ([`bootline`]).

pub mod bootline;
pub mod control;
pub mod data;
pub mod netstat;
pub mod peer;
