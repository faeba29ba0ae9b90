//! Rate limits of a VM and its sockets: bytes that were carried in the daemon's time, and, of whole
//! daemons, in the time that went by.

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::time::Instant as Clock;

use nightporter_api::{Change, Direction as Route, Reply, Request};
use nightporter_core::bucket::SharedRate;
use nightporter_core::engine::Direction;
use nightporter_core::limits::TOE_KEPT_MAX;
use nightporter_core::port::PortId;
use nightporter_core::time::Duration;
use nightporter_core::toe::message::Kind;
use nightporter_core::toe::vsock::Ports;
use nightporter_core::wire::virtio_net::VirtioNetHdr;
use nightporter_core::wire::vsock::Op;

use crate::fabric::{Stranger, configure, fabric, message};
use crate::guest::{EVENTS, Guest};
use crate::host::{Dir, Host};
use crate::overlay::{Namespace, two_hosts};
use crate::sockets::{SocketGuest, connect, listen, until};
use crate::toe::{SERVER, boot, bytes};
use crate::turns::{Daemon, run, start};

const BYTES_PER_S: u64 = 1_000_000;
/// Bytes that go at once, and the last packet of a guest.
const AHEAD: usize = 3000 + (64 << 10);

fn limit(daemon: &RefCell<Daemon>, vm: u16, way: Direction, bytes_per_s: Option<u64>) {
    let daemon = &mut *daemon.borrow_mut();
    let rate = bytes_per_s.map(|bytes_per_s| Arc::new(SharedRate::new(bytes_per_s)));
    daemon.toe.set_rate_limit(PortId(vm), way, rate);
}

fn kept(daemon: &Daemon, vm: u16) -> u64 {
    daemon.toe.status(PortId(vm)).unwrap().kept_bytes
}

fn expect_limited(got: usize, seconds: usize) {
    let most = usize::try_from(BYTES_PER_S).unwrap() * seconds + AHEAD;
    // Headers cost, and so does what the guest answers.
    let least = (most - most / 50).saturating_sub(2 * AHEAD);
    assert!((least..=most).contains(&got), "{got} bytes in {seconds} s, {least} to {most}");
}

#[test]
fn flood_16_sockets_of_a_vm_send_no_more_than_its_limit_and_others_do() {
    let (_dir, daemon, mut guests) = start(3);
    let [a, b, c] = &mut guests[..] else { unreachable!("three") };
    listen(b, SERVER);
    let (from_a, at_b) = connect(a, b, SERVER);
    let (from_c, of_c) = connect(c, b, SERVER);
    limit(&daemon, 0, Direction::FromGuest, Some(BYTES_PER_S));
    let (slow, quick) = (bytes(1, 5_000_000), bytes(2, 5_000_000));
    a.write(from_a, &slow);
    c.write(from_c, &quick);
    let begin = daemon.borrow().now;
    run(&daemon, &mut guests, begin, |_, _| {});
    assert!(guests[1].socket(of_c).got == quick, "no time has passed");
    expect_limited(guests[1].socket(at_b).got.len(), 0);
    let turns = run(&daemon, &mut guests, begin + Duration::from_secs(3), |_, _| {});
    expect_limited(guests[1].socket(at_b).got.len(), 3);
    assert!(turns < 3000, "{turns} turns for less than fifty packets: somebody asks all the time");
    limit(&daemon, 0, Direction::FromGuest, None);
    run(&daemon, &mut guests, begin + Duration::from_secs(3), |_, _| {});
    assert!(guests[1].socket(at_b).got == slow);
}

