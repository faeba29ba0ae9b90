//! The common state of one VM's flows: the budget, the running clock, the delivery list.

use std::collections::VecDeque;

use crate::congestion::Algorithm;
use crate::counters::VmCounters;
use crate::flow::table::FlowId;
use crate::limits::{
    BUDGET_FOR_FIRST_WINDOWS, FLOODING_PLACES, FLOW_BUFFER_MIN, MTU_DEFAULT, REFUSALS_PER_VM,
    RUNNING_CREDIT_MAX, T_ACCEPT_ALIVE, T_REFUSED, T_UNCONTROLLED, pages_for,
};
use crate::port::Local;
use crate::switch::Mac;
use crate::tcp::accept::Accepting;
use crate::tcp::distance::Servers;
use crate::tcp::doubt::Doubt;
use crate::tcp::lead::Leads;
use crate::tcp::wanting::Wanting;
use crate::time::{Duration, Instant};
use crate::wire::packet::IpAddr16;
use crate::wire::saved::{Saved as _, SavedAs as _, Wall, Writer, saved};

/// The clock that runs only while the guest does ("running time" in `docs/spec.md`).
///
/// An idle guest counts as running: it has seen everything delivered, so only the guest itself can
/// delay its answer. A guest with unseen deliveries runs only as far as its rings show. Forwarded
/// frames of others do not stop the clock, because every broadcast would. But until the guest has
/// consumed them, it is not considered alive.
#[derive(Clone, Copy, Debug)]
pub struct RunningClock {
    elapsed: Duration,
    at: Instant,
    drained: bool,
    /// Something that only passed through has yet to be seen.
    unseen: bool,
    life_at: Instant,
}

saved! {
    RunningClock { elapsed, at as Wall, drained, unseen, life_at as Wall }
}

impl RunningClock {
    /// A clock at zero; the guest counts as idle.
    #[must_use]
    pub const fn new(now: Instant) -> Self {
        Self { elapsed: Duration::ZERO, at: now, drained: true, unseen: false, life_at: now }
    }

    /// The guest showed life; `drained`: it has seen everything delivered so far. `false` is "not
    /// known": only a delivery makes it untrue.
    pub fn on_progress(&mut self, now: Instant, drained: bool) {
        self.settle(now);
        let credit = now.since(self.at);
        self.elapsed += if credit < RUNNING_CREDIT_MAX { credit } else { RUNNING_CREDIT_MAX };
        self.at = now;
        self.life_at = now;
        self.drained |= drained;
        self.unseen &= !drained;
    }

    /// A frame passed to the guest, which has yet to see it.
    pub fn on_forwarded(&mut self, now: Instant) {
        self.settle(now);
        self.unseen = true;
    }

    /// Something of ours is due to the guest, or in its ring, and it has yet to see that.
    pub fn on_delivery(&mut self, now: Instant) {
        self.settle(now);
        if self.drained {
            self.at = now;
        }
        self.drained = false;
    }

    /// The running time so far, as an instant on this clock.
    #[must_use]
    pub fn now(&self, now: Instant) -> Instant {
        let live = if self.drained { now.since(self.at) } else { Duration::ZERO };
        Instant::ZERO + self.elapsed + live
    }

    /// How long the clock has stood, or the guest shown no life; `None`: time passes by itself, the
    /// guest is idle, and nothing it was given is unseen.
    #[must_use]
    pub fn stood_for(&self, now: Instant) -> Option<Duration> {
        (!self.drained).then(|| now.since(self.at))
    }

    /// The guest was alive within the last `span` of wall time (`T_alive`, `T_paused`).
    #[must_use]
    pub fn alive_within(&self, now: Instant, span: Duration) -> bool {
        self.drained && !self.unseen || now.since(self.life_at) <= span
    }

    /// How long the guest has shown no life while it had something to see.
    #[must_use]
    pub fn silent_for(&self, now: Instant) -> Duration {
        if self.drained && !self.unseen { Duration::ZERO } else { now.since(self.life_at) }
    }

