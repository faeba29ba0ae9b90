//! Probes: does the path to a peer take what the configuration says?
//!
//! A layer on the way that silently drops long packets hangs every transfer: nothing tells the
//! sender. So a peer is asked by a frame in the tunnel that is as long as the size in question, and
//! answers it with a short one (RFC 8899; EtherType 0x88B5 is for local experiments, IEEE 802). The
//! destination is an address that no bridge forwards (IEEE 802.1Q, table 8-1), so a peer of another
//! kind drops it.
//!
//! 1. A probe leaves beside a frame for its peer, if one is due: without traffic there are none.
//! 2. A peer that has never answered one is none of ours. It is asked again every [`PATH_MTU_AGE`].
//! 3. First comes a short probe, which says that the peer answers, then one of the whole width. If
//!    that is lost [`PROBE_TRIES`] times, and the short one is answered once more, the path is as
//!    narrow as the short one until a search by halves finds more.
//! 4. A path that takes all is looked at every [`PROBE_INTERVAL`], a narrow one every
//!    [`PATH_MTU_AGE`]; either at once if ICMP speaks of it.
//! 5. A probe for which this host's own kernel had no room was not lost, and is sent once more.
//!
//! An answer repeats a number that nobody knows who has not seen the probe.

use super::PeerId;
use crate::limits::{
    PATH_MTU_AGE, PROBE_AWAY, PROBE_INTERVAL, PROBE_STEP, PROBE_TRIES, PROBE_WAIT,
};
use crate::switch::Mac;
use crate::time::Instant;

/// Bytes of the inner packet that every path takes: what IPv6 asks for (RFC 8200 section 5), with
/// two VLAN tags.
pub const PROBE_BASE: u16 = 1280 + 2 * 4;

/// Nearest bridge.
const TO: Mac = [0x01, 0x80, 0xc2, 0, 0, 0x0e];
const FROM: Mac = [0xfa, b'n', b'p', 0, 0, 0];
/// EtherType and what distinguishes these frames from others of it.
const MAGIC: [u8; 10] = *b"\x88\xb5np-probe";
const MAGIC_AT: usize = 12;
const KIND_AT: usize = MAGIC_AT + MAGIC.len();
const SIZE_AT: usize = KIND_AT + 2;
const NONCE_AT: usize = SIZE_AT + 2;
const LEN: usize = NONCE_AT + 8;
/// Bytes of an Ethernet header, and of the shortest frame.
const ETHERNET: usize = 14;
const FRAME_MIN: usize = 60;
const ASKS: u8 = 1;
const ANSWERS: u8 = 2;

/// A probe, or the answer to one.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Probe {
    is_answer: bool,
    /// Bytes of the inner packet in question.
    size: u16,
    nonce: u64,
}

impl Probe {
    /// `None`: the frame is something else, or not whole.
    pub(super) fn parse(frame: &[u8]) -> Option<Self> {
        let head = frame.first_chunk::<LEN>()?;
        if head[..6] != TO || head[MAGIC_AT..KIND_AT] != MAGIC {
            return None;
        }
        let size = u16::from_be_bytes([head[SIZE_AT], head[SIZE_AT + 1]]);
        let nonce = head.last_chunk().map_or(0, |nonce| u64::from_be_bytes(*nonce));
        let is_answer = head[KIND_AT] == ANSWERS;
        // No question is shorter than its answer (SEC-07).
        let is_whole =
            is_answer || frame.len() == ETHERNET + usize::from(size) && frame.len() >= FRAME_MIN;
        (is_whole && (is_answer || head[KIND_AT] == ASKS)).then_some(Self {
            is_answer,
            size,
            nonce,
        })
    }

    fn emit(self) -> Vec<u8> {
        let kind = [if self.is_answer { ANSWERS } else { ASKS }, 0];
        let [size, nonce] = [&self.size.to_be_bytes()[..], &self.nonce.to_be_bytes()];
        let mut frame = [&TO[..], &FROM, &MAGIC, &kind, size, nonce].concat();
        let len = if self.is_answer { FRAME_MIN } else { ETHERNET + usize::from(self.size) };
        frame.resize(len.max(LEN), 0);
        frame
    }

    /// The frame that answers it. `None`: it is an answer itself.
    pub(super) fn answer(self) -> Option<Vec<u8>> {
        (!self.is_answer).then(|| Self { is_answer: true, ..self }.emit())
    }
}

/// State of the path to one peer.
#[derive(Clone, Copy, Debug)]
struct Path {
    peer: PeerId,
    /// It has answered a probe: it is one of ours.
    answers: bool,
    /// The probe in question, and how often it was sent; no size: there is none.
    asked: Option<u16>,
    nonce: u64,
    tries: u8,
    /// Of this search: what was answered, and the least that was lost.
    fits: u16,
    lost: Option<u16>,
    /// A size that was lost: whether it was too long, or the peer is away, the answer to the probe
    /// in question tells.
    doubted: Option<u16>,
    /// The width that is known, if it is less than the configured one.
    narrow: Option<u16>,
    /// When there is something to do.
    due: Instant,
}

