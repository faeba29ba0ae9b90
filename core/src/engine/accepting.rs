//! SYNs that H answers, and what comes before there is a flow (ACC-01, ACC-03, ACC-10 to ACC-16).
//! `tcp::accept` has the parts, `tcp::translated` the flow.

use crate::drops::DropReason;
use crate::engine::{Engine, Verdict};
use crate::flow::key::FlowKey;
use crate::flow::table::{FlowId, HashedKey};
use crate::limits::{FLOWS_PER_TRANSLATED, T_ACCEPT_ALIVE};
use crate::port::{Local, PortId};
use crate::tcp::accept::grant::{Grant, Lower, Offered};
use crate::tcp::accept::half_open::{Asked, Entry, Reply};
use crate::tcp::accept::{AcceptConfig, Accepting, server};
use crate::tcp::flow::Flow;
use crate::tcp::options::SynInfo;
use crate::tcp::vm::Presence;
use crate::tcp::{Fate, Frame};
use crate::time::Instant;
use crate::wire::emit::TcpEmit;
use crate::wire::packet::{Packet, Seq, TcpFlags};
use crate::wire::virtio_net::VirtioNetHdr;

impl Engine<'_> {
    /// Turns accept offload of a VM on, or off for new connections: those that H has accepted stay.
    /// `keys` must be unpredictable, and used for nothing else. If it is on already, H keeps its
    /// keys and its knowledge, of all ports, and goes on to answer. A VM on a wire has none,
    /// because a plain wire could not translate.
    pub fn set_accept_offload(&mut self, port: PortId, wanted: Option<(AcceptConfig, [u64; 6])>) {
        let Some(p) = self.port_mut(port).filter(|p| p.config.is_guest()) else { return };
        let is_wire = p.wire.is_some();
        let wanted = wanted.filter(|_| !is_wire);
        if let (Some(before), Some((config, _))) = (&mut p.vm.accepting, &wanted) {
            let begins_at = config.begins_at.min(before.config.begins_at);
            before.config = AcceptConfig { begins_at, ..config.clone() };
            return;
        }
        let new = wanted.map(|(config, keys)| Box::new(Accepting::new(config, keys)));
        let before = std::mem::replace(&mut p.vm.accepting, new);
        self.common.half_open -= before.map_or(0, |it| it.half_open.len());
    }

    /// R's SYN; `is_known`: there is an entry of that name. `true`: H has answered it.
    #[inline]
    pub(super) fn answer_syn(
        &mut self,
        now: Instant,
        port: PortId,
        key: &FlowKey,
        is_known: bool,
        f: &Frame<'_>,
    ) -> bool {
        if self.vm(port).is_none_or(|vm| vm.accepting.is_none()) {
            return false;
        }
        let answered = !is_known && self.answer_for_guest(now, port, key, f).is_some();
        if !answered
            && let Some(accepting) = self.port_mut(port).and_then(|p| p.vm.accepting.as_mut())
        {
            accepting.passed.on_passed(now, key);
        }
        answered
    }

    #[cold]
    fn answer_for_guest(
        &mut self,
        now: Instant,
        port: PortId,
        key: &FlowKey,
        f: &Frame<'_>,
    ) -> Option<()> {
        match self.reply(port, key, f)? {
            Reply::Again(entry) => {
                self.send_syn_ack(&entry);
                return Some(());
            }
            Reply::Nothing => return Some(()),
            _ => {}
        }
        if !self.may_accept(now, port, key) {
            return None;
        }
        let vm = &mut self.port_mut(port)?.vm;
        let accepting = vm.accepting.as_mut()?;
        let (server, from) = (server(key), &accepting.config.from);
        let half_open = accepting.half_open.of_server(server);
        let answer = accepting
            .learned
            .may_answer(now, server, key.r_addr, f.eth.src, from, half_open)
            .ok()?;
        let beginning = accepting.isn.beginning(now, key);
        let grant = Grant::of(now, f.ip, f.tcp, &answer.offered, beginning)?;
        let entry = Entry { key: *key, grant, l2: answer.l2, asked: Asked::of(f.tcp) };
        if !self.remember(now, port, entry) {
            return None;
        }
        if let Some(wanting) = self.wanting_mut(port) {
            wanting.on_syn(now, key.g_port);
        }
        self.send_syn_ack(&entry);
        Some(())
    }

    /// Everything that H has to know of a VM, but for its sources (ACC-01, ACC-08, ACC-10).
    fn may_accept(&mut self, now: Instant, port: PortId, key: &FlowKey) -> bool {
        if !self.is_own_ip(port, key.g_addr)
            || !self.flows.has_room(port.0)
            || self.common.arena.free_records() == 0
        {
            return false;
        }
        let Some(p) = self.port_mut(port) else { return false };
        let flows_max = p.config.as_guest().map_or(0, |guest| guest.flows_max);
        let (has_driver, vm) = (p.features.is_some(), &mut p.vm);
        let Some(accepting) = &mut vm.accepting else { return false };
        let half_open = u32::try_from(accepting.half_open.len()).unwrap_or(u32::MAX);
        let takes =
            vm.translated_flows.saturating_add(half_open) < flows_max / FLOWS_PER_TRANSLATED;
        let has_place = accepting.has_port(key.g_port)
            && now >= accepting.config.begins_at
            && accepting.has_room(vm.budget_pages, accepting.half_open.len())
            && !accepting.passed.has(now, key);
        let promises = vm.offload && !vm.draining && !vm.acknowledges_late;
        has_driver
            && takes
            && has_place
            && promises
            && vm.sends_after.is_none() // it does not migrate
            && vm.presence == Presence::Here
            && vm.local != Local::Never
            && vm.clock.alive_within(now, T_ACCEPT_ALIVE)
            && !vm.refuses(now, key.r_addr, key.g_port)
            && !vm.servers.is_far(now, (key.g_addr, key.g_port))
    }

    /// H has answered this SYN. `false`: there is no place for it.
    fn remember(&mut self, now: Instant, port: PortId, entry: Entry) -> bool {
        let Some(accepting) = self.port_mut(port).and_then(|p| p.vm.accepting.as_mut()) else {
            return false;
        };
        let before = accepting.half_open.len();
        let remembered = accepting.half_open.on_answered(now, entry);
        let (after, due) = (accepting.half_open.len(), accepting.half_open.due_at());
        self.common.half_open = self.common.half_open + after - before;
        self.half_open_due = self.half_open_due.min(due);
        remembered
    }

    /// The meaning of a segment of R for a SYN that H has answered. `None`: the VM has no accept
    /// offload.
    fn reply(&mut self, port: PortId, key: &FlowKey, f: &Frame<'_>) -> Option<Reply> {
        self.forget_all_half_open(port);
        let accepting = self.port_mut(port)?.vm.accepting.as_mut()?;
        let before = accepting.half_open.len();
        let reply = accepting.half_open.on_segment_from_net(key, f.tcp);
        self.common.half_open -= before - accepting.half_open.len();
        Some(reply)
    }

    /// If the guest may be elsewhere nobody speaks in its name (LIFE-07, LIFE-16), and for a VM
    /// that drains nothing more is promised. Its remotes learn that by the answers to their third
    /// ACKs.
    fn forget_all_half_open(&mut self, port: PortId) {
        let Some(p) = self.port_mut(port) else { return };
        let is_here = p.vm.presence == Presence::Here && !p.vm.migrates() && !p.vm.draining;
        if let Some(accepting) = p.vm.accepting.as_mut()
            && !(is_here && p.features.is_some())
        {
            let gone = accepting.half_open.len();
            accepting.half_open.clear();
            self.common.half_open -= gone;
        }
    }

    fn send_syn_ack(&mut self, entry: &Entry) {
        let (key, made) = (&entry.key, self.common.out.push());
        made.origin = PortId(key.port);
        let base = TcpEmit {
            l2: entry.l2.bytes(),
            version: key.version,
            src: key.g_addr,
            dst: key.r_addr,
            tos: 0,
            ttl: 0,
            flow_label: 0,
            src_port: key.g_port,
            dst_port: key.r_port,
            seq: Seq(0),
            ack: Seq(0),
            flags: TcpFlags::NONE,
            window: 0,
            timestamps: None,
            sack: &[],
            ip_id: 0,
        };
        made.len = entry.grant.syn_ack(base).emit(&mut made.bytes);
    }

    /// The SYN-ACKs that are due to be repeated, and entries whose time is over.
    #[cold]
    pub(super) fn repeat_syn_acks(&mut self, now: Instant) {
        self.half_open_due = Instant::MAX;
        for place in 0..self.ports.len() {
            self.forget_all_half_open(PortId(u16::try_from(place).unwrap_or(u16::MAX)));
            while let Some(entry) = self.poll_syn_ack(now, place) {
                self.send_syn_ack(&entry);
            }
        }
    }

    fn poll_syn_ack(&mut self, now: Instant, place: usize) -> Option<Entry> {
        let half_open = &mut self.ports[place].as_mut()?.vm.accepting.as_mut()?.half_open;
        let before = half_open.len();
        let due = half_open.poll_due(now);
        self.common.half_open -= before - half_open.len();
        if due.is_none() {
            self.half_open_due = self.half_open_due.min(half_open.due_at());
        }
        due
    }

    /// A segment of R, of which no flow knows, on its way to `out`: it may complete a handshake.
    #[cold]
    pub(super) fn process_toward_half_open(
        &mut self,
        now: Instant,
        out: PortId,
        key: &HashedKey,
        hdr: &VirtioNetHdr,
        frame: &mut [u8],
    ) -> Result<Verdict, DropReason> {
        if !self.has_half_open(&key.key) {
            return Ok(Verdict::Forward(out));
        }
        let packet = Packet::parse(frame)?;
        let Some((ip, tcp)) = packet.tcp() else { return Ok(Verdict::Forward(out)) };
        let mut f = Frame { bytes: frame, hdr, eth: &packet.eth, ip, tcp };
        match self.process_half_open(now, &key.key, &mut f) {
            Fate::Pass => Ok(Verdict::Forward(out)),
            Fate::Absorbed => Ok(Verdict::Absorbed),
            Fate::Drop(reason) => Err(reason),
        }
    }

    /// The same, parsed.
    #[cold]
    pub(super) fn process_half_open(
        &mut self,
        now: Instant,
        key: &FlowKey,
        f: &mut Frame<'_>,
    ) -> Fate {
        let port = PortId(key.port);
        if !self.has_half_open(key) || !f.checksum_ok() {
            return Fate::Pass;
        }
        match self.reply(port, key, f) {
            None | Some(Reply::ForGuest) => Fate::Pass,
            Some(Reply::Completes(entry)) => self.accept(now, &entry, f),
            Some(Reply::Again(entry)) => {
                self.send_syn_ack(&entry);
                Fate::Absorbed
            }
            Some(Reply::Resets) => Fate::Absorbed,
            Some(Reply::Nothing) => Fate::Drop(DropReason::OutOfWindow),
        }
    }

    fn has_half_open(&self, key: &FlowKey) -> bool {
        let accepting = self.vm(PortId(key.port)).and_then(|vm| vm.accepting.as_ref());
        accepting.is_some_and(|accepting| accepting.half_open.has(key))
    }

    /// R has completed the handshake. If there is no place for its connection now, R repeats its
    /// segment, as with a server whose accept queue is full.
    fn accept(&mut self, now: Instant, entry: &Entry, f: &mut Frame<'_>) -> Fate {
        let port = PortId(entry.key.port);
        let Some(id) = self.begin_accepted(now, port, entry, f) else {
            return Fate::Drop(DropReason::NoStore);
        };
        self.forget_half_open(port, &entry.key);
        self.process_from_net(now, id, f)
    }

    fn forget_half_open(&mut self, port: PortId, key: &FlowKey) {
        let Some(accepting) = self.port_mut(port).and_then(|p| p.vm.accepting.as_mut()) else {
            return;
        };
        let before = accepting.half_open.len();
        accepting.half_open.forget(key);
        self.common.half_open -= before - accepting.half_open.len();
    }

    fn begin_accepted(
        &mut self,
        now: Instant,
        port: PortId,
        entry: &Entry,
        f: &Frame<'_>,
    ) -> Option<FlowId> {
        let vm = self.vm(port)?;
        let accepting = vm.accepting.as_ref()?;
        let waits = accepting.has_room(vm.budget_pages, 0)
            && accepting.learned.has_place(now, server(&entry.key));
        if !waits || vm.presence != Presence::Here || vm.acknowledges_late || !vm.offload {
            return None;
        }
        let flow = Flow::accepted(now, vm.mtu, entry, f)?;
        let id = self.insert_flow(entry.key, flow)?;
        if self.with_flow(now, id, |flow, cx| flow.begin_opening(cx)) == Some(true) {
            return Some(id);
        }
        self.remove_flow(id);
        None
    }

    /// G sends a SYN-ACK, which is what H will offer there; or a SYN, and then nothing is owed to
    /// an R that has not completed its handshake (ACC-11).
    #[inline]
    pub(super) fn note_offer(&mut self, now: Instant, key: &FlowKey, syn: SynInfo, f: &Frame<'_>) {
        if self.vm(PortId(key.port)).is_some_and(|vm| vm.accepting.is_some()) {
            self.note_offer_of_guest(now, key, syn, f);
        }
    }

    #[cold]
    fn note_offer_of_guest(&mut self, now: Instant, key: &FlowKey, syn: SynInfo, f: &Frame<'_>) {
        let asked = self.syn_cache.only(key, |syn| syn.is_acknowledged_by(f.tcp.ack));
        let Some(p) = self.port_mut(PortId(key.port)) else { return };
        let Some(accepting) = &mut p.vm.accepting else { return };
        if f.tcp.flags.ack() {
            let offered = Offered { syn_ack: syn, window: f.tcp.window, lower: Lower::of(f.ip) };
            accepting.learned.on_syn_ack(now, server(key), offered, asked.as_ref());
            return;
        }
        self.forget_half_open(PortId(key.port), key);
    }
}
