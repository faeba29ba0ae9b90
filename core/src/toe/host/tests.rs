use super::*;
use crate::common::Random;
use crate::limits::{
    T_TOE_PROBE, T_TOE_SILENCE, TOE_CONTROLS_MAX, TOE_LISTENERS_MAX, TOE_LISTENERS_PER_ADDRESS_MAX,
    TOE_PACKET_COST, TOE_SOCKETS_PER_STEP, TOE_STRAYS_MAX, TOE_WANTED_MAX,
};
use crate::toe::control::{LEN, Program};
use crate::toe::guest::GuestConfig;
use crate::toe::state::State;
use crate::wire::vsock::{SHUTDOWN_RECEIVE, SHUTDOWN_SEND};
use proptest::prelude::*;
use std::net::{Ipv4Addr, SocketAddr};

mod world;

const NOW: Instant = Instant::from_secs(1000);
const A: VmId = VmId(0);
const B: VmId = VmId(1);
/// Means harm.
const C: VmId = VmId(2);
/// The host that all of them are on, and another.
const HERE: HostId = HostId(0);
const THERE: HostId = HostId(1);
/// The vsock port of the control connection of either guest.
const CONTROL: u32 = 900;
/// The vsock port at which B listens.
const LISTENS: u32 = 4000;

fn at(text: &str) -> SocketAddr {
    text.parse().expect("an address")
}

/// All may connect, but not to ports 9 (native) and 10 (forbidden).
struct Doorkeeper;

impl Policy for Doorkeeper {
    fn connect(&self, _: VmId, _: Program, request: &Request) -> Route {
        match request.to.port() {
            9 => Route::Native,
            10 => Route::Failed(Errno::Access),
            _ => Route::To(HERE),
        }
    }
}

/// A host with two guests, A (10.0.0.1) and B (10.0.0.2), whose packets the test writes.
struct World {
    host: Host,
    now: Instant,
    /// Packets that each guest got.
    packets: [VecDeque<Header>; 3],
    answers: [VecDeque<[u8; LEN]>; 3],
    /// Guests whose rings have no room.
    full: [bool; 3],
    /// Bytes of answers that each guest has read.
    read: [u32; 2],
    /// Messages that are under way, and all that ever were.
    messages: VecDeque<(Message, Request)>,
    requests: VecDeque<(Message, Request)>,
    /// Messages for the other host.
    abroad: Vec<Message>,
    gone: usize,
    returned: Vec<Message>,
    listens: Vec<(VmId, SocketAddr)>,
}

impl World {
    fn new() -> Self {
        let mut host = Host::new(77);
        for (vm, ip) in [(A, "10.0.0.1"), (B, "10.0.0.2")] {
            let ips = vec![
                ip.parse().expect("an address"),
                format!("fd00::{}", vm.0 + 1).parse().expect("one"),
            ];
            let others = host.add_guest(vm, GuestConfig { cid: cid(vm), network: 5, ips }, false);
            assert_eq!(others, [IpAddr::V4(Ipv4Addr::UNSPECIFIED); 0]);
        }
        let mut world = Self {
            host,
            now: NOW,
            packets: Default::default(),
            answers: Default::default(),
            full: [false; 3],
            read: [0; 2],
            messages: VecDeque::new(),
            requests: VecDeque::new(),
            abroad: Vec::new(),
            gone: 0,
            returned: Vec::new(),
            listens: Vec::new(),
        };
        for vm in [A, B] {
            let _ = world.says(vm, Op::Request, (CONTROL, control::PORT), |_| {});
            assert_eq!(world.heard(vm), [Op::Response]);
        }
        world
    }

    /// A guest says something from a port of its own to one of the host.
    fn says(
        &mut self,
        vm: VmId,
        op: Op,
        ports: (u32, u32),
        more: impl FnOnce(&mut Header),
    ) -> Handled {
        self.sends(vm, op, ports, &[], more)
    }

    fn sends(
        &mut self,
        vm: VmId,
        op: Op,
        (src_port, dst_port): (u32, u32),
        payload: &[u8],
        more: impl FnOnce(&mut Header),
    ) -> Handled {
        let mut header = Header {
            src_cid: cid(vm),
            dst_cid: HOST_CID,
            src_port,
            dst_port,
            len: u32::try_from(payload.len()).expect("small"),
            kind: STREAM,
            op: Some(op),
            flags: 0,
            buf_alloc: 65_536,
            fwd_cnt: 0,
        };
        more(&mut header);
        let mut read = |to: &mut [u8]| {
            to.copy_from_slice(&payload[..to.len()]);
            true
        };
        let len = payload.len();
        let handled = self.host.handle_packet(self.now, vm, &header, len, &mut read, &Doorkeeper);
        self.collect();
        handled
    }

    /// Takes what is due.
    fn collect(&mut self) {
        while let Some(output) = self.host.poll_output(self.now) {
            match output {
                Output::Message(_, host, message, request) => {
                    if matches!(message.kind, Kind::Request { .. }) {
                        self.requests.push_back((message, request));
                    }
                    if host == HERE {
                        self.messages.push_back((message, request));
                    } else {
                        self.abroad.push(message);
                    }
                }
                Output::Return(_, message) => self.returned.push(message),
                Output::Packets(vm) => self.takes(vm),
                Output::Gone(_) => self.gone += 1,
                Output::Listens(vm, at) => self.listens.push((vm, at)),
            }
        }
    }

    /// A guest takes what there is for it, if its ring has room.
    fn takes(&mut self, vm: VmId) {
        let i = vm.0 as usize;
        while !self.full[i]
            && let Some((header, answer)) = self.host.poll_packet(vm)
        {
            assert_eq!(header.dst_cid, cid(vm));
            if let Some(answer) = answer {
                assert_eq!((header.op, header.len), (Some(Op::Data), 64));
                self.answers[i].push_back(answer);
            } else {
                self.packets[i].push_back(header);
            }
        }
    }

    /// Its ring has room again.
    fn has_room(&mut self, vm: VmId) {
        self.full[vm.0 as usize] = false;
        self.takes(vm);
        self.collect();
    }

    fn carry(&mut self) {
        while let Some((message, request)) = self.messages.pop_front() {
            if matches!(message.kind, Kind::Request { .. }) {
                self.host.handle_request(self.now, HERE, &message, &request, request.from.ip());
            } else {
                let _ = self.host.handle_message(self.now, HERE, &message);
            }
            self.collect();
        }
        for message in std::mem::take(&mut self.returned) {
            let _ = self.host.handle_message(self.now, HERE, &message);
            self.collect();
        }
    }

    /// The operations that a guest has heard since it was last asked.
    fn heard(&mut self, vm: VmId) -> Vec<Op> {
        let packets = self.packets[vm.0 as usize].drain(..);
        packets.map(|header| header.op.expect("known")).collect()
    }

    /// A process asks, and reads the answer: its code, and own and other address.
    fn asks(&mut self, vm: VmId, ask: Ask) -> Answer {
        let asked = Asked { tag: 5, ask };
        let i = vm.0 as usize;
        let fwd_cnt = self.read[i];
        let ports = (CONTROL, control::PORT);
        let _ = self.sends(vm, Op::Data, ports, &asked.emit(), |h| h.fwd_cnt = fwd_cnt);
        let bytes = self.answers[i].pop_front().expect("an answer");
        self.read[i] = fwd_cnt.wrapping_add(64);
        self.packets[i].retain(|header| header.dst_port != CONTROL);
        let codes = [Code::Done, Code::Native].into_iter();
        let codes = codes.chain(Errno::ALL.map(Code::Failed));
        let answers = codes.flat_map(|code| {
            let of = Answer::of(asked, code);
            [
                of,
                Answer {
                    addresses: Some((address(&bytes, 32, 14), address(&bytes, 16, 12))),
                    ..of
                },
            ]
        });
        let states = State::ALL.map(Some).into_iter().chain([None]);
        let answers =
            answers.flat_map(|answer| states.clone().map(move |state| Answer { state, ..answer }));
        let mut found = answers.filter(|answer| answer.emit() == bytes);
        found.next().expect("an answer that there is")
    }

    /// A connects to B from vsock port `port`: B's ports.
    fn connects(&mut self, port: u32, to: &str) -> (u32, u32) {
        let ask = Ask::Connect {
            program: Program::NONE,
            guest: port,
            from: at("0.0.0.0:40000"),
            to: at(to),
        };
        assert_eq!(self.asks(A, ask).code, Code::Done);
        assert_eq!(self.says(A, Op::Request, (port, control::SOCKETS), |_| {}), Handled::Done);
        self.carry();
        let request = self.packets[1].pop_front().expect("a request");
        assert_eq!((request.op, request.dst_port), (Some(Op::Request), LISTENS));
        let ports = (request.dst_port, request.src_port);
        let _ = self.says(B, Op::Response, ports, |_| {});
        self.carry();
        assert_eq!(self.heard(A), [Op::Response]);
        ports
    }

    /// B comes into this network; its kernel stays.
    fn begins_anew(&mut self, network: u32) {
        self.host.end_closed(B);
        let config = self.host.remove_guest(NOW, B).expect("it was there");
        self.collect();
        while self.host.is_ending(B) {
            self.host.go_on_ending(NOW);
            self.collect();
        }
        assert!(self.host.add_guest(B, GuestConfig { network, ..config }, true).is_empty());
        self.collect();
        self.carry();
    }

    fn listens(&mut self, text: &str) {
        let ask = Ask::Listen { guest: LISTENS, at: at(text), v4: false };
        assert_eq!(self.asks(B, ask).code, Code::Done);
    }
}

fn cid(vm: VmId) -> u64 {
    3 + u64::from(vm.0)
}

fn address(bytes: &[u8; LEN], ip: usize, port: usize) -> SocketAddr {
    let octets: [u8; 16] = bytes[ip..ip + 16].try_into().expect("sixteen");
    let ip = std::net::IpAddr::from(octets).to_canonical();
    SocketAddr::new(ip, u16::from_le_bytes([bytes[port], bytes[port + 1]]))
}

