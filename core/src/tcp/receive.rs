//! Segments from R: accepted as strictly as G's kernel would, stored, acknowledged
//! (SNOOP-01 to SNOOP-19, SNOOP-35 to SNOOP-37; the order is that of SNOOP-01).

use crate::drops::DropReason;
use crate::limits;
use crate::tcp::emit::{CE, ts_older};
use crate::tcp::flow::{Flow, NONE, Why};
use crate::tcp::{Cx, Fate, Frame, index};
use crate::time::Duration;
use crate::wire::packet::{SackBlocks, Tcp, TcpFlags};
use crate::wire::seq::Seq;

/// A data-bearing or empty segment with its range in the 64-bit space.
#[derive(Clone, Copy)]
struct Range {
    seq: u64,
    end: u64,
    fin: bool,
}

impl Range {
    const fn len(self) -> u64 {
        self.end - self.seq
    }
}

impl Flow {
    /// A segment from R while `On` or `Drain`.
    pub(crate) fn on_segment_from_net(&mut self, cx: &mut Cx<'_, '_>, f: &mut Frame<'_>) -> Fate {
        let tcp = f.tcp;
        if !f.checksum_ok() {
            return Fate::Drop(DropReason::BadChecksum);
        }
        if let Err(reason) = self.paws(cx, f) {
            return Fate::Drop(reason);
        }
        let seq = tcp.seq.unwrap(self.rx.rcv_nxt);
        let end = seq + u64::from(tcp.payload_len);
        let range = Range { seq, end, fin: tcp.flags.contains(TcpFlags::FIN) };
        if tcp.flags.contains(TcpFlags::RST) {
            return self.on_rst_from_net(cx, seq);
        }
        if tcp.flags.contains(TcpFlags::SYN) {
            if self.flags.rst_pending {
                return Fate::Drop(DropReason::SynOnLiveFlow); // its turn comes behind the RST
            }
            if tcp.flags.contains(TcpFlags::ACK) {
                self.limited_ack(cx);
            } else {
                // RFC 5961 section 4: R began anew, and learns that G has not.
                self.rate_limited_ack(cx);
            }
            return Fate::Drop(DropReason::SynOnLiveFlow);
        }
        if !tcp.flags.contains(TcpFlags::ACK) {
            return Fate::Drop(DropReason::BadFlags);
        }
        if let Some(fate) = self.out_of_window(cx, f, range) {
            return fate;
        }
        if !self.ack_in_range(tcp) {
            let bare = range.len() == 0 && !range.fin && !needs_verbatim(f);
            if let Some(fate) = self.on_unseen(cx, f, bare) {
                return fate;
            }
        }
        self.on_valid_segment(cx, f, range)
    }

    /// What these let through is a segment that G would take as well (INV-25).
    fn on_valid_segment(&mut self, cx: &mut Cx<'_, '_>, f: &mut Frame<'_>, range: Range) -> Fate {
        let tcp = f.tcp;
        self.on_seen();
        self.template.learn_from_net(f.ip);
        self.update_ts_recent(cx, tcp, range.seq);
        if self.opt.ecn {
            if tcp.flags.contains(TcpFlags::CWR) {
                self.flags.ece = false;
            }
            if f.ip.tos & CE == CE && range.len() > 0 {
                self.flags.ece = true;
            }
        }
        self.flags.ece_to_guest = tcp.flags.contains(TcpFlags::ECE);
        let news = self.on_ack_plane(range.seq, tcp);
        if needs_verbatim(f) {
            self.flags.ack_to_guest_due |= news;
            return self.on_verbatim_from_net(cx, f, range);
        }
        if range.len() == 0 && !range.fin {
            // Pure ACKs are information for G's own sending: 1:1 (COM-30), old ones aside (INV-07).
            if tcp.ack.unwrap(self.tx.w_una) < self.tx.w_una {
                return Fate::Drop(DropReason::Duplicate);
            }
            let seq = self.rx.g_nxt.min(self.rx.g_re).max(self.rx.g_una);
            self.gate_to_guest(f, seq);
            return Fate::Pass;
        }
        self.flags.ack_to_guest_due |= news;
        if let Some(ts) = tcp.options.timestamps {
            self.note_tsval_from_net(ts.tsval);
        }
        self.accept(cx, f, range)
    }