/// The paths to all peers.
#[derive(Debug, Default)]
pub(super) struct Probes(Vec<Path>);

impl Probes {
    /// Nothing is known any more.
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// Peers have other places now; `None`: one is gone.
    pub(super) fn renumber(&mut self, place: impl Fn(PeerId) -> Option<PeerId>) {
        self.0.retain_mut(|path| place(path.peer).map(|now| path.peer = now).is_some());
    }

    /// The narrowest known width of these paths: of one peer's, or of all.
    pub(super) fn narrow(&self, peer: Option<PeerId>) -> Option<u16> {
        let of = |path: &&Path| peer.is_none_or(|peer| peer == path.peer);
        self.0.iter().filter(of).filter_map(|path| path.narrow).min()
    }

    /// There is something to do for `peer`.
    pub(super) fn is_due(&self, now: Instant, peer: PeerId) -> bool {
        let path = self.0.iter().find(|path| path.peer == peer);
        path.is_none_or(|path| now >= path.due)
    }

    /// A frame leaves for `peer`, whose path should take `mtu` bytes: the probe that goes with it,
    /// if one is due. `nonce`: a number that nobody else knows.
    pub(super) fn poll(
        &mut self,
        now: Instant,
        peer: PeerId,
        mtu: u16,
        nonce: impl FnOnce() -> u64,
    ) -> Option<Vec<u8>> {
        let path = self.path(now, peer);
        if now < path.due {
            return None;
        }
        if path.asked.is_some() && path.tries == PROBE_TRIES {
            path.lose(now);
        }
        if now < path.due {
            return None;
        }
        let size = *path.asked.get_or_insert_with(|| {
            (path.fits, path.lost, path.doubted) = (0, None, None);
            PROBE_BASE.min(mtu)
        });
        if path.tries == 0 {
            path.nonce = nonce();
        }
        path.tries += 1;
        path.due = now + PROBE_WAIT;
        Some(Probe { is_answer: false, size, nonce: path.nonce }.emit())
    }

    /// The last probe for `peer` has not left: it is not lost, and leaves after [`PROBE_WAIT`].
    pub(super) fn handle_unsent(&mut self, peer: PeerId) {
        let path = self.0.iter_mut().find(|path| path.peer == peer);
        path.into_iter().for_each(|path| path.tries = path.tries.saturating_sub(1));
    }

    /// `peer` has answered.
    pub(super) fn handle_answer(&mut self, now: Instant, peer: PeerId, answer: Probe, mtu: u16) {
        let path = self.path(now, peer);
        if !answer.is_answer && !path.answers && path.asked.is_none() {
            path.due = path.due.min(now + PROBE_AWAY); // it is one of ours, and was away
        }
        let is_due = answer.is_answer && path.tries > 0 && answer.nonce == path.nonce;
        if !is_due || path.asked != Some(answer.size) {
            return;
        }
        path.answers = true;
        path.fits = answer.size;
        if let Some(lost) = path.doubted.take() {
            path.lost = Some(lost);
            // That more than the known width is lost is no news.
            path.narrow = path.narrow.filter(|&narrow| narrow < lost).or(Some(path.fits));
        } else if path.fits >= mtu {
            path.narrow = None;
        } else if path.lost.is_some() {
            path.narrow = Some(path.narrow.map_or(path.fits, |narrow| narrow.max(path.fits)));
        }
        path.go_on(now, mtu);
    }

    /// Somebody says that the path is narrow. `true`: a probe will show whether it is, and nothing
    /// else need be believed.
    pub(super) fn suspect(&mut self, now: Instant, peer: PeerId) -> bool {
        let path = self.path(now, peer);
        if path.answers && path.asked.is_none() {
            path.due = now;
        }
        path.answers
    }

    fn path(&mut self, now: Instant, peer: PeerId) -> &mut Path {
        let at = self.0.iter().position(|path| path.peer == peer).unwrap_or_else(|| {
            self.0.push(Path {
                peer,
                answers: false,
                asked: None,
                nonce: 0,
                tries: 0,
                fits: 0,
                lost: None,
                doubted: None,
                narrow: None,
                due: now,
            });
            self.0.len() - 1
        });
        &mut self.0[at]
    }
}

