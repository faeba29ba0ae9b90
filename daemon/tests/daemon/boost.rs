//! Orders to a booster, which is played here: who wants the core, and until when (BST-01).

use std::os::fd::OwnedFd;

use nightporter_api::BoostAccount;
use nightporter_boost::protocol::{Budget, Claim, Order, PACKET_BYTES_MAX, Report, VERSION};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recv,
    send, socket_with,
};

use crate::flows::World;
use crate::host::{Dir, LIMIT};
use crate::segment::{End, SYN, Segment};

const BUDGET: Budget = Budget { cpu_us: 15_000, window_us: 90_000 };

/// Receive buffers of the guest.
const BUFFERS: u64 = 64;

pub(crate) struct Booster {
    socket: OwnedFd,
    /// The number of the VM that has boost.
    pub(crate) vm: u16,
}

impl Booster {
    /// Connects, and is told the worker's thread.
    pub(crate) fn begin(dir: &Dir) -> (Self, i32) {
        let flags = SocketFlags::CLOEXEC;
        let kind = SocketType::SEQPACKET;
        let socket = socket_with(AddressFamily::UNIX, kind, flags, None).unwrap();
        set_socket_timeout(&socket, Timeout::Recv, Some(LIMIT)).unwrap();
        connect(&socket, &SocketAddrUnix::new(dir.join("boost.sock")).unwrap()).unwrap();
        let it = Self { socket, vm: 0 };
        let Order::Hello { version, worker, rt_priority } = it.hears() else { panic!("no hello") };
        assert_eq!((version, rt_priority), (VERSION, 0));
        assert!(worker > 0);
        (it, worker)
    }

    /// Connects, and is told of both VMs.
    fn connect(dir: &Dir) -> Self {
        let (mut it, _) = Self::begin(dir);
        let own = std::process::id().cast_signed();
        let mut names = Vec::new();
        for _ in 0..2 {
            let order = it.hears();
            let Order::Vm { vm, name, pid, tap, boost, vcpu_cgroup } = order else {
                panic!("{order:?}")
            };
            assert_eq!((pid, vcpu_cgroup), (own, None), "the front-ends are this process");
            assert_eq!(tap, None);
            assert_eq!(boost, (name == "guest").then_some(BUDGET));
            if name == "guest" {
                it.vm = vm;
            }
            names.push(name);
        }
        assert_eq!(names, ["remote", "guest"]);
        it
    }

    /// The next order.
    pub(crate) fn hears(&self) -> Order {
        let mut buf = [0; PACKET_BYTES_MAX];
        let (len, _) = recv(&self.socket, &mut buf[..], RecvFlags::empty()).unwrap();
        assert!(len > 0, "the daemon hung up");
        serde_json::from_slice(&buf[..len]).unwrap()
    }

    fn says(&self, report: &Report) {
        let packet = serde_json::to_vec(report).unwrap();
        send(&self.socket, &packet, SendFlags::empty()).unwrap();
    }

    /// The next order is to boost the guest for `claim`, for at most so long; how often it has
    /// taken some of what it is owed.
    pub(crate) fn hears_boost(&self, claim: Claim, most_us: u64) -> u32 {
        match self.hears() {
            Order::Boost { vm, claim: is, for_us, taken } => {
                assert_eq!((vm, is), (self.vm, claim));
                assert!((1..=most_us).contains(&for_us), "{for_us} us");
                taken
            }
            other => panic!("{other:?}"),
        }
    }

    /// The turn ends. On a busy machine that may be all that is told of what the guest took.
    fn hears_end(&self, before: u32) {
        match self.hears() {
            Order::Boost { vm, claim: Claim::Turn, taken, .. } => {
                assert_eq!((vm, taken), (self.vm, before + 1), "it took it");
                assert_eq!(self.hears(), Order::End { vm });
            }
            other => assert_eq!(other, Order::End { vm: self.vm }),
        }
    }

    /// Nothing was ordered until now: the daemon answers one after the other.
    pub(crate) fn has_heard_all(&self) {
        self.says(&Report::Ping {});
        assert_eq!(self.hears(), Order::Pong {});
    }
}

