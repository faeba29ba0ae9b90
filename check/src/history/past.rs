//! Segments that G sends past the host.

use nightporter_core::time::Instant;

use super::{History, Side};
use crate::wire::Tcp;

impl History {
    /// G's first SYN, or SYN-ACK, goes past the host: R may echo its clock (seed 50284).
    pub(crate) fn on_past_syn(&mut self, tcp: &Tcp) {
        self.end_mut(Side::G).tsvals.extend(tcp.options.timestamps.map(|ts| ts.tsval));
    }

    /// G sent a segment that the host does not see.
    pub(crate) fn on_past(&mut self, tcp: &Tcp) {
        let isn = self.end(Side::G).isn;
        if tcp.flags.syn() && self.next.is_some() {
            // The connection before it on these ports is over. When the host sees an answer, if it
            // sees one, is not known.
            self.on_syn(Instant::MAX, Side::G, tcp);
        }
        self.past = true;
        self.opened_past |= self.end(Side::G).isn != isn;
        let end = self.unwrap(Side::G, tcp.seq, self.end(Side::G).end);
        let end = end + u64::from(tcp.payload_len) + u64::from(tcp.flags.fin());
        let g = self.end_mut(Side::G);
        g.tsvals.extend(tcp.options.timestamps.map(|ts| ts.tsval));
        g.end = if g.isn.is_some() { g.end.max(end) } else { g.end };
    }
}