fn both(header: &mut Header) {
    header.flags = SHUTDOWN_RECEIVE | SHUTDOWN_SEND;
}

#[test]
fn two_guests_connect_talk_and_close() {
    let mut w = World::new();
    w.listens("0.0.0.0:80");
    let b = w.connects(1025, "10.0.0.2:80");
    let Handled::Carry(from, message) = w.sends(A, Op::Data, (1025, 2), b"hello", |_| {}) else {
        panic!("to be carried");
    };
    assert_eq!(message.kind, Kind::Data { offset: 0, len: 5 });
    let met = w.host.handle_message(NOW, HERE, &message);
    let to = met.socket.expect("B's");
    assert_eq!((met.verdict, to != from), (Verdict::Deliver, true));
    assert_eq!(w.host.room_to_guest(to), 65_536 - TOE_PACKET_COST);
    let header = w.host.give(NOW, to, 5).expect("there is room");
    assert_eq!((header.dst_port, header.src_port, header.len), (LISTENS, b.1, 5));
    let describe = Asked { tag: 5, ask: Ask::Describe(Ports { guest: b.0, host: b.1 }) };
    let own = |state| Answer {
        addresses: Some((at("10.0.0.2:80"), at("10.0.0.1:40000"))),
        state: Some(state),
        ..Answer::of(describe, Code::Done)
    };
    assert_eq!(w.asks(B, describe.ask), own(State::Open));
    let _ = w.says(A, Op::Shutdown, (1025, 2), both);
    w.carry();
    assert_eq!(w.heard(A), [Op::Reset]);
    assert_eq!(w.heard(B), [Op::Shutdown]);
    assert_eq!(w.asks(B, describe.ask), own(State::Remaining));
    let _ = w.says(B, Op::Shutdown, b, |h| {
        h.fwd_cnt = 5;
        both(h);
    });
    w.carry();
    assert_eq!((w.host.sockets(), w.gone), (0, 2));
    assert_eq!(w.asks(B, describe.ask), own(State::Over), "it ended clean, and that can be asked");
}

#[test]
fn vtoe_06_who_reads_an_end_asks_how_it_came() {
    let mut w = World::new();
    w.listens("0.0.0.0:80");
    let b = w.connects(1025, "10.0.0.2:80");
    let _ = w.says(B, Op::Reset, b, |_| {});
    w.carry();
    assert_eq!(w.heard(A), [Op::Reset]);
    let a = Ask::Describe(Ports { guest: 1025, host: 2 });
    assert_eq!(w.asks(A, a).code, Code::Failed(Errno::Reset));
    let unknown = Ask::Describe(Ports { guest: 1026, host: 2 });
    assert_eq!(w.asks(A, unknown).code, Code::Failed(Errno::Reset), "not clean");
    assert_eq!(
        w.asks(A, Ask::Linger(Ports { guest: 1026, host: 2 })).code,
        Code::Failed(Errno::Reset)
    );
}

#[test]
fn vtoe_06_what_cannot_be_reached_says_why() {
    let mut w = World::new();
    w.listens("10.0.0.2:80");
    // Guest TCP may find somebody there.
    for (port, to) in (2000..).zip(["10.0.0.2:81", "10.0.0.7:80"]) {
        let ask = Ask::Connect {
            program: Program::NONE,
            guest: port,
            from: at("10.0.0.1:40000"),
            to: at(to),
        };
        assert_eq!(w.asks(A, ask).code, Code::Done);
        let _ = w.says(A, Op::Request, (port, 2), |_| {});
        w.carry();
        assert_eq!(w.heard(A), [Op::Reset], "{to}");
        let asked = w.asks(A, Ask::Describe(Ports { guest: port, host: 2 }));
        assert_eq!(asked.code, Code::Native, "{to}");
        assert_eq!(asked.addresses, Some((at("10.0.0.1:40000"), at(to))));
    }
    // So it may if the kernel of the guest that listens does not take it, as by a listener that is
    // full: there TCP waits for a place.
    let ask = Ask::Connect {
        program: Program::NONE,
        guest: 2002,
        from: at("10.0.0.1:40000"),
        to: at("10.0.0.2:80"),
    };
    assert_eq!(w.asks(A, ask).code, Code::Done);
    let _ = w.says(A, Op::Request, (2002, 2), |_| {});
    w.carry();
    let call = w.packets[1].pop_front().expect("a request");
    let _ = w.says(B, Op::Reset, (call.dst_port, call.src_port), |_| {});
    w.carry();
    assert_eq!(w.heard(A), [Op::Reset]);
    let asked = w.asks(A, Ask::Describe(Ports { guest: 2002, host: 2 }));
    assert_eq!((asked.code, w.host.sockets()), (Code::Native, 0));
    for (to, code) in [("10.0.0.2:9", Code::Native), ("10.0.0.2:10", Code::Failed(Errno::Access))] {
        let ask = Ask::Connect {
            program: Program::NONE,
            guest: 3000,
            from: at("10.0.0.1:40000"),
            to: at(to),
        };
        assert_eq!(w.asks(A, ask).code, code);
        let _ = w.says(A, Op::Request, (3000, 2), |_| {});
        assert_eq!(w.heard(A), [Op::Reset], "nobody has let it");
    }
    assert_eq!(w.host.sockets(), 0);
}

#[test]
fn vtoe_09_a_guest_is_nobody_but_itself() {
    let mut w = World::new();
    for (from, to) in [
        ("10.0.0.2:5", "10.0.0.2:80"),
        ("[fd00::2]:5", "[fd00::2]:80"),
        ("0.0.0.0:0", "10.0.0.2:80"),
    ] {
        let ask = Ask::Connect { program: Program::NONE, guest: 1025, from: at(from), to: at(to) };
        assert_eq!(w.asks(A, ask).code, Code::Failed(Errno::AddressNotAvailable), "{from}");
    }
    let ask = Ask::Connect {
        program: Program::NONE,
        guest: 1025,
        from: at("[::]:5"),
        to: at("[fd00::2]:80"),
    };
    assert_eq!(w.asks(A, ask).addresses, Some((at("[fd00::1]:5"), at("[fd00::2]:80"))));
    let own = |guest, text| Ask::Listen { guest, at: at(text), v4: false };
    assert_eq!(w.asks(A, own(1, "10.0.0.2:80")).code, Code::Failed(Errno::AddressNotAvailable));
    assert_eq!(w.asks(A, own(1, "10.0.0.1:0")).code, Code::Failed(Errno::AddressNotAvailable));
    assert_eq!(w.asks(A, own(1, "10.0.0.1:80")).code, Code::Done);
    assert_eq!(w.asks(A, own(1, "10.0.0.1:80")).code, Code::Done);
    assert_eq!(w.asks(A, Ask::Unlisten { guest: 1 }).code, Code::Done);
    // Another CID than its own, or than the host's.
    for lie in [|h: &mut Header| h.src_cid = 4, |h: &mut Header| h.dst_cid = 4] {
        let _ = w.says(A, Op::Request, (CONTROL, control::PORT), lie);
        assert_eq!(w.heard(A), [Op::Reset]);
        assert_eq!(w.heard(B), []);
    }
}

#[test]
fn vtoe_01_another_host_hears_of_nobody_and_of_no_place_in_one_way() {
    let mut w = World::new();
    w.listens("0.0.0.0:80");
    let mut asks = |serial, to| {
        let id = ShadowId { incarnation: 1, serial };
        let message = Message { id, to: Side::Acceptor, kind: Kind::Request { edge: 9 } };
        let request = Request { network: 5, from: at("10.0.0.9:5"), to: at(to) };
        w.host.handle_request(NOW, THERE, &message, &request, request.from.ip());
        w.collect();
        // Its listener is full.
        if let Some(call) = w.packets[1].pop_front() {
            let _ = w.says(B, Op::Reset, (call.dst_port, call.src_port), |_| {});
        }
        let kind = Kind::Reset(Errno::NotByToe);
        (Message { id, to: Side::Opener, kind }, w.returned.pop(), w.abroad.pop())
    };
    for (serial, to) in (1..).zip(["10.0.0.7:80", "10.0.0.2:81"]) {
        let (refusal, returned, abroad) = asks(serial, to);
        assert_eq!((returned, abroad), (Some(refusal), None), "{to}");
    }
    let (refusal, returned, abroad) = asks(3, "10.0.0.2:80");
    assert_eq!((returned, abroad), (None, Some(refusal)));
}

#[test]
fn another_network_is_out_of_reach() {
    let mut w = World::new();
    w.listens("0.0.0.0:80");
    let (from, to) = (at("10.0.0.1:5"), at("10.0.0.2:80"));
    let id = ShadowId { incarnation: 1, serial: 1 };
    let mut message = Message { id, to: Side::Acceptor, kind: Kind::Request { edge: 9 } };
    for (network, reached) in [(6, false), (5, true)] {
        message.id.serial = u64::from(network);
        w.host.handle_request(NOW, THERE, &message, &Request { network, from, to }, from.ip());
        w.collect();
        assert_eq!(w.heard(B).len(), usize::from(reached));
    }
    let (kind, id) = (Kind::Reset(Errno::NotByToe), ShadowId { serial: 6, ..id });
    assert_eq!(w.returned, [Message { id, to: Side::Opener, kind }]);
    w.host.handle_request(NOW, THERE, &message, &Request { network: 5, from, to }, from.ip());
    w.collect();
    assert_eq!((w.heard(B), w.host.sockets()), (vec![], 1), "it has come before");
}

