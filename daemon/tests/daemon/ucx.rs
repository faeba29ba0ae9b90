//! Payload between two hosts by UCX, over its transport `tcp`: daemons in network namespaces,
//! guests whose drivers are ours. Needs root, and a daemon with the feature `ucx`.

use std::process::Command;
use std::time::Instant;

use nightporter_core::toe::control::Ask;
use nix::sys::signal::Signal;

use crate::fabric::{Stranger, configure, fabric};
use crate::host::{Dir, Host, LIMIT};
use crate::overlay::{Namespace, two_hosts};
use crate::sockets::{SocketGuest, ask, connect, listen, until};
use crate::toe::{RESET, SERVER, boot, bytes, one_is_not_read, socket, toe};

const UCX: &str = "fabric = \"ucx\"\n";

/// Two hosts with a guest each.
struct World {
    a: SocketGuest,
    b: SocketGuest,
    one: Host,
    two: Host,
    _dirs: [Dir; 2],
    _names: (Namespace, Namespace),
}

/// A daemon on host `n` with these VMs and the last byte of their addresses, and these keys of
/// `[toe]`.
fn start(on: &Namespace, n: u8, vms: &[(&str, u8)], toe: &str) -> (Dir, Host) {
    let dir = Dir::new();
    let vms: Vec<_> =
        vms.iter().map(|(vm, ip)| (*vm, *ip, "allow_unsealed_memory = true")).collect();
    let config = configure(&dir, n, toe, &vms);
    // UCX finds interfaces by a sysfs of the namespace's own. And namespaces stand for hosts here,
    // but have one memory.
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c"]).env("UCX_TLS", "tcp");
    command.arg("mount -t sysfs none /sys && exec \"$0\" --config \"$1\"");
    command.arg(env!("CARGO_BIN_EXE_nightporterd")).arg(config);
    let host = on.enter(|| Host::start_as(&dir, &mut command));
    (dir, host)
}

fn world(toe: [&str; 2]) -> World {
    let names = two_hosts();
    let (one_dir, one) = start(&names.0, 1, &[("a", 1)], toe[0]);
    let (two_dir, two) = start(&names.1, 2, &[("b", 2)], toe[1]);
    let (a, mut b) = (boot(&one_dir, "a"), boot(&two_dir, "b"));
    listen(&mut b, SERVER);
    World { a, b, one, two, _dirs: [one_dir, two_dir], _names: names }
}

/// As [`crate::toe::cross`], and then nothing is left.
fn cross(world: &mut World) {
    let World { a, b, one, two, .. } = world;
    crate::toe::cross(a, b);
    until(&mut [a, b], "nothing is left", |_| {
        toe(one, "a").sockets == 0 && toe(two, "b").sockets == 0
    });
}

#[test]
#[ignore = "needs root: it makes network namespaces"]
fn what_goes_by_ucx_arrives_as_it_was_and_both_ends_are_clean() {
    let mut world = world([UCX, UCX]);
    cross(&mut world);
    let World { mut a, mut b, one, two, .. } = world;
    // The next connection has the same stream, and the same endpoint.
    let (at_a, at_b) = connect(&mut a, &mut b, SERVER);
    a.write(at_a, b"again");
    until(&mut [&mut a, &mut b], "bytes", |g| g[1].socket(at_b).got == b"again");
    let (of_one, of_two) = (fabric(&one), fabric(&two));
    assert_eq!((of_one.dialed, of_one.reused, of_one.lost, of_two.lost), (1, 1, 0, 0));
    assert_eq!((of_one.ucx_endpoints, of_two.ucx_endpoints), (1, 1));
    for (from, to) in [(of_one, of_two), (of_two, of_one)] {
        assert!(from.ucx_sent > 20, "{from:?}");
        assert_eq!(from.ucx_sent, to.ucx_received);
        assert_eq!((to.ucx_strays, to.ucx_waiting_bytes), (0, 0));
    }
    assert_eq!([&one, &two].map(|host| host.status().refused_calls), [0, 0]);
}

