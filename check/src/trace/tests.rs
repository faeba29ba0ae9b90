use std::io::Cursor;

use pcap_file::pcap::{PcapHeader, PcapPacket, PcapWriter};
use pcap_file::{DataLink, TsResolution};

use super::*;
use crate::stream::Stream;
use crate::wire::{Segment, TcpFlags, build};

const R_MAC: [u8; 6] = [2, 0, 0, 2, 0, 0];
const G_MAC: [u8; 6] = [2, 0, 0, 1, 0, 0];
/// Initial sequence numbers; all numbers below are relative to them.
const ISN: [u32; 2] = [0xffff_ff00, 77_000];
/// Window scale of both sides.
const SCALE: u8 = 7;

fn options() -> Options {
    Options { guests: vec![G_MAC], offload: true, sends: false, whole: true, attached: false }
}

/// Both captures while they are made, a frame a millisecond.
#[derive(Clone, Default)]
struct Scene {
    ms: u64,
    remote: Vec<(u64, Vec<u8>)>,
    guest: Vec<(u64, Vec<u8>)>,
}

/// An ACK of R or G with relative numbers.
fn ack(from: Side, seq: u32, ack: u32) -> Segment {
    let (src_mac, dst_mac, src, dst, src_port, dst_port) = match from {
        Side::R => (R_MAC, G_MAC, [10, 0, 0, 2], [10, 0, 0, 1], 4000, 80),
        Side::G => (G_MAC, R_MAC, [10, 0, 0, 1], [10, 0, 0, 2], 80, 4000),
    };
    Segment {
        src_mac,
        dst_mac,
        src: src.into(),
        dst: dst.into(),
        src_port,
        dst_port,
        seq: ISN[from as usize].wrapping_add(seq),
        ack: ISN[from.other() as usize].wrapping_add(ack),
        flags: TcpFlags::ACK,
        window: 500,
        timestamps: Some(if from == Side::R { (100, 500) } else { (500, 100) }),
        ..Segment::default()
    }
}

fn with(mut segment: Segment, change: impl FnOnce(&mut Segment)) -> Segment {
    change(&mut segment);
    segment
}

impl Scene {
    /// `R>`, `>R`, `G>` or `>G`.
    fn frame(&mut self, tap: &str, frame: Vec<u8>) {
        self.ms += 1;
        let side = if tap.contains('R') { &mut self.remote } else { &mut self.guest };
        side.push((self.ms * 1_000_000, frame));
    }

    fn see(&mut self, tap: &str, segment: &Segment, payload: &[u8]) {
        self.frame(tap, build(segment, payload));
    }

    /// R connects; `syn` are its options, `ecn` what is in its SYN.
    fn open_with(options: &[u8], ecn: bool) -> Self {
        let mut s = Self::default();
        let (syn_flags, answer) = if ecn {
            (TcpFlags::ECE | TcpFlags::CWR, TcpFlags::ECE)
        } else {
            (TcpFlags::NONE, TcpFlags::NONE)
        };
        let offer = [&[2, 4, 5, 180, 3, 3, SCALE, 4, 2, 1, 1, 1][..], options].concat();
        let syn = with(ack(Side::R, 0, 0), |x| {
            (x.flags, x.ack, x.options) = (TcpFlags::SYN | syn_flags, 0, offer.clone());
            x.window = 60_000;
        });
        let syn_ack = with(ack(Side::G, 0, 1), |x| {
            (x.flags, x.options) = (TcpFlags::SYN | TcpFlags::ACK | answer, offer);
            x.window = 60_000;
        });
        let third = ack(Side::R, 1, 1);
        for (first, then, segment) in
            [("R>", ">G", &syn), ("G>", ">R", &syn_ack), ("R>", ">G", &third)]
        {
            s.see(first, segment, &[]);
            s.see(then, segment, &[]);
        }
        s
    }

    fn open() -> Self {
        Self::open_with(&[], false)
    }

