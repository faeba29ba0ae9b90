//! Accept offload: connections that the host has accepted for a guest.
//!
//! R knows other numbers of G than G does. Frames between the host and G are brought into R's
//! numbers before anything judges them, by the SYN-ACKs of both (ACC-06). So all rules hold
//! as for any connection; and a host that translates wrong is caught by them.

use std::collections::BTreeMap;

use etherparse::checksum::Sum16BitWords;

use nightporter_core::time::{Duration, Instant};
use nightporter_core::wire::virtio_net::VirtioNetHdr;

use crate::history::{History, Side};
use crate::tap::{FlowName, Tap, Tapped, fingerprint};
use crate::wire::{
    Ip, PROTOCOL_TCP, Tcp, TcpFlags, ipv4_header_ok, pseudo_header, tcp_checksum_ok, written,
};

/// A client waits for so long (Linux, `tcp_syn_retries`, less the last wait).
const WAITED_FOR: Duration = Duration::from_secs(63);

/// Both ends are asked after this silence (Linux, `tcp_keepalive_time`).
const ASKED_AFTER: Duration = Duration::from_secs(7200);

/// The connections of all guests that the host has accepted, as far as they are not over.
#[derive(Debug, Default)]
pub(crate) struct Answers(BTreeMap<FlowName, Answered>);

/// The host's SYN-ACK, and what G's own says.
#[derive(Clone, Debug)]
struct Answered {
    /// The host's SYN-ACK, until R has taken it: it may take another one of G.
    untaken: Option<(VirtioNetHdr, Vec<u8>)>,
    shown: Offer,
    /// R's first byte, by which both know the connection.
    first: u32,
    scale_of_net: u8,
    of_guest: Option<Offer>,
    /// When G was first sent the host's SYN.
    asked_at: Option<Instant>,
}

/// Numbers of a SYN-ACK.
#[derive(Clone, Copy, Debug)]
struct Offer {
    isn: u32,
    clock: u32,
    scale: Option<u8>,
}

impl Offer {
    fn of(tcp: &Tcp) -> Self {
        let o = &tcp.options;
        let clock = o.timestamps.map_or(0, |ts| ts.tsval);
        Self { isn: tcp.seq.0, clock, scale: o.window_scale.map(|shift| shift.min(14)) }
    }
}

/// The frame, as the history of its flow is to know it.
pub(crate) enum Told {
    /// As it is.
    AsItIs,
    /// In R's numbers.
    InNumbersOfNet(Vec<u8>),
    /// Not yet: the host has answered R's SYN.
    Answers,
    /// Before it came the host's SYN-ACK, which R takes for G's answer.
    Accepts(VirtioNetHdr, Vec<u8>),
    /// Not at all, but that G accepts.
    GuestAccepts,
    /// Not at all: it is about G's own handshake with the host.
    Nothing,
}

