//! The virtual TOE between guests of one host.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use nightporter_api::Change;
use nightporter_core::limits::TOE_PACKET_FULL;
use nightporter_core::toe::control::{Ask, Program};
use nightporter_core::toe::vsock::Ports;
use nightporter_core::wire::vsock::{Header, Op};

use crate::host::{Dir, Host};
use crate::sockets::{QUEUE_SIZE, SocketGuest, ask, connect, listen, try_connect, until};

/// ECONNRESET, and "use guest TCP".
pub(crate) const RESET: u32 = 104;
pub(crate) const NATIVE: u32 = u32::MAX;

pub(crate) const SERVER: &str = "10.0.0.2:80";

/// A daemon with these VMs, the last byte of their addresses, and more keys.
fn start(vms: &[(&str, u8, &str)]) -> (Dir, Host) {
    let dir = Dir::new();
    let vm = |&(name, ip, more): &(&str, u8, &str)| {
        dir.vm(name, &format!("ips = [\"10.0.0.{ip}\"]\ntoe = true\n{more}"))
    };
    let vms: String = vms.iter().map(vm).collect();
    let config = dir.configure("metrics = \"off\"", &vms);
    let host = Host::start(&dir, &config);
    (dir, host)
}

pub(crate) fn socket(dir: &Dir, vm: &str) -> PathBuf {
    dir.join(&format!("{vm}-toe.sock"))
}

pub(crate) fn boot(dir: &Dir, vm: &str) -> SocketGuest {
    SocketGuest::boot(&socket(dir, vm))
}

/// Bytes that repeat nowhere.
pub(crate) fn bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    (0..len.div_ceil(8)).flat_map(|_| next().to_le_bytes()).take(len).collect()
}

/// Two guests, of which one has accepted the other's connection.
fn connected() -> (Dir, Host, SocketGuest, SocketGuest, Ports, Ports) {
    let (dir, host) = start(&[("a", 1, ""), ("b", 2, "")]);
    let (mut a, mut b) = (boot(&dir, "a"), boot(&dir, "b"));
    listen(&mut b, SERVER);
    let (at_a, at_b) = connect(&mut a, &mut b, SERVER);
    (dir, host, a, b, at_a, at_b)
}

/// A finishes, B goes on and closes, then A does.
pub(crate) fn ends_one_after_the_other(
    a: &mut SocketGuest,
    b: &mut SocketGuest,
    at_a: Ports,
    at_b: Ports,
) {
    a.shut_down(at_a);
    until(&mut [&mut *a, &mut *b], "its end", |g| g[1].socket(at_b).has_ended);
    b.write(at_b, b"and one more thing");
    until(&mut [&mut *a, &mut *b], "the rest", |g| g[0].socket(at_a).got.ends_with(b"thing"));
    assert!(!a.socket(at_a).has_ended);
    b.close(at_b);
    until(&mut [&mut *a, &mut *b], "the other end", |g| g[0].socket(at_a).has_ended);
    assert_eq!(ask(a, Ask::Describe(at_a)), 0, "a clean end");
    a.close(at_a);
}

/// Bytes that A writes before its close arrive, also when A's socket has gone; returns B's ports.
pub(crate) fn outlives_its_writer(a: &mut SocketGuest, b: &mut SocketGuest) -> Ports {
    let (at_a, at_b) = connect(a, b, SERVER);
    b.reads(at_b, false);
    let sent = bytes(6, 100_000);
    a.write(at_a, &sent);
    until(&mut [&mut *a, &mut *b], "it is written", |g| g[0].socket(at_a).is_written());
    a.close(at_a);
    until(&mut [&mut *a], "it is gone", |g| g[0].socket(at_a).is_reset);
    b.reads(at_b, true);
    until(&mut [&mut *b], "the end", |g| g[0].socket(at_b).has_ended);
    assert!(b.socket(at_b).got == sent);
    at_b
}

