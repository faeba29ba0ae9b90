//! Looking ahead: the flows of all frames of a batch are fetched from memory before the first frame
//! is processed.
//!
//! With many flows a packet mostly waits for memory: for the index, then for the flow, then for the
//! data that the flow points to. Each address is known only when the one before it has arrived.
//! Frames of a batch do not wait for each other. So each step is done for all of them before the
//! next step, and the processor has many cache lines under way at a time. A fetch is a plain load
//! of a value that is not used; `fetch` methods return it, because the compiler would otherwise
//! leave the load out.
//!
//! This code changes nothing. The place of a flow is a guess, which the later work checks: an
//! earlier frame of the batch may change which flows exist, and behind which port a guest is.

use core::hint::black_box;

use crate::engine::Engine;
use crate::flow::key::FlowKey;
use crate::flow::table::HashedKey;
use crate::port::PortId;
use crate::time::Instant;
use crate::wire::glance::{Glance, macs};
use crate::wire::packet::VlanStack;

/// Frames from which on a batch is fetched for.
const FETCH_FRAMES_MIN: usize = 4;

/// The result of a glance at a frame.
#[derive(Clone, Copy, Debug)]
pub struct Staged {
    /// The flow of a frame that [`Glance`] understands. If it came from the network: a flow of the
    /// guest to whom such frames went lately.
    pub(super) flow: Option<HashedKey>,
    /// [`Switch::changes`](crate::switch::Switch::changes) when the switch was to send the frame to
    /// that guest and had nothing to learn from it; else 0.
    pub(super) switch_then: u64,
}

impl Staged {
    const NOTHING: Self = Self { flow: None, switch_then: 0 };
}

impl Engine<'_> {
    /// Looks at a frame that came in on `port`.
    #[inline(never)] // as `handle_staged`
    #[must_use]
    pub fn stage(&self, now: Instant, port: PortId, frame: &[u8]) -> Staged {
        match Glance::v4(frame) {
            Some(glance) => self.stage_segment(now, port, frame, &glance),
            None => self.stage_v6(now, port, frame),
        }
    }

    #[inline(never)] // the compiler would mix both families up, byte by byte
    fn stage_v6(&self, now: Instant, port: PortId, frame: &[u8]) -> Staged {
        match Glance::v6(frame) {
            Some(glance) => self.stage_segment(now, port, frame, &glance),
            None => Staged::NOTHING,
        }
    }

    #[inline(always)]
    fn stage_segment(&self, now: Instant, port: PortId, frame: &[u8], it: &Glance) -> Staged {
        let from = self.port(port);
        if from.is_some_and(|p| p.wire.is_some()) {
            return Staged::NOTHING; // no switch knows where its frames go
        }
        if from.is_some_and(|p| p.config.is_guest()) {
            let key = self.flows.hashed(FlowKey::of_glance_from_guest(port.0, it));
            return Staged { flow: Some(key), switch_then: 0 };
        }
        let (untagged, (dst, src)) = (VlanStack::default(), macs(frame));
        let switch = self.networks.alone();
        let Some(out) = switch.peek(now, untagged, dst) else { return Staged::NOTHING };
        let key = self.flows.hashed(FlowKey::of_glance_from_net(out.0, it));
        let known = out != port && switch.is_taught(now, port, untagged, src);
        Staged { flow: Some(key), switch_then: if known { switch.changes() } else { 0 } }
    }

    /// Fetches the data that the work on these frames will read. With a few frames there is little
    /// to gain.
    pub fn fetch(&self, batch: &mut [Staged]) {
        if batch.len() >= FETCH_FRAMES_MIN {
            self.fetch_flows(batch);
        }
    }

    #[inline(never)] // as `handle_staged`
    fn fetch_flows(&self, batch: &mut [Staged]) {
        // One number for all: with a store for each, the stores would soon wait for the loads
        // before them.
        let mut read = 0;
        for key in batch.iter().filter_map(|staged| staged.flow.as_ref()) {
            read ^= self.flows.fetch_index(key);
        }
        for key in batch.iter_mut().filter_map(|staged| staged.flow.as_mut()) {
            if let Some((flow, slot)) = self.flows.fetch_slot(key) {
                read ^= slot ^ flow.fetch();
            }
        }
        for key in batch.iter().filter_map(|staged| staged.flow.as_ref()) {
            if let Some((index, flow)) = self.flows.fetched(key) {
                read ^= flow.fetch_held(&self.common.arena) ^ self.timers.fetch(index);
            }
        }
        black_box(read);
    }
}
