//! Cookies that come back, as R's third ACKs, and those that nobody has given.

use super::*;
use crate::tcp::accept::grant::tests::{ALL, BEGINNING, NOW, frame, offered, read};
use crate::time::Duration;
use crate::wire::packet::{IpAddr16, IpVersion, TcpFlags, Timestamps};
use crate::wire::samples::{Segment, v4_segment};

fn key(r_port: u16) -> FlowKey {
    FlowKey {
        g_addr: IpAddr16::from_v4([10, 1, 0, 1]),
        r_addr: IpAddr16::from_v4([10, 0, 0, 1]),
        vlan: 0,
        g_port: 443,
        r_port,
        port: 1,
        version: IpVersion::V4,
    }
}

/// The answer to a SYN of R with these options.
fn given(cookies: &mut Cookies, choice: u8, server: &Offered) -> Grant {
    let (ip, tcp) = read(&frame(&v4_segment(b""), choice, false));
    cookies.give(NOW, &key(1), &ip, &tcp, server).expect("a SYN that may be answered")
}

/// R's third ACK of it.
fn third_ack(grant: &Grant) -> Segment {
    Segment {
        seq: grant.of_net().isn + 1,
        ack: grant.shown().isn + 1,
        flags: TcpFlags::ACK,
        window: 300,
        timestamps: grant
            .has_timestamps()
            .then_some(Timestamps { tsval: 75, tsecr: grant.shown().tsval }),
        ..v4_segment(b"")
    }
}

fn taken(cookies: &Cookies, at: Instant, s: &Segment) -> Option<Grant> {
    let (ip, tcp) = read(&s.frame());
    cookies.take(at, &key(1), &ip, &tcp, &offered(ALL - 1))
}

#[test]
fn acc_15_the_third_ack_brings_back_what_was_granted() {
    for choice in 0..ALL {
        let mut cookies = Cookies::new([1, 2]);
        let server = offered(ALL - 1);
        let grant = given(&mut cookies, choice, &server);
        let back = taken(&cookies, NOW, &third_ack(&grant)).expect("its cookie");
        let (of_net, shown) = (*grant.of_net(), *grant.shown());
        let tsval = if grant.has_timestamps() { 75 } else { 0 };
        assert_eq!(*back.of_net(), SynInfo { tsval, passed_ms: 0, ..of_net }, "{choice}");
        assert_eq!(*back.shown(), shown, "{choice}");
        assert_eq!(back.window_shown(), grant.window_shown());
        // The SYN for G: the third ACK's window, in bytes.
        let base = v4_segment(b"");
        let syn = back.syn(base.emit());
        let shift = if of_net.window_scale == SynInfo::NO_SCALE { 0 } else { 7 };
        assert_eq!(syn.segment.window, 300 << shift);
        if !grant.has_timestamps() {
            let none = [of_net.window_scale, shown.window_scale] == [SynInfo::NO_SCALE; 2];
            assert!(none && shown.bits == 0, "what nothing brings back is not granted");
        }
    }
}

#[test]
fn acc_14_r_s_segments_for_g_are_no_longer_than_r_takes() {
    for (mss, size) in [(1460, 1460), (1459, 1440), (9000, 8940), (537, 536)] {
        let mut cookies = Cookies::new([1, 2]);
        let (ip, mut tcp) = read(&frame(&v4_segment(b""), ALL - 1, false));
        tcp.options.mss = Some(mss);
        let grant = cookies.give(NOW, &key(1), &ip, &tcp, &offered(ALL - 1)).expect("a grant");
        assert_eq!(grant.of_net().mss, size);
        assert_eq!(
            taken(&cookies, NOW, &third_ack(&grant)).map(|back| back.of_net().mss),
            Some(size)
        );
    }
    let (ip, mut tcp) = read(&frame(&v4_segment(b""), ALL - 1, false));
    tcp.options.mss = Some(535);
    let mut cookies = Cookies::new([1, 2]);
    assert_eq!(cookies.give(NOW, &key(1), &ip, &tcp, &offered(ALL - 1)), None, "for G to answer");
}

#[test]
fn acc_15_a_cookie_is_good_for_one_connection_of_one_vm_and_a_while() {
    let mut cookies = Cookies::new([1, 2]);
    let good = third_ack(&given(&mut cookies, ALL - 1, &offered(ALL - 1)));
    let ts = good.timestamps.expect("granted");
    for bit in 0..32 {
        let flipped = |n: u32| n ^ 1 << bit;
        let forged = [
            Segment { ack: Seq(flipped(good.ack.0)), ..good.clone() },
            Segment { seq: Seq(flipped(good.seq.0)), ..good.clone() },
            Segment {
                timestamps: Some(Timestamps { tsecr: flipped(ts.tsecr), ..ts }),
                ..good.clone()
            },
        ];
        for s in forged {
            assert_eq!(taken(&cookies, NOW, &s), None, "bit {bit}");
        }
    }
    for flags in [TcpFlags::NONE, TcpFlags::SYN | TcpFlags::ACK, TcpFlags::RST | TcpFlags::ACK] {
        assert_eq!(taken(&cookies, NOW, &Segment { flags, ..good.clone() }), None);
    }
    assert_eq!(taken(&cookies, NOW, &Segment { timestamps: None, ..good.clone() }), None);
    let (ip, tcp) = read(&good.frame());
    assert_eq!(cookies.take(NOW, &key(2), &ip, &tcp, &offered(ALL - 1)), None);
    let mut other = Cookies::new([1, 3]);
    given(&mut other, ALL - 1, &offered(ALL - 1));
    assert_eq!(taken(&other, NOW, &good), None);
    // Between one period and two.
    assert!(taken(&cookies, NOW + COOKIE_PERIOD, &good).is_some());
    assert_eq!(taken(&cookies, NOW + COOKIE_PERIOD + COOKIE_PERIOD, &good), None);
}

#[test]
fn acc_15_without_a_cookie_out_no_ack_is_tried() {
    let mut cookies = Cookies::new([1, 2]);
    let grant = given(&mut cookies, ALL - 1, &offered(ALL - 1));
    assert_ne!(grant.shown().isn, BEGINNING.isn);
    let none = Cookies::new([1, 2]);
    assert_eq!(taken(&none, NOW, &third_ack(&grant)), None);
    let later = NOW + COOKIES_TRIED + Duration::from_secs(1);
    let (ip, tcp) = read(&frame(&v4_segment(b""), ALL - 1, false));
    let again = cookies.give(later, &key(1), &ip, &tcp, &offered(ALL - 1)).expect("a grant");
    for (given_at, is_tried) in [(NOW, false), (NOW + Duration::from_secs(1), true)] {
        cookies.given_at = Some(given_at);
        assert_eq!(taken(&cookies, later, &third_ack(&again)).is_some(), is_tried);
    }
}