/// Connects A to B. Bytes in packets of all sizes cross both ways, in the end more than any socket
/// has room for, and both ends are clean.
pub(crate) fn cross(a: &mut SocketGuest, b: &mut SocketGuest) {
    let (at_a, at_b) = connect(a, b, SERVER);
    let (up, down) = (bytes(1, 3_000_001), bytes(2, 1_234_567));
    let (mut rest_up, mut rest_down) = (&up[..], &down[..]);
    for len in [1, 2, 39, 41, 4051, 4053, 65_536, 70_000, 100] {
        for (guest, at, rest) in [(&mut *a, at_a, &mut rest_up), (&mut *b, at_b, &mut rest_down)] {
            let (now, later) = rest.split_at(len);
            *rest = later;
            guest.write(at, now);
        }
        until(&mut [a, b], "it is sent", |g| {
            g[0].socket(at_a).is_written() && g[1].socket(at_b).is_written()
        });
    }
    a.write(at_a, rest_up);
    b.write(at_b, rest_down);
    until(&mut [a, b], "all is there", |g| {
        g[0].socket(at_a).got.len() == down.len() && g[1].socket(at_b).got.len() == up.len()
    });
    assert!(a.socket(at_a).got == down && b.socket(at_b).got == up);
    ends_one_after_the_other(a, b, at_a, at_b);
}

/// Connects A to B twice. B does not read from the first connection until all has come by the
/// second, and nothing is lost: the ports of the first. `meanwhile`: it does not read.
pub(crate) fn one_is_not_read(
    a: &mut SocketGuest,
    b: &mut SocketGuest,
    meanwhile: impl FnOnce(),
) -> (Ports, Ports) {
    let (at_a, at_b) = connect(a, b, SERVER);
    let (other_a, other_b) = connect(a, b, SERVER);
    b.reads(at_b, false);
    let (slow, quick) = (bytes(3, 2_000_000), bytes(4, 2_000_000));
    a.write(at_a, &slow);
    a.write(other_a, &quick);
    until(&mut [a, b], "the other connection goes on", |g| {
        g[1].socket(other_b).got.len() == quick.len()
    });
    assert!(b.socket(at_b).unread.len() <= 256 << 10, "no more than it has room for");
    assert!(!a.socket(at_a).is_written());
    meanwhile();
    b.reads(at_b, true);
    until(&mut [a, b], "all is there", |g| g[1].socket(at_b).got.len() == slow.len());
    assert!(b.socket(at_b).got == slow && b.socket(other_b).got == quick);
    (at_a, at_b)
}

/// Three guests, of which the second and the third listen.
fn three() -> (Dir, Host, SocketGuest, SocketGuest, SocketGuest) {
    let (dir, host) = start(&[("a", 1, ""), ("b", 2, ""), ("c", 3, "")]);
    let (a, mut b, mut c) = (boot(&dir, "a"), boot(&dir, "b"), boot(&dir, "c"));
    listen(&mut b, SERVER);
    listen(&mut c, "10.0.0.3:80");
    (dir, host, a, b, c)
}

#[test]
fn bytes_of_any_number_arrive_both_ways_and_both_ends_are_clean() {
    let (_dir, host, mut a, mut b, at_a, at_b) = connected();
    let (up, down) = (bytes(1, 3_000_001), bytes(2, 1_234_567));
    a.write(at_a, &up);
    b.write(at_b, &down);
    until(&mut [&mut a, &mut b], "all is there", |g| {
        g[0].socket(at_a).got.len() == down.len() && g[1].socket(at_b).got.len() == up.len()
    });
    assert!(a.socket(at_a).got == down && b.socket(at_b).got == up);
    ends_one_after_the_other(&mut a, &mut b, at_a, at_b);
    until(&mut [&mut a], "nothing is left", |_| toe(&host, "a").sockets == 0);
    assert_eq!(toe(&host, "b").bytes_to_guest, 3_000_001);
}

