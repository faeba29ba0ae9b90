//! TURNS (SNOOP-27, INV-20): flows of a VM take turns at its ring.
//!
//! A flow waits while it has new bytes that G's window takes and is offered none. Meanwhile no
//! other flow of the same guest is offered bytes more than [`TURNS_MAX`] times; with turns it would
//! be once, behind those that waited before. Two kinds of frames do not count: those that were made
//! earlier and waited outside the ring, and those that pass G past the store, as all frames from
//! another guest of the host may, because the entry of such frames is not seen. Captures do not
//! show rings.

use std::collections::BTreeMap;

use super::Ensure;
use super::{news, recovery};
use crate::history::{History, Side};
use crate::out::Out;
use crate::tap::FlowName;

/// One more than by turns: the offers of a flow are known here from frames alone.
const TURNS_MAX: usize = 2;

/// The turns at one guest's ring.
#[derive(Clone, Debug, Default)]
pub(crate) struct Turns {
    /// Offers so far.
    count: u64,
    /// Flows that wait, and the number of the last offer before they did.
    waiting: BTreeMap<FlowName, u64>,
    /// Numbers of the last offers of each flow, the oldest first.
    offers: BTreeMap<FlowName, [u64; TURNS_MAX]>,
}

impl Turns {
    /// Something else happened to the guest or the host: everybody begins anew.
    pub(crate) fn clear(&mut self) {
        self.waiting.clear();
    }

    /// Between two steps of the host.
    pub(crate) fn on_step(&mut self, h: &History) {
        if h.is_twinned() && recovery::fresh_bytes(h).is_some() {
            self.waiting.entry(h.name).or_insert(self.count);
        } else {
            self.waiting.remove(&h.name);
        }
    }

    /// A frame leaves.
    pub(crate) fn on_out(&mut self, h: &History, o: &Out<'_>) -> Ensure {
        if o.to != Side::G {
            return Ok(());
        }
        // Also what looks like a frame that came in; and frames that tell it of a hole in its bytes
        // (FLOOD-05; seed 90696).
        let of_hole = h.is_relayed && news::tells_guest_again(h, o);
        let blocks = !o.tcp.options.sack.as_slice().is_empty();
        if o.tcp.payload_len > 0 || o.tcp.flags.fin() || blocks || of_hole {
            self.waiting.remove(&h.name); // this was its turn
        }
        let held = o.is_stored() && !o.waited && !h.opaque && o.end <= h.end(Side::R).ack_to;
        if !held {
            return Ok(());
        }
        self.count += 1;
        let offers = self.offers.entry(h.name).or_default();
        let oldest = offers[0];
        offers.rotate_left(1);
        offers[TURNS_MAX - 1] = self.count;
        match self.waiting.iter().find(|(_, since)| **since < oldest) {
            Some((FlowName { guest_port, remote_port, .. }, _)) => Err(format!(
                "{} offers in a row while port {guest_port} has bytes for port {remote_port}'s",
                TURNS_MAX + 1,
            )),
            None => Ok(()),
        }
    }
}
