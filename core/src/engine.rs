//! The engine: frames in, frames out. The front door of `core`.
//!
//! One worker owns one `Engine`. The methods are of four kinds:
//!
//! 1. getters;
//! 2. `handle_*(now, ...)`: report an event; `handle_frame` returns that frame's [`Verdict`];
//! 3. commands (`add_port`, `set_offload`, `drain`, ...);
//! 4. `poll_*`: return the engine's next action.
//!
//! **Drain order.** After each `handle_*` call or command the caller sends the frame itself if its
//! verdict is `Forward` or `Flood`, then the frames of `poll_transmit(now)` until it gives `None`.
//! These are older than the next frame, and R must not see acknowledgements out of order. After a
//! batch of frames the caller calls, in this order:
//!
//! 1. `poll_departure(now)` for data that guests have handed over;
//! 2. `handle_batch_end(now)` for the ACKs that no data has carried;
//! 3. `poll_transmit(now)` once more;
//! 4. `poll_delivery(now, port, room)` until `None`, for every guest port with room that
//!    `poll_ready()` has named;
//! 5. `poll_timeout()` for the next wake-up.
//!
//! If older frames wait for the ring, the caller alternates: one older frame, then one delivery
//! behind all of them. So no frame is overtaken, and a flood does not starve promised bytes.

mod accepting;
mod errors;
mod frames;
mod images;
mod migration;
mod polls;
mod ports;
mod presence;
mod rates;
mod restart;
mod segments;
mod staged;
mod syns;
mod uncontrolled;
mod walks;
mod wire;

use std::collections::VecDeque;

pub use self::frames::FloodedFrame;
pub use self::images::{ExportError, ImportError, Imported, seal_image};
pub use self::polls::Departure;
pub use self::ports::AddPortError;
pub use self::rates::Direction;
use self::rates::Rates;
use self::restart::Left;
pub use self::restart::Restarted;
pub use self::staged::Staged;
use self::walks::{Deed, Walks};
use self::wire::Wire;
use crate::bucket::Bucket;
use crate::drops::DropReason;
use crate::flow::key::FlowKey;
use crate::flow::syn_cache::SynCache;
use crate::flow::table::{Class, FlowId, FlowTable};
use crate::flow::timer::TimerWheel;
use crate::limits;
use crate::port::{PortConfig, PortFeatures, PortId};
use crate::store::arena::Arena;
use crate::switch::{Mac, MacPlace, Networks};
use crate::tcp::flow::{Flow, State};
use crate::tcp::gates::OutQueue;
use crate::tcp::lead::AckMoments;
use crate::tcp::options::SynInfo;
use crate::tcp::vm::{Presence, Vm};
use crate::tcp::wanting::{Claim, Want, Wanting};
use crate::tcp::{Ended, Fate, FlowContext};
use crate::time::Instant;
use crate::wire::emit::TcpEmit;
use crate::wire::virtio_net::VirtioNetHdr;

/// The fate of the frame given to [`Engine::handle_frame`], perhaps edited in place.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Verdict {
    /// Send it out of this port.
    Forward(PortId),
    /// Send it out of every port but the one it came from.
    Flood,
    /// The engine has what it needs; nothing to send.
    Absorbed,
    /// Dropped and already counted.
    Drop(DropReason),
}

/// A frame the engine made, ready for `port`: a header and, for deliveries, stored payload.
#[derive(Clone, Copy, Debug)]
pub struct Transmit<'a> {
    /// Where it goes; `None` means wherever it [is flooded](Engine::is_flooded).
    pub port: Option<PortId>,
    /// The port on whose behalf it was made.
    pub ingress: PortId,
    /// Checksum and segmentation state, already within what a guest port's features allow.
    pub hdr: VirtioNetHdr,
    parts: [&'a [u8]; limits::TRANSMIT_PARTS_MAX],
    parts_len: u8,
}

impl<'a> Transmit<'a> {
    /// A whole frame, without payload.
    #[inline]
    fn of_header(port: Option<PortId>, ingress: PortId, frame: &'a [u8]) -> Self {
        let mut parts: [&[u8]; limits::TRANSMIT_PARTS_MAX] = [&[]; limits::TRANSMIT_PARTS_MAX];
        parts[0] = frame;
        Self { port, ingress, hdr: VirtioNetHdr::default(), parts, parts_len: 1 }
    }

    /// The frame's bytes, in order: L2 to L4 headers first, then payload pieces.
    #[must_use]
    pub fn parts(&self) -> &[&'a [u8]] {
        &self.parts[..usize::from(self.parts_len)]
    }
}

