//! Probes of the paths between hosts (`core::overlay`), and errors about these paths.
//!
//! The host has three peers: one of ours, one of another kind that answers nothing, and one that
//! sees every datagram for it and sends anything. A stranger sends in the name of each, but sees
//! nothing. Frames leave, paths become narrow, datagrams are lost and late, errors are true or
//! made up, the MTU and the list of peers change.
//!
//! After every step: no path is narrower than all of Ethernet needs; a width that is less than the
//! configured one has a cause; nothing that one peer or a stranger sends changes the width of
//! another's path; no answer is longer than its question. At the end all behave, and each width is
//! that of its path.

use arbitrary::{Arbitrary, Unstructured};
use nightporter_core::limits::{OVERLAY_DATAGRAM_BYTES_MAX, PROBE_STEP};
use nightporter_core::overlay::ecn::Ecn;
use nightporter_core::overlay::{Overlay, OverlayConfig, PROBE_BASE, PeerId, To};
use nightporter_core::time::{Duration, Instant};
use nightporter_core::wire::vxlan;

use crate::noise;

const VNI: u32 = 7;
const OPS_MAX: usize = 200;
/// Bytes of a datagram before the inner packet.
const BEFORE_PACKET: usize = vxlan::LEN + 14;
/// Of a frame: destination, source, EtherType, "np-probe", kind, 0, size, nonce.
const PROBE_LEN: usize = 34;
/// Answers that are under way.
const LATE_MAX: usize = 8;
const BETWEEN_FRAMES: Duration = Duration::from_millis(1100);
/// Longer than every width that was wrong counts.
const HEALS: Duration = Duration::from_secs(2400);
const HEAL_STEP: Duration = Duration::from_secs(10);

/// The peers, by their places in [`World::peers`].
const OURS: usize = 0;
const SILENT: usize = 1;
const LIAR: usize = 2;

#[derive(Arbitrary, Clone, Debug)]
enum Op {
    /// So many milliseconds go by.
    Wait(u16),
    /// Frames leave for a peer; the probe beside each may find no room, be lost, or be answered
    /// late: two bits each.
    Frames { to: u8, fates: u16 },
    /// The oldest answer under way arrives.
    Arrives,
    /// The liar answers or asks, with the number that it was sent last or another.
    Lies { kind: u8, size: u16, nonce: Option<u64>, is_cut: bool },
    /// A stranger sends anything of our EtherType in a peer's name.
    Forges { from: u8, kind: u8, size: u16, nonce: u64 },
    /// Any datagram from any peer.
    Datagram { from: u8, vni: bool, bytes: Vec<u8> },
    /// A path takes packets of so many bytes from now on.
    Path { of: u8, width: u16 },
    /// An error about a path, as the port takes it.
    Error { of: u8, mtu: u16 },
    /// Another MTU.
    Mtu(u16),
    /// Peers by their bits, from this one on.
    Peers { bits: u8, first: u8 },
}

/// The fate of a probe.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Fate {
    Arrives,
    Unsent,
    Lost,
    Late,
}

/// The other end of a path.
#[derive(Clone, Copy, Debug)]
struct Peer {
    /// Bytes of the longest inner packet that the path takes.
    takes: u16,
    /// Since the host knows of it something was lost, or said by somebody who was believed.
    was_doubted: bool,
}

struct World {
    host: Overlay,
    /// One of ours, which answers.
    other: Overlay,
    now: Instant,
    mtu: u16,
    peers: [Peer; 3],
    /// Where each is in the overlay's list, if it is there.
    places: [Option<PeerId>; 3],
    /// Answers of ours that are under way.
    late: Vec<Vec<u8>>,
    /// The number of the last probe that the liar was sent.
    heard: u64,
}

/// Judges one input.
pub fn run(data: &[u8]) {
    let mut u = Unstructured::new(data);
    let Ok(mtu) = u.arbitrary::<u16>() else { return };
    let mut world = World::new(configured(mtu));
    for _ in 0..OPS_MAX {
        let Ok(op) = u.arbitrary::<Op>() else { break };
        world.does(&op);
        world.holds();
        if u.is_empty() {
            break;
        }
    }
    world.heals();
}

/// Operations without a pattern.
#[must_use]
pub fn seeds() -> Vec<Vec<u8>> {
    (1..9).map(|n| noise(n, 1500)).collect()
}

/// An MTU that a configuration can have.
fn configured(mtu: u16) -> u16 {
    1280 + mtu % 8000
}

fn address(host: usize) -> std::net::IpAddr {
    [192, 0, 2, u8::try_from(host).expect("three") + 2].into()
}

