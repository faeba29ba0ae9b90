//! The data path: the engine, its turns and its ports. The executor works on it between turns.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::num::NonZeroU64;
use std::sync::Arc;

use nightporter_core::engine::{AddPortError, Direction, Engine};
use nightporter_core::limits::T_OPENING;
use nightporter_core::port::{PortConfig, PortFeatures, PortId};
use nightporter_core::time::{Duration, Instant};
use nightporter_core::turn::{Turn, TurnConfig};
use nightporter_registry::Listeners;
use nix::sys::epoll::Epoll;

use super::attached::AttachedTaps;
use super::guests::Announcement;
use super::heartbeats::Heartbeats;
use super::leaving::Leaving;
use super::ports::WorkerPorts;
use super::sockets::Sockets;
use super::unshared::Unshared;
use crate::booster::Booster;
use crate::closer;
use crate::config::{VmConfig, accept};
use crate::port::Port;
use crate::random::{no_chance, random};
use crate::resting::Resting;
use crate::supervisor::Supervisor;
use crate::token::{Token, watch_for};

/// How often queues without notifications are polled. A thousand times a second costs a worker
/// without other work one or two in a hundred of its core.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// 10^6 bits.
const BYTES_PER_MBIT: u64 = 125_000;

/// See the module doc.
#[derive(Debug)]
pub(super) struct DataPath {
    pub(super) engine: Engine<'static>,
    pub(super) turn: Turn,
    pub(super) ports: WorkerPorts,
    pub(super) heartbeats: Heartbeats,
    pub(super) attached: AttachedTaps,
    /// Orders to the booster.
    pub(super) booster: Booster,
    /// The sockets' worker.
    pub(super) sockets: Sockets,
    /// Of VMs: sockets that take no connections, and connections that are not read, for now.
    pub(super) resting: Resting<Token>,
    /// Devices with queues without notifications.
    pub(super) polled: Resting<Token>,
    /// Sockets and connections of VMs with waiting messages; the first one is handled first.
    pub(super) front_ends: VecDeque<Token>,
    /// Announcements of VMMs for VMs in several VLANs that were not told in all of them yet.
    pub(super) announcements: VecDeque<Announcement>,
    /// VMs whose VMMs stop their rings, because they migrate.
    pub(super) leaving: Vec<Leaving>,
    /// Guests that have posted no buffer yet.
    pub(super) unshared: Unshared,
    /// `faults::count` when ports were last looked at for it.
    pub(super) faults_seen: u64,
    /// The ports of open overlays, by the numbers of these.
    pub(super) overlays: BTreeMap<u32, PortId>,
    /// The links of VMs that have changed since control was told, and their listeners.
    pub(super) links: BTreeMap<String, (bool, Option<Listeners>)>,
    /// It keeps the connections of VMMs for the next daemon.
    pub(super) supervisor: Option<Arc<Supervisor>>,
}

impl DataPath {
    /// Without ports.
    pub(super) fn new(now: Instant, engine: Engine<'static>, epoch: NonZeroU64) -> Self {
        Self {
            engine,
            turn: Turn::new(TurnConfig::default()),
            ports: WorkerPorts::new(now),
            heartbeats: Heartbeats::new(epoch),
            attached: AttachedTaps::default(),
            booster: Booster::default(),
            sockets: Sockets::default(),
            resting: Resting::new(),
            polled: Resting::for_at_most(POLL_INTERVAL),
            front_ends: VecDeque::new(),
            announcements: VecDeque::new(),
            leaving: vec![],
            unshared: Unshared::default(),
            faults_seen: 0,
            overlays: BTreeMap::new(),
            links: BTreeMap::new(),
            supervisor: None,
        }
    }

