//! A connection: each direction at each place where it is watched, and between the two places.

use super::between::Between;
use super::order::Place as Order;
use super::stream::{Sent, Stream, unwrap};
use super::{Frame, Settings, Side, Way};
use crate::flow::key::FlowKey;
use crate::time::{Duration, Instant};
use crate::wire::packet::{Seq, Tcp, TcpFlags};

/// A watched connection.
#[derive(Clone, Debug)]
pub struct Flow {
    key: FlowKey,
    /// When its first and its newest segment passed.
    first: Instant,
    newest: Instant,
    places: [Option<Box<Place>>; 2],
    between: Option<Box<[Between; 2]>>,
    /// The first number of each direction, the same at both places.
    bases: [Option<u64>; 2],
    /// The numbers of the SYNs that began it, by direction: both ends may open (RFC 9293 section
    /// 3.5).
    opening: [Option<Seq>; 2],
}

/// Both directions at one place.
#[derive(Clone, Debug)]
struct Place {
    streams: [Stream; 2],
    syn: Option<(Instant, Way)>,
    first_round_trip: Option<Duration>,
}

impl Flow {
    pub(super) fn new(key: FlowKey, now: Instant) -> Self {
        Self {
            key,
            first: now,
            newest: now,
            places: [None, None],
            between: None,
            bases: [None; 2],
            opening: [None; 2],
        }
    }

    /// Its ends; `port` is the number of its VM.
    #[must_use]
    pub const fn key(&self) -> &FlowKey {
        &self.key
    }

    /// When its first segment passed.
    #[must_use]
    pub const fn first(&self) -> Instant {
        self.first
    }

    /// From its first segment to its newest.
    #[must_use]
    pub const fn duration(&self) -> Duration {
        self.newest.since(self.first)
    }

    /// One direction at one place; `None` if the connection was not seen there.
    #[must_use]
    pub fn stream(&self, side: Side, way: Way) -> Option<&Stream> {
        self.places[side as usize].as_ref().map(|place| &place.streams[way as usize])
    }

    /// The time from SYN to the handshake's last ACK at one place, which is a whole round trip
    /// wherever the place is.
    #[must_use]
    pub fn first_round_trip(&self, side: Side) -> Option<Duration> {
        self.places[side as usize].as_ref()?.first_round_trip
    }

    /// One direction between both places; `None` if the connection was seen at one of them only.
    #[must_use]
    pub fn between(&self, way: Way) -> Option<&Between> {
        self.between.as_ref().map(|between| &between[way as usize])
    }

    /// A SYN that begins another connection of the same name.
    pub(super) fn is_other(&self, way: Way, tcp: &Tcp) -> bool {
        let known = self.opening[way as usize];
        let mut places = self.places.iter().flatten();
        let is_open = places.any(|place| place.first_round_trip.is_some());
        let has_begun = is_open || self.opening == [None; 2];
        tcp.flags.syn() && !tcp.flags.ack() && known.map_or(has_begun, |known| known != tcp.seq)
    }

    pub(super) fn handle(&mut self, frame: &Frame<'_>, tcp: &Tcp, settings: &Settings) {
        let (now, side, way) = (frame.at, frame.side, frame.way);
        self.newest = self.newest.max(now);
        if tcp.flags.syn() && !tcp.flags.ack() {
            self.opening[way as usize].get_or_insert(tcp.seq);
        }
        let place =
            self.places[side as usize].get_or_insert_with(|| Box::new(Place::new(settings)));
        place.on_handshake(now, way, tcp.flags);

        let base = self.bases[way as usize];
        let seq = unwrap(tcp.seq, place.streams[way as usize].near().or(base));
        self.bases[way as usize].get_or_insert(seq);
        let sent = Sent { seq, tcp, frame_len: frame.len };
        let (first, next) = (place.first_round_trip, place.streams[way as usize].near());
        let order = place.streams[way as usize].on_sent(now, &sent, first);

        let back = way.back();
        let acks = &mut place.streams[back as usize];
        let ack = unwrap(tcp.ack, acks.near().or(self.bases[back as usize]));
        acks.on_ack(now, ack, tcp);
        let acked = (tcp.flags.ack() && !tcp.flags.rst()).then_some(ack);
        if acked.is_some() {
            self.bases[back as usize].get_or_insert(ack);
        }

        if self.places.iter().all(Option::is_some) {
            let between = self.between.get_or_insert_default();
            let is_partly_old = next.is_some_and(|next| seq < next);
            on_both(between, frame, (&sent, order, is_partly_old), acked);
        }
    }
}

/// A segment of a connection that is watched at both places.
fn on_both(
    between: &mut [Between; 2],
    frame: &Frame<'_>,
    (sent, order, is_partly_old): (&Sent<'_>, Option<Order>, bool),
    ack: Option<u64>,
) {
    let (now, way) = (frame.at, frame.way);
    let comes = way.comes_at(frame.side);
    let data = &mut between[way as usize];
    match order {
        Some(Order::Newest) if comes && is_partly_old => data.on_repeated(sent.seq),
        Some(Order::Newest) if comes => data.on_came(now, sent.end()),
        Some(Order::Newest) => data.on_left(now, sent.end()),
        Some(_) if comes => data.on_repeated(sent.seq),
        _ => {}
    }
    let acks = &mut between[way.back() as usize];
    match ack {
        Some(ack) if comes => acks.on_own(now, ack),
        Some(ack) => acks.on_shown(now, ack),
        None => {}
    }
}

/// Bytes of a connection that is seen at both sides.
pub(super) const BYTES: usize =
    size_of::<Flow>() + 2 * size_of::<Place>() + size_of::<[Between; 2]>();

impl Place {
    fn new(settings: &Settings) -> Self {
        let stream = || Stream::new(settings);
        Self { streams: [stream(), stream()], syn: None, first_round_trip: None }
    }

    fn on_handshake(&mut self, now: Instant, way: Way, flags: TcpFlags) {
        match self.syn {
            None if flags.syn() && !flags.ack() => self.syn = Some((now, way)),
            Some((syn, from)) if from == way && flags.ack() && self.first_round_trip.is_none() => {
                self.first_round_trip = Some(now.since(syn));
            }
            _ => {}
        }
    }
}
