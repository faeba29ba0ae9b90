//! The mutations of the second look: mistakes that a review made up, and more of the kind. See
//! [`super::table`] for how a place is written.

use super::table::{Mutation, mutations};

mutations! { SECOND:
    "TSecr to G stays the first segment's", "INV-08", "on_echo_from_net",
    "self.echo_to_guest = tsecr;"
    => "";

    "TS.Recent is updated too rarely", "SNOOP-05", "update_ts_recent",
    "seq <= self.receiver.acks.sent()"
    => "seq < self.receiver.acks.sent()";

    "the PAWS clock is never refreshed", "SNOOP-04", "on_recent",
    "self.recent_at = now.low_eights();"
    => "";

    "PAWS never lets an outdated timestamp go", "SNOOP-04", "is_current",
    "outdated(now, self.recent_at)"
    => "false";

    "a TSval of 0 in a SYN counts as R's clock", "SNOOP-04", "is_current",
    "self.recent == 0"
    => "false";

    "after a driver reset nothing is offered before a local timeout", "LIFE-04", "on_ring_reset",
    "self.next = self.una;"
    => "";

    "a FIN on a segment whose data is already there is forgotten", "SNOOP-14", "place",
    "r.fin && !self.is_closed() && r.end == self.next"
    => "false";

    "evidence of life counts for all the time before it", "SNOOP-32", "on_progress",
    "if credit < RUNNING_CREDIT_MAX { credit } else { RUNNING_CREDIT_MAX }"
    => "credit";

    "backed-off timers never forget", "SNOOP-29", "on_progress",
    "s.timers.on_guest_progress();"
    => "";

    "a partial ACK of G in recovery names no next hole", "SNOOP-29", "on_progress",
    "(self.from, self.to) = (ack.max(self.swept), to);"
    => "";

    "G's SACK is unwrapped wrongly across 2^32", "SNOOP-29", "on_sack",
    "from.unwrap(self.una)"
    => "u64::from(from.0)";

    "CE on an out-of-order segment is forgotten", "INV-24", "on_valid_segment",
    "range.len() > 0"
    => "range.len() > 0 && range.seq == self.receiver.next()";

    "the MSS to G ignores the MTU of its port", "COM-20", "negotiate",
    "mss.min(mtu.saturating_sub(ip_tcp)).max(limits::MSS_MIN)"
    => "mss.max(limits::MSS_MIN)";

    "the MSS to G ignores that IPv6's header is longer", "COM-20", "negotiate",
    "if version == IpVersion::V4 { 40 } else { 60 }"
    => "if version == IpVersion::V4 { 40 } else { 40 }";

    "a window field is rounded up although it is exact", "INV-05", "advertise_window",
    "self.field_for(t, self.edge_wanted(t))"
    => "self.field_for(t, self.edge_wanted(t)) + 1";

    "flows of a VM do not take turns", "SNOOP-27", "want_delivery",
    "cx.vm.ready.push_back(cx.id);"
    => "cx.vm.ready.push_front(cx.id);";

    "in a ring without room an ACK takes the turn of a flow's bytes", "SNOOP-27", "poll_delivery",
    "room < TcpEmit::MAX_LEN"
    => "false";

    "what is urgent reaches G unmarked", "SNOOP-13", "gate_to_guest",
    "edit.set_ack(Seq::wrap(ack));"
    => "edit.set_ack(Seq::wrap(ack));
        edit.set_flags(tcp.flags.without(TcpFlags::URG));";

    "DSCP is lost on stored bytes", "COM-30", "emit_to_guest",
    "tos & !ECN_MASK | ecn"
    => "ecn";

    "hdr_len without TCP's options", "COM-17", "virtio_hdr",
    "l4 + 20 + options"
    => "l4 + 20";

    "the other family's TSO decides what G takes", "COM-17", "frame_limit",
    "if v4 { features.tso4 } else { features.tso6 }"
    => "if v4 { features.tso6 } else { features.tso4 }";

    "TSO of the wrong family to G", "COM-17", "virtio_hdr",
    "GSO_NONE
        } else if [[v4]] {"
    => "!v4";

    "a super-segment that partly overlaps what is held is copied from its beginning", "INV-15",
    "keep",
    "let part = &bytes[index(a - from)..index(b - from)];"
    => "let part = &bytes[..index(b - a)];";

    "what lies before rcv_nxt is not skipped in the payload", "INV-11", "on_data",
    "index(from - range.seq)"
    => "0";

    "a connection is tracked for an address that is not the port's", "COM-11", "begin_flow",
    "!self.networks.of(port).is_own_ip(port, f.ip.src)"
    => "false";

    "a pure window update of G is not believed", "SNOOP-24", "on_ack",
    "self.edge = a.edge;"
    => "if a.ack > self.una { self.edge = a.edge; }";

    "no DSACK for a duplicate below rcv_nxt", "SNOOP-11", "on_old_segment",
    "(r.seq < end).then_some((r.seq, end))"
    => "None";

    "no DSACK for a duplicate in a range that is held", "SNOOP-11", "duplicate_part",
    "self.out_of_order.iter().map(shared).find(|(from, to)| from < to)"
    => "self.out_of_order.iter().map(shared).find(|_| false)";

    "PSH is never set", "SNOOP-12", "deliver",
    "flags = flags.union(TcpFlags::PSH);"
    => "";

    "a timer runs one turn of the wheel late", "SNOOP-29", "schedule",
    "Self::tick_of(at)"
    => "Self::tick_of(at) + u64::from(BUCKETS)";

    "no fast retransmission toward G", "SNOOP-29", "on_duplicate_ack",
    "self.dup_acks == 3"
    => "false";

    "a window update is never repeated", "SNOOP-34", "maybe_window_update",
    "self.timers.repeat_window_update(cx.now);"
    => "";

    "a window update that its field cannot say", "SNOOP-34", "window_update_due",
    "(t.ack + (field << t.scale)).saturating_sub(self.edge)"
    => "(self.edge_wanted(t) - self.edge + 0 * field)";

    "challenge ACKs without limit", "COM-31", "rate_limited_ack",
    "self.receiver.acks.may_answer_odd(cx.now, limits::ODD_ACK_INTERVAL)"
    => "true";

    "the last copy of a byte wins", "INV-15", "keep",
    "self.out_of_order.gaps(from, to)"
    => "[(from, to)]";

    "TTL 0 toward G", "COM-30", "emit_to_guest",
    "self.template.ttl_to_guest()"
    => "0";

    "a byte less is taken than was shown", "INV-05", "on_data",
    "let to = range.end.min([[self.edge]]).min(self.fin);"
    => "self.edge - 1";

    "ECE to R is lost on data of G", "INV-24", "gate_to_net",
    "flags = flags.union(TcpFlags::ECE);"
    => "";

    "G's CWR is lost", "COM-23", "gate_to_net",
    "tcp.flags.without(TcpFlags::ECE)"
    => "tcp.flags.without(TcpFlags::ECE.union(TcpFlags::CWR))";

    "R's ECE does not reach G on stored bytes", "COM-23", "emit_to_guest",
    "self.outbound.ece_to_guest()"
    => "false";

    "the record is written before the payload is in its pages", "LIFE-09", "keep",
    "let fills = from == self.next;"
    => "let fills = from == self.next;
        if fills { arena.commit_rcv_nxt(rec, to); }";

    "pages go before the record says that G has their bytes", "LIFE-09", "take_ack_from_guest",
    "cx.arena.commit_guest_una(rec, bytes_end);"
    => "self.store.release(cx.arena, bytes_end); cx.arena.commit_guest_una(rec, bytes_end);";

    "an event ends without a commit", "LIFE-09", "end_any",
    "self.commit(cx, self.promised());"
    => "";

    "a record is valid before it is whole", "LIFE-09", "alloc_record",
    "init.encode(generation, raw)"
    => "{ let state = init.encode(generation, raw);
          put(&raw[record::STATE], state);
          put(&raw[record::RCV_NXT], u64::MAX);
          init.encode(generation, raw) }";

    "a page has its owner before its number", "LIFE-09", "alloc_page",
    "put(&desc[PAGE_NO], page_no);"
    => "put(&desc[OWNER], owner_word); put(&desc[PAGE_NO], page_no);";

    "an octet with an old clock is answered for a guest that is long silent", "INV-19", "paws",
    "!cx.vm.clock.alive_within(cx.now, limits::T_PAUSED)"
    => "false";

    "a page is counted as used before its owner is cleared", "LIFE-09", "take_page",
    "put(&self.descs.get(used)?[OWNER], 0);"
    => "";

    "a page that changes hands keeps its bytes", "SEC-10", "take_page",
    "self.write(page, 0, &[0; PAGE]);"
    => "";

    "an aborted flow's record goes before its reset has left", "LIFE-09", "abort",
    "self.release(cx.arena, cx.vm);"
    => "self.give_back(cx);";

    "the edge in the record lags behind what R was shown", "INV-05", "on_batch_end",
    "cx.arena.commit_edge_to_net(rec, self.receiver.edge());"
    => "";

    "G's RST is not passed on", "SNOOP-16", "on_rst_from_guest",
    "self.reset_to_net(cx);"
    => "";

    "G's keepalive is absorbed", "SNOOP-36", "on_pure_ack_from_guest",
    "self.emit_to_net(cx, probe, TcpFlags::ACK, None);"
    => "";

    "G's answer to R's keepalive is absorbed", "SNOOP-36", "on_pure_ack_from_guest",
    "self.ack_now(cx, None);"
    => "";

    "an optimistic ACK of G is believed", "SNOOP-24", "on_ack_from_guest",
    "ack > self.ack_limit_from_guest(cx)"
    => "false";

    "what reached G in fragments is not acknowledged", "COM-08", "ack_limit_from_guest",
    "let passed = if [[fragments]] { self.receiver.edge() } else { self.receiver.passed() };"
    => "false";

    "bytes of a segment with URG are acknowledged twice: once early", "SNOOP-13", "needs_verbatim",
    "f.tcp.flags.contains(TcpFlags::URG)"
    => "false";

    "a segment with IP options is stored", "COM-07", "needs_verbatim",
    "f.ip.options"
    => "false";

    "urgent data overtakes what is held", "SNOOP-13", "pass_data",
    "self.sender.una() < self.delivery_end() || range.seq > passed"
    => "range.seq > passed";

    "a drained flow never comes back", "SNOOP-13", "leave_if_quiescent",
    "may_resume && self.owes_nothing() && copied"
    => "false";

    "a FIN of G never ends the flow", "LIFE-03", "on_sent",
    "self.fin_sent = true;"
    => "";

    "what was taken from G ends before its FIN", "EMIT-R", "on_sent",
    "end + u64::from(fin)"
    => "end";

    "persist probes stop after the first", "SNOOP-31", "on_guest_timeout",
    "self.sender.on_window_shut();"
    => "if timeouts <= 1 { self.sender.on_window_shut(); }";

    "local timeouts do not back off", "SNOOP-29", "guest_timeout",
    "first.saturating_mul(1 << self.timeouts.min(10))"
    => "first";

    "the persist interval grows without bound", "SNOOP-31", "guest_timeout",
    "if backed_off > most { most } else { backed_off }"
    => "backed_off";

    "nobody looks before its timeout what a silent guest has taken", "SNOOP-29", "next",
    "left.min(stood).max(limits::TIMER_FLOOR_PAUSED)"
    => "left.max(limits::TIMER_FLOOR_PAUSED)";

    "a guest that refuses is never given up", "SNOOP-32", "on_guest_timeout",
    "tried && stuck >= most"
    => "false";

    "a refusal is not remembered", "SNOOP-32", "on_guest_timeout",
    "cx.vm.refuse(cx.now, cx.key.r_addr, cx.key.g_port);"
    => "";

    "a refusal never expires", "SNOOP-32", "refuses",
    "now.since(*at) > T_REFUSED"
    => "false";

    "a waiting RST is never given up", "SNOOP-15", "on_guest_timeout",
    "self.receiver.reset_waits() && stuck >= limits::T_RST"
    => "false";

    "SWS avoidance toward G waits for a window that never comes", "SNOOP-27", "fresh_bytes",
    "room * 2 >= window"
    => "false";

    "silly segments to G", "SNOOP-27", "fresh_bytes",
    "room >= mss || room * 2 >= window"
    => "true";

    "a local timeout repeats all at once", "SNOOP-29", "on_timeout",
    "self.window = mss;"
    => "self.window = u64::MAX;";

    "after a timeout the flow stays slow for good", "SNOOP-29", "grow",
    "self.window = self.window.saturating_add(delivered).min(self.threshold);"
    => "";

    "G's window update during recovery counts as a duplicate ACK", "SNOOP-29", "on_duplicate_ack",
    "if [[window_moved]] || self.sent <= self.una || recovering {"
    => "false";

    "no duplicate ACK for a hole", "SNOOP-07", "on_data",
    "in_order && whole && self.out_of_order.is_empty()"
    => "true";

    "ACKs only at the end of the batch", "SNOOP-07", "on_segment",
    "!plain || quick || self.segments >= 2"
    => "!plain";

    "SACK blocks are never shown", "COM-22", "sack_blocks",
    "!self.options.sack"
    => "true";

    "SACK is used though it was not negotiated", "COM-22", "sack_blocks",
    "!self.options.sack || (dsack.is_none() && held.is_empty())"
    => "dsack.is_none() && held.is_empty()";

    "a SACK block less than there is room for", "COM-22", "sack_blocks",
    "if self.options.timestamps { 3 } else { 4 }"
    => "if self.options.timestamps { 2 } else { 4 }";

    "G's SACK blocks go on to R", "COM-22", "gate_to_net",
    "edit.nop_out_sack();"
    => "";

    "R's SACK never reaches G", "COM-30", "on_blocks",
    "self.due = !blocks.is_empty();"
    => "self.due = false;";

    "R's window on a pure ACK to G is not the newest", "COM-30", "gate_to_guest",
    "edit.set_window(window);"
    => "";

    "R's window is believed whatever segment brings it", "COM-30", "on_ack",
    "ack > self.una || newer_segment || edge > shown || bytes == 0"
    => "true";

    "an old ACK of R goes on to G", "INV-07", "on_valid_segment",
    "self.outbound.is_old_ack(tcp)"
    => "false";

    "CE is cleared on a connection without ECN", "INV-24", "gate_to_guest",
    "self.options.ecn && ip.tos & ECN_MASK == CE"
    => "ip.tos & ECN_MASK == CE";

    "a segment without ACK is taken", "SNOOP-03", "on_segment_from_net",
    "!tcp.flags.contains(TcpFlags::ACK)"
    => "false";

    "a SYN in mid-flow is not challenged", "SNOOP-17", "on_segment_from_net",
    "self.rate_limited_ack(cx);"
    => "";

    "an RST in window is not challenged", "SNOOP-15", "on_rst_from_net",
    "self.receiver.is_in_window(seq)"
    => "false";

    "an out-of-order segment never becomes in order", "INV-18", "keep",
    "self.pull_in_order();"
    => "";

    "of two FINs the last counts", "SNOOP-14", "on_fin",
    "self.fin == NONE"
    => "true";

    "data behind R's FIN is taken", "SNOOP-14", "on_data",
    "let to = range.end.min(self.edge).min([[self.fin]]);"
    => "NONE";

    "a window smaller than a segment's worth more is shown at once", "SNOOP-33", "moved",
    "edge >= self.edge + useful"
    => "edge >= self.edge";

    "a VM's first flow takes the whole budget", "SNOOP-39", "growth",
    "self.spare().saturating_sub([[own]]) / 2"
    => "0";

    "a flow never grows", "SNOOP-39", "grow",
    "vm.reserve(more)"
    => "false";

    "what a VM's flows owe is not counted", "LIFE-06", "note_owing",
    "owing != self.owing"
    => "owing && !self.owing";

    "a parked flow keeps its place", "SNOOP-39", "on_timeout",
    "self.holds_nothing() && self.receiver.guest_has_room(&self.terms())"
    => "false";

    "a flow is parked while G has no room", "INV-05", "on_timeout",
    "self.receiver.guest_has_room(&self.terms())"
    => "true";

    "handshakes have no quota", "LIFE-01", "victim",
    "unproven >= limits::handshakes_max(flows_max)"
    => "false";

    "a reset connection is not evicted", "LIFE-02", "victim",
    "oldest(self, Class::Spent)"
    => "None";

    "after a restart a guest that is not configured any more gets another's reset", "LIFE-09",
    "port_of",
    "p.config.is_guest() && p.vm.name_hash == hash"
    => "p.config.is_guest()";

    "after a restart remotes are told in any network", "LIFE-09", "tell_remote_of_nobody",
    "network_hash(name) == record.network_hash"
    => "true";

    "after a restart the record stays for ever", "LIFE-09", "handle_restart",
    "if !owed {
                [[self.common.arena.free_record(found.id);]]"
    => "";

    "a SYN-ACK of G replaces a flow that owes", "LIFE-01", "on_syn_from_guest",
    "!client && self.outlives_syn_ack(now, id, &key, tcp)"
    => "false";

    "the window scale of one side alone counts", "COM-20", "shifts",
    "let shift = |s: u8| if [[both]] { s } else { 0 };"
    => "s != SynInfo::NO_SCALE";

    "R's SYN-ACK window is shown to G as if it were scaled", "COM-20", "on_syn_ack_from_net",
    "tcp.window >> shift"
    => "tcp.window";

    "an AccECN handshake is taken for classic ECN", "COM-23", "negotiate",
    "c & (SynInfo::ECE | SynInfo::CWR) == SynInfo::ECE | SynInfo::CWR"
    => "c != 0";

    "copies of a SYN that disagree are not noticed", "COM-24", "after",
    "if [[!same]] {
            merged.bits |= Self::AMBIGUOUS;"
    => "false";

    "a copy of a SYN is not looked at while the offload is off", "COM-24", "on_syn_from_net",
    "} else if !self.wants_flows(port) {
            return;"
    => "}
        if !self.wants_flows(port) {
            return;";

    "a window that opens in a keepalive of G counts as shown", "SNOOP-34", "emit_to_net",
    "seq >= self.outbound.una()"
    => "true";

    "a window that opens in what G repeats counts as shown", "SNOOP-34", "gate_to_net",
    "end > self.outbound.una()"
    => "true";

    "three DSACKs of G are a loss", "SNOOP-29", "on_duplicate_ack",
    "a.sack.is_none()"
    => "true";

    "an ACK with IP options goes on to G with its own number", "COM-30", "on_valid_segment",
    "!is_bare(f, range)"
    => "true";

    "R's answer to G's keepalive must be next in order", "SNOOP-36", "answer_guest",
    "self.timers.guest_asks() && taken"
    => "false";

    "an ACK with IP options tells nothing of another path", "SNOOP-42", "on_segment_from_net",
    "is_bare(f, range)"
    => "is_bare(f, range) && !f.ip.options";

    "data tells nothing of another path", "SNOOP-42", "on_unseen_ack",
    "insists && self.unseen_acks > 0"
    => "false";

    "frames go from an isolated VM to another", "SEC-06", "lookup",
    "self.are_apart(ingress, port)"
    => "false";

    "an isolated VM hears what others say to all", "SEC-06", "is_flooded",
    "!self.networks.are_apart(ingress, port)"
    => "true";

    "what is said to all is heard in every VLAN", "SEC-06", "is_flooded",
    "vlan.is_some_and(|vlan| self.networks.of(port).is_in(port, vlan))"
    => "true";

    "a VM is found in every VLAN", "SEC-06", "search",
    "self.is_in_id(*port, vlan)"
    => "true";

    "a VM sends into every VLAN", "SEC-06", "check_vlan",
    "if is_fine { Ok(()) } else { Err(DropReason::Vlan) }"
    => "Ok(())";

    "a VM takes a MAC that was heard elsewhere", "SEC-06", "learn_guest",
    "self.was_heard_elsewhere(now, port, mac) && !self.was_announced(port, mac)"
    => "false";

    "a VM takes the MAC of another", "SEC-06", "may_have",
    "self.guest_with(mac).is_none()"
    => "true";

    "a station of another VLAN keeps a MAC from a VM", "SEC-06", "was_heard_elsewhere",
    "[*vlan, GONE_VLAN, GONE_VLAN]"
    => "[*vlan, ANY_VLAN, GONE_VLAN]";

    "many flows are not told that they are drained", "LIFE-06", "go_on_walking",
    "walk.port.is_none_or(|port| port.0 == key.port)"
    => "walk.port.is_none()";

    "a trusted VM takes the MAC of another", "SEC-06", "check_station",
    "is_one && !is_others && self.told(mac).is_none()"
    => "is_one && self.told(mac).is_none()";

    "a connection of a VM that has gone goes on until it is told", "INV-19", "hear_of_end",
    "cx.vm.presence == Presence::Here || !self.is_live()"
    => "true";

    "a handshake that ends when the VM has gone is taken on", "INV-19", "accept_offers",
    "cx.vm.presence != Presence::Here"
    => "false";

    "a VM that has come into another VLAN is gone for good", "LIFE-05", "set_guest",
    "self.set_presence(port, Presence::Here);"
    => "";
}
