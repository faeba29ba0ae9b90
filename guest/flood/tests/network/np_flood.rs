//! The congestion control `np_flood`. A kernel has one of each name, so these tests are one.

use std::time::{Duration, Instant};

use nightporter_flood::np_flood::is_registered;
use nix::sys::signal::Signal;

use crate::world::{FAR, MSS, World, routes, slow_start};

const ORDINARY: u32 = 10 * MSS;
const NP_FLOOD: Option<&str> = Some("np_flood");

#[test]
#[ignore = "needs root, clang, and a kernel with BTF and struct_ops"]
fn flood_28_np_flood_is_cubic_without_a_heartbeat_and_each_connection_ends_its_own_flood() {
    World::run(|mut world| {
        let before = routes();
        let mut watch = world.watch("--np-flood");
        // No heartbeat, no flood. This connection is older than the host's next message.
        assert!(world.first_flight(FAR, NP_FLOOD) <= ORDINARY);
        let mut older = world.open(FAR, NP_FLOOD);
        world.host_says(true);
        watch.until_said("np0: the host controls congestion");
        assert!(world.first_flight(FAR, NP_FLOOD) > 500 * MSS);
        // And in long pieces, however slow the handshake was.
        world.host_says(true);
        let mut slow = world.open_slowly(FAR, NP_FLOOD, Duration::from_millis(150));
        assert!(world.flight(&mut slow) > 500 * MSS);
        assert!(slow.longest > 40 * MSS, "{}", slow.longest);
        // Others do not flood, nor does one whose beginning the host has not seen.
        assert!(world.first_flight(FAR, None) <= ORDINARY);
        world.host_says(true);
        world.exchange(&mut older);
        assert!(world.flight(&mut older) <= 2 * ORDINARY); // in slow start since
        assert_eq!((routes(), slow_start()), (before.clone(), "1".to_owned()));
        // Two that flood, and are at rest now; and then the host is silent.
        let mut at_rest = world.open(FAR, NP_FLOOD);
        let mut again = world.open(FAR, NP_FLOOD);
        world.exchange(&mut at_rest);
        world.exchange(&mut again);
        let last = world.host_says(true);
        watch.until_said("np0: no host controls congestion");
        assert!(last.elapsed() <= Duration::from_secs(2), "{:?}", last.elapsed());
        assert!(world.first_flight(FAR, NP_FLOOD) <= ORDINARY);
        let flight = world.flight(&mut at_rest);
        assert!((MSS..=ORDINARY).contains(&flight), "a connection that flooded: {flight}");
        // The same host comes back: its connections flood again, with nothing under way.
        world.host_says(true);
        watch.until_said("np0: the host controls congestion");
        let flight = world.flight(&mut again);
        assert!(flight > 500 * MSS, "{flight}");
        // Another daemon does not know it.
        let mut known_to_the_old = world.open(FAR, NP_FLOOD);
        world.exchange(&mut known_to_the_old);
        world.another_daemon_starts();
        world.host_says(true);
        let heard = Instant::now();
        while world.first_flight(FAR, NP_FLOOD) <= ORDINARY {
            assert!(heard.elapsed() < Duration::from_secs(10), "new connections flood");
            world.host_says(true);
        }
        world.host_says(true);
        let flight = world.flight(&mut known_to_the_old);
        assert!((MSS..=ORDINARY).contains(&flight), "of another epoch: {flight}");
        let status = world.says("flood status");
        assert!(status.contains("np_flood     connections that use it flood"), "{status}");
        world.says("flood off");
        assert!(!is_registered().unwrap());
        // A killed watcher leaves it registered, without heartbeats; the next takes it over.
        let mut killed = world.watch("--np-flood");
        world.signal_watcher(Signal::SIGKILL);
        assert!(!killed.child.wait().unwrap().success());
        assert!(is_registered().unwrap());
        assert!(world.first_flight(FAR, NP_FLOOD) <= ORDINARY);
        let mut next = world.watch("--np-flood");
        world.host_says(true);
        next.until_said("np0: the host controls congestion");
        assert!(world.first_flight(FAR, NP_FLOOD) > 500 * MSS);
        world.says("flood off");
        assert!(!is_registered().unwrap());
    });
}