    /// Takes what is new and in window into the store, then schedules the ACK (SNOOP-06).
    fn accept(&mut self, cx: &mut Cx<'_, '_>, f: &mut Frame<'_>, range: Range) -> Fate {
        let rcv_nxt = self.rx.rcv_nxt;
        if self.flags.rst_pending
            || self.fin_r().is_some_and(|fin| range.seq >= fin && range.len() > 0)
        {
            self.ack_due(cx); // data after FIN or RST is nobody's (SNOOP-14, SNOOP-15)
            return Fate::Drop(DropReason::OutOfWindow);
        }
        if range.len() > 0 && !self.wake(cx) {
            return self.pass_unheld(cx, f, range);
        }
        let from = range.seq.max(rcv_nxt);
        // Of two FINs the first counts, and nothing lies behind it.
        let to = range.end.min(self.rx.re).min(self.rx.fin_seen);
        let duplicate = self.duplicate_part(range.seq, range.end);
        if from < to {
            let skip = index(from - range.seq);
            let take = index(to - from);
            let bytes = &f.payload()[skip..skip + take];
            if let Err(reason) = self.keep(cx, bytes, from, to) {
                self.ack_due(cx);
                return Fate::Drop(reason);
            }
        }
        if range.fin {
            self.note_fin(range.end);
        }
        let in_order = self.rx.rcv_nxt >= to && from == rcv_nxt;
        let advanced = self.rx.rcv_nxt - rcv_nxt;
        self.counters.early_acked_bytes += advanced;
        cx.vm.counters.early_acked_bytes += advanced;
        if self.rx.re - self.rx.rcv_nxt.min(self.rx.re) < u64::from(self.opt.mss_to_guest) {
            self.flags.filled = true;
        }
        self.maybe_grow_buffer(cx);
        if range.len() > 0 {
            self.timers.on_window_shown();
            let whole = range.seq == rcv_nxt && advanced == range.len();
            let plain = in_order && whole && self.ooo.is_empty();
            self.schedule_ack(cx, range.len(), plain, duplicate);
        }
        Fate::Absorbed
    }

    /// The first run of bytes of `[seq, end)` that R had sent before, for its DSACK: below
    /// `rcv_nxt`, or in an out-of-order range (RFC 2883 section 4).
    fn duplicate_part(&self, seq: u64, end: u64) -> Option<(u64, u64)> {
        let rcv_nxt = self.rx.rcv_nxt;
        if seq < rcv_nxt && seq < end {
            return Some((seq, end.min(rcv_nxt)));
        }
        let shared = |(from, to): (u64, u64)| (from.max(seq), to.min(end));
        self.ooo.iter().map(shared).find(|(from, to)| from < to)
    }

    /// R's stream ends at `fin`, unless it ended before: no byte lies behind the first FIN, be it
    /// held or passed to G.
    fn note_fin(&mut self, fin: u64) {
        let held = self.ooo.max_end().unwrap_or(0).max(self.rx.rcv_nxt);
        let last = held.max(self.rx.passed_max);
        if (last..=self.rx.re).contains(&fin) && self.rx.fin_seen == NONE {
            self.rx.fin_seen = fin;
        }
    }

    /// Copies `bytes` for `[from, to)` into the store; the first copy of a byte wins (INV-15).
    fn keep(
        &mut self,
        cx: &mut Cx<'_, '_>,
        bytes: &[u8],
        from: u64,
        to: u64,
    ) -> Result<(), DropReason> {
        let Some(rec) = self.rec else { return Err(DropReason::NoStore) };
        let fills = from == self.rx.rcv_nxt;
        // Its bytes have a reserved place like all below `re`; only the ranges are bounded.
        if !fills && !self.ooo.has_room_for(from, to) {
            return Err(DropReason::OutOfOrderLimit);
        }
        for (a, b) in self.ooo.gaps(from, to) {
            let part = &bytes[index(a - from)..index(b - from)];
            if !self.store.write(cx.arena, rec, a, part) {
                return Err(DropReason::NoStore);
            }
        }
        if fills {
            // Never through `ooo`: its bounds must not keep the one segment out that R will repeat.
            self.rx.rcv_nxt = to;
            self.pull_in_order();
        } else {
            self.ooo.insert(from, to);
        }
        Ok(())
    }

    /// Out-of-order ranges that `rcv_nxt` has reached become in order.
    pub(crate) fn pull_in_order(&mut self) {
        if !self.ooo.is_empty() {
            self.rx.rcv_nxt = self.ooo.contiguous_from(self.rx.rcv_nxt);
            self.ooo.remove_below(self.rx.rcv_nxt);
        }
    }

