use super::*;
use proptest::collection::vec;
use proptest::prelude::*;

const FIRST: u64 = (1 << 32) | 0xffff_f000;

fn at(ms: u64) -> Instant {
    Instant::from_secs(9) + crate::time::Duration::from_millis(ms)
}

/// Runs a trace and returns the board after it, in numbers relative to the first byte.
///
/// ```text
/// sent 4000 at 0        new data up to byte 4000 leaves
/// again 0:1000 at 7     a part of it leaves once more
/// ack 1000 2000:3000    R has all below 1000, and a block
/// lost before 5         what last left before 5 ms is lost
/// ```
fn board(trace: &str) -> Scoreboard {
    let mut board = Scoreboard::new(FIRST, 1000);
    for line in trace.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let words: Vec<&str> = line.split_whitespace().collect();
        let number = |word: &str| word.parse::<u64>().expect(line);
        let range = |word: &str| {
            let (from, to) = word.split_once(':').expect(line);
            (FIRST + number(from), FIRST + number(to))
        };
        match words[..] {
            ["sent", to, "at", ms] => board.on_sent(FIRST + number(to), at(number(ms))),
            ["again", what, "at", ms] => {
                let (from, to) = range(what);
                board.on_sent_again(from, to, at(number(ms)));
            }
            ["ack", ack, ref blocks @ ..] => {
                let blocks: Vec<_> = blocks.iter().map(|word| range(word)).collect();
                board.on_ack(FIRST + number(ack), &blocks, |_| ());
            }
            ["lost", "before", ms] => {
                board.mark_lost(|p| p.sent_at < at(number(ms)));
            }
            _ => panic!("not understood: {line}"),
        }
    }
    board
}

/// The board as text: `1000:2000 lost, 2000:3000 sacked`.
fn shown(board: &Scoreboard) -> String {
    let name = |p: &Piece| match (p.state, p.again) {
        (State::Flying, false) => "flying",
        (State::Flying, true) => "again",
        (State::Sacked, _) => "sacked",
        (State::Lost, _) => "lost",
    };
    let pieces: Vec<_> = board
        .pieces()
        .map(|p| format!("{}:{} {}", p.from - FIRST, p.to - FIRST, name(&p)))
        .collect();
    pieces.join(", ")
}

#[test]
fn a_burst_is_one_run_and_sack_blocks_cut_it() {
    let b = board("sent 4000 at 0\n sent 6000 at 0\n ack 0 1000:2000 3000:4000");
    assert_eq!(
        shown(&b),
        "0:1000 flying, 1000:2000 sacked, 2000:3000 flying, 3000:4000 sacked, 4000:6000 flying"
    );
    assert_eq!((b.flight(), b.sacked(), b.lost(), b.pipe()), (6000, 2000, 0, 4000));
}

#[test]
fn blocks_that_grow_together_are_one_run_again() {
    let b = board(
        "sent 3000 at 0
         sent 5000 at 1
         ack 0 1000:2000
         ack 0 4000:5000 1000:2000
         ack 0 2000:4000",
    );
    assert_eq!(shown(&b), "0:1000 flying, 1000:5000 sacked");
}

#[test]
fn what_is_lost_leaves_the_pipe_and_comes_back_when_it_is_sent_again() {
    let lost = "sent 3000 at 0\n sent 5000 at 10\n ack 1000 3000:4000\n lost before 5";
    let b = board(lost);
    assert_eq!(shown(&b), "1000:3000 lost, 3000:4000 sacked, 4000:5000 flying");
    assert_eq!((b.lost(), b.pipe()), (2000, 1000));
    assert_eq!(b.first_lost(), Some((FIRST + 1000, FIRST + 3000)));
    let b = board(&format!("{lost}\n again 1000:2000 at 20"));
    assert_eq!(shown(&b), "1000:2000 again, 2000:3000 lost, 3000:4000 sacked, 4000:5000 flying");
    assert_eq!((b.lost(), b.pipe()), (1000, 2000));
}

#[test]
fn an_ack_in_the_middle_of_a_run_leaves_the_rest_of_it() {
    let b = board("sent 3000 at 0\n ack 1500");
    assert_eq!((shown(&b).as_str(), b.una() - FIRST), ("1500:3000 flying", 1500));
}

#[test]
fn blocks_that_cannot_be_true_change_nothing() {
    let plain = "sent 3000 at 0\n ack 1000";
    for block in ["0:500", "500:1500", "2000:4000", "2000:2000", "2500:2000"] {
        let b = board(&format!("{plain}\n ack 1000 {block}"));
        assert_eq!(shown(&b), "1000:3000 flying", "{block}");
    }
}

