//! Traces of a guest for which the host sends.

use super::*;

/// G has handed over three full segments and a piece, of which R was sent the first two.
fn relayed() -> Scene {
    let mut s = Scene::open();
    (s.h.known.floods, s.h.is_relayed) = (true, true);
    for place in [1, 1449, 2897] {
        s.guest_sends(&seg(Side::G, place, 1), &[7; 1448]);
    }
    s.guest_sends(&with(seg(Side::G, 4345, 1), |x| x.flags = PUSH), &[7; 100]);
    s.net_gets(&made(1), &[7; 1448]);
    s.net_gets(&made(1449), &[7; 1448]);
    s
}

/// A segment of the host for R, and its header, which G has not written.
fn made(place: u32) -> Segment {
    with(told(1), |x| (x.seq, x.id) = (ISN[1].wrapping_add(place), 5))
}

#[test]
fn what_the_host_sends_for_a_guest_has_a_header_of_its_own() {
    let run = |change: fn(&mut Segment), len: usize| {
        let mut s = relayed();
        s.net_gets(&with(made(2897), change), &vec![7; len]);
        s
    };
    run(|_| (), 1448).accepted();
    run(|x| x.flags = PUSH, 1448).accepted();
    run(|_| (), 1449).refused_by(Rule::Fields);
    run(|x| x.flags = TcpFlags::ACK | TcpFlags::URG, 1448).refused_by(Rule::Fields);
    run(|x| x.urgent = 1, 1448).refused_by(Rule::Fields);
    run(|x| x.last_options = vec![30, 4, 0, 0], 1400).refused_by(Rule::Fields);
    run(|x| x.ip_options = vec![1; 4], 1400).refused_by(Rule::Fields);
    run(|x| x.ecn = 2, 1448).refused_by(Rule::Fields);
}

#[test]
fn the_last_byte_of_a_guest_there_is_must_be_pushed() {
    for (flags, fine) in [(PUSH, true), (TcpFlags::ACK, false)] {
        let mut s = relayed();
        s.net_gets(&with(made(4345), |x| x.flags = flags), &[7; 100]);
        if fine { s.accepted() } else { s.refused_by(Rule::Fields) }
    }
}

#[test]
fn of_what_the_host_sends_new_bytes_are_ecn_capable_if_that_was_agreed_on() {
    for (ecn, place, fine) in [(2, 2897, true), (0, 2897, false), (0, 1, true), (2, 1, false)] {
        let mut s = relayed();
        s.h.ends.iter_mut().for_each(|e| e.offer.marks = true);
        s.h.known.ecn = true;
        drop(std::mem::take(&mut s.h.quality.sending)); // it took over without marks
        s.net_gets(&with(made(place), |x| x.ecn = ecn), &[7; 1448]);
        if fine { s.accepted() } else { s.refused_by(Rule::Fields) }
    }
}

#[test]
fn cwr_is_on_one_segment() {
    for gso_size in [0, 724] {
        let mut s = relayed();
        let gso_type = if gso_size > 0 { GSO_TCPV4 } else { 0 };
        s.hdr = VirtioNetHdr { flags: F_NEEDS_CSUM, gso_type, gso_size, ..s.hdr };
        let cwr = with(made(2897), |x| x.flags = TcpFlags::ACK | TcpFlags::CWR);
        s.net_gets(&cwr, &[7; 1448]);
        if gso_size == 0 { s.accepted() } else { s.refused_by(Rule::Fields) }
    }
}

#[test]
fn duplicate_acks_are_the_hosts_while_it_keeps_anything() {
    let duplicate = |s: &mut Scene| {
        s.net_sends(&seg(Side::R, 1, 1449), &[]);
        s.guest_gets(&seg(Side::R, 1, 1449), &[]);
    };
    let mut s = relayed();
    duplicate(&mut s);
    s.accepted();
    duplicate(&mut s);
    s.refused_by(Rule::News);
    let mut s = relayed();
    duplicate(&mut s);
    s.guest_sends(&seg(Side::G, 1, 1), &[7; 1448]); // G does not know that R has it
    duplicate(&mut s);
    s.accepted();
    let mut s = relayed();
    s.net_sends(&seg(Side::R, 1, 2897), &[]);
    s.guest_gets(&seg(Side::R, 1, 2897), &[]);
    s.h.is_relayed = false;
    s.net_sends(&seg(Side::R, 1, 2897), &[]); // nothing is under way
    s.guest_gets(&seg(Side::R, 1, 2897), &[]);
    s.accepted();
}