#[test]
fn requests_come_in_pieces_and_one_that_is_none_ends_the_control_connection() {
    let mut w = World::new();
    w.listens("0.0.0.0:80");
    let bytes = Asked { tag: 9, ask: Ask::Unlisten { guest: 1 } }.emit();
    let ports = (CONTROL, control::PORT);
    let _ = w.sends(A, Op::Data, ports, &bytes[..10], |_| {});
    assert_eq!(w.answers[0].len(), 0);
    let rest = [&bytes[10..], &bytes[..], &bytes[..63]].concat();
    let _ = w.sends(A, Op::Data, ports, &rest, |_| {});
    assert_eq!(w.answers[0].len(), 2);
    w.packets[0].clear();
    let _ = w.sends(A, Op::Data, ports, &[1], |_| {});
    assert_eq!(w.heard(A), [Op::Reset]);
    let _ = w.sends(A, Op::Data, ports, &[1], |_| {});
    assert_eq!(w.heard(A), [Op::Reset], "there is none any more");
    // B's goes as well, and with it its listener.
    let _ = w.says(B, Op::Reset, ports, |_| {});
    let _ = w.says(A, Op::Request, ports, |_| {});
    w.read[0] = 0;
    w.answers[0].clear();
    assert_eq!(w.heard(A), [Op::Response]);
    let ask = Ask::Connect {
        program: Program::NONE,
        guest: 1,
        from: at("0.0.0.0:4"),
        to: at("10.0.0.2:80"),
    };
    assert_eq!(w.asks(A, ask).code, Code::Done);
    let _ = w.says(A, Op::Request, (1, 2), |_| {});
    w.carry();
    assert_eq!(w.heard(A), [Op::Reset]);
}

#[test]
fn a_guest_that_reads_no_answers_cannot_ask_for_ever() {
    let mut w = World::new();
    let bytes = Asked { tag: 9, ask: Ask::Unlisten { guest: 1 } }.emit();
    let mut asked = 0;
    while w.heard(A).iter().all(|op| *op != Op::Reset) {
        asked += 1;
        assert!(asked < 100);
        let _ = w.sends(A, Op::Data, (CONTROL, control::PORT), &bytes, |h| h.buf_alloc = 64);
    }
    assert_eq!(w.answers[0].len(), 1);
    assert!(asked <= 2 * 16 + 1, "{asked}");
}

#[test]
fn a_guest_may_ask_on_when_it_has_been_given_all_answers() {
    let ports = (CONTROL, control::PORT);
    let ask = Asked { tag: 9, ask: Ask::Unlisten { guest: 1 } }.emit();
    for read in [1_u32, 16] {
        let mut w = World::new();
        let _ = w.sends(A, Op::Data, ports, &ask.repeat(16), |h| h.buf_alloc = 64);
        for n in 1..=read {
            assert_eq!(w.answers[0].len(), n as usize);
            let has_read = |h: &mut Header| (h.buf_alloc, h.fwd_cnt) = (64, 64 * n);
            let _ = w.says(A, Op::CreditUpdate, ports, has_read);
        }
        assert!(w.heard(A).iter().all(|op| *op != Op::Reset));
        let _ = w.sends(A, Op::Data, ports, &ask, |h| h.fwd_cnt = 64 * read);
        assert_eq!(w.heard(A).contains(&Op::Reset), read < 16, "{read} answers were read");
    }
}

#[test]
fn what_a_guest_can_make_the_host_keep_is_bounded() {
    let mut w = World::new();
    let wants = |guest| Ask::Connect {
        program: Program::NONE,
        guest,
        from: at("0.0.0.0:4"),
        to: at("10.0.0.2:80"),
    };
    let most = u32::try_from(TOE_WANTED_MAX).expect("small");
    for port in 0..most {
        assert_eq!(w.asks(A, wants(port)).code, Code::Done);
    }
    assert_eq!(w.asks(A, wants(most)).code, Code::Native);
    assert_eq!(w.asks(A, wants(0)).code, Code::Done);
    let listeners = u16::try_from(TOE_LISTENERS_MAX).expect("small");
    let listen = |port| {
        let at = SocketAddr::new(at("10.0.0.1:1").ip(), port);
        Ask::Listen { guest: 7, at, v4: false }
    };
    for port in 1..=listeners {
        assert_eq!(w.asks(A, listen(port)).code, Code::Done);
    }
    assert_eq!(w.asks(A, listen(listeners + 1)).code, Code::Native);
    for port in 0..2 * u32::try_from(TOE_CONTROLS_MAX).expect("small") {
        let _ = w.says(A, Op::Request, (10_000 + port, control::PORT), |_| {});
    }
    let responses = w.heard(A).iter().filter(|op| **op == Op::Response).count();
    assert_eq!(responses, TOE_CONTROLS_MAX - 1);
    // Packets for nobody, and nobody who takes the answers.
    let mut none = |_: &mut [u8]| false;
    let stray = Header { op: Some(Op::Data), src_port: 1, ..stray_header() };
    w.full[0] = true;
    let mut answered = 0;
    while !w.host.owes_answers(A) && answered < 2 * TOE_STRAYS_MAX {
        let _ = w.host.handle_packet(NOW, A, &stray, 0, &mut none, &Doorkeeper);
        answered += 1;
    }
    assert_eq!(answered, TOE_STRAYS_MAX);
    let _ = w.host.handle_packet(NOW, A, &stray, 0, &mut none, &Doorkeeper);
    w.has_room(A);
    assert_eq!((w.heard(A).len(), w.host.owes_answers(A)), (answered, false));
}

#[test]
fn who_listens_at_one_address_is_one_of_few_and_leaves_it_whole() {
    let mut w = World::new();
    let listen = |guest, port: u16| {
        let at = SocketAddr::new(at("10.0.0.1:1").ip(), port);
        Ask::Listen { guest, at, v4: false }
    };
    let most = u32::try_from(TOE_LISTENERS_PER_ADDRESS_MAX).expect("small");
    for guest in 0..most {
        assert_eq!(w.asks(A, listen(guest, 80)).code, Code::Done);
    }
    assert_eq!(w.asks(A, listen(most, 80)).code, Code::Native);
    assert_eq!(w.asks(A, listen(0, 80)).code, Code::Done, "it is one of them");
    for port in 1..80 {
        assert_eq!(w.asks(A, listen(0, port)).code, Code::Done);
    }
    // It leaves all its places, and nobody else's.
    assert_eq!(w.asks(A, Ask::Unlisten { guest: 0 }).code, Code::Done);
    assert_eq!(w.host.listening_ports(A), Some([80].into()));
    assert_eq!(w.asks(A, listen(most, 80)).code, Code::Done);
    assert_eq!(w.asks(A, listen(most + 1, 80)).code, Code::Native);
    for guest in 1..=most {
        assert_eq!(w.asks(A, Ask::Unlisten { guest }).code, Code::Done);
    }
    assert_eq!(w.host.listening_ports(A), Some([].into()));
}

fn stray_header() -> Header {
    Header {
        src_cid: 3,
        dst_cid: HOST_CID,
        src_port: 1,
        dst_port: 2,
        len: 0,
        kind: STREAM,
        op: None,
        flags: 0,
        buf_alloc: 0,
        fwd_cnt: 0,
    }
}

#[test]
fn a_guest_that_goes_resets_its_peers_and_comes_back_without_a_past() {
    let mut w = World::new();
    w.listens("0.0.0.0:80");
    let b = w.connects(1025, "10.0.0.2:80");
    let config = w.host.remove_guest(NOW, A).expect("it was there");
    w.collect();
    assert!(w.host.add_guest(A, config, false).is_empty());
    w.collect();
    w.carry();
    assert_eq!((w.heard(A), w.heard(B)), (vec![], vec![Op::Reset]));
    assert_eq!(w.host.sockets(), 0);
    let _ = w.sends(A, Op::Data, (1025, 2), b"late", |_| {});
    assert_eq!(w.heard(A), [Op::Reset]);
    assert_eq!(
        w.asks(B, Ask::Describe(Ports { guest: b.0, host: b.1 })).code,
        Code::Failed(Errno::Reset)
    );
}

/// Sockets of a guest that hears they are over.
fn resets(w: &mut World, vm: VmId) -> Vec<(u32, u32)> {
    let all = w.packets[vm.0 as usize].drain(..);
    all.map(|header| {
        assert_eq!(header.op, Some(Op::Reset));
        (header.dst_port, header.src_port)
    })
    .collect()
}

#[test]
fn vtoe_06_a_guest_that_was_stopped_and_goes_on_hears_that_its_sockets_are_gone() {
    for vm in [A, B] {
        let mut w = World::new();
        w.listens("0.0.0.0:80");
        let b = w.connects(1025, "10.0.0.2:80");
        // A message that is lost twice is lost.
        for _ in 0..2 {
            let config = w.host.remove_guest(NOW, vm).expect("it was there");
            w.collect();
            w.full[vm.0 as usize] = true;
            assert!(w.host.add_guest(vm, config, true).is_empty());
            w.carry();
        }
        w.has_room(vm);
        let (own, other) = if vm == A { ((1025, 2), (B, b)) } else { (b, (A, (1025, 2))) };
        assert_eq!(resets(&mut w, vm), [(CONTROL, control::PORT), own]);
        assert_eq!(resets(&mut w, other.0), [other.1]);
        let _ = w.says(vm, Op::Request, (CONTROL, control::PORT), |_| {});
        w.read[vm.0 as usize] = 0;
        assert_eq!(w.heard(vm), [Op::Response]);
        w.listens("0.0.0.0:80");
        assert_ne!(w.connects(1025, "10.0.0.2:80"), b, "a port of the host that was used lately");
    }
}

#[test]
fn vtoe_10_a_guest_that_comes_and_goes_leaves_no_more_behind_than_it_may_have() {
    let mut w = World::new();
    let most = TOE_SOCKETS_MAX + TOE_CONTROLS_MAX + TOE_STRAYS_MAX;
    let mut said = 5000;
    while said < 5000 + 2 * u32::try_from(most).expect("few") {
        let config = w.host.remove_guest(NOW, A).expect("it was there");
        w.collect();
        w.full[A.0 as usize] = true;
        assert!(w.host.add_guest(A, config, true).is_empty());
        for _ in 0..TOE_CONTROLS_MAX {
            let _ = w.says(A, Op::Request, (said, control::PORT), |_| {});
            said += 1;
        }
    }
    let config = w.host.remove_guest(NOW, A).expect("it was there");
    w.collect();
    assert!(w.host.add_guest(A, config, true).is_empty());
    w.has_room(A);
    let heard = resets(&mut w, A);
    assert_eq!(heard.len(), most);
    assert!(heard.contains(&(said - 1, control::PORT)), "the last come first");
    let mut all = (5000..said).map(|port| (port, control::PORT));
    let unheard = all.find(|ports| !heard.contains(ports)).expect("there were more");
    assert_eq!(w.says(A, Op::Data, unheard, |_| {}), Handled::Done);
    assert_eq!(resets(&mut w, A), [unheard], "it hears so when it speaks of it");
}