/// A datagram with a frame of a probe's form.
fn probe(kind: u8, size: u16, nonce: u64, len: usize) -> Vec<u8> {
    let frame = [&b"\x01\x80\xc2\x00\x00\x0e\xfanp\0\0\0\x88\xb5np-probe"[..], &[kind, 0]].concat();
    let mut frame = [&frame[..], &size.to_be_bytes(), &nonce.to_be_bytes()].concat();
    frame.resize(len.max(PROBE_LEN), 0);
    [&vxlan::emit(VNI)[..], &frame].concat()
}

/// The kind, the size and the number of a probe.
fn read(datagram: &[u8]) -> (u8, u16, u64) {
    let frame = &datagram[vxlan::LEN..];
    let nonce = frame[26..PROBE_LEN].try_into().expect("eight bytes");
    (frame[22], u16::from_be_bytes([frame[24], frame[25]]), u64::from_be_bytes(nonce))
}

impl World {
    fn new(mtu: u16) -> Self {
        let overlay = |seed| {
            let peers = (0..3).map(address).collect();
            Overlay::new(&OverlayConfig { vni: VNI, peers, mtu, hash_seeds: [seed; 4] })
        };
        let peer = Peer { takes: u16::MAX, was_doubted: false };
        Self {
            host: overlay(1),
            other: overlay(2),
            now: Instant::from_secs(1000),
            mtu,
            peers: [peer; 3],
            places: [0, 1, 2].map(|place| Some(PeerId(place))),
            late: Vec::new(),
            heard: 0,
        }
    }

    /// A size that is asked for, as often as any other.
    fn likely(&self, size: u16) -> u16 {
        [PROBE_BASE.min(self.mtu), self.mtu, size, size][usize::from(size) % 4]
    }

    fn is_due(&self, peer: usize) -> Option<bool> {
        Some(self.host.is_probe_due(self.now, self.places[peer]?))
    }

    fn width(&self, peer: usize) -> Option<u16> {
        Some(self.host.mtu(self.now, To::Peer(self.places[peer]?)))
    }

    fn does(&mut self, op: &Op) {
        let which = |peer: u8| usize::from(peer) % 3;
        match op {
            Op::Wait(ms) => self.now = self.now + Duration::from_millis(u64::from(*ms)),
            Op::Frames { to, fates } => {
                for n in 0..u16::BITS / 2 {
                    let all = [Fate::Arrives, Fate::Unsent, Fate::Lost, Fate::Late];
                    self.sends(which(*to), all[usize::from(fates >> (2 * n)) % 4]);
                    self.now = self.now + BETWEEN_FRAMES;
                    self.holds();
                }
            }
            Op::Arrives => {
                if !self.late.is_empty() {
                    let answer = self.late.remove(0);
                    self.gets(OURS, &answer);
                }
            }
            Op::Lies { kind, size, nonce, is_cut } => {
                let size = self.likely(*size);
                let len = if *is_cut { 60 } else { 14 + usize::from(size) };
                let lie = probe(kind % 4, size, nonce.unwrap_or(self.heard), len);
                self.peers[LIAR].was_doubted = true;
                self.gets(LIAR, &lie);
            }
            Op::Forges { from, kind, size, nonce } => {
                let size = self.likely(*size);
                let known = |world: &Self| [0, 1, 2].map(|at| (world.is_due(at), world.width(at)));
                let before = known(self);
                let forged = probe(kind % 4, size, *nonce, 14 + usize::from(size));
                self.gets(which(*from), &forged);
                assert_eq!(known(self), before, "a stranger is believed");
            }
            Op::Datagram { from, vni, bytes } => {
                let vni = if *vni { VNI } else { VNI + 1 };
                let datagram = [&vxlan::emit(vni)[..], bytes].concat();
                self.gets(which(*from), &datagram);
                self.gets(which(*from), bytes);
            }
            Op::Path { of, width } => {
                let peer = &mut self.peers[which(*of)];
                peer.takes = (*width).max(PROBE_BASE);
                peer.was_doubted |= peer.takes < self.mtu;
            }
            Op::Error { of, mtu } => self.is_told(which(*of), *mtu),
            Op::Mtu(mtu) => {
                self.mtu = configured(*mtu);
                self.host.set_mtu(self.mtu);
                (0..3).for_each(|peer| self.forgets(peer));
            }
            Op::Peers { bits, first } => self.lists(|place| {
                let peer = (place + usize::from(*first)) % 3;
                (bits & (1 << peer) != 0).then_some(peer)
            }),
        }
    }

    /// The host's list of peers; `None`: one fewer.
    fn lists(&mut self, peer: impl Fn(usize) -> Option<usize>) {
        let listed: Vec<usize> = (0..3).filter_map(peer).collect();
        self.host.set_peers(&listed.iter().copied().map(address).collect::<Vec<_>>());
        for peer in 0..3 {
            self.places[peer] = self.host.peer(address(peer));
            let at = listed.iter().position(|listed| *listed == peer);
            assert_eq!(self.places[peer].map(|place| usize::from(place.0)), at);
            if at.is_none() {
                self.forgets(peer);
            }
        }
    }

