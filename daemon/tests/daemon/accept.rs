//! Accept offload seen from outside: the host answers a SYN for a guest that is off its core, keeps
//! what the remote sends, and resets both sides when it stops.

use std::thread::yield_now;
use std::time::{Duration, Instant};

use nightporter_api::{Change, PortStatus, VmStatus};
use nix::sys::signal::Signal;

use crate::flows::World;
use crate::guest::Guest;
use crate::host::Host;
use crate::segment::{ACK, End, PSH, RST, SYN, Seen, Segment, parse};

const G: End = End(2, 80);
const MSS: &[u8] = &[2, 4, 0x05, 0xb4];
/// The guest's own sequence numbers begin here, in each connection.
const ISN_G: u32 = 5_000_000;
const ISN_R: u32 = 1000;
/// The host begins to answer after 63 s.
const BEGINS_WITHIN: Duration = Duration::from_secs(80);

fn vm(port: &PortStatus) -> &VmStatus {
    port.vm.as_ref().expect("a VM")
}

/// The segments for this port that have come, at least one.
fn next(at: &mut Guest, port: u16) -> Seen {
    loop {
        let frames = at.hears();
        let is_its = |frame: &&Vec<u8>| frame[12..14] == [8, 0] && has_port(frame, port);
        let mut its = frames.iter().filter(is_its).map(|frame| parse(frame));
        if let Some(seen) = its.next() {
            assert_eq!(its.next(), None);
            return seen;
        }
    }
}

fn has_port(frame: &[u8], port: u16) -> bool {
    [&frame[34..36], &frame[36..38]].contains(&&port.to_be_bytes()[..])
}

fn remote_sends(w: &mut World, port: u16, segment: Segment<'_>) {
    w.remote.send_plain(&Segment { window: 64_000, ..segment }.frame(End(1, port), G));
}

fn guest_sends(w: &mut World, port: u16, segment: Segment<'_>) {
    w.guest.send_plain(&Segment { window: 64_000, ..segment }.frame(G, End(1, port)));
}

fn syn() -> Segment<'static> {
    Segment { flags: SYN, seq: ISN_R, options: MSS, ..Segment::default() }
}

fn syn_ack() -> Segment<'static> {
    let (flags, ack) = (SYN | ACK, ISN_R + 1);
    Segment { flags, seq: ISN_G, ack, options: MSS, ..Segment::default() }
}

/// R connects and the guest, which runs, answers itself: the host learns the source.
fn connects(w: &mut World, port: u16) {
    remote_sends(w, port, syn());
    assert_eq!(next(&mut w.guest, port).flags, SYN);
    guest_sends(w, port, syn_ack());
    assert_eq!(next(&mut w.remote, port).seq, ISN_G);
    let ack = Segment { flags: ACK, seq: ISN_R + 1, ack: ISN_G + 1, ..Segment::default() };
    remote_sends(w, port, ack);
    assert_eq!(next(&mut w.guest, port).flags, ACK);
    let hello =
        Segment { flags: ACK | PSH, seq: ISN_G + 1, ack: ISN_R + 1, payload: b"hello", ..ack };
    guest_sends(w, port, hello);
    assert_eq!(next(&mut w.remote, port).payload, b"hello");
}

/// R's connection is accepted by the host before the guest has taken anything; the host's ISN.
fn is_accepted(w: &mut World, port: u16) -> u32 {
    remote_sends(w, port, syn());
    let answer = next(&mut w.remote, port);
    assert_eq!((answer.flags, answer.ack), (SYN | ACK, ISN_R + 1));
    let (seq, ack) = (ISN_R + 1, answer.seq.wrapping_add(1));
    let request = Segment { flags: ACK | PSH, seq, ack, payload: b"GET", ..Segment::default() };
    remote_sends(w, port, request);
    assert_eq!(next(&mut w.remote, port).ack, ISN_R + 4, "the host acknowledges");
    answer.seq
}

