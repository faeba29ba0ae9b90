//! The data path's work for attached taps: whether frames have passed plain, queues without a
//! notification, and detaching (`nightporter_attach`).

use std::net::{IpAddr, SocketAddr};

use nightporter_api::AttachedStatus;
use nightporter_attach::LINGER;
use nightporter_attach::area::{Marked, Plain, View};
use nightporter_core::flow::key::FlowKey;
use nightporter_core::port::{PortConfig, PortId};
use nightporter_core::tcp::{PASSED_MAX, Passed};
use nightporter_core::time::{Duration, Instant};
use nightporter_core::wire::packet::{IpAddr16, IpVersion};
use nix::sys::epoll::Epoll;

use super::back_off::BackOff;
use super::data_path::DataPath;
use super::log_restarted;
use crate::port::attached::{AttachedPort, net_name};
use crate::port::{Port, Wanted};
use crate::token::Token;
use crate::vhost::Source;

/// How long a tap that is detached waits for connections that owe, unless it is said.
const DETACH_MAX: Duration = Duration::from_secs(10);
/// Between two looks at a tap that is being detached.
pub(super) const DETACH_LOOK: Duration = Duration::from_millis(10);
/// Between two lines of the log about frames that passed plain.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Frames that have waited for the worker so long are dropped: their connections may have ended,
/// and others have begun with the same addresses.
const STALE: Duration = Duration::from_secs(1);
/// More than lie in one of the daemon's taps.
const WAITING_MAX: usize = 2000;

/// Attached taps.
#[derive(Debug, Default)]
pub(super) struct AttachedTaps {
    view: Option<View>,
    list: Vec<AttachedTap>,
    logged_at: Option<Instant>,
    /// The bits that were taken last, and when.
    marked: Option<(Instant, Marked)>,
    /// Those that were taken since a tap is plain because it backs off.
    marked_since: Option<Marked>,
    /// Ports of which frames may wait that are older than others that passed plain.
    catching_up: Vec<CatchingUp>,
}

/// An attached tap.
#[derive(Debug)]
pub(super) struct AttachedTap {
    id: PortId,
    /// The counts of plain frames when they were last looked at.
    seen: Plain,
    pub(super) back_off: BackOff,
}

/// Both ends of a wire are read until they are empty, or have given all that may have waited there.
#[derive(Debug)]
struct CatchingUp {
    id: PortId,
    /// Each end, and how many frames it will have given by then.
    ends: Vec<(PortId, u64)>,
}

impl AttachedTaps {
    /// Of those that back off.
    pub(super) fn backing_off(&self, now: Instant) -> Vec<PortId> {
        let is_one = |at: &&AttachedTap| at.back_off.plain_for(now).is_some();
        self.list.iter().filter(is_one).map(|at| at.id).collect()
    }

    pub(super) fn of_mut(&mut self, id: PortId) -> Option<&mut AttachedTap> {
        self.list.iter_mut().find(|at| at.id == id)
    }

    /// Frames that find one turned so long ago pass plain. `None`: no tap was ever attached.
    pub(super) fn limit(&self) -> Option<Duration> {
        self.view.map(|view| Duration::from_nanos(view.limit_ns()))
    }

    /// When something of one that backs off is due.
    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        self.list.iter().filter_map(|at| at.back_off.poll_timeout()).min()
    }

    /// The tap's status, with what is known of it here.
    pub(super) fn complete(
        &self,
        now: Instant,
        id: PortId,
        status: AttachedStatus,
    ) -> AttachedStatus {
        let Some(at) = self.list.iter().find(|at| at.id == id) else { return status };
        let plain_for_ms = at.back_off.plain_for(now).map(|it| it.as_millis());
        AttachedStatus { back_offs: at.back_off.times, plain_for_ms, ..status }
    }

    /// The bits of all ports. A frame's bit may have been taken with those before, and its count be
    /// seen only now; or long ago, if a tap `returns` that was plain.
    fn take_marked(&mut self, now: Instant, view: View, returns: bool) -> Marked {
        let taken = view.take_marked();
        let mut marked = taken.clone();
        if returns && let Some(before) = &self.marked_since {
            marked.add(before);
        }
        if !self.list.iter().any(|at| at.back_off.is_plain()) {
            self.marked_since = None;
        } else if let Some(before) = &mut self.marked_since {
            before.add(&taken);
        } else {
            self.marked_since = Some(taken.clone());
        }
        if let Some((at, before)) = self.marked.replace((now, taken))
            && now.since(at) < STALE
        {
            marked.add(&before);
        }
        marked
    }
}