#[test]
fn vtoe_06_a_guest_whose_network_changes_hears_that_its_sockets_are_gone() {
    let mut w = World::new();
    w.listens("0.0.0.0:80");
    let b = w.connects(1025, "10.0.0.2:80");
    w.begins_anew(6);
    assert_eq!(resets(&mut w, B), [(CONTROL, control::PORT), b]);
    assert_eq!((resets(&mut w, A), w.host.sockets()), (vec![(1025, 2)], 0));
    assert_eq!(w.says(B, Op::Data, b, |_| {}), Handled::Done);
    assert_eq!(resets(&mut w, B), [b], "it has none");
    let _ = w.says(B, Op::Request, (CONTROL, control::PORT), |_| {});
    w.read[1] = 0;
    assert_eq!(w.heard(B), [Op::Response]);
    w.listens("0.0.0.0:80");
    let ask = Ask::Connect {
        program: Program::NONE,
        guest: 1025,
        from: at("0.0.0.0:4"),
        to: at("10.0.0.2:80"),
    };
    assert_eq!(w.asks(A, ask).code, Code::Done);
    let _ = w.says(A, Op::Request, (1025, 2), |_| {});
    w.carry();
    assert_eq!((w.heard(A), w.heard(B)), (vec![Op::Reset], vec![]), "it is in another network");
}

#[test]
fn vtoe_06_a_guest_whose_network_changes_is_answered_what_it_asked_before() {
    let mut w = World::new();
    w.listens("0.0.0.0:80");
    let b = w.connects(1025, "10.0.0.2:80");
    let _ = w.says(A, Op::Shutdown, (1025, 2), both);
    let _ = w.says(B, Op::Shutdown, b, both);
    w.carry();
    w.heard(B);
    // Its ring is full: it has not heard that this connection is none.
    w.full[1] = true;
    let _ = w.says(B, Op::Request, (1030, 7), |_| {});
    w.begins_anew(6);
    w.has_room(B);
    assert_eq!(resets(&mut w, B), [(CONTROL, control::PORT), (1030, 7)]);
    let _ = w.says(B, Op::Request, (CONTROL, control::PORT), |_| {});
    w.read[1] = 0;
    w.heard(B);
    let described = w.asks(B, Ask::Describe(Ports { guest: b.0, host: b.1 }));
    assert_eq!((described.code, described.state), (Code::Done, Some(State::Over)), "a clean end");
}

#[test]
fn vtoe_06_what_a_guest_has_open_and_what_it_has_closed_end_in_the_same_steps() {
    let mut w = World::new();
    w.listens("0.0.0.0:80");
    let most = TOE_SOCKETS_MAX as u64;
    for serial in 0..most {
        let ports = called(&mut w, serial);
        if serial % 2 == 0 {
            let _ = w.says(B, Op::Shutdown, ports, both);
        }
    }
    w.heard(B);
    let steps = |w: &mut World| {
        let mut steps = Vec::new();
        loop {
            w.collect();
            let said = std::mem::take(&mut w.abroad);
            steps.push(said.iter().filter(|m| matches!(m.kind, Kind::Reset(_))).count());
            if !w.host.is_ending(B) {
                return steps;
            }
            w.host.go_on_ending(NOW);
        }
    };
    let all = vec![TOE_SOCKETS_PER_STEP; TOE_SOCKETS_MAX / TOE_SOCKETS_PER_STEP];
    // Data of a closed socket arrives after its guest has gone, but not where the guest may not
    // send any more.
    let config = w.host.remove_guest(NOW, B).expect("it was there");
    assert_eq!(steps(&mut w), all[..all.len() / 2]);
    let half = TOE_SOCKETS_MAX / 2;
    assert_eq!((w.host.sockets(), w.host.sockets_of(B)), (half, half));
    w.host.end_closed(B);
    assert_eq!(steps(&mut w)[1..], all[..all.len() / 2]);
    // Both together.
    assert!(w.host.add_guest(B, config, false).is_empty());
    let _ = w.says(B, Op::Request, (CONTROL, control::PORT), |_| {});
    w.heard(B);
    w.read[1] = 0;
    w.listens("0.0.0.0:80");
    for serial in most..2 * most {
        let ports = called(&mut w, serial);
        if serial % 2 == 0 {
            let _ = w.says(B, Op::Shutdown, ports, both);
        }
    }
    w.abroad.clear();
    w.host.forget_vm(NOW, B);
    assert_eq!((steps(&mut w), w.host.sockets()), (all, 0));
}

#[test]
fn vtoe_06_a_machine_that_is_removed_leaves_nothing_on_its_number() {
    let mut w = World::new();
    w.listens("0.0.0.0:80");
    let b = w.connects(1025, "10.0.0.2:80");
    let Handled::Carry(_, data) = w.sends(A, Op::Data, (1025, 2), b"last", |_| {}) else {
        panic!("to be carried");
    };
    let _ = w.host.handle_message(NOW, HERE, &data);
    let _ = w.says(A, Op::Shutdown, (1025, 2), both);
    w.carry();
    assert_eq!((w.heard(A), w.host.sockets_of(A)), (vec![Op::Reset], 1));
    w.host.forget_vm(NOW, A);
    w.collect();
    w.carry();
    assert_eq!((w.host.sockets(), resets(&mut w, B)), (0, vec![b]));
}

#[test]
fn a_socket_that_gave_up_connecting_in_silence_leaves_its_port_to_the_next() {
    let mut w = World::new();
    w.listens("0.0.0.0:80");
    let ask = Ask::Connect {
        program: Program::NONE,
        guest: 1025,
        from: at("0.0.0.0:4"),
        to: at("10.0.0.2:80"),
    };
    for serial in 0..2 {
        assert_eq!(w.asks(A, ask).code, Code::Done);
        let _ = w.says(A, Op::Request, (1025, 2), |_| {});
        let name = ShadowId { incarnation: 77, serial };
        assert_eq!(w.messages.back().map(|(message, _)| message.id), Some(name));
    }
    w.carry();
    let calls: Vec<Header> = w.packets[1].drain(..).collect();
    assert_eq!(calls.iter().filter(|h| h.op == Some(Op::Reset)).count(), 1, "the first is off");
    assert_eq!(w.heard(A), []);
}

#[test]
fn an_end_whose_peer_is_forgotten_finds_out_by_a_probe() {
    let mut w = World::new();
    w.listens("0.0.0.0:80");
    let _ = w.connects(1025, "10.0.0.2:80");
    let _ = w.says(A, Op::Reset, (1025, 2), |_| {});
    w.messages.clear();
    assert_eq!(w.host.poll_timeout(), Some(NOW + T_TOE_PROBE).min(w.host.poll_timeout()));
    w.now = NOW + T_TOE_PROBE;
    w.host.handle_timeout(w.now);
    w.collect();
    w.carry();
    assert_eq!((w.heard(B), w.host.sockets()), (vec![Op::Reset], 0));
}

#[test]
fn vtoe_13_a_hundred_thousand_connections_use_the_same_ports_and_late_messages_meet_none() {
    let mut w = World::new();
    w.listens("0.0.0.0:80");
    let mut random = Random::new(13);
    let mut late: VecDeque<Message> = VecDeque::new();
    for round in 0..100_000_u64 {
        let b = w.connects(1025, "10.0.0.2:80");
        let Handled::Carry(_, message) = w.sends(A, Op::Data, (1025, 2), b"x", |_| {}) else {
            panic!("to be carried");
        };
        assert_eq!(message.id, ShadowId { incarnation: 77, serial: round });
        // Late messages of an earlier connection come now and have no effect.
        if let Some(message) = late.pop_front() {
            let met = w.host.handle_message(NOW, HERE, &message);
            assert_eq!((met.socket, met.verdict), (None, Verdict::Done));
            w.collect();
            assert!(w.returned.is_empty());
        }
        if let Some((message, request)) = w.requests.pop_front().filter(|_| round > 0) {
            w.host.handle_request(NOW, HERE, &message, &request, request.from.ip());
            w.collect();
            assert_eq!((w.heard(B), w.host.sockets(), w.returned.len()), (vec![], 2, 0), "a ghost");
            if random.percent(50) {
                w.requests.push_front((message, request));
            }
        }
        late.push_back(message);
        let to = w.host.handle_message(NOW, HERE, &message).socket.expect("B's");
        let _ = w.host.give(NOW, to, 1).expect("there is room");
        let first = if random.percent(50) { (A, (1025, 2), 0) } else { (B, b, 1) };
        let second = if first.0 == A { (B, b, 1) } else { (A, (1025, 2), 0) };
        for (vm, ports, fwd_cnt) in [first, second] {
            let _ = w.says(vm, Op::Shutdown, ports, |h| {
                h.fwd_cnt = fwd_cnt;
                both(h);
            });
            late.extend(w.messages.iter().map(|(message, _)| *message));
            w.carry();
        }
        let tail = late.len().saturating_sub(500);
        late.drain(..tail);
        w.packets.iter_mut().for_each(VecDeque::clear);
        let tail = w.requests.len().saturating_sub(500);
        w.requests.drain(..tail);
        assert_eq!(w.host.sockets(), 0, "round {round}");
    }
}

/// A guest of the other host connects to B; B's kernel has the request. B's ports.
fn calls(w: &mut World, serial: u64) -> (u32, u32) {
    let id = ShadowId { incarnation: 88, serial };
    let message = Message { id, to: Side::Acceptor, kind: Kind::Request { edge: 1000 } };
    let request = Request { network: 5, from: opener(serial), to: at("10.0.0.2:80") };
    w.host.handle_request(w.now, THERE, &message, &request, request.from.ip());
    w.collect();
    let call = w.packets[1].pop_back().expect("a call");
    assert_eq!(call.op, Some(Op::Request));
    (call.dst_port, call.src_port)
}