/// A connection of a guest that has boost and has seen everything.
fn world() -> (World, Booster) {
    let mut world = World::connected_with("", "boost = \"15ms/90ms\"");
    let booster = Booster::connect(&world.dir);
    world.guest_sends(1, 1, b"hello");
    assert_eq!(world.at_remote().payload, b"hello");
    world.guest.catches_up(BUFFERS);
    booster.has_heard_all(); // of what the guest sends itself nothing is awaited
    (world, booster)
}

#[test]
fn bst_01_orders_begin_with_what_the_guest_is_owed_and_end_with_what_it_acknowledged() {
    let (mut world, booster) = world();
    world.remote_sends(1, 6, &[7; 1000]);
    let before = booster.hears_boost(Claim::Bytes, 50_000);
    assert_eq!(world.at_remote().ack, 0xffff_ff00_u32.wrapping_add(1001), "by the host");
    assert_eq!(world.at_guest().payload, [7; 1000]);
    world.guest.catches_up(BUFFERS);
    booster.has_heard_all(); // it has seen them, and owes its acknowledgement
    world.guest_sends(6, 1001, b"");
    assert_eq!(booster.hears_boost(Claim::Reading, 2_000), before + 1, "it took them");
}

#[test]
fn bst_01_an_ack_is_a_turn_until_the_guest_has_seen_it() {
    let (mut world, booster) = world();
    world.remote_sends(1, 6, b"");
    let before = booster.hears_boost(Claim::Turn, 50_000);
    booster.has_heard_all();
    world.guest.catches_up(BUFFERS);
    booster.hears_end(before);
    booster.has_heard_all();
}

#[test]
fn bst_01_a_syn_to_a_port_that_accepts_is_a_turn() {
    let (mut world, booster) = world();
    for port in 40_002..40_005 {
        let syn = Segment { flags: SYN, seq: 7, window: 64_000, ..Segment::default() };
        world.remote.send_plain(&syn.frame(End(1, port), End(2, 80)));
        let before = booster.hears_boost(Claim::Turn, 50_000);
        assert_eq!(world.at_guest().flags, SYN);
        world.guest.catches_up(BUFFERS);
        booster.hears_end(before);
    }
    // Nobody has accepted at this one.
    let syn = Segment { flags: SYN, seq: 7, window: 64_000, ..Segment::default() };
    world.remote.send_plain(&syn.frame(End(1, 40_002), End(2, 81)));
    assert_eq!(world.at_guest().flags, SYN);
    booster.has_heard_all();
}

#[test]
fn bst_01_broadcasts_begin_nothing() {
    let (mut world, booster) = world();
    let mut frame = [[0xff; 6], [2, 0, 0, 0, 0, 1]].concat();
    frame.extend([0x88, 0xb5]); // "local experimental" (IEEE 802)
    frame.resize(60, 0);
    world.remote.send_plain(&frame);
    assert_eq!(world.guest.receive(1), [frame]);
    booster.has_heard_all();
}

#[test]
fn a_booster_is_answered_and_its_accounts_are_shown_until_it_is_gone() {
    let (world, booster) = world();
    let of_guest = || world.host.port("guest").vm.and_then(|vm| vm.boost).expect("boost");
    assert_eq!(of_guest(), BoostAccount::default());
    let account = BoostAccount {
        means: "nice".into(),
        boosts: 3,
        favoured_us: 4_000,
        unpaid_us: 500,
        competitors_percent: 300,
        ..BoostAccount::default()
    };
    booster.says(&Report::Account { vm: booster.vm, account: account.clone() });
    booster.has_heard_all();
    assert_eq!(of_guest(), account);
    assert_eq!(world.host.port("remote").vm.and_then(|vm| vm.boost), None);
    drop(booster);
    world.host.until("guest", |port| {
        let boost = port.vm.as_ref().and_then(|vm| vm.boost.as_ref()).expect("boost");
        boost.refused == "nightporter-boost is not connected"
    });
    // One that comes back is told everything anew.
    Booster::connect(&world.dir).has_heard_all();
}