#[test]
fn flood_16_sockets_of_a_vm_are_sent_no_more_than_its_limit_and_their_senders_serve_others() {
    let (_dir, daemon, mut guests) = start(3);
    limit(&daemon, 1, Direction::ToGuest, Some(BYTES_PER_S));
    let [a, b, c] = &mut guests[..] else { unreachable!("three") };
    listen(b, SERVER);
    listen(c, "10.0.0.3:80");
    // Together they have room for more than the host keeps of one sender.
    let pairs: Vec<_> = (0..100).map(|_| connect(a, b, SERVER)).collect();
    let (to_c, at_c) = connect(a, c, "10.0.0.3:80");
    let begin = daemon.borrow().now;
    let sent = bytes(3, 250_000);
    pairs.iter().for_each(|(at_a, _)| a.write(*at_a, &sent));
    let most = Cell::new(0);
    let mut sees = |daemon: &Daemon, guests: &[SocketGuest]| {
        most.set(most.get().max(kept(daemon, 0)));
        assert!(guests[0].sockets.values().all(|it| !it.is_reset));
    };
    let after = |seconds| begin + Duration::from_secs(seconds);
    run(&daemon, &mut guests, begin, &mut sees);
    // All send at once, and none had sent before: each has been shown a page.
    assert!(most.get() <= 100 * 4096, "{} bytes are kept", most.get());
    run(&daemon, &mut guests, after(1), &mut sees);
    let quick = bytes(4, 5_000_000);
    guests[0].write(to_c, &quick);
    run(&daemon, &mut guests, after(1), &mut sees);
    assert!(guests[2].socket(at_c).got == quick, "no time has passed");
    let turns = run(&daemon, &mut guests, after(10), &mut sees);
    // Of each what may be sent in 10 ms, and a packet.
    assert!(most.get() < 100 * (BYTES_PER_S / 100 + 4096), "{} bytes are kept", most.get());
    let got: Vec<_> = pairs.iter().map(|(_, at_b)| guests[1].socket(*at_b).got.len()).collect();
    expect_limited(got.iter().sum(), 10);
    let (slowest, average) = (got.iter().min().unwrap(), got.iter().sum::<usize>() / got.len());
    assert!(slowest * 2 > average, "{got:?}");
    assert!(turns < 50_000, "{turns} turns for 2,500 packets: somebody asks all the time");
    limit(&daemon, 1, Direction::ToGuest, None);
    run(&daemon, &mut guests, after(10), &mut sees);
    assert!(pairs.iter().all(|(_, at_b)| guests[1].socket(*at_b).got == sent));
}

#[test]
fn flood_16_a_limit_that_comes_later_resets_no_socket_whose_bytes_wait_for_it() {
    let (_dir, daemon, mut guests) = start(2);
    let [a, b] = &mut guests[..] else { unreachable!("two") };
    listen(b, SERVER);
    let pairs: Vec<_> = (0..100).map(|_| connect(a, b, SERVER)).collect();
    // They were shown more room than the host keeps of one sender. This rate carries a packet in
    // half a second: the sender's ring stands all the time.
    limit(&daemon, 1, Direction::ToGuest, Some(BYTES_PER_S / 125));
    let sent = bytes(8, 250_000);
    pairs.iter().for_each(|(at_a, _)| a.write(*at_a, &sent));
    let after = daemon.borrow().now + Duration::from_secs(30);
    let most = Cell::new(0);
    run(&daemon, &mut guests, after, |daemon, guests| {
        most.set(most.get().max(kept(daemon, 0)));
        assert!(guests[0].sockets.values().all(|it| !it.is_reset));
    });
    assert!(most.get() > TOE_KEPT_MAX as u64, "its ring has not stood: {}", most.get());
    assert!(kept(&daemon.borrow(), 0) > TOE_KEPT_MAX as u64 / 2, "it stands no more");
    assert!(pairs.iter().any(|(_, at_b)| !guests[1].socket(*at_b).got.is_empty()));
    limit(&daemon, 1, Direction::ToGuest, None);
    run(&daemon, &mut guests, after, |_, _| {});
    assert!(pairs.iter().all(|(_, at_b)| guests[1].socket(*at_b).got == sent));
}

#[test]
fn flood_16_a_packet_counts_as_long_as_it_says_and_not_as_its_chain() {
    let (_dir, daemon, mut guests) = start(2);
    let [a, b] = &mut guests[..] else { unreachable!("two") };
    listen(b, SERVER);
    let (at_a, at_b) = connect(a, b, SERVER);
    limit(&daemon, 0, Direction::FromGuest, Some(BYTES_PER_S));
    let header = a.header(at_a, Op::CreditUpdate);
    assert!((0..20).all(|_| a.send(&header, &[0; 60_000])));
    a.write(at_a, b"soon");
    let begin = daemon.borrow().now;
    run(&daemon, &mut guests, begin, |_, _| {});
    assert!(guests[1].socket(at_b).got == b"soon");
}

