//! The worker's answers to operators about itself, its ports and its flows.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use nightporter_api::{
    FlowInfo, FlowPage, MacCursor, MacInfo, MacPage, PortStatus, SendInfo, StandingFlow, VmStatus,
};
use nightporter_core::counters::VmCounters;
use nightporter_core::drops::DropReason;
use nightporter_core::engine::Direction;
use nightporter_core::flow::key::FlowKey;
use nightporter_core::flow::table::FlowId;
use nightporter_core::limits::PAGE;
use nightporter_core::port::PortId;
use nightporter_core::switch::{Known, MacPlace};
use nightporter_core::tcp::flow::{Flow, State, Why};
use nightporter_core::tcp::lead::Histogram;
use nightporter_core::tcp::stats::RelayedStats;
use nightporter_core::time::{Duration, Instant};

use super::census::FlowSums;
use super::data_path::DataPath;
use super::ports::NamedPort;
use crate::port::Port;
use crate::vhost::Source;

/// Flows in one reply, some 60 KiB of JSON, and places for flows that are looked at for it.
const FLOWS_PER_PAGE: usize = 100;
const PLACES_PER_PAGE: usize = 1024;
/// MACs in one reply, some 60 KiB of JSON. For each page a network's whole table is looked at, of
/// up to 16,384 entries that were learned.
const MACS_PER_PAGE: usize = 500;

/// A connection that owes for so long, in its guest's running time, is named in a status.
const STANDS_AFTER: Duration = Duration::from_secs(10);
/// Most connections that are named when a stop is over.
const NAMED_MAX: usize = 32;

impl DataPath {
    pub(super) fn port_status(
        &self,
        now: Instant,
        id: PortId,
        at: &NamedPort,
        sums: &FlowSums,
    ) -> PortStatus {
        let (stats, engine) = (self.turn.stats(id), self.engine.drops(id));
        let of_engine = |r: DropReason| engine.map_or(0, |drops| drops[r as usize]);
        let count = |r| stats.drops(r) + of_engine(r) + at.port.drops(r);
        let drops = DropReason::ALL.iter().map(|&r| (r.label().into(), count(r)));
        let (captures, captures_missed) = self.ports.watchers.captures(id);
        PortStatus {
            name: at.name.clone(),
            kind: at.port.kind().into(),
            link: self.turn.features(id).is_some(),
            // Of uplinks control knows it.
            trouble: why_down(&at.port).filter(|_| self.turn.features(id).is_none()),
            keys: BTreeMap::new(), // control knows
            frames_from_port: stats.frames_from_port,
            bytes_from_port: stats.bytes_from_port,
            frames_to_port: stats.frames_to_port,
            bytes_to_port: stats.bytes_to_port,
            backlog_bytes: self.turn.backlog_bytes(id) as u64,
            drops: drops.filter(|(_, n)| *n > 0).collect(),
            spoofed_mac: self.engine.spoofed_mac(id).map(written),
            captures,
            captures_missed,
            vm: self.vm_status(now, id, at, sums),
        }
    }

