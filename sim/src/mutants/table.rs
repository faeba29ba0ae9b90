//! The mutations: each breaks `core` in one way.
//!
//! `place` is a piece of a source file in which `[[` and `]]` mark what is replaced; it occurs
//! once.
//! The first fifteen were given with the specification. Five of them are about
//! congestion offload, which is not there yet: they name what today's code has in their place.

use anyhow::{Context as _, ensure};

use super::second::SECOND;
use super::source::Edit;

/// One way to break `core`.
#[derive(Clone, Copy, Debug)]
pub struct Mutation {
    /// What it does.
    pub name: &'static str,
    /// The rule it breaks.
    pub breaks: &'static str,
    /// Path below `core/src`.
    pub file: &'static str,
    /// Where; see the module doc.
    pub place: &'static str,
    /// What stands there instead. Nothing: the statement is left out.
    pub instead: &'static str,
}

impl Mutation {
    /// The change of `source`, as mutation `n`.
    ///
    /// # Errors
    /// A place that does not occur exactly once: the table is older than the source.
    pub fn edit(&self, n: usize, source: &str) -> anyhow::Result<Edit> {
        let plain = self.place.replace("[[", "").replace("]]", "");
        let count = source.matches(&plain).count();
        let (name, file) = (self.name, self.file);
        ensure!(count == 1, "\"{name}\": its place occurs {count} times in {file}: mend the table");
        let marks = self.place.find("[[").zip(self.place.find("]]"));
        let (from, to) = marks.context("no marks")?;
        let start = source.find(&plain).unwrap_or_default() + from;
        let range = start..start + (to - from - 2);
        let statement = source[range.clone()].ends_with(';');
        let with = if statement { self.instead.to_owned() } else { format!("({})", self.instead) };
        Ok(Edit { n, range, with })
    }
}

macro_rules! mutations {
    ($list:ident: $($name:literal, $breaks:literal, $file:literal, $place:literal
        => $instead:literal;)+) => {
        /// Mutations; see the module doc.
        pub(super) const $list: &[Mutation] = &[$(Mutation {
            name: $name, breaks: $breaks, file: $file, place: $place, instead: $instead,
        },)+];
    };
}
pub(super) use mutations;

/// All mutations. Numbers in reports count from 1, in this order.
pub fn all() -> impl Iterator<Item = &'static Mutation> {
    FIRST.iter().chain(SECOND)
}