/// The guest runs at last.
fn accepts(w: &mut World, port: u16) {
    let seen = next(&mut w.guest, port);
    assert_eq!((seen.flags, seen.seq), (SYN, ISN_R));
    guest_sends(w, port, syn_ack());
    let request = next(&mut w.guest, port);
    assert_eq!((request.ack, &request.payload[..]), (ISN_G + 1, &b"GET"[..]));
}

fn answers(w: &mut World, port: u16, isn: u32) {
    let (seq, ack) = (ISN_G + 1, ISN_R + 4);
    guest_sends(
        w,
        port,
        Segment { flags: ACK | PSH, seq, ack, payload: b"200", ..Segment::default() },
    );
    let seen = next(&mut w.remote, port);
    assert_eq!((seen.seq, &seen.payload[..]), (isn.wrapping_add(1), &b"200"[..]), "in H's numbers");
}

/// Waits until the host answers SYNs, which its status says.
fn begun() -> World {
    let mut w = World::connected_with("drain_timeout_s = 60", "accept_offload = [\"80\"]");
    // One that has not seen its frames for 2 s was paused, and its answers before say nothing.
    w.guest.catches_up(64);
    let guest = w.host.port("guest");
    assert!(vm(&guest).accepts_in_s.is_some_and(|seconds| (1..=63).contains(&seconds)));
    let start = Instant::now();
    while vm(&w.host.port("guest")).accepts_in_s != Some(0) {
        assert!(start.elapsed() < BEGINS_WITHIN);
        yield_now();
    }
    w
}

fn count(w: &World, name: &str) -> u64 {
    vm(&w.host.port("guest")).counters[name]
}

fn set(host: &Host, value: &str) {
    let keys = [("accept_offload".to_owned(), value.to_owned())].into();
    assert!(host.change(Change::SetVm { name: "guest".into(), keys }).done);
}

#[test]
fn acc_08_the_host_accepts_for_a_guest_and_a_stop_resets_both_sides() {
    let mut w = begun();
    connects(&mut w, 41_001);
    // A connection from its SYN to the guest's answer.
    let isn = is_accepted(&mut w, 41_002);
    accepts(&mut w, 41_002);
    answers(&mut w, 41_002, isn);
    assert_eq!((count(&w, "flows_accepted"), vm(&w.host.port("guest")).translated_flows), (1, 1));
    // The guest refuses the next one: R, which believed it open, is reset.
    let refused = is_accepted(&mut w, 41_003);
    assert_eq!(next(&mut w.guest, 41_003).flags, SYN);
    let rst = Segment { flags: RST | ACK, ack: ISN_R + 1, ..Segment::default() };
    w.guest.send_plain(&rst.frame(G, End(1, 41_003)));
    let told = next(&mut w.remote, 41_003);
    assert_eq!((told.flags & RST, told.seq), (RST, refused.wrapping_add(1)));
    assert_eq!(count(&w, "accepts_refused"), 1);
    // Other ports, and none, at run time: what is accepted stays.
    set(&w.host, "443,80");
    assert_eq!(vm(&w.host.port("guest")).accepts_in_s, Some(0), "it goes on");
    set(&w.host, "false");
    assert_eq!(vm(&w.host.port("guest")).accepts_in_s, None);
    assert_eq!(vm(&w.host.port("guest")).translated_flows, 1);
    remote_sends(&mut w, 41_004, syn());
    assert_eq!(next(&mut w.guest, 41_004).flags, SYN, "the guest's to answer");
    // Nobody could go on with it.
    w.host.signal(Signal::SIGTERM);
    let told = next(&mut w.remote, 41_002);
    assert_eq!((told.flags & RST, told.seq), (RST, isn.wrapping_add(4)));
    let told = next(&mut w.guest, 41_002);
    assert_eq!((told.flags, told.seq), (RST, ISN_R + 4));
    assert_eq!(w.host.wait(), Some(0));
}
