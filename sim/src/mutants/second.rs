//! The mutations of the second look: mistakes that a review made of its own, and more of the kind.
//! See [`super::table`] for how a place is written.

use super::table::{Mutation, mutations};

mutations! { SECOND:
    "TSecr to G stays the first segment's", "INV-08", "tcp/timestamps.rs",
    "[[self.echo_to_guest = tsecr;]]"
    => "";

    "TS.Recent is updated too rarely", "SNOOP-05", "tcp/from_net.rs",
    "&& [[seq <= self.receiver.acks.sent()]]"
    => "seq < self.receiver.acks.sent()";

    "the PAWS clock is never refreshed", "SNOOP-04", "tcp/timestamps.rs",
    "self.recent = tsval;
        [[self.recent_at_h = now.low_hours();]]"
    => "";

    "PAWS never lets an outdated timestamp go", "SNOOP-04", "tcp/timestamps.rs",
    "|| [[outdated(now, self.recent_at_h)]]"
    => "false";

    "a TSval of 0 in a SYN counts as R's clock", "SNOOP-04", "tcp/timestamps.rs",
    "|| [[self.recent == 0]]
            || outdated"
    => "false";

    "after a driver reset nothing is offered before a local timeout", "LIFE-04", "tcp/sender.rs",
    "[[self.next = self.una;]]
        if let Some(r)"
    => "";

    "a FIN on a segment whose data is already there is forgotten", "SNOOP-14", "tcp/receiver.rs",
    "let new_fin = [[r.fin && !self.is_closed() && r.end == self.next]];"
    => "false";

    "evidence of life counts for all the time before it", "SNOOP-32", "tcp/vm.rs",
    "self.elapsed += [[if credit < RUNNING_CREDIT_MAX { credit } else { RUNNING_CREDIT_MAX }]];"
    => "credit";

    "backed-off timers never forget", "SNOOP-29", "tcp/sender.rs",
    "self.dup_acks = 0;
        [[s.timers.on_guest_progress();]]"
    => "";

    "a partial ACK of G in recovery names no next hole", "SNOOP-29", "tcp/sender/recovery.rs",
    "[[self.first_hole(ack, to);]] // a partial ACK"
    => "";

    "G's SACK is unwrapped wrongly across 2^32", "SNOOP-29", "tcp/sender.rs",
    "let (from, to) = ([[from.unwrap(self.una)]], to.unwrap(self.una));"
    => "u64::from(from.0)";

    "CE on an out-of-order segment is forgotten", "INV-24", "tcp/from_net.rs",
    "let marked = f.ip.tos & CE == CE && [[range.len() > 0]];"
    => "range.len() > 0 && range.seq == self.receiver.next()";

    "the MSS to G ignores the MTU of its port", "COM-20", "tcp/options.rs",
    "let payload = |mss: u16| [[mss.min(mtu.saturating_sub(ip_tcp)).max(88)]] - ts_len;"
    => "mss.max(88)";

    "the MSS to G ignores that IPv6's header is longer", "COM-20", "tcp/options.rs",
    "let ip_tcp: u16 = [[if version == IpVersion::V4 { 40 } else { 60 }]];"
    => "if version == IpVersion::V4 { 40 } else { 40 }";

    "a window field is rounded up although it is exact", "INV-05", "tcp/receiver.rs",
    "let mut field = [[self.field_for(t, self.edge_wanted(t))]];"
    => "self.field_for(t, self.edge_wanted(t)) + 1";

    "flows of a VM do not take turns", "SNOOP-27", "tcp/deliver.rs",
    "[[cx.vm.ready.push_back(cx.id);]]"
    => "cx.vm.ready.push_front(cx.id);";

    "a full ring costs a flow its turn", "SNOOP-27", "engine/polls.rs",
    "[[self.port_mut(port)?.vm.ready.rotate_right(1);]]"
    => "";

    "what is urgent reaches G unmarked", "SNOOP-13", "tcp/gates.rs",
    "edit.set_seq(Seq::wrap(seq));
        [[edit.set_ack(Seq::wrap(self.outbound.una()));]]"
    => "edit.set_ack(Seq::wrap(self.outbound.una()));
        edit.set_flags(tcp.flags.without(TcpFlags::URG));";

    "DSCP is lost on stored bytes", "COM-30", "tcp/gates.rs",
    "tos: [[tos & !ECN_MASK | ecn]],"
    => "ecn";

    "hdr_len without TCP's options", "COM-17", "tcp/deliver.rs",
    "hdr_len: [[l4 + 20 + options]],"
    => "l4 + 20";

    "the other family's TSO decides what G takes", "COM-17", "tcp/deliver.rs",
    "let tso = cx.features.csum && [[if v4 { cx.features.tso4 } else { cx.features.tso6 }]];"
    => "if v4 { cx.features.tso6 } else { cx.features.tso4 }";

    "TSO of the wrong family to G", "COM-17", "tcp/deliver.rs",
    "GSO_NONE
        } else if [[v4]] {"
    => "!v4";

    "a super-segment that partly overlaps what is held is copied from its beginning", "INV-15",
    "tcp/receiver.rs",
    "[[let part = &bytes[index(a - from)..index(b - from)];]]"
    => "let part = &bytes[..index(b - a)];";

    "what lies before rcv_nxt is not skipped in the payload", "INV-11", "tcp/receiver.rs",
    "let skip = [[index(from - range.seq)]];"
    => "0";

    "a connection is tracked for an address that is not the port's", "COM-11",
    "engine/frames.rs",
    "if !self.wants_flows(port) || [[!self.switch.is_own_ip(port, ip.src)]] {"
    => "false";

    "a pure window update of G is not believed", "SNOOP-24", "tcp/sender.rs",
    "[[self.edge = a.edge;]]
        if s.timers.is_probing() {"
    => "if a.ack > self.una { self.edge = a.edge; }";

    "no DSACK for a duplicate below rcv_nxt", "SNOOP-11", "tcp/from_net.rs",
    "self.ack_now(cx, [[(r.seq < end).then_some((r.seq, end))]]);"
    => "None";

    "no DSACK for a duplicate in a range that is held", "SNOOP-11", "tcp/receiver.rs",
    "[[self.out_of_order.iter().map(shared).find(|(from, to)| from < to)]]"
    => "self.out_of_order.iter().map(shared).find(|_| false)";

    "PSH is never set", "SNOOP-12", "tcp/deliver.rs",
    "[[flags = flags.union(TcpFlags::PSH);]]"
    => "";

    "a timer runs one turn of the wheel late", "SNOOP-29", "flow/timer.rs",
    "let at = [[tick_of(at)]].clamp("
    => "tick_of(at) + u64::from(BUCKETS)";

    "no fast retransmission toward G", "SNOOP-29", "tcp/sender.rs",
    "if [[self.dup_acks == 3]] {"
    => "false";

    "a window update is never repeated", "SNOOP-34", "tcp/from_guest.rs",
    "[[self.timers.repeat_window_update(cx.now);]]"
    => "";

    "a window update that its field cannot say", "SNOOP-34", "tcp/receiver/window.rs",
    "[[(t.ack + (field << t.scale)).saturating_sub(self.edge)]]"
    => "(self.edge_wanted(t) - self.edge + 0 * field)";

    "challenge ACKs without limit", "COM-31", "tcp/from_net.rs",
    "if [[self.receiver.acks.may_answer_odd(cx.now, limits::ODD_ACK_INTERVAL)]] {"
    => "true";

    "the last copy of a byte wins", "INV-15", "tcp/receiver.rs",
    "for (a, b) in [[self.out_of_order.gaps(from, to)]] {"
    => "[(from, to)]";

    "TTL 0 toward G", "COM-30", "tcp/gates.rs",
    "ttl: [[self.template.ttl_to_guest()]],"
    => "0";

    "a byte less is taken than was shown", "INV-05", "tcp/receiver.rs",
    "let to = range.end.min([[self.edge]]).min(self.fin);"
    => "self.edge - 1";

    "ECE to R is lost on data of G", "INV-24", "tcp/gates.rs",
    "if self.receiver.ece() {
            [[flags = flags.union(TcpFlags::ECE);]]
        }"
    => "";

    "G's CWR is lost", "COM-23", "tcp/gates.rs",
    "let mut flags = [[tcp.flags.without(TcpFlags::ECE)]];"
    => "tcp.flags.without(TcpFlags::ECE.union(TcpFlags::CWR))";

    "R's ECE does not reach G on stored bytes", "COM-23", "tcp/gates.rs",
    "let echo = [[self.outbound.ece_to_guest()]] &&"
    => "false";

    "the record is written before the payload is in its pages", "LIFE-09", "tcp/receiver.rs",
    "[[let fills = from == self.next;]]"
    => "let fills = from == self.next;
        if fills { arena.commit_rcv_nxt(rec, to); }";

    "pages go before the record says that G has their bytes", "LIFE-09", "tcp/from_guest.rs",
    "[[cx.arena.commit_guest_una(rec, bytes_end);]] // before its bytes go"
    => "self.store.release(cx.arena, bytes_end); cx.arena.commit_guest_una(rec, bytes_end);";

    "an event ends without a commit", "LIFE-09", "tcp/flow.rs",
    "self.want_delivery(cx);
        [[self.commit(cx);]]"
    => "";

    "a record is valid before it is whole", "LIFE-09", "store/arena.rs",
    "let state = [[init.encode(generation, raw)]];"
    => "{ let state = init.encode(generation, raw);
          put(&raw[record::STATE], state);
          put(&raw[record::RCV_NXT], u64::MAX);
          init.encode(generation, raw) }";

    "a page has its owner before its number", "LIFE-09", "store/arena.rs",
    "[[put(&desc[PAGE_NO], page_no);]]"
    => "put(&desc[OWNER], owner_word); put(&desc[PAGE_NO], page_no);";

    "a page is counted as used before its owner is cleared", "LIFE-09", "store/arena.rs",
    "[[put(&self.descs.get(used)?[OWNER], 0);]]"
    => "";

    "a page that changes hands keeps its bytes", "SEC-10", "store/arena.rs",
    "[[self.write(page, 0, &[0; PAGE]);]]"
    => "";

    "an aborted flow's record goes before its reset has left", "LIFE-09", "tcp/lifecycle.rs",
    "[[self.release(cx.arena, cx.vm);]]
        self.standing.abort(why, tell_guest);"
    => "self.give_back(cx);";

    "the edge in the record lags behind what R was shown", "INV-05", "tcp/flow.rs",
    "[[cx.arena.commit_edge_to_net(rec, self.receiver.edge());]]"
    => "";

    "G's RST is not passed on", "SNOOP-16", "tcp/from_guest.rs",
    "[[self.reset_to_net(cx);]]
        self.abort(cx, Why::Reset, false);"
    => "";

    "G's keepalive is absorbed", "SNOOP-36", "tcp/from_guest.rs",
    "let probe = self.outbound.una() - 1;
            [[self.emit_to_net(cx, probe, TcpFlags::ACK, None);]]"
    => "";

    "G's answer to R's keepalive is absorbed", "SNOOP-36", "tcp/from_guest.rs",
    "if self.receiver.on_answer() {
            [[self.ack_now(cx, None);]]"
    => "";

    "an optimistic ACK of G is believed", "SNOOP-24", "tcp/from_guest.rs",
    "if ack < una || [[ack > self.ack_limit_from_guest(cx)]] {"
    => "false";

    "what reached G in fragments is not acknowledged", "COM-08", "tcp/from_guest.rs",
    "let passed = if [[fragments]] { self.receiver.edge() } else { self.receiver.passed() };"
    => "false";

    "bytes of a segment with URG are acknowledged twice: once early", "SNOOP-13", "tcp/from_net.rs",
    "[[f.tcp.flags.contains(TcpFlags::URG)]] || !f.tcp.options.understood() || f.ip.options
}"
    => "false";

    "a segment with IP options is stored", "COM-07", "tcp/from_net.rs",
    "!f.tcp.options.understood() || [[f.ip.options]]
}"
    => "false";

    "urgent data overtakes what is held", "SNOOP-13", "tcp/from_net.rs",
    "if [[self.sender.una() < self.delivery_end() || range.seq > passed]] {"
    => "range.seq > passed";

    "a drained flow never comes back", "SNOOP-13", "tcp/lifecycle.rs",
    "if [[may_resume && self.owes_nothing() && copied]] {"
    => "false";

    "a FIN of G never ends the flow", "LIFE-03", "tcp/outbound.rs",
    "[[self.fin_from_guest = true;]]"
    => "";

    "what was taken from G ends before its FIN", "EMIT-R", "tcp/outbound.rs",
    "self.accepted = self.accepted.max([[end + u64::from(fin)]]);"
    => "end";

    "persist probes stop after the first", "SNOOP-31", "tcp/lifecycle.rs",
    "if timer == Timer::Probe {
            [[self.sender.on_window_shut();]]"
    => "if timeouts <= 1 { self.sender.on_window_shut(); }";

    "local timeouts do not back off", "SNOOP-29", "tcp/timers.rs",
    "let backed_off = [[first.saturating_mul(1 << self.timeouts.min(10))]];"
    => "first";

    "the persist interval grows without bound", "SNOOP-31", "tcp/timers.rs",
    "[[if backed_off > most { most } else { backed_off }]]"
    => "backed_off";

    "a guest that refuses is never given up", "SNOOP-32", "tcp/lifecycle.rs",
    "if [[tried && stuck >= limits::REFUSED_RUNNING]] {"
    => "false";

    "a refusal is not remembered", "SNOOP-32", "tcp/lifecycle.rs",
    "[[cx.vm.refuse(cx.now, cx.key.r_addr, cx.key.g_port);]]"
    => "";

    "a refusal never expires", "SNOOP-32", "tcp/vm.rs",
    "self.refused.front().is_some_and(|(_, _, at)| [[now.since(*at) > T_REFUSED]])"
    => "false";

    "a waiting RST is never given up", "SNOOP-15", "tcp/lifecycle.rs",
    "if [[self.receiver.reset_waits() && stuck >= limits::T_RST]] {"
    => "false";

    "SWS avoidance toward G waits for a window that never comes", "SNOOP-27", "tcp/sender.rs",
    "let useful = room >= mss || [[room * 2 >= window]];"
    => "false";

    "silly segments to G", "SNOOP-27", "tcp/sender.rs",
    "let useful = [[room >= mss || room * 2 >= window]];"
    => "true";

    "a local timeout repeats all at once", "SNOOP-29", "tcp/sender/recovery.rs",
    "[[self.in_flight_max = mss;]]"
    => "let _ = mss; self.in_flight_max = u64::MAX;";

    "after a timeout the flow stays slow for good", "SNOOP-29", "tcp/sender/recovery.rs",
    "[[*most = most.saturating_add(acked.min(*most));]]"
    => "";

    "G's window update during recovery counts as a duplicate ACK", "SNOOP-29", "tcp/sender.rs",
    "if [[window_moved]] || self.next <= self.una || recovering {"
    => "false";

    "no duplicate ACK for a hole", "SNOOP-07", "tcp/receiver.rs",
    "let plain = [[in_order && whole && self.out_of_order.is_empty()]];"
    => "true";

    "ACKs only at the end of the batch", "SNOOP-07", "tcp/receiver/acks.rs",
    "[[!plain || quick || self.segments >= 2]]"
    => "!plain";

    "SACK blocks are never shown", "COM-22", "tcp/gates.rs",
    "if [[!self.options.sack]] || (dsack.is_none() && held.is_empty()) {"
    => "true";

    "SACK is used though it was not negotiated", "COM-22", "tcp/gates.rs",
    "if [[!self.options.sack || (dsack.is_none() && held.is_empty())]] {"
    => "dsack.is_none() && held.is_empty()";

    "a SACK block less than there is room for", "COM-22", "tcp/gates.rs",
    "let room = [[if self.options.timestamps { 3 } else { 4 }]];"
    => "if self.options.timestamps { 2 } else { 4 }";

    "G's SACK blocks go on to R", "COM-22", "tcp/gates.rs",
    "edit.set_flags(flags);
        [[edit.nop_out_sack();]]"
    => "";

    "R's SACK never reaches G", "COM-30", "tcp/outbound.rs",
    "[[self.due = !blocks.is_empty();]]"
    => "self.due = false;";

    "R's window on a pure ACK to G is not the newest", "COM-30", "tcp/gates.rs",
    "[[edit.set_window(self.outbound.window());]]"
    => "";

    "R's window is believed whatever segment brings it", "COM-30", "tcp/outbound.rs",
    "let newer = [[ack > self.una || newer_segment || edge > shown || bytes == 0]];"
    => "true";

    "an old ACK of R goes on to G", "INV-07", "tcp/from_net.rs",
    "if [[self.outbound.is_old_ack(tcp)]] {
                return Fate::Drop(DropReason::Duplicate);"
    => "false";

    "CE is cleared on a connection without ECN", "INV-24", "tcp/gates.rs",
    "if [[self.options.ecn && ip.tos & ECN_MASK == CE]] {"
    => "ip.tos & ECN_MASK == CE";

    "a segment without the timestamp that was agreed is taken", "SNOOP-04", "tcp/from_net.rs",
    "return if [[excused]] { Ok(()) } else { Err(DropReason::Paws) };"
    => "true";

    "a segment without ACK is taken", "SNOOP-03", "tcp/from_net.rs",
    "if [[!tcp.flags.contains(TcpFlags::ACK)]] {
            return Fate::Drop(DropReason::BadFlags);
        }
        if let Some(fate)"
    => "false";

    "a SYN in mid-flow is not challenged", "SNOOP-17", "tcp/from_net.rs",
    "// RFC 5961 section 4: R began anew, and learns that G has not.
                [[self.rate_limited_ack(cx);]]"
    => "";

    "an RST in window is not challenged", "SNOOP-15", "tcp/from_net.rs",
    "if [[self.receiver.is_in_window(seq)]] {"
    => "false";

    "an out-of-order segment never becomes in order", "INV-18", "tcp/receiver.rs",
    "self.next = to;
            [[self.pull_in_order();]]"
    => "";

    "of two FINs the last counts", "SNOOP-14", "tcp/receiver.rs",
    "if (last..=self.edge).contains(&fin) && [[self.fin == NONE]] {"
    => "true";

    "data behind R's FIN is taken", "SNOOP-14", "tcp/receiver.rs",
    "let to = range.end.min(self.edge).min([[self.fin]]);"
    => "NONE";

    "a window smaller than a segment's worth more is shown at once", "SNOOP-33",
    "tcp/receiver/window.rs",
    "if [[edge >= self.edge + useful]] { edge } else { self.edge }"
    => "edge >= self.edge";

    "a VM's first flow takes the whole budget", "SNOOP-39", "tcp/vm.rs",
    "self.spare().saturating_sub([[own]]) / 2"
    => "0";

    "a flow never grows", "SNOOP-39", "tcp/receiver.rs",
    "if [[vm.reserve(more)]] {"
    => "false";

    "what a VM's flows owe is not counted", "LIFE-06", "tcp/flow.rs",
    "if [[owing != self.owing]] {"
    => "owing && !self.owing";

    "a parked flow keeps its place", "SNOOP-39", "tcp/lifecycle.rs",
    "if [[self.holds_nothing() && self.receiver.guest_has_room(&self.terms())]] {"
    => "false";

    "a flow is parked while G has no room", "INV-05", "tcp/lifecycle.rs",
    "if self.holds_nothing() && [[self.receiver.guest_has_room(&self.terms())]] {"
    => "true";

    "handshakes have no quota", "LIFE-01", "engine.rs",
    "if [[unproven >= limits::handshakes_max(flows_max)]] {"
    => "false";

    "a reset connection is not evicted", "LIFE-02", "engine.rs",
    "[[oldest(self, Class::Spent)]]
            .or_else"
    => "None";

    "after a restart a guest that is not configured any more gets another's reset", "LIFE-09",
    "engine/restart.rs",
    "p.as_ref().is_some_and(|p| [[p.config.is_guest() && p.vm.name_hash == hash]])"
    => "p.config.is_guest()";

    "after a restart the record stays for ever", "LIFE-09", "engine/restart.rs",
    "let (true, Some(port)) = (owed, port) else {
                [[self.arena.free_record(found.id);]]"
    => "";

    "a SYN-ACK of G replaces a flow that owes", "LIFE-01", "engine/frames.rs",
    "if [[!client && self.outlives_syn_ack(now, id, &key, tcp)]] {"
    => "false";

    "the window scale of one side alone counts", "COM-20", "tcp/options.rs",
    "let shift = |s: u8| if [[both]] { s } else { 0 };"
    => "s != SynInfo::NO_SCALE";

    "R's SYN-ACK window is shown to G as if it were scaled", "COM-20", "tcp/outbound.rs",
    "self.window = [[tcp.window >> shift]];"
    => "tcp.window";

    "an AccECN handshake is taken for classic ECN", "COM-23", "tcp/options.rs",
    "(c, SynInfo::ECE) if [[c & (SynInfo::ECE | SynInfo::CWR) == SynInfo::ECE | SynInfo::CWR]] => {"
    => "c != 0";

    "copies of a SYN that disagree are not noticed", "COM-24", "tcp/options.rs",
    "if [[!same]] {
            merged.bits |= Self::AMBIGUOUS;"
    => "false";
}
