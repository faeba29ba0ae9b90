//! The way behind G: the connection may end there, and not in G (FWD-01 to FWD-03, FWD-06).

use crate::limits::{
    GUEST_PATH_MTU_MIN, LOCAL_RTO_MAX, LOCAL_RTO_MIN, LOWER_TTLS, PATH_MTU_AGE, REFUSED_RUNNING,
    REFUSED_RUNNING_BEHIND,
};
use crate::port::Local;
use crate::tcp::FlowContext;
use crate::tcp::distance::{Distance, hops};
use crate::tcp::flow::{Flow, State, Why};
use crate::tcp::losses::Narrow;
use crate::tcp::options::Offers;
use crate::tcp::sender::Path;
use crate::time::{Duration, Instant};
use crate::wire::icmp::TooBig;
use crate::wire::packet::IpVersion;

/// By how much the first timeout is longer than a local one, after a handshake whose answer took so
/// long: the timeout is three times that (RFC 6298 section 2.2), and [`LOCAL_RTO_MAX`] at most.
fn beyond_local(answer: Duration) -> Duration {
    let timeout = answer.saturating_mul(3).clamp(LOCAL_RTO_MIN, LOCAL_RTO_MAX);
    Duration::from_nanos(timeout.as_nanos() - LOCAL_RTO_MIN.as_nanos())
}

impl Flow {
    /// Where the connection ends, by its handshake (FWD-01).
    pub(super) fn judge_distance(&self, cx: &mut FlowContext<'_, '_>, offers: &Offers) -> Distance {
        let server = (!self.outbound.guest_is_client()).then_some((cx.key.g_addr, cx.key.g_port));
        match cx.vm.local {
            Local::Always => Distance::Local,
            Local::Never => Distance::Far,
            Local::Auto => {
                let signs = offers.signs(cx.now, server);
                cx.vm.servers.judge(cx.now, hops(signs.ttl, cx.vm.guest_ttl), &signs)
            }
        }
    }

    /// The flow is taken on. Bytes for a container go by a path from the first one on (FWD-02), and
    /// G's answer in the handshake sets the first timeout, until one to data is timed (FWD-04).
    ///
    /// The former is wall time. A local guest that was off its CPU meanwhile shows with its first
    /// acknowledgement of data, in running time, that there is no path, and nothing is remembered.
    pub(super) fn begin_on_path(&mut self, cx: &FlowContext<'_, '_>, offers: &Offers) {
        let answer_ms = offers.answer_ms(cx.now, self.outbound.guest_is_client());
        let beyond = beyond_local(Duration::from_millis(answer_ms.into()));
        self.timers.set_rto_beyond(beyond);
        if self.options.distance == Distance::Near {
            self.losses.path_or_new(cx.running(), self.options.mss_to_guest.into());
        } else if beyond > Duration::ZERO {
            self.losses.begin_path(Path::without_loss());
        }
    }

    /// The flow has a place again. Its knowledge of the path went with the last one, but for the
    /// timeout: the next acknowledgement says whether there is such a path (FWD-04).
    pub(super) fn begin_again_on_path(&mut self) {
        if self.timers.has_rto_beyond() && self.losses.path().is_none() {
            self.losses.begin_path(Path::without_loss());
        }
    }

    /// For how long G may refuse bytes, in running time (SNOOP-32, FWD-06).
    pub(super) fn patience(&self) -> Duration {
        match self.options.distance {
            Distance::Local => REFUSED_RUNNING,
            Distance::Near | Distance::Far => REFUSED_RUNNING_BEHIND,
        }
    }

    /// A data segment of G with this TTL. Two in a row from farther than its handshake came from
    /// were made by somebody behind it.
    #[inline(always)]
    pub(super) fn note_ttl_of_data(&mut self, cx: &mut FlowContext<'_, '_>, ttl: u8) {
        let usual = matches!(ttl, 64 | 128 | 255); // nobody passed it on (`hops`)
        if !usual || self.losses.any_farther() {
            self.note_odd_ttl_of_data(cx, ttl);
        }
    }

    #[inline(never)]
    fn note_odd_ttl_of_data(&mut self, cx: &mut FlowContext<'_, '_>, ttl: u8) {
        let hops_of_handshake = u8::from(self.options.distance != Distance::Local);
        let is_farther = hops(ttl, cx.vm.guest_ttl) > hops_of_handshake;
        if (is_farther || self.losses.any()) && self.losses.note_farther(is_farther) >= LOWER_TTLS {
            self.on_found_far(cx);
        }
    }

    /// The connection shows that it ends behind G: it leaves the path, and so do the server's next
    /// ones for a while (FWD-02).
    #[inline(never)]
    fn on_found_far(&mut self, cx: &mut FlowContext<'_, '_>) {
        if cx.vm.local != Local::Auto || self.options.distance == Distance::Far {
            return;
        }
        self.options.distance = Distance::Far;
        if !self.outbound.guest_is_client() {
            cx.vm.servers.note_far(cx.now, (cx.key.g_addr, cx.key.g_port));
        }
        cx.vm.counters.flows_not_local += 1;
        self.drain(Why::NotLocal);
    }

    /// G, or a router behind it, has dropped a segment that H made: it is too long for the way
    /// behind G. R's kernel does not believe that of bytes that H has acknowledged. All that is
    /// under way goes to G again, in shorter segments; longer ones are tried again after
    /// [`PATH_MTU_AGE`].
    pub(crate) fn on_too_big_for_guest(&mut self, cx: &mut FlowContext<'_, '_>, it: &TooBig) {
        let una = self.sender.una();
        let under_way = (una..self.sender.sent()).contains(&it.segment.seq.unwrap(una));
        let [v4, v6] = GUEST_PATH_MTU_MIN.map(u32::from);
        let least = if cx.key.version == IpVersion::V4 { v4 } else { v6 };
        let mss = u64::from(it.mtu.max(least)) - self.ip_tcp_len(cx);
        let before = self.options.mss_to_guest;
        // A SYN is short enough for every path.
        let has_segments = self.is_live() && self.state() != State::Opening;
        if !has_segments || !under_way || mss >= before.into() {
            return;
        }
        let mss_before = self.losses.narrow().map_or(before, |narrow| narrow.mss_before);
        self.losses.set_narrow(Some(Narrow { mss_before, until: cx.now + PATH_MTU_AGE }));
        self.options.mss_to_guest = u16::try_from(mss).unwrap_or(before);
        let (sender, mut sending) = self.sending(cx);
        sender.on_too_long(&mut sending);
        self.on_found_far(cx);
    }

    /// The way behind G may be another one by now.
    #[inline(never)] // most flows know of no loss
    pub(super) fn try_longer_segments(&mut self, now: Instant) {
        if let Some(narrow) = self.losses.narrow().filter(|narrow| narrow.until <= now) {
            self.options.mss_to_guest = narrow.mss_before;
            self.losses.set_narrow(None);
            self.losses.forget(self.sender.una());
        }
    }
}
