//! One connection: its state, its timers, and its segments.

use nightporter_core::time::{Duration, Instant};

use super::super::ConnId;
use super::super::app::{Phase, Received, Socket, USER_TIMEOUT};
use super::super::emit::{Options, Route, Segment};
use super::super::neighbor::TooBig;
use super::Shared;
use super::incoming::{Incoming, wrap};
use super::ranges::Place;
use super::receive::Receiver;
use super::send::{Piece, StackSender};
use crate::plan::{Offloads, Quirks, StackPlan};
use nightporter_check::frame::Frame;
use nightporter_check::stream::Stream;
use nightporter_check::wire::{Ip, Tcp, TcpFlags};

/// How long an old connection answers for itself (`TCP_TIMEWAIT_LEN`).
const TIME_WAIT: Duration = Duration::from_secs(60);
/// No path is believed to be narrower (`min_pmtu`).
const MTU_MIN: u32 = 552;
/// Largest payload of a super-segment: the room in an IP packet of 65,535 bytes.
const SUPER_MAX: i64 = 65_535 - 40 - 60;

/// Bytes of the longest SACK option.
const SACK_LEN: Place = 36;

/// A byte in so many is urgent.
const URGENT_EVERY: Place = 1 << 18;

/// It has such a byte.
const fn is_urgent(piece: &Piece) -> bool {
    piece.from / URGENT_EVERY != piece.to / URGENT_EVERY
}

/// Behaviour of a connection that does not follow from the plan alone.
#[derive(Clone, Copy, Debug)]
pub(super) struct Habits {
    /// Initial sequence number.
    pub(super) isn: u32,
    /// Its timestamp clock at time zero.
    pub(super) ts_from: u32,
    /// Some of its segments have no timestamp.
    pub(super) omits_clock: bool,
    /// It asks for window with a byte beyond it, as BSD does; else with an old number.
    pub(super) probes_with_byte: bool,
    /// Which it is.
    pub(super) conn: ConnId,
    /// It does not give up on an end that says nothing.
    pub(super) patient: bool,
    /// After so long a silence it asks whether the other end is still there.
    pub(super) asks_after: Option<Duration>,
    /// It does not complain: remains of an earlier connection may come.
    pub(super) forgives: bool,
    /// The peer's stream.
    pub(super) expected: Stream,
}

/// Options that the SYNs agreed on.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Agreed {
    pub(super) timestamps: bool,
    pub(super) sack: bool,
    pub(super) ecn: bool,
    /// Shift of the windows the peer shows.
    pub(super) shift: u8,
}

/// Where in its life it is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Stage {
    Listen,
    SynSent,
    SynReceived,
    /// From here on [`StackSender`] and [`Receiver`] know which FINs are through.
    Synchronized,
    TimeWait {
        until: Instant,
    },
    /// Nothing more to say.
    Over,
}

/// One connection.
pub(in super::super) struct Conn {
    pub(super) plan: StackPlan,
    pub(super) route: Route,
    pub(super) habits: Habits,
    pub(super) mtu: u16,
    /// The MSS it offers.
    pub(super) own_mss: u16,
    pub(super) stage: Stage,
    end: Option<Phase>,
    pub(super) agreed: Agreed,
    /// Both SYNs had the window scale option.
    pub(super) scales: bool,
    /// As its SYN said.
    pub(super) peer_mss: u16,
    /// The peer's initial sequence number.
    pub(super) peer_isn: u32,
    pub(super) ts_recent: u32,
    /// When that came.
    pub(super) ts_recent_at: Instant,
    /// Initial sequence numbers of earlier answers to the same SYN.
    cookies: Vec<u32>,
    pub(super) send: StackSender,
    pub(super) recv: Receiver,
    stream: Option<Stream>,
    /// A SYN or SYN-ACK is to be sent, for the first time or again.
    pub(super) syn_due: bool,
    pub(super) syns_sent: u32,
    /// When something acceptable came last.
    pub(super) heard_at: Instant,
    /// When a keepalive was sent last.
    asked_at: Instant,
    /// When it last answered something it did not accept.
    pub(super) challenged_at: Option<Instant>,
    shrinking: bool,
    /// The application resets it.
    aborts: bool,
    /// Our FIN had left when the peer's came: this end keeps TIME-WAIT.
    pub(super) closed_first: bool,
}

