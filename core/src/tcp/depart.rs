//! Frames for R with data that G has handed over: the sender's next bytes, in frames that the path
//! to R takes.
//!
//! The mirror of `deliver`. The header is made when the frame leaves (FLOOD-35), with the
//! acknowledgement, window and timestamps of that moment.

use crate::tcp::deliver::{Delivery, IP_LEN_MAX};
use crate::tcp::flow::Flow;
use crate::tcp::gates::DataToNet;
use crate::tcp::{FlowContext, index};
use crate::wire::emit::TcpEmit;
use crate::wire::packet::TcpFlags;

impl Flow {
    /// The flow's turn: the next frame of bytes for R. Its header is written to `buf`.
    #[must_use]
    pub(crate) fn poll_departure(
        &mut self,
        cx: &mut FlowContext<'_, '_>,
        buf: &mut [u8; TcpEmit::MAX_LEN],
    ) -> Option<Delivery> {
        let ip_tcp_len = self.ip_tcp_len(cx);
        let headers = self.template.l2_to_net().len() + index(ip_tcp_len);
        let stamp = self.options.timestamps.then(|| self.timestamps.to_net().tsval);
        let relayed = self.losses.relayed_mut()?;
        let found = relayed.poll(cx, IP_LEN_MAX - ip_tcp_len, stamp);
        if let Some((segment, ..)) = &found {
            let bytes = headers + index(segment.to - segment.from);
            cx.out.departures.on_sent(cx.key.port, bytes);
            if relayed.is_by_new_room(segment)
                && (self.outbound.ack_to_guest_due() || !cx.vm.clock.has_seen_all())
            {
                cx.vm.leads.on_sent(cx.now); // before G has seen that ACK
            }
        }
        relayed.arm(cx, found.is_some());
        let (segment, mss, push) = found?;
        let (bytes_end, closed) = relayed.end();
        let mss = u16::try_from(mss).unwrap_or(u16::MAX);
        let to = segment.to.min(bytes_end);
        let fin = closed && segment.to > bytes_end;
        let mut flags = TcpFlags::ACK;
        for (is_set, flag) in
            [(push, TcpFlags::PSH), (fin, TcpFlags::FIN), (segment.cwr, TcpFlags::CWR)]
        {
            flags = if is_set { flags.union(flag) } else { flags };
        }
        self.outbound.on_sent(to, fin);
        let len = index(to - segment.from);
        let data = DataToNet { seq: segment.from, flags, len, mss, again: segment.again };
        let (header_len, hdr) = self.emit_data_to_net(cx, buf, &data);
        Some(Delivery { hdr, header_len, from: segment.from, to })
    }
}
