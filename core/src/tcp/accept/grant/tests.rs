//! Grants, the SYNs for G and its answers, over all combinations of options.

use super::*;
use crate::tcp::options::Offers;
use crate::wire::emit::HEADER_MAX;
use crate::wire::packet::{IpVersion, Packet};
use crate::wire::samples::{Segment, v4_segment, v6_segment};

pub(in crate::tcp) const NOW: Instant = Instant::from_secs(7);
pub(in crate::tcp) const BEGINNING: Beginning = Beginning { isn: Seq(0xffff_ff00), clock: 5 };
/// Options and ECN of a SYN or SYN-ACK, one bit each.
pub(in crate::tcp) const ALL: u8 = 32;

/// The frame of a SYN with these options, or of a SYN-ACK.
pub(in crate::tcp) fn frame(s: &Segment, choice: u8, answers: bool) -> Vec<u8> {
    let has = |bit: u8| choice & bit != 0;
    let ecn = match (has(16), answers) {
        (false, _) => TcpFlags::NONE,
        (true, false) => ECN_OFFERED,
        (true, true) => TcpFlags::ECE,
    };
    let ack = if answers { TcpFlags::ACK } else { TcpFlags::NONE };
    let s = Segment {
        flags: TcpFlags::SYN | ack | ecn,
        timestamps: has(1).then_some(Timestamps { tsval: 70, tsecr: 0 }),
        ..s.clone()
    };
    let syn = SynEmit {
        segment: s.emit(),
        mss: has(2).then_some(if answers { 1400 } else { 1460 }),
        window_scale: has(4).then_some(if answers { 9 } else { 7 }),
        sack_permitted: has(8),
    };
    let mut buf = [0; HEADER_MAX];
    let len = syn.emit(&mut buf);
    buf[..len].to_vec()
}

pub(in crate::tcp) fn read(frame: &[u8]) -> (Ip, Tcp) {
    let packet = Packet::parse(frame).expect("a frame");
    let (ip, tcp) = packet.tcp().expect("a segment");
    (*ip, *tcp)
}

fn info(frame: &[u8]) -> SynInfo {
    let (ip, tcp) = read(frame);
    SynInfo::learn(NOW, &tcp, ip.version)
}

pub(in crate::tcp) fn offered(choice: u8) -> Offered {
    let s = Segment { ttl: 60, tos: 0x1f, ..v4_segment(b"") };
    let frame = frame(&s, choice, true);
    Offered { syn_ack: info(&frame), window: 65_160, lower: Lower::of(&read(&frame).0) }
}

pub(in crate::tcp) fn grant(choice: u8, server: &Offered) -> Grant {
    let (ip, tcp) = read(&frame(&v4_segment(b""), choice, false));
    Grant::of(NOW, &ip, &tcp, server, BEGINNING).expect("a SYN that H may answer")
}

fn emitted(syn: &SynEmit<'_>) -> Vec<u8> {
    let mut buf = [0; HEADER_MAX];
    let len = syn.emit(&mut buf);
    buf[..len].to_vec()
}

/// The options in force between two ends, by the code for all connections (COM-20 to COM-23).
fn in_force(of_net: SynInfo, of_guest: SynInfo) -> crate::tcp::options::Negotiated {
    let offers = Offers { r: of_net, g: of_guest, ..Offers::default() };
    offers.negotiate(false, IpVersion::V4, 1500).expect("understood")
}

#[test]
fn acc_02_r_is_granted_what_the_server_offered_last_as_far_as_its_syn_allows() {
    for (of_net, of_server) in (0..ALL).flat_map(|r| (0..ALL).map(move |g| (r, g))) {
        let (syn, server) = (frame(&v4_segment(b""), of_net, false), offered(of_server));
        let grant = grant(of_net, &server);
        let base = v4_segment(b"");
        let answer = emitted(&grant.syn_ack(base.emit()));
        let (ip, tcp) = read(&answer);
        assert_eq!((ip.ttl, ip.tos), (60, 0x1c), "G's own, and not ECN-capable");
        assert_eq!((tcp.seq, tcp.ack, tcp.window), (BEGINNING.isn, Seq(2), 65_160));
        assert!(answer.len() <= syn.len(), "ACC-15: it is no longer than the SYN");
        let common = in_force(info(&syn), info(&answer));
        assert_eq!(
            (common.timestamps, common.sack),
            (of_net & of_server & 1 != 0, of_net & of_server & 8 != 0)
        );
        assert_eq!(common.ecn, of_net & of_server & 16 != 0);
        let scaled = of_net & of_server & 4 != 0;
        assert_eq!((common.shift_r, common.shift_g), if scaled { (7, 9) } else { (0, 0) });
        if let Some(ts) = tcp.options.timestamps {
            assert_eq!((ts.tsval, ts.tsecr), (BEGINNING.clock, 70));
        }
        assert_eq!(tcp.options.mss, (of_net & 2 != 0).then_some(server.syn_ack.mss));
    }
}