/// How big the engine is, and its secrets.
#[derive(Clone, Copy, Debug)]
pub struct EngineConfig {
    /// Most flow entries of all VMs together.
    pub flows_max: u32,
    /// Unpredictable to remotes; keys the flow index and the SYN cache (LIFE-01).
    pub hash_seeds: [u64; 4],
    /// Flows to which something is done at once, one at least.
    pub flows_per_step: u32,
}

impl EngineConfig {
    /// With steps of [`limits::FLOWS_PER_STEP`].
    #[must_use]
    pub const fn new(flows_max: u32, hash_seeds: [u64; 4]) -> Self {
        Self { flows_max, hash_seeds, flows_per_step: limits::FLOWS_PER_STEP }
    }
}

#[derive(Debug)]
struct Port {
    config: PortConfig,
    features: Option<PortFeatures>,
    vm: Vm,
    /// [`Engine::set_elsewhere`].
    elsewhere: bool,
    /// It is an end of a wire.
    wire: Option<Wire>,
    /// Storm control: a limit for its frames to groups, which others have to take.
    group_frames: Bucket,
    drops: [u64; DropReason::ALL.len()],
    /// [`Engine::spoofed_mac`].
    spoofed: Option<Mac>,
}

/// One worker's switch, flows and store. See the module doc for the drain order.
#[derive(Debug)]
pub struct Engine<'m> {
    ports: Vec<Option<Port>>,
    networks: Networks,
    flows: FlowTable<Flow>,
    syn_cache: SynCache<SynInfo>,
    timers: TimerWheel,
    common: Common<'m>,
    rates: Rates,
    walks: Walks,
    left: Left,
    /// The end of a wire that was removed last, and the other end.
    removed_wire: Option<(PortId, PortId)>,
    /// When the next of H's SYN-ACKs is repeated, at the earliest.
    half_open_due: Instant,
    /// The header of the frame last polled for a guest, or of its bytes for R.
    made: [u8; TcpEmit::MAX_LEN],
    /// The last frame from one guest to another, as a whole.
    whole: Vec<u8>,
}

/// The state that all flows share.
#[derive(Debug)]
struct Common<'m> {
    arena: Arena<'m>,
    /// Segments made for R, to be routed by `poll_transmit`.
    out: OutQueue,
    /// Flows with an ACK due at the end of the batch.
    ack_list: Vec<FlowId>,
    /// When H acknowledged what G has yet to acknowledge.
    ack_moments: AckMoments,
    /// Ports whose VMs have something to deliver, each once; see `Vm::announced`.
    ready_ports: VecDeque<PortId>,
    /// Ordinary segments take the predicted path (`tcp::predicted`). Tests turn it off, and
    /// [`Walks`] that end connections.
    predicts: bool,
    /// SYNs of all VMs that H has answered, and whose third ACK has not come.
    half_open: usize,
}

impl<'m> Engine<'m> {
    /// An engine over `arena`. If a predecessor left promises in it, add the ports and then call
    /// [`Self::handle_restart`] before any frame.
    #[must_use]
    pub fn new(now: Instant, config: EngineConfig, arena: Arena<'m>) -> Self {
        Self {
            ports: Vec::new(),
            networks: Networks::new(config.hash_seeds),
            flows: FlowTable::new(config.flows_max, config.hash_seeds),
            syn_cache: SynCache::new(config.hash_seeds),
            timers: TimerWheel::new(now),
            common: Common {
                arena,
                out: OutQueue::new(now),
                ack_list: Vec::new(),
                ack_moments: AckMoments::default(),
                ready_ports: VecDeque::new(),
                predicts: true,
                half_open: 0,
            },
            rates: Rates::default(),
            left: Left::default(),
            removed_wire: None,
            half_open_due: Instant::MAX,
            walks: Walks::new(config.flows_per_step),
            made: [0; TcpEmit::MAX_LEN],
            whole: vec![],
        }
    }

    /// Sets the features of the port's peer; `None` while no driver is there (link down). Flows
    /// stay: TCP sockets survive a driver reset (LIFE-04).
    pub fn set_port_features(
        &mut self,
        now: Instant,
        port: PortId,
        features: Option<PortFeatures>,
    ) {
        self.settle_presence(now, port, features.is_some());
        let Some(p) = self.port_mut(port) else { return };
        let before = std::mem::replace(&mut p.features, features);
        let (was_there, is_there) = (before.is_some(), features.is_some());
        // The ring stays if the driver only agrees on other features. Otherwise its frames are
        // gone: none is unseen any more, but without a driver none can be seen either.
        p.vm.clock.on_progress(now, !was_there || !is_there);
        if !is_there {
            p.vm.clock.on_delivery(now);
        } else if !was_there {
            p.vm.doubt = None; // what was heard before says nothing of this driver
        }
        if was_there != is_there
            && let Some(accepting) = &mut p.vm.accepting
        {
            accepting.learned.on_guest_reset(now);
        }
        if was_there && !is_there {
            self.note_stopped(now, port);
        } else if !was_there && is_there {
            self.walk(now, Deed::RingReset, port);
            self.welcome(port);
        }
        self.settle_away(port);
    }

