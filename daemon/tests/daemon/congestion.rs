//! Congestion offload seen from outside: heartbeats, and what a guest hands over.

use nightporter_api::{Reply, Request};
use nightporter_core::wire::heartbeat::Heartbeat;
use nix::sys::signal::Signal;

use crate::flows::World;
use crate::guest::{EVENTS, Guest};
use crate::host::{Dir, Host};
use crate::segment::parse;

const WANTED: &str = "congestion_offload = true";

/// A host with two VMs, of which the first has congestion offload, and its guest.
fn host() -> (Dir, Host, Guest) {
    let dir = Dir::new();
    let ports = dir.vm("web1", WANTED) + &dir.vm("web2", "");
    let config = dir.configure("metrics = \"off\"", &ports);
    let host = Host::start(&dir, &config);
    let guest = boot(&dir, "web1");
    (dir, host, guest)
}

fn boot(dir: &Dir, name: &str) -> Guest {
    let mut guest = Guest::boot(&dir.join(name), EVENTS);
    guest.offer(8);
    guest
}

fn beat(guest: &mut Guest) -> Heartbeat {
    let frames = guest.receive(1);
    Heartbeat::parse(&frames[0]).unwrap_or_else(|| panic!("not a heartbeat: {:x?}", frames[0]))
}

#[test]
fn flood_28_a_vm_with_congestion_offload_hears_heartbeats_and_no_other() {
    let (dir, host, mut web1) = host();
    let mut web2 = boot(&dir, "web2");
    let first = beat(&mut web1);
    assert!(first.controls);
    assert_eq!((beat(&mut web1), beat(&mut web1)), (first, first));
    assert!(web2.received().is_empty());
    assert_eq!(host.port("web1").frames_to_port, 3);
}

#[test]
fn flood_28_each_command_is_said_at_once_and_control_that_begins_again_is_another_epoch() {
    let (_dir, host, mut guest) = host();
    let first = beat(&mut guest);
    let vm = || String::from("web1");
    let mut after = |request: Request| {
        assert_eq!(host.ask(&request), Reply::Done {});
        let beat = beat(&mut guest);
        let port = host.port("web1").vm.unwrap();
        assert_eq!(port.controls_congestion, beat.controls);
        (beat.controls, beat.epoch == first.epoch)
    };
    let congestion = |on| Request::CongestionOffload { vm: vm(), on };
    let ack = |on| Request::Offload { vm: vm(), on };
    assert_eq!(after(congestion(false)), (false, true));
    assert_eq!(after(congestion(true)), (true, false));
    assert_eq!(after(ack(false)), (false, false), "H sees no ACKs of connections without it");
    assert_eq!(after(ack(true)), (true, false));
    assert_eq!(after(Request::Drain { vm: vm() }), (false, false));
}

#[test]
fn flood_28_a_daemon_that_stops_says_so_and_the_next_one_has_another_epoch() {
    let (dir, host, mut guest) = host();
    let first = beat(&mut guest);
    host.signal(Signal::SIGTERM);
    assert_eq!(beat(&mut guest), Heartbeat { controls: false, ..first });
    assert_eq!(host.wait(), Some(0));
    let _host = Host::start(&dir, &dir.join("np.toml"));
    let next = beat(&mut boot(&dir, "web1"));
    assert!(next.controls && next.epoch != first.epoch);
}

/// G hands over 40,000 bytes at once, and R gets the first window of them.
fn flooding() -> World {
    let mut w = World::connected_with("", WANTED);
    (0..40).for_each(|n| w.guest_sends(1 + 1000 * n, 1, &[7; 1000]));
    let mut end = 1;
    for frame in w.remote.receive(14) {
        let segment = parse(&frame);
        assert_eq!(segment.seq, w.position_of_guest(end), "in order, each once");
        end += u32::try_from(segment.payload.len()).unwrap();
    }
    assert_eq!(end, 14_001, "ten segments of 1,460 bytes, no more");
    w
}

#[test]
fn flood_19_what_a_guest_hands_over_at_once_leaves_by_a_window_of_the_host() {
    let mut w = flooding();
    let vm = w.host.port("guest").vm.unwrap();
    assert_eq!((vm.counters["flows_flooded"], vm.counters["sent_for_guest_bytes"]), (1, 14_000));
    let sends = w.flow().sends.expect("H sends for it");
    assert_eq!((sends.kept_bytes, sends.unsent_bytes), (40_000, 26_000));
    assert_eq!((sends.cwnd_bytes, sends.in_flight_bytes, sends.mss), (14_600, 14_000, 1460));
    w.remote_sends(1, 14_001, &[]);
    w.until_guest_is_told(14_001); // what R has, G may free
    assert_eq!(w.remote.receive(28).len(), 28, "and the window is twice as large");
}

#[test]
fn a_daemon_killed_in_mid_download_loses_no_byte_that_the_guest_believes_acknowledged() {
    let mut w = flooding();
    w.remote_sends(1, 9_001, &[]);
    let believed = w.position_of_guest(9_001);
    w.until_guest_is_told(9_001);
    w.host.signal(Signal::SIGKILL);
    assert_eq!(w.host.wait(), None);
    let later = w.guest.received();
    let segments = later.iter().filter(|frame| Heartbeat::parse(frame).is_none());
    assert!(segments.map(|frame| parse(frame).ack).all(|ack| ack == believed));
}