impl Path {
    /// The probe in question was lost as often as there are tries.
    fn lose(&mut self, now: Instant) {
        let asked = self.asked.take().unwrap_or(0);
        self.tries = 0;
        if self.fits > 0 && self.doubted.is_none() {
            (self.doubted, self.asked, self.due) = (Some(asked), Some(self.fits), now);
            return;
        }
        // It answers nothing, long or short: it is none of ours, or it is away. Of one that has
        // answered before that is known when it does not answer the next time, either.
        self.doubted = None;
        if core::mem::take(&mut self.answers) {
            self.due = now + PROBE_AWAY;
        } else {
            (self.narrow, self.due) = (None, now + PATH_MTU_AGE);
        }
    }

    /// The next size of a search that looks for `mtu`, or its end.
    fn go_on(&mut self, now: Instant, mtu: u16) {
        self.tries = 0;
        let left = self.lost.unwrap_or(mtu).saturating_sub(self.fits);
        (self.asked, self.due) = match self.lost {
            None if left == 0 => (None, now + PROBE_INTERVAL),
            None => (Some(mtu), now),
            Some(_) if left <= PROBE_STEP => {
                self.narrow = Some(self.fits);
                (None, now + PATH_MTU_AGE)
            }
            Some(_) => (Some(self.fits + left / 2), now),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::time::Duration;

    const PEER: PeerId = PeerId(3);
    const MTU: u16 = 1450;

    /// A host that sends a frame to its peer every 100 ms, over a path that takes so much.
    struct World {
        probes: Probes,
        now: Instant,
        sent: Vec<u16>,
        takes: u16,
        is_ours: bool,
        /// This host's kernel has no room for probes.
        is_full: bool,
    }

    impl World {
        fn new(takes: u16, is_ours: bool) -> Self {
            let (probes, now) = (Probes::default(), Instant::from_secs(1000));
            Self { probes, now, sent: Vec::new(), takes, is_ours, is_full: false }
        }

        fn runs(&mut self, time: Duration) {
            let end = self.now + time;
            while self.now < end {
                let nonce = self.sent.len() as u64 + 7;
                if let Some(frame) = self.probes.poll(self.now, PEER, MTU, || nonce) {
                    let probe = Probe::parse(&frame).unwrap();
                    assert_eq!(frame.len(), 14 + usize::from(probe.size));
                    self.sent.push(probe.size);
                    if self.is_full {
                        self.probes.handle_unsent(PEER);
                    } else if self.is_ours && probe.size <= self.takes {
                        let answer = Probe::parse(&probe.answer().unwrap()).unwrap();
                        self.probes.handle_answer(self.now, PEER, answer, MTU);
                    }
                }
                self.now = self.now + Duration::from_millis(100);
            }
        }

        fn width(&self) -> u16 {
            self.probes.narrow(Some(PEER)).unwrap_or(MTU)
        }
    }

    #[test]
    fn a_path_that_takes_all_is_asked_twice_and_then_now_and_then() {
        let mut world = World::new(MTU, true);
        world.runs(Duration::from_secs(9));
        assert_eq!((&world.sent[..], world.width()), (&[PROBE_BASE, MTU][..], MTU));
        world.runs(Duration::from_secs(2));
        assert_eq!(world.sent.len(), 4);
    }

    #[test]
    fn probes_that_do_not_leave_are_not_lost() {
        // None leaves; and the long one does not, after the short one was answered.
        for before in [Duration::ZERO, Duration::from_millis(100)] {
            let mut world = World::new(MTU, true);
            world.runs(before);
            world.is_full = true;
            world.runs(Duration::from_secs(20));
            let asked = *world.sent.last().unwrap();
            assert!(world.sent.iter().filter(|&&size| size == asked).count() >= 20, "no search");
            assert_eq!(world.width(), MTU);
            world.is_full = false;
            world.takes = 1400;
            world.runs(Duration::from_secs(5));
            assert!(world.width() <= 1400, "what leaves and is lost, is");
        }
    }

    #[test]
    fn a_path_that_silently_drops_what_is_long_is_found_in_seconds_and_its_width_soon() {
        for takes in [PROBE_BASE, 1300, 1400, MTU - 1] {
            let mut world = World::new(takes, true);
            world.runs(Duration::from_millis(3500));
            assert!(world.width() <= takes, "{takes}");
            world.runs(Duration::from_secs(30));
            let width = world.width();
            assert!((takes - PROBE_STEP..=takes).contains(&width), "{takes}: {width}");
            // It keeps that while it is asked again, and not for ever.
            world.runs(PATH_MTU_AGE);
            assert!((takes - PROBE_STEP..=takes).contains(&world.width()), "{takes}");
            world.takes = MTU;
            world.runs(PATH_MTU_AGE.saturating_mul(2)); // a search may have been under way
            assert_eq!(world.width(), MTU, "it is wide again");
        }
    }

    #[test]
    fn a_path_that_becomes_narrow_is_noticed() {
        let mut world = World::new(MTU, true);
        world.runs(Duration::from_secs(10));
        world.takes = 1350;
        assert!(world.probes.suspect(world.now, PEER), "it answers, so nobody else is believed");
        world.runs(Duration::from_secs(5));
        assert!(world.width() <= 1350);
        let mut world = World::new(MTU, true);
        world.runs(Duration::from_secs(10));
        world.takes = 1350;
        world.runs(PROBE_INTERVAL + PROBE_WAIT.saturating_mul(4));
        assert!(world.width() <= 1350, "nobody has said so");
    }

    #[test]
    fn who_never_answers_is_asked_little_and_keeps_the_configured_width() {
        let mut world = World::new(MTU, false);
        world.runs(Duration::from_secs(590));
        assert_eq!(world.sent, [PROBE_BASE; PROBE_TRIES as usize]);
        assert_eq!(world.width(), MTU);
        assert!(!world.probes.suspect(world.now, PEER), "what is said of it may be true");
    }

    #[test]
    fn one_of_ours_that_goes_away_makes_no_path_narrow() {
        // At once, and between its answers to the short probe and to the long one.
        for before in [Duration::from_secs(10), Duration::from_millis(100)] {
            let mut world = World::new(MTU, true);
            world.runs(before);
            world.takes = 0;
            for _ in 0..600 {
                world.runs(Duration::from_secs(1));
                assert_eq!(world.width(), MTU);
            }
        }
    }

    #[test]
    fn one_that_answers_no_more_is_none_of_ours_any_more() {
        let mut world = World::new(1400, true);
        world.runs(Duration::from_secs(60));
        assert!(world.width() <= 1400 && world.probes.suspect(world.now, PEER));
        world.is_ours = false;
        world.runs(PATH_MTU_AGE.saturating_mul(3));
        assert!(!world.probes.suspect(world.now, PEER), "ICMP is believed again");
        assert_eq!(world.width(), MTU, "and nothing else says that it is narrow");
    }

    #[test]
    fn a_question_shows_that_a_peer_is_one_of_ours_after_all() {
        let mut world = World::new(1400, false);
        world.runs(Duration::from_secs(10));
        world.is_ours = true;
        let question = Probe { is_answer: false, size: PROBE_BASE, nonce: 1 };
        for _ in 0..3 {
            world.probes.handle_answer(world.now, PEER, question, MTU);
        }
        assert_eq!(world.sent.len(), usize::from(PROBE_TRIES), "not at once");
        world.runs(PROBE_AWAY + Duration::from_secs(5));
        assert!(world.width() <= 1400);
    }

    #[test]
    fn a_path_that_is_looked_at_again_does_not_become_narrower_meanwhile() {
        let mut world = World::new(1400, true);
        world.runs(Duration::from_secs(60));
        let width = world.width();
        assert!(width > PROBE_BASE);
        for _ in 0..7000 {
            world.runs(Duration::from_millis(100));
            assert!((width - PROBE_STEP..=1400).contains(&world.width()), "{}", world.width());
        }
    }

    #[test]
    fn sec_07_no_question_is_shorter_than_its_answer() {
        let question = |size| Probe { is_answer: false, size, nonce: 1 }.emit();
        assert!(Probe::parse(&question(45)).is_none() && Probe::parse(&question(46)).is_some());
    }

    #[test]
    fn what_is_known_goes_with_a_peer_to_its_new_place() {
        let mut world = World::new(1400, true);
        world.runs(Duration::from_secs(60));
        let width = world.width();
        world.probes.renumber(|PeerId(at)| Some(PeerId(at + 1)));
        assert_eq!(world.probes.narrow(Some(PeerId(4))), Some(width));
        world.probes.renumber(|_| None);
        assert_eq!(world.probes.narrow(None), None);
    }

    #[test]
    fn an_answer_that_was_not_asked_for_says_nothing() {
        let mut world = World::new(MTU, false);
        world.runs(Duration::from_millis(500));
        for (size, nonce) in [(PROBE_BASE, 8), (MTU, 7)] {
            let forged = Probe { is_answer: true, size, nonce };
            world.probes.handle_answer(world.now, PEER, forged, MTU);
        }
        assert!(!world.probes.suspect(world.now, PEER));
    }

    #[test]
    fn frames_that_are_no_probes_are_none() {
        let probe = Probe { is_answer: false, size: 1300, nonce: 5 };
        let frame = probe.emit();
        assert_eq!(Probe::parse(&frame), Some(probe));
        assert_eq!(Probe::parse(&frame[..1000]), None, "it was cut");
        let answer = probe.answer().unwrap();
        assert_eq!((answer.len(), Probe::parse(&answer).unwrap().answer()), (FRAME_MIN, None));
        for at in [0, 13, 14, KIND_AT] {
            let mut other = frame.clone();
            other[at] ^= 0x80;
            assert_eq!(Probe::parse(&other), None, "{at}");
        }
        assert_eq!(Probe::parse(&frame[..LEN - 1]), None);
    }
}
