//! A sender by itself: no frames, no receiver, no VM.

use super::*;
use crate::wire::seq::Seq;

/// Where R's stream begins; odd, and near a wrap of the low 32 bits.
const FIRST: u64 = (3 << 32) - 1001;
const MSS: u64 = 1000;

struct Bench {
    sender: Sender,
    stream: Stream,
    running: Instant,
    timers: Timers,
    losses: Losses,
}

impl Bench {
    /// `held` bytes are in the store, and G takes `window` bytes.
    fn new(held: u64, window: u64) -> Self {
        Self {
            sender: Sender::new(FIRST, FIRST + window),
            stream: Stream { end: FIRST + held, fin: false },
            running: Instant::from_secs(10),
            timers: Timers::new(Instant::from_secs(10)),
            losses: Losses::default(),
        }
    }

    fn with<T>(&mut self, f: impl FnOnce(&mut Sender, &mut Sending<'_>) -> T) -> T {
        let mut sending = Sending {
            stream: self.stream,
            mss: MSS,
            running: self.running,
            reset_waits: false,
            timers: &mut self.timers,
            losses: &mut self.losses,
        };
        f(&mut self.sender, &mut sending)
    }

    /// All that it gives now, in segments of one MSS at most: relative to [`FIRST`].
    fn gives(&mut self) -> Vec<(u64, u64)> {
        let mut given = Vec::new();
        loop {
            let next = self.with(|sender, s| {
                if sender.retransmission_due(s.mss, s.losses) {
                    sender.poll_retransmission(MSS, s)
                } else {
                    sender.poll_fresh(MSS, s)
                }
            });
            let Some(Segment { from, to, fin, .. }) = next else { return given };
            given.push((from - FIRST, to + u64::from(fin) - FIRST));
        }
    }

    /// G acknowledges bytes below `ack`, has those of `sack` besides, and takes 10,000 more.
    fn gets_ack(&mut self, ack: u64, sack: &[(u64, u64)]) {
        let seq = |n: u64| Seq::wrap(FIRST + n);
        let blocks: Vec<_> = sack.iter().map(|&(from, to)| (seq(from), seq(to))).collect();
        let ack = FIRST + ack;
        let said =
            GuestAck { ack, edge: ack + 10_000, pure: true, sack: Some(&SackBlocks::new(&blocks)) };
        self.with(|sender, s| sender.on_ack(&said, s));
    }
}

#[test]
fn snoop_27_it_gives_what_the_window_takes_and_the_fin_like_a_byte() {
    let mut bench = Bench::new(2500, 2500);
    bench.stream.fin = true;
    assert_eq!(bench.gives(), [(0, 1000), (1000, 2000), (2000, 2500)], "no room for the FIN");
    bench.gets_ack(2500, &[]);
    assert_eq!(bench.gives(), [(2500, 2501)]);
    bench.gets_ack(2501, &[]);
    assert_eq!((bench.sender.una() - FIRST, bench.gives()), (2501, vec![]));
}

#[test]
fn snoop_29_each_hole_is_repeated_once() {
    let mut bench = Bench::new(5000, 10_000);
    assert_eq!(bench.gives().len(), 5);
    bench.gets_ack(1000, &[(2000, 3000), (4000, 5000)]);
    assert_eq!(bench.gives(), [(1000, 2000), (3000, 4000)]);
    bench.gets_ack(1000, &[(2000, 3000), (4000, 5000)]);
    assert_eq!(bench.gives(), [], "both are under way");
    bench.gets_ack(3000, &[(4000, 5000)]);
    assert_eq!(bench.gives(), []);
    bench.gets_ack(5000, &[]);
    bench.stream.end += 2000;
    bench.running = bench.running + Duration::from_secs(10);
    assert_eq!(bench.gives().len(), 2);
    bench.gets_ack(7000, &[]);
    assert!(!bench.losses.any(), "nothing is remembered of it");
}

#[test]
fn snoop_29_after_a_timeout_a_segment_goes_first_then_twice_as_many_with_each_ack() {
    let mut bench = Bench::new(8000, 10_000);
    assert_eq!(bench.gives().len(), 8);
    bench.with(Sender::on_timeout);
    assert_eq!(bench.gives(), [(0, 1000)]);
    bench.gets_ack(1000, &[]);
    assert_eq!(bench.gives(), [(1000, 2000), (2000, 3000)]);
    bench.gets_ack(3000, &[]);
    assert_eq!(bench.gives().len(), 4, "half of eight");
    bench.gets_ack(7000, &[]);
    assert_eq!(bench.gives(), [(7000, 8000)]);
    bench.gets_ack(8000, &[]);
    assert!(bench.losses.path().is_some());
}