    /// Nothing is known of the path to a peer any more.
    fn forgets(&mut self, peer: usize) {
        let narrow = self.peers[peer].takes < self.mtu;
        self.peers[peer].was_doubted = narrow || peer == LIAR;
    }

    /// A frame leaves for a peer, and perhaps a probe beside it.
    fn sends(&mut self, to: usize, fate: Fate) {
        let Some(place) = self.places[to] else { return };
        let is_due = self.host.is_probe_due(self.now, place);
        let Some(datagram) = self.host.poll_probe(self.now, place) else { return };
        assert!(is_due, "nobody looked for it");
        assert!(Overlay::is_probe(&datagram));
        let (kind, size, nonce) = read(&datagram);
        assert_eq!((kind, datagram.len()), (1, BEFORE_PACKET + usize::from(size)));
        assert!(size >= PROBE_BASE.min(self.mtu) && size <= self.mtu, "{size} of {}", self.mtu);
        assert!(datagram.len() <= OVERLAY_DATAGRAM_BYTES_MAX);
        if to == LIAR {
            self.heard = nonce;
        }
        if fate == Fate::Unsent {
            return self.host.handle_unsent_probe(place);
        }
        self.peers[to].was_doubted |= fate != Fate::Arrives;
        if fate == Fate::Lost || to != OURS || size > self.peers[to].takes {
            return;
        }
        let answer = self.other.handle_probe(self.now, PeerId(0), &datagram);
        let answer = answer.expect("a probe").expect("a question");
        if fate == Fate::Arrives {
            self.gets(OURS, &answer);
        } else if self.late.len() < LATE_MAX {
            self.late.push(answer);
        }
    }

    /// A datagram arrives from a peer, or in its name.
    fn gets(&mut self, from: usize, datagram: &[u8]) {
        let Some(place) = self.places[from] else { return };
        let widths = |world: &Self| [0, 1, 2].map(|peer| world.width(peer));
        let before = widths(self);
        let Some(answer) = self.host.handle_probe(self.now, place, datagram) else {
            // So it is a frame, or nothing.
            let _ = self.host.handle_datagram(self.now, place, Ecn::NotEct, &mut datagram.to_vec());
            assert_eq!(widths(self), before);
            return;
        };
        assert!(Overlay::is_probe(datagram));
        let now = widths(self);
        for peer in (0..3).filter(|peer| *peer != from) {
            assert_eq!(now[peer], before[peer], "peer {from} speaks for peer {peer}");
        }
        let Some(answer) = answer else { return };
        assert!(answer.len() <= datagram.len(), "{} of {}", answer.len(), datagram.len());
        assert_eq!(read(&answer), (2, read(datagram).1, read(datagram).2));
        let answered = self.other.handle_probe(self.now, PeerId(0), &answer);
        assert_eq!(answered, Some(None), "an answer is answered");
    }

    /// An error about the path to a peer, as the port takes it (`look_at_path`).
    fn is_told(&mut self, of: usize, mtu: u16) {
        let Some(place) = self.places[of] else { return };
        let mtu = mtu.max(PROBE_BASE);
        if mtu < self.host.mtu(self.now, To::Peer(place)) && !self.host.suspect(self.now, place) {
            self.host.note_narrow(self.now, place, mtu);
            self.peers[of].was_doubted = true;
        }
    }

    fn holds(&self) {
        let mut least = self.mtu;
        for (at, peer) in self.peers.iter().enumerate() {
            let Some(width) = self.width(at) else { continue };
            assert!((PROBE_BASE.min(self.mtu)..=self.mtu).contains(&width), "{width}, {peer:?}");
            assert!(width == self.mtu || peer.was_doubted, "{width} without a cause, {peer:?}");
            least = least.min(width);
        }
        assert_eq!(self.host.mtu(self.now, To::All), least);
    }

    /// From now on nobody lies, and frames leave for all peers all the time.
    fn heals(&mut self) {
        self.lists(Some);
        let end = self.now + HEALS;
        while self.now < end {
            (0..3).for_each(|peer| self.sends(peer, Fate::Arrives));
            self.now = self.now + HEAL_STEP;
        }
        self.holds();
        for peer in [SILENT, LIAR] {
            assert_eq!(self.width(peer), Some(self.mtu), "no more is believed of one that is mute");
        }
        let takes = self.peers[OURS].takes.min(self.mtu);
        let width = self.width(OURS).expect("it is listed");
        let least = if takes < self.mtu { takes - PROBE_STEP } else { takes };
        assert!((least..=takes).contains(&width), "{width}, where {takes} go");
    }
}