mutations! { FIRST:
    "an ACK one byte too high", "INV-03", "tcp/flow.rs",
    "if self.fin_acked_by_guest() { self.rx.rcv_nxt + 1 } else { [[self.rx.rcv_nxt]] }"
    => "self.rx.rcv_nxt + 1";

    "ACKs to R with a sequence number beyond what was sent (seq = q.end)", "EMIT-R",
    "tcp/emit.rs",
    "let seq = [[self.tx.w_nxt.min(self.edge_of_net()).max(self.tx.w_una)]];"
    => "self.tx.w_nxt + 1448";

    "a TSval of R as it comes, not the newest (R's segments may overtake each other)", "INV-08",
    "tcp/emit.rs",
    "pub(crate) fn note_tsval_from_net(&mut self, tsval: u32) {
        [[self.ts.emit_g = ts_newest(self.ts.emit_g, tsval);]]"
    => "self.ts.emit_g = tsval;";

    "a stale ACK on stored data", "EMIT-G", "tcp/emit.rs",
    "seq: Seq::wrap(seq),
            ack: [[Seq::wrap(self.tx.w_una)]],"
    => "Seq(self.tx.isn.0.wrapping_add(1))";

    "duplicate ACKs of G go on to R", "SNOOP-25", "tcp/guest.rs",
    "self.on_pure_ack_from_guest(cx, seq);
            [[Fate::Absorbed]]"
    => "Fate::Pass";

    "bytes that G has SACKed are let go", "INV-03", "tcp/guest.rs",
    "if [[hole_end == NONE]] {"
    => "{ self.store.release(_cx.arena, top); hole_end == NONE }";

    "R's FIN is acknowledged before G has", "INV-04", "tcp/flow.rs",
    "[[self.fin_r().is_some_and(|fin| self.rx.g_una > fin)]]"
    => "self.fin_r().is_some()";

    "the right edge follows a window that was rounded down", "INV-05", "tcp/window.rs",
    "[[self.rx.re = self.rx.re.max(ack + (field << shift));]]"
    => "self.rx.re = ack + (self.field_for(self.edge_wanted()) << shift);
        field = field.min((self.rx.re - ack) >> shift);";

    "segments with a wrong checksum are taken", "COM-13", "tcp/receive.rs",
    "let tcp = f.tcp;
        if [[!f.checksum_ok()]] {"
    => "false";

    "an ACK of R above what was sent is believed", "INV-12", "tcp/receive.rs",
    "&& [[ack <= self.tx.w_nxt]]"
    => "true";

    "R's keepalives are dropped", "SNOOP-36", "tcp/receive.rs",
    "let seq = self.rx.g_una - 1;
            self.gate_to_guest(f, seq);
            [[return Fate::Pass;]]"
    => "return Fate::Drop(DropReason::Duplicate);";

    "G's RST reaches R with a wrong sequence number", "SNOOP-16", "tcp/guest.rs",
    "let seq = [[self.tx.w_nxt]];
        self.emit_to_net(cx, seq, RST_ACK, None);
        self.abort(cx, Why::Reset, false);"
    => "self.tx.w_nxt + 70_000";

    "segments for G are longer than its MSS (for: no MSS change on PTB)", "COM-20",
    "tcp/deliver.rs",
    "let mss = [[u64::from(self.opt.mss_to_guest)]];
        let room = (room"
    => "u64::from(self.opt.mss_to_guest) + 8";

    "CE reaches G a second time, on bytes from the store", "INV-24", "tcp/emit.rs",
    "CE if [[self.opt.ecn]] => ECT0,"
    => "false";

    "a flow is evicted with bytes in its store", "LIFE-02", "engine.rs",
    "let parked = |f: &Flow| f.state() == State::On && [[f.rec.is_none() && f.quiescent()]];"
    => "true";

    "the commit record says G has everything", "LIFE-09", "tcp/lifecycle.rs",
    "let progress = Progress {
            rcv_nxt: [[self.rx.rcv_nxt]],"
    => "self.rx.g_una.min(self.rx.rcv_nxt)";

    "after a restart a flow that owes little is forgotten", "INV-21", "engine/restart.rs",
    "let owed = [[record.rcv_nxt > record.g_una]];"
    => "record.rcv_nxt > record.g_una + 3000";

    "after a restart R's RST has a wrong sequence number", "LIFE-09", "engine/restart.rs",
    "flow.tx.w_nxt = [[record.w_nxt]];"
    => "record.w_nxt + 9000";

    "after a restart G is not told", "INV-21", "tcp/lifecycle.rs",
    "self.standing.abort(Why::Restart, [[true]]);"
    => "false";

    "pages are let go before G has acknowledged all of them", "INV-03", "tcp/guest.rs",
    "[[self.store.release(cx.arena, bytes_end);]]
        self.dup_acks = 0;"
    => "self.store.release(cx.arena, bytes_end + 16_384);";

    "a page of the reservation is never given back", "INV-06", "tcp/lifecycle.rs",
    "[[cx.vm.unreserve(u64::from(self.rx.reserved_pages));]]"
    => "cx.vm.unreserve(u64::from(self.rx.reserved_pages).saturating_sub(1));";

    "a VM may reserve four pages of others", "INV-06", "tcp/vm.rs",
    "[[self.reserved_pages + pages <= self.budget_pages]]"
    => "self.reserved_pages + pages <= self.budget_pages + 4";

    "the edge goes beyond the reservation", "INV-06", "tcp/window.rs",
    "let edge = [[self.rx.g_una + u64::from(self.rx.buffer_bytes)]];"
    => "self.rx.g_una + u64::from(self.rx.buffer_bytes) + 65_536";

    "G's window is read with R's scale", "COM-20", "tcp/guest.rs",
    "let edge = ack + ([[u64::from(tcp.window) << self.opt.shift_g]]);"
    => "u64::from(tcp.window) << self.opt.shift_r";

    "bytes for G beyond its window by one", "INV-13", "tcp/deliver.rs",
    "if useful { [[room]] } else { 0 }"
    => "room + 1";

    "old timestamps are taken (no PAWS)", "SNOOP-04", "tcp/receive.rs",
    "if [[!self.is_current(cx, ts.tsval, limits::PAWS_TICKS)]] {"
    => "false";

    "a timestamp out of order is echoed", "SNOOP-05", "tcp/receive.rs",
    "&& [[seq <= self.rx.ack_sent]]"
    => "true";

    "R's RST overtakes the bytes before it", "SNOOP-15", "tcp/deliver.rs",
    "[[self.flags.rst_pending && self.rx.g_una >= self.delivery_end()]]"
    => "self.flags.rst_pending";

    "an RST of R anywhere is believed", "SNOOP-15", "tcp/receive.rs",
    "if [[exact]] {
            if !self.flags.rst_pending {"
    => "true";

    "a flow leaves the path while R may still send beyond G's window", "INV-05", "tcp/flow.rs",
    "(closed || [[self.rx.g_re >= self.rx.re]])"
    => "true";

    "what G lost is never sent again", "INV-18", "tcp/deliver.rs",
    "[[self.rx.g_snd = self.rx.g_una;]]
            let losses"
    => "";

    "R's FIN is never delivered", "INV-18", "tcp/deliver.rs",
    "[[self.fin_fits() && self.fin_r() == Some(self.rx.g_snd) && self.rx.g_una <= self.rx.g_snd]]"
    => "false";

    "pure ACKs of R are dropped", "COM-30", "tcp/receive.rs",
    "let seq = self.rx.g_nxt.min(self.rx.g_re).max(self.rx.g_una);
            self.gate_to_guest(f, seq);
            [[return Fate::Pass;]]"
    => "return Fate::Drop(DropReason::Duplicate);";

    "R hears nothing of a window that has opened", "SNOOP-34", "tcp/guest.rs",
    "if [[self.window_update_due()]] {"
    => "false";

    "a CE mark is forgotten", "INV-24", "tcp/receive.rs",
    "if f.ip.tos & CE == CE && range.len() > 0 {
                [[self.flags.ece = true;]]"
    => "";

    "an out-of-order range is a byte longer than it is", "INV-25", "tcp/receive.rs",
    "[[self.ooo.insert(from, to);]]"
    => "self.ooo.insert(from, to + 1);";

    "SACK blocks end a byte too far", "COM-22", "tcp/emit.rs",
    "*slot = (Seq::wrap(from), [[Seq::wrap(to)]]);"
    => "Seq::wrap(to + 1)";

    "data of G carries G's own ACK", "INV-07", "tcp/emit.rs",
    "[[edit.set_ack(Seq::wrap(ack));]]
            edit.set_window"
    => "";

    "data of G carries G's own window", "INV-05", "tcp/emit.rs",
    "[[edit.set_window(window);]]"
    => "";

    "an edit forgets a carry of the checksum", "INV-22", "wire/edit.rs",
    "self.fix_checksum(fold32(old), [[fold32(new)]]);"
    => "new as u16 ^ (new >> 16) as u16";

    "held bytes are acknowledged to R for a guest that is long silent", "INV-19",
    "tcp/receive.rs",
    "else if [[cx.vm.clock.alive_within(cx.now, patience)]] {"
    => "true";

    "time in which a guest is paused counts as time it had", "SNOOP-32", "tcp/vm.rs",
    "let live = if [[self.drained]] {"
    => "true";

    "a destroyed VM's remotes are not told", "LIFE-05", "tcp/lifecycle.rs",
    "[[self.emit_to_net(cx, seq, RST_ACK, None);]]
            cx.vm.counters.flows_aborted += 1;
            self.abort(cx, Why::GuestGone, false);"
    => "let _ = seq;";

    "R's odd segments are answered for a guest that is long silent", "INV-19", "tcp/receive.rs",
    "if [[cx.vm.clock.alive_within(cx.now, limits::T_PAUSED)]] {
            self.rate_limited_ack(cx);"
    => "true";

    "probes of a shut window are answered for a guest that is long silent", "LIFE-05",
    "tcp/receive.rs",
    "&& [[!cx.vm.clock.alive_within(cx.now, limits::T_PAUSED)]];"
    => "false";

    "data of G echoes a clock that R never had", "INV-09", "tcp/emit.rs",
    "edit.set_timestamps(self.ts.emit_r, [[self.ts.recent]]);"
    => "self.ts.recent.wrapping_add(1000)";

    "data of G carries a clock that G never had", "INV-09", "tcp/emit.rs",
    "edit.set_timestamps([[self.ts.emit_r]], self.ts.recent);"
    => "self.ts.emit_r.wrapping_add(1)";

    "R's CWR does not end the ECE", "INV-24", "tcp/receive.rs",
    "if tcp.flags.contains(TcpFlags::CWR) {
                [[self.flags.ece = false;]]"
    => "";

    "a SYN with options nobody understands begins an offloaded connection", "INV-23",
    "tcp/handshake.rs",
    "if [[client.has(SynInfo::HAS_UNKNOWN)]] || server"
    => "false";

    "what G sends on a flow that passes is edited", "INV-17", "engine/frames.rs",
    "State::On | State::Drain => flow.on_segment_from_guest(cx, f),
                State::Pass => [[Fate::Pass]],"
    => "flow.on_segment_from_guest(cx, f)";

    "a VM gets one flow more than it may have", "INV-20", "flow/table.rs",
    "self.port_mut(port).flows_max = [[flows_max]];"
    => "flows_max + 1";

    "R's FIN is delivered a place beyond G's window", "INV-13", "tcp/deliver.rs",
    "self.fin_r().is_some_and(|fin| [[fin < self.rx.g_re]])"
    => "fin <= self.rx.g_re";
}