#[test]
#[ignore = "needs root: it makes network namespaces"]
fn a_host_without_it_is_reached_by_tcp() {
    for toe in [[UCX, ""], ["", UCX]] {
        let mut world = world(toe);
        cross(&mut world);
        for host in [&world.one, &world.two] {
            let fabric = fabric(host);
            assert_eq!((fabric.ucx_sent, fabric.ucx_endpoints, fabric.lost), (0, 0, 0));
            assert!(fabric.streams == 1);
        }
    }
}

#[test]
#[ignore = "needs root: it makes network namespaces"]
fn when_a_daemon_dies_that_sends_or_receives_by_ucx_the_other_guest_reads_a_reset() {
    for sender_dies in [true, false] {
        let World { mut a, mut b, one, two, _dirs, _names } = world([UCX, UCX]);
        let (at_a, at_b) = connect(&mut a, &mut b, SERVER);
        a.write(at_a, &bytes(3, 4_000_000));
        until(&mut [&mut a, &mut b], "some of it", |g| g[1].socket(at_b).got.len() > 1_000_000);
        assert!(fabric(&one).ucx_sent > 0);
        let (dies, stays, mut guest, at) = match sender_dies {
            true => (one, two, b, at_b),
            false => (two, one, a, at_a),
        };
        dies.signal(Signal::SIGKILL);
        until(&mut [&mut guest], "it hears of it", |g| g[0].socket(at).is_reset);
        assert!(!guest.socket(at).has_ended, "no clean end");
        assert_eq!(ask(&mut guest, Ask::Describe(at)), RESET);
        until(&mut [&mut guest], "its endpoint is closed", |_| fabric(&stays).ucx_endpoints == 0);
        assert_eq!((fabric(&stays).ucx_waiting_bytes, stays.status().refused_calls), (0, 0));
    }
}

#[test]
#[ignore = "needs root: it makes network namespaces"]
fn who_does_not_read_what_comes_by_ucx_stops_the_writer_and_nobody_else() {
    let World { mut a, mut b, one, two, _dirs, _names } = world([UCX, UCX]);
    let (at_a, at_b) = one_is_not_read(&mut a, &mut b, || {});
    let slow = bytes(4, 2_000_000);
    // It is off its CPU, and has no buffers: what has come stays with its host.
    b.refills = false;
    let before = b.socket(at_b).got.len();
    a.write(at_a, &slow);
    until(&mut [&mut a, &mut b], "something waits", |_| fabric(&two).ucx_waiting_bytes > 0);
    assert!(fabric(&two).ucx_waiting_bytes <= 1 << 20);
    b.refill();
    until(&mut [&mut a, &mut b], "all is there", |g| {
        g[1].socket(at_b).got.len() == before + slow.len()
    });
    assert!(b.socket(at_b).got[before..] == slow);
    assert_eq!((fabric(&two).ucx_waiting_bytes, toe(&one, "a").kept_bytes), (0, 0));
}

