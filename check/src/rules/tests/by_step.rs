//! Rules that look at the engine between two steps of the host: it is as it should be, and the
//! history, the ports or the numbers do not fit it. Then all rules by their door.

use nightporter_core::engine::{Engine, EngineConfig};
use nightporter_core::flow::key::FlowKey;
use nightporter_core::port::{GuestConfig, PortConfig, PortFeatures, PortId};
use nightporter_core::store::arena::Arena;
use zerocopy::IntoBytes as _;

use super::*;
use crate::observer::{HostView, Observer, Setting};
use crate::rules::{Ensure, PAGE_BYTES, budget, held, isolation, late_ack, parked};
use crate::stream::Stream;
use crate::wire::Tcp;

/// Pages of the guest's budget, and of the arena.
const PAGES: usize = 64;
const MACS: [[u8; 6]; 2] = [[2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]];

/// An engine, and its ports toward R and G.
struct Host<'m> {
    engine: Engine<'m>,
    ports: [PortId; 2],
}

/// A host that has acknowledged 1000 bytes to R, and offered them to G.
fn with_host(test: impl FnOnce(Host<'_>)) {
    let mut memory = vec![0_u64; Arena::layout_len(4, PAGES) / 8];
    let arena = Arena::format(memory.as_mut_bytes(), 4, PAGES, 1).expect("the length fits");
    let mut engine = Engine::new(NOW, EngineConfig::new(64, [1, 2, 3, 4]), arena);
    let budget_bytes = PAGES as u64 * PAGE_BYTES;
    let config = GuestConfig {
        mac: Some(MACS[Side::G as usize]),
        ack_offload: true,
        budget_bytes,
        flows_max: 64,
        ..GuestConfig::default()
    };
    let net = engine.add_port(NOW, PortConfig::uplink("net")).expect("a port");
    let guest = engine.add_port(NOW, PortConfig::guest("guest", config)).expect("a port");
    engine.set_port_features(NOW, guest, Some(PortFeatures::default()));
    let mut host = Host { engine, ports: [net, guest] };
    for (from, segment, payload) in course() {
        host.takes(from, &segment, &written(payload));
    }
    test(host);
}

const NOW: Instant = Instant::from_secs(1);

/// Segments of R and G until G has been offered R's first 1000 bytes.
fn course() -> [(Side, Segment, usize); 4] {
    [
        (Side::R, syn(Side::R), 0),
        (Side::G, syn(Side::G), 0),
        (Side::R, seg(Side::R, 1, 1), 0),
        (Side::R, seg(Side::R, 1, 1), 1000),
    ]
}

/// The bytes of the first connection's streams.
fn streams() -> [Stream; 2] {
    [Stream::of(0, true), Stream::of(0, false)]
}

/// The first `len` bytes of R's stream.
fn written(len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    streams()[Side::R as usize].fill(0, &mut bytes);
    bytes
}

fn framed(from: Side, segment: &Segment) -> Segment {
    let (src_mac, dst_mac) = (MACS[from as usize], MACS[from.other() as usize]);
    Segment { src_mac, dst_mac, ..segment.clone() }
}

impl Host<'_> {
    fn takes(&mut self, from: Side, segment: &Segment, payload: &[u8]) {
        let mut frame = build(&framed(from, segment), payload);
        let port = self.ports[from as usize];
        self.engine.handle_frame(NOW, port, &mut VirtioNetHdr::default(), &mut frame);
        self.engine.handle_batch_end(NOW);
        while self.engine.poll_transmit(NOW).is_some() {}
        while self.engine.poll_delivery(NOW, self.ports[1], usize::MAX).is_some() {}
    }

    fn key(&self) -> FlowKey {
        let (_, key, _) = self.engine.flows().next().expect("a flow");
        *key
    }

    fn guests(&self) -> [Option<PortId>; 1] {
        [Some(self.ports[Side::G as usize])]
    }
}