    /// RFC 7323 section 5: a segment without a timestamp, or with an old one, is not R's.
    fn paws(&mut self, cx: &mut Cx<'_, '_>, f: &Frame<'_>) -> Result<(), DropReason> {
        let tcp = f.tcp;
        if !self.opt.timestamps || tcp.flags.contains(TcpFlags::RST) {
            return Ok(());
        }
        let Some(ts) = tcp.options.timestamps else {
            // A SYN without one comes from an R that knows nothing of this connection: it is to be
            // challenged. Behind a malformed option it may be there and not be found (COM-04).
            let excused = tcp.flags.contains(TcpFlags::SYN) || needs_verbatim(f);
            return if excused { Ok(()) } else { Err(DropReason::Paws) };
        };
        if !self.is_current(cx, ts.tsval, limits::PAWS_TICKS) {
            if tcp.payload_len > 0 {
                self.ack_now(cx, None);
            } else {
                self.limited_ack(cx);
            }
            return Err(DropReason::Paws);
        }
        Ok(())
    }

    /// SNOOP-15. Valid exactly where Linux says so; everything else in window is challenged.
    fn on_rst_from_net(&mut self, cx: &mut Cx<'_, '_>, seq: u64) -> Fate {
        let fin = self.fin_r();
        let n = self.rx.rcv_nxt + u64::from(fin.is_some());
        let exact = seq == n
            || self.ooo.max_end().is_some_and(|end| seq == end)
            || (fin.is_some() && seq + 1 == n);
        if exact {
            if !self.flags.rst_pending {
                self.stuck_since = cx.vm.clock.now(cx.now); // T_rst begins
            }
            self.flags.rst_pending = true;
            return Fate::Absorbed;
        }
        if (self.rx.rcv_nxt..self.rx.re).contains(&seq) {
            self.limited_ack(cx);
        }
        Fate::Drop(DropReason::BadRst)
    }

    /// Lies outside the window or brings nothing new (SNOOP-02, SNOOP-11, SNOOP-35 to SNOOP-37).
    fn out_of_window(&mut self, cx: &mut Cx<'_, '_>, f: &mut Frame<'_>, r: Range) -> Option<Fate> {
        let tcp = f.tcp;
        let fin_recorded = self.fin_r().is_some();
        let next = self.rx.rcv_nxt + u64::from(fin_recorded);
        let news_fin = r.fin && !fin_recorded && r.end == self.rx.rcv_nxt;
        if r.len() == 0 && !r.fin {
            if r.seq + 1 == next {
                return Some(self.on_keepalive_from_net(cx, f));
            }
            if r.seq < self.rx.rcv_nxt || r.seq > self.rx.re.max(next) {
                self.limited_ack(cx);
                return Some(Fate::Drop(DropReason::OutOfWindow));
            }
            return None;
        }
        // Up to the FIN: a keepalive behind it may carry an octet (RFC 9293 section 3.8.4).
        if r.end <= next && !news_fin {
            let current = r.end + u64::from(r.fin) >= self.rx.ack_sent;
            if current && (self.ack_in_range(tcp) || self.believes(cx, tcp, false)) {
                self.flags.ack_to_guest_due |= self.on_ack_plane(r.seq, tcp);
            }
            if r.len() <= 1 && r.seq + 1 == next && !r.fin {
                return Some(self.on_keepalive_from_net(cx, f));
            }
            if r.len() > 0 {
                // Its last octet may be in the place of a FIN that is not acknowledged.
                let end = r.end.min(self.rx.rcv_nxt);
                self.ack_now(cx, (r.seq < end).then_some((r.seq, end)));
            } else {
                self.limited_ack(cx); // R's FIN once more (SNOOP-14)
            }
            return Some(Fate::Drop(DropReason::Duplicate));
        }
        // R probes a window that it sees shut; for a silent G nobody answers (LIFE-05), not even by
        // taking the octet where something is left of the field's unit.
        let beyond = r.seq > self.rx.re || (r.len() > 0 && r.seq >= self.rx.re);
        let probe = r.len() == 1 || (r.len() > 0 && beyond);
        let unanswered =
            probe && self.window_shut() && !cx.vm.clock.alive_within(cx.now, limits::T_PAUSED);
        if beyond || unanswered {
            if r.len() == 0 {
                self.limited_ack(cx);
            } else if !unanswered {
                self.ack_now(cx, None);
            }
            return Some(Fate::Drop(DropReason::OutOfWindow));
        }
        None
    }