#[test]
fn flood_16_limits_of_the_configuration_and_of_commands_are_those_of_sockets() {
    let dir = Dir::new();
    let vm = |name, ip, more| dir.vm(name, &format!("ips = [\"10.0.0.{ip}\"]\ntoe = true\n{more}"));
    let vms = vm("a", 1, "rate_limit_from_guest_mbit_s = 8") + &vm("b", 2, "");
    let host = Host::start(&dir, &dir.configure("metrics = \"off\"", &vms));
    let (mut a, mut b) = (boot(&dir, "a"), boot(&dir, "b"));
    listen(&mut b, SERVER);
    let (at_a, at_b) = connect(&mut a, &mut b, SERVER);
    let mut carries = |len: usize| {
        let (begin, before) = (Clock::now(), b.socket(at_b).got.len());
        a.write(at_a, &bytes(5, len));
        until(&mut [&mut a, &mut b], "all is there", |g| {
            g[1].socket(at_b).got.len() - before == len
        });
        begin.elapsed().as_millis()
    };
    let at_least = u128::try_from((600_000 - AHEAD) / 1000).unwrap();
    assert!(carries(600_000) >= at_least);
    let request = |direction, mbit_s| Request::RateLimit { vm: "a".into(), direction, mbit_s };
    assert_eq!(host.ask(&request(Route::FromGuest, None)), Reply::Done {});
    // It would take a minute.
    carries(60_000_000);
    let keys = vec![("rate_limit_to_guest_mbit_s".into(), "8".into())].into_iter().collect();
    host.change(Change::SetVm { name: "b".into(), keys });
    assert!(carries(600_000) >= at_least);
}

