//! Each rule as a sentence about one server and its sources.

use super::*;
use crate::tcp::accept::grant;
use crate::time::Duration;

const NOW: Instant = Instant::from_secs(1000);
const HOP: Mac = [2, 0, 0, 0, 0, 9];
const SERVER: Server = Server { vlan: 0, addr: IpAddr16([7; 16]), port: 443 };

fn offered() -> Offered {
    grant::tests::offered(8)
}

fn v4(a: u8, b: u8, c: u8, d: u8) -> IpAddr16 {
    IpAddr16::from_v4([a, b, c, d])
}

/// 2001:db8:_net_:_subnet_::_host_.
fn v6(net: u8, subnet: u8, host: u8) -> IpAddr16 {
    IpAddr16([0x20, 1, 0xd, 0xb8, 0, net, 0, subnet, 0, 0, 0, 0, 0, 0, 0, host])
}

fn header(hop: Mac) -> L2Header {
    let bytes = [&hop[..], &[2, 0, 0, 0, 0, 1, 8, 0]].concat();
    L2Header::new(&bytes).expect("an Ethernet header")
}

fn after(seconds: u64) -> Instant {
    NOW + Duration::from_secs(seconds)
}

/// The guest has accepted a connection of each of these sources now.
fn accepted(sources: &[IpAddr16]) -> Learned {
    let mut learned = Learned::default();
    for source in sources {
        learned.on_syn_ack(NOW, SERVER, offered(), None);
        learned.on_completed(NOW, SERVER, *source, header(HOP), 1);
    }
    learned
}

fn asked(learned: &Learned, at: Instant, source: IpAddr16) -> Result<(), NotAnswered> {
    learned.may_answer(at, SERVER, source, HOP, &AcceptFrom::Itself, 0).map(|answer| {
        assert_eq!(answer, Answer { offered: offered(), l2: header(HOP) });
    })
}

const ALICE: [u8; 4] = [192, 0, 2, 1];

fn alice() -> IpAddr16 {
    IpAddr16::from_v4(ALICE)
}

#[test]
fn acc_01_a_source_is_answered_for_a_minute_after_the_guest_has_accepted_it() {
    let learned = accepted(&[alice()]);
    assert_eq!(asked(&learned, NOW, alice()), Ok(()));
    assert_eq!(asked(&learned, after(60), alice()), Ok(()));
    assert_eq!(asked(&learned, after(61), alice()), Err(NotAnswered::Unknown));
    assert_eq!(asked(&learned, NOW, v4(192, 0, 2, 2)), Err(NotAnswered::Unknown), "a neighbour");
    let others = [
        Server { port: 444, ..SERVER },
        Server { vlan: 1, ..SERVER },
        Server { addr: IpAddr16([8; 16]), ..SERVER },
    ];
    for other in others {
        let mut learned = accepted(&[alice()]);
        learned.on_syn_ack(NOW, other, offered(), None);
        let answer = learned.may_answer(NOW, other, alice(), HOP, &AcceptFrom::Any, 0);
        assert_eq!(answer, Err(NotAnswered::Unknown), "{other:?}");
    }
}

#[test]
fn acc_01_a_syn_ack_alone_is_no_connection() {
    let mut learned = Learned::default();
    learned.on_syn_ack(NOW, SERVER, offered(), None);
    assert_eq!(asked(&learned, NOW, alice()), Err(NotAnswered::Unknown));
}

#[test]
fn acc_01_others_speak_for_a_source_only_where_the_operator_says_so() {
    let learned = accepted(&[v4(10, 1, 0, 1), v6(1, 0, 1)]);
    let of = |addr, v4_bits, v6_bits| Prefix::of(addr, v4_bits, v6_bits);
    let networks = AcceptFrom::Networks(vec![of(v4(10, 1, 2, 3), 16, 0), of(v6(1, 0, 0), 0, 48)]);
    let asked = |source, from: &AcceptFrom| {
        learned.may_answer(NOW, SERVER, source, HOP, from, 0).map(|answer| answer.l2)
    };
    for source in [v4(10, 1, 255, 255), v4(10, 1, 0, 0), v6(1, 9, 9)] {
        assert_eq!(asked(source, &networks), Ok(header(HOP)), "{source}");
        assert_eq!(asked(source, &AcceptFrom::Any), Ok(header(HOP)));
        assert_eq!(asked(source, &AcceptFrom::Itself), Err(NotAnswered::Unknown));
    }
    for source in [v4(10, 2, 0, 1), v4(10, 0, 255, 255), v6(2, 0, 1)] {
        assert_eq!(asked(source, &networks), Err(NotAnswered::Unknown), "{source}");
        assert_eq!(asked(source, &AcceptFrom::Any), Ok(header(HOP)), "{source}");
    }
    // A network in which G has accepted nobody.
    let empty = AcceptFrom::Networks(vec![of(v4(172, 16, 0, 0), 12, 0)]);
    assert_eq!(asked(v4(172, 16, 0, 1), &empty), Err(NotAnswered::Unknown));
}

