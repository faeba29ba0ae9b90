//! `nightporter-guest flood`: routes.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::world::{FAR, MSS, NEAR, World, ip, pieces, routes, signal_process, slow_start};

/// The initial window of RFC 6928, as Linux has it: ten segments.
const ORDINARY: u32 = 10 * MSS;
/// The default route, and the one to the guest's own network.
const BOTH: usize = 2;
/// So many timeouts take a window of 1000 segments to ten, and one more.
const PAUSE: u32 = 8;
/// FLOOD-28.
const STALE: Duration = Duration::from_secs(2);

#[test]
#[ignore = "needs root: it makes a tap"]
fn s_35_a_heartbeat_that_stops_ends_the_flood_within_two_seconds() {
    World::run(|mut world| {
        let before = routes();
        let mut tool = world.watch("");
        assert!(world.first_flight(FAR, None) <= ORDINARY, "nobody has said anything yet");
        assert_eq!(routes(), before);
        world.host_says(true);
        tool.until_said("np0: the host controls congestion");
        world.until_flooding(BOTH);
        for remote in [FAR, NEAR] {
            let flight = world.first_flight(remote, None);
            assert!(flight > 500 * MSS, "{remote}: {flight}");
        }
        assert_eq!((slow_start(), pieces()), ("0".to_owned(), "44".to_owned()));
        // In long pieces, however slow the handshake was.
        world.host_says(true);
        let mut slow = world.open_slowly(FAR, None, Duration::from_millis(150));
        assert!(world.flight(&mut slow) > 500 * MSS);
        assert!(slow.longest > 40 * MSS, "{}", slow.longest);
        let mut at_rest = world.open(FAR, None);
        world.exchange(&mut at_rest);
        let last = world.host_says(true);
        // And then never again: the guest was moved to a plain bridge.
        let took = world.until_flooding(0) - last;
        assert!(took > STALE - Duration::from_millis(400), "too soon: {took:?}");
        assert!(took <= STALE, "too late: {took:?}");
        assert_eq!(routes(), before);
        for remote in [FAR, NEAR] {
            let flight = world.first_flight(remote, None);
            assert!((MSS..=ORDINARY).contains(&flight), "{remote}: {flight}");
        }
        assert_eq!((slow_start(), pieces()), ("1".to_owned(), "2".to_owned()));
        // It asks the new route when it sends; from then on half of its window goes with each
        // timeout that it is idle.
        world.exchange(&mut at_rest);
        world.hear_nothing(PAUSE * world.timeout(&at_rest));
        let flight = world.flight(&mut at_rest);
        assert!((MSS..=2 * ORDINARY).contains(&flight), "a connection that was idle: {flight}");
        // It comes back, and a host that says stop is obeyed without waiting.
        world.control_begins_again();
        world.host_says(true);
        world.until_flooding(BOTH);
        let mut floods_already = world.open(FAR, None);
        let stop = world.host_says(false);
        let took = world.until_flooding(0) - stop;
        assert!(took < STALE / 2, "{took:?}");
        // Nothing in Linux takes its window from a connection: this is said, not hidden.
        let flight = world.flight(&mut floods_already);
        assert!(flight > 10 * ORDINARY, "a connection that floods already: {flight}");
        // SIGTERM while it floods: everything is undone.
        world.host_says(true);
        world.until_flooding(BOTH);
        signal_process(tool.child.id(), Signal::SIGTERM);
        assert!(tool.child.wait().unwrap().success());
        assert_eq!((routes(), slow_start()), (before, "1".to_owned()));
        assert_eq!(pieces(), "2");
    });
}

