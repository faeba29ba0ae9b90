//! The settling run after a daemon that was killed, with taps as in `attached`. Needs root.

use std::process::{Child, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::attached::{G, G_ISN, MSS, PATIENT, R, R_ISN, Street, echo, links, until, vm};
use crate::bridges;
use crate::flows;
use crate::guest::PLAIN;
use crate::host::{Dir, Host, command};
use crate::segment::{ACK, End, PSH, RST, SYN, Segment, parse};
use crate::uplinks::ip;

/// The clocks of both ends at the beginning.
const CLOCKS: [u32; 2] = [5000, 800_000];

/// The option, for this end, which has heard this of the other one's clock.
fn clock(of: End, heard: u32) -> [u8; 12] {
    let own = CLOCKS[usize::from(of.0 == G.0)] + 1;
    let mut option = [1, 1, 8, 10, 0, 0, 0, 0, 0, 0, 0, 0];
    option[4..8].copy_from_slice(&own.to_be_bytes());
    option[8..].copy_from_slice(&heard.to_be_bytes());
    option
}

/// A segment with a clock; positions count what was sent behind the handshake.
fn sends(street: &Street, from: End, at: u32, ack: u32, payload: &[u8]) {
    let (to, isns) = if from.0 == G.0 { (R, [G_ISN, R_ISN]) } else { (G, [R_ISN, G_ISN]) };
    let [seq, ack] = [isns[0].wrapping_add(1 + at), isns[1].wrapping_add(1 + ack)];
    let options = clock(from, CLOCKS[usize::from(to.0 == G.0)] + 1);
    let flags = if payload.is_empty() { ACK } else { ACK | PSH };
    street.sends(
        from,
        to,
        &Segment { flags, seq, ack, window: 60_000, options: &options, payload },
    );
}

/// A connection of which a daemon that is killed owes G 1,000 bytes.
fn owes(street: &Street, host: Host, vm: &str) {
    host.until(vm, |port| port.link);
    street.sends_frame(G, &echo(7)); // which shows its MAC
    street.gets_frame(R);
    let options = |of, heard| [&MSS[..], &clock(of, heard)].concat();
    let syn = Segment { flags: SYN, seq: R_ISN, window: 60_000, ..Segment::default() };
    street.sends(R, G, &Segment { options: &options(R, 0), ..syn });
    assert_eq!(street.gets(G).flags, SYN);
    let syn_ack = Segment { flags: SYN | ACK, seq: G_ISN, ack: R_ISN.wrapping_add(1), ..syn };
    street.sends(G, R, &Segment { options: &options(G, CLOCKS[0] + 1), ..syn_ack });
    assert_eq!(street.gets(R).flags, SYN | ACK);
    sends(street, R, 0, 0, &[]);
    assert_eq!(street.gets(G).flags, ACK);
    sends(street, G, 0, 0, &[6; 10]); // G has to be heard once
    assert_eq!(street.gets(R).payload, [6; 10]);
    sends(street, R, 0, 10, &[7; 1000]);
    assert_eq!(street.gets(R).ack, R_ISN.wrapping_add(1001));
    assert!(street.gets_frame(G).ends_with(&[7; 1000]), "and G has lost them");
    host.signal(Signal::SIGKILL);
    host.wait();
}

/// G is asked what it has.
fn is_asked(street: &Street) {
    while parse(&street.gets_frame(G)).seq != R_ISN {}
}

/// G says that it has nothing, gets all, and says so.
fn takes(street: &Street) {
    sends(street, G, 10, 0, &[]);
    while !street.gets_frame(G).ends_with(&[7; 1000]) {} // behind questions
    sends(street, G, 10, 1000, &[]);
}

/// The daemon that would be there, but that its configuration may have other VMs.
fn start(dir: &Dir, ports: &str) -> Host {
    Host::start(dir, &dir.configure(PATIENT, ports))
}

fn settles(dir: &Dir) -> Child {
    command(&dir.join("np.toml")).arg("--settle").stderr(Stdio::inherit()).spawn().unwrap()
}

fn ends_well(mut settling: Child) {
    assert!(settling.wait().unwrap().success());
}

/// There is nothing between the VM and its bridge.
fn is_plain(street: &Street) {
    until(|| !links().contains("npv") && !links().contains("npn"));
    street.sends_frame(G, &echo(3));
    while street.next(R, Duration::from_secs(20)).expect("a plain wire") != echo(3) {}
}

#[test]
#[ignore = "needs root: it attaches taps"]
fn life_17_without_a_next_daemon_the_bytes_arrive_and_the_wire_is_plain() {
    Street::run(|street| {
        // The tap is known by its address, at once: what is owed cannot wait for it.
        ip("link set vm0 address fe:00:00:00:00:01");
        let vm = || vm().replace("vm0", "vm*") + "mac = \"02:00:00:00:00:01\"\n";
        let dir = Dir::new();
        owes(&street, start(&dir, &vm()), "web1");
        let settling = settles(&dir);
        is_asked(&street);
        // A connection that begins meanwhile gets no promise.
        let other = End(R.0, R.1 + 1);
        let syn =
            Segment { flags: SYN, seq: 1, window: 60_000, options: &MSS, ..Segment::default() };
        street.sends(other, G, &syn);
        while parse(&street.gets_frame(G)).flags != SYN {}
        takes(&street);
        ends_well(settling);
        assert!(!dir.join("arena").exists());
        while let Some(frame) = street.next(R, Duration::ZERO) {
            assert_eq!(parse(&frame).flags & RST, 0);
        }
        is_plain(&street);
        // There is nothing to do for another one, nor for any behind a daemon.
        ends_well(settles(&dir));
        let host = start(&dir, &vm());
        ends_well(settles(&dir));
        host.until("web1", |port| port.link);
    });
}

#[test]
#[ignore = "needs root: it attaches taps"]
fn life_17_the_bytes_arrive_at_a_tap_that_came_with_its_bridge() {
    bridges::run(|street| {
        let (dir, vm) = (Dir::new(), bridges::vm_of("vm0"));
        owes(&street, start(&dir, &bridges::attach("br0")), &vm);
        let settling = settles(&dir);
        is_asked(&street);
        takes(&street);
        ends_well(settling);
        is_plain(&street);
    });
}

#[test]
#[ignore = "needs root: it attaches taps"]
fn life_17_bytes_owed_to_a_tap_that_comes_later_than_the_next_daemon_arrive() {
    bridges::run(|street| {
        let (dir, vm) = (Dir::new(), bridges::vm_of("vm0"));
        owes(&street, start(&dir, &bridges::attach("br0")), &vm);
        ip("link set vm0 nomaster");
        let host = start(&dir, &bridges::attach("br0"));
        assert_eq!(host.names(), [""; 0]);
        // Nor are they forgotten if that one ends, too.
        host.signal(Signal::SIGTERM);
        host.wait();
        let host = start(&dir, &bridges::attach("br0"));
        ip("link set vm0 master br0");
        is_asked(&street);
        takes(&street);
        host.until(&vm, |port| port.vm.as_ref().is_some_and(|vm| vm.owed_flows == 0));
    });
}

#[test]
#[ignore = "needs root: it attaches taps"]
fn life_17_a_vm_that_takes_nothing_is_reset_on_both_sides_when_there_is_no_more_time() {
    Street::run(|street| {
        let dir = Dir::new();
        owes(&street, start(&dir, &vm()), "web1");
        let settling = settles(&dir);
        is_asked(&street);
        let pid = Pid::from_raw(i32::try_from(settling.id()).unwrap());
        kill(pid, Signal::SIGTERM).unwrap(); // for the tests' time: else it is 30 s
        let reset = street.gets(R);
        assert_ne!(reset.flags & RST, 0, "{reset:?}");
        // R asks whether that is meant (RFC 5961), from where it is.
        sends(&street, R, 1000, 5, &[]);
        let mut answer = street.gets(R);
        while answer.flags & RST == 0 || answer.seq != G_ISN + 6 {
            answer = street.gets(R);
        }
        while parse(&street.gets_frame(G)).flags & RST == 0 {}
        ends_well(settling);
        assert!(!dir.join("arena").exists());
        is_plain(&street);
    });
}

#[test]
#[ignore = "needs root: it attaches taps"]
fn life_17_a_daemon_that_starts_takes_over_from_a_settling_run() {
    Street::run(|street| {
        let dir = Dir::new();
        owes(&street, start(&dir, &vm()), "web1");
        // As long as the tap is not there, no run does anything.
        let rename = |from: &str, to: &str| {
            ip(&format!("link set {from} down"));
            ip(&format!("link set {from} name {to}"));
            ip(&format!("link set {to} up"));
        };
        rename("vm0", "away");
        ends_well(settles(&dir));
        rename("away", "vm0");
        let settling = settles(&dir);
        is_asked(&street);
        let host = start(&dir, &vm());
        ends_well(settling);
        host.until("web1", |port| port.link);
        assert_eq!(host.port("web1").vm.unwrap().owed_flows, 1);
        is_asked(&street);
        takes(&street);
        host.until("web1", |port| port.vm.as_ref().is_some_and(|vm| vm.owed_flows == 0));
    });
}

#[test]
#[ignore = "needs root: it attaches taps"]
fn life_17_vms_with_sockets_are_left_to_the_next_daemon() {
    Street::run(|street| {
        let mut w = flows::World::connected_with("plain_after_ms = 1000", &vm());
        w.hold_1000_bytes();
        let flows::World { dir, host, mut remote, mut guest } = w;
        owes(&street, host, "web1");
        let settling = settles(&dir);
        is_asked(&street);
        takes(&street);
        ends_well(settling);
        assert!(dir.join("arena").exists());
        is_plain(&street);
        let host = Host::start(&dir, &dir.join("np.toml"));
        remote.goes_on(&dir.join("remote"), PLAIN);
        guest.goes_on(&dir.join("guest"), PLAIN);
        host.until("guest", |port| port.link);
        remote.offer(8);
        guest.offer(8);
        assert!(guest.receive(1)[0].ends_with(&[7; 1000]));
        assert_eq!(host.port("web1").vm.unwrap().owed_flows, 0);
    });
}