    /// After 1000 bytes of R that were acknowledged at once.
    fn promised() -> Self {
        let mut s = Self::open();
        s.see("R>", &ack(Side::R, 1, 1), &[7; 1000]);
        s.see(">R", &ack(Side::G, 1, 1001), &[]);
        s
    }

    /// G has them too.
    fn delivered() -> Self {
        let mut s = Self::promised();
        s.see(">G", &with(ack(Side::R, 1, 1), |x| x.window = 499), &[7; 1000]);
        s.see("G>", &ack(Side::G, 1, 1001), &[]);
        s
    }

    fn check(&self, options: &Options) -> Report {
        let (remote, guest) = (pcap(&self.remote), pcap(&self.guest));
        check(Cursor::new(remote), Cursor::new(guest), options).unwrap()
    }

    /// Fails unless exactly this rule is found violated.
    #[track_caller]
    fn violates(&self, rule: Rule) {
        let findings = self.check(&options()).findings;
        let found: Vec<Rule> = findings.iter().map(|f| f.violation.rule).collect();
        assert_eq!(found, [rule], "{findings:?}");
    }
}

fn pcap(frames: &[(u64, Vec<u8>)]) -> Vec<u8> {
    pcap_of(DataLink::ETHERNET, frames)
}

fn pcap_of(datalink: DataLink, frames: &[(u64, Vec<u8>)]) -> Vec<u8> {
    let header = PcapHeader {
        snaplen: 1 << 18,
        datalink,
        ts_resolution: TsResolution::NanoSecond,
        ..PcapHeader::default()
    };
    let mut writer = PcapWriter::with_header(Vec::new(), header).unwrap();
    for (ns, bytes) in frames {
        let len = u32::try_from(bytes.len()).unwrap();
        let at = std::time::Duration::from_nanos(*ns);
        writer.write_packet(&PcapPacket::new(at, len, bytes)).unwrap();
    }
    writer.into_writer()
}

#[test]
fn a_connection_with_offload_from_syn_to_fin_is_accepted() {
    let mut s = Scene::delivered();
    let fin = TcpFlags::ACK | TcpFlags::FIN;
    s.see("G>", &ack(Side::G, 1, 1001), b"answer");
    s.see(">R", &with(ack(Side::G, 1, 1001), |x| x.window = 510), b"answer");
    s.see("R>", &with(ack(Side::R, 1001, 7), |x| x.flags = fin), &[]);
    s.see(">G", &with(ack(Side::R, 1001, 7), |x| (x.flags, x.window) = (fin, 499)), &[]);
    s.see("G>", &with(ack(Side::G, 7, 1002), |x| x.flags = fin), &[]);
    s.see(">R", &with(ack(Side::G, 7, 1002), |x| (x.flags, x.window) = (fin, 510)), &[]);
    s.see("R>", &ack(Side::R, 1002, 8), &[]);
    s.see(">G", &ack(Side::R, 1002, 8), &[]);
    let report = s.check(&options());
    assert_eq!(report.findings, []);
    assert_eq!((report.flows, report.offloaded, report.checked, report.made), (1, 1, 9, 5));
}

#[test]
fn causes_of_the_same_instant_come_before_their_effects() {
    let mut s = Scene::delivered();
    let (ms, all) = (s.ms, s.clone());
    s.see("G>", &ack(Side::G, 1, 1001), b"answer");
    s.see(">R", &with(ack(Side::G, 1, 1001), |x| x.window = 510), b"answer");
    s.see("R>", &ack(Side::R, 1001, 1), &[8; 500]);
    s.see(">G", &with(ack(Side::R, 1001, 1), |x| x.window = 499), &[8; 500]);
    // Read in one turn: R's segment, then G's, then what comes of it.
    let last = s.remote.len() - 1;
    s.remote.swap(last - 1, last);
    let flatten = |frames: &mut Vec<(u64, Vec<u8>)>| {
        frames.iter_mut().for_each(|(ns, _)| *ns = (*ns).min((ms + 1) * 1_000_000));
    };
    flatten(&mut s.remote);
    flatten(&mut s.guest);
    assert_eq!(s.check(&options()).findings, []);
    assert!(s.check(&options()).checked == all.check(&options()).checked + 2);
}

