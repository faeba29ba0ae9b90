//! FIELDS: header fields that the host is not responsible for pass unchanged.
//!
//! TTL, DSCP and flow label have values of the sender's own segments.
//!
//! Toward R (EMIT-R, COM-15): a segment of G with data leaves with the header that G wrote, except
//! ACK, window, echoed timestamps, ECE and SACK blocks: VLAN tags, TTL, DSCP, ECN, flow label, PSH,
//! CWR, URG, options and identification are G's. Its SACK blocks are not for R. Frames that the
//! host makes for R have a header of their own ([`made`]).
//!
//! Toward G (SNOOP-13, COM-04, COM-07, COM-09): segments with urgent data, or with options of TCP
//! or IP that the host does not understand, reach G with the TCP header that R wrote, except ACK,
//! window and timestamps. No such byte reaches G otherwise, or is acknowledged before G has it.
//!
//! Toward G (EMIT-G): the last byte that the host holds is pushed (SNOOP-12). No segment is longer
//! than G's MSS and its port's MTU allow (COM-20), and the virtio header describes it exactly
//! (COM-16, COM-17).
//!
//! With two captures the last of these are not judged: they contain neither virtio headers nor the
//! number of bytes that the host held when it made a segment.

mod made;

use std::collections::{BTreeSet, VecDeque};

use super::Ensure;
use crate::history::{History, Side};
use crate::out::{In, Out, is_foreign};
use crate::wire::{GSO_ECN, GSO_TCPV4, GSO_TCPV6, Ip, IpVersion, Tcp, TcpFlags};

/// Headers of G that are remembered: a capture has all of a turn before what left in it.
const REMEMBERED: usize = 256;
/// The shortest MSS that is kept to: 88 bytes, as Linux (`TCP_MIN_MSS`).
const MSS_MIN: u32 = 88;
/// Bytes of a TCP header without options.
const TCP: u32 = 20;

/// Place and length of a segment of G, and its header.
type Written = (u64, u32, Vec<u8>);

/// See the module doc.
#[derive(Clone, Debug, Default)]
pub(crate) struct Fields {
    /// TTL, DSCP and flow label of R's and G's packets.
    network: [BTreeSet<(u8, u8, u32)>; 2],
    /// Headers of G's segments with data, newest last, without the fields that the host may change.
    from_guest: VecDeque<Written>,
    /// TCP headers of R's segments that the host does not understand, likewise.
    from_net: VecDeque<Written>,
    /// Bytes that R has sent as urgent, or with such options, and not otherwise.
    foreign: Vec<(u64, u64)>,
}

impl Fields {
    /// A whole packet came from `from`, or from a machine that claims to be it.
    pub(crate) fn note_network(&mut self, from: Side, ip: &Ip) {
        let (fields, known) = (layer3(ip), &mut self.network[from as usize]);
        if !known.contains(&fields) {
            known.insert(fields);
        }
    }
}

/// TTL, DSCP and flow label.
fn layer3(ip: &Ip) -> (u8, u8, u32) {
    (ip.ttl, ip.tos >> 2, ip.flow_label)
}

pub(crate) fn on_in(h: &mut History, s: &In<'_>) {
    let (promised, acked) = (h.end(Side::R).ack_to, h.end(Side::G).acked);
    let fields = &mut h.quality.fields;
    fields.foreign.retain(|(_, to)| *to > acked);
    if s.from == Side::R {
        let foreign = is_foreign(s.ip, s.tcp);
        if foreign {
            remember(
                &mut fields.from_net,
                (s.seq, s.tcp.payload_len, kept_tcp(s.bytes, s.ip, s.tcp)),
            );
        }
        let known = &mut fields.foreign;
        if s.end > s.seq && !foreign {
            known.retain(|(from, to)| s.end <= *from || *to <= s.seq);
        } else if s.end > s.seq && s.counts && s.seq >= promised && known.len() < REMEMBERED {
            known.push((s.seq, s.end));
        }
    } else if s.tcp.payload_len > 0 || s.tcp.flags.fin() {
        let header = kept(s.bytes, s.ip, s.tcp);
        remember(&mut fields.from_guest, (s.seq, s.tcp.payload_len, header));
    }
}

fn remember(headers: &mut VecDeque<Written>, header: Written) {
    if headers.len() == REMEMBERED {
        headers.pop_front();
    }
    headers.push_back(header);
}

pub(crate) fn on_out(h: &History, o: &Out<'_>) -> Ensure {
    let other = TcpFlags::SYN | TcpFlags::RST;
    let made = o.gated && h.is_open() && h.was_on && !h.interrupted;
    if !made || h.is_about_earlier(o) || o.tcp.flags.intersects(other) {
        return Ok(());
    }
    let fields = layer3(o.ip);
    if !h.quality.fields.network[o.to.other() as usize].contains(&fields) {
        let (ttl, dscp, label) = fields;
        return Err(format!("to {:?}: TTL {ttl}, DSCP {dscp}, label {label}", o.to));
    }
    match o.to {
        Side::R => to_net(h, o),
        Side::G if o.is_verbatim() => foreign_to_guest(h, o),
        Side::G => to_guest(h, o),
    }
}