    /// The guest has seen everything that was delivered, and everything that only passed.
    #[must_use]
    pub const fn has_seen_all(&self) -> bool {
        self.drained && !self.unseen
    }

    fn settle(&mut self, now: Instant) {
        if self.drained {
            self.elapsed += now.since(self.at);
            self.at = now;
            if !self.unseen {
                self.life_at = now;
            }
        }
    }
}

/// A guest that runs has looked at its ring by then, though an emulated one is slow.
const OFF_CORE_MIN: Duration = Duration::from_micros(500);
/// The longest absence of a guest for which H still sends (FLOOD-17), and lends room (SNOOP-39).
const ABSENCE_MAX: Duration = Duration::from_millis(100);
/// The longest of these is known for so long: a guest has neighbours that come and go.
const ABSENCE_KNOWN: Duration = Duration::from_secs(60);

/// Whether the guest of a VM is there (LIFE-16).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Presence {
    /// It is, or nobody knows better.
    Here,
    /// Its VMM has hung up a moment ago: it may have moved, or may come back. Its connections stand
    /// still.
    Awaited,
    /// Its MAC was heard at another port meanwhile: it has moved there. Connections that owe
    /// something end.
    Moved,
    /// It is dead, or has left its VLAN: its connections end.
    Gone,
    /// Another guest is there, which is told as well.
    Replaced,
}

/// The shared state of one VM's flows.
#[derive(Debug)]
pub struct Vm {
    /// Identity across restarts: the hash of the port's name.
    pub name_hash: u64,
    /// The same hash of its network's name.
    pub network_hash: u32,
    /// Ack offload is wanted.
    pub offload: bool,
    /// H is to send for its flows.
    pub congestion_offload: bool,
    /// How it sends for them.
    pub congestion_control: Algorithm,
    /// Flows for which H sends.
    pub relayed_flows: u32,
    /// No new promises: the daemon is stopping or the operator drains the VM.
    pub draining: bool,
    /// The daemon is stopping, and another one goes on with its flows: they stay in the path.
    pub stops: bool,
    /// Its flows acknowledge late (LIFE-12).
    pub acknowledges_late: bool,
    /// While it may migrate (LIFE-06): whether H is to send for its flows when that is over.
    pub(crate) sends_after: Option<bool>,
    /// Accept offload: only if the VM has it.
    pub(crate) accepting: Option<Box<Accepting>>,
    /// Flows in the path that H has accepted for it (ACC-08).
    pub translated_flows: u32,
    /// Its driver has begun anew while connections owed something (LIFE-04b).
    pub(crate) doubt: Option<Box<Doubt>>,
    /// When its rings stopped last.
    pub(crate) stopped_at: Instant,
    /// Whether its guest is there. While it is not, nothing but that is said in its name (INV-19).
    pub presence: Presence,
    /// The source of resets that leave while its rings are stopped (LIFE-07). `None`: its network
    /// has no uplink with a MAC of the host, and nobody is misled by the guest's.
    pub host_mac: Option<Mac>,
    /// Store pages this VM may reserve (INV-06).
    pub budget_pages: u64,
    /// Store pages its flows have reserved.
    pub reserved_pages: u64,
    /// Of these, pages for bytes of the guest, which have half of the budget at most.
    pub lent_pages: u64,
    /// When the guest last sent, or began, something that H could not control.
    pub uncontrolled_at: Option<Instant>,
    /// H has missed the beginning of a connection, or has forgotten one, since data of such a
    /// connection was last seen (`engine/uncontrolled.rs`).
    pub missed_connection: bool,
    /// Flows that owe a byte, a FIN or an RST.
    pub owing_flows: u32,
    /// Largest IP packet the guest takes, in bytes.
    pub mtu: u16,
    /// Running time.
    pub clock: RunningClock,
    /// How long the guest was away lately, and when that was.
    pub absence: (Duration, Instant),
    /// Flows with something for the guest, round robin.
    pub ready: VecDeque<FlowId>,
    /// The worker will be told that `ready` is not empty.
    pub announced: bool,
    /// Deliveries in `ready` wait, because the VM's rate is limited.
    pub deliveries_held: bool,
    /// Frames that the daemon reads now may be older than others that have passed it by (LIFE-17).
    pub catches_up: bool,
    /// When a TCP fragment last passed to this guest (COM-08, SNOOP-24).
    pub fragment_at: Option<Instant>,
    /// When a TCP fragment of this guest last passed, and to which remote (SNOOP-42).
    pub fragment_from_guest: Option<(Instant, IpAddr16)>,
    /// Remote and guest port of connections this guest refused, and when; newest last (SNOOP-32).
    pub refused: VecDeque<(IpAddr16, u16, Instant)>,
    /// The VM's claims to its core: only if the VM has boost (BST-01).
    pub wanting: Option<Box<Wanting>>,
    /// Which of its connections end in the guest, if the operator knows (FWD-02).
    pub local: Local,
    /// The TTL of the guest's own packets, if it is none of the common ones.
    pub guest_ttl: Option<u8>,
    /// H's knowledge of servers behind the guest.
    pub(crate) servers: Servers,
    /// Counters.
    pub counters: VmCounters,
    /// The time by which H is ahead of the guest.
    pub leads: Leads,
}