#[test]
fn inv01_a_changed_byte_to_g() {
    let mut s = Scene::promised();
    let mut bytes = [7; 1000];
    bytes[999] = 8;
    s.see(">G", &ack(Side::R, 1, 1), &bytes);
    s.violates(Rule::BytesToGuest);
}

#[test]
fn inv02_a_changed_byte_to_r() {
    let mut s = Scene::delivered();
    s.see("G>", &ack(Side::G, 1, 1001), b"answer");
    s.see(">R", &ack(Side::G, 1, 1001), b"anSwer");
    s.violates(Rule::BytesToNet);
}

#[test]
fn inv04_a_fin_acknowledged_before_g_did() {
    let mut s = Scene::delivered();
    let fin = TcpFlags::ACK | TcpFlags::FIN;
    s.see("R>", &with(ack(Side::R, 1001, 1), |x| x.flags = fin), &[]);
    s.see(">R", &ack(Side::G, 1, 1002), &[]);
    s.violates(Rule::EarlyFin);
}

#[test]
fn inv05_a_right_edge_moved_left() {
    let mut s = Scene::delivered();
    s.see(">R", &with(ack(Side::G, 1, 1001), |x| x.window = 499), &[]);
    s.violates(Rule::RightEdge);
}

#[test]
fn inv05_an_edge_shown_to_g_that_r_does_not_have() {
    let mut s = Scene::delivered();
    s.see("R>", &ack(Side::R, 1001, 1), &[8; 500]);
    s.see(">G", &with(ack(Side::R, 1001, 1), |x| x.window = 501), &[8; 500]);
    s.violates(Rule::RightEdge);
}

#[test]
fn inv07_an_ack_that_goes_back() {
    let mut s = Scene::delivered();
    s.see(">R", &with(ack(Side::G, 1, 501), |x| x.window = 600), &[]);
    s.violates(Rule::AckOrder);
}

#[test]
fn inv08_a_tsval_that_goes_back() {
    let mut s = Scene::delivered();
    s.see("G>", &with(ack(Side::G, 1, 1001), |x| x.timestamps = Some((510, 100))), &[]);
    for (tsval, window) in [(510, 510), (500, 511)] {
        let tired = |x: &mut Segment| (x.timestamps, x.window) = (Some((tsval, 100)), window);
        s.see(">R", &with(ack(Side::G, 1, 1001), tired), &[]);
    }
    s.violates(Rule::TsvalOrder);
}

#[test]
fn inv09_a_tsval_nobody_sent() {
    let mut s = Scene::delivered();
    s.see(">R", &with(ack(Side::G, 1, 1001), |x| x.timestamps = Some((511, 100))), &[]);
    s.violates(Rule::TsvalOwner);
}

#[test]
fn inv10_a_sequence_number_nobody_reached() {
    let mut s = Scene::delivered();
    s.see(">R", &with(ack(Side::G, 5, 1001), |x| x.window = 510), &[]);
    s.violates(Rule::SequenceNumbers);
}

#[test]
fn inv11_an_ack_of_what_was_not_sent() {
    let mut s = Scene::delivered();
    s.see(">R", &ack(Side::G, 1, 1002), &[]);
    s.violates(Rule::AckNumbers);
}

#[test]
fn inv12_an_ack_to_g_of_what_was_not_on_the_wire() {
    let mut s = Scene::delivered();
    s.see("G>", &ack(Side::G, 1, 1001), b"answer");
    s.see(">G", &ack(Side::R, 1001, 7), &[]);
    s.violates(Rule::UnsentAck);
}

