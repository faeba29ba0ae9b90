//! The guest's part of congestion offload (FLOOD-28): a guest whose host controls congestion for it
//! may hand over all its data at once.
//!
//! # Theory of operation
//!
//! **Flooding** is an ordinary Linux TCP with a large initial window: routes get an `initcwnd`,
//! connections keep their window while idle (`tcp_slow_start_after_idle`) and do not cut their data
//! to the pace of the window (`tcp_min_tso_segs`). Nothing else of TCP changes. Loss, ECN and
//! timeouts still shrink the window of a connection that sees them. A host that controls congestion
//! hides them, and holds the guest back by the receive window.
//!
//! **It is only right while a host does its part**, so everything depends on the host's heartbeat:
//!
//! ```text
//! heartbeats ──> beats ──live NICs──> plan ──steps──> rtnl (routes), settings (sysctl)
//!                 clock              routes, records
//! ```
//!
//! - [`beats`] knows which NICs receive heartbeats. No clock, no sockets: time is an argument.
//! - [`earlier`] holds routes back while connections are left that another daemon knew;
//!   [`connections`] lists them.
//! - [`plan`] compares the present routes with the wanted ones, and lists the changes.
//! - [`record`] keeps the earlier state in a file, so that the next process can undo everything
//!   exactly.
//! - [`route`] and [`rtnl`] are rtnetlink(7), over `netlink`. A route is sent back as the kernel
//!   gave it, attribute by attribute, except for the one metric. So neither a library nor `ip`
//!   parses it, because they would lose attributes that they do not know.
//! - [`np_flood`] is another way: connections flood by a congestion control of their own, and
//!   routes stay as they are. Its program itself checks the age of the last heartbeat.
//! - [`watch`] is the process that waits for heartbeats, and its keeper.
//!
//! [`capture`] stands beside all that: it records what the guest sees of a connection.
//!
//! # Invariants
//!
//! 1. A change is recorded before it is made. Undoing looks at the route as it is now, and takes
//!    the window from it, if that is still ours: a route that somebody replaced stays theirs.
//! 2. No single death leaves a guest flooding: the keeper undoes the changes of a killed watcher,
//!    and a watcher whose keeper dies undoes its own and ends.
//! 3. Routes that cannot be told apart are left alone, and so are routes that the kernel made from
//!    router advertisements, or that expire (a change would make them permanent).

pub mod beats;
pub mod capture;
pub mod connections;
pub mod control;
pub mod earlier;
#[cfg(np_flood)]
mod libbpf;
mod netlink;
pub mod np_flood;
mod packet;
pub mod plan;
pub mod record;
pub mod route;
pub mod rtnl;
pub mod settings;
pub mod status;
pub mod watch;
