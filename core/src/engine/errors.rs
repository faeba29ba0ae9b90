//! ICMP errors about segments of flows, on their way to a guest and from one.

use crate::engine::Engine;
use crate::flow::key::FlowKey;
use crate::port::PortId;
use crate::time::Instant;
use crate::wire::icmp::{Quoted, TooBig};
use crate::wire::packet::{Eth, Ip};

impl Engine<'_> {
    /// An ICMP error of a guest, or of a router behind it: it may be about a segment that H made
    /// (FWD-03), which is forwarded in any case; or a refusal of H's SYN, which R never sent
    /// (ACC-01b): `true`.
    pub(super) fn on_icmp_from_guest(
        &mut self,
        now: Instant,
        port: PortId,
        frame: &[u8],
        eth: &Eth,
        ip: &Ip,
    ) -> bool {
        let Some(it) = Quoted::parse(frame, ip) else { return false };
        let key = FlowKey {
            g_addr: it.dst,
            r_addr: it.src,
            vlan: eth.vlan.key(),
            g_port: it.dst_port,
            r_port: it.src_port,
            port: port.0,
            version: ip.version,
        };
        let Some(id) = self.flows.lookup(&key) else { return false };
        if self.with_flow(now, id, |flow, cx| flow.on_opening_unreachable(cx, &it)) == Some(true) {
            return true;
        }
        if let Some(it) = TooBig::parse(frame, ip) {
            self.with_flow(now, id, |flow, cx| flow.on_too_big_for_guest(cx, &it));
        }
        false
    }

    /// An ICMP error on its way to a guest for which H sends: it may be about a segment of H
    /// (FLOOD-39). It is forwarded in any case, with G's own number (ACC-04).
    #[cold]
    pub(super) fn on_icmp(
        &mut self,
        now: Instant,
        out: PortId,
        frame: &mut [u8],
        eth: &Eth,
        ip: &Ip,
    ) {
        let Some(it) = Quoted::parse(frame, ip) else { return };
        let key = FlowKey {
            g_addr: it.src,
            r_addr: it.dst,
            vlan: eth.vlan.key(),
            g_port: it.src_port,
            r_port: it.dst_port,
            port: out.0,
            version: ip.version,
        };
        let Some(id) = self.flows.lookup(&key) else { return };
        if let Some(it) = TooBig::parse(frame, ip) {
            self.with_flow(now, id, |flow, cx| flow.on_too_big(cx, &it));
        }
        if let Some(flow) = self.flows.get(id) {
            flow.translate_error(frame, ip, &it);
        }
    }
}
