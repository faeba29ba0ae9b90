//! ECHO: each end's report about the other's clock and about congestion reaches the other
//! unchanged.
//!
//! Toward R the timestamp echoed is TS.Recent exactly (RFC 7323 section 4.3; INV-09 requires that
//! it is not newer, this rule that it is not older). Toward G stored bytes carry the newest TSecr
//! and ECE of R. Otherwise G would measure the round trips of the first segment, and would not
//! reduce its window. R's SACK blocks reach G before any later bytes, because G would otherwise
//! repeat bytes that R has; and G gets no block that R did not send.
//!
//! The clock that either end is shown is the newest of the other (EMIT-R, EMIT-G, FLOOD-41).
//!
//! While the host sends for G, marks and SACK blocks of R answer the host (FLOOD-09): G gets
//! neither, except blocks for bytes behind a hole in its data (FLOOD-05). INV-14 requires that the
//! host obeys R's marks then.

use std::collections::VecDeque;

use super::Ensure;
use crate::history::{History, Side};
use crate::out::{In, Out, is_foreign};
use crate::wire::{Sack, Seq, TcpFlags};

/// SACK options of R that are remembered: a capture has all of a turn before what left in it.
const REMEMBERED: usize = 256;

/// The last reports.
#[derive(Clone, Debug, Default)]
pub(crate) struct Echoes {
    /// TS.Recent, as far as it is certain.
    recent: Option<u32>,
    /// TSecr and ECE of R's newest segment, if that certainly counted.
    from_net: Option<(Option<u32>, bool)>,
    /// The newest clock of R's and G's segments that certainly counted.
    newest: [Option<u32>; 2],
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
    /// G was not told yet.
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
    /// The clock of `side` may have gone half way round since (RFC 7323 section 5.5).
    pub(crate) fn forget(&mut self, side: Side) {
        match side {
            Side::R => *self = Self { newest: [None, self.newest[1]], ..Self::default() },
            Side::G => self.newest[1] = None,
        }
    }

    fn note_clock(&mut self, side: Side, tsval: u32) {
        let newest = &mut self.newest[side as usize];
        if newest.is_none_or(|before| before == 0 || Seq(tsval).ge(Seq(before))) {
            *newest = Some(tsval);
        }
    }

    /// `side` is shown an older clock of the other than that has shown.
    fn is_stale(&self, to: Side, shown: u32) -> bool {
        let newest = self.newest[to.other() as usize].filter(|newest| *newest != 0);
        newest.is_some_and(|newest| Seq(shown).lt(Seq(newest)))
    }
}

pub(crate) fn on_in(h: &mut History, s: &In<'_>) {
    let clock = s.tcp.options.timestamps.map(|ts| ts.tsval).filter(|_| !is_foreign(s.ip, s.tcp));
    if s.from == Side::G {
        clock.into_iter().for_each(|tsval| h.quality.echoes.note_clock(Side::G, tsval));
        return;
    }
    if !s.tcp.flags.ack() {
        return;
    }
    let (r, g) = (h.end(Side::R), h.end(Side::G));
    // R's FIN once more is a duplicate to the host, though R was not told; and an ACK from before
    // what the host has by now is out of its window (seed 40783).
    let next = r.ack_to.max(h.in_order());
    // Nor is one in the place of R's FIN, that R sends from there if its window ends there
    // (`tcp_acceptable_seq`): a receiver that has the FIN takes it for a keepalive (seed 75).
    let closed = r.fin.is_some_and(|fin| s.seq <= fin);
    let empty = s.end == s.seq && s.seq == next && !s.tcp.flags.fin() && !closed;
    let new = s.end > r.ack_to || empty;
    let in_window = s.seq <= r.edge_to && s.end <= r.edge_to && !r.reset;
    let heard = s.ack == r.acked && s.ack <= g.end;
    // The host may have no place yet for a connection that it accepts.
    let taken = !h.waits_for_guest || h.state.is_some();
    // A probe may not be answered for a guest that is long silent (INV-19).
    let sure = s.counts
        && taken
        && new
        && s.tcp.payload_len != 1
        && in_window
        && heard
        && s.tcp.options.understood();
    let clocks = s.tcp.options.timestamps;
    let ack_to = r.ack_to;
    // Bytes that the host has are a duplicate, though R does not know, and refused (RFC 7323
    // section 5.3).
    let again = s.end > s.seq && h.quality.waiting.holds(s.seq, s.end);
    let relayed = h.is_relayed;
    let blocks_sure = sure && h.is_twinned() && h.sack() && !h.known.floods;
    let bare = s.end == s.seq && !s.tcp.flags.fin();
    h.quality.echoes.sack.note(blocks_sure, bare, s.ack, s.tcp.options.sack);
    let echoes = &mut h.quality.echoes;
    echoes.from_net = sure.then(|| (clocks.map(|ts| ts.tsecr), s.tcp.flags.ece() && !relayed));
    if sure && !again {
        clock.into_iter().for_each(|tsval| echoes.note_clock(Side::R, tsval));
    }
    if let Some(ts) = clocks.filter(|_| sure && !again && s.seq <= ack_to)
        && echoes.recent.is_none_or(|before| before == 0 || Seq(ts.tsval).ge(Seq(before)))
    {
        echoes.recent = Some(ts.tsval);
    }
}