    fn vm_status(
        &self,
        now: Instant,
        id: PortId,
        at: &NamedPort,
        sums: &FlowSums,
    ) -> Option<VmStatus> {
        let (vm, device) = (self.engine.vm(id)?, at.port.device().unwrap_or_default());
        let states = STATES.iter().zip(sums.by_state);
        let names = VmCounters::ALL.iter().map(|counter| counter.name.to_owned());
        Some(VmStatus {
            offload: vm.offload,
            local: vm.local.label().into(),
            congestion_offload: vm.congestion_offload,
            controls_congestion: vm.controls_congestion(now),
            accepts_in_s: vm.accepts_from().map(|at| at.since(now).as_millis().div_ceil(1000)),
            translated_flows: vm.translated_flows.into(),
            draining: vm.draining,
            migrating: vm.migrates(),
            rate_limit_from_guest_mbit_s: self.rate_limit_mbit_s(id, Direction::FromGuest),
            rate_limit_to_guest_mbit_s: self.rate_limit_mbit_s(id, Direction::ToGuest),
            owed_flows: vm.owing_flows.into(),
            stands: self.standing_flow(now, id, sums),
            flows: states.map(|(s, n)| ((*s).into(), n)).collect(),
            listens: at.port.listens(),
            vmm_pid: vmm_pid(&at.port),
            rings: ring_sizes(&at.port),
            has_no_buffers: self.unshared.has(id) && !at.port.has_seen_buffers(),
            ring_faults: device.ring_faults,
            memory_faults: device.memory_faults,
            blocked: device.blocked,
            attached: at.port.attached_status().map(|it| self.attached.complete(now, id, it)),
            budget_bytes: vm.budget_pages * PAGE as u64,
            promised_bytes: vm.reserved_pages * PAGE as u64,
            held_bytes: sums.held_bytes,
            toe: None, // the sockets' worker knows
            boost: self.booster.status(id),
            ack_saved: histogram(vm.leads.acks()),
            send_saved: histogram(vm.leads.sends()),
            counters: names.zip(vm.counters.values()).collect(),
        })
    }

    /// The connection of a VM that has owed for the longest, if that is long.
    fn standing_flow(&self, now: Instant, id: PortId, sums: &FlowSums) -> Option<StandingFlow> {
        let vm = self.engine.vm(id)?;
        let (place, age) = sums.stands?;
        let (_, key, flow) = self.engine.flow(place)?; // of another port, if it has gone meanwhile
        let is_long = vm.draining || age >= STANDS_AFTER;
        let debt = flow.debt(now, vm).filter(|_| is_long && key.port == id.0)?;
        Some(StandingFlow {
            id: place as u64,
            guest: SocketAddr::new(key.g_addr.to_ip(), key.g_port).to_string(),
            remote: SocketAddr::new(key.r_addr.to_ip(), key.r_port).to_string(),
            held_bytes: held_bytes(flow),
            seconds: debt.age.as_millis() / 1000,
            is_unread: debt.is_unread,
        })
    }

    /// Names the connections that owe, for the log of a daemon that waits for them no longer.
    pub(super) fn name_owing(&self) {
        let owing = || self.engine.flows().filter(|(_, _, flow)| !flow.owes_nothing());
        for (_, key, flow) in owing().take(NAMED_MAX) {
            let vm = &self.ports.of(PortId(key.port)).name;
            let guest = SocketAddr::new(key.g_addr.to_ip(), key.g_port);
            let remote = SocketAddr::new(key.r_addr.to_ip(), key.r_port);
            let held = held_bytes(flow);
            tracing::warn!(vm, %guest, %remote, held, "a connection is still owed");
        }
        let more = owing().count().saturating_sub(NAMED_MAX);
        if more > 0 {
            tracing::warn!(more, "and so are others");
        }
    }

    /// Flows from number `from` on, of all VMs or of one.
    pub(super) fn flow_page(&self, now: Instant, from: u64, vm: Option<PortId>) -> FlowPage {
        let (flows, next) = page(self.engine.flow_places(), from, |place| {
            let found = self.engine.flow(place)?;
            let is_wanted = vm.is_none_or(|vm| vm == PortId(found.1.port));
            is_wanted.then(|| self.flow_info(now, found))
        });
        FlowPage { flows, next }
    }

    /// MACs from this place on, of all ports or of one.
    pub(super) fn mac_page(
        &self,
        now: Instant,
        (network, after): MacCursor,
        port: Option<PortId>,
    ) -> MacPage {
        let Some(places) = self.engine.mac_places(now, (network, after), MACS_PER_PAGE) else {
            return MacPage::default();
        };
        let next = match places.last() {
            Some(last) if places.len() == MACS_PER_PAGE => (network, Some(last.key)),
            _ => (network.saturating_add(1), None),
        };
        let shown = places.iter().filter(|place| port.is_none_or(|port| port == place.port));
        let macs = shown.map(|place| self.mac_info(place)).collect();
        MacPage { macs, next: Some(next) }
    }