#[track_caller]
fn refused(rule: Rule, said: &Ensure) {
    assert!(said.is_err(), "{rule} accepts it");
}

#[track_caller]
fn accepted(rule: Rule, said: &Ensure) {
    assert_eq!(*said, Ok(()), "{rule}");
}

#[test]
fn inv_03_an_acknowledged_byte_is_held_and_is_the_one_that_r_sent() {
    with_host(|mut host| {
        let told_until = |end: u32| {
            let mut s = Scene::promised(1000);
            if end > 1001 {
                s.net_gets(&told(end), &[]);
            }
            s.h
        };
        let key = host.key();
        let said = |h: &mut History, host: &Host<'_>| {
            held::on_step(h, &host.engine, host.engine.find_flow(&key), true)
        };
        accepted(Rule::Held, &said(&mut told_until(1001), &host));
        refused(Rule::Held, &said(&mut told_until(1002), &host));
        let mut h = told_until(1001);
        h.streams = Some(streams());
        accepted(Rule::Held, &said(&mut h.clone(), &host));
        h.streams = Some([Stream::of(1, true), Stream::of(1, false)]);
        refused(Rule::Held, &said(&mut h, &host));
        refused(Rule::Held, &held::on_step(&mut told_until(1001), &host.engine, None, true));
        // G acknowledges them, and the history has not seen it: they went too early.
        host.takes(Side::G, &seg(Side::G, 1, 501), &[]);
        refused(Rule::Held, &said(&mut told_until(1001), &host));
    });
}

#[test]
fn inv_06_the_pages_of_flows_are_those_of_the_account_and_within_the_budget() {
    with_host(|host| {
        accepted(Rule::Budget, &budget::on_step(&host.engine, &host.guests(), true));
        let vm = host.engine.vm(host.ports[1]).expect("a VM");
        let (reserved, most) = (vm.reserved_pages, vm.budget_pages);
        assert!(0 < reserved && reserved < most, "{reserved} of {most}");
        accepted(Rule::Budget, &budget::account(reserved, most, Some(reserved)));
        accepted(Rule::Budget, &budget::account(most, most, None));
        refused(Rule::Budget, &budget::account(most + 1, most, None));
        refused(Rule::Budget, &budget::account(reserved, most, Some(reserved - 1)));
        refused(Rule::Budget, &budget::account(reserved, most, Some(reserved + 1)));
    });
}

#[test]
fn inv_20_each_guest_has_its_pages_and_no_more_than_its_flows() {
    with_host(|mut host| {
        let guests = host.guests();
        let said =
            |host: &Host<'_>, ports: &[_], most| isolation::on_step(&host.engine, ports, |_| most);
        accepted(Rule::Isolation, &said(&host, &guests, 1));
        refused(Rule::Isolation, &said(&host, &guests, 0));
        // Pages that belong to two.
        refused(Rule::Isolation, &said(&host, &[guests[0], guests[0]], 1));
        // One stranger's handshake of eight flows, and then two.
        for port in [2, 3] {
            accepted(Rule::Isolation, &said(&host, &guests, 8));
            let stranger = with(syn(Side::R), |x| x.src_port = port);
            host.takes(Side::R, &stranger, &[]);
            host.takes(Side::G, &with(syn(Side::G), |x| x.dst_port = port), &[]);
        }
        refused(Rule::Isolation, &said(&host, &guests, 8));
    });
}

#[test]
fn an_idle_flow_gives_its_place_back_if_the_guest_has_room_and_only_then() {
    let idle = |ms| {
        let mut s = Scene::open();
        s.guest_gets(&seg(Side::R, 1, 1), &[]);
        s.ms(ms);
        s
    };
    for (ms, is_parked) in [(1000, false), (1000, true), (6000, true)] {
        let mut s = idle(ms);
        accepted(Rule::Parked, &parked::on_step(&mut s.h, s.now, is_parked));
    }
    let mut s = idle(6000);
    refused(Rule::Parked, &parked::on_step(&mut s.h, s.now, false));
    // Its guest takes ten segments no longer.
    let mut cramped = idle(1000);
    cramped.guest_sends(&with(seg(Side::G, 1, 1), |x| x.window = 10), &[]);
    refused(Rule::Parked, &parked::on_step(&mut cramped.h, cramped.now, true));
}