/// How far a tap has been detached.
#[derive(Clone, Copy, Debug)]
pub(super) enum Detaching {
    /// Its connections leave the path; until then at most.
    Drains(Instant),
    /// Those that still owed were reset, which both sides are told in this turn.
    Tells,
    /// It is plain. Until then what is still under way is given back.
    GivesBack(Instant),
}

impl DataPath {
    /// A VM with a tap comes; its port may be open or not.
    pub(super) fn add_attached(
        &mut self,
        now: Instant,
        epoll: &Epoll,
        port: Port,
        config: PortConfig,
    ) -> Result<PortId, String> {
        let name = config.name.clone();
        let failed = |e| format!("{name}: {e:?}");
        let config = config.on_wire(net_name(&name));
        let id = self.add_port(now, epoll, port, config).map_err(failed)?;
        self.settle_attached(now, epoll, id)?;
        Ok(id)
    }

    /// Whether the VM with this name has a tap.
    pub(super) fn has_tap(&self, vm: &str) -> bool {
        let port = self.ports.find(vm).and_then(|id| self.engine.port_config(id));
        port.is_some_and(|port| port.wire && port.is_guest())
    }

    /// The other end of the wire comes with a tap that was attached, and is known from now on.
    pub(super) fn settle_attached(
        &mut self,
        now: Instant,
        epoll: &Epoll,
        id: PortId,
    ) -> Result<(), String> {
        self.forget_attached(now, epoll, id);
        let name = self.ports.of(id).name.clone();
        let Some(attached) = self.ports.of_mut(id).port.as_attached_mut() else { return Ok(()) };
        self.attached.view = Some(attached.view());
        let (seen, back_off) = (attached.plain(), BackOff::new(now));
        self.attached.list.push(AttachedTap { id, seen, back_off });
        self.booster.set_tap(id, Some(attached.tap()));
        let Some(end) = attached.take_end() else { return Ok(()) };
        let config = PortConfig::uplink(net_name(&name)).on_wire(net_name(&name));
        let added = self.add_port(now, epoll, Port::Uplink(end), config);
        added.map_err(|e| format!("{name}: {e:?}"))?;
        log_restarted(self.engine.handle_wire(now, id));
        Ok(())
    }

    /// A tap has gone, or is about to be attached anew: so does the other end of its wire.
    pub(super) fn forget_attached(&mut self, now: Instant, epoll: &Epoll, id: PortId) {
        self.attached.list.retain(|at| at.id != id);
        self.engine.set_late(now, id, false); // if it backed off
        self.attached.catching_up.retain(|it| it.id != id);
        self.engine.handle_caught_up(id); // nothing waits there any more
        let is_of = |token: &Token| *token == polled(id);
        self.polled.forget(is_of);
        if let Some(end) = self.ports.find(&net_name(&self.ports.of(id).name)) {
            self.remove_port(now, epoll, end);
        }
    }