    /// Resets all flows of this VM, and tells their remotes now, because the promised bytes will
    /// not be delivered.
    fn abort_flows(&mut self, now: Instant, port: PortId) {
        self.for_each(port, Class::Live, |engine, id| engine.does(now, Deed::End, id));
    }

    /// Evidence that the guest of `port` runs. `drained`: it has seen everything forwarded and
    /// delivered to it so far, and nothing of that still waits outside its ring.
    ///
    /// Call on every kick from it, when its `used_event` or `avail.idx` moved, and for ports with
    /// unseen deliveries before [`Self::handle_timeout`] (running time).
    pub fn handle_guest_progress(&mut self, now: Instant, port: PortId, drained: bool) {
        if let Some(p) = self.port_mut(port) {
            if p.vm.accepting.is_some() {
                p.vm.note_run(now, drained);
            }
            p.vm.clock.on_progress(now, drained);
            if drained {
                p.vm.leads.on_seen(now);
            }
        }
    }

    /// Turns boost of a VM on, or off: [`Self::poll_want`] says when it is to be boosted.
    pub fn set_boost(&mut self, port: PortId, on: bool) {
        if let Some(p) = self.port_mut(port).filter(|p| p.config.is_guest())
            && on != p.vm.wanting.is_some()
        {
            p.vm.wanting = on.then(Box::default);
        }
    }

    /// The reason why the VM of `port` wants its core, at the end of a turn (BST-01); `None`
    /// without boost.
    #[must_use]
    pub fn poll_want(&mut self, now: Instant, port: PortId) -> Option<Want> {
        let port = self.ports.get_mut(usize::from(port.0))?.as_mut()?;
        let has_seen_all = port.vm.clock.has_seen_all();
        let owed = |id| self.flows.get(id)?.owed_bytes();
        let want = port.vm.wanting.as_mut()?.poll(now, has_seen_all, owed)?;
        // A VMM may empty the queue of a tap in the name of a guest that has not run.
        (port.wire.is_none() || want.claim != Claim::Turn).then_some(want)
    }

    fn wanting_mut(&mut self, port: PortId) -> Option<&mut Wanting> {
        self.port_mut(port)?.vm.wanting.as_deref_mut()
    }

    /// Turns ack offload of a VM on for new connections, and for those that drain and have not left
    /// the path yet; or off (its flows drain, then pass).
    pub fn set_offload(&mut self, now: Instant, port: PortId, on: bool) {
        let Some(p) = self.port_mut(port).filter(|p| p.config.is_guest()) else { return };
        p.vm.offload = on;
        if on {
            p.vm.draining = false;
            self.walks.forget(Some(port), |deed| deed == Deed::Drain);
            self.walk(now, Deed::Early, port);
        } else {
            self.walk(now, Deed::Drain, port);
        }
    }

    /// From now on the VM's flows acknowledge late (LIFE-12), or early again. They stay in the
    /// path.
    pub fn set_late(&mut self, now: Instant, port: PortId, late: bool) {
        let Some(p) = self.port_mut(port) else { return };
        p.vm.acknowledges_late = late;
        let (deed, other) =
            if late { (Deed::Late, Deed::Early) } else { (Deed::Early, Deed::Late) };
        self.walks.forget(Some(port), |it| it == other);
        self.walk(now, deed, port);
    }

    /// Turns congestion offload of a VM on: H sends for its flows from their next data on. Or off:
    /// a flow is handed back once R has acknowledged all bytes that H has of it.
    pub fn set_congestion_offload(&mut self, port: PortId, on: bool) {
        if let Some(p) = self.port_mut(port).filter(|p| p.config.is_guest()) {
            p.vm.set_congestion_offload(on);
        }
    }

    /// Whether H controls congestion for the guest of `port`, so that the guest may flood; its
    /// heartbeat says so (FLOOD-28).
    #[must_use]
    pub fn controls_congestion(&self, now: Instant, port: PortId) -> bool {
        self.vm(port).is_some_and(|vm| vm.controls_congestion(now))
    }

