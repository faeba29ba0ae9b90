//! Every edit against a full recomputation (COM-14, COM-15, P-09).

use super::*;
use crate::wire::packet::{Packet, SackBlocks, Timestamps};
use crate::wire::samples::{Segment, arb_segment, arb_u32, v4_segment, v6_segment};
use proptest::prelude::*;

#[derive(Clone, Copy, Debug)]
enum Edit {
    Seq(u32),
    Ack(u32),
    Window(u16),
    Flags(u16),
    Timestamps(u32, u32),
    NopOutSack,
    Ecn(u8),
}

impl Edit {
    fn apply(self, edit: &mut TcpEdit<'_>) {
        match self {
            Self::Seq(n) => edit.set_seq(Seq(n)),
            Self::Ack(n) => edit.set_ack(Seq(n)),
            Self::Window(n) => edit.set_window(n),
            Self::Flags(n) => edit.set_flags(TcpFlags(n)),
            Self::Timestamps(val, ecr) => edit.set_timestamps(val, ecr),
            Self::NopOutSack => edit.nop_out_sack(),
            Self::Ecn(n) => edit.set_ecn(n),
        };
    }

    /// The expected parse after the edit, from the one before.
    fn expect(self, ip: &mut Ip, tcp: &mut Tcp) {
        match self {
            Self::Seq(n) => tcp.seq = Seq(n),
            Self::Ack(n) => tcp.ack = Seq(n),
            Self::Window(n) => tcp.window = n,
            Self::Flags(n) => tcp.flags = TcpFlags(n & 0x1ff),
            Self::Timestamps(tsval, tsecr) => {
                let there = tcp.options.timestamps.is_some();
                tcp.options.timestamps = there.then_some(Timestamps { tsval, tsecr });
            }
            Self::NopOutSack => {
                tcp.options.sack = SackBlocks::default();
                tcp.options.sack_offset = 0;
            }
            Self::Ecn(n) => ip.tos = ip.tos & !3 | n & 3,
        }
    }
}

fn arb_edit() -> impl Strategy<Value = Edit> {
    prop_oneof![
        arb_u32().prop_map(Edit::Seq),
        arb_u32().prop_map(Edit::Ack),
        any::<u16>().prop_map(Edit::Window),
        // Never SYN: it would change which options are on the whitelist.
        any::<u16>().prop_map(|n| Edit::Flags(n & !2)),
        (arb_u32(), arb_u32()).prop_map(|(a, b)| Edit::Timestamps(a, b)),
        Just(Edit::NopOutSack),
        any::<u8>().prop_map(Edit::Ecn),
    ]
}

/// Timestamps and SACK blocks after any number of NOPs, hence at any alignment.
fn arb_options() -> impl Strategy<Value = Vec<u8>> {
    let option = |kind: u8, body: Vec<u8>| {
        let len = u8::try_from(2 + body.len()).expect("an option's length");
        [&[kind, len][..], &body].concat()
    };
    let ts = proptest::collection::vec(any::<u8>(), 8).prop_map(move |b| option(8, b));
    let sack = (1..3usize)
        .prop_flat_map(|n| proptest::collection::vec(any::<u8>(), n * 8))
        .prop_map(move |b| option(5, b));
    let pick = prop_oneof![
        ts.clone().prop_map(|t| vec![t]),
        sack.clone().prop_map(|s| vec![s]),
        (ts.clone(), sack.clone()).prop_map(|(t, s)| vec![t, s]),
        (sack, ts).prop_map(|(s, t)| vec![s, t]),
    ];
    (pick, 0..4usize, 0..3usize).prop_map(|(options, before, between)| {
        let mut out = vec![1; before];
        out.extend(options.join(&vec![1; between][..]));
        out.resize(out.len().next_multiple_of(4), 1);
        out
    })
}

fn check(s: &Segment, mut frame: Vec<u8>, edits: &[Edit], partial: bool) {
    let l4 = s.l4_at();
    if partial {
        frame[l4 + 16..l4 + 18].copy_from_slice(&[0xab, 0xcd]);
    }
    let before = Packet::parse(&frame).unwrap();
    let (ip, tcp) = before.tcp().unwrap();
    let (mut want_ip, mut want_tcp) = (*ip, *tcp);
    let mut edited = frame.clone();
    let mut edit = TcpEdit::new(&mut edited, ip, tcp, partial);
    for e in edits {
        e.apply(&mut edit);
        e.expect(&mut want_ip, &mut want_tcp);
    }
    let after = Packet::parse(&edited).unwrap();
    let (ip, tcp) = after.tcp().unwrap();
    assert_eq!(tcp, &want_tcp);
    want_ip.l4 = ip.l4;
    assert_eq!(ip, &want_ip);
    assert_eq!(edited.len(), frame.len(), "COM-15");
    assert_eq!(after.eth, before.eth);

    let mut full = edited.clone();
    s.put_checksums(&mut full);
    if partial {
        assert_eq!(edited[l4 + 16..l4 + 18], [0xab, 0xcd], "the pseudo-header's sum stays");
        full[l4 + 16..l4 + 18].copy_from_slice(&[0xab, 0xcd]);
    }
    assert_eq!(edited, full, "every other byte, and both checksums");
}

proptest! {
    #[test]
    fn p_09_edits_leave_the_frame_a_full_recomputation_would(
        s in arb_segment(),
        edits in proptest::collection::vec(arb_edit(), 1..8),
        partial in any::<bool>(),
    ) {
        check(&Segment { flags: s.flags & !TcpFlags::SYN, ..s.clone() }, {
            Segment { flags: s.flags & !TcpFlags::SYN, ..s.clone() }.frame()
        }, &edits, partial);
    }

    #[test]
    fn p_09_options_at_any_alignment_are_edited_as_well(
        options in arb_options(),
        edits in proptest::collection::vec(arb_edit(), 1..8),
        v4 in any::<bool>(),
        partial in any::<bool>(),
        payload in proptest::collection::vec(any::<u8>(), 0..9),
    ) {
        let s = if v4 { v4_segment(&payload) } else { v6_segment(&payload) };
        check(&s, s.frame_with_options(&options), &edits, partial);
    }
}

#[test]
fn an_edit_that_changes_nothing_writes_nothing() {
    let s = v4_segment(b"payload");
    let mut frame = s.frame();
    // With a checksum that is wrong, so that any recomputation would show.
    frame[s.l4_at() + 16] ^= 0x55;
    frame[14 + 10] ^= 0x55;
    let before = frame.clone();
    let packet = Packet::parse(&frame).unwrap();
    let (ip, tcp) = packet.tcp().unwrap();
    TcpEdit::new(&mut frame, ip, tcp, false)
        .set_seq(tcp.seq)
        .set_ack(tcp.ack)
        .set_window(tcp.window)
        .set_flags(tcp.flags)
        .set_timestamps(10, 20)
        .nop_out_sack()
        .set_ecn(ip.tos);
    assert_eq!(frame, before);
}

#[test]
fn reserved_bits_and_header_length_survive_new_flags() {
    let s = v4_segment(b"");
    let mut frame = s.frame();
    frame[s.l4_at() + 12] |= 0x0e;
    s.put_checksums(&mut frame);
    let packet = Packet::parse(&frame).unwrap();
    let (ip, tcp) = packet.tcp().unwrap();
    TcpEdit::new(&mut frame, ip, tcp, false).set_flags(TcpFlags::ALL);
    assert_eq!(frame[s.l4_at() + 12..][..2], [0x8f, 0xff]);
}