/// Between two steps of the host: R's marks are the host's affair once it sends for G.
pub(crate) fn on_step(h: &mut History) {
    if let Some((_, ece)) = h.quality.echoes.from_net.as_mut().filter(|_| h.is_relayed) {
        *ece = false;
    }
}

pub(crate) fn on_out(h: &History, o: &Out<'_>) -> Ensure {
    let other = TcpFlags::SYN | TcpFlags::RST;
    let on = h.was_on && h.is_on() && !h.interrupted && !h.past && h.is_open();
    if !o.gated || !on || o.tcp.flags.intersects(other) {
        return Ok(());
    }
    let echoes = &h.quality.echoes;
    let clocks = o.tcp.options.timestamps.filter(|_| h.timestamps());
    let echoed = clocks.map(|ts| ts.tsecr);
    if let Some(ts) = clocks.filter(|ts| !o.waited && echoes.is_stale(o.to, ts.tsval))
        && h.is_twinned()
    {
        return Err(format!(
            "clock {} to {:?}, the other end has shown a newer one",
            ts.tsval, o.to
        ));
    }
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
    if h.is_relayed && h.is_twinned() && !o.waited && o.tcp.flags.ece() {
        return Err("ECE to G, for which the host sends".to_owned());
    }
    // If an R has acknowledged bytes that G never sent, nothing more of it is read (seed 85563).
    let lies = h.end(Side::R).acked.max(h.end(Side::R).lied) > h.end(Side::G).end;
    let Some((ts, ece)) = echoes.from_net.filter(|_| o.is_stored() && !o.waited && !lies) else {
        return Ok(());
    };
    if echoed.is_some() && ts.is_some() && echoed != ts {
        return Err(format!("echo of {echoed:?} to G, R said {ts:?}"));
    }
    if h.known.ecn && ece != o.tcp.flags.ece() {
        return Err(format!("ECE of R is {ece}, toward G it is {}", !ece));
    }
    Ok(())
}

fn sack_to_guest(h: &History, o: &Out<'_>) -> Ensure {
    let (sack, blocks) = (&h.quality.echoes.sack, o.tcp.options.sack);
    if o.waited {
        return Ok(()); // made before R said more
    }
    // With congestion offload H reports its own holes to G (FLOOD-05), and R does not have those
    // bytes.
    let end = h.end(Side::R).end_to;
    let is_sent = |block: &(Seq, Seq)| h.unwrap(Side::G, block.0, end) < end;
    if h.is_relayed && h.is_twinned() && blocks.as_slice().iter().any(is_sent) {
        return Err("SACK blocks to G of what the host has sent for it".to_owned());
    }
    if !blocks.as_slice().is_empty() && !sack.said.contains(&blocks) && !h.known.floods {
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
