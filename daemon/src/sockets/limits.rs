//! Rate limits of VMs (`rate_limit_*_guest_mbit_s`), as far as sockets are concerned.
//!
//! Each packet of a guest's sockets counts with its header, in a bucket for each direction, which
//! is that of the VM's frames (`engine/rates.rs` of the core). The other worker counts frames in it
//! at the same time. Frames above the rate are dropped, and no byte of a socket may be.
//!
//! # Counting
//!
//! A packet goes as a whole, and is then counted a piece at a time ([`Limit::pay`]): when the
//! bucket has room for a piece, and also when it has none if sockets have had less than half of the
//! rate lately. No other packet goes before all of it is counted. So
//!
//! - frames and sockets have the rate together, and either has all of it while the other is quiet;
//! - sockets have half of it beside any number of frames;
//! - frames find the bucket no more than a piece ahead because of sockets, and sockets take no more
//!   than half of the rate beside frames that are dropped: a packet of 64 KiB does not have the
//!   frames of half a second dropped at 1 Mbit/s.
//!
//! # Waiting
//!
//! - **From the guest**: the device does not read the guest's ring while the guest is ahead of its
//!   rate. Packets about the state of sockets are in the same ring, so they wait as well.
//! - **To the guest**: payload of guests of this host is kept ([`super::kept`]), and payload of
//!   other hosts stays in its stream. The two take turns, one packet or one fill each. Packets
//!   about the state of sockets do not count and do not wait.
//!
//! A timer ends the wait.
//!
//! # Senders to a guest with a limit
//!
//! A guest with a limit must not stop its senders' other sockets. So a sender of this host is
//! shown its share of room at such a socket ([`super::shares`]), as at a socket to another host,
//! and no more room while anything of that socket is kept. A share is at most what the receiver's
//! rate carries in [`SHARE_TIME`], so that many senders do not use up the memory for kept payload.
//! A socket that has not sent yet is shown one page.
//!
//! If a limit is set later, sockets may have been shown more room. If they fill the memory for kept
//! payload of their sender, the sender's ring waits until the rate has carried half of it. No
//! connection is reset for that: the receiver takes its bytes, only slowly.

use std::sync::Arc;

use nightporter_core::bucket::SharedRate;
use nightporter_core::engine::Direction;
use nightporter_core::port::PortId;
use nightporter_core::time::{Duration, Instant};
use nightporter_core::toe::id::{ShadowId, Side};
use nightporter_core::toe::sockets::{SocketId, VmId};
use nightporter_core::wire::vsock::LEN;

use super::shares::LEAST;
use super::{HERE, Toe};

/// See the module's doc.
const SHARE_TIME: Duration = Duration::from_millis(10);
const SECOND: Duration = Duration::from_secs(1);

/// The limit of one direction.
#[derive(Debug)]
struct Limit {
    /// The VM's, for frames and sockets.
    rate: Arc<SharedRate>,
    /// Bytes of sockets that have gone and are not counted yet.
    unpaid: u64,
    /// From then on sockets have had less than half of the rate.
    half_at: Instant,
}

impl Limit {
    const fn new(rate: Arc<SharedRate>) -> Self {
        Self { rate, unpaid: 0, half_at: Instant::ZERO }
    }

    /// Counts bytes that have gone, as far as that is possible now.
    fn pay(&mut self, now: Instant) {
        while self.unpaid > 0 && (self.rate.next() <= now || self.half_at <= now) {
            let piece = self.unpaid.min(self.rate.burst());
            self.rate.charge(now, piece);
            self.unpaid -= piece;
            // A sender that had all of the rate for long does not wait for long when frames come.
            let most = now + self.rate.time_of(4 * self.rate.burst());
            self.half_at = most.min(self.half_at.max(now) + self.rate.time_of(2 * piece));
        }
    }

    /// When more can be counted.
    fn next(&self) -> Instant {
        self.rate.next().min(self.half_at)
    }
}

/// The limits of one device.
#[derive(Debug, Default)]
pub(super) struct Limits {
    of_ways: [Option<Limit>; 2],
    /// The room that senders to the guest are shown, if it has a limit: no more than this.
    share_max: u64,
    /// It stands in the list of those that wait.
    waits: [bool; 2],
    /// Streams of other hosts have this turn.
    streams_first: bool,
    /// They had the last turn in which something could go.
    streams_were_last: bool,
}

