//! Frames of any content through the translation of accept offload (`core::wire::translate`).
//!
//! Input: both differences, two shifts, flags, then a frame. It is taken for one of G and for one
//! of R.

use nightporter_check::wire::Packet as Plain;
use nightporter_core::wire::icmp::Quoted;
use nightporter_core::wire::packet::{Ip, L4, Net, Packet};
use nightporter_core::wire::translate::Translation;

use crate::captures;
use crate::wire::plain_sum;

/// Bytes of an input before the frame.
const CHOICE_LEN: usize = 4 + 4 + 2 + 1;
/// Flag: the frame's checksum is not finished.
const PARTIAL: u8 = 1;
/// Flag: R's blocks are hidden from G.
const HIDES_SACK: u8 = 2;
/// The shifts that windows may have.
const SHIFTS: u8 = 15;

/// Judges one input.
pub fn run(data: &[u8]) {
    let Some((&[s0, s1, s2, s3, c0, c1, c2, c3, shift, other, flags], frame)) =
        data.split_first_chunk::<CHOICE_LEN>()
    else {
        return;
    };
    let Ok(Packet { net: Net::Ip(ip), .. }) = Packet::parse(frame) else { return };
    let t = Translation {
        seq: u32::from_be_bytes([s0, s1, s2, s3]),
        clock: u32::from_be_bytes([c0, c1, c2, c3]),
        shift_of_guest: shift % SHIFTS,
        shift_to_net: other % SHIFTS,
        shift_unknown: other % SHIFTS,
        hides_sack: flags & HIDES_SACK != 0,
    };
    let partial = flags & PARTIAL != 0;
    let from_guest = one_way(frame, &ip, partial, |f| t.from_guest(f, &ip, partial).is_ok());
    let to_guest = one_way(frame, &ip, partial, |f| t.to_guest(f, &ip, partial).is_ok());
    numbers_are_those(&t, frame, &from_guest, &to_guest);
    if from_guest != frame || to_guest != frame {
        there_and_back(t, frame, &ip, partial);
    }
    if ip.l4 == L4::Icmp
        && let Some(it) = Quoted::parse(frame, &ip)
    {
        let _ = one_way(frame, &ip, false, |f| {
            t.error_to_guest(f, &ip, &it);
            let seq = Quoted::parse(f, &ip).map(|it| it.seq);
            assert_eq!(seq, Some(t.ack_to_guest(it.seq)), "{it:?}");
            true
        });
    }
}

/// Frames of a real capture under two translations, and errors about them.
#[must_use]
pub fn seeds() -> Vec<Vec<u8>> {
    let numbers: [[u8; CHOICE_LEN]; 2] = [
        [0xff, 0xff, 0xff, 0, 0, 0, 0, 1, 7, 7, 0],
        [0x12, 0x34, 0x56, 0x78, 0x80, 0, 0, 0, 0, 9, 3],
    ];
    let frames = captures::frames().into_iter().map(|(_, frame)| frame);
    let errors = |frame: &Vec<u8>| crate::icmp::error(frame, 64, 1400, true);
    let all = frames.flat_map(|frame| errors(&frame).into_iter().chain([frame]));
    let all: Vec<Vec<u8>> = all.collect();
    numbers.iter().flat_map(|n| all.iter().map(|frame| [&n[..], frame].concat())).collect()
}

/// The frame after a translation that does not refuse it. Only layer 4 has changed, and of that the
/// sum has not, which a receiver verifies.
fn one_way(
    frame: &[u8],
    ip: &Ip,
    partial: bool,
    translate: impl FnOnce(&mut [u8]) -> bool,
) -> Vec<u8> {
    let mut out = frame.to_vec();
    if !translate(&mut out) {
        assert_eq!(out, frame, "a refused frame is as it was");
        return out;
    }
    let (start, end) = (usize::from(ip.payload_offset), ip.end as usize);
    assert_eq!((&out[..start], &out[end..]), (&frame[..start], &frame[end..]));
    let congruent = |frame: &[u8]| plain_sum(&frame[start..end]) % 0xffff;
    assert!(partial || congruent(&out) == congruent(frame), "the checksum follows");
    out
}

/// As a parser reads them that is not the core's.
fn numbers_are_those(t: &Translation, frame: &[u8], from_guest: &[u8], to_guest: &[u8]) {
    let Ok(before) = Plain::parse(frame) else { return };
    let Some((_, before)) = before.tcp() else { return };
    let read = |frame: &[u8]| Plain::parse(frame).ok().and_then(|p| p.tcp().map(|(_, tcp)| *tcp));
    if from_guest != frame {
        let after = read(from_guest).expect("still a segment");
        assert_eq!(after.seq.0, before.seq.0.wrapping_add(t.seq));
        assert_eq!((after.ack, after.flags), (before.ack, before.flags));
    }
    if to_guest != frame {
        let after = read(to_guest).expect("still a segment");
        let less = if before.flags.ack() { t.seq } else { 0 };
        assert_eq!(after.ack.0, before.ack.0.wrapping_sub(less));
        assert_eq!((after.seq, after.flags), (before.seq, before.flags));
    }
}

/// Without scales and hidden blocks nothing is lost. A checksum field of ones is the one that has
/// two forms, and no sender makes it.
fn there_and_back(t: Translation, frame: &[u8], ip: &Ip, partial: bool) {
    let there = Translation {
        seq: t.seq,
        clock: t.clock,
        shift_of_guest: t.shift_of_guest,
        shift_to_net: t.shift_of_guest,
        ..Translation::default()
    };
    let back = Translation { seq: t.seq.wrapping_neg(), clock: t.clock.wrapping_neg(), ..there };
    let both =
        [Translation::from_guest as fn(&_, &mut [u8], &Ip, bool) -> _, Translation::to_guest];
    for translate in both {
        let mut out = frame.to_vec();
        if translate(&there, &mut out, ip, partial).is_ok() {
            translate(&back, &mut out, ip, partial).expect("the same options");
        }
        let differing: Vec<_> = (0..out.len()).filter(|&at| out[at] != frame[at]).collect();
        let is_of_ones =
            |at: &[usize]| matches!(*at, [a, b] if b == a + 1 && frame[a..=b] == [0xff; 2]);
        assert!(differing.is_empty() || is_of_ones(&differing), "differ at {differing:?}");
    }
}
