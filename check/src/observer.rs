//! Watches hosts at work: every frame at four taps, every step of the engine and every other event,
//! and applies the rules.
//!
//! A [`Setting`] gives the information that is not in frames: their owners, and the properties of
//! the ends.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

use nightporter_core::engine::Engine;
use nightporter_core::flow::key::FlowKey;
use nightporter_core::port::PortId;
use nightporter_core::tcp::flow::State;
use nightporter_core::time::Instant;

use crate::answered::{Answers, Told};
use crate::event::Event;
use crate::frame::Frame;
use crate::guest_clock::GuestClock;
use crate::history::{History, Side};
use crate::reach::{Happening, Reach};
use crate::rule::{Rule, Violation};
use crate::rules::turns::Turns;
use crate::rules::{
    PAGE_BYTES, budget, check_out, checksums, fail_stop, flooding, held, isolation, late_ack,
    liveness, parked, quality, recovery, right_edge, senders,
};
use crate::tap::{FlowName, Tap, Tapped, fingerprint};
use crate::weight::Weight;
use crate::wire::{Ip, Packet, Tcp, ipv4_header_ok, tcp_checksum_ok};

/// Information that is not in frames.
pub trait Setting {
    /// The flow of a segment, and whether its guest sent it; `None`: no watched flow.
    fn flow_of(&self, packet: &Packet, tap: Tap) -> Option<(FlowName, bool)>;

    /// A flow of which nothing is known yet begins with this SYN or SYN-ACK.
    fn begins(&self, name: FlowName, tcp: &Tcp) -> Option<History>;

    /// A SYN or SYN-ACK of a flow that is known: it may begin another connection on its ports.
    fn begins_again(&self, h: &mut History, tcp: &Tcp) {
        let _ = (h, tcp);
    }

    /// How the engine names the flow of a guest behind `port`.
    fn key_of(&self, name: FlowName, port: PortId) -> FlowKey;

    /// Flow entries of a guest.
    fn flows_max(&self, guest: usize) -> u32;

    /// Frames that the ring of a guest takes.
    fn ring_slots(&self, guest: usize) -> usize {
        let _ = guest;
        usize::MAX
    }

    /// How many guests there are.
    fn guests(&self) -> usize;

    /// So many connections repeat their segments in step that they need not end (INV-18).
    fn is_crowd(&self) -> bool {
        false
    }
}

/// The state of a host that a rule may look at between two steps.
#[derive(Clone, Copy, Debug)]
pub struct HostView<'a, 'm> {
    /// Which host.
    pub host: u8,
    /// The engine, with its flows and its store.
    pub engine: &'a Engine<'m>,
    /// The port of each guest, while it is on this host.
    pub ports: &'a [Option<PortId>],
    /// Since when its worker has had a processor; now, if it waits for one.
    pub worker_runs_since: Instant,
    /// A timer or a command: any flow may have changed, not only those that had a frame.
    pub any_flow: bool,
}

/// Steps between two looks at everything, and two counts of all flows.
const LOOK_AT_ALL: u64 = 512;

/// With fewer pages left of its budget a VM is cramped.
const CRAMPED_PAGES: u64 = 16;

/// Keeps the history of every flow and asks every rule.
#[derive(Debug)]
pub struct Observer<S> {
    setting: S,
    flows: BTreeMap<FlowName, History>,
    /// Flows with a frame since the last step.
    touched: Vec<FlowName>,
    /// Flows that the engine has an entry for, as far as is known.
    tracked: BTreeSet<FlowName>,
    destroyed: Vec<bool>,
    /// Those that may be on another host.
    awaited: Vec<bool>,
    /// See [`Setting::is_crowd`].
    is_crowd: bool,
    /// Guests that do not run.
    paused: Vec<bool>,
    /// Since when each of them has had a frame to look at.
    silent_since: Vec<Option<Instant>>,
    clocks: Vec<GuestClock>,
    turns: Vec<Turns>,
    /// Of each guest, when it was last cramped.
    cramped_at: Vec<Instant>,
    /// Of each, bytes of its budget that are free for more than first windows.
    spare: Vec<u64>,
    /// Since when the heartbeat has said go to each.
    go_since: Vec<Option<Instant>>,
    steps: u64,
    any_flow: bool,
    answers: Answers,
    reach: Reach,
    weight: Weight,
}