/// A segment that the host does not understand is R's, field by field.
pub(crate) fn foreign_to_guest(h: &History, o: &Out<'_>) -> Ensure {
    if !o.is_verbatim() || o.to != Side::G || !o.gated || o.waited || !h.is_open() {
        return Ok(());
    }
    let header = kept_tcp(o.bytes, o.ip, o.tcp);
    let from_net = &h.quality.fields.from_net;
    // A super-segment may go in pieces.
    let holds = |w: &Written| w.0 <= o.seq && o.end <= w.0 + u64::from(w.1);
    let piece = o.end > o.seq && from_net.iter().any(|w| holds(w) && w.1 > o.tcp.payload_len);
    let same = |w: &&Written| (w.0, w.1) == (o.seq, o.tcp.payload_len);
    let mut written = from_net.iter().rev().filter(same).peekable();
    let unknown = piece || h.offline && written.peek().is_none();
    match unknown || written.any(|w| w.2 == header) {
        true => Ok(()),
        false => Err("urgent, or of unknown options, to G, and not as R wrote it".to_owned()),
    }
}

fn to_net(h: &History, o: &Out<'_>) -> Ensure {
    let early = |at: u64| o.ack.is_some_and(|ack| ack > at) && h.end(Side::G).acked <= at;
    if h.quality.fields.foreign.iter().any(|(from, _)| early(*from)) {
        return Err(
            "bytes acknowledged before G has them: urgent, or of unknown options".to_owned()
        );
    }
    if o.tcp.payload_len == 0 && !o.tcp.flags.fin() {
        return made::bare(h, o);
    }
    if !o.tcp.options.sack.as_slice().is_empty() {
        return Err("a segment of G to R with SACK blocks, which are not for R".to_owned());
    }
    let header = kept(o.bytes, o.ip, o.tcp);
    let same = |w: &&Written| (w.0, w.1) == (o.seq, o.tcp.payload_len);
    let mut written = h.quality.fields.from_guest.iter().rev().filter(same).peekable();
    // A host may cut a super-segment before it is captured.
    let unknown = h.offline && written.peek().is_none();
    match unknown || written.any(|w| w.2 == header) {
        true => Ok(()),
        false if h.known.floods => made::data(h, o),
        false => Err("a segment to R with another header than G wrote".to_owned()),
    }
}

fn to_guest(h: &History, o: &Out<'_>) -> Ensure {
    if !o.is_stored() {
        return Ok(());
    }
    if h.quality.fields.foreign.iter().any(|(from, to)| o.seq < *to && *from < o.end) {
        return Err("bytes to G without the mark, or options, that R sent them with".to_owned());
    }
    if h.offline {
        return Ok(());
    }
    // The host does not hold bytes that it has not acknowledged: data of a parked flow that finds
    // no place again passes as R wrote it; twice, and G may have the first copy before the second
    // leaves (seed 41317).
    let held = o.end <= h.end(Side::R).ack_to && !o.waited;
    if held && o.end == h.in_order() && !o.tcp.flags.contains(TcpFlags::PSH) {
        return Err("the last byte there is was not pushed".to_owned());
    }
    sizes(h, o)
}

/// Length of a segment that the host makes, and its description in the virtio header.
fn sizes(h: &History, o: &Out<'_>) -> Ensure {
    let (hdr, v4) = (o.hdr, o.ip.version == IpVersion::V4);
    let (ip, default_mss, family) = if v4 { (20, 536, GSO_TCPV4) } else { (40, 1220, GSO_TCPV6) };
    let header = o.tcp.payload_offset;
    if hdr.is_gso() && hdr.gso_type & !GSO_ECN != family {
        return Err("a super-segment of the wrong family".to_owned());
    }
    if hdr.needs_csum() && hdr.hdr_len != 0 && u32::from(hdr.hdr_len) != header {
        return Err(format!("hdr_len {} for {header} bytes of headers", hdr.hdr_len));
    }
    let mss = h.end(o.to).offer.mss.map_or(default_mss, u32::from);
    let mtu = h.known.mtu.filter(|_| o.to == Side::G);
    let by_mtu = mtu.map_or(u32::MAX, |mtu| u32::from(mtu).saturating_sub(ip + TCP));
    let most = mss.min(by_mtu).max(MSS_MIN) - options_len(o);
    let segment = if hdr.is_gso() { hdr.gso_size.into() } else { o.tcp.payload_len };
    if segment > most {
        return Err(format!("{segment} bytes in a segment for {:?}, which takes {most}", o.to));
    }
    Ok(())
}

/// Bytes of TCP options.
fn options_len(o: &Out<'_>) -> u32 {
    o.tcp.payload_offset - u32::from(o.ip.payload_offset) - TCP
}

/// The same of the TCP header alone: the IP header may have lost a mark of congestion.
fn kept_tcp(bytes: &[u8], ip: &Ip, tcp: &Tcp) -> Vec<u8> {
    kept(bytes, ip, tcp).split_off(usize::from(ip.payload_offset) - 12)
}

/// The header without ACK, window, checksum, ECE, timestamps and SACK blocks, and without the MACs,
/// which are the next hop's.
fn kept(bytes: &[u8], ip: &Ip, tcp: &Tcp) -> Vec<u8> {
    let mut header = bytes[12..tcp.payload_offset as usize].to_vec();
    let at = usize::from(ip.payload_offset) - 12;
    header[at + 8..at + 12].fill(0);
    header[at + 13] &= !TcpFlags::ECE.0.to_be_bytes()[1];
    header[at + 14..at + 18].fill(0);
    let mut at = at + TCP as usize;
    loop {
        let kind_and_len = (header.get(at).copied(), header.get(at + 1).copied());
        let (kind, len) = match kind_and_len {
            (Some(1), _) => (1, 1),
            (Some(kind), Some(len)) if kind != 0 && len >= 2 => (kind, usize::from(len)),
            _ => return header,
        };
        let Some(option) = header.get_mut(at..at + len) else { return header };
        match kind {
            5 => option.fill(1), // as NOPs
            8 => option[2..].fill(0),
            _ => {}
        }
        at += len;
    }
}