    /// R asks whether anybody is there: keepalive, or probe of a closed window (SNOOP-35,
    /// SNOOP-36).
    fn on_keepalive_from_net(&mut self, cx: &mut Cx<'_, '_>, f: &mut Frame<'_>) -> Fate {
        let shut = self.window_shut();
        let patience = if shut { limits::T_PAUSED } else { limits::T_ALIVE };
        if self.rx.g_una >= self.delivery_end() && !shut {
            if !(self.ack_in_range(f.tcp) || self.believes(cx, f.tcp, false)) {
                self.limited_ack(cx);
                return Fate::Drop(DropReason::BadAck);
            }
            // Nothing is promised: G itself answers, as it would without us.
            self.flags.keepalive = true;
            let seq = self.rx.g_una - 1;
            self.gate_to_guest(f, seq);
            return Fate::Pass;
        } else if cx.vm.clock.alive_within(cx.now, patience) {
            self.ack_now(cx, None);
        }
        Fate::Drop(DropReason::Duplicate)
    }

    /// RFC 5961 section 5.2, with what R was really sent (SNOOP-03, INV-12).
    pub(crate) fn ack_in_range(&self, tcp: &Tcp) -> bool {
        let ack = tcp.ack.unwrap(self.tx.w_una);
        tcp.flags.contains(TcpFlags::ACK)
            && ack <= self.tx.w_nxt
            && ack + u64::from(self.tx.r_window_max) >= self.tx.w_una
    }

    /// PAWS, as Linux has it (`tcp_paws_check`, 6.18): a TSval at most `ticks` older than the
    /// newest is no old one. Nor is any other if the newest is 0, as some put into a SYN although
    /// their clock stands elsewhere, or so old itself that R's clock may have gone half round.
    fn is_current(&self, cx: &Cx<'_, '_>, tsval: u32, ticks: i32) -> bool {
        let idle_s = cx.now.second().saturating_sub(self.ts.recent_at_s);
        Seq(self.ts.recent).after(Seq(tsval)) <= ticks
            || self.ts.recent == 0
            || Duration::from_secs(idle_s.into()) >= limits::PAWS_IDLE
    }

    /// RFC 7323 section 4.3: the earliest unacknowledged segment's TSval is the one to echo.
    fn update_ts_recent(&mut self, cx: &Cx<'_, '_>, tcp: &Tcp, seq: u64) {
        if let Some(ts) = tcp.options.timestamps
            && self.opt.timestamps
            && self.is_current(cx, ts.tsval, 0)
            && seq <= self.rx.ack_sent
        {
            if ts_older(ts.tsval, self.ts.recent) && self.ts.emit_g == self.ts.recent {
                self.ts.emit_g = ts.tsval; // void or outdated for G as well
            }
            self.ts.recent = ts.tsval;
            self.ts.recent_at_s = cx.now.second();
        }
    }

    /// R's (ack, window), by the rule of RFC 9293 section 3.10.7.4. Whether G should hear of it.
    fn on_ack_plane(&mut self, seq: u64, tcp: &Tcp) -> bool {
        let ack = tcp.ack.unwrap(self.tx.w_una);
        if ack < self.tx.w_una {
            return false;
        }
        let bytes = u32::from(tcp.window) << self.opt.shift_r;
        let edge = ack + u64::from(bytes);
        let shown = self.edge_of_net();
        let newer_segment = Seq::wrap(seq).gt(self.tx.r_window_seq);
        let newer = ack > self.tx.w_una || newer_segment || edge > shown || bytes == 0;
        let moved = ack > self.tx.w_una;
        let news = moved || (newer && edge != shown);
        self.tx.w_una = ack;
        if newer {
            self.tx.r_window = tcp.window;
            self.tx.r_window_seq = Seq::wrap(seq);
            self.tx.r_window_max = self.tx.r_window_max.max(bytes);
        }
        if let Some(ts) = tcp.options.timestamps {
            self.ts.ecr_to_guest = ts.tsecr;
        }
        self.note_sack_from_net(moved, tcp.options.sack) || news
    }

    /// R's SACK blocks, which belong to its newest acknowledgement number. Whether G should hear of
    /// them: the same blocks twice would look like a duplicate ACK.
    fn note_sack_from_net(&mut self, ack_moved: bool, sack: SackBlocks) -> bool {
        let known = self.losses.as_ref().map_or(SackBlocks::default(), |l| l.sack);
        let news = if sack.is_empty() {
            ack_moved && !known.is_empty()
        } else {
            ack_moved || sack != known
        };
        if !self.opt.sack || !news {
            return false;
        }
        let losses = self.losses.get_or_insert_default();
        losses.sack = sack;
        losses.sack_due = !sack.is_empty();
        self.forget_losses();
        !sack.is_empty()
    }