impl<S: Setting> Observer<S> {
    /// Watches a run from its beginning.
    #[must_use]
    pub fn new(setting: S) -> Self {
        let guests = setting.guests();
        Self {
            flows: BTreeMap::new(),
            touched: Vec::new(),
            tracked: BTreeSet::new(),
            destroyed: vec![false; guests],
            awaited: vec![false; guests],
            is_crowd: setting.is_crowd(),
            paused: vec![false; guests],
            silent_since: vec![None; guests],
            clocks: (0..guests).map(|g| GuestClock::with_slots(setting.ring_slots(g))).collect(),
            turns: vec![Turns::default(); guests],
            cramped_at: vec![Instant::ZERO; guests],
            spare: vec![0; guests],
            go_since: vec![None; guests],
            setting,
            steps: 0,
            any_flow: false,
            answers: Answers::default(),
            reach: Reach::default(),
            weight: Weight::default(),
        }
    }

    /// A frame passed a tap.
    ///
    /// # Errors
    /// The first rule that does not hold.
    pub fn on_frame(&mut self, t: &Tapped<'_>) -> Result<(), Violation> {
        match t.tap {
            Tap::ToGuest(g) => {
                self.clocks[usize::from(g)].on_given(t.at);
                if self.paused[usize::from(g)] {
                    self.silent_since[usize::from(g)].get_or_insert(t.at);
                }
            }
            Tap::FromGuest(g) => self.clocks[usize::from(g)].on_life(t.at),
            Tap::FromNet | Tap::ToNet => {}
        }
        let Some((ip, tcp)) = t.packet.and_then(Packet::tcp) else { return Ok(()) };
        let Some((name, from_guest)) = t.packet.and_then(|p| self.setting.flow_of(p, t.tap)) else {
            return Ok(());
        };
        if t.tap == Tap::FromNet && self.awaited[usize::from(name.guest)] {
            return Ok(()); // as if it had been lost before (LIFE-16)
        }
        self.any_flow |= tcp.flags.syn(); // a new entry may take the place of an old one
        let Some(h) = history_of(&mut self.flows, &self.setting, name, tcp) else {
            return Ok(());
        };
        self.touched.push(name);
        let guest = usize::from(name.guest);
        (h.spare, h.silent_since) = (self.spare[guest], self.silent_since[guest]);
        match self.answers.tell(h, t, (ip, tcp)) {
            Told::AsItIs => {}
            Told::Nothing => return Ok(()),
            Told::GuestAccepts => {
                self.weight.accepted += 1;
                h.ttl = Some(ip.ttl);
                quality::on_any(h, t.at, Side::G, (ip, tcp));
                return Ok(());
            }
            Told::Answers => {
                self.weight.answered += 1;
                return Ok(());
            }
            Told::Accepts(hdr, bytes) => {
                let packet = Packet::parse(&bytes).ok();
                let Some((ip, tcp)) = packet.as_ref().and_then(Packet::tcp) else { return Ok(()) };
                let (tap, bytes, packet) = (Tap::ToNet, &bytes[..], packet.as_ref());
                let answer = Tapped { tap, hdr, bytes, packet, forged: false, ..*t };
                h.on_in(&answer, Side::G, ip, tcp, fingerprint(bytes, ip));
                quality::on_any(h, t.at, Side::G, (ip, tcp));
                (h.waits_for_guest, h.is_of_host) = (true, true);
                self.on_segment(&answer, name, true, (ip, tcp))?;
            }
            Told::InNumbersOfNet(bytes) => {
                let packet = Packet::parse(&bytes).ok();
                let Some((ip, tcp)) = packet.as_ref().and_then(Packet::tcp) else { return Ok(()) };
                let t = Tapped { bytes: &bytes, packet: packet.as_ref(), ..*t };
                return self.on_segment(&t, name, from_guest, (ip, tcp));
            }
        }
        self.on_segment(t, name, from_guest, (ip, tcp))
    }