impl Conn {
    pub(super) fn new(
        now: Instant,
        plan: &StackPlan,
        route: Route,
        habits: Habits,
        mtu: u16,
    ) -> Self {
        let by_mtu = i64::from(mtu) - route.headers();
        let own_mss = plan.mss.unwrap_or(u16::try_from(by_mtu).unwrap_or(536));
        Self {
            plan: plan.clone(),
            route,
            habits,
            mtu,
            stage: Stage::Listen,
            end: None,
            agreed: Agreed::default(),
            scales: false,
            peer_mss: 0,
            peer_isn: 0,
            ts_recent: 0,
            ts_recent_at: now,
            cookies: Vec::new(),
            send: StackSender::new(plan),
            recv: Receiver::new(plan, own_mss.into()),
            stream: None,
            syn_due: false,
            syns_sent: 0,
            heard_at: now,
            asked_at: now,
            challenged_at: None,
            shrinking: false,
            aborts: false,
            closed_first: false,
            own_mss,
        }
    }

    /// Payload per segment if packets of `mtu` bytes pass.
    pub(super) fn payload_of(&self, mtu: u32) -> i64 {
        let options = if self.agreed.timestamps { 12 } else { 0 };
        i64::from(mtu) - self.route.headers() - options
    }

    pub(super) fn is_in_time_wait(&self) -> bool {
        matches!(self.stage, Stage::TimeWait { .. })
    }

    pub(super) fn set_shrinking(&mut self, on: bool) {
        if on != self.shrinking {
            self.shrinking = on;
            self.recv.set_shrinking(on);
            if self.stage == Stage::Synchronized {
                self.recv.ack_now();
            }
        }
    }

    // --- Arrivals ------------------------------------------------------------------------------

    /// A segment with a good checksum.
    pub(super) fn handle(
        &mut self,
        now: Instant,
        shared: &mut Shared,
        frame: &Frame,
        ip: &Ip,
        tcp: &Tcp,
    ) {
        if matches!(self.stage, Stage::Listen | Stage::SynSent) && tcp.flags.syn() {
            self.peer_isn = tcp.seq.0;
        }
        if self.stage == Stage::SynReceived && self.plan.quirks.syn_cookies {
            self.choose_cookie(tcp);
        }
        let isn = [self.peer_isn, self.habits.isn];
        let segment = Incoming::new(frame, ip, tcp, isn, [self.recv.nxt, self.send.una]);
        match self.stage {
            Stage::Listen => self.on_listen(now, &segment, &tcp.options),
            Stage::SynSent => self.on_syn_sent(now, shared, &segment, &tcp.options),
            Stage::SynReceived => self.on_syn_received(now, shared, &segment),
            Stage::Synchronized => self.on_synchronized(now, shared, &segment),
            Stage::TimeWait { .. } => self.on_time_wait(now, &segment),
            Stage::Over => {}
        }
    }

    /// Nothing is kept of a SYN: its repetition gets another answer, and the ACK of any will do.
    fn choose_cookie(&mut self, tcp: &Tcp) {
        const STEP: u32 = 0x0765_4321;
        let known = |isn: &&u32| isn.wrapping_add(1) == tcp.ack.0;
        if tcp.flags.syn() && !tcp.flags.ack() && tcp.seq.0 == self.peer_isn {
            self.cookies.push(self.habits.isn);
            self.habits.isn = self.habits.isn.wrapping_add(STEP);
        } else if let Some(&isn) = self.cookies.iter().find(known) {
            self.habits.isn = isn;
        }
    }

    /// A router could not pass on a segment.
    pub(super) fn on_too_big(&mut self, too_big: &TooBig) {
        let place = super::incoming::unwrap(too_big.seq, self.habits.isn, self.send.una);
        if self.stage == Stage::Synchronized && (self.send.una..self.send.nxt).contains(&place) {
            self.send.lower_mss(self.payload_of(too_big.mtu.max(MTU_MIN)));
        }
    }

    /// The connection is over for the application; `stage` is what is left of it.
    pub(super) fn finish(&mut self, phase: Phase, stage: Stage) {
        self.end.get_or_insert(phase);
        self.stage = stage;
    }

    /// Looks whether both FINs are through.
    pub(super) fn note_end(&mut self, now: Instant) {
        if self.stage == Stage::Synchronized && self.send.is_done() && self.recv.is_finished() {
            let until = now + TIME_WAIT;
            let stage = if self.closed_first { Stage::TimeWait { until } } else { Stage::Over };
            self.finish(Phase::Closed, stage);
        }
    }

    pub(super) fn restart_time_wait(&mut self, now: Instant) {
        self.stage = Stage::TimeWait { until: now + TIME_WAIT };
    }

    // --- Departures ----------------------------------------------------------------------------