/// The state of a VM that goes where its flows go.
#[derive(Debug)]
pub(crate) struct MovedVm {
    clock: RunningClock,
    absence: (Duration, Instant),
    doubt: Option<Box<Doubt>>,
    uncontrolled_at: Option<Instant>,
    missed_connection: bool,
    fragment_at: Option<Instant>,
    fragment_from_guest: Option<(IpAddr16, Instant)>,
    refused: Vec<((IpAddr16, u16), Instant)>,
    servers: Servers,
}

saved! {
    MovedVm {
        clock, absence as Wall, doubt, uncontrolled_at as Wall, missed_connection,
        fragment_at as Wall, fragment_from_guest as Wall, refused as Wall, servers,
    }
    check |it| it.refused.len() <= REFUSALS_PER_VM
}

impl MovedVm {
    /// Its running time now.
    pub(crate) fn running(&self, now: Instant) -> Instant {
        self.clock.now(now)
    }
}

impl Vm {
    /// Writes the state that goes where its flows go.
    pub(crate) fn saved(&self, image: &mut Writer) {
        let Self {
            // Of the configuration, and of its operator's orders: those of the other daemon hold.
            name_hash: _,
            network_hash: _,
            offload: _,
            congestion_offload: _,
            congestion_control: _,
            draining: _,
            stops: _,
            acknowledges_late: _,
            sends_after: _,
            host_mac: _,
            budget_pages: _,
            mtu: _,
            local: _,
            guest_ttl: _,
            // Of its rings here.
            stopped_at: _,
            presence: _,
            deliveries_held: _,
            catches_up: _,
            // Counted by the flows as they arrive, and listed.
            relayed_flows: _,
            reserved_pages: _,
            lent_pages: _,
            owing_flows: _,
            ready: _,
            announced: _,
            translated_flows: _,
            // It begins anew: a boost lasts for microseconds, a minute tells who may be answered.
            wanting: _,
            accepting: _,
            // This host's work for it.
            counters: _,
            leads: _,
            clock,
            absence,
            doubt,
            uncontrolled_at,
            missed_connection,
            fragment_at,
            fragment_from_guest,
            refused,
            servers,
        } = self;
        clock.saved(image);
        Wall::put(absence, image);
        doubt.saved(image);
        Wall::put(uncontrolled_at, image);
        missed_connection.saved(image);
        Wall::put(fragment_at, image);
        Wall::put(&fragment_from_guest.map(|(at, remote)| (remote, at)), image);
        let refused = refused.iter().map(|&(remote, port, at)| ((remote, port), at));
        Wall::put(&refused.collect::<Vec<_>>(), image);
        servers.saved(image);
    }

