//! A reboot that looks like a driver reset (LIFE-04b).
//!
//! A driver that begins anew may be that of the same kernel, whose sockets survive (LIFE-04), or of
//! one that has just booted and knows none of its connections. Flows that owe bytes are in doubt
//! then. A kernel that boots takes long, and timeouts become longer meanwhile. So as soon as G has
//! sent an IP packet from the flow's address, flows in doubt are probed five times a second: who
//! knows the connection acknowledges, who does not sends an RST, unless a filter drops the probe.

use crate::limits::{DOUBT_PROBE_INTERVAL, DOUBT_PROBES, T_DOUBT};
use crate::tcp::FlowContext;
use crate::tcp::flow::{Flow, Why};
use crate::time::{Duration, Instant};
use crate::wire::packet::IpAddr16;
use crate::wire::saved::saved;

/// Time that all probes of a row take.
const PATIENCE: Duration = DOUBT_PROBE_INTERVAL.saturating_mul(DOUBT_PROBES as u64);
/// Addresses of a VM that are followed.
const ADDRESSES_MAX: usize = 16;

/// The time since the driver of a VM has begun anew, while connections owed something. Instants are
/// of the VM's running time.
#[derive(Debug)]
pub(crate) struct Doubt {
    since: Instant,
    /// Addresses from which G has sent something since, not counting segments of connections in
    /// the path; and when it last did.
    heard: Vec<(IpAddr16, Instant)>,
}

saved! {
    Doubt { since as Running, heard as Running }
    check |it| it.heard.len() <= ADDRESSES_MAX
}

impl Doubt {
    /// G sends such a packet. `true`: the first from this address, or the first after a silence in
    /// which it may have had no address.
    pub(crate) fn on_heard(&mut self, running: Instant, from: IpAddr16) -> bool {
        if let Some((_, at)) = self.heard.iter_mut().find(|(ip, _)| *ip == from) {
            return running.since(std::mem::replace(at, running)) >= PATIENCE;
        }
        let is_new = self.heard.len() < ADDRESSES_MAX;
        if is_new {
            self.heard.push((from, running));
        }
        is_new
    }

    /// Connections that are still in doubt have other timeouts by now.
    pub(crate) fn is_over(&self, running: Instant) -> bool {
        running.since(self.since) > T_DOUBT
    }

    fn heard_at(&self, from: IpAddr16) -> Option<Instant> {
        self.heard.iter().find(|(ip, _)| *ip == from).map(|(_, at)| *at)
    }
}

impl Flow {
    /// The driver has begun anew.
    pub(super) fn begin_doubt(&mut self, cx: &mut FlowContext<'_, '_>) {
        if self.sender.una() < self.promised() {
            self.receiver.set_doubted(true);
            let since = cx.running();
            let doubt = cx.vm.doubt.get_or_insert_with(|| Doubt { since, heard: vec![] }.into());
            doubt.since = since;
        }
    }

    /// G has acknowledged something of the connection: it knows it.
    #[cold]
    pub(super) fn end_doubt(&mut self) {
        self.receiver.set_doubted(false);
        self.timers.on_guest_progress();
    }

    /// G has sent something else, for the first time since the driver began anew.
    pub(crate) fn on_guest_spoke(&mut self, cx: &mut FlowContext<'_, '_>) {
        if self.is_live() && self.heard_in_doubt(cx).is_some() {
            self.timers.on_guest_progress();
            self.probe_in_doubt(cx);
        }
    }

    /// When G was last heard from the flow's address, if the flow is in doubt.
    pub(super) fn heard_in_doubt(&self, cx: &FlowContext<'_, '_>) -> Option<Instant> {
        let doubt = cx.vm.doubt.as_deref().filter(|_| self.receiver.is_doubted())?;
        doubt.heard_at(cx.key.g_addr).filter(|_| !doubt.is_over(cx.running()))
    }

    /// G has not answered the last probe. One that has been silent as long as a silent G is waited
    /// for (SNOOP-32) is waited for no longer.
    pub(super) fn on_doubt_timeout(&mut self, cx: &mut FlowContext<'_, '_>, heard_at: Instant) {
        let running = cx.running();
        let speaks = running.since(heard_at) < PATIENCE;
        let over = speaks || self.sender.stuck_for(running) >= self.patience();
        if self.timers.back_off() >= DOUBT_PROBES && over {
            self.abort_both(cx, Why::GuestGone);
        } else {
            self.probe_in_doubt(cx);
        }
    }

    /// A G that has sent nothing but its SYN-ACK is asked by data, as after a kill (LIFE-09).
    fn probe_in_doubt(&mut self, cx: &FlowContext<'_, '_>) {
        if self.sender.is_established() {
            self.sender.on_window_shut();
        } else {
            let (sender, mut sending) = self.sending(cx);
            sender.on_ring_reset(&mut sending);
        }
        self.timers.wait_for_probe(cx.running() + DOUBT_PROBE_INTERVAL);
    }
}