    /// SNOOP-07: at the end of the batch, at once after two segments' worth or anything unusual.
    fn schedule_ack(
        &mut self,
        cx: &mut Cx<'_, '_>,
        bytes: u64,
        plain: bool,
        duplicate: Option<(u64, u64)>,
    ) {
        let full = bytes > u64::from(self.opt.mss_to_guest); // one ACK per super-frame, as Linux
        self.unacked_segments = self.unacked_segments.saturating_add(1 + u8::from(full));
        let quick = self.quick_acks > 0;
        self.quick_acks = self.quick_acks.saturating_sub(1);
        if !plain || quick || self.unacked_segments >= 2 {
            self.ack_now(cx, duplicate);
        } else {
            self.ack_due(cx);
        }
    }

    /// An ACK leaves at the end of the batch, unless a segment of G carries it first.
    pub(crate) fn ack_due(&mut self, cx: &mut Cx<'_, '_>) {
        self.flags.ack_due = true;
        if !self.flags.ack_listed {
            self.flags.ack_listed = true;
            cx.ack_list.push(cx.id);
        }
    }

    /// An ACK leaves now.
    pub(crate) fn ack_now(&mut self, cx: &mut Cx<'_, '_>, dsack: Option<(u64, u64)>) {
        self.emit_ack(cx, dsack);
    }

    /// A challenge or odd ACK, but none for a silent G (INV-19).
    pub(crate) fn limited_ack(&mut self, cx: &mut Cx<'_, '_>) {
        if cx.vm.clock.alive_within(cx.now, limits::T_PAUSED) {
            self.rate_limited_ack(cx);
        }
    }

    /// One per flow and 500 ms (COM-31, RFC 5961 section 7).
    fn rate_limited_ack(&mut self, cx: &mut Cx<'_, '_>) {
        let since = u64::from(cx.now.low_millis().wrapping_sub(self.limited_ack_ms));
        if Duration::from_millis(since) >= limits::ODD_ACK_INTERVAL {
            self.limited_ack_ms = cx.now.low_millis();
            self.ack_now(cx, None);
        }
    }

    /// URG, an option or IP option H does not understand: nothing of it, nor behind it, is
    /// acknowledged early. It reaches G only behind everything held (SNOOP-13, COM-04, COM-07).
    fn on_verbatim_from_net(
        &mut self,
        cx: &mut Cx<'_, '_>,
        f: &mut Frame<'_>,
        range: Range,
    ) -> Fate {
        let urgent = f.tcp.flags.contains(TcpFlags::URG);
        self.drain(if urgent { Why::Urgent } else { Why::Options });
        self.pass_data(cx, f, range)
    }

    /// There is no place for the data of a parked flow: G takes it by itself, as in `Pass`, inside
    /// its own window. What it has no room for R repeats.
    fn pass_unheld(&mut self, cx: &mut Cx<'_, '_>, f: &mut Frame<'_>, range: Range) -> Fate {
        let fits = range.end + u64::from(range.fin) <= self.rx.g_re;
        if fits {
            self.pass_data(cx, f, range)
        } else {
            self.refuse(cx, range, DropReason::NoStore)
        }
    }

    /// Data goes to G past the store, behind all that is held and without a gap.
    fn pass_data(&mut self, cx: &mut Cx<'_, '_>, f: &mut Frame<'_>, range: Range) -> Fate {
        let passed = self.rx.rcv_nxt.max(self.rx.passed_max);
        if self.rx.g_una < self.delivery_end() || range.seq > passed {
            return self.refuse(cx, range, DropReason::Draining);
        }
        if range.fin {
            self.note_fin(range.end);
        }
        let fin = self.rx.fin_seen;
        if range.end > fin || (range.fin && range.end != fin) {
            // Behind R's FIN, or a second one: G must not know more of its end than we.
            return self.refuse(cx, range, DropReason::OutOfWindow);
        }
        let end = range.end.min(self.rx.re) + u64::from(range.fin);
        self.rx.passed_max = self.rx.passed_max.max(end);
        self.gate_to_guest(f, range.seq);
        Fate::Pass
    }

    /// A segment that is acceptable and yet not taken: R learns from a duplicate ACK what H waits
    /// for, as from a receiver that has lost it.
    fn refuse(&mut self, cx: &mut Cx<'_, '_>, range: Range, reason: DropReason) -> Fate {
        if range.len() > 0 {
            self.ack_now(cx, None);
        } else {
            self.limited_ack(cx);
        }
        Fate::Drop(reason)
    }

    /// No new promise from here on; the edge stays where it is.
    pub(crate) fn drain(&mut self, why: Why) {
        self.standing.drain(why);
    }
}

fn needs_verbatim(f: &Frame<'_>) -> bool {
    f.tcp.flags.contains(TcpFlags::URG) || !f.tcp.options.understood() || f.ip.options
}