/// The daemon's status of a VM's device.
pub(crate) fn toe(host: &Host, vm: &str) -> nightporter_api::ToeStatus {
    host.port(vm).vm.expect("a VM").toe.expect("it has the device")
}

#[test]
fn who_is_not_there_is_reached_by_guest_tcp_and_who_does_not_listen_refuses() {
    let (dir, _host) = start(&[("a", 1, ""), ("b", 2, ""), ("c", 3, "isolated = true")]);
    let (mut a, mut b) = (boot(&dir, "a"), boot(&dir, "b"));
    let mut c = boot(&dir, "c");
    listen(&mut c, "10.0.0.3:80");
    for to in ["10.0.0.9:80", "10.0.0.1:80", "10.0.0.3:80"] {
        assert_eq!(try_connect(&mut a, to), Err(NATIVE), "{to}");
    }
    let ports = try_connect(&mut a, SERVER).unwrap();
    until(&mut [&mut a, &mut b], "a refusal", |g| g[0].socket(ports).is_reset);
    let code = ask(&mut a, Ask::Describe(ports));
    assert_eq!(code, NATIVE, "nobody listens by TOE");
    drop(b);
    let mut others = (81..).map(|port| format!("10.0.0.2:{port}"));
    until(&mut [&mut a], "its VMM has gone", |g| {
        try_connect(g[0], &others.next().unwrap()) == Err(NATIVE)
    });
}

#[test]
fn who_was_refused_goes_by_guest_tcp_until_somebody_listens_there() {
    let (dir, _host) = start(&[("a", 1, ""), ("b", 2, ""), ("c", 3, "")]);
    let (mut a, mut b, mut c) = (boot(&dir, "a"), boot(&dir, "b"), boot(&dir, "c"));
    let ports = try_connect(&mut a, SERVER).unwrap();
    until(&mut [&mut a, &mut b], "a refusal", |g| g[0].socket(ports).is_reset);
    assert_eq!(try_connect(&mut a, SERVER), Err(NATIVE), "it is known now");
    assert!(try_connect(&mut a, "10.0.0.2:81").is_ok(), "of another port nothing is known");
    listen(&mut c, "0.0.0.0:80");
    assert_eq!(try_connect(&mut a, SERVER), Err(NATIVE), "that is another guest");
    listen(&mut b, "0.0.0.0:80");
    connect(&mut a, &mut b, SERVER);
}

/// A finds that B's listener is full, and is sent to guest TCP. When there is a place again, and
/// some seconds later, it connects as before.
pub(crate) fn finds_a_listener_full(a: &mut SocketGuest, b: &mut SocketGuest) {
    b.is_full = true;
    let ports = try_connect(a, SERVER).unwrap();
    until(&mut [&mut *a, &mut *b], "an answer", |g| g[0].socket(ports).is_reset);
    assert_eq!(ask(a, Ask::Describe(ports)), NATIVE, "there it waits for a place");
    b.is_full = false;
    let known = Instant::now();
    assert_eq!(try_connect(a, SERVER), Err(NATIVE), "it is not asked again at once");
    until(&mut [&mut *a, &mut *b], "it may try again", |_| {
        known.elapsed() >= Duration::from_secs(5)
    });
    connect(a, b, SERVER);
}

#[test]
fn who_finds_a_listener_full_waits_by_guest_tcp() {
    let (_dir, host, mut a, mut b, ..) = connected();
    finds_a_listener_full(&mut a, &mut b);
    assert_eq!((toe(&host, "a").sockets, toe(&host, "b").sockets), (2, 2));
}