/// A long datagram of 10.0.0.1 to 10.0.0.2.
fn datagram() -> Vec<u8> {
    let mut frame = vec![2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 0];
    frame.extend([0x45, 0, 5, 0xdc, 0, 1, 0x40, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    let words = frame[14..].chunks(2).map(|two| u32::from(two[0]) << 8 | u32::from(two[1]));
    let sum: u32 = words.sum();
    let sum = u16::try_from((sum & 0xffff) + (sum >> 16)).unwrap();
    frame[24..26].copy_from_slice(&(!sum).to_be_bytes());
    frame.extend([0, 7, 0, 9, 5, 0xc8, 0, 0]); // without a checksum (RFC 768)
    frame.resize(14 + 1500, 7);
    frame
}

#[test]
fn flood_16_frames_and_sockets_of_a_vm_have_its_limit_together_and_neither_starves() {
    const SECONDS: u64 = 3;
    let dir = Dir::new();
    let vm = |name: &str, ip: u8, more: &str| {
        let own = format!("mac = \"02:00:00:00:00:0{ip}\"\nips = [\"10.0.0.{ip}\"]\ntoe = true");
        dir.vm(name, &format!("{own}\nack_offload = false\n{more}"))
    };
    for way in ["from", "to"] {
        let limit = format!("rate_limit_{way}_guest_mbit_s = 8");
        let limits = if way == "from" { [&*limit, ""] } else { ["", &*limit] };
        let vms = [vm("a", 1, limits[0]), vm("b", 2, limits[1])].concat();
        let host = Host::start(&dir, &dir.configure("metrics = \"off\"", &vms));
        let [mut from, mut to] = ["a", "b"].map(|name| Guest::boot(&dir.join(name), EVENTS));
        to.offer(64);
        let (mut a, mut b) = (boot(&dir, "a"), boot(&dir, "b"));
        listen(&mut b, SERVER);
        let (at_a, at_b) = connect(&mut a, &mut b, SERVER);
        a.write(at_a, &bytes(9, 10_000_000));
        let frame = datagram();
        let (begin, mut by_frames) = (Clock::now(), 0);
        while begin.elapsed().as_secs() < SECONDS {
            // More than the limit allows; the host drops the rest.
            from.send(&vec![(VirtioNetHdr::default(), frame.clone()); 8]);
            by_frames += to.received().len() * frame.len();
            to.catches_up(64);
            while a.step() | b.step() {}
        }
        let by_sockets = b.socket(at_b).got.len();
        let limit = usize::try_from(BYTES_PER_S * SECONDS).unwrap();
        let most = limit + limit / 20 + AHEAD; // a frame may be 50 ms ahead
        assert!(by_frames + by_sockets <= most, "{way}: {by_frames} and {by_sockets} bytes");
        // Shares are exact in `sockets/limits.rs`. Here a loaded machine may make either a little
        // slow.
        let least = by_frames.min(by_sockets);
        assert!(least >= limit / 10, "{way}: {by_frames} and {by_sockets} bytes");
        drop(host);
    }
}

/// So many connections of a guest of another host to this one, each in a stream of its own, and
/// its port here.
fn called(names: &Namespace, b: &mut SocketGuest, many: u64) -> Vec<(Stranger, Ports)> {
    let call = |serial| {
        let before: Vec<Ports> = b.sockets.keys().copied().collect();
        let is_new = |at: &&Ports| at.host >= 1 << 16 && !before.contains(*at);
        let mut host = Stranger::met(names);
        host.opens(b, serial, &format!("10.0.0.1:{}", 1000 + serial));
        (host, *b.sockets.keys().find(is_new).expect("it is there"))
    };
    (0..many).map(call).collect()
}

#[test]
#[ignore = "needs root: it makes network namespaces"]
fn flood_16_streams_that_are_not_woken_with_others_have_a_timer_if_those_spend_the_rate() {
    let (names, dir) = (two_hosts(), Dir::new());
    let limited = [("b", 2, "rate_limit_to_guest_mbit_s = 80")];
    let two = names.1.start(&dir, &configure(&dir, 2, "", &limited));
    let mut b = boot(&dir, "b");
    listen(&mut b, SERVER);
    let mut hosts = called(&names.0, &mut b, 70);
    let mut says = |n: usize, offset: u64, len: usize| {
        let kind = Kind::Data { offset, len: u32::try_from(len).unwrap() };
        let head = message(u64::try_from(n).unwrap(), kind).emit();
        hosts[n].0.says(&[&head[..], &vec![7; len]].concat());
        hosts[n].1
    };
    // Its ring has no buffers left.
    b.refills = false;
    let mut offset = 0;
    while b.has_buffers() {
        let at = says(69, offset, 1);
        offset += 1;
        until(&mut [&mut b], "a buffer is filled", |g| {
            g[0].socket(at).got.len() as u64 == offset || !g[0].has_buffers()
        });
    }
    // 64 are woken at once. The last of these spends the rate, and those before do not.
    let mut all: Vec<Ports> = (0..63).map(|n| says(n, 0, 1)).collect();
    let big = says(63, 0, 7000);
    all.extend((64..69).map(|n| says(n, 0, 1)));
    // It looks at all that has come before it answers the second time.
    (0..2).for_each(|_| assert_eq!(fabric(&two).streams, 70));
    b.refill();
    until(&mut [&mut b], "the others have their turn", |g| {
        all.iter().all(|at| g[0].socket(*at).got == [7])
    });
    assert_eq!(b.socket(big).got, [7; 7000]);
}

#[test]
#[ignore = "needs root: it makes network namespaces"]
fn flood_16_sockets_of_another_host_wait_in_their_streams_for_a_limit_and_others_do_not() {
    let names = two_hosts();
    let (one_dir, two_dir) = (Dir::new(), Dir::new());
    let _one = names.0.start(&one_dir, &configure(&one_dir, 1, "", &[("a", 1, "")]));
    let limited = [("b", 2, "rate_limit_to_guest_mbit_s = 8"), ("c", 3, ""), ("d", 4, "")];
    let _two = names.1.start(&two_dir, &configure(&two_dir, 2, "", &limited));
    let mut a = boot(&one_dir, "a");
    let [mut b, mut c, mut d] = ["b", "c", "d"].map(|name| boot(&two_dir, name));
    listen(&mut b, SERVER);
    listen(&mut c, "10.0.0.3:80");
    let pairs: Vec<_> = (0..3).map(|_| connect(&mut a, &mut b, SERVER)).collect();
    let (to_c, at_c) = connect(&mut a, &mut c, "10.0.0.3:80");
    let (near, of_near) = connect(&mut d, &mut b, SERVER);
    let (sent, quick) = (bytes(6, 300_000), bytes(7, 3_000_000));
    let begin = Clock::now();
    pairs.iter().for_each(|(at_a, _)| a.write(*at_a, &sent));
    d.write(near, &sent);
    a.write(to_c, &quick);
    let (mut before, mut beside) = (None, None);
    until(&mut [&mut a, &mut b, &mut c, &mut d], "all is there", |g| {
        let got: usize = pairs.iter().map(|(_, at_b)| g[1].socket(*at_b).got.len()).sum();
        let may = usize::try_from(begin.elapsed().as_millis() + 1).unwrap() * 1000 + AHEAD;
        let of_d = g[1].socket(of_near).got.len();
        assert!(got + of_d <= may, "{got} and {of_d} bytes where {may} may be");
        if g[2].socket(at_c).got.len() == quick.len() {
            before.get_or_insert(got);
        }
        if got == 3 * sent.len() {
            beside.get_or_insert(of_d);
        }
        before.is_some() && beside.is_some() && of_d == sent.len()
    });
    // The one of its own host has had turns as well.
    assert!(beside.unwrap() >= 50_000, "{beside:?}");
    assert!(before.unwrap() < 3 * sent.len(), "the others were waited for");
    assert!(pairs.iter().all(|(_, at_b)| b.socket(*at_b).got == sent));
    assert!(c.socket(at_c).got == quick && b.socket(of_near).got == sent);
}
