//! A segment of TCP that a guest sends, by whatever port, and its flow.

use crate::drops::DropReason;
use crate::engine::Engine;
use crate::flow::table::HashedKey;
use crate::port::PortId;
use crate::tcp::{Fate, Frame};
use crate::time::Instant;
use crate::wire::packet::TcpFlags;

impl Engine<'_> {
    /// A segment of a guest meets its flow, if it has one: whether it may have been edited. `None`:
    /// it was absorbed.
    #[inline(always)]
    pub(super) fn process_segment_from_guest(
        &mut self,
        now: Instant,
        port: PortId,
        key: &HashedKey,
        f: &mut Frame<'_>,
    ) -> Result<Option<bool>, DropReason> {
        if f.tcp.flags.contains(TcpFlags::SYN) {
            let is_for_host = self.on_syn_from_guest(now, key.key, f);
            self.note_spoke(now, port, f.ip.src); // G may have shown that it knows the flow
            if is_for_host {
                return Ok(None);
            }
        } else if let Some(id) = self.flow_in_path(now, key) {
            let tagged = !f.eth.vlan.is_empty(); // others were offered to the flow before
            let fate = self.with_frame(now, id, |flow, cx| {
                let l2_len = f.l2().len();
                let (usual, vouched) = (tagged && !f.hdr.is_gso(), f.hdr.needs_csum());
                let offer = || flow.on_expected_from_guest(cx, f.bytes, l2_len, vouched);
                let expected = usual.then(offer);
                expected.flatten().unwrap_or_else(|| flow.on_frame_from_guest(cx, f))
            });
            return match fate {
                Some(Fate::Absorbed) => Ok(None),
                Some(Fate::Drop(reason)) => Err(reason),
                Some(Fate::Pass) | None => Ok(Some(true)), // an emission gate may have done it
            };
        } else if f.tcp.payload_len > 0 {
            self.on_data_past_flows(now, key);
        }
        Ok(Some(false))
    }
}