    fn mac_info(&self, at: &MacPlace) -> MacInfo {
        let (known, age_s) = match at.known {
            Known::Guest => ("guest", None),
            Known::Told => ("registry", None),
            Known::Heard(ago) => ("heard", Some(ago.as_millis() / 1000)),
        };
        MacInfo {
            mac: written(at.mac),
            vlan: at.vlan,
            is_service: at.is_service,
            port: self.ports.name_of(at.port).to_owned(),
            known: known.into(),
            age_s,
        }
    }

    /// One flow as the operator sees it.
    pub(super) fn flow_info(
        &self,
        now: Instant,
        (id, key, flow): (FlowId, &FlowKey, &Flow),
    ) -> FlowInfo {
        let at = flow.stats();
        let now_s = u32::try_from(now.as_millis() / 1000).unwrap_or(u32::MAX);
        FlowInfo {
            id: id.index() as u64,
            vm: self.ports.of(PortId(key.port)).name.clone(),
            guest: SocketAddr::new(key.g_addr.to_ip(), key.g_port).to_string(),
            remote: SocketAddr::new(key.r_addr.to_ip(), key.r_port).to_string(),
            vlan: key.vlan,
            state: STATES[state_of(flow)].into(),
            why: flow.why().label().into(),
            guest_is_client: at.guest_is_client,
            held_bytes: held_bytes(flow),
            buffer_bytes: at.buffer_bytes.into(),
            undelivered_bytes: at.rcv_nxt.saturating_sub(at.guest_nxt),
            in_flight_to_guest: at.guest_nxt.saturating_sub(at.guest_una),
            window_of_guest: at.guest_edge.saturating_sub(at.guest_una),
            window_to_remote: at.edge_to_net.saturating_sub(at.rcv_nxt),
            unacked_to_remote: at.rcv_nxt.saturating_sub(at.acked_to_net),
            in_flight_to_remote: at.net_nxt.saturating_sub(at.net_una),
            timestamps: flow.options().timestamps,
            sack: flow.options().sack,
            ecn: flow.options().ecn,
            mss_to_guest: flow.options().mss_to_guest,
            early_acked_bytes: at.early_acked_bytes,
            local_retransmissions: at.local_retransmissions.into(),
            acks_absorbed: at.absorbed_acks.into(),
            idle_s: now_s.wrapping_sub(at.seen_at_s),
            sends: at.relayed.map(send_info),
        }
    }
}

/// The VMM that is connected; `None` also where the kernel does not say which one it is.
fn vmm_pid(port: &Port) -> Option<i32> {
    let Port::Guest(guest) = port else { return None };
    guest.port.fd(Source::Connection)?;
    Some(guest.port.vmm()).filter(|pid| *pid > 0)
}

/// Places of its receive and transmit ring.
fn ring_sizes(port: &Port) -> Option<[u16; 2]> {
    let Port::Guest(guest) = port else { return None };
    guest.port.ring_sizes()
}

/// Why the link of a VM is down, if it is.
fn why_down(port: &Port) -> Option<String> {
    let Port::Guest(guest) = port else { return None };
    let why = if !guest.port.listens() {
        "something else is at the path of its socket"
    } else if guest.port.fd(Source::Connection).is_none() {
        "no VMM is connected to its socket"
    } else if guest.port.is_outside_memory() {
        "its rings are outside the memory that its VMM shares: is that all of it (share=on)?"
    } else {
        "its VMM is connected, and the guest's network driver is not running"
    };
    Some(why.into())
}

