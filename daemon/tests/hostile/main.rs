//! Front-ends, guests and others who mean harm, against a whole daemon: whatever they do, other VMs
//! and the operator go on. `drowned` asks a port alone how much work it takes. What a port makes of
//! nonsense is in `vhost_user/malicious.rs`.

mod blocked;
mod crowded;
#[allow(dead_code)] // shared with the tests of the rings, which use more of it
#[path = "../vhost_user/driver.rs"]
mod driver;
mod drowned;
#[allow(dead_code)]
#[path = "../daemon/guest.rs"]
mod guest;
#[allow(dead_code)]
#[path = "../daemon/host.rs"]
mod host;
mod killed;
mod random;
#[allow(dead_code)]
#[path = "../daemon/segment.rs"]
mod segment;
mod street;
#[allow(dead_code)]
#[path = "../vhost_user/world.rs"]
mod world;