#[test]
fn rules_of_the_operator_send_to_guest_tcp_and_count_as_soon_as_they_are_loaded() {
    let dir = Dir::new();
    let vm = |name: &str, ip| dir.vm(name, &format!("ips = [\"10.0.0.{ip}\"]\ntoe = true\n"));
    let vms = vm("a", 1) + &vm("b", 2);
    let rules = "[[toe_rule]]\nprogram = \"curl\"\nuse = \"toe\"\n\
                 [[toe_rule]]\nto = [\"10.0.0.0/24\"]\nport = \"80-81\"\nuse = \"native\"\n";
    let config = dir.configure("metrics = \"off\"", &(vms.clone() + rules));
    let host = Host::start(&dir, &config);
    let (mut a, mut b) = (boot(&dir, "a"), boot(&dir, "b"));
    listen(&mut b, SERVER);
    listen(&mut b, "10.0.0.2:82");
    assert_eq!(try_connect(&mut a, SERVER), Err(NATIVE));
    let (kept, _) = connect(&mut a, &mut b, "10.0.0.2:82");
    a.program = Program::of(b"curl");
    connect(&mut a, &mut b, SERVER);
    a.program = Program::of(b"wget");
    dir.configure("metrics = \"off\"", &vms);
    let plan = host.change(Change::Reload {});
    assert_eq!(plan.steps, ["~ toe rules: 2 -> 0, for connections from now on"]);
    connect(&mut a, &mut b, SERVER);
    dir.configure("metrics = \"off\"", &(vms + rules));
    host.change(Change::Reload {});
    assert_eq!(try_connect(&mut a, SERVER), Err(NATIVE));
    assert!(!a.socket(kept).is_reset, "what is connected stays");
}

#[test]
fn who_does_not_read_stops_the_writer_and_nobody_else() {
    let (_dir, host, mut a, mut b, ..) = connected();
    one_is_not_read(&mut a, &mut b, || {
        let kept = toe(&host, "a").kept_bytes;
        assert!(kept < TOE_PACKET_FULL, "{kept}");
    });
}

#[test]
fn what_a_ring_has_no_buffers_for_is_kept_and_comes_in_order() {
    let (_dir, host, mut a, mut b, mut c) = three();
    let mut pairs = Vec::new();
    for _ in 0..6 {
        pairs.push(connect(&mut a, &mut b, SERVER));
    }
    let (to_c, at_c) = connect(&mut a, &mut c, "10.0.0.3:80");
    // It is off its CPU, with buffers for half a megabyte.
    b.refills = false;
    let sent: Vec<_> = (0..6).map(|seed| bytes(seed, 200_000)).collect();
    for ((at_a, _), bytes) in pairs.iter().zip(&sent) {
        a.write(*at_a, bytes);
    }
    a.write(to_c, &sent[0]);
    until(&mut [&mut a, &mut c], "others go on", |g| g[1].socket(at_c).got == sent[0]);
    until(&mut [&mut a], "all is with the host", |g| {
        pairs.iter().all(|(at_a, _)| g[0].socket(*at_a).is_written())
    });
    assert!(toe(&host, "a").kept_bytes > 500_000);
    b.refill();
    until(&mut [&mut a, &mut b], "all is there", |g| {
        pairs.iter().zip(&sent).all(|((_, at_b), sent)| g[1].socket(*at_b).got == *sent)
    });
    assert_eq!(toe(&host, "a").kept_bytes, 0);
}

#[test]
fn a_guest_that_many_connect_to_while_it_is_off_its_cpu_accepts_them_all() {
    let (dir, host) = start(&[("a", 1, ""), ("b", 2, "")]);
    let (mut a, mut b) = (boot(&dir, "a"), boot(&dir, "b"));
    listen(&mut b, SERVER);
    // It takes nothing, and what it says itself is read all the same.
    b.refills = false;
    let all: Vec<Ports> = (0..1500).map(|_| try_connect(&mut a, SERVER).unwrap()).collect();
    let stray = Ports { guest: 5, host: 6 };
    let before = toe(&host, "b").packets_from_guest;
    assert!(b.send(&b.header(stray, Op::CreditUpdate), &[]));
    until(&mut [&mut a], "it is read", |_| toe(&host, "b").packets_from_guest > before);
    b.refill();
    until(&mut [&mut a, &mut b], "all are open", |g| all.iter().all(|p| g[0].socket(*p).is_open));
}