#[test]
#[ignore = "needs root: it makes a tap"]
fn flood_28_no_single_death_leaves_a_guest_flooding() {
    World::run(|mut world| {
        let before = routes();
        // The watcher is killed: its keeper undoes what it did, and says so.
        let mut keeper = world.watch("");
        world.host_says(true);
        world.until_flooding(BOTH);
        world.signal_watcher(Signal::SIGKILL);
        assert!(!keeper.child.wait().unwrap().success());
        assert_eq!((routes(), slow_start()), (before.clone(), "1".to_owned()));
        // The keeper is killed: the watcher undoes it.
        let mut keeper = world.watch("");
        world.host_says(true);
        world.until_flooding(BOTH);
        keeper.child.kill().unwrap();
        keeper.child.wait().unwrap();
        world.until_flooding(0);
        // Both are: it is printed, and the next run undoes it.
        world.says("flood off"); // waits for the watcher
        let mut keeper = world.watch("");
        world.host_says(true);
        world.until_flooding(BOTH);
        signal_process(keeper.child.id(), Signal::SIGSTOP); // so that it cannot undo anything
        world.signal_watcher(Signal::SIGKILL);
        keeper.child.kill().unwrap();
        keeper.child.wait().unwrap();
        world.until_nobody_watches();
        let status = world.says("flood status");
        assert!(status.starts_with("flooding     off, BUT NOT UNDONE"), "{status}");
        assert_eq!(routes().matches("initcwnd 1000").count(), BOTH);
        world.says("flood off");
        assert_eq!((routes(), slow_start()), (before, "1".to_owned()));
    });
}

#[test]
#[ignore = "needs root: it makes a tap"]
fn on_and_off_do_the_same_twice_and_status_says_which_is_in_force() {
    World::run(|mut world| {
        let before = routes();
        assert_eq!(world.says("flood off"), "It was off.\n");
        assert!(world.says("flood on").starts_with("On: "));
        assert_eq!(world.says("flood on"), "It is on already.\n");
        let status = world.says("flood status");
        assert!(status.starts_with("flooding     on, but no host says"), "{status}");
        world.host_says(true);
        world.until_flooding(BOTH);
        let status = world.says("flood status");
        assert!(status.contains("flooding     on, a host controls congestion\n"), "{status}");
        assert!(status.contains("heard on     np0\n"), "{status}");
        assert!(status.contains("default metric 100: initcwnd 1000, before none\n"), "{status}");
        assert!(status.contains("10.0.0.0/24: initcwnd 1000, before none\n"), "{status}");
        assert_eq!(world.says("flood off"), "Off, and everything is undone.\n");
        assert_eq!((routes(), slow_start()), (before, "1".to_owned()));
        assert_eq!(world.says("flood off"), "It was off.\n");
    });
}

#[test]
#[ignore = "needs root: it makes a tap"]
fn flood_28_all_routes_by_the_link_flood_and_no_other_and_all_come_back_as_they_were() {
    World::run(|mut world| {
        ip("link add other type veth peer name others");
        for link in ["other", "others"] {
            ip(&format!("link set {link} up"));
        }
        ip("addr add 10.7.0.2/24 dev other");
        ip("addr add fd00::2/64 dev np0 nodad");
        for route in [
            "10.1.0.0/16 via 10.0.0.1 dev np0 table 77",
            "10.2.0.0/16 via 10.0.0.3 dev np0 tos 8 mtu lock 1400 initcwnd 20 initrwnd 30",
            "10.3.0.0/16 nexthop via 10.0.0.1 dev np0 weight 2 nexthop via 10.0.0.3 dev np0",
            "10.4.0.0/16 nexthop via 10.0.0.1 dev np0 nexthop via 10.7.0.1 dev other",
            "10.5.0.0/16 via 172.16.0.1 dev np0 onlink src 10.0.0.2 realm 5",
            "10.6.0.0/16 via 10.7.0.1 dev other",
            "blackhole 10.8.0.0/16",
        ] {
            ip(&format!("route add {route}"));
        }
        for route in [
            "default via fd00::1 dev np0 metric 1024 hoplimit 7",
            "fd01::/64 nexthop via fd00::1 dev np0 nexthop via fd00::3 dev np0",
            "fd02::/64 via fd00::1 dev np0 proto ra",
            "fd03::/64 via fd00::1 dev np0 expires 1000",
        ] {
            ip(&format!("-6 route add {route}"));
        }
        let before = routes();
        world.says("flood on");
        world.host_says(true);
        world.until_flooding(9);
        let now = routes();
        let elsewhere = ["10.4.", "10.6.", "10.7.", "10.8.", "fd02:", "fd03:", "fe80:", "\t"];
        for line in now.lines() {
            let to = line.split_once(' ').map_or("\t", |(_, rest)| rest);
            let wanted = !line.starts_with('\t') && !elsewhere.iter().any(|e| to.starts_with(e));
            assert_eq!(line.contains("initcwnd 1000"), wanted, "{line}");
        }
        assert_eq!(slow_start(), "1", "other networks are reached by another NIC too");
        world.host_says(true);
        let status = world.says("flood status");
        assert!(status.contains("left alone   inet6 fd02::/64 metric 1024: from a"), "{status}");
        assert!(status.contains("left alone: other networks are reached by other"), "{status}");
        world.says("flood off");
        assert_eq!(routes(), before);
    });
}