    /// Whether ordinary segments take the predicted path, as they do from the start. It changes
    /// only the cost of a packet.
    #[cfg(test)]
    pub(crate) fn set_prediction(&mut self, on: bool) {
        self.common.predicts = on;
    }

    /// Makes no new promises for this VM until [`Self::set_offload`]; see [`Self::is_drained`].
    pub fn drain(&mut self, now: Instant, port: PortId) {
        if let Some(p) = self.port_mut(port) {
            p.vm.draining = true;
            self.walk(now, Deed::Drain, port);
        }
    }

    /// Whether no flow of this VM owes a byte, FIN or RST. It is false until a drain, or late ACKs,
    /// have reached all of them, because the others still make promises.
    #[must_use]
    pub fn is_drained(&self, port: PortId) -> bool {
        let owes = self.port(port).is_some_and(|p| p.vm.owing_flows > 0);
        let is_under_way = |deed| self.walks.any_of(deed, Some(port));
        !owes && !is_under_way(Deed::Drain) && !is_under_way(Deed::Late)
    }

    /// All tracked flows, in slot order.
    pub fn flows(&self) -> impl Iterator<Item = (FlowId, &FlowKey, &Flow)> {
        self.flows.iter()
    }

    /// How many places for flows there are so far, taken or free: [`Self::flow`] knows those below.
    #[must_use]
    pub fn flow_places(&self) -> usize {
        self.flows.slots()
    }

    /// How many flows are tracked.
    #[must_use]
    pub fn flows_len(&self) -> u32 {
        self.flows.len()
    }

    /// The flow with this key, if it is tracked.
    #[must_use]
    pub fn find_flow(&self, key: &FlowKey) -> Option<&Flow> {
        self.flows.peek(key)
    }

    /// One flow, by the number the CLI shows ([`FlowId::index`]).
    #[must_use]
    pub fn flow(&self, index: usize) -> Option<(FlowId, &FlowKey, &Flow)> {
        self.flows.at(index)
    }

    /// MACs and their ports, a page of at most `most`: those of the network with this number, from
    /// 0 on, behind this key. `None`: there is no such network.
    #[must_use]
    pub fn mac_places(
        &self,
        now: Instant,
        from: (u16, Option<u64>),
        most: usize,
    ) -> Option<Vec<MacPlace>> {
        self.networks.places(now, from, most)
    }

    /// The last MAC that a frame of the guest claimed and may not have
    /// ([`DropReason::SpoofedMac`]).
    #[must_use]
    pub fn spoofed_mac(&self, port: PortId) -> Option<Mac> {
        self.port(port)?.spoofed
    }

    /// Frames dropped on `port`, indexed by [`DropReason`].
    #[must_use]
    pub fn drops(&self, port: PortId) -> Option<&[u64; DropReason::ALL.len()]> {
        self.port(port).map(|p| &p.drops)
    }

    /// Counts a drop that the caller decided (ring full, port down).
    pub fn count_drop(&mut self, port: PortId, reason: DropReason) {
        if let Some(p) = self.port_mut(port) {
            p.drops[reason as usize] += 1;
        }
    }