    /// Adds a port; its number. Errors: see [`AddPortError`].
    pub(super) fn add_port(
        &mut self,
        now: Instant,
        epoll: &Epoll,
        mut port: Port,
        config: PortConfig,
    ) -> Result<PortId, AddPortError> {
        let name = config.name.clone();
        if let (Port::Guest(guest), Some(supervisor)) = (&mut port, &self.supervisor) {
            guest.port.keep_with(supervisor);
        }
        let id = self.turn.add_port(now, &mut self.engine, config)?;
        if let Port::Guest(guest) = &port {
            guest.port.writes_aside();
        }
        self.ports.add(id, name, port);
        if self.watch_uplink(epoll, id).is_err() {
            self.remove_port(now, epoll, id);
            return Err(AddPortError::TooManyPorts);
        }
        if self.ports.of(id).port.uplink_fd().is_some() {
            // The kernel's half of a tap takes everything, and an overlay cuts long segments.
            self.turn.set_features(now, &mut self.engine, id, Some(PortFeatures::ALL));
        }
        if matches!(self.ports.of(id).port, Port::Overlay(_)) {
            self.look_for_overlays();
        }
        self.heartbeats.handle_change_of(id);
        self.handle_guest_events(now, epoll, id);
        Ok(id)
    }

    /// Frames of an uplink or overlay wake us from now on.
    fn watch_uplink(&self, epoll: &Epoll, id: PortId) -> io::Result<()> {
        let port = &self.ports.of(id).port;
        if let Some(fd) = port.uplink_fd() {
            watch_for(epoll, &fd, Token::Uplink(id.0))?;
        }
        if let Port::Overlay(overlay) = port {
            watch_for(epoll, &overlay.bell(), Token::Uplink(id.0))?;
        }
        Ok(())
    }

    /// A VM is about to be removed: hangs up, and begins to end its connections. `true`: they are
    /// many, and not all of them have ended.
    pub(super) fn prepare_removal(&mut self, now: Instant, epoll: &Epoll, id: PortId) -> bool {
        if self.engine.is_ending(id) {
            return true;
        }
        if let Some(guest) = self.ports.guest_mut(id) {
            guest.port.close();
        }
        self.handle_guest_events(now, epoll, id);
        self.engine.prepare_removal(id);
        self.engine.is_ending(id)
    }

    /// The port goes for good. Everything that knows it by its number is told here, so that the
    /// next port may have the number; the executor handles its watchers.
    pub(super) fn remove_port(&mut self, now: Instant, epoll: &Epoll, id: PortId) {
        self.sockets.remove(id);
        if let Some(guest) = self.ports.guest_mut(id) {
            guest.port.close();
        }
        self.handle_guest_events(now, epoll, id);
        self.turn.remove_port(now, &mut self.engine, id);
        self.ports.now = now;
        let told = self.turn.transmit(now, &mut self.engine, &mut self.ports);
        told.expect("nothing interrupts a turn here"); // remotes of its connections hear of it now
        let port = self.ports.remove(id);
        if let Some(fd) = port.uplink_fd() {
            let _ = epoll.delete(fd);
        }
        if let Port::Overlay(overlay) = &port {
            let _ = epoll.delete(overlay.bell());
            self.look_for_overlays();
        }
        self.set_own_ips(id, 0, &[]);
        if port.index().is_some() {
            closer::later(None, port); // an interface that goes with it takes its time
        }
        self.forget_sources(|token| matches!(token, Token::Guest(port, _) if *port == id.0));
        self.announcements.retain(|it| it.port != id);
        self.leaving.retain(|it| it.port != id);
        self.unshared.on_link(self.ports.now, id, false);
        self.heartbeats.forget(id);
        self.booster.forget(id);
    }

    /// Sources that are no more.
    pub(super) fn forget_sources(&mut self, are: impl Fn(&Token) -> bool) {
        self.resting.forget(&are);
        self.polled.forget(&are);
        self.front_ends.retain(|token| !are(token));
    }

    /// One turn; how many frames it moved.
    pub(super) fn turn(&mut self, now: Instant) -> u64 {
        self.ports.now = now;
        let frames = self.turn.run(now, &mut self.engine, &mut self.ports);
        frames.expect("nothing interrupts a turn here")
    }

    /// Tells guests whether this host controls their congestion, when it is time.
    pub(super) fn send_heartbeats(&mut self, now: Instant) {
        let Self { engine, turn, ports, heartbeats, .. } = self;
        if heartbeats.poll_timeout().is_some_and(|at| at <= now) {
            ports.now = now;
            let all = || ports.iter().map(|(id, _)| id).collect();
            let looked_at = heartbeats.look_at(now).unwrap_or_else(all).into_iter();
            let vms = looked_at.filter_map(|id| Some((id, engine.vm(id)?)));
            let vms = vms.map(|(id, vm)| (id, vm.congestion_offload, vm.controls_congestion(now)));
            let beats = heartbeats.beat(now, vms);
            turn.send_heartbeats(now, engine, ports, &beats);
        }
    }

