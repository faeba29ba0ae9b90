//! The daemon as a process: guests on its vhost-user sockets, operators on its control socket.
//!
//! Every wait is for a condition, with a limit that only a failure reaches.

mod accept;
mod attached;
mod boost;
mod bridges;
mod changes;
mod congestion;
#[allow(dead_code)] // shared with the tests of the rings, which use more of it
#[path = "../vhost_user/driver.rs"]
mod driver;
mod encrypted;
mod etcd;
mod fabric;
mod flows;
mod forwarding;
#[allow(dead_code)] // shared with the attacks, which use more of it
mod guest;
#[allow(dead_code)]
mod host;
mod limits;
mod mistakes;
mod networks;
mod operators;
mod overlay;
mod paths;
mod prometheus;
mod registry;
mod sandbox;
mod segment;
mod settle;
mod socket_limits;
#[allow(dead_code)]
mod sockets;
mod starting;
mod switch;
#[allow(dead_code)] // shared with the lab, which uses more of it
mod systemd;
mod toe;
mod trust;
mod turns;
#[cfg(feature = "ucx")]
mod ucx;
mod upgrade;
mod uplinks;