    /// A segment of a flow that is known, in the numbers that R knows.
    fn on_segment(
        &mut self,
        t: &Tapped<'_>,
        name: FlowName,
        from_guest: bool,
        (ip, tcp): (&Ip, &Tcp),
    ) -> Result<(), Violation> {
        let Some(h) = self.flows.get_mut(&name) else { return Ok(()) };
        if matches!(t.tap, Tap::ToNet | Tap::ToGuest(_)) {
            return self.on_segment_out(t, name, from_guest, (ip, tcp));
        }
        if tcp.flags.syn() && !tcp.flags.ack() && !t.forged {
            h.quality.flooding.on_syn(t.at);
        }
        let from = if from_guest { Side::G } else { Side::R };
        let whole =
            t.hdr.needs_csum() || ipv4_header_ok(t.bytes, ip) && tcp_checksum_ok(t.bytes, ip);
        // It takes as long as a checksum.
        let passes = h.may_pass_any() || tcp.flags.syn() || !whole || t.forged;
        let fingerprint = if passes { fingerprint(t.bytes, ip) } else { 0 };
        let what = match t.forged || !whole {
            true => Happening::broken(from),
            false => Happening::segment(h, from, tcp),
        };
        self.reach.note(h.state, what);
        let sent = h.end(from).end;
        // A hostile end may have told the forger its numbers.
        let forged = t.forged && !h.known.hostile[Side::R as usize];
        if forged || !whole {
            h.on_in_forged(from, fingerprint, !whole || tcp.flags.syn());
        } else if let Some(s) = h.on_in(t, from, ip, tcp, fingerprint) {
            if from == Side::R {
                self.weight.needless_from_net += s.end.min(sent).saturating_sub(s.seq);
            }
            recovery::on_in(h, &s, &self.clocks[usize::from(name.guest)]);
        }
        if whole {
            quality::on_any(h, t.at, from, (ip, tcp));
        }
        self.weight.on_in(h, from, &t.hdr, ip.tos & 3 == 3);
        let told = fail_stop::on_in(t.at, h, from);
        told.map_err(|what| Violation { rule: Rule::FailStop, what, flow: Some(name) })
    }

    fn on_segment_out(
        &mut self,
        t: &Tapped<'_>,
        name: FlowName,
        from_guest: bool,
        (ip, tcp): (&Ip, &Tcp),
    ) -> Result<(), Violation> {
        let Some(h) = self.flows.get_mut(&name) else { return Ok(()) };
        let to = if from_guest { Side::R } else { Side::G };
        let unchanged = h.was_unchanged(to, fingerprint(t.bytes, ip));
        if unchanged == Some(false) {
            return Ok(()); // its receiver will refuse it
        }
        let gated = unchanged.is_none();
        let o = h.out(t, to, gated, ip, tcp);
        let guest = usize::from(name.guest);
        let gone = self.destroyed[guest] || self.awaited[guest];
        let whole = if gated { checksums::on_out(&t.hdr, t.bytes, ip) } else { Ok(()) };
        let from_guest = to == Side::R || h.opaque;
        if whole.is_err() && (from_guest && h.streams.is_none() || !h.was_on) {
            // A hostile guest's peer refuses its wrong virtio headers, as G refuses a broken frame
            // that waited for the ring since before there was a flow.
            return Ok(());
        }
        h.cramped_at = self.cramped_at[guest];
        let clock = &mut self.clocks[guest];
        if h.is_late(&o) {
            if o.is_stored() {
                clock.on_stored(false);
            }
            return Ok(());
        }
        let wrong = whole
            .map_err(|what| (Rule::Checksums, what))
            .and_then(|()| check_out(h, &o, gone))
            .and_then(|()| recovery::on_out(h, &o, clock).map_err(|what| (Rule::Recovery, what)))
            .and_then(|()| senders::on_out(h, &o).map_err(|what| (Rule::WireConformance, what)));
        let turn = self.turns[guest].on_out(h, &o).map_err(|what| (Rule::Turns, what));
        let wrong = wrong.and(turn);
        if o.is_stored() {
            clock.on_stored(!h.opaque && o.end <= h.end(Side::R).ack_to);
        }
        recovery::after_out(h, &o, clock);
        self.weight.on_out(h, &o, &t.hdr);
        flooding::on_out(h, &o);
        h.on_out(&o);
        wrong.map_err(|(rule, what)| Violation { rule, what, flow: Some(name) })
    }

    /// A guest has taken `frames` from its ring.
    pub fn on_seen(&mut self, now: Instant, guest: u16, frames: usize) {
        self.clocks[usize::from(guest)].on_seen(now, frames);
    }