/// Of each connection another one.
fn opener(serial: u64) -> SocketAddr {
    let [.., b, c] = serial.to_be_bytes();
    SocketAddr::new(IpAddr::from([10, 1, b, c]), 5)
}

/// The guest at this address of the other host would like to connect to B; whether it is let in.
fn asks_to_connect(w: &mut World, serial: u64, from: &str) -> bool {
    let id = ShadowId { incarnation: 88, serial };
    let message = Message { id, to: Side::Acceptor, kind: Kind::Request { edge: 1000 } };
    let request = Request { network: 5, from: at(from), to: at("10.0.0.2:80") };
    w.host.handle_request(w.now, THERE, &message, &request, request.from.ip());
    w.collect();
    let refusal = Message { id, to: Side::Opener, kind: Kind::Reset(Errno::NotByToe) };
    !w.returned.contains(&refusal)
}

#[test]
fn vtoe_10_who_opens_leaves_as_many_places_as_it_has_to_others() {
    let mut w = World::new();
    w.listens("0.0.0.0:80");
    let most = TOE_SOCKETS_MAX as u64;
    let greedy = (0..most).take_while(|n| asks_to_connect(&mut w, *n, "10.0.0.9:5")).count();
    assert_eq!(greedy, TOE_SOCKETS_MAX / 2);
    let others = (most..2 * most).take_while(|n| asks_to_connect(&mut w, *n, "10.0.0.8:5")).count();
    assert_eq!(others, TOE_SOCKETS_MAX / 4);
    // The same address at another host is another guest, and B itself takes what is left.
    let id = ShadowId { incarnation: 88, serial: 0 };
    let message = Message { id, to: Side::Acceptor, kind: Kind::Request { edge: 1000 } };
    let request = Request { network: 5, from: at("10.0.0.9:5"), to: at("10.0.0.2:80") };
    w.host.handle_request(w.now, HERE, &message, &request, request.from.ip());
    w.collect();
    assert_eq!(w.host.sockets(), greedy + others + 1);
    // A connection that is over is not counted.
    w.heard(B);
    for serial in 0..10 {
        let _ = says(&mut w, THERE, serial, Kind::Reset(Errno::Reset));
    }
    w.returned.clear();
    assert!(asks_to_connect(&mut w, 3 * most, "10.0.0.7:5"));
    let again = (4 * most..5 * most).take_while(|n| asks_to_connect(&mut w, *n, "10.0.0.8:5"));
    assert!(again.count() < 10, "a fair part of what is free");
}

#[test]
fn vtoe_10_who_opens_from_many_addresses_is_counted_as_one() {
    let mut w = World::new();
    w.listens("0.0.0.0:80");
    let own = at("10.0.0.9:5").ip();
    let mut opened = 0;
    for serial in 0..TOE_SOCKETS_MAX as u64 {
        let id = ShadowId { incarnation: 88, serial };
        let message = Message { id, to: Side::Acceptor, kind: Kind::Request { edge: 1000 } };
        let request = Request { network: 5, from: opener(serial), to: at("10.0.0.2:80") };
        w.host.handle_request(w.now, THERE, &message, &request, own);
        w.collect();
        opened += usize::from(w.host.socket(THERE, id, Side::Acceptor).is_some());
    }
    assert_eq!(opened, TOE_SOCKETS_MAX / 2, "each was from another address");
    // A connection that is over is not counted, whatever its address was.
    w.heard(B);
    for serial in 0..10 {
        let _ = says(&mut w, THERE, serial, Kind::Reset(Errno::Reset));
    }
    let key = crate::toe::sockets::Opener { vm: B, host: THERE, ip: own };
    assert_eq!(w.host.sockets.opened_by(key), TOE_SOCKETS_MAX / 2 - 10);
}

#[test]
fn vtoe_10_resets_that_a_guest_does_not_take_count_as_its_sockets() {
    let mut w = World::new();
    w.listens("0.0.0.0:80");
    let ask = |guest| Ask::Connect {
        program: Program::NONE,
        guest,
        from: at("0.0.0.0:4"),
        to: at("10.0.0.1:80"),
    };
    assert_eq!(w.asks(B, ask(1025)).code, Code::Done);
    let most = TOE_SOCKETS_MAX as u64;
    accepts(&mut w, 0..most);
    w.heard(B);
    w.full[1] = true;
    for serial in 0..most {
        let _ = says(&mut w, THERE, serial, Kind::Reset(Errno::Reset));
    }
    assert_eq!((w.host.sockets(), w.heard(B)), (0, vec![]));
    // It may connect to nobody, and nobody to it.
    let _ = w.says(B, Op::Request, (1025, 2), |_| {});
    assert!(!asks_to_connect(&mut w, most, "10.0.0.9:5"));
    assert_eq!(w.host.sockets(), 0);
    w.has_room(B);
    let resets = w.heard(B);
    assert_eq!(resets, vec![Op::Reset; TOE_SOCKETS_MAX + 1], "one of its own");
    assert_eq!(w.asks(B, ask(1026)).code, Code::Done);
    let _ = w.says(B, Op::Request, (1026, 2), |_| {});
    assert!(asks_to_connect(&mut w, most + 1, "10.0.0.9:5"));
    assert_eq!(w.host.sockets(), 2);
}

#[test]
fn vtoe_06_the_sockets_of_a_guest_that_goes_end_in_steps_or_when_somebody_speaks_of_them() {
    let mut w = World::new();
    w.listens("0.0.0.0:80");
    let most = TOE_SOCKETS_MAX as u64;
    accepts(&mut w, 0..most);
    w.abroad.clear();
    let resets = |w: &mut World| {
        let is_reset = |m: &Message| matches!(m.kind, Kind::Reset(_));
        std::mem::take(&mut w.abroad).into_iter().filter(is_reset).count()
    };
    let last = w.host.socket(THERE, ShadowId { incarnation: 88, serial: most - 1 }, Side::Acceptor);
    assert!(w.host.room_to_guest(last.expect("it is open")) > 0);
    let config = w.host.remove_guest(NOW, B).expect("it was there");
    w.collect();
    assert_eq!((resets(&mut w), w.host.is_ending(B)), (TOE_SOCKETS_PER_STEP, true));
    // Nothing is given to one that has not heard of it, for somebody else may be there.
    let last = last.expect("it is open");
    assert_eq!((w.host.room_to_guest(last), w.host.takes(last, 100)), (0, 0));
    let data = Kind::Data { offset: 0, len: 100 };
    let met = says(&mut w, THERE, most - 1, data);
    assert_eq!((met.verdict, resets(&mut w)), (Verdict::Done, 1));
    let mut steps = 1;
    while w.host.is_ending(B) {
        w.host.go_on_ending(NOW);
        w.collect();
        assert!(resets(&mut w) <= TOE_SOCKETS_PER_STEP);
        steps += 1;
    }
    assert_eq!((steps, w.host.sockets()), (TOE_SOCKETS_MAX / TOE_SOCKETS_PER_STEP, 0));
    assert!(!w.host.ends() && w.host.add_guest(B, config, false).is_empty());
}

/// And B accepts.
fn called(w: &mut World, serial: u64) -> (u32, u32) {
    let ports = calls(w, serial);
    let _ = w.says(B, Op::Response, ports, |_| {});
    ports
}

/// All of these.
fn accepts(w: &mut World, serials: std::ops::Range<u64>) {
    for serial in serials {
        let _ = called(w, serial);
    }
}

/// A message of the other host about a connection of [`calls`].
fn says(w: &mut World, from: HostId, serial: u64, kind: Kind) -> Met {
    let id = ShadowId { incarnation: 88, serial };
    let met = w.host.handle_message(w.now, from, &Message { id, to: Side::Acceptor, kind });
    w.collect();
    met
}

/// B accepts a call and closes the connection at once: so a server that has sent an answer waits
/// for its client.
fn is_served(w: &mut World) {
    let call = w.packets[1].pop_back().expect("a call");
    assert_eq!(call.op, Some(Op::Request));
    let ports = (call.dst_port, call.src_port);
    let _ = w.says(B, Op::Response, ports, |_| {});
    let _ = w.says(B, Op::Shutdown, ports, both);
}

#[test]
fn vtoe_10_what_a_server_has_closed_counts_for_its_opener_and_is_ended_by_nobody() {
    let mut w = World::new();
    w.listens("0.0.0.0:80");
    let most = TOE_SOCKETS_MAX as u64;
    // A slow reader, whose server has closed.
    assert!(asks_to_connect(&mut w, 0, "10.0.0.8:5"));
    is_served(&mut w);
    // Somebody who never closes, and comes again and again.
    let mut greedy = 0;
    for serial in 1..most {
        if asks_to_connect(&mut w, serial, "10.0.0.9:5") {
            is_served(&mut w);
            greedy += 1;
        }
    }
    assert_eq!(greedy, TOE_SOCKETS_MAX / 2);
    let others = (most..2 * most).filter(|n| {
        let is_in = asks_to_connect(&mut w, *n, &format!("10.2.{}.{}:5", n / 256 - 16, n % 256));
        if is_in {
            is_served(&mut w);
        }
        is_in
    });
    assert_eq!(others.count(), TOE_SOCKETS_MAX / 2 - 1);
    assert_eq!(w.host.sockets(), TOE_SOCKETS_MAX);
    let ask = Ask::Connect {
        program: Program::NONE,
        guest: 1025,
        from: at("0.0.0.0:4"),
        to: at("10.0.0.1:80"),
    };
    assert_eq!(w.asks(B, ask).code, Code::Native, "its own have no place either");
    let resets = w.abroad.iter().filter(|message| matches!(message.kind, Kind::Reset(_)));
    assert_eq!(resets.count(), 0, "no connection was ended for another");
    // The slow reader has everything, and closes: its place is free again.
    let _ = says(&mut w, THERE, 0, Kind::Taken);
    let _ = says(&mut w, THERE, 0, Kind::Fin { total: 0 });
    assert_eq!(w.host.sockets(), TOE_SOCKETS_MAX - 1);
    assert_eq!(w.asks(B, ask).code, Code::Done);
    assert!(asks_to_connect(&mut w, 2 * most, "10.0.0.8:5"));
}

