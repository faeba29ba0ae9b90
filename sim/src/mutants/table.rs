//! The mutations: each breaks `core` in one way.
//!
//! A place is named by a function and by a piece of it. `[[` and `]]` in the piece mark the part
//! that is replaced, if that is not all of it; `place.rs` says how a place is searched.
//!
//! The first fifteen were given with the specification. Five of them are about sending: here they
//! name the counterpart in ack offload, and [`super::sending`] has those of congestion offload.

use super::second::SECOND;
use super::sending::SENDING;
use super::sockets::SOCKETS;

/// One way to break `core`.
#[derive(Clone, Copy, Debug)]
pub struct Mutation {
    /// Its effect.
    pub name: &'static str,
    /// The rule it breaks.
    pub breaks: &'static str,
    /// The function that it changes.
    pub function: &'static str,
    /// Where; see the module doc.
    pub place: &'static str,
    /// Its replacement. Nothing: the statement is left out.
    pub instead: &'static str,
}

macro_rules! mutations {
    ($list:ident: $($name:literal, $breaks:literal, $function:literal, $place:literal
        => $instead:literal;)+) => {
        /// Mutations; see the module doc.
        pub(super) const $list: &[Mutation] = &[$(Mutation {
            name: $name, breaks: $breaks, function: $function, place: $place, instead: $instead,
        },)+];
    };
}
pub(super) use mutations;

/// All mutations. Numbers in reports count from 1, in this order.
pub fn all() -> impl Iterator<Item = &'static Mutation> {
    FIRST.iter().chain(SECOND).chain(SENDING).chain(SOCKETS)
}