#[test]
fn inv13_bytes_beyond_gs_edge() {
    let mut s = Scene::delivered();
    let edge = 1001 + (500 << SCALE);
    s.see("R>", &ack(Side::R, edge - 50, 1), &[8; 100]);
    s.see(">G", &with(ack(Side::R, edge - 50, 1), |x| x.window = 499), &[8; 100]);
    s.violates(Rule::DeliveryFits);
}

#[test]
fn inv14_a_segment_of_g_sent_twice() {
    let mut s = Scene::delivered();
    s.see("G>", &ack(Side::G, 1, 1001), b"answer");
    s.see(">R", &with(ack(Side::G, 1, 1001), |x| x.window = 510), b"answer");
    s.see(">R", &with(ack(Side::G, 1, 1001), |x| x.window = 511), b"answer");
    s.violates(Rule::WireConformance);
}

#[test]
fn inv15_two_copies_of_what_r_sent_in_two_versions() {
    let mut s = Scene::promised();
    s.see("R>", &ack(Side::R, 1, 1), &[9; 1000]);
    s.see(">G", &with(ack(Side::R, 1, 1), |x| x.window = 499), &[7; 1000]);
    let accepted = s.check(&options());
    assert_eq!(accepted.findings, [], "either may be the right one");
    s.see(">G", &with(ack(Side::R, 1, 1), |x| x.window = 499), &[9; 1000]);
    s.violates(Rule::Immutable);
}

#[test]
fn inv16_a_segment_without_the_timestamps_agreed_on() {
    let mut s = Scene::delivered();
    s.see(">R", &with(ack(Side::G, 1, 1001), |x| x.timestamps = None), &[]);
    s.violates(Rule::OneEndpoint);
}

#[test]
fn inv17_a_segment_changed_although_offload_was_off() {
    let mut s = Scene::open();
    s.see("R>", &ack(Side::R, 1, 1), b"hello");
    s.see(">G", &with(ack(Side::R, 1, 1), |x| x.window = 499), b"hello");
    assert_eq!(s.check(&options()).findings, []);
    let findings = s.check(&Options { offload: false, ..options() }).findings;
    assert_eq!(findings[0].violation.rule, Rule::PurePass, "{findings:?}");
}

#[test]
fn inv18_a_storm_of_acks() {
    let mut s = Scene::delivered();
    for _ in 0..450 {
        s.see(">R", &with(ack(Side::G, 1, 1001), |x| x.window = 510), &[]);
    }
    s.violates(Rule::Liveness);
}

#[test]
fn inv19_an_answer_in_the_name_of_a_guest_that_is_silent() {
    let mut s = Scene::delivered();
    for minutes in 0..5 {
        s.ms += 60_000;
        s.see("R>", &ack(Side::R, 1000, 1), &[]);
        let findings = s.check(&options()).findings;
        assert_eq!(findings.len(), usize::from(minutes > 2), "after {minutes} minutes");
        s.see(">R", &with(ack(Side::G, 1, 1001), |x| x.window = 510), &[]);
    }
    s.violates(Rule::DeadGuest);
}

#[test]
fn inv21_an_rst_before_what_was_promised() {
    let mut s = Scene::promised();
    s.see("R>", &with(ack(Side::R, 1001, 1), |x| x.flags = TcpFlags::RST), &[]);
    s.see(">G", &with(ack(Side::R, 1001, 1), |x| x.flags = TcpFlags::RST), &[]);
    s.violates(Rule::FailStop);
}