    /// The VM goes on here. Its running time does not go back; `running`: what it is now.
    pub(crate) fn go_on(&mut self, now: Instant, running: Instant, moved: MovedVm) {
        let MovedVm {
            mut clock,
            absence,
            doubt,
            uncontrolled_at,
            missed_connection,
            fragment_at,
            fragment_from_guest,
            refused,
            servers,
        } = moved;
        clock.elapsed += running.since(clock.now(now));
        (self.clock, self.absence, self.doubt) = (clock, absence, doubt);
        self.uncontrolled_at = uncontrolled_at;
        self.missed_connection = missed_connection;
        self.fragment_at = fragment_at;
        self.fragment_from_guest = fragment_from_guest.map(|(remote, at)| (at, remote));
        self.refused = refused.into_iter().map(|((remote, port), at)| (remote, port, at)).collect();
        self.servers = servers;
    }

    /// Without a budget, and without any wish.
    #[must_use]
    pub fn new(now: Instant, name_hash: u64) -> Self {
        Self {
            name_hash,
            network_hash: 0,
            offload: false,
            congestion_offload: false,
            congestion_control: Algorithm::default(),
            relayed_flows: 0,
            draining: false,
            stops: false,
            acknowledges_late: false,
            sends_after: None,
            host_mac: None,
            budget_pages: 0,
            reserved_pages: 0,
            lent_pages: 0,
            uncontrolled_at: None,
            missed_connection: false,
            owing_flows: 0,
            mtu: MTU_DEFAULT,
            clock: RunningClock::new(now),
            absence: (Duration::ZERO, now),
            ready: VecDeque::new(),
            announced: false,
            deliveries_held: false,
            accepting: None,
            translated_flows: 0,
            doubt: None,
            stopped_at: Instant::ZERO,
            presence: Presence::Here,
            catches_up: false,
            fragment_at: None,
            fragment_from_guest: None,
            refused: VecDeque::new(),
            wanting: None,
            local: Local::Auto,
            guest_ttl: None,
            servers: Servers::default(),
            counters: VmCounters::default(),
            leads: Leads::default(),
        }
    }

    /// Takes `pages` from the budget; `false` and nothing taken if it does not reach.
    #[must_use]
    pub fn reserve(&mut self, pages: u64) -> bool {
        let fits = self.reserved_pages + pages <= self.budget_pages;
        if fits {
            self.reserved_pages += pages;
        }
        fits
    }

    /// Pages that are free for more than first windows.
    #[must_use]
    pub fn spare(&self) -> u64 {
        let kept = self.budget_pages / BUDGET_FOR_FIRST_WINDOWS;
        self.budget_pages.saturating_sub(self.reserved_pages + kept)
    }

    /// By how many pages a flow that has `own` may grow: as many as it has then must be spare for
    /// others, so that one flow gets half of them, two a third each, and none all.
    #[must_use]
    pub fn growth(&self, own: u64) -> u64 {
        self.spare().saturating_sub(own) / 2
    }

    /// The most pages that one flow can ever grow to.
    #[must_use]
    pub fn growth_max(&self) -> u64 {
        (self.budget_pages - self.budget_pages / BUDGET_FOR_FIRST_WINDOWS) / 2
    }

    /// Takes `pages` for bytes that the guest hands over, from the budget that all promises leave.
    /// `false`: there are fewer.
    #[must_use]
    pub fn lend(&mut self, pages: u64) -> bool {
        let lent = pages <= self.lendable() && self.reserve(pages);
        self.lent_pages += if lent { pages } else { 0 };
        lent
    }

    /// Such pages come back.
    pub fn take_back(&mut self, pages: u64) {
        self.lent_pages -= pages;
        self.unreserve(pages);
    }

    /// By how many such pages a flow that has `own` may grow, as [`Self::growth`].
    #[must_use]
    pub fn lendable_growth(&self, own: u64) -> u64 {
        self.lendable().saturating_sub(own + self.flooding_places()) / 2
    }

