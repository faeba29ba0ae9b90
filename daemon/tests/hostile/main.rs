//! Front-ends, guests and others who mean harm, against a whole daemon: whatever they do, other VMs
//! and the operator go on. `drowned` asks a port alone how much work it takes, `crowded` a daemon
//! with many neighbours. Nonsense for one port is in `vhost_user/malicious.rs`.
//!
//! Costs that only a million connections or thousands of ports show are counted where there are so
//! many: a link that flaps, a stop and a VM that goes in `core/src/engine/tests.rs` (`inv_20`,
//! `life_05`, `life_06`), idle VMs and copies for 200 in `core/src/turn/tests.rs`, statuses and
//! front-ends by turns in `daemon/src/worker/tests.rs`.

mod asleep;
mod blocked;
mod bursts;
mod charged;
mod costly;
mod crowded;
#[allow(dead_code)] // shared with the tests of the rings, which use more of it
#[path = "../vhost_user/driver.rs"]
mod driver;
mod drowned;
mod echoes;
#[allow(dead_code)]
#[path = "../daemon/guest.rs"]
mod guest;
#[allow(dead_code)]
#[path = "../daemon/host.rs"]
mod host;
mod huge_pages;
mod killed;
mod mallory;
mod plugged;
mod random;
#[allow(dead_code)]
#[path = "../daemon/segment.rs"]
mod segment;
#[allow(dead_code)]
#[path = "../daemon/sockets.rs"]
mod sockets;
mod street;
mod times;
#[allow(dead_code)]
#[path = "../vhost_user/world.rs"]
mod world;

/// Says that a test shows nothing here, past libtest's capture: `.ci/test` counts such lines.
fn skips(why: &str) {
    use std::io::Write;
    let _ = writeln!(std::io::stderr(), "SKIPPED: {why}");
}