    /// The VM's tap has gone: the VM has ended, or is restarted (LIFE-16).
    pub(super) fn lose_attached(&mut self, now: Instant, epoll: &Epoll, id: PortId) {
        if let Port::Lost(lost) = &self.ports.of(id).port
            && matches!(lost.wanted, Wanted::Attached(_))
        {
            let owing = self.engine.vm(id).map_or(0, |vm| vm.owing_flows);
            if owing > 0 {
                let vm = &self.ports.of(id).name;
                tracing::warn!(
                    vm,
                    owing,
                    "the tap has gone with connections that owe: there is no way to their \
                     remotes; one that sends when the tap is back is reset"
                );
            }
            self.engine.handle_guest_gone(now, id);
            self.forget_attached(now, epoll, id);
            self.booster.set_tap(id, None);
        }
    }

    /// The worker is awake. Nothing is acknowledged before it knows what has passed plain.
    pub(super) fn note_awake(&mut self, now: Instant) {
        let Some(view) = self.attached.view else { return };
        let turned_at = view.turned_at();
        view.wake();
        if turned_at > 0 && now.as_nanos().saturating_sub(turned_at) >= STALE.as_nanos() {
            self.discard_stale();
        }
        let returned = self.end_back_offs(now);
        // All counts first, and then the bits, which are of all ports: programs set a bit before
        // they count.
        let changed = self.passed_frames();
        if changed.is_empty() {
            return;
        }
        for (id, _) in &changed {
            self.catch_up(*id);
            if !returned.contains(id) {
                self.note_absence(now, *id);
            }
        }
        let Self { attached, ports, engine, .. } = self;
        let marked = attached.take_marked(now, view, !returned.is_empty());
        for (id, frames) in &changed {
            engine.handle_passed_plain(now, *id, |key| passed_of(key, frames, &marked));
            if attached.logged_at.is_none_or(|at| now.since(at) >= LOG_INTERVAL) {
                attached.logged_at = Some(now);
                let vm = &ports.of(*id).name;
                let (from_vm, to_vm) = (frames.from_vm, frames.from_net);
                tracing::warn!(
                    vm,
                    from_vm,
                    to_vm,
                    "frames passed the daemon by, because it was away: give the worker a core of \
                     its own (daemon.cpu) or a priority (daemon.rt_priority)"
                );
            }
        }
    }

    /// Frames that wait at the ends of this wire are older than others that have passed it.
    pub(super) fn catch_up(&mut self, id: PortId) {
        let net = self.ports.find(&net_name(&self.ports.of(id).name));
        let ends = [Some(id), net].into_iter().flatten().map(|end| {
            self.turn.wake(end);
            (end, self.turn.stats(end).frames_from_port + WAITING_MAX as u64)
        });
        let ends = ends.collect();
        self.attached.catching_up.retain(|it| it.id != id);
        self.attached.catching_up.push(CatchingUp { id, ends });
    }

    /// After a turn: ends that it has read to the end give newer frames from now on.
    pub(super) fn note_caught_up(&mut self) {
        let Self { attached, turn, engine, .. } = self;
        attached.catching_up.retain_mut(|it| {
            it.ends.retain(|(end, frames)| {
                turn.is_awake(*end) && turn.stats(*end).frames_from_port < *frames
            });
            let waits = !it.ends.is_empty();
            if !waits {
                engine.handle_caught_up(it.id);
            }
            waits
        });
    }

    /// The frames that have passed each port since it was last asked. One that backs off is asked
    /// when that is over.
    fn passed_frames(&mut self) -> Vec<(PortId, Plain)> {
        let Self { attached, ports, .. } = self;
        let turned = attached.list.iter_mut().filter(|at| !at.back_off.is_plain());
        let changed = turned.filter_map(|at| {
            let plain = ports.of_mut(at.id).port.as_attached_mut()?.plain();
            let frames = (plain != at.seen).then(|| plain.since(&at.seen))?;
            at.seen = plain;
            Some((at.id, frames))
        });
        changed.collect()
    }

