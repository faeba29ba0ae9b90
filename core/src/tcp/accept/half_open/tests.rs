//! Segments of R while H waits for its third ACK, and the repetitions of H's answer.

use super::*;
use crate::tcp::accept::grant::Offered;
use crate::tcp::accept::grant::tests::{ALL, BEGINNING, NOW, frame, grant, offered, read};
use crate::time::Duration;
use crate::wire::packet::{IpAddr16, IpVersion, TcpFlags, Timestamps};
use crate::wire::samples::{Segment, v4_segment};

const ACK: TcpFlags = TcpFlags::ACK;

/// Connection _n_ of the source 10.0.0._host_.
fn entry(host: u8, n: u16) -> Entry {
    let key = FlowKey {
        g_addr: IpAddr16::from_v4([10, 1, 0, 1]),
        r_addr: IpAddr16::from_v4([10, 0, 0, host]),
        vlan: 0,
        g_port: 443,
        r_port: n,
        port: 1,
        version: IpVersion::V4,
    };
    let l2 = L2Header::new(&[2; 14]).expect("an Ethernet header");
    let asked = Asked::of(&syn_of(1, ALL - 1));
    Entry { key, grant: grant(ALL - 1, &offered(ALL - 1)), l2, asked }
}

/// A SYN of R with this number and these options.
fn syn_of(seq: u32, choice: u8) -> Tcp {
    read(&frame(&Segment { seq: Seq(seq), ..v4_segment(b"") }, choice, false)).1
}

fn half_open(entries: &[Entry]) -> HalfOpen {
    let mut all = HalfOpen::new([1, 2, 3, 4]);
    for entry in entries {
        assert!(all.on_answered(NOW, *entry));
    }
    all
}

/// R's third ACK: its SYN had the number 1 and the clock 70.
fn third_ack() -> Segment {
    Segment {
        seq: Seq(2),
        ack: BEGINNING.isn + 1,
        flags: ACK,
        timestamps: Some(Timestamps { tsval: 71, tsecr: BEGINNING.clock }),
        ..v4_segment(b"")
    }
}

fn reply(all: &mut HalfOpen, s: &Segment) -> Reply {
    let (_, tcp) = read(&s.frame());
    all.on_segment_from_net(&entry(1, 1).key, &tcp)
}

#[test]
fn acc_03_the_third_ack_completes_it_or_data_in_its_place() {
    let data = |seq| Segment { seq: Seq(seq), payload: b"GET".to_vec(), ..third_ack() };
    let without_clock = Segment { timestamps: None, ..third_ack() };
    for s in [third_ack(), data(2), data(1 + 65_160), without_clock] {
        let mut all = half_open(&[entry(1, 1), entry(1, 2)]);
        assert!(matches!(reply(&mut all, &s), Reply::Completes(e) if e.key == entry(1, 1).key));
        // There may be no place for the flow, and R tries again.
        assert!(matches!(reply(&mut all, &s), Reply::Completes(_)));
        all.forget(&entry(1, 1).key);
        assert_eq!(all.len(), 1, "it is a flow now");
        assert!(matches!(reply(&mut all, &s), Reply::ForGuest), "and no SYN any more");
    }
}

#[test]
fn acc_03_the_third_ack_is_in_a_shut_window_too() {
    let shut = Offered { window: 0, ..offered(ALL - 1) };
    let mut all = half_open(&[Entry { grant: grant(ALL - 1, &shut), ..entry(1, 1) }]);
    let next = Segment { seq: Seq(3), ..third_ack() };
    assert!(matches!(reply(&mut all, &next), Reply::Nothing));
    assert!(matches!(reply(&mut all, &third_ack()), Reply::Completes(_)));
}

#[test]
fn acc_03_nothing_else_does() {
    let ts = |tsval, tsecr| Some(Timestamps { tsval, tsecr });
    let clock = BEGINNING.clock;
    let not_in_window = [
        Segment { seq: Seq(1), ..third_ack() },
        Segment { seq: Seq(2 + 65_160), ..third_ack() },
        Segment { timestamps: ts(71, clock + 1), ..third_ack() },
        Segment { timestamps: ts(69, clock), ..third_ack() },
        Segment { flags: TcpFlags::NONE, ..third_ack() },
        Segment { flags: TcpFlags::FIN, ..third_ack() },
    ];
    for s in not_in_window {
        let mut all = half_open(&[entry(1, 1)]);
        assert!(matches!(reply(&mut all, &s), Reply::Nothing), "{s:?}");
        assert!(matches!(reply(&mut all, &third_ack()), Reply::Completes(_)));
    }
    for ack in [BEGINNING.isn, BEGINNING.isn + 2] {
        let mut all = half_open(&[entry(1, 1)]);
        let s = Segment { ack, ..third_ack() };
        assert!(matches!(reply(&mut all, &s), Reply::ForGuest), "G resets who acknowledges {ack}");
        assert_eq!(all.len(), 1);
    }
}

