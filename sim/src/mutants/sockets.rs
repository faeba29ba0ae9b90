//! The mutations of the virtual TOE (`core/src/toe`): possible mistakes of an end, a guest's vsock
//! connection and the table of a host. Worlds have no sockets, so seeds judge none of them, and
//! core's own tests must notice each. See [`super::table`] for how a place is written.

use super::table::{Mutation, mutations};

mutations! { SOCKETS:
    "a guest sends what the other one has no room for", "VTOE-10", "send",
    "offset.checked_add(len).filter(|end| [[*end <= self.edge]])"
    => "true";

    "a host sends what it was told no room for", "VTOE-10", "claim",
    "if [[sent > self.edge_told]] {"
    => "false";

    "a stream ends clean with bytes missing", "VTOE-05", "is_complete",
    "self.total == Some(self.delivered)"
    => "self.total.is_some()";

    "bytes that overtake others go to the guest first", "VTOE-03", "take",
    "if [[offset > self.arrived]] {"
    => "false";

    "bytes that were cut in another way are taken", "VTOE-03", "take",
    "if [[offset < self.arrived]] {"
    => "false";

    "a copy of what is held is held as well", "VTOE-10", "hold",
    "let Err(at) = self.held.binary_search(&(offset, len)) else { return Ok([[Verdict::Done]]) };"
    => "Verdict::Hold";

    "any number of messages is held", "VTOE-10", "hold",
    "if [[self.held.len() >= TOE_HELD_MAX]] {"
    => "false";

    "a guest is offered all that the other one says it has room for", "VTOE-10", "give_room",
    "let most = [[self.delivered.saturating_add(self.limit)]];"
    => "u64::MAX";

    "bytes that were lost are waited for for ever", "VTOE-06", "handle_timeout",
    "let hole = [[self.inbound.hole_deadline().is_some_and(passed)]];"
    => "false";

    "a guest that is paused loses bytes that a FIN has overtaken", "VTOE-10", "hole_deadline",
    "!self.has_undelivered()"
    => "true";

    "a host that is silent is waited for for ever", "VTOE-06", "handle_timeout",
    "let silence = [[self.silence_deadline().is_some_and(passed)]];"
    => "false";

    "a closed socket waits for ever", "VTOE-05", "handle_timeout",
    "let orphan = [[self.orphan_deadline().is_some_and(passed)]];"
    => "false";

    "nobody says where it stands", "VTOE-06", "handle_timeout",
    "self.due.probe = true;"
    => "";

    "a guest that stands still loses its connections", "VTOE-10", "silence_deadline",
    "(!self.inbound.has_undelivered())"
    => "true";

    "an established connection ends with whatever errno the other host says", "VTOE-06",
    "handle_message",
    "let errno = if [[self.state() == State::Asking]] { errno } else { Errno::Reset };"
    => "true";

    "the last answer is not given again", "VTOE-04", "handle_message",
    "self.due.taken |= asks && self.state() == State::Over;"
    => "";

    "data for a closed socket is taken", "VTOE-05", "judge",
    "Ok(verdict) if [[verdict == Verdict::Done || !self.guest_is_gone]] => verdict,"
    => "true";

    "close() with data unread is a clean end", "VTOE-05", "close",
    "if [[unread || self.inbound.has_undelivered()]] {"
    => "false";

    "a failure is not told to the other end", "VTOE-06", "fail",
    "self.due.reset = !(self.side == Side::Opener && self.due.opening);"
    => "";

    "a guest may send more than it was told", "VTOE-10", "take",
    "if [[received > self.edge_told]] {"
    => "false";

    "a guest that has read more than there was is believed", "VTOE-10", "hear_credit",
    "if [[read > self.given]] {"
    => "false";

    "packets cost nothing", "VTOE-10", "room_in",
    "room.saturating_sub((outstanding + packets) * TOE_PACKET_COST)"
    => "room";

    "a buffer that becomes smaller than what is under way is believed", "VTOE-10", "hear_credit",
    "if [[header.buf_alloc < before]] && self.given + charged > self.edge_to_guest() {"
    => "false";

    "packets are taken for read before they are", "VTOE-10", "hear_packets",
    "} else if [[self.read >= mark.0]] {"
    => "true";

    "a guest is not asked what it has read", "VTOE-10", "ask",
    "self.due.ask |= self.phase == Phase::Connected && !self.is_asked;"
    => "";

    "a guest that stands still is asked again and again", "VTOE-10", "poll_packet",
    "self.is_asked = true;"
    => "";

    "a guest is told of what came only when there is more room", "VTOE-10", "is_credit_due",
    "let own = [[untold >= TOE_CREDIT_STEP || untold > 0 && untold >= half]];"
    => "false";

    "a guest may send after it has shut its stream", "VTOE-04", "take",
    "if [[self.shut & SHUTDOWN_SEND != 0]] {"
    => "false";

    "room is not shown again when data was given", "VTOE-10", "give",
    "self.end.give_room(self.connection.edge_to_promise());"
    => "";

    "who is short of packets is not asked by time", "VTOE-10", "handle_timeout",
    "self.connection.ask();"
    => "";

    "a guest that lies keeps the connection at the other host", "VTOE-06", "handle_packet",
    "self.end.abort(now, Errno::Reset);"
    => "";

    "a request that comes again opens a connection again", "VTOE-13", "handle_request",
    "message.to != Side::Acceptor || [[!self.requests.is_new(from, message.id)]]"
    => "false";

    "a request that is older than anybody remembers is new", "VTOE-13", "is_new",
    "if [[end <= self.end.saturating_sub(TOE_LATE_REQUESTS)]] {"
    => "false";

    "requests that were skipped have come", "VTOE-13", "is_new",
    "_ => [[self.clear(self.end, end)]]"
    => "self.clear(serial, end)";

    "whoever knows a name may speak of the connection", "VTOE-09", "socket",
    "self.names.get(&(host, id, side)).copied()"
    => "self.names.iter().find(|(n, _)| (n.1, n.2) == (id, side) && n.0 <= host).map(|(_, s)| *s)";

    "a guest connects from another's address", "VTOE-09", "want",
    "own.find(|ip| [[any || **ip == from.ip()]])"
    => "true";

    "a guest listens at another's address", "VTOE-09", "listen",
    "let own = [[at.ip().is_unspecified() || self.ips.contains(&at.ip())]];"
    => "true";

    "a guest of another network is reached", "VTOE-09", "offer",
    "let there = [[self.addresses.get(&(request.network, request.to.ip()))]];"
    => "self.addresses.iter().find(|((_, ip), _)| *ip == request.to.ip()).map(|(_, vm)| vm)";

    "an address of two guests is of the later one", "VTOE-09", "take_addresses",
    "[[*self.addresses.entry((config.network, *ip)).or_insert(vm)]] == vm"
    => "self.addresses.insert((config.network, *ip), vm).map_or(vm, |_| vm)";

    "an IPv6 listener that hears both does not hear IPv4", "VTOE-07", "listener",
    "listener.v4 || !as_v4"
    => "!as_v4";

    "of those that listen at one address one is called", "VTOE-07", "listener",
    "there.push_back(listener);"
    => "there.push_front(listener);";

    "an end that was over is taken for one that never was", "VTOE-04", "handle_message",
    "let was_over = [[self.over.contains(now, (from, message.id, message.to))]];"
    => "false";

    "what nobody listens for is refused for good", "VTOE-01", "offer",
    "guest.listener(request.to).ok_or([[Errno::NotByToe]])?"
    => "Errno::Refused";

    "who finds a listener full is refused for good", "VTOE-01", "handle_packet",
    "self.end.abort(now, if offered { [[Errno::NotByToe]] } else { Errno::Reset });"
    => "Errno::Refused";

    "a refusal that another daemon tells of is final", "VTOE-01", "handle_message",
    "let errno = if [[errno == Errno::Refused]] { Errno::NotByToe } else { errno };"
    => "false";

    "a request that is none is passed over", "VTOE-10", "handle_control",
    "control.connection.reset();"
    => "";

    "answers to packets for nobody pile up", "VTOE-10", "answer_stray",
    "if [[self.strays.len() < TOE_STRAYS_MAX]] {"
    => "true";

    "a guest is read whatever it is owed", "VTOE-10", "owes_answers",
    "[[self.strays.len() >= TOE_STRAYS_MAX]]"
    => "false";

    "what packets cost is told as room", "VTOE-10", "edge_to_promise",
    "let fits = [[packets * TOE_PACKET_FULL + rest.saturating_sub(TOE_PACKET_COST)]];"
    => "self.edge_to_guest() - self.given + 0 * (packets + rest)";

    "few bytes are given though their packet has no place", "VTOE-10", "takes",
    "if [[self.free() >= waiting + TOE_PACKET_COST + cost]] { len } else { 0 }"
    => "true";

    "the last bytes of a stream wait for more", "VTOE-04", "promised",
    "[[self.total.unwrap_or(self.edge)]] - self.delivered"
    => "self.edge";

    "who reads in silence is asked only if bytes wait", "VTOE-10", "pass_on",
    "let wait = self.end.has_undelivered() || [[self.end.is_low()]];"
    => "false";

    "room is told in crumbs", "VTOE-10", "set_buffer",
    "self.step = [[(buffer / 2).min(TOE_CREDIT_STEP)]];"
    => "0";

    "a socket that is over is reset at the ports of the next", "VTOE-13", "is_to_hear",
    "self.resets.remove(&ports);"
    => "";

    "a guest that was stopped keeps sockets that are gone", "VTOE-06", "remove_guest",
    "self.left.insert(vm, left);"
    => "";

    "what a guest had closed arrives in its new network", "VTOE-09", "end_closed",
    "self.list_ending(vm, closed);"
    => "";

    "what a machine that is removed had closed stays", "VTOE-06", "forget_vm",
    "self.end_closed(vm);"
    => "";

    "who listened stays when its control connection is over", "VTOE-06", "look_at_control",
    "self.forget_wishes(port);"
    => "";

    "a guest is not told of packets that come about again", "VTOE-06", "poll_packet",
    "guest.is_ready = false;"
    => "";

    "any number of sockets is going to connect", "VTOE-10", "want",
    "let full = [[self.wanted.len() >= TOE_WANTED_MAX]] && !self.wanted.contains_key(&guest);"
    => "false";

    "any number of listeners is kept", "VTOE-10", "listen",
    "let is_full = [[self.listening.len() >= TOE_LISTENERS_MAX]];"
    => "false";

    "a guest that reads no answers asks on", "VTOE-10", "poll",
    "if [[self.answers.is_empty()]] {"
    => "true";

    "a request names any address", "VTOE-09", "parse",
    "if [[request.is_sound()]] { Ok(request) } else { Err(NoMessage::Value) }"
    => "true";

    "the host of a guest that has gone keeps its connections", "VTOE-06", "remove_guest",
    "self.list_ending(vm, sockets);"
    => "";

    "the sockets of a guest that has gone end all at once", "VTOE-06", "go_on_ending",
    "let mut left = [[TOE_SOCKETS_PER_STEP]];"
    => "usize::MAX";

    "who comes after a guest is given what was for that one", "VTOE-06", "has_guest",
    "self.guests.contains_key(&socket.vm)"
    => "true";

    "who opens takes all places of a guest", "VTOE-10", "offer",
    "if [[self.sockets.opened_by(opener) >= free]] {"
    => "false";

    "what was open counts for who opened it for ever", "VTOE-10", "forget_opened",
    "*count -= 1;"
    => "";

    "what a guest has closed has no place", "VTOE-10", "free_places",
    "[[self.sockets.count(vm)]] + resets"
    => "self.guests.get(&vm).map_or(0, |guest| guest.ports.len())";

    "resets that a guest does not take are no sockets of it", "VTOE-10", "free_places",
    "self.sockets.count(vm) + [[resets]]"
    => "0 * resets";
}