impl Limits {
    /// Whether there is a limit for this direction.
    pub(super) const fn has(&self, way: Direction) -> bool {
        self.of_ways[way as usize].is_some()
    }

    /// Whether bytes of this direction are counted in this bucket already.
    fn counts_in(&self, way: Direction, rate: &Arc<SharedRate>) -> bool {
        self.of_ways[way as usize].as_ref().is_some_and(|limit| Arc::ptr_eq(&limit.rate, rate))
    }

    /// Whether nothing may go that way for now.
    pub(super) fn is_spent(&self, way: Direction) -> bool {
        self.of_ways[way as usize].as_ref().is_some_and(|limit| limit.unpaid > 0)
    }

    /// Until when nothing may go that way, if there is something to wait for.
    fn wait(&mut self, now: Instant, way: Direction) -> Option<Instant> {
        let limit = self.of_ways[way as usize].as_mut()?;
        limit.pay(now);
        (limit.unpaid > 0).then(|| limit.next())
    }

    /// Whether it is the turn of streams of other hosts.
    pub(super) const fn streams_first(&self) -> bool {
        self.streams_first
    }

    /// Whether bytes for the guest wait for its rate, and not for the guest.
    pub(super) fn delays(&self) -> bool {
        self.streams_first || self.is_spent(Direction::ToGuest)
    }

    /// Bytes of a stream of another host that may go to the guest at once. All that is kept for it
    /// goes a packet at a time, and has as much in its turn.
    pub(super) fn most_at_once(&self, now: Instant) -> usize {
        let limit = self.of_ways[Direction::ToGuest as usize].as_ref();
        let Some(limit) = limit else { return usize::MAX };
        usize::try_from(limit.rate.available(now).max(LEAST)).unwrap_or(usize::MAX)
    }

    /// A packet with so many bytes of payload has gone that way.
    pub(super) fn charge(&mut self, now: Instant, way: Direction, payload: usize) {
        if let Some(limit) = &mut self.of_ways[way as usize] {
            limit.unpaid += (LEN + payload) as u64;
            limit.pay(now);
        }
    }

    /// Something may go to the guest: whose turn it is, what is kept for it or streams.
    pub(super) fn choose(&mut self, now: Instant, has_streams: bool) {
        if self.wait(now, Direction::ToGuest).is_some() {
            // Neither has this turn, and the order of turns stays.
            self.streams_first = false;
            return;
        }
        let may = has_streams && self.has(Direction::ToGuest);
        self.streams_first = may && !self.streams_were_last;
        self.streams_were_last = self.streams_first;
    }

    fn set(&mut self, way: Direction, rate: Option<Arc<SharedRate>>) {
        if let (Direction::ToGuest, Some(rate)) = (way, &rate) {
            let in_time = rate.bytes_per_s() / (SECOND.as_nanos() / SHARE_TIME.as_nanos());
            self.share_max = in_time.max(LEAST);
        }
        let place = &mut self.of_ways[way as usize];
        *place = rate.map(|rate| match place.take() {
            // Bytes that have gone are counted in the new one.
            Some(before) => Limit { rate, ..before },
            None => Limit::new(rate),
        });
        self.waits[way as usize] = false;
    }
}

impl Toe {
    /// From now on the sockets of the VM behind this port send, or are sent, no faster than that,
    /// with all that others count in it; without a rate, as fast as they can.
    pub fn set_rate_limit(&mut self, port: PortId, way: Direction, rate: Option<Arc<SharedRate>>) {
        let at = usize::from(port.0);
        let Some(device) = self.device_mut(at) else { return };
        if rate.as_ref().is_some_and(|rate| device.limits.counts_in(way, rate)) {
            return;
        }
        if rate.is_some() || device.limits.has(way) {
            device.limits.set(way, rate);
            self.limited.retain(|(_, limited, of)| (*limited, *of) != (at, way));
            self.wake_device(at);
        }
    }

    /// Whether the guest must wait for its rate. If so, its device is woken when it need not.
    pub(super) fn is_limited(&mut self, now: Instant, at: usize, way: Direction) -> bool {
        let Some(device) = self.devices[at].as_deref_mut() else { return false };
        let Some(until) = device.limits.wait(now, way) else { return false };
        if !std::mem::replace(&mut device.limits.waits[way as usize], true) {
            self.limited.push((until, at, way));
        }
        true
    }