    /// The same for bytes for which R has shown no room: half of all such pages are for bytes
    /// within R's window.
    #[must_use]
    pub fn lendable_ahead(&self, own: u64) -> u64 {
        self.lendable().saturating_sub(own + self.budget_pages / 4) / 2
    }

    /// Pages that must be free for the connections that begin next (FLOOD-28).
    fn flooding_places(&self) -> u64 {
        (FLOODING_PLACES * pages_for(FLOW_BUFFER_MIN)).min(self.budget_pages / 8)
    }

    fn lendable(&self) -> u64 {
        self.spare().min((self.budget_pages / 2).saturating_sub(self.lent_pages))
    }

    /// H answers SYNs for it from then on; `None`: it has no accept offload.
    #[must_use]
    pub fn accepts_from(&self) -> Option<Instant> {
        self.accepting.as_ref().map(|accepting| accepting.config.begins_at)
    }

    /// It may migrate (LIFE-06).
    #[must_use]
    pub const fn migrates(&self) -> bool {
        self.sends_after.is_some()
    }

    /// From now on it may migrate, so H begins to send for none of its flows; or not any more.
    pub(crate) fn set_migrating(&mut self, migrates: bool) {
        let wanted = self.sends_after.take().unwrap_or(self.congestion_offload);
        self.sends_after = migrates.then_some(wanted);
        self.congestion_offload = wanted && !migrates;
    }

    /// H is to send for its flows, as soon as it does not migrate.
    pub(crate) fn set_congestion_offload(&mut self, on: bool) {
        match &mut self.sends_after {
            Some(wanted) => *wanted = on,
            None => self.congestion_offload = on,
        }
    }

    /// H controls congestion for the guest, so the guest may flood. H does not while it has no
    /// place for the next connections, nor for a while after a connection that it could not control
    /// (FLOOD-28).
    #[must_use]
    pub fn controls_congestion(&self, now: Instant) -> bool {
        let lately = self.uncontrolled_at.is_some_and(|at| now.since(at) < T_UNCONTROLLED);
        self.congestion_offload
            && self.offload
            && !self.draining
            && !lately
            && self.lendable() >= self.flooding_places()
    }

    /// The guest is off its core: it has not looked at what it was given for longer than one that
    /// runs, and not yet for so long that it may have stopped. Of a guest whose rate is limited
    /// nothing is known.
    #[must_use]
    pub fn is_off_core(&self, now: Instant) -> bool {
        let is_off = |stood| (OFF_CORE_MIN..ABSENCE_MAX).contains(&stood);
        !self.deliveries_held && self.clock.stood_for(now).is_some_and(is_off)
    }

    /// How long the guest is absent at a time, as far as its unseen frames show.
    #[must_use]
    pub fn absence(&mut self, now: Instant) -> Duration {
        let silent = self.clock.silent_for(now);
        let (longest, at) = self.absence;
        if silent >= longest || now.since(at) > ABSENCE_KNOWN {
            self.absence = (silent.min(ABSENCE_MAX), now);
        }
        self.absence.0
    }

    /// The guest of a VM with accept offload runs. One that was paused may have other rules by now
    /// (ACC-01b). It has had a turn when it has seen everything (ACC-10).
    #[cold]
    pub(crate) fn note_run(&mut self, now: Instant, drained: bool) {
        let silent = self.clock.silent_for(now);
        let turn = drained && !self.clock.has_seen_all();
        if let Some(accepting) = &mut self.accepting {
            accepting.run += u64::from(turn);
            if silent > T_ACCEPT_ALIVE {
                accepting.learned.on_guest_reset(now);
            }
        }
    }

    /// The guest refused bytes from `remote` for `g_port`: no offload for them for [`T_REFUSED`].
    pub fn refuse(&mut self, now: Instant, remote: IpAddr16, g_port: u16) {
        if self.refused.len() == REFUSALS_PER_VM {
            self.refused.pop_front();
        }
        self.refused.push_back((remote, g_port, now));
    }