    /// Guest `g` sent a frame past the host, or through it in fragments.
    pub fn on_past(&mut self, g: u16, bytes: &[u8]) {
        let Ok(packet) = Packet::parse(bytes) else { return };
        let Some((name, _)) = self.setting.flow_of(&packet, Tap::FromGuest(g)) else { return };
        let Some((_, tcp)) = packet.tcp() else { return };
        if !self.flows.contains_key(&name) && tcp.flags.syn() {
            if let Some(mut h) = self.setting.begins(name, tcp) {
                h.on_past_syn(tcp);
                self.flows.insert(name, h);
            }
        } else if let Some(h) = self.flows.get_mut(&name) {
            if tcp.flags.syn() {
                self.setting.begins_again(h, tcp);
            }
            h.on_past(tcp);
        }
    }

    /// A frame on its way to `tap` is cut, because it is not taken there whole.
    pub fn on_cut(&mut self, tap: Tap, whole: &[u8], pieces: &[Frame]) {
        let Ok(packet) = Packet::parse(whole) else { return };
        let flow = self.setting.flow_of(&packet, tap);
        let (Some((ip, _)), Some((name, _))) = (packet.tcp(), flow) else { return };
        let Some(h) = self.flows.get_mut(&name) else { return };
        let of_piece = |piece: &Frame| {
            let packet = Packet::parse(&piece.bytes).ok()?;
            packet.tcp().map(|(ip, _)| fingerprint(&piece.bytes, ip))
        };
        let of_pieces = pieces.iter().filter_map(of_piece).collect();
        h.on_cut(Side::G, fingerprint(whole, ip), of_pieces);
    }

    /// The host has done one step: one frame with all that follows, a batch end, a timeout or a
    /// command.
    ///
    /// # Errors
    /// The first rule that does not hold.
    pub fn on_step(&mut self, now: Instant, view: &HostView<'_, '_>) -> Result<(), Violation> {
        self.steps += 1;
        let all = self.steps.is_multiple_of(LOOK_AT_ALL);
        let of_host = |rule| move |what| Violation { rule, what, flow: None };
        budget::on_step(view.engine, view.ports, all).map_err(of_host(Rule::Budget))?;
        for (port, since) in view.ports.iter().zip(&mut self.go_since) {
            let Some(port) = port else { continue }; // on another host
            let goes = view.engine.controls_congestion(now, *port);
            *since = goes.then(|| since.unwrap_or(now));
        }
        let no_record = view.engine.arena().free_records() == 0;
        let rooms = self.cramped_at.iter_mut().zip(&mut self.spare);
        for (port, (at, spare)) in view.ports.iter().zip(rooms) {
            let vm = port.and_then(|p| view.engine.vm(p));
            // A quarter is kept for first windows.
            let free = |budget: u64, reserved| (budget - budget / 4).saturating_sub(reserved);
            *spare = vm.map_or(0, |vm| free(vm.budget_pages, vm.reserved_pages) * PAGE_BYTES);
            if no_record {
                *spare = 0; // a place is nothing without one (seed 39596: an arena of four)
            }
            if vm.is_some_and(|vm| vm.budget_pages < vm.reserved_pages + CRAMPED_PAGES) {
                *at = now;
            }
        }
        if all {
            let flows_max = |guest| self.setting.flows_max(guest);
            isolation::on_step(view.engine, view.ports, flows_max)
                .map_err(of_host(Rule::Isolation))?;
            self.touched.clear();
            self.touched.extend(self.flows.keys());
        } else if view.any_flow || std::mem::take(&mut self.any_flow) {
            self.touched.extend(&self.tracked);
        }
        while let Some(name) = self.touched.pop() {
            let port = view.ports.get(usize::from(name.guest)).copied().flatten();
            let (Some(h), Some(port)) = (self.flows.get_mut(&name), port) else { continue };
            let flow = view.engine.find_flow(&self.setting.key_of(name, port));
            h.state = flow.map(|f| f.state());
            h.note_resumed();
            h.is_relayed = flow.is_some_and(|f| f.departing().is_some());
            right_edge::on_step(h);
            match h.state {
                Some(_) => self.tracked.insert(name),
                None => self.tracked.remove(&name),
            };
            let on = matches!(h.state, Some(State::Opening | State::On | State::Drain));
            self.weight.flows_on += u64::from(on && !h.was_on);
            h.was_on |= on;
            let wrong = |rule| move |what| Violation { rule, what, flow: Some(name) };
            held::on_step(h, view.engine, flow, all).map_err(wrong(Rule::Held))?;
            if !self.is_crowd {
                liveness::on_step(h, now).map_err(wrong(Rule::Liveness))?;
            }
            let g = usize::from(name.guest);
            (h.cramped_at, h.spare) = (self.cramped_at[g], self.spare[g]);
            let clock = &mut self.clocks[g];
            clock.on_worker(view.worker_runs_since);
            if !self.awaited[g] {
                quality::on_step(h, now, clock).map_err(|(rule, what)| wrong(rule)(what))?;
            }
            let parked = flow.is_some_and(|flow| flow.is_parked());
            parked::on_step(h, now, parked).map_err(wrong(Rule::Parked))?;
            let is_late = flow.is_some_and(|flow| flow.acknowledges_late());
            late_ack::on_step(h, is_late).map_err(wrong(Rule::LateAck))?;
            flooding::on_step(h, self.go_since[g]).map_err(wrong(Rule::Flooding))?;
            self.turns[g].on_step(h);
        }
        Ok(())
    }