    /// Devices that need not wait for their rates any more go on.
    pub(super) fn lift_limits(&mut self, now: Instant) {
        while let Some(n) = self.limited.iter().position(|(until, ..)| *until <= now) {
            let (_, at, way) = self.limited.swap_remove(n);
            if let Some(device) = self.device_mut(at) {
                device.limits.waits[way as usize] = false;
            }
            self.wake_device(at);
        }
    }

    /// If it was the turn of streams, what is kept has the next one.
    pub(super) fn go_on_choosing(&mut self, at: usize) {
        let first = self.devices[at].as_ref().is_some_and(|it| it.limits.streams_first());
        if first && self.kept.is_ready(at) {
            self.wake_device(at);
        }
    }

    /// Whether others have waited for their turn at this guest, which has a limit.
    pub(super) fn is_behind(&mut self, now: Instant, to: usize) -> bool {
        let Some(device) = self.devices[to].as_ref() else { return false };
        let has_streams = !device.streams.is_empty();
        device.limits.has(Direction::ToGuest)
            && (has_streams
                || self.kept.is_ready(to)
                || self.is_limited(now, to, Direction::ToGuest))
    }

    /// Two guests of this host are about to be connected.
    pub(super) fn look_at_both(&mut self, now: Instant, opener: SocketId, id: ShadowId) {
        let Some(acceptor) = self.host.socket(HERE, id, Side::Acceptor) else { return };
        for (socket, other) in [(opener, acceptor), (acceptor, opener)] {
            if let Some(VmId(at)) = self.host.vm_of(socket) {
                self.show_share(now, (at as usize, socket), other, false);
            }
        }
    }

    /// A guest is shown room for its share at a socket whose `other` end is at a guest with a
    /// limit, if nothing is kept for that one. `has_sent`: it just has.
    pub(super) fn show_share(
        &mut self,
        now: Instant,
        (at, socket): (usize, SocketId),
        other: SocketId,
        has_sent: bool,
    ) {
        let Self { host, devices, kept, narrow, .. } = self;
        let Some(VmId(to)) = host.vm_of(other) else { return };
        let limits = devices[to as usize].as_ref().map(|to| &to.limits);
        let Some(most) = limits.filter(|it| it.has(Direction::ToGuest)).map(|it| it.share_max)
        else {
            if narrow.remove(&socket).is_some() {
                host.limit_room(now, socket, u64::MAX);
            }
            return;
        };
        let Some(device) = devices[at].as_mut() else { return };
        let last = narrow.entry(socket).or_default();
        if has_sent {
            device.shares.note(now, last);
        }
        if !kept.has(other) {
            let of_all = kept.of_sender(at);
            let each = device.shares.each(of_all);
            // Of those that have not sent many may do so at once, whatever the rate is.
            let share = if *last > 0 { each.min(most) } else { LEAST };
            host.limit_room(now, socket, share);
        }
    }
}

#[cfg(test)]
mod tests {
    use nightporter_core::limits::LIMIT_DEBT_MAX;

    use super::*;

    const START: Instant = Instant::from_secs(1000);

    fn rate(bytes_per_s: u64) -> Option<Arc<SharedRate>> {
        Some(Arc::new(SharedRate::new(bytes_per_s)))
    }

    #[test]
    fn who_waits_at_a_guest_has_the_next_turn_also_if_others_have_spent_its_rate() {
        let (mut limits, mut now) = (Limits::default(), START);
        limits.set(Direction::ToGuest, rate(1_000_000));
        let mut turns = Vec::new();
        for _ in 0..4 {
            limits.choose(now, true);
            turns.push(limits.streams_first());
            limits.charge(now, Direction::ToGuest, 64 << 10);
            limits.choose(now, true);
            assert!(!limits.streams_first() && limits.delays(), "it is nobody's turn");
            while let Some(next) = limits.wait(now, Direction::ToGuest) {
                now = next;
            }
        }
        assert_eq!(turns, [true, false, true, false]);
        limits.choose(now, false);
        assert!(!limits.streams_first() && !limits.delays());
    }