    /// Where the bytes are that were acknowledged ahead of a guest.
    #[must_use]
    pub fn arena(&self) -> &Arena<'m> {
        &self.common.arena
    }

    /// The VM of `port`: budget, reservation, counters, whether offload is on.
    #[must_use]
    pub fn vm(&self, port: PortId) -> Option<&Vm> {
        self.port(port).filter(|p| p.config.is_guest()).map(|p| &p.vm)
    }

    /// The configuration `port` was added with.
    #[must_use]
    pub fn port_config(&self, port: PortId) -> Option<&PortConfig> {
        self.port(port).map(|p| &p.config)
    }

    fn port(&self, port: PortId) -> Option<&Port> {
        self.ports.get(usize::from(port.0))?.as_ref()
    }

    fn port_mut(&mut self, port: PortId) -> Option<&mut Port> {
        self.ports.get_mut(usize::from(port.0))?.as_mut()
    }

    fn for_each(&mut self, port: PortId, class: Class, mut f: impl FnMut(&mut Self, FlowId)) {
        // A copy, because an event may take the flow out of its ring.
        let ids: Vec<FlowId> = self.flows.of_class(port.0, class).collect();
        for id in ids {
            f(self, id);
        }
    }

    /// Runs `f` on a flow and then the end of every event: timers, delivery list, commit.
    fn with_flow<R>(
        &mut self,
        now: Instant,
        id: FlowId,
        f: impl FnOnce(&mut Flow, &mut FlowContext<'_, 'm>) -> R,
    ) -> Option<R> {
        let (flow, mut cx) = self.flow_and_context(now, id)?;
        let was_live = flow.is_live();
        let result = f(flow, &mut cx);
        flow.after_event(&mut cx);
        let class = flow.class_if_new(was_live);
        let wake_at = flow.wake_at(&cx);
        self.end_event(id, wake_at, class);
        Some(result)
    }

    /// As [`Self::with_flow`] for a frame. The flow ends that event itself, because it knows what
    /// an ordinary segment leaves unchanged.
    fn with_frame(
        &mut self,
        now: Instant,
        id: FlowId,
        f: impl FnOnce(&mut Flow, &mut FlowContext<'_, 'm>) -> Ended,
    ) -> Option<Fate> {
        let (flow, mut cx) = self.flow_and_context(now, id)?;
        let was_live = flow.is_live();
        let ended = f(flow, &mut cx);
        let class = flow.class_if_new(was_live);
        self.end_event(id, ended.wake_at, class);
        Some(ended.fate)
    }

    /// Updates wheel and table when an event on a flow has ended.
    #[inline(always)]
    fn end_event(&mut self, id: FlowId, wake_at: Instant, class: Option<Class>) {
        if wake_at < Instant::MAX {
            self.timers.schedule(id, wake_at);
        }
        if let Some(class) = class {
            self.flows.set_class(id, class);
        }
    }

    /// A flow, and the other state that it may touch.
    #[inline(always)]
    fn flow_and_context(
        &mut self,
        now: Instant,
        id: FlowId,
    ) -> Option<(&mut Flow, FlowContext<'_, 'm>)> {
        let (key, flow) = self.flows.entry_mut(id)?;
        let cx = context(now, id, key, &mut self.ports, &mut self.common)?;
        Some((flow, cx))
    }

    /// Removes the entry and everything it holds. The caller knows that it owes nothing, or that
    /// nobody is left to owe it to.
    fn remove_flow(&mut self, id: FlowId) {
        self.timers.cancel(id);
        self.common.out.departures.cancel(id);
        self.common.ack_moments.forget(id);
        if let Some((key, flow)) = self.flows.remove(id) {
            let port = self.ports[usize::from(key.port)].as_mut();
            flow.dispose(&key, &mut self.common.arena, port.map(|port| &mut port.vm));
        }
    }

    /// A new entry, if need be in the place of another (LIFE-02).
    fn insert_flow(&mut self, key: FlowKey, flow: Flow) -> Option<FlowId> {
        if let Some(victim) = self.victim(key.port) {
            self.note_forgotten(victim, |f| f.is_live() || f.state() == State::Handshake);
            self.remove_flow(victim);
        }
        self.flows.insert(key, flow.class(), flow).ok()
    }

    /// The entry that makes room for a new handshake, if one must. Incomplete handshakes have a
    /// quota and replace each other within it, so a flood replaces its own entries (LIFE-01).
    fn victim(&mut self, port: u16) -> Option<FlowId> {
        let flows_max = self.port(PortId(port))?.config.as_guest()?.flows_max;
        let unproven = self.flows.len_of_class(port, Class::Unproven);
        let oldest = |engine: &Self, class| engine.flows.of_class(port, class).next();
        if unproven >= limits::handshakes_max(flows_max) {
            return oldest(self, Class::Unproven);
        }
        if self.flows.has_room(port) {
            return None;
        }
        let parked = |f: &Flow| f.state() == State::On && f.is_parked() && f.quiescent();
        oldest(self, Class::Spent)
            .or_else(|| self.flows.find_unused(port, Class::Live, limits::VICTIM_STEPS_MAX, parked))
            .or_else(|| oldest(self, Class::Unproven))
    }
}

/// The state that a flow may touch besides its own.
#[inline(always)]
fn context<'a, 'm>(
    now: Instant,
    id: FlowId,
    key: &'a FlowKey,
    ports: &'a mut [Option<Port>],
    common: &'a mut Common<'m>,
) -> Option<FlowContext<'a, 'm>> {
    let port = ports.get_mut(usize::from(key.port))?.as_mut()?;
    let is_here = port.vm.presence == Presence::Here;
    Some(FlowContext {
        now,
        id,
        key,
        arena: &mut common.arena,
        vm: &mut port.vm,
        features: &port.features,
        out: &mut common.out,
        ack_list: &mut common.ack_list,
        ack_moments: &mut common.ack_moments,
        ready_ports: &mut common.ready_ports,
        predicts: common.predicts && is_here,
    })
}

#[cfg(test)]
mod tests;