#[test]
fn inv22_a_wrong_checksum_and_a_partial_one() {
    let mut s = Scene::promised();
    let (mut frame, ip, partial) = {
        let frame = build(&with(ack(Side::R, 1, 1), |x| x.window = 499), &[7; 1000]);
        let packet = Packet::parse(&frame).unwrap();
        let (ip, _) = packet.tcp().unwrap();
        let len = ip.end - u32::from(ip.payload_offset);
        let pseudo = pseudo_header(ip.version, ip.src, ip.dst, PROTOCOL_TCP, len);
        (frame.clone(), usize::from(ip.payload_offset), unfinished(&pseudo))
    };
    frame[ip + 16..ip + 18].copy_from_slice(&partial);
    s.frame(">G", frame.clone());
    assert_eq!(s.check(&options()).findings, []);
    frame[ip + 17] ^= 1;
    s.frame(">G", frame);
    s.violates(Rule::Checksums);
}

#[test]
fn inv23_a_segment_of_an_authenticated_connection_changed() {
    let mut s = Scene::open_with(&[19, 4, 0, 0], false);
    s.see("R>", &ack(Side::R, 1, 1), b"hello");
    s.see(">G", &with(ack(Side::R, 1, 1), |x| x.window = 499), b"hello");
    s.violates(Rule::ForeignOptions);
}

#[test]
fn inv24_a_congestion_mark_forgotten() {
    for ecn in [false, true] {
        let mut s = Scene::open_with(&[], ecn);
        s.see("R>", &with(ack(Side::R, 1, 1), |x| x.ecn = 3), b"hello");
        s.see(">R", &ack(Side::G, 1, 6), &[]);
        if ecn {
            s.violates(Rule::CongestionMarks);
        } else {
            assert_eq!(s.check(&options()).findings, []);
        }
    }
}

#[test]
fn inv24_a_congestion_mark_doubled_by_a_delivery_that_is_the_segment_unchanged() {
    let mut s = Scene::open_with(&[], true);
    let marked = with(ack(Side::R, 1, 1), |x| x.ecn = 3);
    s.see("R>", &marked, b"hello");
    s.see(">R", &with(ack(Side::G, 1, 6), |x| x.flags = x.flags | TcpFlags::ECE), &[]);
    s.see(">G", &marked, b"hello");
    s.violates(Rule::CongestionMarks);
}

#[test]
fn a_guest_that_takes_window_back_may_show_that_once_its_flow_passes() {
    let mut s = Scene::delivered();
    s.see("G>", &with(ack(Side::G, 1, 1001), |x| x.window = 400), &[]);
    s.see(">R", &with(ack(Side::G, 1, 1001), |x| x.window = 400), &[]);
    assert_eq!(s.check(&options()).findings, []);
    s.see(">R", &with(ack(Side::G, 1, 1001), |x| x.window = 390), &[]);
    s.violates(Rule::RightEdge);
}

#[test]
fn inv25_an_ack_of_what_no_receiver_takes() {
    let mut s = Scene::delivered();
    s.see("R>", &with(ack(Side::R, 1001, 1), |x| x.timestamps = Some((90, 500))), &[8; 500]);
    s.see(">R", &ack(Side::G, 1, 1501), &[]);
    s.violates(Rule::EarlyAcceptance);
    let mut s = Scene::delivered();
    let mut broken = build(&ack(Side::R, 1001, 1), &[8; 500]);
    *broken.last_mut().unwrap() ^= 1;
    s.frame("R>", broken);
    s.see(">R", &ack(Side::G, 1, 1501), &[]);
    s.violates(Rule::AckNumbers); // a broken segment was not sent at all
}

#[test]
fn captures_that_begin_or_end_in_the_middle_are_judged_where_both_run() {
    let whole = Scene::delivered();
    let part = Options { whole: false, ..options() };
    let mut late = whole.clone();
    late.guest.drain(..1); // R's SYN
    let report = late.check(&part);
    assert_eq!((report.findings.len(), report.flows), (0, 0), "{report:?}");
    assert_eq!(report.unknown, whole.check(&part).frames - 2);
    let mut short = whole.clone();
    short.see("G>", &ack(Side::G, 1, 1001), b"answer");
    short.see(">R", &with(ack(Side::G, 1, 1001), |x| x.window = 510), b"answer");
    short.guest.pop();
    assert_eq!(short.check(&part).findings, []);
    short.violates(Rule::SequenceNumbers); // for captures said to be whole
}

