//! One direction of a connection at one place: its data one way, its acknowledgements the other.

use super::Settings;
use super::bursts::Bursts;
use super::density::AckDensity;
use super::limited::Limited;
use super::order::{Order, Place};
use super::rate::Rate;
use super::round_trip::RoundTrip;
use super::turnaround::Turnaround;
use super::windows::Windows;
use crate::time::{Duration, Instant};
use crate::wire::packet::{Seq, Tcp, TcpFlags};

/// The statistics of one direction at one place. Each is defined in its own file.
#[derive(Clone, Debug)]
pub struct Stream {
    /// Segments in order, out of order, repeated, lost.
    pub order: Order,
    /// Zero windows and full ones.
    pub windows: Windows,
    /// Times between ACKs of something new.
    pub density: AckDensity,
    /// Bytes acknowledged per round trip, whose variation is the burstiness.
    pub per_round_trip: Rate,
    /// Bytes acknowledged per second.
    pub per_second: Rate,
    /// Milliseconds above a rate, by bytes of frames.
    pub bursts: Bursts,
    /// Times until segments were acknowledged.
    pub round_trip: RoundTrip,
    /// Times from an ACK to the sender's next segment.
    pub turnaround: Turnaround,
    /// Time by the bound in force.
    pub limited: Limited,
    /// Payload that the receiver acknowledged.
    pub acked_bytes: u64,
    /// ACKs of something new.
    pub acks: u64,
    /// ACKs without payload or change while something was under way (RFC 5681 section 2).
    pub duplicate_acks: u64,
    /// ACKs of bytes that did not pass here.
    pub unseen_acks: u64,
    /// Keepalives and window probes, which carry nothing new.
    pub probes: u64,
    una: Option<u64>,
    last_window: u16,
    /// The number of the FIN.
    fin: Option<u64>,
}

/// A segment of the stream, its numbers unwrapped.
pub(super) struct Sent<'a> {
    pub(super) seq: u64,
    pub(super) tcp: &'a Tcp,
    /// Bytes of its frame.
    pub(super) frame_len: u32,
}

impl Sent<'_> {
    pub(super) fn end(&self) -> u64 {
        self.seq + u64::from(self.tcp.seq_len())
    }
}

impl Stream {
    pub(super) fn new(settings: &Settings) -> Self {
        Self {
            order: Order::default(),
            windows: Windows::default(),
            density: AckDensity::default(),
            per_round_trip: Rate::new(settings.round_trip),
            per_second: Rate::new(Duration::from_secs(1)),
            bursts: Bursts::new(settings.burst_mbit_s),
            round_trip: RoundTrip::default(),
            turnaround: Turnaround::default(),
            limited: Limited::default(),
            acked_bytes: 0,
            acks: 0,
            duplicate_acks: 0,
            unseen_acks: 0,
            probes: 0,
            una: None,
            last_window: 0,
            fin: None,
        }
    }

    /// The number that those of the wire are near to, if one is known.
    pub(super) fn near(&self) -> Option<u64> {
        self.order.next().or(self.una)
    }

    /// A segment of the sender; `None` if it carries nothing.
    pub(super) fn on_sent(
        &mut self,
        now: Instant,
        sent: &Sent<'_>,
        first_round_trip: Option<Duration>,
    ) -> Option<Place> {
        let (tcp, seq, end) = (sent.tcp, sent.seq, sent.end());
        if tcp.flags.syn() {
            self.windows.on_sender_syn(tcp.options.window_scale.is_some());
        }
        self.bursts.add(now, sent.frame_len);
        if tcp.flags.rst() {
            return None;
        }
        let plain = !tcp.flags.intersects(TcpFlags::SYN | TcpFlags::FIN);
        if plain && tcp.payload_len <= 1 && self.is_probe(seq, tcp.payload_len) {
            self.probes += 1;
            return None;
        }
        if seq == end {
            return None;
        }
        let next = self.order.next();
        let place = self.order.on_segment(now, (seq, end), self.una, first_round_trip);
        self.order.bytes += u64::from(tcp.payload_len);
        if tcp.flags.fin() {
            self.fin = Some(end - 1);
        }
        if place != Place::Newest || next.is_some_and(|next| seq < next) {
            self.round_trip.on_repeated(seq);
        }
        if place == Place::Newest {
            self.round_trip.on_sent(now, end);
            self.turnaround.on_sent(now);
        }
        if plain {
            self.windows.on_sent(end);
        }
        self.limited.on_sent(end - seq);
        self.changed(now);
        Some(place)
    }

    /// A keepalive (RFC 9293 section 3.8.4): no octet or an old one, just below the next number. A
    /// window probe (section 3.8.6.1): one octet that there is no room for.
    fn is_probe(&self, seq: u64, len: u32) -> bool {
        let Some(next) = self.order.next() else { return false };
        let is_old = len == 0 || self.una.is_some_and(|una| una > seq);
        let is_full = self.windows.edge().is_some_and(|edge| edge <= seq);
        (seq + 1 == next && is_old) || (len == 1 && seq == next && is_full)
    }

    /// A segment of the receiver that acknowledges all before `ack`.
    pub(super) fn on_ack(&mut self, now: Instant, ack: u64, tcp: &Tcp) {
        let flags = tcp.flags;
        if flags.syn() {
            self.windows.on_syn(tcp.options.window_scale);
        }
        if !flags.ack() || flags.rst() {
            return;
        }
        self.windows.on_shown(ack, tcp.window, flags.syn(), flags.fin());
        let is_bare = tcp.seq_len() == 0;
        let is_same = is_bare && tcp.window == self.last_window;
        self.last_window = tcp.window;
        let next = self.order.next();
        match self.una {
            None => {
                self.una = Some(ack);
                self.round_trip.on_ack(now, ack);
            }
            Some(una) if ack > una => self.on_new_ack(now, una, ack),
            Some(una) => {
                let is_waiting = next.is_some_and(|next| next > una);
                self.duplicate_acks += u64::from(ack == una && is_same && is_waiting);
            }
        }
        self.unseen_acks += u64::from(next.is_some_and(|next| ack > next));
        self.changed(now);
    }

    fn on_new_ack(&mut self, now: Instant, una: u64, ack: u64) {
        self.una = Some(ack);
        self.acks += 1;
        self.density.on_ack(now);
        self.round_trip.on_ack(now, ack);
        self.turnaround.on_ack(now);
        let payload_end = self.fin.unwrap_or(ack);
        let bytes = ack.min(payload_end).saturating_sub(una);
        self.acked_bytes += bytes;
        self.per_round_trip.add(now, bytes);
        self.per_second.add(now, bytes);
    }

    fn changed(&mut self, now: Instant) {
        if let (Some(next), una) = (self.order.next(), self.una.unwrap_or(0)) {
            self.limited.on_change(now, una, next, self.windows.edge());
        }
    }
}

/// The number near `near` that the wire has as `seq`; the first one if none is near.
pub(super) fn unwrap(seq: Seq, near: Option<u64>) -> u64 {
    // Numbers below the first one stay positive.
    near.map_or(1 << 32 | u64::from(seq.0), |near| seq.unwrap(near))
}