#[test]
fn a_copy_of_what_arrived_meanwhile_is_not_under_way() {
    let b = board("sent 3000 at 0\n ack 0 1000:2000\n again 0:3000 at 9");
    assert_eq!(shown(&b), "0:1000 again, 1000:2000 sacked, 2000:3000 again");
}

#[test]
fn what_a_receiver_takes_back_is_sent_again() {
    let mut b = board("sent 3000 at 0\n ack 0 0:1000 2000:3000");
    b.forget_sacks();
    assert_eq!(shown(&b), "0:1000 lost, 1000:2000 flying, 2000:3000 lost");
    assert_eq!((b.sacked(), b.lost()), (0, 2000));
    let mut b = board("sent 3000 at 0\n sent 5000 at 9\n ack 0 4000:5000\n lost before 5");
    assert_eq!(shown(&b), "0:3000 lost, 3000:4000 flying, 4000:5000 sacked");
    b.unmark_lost();
    assert_eq!(
        (shown(&b).as_str(), b.lost()),
        ("0:3000 flying, 3000:4000 flying, 4000:5000 sacked", 0)
    );
}

#[test]
fn without_sacked_bytes_and_copies_nothing_can_be_missing() {
    let gaps = |trace: &str| {
        let b = board(trace);
        b.may_have_gaps(b.una())
    };
    assert!(!gaps("sent 3000 at 0\n sent 6000 at 5\n ack 2000"));
    assert!(gaps("sent 3000 at 0\n ack 0 1000:2000"));
    assert!(gaps("sent 3000 at 0\n again 0:1000 at 9"));
    let b = board("sent 3000 at 0\n again 0:1000 at 9\n ack 1000");
    assert!(b.may_have_gaps(FIRST), "the copy was sent after what is under way");
    assert!(!b.may_have_gaps(FIRST + 1000));
}

#[test]
fn news_are_told_once_each() {
    let mut b = board("sent 4000 at 0\n ack 0 1000:2000");
    let mut told = vec![];
    let blocks = [(FIRST + 1000, FIRST + 3000)];
    let delivered = b.on_ack(FIRST + 500, &blocks, |p| told.push((p.from - FIRST, p.to - FIRST)));
    assert_eq!(told, [(0, 500), (2000, 3000)]);
    assert_eq!(delivered, Delivered { acked: 500, bytes: 1500 });
}

#[test]
fn a_hostile_receiver_cannot_cut_it_to_pieces() {
    let mut b = Scoreboard::new(FIRST, 1000);
    b.on_sent(FIRST + 100_000, at(0));
    for i in 1..49_000 {
        let block = (FIRST + 2 * i, FIRST + 2 * i + 1);
        b.on_ack(FIRST, &[block], |_| ());
    }
    assert!(b.runs() <= 202, "{} runs", b.runs());
}

/// One step of the comparison with a model that keeps a state for every byte.
#[derive(Clone, Debug)]
enum Operation {
    Sent(u64),
    Again(u64, u64),
    Ack(u64, Vec<(u64, u64)>),
    LostBefore(u64),
    FirstLost,
    Renege,
}