impl Answers {
    /// A segment of a flow at a tap.
    pub(crate) fn tell(&mut self, h: &mut History, t: &Tapped<'_>, (ip, tcp): (&Ip, &Tcp)) -> Told {
        let is_answer = tcp.flags.contains(TcpFlags::SYN | TcpFlags::ACK);
        if t.tap == Tap::ToNet && is_answer {
            return self.on_answer_to_net(h, t, (ip, tcp));
        }
        let Some(it) = self.0.get_mut(&h.name) else { return Told::AsItIs };
        if it.untaken.is_some() {
            let is_syn = tcp.flags.syn() && !tcp.flags.ack();
            // In a stranger's SYN, who knows the connection's name, it has another one (ACC-13).
            h.was_given_up |= t.forged && is_syn && t.tap == Tap::FromNet;
            let takes = t.tap == Tap::FromNet && tcp.flags.ack() && !tcp.flags.rst();
            let taken = if takes && tcp.ack.0 == it.shown.isn.wrapping_add(1) {
                it.untaken.take()
            } else {
                None
            };
            return taken.map_or(Told::AsItIs, |(hdr, bytes)| Told::Accepts(hdr, bytes));
        }
        if it.of_guest.is_some() && h.state.is_none() {
            self.0.remove(&h.name); // the host knows of it no more
            return Told::AsItIs;
        }
        match t.tap {
            Tap::ToNet if tcp.flags.rst() && it.is_given_up(t.at, h) => {
                h.on_given_up();
                Told::AsItIs
            }
            Tap::FromNet | Tap::ToNet => Told::AsItIs,
            Tap::FromGuest(_) if t.forged => Told::AsItIs,
            // G knows nothing of it: the host had no place for it, or has forgotten it.
            Tap::FromGuest(_) if it.asked_at.is_none() && !tcp.flags.syn() => {
                if tcp.flags.rst() {
                    h.on_given_up();
                }
                Told::AsItIs
            }
            Tap::FromGuest(_) => {
                if tcp.flags.syn() && !(is_answer && tcp.ack.0 == it.first) {
                    self.0.remove(&h.name); // G knows of another connection
                    return Told::AsItIs;
                }
                if it.asked_at.is_none() {
                    return Told::AsItIs; // it answers an earlier copy of R's SYN
                }
                let Some(guest) = it.of_guest else { return it.on_word(h, tcp, is_answer) };
                if is_answer {
                    h.quality.news.on_question();
                    return Told::Nothing; // the host repeats its third ACK
                }
                Told::InNumbersOfNet(it.said_by_guest(guest, t, ip, tcp))
            }
            Tap::ToGuest(_) if tcp.flags.syn() && !tcp.flags.ack() => {
                let is_its = tcp.seq.0.wrapping_add(1) == it.first;
                if !is_its || it.of_guest.is_some() && !t.waited {
                    return Told::AsItIs;
                }
                it.asked_at.get_or_insert(t.at);
                Told::Nothing
            }
            Tap::ToGuest(_) => match it.of_guest {
                Some(guest) => Told::InNumbersOfNet(it.told_guest(guest, t, ip, tcp)),
                None if tcp.seq.0 == it.first && !h.end(Side::R).reset => Told::AsItIs,
                None => Told::Nothing, // an RST for a connection before this one
            },
        }
    }

    fn on_answer_to_net(&mut self, h: &History, t: &Tapped<'_>, (ip, tcp): (&Ip, &Tcp)) -> Told {
        let is_known = |it: &Answered| it.shown.isn == tcp.seq.0 && it.first == tcp.ack.0;
        if self.0.get(&h.name).is_some_and(is_known) {
            return Told::Nothing; // once more
        }
        let (r, print) = (h.end(Side::R), fingerprint(t.bytes, ip));
        if r.unchanged.iter().any(|f| f.0 == print) || r.came_out.contains(&print) {
            return Told::AsItIs; // G has made it
        }
        let scale_of_net = h.scale_of_syn().unwrap_or(0);
        let shown = Offer::of(tcp);
        let untaken = Some((t.hdr, t.bytes.to_vec()));
        let first = tcp.ack.0;
        let it = Answered { untaken, shown, first, scale_of_net, of_guest: None, asked_at: None };
        self.0.insert(h.name, it);
        Told::Answers
    }
}

impl Answered {
    /// G has not accepted, and the host need wait no longer (ACC-09).
    /// Or nobody answers any more (ACC-08).
    fn is_given_up(&self, now: Instant, h: &History) -> bool {
        let asked = |at: Instant| now.since(at) >= WAITED_FOR;
        let unasked = now.since(h.heard_from_guest) >= ASKED_AFTER;
        if self.of_guest.is_some() { unasked } else { self.asked_at.is_some_and(asked) }
    }

    /// G speaks before it has accepted.
    fn on_word(&mut self, h: &mut History, tcp: &Tcp, is_answer: bool) -> Told {
        let offer = Offer::of(tcp);
        let is_blind = self.shown.clock != 0 && offer.clock == 0;
        if is_answer && is_blind {
            h.on_refused(); // nobody can add a clock to G's segments
        } else if is_answer && !h.end(Side::R).reset {
            self.of_guest = Some(offer);
            h.on_accepted(tcp.window.into());
            return Told::GuestAccepts;
        } else if tcp.flags.contains(TcpFlags::RST | TcpFlags::ACK) && tcp.ack.0 == self.first {
            h.on_refused();
        }
        Told::Nothing
    }

