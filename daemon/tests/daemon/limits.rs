//! Rate limits of a VM, seen from outside: bytes counted against the time that went by.

use std::time::{Duration, Instant};

use nightporter_api::{Direction, PortStatus, Reply, Request};
use nightporter_core::wire::virtio_net::VirtioNetHdr;

use crate::guest::{EVENTS, Guest};
use crate::host::{Dir, Host};
use crate::segment::End;

const A: End = End(1, 0);
const B: End = End(2, 0);
const FRAME_LEN: usize = 1000;
/// 8 Mbit/s.
const BYTES_PER_MS: u128 = 1000;
/// Passing bytes may be so far ahead, and a burst is two packets (FLOOD-16).
const AHEAD: u128 = 50 * BYTES_PER_MS + 3000;
/// 2.5 s of that rate.
const FRAMES: usize = 40 * 64;

fn frame(from: End, to: End) -> (VirtioNetHdr, Vec<u8>) {
    let mut frame = [to.mac(), from.mac()].concat();
    frame.extend([0x88, 0xb5]); // "local experimental" (IEEE 802)
    frame.resize(FRAME_LEN, 0);
    (VirtioNetHdr::default(), frame)
}

/// Two VMs that are plain switch ports and know each other.
struct World {
    _dir: Dir,
    host: Host,
    a: Guest,
    b: Guest,
    sent: usize,
}

impl World {
    /// With more in the sections of A and B.
    fn new(of_a: &str, of_b: &str) -> Self {
        let dir = Dir::new();
        let plain = |more| format!("ack_offload = false\n{more}");
        let ports = dir.vm("a", &plain(of_a)) + &dir.vm("b", &plain(of_b));
        let host = Host::start(&dir, &dir.configure("metrics = \"off\"", &ports));
        let boot = |name| Guest::boot(&dir.join(name), EVENTS);
        let (mut a, mut b) = (boot("a"), boot("b"));
        a.offer(1);
        b.send(&[frame(B, A)]);
        a.receive(1);
        b.offer(128);
        Self { _dir: dir, host, a, b, sent: 0 }
    }

    /// A sends; how many bytes B gets, and the time that it took.
    fn carries(&mut self, frames: usize) -> (u128, Duration) {
        let (start, dropped) = (Instant::now(), self.dropped());
        let mut got = 0;
        for _ in 0..frames / 64 {
            self.a.send(&vec![frame(A, B); 64]);
            let some = self.b.received().len();
            self.b.offer(some as u64);
            got += some;
        }
        self.sent += frames;
        let sent = self.sent as u64;
        self.host.until("a", |a| a.frames_from_port == sent);
        let elapsed = start.elapsed();
        let passed = frames - (self.dropped() - dropped);
        while got < passed {
            let some = self.b.receive(1).len();
            self.b.offer(some as u64);
            got += some;
        }
        assert_eq!(got, passed);
        ((got * FRAME_LEN) as u128, elapsed)
    }

    /// Frames beyond a limit, of either VM.
    fn dropped(&self) -> usize {
        let of = |port: &PortStatus| port.drops.get("rate_limit").copied().unwrap_or(0);
        usize::try_from(self.host.status().ports.iter().map(of).sum::<u64>()).unwrap()
    }

    fn drops_of(&self, name: &str) -> bool {
        self.host.port(name).drops.contains_key("rate_limit")
    }

    fn limits(&self, direction: Direction, mbit_s: Option<u32>) {
        let request = Request::RateLimit { vm: "b".into(), direction, mbit_s };
        assert_eq!(self.host.ask(&request), Reply::Done {});
    }
}

fn expect_limited((bytes, elapsed): (u128, Duration)) {
    let most = BYTES_PER_MS * (elapsed.as_millis() + 1) + AHEAD;
    let range = AHEAD - 4 * FRAME_LEN as u128..=most;
    assert!(range.contains(&bytes), "{bytes} bytes in {elapsed:?}, at most {most}");
    assert!(bytes < (FRAMES * FRAME_LEN) as u128, "the test sends faster than 8 Mbit/s");
}

#[test]
fn flood_16_a_vm_sends_no_more_than_its_limit() {
    let mut w = World::new("rate_limit_from_guest_mbit_s = 8", "");
    assert_eq!(w.host.port("a").vm.unwrap().rate_limit_from_guest_mbit_s, Some(8));
    expect_limited(w.carries(FRAMES));
    assert!(w.drops_of("a") && !w.drops_of("b"), "they are counted at the port with the limit");
}

#[test]
fn flood_16_a_vm_is_sent_no_more_than_its_limit() {
    let mut w = World::new("", "rate_limit_to_guest_mbit_s = 8");
    expect_limited(w.carries(FRAMES));
    assert!(w.drops_of("b") && !w.drops_of("a"), "they are counted at the port with the limit");
}

#[test]
fn flood_16_a_limit_is_changed_while_the_vm_runs() {
    let mut w = World::new("", "");
    let all = (FRAMES * FRAME_LEN) as u128;
    assert_eq!(w.carries(FRAMES).0, all);
    w.limits(Direction::ToGuest, Some(8));
    let status = w.host.port("b").vm.unwrap();
    let limits = (status.rate_limit_from_guest_mbit_s, status.rate_limit_to_guest_mbit_s);
    assert_eq!(limits, (None, Some(8)));
    expect_limited(w.carries(FRAMES));
    w.limits(Direction::ToGuest, None);
    assert_eq!(w.carries(FRAMES).0, all);
    w.limits(Direction::FromGuest, Some(8));
    assert_eq!(w.carries(FRAMES).0, all, "B sends nothing");
}

#[test]
fn a_rate_that_is_none_is_refused() {
    let w = World::new("", "");
    for mbit_s in [0, 100_001] {
        let request = Request::RateLimit {
            vm: "b".into(),
            direction: Direction::ToGuest,
            mbit_s: Some(mbit_s),
        };
        let Reply::Error { fix, .. } = w.host.ask(&request) else { panic!("an error") };
        assert_eq!(fix, "give 1 to 100000 Mbit/s, or none");
    }
}