#[test]
fn acc_13_a_copy_of_the_syn_gets_the_same_answer_and_another_takes_its_place() {
    let syn = |seq| Segment { seq: Seq(seq), flags: TcpFlags::SYN, sack: vec![], ..third_ack() };
    let mut all = half_open(&[entry(1, 1)]);
    let key = entry(1, 1).key;
    let again = all.on_segment_from_net(&key, &syn_of(1, ALL - 1));
    assert!(matches!(again, Reply::Again(e) if e.grant == entry(1, 1).grant));
    for without in [1, 2, 4, 8] {
        let less = all.on_segment_from_net(&key, &syn_of(1, ALL - 1 - without));
        assert!(matches!(less, Reply::Nothing), "COM-24: {without}");
    }
    assert!(matches!(reply(&mut all, &third_ack()), Reply::Completes(_)));
    assert!(matches!(reply(&mut all, &syn(9)), Reply::ForGuest));
    assert!(all.is_empty());
    let answer = Segment { flags: TcpFlags::SYN | ACK, ..syn(2) };
    let mut all = half_open(&[entry(1, 1)]);
    assert!(matches!(reply(&mut all, &answer), Reply::Nothing), "it is no third ACK");
    assert!(all.on_answered(NOW, entry(1, 1)) && all.len() == 1, "one of a name");
}

#[test]
fn acc_11_an_exact_rst_of_r_ends_it_and_so_does_a_syn_of_g() {
    let rst = |seq| Segment { seq: Seq(seq), flags: TcpFlags::RST, ..third_ack() };
    let mut all = half_open(&[entry(1, 1)]);
    for seq in [1, 3] {
        assert!(matches!(reply(&mut all, &rst(seq)), Reply::Nothing));
    }
    assert!(matches!(reply(&mut all, &rst(2)), Reply::Resets));
    assert!(all.is_empty());
    let mut all = half_open(&[entry(1, 1), entry(1, 2)]);
    all.forget(&entry(1, 1).key);
    all.forget(&entry(1, 3).key);
    assert!(matches!(reply(&mut all, &third_ack()), Reply::ForGuest));
    assert_eq!(all.len(), 1);
}

#[test]
fn acc_15_the_answer_is_repeated_four_times_then_the_entry_goes() {
    let mut all = half_open(&[entry(1, 1)]);
    let mut at_s = vec![];
    while all.due_at() < Instant::MAX {
        let at = all.due_at();
        assert!(all.poll_due(at - Duration::from_millis(1)).is_none());
        if all.poll_due(at).is_some() {
            at_s.push(at.since(NOW).as_nanos() / 1_000_000_000);
            assert!(all.poll_due(at).is_none(), "once");
        }
    }
    assert_eq!(at_s, [1, 3, 7, 15]);
    assert!(all.is_empty());
}

#[test]
fn acc_15_of_one_source_three_are_repeated() {
    let mut all = half_open(&[1, 2, 3, 4, 5].map(|n| entry(1, n)));
    assert!(all.on_answered(NOW, entry(2, 6)));
    let mut repeated = vec![];
    while let Some(entry) = all.poll_due(NOW + HALF_OPEN_INTERVAL) {
        repeated.push(entry.key.r_port);
    }
    assert_eq!(repeated, [1, 2, 3, 6]);
    assert_eq!(all.len(), 6, "the others wait for their third ACK, too");
    // One that has gone makes place for another.
    all.forget(&entry(1, 1).key);
    assert!(all.on_answered(NOW + HALF_OPEN_INTERVAL, entry(1, 7)));
    let later = NOW + HALF_OPEN_INTERVAL + HALF_OPEN_INTERVAL;
    assert_eq!(all.poll_due(later).map(|entry| entry.key.r_port), Some(7));
}

#[test]
fn a_syn_that_finds_no_place_is_for_the_guest() {
    let mut all = HalfOpen::new([1, 2, 3, 4]);
    for n in 0..u16::try_from(HALF_OPEN_MAX).expect("small") {
        assert!(all.on_answered(NOW, entry(1, n)));
    }
    assert!(!all.on_answered(NOW, entry(2, 1)));
    assert!(all.on_answered(NOW, entry(1, 1)), "a copy has its place");
    assert_eq!(all.len(), HALF_OPEN_MAX);
}