#[test]
fn an_attached_guest_is_read_before_the_net_that_answers_it_in_the_same_turn() {
    let mut s = Scene::delivered();
    s.see("G>", &ack(Side::G, 1, 1001), b"answer");
    s.see(">R", &with(ack(Side::G, 1, 1001), |x| x.window = 510), b"answer");
    s.see("R>", &ack(Side::R, 1001, 7), &[]);
    let turn = s.ms * 1_000_000;
    let of_turn = s.remote.iter_mut().rev().take(2).chain(s.guest.iter_mut().rev().take(1));
    of_turn.for_each(|(at, _)| *at = turn);
    assert_eq!(s.check(&Options { attached: true, ..options() }).findings, []);
    assert_eq!(s.check(&options()).findings.len(), 1);
}

#[test]
fn what_is_no_capture_is_refused_with_a_reason() {
    let good = pcap(&Scene::delivered().remote);
    let long = {
        let mut record = good.clone();
        record[24 + 12..24 + 16].copy_from_slice(&9999_u32.to_be_bytes());
        record
    };
    let cases = [
        (Vec::new(), "shorter than the header"),
        (b"\x7fELF and what else belongs to a program".to_vec(), "not a pcap file"),
        (pcap_of(DataLink::RAW, &[]), "not of Ethernet"),
        (good[..good.len() - 3].to_vec(), "cut off within record"),
        (long, "of 9999 bytes only"),
    ];
    for (bytes, reason) in cases {
        let result = check(Cursor::new(bytes), Cursor::new(good.clone()), &options());
        let error = format!("{:#}", result.unwrap_err());
        assert!(error.contains("remote side") && error.contains(reason), "{error}");
    }
    let cut = good[..good.len() - 3].to_vec();
    let part = Options { whole: false, ..options() };
    assert!(check(Cursor::new(cut), Cursor::new(good), &part).is_ok());
}

#[test]
fn nothing_in_a_capture_makes_the_checker_panic() {
    let mut drawn = 0;
    let mut below = |n: usize| {
        let mut bytes = [0; 8];
        Stream::of(1, true).fill(8 * drawn, &mut bytes);
        drawn += 1;
        usize::try_from(u64::from_le_bytes(bytes) % n as u64).unwrap()
    };
    let scene = Scene::delivered();
    let good = [pcap(&scene.remote), pcap(&scene.guest)];
    let (mut read, mut found) = (0, 0);
    for _ in 0..400 {
        let mut files = good.clone();
        for _ in 0..1 + below(4) {
            let file = &mut files[below(2)];
            let at = below(file.len());
            file[at] ^= 1 << below(8);
        }
        let [remote, guest] = files.map(Cursor::new);
        if let Ok(report) = check(remote, guest, &options()) {
            read += 1;
            found += usize::from(!report.findings.is_empty());
        }
    }
    assert!(read > 150 && found > 50, "{read} read, {found} with findings");
}

#[test]
fn a_guest_that_takes_no_super_segments_gets_them_in_pieces() {
    let off = Options { offload: false, ..options() };
    let mut s = Scene::open();
    let bytes: Vec<u8> = (0..3000_u32).map(|n| (n % 251) as u8).collect();
    s.see("R>", &ack(Side::R, 1, 1), &bytes);
    s.see(">G", &ack(Side::R, 1, 1), &bytes[..1448]);
    let mut wrong = s.clone();
    s.see(">G", &ack(Side::R, 1449, 1), &bytes[1448..]);
    assert_eq!(s.check(&off).findings, []);
    wrong.see(">G", &ack(Side::R, 1449, 1), &bytes[..1552]);
    assert_eq!(wrong.check(&off).findings[0].violation.rule, Rule::PurePass);
}