#[test]
fn acc_16_the_header_is_the_one_that_g_used_toward_the_source() {
    let mut learned = accepted(&[alice()]);
    let other = [2, 0, 0, 0, 0, 8];
    let ask = |learned: &Learned, source, hop, from: &AcceptFrom| {
        learned.may_answer(NOW, SERVER, source, hop, from, 0).map(|answer| answer.l2)
    };
    // G's own header counts, whatever MAC the SYN came from.
    assert_eq!(ask(&learned, alice(), other, &AcceptFrom::Itself), Ok(header(HOP)));
    learned.on_completed(NOW, SERVER, alice(), header(other), 1);
    assert_eq!(ask(&learned, alice(), HOP, &AcceptFrom::Itself), Ok(header(other)), "the newest");
    // That of another source counts only if both are behind the same station.
    let bob = v4(198, 51, 100, 1);
    assert_eq!(ask(&learned, bob, HOP, &AcceptFrom::Any), Err(NotAnswered::NoHeader));
    assert_eq!(ask(&learned, bob, other, &AcceptFrom::Any), Ok(header(other)));
}

#[test]
fn acc_01b_a_refusal_condemns_the_neighbourhood_for_ten_minutes_and_nobody_else() {
    for (banned, neighbour, other) in
        [(alice(), v4(192, 0, 2, 200), v4(192, 0, 3, 1)), (v6(1, 1, 1), v6(1, 1, 2), v6(1, 2, 1))]
    {
        let sources = [banned, neighbour, other];
        let mut learned = accepted(&sources);
        learned.on_refused(NOW, SERVER, banned);
        assert_eq!(asked(&learned, NOW, banned), Err(NotAnswered::Condemned));
        assert_eq!(asked(&learned, NOW, neighbour), Err(NotAnswered::Condemned));
        assert_eq!(asked(&learned, NOW, other), Ok(()));
        let elsewhere = Server { port: 80, ..SERVER };
        learned.on_syn_ack(NOW, elsewhere, offered(), None);
        learned.on_completed(NOW, elsewhere, banned, header(HOP), 1);
        let there = learned.may_answer(NOW, elsewhere, banned, HOP, &AcceptFrom::Itself, 0);
        assert!(there.is_ok(), "another port");
        // G accepts it again, which lifts nothing.
        let at = after(599);
        for source in sources {
            learned.on_completed(at, SERVER, source, header(HOP), 2);
        }
        assert_eq!(asked(&learned, at, banned), Err(NotAnswered::Condemned));
        assert_eq!(asked(&learned, after(600), banned), Ok(()));
    }
}

#[test]
fn acc_01b_two_distant_refusals_within_ten_seconds_condemn_the_port() {
    let far = v4(203, 0, 113, 1);
    let bystander = v4(10, 0, 0, 1);
    for (second, apart_s, condemned) in
        [(far, 10, true), (far, 11, false), (v4(192, 0, 99, 1), 1, false)]
    {
        let mut learned = accepted(&[alice(), far, bystander]);
        learned.on_refused(NOW, SERVER, alice());
        assert_eq!(asked(&learned, NOW, bystander), Ok(()));
        learned.on_refused(after(apart_s), SERVER, second);
        let verdict = asked(&learned, after(apart_s), bystander);
        assert_eq!(verdict.is_err(), condemned, "{second} after {apart_s} s");
        if condemned {
            let end = after(apart_s + 600);
            learned.on_completed(end, SERVER, bystander, header(HOP), 3);
            assert_eq!(asked(&learned, end, bystander), Ok(()), "it ends");
        }
    }
}

#[test]
fn acc_01b_after_a_reset_of_the_guest_nobody_is_answered() {
    let mut learned = accepted(&[alice()]);
    learned.on_guest_reset(NOW);
    assert_eq!(asked(&learned, NOW, alice()), Err(NotAnswered::Unknown));
    learned.on_completed(after(1), SERVER, alice(), header(HOP), 2);
    assert_eq!(asked(&learned, after(1), alice()), Err(NotAnswered::Condemned));
    learned.on_completed(after(600), SERVER, alice(), header(HOP), 3);
    assert_eq!(asked(&learned, after(600), alice()), Ok(()));
}

