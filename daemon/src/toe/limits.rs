//! Rate limits of VMs (`rate_limit_*_guest_mbit_s`), as far as sockets are concerned.
//!
//! Each packet of a guest's sockets counts with its header, in a bucket for each direction. The
//! VM's frames have buckets of their own with the same rates (`engine/rates.rs` of the core): some
//! frames are dropped above the rate, and no byte of a socket may be.
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

use nightporter_core::congestion::pacer::{Gain, Pacer};
use nightporter_core::engine::Direction;
use nightporter_core::limits::MTU_DEFAULT;
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

/// The limits of one device.
#[derive(Debug, Default)]
pub(super) struct Limits {
    buckets: [Option<Pacer>; 2],
    /// What senders to the guest are shown as room, if it has a limit: no more than this.
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
        self.buckets[way as usize].is_some()
    }

    /// Whether nothing may go that way now.
    pub(super) fn is_spent(&self, now: Instant, way: Direction) -> bool {
        self.buckets[way as usize].is_some_and(|bucket| bucket.next() > now)
    }

    /// Whether it is the turn of streams of other hosts.
    pub(super) const fn streams_first(&self) -> bool {
        self.streams_first
    }

    /// Whether bytes for the guest wait for its rate, and not for the guest.
    pub(super) fn delays(&self, now: Instant) -> bool {
        self.streams_first || self.is_spent(now, Direction::ToGuest)
    }

    /// Bytes of a stream of another host that may go to the guest at once. Whatever is kept for it
    /// goes a packet at a time, and has as much in its turn.
    pub(super) fn most_at_once(&self, now: Instant) -> usize {
        let Some(bucket) = self.buckets[Direction::ToGuest as usize] else { return usize::MAX };
        usize::try_from(bucket.available(now).max(LEAST)).unwrap_or(usize::MAX)
    }

    /// A packet with so many bytes of payload has gone that way.
    pub(super) fn charge(&mut self, now: Instant, way: Direction, payload: usize) {
        if let Some(bucket) = &mut self.buckets[way as usize] {
            bucket.on_sent(now, (LEN + payload) as u64);
        }
    }

    /// Something may go to the guest: whose turn it is, what is kept for it or streams.
    pub(super) fn choose(&mut self, now: Instant, has_streams: bool) {
        if self.is_spent(now, Direction::ToGuest) {
            // Neither has this turn, and the order of turns stays.
            self.streams_first = false;
            return;
        }
        let may = has_streams && self.has(Direction::ToGuest);
        self.streams_first = may && !self.streams_were_last;
        self.streams_were_last = self.streams_first;
    }

    fn set(&mut self, now: Instant, way: Direction, bytes_per_s: Option<u64>) {
        self.buckets[way as usize] = bytes_per_s.map(|bytes_per_s| {
            let mut bucket = Pacer::new();
            bucket.set_rate(now, bytes_per_s, SECOND, Gain(1, 1), MTU_DEFAULT.into());
            bucket
        });
        if let (Direction::ToGuest, Some(bytes_per_s)) = (way, bytes_per_s) {
            let in_time = bytes_per_s / (SECOND.as_nanos() / SHARE_TIME.as_nanos());
            self.share_max = in_time.max(LEAST);
        }
        self.waits[way as usize] = false;
    }
}

impl Toe {
    /// From now on the sockets of the VM behind this port send, or are sent, so many bytes in a
    /// second; without a number, as many as there are.
    pub fn set_rate_limit(
        &mut self,
        now: Instant,
        port: PortId,
        way: Direction,
        bytes_per_s: Option<u64>,
    ) {
        let at = usize::from(port.0);
        let Some(device) = self.device_mut(at) else { return };
        if bytes_per_s.is_some() || device.limits.has(way) {
            device.limits.set(now, way, bytes_per_s);
            self.limited.retain(|(_, limited, of)| (*limited, *of) != (at, way));
            self.wake_device(at);
        }
    }

    /// Whether the guest must wait for its rate. If so, its device is woken when it need not.
    pub(super) fn is_limited(&mut self, now: Instant, at: usize, way: Direction) -> bool {
        let Some(device) = self.devices[at].as_deref_mut() else { return false };
        let Some(bucket) = device.limits.buckets[way as usize] else { return false };
        let (next, waits) = (bucket.next(), &mut device.limits.waits[way as usize]);
        if next > now && !std::mem::replace(waits, true) {
            self.limited.push((next, at, way));
        }
        next > now
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
    use super::*;

    #[test]
    fn who_waits_at_a_guest_has_the_next_turn_also_if_others_have_spent_its_rate() {
        let (mut limits, mut now) = (Limits::default(), Instant::from_secs(1000));
        limits.set(now, Direction::ToGuest, Some(1_000_000));
        let mut turns = Vec::new();
        for _ in 0..4 {
            limits.choose(now, true);
            turns.push(limits.streams_first());
            limits.charge(now, Direction::ToGuest, 64 << 10);
            limits.choose(now, true);
            assert!(!limits.streams_first() && limits.delays(now), "it is nobody's turn");
            now = now + SECOND;
        }
        assert_eq!(turns, [true, false, true, false]);
        limits.choose(now, false);
        assert!(!limits.streams_first() && !limits.delays(now));
    }

    #[test]
    fn a_stream_is_read_as_far_as_the_rate_allows_and_a_page_at_least() {
        let (mut limits, now) = (Limits::default(), Instant::from_secs(1000));
        assert_eq!(limits.most_at_once(now), usize::MAX);
        limits.set(now, Direction::ToGuest, Some(1_000_000));
        assert_eq!(limits.most_at_once(now), 4096);
        limits.set(now, Direction::ToGuest, Some(20_000_000));
        assert_eq!(limits.most_at_once(now), 20_000);
        limits.charge(now, Direction::ToGuest, 9_956);
        assert_eq!(limits.most_at_once(now), 10_000);
    }
}