    #[test]
    fn another_rate_has_the_bytes_that_were_not_counted_yet() {
        let (mut limits, way) = (Limits::default(), Direction::FromGuest);
        limits.set(way, rate(1_000_000));
        limits.charge(START, way, 100_000);
        let waits = |limits: &mut Limits, now| limits.wait(now, way);
        assert!(waits(&mut limits, START).is_some());
        limits.set(way, rate(10_000_000));
        assert!(waits(&mut limits, START).is_some(), "they are not forgotten");
        let mut now = START;
        while let Some(next) = waits(&mut limits, now) {
            now = next;
        }
        assert!(now > START && now < START + SECOND, "{now:?}");
        limits.set(way, None);
        assert!(!limits.has(way));
    }

    #[test]
    fn a_stream_is_read_as_far_as_the_rate_allows_and_a_page_at_least() {
        let (mut limits, now) = (Limits::default(), START);
        assert_eq!(limits.most_at_once(now), usize::MAX);
        limits.set(Direction::ToGuest, rate(1_000_000));
        assert_eq!(limits.most_at_once(now), 4096);
        limits.set(Direction::ToGuest, rate(20_000_000));
        assert_eq!(limits.most_at_once(now), 20_000);
        limits.charge(now, Direction::ToGuest, 9_956);
        assert_eq!(limits.most_at_once(now), 10_000);
    }

    /// Bytes of sockets and of frames in a second, if a packet of so many bytes waits all the time,
    /// and so many frames of 1,500 bytes come in a millisecond, which are dropped as the core does
    /// it; and for how long no frame has passed.
    fn shares(bytes_per_s: u64, packet: usize, frames: u64) -> ([u64; 2], Duration) {
        let (mut limits, rate) = (Limits::default(), Arc::new(SharedRate::new(bytes_per_s)));
        limits.set(Direction::FromGuest, Some(Arc::clone(&rate)));
        let (mut now, end, mut sums) = (START, START + SECOND, [0, 0]);
        let (mut frame_at, mut passed, mut gap) = (START, START, Duration::ZERO);
        while now < end {
            while packet > 0 && limits.wait(now, Direction::FromGuest).is_none() {
                limits.charge(now, Direction::FromGuest, packet);
                sums[0] += (LEN + packet) as u64;
            }
            while frames > 0 && frame_at <= now {
                frame_at = frame_at + Duration::from_nanos(1_000_000 / frames);
                if rate.next() <= now + LIMIT_DEBT_MAX {
                    rate.charge(now, 1500);
                    sums[1] += 1500;
                    gap = gap.max(now.since(passed));
                    passed = now;
                }
            }
            let next = limits.wait(now, Direction::FromGuest).unwrap_or(end);
            now = if frames > 0 { next.min(frame_at) } else { next };
        }
        (sums, gap)
    }

    #[test]
    fn flood_16_frames_and_sockets_have_the_rate_together_and_each_half_of_it_at_least() {
        for bytes_per_s in [125_000, 1_000_000, 125_000_000] {
            for packet in [100, 64 << 10] {
                let ahead = bytes_per_s / 20 + bytes_per_s / 1000 + 3000 + packet as u64;
                let frames = bytes_per_s / 500_000 + 1;
                let ([sockets, of_frames], gap) = shares(bytes_per_s, packet, frames);
                let which = format!("{bytes_per_s}, {packet}: {sockets} and {of_frames}, {gap:?}");
                assert!(sockets + of_frames <= bytes_per_s + ahead, "{which}");
                assert!(sockets + of_frames + ahead >= bytes_per_s, "{which}");
                assert!(sockets + ahead >= bytes_per_s / 2, "{which}");
                assert!(of_frames >= bytes_per_s * 45 / 100, "{which}");
                // Twice the time that a frame takes at half of the rate, and a piece of a packet.
                let most = Duration::from_nanos(SECOND.as_nanos() * 12_000 / bytes_per_s);
                assert!(gap <= most.max(Duration::from_millis(5)), "{which}");
                // Alone, each has all of it.
                let [alone, _] = shares(bytes_per_s, packet, 0).0;
                assert!(alone + ahead >= bytes_per_s && alone <= bytes_per_s + ahead, "{alone}");
                let [_, alone] = shares(bytes_per_s, 0, frames).0;
                assert!(alone + ahead >= bytes_per_s && alone <= bytes_per_s + ahead, "{alone}");
            }
        }
    }
}
