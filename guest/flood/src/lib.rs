//! The guest's part of congestion offload (FLOOD-28): a guest whose host controls the congestion of
//! what it sends may hand over all it has at once.
//!
//! # Theory of operation
//!
//! **Flooding** is an ordinary Linux TCP with a large initial window: routes get an `initcwnd`,
//! connections keep their window while idle (`tcp_slow_start_after_idle`) and do not cut what they
//! send to the pace that the window means (`tcp_min_tso_segs`). Nothing else of TCP changes. Loss,
//! ECN and timeouts still shrink the window of who sees them; a host that controls congestion hides
//! them, and holds the guest back by the receive window.
//!
//! **It is only right while a host does its part.** So all of it hangs on the host's heartbeat:
//!
//! ```text
//! heartbeats ──> beats ──live NICs──> plan ──steps──> rtnl (routes), settings (sysctl)
//!                 clock              routes, records
//! ```
//!
//! - [`beats`] knows which NICs hear a host. No clock, no sockets: time is an argument.
//! - [`earlier`] holds routes back while connections are left that another daemon knew;
//!   [`connections`] lists them.
//! - [`plan`] compares the routes there are with those that should be, and says what to change.
//! - [`record`] is what was there before, in a file: whoever comes next can undo it exactly.
//! - [`route`] and [`rtnl`] are rtnetlink(7), over `netlink`. A route is sent back as the kernel
//!   gave it, attribute by attribute, but for the one metric. That is why no library parses it and
//!   no `ip` prints it: what these do not know, they would lose.
//! - [`np_flood`] is another way: connections flood by a congestion control of their own, and
//!   routes stay as they are. Its program sees by itself when the last heartbeat grows stale.
//! - [`watch`] is the process that waits for heartbeats, and its keeper.
//!
//! # What holds whatever happens
//!
//! 1. A change is recorded before it is made. Undoing looks at the route as it is now, and takes
//!    from it what we gave, if that is still there: a route that somebody replaced stays theirs.
//! 2. No single death leaves a guest flooding: the keeper undoes what a killed watcher did, and a
//!    watcher whose keeper dies undoes it and ends.
//! 3. What cannot be told apart is left alone: routes that the kernel made from router
//!    advertisements, or that expire (a change would make them permanent).

pub mod beats;
pub mod connections;
pub mod control;
pub mod earlier;
#[cfg(np_flood)]
mod libbpf;
mod netlink;
pub mod np_flood;
pub mod plan;
pub mod record;
pub mod route;
pub mod rtnl;
pub mod settings;
pub mod status;
pub mod watch;