#[test]
fn acc_14_the_guest_is_offered_what_r_was_granted_and_r_s_own_numbers() {
    for (of_net, of_server) in (0..ALL).flat_map(|r| (0..ALL).map(move |g| (r, g))) {
        let grant = grant(of_net, &offered(of_server));
        let base = v4_segment(b"");
        let elsewhere = Segment { ttl: 1, tos: 0xff, flow_label: 3, ..base.clone() };
        let syn = emitted(&grant.syn(elsewhere.emit()));
        let (ip, tcp) = read(&syn);
        let (ip_of_r, of_r) = read(&frame(&base, of_net, false));
        assert_eq!((ip.ttl, ip.tos), (ip_of_r.ttl, ip_of_r.tos));
        assert_eq!((tcp.seq, tcp.ack, tcp.window), (of_r.seq, Seq(0), of_r.window));
        assert_eq!(tcp.options.mss, of_r.options.mss);
        let (asked, shown) = (info(&syn), info(&emitted(&grant.syn_ack(base.emit()))));
        // A guest that answers as it did before settles all of it.
        let common = in_force(asked, shown);
        assert_eq!(common, in_force(info(&frame(&base, of_net, false)), shown));
        if let Some(ts) = tcp.options.timestamps {
            assert_eq!((ts.tsval, ts.tsecr), (70, 0));
        }
        let again = SynInfo { isn: Seq(0x1000), tsval: 3, ..shown };
        let settled = grant.settle(&again).expect("all that was granted");
        let t = settled.translation;
        assert_eq!(t.seq_from_guest(Seq(0x1000)), BEGINNING.isn);
        if common.timestamps {
            assert_eq!(t.tsval_from_guest(3), BEGINNING.clock);
        }
        assert_eq!((t.window_from_guest(500), t.window_to_guest(500)), (500, 500));
        assert_eq!((t.hides_sack, settled.ecn), (false, common.ecn));
    }
}

#[test]
fn acc_05_a_guest_that_answers_with_less_is_adapted_to_but_for_timestamps() {
    let grant = grant(ALL - 1, &offered(ALL - 1));
    let answers = |choice| info(&frame(&v4_segment(b""), choice, true));
    for choice in 0..ALL {
        let (g, has) = (answers(choice), |bit: u8| choice & bit != 0);
        let settled = match grant.settle(&g) {
            Err(why) => {
                assert_eq!((why, has(1)), (Unfit::NoTimestamps, false));
                continue;
            }
            Ok(settled) => settled,
        };
        let t = settled.translation;
        assert_eq!((t.hides_sack, settled.ecn), (!has(8), has(16)));
        assert_eq!(settled.mss_to_guest, if has(2) { 1400 } else { 536 });
        let shifts = (t.shift_of_guest, t.shift_to_net, t.shift_unknown);
        assert_eq!(shifts, if has(4) { (9, 9, 0) } else { (0, 9, 7) });
    }
    let narrow = SynInfo { window_scale: 3, ..answers(ALL - 1) };
    let t = grant.settle(&narrow).expect("another scale").translation;
    assert_eq!((t.shift_of_guest, t.shift_to_net, t.shift_unknown), (3, 9, 0));
}