    /// Frames have waited for too long: TCP repeats those that are still wanted.
    #[cold]
    fn discard_stale(&mut self) {
        let mut frames = 0;
        for &AttachedTap { id, .. } in &self.attached.list {
            let end = self.ports.find(&net_name(&self.ports.of(id).name));
            if let Some(attached) = self.ports.of_mut(id).port.as_attached_mut() {
                frames += attached.discard(WAITING_MAX);
            }
            if let Some(Port::Uplink(tap)) = end.map(|end| &mut self.ports.of_mut(end).port) {
                frames += tap.discard(WAITING_MAX);
            }
        }
        tracing::warn!(frames, "frames of attached taps had waited for a second, and are dropped");
    }

    /// The worker is about to sleep, and has left no frame.
    pub(super) fn note_rest(&self) {
        self.attached.view.iter().for_each(View::wake);
    }

    /// Ports with frames that wait for room are looked at again soon.
    pub(super) fn poll_attached(&mut self, now: Instant) {
        for &AttachedTap { id, .. } in &self.attached.list {
            let port = self.ports.of_mut(id).port.as_attached_mut();
            if port.is_some_and(|port| port.is_polled()) {
                self.polled.add(now, polled(id));
            }
        }
    }

    /// Goes on detaching a tap. `true`: nothing of it is under way any more. Nothing has to be done
    /// for a VM without a tap.
    pub(super) fn detach(
        &mut self,
        now: Instant,
        id: PortId,
        drain: Option<Duration>,
        at: &mut Option<Detaching>,
    ) -> bool {
        let Some(port) = self.ports.of_mut(id).port.as_attached_mut() else { return true };
        let linger = Duration::from_secs(LINGER.as_secs());
        match *at {
            None => {
                self.engine.drain(now, id);
                *at = Some(Detaching::Drains(now + drain.unwrap_or(DETACH_MAX)));
            }
            Some(Detaching::Drains(_)) if self.engine.is_drained(id) => {
                port.unlink();
                *at = Some(Detaching::GivesBack(now + linger));
            }
            Some(Detaching::Drains(until)) if now >= until => {
                self.engine.handle_detached(now, id);
                *at = Some(Detaching::Tells);
            }
            Some(Detaching::Drains(_)) => {}
            Some(Detaching::Tells) => {
                port.unlink();
                *at = Some(Detaching::GivesBack(now + linger));
            }
            Some(Detaching::GivesBack(until)) => return now >= until,
        }
        false
    }

    /// All taps are about to be plain: what is still owed is reset on both sides.
    pub(super) fn detach_all(&mut self, now: Instant) {
        for &AttachedTap { id, .. } in &self.attached.list {
            self.engine.handle_detached(now, id);
        }
    }

    /// All taps are plain: the daemon ends. Frames that were turned have been given back in the
    /// turn before. To end a link waits for the kernel's readers, so all frames pass before the
    /// first one ends.
    pub(super) fn unlink_all(&mut self) {
        let mut each = |act: fn(&mut AttachedPort)| {
            for &AttachedTap { id, .. } in &self.attached.list {
                self.ports.of_mut(id).port.as_attached_mut().into_iter().for_each(act);
            }
        };
        each(|port| port.set_plain(true));
        each(AttachedPort::unlink);
    }
}

/// The part of a connection that may be among these frames.
fn passed_of(key: &FlowKey, frames: &Plain, marked: &Marked) -> Passed {
    let end = |address: IpAddr16, port| {
        let ip: IpAddr = match key.version {
            IpVersion::V4 => address.v4_bytes().into(),
            IpVersion::V6 => address.0.into(),
        };
        SocketAddr::new(ip, port)
    };
    let ends = [end(key.g_addr, key.g_port), end(key.r_addr, key.r_port)];
    if frames.unread == 0 && !marked.has_segment(ends) {
        Passed::Nothing
    } else if frames.unread > 0 || marked.has_syn(ends) || frames.bytes >= PASSED_MAX {
        Passed::Anything
    } else {
        Passed::Segments
    }
}

/// A port whose room is looked at now and then.
fn polled(id: PortId) -> Token {
    Token::Guest(id.0, Source::Connection)
}