#[test]
fn what_one_guest_says_to_another_that_takes_nothing_is_nothing_to_a_third() {
    let (dir, _host) = start(&[("a", 1, ""), ("b", 2, ""), ("c", 3, "")]);
    let (mut a, mut b, mut c) = (boot(&dir, "a"), boot(&dir, "b"), boot(&dir, "c"));
    listen(&mut b, SERVER);
    let (at_c, to_c) = connect(&mut c, &mut b, SERVER);
    assert_eq!(ask(&mut a, Ask::Unlisten { guest: 1 }), 0);
    a.buffer = 0;
    let (at_a, _) = connect(&mut a, &mut b, SERVER);
    b.refills = false;
    // It finds a crumb of room again and again.
    for buf_alloc in 1..=17_000 {
        let header = Header { buf_alloc, ..a.header(at_a, Op::CreditUpdate) };
        while !a.send(&header, &[]) {
            until(&mut [&mut a], "a place", |_| true);
        }
    }
    c.write(at_c, b"hello");
    b.refill();
    until(&mut [&mut b, &mut c], "bytes", |g| g[0].socket(to_c).got == b"hello");
    assert!(!c.socket(at_c).is_reset && !a.socket(at_a).is_reset);
}

#[test]
fn ninety_clients_that_read_nothing_stop_nobody_and_are_not_reset() {
    let (_dir, host, mut a, mut b, mut c) = three();
    let (to_c, at_c) = connect(&mut a, &mut c, "10.0.0.3:80");
    let pairs: Vec<_> = (0..90).map(|_| connect(&mut a, &mut b, SERVER)).collect();
    pairs.iter().for_each(|(_, at_b)| b.reads(*at_b, false));
    // Records of 200 bytes, a packet each, as Linux makes them.
    a.most = 200;
    let sent = bytes(7, 300_000);
    pairs.iter().for_each(|(at_a, _)| a.write(*at_a, &sent));
    let stands = |a: &SocketGuest| pairs.iter().all(|(at_a, _)| !a.has_room(*at_a));
    until(&mut [&mut a, &mut b], "they have had their fill", |g| stands(g[0]));
    let full = 90 * TOE_PACKET_FULL;
    until(&mut [&mut a, &mut b], "it is given", |_| toe(&host, "a").kept_bytes < full);
    a.most = 65_536;
    a.write(to_c, &sent);
    until(&mut [&mut a, &mut b, &mut c], "c gets it", |g| g[2].socket(at_c).got == sent);
    pairs.iter().for_each(|(_, at_b)| b.reads(*at_b, true));
    until(&mut [&mut a, &mut b], "they get theirs", |g| {
        pairs.iter().all(|(_, at_b)| g[1].socket(*at_b).got == sent)
    });
    assert!(pairs.iter().all(|(at_a, _)| !a.socket(*at_a).is_reset));
}

#[test]
fn a_receiver_that_takes_a_little_now_and_then_does_not_stop_a_sender_for_ever() {
    let (_dir, host, mut a, mut b, mut c) = three();
    let pairs: Vec<_> = (0..90).map(|_| connect(&mut a, &mut b, SERVER)).collect();
    let (to_c, at_c) = connect(&mut a, &mut c, "10.0.0.3:80");
    b.refills = false;
    let sent = bytes(9, 256 << 10);
    pairs.iter().for_each(|(at_a, _)| a.write(*at_a, &sent));
    until(&mut [&mut a], "so much is kept", |_| toe(&host, "a").kept_bytes >= 16 << 20);
    a.write(to_c, b"late, but not never");
    let mut offered = Instant::now();
    until(&mut [&mut a, &mut b, &mut c], "it goes on", |g| {
        if offered.elapsed().as_millis() >= 250 {
            offered = Instant::now();
            g[1].offer(5);
        }
        g[2].socket(at_c).got.ends_with(b"never")
    });
}