    /// Whether the guest refused bytes from `remote` for `g_port` a short while ago.
    pub fn refuses(&mut self, now: Instant, remote: IpAddr16, g_port: u16) -> bool {
        while self.refused.front().is_some_and(|(_, _, at)| now.since(*at) > T_REFUSED) {
            self.refused.pop_front();
        }
        self.refused.iter().any(|(r, port, _)| (*r, *port) == (remote, g_port))
    }

    /// Gives `pages` back.
    pub fn unreserve(&mut self, pages: u64) {
        debug_assert!(pages <= self.reserved_pages, "gave back more than was reserved");
        self.reserved_pages = self.reserved_pages.saturating_sub(pages);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Found in review: a broadcast a second let the clock of an idle guest run at a hundredth.
    #[test]
    fn what_others_send_does_not_stop_the_clock_but_is_no_sign_of_life() {
        let at = Instant::from_secs;
        let mut clock = RunningClock::new(at(100));
        for s in 101..160 {
            clock.on_forwarded(at(s));
        }
        assert_eq!(clock.now(at(160)), at(60));
        assert!(clock.alive_within(at(160), Duration::from_secs(59)));
        assert!(!clock.alive_within(at(161), Duration::from_secs(59)));
        clock.on_progress(at(161), true);
        assert!(clock.alive_within(at(300), Duration::from_secs(1)));
    }

    #[test]
    fn a_pause_does_not_count_whatever_happens_in_it() {
        let at = Instant::from_secs;
        let paused: [fn(&mut RunningClock, Instant); 3] =
            [RunningClock::on_delivery, RunningClock::on_forwarded, |clock, now| {
                clock.on_progress(now, false);
            }];
        for happens in paused {
            let mut clock = RunningClock::new(at(100));
            clock.on_delivery(at(110));
            assert_eq!(clock.stood_for(at(111)), Some(Duration::from_secs(1)));
            happens(&mut clock, at(140));
            // It ran for ten seconds before the pause.
            assert!(clock.now(at(149)).since(at(10)) <= RUNNING_CREDIT_MAX);
            clock.on_progress(at(150), true);
            assert!(clock.now(at(150)).since(at(10)) <= RUNNING_CREDIT_MAX + RUNNING_CREDIT_MAX);
            assert_eq!(clock.now(at(153)).since(clock.now(at(150))), Duration::from_secs(3));
        }
    }

    #[test]
    fn flood_17_how_long_a_guest_is_away_is_known_for_a_minute() {
        let at = |ms| Instant::from_secs(100) + Duration::from_millis(ms);
        let mut vm = Vm::new(at(0), 0);
        assert_eq!(vm.absence(at(500)), Duration::ZERO, "it is idle");
        vm.clock.on_forwarded(at(1000));
        assert_eq!(vm.absence(at(1040)), Duration::from_millis(40));
        vm.clock.on_progress(at(1041), true);
        for (ms, away) in [(61_040, 40), (61_041, 0)] {
            assert_eq!(vm.absence(at(ms)), Duration::from_millis(away), "{ms}");
        }
        vm.clock.on_delivery(at(70_000));
        assert_eq!(vm.absence(at(80_000)), ABSENCE_MAX, "it has stopped");
    }

    #[test]
    fn snoop_32_the_last_refusals_are_remembered_each() {
        let mut vm = Vm::new(Instant::ZERO, 0);
        let remote = IpAddr16([7; 16]);
        let last = u16::try_from(REFUSALS_PER_VM).unwrap();
        (0..=last).for_each(|port| vm.refuse(Instant::ZERO, remote, port));
        for port in 0..=last {
            assert_eq!(vm.refuses(Instant::ZERO, remote, port), port > 0);
        }
        let hour = Instant::ZERO + T_REFUSED;
        assert!(vm.refuses(hour, remote, last));
        assert!(!vm.refuses(hour + Duration::from_millis(1), remote, last));
    }
}