#[test]
fn marks_and_blocks_are_the_hosts_while_it_sends() {
    let run = |relayed_: bool, change: fn(&mut Segment)| {
        let mut s = relayed();
        s.h.known.ecn = true;
        let says = with(seg(Side::R, 1, 1), change);
        if !relayed_ {
            s.h.is_relayed = false;
        }
        s.net_sends(&says, &[7; 100]);
        s.net_gets(&told(101), &[]);
        s.guest_gets(&with(says, |x| x.flags = x.flags | TcpFlags::PSH), &[7; 100]);
        s
    };
    let ece: fn(&mut Segment) = |x| x.flags = TcpFlags::ACK | TcpFlags::ECE;
    run(false, ece).accepted();
    run(true, ece).refused_by(Rule::Echo);
    let sack: fn(&mut Segment) = |x| x.sack = vec![(ISN[1] + 1449, ISN[1] + 2897)];
    run(false, sack).accepted();
    run(true, sack).refused_by(Rule::Echo);
}

#[test]
fn a_guest_is_told_of_holes_in_what_it_has_handed_over() {
    let mut s = relayed();
    s.guest_sends(&seg(Side::G, 5893, 1), &[7; 1448]);
    let hole = with(seg(Side::R, 1, 1), |x| x.sack = vec![(ISN[1] + 5893, ISN[1] + 7341)]);
    for _ in 0..3 {
        s.guest_gets(&hole, &[]);
    }
    s.accepted();
}

#[test]
fn clocks_are_the_newest() {
    for (shown, fine) in [(520, true), (500, false)] {
        let mut s = relayed();
        s.guest_sends(&with(seg(Side::G, 4445, 1), |x| x.timestamps = Some((520, 100))), &[7; 100]);
        s.net_gets(&with(made(2897), |x| x.timestamps = Some((shown, 100))), &[7; 1448]);
        if fine { s.accepted() } else { s.refused_by(Rule::Echo) }
    }
    for (shown, fine) in [(120, true), (100, false)] {
        let mut s = relayed();
        s.net_sends(&with(seg(Side::R, 1, 1), |x| x.timestamps = Some((120, 500))), &[]);
        s.net_sends(&with(seg(Side::R, 1, 1449), |x| x.timestamps = Some((120, 500))), &[]);
        s.guest_gets(&with(seg(Side::R, 1, 1449), |x| x.timestamps = Some((shown, 500))), &[]);
        if fine { s.accepted() } else { s.refused_by(Rule::Echo) }
    }
}

#[test]
fn a_flow_is_let_go_when_nothing_is_under_way() {
    for (acked, fine) in [(2897, true), (1449, false)] {
        let mut s = relayed();
        s.net_sends(&seg(Side::R, 1, acked), &[]);
        s.h.is_relayed = false;
        s.ms(1);
        if fine { s.accepted() } else { s.refused_by(Rule::WireConformance) }
    }
}

#[test]
fn what_tells_a_guest_of_a_hole_is_a_turn_of_its_flow() {
    for tells in [true, false] {
        let mut waits = relayed();
        waits.h.name.guest_port = 2;
        waits.h.ends[Side::R as usize].offer.sack = false;
        waits.guest_gets(&seg(Side::R, 1, 1), &[]);
        waits.net_sends(&seg(Side::R, 1, 1), &[7; 100]);
        waits.net_gets(&told(101), &[]);
        let mut s = Scene::open();
        s.turns = waits.turns.clone();
        s.net_sends(&seg(Side::R, 1, 1), &[7; 4344]);
        s.net_gets(&told(4345), &[]);
        for place in [1, 1449] {
            s.guest_gets(&seg(Side::R, place, 1), &[7; 1448]);
        }
        if tells {
            waits.turns = s.turns.clone();
            waits.guest_sends(&seg(Side::G, 5893, 1), &[7; 1448]);
            waits.guest_gets(&seg(Side::R, 1, 1), &[]);
            waits.accepted();
            s.turns = waits.turns.clone();
        }
        s.guest_gets(&with(seg(Side::R, 2897, 1), |x| x.flags = PUSH), &[7; 1448]);
        if tells { s.accepted() } else { s.refused_by(Rule::Turns) }
    }
}

/// The heartbeat has said go since before the SYN, or since after it, or says it no longer.
#[test]
fn a_guest_that_begins_to_send_past_the_host_is_stopped() {
    let at = Instant::from_secs;
    for (go_since, is_relayed, is_wrong) in [
        (Some(at(1)), false, true),
        (Some(at(1)), true, false),
        (Some(at(2)), false, false),
        (None, false, false),
    ] {
        let mut s = Scene::open();
        s.h.known.floods = true;
        s.h.quality.flooding.on_syn(s.now);
        s.guest_sends(&seg(Side::G, 1, 1), &[7; 1448]);
        s.net_gets(&seg(Side::G, 1, 1), &[7; 1448]);
        s.h.is_relayed = is_relayed;
        let said = flooding::on_step(&mut s.h, go_since).map_err(|_| Rule::Flooding).err();
        assert_eq!(said, is_wrong.then_some(Rule::Flooding), "{go_since:?}");
        // Some of it is under way.
        s.guest_sends(&seg(Side::G, 1449, 1), &[7; 1448]);
        s.net_gets(&seg(Side::G, 1449, 1), &[7; 1448]);
        assert!(flooding::on_step(&mut s.h, go_since).is_ok());
    }
}