#[test]
fn a_lie_ends_its_connection_and_no_other() {
    let (_dir, _host, mut a, mut b, at_a, at_b) = connected();
    let (other_a, other_b) = connect(&mut a, &mut b, SERVER);
    let lie = Header { fwd_cnt: 7, ..a.header(at_a, Op::CreditUpdate) };
    assert!(a.send(&lie, &[]));
    until(&mut [&mut a, &mut b], "both hear of it", |g| {
        g[0].socket(at_a).is_reset && g[1].socket(at_b).is_reset
    });
    assert_eq!(ask(&mut b, Ask::Describe(at_b)), RESET);
    let other = Header { src_cid: 4, ..a.header(other_a, Op::Reset) };
    assert!(a.send(&other, &[]), "in the name of another guest");
    a.write(other_a, b"still here");
    until(&mut [&mut a, &mut b], "bytes", |g| g[1].socket(other_b).got == b"still here");
}

#[test]
fn a_packet_without_a_header_takes_the_ring_out_of_use_and_resets_all() {
    let (_dir, host, mut a, mut b, _, at_b) = connected();
    a.offers_nonsense();
    until(&mut [&mut b], "the other hears of it", |g| g[0].socket(at_b).is_reset);
    assert_eq!(ask(&mut b, Ask::Describe(at_b)), RESET);
    assert!(!toe(&host, "a").running);
    assert_eq!(try_connect(&mut b, "10.0.0.1:80"), Err(NATIVE));
}

#[test]
fn when_a_vmm_goes_the_other_guest_reads_a_reset() {
    let (dir, host, a, mut b, _, at_b) = connected();
    drop(a);
    until(&mut [&mut b], "it hears of it", |g| g[0].socket(at_b).is_reset);
    assert_eq!(ask(&mut b, Ask::Describe(at_b)), RESET);
    // And another one takes its place.
    let mut a = boot(&dir, "a");
    let (at_a, at_b) = connect(&mut a, &mut b, SERVER);
    b.write(at_b, b"again");
    until(&mut [&mut a, &mut b], "bytes", |g| g[0].socket(at_a).got == b"again");
    assert!(toe(&host, "a").running);
}

#[test]
fn memory_that_goes_takes_its_own_guest_down_and_no_zeros_arrive() {
    let dir = Dir::new();
    let vm = |name: &str, ip: u8| {
        let more = format!("ips = [\"10.0.0.{ip}\"]\ntoe = true\nallow_unsealed_memory = true");
        dir.vm(name, &more)
    };
    let config = dir.configure("metrics = \"off\"", &(vm("a", 1) + &vm("b", 2)));
    let host = Host::start(&dir, &config);
    for of_sender in [true, false] {
        let mut a = SocketGuest::boot_unsealed(&socket(&dir, "a"));
        let mut b = SocketGuest::boot_unsealed(&socket(&dir, "b"));
        listen(&mut b, SERVER);
        let (at_a, at_b) = connect(&mut a, &mut b, SERVER);
        a.write(at_a, &bytes(5, 1000));
        until(&mut [&mut a, &mut b], "bytes", |g| g[1].socket(at_b).got.len() == 1000);
        if of_sender {
            a.sends_without_memory(at_a, 1000);
            until(&mut [&mut b], "it is reset", |g| g[0].socket(at_b).is_reset);
            assert_eq!(b.socket(at_b).got, bytes(5, 1000));
        } else {
            b.has_no_buffers();
            a.write(at_a, &bytes(5, 1000));
            until(&mut [&mut a], "it is reset", |g| g[0].socket(at_a).is_reset);
        }
        let faults = [toe(&host, "a").memory_faults, toe(&host, "b").memory_faults];
        assert_eq!(faults, if of_sender { [1, 0] } else { [1, 1] });
    }
}