    /// Runs timers, sends what can be sent, and says when it wants to be called again.
    pub(super) fn poll(&mut self, now: Instant, shared: &mut Shared) -> Option<Instant> {
        match self.stage {
            Stage::Listen => return None,
            Stage::TimeWait { until } if until <= now => self.stage = Stage::Over,
            Stage::SynSent | Stage::SynReceived | Stage::Synchronized => {
                if self.aborts || self.dead_at().is_some_and(|at| at <= now) {
                    self.abort(now, shared);
                }
            }
            Stage::TimeWait { .. } | Stage::Over => {}
        }
        match self.stage {
            Stage::SynSent | Stage::SynReceived => self.transmit_syn(now, shared),
            Stage::Synchronized => self.transmit(now, shared),
            Stage::TimeWait { .. } if self.recv.ack_is_due(now) => self.transmit_ack(now, shared),
            _ => {}
        }
        self.poll_at()
    }

    fn poll_at(&self) -> Option<Instant> {
        match self.stage {
            Stage::Listen | Stage::Over => None,
            Stage::TimeWait { until } => Some(until),
            Stage::SynSent | Stage::SynReceived | Stage::Synchronized => {
                let ask_at = self.asks_at().filter(|_| self.send.timer().is_none());
                let timers = [self.send.timer(), self.recv.timer(), self.dead_at(), ask_at];
                timers.into_iter().flatten().min()
            }
        }
    }

    /// When it gives up on the other end.
    fn dead_at(&self) -> Option<Instant> {
        let patient = self.habits.patient;
        let since = if patient { self.heard_at.max(self.send.sent_at) } else { self.heard_at };
        (self.send.timer().is_some() || !patient).then(|| since + USER_TIMEOUT)
    }

    fn asks_at(&self) -> Option<Instant> {
        self.habits.asks_after.map(|after| self.heard_at.max(self.asked_at) + after)
    }

    /// Says goodbye, and is over.
    fn abort(&mut self, now: Instant, shared: &mut Shared) {
        if self.stage == Stage::Synchronized {
            let at = self.send.empty_at(self.recv.unit());
            self.put(now, shared, TcpFlags::RST | TcpFlags::ACK, at, None, false);
        }
        self.finish(Phase::Reset, Stage::Over);
    }

    fn transmit(&mut self, now: Instant, shared: &mut Shared) {
        let blocks = self.agreed.sack && self.recv.has_blocks();
        self.send.options = if blocks { SACK_LEN } else { 0 };
        if self.send.timer().is_some_and(|at| at <= now) {
            self.send.on_timeout(now);
        }
        if let Some(probe) = self.send.probe(self.habits.probes_with_byte) {
            self.put_piece(now, shared, &probe);
        }
        while let Some(piece) = self.send.next(now, self.piece_max(shared.offloads)) {
            self.put_piece(now, shared, &piece);
        }
        self.send.on_drained(now);
        if self.recv.ack_is_due(now) {
            self.transmit_ack(now, shared);
        }
        if self.send.timer().is_none() && self.asks_at().is_some_and(|at| at <= now) {
            self.asked_at = now;
            let at = self.send.nxt - 1;
            self.put(now, shared, TcpFlags::ACK, at, None, false);
        }
    }

    /// Bytes that may leave at once: many segments, if the driver cuts them.
    fn piece_max(&self, offloads: Offloads) -> i64 {
        let family = if self.route.is_v6() { offloads.tso6 } else { offloads.tso4 };
        let ecn = offloads.ecn || !self.send.cwr_due;
        if family && ecn && !self.plan.quirks.urgent { SUPER_MAX } else { 1 }
    }

    pub(super) fn transmit_ack(&mut self, now: Instant, shared: &mut Shared) {
        let at = self.send.empty_at(self.recv.unit());
        let Quirks { splits_acks, acks_ahead, .. } = self.plan.quirks;
        if splits_acks {
            for part in self.recv.parts() {
                self.put_ack(now, shared, at, part);
            }
        }
        self.put(now, shared, TcpFlags::ACK, at, None, false);
        if let Some(ahead) = self.recv.ahead(self.own_mss.into()).filter(|_| acks_ahead) {
            self.put_ack(now, shared, at, ahead);
        }
    }

    /// An acknowledgement of something else than all there is.
    fn put_ack(&mut self, now: Instant, shared: &mut Shared, at: Place, ack: Place) {
        let nxt = std::mem::replace(&mut self.recv.nxt, ack);
        self.put(now, shared, TcpFlags::ACK, at, None, false);
        self.recv.nxt = nxt;
    }