    fn said_by_guest(&self, guest: Offer, t: &Tapped<'_>, ip: &Ip, tcp: &Tcp) -> Vec<u8> {
        let (shown, both) = (self.shown.scale.unwrap_or(0), guest.scale.is_some());
        let own = guest.scale.filter(|_| both).unwrap_or(0);
        let window = u32::from(tcp.window) << own >> shown;
        edited(t, ip, |header, options| {
            add(header, 4, self.shown.isn.wrapping_sub(guest.isn));
            set16(header, 14, window.min(0xffff));
            each_option(options, |kind, body| {
                if kind == 8 && body.len() == 8 {
                    add(body, 0, self.shown.clock.wrapping_sub(guest.clock));
                }
            });
        })
    }

    fn told_guest(&self, guest: Offer, t: &Tapped<'_>, ip: &Ip, tcp: &Tcp) -> Vec<u8> {
        let unscaled = self.shown.scale.is_some() && guest.scale.is_none();
        let shift = if unscaled { self.scale_of_net } else { 0 };
        let (seq, clock) =
            (self.shown.isn.wrapping_sub(guest.isn), self.shown.clock.wrapping_sub(guest.clock));
        edited(t, ip, |header, options| {
            if !tcp.flags.ack() {
                return;
            }
            add(header, 8, seq);
            set16(header, 14, u32::from(tcp.window) >> shift);
            each_option(options, |kind, body| match kind {
                8 if body.len() == 8 => add(body, 4, clock),
                5 => (0..body.len() / 4).for_each(|n| add(body, n * 4, seq)),
                _ => {}
            });
        })
    }
}

/// The frame with another TCP header. If its checksum was right it is so again.
fn edited(t: &Tapped<'_>, ip: &Ip, edit: impl FnOnce(&mut [u8], &mut [u8])) -> Vec<u8> {
    let mut bytes = t.bytes.to_vec();
    let whole = ipv4_header_ok(t.bytes, ip) && tcp_checksum_ok(t.bytes, ip);
    let start = usize::from(ip.payload_offset);
    let len = usize::from(bytes[start + 12] >> 4) * 4;
    let (header, options) = bytes[start..start + len].split_at_mut(20);
    edit(header, options);
    if whole && !t.hdr.needs_csum() {
        bytes[start + 16..start + 18].fill(0);
        let segment = start..ip.end as usize;
        let pseudo = pseudo_header(
            ip.version,
            ip.src,
            ip.dst,
            PROTOCOL_TCP,
            u32::try_from(segment.len()).unwrap_or(0),
        );
        let sum: Sum16BitWords = pseudo.add_slice(&bytes[segment]);
        bytes[start + 16..start + 18].copy_from_slice(&written(&sum));
    }
    bytes
}

fn add(bytes: &mut [u8], at: usize, what: u32) {
    let field: &mut [u8] = &mut bytes[at..at + 4];
    let before = field.iter().fold(0, |n: u32, byte| n << 8 | u32::from(*byte));
    field.copy_from_slice(&before.wrapping_add(what).to_be_bytes());
}

fn set16(bytes: &mut [u8], at: usize, what: u32) {
    let [.., high, low] = what.to_be_bytes();
    bytes[at..at + 2].copy_from_slice(&[high, low]);
}

/// Kind and content of each option, to the end or to a length that cannot be.
fn each_option(mut options: &mut [u8], mut visit: impl FnMut(u8, &mut [u8])) {
    while let Some(&kind) = options.first() {
        let len = match kind {
            0 => return,
            1 => 1,
            _ => usize::from(options.get(1).copied().unwrap_or(0)),
        };
        if (kind > 1 && len < 2) || len > options.len() {
            return;
        }
        let (option, rest) = options.split_at_mut(len);
        if kind > 1 {
            visit(kind, &mut option[2..]);
        }
        options = rest;
    }
}