mutations! { FIRST:
    "an ACK one byte too high", "INV-03", "early_ack",
    "if self.fin_acked_by_guest() { self.receiver.next() + 1 } else { [[self.receiver.next()]] }"
    => "self.receiver.next() + 1";

    "ACKs to R with a sequence number beyond what was sent (seq = q.end)", "EMIT-R", "pure_ack_seq",
    "self.sent().min(self.edge(shift)).max(self.una)"
    => "self.sent() + 1448";

    "a TSval of R as it comes, not the newest (R's segments may overtake each other)", "INV-08",
    "on_tsval_from_net",
    "self.to_guest = newest(self.to_guest, tsval);"
    => "self.to_guest = tsval;";

    "a stale ACK on stored data", "EMIT-G", "emit_to_guest",
    "Seq::wrap(ack)"
    => "Seq(self.outbound.isn().0.wrapping_add(1))";

    "duplicate ACKs of G go on to R", "SNOOP-25", "on_segment_from_guest",
    "self.on_pure_ack_from_guest(cx, seq);
            [[Fate::Absorbed]]"
    => "Fate::Pass";

    "bytes that G has SACKed are let go", "INV-03", "take_ack_from_guest",
    "sender.on_ack(&said, &mut sending);"
    => "sender.on_ack(&said, &mut sending);
        let top = sack.and_then(|s| s.as_slice().iter().map(|(_, to)| to.unwrap(una)).max());
        self.store.release(cx.arena, top.unwrap_or(una));";

    "R's FIN is acknowledged before G has", "INV-04", "fin_acked_by_guest",
    "self.receiver.is_closed() && self.sender.una() > self.receiver.fin()"
    => "self.receiver.is_closed()";

    "the right edge follows a window that was rounded down", "INV-05", "advertise_window",
    "self.edge = self.edge.max(t.ack + (field << shift));"
    => "self.edge = t.ack + (self.field_for(t, self.edge_wanted(t)) << shift);
        field = field.min((self.edge - t.ack) >> shift);";

    "segments with a wrong checksum are taken", "COM-13", "on_segment_from_net",
    "!f.checksum_ok()"
    => "false";

    "an ACK of R above what was sent is believed", "INV-12", "ack_in_range",
    "ack <= self.sent()"
    => "true";

    "R's keepalives are dropped", "SNOOP-36", "on_keepalive_from_net",
    "return Fate::Pass;"
    => "return Fate::Drop(DropReason::Duplicate);";

    "G's RST reaches R with a wrong sequence number", "SNOOP-16", "reset_to_net",
    "self.outbound.pure_ack_seq(self.options.shift_r)"
    => "self.outbound.sent() + 70_000";

    "segments for G are longer than its MSS (for: no MSS change on PTB)", "COM-20", "frame_limit",
    "u64::from(self.options.mss_to_guest)"
    => "u64::from(self.options.mss_to_guest) + 8";

    "CE reaches G a second time, on bytes from the store", "INV-24", "emit_to_guest",
    "self.options.ecn"
    => "false";

    "a flow is evicted with bytes in its store", "LIFE-02", "victim",
    "f.is_parked() && f.quiescent()"
    => "true";

    "the commit record says G has everything", "LIFE-09", "commit",
    "let progress = Progress {
            rcv_nxt: [[promised]],"
    => "self.sender.una().min(self.receiver.next())";

    "after a restart a flow that owes little is forgotten", "INV-21", "handle_restart",
    "record.rcv_nxt > record.guest_una"
    => "record.rcv_nxt > record.guest_una + 3000";

    "after a restart R's RST has a wrong sequence number", "LIFE-09", "recovered",
    "outbound: Outbound::recovered([[record.net_nxt]]),"
    => "record.net_nxt + 9000";

    "after a restart G is not told", "INV-21", "reset_after_restart",
    "self.standing.abort(Why::Restart, [[true]]);"
    => "false";

    "pages are let go before G has acknowledged all of them", "INV-03", "take_ack_from_guest",
    "self.store.release(cx.arena, bytes_end);"
    => "self.store.release(cx.arena, bytes_end + 16_384);";

    "a page of the reservation is never given back", "INV-06", "release",
    "vm.unreserve(u64::from(self.reserved_pages));"
    => "vm.unreserve(u64::from(self.reserved_pages).saturating_sub(1));";

    "a VM may reserve four pages of others", "INV-06", "reserve",
    "self.reserved_pages + pages <= self.budget_pages"
    => "self.reserved_pages + pages <= self.budget_pages + 4";

    "the edge goes beyond the reservation", "INV-06", "edge_wanted",
    "t.guest_una + u64::from(self.buffer_bytes)"
    => "t.guest_una + u64::from(self.buffer_bytes) + 65_536";

    "G's window is read with R's scale", "COM-20", "take_ack_from_guest",
    "u64::from(window) << self.options.shift_g"
    => "u64::from(window) << self.options.shift_r";

    "bytes for G beyond its window by one", "INV-13", "fresh_bytes",
    "if useful { [[room]] } else { 0 }"
    => "room + 1";

    "old timestamps are taken (no PAWS)", "SNOOP-04", "paws",
    "!self.timestamps.is_current(cx.now, ts.tsval, limits::PAWS_TICKS)"
    => "false";

    "a timestamp out of order is echoed", "SNOOP-05", "update_ts_recent",
    "seq <= self.receiver.acks.sent()"
    => "true";

    "R's RST overtakes the bytes before it", "SNOOP-15", "rst_ready",
    "self.receiver.reset_waits() && self.sender.una() >= self.delivery_end()"
    => "self.receiver.reset_waits()";

    "an RST of R anywhere is believed", "SNOOP-15", "on_rst_from_net",
    "self.receiver.takes_reset(seq)"
    => "true";

    "a flow leaves the path while R may still send beyond G's window", "INV-05", "quiescent",
    "self.sender.edge() >= self.receiver.edge()"
    => "true";

    "what G lost is never sent again", "INV-18", "on_timeout",
    "self.lose_all(s);"
    => "";

    "R's FIN is never delivered", "INV-18", "fin_due",
    "self.fin_fits(stream) && stream.end == self.next && self.una <= self.next"
    => "false";

    "pure ACKs of R are dropped", "COM-30", "on_valid_segment",
    "return self.pass_ack(f);"
    => "return Fate::Drop(DropReason::Duplicate);";

    "R hears nothing of a window that has opened", "SNOOP-34", "maybe_window_update",
    "self.receiver.window_update_due(&self.terms_for(self.early_ack()))"
    => "false";

    "a CE mark is forgotten", "INV-24", "on_congestion_marks",
    "self.ece = true;"
    => "";

    "an out-of-order range is a byte longer than it is", "INV-25", "keep",
    "self.out_of_order.insert(from, to);"
    => "self.out_of_order.insert(from, to + 1);";

    "SACK blocks end a byte too far", "COM-22", "sack_blocks",
    "Seq::wrap(to)"
    => "Seq::wrap(to + 1)";

    "data of G carries G's own ACK", "INV-07", "gate_to_net",
    "edit.set_ack(Seq::wrap(ack));"
    => "";

    "data of G carries G's own window", "INV-05", "gate_to_net",
    "edit.set_window(window);"
    => "";

    "an edit forgets a carry of the checksum", "INV-22", "put32",
    "fold32(new)"
    => "new as u16 ^ (new >> 16) as u16";

    "held bytes are acknowledged to R for a guest that is long silent", "INV-19",
    "on_keepalive_from_net",
    "cx.vm.clock.alive_within(cx.now, patience)"
    => "true";

    "time in which a guest is paused counts as time it had", "SNOOP-32", "now",
    "let live = if [[self.drained]] {"
    => "true";

    "a destroyed VM's remotes are not told", "LIFE-05", "on_guest_gone",
    "self.reset_to_net(cx);"
    => "";

    "R's odd segments are answered for a guest that is long silent", "INV-19", "challenge_ack",
    "cx.vm.clock.alive_within(cx.now, limits::T_PAUSED)"
    => "true";

    "probes of a shut window are answered for a guest that is long silent", "LIFE-05",
    "out_of_window",
    "!cx.vm.clock.alive_within(cx.now, limits::T_PAUSED)"
    => "false";

    "data of G echoes a clock that R never had", "INV-09", "gate_to_net",
    "edit.set_timestamps(shown.tsval, [[shown.tsecr]]);"
    => "shown.tsecr.wrapping_add(1000)";

    "data of G carries a clock that G never had", "INV-09", "gate_to_net",
    "edit.set_timestamps([[shown.tsval]], shown.tsecr);"
    => "shown.tsval.wrapping_add(1)";

    "R's CWR does not end the ECE", "INV-24", "on_congestion_marks",
    "self.ece = false;"
    => "";

    "a SYN with options nobody understands begins an offloaded connection", "INV-23", "negotiate",
    "client.has(SynInfo::HAS_UNKNOWN)"
    => "false";

    "a VM gets one flow more than it may have", "INV-20", "set_quota",
    "self.port_mut(port).flows_max = [[flows_max]];"
    => "flows_max + 1";

    "R's FIN is delivered a place beyond G's window", "INV-13", "fin_fits",
    "stream.end < self.edge"
    => "stream.end <= self.edge";
}