    /// Something else happened.
    pub fn on_event(&mut self, now: Instant, event: Event) {
        let of = |g: u16| move |(name, _): &(&FlowName, &mut History)| name.guest == g;
        let about = |name: &FlowName| event.guest().is_none_or(|g| g == name.guest);
        self.on_rings(now, event);
        let what = Happening::event(event);
        for (_, h) in self.flows.iter_mut().filter(|(name, _)| about(name)) {
            liveness::on_event(h);
            what.into_iter().for_each(|what| self.reach.note(h.state, what));
        }
        if matches!(event, Event::Crashed | Event::Migrated(_)) {
            self.go_since.fill(None); // another engine, which says it anew
        }
        if let Some(g) = event.guest() {
            let awaited = &mut self.awaited[usize::from(g)];
            let ends =
                matches!(event, Event::Rebooted(_) | Event::Migrated(_) | Event::DriverBack(_));
            *awaited = matches!(event, Event::Awaited(_)) || (*awaited && !ends);
        }
        match event {
            Event::Crashed => self.on_crash(),
            Event::Restarted { arena } => self.on_restart(now, arena),
            Event::Draining(_) | Event::Offload(..) => {}
            Event::Killed(g, port, remote_port) => {
                for (name, h) in self.flows.iter_mut().filter(of(g)) {
                    if (name.guest_port, name.remote_port) == (port, remote_port) {
                        h.killed = true;
                    }
                }
            }
            Event::DriverReset(g) => {
                for (_, h) in self.flows.iter_mut().filter(of(g)) {
                    h.rules.fail_stop.forgive_guest();
                }
            }
            Event::Healed | Event::Awaited(_) | Event::DriverBack(_) => {}
            Event::Rebooted(g) => {
                for (_, h) in self.flows.iter_mut().filter(of(g)) {
                    h.rules.fail_stop.forgive_both();
                    h.broken |= h.promised().is_some();
                    h.interrupted = true;
                    (h.must_reset, h.may_resume) = (false, false);
                }
            }
            Event::Destroyed(g) | Event::Migrated(g) => {
                self.on_gone(g, matches!(event, Event::Destroyed(_)));
            }
            Event::Paused { guest: g, .. } | Event::Resumed(g) => {
                let paused = matches!(event, Event::Paused { .. });
                for (_, h) in self.flows.iter_mut().filter(of(g)) {
                    h.paused_since = paused.then_some(now);
                    liveness::on_pause(h);
                    h.rules.fail_stop.forgive_guest();
                }
                let unseen = matches!(event, Event::Paused { unseen: true, .. });
                self.paused[usize::from(g)] = paused;
                self.silent_since[usize::from(g)] = unseen.then_some(now);
            }
        }
    }