#[test]
fn a_vm_that_is_stopped_and_goes_on_hears_that_its_connections_are_gone() {
    let (_dir, _host, mut a, mut b, at_a, at_b) = connected();
    a.stops_and_goes_on();
    until(&mut [&mut a, &mut b], "both hear of it", |g| {
        g[0].socket(at_a).is_reset && g[1].socket(at_b).is_reset
    });
    let (at_a, at_b) = connect(&mut a, &mut b, SERVER);
    // A listener learns that its lease is gone, and has no other's port.
    b.stops_and_goes_on();
    until(&mut [&mut a, &mut b], "both hear of it", |g| {
        g[0].socket(at_a).is_reset && g[1].socket(at_b).is_reset
    });
    listen(&mut b, SERVER);
    let (at_a, at_b) = connect(&mut a, &mut b, SERVER);
    a.write(at_a, b"hello");
    until(&mut [&mut a, &mut b], "bytes", |g| g[1].socket(at_b).got == b"hello");
}

#[test]
fn the_device_comes_changes_and_goes_while_the_daemon_runs() {
    let (dir, host, mut a, mut b, at_a, at_b) = connected();
    let set = |vm: &str, keys: &[(&str, &str)]| {
        let keys = keys.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect();
        host.change(Change::SetVm { name: vm.into(), keys })
    };
    // Other changes leave it alone.
    set("a", &[("mtu", "1400")]);
    a.write(at_a, b"hello");
    until(&mut [&mut a, &mut b], "bytes", |g| g[1].socket(at_b).got == b"hello");
    set("a", &[("isolated", "true")]);
    until(&mut [&mut a, &mut b], "they are apart", |g| {
        g[0].socket(at_a).is_reset && g[1].socket(at_b).is_reset
    });
    assert_eq!(try_connect(&mut b, "10.0.0.1:80"), Err(NATIVE));
    set("a", &[("isolated", "false")]);
    listen(&mut a, "10.0.0.1:80");
    connect(&mut b, &mut a, "10.0.0.1:80");
    set("b", &[("toe", "false")]);
    assert!(!socket(&dir, "b").exists() && host.port("b").vm.unwrap().toe.is_none());
    set("b", &[("toe", "true")]);
    let (mut a, mut b) = (boot_again(a, &dir, "a"), boot(&dir, "b"));
    listen(&mut b, SERVER);
    let (at_a, at_b) = connect(&mut a, &mut b, SERVER);
    a.write(at_a, b"hello");
    until(&mut [&mut a, &mut b], "bytes", |g| g[1].socket(at_b).got == b"hello");
    host.change(Change::RemoveVm { name: "b".into(), drain_ms: None });
    until(&mut [&mut a], "it has gone", |g| g[0].socket(at_a).is_reset);
    assert!(!socket(&dir, "b").exists());
}

/// Its processes are new ones.
fn boot_again(guest: SocketGuest, dir: &Dir, vm: &str) -> SocketGuest {
    drop(guest);
    boot(dir, vm)
}

#[test]
fn a_receiver_that_takes_nothing_does_not_stop_a_sender_for_others() {
    let (_dir, host, mut a, mut b, mut c) = three();
    // It has room for more than the host keeps, and offers no buffers.
    let n = 90;
    let pairs: Vec<_> = (0..n).map(|_| connect(&mut a, &mut b, SERVER)).collect();
    let (to_c, at_c) = connect(&mut a, &mut c, "10.0.0.3:80");
    b.refills = false;
    let sent = bytes(9, 256 << 10);
    pairs.iter().for_each(|(at_a, _)| a.write(*at_a, &sent));
    until(&mut [&mut a], "so much is kept", |_| toe(&host, "a").kept_bytes >= 16 << 20);
    a.write(to_c, b"late, but not never");
    until(&mut [&mut a, &mut c], "it goes on", |g| g[1].socket(at_c).got.ends_with(b"never"));
    assert!(toe(&host, "a").kept_bytes < 16 << 20);
    until(&mut [&mut a], "who waited was reset", |g| {
        pairs.iter().any(|(at_a, _)| g[0].socket(*at_a).is_reset)
    });
}