#[test]
fn vtoe_01_a_guest_that_has_all_its_sockets_open_uses_guest_tcp_for_more() {
    let mut w = World::new();
    w.listens("0.0.0.0:80");
    let ask = |guest| Ask::Connect {
        program: Program::NONE,
        guest,
        from: at("0.0.0.0:4"),
        to: at("10.0.0.1:80"),
    };
    let most = TOE_SOCKETS_MAX as u64;
    for serial in 1..most {
        let _ = called(&mut w, serial);
    }
    assert_eq!(w.asks(B, ask(1)).code, Code::Done);
    assert_eq!(w.asks(B, ask(2)).code, Code::Native, "one is as good as there");
    let _ = called(&mut w, most);
    let _ = w.says(B, Op::Request, (1, 2), |_| {});
    assert_eq!(w.heard(B), [Op::Reset], "another one was faster");
    let described = w.asks(B, Ask::Describe(Ports { guest: 1, host: 2 }));
    assert_eq!(described.code, Code::Native);
    let id = ShadowId { incarnation: 88, serial: most + 1 };
    let message = Message { id, to: Side::Acceptor, kind: Kind::Request { edge: 1000 } };
    let request = Request { network: 5, from: at("10.0.0.9:5"), to: at("10.0.0.2:80") };
    w.host.handle_request(w.now, THERE, &message, &request, request.from.ip());
    w.collect();
    let kind = Kind::Reset(Errno::NotByToe);
    assert_eq!(w.returned, [Message { id, to: Side::Opener, kind }]);
    assert_eq!((w.heard(B), w.host.sockets()), (vec![], TOE_SOCKETS_MAX));
}

#[test]
fn vtoe_07_listeners_are_found_as_those_of_tcp_are() {
    let mut w = World::new();
    let listen = |guest, text, v4| Ask::Listen { guest, at: at(text), v4 };
    let mut serial = 0;
    let mut reached = |w: &mut World, to: &str| {
        serial += 1;
        let id = ShadowId { incarnation: 88, serial };
        let message = Message { id, to: Side::Acceptor, kind: Kind::Request { edge: 9 } };
        let from = if at(to).is_ipv4() { "10.0.0.9:5" } else { "[fd00::9]:5" };
        let request = Request { network: 5, from: at(from), to: at(to) };
        w.host.handle_request(NOW, THERE, &message, &request, request.from.ip());
        w.collect();
        w.packets[1].pop_back().map(|call| call.dst_port)
    };
    assert_eq!(w.asks(B, listen(1, "[::]:80", false)).code, Code::Done);
    assert_eq!((reached(&mut w, "10.0.0.2:80"), reached(&mut w, "[fd00::2]:80")), (None, Some(1)));
    assert_eq!(w.asks(B, listen(2, "[::]:80", true)).code, Code::Done);
    assert_eq!(reached(&mut w, "10.0.0.2:80"), Some(2), "an IPv6 socket that hears both");
    assert_eq!(w.asks(B, listen(3, "0.0.0.0:80", false)).code, Code::Done);
    assert_eq!(reached(&mut w, "10.0.0.2:80"), Some(3));
    // SO_REUSEPORT: each in turn.
    assert_eq!(w.asks(B, listen(4, "0.0.0.0:80", false)).code, Code::Done);
    let turns: Vec<_> = (0..4).map(|_| reached(&mut w, "10.0.0.2:80").expect("one")).collect();
    assert_eq!(turns, [3, 4, 3, 4]);
    assert_eq!(w.asks(B, listen(5, "10.0.0.2:80", false)).code, Code::Done);
    assert_eq!(reached(&mut w, "10.0.0.2:80"), Some(5), "the nearest");
    for port in [5, 3, 4, 2] {
        assert_eq!(w.asks(B, Ask::Unlisten { guest: port }).code, Code::Done);
    }
    assert_eq!((reached(&mut w, "10.0.0.2:80"), reached(&mut w, "[fd00::2]:80")), (None, Some(1)));
}

#[test]
fn who_has_new_listeners_is_named_as_often_as_they_have_changed() {
    let mut w = World::new();
    let changes = |w: &mut World| w.host.take_listener_changes().into_iter().collect::<Vec<_>>();
    let ports = |w: &World, vm| w.host.listening_ports(vm).map(Vec::from_iter);
    assert_eq!(changes(&mut w), [(A, 1), (B, 1)], "they have come");
    assert_eq!((changes(&mut w), ports(&w, B)), (vec![], Some(vec![])));
    let listen = |guest, text| Ask::Listen { guest, at: at(text), v4: false };
    for (guest, text) in [(1, "0.0.0.0:80"), (2, "10.0.0.2:80"), (3, "[::]:22"), (3, "[::]:22")] {
        assert_eq!(w.asks(B, listen(guest, text)).code, Code::Done);
    }
    assert_eq!((changes(&mut w), ports(&w, B)), (vec![(B, 3)], Some(vec![22, 80])));
    // Two at one address are one, and so are two addresses with one port.
    assert_eq!(w.asks(B, listen(4, "0.0.0.0:80")).code, Code::Done);
    assert_eq!(w.asks(B, Ask::Unlisten { guest: 1 }).code, Code::Done);
    assert_eq!((changes(&mut w), ports(&w, B)), (vec![], Some(vec![22, 80])));
    assert_eq!(w.asks(B, Ask::Unlisten { guest: 2 }).code, Code::Done);
    assert_eq!((changes(&mut w), ports(&w, B)), (vec![(B, 1)], Some(vec![22, 80])));
    // The process ends, and with it all that it listened to.
    let _ = w.says(B, Op::Shutdown, (CONTROL, control::PORT), both);
    assert_eq!((changes(&mut w), ports(&w, B)), (vec![(B, 1)], Some(vec![])));
    let _ = w.host.remove_guest(NOW, B);
    assert_eq!((changes(&mut w), ports(&w, B)), (vec![(B, 1)], None));
}

#[test]
fn whoever_begins_to_listen_is_named_each_time() {
    let mut w = World::new();
    let listen = |guest, text| Ask::Listen { guest, at: at(text), v4: false };
    for (guest, text, code) in [
        (1, "0.0.0.0:80", Code::Done),
        (2, "0.0.0.0:80", Code::Done),
        (3, "10.0.0.1:80", Code::Failed(Errno::AddressNotAvailable)),
        (3, "[fd00::2]:80", Code::Done),
    ] {
        assert_eq!(w.asks(B, listen(guest, text)).code, code);
    }
    assert_eq!(w.asks(B, Ask::Unlisten { guest: 1 }).code, Code::Done);
    let listens = ["0.0.0.0:80", "0.0.0.0:80", "[fd00::2]:80"].map(|text| (B, at(text)));
    assert_eq!(w.listens, listens);
}

#[test]
fn who_asks_for_a_connection_is_known_until_it_is_answered() {
    let mut w = World::new();
    let ask = Ask::Connect {
        program: Program::NONE,
        guest: 1,
        from: at("0.0.0.0:4"),
        to: at("10.0.0.2:80"),
    };
    assert_eq!(w.asks(A, ask).code, Code::Done);
    let _ = w.says(A, Op::Request, (1, control::SOCKETS), |_| {});
    let (asked, request) = w.requests[0];
    assert_eq!(w.host.asking(HERE, asked.id), Some((A, request)));
    assert_eq!(w.host.asking(THERE, asked.id), None, "another host's connection");
    w.carry();
    assert_eq!(w.heard(A), [Op::Reset], "nobody listens");
    assert_eq!(w.host.asking(HERE, asked.id), None);
}

#[test]
fn vtoe_09_an_address_of_two_guests_is_of_the_first() {
    let mut w = World::new();
    w.listens("0.0.0.0:80");
    let ips = ["10.0.0.3", "10.0.0.2"].map(|ip| ip.parse().expect("an address")).to_vec();
    let config = GuestConfig { cid: 5, network: 5, ips };
    let other = GuestConfig { network: 6, ..config.clone() };
    assert_eq!(w.host.add_guest(C, config.clone(), false), [at("10.0.0.2:80").ip()]);
    let _ = w.says(C, Op::Request, (CONTROL, control::PORT), |_| {});
    let answer = |w: &mut World, ask| {
        w.answers[2].clear();
        let bytes = Asked { tag: 1, ask }.emit();
        let _ = w.sends(C, Op::Data, (CONTROL, control::PORT), &bytes, |_| {});
        u32::from_le_bytes(w.answers[2][0][48..52].try_into().expect("four"))
    };
    let to = at("10.0.0.1:80");
    let none = Errno::AddressNotAvailable.number();
    let connect = |from| Ask::Connect { program: Program::NONE, guest: 1, from: at(from), to };
    assert_eq!(answer(&mut w, connect("10.0.0.2:5")), none);
    assert_eq!(answer(&mut w, connect("10.0.0.3:5")), 0);
    assert_eq!(answer(&mut w, Ask::Listen { guest: 1, at: at("10.0.0.2:80"), v4: false }), none);
    let _ = calls(&mut w, 1);
    // In another network it is another address, and when the first has gone it is free.
    let _ = w.host.remove_guest(NOW, C);
    assert!(w.host.add_guest(C, other, false).is_empty());
    let _ = calls(&mut w, 2);
    let _ = w.host.remove_guest(NOW, C);
    let _ = w.host.remove_guest(NOW, B);
    assert!(w.host.add_guest(C, config, false).is_empty());
}