#[test]
#[ignore = "needs root: it makes a tap"]
fn flood_28_a_route_that_changes_under_it_floods_too_and_stays_changed() {
    World::run(|mut world| {
        world.says("flood on");
        world.host_says(true);
        world.until_flooding(BOTH);
        let changed = Instant::now();
        ip("route replace default via 10.0.0.3 dev np0 metric 100");
        assert!(world.until_flooding(BOTH) - changed < STALE);
        assert!(routes().contains("10.0.0.3"), "{}", routes());
        // The link goes down and comes up: the kernel made the routes anew.
        ip("link set np0 down");
        world.until_flooding(0);
        ip("link set np0 up");
        ip("route add default via 10.0.0.1 dev np0 metric 100");
        world.host_says(true);
        world.until_flooding(BOTH);
        let mine = "route change default via 10.0.0.3 dev np0 metric 100 initcwnd 5000";
        ip(mine);
        world.says("flood off");
        let left = routes();
        assert!(left.contains("initcwnd 5000") && !left.contains("initcwnd 1000"), "{left}");
    });
}

#[test]
#[ignore = "needs root: it makes a tap"]
fn flood_28_another_daemon_floods_nothing_while_the_one_before_left_large_windows() {
    World::run(|mut world| {
        let before = routes();
        let mut tool = world.watch("");
        world.host_says(true);
        world.until_flooding(BOTH);
        let [mut at_rest, mut silent] = [FAR, NEAR].map(|remote| world.open(remote, None));
        world.exchange(&mut at_rest);
        world.exchange(&mut silent);
        // The same daemon has no place for a while, and then it has.
        world.host_says(false);
        world.until_flooding(0);
        world.control_begins_again();
        world.host_says(true);
        world.until_flooding(BOTH);
        // It is replaced, and its guest has not even missed it.
        let opening = world.begin_to_open(FAR, None);
        world.another_daemon_starts();
        let left = |left| {
            format!(
                "flooding     on, but nothing floods yet: another daemon controls congestion, \
                 and {left} of the connections of before"
            )
        };
        world.host_goes_on_until(&left(3));
        world.exchange(&mut at_rest);
        world.host_goes_on(PAUSE * world.timeout(&at_rest));
        let flight = world.flight(&mut at_rest);
        assert!((MSS..=2 * ORDINARY).contains(&flight), "nobody controls it: {flight}");
        world.host_goes_on_until(&left(2));
        // It had asked when it still could have flooded.
        let mut opened = world.finish_opening(opening);
        let flight = world.flight(&mut opened);
        assert!((MSS..=ORDINARY).contains(&flight), "{flight}");
        world.host_goes_on_until(&left(1));
        tool.until_said("new connections do not flood: another daemon");
        assert_eq!((routes(), slow_start(), pieces()), (before, "1".to_owned(), "2".to_owned()));
        let flight = world.first_flight(FAR, None);
        assert!((MSS..=ORDINARY).contains(&flight), "{flight}");
        // The last of them ends.
        world.reset(silent);
        world.host_goes_on_until("flooding     on, a host controls congestion\n");
        assert!(world.first_flight(FAR, None) > 500 * MSS);
    });
}
