//! Streams that go by TLS: how they begin, and how many may be about to.
//!
//! The thread that does handshakes (`trust`) does some hundreds in a second for a host. A stream
//! waits for its own as long as a program waits ([`super::T_DIAL`]), and no longer, so no more are
//! begun to a host than that thread has done by then. A guest may have no more of them than it
//! leaves free, so that the next guest finds some; its other connections use guest TCP.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::os::fd::BorrowedFd;

use nightporter_core::time::Instant;
use nightporter_core::toe::id::{HostId, Side};
use nix::sys::epoll::Epoll;

use super::counts::{add, count, subtract};
use super::pipe::Pipe;
use super::{Peers, Stream, StreamId, Streams, T_HELLO, T_SAY, watch};
use crate::sockets::trust::{Opening, Secured, Trust, Way};

/// Streams to a host that wait for their handshake: done in half a second (`T_HANDSHAKE`).
const BEGUN_MAX: usize = 256;

/// Streams that wait for their handshake, and those that are no more meanwhile: the thread does not
/// know, and makes theirs. If they did not count, a guest that begins streams and resets them would
/// have all that the thread does for a host.
#[derive(Debug, Default)]
pub(super) struct Handshakes {
    /// To which host each is, and for the guest with which device.
    all: BTreeMap<StreamId, (HostId, usize)>,
    to: BTreeMap<HostId, usize>,
    of_guest: BTreeMap<(HostId, usize), usize>,
}

impl Handshakes {
    /// Whether one more may be begun to this host, for the guest with this device.
    fn may_begin(&self, host: HostId, device: usize) -> bool {
        count(&self.of_guest, &(host, device)) < BEGUN_MAX.saturating_sub(count(&self.to, &host))
    }

    fn begin(&mut self, id: StreamId, host: HostId, device: usize) {
        self.all.insert(id, (host, device));
        add(&mut self.to, host);
        add(&mut self.of_guest, (host, device));
    }

    /// The thread has answered: it has had its handshake, or gets none.
    pub(super) fn end(&mut self, id: StreamId) {
        if let Some((host, device)) = self.all.remove(&id) {
            subtract(&mut self.to, &host);
            subtract(&mut self.of_guest, &(host, device));
        }
    }
}

impl Streams {
    /// Whether streams go by TLS.
    pub(super) const fn encrypts(&self) -> bool {
        self.trust.is_some()
    }

