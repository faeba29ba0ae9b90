//! The sender (`core::congestion`) under any sequence of actions of a guest, a remote and time,
//! including the acknowledgements of a remote that lies.
//!
//! After every step: no byte leaves beyond the data that was handed over or the remote's edge, no
//! hole is left, no more is under way than the window allows, and the window is no larger than the
//! acknowledged bytes can have made it, however the ACKs were cut. At the end the remote behaves,
//! and all bytes must reach it.

use arbitrary::{Arbitrary, Unstructured};
use nightporter_core::congestion::controller::initial_window;
use nightporter_core::congestion::sender::{NetAck, Waits};
use nightporter_core::congestion::{Algorithm, Controller, Segment, Sender, SenderConfig};
use nightporter_core::time::{Duration, Instant};

use crate::noise;

const FIRST: u64 = 1 << 33;
/// Most bytes that a guest hands over; numbers of an input are taken modulo this.
const STREAM: u64 = 1 << 20;
/// No segment is longer.
const ROOM_MAX: u64 = 65_535;
const OPS_MAX: usize = 400;
/// Segments that may leave beyond the window: two new ones after a timeout (RFC 5682) and a loss
/// probe (RFC 8985 section 7), and one that was begun within the window.
const BESIDES: u64 = 4;
/// Events that a remote that behaves needs at most.
const HEAL_EVENTS: usize = 40_000;

/// The beginning of an input.
#[derive(Arbitrary, Clone, Copy, Debug)]
struct Shape {
    reno: bool,
    sack: bool,
    ecn: bool,
    mss: u16,
    edge: u32,
}

#[derive(Arbitrary, Clone, Debug)]
enum Op {
    /// The guest hands over so much more.
    Offer(u16),
    /// The remote acknowledges this part of the bytes under way, in 256ths, with blocks.
    Ack { part: u8, blocks: Vec<(u8, u8)>, room: u32, ece: bool, bare: bool },
    /// It acknowledges anything at all.
    Lie(u32),
    /// So many microseconds go by.
    Wait(u32),
    /// As far as the next timer.
    Timer,
    /// So many segments may leave.
    Poll(u8, u16),
    /// Segments are of another size: an ICMP error.
    Mss(u16),
}

/// A sender and its environment.
struct World {
    sender: Sender,
    now: Instant,
    mss: u64,
    /// End of the bytes that were handed over, and of those that have left.
    end: u64,
    next: u64,
    una: u64,
    /// The highest edge that the remote has shown.
    edge: u64,
    /// No window can be larger: the first one, and every byte that was acknowledged (RFC 3465).
    cwnd_max: u64,
}

/// Judges one input.
pub fn run(data: &[u8]) {
    let mut u = Unstructured::new(data);
    let Ok(shape) = u.arbitrary::<Shape>() else { return };
    let mut world = World::new(shape);
    for _ in 0..OPS_MAX {
        let Ok(op) = u.arbitrary::<Op>() else { break };
        world.does(&op);
        if u.is_empty() {
            break;
        }
    }
    world.heals();
}

/// Operations without a pattern.
#[must_use]
pub fn seeds() -> Vec<Vec<u8>> {
    (1..9).map(|n| noise(n, 1500)).collect()
}

impl World {
    fn new(shape: Shape) -> Self {
        let now = Instant::from_secs(1000);
        let mss = u64::from(shape.mss % 9000).max(64);
        let initial_window = initial_window(mss, false);
        let edge = FIRST + u64::from(shape.edge) % STREAM;
        let config = SenderConfig {
            algorithm: if shape.reno { Algorithm::Reno } else { Algorithm::Cubic },
            mss,
            initial_window,
            sack: shape.sack,
            ecn: shape.ecn,
        };
        Self {
            sender: Sender::new(now, FIRST, edge, &config),
            now,
            mss,
            end: FIRST,
            next: FIRST,
            una: FIRST,
            edge,
            cwnd_max: initial_window,
        }
    }