#[test]
fn a_guest_of_many_sockets_goes_in_steps_and_who_comes_next_waits_for_them() {
    let (dir, host) = start(&[("a", 1, ""), ("b", 2, "")]);
    let (mut a, mut b) = (boot(&dir, "a"), boot(&dir, "b"));
    listen(&mut b, SERVER);
    let all: Vec<Ports> = (0..700).map(|_| try_connect(&mut a, SERVER).unwrap()).collect();
    until(&mut [&mut a, &mut b], "all are open", |g| all.iter().all(|p| g[0].socket(*p).is_open));
    let mut b = boot_again(b, &dir, "b");
    until(&mut [&mut a], "all are reset", |g| all.iter().all(|p| g[0].socket(*p).is_reset));
    listen(&mut b, SERVER);
    let (at_a, at_b) = connect(&mut a, &mut b, SERVER);
    a.write(at_a, b"again");
    until(&mut [&mut a, &mut b], "bytes", |g| g[1].socket(at_b).got == b"again");
    let all: Vec<Ports> = (0..700).map(|_| try_connect(&mut a, SERVER).unwrap()).collect();
    until(&mut [&mut a, &mut b], "all are open", |g| all.iter().all(|p| g[0].socket(*p).is_open));
    host.change(Change::RemoveVm { name: "b".into(), drain_ms: None });
    until(&mut [&mut a], "all are reset", |g| all.iter().all(|p| g[0].socket(*p).is_reset));
}

#[test]
fn a_device_whose_vmm_gives_no_descriptors_for_kicks_is_polled() {
    let (dir, _host) = start(&[("a", 1, ""), ("b", 2, "")]);
    let (mut a, mut b) = (boot(&dir, "a"), boot(&dir, "b"));
    a.is_polled();
    listen(&mut b, SERVER);
    let (at_a, at_b) = connect(&mut a, &mut b, SERVER);
    a.write(at_a, b"hello");
    until(&mut [&mut a, &mut b], "bytes", |g| g[1].socket(at_b).got == b"hello");
}

/// Linux asks for a signal for each packet that it sends, and looks for places after one only.
#[test]
fn a_guest_is_signalled_that_its_packets_were_taken_when_they_are_many_or_after_a_while() {
    let (dir, _host) = start(&[("a", 1, ""), ("b", 2, "")]);
    let (mut a, mut b) = (boot(&dir, "a"), boot(&dir, "b"));
    until(&mut [&mut a], "a signal of what a daemon before may have taken", |g| {
        g[0].signals_of_taken() > 0
    });
    listen(&mut b, SERVER);
    let (at_a, at_b) = connect(&mut a, &mut b, SERVER);
    let before = a.signals_of_taken();
    a.write(at_a, b"1");
    until(&mut [&mut a, &mut b], "one for a single packet", |g| g[0].signals_of_taken() > before);
    // One packet after the other, each of which is taken before the next.
    let (before, begun, all) = (a.signals_of_taken(), Instant::now(), 64);
    for count in 0..all {
        a.write(at_a, b"2");
        until(&mut [&mut a, &mut b], "the packet", |g| g[1].socket(at_b).got.len() > 1 + count);
    }
    let signals = a.signals_of_taken() - before;
    // Each has two buffers.
    let (many, late) =
        (2 * all * 4 / usize::from(QUEUE_SIZE), begun.elapsed().as_secs_f64() / 0.005);
    assert!(signals as f64 <= many as f64 + late + 1.0, "{signals} signals, {many} and {late}");
    (a.waits_for_signals, b.waits_for_signals) = (true, true);
    cross(&mut a, &mut b);
}