    /// Readable when streams may have begun by TLS.
    pub(in super::super) fn trust_fd(&self) -> Option<BorrowedFd<'_>> {
        self.trust.as_ref().map(Trust::fd)
    }

    /// The identity of other hosts, if they prove it.
    pub(in super::super) const fn trust_mut(&mut self) -> Option<&mut Trust> {
        self.trust.as_mut()
    }

    /// Whether a stream to this host may begin now, for the guest with this device.
    pub(super) fn may_begin(&self, host: HostId, device: usize) -> bool {
        !self.encrypts() || self.handshakes.may_begin(host, device)
    }

    /// It is about to, if it goes by TLS.
    pub(super) fn note_begun(&mut self, id: StreamId, host: HostId, device: usize) {
        if self.encrypts() {
            self.handshakes.begin(id, host, device);
        }
    }

    /// Streams have begun by TLS, here or at other hosts; those that have not are named.
    pub(in super::super) fn hear_openings(
        &mut self,
        now: Instant,
        epoll: &Epoll,
        peers: &Peers,
    ) -> Vec<StreamId> {
        let mut failed = Vec::new();
        for opening in self.trust.as_mut().map_or_else(Vec::new, Trust::take) {
            match opening {
                Opening::Begun(tag, secured) => {
                    let id = StreamId::of(tag);
                    self.handshakes.end(id);
                    let Some(stream) = self.get_mut(id).filter(|stream| !stream.has_pipe()) else {
                        continue; // nobody waits for it any more
                    };
                    let pipe = Pipe::from(secured);
                    match watch(epoll, &pipe, id.place) {
                        Ok(()) => {
                            stream.set_pipe(pipe);
                            self.encrypted += 1;
                            self.wake(id);
                        }
                        Err(_) => {
                            stream.has_failed_here = true;
                            failed.push(id);
                        }
                    }
                }
                Opening::Failed(tag, is_here) => {
                    let id = StreamId::of(tag);
                    self.handshakes.end(id);
                    if let Some(stream) = self.get_mut(id).filter(|stream| !stream.has_pipe()) {
                        stream.has_failed_here |= is_here;
                        failed.push(id);
                    }
                }
                Opening::Came(way, secured) => self.welcome(now, epoll, peers, way, secured),
                Opening::Shut => {
                    self.is_shut = true;
                    failed.extend(self.without_pipe());
                }
            }
        }
        failed
    }

    /// A stream that another host has begun.
    fn welcome(&mut self, now: Instant, epoll: &Epoll, peers: &Peers, way: Way, secured: Secured) {
        let host = peers.host_at(way.peer).filter(|host| self.counts.may_come_from(*host));
        let Some(host) = host else {
            self.stats.refused += 1;
            return;
        };
        let id = self.insert(Stream::from(now, (host, way.own), secured));
        self.stats.accepted += 1;
        self.encrypted += 1;
        self.set_deadline(id, Some(now + T_HELLO));
        let fd = self.get(id).and_then(Stream::fd).expect("it has one");
        match watch(epoll, fd, id.place) {
            // Bytes that came with the handshake are not in the socket any more.
            Ok(()) => self.wake(id),
            Err(_) => drop(self.remove(id)),
        }
    }

    /// Streams that wait for what does not come any more, which says nothing of other hosts.
    pub(super) fn without_pipe(&mut self) -> Vec<StreamId> {
        let all = self.places.iter_mut().zip(0..).filter_map(|(place, at)| {
            let stream = place.stream.as_deref_mut().filter(|stream| !stream.has_pipe())?;
            stream.has_failed_here = true;
            Some(StreamId { place: at, generation: place.generation })
        });
        all.collect()
    }

    /// Another host has connected in the clear, and streams go by TLS.
    pub(super) fn refuse_plain(&mut self, now: Instant, peer: IpAddr) {
        self.stats.unproven += 1;
        if self.may_say(now) {
            tracing::warn!(
                %peer,
                "toe: a host does not encrypt streams, and this one does: its guests use guest TCP"
            );
        }
    }

    /// Whether something is said of a host that is not believed, which then is.
    fn may_say(&mut self, now: Instant) -> bool {
        let may = self.said.is_none_or(|at| now.since(at) >= T_SAY);
        if may {
            self.said = Some(now);
        }
        may
    }

    /// A stream of this host's has ended before the other host had said anything in it. After a
    /// handshake, that is its answer to the certificate.
    pub(in super::super) fn note_unproven(
        &mut self,
        now: Instant,
        stream: &Stream,
        peer: Option<IpAddr>,
    ) {
        if stream.ours != Side::Opener || !stream.is_sealed() {
            return;
        }
        self.stats.unproven += 1;
        if self.may_say(now) {
            let why = stream.why().unwrap_or("it hung up, or said nothing").to_owned();
            tracing::warn!(
                ?peer,
                why,
                "toe: a host does not take an encrypted stream: its guests are reached by guest TCP"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use nix::sys::epoll::EpollCreateFlags;

    use super::*;
    use crate::sockets::trust::tests::encrypting;

    const NOW: Instant = Instant::from_secs(1000);

    #[test]
    fn a_guest_that_begins_streams_and_resets_them_has_no_more_handshakes_than_others_leave() {
        let (trust, thread) = encrypting();
        let mut streams = Streams { trust: Some(trust), ..Streams::default() };
        streams.counts.set_most(4096);
        let (epoll, peers) =
            (Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).unwrap(), Peers::default());
        let [own, peer] = [1, 2].map(|n| IpAddr::from([192, 0, 2, n]));
        let take =
            |streams: &mut Streams, device| streams.take(NOW, (device, own), (HostId(7), peer));
        let mut begun = Vec::new();
        while begun.len() < 1000
            && let Some(id) = take(&mut streams, 0)
        {
            begun.push(id);
            assert!(streams.remove(id).is_some()); // its guest has reset it
        }
        assert_eq!(begun.len(), BEGUN_MAX / 2);
        let other = take(&mut streams, 1).expect("another guest finds some");
        // Each of them counts until it is answered, and is then nobody's.
        for (n, id) in (1..).zip(begun) {
            thread.says(Opening::Failed(id.tag(), true));
            assert!(streams.hear_openings(NOW, &epoll, &peers).is_empty());
            assert_eq!(streams.handshakes.all.len(), 1 + BEGUN_MAX / 2 - n);
        }
        assert!(take(&mut streams, 0).is_some());
        thread.says(Opening::Failed(other.tag(), false));
        assert_eq!(streams.hear_openings(NOW, &epoll, &peers), [other]);
    }

    #[test]
    fn a_guest_leaves_as_many_handshakes_to_a_host_as_it_has() {
        let mut handshakes = Handshakes::default();
        let id = |place| StreamId { place, generation: 1 };
        let mut next = 0..;
        let mut all = |handshakes: &mut Handshakes, device| {
            let mut begun = Vec::new();
            while handshakes.may_begin(HostId(7), device) {
                begun.push(id(next.next().unwrap()));
                handshakes.begin(begun[begun.len() - 1], HostId(7), device);
            }
            begun
        };
        let of_first = all(&mut handshakes, 0);
        let others: Vec<_> = (1..9).map(|guest| all(&mut handshakes, guest).len()).collect();
        assert_eq!((of_first.len(), &others[..]), (128, &[64, 32, 16, 8, 4, 2, 1, 1][..]));
        assert!(!handshakes.may_begin(HostId(7), 9) && handshakes.may_begin(HostId(8), 0));
        // Those that are done are anybody's, and once.
        handshakes.end(of_first[0]);
        handshakes.end(of_first[0]);
        assert_eq!(all(&mut handshakes, 9).len(), 1);
        for id in of_first.into_iter().skip(1) {
            handshakes.end(id);
        }
        assert!(handshakes.may_begin(HostId(7), 0));
    }
}