fn steps() -> impl Strategy<Value = Vec<Operation>> {
    let number = || 0_u64..60;
    let block = (number(), 1_u64..12).prop_map(|(from, len)| (from, from + len));
    let step = prop_oneof![
        4 => (1_u64..10).prop_map(Operation::Sent),
        2 => (number(), 1_u64..8).prop_map(|(from, len)| Operation::Again(from, from + len)),
        4 => (0_u64..6, vec(block, 0..4)).prop_map(|(more, blocks)| Operation::Ack(more, blocks)),
        2 => (0_u64..4).prop_map(Operation::LostBefore),
        1 => Just(Operation::FirstLost),
        1 => Just(Operation::Renege),
    ];
    vec(step, 1..60)
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Byte {
    state: State,
    again: bool,
    sent_at: Instant,
}

/// The expected board, byte by byte; the first is `una`.
#[derive(Default)]
struct Model {
    una: u64,
    bytes: VecDeque<Byte>,
}

impl Model {
    fn of(&mut self, from: u64, to: u64) -> impl Iterator<Item = &mut Byte> {
        let una = self.una;
        let within = move |(i, _): &(usize, &mut Byte)| (from..to).contains(&(una + *i as u64));
        self.bytes.iter_mut().enumerate().filter(within).map(|(_, byte)| byte)
    }

    fn next(&self) -> u64 {
        self.una + self.bytes.len() as u64
    }

    fn count(&self, state: State) -> u64 {
        self.bytes.iter().filter(|byte| byte.state == state).count() as u64
    }

    fn ack(&mut self, ack: u64, blocks: &[(u64, u64)]) -> u64 {
        let mut news = 0;
        while self.una < ack {
            news += u64::from(self.bytes.pop_front().expect("sent").state != State::Sacked);
            self.una += 1;
        }
        let (una, next) = (self.una, self.next());
        for &(from, to) in blocks.iter().filter(|(from, to)| *from >= una && *to <= next) {
            for byte in self.of(from, to).filter(|byte| byte.state != State::Sacked) {
                byte.state = State::Sacked;
                news += 1;
            }
        }
        news
    }
}

proptest! {
    #[test]
    fn its_counts_are_those_of_a_model_that_looks_at_every_byte(steps in steps()) {
        // A segment is a byte, so that no cut is refused.
        let mut board = Scoreboard::new(FIRST, 1);
        let mut model = Model { una: FIRST, ..Model::default() };
        for (i, step) in steps.into_iter().enumerate() {
            let now = at(10 * i as u64);
            match step {
                Operation::Sent(bytes) => {
                    board.on_sent(board.next() + bytes, now);
                    let byte = Byte { state: State::Flying, again: false, sent_at: now };
                    model.bytes.extend((0..bytes).map(|_| byte));
                }
                Operation::Again(from, to) => {
                    let from = (board.una() + from).min(board.next());
                    let to = (board.una() + to).min(board.next());
                    board.on_sent_again(from, to, now);
                    for byte in model.of(from, to).filter(|byte| byte.state != State::Sacked) {
                        *byte = Byte { state: State::Flying, again: true, sent_at: now };
                    }
                }
                Operation::Ack(more, blocks) => {
                    let ack = (board.una() + more).min(board.next());
                    let blocks: Vec<_> =
                        blocks.iter().map(|(from, to)| (ack + from, ack + to)).collect();
                    let mut told = 0;
                    let news = board.on_ack(ack, &blocks, |p| told += p.to - p.from);
                    let expected = model.ack(ack, &blocks);
                    prop_assert_eq!((news.bytes, told), (expected, expected));
                }
                Operation::LostBefore(steps) => {
                    let before = at(10 * (i as u64).saturating_sub(steps));
                    board.mark_lost(|p| p.sent_at < before);
                    let bytes = model.bytes.iter_mut().filter(|byte| byte.state == State::Flying);
                    bytes.filter(|b| b.sent_at < before).for_each(|b| b.state = State::Lost);
                }
                Operation::FirstLost => {
                    board.mark_first_lost();
                    let first = model.bytes.front_mut();
                    first.into_iter().filter(|b| b.state == State::Flying).for_each(|b| {
                        b.state = State::Lost;
                    });
                }
                Operation::Renege => {
                    board.forget_sacks();
                    let sacked = model.bytes.iter_mut().filter(|b| b.state == State::Sacked);
                    sacked.for_each(|b| (b.state, b.again) = (State::Lost, true));
                }
            }
            prop_assert_eq!(board.una(), model.una);
            prop_assert_eq!(board.next(), model.next());
            let counts = (board.sacked(), board.lost(), board.pipe());
            let expected = [State::Sacked, State::Lost, State::Flying].map(|s| model.count(s));
            prop_assert_eq!(counts, expected.into());
            let bytes = board.pieces().flat_map(|p| {
                let byte = Byte { state: p.state, again: p.again, sent_at: p.sent_at };
                (p.from..p.to).map(move |_| byte)
            });
            for (is, expected) in bytes.zip(&model.bytes) {
                prop_assert_eq!(is.state, expected.state);
                prop_assert!(is.again == expected.again || is.state == State::Sacked);
                prop_assert!(is.sent_at == expected.sent_at || is.state != State::Flying);
            }
            // Neighbours differ, so that a path without losses costs little.
            let mut pieces = board.pieces().peekable();
            while let (Some(a), Some(b)) = (pieces.next(), pieces.peek()) {
                let alike = (a.state, a.sent_at, a.again) == (b.state, b.sent_at, b.again);
                prop_assert!(!alike && (a.state != State::Sacked || b.state != State::Sacked));
            }
        }
    }
}

#[test]
fn sec_03_an_r_that_sacks_every_other_segment_of_a_large_window_makes_no_endless_list() {
    let mut board = Scoreboard::new(0, 1000);
    board.on_sent(5_000_000, Instant::from_secs(9));
    for i in 0..2500 {
        let from = 2000 * i + 1000;
        let _ = board.on_ack(0, &[(from, from + 1000)], |_| {});
    }
    // The last block that is taken cuts twice.
    assert_eq!(board.runs() as u64, SENT_RUNS_MAX + 1);
}

#[test]
fn a_copy_may_be_as_long_as_any_segment() {
    let mut board = board("sent 4000 at 0\n again 1000:2000 at 7");
    board.mark_longer_lost(999);
    assert_eq!(shown(&board), "0:1000 lost, 1000:2000 lost, 2000:4000 lost");
}
