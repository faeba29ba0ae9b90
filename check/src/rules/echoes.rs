//! ECHO: what one end says of the other's clock and of congestion reaches it as it was said.
//!
//! Toward R the timestamp echoed is TS.Recent exactly (RFC 7323 section 4.3; INV-09 says it is not
//! newer, this that it is not older). Toward G stored bytes carry the newest TSecr and ECE of R,
//! or G's round trips would be those of the first segment, and its window would not be reduced.
//! R's SACK blocks reach G before any bytes that come after them, or G would send again what R has;
//! and none that R did not say.

use std::collections::VecDeque;

use super::Ensure;
use crate::history::{History, Side};
use crate::out::{In, Out};
use crate::wire::{Sack, Seq, TcpFlags};

/// SACK options of R that are remembered: a capture has all of a turn before what left in it.
const REMEMBERED: usize = 256;

/// What was said last.
#[derive(Clone, Debug, Default)]
pub(crate) struct Echoes {
    /// TS.Recent, as far as it is certain.
    recent: Option<u32>,
    /// TSecr and ECE of R's newest segment, if that certainly counted.
    from_net: Option<(Option<u32>, bool)>,
    sack: SackOfNet,
}

/// R's SACK blocks.
#[derive(Clone, Debug, Default)]
struct SackOfNet {
    /// Those of its last segments, newest last.
    said: VecDeque<Sack>,
    /// R's newest ACK, and the blocks that came with it, if it is certain that they counted.
    ack: u64,
    newest: Option<Sack>,
    /// G has yet to hear of them.
    due: bool,
}

impl SackOfNet {
    /// `sure`: a segment with this certainly counted. One without data goes on to G by itself, and
    /// may get lost like any.
    fn note(&mut self, sure: bool, bare: bool, ack: u64, blocks: Sack) {
        let (moved, any) = (ack > self.ack, !blocks.as_slice().is_empty());
        self.ack = self.ack.max(ack);
        if any && self.said.back() != Some(&blocks) {
            if self.said.len() == REMEMBERED {
                self.said.pop_front();
            }
            self.said.push_back(blocks);
        }
        if sure && moved {
            (self.newest, self.due) = (Some(blocks), any && !bare);
        } else if sure && any && self.newest.is_some_and(|newest| newest != blocks) {
            (self.newest, self.due) = (Some(blocks), !bare);
        } else if sure && any && bare {
            self.due = false; // it brings the blocks that are known (seed 43601)
        } else if !sure && (moved || any) {
            (self.newest, self.due) = (None, false);
        }
    }
}

impl Echoes {
    /// R's clock may have gone half way round since (RFC 7323 section 5.5).
    pub(crate) fn forget(&mut self) {
        *self = Self::default();
    }
}

pub(crate) fn on_in(h: &mut History, s: &In<'_>) {
    if s.from == Side::G || !s.tcp.flags.ack() {
        return;
    }
    let (r, g) = (h.end(Side::R), h.end(Side::G));
    // R's FIN once more is a duplicate to the host, though R was not told; and an ACK from before
    // what the host has by now is out of its window (seed 40783).
    let next = r.ack_to.max(h.in_order());
    let empty = s.end == s.seq && s.seq == next && !s.tcp.flags.fin();
    let new = s.end > r.ack_to || empty;
    let in_window = s.seq <= r.edge_to && s.end <= r.edge_to && !r.reset;
    let heard = s.ack == r.acked && s.ack <= g.end;
    // A probe may not be answered for a guest that is long silent (INV-19).
    let sure = s.counts
        && new
        && s.tcp.payload_len != 1
        && in_window
        && heard
        && s.tcp.options.understood();
    let clocks = s.tcp.options.timestamps;
    let ack_to = r.ack_to;
    // What the host has, though R was not told, is a duplicate, and refused (RFC 7323 section 5.3).
    let again = s.end > s.seq && h.quality.waiting.holds(s.seq, s.end);
    let blocks_sure = sure && h.is_twinned() && h.sack() && !h.floods;
    let bare = s.end == s.seq && !s.tcp.flags.fin();
    h.quality.echoes.sack.note(blocks_sure, bare, s.ack, s.tcp.options.sack);
    let echoes = &mut h.quality.echoes;
    echoes.from_net = sure.then(|| (clocks.map(|ts| ts.tsecr), s.tcp.flags.ece()));
    if let Some(ts) = clocks.filter(|_| sure && !again && s.seq <= ack_to)
        && echoes.recent.is_none_or(|before| before == 0 || Seq(ts.tsval).ge(Seq(before)))
    {
        echoes.recent = Some(ts.tsval);
    }
}

pub(crate) fn on_out(h: &History, o: &Out<'_>) -> Ensure {
    let other = TcpFlags::SYN | TcpFlags::RST;
    let on = h.was_on && h.is_on() && !h.interrupted && !h.past && h.is_open();
    if !o.gated || !on || o.tcp.flags.intersects(other) {
        return Ok(());
    }
    let echoes = &h.quality.echoes;
    let echoed = o.tcp.options.timestamps.filter(|_| h.timestamps()).map(|ts| ts.tsecr);
    if o.to == Side::R {
        return match (echoed, echoes.recent) {
            // A TS.Recent of 0 is void: any other may replace it (`tcp_paws_check`).
            (Some(ts), Some(recent)) if recent != 0 && Seq(ts).lt(Seq(recent)) => {
                Err(format!("echo of {ts} to R, {recent} is due"))
            }
            _ => Ok(()),
        };
    }
    sack_to_guest(h, o)?;
    let Some((ts, ece)) = echoes.from_net.filter(|_| o.is_stored() && !o.waited) else {
        return Ok(());
    };
    if echoed.is_some() && ts.is_some() && echoed != ts {
        return Err(format!("echo of {echoed:?} to G, R said {ts:?}"));
    }
    if h.ecn && !h.floods && ece != o.tcp.flags.ece() {
        return Err(format!("ECE of R is {ece}, toward G it is {}", !ece));
    }
    Ok(())
}

fn sack_to_guest(h: &History, o: &Out<'_>) -> Ensure {
    let (sack, blocks) = (&h.quality.echoes.sack, o.tcp.options.sack);
    if o.waited {
        return Ok(()); // made before R said more
    }
    // With congestion offload H tells G of what it misses itself (FLOOD-05).
    if !blocks.as_slice().is_empty() && !sack.said.contains(&blocks) && !h.floods {
        return Err("SACK blocks to G that R did not send".to_owned());
    }
    match sack.due && o.is_stored() && h.is_twinned() && sack.newest != Some(blocks) {
        true => Err("bytes to G before R's SACK blocks".to_owned()),
        false => Ok(()),
    }
}

/// `o` has left, and is not yet in the history.
pub(crate) fn after_out(h: &mut History, o: &Out<'_>) {
    let sack = &mut h.quality.echoes.sack;
    if o.to == Side::G && sack.newest == Some(o.tcp.options.sack) {
        sack.due = false;
    }
}
