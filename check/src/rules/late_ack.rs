//! LATE-ACK (LIFE-12, LIFE-13): R gets no promise from a flow that acknowledges late.
//!
//! - Nothing is acknowledged, and no edge is shown, beyond what R was shown before and what G has
//!   acknowledged and shown.
//! - No SACK block leaves above an ACK that is below bytes that are held in order: a sender takes
//!   the block for the loss of everything below it (RFC 8985).
//! - In either mode no ACK ends in a block that R was sent, or a sender believes that the block was
//!   dropped (`tcp_check_sack_reneging` of Linux 6.18); unless R has repeated the first bytes that
//!   are not acknowledged, which are there. A segment that fills a hole repeats nothing.
//!
//! The mode is asked of the engine, after each step: a step at whose end it is another is not
//! judged. With two captures the mode is not known.

use super::Ensure;
use crate::history::{History, Side};
use crate::out::{In, Out};
use crate::ranges::Ranges;

/// See the module doc.
#[derive(Clone, Debug, Default)]
pub(crate) struct LateAck {
    /// The flow acknowledged late after the last step.
    pub(crate) is_late: bool,
    /// It did so before that step.
    was_late: bool,
    /// A promise that left since then.
    wrong: Option<String>,
    /// The blocks that R was sent, as far as they are not acknowledged.
    blocks: Ranges,
    /// Those, and others that the host may spare: R has repeated bytes that it need not have.
    spared: Ranges,
}

impl LateAck {
    /// The flow acknowledged late at some time of the last step.
    pub(super) fn was_or_is_late(&self) -> bool {
        self.was_late || self.is_late
    }

    /// An ACK of `ack` may wait, as it would end in a block that R was sent.
    pub(super) fn may_wait(&self, ack: u64) -> bool {
        self.spared.has(ack)
    }
}

pub(crate) fn on_in(h: &mut History, s: &In<'_>) {
    let first = h.end(Side::R).ack_to;
    let known = first.max(h.end(Side::G).acked);
    // Before PROMPT-ACK notes it.
    let is_first = s.from == Side::R && s.counts && s.seq <= first && s.end > first;
    let (waiting, late) = (&h.quality.waiting, &mut h.quality.late);
    if is_first && (s.seq < known || waiting.may_have_of(s.seq, s.end)) {
        late.blocks = Ranges::default();
    }
    if is_first && (s.seq < known || waiting.must_have_of(s.seq, s.end)) {
        late.spared = Ranges::default();
    }
}

pub(crate) fn on_out(h: &History, o: &Out<'_>) -> Ensure {
    let Some(ack) = o.ack.filter(|_| is_about(h, o)) else { return Ok(()) };
    let late = &h.quality.late;
    if late.blocks.has(ack) && ack > h.end(Side::R).ack_to {
        return Err("an ACK that ends in a SACK block".to_owned());
    }
    let blocks = !o.tcp.options.sack.as_slice().is_empty();
    match late.is_late && blocks && h.quality.waiting.holds(ack, ack + 1) {
        true => Err("a SACK block above an ACK that is below held bytes".to_owned()),
        false => Ok(()),
    }
}

fn is_about(h: &History, o: &Out<'_>) -> bool {
    o.to == Side::R && o.gated && h.is_twinned() && !o.tcp.flags.rst() && !o.tcp.flags.syn()
}

/// `o` has left, and is not yet in the history.
pub(crate) fn after_out(h: &mut History, o: &Out<'_>) {
    let Some(ack) = o.ack.filter(|_| is_about(h, o)) else { return };
    let (r, g) = (h.end(Side::R), h.end(Side::G));
    let unit = 1 << h.shift(Side::G);
    let wrong = if ack > r.ack_to.max(g.acked) {
        Some(format!("{} bytes acknowledged early", ack - g.acked))
    } else if o.edge >= r.edge_to.max(g.edge_max) + unit {
        Some(format!("an edge {} bytes beyond G's", o.edge - g.edge_max))
    } else {
        None
    };
    let blocks = o.tcp.options.sack;
    let places = blocks
        .as_slice()
        .iter()
        .map(|b| (h.unwrap(Side::R, b.0, ack), h.unwrap(Side::R, b.1, ack)));
    let places: Vec<_> = places.filter(|(from, to)| *from > ack && to > from).collect();
    let late = &mut h.quality.late;
    late.wrong = late.wrong.take().or(wrong);
    for blocks in [&mut late.blocks, &mut late.spared] {
        blocks.forget_below(ack);
        places.iter().for_each(|(from, to)| blocks.insert(*from, *to));
    }
}

/// Between two steps of the host; `is_late`: the flow acknowledges late now.
pub(crate) fn on_step(h: &mut History, is_late: bool) -> Ensure {
    let twinned = h.is_twinned();
    let late = &mut h.quality.late;
    if !twinned {
        (late.blocks, late.spared) = Default::default();
    }
    let wrong = late.wrong.take();
    late.was_late = core::mem::replace(&mut late.is_late, is_late);
    match wrong.filter(|_| late.was_late && is_late && twinned) {
        Some(what) => Err(what),
        None => Ok(()),
    }
}