    fn put_piece(&mut self, now: Instant, shared: &mut Shared, piece: &Piece) {
        let mut flags = TcpFlags::ACK;
        if piece.fin {
            flags = flags | TcpFlags::FIN;
        }
        if piece.push && piece.to > piece.from {
            flags = flags | TcpFlags::PSH;
        }
        let has_data = piece.to > piece.from;
        if self.send.cwr_due && !piece.again && has_data {
            self.send.cwr_due = false;
            flags = flags | TcpFlags::CWR;
        }
        if has_data {
            self.recv.on_answer();
        }
        if has_data && self.plan.quirks.urgent && is_urgent(piece) {
            flags = flags | TcpFlags::URG;
        }
        let ect = self.agreed.ecn && has_data && !piece.again;
        let payload = has_data.then_some((piece.from, piece.to));
        self.put(now, shared, flags, piece.from, payload, ect);
    }

    /// Makes one segment; it acknowledges all there is, and shows the window.
    fn put(
        &mut self,
        now: Instant,
        shared: &mut Shared,
        mut flags: TcpFlags,
        seq: Place,
        payload: Option<(Place, Place)>,
        ect: bool,
    ) {
        let window = self.recv.show_window();
        let mut options = Options::default();
        let omits = self.habits.omits_clock && (now.as_nanos() / 1000).is_multiple_of(3);
        if self.agreed.timestamps && !omits {
            options.timestamps(self.clock(now), self.ts_recent);
        }
        // A segment with blocks has less payload (`tcp_current_mss`).
        if self.agreed.sack && (payload.is_none() || self.send.options > 0) {
            let blocks = self.recv.sack(options.sack_room());
            let peer = self.peer_isn;
            options.sack(blocks.iter().map(|b| (wrap(b.0, peer), wrap(b.1, peer))));
        }
        if self.recv.echo && self.agreed.ecn {
            flags = flags | TcpFlags::ECE;
        }
        let payload = payload.zip(self.stream).map(|((from, to), stream)| {
            (stream, (from - 1).unsigned_abs(), usize::try_from(to - from).expect("64 KiB"))
        });
        let mss = u16::try_from(self.send.segment()).unwrap_or(u16::MAX);
        let urgent = if flags.contains(TcpFlags::URG) { payload.map_or(0, |(.., n)| n) } else { 0 };
        let segment = Segment {
            seq: wrap(seq, self.habits.isn),
            ack: wrap(self.recv.nxt, self.peer_isn),
            flags,
            window,
            urgent: u16::try_from(urgent).unwrap_or(u16::MAX),
            options: options.bytes(),
            ect,
            payload,
            offload: shared.offloads.csum.then_some(mss),
            id: 0,
        };
        shared.send(&self.route, &segment);
    }

    /// A segment of the handshake, or an RST before there is a connection.
    pub(super) fn put_bare(&self, shared: &mut Shared, segment: &Segment<'_>) {
        shared.send(&self.route, segment);
    }

    /// Its timestamp clock.
    pub(super) fn clock(&self, now: Instant) -> u32 {
        self.habits.ts_from.wrapping_add(super::ticks(now, self.plan.quirks.clock_us))
    }

    /// The millisecond at which a segment with this TSval was sent; if none was, one to come.
    pub(super) fn sent_ms(&self, now: Instant, tsval: u32) -> u64 {
        let ticks = u64::from(self.clock(now).wrapping_sub(tsval));
        let per_ms = if self.plan.quirks.clock_us { 1000 } else { 1 };
        now.as_millis().checked_sub(ticks.div_ceil(per_ms)).unwrap_or(u64::MAX)
    }
}

impl Socket for Conn {
    fn phase(&self) -> Phase {
        self.end.unwrap_or(match self.stage {
            Stage::Listen | Stage::SynSent | Stage::SynReceived => Phase::Opening,
            Stage::Synchronized | Stage::TimeWait { .. } | Stage::Over => Phase::Open,
        })
    }

    fn send(&mut self, stream: Stream, _at: u64, len: u64) -> u64 {
        self.stream = Some(stream);
        self.send.write(len)
    }

    fn recv(&mut self, _expected: Stream, _at: u64, reading: bool) -> Received {
        if !reading && self.end.is_none() {
            return Received::default();
        }
        Received { bytes: self.recv.take(), wrong_at: self.recv.wrong_at }
    }

    fn finished(&self) -> bool {
        self.recv.is_finished() && !self.recv.has_unread()
    }

    fn unacknowledged(&self) -> u64 {
        self.send.unacknowledged()
    }

    fn close(&mut self) {
        self.send.close();
    }

    fn abort(&mut self) {
        self.aborts = true;
    }
}