    fn does(&mut self, op: &Op) {
        match op {
            Op::Offer(bytes) => self.offers(self.end + u64::from(*bytes)),
            Op::Ack { part, blocks, room, ece, bare } => {
                let flight = self.next - self.una;
                let at = |part: u8| self.una + flight * u64::from(part) / 255;
                let blocks: Vec<_> =
                    blocks.iter().take(4).map(|(from, to)| (at(*from), at(*to))).collect();
                let edge = self.una + u64::from(*room) % STREAM;
                let ack = at(*part);
                self.hears(&NetAck {
                    ack,
                    blocks: &blocks,
                    edge,
                    ece: *ece,
                    echo: None,
                    bare: *bare,
                });
            }
            Op::Lie(number) => {
                let ack = FIRST + u64::from(*number) % STREAM;
                let blocks = [(ack, ack + self.mss), (ack.saturating_sub(9), u64::MAX)];
                let edge = self.edge;
                self.hears(&NetAck {
                    ack,
                    blocks: &blocks,
                    edge,
                    ece: false,
                    echo: None,
                    bare: true,
                });
            }
            Op::Wait(us) => self.waits(Duration::from_micros(u64::from(*us))),
            Op::Timer => self.reaches_timer(),
            Op::Poll(count, room) => {
                for _ in 0..*count {
                    if !self.sends(u64::from(*room).max(1), u64::MAX) {
                        break;
                    }
                }
            }
            Op::Mss(mss) => {
                let mss = u64::from(*mss).max(64);
                if mss < self.mss {
                    self.mss = mss;
                    self.sender.set_mss(mss);
                    self.sender.on_too_long();
                }
            }
        }
        self.holds();
    }

    fn offers(&mut self, end: u64) {
        self.end = end.min(FIRST + STREAM);
        self.sender.on_offered(self.now, self.end);
    }

    fn hears(&mut self, a: &NetAck<'_>) {
        self.sender.on_ack(self.now, a);
        if (self.una..=self.next).contains(&a.ack) {
            self.cwnd_max += a.ack - self.una;
            self.una = a.ack;
            self.edge = self.edge.max(a.edge);
        }
    }

    fn waits(&mut self, time: Duration) {
        self.now = self.now + time;
        self.sender.on_timeout(self.now);
    }

    /// The earlier of the next timer and of the pace.
    fn reaches_timer(&mut self) {
        let mut at = self.sender.timeout();
        if self.sender.paced_until() > self.now {
            at = at.min(self.sender.paced_until());
        }
        if at < Instant::MAX {
            self.now = self.now.max(at);
        }
        self.sender.on_timeout(self.now);
    }

    /// One segment, if there is one.
    fn sends(&mut self, room: u64, cut: u64) -> bool {
        let under_way = self.sender.board().pipe();
        let Some(Segment { from, to, again, .. }) = self.sender.poll(self.now, room, cut) else {
            return false;
        };
        if from == to {
            assert!(from + 1 == self.una && self.una == self.next, "a window probe at {from}");
            return true;
        }
        assert!(to - from <= room && to <= self.end, "{from}..{to} of {}", self.end);
        if again {
            assert!(self.una <= from && to <= self.next, "a copy of {from}..{to}");
            return true;
        }
        assert_eq!(from, self.next, "a hole");
        assert!(to <= self.edge, "{to} is beyond {}", self.edge);
        self.next = to;
        let most = self.cwnd_max + BESIDES * self.mss;
        assert!(under_way <= most, "{under_way} under way, window at most {most}");
        true
    }

    /// The conditions after every step.
    fn holds(&self) {
        let s = &self.sender;
        assert_eq!((s.una(), s.next(), s.end()), (self.una, self.next, self.end));
        let cwnd = s.controller().cwnd();
        assert!(cwnd <= self.cwnd_max.max(self.mss), "{cwnd} is more than was acknowledged");
        assert!(cwnd >= self.mss.min(self.cwnd_max), "a window of {cwnd}");
        let waits = self.una < self.next || self.una < self.end && self.edge <= self.next;
        if waits && s.waits() == Waits::Nothing {
            assert!(self.una == self.next, "nobody waits for {} bytes", self.next - self.una);
        }
    }

    /// From here on the remote acknowledges all that leaves, and shows room.
    fn heals(&mut self) {
        for _ in 0..HEAL_EVENTS {
            if self.una == self.end {
                return;
            }
            while self.sends(ROOM_MAX, u64::MAX) {}
            self.reaches_timer();
            while self.sends(ROOM_MAX, u64::MAX) {}
            self.waits(Duration::from_millis(1));
            let edge = FIRST + STREAM;
            self.hears(&NetAck {
                ack: self.next,
                blocks: &[],
                edge,
                ece: false,
                echo: None,
                bare: false,
            });
            self.holds();
        }
        panic!("{} of {} bytes arrived", self.una - FIRST, self.end - FIRST);
    }
}