#[test]
fn acc_09_silence_for_a_source_that_was_accepted_is_a_full_queue() {
    let bob = v4(10, 0, 0, 1);
    let mut learned = accepted(&[alice(), bob]);
    learned.on_silence(NOW, SERVER, alice());
    assert_eq!(asked(&learned, NOW, alice()), Err(NotAnswered::Silent));
    assert_eq!(asked(&learned, NOW, bob), Err(NotAnswered::Silent), "the queue is everybody's");
    learned.on_syn_ack(after(1), SERVER, offered(), None);
    assert_eq!(asked(&learned, after(1), alice()), Ok(()), "it accepts again");
    // Of a source for which others speak, silence may be a filter.
    let stranger = v4(203, 0, 113, 1);
    learned.on_silence(after(1), SERVER, stranger);
    assert_eq!(asked(&learned, after(1), alice()), Ok(()));
    let verdict = learned.may_answer(after(1), SERVER, stranger, HOP, &AcceptFrom::Any, 0);
    assert_eq!(verdict, Err(NotAnswered::Condemned));
}

#[test]
fn acc_10_as_many_wait_as_the_guest_lately_completed_in_one_run() {
    let waiting = |completed: u32| {
        let mut learned = accepted(&[alice()]);
        (0..completed).for_each(|_| learned.on_completed(NOW, SERVER, alice(), header(HOP), 2));
        learned.on_completed(NOW, SERVER, alice(), header(HOP), 3);
        let mut count = 0;
        while asked(&learned, NOW, alice()).is_ok() {
            learned.on_waiting(SERVER);
            count += 1;
        }
        assert_eq!(asked(&learned, NOW, alice()), Err(NotAnswered::Waiting));
        learned.on_waited(SERVER);
        assert_eq!(asked(&learned, NOW, alice()), Ok(()));
        count
    };
    assert_eq!([1, 16, 17, 100, 128, 500].map(waiting), [16, 16, 17, 100, 128, 128]);
    // A minute later that run says nothing any more.
    for next_s in [50, 61] {
        let mut learned = accepted(&[alice()]);
        (0..100).for_each(|_| learned.on_completed(NOW, SERVER, alice(), header(HOP), 2));
        learned.on_completed(after(next_s), SERVER, alice(), header(HOP), 9);
        (0..16).for_each(|_| learned.on_waiting(SERVER));
        assert_eq!(asked(&learned, after(61), alice()), Err(NotAnswered::Waiting), "{next_s} s");
    }
}

#[test]
fn acc_15_cookies_are_for_servers_whose_last_four_clients_spoke_first() {
    let mut learned = accepted(&[alice()]);
    let mut begun = |by_net: bool| {
        learned.on_begun(SERVER, by_net);
        learned.may_give_cookies(SERVER)
    };
    assert_eq!([true; 5].map(&mut begun), [false, false, false, true, true]);
    assert_eq!([false, true, true, true, true].map(&mut begun), [false, false, false, false, true]);
    assert!(!learned.may_give_cookies(Server { port: 25, ..SERVER }));
}

#[test]
fn the_tables_are_bounded_and_the_oldest_source_goes_first() {
    let source = |n: u16| v4(10, 0, n.to_be_bytes()[0], n.to_be_bytes()[1]);
    let mut learned = accepted(&[alice()]);
    learned.on_refused(NOW, SERVER, v4(172, 16, 0, 1));
    for n in 0..2 * u16::try_from(ACCEPT_KNOWN_MAX).expect("small") {
        let at = NOW + Duration::from_millis(1 + u64::from(n));
        learned.on_completed(at, SERVER, source(n), header(HOP), 1);
        assert!(learned.known.len() + learned.condemned.len() <= ACCEPT_KNOWN_MAX);
    }
    assert_eq!(asked(&learned, after(1), alice()), Err(NotAnswered::Unknown));
    assert_eq!(asked(&learned, after(1), source(511)), Ok(()));
    assert_eq!(learned.condemned.len(), 1, "refusals stay");
    // Nor do they crowd each other out of their place: the oldest of them goes last.
    for n in 0..2 * u16::try_from(ACCEPT_KNOWN_MAX).expect("small") {
        let [high, low] = n.to_be_bytes();
        learned.on_silence(after(2), SERVER, v4(20, high, low, 1));
        assert!(learned.known.len() + learned.condemned.len() <= ACCEPT_KNOWN_MAX);
    }
    assert_eq!(learned.condemned.len(), ACCEPT_KNOWN_MAX);
    // Servers, too. One that must not be answered is not forgotten.
    learned.on_guest_reset(NOW);
    for port in 0..2 * u16::try_from(ACCEPT_SERVERS_MAX).expect("small") {
        learned.on_syn_ack(after(3), Server { port, ..SERVER }, offered(), None);
    }
    assert_eq!(learned.ports.len(), ACCEPT_SERVERS_MAX);
    learned.on_completed(after(4), SERVER, alice(), header(HOP), 5);
    assert_eq!(asked(&learned, after(4), alice()), Err(NotAnswered::Condemned));
    let newest = Server { port: 1000, ..SERVER };
    learned.on_syn_ack(after(5), newest, offered(), None);
    learned.on_completed(after(5), newest, alice(), header(HOP), 6);
    assert!(learned.may_answer(after(5), newest, alice(), HOP, &AcceptFrom::Itself, 0).is_ok());
}