/// A flow that acknowledges late, of which R has sent two segments and not what is between them.
fn late() -> Scene {
    let mut s = Scene::open();
    accepted(Rule::LateAck, &late_ack::on_step(&mut s.h, true));
    s.net_sends(&seg(Side::R, 1, 1), &[7; 100]);
    s.net_sends(&seg(Side::R, 201, 1), &[7; 100]);
    s
}

#[test]
fn life_12_a_flow_that_acknowledges_late_promises_nothing() {
    for (stays, ack) in [(true, 101), (false, 101), (true, 1)] {
        let mut s = late();
        s.net_gets(&told(ack), &[]);
        let said = late_ack::on_step(&mut s.h, stays);
        if stays && ack > 1 {
            refused(Rule::LateAck, &said);
        } else {
            accepted(Rule::LateAck, &said);
        }
    }
    // An edge that G has not shown.
    let mut s = late();
    s.net_gets(&with(told(1), |x| x.window += 10), &[]);
    refused(Rule::LateAck, &late_ack::on_step(&mut s.h, true));
}

#[test]
fn life_12_no_block_leaves_above_an_ack_that_is_below_held_bytes() {
    let mut s = late();
    s.net_gets(&with(told(1), |x| x.sack = blocks(&[(201, 301)])), &[]);
    s.refused_by(Rule::LateAck);
}

/// Seed 1200356: what a flow still said late when it began to acknowledge early.
#[test]
fn life_12_a_step_that_ends_the_late_mode_owes_no_blocks() {
    for (steps, fine) in [(1, true), (2, false)] {
        let mut s = late();
        s.net_sends(&seg(Side::R, 401, 1), &[7; 100]);
        s.guest_sends(&seg(Side::G, 1, 101), &[]);
        for _ in 0..steps {
            accepted(Rule::LateAck, &late_ack::on_step(&mut s.h, false));
        }
        s.net_gets(&told(101), &[]);
        if fine { s.accepted() } else { s.refused_by(Rule::PromptAck) }
    }
}

/// Seed 1200452: R repeats what the host need not have taken, so it may believe R or not.
#[test]
fn life_12_an_ack_may_wait_for_a_block_that_r_has_perhaps_forgotten() {
    const URGENT: TcpFlags = TcpFlags::ACK.union(TcpFlags::URG);
    for (flags, fine) in [(URGENT, true), (TcpFlags::ACK, false)] {
        let mut s = Scene::open();
        accepted(Rule::LateAck, &late_ack::on_step(&mut s.h, true));
        s.net_sends(&seg(Side::R, 201, 1), &[7; 100]);
        s.net_gets(&with(told(1), |x| x.sack = blocks(&[(201, 301)])), &[]);
        let first = |flags| with(seg(Side::R, 1, 1), |x| (x.flags, x.urgent) = (flags, 100));
        s.net_sends(&first(flags), &[7; 200]);
        s.net_sends(&first(TcpFlags::ACK), &[7; 200]);
        s.guest_sends(&seg(Side::G, 1, 251), &[]);
        s.ms(12);
        if fine { s.accepted() } else { s.refused_by(Rule::PromptAck) }
    }
}

/// One connection of one guest, whose streams are known.
struct One(FlowKey);

impl Setting for One {
    fn flow_of(&self, packet: &Packet, _: Tap) -> Option<(FlowName, bool)> {
        let (ip, _) = packet.tcp()?;
        let name = FlowName { guest: 0, guest_port: 1, remote: [0; 16], remote_port: 1 };
        Some((name, ip.src.0[15] == 1))
    }