/// The items from place `from` on, and the place to go on from, if there are more.
fn page<T>(places: usize, from: u64, look: impl Fn(usize) -> Option<T>) -> (Vec<T>, Option<u64>) {
    let mut at = usize::try_from(from).unwrap_or(usize::MAX).min(places);
    let end = places.min(at + PLACES_PER_PAGE);
    let mut found = Vec::new();
    while at < end && found.len() < FLOWS_PER_PAGE {
        found.extend(look(at));
        at += 1;
    }
    (found, (at < places).then_some(at as u64))
}

fn send_info(at: RelayedStats) -> SendInfo {
    SendInfo {
        kept_bytes: at.kept_bytes,
        unsent_bytes: at.unsent_bytes,
        in_flight_bytes: at.in_flight_bytes,
        cwnd_bytes: at.cwnd_bytes,
        ssthresh_bytes: Some(at.ssthresh_bytes).filter(|&bytes| bytes < u64::MAX),
        srtt_us: at.srtt.map(|srtt| srtt.as_nanos() / 1000),
        mss: at.mss,
        retransmissions: at.retransmissions,
        timeouts_in_a_row: at.timeouts_in_a_row,
    }
}

/// The states of a connection as operators see them: those of the core, and how one has ended.
pub(super) const STATES: [&str; State::ALL.len() + 2] = {
    let mut all = ["closed"; State::ALL.len() + 2];
    let mut at = 0;
    while at < State::ALL.len() {
        all[at] = State::ALL[at].label();
        at += 1;
    }
    all[at + 1] = "reset";
    all
};

/// Which of [`STATES`] a connection is in.
pub(super) fn state_of(flow: &Flow) -> usize {
    match flow.state() {
        State::Pass if flow.why() == Why::Closed => State::ALL.len(),
        State::Abort if flow.owes_nothing() => State::ALL.len() + 1,
        state => State::ALL.iter().position(|s| *s == state).unwrap_or(0),
    }
}

/// Bytes in the store; a flow outside the path has none, whatever its numbers are.
pub(super) fn held_bytes(flow: &Flow) -> u64 {
    match flow.state() {
        State::On | State::Drain => flow.held_bytes(),
        State::Opening => flow.held_bytes() - 1, // the number of R's SYN
        State::Handshake | State::Pass | State::Translated | State::Abort => 0,
    }
}

/// A MAC as people write it.
fn written(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

fn histogram(of: &Histogram) -> nightporter_api::Histogram {
    let (above, counts) = of.counts().split_last().unwrap_or((&0, &[]));
    let buckets = Histogram::BOUNDS_NS.into_iter().zip(counts.iter().copied());
    nightporter_api::Histogram { buckets: buckets.collect(), above: *above, sum_ns: of.sum_ns() }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// All pages of a table with `places`, and how many there are.
    fn all(places: usize, is_there: impl Fn(usize) -> bool) -> (Vec<usize>, usize) {
        let (mut all, mut from, mut pages) = (Vec::new(), Some(0), 0);
        while let Some(at) = from {
            let looks = Cell::new(0);
            let (found, next) = page(places, at, |place| {
                looks.set(looks.get() + 1);
                is_there(place).then_some(place)
            });
            assert!(looks.get() <= PLACES_PER_PAGE && found.len() <= FLOWS_PER_PAGE);
            all.extend(found);
            (from, pages) = (next, pages + 1);
        }
        (all, pages)
    }

    #[test]
    fn a_page_of_connections_looks_at_a_thousand_places_and_shows_a_hundred() {
        assert_eq!(all(0, |_| true), (vec![], 1));
        assert_eq!(all(FLOWS_PER_PAGE, |_| true), ((0..100).collect(), 1));
        let (found, pages) = all(10_000, |_| true);
        assert!(found.into_iter().eq(0..10_000) && pages == 100);
        // One VM has the last of a million.
        assert_eq!(all(1_000_000, |place| place == 999_999), (vec![999_999], 977));
        assert_eq!(page(5, 7, Some), (vec![], None));
        assert_eq!(page(5, u64::MAX, Some), (vec![], None));
    }
}
