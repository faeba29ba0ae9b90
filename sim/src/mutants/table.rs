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
    "if self.fin_acked_by_guest() { self.receiver.next() + 1 } else { [[self.receiver.next()]] }"
    => "self.receiver.next() + 1";

    "ACKs to R with a sequence number beyond what was sent (seq = q.end)", "EMIT-R",
    "tcp/outbound.rs",
    "[[self.sent().min(self.edge(shift)).max(self.una)]]"
    => "self.sent() + 1448";

    "a TSval of R as it comes, not the newest (R's segments may overtake each other)", "INV-08",
    "tcp/timestamps.rs",
    "pub(crate) fn on_tsval_from_net(&mut self, tsval: u32) {
        [[self.to_guest = newest(self.to_guest, tsval);]]"
    => "self.to_guest = tsval;";

    "a stale ACK on stored data", "EMIT-G", "tcp/gates.rs",
    "seq: Seq::wrap(seq),
            ack: [[Seq::wrap(self.outbound.una())]],"
    => "Seq(self.outbound.isn().0.wrapping_add(1))";

    "duplicate ACKs of G go on to R", "SNOOP-25", "tcp/from_guest.rs",
    "self.on_pure_ack_from_guest(cx, seq);
            [[Fate::Absorbed]]"
    => "Fate::Pass";

    "bytes that G has SACKed are let go", "INV-03", "tcp/from_guest.rs",
    "[[sender.on_ack(&said, &mut sending);]]"
    => "sender.on_ack(&said, &mut sending);
        let top = tcp.options.sack.as_slice().iter().map(|(_, to)| to.unwrap(una)).max();
        self.store.release(cx.arena, top.unwrap_or(una));";

    "R's FIN is acknowledged before G has", "INV-04", "tcp/flow.rs",
    "[[self.receiver.is_closed() && self.sender.una() > self.receiver.fin()]]"
    => "self.receiver.is_closed()";

    "the right edge follows a window that was rounded down", "INV-05", "tcp/receiver.rs",
    "[[self.edge = self.edge.max(t.ack + (field << shift));]]"
    => "self.edge = t.ack + (self.field_for(t, self.edge_wanted(t)) << shift);
        field = field.min((self.edge - t.ack) >> shift);";

    "segments with a wrong checksum are taken", "COM-13", "tcp/from_net.rs",
    "let tcp = f.tcp;
        if [[!f.checksum_ok()]] {"
    => "false";

    "an ACK of R above what was sent is believed", "INV-12", "tcp/outbound.rs",
    "&& [[ack <= self.sent()]]"
    => "true";

    "R's keepalives are dropped", "SNOOP-36", "tcp/from_net.rs",
    "let seq = self.sender.probe_seq();
            self.gate_to_guest(f, seq);
            [[return Fate::Pass;]]"
    => "return Fate::Drop(DropReason::Duplicate);";

    "G's RST reaches R with a wrong sequence number", "SNOOP-16", "tcp/gates.rs",
    "let seq = [[self.outbound.sent()]];
        self.emit_to_net(cx, seq, RST_ACK, None);"
    => "self.outbound.sent() + 70_000";

    "segments for G are longer than its MSS (for: no MSS change on PTB)", "COM-20",
    "tcp/deliver.rs",
    "let mss = [[u64::from(self.options.mss_to_guest)]];
        let room = (room"
    => "u64::from(self.options.mss_to_guest) + 8";

    "CE reaches G a second time, on bytes from the store", "INV-24", "tcp/gates.rs",
    "CE if [[self.options.ecn]] => ECT0,"
    => "false";

    "a flow is evicted with bytes in its store", "LIFE-02", "engine.rs",
    "let parked = |f: &Flow| f.state() == State::On && [[f.is_parked() && f.quiescent()]];"
    => "true";

    "the commit record says G has everything", "LIFE-09", "tcp/lifecycle.rs",
    "let progress = Progress {
            rcv_nxt: [[self.receiver.next()]],"
    => "self.sender.una().min(self.receiver.next())";

    "after a restart a flow that owes little is forgotten", "INV-21", "engine/restart.rs",
    "let owed = [[record.rcv_nxt > record.guest_una]];"
    => "record.rcv_nxt > record.guest_una + 3000";

    "after a restart R's RST has a wrong sequence number", "LIFE-09", "tcp/flow.rs",
    "outbound: Outbound::recovered([[record.net_nxt]]),"
    => "record.net_nxt + 9000";

    "after a restart G is not told", "INV-21", "tcp/lifecycle.rs",
    "self.standing.abort(Why::Restart, [[true]]);"
    => "false";

    "pages are let go before G has acknowledged all of them", "INV-03", "tcp/from_guest.rs",
    "[[self.store.release(cx.arena, bytes_end);]]"
    => "self.store.release(cx.arena, bytes_end + 16_384);";

    "a page of the reservation is never given back", "INV-06", "tcp/receiver.rs",
    "[[vm.unreserve(u64::from(self.reserved_pages));]]"
    => "vm.unreserve(u64::from(self.reserved_pages).saturating_sub(1));";

    "a VM may reserve four pages of others", "INV-06", "tcp/vm.rs",
    "[[self.reserved_pages + pages <= self.budget_pages]]"
    => "self.reserved_pages + pages <= self.budget_pages + 4";

    "the edge goes beyond the reservation", "INV-06", "tcp/receiver/window.rs",
    "let edge = [[t.guest_una + u64::from(self.buffer_bytes)]];"
    => "t.guest_una + u64::from(self.buffer_bytes) + 65_536";

    "G's window is read with R's scale", "COM-20", "tcp/from_guest.rs",
    "edge: ack + ([[u64::from(tcp.window) << self.options.shift_g]]),"
    => "u64::from(tcp.window) << self.options.shift_r";

    "bytes for G beyond its window by one", "INV-13", "tcp/sender.rs",
    "if useful { [[room]] } else { 0 }"
    => "room + 1";

    "old timestamps are taken (no PAWS)", "SNOOP-04", "tcp/from_net.rs",
    "if [[!self.timestamps.is_current(cx.now, ts.tsval, limits::PAWS_TICKS)]] {"
    => "false";

    "a timestamp out of order is echoed", "SNOOP-05", "tcp/from_net.rs",
    "&& [[seq <= self.receiver.acks.sent()]]"
    => "true";

    "R's RST overtakes the bytes before it", "SNOOP-15", "tcp/deliver.rs",
    "[[self.receiver.reset_waits() && self.sender.una() >= self.delivery_end()]]"
    => "self.receiver.reset_waits()";

    "an RST of R anywhere is believed", "SNOOP-15", "tcp/from_net.rs",
    "if [[self.receiver.takes_reset(seq)]] {"
    => "true";

    "a flow leaves the path while R may still send beyond G's window", "INV-05", "tcp/flow.rs",
    "(closed || [[self.sender.edge() >= self.receiver.edge()]])"
    => "true";

    "what G lost is never sent again", "INV-18", "tcp/sender.rs",
    "[[self.next = self.una;]]
        s.losses.of_guest_or_new()"
    => "";

    "R's FIN is never delivered", "INV-18", "tcp/sender.rs",
    "[[self.fin_fits(stream) && stream.end == self.next && self.una <= self.next]]"
    => "false";

    "pure ACKs of R are dropped", "COM-30", "tcp/from_net.rs",
    "let seq = self.sender.pure_ack_seq(self.receiver.passed());
            self.gate_to_guest(f, seq);
            [[return Fate::Pass;]]"
    => "return Fate::Drop(DropReason::Duplicate);";

    "R hears nothing of a window that has opened", "SNOOP-34", "tcp/from_guest.rs",
    "if [[self.receiver.window_update_due(&self.terms())]] {"
    => "false";

    "a CE mark is forgotten", "INV-24", "tcp/receiver.rs",
    "if marked {
            [[self.ece = true;]]"
    => "";

    "an out-of-order range is a byte longer than it is", "INV-25", "tcp/receiver.rs",
    "[[self.out_of_order.insert(from, to);]]"
    => "self.out_of_order.insert(from, to + 1);";

    "SACK blocks end a byte too far", "COM-22", "tcp/gates.rs",
    "*slot = (Seq::wrap(from), [[Seq::wrap(to)]]);"
    => "Seq::wrap(to + 1)";

    "data of G carries G's own ACK", "INV-07", "tcp/gates.rs",
    "[[edit.set_ack(Seq::wrap(ack));]]
            edit.set_window"
    => "";

    "data of G carries G's own window", "INV-05", "tcp/gates.rs",
    "[[edit.set_window(window);]]"
    => "";

    "an edit forgets a carry of the checksum", "INV-22", "wire/edit.rs",
    "self.fix_checksum(fold32(old), [[fold32(new)]]);"
    => "new as u16 ^ (new >> 16) as u16";

    "held bytes are acknowledged to R for a guest that is long silent", "INV-19", "tcp/from_net.rs",
    "else if [[cx.vm.clock.alive_within(cx.now, patience)]] {"
    => "true";

    "time in which a guest is paused counts as time it had", "SNOOP-32", "tcp/vm.rs",
    "let live = if [[self.drained]] {"
    => "true";

    "a destroyed VM's remotes are not told", "LIFE-05", "tcp/lifecycle.rs",
    "[[self.reset_to_net(cx);]]
            cx.vm.counters.flows_aborted += 1;
            self.abort(cx, Why::GuestGone, false);"
    => "";

    "R's odd segments are answered for a guest that is long silent", "INV-19", "tcp/from_net.rs",
    "if [[cx.vm.clock.alive_within(cx.now, limits::T_PAUSED)]] {
            self.rate_limited_ack(cx);"
    => "true";

    "probes of a shut window are answered for a guest that is long silent", "LIFE-05",
    "tcp/from_net.rs",
    "&& [[!cx.vm.clock.alive_within(cx.now, limits::T_PAUSED)]];"
    => "false";

    "data of G echoes a clock that R never had", "INV-09", "tcp/gates.rs",
    "edit.set_timestamps(shown.tsval, [[shown.tsecr]]);"
    => "shown.tsecr.wrapping_add(1000)";

    "data of G carries a clock that G never had", "INV-09", "tcp/gates.rs",
    "edit.set_timestamps([[shown.tsval]], shown.tsecr);"
    => "shown.tsval.wrapping_add(1)";

    "R's CWR does not end the ECE", "INV-24", "tcp/receiver.rs",
    "if cwr {
            [[self.ece = false;]]"
    => "";

    "a SYN with options nobody understands begins an offloaded connection", "INV-23",
    "tcp/options.rs",
    "if [[client.has(SynInfo::HAS_UNKNOWN)]] || server"
    => "false";

    "what G sends on a flow that passes is edited", "INV-17", "tcp/from_guest.rs",
    "State::On | State::Drain => self.on_segment_from_guest(cx, f),
            State::Pass => [[Fate::Pass]],"
    => "self.on_segment_from_guest(cx, f)";

    "a VM gets one flow more than it may have", "INV-20", "flow/table.rs",
    "self.port_mut(port).flows_max = [[flows_max]];"
    => "flows_max + 1";

    "R's FIN is delivered a place beyond G's window", "INV-13", "tcp/sender.rs",
    "stream.fin && [[stream.end < self.edge]]"
    => "stream.end <= self.edge";
}