    fn begins(&self, name: FlowName, _: &Tcp) -> Option<History> {
        let mut h = History::new(name, Some(0), false, Some(streams()));
        h.known.mtu = Some(1500);
        Some(h)
    }

    fn key_of(&self, _: FlowName, _: PortId) -> FlowKey {
        self.0
    }

    fn flows_max(&self, _: usize) -> u32 {
        64
    }

    fn guests(&self) -> usize {
        1
    }
}

/// The observer's first verdict on a host at work that sends `last` to one of them after
/// [`course`], asked between two steps.
fn observed(host: &Host<'_>, to: Side, last: &Segment, payload: &[u8]) -> Option<Rule> {
    let mut observer = Observer::new(One(host.key()));
    let mut said = Vec::new();
    let mut sees = |tap, from: Side, segment: &Segment, payload: &[u8]| {
        let bytes = build(&framed(from, segment), payload);
        let packet = Packet::parse(&bytes).expect("well-formed");
        said.push(observer.on_frame(&tapped(NOW, tap, VirtioNetHdr::default(), &bytes, &packet)));
    };
    for (from, segment, payload) in course() {
        let payload = written(payload);
        let (tap, out) = match from {
            Side::R => (Tap::FromNet, Tap::ToGuest(0)),
            Side::G => (Tap::FromGuest(0), Tap::ToNet),
        };
        sees(tap, from, &segment, &payload);
        if payload.is_empty() {
            sees(out, from, &segment, &payload); // as it came
        }
    }
    sees(if to == Side::R { Tap::ToNet } else { Tap::ToGuest(0) }, to.other(), last, payload);
    let ports = host.guests();
    let view = HostView {
        host: 0,
        engine: &host.engine,
        ports: &ports,
        worker_runs_since: NOW,
        any_flow: true,
    };
    said.push(observer.on_step(NOW, &view));
    said.into_iter().find_map(Result::err).map(|violation| violation.rule)
}

#[test]
fn the_observer_of_a_host_at_work_asks_the_rules_about_frames_and_about_the_engine() {
    with_host(|mut host| {
        let offered = with(seg(Side::R, 1, 1), |x| x.flags = PUSH);
        assert_eq!(observed(&host, Side::G, &offered, &written(1000)), None);
        let tampered = Some(Rule::BytesToGuest);
        assert_eq!(observed(&host, Side::G, &offered, &[7; 1000]), tampered);
        assert_eq!(observed(&host, Side::R, &told(1001), &[]), None);
        assert_eq!(observed(&host, Side::R, &told(1002), &[]), Some(Rule::AckNumbers));
        // The frames are right, but the engine holds less than they promise.
        host.takes(Side::G, &seg(Side::G, 1, 501), &[]);
        assert_eq!(observed(&host, Side::R, &told(1001), &[]), Some(Rule::Held));
    });
}

/// The mutations of a table once proved it, by seeds that noticed them (docs/safety.md).
#[test]
fn every_rule_refuses_a_written_trace() {
    let traces = [
        include_str!("../tests.rs"),
        include_str!("relayed.rs"),
        include_str!("by_step.rs"),
        include_str!("../senders/tests.rs"),
        include_str!("../../trace/tests.rs"),
    ]
    .concat();
    let none: Vec<_> = Rule::ALL
        .iter()
        .filter(|rule| {
            let name = format!("Rule::{rule:?}");
            let is_name = |rest: &str| !rest.starts_with(|c: char| c.is_alphanumeric());
            let accepts = |before: &str| before.trim_end().ends_with("accepted(");
            let is_refused = |(at, _): (usize, &str)| {
                is_name(&traces[at + name.len()..]) && !accepts(&traces[..at])
            };
            !traces.match_indices(&name).any(is_refused)
        })
        .collect();
    assert!(none.is_empty(), "no test sees these refuse anything: {none:?}");
}