    fn on_gone(&mut self, g: u16, destroyed: bool) {
        self.destroyed[usize::from(g)] |= destroyed;
        for (_, h) in self.flows.iter_mut().filter(|(name, _)| name.guest == g) {
            h.rules.fail_stop.forgive_both();
            // A host that owes R bytes resets the flow now; a flow that is acknowledged late and
            // owes nothing may go on (LIFE-06). The host does not know a flow that G opened past it
            // (seed 80044).
            let late = h.state == Some(State::Drain) || h.quality.late.is_late;
            let leaves = late && h.promised().is_none();
            let on = matches!(h.state, Some(State::Opening | State::On | State::Drain)) && !leaves;
            h.must_tell_r |= on && !h.end(Side::R).reset && !h.opened_past;
            (h.must_reset, h.may_resume) = (false, false);
            h.broken |= h.promised().is_some();
            h.interrupted = true;
            h.state = None;
        }
    }

    /// The frames in a ring are gone when its driver, its guest or the daemon begins anew.
    fn on_rings(&mut self, now: Instant, event: Event) {
        for (g, since) in self.silent_since.iter_mut().enumerate() {
            if event.guest().is_none_or(|of| usize::from(of) == g) {
                *since = None;
                self.turns[g].clear();
            }
        }
        match event {
            Event::Rebooted(g)
            | Event::Destroyed(g)
            | Event::Migrated(g)
            | Event::DriverReset(g) => self.clocks[usize::from(g)].on_driver_gone(now),
            Event::DriverBack(g) if self.clocks[usize::from(g)].on_driver_back(now) => {
                for (_, h) in self.flows.iter_mut().filter(|(name, _)| name.guest == g) {
                    recovery::on_driver_back(h, now);
                }
            }
            _ => {}
        }
    }

    fn on_crash(&mut self) {
        for h in self.flows.values_mut() {
            let promises = h.promised().is_some() && h.was_on && h.state.is_some();
            h.broken_by_crash |= promises && !h.broken && !h.end(Side::G).reset;
            // In a crash before the first step nothing has become of it yet.
            h.may_resume = match h.state {
                Some(_) => !h.broken && h.was_on,
                None => h.may_resume,
            };
            h.broken |= h.promised().is_some();
            h.interrupted = true;
            (h.state, h.is_relayed) = (None, false);
            h.quality.sending.forget_host();
        }
    }

    fn on_restart(&mut self, now: Instant, arena: bool) {
        self.flows.values_mut().for_each(|h| h.may_resume &= arena);
        let may_resume = self.flows.iter().filter(|(_, h)| h.may_resume);
        self.tracked.extend(may_resume.map(|(name, _)| *name));
        self.any_flow = true; // the next step sees which of them go on
        let there = |h: &&mut History| !self.destroyed[usize::from(h.name.guest)];
        let betrayed = self.flows.values_mut().filter(|h| h.broken_by_crash && arena);
        for h in betrayed.filter(there) {
            h.must_reset = true;
            h.rules.fail_stop.expect(now);
        }
    }

    /// Which event met a flow in which state.
    #[must_use]
    pub fn reach(&self) -> &Reach {
        &self.reach
    }

    /// The amount that the run carried.
    #[must_use]
    pub fn weight(&self) -> &Weight {
        &self.weight
    }

    /// The histories of all flows.
    pub fn flows(&self) -> impl Iterator<Item = &History> {
        self.flows.values()
    }

    /// The history of a flow, for an observer with more knowledge.
    pub fn flow_mut(&mut self, name: FlowName) -> Option<&mut History> {
        self.flows.get_mut(&name)
    }

    /// The setting that it was given.
    #[must_use]
    pub fn setting(&self) -> &S {
        &self.setting
    }

    /// The run is over.
    pub fn on_end(&mut self) {
        self.weight.on_end();
    }
}

/// The history of a flow; it begins with a SYN.
fn history_of<'a>(
    flows: &'a mut BTreeMap<FlowName, History>,
    setting: &impl Setting,
    name: FlowName,
    tcp: &Tcp,
) -> Option<&'a mut History> {
    match flows.entry(name) {
        Entry::Occupied(place) => {
            let h = place.into_mut();
            if tcp.flags.syn() {
                setting.begins_again(h, tcp);
            }
            Some(h)
        }
        Entry::Vacant(_) if !tcp.flags.syn() => None,
        Entry::Vacant(place) => Some(place.insert(setting.begins(name, tcp)?)),
    }
}