#[test]
fn acc_12_a_clock_of_zero_is_none() {
    let silent = |info: SynInfo| SynInfo { tsval: 0, ..info };
    let (ip, tcp) = read(&frame(&v4_segment(b""), ALL - 1, false));
    for (choice, is_answered) in [(ALL - 1, false), (ALL - 2, true)] {
        let mut server = offered(choice);
        server.syn_ack = silent(server.syn_ack);
        let answer = Grant::of(NOW, &ip, &tcp, &server, BEGINNING);
        assert_eq!(answer.is_some(), is_answered, "without timestamps it does not matter");
    }
    let answer = silent(info(&frame(&v4_segment(b""), ALL - 1, true)));
    assert_eq!(grant(ALL - 1, &offered(ALL - 1)).settle(&answer), Err(Unfit::NoClock));
}

#[test]
fn acc_14_a_guest_that_answers_with_more_answers_another_syn() {
    let answers = |choice| info(&frame(&v4_segment(b""), choice, true));
    let grant = grant(1 + 2, &offered(ALL - 1));
    assert!(grant.settle(&answers(1 + 2)).is_ok());
    for more in [4, 8, 16] {
        assert_eq!(grant.settle(&answers(1 + 2 + more)), Err(Unfit::More), "{more}");
    }
    let strange = SynInfo { bits: SynInfo::HAS_TIMESTAMPS | SynInfo::HAS_UNKNOWN, ..answers(3) };
    assert_eq!(grant.settle(&strange), Err(Unfit::More));
}

#[test]
fn acc_13_h_answers_plain_syns_alone() {
    let server = offered(ALL - 1);
    let of = |frame: &[u8], server: &Offered| {
        let (ip, tcp) = read(frame);
        Grant::of(NOW, &ip, &tcp, server, BEGINNING)
    };
    let syn = |flags| Segment { flags, timestamps: None, ..v6_segment(b"") };
    assert!(of(&syn(TcpFlags::SYN).frame(), &server).is_some());
    for flags in 0..0x200 {
        let flags = TcpFlags(flags);
        let plain = flags == TcpFlags::SYN || flags == TcpFlags::SYN | ECN_OFFERED;
        assert_eq!(of(&syn(flags).frame(), &server).is_some(), plain, "{flags}");
    }
    let data = Segment { payload: b"x".to_vec(), ..syn(TcpFlags::SYN) };
    assert_eq!(of(&data.frame(), &server), None);
    let options: [&[u8]; 7] = [
        &[34, 2, 1, 1],                                                  // Fast Open
        &[254, 4, 0xf9, 0x89],                                           // its experiment
        &[30, 4, 0, 1],                                                  // MPTCP
        &[29, 4, 1, 1],                                                  // AO
        &[19, 18, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1], // MD5
        &[253, 4, 0, 0],                                                 // an unknown one
        &[2, 0, 1, 1],                                                   // a length that cannot be
    ];
    for options in options {
        assert_eq!(of(&syn(TcpFlags::SYN).frame_with_options(options), &server), None);
    }
    // Fragments and extension headers: no segment, or one behind options.
    let mut frame = v4_segment(b"").frame();
    let s = Segment { flags: TcpFlags::SYN, ..v4_segment(b"") };
    frame.copy_from_slice(&s.frame());
    let (mut ip, tcp) = read(&frame);
    ip.options = true;
    assert_eq!(Grant::of(NOW, &ip, &tcp, &server, BEGINNING), None);
    // A server of which H has not understood all.
    for bit in [SynInfo::HAS_UNKNOWN, SynInfo::HAS_MPTCP, SynInfo::AMBIGUOUS] {
        let mut strange = server;
        strange.syn_ack.bits |= bit;
        assert_eq!(of(&syn(TcpFlags::SYN).frame(), &strange), None);
    }
}

#[test]
fn acc_02_an_answer_to_less_keeps_what_was_offered_to_more() {
    let before = offered(ALL - 1);
    for choice in 0..ALL {
        let asked = info(&frame(&v4_segment(b""), choice, false));
        let after = offered(choice).without_unasked(&asked, &before).syn_ack;
        let of = before.syn_ack;
        assert_eq!((after.bits, after.window_scale), (of.bits, of.window_scale), "{choice}");
        assert_eq!(after.tsval, of.tsval);
        // An option that was asked for and not offered is offered no more.
        let less = offered(0).without_unasked(&asked, &before).syn_ack;
        assert_eq!(less.bits & asked.bits & !SynInfo::CWR, 0, "{choice}");
    }
}
