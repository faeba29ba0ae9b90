//! The mutations of congestion offload: possible mistakes of a sender toward the network, and of H
//! toward the guest for which it sends. See [`super::table`] for how a place is written.

use super::table::{Mutation, mutations};

mutations! { SENDING:
    "a loss leaves the window as it is", "FLOOD-21", "reduce",
    "self.controller.on_congestion(now, in_use);"
    => "";

    "two losses of one window reduce it twice", "FLOOD-21", "on_loss",
    "Phase::Recovery | Phase::Timeout => [[self.lost_beyond |= n.lost_beyond]],"
    => "self.begin(Phase::Recovery, n)";

    "a loss in the window after the one that is repaired reduces nothing", "FLOOD-21", "on_news",
    "n.lost || (over && self.lost_beyond)"
    => "n.lost";

    "NewReno does not halve", "FLOOD-21", "on_congestion",
    "self.window.reduce(in_use / 2);"
    => "self.window.reduce(in_use);";

    "CUBIC makes room for newcomers after every loss", "FLOOD-21", "on_reduction",
    "self.w_max = if [[converges]] {"
    => "true";

    "a reduction lets the whole new window out at once", "FLOOD-21", "allowance",
    "self.prr.budget()"
    => "self.controller.cwnd().saturating_sub(in_flight)";

    "a timeout leaves the window as it is", "FLOOD-23", "collapse",
    "self.cwnd = self.mss;"
    => "";

    "timeouts do not double", "FLOOD-23", "rto_after",
    "rto.saturating_mul(1 << timeouts.min(20))"
    => "rto";

    "each timeout of the same bytes lowers ssthresh", "FLOOD-23", "on_retransmission_timeout",
    "!core::mem::replace(&mut self.timed_out, true)"
    => "true";

    "the ACK of a copy is a round trip", "FLOOD-23", "take",
    "sample = None;"
    => "sample = sample.map(|least| least.min(now.since(p.sent_at)));";

    "a tail loss probe is remembered through a recovery", "INV-24", "detect",
    "if [[lost > 0]] { self.probe.forget(); }"
    => "false";

    "a tail loss probe is remembered through a timeout", "INV-24", "on_retransmission_timeout",
    "self.probe.forget();"
    => "";

    "SACK blocks are taken as they stand", "FLOOD-21", "on_ack",
    "blocks.iter().filter(|block| **block > last).min()"
    => "blocks.iter().filter(|block| last.1 == 0 || **block < last).max()";

    "a first flight of smaller segments has the bytes of longer ones", "FLOOD-19", "on_mss",
    "if [[is_initial]] { self.controller.on_idle(self.initial_window); }"
    => "false";

    "a sender behind a pause knows nothing of the path", "FLOOD-25", "resume",
    "self.sender.resume(before.learned);"
    => "";

    "behind a pause a first window is spread", "FLOOD-25", "poll_allowed",
    "self.pacer.has_rate()"
    => "true";

    "who is known from before a pause is shown little behind it", "FLOOD-13", "own_srtt",
    "self.rtt.srtt().filter(|_| self.pacer.has_rate())"
    => "self.rtt.srtt()";

    "timeouts are forgotten in a pause", "FLOOD-23", "resumed",
    "self.rto().max(WIRE_RTO_INITIAL)"
    => "WIRE_RTO_INITIAL";

    "a sender behind a pause has the controller that was chosen before", "FLOOD-20", "resume",
    "before.algorithm() == algorithm"
    => "true";

    "behind a timeout the window is as long a segment as before", "FLOOD-40", "on_mss",
    "if [[is_one]] {"
    => "false";

    "a mark from before a pause counts again", "FLOOD-24", "owe_cwr",
    "self.marks_count_from = next;"
    => "";

    "a black hole is forgotten in a pause", "FLOOD-40", "resume",
    "(self.ceiling, self.proven, self.trial) = (before.ceiling, before.proven, before.trial);"
    => "";

    "a path that was down is a black hole for good", "FLOOD-40", "lower_mss_for_hole",
    "self.trial = is_first.then_some(trial);"
    => "";

    "a probe of G for longer segments is cut", "FLOOD-40", "note_size",
    "(from, to) == (s.from, s.to) && !s.again"
    => "false";

    "G sends on as long as a probe that was lost", "FLOOD-40", "note_size",
    "self.lower_mss_for_hole(self.wire_mss(), to - from);"
    => "";

    "copies of a probe of G are as long", "FLOOD-40", "is_trial",
    "if is_trial { self.trial = Some(Trial::Of { from: range.seq, to: range.end }); } [[is_trial]]"
    => "false";

    "G is never thought to be away", "FLOOD-17", "absence",
    "silent >= longest || now.since(at) > ABSENCE_KNOWN"
    => "false";

    "behind a pause a short path's window leaves as one burst", "FLOOD-26", "on_idle",
    "self.burst = self.burst.min(BURST_MAX.max(2 * self.mss));"
    => "";

    "a segment under way makes of a pause none", "FLOOD-26", "poll_allowed",
    "self.pacer.on_idle(now, self.sent_at);"
    => "if self.board.flight() == 0 {
            self.pacer.on_idle(now, self.sent_at);
        }";

    "the timeout counts from the first segment, whatever is acknowledged", "FLOOD-23", "on_moved",
    "self.since = now;"
    => "";

    "a timeout for nothing is never undone", "FLOOD-21", "on_spurious",
    "self.controller.on_spurious();"
    => "";

    "data of R decides whether a timeout was for nothing", "FLOOD-22", "on_ack",
    "arrived.delivered > 0 || [[a.bare]];"
    => "true";

    "what left together is one segment", "FLOOD-39", "join",
    "self.longest.max(next.longest)"
    => "self.longest + next.longest";

    "a copy that waits for the rate of its VM times out", "FLOOD-23", "timeout",
    "self.listed && self.sender.owes_first()"
    => "false";

    "a window probe counts from when it was due", "FLOOD-12", "poll",
    "segment.from == self.una() || [[bytes == 0]]"
    => "false";

    "every timeout is for nothing", "FLOOD-21", "is_timeout_spurious",
    "Doubt::Tested if [[originals]] => true,"
    => "true";

    "SACKed bytes are sent again after a timeout", "FLOOD-21", "give_up_what_is_late",
    "self.board.pieces().next().is_some_and(|p| p.state == State::Sacked)"
    => "true";

    "the tail is not probed", "FLOOD-21", "may_probe",
    "self.probe.is_allowed()"
    => "false";

    "a loss that a probe has repaired reduces nothing", "FLOOD-21", "on_repaired_by_probe",
    "self.reduce(now, flight, next);"
    => "";

    "what three others overtake is lost however often they only come late", "FLOOD-21",
    "reordering_window",
    "at_once && !self.reordering_seen"
    => "at_once";

    "without SACK a partial ACK names no next hole", "FLOOD-21", "is_lost_by_duplicates",
    "[[(third || partial)]] && self.board.mark_first_lost() > 0"
    => "third";

    "an R that makes up duplicate ACKs gets a segment for each", "SEC-03", "count_duplicates",
    "!duplicate || self.duplicates >= most"
    => "!duplicate";

    "each ACK counts as a segment, however little it acknowledges", "SEC-03", "tell",
    "delivered: [[arrived.acked]],"
    => "if arrived.acked > 0 { self.mss } else { 0 }";

    "a mark reduces nothing", "FLOOD-24", "on_news",
    "self.begin(Phase::Reduction, n);"
    => "";

    "each ACK with ECE reduces the window", "FLOOD-24", "on_news",
    "una > self.marks_count_from && self.phase == Phase::Open"
    => "true";

    "CWR is never sent", "FLOOD-24", "owe_cwr",
    "self.cwr_due = self.ecn;"
    => "";

    "CWR is on every part of a super-segment", "FLOOD-24", "fresh",
    "to = to.min(from + self.mss);"
    => "";

    "a copy is ECN-capable", "FLOOD-24", "emit_data_to_net",
    "self.options.ecn && !d.again && d.len > 0"
    => "self.options.ecn && d.len > 0";

    "an idle sender keeps its window", "FLOOD-25", "poll_allowed",
    "self.episode.on_idle(now, self.sent_at, self.rtt.rto());"
    => "";

    "a window that is not used grows", "FLOOD-25", "is_used",
    "pressed && self.pipe_ack().is_none_or(|bytes| bytes.max(flight) * 2 >= cwnd)"
    => "true";

    "a window leaves as one burst", "FLOOD-26", "permitted",
    "paced < self.mss"
    => "false";

    "on a short path too a window waits for its pace", "FLOOD-26", "set_rate",
    "if [[srtt < BURST_TIME]] { u64::MAX }"
    => "false";

    "who waits for the pace is not woken", "FLOOD-26", "arm",
    "at = at.min(self.sender.paced_until());"
    => "";

    "bytes beyond R's edge leave", "FLOOD-12", "fresh",
    "to > self.net_edge"
    => "false";

    "a shut window of R is not probed", "FLOOD-12", "deadline",
    "!self.is_shut()"
    => "true";

    "an R that has taken its window back is probed for ever", "FLOOD-12", "on_wheel",
    "self.sender.probes() < limits::WINDOW_PROBES_MAX"
    => "true";

    "a window that is shut with data under way is none", "FLOOD-12", "on_retransmission_timeout",
    "self.net_edge > self.una()"
    => "true";

    "what a shut window has swallowed waits for its timer when it opens", "FLOOD-12", "on_ack",
    "self.on_room(moved);"
    => "";

    "an R that is long silent is never left to G", "FLOOD-32", "on_wheel",
    "self.sender.rtt().backoffs() < most"
    => "true";

    "the first window after lost SYNs is ten segments", "FLOOD-19", "begin_flooded",
    "syn_copies > 1"
    => "false";

    "what was too long for the path is not sent again", "FLOOD-39", "on_too_big",
    "flooded.sender.on_too_long();"
    => "";

    "an ICMP error about bytes that are not under way is believed", "FLOOD-39", "on_too_big",
    "under_way && mss < f.wire_mss()"
    => "mss < f.wire_mss()";

    "a path's MTU may be less than any path has", "FLOOD-39", "parse",
    "mtu: [[mtu.max(least)]]"
    => "mtu";

    "a black hole is never noticed", "FLOOD-40", "on_sender_woken",
    "flooded.lower_mss_for_hole(mss, flooded.wire_mss());"
    => "";

    "a slow path is taken for a black hole", "FLOOD-40", "mss_of_black_hole",
    "self.proven.max(least)"
    => "least";

    "of two copies of G's bytes the last is sent", "INV-15", "on_data",
    "!store.write(cx.arena, lent, from, &h.payload[index(from - seq)..index(end - seq)])"
    => "{ let from = seq.max(una);
          !store.write(cx.arena, lent, from, &h.payload[index(from - seq)..index(end - seq)]) }";

    "small segments of G are joined", "FLOOD-07", "on_data",
    "self.note_end(end);"
    => "";

    "G is not told of a hole in what it hands over", "FLOOD-05", "note_hole",
    "self.duplicates_due = DUPLICATES;"
    => "";

    "G's FIN is forgotten when its data is taken", "FLOOD-36", "on_data",
    "fin && end == self.accepted"
    => "false";

    "a copy of G's FIN is none", "FLOOD-36", "poll_departure",
    "closed && segment.to > bytes_end"
    => "closed && segment.to > bytes_end && !segment.again";

    "the edge that G is shown moves left", "FLOOD-14", "open",
    "self.edge = self.edge.max(wanted.min(held));"
    => "self.edge = wanted.min(held);";

    "G is ahead of an R that has let H wait", "FLOOD-14", "on_wheel",
    "self.keeps_pace &= self.sender.probes() == 0;"
    => "";

    "who was shown more than R shows is handed back", "FLOOD-32", "settle_flooded",
    "let leaves = !self.wants_flooded(cx) && [[!self.is_ahead()]];"
    => "true";

    "G is ahead of an R that let the sender before wait", "FLOOD-14", "resume",
    "self.keeps_pace = before.keeps_pace;"
    => "";

    "what G was lent before a pause is forgotten", "FLOOD-14", "end_max",
    "self.edge.max(self.net_edge + limits::OUTBOUND_AHEAD_MAX)"
    => "self.edge";

    "what G uses of what it was lent before a pause is not shown to it", "FLOOD-14", "on_data",
    "self.edge = self.edge.max(end);"
    => "";

    "the window of 0 comes with an ACK that G knows", "FLOOD-12", "hold_ack",
    "edge == una && self.would_hold(una, shift)"
    => "false";

    "the ACK of a FIN is kept back", "FLOOD-12", "would_hold",
    "(moved || self.holds_ack) && [[!fin]]"
    => "true";

    "timeouts count as probes of a window", "FLOOD-12", "deadline",
    "[[self.rtt.rto_after(self.probes)]]);"
    => "self.rtt.rto_after(self.rtt.backoffs() + self.probes)";

    "a connection that was forgotten floods on", "FLOOD-28", "note_forgotten",
    "port.vm.missed_connection = true;"
    => "";

    "a connection that H could not follow floods on", "FLOOD-28", "on_syn_from_guest",
    "p.vm.missed_connection = true;"
    => "";

    "a connection without an entry stops its guest with each segment", "FLOOD-28",
    "on_data_past_flows",
    "core::mem::take(&mut vm.missed_connection)"
    => "vm.missed_connection";

    "a handshake that H did not understand floods on", "FLOOD-28", "on_data_past",
    "self.standing.on_data_past()"
    => "false";

    "data that begins with a hole floods on", "FLOOD-28", "note_uncontrolled",
    "cx.vm.uncontrolled_at = Some(cx.now);"
    => "";

    "all that can be lent goes to those who come first", "FLOOD-28", "lendable_ahead",
    "own + [[self.budget_pages / 4]]"
    => "0";

    "a guest with room for few segments is lent more", "FLOOD-14", "on_net_edge",
    "self.keeps_pace && [[u64::from(window_max) >= 4 * self.mss]];"
    => "true";

    "what G has sent is forgotten when a flow is idle", "FLOOD-08", "park",
    "self.losses.note_unsent(shown);"
    => "";

    "what G was shown is forgotten when a flow is idle", "INV-05", "park",
    "self.note_promised(promised);"
    => "";

    "what G was shown is forgotten when H lets go of a flow", "INV-05", "settle_flooded",
    "self.note_promised(promised);"
    => "";

    "what G has used is not shown to it while H does not send", "INV-05", "shown_to_guest_by_net",
    "self.losses.used()"
    => "0_u64";

    "what G has used the next sender does not show", "INV-05", "new",
    "edge.max(used)"
    => "edge";

    "a G is never told that it asks in vain", "FLOOD-12", "on_passed_on",
    "self.losses.on_asked(self.outbound.window() == 0)"
    => "false";

    "what G has used without a place is not shown to it", "INV-05", "on_data",
    "[[end <= self.promised]] {"
    => "false";

    "what G was shown before a pause leaves beyond R's window", "FLOOD-12", "has_no_room_for",
    "self.losses.unsent().max(self.losses.promised())"
    => "self.losses.unsent()";

    "what R has no room for is lent as what it has", "FLOOD-16", "reserve",
    "end > self.net_edge"
    => "false";

    "an RST lies beyond R's window", "FLOOD-37", "reset_seq",
    "within && self.window > 0"
    => "true";

    "an RST is as low as R's window field can say", "SNOOP-16", "reset_seq",
    "within && self.window > 0"
    => "false";

    "a narrow window is forgotten in a pause", "FLOOD-19", "restart",
    "cwnd < self.cwnd"
    => "true";

    "what R has no room for goes on behind a hand-back", "FLOOD-12", "pass_on",
    "self.has_no_room_for(range.seq, end)"
    => "false";

    "a flow leaves while G is beyond R's window", "FLOOD-32", "quiescent",
    "closed || ([[within]] && self.sender.edge()"
    => "true";

    "a flow leaves while G is shown more than R shows", "FLOOD-12", "quiescent",
    "<= edge && [[!self.is_ahead()]]"
    => "true";

    "who is to be handed back is shown more", "FLOOD-13", "hand_over",
    "[[wanted]] && flooded.may_go_on"
    => "true";

    "what an R that lets H wait has yet to make room for is shown", "FLOOD-14", "on_wheel",
    "self.intake.wait_for_net();"
    => "";

    "G is shown more than a mebibyte beyond R", "FLOOD-14", "on_net_edge",
    "edge + ahead"
    => "edge + 2 * ahead";

    "G is not told when the room it was lent ends", "FLOOD-12", "hand_back_now",
    "self.outbound.note_ack_to_guest(ahead);"
    => "";

    "G is shown room that has no place", "FLOOD-14", "open",
    "self.edge.max([[wanted.min(held)]])"
    => "wanted";

    "lent pages are not given back", "INV-06", "release",
    "vm.take_back(core::mem::take(&mut self.reserved_pages).into());"
    => "";

    "pages of a path that has become slow stay taken", "FLOOD-16", "open",
    "self.shrink(vm, una);"
    => "";

    "what G has handed over goes when its flow is parked", "INV-06", "park",
    "self.keeps_bytes()"
    => "false";

    "H takes over while bytes are under way of which it has no copy", "FLOOD-33", "begin_flooded",
    "self.outbound.una() == sent"
    => "true";

    "the last bytes that H sends for G are not pushed", "FLOOD-07", "poll",
    "segment.to == cut || segment.to >= self.intake.bytes_end()"
    => "segment.to == cut";

    "H lets go of what R has not acknowledged", "FLOOD-32", "settle_flooded",
    "(verbatim || leaves) && !self.keeps_bytes()"
    => "verbatim || leaves";

    "urgent data of G overtakes what is kept", "FLOOD-38", "take_over",
    "if [[needs_verbatim(f)]] {
            return Some(Fate::Drop(DropReason::Draining));"
    => "false";

    "a wrong checksum of G becomes a right one", "COM-13", "take_over",
    "!f.checksum_ok()"
    => "false";

    "what G cannot have sent counts as sent", "FLOOD-08", "note_shown",
    "range.seq <= most"
    => "true";

    "a byte that G was shown no room for is not answered", "FLOOD-15", "hand_over",
    "is_old || [[probes]] ||"
    => "false";

    "who asks for what R has acknowledged hears nothing", "FLOOD-15", "hand_over",
    "[[handed.range.seq < self.outbound.una()]];"
    => "false";

    "H acknowledges to G what R has not", "INV-12", "emit_to_guest",
    "Seq::wrap(ack)"
    => "Seq::wrap(self.losses.flooded().map_or(self.outbound.una(), Flooded::accepted))";

    "R's duplicate ACKs for H reach G", "FLOOD-09", "on_valid_segment",
    "if [[hidden]] {"
    => "false";

    "R's marks for H reach G", "FLOOD-09", "on_valid_segment",
    "if self.losses.flooded().is_some() { TcpFlags::ACK } else { tcp.flags }"
    => "tcp.flags";

    "ACKs for what still waits at H are believed", "FLOOD-08", "believes",
    "self.losses.flooded().is_some_and(kept)"
    => "false";

    "what H sends for G echoes no clock", "INV-09", "emit_data_to_net",
    "self.header_to_net(cx.key, d.seq, d.flags, &[], !d.again)"
    => "{ let mut header = self.header_to_net(cx.key, d.seq, d.flags, &[], !d.again);
          header.timestamps.iter_mut().for_each(|shown| shown.tsecr = 0);
          header }";

    "VMs do not take turns", "FLOOD-16", "pop",
    "self.turns.rotate_left(1);"
    => "";

    "what leaves is not taken off a VM's turn", "FLOOD-16", "charge",
    "self.credit -= bytes;"
    => "";

    "what leaves is not taken off a flow's turn", "FLOOD-16", "charge",
    "*credit -= bytes;"
    => "";

    "a flow sends a frame in its turn, of whatever length", "FLOOD-16", "push",
    "self.due.push_front((id, credit))"
    => "self.due.push_back((id, credit))";

    "what passes a VM's limit is never too much", "FLOOD-16", "police",
    "p.next() > now + LIMIT_DEBT_MAX"
    => "false";

    "R's SACK blocks for H reach G", "FLOOD-09", "on_sack_from_net",
    "self.losses.flooded().is_some()"
    => "false";

    "R's clock reaches G only with R's data while H sends for it", "INV-08", "on_valid_segment",
    "[[self.timestamps.on_tsval_from_net(ts.tsval);]]
                }
                self.outbound.note_ack_to_guest(new);
                cx.vm"
    => "";

    "the clock of what G hands over does not reach R", "FLOOD-41", "on_segment_from_guest",
    "self.timestamps.on_tsval_from_guest(cx.now, ts.tsval);"
    => "if tcp.payload_len == 0 {
            self.timestamps.on_tsval_from_guest(cx.now, ts.tsval);
        }";

    "H's segments are as long as those of G, whatever R takes", "COM-20", "own_mss",
    "self.options.mss_to_net.min(self.options.mss_to_guest).into()"
    => "self.options.mss_to_guest.into()";

    "what H sends for G is not ECN-capable", "FLOOD-24", "emit_data_to_net",
    "header.tos |= ECT0;"
    => "";

    "H's ACKs are as ECN-capable as G's data", "EMIT-R", "header_to_net",
    "self.template.tos_to_net() & !ECN_MASK"
    => "self.template.tos_to_net()";

    "what H repeats for G is marked as urgent", "FLOOD-38", "poll_departure",
    "let mut flags = TcpFlags::ACK;"
    => "let urgent = if segment.again { TcpFlags::URG } else { TcpFlags::ACK };
        let mut flags = TcpFlags::ACK.union(urgent);";
}
