//! INV-03, no orphan ACK: between any two steps every byte that was acknowledged to R is either
//! acknowledged by G or in the store, and it is the byte that R sent.
//!
//! The ACKs are those at the tap, not those that the engine remembers. Newly promised bytes are
//! read each time, all of them now and then; this takes most of the time of a run.

use nightporter_core::engine::Engine;
use nightporter_core::tcp::flow::{Flow, State};

use super::Ensure;
use crate::history::{BASE, History, Side, offset};
use crate::wire::Seq;

/// The bytes that were found in the store.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Held {
    /// All below this.
    read_to: u64,
}

pub(crate) fn on_step(
    h: &mut History,
    engine: &Engine<'_>,
    flow: Option<&Flow>,
    all: bool,
) -> Ensure {
    if h.broken || h.opaque || h.known.hostile[Side::G as usize] || !h.is_open() || !h.was_on {
        return Ok(());
    }
    let Some(promised) = h.promised() else { return Ok(()) };
    let g_acked = h.end(Side::G).acked;
    let Some(flow) =
        flow.filter(|f| matches!(f.state(), State::Opening | State::On | State::Drain))
    else {
        // G itself ended the connection, or H gave it up; R's RST is on its way, and INV-21 waits
        // for it.
        h.must_tell_r = flow.is_some_and(|f| f.state() == State::Abort);
        h.broken = h.must_tell_r || h.end(Side::G).reset;
        let what = || format!("{} bytes promised and no flow that holds them", promised - g_acked);
        return if h.broken { Ok(()) } else { Err(what()) };
    };
    let held = flow.stats().guest_una..flow.stats().rcv_nxt;
    let una = h.unwrap(Side::R, Seq::wrap(held.start), g_acked);
    if una > g_acked {
        return Err(format!("{} bytes let go before G acknowledged them", una - g_acked));
    }
    if una + (held.end - held.start) < promised {
        return Err("a promise that nobody holds".to_owned());
    }
    // Of a connection that the host has accepted alone, the first number is that of R's SYN.
    let first = una.max(BASE + 1);
    let from = if all { first } else { h.rules.held.read_to.clamp(first, promised) };
    h.rules.held.read_to = promised;
    let (start, end) = (held.start + (from - una), held.start + (promised - una));
    let mut at = from;
    for piece in flow.store().slices(engine.arena(), start, end) {
        let stream = h.streams.map(|s| s[Side::R as usize]);
        if stream.and_then(|s| s.first_difference(offset(at), piece)).is_some() {
            return Err("the store holds another byte than R sent".to_owned());
        }
        at += piece.len() as u64;
    }
    if at != promised {
        return Err("fewer bytes in the store than were promised".to_owned());
    }
    Ok(())
}