#[test]
fn vtoe_09_only_the_host_of_the_other_end_may_speak_of_a_connection() {
    let mut w = World::new();
    w.listens("0.0.0.0:80");
    // A host that knows the name and comes first gets a connection of its own.
    let early = w.connects(1025, "10.0.0.2:80");
    let name = w.requests[0].0.id;
    let request = w.requests[0].1;
    let message = Message { id: name, to: Side::Acceptor, kind: Kind::Request { edge: 1 } };
    w.host.handle_request(NOW, THERE, &message, &request, request.from.ip());
    w.collect();
    assert_eq!((w.heard(B), w.host.sockets()), (vec![Op::Request], 3));
    for kind in
        [Kind::Reset(Errno::Reset), Kind::Fin { total: 0 }, Kind::Data { offset: 0, len: 1 }]
    {
        let stranger = HostId(2);
        for to in [Side::Opener, Side::Acceptor] {
            let met = w.host.handle_message(NOW, stranger, &Message { id: name, to, kind });
            assert_eq!((met.socket, met.verdict), (None, Verdict::Done));
        }
    }
    w.collect();
    assert_eq!((w.heard(A), w.heard(B), w.host.sockets()), (vec![], vec![], 3));
    let Handled::Carry(_, data) = w.sends(A, Op::Data, (1025, 2), b"x", |_| {}) else {
        panic!("to be carried");
    };
    let met = w.host.handle_message(NOW, HERE, &data);
    assert_eq!(met.verdict, Verdict::Deliver);
    let header = w.host.give(NOW, met.socket.expect("B's"), 1).expect("there is room");
    assert_eq!((header.dst_port, header.src_port), early);
}

#[test]
fn vtoe_04_a_probe_of_who_did_not_hear_the_last_answer_gets_it_again() {
    let mut w = World::new();
    w.listens("0.0.0.0:80");
    let ports = called(&mut w, 1);
    let _ = says(&mut w, THERE, 1, Kind::Fin { total: 0 });
    let _ = w.says(B, Op::Shutdown, ports, both);
    let _ = says(&mut w, THERE, 1, Kind::Taken);
    assert_eq!(
        (w.host.sockets(), w.abroad.last().map(|m| m.kind)),
        (0, Some(Kind::Fin { total: 0 }))
    );
    let probe = |finished| Kind::Probe { sent: 0, finished, edge: 1000 };
    let answers = |w: &mut World| {
        w.returned.drain(..).map(|message| (message.to, message.kind)).collect::<Vec<_>>()
    };
    let _ = says(&mut w, THERE, 1, probe(true));
    assert_eq!(answers(&mut w), [(Side::Opener, Kind::Taken)]);
    let _ = says(&mut w, THERE, 1, probe(false));
    assert_eq!(answers(&mut w), [], "it asked before it had finished");
    let reset = [(Side::Opener, Kind::Reset(Errno::Reset))];
    let _ = says(&mut w, HostId(2), 1, probe(true));
    assert_eq!(answers(&mut w), reset, "another host's");
    w.now = NOW + T_TOE_SILENCE;
    let _ = says(&mut w, THERE, 1, probe(true));
    assert_eq!(answers(&mut w), reset);
}

#[test]
fn an_answer_costs_a_guest_one_packet() {
    let mut w = World::new();
    for n in 1..=100_u32 {
        let bytes = Asked { tag: 9, ask: Ask::Unlisten { guest: 1 } }.emit();
        let ports = (CONTROL, control::PORT);
        let _ = w.sends(A, Op::Data, ports, &bytes, |h| h.fwd_cnt = 64 * (n - 1));
        assert_eq!((w.answers[0].len(), w.heard(A)), (n as usize, vec![]));
    }
}

#[test]
fn lies_of_a_guest_are_counted_once_for_each_connection() {
    let mut w = World::new();
    w.listens("0.0.0.0:80");
    let b = w.connects(1025, "10.0.0.2:80");
    let _ = w.says(B, Op::CreditUpdate, b, |_| {});
    assert_eq!((w.host.lies(A), w.host.lies(B)), (0, 0));
    let _ = w.says(B, Op::Response, b, |_| {});
    assert_eq!((w.host.lies(A), w.host.lies(B)), (0, 1));
    let _ = w.says(B, Op::CreditUpdate, (CONTROL, control::PORT), |h| h.fwd_cnt = 65);
    assert_eq!((w.host.lies(A), w.host.lies(B)), (0, 2));
}

#[test]
fn vtoe_05_a_close_that_is_to_be_a_reset_is_one_unless_that_was_taken_back() {
    for (taken_back, heard) in [(false, Op::Reset), (true, Op::Shutdown)] {
        let mut w = World::new();
        w.listens("0.0.0.0:80");
        let _ = w.connects(1025, "10.0.0.2:80");
        let ports = Ports { guest: 1025, host: 2 };
        assert_eq!(w.asks(A, Ask::Linger(ports)).code, Code::Done);
        if taken_back {
            assert_eq!(w.asks(A, Ask::Unlinger(ports)).code, Code::Done);
        }
        let _ = w.says(A, Op::Shutdown, (1025, 2), both);
        w.carry();
        assert_eq!(w.heard(B), [heard]);
    }
}

#[test]
fn vtoe_05_who_reads_no_more_hears_an_end_and_is_given_what_comes_all_the_same() {
    let mut w = World::new();
    w.listens("0.0.0.0:80");
    let b = w.connects(1025, "10.0.0.2:80");
    let ports = Ports { guest: 1025, host: 2 };
    assert_eq!(w.asks(A, Ask::Deafen(ports)).code, Code::Done);
    w.carry();
    assert_eq!((w.heard(A), w.heard(B)), (vec![Op::Shutdown], vec![]), "the other is not told");
    let Handled::Carry(_, message) = w.sends(B, Op::Data, b, b"hello", |_| {}) else {
        panic!("to be carried");
    };
    let to = w.host.handle_message(NOW, HERE, &message).socket.expect("A's");
    assert!(w.host.give(NOW, to, 5).is_some());
    let _ = w.says(B, Op::Shutdown, b, both);
    w.carry();
    assert_eq!(w.heard(A), [Op::Shutdown], "the end of the stream");
    let standing = w.asks(A, Ask::Describe(ports));
    assert_eq!((standing.code, standing.state), (Code::Done, Some(State::Remaining)));
}

#[test]
fn what_others_cause_is_state_of_a_socket_and_not_a_queue() {
    let mut w = World::new();
    w.listens("0.0.0.0:80");
    let ask = Ask::Connect {
        program: Program::NONE,
        guest: 1025,
        from: at("0.0.0.0:40000"),
        to: at("10.0.0.2:80"),
    };
    assert_eq!(w.asks(A, ask).code, Code::Done);
    let _ = w.says(A, Op::Request, (1025, 2), |h| h.buf_alloc = 0);
    w.carry();
    let call = w.packets[1].pop_front().expect("a request");
    let b = (call.dst_port, call.src_port);
    let _ = w.says(B, Op::Response, b, |_| {});
    w.carry();
    w.full[1] = true;
    for buf_alloc in 1..=65_536 {
        let _ = w.says(A, Op::CreditUpdate, (1025, 2), |h| h.buf_alloc = buf_alloc);
        w.carry();
    }
    w.has_room(B);
    let told: Vec<_> = w.packets[1].drain(..).collect();
    assert_eq!(told.iter().map(|h| h.op).collect::<Vec<_>>(), [Some(Op::CreditUpdate)]);
    assert!(told[0].buf_alloc > 16_384, "as it is now: {}", told[0].buf_alloc);
    // An opener that gives up leaves nothing.
    w.full[1] = true;
    for port in 2000..2500 {
        let ask = Ask::Connect {
            program: Program::NONE,
            guest: port,
            from: at("0.0.0.0:40000"),
            to: at("10.0.0.2:80"),
        };
        assert_eq!(w.asks(A, ask).code, Code::Done);
        let _ = w.says(A, Op::Request, (port, 2), |_| {});
        w.carry();
        let _ = w.says(A, Op::Reset, (port, 2), |_| {});
        w.carry();
    }
    w.has_room(B);
    assert_eq!((w.heard(B), w.host.sockets()), (vec![], 2));
}

#[test]
fn vtoe_10_a_share_of_room_is_for_sockets_to_other_hosts_and_begins_with_them() {
    let mut w = World::new();
    w.listens("0.0.0.0:80");
    w.host.limit_first_arrivals(HERE, 5000);
    let b = calls(&mut w, 1);
    let _ = w.says(B, Op::Response, b, |h| h.buf_alloc = 262_144);
    let is_told = |w: &mut World| w.abroad.drain(..).map(|m| m.kind).collect::<Vec<_>>();
    assert_eq!(is_told(&mut w), [Kind::Established { edge: 5000 }]);
    let id = ShadowId { incarnation: 88, serial: 1 };
    let socket = w.host.socket(THERE, id, Side::Acceptor).expect("B's");
    let before = w.host.arrivals(socket).expect("it is there");
    let all = Arrivals { delivered: 0, told: 5000, promised: 5000, buffer: 262_144 };
    assert_eq!(before, all);
    w.host.limit_arrivals(NOW, socket, 50_000);
    w.collect();
    assert_eq!(is_told(&mut w), [Kind::Credit { edge: 50_000 }]);
    // Between guests of this host nothing is kept for long.
    w.connects(1025, "10.0.0.2:80");
    let (Message { kind, .. }, _) = w.requests.back().expect("A's");
    assert!(matches!(kind, Kind::Request { edge } if *edge > 5000), "{kind:?}");
}

#[test]
fn room_is_told_in_steps_and_not_in_crumbs() {
    for buf_alloc in [1000, 20_000, 262_144] {
        let mut w = World::new();
        w.listens("0.0.0.0:80");
        let b = calls(&mut w, 1);
        let _ = w.says(B, Op::Response, b, |h| h.buf_alloc = buf_alloc);
        let (mut edge, mut told) = (0, 0);
        for read in 1..=10_000_u32 {
            // All that it has room for is given, and its process reads a byte.
            let kind = Kind::Data { offset: u64::from(read) - 1, len: 1 };
            let met = says(&mut w, THERE, 1, kind);
            let _ = w.host.give(w.now, met.socket.expect("B's"), 1).expect("room");
            let _ = w.says(B, Op::CreditUpdate, b, |h| {
                (h.buf_alloc, h.fwd_cnt) = (buf_alloc, read);
            });
            for message in w.abroad.drain(..) {
                let (Kind::Established { edge: to } | Kind::Credit { edge: to }) = message.kind
                else {
                    panic!("{message:?}");
                };
                assert!(to > edge);
                (edge, told) = (to, told + 1);
            }
        }
        assert!(told <= 1 + 10_000 / (buf_alloc / 2).min(65_536), "{told} for {buf_alloc}");
        assert!(edge > 10_000, "it may go on");
    }
}