    /// A VM's rate limit in Mbit/s; `None` is none.
    pub(super) fn rate_limit_mbit_s(&self, port: PortId, way: Direction) -> Option<u32> {
        let limit = self.engine.rate_limit(port, way)? / BYTES_PER_MBIT;
        Some(u32::try_from(limit).unwrap_or(u32::MAX))
    }

    /// Another rate limit for a VM.
    pub(super) fn set_rate_limit(&mut self, port: PortId, way: Direction, mbit_s: Option<u32>) {
        let bytes_per_s = mbit_s.map(|rate| u64::from(rate) * BYTES_PER_MBIT);
        self.engine.set_rate_limit(port, way, bytes_per_s);
        self.sockets.set_rate_limit(port, way, self.engine.shared_rate(port, way));
    }

    /// Both rate limits of a VM, its boost and its accept offload, as its configuration has them.
    pub(super) fn set_limits(&mut self, now: Instant, port: PortId, vm: &VmConfig) {
        self.set_accept_offload(now, port, vm);
        self.set_rate_limit(port, Direction::FromGuest, vm.rate_limit_from_guest_mbit_s);
        self.set_rate_limit(port, Direction::ToGuest, vm.rate_limit_to_guest_mbit_s);
        self.booster.set_vm(&mut self.engine, port, vm);
        let attached = self.ports.of_mut(port).port.as_attached_mut();
        self.booster.set_tap(port, attached.map(|it| it.tap()));
    }

    /// The guest may have SYNs that the daemon did not see, and answers their copies: the host
    /// answers none before their senders have given up.
    fn set_accept_offload(&mut self, now: Instant, port: PortId, vm: &VmConfig) {
        let wanted = accept::of_vm(vm, now + T_OPENING).and_then(|config| {
            let keys = random().and_then(|a| Ok((a, random()?)));
            let keys = keys.inspect_err(|e| tracing::error!("{}: accept offload", no_chance(e)));
            keys.ok().map(|([a, b, c, d], [e, f, ..])| (config, [a, b, c, d, e, f]))
        });
        self.engine.set_accept_offload(port, wanted);
    }

    /// The interface behind an uplink is gone.
    pub(super) fn lose(&mut self, now: Instant, epoll: &Epoll, port: PortId) {
        self.ports.lose(port);
        self.turn.set_features(now, &mut self.engine, port, None);
        self.lose_attached(now, epoll, port);
    }

    /// An uplink or overlay that was not there is.
    pub(super) fn regain(&mut self, now: Instant, epoll: &Epoll, id: PortId, port: Port) {
        let lost = std::mem::replace(&mut self.ports.of_mut(id).port, port);
        if let Err(error) = self.watch_uplink(epoll, id) {
            let at = self.ports.of_mut(id);
            tracing::error!(port = %at.name, %error, "cannot wait for frames of the port");
            let index = if let Port::Uplink(tap) = &at.port { tap.index() } else { 0 };
            let name = at.name.clone();
            closer::later(None, std::mem::replace(&mut at.port, lost)); // see `remove_port`
            self.ports.lost.push((name, index)); // so that control tries again
            return;
        }
        let at = self.ports.of_mut(id);
        tracing::info!(port = %at.name, "the port is there again");
        self.look_for_overlays();
        self.turn.set_features(now, &mut self.engine, id, Some(PortFeatures::ALL));
        if let Err(error) = self.settle_attached(now, epoll, id) {
            tracing::error!(error, "the other end of an attached tap");
        }
    }

    /// No VM gets new promises.
    pub(super) fn drain_all(&mut self, now: Instant) {
        self.engine.drain_all(now);
        self.heartbeats.handle_change();
    }

    /// Connections that the host has accepted and not forgotten.
    pub(super) fn translated(&self) -> u32 {
        let vms = self.ports.iter().filter_map(|(port, _)| self.engine.vm(port));
        vms.map(|vm| vm.translated_flows).sum()
    }

    /// Connections with a byte, FIN or RST that is still owed.
    pub(super) fn owed(&self) -> u32 {
        let vms = self.ports.iter().filter_map(|(port, _)| self.engine.vm(port));
        vms.map(|vm| vm.owing_flows).sum()
    }
}