#[test]
#[ignore = "needs root: it makes network namespaces"]
fn what_has_come_for_a_guest_that_takes_nothing_is_bounded_and_another_guest_goes_on() {
    let names = two_hosts();
    let (one_dir, one) = start(&names.0, 1, &[("a", 1)], UCX);
    let (two_dir, two) = start(&names.1, 2, &[("b", 2), ("c", 3)], UCX);
    let (mut a, mut b, mut c) = (boot(&one_dir, "a"), boot(&two_dir, "b"), boot(&two_dir, "c"));
    listen(&mut b, SERVER);
    listen(&mut c, "10.0.0.3:80");
    // Its sockets have room for three times as much as its host keeps of it.
    let pairs: Vec<_> = (0..120).map(|_| connect(&mut a, &mut b, SERVER)).collect();
    let (to_c, at_c) = connect(&mut a, &mut c, "10.0.0.3:80");
    let sent = bytes(6, 500_000);
    let (first, rest) = sent.split_at(100_000);
    let write = |a: &mut SocketGuest, bytes| pairs.iter().for_each(|(at, _)| a.write(*at, bytes));
    let all_have = |b: &SocketGuest, bytes: &[u8]| {
        pairs.iter().all(|(_, at_b)| b.socket(*at_b).got.len() == bytes.len())
    };
    write(&mut a, first);
    until(&mut [&mut a, &mut b], "all are in use", |g| all_have(g[1], first));
    b.refills = false;
    write(&mut a, rest);
    let stands = |a: &SocketGuest| pairs.iter().all(|(at_a, _)| !a.has_room(*at_a));
    until(&mut [&mut a, &mut b], "much has come", |_| fabric(&two).ucx_waiting_bytes > 4 << 20);
    until(&mut [&mut a, &mut b], "nobody may send more", |g| stands(g[0]));
    a.write(to_c, &sent);
    until(&mut [&mut a, &mut b, &mut c], "the other guest goes on", |g| {
        g[2].socket(at_c).got.len() == sent.len()
    });
    let waiting = fabric(&two).ucx_waiting_bytes;
    assert!(waiting <= (8 << 20) + 120 * 4096, "{waiting}");
    b.refill();
    until(&mut [&mut a, &mut b], "all is there", |g| all_have(g[1], &sent));
    assert!(pairs.iter().all(|(_, at_b)| b.socket(*at_b).got == sent));
    assert!(c.socket(at_c).got == sent);
    assert_eq!((fabric(&one).lost, fabric(&two).lost, fabric(&two).ucx_waiting_bytes), (0, 0, 0));
}

#[test]
#[ignore = "needs root: it makes network namespaces"]
fn nothing_is_sent_by_ucx_of_memory_that_is_not_there() {
    let World { a, mut b, one, two, _dirs, _names } = world([UCX, UCX]);
    drop(a);
    let mut a = SocketGuest::boot_unsealed(&socket(&_dirs[0], "a"));
    let (at_a, at_b) = connect(&mut a, &mut b, SERVER);
    a.write(at_a, &bytes(9, 1000));
    until(&mut [&mut a, &mut b], "bytes", |g| g[1].socket(at_b).got.len() == 1000);
    a.sends_without_memory(at_a, 1000);
    until(&mut [&mut b], "it is reset", |g| g[0].socket(at_b).is_reset);
    assert_eq!(b.socket(at_b).got, bytes(9, 1000));
    assert_eq!((toe(&one, "a").memory_faults, toe(&one, "a").ring_faults), (1, 0));
    assert_eq!((fabric(&one).ucx_sent > 0, fabric(&two).ucx_waiting_bytes), (true, 0));
}

#[test]
#[ignore = "needs root: it makes network namespaces"]
fn who_says_of_itself_what_no_host_says_is_hung_up_on() {
    let names = two_hosts();
    let (_dir, two) = start(&names.1, 2, &[("b", 2)], UCX);
    // Until it has heard of its peers, it refuses them.
    let begun = Instant::now();
    while fabric(&two).accepted == 0 {
        assert!(begun.elapsed() < LIMIT, "it knows no other host");
        drop(Stranger::at(&names.0, 1, crate::fabric::PORT));
    }
    let too_long = [&5000_u16.to_le_bytes()[..], &[7; 5000]].concat();
    let without_an_address = [&40_u16.to_le_bytes()[..], &[7; 40]].concat();
    for lie in [&[0, 0][..], &too_long, &without_an_address] {
        let mut stranger = Stranger::at(&names.0, 1, crate::fabric::PORT);
        stranger.says(b"npvtoe\0\x02").says(&[0; 32]).says(lie).is_hung_up_on();
    }
    Stranger::at(&names.0, 1, crate::fabric::PORT)
        .says(b"npvtoe\0\x03")
        .says(&[0; 32])
        .is_hung_up_on();
    assert_eq!((fabric(&two).nonsense, fabric(&two).ucx_endpoints), (4, 0));
}