#[test]
fn a_reset_that_waits_for_a_ring_harms_neither_what_is_under_way_nor_the_next_socket() {
    for gives_up in [true, false] {
        let mut w = World::new();
        w.listens("0.0.0.0:80");
        let b = w.connects(1025, "10.0.0.2:80");
        let Handled::Carry(_, data) = w.sends(A, Op::Data, (1025, 2), b"last", |_| {}) else {
            panic!("to be carried");
        };
        let to = w.host.handle_message(NOW, HERE, &data).socket.expect("B's");
        w.full[0] = true;
        let _ = w.says(A, Op::Shutdown, (1025, 2), both);
        w.carry();
        if gives_up {
            // Linux waits for eight seconds.
            let _ = w.says(A, Op::Reset, (1025, 2), |_| {});
        }
        let wants = Ask::Connect {
            program: Program::NONE,
            guest: 1025,
            from: at("0.0.0.0:4"),
            to: at("10.0.0.2:80"),
        };
        let bytes = Asked { tag: 5, ask: wants }.emit();
        let ports = (CONTROL, control::PORT);
        let read = w.read[0];
        let _ = w.sends(A, Op::Data, ports, &bytes, |h| h.fwd_cnt = read);
        let _ = w.says(A, Op::Request, (1025, 2), |_| {});
        w.carry();
        let call = w.packets[1].pop_front().expect("a request");
        let _ = w.says(B, Op::Response, (call.dst_port, call.src_port), |_| {});
        w.carry();
        w.has_room(A);
        assert_eq!(w.heard(A), [Op::Response], "of the new one");
        let given = w.host.give(NOW, to, 4).expect("the old one is there");
        assert_eq!((given.dst_port, given.src_port), b);
        w.collect();
        w.carry();
        assert_eq!(w.heard(B), [Op::Shutdown], "and ends clean");
    }
}

#[test]
fn a_control_connection_whose_reset_waits_is_over_and_its_port_may_be_anothers() {
    let mut w = World::new();
    w.listens("0.0.0.0:80");
    w.full[1] = true;
    let ports = (CONTROL, control::PORT);
    let _ = w.says(B, Op::Shutdown, ports, both);
    let ask = Ask::Connect {
        program: Program::NONE,
        guest: 1025,
        from: at("0.0.0.0:4"),
        to: at("10.0.0.2:80"),
    };
    assert_eq!(w.asks(A, ask).code, Code::Done);
    let _ = w.says(A, Op::Request, (1025, 2), |_| {});
    w.carry();
    assert_eq!(w.heard(A), [Op::Reset], "nobody listens any more");
    let _ = w.says(B, Op::Request, ports, |_| {});
    w.has_room(B);
    assert_eq!(w.heard(B), [Op::Response], "of the new one");
}

/// A packet of somebody who means harm: most make sense, or the rest would reach nothing.
fn harm(random: &mut Random) -> (Header, Vec<u8>) {
    let (mut header, mut payload) = anything(random);
    let port = 1025 + u32::try_from(random.below(3)).expect("small");
    let (op, ports) = match random.below(8) {
        0 => (Op::Request, (1024, control::PORT)),
        1 => {
            let ask = Ask::Connect {
                program: Program::NONE,
                guest: port,
                from: at("0.0.0.0:5"),
                to: at("10.0.0.2:80"),
            };
            payload = Asked { tag: 1, ask }.emit().to_vec();
            (Op::Data, (1024, control::PORT))
        }
        2 => (Op::Request, (port, control::SOCKETS)),
        3 | 4 => (Op::Data, (port, control::SOCKETS)),
        _ => return (header, payload),
    };
    let len = if op == Op::Data { payload.len() } else { 0 };
    header = Header {
        src_cid: 5,
        dst_cid: HOST_CID,
        src_port: ports.0,
        dst_port: ports.1,
        len: u32::try_from(len).expect("small"),
        kind: STREAM,
        op: Some(op),
        fwd_cnt: 0,
        ..header
    };
    (header, payload)
}

/// A packet whose fields have nothing to do with each other.
fn anything(random: &mut Random) -> (Header, Vec<u8>) {
    let pick = |random: &mut Random, from: &[u32]| {
        let i = usize::try_from(random.below(from.len() as u64)).expect("small");
        from[i]
    };
    let len = pick(random, &[0, 0, 0, 1, 64, 64, 100, 1024, 1025]);
    let mut payload = vec![0; len as usize];
    payload.fill_with(|| u8::try_from(random.below(256)).expect("a byte"));
    if random.percent(70) && payload.len() >= LEN {
        let port = 1024 + u32::try_from(random.below(4)).expect("small");
        let ports = Ports { guest: port, host: pick(random, &[1, 2, 65_536, 65_537]) };
        let asks = [
            Ask::Connect {
                program: Program::NONE,
                guest: port,
                from: at("0.0.0.0:5"),
                to: at("10.0.0.2:80"),
            },
            Ask::Connect {
                program: Program::NONE,
                guest: port,
                from: at("10.0.0.3:5"),
                to: at("10.0.0.3:80"),
            },
            Ask::Connect {
                program: Program::NONE,
                guest: port,
                from: at("10.0.0.1:5"),
                to: at("10.0.0.2:80"),
            },
            Ask::Listen { guest: port, at: at("0.0.0.0:80"), v4: false },
            Ask::Unlisten { guest: port },
            Ask::Describe(ports),
            Ask::Linger(ports),
        ];
        let ask = asks[usize::try_from(random.below(7)).expect("small")];
        payload[..LEN].copy_from_slice(&Asked { tag: 1, ask }.emit());
    }
    let op = usize::try_from(random.below(9)).expect("small");
    let header = Header {
        src_cid: if random.percent(97) { 5 } else { random.below(6) },
        dst_cid: if random.percent(97) { HOST_CID } else { random.below(6) },
        src_port: 1024 + u32::try_from(random.below(4)).expect("small"),
        dst_port: pick(random, &[1, 1, 2, 2, 65_536, 65_537, 65_538, 0, u32::MAX]),
        len: if random.percent(95) { len } else { pick(random, &[0, 1, 65_536, u32::MAX]) },
        kind: if random.percent(97) { STREAM } else { 2 },
        op: Op::ALL.get(op).copied(),
        flags: pick(random, &[0, 0, 1, 2, 3, u32::MAX]),
        buf_alloc: pick(random, &[0, 64, 65_536, 65_536, u32::MAX]),
        fwd_cnt: pick(random, &[0, 0, 0, 64, 128, u32::MAX]),
    };
    (header, payload)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn whatever_one_guest_says_the_others_get_their_bytes(seed: u64) {
        let mut w = World::new();
        let ips = vec!["10.0.0.3".parse().expect("an address")];
        let _ = w.host.add_guest(C, GuestConfig { cid: 5, network: 5, ips }, false);
        w.listens("0.0.0.0:80");
        let b = w.connects(1025, "10.0.0.2:80");
        let mut random = Random::new(seed);
        let (mut given, mut carried) = (0_u32, 0);
        for _ in 0..2000 {
            let (header, payload) = harm(&mut random);
            let handled = w.sends(C, Op::Data, (0, 0), &payload, |h| *h = header);
            if let Handled::Carry(_, message) = handled {
                carried += 1;
                let Kind::Data { len, .. } = message.kind else { panic!("{message:?}") };
                let met = w.host.handle_message(w.now, HERE, &message);
                if let (Some(socket), Verdict::Deliver) = (met.socket, met.verdict) {
                    let room = w.host.room_to_guest(socket).min(len.into());
                    let _ = w.host.give(w.now, socket, u32::try_from(room).expect("small"));
                }
                w.collect();
            }
            w.carry();
            if random.percent(5) {
                let sent = w.sends(A, Op::Data, (1025, 2), b"honest", |_| {});
                let Handled::Carry(_, message) = sent else { panic!("to be carried") };
                let met = w.host.handle_message(w.now, HERE, &message);
                prop_assert_eq!(met.verdict, Verdict::Deliver);
                let header = w.host.give(w.now, met.socket.expect("B's"), 6).expect("room");
                prop_assert_eq!((header.dst_port, header.src_port), b);
                given += 6;
                let _ = w.says(B, Op::CreditUpdate, b, |h| h.fwd_cnt = given);
            }
            // B's kernel accepts whoever comes.
            for header in w.packets[1].drain(..).collect::<Vec<_>>() {
                if header.op == Some(Op::Request) {
                    let _ = w.says(B, Op::Response, (header.dst_port, header.src_port), |_| {});
                }
            }
            w.carry();
            prop_assert!(w.packets[0].drain(..).all(|h| h.op == Some(Op::CreditUpdate)));
        }
        let described = w.asks(B, Ask::Describe(Ports { guest: b.0, host: b.1 }));
        prop_assert_eq!(described.code, Code::Done);
        w.host.remove_guest(w.now, C);
        w.collect();
        w.carry();
        let _ = w.says(A, Op::Shutdown, (1025, 2), both);
        w.carry();
        let _ = w.says(B, Op::Shutdown, b, |h| {
            h.fwd_cnt = given;
            both(h);
        });
        w.carry();
        // One case in some 500 means no harm. Too many of those are an error.
        prop_assume!(carried > 0);
        // The socket that C had closed by itself waits for B.
        w.host.remove_guest(w.now, B);
        w.collect();
        w.carry();
        prop_assert_eq!(w.host.sockets(), 0);
    }
}
