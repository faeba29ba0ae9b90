//! A guest with a socket device that says anything, beside two that talk by theirs. (The table of
//! sockets alone, with another host besides: `fuzz-targets/src/sockets.rs`.)

use nightporter_core::toe::control::{self, Ask, Asked, Program};
use nightporter_core::toe::vsock::Ports;
use nightporter_core::wire::vsock::{HOST_CID, Header, Op, STREAM};

use crate::host::{Dir, Host};
use crate::sockets::{SocketGuest, connect, listen, until};
use crate::street::QUIET;

const SERVER: &str = "10.0.0.2:80";
const PACKETS: u32 = 20_000;

/// The same numbers each time.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    fn below(&mut self, n: u32) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        u32::try_from((self.0 >> 32) % u64::from(n)).unwrap()
    }

    fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(u32::try_from(all.len()).unwrap()) as usize]
    }
}

fn ask(random: &mut Random) -> Ask {
    let guest = 1024 + random.below(64);
    let at = random.of(&[SERVER, "10.0.0.1:80", "10.0.0.3:80", "0.0.0.0:80", "10.0.0.9:1"]);
    let at = at.parse().unwrap();
    let ports = Ports { guest, host: random.of(&[control::SOCKETS, 1 << 16, 0]) };
    match random.below(8) {
        0 | 1 => Ask::Connect {
            program: Program::NONE,
            guest,
            from: "0.0.0.0:5".parse().unwrap(),
            to: at,
        },
        2 => Ask::Listen { guest, at, v4: false },
        3 => Ask::Unlisten { guest },
        4 => Ask::Describe(ports),
        5 => Ask::Deafen(ports),
        6 => Ask::Unlinger(ports),
        _ => Ask::Linger(ports),
    }
}

/// A packet of which much makes sense.
pub(crate) fn packet(random: &mut Random) -> (Header, Vec<u8>) {
    let mut payload = vec![7; random.of(&[0, 0, 1, 64, 100, 4000, 65_536])];
    let dst_port = random.of(&[control::PORT, control::SOCKETS, control::SOCKETS, 1 << 16, 0]);
    if dst_port == control::PORT {
        payload = Asked { tag: 0, ask: ask(random) }.emit().repeat(random.of(&[0, 1, 1, 16]));
        // Seldom, for a connection that says what is no request is over.
        if random.below(30) == 0 && !payload.is_empty() {
            let at = random.below(u32::try_from(payload.len()).unwrap()) as usize;
            payload[at] = random.of(&[0, 1, 7, 0x80, 0xff]);
        }
    }
    let op = match random.below(8) {
        0..3 => Op::Request,
        3..6 => Op::Data,
        _ => random.of(&Op::ALL),
    };
    let len = u32::try_from(payload.len()).unwrap();
    let header = Header {
        src_cid: random.of(&[3, 3, 3, 3, 3, 3, 3, 4]),
        dst_cid: HOST_CID,
        src_port: 1024 + random.below(64),
        dst_port,
        len: if op == Op::Data { random.of(&[len, len, len, 0, u32::MAX]) } else { 0 },
        kind: random.of(&[STREAM, STREAM, STREAM, STREAM, 2]),
        op: (random.below(50) > 0).then_some(op),
        flags: random.below(4),
        buf_alloc: random.of(&[0, 1, 65_536, 262_144, u32::MAX]),
        fwd_cnt: random.of(&[0, 0, 0, 64, 128, u32::MAX]),
    };
    (header, payload)
}

#[test]
fn whatever_a_guest_says_on_its_socket_device_others_get_their_bytes() {
    let dir = Dir::new();
    let vm = |(name, ip)| dir.vm(name, &format!("ips = [\"10.0.0.{ip}\"]\ntoe = true"));
    let vms: String = [("a", 1), ("b", 2), ("bad", 3)].into_iter().map(vm).collect();
    let host = Host::start(&dir, &dir.configure(QUIET, &vms));
    let boot = |name| SocketGuest::boot(&dir.join(&format!("{name}-toe.sock")));
    let (mut a, mut b, mut bad) = (boot("a"), boot("b"), boot("bad"));
    listen(&mut b, SERVER);
    let (at_a, at_b) = connect(&mut a, &mut b, SERVER);
    let (mut random, mut sent) = (Random(7), 0);
    for n in 0..PACKETS {
        let (header, payload) = packet(&mut random);
        let mut tries = 0;
        while !bad.send(&header, &payload) {
            until(&mut [&mut a, &mut b], "the next", |_| true);
            tries += 1;
            // It is not read as long as it takes no answers to what it says.
            if tries > 1000 {
                bad.throws_away();
            }
        }
        // It takes nothing for long.
        if n % 5000 > 2500 {
            bad.throws_away();
        }
        if n % 500 == 0 {
            a.write(at_a, b"hello");
            sent += 5;
            until(&mut [&mut a, &mut b], "bytes", |g| g[1].socket(at_b).got.len() == sent);
        }
    }
    let toe = host.port("bad").vm.expect("a VM").toe.expect("it has the device");
    assert!(toe.running && toe.packets_from_guest > u64::from(PACKETS) / 2, "{toe:?}");
    assert!(!a.socket(at_a).is_reset && !b.socket(at_b).is_reset);
    drop(bad);
    a.write(at_a, b"bye");
    until(&mut [&mut a, &mut b], "bytes", |g| g[1].socket(at_b).got.ends_with(b"bye"));
}
